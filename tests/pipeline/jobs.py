"""Jobs that tests run in a process of their own, to see what they cost; nothing of the tests is imported here."""

from __future__ import annotations

import resource
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from reshard.pipeline.copying.loop import Moved, Stopped, copy
from reshard.pipeline.limits import MIB
from reshard.pipeline.places import parse_place
from reshard.pipeline.planning.estimate import forecast
from reshard.pipeline.planning.model import Receipt
from reshard.pipeline.request import Options, Request
from reshard.pipeline.reshard import Watcher, draft, run
from reshard.pipeline.stores.carry import SinkOf
from reshard.pipeline.stores.connect import Context, open_source, open_target
from reshard.pipeline.stores.folder.sink import FolderBatch


def request_of(source: str, target: str, options: dict[str, Any]) -> Request:
    return Request(source=parse_place(source), target=parse_place(target), options=Options(**options))


def do_run(source: str, target: str, options: dict[str, Any], jobs: int = 1) -> dict[str, Any]:
    report = run(request_of(source, target, options), Context.from_env(), jobs=jobs)
    return {
        "commit": report.published.commit,
        "shards": len(report.plan.shards),
        "bytes": sum(entry.size for shard in report.plan.shards for entry in shard.entries),
        "torch": "torch" in sys.modules,
    }


def do_copy_away(source: str, target: str, options: dict[str, Any]) -> dict[str, Any]:
    """A copy into a folder's sink whose files are removed once they are stored."""
    request, context = request_of(source, target, options), Context.from_env()
    opened = open_source(request.source, context)
    plan = draft(request, opened, open_target(request.target, request.options, context))
    staging = Path(target)
    made = 0

    def claim() -> Path:
        (staging / "objects").mkdir(parents=True, exist_ok=True)
        return staging

    def stored(receipts: list[Receipt], moved: Moved) -> None:
        nonlocal made
        made += sum(
            entry.size
            for shard in plan.shards
            for entry in shard.entries
            if shard.digest in {r.shard for r in receipts}
        )
        for file in (staging / "objects").iterdir():
            file.unlink()

    for group in plan.groups:
        sink = SinkOf(lambda: FolderBatch(staging, claim))
        copy(plan, group, dict(enumerate(plan.shards)), opened, sink, {}, stored, lambda count: None, context.disk)
    return {"bytes": made, "torch": "torch" in sys.modules}


def do_begin(source: str, target: str, options: dict[str, Any], most: int) -> dict[str, Any]:
    """A run that is ended once it has read ``most`` bytes."""
    read = 0

    def moved(count: int) -> None:
        nonlocal read
        read += count
        if read >= most:
            raise Stopped("cancel")

    with suppress(Stopped):
        run(request_of(source, target, options), Context.from_env(), Watcher(moved=moved))
    return {"read": read}


def do_plan(source: str, target: str, options: dict[str, Any]) -> dict[str, Any]:
    request, context = request_of(source, target, options), Context.from_env()
    plan = draft(request, open_source(request.source, context), open_target(request.target, request.options, context))
    return {
        "shards": len(plan.shards),
        "tensors": sum(len(s.entries) for s in plan.shards),
        "digest": plan.digest,
    }


def do_forecast(source: str, target: str, options: dict[str, Any]) -> dict[str, Any]:
    request, context = request_of(source, target, options), Context.from_env()
    target_at = open_target(request.target, request.options, context)
    return forecast(draft(request, open_source(request.source, context), target_at)).to_dict()


def do_run_within(most: int, memory: int, source: str, target: str, options: dict[str, Any]) -> dict[str, Any]:
    """A run that may write no file of more than ``most`` bytes and map no more than ``memory`` bytes of data.

    Whatever tries ends the process: the kernel refuses both. It counts a thread's stack whole, 8 MiB of which are
    hardly touched, so the stacks are small here.
    """
    threading.stack_size(MIB)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    report = run(request_of(source, target, options), Context.from_env())
    expected = forecast(report.plan)
    return {
        "transports": list(report.plan.transports),
        "seams": expected.seams,
        "written": expected.written,
        "headers": sum(len(shard.header) for shard in report.plan.shards),
        "moved": report.moved._asdict(),
    }
