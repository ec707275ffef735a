"""Resharding one checkpoint repository, from open to publish. Read this file first.

Each step is a function of what the steps before it left behind, and may be run again at any time on any machine:
`run` calls them one after the other in this process, the worker calls each under a lease.

    plan        headers only                    -> Plan
    copy_group  one source file's worth         -> receipts, batch by batch, and what attests the bytes
    check       reload on the meta device       -> ModelCheck
    publish     the one commit                  -> Published
    confirm     read back what was published    -> checks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from uuid import uuid4

from reshard.pipeline.copy import Attested, Tick, copy
from reshard.pipeline.open import open_checkpoints
from reshard.pipeline.plan import Group, Plan, Receipt, Shard
from reshard.pipeline.planner import make_plan
from reshard.pipeline.publish import Published, already_published, publish
from reshard.pipeline.request import Request
from reshard.pipeline.stores.open import Context, open_source, open_target
from reshard.pipeline.stores.protocols import Source, Target
from reshard.pipeline.verify.checks import Check, confirm
from reshard.pipeline.verify.reload import ModelCheck, Reload
