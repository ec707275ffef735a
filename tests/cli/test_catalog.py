"""`reshard catalog check` on the Hub on loopback, and the other commands on a broker on which nobody works."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from reshard.pipeline.catalogs.definition import parse
from reshard.pipeline.catalogs.expand import expand
from reshard.pipeline.errors import SourceNotFound, TargetFilled
from reshard.pipeline.stores.connect import Context
from reshard.worker import broker
from reshard.worker.followers.cursor import Cursor
from reshard.worker.followers.records import Definition, entry_of
from reshard.worker.queue.jobs import JobStore
from reshard.worker.settings import Settings
from tests.cli.conftest import WHEN, Queue, Run
from tests.hub.fixtures import Namespace
from tests.support.models import arrays, save_single
from tests.worker.conftest import another, claimed
from tests.worker.followers.builders import begin, definition, jobs, rows


def model(space: Namespace, name: str, **settings: object) -> str:
    space.admin.create_repo(space.repo(name), **settings)
    space.admin.put_files(space.repo(name), {"model.safetensors": b"x" * 1000}, lfs=["model.safetensors"])
    return space.repo(name)


def test_check_says_what_can_be_done_and_queues_nothing(reshard: Run, namespace: Namespace, tmp_path: Path) -> None:
    for name in ("one", "two", "two-cut"):
        model(namespace, name)
    model(namespace, "three", gated="auto")
    file = tmp_path / "c.yaml"
    file.write_text(
        f"name: mine\ndefaults: {{to: '{namespace.name}/{{name}}-cut'}}\nentries:\n"
        + "".join(f"- repo: {namespace.repo(name)}\n" for name in ("one", "two", "three"))
    )
    env = {"HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": namespace.token}
    done = reshard("catalog", "check", file, "--json", env=env)
    assert done.code == 0, done.out
    (facts,) = done.documents
    assert {name: facts[name] for name in ("models", "ready", "new", "bytes", "growth", "calls", "wrong")} == {
        "models": 3, "ready": 3, "new": 2, "bytes": 3000, "growth": 3000, "calls": 3, "wrong": [],
    }  # fmt: skip
    assert facts["gated"] == [namespace.repo("three")]
    assert (facts["unchanged"], facts["drift"]) == (None, None)
    assert facts["unwritable"] == []
    assert "3 (3 ready)" in reshard("catalog", "check", file, env=env).out
    env["HF_TOKEN"] = namespace.admin.create_token(namespace.name, role="read")
    reads = reshard("catalog", "check", file, env=env)
    assert reads.code == 0
    assert (
        f"HF_TOKEN ({namespace.name}) cannot write to {namespace.name} on {namespace.endpoint}:"
        f" {namespace.repo('one-cut')} and 2 more (workers and the control process may use another token)\n"
    ) in reads.out
    none = reshard("catalog", "check", file, env={"HF_ENDPOINT": namespace.endpoint}).out
    assert f"no token to write to {namespace.name} on {namespace.endpoint}: " in none
    env["HF_TOKEN"] = namespace.token

    with file.open("a") as more:
        more.write(f"- repo: {namespace.repo('none')}\n")
        more.write(f"- {{repo: {namespace.repo('one')}, credential: boss, to: '{namespace.repo('other')}'}}\n")
    wrong = reshard("catalog", "check", file, env=env)
    assert wrong.code == 2
    assert "source.not_found" in wrong.out
    assert "access.credential_unknown: RESHARD_CREDENTIALS has no credential boss" in wrong.out
    assert wrong.err.splitlines() == [
        f"error[usage.entries]: {file}: 2 models cannot be resharded",
        "hint: fix the entries marked invalid; the other models can still be resharded",
    ]
    file.write_text(f"name: mine\nentries:\n- {{repo: {namespace.repo('none')}, to: {namespace.repo('other')}}}\n")
    assert reshard("catalog", "check", file, env=env).err.endswith("hint: fix the entries marked invalid\n")


def test_a_file_with_an_error_is_one_line_with_its_fix(reshard: Run, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("name: mine\nentries:\n- repo: a/b\n  sise: 1GB\n")
    done = reshard("catalog", "check", file)
    assert (done.code, done.out) == (2, "")
    error, hint = done.err.splitlines()
    assert error.startswith(f"error[usage.catalog]: {file}, line 4: entries[0].sise: ")
    assert hint == "hint: did you mean `size`?"
    assert reshard("catalog", "check", tmp_path / "none.yaml").err.startswith("error[usage]: ")


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A broker for each test, so that no other test's catalogs are listed."""
    settings = Settings(broker_url=None, data_dir=tmp_path / "service")
    yield broker.start(settings)
    broker.stop(settings)


