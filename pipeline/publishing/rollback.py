"""Undoing a publication: one guarded commit that brings back what our commit changed, and touches nothing else."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from uuid import uuid4

from reshard.pipeline.check import first
from reshard.pipeline.checkpoint.small_files import read_file
from reshard.pipeline.errors import ChangedSince, NothingToRollBack, TargetConflict, TargetGone
from reshard.pipeline.limits import REGULAR_MAX
from reshard.pipeline.planning.existing import differ
from reshard.pipeline.protocols import Addition, Change, HistoryRewritten, Source, Target
from reshard.pipeline.publishing import history as publication
from reshard.pipeline.publishing.commit import Published, commit_on_head
from reshard.pipeline.tensors import StoredFile


def rollback(target: Target, commit: str) -> Published:
    """Restore every path that ``commit`` changed to what it was before; ``found`` where that was done earlier.

    Raises NothingToRollBack where ``commit`` is not ours, or its past is gone, and ChangedSince
    where one of the paths was changed since.
    """
    token = uuid4().hex
    tries: list[Change | str] = []

    def attempt(head: str) -> Change | str:
        tries.append(_undo(target, commit, head, token))
        return tries[-1]

    try:
        done = commit_on_head(target, commit, attempt)
        return replace(done, found=isinstance(tries[0], str))  # a later try may find ours, whose answer was lost
    except TargetGone as error:
        raise NothingToRollBack(commit=f"{target.place} at {commit}", why=error.facts["what"]) from error
    finally:
        target.discard(token)


def _undo(target: Target, commit: str, head: str, token: str) -> Change | str:
    """What brings the paths back on top of ``head``, or the commit of ours that did so already."""
    said = f"{target.place} at {commit}" if target.branch else str(target.place)
    try:
        since = list(target.history(head, commit))
    except HistoryRewritten:
        raise NothingToRollBack(commit=said, why="it is not in the history") from None
    for later in since:
        if publication.undoes(later) == commit:
            return later.id
    ours, *before = list(islice(target.history(commit, None), 2))
    published = publication.read(ours)
    if published is None:
        raise NothingToRollBack(commit=said, why="reshard did not make it")
    past = _past(target, before[0].id) if before else None
    if past is None:
        cure = "a folder keeps only files that reshard did not write, and only until the next run"
        why, kept = "no earlier version was kept", {"cure": cure} if target.place.local else {}
        raise NothingToRollBack(commit=said, why=why, **kept)
    present, now = target.at(commit), target.at(head)
    touched = {*past.files(), *present.files()} - {*published.kept}
    changed = [path for path in touched if differ(past.files().get(path), present.files().get(path))]
    if theirs := sorted(path for path in changed if differ(present.files().get(path), now.files().get(path))):
        raise ChangedSince(commit=commit, target=str(target.place), paths=first(theirs))
    restored = [past.files()[path] for path in sorted(changed) if path in past.files()]
    added = [_restored(past, file) for file in restored] if target.branch else target.carry(restored, past, token)
    deletes = tuple(path for path in sorted(changed) if path not in past.files())
    return Change(f"Roll back {commit[:12]}", publication.undo_message(commit), tuple(added), deletes)


def _past(target: Target, commit: str) -> Source | None:
    try:
        return target.at(commit)
    except TargetConflict:  # a folder keeps its last state at most
        return None


def _restored(past: Source, file: StoredFile) -> Addition:
    """A stored object is still in the store, as the past names it; a small file is sent again."""
    if file.sha256 is not None:
        return Addition(file.path, stored=file)
    return Addition(file.path, content=read_file(past, file, REGULAR_MAX))
