"""How this process's allocator treats the blocks that a copy makes and frees all the time."""

from __future__ import annotations

import ctypes

from reshard.pipeline.limits import HEAP_KEPT, HEAP_TRIMMED, LARGE_BLOCK

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc


def reuse_blocks() -> None:
    """Have glibc keep freed chunks for the next ones and give larger blocks back, in a process that is ours.

    Left alone it returns what a freed chunk was made of and has the system zero it anew for the next chunk.
    """
    _set(HEAP_KEPT)


def return_blocks() -> None:
    """Have glibc give back what is freed: each of hf_xet's many threads has a heap of its own.

    Left alone it keeps ever larger blocks in them, which cost 100 MB in a trial.
    """
    _set(HEAP_TRIMMED)


def _set(kept: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not everywhere: musl and macOS have none, nor the habit
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK)
        mallopt(_M_TRIM_THRESHOLD, kept)
