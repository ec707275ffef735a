"""Lists of jobs and schedules are bounded by bytes as well as by count, and a damaged record hides no other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reshard.client import ROOT
from reshard.pipeline.errors import JobUnreadable
from reshard.pipeline.limits import GLOB_MAX, GLOBS_MAX, KB, MB
from reshard.pipeline.places import Hub
from reshard.pipeline.request import Options, Request
from reshard.worker.followers.records import Definition
from reshard.worker.followers.schedules import ALL, Schedule, Schedules
from reshard.worker.queue.jobs import PAGE_BYTES, JobStore, new_id, submission
from reshard.worker.queue.scripts import job_key
from tests.web.conftest import Site, signed_in

LONG = 950_000  # characters of a glob, which a release before took
ANSWER = 2 * PAGE_BYTES  # bytes; strings are longer in JSON where they are escaped
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
