"""What the machine itself says no to, by the numbers and words of its system."""

from __future__ import annotations

import errno
from pathlib import Path

from reshard.pipeline.errors.work import ResourceError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # what a disk without room says
_EXHAUSTED = (errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE)  # of the machine, or of the limits of its user


def of_the_machine(error: Exception, where: Path | None) -> ResourceError | None:
    """An error that no layer below had a name for, if it is the machine's; ``where`` it was, unless it says so."""
    if isinstance(error, MemoryError) or "can't start new thread" in str(error):
        return ResourceError(what=": ".join(filter(None, ("out of memory or processes", str(error)))))
    if isinstance(error, OSError) and error.errno in FULL:
        return ResourceError(what=f"no space left on {error.filename or where}: {error.strerror}")
    if isinstance(error, OSError) and error.errno in _EXHAUSTED:
        return ResourceError(what=f"out of memory, processes or open files: {error.strerror}")
    return None
