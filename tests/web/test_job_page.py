"""A job's page and what the API says of its files and its log: how far each file is, and what stays after the end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from markupsafe import escape

from reshard.pipeline.errors import NoWeights
from reshard.pipeline.limits import OUTLINE_FILES
from reshard.pipeline.planning.model import Plan
from reshard.pipeline.request import Request
from reshard.worker.fleet.heartbeat import announce
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Leases
from reshard.worker.queue.scripts import job_key
from tests.web.conftest import OURS, Site, client_of
from tests.worker.conftest import Wakes, age, ask, claimed, copied, copying, plan, process, receipts
from tests.worker.followers.builders import fail

__all__ = ["plan"]

SCRIPT = "<script>alert(1)</script>"
GLOBS = [SCRIPT, "a --prune b", "`reshard retry 0123456789`", "run the same command again"]
CHECK = {
    "name": "structure", "result": "passed", "level": "names", "reason": "", "figures": {}, "findings": [],
}  # fmt: skip
PUBLISHED = {"commit": "c" * 40, "ref": "main", "found": False, "source": "s", "attested": {}, "checks": [CHECK]}


@pytest.fixture
def leases(store: JobStore) -> Leases:
    return Leases(store, Wakes(), "worker-a")


@pytest.fixture
def browser(site: Site) -> Iterator[httpx2.Client]:
    """It has nothing but the cookie."""
    with client_of(site.url, follow_redirects=True, headers=OURS) as client:
        client.post("/sign-in", data={"token": site.tokens["read"]})
        yield client


def seen(browser: httpx2.Client, job: str) -> str:
    answer = browser.get(f"/jobs/{job}")
    assert answer.status_code == 200
    return answer.text


def done(store: JobStore, leases: Leases, plan: Plan) -> str:
    """A job that was published and confirmed."""
    job = copied(store, leases, plan)
    publish = claimed(leases, job, "publish")
    assert leases.log(publish, [line("published")]) == "ok"
    assert leases.begin(publish) == leases.done(publish, PUBLISHED) == "ok"
    assert leases.done(claimed(leases, job, "confirm"), [CHECK | {"name": "read back"}]) == "ok"
    return job


def an_hour_later(store: JobStore, job: str) -> None:
    """What a job that is done loses by then is gone: each part that is not kept as long as the job."""
    for key in store.redis.scan_iter(job_key(job, "*")):
        if store.redis.ttl(key) > 0:
            store.redis.delete(key)


def line(text: str, **more: Any) -> str:
    return json.dumps({"at": 1.5, "level": "INFO", "unit": "check", "worker": "w", "text": text} | more)


def files(site: Site, job: str) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = site.get(f"/api/v1/jobs/{job}/files")["files"]
    return found


def bars(page: str) -> list[tuple[int, int]]:
    """Of each file of a page, how much of how much."""
    table = page.partition('id="files"')[2].partition("</section>")[0]
    return [(int(done), int(size)) for size, done in re.findall(r'<progress max="(\d+)" value="(\d+)"', table)]


def test_each_file_has_a_bar_and_the_one_at_hand_its_rate_and_the_time_that_is_left(
    site: Site, store: JobStore, leases: Leases, plan: Plan, browser: httpx2.Client
) -> None:
    announce(store.redis, process("here:1"))
    job, lease = copying(store, leases, plan)
    first, second = (plan.shards[number] for number in plan.groups[0].shards[:2])
    assert bars(seen(browser, job)) == [(0, shard.size) for shard in plan.shards]
    store.redis.hincrby(job_key(job, "units"), f"{lease.unit}.paced_from", -20_000)
    store.redis.hincrby(job_key(job), "paced_from", -20_000)
    half = second.size // 2
    assert leases.renew(lease, first.size + half, progress=True) == "ok"
    full, at_hand, *others = files(site, job)
    assert (full["state"], full["done"], full["rate"]) == ("copying", first.size, None)
    assert (at_hand["state"], at_hand["done"], at_hand["unit"]) == ("copying", half, lease.unit)
    assert at_hand["rate"] == pytest.approx((first.size + half) / 20, rel=0.1)
    assert at_hand["left"] == pytest.approx((second.size - half) / at_hand["rate"])
    assert {other["state"] for other in others} == {"waiting"} and {other["left"] for other in others} == {None}
    page = seen(browser, job)
    assert bars(page)[:3] == [(first.size, first.size), (half, second.size), (0, plan.shards[2].size)]
    rate, left = r"\d+ bytes/s|\d+\.\d kB/s", r"<time datetime=\S+ title=\"[^\"]+\" data-left>about \d+ s left</time>"
    table, head = page.partition('id="files"')[2].partition("</section>")[0], page.partition("</section>")[0]
    for part in (table, head):
        assert len(re.findall(rate, part)) == len(re.findall(left, part)) == 1
    assert leases.seal(lease, receipts(plan, 0)) == "ok"
    assert [one["state"] for one in files(site, job)][:2] == ["sealed", "sealed"]


def test_a_copy_that_would_take_thousands_of_years_is_told_no_time(
    site: Site, store: JobStore, leases: Leases, plan: Plan, browser: httpx2.Client
) -> None:
    announce(store.redis, process("here:1"))
    job, lease = copying(store, leases, plan)
    for key, of in ((job_key(job, "units"), f"{lease.unit}."), (job_key(job), "")):
        store.redis.hincrby(key, f"{of}paced_from", -20_000)
    assert leases.renew(lease, 1, progress=True) == "ok"
    for key, of in ((job_key(job, "units"), f"{lease.unit}."), (job_key(job), "")):
        store.redis.hset(key, f"{of}paced", "1e-9")
    first, *_ = files(site, job)
    assert first["rate"] and first["left"] is None
    assert "data-left" not in seen(browser, job)


def test_a_unit_that_another_worker_takes_over_has_a_rate_of_its_own(
    store: JobStore, leases: Leases, plan: Plan
) -> None:
    job, lease = copying(store, leases, plan)
    store.redis.hincrby(job_key(job, "units"), f"{lease.unit}.paced_from", -20_000)
    assert leases.renew(lease, 1000, progress=True) == "ok"
    (rate,) = (claim.rate for claim in store.get(job).claims if claim.unit == lease.unit)
    assert rate == pytest.approx(1000 / 20, rel=0.1)
    age(store, job, 3600)
    while (taken_over := leases.claim(job)) and taken_over.unit != lease.unit:
        pass
    assert [claim.rate for claim in store.get(job).claims if claim.unit == lease.unit] == [None]
    assert taken_over and leases.seal(taken_over, receipts(plan, 0)) == leases.done(taken_over, [[], []]) == "ok"
    kept = {name.decode() for name in store.redis.hkeys(job_key(job, "units"))}
    assert not [name for name in kept if name.startswith(f"{lease.unit}.paced")], "what is done needs none"


def test_when_it_was_submitted_is_a_time_that_is_read_without_a_script(store: JobStore, browser: httpx2.Client) -> None:
    job = store.submit(ask()).id
    submitted = r'<dt>Submitted</dt><dd><time datetime="\S+Z" title="[^"]+ UTC">\d+ s ago</time>'
    assert re.search(submitted, seen(browser, job))


def test_its_options_stay_as_long_as_the_job(store: JobStore, browser: httpx2.Client) -> None:
    asked = Request.of(
        "them/m", "us/m", size="1GB", branch="cut", ranks="ep8", prune=True, include=GLOBS, manifest=False
    )
    page = seen(browser, store.submit(asked).id)
    assert (
        f"<dt>Options</dt><dd>“Ranks” ep8, “Include” {escape(', '.join(GLOBS))}, “Prune”, “Manifest” off</dd>" in page
    )
    assert "<dt>Options</dt>" not in seen(browser, store.submit(Request.of("them/m", "us/n", size="1GB")).id)


def test_files_and_checks_stay_as_long_as_the_job_and_what_is_gone_says_so(
    site: Site, store: JobStore, leases: Leases, plan: Plan, browser: httpx2.Client
) -> None:
    job = done(store, leases, plan)
    an_hour_later(store, job)
    page = seen(browser, job)
    assert bars(page) == [(shard.size, shard.size) for shard in plan.shards]
    assert all(shard.path in page for shard in plan.shards)
    assert [one["tensors"] for one in files(site, job)] == [len(shard.entries) for shard in plan.shards]
    assert {one["state"] for one in files(site, job)} == {"sealed"}
    assert "<b>structure</b>" in page and "<b>read back</b>" in page
    assert "<path" not in page and "The diagram of this plan is no longer available" in page
    assert "The log is no longer available" in page
    assert "The events are no longer available" in page
    with site.client("read") as client:
        assert "its plan is no longer stored" in client.get(f"/api/v1/jobs/{job}/plan").text
    store.delete([job])
    assert store.redis.keys(job_key(job) + "*") == []


def test_of_thousands_of_files_the_first_stay_and_the_rest_is_counted(
    site: Site, store: JobStore, leases: Leases, plan: Plan, browser: httpx2.Client
) -> None:
    many = OUTLINE_FILES + 7
    shards = tuple(replace(plan.shards[0], path=f"model-{n:05d}.safetensors", digest=f"{n:064d}") for n in range(many))
    job = done(store, leases, replace(plan, shards=shards))
    an_hour_later(store, job)
    found = site.get(f"/api/v1/jobs/{job}/files")
    assert (len(found["files"]), found["more"]) == (OUTLINE_FILES, 7)
    assert len(bars(seen(browser, job))) == OUTLINE_FILES and "<p>7 more.</p>" in seen(browser, job)


def test_a_job_that_has_ended_neither_waits_nor_is_retried(
    store: JobStore, leases: Leases, browser: httpx2.Client
) -> None:
    job = store.submit(ask()).id
    leases.again(claimed(leases, job, "plan"), NoWeights(place="them/m", found="").to_dict(), 60)
    store.redis.hset(job_key(job), "note", "its place is full")
    before = seen(browser, job)
    assert "Waiting:" in before and "Retrying after" in before
    store.cancel(job)
    after = seen(browser, job)
    assert "Waiting:" not in after and "Retrying after" not in after


@pytest.mark.parametrize("how", ["failed", "cancelled", "found"])
def test_a_job_that_never_had_a_plan_says_so(
    site: Site, store: JobStore, leases: Leases, browser: httpx2.Client, how: str
) -> None:
    job = store.submit(ask()).id
    if how == "failed":
        fail(leases, job)
    elif how == "cancelled":
        store.cancel(job)
    else:
        assert leases.done(claimed(leases, job, "plan"), PUBLISHED | {"found": True, "checks": []}) == "ok"
    page = seen(browser, job)
    said = {
        "failed": "This job failed before it had a plan.",
        "cancelled": "This job was cancelled before it had a plan.",
        "found": "This job needed no plan: the target was already up to date.",
    }
    assert said[how] in page and "an hour after" not in page and 'id="files"' not in page
    assert "No checks were run." in page and "No log lines." in page
    with site.client("read") as client:
        result = client.get(f"/api/v1/jobs/{job}/report").json()["result"]
    assert result == {"failed": "failed", "cancelled": "unfinished", "found": "passed"}[how]
    assert files(site, job) == []
    with site.client("read") as client:
        assert "it ended before it had a plan" in client.get(f"/api/v1/jobs/{job}/plan").text


def test_a_job_that_failed_lists_what_was_not_copied_and_one_that_is_planned_anew_nothing(
    site: Site, store: JobStore, leases: Leases, plan: Plan, browser: httpx2.Client
) -> None:
    job, lease = copying(store, leases, plan)
    assert leases.seal(lease, receipts(plan, 0)) == "ok"
    assert leases.fail(lease, NoWeights(place="them/m", found="").to_dict()) == "ok"
    page = seen(browser, job)
    number = len(plan.groups[0].shards)
    assert page.count(">stored</span>") == number
    assert page.count(">not copied</span>") == len(plan.shards) - number
    store.retry(job, anew=True)
    store.cancel(job)
    assert "This job was cancelled before it had a plan." in seen(browser, job) and files(site, job) == []


def test_the_log_is_text_the_newest_last_and_as_the_api_has_it(
    site: Site, store: JobStore, leases: Leases, browser: httpx2.Client
) -> None:
    lease = claimed(leases, store.submit(ask()).id, "plan")
    assert "No log lines yet." in seen(browser, lease.job)
    assert leases.log(lease, [line(SCRIPT, level="ERROR"), line("a\x1b[2J\u202eb"), line("last")]) == "ok"
    page = seen(browser, lease.job)
    assert SCRIPT not in page and "&lt;script&gt;" in page and "\x1b" not in page and "\u202e" not in page
    assert page.index("&lt;script&gt;") < page.index("a\\x1b[2J\\u202eb") < page.index("<code>last</code>")
    assert "<b>ERROR</b>" in page and "are gone" not in page
    found = site.get(f"/api/v1/jobs/{lease.job}/log")
    assert [one["text"] for one in found["lines"]][::2] == [SCRIPT, "last"] and found["logged"] == 3
    assert leases.log(lease, [line("more") for _ in range(200)]) == "ok"
    page = seen(browser, lease.job)
    assert page.count("<code>more</code>") == 200 and "<p>3 older lines not shown.</p>" in page
