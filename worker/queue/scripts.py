"""The atomic steps: each Lua file of this package, run as one indivisible command of the Redis server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import redis
from redis.commands.core import Script
from redis.exceptions import MasterDownError, NoPermissionError

from reshard.pipeline.errors import BrokerFull, BrokerRefused, BrokerUnavailable, BrokerUnsupported, QueueError
from reshard.worker.queue.states import CANCELLABLE, ENDED, JobState

if TYPE_CHECKING:

    class DefaultParser:
        """What we use of redis-py's, which is chosen by what is installed, and so is no type."""

        @classmethod
        def parse_error(cls, response: str) -> Exception: ...
else:
    from redis.connection import DefaultParser

PREFIX = "reshard:"  # of every key that this service writes
# The steps of a worker that has a unit; owned.lua begins them.
OWNED = frozenset({"begin", "done", "fail", "hand_over", "invalidate", "log", "planned", "release", "renew", "seal"})
NOT_BEGUN = 1 << 52  # of a rank in the order of jobs: 67 million turns, and what Lua counts to is twice as much
FADES = 300_000  # ms until bytes that came weigh a third of what they did, so that a rate is that of some ten minutes
BATCH = 200  # jobs of one exchange: each change may wait for the server's disk, and may have 64 kB of request
_FOLDER = Path(__file__).with_name("lua")


# A redis-py pipeline, and what it answers while it watches: its own types are unions of all that might come.
Pipeline = Any
T = TypeVar("T")


class Unwilling(redis.ResponseError):
    """What a server says that redis-py has no class for: it does nothing of the kind for now, whoever asks."""

    def __init__(self, said: str) -> None:
        super().__init__(said)
        self._said = said.partition(" script: ")[0]  # without where in a step it came up

    def __str__(self) -> str:
        return self._said  # without the command, which redis-py puts before it where that is of a pipeline


class CannotSave(Unwilling):
    """MISCONF, NOREPLICAS: the server takes nothing that it cannot write to its disk, or to enough replicas."""


class Busy(Unwilling):
    """BUSY: the server carries out somebody's script, which does not end, and nothing else."""


class Answers(DefaultParser):
    """Of our connections: each error has its class, however and by whom it was asked."""

    UNWILLING: ClassVar = {"BUSY": Busy, "MISCONF": CannotSave, "NOREPLICAS": CannotSave}
    ABORTED: ClassVar = "EXECABORT Transaction discarded because of: "  # where EXEC itself is refused

    @classmethod
    def parse_error(cls, response: str) -> Exception:
        response = response.removeprefix(cls.ABORTED)
        kind = cls.UNWILLING.get(response.partition(" ")[0])
        return kind(response) if kind else super().parse_error(response)


# What any command raises while the broker does not answer, or answers and takes nothing for a while: its memory or its
# disk is full, it became a replica, or a script holds it up.
BROKER_UNAVAILABLE = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.OutOfMemoryError,
    redis.ReadOnlyError,
    MasterDownError,
    Unwilling,
)


NO_DATABASE = "DB index"  # in what a server says of a database that it does not have


class Scripts:
    """Calls a step by its file's name; the server keeps the text and is sent only its digest."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._scripts: dict[str, Script] = {}

    def __call__(self, name: str, *arguments: str | bytes | int) -> Any:
        if name not in self._scripts:
            self._scripts[name] = self._client.register_script(step_text(name))
        return self._scripts[name](args=list(arguments))

    def each(self, name: str, calls: Iterable[Sequence[str | bytes | int]]) -> list[Any]:
        """What a step answers to each of these calls, BATCH in one exchange with the server; raises as one of them."""
        answers = list[Any]()
        for some in _batches(calls):
            with self._client.pipeline(transaction=False) as pipe:
                step = Scripts(pipe)
                for arguments in some:
                    step(name, *arguments)
                answers += pipe.execute(raise_on_error=False)
            for error in answers[-len(some) :]:
                if isinstance(error, redis.ResponseError):
                    raise error
        return answers


def transact(client: redis.Redis, step: Callable[[Pipeline], T], *watched: str) -> T:
    """What ``step`` returns: it reads from its pipeline, calls ``multi`` and writes, all in one transaction.

    It is called again when one of ``watched`` was changed by another while it read.
    """
    return cast(T, client.transaction(cast(Any, step), *watched, value_from_callable=True))


def at_once(client: redis.Redis, ask: Callable[[Pipeline], object]) -> list[Any]:
    """The answers to all that ``ask`` asks of its pipeline, in one exchange with the server."""
    with client.pipeline(transaction=False) as pipe:
        ask(pipe)
        return pipe.execute()


def each_or_error(client: redis.Redis, ask: Callable[[Pipeline], object]) -> list[Any]:
    """The same; an error where a client keeps something of another type by the key that is asked for."""
    with client.pipeline(transaction=False) as pipe:
        ask(pipe)
        answers = pipe.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, Exception) and "WRONGTYPE" not in str(answer):
            raise answer
    return answers


def for_each(client: redis.Redis, items: Iterable[T], ask: Callable[[Pipeline, T], object]) -> Iterator[Any]:
    """The answers to what ``ask`` asks of its pipeline for each of them, BATCH in one exchange with the server."""
    for some in _batches(items):
        with client.pipeline(transaction=False) as pipe:
            for item in some:
                ask(pipe, item)
            yield from pipe.execute()


def job_key(id: str, part: str | None = None) -> str:
    """The key of a job's hash, or of one of the parts that common.lua lists."""
    return f"{PREFIX}job:{id}:{part}" if part else f"{PREFIX}job:{id}"


