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

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar, final
from uuid import uuid4

from reshard.pipeline.abreast import abreast, jobs_here
from reshard.pipeline.check import Check, prior_checks
from reshard.pipeline.copying.loop import Attested, Moved, Stopped
from reshard.pipeline.copying.stream import Tick
from reshard.pipeline.deciding import exposed
from reshard.pipeline.drafting import draft, plan, refuse_without_disk, refuse_without_room
from reshard.pipeline.driving import Exhausted, Made, copy_group, groups_of, made_of, publish_copied
from reshard.pipeline.errors import (
    DigestsDiffer,
    ObjectLost,
    ReceiptWrong,
    RevisionNotFound,
    SourceChanged,
    SourceCorrupt,
)
from reshard.pipeline.journal import Journal, journal_key
from reshard.pipeline.places import AnyPlace
from reshard.pipeline.planning.model import Group, Plan, Receipt, Shard
from reshard.pipeline.planning.ranges import parts
from reshard.pipeline.protocols import Sink, Source, Target
from reshard.pipeline.publishing.commit import Published, weights
from reshard.pipeline.publishing.history import address
from reshard.pipeline.publishing.signing import Signer
from reshard.pipeline.request import Request
from reshard.pipeline.stores.connect import Context, open_source, open_target
from reshard.pipeline.stores.overlay import Borrowing
from reshard.pipeline.stores.scratch import ScratchSpace
from reshard.pipeline.tensors import Attestation, Pin
from reshard.pipeline.verifying.job_checks import check, check_model, check_plan, confirm
from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.pipeline.verifying.verdicts import VERDICTS

T = TypeVar("T")

