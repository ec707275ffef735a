"""A queue that workers and clients of two releases share, as while one is upgraded to the other."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest

from reshard.client.operations.catalogs import told
from reshard.client.operations.jobs import shown as document
from reshard.client.operations.schedules import SchedulesQuery, list_schedules
from reshard.client.operations.table import InProcess
from reshard.client.queue import Queue
from reshard.pipeline.errors import DiskFull, NoWeights, ReshardError
from reshard.pipeline.places import Folder, Hub
from reshard.pipeline.planning.codec import decode_head, encode
from reshard.pipeline.planning.model import SCHEMA, Plan, Receipt
from reshard.pipeline.request import Options, Request
from reshard.worker.fleet.heartbeat import announce
from reshard.worker.followers.catalogs import Catalogs
from reshard.worker.followers.cursor import Cursor
from reshard.worker.followers.schedules import ALL, Schedule, Schedules
from reshard.worker.queue.jobs import JobStore, Process
from reshard.worker.queue.leases import Leases
from reshard.worker.queue.scripts import PREFIX, job_key
from reshard.worker.queue.states import JobState
from reshard.worker.settings import HAND_BACK, LEASE
from tests.support.procs import Machine, wait_for
from tests.worker.conftest import SIZE, age, another, ask, claimed, copied, copying, planned, process, receipts
from tests.worker.followers.builders import begin, definition
from tests.worker.sites import Site, site

__all__ = ["site"]

ROOT = Path(__file__).parents[2]
ROOMS = ("pipeline", "worker", "client", "web", "cli")  # the folders of the package


# ------------------------------------------------------------------------------------------------ what is written


def test_a_stored_request_holds_nothing_that_is_the_default(store: JobStore) -> None:
    request = Request(source=Hub(repo="them/m"), target=Folder(path="/out"), options=Options(pack="layers"))
    job = store.submit(request).id
    assert json.loads(store.redis.hget(job_key(job), "request") or "") == {
        "source": {"kind": "hub", "repo": "them/m"},
        "target": {"kind": "folder", "path": "/out"},
        "options": {"pack": "layers"},
    }
    assert store.get(job).request == request


def test_a_stored_plan_holds_no_default_either(plan: Plan) -> None:
    stored = encode(plan).head
    assert json.loads(zlib.decompress(stored))["options"] == {"size": SIZE}
    assert decode_head(stored).options == plan.options


def test_a_receipt_says_nothing_that_an_older_release_does_not_know() -> None:
    receipt = Receipt("s", 8, "a" * 64, None, {"w": "d"})
    assert "hashes" not in receipt.to_json()
    hashed = replace(receipt, hashes={"w": ["b" * 64]})
    assert [Receipt.from_json(one.to_json()) for one in (receipt, hashed)] == [receipt, hashed]


def test_no_default_has_changed() -> None:
    """What is stored without them means the same to every release; give an option that differs a new name."""
    assert Options().model_dump() == {
        "size": 5_000_000_000, "oversize": "own-shard", "pack": "greedy", "dtype": "keep", "strict_dtype": False,
        "ties": "keep", "strip_prefix": None, "rename": (), "config_from": None, "include": (), "exclude": (),
        "branch": None, "pr": False, "visibility": "as-source", "prune": False, "overwrite": False, "lineage": False,
        "manifest": True, "force": False, "require": "any", "transport": "auto", "dequantize": False,
        "experts": "keep", "ranks": "", "align": 8, "sign": None,
        "tensor_hashes": False,
    }  # fmt: skip
    assert Request(source=Hub(repo="a/b"), target=Hub(repo="a/c")).priority == "interactive"


class NewerOptions(Options):
    crop: int = 0


class NewerRequest(Request):
    options: NewerOptions = NewerOptions()


def test_a_request_has_the_same_key_in_a_release_with_one_more_option() -> None:
    """Or every client of the other release would submit, as a second job, what is done already."""
    asked = json.loads(ask().stored())
    assert NewerRequest.model_validate(asked).key() == Request.model_validate(asked).key()
    asked["options"] = {"crop": 1}
    assert NewerRequest.model_validate(asked).key() != ask().key()


# ------------------------------------------------------------------------------------------------- who carries it out

NEWS = {
    "options.crop": {"options": {"crop": 7}},  # an option
    "options.dtype": {"options": {"dtype": "float8"}},  # a choice
    "source": {"source": {"kind": "s3", "url": "s3://bucket/model"}},  # a kind of place
    "urgent": {"urgent": True},
}


def of_a_newer_release(store: JobStore, job: str, news: dict[str, object]) -> None:
    asked = json.loads(store.redis.hget(job_key(job), "request") or "")
    store.redis.hset(job_key(job), "request", json.dumps(asked | news))


@pytest.mark.parametrize("name", NEWS)
def test_what_a_worker_does_not_know_it_leaves_to_a_newer_one(store: JobStore, leases: Leases, name: str) -> None:
    job = store.submit(ask()).id
    known = store.redis.hget(job_key(job), "request") or b""
    of_a_newer_release(store, job, NEWS[name])
    assert leases.due() == 1
    assert leases.claim(job) is None
    seen = store.get(job)
    assert (seen.state, seen.last_error) == (JobState.queued, None)
    assert seen.note is not None and f"it asks for {name}" in seen.note and "worker-a" in seen.note
    assert any(name in note for note in seen.notes)
    assert leases.due() == 0
    age(store, job, HAND_BACK + 0.1)
    assert leases.due() == 1
    store.redis.hset(job_key(job), "request", known)  # as a worker who knows it reads it
    assert claimed(leases, job, "plan").attempts == 1
    assert store.get(job).note is None


def test_a_unit_and_a_state_of_a_newer_release_are_left_to_it(store: JobStore, leases: Leases, plan: Plan) -> None:
    job = planned(store, leases, plan)
    store.redis.zadd(job_key(job, "todo"), {"audit": 0})
    assert leases.claim(job) is None
    assert "audit is unknown to worker-a" in (store.get(job).note or "")
    store.redis.zrem(job_key(job, "todo"), "audit")
    store.redis.hset(job_key(job), "state", "auditing")
    assert leases.claim(job) is None
    assert "its state is unknown to worker-a" in (store.get(job).note or "")


def test_a_plan_of_an_older_release_is_made_anew_once_nobody_works_on_it(
    store: JobStore, leases: Leases, plan: Plan
) -> None:
    job, group = copying(store, leases, plan)
    assert leases.seal(group, receipts(plan, 0)) == "ok"
    newer = another(store, "new-worker", schema=SCHEMA + 1)
    assert newer.claim(job) is None
    assert f"its plan has schema {SCHEMA}" in (store.get(job).note or "")
    age(store, job, LEASE + 1)
    lease = claimed(newer, job, "plan")
    assert store.get(job).state == JobState.planning
    assert leases.done(group, [[], []]) == "lost"
    assert newer.planned(lease, plan) == "ok"
    assert store.get(job).shards_done == len(receipts(plan, 0))


def test_a_plan_that_only_a_newer_release_reads_is_not_shown(store: JobStore, leases: Leases, plan: Plan) -> None:
    job = planned(store, leases, plan)
    assert store.plan(job) is not None
    store.redis.hset(job_key(job), "schema", SCHEMA + 1)
    assert store.plan(job) is None
    store.redis.hset(job_key(job), "schema", SCHEMA)
    of_a_newer_release(store, job, NEWS["options.crop"])
    assert store.plan(job) is None


def test_a_commit_that_an_older_release_began_is_left_to_it(store: JobStore, leases: Leases, plan: Plan) -> None:
    job = copied(store, leases, plan)
    assert leases.begin(claimed(leases, job, "publish")) == "ok"
    age(store, job, LEASE + 1)
    assert another(store, schema=SCHEMA + 1).claim(job) is None
    assert claimed(leases, job, "publish")


def test_a_worker_is_not_waited_for_that_leaves_the_job_to_a_newer_one(store: JobStore, leases: Leases) -> None:
    """Of two live workers the newer one failed the unit for a cause of its machine, and the older cannot do it."""
    for name in ("new:1", "old:2"):
        announce(store.redis, process(name))
    newer, older = another(store, "new:1.10"), another(store, "old:2.20")
    job = store.submit(ask()).id
    known = store.redis.hget(job_key(job), "request") or b""
    disk = DiskFull(path="/", needed=2, free=1).to_dict()
    assert newer.hand_over(claimed(newer, job, "plan"), disk) == "ok"
    assert newer.claim(job) is None
    of_a_newer_release(store, job, NEWS["options.crop"])
    age(store, job, HAND_BACK + 0.1)
    assert older.claim(job) is None
    store.redis.hset(job_key(job), "request", known)  # as a worker who knows it reads it
    age(store, job, HAND_BACK + 0.1)
    lease = claimed(newer, job, "plan")
    assert newer.hand_over(lease, disk) == "alone"
    assert newer.fail(lease, disk) == "ok"
    store.retry(job)
    assert newer.hand_over(claimed(newer, job, "plan"), disk) == "ok", "a retry forgets who left it"
    assert older.hand_over(claimed(older, job, "plan"), disk) == "alone"


@pytest.mark.parametrize("state", ["committing", "confirming"])
def test_a_retry_plans_anew_what_another_release_planned(
    store: JobStore, leases: Leases, plan: Plan, state: str
) -> None:
    job = copied(store, leases, plan)
    lease = claimed(leases, job, "publish")
    assert leases.begin(lease) == "ok"
    if state == "confirming":
        assert leases.done(lease, {"commit": "abc", "ref": "main", "found": False}) == "ok"
        lease = claimed(leases, job, "confirm")
    assert leases.fail(lease, NoWeights(place="them/m", found="").to_dict(), unsure=True) == "ok"
    store.redis.hset(job_key(job), "schema", SCHEMA - 1)
    store.retry(job)
    assert store.get(job).state == JobState.queued
    assert leases.planned(claimed(leases, job, "plan"), plan) == "ok"
    assert store.get(job).shards_done == len(plan.shards), "what was copied stays"


def test_a_retry_keeps_what_only_a_newer_release_knows(store: JobStore, leases: Leases) -> None:
    job = store.submit(ask()).id
    of_a_newer_release(store, job, NEWS["options.crop"])
    store.cancel(job)
    store.retry(job, overwrite=True)
    asked = json.loads(store.redis.hget(job_key(job), "request") or "")
    assert asked["options"] == {"crop": 7, "overwrite": True}


# ------------------------------------------------------------------------------------------------------ who reads it


def test_records_of_a_newer_release_are_shown_as_far_as_they_are_known(store: JobStore) -> None:
    for name, news in NEWS.items():
        of_a_newer_release(store, store.submit(ask(name.partition(".")[2] or name)).id, news)
    (odd, *_) = [job.id for job in store.recent()]
    store.redis.hset(job_key(odd), "state", "auditing")
    error = NoWeights(place="them/m", found="").to_dict() | {"facts": {"of a newer release": 1}}
    store.redis.hset(job_key(odd), "error", json.dumps(error))
    assert {job.request.target.kind for job in store.recent()} == {"hub"}
    seen = store.get(odd)
    assert (seen.state, seen.state.ended, document(seen).state) == (
        "auditing", False, "auditing",
    )  # fmt: skip
    assert "source.no_weights: them/m has no weights" in str(ReshardError.from_dict(seen.error or {}))

    announce(store.redis, Process("w", "worker", "9", "here", 1, 2, 0.0, False))
    key = f"{PREFIX}process:w"
    store.redis.set(key, json.dumps(json.loads(store.redis.get(key) or "") | {"mood": "good"}))
    assert [process.name for process in store.processes()] == ["w"]

    Schedules(store).add(Schedule(name="a", cron="0 3 * * *", request=ask("a")))
    kept = json.loads(store.redis.hget(ALL, "a") or "")
    kept["request"]["options"] = {"crop": 7}
    store.redis.hset(ALL, "a", json.dumps(kept | {"jitter": 60}))
    assert [one.name for one in list_schedules(InProcess(Queue(store), "me"), SchedulesQuery()).schedules] == ["a"]
    begin(Cursor(store), definition(1))
    kept = json.loads(store.redis.hget(f"{PREFIX}catalog:mirror", "definition") or "")
    store.redis.hset(f"{PREFIX}catalog:mirror", "definition", json.dumps(kept | {"shuffle": True}))
    assert told(Catalogs(store).get("mirror")).name == "mirror"


# ------------------------------------------------------------------------------------------------- two real releases


def release(site: Site, folder: Path, code: Path) -> Machine:
    """A machine on the queue of ``site`` that runs what lies in ``code``."""
    environment = {name: value for name, value in site.machine.env.items() if name.startswith(("HF_", "RESHARD_"))}
    paths = f"{code}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return Machine(folder, site.broker.url, **(environment | {"PYTHONPATH": paths}))


@pytest.fixture
def newer(site: Site, tmp_path: Path) -> Iterator[Machine]:
    """A machine with a release that has one more option, and another form of plans."""
    folder = tmp_path / "newer" / "reshard"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    for room in ROOMS:
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))
    for path, old, new in (
        (
            "request.py",
            "    force: bool",
            '    crop: int | None = _option(None, "Crop.")\n    force: bool',
        ),
        ("planning/model.py", f"\nSCHEMA = {SCHEMA}\n", f"\nSCHEMA = {SCHEMA + 1}\n"),
    ):
        text = (folder / "pipeline" / path).read_text()
        assert old in text
        (folder / "pipeline" / path).write_text(text.replace(old, new, 1))
    with release(site, tmp_path / "b", folder.parent) as machine:
        yield machine


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True).stdout


def last_two_tags() -> list[str]:
    """The last two releases of this repository, the older one first; fewer where there are fewer, as in an sdist."""
    if not (ROOT / ".git").exists():
        return []
    return git("tag", "--list", "v*", "--sort=version:refname").decode().split()[-2:]


@pytest.fixture
def releases(site: Site, tmp_path: Path, newer: Machine) -> Iterator[tuple[Machine, Machine]]:
    """Machines of the last two tags, or of this code and a changed copy of it, until there are two."""
    tags = last_two_tags()
    if len(tags) < 2:
        yield site.machine, newer
        return
    with ExitStack() as stack:
        machines = []
        for tag in tags:
            folder = tmp_path / tag / "reshard"
            folder.mkdir(parents=True)
            # An empty file makes it a package; a release that has its own brings it.
            (folder / "__init__.py").touch()
            there = set(git("ls-tree", "--name-only", tag).decode().split())
            archive = git("archive", "--format=tar", tag, *(name for name in (*ROOMS, "__init__.py") if name in there))
            with tarfile.open(fileobj=BytesIO(archive)) as tar:
                tar.extractall(folder, filter="data")
            machine = release(site, tmp_path / f"{tag}-machine", folder.parent)
            machines.append(stack.enter_context(machine))
            where = machine.run_python("import reshard.pipeline; print(reshard.pipeline.__file__)")
            assert Path(where).is_relative_to(folder), f"it does not run {tag}"
        yield machines[0], machines[1]


@pytest.mark.slow
def test_a_queue_goes_on_while_it_is_upgraded_from_one_release_to_the_next(
    site: Site, releases: tuple[Machine, Machine]
) -> None:
    """Clients first: what they submit the older workers do; what those began and leave, the newer ones end."""
    older, newer = releases
    worker = older.worker(concurrency=1)
    done = newer.run("submit", site.source, "--to", site.space.repo("plain"), "--size", "200kB", "--quiet")
    assert done.returncode == 0, done.stderr
    site.assert_published_once(done.stdout.strip(), "plain")
    site.slow()
    job = site.submit()
    site.copying(job)
    worker.kill()
    site.space.admin.clear_faults()
    newer.worker(concurrency=1)
    site.assert_published_once(job)
    for machine in releases:
        for command in (["list"], ["status", job]):
            told = machine.run(*command)
            assert (told.returncode, "Traceback" in told.stderr) == (0, False), told.stderr


def shown(site: Site, job: str) -> str:
    """The job as the older release's commands show it."""
    told = ""
    for command in (["list"], ["status", job], ["fleet", "status"]):
        done = site.machine.run(*command)
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
        told += done.stdout
    return told


