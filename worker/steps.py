"""The one message, ``wake(job)``: claim what there is to do, do that one thing, and say what came of it.

    claim -> plan | check | copy a group | publish | confirm -> hand in -> wake whoever comes next

A wake carries nothing but the job's id; it may be lost, late or doubled. Everything a step needs is in the store, and
everything it leaves behind is written there under its token.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from celery import Task
from celery.exceptions import Reject
from kombu.exceptions import OperationalError
from redis import RedisError

from reshard.pipeline import reshard as pipeline
from reshard.pipeline.check import Check
from reshard.pipeline.copying.loop import Attested, Moved, Stopped
from reshard.pipeline.driving import Exhausted, Made
from reshard.pipeline.errors import (
    DigestsDiffer,
    HubQuota,
    HubRefused,
    NoWriteAccess,
    ObjectLost,
    ReshardError,
    ResourceError,
    SourceCorrupt,
    TargetError,
    TooManyAttempts,
)
from reshard.pipeline.planning.model import Plan
from reshard.pipeline.protocols import Source, Target, Traffic
from reshard.pipeline.publishing import history as publication
from reshard.pipeline.publishing.commit import Published, find
from reshard.pipeline.publishing.signing import Signer
from reshard.pipeline.request import Request
from reshard.pipeline.stores.connect import Context, open_target
from reshard.pipeline.stores.overlay import Meter
from reshard.pipeline.tensors import Attestation
from reshard.worker import logs, tracing
from reshard.worker.app import app, send
from reshard.worker.broker import broker_url
from reshard.worker.fleet import drain, policy, self_check
from reshard.worker.fleet.rate_limit import rate_limiters
from reshard.worker.keeper import LeaseKeeper
from reshard.worker.process import OwnProcess, own
from reshard.worker.queue.jobs import JobStore, open_redis
from reshard.worker.queue.leases import Lease, Leases
from reshard.worker.queue.scripts import BROKER_UNAVAILABLE
from reshard.worker.queue.states import JobState
from reshard.worker.queue.wakes import WAKE
from reshard.worker.settings import ATTEMPTS_AT_A_BUG, Settings, settings

log = logging.getLogger(__name__)


def wake(task: Task, job: str) -> None:
    """Do what comes first in the queue that this came by; of ``job``, which it was sent for, if nothing waits there."""
    if drain.wanted():
        raise Reject("this worker is shutting down", requeue=True)
    with drain.heeded():  # from before the claim: who died with one would keep it until its lease ends
        try:
            lease = _leases().claim_first(task.request.delivery_info["routing_key"], job)
        except BROKER_UNAVAILABLE as error:
            log.warning("cannot claim a job; the broker is unavailable: %s", error)
            return
        if lease is not None:
            _show(task, lease)
            with tracing.step(lease) as names, logs.at_work({**lease.fields, **names}):
                work(_leases(), lease, settings(), own())


app.task(name=WAKE, bind=True)(wake)


def _show(task: Task, lease: Lease) -> None:
    """Say what this task does, which nobody knew when it was sent: Flower and `celery events` show what came last."""
    if app.conf.worker_send_task_events:
        step, job = {"group": "copy"}.get(lease.kind, lease.kind), repr((lease.job,))
        unit = repr({"unit": lease.unit, "attempt": lease.attempts})
        try:
            task.send_event("task-started", retry=False, name=f"{WAKE}[{step}]", args=job, kwargs=unit)
        except (OperationalError, RedisError) as error:
            log.warning("cannot tell who watches Celery's events of job %s: %s", lease.job, error)


def work(leases: Leases, lease: Lease, settings: Settings, process: OwnProcess) -> None:
    """Do the unit of ``lease`` and say to the store how it ended; raises nothing that the store can be told."""
    log.info("%s of job %s, attempt %s", lease.unit, lease.job, lease.attempts)
    began = time.monotonic()
    keeper = step = None
    try:
        keeper = LeaseKeeper(leases, lease, settings)
        with keeper:
            step = Step(leases, lease, keeper, settings, process)
            try:
                if lease.attempts > settings.attempts:
                    raise _given_up(lease, lease.last_error)
                step.run()
                self_check.succeeded(lease.kind)
            except Stopped as stopped:
                reason = stopped.reason
                log.info("%s of job %s stopped: %s", lease.unit, lease.job, reason)
                tracing.note(stopped=reason)
                if reason in {"drain", "yield", "stall"}:
                    keeper.finish(lambda: leases.release(lease, reason))
            except BROKER_UNAVAILABLE:
                raise
            except Exception as error:  # noqa: BLE001  whatever it is, it counts and the job says it
                last = isinstance(error, Exhausted)
                named = error.error if isinstance(error, Exhausted) else self_check.named(error, step.tmpdir)
                _trouble(leases, lease, keeper.finish, settings, named, step.unsure(named), last)
    except Stopped as stopped:
        log.info("%s of job %s: %s before its result was stored", lease.unit, lease.job, stopped.reason)
    except BROKER_UNAVAILABLE as error:
        log.error("%s of job %s lost; the broker stayed unavailable: %s", lease.unit, lease.job, error)
    except Exception as error:  # noqa: BLE001  outside of the keeper's care, as when no thread can be started
        unsure = lease.state == JobState.committing or (keeper is not None and keeper.begun)
        _trouble(leases, lease, lambda step: step(), settings, self_check.named(error, None), unsure)
    finally:
        try:
            leases.spent(lease, time.monotonic() - began, *(step.took() if step else (0, Moved())))
        except BROKER_UNAVAILABLE as error:
            log.warning("%s: its usage is not counted; the broker is unavailable: %s", lease.unit, error)


class Step:
    """One unit of one job, from what the store knows to what it is told."""

    def __init__(
        self, leases: Leases, lease: Lease, keeper: LeaseKeeper, settings: Settings, process: OwnProcess
    ) -> None:
        self._leases = leases
        self._lease = lease
        self._keeper = keeper
        self._settings = settings
        self._process = process
        self.tmpdir: Path | None = None  # once it runs
        self._job = lease.job
        self._meter = Meter()
        self._carrier: Target | None = None
        self._looked = False  # whether a commit of ours was looked for where one may stand

    def unsure(self, error: ReshardError) -> bool:
        """Whether a commit of ours may stand although the step ended with ``error``."""
        if self._keeper.begun:
            return not isinstance(error, REFUSALS)
        return self._lease.state == JobState.committing and not self._looked

    def took(self) -> tuple[int, Moved]:
        """Calls to Hubs, and the bytes that no seal counted: headers, files that are carried, a batch that broke."""
        carried = self._carrier.carried if self._carrier else Traffic()
        known, stored = self._keeper.saved, self._keeper.counted  # the last seal may have been refused
        read = max(0, self._meter.read - known.read)
        uploaded = carried.uploaded + stored.uploaded - known.uploaded
        return self._meter.calls, Moved(read, uploaded, carried.deduplicated + stored.deduplicated - known.deduplicated)

    def run(self) -> None:
        """Raises Stopped, the ReshardError tree, and redis-py's errors when the broker stays away."""
        self.tmpdir = self._process.temp_dir()
        keeper, meter = self._keeper, self._meter
        bulk = self._lease.bulk
        pace = rate_limiters(self._leases.redis, keeper.check, keeper.alive, bulk, keeper.waits, meter.called)
        context = Context.from_env(pace)
        hubs = policy.endpoints(self._settings, context.credentials)
        self._context = replace(context, tmpdir=self.tmpdir, endpoints=hubs, observe=tracing.observer(), meter=meter)
        self._process.lend(self._context)
        try:
            self._run()
        except BaseException:  # a connection may be in the middle of anything
            self._context.close()
            raise
        self._process.keep(self._context)

    def _run(self) -> None:
        self._request = Request.model_validate_json(self._lease.request)
        policy.check(self._request, self._settings, lambda target: policy.namespaces(target, self._context))
        steps: dict[str, Callable[[], None]] = {
            "plan": self._plan,
            "check": self._check,
            "group": self._copy,
            "publish": self._publish,
            "confirm": self._confirm,
        }
        steps[self._lease.kind]()

    def _plan(self) -> None:
        self._signer()  # else all is copied before the key turns out to be unusable
        target = self._target()
        target.recover()  # first, as it may be the source, too
        source = self._source()
        policy.check_exposed(pipeline.exposed(self._request, source), self._settings)
        with self._keeper.interruptible():
            plan = pipeline.plan(self._request, source, target, self._process.meta_loader(), self._lease.submitted)
        if plan.published is not None:
            published = Published(plan.published, target.branch, found=True)
            self._keeper.finish(lambda: self._leases.done(self._lease, _record(published, plan)))
        else:
            pipeline.refuse_without_room(plan, target)
            self._keeper.finish(lambda: self._leases.planned(self._lease, plan))

    def _copy(self) -> None:
        plan = self._keeper.patiently(lambda: self._leases.head(self._job))
        target = self._target()
        group = plan.groups[self._lease.group]
        shards = self._keeper.patiently(lambda: self._leases.shards(self._job, group.shards))
        held = self._keeper.held(shards.values())
        todo = tuple(shard for shard in shards.values() if shard.digest not in held)
        pipeline.refuse_without_disk(replace(plan, shards=todo), self._context.disk)
        token, keeper = self._lease.token, self._keeper
        source, sink = self._source(plan), target.sink(token)
        try:
            with keeper.interruptible():
                attested = pipeline.copy_group(
                    plan, group, shards, source, sink, keeper,
                    keeper.stored, keeper.tick, self._context.disk, keeper.should_yield,
                )  # fmt: skip
        finally:
            target.discard(token)
        keeper.finish(lambda: self._leases.done(self._lease, attested))

    def _check(self) -> None:
        plan = self._load()
        checks = pipeline.check(plan, plan.shards, self._source(plan), self._process.meta_loader())
        self._keeper.finish(lambda: self._leases.done(self._lease, [check.to_dict() for check in checks]))

    def _publish(self) -> None:
        plan, target = self._load(), self._target()
        if self._lease.state == JobState.committing and (standing := self._standing(plan, target)) is not None:
            self._hand_in(plan, pipeline.made_of(standing, plan, self._keeper))
            return
        token, begin = self._lease.token, self._keeper.begin
        signer = self._signer()
        try:
            made = pipeline.publish_copied(plan, self._source(plan), target, token, self._keeper, begin, signer)
            if made is not None:
                self._hand_in(plan, made)
        finally:
            target.discard(token)

    def _signer(self) -> Signer | None:
        return Signer.open(self._request.options.sign, self._context.sign_keys, self._context.builder_id)

    def _hand_in(self, plan: Plan, made: Made) -> None:
        record = _record(made.published, plan, made.attested, [made.check])
        self._keeper.finish(lambda: self._leases.done(self._lease, record))

    def _standing(self, plan: Plan, target: Target) -> Published | None:
        """The commit that somebody before us made and did not live to report.

        It is looked for before anything else is asked, because the source may be gone by now, and what was staged is.
        """
        title, message = publication.title(plan), publication.message(plan)
        goal = target.request(plan.digest, title, message)
        commit = find(plan, goal, goal.head())
        self._looked = True
        if commit is None:
            return None
        goal.show()
        return Published(commit, goal.branch, found=True)

    def _confirm(self) -> None:
        plan, target = self._load(), self._target()
        kept = self._keeper.patiently(lambda: self._leases.published(self._job))
        published = Published(kept["commit"], kept["ref"], kept["found"])
        check = pipeline.confirm(plan, plan.shards, self._keeper.held(plan.shards), published, target)
        self._keeper.finish(lambda: self._leases.done(self._lease, [check.to_dict()]))

    # ------------------------------------------------------------------------------------------- what they share

    def _load(self) -> Plan:
        return self._keeper.patiently(lambda: self._leases.plan(self._job))

    def _source(self, plan: Plan | None = None) -> Source:
        return pipeline.source_of(self._request, self._context, plan)

    def _target(self) -> Target:
        """The target, without what a dead owner of this unit left there unfinished."""
        self._carrier = target = open_target(self._request.target, self._request.options, self._context)
        if self._lease.dead is not None:
            target.discard(self._lease.dead)
        return target


