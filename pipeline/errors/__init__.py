"""Every way in which reshard says no.

    ReshardError
    ├── UsageError          2   what was asked for makes no sense
    ├── SourceError         3   what should be read is not there, or not ours to read
    ├── AccessError         4   credentials, and what operators allow
    ├── CheckpointError     5   the files at the source are broken, hostile or of an unknown kind
    ├── ProofError          6   something was lost or changed on the way
    ├── TargetError         7   the target is not as it must be to publish
    ├── ResourceError       8   disk or memory
    ├── HubError            9   the Hub's weather: unreachable, slow, full
    ├── QueueError         10   the broker and its workers
    └── JobError           11   the job itself: cancelled, refused, failed too often

An error is data: a searchable ``code``, the ``facts`` that fill its one line, and a ``hint``: the next command to type,
or what else is to be done. The exit code belongs to the family; ``retryable`` says whether the same work may succeed
later. A job keeps ``to_dict()``, and ``from_dict`` gives the same error back on another machine.
"""

from __future__ import annotations

from reshard.pipeline.errors.base import *  # noqa: F403
from reshard.pipeline.errors.content import *  # noqa: F403
from reshard.pipeline.errors.requests import *  # noqa: F403
from reshard.pipeline.errors.work import *  # noqa: F403