def test_with_a_broker_check_counts_what_stands_and_what_may_grow(
    reshard: Run, namespace: Namespace, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two", "one-cut", "two-cut"):
        model(namespace, name)
    file = tmp_path / "c.yaml"
    file.write_text(
        f"name: mine\ndefaults: {{to: '{namespace.name}/{{name}}-cut'}}\nentries:\n"
        + "".join(f"- repo: {namespace.repo(name)}\n" for name in ("one", "two"))
    )
    env = {"HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": namespace.token}
    for name in env:
        monkeypatch.setenv(name, env[name])
    with JobStore.at(url) as store:
        Cursor(store).remember("mine", entry_of(expand(parse(file.read_text(), "c"), Context.from_env()).models[0]))
    env["RESHARD_BROKER_URL"] = url
    (facts,) = reshard("catalog", "check", file, "--json", env=env).documents
    assert {name: facts[name] for name in ("ready", "new", "unchanged", "drift", "growth")} == {
        "ready": 2, "new": 0, "unchanged": 1, "drift": [], "growth": 1000,
    }  # fmt: skip

    file.write_text("name: mine\ndefaults: {to: 'us/{name}'}\nentries:\n- query: {author: nobody-of-this-name}\n")
    (facts,) = reshard("catalog", "check", file, "--json", env=env).documents
    assert (facts["models"], facts["unchanged"], facts["drift"], facts["empty"]) == (0, 0, [], [0])
    assert re.search(r"^warning +entries\[0\] matches no models$", reshard("catalog", "check", file, env=env).out, re.M)
    with JobStore.at(url) as store:
        catalogs = Cursor(store)
        catalogs.submit(Definition(name="mine", text=file.read_text()))
        assert catalogs.fill("mine", catalogs.claim("mine", "token"), "token", [], [0])
    assert "entries[0] matches no models" in reshard("catalog", "status", "mine", env=env).out
    assert "1 entry matches no models" in reshard("catalog", "status", env=env).out
    report = tmp_path / "night.md"
    said = reshard("catalog", "status", "mine", "--report", report, env=env).out
    assert said.splitlines()[-1].split(maxsplit=1) == ["report", f"written to {report}"]
    assert "**entries[0] matches no models**" in report.read_text()


@pytest.mark.slow
def test_a_catalog_from_its_submission_to_its_end(queue: Queue, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("name: mine\nentries:\n- {repo: a/b, to: c/d}\n")
    assert queue("catalog", "status").out == "No catalogs\n"
    refused = queue("catalog", "submit", file, "--max-bytes", "lots").err
    assert refused.startswith("error[usage.size]: --max-bytes lots: ")
    submitted = queue("catalog", "submit", file, "--max-bytes", "1GB")
    assert submitted.out.startswith("Submitted catalog mine\n")
    assert "no worker or control process is running" in submitted.err
    (again,) = queue("catalog", "submit", file, "--json").documents
    assert again["existed"] is True
    (seen,) = queue("catalog", "status", "mine", "--json").documents
    assert (seen["state"], seen["digest"]) == ("expanding", again["digest"])
    assert queue("catalog", "failures", "mine").out == "No failures\n"
    assert queue("catalog", "resume", "mine").out == "Catalog mine is already expanding\n"
    assert queue("catalog", "pause", "mine").out == "Paused catalog mine\n"
    assert queue("catalog", "pause", "mine").out == "Catalog mine is already paused\n"
    assert "`reshard catalog resume mine`" in queue("catalog", "status", "mine").out
    assert "continue it with `reshard catalog resume mine`, or see" in queue("catalog", "watch", "mine").err
    assert queue("catalog", "retry", "mine").code == 10
    assert queue("catalog", "resume", "mine").code == 0
    (seen,) = queue("catalog", "status", "mine", "--json").documents
    assert seen["state"] == "expanding"
    bogus = queue("catalog", "retry", "mine", "--only", "bogus")
    assert bogus.code == 2
    assert "--only bogus: no model in mine failed with this code (codes found: none)" in bogus.err
    report = tmp_path / "report.md"
    assert queue("catalog", "cancel", "mine").out == "Cancelled catalog mine and 0 jobs\n"
    assert queue("catalog", "status", "mine", "--report", report, "--quiet").out == "cancelled\n"
    assert report.read_text().startswith("# Catalog mine: cancelled\n")
    refused = queue("catalog", "status", "mine", "--report", tmp_path / "nowhere" / "report.md")
    assert refused.code == 4
    assert refused.err.startswith(
        f"error[access.folder]: cannot write to {tmp_path}/nowhere/report.md: its folder does not exist"
    )
    head, row = (re.split("  +", line) for line in queue("catalog", "status").out.splitlines())
    assert head == ["CATALOG", "STATE", "SINCE", "LAST SUCCESS", "MODELS"]
    assert (row[:2], row[3]) == (["mine", "cancelled"], "none yet") and re.fullmatch(WHEN, row[2])
    assert queue("catalog", "failures", "none").err.startswith("error[queue.no_catalog]: ")
    assert queue("catalog", "remove", "mine").out.startswith("Removed catalog mine; its targets are unchanged")
    assert queue("catalog", "status").out == "No catalogs\n"
    assert queue("catalog", "remove", "mine").err.startswith("error[queue.no_catalog]: ")


def test_submitted_or_retried_while_it_is_paused_it_is_said_to_be_paused(
    queue: Queue, url: str, tmp_path: Path
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(definition(2).text)
    assert queue("catalog", "submit", file).out.endswith("\nFollow it with `reshard catalog watch mirror`\n")
    assert queue("catalog", "submit", file).out.startswith(
        "Catalog mirror is already running and now uses these limits"
    )
    with JobStore.at(url) as store:
        catalogs = Cursor(store)
        catalogs.pause("mirror")
        resume = "Resume it with `reshard catalog resume mirror`\n"
        uses = "Catalog mirror is paused and now uses these limits (3 jobs at a time)\n"
        assert queue("catalog", "submit", file, "--at-once", "3").out == uses + resume
        watched = queue("catalog", "submit", file, "--at-once", "3", "--watch")
        assert watched.code == 10 and watched.out.startswith(uses + resume)
        assert queue("catalog", "submit", file, "--json").documents[0]["state"] == "paused"

        catalogs.cancel("mirror")
        (absent, _), other = rows(definition(2))
        begin(catalogs, definition(2), [(absent, SourceNotFound(repo="them/m0", endpoint="https://hub")), other])
        catalogs.pause("mirror")
        retried = queue("catalog", "retry", "mirror").out
        assert retried == f"Retrying 1 model of catalog mirror\nCatalog mirror is paused\n{resume}"
        assert queue("catalog", "retry", "mirror", "--json").documents[0]["state"] == "paused"
        assert catalogs.get("mirror").state == "paused"


def test_a_failure_names_its_job_and_the_report_no_dash(queue: Queue, url: str, tmp_path: Path) -> None:
    with JobStore.at(url) as store:
        catalogs = Cursor(store)
        begin(catalogs, definition(1))
        (job,) = jobs(catalogs)
        leases = another(store)
        assert leases.fail(claimed(leases, job, "plan"), TargetFilled(path="/", free=1, job=job).to_dict()) == "ok"
        assert jobs(catalogs) == []
    said = queue("catalog", "failures", "mirror").out
    assert f"`reshard retry {job}`" in said and "JOB" not in said
    refused = queue("catalog", "status", "mirror", "--report", "-")
    assert refused.code == 2 and refused.err.startswith("error[usage]: --report -: ")


def test_what_a_cancel_dropped_is_counted_and_a_retry_says_how_to_run_it(queue: Queue, url: str) -> None:
    with JobStore.at(url) as store:
        catalogs = Cursor(store)
        begin(catalogs, definition(3, at_once=2))
        assert len(jobs(catalogs)) == 2 and catalogs.cancel("mirror") == 2 and jobs(catalogs) == []
    assert re.search(r"^models +3: 2 cancelled, 1 not queued$", queue("catalog", "status", "mirror").out, re.M)
    assert queue("catalog", "status").out.splitlines()[-1].endswith("2 cancelled, 1 not queued")
    retried = queue("catalog", "retry", "mirror")
    assert retried.code == 0 and retried.out.splitlines() == [
        "No model of catalog mirror has failed",
        "To run cancelled models again, run `reshard catalog submit FILE`",
    ]
    paused = queue("catalog", "pause", "mirror")
    assert paused.code == 10 and paused.err.startswith("error[queue.catalog_state]: catalog mirror is cancelled: ")


def test_the_jobs_of_one_model_for_two_targets_are_each_counted_as_running(
    queue: Queue, url: str, tmp_path: Path
) -> None:
    text = "name: mirror\nentries:\n- {repo: them/m, to: us/a}\n- {repo: them/m, to: us/b}\n"
    with JobStore.at(url) as store:
        catalogs = Cursor(store)
        begin(catalogs, Definition(name="mirror", text=text))
        jobs(catalogs)
    assert re.search(r"^models +2: 2 running$", queue("catalog", "status", "mirror").out, re.M)
    assert queue("catalog", "status").out.splitlines()[-1].endswith(" 2 running")
    report = tmp_path / "report.md"
    assert queue("catalog", "status", "mirror", "--report", report).code == 0
    assert "| running | 2 | | |" in report.read_text() and "not queued" not in report.read_text()


def test_a_schedule_submits_a_catalog_or_a_request_but_not_both(queue: Queue, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("name: mine\nentries:\n- {repo: a/b, to: c/d}\n")
    add = ("schedule", "add", "nightly", "--cron", "0 3 * * *")
    for wrong, says in (
        ((), "[usage]: nothing to submit: pass SRC and --to, or --catalog FILE"),
        (("a/b",), "[usage.no_target]: --to is required"),
        (("--size", "1MB"), "[usage]: SRC and --to are missing"),
        (
            ("a/b", "--to", "c/d", "--catalog", file),
            "[usage]: --catalog FILE defines the whole submission; remove SRC, --to",
        ),
        (
            ("--catalog", file, "--size", "1MB", "--pr"),
            "[usage]: --catalog FILE defines the whole submission; remove --size, --pr",
        ),
        (("a/b", "--to", "c/d", "--at-once", "2"), "[usage]: --at-once: only valid with --catalog FILE"),
    ):
        refused = queue(*add, *wrong)
        assert (refused.code, refused.err.startswith(f"error{says}")) == (2, True), refused.err
    assert queue(*add, "--catalog", file, "--at-once", "2", "--max-failures", "0", "--max-bytes", "1GB").code == 0
    (kept,) = queue("schedule", "show", "nightly", "--json").documents
    limits = {name: kept["catalog"][name] for name in ("at_once", "max_failures", "max_bytes")}
    assert limits == {"at_once": 2, "max_failures": 0, "max_bytes": 10**9}
    assert queue("schedule", "run", "nightly").out == "Schedule nightly: submitted its catalog\n"
    assert "skipped: previous run was still in progress" in queue("schedule", "run", "nightly").out
    (shown,) = queue("schedule", "show", "nightly", "--json").documents
    (seen,) = queue("catalog", "status", "mine", "--json").documents
    assert shown["digest"] == seen["digest"]
    assert f"catalog mine, {seen['digest'][:12]}" in queue("schedule", "show", "nightly").out
    queue("catalog", "cancel", "mine")
    queue("schedule", "run", "nightly")
    assert "catalog mine, expanding" in queue("schedule", "list").out
    refused = queue("catalog", "remove", "mine").err
    assert refused.splitlines() == [
        "error[queue.catalog_state]: catalog mine is expanding: only a catalog that has ended can be removed",
        "hint: cancel it with `reshard catalog cancel mine`, or see `reshard catalog status mine`",
    ]
    queue("catalog", "cancel", "mine")
    removed = queue("catalog", "remove", "mine").out
    assert "Schedule nightly will submit it again; to stop that, run `reshard schedule remove nightly`" in removed
    assert "catalog mine (since removed)" in queue("schedule", "list").out


@pytest.mark.slow
def test_a_schedule_with_an_older_text_is_said_until_the_command_that_is_named_updates_it(
    queue: Queue, tmp_path: Path
) -> None:
    file = tmp_path / "my c.yaml"
    text = "name: mine\nentries:\n- {repo: a/b, to: c/d}\n"
    file.write_text(text)
    add = ("schedule", "add", "nightly", "--cron", "0 3 * * *", "--catalog", file, "--at-once", "2")
    assert queue(*add).code == 0
    assert "schedule" not in queue("catalog", "submit", file).out, "it submits the same"
    assert queue("catalog", "cancel", "mine").code == 0
    file.write_text(text + "- {repo: a/e, to: c/f}\n")
    submitted = queue("catalog", "submit", file)
    update = f"reshard schedule set nightly --catalog {shlex.quote(str(file))}"
    assert f"Schedule nightly still submits an older version; to update it, run `{update}`\n" in submitted.out
    (again,) = queue("catalog", "submit", file, "--json").documents
    assert again["outdated_schedules"] == ["nightly"], "each time"
    assert queue("catalog", "cancel", "mine").code == 0
    for _ in range(2):
        newer = (
            "a newer version of catalog mine was submitted; to update the schedule, run `reshard schedule set nightly"
        )
        assert f"schedule nightly: {newer}" in queue("schedule", "list").out
        assert newer in queue("schedule", "show", "nightly").out
        assert queue("schedule", "run", "nightly").code == 0  # and it brings the older text back
        assert queue("catalog", "cancel", "mine").code == 0

    before = queue("schedule", "show", "nightly", "--json").documents[0]
    assert before["outdated"] is True
    updated = queue(*shlex.split(update)[1:])
    assert updated.out == f"Updated schedule nightly: now submits catalog mine, {again['digest'][:12]}\n", updated.err
    after = queue("schedule", "show", "nightly", "--json").documents[0]
    assert (after["digest"], after["catalog"]["at_once"], after["outdated"]) == (again["digest"], 2, False)
    assert [after[kept] for kept in ("cron", "next", "runs")] == [before[kept] for kept in ("cron", "next", "runs")]
    assert "newer" not in queue("schedule", "list").out and "older" not in queue("catalog", "submit", file).out
    assert queue(*shlex.split(update)[1:], "--at-once", "3").code == 0
    assert queue("schedule", "show", "nightly", "--json").documents[0]["catalog"]["at_once"] == 3


def test_a_schedule_that_is_newer_than_the_last_submission_is_not_outdated(queue: Queue, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("name: mine\nentries:\n- {repo: a/b, to: c/d}\n")
    assert queue("catalog", "submit", file).code == 0
    file.write_text("name: mine\nentries:\n- {repo: a/e, to: c/f}\n")
    assert queue("schedule", "add", "nightly", "--cron", "0 3 * * *", "--catalog", file).code == 0
    assert "newer" not in queue("schedule", "list").out


def test_a_schedule_is_set_to_no_other_catalog_than_its_own(queue: Queue, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("name: mine\nentries:\n- {repo: a/b, to: c/d}\n")
    assert queue("schedule", "add", "nightly", "--cron", "0 3 * * *", "--catalog", file).code == 0
    assert queue("schedule", "add", "one", "a/b", "--to", "c/d", "--cron", "0 3 * * *").code == 0
    file.write_text("name: other\nentries:\n- {repo: a/b, to: c/d}\n")
    for name, does in (("nightly", "catalog mine"), ("one", "a request")):
        refused = queue("schedule", "set", name, "--catalog", file)
        assert refused.code == 2
        assert refused.err.startswith(f"error[usage]: schedule {name} submits {does}, but the file is catalog other\n")
    assert queue("schedule", "set", "none", "--catalog", file).code == 10


def test_a_dry_run_of_a_schedule_says_which_models_would_get_a_job_and_queues_nothing(
    reshard: Run, namespace: Namespace, url: str, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        save_single(tmp_path / name, arrays(2, 400))
        content = (tmp_path / name / "model.safetensors").read_bytes()
        namespace.admin.create_repo(namespace.repo(name))
        namespace.admin.put_files(namespace.repo(name), {"model.safetensors": content}, lfs=["model.safetensors"])
    env = {"HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": namespace.token, "RESHARD_BROKER_URL": url}
    file = tmp_path / "c.yaml"
    file.write_text(
        f"name: mine\ndefaults: {{to: '{namespace.name}/{{name}}-cut'}}\nentries:\n"
        + "".join(f"- repo: {namespace.repo(name)}\n" for name in ("one", "two", "none"))
    )
    assert reshard("run", namespace.repo("one"), "--to", namespace.repo("one-cut"), env=env).code == 0
    assert reshard("schedule", "add", "nightly", "--cron", "0 3 * * *", "--catalog", file, env=env).code == 0
    done = reshard("schedule", "next", "nightly", "--dry-run", env=env)
    assert done.code == 0, done.err
    _, *rows = (line.split(maxsplit=1) for line in done.out.splitlines())
    assert dict(rows[:-1]) == {
        "now": "would be submitted",
        "catalog": "mine",
        "models": "3 (1 would be queued)",
        "job": f"{namespace.repo('two')} -> {namespace.repo('two-cut')}",
        "unchanged": "1 model",
    }, "as the last commit of the target says, of which the broker knows nothing"
    assert rows[-1][0] == "invalid" and "source.not_found" in rows[-1][1]
    (facts,) = reshard("schedule", "next", "nightly", "--dry-run", "--json", env=env).documents
    assert (facts["would"]["outcome"], facts["would"]["catalog"]["unchanged"]) == ("fired", 1)
    assert reshard("catalog", "status", env=env).out == "No catalogs\n"
    assert reshard("schedule", "show", "nightly", "--json", env=env).documents[0]["runs"] == []
    assert reshard("list", env=env).out == "No jobs\n"
    assert reshard("schedule", "run", "nightly", env=env).code == 0
    assert (
        "skipped: previous run is still in progress" in reshard("schedule", "next", "nightly", "--dry-run", env=env).out
    )
