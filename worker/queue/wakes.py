"""What wakes a worker, from a job that is submitted to a message that a worker takes.

    submit, retry         a step that leaves        a lease that ends       the window opens, a pause
        |                 something to claim        a backoff that ends     is over, a limit is raised
        |                 (done, planned, ...)               |                          |
        |                        |                           |                          |
        v                        v                           v                          v
     ``ring``                ``settle``                <queue>:due                 bell, `held`
     <queue>:due, bell           |                           |                          |
        |                        |                           |                          |
        +---> control hears the bell, or looks four times a second: the step ``due`` <--+
                                 |                           |
                        the worker sends             control sends, and sends again what was lost
                                 |                           |
                                 v                           v
                       Celery's list <queue>, and the job in <queue>:waked
                                             |
                                             v
                         a worker takes wake(job) and claims what there is to do

The Lua of it is wakes.lua and due.lua. A wake holds nothing but the job's id, and may be lost, late or doubled:

* Who can send does so: a step returns the queue that a wake is to go to, and notes it in ``<queue>:waked``. While it is
  there, no other is sent for the job; a claim takes it out. A unit that is done wakes for the next, and a claim that
  leaves more to claim wakes once more, so a job's workers are woken one after the other.
* Who cannot send, such as a client without Celery, writes the job to ``<queue>:due`` and rings the bell.
* Everything else is a matter of time. A lease, a backoff and "now" are times in a job's ``:todo``, and the earliest is
  its time in ``<queue>:due``. So a dead worker's unit is found by its lease's end, by any control. A time that lies
  further ahead than it can is from before the broker's clock jumped back, and is over.
* A wake is lost when its queue is shorter than its ``:waked`` says. The oldest are sent again after ``RESEND``.
* A wake is for the first of its queue, whichever job it was sent for (``first``, and ``rank`` in wakes.lua): a job that
  has begun goes before one that has not, and among these submitters take turns, each with the job that was submitted
  first. So no more jobs are half done than there are workers. Interactive jobs go before bulk ones (``QUEUES``).
* A job that has not ended and is in none of ``PLACES`` is rung again once a minute (``ring_strays``), and one of these
  that a client wrote over is removed, so that it stops no wakes.
* In a pause nothing is sent. A bulk job that must wait for the night's window is in ``reshard:held`` until it opens.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import cast

import redis

from reshard.worker.queue.events import TOTALS
from reshard.worker.queue.messages import SUBMIT, TAKEN
from reshard.worker.queue.scripts import PREFIX, Scripts, at_once, job_key, ms, texts
from reshard.worker.queue.states import JobState
from reshard.worker.settings import RESEND

log = logging.getLogger(__name__)

QUEUES = (f"{PREFIX}interactive", f"{PREFIX}bulk")  # in the order in which workers serve them
WAKE = "reshard.wake"  # the task that a wake is sent to
BELL = f"{PREFIX}bell"
SHARES = f"{PREFIX}shares"  # hash: submitter -> how many jobs of theirs are begun for each one of another's
PLACES = (f"{PREFIX}held", *(f"{queue}:{place}" for queue in QUEUES for place in ("due", "waked")))  # of wakes.lua
DUE_AT_ONCE = 100  # wakes that one look sends; the rest is due at the next


def ring(pipe: redis.client.Pipeline) -> None:
    """Have control look at once."""
    pipe.lpush(BELL, "look")
    pipe.ltrim(BELL, 0, 999)


def strays(client: redis.Redis) -> list[str]:
    """Jobs that have not ended and are in no place of the queue."""
    found = (client.zdiff([f"{PREFIX}jobs:{state}", *PLACES]) for state in JobState if not state.ended)
    return [id for ids in found for id in texts(ids)]


class Wakes:
    """Sends wakes. Every method may raise redis-py's ConnectionError and TimeoutError."""

    def __init__(
        self, client: redis.Redis, send: Callable[[str, str], None], lease: float, night: Callable[[], tuple[int, int]]
    ) -> None:
        """``send(queue, job)`` sends one; ``lease`` in seconds; ``night`` as ``look`` of fleet.py."""
        self.redis = client
        self._night = night
        self._run = Scripts(client)
        self._send = send
        self._lease = ms(lease)
        self._resend = ms(min(RESEND, lease))  # a dead worker may have had the wake, too

    def hear(self, seconds: float) -> None:
        """Return when the bell rings, or after so many seconds."""
        self.redis.brpop([BELL], timeout=seconds)

    def share(self, shares: Mapping[str, float]) -> None:
        """Have these submitters' turns come so many times as often as others'."""
        with self.redis.pipeline() as pipe:
            pipe.delete(SHARES)
            for submitter, share in shares.items():
                pipe.hset(SHARES, submitter, str(share))
            pipe.execute()

    def mend(self) -> bool:
        """Remove keys of the queue that a client wrote over; returns whether there were some."""
        found = False
        numbers = [*(f"{queue}:serves" for queue in QUEUES), f"{PREFIX}last_turn"]
        sets = [f"{PREFIX}{name}" for name in ("jobs", "ids", *(f"jobs:{state}" for state in JobState))]
        sets += [*PLACES, *(f"{queue}:{what}" for queue in QUEUES for what in ("order", "left"))]
        kinds = dict.fromkeys(sets, b"zset")
        kinds |= dict.fromkeys((*QUEUES, BELL, *SUBMIT, TAKEN), b"list")
        hashes = [f"{PREFIX}{name}" for name in ("pace", "seen", "active", "fleet", "fleet:drained", "fleet:resting")]
        kinds |= dict.fromkeys((*hashes, SHARES, TOTALS), b"hash")
        kinds |= dict.fromkeys(numbers, b"string")
        types = dict(zip(kinds, at_once(self.redis, lambda pipe: [pipe.type(key) for key in kinds]), strict=True))
        for key in numbers:
            text = cast("bytes | None", self.redis.get(key)) if types[key] == b"string" else None
            if text is not None and not re.fullmatch(rb"[0-9]{1,18}", text):
                types[key] = b"text"
        for key, kind in kinds.items():
            if types[key] not in {kind, b"none"}:
                self.redis.delete(key)
                log.error("removed %s, which a client had overwritten", key)
                found = True
        return found

    def ring_strays(self) -> None:
        """Have jobs that are in no place of the queue looked at."""
        for job in strays(self.redis):
            if self._run("stray", job):
                log.warning("job %s was in no queue; queued it again", job)
            else:
                log.error("job %s cannot run: a client overwrote or deleted %s or a key next to it", job, job_key(job))

    def due(self) -> int:
        """Send the wakes that are due, and again those that got lost, interactive jobs' first; returns how many."""
        answer = texts(self._run("due", self._resend, DUE_AT_ONCE, *self._night(), self._lease))
        for job, queue in zip(answer[::2], answer[1::2], strict=True):
            self.wake(queue, job)
        return len(answer) // 2

    def first(self, queue: str) -> str | None:
        """The job that a wake from ``queue`` is for."""
        return next(iter(texts(self.redis.zrange(f"{queue}:order", 0, 0))), None)

    def pass_over(self, job: str) -> None:
        """Take one whose record cannot be read out of the line; ``ring_strays`` tells of it."""
        self._run("pass_over", job)

    def wake(self, queue: str, job: str) -> None:
        """Send the wake that a step asks for; an empty ``queue`` asks for none."""
        if queue:
            self._send(queue, job)
