"""GGUF headers: what llama.cpp's package writes is read, what we write it reads, and what lies is refused in time."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.pipeline.checkpoint.formats.gguf import (
    MAGIC,
    SPLIT_KEYS,
    Split,
    alignment_of,
    build_header,
    entry_size,
    integer,
    keys_of_part,
    keys_size,
    parse_header,
    read_header,
    split_of,
)
from reshard.pipeline.errors import BadHeader, BadLength, CheckpointError, LfsPointer, NotRead
from reshard.pipeline.limits import GGUF_HEADER_MAX, GIB, HEADER_READ, MB, MIB
from reshard.pipeline.tensors import BLOCKS, DTYPE_BITS, StoredFile, size_in_bytes
from tests.support import ggufs

KINDS = [kind for kind in gguf.GGMLQuantizationType.__members__]


def test_every_kind_has_the_blocks_that_llama_cpp_gives_to_it() -> None:
    theirs = {kind.name: blocks for kind, blocks in gguf.GGML_QUANT_SIZES.items()}
    assert {kind: theirs[kind] for kind in theirs if kind not in DTYPE_BITS} == BLOCKS
    plain = theirs.keys() - BLOCKS.keys()
    assert {kind: theirs[kind] for kind in plain} == {kind: (1, DTYPE_BITS[kind] // 8) for kind in plain}


def test_a_row_is_made_of_whole_blocks() -> None:
    assert size_in_bytes("Q4_K", (3, 512)) == 3 * 2 * 144
    with pytest.raises(ValueError, match="a block has 256"):
        size_in_bytes("Q4_K", (256, 128))


@pytest.mark.parametrize("alignment", [None, 32, 64, 4096])
def test_a_file_is_read_as_its_maker_reads_it(tmp_path: Path, alignment: int | None) -> None:
    path = tmp_path / "model.gguf"
    ggufs.save(path, ggufs.MODEL, alignment=alignment)
    content = path.read_bytes()
    ours, theirs = parse_header(content, file=path.name, file_size=len(content)), ggufs.read(path)
    assert alignment_of(ours.keys) == theirs.alignment == (alignment or 32)
    assert list(ours.keys) == list(theirs.keys)
    found = {name: (s.dtype, s.shape, content[s.start : s.stop]) for name, s in ours.tensors.items()}
    assert found == theirs.tensors
    assert (
        build_header(((n, s.dtype, s.shape) for n, s in ours.tensors.items()), ours.keys) == content[: ours.data_start]
    )


rows = st.lists(st.integers(0, 3), max_size=3)
tensor_specs = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20),
    st.sampled_from(KINDS).flatmap(
        lambda kind: st.tuples(
            st.just(kind),
            st.builds(lambda rows, blocks: (*rows, blocks * BLOCKS.get(kind, (1, 1))[0]), rows, st.integers(1, 2)),
        )
    ),
    max_size=8,
)


@given(tensor_specs, st.sampled_from([None, 8, 32, 128]))
def test_what_is_written_is_read_and_its_size_is_known_before(
    tensors: dict[str, tuple[str, tuple[int, ...]]], alignment: int | None
) -> None:
    keys = {} if alignment is None else {"general.alignment": struct.pack("<II", 4, alignment)}
    at = alignment or 32
    header = build_header(((name, *spec) for name, spec in tensors.items()), keys)
    exact = keys_size(keys) + sum(entry_size(name, shape) for name, (_, shape) in tensors.items())
    assert len(header) == exact + -exact % at
    data = sum(size + -size % at for size in (size_in_bytes(*spec) for spec in tensors.values()))
    parsed = parse_header(header, file="x", file_size=len(header) + data)
    assert parsed.specs() == tensors and parsed.data_start == len(header)
    assert all(spec.start % at == 0 for spec in parsed.tensors.values())


@given(st.binary(max_size=200))
def test_any_bytes_are_a_header_or_a_named_error(content: bytes) -> None:
    for data in (content, MAGIC + content, MAGIC + struct.pack("<IQQ", 3, 1, 1) + content):
        with pytest.raises(CheckpointError, match="x.gguf"):
            parse_header(data + b"\0", file="x.gguf", file_size=len(data) + 1)


# ------------------------------------------------------------------------------------------------------ split keys


def test_the_parts_say_which_they_are_as_those_of_gguf_split() -> None:
    keys = {"general.architecture": b"\x08\0\0\0", "split.count": b"\x02\0\0\0\0\0"}
    first, second = (keys_of_part(keys, number, 2, 7) for number in range(2))
    assert list(first) == ["general.architecture", *SPLIT_KEYS] and list(second) == [*SPLIT_KEYS]
    assert [split_of(first), split_of(second)] == [Split(0, 2, 7), Split(1, 2, 7)]
    assert [second[key][:4] for key in SPLIT_KEYS] == [struct.pack("<I", kind) for kind in (2, 5, 2)]


def test_a_whole_has_split_keys_only_where_its_source_has_them() -> None:
    plain = {"general.name": b"\x08\0\0\0"}
    assert keys_of_part(plain, 0, 1, 7) == plain
    merged = keys_of_part(keys_of_part(plain, 0, 3, 7), 0, 1, 7)
    assert list(merged) == ["general.name", *SPLIT_KEYS]
    assert integer(merged["split.count"]) == 0 and split_of(merged) is None


@pytest.mark.parametrize(("alignment", "everywhere"), [(64, True), (32, False)])
def test_every_part_has_an_alignment_that_readers_would_not_expect(alignment: int, everywhere: bool) -> None:
    keys = {"general.alignment": struct.pack("<II", 4, alignment), "general.name": b"\x08\0\0\0"}
    assert ("general.alignment" in keys_of_part(keys, 1, 2, 7)) is everywhere
    assert "general.alignment" in keys_of_part(keys, 0, 2, 7)


# --------------------------------------------------------------------------------------------------------- hostile


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str | bytes = "a", shape: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


def file_of(*tensors: bytes, keys: tuple[bytes, ...] = (), counts: tuple[int, int] | None = None, data: int = 32,
            version: int = 3) -> bytes:  # fmt: skip
    numbers = counts or (len(tensors), len(keys))
    head = MAGIC + struct.pack("<IQQ", version, *numbers) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32 + data)


def array(kind: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + values


HOSTILE = {
    "nothing": (b"", BadHeader),
    "the magic alone": (MAGIC, BadLength),
    "another magic": (b"GGML" + bytes(40), BadHeader),
    "version 1": (file_of(tensor(), version=1), NotRead),
    "version 4": (file_of(tensor(), version=4), NotRead),
    "big-endian": (file_of(tensor(), version=3 << 24), NotRead),
    "more tensors than there are atoms": (file_of(counts=(2**64 - 1, 0)), BadHeader),
    "more keys than there are atoms": (file_of(counts=(0, 2**64 - 1)), BadHeader),
    "as many tensors as may be, and none": (file_of(counts=(65_536, 0)), CheckpointError),
    "a key of 2^60 bytes": (file_of(counts=(0, 1), keys=(struct.pack("<Q", 1 << 60),)), BadHeader),
    "a key has no name": (file_of(keys=(key("", 4, bytes(4)),)), BadHeader),
    "a key twice": (file_of(keys=(key("a", 4, bytes(4)), key("a", 4, bytes(4)))), BadHeader),
    "a key that is not UTF-8": (file_of(keys=(text(b"\xff") + struct.pack("<II", 4, 0),)), BadHeader),
    "a value of unknown type": (file_of(keys=(key("a", 13, bytes(8)),)), BadHeader),
    "a string of 2^63 bytes": (file_of(keys=(key("a", 8, struct.pack("<Q", 1 << 63)),)), BadLength),
    "an array of arrays": (file_of(keys=(key("a", 9, array(9, 1, array(4, 1, bytes(4)))),)), BadHeader),
    "2^64 numbers": (file_of(keys=(key("a", 9, array(4, 2**64 - 1)),)), BadLength),
    "2^64 strings": (file_of(keys=(key("a", 9, array(8, 2**64 - 1)),)), BadLength),
    "strings, the last of 2^64 bytes": (
        file_of(keys=(key("a", 9, array(8, 2, text("x") + struct.pack("<Q", 2**64 - 1))),)),
        BadLength,
    ),
    "alignment 0": (file_of(tensor(), keys=(key("general.alignment", 4, bytes(4)),)), BadHeader),
    "alignment 33": (file_of(tensor(), keys=(key("general.alignment", 4, struct.pack("<I", 33)),)), BadHeader),
    "alignment 2^31": (file_of(tensor(), keys=(key("general.alignment", 4, struct.pack("<I", 1 << 31)),)), BadHeader),
    "an alignment that is text": (file_of(tensor(), keys=(key("general.alignment", 8, text("32")),)), BadHeader),
    "an alignment of 64 bits": (file_of(tensor(), keys=(key("general.alignment", 10, text("")),)), BadHeader),
    "a tensor twice": (file_of(tensor(), tensor(offset=32), data=64), BadHeader),
    "a name that is not UTF-8": (file_of(tensor(b"\xff")), BadHeader),
    "4 billion dimensions": (file_of(text("a") + struct.pack("<I", 2**32 - 1) + bytes(99)), BadHeader),
    "too many elements to count": (file_of(tensor(shape=(2**62, 2**62))), BadHeader),
    "more than that, and none": (file_of(tensor(shape=(2**63, 4, 0))), BadHeader),
    "a type that was removed": (file_of(tensor(kind=4)), NotRead),
    "a type that nobody knows": (file_of(tensor(kind=2**32 - 1)), NotRead),
    "half a block": (file_of(tensor(kind=2, shape=(16,))), BadHeader),
    "half a block in each row": (file_of(tensor(kind=2, shape=(16, 2))), BadHeader),
    "an overlap": (file_of(tensor(), tensor("b"), data=64), BadHeader),
    "a hole": (file_of(tensor(), tensor("b", offset=64), data=96), BadHeader),
    "a hole in front": (file_of(tensor(offset=32), data=64), BadHeader),
    "an offset that is not aligned": (file_of(tensor(shape=(1,)), tensor("b", offset=4), data=64), BadHeader),
    "an offset of 2^64": (file_of(tensor(offset=2**64 - 1)), BadHeader),
    "data after the last tensor": (file_of(tensor(), data=33), BadLength),
    "data cut off": (file_of(tensor(), data=31), BadLength),
}  # fmt: skip


@pytest.mark.parametrize("trouble", HOSTILE)
def test_a_hostile_header_is_refused_by_name(trouble: str) -> None:
    content, kind = HOSTILE[trouble]
    with pytest.raises(kind) as caught:
        parse_header(content, file="x.gguf", file_size=len(content))
    assert "x.gguf" in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("file", "glob"),
    [("a/x-Q4_0.gguf", "a/x-Q4_0.gguf"), ("a/x-00002-of-00003.gguf", "a/x-*-of-00003.gguf")],
)
def test_what_is_only_not_known_here_is_not_called_broken(file: str, glob: str) -> None:
    for content in (file_of(tensor(kind=31)), file_of(version=1), file_of(version=3 << 24)):
        with pytest.raises(NotRead, match="is not supported") as caught:
            parse_header(content, file=file, file_size=len(content))
        assert f"--exclude '{glob}'" in caught.value.next_step


def test_the_honest_form_of_what_is_hostile_is_read() -> None:
    content = file_of(
        tensor(), tensor("b", (), offset=32), keys=(key("a", 9, array(8, 2, text("x") + text(""))),), data=64
    )
    found = parse_header(content, file="x", file_size=len(content))
    assert found.specs() == {"a": ("F32", (8,)), "b": ("F32", ())}
    second = content.replace(struct.pack("<I", 3), struct.pack("<I", 2), 1)
    assert second != content and parse_header(second, file="x", file_size=len(second)).tensors == found.tensors
    without_padding = len(content) - 28
    assert parse_header(content, file="x", file_size=without_padding).tensors == found.tensors


def test_a_pointer_is_no_header() -> None:
    content = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    with pytest.raises(LfsPointer):
        parse_header(content, file="x.gguf", file_size=len(content))


class Disk:
    """A file of any size that begins with ``head`` and goes on with zeros; counts what is read."""

    def __init__(self, head: bytes, size: int) -> None:
        self.head, self.file, self.stop = head, StoredFile("x.gguf", size), 0

    def read(self, file: StoredFile, start: int, stop: int, /) -> Iterator[memoryview]:
        self.stop = max(self.stop, stop)
        while start < stop:
            part = self.head[start : min(stop, start + MIB)] or bytes(min(stop - start, MIB))
            yield memoryview(part)
            start += len(part)


def test_a_long_header_is_read_to_its_end_and_hardly_further(tmp_path: Path) -> None:
    merges = b"".join(map(text, (f"a{i} b{i}" for i in range(200_000))))
    content = file_of(tensor(), keys=(key("tokenizer.ggml.merges", 9, array(8, 200_000, merges)),))
    assert len(content) > 8 * HEADER_READ
    disk = Disk(content, len(content))
    found = read_header(disk.read, disk.file)
    assert bytes(found.keys["tokenizer.ggml.merges"]).endswith(merges) and found.data_start == len(content) - 32
    small = Disk(file_of(tensor(shape=(GIB,)), data=0), 4 * GIB + 64)
    assert read_header(small.read, small.file).specs() == {"a": ("F32", (GIB,))}
    assert small.stop == HEADER_READ


LIES = {
    "a string as long as the file": file_of(keys=(key("a", 8, struct.pack("<Q", 29 * GIB)),), data=0),
    "an array as long as the file": file_of(keys=(key("a", 9, array(12, 3 * GIB)),), data=0),
    "strings for the whole file": file_of(keys=(key("a", 9, array(8, 3 * GIB)),), data=0),
    "strings for a whole header": file_of(keys=(key("a", 9, array(8, GGUF_HEADER_MAX // 8)),), data=0),
    "65,536 keys": file_of(counts=(0, 65_536), data=0),
    "65,536 tensors": file_of(counts=(65_536, 0), data=0),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_a_file_claims_takes_no_memory(lie: str) -> None:
    disk = Disk(LIES[lie], 30 * GIB)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            read_header(disk.read, disk.file)
        assert tracemalloc.get_traced_memory()[1] < 5 * MB
    finally:
        tracemalloc.stop()
