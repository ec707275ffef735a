"""The pages of a real process: who sees what, that forms act, and that nothing from outside is more than text."""

from __future__ import annotations

import html
import re
from getpass import getuser
from pathlib import Path

import numpy as np
import pytest
from markupsafe import escape
from redis.exceptions import NoPermissionError

from reshard.client.operations.fleet import REASON_MAX
from reshard.client.operations.jobs import CHOSEN_MAX
from reshard.client.operations.table import LISTED
from reshard.client.queue import LINK_LASTS, Queue
from reshard.pipeline.errors import BadBody, BadSetting, NoWeights
from reshard.pipeline.places import Hub, parse_place
from reshard.pipeline.planning.model import Plan
from reshard.pipeline.request import Request
from reshard.pipeline.reshard import draft, run
from reshard.pipeline.stores.connect import Context, open_source, open_target
from reshard.pipeline.stores.pace import RateLimitWindow
from reshard.web.auth import OWN, Scope, Tokens, own_token
from reshard.web.guard import HEADERS
from reshard.web.pages.forms import OPTIONS, Input
from reshard.web.pages.wording import sentence
from reshard.worker.fleet.heartbeat import announce
from reshard.worker.fleet.rate_limit import rate_limiters
from reshard.worker.followers.cursor import Cursor
from reshard.worker.followers.schedules import ALL, Schedule, Schedules
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Leases
from reshard.worker.queue.scripts import job_key
from tests.support.models import save_mixture, save_single
from tests.web.conftest import OURS, Site, client_of, signed_in
from tests.worker.conftest import Wakes, claimed, copying_at, followed, process, receipts, restricted
from tests.worker.followers.builders import begin, definition, fail, finish, jobs

PAGES = ("/", "/jobs", "/plan", "/catalogs", "/schedules", "/usage")
SCRIPT = "<script>alert(1)</script>"


@pytest.fixture
def leases(store: JobStore) -> Leases:
    return Leases(store, Wakes(), "worker-a")


def ask(store: JobStore, name: str = "b/c") -> str:
    return store.submit(Request(source=Hub(repo="a/b"), target=Hub(repo=name), asked_by="ada")).id


@pytest.mark.parametrize("path", PAGES)
def test_who_is_not_known_is_sent_to_the_sign_in(site: Site, store: JobStore, path: str) -> None:
    with site.client(None) as client:
        sent = client.get(path)
        assert sent.status_code == 303 and sent.headers["location"].startswith("/sign-in?next=/")
        assert client.get("/api/v1/jobs").status_code == 401
        assert client.post("/jobs").headers["location"] == "/sign-in"


def test_a_token_becomes_a_cookie_that_no_script_and_no_other_site_has(site: Site) -> None:
    with site.client(None) as client:
        sent = client.post("/sign-in?next=/jobs%3Fstate%3Ddone", data={"token": site.tokens["read"]}, headers=OURS)
        assert sent.status_code == 303 and sent.headers["location"] == "/jobs?state=done"
        assert {"HttpOnly", "SameSite=strict"} <= {part.strip() for part in sent.headers["set-cookie"].split(";")}
        behind_tls = OURS | {"X-Forwarded-Proto": "https"}
        sent = client.post("/sign-in", data={"token": site.tokens["read"]}, headers=behind_tls)
        assert "Secure" in sent.headers["set-cookie"]
    with site.client(None) as client:
        wrong = client.post("/sign-in", data={"token": "rsh_guess"}, headers=OURS)
        assert wrong.status_code == 401 and "set-cookie" not in wrong.headers
        assert client.post("/sign-in", data={"token": site.tokens["read"]}).status_code == 403, "of another site"


@pytest.mark.parametrize("path", ["//evil.example/x", "/\\evil.example", "https://evil.example", "javascript:alert(1)"])
def test_the_sign_in_leads_to_no_other_site(site: Site, path: str) -> None:
    with site.client(None) as client:
        sent = client.post("/sign-in", params={"next": path}, data={"token": site.tokens["read"]}, headers=OURS)
    assert sent.headers["location"] == "/"


def test_signed_out_nobody_is_known(site: Site, store: JobStore) -> None:
    with signed_in(site) as client:
        assert client.post("/sign-out").url.path == "/sign-in"
        assert client.get("/").url.path == "/sign-in"


