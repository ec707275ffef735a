"""The scheduler beside the workers: it sends wakes, fires schedules, admits the jobs of catalogs, sends again what got
lost, and deletes old jobs.

Two may run: each step that takes what is due is atomic in Redis, and the rest does no harm when done twice.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from types import FrameType

import redis

from reshard.pipeline.copying.loop import Stopped
from reshard.pipeline.errors import BrokerUnavailable, QueueError
from reshard.pipeline.stores.connect import Context
from reshard.worker import logs, tracing
from reshard.worker.broker import broker_url
from reshard.worker.fleet.heartbeat import announce, silent, this_process, withdraw
from reshard.worker.fleet.policy import endpoints
from reshard.worker.fleet.rate_limit import rate_limiters
from reshard.worker.fleet.usage import measured
from reshard.worker.followers.contained import Contained
from reshard.worker.followers.counters import Counters
from reshard.worker.followers.cursor import Cursor
from reshard.worker.followers.expander import Expander, Rows, expanded
from reshard.worker.followers.notices import Notifier, hooks
from reshard.worker.followers.outcomes import Outcomes
from reshard.worker.followers.pushes import Pushes
from reshard.worker.followers.records import Definition
from reshard.worker.followers.schedules import Schedules
from reshard.worker.followers.spending import Spending
from reshard.worker.followers.submissions import Submissions
from reshard.worker.local import check_installed
from reshard.worker.queue.events import Follower, Reader, follow, relay
from reshard.worker.queue.jobs import JobStore, broker_errors, open_redis
from reshard.worker.queue.leases import Leases
from reshard.worker.queue.listing import ended
from reshard.worker.queue.scripts import PREFIX, full
from reshard.worker.queue.states import ENDED
from reshard.worker.settings import HEARTBEAT, Settings

log = logging.getLogger("reshard.worker.control")  # also where it is run as __main__

LISTEN = 0.25  # seconds to wait for the bell; what is due because time has passed is seen this late at most
JANITOR = 600.0  # seconds between two searches for jobs that are too old
JANITOR_BATCH = 1000  # jobs that are removed at once, so that the wakes never wait for long
RECONCILE = 60.0  # seconds between two checks of all jobs, for what the stream or the queue has lost
BATCHES = 10  # of events that a follower handles in one pass, so that the wakes never wait for long
PAUSE = 1.0  # seconds before the broker is tried again
STUCK = 300.0  # seconds of one turn of the loop; its calls of a broker that hangs end after a fraction of that
SCRAPE_TIMEOUT = 3.0  # seconds for one answer of the broker; Prometheus gives a scrape ten
BELL = "the bell"
LAYOUT_KEY = f"{PREFIX}layout"  # a string, for a newer release whose data this one would misread; this one writes none
LAYOUT = 2  # the one that is read here


class Control:
    """The loop; ``stop`` ends it from a signal."""

    def __init__(self, store: JobStore, leases: Leases, settings: Settings) -> None:
        self._store = store
        self._leases = leases
        self._schedules = Schedules(store)
        self._catalogs = Cursor(store)
        self._pushes = Pushes(store)
        self._submissions = Submissions(store)
        followers: tuple[Follower, ...] = (
            self._catalogs,
            self._pushes,
            Outcomes(),
            Counters(store),
            Spending(store.redis),
        )
        self._followers = [(f, Reader(store.redis, f.group)) for f in followers]
        self._expander = Expander(self._catalogs, self._expand)
        self._notifier = Notifier(store, hooks(settings, store.redis))
        self._settings = settings
        self._keep = settings.keep_days * 86400
        self._ending = threading.Event()
        self._self = this_process("control", concurrency=0, queues=[])
        self._contained = Contained("the control process's work on")
        self._outage = logs.Outage(log)
        self._readable = False
        self._sent = 0
        self._turned = time.monotonic()
        self._announced = self._cleaned = self._reconciled = float("-inf")

    def stop(self, *_: int | FrameType | None) -> None:
        self._ending.set()

    def stuck(self) -> str:
        """That the loop stands still, if so; a broker that is away does not stop it."""
        still = time.monotonic() - self._turned
        return f"its loop has been stuck for {still:.0f} s" if still > STUCK else ""

    def run(self) -> None:
        """Until ``stop``; waits for a broker that is away, or full, or whatever else it says."""
        self._notifier.start(self._ending)
        while not self._ending.is_set():
            self._turned = time.monotonic()
            try:
                self.look(LISTEN)
                self._outage.over()
            except (redis.RedisError, QueueError) as error:
                self._outage.say("the broker is unavailable or denied access", error)
                self._ending.wait(PAUSE)
            except Exception:
                log.exception("a turn failed for an unknown reason; trying again")
                self._ending.wait(PAUSE)
        with suppress(redis.RedisError):  # which the next line says
            for _, reader in self._followers:
                reader.leave()
        withdraw(self._store.redis, self._self)

    def look(self, listen: float) -> int:
        """Wait up to ``listen`` seconds for the bell, then do all that is due; returns how many wakes were sent."""
        if not self._readable and (layout := int(self._store.redis.get(LAYOUT_KEY) or LAYOUT)) > LAYOUT:
            cure = "install the newer release here"
            why = f"the broker has data layout {layout}, but this release reads only up to {LAYOUT}"
            raise QueueError(what=f"{why}; {cure}")
        self._readable = True
        self._sent, heard = 0, False
        for name, work in self._turn(listen):
            with self._contained(name):
                work()
                heard = heard or name == BELL
        if not heard:
            self._ending.wait(listen)
        return self._sent

    def _turn(self, listen: float) -> Iterator[tuple[str, Callable[[], object]]]:
        """The work of one turn, by name; clients may write what breaks some of it, and the rest is done."""
        if time.monotonic() - self._announced >= HEARTBEAT:
            yield "signs of life", self._announce
        yield "keys of the queue", self._mend
        yield BELL, lambda: self._leases.hear(listen)
        yield "what clients told", lambda: relay(self._store.redis)
        yield "submissions", self._submissions.take
        for follower, reader in self._followers:
            yield f"events for {follower.group}", partial(follow, follower, reader, BATCHES)
        if time.monotonic() - self._reconciled >= RECONCILE:
            self._reconciled = time.monotonic()
            yield "catalogs", self._catalogs.reconcile
            yield "pushes", self._pushes.reconcile
            yield "strays", self._leases.ring_strays
            yield "silent processes", lambda: silent(self._store.redis)
            yield "dead processes", self._store.processes  # a scrape looks at each that it finds, and forgets none
        yield "schedules", self._schedules.fire_due
        yield "expanding", self._look_expand
        yield "wakes", self._send
        if time.monotonic() - self._cleaned >= JANITOR:
            yield "old jobs", self._tidy

    def _announce(self) -> None:
        announce(self._store.redis, measured(self._self, self._settings.tmpdir))
        self._leases.share(self._settings.shares)
        self._notifier.listen()
        self._announced = time.monotonic()

    def _look_expand(self) -> None:
        self._expander.look([] if self._leases.fleet.closed() else self._catalogs.expanding())

    def _mend(self) -> None:
        if self._leases.mend():
            self._reconciled = float("-inf")

    def _send(self) -> None:
        self._sent = self._leases.due()

    def _tidy(self) -> None:
        if self.clean() < JANITOR_BATCH:
            self._cleaned = time.monotonic()

    def _expand(self, definition: Definition) -> tuple[Rows, list[int]]:
        context = Context.from_env(rate_limiters(self._store.redis, self._check, self._check, bulk=True))
        hubs = endpoints(self._settings, context.credentials)
        with closing(context):
            return expanded(definition, replace(context, endpoints=hubs), self._catalogs)

    def _check(self) -> None:
        if self._ending.is_set():
            raise Stopped("drain")
        self._expander.check()

    def clean(self) -> int:
        """Delete jobs that ended too long ago, JANITOR_BATCH at most; returns how many."""
        return len(self._store.delete(ended(self._store.redis, ENDED, self._keep, JANITOR_BATCH)))


def main(settings: Settings) -> None:
    """The process `reshard control`; waits for a broker that is away.

    Raises ExtraMissing, BrokerUnsupported and, of a hook that cannot be, BadSetting.
    """
    check_installed()
    # Here and not above: they need the packages that were just looked for.
    from reshard.worker.app import send
    from reshard.worker.followers.metrics import registry
    from reshard.worker.health import serve

    logs.configure(settings.log_format)
    url = broker_url(settings)
    store = JobStore(open_redis(url), url)
    with suppress(BrokerUnavailable), broker_errors(url):
        store.check_server()
    control = Control(store, Leases(store, send, "control", settings.lease), settings)
    signal.signal(signal.SIGTERM, control.stop)
    signal.signal(signal.SIGINT, control.stop)
    if settings.metrics_port is not None:
        client = open_redis(url, SCRAPE_TIMEOUT)
        where = settings.metrics_port, settings.metrics_address
        serve(*where, healthy=control.stuck, ready=partial(_unreachable, client), metrics=registry(client))
    log.info("control ready")
    control.run()
    tracing.end()


def _unreachable(client: redis.Redis) -> str:
    try:
        why = full(client)
        return f"the broker refuses writes: {why}" if why else ""
    except redis.RedisError as error:
        return f"the broker is not responding: {error}"


if __name__ == "__main__":
    from reshard.worker.settings import settings

    main(settings())
