"""Catalogs and schedules as tests write them, and their jobs brought to an end."""

from __future__ import annotations

from dataclasses import asdict
from uuid import uuid4

from reshard.pipeline.catalogs.definition import parse, request_for
from reshard.pipeline.errors import (
    NoWeights,
    ReshardError,
)
from reshard.pipeline.publishing.commit import Published
from reshard.pipeline.request import Request
from reshard.worker.followers.cursor import Cursor
from reshard.worker.followers.records import CatalogStatus, Definition, Entry
from reshard.worker.followers.schedules import Schedule
from reshard.worker.queue.leases import Leases
from tests.worker.conftest import ask, claimed, followed

Rows = list[tuple[Entry, ReshardError | None]]
DAY = 86_400.0


def definition(count: int = 5, **fields: object) -> Definition:
    entries = "".join(f"- repo: them/m{number}\n" for number in range(count))
    return Definition(
        name="mirror", text=f"name: mirror\ndefaults: {{to: 'us/{{name}}'}}\nentries:\n{entries}", **fields
    )


def rows(wanted: Definition, source: str = "s1", target: str | None = "t1") -> Rows:
    catalog = parse(wanted.text, "c.yaml")
    return [
        (Entry(repo=e.repo or "", request=request_for(catalog, e, e.repo or ""), source=source, target=target), None)
        for e in catalog.entries
    ]


def begin(catalogs: Cursor, wanted: Definition, found: Rows | None = None) -> None:
    """Submit it and let a control expand it to ``found``."""
    assert catalogs.submit(wanted)
    token = uuid4().hex
    run = catalogs.claim(wanted.name, token)
    assert catalogs.fill(wanted.name, run, token, rows(wanted) if found is None else found)


def jobs(catalogs: Cursor) -> list[str]:
    """What is at work once control has heard what happened."""
    followed(catalogs.store)
    return list(catalogs.get("mirror").active.values())


def counts(seen: CatalogStatus) -> dict[str, int]:
    """How many of its entries ended how, whatever the errors."""
    return {what: number for what, number in seen.outcomes.items() if number and ":" not in what}


def finish(leases: Leases, job: str, found: bool = True, source: str = "s1") -> None:
    """A job that is done with the ``source`` that it read; it found its commit there, or made one."""
    lease = claimed(leases, job, "plan")
    assert leases.done(lease, {**asdict(Published(f"commit-of-{job}", "main", found)), "source": source}) == "ok"


def fail(leases: Leases, job: str) -> None:
    assert leases.fail(claimed(leases, job, "plan"), NoWeights(place="them/m", found="").to_dict()) == "ok"


def nightly(name: str = "nightly", request: Request | None = None, **fields: object) -> Schedule:
    return Schedule(**{"name": name, "cron": "0 3 * * *", "request": request or ask(), **fields})
