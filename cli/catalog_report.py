"""A catalog's run as a page of Markdown, for an issue, a mail or a build's summary."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from reshard.cli.output import count

if TYPE_CHECKING:
    from reshard.worker.catalogs import Seen


def markdown(seen: Seen) -> str:
    """The figures, what was published, and what failed by error code with what to do about it."""
    definition, counts = seen.definition, seen.counts()
    read, uploaded = (sum(getattr(ended, what) for _, ended in seen.ended) for what in ("read", "uploaded"))
    lines = [
        f"# Catalog {definition.name}: {seen.state}",
        "",
        f"Began {_moment(seen.started)}, {seen.state} since {_moment(seen.since)}, digest `{definition.digest[:12]}`.",
        *([f"{seen.note}."] if seen.note else []),
        "",
        "| models | number |",
        "| --- | ---: |",
        *(f"| {what} | {number:,} |" for what, number in counts.items()),
        *(f"| {what} | {number:,} |" for what, number in (("at work", len(seen.active)), ("to do", seen.todo))),
        f"| all | {seen.entries:,} |",
        "",
        f"Read {read:,} bytes of weights, uploaded {uploaded:,}.",
    ]
    published = [(repo, ended) for repo, ended in seen.ended if ended.outcome == "published"]
    if published:
        lines += ["", "## Published", "", "| source | commit | bytes read |", "| --- | --- | ---: |"]
        lines += [f"| {repo} | `{ended.commit}` | {ended.read:,} |" for repo, ended in published]
    if groups := seen.failures():
        lines += ["", "## Failed"]
    for code, group in groups.items():
        hint = (group[0][1].error or {})["hint"]
        lines += ["", f"### `{code}`: {count(len(group), 'model')}", "", f"{hint}", ""]
        lines += [f"* {repo}: {_flat((ended.error or {})['message'])}" for repo, ended in group]
    return "\n".join(lines) + "\n"


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _flat(text: str) -> str:
    return " ".join(text.split())
