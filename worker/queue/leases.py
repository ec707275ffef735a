"""Jobs as a worker sees them: claim a unit under a random token, keep it while it moves, hand in what was done.

A token is good until another claim takes its place, however late. Every step answers ``ok``, ``lost`` (another worker
has the unit now) or ``cancelled``; the last two leave everything as it was. A step that makes something claimable
says to which queue a wake is to go (wakes.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast
from uuid import uuid4

import redis
from pydantic import ValidationError

from reshard.pipeline.copying.loop import Moved
from reshard.pipeline.errors import ReshardError, shortened
from reshard.pipeline.limits import COPIES
from reshard.pipeline.planning.codec import decode_head, decode_shard, encode, outline
from reshard.pipeline.planning.estimate import forecast
from reshard.pipeline.planning.model import SCHEMA, Plan, Receipt, Shard
from reshard.pipeline.request import Request
from reshard.pipeline.validation import unknown_names
from reshard.worker.fleet.fleet import Fleet
from reshard.worker.logs import LINES, job_started
from reshard.worker.queue.events import append
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.scripts import job_key, ms, server_ms, texts
from reshard.worker.queue.states import JobState
from reshard.worker.queue.wakes import Wakes
from reshard.worker.settings import HAND_BACK, KEEP_DETAILS, LEASE, YIELD_PAUSE

NOTHING = Moved()
LOOKS = 10  # jobs that are tried for one wake; the others have wakes of their own

StepAnswer = Literal["ok", "lost", "cancelled", "yield", "alone", "often"]  # the last three of one step each
Kind = Literal["plan", "check", "group", "publish", "confirm"]


@dataclass(slots=True)
class Lease:
    """One worker's right to one unit of one job."""

    job: str
    unit: str
    token: str
    attempts: int  # claims since the last lasting progress, this one included
    last_error: dict[str, Any] | None  # of the attempt before
    state: JobState  # when it was claimed
    dead: str | None  # the token of an owner who never handed back
    bulk: bool
    worker: str
    submitted: int  # when the job was submitted, or last retried; ms since the epoch
    by: str  # who submitted it
    request: bytes  # JSON, as it was submitted

    @property
    def fields(self) -> dict[str, Any]:
        """Of a log line."""
        return {"job": self.job, "unit": self.unit, "attempt": self.attempts, "worker": self.worker}

    @property
    def kind(self) -> Kind:
        return cast(Kind, self.unit.partition(":")[0])

    @property
    def group(self) -> int:
        return int(self.unit.partition(":")[2])


