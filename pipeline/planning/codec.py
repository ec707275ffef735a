"""Plans as bytes: the digests of a plan and of its shards, and the form in which a plan is stored."""

from __future__ import annotations

import hashlib
import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache, lru_cache
from itertools import accumulate, starmap
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from reshard.pipeline.checkpoint.formats.gguf import MAGIC
from reshard.pipeline.limits import CHUNK, OUTLINE_FILES, OUTLINE_PATHS
from reshard.pipeline.planning.model import Entry, Plan, Scale, Shard
from reshard.pipeline.request import AT_ONCE, canonical, key_of
from reshard.pipeline.tensors import Piece, Pin, StoredFile, Tensor


def shard_digest(header: bytes, entries: Sequence[Entry], files: Sequence[StoredFile], pin: Pin) -> str:
    """The digest of a shard: its header, and the identity and layout of the bytes that follow."""
    identity = cache(lambda number: canonical(_identity(files[number], pin)).decode())

    def written(piece: Piece) -> str:
        return f"[{identity(piece[0])},{piece[1]},{_layout(piece[2:])}"  # by number: 500,000 of them at times

    def pieces(tensor: Tensor) -> str:
        return written(tensor.pieces[0]) if len(tensor.pieces) == 1 else ",".join(map(written, tensor.pieces))

    def scaled(scale: Scale) -> str:
        return f",{canonical([scale.block, *scale.tensor[1:3]]).decode()},[{pieces(scale.tensor)}]"

    # Canonical JSON as `key_of` makes it of [header, pieces], a part at a time: as a whole it takes 600 bytes a tensor.
    text = header if header[: len(MAGIC)] != MAGIC else hashlib.sha256(header).hexdigest().encode()
    found = hashlib.sha256(b'["')
    for start in range(0, len(text), CHUNK):
        found.update(canonical(text[start : start + CHUNK].decode("latin-1"))[1:-1])
    found.update(b'",[')
    separator = ""
    for first in range(0, len(entries), AT_ONCE):
        some = [
            f'["{dtype}",[{pieces(tensor)}]{scaled(scale) if scale else ""}]'
            for tensor, dtype, scale in entries[first : first + AT_ONCE]
        ]
        found.update((separator + ",".join(some)).encode())
        separator = ","
    found.update(b"]]")
    return found.hexdigest()


@lru_cache(maxsize=4096)  # few in a model, and its JSON would take half of the time
def _layout(parts: tuple[Any, ...]) -> str:
    """The canonical JSON of a piece but for its file and offset, up to the bracket that ends it."""
    return canonical(parts)[1:].decode()


def _identity(file: StoredFile, pin: Pin) -> str:
    """What a source file is, by content where the store says so, else by where it was found."""
    return file.sha256 or file.xet or key_of([*pin.origin, pin.commit, file.path])


def plan_digest(plan_without_digest: Plan) -> str:
    """The digest of a plan: what would be in the commit, and nothing about who asked or when."""
    p = plan_without_digest
    return key_of(
        {
            "schema": p.schema,
            "pin": asdict(p.pin),
            "options": p.options.content(),
            "shards": [[s.path, s.digest] for s in p.shards],
            "indexes": [[o.index.path, o.index.metadata] for o in p.outputs if o.index],
            "carried": [[f.path, f.size, f.sha256 or f.oid] for f in p.carried],
            "edits": p.edits,
            "deletes": p.deletes,
        }
    )


class StoredPlan(NamedTuple):
    """A plan as it is kept: a compressed head, and each shard on its own so that a copy loads only its group."""

    head: bytes
    shards: dict[int, bytes]


def encode(plan: Plan) -> StoredPlan:
    options = plan.options.model_dump(mode="json", exclude_defaults=True)
    head = asdict(replace(plan, shards=())) | {"options": options, "shards": len(plan.shards)}
    return StoredPlan(_pack(head), {i: _pack(_shard(s)) for i, s in enumerate(plan.shards)})


@cache
def _heads() -> TypeAdapter[Plan]:
    return TypeAdapter(Plan)  # made on use: it takes 20 ms


def decode_head(head: bytes) -> Plan:
    """The plan without its shards, of the schema of this release; a claim looks at that first."""
    return _heads().validate_python(_unpack(head) | {"shards": ()})


class PlannedFile(NamedTuple):
    path: str
    size: int  # bytes
    tensors: int


def outline(plan: Plan) -> bytes:
    """The first OUTLINE_FILES of its shards, whose paths have OUTLINE_PATHS characters at most: 1.7 kB for 200."""
    paths = accumulate(len(shard.path) for shard in plan.shards[:OUTLINE_FILES])
    kept = plan.shards[: sum(length <= OUTLINE_PATHS for length in paths)]
    return _pack([[s.path for s in kept], [s.size for s in kept], [len(s.entries) for s in kept]])


def decode_outline(data: bytes) -> list[PlannedFile]:
    return list(starmap(PlannedFile, zip(*_unpack(data), strict=True)))


def decode_shard(data: bytes) -> Shard:
    path, header, size, digest, entries, *alignment = _unpack(data)
    head = b64decode(header) if alignment else header.encode("latin-1")
    return Shard(path, tuple(_entry(e) for e in entries), head, size, digest, *alignment)


def _pack(value: Any) -> bytes:
    return zlib.compress(json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode(), 1)


def _unpack(data: bytes) -> Any:
    return json.loads(zlib.decompress(data))


def _shard(shard: Shard) -> list[Any]:
    entries = [_stored(e) for e in shard.entries]
    if shard.alignment > 1:  # of GGUF, whose zeros would make six characters each
        return [shard.path, b64encode(shard.header).decode(), shard.size, shard.digest, entries, shard.alignment]
    return [shard.path, shard.header.decode("latin-1"), shard.size, shard.digest, entries]


def _stored(e: Entry) -> list[Any]:
    made = [e.name, e.tensor.dtype, e.as_dtype, e.tensor.shape, e.tensor.pieces]
    return [*made, e.scale.block, _stored(Entry(e.scale.tensor, e.scale.tensor.dtype))] if e.scale else made


def _entry(data: list[Any]) -> Entry:
    name, dtype, as_dtype, shape, stored, *scale = data
    pieces = tuple(
        Piece(file, offset, tuple(at), tuple(box), None if strides is None else tuple(strides), order)
        for file, offset, at, box, strides, order in stored
    )
    tensor = Tensor(name, dtype, tuple(shape), pieces)
    return Entry(tensor, as_dtype, Scale(_entry(scale[1]).tensor, (scale[0][0], scale[0][1])) if scale else None)
