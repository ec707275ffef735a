"""A catalog's run as a page of Markdown, for an issue, a mail or a build's summary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from reshard.client.models.catalogs import dropped
from reshard.client.text import clock, count, finds_none, human_bytes, lasted
from reshard.pipeline.stores.credentials import default_endpoint
from reshard.worker.followers.records import IN_FILE

if TYPE_CHECKING:
    from reshard.client.models.catalogs import Catalog, Ended

SHORT_COMMIT = 8  # letters; what the Hub shows of one


def markdown(seen: Catalog) -> str:
    """The figures, what failed by error code with what to do about it, and what was published with its commits."""
    return "\n".join([*_head(seen), *_figures(seen), *_failed(seen), *_published(seen)]) + "\n"


def _head(seen: Catalog) -> Iterator[str]:
    yield f"# Catalog {seen.name}: {seen.state}\n"
    took = f"{seen.state} since {clock(seen.since)} UTC (after {lasted(seen.since - seen.started)})"
    yield f"Started {clock(seen.started)} UTC, {took}."
    yield f"Submitted by {seen.asked_by or '(unknown)'} (digest `{seen.digest[:12]}`)."
    yield from (f"**{text}**" for text in (seen.note, *map(finds_none, seen.empty)) if text)


def _figures(seen: Catalog) -> Iterator[str]:
    yield "\n| models | number | weights read | uploaded |\n| --- | ---: | ---: | ---: |"
    for what, number in seen.counts.items():
        if ":" in what:  # of what `failed` counts
            continue
        yield f"| {what} | {number:,} | {_moved(ended for ended in seen.ended if ended.outcome == what)} |"
    for what, number in (
        ("running", active := seen.running),
        ("to do", seen.todo),
        ("not queued", dropped(seen, active)),
    ):
        if number:
            yield f"| {what} | {number:,} | | |"
    yield f"| all | {seen.entries:,} | {_moved(seen.ended)} |"


def _failed(seen: Catalog) -> Iterator[str]:
    groups = seen.failures()
    if groups:
        yield "\n## Failed"
    for code, group in groups.items():
        hints = list(dict.fromkeys(_fact(ended, "hint") for ended in group))
        command = "submit FILE" if code in IN_FILE else f"retry {seen.name} --only {code}"
        once = hints[0].removesuffix(f", then run `reshard catalog retry {seen.name}`")
        then = f"{once}. Then run" if len(hints) == 1 else "Once these are fixed, run"
        yield f"\n### `{code}`: {count(len(group), 'model')}\n\n{then} `reshard catalog {command}`.\n"
        for ended in group:
            repo = ended.repo
            job = f" (job `{ended.job}`)" if ended.job else ""
            hint = f"; {_fact(ended, 'hint')}" if len(hints) > 1 else ""
            message = _fact(ended, "message")
            yield f"* {'' if repo in message else f'{repo}: '}{message}{hint}{job}"


def _published(seen: Catalog) -> Iterator[str]:
    head = (
        "\n## Published\n\n| source | target | commit | weights read | uploaded |\n| --- | --- | --- | ---: | ---: |\n"
    )
    for ended in seen.ended:
        if ended.outcome == "published":
            commit = ended.commit or ""
            link = f"[`{commit[:SHORT_COMMIT]}`]({_url(ended.target or '')}/commit/{commit})"
            yield f"{head}| {ended.repo} | {ended.target} | {link} | {_moved([ended])} |"
            head = ""


def _url(target: str) -> str:
    """Of a target as it is typed; without an endpoint it is on the one that is set here, as for every command."""
    if "://" in target:
        return target
    return f"{default_endpoint().rstrip('/')}/{target}"


def _moved(ended: Iterable[Ended]) -> str:
    """Two cells."""
    some = list(ended)
    return f"{human_bytes(sum(one.read for one in some))} | {human_bytes(sum(one.uploaded for one in some))}"


def _fact(ended: Ended, name: str) -> str:
    """Of its error, in one line."""
    return " ".join(getattr(ended.error, name).split())
