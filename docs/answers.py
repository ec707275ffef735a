"""Which documents each command may write with --json; docs/reference/json.md shows them, and tests hold them to it."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from reshard.client import SCHEMA
from reshard.client.models import audits, catalogs, fleet, jobs, plans

# What each command writes: one of these, or first any number of those on the way.
_FOLLOWED = (jobs.PlanMade, jobs.Event, jobs.Waits, jobs.JobDone)
_CATALOG_FOLLOWED = (jobs.Waits, jobs.ModelFailed, catalogs.Catalog)
ANSWERS: dict[str, tuple[Any, ...]] = {
    "plan": (plans.Planned,),
    "run": (jobs.PlanMade, jobs.Waits, jobs.Finished),
    "verify": (jobs.Verified,),
    "audit": (audits.Audit,),
    "provenance": (jobs.Provenance,),
    "doctor": (jobs.Installation, jobs.Repository, plans.LayoutHealth),
    "layout": (plans.Layout,),
    "advise": (plans.Advice,),
    "submit": (jobs.Submitted, *_FOLLOWED),
    "status": (jobs.JobNow, jobs.Service, jobs.JobReport),
    "list": (jobs.JobNow,),
    "watch": _FOLLOWED,
    "logs": (jobs.JobLog,),
    "cancel": (jobs.Cancelled, jobs.Acted),
    "retry": (jobs.Retried, jobs.Acted, *_FOLLOWED),
    "rollback": (jobs.RolledBack,),
    "delete": (jobs.Deleted,),
    "up": (fleet.Up,),
    "down": (fleet.Down,),
    "token": (fleet.Token,),
    "catalog check": (catalogs.CatalogChecked,),
    "catalog submit": (catalogs.CatalogSubmitted, *_CATALOG_FOLLOWED),
    "catalog watch": _CATALOG_FOLLOWED,
    "catalog status": (catalogs.Catalog,),
    "catalog failures": (catalogs.CatalogFailures,),
    "catalog retry": (catalogs.CatalogRetried,),
    "catalog pause": (catalogs.CatalogState,),
    "catalog resume": (catalogs.CatalogState,),
    "catalog cancel": (catalogs.CatalogCancelled,),
    "catalog remove": (catalogs.CatalogRemoved,),
    "schedule add": (catalogs.ScheduleNext,),
    "schedule set": (catalogs.ScheduleSet,),
    "schedule list": (catalogs.ScheduleRow,),
    "schedule show": (catalogs.Schedule,),
    "schedule next": (catalogs.ScheduleTimes,),
    "schedule run": (catalogs.ScheduleFired,),
    "schedule pause": (catalogs.ScheduleNext,),
    "schedule resume": (catalogs.ScheduleNext,),
    "schedule remove": (catalogs.ScheduleRemoved,),
    "fleet status": (fleet.Fleet,),
    "fleet pause": (fleet.FleetPaused,),
    "fleet resume": (fleet.FleetResumed,),
    "fleet drain": (fleet.Drained,),
    "fleet undrain": (fleet.Undrained,),
    "fleet limit": (fleet.FleetLimits,),
    "usage": (fleet.Usage,),
}


def check_document(command: str, line: str) -> dict[str, Any]:
    """The document without its version; raises ValueError unless the command may write it."""
    document: dict[str, Any] = json.loads(line)
    if document.pop("schema", None) != SCHEMA:
        raise ValueError(f"{command}: no schema {SCHEMA} in {line}")
    answer = json.dumps(document)
    problems = []
    for model in (*ANSWERS[command], jobs.Failed):
        try:
            model.model_validate_json(answer)
        except ValidationError as error:
            problems.append(error)
        else:
            return document
    closest = min(problems, key=lambda error: error.error_count())
    raise ValueError(f"`{command}` wrote what client/models does not have: {closest}\n{line}")
