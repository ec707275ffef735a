"""A catalog's run as a page of Markdown, for an issue, a mail or a build's summary."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from reshard.cli.output import count, finds_none, human_bytes, lasted
from reshard.pipeline.stores.credentials import DEFAULT_ENDPOINT

if TYPE_CHECKING:
    from reshard.worker.followers.records import CatalogStatus as Seen
    from reshard.worker.followers.records import Ended

SHORT_COMMIT = 8  # letters; what the Hub shows of one


def markdown(seen: Seen) -> str:
    """The figures, what failed by error code with what to do about it, and what was published with its commits."""
    return "\n".join([*_head(seen), *_figures(seen), *_failed(seen), *_published(seen)]) + "\n"


def _head(seen: Seen) -> Iterator[str]:
    definition = seen.definition
    yield f"# Catalog {definition.name}: {seen.state}"
    yield ""
    took = f"{seen.state} since {_moment(seen.since)}, {lasted(seen.since - seen.started)} later"
    yield f"Began {_moment(seen.started)}, {took}. Asked for by {definition.asked_by or 'nobody known'}, digest"
    yield f"`{definition.digest[:12]}`."
    if seen.note:
        yield f"**{seen.note}**"
    yield from (f"**{finds_none(number)}**" for number in seen.empty)
    yield ""


def _figures(seen: Seen) -> Iterator[str]:
    yield "| models | number | weights read | uploaded |"
    yield "| --- | ---: | ---: | ---: |"
    every = [ended for _, ended in seen.ended]
    for what, number in seen.counts().items():
        yield f"| {what} | {number:,} | {_moved(ended for ended in every if ended.outcome == what)} |"
    for what, number in (("at work", len(seen.active)), ("to do", seen.todo)):
        if number:
            yield f"| {what} | {number:,} | | |"
    yield f"| all | {seen.entries:,} | {_moved(every)} |"


def _failed(seen: Seen) -> Iterator[str]:
    groups, name = seen.failures(), seen.definition.name
    if groups:
        yield from ("", "## Failed")
    for code, group in groups.items():
        hints = list(dict.fromkeys(_hint(ended) for _, ended in group))
        yield from ("", f"### `{code}`: {count(len(group), 'model')}", "")
        command = "submit FILE" if group[0][1].in_file else f"retry {name} --only {code}"
        if len(hints) == 1:
            yield from (f"{_flat(hints[0])}. Then `reshard catalog {command}`.", "")
        else:
            yield from (f"Once these are fixed: `reshard catalog {command}`.", "")
        for repo, ended in group:
            job = f" (job `{ended.job}`)" if ended.job else ""
            then = f"; {_flat(_hint(ended))}" if len(hints) > 1 else ""
            message = _flat((ended.error or {})["message"])
            yield f"* {'' if message.startswith(repo) else f'{repo}: '}{message}{then}{job}"


def _published(seen: Seen) -> Iterator[str]:
    rows = [
        (repo, target, ended)
        for (repo, ended), target in zip(seen.ended, seen.targets, strict=True)
        if ended.outcome == "published"
    ]
    if not rows:
        return
    yield from ("", "## Published", "", "| source | target | commit | weights read | uploaded |")
    yield "| --- | --- | --- | ---: | ---: |"
    for repo, target, ended in rows:
        commit = ended.commit or ""
        link = f"[`{commit[:SHORT_COMMIT]}`]({_url(target or '')}/commit/{commit})"
        yield f"| {repo} | {target} | {link} | {_moved([ended])} |"


def _hint(ended: Ended) -> str:
    return str((ended.error or {})["hint"])


def _url(target: str) -> str:
    """Of a target as it is typed; without an endpoint it is on the one that is set here, as for every command."""
    if "://" in target:
        return target
    return f"{(os.environ.get('HF_ENDPOINT') or DEFAULT_ENDPOINT).rstrip('/')}/{target}"


def _moved(ended: Iterable[Ended]) -> str:
    """Two cells."""
    some: Sequence[Ended] = list(ended)
    return f"{human_bytes(sum(one.read for one in some))} | {human_bytes(sum(one.uploaded for one in some))}"


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _flat(text: str) -> str:
    return " ".join(text.split())
