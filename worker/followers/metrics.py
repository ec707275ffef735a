"""Figures for Prometheus, read from Redis at each scrape; nothing is kept here, so any control gives the same.

A scrape counts and never lists: its cost grows with schedules and catalogs, not with jobs or entries. Totals count
since the broker began, whatever became of the jobs.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast
from wsgiref.simple_server import WSGIServer

import redis
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from reshard.worker.fleet.fleet import RESTING
from reshard.worker.followers import catalogs, notices, schedules
from reshard.worker.followers.counters import TOTALS
from reshard.worker.followers.notices import HOOKS
from reshard.worker.queue.jobs import Process, open_redis
from reshard.worker.queue.scripts import PREFIX, texts
from reshard.worker.queue.states import JobState
from reshard.worker.queue.wakes import QUEUES
from reshard.worker.settings import PRESUMED_DEAD

log = logging.getLogger(__name__)

TIMEOUT = 3.0  # seconds for one answer of the broker; Prometheus gives a scrape ten


class Metrics(Collector):
    """Reads all figures; when the broker does not answer, only that is said."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client

    def collect(self) -> Iterator[Metric]:
        try:
            found = [*self._jobs(), *self._processes(), *self._schedules(), *self._catalogs(), *self._broker()]
        except redis.RedisError as error:
            log.warning("the broker did not answer a scrape: %s", error)
            found = []
        yield _gauge("reshard_broker_up", "Whether the broker answered this scrape.", float(bool(found)))
        yield from found

    def _jobs(self) -> Iterator[Metric]:
        with self._redis.pipeline(transaction=False) as pipeline:
            for state in JobState:
                pipeline.zcard(f"{PREFIX}jobs:{state}")
            for queue in QUEUES:
                pipeline.llen(queue)
            pipeline.hgetall(TOTALS)
            *numbers, kept = pipeline.execute()
        states, queues = numbers[: len(JobState)], numbers[len(JobState) :]
        totals = {name.decode(): float(value) for name, value in kept.items()}
        yield _gauges("reshard_jobs", "Jobs that are remembered.", "state", zip(JobState, states, strict=True))
        waiting = zip((queue.removeprefix(PREFIX) for queue in QUEUES), queues, strict=True)
        yield _gauges("reshard_queue_length", "Wakes that no worker has taken yet.", "queue", waiting)
        for what, said in (
            ("read", "Bytes of sources that sealed shards were read from."),
            ("uploaded", "Bytes sent to the stores of targets."),
            ("deduplicated", "Bytes that these stores had already."),
        ):
            yield CounterMetricFamily(f"reshard_{what}_bytes", said, totals.get(what, 0.0))
        ended = {state: totals.get(f"ended:{state}", 0.0) for state in JobState if state.ended}
        yield _counters("reshard_jobs_ended", "Jobs that ended, each time that they did.", "state", ended.items())
        yield _counters("reshard_job_failures", "Jobs that failed.", "code", _under("failed", totals))
        yield _counters(
            "reshard_step_retries", "Steps that failed and are tried again.", "code", _under("retried", totals)
        )
        left = notices.waiting(self._redis).items()
        yield _gauges("reshard_notices_waiting", "Notices that are still to be told.", "hook", left)
        told = CounterMetricFamily(
            "reshard_notices", "Notices by what became of them; failed counts tries.", labels=["hook", "result"]
        )
        for hook in HOOKS:
            for result in ("told", "failed", "dropped"):
                told.add_metric([hook, result], totals.get(f"notices:{hook}:{result}", 0.0))
        yield told

    def _processes(self) -> Iterator[Metric]:
        names = texts(self._redis.smembers(f"{PREFIX}processes"))
        with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.time()
            for name in names:
                pipeline.get(f"{PREFIX}process:{name}")
                pipeline.pttl(f"{PREFIX}process:{name}")
            pipeline.hkeys(RESTING)
            (seconds, _), *answers, resting = pipeline.execute()
        alive = {name for name, data in zip(names, answers[::2], strict=True) if data is not None}
        count, seen = {"worker": 0, "control": 0}, dict[str, float]()
        for data, left in zip(answers[::2], answers[1::2], strict=True):
            if data is not None:
                kind = Process(**json.loads(data)).kind
                count[kind] += 1
                seen[kind] = max(seen.get(kind, 0.0), seconds - PRESUMED_DEAD + left / 1000)
        yield _gauges("reshard_processes", "Processes that gave a sign of life.", "kind", count.items())
        faulty = len(alive.intersection(texts(resting)))
        yield _gauge("reshard_workers_resting", "Workers that rest because of a fault of their machine.", faulty)
        said = "The newest sign of life, of any process of this kind."
        yield _gauges("reshard_heartbeat_timestamp_seconds", said, "kind", seen.items())

    def _schedules(self) -> Iterator[Metric]:
        names = sorted(texts(self._redis.hkeys(schedules.ALL)))
        with self._redis.pipeline(transaction=False) as pipeline:
            for part in (schedules.SUCCESS, schedules.TROUBLE, schedules.UNMET):
                pipeline.hgetall(part)
            pipeline.zrange(schedules.DUE, 0, -1, withscores=True)
            for name in names:
                pipeline.lindex(schedules.runs_key(name), 0)
            success, trouble, unmet, due, *runs = pipeline.execute()
        looked = {name: json.loads(run)["at"] for name, run in zip(names, runs, strict=True) if run is not None}
        for what, said, moments in (
            ("last_success", "When what it fired last ended well.", _decoded(success)),
            ("last_run", "When its last time was looked at, whatever came of it.", looked),
            ("next", "When it is due next; none while it is paused.", _decoded(dict(due))),
            ("unmet", "The first of its times since its last success; none when there is none.", _decoded(unmet)),
            ("trouble", "When it last failed or was missed; none after a success.", _decoded(trouble)),
        ):
            yield _moments(f"reshard_schedule_{what}_timestamp_seconds", said, "schedule", moments)

    def _catalogs(self) -> Iterator[Metric]:
        names = sorted(texts(self._redis.smembers(f"{PREFIX}catalogs")))
        with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.hgetall(catalogs.SUCCESS)
            pipeline.hgetall(catalogs.TROUBLE)
            for name in names:
                pipeline.hgetall(f"{PREFIX}catalog:{name}:counts")
                pipeline.hlen(f"{PREFIX}catalog:{name}:active")
                pipeline.zcard(f"{PREFIX}catalog:{name}:todo")
            success, trouble, *answers = pipeline.execute()
        entries = GaugeMetricFamily(
            "reshard_catalog_entries", "Models of its last run, by how they ended.", labels=["catalog", "outcome"]
        )
        failures = GaugeMetricFamily(
            "reshard_catalog_failures", "Models of its last run that failed.", labels=["catalog", "code"]
        )
        for i, name in enumerate(names):
            counts, active, todo = answers[3 * i : 3 * i + 3]
            totals = {key.decode(): float(value) for key, value in counts.items()} | {"active": active, "todo": todo}
            for outcome in ("published", "same", "unchanged", "failed", "cancelled", "active", "todo"):
                entries.add_metric([name, outcome], totals.get(outcome, 0.0))
            for code, number in _under("failed", totals):
                failures.add_metric([name, code], number)
        yield from (entries, failures)
        said = "When a run of it last ended with nothing failed."
        yield _moments("reshard_catalog_last_success_timestamp_seconds", said, "catalog", _decoded(success))
        said = "When a run of it last ended otherwise; none after a success."
        yield _moments("reshard_catalog_trouble_timestamp_seconds", said, "catalog", _decoded(trouble))

    def _broker(self) -> Iterator[Metric]:
        memory = cast("Mapping[str, Any]", self._redis.info("memory"))
        yield _gauge("reshard_broker_memory_bytes", "Memory that the broker uses.", memory["used_memory"])
        yield _gauge("reshard_broker_memory_limit_bytes", "What it may use; 0: no limit.", memory["maxmemory"])


