"""Figures for Prometheus, read from Redis at each scrape; nothing is kept here, so any control gives the same.

A scrape counts and never lists: its cost grows with schedules and catalogs, not with jobs or entries. Totals count
since the broker began, whatever became of the jobs.
"""

from __future__ import annotations

import json
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, product
from typing import Any, cast

import redis
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from reshard.worker.fleet import rate_limit
from reshard.worker.fleet.fleet import FLEET, RESTING
from reshard.worker.followers import catalogs, notices, schedules
from reshard.worker.followers.counters import BUCKETS, MOVED, moved_key
from reshard.worker.followers.notices import HOOKS
from reshard.worker.queue.events import TOTALS, is_unfit
from reshard.worker.queue.jobs import JobStore, Process
from reshard.worker.queue.pace import lanes
from reshard.worker.queue.scripts import PREFIX, full, known_fields, texts
from reshard.worker.queue.states import JobState
from reshard.worker.settings import PRESUMED_DEAD

log = logging.getLogger(__name__)


class Metrics(Collector):
    """Reads all figures; when the broker does not answer, that is the only one."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client

    def collect(self) -> Iterator[Metric]:
        found, answers = list[Metric](), True
        for part in (self._jobs, self._processes, self._schedules, self._catalogs, self._hubs, self._broker):
            try:
                found += part()
            except redis.RedisError as error:
                if not is_unfit(error):
                    log.warning("the broker did not answer a scrape: %s", error)
                    found, answers = [], False
                    break
                log.warning("a scrape lacks some metrics: a client overwrote one of their keys: %s", error)
        yield _gauges("broker_up", "Whether the broker answered this scrape.", "", [(float(answers),)])
        yield from found

    def _jobs(self) -> Iterator[Metric]:
        kept = cast("Mapping[bytes, bytes]", self._redis.hgetall(TOTALS))
        store, totals = JobStore(self._redis), defaultdict(float, _numbers(kept))
        yield _gauges("jobs", "Jobs in the queue's records, by state.", "state", store.counts().items())
        yield _gauges("queue_length", "Wake messages not yet received by a worker.", "queue", store.waiting().items())
        for what, about in (
            ("read", "Source bytes read for stored shards."),
            ("uploaded", "Bytes uploaded to target stores."),
            ("deduplicated", "Bytes that target stores already had."),
        ):
            yield _counters(f"{what}_bytes", about, "", [(totals[what],)])
        ended = [(state, totals[f"ended:{state}"]) for state in JobState if state.ended]
        yield _counters("jobs_ended", "Jobs ended, counted at each end.", "state", ended)
        yield _counters("job_failures", "Failed jobs.", "code", _under("failed", totals))
        yield _counters("step_retries", "Failed tasks that are retried.", "code", _under("retried", totals))
        dropped = _under("dropped", totals)
        yield _counters("events_dropped", "Events that a follower could not read.", "follower", dropped)
        for what, label, about in (
            ("queued", "", "Time from the submission or retry of a job to its first claim."),
            ("step", "step", "Time from the last claim of a task to its end."),
            ("job", "state", "Time from the first claim of a job to its end."),
        ):
            yield _histogram(f"{what}_seconds", about, label, _under(f"times:{what}", totals))
        waiting = lanes(self._redis).items()
        units, oldest = ([(queue, lane[part]) for queue, lane in waiting] for part in (0, 1))
        yield _gauges("claimable_units", "Waiting tasks that a worker can claim now.", "queue", units)
        yield _gauges("oldest_wait_seconds", "Age of the oldest waiting task.", "queue", oldest)
        left = notices.waiting(self._redis).items()
        yield _gauges("notices_waiting", "Undelivered notifications.", "hook", left)
        results = product(HOOKS, ("told", "failed", "dropped"))
        rows = [(hook, result, totals[f"notices:{hook}:{result}"]) for hook, result in results]
        yield _counters("notices", "Notifications by result; failed counts attempts.", "hook result", rows)

    def _processes(self) -> Iterator[Metric]:
        names = texts(self._redis.smembers(f"{PREFIX}processes"))
        with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.time()
            for name in names:
                pipeline.get(f"{PREFIX}process:{name}")
                pipeline.pttl(f"{PREFIX}process:{name}")
                pipeline.hgetall(moved_key(name))
            pipeline.hkeys(RESTING)
            pipeline.hget(FLEET, "paused")
            (seconds, _), *answers, resting, paused = pipeline.execute()
        told = zip(answers[::3], answers[1::3], answers[2::3], strict=True)
        found = [(known_fields(Process, data), left, _numbers(moved)) for data, left, moved in told if data]
        alive = [process for process, _, _ in found]
        running, newest = Counter(worker=0, control=0), defaultdict[str, float](float)
        for process, left, _ in found:
            running[process.kind] += 1
            newest[process.kind] = max(newest[process.kind], seconds - PRESUMED_DEAD + left / 1000)
        yield _gauges("processes", "Live processes.", "kind", running.items())
        built = Counter((process.kind, process.version) for process in alive)
        releases = [(kind, version, number) for (kind, version), number in built.items()]
        yield _gauges("build_info", "Live processes by release.", "kind version", releases)
        memory = [(process.kind, process.name, process.memory) for process in alive if process.memory is not None]
        yield _gauges("process_memory_bytes", "Resident memory of a process and its children.", "kind process", memory)
        files = [(process.kind, process.name, process.temporary) for process in alive if process.temporary is not None]
        yield _gauges("process_temporary_bytes", "Disk space used by temporary files.", "kind process", files)
        by = [(process.name, what, moved[what]) for process, _, moved in found for what in MOVED if what in moved]
        yield _counters("worker_bytes", "Bytes read, uploaded and deduplicated by a process.", "process moved", by)
        faulty = len({process.name for process in alive}.intersection(texts(resting)))
        yield _gauges("workers_resting", "Workers that paused themselves after errors.", "", [(faulty,)])
        about = "When the fleet was paused; absent while it is not."
        since = [(float(paused) / 1000,)] if paused else []
        yield _gauges("fleet_paused_timestamp_seconds", about, "", since)
        about = "Last heartbeat of any process of this kind."
        yield _gauges("heartbeat_timestamp_seconds", about, "kind", newest.items())

    def _schedules(self) -> Iterator[Metric]:
        names = sorted(texts(self._redis.hkeys(schedules.ALL)))
        with self._redis.pipeline(transaction=False) as pipeline:
            for part in (schedules.SUCCESS, schedules.TROUBLE, schedules.UNMET):
                pipeline.hgetall(part)
            pipeline.zrange(schedules.DUE, 0, -1, withscores=True)
            for name in names:
                pipeline.lindex(schedules.runs_key(name), 0)
            success, trouble, unmet, due, *runs = pipeline.execute()
        fired = {name: json.loads(run)["at"] for name, run in zip(names, runs, strict=True) if run is not None}
        for what, about, moments in (
            ("last_success", "Last time that a run of it succeeded.", _numbers(success)),
            ("last_run", "Last time that it was due and handled, whatever the result.", fired),
            ("next", "Next due time; absent while it is paused.", _numbers(dict(due))),
            ("unmet", "First due time since its last success; absent if there was none.", _numbers(unmet)),
            ("trouble", "Last failed or missed run; absent after a success.", _numbers(trouble)),
        ):
            yield _moments(f"schedule_{what}_timestamp_seconds", about, "schedule", moments)

    def _catalogs(self) -> Iterator[Metric]:
        names = sorted(texts(self._redis.smembers(catalogs.ALL)))
        with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.hgetall(catalogs.SUCCESS)
            pipeline.hgetall(catalogs.TROUBLE)
            for name in names:
                pipeline.hgetall(catalogs.key(name, "counts"))
                pipeline.hlen(catalogs.key(name, "active"))
                pipeline.zcard(catalogs.key(name, "todo"))
            success, trouble, *answers = pipeline.execute()
        entries, failures = [], []
        for name, counts, active, todo in zip(names, answers[::3], answers[1::3], answers[2::3], strict=True):
            totals = _numbers(counts) | {"active": active, "todo": todo}
            outcomes = ("published", "same", "unchanged", "failed", "cancelled", "active", "todo")
            entries += [(name, outcome, totals.get(outcome, 0.0)) for outcome in outcomes]
            failures += [(name, code, number) for code, number in _under("failed", totals)]
        yield _gauges("catalog_entries", "Models of the last run, by outcome.", "catalog outcome", entries)
        yield _gauges("catalog_failures", "Failed models of the last run, by error code.", "catalog code", failures)
        about = "Last run that ended without failures."
        yield _moments("catalog_last_success_timestamp_seconds", about, "catalog", _numbers(success))
        about = "Last run that ended with failures; absent after a success."
        yield _moments("catalog_trouble_timestamp_seconds", about, "catalog", _numbers(trouble))

    def _hubs(self) -> Iterator[Metric]:
        budgets = rate_limit.budgets(self._redis).items()
        left, quotas = ([(*of, figures[part]) for of, figures in budgets] for part in (0, 1))
        yield _gauges("hub_calls_left", "Hub calls left in the current window.", "endpoint kind", left)
        yield _gauges("hub_calls_limit", "Hub calls allowed in a window.", "endpoint kind", quotas)
        refused = rate_limit.refusals(self._redis).items()
        yield _counters("hub_refused_calls", "Hub calls answered with 429.", "endpoint", refused)

    def _broker(self) -> Iterator[Metric]:
        yield _gauges("broker_writable", "Whether the broker takes writes.", "", [(float(not full(self._redis)),)])
        memory = cast("Mapping[str, Any]", self._redis.info("memory"))
        yield _gauges("broker_memory_bytes", "Memory used by the broker.", "", [(memory["used_memory"],)])
        yield _gauges("broker_memory_limit_bytes", "Its memory limit; 0 means none.", "", [(memory["maxmemory"],)])


def registry(client: redis.Redis) -> CollectorRegistry:
    made = CollectorRegistry()
    made.register(Metrics(client))
    return made


Family = type[GaugeMetricFamily] | type[CounterMetricFamily]


def _family(kind: Family, name: str, about: str, labels: str, rows: Iterable[Sequence[Any]]) -> Metric:
    """Rows of the values of ``labels``, which blanks separate, and the figure."""
    made = kind(f"reshard_{name}", about, labels=labels.split())
    for *values, figure in rows:
        made.add_metric(values, figure)
    return made


_gauges, _counters = partial(_family, GaugeMetricFamily), partial(_family, CounterMetricFamily)


def _histogram(name: str, about: str, label: str, rows: Iterable[tuple[str, float]]) -> Metric:
    """Rows as counters.py has them: ``WHAT:BUCKET`` or ``WHAT:sum``, and the figure."""
    counts = defaultdict[str, dict[str, float]](dict)
    for key, figure in rows:
        what, _, bucket = key.rpartition(":")
        counts[what][bucket] = figure
    made = HistogramMetricFamily(f"reshard_{name}", about, labels=label.split())
    for what, found in counts.items():
        upper = [*map(str, BUCKETS), "inf"]
        buckets = zip([*upper[:-1], "+Inf"], accumulate(found.get(most, 0.0) for most in upper), strict=True)
        made.add_metric([what] if label else [], [*buckets], found.get("sum", 0.0) / 1000)
    return made


def _moments(name: str, about: str, label: str, moments: Mapping[str, float]) -> Metric:
    """``moments`` in milliseconds since the epoch, as they are kept."""
    return _gauges(name, about, label, [(key, value / 1000) for key, value in sorted(moments.items())])


def _under(prefix: str, totals: Mapping[str, float]) -> list[tuple[str, float]]:
    prefix += ":"
    return sorted((key.removeprefix(prefix), value) for key, value in totals.items() if key.startswith(prefix))


def _numbers(fields: Mapping[bytes, Any]) -> dict[str, float]:
    """Those that are numbers: clients may write anything there."""
    found = {}
    for key, value in fields.items():
        with suppress(ValueError):
            found[key.decode()] = float(value)
    return found
