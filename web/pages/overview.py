"""What runs now, what waits, how the last day went, and what jobs took."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from reshard.client.models.catalogs import ScheduleRow
from reshard.client.models.jobs import BEGUN, OVER, Job
from reshard.client.operations import fleet as operations
from reshard.client.operations.catalogs import all_catalogs
from reshard.client.operations.jobs import JobsQuery, list_jobs
from reshard.client.operations.schedules import SchedulesQuery, list_schedules
from reshard.client.operations.table import pages, read
from reshard.client.queue import Day
from reshard.client.text import clock, count, human_bytes
from reshard.web.pages.charts import Chart, bars
from reshard.web.pages.site import Call, Page, Reply, act, page

SILENT = "not responding"  # of a worker that has work
_CHILD = re.compile(r"\.\d+$")  # the number that a worker's child has behind its name
RECENT = 8  # jobs that ended last
SPANS = (1, 7, 30, 365)  # days of usage
AT_WORK_MAX = 200  # jobs that are looked at for who copies what; progress is told of as many


@page("GET", "/")
def overview(call: Call) -> Reply:
    queue = call.queue
    begun = list_jobs(call.session, JobsQuery(state=BEGUN, limit=AT_WORK_MAX))
    seen, at_work = queue.fleet.seen(), _at_work(begun.jobs)
    claims = queue.fleet.claims_by_worker() if begun.next else {}  # else they are those of ``begun``
    workers = operations.workers(queue, seen, claims)
    gone = sorted((at_work.keys() | claims.keys()) - {worker.name for worker in workers})
    day = queue.day()
    failures: Counter[str] = Counter()
    for _, counted in day.hours:
        failures.update({name[7:]: number for name, number in counted.items() if name.startswith("failed:")})
    shown = {
        "fleet": operations.limits_of(seen),
        "workers": [
            *workers,
            *(_silent(name, claims) for name in gone),
        ],
        "at_work": at_work,
        "no_sign": SILENT,
        "silent": operations.silent(queue),
        "jobs": queue.jobs.counts(),
        "lanes": queue.lanes(),
        "failing": all_catalogs(call.session, failing=True),
        "unmet": _unmet(call),
        "charts": [*_charts(day.hours), *_budgets(day)],
        "failures": failures.most_common(),
        "recent": list_jobs(call.session, JobsQuery(state=OVER, limit=RECENT)).jobs,
    }
    return Page("overview.html", shown)


act(operations.pause_fleet, "/")
act(operations.resume_fleet, "/")
act(operations.drain, "/")
act(operations.undrain, "/")


def _silent(name: str, claims: Mapping[str, list[str]]) -> dict[str, Any]:
    return {"name": name, "state": SILENT, "concurrency": 0, "at": claims.get(name, [])}


def _unmet(call: Call) -> list[tuple[ScheduleRow, Any]]:
    """The schedules that failed or missed a time, each with the job of the last, where one is known."""
    found = pages(partial(list_schedules, call.session), SchedulesQuery(failing=True))
    rows = [row for page in found for row in page.schedules]
    # Of a time that was skipped the job is another's, which stood in the way.
    last = [row.runs[0].job or "" if row.runs and row.runs[0].outcome == "fired" else "" for row in rows]
    jobs = {job.id: job for job in call.queue.jobs.load([*filter(None, last)])}
    return [(row, jobs.get(id)) for row, id in zip(rows, last, strict=True)]


def _at_work(jobs: Sequence[Job]) -> dict[str, list[dict[str, Any]]]:
    """By worker: the units that it has, with their jobs."""
    found: dict[str, list[dict[str, Any]]] = {}
    for job in jobs:
        for claim in job.claims:
            found.setdefault(_CHILD.sub("", claim.worker), []).append({"job": job, "claim": claim})
    return found


def _charts(hours: list[tuple[float, dict[str, int]]]) -> list[Chart]:
    read = [(_hour(began), [("read", size, human_bytes(size))]) for began, of in hours for size in [of.get("read", 0)]]
    ended = [
        (_hour(began), [(state, n, f"{n} {state}") for state in sorted(OVER) if (n := of.get(f"ended:{state}", 0))])
        for began, of in hours
    ]
    size = sum(of.get("read", 0) for _, of in hours)
    number = sum(n for _, of in hours for name, n in of.items() if name.startswith("ended:"))
    return [
        bars("Read", f"{human_bytes(size)} of weights in 24 h", read),
        bars("Ended", f"{count(number, 'job')} in 24 h (a retried job counts each time)", ended),
    ]


def _budgets(day: Day) -> list[Chart]:
    """For each Hub and kind of call: the least that was left of a window's calls in each hour."""
    charts = []
    for (endpoint, kind), least in day.least.items():
        rows = [
            (_hour(began), [("left" if p >= 20 else "scarce", p, f"{p} % left")] if p is not None else [])
            for (began, _), p in zip(day.hours, least, strict=True)
        ]
        now_left = day.left.get((endpoint, kind))
        about = f"{now_left[0]:,} of {now_left[1]:,} left now" if now_left else "lowest percentage of calls left"
        charts.append(bars(f"{kind} calls to {endpoint.partition('://')[2] or endpoint}", about, rows, most=100))
    return charts


def _hour(moment: float) -> str:
    return clock(moment, "%H:00 UTC")


@page("GET", "/usage")
def usage(call: Call) -> Reply:
    query = read(operations.UsageQuery, call.query.given("by", "days"), "the address")
    return Page("usage.html", {"seen": operations.usage(call.session, query), "days": query.days, "spans": SPANS})
