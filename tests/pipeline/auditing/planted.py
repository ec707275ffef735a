"""Copies of a small model as a mirror has them, whole or with one fault, and the Hub on loopback full of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import numpy as np
from safetensors.numpy import save

from reshard.pipeline.planning.model import MANIFEST
from reshard.pipeline.publishing.manifest import Making, Manifest, Origin, WeightFile, render, root_of, sha256_of
from tests.hub.fixtures import Namespace
from tests.support.models import Arrays, arrays

Files = dict[str, bytes]
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
OTHERS = {
    "config.json": json.dumps({"model_type": "none-of-ours", "hidden_size": 8}).encode(),
    "generation_config.json": b'{"max_length": 20}',
    "tokenizer.json": b'{"version": "1.0"}',
    "model.sig": b"{}",  # an audit looks whether it is there; who signed what is a matter of `verify --signed-by`
}


def model(seed: int = 0) -> tuple[Arrays, Arrays]:
    """The tensors of its two files."""
    made = arrays(2, 256, seed=seed)
    names = list(made)
    return {name: made[name] for name in names[:2]}, {name: made[name] for name in names[2:]}


def files_of(first: Arrays, second: Arrays) -> Files:
    """All files of a healthy model."""
    tensors = {FIRST: first, SECOND: second}
    index = {
        "metadata": {"total_size": sum(array.nbytes for arrays in tensors.values() for array in arrays.values())},
        "weight_map": {name: path for path, arrays in tensors.items() for name in arrays},
    }
    weights = {path: save(arrays, metadata={"format": "pt"}) for path, arrays in tensors.items()}
    return {**weights, INDEX: json.dumps(index).encode(), **OTHERS}


def manifest_of(files: Files, source: str, commit: str, dtype: str, endpoint: str | None) -> bytes:
    """As reshard would have written it; the digests of tensors are made up, which headers cannot tell."""

    def recorded(data: bytes) -> WeightFile:
        end = 8 + int.from_bytes(data[:8], "little")
        tensors = dict.fromkeys(json.loads(data[8:end]).keys() - {"__metadata__"}, "0" * 32)
        return WeightFile(size=len(data), sha256=sha256_of(data), header=sha256_of(data[:end]), tensors=tensors)

    weights = {path: recorded(files[path]) for path in (FIRST, SECOND)}
    origin = Origin(endpoint=endpoint, repo=source, commit=commit, files={})
    made = Making(by="reshard 0", layout=1, plan="0" * 64, options={"dtype": dtype} if dtype != "keep" else {})
    return render(Manifest(manifest=1, root=root_of(weights), files=weights, source=origin, made=made))


def add_manifest(files: Files, source: str, commit: str, dtype: str = "keep", endpoint: str | None = None) -> Files:
    """With the manifest, to which the index refers."""
    manifest = manifest_of(files, source, commit, dtype, endpoint)
    index = json.loads(files[INDEX])
    index["metadata"]["reshard_manifest"] = json.loads(manifest)["root"]
    return {**files, INDEX: json.dumps(index).encode(), MANIFEST: manifest}


# ----------------------------------------------------------------------------------------------------- the faults


def _tensors(change: Callable[[Arrays], Arrays]) -> Callable[[int], Files]:
    def files(seed: int) -> Files:
        first, second = model(seed)
        return files_of(first, change(second))

    return files


def _index(change: Callable[[dict[str, dict[str, object]]], None]) -> Callable[[int], Files]:
    def files(seed: int) -> Files:
        made = files_of(*model(seed))
        index = json.loads(made[INDEX])
        change(index)
        return {**made, INDEX: json.dumps(index).encode()}

    return files


def _files(change: Callable[[Files], Mapping[str, bytes | None]]) -> Callable[[int], Files]:
    def files(seed: int) -> Files:
        made = files_of(*model(seed))
        return {path: data for path, data in {**made, **change(made)}.items() if data is not None}

    return files


WEIGHT, BIAS = "layer.1.weight", "layer.1.bias"
PLANTED: dict[str, Callable[[int], Files]] = {
    "tensors-lost": _tensors(lambda had: {BIAS: had[BIAS]}),
    "tensors-added": _tensors(lambda had: {**had, "layer.2.bias": had[BIAS]}),
    "shape-changed": _tensors(lambda had: {**had, WEIGHT: had[WEIGHT].reshape(-1)}),
    "dtype-changed": _tensors(lambda had: {**had, WEIGHT: had[WEIGHT].astype(np.float16)}),
    "bytes-changed": _files(lambda had: {SECOND: had[SECOND][:-1] + bytes([had[SECOND][-1] ^ 1])}),
    "file-short": _files(lambda had: {SECOND: had[SECOND][:-1]}),
    "weights-missing": _files(lambda had: {SECOND: None}),
    "index-ghost": _index(lambda index: index["weight_map"].update({"layer.9.bias": SECOND})),
    "index-missing-tensor": _index(lambda index: index["weight_map"].pop(BIAS) and None),
    "metadata-misfit": _index(lambda index: index["metadata"].update(total_size=1)),
    "file-changed": _files(lambda had: {"config.json": had["config.json"].replace(b"8", b"9")}),
    "file-missing": _files(lambda had: {"generation_config.json": None}),
    "tokenizer-changed": _files(lambda had: {"tokenizer.json": b'{"version": "1.1"}'}),
    "unsigned": _files(lambda had: {"model.sig": None}),
}


def publish(space: Namespace, name: str, files: Files, **settings: object) -> str:
    """The repository's commit."""
    space.admin.create_repo(space.repo(name), **settings)
    large = [path for path in files if path.endswith(".safetensors")]
    return space.admin.put_files(space.repo(name), files, lfs=large)


def catalog(space: Namespace, sources: Mapping[str, str]) -> str:
    """A catalog file; ``sources`` has the source's name by the target's."""
    entries = "".join(f"- {{repo: {space.repo(source)}, to: {space.repo(name)}}}\n" for name, source in sources.items())
    return f"name: mirror\nentries:\n{entries}"
