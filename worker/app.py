"""The Celery app: it carries one kind of message, ``wake(job)``, and every setting has its reason."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
import warnings
from dataclasses import replace
from multiprocessing import current_process
from typing import Any

import redis
from celery import Celery, bootsteps, signals
from celery.apps import worker as worker_program
from celery.exceptions import SecurityWarning
from celery.utils.nodenames import default_nodename, host_format
from celery.worker.state import active_requests
from kombu.entity import Queue
from kombu.exceptions import OperationalError

from reshard.pipeline.errors import BadSetting, TempDirUnusable
from reshard.pipeline.limits import MEMORY_FLOOR_XET
from reshard.pipeline.stores import heap
from reshard.pipeline.stores.connect import ConnectSettings
from reshard.pipeline.text import guard_logs
from reshard.worker import health, logs, tracing, transport
from reshard.worker.broker import broker_url
from reshard.worker.fleet import drain
from reshard.worker.fleet.fleet import Fleet
from reshard.worker.fleet.heartbeat import announce, this_process, withdraw
from reshard.worker.fleet.self_check import SelfCheck
from reshard.worker.fleet.usage import measured
from reshard.worker.queue.jobs import HEALTH_CHECK, JobStore, open_redis
from reshard.worker.queue.scripts import PREFIX
from reshard.worker.queue.wakes import QUEUES, WAKE
from reshard.worker.settings import HEARTBEAT, PRESUMED_DEAD, settings
from reshard.worker.temp_dir import ProcessTempDir

if os.getpid() == 1:  # until Celery handles it; what came while that was loaded waits since local.py
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

log = logging.getLogger(__name__)

guard_logs()

IDLE_LOOK, IDLE_LOOKS = 1.0, 3  # seconds between two looks, and how many in a row find nothing
DRAIN_LOOK = 1.0  # seconds between two looks whether an operator has this worker drained
CLASSES = {queue.removeprefix(PREFIX): queue for queue in QUEUES}  # of jobs, as `-Q` may name their queues
CHILDREN_LOOK = 0.5  # seconds between two looks for children that died
HEARTBEAT_TIMEOUT = 2.0  # seconds; it is sent from the event loop, which must not stand still for long

SOCKET_TIMEOUT = 30  # seconds; longer than kombu's blocking read

transport.use()
tracing.check()  # and load, once for all children


def _memory_limit() -> int:
    """RESHARD_MEMORY_LIMIT in bytes; of one that cannot be read, a worker says so, and control needs none."""
    try:
        return ConnectSettings().memory_limit
    except BadSetting:
        return MEMORY_FLOOR_XET


app = Celery("reshard", broker=broker_url(settings()), include=["reshard.worker.steps"])
app.conf.update(
    # The message counts as taken until the work is done, and is sent again when the child that did it dies. Both only
    # save time: what a job still needs is known by the store, and how often it may be tried is counted there.
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    # The job in Redis is the truth; a result backend would be a second one.
    task_ignore_result=True,
    task_serializer="json",
    accept_content=["json"],
    # No time limits: a 50 GB file at 10 MB/s takes 5,000 s. A copy may take for ever as long as bytes come.
    task_time_limit=None,
    # A worker takes no more than it works on, so an idle one always finds what there is.
    worker_prefetch_multiplier=1,
    task_queues=[Queue(name, alias=alias, routing_key=name) for alias, name in CLASSES.items()],
    task_default_queue=QUEUES[0],
    task_create_missing_queues=False,
    broker_transport_options={
        # Acknowledge in the worker's memory. Kombu's record of unacknowledged messages is for those that must not be
        # lost; a wake may be, since control sends it again. And with the record, a broker that goes away just when a
        # task ends stops its worker for good: kombu logs the acknowledgement that fails, counts the message as
        # unfinished for ever, and at a prefetch of one never reads again.
        "ack_emulation": False,
        "queue_order_strategy": "priority",  # strictly in the order of QUEUES: interactive first
        "socket_keepalive": True,
        "socket_timeout": SOCKET_TIMEOUT,
        "health_check_interval": HEALTH_CHECK,
        "global_keyprefix": "",
    },
    # Copies go on while the broker is unavailable. The opposite loses them (they are revoked, not returned).
    worker_cancel_long_running_tasks_on_connection_loss=False,
    broker_connection_retry_on_startup=True,
    # A broker whose memory is full refuses a worker that comes back to it, which is no reason to end.
    broker_channel_error_retry=True,
    broker_connection_max_retries=None,  # a worker waits for its broker; the default gives up after 100 tries
    # Leases are handed back by us (drain.py), in Celery's warm shutdown; prefork is what a kill can be survived in.
    worker_pool="prefork",
    worker_concurrency=settings().concurrency,
    # A child is replaced once it was larger than a copy may be: against slow leaks, and after a plan of very many
    # tensors. The next one has its reload child (inheritance.py).
    worker_max_memory_per_child=_memory_limit() // 1024,  # KiB, of its largest
    # Else anybody who reaches the broker could end all workers by one message; `reshard fleet` is the way to stop them.
    worker_enable_remote_control=False,
    # For Flower and exporters: what a worker does (``_show`` of steps.py). That a wake was sent says nothing of a job.
    worker_send_task_events=True,
    task_send_sent_event=False,
)


def send(queue: str, job: str) -> None:
    """Send a wake; one that cannot be sent is made good by the control process, which is why nothing is retried."""
    try:
        app.send_task(WAKE, (job,), queue=queue, retry=False)
    except (OperationalError, redis.RedisError) as error:
        log.warning(
            "cannot wake a worker for job %s; the control process will do it: %s", job, error, extra={"job": job}
        )


class Worker(worker_program.Worker):  # type: ignore[misc]  # Celery has no types
    """What `celery -A reshard.worker.app worker` runs, and `reshard worker` with it."""

    def __init__(self, app: Celery | None = None, hostname: str | None = None, **options: Any) -> None:
        named = {*(options.get("queues") or ()), *(options.get("exclude_queues") or ())}
        if unknown := sorted(named - {*QUEUES, *CLASSES}):
            raise SystemExit(f"error: no queue is called {', '.join(unknown)}; there are {' and '.join(CLASSES)}")
        try:
            ConnectSettings()
        except BadSetting as error:  # which every job would end with
            raise SystemExit(f"error: {error}") from None
        if hostname in {None, default_nodename(None)}:  # which two workers of one machine would share
            hostname = host_format(f"{os.getpid()}@%h")
        # What workers would tell each other is asked by remote control, or is in Redis.
        super().__init__(app, hostname, **options | {"without_gossip": True, "without_mingle": True})


app.Worker = app.subclass_with_self(Worker)


def consumed() -> tuple[str, ...]:
    """The queues that this worker takes wakes from."""
    return tuple(app.amqp.queues.consume_from)


class BootStep(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
    """What a worker's main process does beside its work, by ``_timer``."""

    requires: tuple[object, ...] = ("celery.worker.components:Timer",)

    def stop(self, worker: Any) -> None:
        self._timer.cancel()

    def terminate(self, worker: Any) -> None:
        self.stop(worker)


