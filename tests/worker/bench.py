"""One job, and a worker in this process that does its units one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from reshard.pipeline import errors
from reshard.pipeline.places import parse_place
from reshard.pipeline.request import Options, Request
from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.worker.process import OwnProcess
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Leases
from reshard.worker.queue.record import Job
from reshard.worker.settings import Settings
from tests.support.models import add_friends, arrays, numbered, save_sharded
from tests.support.procs import Broker
from tests.worker.conftest import SIZE, age

DISK = errors.DiskFull(path="/", needed=2, free=1)
EXPIRED = errors.TokenRefused(endpoint="https://hub")


@pytest.fixture
def steps(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module that a worker loads; it needs a broker's URL to be imported at all."""
    monkeypatch.setenv("RESHARD_BROKER_URL", broker.url)
    from reshard.worker import steps

    yield steps


@pytest.fixture(scope="module")
def one_reload(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MetaLoader]:
    """One reload child, which is started when it is first asked for and ends with these tests."""
    with closing(MetaLoader(tmpdir=tmp_path_factory.mktemp("reload"))) as meta_loader:
        yield meta_loader


class Lent(OwnProcess):
    """What a process keeps, but for a reload child that outlives it."""

    def __init__(self, tmpdir: Path, meta_loader: MetaLoader) -> None:
        super().__init__(tmpdir)
        self._lent = meta_loader

    def meta_loader(self) -> MetaLoader:
        return self._lent


class Bench:
    """One job between two folders, and a worker in this process that does one unit at a time."""

    def __init__(self, steps: Any, store: JobStore, leases: Leases, folder: Path, meta_loader: MetaLoader) -> None:
        self.steps, self.store, self.leases, self.folder = steps, store, leases, folder
        self.process = Lent(folder / "tmp", meta_loader)
        self.source, self.target = folder / "model", folder / "out"
        save_sharded(self.source, numbered(arrays(24, 4000), 4))
        add_friends(self.source)
        self.settings = Settings(allowed_folders=(folder,), attempts=3, backoff_first=5)
        (folder / "tmp").mkdir()
        request = Request(
            source=parse_place(str(self.source)), target=parse_place(str(self.target)), options=Options(size=SIZE)
        )
        self.id = store.submit(request).id

    @property
    def job(self) -> Job:
        return self.store.get(self.id)

    def step(self) -> str:
        """Do the next unit, when its time has come; returns its name."""
        age(self.store, self.id, 1000)
        lease = self.leases.claim(self.id)
        assert lease is not None
        self.steps.work(self.leases, lease, self.settings, self.process)
        return lease.unit

    def until(self, reached: Callable[[Job], bool]) -> None:
        for _ in range(50):
            if reached(self.job):
                return
            self.step()
        raise AssertionError(f"it is {self.job.state}: {self.job.last_error}")

    def to_publish(self) -> None:
        self.until(lambda job: self.store.redis.zrange(f"reshard:job:{job.id}:todo", 0, -1) == [b"publish"])


@pytest.fixture
def bench(steps: Any, store: JobStore, leases: Leases, tmp_path: Path, one_reload: MetaLoader) -> Iterator[Bench]:
    bench = Bench(steps, store, leases, tmp_path, one_reload)
    yield bench
    bench.process.end()


def raising(error: Exception) -> Callable[..., Any]:
    def raise_it(*_: object, **__: object) -> None:
        raise error

    return raise_it
