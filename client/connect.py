"""Where operations are carried out: by the service behind RESHARD_API_URL, else on the queue of the broker."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from reshard.client.operations.table import InProcess, Session
from reshard.client.queue import open_queue


def asked_by() -> str:
    return f"{getpass.getuser()}@{socket.gethostname()}"


@contextmanager
def connect() -> Iterator[Session]:
    """The queue that is configured or running here; raises what ``open_queue`` does, or the operations do."""
    from reshard.worker.settings import settings

    asked = settings()
    if asked.api_url is None:
        with open_queue() as queue:
            yield InProcess(queue, asked_by())
    else:
        from reshard.client.remote import Remote

        token = asked.api_token.get_secret_value() if asked.api_token else None
        with Remote.at(asked.api_url, token) as session:
            yield session
