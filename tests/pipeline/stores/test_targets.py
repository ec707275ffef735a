"""What every Sink and Target promises: sealed objects, one guarded commit, a history that can be searched."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import pytest
from xxhash import xxh3_128_hexdigest

from reshard.pipeline.errors import ObjectLost, ReshardError, SourceCorrupt, SourceError, TargetConflict
from reshard.pipeline.protocols import Addition, Change, HeadMoved, HistoryRewritten, Target
from reshard.pipeline.tensors import StoredFile
from tests.hub.admin import HubAdmin
from tests.pipeline.stores.conftest import MakeSource, MakeTarget, noise, read
from tests.support.procs import wait_for

WEIGHTS = noise(2_500_000, 1)
MORE = noise(1_700_000, 2)


@pytest.fixture
def target(make_target: MakeTarget) -> Target:
    return make_target()


def put(target: Target, files: Mapping[str, bytes], token: str = "t1") -> list[StoredFile]:
    batch = target.sink(token).batch([])
    for path, data in files.items():
        writer = batch.open(path, len(data))
        for at in range(0, len(data), 1_000_000):
            writer.write(memoryview(data)[at : at + 1_000_000])
        writer.finish()
    return batch.seal()


def change(stored: list[StoredFile], content: Mapping[str, bytes] | None = None, **more: object) -> Change:
    additions = [Addition(file.path, stored=file) for file in stored]
    additions += [Addition(path, content=data) for path, data in (content or {}).items()]
    return Change(
        str(more.get("title", "Weights")), str(more.get("message", "digest 123")), tuple(additions),
        tuple(more.get("deletes", ())),  # type: ignore[arg-type]
    )  # fmt: skip


def listed(target: Target) -> dict[str, bytes]:
    source = target.at(target.head())
    return {path: read(source, path) for path in source.files() if path != ".gitattributes"}


# ----------------------------------------------------------------------------------------------------------- sink


def test_a_sealed_shard_is_known_by_the_sha256_of_its_bytes(target: Target) -> None:
    target.prepare(private=True)
    stored = put(target, {"a.safetensors": WEIGHTS, "b.safetensors": MORE})
    assert [(file.path, file.size, file.sha256) for file in stored] == [
        ("a.safetensors", len(WEIGHTS), hashlib.sha256(WEIGHTS).hexdigest()),
        ("b.safetensors", len(MORE), hashlib.sha256(MORE).hexdigest()),
    ]
    assert target.holds(stored) == []


def test_what_is_settled_is_the_front_of_what_would_be_sealed_and_outlives_the_batch(target: Target) -> None:
    target.prepare(private=True)
    batch, settled = target.sink("t1").batch([]), list[StoredFile]()
    for path, data in {"a.safetensors": WEIGHTS, "b.safetensors": MORE, "c.safetensors": noise(900_000, 3)}.items():
        writer = batch.open(path, len(data))
        writer.write(memoryview(data))
        writer.finish()
        if path == "b.safetensors" and target.transport != "xet":  # which answers for whole uploads
            wait_for(lambda: settled.extend(batch.settle()) or len(settled) == 2, "the store's answers")
            assert batch.traffic.uploaded + batch.traffic.deduplicated >= len(MORE)
    if target.transport == "xet":
        assert batch.settle() == []
        settled += batch.seal()
    batch.abort()
    sizes = [len(WEIGHTS), len(MORE)] if target.transport != "xet" else [len(WEIGHTS), len(MORE), 900_000]
    assert [file.size for file in settled] == sizes
    assert settled[0].sha256 == hashlib.sha256(WEIGHTS).hexdigest()
    assert target.holds(settled) == []


def test_a_seal_answers_for_what_was_not_settled(target: Target) -> None:
    target.prepare(private=True)
    batch, found = target.sink("t1").batch([]), list[StoredFile]()
    for number in range(6):
        writer = batch.open(f"{number}.safetensors", 100_000)
        writer.write(memoryview(noise(100_000, number)))
        writer.finish()
        found += batch.settle()
    found += batch.seal()
    assert [file.path for file in found] == [f"{number}.safetensors" for number in range(6)]
    assert target.holds(found) == []


def test_a_finished_writer_tells_the_digest_of_what_it_was_handed(target: Target) -> None:
    target.prepare(private=True)
    batch = target.sink("t1").batch([])
    writer = batch.open("a.safetensors", len(WEIGHTS))
    for at in range(0, len(WEIGHTS), 700_000):
        writer.write(memoryview(WEIGHTS)[at : at + 700_000])
    assert writer.finish() == xxh3_128_hexdigest(WEIGHTS)
    batch.abort()


def test_an_object_that_was_never_sealed_is_not_held(target: Target) -> None:
    target.prepare(private=True)
    unknown = StoredFile("a.safetensors", 10, sha256=hashlib.sha256(b"0123456789").hexdigest())
    assert target.holds([unknown]) == [unknown]


def test_a_shard_of_another_length_than_announced_is_refused(target: Target) -> None:
    target.prepare(private=True)
    batch = target.sink("t1").batch([])
    writer = batch.open("a.safetensors", len(WEIGHTS) + 1)
    writer.write(memoryview(WEIGHTS))
    with pytest.raises(ReshardError):
        writer.finish()
    batch.abort()


def test_an_aborted_batch_leaves_nothing_on_the_disk(target: Target, tmp_path: Path) -> None:
    target.prepare(private=True)
    before = used(tmp_path)
    batch = target.sink("t1").batch([])
    for path in ("a.safetensors", "b.safetensors"):
        writer = batch.open(path, len(WEIGHTS))
        writer.write(memoryview(WEIGHTS))
        writer.finish()
    unfinished = batch.open("c.safetensors", 5)
    unfinished.write(memoryview(b"123"))
    batch.abort()
    batch.abort()
    target.discard("t1")
    assert used(tmp_path) == before


def test_discarding_a_token_leaves_other_tokens_alone(target: Target) -> None:
    target.prepare(private=True)
    mine, theirs = target.sink("mine").batch([]), target.sink("theirs").batch([])
    for batch in (mine, theirs):
        writer = batch.open("a.safetensors", len(WEIGHTS))
        writer.write(memoryview(WEIGHTS))
        writer.finish()
    target.discard("mine")
    target.discard("nobody")
    assert theirs.seal()[0].sha256 == hashlib.sha256(WEIGHTS).hexdigest()


def used(folder: Path) -> set[str]:
    """Every file below ``folder``, and every nameless one that this process has open there."""
    named = {str(path) for path in folder.rglob("*") if path.is_file()}
    links = {descriptor.readlink() for descriptor in Path("/proc/self/fd").iterdir() if descriptor.is_symlink()}
    return named | {str(link) for link in links if link.is_relative_to(folder) and str(link).endswith("(deleted)")}


# ------------------------------------------------------------------------------------------------ state and commit


def test_what_is_not_there_is_said_to_be_missing(target: Target) -> None:
    state = target.state()
    assert (state.exists, state.head) == (False, None)


def test_preparing_twice_changes_nothing(target: Target) -> None:
    head = target.prepare(private=True)
    assert target.prepare(private=True) == head == target.head()


def test_one_commit_adds_replaces_and_deletes(target: Target) -> None:
    head = target.prepare(private=True)
    first = target.commit(change(put(target, {"a.safetensors": WEIGHTS}), {"x.json": b"1", "d/y.txt": b"2"}), head)
    assert target.head() == first != head
    assert listed(target) == {"a.safetensors": WEIGHTS, "x.json": b"1", "d/y.txt": b"2"}
    stored = put(target, {"d/b.safetensors": MORE})
    second = target.commit(change(stored, {"x.json": b"new"}, deletes=("a.safetensors", "d/y.txt")), first)
    assert target.head() == second
    assert listed(target) == {"d/b.safetensors": MORE, "x.json": b"new"}


def test_the_target_then_exists_and_its_files_are_attested(target: Target) -> None:
    head = target.prepare(private=True)
    commit = target.commit(change(put(target, {"a.safetensors": WEIGHTS}), {"x.json": b"1"}), head)
    state = target.state()
    assert (state.exists, state.visibility, state.head) == (True, "private", commit)
    assert target.at(commit).files()["a.safetensors"].sha256 == hashlib.sha256(WEIGHTS).hexdigest()


def test_a_commit_on_another_parent_than_the_head_changes_nothing(target: Target) -> None:
    base = target.prepare(private=True)
    target.commit(change(put(target, {"a.safetensors": WEIGHTS})), base)
    before = target.head()
    with pytest.raises(HeadMoved):
        target.commit(change(put(target, {"b.safetensors": MORE})), base)
    assert target.head() == before and set(listed(target)) == {"a.safetensors"}


def test_a_commit_that_names_a_lost_object_changes_nothing(target: Target) -> None:
    base = target.prepare(private=True)
    gone = StoredFile("a.safetensors", 10, sha256=hashlib.sha256(b"0123456789").hexdigest())
    with pytest.raises(ObjectLost) as lost:
        target.commit(change([gone]), base)
    assert lost.value.lost == {gone.sha256}
    assert target.head() == base


def test_equal_objects_may_be_committed_under_two_paths(target: Target) -> None:
    base = target.prepare(private=True)
    stored = put(target, {"a.safetensors": WEIGHTS, "b.safetensors": WEIGHTS})
    target.commit(change(stored), base)
    assert listed(target) == {"a.safetensors": WEIGHTS, "b.safetensors": WEIGHTS}


def test_sealed_objects_outlive_their_sink(target: Target) -> None:
    """Receipts survive: another owner, with another token, commits what the first one sealed."""
    base = target.prepare(private=True)
    stored = put(target, {"a.safetensors": WEIGHTS}, token="first")
    target.discard("first")
    assert target.holds(stored) == []
    target.commit(change(stored), base)
    assert listed(target) == {"a.safetensors": WEIGHTS}


# -------------------------------------------------------------------------------------------------------- history


def test_history_goes_back_to_the_base_and_no_further(target: Target) -> None:
    base = target.prepare(private=True)
    one = target.commit(change([], {"x": b"1"}, title="one", message="first\n\ndigest abc"), base)
    two = target.commit(change([], {"x": b"2"}, title="two"), one)
    three = target.commit(change([], {"x": b"3"}, title="three"), two)
    assert [(c.id, c.title) for c in target.history(three, base)] == [(three, "three"), (two, "two"), (one, "one")]
    assert [c.id for c in target.history(two, one)] == [two]
    assert list(target.history(three, three)) == []
    oldest = list(target.history(three, base))[-1]
    assert "first" in oldest.message and "digest abc" in oldest.message
    assert {c.id for c in target.history(three, None)} >= {one, two, three}


def test_a_base_that_never_was_means_that_history_was_rewritten(target: Target) -> None:
    base = target.prepare(private=True)
    head = target.commit(change([], {"x": b"1"}), base)
    with pytest.raises(HistoryRewritten):
        list(target.history(head, "f" * 40))


def test_a_state_that_never_was_cannot_be_opened(target: Target) -> None:
    target.prepare(private=True)
    with pytest.raises((SourceError, TargetConflict)):
        target.at("f" * 40).files()


# -------------------------------------------------------------------------------------------------------- carrying

CARRIED = {
    "config.json": b'{"architectures": ["X"]}',
    "tokenizer/tokenizer.model": noise(1_200_000, 3),
    "empty.txt": b"",
    "merges.txt": b"a b\n" * 100,
    "picture.png": noise(50_000, 4),
}


@pytest.mark.parametrize("kind", ["folder_source", "hub_source", "xet_source"])
def test_carried_files_arrive_unchanged(target: Target, kind: str, request: pytest.FixtureRequest) -> None:
    make: MakeSource = request.getfixturevalue(kind)
    source = make(CARRIED)
    base = target.prepare(private=True)
    files = [file for path, file in source.files().items() if path in CARRIED]
    additions = target.carry(files, source, "t1")
    assert [addition.path for addition in additions] == [file.path for file in files]
    target.commit(Change("Carry", "", tuple(additions), ()), base)
    assert listed(target) == CARRIED


@pytest.mark.parametrize("path", ["config.json", "tokenizer/tokenizer.model"])
def test_a_carried_file_that_is_not_what_its_digest_says_is_refused(
    target: Target, path: str, hub_source: MakeSource, hub: HubAdmin
) -> None:
    source = hub_source(CARRIED)
    target.prepare(private=True)
    hub.fault(f"GET .*{path.rpartition('/')[2]}", "wrong_bytes", at=3)
    with pytest.raises(SourceCorrupt) as corrupt:
        target.carry([source.files()[path]], source, "t1")
    assert corrupt.value.facts["file"] == path
