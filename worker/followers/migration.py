"""A queue that an earlier release left: what followers need of it is written as they read it, once, by control.

Jobs, leases, catalogs and schedules are where they were, so workers and clients need nothing.
"""

from __future__ import annotations

import json
import logging

import redis

from reshard.pipeline.errors import QueueError
from reshard.worker.followers.notices import HOOKS, NOTICES, keep
from reshard.worker.followers.schedules import AWAITED, LAST_JOB
from reshard.worker.queue.events import create_group
from reshard.worker.queue.scripts import PREFIX, Pipeline, texts, transact

log = logging.getLogger(__name__)

LAYOUT_KEY = f"{PREFIX}layout"  # a string; layout 1 had none
LAYOUT = 2  # 1: each hook had an outbox; what schedules fired was known to Lua


def migrate(client: redis.Redis) -> None:
    """Bring the queue to ``LAYOUT``; raises QueueError for one that a newer release wrote."""

    def step(pipe: Pipeline) -> None:
        found = int(pipe.get(LAYOUT_KEY) or 1)
        if found > LAYOUT:
            what = f"its data has layout {found}, and this release reads up to {LAYOUT}; install the newer release here"
            raise QueueError(what=what)
        outboxes = {hook: texts(pipe.zrange(f"{PREFIX}outbox:{hook}", 0, -1)) for hook in HOOKS}
        old = {id: pipe.hgetall(f"{PREFIX}notice:{hook}:{id}") for hook, ids in outboxes.items() for id in ids}
        awaited = pipe.hgetall(LAST_JOB) if found < LAYOUT else {}
        pipe.multi()
        for _, fields in sorted(old.items()):
            if fields:
                _keep(pipe, {name.decode(): value.decode() for name, value in fields.items()})
        for schedule, job in awaited.items():
            pipe.hsetnx(AWAITED, schedule, job)
        for hook, ids in outboxes.items():
            pipe.delete(f"{PREFIX}outbox:{hook}", f"{PREFIX}hooked:{hook}")
            for id in ids:
                pipe.delete(f"{PREFIX}notice:{hook}:{id}")
        pipe.delete(
            *(f"{PREFIX}unacked{part}" for part in ("", "_index", "_mutex"))
        )  # of Celery's records, which are off by now
        pipe.set(LAYOUT_KEY, LAYOUT)
        if old or awaited:
            log.info("the queue of an earlier release was taken over, with %s notices", len(old))

    for hook in HOOKS:
        if client.exists(f"{PREFIX}outbox:{hook}"):
            create_group(client, NOTICES, hook, "$")
    transact(client, step, LAYOUT_KEY)


def _keep(pipe: Pipeline, fields: dict[str, str]) -> None:
    """A notice of layout 1, whose counts were what HGETALL answers; it keeps its id."""
    if "counts" in fields:
        tally = json.loads(fields["counts"])
        fields["counts"] = json.dumps({name: int(n) for name, n in zip(tally[::2], tally[1::2], strict=True)})
    fields.pop("attempts", None)
    keep(int(fields.pop("at")), **fields)(pipe)
