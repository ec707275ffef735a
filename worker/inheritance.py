"""What a child that Celery replaces leaves to the next one: its temporary folder, with the warm reload child in it.

Both go as open files in a message on a pair of sockets, which the main process made and its children have from it: who
asks first gets them, and nobody else. What nobody has asked for when the last of these processes ends is closed by the
kernel: so the reload child ends, and the folder is unlocked for whoever sweeps next.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from reshard.pipeline.verifying.meta_load import MetaLoader, Orphan
from reshard.worker.temp_dir import ProcessTempDir

_LONGEST = 16_384  # bytes of a message, which has two paths

_here, _there = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
_here.setblocking(False)
_there.setblocking(False)


def leave(temp_dir: ProcessTempDir, loader: MetaLoader) -> bool:
    """Leave both to whoever inherits next, if the child of ``loader`` is warm and there is room for them."""
    orphan = loader.leave()
    if orphan is None:
        return False
    message = json.dumps([str(temp_dir.path), orphan.pid, str(orphan.home)]).encode()
    try:
        socket.send_fds(_here, [message], [temp_dir.lock, orphan.pipe])
    except OSError:
        return False
    finally:
        os.close(orphan.pipe)
    return True


def inherit() -> tuple[ProcessTempDir, Orphan] | None:
    """What was left first and nobody has yet; None where there is nothing."""
    try:
        message, (lock, pipe), _, _ = socket.recv_fds(_there, _LONGEST, 2)
    except BlockingIOError:
        return None
    path, pid, home = json.loads(message)
    return ProcessTempDir(Path(path), lock), Orphan(pid, Path(home), pipe)


def end() -> None:
    """The worker ends, and nobody comes to inherit any more."""
    for temp_dir, orphan in iter(inherit, None):
        os.close(orphan.pipe)
        temp_dir.close()
