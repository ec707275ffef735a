"""What a person does after a job: build on somebody else's change, or take the commit back. Real processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.states import JobState
from tests.hub.fixtures import Namespace
from tests.support.checker import from_hub, read_checkpoint
from tests.support.models import add_friends, arrays, numbered, save_sharded
from tests.support.procs import Broker, Machine, wait_for


@pytest.fixture
def repo(tmp_path: Path, namespace: Namespace) -> str:
    save_sharded(tmp_path / "model", numbered(arrays(8, 4000), 2))
    add_friends(tmp_path / "model")
    (tmp_path / "model" / "config.json").unlink()
    contents = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    name = namespace.repo("source")
    namespace.admin.create_repo(name)
    namespace.admin.put_files(name, contents, lfs=[path for path in contents if path.endswith(".safetensors")])
    namespace.admin.create_repo(namespace.repo("target"))
    return name


@pytest.fixture
def machine(tmp_path: Path, namespace: Namespace) -> Iterator[Machine]:
    token = {"HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": namespace.token}
    with Broker(tmp_path) as broker, Machine(tmp_path / "machine", broker.url, **token) as machine:
        machine.control()
        machine.worker(concurrency=1)
        yield machine


def answer(machine: Machine, *arguments: str) -> dict[str, object]:
    done = machine.run(*arguments, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_a_conflict_is_built_upon_when_asked_and_the_commit_taken_back_when_asked(
    namespace: Namespace, repo: str, machine: Machine
) -> None:
    target = namespace.repo("target")
    with JobStore.at(machine.env["RESHARD_BROKER_URL"]) as store:
        rule = namespace.admin.fault(f"^POST /api/models/{target}/commit/", "hold", times=1)
        job = str(answer(machine, "submit", repo, "--to", target, "--size", "20kB")["id"])
        namespace.admin.wait_for_fault(rule)
        theirs = namespace.admin.put_files(target, {"tokenizer.json": b"{}"})
        namespace.admin.release(rule)
        wait_for(lambda: store.get(job).state.ended, "the end of the job")
        failed = store.get(job)
        assert failed.state == JobState.failed and failed.error is not None
        assert failed.error["code"] == "target.conflict" and namespace.admin.head(target) == theirs
        assert f"reshard retry {job} --overwrite" in failed.error["hint"]

        namespace.admin.clear_faults()
        answer(machine, "retry", job, "--overwrite")
        wait_for(lambda: store.get(job).state.ended, "the end of the second try")
        assert store.get(job).state == JobState.done, store.get(job).error
    assert read_checkpoint(from_hub(namespace.endpoint, target)) == read_checkpoint(from_hub(namespace.endpoint, repo))

    undone = answer(machine, "rollback", job)
    assert undone["commit"] == namespace.admin.head(target) == answer(machine, "status", job)["rolled_back"]
    assert f"rolled back by {str(undone['commit'])[:12]}" in machine.run("list").stdout
    assert str(undone["commit"]) in machine.run("status", job).stdout
    assert namespace.admin.read(target, "tokenizer.json") == b"{}"
    assert not [path for path in namespace.admin.files(target) if path.endswith(".safetensors")]


def test_a_commit_whose_answer_was_lost_can_be_taken_back(namespace: Namespace, repo: str, machine: Machine) -> None:
    target = namespace.repo("target")
    namespace.admin.fault(rf"^POST /api/models/{target}/commit/", "lost_response", times=1)
    done = answer(machine, "submit", repo, "--to", target, "--size", "20kB", "--watch")
    assert done["published"]["found"] and done["published"]["commit"] == namespace.admin.head(target)
    assert "nothing was published" not in machine.run("status", str(done["id"])).stdout
    assert answer(machine, "rollback", str(done["id"]))["commit"] == namespace.admin.head(target)
    assert not [path for path in namespace.admin.files(target) if path.endswith(".safetensors")]


def test_a_commit_that_did_not_read_back_and_was_taken_back_is_made_again(
    namespace: Namespace, repo: str, machine: Machine
) -> None:
    """A retry alone would read back the commit that was undone, and end well over an empty target."""
    target = namespace.repo("target")
    namespace.admin.fault(rf"^GET /{target}/resolve/", "status", status=404)
    job = str(answer(machine, "submit", repo, "--to", target, "--size", "20kB")["id"])
    with JobStore.at(machine.env["RESHARD_BROKER_URL"]) as store:
        wait_for(lambda: store.get(job).state.ended, "the end of the job")
        assert store.get(job).state == JobState.published_unverified, store.get(job).error
        namespace.admin.clear_faults()
        answer(machine, "rollback", job)
        assert not [path for path in namespace.admin.files(target) if path.endswith(".safetensors")]
        assert answer(machine, "retry", job)["state"] in {"queued", "planning"}
        wait_for(lambda: store.get(job).state.ended, "the end of the second try")
        assert store.get(job).state == JobState.done and store.get(job).rolled_back is None
    assert read_checkpoint(from_hub(namespace.endpoint, target)) == read_checkpoint(from_hub(namespace.endpoint, repo))


def test_a_job_that_made_no_commit_has_nothing_to_take_back(namespace: Namespace, repo: str, machine: Machine) -> None:
    first = str(answer(machine, "submit", repo, "--to", namespace.repo("target"), "--size", "20kB", "--watch")["id"])
    second = str(answer(machine, "submit", repo, "--to", namespace.repo("target"), "--size", "20kB", "--watch")["id"])
    assert first != second
    refused = machine.run("rollback", second)
    assert refused.returncode == 11 and "published nothing" in refused.stderr
    assert "nothing was published" in machine.run("status", second).stdout


def test_a_target_outside_the_allowed_namespaces_is_one_line_and_stays_as_it_is(
    namespace: Namespace, repo: str, machine: Machine
) -> None:
    other = namespace.admin.create_user(f"{namespace.name}other")
    target = f"{other.name}/target"
    namespace.admin.create_repo(target)
    head = namespace.admin.head(target)
    done = machine.run("submit", repo, "--to", target, "--size", "20kB", "--watch", "--quiet")
    assert done.returncode == 4, done.stderr
    line = next(line for line in done.stderr.splitlines() if line.startswith("error["))
    assert line.startswith("error[access.target_not_allowed]: ") and target in line and namespace.name in line
    assert "RESHARD_ALLOWED_TARGETS" in done.stderr
    assert namespace.admin.head(target) == head
