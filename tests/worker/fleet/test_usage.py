"""What a process tells of its memory and its temporary files, with real children and real files."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from reshard.worker.fleet import usage
from reshard.worker.fleet.usage import measured
from reshard.worker.queue.jobs import Process
from reshard.worker.temp_dir import ProcessTempDir

MB = 1 << 20
ME = Process("here:1", "worker", "1", "here", 1, 2, 0.0, False)

# A child that starts another, which says when it holds what it is to hold.
NESTED = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]], check=True)"
MEMORY = "import sys; held = bytearray(range(256)) * (64 << 12); print('held', flush=True); sys.stdin.read()"
FILES = """
import sys, tempfile
from pathlib import Path
from reshard.worker.temp_dir import ProcessTempDir
mine = ProcessTempDir.make(Path(sys.argv[1]))
nameless = tempfile.TemporaryFile(dir=mine.path, buffering=0)
nameless.write(bytes(2 << 20))
(mine.path / "named").write_bytes(bytes(1 << 20))
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def running(program: str, *arguments: str) -> Iterator[None]:
    command = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout and child.stdout.readline() == b"held\n"
        yield
        child.communicate()


def memory(tmpdir: Path) -> int:
    told = measured(ME, tmpdir).memory
    assert told is not None
    return told


def test_memory_is_that_of_children_and_theirs_too(tmp_path: Path) -> None:
    before = memory(tmp_path)
    with running(NESTED, MEMORY):
        assert 64 * MB <= memory(tmp_path) - before < 256 * MB
    assert memory(tmp_path) - before < 32 * MB


def test_temporary_files_count_named_or_not_of_whichever_process(tmp_path: Path) -> None:
    (tmp_path / "of-others").write_bytes(bytes(MB))
    assert measured(ME, tmp_path).temporary == 0
    with running(NESTED, FILES, str(tmp_path)):
        assert measured(ME, tmp_path).temporary == 3 * MB
    assert measured(ME, tmp_path).temporary == 0


def test_a_file_that_several_have_open_counts_once(tmp_path: Path) -> None:
    with tempfile.TemporaryFile(dir=tmp_path, buffering=0) as shared:
        shared.write(bytes(MB))
        again = os.dup(shared.fileno())
        assert measured(ME, tmp_path).temporary == MB
        os.close(again)


def test_what_lies_in_the_folder_of_another_process_is_not_ours(tmp_path: Path) -> None:
    other = tmp_path / f"reshard-{os.getpid()}-{'0' * 32}"  # with our pid, as in another container
    other.mkdir()
    (other / "shard").write_bytes(bytes(MB))
    mine = ProcessTempDir.make(tmp_path)
    assert measured(ME, tmp_path).temporary == 0
    mine.close()


def test_a_folder_that_is_reached_by_a_link_counts(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with tempfile.TemporaryFile(dir=tmp_path / "real", buffering=0) as file:
        file.write(bytes(MB))
        assert measured(ME, tmp_path / "link").temporary == MB


def test_a_system_that_does_not_tell_of_children_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "PROC", tmp_path)
    assert measured(ME, tmp_path) == ME
