"""How this process's allocator treats the blocks that a copy makes and frees all the time."""

from __future__ import annotations

import ctypes

from reshard.pipeline.limits import LARGE_BLOCK

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc


def keep_freed(most: int) -> None:
    """Have glibc keep so many bytes of freed chunks for the next ones, and give larger blocks back.

    Left alone it has the system zero anew what a freed chunk was made of; and it keeps ever larger blocks in the heaps
    of hf_xet's many threads, which cost 100 MB in a trial.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not everywhere: musl and macOS have none, nor the habit
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK)
        mallopt(_M_TRIM_THRESHOLD, most)