def _store() -> JobStore:
    return JobStore(open_redis(broker_url(settings()), timeout=HEARTBEAT_TIMEOUT))


class Drained(BootStep):
    """Whether an operator has this worker drained (fleet.py), or it rests by itself (self_check.py).

    Then it consumes nothing and its children hand back.
    """

    def start(self, worker: Any) -> None:
        self._name = f"{socket.gethostname()}:{os.getpid()}"
        self._fleet = Fleet(_store())
        self._self_check = SelfCheck(self._fleet, self._name)
        self._queues = consumed()
        self._outage = logs.Outage(log)
        self._idle = False
        self._begun = False
        self._look(worker)  # before anybody is told that it is there
        self._timer = worker.timer.call_repeatedly(DRAIN_LOOK, self._look, (worker,))

    def stop(self, worker: Any) -> None:
        super().stop(worker)
        self._self_check.stop()

    def _look(self, worker: Any) -> None:
        try:
            if not self._begun:
                self._fleet.begin(self._name)  # whatever was said, it was said of another process with our pid
                self._fleet.awake(self._name)
                self._begun = True
            rests = self._self_check.rests()
            drained = self._fleet.drained(self._name)
            idle = drained or rests
            consumer = getattr(worker, "consumer", None)
            if idle == self._idle or consumer is None or consumer.task_consumer is None:
                self._outage.over()
                return
            drain.from_afar(idle)
            for name in self._queues:
                (consumer.cancel_task_queue if idle else consumer.add_task_queue)(name)
        except (redis.RedisError, OperationalError) as error:
            self._outage.say("cannot check whether this worker is drained; the broker is unavailable", error)
            return
        self._outage.over()
        self._idle = idle
        log.warning("this worker %s", "is drained" if drained else "paused itself" if rests else "accepts work again")


