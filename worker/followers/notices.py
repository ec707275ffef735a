"""Notices: what operators are told by a command or a URL when a night failed, went well again, or did not happen.

The step of Redis in which a job or a catalog ends, or a time passes, puts a notice into the outbox of each hook
(lua/common.lua). Control takes it out under a lease, tries again after pauses that double, and gives up after a day. So
a notice outlives whoever was about to tell it; it may then be told twice, under one id.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, Literal, Protocol, cast

import httpx2

from reshard.pipeline.errors import NoticeFailed
from reshard.pipeline.stores.retry import describe
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.scripts import AWAY, PREFIX, texts
from reshard.worker.settings import (
    NOTIFY_FIRST,
    NOTIFY_FOR,
    NOTIFY_LEASE,
    NOTIFY_LOOK,
    NOTIFY_MAX,
    NOTIFY_TIMEOUT,
    Settings,
)

log = logging.getLogger(__name__)

JSON = {"content-type": "application/json"}
IN_ENVIRONMENT = ("id", "kind", "what", "name", "text", "next")
STDERR = 2  # a command's own words belong in control's log, and a person's --json stays JSON

# failed: a job or a catalog's run did not end well; recovered: the first that did after that; missed: a time passed and
# fired nothing, or too late; test: somebody tries the hooks
Kind = Literal["failed", "recovered", "missed", "test"]


@dataclass(frozen=True, slots=True)
class Notice:
    """One thing to tell. ``id`` stays the same however often it is told; ``at`` in seconds since the epoch."""

    id: str
    at: float
    kind: Kind
    what: str  # schedule, catalog
    name: str
    text: str  # one line for people
    next: str  # the command to type next
    schedule: str | None = None
    job: str | None = None
    error: dict[str, Any] | None = None  # the job's, as ReshardError.to_dict
    entries: int | None = None  # of the catalog
    counts: Mapping[str, int] | None = None  # outcome -> entries of the catalog
    codes: Mapping[str, int] | None = None  # error code -> how often

    def to_json(self) -> bytes:
        """What hooks are given."""
        return json.dumps({name: getattr(self, name) for name in self.__slots__}).encode()

    @classmethod
    def test(cls) -> Notice:
        now = datetime.now(UTC)
        id = f"test-{now.timestamp() * 1000:.0f}"
        return cls(id, now.timestamp(), "test", "hook", "test", "a test of reshard's notices: nothing is amiss", "")

    @classmethod
    def read(cls, fields: Mapping[str, str]) -> Notice:
        """What a step of Redis kept."""
        error = json.loads(fields["error"]) if fields.get("error") else None
        tally = json.loads(fields.get("counts", "[]")) or []
        numbers = {key: int(value) for key, value in zip(tally[::2], tally[1::2], strict=True) if int(value)}
        codes = {key.removeprefix("failed:"): value for key, value in numbers.items() if key.startswith("failed:")}
        return cls(
            id=fields["id"],
            at=int(fields["at"]) / 1000,
            kind=cast(Kind, fields["kind"]),
            what=fields["what"],
            name=fields["name"],
            text=_text(fields, error, codes),
            next=_next(fields),
            schedule=fields["name"] if fields["what"] == "schedule" else fields.get("schedule") or None,
            job=fields.get("job") or None,
            error=error,
            entries=int(fields["entries"]) if "entries" in fields else None,
            counts={key: value for key, value in numbers.items() if ":" not in key} if "counts" in fields else None,
            codes={error["code"]: 1} if error else codes or None,
        )


def _text(fields: Mapping[str, str], error: dict[str, Any] | None, codes: Mapping[str, int]) -> str:
    who, kind = f"{fields['what']} {fields['name']}", fields["kind"]
    if kind == "recovered":
        return f"{who} ended well again"
    if kind == "missed":
        due = datetime.fromtimestamp(int(fields["due"]) / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
        return f"{who}, due on {due}: {_MISSED[fields['outcome']].format(job=fields['job'])}"
    if error is not None:
        return f"{who} failed: job {fields['job']}: {error['code']}: {error['message']}"
    if fields.get("state") == "failed":
        return f"{who} could not be expanded: {fields['note']}"
    told = [f"stopped: {fields['note']}"] if fields.get("state") == "stopped" else []
    if codes:
        ranked = sorted(codes.items(), key=lambda item: -item[1])
        models = f"{sum(codes.values()):,} of {int(fields['entries']):,} models failed"
        told.append(f"{models}: {', '.join(f'{code} {number:,}' for code, number in ranked)}")
    return f"{who}: {'; '.join(told)}"


_MISSED = {
    "fired": "no control ran then, and it was fired late",
    "missed": "no control ran then, and it was left out",
    "overlap": "left out, because what it fired last is still at work",
    "busy": "left out, because job {job} has the target, with another request",
}


def _next(fields: Mapping[str, str]) -> str:
    if fields["kind"] == "missed":
        return f"reshard schedule show {fields['name']}"
    if fields["what"] == "schedule":
        return f"reshard status {fields['job']}"
    listed = fields["kind"] == "failed" and fields.get("state") != "failed"
    return f"reshard catalog {'failures' if listed else 'status'} {fields['name']}"


class Hook(Protocol):
    """Takes a notice within NOTIFY_TIMEOUT seconds, or raises NoticeFailed."""

    name: str

    def tell(self, notice: Notice) -> None: ...


class Command:
    """Runs a program, without a shell, that gets the notice as JSON on its stdin; exit code 0 means that it took it."""

    name = "command"

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = list(arguments)

    def tell(self, notice: Notice) -> None:
        told = {f"RESHARD_NOTICE_{what.upper()}": _plain(getattr(notice, what)) for what in IN_ENVIRONMENT}
        try:
            process = subprocess.Popen(
                self._arguments, env=os.environ | told, stdin=subprocess.PIPE, stdout=STDERR, start_new_session=True
            )
        except OSError as error:
            raise NoticeFailed(hook=self.name, why=f"it cannot be started: {error.strerror}") from None
        try:
            process.communicate(notice.to_json(), timeout=NOTIFY_TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with all that it started
            process.wait()
            raise NoticeFailed(hook=self.name, why=f"it ran for more than {NOTIFY_TIMEOUT:.0f} s") from None
        if process.returncode != 0:
            raise NoticeFailed(hook=self.name, why=f"it ended with {process.returncode}")


class Url:
    """Posts the notice as JSON; an answer of 2xx means that it was taken. Redirects are not followed."""

    name = "url"

    def __init__(self, url: str) -> None:
        self._url = url  # may hold a token, so that no message names it
        self._client = httpx2.Client(timeout=NOTIFY_TIMEOUT, headers={"user-agent": f"reshard/{version('reshard')}"})

    def tell(self, notice: Notice) -> None:
        try:
            with self._client.stream("POST", self._url, content=notice.to_json(), headers=JSON) as answer:
                status = answer.status_code
        except httpx2.TransportError as error:
            raise NoticeFailed(hook=self.name, why=describe(error)) from None
        except httpx2.InvalidURL:
            raise NoticeFailed(hook=self.name, why="it is no URL that can be asked") from None
        if not 200 <= status < 300:
            raise NoticeFailed(hook=self.name, why=f"it answered {status}")


HOOKS = (Command.name, Url.name)  # as common.lua has them


def hooks(settings: Settings) -> list[Hook]:
    """Those that are set."""
    found: list[Hook] = []
    if settings.notify_command is not None:
        found.append(Command(shlex.split(settings.notify_command.get_secret_value())))
    if settings.notify_url is not None:
        found.append(Url(settings.notify_url.get_secret_value()))
    return found


class Notifier:
    """Tells what is in the outboxes, beside control's loop, which it never holds up."""

    def __init__(self, store: JobStore, hooks: Sequence[Hook]) -> None:
        self._store = store
        self._hooks = hooks

    def listen(self) -> None:
        """Have notices kept for these hooks, for as long as they would be told."""
        for hook in self._hooks:
            self._store.redis.set(f"{PREFIX}hooked:{hook.name}", 1, px=_ms(NOTIFY_FOR))

    def start(self, ending: threading.Event) -> None:
        """Tell, each hook in a thread of its own, until ``ending``."""
        for hook in self._hooks:
            threading.Thread(target=self._run, args=(hook, ending), name=f"notify-{hook.name}", daemon=True).start()

    def _run(self, hook: Hook, ending: threading.Event) -> None:
        while not ending.wait(NOTIFY_LOOK):
            try:
                while not ending.is_set() and self.tell(hook):
                    pass
            except AWAY as error:
                log.warning("notices wait for the broker: %s", error)
            except Exception:
                log.exception("a notice met what the %s hook does not know; it is tried again", hook.name)

    def tell(self, hook: Hook) -> str | None:
        """Try the next notice whose time has come: told, again, dropped, lost to another control; None when none has.

        May raise redis-py's ConnectionError and TimeoutError.
        """
        answer = texts(self._store.run("notice_claim", hook.name, _ms(NOTIFY_LEASE)))
        if not answer:
            return None
        fields = dict(zip(answer[::2], answer[1::2], strict=True))
        attempt = int(fields["attempts"])
        delay = min(NOTIFY_FIRST * 2 ** (attempt - 1), NOTIFY_MAX)
        why = ""
        try:
            hook.tell(Notice.read(fields))
        except NoticeFailed as error:
            why = str(error)
        ended = str(
            self._store.run(
                "notice_end", hook.name, fields["id"], attempt, int(not why), _ms(delay), _ms(NOTIFY_FOR)
            ).decode()
        )
        said = f"notice {fields['id']}, {fields['what']} {fields['name']} {fields['kind']}"
        if ended == "dropped":
            log.error("%s: given up after %s tries: %s", said, attempt, why)
        elif why:
            log.warning("%s: try %s: %s; again in %.0f s", said, attempt, why, delay)
        else:
            log.info("%s: told by the %s hook", said, hook.name)
        return ended


def _plain(text: str) -> str:
    """As an environment variable can hold it."""
    return text.encode(errors="replace").decode().replace("\0", " ")


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
