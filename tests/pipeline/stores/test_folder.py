"""Folders: what is listed, what a swap leaves alone, and what a killed or refused commit leaves behind."""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from reshard.pipeline.errors import (
    FolderNotFound,
    FolderNotWritable,
    SourceChanged,
    SourceError,
    TargetConflict,
    TargetFilled,
    TargetFull,
    TargetUnfinished,
    Unreadable,
    UnsafePath,
    UsageError,
)
from reshard.pipeline.limits import KEPT_MAX, RECORD_MAX, STAGING_AGE
from reshard.pipeline.places import Folder
from reshard.pipeline.protocols import Addition, Change, HeadMoved, HistoryRewritten
from reshard.pipeline.request import Options
from reshard.pipeline.stores.connect import Context, open_source, open_target
from reshard.pipeline.stores.folder import disk
from reshard.pipeline.stores.folder import swap as module
from reshard.pipeline.stores.folder.source import FolderSource
from reshard.pipeline.stores.folder.swap import link_tree
from reshard.pipeline.stores.folder.target import FolderTarget
from reshard.pipeline.stores.record import PUBLICATIONS, RECORD, Record, RecordedPublication
from tests.pipeline.stores.conftest import noise, read, write_files
from tests.support.full_disk import files_of_at_most
from tests.support.nobody import nobody

OLD = {"a.safetensors": b"old weights", "notes/mine.txt": b"mine", "config.json": b"{}"}
CHANGE = Change(
    "New", "digest d1", (Addition("config.json", content=b"{1}"), Addition("b.txt", content=b"b")), ("a.safetensors",)
)
NEW = {"b.txt": b"b", "config.json": b"{1}", "notes/mine.txt": b"mine"}


