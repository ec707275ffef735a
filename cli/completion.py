"""What a shell offers for an argument: the jobs, catalogs, schedules and workers of the queue."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from reshard.client.connect import connect
from reshard.client.operations.table import Session

OFFERED = 100  # jobs or schedules; more are no help in a shell

Offers = Callable[[str], list[tuple[str, str]]]


def _offers(found: Callable[[Session], Iterable[tuple[str, str]]]) -> Offers:
    """Names with what is known of each, of those that begin with what is typed; nothing without a queue."""

    def complete(incomplete: str) -> list[tuple[str, str]]:
        try:
            with connect() as session:
                return [(name, text) for name, text in found(session) if name.startswith(incomplete)]
        except Exception:  # noqa: BLE001 -- a shell has no place for an error, and the command itself will say it
            return []

    return complete


@_offers
def jobs(session: Session) -> Iterable[tuple[str, str]]:
    from reshard.client.operations.jobs import JobsQuery, list_jobs

    for job in list_jobs(session, JobsQuery(limit=OFFERED)).jobs:
        yield job.id, f"{job.state}, {job.request.source} -> {job.request.target}"


@_offers
def catalogs(session: Session) -> Iterable[tuple[str, str]]:
    from reshard.client.operations.catalogs import CatalogsQuery, list_catalogs

    return [(one.name, one.state) for one in list_catalogs(session, CatalogsQuery()).catalogs]


@_offers
def schedules(session: Session) -> Iterable[tuple[str, str]]:
    from reshard.client.operations.schedules import SchedulesQuery, list_schedules

    return [(one.name, one.cron) for one in list_schedules(session, SchedulesQuery(limit=OFFERED)).schedules]


@_offers
def workers(session: Session) -> Iterable[tuple[str, str]]:
    from reshard.client.operations.jobs import service

    return [(one.name, one.version) for one in service(session).processes if one.kind == "worker"]
