"""However many files a folder takes or gives, a few descriptors are enough."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.models import arrays, save_single

COUNT = 300
LIMIT = 64  # descriptors; the interpreter and its libraries have some of them

RUN = """
import resource, sys
from reshard.pipeline.places import parse_place
from reshard.pipeline.request import Options, Request
from reshard.pipeline.reshard import run
from reshard.pipeline.stores.connect import Context
resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))
source, target = map(parse_place, sys.argv[1:3])
report = run(Request(source=source, target=target, options=Options(size=int(sys.argv[3]))), Context.from_env())
print(len(report.plan.shards), len(report.plan.carried))
"""


def test_carried_files_and_shards_of_a_batch_are_not_all_open_at_once(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_single(model, arrays(COUNT, 100))
    for number in range(COUNT):
        (model / f"notes-{number:04}.txt").write_text(str(number))
    size = 600  # bytes: one tensor with its header
    program = RUN.format(limit=LIMIT)
    done = subprocess.run(
        [sys.executable, "-c", program, str(model), str(tmp_path / "out"), str(size)],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shards, carried = map(int, done.stdout.split())
    assert shards > 2 * LIMIT and carried >= COUNT
