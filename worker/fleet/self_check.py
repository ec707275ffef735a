"""How a worker notices that the fault is its own, rests, and comes back.

Its children count the failures in a row that blame the machine and not the job (``ReshardError.blames_worker``): a full
disk, a temporary folder that is gone, a token that was revoked. After REST_AFTER the main process tries itself. When a
fault is found it takes no more work, as if it were drained, and tries itself again at growing intervals. A try is a
process of its own, so that neither a slow Hub nor a full memory stops the main process's event loop.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from reshard.pipeline.doctor.probes import probe_hub
from reshard.pipeline.errors import (
    DiskFull,
    PackageMissing,
    ReshardError,
    TempDirUnusable,
    TokenMissing,
    TokenRefused,
)
from reshard.pipeline.errors.base import GO_ON
from reshard.pipeline.errors.machine import of_the_machine
from reshard.pipeline.limits import MB
from reshard.pipeline.stores.connect import Context
from reshard.pipeline.stores.scratch import full_disk_errors
from reshard.worker.broker import broker_url
from reshard.worker.fleet.fleet import Fleet
from reshard.worker.queue.jobs import open_redis
from reshard.worker.settings import REST_AFTER, REST_FIRST, REST_MAX, SELF_CHECK_TIMEOUT, Settings, settings
from reshard.worker.temp_dir import ProcessTempDir

log = logging.getLogger(__name__)

PROBE_MAX = 64 * MB  # bytes that a try writes; quotas and full disks show themselves only when written to
_TOKEN_ERRORS = (TokenMissing.code, TokenRefused.code)

# What the children tell the main process: failures in a row, 1 when a unit was done since the last rest, the cause.
shared = mmap.mmap(-1, 8192)  # anonymous and shared, as in drain.py
_COUNT, _WELL, _CAUSE = 0, 1, 2
_FACTS = ("needed", "endpoint")  # what a try has to know of an error
# Errors that a request can cause on a fit machine, by a credential or a source that does not exist, and of which a try
# sees whether the machine caused them. Of others, such as missing packages, a try may see nothing.
_SEEN = ("access.", "source.")


def named(error: Exception, tmpdir: Path | None) -> ReshardError:
    """``error`` in our own words: also one of the machine that no layer below had a name for.

    ``tmpdir`` is the folder for temporary files, if there was one.
    """
    if isinstance(error, ReshardError):
        return error
    if isinstance(error, ImportError):
        return PackageMissing(what=str(error))
    if exhausted := of_the_machine(error, tmpdir):
        return exhausted
    if isinstance(error, OSError) and tmpdir and not (tmpdir.is_dir() and os.access(tmpdir, os.W_OK | os.X_OK)):
        return TempDirUnusable(path=str(tmpdir), why=error.strerror or str(error))
    log.error("failed for an unknown reason", exc_info=error)
    return ReshardError(what=f"{type(error).__name__}: {error}")


def failed(kind: str, error: ReshardError) -> None:
    """In a child: a unit of this kind failed for a cause of the machine."""
    cause = {"kind": kind, "code": error.code, "message": str(error)[:1000], "hint": error.next_step[:1000]}
    cause |= {name: error.facts[name] for name in _FACTS if name in error.facts}
    text = json.dumps(cause).encode()[: len(shared) - _CAUSE]
    shared[_CAUSE:] = text.ljust(len(shared) - _CAUSE, b"\0")
    shared[_COUNT] = min(shared[_COUNT] + 1, 255)


def succeeded(kind: str) -> None:
    """In a child: a unit of this kind was done. Another kind proves nothing: plans are made without a disk."""
    if _cause().get("kind") == kind:
        shared[_COUNT], shared[_WELL] = 0, 1


def _cause() -> dict[str, Any]:
    """The last failure. Two children may have written at once, and then nothing more is known than that they failed."""
    try:
        cause: dict[str, Any] = json.loads(shared[_CAUSE:].rstrip(b"\0"))
    except ValueError:
        return {"code": ReshardError.code, "message": "several tasks failed at once", "hint": "see its log"}
    return cause


class SelfCheck:
    """Whether this worker rests; kept by its main process."""

    def __init__(self, fleet: Fleet, worker: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._fleet, self._worker, self._clock = fleet, worker, clock
        self._cause: dict[str, Any] | None = None  # while it rests
        self._tried_for: dict[str, Any] = {}
        self._try: subprocess.Popen[bytes] | None = None
        self._tried = self._next = 0.0
        self._pause = 0.0  # seconds before the next try; it starts anew only when a unit was done
        self._doubted = False  # it was found fit after a row of failures, and no unit was done since

    def rests(self) -> bool:
        """Whether the worker rests now, to be asked every second; may raise redis-py's errors."""
        if self._try is not None:
            self._look(self._try)
        elif self._clock() >= self._next if self._cause is not None else shared[_COUNT] >= REST_AFTER:
            self._begin()
        return self._cause is not None

    def stop(self) -> None:
        if self._try is not None:
            self._try.kill()
            self._try.communicate()
            self._try = None

    def _begin(self) -> None:
        if self._cause is None and shared[_WELL]:
            self._pause, self._doubted, shared[_WELL] = 0.0, False, 0
        self._tried_for = self._cause or _cause()
        command = [sys.executable, "-P", "-m", __name__, json.dumps(self._tried_for)]
        try:
            self._try = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
        except (OSError, MemoryError) as error:
            log.warning("cannot run the self-check: %s", error)
            self._rest(self._tried_for)
            return
        self._tried = self._clock()

    def _look(self, process: subprocess.Popen[bytes]) -> None:
        ended = process.poll()
        if ended is None and self._clock() - self._tried < SELF_CHECK_TIMEOUT:
            return
        process.kill()
        said, _ = process.communicate()
        self._try = None
        if ended == 0 and not said and not self._unseen():
            if self._cause is not None:
                self._fleet.awake(self._worker)
            log.warning("self-check passed; this worker %s", "accepts work again" if self._cause else "continues")
            self._doubted |= self._cause is None
            self._cause, shared[_COUNT] = None, 0
            return
        found = self._tried_for
        if ended == 0 and said:
            try:
                found = {name: value for name, value in found.items() if name in _FACTS} | json.loads(said)
            except ValueError:
                log.warning("self-check returned an invalid result: %r", said[:200])
        self._rest(found)

    def _unseen(self) -> bool:
        """Whether a fault may be there that a try does not see, when what is found fit has failed again since."""
        return self._cause is None and self._doubted and not self._tried_for["code"].startswith(_SEEN)

    def _rest(self, cause: dict[str, Any]) -> None:
        self._pause = min(2 * self._pause or REST_FIRST, REST_MAX)
        self._next = self._clock() + self._pause
        rests = "is still paused" if self._cause else f"paused itself after {REST_AFTER} machine errors in a row"
        log.error("this worker %s; next self-check in %.0f s: %s", rests, self._pause, cause["message"])
        self._cause = cause
        self._fleet.rest(self._worker, cause)


