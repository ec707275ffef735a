"""The manifest: what a publication holds, tensor by tensor, so that it can be checked again without its source.

It lies beside the weights and is a JSON object:

    {"manifest": 1, "root": ROOT,
     "files": {path: {"size", "sha256", "header", "tensors": {name: digest}}},
     "source": {"endpoint", "repo", "commit", "files": {path: "checked" | "crc" | "as delivered"}},
     "made": {"by", "layout", "plan", "options"}}

``header`` is the sha256 of everything before the data, and with it of every name, dtype, shape and offset; a tensor's
digest is the xxh3-128 of its bytes as they were read from the source, or cast. ROOT is the sha256 over the canonical
JSON of ``files``: the same for the same weights in the same cut, from any source and by any tool. It is
in the index's metadata and in the description of the commit too, which also has the sha256 of the whole manifest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel, ValidationError

from reshard.pipeline.errors import BadManifest, ReshardError
from reshard.pipeline.planning.model import MANIFEST, Plan, Receipt, Shard
from reshard.pipeline.request import LAYOUT, Options, key_of
from reshard.pipeline.tensors import Attestation
from reshard.pipeline.validation import first_problem

SCHEMA = 1


class WeightFile(BaseModel, frozen=True):
    size: int  # bytes
    sha256: str
    header: str  # sha256 of the length, the JSON and its padding
    tensors: dict[str, str]  # name -> xxh3-128


class Origin(BaseModel, frozen=True):
    """Where the bytes came from; ``repo`` is None for what is no repository, whose path says nothing elsewhere."""

    endpoint: str | None
    repo: str | None
    commit: str
    files: dict[str, Attestation]


class Making(BaseModel, frozen=True):
    by: str
    layout: int
    plan: str
    options: dict[str, Any]  # those that decide the bytes of the weights

    def known(self) -> Options:
        """The options as far as this release knows them; the usual ones where it does not take a value."""
        try:
            return Options(**{name: value for name, value in self.options.items() if name in Options.model_fields})
        except (ValidationError, ReshardError):
            return Options()

    def claims(self) -> dict[str, Any]:
        """The options that made tensors differ from the source's; none where one is unknown here."""
        names = [name for name in Options.model_fields if Options.declared(name).claimed]
        try:
            chosen = Options(**{name: self.options[name] for name in names if name in self.options})
        except (ValidationError, ReshardError):
            return {}
        return {name: getattr(chosen, name) for name in names if getattr(chosen, name) != getattr(Options(), name)}


class Manifest(BaseModel, frozen=True):
    """A manifest as it is read; ``manifest`` is its schema."""

    manifest: int
    root: str
    files: dict[str, WeightFile]
    source: Origin
    made: Making

    @property
    def actual_root(self) -> str:
        """What its root should be."""
        return root_of(self.files)


def root_of(files: Mapping[str, WeightFile]) -> str:
    return key_of({path: vars(file) for path, file in files.items()})


def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def manifest_of(plan: Plan, receipts: Mapping[str, Receipt], levels: Mapping[str, Attestation]) -> Manifest | None:
    """The manifest of what was copied; None where none is wanted, or no weights move and the old one stays right.

    ``levels`` say how source files were checked, by path.
    """
    if not plan.options.manifest or not plan.shards:
        return None
    files = recorded(plan.shards, receipts)
    pin = plan.pin
    return Manifest(
        manifest=SCHEMA,
        root=root_of(files),
        files=files,
        source=Origin(
            endpoint=pin.endpoint,
            repo=pin.named,
            commit=pin.commit,
            files={file.path: levels.get(file.path, "as delivered") for file in plan.read},
        ),
        made=Making(
            by=f"reshard {version('reshard')}", layout=LAYOUT, plan=plan.digest, options=plan.options.weights()
        ),
    )


def recorded(shards: Sequence[Shard], receipts: Mapping[str, Receipt]) -> dict[str, WeightFile]:
    """The part of a manifest that its root covers."""
    return {
        shard.path: WeightFile(
            size=shard.size,
            sha256=receipts[shard.digest].sha256,
            header=sha256_of(shard.header),
            tensors=receipts[shard.digest].tensors,
        )
        for shard in shards
    }


def render(manifest: Manifest) -> bytes:
    """The file: one line, keys sorted, the same bytes for the same manifest."""
    return (
        json.dumps(manifest, default=vars, sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n"
    ).encode()


def parse(content: bytes) -> Manifest:
    """The manifest that ``content`` is; raises BadManifest, also for the schema of a newer release."""
    try:
        manifest = Manifest.model_validate_json(content)
    except ValidationError as error:
        first = first_problem(error)
        where = f"{first.where[:100]}: " if first.loc else ""
        raise BadManifest(file=MANIFEST, why=f"{where}{first.why}") from None
    if manifest.manifest != SCHEMA:
        raise BadManifest(file=MANIFEST, why=f"schema {manifest.manifest} is not supported (only {SCHEMA})")
    return manifest