def change_with_weights(target: FolderTarget) -> Change:
    """CHANGE, and a shard that is sealed first."""
    batch = target.sink("t").batch([])
    writer = batch.open("w.safetensors", 3)
    writer.write(memoryview(b"abc"))
    writer.finish()
    [stored] = batch.seal()
    return Change(
        CHANGE.title, CHANGE.message, (*CHANGE.additions, Addition(stored.path, stored=stored)), CHANGE.deletes
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_files(tmp_path / "model", OLD)
    return tmp_path / "model"


@pytest.fixture
def target(root: Path) -> FolderTarget:
    return FolderTarget(Folder(path=str(root)))


def contents(root: Path) -> dict[str, bytes]:
    found = {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    return {path: data for path, data in found.items() if not path.startswith(".reshard/")}


def beside(root: Path) -> list[str]:
    return sorted(path.name for path in root.parent.iterdir() if path != root)


# ---------------------------------------------------------------------------------------------------------- source


def source_of(root: Path) -> FolderSource:
    return FolderSource.open(Folder(path=str(root)))


def test_tools_marks_are_not_part_of_a_model(root: Path) -> None:
    write_files(
        root, {".git/config": b"", ".cache/huggingface/download/x.lock": b"", ".reshard/x": b"", ".hidden": b""}
    )
    assert set(source_of(root).files()) == {*OLD, ".hidden"}


def test_a_snapshot_of_the_hubs_cache_is_read_through_its_links(tmp_path: Path) -> None:
    cache = tmp_path / "models--a--b"
    write_files(cache, {"blobs/1234": b"weights", "blobs/5678": b"{}"})
    snapshot = cache / "snapshots" / "c0ffee"
    (snapshot / "unet").mkdir(parents=True)
    (snapshot / "unet" / "model.safetensors").symlink_to("../../../blobs/1234")
    (snapshot / "config.json").symlink_to("../../blobs/5678")
    source = source_of(snapshot)
    assert read(source, "unet/model.safetensors") == b"weights" and read(source, "config.json") == b"{}"


@pytest.mark.parametrize("inside", [True, False])
def test_a_link_out_of_the_folder_is_refused(root: Path, tmp_path: Path, inside: bool) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (root / "link").symlink_to(root / "config.json" if inside else tmp_path / "secret")
    if inside:
        assert read(source_of(root), "link") == b"{}"
    else:
        with pytest.raises(UnsafePath, match="link"):
            source_of(root)


def test_a_link_to_a_folder_is_refused_rather_than_left_out(root: Path) -> None:
    (root / "more").symlink_to(root / "notes")
    with pytest.raises(UnsafePath, match="more"):
        source_of(root)


def test_a_broken_link_is_named(root: Path) -> None:
    (root / "gone.bin").symlink_to(root / "nothing")
    with pytest.raises(FolderNotFound, match=r"gone\.bin"):
        source_of(root)


@pytest.mark.parametrize("path", ["nothing", "config.json"])
def test_what_is_no_folder_is_refused(root: Path, path: str, context: Context) -> None:
    with pytest.raises(FolderNotFound):
        open_source(Folder(path=str(root / path)), context)


def test_a_file_written_to_after_it_was_listed_is_refused(root: Path) -> None:
    source = source_of(root)
    (root / "config.json").write_bytes(b"{2}")
    with pytest.raises(SourceChanged, match=r"config\.json"):
        read(source, "config.json")


def test_a_file_written_to_while_it_is_read_is_refused(root: Path) -> None:
    (root / "big.bin").write_bytes(noise(3_000_000))
    source = source_of(root)
    views = iter(source.read(source.files()["big.bin"], 0, 3_000_000))
    next(views)
    with (root / "big.bin").open("r+b") as file:
        file.write(b"x")
        os.utime(file.fileno(), ns=(1, 1))
    with pytest.raises(SourceChanged):
        list(views)


def test_a_file_cut_short_while_it_is_read_is_refused(root: Path) -> None:
    (root / "big.bin").write_bytes(noise(3_000_000))
    source = source_of(root)
    views = iter(source.read(source.files()["big.bin"], 0, 3_000_000))
    next(views)
    os.truncate(root / "big.bin", 1_500_000)
    with pytest.raises(SourceChanged):
        list(views)


def test_the_state_is_named_by_what_is_listed(root: Path) -> None:
    one = source_of(root).pin.commit
    assert source_of(root).pin.commit == one
    os.utime(root / "config.json", ns=(5, 5))
    assert source_of(root).pin.commit != one


# ------------------------------------------------------------------------------------------------------------ swap


@pytest.fixture(params=["exchange", "journal"])
def swap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of swapping; the second is what a file system without exchange gets."""
    if request.param == "journal":
        monkeypatch.setattr(module, "exchange", lambda one, other: False)
    return str(request.param)


def test_the_exchange_works_here(tmp_path: Path) -> None:
    write_files(tmp_path, {"one/x": b"1", "two/y": b"2"})
    assert module.exchange(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "one" / "y").exists() and (tmp_path / "two" / "x").exists()


@pytest.mark.usefixtures("swap")
def test_only_the_named_paths_change(target: FolderTarget, root: Path) -> None:
    write_files(root, {".git/HEAD": b"ref", ".cache/huggingface/x": b"y"})
    (root / "empty").mkdir()
    (root / "link.json").symlink_to("config.json")
    (root / "notes" / "mine.txt").chmod(0o640)
    before = (root / "notes" / "mine.txt").stat()
    target.commit(CHANGE, target.prepare(private=True))
    extra = {".git/HEAD": b"ref", ".cache/huggingface/x": b"y", "link.json": b"{1}"}
    assert contents(root) == {**NEW, **extra}
    after = (root / "notes" / "mine.txt").stat()
    assert (after.st_ino, after.st_mode, after.st_mtime_ns) == (before.st_ino, before.st_mode, before.st_mtime_ns)
    assert (root / "link.json").is_symlink() and (root / "empty").is_dir()


@pytest.mark.usefixtures("swap")
def test_nothing_is_left_beside_the_target(target: FolderTarget, root: Path) -> None:
    batch = target.sink("t").batch([])
    writer = batch.open("w.safetensors", 3)
    writer.write(memoryview(b"abc"))
    writer.finish()
    [stored] = batch.seal()
    target.commit(Change("T", "", (Addition("w.safetensors", stored=stored),), ()), target.head())
    assert beside(root) == [] and contents(root) == {**OLD, "w.safetensors": b"abc"}


@pytest.mark.usefixtures("swap")
def test_a_folder_that_was_not_there_appears_whole(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "er" / "model"
    target = FolderTarget(Folder(path=str(root)))
    base = target.prepare(private=True)
    assert not root.parent.exists()
    target.commit(Change("T", "", (Addition("x", content=b"1"),), ()), base)
    assert contents(root) == {"x": b"1"} and beside(root) == []


@pytest.mark.usefixtures("swap")
def test_folders_that_a_deletion_emptied_go_with_it(target: FolderTarget, root: Path) -> None:
    target.commit(Change("T", "", (), ("notes/mine.txt",)), target.head())
    assert not (root / "notes").exists()


def test_a_reader_holds_on_to_the_state_it_opened(target: FolderTarget, root: Path) -> None:
    with (root / "a.safetensors").open("rb") as file:
        target.commit(CHANGE, target.head())
        assert file.read() == b"old weights"


def test_new_files_have_the_rights_that_the_umask_leaves(target: FolderTarget, root: Path) -> None:
    previous = os.umask(0o027)
    try:
        batch = target.sink("t").batch([])
        writer = batch.open("w.safetensors", 0)
        writer.finish()
        [stored] = batch.seal()
        target.commit(Change("T", "", (Addition("w.safetensors", stored=stored), *CHANGE.additions), ()), target.head())
    finally:
        os.umask(previous)
    assert {(root / path).stat().st_mode & 0o777 for path in ("w.safetensors", "b.txt")} == {0o640}


def test_a_target_behind_a_link_is_changed_where_it_is(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("model")
    target = FolderTarget(Folder(path=str(tmp_path / "link")))
    target.commit(CHANGE, target.head())
    assert (tmp_path / "link").is_symlink() and contents(root) == NEW


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", ".reshard/x"])
def test_a_path_out_of_the_folder_is_refused(target: FolderTarget, root: Path, path: str) -> None:
    with pytest.raises(UnsafePath):
        target.commit(Change("T", "", (Addition(path, content=b""),), ()), target.head())
    assert contents(root) == OLD


# ----------------------------------------------------------------------------------------------------- power failures


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The inode of each file and folder that is on the disk by now."""
    inodes: list[int] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        inodes.append(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", noted)
    return inodes


def test_a_shard_is_on_the_disk_before_it_is_answered_for(
    target: FolderTarget, root: Path, synced: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    there_when_named: list[list[int]] = []
    replace = Path.replace

    def noted(self: Path, goal: Path) -> Path:
        there_when_named.append([*synced])
        return replace(self, goal)

    monkeypatch.setattr(Path, "replace", noted)
    change_with_weights(target)
    objects = root.parent / ".model.reshard" / "objects"
    [shard] = objects.iterdir()
    assert there_when_named == [[shard.stat().st_ino]]
    assert synced == [shard.stat().st_ino, objects.stat().st_ino]


def test_a_whole_state_is_on_the_disk_before_it_takes_the_place_of_the_last(
    target: FolderTarget, root: Path, synced: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    there_when_swapped: list[set[int]] = []
    exchange = module.exchange

    def noted(one: Path, other: Path) -> bool:
        there_when_swapped.append({*synced})
        return exchange(one, other)

    monkeypatch.setattr(module, "exchange", noted)
    target.commit(change_with_weights(target), target.head())
    new = {"", "notes", ".reshard", "b.txt", "config.json", "w.safetensors", ".reshard/publications.json"}
    [there] = there_when_swapped
    assert {path for path in new if (root / path).stat().st_ino not in there} == set()


def test_a_small_record_is_read_into_little_memory(target: FolderTarget) -> None:
    """However large one may be: a machine may allow its processes no more than they use."""
    target.commit(change_with_weights(target), target.head())
    tracemalloc.start()
    try:
        assert target.original() is None
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


# ----------------------------------------------------------------------------------------------------------- kills


def test_a_commit_that_never_came_in_place_is_not_on_record(
    target: FolderTarget, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    first = target.commit(change_with_weights(target), target.head())
    record = (root / ".reshard" / "publications.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(module.Swap, "swap", die)
        with pytest.raises(KeyboardInterrupt):
            target.commit(change_with_weights(target), target.head())
    assert (root / ".reshard" / "publications.json").read_bytes() == record
    assert [commit.id for commit in target.history(target.head(), None)] == [first]


EARLIER = {"earlier.txt": b"kept"}


def write_kept(root: Path) -> Path:
    """What a commit before this one took from others."""
    kept = root.parent / f".{root.name}.reshard.last"
    write_files(kept, EARLIER)
    return kept


def commit_and_die(root: Path, how: str, kill_at: int, takes: bool) -> None:
    """In a child: commit, and be killed at the ``kill_at``-th change to the file system."""
    if how == "journal":
        module.exchange = lambda one, other: False
    target = FolderTarget(Folder(path=str(root)))
    base, seen = target.prepare(private=True), itertools.count(1)
    change = replace(change_with_weights(target), takes=takes)

    def audit(event: str, args: object) -> None:
        changes = {"os.rename", "os.link", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}
        if event in changes and next(seen) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)
    target.commit(change, base)


@pytest.mark.parametrize("there", [True, False])
def test_a_link_where_the_journal_lies_changes_no_file_of_anybody(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    stranger = tmp_path / "stranger"
    if there:
        stranger.write_text("theirs")
    (root.parent / f".{root.name}.reshard.intent").symlink_to(stranger)
    monkeypatch.setattr(module, "exchange", lambda *_: False)
    target = FolderTarget(Folder(path=str(root)))
    head = target.prepare(private=True)
    with nullcontext() if there else pytest.raises(FolderNotWritable, match="intent"):  # a living one is swept away
        target.commit(change_with_weights(target), head)
    assert contents(root)["w.safetensors"] == b"abc" if there else contents(root) == OLD
    assert stranger.exists() is there and (not there or stranger.read_text() == "theirs")


@pytest.mark.parametrize(
    ("how", "takes"),
    [
        ("exchange", True),
        ("journal", True),
        *(pytest.param(h, False, marks=pytest.mark.slow) for h in ("exchange", "journal")),
    ],
)
def test_a_commit_killed_anywhere_is_complete_or_absent(tmp_path: Path, how: str, takes: bool) -> None:
    """And what was kept before is there until then; what it took from others, from then on."""
    whole = {**NEW, "w.safetensors": b"abc"}
    finished, halfway = set(), set()
    for kill_at in range(1, 60):
        root = tmp_path / str(kill_at) / "model"
        write_files(root, OLD)
        kept = write_kept(root)
        child = multiprocessing.get_context("fork").Process(target=commit_and_die, args=(root, how, kill_at, takes))
        child.start()
        child.join(30)
        assert child.exitcode in (0, -signal.SIGKILL)
        target, left = FolderTarget(Folder(path=str(root))), contents(root.parent)
        with nullcontext() if root.exists() else pytest.raises(TargetUnfinished):
            target.state()
        halfway.add(not root.exists())
        assert contents(root.parent) == left, "whoever only looks changes nothing"
        head = target.prepare(private=True)
        target.discard("t")
        assert contents(root) in (OLD, whole), f"killed at {kill_at}"
        assert contents(root) == whole or contents(kept) == EARLIER
        finished.add(contents(root) == whole)
        if contents(root) == OLD:
            target.commit(replace(change_with_weights(target), takes=takes), head)
        assert contents(root) == whole and beside(root) == ([".model.reshard.last"] if takes else [])
        assert not takes or contents(root.parent / ".model.reshard.last") == OLD
        if child.exitcode == 0:
            break
    else:
        pytest.fail("the commit never came to its end")
    assert finished == {True, False}
    assert halfway == ({True, False} if how == "journal" else {False})


@pytest.mark.usefixtures("swap")
@pytest.mark.parametrize("takes", [True, False])
def test_what_others_save_while_a_commit_is_made_is_in_its_place_and_counts(
    target: FolderTarget, root: Path, monkeypatch: pytest.MonkeyPatch, takes: bool
) -> None:
    change, before = replace(change_with_weights(target), takes=takes), module.exchange
    saved = iter(("late.txt",))

    def late(one: Path, other: Path) -> bool:
        for name in saved:
            (root / name).write_bytes(b"theirs")
        return before(one, other)

    monkeypatch.setattr(module, "exchange", late)
    with pytest.raises(HeadMoved):
        target.commit(change, target.head())
    assert contents(root) == {**OLD, "late.txt": b"theirs"}
    target.commit(change, target.head())
    assert contents(root) == {**NEW, "w.safetensors": b"abc", "late.txt": b"theirs"}


@pytest.mark.usefixtures("swap")
def test_a_link_of_the_last_state_to_a_file_of_its_own_keeps_no_commit_from_its_end(
    target: FolderTarget, root: Path
) -> None:
    (root / "link.txt").symlink_to(root / "notes" / "mine.txt")  # which leads elsewhere once that is exchanged
    change = change_with_weights(target)
    change = replace(change, additions=(*change.additions, Addition("link.txt", content=b"ours")))
    target.commit(change, target.head())
    assert contents(root) == {**NEW, "w.safetensors": b"abc", "link.txt": b"ours"} and beside(root) == []


def test_what_others_saved_before_a_kill_behind_the_exchange_is_kept(tmp_path: Path) -> None:
    root = tmp_path / "own" / "model"
    write_files(root, OLD)
    intent = root.parent / ".model.reshard.intent"
    die(root, "exchange", False, lambda: intent.exists() and contents(root) != OLD)
    (root.parent / ".model.reshard.new" / "late.txt").write_bytes(b"theirs")  # as if it had been saved before
    FolderTarget(Folder(path=str(root))).recover()
    assert contents(root) == {**NEW, "w.safetensors": b"abc"}
    assert contents(root.parent / ".model.reshard.last") == {**OLD, "late.txt": b"theirs"}


def die(root: Path, how: str, takes: bool, until: Callable[[], bool]) -> None:
    """Be killed in a commit where ``until`` holds."""
    for kill_at in range(1, 60):
        shutil.rmtree(root.parent)
        write_files(root, OLD)
        child = multiprocessing.get_context("fork").Process(target=commit_and_die, args=(root, how, kill_at, takes))
        child.start()
        child.join(30)
        if until():
            return
    pytest.fail("it never came to this")


@pytest.mark.parametrize("theirs", [{}, {"theirs.txt": b"theirs"}])
def test_a_folder_that_is_made_between_two_renames_costs_neither_state(
    tmp_path: Path, theirs: dict[str, bytes]
) -> None:
    root = tmp_path / "own" / "model"
    write_files(root, OLD)
    die(root, "journal", False, lambda: not root.exists())
    root.mkdir()
    write_files(root, theirs)
    target = FolderTarget(Folder(path=str(root)))
    if theirs:
        with pytest.raises(TargetConflict, match="left its last state in .*old"):
            target.recover()
        assert contents(root) == theirs and contents(root.parent / ".model.reshard.old") == OLD
        shutil.rmtree(root)
    target.recover()
    target.discard("t")
    assert contents(root) == {**NEW, "w.safetensors": b"abc"} and beside(root) == []


def test_a_record_that_is_lost_behind_a_kill_costs_no_original_that_was_to_be_kept(tmp_path: Path) -> None:
    root = tmp_path / "own" / "model"
    intent = root.parent / ".model.reshard.intent"
    write_files(root, OLD)
    die(root, "exchange", True, lambda: intent.exists() and contents(root) != OLD)
    shutil.rmtree(root / RECORD)
    FolderTarget(Folder(path=str(root))).recover()
    assert contents(root.parent / ".model.reshard.last") == OLD and not intent.exists()


def test_a_folder_for_what_is_stored_that_another_run_removed_is_made_again(
    target: FolderTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced, gone = Path.replace, iter((True,))

    def late(self: Path, goal: Path) -> Path:
        if next(gone, False):
            goal.parent.rmdir()
        return replaced(self, goal)

    monkeypatch.setattr(Path, "replace", late)
    assert change_with_weights(target)


@pytest.mark.parametrize("journal", ["", "ke", "keep 1:a", "swap 1:a", "swap\n"])
def test_a_journal_that_was_not_written_to_its_end_began_no_swap(root: Path, journal: str) -> None:
    """And one of a former release, whose swap never began either."""
    kept, new = write_kept(root), root.parent / f".{root.name}.reshard.new"
    write_files(new, {"b.txt": b"never published"})
    (new / RECORD).mkdir()
    (new / RECORD / PUBLICATIONS).write_bytes(Record([RecordedPublication("a" * 64, "", "", "")]).text())
    (root.parent / f".{root.name}.reshard.intent").write_text(journal)
    FolderTarget(Folder(path=str(root))).prepare(private=True)
    assert contents(root) == OLD and contents(kept) == EARLIER
    assert beside(root) == [kept.name]


def test_a_next_state_that_was_half_removed_is_not_taken_for_the_last(root: Path) -> None:
    kept, new = write_kept(root), root.parent / f".{root.name}.reshard.new"
    write_files(new, {"b.txt": b"never published"})  # its record is gone
    (root.parent / f".{root.name}.reshard.intent").write_text(f"keep 1:{'a' * 64}\n")
    FolderTarget(Folder(path=str(root))).prepare(private=True)
    assert contents(root) == OLD and contents(kept) == EARLIER


def test_a_commit_that_only_takes_files_away_keeps_what_it_takes(target: FolderTarget, root: Path) -> None:
    """The folder is then what it was before somebody added to it, and its state has the same name."""
    first = target.commit(change_with_weights(target), target.head())
    write_files(root, {"theirs.txt": b"theirs"})
    parent = target.head()
    assert target.commit(Change("T", "", (), ("theirs.txt",), takes=True), parent) == first
    assert contents(root.parent / f".{root.name}.reshard.last")["theirs.txt"] == b"theirs"
    assert [commit.id for commit in target.history(first, None)] == [first, parent, first]
    assert read(target.at(parent), "theirs.txt") == b"theirs"


def test_what_was_kept_of_a_folder_that_is_no_more_is_nothing_of_the_next_one(target: FolderTarget, root: Path) -> None:
    kept = write_kept(root)
    shutil.rmtree(root)
    head = target.commit(change_with_weights(target), target.head())
    assert not kept.exists()
    assert [commit.id for commit in target.history(head, None)] == [head]


def test_what_resists_its_removal_stops_nobody(
    target: FolderTarget, root: Path, swap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a file that an NFS server has open, or a folder that belongs to somebody else."""
    write_kept(root)
    remove = module.remove_tree
    with monkeypatch.context() as patch:
        patch.setattr(module, "remove_tree", lambda folder: None if ".reshard." in folder.name else remove(folder))
        target.commit(replace(change_with_weights(target), takes=True), target.head())
        assert contents(root.parent / f".{root.name}.reshard.last") == OLD
        for name in ("c.txt", "d.txt"):
            target.commit(Change("T", "", (Addition(name, content=b"c"),), ()), target.head())
    assert all(".gone-" in name for name in beside(root)) and len(beside(root)) == 4
    target.commit(Change("T", "", (Addition("e.txt", content=b"c"),), ()), target.head())
    assert beside(root) == []


def test_a_file_system_without_hard_links_gets_copies_that_are_on_the_disk(
    target: FolderTarget, root: Path, monkeypatch: pytest.MonkeyPatch, synced: list[int]
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    target.commit(change_with_weights(target), target.head())
    assert contents(root) == {**NEW, "w.safetensors": b"abc"}
    assert {(root / name).stat().st_ino for name in contents(root)} <= {*synced}


def test_of_two_who_commit_at_once_the_second_waits_and_is_refused(
    target: FolderTarget, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, building, go_on = target.head(), threading.Event(), threading.Event()

    def slow(*what: Any) -> None:
        building.set()
        assert go_on.wait(20)
        link_tree(*what)

    def commit(name: str) -> str:
        change = Change(name, "", (Addition(name, content=b"x"),), ())
        return FolderTarget(Folder(path=str(root))).commit(change, base)

    monkeypatch.setattr("reshard.pipeline.stores.folder.target.link_tree", slow)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(commit, "first")
        assert building.wait(20)
        building.clear()
        second = pool.submit(commit, "second")
        assert not building.wait(0.5)  # it must not even begin
        go_on.set()
        assert first.result() == target.head()
        with pytest.raises(HeadMoved):
            second.result()
    assert contents(root) == {**OLD, "first": b"x"}


def test_equal_shards_under_two_paths_are_two_files(target: FolderTarget, root: Path) -> None:
    batch = target.sink("t").batch([])
    for path in ("one.bin", "two.bin"):
        writer = batch.open(path, 3)
        writer.write(memoryview(b"abc"))
        writer.finish()
    additions = tuple(Addition(stored.path, stored=stored) for stored in batch.seal())
    target.commit(Change("T", "", additions, ()), target.head())
    (root / "one.bin").write_bytes(b"edited")
    assert (root / "two.bin").read_bytes() == b"abc"


# --------------------------------------------------------------------------------------------------------- history


def test_an_edit_between_publications_shows_as_somebody_elses(target: FolderTarget, root: Path) -> None:
    base = target.head()
    ours = target.commit(CHANGE, base)
    (root / "config.json").write_bytes(b"edited")
    edited = target.head()
    titles = [(c.id, c.title) for c in target.history(edited, base)]
    assert titles == [(edited, "changed by someone else"), (ours, "New")]
    again = target.commit(Change("Again", "", (Addition("c", content=b""),), ()), edited)
    assert [c.title for c in target.history(again, base)] == ["Again", "changed by someone else", "New"]
    assert [c.id for c in target.history(again, ours)] == [again, edited]


def test_an_edit_while_we_work_is_no_history_of_ours(target: FolderTarget, root: Path) -> None:
    base = target.head()
    (root / "config.json").write_bytes(b"edited")
    with pytest.raises(HistoryRewritten):
        list(target.history(target.head(), base))
    with pytest.raises(HeadMoved):
        target.commit(CHANGE, base)
    with pytest.raises(TargetConflict):
        target.at(base)


def test_what_we_published_last_can_be_compared_with_what_is_there(target: FolderTarget, root: Path) -> None:
    long = b"x" * (KEPT_MAX + 1)
    more = (*CHANGE.additions, Addition("long.txt", content=long), Addition("README.md", content=b"# ours"))
    ours = target.commit(Change("New", "", more, ()), target.head())
    (root / "README.md").write_bytes(b"# edited")
    (root / "long.txt").write_bytes(b"edited")
    then, now = target.at(ours), target.at(target.head())
    assert read(then, "README.md") == b"# ours" and read(now, "README.md") == b"# edited"
    assert then.files()["b.txt"].sha256 == now.files()["b.txt"].sha256 is not None
    assert now.files()["README.md"].sha256 is None
    with pytest.raises(SourceChanged):
        read(then, "long.txt")


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", "[" * 100_000, b"\xff", '{"publications": []}', '{"publications": [], "files": [], "kept": {}}',
        '{"publications": [], "files": {}, "kept": []}',
        '{"publications": [], "files": {}, "kept": {"a": "no base64!"}}',
        '{"publications": [], "files": {"a": ["1", 1, ""]}, "kept": {}}',
        '{"publications": [{"id": 1, "parent": "", "title": "", "message": ""}], "files": {}, "kept": {}}',
    ],
)  # fmt: skip
def test_a_broken_record_is_named(target: FolderTarget, root: Path, text: str | bytes) -> None:
    target.commit(CHANGE, target.head())
    (root / ".reshard" / "publications.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(TargetConflict, match=r"publications\.json"):
        target.at(target.head())


@pytest.mark.parametrize("what", ["folder", "pipe", "link", "too large", "no folder"])
def test_what_is_no_record_in_its_place_is_named_and_not_waited_for(
    target: FolderTarget, root: Path, what: str
) -> None:
    target.commit(CHANGE, target.head())
    file = root / ".reshard" / "publications.json"
    file.rename(root.parent / "publications.json")
    if what == "folder":
        file.mkdir()
    elif what == "pipe":
        os.mkfifo(file)
    elif what == "link":
        file.symlink_to(root.parent / "publications.json")
    elif what == "too large":
        file.touch()
        os.truncate(file, RECORD_MAX + 1)
    else:
        file.parent.rmdir()
        file.parent.touch()
    with pytest.raises(TargetConflict, match=r"publications\.json"):
        target.at(target.head())


def test_the_record_of_an_object_store_that_was_copied_here_vouches_for_no_hash(
    target: FolderTarget, root: Path
) -> None:
    """Its files have tags where a folder has times."""
    ours = target.commit(CHANGE, target.head())
    file = root / ".reshard" / "publications.json"
    record = json.loads(file.read_text())
    record["files"] = {path: (size, "0123abcd", sha256) for path, (size, _, sha256) in record["files"].items()}
    file.write_text(json.dumps(record))
    (root / "theirs.txt").write_text("x")
    assert {file.sha256 for file in target.at(ours).files().values()} == {None}


@pytest.mark.parametrize("marks", [[], None, {"a": 5}, {"a": "é"}])
def test_marks_of_another_form_vouch_for_nothing(target: FolderTarget, root: Path, marks: Any) -> None:
    commit = target.commit(CHANGE, target.head())
    file = root / ".reshard" / "publications.json"
    if marks:
        marks = {commit: next(iter(marks.values()))}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"marks": marks}))
    (ours,) = target.history(target.head(), None)
    assert not target.is_ours(ours.id, ours.author)


# -------------------------------------------------------------------------------------------------- disk and rights


def test_a_disk_that_fills_up_while_staging(target: FolderTarget, root: Path) -> None:
    batch = target.sink("t").batch([])
    writer = batch.open("w.safetensors", 1000)
    with files_of_at_most(100), pytest.raises(TargetFull, match="1.0 kB needed") as refused:
        writer.write(memoryview(bytes(1000)))
        writer.finish()
        batch.seal()
    assert refused.value.facts["needed"] == 1000
    batch.abort()
    target.discard("t")
    assert beside(root) == [] and contents(root) == OLD


def test_a_disk_that_fills_up_in_the_commit(target: FolderTarget, root: Path) -> None:
    base = target.head()
    with files_of_at_most(100), pytest.raises(TargetFilled, match="the disk became full") as refused:
        target.commit(Change("T", "", (Addition("x", content=bytes(1000)),), ()), base)
    assert "needed" not in str(refused.value) and "RESHARD_" not in refused.value.next_step
    assert contents(root) == OLD and target.head() == base


def test_a_shard_larger_than_the_disk_is_refused_before_a_byte(target: FolderTarget) -> None:
    with pytest.raises(TargetFull):
        target.sink("t").batch([]).open("w.safetensors", 1 << 60)


def test_a_file_in_the_way_is_refused(root: Path) -> None:
    with pytest.raises(FolderNotWritable, match="it is a file"):
        FolderTarget(Folder(path=str(root / "config.json"))).prepare(private=True)


def test_a_mount_point_is_refused() -> None:
    with pytest.raises(FolderNotWritable, match="mount point"):
        FolderTarget(Folder(path="/proc")).prepare(private=True)


def test_what_is_mounted_in_a_folder_after_it_was_planned_is_left_where_it_is(
    root: Path, target: FolderTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Linux would list it, blanks and all; a folder beside it has a name that begins like its own."""
    mounts = tmp_path / "mountinfo"
    monkeypatch.setattr(disk, "MOUNTS", mounts)
    line = "36 35 98:0 / {} rw,noatime - ext4 /dev/root rw\n"
    mounts.write_text(line.format("/") + line.format(f"{root}-other"))
    base = target.prepare(private=True)
    mounts.write_text(mounts.read_text() + line.format(f"{root}/my\\040notes"))
    for ask in (lambda: target.commit(CHANGE, base), lambda: target.prepare(private=True)):
        with pytest.raises(FolderNotWritable, match="it contains a mount point, .*/model/my notes"):
            ask()
    assert contents(root) == OLD


def test_a_swap_reads_every_folder_of_the_last_state() -> None:
    with nobody() as folder:
        write_files(folder, {"old/closed/theirs": b"theirs"})
        (folder / "new").mkdir()
        (folder / "old/closed").chmod(0)
        with pytest.raises(PermissionError):
            link_tree(folder / "old", folder / "new", set())
        (folder / "old/closed").chmod(0o700)


NAMESPACE = ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--mount"]
MOUNTED = """
import sys
from reshard.pipeline.places import Folder
from reshard.pipeline.stores.folder.target import FolderTarget
FolderTarget(Folder(path=sys.argv[1])).prepare(private=True)
"""


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode != 0,
    reason="this system gives no mount namespaces to this user",
)
def test_a_folder_in_which_something_is_mounted_is_refused(tmp_path: Path) -> None:
    """Also a folder of the same disk, in a place with a blank: its files would go with the last state."""
    root = tmp_path / "my model"
    write_files(root, OLD)
    write_files(tmp_path / "volume", {"precious.txt": b"theirs"})
    mount = ["sh", "-ec", 'mount --bind "$1" "$2/notes" && exec "$3" -c "$4" "$2"', "sh"]
    command = [*NAMESPACE, *mount, str(tmp_path / "volume"), str(root), sys.executable, MOUNTED]
    done = subprocess.run(command, capture_output=True, text=True)
    assert f"cannot write to {root}: it contains a mount point, {root}/notes" in done.stderr


def test_a_folder_in_the_target_that_may_not_be_read_is_refused() -> None:
    """A swap would not know what to keep of it."""
    with nobody() as folder:
        write_files(folder / "model", OLD | {".git/objects/theirs": b""})
        (folder / "model/.git/objects").chmod(0)
        with pytest.raises(FolderNotWritable, match=r"cannot write to .*/model/\.git/objects: Permission denied"):
            FolderTarget(Folder(path=str(folder / "model"))).prepare(private=True)
        (folder / "model/.git/objects").chmod(0o700)


def test_a_folder_that_may_not_be_written_is_refused() -> None:
    target = FolderTarget(Folder(path="/proc/self/model"))
    with pytest.raises(FolderNotWritable, match="no permission"):
        target.prepare(private=True)
    assert target.leave(exists=False) == (False, f"cannot write to /proc/{os.getpid()}: no permission")


def test_what_lies_below_a_folder_that_may_not_be_searched_is_refused() -> None:
    with nobody() as folder:
        write_files(folder / "closed" / "model", OLD)
        (folder / "closed").chmod(0o600)
        try:
            with pytest.raises(SourceError):
                source_of(folder / "closed" / "model")
            for ask in (FolderTarget.recover, FolderTarget.state, partial(FolderTarget.prepare, private=True)):
                with pytest.raises(FolderNotWritable):
                    ask(FolderTarget(Folder(path=str(folder / "closed" / "model"))))
        finally:
            (folder / "closed").chmod(0o700)


def test_a_file_that_may_not_be_read_has_not_changed() -> None:
    with nobody() as folder:
        write_files(folder / "model", OLD)
        (folder / "model" / "a.safetensors").chmod(0)
        with pytest.raises(Unreadable, match=r"cannot read .*/model/a\.safetensors: Permission denied"):
            read(source_of(folder / "model"), "a.safetensors")


def test_a_disk_that_fails_is_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    source = source_of(root)
    monkeypatch.setattr("os.pread", failing)
    with pytest.raises(Unreadable, match=r"model/a\.safetensors: Input/output error"):
        read(source, "a.safetensors")


def test_a_place_where_no_folder_can_be_made_is_refused() -> None:
    with pytest.raises(FolderNotWritable, match=r"cannot write to /proc/.*"):
        FolderTarget(Folder(path="/proc/model")).sink("t").batch([]).open("w.safetensors", 1)


@pytest.mark.parametrize("options", [Options(pr=True), Options(branch="x")])
def test_a_folder_has_no_branches(root: Path, context: Context, options: Options) -> None:
    with pytest.raises(UsageError):
        open_target(Folder(path=str(root)), options, context)


def test_what_nobody_went_on_with_is_swept_away(target: FolderTarget, root: Path) -> None:
    for seed, token in enumerate(("old", "new")):
        sink = target.sink(token)
        for part in (1, 2):
            batch = sink.batch([])
            writer = batch.open("w", 100)
            writer.write(memoryview(noise(100, seed * 10 + part)))
            writer.finish()
            if part == 1:
                batch.seal()
    staged = sorted(path for path in root.parent.glob(".model.reshard/*/*"))
    assert len(staged) == 4
    for path in staged[:2]:
        age = path.stat().st_mtime - STAGING_AGE - 60
        os.utime(path, (age, age))
    target.prepare(private=True)
    assert sorted(root.parent.glob(".model.reshard/*/*")) == staged[2:]
