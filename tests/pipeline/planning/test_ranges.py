"""What a group reads: all that its shards need, each attested file whole and in order, as little twice as can be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from reshard.pipeline.limits import GAP_MAX
from reshard.pipeline.planning.model import Entry, Shard
from reshard.pipeline.planning.pack import Heading, greedy
from reshard.pipeline.planning.ranges import ReadSegment, adjoining, attested, parts, read_plan, same_cut
from reshard.pipeline.tensors import ByteRange, Piece, Record, Span, StoredFile, Tensor

HEADER = 100  # bytes before the first tensor of each made-up source file


def layout(sizes: list[list[int]], limit: int) -> tuple[list[StoredFile], list[Shard]]:
    """Source files with tensors of these sizes, and the shards that greedy packing makes of them."""
    files, entries = [], []
    for number, tensors in enumerate(sizes):
        at = HEADER
        for i, size in enumerate(tensors):
            tensor = Tensor(f"f{number}.t{i}", "U8", (size,), (Piece(number, at, (0,), (size,)),))
            entries.append(Entry(tensor, "U8"))
            at += size
        files.append(StoredFile(f"{number}.safetensors", at, sha256=f"{number:064d}"))
    bins = greedy(entries, limit, Heading({}))
    return files, [Shard(f"s{i}", tuple(b), b"", 0, f"d{i}") for i, b in enumerate(bins)]


def whole(attests: Iterable[int], files: Sequence[StoredFile]) -> dict[int, Span]:
    return {number: Span(0, files[number].size) for number in attests}


def content_of(place: ReadSegment | ByteRange) -> bytes:
    """What a file holds there, made up so that every byte of every file tells where it is from."""
    return b"".join(b"%d:%d," % (place.file, at) for at in range(place.start, place.stop))


sources = st.lists(st.lists(st.integers(0, 900), min_size=1, max_size=8), min_size=1, max_size=4)


@given(sources, st.integers(200, 3000), st.data())
def test_an_attested_file_passes_whole_once_and_in_order(
    sizes: list[list[int]], limit: int, data: st.DataObject
) -> None:
    files, shards = layout(sizes, limit)
    some = data.draw(st.lists(st.sampled_from(shards), unique_by=lambda s: s.path))
    some.sort(key=lambda s: shards.index(s))
    attests = data.draw(st.sets(st.sampled_from(range(len(files)))))
    segments = read_plan(some, whole(attests, files))
    for number in attests:
        passed = 0
        for segment in segments:
            if segment.file == number and segment.fresh < segment.stop:
                assert segment.fresh == passed
                passed = segment.stop
        assert passed == files[number].size


@given(sources, st.integers(200, 3000), st.data())
def test_what_is_copied_is_what_the_shards_hold_in_their_order(
    sizes: list[list[int]], limit: int, data: st.DataObject
) -> None:
    files, shards = layout(sizes, limit)
    attests = data.draw(st.sets(st.sampled_from(range(len(files)))))
    segments = read_plan(shards, whole(attests, files))
    wanted = b"".join(content_of(segment) for segment in segments if segment.wanted)
    assert wanted == b"".join(
        content_of(place) for shard in shards for part in parts(shard.entries) for place in part.ranges
    )


@given(sources, st.integers(200, 3000))
def test_requests_join_legs_and_change_nothing(sizes: list[list[int]], limit: int) -> None:
    files, shards = layout(sizes, limit)
    segments = read_plan(shards, whole(range(len(files)), files))
    joined = list(adjoining(segments))
    assert [segment for request in joined for segment in request] == segments
    for request in joined:
        assert all(a.stop == b.start and a.file == b.file for a, b in pairwise(request))


def test_a_file_cut_in_order_is_one_long_read() -> None:
    files, shards = layout([[500] * 10], 1500)
    assert len(shards) > 3
    segments = read_plan(shards, whole([0], files))
    assert len(list(adjoining(segments))) == 1
    assert sum(segment.stop - segment.start for segment in segments) == files[0].size


def test_files_merged_into_one_are_one_read_each() -> None:
    files, shards = layout([[500] * 3] * 5, 10_000_000)
    assert len(shards) == 1
    segments = read_plan(shards, whole(range(5), files))
    assert len(list(adjoining(segments))) == 5
    assert sum(segment.stop - segment.start for segment in segments) == sum(file.size for file in files)


def test_the_neighbours_part_of_a_file_is_read_but_not_copied() -> None:
    files, shards = layout([[500, 500], [100, 500, 500]], 1500)
    mine = [shard for shard in shards if shard.entries[0].tensor.pieces[0].file == 1]
    first = mine[0].entries[0].tensor.pieces[0].offset
    assert first > HEADER, "the first shard of the second file should belong to its neighbour"
    segments = read_plan(mine, whole([1], files))
    assert segments[0] == ReadSegment(1, 0, first, 0, wanted=False)


def test_a_large_tensor_that_overtakes_costs_no_second_read_of_itself() -> None:
    files, shards = layout([[50, 5000, 50, 50]], 3000)
    assert [len(shard.entries) for shard in shards] == [1, 3]
    segments = read_plan(shards, whole([0], files))
    assert sum(segment.stop - segment.start for segment in segments) == files[0].size + 50


def test_small_gaps_are_read_through_where_nothing_is_attested() -> None:
    _, shards = layout([[500, 10, 500]], 10_000)
    holed = Shard("s", (shards[0].entries[0], shards[0].entries[2]), b"", 0, "d")
    assert len(list(adjoining(read_plan([holed], {})))) == 1
    far = layout([[500, GAP_MAX + 1, 500]], 10**9)[1]
    holed = Shard("s", (far[0].entries[0], far[0].entries[2]), b"", 0, "d")
    assert len(list(adjoining(read_plan([holed], {})))) == 2


def test_of_a_file_without_a_sha256_only_what_has_sums_has_to_pass() -> None:
    """As in a file that is an optimizer's state before and behind the weights."""
    file = StoredFile("x.pt", 1000)
    records = [Record(f"data/{i}", 0, start, start + 100, 1) for i, start in enumerate((300, 500))]
    assert attested(file, records) == (300, 600)
    assert attested(replace(file, sha256="0" * 64), records) == (0, 1000)
    assert attested(file, []) == (0, 1000)
    shard = Shard("s", (Entry(Tensor("w", "U8", (50,), (Piece(0, 320, (0,), (50,)),)), "U8"),), b"", 0, "d")
    segments = read_plan([shard], {0: attested(file, records)})
    assert [(one.start, one.stop, one.wanted) for one in segments] == [
        (300, 320, False),
        (320, 370, True),
        (370, 600, False),
    ]


def test_a_cut_is_the_same_where_each_file_keeps_its_tensors_as_they_are() -> None:
    files, shards = layout([[500, 500], [500]], 10_000)
    tensors = [entry.tensor for shard in shards for entry in shard.entries]
    (whole,) = shards
    halves = [
        replace(whole, path=file.path, entries=tuple(e for e in whole.entries if e.pieces[0].file == number))
        for number, file in enumerate(files)
    ]
    assert same_cut(halves, tensors, files)
    assert not same_cut(shards, tensors, files), "other files"
    assert not same_cut(halves[::-1][:1], tensors, files), "a tensor less"
    other = [replace(halves[0], path=halves[1].path), replace(halves[1], path=halves[0].path)]
    assert not same_cut(other, tensors, files), "in each other's files"
    cast = halves[0].entries[0]._replace(as_dtype="F32")
    assert not same_cut([replace(halves[0], entries=(cast, *halves[0].entries[1:])), halves[1]], tensors, files)
