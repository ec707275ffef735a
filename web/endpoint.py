"""What a page, or what one of its forms does, is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from reshard.client.queue import Queue
from reshard.client.served import Served
from reshard.web.auth import Caller


class Call(NamedTuple):
    """One request of somebody who is known."""

    session: Served
    caller: Caller
    path: Mapping[str, str]
    query: Any  # as pages.site.Fields
    body: Any

    @property
    def queue(self) -> Queue:
        return self.session.queue
