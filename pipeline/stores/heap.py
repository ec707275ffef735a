"""How this process's allocator treats the blocks that a copy makes and frees all the time."""

from __future__ import annotations

import ctypes

from reshard.pipeline.limits import LARGE_BLOCK

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h of glibc


def keep_freed(most: int, large: int = LARGE_BLOCK, heaps: int | None = None) -> None:
    """Have glibc keep so many bytes of freed chunks for the next ones, and give blocks of ``large`` bytes back.

    Left alone it has the system zero anew what a freed chunk was made of. Where many threads copy, fewer ``heaps`` than
    it would make keep less, and use it again sooner.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not everywhere: musl and macOS have none, nor the habit
    if mallopt is not None:
        if heaps is not None:
            mallopt(_M_ARENA_MAX, heaps)
        mallopt(_M_MMAP_THRESHOLD, large)
        mallopt(_M_TRIM_THRESHOLD, most)
