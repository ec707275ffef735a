"""Experts of a mixture, each in tensors of its own or all of a layer in two: the same bytes, stacked or cut. Pure.

transformers 5 holds the experts of a layer as ``experts.gate_up_proj`` (experts, gate and up, hidden) and
``experts.down_proj``, and so do checkpoints that trainers save of it; before that, and where vLLM loads them, each
expert has three matrices of its own. Between the two nothing is computed: one is the other, stacked along the first
dimension, with the gate before the projection up.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from reshard.pipeline.checkpoint.formats.tiling import flaw_in_tiling
from reshard.pipeline.errors import BadExperts, ProofError
from reshard.pipeline.request import Experts
from reshard.pipeline.tensors import DTYPE_BITS, Piece, Tensor

# What the gate, the projection up and the one down are called, by families that transformers converts alike.
NAMES: dict[Experts, tuple[str, str, str]] = {
    "separate": ("gate_proj", "up_proj", "down_proj"),  # Qwen, DeepSeek, GLM, OLMoE
    "separate-mixtral": ("w1", "w3", "w2"),  # Mixtral, MiniMax
}
# A name may have lines, and is matched at the first try with them, or tried again at each `experts` in it.
ONE = re.compile(r"(?P<layer>.*\bexperts)\.(?P<number>0|[1-9]\d{0,5})\.(?P<rest>.+)", re.DOTALL)
FUSED = re.compile(r"(?P<layer>.*\bexperts)\.(?P<rest>gate_up_proj|down_proj)", re.DOTALL)


def arranged(tensors: Sequence[Tensor], experts: Experts) -> Sequence[Tensor]:
    """The tensors with the experts of each layer as asked for; ``tensors`` itself where no layer has others.

    Raises BadExperts for experts that are no plain stack: quantised ones, with biases, transposed, or some missing.
    """
    pattern = ONE if experts == "fused" else FUSED
    found: dict[str, dict[tuple[str, str], Tensor]] = defaultdict(dict)
    kept = []
    for tensor in tensors:
        match = pattern.fullmatch(tensor.name)
        if match is None:
            kept.append(tensor)
        else:
            part = match.groupdict()
            found[part["layer"]][part.get("number", ""), part["rest"]] = tensor
    if not found:
        return tensors
    for layer in found:
        if beside := [t.name for t in kept if t.name.startswith(f"{layer}.")]:
            raise BadExperts(layer=layer, why=f"{beside[0]} belongs to them, but cannot be stacked or split")
    made = [
        tensor
        for layer, parts in found.items()
        for tensor in (_fused(layer, parts) if experts == "fused" else _separate(layer, parts, NAMES[experts]))
    ]
    for tensor in made:
        if flaw := flaw_in_tiling(tensor.shape, tensor.pieces):
            raise ProofError(what=f"{tensor.name} does not match its parts: {flaw}")
    return kept + made


def unchanged(names: Iterable[str], experts: Experts) -> BadExperts:
    """Why ``arranged`` left a model with tensors of these ``names`` as it was."""
    whose, kept = "the model", "remove --experts; the result is the same without it"
    if experts == "fused":
        if any(FUSED.fullmatch(name) for name in names):
            return BadExperts(layer=whose, why="they are already fused", cure=kept)
        return BadExperts(layer=whose, why="no experts to convert to fused")
    found = {match["rest"].partition(".")[0] for name in names if (match := ONE.fullmatch(name))}
    there = next((layout for layout, parts in NAMES.items() if found == {*parts}), None)
    if there == experts:
        return BadExperts(layer=whose, why=f"they are already {experts}", cure=kept)
    if there is not None:
        old, new = NAMES[there], NAMES[experts]
        pairs = ", ".join(f"{one} to {other}" for one, other in zip(old, new, strict=True))
        cure = f"use --rename instead: only the names differ ({pairs})"
        return BadExperts(layer=whose, why=f"they are already separate, under the names of {there}", cure=cure)
    return BadExperts(layer=whose, why=f"no experts to convert to {experts}")


def _fused(layer: str, parts: Mapping[tuple[str, str], Tensor]) -> list[Tensor]:
    numbers = sorted({int(number) for number, _ in parts})
    kinds = {rest for _, rest in parts}
    names = next((n for n in NAMES.values() if kinds == {f"{name}.weight" for name in n}), None)
    if names is None:
        raise BadExperts(layer=layer, why=f"an expert has {', '.join(sorted(kinds)[:4])} instead of three weights")
    if numbers != [*range(len(numbers))] or len(parts) != 3 * len(numbers):
        raise BadExperts(layer=layer, why="some of its experts are missing")
    gates, ups, downs = ([parts[str(number), f"{name}.weight"] for number in numbers] for name in names)
    rows = gates[0].shape[0] if gates[0].shape else 0
    _check(layer, [*gates, *ups, *downs], gates[0].shape, downs[0].shape)
    if {t.shape for t in (*gates, *ups)} != {gates[0].shape} or {t.shape for t in downs} != {downs[0].shape}:
        raise BadExperts(layer=layer, why="its experts have different shapes")
    both = [p for n in numbers for p in (*_placed(gates[n], n, 0), *_placed(ups[n], n, rows))]
    down = [p for n in numbers for p in _placed(downs[n], n, 0)]
    count, (_, width) = len(numbers), gates[0].shape
    return [
        Tensor(f"{layer}.gate_up_proj", gates[0].dtype, (count, 2 * rows, width), tuple(both)),
        Tensor(f"{layer}.down_proj", downs[0].dtype, (count, *downs[0].shape), tuple(down)),
    ]


def _separate(layer: str, parts: Mapping[tuple[str, str], Tensor], names: tuple[str, str, str]) -> list[Tensor]:
    if len(parts) != 2:
        raise BadExperts(layer=layer, why="only one of gate_up_proj and down_proj exists")
    both, down = parts["", "gate_up_proj"], parts["", "down_proj"]
    stacked = len(both.shape) == len(down.shape) == 3 and both.shape[0] == down.shape[0]
    if not stacked or both.shape[1] % 2 or 0 in both.shape + down.shape:
        raise BadExperts(layer=layer, why=f"unsupported shapes: {list(both.shape)} and {list(down.shape)}")
    rows = both.shape[1] // 2
    _check(layer, [both, down], (rows, both.shape[2]), down.shape[1:])
    made = []
    for number in range(both.shape[0]):
        for name, tensor, first, stop in (
            (names[0], both, 0, rows),
            (names[1], both, rows, 2 * rows),
            (names[2], down, 0, down.shape[1]),
        ):
            pieces = tuple(p for piece in tensor.pieces if (p := _cut(piece, tensor.dtype, number, first, stop)))
            shape = (stop - first, tensor.shape[2])
            made.append(Tensor(f"{layer}.{number}.{name}.weight", tensor.dtype, shape, pieces))
    return made


def _check(layer: str, tensors: Sequence[Tensor], gate: Sequence[int], down: Sequence[int]) -> None:
    """Raises BadExperts unless one expert's gate is the transpose of its projection down in shape.

    Some families keep both transposed, or gate and up row by row in turn: none of those is a plain stack. The first
    shows in the shapes, and those that do the second have biases beside them.
    """
    if len(gate) != 2 or tuple(gate) != tuple(reversed(down)):
        why = f"the shapes of an expert's gate {list(gate)} and down projection {list(down)} look transposed"
        raise BadExperts(layer=layer, why=why)
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1 or DTYPE_BITS[min(dtypes)] < 16:
        raise BadExperts(layer=layer, why=f"they are quantized or have different dtypes: {', '.join(sorted(dtypes))}")


def _placed(tensor: Tensor, number: int, row: int) -> list[Piece]:
    """The pieces of an expert's matrix, where they are in the stack of all."""
    return [
        piece._replace(
            at=(number, row + piece.at[0], piece.at[1]),
            shape=(1, *piece.shape),
            strides=(0, *piece.strides) if piece.strides is not None else None,
        )
        for piece in tensor.pieces
    ]


def _cut(piece: Piece, dtype: str, number: int, first: int, stop: int) -> Piece | None:
    """What a piece of a stack has of rows ``first`` to ``stop`` of expert ``number``."""
    at, shape = piece.at, piece.shape
    low, high = max(first, at[1]), min(stop, at[1] + shape[1])
    if not at[0] <= number < at[0] + shape[0] or low >= high:
        return None
    strides = piece.steps(DTYPE_BITS[dtype] // 8)
    return Piece(
        piece.file,
        piece.offset + (number - at[0]) * strides[0] + (low - at[1]) * strides[1],
        (low - first, at[2]),
        (high - low, shape[2]),
        strides[1:] if piece.strides is not None else None,  # rows of a packed box follow each other
        piece.order,
    )