def _record(
    published: Published, plan: Plan, attested: Sequence[Attested] = (), checks: Sequence[Check] = ()
) -> dict[str, Any]:
    """What the job keeps: where the result is, its source's commit, what attested the files, what was checked."""
    levels: dict[str, Attestation] = {file.path: "as delivered" for file in plan.read} if attested else {}
    levels |= {path: level for group in attested for path, level in group.files.items()}
    return {
        **asdict(published),
        "source": plan.pin.commit,
        "attested": Counter(levels.values()),
        "checks": [check.to_dict() for check in checks],
    }


# ----------------------------------------------------------------------------------------------------------- trouble

# Errors that stop a job but may have come from one machine or one moment: they are tried again, though not for long.
RETRY_BRIEFLY = (ResourceError, SourceCorrupt, DigestsDiffer)


# Once a commit was begun, these alone say that none of ours stands: the Hub refused it, or the target was read.
REFUSALS = (TargetError, NoWriteAccess, HubRefused, HubQuota, ObjectLost)


def _trouble(
    leases: Leases,
    lease: Lease,
    finish: Callable[[Callable[[], str]], str],
    settings: Settings,
    error: ReshardError,
    unsure: bool,
    last: bool = False,
) -> None:
    """Have the unit done by another worker or tried again later, or end the job, at once if this was its ``last`` time.

    ``finish`` as the keeper's.
    """
    error.facts.setdefault("job", lease.job)
    said = " (last attempt)" if last else ""
    log.warning("%s of job %s%s: %s", lease.unit, lease.job, said, error, extra=error.logged)
    tracing.failed(error)
    data = error.to_dict()
    if error.blames_worker and not last:
        self_check.failed(lease.kind, error)
        if finish(lambda: leases.hand_over(lease, data)) == "ok":
            return
    briefly = isinstance(error, RETRY_BRIEFLY) or type(error) is ReshardError
    allowed = ATTEMPTS_AT_A_BUG if briefly else settings.attempts
    if last or not (error.retryable or briefly):
        finish(lambda: leases.fail(lease, data, unsure))
    elif lease.attempts < allowed:
        pause = backoff(lease.attempts, settings) if error.retryable else 0.0
        finish(lambda: leases.again(lease, data, pause))
    elif error.retryable:
        finish(lambda: leases.fail(lease, _given_up(lease, data).to_dict(), unsure=True))
    else:
        finish(lambda: leases.fail(lease, data, unsure))


def backoff(attempts: int, settings: Settings) -> float:
    """Seconds to wait after the ``attempts``-th failure in a row; spread, so that workers do not return together."""
    longest: float = min(settings.backoff_max, settings.backoff_first * 2 ** max(0, attempts - 1))
    return longest * random.uniform(0.5, 1.0)


def _given_up(lease: Lease, last: dict[str, Any] | None) -> TooManyAttempts:
    if last is None:
        last = {"code": "job.died", "message": f"the worker died during {lease.unit}", "hint": "see the workers' logs"}
    return TooManyAttempts(
        job=lease.job,
        attempts=lease.attempts,
        last=f"{last['message']} ({last['hint']})",
        code=last["code"],
        unit=lease.unit,
    )


# -------------------------------------------------------------------------------------------------- of this process


@cache
def _leases() -> Leases:
    """Made in the child, after the fork: connections are not shared between processes."""
    url = broker_url(settings())
    worker = f"{socket.gethostname()}:{os.getppid()}.{os.getpid()}"  # the main process, and this child of it
    return Leases(JobStore(open_redis(url), url), send, worker, settings().lease)
