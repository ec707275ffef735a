"""What the store knows of a job's copy, for the unit that a lease is of."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from reshard.pipeline.copying.loop import Attested
from reshard.pipeline.driving import Exhausted
from reshard.pipeline.errors import ReshardError
from reshard.pipeline.planning.model import Receipt, Shard
from reshard.worker.keeper import LeaseKeeper
from reshard.worker.queue.leases import Leases


class QueueLedger:
    """The ledger of ``keeper``'s unit; while the broker is unavailable, it waits."""

    def __init__(self, leases: Leases, keeper: LeaseKeeper) -> None:
        self._leases, self._keeper, self._lease = leases, keeper, keeper.lease

    def held(self, shards: Iterable[Shard]) -> dict[str, Receipt]:
        digests = [shard.digest for shard in shards]
        return self._keeper.patiently(lambda: self._leases.receipts(self._lease.job, digests))

    def groups(self) -> list[Attested]:
        handed_in = self._keeper.patiently(lambda: self._leases.attested(self._lease.job))
        return [Attested.from_json(*group) for group in handed_in]

    def spoil(self, unit: int | None, error: ReshardError, shards: Collection[Shard], groups: Sequence[int]) -> None:
        """Raises Stopped where the unit is another's by now."""
        assert unit == (self._lease.group if self._lease.kind == "group" else None), "of the unit that is leased"
        data = error.to_dict()
        if self._keeper.finish(lambda: self._leases.invalidate(self._lease, data, shards, groups)) == "often":
            raise Exhausted(error)
