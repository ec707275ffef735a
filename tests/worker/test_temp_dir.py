"""Temporary folders: one for each process, removed when it is dead, and never while it lives."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from reshard.pipeline.errors import TempDirUnusable
from reshard.pipeline.places import Folder
from reshard.pipeline.request import Options, Request
from reshard.worker.local import worker_command
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.states import JobState
from reshard.worker.settings import KEEP_TEMP_DIR
from reshard.worker.temp_dir import LOCK, ProcessTempDir, sweep
from tests.pipeline.verifying.models import save
from tests.support.procs import Broker, Machine, wait_for

HOLDER = """
import sys, tempfile, time
from pathlib import Path
from reshard.worker.temp_dir import ProcessTempDir
spool = ProcessTempDir.make(Path(sys.argv[1]))
(spool.path / "shard").write_bytes(b"x" * 1000)
print(spool.path, flush=True)
sys.stdin.read()
"""


def test_a_dead_processes_folder_goes_and_a_live_ones_stays(tmp_path: Path) -> None:
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, stdin=subprocess.PIPE)
        for _ in range(2)
    ]
    folders = [Path(holder.stdout.readline().decode().strip()) for holder in holders if holder.stdout]
    assert sweep(tmp_path) == []
    holders[0].send_signal(signal.SIGKILL)
    holders[0].wait()
    assert sweep(tmp_path) == [folders[0]]
    assert not folders[0].exists()
    assert (folders[1] / "shard").exists()
    holders[1].kill()
    for holder in holders:
        holder.communicate()


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    others = [tmp_path / "reshard-reload-abc", tmp_path / "my-model", tmp_path / "reshard-1-notours"]
    for folder in others:
        folder.mkdir()
        os.utime(folder, (0, 0))
    assert sweep(tmp_path) == []
    assert all(folder.is_dir() for folder in others)


def test_a_folder_that_is_just_being_made_is_left_alone(tmp_path: Path) -> None:
    new, old = tmp_path / f"reshard-1-{'0' * 32}", tmp_path / f"reshard-1-{'1' * 32}"
    new.mkdir()
    old.mkdir()
    past = old.stat().st_mtime - KEEP_TEMP_DIR - 1
    os.utime(old, (past, past))
    assert sweep(tmp_path) == [old]
    assert new.is_dir()


def test_a_folder_whose_lock_cannot_be_opened_such_as_another_user_s_is_left_alone_and_stops_nothing(
    tmp_path: Path,
) -> None:
    """Tests may run as root, whom no permission stops: a link loop and a file cannot be opened by anybody."""
    *others, old = (tmp_path / f"reshard-{number}-{'0' * 32}" for number in range(4))
    others[0].mkdir()
    (others[0] / LOCK).symlink_to(LOCK)
    others[1].touch()
    others[2].mkdir(mode=0 if os.geteuid() else 0o700)
    if not os.geteuid():
        (others[2] / LOCK).mkdir()
    old.mkdir()
    os.utime(old, (0, 0))
    assert sweep(tmp_path) == [old]
    assert all(os.path.lexists(folder) for folder in others)


def test_temporary_files_lie_in_it_and_go_with_it(tmp_path: Path) -> None:
    before = tempfile.gettempdir()
    spool = ProcessTempDir.make(tmp_path)
    inside = Path(tempfile.mkdtemp())
    assert inside.parent == spool.path
    assert (spool.path / LOCK).exists()
    spool.close()
    assert not spool.path.exists()
    assert tempfile.gettempdir() == before


def test_the_warm_reload_child_of_a_killed_worker_leaves_nothing_after_the_next_start(tmp_path: Path) -> None:
    save("llama", tmp_path / "model")
    request = Request(
        source=Folder(path=str(tmp_path / "model")),
        target=Folder(path=str(tmp_path / "out")),
        options=Options(size=9000),
    )
    # A state of its own: a class that another test has asked about needs no child.
    settings = {"RESHARD_ALLOWED_FOLDERS": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}
    with Broker(tmp_path) as broker, Machine(tmp_path, broker.url, **settings) as machine:
        worker = machine.worker(concurrency=1)
        machine.control()
        with JobStore.at(broker.url) as store:
            job = store.submit(request).id
            wait_for(lambda: store.get(job).state.ended, "the job's end")
            assert store.get(job).state == JobState.done
        homes = list(machine.tmpdir.rglob("reshard-reload-*"))
        assert homes, "no reload child is warm"
        worker.kill()
        assert all(home.exists() for home in homes)
        successor = machine.worker(concurrency=1)
        assert not any(home.exists() for home in homes)
        successor.terminate()
        successor.wait(60)
        assert list(machine.tmpdir.iterdir()) == []


def test_a_worker_without_a_temporary_folder_says_so_in_one_line_and_ends_before_it_says_that_it_runs(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    with Broker(tmp_path) as broker, Machine(tmp_path, broker.url, RESHARD_TMPDIR=str(tmp_path / "file")) as machine:
        worker = machine.launch("worker", worker_command(1))
        assert worker.wait(60) == TempDirUnusable.exit_code
    (line,) = worker.said().splitlines()
    assert f"error[resource.tmpdir]: cannot use the temporary folder {tmp_path / 'file'}: " in line
    assert "RESHARD_TMPDIR" in line


def test_a_worker_whose_temporary_files_a_cleaner_took_ends_without_a_traceback(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker, Machine(tmp_path, broker.url) as machine:
        worker = machine.worker(concurrency=1)
        wait_for(lambda: "worker ready" in worker.said(), "its last word before a job")
        for path in machine.tmpdir.iterdir():
            shutil.rmtree(path)
        worker.terminate()
        assert worker.wait(60) == 0
        assert "Traceback" not in worker.said()
        assert list(machine.tmpdir.iterdir()) == []
