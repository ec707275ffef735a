"""Kombu's transport over Redis, but neither what clients put on a queue nor a lost connection can end a worker.

Kombu trusts its broker: a message that it cannot read, or cannot put back because its connection is gone, raises in the
event loop of a worker's main process and ends it.
"""

from __future__ import annotations

import logging
from typing import Any

from kombu.transport import TRANSPORT_ALIASES, redis

from reshard.pipeline.errors import shortened
from reshard.worker.queue.messages import UNREADABLE, Message, NotAMessage, envelope
from reshard.worker.queue.wakes import QUEUES, WAKE

log = logging.getLogger(__name__)


class Channel(redis.Channel):
    """Drops a message that cannot be read, and one that cannot be put back: control sends wakes again."""

    do_restore = False  # a connection that is lost has nothing to send back: no message waits unstarted in a worker

    def _brpop_read(self, **options: Any) -> Any:
        connection, before = self.client.connection, dict(self.qos._delivered)
        try:
            read: Any = super()._brpop_read
            return read(**options)
        except UNREADABLE as error:
            if not connection.is_connected:
                raise
            for tag, message in self.qos._delivered.items():
                if before.get(tag) is not message:
                    self.qos.ack(tag)  # else it counts as one that is being worked on
            log.error("dropped a message that is not a wake: %s: %s", type(error).__name__, str(error)[:200])
            return True

    def basic_reject(self, delivery_tag: str, requeue: bool = False) -> None:
        if self.closed:  # a child died just before the connection was lost
            log.warning("a wake was not put back: its connection is closed; the control process will send it again")
        else:
            reject: Any = super().basic_reject
            reject(delivery_tag, requeue=requeue)


class Transport(redis.Transport):
    """Lets nothing through to a worker but wakes, and of these the job alone.

    Celery would send what a message links to, as any task of any app on this broker, and end a child by its time limit.
    """

    Channel = Channel

    def _deliver(self, message: Any, queue: str) -> None:
        if queue in QUEUES:
            found = Message.read(message)
            if found.task != WAKE:
                raise NotAMessage(f"it is for the task {shortened(found.task)}")
            if not (len(found.args) == 1 and isinstance(found.args[0], str)):
                raise NotAMessage("it does not name a job")
            message = envelope(queue, WAKE, found.args, {}, found.id)
        deliver: Any = super()._deliver
        deliver(message, queue)


def use() -> None:
    """Have every connection of this process made by this transport; redis+socket:// is an alias of redis."""
    for scheme in ("redis", "rediss"):
        TRANSPORT_ALIASES[scheme] = f"{__name__}:Transport"
