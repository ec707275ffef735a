"""How a job ended, whether it ran here or on the queue: the checks, what attests the bytes, the commit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NAMES_SHOWN = 8  # files of one kind; a script reads all of them with --json


def source_bytes(read: Iterable[str], attested: Mapping[str, str]) -> dict[str, list[str]]:
    """The source files by what their bytes were held against; without ``attested``, nothing but the transport."""
    levels: dict[str, list[str]] = {}
    for path in sorted({*read, *attested}):
        levels.setdefault(attested.get(path, "as delivered"), []).append(path)
    return levels


def outcome(
    target: str, checks: Iterable[Mapping[str, Any]], bytes_: Mapping[str, Sequence[str]], published: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """The end of a job for people, one ``what, figure`` after the other; as much of it as there is."""
    told = [told_check(check) for check in checks]
    idle = not told  # a commit that was found after checks is the job's own, whose answer was lost
    told += [("source bytes", f"{how}: {_some(files)}") for how, files in bytes_.items()]
    if published:
        ref = f", {published['ref']}" if published["ref"] else ""
        found = " was there already: nothing was done" if published["found"] and idle else ""
        told.append(("commit", f"{published['commit']}{ref}{found}"))
    return [*told, ("where", target)]


def moved(read: int, uploaded: int, deduplicated: int, expected: int | None = None) -> tuple[str, str]:
    """What moved, in bytes, beside what a plan had said."""
    said = "" if expected is None else f" of about {expected:,} expected"
    there = f", {deduplicated:,} were there already" if deduplicated else ""
    return "moved", f"read {read:,} bytes of weights, uploaded {uploaded:,}{said}{there}"


def _some(names: Sequence[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more:,} more" if more > 0 else "")


def told_check(check: Mapping[str, Any]) -> tuple[str, str]:
    """One check for people: its name, and how it ended, why and over how much."""
    figures = ", ".join(f"{name.replace('_', ' ')} {_figure(value)}" for name, value in check["figures"].items())
    said = [f"{check['result']} ({check['level']})", check["reason"], figures]
    return check["name"], "; ".join(part for part in said if part)


def checks_text(checks: Iterable[Mapping[str, Any]]) -> list[str]:
    """Each check in a line, and each of its findings in one below it."""
    told = []
    for check in checks:
        told.append(": ".join(told_check(check)))
        told += [f"    {finding}" for finding in check["findings"]]
    return told


def _figure(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:.1f}" if isinstance(value, float) else str(value)
