"""Which of a file's nested dictionaries holds the weights, and what becomes of everything beside them.

Trainers wrap state dicts: ``{"state_dict": {...}, "epoch": 3}``, ``{"model": {...}, "optimizer": {...}}``. The rule:
a dictionary under a name that trainers use for weights wins, then the one that holds tensors itself, then the only one
with tensors anywhere in it. What lies beside it is named in the notes, and so is an optimizer's state inside it; other
tensors further inside are refused, because nobody can tell whether they are weights.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from reshard.pipeline.errors import Unsupported
from reshard.pipeline.limits import LEFT_OUT_MAX

T = TypeVar("T")

# In the order in which they are believed.
WRAPPERS = ("state_dict", "model_state_dict", "model_state", "model", "module", "weights", "params_ema", "params")
# What trainers keep beside the weights in the same dictionary: never weights, whatever tensors are inside.
TRAINING_STATE = {
    *("optim", "optimizer", "optimizers", "optimizer_state", "optimizer_state_dict", "optimizer_states"),
    *("lr_scheduler", "lr_schedulers", "scheduler", "dataloader", "train_state", "rng_state", "random_states"),
}
_LABEL_MAX = 80  # characters of a name from a stranger that a message shows


@dataclass(frozen=True, slots=True)
class Leaf(Generic[T]):
    tensor: T


@dataclass(frozen=True, slots=True)
class Other:
    """Anything that is neither a tensor nor a dictionary with names for keys."""

    text: str
    has_tensors: bool = False


@dataclass(slots=True)
class Branch(Generic[T]):
    """A dictionary whose keys are all text."""

    children: dict[str, Branch[T] | Leaf[T] | Other] = field(default_factory=dict)
    has_tensors: bool = False

    @property
    def text(self) -> str:
        return f"a dictionary of {len(self.children)}"


def label(path: Sequence[str]) -> str:
    """A path of keys for a message: escaped, and no longer than a line."""
    text = repr(".".join(part[:_LABEL_MAX] for part in path[:_LABEL_MAX]))[1:-1]
    return text if len(text) <= _LABEL_MAX else text[:_LABEL_MAX] + "..."


def weights_of(root: Branch[T], file: str, told: Container[str] = ()) -> tuple[dict[str, T], tuple[str, ...]]:
    """The tensors of the dictionary under ``root`` that holds the weights, and notes on where it was and on the rest.

    ``told`` are names at the root that are no part of the rest. Raises Unsupported where none does.
    """
    path: tuple[str, ...] = ()
    left_out: list[str] = []
    branch = Branch({name: child for name, child in root.children.items() if name not in told}, root.has_tensors)
    while (key := _way_down(branch, file, path)) is not None:
        left_out += [_left_out((*path, name), child) for name, child in branch.children.items() if name != key]
        below = branch.children[key]
        assert isinstance(below, Branch)
        branch, path = below, (*path, key)
    tensors: dict[str, T] = {}
    for name, child in branch.children.items():
        if isinstance(child, Leaf):
            tensors[name] = child.tensor
        elif child.has_tensors and name not in TRAINING_STATE:
            raise Unsupported(file=file, what=f"{label((*path, name))} ({child.text} with tensors inside)")
        else:
            left_out.append(_left_out((*path, name), child))
    notes = [f"{file}: using the weights under {label(path)}"] if path else []
    notes += [f"{file}: skipped {text}" for text in left_out[:LEFT_OUT_MAX]]
    if len(left_out) > LEFT_OUT_MAX:
        notes.append(f"{file}: skipped {len(left_out) - LEFT_OUT_MAX} more values")
    return tensors, tuple(notes)


def _way_down(branch: Branch[T], file: str, path: tuple[str, ...]) -> str | None:
    """The key of the next dictionary to enter, or None when ``branch`` itself holds the weights."""
    inner = [
        key
        for key, child in branch.children.items()
        if isinstance(child, Branch) and child.has_tensors and key not in TRAINING_STATE
    ]
    for key in WRAPPERS:
        if key in inner:
            return key
    if any(isinstance(child, Leaf) for child in branch.children.values()):
        return None
    if len(inner) == 1:
        return inner[0]
    if inner:
        names = ", ".join(label((*path, key)) for key in inner[:5])
        raise Unsupported(file=file, what=f"a file with several dictionaries of tensors ({names})")
    raise Unsupported(file=file, what=f"{branch.text} without named tensors")


def _left_out(path: tuple[str, ...], child: Branch[T] | Leaf[T] | Other) -> str:
    if isinstance(child, Leaf):
        return f"{label(path)} (a tensor)"
    return f"{label(path)} ({child.text}{', with tensors' if child.has_tensors else ''})"
