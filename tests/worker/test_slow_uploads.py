"""A line that is slow upwards: what is sent keeps a lease as well as what is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from reshard.pipeline.places import Hub
from reshard.pipeline.request import Options, Request
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.states import JobState
from tests.hub.fixtures import Namespace
from tests.support.models import save_single
from tests.support.procs import Broker, Machine, wait_for


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "sent"), [("http", r"^PUT /_lfs/"), ("xet", r"^POST .*/v1/xorbs/")])
def test_an_upload_slower_than_the_stall_keeps_its_lease(
    tmp_path: Path, namespace: Namespace, transport: str, sent: str
) -> None:
    noise = np.random.default_rng(3).integers(0, 2**16, 6_000_000, dtype=np.uint16)
    save_single(tmp_path / "model", {"a": noise[:3_000_000], "b": noise[3_000_000:]})
    source, target = namespace.repo("source"), namespace.repo("target")
    namespace.admin.create_repo(source)
    content = (tmp_path / "model" / "model.safetensors").read_bytes()
    namespace.admin.put_files(source, {"model.safetensors": content}, lfs=["model.safetensors"])
    namespace.admin.fault(sent, "throttle", rate=1_500_000)
    quick = {"RESHARD_STALL": "3", "RESHARD_LEASE": "2"}
    hub = {"HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": namespace.token}
    options = Options(size=7_000_000, transport=transport)
    with (
        Broker(tmp_path) as broker,
        Machine(tmp_path / "machine", broker.url, **hub, **quick) as machine,
        JobStore.at(broker.url) as store,
    ):
        machine.control()
        machine.worker(concurrency=2)
        job = store.submit(Request(source=Hub(repo=source), target=Hub(repo=target), options=options)).id
        wait_for(lambda: store.get(job).state.ended, "the end of the job")
        events = [event for _, event in store.events(job)]
        assert store.get(job).state == JobState.done, store.get(job).error
    assert not [event for event in events if event["kind"] == "lost"]
    assert len([event for event in events if event["kind"] == "claimed" and event["unit"] == "group:00000"]) == 1
