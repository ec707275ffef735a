"""The queue as `doctor` sees it: the broker and what it would lose, who works on it, and whose clock is whose."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from typing import cast

import redis

from reshard.pipeline.doctor.probes import Probe
from reshard.pipeline.errors import BrokerFull, NoBroker, NoticeFailed, QueueError
from reshard.pipeline.limits import CLOCK_SKEW_MAX
from reshard.pipeline.text import counted
from reshard.worker.broker import broker_url
from reshard.worker.fleet.fleet import Fleet
from reshard.worker.fleet.heartbeat import silent
from reshard.worker.followers.notices import Notice, hooks
from reshard.worker.queue.jobs import JobStore, without_password
from reshard.worker.queue.scripts import full
from reshard.worker.queue.wakes import strays
from reshard.worker.settings import Settings


def queue(settings: Settings) -> Iterator[Probe]:
    """The broker, and the processes that gave it a sign of life."""
    try:
        url = broker_url(settings)
    except NoBroker as none:
        yield Probe("broker", "none", f"{none.facts['why']}; start one with `reshard up` (`reshard run` needs none)")
        return
    try:
        with JobStore.at(url) as store:
            store.check_server()
            if why := full(store.redis):
                raise BrokerFull(url=without_password(url), why=why)
            yield durability(store.redis, without_password(url))
            yield _clock(store.redis)
            yield from _strays(store.redis)
            yield from _processes(store)
    except QueueError as error:
        yield Probe("broker", without_password(url), error=error)


def notices(settings: Settings) -> Iterator[Probe]:
    """Each hook that is set, tried with a notice that says that it is a test."""
    tried = hooks(settings)
    if not tried:
        lost = "no notifications are sent: set RESHARD_NOTIFY_COMMAND, RESHARD_NOTIFY_URL or RESHARD_NOTIFY_APPRISE"
        yield Probe("notices", "no hook is set", lost)
    for hook in tried:
        try:
            hook.tell(Notice.test())
            yield Probe(f"notify {hook.name}", "test notification sent")
        except NoticeFailed as error:
            error.facts["cure"] = f"check RESHARD_NOTIFY_{hook.name.upper()}, and what it leads to"
            yield Probe(f"notify {hook.name}", "test notification failed", error=error)


def durability(client: redis.Redis, url: str) -> Probe:
    """What a crash of the broker's machine loses, as it tells.

    CONFIG also shows passwords, so not every user may ask it; INFO says all but how often the log is synced.
    """
    server = client.info()
    name = f"{server.get('server_name', 'redis')} {server.get('valkey_version') or server.get('redis_version')}"
    about = f"{url}, {name}"
    kept, policy = "yes" if server.get("aof_enabled") else "no", server.get("maxmemory_policy", "")
    config = {"appendonly": kept, "maxmemory-policy": policy, "appendfsync": ""}
    with suppress(redis.ResponseError):
        config |= cast("dict[str, str]", client.config_get("appendfsync"))
    warnings = []
    if config["appendonly"] != "yes":
        warnings.append("no data is saved between snapshots: a crash loses jobs (set appendonly yes)")
    elif not config["appendfsync"]:
        warnings.append("this user cannot read appendfsync: ask the operator whether a crash loses a second")
    elif config["appendfsync"] != "always":
        warnings.append(
            "a crash loses up to a second: recent submissions, and receipts of shards, which are copied again"
            " (set appendfsync always)"
        )
    if policy not in {"", "noeviction"}:
        warnings.append(f"when memory is full, it evicts keys of running jobs ({policy})")
    return Probe("broker", about, "; ".join(warnings), facts=config)


def _clock(client: redis.Redis) -> Probe:
    seconds, micros = client.time()
    skew = time.time() - (seconds + micros / 1e6)
    late = f"the clocks of this machine and the broker differ by {skew:.0f} s" if abs(skew) > CLOCK_SKEW_MAX else ""
    return Probe("clock", f"{abs(skew):.1f} s from the broker's clock", late, facts={"skew": skew})


def _strays(client: redis.Redis) -> Iterator[Probe]:
    try:
        found = strays(client)
    except redis.ResponseError as error:
        if "WRONGTYPE" not in str(error):
            raise
        yield Probe("queue", "a client overwrote a key", "jobs are waiting: `reshard control` removes that key")
        return
    if found:
        lost = "jobs are waiting: `reshard control` queues them again, and logs any it cannot read"
        yield Probe("queue", f"{counted(len(found), 'job')} in no queue, such as {found[0]}", lost)


def _processes(store: JobStore) -> Iterator[Probe]:
    ours, fleet = version("reshard"), Fleet(store)
    processes, lost = store.processes(), silent(store.redis)
    drained, resting = fleet.all_drained(), fleet.resting()
    workers = [process.name for process in processes if process.kind == "worker"]
    if paused := fleet.paused():
        why = f": {paused.reason}" if paused.reason else ""
        yield Probe("fleet", f"paused by {paused.by}{why}", "jobs are waiting: resume with `reshard fleet resume`")
    elif workers and all(name in drained for name in workers):
        yield Probe("fleet", "all workers are drained", f"jobs are waiting: `reshard fleet undrain {workers[0]}`")
    for kind in ("worker", "control"):
        found = [process for process in processes if process.kind == kind]
        gone = [one for one in lost if one.process.kind == kind]
        for one in gone:
            yield Probe(kind, str(one), "it keeps its tasks until their leases end")
        if not found and not gone:
            yield Probe(kind, "none is running", f"jobs are waiting: start one with `reshard {kind}`")
        others = sorted({process.version for process in found} - {ours})
        for process in found:
            about = f"{process.name}, {process.version}" + (", drained" if process.name in drained else "")
            warning = f"this command is {ours}: the older of the two may return jobs to the queue" if others else ""
            if process.name in resting:
                about += ", paused itself"
                warning = f"{resting[process.name].message}: {resting[process.name].hint}"
            yield Probe(kind, about, warning, facts={"version": process.version, "concurrency": process.concurrency})
