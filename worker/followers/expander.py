"""What asks the Hub what a catalog comes to: a thread beside control's loop, because that may take minutes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from uuid import uuid4

import redis
from pydantic import ValidationError

from reshard.pipeline.catalogs.definition import parse
from reshard.pipeline.catalogs.expand import expand, interleaved, stands
from reshard.pipeline.copying.loop import Stopped
from reshard.pipeline.errors import BadCatalog, CatalogNotFound, CatalogState, ReshardError
from reshard.pipeline.stores.connect import Context
from reshard.pipeline.validation import first_problem
from reshard.worker.followers.cursor import Cursor
from reshard.worker.followers.records import Definition, Entry, entry_of

log = logging.getLogger(__name__)

EXPAND_AGAIN = 60.0  # seconds before it is tried again when the Hub was away


class Unreadable(Exception):
    """What a client could read that submitted it: a newer one."""


Rows = list[tuple[Entry, ReshardError | None]]


def expanded(definition: Definition, context: Context, catalogs: Cursor) -> tuple[Rows, list[int]]:
    """What a catalog comes to now, owners taking turns, and which of its entries find no model.

    Raises Unreadable, BadCatalog for what it comes to, the HubError and AccessError families.

    Where the broker knows nothing of an entry, its target is asked. What it says is kept at once: asking thousands may
    take longer than this process lives.
    """
    try:
        catalog = parse(definition.text, definition.name)
    except BadCatalog as error:
        raise Unreadable(str(error)) from error
    found = expand(catalog, context)
    wanted = [(one, entry_of(one)) for one in interleaved(found.models)]
    standings = catalogs.standings(definition.name, [entry for _, entry in wanted])
    for (one, entry), standing in zip(wanted, standings, strict=True):
        if standing == "unknown" and stands(one, context):
            catalogs.remember(definition.name, entry)
    for one, _ in wanted:
        if one.error is not None:
            again = f"run `reshard catalog retry {definition.name}`"
            one.error.facts |= {"again": again, "where": " for the control process and restart it"}
            one.error.facts.setdefault("sign_in", "set HF_TOKEN or RESHARD_CREDENTIALS for the control process")
    return [(entry, one.error) for one, entry in wanted], found.empty


class Expander:
    """Expands catalogs beside control's loop, one at a time, because asking a Hub may take minutes."""

    def __init__(
        self,
        catalogs: Cursor,
        expand: Callable[[Definition], tuple[Rows, list[int]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._catalogs = catalogs
        self._expand = expand
        self._clock = clock
        self._token = uuid4().hex
        self._thread: threading.Thread | None = None
        self._at = ("", "")  # the catalog and the run that the thread expands
        self._dropped = threading.Event()
        self._again: dict[str, float] = {}  # run -> when it may be tried again
        self._left: dict[str, str] = {}  # catalog -> its run that cannot be read here

    @property
    def busy(self) -> bool:
        """Whether one is asked about now."""
        return self._thread is not None and self._thread.is_alive()

    def look(self, waiting: Iterable[str]) -> None:
        """Take on one of the catalogs that wait, keep what was taken on, and drop what waits no more."""
        busy, wanted = self.busy, False
        for name in waiting:
            if busy and name != self._at[0]:
                continue
            run = self._catalogs.claim(name, self._token, self._left.get(name, ""))
            if busy:
                wanted = (name, run) == self._at
            elif run and self._again.get(run, 0.0) <= self._clock():
                self._at = (name, run)
                self._dropped.clear()
                self._thread = threading.Thread(target=self._work, args=self._at, name=name, daemon=True)
                self._thread.start()
                busy = wanted = True
        if not wanted:
            self._dropped.set()

    def check(self) -> None:
        """Raises Stopped when what is expanded is wanted no more: it may wait for the Hub for an hour."""
        if self._dropped.is_set():
            raise Stopped("cancel")

    def _work(self, name: str, run: str) -> None:
        try:
            self._attempt(name, run)
        except redis.RedisError as error:
            log.warning("catalog %s will be expanded again; the broker was unavailable: %s", name, error)

    def _attempt(self, name: str, run: str) -> None:
        try:
            rows, empty = self._expand(self._definition(name))
            log.info("catalog %s: %s entries", name, len(rows))
            self._catalogs.fill(name, run, self._token, rows, empty)
        except Unreadable as error:
            self._left[name] = run
            log.error("cannot read catalog %s here; leaving it to another control process: %s", name, error)
            self._catalogs.delay(name, run, self._token, f"waiting for a newer control process: {error}")
        except ReshardError as error:
            log.warning("cannot expand catalog %s: %s", name, error, extra=error.logged)
            if error.retryable:
                self._again[run] = self._clock() + EXPAND_AGAIN
                self._catalogs.delay(name, run, self._token, f"{error}; trying again")
            else:
                self._refuse(name, run, error)
        except Stopped as stopped:
            log.info("stopped expanding catalog %s: %s", name, stopped.reason)
        except redis.RedisError:
            raise
        except Exception as error:
            log.exception("catalog %s failed for an unknown reason", name)
            self._refuse(name, run, ReshardError(what=f"{type(error).__name__}: {error}"))

    def _definition(self, name: str) -> Definition:
        try:
            return self._catalogs.definition(name)
        except ValidationError as error:
            first = first_problem(error)
            raise Unreadable(f"{first.where or 'its record'}: {first.why}") from error

    def _refuse(self, name: str, run: str, error: ReshardError) -> None:
        try:
            self._catalogs.refuse(name, run, self._token, error)
        except (CatalogState, CatalogNotFound) as ended:
            log.info("catalog %s ended meanwhile: %s", name, ended)
