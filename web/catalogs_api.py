"""The API's endpoints of catalogs and schedules."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from reshard.client import PAGE_MAX, acts
from reshard.client.facts import catalog_facts, failure_facts, schedule_facts, schedule_row
from reshard.client.models import catalogs
from reshard.pipeline.catalogs.definition import parse
from reshard.web.api import LISTED, Asked, allow
from reshard.web.endpoint import BODY_MAX, Body, Call, endpoint
from reshard.worker.followers.records import AT_ONCE, AT_ONCE_MAX, COUNT_MAX, NAME_MAX, Definition
from reshard.worker.followers.schedules import CRON_MAX, NAME, ZONE_MAX, Schedule
from reshard.worker.queue.jobs import PAGE_BYTES


class Submission(Body):
    """A catalog's file, with its limits."""

    most: ClassVar[int] = BODY_MAX
    text: str = Field(
        max_length=BODY_MAX, description="the YAML file", json_schema_extra={"contentMediaType": "application/yaml"}
    )
    at_once: int = Field(default=AT_ONCE, ge=1, le=AT_ONCE_MAX, description="how many of its jobs run at a time")
    max_failures: int | None = Field(default=None, ge=0, le=COUNT_MAX, description="stop after more failures than this")
    max_bytes: int | None = Field(
        default=None, ge=0, le=COUNT_MAX, description="stop after reading so many bytes of weights"
    )

    def definition(self, asked_by: str) -> Definition:
        """Raises BadCatalog."""
        parsed = parse(self.text, "the catalog")
        return Definition(name=parsed.name, asked_by=asked_by, **self.model_dump())


class Only(Body):
    only: str | None = Field(default=None, max_length=NAME_MAX, description="only failures with this error code")


def _only(name: str) -> dict[str, Any]:
    return {"required": [name], "properties": {name: {"type": "object"}}}


class Named(Body):
    limit: int = Field(default=LISTED, ge=1, le=PAGE_MAX)
    after: str = Field(default="", max_length=NAME_MAX, description="`next` of the page before")


class Kept(Body):
    """A request or a catalog, and when it is submitted."""

    most: ClassVar[int] = BODY_MAX
    model_config = ConfigDict(json_schema_extra={"oneOf": [_only("request"), _only("catalog")]})
    name: str = Field(max_length=NAME_MAX, pattern=f"^{NAME.pattern}$")
    cron: str = Field(
        max_length=CRON_MAX,
        json_schema_extra={"format": "cron"},
        description="minute hour day month weekday, or @daily",
    )
    tz: str = Field(default="UTC", max_length=ZONE_MAX, json_schema_extra={"format": "timezone"})
    missed: Literal["once", "skip"] = "once"
    request: Asked | None = None
    catalog: Submission | None = None


@endpoint("GET", "/catalogs", catalogs.Catalogs)
def list_catalogs(call: Call) -> Mapping[str, Any]:
    """List catalogs by name, each without its models."""
    every = call.queue.catalogs
    return {"catalogs": [catalog_facts(name, every.now(name)) for name in every.names()]}


@endpoint("POST", "/catalogs", catalogs.CatalogSubmitted, body=Submission)
def submit(call: Call) -> Mapping[str, Any]:
    """Queue the models of a catalog that changed."""
    return acts.submit_catalog(call.queue, call.body.definition(call.caller.name))


@endpoint("GET", "/catalogs/{name}", catalogs.Catalog)
def show(call: Call) -> Mapping[str, Any]:
    """Show a catalog's progress."""
    return call.queue.catalogs.get(call.path["name"]).to_dict()


@endpoint("GET", "/catalogs/{name}/failures", catalogs.CatalogFailures)
def failures(call: Call) -> Mapping[str, Any]:
    """Show failures by error code."""
    seen = call.queue.catalogs.get(call.path["name"])
    return {"name": call.path["name"], "failures": failure_facts(seen)}


@endpoint("POST", "/catalogs/{name}/pause", catalogs.CatalogState)
def pause(call: Call) -> Mapping[str, Any]:
    """Start no more models; those at work continue."""
    call.queue.catalogs.pause(call.path["name"])
    return {"name": call.path["name"], "state": "paused"}


