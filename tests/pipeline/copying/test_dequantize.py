"""Plain weights equal those of transformers' own dequantised load, bit for bit, however their bytes come."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from reshard.pipeline.copying import dequantize, stream
from reshard.pipeline.copying.dequantize import Dequantizer
from reshard.pipeline.copying.loop import caster_of
from reshard.pipeline.copying.stream import Scales, packed
from reshard.pipeline.errors import CastOverflow
from reshard.pipeline.planning.model import Entry, Scale
from reshard.pipeline.planning.ranges import parts
from reshard.pipeline.planning.scales import dequantised
from reshard.pipeline.stores.scratch import ScratchSpace
from reshard.pipeline.tensors import ByteRange, Piece, Tensor

OURS = {
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float32: "F32", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.float8_e8m0fnu: "F8_E8M0", torch.uint8: "U8",
}  # fmt: skip
TARGETS = [torch.bfloat16, torch.float16, torch.float32]


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def described(name: str, tensor: torch.Tensor, file: int) -> Tensor:
    shape = tuple(tensor.shape)
    return Tensor(name, OURS[tensor.dtype], shape, (Piece(file, 0, (0,) * len(shape), shape),))


def made(
    weight: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int],
    target: torch.dtype,
    cuts: tuple[int, ...] = (),
    strict: bool = False,
) -> tuple[bytes, int]:
    """What the weight's bytes, cut there, become, and how many values became infinite."""
    entry = Entry(described("w", weight, 0), OURS[target], Scale(described("w_scale_inv", scale, 1), block))
    return of_entry(entry, [bytes_of(weight), bytes_of(scale)], cuts, strict)


def of_entry(entry: Entry, content: list[bytes], cuts: tuple[int, ...] = (), strict: bool = False) -> tuple[bytes, int]:
    """The same of an entry whose weight is in file 0 and whose scale is in file 1."""
    (kept, part) = parts([entry])
    disk = ScratchSpace()

    def take(place: ByteRange) -> Iterator[memoryview]:
        return iter([memoryview(content[place.file])[place.start : place.stop]])

    with closing(Scales(disk, [kept])) as scales:
        scales.keep(kept, take)
        caster = caster_of(entry, scales, strict=strict)
        assert isinstance(caster, Dequantizer)
        weight = b"".join(bytes(view) for view in packed(part, take, disk, scales, lambda count: None))
        edges = [0, *sorted(min(cut, len(weight)) for cut in cuts), len(weight)]
        found = b"".join(bytes(v) for a, b in pairwise(edges) for v in caster.feed(weight[a:b]))
        caster.finish()
        return found, caster.overflows


def same(found: bytes, wanted: torch.Tensor) -> None:
    """Equal bits; of NaNs only that they are."""
    values = torch.frombuffer(bytearray(found), dtype=wanted.dtype).reshape(wanted.shape)
    assert torch.equal(values.isnan(), wanted.isnan())
    there = ~wanted.isnan()
    width = {2: torch.int16, 4: torch.int32}[wanted.element_size()]
    assert torch.equal(values.view(width)[there], wanted.view(width)[there])


def every_byte(dtype: torch.dtype, rows: int, columns: int) -> torch.Tensor:
    count = torch.arange(rows * columns) * 37 % 256
    return count.to(torch.uint8).view(dtype).reshape(rows, columns)


def scales_of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if dtype is torch.float8_e8m0fnu:
        return torch.randint(100, 140, shape, generator=torch.Generator().manual_seed(2), dtype=torch.uint8).view(dtype)
    return (torch.randn(shape, generator=torch.Generator().manual_seed(2)) * 0.01).to(dtype)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kept_in", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_blocks_are_what_transformers_makes_of_them(
    dtype: torch.dtype, kept_in: torch.dtype, target: torch.dtype
) -> None:
    weight, scale = every_byte(dtype, 48, 64), scales_of(kept_in, 3, 4)
    wanted = Fp8Dequantize(None)._dequantize_one(weight, scale, target)
    same(made(weight, scale, (16, 16), target)[0], wanted)