def ms(seconds: float) -> int:
    """Milliseconds, in which Redis and the steps count."""
    return round(seconds * 1000)


def server_ms(client: redis.Redis | Pipeline) -> int:
    """What time it is by the server's clock, the only one that decides anything; in ms since the epoch."""
    seconds, micros = client.time()
    return int(seconds * 1000 + micros // 1000)


def texts(answer: Any) -> list[str]:
    """A step's answer, or a list of members, as text."""
    return [item.decode() if isinstance(item, bytes) else str(item) for item in answer]


def known_fields(kind: Callable[..., T], data: str | bytes) -> T:
    """The dataclass that ``data`` is the JSON of, without fields that only a newer release knows."""
    names = {field.name for field in fields(cast(Any, kind))}
    return kind(**{name: value for name, value in json.loads(data).items() if name in names})


def decoded(fields: Any) -> dict[str, str]:
    """A hash, or the fields of a stream's entry, as text."""
    return {name.decode(): value.decode() for name, value in fields.items()}


def _batches(items: Iterable[T]) -> Iterator[list[T]]:
    rest = iter(items)
    while some := list(islice(rest, BATCH)):
        yield some


def why_full(error: redis.RedisError) -> str:
    """Why the server that raised it takes no more data; "" where that is not what it says."""
    if isinstance(error, redis.OutOfMemoryError):
        return "its memory is full"
    return str(error) if isinstance(error, CannotSave) else ""


def told(error: redis.RedisError, url: str) -> QueueError | None:
    """What ``error`` means to who asked the broker at ``url``; None where it is about what was asked."""
    kind: type[QueueError] | None = None
    if why := why_full(error):
        kind = BrokerFull
    elif isinstance(error, redis.AuthenticationError | NoPermissionError):
        kind = BrokerRefused
    elif isinstance(error, redis.InvalidResponse) or NO_DATABASE in str(error):
        kind = BrokerUnsupported
    elif isinstance(error, BROKER_UNAVAILABLE):
        kind = BrokerUnavailable
    return kind(url=url, why=why or str(error)) if kind else None


def full(client: redis.Redis) -> str:
    """Why the server takes no more data, if so; what is written to try it is gone a second later."""
    try:
        client.set(f"{PREFIX}probe", "", px=1000)
    except NoPermissionError:  # of a user who may not write, only that is known
        return ""
    except redis.ReadOnlyError as error:
        return str(error)
    except redis.ResponseError as error:
        if why := why_full(error):
            return why
        raise
    return ""


@cache
def step_text(name: str) -> str:
    kinds = [", ".join(f"{state} = true" for state in sorted(kind)) for kind in (JobState, ENDED, CANCELLABLE)]
    states = "local STATES, ENDED, CANCELLABLE = {{ {} }}, {{ {} }}, {{ {} }}".format(*kinds)
    numbers = f"local NOT_BEGUN, FADES = {NOT_BEGUN}, {FADES}"
    parts = ("common", "wakes", *(("owned",) if name in OWNED else ()), name)
    return "\n".join([states, numbers, *((_FOLDER / f"{part}.lua").read_text() for part in parts)])
