"""The packings: nothing is lost, the size is a promise about the file, no crumbs."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.pipeline.errors import BadSize, Oversize, SizeTooSmall
from reshard.pipeline.limits import MB
from reshard.pipeline.planning import pack
from reshard.pipeline.planning.model import Entry
from reshard.pipeline.planning.pack import (
    Heading,
    Packing,
    aligned,
    balanced,
    check_metadata,
    check_size,
    file_size,
    greedy,
    in_source_order,
    layers,
)
from reshard.pipeline.tensors import Piece, Tensor
from tests.support.measured import within

METADATA = Heading({"format": "pt"})


def entry(name: str, count: int, dtype: str = "F32", offset: int = 0, file: int = 0) -> Entry:
    return Entry(Tensor(name, dtype, (count,), (Piece(file, offset, (0,), (count,)),)), dtype)


def row(*counts: int) -> list[Entry]:
    return [entry(f"t{i}", count, offset=i) for i, count in enumerate(counts)]


entries_of_any_kind = st.lists(
    st.tuples(st.sampled_from(["F32", "BF16", "U8", "F64"]), st.integers(0, 3000)), min_size=1, max_size=40
).map(lambda specs: [entry(f"t{i}", count, dtype, offset=i) for i, (dtype, count) in enumerate(specs)])


@given(entries_of_any_kind, st.integers(300, 20_000))
def test_every_entry_is_in_one_bin_and_every_file_keeps_the_promise(entries: list[Entry], limit: int) -> None:
    bins = greedy(entries, limit, METADATA)
    assert sorted(e.name for b in bins for e in b) == sorted(e.name for e in entries)
    assert all(bins), "an empty file"
    for packed in bins:
        size = file_size(aligned(packed), METADATA)
        assert size <= limit or len(packed) == 1, f"{len(packed)} tensors in a file of {size} > {limit} bytes"


@given(entries_of_any_kind, st.integers(300, 20_000))
def test_no_two_neighbouring_files_would_fit_into_one(entries: list[Entry], limit: int) -> None:
    bins = greedy(entries, limit, METADATA)
    for first, second in pairwise(bins):
        assert file_size(aligned([*first, *second]), METADATA) > limit


@given(entries_of_any_kind, st.integers(300, 20_000))
def test_a_file_is_full_before_the_next_is_begun_unless_a_crumb_would_be_left(entries: list[Entry], limit: int) -> None:
    bins = greedy(entries, limit, METADATA)
    for first, second in pairwise(bins[:-1]):
        assert file_size(aligned([*first, second[0]]), METADATA) > limit


@given(entries_of_any_kind, st.integers(300, 20_000))
def test_the_order_of_the_source_is_kept_but_for_files_that_wait_for_a_large_one(
    entries: list[Entry], limit: int
) -> None:
    bins = greedy(entries, limit, METADATA)
    for packed in bins:
        offsets = [e.tensor.pieces[0].offset for e in packed]
        assert offsets == sorted(offsets)


@given(entries_of_any_kind)
def test_inside_a_file_no_element_is_misaligned(entries: list[Entry]) -> None:
    position = 0
    for e in aligned(entries):
        width = {"F32": 4, "BF16": 2, "U8": 1, "F64": 8}[e.as_dtype]
        assert position % width == 0
        position += e.size


@given(entries_of_any_kind, st.data(), st.sampled_from([8, 512, 4096]))
def test_the_size_of_any_stretch_is_that_of_the_file_it_makes(
    entries: list[Entry], data: st.DataObject, align: int
) -> None:
    heading = METADATA._replace(align=align)
    row = pack.Row(entries, *heading)
    start = data.draw(st.integers(0, len(entries) - 1))
    stop = data.draw(st.integers(start + 1, len(entries)))
    assert row.size(start, stop) == file_size(aligned(entries[start:stop], align), heading)
    limit = data.draw(st.sampled_from([file_size([e], heading) - less for e in entries for less in (0, 1)]))
    assert row.large(limit) == tuple(i for i, e in enumerate(entries) if file_size([e], heading) > limit)


sizes_of_pages = st.lists(
    st.tuples(st.sampled_from(["F32", "BF16", "U8", "F64"]), st.sampled_from([0, 1, 500, 1024, 2048, 4096, 8192])),
    min_size=1, max_size=30,
).map(lambda specs: [entry(f"t{i}", count, dtype, offset=i) for i, (dtype, count) in enumerate(specs)])  # fmt: skip


@given(sizes_of_pages, st.sampled_from([512, 4096]), st.integers(10_000, 60_000), st.sampled_from(["greedy", "layers"]))
def test_tensors_of_whole_pages_begin_at_pages_and_only_the_others_change_places(
    entries: list[Entry], align: int, limit: int, packing: str
) -> None:
    heading = METADATA._replace(align=align)
    for packed in pack.PACKINGS[packing](entries, limit, heading):
        ordered = aligned(packed, align)
        header = pack.header_of(ordered, heading)
        assert len(header) % align == 0 and len(header) - len(pack.header_of(ordered, METADATA)) < align
        assert len(header) + sum(e.size for e in packed) <= limit or len(packed) == 1
        position = len(header)
        for one in ordered:
            assert (
                position % (align if one.size % align == 0 else {"F32": 4, "BF16": 2, "U8": 1, "F64": 8}[one.as_dtype])
                == 0
            )
            position += one.size
        whole = [e for e in packed if e.size % align == 0]
        assert ordered[: len(whole)] == whole


def test_an_order_that_is_aligned_already_stays() -> None:
    entries = [entry("a", 4, "BF16"), entry("b", 2, "F32"), entry("c", 1, "U8")]
    assert aligned(entries) == entries


def test_a_file_that_fits_to_the_byte_is_not_cut() -> None:
    entries = row(100, 200, 300)
    exact = file_size(entries, METADATA)
    assert [len(b) for b in greedy(entries, exact, METADATA)] == [3]
    assert [len(b) for b in greedy(entries, exact - 1, METADATA)] == [2, 1]


def test_a_tensor_larger_than_the_size_gets_a_file_of_its_own() -> None:
    names = [[e.name for e in b] for b in greedy(row(200, 5000, 200), 1500, METADATA)]
    assert ["t1"] in names


def test_a_crumb_before_a_large_tensor_goes_on_behind_it() -> None:
    names = [[e.name for e in b] for b in greedy(row(10, 5000, 10, 10), 4000, METADATA)]
    assert names == [["t1"], ["t0", "t2", "t3"]]


def test_a_file_at_least_half_full_is_closed_before_a_large_tensor() -> None:
    names = [[e.name for e in b] for b in greedy(row(700, 5000, 10), 4000, METADATA)]
    assert names == [["t0"], ["t1"], ["t2"]]


def test_oversize_fail_names_the_largest_tensor_and_the_size_that_would_do() -> None:
    with pytest.raises(Oversize) as caught:
        check_size(row(10, 4500, 5000, 4800), 4000, METADATA, "fail")
    assert caught.value.facts["tensor"] == "t2"
    enough = caught.value.facts["bytes"]
    assert check_size(row(10, 4500, 5000, 4800), enough, METADATA, "fail") == []


def test_a_size_below_a_header_is_refused_with_the_smallest_that_works() -> None:
    entries = row(10, 5000)
    with pytest.raises(SizeTooSmall) as caught:
        check_size(entries, 20, METADATA, "own-shard")
    smallest = caught.value.facts["smallest"]
    assert [e.name for e in check_size(entries, smallest, METADATA, "own-shard")] == ["t0", "t1"]
    with pytest.raises(SizeTooSmall):
        check_size(entries, smallest - 1, METADATA, "own-shard")


def test_source_order_is_file_by_file_and_byte_by_byte() -> None:
    entries = [entry("c", 1, file=1), entry("b", 1, offset=8), entry("a", 1, offset=4)]
    assert [e.name for e in in_source_order(entries)] == ["a", "b", "c"]


ALIGNED, MISALIGNED = ["F32"], ["F32", "U8", "BF16"]


@pytest.mark.parametrize("dtypes", [pytest.param(ALIGNED, marks=pytest.mark.slow), MISALIGNED])
@pytest.mark.parametrize("packing", [greedy, balanced, layers])
def test_fifty_thousand_tensors_are_packed_in_a_second(packing: Packing, dtypes: list[str]) -> None:
    assert_packed_in_seconds(packing, 50_000, dtypes)


@pytest.mark.slow
@pytest.mark.parametrize("dtypes", [ALIGNED, MISALIGNED])
@pytest.mark.parametrize("packing", [greedy, balanced, layers])
def test_half_a_million_tensors_are_packed_in_seconds(packing: Packing, dtypes: list[str]) -> None:
    assert_packed_in_seconds(packing, 500_000, dtypes)


def assert_packed_in_seconds(packing: Packing, count: int, dtypes: list[str]) -> None:
    entries = [entry(f"h.{i // 5000}.t{i % 5000}", 3, dtypes[i % len(dtypes)], offset=i) for i in range(count)]
    start = time.process_time()
    bins = packing(entries, 2 * count, METADATA)
    assert within(time.process_time() - start, count / 50_000)
    assert sum(map(len, bins)) == len(entries) and len(bins) > 30


# ---------------------------------------------------------------------------------------------- the other packings


@pytest.mark.parametrize("packing", [balanced, layers])
@given(entries=entries_of_any_kind, limit=st.integers(300, 20_000))
def test_other_packings_keep_the_same_promises(packing: Packing, entries: list[Entry], limit: int) -> None:
    bins = packing(entries, limit, METADATA)
    assert sorted(e.name for b in bins for e in b) == sorted(e.name for e in entries)
    assert all(bins)
    assert all(file_size(aligned(b), METADATA) <= limit or len(b) == 1 for b in bins)


@given(entries_of_any_kind, st.integers(300, 20_000))
def test_balanced_needs_no_more_files_than_greedy(entries: list[Entry], limit: int) -> None:
    assert len(balanced(entries, limit, METADATA)) <= len(greedy(entries, limit, METADATA))


def test_balanced_files_are_equal() -> None:
    sizes = [file_size(b, METADATA) for b in balanced(row(*[100] * 21), 4400, METADATA)]
    assert len(sizes) > 2 and max(sizes) - min(sizes) <= 2 * 500


def test_greedy_leaves_no_crumb() -> None:
    entries = row(*[100] * 19)
    sizes = [file_size(b, METADATA) for b in greedy(entries, file_size(entries[:18], METADATA), METADATA)]
    assert len(sizes) == 2 and min(sizes) > max(sizes) / 2


def test_layers_keeps_each_block_in_one_file_and_counts_naturally() -> None:
    names = [f"model.layers.{i}.{part}" for i in range(12) for part in ("attn.weight", "mlp.weight")]
    entries = [entry(name, 100, offset=i) for i, name in enumerate(sorted(["model.norm.weight", *names]))]
    bins = layers(entries, 2500, METADATA)
    home = {e.name: i for i, b in enumerate(bins) for e in b}
    for i in range(12):
        assert home[f"model.layers.{i}.attn.weight"] == home[f"model.layers.{i}.mlp.weight"]
    order = [home[f"model.layers.{i}.attn.weight"] for i in range(12)]
    assert order == sorted(order) and len(bins) > 3


def test_a_number_of_more_digits_than_int_takes_is_one() -> None:
    names = ["a.2.w", f"a.{'9' * 5000}.w", f"a.1{'0' * 5000}.w"]
    assert [e.name for e in layers([entry(name, 1) for name in reversed(names)], 100_000, METADATA)[0]] == names


def test_a_block_that_fits_no_file_is_cut_and_the_rest_stays_whole() -> None:
    entries = [entry(f"h.{i}.{part}", 300, offset=i * 2 + j) for i in range(3) for j, part in enumerate("ab")]
    bins = layers(entries, 1500, METADATA)
    assert [len(b) for b in bins] == [1] * 6
    assert [len(b) for b in layers(entries, 2700, METADATA)] == [2, 2, 2]


def test_metadata_that_every_shard_would_repeat_beyond_what_a_plan_holds_is_refused() -> None:
    about = Heading({"note": "x" * 5 * MB})
    check_metadata(about, 10, 20 * MB)
    with pytest.raises(BadSize, match=r"20.* MB: 128 shards would repeat 640 MB of metadata.*use a larger size"):
        check_metadata(about, 128, 20 * MB)
