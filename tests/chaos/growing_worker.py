"""A worker whose children grow when they are told to: ``python -m tests.chaos.growing_worker ARGUMENTS-OF-CELERY``."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

from celery import signals
from celery.__main__ import main

from reshard.pipeline.limits import MEMORY_FLOOR_XET, MIB
from reshard.worker.local import worker_command

GROW = signal.SIGWINCH  # SIGUSR1 is the pool's and SIGUSR2 the keeper's; and it harms nobody who does not obey yet


def growing_worker_command(concurrency: int) -> Sequence[str]:
    """The command of such a worker."""
    python, module, program, *arguments = worker_command(concurrency)
    assert (module, program) == ("-m", "reshard.worker.program")
    return [python, "-m", __name__, *arguments]


def obey(**_: Any) -> None:
    signal.signal(GROW, lambda *_: grow())


def grow() -> None:
    """By what a child may have by default; bit by bit, so that its other threads go on."""
    _ = [bytearray(MIB) for _ in range(MEMORY_FLOOR_XET // MIB)]


if __name__ == "__main__":
    signals.worker_process_init.connect(obey)
    main()
