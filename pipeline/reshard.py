"""Resharding one checkpoint repository, from open to publish. Read this file first.

Each step is a function of what the steps before it left behind, and may be run again at any time on any machine:
`run` calls them one after the other in this process, the worker calls each under a lease.

    plan     headers only                               -> Plan
    copy     the bytes of one source file's shards      -> receipts, batch by batch, and what attests the bytes
    check    reload on the meta device, headers only    -> checks
    publish  the one commit                             -> Published
    confirm  read back what was published               -> a check
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from reshard.pipeline import publication
from reshard.pipeline.copy import Attested, Tick, copy
from reshard.pipeline.errors import TargetMoreVisible, TargetNotFound
from reshard.pipeline.limits import INDEX_MAX
from reshard.pipeline.open import Opened, find_checkpoints, is_weight_index, open_checkpoints, read_file
from reshard.pipeline.plan import Keys, Plan, Receipt
from reshard.pipeline.planner import Before, check_drift, excluded, make_plan, request_key, weights_key
from reshard.pipeline.publish import Published, publish
from reshard.pipeline.request import Request
from reshard.pipeline.stores.open import Context, open_source, open_target
from reshard.pipeline.stores.protocols import Source, Target, TargetState
from reshard.pipeline.verify.checks import Check, check_model, check_structure, confirm
from reshard.pipeline.verify.reload import Reload

__all__ = ["Report", "check_model", "confirm", "copy", "draft", "plan", "publish", "run"]


def draft(request: Request, source: Source, target: Target) -> Plan:
    """The plan for ``request`` as things stand; changes nothing anywhere.

    Raises whatever is wrong with the source, the target or the options, before a byte of any tensor is read.
    """
    return _draft(request, source, target)[0]


def plan(request: Request, source: Source, target: Target, reload: Reload) -> Plan:
    """The plan for ``request``, and a target that is ready for it: there, ours to write, its head pinned.

    Raises what ``draft`` raises, the AccessError family, and ModelCheckRequired.
    """
    made, opened = _draft(request, source, target)
    if made.published is not None:
        return made
    if request.options.require == "model":
        check_model(made, made.shards, source, reload)
    head = target.prepare(private=_private(request, source))
    return made if head == made.base else _plan(request, source, target, head, opened)[0]


def _draft(request: Request, source: Source, target: Target) -> tuple[Plan, Opened]:
    state = target.state()
    _check_visibility(request, source, target, state)
    return _plan(request, source, target, state.head, None)


def _plan(
    request: Request, source: Source, target: Target, head: str | None, opened: Opened | None
) -> tuple[Plan, Opened]:
    """The plan on top of ``head``, and the headers that it was made from; ``opened`` where they were read before."""
    options = request.options
    found = find_checkpoints(source, lambda path: excluded(options, path))
    listing = source.files()
    before, last = _look(target, head)
    where = f"{target.place}#{target.branch}"
    keys = Keys(request_key(request, source.pin, where), weights_key(found, listing, options))
    check_drift(request, before)
    published = None
    if last is not None and not options.force:
        if last.weights is not None and last.weights == keys.weights:
            opened = Opened((), (), {})
        published = last.commit if last.request == keys.request else None
    opened = opened or open_checkpoints(source, found)
    made = make_plan(request, source.pin, keys, found, opened, listing, before, published)
    if made.shards:
        check_structure(made, opened)
    return made, opened


def _look(target: Target, head: str | None) -> tuple[Before, publication.Publication | None]:
    """What the target holds at ``head``, and our last publication there."""
    if head is None:
        return Before("", {}, {}, {}), None
    there = target.at(head)
    files = there.files()
    indexes = {path: read_file(there, file, INDEX_MAX) for path, file in files.items() if is_weight_index(path)}
    last = next(publication.publications(target, head, None), None)
    published = {}
    if last is not None:
        then = files if last.commit == head else target.at(last.commit).files()
        published = {path: file for path, file in then.items() if path not in last.kept}
    return Before(head, files, indexes, published), last


def _check_visibility(request: Request, source: Source, target: Target, state: TargetState) -> None:
    if request.options.pr and not state.exists:
        raise TargetNotFound(repo=str(target.place), endpoint=source.pin.endpoint or "this machine")
    hidden = source.visibility != "public" and source.pin.endpoint is not None
    if state.exists and state.visibility == "public" and hidden and request.options.visibility != "public":
        raise TargetMoreVisible(target=str(target.place), source=str(source.place), visibility=source.visibility)


def _private(request: Request, source: Source) -> bool:
    """A new target is as visible as its source; a folder's owner has not said that everyone may have it."""
    if request.options.visibility == "as-source":
        return source.visibility != "public"
    return request.options.visibility == "private"


@dataclass(frozen=True, slots=True)
class Report:
    """How a run ended: the plan, where the result is, and what was checked."""

    plan: Plan
    published: Published
    checks: tuple[Check, ...]
    attested: dict[str, str]  # source file -> what its bytes were held against: "checked" (sha256) or "crc"


@dataclass(frozen=True, slots=True)
class Watcher:
    """What `run` tells while it works: the plan once it stands, bytes read, and each step by name."""

    planned: Callable[[Plan], None] = lambda plan: None
    moved: Tick = lambda count: None
    step: Callable[[str], None] = lambda name: None


def run(request: Request, context: Context, watcher: Watcher | None = None, reload: Reload | None = None) -> Report:
    """Carry out ``request`` in this process: what the queue does in many. A given ``reload`` stays warm."""
    if reload is None:
        with closing(Reload()) as ours:
            return run(request, context, watcher, ours)
    watcher = watcher or Watcher()
    source = open_source(request.source, context, transport=request.options.transport)
    target = open_target(request.target, request.options, context)
    token = uuid4().hex
    watcher.step("plan")
    made = plan(request, source, target, reload)
    watcher.planned(made)
    if made.published is not None:
        return Report(made, Published(made.published, target.branch, found=True), (), {})
    try:
        watcher.step("copy")
        receipts, attested = _copy_all(made, source, target, token, context.tmpdir, watcher.moved)
        watcher.step("check")
        checks = check_model(made, made.shards, source, reload)
        watcher.step("publish")
        published = publish(made, made.shards, receipts, attested, source, target, token, begin=lambda: None)
        watcher.step("confirm")
        checks.append(confirm(made, made.shards, receipts, published, target))
    finally:
        target.discard(token)
    levels = {path: level for group in attested for path, level in group.files.items()}
    return Report(made, published, tuple(checks), levels)


def _copy_all(
    made: Plan, source: Source, target: Target, token: str, tmpdir: Path, tick: Tick
) -> tuple[dict[str, Receipt], Sequence[Attested]]:
    shards = dict(enumerate(made.shards))
    receipts: dict[str, Receipt] = {}

    def sealed(news: list[Receipt]) -> None:
        receipts.update((receipt.shard, receipt) for receipt in news)

    sink = target.sink(token)
    attested = [copy(made, group, shards, source, sink, receipts, sealed, tick, tmpdir) for group in made.groups]
    return receipts, attested
