"""Which tensors of a quantised checkpoint are weights, and which the scales that make plain ones of them. Pure."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from reshard.pipeline.check import first
from reshard.pipeline.checkpoint.indexes import load_json
from reshard.pipeline.errors import BadScale, NotDequantized
from reshard.pipeline.planning.model import MXFP4_BYTES, Entry, Scale
from reshard.pipeline.tensors import Piece, Tensor
from reshard.pipeline.text import counted

_FLOAT8 = ("F8_E4M3", "F8_E5M2")
_SCALE_DTYPES = ("F32", "F16", "BF16", "F8_E8M0", "U8")  # the last two are exponents of two
# What goes with the weights' scales: those of activations and caches, of no use to plain weights. They are single
# numbers, or of stacked weights one for each; what has more elements under such a name is a parameter that was learned.
_OF_ACTIVATIONS = re.compile(r"[._](?:(?:input|output|activation|kv|[qkv])_scale(?:_ub)?|input_zero_point)$")
_OF_WEIGHTS = re.compile(r"_scale_inv$|[._]weight_scale$")
# A config's keys, at any depth; compressed-tensors wrote the second at first, and vLLM reads both.
_SETTINGS = ("quantization_config", "compression_config")
_SETTINGS_KEY = re.compile(rf'"(?:{"|".join(_SETTINGS)})"\s*:\s*')
# What ModelOpt says instead, in a file beside the config.
MODELOPT = "hf_quant_config.json"
_COMMA = re.compile(r"\s*,\s*")
# The dtype in a config; of a quantised model the one that its weights were made of, or an fp8 one.
_CONFIG_DTYPE = re.compile(r'("(?:torch_)?dtype"\s*:\s*")(b?float\d+(?:_\w+)?)(")')


class Dequantised(NamedTuple):
    entries: tuple[Entry, ...]
    scales: frozenset[str]
    notes: tuple[str, ...]


def dequantised(tensors: Sequence[Tensor], config: str, modelopt: str | None, as_dtype: str | None) -> Dequantised:
    """``tensors`` with plain weights, of ``as_dtype``, in place of quantised ones and their scales.

    ``config`` and, where there is one, ``modelopt`` say how they were quantised. Raises NotDequantized for what is not
    known here, and BadScale.
    """
    if as_dtype is None:
        raise NotDequantized(why="it also requires --dtype", cure="add --dtype bfloat16")
    known = _known(_settings(config))
    if modelopt is not None:
        _refuse_other_than_fp8(modelopt)
    named = {tensor.name: tensor for tensor in tensors}
    scaled = {
        tensor.name: Entry(tensor, as_dtype, _scale_of(tensor, named, known))
        for tensor in tensors
        if tensor.dtype in _FLOAT8
    }
    if "mxfp4" in known.each:
        scaled |= _of_mxfp4(named, as_dtype)
    elif packed := [name for name in named if _has_blocks_and_scales(name, named)]:
        why = f"{min(packed)} and its scales look like mxfp4, but no config describes them"
        raise NotDequantized(why=why, cure="use the config of the same model: --config-from REPO")
    scales = {entry.scale.tensor.name for entry in scaled.values() if entry.scale}
    others = {tensor.name for tensor in tensors if scaled and _is_of_activations(tensor, scaled)}
    for name in sorted(named.keys() - scales - others):
        if _OF_WEIGHTS.search(name) or (scaled and name.endswith("_scale") and name.removesuffix("_scale") in named):
            raise BadScale(tensor=name, why="this scale has no fp8 weight")
    entries = tuple(
        scaled.get(tensor.name) or Entry(tensor, tensor.dtype)
        for tensor in tensors
        if tensor.name not in scales and tensor.name not in others
    )
    return Dequantised(entries, frozenset(scales | others), tuple(_notes(entries, as_dtype, sorted(others))))


def _is_of_activations(tensor: Tensor, scaled: Mapping[str, Entry]) -> bool:
    if (match := _OF_ACTIVATIONS.search(tensor.name)) is None:
        return False
    weight = scaled.get(tensor.name[: match.start()])
    return prod(tensor.shape) == 1 or (weight is not None and tensor.shape == weight.tensor.shape[:1])


def _has_blocks_and_scales(name: str, named: Mapping[str, Tensor]) -> bool:
    both = name, f"{name.removesuffix('_blocks')}_scales"
    return name.endswith("_blocks") and all(one in named and named[one].dtype == "U8" for one in both)


def _of_mxfp4(named: Mapping[str, Tensor], as_dtype: str) -> dict[str, Entry]:
    """The weights of blocks of 32 four-bit values, as transformers makes them: each matrix is transposed."""
    made = {}
    for name in sorted(name for name in named if name.endswith(("_blocks", "_scales"))):
        weight = name[:-7]
        blocks, scales = named.get(f"{weight}_blocks"), named.get(f"{weight}_scales")
        if blocks is None or scales is None:
            raise BadScale(tensor=name, why=f"{weight}{'_scales' if scales is None else '_blocks'} is missing")
        if weight in named:
            raise BadScale(tensor=name, why=f"{weight} also exists")
        as_known = blocks.dtype == scales.dtype == "U8" and len(blocks.shape) == 4
        if not as_known or blocks.shape != (*scales.shape, MXFP4_BYTES):
            shapes = f"{blocks.dtype} {[*blocks.shape]} and {scales.dtype} {[*scales.shape]}"
            wanted = f"U8 [experts, rows, blocks, {MXFP4_BYTES}] and U8 [experts, rows, blocks]"
            raise BadScale(tensor=name, why=f"blocks and scales are {shapes}, not {wanted}")
        experts, rows, groups = scales.shape
        tensor = Tensor(
            weight, "F4", (experts, groups * 2 * MXFP4_BYTES, rows), _transposed(blocks, (0, 2, 3, None, 1))
        )
        exponents = scales._replace(shape=(experts, groups, rows), pieces=_transposed(scales, (0, 2, 1)))
        made[blocks.name] = Entry(tensor, as_dtype, Scale(exponents, (2 * MXFP4_BYTES, 1)))
    return made


def _transposed(tensor: Tensor, axes: Sequence[int | None]) -> tuple[Piece, ...]:
    """Its pieces with these axes; where there is none, every byte stands twice."""
    made = []
    for piece in tensor.pieces:
        strides = piece.steps(1)
        found = [(0, 2, 0) if a is None else (piece.at[a], piece.shape[a], strides[a]) for a in axes]
        at, shape, strides = (tuple(one) for one in zip(*found, strict=True))
        made.append(piece._replace(at=at, shape=shape, strides=strides))
    return tuple(made)


def _scale_of(weight: Tensor, named: Mapping[str, Tensor], known: _Known) -> Scale:
    names = [name for end in ("_scale_inv", "_scale") if (name := f"{weight.name}{end}") in named]
    if len(names) != 1:
        there = "both exist (only one is allowed)" if names else "are missing (one is required)"
        raise BadScale(
            tensor=weight.name,
            why=f"it is {weight.dtype}, but {weight.name}_scale_inv and {weight.name}_scale {there}",
        )
    tensor = named[names[0]]
    if tensor.dtype not in _SCALE_DTYPES:
        raise BadScale(tensor=tensor.name, why=f"it is {tensor.dtype}, but scales must be {', '.join(_SCALE_DTYPES)}")
    if f"{weight.name}_zero_point" in named:
        raise BadScale(tensor=f"{weight.name}_zero_point", why="fp8 weights with zero points are not supported")
    # Beside blocks, transformers has one value for an embedding, of another name and shape than those of blocks.
    single = names[0].endswith("_scale") and len(tensor.shape) < 2
    for grid, block in _grids(weight.shape, known, single):
        left_out = grid[len(tensor.shape) :]  # dimensions of one element may be, at the end
        if tensor.shape + left_out == grid and prod(left_out) == 1:
            return Scale(_with_dimensions(tensor, len(grid)), block)
    needs = f"{weight.name} with shape {[*weight.shape]} needs one value per {known.told()}"
    why = f"its shape is {[*tensor.shape]}, but {needs}"
    raise BadScale(tensor=tensor.name, why=why)


def _grids(weight: tuple[int, ...], known: _Known, single: bool) -> Iterator[tuple[tuple[int, ...], tuple[int, int]]]:
    """The shapes that a scale of a weight of this shape may have, and the block that a value of each is for."""
    *stacked, rows, columns = (1,) * (2 - len(weight)) + weight
    height, width = max(1, rows), max(1, columns)  # of a block
    if "tensor" in known.each or (known.block and single):
        yield (1, 1), (max(1, prod(stacked) * rows), width)
    if "tensor" in known.each:
        yield (*stacked, 1, 1), (height, width)
    if len(weight) > 1 and "channel" in known.each:
        yield (*stacked, rows, 1), (1, width)
        if stacked:  # FBGEMM has the first matrices of experts transposed
            yield (*stacked, 1, columns), (height, 1)
    if len(weight) > 1 and known.block:
        high, wide = known.block
        yield (*stacked, -(-rows // high), -(-columns // wide)), (min(high, height), min(wide, width))


def _with_dimensions(tensor: Tensor, count: int) -> Tensor:
    """The same with as many dimensions: of one element each, behind its own."""
    more = (1,) * (count - len(tensor.shape))
    zeros = (0,) * len(more)
    pieces = (
        p._replace(at=p.at + zeros, shape=p.shape + more, strides=None if p.strides is None else p.strides + zeros)
        for p in tensor.pieces
    )
    return tensor._replace(shape=tensor.shape + more, pieces=tuple(pieces)) if more else tensor


class _Known(NamedTuple):
    """What the config says that each value of a scale is for: a tensor, a channel, a block of that size or of mxfp4."""

    each: frozenset[str]
    block: tuple[int, int] | None = None

    def told(self) -> str:
        return " or ".join(sorted(self.each)) + (f" of {[*self.block]}" if self.block else "")


def _known(settings: Mapping[str, Any]) -> _Known:
    match settings.get("quant_method"):
        case None if not settings:
            return _Known(frozenset({"tensor", "channel"}))
        case "fp8":
            block = _block_size(settings.get("weight_block_size"), "weight_block_size")
            return _Known(frozenset({"block"}), block) if block else _Known(frozenset({"tensor"}))
        case "fbgemm_fp8":
            return _Known(frozenset({"channel"}))
        case "modelopt" if settings.get("quant_algo") == "FP8":
            return _known({})
        case "mxfp4":
            return _Known(frozenset({"mxfp4"}))
        case "compressed-tensors" if settings.get("format") in ("float-quantized", "naive-quantized"):
            return _of_groups(settings.get("config_groups"))
        case other:
            method = other if "format" not in settings else f"{other} ({settings['format']})"
            raise NotDequantized(why=f"weights quantized by {method!r:.100} are not supported")


def _of_groups(groups: object) -> _Known:
    """What all groups of modules of compressed-tensors have: fp8, and blocks of one size."""
    each_group = groups.values() if isinstance(groups, dict) else ()
    found = [group.get("weights") for group in each_group if isinstance(group, dict)]
    weights = [one for one in found if isinstance(one, dict)]
    each = {str(one.get("strategy")) for one in weights}
    blocks = {_block_size(one.get("block_structure"), "block_structure") for one in weights} - {None}
    in_fp8 = all((one.get("type"), one.get("num_bits")) == ("float", 8) for one in weights)
    if not (each and in_fp8 and each <= {"tensor", "channel", "block"} and len(blocks) == ("block" in each)):
        raise NotDequantized(why=f"config_groups in config.json are {groups!r:.200}, but only fp8 is supported")
    return _Known(frozenset(each), next(iter(blocks), None))


def _settings(config: str) -> Mapping[str, Any]:
    """What the config says of how weights are quantised; nothing where they are not."""
    raw = _json(config or "{}", "config.json")
    inner = [one for one in (raw, *raw.values()) if isinstance(one, dict)] if isinstance(raw, dict) else []
    key, found = next(((k, one[k]) for k in _SETTINGS for one in inner if one.get(k) is not None), ("", {}))
    if not isinstance(found, dict):
        raise NotDequantized(why=f"{key} in config.json is not a JSON object")
    return found


def _refuse_other_than_fp8(modelopt: str) -> None:
    raw = _json(modelopt, MODELOPT)
    settings = raw.get("quantization") if isinstance(raw, dict) else None
    algorithm = settings.get("quant_algo") if isinstance(settings, dict) else None
    if algorithm != "FP8":
        raise NotDequantized(why=f"{MODELOPT} has {algorithm!r:.100}, but only 'FP8' is supported for ModelOpt")


def _json(text: str, name: str) -> Any:
    try:
        return load_json(text.encode())
    except ValueError as error:
        raise NotDequantized(why=f"{name} is not JSON ({error})") from None


def _block_size(value: object, name: str) -> tuple[int, int] | None:
    match value:
        case None:
            return None
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
        case other:
            raise NotDequantized(why=f"{name} in config.json is {other!r:.100}, not two numbers")


def _notes(entries: Sequence[Entry], as_dtype: str, others: Sequence[str]) -> list[str]:
    made = Counter(entry.tensor.dtype for entry in entries if entry.scale)
    notes = [
        f"{counted(n, f'{was} weight', f'is converted to {as_dtype}')}; scales are dropped"
        for was, n in sorted(made.items())
    ]
    if not made:
        notes.append("--dequantize: no quantized weights found")
    return notes + ([f"scales of activations and caches are dropped: {first(others)}"] if others else [])


def plain_config(text: str, wanted: str, quantised: bool) -> str:
    """A config.json without its ``quantization_config``, and with ``wanted`` as the dtype of what was ``quantised``.

    It also was where the text says so.
    """
    kept, at = "", 0
    made = [kept]
    while match := _SETTINGS_KEY.search(text, at):
        try:
            _, end = json.JSONDecoder().raw_decode(text, match.end())
        except (ValueError, RecursionError):  # what is no JSON stays what it is
            break
        made.append(text[at : match.start()])
        if comma := _COMMA.match(text, end):
            at = comma.end()
        else:  # the last of its object
            while made and not (kept := made.pop().rstrip()):
                pass
            made.append(kept.removesuffix(","))
            at = end
    plain = "".join([*made, text[at:]])
    if quantised or at or any(dtype.startswith("float8_") for _, dtype, _ in _CONFIG_DTYPE.findall(plain)):
        plain = _CONFIG_DTYPE.sub(rf"\g<1>{wanted}\g<3>", plain)
    return plain
