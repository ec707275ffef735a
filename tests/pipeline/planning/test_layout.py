"""What a layout costs: reads, seeks, layers in pieces, and tensors that loaders copy once more."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.pipeline.checkpoint.formats.safetensors import parse_header
from reshard.pipeline.checkpoint.open import Opened
from reshard.pipeline.errors import BadRanks
from reshard.pipeline.limits import GB, MB
from reshard.pipeline.planning.layout import (
    Laid,
    Misaligned,
    Placed,
    as_it_is,
    misaligned,
    read_by,
    read_by_all,
    seeks,
    small_files,
    spread,
    to_be,
)
from reshard.pipeline.planning.readers import Readers, patterns, shares
from reshard.pipeline.tensors import Checkpoint, Name, StoredFile
from tests.pipeline.planning.builders import opened_named, plan_of
from tests.pipeline.planning.shapes import Shapes, deepseek_v3, llama_3_8b

MODEL = Name("", "model")


def laid(path: str, *tensors: tuple[str, int, int, int], size: int = 0) -> Laid:
    return Laid(path, size, MODEL, tuple(Placed(*one, 2) for one in tensors))


def test_each_rule_counts_what_its_loader_copies() -> None:
    odd = laid("a.safetensors", ("w", 2117, 4096, 2), ("v", 6213, 10, 1))
    even = laid("b.safetensors", ("x", 16384, 4096, 2), ("y", 20480, 512, 4), ("z", 20992, 6, 8), ("none", 20998, 0, 8))
    pickled = laid("c.bin", ("p", 3, 100, 2))
    assert misaligned([odd, even, pickled]) == [
        Misaligned("fastsafetensors", 2, 4106),
        Misaligned("runai", 1, 4096),
        Misaligned("512", 2, 4106),
        Misaligned("4096", 3, 4112),
        Misaligned("16384", 4, 4624),
    ]


shapes = st.dictionaries(
    st.from_regex(r"model\.layers\.[0-9]\.[a-c]\.weight", fullmatch=True),
    st.tuples(st.sampled_from(["U8", "BF16", "F32"]), st.tuples(st.integers(1, 40), st.sampled_from([1, 33, 256]))),
    min_size=1,
)


@given(named=shapes, align=st.sampled_from([8, 512, 4096]), size=st.integers(6000, 40_000))
def test_a_planned_layout_is_the_one_that_its_headers_say_once_it_is_written(
    named: Shapes, align: int, size: int
) -> None:
    plan = plan_of(opened_named(named, file_of=3000), size=size, align=align)
    found = to_be(plan)
    files, tensors = [], []
    for number, shard in enumerate(plan.shards):
        header = parse_header(shard.header, file=shard.path, file_size=shard.size)
        files.append(StoredFile(shard.path, shard.size))
        tensors += header.as_tensors(number)
    checkpoint = Checkpoint(MODEL, tuple(range(len(files))), tuple(tensors))
    assert as_it_is(Opened(tuple(files), (checkpoint,), {})) == found
    counted = {one.rule: one for one in misaligned(found)}
    assert counted["runai"].tensors == 0, "what reshard writes is never copied for its elements"
    if align > 8:
        assert counted["fastsafetensors"].tensors == 0
        odd = [e for shard in plan.shards for e in shard.entries if e.size % align]
        assert counted[str(align)].tensors <= len(odd), "those of whole blocks are at blocks"


@given(st.data())
def test_patterns_of_all_ranks_are_the_whole_of_any_layout_and_name_nothing_twice(data: st.DataObject) -> None:
    """Files with any names, each with tensors of anyone, as others cut them."""
    count = 4
    names = [f"model.layers.{n}.mlp.experts.{e}.up_proj.weight" for n in range(count) for e in range(count)]
    names += [f"model.layers.{n}.input_layernorm.weight" for n in range(count)] + ["model.norm.weight"]
    numbered = st.integers(1, 40).map("m-{:02d}-of-40.safetensors".format)
    odd = st.from_regex(r"(sub/)?[a-z*\[]{1,2}(-[0-9]{1,3}){0,2}\.safetensors", fullmatch=True)
    paths = data.draw(st.lists(st.one_of(numbered, odd), min_size=1, max_size=12, unique=True))
    of = {name: data.draw(st.sampled_from(paths)) for name in names}
    rows = {path: [name for name in names if of[name] == path] for path in paths}
    files = [laid(path, *((n, 8, 5, 1) for n in row), size=100 + 5 * len(row)) for path, row in rows.items()]
    readers = Readers.of(data.draw(st.sampled_from(["ep2", "ep4", "pp2", "pp3", "pp4"])))
    found, notes = read_by(files, readers, {})
    share = shares(names, readers).of
    assert not notes and len(found) == readers.ranks
    for one in found:
        own = {name for name in names if share.get(name, one.rank) == one.rank}
        assert {*one.files} == {of[name] for name in own}
        assert one.needed == 5 * len(own)
        globs = patterns(one.files, {*paths} - {*one.files})
        assert {path for path in paths if any(fnmatchcase(path, glob) for glob in globs)} == {*one.files}
    assert {path for one in found for path in one.files} == {path for path, row in rows.items() if row}


def test_layers_that_lie_in_several_files_are_counted() -> None:
    files = [
        laid("a", ("model.layers.0.w", 0, 4, 2), ("model.layers.1.w", 4, 4, 2), ("model.norm.weight", 8, 4, 2)),
        laid("b", ("model.layers.1.v", 0, 4, 2), ("model.layers.0.v", 4, 4, 2), ("model.layers.2.w", 8, 4, 2)),
    ]
    assert spread(files) == (2, 2), "not a layer of one tensor"
    assert spread([files[0]]) == (0, 0)
    names = ("ln_f.weight", "ln_f.bias", "text.embeddings.w", "text.embeddings.v")
    beside = [(name, 4 * number, 4, 2) for number, name in enumerate(names)]
    assert spread([laid("c", *beside)]) == (0, 0), "they have no number"


def test_a_reader_that_goes_by_the_index_seeks_where_the_file_has_another_order() -> None:
    files = [laid("a", ("x", 8, 4, 2), ("z", 12, 4, 2)), laid("b", ("y", 8, 4, 2))]
    assert seeks(files, ["x", "z", "y"]) == 2
    assert seeks(files, ["x", "y", "z"]) == 3
    assert seeks(files, ["z", "x", "gone", "y"]) == 3


def test_ranks_of_tensor_parallelism_read_every_file() -> None:
    files = as_it_is(opened_named(llama_3_8b(), file_of=5 * GB))
    found = read_by_all(files, 8)
    assert found.bytes == sum(file.size for file in files) and len(found.files) == len(files)
    assert 1 / 8 < found.needed / found.bytes < 0.1251, "norms are whole for each"
    assert small_files(files) == 0 and small_files([*files, laid("tiny", size=MB)]) == 1


def test_a_published_layout_shows_what_ranks_read_of_it() -> None:
    """DeepSeek-V3 as it is published, 4.3 GB a file: a rank of eight needs 106 GB."""
    files = as_it_is(opened_named(deepseek_v3(), file_of=4_300 * MB))
    found, notes = read_by(files, Readers.of("ep8"), {MODEL: 61})
    assert not notes
    assert all(105 * GB < one.needed < 108 * GB and one.bytes > 390 * GB for one in found)


def test_a_model_without_such_parts_beside_one_that_has_them_is_read_by_all() -> None:
    opened = opened_named({f"model.layers.{n}.w": ("U8", (50,)) for n in range(4)}, file_of=1000)
    files = as_it_is(opened)
    beside = Laid("vae.safetensors", 300, Name("", "vae"), (Placed("conv.w", 100, 200, 1, 1),))
    found, (note,) = read_by([*files, beside], Readers.of("pp2"), {})
    assert all(beside.path in one.files and one.needed == 300 for one in found)
    assert note.startswith("vae: cannot use ranks pp2: ") and note.endswith("every rank reads all of it")
    with pytest.raises(BadRanks):
        read_by([beside, beside._replace(model=Name("", "other"))], Readers.of("pp2"), {})
