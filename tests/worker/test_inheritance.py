"""What outlives the replacement of a child: its reload child, which the next one has, and never beyond the worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from reshard.pipeline.checkpoint.formats.safetensors import build_header
from reshard.pipeline.limits import MEMORY_FLOOR
from reshard.pipeline.places import Folder
from reshard.pipeline.request import Options, Request
from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.worker import inheritance
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.states import JobState
from reshard.worker.temp_dir import ProcessTempDir, sweep
from tests.pipeline.verifying.models import save
from tests.support.procs import Broker, Machine, wait_for


class Site:
    """A worker with one child, which a plan of very many tensors makes too large, and control."""

    def __init__(self, folder: Path, broker: Broker, store: JobStore, machine: Machine) -> None:
        self.folder, self.broker, self.store, self.machine = folder, broker, store, machine
        machine.control()
        self.worker = machine.worker(concurrency=1)
        header = build_header(((f"layers.{i}.weight", "F32", (0,)) for i in range(100_000)), {"format": "pt"})
        (folder / "many").mkdir()
        (folder / "many" / "model.safetensors").write_bytes(header)

    def submit(self, name: str) -> str:
        source, target = self.folder / name, self.folder / f"{name}-out"
        request = Request(source=Folder(path=str(source)), target=Folder(path=str(target)), options=Options(size=9000))
        return self.store.submit(request).id

    def ask_about(self, name: str) -> int:
        """Have a class checked that nobody has asked about; the pid of the reload child that did it."""
        save(name, self.folder / name)
        job = self.submit(name)
        wait_for(lambda: self.store.get(job).state.ended, "the job's end")
        assert self.store.get(job).state == JobState.done
        (figures,) = [check["figures"] for check in self.store.get(job).checked if check["name"].startswith("reload")]
        assert "known" not in figures, "nobody was asked"
        (pid,) = self.machine.reload_children()
        return pid

    def replace_child(self) -> None:
        (child,) = self.worker.children()
        job = self.submit("many")
        wait_for(lambda: child not in self.worker.children() and self.worker.children(), "another child")
        self.store.cancel(job)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    settings = {
        "RESHARD_ALLOWED_FOLDERS": str(tmp_path),
        "RESHARD_MEMORY_LIMIT": str(MEMORY_FLOOR),
        "XDG_STATE_HOME": str(tmp_path / "state"),  # a class that another test has asked about needs no child
    }
    with (
        Broker(tmp_path) as broker,
        Machine(tmp_path, broker.url, cold=True, **settings) as machine,
        JobStore.at(broker.url) as store,
    ):
        yield Site(tmp_path, broker, store, machine)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["stopped", "its main process killed"])
def test_a_reload_child_outlives_its_owner_that_grew_and_never_its_worker(site: Site, end: str) -> None:
    first = site.ask_about("llama")
    site.replace_child()
    assert site.ask_about("bert-base") == first
    if end == "stopped":
        site.worker.terminate()
        site.worker.wait(60)
        assert list(site.machine.tmpdir.iterdir()) == []
    else:
        os.kill(site.worker.pid, signal.SIGKILL)
    wait_for(lambda: not psutil.pid_exists(first), "its end")


def test_one_process_inherits_and_what_it_has_goes_on(tmp_path: Path) -> None:
    temp_dir, owner = ProcessTempDir.make(tmp_path), MetaLoader(tmpdir=tmp_path)
    assert owner.warm() is None
    pid = owner.pid
    assert inheritance.leave(temp_dir, owner)
    assert owner.warm() == "the reload was closed"
    assert sweep(tmp_path) == [], "nobody's, and not dead"

    left = inheritance.inherit()
    assert left is not None and left[0].path == temp_dir.path
    assert inheritance.inherit() is None
    with closing(MetaLoader(tmpdir=tmp_path)) as successor:
        successor.adopt(left[1])
        assert successor.check(None, {}).result == "skipped"
        assert successor.pid == pid


OWNER = """
import sys
from pathlib import Path
from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.worker import inheritance
from reshard.worker.temp_dir import ProcessTempDir
temp_dir = ProcessTempDir.make(Path(sys.argv[1]))
loader = MetaLoader(tmpdir=temp_dir.path)
assert loader.warm() is None
pid = loader.pid
assert inheritance.leave(temp_dir, loader)
print(pid, flush=True)
sys.stdin.read()
inheritance.end()
"""


@pytest.mark.parametrize("end", [pytest.param("stopped", marks=pytest.mark.slow), "killed"])
def test_what_nobody_inherits_ends_with_the_worker(tmp_path: Path, end: str) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout and worker.stdin
        pid = int(worker.stdout.readline())
        (folder,) = tmp_path.iterdir()
        assert psutil.pid_exists(pid)
        if end == "killed":
            worker.kill()
    wait_for(lambda: not psutil.pid_exists(pid), "its end")
    assert sweep(tmp_path) == ([folder] if end == "killed" else [])
    assert list(tmp_path.iterdir()) == []
