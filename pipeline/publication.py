"""What our commits say about themselves, so that everything can be rebuilt from a target's history alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from reshard.pipeline.limits import HISTORY_MAX
from reshard.pipeline.plan import Plan
from reshard.pipeline.request import LAYOUT
from reshard.pipeline.stores.protocols import Commit, Target

_TRAILER = "Reshard-Publication: "
_UNDOES = "Reshard-Undoes: "


@dataclass(frozen=True, slots=True)
class Publication:
    """One commit of ours, as its description tells it."""

    commit: str
    plan: str  # the plan's digest
    request: str
    weights: str | None
    source: str
    source_commit: str
    endpoint: str | None
    layout: int
    kept: tuple[str, ...]  # what was in the target and was not ours
    manifest: str | None = None  # the root of the manifest that it brought


def address(target: Target) -> str:
    """The target as it is part of a request's key."""
    return f"{target.place}#{target.branch}"


def title(plan: Plan) -> str:
    if plan.reused:
        return f"Carried files of {plan.pin}"
    files = len(plan.shards)
    count = "one file" if files == 1 else f"{files} files of at most {plan.options.size:,} bytes"
    return f"Weights of {plan.pin} in {count}"


def message(plan: Plan, root: str | None = None) -> str:
    """The description of our commit: one line of JSON behind a trailer's name; ``root`` is the manifest's."""
    facts = {
        "plan": plan.digest,
        "request": plan.keys.request,
        "weights": plan.keys.weights,
        "source": plan.pin.repo,
        "source_commit": plan.pin.commit,
        "endpoint": plan.pin.endpoint,
        "layout": LAYOUT,
        "kept": plan.kept,
        "manifest": root,
    }
    return (
        f"Published by reshard. {plan.options.told()}\n\n"
        f"{_TRAILER}{json.dumps(facts, sort_keys=True, separators=(',', ':'))}\n"
    )


def read(commit: Commit) -> Publication | None:
    """The publication that ``commit`` is; None for anybody else's commit."""
    for line in commit.message.splitlines():
        if line.startswith(_TRAILER):
            try:
                facts = json.loads(line.removeprefix(_TRAILER))
                return Publication(commit=commit.id, **facts | {"kept": tuple(facts["kept"])})
            except (ValueError, TypeError, KeyError):
                return None  # somebody typed our trailer by hand
    return None


def undo_message(commit: str) -> str:
    """The description of a commit that undoes one of ours."""
    return f"Rolled back by reshard: every path is what it was before {commit}.\n\n{_UNDOES}{commit}\n"


def undoes(commit: Commit) -> str | None:
    """The publication that ``commit`` undoes; None for every other commit."""
    lines = (line.removeprefix(_UNDOES) for line in commit.message.splitlines() if line.startswith(_UNDOES))
    return next(lines, None)


def publications(target: Target, at: str, since: str | None) -> Iterator[Publication]:
    """Our publications from ``at`` backwards, newest first, but for those that were undone.

    Raises HistoryRewritten when ``since`` is not there.
    """
    undone = set()
    for count, commit in enumerate(target.history(at, since)):
        if since is None and count >= HISTORY_MAX:
            return
        undone.add(undoes(commit))
        found = read(commit)
        if found is not None and commit.id not in undone:
            yield found
