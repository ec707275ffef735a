"""YAML from outside, catalogs and rename rules, read within bounds. Pure."""

from __future__ import annotations

from typing import Any

import yaml

from reshard.pipeline.text import counted

NESTING_MAX = 32  # levels of a file; a catalog has five, and libyaml itself ends the process at some ten thousand
NODES_MAX = 3_000_000  # values of a catalog, with what its aliases repeat; an entry has few more than twenty
# Ten times as fast, where PyYAML was built with libyaml; a catalog may have thousands of lines.
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# What PyYAML lets through of a value that is not of its kind: a day that no month has, `!!int a`, `!!bool x`.
_MISREAD = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


def load(text: str, nodes_max: int = NODES_MAX, loader_of: Any = LOADER) -> tuple[yaml.Node | None, object]:
    """The root of ``text``, None where there is none, and its value; raises YAMLError for whatever is wrong."""
    try:
        _refuse_bombs(text, nodes_max, loader_of)
        loader = loader_of(text)
        root = loader.get_single_node()
        return root, None if root is None else loader.construct_document(root)
    except _MISREAD as error:
        why = f" ({error})" if isinstance(error, ValueError) else ""
        raise yaml.YAMLError(f"a value does not have the form of its type{why}") from error


def _refuse_bombs(text: str, nodes_max: int, loader_of: Any) -> None:
    """Raises MarkedYAMLError for what would take the stack or the memory of whoever loads it."""
    sizes: dict[str | None, int] = {}  # of what has an anchor, with what its aliases repeat
    opened: list[tuple[str | None, int]] = []
    nodes = 0
    event: Any  # its types have no anchors and marks that agree
    for event in yaml.parse(text, Loader=loader_of):
        why = ""
        if isinstance(event, yaml.AliasEvent):
            nodes += sizes.get(event.anchor, 0)
            misplaced = f"alias *{event.anchor} has no anchor before it, or is inside its own anchor"
            why = "" if event.anchor in sizes else misplaced
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            sizes |= {anchor: nodes - before} if anchor else {}
        elif isinstance(event, yaml.NodeEvent):
            nodes += 1
            if isinstance(event, yaml.CollectionStartEvent):
                opened.append((event.anchor, nodes - 1))
            elif event.anchor:
                sizes[event.anchor] = 1
        if len(opened) > NESTING_MAX:
            why = f"nested deeper than {NESTING_MAX} levels"
        elif nodes > nodes_max:
            why = f"more than {counted(nodes_max, 'value')}"
        if why:
            raise yaml.MarkedYAMLError(problem=why, problem_mark=event.start_mark)
