"""Jobs that other Celery apps submit by the task `reshard.submit`, and what these are told of them.

    reshard:submit     Celery's list: what was sent; of other priorities `reshard:submit\\x06\\x163` and so on
    reshard:taken      the message that is carried out now
    reshard:key:<key>  the job that came of it, and its request's key; kept for KEY_KEPT
    reshard:callbacks  Celery's list for the apps that sent them, as are `reshard:callbacks:...`
    callbacks          field of a job: key -> what is sent when it ends

Control carries them out, and no worker: these may copy for hours, and what a worker has taken dies with it. A message
leaves its list in the transaction that queues its job, notes its callback and sends what it links to; an end is
acknowledged in the one that sends the callbacks (counters.py). So each happens once, whoever dies.

All goes to queues of this name: a client of the broker that may write to none but reshard's keys must not be able to
have control write to another app's.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, NamedTuple
from uuid import NAMESPACE_OID, uuid4, uuid5

import redis
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from reshard.pipeline.errors import BadBody, JobNotFound, KeyReused, ReshardError, TargetBusy, TooManyQueued
from reshard.pipeline.limits import ASKED_BY_MAX
from reshard.pipeline.places import Place
from reshard.pipeline.request import Options, Priority, Request
from reshard.pipeline.validation import Strict, first_problem
from reshard.worker.queue.events import TOTALS, Event, is_unfit
from reshard.worker.queue.jobs import ACTIVE, JobStore, enqueue, in_the_way, submission
from reshard.worker.queue.messages import SUBMIT, TAKEN, Message, NotAMessage, envelope
from reshard.worker.queue.scripts import PREFIX, Pipeline, decoded, job_key, transact
from reshard.worker.queue.states import JobState

log = logging.getLogger(__name__)

TASK = "reshard.submit"
CALLBACKS = f"{PREFIX}callbacks"
KEY_KEPT = 30 * 86400  # seconds; a person sends a message again within days
KEY_MAX = 200  # characters
CALLBACKS_MAX = 20  # of one job, which several apps may ask for
ARGUMENTS_MAX = 4000  # characters of a callback's own arguments as JSON: its job keeps them
MESSAGE_MAX = 500_000  # bytes; a request has 64 kB at most, which JSON and base64 make more of
AT_ONCE = 100  # messages of one turn, so that the wakes never wait for long

Write = Callable[[Pipeline], Any]


class Route(BaseModel):
    """Of a signature, what says where it goes; nothing else is heeded, and so nothing else is taken."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    queue: Annotated[str, Field(pattern=rf"^{CALLBACKS}(:[A-Za-z0-9_.-]{{1,100}})?$")] = CALLBACKS


class Callback(BaseModel):
    """A signature of Celery's, or the name of a task alone: what is sent, and to which queue."""

    model_config = ConfigDict(hide_input_in_errors=True)

    task: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.]{0,199}$")
    args: list[Any] = Field(default_factory=list)
    kwargs: dict[str, Any] = Field(default_factory=dict)
    options: Route = Route()
    immutable: bool = False
    subtask_type: None = None  # no chain, group or chord

    @model_validator(mode="before")
    @classmethod
    def _named(cls, data: Any) -> Any:
        return {"task": data} if isinstance(data, str) else data

    @model_validator(mode="after")
    def _short(self) -> Callback:
        if len(json.dumps([self.args, self.kwargs])) > ARGUMENTS_MAX:
            raise ValueError(f"its arguments have more than {ARGUMENTS_MAX:,} characters")
        return self

    def sent(self, result: Any, id: str) -> Write:
        """Sends it, with ``result`` before its own arguments, as Celery does."""
        args = self.args if self.immutable else [result, *self.args]
        text = json.dumps(envelope(self.options.queue, self.task, args, self.kwargs, id))
        return lambda pipe: pipe.lpush(self.options.queue, text)


class Kept(Callback):
    """One that its job keeps."""

    told: int = 0  # the end that it was told of before that was followed: when the job came to it, in ms


_CALLBACKS = TypeAdapter(dict[str, Kept])
_LINKS = TypeAdapter(Annotated[list[Callback], Field(max_length=CALLBACKS_MAX)])


