"""The plan: the whole answer to "what will be written", as data that can be printed, stored and compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from reshard.pipeline.request import AT_ONCE, Options
from reshard.pipeline.sizes import SINGLE
from reshard.pipeline.tensors import Name, Piece, Pin, Record, StoredFile, Tensor, size_in_bytes
from reshard.pipeline.text import counted

# What a publication adds beside weights and indexes: the model card, and the manifest of all digests.
CARD = "README.md"
MANIFEST = "reshard.manifest.json"
# With a key also these: a signature of all files, and a signed statement of what they were made from.
SIGNATURE, PROVENANCE = "model.sig", "provenance.sigstore.json"
TENSORS = "tensors.sigstore.json"  # and with --tensor-hashes a signed list of where each tensor came from
STATEMENTS = (SIGNATURE, PROVENANCE, TENSORS)
# What the metadata of an index calls the manifest's root; loaders read nothing there but what they know.
ROOT_KEY = "reshard_manifest"
TOTAL_PARAMETERS = "total_parameters"  # the key that transformers writes there beside `total_size`
# In the `__metadata__` of files that torchao made, beside a key for each of these tensors with how it is quantized.
TORCHAO_NAMES = "tensor_names"

# A worker that does not know a plan's schema hands the job back to one that does.
SCHEMA = 1


# Bytes of a block of mxfp4, each of which has two values of a row; gpt-oss stores its experts' matrices in them.
MXFP4_BYTES = 16


class Scale(NamedTuple):
    """What a quantised tensor's values are multiplied by: each of ``tensor`` by a block of that many rows and columns.

    Its last two dimensions are the blocks of a matrix, of which the last ones may be cut short; those before count the
    matrices.
    """

    tensor: Tensor
    block: tuple[int, int]


class Entry(NamedTuple):
    """A tensor's place in a shard; ``as_dtype`` differs from the tensor's own only where a cast was asked for."""

    tensor: Tensor
    as_dtype: str
    scale: Scale | None = None  # where it is to be dequantised

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

    @property
    def stored(self) -> Tensor:
        """The tensor as its pieces have it: a byte of mxfp4 has a value of two rows each, and comes once for each."""
        if self.scale is None or self.tensor.dtype != "F4":
            return self.tensor
        experts, rows, columns = self.tensor.shape
        shape = (experts, rows // (2 * MXFP4_BYTES), MXFP4_BYTES, 2, columns)
        return self.tensor._replace(dtype="U8", shape=shape)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All that it is made from."""
        return self.tensor.pieces + self.scale.tensor.pieces if self.scale else self.tensor.pieces


