"""What is fuzzed: bytes go in, and tensors that lie inside of them come out, or an error of ours. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import safetensors
from pydantic import TypeAdapter

from reshard.pipeline.checkpoint.formats import gguf
from reshard.pipeline.checkpoint.formats.dcp import read_dcp
from reshard.pipeline.checkpoint.formats.pickles import load
from reshard.pipeline.checkpoint.formats.rank_files import read_ranks
from reshard.pipeline.checkpoint.formats.safetensors import build_header, parse_header
from reshard.pipeline.checkpoint.formats.torch_files import read_torch
from reshard.pipeline.checkpoint.formats.torch_names import ALLOWED
from reshard.pipeline.checkpoint.formats.zero import read_zero
from reshard.pipeline.checkpoint.indexes import parse_index
from reshard.pipeline.errors import CheckpointError, UsageError
from reshard.pipeline.limits import RENAME_NAME_MAX
from reshard.pipeline.renaming import Rules, parse_rules, renamed
from reshard.pipeline.tensors import DTYPE_BITS, Contents, StoredFile

CHUNKS = 4096  # bytes of the one file that fuzzed metadata may speak of

Target = Callable[[bytes], None]


class Broken(Exception):
    """A parser accepted what it must not."""


def pickle(data: bytes) -> None:
    if load(data, file="x", allowed=ALLOWED).stop > len(data):
        raise Broken("the pickle ends behind its bytes")


def zip_directory(data: bytes) -> None:
    """Zip archives, and the pre-zip format: the first bytes decide."""
    file = StoredFile("x.bin", len(data))
    _all_inside(read_torch(_reader({file.path: data}), file, 0), [file])


def safetensors_header(data: bytes) -> None:
    try:
        theirs = {name for name, _ in safetensors.deserialize(data)}
    except safetensors.SafetensorError as error:
        theirs = error
    try:
        header = parse_header(data, file="x", file_size=len(data))
    except CheckpointError as error:
        if isinstance(theirs, set):
            raise Broken(f"the library accepts what is refused here: {error}") from None
        raise
    if theirs != header.tensors.keys():
        raise Broken(f"the library reads something else: {theirs}")
    specs = sorted(header.tensors.items(), key=lambda item: item[1].start)
    written = build_header(((n, s.dtype, s.shape) for n, s in specs), header.metadata)
    again = parse_header(written, file="x", file_size=len(written) + sum(s.stop - s.start for _, s in specs))
    if {n: (s.dtype, s.shape) for n, s in again.tensors.items()} != {n: (s.dtype, s.shape) for n, s in specs}:
        raise Broken("what was read does not survive being written")


def gguf_header(data: bytes) -> None:
    header = gguf.parse_header(data, file="x", file_size=len(data))
    if any(spec.stop > len(data) for spec in header.tensors.values()):
        raise Broken("a tensor lies outside of its file")
    for count in (1, 2):
        keys = gguf.keys_of_part(header.keys, 0, count, len(header.tensors))
        written = gguf.build_header(((n, s.dtype, s.shape) for n, s in header.tensors.items()), keys)
        again = gguf.parse_header(written, file="x", file_size=len(written) + len(data) - header.data_start)
        if again.specs() != header.specs() or again.keys != keys:
            raise Broken("what was read does not survive being written")


def distributed_metadata(data: bytes) -> None:
    metadata, chunks = StoredFile("m/.metadata", len(data)), StoredFile("m/__0_0.distcp", CHUNKS)
    _all_inside(read_dcp(_reader({metadata.path: data, chunks.path: bytes(CHUNKS)}), metadata, [chunks]), [chunks])


def ranks(data: bytes) -> None:
    """The file of the only rank of a mesh."""
    file = StoredFile("model_world_size_1_rank_0.pt", len(data))
    _all_inside(read_ranks(_reader({file.path: data}), [file]), [file])


ZERO_BETWEEN = b"\n8<\n"
_RANKS = ("zero_pp_rank_0_", "zero_pp_rank_1_")
ZERO_FILES = {
    b"2": (*(f"{rank}mp_rank_00_optim_states.pt" for rank in _RANKS), "mp_rank_00_model_states.pt"),
    b"3": tuple(f"{rank}mp_rank_00_{kind}_states.pt" for kind in ("optim", "model") for rank in _RANKS),
    b"universal": ("zero/a/fp32.pt", "mp_rank_00_model_states.pt"),
}


def zero(data: bytes) -> None:
    """What kind of a step it is, then its files."""
    kind, *contents = data.split(ZERO_BETWEEN)
    held = dict(zip(ZERO_FILES.get(kind, ()), contents, strict=False))
    if held and len(held) == len(ZERO_FILES[kind]):
        files = [StoredFile(path, len(content)) for path, content in held.items()]
        _all_inside(read_zero(_reader(held), files), files)


def index(data: bytes) -> None:
    parsed = parse_index(data, "folder/model.safetensors.index.json")
    for path in (*parsed.files.values(), *parsed.by_tensor().values()):
        if not path.startswith("folder/") or ".." in path.split("/"):
            raise Broken(f"{path} leaves the folder")


def rules(data: bytes) -> None:
    names = ["model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight", "Ä"]
    parsed = parse_rules(data.decode(errors="replace"), "rules.yaml")
    kept = TypeAdapter(Rules).validate_json(TypeAdapter(Rules).dump_json(parsed))
    if kept != parsed:
        raise Broken(f"a job would keep {kept}")
    made, _ = renamed(names, parsed, "model")
    if len({*made.values()}) < len(names) or not all(0 < len(n) <= RENAME_NAME_MAX for n in made.values()):
        raise Broken(f"the names become {made}")


TARGETS: dict[str, Target] = {
    "pickle": pickle,
    "zip": zip_directory,
    "safetensors": safetensors_header,
    "gguf": gguf_header,
    "distributed": distributed_metadata,
    "ranks": ranks,
    "zero": zero,
    "index": index,
    "rules": rules,
}


def tried(target: Target, data: bytes) -> bool:
    """Whether ``target`` accepts ``data``; whatever is no refusal is raised."""
    try:
        target(data)
    except (CheckpointError, UsageError):
        return False
    return True


def _reader(contents: dict[str, bytes]) -> Callable[[StoredFile, int, int], Iterator[memoryview]]:
    def read(file: StoredFile, start: int, stop: int, /) -> Iterator[memoryview]:
        data = contents[file.path]
        if not 0 <= start < stop <= len(data):
            raise Broken(f"asks for bytes {start} to {stop} of {len(data)}")
        yield memoryview(data)[start:stop]

    return read


def _all_inside(contents: Contents, files: list[StoredFile]) -> None:
    for tensor in contents.tensors:
        width = -(-DTYPE_BITS[tensor.dtype] // 8)
        for piece in tensor.pieces:
            if 0 in piece.shape:
                continue
            strides = piece.strides or ()
            last = sum((extent - 1) * stride for extent, stride in zip(piece.shape, strides, strict=False))
            size = last + width if piece.strides is not None else tensor.size
            if piece.offset < 0 or piece.offset + size > files[piece.file].size:
                raise Broken(f"{tensor.name} lies outside of its file")
