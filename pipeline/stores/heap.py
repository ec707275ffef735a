"""How this process's allocator treats the blocks that a copy makes and frees all the time.

Left alone, glibc has the system zero anew what a freed block was made of. Elsewhere nothing is changed: musl and macOS
have other habits.
"""

from __future__ import annotations

import ctypes
from typing import Any

from reshard.pipeline.limits import HEAP_KEPT, HEAP_TRIMMED, LARGE_BLOCK, XET_HEAP_KEPT, XET_LARGE_BLOCK

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h of glibc

_shared = False  # by all threads


def for_copies() -> None:
    """Keep what the lanes of a copy free, in one heap for all threads; for programs of ours, before they start one."""
    global _shared
    _shared = True
    _call("mallopt", _M_ARENA_MAX, 1)
    _keep(HEAP_KEPT, LARGE_BLOCK)


def for_xet() -> None:
    """Keep what hf_xet frees, too; in a program of others little, as each of its many threads may have a heap."""
    _keep(*(XET_HEAP_KEPT, XET_LARGE_BLOCK) if _shared else (HEAP_TRIMMED, LARGE_BLOCK))


def give_back() -> None:
    """Nothing is kept until the next copy."""
    _call("malloc_trim", 0)


def _keep(most: int, large: int) -> None:
    """Of freed blocks so many bytes; blocks of ``large`` bytes go back at once."""
    _call("mallopt", _M_MMAP_THRESHOLD, large)
    _call("mallopt", _M_TRIM_THRESHOLD, most)


def _call(name: str, *arguments: int) -> None:
    function: Any = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*arguments)
