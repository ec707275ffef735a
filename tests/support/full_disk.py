"""A disk without room, without a disk."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator

import pytest


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file of this process may grow beyond 2 MB: the kernel's own way to say that there is no room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, previous)
