"""Lists of jobs and schedules are bounded by bytes as well as by count, and a damaged record hides no other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reshard.client import ROOT
from reshard.pipeline.errors import JobUnreadable, NoWeights
from reshard.pipeline.limits import GLOB_MAX, GLOBS_MAX, KB, MB
from reshard.pipeline.places import Hub
from reshard.pipeline.request import Options, Request
from reshard.worker.followers.catalogs import TROUBLE
from reshard.worker.followers.cursor import Cursor
from reshard.worker.followers.records import Definition
from reshard.worker.followers.schedules import ALL, Schedule, Schedules
from reshard.worker.queue.events import KINDS
from reshard.worker.queue.jobs import PAGE_BYTES, JobStore, new_id, submission
from reshard.worker.queue.scripts import job_key
from tests.web.conftest import Site, signed_in
from tests.worker.conftest import ask as ask_for
from tests.worker.conftest import followed
from tests.worker.followers.builders import begin, definition, nightly, rows

LONG = 950_000  # characters of a glob, which a release before took
ANSWER = 2 * PAGE_BYTES  # bytes; strings are longer in JSON where they are escaped
REST = "defaults: {to: 'us/{name}'}\nentries: [{repo: them/m}]\n"
GROWTH = 150 * MB  # bytes that answers may add to what the service holds; 300 such records have 285


def ask(store: JobStore, number: int) -> str:
    return store.submit(Request(source=Hub(repo="them/model"), target=Hub(repo=f"us/m{number}"))).id


def ask_at_length(store: JobStore, number: int) -> str:
    """A job as a release without bounds queued it."""
    made = submission(Request(source=Hub(repo="them/model"), target=Hub(repo=f"us/long{number}")))
    asked = json.loads(made[4]) | {"options": {"strip_prefix": "a" * LONG}}
    return str(store.run("submit", new_id(), *made[1:4], json.dumps(asked), "me")[0].decode())


def peak(pid: int) -> int:
    """Bytes that a process had resident at most."""
    [kb] = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(kb) * 1024


def test_a_page_of_long_records_is_short_and_takes_little_memory(site: Site, store: JobStore) -> None:
    with site.client("read") as client:
        assert client.get(f"{ROOT}/jobs", params={"limit": 500}).status_code == 200
        before = peak(site.process.pid)
        made = {ask_at_length(store, number) for number in range(300)}
        seen, after, pages = set[str](), None, 0
        while pages == 0 or after:
            answer = client.get(f"{ROOT}/jobs", params={"limit": 500} | ({"after": after} if after else {}))
            assert len(answer.content) <= ANSWER
            page = answer.json()
            after, pages, seen = page["next"], pages + 1, seen | {job["id"] for job in page["jobs"]}
        assert client.get("/jobs", headers={"Accept": "text/html"}).status_code in {200, 303}
    assert seen == made and pages > 1
    assert peak(site.process.pid) - before < GROWTH


def pages(site: Site, limit: int = 500) -> Iterator[list[dict[str, Any]]]:
    """The whole list of schedules, page by page."""
    after: str | None = ""
    with site.client("read") as client:
        while after is not None:
            answer = client.get(f"{ROOT}/schedules", params={"limit": limit, "after": after})
            assert answer.status_code == 200 and len(answer.content) <= ANSWER
            page = answer.json()
            after = page["next"]
            yield page["schedules"]


def test_schedules_are_listed_without_the_text_of_their_catalogs(site: Site, store: JobStore) -> None:
    text = f"name: mirror\nentries: []\n# {'é' * 400_000}"
    names = [f"s{number}" for number in range(5)]
    for name in names:
        Schedules(store).add(Schedule(name=name, cron="@daily", catalog=Definition(name="mirror", text=text)))
    rows = [row for page in pages(site) for row in page]
    assert [row["name"] for row in rows] == names and len(json.dumps(rows)) < 5 * KB
    assert [row["catalog"]["bytes"] for row in rows] == [len(text.encode())] * 5
    assert all("text" not in row["catalog"] and row["digest"] for row in rows)
    assert [[row["name"] for row in page] for page in pages(site, 2)] == [names[:2], names[2:4], names[4:]]
    assert site.get(f"{ROOT}/schedules/s0")["catalog"]["text"] == text
    listed = [json.loads(line) for line in site.machine.run("schedule", "list", "--json").stdout.splitlines()]
    assert [{"schema": 1} | row for row in rows] == listed


def test_a_page_of_long_schedules_is_short(site: Site, store: JobStore) -> None:
    long = Options(exclude=("a" * GLOB_MAX,) * GLOBS_MAX)
    names = [f"s{number:03}" for number in range(100)]
    for name in names:
        request = Request(source=Hub(repo="them/model"), target=Hub(repo="us/m"), options=long)
        Schedules(store).add(Schedule(name=name, cron="@daily", request=request))
    found = [[row["name"] for row in page] for page in pages(site)]
    assert [name for page in found for name in page] == names and len(found) > 1


MODELS = 12_000  # whose errors come to more than two pages


@pytest.fixture
def long_catalog(store: JobStore) -> Cursor:
    """Of which every third model has failed, at length; some of the others are at work, and the rest wait."""
    catalogs, wanted = Cursor(store), definition(1)
    (entry, _), *_ = rows(wanted)
    why = "x" * 200
    found = [
        (entry.model_copy(update={"repo": f"them/m{n}"}), NoWeights(place=why, found=why) if n % 3 == 0 else None)
        for n in range(MODELS)
    ]
    begin(catalogs, wanted, found)
    followed(store)
    return catalogs


def test_a_long_catalog_comes_in_pages_and_its_figures_are_of_all(
    site: Site, store: JobStore, long_catalog: Cursor
) -> None:
    with site.client("read") as client:
        client.get(f"{ROOT}/catalogs/mirror")
        before = peak(site.process.pid)
        found, after = list[dict[str, Any]](), -1
        while after is not None:
            answer = client.get(f"{ROOT}/catalogs/mirror", params={"after": after})
            assert len(answer.content) <= ANSWER
            page = answer.json()
            assert page["counts"] == {"failed": MODELS // 3, f"failed:{NoWeights.code}": MODELS // 3}
            assert (page["entries"], page["todo"]) == (MODELS, MODELS - MODELS // 3 - 8)
            found.append(page)
            after = page.get("next")
        assert peak(site.process.pid) - before < GROWTH
        failed = client.get(f"{ROOT}/catalogs/mirror/failures", params={"after": found[0]["next"]}).json()
        assert [one["repo"] for one in failed["failures"][NoWeights.code]] == [e["repo"] for e in found[1]["ended"]]
    ended = [one["repo"] for page in found for one in page["ended"]]
    assert ended == [f"them/m{n}" for n in range(0, MODELS, 3)] and len(found) > 1
    shown = json.loads(site.machine.run("catalog", "status", "mirror", "--json").stdout)
    assert [one["repo"] for one in shown["ended"]] == ended and "next" not in shown
    told = json.loads(site.machine.run("catalog", "failures", "mirror", "--json").stdout)
    assert [one["repo"] for one in told["failures"][NoWeights.code]] == ended


def test_the_page_of_a_long_catalog_says_what_it_leaves_out(site: Site, long_catalog: Cursor) -> None:
    with signed_in(site) as browser:
        seen = browser.get("/catalogs/mirror").text
    assert f"<code>{NoWeights.code}</code> {MODELS // 3}" in seen and f"{MODELS // 3 - 100} more are" in seen
    assert seen.count('<th scope="row">') == 1000 and f"{MODELS // 3 + 8 - 1000} more models" in seen


def test_catalogs_are_listed_in_pages(site: Site, store: JobStore) -> None:
    catalogs, names = Cursor(store), [f"c{n:02}" for n in range(60)]
    for name in names:
        catalogs.submit(definition(1).model_copy(update={"name": name, "text": f"name: {name}\n" + REST}))
    with site.client("read") as client:
        first = client.get(f"{ROOT}/catalogs").json()
        rest = client.get(f"{ROOT}/catalogs", params={"after": first["next"], "limit": 500}).json()
    assert [row["name"] for row in first["catalogs"] + rest["catalogs"]] == names
    assert (len(first["catalogs"]), rest["next"]) == (50, None)
    assert site.machine.run("catalog", "status", "--quiet").stdout.split() == names
    with signed_in(site) as browser:
        assert 'href="/catalogs?after=c49" rel="next"' in browser.get("/catalogs").text
        seen = browser.get("/catalogs?after=c49").text
        store.redis.hset(TROUBLE, mapping=dict.fromkeys(names, 1))
        assert browser.get("/").text.count('<td>catalog <a href="/catalogs/c') == 60
    assert "/catalogs/c50" in seen and "/catalogs/c49" not in seen and 'rel="next"' not in seen


def test_a_schedule_whose_last_job_cannot_be_read_says_so_and_hides_no_other(site: Site, store: JobStore) -> None:
    schedules = Schedules(store)
    for name in ("s0", "s1"):
        schedules.add(nightly(name, ask_for(name)))
    job = schedules.run("s0").job or ""
    store.redis.hset(job_key(job), "request", "{")
    told = f"job {job} (its record cannot be read)"
    page = site.get(f"{ROOT}/schedules")
    assert [(row["name"], row["last"]) for row in page["schedules"]] == [("s0", told), ("s1", "never")]
    assert site.get(f"{ROOT}/schedules/s0")["last"] == told
    with signed_in(site, "read") as client:
        assert told[1:] in client.get("/schedules").text


def test_a_schedule_that_cannot_be_read_is_said_and_hides_no_other(site: Site, store: JobStore) -> None:
    names = [f"s{number}" for number in range(4)]
    for name in names:
        request = Request(source=Hub(repo="them/model"), target=Hub(repo="us/m"))
        Schedules(store).add(Schedule(name=name, cron="@daily", request=request))
    store.redis.hset(ALL, "s1", "{")
    page = site.get(f"{ROOT}/schedules")
    assert [row["name"] for row in page["schedules"]] == ["s0", "s2", "s3"]
    assert list(page["unreadable"]) == ["s1"] and page["unreadable"]["s1"].startswith("its record: ")
    assert [[row["name"] for row in page] for page in pages(site, 2)] == [["s0"], ["s2", "s3"]]
    with signed_in(site, "read") as browser:
        assert "Cannot read the record of schedule s1: " in browser.get("/schedules").text
    listed = site.machine.run("schedule", "list", "--json")
    assert [json.loads(line)["name"] for line in listed.stdout.splitlines()] == ["s0", "s2", "s3"]
    assert listed.stderr.startswith("warning: cannot read the record of schedule s1: ")


def damage(store: JobStore, how: str, id: str) -> None:
    key = job_key(id)
    match how:
        case "no request":
            store.redis.hdel(key, "request")
        case "not JSON":
            store.redis.hset(key, "request", "{")
        case "a list":
            store.redis.hset(key, "request", "[]")
        case "another kind":
            store.redis.hset(key, "request", '{"source": {"kind": 7}}')
        case "no number":
            store.redis.hset(key, "created", "yesterday")
        case "not text":
            store.redis.hset(key, "note", b"\xff\xfe")
        case "no hash":
            store.redis.set(key, "x")
        case "units":
            store.redis.hset(job_key(id, "units"), "plan.token", "t")
            store.redis.hset(job_key(id, "units"), "plan.bytes", "many")
        case "error":
            store.redis.hset(key, "error", "nested" * 10)


HOW = ["no request", "not JSON", "a list", "another kind", "no number", "not text", "no hash", "units", "error"]


@pytest.mark.parametrize("how", HOW)
def test_a_damaged_record_is_said_and_hides_no_other(site: Site, store: JobStore, how: str) -> None:
    first, odd, last = (ask(store, number) for number in range(3))
    damage(store, how, odd)
    page = site.get(f"{ROOT}/jobs")
    assert [job["id"] for job in page["jobs"]] == [last, first]
    assert list(page["unreadable"]) == [odd] and page["unreadable"][odd]
    assert [job.id for job in store.recent()] == [last, first]
    with pytest.raises(JobUnreadable, match=odd):
        store.get(odd)


def test_what_others_write_among_the_events_of_a_job_hides_none_of_them(site: Site, store: JobStore) -> None:
    job = ask(store, 0)
    for fields in ({"x": "y"}, {"kind": "state", "at": "soon"}, *({"kind": k, "at": "1"} for k in KINDS)):
        store.redis.xadd(job_key(job, "events"), fields)
    store.cancel(job)
    told = [event["kind"] for event in site.get(f"{ROOT}/jobs/{job}/changes")["events"]]
    assert told == ["state", *KINDS, "state"]
    with signed_in(site) as browser:
        assert browser.get(f"/jobs/{job}").status_code == 200
    watched = site.machine.run("watch", job)
    assert "Traceback" not in watched.stderr and "cancelled" in watched.stderr, watched.stderr


def test_the_command_lists_the_others_and_deletes_the_damaged_one(site: Site, store: JobStore) -> None:
    first, odd = ask(store, 0), ask(store, 1)
    store.cancel(odd)
    damage(store, "not JSON", odd)
    listed = site.machine.run("list")
    assert listed.returncode == 0 and first in listed.stdout and odd not in listed.stdout
    assert f"warning: cannot read the record of job {odd}: " in listed.stderr
    assert site.machine.run("status", odd).returncode == JobUnreadable.exit_code
    assert site.machine.run("delete", odd).returncode == 0
    assert odd not in site.machine.run("list").stderr
