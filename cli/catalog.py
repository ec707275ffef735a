"""`reshard catalog ...`: many models by one file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Typer

from reshard.cli.arguments import read_output, takes
from reshard.cli.output import Output, count, human_bytes, lines
from reshard.pipeline.errors import EntriesWrong, UsageError

if TYPE_CHECKING:
    from reshard.pipeline.catalog import Catalog
    from reshard.pipeline.expand import Wanted
    from reshard.pipeline.stores.retry import Pace

SHOWN = 20  # lines of one kind; --json has all of them

File = Annotated[Path, Argument(metavar="FILE", help="The catalog, a YAML file.", show_default=False)]

catalog = Typer(
    name="catalog",
    help="Keep many models in a cut of your own, by one YAML file.",
    no_args_is_help=True,
)


def read_catalog(file: Path) -> tuple[str, Catalog]:
    """The file's text and what it says; raises UsageError, BadCatalog."""
    from reshard.pipeline.catalog import parse

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(what=f"{file} cannot be read: {error}") from None
    return text, parse(text, str(file))


@catalog.command("check")
@takes(output=read_output)
def check(file: File, output: Output) -> None:
    """Show what a catalog comes to now, and queue nothing. Asks the Hub with your own token."""
    from reshard.pipeline.expand import expand
    from reshard.pipeline.stores.open import Context

    _, parsed = read_catalog(file)
    calls = Counter[str]()
    wanted = expand(parsed, Context.from_env(_counted(calls)))
    facts: dict[str, Any] = {
        "catalog": parsed.name,
        "models": len(wanted),
        "ready": sum(one.error is None for one in wanted),
        "new": sum(one.error is None and one.target is None for one in wanted),
        "gated": [one.repo for one in wanted if one.source and one.source.gated],
        "bytes": sum(one.source.bytes for one in wanted if one.source and one.error is None),
        "growth": sum(one.source.bytes for one in wanted if one.source and not one.error and not one.target),
        "calls": calls.total(),
        "wrong": [{"repo": one.repo, **one.error.to_dict()} for one in wanted if one.error],
        "entries": [_entry(one) for one in wanted],
    }
    output.result(facts, lines(_told(facts)), str(facts["ready"]))
    if facts["wrong"]:
        raise EntriesWrong(file=str(file), count=count(len(facts["wrong"]), "model"))


def _entry(one: Wanted) -> dict[str, Any]:
    return {
        "repo": one.repo,
        "target": str(one.request.target) if one.request else None,
        "commit": one.source.sha if one.source else None,
        "bytes": one.source.bytes if one.source else None,
        "exists": one.target is not None,
        "error": one.error.code if one.error else None,
    }


def _told(facts: dict[str, Any]) -> list[tuple[str, str]]:
    wrong = facts["wrong"]
    return [
        ("catalog", facts["catalog"]),
        ("models", f"{facts['models']:,}, of which {facts['ready']:,} can be done"),
        ("targets", f"{facts['new']:,} new, {facts['ready'] - facts['new']:,} there already"),
        ("bytes", f"{human_bytes(facts['bytes'])} stored by the sources, past commits included"),
        ("growth", f"{human_bytes(facts['growth'])} at most, before the Hub finds what it has already"),
        ("calls", f"{facts['calls']:,} to the Hub for this"),
        *_listed("gated", facts["gated"], str),
        *_listed("wrong", wrong, lambda item: f"{item['repo']}: {item['code']}: {item['message']} ({item['hint']})"),
    ]


def _listed(what: str, items: Sequence[Any], say: Callable[[Any], str]) -> list[tuple[str, str]]:
    told = [(what, say(item)) for item in items[:SHOWN]]
    more = len(items) - SHOWN
    return [*told, (what, f"{more:,} more; --json has them all")] if more > 0 else told


def _counted(calls: Counter[str]) -> Callable[[str], Pace]:
    """Paces of this process that count the calls of each budget."""
    from reshard.pipeline.stores.retry import OwnPace

    class Counted(OwnPace):
        def __init__(self, budget: str) -> None:
            super().__init__()
            self._budget = budget

        def before(self, kind: str) -> None:
            calls[self._budget] += 1
            super().before(kind)

    paces: dict[str, Counted] = {}
    return lambda budget: paces.setdefault(budget, Counted(budget))