@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize("scope", ["read", "act"])
def test_every_page_is_there_with_its_headers(site: Site, store: JobStore, path: str, scope: str) -> None:
    with signed_in(site, scope) as client:
        seen = client.get(path)
    assert seen.status_code == 200 and seen.headers["content-type"] == "text/html; charset=utf-8"
    assert {name: seen.headers[name] for name in HEADERS} == HEADERS
    assert " style=" not in seen.text and "<style" not in seen.text and " onclick" not in seen.text
    assert seen.text.count("<script") == seen.text.count('<script src="/static/') == 1
    assert "http://" not in seen.text and "https://" not in seen.text, "nothing from elsewhere"


def test_only_who_may_act_sees_buttons_and_uses_them(site: Site, store: JobStore) -> None:
    job = ask(store)
    with signed_in(site, "read") as client:
        assert f"/jobs/{job}/cancel" not in client.get(f"/jobs/{job}").text
        assert "/fleet/pause" not in client.get("/").text
        for path in (f"/jobs/{job}/cancel", "/jobs", "/plan", "/fleet/pause", "/catalogs", "/schedules/x/run"):
            refused = client.post(path)
            assert refused.status_code == 403 and "access.scope" in refused.text
    with signed_in(site) as client:
        assert f"/jobs/{job}/cancel" in client.get(f"/jobs/{job}").text
        refused = client.post(f"/jobs/{job}/cancel", headers={"Sec-Fetch-Site": "cross-site"})
        assert refused.status_code == 403 and "access.cross_site" in refused.text
        assert store.get(job).state == "queued"
        done = client.post(f"/jobs/{job}/cancel")
        assert done.url.path == f"/jobs/{job}" and store.get(job).state == "cancelled"
        client.post(f"/jobs/{job}/retry", data={"overwrite": "on"})
        assert store.get(job).state == "queued" and store.get(job).request.options.overwrite
        client.post(f"/jobs/{job}/cancel")
        assert client.post(f"/jobs/{job}/delete").url.path == "/jobs"
        assert store.counts()["cancelled"] == 0


def test_the_service_is_paused_and_says_so_on_every_page(site: Site, store: JobStore) -> None:
    with signed_in(site) as client:
        client.post("/fleet/pause", data={"reason": "disks are changed"})
        assert all("disks are changed" in client.get(path).text for path in PAGES)
        client.post("/fleet/resume")
        assert "disks are changed" not in client.get("/").text
        assert "no worker or control process is running" in client.get("/").text
        refused = client.post("/fleet/pause", data={"reason": "x" * (REASON_MAX + 1)})
        assert refused.status_code == 400 and "usage.body" in refused.text
        assert "xxx" not in client.get("/").text


def test_errors_are_pages_with_their_status(site: Site, store: JobStore) -> None:
    with signed_in(site) as client:
        missing = client.get("/jobs/zzzz")
        assert missing.status_code == 404 and "job.not_found" in missing.text and '<a href="/jobs"' in missing.text
        assert client.get("/nowhere").status_code == 404
        assert client.get("/jobs", params={"after": "x"}).status_code == 400
        wrong = client.post("/jobs", data={"source": "a/b", "target": "c/d", "size": "200Mb"})
        assert wrong.status_code == 400 and "means bits" in wrong.text and 'value="200Mb"' in wrong.text
        assert client.post("/jobs", data={"source": "a/b", "size": "1GB"}).status_code == 400
        wrong = client.post("/jobs", data={"source": "a/b", "target": "c/d", "rename": "- '(?=a)': b"})
        assert wrong.status_code == 400 and "invalid perl operator" in wrong.text
        assert client.get("/static/../app.py").status_code == 404
        assert client.get("/static/%2e%2e/app.py").status_code == 404


# What is sent for a field, and the option that it makes, as text.
SENT = {
    "rename": ("- '^a': b", "(Rule(pattern='^a', replacement='b'),)"),
    "strip_prefix": ("a.", "a."),
    "config_from": ("a/b", "a/b"),
    "branch": ("next", "next"),
    "ranks": ("ep8", "ep8"),
    "sign": ("release.pem", "release.pem"),
}
BY_KIND = {"checkbox": ("on", "True"), "words": ("x y", "('x', 'y')")}