__all__ = [
    "Report",
    "check",
    "confirm",
    "copy_group",
    "draft",
    "exposed",
    "made_of",
    "plan",
    "publish_copied",
    "refuse_without_disk",
    "refuse_without_room",
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


def _open(place: AnyPlace, context: Context, request: Request, pin: Pin | None, chosen: str = "") -> Source:
    if pin is not None and (now := place.on(context.credentials.default_endpoint)) != pin.endpoint:
        raise SourceChanged(place=str(place), what=f"it was planned on {pin.endpoint}, but HF_ENDPOINT is {now} here")
    try:
        source = open_source(place, context, pin.commit if pin else None, request.options.transport, chosen)
    except RevisionNotFound as error:
        if pin is None:
            raise
        raise SourceChanged(place=str(place), what=f"commit {pin.commit} no longer exists") from error
    if pin is not None and source.pin != pin:
        raise SourceChanged(place=str(place), what=f"it is at {source.pin}, but was planned at {pin}")
    return source


@dataclass(frozen=True, slots=True)
class Report:
    """How a run ended: the plan, where the result is, and what was checked."""

    plan: Plan
    published: Published
    checks: tuple[Check, ...]
    attested: dict[str, Attestation]  # by source file
    moved: Moved


# Each step by its name, as people read it.
PHASES = {
    "plan": "planning",
    "copy": "copying",
    "check": "checking the model",
    "publish": "publishing",
    "confirm": "reading back",
}


@final
@dataclass(frozen=True, slots=True)
class Watcher:
    """What `run` tells while it works: the plan once it stands, how many shards an earlier run copied and of how many
    bytes of the source, how many are copied by now, bytes read, and each step by name.

    ``exposing`` is called first where a repository that is not public would be shown to everyone; it may raise. Where
    several source files are copied at a time, ``stored`` and ``moved`` are called by their threads, one call at a time.
    ``noted`` is told, in a line, why those are fewer than ``jobs``.
    """

    exposing: Callable[[Source], None] = lambda source: None
    planned: Callable[[Plan], None] = lambda plan: None
    resumed: Callable[[int, int], None] = lambda shards, bytes_: None
    stored: Callable[[int], None] = lambda shards: None
    moved: Tick = lambda count: None
    step: Callable[[str], None] = lambda name: None
    noted: Callable[[str], None] = lambda line: None

    def __init_subclass__(cls) -> None:  # whose methods the fields would hide
        raise TypeError(f"{cls.__name__}: pass functions to Watcher instead, such as Watcher(noted=print)")


def run(
    request: Request,
    context: Context | None = None,
    watcher: Watcher | None = None,
    meta_loader: MetaLoader | None = None,
    jobs: int | None = 1,
) -> Report:
    """Carry out ``request`` in this process: what the queue does in many. A given ``meta_loader`` stays warm.

    Without a ``context``, tokens and limits come from the environment. ``jobs`` source files are copied at a time, or
    as many as memory and disk allow; with None, also as cores do. Raises ReshardError, whose families say why.
    """
    if context is None:
        with closing(Context.from_env()) as own:
            return run(request, own, watcher, meta_loader, jobs)
    if meta_loader is None:
        with closing(MetaLoader(tmpdir=context.tmpdir, verdicts=context.state_dir / VERDICTS, eager=True)) as ours:
            return run(request, context, watcher, ours, jobs)
    watcher = watcher or Watcher()
    signer = Signer.open(request.options.sign, context.sign_keys, context.builder_id)
    target = open_target(request.target, request.options, context)
    target.recover()  # first, as it may be the source, too
    source = source_of(request, context)
    if (hidden := exposed(request, source)) is not None:
        watcher.exposing(hidden)
    watcher.step("plan")
    made = plan(request, source, target, meta_loader, round(time.time() * 1000), context.disk)
    watcher.planned(made)
    if made.published is not None:
        return Report(made, Published(made.published, target.branch, found=True), (), {}, Moved())
    refuse_without_disk(made, context.disk)
    refuse_without_room(made, target)

    journal = Journal.open(context.state_dir, journal_key(made, source.place.local, address(target)))
    void = {*journal.receipts} if request.options.force else _lost(journal, made, target)
    journal.forget(void, groups_of(made, void))
    if kept := len(journal.receipts):
        noted = (part for s in made.shards if s.digest in journal.receipts for part in parts(s.entries))
        watcher.resumed(kept, sum(part.span for part in noted))

    def moved(count: int) -> None:
        watcher.moved(count)
        if checking.done():
            checking.result()  # raises what the check did: copying on would be of no use

    at_once, fewer = jobs_here(made, jobs, context.memory_limit, context.disk.room())
    if fewer:
        watcher.noted(fewer)
    work = _Work(made, source, target, context.disk, journal, moved, watcher.stored, at_once, signer)
    done = False
    try:
        watcher.step("copy")
        # Not beside the copy: each parses the headers, and half a million tensors take 80 MB for that.
        checks = check_plan(made, made.shards)

        def classes() -> list[Check]:
            with prior_checks(checks):
                return check_model(made, made.shards, source, meta_loader)

        with _behind(classes) as checking:
            work.copy()
            watcher.step("check")
            checks += checking.result()
        with prior_checks(checks):
            watcher.step("publish")
            published, attested, receipts = work.publish()
            done = True
            checks.append(receipts)
            watcher.step("confirm")
            checks.append(confirm(made, made.shards, journal.receipts, published, target))
    except (ObjectLost, ReceiptWrong):
        done = True  # the notes do not help: the next run must not believe them
        raise
    finally:
        try:
            target.discard(work.token)
        finally:
            journal.close(done)
    levels = {path: level for group in attested for path, level in group.files.items()}
    return Report(made, published, tuple(checks), levels, work.moved)


def _lost(journal: Journal, made: Plan, target: Target) -> set[str]:
    """The shards that an earlier run noted and the target's store no longer holds."""
    noted = [shard for shard in made.shards if shard.digest in journal.receipts]
    lost = {file.path for file in target.holds(weights(noted, journal.receipts))} if noted else set()
    return {shard.digest for shard in noted if shard.path in lost}


@contextmanager
def _behind(work: Callable[[], T]) -> Iterator[Future[T]]:
    """``work`` in a thread beside the body; when the body fails, it is not waited for."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="reshard-check")
    try:
        yield pool.submit(work)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@dataclass
class _Work:
    """What a run does by its journal, again where something turns out to be damaged or lost on the way."""

    made: Plan
    source: Source
    target: Target
    disk: ScratchSpace
    journal: Journal
    tick: Tick
    told: Callable[[int], None]
    jobs: int
    signer: Signer | None
    token: str = field(default_factory=lambda: uuid4().hex)
    moved: Moved = field(default_factory=Moved)
    one: threading.Lock = field(default_factory=threading.Lock)  # of the threads that copy tells at a time

    def copy(self) -> None:
        """Copy what has no receipt; raises SourceCorrupt or DigestsDiffer when a group failed ``COPIES`` times."""
        sink, shards, halt = self.target.sink(self.token), dict(enumerate(self.made.shards)), threading.Event()
        todo = [group for group in self.made.groups if group.number not in self.journal.attested]

        def tick(count: int) -> None:
            if halt.is_set():
                raise Stopped("cancel")
            with self.one:
                self.tick(count)

        def group(one: Group) -> None:
            while one.number not in self.journal.attested:
                with suppress(SourceCorrupt, DigestsDiffer, ObjectLost):
                    attested = self._copied(one, shards, sink, tick)
                    self.journal.finish(one.number, attested)

        try:
            abreast(todo, min(self.jobs, max(1, len(todo))), group, halt)
        except Exhausted as often:
            raise often.error from None

    def _copied(self, one: Group, shards: Mapping[int, Shard], sink: Sink, tick: Tick) -> Attested:
        try:
            return copy_group(self.made, one, shards, self.source, sink, self.journal, self._sealed, tick, self.disk)
        except ObjectLost as error:  # the store does not know what it was given just now, of which there is no receipt
            self.journal.spoil(one.number, error, (), ())
            raise

    def publish(self) -> Made:
        """What was published, and the check of what it was made of; raises as ``copy`` does."""
        while True:
            try:
                done = publish_copied(
                    self.made, self.source, self.target, self.token, self.journal, lambda: None, self.signer
                )
            except SourceCorrupt:  # of a file that is carried
                continue
            except Exhausted as often:
                raise often.error from None
            if done is not None:
                return done
            self.copy()

    def _sealed(self, news: list[Receipt], moved: Moved) -> None:
        self.journal.seal(news)
        with self.one:
            self.moved = self.moved.plus(moved)
            self.told(len(self.journal.receipts))
