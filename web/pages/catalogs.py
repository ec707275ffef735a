"""Catalogs with their nights and failures, and the form of one."""

from __future__ import annotations

from typing import Any

from reshard.client.catalog_report import markdown
from reshard.client.models.catalogs import Catalog, CatalogChecked, CatalogFile, CatalogWrong
from reshard.client.operations import catalogs as operations
from reshard.client.operations.table import read
from reshard.web.pages.forms import LIMITS, TEXT, Button, Form, as_typed, defaults, shown, submits
from reshard.web.pages.site import Call, Fields, Page, Reply, Text, act, page

GRID_MAX = 1000  # models of a grid; those that failed come first
TRIES, DOES = Button("Preview", "/new/catalogs"), Button("Submit", "/catalogs")
FORM = Form("catalog_form.html", "Submit a catalog", [TEXT, LIMITS], [], TRIES, DOES)


@page("GET", "/catalogs")
def catalogs(call: Call) -> Reply:
    return Page("catalogs.html", {"catalogs": operations.list_catalogs(call.session).catalogs})


@page("GET", "/new/catalogs")
def form(call: Call) -> Reply:
    return shown(FORM, file_of(call) or defaults(FORM))


def file_of(call: Call) -> dict[str, str]:
    """The fields of the catalog that the address names, if it does; raises CatalogNotFound."""
    if not (name := call.query.one("catalog")):
        return {}
    return text_of(operations.show_file(call.session, name))


def text_of(kept: CatalogFile) -> dict[str, str]:
    limits = {one.name: getattr(kept, one.name) for one in LIMITS}
    return {"text": kept.text} | {name: "" if value is None else str(value) for name, value in limits.items()}


@submits("/new/catalogs", lambda call: FORM)
def dry_run(call: Call) -> Reply:
    """What it would do now; nothing is queued."""
    found = operations.check_catalog(call.session, submission(call.body))
    return shown(FORM, as_typed(call.body), found=found, wrong=by_repo(found), closely=operations.CLOSELY)


@submits("/catalogs", lambda call: FORM)
def submit(call: Call) -> Reply:
    return f"/catalogs/{operations.submit_catalog(call.session, submission(call.body)).name}"


def submission(body: Fields) -> operations.Submission:
    """Raises BadBody."""
    sent = body.given(*(one.name for one in LIMITS))
    return read(operations.Submission, sent | {"text": body.text("text")}, "the form")


def by_repo(found: CatalogChecked) -> dict[str, CatalogWrong]:
    return {one.repo: one for one in found.wrong}


@page("GET", "/catalogs/{name}")
def catalog(call: Call) -> Reply:
    seen = operations.show_catalog(call.session, call.path["name"])
    grid = _grid(seen, call.queue.catalogs.nights(seen.name))
    return Page("catalog.html", {"seen": seen, "grid": grid, "may": seen.may()})


def _grid(seen: Catalog, nights: list[tuple[float, Any]]) -> dict[str, Any]:
    """A row for each model: what became of it in each night, the oldest first; those with trouble lately come first."""
    models = {repo for _, night in nights for repo in night} | {ended.repo for ended in seen.ended} | seen.active.keys()
    kept = [*reversed(nights)]
    rows = [(repo, [night.get(repo, ("", "")) for _, night in kept]) for repo in sorted(models)]
    rows.sort(key=lambda row: row[1][-1][0] not in {"failed", "cancelled"} if row[1] else True)
    return {"began": [began for began, _ in kept], "rows": rows[:GRID_MAX], "more": max(0, len(rows) - GRID_MAX)}


act(operations.pause_catalog, "/catalogs/{name}")
act(operations.resume_catalog, "/catalogs/{name}")
act(operations.cancel_catalog, "/catalogs/{name}")
act(operations.retry_catalog, "/catalogs/{name}")
act(operations.remove_catalog, "/catalogs", path="/catalogs/{name}/remove")


@page("GET", "/catalogs/{name}/report")
def report(call: Call) -> Reply:
    return Text(markdown(operations.show_catalog(call.session, call.path["name"])), f"{call.path['name']}.md")