@endpoint("POST", "/catalogs/{name}/resume", catalogs.CatalogState)
def resume(call: Call) -> Mapping[str, Any]:
    """Resume a catalog that was paused or stopped by a limit."""
    call.queue.catalogs.resume(call.path["name"])
    return {"name": call.path["name"], "state": call.queue.catalogs.now(call.path["name"]).shown}


@endpoint("POST", "/catalogs/{name}/cancel", catalogs.CatalogCancelled)
def cancel(call: Call) -> Mapping[str, Any]:
    """Start no more models, and cancel those at work."""
    return {"name": call.path["name"], "state": "cancelled", "jobs": call.queue.catalogs.cancel(call.path["name"])}


@endpoint("POST", "/catalogs/{name}/retry", catalogs.CatalogRetried, body=Only)
def retry(call: Call) -> Mapping[str, Any]:
    """Retry failed models with what they had copied; `left` are those that only the file can correct."""
    return acts.retry_catalog(call.queue, call.path["name"], call.body.only)


@endpoint("DELETE", "/catalogs/{name}", catalogs.CatalogRemoved)
def remove(call: Call) -> Mapping[str, Any]:
    """Remove a catalog that has ended; its targets and jobs stay."""
    return acts.remove_catalog(call.queue, call.path["name"])


@endpoint("GET", "/schedules", catalogs.Schedules, query=Named)
def list_schedules(call: Call) -> Mapping[str, Any]:
    """List schedules by name, without the text of catalogs; fewer than `limit` where they are long."""
    rows, size = list[dict[str, Any]](), 0
    for seen in call.queue.schedules.each(call.query.after):
        row = schedule_row(call.queue, seen)
        size += len(json.dumps(row))
        if rows and (len(rows) == call.query.limit or size > PAGE_BYTES):
            return {"schedules": rows, "next": rows[-1]["name"]}
        rows.append(row)
    return {"schedules": rows, "next": None}


@endpoint("POST", "/schedules", catalogs.ScheduleNext, body=Kept)
def add_schedule(call: Call) -> Mapping[str, Any]:
    """Submit a request, or a catalog, at regular times."""
    kept: Kept = call.body
    request = kept.request.request(call.caller.name) if kept.request else None
    if request is not None:
        allow(request, call.settings)
    catalog = kept.catalog.definition(call.caller.name) if kept.catalog else None
    schedule = Schedule(
        name=kept.name, cron=kept.cron, tz=kept.tz, missed=kept.missed, request=request, catalog=catalog
    )
    return {"name": kept.name, "next": call.queue.schedules.add(schedule)}


@endpoint("GET", "/schedules/{name}", catalogs.Schedule)
def show_schedule(call: Call) -> Mapping[str, Any]:
    """Show a schedule and its last runs."""
    return schedule_facts(call.queue, call.queue.schedules.get(call.path["name"]))


@endpoint("POST", "/schedules/{name}/run", catalogs.ScheduleFired)
def run(call: Call) -> Mapping[str, Any]:
    """Fire a schedule now, in addition to its times."""
    done = call.queue.schedules.run(call.path["name"])
    return {"name": call.path["name"], "outcome": done.outcome, "job": done.job, "waits": call.queue.waits(bulk=True)}


@endpoint("POST", "/schedules/{name}/pause", catalogs.ScheduleNext)
def pause_schedule(call: Call) -> Mapping[str, Any]:
    """Pause a schedule; a job that it fired continues."""
    call.queue.schedules.pause(call.path["name"])
    return {"name": call.path["name"], "next": None}


@endpoint("POST", "/schedules/{name}/resume", catalogs.ScheduleNext)
def resume_schedule(call: Call) -> Mapping[str, Any]:
    """Resume a paused schedule."""
    return {"name": call.path["name"], "next": call.queue.schedules.resume(call.path["name"])}


@endpoint("DELETE", "/schedules/{name}", catalogs.ScheduleRemoved)
def remove_schedule(call: Call) -> Mapping[str, Any]:
    """Remove a schedule; a job that it fired continues."""
    call.queue.schedules.remove(call.path["name"])
    return {"name": call.path["name"], "removed": True}
