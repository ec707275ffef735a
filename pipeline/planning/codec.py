"""Plans as bytes: the digests of a plan and of its shards, and the form in which a plan is stored."""

from __future__ import annotations

import hashlib
import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache, lru_cache
from itertools import accumulate, starmap
from typing import Any, NamedTuple

from reshard.pipeline.checkpoint.formats.gguf import MAGIC
from reshard.pipeline.limits import CHUNK, OUTLINE_FILES, OUTLINE_PATHS
from reshard.pipeline.planning.model import (
    Cut,
    Edit,
    Entry,
    Group,
    Index,
    Keys,
    LeftOut,
    Output,
    Plan,
    Scale,
    Shard,
    Transports,
)
from reshard.pipeline.request import AT_ONCE, Options, canonical, key_of
from reshard.pipeline.tensors import Name, Piece, Pin, Record, StoredFile, Tensor


def shard_digest(header: bytes, entries: Sequence[Entry], files: Sequence[StoredFile], pin: Pin) -> str:
    """The digest of a shard: its header, and the identity and layout of the bytes that follow."""
    identity = cache(lambda number: canonical(_identity(files[number], pin)).decode())

    def pieces(tensor: Tensor) -> str:
        return ",".join([f"[{identity(p.file)},{p.offset},{_layout(p[2:])}" for p in tensor.pieces])

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
    head = {
        "schema": plan.schema,
        "pin": asdict(plan.pin),
        "lender": asdict(plan.lender) if plan.lender else None,
        "base": plan.base,
        "options": plan.options.model_dump(mode="json", exclude_defaults=True),
        "keys": asdict(plan.keys),
        "files": [asdict(f) for f in plan.files],
        "records": [asdict(r) for r in plan.records],
        "groups": [asdict(g) for g in plan.groups],
        "outputs": [asdict(o) for o in plan.outputs],
        "carried": [asdict(f) for f in plan.carried],
        "edits": plan.edits,
        "left_out": plan.left_out,
        "reused": plan.reused,
        "deletes": plan.deletes,
        "kept": plan.kept,
        "notes": plan.notes,
        "digest": plan.digest,
        "transports": plan.transports,
        "shares": plan.shares,
        "published": plan.published,
        "drift": plan.drift,
        "replaced": [asdict(f) for f in plan.replaced],
        "occupied": plan.occupied,
        "in_place": plan.in_place,
        "takes": plan.takes,
        "submitted": plan.submitted,
        "shards": len(plan.shards),
    }
    return StoredPlan(_pack(head), {i: _pack(_shard(s)) for i, s in enumerate(plan.shards)})


def decode_head(head: bytes) -> Plan:
    """The plan without its shards; raises KeyError on another schema, which a claim looks at."""
    data = _unpack(head)
    return Plan(
        schema=data["schema"],
        pin=Pin(**data["pin"]),
        lender=Pin(**data["lender"]) if data["lender"] else None,
        base=data["base"],
        options=Options.model_validate(data["options"]),
        keys=Keys(**data["keys"]),
        files=tuple(StoredFile(**f) for f in data["files"]),
        records=tuple(Record(**r) for r in data["records"]),
        shards=(),
        groups=tuple(_group(g) for g in data["groups"]),
        outputs=tuple(_output(o) for o in data["outputs"]),
        carried=tuple(StoredFile(**f) for f in data["carried"]),
        edits=tuple(Edit(*item) for item in data["edits"]),
        left_out=tuple(LeftOut(*item) for item in data["left_out"]),
        reused=tuple(data["reused"]),
        deletes=tuple(data["deletes"]),
        kept=tuple(data["kept"]),
        notes=tuple(data["notes"]),
        digest=data["digest"],
        transports=Transports(*data["transports"]),
        shares=data["shares"],
        published=data["published"],
        drift=tuple(data["drift"]),
        replaced=tuple(StoredFile(**f) for f in data["replaced"]),
        occupied=tuple(data["occupied"]),
        in_place=data["in_place"],
        takes=data["takes"],
        submitted=data["submitted"],
    )


class PlannedFile(NamedTuple):
    """What a plan says of one of its shards, in short."""

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
    made = [e.name, e.tensor.dtype, e.as_dtype, e.tensor.shape, [_piece(p) for p in e.tensor.pieces]]
    return [*made, e.scale.block, _stored(Entry(e.scale.tensor, e.scale.tensor.dtype))] if e.scale else made


def _piece(piece: Piece) -> list[Any]:
    return [piece.file, piece.offset, piece.at, piece.shape, piece.strides, piece.order]


def _entry(data: list[Any]) -> Entry:
    name, dtype, as_dtype, shape, pieces, *scale = data
    return Entry(
        Tensor(
            name,
            dtype,
            tuple(shape),
            tuple(
                Piece(
                    file,
                    offset,
                    tuple(at),
                    tuple(box),
                    tuple(strides) if strides is not None else None,
                    order,
                )
                for file, offset, at, box, strides, order in pieces
            ),
        ),
        as_dtype,
        Scale(_entry(scale[1]).tensor, (scale[0][0], scale[0][1])) if scale else None,
    )


def _group(data: dict[str, Any]) -> Group:
    return Group(
        data["number"],
        tuple(data["shards"]),
        tuple(data["attests"]),
        tuple(Cut(*c) for c in data["witnesses"]),
    )


def _output(data: dict[str, Any]) -> Output:
    index = data["index"]
    return Output(
        Name(**data["name"]),
        tuple(data["shards"]),
        Index(index["path"], tuple(index["shards"]), index["metadata"]) if index else None,
        data["config"],
        tuple(tuple(tie) for tie in data["ties"]),
        tuple(data["readers"]),
    )
