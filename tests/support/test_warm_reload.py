"""A reload child that is forked lives and dies as one that is started."""

from __future__ import annotations

import json
import os
import signal
import socket
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from reshard.pipeline.verifying.meta_load import MetaLoader
from tests.support.procs import wait_for
from tests.support.warm_reload import CHILD, PROGRAM, cold

pytestmark = pytest.mark.slow  # whether what runs the other tests is fit to, which they show as well


def at_work(folder: Path) -> list[psutil.Process]:
    """The processes that work in a folder below this one; of one that has ended, the system says none."""
    return [p for p in psutil.process_iter(["cwd"]) if (p.info["cwd"] or "").startswith(str(folder))]


def is_started(loader: MetaLoader) -> bool:
    """Whether its child is Python itself."""
    return psutil.Process(loader.pid).cmdline()[1:] == CHILD


def test_each_one_s_death_is_the_other_s(tmp_path: Path) -> None:
    for killed in (0, 1):
        with closing(MetaLoader(tmpdir=tmp_path)) as loader:
            assert loader.warm() is None
            pair = sorted(at_work(tmp_path), key=lambda p: p.pid != loader.pid)
            assert [p.pid == loader.pid for p in pair] == [True, False]
            os.kill(pair[killed].pid, signal.SIGKILL)
            wait_for(lambda: not at_work(tmp_path), "the other's end")
            assert loader.warm() is None, "another is begun"


def test_an_environment_of_its_own_or_a_test_of_the_child_has_one_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(MetaLoader(tmpdir=tmp_path)) as loader:
        assert loader.warm() is None and not is_started(loader)
    with cold(), closing(MetaLoader(tmpdir=tmp_path)) as loader:
        assert loader.warm() is None and is_started(loader)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with closing(MetaLoader(tmpdir=tmp_path)) as loader:
        assert loader.warm() is None and is_started(loader)


def test_whoever_is_killed_while_it_asks_ends_nothing_for_the_next(tmp_path: Path) -> None:
    for said in (b"", json.dumps([CHILD, {"LANG": "other"}, str(tmp_path)]).encode()):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as wire, Path(os.devnull).open() as nothing:
            wire.connect(str(Path(os.environ[PROGRAM]).with_name("socket")))
            if said:
                socket.send_fds(wire, [said], [nothing.fileno()] * 3)
    with closing(MetaLoader(tmpdir=tmp_path)) as loader:
        assert loader.warm() is None and not is_started(loader)