@dataclass(frozen=True, slots=True)
class Shard:
    """One output file, byte for byte known but for the tensors' contents.

    ``header`` is everything before the data, its padding too. ``digest`` covers the header
    and which source bytes follow it, but not the path: equal digests are equal files. After each tensor come
    zeros up to a multiple of ``alignment``.
    """

    path: str
    entries: tuple[Entry, ...]
    header: bytes
    size: int
    digest: str
    alignment: int = 1

    def padding(self, entry: Entry) -> int:
        """The zeros behind ``entry``."""
        return -entry.size % self.alignment


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
    """The shards that begin in one source file, which one lease copies.

    ``attests`` are indexes into ``Plan.files``: source files that this group reads whole, to compare them with their
    sha256 or their archive's sums. So it also hashes the tensors in them that other groups copy, ``witnesses``, and
    `check_receipts` compares the two.
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
    readers: tuple[int | None, ...] = ()  # of each shard, where it was cut for ranks: the rank that reads it; None: all


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


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """Everything that will be read, written, carried, deleted and kept."""

    schema: int
    pin: Pin
    lender: Pin | None  # who lends the files that the source has not
    base: str  # the target's head when we planned
    options: Options
    keys: Keys
    files: tuple[StoredFile, ...]  # the weight files that were opened
    records: tuple[Record, ...]  # stretches of those files that an archive keeps a CRC of
    shards: tuple[Shard, ...]
    groups: tuple[Group, ...]
    outputs: tuple[Output, ...]
    carried: tuple[StoredFile, ...]
    edits: tuple[Edit, ...]  # carried files whose text changes, and files of settings
    left_out: tuple[LeftOut, ...]
    reused: tuple[str, ...]  # weight files of our last publication that are the right ones already
    deletes: tuple[str, ...]
    kept: tuple[str, ...]  # what the target holds and we leave alone
    notes: tuple[str, ...]
    digest: str
    transports: Transports = NO_TRANSPORT
    shares: bool = False  # the target's Hub has the source's chunks: a copy over Xet sends little more than seams
    published: str | None = None  # the target's commit that is this request's result already: nothing is to be done
    drift: tuple[str, ...] = ()  # what others did to files of our last publication there: it is replaced
    replaced: tuple[StoredFile, ...] = ()  # the target's files that are deleted or overwritten with other bytes
    occupied: tuple[str, ...] = ()  # the target's files that make it somebody else's
    in_place: bool = False  # the target is the source, at this very state
    takes: bool = False  # what others put or changed there goes, or in place what only the source has
    pruned: tuple[str, ...] = ()  # what others put there and --prune deletes
    submitted: int | None = None  # when, in ms since the epoch; no part of the digest
    altered: tuple[str, ...] | None = None  # the options that changed tensors; None: not known, no header was read

    @property
    def read(self) -> list[StoredFile]:
        """Those of ``files`` whose tensors are copied: neither twins of others nor without tensors."""
        others = {*(one.path for one in self.left_out), *(file.path for file in self.carried)}
        return [file for file in self.files if file.path not in others]

    def __repr__(self) -> str:
        if self.published:
            return f"<Plan of {self.pin}: nothing to do, {self.published} is up to date>"
        size, tensors = sum(s.size for s in self.shards), sum(len(s.entries) for s in self.shards)
        cut = f"{counted(tensors, 'tensor')} in {counted(len(self.shards), 'file')} of {size:,} bytes"
        return f"<Plan {self.digest[:12]} of {self.pin}: {cut}, {counted(len(self.carried), 'file')} copied unchanged>"


@dataclass(frozen=True, slots=True)
class Receipt:
    """What is known of a stored shard; it exists only once the store has answered for the bytes."""

    shard: str  # the shard's digest
    size: int
    sha256: str
    xet: str | None
    tensors: dict[str, str]  # xxh3-128 of every tensor's bytes, as they are in the shard
    # Of tensors that were cast or put in order: the same of each source range, as it was read.
    ranges: dict[str, list[str]] = field(default_factory=dict)
    overflows: dict[str, int] = field(default_factory=dict)  # of tensors that were cast: values that became infinite
    # With --tensor-hashes: sha256 of every tensor's bytes as written, and of one that was cast also as read.
    hashes: dict[str, list[str]] = field(default_factory=dict)

    def read(self, name: str, number: int) -> str | None:
        """The digest of range ``number`` of a tensor as it was read."""
        if name in self.ranges:
            return self.ranges[name][number] if number < len(self.ranges[name]) else None
        return self.tensors.get(name)

    def to_json(self) -> str:
        told = asdict(self)
        if not self.hashes:  # which a release that does not know them can read then
            del told["hashes"]
        return json.dumps(told, separators=(",", ":"))

    @staticmethod
    def from_json(text: str | bytes) -> Receipt:
        return Receipt(**json.loads(text))


def weight_files(plan: Plan) -> int:
    """How many weight files the target holds once the plan is carried out."""
    return len(plan.shards) + sum(1 for path in plan.reused if path.endswith((".safetensors", ".gguf")))


def files_told(plan: Plan, files: int) -> str:
    """How many there are, and how large at most, where there is a bound."""
    if files == 1:
        return "one file"
    return f"{files} files" if plan.options.size == SINGLE else f"{files} files of at most {plan.options.size:,} bytes"


def index_bytes(index: Index, shards: Sequence[Shard], root: str | None = None) -> bytes:
    """The index file: indented JSON with a sorted ``weight_map``, as every loader's own writer makes it.

    ``root`` is the manifest's, which was not known when it was planned.
    """
    folder = index.path.rpartition("/")[0]
    prefix = f"{folder}/" if folder else ""
    # What json.dumps does with an indent is done in Python, a call for each token: too slow for 500,000 names.
    quoted = json.encoder.encode_basestring
    paths = {i: quoted(shards[i].path.removeprefix(prefix)) for i in index.shards}
    weight_map = {tensor.name: path for i, path in paths.items() for tensor, _, _ in shards[i].entries}
    content = {"metadata": index.metadata | ({ROOT_KEY: root} if root else {}), "weight_map": {}}
    made = bytearray(json.dumps(content, indent=2, ensure_ascii=False).removesuffix("}\n}").encode())
    names = sorted(weight_map)
    for first in range(0, len(names), AT_ONCE):
        lines = [f"\n    {quoted(name)}: {weight_map[name]}," for name in names[first : first + AT_ONCE]]
        made += "".join(lines).encode()
    if weight_map:
        made[-1:] = b"\n  "
    made += b"}\n}\n"
    return bytes(made)