@pytest.mark.parametrize("field", OPTIONS, ids=lambda one: one.name)
def test_each_field_of_the_form_is_an_option_as_it_was_sent(site: Site, store: JobStore, field: Input) -> None:
    value, made_of_it = SENT.get(field.name) or BY_KIND.get(field.kind) or (field.choices[-1],) * 2
    with signed_in(site) as client:
        made = client.post("/jobs", data={"source": "a/model", "target": "b/model", field.name: value})
    assert made.status_code == 200, made.text
    options = store.get(made.url.path.rpartition("/")[2]).request.options
    assert str(getattr(options, field.name)) == made_of_it


def test_a_form_submits_what_it_says(site: Site, store: JobStore) -> None:
    fields = {"source": "a/model", "target": "b/model", "size": "200MB", "priority": "bulk", "pack": "layers"}
    with signed_in(site) as client:
        made = client.post("/jobs", data=fields | {"manifest": "on", "include": "*.txt  *.gguf", "rename": "- '^a': b"})
    request = store.get(made.url.path.rpartition("/")[2]).request
    assert (request.options.size, request.options.pack, request.priority) == (200_000_000, "layers", "bulk")
    assert request.options.manifest and not request.options.pr and request.options.include == ("*.txt", "*.gguf")
    assert request.options.rename == (("^a", "b"),)
    assert request.asked_by == "acter"


def test_a_plan_is_shown_before_it_is_submitted(site: Site, store: JobStore, tmp_path: Path) -> None:
    save_single(tmp_path, {f"{SCRIPT}.{i}.w": np.zeros(1000, np.float32) for i in range(4)})
    with signed_in(site) as client:
        shown = client.post("/plan", data={"source": str(tmp_path), "size": "9kB", "manifest": "on"})
        assert shown.status_code == 200, shown.text
    assert "model-00002-of-00002.safetensors" in shown.text and "<path" in shown.text
    assert SCRIPT not in shown.text and "&lt;script&gt;" in shown.text
    assert store.recent() == []


