"""One job, two machines that share nothing but the broker and the Hub."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from reshard.pipeline.places import Folder, Hub
from reshard.pipeline.request import Options, Request
from reshard.pipeline.reshard import run
from reshard.pipeline.stores.connect import Context
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.states import JobState
from tests.hub.fixtures import Namespace
from tests.support.checker import from_hub, read_checkpoint
from tests.support.models import arrays, numbered, save_sharded
from tests.support.procs import Broker, Machine, wait_for

SIZE = 210_000  # bytes; five shards of four tensors for each of the four source files


@pytest.mark.parametrize("transport", ["http", pytest.param("xet", marks=pytest.mark.slow)])
def test_two_workers_without_a_shared_disk_finish_one_job_together(
    tmp_path: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    folder = tmp_path / "model"
    save_sharded(folder, numbered(arrays(80, 50_000), 4))
    source, target = namespace.repo("source"), namespace.repo("target")
    namespace.admin.create_repo(source)
    contents = {path.name: path.read_bytes() for path in folder.iterdir()}
    namespace.admin.put_files(source, contents, lfs=[path for path in contents if path.endswith(".safetensors")])
    namespace.admin.fault(r"^GET .*model-0000\d-of", "throttle", rate=800_000)
    hub = {"HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": namespace.token}
    request = Request(source=Hub(repo=source), target=Hub(repo=target), options=Options(size=SIZE, transport=transport))
    with (
        Broker(tmp_path) as broker,
        Machine(tmp_path / "a", broker.url, **hub) as first,
        Machine(tmp_path / "b", broker.url, **hub) as second,
        JobStore.at(broker.url) as store,
    ):
        first.control()
        workers = [machine.worker(concurrency=1) for machine in (first, second)]
        job = store.submit(request).id
        wait_for(lambda: store.get(job).state.ended, "the end of the job")
        assert store.get(job).state == JobState.done, store.get(job).error
        copied = bytes_by_worker(store, job)
    assert len(copied) == len(workers) == 2
    assert min(copied.values()) >= 0.3 * sum(copied.values()), copied
    assert not [path for machine in (first, second) for path in machine.tmpdir.rglob("*.safetensors")]

    monkeypatch.setenv("HF_ENDPOINT", namespace.endpoint)
    monkeypatch.setenv("HF_TOKEN", namespace.token)
    namespace.admin.clear_faults()
    run(request.model_copy(update={"target": Folder(path=str(tmp_path / "out"))}), Context.from_env())
    shards = sorted((tmp_path / "out").glob("model*"))
    assert len(shards) == 21, "twenty shards and their index"
    fetch = from_hub(namespace.endpoint, target)
    assert read_checkpoint(fetch) == read_checkpoint(from_hub(namespace.endpoint, source))
    assert {path.name: fetch(path.name) for path in shards} == {path.name: path.read_bytes() for path in shards}


def bytes_by_worker(store: JobStore, job: str) -> Counter[str]:
    """How many bytes each worker stored, by the events of the job."""
    owner: dict[str, str] = {}
    copied: Counter[str] = Counter()
    for _, event in store.events(job):
        if event["kind"] == "claimed":
            owner[event["unit"]] = event["worker"].rpartition(".")[0]
        elif event["kind"] == "sealed":
            copied[owner[event["unit"]]] += int(event["bytes"])
    return copied