@pytest.mark.slow
def test_an_older_worker_does_what_it_knows_of_a_newer_client_and_leaves_the_rest_to_a_newer_worker(
    site: Site, newer: Machine
) -> None:
    site.machine.worker(concurrency=1)
    asked = {"plain": [], "out": ["--crop", "3"]}
    jobs = {}
    for name, options in asked.items():
        done = newer.run("submit", site.source, "--to", site.space.repo(name), "--size", "200kB", "--quiet", *options)
        assert done.returncode == 0, done.stderr
        jobs[name] = done.stdout.strip()
    site.assert_published_once(jobs["plain"], "plain")
    wait_for(lambda: "options.crop" in (site.store.get(jobs["out"]).note or ""), "the older worker's word")
    assert "options.crop" in shown(site, jobs["out"])
    assert site.store.get(jobs["out"]).state == JobState.queued
    newer.worker(concurrency=1)
    site.assert_published_once(jobs["out"])
    site.client.xadd(job_key(jobs["out"], "events"), {"kind": "audited", "at": 0, "by": "a newer worker"})
    watched = site.machine.run("watch", jobs["out"])
    assert watched.returncode == 0, watched.stderr


@pytest.mark.slow
@pytest.mark.parametrize("first", ["older", "newer"])
def test_a_job_that_one_release_began_is_ended_by_the_other_or_left_to_its_own(
    site: Site, newer: Machine, first: str
) -> None:
    site.slow()
    worker = (site.machine if first == "older" else newer).worker(concurrency=1)
    job = site.submit()
    site.copying(job)
    worker.kill()
    site.space.admin.clear_faults()
    if first == "newer":
        site.machine.worker(concurrency=1)
        said = f"its plan has schema {SCHEMA + 1}"
        wait_for(lambda: said in (site.store.get(job).note or ""), "the older worker's word")
        assert said in shown(site, job)
    newer.worker(concurrency=1)
    site.assert_published_once(job)
