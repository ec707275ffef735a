"""Which queue the commands of jobs ask: the one behind RESHARD_API_URL, else that of the broker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from reshard.client.jobs import Jobs
from reshard.client.queue import open_queue


@contextmanager
def open_jobs() -> Iterator[Jobs]:
    """The jobs of the queue that is configured or running here; raises what ``open_queue`` does, or the methods do."""
    from reshard.worker.settings import settings

    asked = settings()
    if asked.api_url is None:
        from reshard.client.broker import BrokerJobs

        with open_queue() as queue:
            yield BrokerJobs(queue)
    else:
        from reshard.client.remote import RemoteJobs

        token = asked.api_token.get_secret_value() if asked.api_token else None
        with RemoteJobs.at(asked.api_url, token) as jobs:
            yield jobs
