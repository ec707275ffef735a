"""Whatever the size of the source, a process that opens, gathers and casts it stays small and needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads its peak memory from /proc")

RSS_MAX = 128_000_000  # bytes; what the pipeline promises of a copying process

# Opens the file, makes the first windows of its tensors and casts them, as a copy does.
CHILD = """
    import json, os, sys
    from pathlib import Path
    from reshard.pipeline.copying.casts import Caster
    from reshard.pipeline.checkpoint.formats.torch_files import read_torch
    from reshard.pipeline.copying.gather import gather, windows
    from reshard.pipeline.tensors import StoredFile

    path, some = Path(sys.argv[1]), int(sys.argv[2])
    descriptor = os.open(path, os.O_RDONLY)

    def read(file, start, stop):  # from several threads at once
        while start < stop:
            view = memoryview(os.pread(descriptor, min(1 << 20, stop - start), start))
            start += len(view)
            yield view

    contents = read_torch(lambda file, start, stop: iter([b"".join(map(bytes, read(file, start, stop)))]),
                          StoredFile(path.name, path.stat().st_size), 0)
    made, buffer = 0, bytearray(2 << 20)
    for tensor in contents.tensors:
        caster = Caster(tensor.name, "F32", "BF16")
        for number, window in enumerate(windows(tensor, 2 << 20)):
            if number == some:
                break
            fill = lambda view, at: os.preadv(descriptor, [view], at)
            for part in caster.feed(gather(tensor, window, fill, buffer, read_max=4 << 20)):
                made += len(part)
    assert not {"torch", "transformers"} & set(sys.modules)
    # Not ru_maxrss, which a child inherits from the process that started it.
    status = Path("/proc/self/status").read_text()
    rss = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    print(json.dumps({"rss": rss, "made": made, "tensors": len(contents.tensors)}))
"""


def run(path: Path, some: int) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(path), str(some)],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, int] = json.loads(done.stdout)
    return result


def sparse(path: Path, columns: int) -> Path:
    """Four matrices of ``columns`` x 32768 F32, two of them transposed, as a file that takes no disk."""
    with torch.serialization.skip_data():
        torch.save(
            {f"w{i}": torch.empty(columns, 32768).T if i % 2 else torch.empty(32768, columns) for i in range(4)}, path
        )
    return path


def test_a_file_of_fourteen_gigabytes_and_one_of_twice_that(tmp_path: Path) -> None:
    seen = []
    for columns in (27_650, 55_300):
        path = sparse(tmp_path / f"{columns}.bin", columns)
        assert path.stat().st_size > columns * 32768 * 16
        result = run(path, some=2)
        assert result["tensors"] == 4 and result["made"] > 0
        assert result["rss"] < RSS_MAX
        seen.append(result["rss"])
    assert seen[1] < seen[0] * 1.25


@pytest.mark.slow
def test_three_gigabytes_from_beginning_to_end(tmp_path: Path) -> None:
    result = run(sparse(tmp_path / "w.bin", 6_000), some=-1)
    assert result["made"] == 4 * 6_000 * 32768 * 2
    assert result["rss"] < RSS_MAX
