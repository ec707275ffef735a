"""What jobs took is counted once, by day, submitter and catalog, and is what the Hub counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from reshard.pipeline.places import Hub
from reshard.pipeline.request import Options, Request
from reshard.worker.followers import spending
from reshard.worker.followers.cursor import Cursor
from reshard.worker.followers.spending import DAY, spent
from reshard.worker.queue.events import EVENTS
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Leases
from reshard.worker.queue.scripts import server_ms
from tests.support.procs import wait_for
from tests.worker.conftest import ask, followed
from tests.worker.followers.builders import begin, definition, fail, finish, jobs
from tests.worker.sites import SIZE, Site, site

__all__ = ["site"]


def taken(store: JobStore) -> dict[tuple[str, str], Counter[str]]:
    """By submitter and catalog, of today and yesterday."""
    day = server_ms(store.redis) // 1000 // DAY
    found: dict[tuple[str, str], Counter[str]] = {}
    for one in spent(store.redis, [day - 1, day]):
        found.setdefault((one.submitter, one.catalog), Counter()).update(one.counts)
    return found


def test_what_two_submitters_took_is_what_the_hub_counted(site: Site) -> None:
    """Of the source to the byte, with headers and carried files; of the targets' objects as well; and every call."""
    site.space.admin.put_files(site.source, {"tokenizer.model": bytes(range(250)) * 1200}, lfs=["tokenizer.model"])
    site.machine.worker(HF_HUB_DISABLE_XET="1")
    site.space.admin.log(reset=True)
    for who in ("ada", "bob"):
        target = Hub(repo=site.space.repo(who))
        request = Request(source=Hub(repo=site.source), target=target, options=Options(size=SIZE), asked_by=who)
        site.ended(site.store.submit(request).id)
    wait_for(lambda: kinds(site.store)["spent"] == kinds(site.store)["claimed"], "what the last unit took")
    log = site.space.admin.log()
    wait_for(lambda: sum(one["calls"] for one in taken(site.store).values()) >= called(log), "what control counts")

    found = taken(site.store)
    assert found.keys() == {("ada", ""), ("bob", "")}
    assert all(one["jobs"] == 1 and one["failed"] == 0 and one["took"] > 0 for one in found.values())
    total = sum(found.values(), Counter[str]())
    assert total["calls"] == called(log)
    assert total["read"] == sum(e["down"] for e in log if f"/{site.source}/" in content(e))
    assert total["uploaded"] == sum(e["up"] for e in log if e["method"] == "PUT" and e["kind"] == "lfs") > 4_000_000


def content(entry: Mapping[str, Any]) -> str:
    """The path of a request that was answered with a part of a file."""
    return str(entry["path"]) if entry["kind"] in {"resolve", "cdn"} and entry["status"] == 206 else ""


def called(log: Sequence[Mapping[str, Any]]) -> int:
    """Requests to the Hub itself, and not to its stores of content."""
    return sum(e["kind"] in {"api", "resolve"} or ".git/info/lfs/" in e["path"] for e in log)


def kinds(store: JobStore) -> Counter[str]:
    return Counter(fields[b"kind"].decode() for _, fields in store.redis.xrange(EVENTS))


def test_a_catalog_s_jobs_are_those_of_who_submitted_it_until_it_is_gone(store: JobStore, leases: Leases) -> None:
    catalogs = Cursor(store)
    begin(catalogs, definition(2, at_once=2, asked_by="ada"))
    first, second = jobs(catalogs)
    finish(leases, first)
    followed(store)
    store.redis.delete("reshard:catalog:mirror")
    fail(leases, second)
    followed(store)
    assert {of: (one["jobs"], one["failed"]) for of, one in taken(store).items()} == {
        ("ada", "mirror"): (1, 0),
        ("catalog mirror", "mirror"): (1, 1),
    }


def test_of_more_names_than_a_day_keeps_the_rest_counts_for_others(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spending, "FIELDS_MAX", 4)
    for number in range(6):
        store.cancel(store.submit(ask(f"m{number}").model_copy(update={"asked_by": f"user {number}"})).id)
        followed(store)
    found = taken(store)
    assert found.keys() == {*((f"user {number}", "") for number in range(4)), (spending.OTHERS, "")}
    assert sum(one["jobs"] for one in found.values()) == 6
