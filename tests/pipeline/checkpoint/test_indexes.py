"""The one parser of indexes: what loaders read it reads, and anything else is refused, with what is wrong with it."""

from __future__ import annotations

import codecs
import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.pipeline.checkpoint.indexes import leaves_folder, parse_index
from reshard.pipeline.errors import BadIndex, CheckpointError, LfsPointer, UnsafePath

PATH = "unet/model.safetensors.index.json"

names = st.text(min_size=1, max_size=6)
weight_maps = st.dictionaries(names, st.sampled_from(["a.bin", "./b.bin", "c/d.bin", "../x", "/y"]), min_size=1)


@given(weight_maps, st.none() | st.dictionaries(names, st.integers()))
def test_what_an_index_says_is_kept_and_its_files_are_told_from_those_outside(
    weight_map: dict[str, str], metadata: dict[str, int] | None
) -> None:
    document = {"weight_map": weight_map} | ({} if metadata is None else {"metadata": metadata})
    index = parse_index(json.dumps(document).encode(), PATH)
    assert (index.weight_map, index.metadata) == (weight_map, metadata)
    paths = {"a.bin": "unet/a.bin", "./b.bin": "unet/b.bin", "c/d.bin": "unet/c/d.bin"}
    assert index.files == {written: paths[written] for written in {*weight_map.values()} & paths.keys()}
    if outside := {*weight_map.values()} - paths.keys():
        with pytest.raises(UnsafePath) as caught:
            index.by_tensor()
        assert caught.value.facts["path"] in outside
    else:
        assert index.by_tensor() == {tensor: paths[written] for tensor, written in weight_map.items()}


@given(weight_maps)
def test_a_bare_map_is_an_index_without_metadata(weight_map: dict[str, str]) -> None:
    if weight_map.keys().isdisjoint({"weight_map", "metadata"}):
        index = parse_index(json.dumps(weight_map).encode(), PATH)
        assert (index.weight_map, index.metadata) == (weight_map, None)


@given(weight_maps, st.data())
def test_a_tensor_that_is_named_twice_is_refused_whichever_file_is_said_last(
    weight_map: dict[str, str], data: st.DataObject
) -> None:
    entries = [f"{json.dumps(tensor)}: {json.dumps(written)}" for tensor, written in weight_map.items()]
    twice = data.draw(st.sampled_from(entries))
    text = "{" + ", ".join([*entries, twice]) + "}"
    for document in (text, '{"metadata": {}, "weight_map": ' + text + "}"):
        with pytest.raises(BadIndex, match="duplicate key"):
            parse_index(document.encode(), PATH)


@given(st.binary() | st.recursive(st.none() | st.integers() | names, lambda inner: st.lists(inner) | st.dictionaries(
    st.sampled_from(["weight_map", "metadata", "a"]), inner
)).map(lambda document: json.dumps(document).encode()))  # fmt: skip
def test_whatever_it_holds_it_is_an_index_or_one_error_that_names_it(content: bytes) -> None:
    with suppress(CheckpointError):
        index = parse_index(content, PATH)
        assert index.weight_map and all(isinstance(written, str) for written in index.weight_map.values())
        assert all(path.startswith("unet/") and ".." not in path.split("/") for path in index.files.values())


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[]", "not a JSON object"),
        (codecs.BOM_UTF8 + b'{"a": "x"}', "byte order mark"),
        ('{"metadata": {}, "weight_map": {"a": "x"}}'.encode("utf-16"), "not JSON"),
        (b'{"a": "x", "a": "y"}', "duplicate key 'a'"),
        (b'{"metadata": {"total_size": 1, "total_size": 2}, "weight_map": {"a": "x"}}', "duplicate key 'total_size'"),
        (b"[" * 200_000, "nested too deeply"),
        (rb'{"metadata": {"x": "\ud800"}, "weight_map": {"a": "x"}}', "unpaired surrogate"),
        (b"{}", "weight_map is empty"),
        (b'{"weight_map": {}}', "weight_map is empty"),
        (b'{"weight_map": []}', "not a map from tensors to files"),
        (b'{"weight_map": {"a": 1}}', "not a map from tensors to files"),
        (b'{"weight_map": {"a": ["x"]}}', "not a map from tensors to files"),
        (b'{"a": 1}', "not a map from tensors to files"),
        (b'{"metadata": {}, "a": "x"}', "not a map from tensors to files"),
        (b'{"metadata": "x"}', "not a map from tensors to files"),
        (b'{"metadata": 1, "weight_map": {"a": "x"}}', "metadata is not a JSON object"),
        (b'{"metadata": null, "weight_map": {"a": "x"}}', "metadata is not a JSON object"),
        (b'{"a": "x.safetensors/"}', "'x.safetensors/', which is not the path of a file"),
        (b'{"a": "x.safetensors/."}', "is not the path of a file"),
        (b'{"a": "b/x.safetensors/./"}', "is not the path of a file"),
    ],
)
def test_what_is_no_index_is_refused_with_what_is_wrong(content: bytes, why: str) -> None:
    with pytest.raises(BadIndex, match=why) as caught:
        parse_index(content, PATH)
    assert str(caught.value).startswith(f"{PATH}: ")


def test_a_pointer_in_its_place_says_how_to_get_the_index() -> None:
    with pytest.raises(LfsPointer):
        parse_index(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", PATH)


@pytest.mark.parametrize(
    ("written", "leaves"),
    [
        ("model.safetensors", False),
        ("a b – ü.safetensors", False),
        ("first_state_dict.bin", False),
        ("..hidden.safetensors", False),
        ("./model.safetensors", False),
        ("part/model.safetensors", False),
        ("part/../../model.safetensors", True),
        ("..", True),
        (".", True),
        ("", True),
        ("/model.safetensors", True),
        ("..\\model.safetensors", True),
        ("C:\\model.safetensors", True),
        ("a\0b", True),
    ],
)
def test_names_stay_inside_the_folder(written: str, leaves: bool) -> None:
    assert leaves_folder(written) is leaves
    assert (written in parse_index(json.dumps({"a": written}).encode(), PATH).files) is not leaves
