"""Keeps one lease while its work makes progress, and tells the work when to stop.

A thread renews the lease each second and carries the progress along. It stops renewing when no byte came for too long,
so a copy that hangs loses its lease although its thread is well. While the broker is unavailable the work goes on, and
what was stored is kept here until it is back.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from reshard.pipeline.copying.loop import Attested, Moved, Reason, Stopped
from reshard.pipeline.driving import Exhausted
from reshard.pipeline.errors import ReshardError
from reshard.pipeline.planning.model import Receipt, Shard
from reshard.worker import logs, tracing
from reshard.worker.fleet import drain
from reshard.worker.fleet.bandwidth import BandwidthLimiter
from reshard.worker.queue.leases import NOTHING, Lease, Leases
from reshard.worker.queue.scripts import BROKER_UNAVAILABLE
from reshard.worker.settings import RENEWALS, STEP_STALL, Settings

log = logging.getLogger(__name__)

INTERRUPT = signal.SIGUSR2  # SIGUSR1 is the pool's
LOOK = 0.2  # seconds between two looks at the drain flag; it is one byte of shared memory
RENEWALS_OF_A_LEASE = 4  # at least so many are due in the time of one, however short an operator makes it
RETRY_FIRST, RETRY_MAX = 0.5, 5.0  # seconds between two tries to reach the broker

YIELDING_STEPS = frozenset({"plan", "check", "group"})  # what may be begun again; what publishes is better ended

R = TypeVar("R")

_REASONS: dict[str, Reason] = {"lost": "lease", "cancelled": "cancel"}


class LeaseKeeper:
    """Inside ``with``, the lease is renewed; ``tick``, ``stored`` and ``begin`` are what the pipeline is given.

    It is also the pipeline's ledger, of what the store knows of the job's copy; while the broker is away, that waits.
    """

    def __init__(self, leases: Leases, lease: Lease, settings: Settings) -> None:
        self.lease = lease
        self._leases = leases
        self._settings = settings
        self._renewals = min(RENEWALS, settings.lease / RENEWALS_OF_A_LEASE)
        self._stall = settings.stall if lease.kind == "group" else STEP_STALL
        self.begun = False  # in this claim
        self._stop: Reason | None = None
        self._yield = False
        self._at_boundary = True
        self._bytes = 0  # since the last seal
        self._read = self._noted = 0  # bytes since the claim, and how many of them the fleet knows of
        self._waits = self._told = ""  # why it waits for the Hub, and what of that the store knows
        self._throttle = BandwidthLimiter(leases.fleet.bandwidth, leases.fleet.take, self.check)
        self._moved = time.monotonic()
        self._interruptible = False  # in code that may be interrupted, and not told yet
        self._unsaved: list[Receipt] = []
        self.counted = self.saved = Moved()  # in this claim, and what of it the store knows
        self._untold: list[str] = []  # lines of the log
        self._outage = logs.Outage(log)
        self._saving = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="reshard-keeper", daemon=True)

    def __enter__(self) -> LeaseKeeper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        tracing.note(bytes=self._read)
        try:
            self._note()
        except BROKER_UNAVAILABLE as error:
            log.warning("%s: its last bytes are not counted; the broker is unavailable: %s", self.lease.unit, error)

    # ------------------------------------------------------------------------------------- what the work calls

    def tick(self, count: int) -> None:
        """``count`` bytes came; waits where they came too fast, and raises Stopped when the work shall end."""
        self._bytes += count
        self._read += count
        self._yield_at_boundary()
        self._at_boundary = False
        self.check()
        self._throttle.spend(count)

    def should_yield(self) -> bool:
        """Whether the copy should seal what it has, because somebody else's turn has come."""
        return self._yield

    def check(self) -> None:
        """A sign of life other than bytes, such as a wait that the Hub asked for; raises Stopped."""
        self.alive()
        if self.lease.kind in YIELDING_STEPS:
            self._yield_at_boundary()
        if (reason := self._reason()) is not None:
            self._interruptible = False
            raise Stopped(reason)

    def _yield_at_boundary(self) -> None:
        if self._at_boundary and self._yield:
            self._interruptible = False
            raise Stopped("yield")

    def alive(self) -> None:
        """The same from a thread that cannot be stopped, such as one that sends; never raises."""
        self._moved = time.monotonic()

    def waits(self, why: str) -> None:
        """Why the work waits for the Hub, for those who watch; "" when it does no more."""
        self._waits = why

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Inside, Stopped is raised even where no tick comes, as in a read that waits for a slow line.

        A signal to ourselves ends the wait: Python runs its handler in the main thread, whatever blocks there.
        Outside, and once the work has heard it from a tick, nothing is interrupted: neither a commit nor a clean-up.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signal.signal(INTERRUPT, self._interrupted)  # and never the default again: one sent too late would kill us
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self._interruptible:
            self._interruptible = False
            raise Stopped(self._reason() or "stall")

    def _reason(self) -> Reason | None:
        """Why the work shall stop, if it shall."""
        if self._stop is None and self.lease.kind == "group" and drain.wanted():
            return "drain"
        return self._stop

    def stored(self, receipts: Sequence[Receipt], moved: Moved = NOTHING) -> None:
        """Keep receipts, and what moved for them, in the store, or here while it is away.

        Raises Stopped when they are not ours to write.
        """
        with self._saving:
            self._unsaved += receipts
            self.counted = self.counted.plus(moved)
            self._bytes = 0
        self._moved = time.monotonic()
        self._at_boundary = True
        try:
            self._save()
        except BROKER_UNAVAILABLE as error:
            log.warning("%s: keeping its receipts here; the broker is unavailable: %s", self.lease.unit, error)

    def begin(self) -> None:
        """The point of no return; raises Stopped when it must not be passed."""
        self._heed(self.patiently(lambda: self._leases.begin(self.lease)))
        self.begun = True

    def finish(self, step: Callable[[], str]) -> str:
        """Hand in what was done, behind all that was stored and logged, waiting for the broker if need be.

        From here on nothing is interrupted. Raises Stopped when the unit is not ours any more.
        """
        self._interruptible = False
        self.patiently(self._save)

        def hand_in() -> str:
            self._tell()
            return step()

        return self._heed(self.patiently(hand_in))

    def patiently(self, step: Callable[[], R]) -> R:
        """``step``, tried again while the broker is unavailable; what it raises after that patience is over."""
        deadline = time.monotonic() + self._settings.broker_patience
        pause, outage = RETRY_FIRST, logs.Outage(log)
        while True:
            try:
                result = step()
                outage.over()
                return result
            except BROKER_UNAVAILABLE as error:
                if time.monotonic() + pause > deadline or drain.overdue(self._settings.drain):
                    raise
                outage.say(f"{self.lease.unit} is waiting for the broker", error)
            time.sleep(pause)
            pause = min(2 * pause, RETRY_MAX)

    # ---------------------------------------------------------------------------------------------- the ledger

    def held(self, shards: Iterable[Shard]) -> dict[str, Receipt]:
        digests = [shard.digest for shard in shards]
        return self.patiently(lambda: self._leases.receipts(self.lease.job, digests))

    def groups(self) -> list[Attested]:
        return [Attested.from_json(*group) for group in self.patiently(lambda: self._leases.attested(self.lease.job))]

    def spoil(self, unit: int | None, error: ReshardError, shards: Collection[Shard], groups: Sequence[int]) -> None:
        """Raises Stopped where the unit is another's by now."""
        assert unit == (self.lease.group if self.lease.kind == "group" else None), "of the unit that is leased"
        data = error.to_dict()
        if self.finish(lambda: self._leases.invalidate(self.lease, data, shards, groups)) == "often":
            raise Exhausted(error)

    # ---------------------------------------------------------------------------------------------- the thread

    def _keep(self) -> None:
        renewed = time.monotonic()
        while not self._ended.wait(LOOK):
            if drain.overdue(self._settings.drain):
                self._hand_over()
            if self._waits != self._told or time.monotonic() - renewed >= self._renewals:
                try:
                    self._renew()
                except Exception:  # without this thread the work would hear nothing more, and go on for nobody
                    log.exception("cannot renew %s of %s for an unknown reason", self.lease.unit, self.lease.job)
                if self._interruptible and self._reason() is not None:
                    signal.pthread_kill(threading.main_thread().ident or 0, INTERRUPT)
                renewed = time.monotonic()

    def _renew(self) -> None:
        progress = time.monotonic() - self._moved < self._stall
        self._told = self._waits  # or on its way: where the broker is away, the next renewal tells it
        try:
            self._save()
            self._note()
            answer = self._heed(self._leases.renew(self.lease, self._bytes, progress, self._told))
            self._yield |= answer == "yield"
            self._tell()
            self._outage.over()
        except BROKER_UNAVAILABLE as error:
            unit, job = self.lease.unit, self.lease.job
            self._outage.say(f"cannot renew {unit} of {job}; the broker is unavailable", error)
        except Stopped as stopped:
            self._stop = stopped.reason

    def _note(self) -> None:
        if read := self._read - self._noted:
            self._leases.fleet.note(read, self.lease.bulk)
            self._noted += read

    def _save(self) -> None:
        with self._saving:
            if self._unsaved or self.saved != self.counted:
                self._heed(self._leases.seal(self.lease, self._unsaved, self.counted))
                self._unsaved, self.saved = [], self.counted

    def _tell(self) -> None:
        """Hand on what was logged; where the unit is another's by now, it is kept in this worker's own log alone."""
        with self._saving:
            self._untold = [*self._untold, *logs.taken()][-logs.LINES :]
            if self._untold:
                self._leases.log(self.lease, self._untold)
                self._untold = []

    def _hand_over(self) -> None:
        """The time to end is over, and the work did not heed it: give the unit back and end this process."""
        log.warning("handing back %s of %s unfinished", self.lease.unit, self.lease.job)
        try:
            self._leases.release(self.lease, "drain")
        except BROKER_UNAVAILABLE as error:
            log.warning("cannot hand it back; its lease will expire: %s", error)
        finally:
            os._exit(drain.HANDED_OVER)

    @staticmethod
    def _heed(answer: str) -> str:
        if (reason := _REASONS.get(answer)) is not None:
            raise Stopped(reason)
        return answer