def test_a_plan_that_no_job_may_carry_out_says_what_to_select(site: Site, tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_single(model, {f"{i}.w": np.zeros(1000, np.float32) for i in range(4)})
    run(Request.of(model, model, dtype="bfloat16"))
    fields = {"source": str(model), "target": str(model), "size": "5kB", "manifest": "on"}
    says = "a job will fail unless you select “Overwrite”: "
    with signed_in(site) as client:
        shown = client.post("/plan", data=fields)
        assert shown.status_code == 200 and f'<p class="note">{says}{tmp_path}/.model.reshard.last' in shown.text
        assert says not in client.post("/plan", data=fields | {"overwrite": "on"}).text


def test_a_preview_compares_layouts_and_marks_one(site: Site, tmp_path: Path) -> None:
    folder = save_mixture(tmp_path / "mixture", 256)

    def layouts(**typed: str) -> tuple[str, list[list[str]]]:
        with signed_in(site) as client:
            shown = client.post("/plan", data={"source": str(folder), "size": "20kB", **typed})
        assert shown.status_code == 200, shown.text
        ranks = re.findall(r"<dt>Rank (\d)</dt><dd>reads [\d.]+ kB and needs [\d.]+ kB: (.+?)</dd>", shown.text)
        assert [rank for rank, globs in ranks if "*.json" in globs] == (["0", "1"] if typed else [])
        (found,) = re.findall(r"id=\"layouts-h\">Layouts</h3>\s*<p>(.+?)</p>(.+?)</table>", shown.text, re.DOTALL)
        told, rows = found
        cells = [re.findall(r"<td.*?>(.*?)</td>", row) for row in re.findall(r"<tr>(.+?)</tr>", rows)]
        return told, [row for row in cells if row]

    told, rows = layouts()
    assert told == "Figures for transformers at 1.0 Gbit/s."
    assert [row[0].partition(" <")[0] for row in rows] == [
        "as it is", "50 GB files", "5 GB files", "5 GB files, aligned", "512 MB files",
    ]  # fmt: skip
    assert rows[0][1] == "7" and rows[1][1] == "1"
    assert sum("<strong>recommended</strong>" in row[0] for row in rows) == 1
    told, rows = layouts(ranks="ep2")
    assert told.endswith(", for each rank of ep2.") and rows[3][0].startswith("for ep2, aligned")


def planned(store: JobStore, leases: Leases, folder: Path) -> tuple[str, Plan]:
    """A job with a plan whose tensors have wicked names, and that plan."""
    save_single(folder, {f"{SCRIPT}.{i}.w": np.zeros(1000, np.float32) for i in range(4)})
    request = Request.of(str(folder), str(folder.with_name("out")), size="9kB")
    context = Context.from_env()
    plan = draft(request, open_source(request.source, context), open_target(request.target, request.options, context))
    job = store.submit(request.model_copy(update={"asked_by": SCRIPT})).id
    assert leases.planned(claimed(leases, job, "plan"), plan) == "ok"
    return job, plan


def test_names_from_outside_are_text(site: Site, store: JobStore, leases: Leases, tmp_path: Path) -> None:
    job, plan = planned(store, leases, tmp_path / f"a{SCRIPT.replace('/', '')}\x1b[2J")
    error = NoWeights(place=f"{SCRIPT}\x1b[2J\u202e", found=SCRIPT).to_dict()
    assert leases.fail(claimed(leases, job, "check"), error) == "ok"
    with signed_in(site) as client:
        pages = [client.get(path).text for path in (f"/jobs/{job}", "/jobs", "/", "/jobs?id=" + job)]
    for text in pages:
        assert SCRIPT not in text and SCRIPT.replace("/", "") not in text
        assert "\x1b" not in text and "\u202e" not in text
    assert "&lt;script&gt;" in pages[0] and "\\x1b[2J" in pages[0] and len(plan.shards) == 2


@pytest.mark.parametrize(
    ("target", "linked"),
    [
        ("us/model", ["https://huggingface.co/us/model/commit/commit-of-{job}", "https://huggingface.co/us/model"]),
        ("/srv/model", []),
    ],
)
def test_a_result_is_linked_where_it_has_a_web_address(
    site: Site, store: JobStore, leases: Leases, target: str, linked: list[str]
) -> None:
    job = store.submit(Request(source=Hub(repo="a/b"), target=parse_place(target), asked_by="ada")).id
    finish(leases, job)
    with signed_in(site, "read") as client:
        links = re.findall(r'<a href="([^"]+)" rel="noreferrer"', client.get(f"/jobs/{job}").text)
    assert links == [link.format(job=job) for link in linked]


def test_each_file_says_how_far_it_is(site: Site, store: JobStore, leases: Leases, tmp_path: Path) -> None:
    job, plan = planned(store, leases, tmp_path / "model")
    with signed_in(site) as client:
        claimed(leases, job, "check")
        assert client.get(f"/jobs/{job}").text.count("s-waiting") == 2
        lease = claimed(leases, job, "group:00000")
        copying = client.get(f"/jobs/{job}").text
        assert copying.count('s-copying">') >= 2 and "worker-a" in copying
        assert leases.seal(lease, receipts(plan, 0)[:1]) == "ok"
        sealed = client.get(f"/jobs/{job}").text
        assert sealed.count("s-sealed") == 1 and "group:00000: stored a " in sealed
        assert "group:00000" in client.get("/").text


def test_the_overview_tells_the_speed_of_a_job_and_reads_no_long_history(
    site: Site, store: JobStore, leases: Leases, tmp_path: Path
) -> None:
    job, plan = planned(store, leases, tmp_path / "model")
    with store.redis.pipeline(transaction=False) as pipe:
        for _ in range(5000):
            pipe.xadd(job_key(job, "events"), {"kind": "sealed", "at": 0, "unit": "group:00000", "bytes": 10**15})
        pipe.execute()
    claimed(leases, job, "check")
    lease = claimed(leases, job, "group:00000")
    store.redis.hincrby(job_key(job, "units"), "group:00000.paced_from", -20_000)
    assert leases.seal(lease, receipts(plan, 0)[:1]) == "ok"
    before = store.redis.info("stats")["total_net_output_bytes"]
    with signed_in(site) as client:
        seen = client.get("/").text
    assert re.search(r"group:00000.*<b>\d+ bytes/s", seen)
    assert store.redis.info("stats")["total_net_output_bytes"] - before < 100_000


def test_the_last_day_is_drawn(site: Site, store: JobStore, leases: Leases) -> None:
    job = ask(store)
    fail(leases, job)
    store.retry(job)
    fail(leases, job)
    pace = rate_limiters(store.redis, lambda: None, lambda: None)("https://hub.example somebody")
    pace.update(RateLimitWindow("api", 150, 100.0, 1000, 300.0))
    pace.update(RateLimitWindow("api", 120, 100.0, 1000, 300.0))
    followed(store)
    with signed_in(site) as client:
        seen = client.get("/").text
    assert "2 jobs in 24 h (a retried job counts each time)" in seen
    failures = seen.partition("Failures in the last 24 hours")[2].partition("</table>")[0]
    assert re.findall(">(Times|[0-9]+)</t[hd]>", failures) == ["Times", "2"] and NoWeights.code in failures
    assert "120 of 1,000 left now" in seen and "12 % left" in seen and "k-scarce" in seen


def test_nights_of_a_catalog_stay_when_the_next_begins(site: Site, store: JobStore, leases: Leases) -> None:
    catalogs = Cursor(store)
    begin(catalogs, definition(2))
    first, second = jobs(catalogs)
    finish(leases, first)
    fail(leases, second)
    jobs(catalogs)
    began = catalogs.get("mirror").started
    with signed_in(site) as client:
        client.post("/catalogs/mirror/retry", data={"only": NoWeights.code})
        jobs(catalogs)
        store.cancel(second)
        jobs(catalogs)
        begin(catalogs, definition(2))
        for job in jobs(catalogs):
            finish(leases, job)
        jobs(catalogs)
        nights = catalogs.nights("mirror")
        assert [set(night.values()) for _, night in nights] == [
            {("same", ""), ("unchanged", "")},
            {("same", ""), ("cancelled", "")},
        ]
        assert nights[1][0] == began
        seen = client.get("/catalogs/mirror").text
        assert re.search("<dt>Ended</dt><dd><time .*<dt>Took</dt><dd>[0-9]+ s</dd>", seen)
        assert seen.count('n-cancelled" title') == 1 and seen.count('n-same" title') == 2
        report = client.get("/catalogs/mirror/report")
        assert (
            report.text.startswith("# Catalog mirror: done") and "attachment" in report.headers["content-disposition"]
        )
        assert "mirror" in client.get("/catalogs").text
        client.post("/catalogs/mirror/remove")
        assert catalogs.names() == [] and store.redis.keys("reshard:catalog:mirror*") == []


def test_a_catalog_under_way_has_no_end_and_says_how_long_the_rest_will_take(site: Site, store: JobStore) -> None:
    catalogs = Cursor(store)
    begin(catalogs, definition(2, at_once=1))
    (job,) = jobs(catalogs)
    for kind in ("worker", "control"):
        announce(store.redis, process(f"here:{len(kind)}", kind))
    with signed_in(site) as client:
        assert "1 of 1</dd>" in client.get("/catalogs/mirror").text, "no rate is known"
        copying_at(store, 1_000_000, mean=600_000_000)
        seen = client.get("/catalogs/mirror").text
        assert re.search("1 of 1, <time .* data-left>about 2[01] min left</time></dd>", seen)
        assert "<dt>Ended</dt>" not in seen
        store.redis.hset(job_key(job), mapping={"bytes": 600_000_000, "bytes_sealed": 480_000_000})
        assert re.search("about 1[23] min left", client.get("/catalogs/mirror").text)
        store.redis.hset(job_key(job), "bytes", 10**18)
        assert "1 of 1</dd>" in client.get("/catalogs/mirror").text, "30,000 years"


def test_a_catalog_is_submitted_by_the_form_or_its_mistake_is_shown(site: Site, store: JobStore) -> None:
    with signed_in(site) as client:
        wrong = client.post("/catalogs", data={"text": f"name: {SCRIPT}"})
        assert wrong.status_code == 400 and SCRIPT not in wrong.text
        made = client.post("/catalogs", data={"text": definition(2).text, "at_once": "3"})
    assert made.url.path == "/catalogs/mirror" and Cursor(store).get("mirror").definition.at_once == 3


def test_a_schedule_shows_its_times_and_results(site: Site, store: JobStore, leases: Leases) -> None:
    request = Request.of("a/b", "b/c", dtype="bfloat16", exclude=[SCRIPT])
    Schedules(store).add(Schedule(name="nightly", cron="0 2 * * *", request=request))
    with signed_in(site) as client:
        assert f"b/c</span> · “Dtype” bfloat16, “Exclude” {escape(SCRIPT)} · " in client.get("/schedules").text
        client.post("/schedules/nightly/run")
        [job] = store.recent()
        fail(leases, job.id)
        seen = client.get("/schedules").text
        assert seen.count(" 02:00 UTC</td>") == seen.count(" 02:00 UTC</time>") == 5
        assert f'href="/jobs/{job.id}" class="cell n-failed"' in seen
        client.post("/schedules/nightly/pause")
        paused = client.get("/schedules").text
        assert "<h3>Next runs, once resumed</h3>" in paused and paused.count(" 02:00 UTC</td>") == 5
        assert "once resumed" not in seen
        client.post("/schedules/nightly/remove")
        assert Schedules(store).all() == []


def test_a_schedule_in_a_time_zone_that_is_unknown_here_hides_no_other(site: Site, store: JobStore) -> None:
    request = Request(source=Hub(repo="a/b"), target=Hub(repo="b/c"))
    for name in ("elsewhere", "nightly"):
        Schedules(store).add(Schedule(name=name, cron="0 2 * * *", request=request))
    unknown = Schedule(name="elsewhere", cron="0 2 * * *", tz="America/Newtown", request=request)
    store.redis.hset(ALL, "elsewhere", unknown.model_dump_json())
    with signed_in(site) as client:
        seen = client.get("/schedules")
    assert seen.status_code == 200 and seen.text.count(" 02:00 UTC</td>") == 1 + 5


def test_schedules_are_listed_a_page_at_a_time(site: Site, store: JobStore) -> None:
    request = Request(source=Hub(repo="a/b"), target=Hub(repo="b/c"))
    names = [f"s{number:03}" for number in range(2 * LISTED + 1)]
    for name in names:
        Schedules(store).add(Schedule(name=name, cron="@daily", request=request))
    seen, path, pages = list[str](), "/schedules", 0
    with signed_in(site) as client:
        while path:
            page = client.get(path).text
            seen, pages = seen + re.findall(r"<h2>(s\d+)</h2>", page), pages + 1
            more = re.search(r'href="([^"]+)" rel="next"', page)
            path = html.unescape(more[1]) if more else ""
    assert seen == names and pages == 3


def test_ten_thousand_jobs_are_listed_a_page_at_a_time(site: Site, store: JobStore) -> None:
    for number in range(250):
        ask(store, f"b/m{number}")
    seen, path = set[str](), "/jobs"
    with signed_in(site) as client:
        while path:
            text = client.get(path).text
            found = {part.partition('"')[0] for part in text.split('<a href="/jobs/')[1:]}
            assert len(found) <= 100 and not found & seen
            seen |= found
            older = text.partition('<a href="/jobs?after=')[2].partition('"')[0]
            path = f"/jobs?after={older}" if older else ""
    assert len(seen) == 250


def test_jobs_are_found_by_the_fields_of_a_form_and_failures_by_their_code(
    site: Site, store: JobStore, leases: Leases
) -> None:
    mine, other, bad = ask(store, "us/m-1"), ask(store, "us/x"), ask(store, "us/m-2")
    fail(leases, bad)
    followed(store)
    with signed_in(site) as client:
        found = client.get("/jobs", params={"target": "us/m-*", "state": "queued", "within": "86400"}).text
        assert mine in found and other not in found and bad not in found
        assert not re.search(r"<b>[\d,]+</b>", found), "figures of all jobs above those that match"
        assert "<b>3</b>all" in client.get("/jobs", params={"state": "queued"}).text
        assert 'value="us/m-*"' in found and "state=failed&amp;target=us%2Fm-%2A&amp;within=86400" in found
        link = f"/jobs?state=failed&amp;code={NoWeights.code}"
        assert link in client.get("/").text
        failed = client.get(html.unescape(link)).text
        assert bad in failed and mine not in failed
        (told,) = re.findall(r'<p class="note">(.*?)</p>', failed)
        error = store.get(bad).error
        assert error and f"{sentence(error['message'], NoWeights.code)} {sentence(error['hint'])}" in told
        assert f'<a href="/jobs/{bad}">' in told and "…" not in told
        assert 'class="note"' not in client.get("/jobs?code=none.such").text
        for wrong in ({"within": "soon"}, {"within": "7200"}, {"state": "lost"}, {"by": "x" * 501}):
            refused = client.get("/jobs", params=wrong)
            assert refused.status_code == 400 and BadBody.code in refused.text, wrong


def test_what_is_done_to_jobs_that_are_marked_is_asked_once_and_names_their_number(site: Site, store: JobStore) -> None:
    marked, other = [ask(store, f"us/m-{number}") for number in range(2)], ask(store, "us/x")
    with signed_in(site, "read") as client:
        assert 'type="checkbox"' not in client.get("/jobs").text
        assert client.post("/jobs/chosen", data={"act": "cancel", "job": marked}).status_code == 403
    with signed_in(site) as client:
        assert client.get("/jobs").text.count('type="checkbox" name="job"') == 3
        asked = client.post("/jobs/choose", data={"act": "cancel", "job": marked}).text
        assert "Cancel 2 jobs?" in asked and store.get(marked[0]).state == "queued"
        back = "state=queued&target=us%2Fm-%2A"
        kept = client.post("/jobs/choose", data={"act": "cancel", "job": marked, "state": "queued", "target": "us/m-*"})
        assert f'name="back" value="{html.escape(back)}"' in kept.text
        done = client.post("/jobs/chosen", data={"act": "cancel", "job": marked, "back": back})
        assert done.url.path == "/jobs" and f"{back}&" in done.url.query.decode()
        assert "2 jobs cancelled." in done.text and "No matching jobs" in done.text
        assert [store.get(job).state for job in [*marked, other]] == ["cancelled", "cancelled", "queued"]

        every = client.post("/jobs/choose", data={"act": "retry", "every": "on", "target": "us/m-*"}).text
        assert "Retry 2 jobs?" in every
        refused = client.post("/jobs/chosen", data={"act": "retry", "job": [*marked, other], "back": back}).text
        assert "Retry: 2 jobs done, 1 refused" in refused and "job.state" in refused
        assert f'href="/jobs?{html.escape(back)}"' in refused
        assert "Cancel 3 jobs?" in client.post("/jobs/choose", data={"act": "cancel", "every": "on"}).text
        assert "No jobs selected" in client.post("/jobs/choose", data={"act": "delete"}).text
        none = client.post("/jobs/choose", data={"act": "delete", "every": "on", "state": "queued"}).text
        assert "Delete 0 jobs?" in none, "such jobs have not ended"
        assert client.post("/jobs/choose", data={"act": "burn"}).status_code == 400


def test_all_that_match_are_retried_once_for_each_request_as_the_command_does(site: Site, store: JobStore) -> None:
    for _ in range(2):
        last = ask(store, "us/m")
        store.cancel(last)
    with signed_in(site) as client:
        every = client.post("/jobs/choose", data={"act": "retry", "every": "on", "state": "cancelled"}).text
        assert "Retry 1 job?" in every and f'name="job" value="{last}"' in every
        assert "Delete 2 jobs?" in client.post("/jobs/choose", data={"act": "delete", "every": "on"}).text


def test_a_link_signs_in_once_whoever_runs_the_service(site: Site, store: JobStore) -> None:
    link = f"/sign-in?once={Queue(store).new_link()}"
    with site.client(None) as client:
        client.head(link)  # as what shows a preview of it asks
        sent = client.get(link)
        assert sent.status_code == 303 and sent.headers["location"] == "/"
        assert {"HttpOnly", "SameSite=strict"} <= {part.strip() for part in sent.headers["set-cookie"].split(";")}
        assert client.get("/").status_code == 200 and "/fleet/pause" in client.get("/").text
    with site.client(None) as other:
        for wrong in (link, "/sign-in?once=guess"):
            refused = other.get(wrong)
            assert refused.status_code == 401 and "set-cookie" not in refused.headers
            assert "has been used or has expired" in refused.text
    (kept,) = store.redis.keys("reshard:entry:*") or [b""]
    assert kept == b"", "nothing of it is left"


def test_the_token_of_whoever_runs_the_service_is_theirs_alone_and_made_anew_when_its_line_goes(
    tmp_path: Path,
) -> None:
    tokens = tmp_path / "web-tokens"
    first = own_token(tokens)
    assert own_token(tokens) == first and first not in tokens.read_text()
    assert (tmp_path / OWN).stat().st_mode & 0o777 == 0o600
    caller = Tokens(tokens).find(first)
    assert caller and (caller.name, caller.scope) == (getuser(), Scope.act)
    tokens.write_text("")
    second = own_token(tokens)
    assert second != first and Tokens(tokens).find(second) and not Tokens(tokens).find(first)


def test_a_link_is_over_after_ten_minutes(store: JobStore) -> None:
    queue = Queue(store)
    queue.new_link()
    (key,) = store.redis.keys("reshard:entry:*")
    assert 0 < store.redis.ttl(key) <= LINK_LASTS == 600
    assert not queue.use_link("") and not queue.use_link("guess")


def test_a_client_of_the_broker_with_a_user_of_its_own_makes_no_link(store: JobStore) -> None:
    with restricted(store) as client, pytest.raises(NoPermissionError):
        Queue(client).new_link()


def test_whoever_has_a_name_that_no_token_may_have_is_called_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "_svc")
    caller = Tokens(tmp_path / "tokens").find(own_token(tmp_path / "tokens"))
    assert caller and caller.name == "owner"
    (tmp_path / OWN).unlink()
    (tmp_path / OWN).mkdir()
    with pytest.raises(BadSetting, match=OWN):
        own_token(tmp_path / "tokens")


