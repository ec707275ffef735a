"""Resharding one checkpoint repository, from open to publish. Read this file first.

Each step needs only the results of the steps before it, so it can run again at any time on any machine: `run` calls
them one after the other in this process, the worker calls each under a lease.

    plan     headers only                               -> Plan
    copy     the shards that begin in one source file   -> receipts, batch by batch, and what attests the bytes
    check    reload on the meta device, headers only    -> checks
    publish  the one commit                             -> Published
    confirm  compare the commit with plan and receipts  -> a check
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from posixpath import join
from typing import TypeVar
from uuid import uuid4

from reshard.pipeline.check import Check, first, prior_checks
from reshard.pipeline.checkpoint.discover import Found, find_checkpoints, is_weight_index, read_file
from reshard.pipeline.checkpoint.open import Opened, open_checkpoints
from reshard.pipeline.copying.loop import Attested, Moved, copy
from reshard.pipeline.copying.stream import Tick
from reshard.pipeline.errors import (
    DigestsDiffer,
    FoldersNested,
    ObjectLost,
    ReceiptWrong,
    ReshardError,
    RevisionNotFound,
    SourceChanged,
    SourceCorrupt,
    TargetDrifted,
    TargetMoreVisible,
    TargetNotFound,
)
from reshard.pipeline.limits import CONFIG_MAX, COPIES, INDEX_MAX
from reshard.pipeline.places import Folder, Hub, resolved
from reshard.pipeline.planning.build import Before, Known, drift, excluded, make_plan, request_key, weights_key
from reshard.pipeline.planning.model import Keys, Plan, Receipt, Transports
from reshard.pipeline.protocols import Source, Target, TargetState, reach
from reshard.pipeline.publishing import history as publication
from reshard.pipeline.publishing.card import card_for
from reshard.pipeline.publishing.commit import Published, check_receipts, publish
from reshard.pipeline.request import Request
from reshard.pipeline.stores.connect import Context, open_source, open_target
from reshard.pipeline.stores.overlay import Borrowing
from reshard.pipeline.stores.scratch import ScratchSpace
from reshard.pipeline.tensors import Attestation, Name, Pin
from reshard.pipeline.verifying.job_checks import check, check_model, check_structure, confirm
from reshard.pipeline.verifying.meta_load import MetaLoader

T = TypeVar("T")

__all__ = [
    "Report",
    "check",
    "check_receipts",
    "confirm",
    "copy",
    "draft",
    "exposed",
    "plan",
    "publish",
    "run",
    "source_of",
]


def source_of(request: Request, context: Context, plan: Plan | None = None) -> Source:
    """The source that ``request`` names, with what another repository lends it.

    With a ``plan`` it is the very state that was planned; raises SourceChanged when there is none any more.
    """
    own = _open(request.source, context, request, plan.pin if plan else None, plan.transports.source if plan else "")
    lender = request.options.config_from
    if lender is None:
        return own
    return Borrowing(own, _open(lender, context, request, plan.lender if plan else None))


def _open(place: Hub | Folder, context: Context, request: Request, pin: Pin | None, chosen: str = "") -> Source:
    try:
        source = open_source(place, context, pin.commit if pin else None, request.options.transport, chosen)
    except RevisionNotFound as error:
        if pin is None:
            raise
        raise SourceChanged(place=str(place), what=f"commit {pin.commit} is gone") from error
    if pin is not None and source.pin != pin:
        raise SourceChanged(place=str(place), what=f"it is at {source.pin} and was planned at {pin}")
    return source


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Planning makes millions of objects and no cycles; the collector's walks over them take a third of its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_collector_paused()
def draft(request: Request, source: Source, target: Target, meta_loader: MetaLoader | None = None) -> Plan:
    """The plan for ``request`` as things stand; changes nothing anywhere.

    ``meta_loader`` is asked only for which tied names are the sources, where the request wants to know.
    Raises whatever is wrong with the source, the target or the options, before a byte of any tensor is read. What
    others changed in the target is in the plan, which replaces it.
    """
    return _draft(request, source, target, meta_loader, replaces=True, submitted=None)[0]


@_collector_paused()
def plan(
    request: Request, source: Source, target: Target, meta_loader: MetaLoader, submitted: int | None = None
) -> Plan:
    """The plan for ``request``, and a target that is ready for it: there, ours to write, its head pinned.

    ``submitted`` is when it was asked for, in ms since the epoch. Raises what ``draft`` raises, the AccessError family,
    ModelCheckRequired, and TargetDrifted unless the request says that what others changed is to be replaced, and so for
    what was submitted later and is published already: a broker restored from a backup has forgotten that.
    """
    made, known = _draft(request, source, target, meta_loader, request.options.overwrite, submitted)
    if made.published is not None:
        return made
    if request.options.require == "model":
        check_model(made, made.shards, source, meta_loader)
    head = target.prepare(private=_private(request, source))
    if head == made.base:
        return replace(made, notes=(*made.notes, *target.notes), submitted=submitted)
    if made.base:  # somebody commits at this very moment
        return plan(request, source, target, meta_loader, submitted)
    transports = Transports(source.transport, target.transport)
    last = next(publication.publications(target, head, None), None)
    made = make_plan(replace(known, before=_look(target, head, last), transports=transports))
    made = _with_card_notes(made, source, target, last)
    return replace(made, notes=(*made.notes, *target.notes), submitted=submitted)


def _draft(
    request: Request,
    source: Source,
    target: Target,
    meta_loader: MetaLoader | None,
    replaces: bool,
    submitted: int | None,
) -> tuple[Plan, Known]:
    """``replaces``: the plan is made although others changed the target."""
    _refuse_nested_folders(request)
    state = target.state()
    _check_visibility(request, source, target, state)
    lender = source.lender.pin if isinstance(source, Borrowing) else None
    key = request_key(request, source.pin, lender, publication.address(target))
    last = None if state.head is None else next(publication.publications(target, state.head, None), None)
    options = request.options
    believed = None if options.force else last  # our last commit, unless it is to be doubted
    published = believed.commit if believed is not None and believed.request == key else None
    untouched = published is not None and published == state.head
    before = Before(published or "", {}, {}, {}) if untouched else _look(target, state.head, last)
    drifted = drift(before)
    if drifted and not replaces:
        raise TargetDrifted(target=str(request.target), what=first(drifted))
    if last is not None and published is None and not replaces and last.is_later(submitted, time.time()):
        what = f"commit {last.commit[:12]} has what was asked for later"
        raise TargetDrifted(target=str(request.target), since="after this was submitted", what=what)
    if published is not None and not drifted:
        return _nothing(request, source, lender, key, published, before.head)
    listing = source.files()
    found = find_checkpoints(source, lambda path: excluded(options, path))
    keys = Keys(key, weights_key(found, listing, options))
    believed = None if drifted else believed
    same_weights = believed is not None and believed.weights is not None and believed.weights == keys.weights
    opened = Opened((), (), {}) if same_weights else open_checkpoints(source, found)
    found = found.without_maps()
    configs = _configs(source, opened)
    known = Known(
        request,
        source.pin,
        keys,
        found,
        opened,
        listing,
        before,
        None,
        Transports(source.transport, target.transport if state.head else ""),
        lender,
        ties=_ties(opened, configs, meta_loader) if options.ties == "source" else {},
        configs={} if options.dtype == "keep" else {path: text.decode() for path, text in configs.values()},
    )
    made = make_plan(known)
    if made.shards:
        check_structure(made, opened, known.ties)
    return _with_card_notes(made, source, target, last), known


def _with_card_notes(made: Plan, source: Source, target: Target, last: publication.Publication | None) -> Plan:
    notes = card_for(made, source, target, made.base, lambda: last).notes
    return replace(made, notes=(*made.notes, *notes)) if notes else made


def _nothing(
    request: Request, source: Source, lender: Pin | None, key: str, published: str, head: str
) -> tuple[Plan, Known]:
    """The plan where ``published``, ours, holds what is asked for and nobody changed it: no file needs to be listed."""
    known = Known(
        request, source.pin, Keys(key, None), Found((), frozenset()), Opened((), (), {}), {},
        Before(head, {}, {}, {}), published, lender=lender,
    )  # fmt: skip
    return make_plan(known), known


def _configs(source: Source, opened: Opened) -> dict[Name, tuple[str, bytes]]:
    """The path and content of the config that says how each checkpoint is loaded, where there is one."""
    listing = source.files()
    paths = {c.name: join(c.name.folder, "config.json") for c in opened.checkpoints}
    return {
        name: (path, read_file(source, listing[path], CONFIG_MAX)) for name, path in paths.items() if path in listing
    }


def _ties(
    opened: Opened, configs: Mapping[Name, tuple[str, bytes]], meta_loader: MetaLoader | None
) -> dict[Name, Mapping[str, str]]:
    """Of each model whose file stores names once: which parameter each of the others is tied to."""
    tied = [c for c in opened.checkpoints if c.ties and c.name in configs]
    if not tied:
        return {}
    if meta_loader is None:
        with closing(MetaLoader()) as ours:
            return _ties(opened, configs, ours)
    names = {c.name: {t.name: (t.dtype, t.shape) for t in c.tensors} for c in tied}
    return {name: meta_loader.check(configs[name][1], tensors).ties for name, tensors in names.items()}


def _look(target: Target, head: str | None, last: publication.Publication | None) -> Before:
    """What the target holds at ``head``; ``last`` is our last publication there."""
    if head is None:
        return Before("", {}, {}, {})
    there = target.at(head)
    files = there.files()
    indexes = {path: read_file(there, file, INDEX_MAX) for path, file in files.items() if is_weight_index(path)}
    published = {}
    if last is not None:
        then = files if last.commit == head else target.at(last.commit).files()
        published = {path: file for path, file in then.items() if path not in last.kept}
    return Before(head, files, indexes, published)


def _refuse_nested_folders(request: Request) -> None:
    """A folder and one inside it cannot be source and target; raises FoldersNested. One folder may be both."""
    if not isinstance(request.target, Folder):
        return
    target = resolved(request.target.path)
    for place in (request.source, request.options.config_from):
        source = resolved(place.path) if isinstance(place, Folder) else target
        if source in target.parents:
            what = "the result would become part of its own source"
            raise FoldersNested(inner=request.target.path, outer=str(source), what=what)
        if target in source.parents:
            what = "replacing the target would replace the source"
            raise FoldersNested(inner=str(source), outer=request.target.path, what=what)


def _check_visibility(request: Request, source: Source, target: Target, state: TargetState) -> None:
    if request.options.pr and not state.exists:
        raise TargetNotFound(repo=str(target.place), endpoint=source.pin.endpoint or "this machine")
    hidden = _most_hidden(source)
    if hidden is None or not state.exists or request.options.visibility == "public":
        return
    if reach(state.visibility) > reach(hidden.visibility):
        raise TargetMoreVisible(
            target=str(target.place), shown=state.visibility, source=str(hidden.place), visibility=hidden.visibility
        )


def exposed(request: Request, source: Source) -> Source | None:
    """The private or gated repository that ``request`` asks to be shown to everyone, if it does."""
    hidden = _most_hidden(source)
    return hidden if hidden and hidden.visibility != "public" and request.options.visibility == "public" else None


def _most_hidden(source: Source) -> Source | None:
    """Of the repositories that are read the one that the fewest may see; folders may go where their owner says."""
    both = [source.own, source.lender] if isinstance(source, Borrowing) else [source]
    return min((one for one in both if one.pin.endpoint), key=lambda one: reach(one.visibility), default=None)


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
    attested: dict[str, Attestation]  # by source file
    moved: Moved


@dataclass(frozen=True, slots=True)
class Watcher:
    """What `run` tells while it works: the plan once it stands, bytes read, and each step by name.

    ``exposing`` is called first where a repository that is not public would be shown to everyone; it may raise.
    """

    exposing: Callable[[Source], None] = lambda source: None
    planned: Callable[[Plan], None] = lambda plan: None
    moved: Tick = lambda count: None
    step: Callable[[str], None] = lambda name: None


def run(
    request: Request,
    context: Context | None = None,
    watcher: Watcher | None = None,
    meta_loader: MetaLoader | None = None,
) -> Report:
    """Carry out ``request`` in this process: what the queue does in many. A given ``meta_loader`` stays warm.

    Without a ``context``, tokens and limits come from the environment. Raises ReshardError, whose families say why.
    """
    context = context or Context.from_env()
    if meta_loader is None:
        with closing(MetaLoader(tmpdir=context.tmpdir)) as ours:
            return run(request, context, watcher, ours)
    watcher = watcher or Watcher()
    source = source_of(request, context)
    if (hidden := exposed(request, source)) is not None:
        watcher.exposing(hidden)
    target = open_target(request.target, request.options, context)
    watcher.step("plan")
    made = plan(request, source, target, meta_loader, round(time.time() * 1000))
    watcher.planned(made)
    if made.published is not None:
        return Report(made, Published(made.published, target.branch, found=True), (), {}, Moved())

    def moved(count: int) -> None:
        watcher.moved(count)
        if checking.done():
            checking.result()  # raises what the check did: copying on would be of no use

    work = _Work(made, source, target, uuid4().hex, context.disk, moved)
    try:
        watcher.step("copy")
        with _behind(lambda: check(made, made.shards, source, meta_loader)) as checking:
            work.copy()
            watcher.step("check")
            checks = checking.result()
        with prior_checks(checks):
            watcher.step("publish")
            published = work.publish()
            checks.append(check_receipts(made.shards, work.receipts, work.groups, made))
            watcher.step("confirm")
            checks.append(confirm(made, made.shards, work.receipts, published, target))
    finally:
        target.discard(work.token)
    levels = {path: level for group in work.groups for path, level in group.files.items()}
    return Report(made, published, tuple(checks), levels, work.moved)


@contextmanager
def _behind(work: Callable[[], T]) -> Iterator[Future[T]]:
    """``work`` in a thread beside the body; when the body fails, it is not waited for."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="reshard-check")
    try:
        yield pool.submit(work)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class _Work:
    """What a run copied so far. What turns out to be damaged or lost on the way is copied again, as on the queue."""

    def __init__(self, made: Plan, source: Source, target: Target, token: str, disk: ScratchSpace, tick: Tick) -> None:
        self.token = token
        self.receipts: dict[str, Receipt] = {}
        self.moved = Moved()
        self._made, self._source, self._target = made, source, target
        self._disk, self._tick = disk, tick
        self._attested: dict[int, Attested] = {}  # by group
        self._damaged: Counter[int | None] = Counter()  # by group; None: of the commit

    @property
    def groups(self) -> list[Attested]:
        return [self._attested[number] for number in sorted(self._attested)]

    def copy(self) -> None:
        """Copy what has no receipt; raises SourceCorrupt or DigestsDiffer when a group failed ``COPIES`` times."""
        sink, shards = self._target.sink(self.token), dict(enumerate(self._made.shards))
        todo = [group for group in self._made.groups if group.number not in self._attested]
        while todo:
            group = todo[0]
            try:
                self._attested[group.number] = copy(
                    self._made, group, shards, self._source, sink, self.receipts, self._sealed, self._tick, self._disk
                )
                todo.pop(0)
            except (SourceCorrupt, DigestsDiffer) as error:
                self._damage(group.number, error)
                for number in group.shards:
                    self.receipts.pop(shards[number].digest, None)

    def publish(self) -> Published:
        made = self._made
        while True:
            try:
                return publish(
                    made, made.shards, self.receipts, self.groups, self._source, self._target, self.token, lambda: None
                )
            except (SourceCorrupt, ObjectLost, ReceiptWrong) as error:
                self._damage(None, error)
                lost = set(error.facts.get("lost", ()))
                void = {d for d, r in self.receipts.items() if r.sha256 in lost} | set(error.facts.get("void", ()))
                again = [g.number for g in made.groups if any(made.shards[n].digest in void for n in g.shards)]
                if not again and not isinstance(error, SourceCorrupt):
                    raise
                for number in again:
                    self._attested.pop(number, None)
                for digest in void:
                    self.receipts.pop(digest, None)
                self.copy()

    def _damage(self, group: int | None, error: ReshardError) -> None:
        """Count ``error``, and raise it the last time."""
        self._damaged[group] += 1
        if self._damaged[group] == COPIES:
            raise error

    def _sealed(self, news: list[Receipt], moved: Moved) -> None:
        self.receipts.update((receipt.shard, receipt) for receipt in news)
        self.moved = self.moved.plus(moved)