class Heartbeat(BootStep):
    """The sign of life of a worker's main process, from the timer of its event loop."""

    requires = ("celery.worker.components:Timer", Drained)

    def start(self, worker: Any) -> None:
        queues = [name.removeprefix(PREFIX) for name in consumed()]
        self._process = this_process("worker", worker.concurrency, queues)
        self._client = _store().redis
        self._outage = logs.Outage(log)
        self._told = float("-inf")
        if (port := settings().health_port) is not None:
            health.serve(port, settings().metrics_address, healthy=lambda: "", ready=self._unready)
        self._tell()  # who reads of it may ask it at once
        self._timer = worker.timer.call_repeatedly(HEARTBEAT, self._tell)

    def stop(self, worker: Any) -> None:
        super().stop(worker)
        withdraw(self._client, self._process)

    def _tell(self) -> None:
        try:
            announce(self._client, replace(measured(self._process, settings().tmpdir), draining=drain.wanted()))
            self._told = time.monotonic()
            self._outage.over()
        except redis.RedisError as error:
            self._outage.say("cannot send a heartbeat", error)

    def _unready(self) -> str:
        if time.monotonic() - self._told > PRESUMED_DEAD:
            return "the broker is not responding, or refuses writes"
        return "it accepts no work: it is drained, paused itself or is shutting down" if drain.wanted() else ""


class UntilIdle(BootStep):
    """Ends a worker that is to end when nothing is left for it, as SIGTERM would: of `reshard worker --until-idle`."""

    def include_if(self, worker: Any) -> bool:
        return settings().until_idle

    def start(self, worker: Any) -> None:
        self._store = _store()
        self._queues = consumed()
        self._outage = logs.Outage(log)
        self._idle = 0
        self._timer = worker.timer.call_repeatedly(IDLE_LOOK, self._look)

    def _look(self) -> None:
        try:
            # A job of which a child has a unit may be set aside, once another child asked for more of it in vain.
            busy = active_requests or self._store.left(self._queues)
            self._idle = 0 if busy else self._idle + 1
            self._outage.over()
        except redis.RedisError as error:
            self._outage.say("cannot check for remaining work; the broker is unavailable", error)
            return
        if self._idle == IDLE_LOOKS:
            log.info("no work left; shutting down")
            os.kill(os.getpid(), signal.SIGTERM)


class Children(BootStep):
    """Replaces children that died, and puts their wakes back, without waiting for Celery's own look every 5 seconds.

    Celery also looks when a child's pipe closes, but that is a moment before the child can be reaped, so it often finds
    nothing then.
    """

    requires = ("celery.worker.components:Timer", "celery.worker.components:Pool")

    def start(self, worker: Any) -> None:
        self._timer = worker.timer.call_repeatedly(CHILDREN_LOOK, worker.pool.maintain_pool)


app.steps["worker"].update({Drained, Heartbeat, UntilIdle, Children})
signals.worker_shutting_down.connect(drain.in_main)


def _begin(**_: Any) -> None:
    warnings.simplefilter("ignore", SecurityWarning)  # of a worker that runs as root, about messages that are not JSON
    logs.configure(settings().log_format)
    heap.for_copies()
    app.log.redirect_stdouts("WARNING")  # what libraries print
    tmpdir = settings().tmpdir
    try:  # or each of its units would fail for that
        ProcessTempDir.make(tmpdir).close()
    except TempDirUnusable as error:
        log.critical("error[%s]: %s; %s", error.code, error, error.next_step, extra=error.logged)
        sys.exit(error.exit_code)
    # Where multiprocessing makes files that have no name a moment later. A folder of its own it would remove at the
    # end, with a traceback where a cleaner of temporary folders was there before.
    current_process()._config["tempdir"] = str(tmpdir)  # type: ignore[attr-defined]


def _say_ready(**_: Any) -> None:
    signal.signal(signal.SIGINT, signal.getsignal(signal.SIGTERM))  # Celery's own for Ctrl-C ends with 1
    log.info("worker ready")


signals.celeryd_init.connect(_begin)  # before Celery logs or prints anything
signals.worker_ready.connect(_say_ready)
signals.worker_process_shutdown.connect(tracing.end)
signals.setup_logging.connect(lambda **_: None, weak=False)  # else Celery replaces what _begin set up
worker_program.safe_say = lambda *_: None  # it prints; drain.py logs
