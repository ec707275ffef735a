"""What training wrappers put into tensor names, and names without it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from reshard.pipeline.errors import DuplicateTensor, UsageError

# In front of every name: torch.nn.DataParallel and DistributedDataParallel.
_LEADING = "module"
# Anywhere between two dots: torch.compile, FullyShardedDataParallel, activation checkpointing.
_INSIDE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def wrappers_in(names: Sequence[str]) -> tuple[str, ...]:
    """The wrappers that these names show, each as the prefix that it leaves: ``("module.", "_orig_mod.")``.

    ``module.`` counts only when, the others aside, every name begins with it: models may have a part of that name.
    None counts where names are ``half_wrapped``.
    """
    text = "\n".join(names)  # one search in place of 500,000
    inside = [part for part in _INSIDE if part in text and any(part in name.split(".")[:-1] for name in names)]
    bare = ([part for part in name.split(".") if part not in _INSIDE] for name in names)
    leading = bool(names) and all(len(parts) > 1 and parts[0] == _LEADING for parts in bare)
    if inside and not leading and half_wrapped(names):
        return ()
    return tuple(f"{part}." for part in ([_LEADING] if leading else []) + inside)


def half_wrapped(names: Sequence[str], least: int = 2) -> tuple[str, str] | None:
    """A name that begins with ``least`` wrappers, of which ``module.`` is one, and one without any; None where there
    are not both.

    Whether that ``module.`` is a wrapper, too, nobody can tell, and names without half of their wrappers fit no model.
    """
    both = plain = ""
    for name in names:
        front = {*takewhile({_LEADING, *_INSIDE}.__contains__, name.split(".")[:-1])}
        if not front:
            plain = plain or name
        elif _LEADING in front and len(front) >= least:
            both = both or name
        if both and plain:
            return both, plain
    return None


def unwrapped_name(name: str, wrappers: Sequence[str]) -> str:
    """``name`` without ``wrappers``: those that torch writes between dots anywhere, any other only in front."""
    inside = {wrapper.rstrip(".") for wrapper in wrappers} & set(_INSIDE)
    *path, last = name.split(".")
    name = ".".join([*(part for part in path if part not in inside), last])
    for wrapper in wrappers:
        if wrapper.rstrip(".") not in _INSIDE:
            name = name.removeprefix(wrapper)
    return name


def unwrapped_names(names: Iterable[str], wrappers: Sequence[str], file: str) -> dict[str, str]:
    """Old name -> new name; raises DuplicateTensor when two names would become one, and UsageError for one that no file
    takes. ``file`` is for the messages.
    """
    found: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in names:
        found[name] = new = unwrapped_name(name, wrappers)
        if new != name and new in {"", "__metadata__"}:
            raise UsageError(what=f"--strip-prefix: {name!r} in {file} would be {new!r}, not a valid name")
        if (other := taken.setdefault(new, name)) != name:
            again = f"the same file (as {name}), once prefixes are removed"
            raise DuplicateTensor(tensor=new, file=f"{file} (as {other})", other=again)
    return found
