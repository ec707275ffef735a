"""A forked program ends as one that Python started, but for taking apart what nobody needs any more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.stuck import STUCK
from tests.support.warm import warm

ENDS = {
    "of itself": "print('said', end='')",
    "with a code": "import sys; print('said', end=''); sys.exit(3)",
    "with a text": "import sys; sys.exit('why')",
    "with an error": "print('said', end=''); 1 / 0",
    "by a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "by Ctrl-C": "raise KeyboardInterrupt",
    "after its threads": "import threading; threading.Timer(0.1, print, ['late']).start()",
    "after what it registered": "import atexit, sys; atexit.register(print, 'last'); sys.exit(4)",
    "with an output that is full": "import sys; sys.stdout = open('/dev/full', 'w'); print('lost')",
}


@pytest.mark.parametrize("how", ENDS)
def test_a_forked_program_ends_as_any(how: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDS[how]]
    there = subprocess.run(command, capture_output=True, text=True, timeout=STUCK)
    assert warm().takes(command, os.environ)
    here = warm().run(command, os.environ, tmp_path, STUCK)
    assert here.returncode == there.returncode
    assert here.stdout == there.stdout
    last = [text.strip().splitlines()[-1:] for text in (here.stderr, there.stderr)]
    assert last[0] == last[1]
