"""What workers and control log: text or JSON, and one line for the start and one for the end of each job.

What a worker logs while it has a unit is also kept with the job (keeper.py hands it on).

A job starts when a worker first claims it after a submit or a retry, and that worker logs it. Control logs each end
from the stream of events (followers/counters.py), whatever becomes of who brought it about.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from logging.handlers import QueueHandler
from typing import Any, cast

from reshard.pipeline.errors import JobNotFound, JobUnreadable, ReshardError
from reshard.pipeline.request import Request
from reshard.pipeline.text import guard_logs, printable, without_secrets
from reshard.worker.queue.events import Event
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.record import LogLine
from reshard.worker.settings import LogFormat

log = logging.getLogger("reshard.jobs")

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
LINES = 200  # of a job that are kept: most jobs have some ten, of 170 bytes each, and none takes more than 130 kB
LINE_MAX = 500  # characters of one; no line of ours is longer, and a library may log a whole answer
_at_work: dict[str, object] = {}  # what this process does; of its threads, too, and it does one unit at a time
_OF_EVERY_RECORD = logging.makeLogRecord({}).__dict__.keys() | {"message", "asctime"}


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, the unit at work, what ``extra`` adds, and a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        data: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        data |= _at_work
        data |= {name: value for name, value in record.__dict__.items() if name not in _OF_EVERY_RECORD}
        if record.exc_info:
            data["traceback"] = record.exc_text or self.formatException(record.exc_info)
        return without_secrets(json.dumps(data, default=str))  # what ``extra`` adds is in no message


class _OfTheUnit(QueueHandler):
    """Keeps what is logged during a unit until it is taken; where that takes long, the oldest lines go.

    A record that cannot be formatted it reports as every handler does, and raises nothing.
    """

    def __init__(self) -> None:
        self.lines: deque[LogLine] = deque(maxlen=LINES)
        super().__init__(cast(Any, self.lines))  # no queue of Python's drops the oldest
        self.setLevel(logging.INFO)
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))

    def prepare(self, record: logging.LogRecord) -> list[LogLine]:
        at = _at_work.copy()  # which may end meanwhile, in another thread
        if not at:
            return []
        unit, worker, lines = str(at["unit"]), str(at["worker"]), []
        for text in without_secrets(self.format(record)).split("\n"):  # a traceback has several
            text = printable(text)
            text = text if len(text) <= LINE_MAX else f"{text[: LINE_MAX - 1]}…"
            lines.append(LogLine(round(record.created, 3), record.levelname, unit, worker, text))
        return lines

    def enqueue(self, lines: Any) -> None:
        self.lines.extend(lines)


_of_the_unit = _OfTheUnit()


def taken() -> list[str]:
    """The lines of the unit at work since the last call, as they are stored; ``LINES`` at most."""
    lines = _of_the_unit.lines
    return [json.dumps(asdict(lines.popleft())) for _ in range(len(lines))]


def configure(how: LogFormat) -> None:
    """Log to stderr from INFO on, warnings of Python included, and of Celery and HTTP no more than warnings."""
    guard_logs()
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if how == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=logging.INFO, handlers=[handler, _of_the_unit], force=True)
    logging.captureWarnings(True)
    for chatty in ("celery", "httpx", "httpx2"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    logging.getLogger("celery.worker.request").addFilter(_without_traceback)


class Outage:
    """For one place that tries the broker again and again: it logs why it cannot, and that it can again, each once."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said: set[type[Exception]] = set()  # what each says differs from try to try

    def say(self, what: str, error: Exception) -> None:
        if type(error) not in self._said:
            self._log.warning("%s: %s", what, error)
        self._said.add(type(error))

    def over(self) -> None:
        if self._said:
            self._log.info("the broker is available again")
        self._said.clear()


def _without_traceback(record: logging.LogRecord) -> bool:
    """Of a child that was killed Celery's line says all; its traceback is one of Celery's own insides."""
    record.exc_info = record.exc_text = None
    return True


@contextmanager
def at_work(fields: Mapping[str, object]) -> Iterator[None]:
    """Inside, every JSON line of this process has the fields, whoever writes it, and is kept for the job."""
    _at_work.update(fields)
    try:
        yield
    finally:
        _at_work.clear()
        _of_the_unit.lines.clear()  # what was not handed on in time is in this process's own log


def job_started(id: str, request: str | bytes, worker: str) -> None:
    """``request`` is as stored; one that this release cannot read fails the step, and not the claim before it."""
    facts: dict[str, object] = {"event": "started", "job": id, "worker": worker}
    with suppress(ReshardError, ValueError):
        facts |= _places(Request.known(request)[0])
    _say("job %(job)s started", facts)


def job_ended(store: JobStore, event: Event) -> dict[str, object]:
    """Returns the facts of the line. Bytes are of stored shards; without figures where the job has gone on since."""
    state, error = event.fields["state"], json.loads(event.fields["error"] or "{}")
    code = error.get("code")
    facts: dict[str, object] = {"event": "ended", "job": event.fields["job"], "state": state, "code": code}
    facts["request_id"] = error.get("facts", {}).get("request_id")
    end = ", error[%(code)s]" if code else ""
    try:
        job = store.get(event.fields["job"])
        facts |= _places(job.request)
        if job.state == state and job.since <= event.at / 1000:
            commit = (job.published or {}).get("commit")
            facts |= {"bytes": job.bytes_done, "seconds": round(job.since - job.started, 3), "commit": commit}
            end = ", %(bytes)s bytes, %(seconds)s s" + (", commit %(commit)s" if commit else "") + end
    except (JobNotFound, JobUnreadable, KeyError, ValueError) as lost:  # deleted, or a newer release wrote it
        log.warning("job %s ended, but its details are gone: %s", event.fields["job"], lost)
    _say("job %(job)s %(state)s", facts, end)
    return facts


def _places(request: Request) -> dict[str, object]:
    return {"source": str(request.source), "target": str(request.target)}


def _say(text: str, facts: dict[str, object], end: str = "") -> None:
    log.info(text + (": %(source)s -> %(target)s" if "source" in facts else "") + end, facts, extra=facts)
