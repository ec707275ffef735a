"""What our commits say about themselves, so that everything can be rebuilt from a target's history alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from reshard.pipeline.checkpoint.indexes import load_json
from reshard.pipeline.limits import CLOCK_SKEW_MAX, HISTORY_MAX
from reshard.pipeline.planning.model import Plan, files_told
from reshard.pipeline.protocols import Commit, Target
from reshard.pipeline.request import LAYOUT
from reshard.pipeline.tensors import Pin

_TRAILER = "Reshard-Publication: "
_MANIFEST = "Reshard-Manifest: "
_SUBMITTED = "Reshard-Submitted: "
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
    manifest_sha256: str | None = None  # of the whole file; our first commits did not say it
    submitted: int | None = None  # when its job was submitted, in ms since the epoch; the same of those
    author: str = ""  # as the history has it

    @property
    def pin(self) -> Pin:
        return Pin(self.endpoint, self.source, self.source_commit)

    def is_later(self, submitted: int | None, now: float) -> bool:
        """Whether its job was submitted after ``submitted``, as far as clocks can tell; ``now`` in seconds.

        A time that is still to come is of a clock that was wrong, and must not close the target until then.
        """
        if self.submitted is None or submitted is None:
            return False
        return submitted < self.submitted <= (now + CLOCK_SKEW_MAX) * 1000


def address(target: Target, path: Path | None = None) -> str:
    """The target as it is part of a request's key; a folder, which links give several names, by the one of ``path``."""
    return f"{path or target.place}#{target.branch}"


def title(plan: Plan) -> str:
    if plan.reused:
        return f"Carried files of {plan.pin}"
    return f"Weights of {plan.pin} in {files_told(plan, len(plan.shards))}"


def message(plan: Plan, root: str | None = None, sha256: str | None = None, added: Iterable[str] = ()) -> str:
    """The description of our commit: a line of JSON behind a trailer's name, and more trailers.

    ``root`` and ``sha256`` are the manifest's. ``added`` are the paths that others put there since the plan: they are
    theirs, and no later publication's to delete.

    The sha256 and the time are no part of the JSON because its keys are what every release knows.
    """
    facts = {
        "plan": plan.digest,
        "request": plan.keys.request,
        "weights": plan.keys.weights,
        "source": plan.pin.repo,
        "source_commit": plan.pin.commit,
        "endpoint": plan.pin.endpoint,
        "layout": LAYOUT,
        "kept": sorted({*plan.kept, *added}),
        "manifest": root,
    }
    return (
        f"Published by reshard. {plan.options.told(plan.altered)}\n\n"
        f"{_TRAILER}{json.dumps(facts, sort_keys=True, separators=(',', ':'))}\n"
        + (f"{_MANIFEST}{sha256}\n" if sha256 else "")
        + (f"{_SUBMITTED}{plan.submitted}\n" if plan.submitted else "")
    )


def read(commit: Commit) -> Publication | None:
    """The publication that ``commit`` is; None for a commit that is not ours."""
    trailer = _trailer(commit, _TRAILER)
    if trailer is None:
        return None
    try:
        facts = load_json(trailer.encode())
        about = {"commit": commit.id, "manifest_sha256": _trailer(commit, _MANIFEST), "kept": tuple(facts["kept"])}
        about |= {"author": commit.author}
        submitted = _trailer(commit, _SUBMITTED)
        return Publication(**facts | about, submitted=int(submitted) if submitted else None)
    except (ValueError, TypeError, KeyError):
        return None  # our trailer, typed by hand


def _trailer(commit: Commit, name: str) -> str | None:
    return next((line.removeprefix(name) for line in commit.message.splitlines() if line.startswith(name)), None)


def undo_message(commit: str) -> str:
    return f"Rolled back by reshard: every path is what it was before {commit}.\n\n{_UNDOES}{commit}\n"


def undoes(commit: Commit) -> str | None:
    """The publication that ``commit`` undoes; None for every other commit."""
    return _trailer(commit, _UNDOES)


def standing(history: Iterable[Commit]) -> Commit | None:
    """The newest commit of ``history``, newest first, whose changes were not undone; not one of ours that undoes."""
    undone = set()
    for commit in islice(history, HISTORY_MAX):
        before = undoes(commit)
        if before is None and commit.id not in undone:
            return commit
        undone.add(before)
    return None


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
