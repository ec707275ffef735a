"""Catalogs with their nights and failures, and the form of one."""

from __future__ import annotations

from functools import partial
from typing import Any
from urllib.parse import urlencode

from reshard.client.catalog_report import markdown
from reshard.client.models.catalogs import Catalog, CatalogChecked, CatalogFile, CatalogWrong, Ended, dropped
from reshard.client.operations import catalogs as operations
from reshard.client.operations.table import pages, read
from reshard.web.pages.forms import LIMITS, TEXT, Button, Form, as_typed, defaults, shown, submits
from reshard.web.pages.site import Call, Fields, Page, Reply, Text, act, page

GRID_MAX = 1000  # models of a grid; those that failed come first
FAILURES_SHOWN = 100  # of one error code
TRIES, DOES = Button("Preview", "/new/catalogs"), Button("Submit", "/catalogs")
FORM = Form("catalog_form.html", "Submit a catalog", [TEXT, LIMITS], [], TRIES, DOES)


@page("GET", "/catalogs")
def catalogs(call: Call) -> Reply:
    after = call.query.one("after")
    found = operations.list_catalogs(call.session, read(operations.CatalogsQuery, {"after": after}, "the address"))
    more = urlencode({"after": found.next}) if found.next else ""
    return Page("catalogs.html", {"catalogs": found.catalogs, "after": after, "more": more})


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
    failures, ended = dict[str, list[Ended]](), set[str]()
    for seen in pages(partial(operations.show_catalog, call.session, call.path["name"]), operations.FIRST):
        ended.update(one.repo for one in seen.ended[: max(0, GRID_MAX - len(ended))])
        for code, group in seen.failures().items():
            some = failures.setdefault(code, [])
            some += group[: FAILURES_SHOWN - len(some)]
    grid = _grid(seen, ended, call.queue.catalogs.nights(seen.name))
    by_code = {code: failures[code] for code in seen.failed() if code in failures}
    shown_ = {"dropped": dropped(seen, seen.running), "may": seen.may(), "failures": by_code}
    return Page("catalog.html", {"seen": seen, "grid": grid, **shown_})


def _grid(seen: Catalog, ended: set[str], nights: list[tuple[float, Any]]) -> dict[str, Any]:
    """A row for each model: what became of it in each night, the oldest first; those with trouble lately come first."""
    models = {repo for _, night in nights for repo in night} | ended | seen.active.keys()
    kept = [*reversed(nights)]
    rows = [(repo, [night.get(repo, ("", "")) for _, night in kept]) for repo in sorted(models)]
    rows.sort(key=lambda row: row[1][-1][0] not in {"failed", "cancelled"} if row[1] else True)
    there = sum(number for what, number in seen.counts.items() if ":" not in what) + len(seen.active)
    more = max(len(rows), there) - GRID_MAX
    return {"began": [began for began, _ in kept], "rows": rows[:GRID_MAX], "more": max(0, more)}


act(operations.pause_catalog, "/catalogs/{name}")
act(operations.resume_catalog, "/catalogs/{name}")
act(operations.cancel_catalog, "/catalogs/{name}")
act(operations.retry_catalog, "/catalogs/{name}")
act(operations.remove_catalog, "/catalogs", path="/catalogs/{name}/remove")


@page("GET", "/catalogs/{name}/report")
def report(call: Call) -> Reply:
    return Text(markdown(operations.whole_catalog(call.session, call.path["name"])), f"{call.path['name']}.md")
