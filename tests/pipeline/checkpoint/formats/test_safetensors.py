"""Headers: what the format's own reader refuses, ours refuses too, by one clear error; what it writes, ours reads."""

from __future__ import annotations

import json
from typing import Any

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from reshard.pipeline.checkpoint.formats.safetensors import HeaderLengths, build_header, parse_header
from reshard.pipeline.errors import BadHeader, BadLength, CheckpointError, DuplicateTensor
from reshard.pipeline.tensors import DTYPE_BITS, size_in_bytes

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


@given(tensor_specs)
def test_the_cost_of_a_header_is_never_underestimated(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    total = sum(size_in_bytes(*spec) for spec in tensors.values())
    lengths = HeaderLengths({"format": "pt"}, total)
    bound = lengths.empty + sum(lengths.of(name, *spec) for name, spec in tensors.items())
    exact = len(build_header(((name, *spec) for name, spec in tensors.items()), {"format": "pt"}))
    assert exact <= bound <= exact + 2 * 20 * len(tensors) + 16


@given(st.binary(max_size=200))
def test_any_bytes_are_a_header_or_a_named_error(content: bytes) -> None:
    try:
        parsed = parse(content)
    except CheckpointError as error:
        assert "x.safetensors" in str(error) or isinstance(error, DuplicateTensor)
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
    "a name twice": (file_of(f'{{"a":{A_SPEC},"a":{A_SPEC}}}', b"1234"), DuplicateTensor),
    "a name that no UTF-8 can hold": (file_of(f'{{"\\ud800":{A_SPEC}}}', b"1234"), BadHeader),
    "an unknown dtype": (file_of({"a": spec("U7")}, b"1234"), BadHeader),
    "a dtype that is no string": (file_of({"a": spec([])}, b"1234"), BadHeader),
    "a negative dimension": (file_of({"a": spec(shape=(-4,))}, b"1234"), BadHeader),
    "a dimension that is true": (file_of({"a": spec(shape=(True, 4))}, b"1234"), BadHeader),
    "a dimension with a fraction": (file_of({"a": spec(shape=(4.0,))}, b"1234"), BadHeader),
    "a thousand dimensions": (file_of({"a": spec(shape=(1,) * 1000)}, b"1234"), BadHeader),
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


# Its reader takes these; a copy of such a file could not be byte-exact, or its meaning would be a guess.
STRICTER_THAN_THE_FORMAT = {"a name twice", "a thousand dimensions", "metadata that is a list"}


@pytest.mark.parametrize("trouble", HOSTILE)
def test_a_hostile_header_is_refused_by_name(trouble: str) -> None:
    content, kind = HOSTILE[trouble]
    with pytest.raises(kind) as caught:
        parse(content)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    if trouble not in STRICTER_THAN_THE_FORMAT:
        with pytest.raises(safetensors.SafetensorError):
            safetensors.deserialize(content)
