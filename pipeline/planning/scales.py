"""Which tensors of a quantised checkpoint are weights, and which the scales that make plain ones of them. Pure."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from reshard.pipeline.errors import BadScale, NotDequantised
from reshard.pipeline.planning.model import Entry, Scale
from reshard.pipeline.tensors import Tensor

_FLOAT8 = ("F8_E4M3", "F8_E5M2")
_SCALE_DTYPES = ("F32", "F16", "BF16", "F8_E8M0")
# What goes with the weights' scales: those of activations, of no use to plain weights.
_OF_ACTIVATIONS = re.compile(r"[._](?:input|activation)_scale$")
_OF_WEIGHTS = re.compile(r"_scale_inv$|[._]weight_scale$")
# A config's key, at any depth, and the dtype that some quantised models name there.
_SETTINGS = "quantization_config"
_SETTINGS_KEY = re.compile(rf'"{_SETTINGS}"\s*:\s*')
_CONFIG_DTYPE = re.compile(r'("(?:torch_)?dtype"\s*:\s*")float8_\w+(")')


class Dequantised(NamedTuple):
    """The entries to write, and what else came of it."""

    entries: tuple[Entry, ...]
    scales: frozenset[str]
    notes: tuple[str, ...]


def dequantised(tensors: Sequence[Tensor], config: str, as_dtype: str | None) -> Dequantised:
    """``tensors`` with plain weights, of ``as_dtype``, in place of quantised ones and their scales.

    ``config`` says how they were quantised. Raises NotDequantised for what is not known here, and BadScale.
    """
    if as_dtype is None:
        raise NotDequantised(why="it needs --dtype, which is what the weights become")
    block = _block_size(_settings(config))
    named = {tensor.name: tensor for tensor in tensors}
    scales: set[str] = set()
    entries = []
    for tensor in tensors:
        if tensor.dtype in _FLOAT8:
            scale = _scale_of(tensor, named, block)
            scales.add(scale.tensor.name)
            entries.append(Entry(tensor, as_dtype, scale))
        elif not _OF_ACTIVATIONS.search(tensor.name):
            entries.append(Entry(tensor, tensor.dtype))
    others = {tensor.name for tensor in tensors if _OF_ACTIVATIONS.search(tensor.name)}
    for name in sorted(named.keys() - scales):
        if _OF_WEIGHTS.search(name):
            raise BadScale(tensor=name, why="there is no fp8 weight that this is the scale of")
    entries = [entry for entry in entries if entry.name not in scales]
    return Dequantised(tuple(entries), frozenset(scales | others), tuple(_notes(entries, as_dtype, len(others))))


def _scale_of(weight: Tensor, named: Mapping[str, Tensor], block: tuple[int, int] | None) -> Scale:
    tensor = named.get(f"{weight.name}_scale_inv")
    if tensor is None:
        raise BadScale(tensor=weight.name, why=f"it is {weight.dtype}, and {weight.name}_scale_inv is not there")
    if tensor.dtype not in _SCALE_DTYPES:
        raise BadScale(tensor=tensor.name, why=f"it is {tensor.dtype}, and scales are {', '.join(_SCALE_DTYPES)}")
    if block is None:
        raise BadScale(tensor=tensor.name, why="no weight_block_size in config.json says what its values are for")
    grid = (*weight.shape[:-2], *(-(-size // part) for size, part in zip(weight.shape[-2:], block, strict=False)))
    if len(weight.shape) < 2 or tensor.shape != grid:
        why = f"its shape is {[*tensor.shape]}, and {weight.name} of {[*weight.shape]} has blocks of {[*block]}"
        raise BadScale(tensor=tensor.name, why=f"{why}: {[*grid]}" if len(weight.shape) >= 2 else why)
    return Scale(tensor, block)


def _settings(config: str) -> Mapping[str, Any]:
    """What the config says of how weights are quantised; nothing where they are not."""
    try:
        raw = json.loads(config or "{}")
    except (ValueError, RecursionError) as error:
        raise NotDequantised(why=f"config.json is no JSON ({error})") from None
    inner = [raw, *raw.values()] if isinstance(raw, dict) else []
    found: Any = next((one[_SETTINGS] for one in inner if isinstance(one, dict) and one.get(_SETTINGS) is not None), {})
    if not isinstance(found, dict):
        raise NotDequantised(why=f"{_SETTINGS} in config.json is no JSON object")
    if found and (method := found.get("quant_method")) != "fp8":
        raise NotDequantised(why=f"weights quantised by {method!r:.100} are not known here")
    return found


def _block_size(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    match settings.get("weight_block_size"):
        case None:
            return None
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
        case other:
            raise NotDequantised(why=f"weight_block_size in config.json is {other!r:.100}, and not two numbers")


def _notes(entries: Sequence[Entry], as_dtype: str, others: int) -> list[str]:
    made = Counter(entry.tensor.dtype for entry in entries if entry.scale)
    notes = [f"{n:,} weights become {as_dtype}, of {was} and as many scales" for was, n in sorted(made.items())]
    if not made:
        notes.append("--dequantize finds no quantised weight")
    return notes + ([f"{others:,} scales of activations are not written"] if others else [])


def plain_config(text: str, wanted: str) -> str:
    """A config.json without its ``quantization_config``, and with ``wanted`` in place of an fp8 dtype."""
    while match := _SETTINGS_KEY.search(text):
        try:
            _, end = json.JSONDecoder().raw_decode(text, match.end())
        except (ValueError, RecursionError):  # what is no JSON stays what it is
            break
        before, after = text[: match.start()], text[end:]
        if (rest := after.lstrip()).startswith(","):
            text = before + rest[1:].lstrip()
        else:  # the last of its object
            text = before.rstrip().removesuffix(",") + after
    return _CONFIG_DTYPE.sub(rf"\g<1>{wanted}\g<2>", text)
