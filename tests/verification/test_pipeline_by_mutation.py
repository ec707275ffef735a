"""What goes wrong on the way, at any seam of the copy, never gets published; and each tap is needed for that.

    source -> read -> [attested] -> loop -> [first tap] -> write -> [second tap] -> [handed] -> store

A fault is put at each seam: bytes dropped, doubled, shifted and flipped, early and late. The source's files have the
sha256s that their store lists, as on the Hub; a folder's have none, and then nobody can know (`as delivered`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reshard.pipeline.copying import hashing as taps
from reshard.pipeline.copying import loop as copying
from reshard.pipeline.copying.loop import Moved, copy
from reshard.pipeline.copying.stream import Stream
from reshard.pipeline.errors import ReshardError
from reshard.pipeline.places import Folder, parse_place
from reshard.pipeline.planning.model import Receipt, Shard
from reshard.pipeline.protocols import Sink, Source, Writer
from reshard.pipeline.publishing import commit as publishing
from reshard.pipeline.publishing.commit import publish
from reshard.pipeline.request import Options, Request
from reshard.pipeline.reshard import confirm, plan
from reshard.pipeline.stores.connect import Context, open_target
from reshard.pipeline.stores.folder.source import FolderSource, list_folder
from reshard.pipeline.stores.lane import Lane, Step
from reshard.pipeline.tensors import ByteRange, StoredFile
from reshard.pipeline.verifying.meta_load import MetaLoader
from tests.support.failing_stores import FailingSink, FailingSource, Spoiler
from tests.support.models import arrays, numbered, save_sharded

VIEW = 1000  # bytes
# What is spoiled is the first view, an early one, a late one.
MAPS = [f"{'r' * before}{letter}" for letter in "dDfs" for before in (0, 5, 20)]
# The ways of a loop's own mistakes, which come in equal lengths.
KEEPING_LENGTH = [letters for letters in MAPS if letters[-1] in "fs"]
CHANGING_LENGTH = [letters for letters in MAPS if letters[-1] in "dD"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    save_sharded(folder, numbered(arrays(24, 4000), 3))
    return folder


class SmallViews(FolderSource):
    """A folder that gives a few bytes at a time, and whose files may have the sha256 that a Hub would list."""

    def __init__(self, folder: Path, attests: bool) -> None:
        plain = FolderSource.open(Folder(path=str(folder)))
        super().__init__(plain.place, list_folder(folder), plain.pin.commit)
        paths = folder.glob("*.safetensors") if attests else ()
        self._sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}

    def files(self) -> Mapping[str, StoredFile]:
        return {path: replace(file, sha256=self._sums.get(path)) for path, file in super().files().items()}

    def read(self, file: StoredFile, start: int, stop: int) -> Iterator[memoryview]:
        for view in super().read(file, start, stop):
            yield from (view[at : at + VIEW] for at in range(0, len(view), VIEW))


def job(
    model: Path,
    out: Path,
    meta_loader: MetaLoader,
    reading: Callable[[Source], Source] = lambda source: source,
    writing: Callable[[Sink], Sink] = lambda sink: sink,
    attests: bool = True,
) -> None:
    """The whole pipeline, with stores that something is wrong with; returns when it has published."""
    source: Source = SmallViews(model, attests)
    request = Request(source=parse_place(str(model)), target=parse_place(str(out)), options=Options(size=20_000))
    target = open_target(request.target, request.options, Context.from_env())
    made = plan(request, source, target, meta_loader)
    receipts: dict[str, Receipt] = {}

    def stored(news: list[Receipt], moved: Moved) -> None:
        receipts.update({receipt.shard: receipt for receipt in news})

    sink, shards, source = writing(target.sink("token")), dict(enumerate(made.shards)), reading(source)
    attested = [copy(made, g, shards, source, sink, receipts, stored, lambda n: None, out.parent) for g in made.groups]
    published = publish(made, receipts, attested, source, target, "token", lambda: None)
    confirm(made, made.shards, receipts, published, target)


def is_published(out: Path) -> bool:
    return any(out.glob("*.safetensors"))


def test_right_stores_publish(model: Path, tmp_path: Path, meta_loader: MetaLoader) -> None:
    job(model, tmp_path / "out", meta_loader, lambda s: FailingSource(s, "rrr"), lambda s: FailingSink(s, "rrr"))
    assert is_published(tmp_path / "out")


@pytest.mark.parametrize("letters", MAPS)
def test_a_source_that_spoils_bytes_never_publishes(
    letters: str, model: Path, tmp_path: Path, meta_loader: MetaLoader
) -> None:
    with pytest.raises(ReshardError):
        job(model, tmp_path / "out", meta_loader, reading=lambda source: FailingSource(source, letters))
    assert not is_published(tmp_path / "out")


@pytest.mark.parametrize("letters", CHANGING_LENGTH)
def test_a_source_that_attests_nothing_and_gives_fewer_or_more_bytes_never_publishes(
    letters: str, model: Path, tmp_path: Path, meta_loader: MetaLoader
) -> None:
    with pytest.raises(ReshardError):
        job(model, tmp_path / "out", meta_loader, reading=lambda source: FailingSource(source, letters), attests=False)
    assert not is_published(tmp_path / "out")


@pytest.mark.parametrize("letters", MAPS)
def test_a_sink_that_spoils_bytes_never_publishes(
    letters: str, model: Path, tmp_path: Path, meta_loader: MetaLoader
) -> None:
    with pytest.raises(ReshardError):
        job(model, tmp_path / "out", meta_loader, writing=lambda sink: FailingSink(sink, letters))
    assert not is_published(tmp_path / "out")


# ------------------------------------------------------------------------------------- mistakes of the loop's own

Break = Callable[[pytest.MonkeyPatch, str], None]


def spoil_what_is_taken(patch: pytest.MonkeyPatch, letters: str) -> None:
    """Between the source's attested bytes and the loop."""
    spoiler, take = Spoiler(letters), Stream.take

    def spoiled(self: Stream, place: ByteRange) -> Iterator[memoryview]:
        for view in take(self, place):
            yield from spoiler.views(view)

    patch.setattr(Stream, "take", spoiled)


