"""Where operations are carried out: by the service behind RESHARD_API_URL, else on the queue of the broker."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from reshard.client.operations.table import InProcess, Session
from reshard.client.queue import open_queue


def user_name() -> str:
    """Of whoever runs this process; in containers, often a number without a name."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # KeyError: before Python 3.13
        return str(os.getuid())


def asked_by() -> str:
    return f"{user_name()}@{socket.gethostname()}"


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