class Leases(Wakes):
    """The worker's half of the job store. Every method may raise redis-py's ConnectionError and TimeoutError."""

    def __init__(
        self,
        store: JobStore,
        send: Callable[[str, str], None],
        worker: str,
        lease: float = LEASE,
        schema: int = SCHEMA,
        fleet: Fleet | None = None,
    ) -> None:
        """``send(queue, job)`` sends a wake; ``lease`` in seconds; ``schema`` is the one that this worker reads."""
        self.fleet = fleet or Fleet(store)
        super().__init__(store.redis, send, lease, self.fleet.look)
        self._worker = worker
        self._schema = schema

    # -------------------------------------------------------------------------------------------------- the steps

    def claim_first(self, queue: str, sent_for: str) -> Lease | None:
        """The right to what there is to do first, for a wake from ``queue``.

        What is first may be claimed by another worker meanwhile, or not be for this one; then it is out of the line.
        """
        for _ in range(LOOKS):
            first = self.first(queue)
            try:
                lease = self.claim(first or sent_for)
            except redis.ResponseError as error:
                if "WRONGTYPE" not in str(error):
                    raise
                self.pass_over(first or sent_for)
                continue
            if lease is not None or first is None or self._rests():
                return lease
        return None

    def _rests(self) -> bool:
        """Whether no job is for this worker now."""
        return self.fleet.paused() is not None or self.fleet.drained(self._worker.rpartition(".")[0] or self._worker)

    def claim(self, job: str) -> Lease | None:
        """The right to the next unit of the job, if there is one to do now, and by a worker of this release."""
        token = uuid4().hex
        request = cast(bytes, self.redis.hget(job_key(job), "request") or b"")
        wake, unit, attempts, error, state, dead, priority, starts, asked, by = texts(
            self._run(
                "claim", job, token, self._worker, self._lease, str(self._schema), ms(HAND_BACK),
                *self._night(), self._unknown(request),
            )
        )  # fmt: skip
        if starts == "1":
            job_started(job, request, self._worker)
        self.wake(wake, job)
        if not unit:
            return None
        last_error = json.loads(error) if error else None
        bulk = priority == "bulk"
        return Lease(
            job, unit, token, int(attempts), last_error, JobState(state), dead or None, bulk, self._worker, int(asked),
            by, request,
        )  # fmt: skip

    @staticmethod
    def _unknown(request: bytes) -> str:
        """What of a job's request this release does not know: a newer one's options, or what is none."""
        try:
            Request.model_validate_json(request)
        except ValidationError as error:
            return unknown_names(error)
        except ReshardError as error:
            return shortened(str(error))
        return ""

    def renew(self, lease: Lease, copied: int, progress: bool, waits: str = "") -> StepAnswer:
        """Keep the unit for another lease if there was ``progress``; ``yield`` when it is somebody else's turn.

        ``copied`` counts bytes since the last seal; ``waits`` says what the work waits for, if it does.
        """
        _, shut = self._night()
        return self._answer(lease, "renew", copied, self._lease, int(progress), ms(YIELD_PAUSE), shut, waits)

    def seal(self, lease: Lease, receipts: Iterable[Receipt], moved: Moved = NOTHING) -> StepAnswer:
        """Keep receipts, which is lasting progress, and count what ``moved`` since the claim."""
        return self._answer(lease, "seal", *moved, *(x for r in receipts for x in (r.shard, r.to_json(), r.size)))

    def log(self, lease: Lease, lines: Sequence[str]) -> StepAnswer:
        """Keep what was logged of the unit with its job: the last LINES of all units, each as ``logs.taken`` has it."""
        return self._answer(lease, "log", LINES, *lines)

    def planned(self, lease: Lease, plan: Plan) -> StepAnswer:
        """Write the plan, once, and open its units."""
        stored = encode(plan)
        rows = [x for i, shard in enumerate(plan.shards) for x in (shard.digest, shard.size, stored.shards[i])]
        return self._answer(
            lease, "planned", str(plan.schema), plan.digest, stored.head,
            len(plan.groups), json.dumps(plan.notes), forecast(plan).uploaded, outline(plan), *rows,
        )  # fmt: skip

    def done(self, lease: Lease, result: object) -> StepAnswer:
        """The unit is finished; ``result`` is JSON-able."""
        return self._answer(lease, "done", ms(KEEP_DETAILS), json.dumps(result))

    def begin(self, lease: Lease) -> StepAnswer:
        """Pass the point of no return, unless a cancel came first."""
        return self._answer(lease, "begin")

    def again(self, lease: Lease, error: Mapping[str, Any], after: float) -> StepAnswer:
        """The unit failed and may be tried again ``after`` so many seconds."""
        facts = error["facts"] | {"retry_at": time.time() + after}  # for people, so by any clock
        return self._answer(lease, "fail", json.dumps({**error, "facts": facts}), "retry", ms(after))

    def fail(self, lease: Lease, error: Mapping[str, Any], unsure: bool = False) -> StepAnswer:
        """The job ends with this error; ``unsure`` when nobody knows whether its commit stands."""
        return self._answer(lease, "fail", json.dumps(error), "unsure" if unsure else "final")

    def release(self, lease: Lease, why: str) -> StepAnswer:
        """Hand the unit back unfinished; costs no attempt."""
        return self._answer(lease, "release", why)

    def spent(self, lease: Lease, took: float, calls: int, moved: Moved) -> None:
        """Say what the claim took, however it ended: seconds, calls to Hubs, and bytes that no seal counted."""
        counts = {"took": ms(took), "calls": calls, **moved._asdict()}
        told = {name: str(count) for name, count in counts.items()}
        append(self.redis, "spent", server_ms(self.redis), job=lease.job, unit=lease.unit, by=lease.by, **told)

    def hand_over(self, lease: Lease, error: Mapping[str, Any]) -> StepAnswer:
        """The fault is this worker's: leave the unit to another one, which costs no attempt.

        ``alone`` when every worker that is alive has failed it so; then nothing is changed but that.
        """
        return self._answer(lease, "hand_over", json.dumps(error))

    def invalidate(
        self, lease: Lease, error: Mapping[str, Any], shards: Iterable[Shard], groups: Sequence[int] = ()
    ) -> StepAnswer:
        """Forget the receipts of ``shards`` and have ``groups`` copied again; ``often`` when it was done too often.

        Without groups the unit stays this worker's; with groups it is theirs no more.
        """
        units = [f"group:{number:05d}" for number in groups]
        rows = [item for shard in shards for item in (shard.digest, shard.size)]
        return self._answer(lease, "invalidate", COPIES, json.dumps(error), len(units), *units, *rows)

    def _answer(self, lease: Lease, step: str, *arguments: str | bytes | int) -> StepAnswer:
        answer, wake, *attempts = texts(self._run(step, lease.job, lease.unit, lease.token, *arguments))
        if attempts:
            lease.attempts = int(attempts[0])
        self.wake(wake, lease.job)
        return cast(StepAnswer, answer)

    # -------------------------------------------------------------------------------------------- what a step needs

    def plan(self, job: str) -> Plan:
        """The plan with all of its shards."""
        fields = cast(dict[bytes, bytes], self.redis.hgetall(job_key(job, "plan")))
        head = decode_head(self._known(fields.pop(b"head", None), job))
        return replace(head, shards=tuple(decode_shard(fields[b"%d" % number]) for number in range(len(fields))))

    def head(self, job: str) -> Plan:
        """The plan without its shards."""
        return decode_head(self._known(self.redis.hget(job_key(job, "plan"), "head"), job))

    def shards(self, job: str, numbers: Sequence[int]) -> dict[int, Shard]:
        fields = self.redis.hmget(job_key(job, "plan"), [str(n) for n in numbers]) if numbers else []
        return {n: decode_shard(self._known(data, job)) for n, data in zip(numbers, fields, strict=True)}

    def receipts(self, job: str, digests: Sequence[str]) -> dict[str, Receipt]:
        fields = self.redis.hmget(job_key(job, "receipts"), list(digests)) if digests else []
        return {d: Receipt.from_json(data) for d, data in zip(digests, fields, strict=True) if data is not None}

    def attested(self, job: str) -> list[Any]:
        """What the groups attested, as handed in with ``done``."""
        return [json.loads(data) for data in self.redis.hvals(job_key(job, "attested"))]

    def published(self, job: str) -> Any:
        """What publishing handed in."""
        return json.loads(self._known(self.redis.hget(job_key(job), "published"), job))

    @staticmethod
    def _known(value: Any, job: str) -> bytes:
        if value is None:
            raise LookupError(f"job {job} is no longer in the store")
        return cast(bytes, value)