@pytest.mark.parametrize(
    ("shape", "scale"),
    [
        ((48, 64), ()), ((48, 64), (1, 1)), ((48, 64), (48, 1)), ((3, 16, 32), (3, 1, 1)), ((3, 16, 32), (3, 16, 1)),
        ((3, 16, 32), (3, 1, 32)),
    ],
)  # fmt: skip
def test_tensors_and_channels_are_what_transformers_makes_of_them(shape: tuple[int, ...], scale: tuple[int]) -> None:
    weight = every_byte(torch.float8_e4m3fn, 48, prod(shape) // 48).reshape(shape)
    values = scales_of(torch.bfloat16, *scale)
    settings = {"quant_method": "fbgemm_fp8"} if values.numel() > 3 else {"quant_method": "fp8"}
    tensors = [described("w", weight, 0), described("w_scale", values, 1)]
    (entry,) = dequantised(tensors, json.dumps({"quantization_config": settings}), None, "BF16").entries
    wanted = Fp8Dequantize(None)._dequantize_one(weight, values, torch.bfloat16)
    same(of_entry(entry, [bytes_of(weight), bytes_of(values)], (7, 1000))[0], wanted)


@pytest.mark.parametrize("held", [1, 2**20], ids=["scales read as needed", "scales held"])
@pytest.mark.parametrize("window", [200, 2**20])
@pytest.mark.parametrize("target", TARGETS)
def test_every_half_byte_and_exponent_of_mxfp4(
    target: torch.dtype, window: int, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "SCALED_WINDOW", window)
    monkeypatch.setattr(dequantize, "SCALES_HELD", held)
    blocks = (torch.arange(2 * 64 * 2 * 16) * 37 % 256).to(torch.uint8).reshape(2, 64, 2, 16)
    scales = torch.arange(256).to(torch.uint8).reshape(2, 64, 2)
    tensors = [described("w_blocks", blocks, 0), described("w_scales", scales, 1)]
    settings = json.dumps({"quantization_config": {"quant_method": "mxfp4"}})
    (entry,) = dequantised(tensors, settings, None, OURS[target]).entries
    found, _ = of_entry(entry, [bytes_of(blocks), bytes_of(scales)])
    same(found, mxfp4_values(blocks, scales).to(target))


def mxfp4_values(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Each exact, as float64: two values a byte, the low half first, and the last two dimensions exchanged."""
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.concatenate([magnitudes, -magnitudes])
    halves = np.stack([blocks.numpy() & 15, blocks.numpy() >> 4], axis=-1).reshape(*scales.shape, -1)
    scaled = values[halves] * 2.0 ** (scales.numpy()[..., None] - 127.0)
    return torch.from_numpy(scaled.reshape(*scales.shape[:-1], -1)).transpose(-2, -1).contiguous()


@pytest.mark.parametrize(
    ("target", "lowest", "highest"), [(torch.bfloat16, 0, 254), (torch.float16, 103, 142), (torch.float32, 0, 254)]
)
def test_the_values_of_mxfp4_are_those_of_transformers(target: torch.dtype, lowest: int, highest: int) -> None:
    """Wherever the power of two is itself a value of the dtype: beyond it, torch 2.9's `ldexp` makes 0 a NaN."""
    blocks = torch.arange(256).to(torch.uint8).repeat_interleave(16).reshape(1, 64, 4, 16)
    scales = torch.arange(256).clamp(lowest, highest).to(torch.uint8).reshape(1, 64, 4)
    same(bytes_of(mxfp4_values(blocks, scales).to(target)), convert_moe_packed_tensors(blocks, scales, dtype=target))


def reference(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """In float32, block by block, the last ones cut short, as DeepSeek's own kernel has it."""
    spread = scale.float().repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return weight.float() * spread[..., : weight.shape[-2], : weight.shape[-1]]


@pytest.mark.parametrize("shape", [(576, 300), (1, 129), (130, 1), (128, 128), (2, 3, 130, 200)])
def test_blocks_that_do_not_divide_the_weight_end_early(shape: tuple[int, ...]) -> None:
    """DeepSeek-V3's `kv_a_proj_with_mqa` has 576 rows: transformers refuses it, and the format has it."""
    weight = every_byte(torch.float8_e4m3fn, int(np.prod(shape[:-1])), shape[-1]).reshape(shape)
    scale = scales_of(torch.float32, *shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    same(made(weight, scale, (128, 128), torch.bfloat16)[0], reference(weight, scale, (128, 128)).bfloat16())


@given(st.lists(st.integers(0, 40 * 30), max_size=12), st.integers(1, 50), st.integers(1, 50))
def test_views_may_end_anywhere(cuts: list[int], rows: int, columns: int) -> None:
    weight, scale = every_byte(torch.float8_e5m2, 40, 30), scales_of(torch.float32, -(-40 // rows), -(-30 // columns))
    found, _ = made(weight, scale, (rows, columns), torch.bfloat16, tuple(cuts))
    same(found, reference(weight, scale, (rows, columns)).bfloat16())


@pytest.mark.parametrize(("scale", "target"), [(1000.0, torch.float16), (3e38, torch.float32)])
def test_what_becomes_infinite_is_counted_and_may_be_refused(scale: float, target: torch.dtype) -> None:
    weight = torch.tensor([[1.0, 448.0], [-448.0, 0.5]]).to(torch.float8_e4m3fn)
    assert made(weight, torch.tensor([[scale]]), (2, 2), target)[1] == 2
    with pytest.raises(CastOverflow, match="^w has values that overflow"):
        made(weight, torch.tensor([[scale]]), (2, 2), target, strict=True)


def test_infinities_of_the_source_are_no_overflow() -> None:
    weight = torch.tensor([[1.0, float("inf")]]).to(torch.float8_e5m2)
    assert made(weight, torch.tensor([[2.0]]), (1, 2), torch.float32)[1] == 0


def test_a_weight_that_ends_early_is_an_error() -> None:
    entry = Entry(described("w", torch.zeros(2, 2).to(torch.float8_e4m3fn), 0), "BF16",
                  Scale(described("s", torch.ones(1, 1), 1), (2, 2)))  # fmt: skip
    with closing(Scales(ScratchSpace(), [])) as scales:
        caster = caster_of(entry, scales)
        assert caster is not None
        with pytest.raises(ValueError, match="w ended after 0 values"):
            caster.finish()


def test_ranges_of_a_weight_and_its_scale_say_which_file() -> None:
    weight, scale = every_byte(torch.float8_e4m3fn, 4, 4), torch.ones(1, 1)
    entry = Entry(described("w", weight, 0), "BF16", Scale(described("s", scale, 1), (4, 4)))
    assert [place for part in parts([entry]) for place in part.places] == [ByteRange(1, 0, 4), ByteRange(0, 0, 16)]


def test_blocks_may_be_longer_than_what_is_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequantize, "DEQUANTIZE_BLOCK", 16)
    weight, scale = every_byte(torch.float8_e4m3fn, 3, 100), scales_of(torch.float32, 3, 2)
    same(made(weight, scale, (1, 60), torch.bfloat16)[0], reference(weight, scale, (1, 60)).bfloat16())


def test_more_scales_than_are_held_are_read_as_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequantize, "SCALES_HELD", 3)
    weight, scale = every_byte(torch.float8_e4m3fn, 2 * 40, 30).reshape(2, 40, 30), scales_of(torch.float32, 2, 5, 4)
    found, _ = made(weight, scale, (8, 8), torch.bfloat16, (7, 700, 1300))
    same(found, reference(weight, scale, (8, 8)).bfloat16())
