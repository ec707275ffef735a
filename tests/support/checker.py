"""An independent reader of published models: imports nothing of reshard, so it cannot share a mistake with it."""

from __future__ import annotations

import hashlib
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.support.stuck import STUCK

Fetch = Callable[[str], bytes | None]
Tensors = dict[str, tuple[str, tuple[int, ...], str]]  # name -> dtype, shape, sha256 of the bytes


def from_hub(endpoint: str, repo: str, revision: str = "main", token: str | None = None) -> Fetch:
    """Files of a repository over plain HTTP; None for what is not there."""

    def fetch(path: str) -> bytes | None:
        url = f"{endpoint}/{repo}/resolve/{quote(revision, safe='')}/{quote(path)}"
        request = urllib.request.Request(url)
        if token:
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=STUCK) as answer:
                content: bytes = answer.read()
                return content
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    return fetch


def from_folder(folder: Path) -> Fetch:
    def fetch(path: str) -> bytes | None:
        file = folder / path
        return file.read_bytes() if file.is_file() else None

    return fetch


def parse(content: bytes) -> tuple[dict[str, str], Tensors]:
    """(metadata, tensors) of one safetensors file; asserts that its data has neither holes nor overlaps."""
    length = int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    data = content[8 + length :]
    tensors: Tensors = {}
    position = 0
    for name, spec in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = spec["data_offsets"]
        assert start == position, f"{name} does not start where the tensor before it ends"
        position = stop
        tensors[name] = (spec["dtype"], tuple(spec["shape"]), hashlib.sha256(data[start:stop]).hexdigest())
    assert position == len(data), "the file does not end where its last tensor does"
    return metadata, tensors


def read_checkpoint(fetch: Fetch, stem: str = "model", folder: str = "", variant: str | None = None) -> Tensors:
    """Every tensor of a checkpoint as loaders find it: the single file, else all files of the index.

    Asserts that index and files say the same, both ways.
    """
    prefix = f"{folder}/" if folder else ""
    infix = f".{variant}" if variant else ""
    single = fetch(f"{prefix}{stem}{infix}.safetensors")
    index = fetch(f"{prefix}{stem}.safetensors.index{infix}.json")
    if single is not None:
        assert index is None, "a single file and an index are both there"
        return parse(single)[1]
    assert index is not None, f"neither {prefix}{stem}{infix}.safetensors nor its index is there"
    content = json.loads(index)
    found: Tensors = {}
    total = 0
    for file in sorted(set(content["weight_map"].values())):
        raw = fetch(prefix + file)
        assert raw is not None, f"the index names {file}, which is not there"
        metadata, tensors = parse(raw)
        assert metadata.get("format") == "pt", f"{file} has no format"
        for name in tensors:
            assert content["weight_map"].get(name) == file, f"{name} is in {file}, and the index does not say so"
        found |= tensors
        total += len(raw) - 8 - int.from_bytes(raw[:8], "little")
    assert found.keys() == content["weight_map"].keys(), "the index names tensors that no file has"
    assert content["metadata"]["total_size"] == total
    return found
