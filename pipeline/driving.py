"""Copying and publishing by a ledger, which knows what was copied: a file for `run`, the queue's store for a worker.

What turns out to be damaged or lost on the way is forgotten in the ledger, and copied again. So often as that may
happen to one unit, ``COPIES``, is the same for both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from reshard.pipeline.check import Check
from reshard.pipeline.copying.loop import Attested, Moved, copy
from reshard.pipeline.copying.stream import Tick
from reshard.pipeline.errors import DigestsDiffer, ObjectLost, ReceiptWrong, ReshardError, SourceCorrupt
from reshard.pipeline.planning.model import Group, Plan, Receipt, Shard
from reshard.pipeline.protocols import Sink, Source, Target
from reshard.pipeline.publishing.commit import Published, check_receipts, publish, spoiled
from reshard.pipeline.publishing.signing import Signer
from reshard.pipeline.stores.scratch import ScratchSpace


class Exhausted(Exception):
    """The same was tried often enough; ``error`` is how it ended the last time."""

    def __init__(self, error: ReshardError) -> None:
        super().__init__(str(error))
        self.error = error


class Made(NamedTuple):
    """A commit, what the files that it was made of attested, and the check of that."""

    published: Published
    attested: list[Attested]
    check: Check


class Ledger(Protocol):
    """What was copied of one plan."""

    def held(self, shards: Iterable[Shard]) -> Mapping[str, Receipt]:
        """The receipts of those that are copied, by the shards' digests."""

    def groups(self) -> list[Attested]:
        """What the groups that are copied whole attested."""

    def spoil(self, unit: int | None, error: ReshardError, shards: Collection[Shard], groups: Sequence[int]) -> None:
        """Forget the receipts of ``shards`` and have ``groups`` copied again.

        ``unit`` is what met the ``error``: a group, or None for the commit. Raises Exhausted the ``COPIES``-th time,
        when groups may be left as they are.
        """


def copy_group(
    plan: Plan,
    group: Group,
    shards: Mapping[int, Shard],
    source: Source,
    sink: Sink,
    ledger: Ledger,
    stored: Callable[[list[Receipt], Moved], None],
    tick: Tick,
    disk: ScratchSpace,
    should_yield: Callable[[], bool] = lambda: False,
) -> Attested:
    """``copy`` of what the ledger does not hold of ``group``, whose ``shards`` are given by number.

    Raises SourceCorrupt, once what was copied of the group is forgotten, DigestsDiffer, and Exhausted.
    """
    own = [shards[number] for number in group.shards]
    try:
        return copy(plan, group, shards, source, sink, ledger.held(own), stored, tick, disk, should_yield)
    except (SourceCorrupt, DigestsDiffer) as error:
        # What passed on to the store before a file was known to be bad is as bad as the rest; of digests that differ
        # each shard has its own.
        ledger.spoil(group.number, error, own if isinstance(error, SourceCorrupt) else (), ())
        raise


def publish_copied(
    plan: Plan,
    source: Source,
    target: Target,
    token: str,
    ledger: Ledger,
    begin: Callable[[], None],
    signer: Signer | None = None,
) -> Made | None:
    """``publish`` of all that was copied; None where some must be copied again first.

    Raises ObjectLost and ReceiptWrong where no group has what is lost, SourceCorrupt, and Exhausted.
    """
    receipts, attested = ledger.held(plan.shards), ledger.groups()
    try:
        published = publish(plan, receipts, attested, source, target, token, begin, signer)
    except SourceCorrupt as error:  # of a file that is carried
        ledger.spoil(None, error, (), ())
        raise
    except (ObjectLost, ReceiptWrong) as error:
        void = spoiled(error, receipts)
        lost = [shard for shard in plan.shards if shard.digest in void]
        if not (groups := groups_of(plan, void)):
            raise
        ledger.spoil(None, error, lost, groups)
        return None
    return Made(published, attested, check_receipts(plan, receipts, attested))


def made_of(published: Published, plan: Plan, ledger: Ledger) -> Made:
    """What stands already, with what the ledger holds; raises ReceiptWrong."""
    attested = ledger.groups()
    return Made(published, attested, check_receipts(plan, ledger.held(plan.shards), attested))


def groups_of(plan: Plan, digests: Collection[str]) -> list[int]:
    """The groups that hold shards of these digests."""
    return [group.number for group in plan.groups if any(plan.shards[n].digest in digests for n in group.shards)]
