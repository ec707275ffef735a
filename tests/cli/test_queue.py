"""The commands of the queue, by a real broker and over the API, and once through what `reshard up` starts."""

from __future__ import annotations

import filecmp
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx2
import pytest

from reshard.cli.errors import INTERRUPTED
from reshard.pipeline.errors import HubUnreachable, NoWeights
from reshard.pipeline.planning.model import Plan
from reshard.web.auth import Scope, add_token
from reshard.worker import broker
from reshard.worker.fleet.heartbeat import announce, withdraw
from reshard.worker.queue.jobs import JobStore, without_password
from reshard.worker.queue.scripts import PREFIX, job_key
from reshard.worker.settings import Settings
from tests.cli.conftest import Queue, Run, answered
from tests.support.loaded import HEAVY, breaks, loaded_by
from tests.support.procs import Machine, free_port
from tests.web.conftest import start
from tests.worker.conftest import another, ask, claimed, copying, copying_at, plan, process, receipts
from tests.worker.followers.builders import finish

__all__ = ["plan"]


@pytest.fixture(scope="module")
def api(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What a client sets to ask `reshard web`, which runs before that broker."""
    folder, port = tmp_path_factory.mktemp("api"), free_port()
    token = add_token(folder / "tokens", "ada", Scope.act)
    with Machine(folder, url, RESHARD_ALLOWED_FOLDERS="/") as machine:
        start(machine, folder / "tokens", port)
        yield {"RESHARD_API_URL": f"http://127.0.0.1:{port}", "RESHARD_API_TOKEN": token}


# Seconds: a busy server's clock may go on between two of its own readings in one script.
MOMENT = 0.1


@pytest.fixture(params=["broker", pytest.param("api", marks=pytest.mark.slow)])  # tests/web compares the two
def queue(request: pytest.FixtureRequest, reshard: Run, url: str) -> Queue:
    """``reshard`` with that broker, emptied; commands of jobs ask it, or the API."""
    env = {"RESHARD_BROKER_URL": url} | (request.getfixturevalue("api") if request.param == "api" else {})
    with JobStore.at(url) as store:
        store.redis.flushall()
    return lambda *arguments: reshard(*arguments, env=env)


def test_without_a_broker_a_submission_says_how_to_start_one(reshard: Run) -> None:
    done = reshard("submit", "a/model", "--to", "b/model")
    assert done.code == 10
    error, hint = done.err.splitlines()
    assert error.startswith("error[queue.no_broker]: no broker: RESHARD_BROKER_URL is not set")
    assert "`reshard up`" in hint


def test_a_broker_that_does_not_answer_is_named_without_its_password(reshard: Run) -> None:
    done = reshard("list", env={"RESHARD_BROKER_URL": "redis://:secret@127.0.0.1:1/0"})
    assert done.code == 10
    assert done.err.startswith("error[queue.unavailable]: the broker at redis://127.0.0.1:1/0 is not responding")
    assert "secret" not in done.err


@pytest.mark.parametrize("command", [("list",), ("watch", "abcd"), ("submit", "a/model", "--to", "b/model")])
def test_a_broker_that_wants_another_password_says_so_at_once(reshard: Run, url: str, command: tuple[str, ...]) -> None:
    place = without_password(url)
    done = reshard(*command, env={"RESHARD_BROKER_URL": place.replace("redis://", "redis://:secret@")})
    assert done.code == 10
    error, hint = done.err.splitlines()
    assert error.startswith(f"error[queue.refused]: the broker at {place} denied access: ")
    assert "RESHARD_BROKER_URL" in hint and "secret" not in done.err


def test_a_submission_is_queued_and_says_that_nobody_works(queue: Queue) -> None:
    done = queue("submit", "a/model", "--to", "b/queued")
    assert done.code == 0
    assert done.out.startswith("Queued job ")
    job = done.out.split()[2].removesuffix(":")
    assert f"`reshard watch {job}`" in done.out
    lacking = "no worker or control process is running: start both with `reshard up`"
    assert done.err == f"waiting: {lacking}\n"
    (status,) = queue("status", job, "--json").documents
    assert status["state"] == "queued" and status["waits"] == lacking
    assert status["request"]["source"]["repo"] == "a/model"
    assert queue("status", job[:6]).out.splitlines()[0].split() == ["job", job]


def test_a_submission_of_folders_says_where_they_are_looked_for(queue: Queue, model: Path, tmp_path: Path) -> None:
    said = queue("submit", model, "--to", tmp_path / "out").err
    assert said.startswith(f"warning: {model} and {tmp_path / 'out'} are resolved on the worker, ")
    assert "RESHARD_ALLOWED_FOLDERS" in said and "`reshard run`" in said
    assert "resolved on" not in queue("submit", "a/model", "--to", "b/no-folder").err
    assert queue("submit", model, "--to", "b/quiet", "--quiet").err == ""


def test_a_key_that_no_worker_takes_is_refused_at_once(queue: Queue) -> None:
    for command in (["submit"], ["schedule", "add", "nightly", "--cron", "@daily"]):
        done = queue(*command, "a/model", "--to", "b/signed", "--sign", "./key.pem")
        assert done.code == 4
        assert done.err.startswith("error[access.sign_key_not_allowed]: workers accept keys only by name")
    assert queue("list", "--quiet").out == queue("schedule", "list", "--quiet").out == ""


def test_the_same_submission_again_is_the_same_job(queue: Queue) -> None:
    (first,) = queue("submit", "a/model", "--to", "b/same", "--json").documents
    (again,) = queue("submit", "a/model", "--to", "b/same", "--json").documents
    assert again == first | {"existed": True}
    assert queue("submit", "a/model", "--to", "b/same").out.startswith("Already queued as job ")
    busy = queue("submit", "a/model", "--to", "b/same", "--size", "1MB")
    assert busy.code == 11
    assert busy.err.splitlines()[-2].startswith("error[job.target_busy]: ")


def test_a_watch_ends_with_the_time_since_the_last_retry(queue: Queue, url: str) -> None:
    job = queue("submit", "a/model", "--to", "b/retried", "--quiet").out.strip()
    with JobStore.at(url) as store:
        finish(another(store), job)
        ended = round(store.get(job).since * 1000)
        times = {"created": ended - 7_200_000, "started": ended - 5_000, "since": ended}
        store.redis.hset(f"reshard:job:{job}", mapping=times)
    watched = queue("watch", job).out
    assert watched.startswith("Nothing to do: ") and watched.splitlines()[0].endswith(" (5 s)"), watched


def test_figures_of_events_are_numbers_and_times_are_seconds(queue: Queue, url: str, plan: Plan) -> None:
    with JobStore.at(url) as store:
        store.cancel(copying(store, another(store), plan)[0])
        (job,) = store.recent(limit=1)
    events = [said["event"] for said in queue("watch", job.id, "--json").documents if "event" in said]
    first, finished = (next(e for e in events if e["kind"] == kind) for kind in ("claimed", "finished"))
    assert first["attempt"] == 1 and abs(first["waited"] - (job.started - job.created)) < MOMENT
    assert finished["at"] - first["at"] == pytest.approx(finished["took"], abs=MOMENT)


def test_a_cancelled_job_ends_its_watch_with_its_code_and_can_be_retried(queue: Queue) -> None:
    job = queue("submit", "a/model", "--to", "b/cancelled", "--quiet").out.strip()
    assert queue("cancel", job).out == f"Cancelled job {job} (was queued)\n"
    watched = queue("watch", job)
    assert watched.code == 11
    assert watched.err.splitlines()[-2] == f"error[job.cancelled]: job {job} was cancelled"
    assert queue("cancel", job).out == f"Job {job} was already cancelled\n"
    (again,) = queue("retry", job, "--json").documents
    assert again | {"waits": ""} == {"id": job, "was": "cancelled", "state": "queued", "waits": ""}
    assert queue("status", job, "--quiet").out == "queued\n"


def test_a_retry_tells_the_state_that_the_job_goes_on_in(queue: Queue, url: str, plan: Plan) -> None:
    with JobStore.at(url) as store:
        job, _ = copying(store, another(store), plan)
        store.cancel(job)
    (again,) = queue("retry", job, "--json").documents
    assert (again["was"], again["state"]) == ("cancelled", "copying")


def test_a_retry_may_replace_what_others_changed_by_the_flag_of_a_run(queue: Queue) -> None:
    job = queue("submit", "a/model", "--to", "b/overwritten", "--quiet").out.strip()
    assert queue("cancel", job).code == 0
    assert queue("retry", job, "--overwrite").code == 0
    assert queue("status", job, "--json").documents[0]["request"]["options"]["overwrite"] is True
    assert queue("cancel", job).code == 0


def test_jobs_are_listed_newest_first_and_by_state(queue: Queue) -> None:
    old, new = (queue("submit", "a/model", "--to", f"b/{name}", "-q").out.strip() for name in ("old", "new"))
    queue("cancel", old)
    assert queue("list", "--limit", "2", "-q").out.split() == [new, old]
    assert [job["id"] for job in queue("list", "--state", "cancelled", "--limit", "1", "--json").documents] == [old]
    assert re.search(r"\n[\d,]+ more; use --all to show them\n$", queue("list", "--limit", "1").out)
    assert "more;" not in queue("list", "--all").out
    head, *rows = queue("list", "--all").out.splitlines()
    assert head.split() == ["JOB", "STATE", "SUBMITTED", "TOOK", "SOURCE", "->", "TARGET"]
    assert any(row.startswith(f"{old}  cancelled  ") for row in rows), rows


def test_a_list_and_a_status_tell_the_same_percentage(queue: Queue, url: str, plan: Plan) -> None:
    with JobStore.at(url) as store:
        leases = another(store)
        job, group = copying(store, leases, plan)
        leases.seal(group, receipts(plan, 0)[:1])
        stored = store.get(job).bytes_done
        assert leases.renew(group, stored // 2, progress=True) == "ok"
        seen = store.get(job)
        assert 0 < stored < seen.bytes_done == stored + stored // 2 < seen.bytes
        percent = f"copying {seen.bytes_done * 100 // seen.bytes}% of "
        (row,) = (line for line in queue("list").out.splitlines() if job in line)
        assert percent in row and percent in queue("status", job).out
        store.cancel(job)


def test_a_job_that_waits_says_its_place_and_when_it_begins_or_why_it_does_not(queue: Queue, url: str) -> None:
    with JobStore.at(url) as store:
        alive = [process("here:1", "worker"), process("here:2", "control")]
        for one in alive:
            announce(store.redis, one)
        job = [queue("submit", "a/model", "--to", f"b/{name}", "-q").out.strip() for name in "ab"][1]
        another(store).due()
        assert re.search("^state +queued, 2nd of 2$", queue("status", job).out, re.M), "no rate is known"
        copying_at(store, 1_000_000, mean=600_000_000)
        (said,) = queue("status", job, "--json").documents
        assert (said["place"], said["waiting"], said["waits"]) == (2, 2, None)
        assert 600 <= said["left"] < 700
        for text in (queue("list").out, queue("status", job).out):
            assert re.search(r"queued, 2nd of 2, starts in about 1[01] min", text), text
        for one in alive:
            withdraw(store.redis, one)
        listed = queue("list")
        assert "queued, 2nd of 2  " in listed.out and "no worker or control process is running" in listed.err


def test_a_job_whose_workers_all_died_says_why_it_waits_and_no_end(queue: Queue, url: str, plan: Plan) -> None:
    with JobStore.at(url) as store:
        alive = process("here:1", "worker")
        announce(store.redis, alive)
        leases = another(store)
        job, group = copying(store, leases, plan)
        store.redis.hincrby(job_key(job), "paced_from", -20_000)
        leases.seal(group, receipts(plan, 0)[:1])
        assert re.search(r"copying .*, about \d+ (s|min) left\n", queue("status", job).out)
        again = queue("submit", "them/model", "--to", "us/model").out
        withdraw(store.redis, alive)
        seen, listed = queue("status", job).out, queue("list")
    why = "no worker or control process is running: start both with `reshard up`"
    assert re.search(rf"^waiting +{re.escape(why)}$", seen, re.M) and " left" not in seen, seen
    assert listed.err == f"waiting: {why}\n"
    assert again.startswith(f"Already copying as job {job}: ")


def test_a_list_says_once_why_bulk_jobs_wait_and_a_job_at_work_when_it_has_copied_all(
    queue: Queue, url: str, plan: Plan
) -> None:
    with JobStore.at(url) as store:
        for one in (process("here:1", "worker"), process("here:2", "control")):
            announce(store.redis, one)
        leases = another(store)
        job, group = copying(store, leases, plan)
        hours = [f"{(datetime.now(UTC).hour + later) % 24:02}:00" for later in (2, 3)]
        assert queue("fleet", "limit", "--window", "-".join(hours), "--tz", "UTC").code == 0
        for name in "ab":
            queue("submit", "a/model", "--to", f"b/{name}", "--priority", "bulk")
        store.redis.hincrby(job_key(job), "paced_from", -20_000)
        leases.seal(group, receipts(plan, 0)[:1])
        listed = queue("list")
        assert len(re.findall("bulk jobs are on hold until .*: outside allowed hours", listed.err)) == 1
        assert re.search(rf"{job}  copying \d+% of [^ ]+ kB, about \d+ (s|min) left  ", listed.out), listed.out
        assert re.search(r"copying .*, about \d+ (s|min) left\n", queue("status", job).out)


def test_jobs_that_ended_are_deleted_by_id_and_others_refused_with_all_beside_them(queue: Queue) -> None:
    ended, running = (queue("submit", "a/model", "--to", f"b/{name}", "-q").out.strip() for name in ("gone", "stays"))
    assert queue("cancel", ended).code == 0
    refused = queue("delete", ended, running)
    assert refused.code == 11
    assert refused.err.splitlines() == [
        f"error[job.under_way]: job {running} is queued: only a job that has ended can be deleted",
        f"hint: run `reshard cancel {running}` first, or wait for it with `reshard watch {running}`",
    ]
    assert queue("status", ended, "-q").out == "cancelled\n"
    assert queue("delete", ended[:8], ended).out == f"Deleted 1 job: {ended}\n"
    for command in (["status"], ["retry"], ["rollback"], ["watch"], ["delete"]):
        assert queue(*command, ended).err.splitlines()[0] == f"error[job.not_found]: job not found: {ended}"
    assert ended not in queue("list", "--all", "-q").out
    (again,) = queue("submit", "a/model", "--to", "b/gone", "--json").documents
    assert not again["existed"] and again["id"] != ended
    assert queue("cancel", again["id"]).code == queue("cancel", running).code == 0


def test_jobs_are_deleted_by_state_and_age_once_a_trial_has_shown_which(queue: Queue, url: str) -> None:
    queue("delete", "--older-than", "0d", "--yes")
    old, new, running = (queue("submit", "a/model", "--to", f"b/{n}", "-q").out.strip() for n in ("old", "new", "runs"))
    for job in (old, new):
        queue("cancel", job)
    with JobStore.at(url) as store:
        store.redis.zincrby(f"{PREFIX}jobs:cancelled", -8 * 86_400_000, old)
    chosen = ("delete", "--state", "cancelled", "--older-than", "7d")
    assert queue(*chosen, "--dry-run").out == f"Would delete 1 job: {old}\n"
    assert queue("delete", "--state", "failed", "--json", "--yes").documents == [
        {"deleted": 0, "dry_run": False, "ids": [], "kept": []}
    ]
    with JobStore.at(url) as store:
        store.redis.zadd(f"{PREFIX}jobs:cancelled", {"gone": 0})  # as one that another deletes just then
        refused = queue(*chosen).err.splitlines()[0]
        assert refused == "error[usage]: 2 jobs would be deleted; confirm with --yes, or preview with --dry-run"
        assert queue(*chosen, "-qy").out == f"{old}\n"
        store.redis.zadd(f"{PREFIX}jobs:cancelled", {"gone": 0})
    assert queue(*chosen, "--yes").out == "Deleted 0 jobs\n"
    assert queue("delete", "--state", "cancelled", "--state", "done", "--yes", "--json").documents == [
        {"deleted": 1, "dry_run": False, "ids": [new], "kept": []}
    ]
    assert queue("status", running, "-q").out == "queued\n"
    assert queue("cancel", running).code == 0


TWO_WAYS = "JOB IDs, filters and --all cannot be used together"


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("delete", "pass JOB IDs, select jobs with --state, --source or another filter, or use --all"),
        ("cancel abc --all", TWO_WAYS),
        ("retry abc --state failed", TWO_WAYS),
        ("delete --all --older-than 1h", TWO_WAYS),
        ("delete --state copying", "--state copying: these jobs have not ended; run `reshard cancel` first"),
        ("cancel --state done", "--state done: these jobs have ended, or their commit is in progress"),
        ("retry --state done", "--state done: these jobs cannot be retried"),
        ("retry abc def --watch", "--watch requires exactly one job"),
        ("delete --older-than 0d", "--older-than 0d: invalid duration; use a value such as 30min, 12h, 7d or 4w"),
        ("delete --older-than 6m", "--older-than 6m: invalid duration; use a value such as 30min, 12h, 7d or 4w"),
    ],
)
def test_what_cannot_be_done_to_jobs_is_said_before_anything_is(queue: Queue, words: str, what: str) -> None:
    done = queue(*words.split())
    assert (done.code, done.err.splitlines()[0]) == (2, f"error[usage]: {what}")


def test_many_jobs_are_cancelled_and_retried_at_once_once_a_trial_has_shown_which(queue: Queue) -> None:
    one, two, other = (queue("submit", "a/model", "--to", f"b/{n}", "-q").out.strip() for n in ("m-1", "m-2", "x"))
    chosen = ("--target", "b/m-*")
    assert {*queue("cancel", *chosen, "--dry-run", "-q").out.split()} == {one, two}
    refused = queue("cancel", *chosen)
    assert (refused.code, refused.err.splitlines()[0]) == (
        2, "error[usage]: 2 jobs would be cancelled; confirm with --yes, or preview with --dry-run",
    )  # fmt: skip
    assert queue("status", one, "-q").out == "queued\n"
    (done,) = queue("cancel", *chosen, "--yes", "--json").documents
    assert {*done["ids"]} == {one, two} and (done["dry_run"], done["refused"]) == (False, [])
    assert queue("status", other, "-q").out == "queued\n"

    tried = queue("retry", one, other, two, "--dry-run")
    assert tried.code == 11 and tried.out == f"Would retry 2 jobs: {one}, {two}\n"
    assert tried.err.startswith(f"job {other}: job {other} is queued: only cancelled, ")
    mixed = queue("retry", one, other, two)
    assert mixed.code == 11 and mixed.out == f"Retried 2 jobs: {one}, {two}\n"
    assert mixed.err.splitlines()[0] == f"job {other}: job {other} is queued: it has not ended"
    assert queue("cancel", "--all", "-y").out.startswith("Cancelled 3 jobs: ")
    assert queue("retry", "--all", "-yq").out.split() != []
    assert queue("list", "--state", "queued", "-q").out.count("\n") == 3


def test_of_several_runs_of_one_request_a_filter_retries_the_last(queue: Queue, url: str) -> None:
    runs, kept = list[str](), ("retry", "--state", "cancelled", "--json")
    for _ in range(3):
        runs += queue("submit", "a/model", "--to", "b/nightly", "-q").out.split()
        queue("cancel", runs[-1])
        time.sleep(0.01)  # or two end in one millisecond
    other = queue("submit", "a/other", "--to", "b/other", "-q").out.strip()
    queue("cancel", other)
    assert {*queue(*kept, "--dry-run").documents[0]["ids"]} == {runs[-1], other}
    done = queue(*kept, "--yes")
    assert done.code == 0 and {*done.documents[0]["ids"]} == {runs[-1], other}
    again = queue(*kept, "--yes")
    assert again.code == 0 and again.documents[0]["ids"] == []
    busy = queue("retry", runs[0])
    assert busy.code == 11 and busy.err.startswith(f"error[job.target_busy]: job {runs[-1]} is already writing to ")
    assert "request" not in busy.err


@pytest.mark.parametrize(("answer", "code"), [(b"n\n", INTERRUPTED), (b"y\n", 0)])
def test_on_a_terminal_a_question_counts_the_jobs_that_are_chosen(
    queue: Queue, url: str, answer: bytes, code: int
) -> None:
    for name in "ab":
        queue("submit", "a/model", "--to", f"b/{name}")
    command = [Path(sys.executable).parent / "reshard", "cancel", "--all"]
    env = os.environ | {"RESHARD_BROKER_URL": url}
    returned, seen, out = answered(command, env, b"Cancel 2 jobs? [y/N]", answer)
    assert returned == code, seen
    assert out.startswith(b"Cancelled 2 jobs: ") is (code == 0)
    assert queue("list", "--state", "queued", "-q").out.count("\n") == (0 if code == 0 else 2)


def test_the_last_while_is_that_of_the_list_also_where_something_is_done(queue: Queue, url: str) -> None:
    old, new = (queue("submit", "a/model", "--to", f"b/{name}", "-q").out.strip() for name in ("old", "new"))
    with JobStore.at(url) as store:
        store.redis.hincrby(job_key(old), "created", -7_200_000)
        store.redis.zincrby(f"{PREFIX}jobs", -7_200_000, old)
    assert queue("list", "--since", "1h", "-q").out.split() == [new]
    assert queue("cancel", "--since", "1h", "-yq").out.split() == [new]
    assert queue("delete", "0000000000").code == queue("delete", new, "0000000000").code == 11
    assert queue("delete", "--since", "1h", "-yq").out.split() == [new]


def test_jobs_are_listed_by_what_their_records_say(queue: Queue, url: str) -> None:
    with JobStore.at(url) as store:
        leases = another(store)
        requests = {
            "mine": ask("m-1").model_copy(update={"asked_by": "ada"}),
            "night": ask("m-2").model_copy(update={"asked_by": "catalog night"}),
            "bad": ask("x").model_copy(update={"asked_by": "bob"}),
        }
        ids = {name: store.submit(request).id for name, request in requests.items()}
        leases.fail(claimed(leases, ids["bad"], "plan"), NoWeights(place="them/m", found="").to_dict())
        store.redis.zincrby(f"{PREFIX}jobs", -7_200_000, ids["mine"])
    for words, names in {
        "--target us/m-*": {"mine", "night"},
        "--source them/*": {"mine", "night", "bad"},
        "--source you/*": set(),
        "--by ada": {"mine"},
        "--catalog night": {"night"},
        f"--code {NoWeights.code}": {"bad"},
        "--state queued --by bob": set(),
        "--since 1h": {"night", "bad"},
        "--target us/* --catalog night --state queued": {"night"},
    }.items():
        assert {*queue("list", "-q", *words.split()).out.split()} == {ids[name] for name in names}, words
    assert "More jobs match; use --all to show them" in queue("list", "--target", "us/*", "--limit", "2").out
    assert queue("list", "--by", "x" * 501).code == 2


def test_the_code_of_an_error_that_a_job_got_over_selects_it_only_until_its_end(queue: Queue, url: str) -> None:
    error = HubUnreachable(endpoint="http://hub", what="it is away")
    with JobStore.at(url) as store:
        leases, job = another(store), store.submit(ask("retried")).id
        leases.again(claimed(leases, job, "plan"), error.to_dict(), 0)
        assert queue("list", "-q", "--code", error.code).out.split() == [job]
        finish(leases, job)
    assert queue("list", "-q", "--code", error.code).out == ""
    assert queue("delete", "--code", error.code, "--yes", "-q").out == ""


def test_a_job_that_a_catalog_has_not_noted_yet_is_kept(queue: Queue, url: str, tmp_path: Path) -> None:
    """No control runs here, so its end is never noted."""
    job = queue("submit", "a/model", "--to", "b/of-a-catalog", "-q").out.strip()
    queue("cancel", job)
    with JobStore.at(url) as store:
        store.redis.sadd(f"{PREFIX}catalogs", "night")
        store.redis.hset(f"{PREFIX}catalog:night:active", "0", job)
    why = "the control process has recorded the result in the catalog"
    refused = queue("delete", job)
    assert (refused.code, refused.err.splitlines()[0]) == (
        11, f"error[job.state]: job {job} is cancelled: it cannot be deleted until {why}",
    )  # fmt: skip
    assert queue("delete", "--state", "cancelled", "--yes").out.splitlines()[-1] == f"Kept 1 job until {why}: {job}"
    with JobStore.at(url) as store:
        store.redis.delete(f"{PREFIX}catalog:night:active", f"{PREFIX}catalogs")
    assert queue("delete", job, "-q").out == f"{job}\n"


@pytest.mark.parametrize(("job", "shown"), [("nobody", "nobody"), ("", "''")])
def test_a_job_that_nobody_knows_is_one_line(queue: Queue, job: str, shown: str) -> None:
    done = queue("watch", job)
    assert done.code == 11
    assert done.err.splitlines()[0] == f"error[job.not_found]: job not found: {shown}"


def test_the_service_is_shown_with_who_is_missing(queue: Queue, url: str) -> None:
    (facts,) = queue("status", "--json").documents
    assert facts["processes"] == []
    assert facts["broker"] == without_password(url)
    assert "not running" in queue("status").out


def test_a_submission_loads_nothing_heavy(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARD_BROKER_URL", url)
    modules = loaded_by("submit", "a/model", "--to", "b/light", "--quiet")
    assert "redis" in modules
    assert not breaks(modules, HEAVY)


def test_a_report_is_of_one_job_and_says_what_is_not_checked_yet(queue: Queue) -> None:
    assert queue("status", "--report").code == 2
    (job,) = queue("submit", "a/model", "--to", "b/reported", "--quiet").out.split()
    (report,) = queue("status", job, "--report", "--json").documents
    empty = {"checks": [], "attested": {}, "error": None}
    assert report == {"id": job, "state": "queued", "result": "unfinished", **empty}


@pytest.mark.slow
def test_up_submit_and_down_do_what_run_does(reshard: Run, model: Path, tmp_path: Path) -> None:
    homes = {
        "RESHARD_DATA_DIR": "",
        "XDG_DATA_HOME": str(tmp_path / "share"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    home = os.path.commonpath([model, tmp_path])  # whose folders jobs may use
    env = {"HOME": home} | homes
    assert reshard("run", model, "--to", tmp_path / "by-run", "--size", "3300B").code == 0
    try:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            env["RESHARD_WEB_PORT"] = str(taken.getsockname()[1])
            (service,) = reshard("up", "--json", "--log-format", "json", env=env).documents
            refused = reshard("web", env=env)
        assert service["started"] == ["broker", "control", "worker"]
        own, lacking, without = service["notes"]
        assert own == f"jobs can access these folders: {home} (set RESHARD_ALLOWED_FOLDERS to change this)"
        assert lacking.startswith("the worker has no token")
        said = f"RESHARD_WEB_PORT={env['RESHARD_WEB_PORT']}: cannot listen on 127.0.0.1: Address already in use"
        assert without == f"the web page was not started: {said}" and service["page"] is None
        assert refused.code == 2 and refused.err.splitlines()[-2] == f"error[usage.setting]: {said}"

        again = reshard("up", "--json", "--log-format", "json", env=env).documents[0]
        assert (again["started"], again["found"]) == (["web"], ["broker", "control", "worker"])
        (kept,) = again["notes"]
        assert kept.startswith("control and worker were already running and keep their environment; ")
        assert again["sign_in"].startswith(f"{again['page']}/sign-in?once=")
        with httpx2.Client(follow_redirects=True) as browser:
            assert browser.get(again["sign_in"]).url.path == "/", "nobody types a token"
        token = reshard("token", "ada", "--quiet", env=env).out.strip()
        third = reshard("up", "--json", env=env | {"RESHARD_WEB_PORT": ""}).documents[0]
        assert third["started"] == [] and third["page"] == f"http://127.0.0.1:{env['RESHARD_WEB_PORT']}"
        (kept,) = third["notes"]
        assert kept.startswith("control, worker and web were already running and keep their environment; ")
        asked = {"source": str(model), "target": str(tmp_path / "by-page")}
        sent = httpx2.post(
            f"{third['page']}/api/v1/plan", json=asked, headers={"Authorization": f"Bearer {token}"}
        ).json()
        assert sent["error"]["code"].startswith("access."), "those who have a token of the page may not use them"
        seen = httpx2.get(f"{third['page']}/api/v1/service", headers={"Authorization": f"Bearer {token}"}).json()
        assert {process["kind"] for process in seen["processes"]} == {"worker", "control"}
        (Path(third["data_dir"]) / "web-tokens").write_text("ada read\n")
        *_, unread = reshard("up", "--json", env=env).documents[0]["notes"]
        assert unread.startswith("no one can sign in to the web page: RESHARD_WEB_TOKENS=")

        done = reshard("submit", model, "--to", tmp_path / "by-queue", "--size", "3300B", "--watch", env=env)
        assert done.code == 0, done.err
        assert re.search(r"^weights +1 file \(.* kB\) -> 4 files ", done.err, re.M)
        assert "source        1 file, no upstream hash" in done.out
        job = done.out.split()[2].removesuffix(":")
        events = reshard("watch", job, "--json", env=env).documents
        assert events[-1]["state"] == "done"
        *_, by_run = reshard("run", model, "--to", tmp_path / "by-run-again", "--size", "3300B", "--json").documents
        assert by_run.keys() <= events[-1].keys()
        assert {check["name"] for check in by_run["checks"]} == {check["name"] for check in events[-1]["checks"]}
        assert by_run["moved"].items() <= events[-1]["moved"].items() and events[-1]["seconds"] > 0
        assert events[-1]["source_bytes"] == {"as delivered": ["model.safetensors"]}

        (report,) = reshard("status", job, "--report", "--json", env=env).documents
        assert report["result"] == "passed"
        assert report["attested"] == {"as delivered": 1}
        assert "source files  1 file, no upstream hash" in reshard("status", job, env=env).out
        assert [check["name"] for check in report["checks"]] == ["structure", "reload model", "copy", "read back"]
        assert report["checks"][-1]["figures"]["shards"] == 4
        assert reshard("status", job, "--report", env=env).out.splitlines()[-1] == f"Job {job} (done): passed"

        with JobStore.at(broker.broker_url(Settings(data_dir=Path(third["data_dir"])))) as store:
            (worker,) = (process for process in store.processes() if process.kind == "worker")
            os.kill(worker.pid, signal.SIGSTOP)
            store.redis.delete(f"{PREFIX}process:{worker.name}")  # as after twenty seconds
        says = f"{worker.name} is stopped: resume it with `kill -CONT {worker.pid}` or replace it with"
        says += " `reshard up --restart`"
        seen = reshard("status", "--json", env=env).documents[0]
        assert seen["waits"] == f"no worker is working: {says}"
        assert [(one["pid"], one["why"], one["says"]) for one in seen["silent"]] == [(worker.pid, "stopped", says)]
        assert says in reshard("status", env=env).out and says in reshard("doctor", env=env).out
        found = reshard("up", "--json", env=env).documents[0]
        assert found["started"] == [] and found["notes"][0] == says
        again = reshard("up", "--restart", "--json", "--log-format", "json", env=env).documents[0]
        assert again["started"] == ["worker"]
        assert reshard("status", "--json", env=env).documents[0]["silent"] == []

        outside = reshard("submit", model, "--to", "/nowhere", "--watch", env=env)
        assert outside.code == 4
        assert outside.err.splitlines()[-2].startswith("error[access.folder_not_allowed]: /nowhere ")
    finally:
        stopped = reshard("down", "--json", env=env).documents[0]["stopped"]
    assert sorted(stopped) == ["broker", "control", "web", "worker"]
    logs = Path(service["log_dir"])
    assert logs == tmp_path / "state" / "reshard" / "logs"
    assert sorted(path.name for path in logs.iterdir()) == ["broker.log", "control.log", "web.log", "worker.log"]
    assert not list((tmp_path / "share").rglob("*.log"))
    said = [json.loads(line) for name in ("control", "worker", "web") for line in (logs / f"{name}.log").open()]
    assert [(line["event"], line["state"]) for line in said if line.get("event") == "ended"] == [
        ("ended", "done"),
        ("ended", "failed"),
    ]
    assert not [line for line in said if "traceback" in line or "Traceback" in line["message"]]
    made = [str(p.relative_to(tmp_path / "by-run")) for p in (tmp_path / "by-run").rglob("*") if p.is_file()]
    made = [path for path in made if not path.startswith(".reshard/")]
    assert len(made) > 5
    same, other, missing = filecmp.cmpfiles(tmp_path / "by-run", tmp_path / "by-queue", made, shallow=False)
    assert (sorted(same), other, missing) == (sorted(made), [], [])


def test_a_name_that_is_mistyped_among_others_deletes_none(queue: Queue, url: str) -> None:
    with JobStore.at(url) as store:
        job = store.submit(ask("m")).id
        store.cancel(job)
        done = queue("delete", job, "no-such-job")
        assert done.code == 11 and "job.not_found" in done.err, done.err
        assert store.get(job).state == "cancelled"