def check(cause: Mapping[str, Any], settings: Settings) -> None:
    """Whether this machine is fit for work again after ``cause``; raises what a job would fail with.

    The temporary folder can be written and has the room that was missing, the settings and the credentials file can be
    read, some token of the Hub in question is accepted, and the broker answers.
    """
    with closing(ProcessTempDir.make(settings.tmpdir)) as temp_dir:
        context = Context.from_env()
        disk = shutil.disk_usage(temp_dir.path)
        needed, total = int(cause.get("needed") or 0), min(disk.total, context.disk_limit or disk.total)
        if disk.free < needed <= total:  # and what never fits here is no reason to wait
            raise DiskFull(path=str(settings.tmpdir), needed=needed, free=disk.free)
        size = min(max(needed, MB), PROBE_MAX, disk.total // 10)
        with full_disk_errors(temp_dir.path, size), tempfile.TemporaryFile(dir=temp_dir.path) as file:
            file.write(bytes(size))
            file.flush()
    _check_tokens(cause, context)
    with open_redis(broker_url(settings)) as client:
        client.ping()


def _check_tokens(cause: Mapping[str, Any], context: Context) -> None:
    """Of several tokens for one Hub a single good one is enough: who lacks the others still has work to do."""
    endpoint = cause.get("endpoint") or context.credentials.default_endpoint
    asked_for = cause["code"] in _TOKEN_ERRORS
    references = [reference for reference in context.credentials.references() if reference.endpoint == endpoint]
    tokens = [reference for reference in references if reference.credential is not None]
    if references and not tokens and asked_for:
        raise TokenMissing(endpoint=endpoint, need="writing to it", sign_in=GO_ON["sign_in"][1])
    errors = [probe_hub(reference, time.time).error for reference in tokens]
    serious = [error for error in errors if isinstance(error, TokenRefused) or (error and asked_for)]
    if serious and len(serious) == len(tokens):
        raise serious[0]


def main() -> None:
    """Say on stdout what is wrong, or nothing."""
    try:
        check(json.loads(sys.argv[1]), settings())
    except ReshardError as error:
        json.dump({"code": error.code, "message": str(error), "hint": error.next_step}, sys.stdout)


if __name__ == "__main__":
    main()