class Submission(Strict):
    """What `reshard.submit` takes, by name: a request as the API takes it, and what is the sender's."""

    source: Place
    target: Place
    options: Options = Options()
    priority: Priority = "interactive"
    asked_by: str = Field(default="celery", max_length=ASKED_BY_MAX)
    key: str = Field(default="", max_length=KEY_MAX)  # the same again is the same job; without one, the message's id
    callback: Callback | None = None

    def request(self) -> Request:
        """Raises BadBody for what no job can do."""
        named = {name: getattr(self, name) for name in Request.model_fields if hasattr(self, name)}
        return Request(**named).with_one_ref()


class Outcome(NamedTuple):
    """What a message came to: a line for the log, and what is written in the transaction that ends it."""

    level: int
    said: str
    writes: Sequence[Write]


class Submissions:
    """Carries them out. Every method may raise redis-py's errors."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._redis: Any = store.redis

    def take(self) -> int:
        """Carry out what was sent, the oldest first, AT_ONCE at most; returns how many messages that was."""
        taken = 0
        while taken < AT_ONCE and self._redis.exists(TAKEN, *SUBMIT):
            if not self._redis.exists(TAKEN):
                any(self._redis.rpoplpush(queue, TAKEN) for queue in SUBMIT)
            outcome = transact(self._redis, self._carry_out, TAKEN, ACTIVE)
            if outcome is not None:
                log.log(outcome.level, outcome.said)
            taken += 1
        return taken

    def _carry_out(self, pipe: Pipeline) -> Outcome | None:
        text = pipe.lindex(TAKEN, -1)
        if text is None:  # another control was first
            pipe.multi()
            return None
        try:
            outcome = self._outcome(pipe, text)
        except Exception as error:  # whatever it is, it holds up none behind it
            if isinstance(error, redis.RedisError) and not is_unfit(error):
                raise
            log.debug("what a submission failed over", exc_info=error)
            outcome = _dropped(type(error).__name__)
        pipe.multi()
        for write in outcome.writes:
            write(pipe)
        pipe.lrem(TAKEN, -1, text)
        return outcome

    def _outcome(self, pipe: Pipeline, text: bytes) -> Outcome:
        try:
            message = _read(text)
        except NotAMessage as error:
            return _dropped(str(error))
        try:
            given, links = _given(message)
            job, existed, writes = self._submitted(pipe, given, given.key or message.id)
        except ReshardError as error:
            return _refused(message, error)
        result = {"id": job, "existed": existed}
        writes += [link.sent(result, _id(message.id, number)) for number, link in enumerate(links)]
        how = "requested it too" if existed else "queued it"
        return Outcome(logging.INFO, f"job {job}: Celery task {message.id} {how}", writes)

    def _submitted(self, pipe: Pipeline, given: Submission, key: str) -> tuple[str, bool, list[Write]]:
        """The job, whether it was there before, and what makes it so."""
        request, told = given.request(), given.callback
        kept, submitted = pipe.get(_key(key)), submission(request)
        if kept is not None:
            job, _, same = kept.decode().partition(" ")
            if same != submitted[1]:
                raise KeyReused(key=key, job=job)
            return job, True, _awaited(pipe, job, key, told)
        why, job = in_the_way(pipe, submitted, self._store.most)
        if why == "busy":
            raise TargetBusy(job=job, target=str(request.target))
        if why == "full":
            raise TooManyQueued(name=request.asked_by or "an unnamed submitter", most=self._store.most, job=job)
        job = job or submitted[0]
        writes: list[Write] = [lambda pipe: pipe.set(_key(key), f"{job} {submitted[1]}", ex=KEY_KEPT)]
        if why == "same":
            return job, True, writes + _awaited(pipe, job, key, told)
        writes.append(lambda pipe: enqueue(pipe, submitted))
        return job, False, writes + _noted(job, {key: Kept(**told.model_dump())} if told else {})


def ended(pipe: Pipeline, event: Event) -> list[Write]:
    """What sends the callbacks of a job whose end the event tells; ``pipe`` reads."""
    job, state, error = (event.fields[part] for part in ("job", "state", "error"))
    try:
        told, published = pipe.hmget(job_key(job), "callbacks", "published")
        if told is None:  # perhaps it was deleted since
            told, published = pipe.hmget(job_key(job, "callbacks"), "callbacks", "published")
    except redis.ResponseError as error_:
        if "WRONGTYPE" not in str(error_):
            raise
        return []
    if not (kept := _kept(told)):
        return []
    found = _end(job, state, error, (published or b"").decode())
    left = {key: one for key, one in kept.items() if one.told != event.at}
    return [one.sent({**found, "key": key}, _id(event.id, key)) for key, one in left.items()]


def _awaited(pipe: Pipeline, job: str, key: str, told: Callback | None) -> list[Write]:
    """What has ``told`` be sent when a job ends that is there, or at once where it has."""
    pipe.watch(job_key(job))  # or it could end before it is noted
    record = decoded(pipe.hgetall(job_key(job)))
    if not record:
        raise JobNotFound(job=job)
    if told is None:
        return []
    ended = JobState.known(record["state"]).ended
    one = Kept(**told.model_dump(), told=int(record["since"]) if ended else 0)
    kept = {**_kept(record.get("callbacks")), key: one}
    if len(kept) > CALLBACKS_MAX:
        raise BadBody(where="callback", why=f"job {job} already has {CALLBACKS_MAX} callbacks")
    writes = _noted(job, kept)
    if ended:
        found = _end(job, record["state"], record.get("error", ""), record.get("published", ""))
        writes.append(told.sent({**found, "key": key}, str(uuid4())))
    return writes


def _noted(job: str, kept: Mapping[str, Kept]) -> list[Write]:
    if not kept:
        return []
    text = _CALLBACKS.dump_json(dict(kept), exclude_defaults=True)
    return [lambda pipe: pipe.hset(job_key(job), "callbacks", text)]


def _kept(text: str | bytes | None) -> dict[str, Kept]:
    """Those that a job keeps; none where a client wrote what we do not."""
    try:
        return _CALLBACKS.validate_json(text) if text else {}
    except ValidationError:
        return {}


def _end(job: str, state: str, error: str, published: str) -> dict[str, Any]:
    """What a callback is told of an end; ``error`` and ``published`` as the job keeps them."""
    made = json.loads(published or "{}")
    commit = {part: made.get(part) for part in ("commit", "ref")}
    return {"id": job, "state": state, **commit, "error": json.loads(error) if error else None}


def _read(text: bytes) -> Message:
    """Raises NotAMessage."""
    if len(text) > MESSAGE_MAX:
        raise NotAMessage(f"it has more than {MESSAGE_MAX:,} bytes")
    try:
        message = Message.read(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, NotAMessage) else NotAMessage("it is not JSON") from None
    if message.task != TASK:
        raise NotAMessage("it is for another task")
    if not re.fullmatch(r"[!-~]{1,100}", message.id):
        raise NotAMessage("its id is not a Celery task ID")
    return message


def _given(message: Message) -> tuple[Submission, list[Callback]]:
    """What is asked for, and whom to tell that it is queued; raises BadBody."""
    unheeded = {"args": message.args, **{what: message.headers.get(what) for what in ("eta", "expires")}}
    unheeded |= {what: message.embed.get(what) for what in ("chain", "chord")}
    if name := next((name for name, value in unheeded.items() if value), ""):
        raise BadBody(where=name, why=f"{TASK} accepts named arguments, a callback and links, but not {name}")
    try:
        return Submission.model_validate(message.kwargs), _links(message, "callbacks")
    except ValidationError as error:
        first = first_problem(error)
        raise BadBody(where=first.where or "the message", why=first.why) from error


def _links(message: Message, which: str) -> list[Callback]:
    return _LINKS.validate_python(message.embed.get(which) or [])


def _dropped(why: str) -> Outcome:
    return Outcome(
        logging.ERROR,
        f"dropped a message on {SUBMIT[0]}: {why}",
        [lambda pipe: pipe.hincrby(TOTALS, "dropped:submit", 1)],
    )


def _refused(message: Message, error: ReshardError) -> Outcome:
    """The callback is told why; errbacks get the id alone, as workers have it whose app does not know them."""
    said = {"id": None, "state": "refused", "commit": None, "ref": None, "error": error.to_dict()}
    writes = list[Write]()
    with suppress(ValidationError):
        told = Callback.model_validate(message.kwargs.get("callback"))
        said["key"] = str(message.kwargs.get("key") or message.id)[:KEY_MAX]
        writes.append(told.sent(said, _id(message.id, "refused")))
    with suppress(ValidationError):
        writes += [one.sent(message.id, _id(message.id, n)) for n, one in enumerate(_links(message, "errbacks"))]
    return Outcome(logging.WARNING, f"refused Celery task {message.id}: error[{error.code}]: {error}", writes)


def _id(*parts: object) -> str:
    """The same for a message that is made again from the same."""
    return str(uuid5(NAMESPACE_OID, " ".join(map(str, parts))))


def _key(key: str) -> str:
    return f"{PREFIX}key:{key}"
