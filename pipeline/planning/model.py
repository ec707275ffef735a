"""The plan: the whole answer to "what will be written", as data that can be printed, stored and compared."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, NamedTuple

from reshard.pipeline.request import Options, canonical, key_of
from reshard.pipeline.tensors import Name, Piece, Pin, Record, StoredFile, Tensor, size_in_bytes

# What a publication adds beside weights and indexes: the model card, and the manifest of all digests.
CARD = "README.md"
MANIFEST = "reshard.manifest.json"
# What the metadata of an index calls the manifest's root; loaders read nothing there but what they know.
ROOT_KEY = "reshard_manifest"

# A worker that does not know a plan's schema hands the job back to one that does.
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor's place in a shard; ``as_dtype`` differs from the tensor's own only where a cast was asked for."""

    tensor: Tensor
    as_dtype: str

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def size(self) -> int:
        """Bytes in the shard."""
        return size_in_bytes(self.as_dtype, self.tensor.shape)

    @property
    def cast(self) -> bool:
        return self.as_dtype != self.tensor.dtype


@dataclass(frozen=True, slots=True)
class Shard:
    """One output file, byte for byte known but for the tensors' contents.

    ``header`` is everything before the data: the 8-byte length, the JSON, its padding. ``digest`` covers the header
    and which source bytes follow it, but not the path: equal digests are equal files.
    """

    path: str
    entries: tuple[Entry, ...]
    header: bytes
    size: int
    digest: str


class Cut(NamedTuple):
    """Where range ``number`` of a tensor of shard number ``shard`` lies, for a reader that only checks it."""

    shard: int
    name: str
    number: int
    file: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Group:
    """The shards that one lease copies, and the source files that pass whole while it does.

    ``witnesses`` are the tensors of those files that another group copies: their digests are taken here as well,
    so that a neighbour's copy is attested by a file that was read whole.
    """

    number: int
    shards: tuple[int, ...]
    attests: tuple[int, ...]
    witnesses: tuple[Cut, ...] = ()


@dataclass(frozen=True, slots=True)
class Index:
    """An index file to write: which shards it names, and its metadata."""

    path: str
    shards: tuple[int, ...]
    metadata: dict[str, object]


@dataclass(frozen=True, slots=True)
class Output:
    """What becomes of one checkpoint: its shards, whole set by whole set."""

    name: Name
    shards: tuple[int, ...]
    index: Index | None
    config: str | None  # path of the config that says how it is loaded
    ties: tuple[tuple[str, ...], ...] = ()  # names whose bytes the source stores once, written or not


class Edit(NamedTuple):
    """A carried text file that follows a wish of the user's, and its new content."""

    path: str
    content: str


class Transports(NamedTuple):
    """How weights travel: from the source, and to the target; no part of what is written."""

    source: str  # `file`, `http` or `xet`
    target: str  # `file`, `lfs` or `xet`; empty while there is no repository to ask


NO_TRANSPORT = Transports("", "")


class LeftOut(NamedTuple):
    """A source file that is neither read nor carried, and why."""

    path: str
    why: str


