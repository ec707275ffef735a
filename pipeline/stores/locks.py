"""Locks on open files and folders, which end with their holder: a child that it forks meanwhile does not keep them.

A forked child has every open file of its parent, too, and flock(2) holds as long as one of the two has it open.
"""

from __future__ import annotations

import fcntl
import os
from weakref import WeakSet, finalize


class FileLock:
    """The descriptor of a file or folder, for this process to lock; it is closed with this object at the latest."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.close = finalize(self, _unlock, descriptor)
        _ours.add(self)

    def take(self, how: int) -> None:
        """As flock(2) has it; raises BlockingIOError."""
        fcntl.flock(self.descriptor, how)


_ours = WeakSet[FileLock]()


def _unlock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # for a child that has it open, too
    finally:
        os.close(descriptor)


def _leave_to_parent() -> None:
    """In a forked child, so that the death of its parent frees the locks and its own end does not."""
    for lock in [*_ours]:
        if lock.close.detach():
            os.close(lock.descriptor)


os.register_at_fork(after_in_child=_leave_to_parent)
