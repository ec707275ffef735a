"""What one request to the child process may use: set by the parent, enforced by the child."""

from __future__ import annotations

from dataclasses import dataclass

from reshard.pipeline import limits


@dataclass(frozen=True, slots=True)
class Allowed:
    """The limits of one request; limits.py has the reasons for the defaults."""

    seconds: float = limits.RELOAD_TIME
    cpu: int = limits.RELOAD_CPU  # seconds of processor time
    memory: int | None = limits.RELOAD_MEMORY  # bytes of address space beyond the imports; kept on Linux only
    file: int | None = limits.RELOAD_FILE  # bytes of one file
    rss: int | None = None  # bytes held, mapped files not counted; kept on Linux only
