"""What is read of events when the broker does not answer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from reshard.client.events import Followed
from reshard.client.queue import Queue
from reshard.pipeline.errors import BrokerUnavailable
from reshard.worker.queue.jobs import JobStore
from tests.support.procs import Broker
from tests.worker.conftest import another, ask, claimed


@pytest.mark.parametrize("ask", [lambda followed: followed.look(0.01), lambda followed: followed.progress(10)])
def test_a_broker_that_is_gone_is_said_to_be_and_read_again_once_it_is_back(
    ask: Callable[[Followed], object], tmp_path: Path
) -> None:
    with Broker(tmp_path) as broker, JobStore.at(broker.url) as store, closing(Followed(Queue(store))) as followed:
        assert ask(followed) == []
        broker.kill()
        with pytest.raises(BrokerUnavailable):
            ask(followed)
        broker.start()
        assert ask(followed) == []


def test_jobs_that_wait_to_begin_hide_none_that_is_at_work(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker, JobStore.at(broker.url) as store, closing(Followed(Queue(store))) as followed:
        job = store.submit(ask("first")).id
        claimed(another(store), job, "plan")
        store.submit(ask("second"))
        assert [told.id for told in followed.progress(1)] == [job]
