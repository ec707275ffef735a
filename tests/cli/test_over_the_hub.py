"""`reshard run` from Hub to Hub, as a person types it, over both transports."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi

from reshard.pipeline.limits import MB
from tests.cli.conftest import Run, answered
from tests.cli.uploads import ROWS, source
from tests.hub.fixtures import Namespace, hub_process
from tests.support.models import arrays, save_single

__all__ = ["hub_process", "source"]  # of its own: other files would leave chunks there, and what is sent is counted

SEAM = 0.15 * MB  # bytes sent again at most wherever a new file begins or ends inside an old one


@pytest.mark.slow
def test_a_run_tells_what_the_hub_makes_it_wait_for(
    reshard: Run, namespace: Namespace, source: str, model: Path
) -> None:
    env = {"HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": namespace.token}
    slow: dict[str, Any] = {"status": 429, "headers": {"Retry-After": "1"}, "times": 1}
    namespace.admin.fault("GET /api/models/.*", "status", **slow)
    done = reshard("run", source, "--to", namespace.repo("limited"), env=env)
    assert (done.code, "waiting: rate limited for 1 s" in done.err.splitlines()) == (0, True), done.err
    namespace.admin.fault("POST .*/commit/", "status", **slow)
    done = reshard("run", model, "--to", namespace.repo("again"), "--json", env=env)
    waits = [document["waits"] for document in done.documents if document.keys() == {"waits"}]
    assert (done.code, waits) == (0, ["rate limited for 1 s", None]), done.err


def test_a_plan_tells_what_the_hub_makes_it_wait_for(reshard: Run, namespace: Namespace, source: str) -> None:
    env = {"HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": namespace.token}
    namespace.admin.fault("GET /api/models/.*", "status", status=429, headers={"Retry-After": "1"}, times=1)
    done = reshard("plan", source, env=env)
    assert (done.code, "waiting: rate limited for 1 s" in done.err.splitlines()) == (0, True), done.err


def test_a_plan_without_room_for_shards_that_wait_is_shown_and_ends_as_a_run_would(
    reshard: Run, namespace: Namespace, model: Path
) -> None:
    env = {"HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": namespace.token, "RESHARD_DISK_LIMIT": "1kB"}
    target = namespace.repo("narrow")
    namespace.admin.create_repo(target)
    done = reshard("plan", model, "--to", target, "--transport", "http", env=env)
    assert (done.code, "error[resource.disk]: " in done.err) == (8, True), done.err
    assert "(1.0 kB free)" in done.out


@pytest.mark.parametrize("command", ["plan", "run"])
@pytest.mark.parametrize(
    ("setting", "transport", "code"),
    [
        ("RESHARD_TMPDIR=/nowhere", "auto", "resource.tmpdir"),
        ("RESHARD_TMPDIR=/nowhere", "http", "resource.tmpdir"),
        ("RESHARD_DISK_LIMIT=1kB", "http", "resource.disk"),
    ],
)
def test_without_room_for_temporary_files_no_repository_is_created(
    reshard: Run, namespace: Namespace, model: Path, command: str, setting: str, transport: str, code: str
) -> None:
    env = {"HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": namespace.token, **dict([setting.split("=")])}
    namespace.admin.log(reset=True)
    done = reshard(command, model, "--to", namespace.repo("leftover"), "--transport", transport, env=env)
    assert (done.code, f"error[{code}]: " in done.err) == (8, True), done.err
    assert not any(line["path"] == "/api/repos/create" for line in namespace.admin.log())


def test_a_cast_in_place_of_our_own_publication_says_how_it_is_undone(
    reshard: Run, namespace: Namespace, tmp_path: Path
) -> None:
    env = {"HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": namespace.token}
    place = namespace.repo("in-place")
    save_single(tmp_path / "floats", arrays(4, 4000))
    assert reshard("run", tmp_path / "floats", "--to", place, env=env).code == 0
    for dtype in ("float16", "bfloat16"):  # the second is of what the first published there from itself
        typed = (place, "--to", place, "--dtype", dtype)
        assert "warning     this changes the source itself (" in reshard("plan", *typed, env=env).out
        done = reshard("run", *typed, env=env)
        assert f"  changed       the source itself; undo with `reshard rollback {place}@main`\n" in done.out, done


@pytest.mark.parametrize(("transport", "most"), [("xet", 2 * 4 * SEAM), ("http", ROWS * 1.1 * MB)])
def test_what_is_uploaded_is_what_the_transport_needs(
    reshard: Run, namespace: Namespace, source: str, transport: str, most: float
) -> None:
    namespace.admin.log(reset=True)
    target = namespace.repo(f"cut-over-{transport}")
    env = {"HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": namespace.token}
    done = reshard("run", source, "--to", target, "--size", "3.1MB", "--transport", transport, "--json", env=env)
    assert done.code == 0, done.out
    *_, report = done.documents
    assert report["source_bytes"] == {"checked": ["model.safetensors"]}
    files = namespace.admin.files(target)
    assert sum(path.endswith(".safetensors") for path in files) == 4
    sent = sum(total["up"] for total in namespace.admin.totals().values())
    assert sent <= most
    if transport == "http":
        assert sent >= ROWS * MB


@pytest.mark.parametrize(("answer", "code"), [(b"n\n", 130), (b"y\n", 0)])
def test_a_person_is_asked_before_a_private_source_is_made_public(
    namespace: Namespace, model: Path, answer: bytes, code: int
) -> None:
    source, target = namespace.repo("secret"), namespace.repo("shown")
    namespace.admin.create_repo(source, visibility="private")
    namespace.admin.put_files(source, {path.name: path.read_bytes() for path in model.iterdir()})
    command = [Path(sys.executable).parent / "reshard", "run", source, "--to", target, "--size", "3300B", "--public"]
    env = os.environ | {"HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": namespace.token, "COLUMNS": "200"}
    returned, seen, _ = answered(command, env, b"everyone can see it?", answer)
    assert f"{source} is private".encode() in seen and returned == code
    assert any(line["path"] == "/api/repos/create" for line in namespace.admin.log()) is (code == 0)


def test_weights_that_another_branch_has_are_no_work(reshard: Run, namespace: Namespace, model: Path) -> None:
    env = {"HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": namespace.token}
    source, target = namespace.repo("source"), namespace.repo("target")
    namespace.admin.create_repo(source)
    namespace.admin.put_files(source, {path.name: path.read_bytes() for path in model.iterdir()})
    assert reshard("run", source, "--to", target, env=env).code == 0
    for _ in range(2):
        again = reshard("run", source, "--to", target, "--branch", "dev", env=env)
        assert again.code == 0 and again.out.startswith("Nothing to do: "), again.out + again.err
        assert "unchanged, already in the target" in again.err
    api = HfApi(namespace.endpoint, namespace.token)
    assert api.repo_info(target, revision="dev").sha == namespace.admin.head(target)


def test_what_is_rolled_back_already_or_is_not_there_is_told(reshard: Run, namespace: Namespace, model: Path) -> None:
    env, target = {"HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": namespace.token}, namespace.repo("target")
    assert reshard("run", model, "--to", target, env=env).code == 0
    published = namespace.admin.head(target)
    api = HfApi(namespace.endpoint, namespace.token)
    api.create_branch(target, branch="dev")
    refs = namespace.admin.state(target)["refs"]
    for place, what in ((namespace.repo("none"), "repository"), (f"{target}@none", "branch")):
        refused = reshard("rollback", place, env=env)
        assert refused.code == 7 and f"cannot roll back {place}: {what} not found\n" in refused.err, refused.err
        assert "check the spelling" in refused.err and "reshard has not published" not in refused.err
    refused = reshard("rollback", f"{namespace.repo('none')}@refs/pr/3", env=env)
    assert refused.code == 7 and "repository not found" in refused.err and "--pr" not in refused.err
    refused = reshard("rollback", f"{target}@refs/pr/9", env=env)
    assert refused.code == 7 and "has no pull request 9" in refused.err
    assert namespace.admin.state(target)["refs"] == refs
    for place, ref in ((target, "main"), (f"{target}@dev", "dev")):
        done = reshard("rollback", place, env=env)
        refs = namespace.admin.state(target)["refs"]
        commit = refs[f"refs/heads/{ref}"]
        assert done.out == f"Rolled back commit {published} of {place} with commit {commit}\n"
        again = reshard("rollback", place, env=env)
        told = f"Nothing to do: commit {published} of {place} was already rolled back with commit {commit}\n"
        assert (again.code, again.out) == (0, told)
        assert reshard("rollback", place, "--json", env=env).documents[0]["already"]
        assert namespace.admin.state(target)["refs"] == refs
    api.create_branch(target, branch="later")
    assert reshard("rollback", f"{target}@later", env=env).out.startswith("Nothing to do: ")


def test_a_pull_request_is_rolled_back_by_its_ref(reshard: Run, namespace: Namespace, model: Path) -> None:
    env, target = {"HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": namespace.token}, namespace.repo("target")
    namespace.admin.create_repo(target)
    assert reshard("run", model, "--to", target, "--pr", env=env).code == 0
    for typed, code in ((("--pr",), 2), ((), 7)):
        refused = reshard("rollback", target, *typed, env=env)
        assert refused.code == code and "@refs/pr/N" in refused.err, refused.err
    assert reshard("rollback", f"{target}@refs/pr/1", env=env).code == 0