class SpoiledLane(Lane):
    """What goes through a lane comes out spoiled, but for the first view, which is a header."""

    def __init__(self, lane: Lane, spoiler: Spoiler) -> None:
        self.lane, self.spoiler, self.header = lane, spoiler, True

    def put(self, step: Step, view: memoryview) -> None:
        spoiled = step if self.header else lambda view: [step(some) for some in self.spoiler.views(view)]
        self.header = False
        self.lane.put(spoiled, view)

    def flush(self, left: int = 0) -> None:
        self.lane.flush(left)


def spoil_what_is_written(patch: pytest.MonkeyPatch, letters: str) -> None:
    """Between the loop's first tap and what it writes; headers are left alone."""
    spoiler = Spoiler(letters)

    class Spoiled(taps.HashingWriter):
        def __init__(self, shard: Shard, writer: Writer, lane: Lane) -> None:
            super().__init__(shard, writer, SpoiledLane(lane, spoiler))

    patch.setattr(copying, "HashingWriter", Spoiled)


def spoil_what_is_handed_on(patch: pytest.MonkeyPatch, letters: str) -> None:
    """Between the loop and the thread that writes; headers are left alone."""
    spoiler, write, handed = Spoiler(letters), taps.HashingWriter.write, Counter[taps.HashingWriter]()

    def spoiled(self: taps.HashingWriter, view: memoryview) -> None:
        in_header = handed[self] == 0
        handed[self] += len(view)
        for some in [view] if in_header else spoiler.views(view):
            write(self, some)

    patch.setattr(taps.HashingWriter, "write", spoiled)


MISTAKES: dict[str, Break] = {
    "takes other bytes than were attested": spoil_what_is_taken,
    "writes other bytes than it read": spoil_what_is_written,
    "hands on other bytes than it read": spoil_what_is_handed_on,
}


@pytest.mark.parametrize("letters", KEEPING_LENGTH)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_loop_that_spoils_bytes_never_publishes(
    mistake: str, letters: str, model: Path, tmp_path: Path, meta_loader: MetaLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    MISTAKES[mistake](monkeypatch, letters)
    with pytest.raises(ReshardError):
        job(model, tmp_path / "out", meta_loader)
    assert not is_published(tmp_path / "out")


# ----------------------------------------------------------------------------------- each tap, switched off by tests


def without_attestation(patch: pytest.MonkeyPatch) -> None:
    """Source files pass unseen: no sha256, and no digests to hold a copy against."""
    patch.setattr(taps.FileHasher, "feed", lambda *_: None)
    check = publishing.check_receipts

    def receipts_only(plan: Any, receipts: Any, attested: Any) -> None:
        check(plan, receipts, [group._replace(witnesses=()) for group in attested])

    patch.setattr(publishing, "check_receipts", receipts_only)


def without_first_tap(patch: pytest.MonkeyPatch) -> None:
    """What was read is taken to be what was written: the loop compares nothing."""

    def believe(self: copying.Copy, shard: Any) -> None:
        self.tensors |= self.written.digests()

    patch.setattr(copying.Copy, "check", believe)


def without_second_tap(patch: pytest.MonkeyPatch) -> None:
    """What was written is taken to be what was read."""
    patch.setattr(copying.Copy, "check", lambda self, shard: None)


def without_comparison_with_the_store(patch: pytest.MonkeyPatch) -> None:
    def believe(self: taps.HashingWriter) -> None:
        self._lane.flush()
        self._writer.finish()

    patch.setattr(taps.HashingWriter, "finish", believe)


def faults(name: str, patch: pytest.MonkeyPatch, letters: str) -> dict[str, Any]:
    """What of ``job`` is spoiled at a seam."""
    if name == "source":
        return {"reading": lambda source: FailingSource(source, letters)}
    if name == "sink":
        return {"writing": lambda sink: FailingSink(sink, letters)}
    MISTAKES[name](patch, letters)
    return {}


# Which guard stands over which seam, and how it is switched off. Where a source attests nothing, the first tap alone
# tells what was read; where it does, the attested digests are a second pair of eyes.
GUARDS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None], bool]] = {
    "attestation": ("source", without_attestation, True),
    "first tap": ("writes other bytes than it read", without_first_tap, False),
    "second tap": ("writes other bytes than it read", without_second_tap, True),
    "what the store was handed": ("sink", without_comparison_with_the_store, True),
}


@pytest.mark.parametrize("guard", GUARDS)
def test_with_a_tap_switched_off_something_spoiled_is_published(
    guard: str, model: Path, tmp_path: Path, meta_loader: MetaLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    seam, switch_off, attests = GUARDS[guard]
    spoiled = faults(seam, monkeypatch, "r" * 20 + "f")
    with pytest.raises(ReshardError):
        job(model, tmp_path / "guarded", meta_loader, attests=attests, **spoiled)
    switch_off(monkeypatch)
    job(model, tmp_path / "out", meta_loader, attests=attests, **faults(seam, monkeypatch, "r" * 20 + "f"))
    assert is_published(tmp_path / "out")
