"""The user without rights, for whom a folder can be closed: root may look everywhere."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534


@contextmanager
def nobody() -> Iterator[Path]:
    """A folder of that user, or of whoever we are but root; inside, this process is that user."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a TMPDIR of root's may be closed to others
        if user == 0:
            os.chown(folder, NOBODY, -1)
            os.seteuid(NOBODY)
        try:
            yield Path(folder)
        finally:
            os.seteuid(user)
