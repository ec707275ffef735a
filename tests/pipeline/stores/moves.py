"""A file moved from place to place in a process of its own, and what that took."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.hub.fixtures import Namespace

ROOT = Path(__file__).parents[3]
MOVE = """
import json, sys, time
from pathlib import Path
from reshard.pipeline.places import parse_place
from reshard.pipeline.request import Options
from reshard.pipeline.stores.connect import Context, open_source, open_target

place, goal, shard, transport = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
context = Context.from_env()
source = open_source(parse_place(place), context, transport=transport)
target = open_target(parse_place(goal), Options(transport=transport), context)
target.prepare(private=True)
file = source.files()["model.safetensors"]
batch = target.sink("t").batch([file])
for start in range(0, file.size, shard):
    stop = min(file.size, start + shard)
    writer = batch.open(f"{start}.bin", stop - start)
    for view in source.read(file, start, stop):
        writer.write(view)
    writer.finish()
sealed = batch.seal()
# Not ru_maxrss: that of a process just started is at least its parent's.
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
peak = int(status["VmHWM"].split()[0]) * 1024
print(json.dumps({
    "rss": peak,
    "cpu": time.process_time(),
    "bytes": sum(stored.size for stored in sealed),
    "transports": [source.transport, target.transport],
}))
"""


def move(source: str, target: str, shard: int, transport: str, namespace: Namespace, tmp: Path) -> dict[str, float]:
    environment = {
        **os.environ, "HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": namespace.token, "RESHARD_TMPDIR": str(tmp),
        "HF_HOME": str(tmp / "home"),
    }  # fmt: skip
    command = [sys.executable, "-c", MOVE, source, target, str(shard), transport]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, float] = json.loads(ended.stdout)
    return found