def serve(client: redis.Redis, port: int, address: str) -> WSGIServer:
    """Answer scrapes in a thread of its own; port 0 takes a free one. Raises OSError when the port is taken."""
    registry = CollectorRegistry()
    registry.register(Metrics(client))
    server, _ = start_http_server(port, address, registry)
    return server


def expose(url: str, port: int, address: str) -> None:
    """Serve what the broker at ``url`` knows; where the port is taken, control goes on without."""
    try:
        serve(open_redis(url, TIMEOUT), port, address)
        log.info("metrics on http://%s:%s/metrics", address, port)
    except OSError as error:
        log.warning("cannot serve metrics on %s:%s: %s", address, port, error.strerror)


def _gauge(name: str, said: str, value: float) -> Metric:
    return GaugeMetricFamily(name, said, value)


def _gauges(
    name: str, said: str, label: str, rows: Iterable[tuple[str, float]], family: type[Metric] = GaugeMetricFamily
) -> Metric:
    made = family(name, said, labels=[label])  # type: ignore[call-arg]
    for value, number in rows:
        made.add_metric([value], number)  # type: ignore[attr-defined]
    return made


def _counters(name: str, said: str, label: str, rows: Iterable[tuple[str, float]]) -> Metric:
    return _gauges(name, said, label, rows, CounterMetricFamily)


def _moments(name: str, said: str, label: str, moments: Mapping[str, float]) -> Metric:
    """``moments`` in milliseconds since the epoch, as they are kept."""
    return _gauges(name, said, label, ((key, value / 1000) for key, value in sorted(moments.items())))


def _under(prefix: str, totals: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted((key.partition(":")[2], value) for key, value in totals.items() if key.startswith(f"{prefix}:"))


def _decoded(fields: Mapping[bytes, Any]) -> dict[str, float]:
    return {key.decode(): float(value) for key, value in fields.items()}
