"""The rules of index, headers and folder: an honest checkpoint breaks none, and each way to break one is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.pipeline.checkpoint.formats.safetensors import Header, build_header, parse_header
from reshard.pipeline.checkpoint.indexes import Index, parse_index
from reshard.pipeline.errors import BadHeader, CheckpointError
from reshard.pipeline.verifying.structure import (
    Finding,
    Total,
    are_of,
    check_index,
    check_weight_files,
    compare,
    signature,
)

INDEX = "unet/model.safetensors.index.json"


def parsed(document: dict[str, Any], path: str = INDEX) -> Index:
    return parse_index(json.dumps(document).encode(), path)


@dataclass
class Folder:
    """A checkpoint as the rules see it, easy to break."""

    index: dict[str, Any]
    headers: dict[str, Header | CheckpointError]
    listing: set[str]

    def findings(self) -> list[Finding]:
        return list(check_index(parsed(self.index), self.headers, self.listing))

    def rules(self) -> set[str]:
        return {finding.rule for finding in self.findings()}


def header(
    tensors: dict[str, tuple[int, ...]], metadata: dict[str, str] | None = None, extra: int = 0
) -> Header | CheckpointError:
    """The header of a file of BF16 tensors that is ``extra`` bytes longer than it should be."""
    data = build_header(
        [(name, "BF16", shape) for name, shape in tensors.items()],
        {"format": "pt"} if metadata is None else metadata,
    )
    size = len(data) + sum(2 * prod(shape) for shape in tensors.values()) + extra
    try:
        return parse_header(data, file="unet/model.safetensors", file_size=size)
    except CheckpointError as error:
        return error


def folder(files: dict[str, dict[str, tuple[int, ...]]]) -> Folder:
    headers = {f"unet/{file}": header(tensors) for file, tensors in files.items()}
    total = sum(2 * prod(shape) for tensors in files.values() for shape in tensors.values())
    return Folder(
        {
            "metadata": {"total_size": total},
            "weight_map": {name: file for file, tensors in files.items() for name in tensors},
        },
        headers,
        {*headers, INDEX, "config.json", "unet/mtp.safetensors"},
    )


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def honest() -> Folder:
    return folder({ONE: {"embed": (8, 4), "norm": (4,)}, TWO: {"head": (8, 4), "scale": ()}})


def wrong_shard(it: Folder) -> None:
    it.index["weight_map"]["norm"] = TWO


def swapped_names(it: Folder) -> None:
    it.index["weight_map"] |= {"norm": TWO, "head": ONE}


def key_left_out(it: Folder) -> None:
    del it.index["weight_map"]["norm"]


def ghost_key(it: Folder) -> None:
    it.index["weight_map"]["nobody"] = ONE


def total_too_small(it: Folder) -> None:
    it.index["metadata"]["total_size"] -= 1


def total_left_out(it: Folder) -> None:
    del it.index["metadata"]["total_size"]


def total_of_nothing(it: Folder) -> None:
    it.index["metadata"]["total_size"] = None


def parameters_of_text(it: Folder) -> None:
    it.index["metadata"]["total_parameters"] = "many"


def one_parameter(it: Folder) -> None:
    it.index["metadata"]["total_parameters"] = 1


def total_as_text(it: Folder) -> None:
    it.index["metadata"]["total_size"] = str(it.index["metadata"]["total_size"])


def dotted_path(it: Folder) -> None:
    it.index["weight_map"] = {name: f"./{file}" for name, file in it.index["weight_map"].items()}


def no_metadata(it: Folder) -> None:
    del it.index["metadata"]


def bare_map(it: Folder) -> None:
    it.index = it.index["weight_map"]


def same_key_twice(it: Folder) -> None:
    it.headers[f"unet/{TWO}"] = header({"head": (8, 4), "scale": (), "norm": (4,)})
    it.index["metadata"]["total_size"] += 8


def escape(it: Folder) -> None:
    it.index["weight_map"]["head"] = "../outside.safetensors"


def absolute(it: Folder) -> None:
    it.index["weight_map"]["head"] = "/etc/outside.safetensors"


def shard_absent(it: Folder) -> None:
    del it.headers[f"unet/{TWO}"]
    it.listing.remove(f"unet/{TWO}")


def stale_single_file(it: Folder) -> None:
    it.listing.add("unet/model.safetensors")


def stale_shard(it: Folder) -> None:
    it.listing.add("unet/model-00003-of-00003.safetensors")


def one_byte_short(it: Folder) -> None:
    it.headers[f"unet/{ONE}"] = header({"embed": (8, 4), "norm": (4,)}, extra=-1)


def one_byte_long(it: Folder) -> None:
    it.headers[f"unet/{ONE}"] = header({"embed": (8, 4), "norm": (4,)}, extra=1)


def header_unreadable(it: Folder) -> None:
    it.headers[f"unet/{ONE}"] = BadHeader(file=f"unet/{ONE}", why="norm overlaps another tensor")


def no_format(it: Folder) -> None:
    it.headers[f"unet/{ONE}"] = header({"embed": (8, 4), "norm": (4,)}, {"by": "hand"})


@pytest.mark.parametrize(
    ("fault", "rules", "named"),
    [
        (wrong_shard, {"wrong_file"}, "norm"),
        (swapped_names, {"wrong_file"}, "head"),
        (key_left_out, {"missing"}, "norm"),
        (ghost_key, {"ghost"}, "nobody"),
        (total_too_small, {"total_size"}, "total_size 137"),
        (total_left_out, {"no_total_size"}, "has no total_size"),
        (total_of_nothing, {"total_size"}, "total_size None"),
        (parameters_of_text, {"total_parameters"}, "total_parameters 'many', which is not a count"),
        (one_parameter, {"other_parameters"}, "total_parameters 1, but the tensors have 69 elements"),
        (total_as_text, {"total_size"}, "total_size '138' as text, but the tensors have 138 bytes"),
        (dotted_path, {"wrong_file"}, f"'./{ONE}', which loaders do not find on a Hub; write '{ONE}'"),
        (no_metadata, {"index_metadata"}, INDEX),
        (bare_map, {"index_metadata"}, INDEX),
        (same_key_twice, {"duplicate"}, "norm"),
        (escape, {"escape", "wrong_file"}, "../outside.safetensors"),
        (absolute, {"escape", "wrong_file"}, "/etc/outside.safetensors"),
        (shard_absent, {"absent_file"}, TWO),
        (stale_single_file, {"stale_file"}, "use it instead of the index"),
        (stale_shard, {"stale_file"}, "model-00003-of-00003.safetensors"),
        (one_byte_short, {"length"}, "bytes, but its header requires"),
        (one_byte_long, {"length"}, "bytes, but its header requires"),
        (header_unreadable, {"header"}, "norm overlaps another tensor"),
        (no_format, {"format"}, ONE),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_each_fault_is_found_and_named(fault: Callable[[Folder], None], rules: set[str], named: str) -> None:
    it = honest()
    assert it.findings() == []
    fault(it)
    assert it.rules() == rules
    assert any(named in str(finding) for finding in it.findings())


def test_parameters_are_about_as_many_as_the_elements_unless_these_are_quantized() -> None:
    it = honest()
    for parameters, rules in ((36, set[str]()), (69, set()), (137, set()), (34, {"other_parameters"})):
        it.index["metadata"]["total_parameters"] = parameters
        assert it.rules() == rules, parameters
    known = it.headers[f"unet/{ONE}"]
    assert isinstance(known, Header)
    kinds = {name: spec._replace(dtype="U8") for name, spec in known.tensors.items()}
    it.headers[f"unet/{ONE}"] = replace(known, tensors=kinds)
    assert it.rules() == set()


@pytest.mark.parametrize(("said", "honest"), [(95, False), (96, True), (100.5, True), (138, True), (139, False)])
def test_of_files_that_writers_count_in_several_ways_a_total_is_one_of_theirs(said: float, honest: bool) -> None:
    it = folder({ONE: {"embed": (8, 4), "norm": (4,)}, TWO: {"head": (8, 4), "scale": ()}})
    it.index["metadata"]["total_size"] = said
    totals = {f"unet/{ONE}": Total(30, 72)}  # the other file has 66 bytes, whoever counts
    found = list(check_index(parsed(it.index), it.headers, it.listing, totals))
    assert [finding.rule for finding in found] == ([] if honest else ["total_size"])


@pytest.mark.parametrize(
    ("index", "own", "stale"),
    [
        ("model.safetensors.index.json", "model-1-of-1.safetensors", ["model.safetensors"]),
        (
            "model.safetensors.index.fp16.json",
            "model.fp16-00001-of-00002.safetensors",
            ["model.fp16.safetensors", "model-00002-of-00002.fp16.safetensors"],
        ),
        ("pytorch_model.bin.index.json", "a.bin", ["pytorch_model-00001-of-00002.bin", "pytorch_model.bin"]),
        ("vae/flow.safetensors.index.json", "vae/odd name.safetensors", ["vae/flow-00001-of-00009.safetensors"]),
    ],
)
def test_only_files_of_the_same_name_and_variant_are_stale(index: str, own: str, stale: list[str]) -> None:
    others = ["mtp.safetensors", "model.fp32.safetensors", "other/model.safetensors", "x.bin"]
    file = own.rsplit("/", 1)[-1]
    document = {"metadata": {"total_size": 8}, "weight_map": {"x": file}}
    findings = list(check_index(parsed(document, index), {own: header({"x": (4,)})}, [own, *others, *stale]))
    assert [(finding.rule, finding.file) for finding in findings] == [("stale_file", path) for path in sorted(stale)]


def test_compare_names_every_difference() -> None:
    source = {"a": ("BF16", (2, 3)), "b": ("F32", (4,)), "c": ("I8", ())}
    output = {"a": ("BF16", (3, 2)), "b": ("F16", (4,)), "d": ("I8", ())}
    assert {(finding.rule, finding.tensor) for finding in compare(source, output)} == {
        ("shape", "a"),
        ("dtype", "b"),
        ("lost", "c"),
        ("added", "d"),
    }
    assert list(compare(source, deepcopy(source))) == []


names = st.text(min_size=1, max_size=6)
layouts = st.dictionaries(names, st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=2, max_size=12).flatmap(
    lambda tensors: st.lists(st.integers(1, 4), min_size=len(tensors), max_size=len(tensors)).map(
        lambda places: folder(
            {
                f"model-{place:05}-of-00004.safetensors": {
                    name: shape for (name, shape), at in zip(tensors.items(), places, strict=True) if at == place
                }
                for place in set(places)
            }
        )
    )
)


@given(layouts)
def test_an_honest_layout_breaks_no_rule(it: Folder) -> None:
    assert it.findings() == []
    assert list(check_weight_files(it.headers)) == []
    assert len(signature(it.headers)) == len(it.index["weight_map"])
    assert are_of(it.headers, signature(it.headers))


@given(layouts, st.data())
def test_one_entry_of_the_index_changed_is_always_found(it: Folder, data: st.DataObject) -> None:
    weight_map = it.index["weight_map"]
    name = data.draw(st.sampled_from(sorted(weight_map)))
    before = weight_map[name]
    other = data.draw(st.sampled_from([*sorted(set(weight_map.values()) - {before}), "../x", None]))
    if other is None:
        del weight_map[name]
    else:
        weight_map[name] = other
    # A file that lost its only entry is reported as a file.
    assert any(name == finding.tensor or finding.file == f"unet/{before}" for finding in it.findings())


@given(layouts, st.data())
def test_one_tensor_lost_from_a_file_is_always_found(it: Folder, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(it.headers)))
    name = data.draw(st.sampled_from(sorted(it.headers[path].tensors)))
    before = signature(it.headers)
    shapes = {key: spec.shape for key, spec in it.headers[path].tensors.items() if key != name}
    it.headers[path] = header(shapes)
    assert ("ghost", name) in {(finding.rule, finding.tensor) for finding in it.findings()}
    assert [finding.rule for finding in compare(before, signature(it.headers))] == ["lost"]
    assert not are_of(it.headers, before)


@pytest.mark.parametrize(
    "second",
    [
        {"head": (8, 4), "norm": (4,)},  # instead of "scale", and as many as before
        {"head": (8, 4), "scales": ()},
        {"head": (4, 8), "scale": ()},
        {"head": (8, 4), "scale": (), "more": ()},
    ],
)
def test_a_tensor_that_is_there_twice_does_not_stand_for_a_lost_one(
    second: dict[str, tuple[int, ...]],
) -> None:
    source = signature(honest().headers)
    it = folder({ONE: {"embed": (8, 4), "norm": (4,)}, TWO: second})
    assert not are_of(it.headers, source)
    assert [*compare(source, signature(it.headers))]


def test_what_save_pretrained_writes_breaks_no_rule(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=128
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path, max_shard_size="20KB")
    headers = {
        path.name: parse_header(path.read_bytes(), file=path.name, file_size=path.stat().st_size)
        for path in tmp_path.glob("*.safetensors")
    }
    assert len(headers) > 2
    index = "model.safetensors.index.json"
    listing = [path.name for path in tmp_path.iterdir()]
    assert list(check_index(parse_index((tmp_path / index).read_bytes(), index), headers, listing)) == []
