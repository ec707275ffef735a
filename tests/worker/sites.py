"""A service of real processes around one broker, with a model on the Hub that it is to reshard."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from reshard.pipeline.places import Hub
from reshard.pipeline.request import Options, Request
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.record import Job
from reshard.worker.queue.states import JobState
from tests.hub.fixtures import Namespace
from tests.support.checker import from_hub, read_checkpoint
from tests.support.models import save_model
from tests.support.procs import Broker, Machine, Proc, wait_for
from tests.support.stuck import STUCK
from tests.worker.conftest import draft_plan

SIZE = 200_000  # bytes; four shards a source file
LEASE = 2.0  # seconds; so that a dead worker is missed soon
WEIGHTS = r"^GET .*model-0000\d-of"  # reads of source weights


class Site:
    """A broker, a control process, one machine, and a model on the Hub that is to be resharded there."""

    def __init__(self, folder: Path, space: Namespace) -> None:
        self.space = space
        self.broker = Broker(folder)
        self.broker.start()
        self.machine = Machine(
            folder, self.broker.url,
            HF_ENDPOINT=space.endpoint, HF_TOKEN=space.token, RESHARD_LEASE=str(LEASE), RESHARD_BACKOFF_FIRST="0.2",
        )  # fmt: skip
        self.machine.control()
        self.client = self.broker.client()
        self.store = JobStore(self.client, self.broker.url)
        self.source = space.repo("model")
        self._header_reads = self._count_header_reads()

    def copier(self) -> tuple[Proc, str]:
        """A worker in the middle of a copy that lasts, and its job."""
        self.slow()
        worker = self.machine.worker()
        job = self.submit()
        self.copying(job)
        return worker, job

    def submit(self, name: str = "out", priority: str = "interactive", **options: object) -> str:
        request = Request(
            source=Hub(repo=self.source),
            target=Hub(repo=self.space.repo(name)),
            options=Options(**{"size": SIZE, **options}),
        )
        return self.store.submit(request.model_copy(update={"priority": priority})).id

    def ended(self, job: str, timeout: float = STUCK) -> Job:
        wait_for(lambda: self.store.get(job).state.ended, f"the end of job {job}", timeout)
        return self.store.get(job)

    def assert_published_once(self, job: str, name: str = "out") -> None:
        seen = self.ended(job)
        assert seen.state == JobState.done, (seen.error, seen.last_error)
        repo = self.space.repo(name)
        assert self.space.admin.state(repo)["commits"] == 2  # the one that made the repository, and ours
        source = read_checkpoint(from_hub(self.space.endpoint, self.source, token=self.space.token))
        assert read_checkpoint(from_hub(self.space.endpoint, repo, token=self.space.token)) == source

    def _count_header_reads(self) -> int:
        """How often a plan reads the weight files, so that a fault can leave planning alone."""
        self.space.admin.log(reset=True)
        draft_plan(self.source, self.space.repo("nothing"), SIZE)
        return sum(1 for entry in self.space.admin.log() if re.search(WEIGHTS, f"{entry['method']} {entry['path']}"))

    def slow(self, rate: int = 200_000) -> int:
        """The first job's weights come at ``rate`` bytes a second, once it is planned."""
        self._rule = self.space.admin.fault(WEIGHTS, "throttle", skip=self._header_reads, rate=rate)
        return self._rule

    def hold(self) -> int:
        """The first job's weights do not come at all, once it is planned."""
        self._rule = self.space.admin.fault(WEIGHTS, "hold", skip=self._header_reads, when="request")
        return self._rule

    def copying(self, job: str) -> str:
        """Waits until a slowed read of the job's weights is under way; returns the unit that it belongs to."""
        self.space.admin.wait_for_fault(self._rule, hits=1)
        return next(held.unit for held in self.store.get(job).claims if held.unit.startswith("group"))

    def close(self) -> None:
        self.space.admin.clear_faults()
        self.machine.__exit__()
        self.client.close()
        self.broker.kill()


@pytest.fixture
def site(namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("HF_ENDPOINT", namespace.endpoint)
    monkeypatch.setenv("HF_TOKEN", namespace.token)
    folder = save_model(tmp_path / "model", 24, 100_000, 4)
    (folder / "config.json").unlink()  # nothing names a class, so no worker starts a reload child
    repo = namespace.repo("model")
    namespace.admin.create_repo(repo)
    contents = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    namespace.admin.put_files(repo, contents, lfs=[path for path in contents if path.endswith(".safetensors")])
    made = Site(tmp_path, namespace)
    yield made
    made.close()
