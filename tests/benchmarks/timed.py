"""Runs a command and prints what it took as JSON. By itself it is small: rusage counts the memory that a process had
from its parent before it became the command.

    python -I -S timed.py COMMAND ...
"""

import json
import os
import sys
import time

nothing = os.open(os.devnull, os.O_WRONLY)
start = time.perf_counter()
child = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, nothing, 1)])
_, status, used = os.wait4(child, 0)
wall = time.perf_counter() - start
cost = {"wall": wall, "cpu": used.ru_utime + used.ru_stime, "peak": used.ru_maxrss * 1024}
cost["disk"] = used.ru_oublock * 512  # the kernel counts in these, also what is removed before it is on the disk
print(json.dumps({"code": os.waitstatus_to_exitcode(status), **cost}))
