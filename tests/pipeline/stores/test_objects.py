"""Targets without commits: what a crash cuts off is finished, one publication at a time, and the index comes last."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from reshard.pipeline.errors import (
    HubRefused,
    HubUnreachable,
    SourceLocked,
    SourceUnfinished,
    TargetConflict,
    TargetLocked,
    TargetUnfinished,
    UnsafePath,
)
from reshard.pipeline.limits import ANSWER_MAX, LOCK_AGE, MESSAGES_MAX
from reshard.pipeline.protocols import Addition, Change, HeadMoved, Target
from reshard.pipeline.stores.connect import Context, open_source
from reshard.pipeline.stores.objects import LOCK, OWN, PENDING, PUBLISHED, Objects, ObjectTarget
from reshard.pipeline.stores.record import EMPTY, PUBLICATIONS, Listing, Record, RecordedPublication
from reshard.pipeline.tensors import StoredFile
from tests.pipeline.stores.conftest import MakeTarget, noise, read

INDEX = "model.safetensors.index.json"
OLD, NEW = noise(300_000, 1), noise(300_000, 2)


class Killed(BaseException):
    """The process ends here."""


class Mortal:
    """A store whose process is killed before its next call of a kind, once ``spared`` of them were made."""

    def __init__(self, objects: Objects, kind: str, spared: int = 0) -> None:
        self._objects, self._kind, self._left, self._dead = objects, kind, spared, False

    def __getattr__(self, name: str) -> object:
        if name == self._kind:
            self._dead |= not self._left
            self._left -= 1
        if self._dead:  # and makes no further call
            raise Killed
        return getattr(self._objects, name)


@pytest.fixture
def target(make_object_target: MakeTarget) -> Iterator[ObjectTarget]:
    made = make_object_target()
    assert isinstance(made, ObjectTarget)
    made.prepare(private=True)
    yield made


def stored(target: Target, data: bytes, path: str = "model-1.safetensors") -> Addition:
    batch = target.sink("t").batch([])
    writer = batch.open(path, len(data))
    writer.write(memoryview(data))
    writer.finish()
    return Addition(path, stored=batch.seal()[0])


def change(*additions: Addition, index: bytes = b"{}", deletes: tuple[str, ...] = (), path: str = INDEX) -> Change:
    return Change("Weights", "digest 123", (Addition(path, content=index), *additions), deletes)


def age_lock(target: ObjectTarget) -> None:
    """As if its holder had not renewed it for long."""
    held = json.loads(target.objects.read(LOCK) or b"")
    target.objects.write(LOCK, json.dumps(held | {"time": held["time"] - LOCK_AGE - 1}).encode())


def listed(target: Target) -> dict[str, bytes]:
    source = target.at(target.head())
    return {path: read(source, path) for path in source.files()}


@pytest.mark.parametrize(
    ("kind", "spared"), [("put", 0), ("put", 1), ("delete", 0), ("delete", 1), ("read", 1), ("write", 1)]
)
def test_what_a_kill_cuts_off_is_finished_by_whoever_finds_its_lock_old(
    target: ObjectTarget, context: Context, kind: str, spared: int
) -> None:
    base = target.commit(change(stored(target, OLD), index=b"old", deletes=()), EMPTY)
    coming = change(stored(target, NEW, "model-2.safetensors"), index=b"new", deletes=("model-1.safetensors",))
    objects: Any = Mortal(target.objects, kind, spared)
    with pytest.raises(Killed):
        ObjectTarget(objects).commit(coming, base)
    before = target.objects.listed()
    for look in (
        target.state,
        target.recover,
        target.head,
        lambda: target.prepare(True),
        lambda: target.commit(coming, base),
    ):
        with pytest.raises(TargetLocked):
            look()
    assert target.objects.listed().items() >= {path: before[path] for path in before if OWN not in path}.items()
    with pytest.raises(SourceLocked, match="another run is publishing to it") as living:
        open_source(target.place, context)
    age_lock(target)
    cut = target.objects.listed()
    with pytest.raises(SourceUnfinished, match="can be from two versions") as dead:
        open_source(target.place, context)
    with pytest.raises(TargetUnfinished):
        target.state()
    assert living.value.retryable and dead.value.retryable, "the job that published may still finish it"
    assert target.objects.listed() == cut, "whoever only looks changes nothing"
    assert listed(target) == {INDEX: b"new", "model-2.safetensors": NEW}
    assert open_source(target.place, context).files().keys() == {INDEX, "model-2.safetensors"}
    head = target.head()
    assert [commit.id for commit in target.history(head, None)] == [head, base]
    assert {PENDING, LOCK} & set(target.objects.listed()) == set()
    assert target.commit(change(index=b"newer"), head) == target.head()


def test_a_publication_that_ends_while_it_is_looked_at_is_not_called_interrupted(target: ObjectTarget) -> None:
    base = target.commit(change(stored(target, OLD), index=b"old"), EMPTY)
    objects: Any = Mortal(target.objects, "write", spared=1)
    with pytest.raises(Killed):
        ObjectTarget(objects).commit(change(index=b"new"), base)

    class Ending:
        def __getattr__(self, name: str) -> object:
            return getattr(target.objects, name)

        def read(self, path: str) -> bytes | None:
            if path == LOCK:
                target.objects.delete([PENDING, LOCK])
            return target.objects.read(path)

    ending: Any = Ending()
    assert ObjectTarget(ending).state().exists


def test_a_kill_after_the_publication_leaves_nothing_to_finish(target: ObjectTarget) -> None:
    objects: Any = Mortal(target.objects, "clear")
    with pytest.raises(Killed):
        ObjectTarget(objects).commit(change(stored(target, OLD)), EMPTY)
    assert {PENDING, LOCK} & set(target.objects.listed()) == set()
    assert target.commit(change(index=b"newer"), target.head()) == target.head()


def test_a_living_publication_is_left_alone_however_long_it_takes(
    target: ObjectTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reshard.pipeline.stores.objects.LOCK_RENEW", 0.01)
    renewed = threading.Event()

    class Slow(Mortal):
        def write(self, path: str, content: bytes) -> None:
            target.objects.write(path, content)
            if path == LOCK:
                renewed.set()

        def put(self, files: Sequence[StoredFile], check: Callable[[], None]) -> None:
            age_lock(target)
            for _ in range(2):  # the first may have been written before
                renewed.clear()
                assert renewed.wait(60)
            with pytest.raises(TargetLocked):
                target.head()
            target.objects.put(files, check)

    slow: Any = Slow(target.objects, "")
    made = ObjectTarget(slow).commit(change(stored(target, OLD)), EMPTY)
    assert target.head() == made
    assert read(target.at(made), "model-1.safetensors") == OLD
    assert {PENDING, LOCK} & set(target.objects.listed()) == set()


def test_what_fails_in_a_publication_is_finished_by_the_next_run_at_once(target: ObjectTarget) -> None:
    class Failing(Mortal):
        def put(self, files: Sequence[StoredFile], check: Callable[[], None]) -> None:
            raise HubUnreachable(endpoint="s3://somewhere", what="no response")

    failing: Any = Failing(target.objects, "")
    with pytest.raises(HubUnreachable):
        ObjectTarget(failing).commit(change(stored(target, OLD)), EMPTY)
    assert listed(target) == {INDEX: b"{}", "model-1.safetensors": OLD}


def test_the_files_are_listed_as_often_however_many_are_deleted(target: ObjectTarget) -> None:
    class Counting(Mortal):
        count = 0

        def listed(self) -> Listing:
            self.count += 1
            return target.objects.listed()

    counts, head = [], EMPTY
    for many in (1, 5):
        files = [stored(target, OLD, f"model-{n}.safetensors") for n in range(many)]
        head = target.commit(change(*files, index=b"%d" % many), head)
        counting: Any = Counting(target.objects, "")
        gone = (*(file.path for file in files), "gone already")
        head = ObjectTarget(counting).commit(change(index=b"without %d" % many, deletes=gone), head)
        assert set(listed(target)) == {INDEX}
        counts.append(counting.count)
    assert counts[0] == counts[1]


def test_one_object_can_be_the_content_of_several_files(target: ObjectTarget) -> None:
    one = stored(target, OLD)
    target.commit(change(one, Addition("copy.safetensors", stored=one.stored)), EMPTY)
    assert listed(target) == {INDEX: b"{}", "model-1.safetensors": OLD, "copy.safetensors": OLD}


def test_what_was_stored_twice_after_a_kill_leaves_no_copy_behind(target: ObjectTarget) -> None:
    for _ in range(2):  # the second by a worker that was never told of the first
        one = stored(target, OLD)
    target.commit(change(one), EMPTY)
    assert {path for path in target.objects.listed() if path.startswith(OWN)} <= {OWN + PUBLICATIONS}


def test_what_was_staged_and_stands_there_already_leaves_no_copy_behind(target: ObjectTarget) -> None:
    base = target.commit(change(stored(target, OLD)), EMPTY)
    stored(target, OLD)  # of a file that is carried again, and so no part of the change
    target.commit(change(index=b"newer"), base)
    assert {path for path in target.objects.listed() if path.startswith(OWN)} <= {OWN + PUBLICATIONS}


def test_what_others_put_beside_staged_files_ends_no_commit(target: ObjectTarget) -> None:
    strange = [f"{OWN}objects/{name}" for name in ("notes.txt", "ab/12", f"{'0' * 64}/many/name")]
    for path in strange:
        target.objects.write(path, b"x")
    target.commit(change(stored(target, OLD)), EMPTY)
    assert listed(target).items() >= {INDEX: b"{}", "model-1.safetensors": OLD}.items()
    assert target.objects.listed().keys() >= {*strange}


def test_until_the_change_is_written_down_a_kill_changes_nothing(target: ObjectTarget) -> None:
    base = target.commit(change(stored(target, OLD)), EMPTY)
    objects: Any = Mortal(target.objects, "write")
    with pytest.raises(Killed):
        ObjectTarget(objects).commit(change(stored(target, NEW)), base)
    assert listed(target) == {INDEX: b"{}", "model-1.safetensors": OLD} and target.head() == base


@pytest.mark.parametrize("index", [INDEX, "model.safetensors.index.fp16.json"])
def test_the_old_index_stands_until_all_new_files_are_there_and_old_ones_go_after_it(
    target: ObjectTarget, index: str
) -> None:
    base = target.commit(change(stored(target, OLD), index=b"old", path=index), EMPTY)
    new = stored(target, NEW, "model-2.safetensors")
    coming = change(new, index=b"new", deletes=("model-1.safetensors",), path=index)
    seen: list[set[str]] = []

    class Watched(Mortal):
        def __getattr__(self, name: str) -> object:
            if name in ("put", "delete"):
                there = target.objects.read(index) or b""
                seen.append({path for path in target.objects.listed() if "/" not in path} - {index} | {there.decode()})
            return super().__getattr__(name)

    objects: Any = Watched(target.objects, "")
    ObjectTarget(objects).commit(coming, base)
    one, two = "model-1.safetensors", "model-2.safetensors"
    assert seen[:3] == [{one, "old"}, {one, two, "old"}, {one, two, "new"}]


def test_a_publication_waits_for_another_and_breaks_only_the_lock_of_a_dead_one(target: ObjectTarget) -> None:
    held = {"id": "another", "time": time.time()}
    assert target.objects.claim(LOCK, json.dumps(held).encode())
    assert not target.objects.claim(LOCK, b"mine")
    with pytest.raises(HeadMoved):
        target.commit(change(), EMPTY)
    assert target.objects.read(LOCK) == json.dumps(held).encode() and listed(target) == {}
    target.objects.write(LOCK, json.dumps(held | {"time": time.time() - LOCK_AGE - 1}).encode())
    with pytest.raises(HeadMoved):
        target.commit(change(), EMPTY)
    target.commit(change(), EMPTY)
    assert listed(target) == {INDEX: b"{}"}


def test_a_change_whose_objects_are_gone_is_given_up(target: ObjectTarget) -> None:
    lost = {"path": "model-1.safetensors", "size": 7, "sha256": "a" * 64, "xet": "b" * 64}
    pending = {
        "id": "x", "parent": EMPTY, "title": "", "message": "", "mark": None, "deletes": [], "texts": {},
        "files": [list(lost.values())],
    }  # fmt: skip
    target.objects.write(PENDING, json.dumps(pending).encode())
    assert listed(target) == {} and target.objects.read(PENDING) is None


def test_a_file_of_the_same_size_is_not_taken_for_one_that_is_lost(target: ObjectTarget) -> None:
    base = target.commit(change(stored(target, OLD)), EMPTY)
    pending = {
        "id": "x", "parent": base, "title": "", "message": "", "mark": None, "deletes": [], "texts": {},
        "files": [["model-1.safetensors", len(OLD), "a" * 64, "b" * 64]],
    }  # fmt: skip
    target.objects.write(PENDING, json.dumps(pending).encode())
    assert listed(target) == {INDEX: b"{}", "model-1.safetensors": OLD} and target.objects.read(PENDING) is None
    assert [commit.id for commit in target.history(target.head(), None)] == [base], "nothing was published"


def test_one_who_comes_late_leaves_the_next_publication_alone(target: ObjectTarget) -> None:
    base = target.commit(change(stored(target, OLD)), EMPTY)
    coming = change(stored(target, NEW, "model-2.safetensors"), index=b"new", deletes=("model-1.safetensors",))
    killed: Any = Mortal(target.objects, "put")
    with pytest.raises(Killed):
        ObjectTarget(killed).commit(coming, base)
    age_lock(target)

    class Overtaken(Mortal):
        def put(self, files: Sequence[StoredFile], check: Callable[[], None]) -> None:
            if not target.objects.read(PENDING):
                return target.objects.put(files)
            age_lock(target)
            head = target.head()  # finishes it
            assert INDEX in target.objects.listed() and "model-1.safetensors" not in target.objects.listed()
            target.commit(change(stored(target, OLD), index=b"next"), head)
            return target.objects.put(files)

    late: Any = Overtaken(target.objects, "")
    with pytest.raises(TargetLocked):
        ObjectTarget(late).head()
    assert listed(target) == {INDEX: b"next", "model-1.safetensors": OLD, "model-2.safetensors": NEW}
    assert len([*target.history(target.head(), None)]) == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"files": [["a", "many", "", None]]}, {"files": [["a", -1, "", None]]}, {"deletes": [1]}, {"id": None},
        {"texts": {"a": "not base64!"}}, {"texts": []}, {"more": 1},
    ],
)  # fmt: skip
def test_a_change_that_cannot_be_read_is_a_conflict(target: ObjectTarget, wrong: dict[str, object]) -> None:
    pending = {"id": "x", "parent": "", "title": "", "message": "", "mark": None, "files": [], "deletes": []}
    for text in (json.dumps(pending | {"texts": {}} | wrong), "{", "[" * 100_000):
        target.objects.write(PENDING, text.encode())
        with pytest.raises(TargetConflict, match="pending.json was changed"):
            target.head()


def test_a_record_longer_than_any_of_ours_is_not_read(target: ObjectTarget) -> None:
    head = target.head()
    target.objects.write(PUBLISHED, b" " * (ANSWER_MAX + 1))
    with pytest.raises((TargetConflict, HubRefused), match="has more than 33,554,432 bytes"):
        list(target.history(head, None))


@pytest.mark.parametrize("path", ["../model.safetensors", "/model.safetensors", ".reshard/publications.json"])
def test_a_change_that_none_of_us_wrote_leads_nowhere_else(target: ObjectTarget, path: str) -> None:
    pending = {
        "id": "x", "parent": EMPTY, "title": "", "message": "", "mark": None, "texts": {}, "files": [],
        "deletes": [path],
    }  # fmt: skip
    target.objects.write(PENDING, json.dumps(pending).encode())
    with pytest.raises(UnsafePath):
        target.head()


def test_what_others_changed_since_is_told_from_what_we_published(target: ObjectTarget) -> None:
    ours = target.commit(change(stored(target, OLD), index=b"ours"), EMPTY)
    target.objects.write(INDEX, b"theirs")
    assert target.head() != ours
    then = target.at(ours)
    assert read(then, INDEX) == b"ours" and read(then, "model-1.safetensors") == OLD
    assert [commit.id for commit in target.history(target.head(), None)] == [target.head(), ours]


def test_the_record_of_a_folder_that_was_copied_here_vouches_for_no_hash(target: ObjectTarget) -> None:
    """Its files have times where a store has tags, and what is listed here has other ones."""
    ours = target.commit(change(stored(target, OLD), index=b"ours"), EMPTY)
    record = json.loads(target.objects.read(PUBLISHED) or b"")
    record["files"] = {path: (size, 1, sha256) for path, (size, _, sha256) in record["files"].items()}
    target.objects.write(PUBLISHED, json.dumps(record).encode())
    target.objects.write("theirs.txt", b"x")
    assert {file.sha256 for file in target.at(ours).files().values()} == {None}


@pytest.mark.parametrize("broken", ["clear", "discard"])
def test_what_cannot_be_tidied_up_is_no_failure_of_what_was_published(
    target: ObjectTarget, broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def away(*_: object) -> None:
        raise HubUnreachable(endpoint="the store", what="timeout")

    monkeypatch.setattr(target.objects, broken, away)
    commit = target.commit(change(stored(target, OLD)), EMPTY)
    target.discard("t")
    assert target.head() == commit and "cannot remove staged files" in caplog.text


def test_a_record_of_many_publications_that_each_list_much_stays_small_enough_to_be_read() -> None:
    record, listing = Record(), {"a": (1, "tag")}
    for n in range(1200):
        ours = RecordedPublication(f"{n}", f"{n - 1}", "", "x" * 100_000)
        record = record.after(ours, None, listing, {"a": "0" * 64}, {}, MESSAGES_MAX)
    assert len(record.text()) < ANSWER_MAX
    assert [one.id for one in record.history("1199", None)][:20] == [f"{1199 - n}" for n in range(20)]


def test_who_could_not_renew_the_lock_for_long_places_nothing(
    target: ObjectTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a wait that the store asked for: another may have published meanwhile."""
    coming = change(stored(target, OLD))
    with monkeypatch.context() as patch, pytest.raises(HeadMoved):
        patch.setattr("reshard.pipeline.stores.objects.LOCK_SURE", -1)
        target.commit(coming, EMPTY)
    assert {"model-1.safetensors", INDEX}.isdisjoint(target.objects.listed())
    assert listed(target) == {INDEX: b"{}", "model-1.safetensors": OLD}, "by the next who looks"


def test_of_what_is_asked_for_long_after_nothing_is_sent(target: ObjectTarget) -> None:
    class Late(Exception):
        pass

    def check() -> None:
        raise Late

    placed = stored(target, OLD).stored
    assert placed is not None
    for step in (lambda: target.objects.put([placed], check), lambda: target.objects.delete(["x"], check)):
        with pytest.raises(Late):
            step()
    assert "model-1.safetensors" not in target.objects.listed()
