"""What a process of a worker keeps from one unit to the next: its temporary folder, its reload child, its connections.

All of it is one process's own. Celery's main process has some before it forks, and each of its children makes another:
what was made before a fork stays the parent's.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from billiard.pool import EX_RECYCLE
from celery import signals

from reshard.pipeline.errors import TempDirUnusable
from reshard.pipeline.paths import state_dir
from reshard.pipeline.stores.connect import Context
from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.pipeline.verifying.verdicts import VERDICTS
from reshard.worker import inheritance
from reshard.worker.settings import settings
from reshard.worker.temp_dir import ProcessTempDir, sweep

log = logging.getLogger(__name__)


class OwnProcess:
    """What one process keeps; its temporary folder is made in ``tmpdir``."""

    def __init__(self, tmpdir: Path) -> None:
        self._tmpdir = tmpdir
        self._temp_dir: ProcessTempDir | None = None
        self._meta_loader: MetaLoader | None = None
        self._idle: Context | None = None  # of the last step that ended well

    def begin(self) -> None:
        """What dead processes left goes now; what one that was replaced because it grew left is gone on with."""
        sweep(self._tmpdir)
        with suppress(TempDirUnusable):  # which the first unit says
            if (left := inheritance.inherit()) is not None:
                self._temp_dir, orphan = left
                self.meta_loader().adopt(orphan)
            self.temp_dir()

    def temp_dir(self) -> Path:
        """The folder, made again when a cleaner took it. Raises TempDirUnusable."""
        if self._temp_dir is not None and not self._temp_dir.stands():
            log.warning("%s is gone; creating it again", self._temp_dir.path)
            self.end()
        if self._temp_dir is None:
            self._temp_dir = ProcessTempDir.make(self._tmpdir)
        return self._temp_dir.path

    def meta_loader(self) -> MetaLoader:
        """One warm reload child, whose home is in the temporary folder. Raises TempDirUnusable."""
        if self._meta_loader is None:
            self._meta_loader = MetaLoader(tmpdir=self.temp_dir(), verdicts=state_dir() / VERDICTS)
        return self._meta_loader

    def lend(self, context: Context) -> None:
        """Have ``context`` go on with the connections of the last step that ended well."""
        if self._idle is not None:
            context.reuse(self._idle)
            self._idle = None

    def keep(self, context: Context) -> None:
        """A step ended well with this one."""
        self._idle = context

    def end(self, *, inherited: bool = False) -> None:
        """The reload child goes, and the temporary folder, unless the next process is to have them as ``inherited``."""
        mine, self._temp_dir = self._temp_dir, None
        left = False
        if self._meta_loader is not None:
            loader, self._meta_loader = self._meta_loader, None
            left = inherited and mine is not None and mine.stands() and inheritance.leave(mine, loader)
            loader.close()
        if self._idle is not None:
            self._idle.close()
            self._idle = None
        if mine is not None and not left:
            mine.close()


_by_pid: dict[int, OwnProcess] = {}


def own() -> OwnProcess:
    if os.getpid() not in _by_pid:
        _by_pid[os.getpid()] = OwnProcess(settings().tmpdir)
    return _by_pid[os.getpid()]


def _begin(**_: Any) -> None:
    """The main process starts, or a child in place of one that may have been killed."""
    own().begin()


def _end(exitcode: int | None = None, **_: Any) -> None:
    """This process ends in order."""
    own().end(inherited=exitcode == EX_RECYCLE)


def _end_worker() -> None:
    """The main process ends, after its children."""
    inheritance.end()
    own().end()


for starts in (signals.worker_init, signals.worker_process_init):
    starts.connect(_begin)
signals.worker_process_shutdown.connect(_end)
Finalize(None, _end_worker, exitpriority=-1)  # after the pool, which has 15
