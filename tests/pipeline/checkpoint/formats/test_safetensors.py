"""Headers: what the format's own reader refuses, ours refuses too, by one clear error; what it writes, ours reads."""

from __future__ import annotations

import json
import sys
import tracemalloc
from typing import Any

import pytest
import safetensors
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from reshard.pipeline.checkpoint.formats.safetensors import (
    build_header,
    entry_sizes,
    metadata_size,
    padded,
    parse_header,
)
from reshard.pipeline.errors import BadHeader, BadLength, CheckpointError
from reshard.pipeline.tensors import DTYPE_BITS, size_in_bytes
from tests.support.examples import examples

WHOLE_BYTES = sorted(dtype for dtype, bits in DTYPE_BITS.items() if bits % 8 == 0)
tensor_specs = st.dictionaries(
    st.text(min_size=1, max_size=20).filter(lambda name: name != "__metadata__" and name.isprintable()),
    st.tuples(st.sampled_from(WHOLE_BYTES), st.lists(st.integers(0, 5), max_size=4).map(tuple)),
    max_size=12,
)


def file_of(header: dict[str, Any] | str | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def spec(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def parse(content: bytes) -> Any:
    return parse_header(content, file="x.safetensors", file_size=len(content))


@given(tensor_specs, st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3))
def test_what_we_write_is_what_we_and_the_format_read(
    tensors: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str]
) -> None:
    header = build_header(((name, *spec) for name, spec in tensors.items()), metadata)
    data = sum(size_in_bytes(*spec) for spec in tensors.values())
    content = header + bytes(data)
    parsed = parse(content)
    assert parsed.specs() == tensors
    assert parsed.metadata == metadata
    assert parsed.data_start == len(header) and len(header) % 8 == 0
    theirs = {name: (found["dtype"], tuple(found["shape"])) for name, found in safetensors.deserialize(content)}
    assert theirs == tensors


@given(tensor_specs, st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3))
def test_the_size_of_a_header_is_known_without_building_it(
    tensors: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str]
) -> None:
    position, digits = 0, 0
    for spec in tensors.values():
        digits += len(str(position))
        position += size_in_bytes(*spec)
        digits += len(str(position))
    entries = sum(entry_sizes(list(tensors), tensors.values()))
    exact = len(build_header(((name, *spec) for name, spec in tensors.items()), metadata))
    assert padded(metadata_size(metadata) + entries + digits) == exact


@given(st.binary(max_size=200))
def test_any_bytes_are_a_header_or_a_named_error(content: bytes) -> None:
    try:
        parsed = parse(content)
    except CheckpointError as error:
        assert "x.safetensors" in str(error)
    else:
        assert sum(size_in_bytes(*found) for found in parsed.specs().values()) == len(content) - parsed.data_start


