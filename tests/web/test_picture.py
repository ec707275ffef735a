"""A plan's picture is true: its bands are as high as the bytes that they stand for, and there are never too many."""

from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import assume, given
from hypothesis import strategies as st

from reshard.pipeline.checkpoint.open import Opened
from reshard.pipeline.planning.model import Plan
from reshard.pipeline.tensors import Checkpoint, Name, Piece, StoredFile, Tensor
from reshard.web.pages.charts import HEIGHT, bars
from reshard.web.pages.picture import BANDS_MAX, FILES_MAX, SHAPES_MAX, Picture, drawing, picture
from tests.pipeline.planning.builders import opened_of, plan_of, sources


def shapes(seen: Picture) -> int:
    return len(seen.sources) + len(seen.targets) + len(seen.bands)


def bytes_from(plan: Plan, file: int) -> int:
    entries = (entry for shard in plan.shards for entry in shard.entries)
    return sum(entry.size for entry in entries if entry.tensor.pieces and entry.tensor.pieces[0].file == file)


@given(sources, st.integers(300, 4000))
def test_the_bands_of_a_file_tile_all_of_it_but_its_header(sizes: list[list[int]], size: int) -> None:
    plan = plan_of(opened_of(sizes), size=size)
    assume(len(plan.shards) <= FILES_MAX)  # beyond it one box is several files
    seen = picture(plan)
    for number, shard in enumerate(plan.shards):
        mine = [band for band in seen.bands if band.target == number]
        assert sum(band.end - band.begin for band in mine) == shard.size - len(shard.header)
        if mine:
            assert mine[0].begin == len(shard.header) and mine[-1].end == shard.size
        assert all(one.end == other.begin for one, other in pairwise(mine))
    for number, file in enumerate(plan.files):
        mine = sorted((band.start, band.stop) for band in seen.bands if band.source == number)
        assert sum(stop - start for start, stop in mine) == bytes_from(plan, number)
        assert all(one[1] <= other[0] for one, other in pairwise(mine)) and all(stop <= file.size for _, stop in mine)
    assert sum(band.tensors for band in seen.bands) == sum(bool(size) for row in sizes for size in row)


@given(sources, st.integers(300, 4000))
def test_what_is_drawn_is_as_high_as_its_bytes(sizes: list[list[int]], size: int) -> None:
    plan = plan_of(opened_of(sizes), size=size)
    assume(len(plan.shards) <= FILES_MAX)
    drawn = drawing(picture(plan))
    for number, (shard, rect) in enumerate(zip(plan.shards, drawn.targets, strict=True)):
        edges = [[float(word) for word in path.d.replace("Z", "").replace("C", " ").replace("V", " ")[1:].split()]
                 for path in drawn.paths if path.band.target == number]  # fmt: skip
        heights = [edge[8] - edge[7] for edge in edges]
        part = (shard.size - len(shard.header)) / shard.size
        assert abs(sum(heights) - rect.height * part) <= 0.01 * (len(heights) + 1)
    for rects in (drawn.sources, drawn.targets):
        assert all(one.y + one.height < other.y for one, other in pairwise(rects))
        assert all(rect.y + rect.height <= drawn.height + 0.02 for rect in rects)


def scattered(files: int, each: int) -> Plan:
    """Many small tensors, those of a layer spread over all files."""
    order = [*range(files * each)]
    random.Random(7).shuffle(order)
    tensors = []
    for place, number in enumerate(order):
        file, at = place % files, 64 + place // files * 8
        tensors.append(Tensor(f"model.layers.{number // 4}.w{number % 4}", "U8", (8,), (Piece(file, at, (0,), (8,)),)))
    stored = tuple(StoredFile(f"part{n:03}.safetensors", 64 + each * 8, sha256=f"{n:064x}") for n in range(files))
    checkpoint = Checkpoint(Name("", "model"), tuple(range(files)), tuple(tensors))
    return plan_of(Opened(stored, (checkpoint,), {}), size=20_000, pack="layers")


def test_large_models_are_folded() -> None:
    in_order = picture(plan_of(opened_of([[8] * 300] * 80), size=30_000))
    assert len(in_order.sources) <= FILES_MAX and len(in_order.bands) <= BANDS_MAX
    assert in_order.sources[0].name == "part0.safetensors and 2 more"
    everywhere = picture(scattered(70, 120))
    assert len(everywhere.bands) > FILES_MAX and shapes(everywhere) <= SHAPES_MAX
    assert sum(band.end - band.begin for band in everywhere.bands) == 70 * 120 * 8


def test_tensors_of_one_layer_share_a_band() -> None:
    names = [f"model.layers.{layer}.{part}.weight" for layer in range(3) for part in "qkv"]
    tensors = tuple(
        Tensor(name, "U8", (100,), (Piece(0, 64 + 100 * number, (0,), (100,)),)) for number, name in enumerate(names)
    )
    opened = Opened((StoredFile("m.safetensors", 964),), (Checkpoint(Name("", "model"), (0,), tensors),), {})
    seen = picture(plan_of(opened, size=10_000))
    assert [(band.name, band.tensors) for band in seen.bands] == [(f"model.layers.{n}", 3) for n in range(3)]


def test_a_plan_without_weights_is_drawn_as_nothing() -> None:
    assert drawing(Picture([], [], [])).paths == []


@given(st.lists(st.lists(st.floats(0, 1e15), max_size=3), min_size=1, max_size=24))
def test_bars_stay_in_their_place_and_none_is_lost(hours: list[list[float]]) -> None:
    drawn = bars("", "", [("", [("", value, "") for value in row]) for row in hours])
    assert all(bar.y >= 0 and bar.y + bar.height <= HEIGHT + 0.01 for bar in drawn.bars)
    assert len(drawn.bars) == sum(value > 0 for row in hours for value in row)