@dataclass(frozen=True, slots=True)
class Keys:
    """What makes two publications the same, from the cheapest to know to the dearest.

    ``request`` needs only the two places, the commit and the options; ``weights`` the source's weight hashes and the
    options; the plan's own digest needs the headers.
    """

    request: str
    weights: str | None  # None where the source has no hashes


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that will be read, written, carried, deleted and kept."""

    schema: int
    pin: Pin
    lender: Pin | None  # who lends the files that the source has not
    base: str  # the target's head when we planned
    options: Options
    keys: Keys
    files: tuple[StoredFile, ...]  # the weight files that are read
    records: tuple[Record, ...]  # stretches of those files that an archive keeps a CRC of
    shards: tuple[Shard, ...]
    groups: tuple[Group, ...]
    outputs: tuple[Output, ...]
    carried: tuple[StoredFile, ...]
    edits: tuple[Edit, ...]  # carried files whose text changes
    left_out: tuple[LeftOut, ...]
    reused: tuple[str, ...]  # weight files of our last publication that are the right ones already
    deletes: tuple[str, ...]
    kept: tuple[str, ...]  # what the target holds and we leave alone
    notes: tuple[str, ...]
    digest: str
    transports: Transports = NO_TRANSPORT
    published: str | None = None  # the target's commit that is this request's result already: nothing is to be done
    drift: tuple[str, ...] = ()  # what others did to files of our last publication there: it is replaced


@dataclass(frozen=True, slots=True)
class Receipt:
    """What is known of a sealed shard; it exists only once the store has answered for the bytes."""

    shard: str  # the shard's digest
    size: int
    sha256: str
    xet: str | None
    tensors: dict[str, str]  # xxh3-128 of every tensor's bytes, as they are in the shard
    # Of tensors that were cast or put in order: the same of each source range, as it was read.
    ranges: dict[str, list[str]] = field(default_factory=dict)
    overflows: dict[str, int] = field(default_factory=dict)  # of tensors that were cast: values that became infinite

    def read(self, name: str, number: int) -> str | None:
        """The digest of range ``number`` of a tensor as it was read."""
        if name in self.ranges:
            return self.ranges[name][number] if number < len(self.ranges[name]) else None
        return self.tensors.get(name)

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str | bytes) -> Receipt:
        return Receipt(**json.loads(text))


def weight_files(plan: Plan) -> int:
    """How many weight files the target holds once the plan is carried out."""
    return len(plan.shards) + sum(1 for path in plan.reused if path.endswith(".safetensors"))


def index_bytes(index: Index, shards: Sequence[Shard], metadata: Mapping[str, object] | None = None) -> bytes:
    """The index file: indented JSON with a sorted ``weight_map``, as every loader's own writer makes it.

    ``metadata`` is what was not known when it was planned.
    """
    folder = index.path.rpartition("/")[0]
    prefix = f"{folder}/" if folder else ""
    weight_map = {entry.name: shards[i].path.removeprefix(prefix) for i in index.shards for entry in shards[i].entries}
    content = {"metadata": index.metadata | dict(metadata or {}), "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


# ------------------------------------------------------------------------------------------------ digests and storage


def shard_digest(header: bytes, entries: Sequence[Entry], files: Sequence[StoredFile], pin: Pin) -> str:
    """The digest of a shard: its header, and the identity and layout of the bytes that follow."""
    identity = cache(lambda number: _identity(files[number], pin))
    # Canonical JSON as `key_of` makes it of [header, pieces], a part at a time: as a whole it takes 600 bytes a tensor.
    found = hashlib.sha256(b"[" + canonical(header.decode("latin-1")) + b",[")
    separator = b""
    for first in range(0, len(entries), 1000):
        pieces = [
            [e.as_dtype, [[identity(p.file), *_piece(p)[1:]] for p in e.tensor.pieces]]
            for e in entries[first : first + 1000]
        ]
        found.update(separator + canonical(pieces)[1:-1])
        separator = b","
    found.update(b"]]")
    return found.hexdigest()


def _identity(file: StoredFile, pin: Pin) -> str:
    """What a source file is, by content where the store says so, else by where it was found."""
    return file.sha256 or file.xet or key_of([pin.endpoint, pin.repo, pin.commit, file.path])


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
        "options": plan.options.model_dump(mode="json"),
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
        "published": plan.published,
        "drift": plan.drift,
        "shards": len(plan.shards),
    }
    return StoredPlan(_pack(head), {i: _pack(_shard(s)) for i, s in enumerate(plan.shards)})


def decode_head(head: bytes) -> Plan:
    """The plan without its shards; raises KeyError on another schema, so look at ``schema_of`` first."""
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
        published=data["published"],
        drift=tuple(data["drift"]),
    )


def schema_of(head: bytes) -> int:
    return int(_unpack(head)["schema"])


def shard_count(head: bytes) -> int:
    return int(_unpack(head)["shards"])


def decode_shard(data: bytes) -> Shard:
    path, header, size, digest, entries = _unpack(data)
    return Shard(path, tuple(_entry(e) for e in entries), header.encode("latin-1"), size, digest)


def _pack(value: Any) -> bytes:
    return zlib.compress(json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode(), 1)


def _unpack(data: bytes) -> Any:
    return json.loads(zlib.decompress(data))


def _shard(shard: Shard) -> list[Any]:
    entries = [
        [e.name, e.tensor.dtype, e.as_dtype, e.tensor.shape, [_piece(p) for p in e.tensor.pieces]]
        for e in shard.entries
    ]
    return [shard.path, shard.header.decode("latin-1"), shard.size, shard.digest, entries]


def _piece(piece: Piece) -> list[Any]:
    return [piece.file, piece.offset, piece.at, piece.shape, piece.strides, piece.order]


def _entry(data: list[Any]) -> Entry:
    name, dtype, as_dtype, shape, pieces = data
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
    )
