"""Notices: what the hooks of the operators get when a night failed, went well again, or did not happen.

    reshard:notices:stream   the last day's notices, 1,000 at most; each hook is a consumer group that reads it
    reshard:notices:took:ID  the services of Apprise that took a notice which others did not take yet

Outcomes (outcomes.py) appends a notice in the transaction that notes what happened. Each hook's group tells it, tries
again after pauses that double, and gives up when the stream no longer has it. What a process was telling when it died
is sent by the next after ``NOTIFY_LEASE``, so a notice may come twice, under one id.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shlex
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, Literal, Protocol, cast
from uuid import uuid4

import httpx2
import redis

from reshard.pipeline.errors import BadSetting, ExtraMissing, NoticeFailed
from reshard.pipeline.stores.retry import describe
from reshard.pipeline.text import counted
from reshard.worker.logs import Outage
from reshard.worker.queue.events import TOTALS, create_group, forget_jump
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.scripts import BROKER_UNAVAILABLE, PREFIX, Pipeline, decoded, ms, texts
from reshard.worker.settings import Settings

log = logging.getLogger(__name__)

NOTICES = f"{PREFIX}notices:stream"
TOOK = f"{PREFIX}notices:took:"  # and a notice's id: a set of those of Apprise's services that need not get it again
NOTICES_MAX = 1000  # after that the oldest goes, or a broken hook would fill the broker
NOTIFY_TIMEOUT = 10.0  # seconds that a hook may take for one notice
NOTIFY_LEASE = 60.0  # seconds; well above what one try takes, so that two controls do not tell the same
NOTIFY_LOOK = 1.0  # seconds between two looks into an outbox
NOTIFY_FIRST = 10.0  # seconds before a notice is tried again; doubles each time
NOTIFY_MAX = 900.0  # seconds; a receiver that is away all night is asked four times an hour
NOTIFY_FOR = 86_400.0  # seconds; a notice that nobody took in a day is old news, and is counted as dropped
WAITING = "waiting"  # the consumer that has what was tried in vain, and waits for its next try

JSON = {"content-type": "application/json"}
IN_ENVIRONMENT = ("id", "kind", "what", "name", "text", "next")
STDERR = 2  # a command's own words belong in control's log, and a person's --json stays JSON

# failed: a job or a catalog's run did not end well; recovered: the first that did after that; missed: a time passed and
# fired nothing, or too late; test: a trial of the hooks
Kind = Literal["failed", "recovered", "missed", "test"]


@dataclass(frozen=True, slots=True)
class Notice:
    """One thing to tell. ``id`` stays the same however often it is sent; ``at`` in seconds since the epoch."""

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
        return cls(id, now.timestamp(), "test", "hook", "test", "a test notification from reshard", "")

    @classmethod
    def read(cls, fields: Mapping[str, str]) -> Notice:
        """What ``keep`` kept."""
        error = json.loads(fields["error"]) if fields.get("error") else None
        numbers = {key: value for key, value in json.loads(fields.get("counts", "{}")).items() if value}
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
    subject, kind = f"{fields['what']} {fields['name']}", fields["kind"]
    if kind == "recovered":
        return f"{subject} succeeded again"
    if kind == "missed":
        due = datetime.fromtimestamp(int(fields["due"]) / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
        return f"{subject}, due on {due}: {_MISSED.get(fields['outcome'], fields['outcome']).format(job=fields['job'])}"
    if error is not None:
        return f"{subject} failed: job {fields['job']}: {error['code']}: {error['message']}"
    if fields.get("state") == "failed":
        return f"cannot expand {subject}: {fields['note']}"
    parts = [f"stopped: {fields['note']}"] if fields.get("state") == "stopped" else []
    if codes:
        ranked = ", ".join(f"{code} {number:,}" for code, number in Counter(codes).most_common())
        parts.append(f"{sum(codes.values()):,} of {int(fields['entries']):,} models failed: {ranked}")
    return f"{subject}: {'; '.join(parts)}"


_MISSED = {
    "fired": "fired late: no control process was running",
    "missed": "skipped: no control process was running",
    "overlap": "skipped: previous run still in progress",
    "full": "skipped: it has reached the limit of queued jobs per submitter",
    "busy": "skipped: job {job} is writing to the same target for another request",
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
            raise NoticeFailed(hook=self.name, why=f"cannot start it: {error.strerror}") from None
        try:
            process.communicate(notice.to_json(), timeout=NOTIFY_TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with all that it started
            process.wait()
            raise NoticeFailed(hook=self.name, why=f"it ran for more than {NOTIFY_TIMEOUT:.0f} s") from None
        if process.returncode != 0:
            raise NoticeFailed(hook=self.name, why=f"it exited with {process.returncode}")


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
            raise NoticeFailed(hook=self.name, why="not a valid URL") from None
        if not 200 <= status < 300:
            raise NoticeFailed(hook=self.name, why=f"HTTP {status}")


class Services:
    """Tells services that Apprise knows by their URLs, all at once; a notice is told again to those that failed."""

    name = "apprise"

    def __init__(self, urls: Sequence[str], client: redis.Redis | None = None) -> None:
        """``client`` is of the broker, which remembers who took a notice. Raises ExtraMissing and BadSetting."""
        try:
            import apprise
        except ImportError:
            raise ExtraMissing(package="apprise", extra="apprise", who="RESHARD_NOTIFY_APPRISE") from None
        logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)  # its messages name URLs, which hold secrets
        self._redis: Any = client
        self._services: dict[str, Any] = {}
        for number, url in enumerate(urls, 1):
            service = self._services[hashlib.sha256(url.encode()).hexdigest()] = apprise.Apprise()
            if not service.add(url):
                raise BadSetting(
                    name="RESHARD_NOTIFY_APPRISE", value="...", why=f"URL number {number} is not supported by Apprise"
                )

    def tell(self, notice: Notice) -> None:
        about = {
            "title": _plain(f"reshard: {notice.what} {notice.name} {notice.kind}"),
            "body": _plain("\n".join(line for line in (notice.text, notice.next) if line)),
            "notify_type": _SEVERITY[notice.kind],
            "body_format": "text",  # names are no markup
            "timeout": NOTIFY_TIMEOUT,
        }
        key = f"{TOOK}{notice.id}"
        took = set(texts(self._redis.smembers(key))) if self._redis else set()
        left = {name: service for name, service in self._services.items() if name not in took}
        with ThreadPoolExecutor(len(self._services)) as pool:
            well = dict(zip(left, pool.map(lambda service: bool(service.notify(**about)), left.values()), strict=True))
        if failed := [left[name] for name in left if not well[name]]:
            if self._redis and (now := [name for name in left if well[name]]):
                self._redis.sadd(key, *now)
                self._redis.expire(key, round(NOTIFY_FOR))
            names = ", ".join(sorted({str(part.service_name) for service in failed for part in service}))
            raise NoticeFailed(hook="Apprise service", why=f"{names} failed")


_SEVERITY: dict[Kind, str] = {"failed": "failure", "recovered": "success", "missed": "warning", "test": "info"}
HOOKS = (Command.name, Url.name, Services.name)


def hooks(settings: Settings, client: redis.Redis | None = None) -> list[Hook]:
    """Those that are set, of a broker or to be tried. Raises ExtraMissing and BadSetting."""
    command, url, services = settings.notify_command, settings.notify_url, settings.notify_apprise
    found: list[Hook] = []
    if command:
        found.append(Command(shlex.split(command.get_secret_value())))
    if url:
        found.append(Url(url.get_secret_value()))
    if services:
        found.append(Services(services.get_secret_value().split(), client))
    return found


def keep(at: int, **fields: str) -> Callable[[Pipeline], Any]:
    """Writes a notice for the hooks; nothing where no control ever had one. ``at`` in ms since the epoch."""
    data = cast(Any, {"at": at, **fields})
    return lambda pipe: pipe.xadd(NOTICES, data, maxlen=NOTICES_MAX, approximate=False, nomkstream=True)


class Notifier:
    """Tells notices, beside control's loop, which it never holds up."""

    def __init__(self, store: JobStore, hooks: Sequence[Hook]) -> None:
        self._redis: Any = store.redis
        self._hooks = hooks
        self._me = uuid4().hex

    def listen(self) -> None:
        """Have notices kept for these hooks from now on, and drop those of a day ago."""
        for hook in self._hooks:
            create_group(self._redis, NOTICES, hook.name, "$")
        seconds, _ = self._redis.time()
        self._redis.xtrim(NOTICES, minid=str(ms(seconds - NOTIFY_FOR)), approximate=False)
        self._drop_of_others()

    def _drop_of_others(self) -> None:
        """Drop what the stream has no more of hooks that are not set here, as no control may have them any more.

        Their groups stay, as another control may have the hook, or this one again.
        """
        for hook in {hook for hook, left in waiting(self._redis).items() if left} - {hook.name for hook in self._hooks}:
            seen = self._redis.xinfo_stream(NOTICES)
            gone = f"({first[0].decode()}" if (first := seen["first-entry"]) else seen["last-generated-id"].decode()
            for entry in self._redis.xpending_range(NOTICES, hook, "-", gone, NOTICES_MAX):
                if self._end(hook, id := entry["message_id"].decode(), "dropped"):
                    log.error("notification %s dropped: the %s hook is not set for this control process", id, hook)

    def start(self, ending: threading.Event) -> None:
        """Tell, each hook in a thread of its own, until ``ending``."""
        for hook in self._hooks:
            threading.Thread(target=self._run, args=(hook, ending), name=f"notify-{hook.name}", daemon=True).start()

    def _run(self, hook: Hook, ending: threading.Event) -> None:
        outage = Outage(log)
        while not ending.wait(NOTIFY_LOOK):
            try:
                while not ending.is_set() and self.tell(hook):
                    pass
                outage.over()
            except BROKER_UNAVAILABLE as error:
                outage.say("notifications are waiting for the broker", error)
            except Exception:
                log.exception("the %s hook failed to send a notification for an unknown reason; retrying", hook.name)

    def tell(self, hook: Hook) -> str | None:
        """Try the next notice whose time has come; returns ``told``, ``again`` or ``dropped``, None when none has.

        May raise redis-py's ConnectionError and TimeoutError.
        """
        if (found := self._next(hook.name)) is None:
            return None
        id, fields, attempt = found
        about = f"notice {id}"
        if not fields:
            log.error("%s: dropped after %s by the %s hook", about, counted(attempt, "attempt"), hook.name)
            return "dropped"
        about += f", {fields['what']} {fields['name']} {fields['kind']}"
        try:
            hook.tell(Notice.read({"id": id, **fields}))
        except NoticeFailed as error:
            pause = _pause(attempt)
            log.warning("%s: attempt %s: %s; trying again in %.0f s", about, attempt, error, pause)
            self._redis.xclaim(NOTICES, hook.name, WAITING, 0, [id], justid=True)
            self._redis.hincrby(TOTALS, f"notices:{hook.name}:failed", 1)
            return "again"
        self._end(hook.name, id, "told")
        log.info("%s: delivered by the %s hook", about, hook.name)
        return "told"

    def _next(self, hook: str) -> tuple[str, dict[str, str], int] | None:
        """The id, the fields and the try of a notice that is this process's to tell now; no fields: it is gone."""
        for _, new in self._redis.xreadgroup(hook, self._me, {NOTICES: ">"}, count=1):
            return new[0][0].decode(), decoded(new[0][1]), 1
        forget_jump(self._redis, NOTICES, hook, ms(max(NOTIFY_LEASE, NOTIFY_MAX)))
        for entry in self._redis.xpending_range(NOTICES, hook, "-", "+", NOTICES_MAX):
            id, tries = entry["message_id"].decode(), entry["times_delivered"]
            wait = _pause(tries) if entry["consumer"] == WAITING.encode() else NOTIFY_LEASE
            if not self._redis.xrange(NOTICES, id, id):
                if self._end(hook, id, "dropped"):
                    return id, {}, tries
            elif entry["time_since_delivered"] >= ms(wait):
                for _, data in self._redis.xclaim(NOTICES, hook, self._me, ms(wait), [id]):
                    return id, decoded(data), tries + 1
        return None

    def _end(self, hook: str, id: str, how: str) -> bool:
        """Whether it was for this process to end."""
        ended = bool(self._redis.xack(NOTICES, hook, id))
        if ended:
            self._redis.hincrby(TOTALS, f"notices:{hook}:{how}", 1)
        return ended


def waiting(client: redis.Redis) -> dict[str, int]:
    """How many notices each hook has still to send."""
    found = dict.fromkeys(HOOKS, 0)
    if client.exists(NOTICES):
        kept = client.xlen(NOTICES)  # a lag may count what was never read and is in the stream no more
        for group in client.xinfo_groups(NOTICES):
            found[group["name"].decode()] = group["pending"] + min(group.get("lag") or 0, kept)
    return found


def _pause(tries: int) -> float:
    """Seconds between the last of so many tries and the next."""
    return float(min(NOTIFY_FIRST * 2 ** (tries - 1), NOTIFY_MAX))


def _plain(text: str) -> str:
    """As an environment variable and any service can hold it."""
    return text.encode(errors="replace").decode().replace("\0", " ")