def test_usage_shows_what_jobs_took_and_escapes_who(site: Site, store: JobStore) -> None:
    store.cancel(store.submit(Request(source=Hub(repo="a/b"), target=Hub(repo="b/c"), asked_by=SCRIPT)).id)
    followed(store)
    with signed_in(site, "read") as client:
        shown = client.get("/usage").text
        assert html.escape(SCRIPT) in shown and SCRIPT not in shown
        assert ">Total</th>" in client.get("/usage?by=day&days=1").text
        assert "(none)" in client.get("/usage?by=catalog").text
        assert client.get("/usage?by=nobody").status_code == 400
        assert client.get("/usage?days=1000").status_code == 400


def test_a_job_that_cannot_be_deleted_is_named_and_the_way_back_is_kept(site: Site, store: JobStore) -> None:
    ended, waits = ask(store, "us/ended"), ask(store, "us/waits")
    store.cancel(ended)
    with signed_in(site) as client:
        data = {"act": "delete", "job": [ended, waits], "back": "target=us%2F%2A"}
        refused = client.post("/jobs/chosen", data=data)
    assert "Delete: 0 jobs done, 1 refused" in refused.text and waits in refused.text
    assert 'href="/jobs?target=us%2F%2A"' in refused.text and len(store.recent()) == 2


