"""What workers and control log: text or JSON, and one line for the start and one for the end of each job.

A job starts when a worker first claims it after a submit or a retry, and that worker logs it. Its end is logged by the
worker that brought it about; that of a job that a client cancelled, by control.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

from reshard.pipeline.errors import BrokerUnavailable, JobNotFound
from reshard.pipeline.request import Request
from reshard.worker.queue.jobs import JobStore
from reshard.worker.settings import LogFormat

log = logging.getLogger("reshard.jobs")

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_OF_EVERY_RECORD = logging.makeLogRecord({}).__dict__.keys() | {"message", "asctime"}


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, what ``extra`` adds, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        data = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        data |= {name: value for name, value in record.__dict__.items() if name not in _OF_EVERY_RECORD}
        if record.exc_info:
            data["traceback"] = record.exc_text or self.formatException(record.exc_info)
        return json.dumps(data, default=str)


def configure(how: LogFormat) -> None:
    """Log to stderr from INFO on, warnings of Python included, and of Celery no more than warnings."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if how == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)
    logging.getLogger("celery").setLevel(logging.WARNING)
    logging.getLogger("celery.worker.request").addFilter(_without_traceback)


def _without_traceback(record: logging.LogRecord) -> bool:
    """Of a child that was killed Celery's line says all; its traceback is one of Celery's own insides."""
    record.exc_info = record.exc_text = None
    return True


def job_started(id: str, request: Request) -> None:
    places = {"source": str(request.source), "target": str(request.target)}
    text = "job %(job)s starts: %(source)s -> %(target)s"
    _say(text, {"event": "started", "job": id, **places})


def job_ended(store: JobStore, id: str) -> None:
    """Where the broker, or the job, is gone just then, the line has no figures; bytes are those of sealed shards."""
    try:
        job = store.get(id)
    except (BrokerUnavailable, JobNotFound) as error:
        log.warning("job %s ended, more is not known: %s", id, error, extra={"event": "ended", "job": id})
        return
    facts = {
        "event": "ended", "job": id, "state": str(job.state), "source": str(job.request.source),
        "target": str(job.request.target), "bytes": job.bytes_done, "seconds": round(job.since - job.started, 3),
        "commit": (job.published or {}).get("commit"), "code": (job.error or {}).get("code"),
    }  # fmt: skip
    text = "job %(job)s %(state)s: %(source)s -> %(target)s, %(bytes)s bytes, %(seconds)s s"
    _say(
        text + (", commit %(commit)s" if facts["commit"] else "") + (", error[%(code)s]" if facts["code"] else ""),
        facts,
    )


def _say(text: str, facts: dict[str, object]) -> None:
    log.info(text, facts, extra=facts)
