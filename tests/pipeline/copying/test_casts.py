"""Casts equal torch bit for bit, for every value that is not a NaN."""

from __future__ import annotations

import struct
import subprocess
import sys
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from reshard.pipeline.copying.casts import Caster, cast
from reshard.pipeline.errors import CastOverflow
from reshard.pipeline.planning.select import cast_dtype

TORCH = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
BITS = {"F64": 64, "F32": 32, "BF16": 16, "F16": 16}
QUIET = {"F32": 0x7FC00000, "BF16": 0x7FC0, "F16": 0x7E00}
CASTS = [(s, t) for s, t in product(TORCH, QUIET) if s != t and BITS[t] <= BITS[s]]


def torch_bytes(data: bytes, source: str, target: str) -> bytes:
    values = torch.frombuffer(bytearray(data), dtype=TORCH[source]).to(TORCH[target])
    return values.view(torch.uint8).numpy().tobytes()


def is_nan(data: bytes, dtype: str) -> np.ndarray:
    return torch.frombuffer(bytearray(data), dtype=TORCH[dtype]).isnan().numpy()


def packed(bits: list[int], dtype: str) -> bytes:
    return b"".join(value.to_bytes(BITS[dtype] // 8, "little") for value in bits)


def words(data: bytes, dtype: str) -> np.ndarray:
    return np.frombuffer(data, f"<u{BITS[dtype] // 8}")


def f64(*values: float) -> list[int]:
    return [struct.unpack("<Q", struct.pack("<d", value))[0] for value in values]


@st.composite
def casts_of_bits(draw: st.DrawFn) -> tuple[str, str, list[int]]:
    """Any bits at all: subnormals, infinities and NaNs are as likely as the rest of the exponents."""
    source, target = draw(st.sampled_from(CASTS))
    if source != "F64":
        return source, target, draw(st.lists(st.integers(0, 2 ** BITS[source] - 1), min_size=1, max_size=40))
    # Most doubles are far outside what float32 holds; these are around its edges and around half-way points.
    edge = st.builds(
        lambda single, nudge: (f64(struct.unpack("<f", struct.pack("<I", single))[0])[0] + nudge) % 2**64,
        st.integers(0, 2**32 - 1),
        st.integers(-(2**30), 2**30),
    )
    return source, target, draw(st.lists(st.one_of(edge, st.integers(0, 2**64 - 1)), min_size=1, max_size=40))


@given(casts_of_bits())
@example(("F64", "F16", f64(1 + 2**-11 + 2**-40, 65519.999999, 65520.0, 2**-25, 2**-25 * (1 + 2**-30), -0.0, 5e-324)))
@example(("F64", "F32", f64(3.4028235677973366e38, 3.4028235677973362e38, 1e-46, float("-inf"))))
@example(("F32", "BF16", [0x7F7FFFFF, 0x00000001, 0x3F808000, 0x3F818000, 0xFF800000]))
@example(("BF16", "F16", [0x7F7F, 0x0001, 0x4780, 0x477F, 0x3380]))
@example(("F16", "BF16", [0x7BFF, 0x0001, 0x03FF, 0x3C01, 0xFC00]))
def test_equals_torch_bit_for_bit_but_for_nans(case: tuple[str, str, list[int]]) -> None:
    source, target, bits = case
    data = packed(bits, source)
    made = bytes(cast(data, source, target).data)
    expected = torch_bytes(data, source, target)
    numbers = ~is_nan(data, source)
    assert (words(made, target)[numbers] == words(expected, target)[numbers]).all()


@pytest.mark.parametrize(("source", "target"), [pair for pair in CASTS if BITS[pair[0]] == 16])
def test_equals_torch_for_all_values_of_16_bits(source: str, target: str) -> None:
    data = np.arange(2**16, dtype="<u2").tobytes()
    numbers = ~is_nan(data, source)
    made = words(bytes(cast(data, source, target).data), target)
    assert (made[numbers] == words(torch_bytes(data, source, target), target)[numbers]).all()


@pytest.mark.parametrize(("source", "target"), [pair for pair in CASTS if BITS[pair[0]] == 16])
def test_equals_torch_for_each_value_of_16_bits_among_usual_ones(source: str, target: str) -> None:
    """Where few of a block are not normal numbers, as among weights, they are cast in another way than the rest."""
    values = torch.randn(9 << 16, generator=torch.Generator().manual_seed(3)).to(TORCH[source])
    values[::9] = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(TORCH[source])
    expected, numbers = values.to(TORCH[target]), ~values.isnan()
    made = cast(values.view(torch.uint8).numpy().tobytes(), source, target)
    cast_values = torch.frombuffer(bytearray(made.data), dtype=torch.int16)
    assert cast_values[numbers].equal(expected.view(torch.int16)[numbers])
    assert made.overflows == int((values.isfinite() & expected.isinf()).sum())


@pytest.mark.parametrize("target", ["F16", "BF16"])
def test_equals_torch_where_float32_rounds(target: str) -> None:
    """Every value of the target, every middle between two of them, and what is next to either, of both signs."""
    values = torch.arange(2**15).to(torch.int16).view(TORCH[target]).float().numpy()
    finite = values[np.isfinite(values)].astype(np.float64)
    middles = (finite + np.append(finite[1:], 2 * finite[-1] - finite[-2])) / 2  # the last one rounds to infinity
    exact = np.concatenate([finite, middles]).astype(np.float32).view(np.uint32)
    around = (exact[:, None] + np.array([-1, 0, 1])).astype(np.uint32) & 0x7FFFFFFF
    bits = np.concatenate([around, around | 0x80000000]).ravel()
    data, numbers = bits.tobytes(), ~np.isnan(bits.view(np.float32))
    made = cast(data, "F32", target)
    expected = words(torch_bytes(data, "F32", target), target)
    assert (words(bytes(made.data), target)[numbers] == expected[numbers]).all()
    infinite = {"F16": 0x7C00, "BF16": 0x7F80}[target]
    became = (expected & 0x7FFF == infinite) & np.isfinite(bits.view(np.float32))
    assert made.overflows == np.count_nonzero(became) > 0


@pytest.mark.parametrize(("source", "target"), CASTS)
def test_equals_torch_for_each_exponent_and_any_fraction(source: str, target: str) -> None:
    """Blocks of one kind of value, and one of all kinds: subnormals, infinities and NaNs among the rest."""
    noise = np.random.default_rng(15)
    bits = noise.integers(0, 2 ** BITS[source], 300_000, dtype=f"u{BITS[source] // 8}", endpoint=False)
    data = (bits if source == "F64" else np.append(np.sort(bits), bits)).tobytes()
    if source == "F64":  # most doubles are far outside what float32 holds
        single = torch.from_numpy(noise.integers(0, 2**32, 300_000, dtype="u4")).view(torch.float32).double().numpy()
        data += (single * (1 + noise.normal(size=single.size) * 2.0**-24)).tobytes()
    numbers = ~is_nan(data, source)
    made = cast(data, source, target)
    assert (words(bytes(made.data), target)[numbers] == words(torch_bytes(data, source, target), target)[numbers]).all()


@given(casts_of_bits())
def test_a_nan_becomes_quiet_keeps_its_sign_and_loses_its_payload(case: tuple[str, str, list[int]]) -> None:
    source, target, bits = case
    exponent = {"F64": 0x7FF << 52, "F32": 0xFF << 23, "BF16": 0xFF << 7, "F16": 0x1F << 10}[source]
    nans = [value | exponent | 1 for value in bits]
    made = words(bytes(cast(packed(nans, source), source, target).data), target)
    expected = [QUIET[target] | (value >> (BITS[source] - 1)) << (BITS[target] - 1) for value in nans]
    assert made.tolist() == expected


@given(casts_of_bits())
def test_counts_the_finite_values_that_became_infinite(case: tuple[str, str, list[int]]) -> None:
    source, target, bits = case
    data = packed(bits, source)
    before = torch.frombuffer(bytearray(data), dtype=TORCH[source])
    expected = int((before.isfinite() & before.to(TORCH[target]).isinf()).sum())
    assert cast(data, source, target).overflows == expected


@given(casts_of_bits(), st.lists(st.integers(0, 400), max_size=12))
def test_a_stream_may_be_cut_anywhere(case: tuple[str, str, list[int]], cuts: list[int]) -> None:
    source, target, bits = case
    data = packed(bits, source)
    caster = Caster("w", source, target)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    made = b"".join(
        bytes(part) for start, stop in pairwise(edges) for part in caster.feed(memoryview(data)[start:stop])
    )
    caster.finish()
    whole = cast(data, source, target)
    assert made == bytes(whole.data)
    assert caster.overflows == whole.overflows


def test_a_long_window_is_cast_in_blocks_and_stays_equal() -> None:
    data = torch.randn(1_500_000, generator=torch.Generator().manual_seed(0)).numpy().tobytes()
    assert bytes(cast(data, "F32", "BF16").data) == torch_bytes(data, "F32", "BF16")


# 1 MB of bits; most values are what float16 has no normal number for.
IN_USED_MEMORY = """
from resource import RUSAGE_SELF, getrusage
from reshard.pipeline.copying.casts import cast
from reshard.pipeline.stores import heap
heap.for_copies()
data = bytes(range(1, 250, 3)) * 8 * 1600
for source, target in {pairs}:
    for _ in range(3):
        cast(data, source, target)
    begun = getrusage(RUSAGE_SELF).ru_minflt
    for _ in range(50):
        cast(data, source, target)
    print(source, target, getrusage(RUSAGE_SELF).ru_minflt - begun)
"""


def test_casts_are_made_in_memory_that_is_used_again() -> None:
    command = [sys.executable, "-c", IN_USED_MEMORY.format(pairs=CASTS)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    new_pages = {(source, target): int(pages) for source, target, pages in map(str.split, lines)}
    assert new_pages.keys() == set(CASTS)
    assert max(new_pages.values()) < 50, new_pages  # in 50 casts; 150 and more where each takes a block anew


def test_strict_refuses_the_first_overflow_by_name() -> None:
    caster = Caster("lm_head.weight", "F32", "F16", strict=True)
    assert list(caster.feed(struct.pack("<f", 65504.0)))
    with pytest.raises(CastOverflow, match=r"lm_head\.weight.*F16.*--strict-dtype"):
        list(caster.feed(struct.pack("<2f", 1.0, 70000.0)))


def test_a_stream_that_ends_inside_an_element_is_an_error() -> None:
    caster = Caster("w", "F32", "F16")
    assert list(caster.feed(b"\0\0\0")) == []
    with pytest.raises(ValueError, match="3 bytes into an element"):
        caster.finish()


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("keep", {"F64": "F64", "F32": "F32", "BF16": "BF16", "F16": "F16"}),
        ("float32", {"F64": "F32", "F32": "F32", "BF16": "BF16", "F16": "F16"}),  # nothing is widened
        ("bfloat16", {"F64": "BF16", "F32": "BF16", "BF16": "BF16", "F16": "BF16"}),
        ("float16", {"F64": "F16", "F32": "F16", "BF16": "F16", "F16": "F16"}),
    ],
)
def test_only_floats_that_are_as_wide_or_wider_are_cast(wanted: str, expected: dict[str, str]) -> None:
    assert {dtype: cast_dtype(dtype, wanted) for dtype in expected} == expected  # type: ignore[arg-type]
    for kept in ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "I8", "U8", "I64", "BOOL", "C64"):
        assert cast_dtype(kept, wanted) == kept  # type: ignore[arg-type]


@pytest.mark.parametrize(("source", "target"), [("F16", "F32"), ("I8", "F16"), ("F32", "F64"), ("F8_E4M3", "F16")])
def test_a_cast_that_loses_nothing_or_makes_no_sense_is_not_made(source: str, target: str) -> None:
    with pytest.raises(ValueError, match="is not cast to"):
        cast(b"\0" * 8, source, target)
