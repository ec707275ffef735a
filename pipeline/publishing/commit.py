"""The one commit: everything or nothing, once, and found again when its answer was lost.

The order matters. The head is read first and its history is searched for our own digest; only then do we commit with it
as the parent. The store refuses our commit where another came between, and an equal one that was faster is found.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from reshard.pipeline.check import Check, failed, first
from reshard.pipeline.copying.hashing import COPY, COPY_LEVEL, Compared
from reshard.pipeline.copying.loop import Attested
from reshard.pipeline.errors import (
    ChangeOverwritten,
    HubUnreachable,
    ObjectLost,
    ReceiptWrong,
    ReshardError,
    TargetChanged,
    TargetConflict,
    TargetRaced,
)
from reshard.pipeline.limits import BACKOFF_FIRST, COMMIT_RACES
from reshard.pipeline.planning.existing import differ, missing
from reshard.pipeline.planning.model import CARD, MANIFEST, TENSORS, Plan, Receipt, Shard, index_bytes
from reshard.pipeline.protocols import Addition, AnswerLost, Change, HeadMoved, HistoryRewritten, Source, Target
from reshard.pipeline.publishing import history as publication
from reshard.pipeline.publishing.card import card_for
from reshard.pipeline.publishing.manifest import manifest_of, sha256_of
from reshard.pipeline.publishing.manifest import render as render_manifest
from reshard.pipeline.publishing.provenance import signatures, tensors_of
from reshard.pipeline.publishing.signing import Signer
from reshard.pipeline.tensors import StoredFile, is_content_of


@dataclass(frozen=True, slots=True)
class Published:
    """Where the result is. ``found`` is true when the commit was there already, ours or an equal one."""

    commit: str
    ref: str
    found: bool


def same_content(addition: Addition, there: StoredFile | None) -> bool:
    """Whether the file that ``addition`` would add is there already."""
    if there is None:
        return False
    if addition.content is not None:
        return is_content_of(there, [addition.content])
    stored = addition.stored
    return stored is not None and stored.size == there.size and stored.sha256 == there.sha256


def weights(shards: Sequence[Shard], receipts: Mapping[str, Receipt]) -> list[StoredFile]:
    """The stored shards under their paths in the target."""
    found = [(shard.path, receipts[shard.digest]) for shard in shards]
    return [StoredFile(path, r.size, sha256=r.sha256, xet=r.xet) for path, r in found]


def check_receipts(plan: Plan, receipts: Mapping[str, Receipt], attested: Sequence[Attested]) -> Check:
    """That every shard has a receipt for just its tensors, and that second readings gave the same digests.

    Raises ReceiptWrong.
    """
    readings = [reading for group in attested for reading in group.witnesses]
    figures = {
        "tensors": sum(len(shard.entries) for shard in plan.shards),
        "bytes": sum(entry.size for shard in plan.shards for entry in shard.entries),
        "attested": len({(reading.shard, reading.name) for reading in readings}),
        **Compared.total(group.records for group in attested).figures(),
    }

    def wrong(file: str, why: str, void: Sequence[str]) -> ReceiptWrong:
        checks = failed(COPY, COPY_LEVEL, figures, [f"{file}: {why}"])
        return ReceiptWrong(void, file=file, why=why, checks=checks)

    for shard in plan.shards:
        receipt = receipts.get(shard.digest)
        if receipt is None:
            raise wrong(shard.path, "it was not copied", [shard.digest])
        if receipt.size != shard.size or receipt.tensors.keys() != {entry.name for entry in shard.entries}:
            raise wrong(shard.path, "the copy does not match the plan", [shard.digest])
    for reading in readings:
        shard = plan.shards[reading.shard]
        if receipts[shard.digest].read(reading.name, reading.number) != reading.digest:
            why = f"the copied bytes of {reading.name} differ from the file with the verified hash"
            raise wrong(shard.path, why, [shard.digest])
    seen = {path for group in attested for path in group.files}
    for path in (plan.files[number].path for group in plan.groups for number in group.attests):
        if path not in seen:
            raise wrong(path, "it was not read completely", [])
    return Check(COPY, "passed", COPY_LEVEL, "", figures)


def spoiled(error: ObjectLost | ReceiptWrong, receipts: Mapping[str, Receipt]) -> Set[str]:
    """The digests of the shards of ``receipts`` that ``error``, of ``publish``, says must be copied again."""
    if isinstance(error, ReceiptWrong):
        return error.void
    return {digest for digest, receipt in receipts.items() if receipt.sha256 in error.lost}


def publish(
    plan: Plan,
    receipts: Mapping[str, Receipt],
    attested: Sequence[Attested],
    source: Source,
    target: Target,
    token: str,
    begin: Callable[[], None],
    signer: Signer | None = None,
) -> Published:
    """Publish what was copied in one commit, or find that it is there; with a ``signer``, signed by it.

    ``begin`` is called before the first thing that cannot be undone, and may raise Stopped. Raises ReceiptWrong and
    ObjectLost when something must be copied again, TargetConflict when the target is no longer what we planned for.
    """
    check_receipts(plan, receipts, attested)
    stored = weights(plan.shards, receipts)
    if lost := target.holds(stored):
        if not plan.options.pr and (standing := _published_by_another(plan, stored, target, begin)):
            return standing
        raise ObjectLost([file.sha256 for file in lost], repo=str(target.place), what=lost[0].path)
    levels = {path: level for group in attested for path, level in group.files.items()}
    manifest = manifest_of(plan, receipts, levels)
    described = render_manifest(manifest) if manifest else b""  # once: of 500,000 tensors it has 40 MB
    title = publication.title(plan)
    root, sha256 = (manifest.root, sha256_of(described)) if manifest else (None, None)
    hashed = plan.options.tensor_hashes and bool(plan.shards)
    try:
        already = target.at(plan.base).files() if plan.base else {}
    except TargetConflict:  # what another run replaced is gone from a folder, and that run may be this one's equal
        if (standing := _published_by_another(plan, stored, target, begin)) is None:
            raise
        return standing
    made = [
        *(Addition(o.index.path, content=index_bytes(o.index, plan.shards, root)) for o in plan.outputs if o.index),
        *([Addition(MANIFEST, content=described)] if manifest else []),
        *([Addition(TENSORS, content=signer.sign(tensors_of(plan, receipts, levels)))] if signer and hashed else []),
        *(Addition(path, content=text.encode()) for path, text in plan.edits),
    ]
    additions = [Addition(file.path, stored=file) for file in stored]
    additions += target.carry(missing(plan.carried, already), source, token, made)
    # What the target has already and has to keep, for the result to be whole.
    counted_on = {*plan.reused, *(file.path for file in plan.carried)} - {a.path for a in additions} - {CARD}
    begin()
    goal = target.request(plan.digest, title, publication.message(plan, root, sha256))

    def attempt(head: str) -> Change | str:
        if (found := find(plan, goal, head)) is not None:
            return found
        state = goal.at(head)
        there = state.files()
        if head != plan.base:
            _refuse_conflict(plan, goal, counted_on, there)
        card = card_for(plan, source, goal, head, lambda: next(publication.publications(goal, head, None), None))
        if card.content is not None:
            cards = [Addition(CARD, content=card.content)]
        else:
            cards = goal.carry([card.file], source, token) if card.file and card.of_source else []
        everything = (*additions, *cards)
        news = tuple(a for a in everything if not same_content(a, there.get(a.path)))
        if plan.options.force and head == plan.base:  # on any other head it may be ours, whose answer was lost
            news = everything
        if signer:
            news = (*news, *signatures(plan, everything, levels, source, goal, state, signer))
        deletes = tuple(path for path in plan.deletes if path in there)
        if not news and not deletes:
            return head  # also where a Hub's history does not keep the messages that we look for
        if head != plan.base:
            _refuse_conflict(plan, goal, {a.path for a in news if a.path != CARD} | {*plan.deletes}, there)
        added = there.keys() - already.keys() - {a.path for a in (*everything, *news)}
        return Change(title, publication.message(plan, root, sha256, added), news, deletes, takes=plan.takes)

    return commit_on_head(goal, plan.digest, attempt)


def _published_by_another(
    plan: Plan, stored: Sequence[StoredFile], target: Target, begin: Callable[[], None]
) -> Published | None:
    """Our commit, made by another run, which took the objects with it; raises TargetConflict where it made another."""
    head = target.head()
    if (found := find(plan, target, head)) is not None:
        begin()  # a job hands in nothing that it has not begun
        target.show()
        return Published(found, target.branch, found=True)
    if head != plan.base:
        paths = {file.path for file in stored} | {*plan.deletes}
        _refuse_conflict(plan, target, paths, target.at(head).files())
    return None


def commit_on_head(target: Target, what: str, attempt: Callable[[str], Change | str]) -> Published:
    """Commit what ``attempt`` makes of the head that it is given, on that very head, until one of them holds.

    ``attempt`` returns a commit instead when there is nothing to do any more, as after an answer that was lost.
    Raises TargetRaced or HubUnreachable after COMMIT_RACES attempts, and ChangeOverwritten. After an answer that names
    no commit nothing is sent again: raises HubRefused unless the head shows that the commit stands.
    """
    pause, raced, refused = BACKOFF_FIRST, False, None
    lost: str | None = None  # the head that a commit without an answer was put on
    for _ in range(COMMIT_RACES):
        with _read_after(lost is not None, target):
            head = target.head()
        with _read_after(lost is not None, target, (TargetConflict, ChangeOverwritten)):
            change = attempt(head)
            if isinstance(change, str):
                if lost is not None:
                    _refuse_overwritten(target, change, lost)
                target.show()
                return Published(change, target.branch, found=True)
        if refused is not None:
            raise refused
        try:
            commit = target.commit(change, head)
        except (HeadMoved, AnswerLost) as error:
            raced = isinstance(error, HeadMoved)
            lost = lost if raced else head
            refused = error.refused if isinstance(error, AnswerLost) else None
            with _read_after(lost is not None, target):
                moved = raced and target.head() != head
            if not moved:  # the store was busy
                time.sleep(pause * random.uniform(0.5, 1.0))
                pause *= 2
            continue
        with _read_after(True, target, (ChangeOverwritten,)):
            _refuse_overwritten(target, commit, head)
        target.show()
        return Published(commit, target.branch, found=False)
    if raced:
        raise TargetRaced(target=str(target.place), races=COMMIT_RACES)
    failed = f"no response to {COMMIT_RACES} attempts to commit {what[:12]}"
    raise HubUnreachable(endpoint=str(target.place), what=failed)


@contextmanager
def _read_after(sent: bool, target: Target, findings: tuple[type[ReshardError], ...] = ()) -> Iterator[None]:
    """Once a commit was ``sent``, a target that cannot be read says nothing of it: raises HubUnreachable then.

    ``findings`` are errors that say what was read.
    """
    try:
        yield
    except ReshardError as error:
        if not sent or error.retryable or isinstance(error, findings):
            raise
        raise HubUnreachable(endpoint=str(target.place), what=f"a commit may have been made, but {error}") from error


def _refuse_overwritten(target: Target, commit: str, since: str, spared: Set[str] = frozenset()) -> None:
    """Raises ChangeOverwritten where ``commit``, ours, replaced what others had changed after ``since``.

    Only a Hub that ignores the parent that a commit names lets that happen. A folder is locked while it is swapped.
    """
    if not target.branch:
        return
    parent = next(islice(target.history(commit, None), 1, None), None)
    if parent is None or parent.id == since:
        return
    before, then, after = (target.at(one).files() for one in (since, parent.id, commit))
    theirs = {path for path in before.keys() | then.keys() if differ(before.get(path), then.get(path))}
    if lost := sorted(path for path in theirs - spared if differ(then.get(path), after.get(path))):
        raise ChangeOverwritten(target=str(target.place), commit=commit, parent=parent.id, paths=first(lost))


def find(plan: Plan, target: Target, at: str) -> str | None:
    """The commit of ours since the plan's base that carries its digest.

    Raises TargetConflict on a new history, and ChangeOverwritten; a card may have been edited before our commit.
    """
    if at == plan.base:
        return None
    try:
        commits = (ours.commit for ours in publication.publications(target, at, plan.base) if ours.plan == plan.digest)
        commit = next(commits, None)
    except HistoryRewritten:
        if not target.branch:  # it keeps no state of others to compare with
            raise TargetChanged(target=str(target.place)) from None
        raise TargetConflict(target=str(target.place), what="its history was rewritten") from None
    if commit is not None:
        _refuse_overwritten(target, commit, plan.base, spared={CARD})
    return commit


def _refuse_conflict(plan: Plan, target: Target, paths: Set[str], there: Mapping[str, StoredFile]) -> None:
    """Others may commit beside us as long as they leave ``paths`` alone: what we write, delete, or count on."""
    before = target.at(plan.base).files() if paths else {}
    for path in sorted(paths):
        if differ(before.get(path), there.get(path)):
            raise TargetConflict(target=str(target.place), what=f"{path} was changed")
