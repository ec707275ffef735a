"""A lock on a file ends with its holder, whatever that forked meanwhile, and with nobody else."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest

from reshard.pipeline.copying.hashing import Compared
from reshard.pipeline.copying.loop import Attested
from reshard.pipeline.journal import Journal
from reshard.pipeline.places import Folder
from reshard.pipeline.protocols import Addition, Change
from reshard.pipeline.stores.folder import swap as swap_module
from reshard.pipeline.stores.folder import target as target_module
from reshard.pipeline.stores.folder.disk import make_folder
from reshard.pipeline.stores.folder.swap import Swap, link_tree
from reshard.pipeline.stores.folder.target import FolderTarget
from reshard.pipeline.stores.locks import FileLock
from tests.support.procs import wait_for

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("")
    return tmp_path / "file"


@contextmanager
def child() -> Iterator[None]:
    """A forked process, which lives through the body."""
    process = FORK.Process(target=signal.pause, daemon=True)
    process.start()
    try:
        yield
        assert process.is_alive()
    finally:
        process.kill()
        process.join()


def locked(file: Path) -> FileLock:
    lock = FileLock(os.open(file, os.O_RDONLY))
    lock.take(fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


def is_free(file: Path) -> bool:
    with suppress(BlockingIOError), closing(locked(file)):
        return True
    return False


def test_a_lock_is_another_processes_once_it_is_closed_or_gone(file: Path) -> None:
    lock = locked(file)
    assert not is_free(file)
    lock.close()
    lock.close()
    assert is_free(file)
    lock = locked(file)
    del lock
    assert is_free(file)


def test_a_lock_is_free_though_another_program_has_its_file_open(file: Path) -> None:
    lock = locked(file)
    program = [sys.executable, "-c", "import signal; signal.pause()"]
    with subprocess.Popen(program, pass_fds=[lock.descriptor]) as process:
        lock.close()
        free = is_free(file)
        process.kill()
    assert free


def test_the_end_of_a_forked_child_frees_no_lock_of_its_parent(file: Path) -> None:
    with closing(locked(file)) as lock:
        process = FORK.Process(target=lock.close)
        process.start()
        process.join()
        assert process.exitcode == 0
        assert not is_free(file)


def test_the_death_of_a_process_frees_its_locks_whatever_it_forked(file: Path) -> None:
    def parent() -> None:
        with closing(locked(file)):
            if (pid := os.fork()) == 0:
                signal.pause()
            (file.parent / "child.new").write_text(str(pid))
            (file.parent / "child.new").rename(file.parent / "child")
            signal.pause()

    process = FORK.Process(target=parent)
    process.start()
    wait_for((file.parent / "child").exists, "the child")
    orphan = int((file.parent / "child").read_text())
    try:
        assert not is_free(file)
        process.kill()
        process.join()
        wait_for(lambda: is_free(file), "the lock")  # once the hooks of the fork have run in the child
        os.kill(orphan, 0)
    finally:
        os.kill(orphan, signal.SIGKILL)


# ---------------------------------------------------------------------------------------------------- what is locked


def commit(folder: Path) -> None:
    target = FolderTarget(Folder(path=str(folder)))
    target.commit(Change("T", "", (Addition("a.txt", content=b"a"),), ()), target.head())


def test_a_child_that_is_forked_in_a_commit_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forking(old: Path, new: Path, without: set[str]) -> None:
        children.enter_context(child())
        link_tree(old, new, without)

    (tmp_path / "one").mkdir()
    with ExitStack() as children:
        monkeypatch.setattr(target_module, "link_tree", forking)
        commit(tmp_path / "one")
        monkeypatch.undo()
        assert is_free(tmp_path)
        commit(tmp_path / "two")


def test_the_folder_of_a_run_is_free_after_it_though_a_child_lives(tmp_path: Path) -> None:
    swap = Swap(tmp_path / "out", lambda _: None)
    with closing(FileLock(os.open(swap.claim("t"), os.O_RDONLY))) as another, child():
        with pytest.raises(BlockingIOError):
            another.take(fcntl.LOCK_EX | fcntl.LOCK_NB)
        swap.release("t")
        another.take(fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_threads_that_claim_one_folder_at_once_lock_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swap, both = Swap(tmp_path / "out", lambda _: None), threading.Barrier(2, timeout=20)

    def make_folder_together(folder: Path) -> None:
        make_folder(folder)
        if folder == swap.staging:
            both.wait()

    monkeypatch.setattr(swap_module, "make_folder", make_folder_together)
    with ThreadPoolExecutor(2) as pool:
        [folder] = {*pool.map(swap.claim, ["t", "t"])}
    opened = [os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir()]
    assert opened.count(str(folder)) == 1
    swap.release("t")


def test_a_run_is_gone_on_with_though_a_child_that_it_forked_lives(tmp_path: Path) -> None:
    noted = Journal.open(tmp_path, "key")
    noted.finish(0, Attested({}, (), Compared(0, 0)))
    with child():
        noted.close(done=False)
        assert Journal.open(tmp_path, "key").attested.keys() == {0}
