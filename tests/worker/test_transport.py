"""What a worker's connection does that kombu's own would die of; the rest is tested with whole workers."""

from __future__ import annotations

import logging

import pytest
from kombu import Connection, Message, Queue

from reshard.worker.transport import Transport
from tests.support.procs import Broker
from tests.worker.conftest import broker

__all__ = ["broker"]

log = logging.getLogger(__name__)


@pytest.mark.parametrize("lost", [False, True])
def test_a_message_that_cannot_go_back_because_its_connection_is_lost_is_dropped(
    broker: Broker, lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    broker.client().flushall()
    taken: list[Message] = []
    queue = Queue("putback")
    with Connection(broker.url, transport=Transport) as connection:
        connection.Producer().publish({}, routing_key=queue.name, declare=[queue])
        with connection.Consumer(queue, on_message=taken.append):
            connection.drain_events(timeout=30)
        if lost:
            connection.release()
        taken[0].reject_log_error(log, connection.connection_errors, requeue=True)
        assert broker.client().llen(queue.name) == (0 if lost else 1)
    assert ("a wake was not put back" in caplog.text) == lost