A_SPEC = json.dumps(spec())
HOSTILE = {
    "too few bytes for a length": (b"\x01\x02", BadHeader),
    "a header of 100 GB": (file_of({}, length=100 * 1000**3), BadHeader),
    "a header longer than the file": (file_of({}, length=1000), BadLength),
    "no JSON": (file_of("{not json"), BadHeader),
    "JSON that is no object": (file_of("[1, 2]"), BadHeader),
    "nested a million deep": (file_of("[" * 100_000), BadHeader),
    "no UTF-8": (file_of(b"\xff\xfe{}"), BadHeader),
    "a name twice, for other bytes": (
        file_of(f'{{"a":{A_SPEC},"a":{json.dumps(spec(offsets=(4, 8)))}}}', b"12345678"),
        BadHeader,
    ),
    "a field twice": (
        file_of('{"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}', b"1234"),
        BadHeader,
    ),
    "metadata twice": (file_of('{"__metadata__":{},"__metadata__":{}}'), BadHeader),
    "a dimension of minus zero": (file_of('{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}'), BadHeader),
    "a number that is none": (file_of('{"a":{"x":NaN,"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), BadHeader),
    "an endless integer": (
        file_of('{"a":{"x":1' + "0" * 400 + ',"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
        BadHeader,
    ),
    "an endless number": (file_of('{"a":{"x":1e400,"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), BadHeader),
    "a dimension of more than 64 bits": (file_of({"a": spec(shape=(0, 2**70), offsets=(0, 0))}), BadHeader),
    "more elements than 64 bits count, and none": (
        file_of({"a": spec(shape=(2**63, 4, 0), offsets=(0, 0))}),
        BadHeader,
    ),
    "a name that no UTF-8 can hold": (file_of(f'{{"\\ud800":{A_SPEC}}}', b"1234"), BadHeader),
    "an unknown dtype": (file_of({"a": spec("U7")}, b"1234"), BadHeader),
    "a dtype that is no string": (file_of({"a": spec([])}, b"1234"), BadHeader),
    "a negative dimension": (file_of({"a": spec(shape=(-4,))}, b"1234"), BadHeader),
    "a dimension that is true": (file_of({"a": spec(shape=(True, 4))}, b"1234"), BadHeader),
    "a dimension with a fraction": (file_of({"a": spec(shape=(4.0,))}, b"1234"), BadHeader),
    "a shape that lies": (file_of({"a": spec(shape=(5,))}, b"1234"), BadHeader),
    "a shape of more bytes than there are numbers": (file_of({"a": spec(shape=(2**62, 2**62))}, b"1234"), BadHeader),
    "half a byte": (file_of({"a": spec("F4", (1,), (0, 0))}), BadHeader),
    "offsets backwards": (file_of({"a": spec(offsets=(4, 0))}, b"1234"), BadHeader),
    "three offsets": (file_of({"a": spec(offsets=(0, 2, 4))}, b"1234"), BadHeader),
    "an overlap": (file_of({"a": spec(), "b": spec(offsets=(2, 6))}, b"123456"), BadHeader),
    "a hole": (file_of({"a": spec(), "b": spec(offsets=(6, 10))}, b"1234567890"), BadHeader),
    "a hole in front": (file_of({"a": spec(offsets=(2, 6))}, b"123456"), BadHeader),
    "data after the last tensor": (file_of({"a": spec()}, b"123456"), BadLength),
    "data cut off": (file_of({"a": spec()}, b"12"), BadLength),
    "metadata that is no text": (file_of({"__metadata__": {"a": 1}}), BadHeader),
    "metadata that is a list": (file_of({"__metadata__": []}), BadHeader),
    "a tensor without a dtype": (file_of({"a": {"shape": [4], "data_offsets": [0, 4]}}, b"1234"), BadHeader),
}


@pytest.mark.parametrize("trouble", HOSTILE)
def test_a_hostile_header_is_refused_by_name(trouble: str) -> None:
    content, kind = HOSTILE[trouble]
    with pytest.raises(kind) as caught:
        parse(content)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(content)


ODD = {
    "a name twice": file_of(f'{{"a":{json.dumps(spec("I8"))},"a":{A_SPEC}}}', b"1234"),
    "a thousand dimensions": file_of({"a": spec(shape=(1,) * 999 + (4,))}, b"1234"),
    "no metadata": file_of({"__metadata__": None, "a": spec()}, b"1234"),
    "metadata with a key twice": file_of('{"__metadata__":{"a":"1","a":"2"}}'),
    "an empty tensor of a huge dimension": file_of({"a": spec(shape=(0, 2**64 - 1), offsets=(0, 0))}),
    "fields in a list": file_of({"a": ["U8", [4], [0, 4]]}, b"1234"),
    "a dtype as an object": file_of({"a": spec({"U8": None})}, b"1234"),
    "other fields": file_of({"a": spec() | {"x": [{"y": [-1.5, 10**300]}]}}, b"1234"),
    "a character outside of the basic plane": file_of(f'{{"\\ud83d\\ude00":{A_SPEC}}}', b"1234"),
    "an empty name": file_of({"": spec()}, b"1234"),
}


CLUTTER = {
    "more than a thousand dimensions": spec(shape=(1,) * 1000 + (4,)),
    "more than a thousand dimensions of an empty tensor": spec(shape=(0,) * 3000, offsets=(0, 0)),
    "arrays that no tensor needs": spec() | {"x": [[] for _ in range(1100)]},
    "objects that no tensor needs": spec() | {"x": [{} for _ in range(1100)]},
}


@pytest.mark.parametrize("clutter", CLUTTER)
def test_what_only_takes_memory_is_refused_although_the_library_takes_it(clutter: str) -> None:
    entry = CLUTTER[clutter]
    content = file_of({"a": entry}, bytes(entry["data_offsets"][1]))
    assert len(safetensors.deserialize(content)) == 1
    with pytest.raises(
        BadHeader, match="1,000 dimensions|has [0-9,]+ dimensions|arrays and objects [(]more than 1,016"
    ):
        parse(content)


def test_texts_of_metadata_may_have_any_brackets() -> None:
    metadata = {"workflow": json.dumps([[{"a": []}]] * 5000)}
    content = file_of({"__metadata__": metadata, "a": spec()}, b"1234")
    assert parse(content).metadata == metadata


@pytest.mark.parametrize("oddity", ODD)
def test_an_odd_header_is_read_as_the_format_reads_it(oddity: str) -> None:
    assert agrees(ODD[oddity])


def agrees(content: bytes) -> bool:
    """Whether the library accepts ``content``; fails unless the reader says the same of it."""
    theirs: Any = None
    ours: Any = None
    try:
        theirs = {name: (t["dtype"], tuple(t["shape"])) for name, t in safetensors.deserialize(content)}
    except safetensors.SafetensorError as error:
        theirs, said = None, str(error)
    else:
        said = "accepted"
    try:
        ours = parse(content).specs()
    except CheckpointError as error:
        assert theirs is None, f"{content!r} is refused ({error}), and the library takes it"
    else:
        assert ours == theirs, f"{content!r} is accepted, and the library says: {said}"
    return theirs is not None


numbers = st.sampled_from(
    ["0", "1", "4", "-0", "-1", "0.0", "1e0", "1e400", "NaN", "Infinity", "01", "1.", "true", "null", '"4"', "[]", "{}"]
    + [str(2**p - less) for p in (31, 63, 64, 70, 1100) for less in (0, 1)]
)
names = st.sampled_from(
    ['"a"', '"b"', '"__metadata__"', '""', '"\\ud800"', '"\\ud83d\\ude00"', '"\\u005f"', '"\x01"', "a", "1"]
)


def lists(parts: st.SearchStrategy[str], most: int) -> st.SearchStrategy[str]:
    return st.lists(parts, max_size=most).map(lambda found: f"[{','.join(found)}]")


def objects(keys: st.SearchStrategy[str], values: st.SearchStrategy[str], most: int = 3) -> st.SearchStrategy[str]:
    pairs = st.tuples(keys, values).map(":".join)
    return st.lists(pairs, max_size=most).map(lambda found: f"{{{','.join(found)}}}")


anything = st.recursive(st.one_of(numbers, names), lambda inner: st.one_of(lists(inner, 3), objects(names, inner)))
depths = st.integers(120, 130).map(lambda depth: "[" * depth + "]" * depth)
shapes = st.one_of(st.sampled_from(["[4]", "[2,2]", "[0]", "[]", f"[{'1,' * 99}4]"]), lists(numbers, 4), anything)
offsets = st.one_of(st.sampled_from(["[0,4]", "[0,0]", "[4,4]", "[0,1]", "[4,8]"]), lists(numbers, 3), anything)
dtypes = st.one_of(st.sampled_from(['"U8"', '"F32"', '"F4"', '"U9"', '{"U8":null}', '{"U8":[]}']), anything)


@st.composite
def entries(draw: st.DrawFn) -> str:
    fields = [("dtype", draw(dtypes)), ("shape", draw(shapes)), ("data_offsets", draw(offsets))]
    if draw(st.integers(0, 5)) == 0:
        return f"[{','.join(value for _, value in fields)}]"
    odd = st.tuples(st.sampled_from(["x", "y", "dtype", "shape"]), st.one_of(anything, depths))
    fields += draw(st.lists(odd, max_size=1))
    if draw(st.booleans()):
        fields = draw(st.permutations(fields))
    return "{" + ",".join(f'"{key}":{value}' for key, value in fields) + "}"


plain = st.sampled_from([A_SPEC, json.dumps(spec(offsets=(4, 8))), json.dumps(spec(shape=(0,), offsets=(4, 4)))])
metadata_values = st.one_of(objects(names, names), anything)
members = st.one_of(
    st.tuples(names, st.one_of(plain, entries())), st.tuples(st.just('"__metadata__"'), metadata_values)
).map(":".join)
headers = st.one_of(
    st.lists(members, max_size=3).map(lambda found: f"{{{','.join(found)}}}"),
    anything,
    st.tuples(st.sampled_from([" \n", "\ufeff", "\x0c", ""]), plain, st.sampled_from(["  ", "\0", ",", ""])).map(
        lambda parts: f'{parts[0]}{{"a":{parts[1]}}}{parts[2]}'
    ),
)


@settings(max_examples=examples(1500), deadline=None, suppress_health_check=list(HealthCheck))
@given(headers, st.sampled_from([0, 1, 4, 8]))
@example(f'{{"a":["U8",[4],[0,0]],"a":{A_SPEC}}}', 4)  # the first of a name is wrong, and does not count
def test_a_header_is_accepted_exactly_when_the_library_accepts_it(header: str, size: int) -> None:
    event("accepted" if agrees(file_of(header, bytes(size))) else "refused")


@settings(max_examples=examples(600), deadline=None, suppress_health_check=list(HealthCheck))
@given(tensor_specs, st.booleans(), st.data())
def test_a_compact_header_with_one_edit_is_accepted_exactly_when_the_library_accepts_it(
    tensors: dict[str, tuple[str, tuple[int, ...]]], metadata: bool, data: st.DataObject
) -> None:
    """As most writers make it, it is read in another way than the rest."""
    known = {name: spec for name, spec in tensors.items() if name.isascii()}
    raw = build_header(((name, *spec) for name, spec in known.items()), {"format": "pt"})[8:].decode()
    text = raw if metadata else raw.replace('{"__metadata__":{"format":"pt"},', "{")
    at = data.draw(st.integers(0, len(text.rstrip())))
    gone = data.draw(st.integers(0, 12))
    new = data.draw(
        st.sampled_from(["", ",", "}", "{", '"', "0", "-", " ", "\\", ":", "[", "x", '"":{}', ',"a":1', "5,"])
    )
    text = text[:at] + new + text[at + gone :]
    size = sum(size_in_bytes(*spec) for spec in known.values())
    event("accepted" if agrees(file_of(text, bytes(size))) else "refused")


def test_an_unknown_dtype_is_refused_whatever_its_offsets_are() -> None:
    assert not agrees(file_of('{"a":{"dtype":"U9","shape":[1],"data_offsets":[1,0]}}'))


def test_parsing_takes_less_than_four_times_the_header() -> None:
    """The split text of half a million entries, kept to the end, took 50 MB more: five times."""
    # Python's table of such names may grow with them, by far more than they take.
    names = [sys.intern(f"model.layers.{i}.mlp.weight") for i in range(20_000)]
    header = build_header(((name, "F32", (0, 4)) for name in names), {})
    tracemalloc.start()
    try:
        kept = parse_header(header, file="many", file_size=len(header))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(kept.tensors) == 20_000
    assert peak < 4 * len(header)
