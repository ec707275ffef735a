"""Messages of Celery's protocol 2 as JSON in the envelope of kombu, read and made by nothing of either.

https://docs.celeryq.dev/en/stable/internals/protocol.html
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

from reshard.pipeline.errors import shortened
from reshard.worker.queue.scripts import PREFIX

SUBMIT = (f"{PREFIX}submit", *(f"{PREFIX}submit\x06\x16{priority}" for priority in (3, 6, 9)))  # as kombu names them
TAKEN = f"{PREFIX}taken"
# What reading a message raises that is not JSON, or no message of Celery's.
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError)


class NotAMessage(ValueError):
    """It is none of Celery's, or none in JSON; says why."""


class Message(NamedTuple):
    """What was sent: a task, what it is called with, and what is to follow it."""

    id: str
    task: str
    headers: Mapping[str, Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    embed: Mapping[str, Any]  # callbacks, errbacks, chain, chord

    @classmethod
    def read(cls, envelope: Any) -> Message:
        """Of an envelope that was parsed; raises NotAMessage."""
        try:
            headers, body = envelope["headers"], envelope["body"]
            if envelope["properties"].get("body_encoding") == "base64":
                body = b64decode(body, validate=True)
            args, kwargs, embed = json.loads(body)
            found = cls(headers["id"], headers["task"], headers, args, kwargs, embed)
        except UNREADABLE as error:
            raise NotAMessage(shortened(f"{type(error).__name__}: {error}")) from None
        wanted = (str, str, dict, list, dict, dict)
        if not all(isinstance(part, kind) for part, kind in zip(found, wanted, strict=True)):
            raise NotAMessage("part of it has the wrong type")
        return found


def envelope(queue: str, task: str, args: Sequence[Any], kwargs: Mapping[str, Any], id: str) -> dict[str, Any]:
    """A message for that list of Redis."""
    body = json.dumps([args, kwargs, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}])
    told = {"argsrepr": repr(tuple(args)), "kwargsrepr": repr(kwargs), "origin": "reshard"}
    return {
        "body": b64encode(body.encode()).decode(),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {"lang": "py", "task": task, "id": id, "root_id": id, "parent_id": None, "group": None, **told},
        "properties": {
            "correlation_id": id,
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": queue},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": str(uuid4()),
        },
    }