def test_more_jobs_than_are_done_at_once_are_told_of(site: Site, store: JobStore) -> None:
    many = [f"{number:010}" for number in range(CHOSEN_MAX)]
    with signed_in(site) as client:
        few = client.post("/jobs/choose", data={"act": "cancel", "job": [ask(store, "us/m")]}).text
        asked = client.post("/jobs/choose", data={"act": "cancel", "job": many}).text
    assert "More jobs may match." in asked and "More jobs may match." not in few


@pytest.mark.parametrize("path", ["/jobs/", "/plan/", "/api/v1/jobs/"])
def test_a_path_with_a_slash_too_many_leads_nowhere(site: Site, path: str) -> None:
    """As to another scheme, and with the token: behind a proxy only that one knows it."""
    for method in ("GET", "POST"):
        with site.client("act") as client:
            answer = client.request(method, path, headers={"X-Forwarded-Proto": "https"}, follow_redirects=False)
        assert answer.status_code == 404 and "location" not in answer.headers


def test_each_box_of_a_part_that_is_drawn_anew_has_an_id_to_be_ticked_again_by(site: Site, store: JobStore) -> None:
    job = ask(store, "us/m")
    store.cancel(job)
    with signed_in(site) as client:
        pages = [client.get(path).text for path in ("/jobs", f"/jobs/{job}")]
    boxes = [box for page in pages for box in re.findall(r"<input [^>]*checkbox[^>]*>", page)]
    assert len(boxes) >= 4 and all(" id=" in box or 'name="every"' in box for box in boxes)


def test_an_address_turns_off_what_is_on_by_itself(site: Site) -> None:
    with signed_in(site) as client:
        for address, ticked in (("/plan", True), ("/plan?manifest=false", False), ("/plan?manifest=on", True)):
            box = re.search(r'<input type="checkbox" id="manifest"[^>]*>', client.get(address).text)
            assert box and (" checked" in box[0]) is ticked


def test_a_key_that_is_typed_for_its_name_is_not_shown_again(site: Site) -> None:
    key = "-----BEGIN PRIVATE KEY-----abc"
    with signed_in(site) as client:
        refused = client.post("/jobs", data={"source": "a/b", "target": "b/c", "size": "1MB", "sign": key})
    assert refused.status_code in {400, 403, 422} and "abc" not in refused.text


def test_an_error_is_a_page_of_whoever_is_signed_in(site: Site) -> None:
    with signed_in(site, "read") as client:
        gone = client.get("/jobs/nothing")
    assert gone.status_code == 404 and "reader (read only)" in gone.text and "Sign out" in gone.text
    with client_of(site.url) as client:
        assert "Sign out" not in client.get("/jobs/nothing", follow_redirects=True).text
