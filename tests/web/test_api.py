"""The API of a real process: every answer is one of the documents, and only those who may do anything."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from reshard.client.models import catalogs, fleet, jobs
from reshard.pipeline.errors import UsageError
from reshard.pipeline.places import Hub
from reshard.pipeline.request import Request
from reshard.web.documents import failed
from reshard.worker.queue.jobs import JobStore
from tests.web.conftest import ROOT, Site

JOBS = "/api/v1/jobs"
BODY = {"source": "a/model", "target": "b/model", "options": {"size": "200MB"}}


def held(model: Any, document: dict[str, Any]) -> dict[str, Any]:
    """The document, which is one of the model."""
    model.model_validate_json(json.dumps(document))
    return document


def test_a_job_is_submitted_shown_and_cancelled(site: Site, store: JobStore) -> None:
    made = held(jobs.Submitted, site.post(JOBS, BODY))
    assert not made["existed"] and site.post(JOBS, BODY)["existed"]
    job = held(jobs.JobNow, site.get(f"{JOBS}/{made['id']}"))
    assert job["request"]["asked_by"] == "acter" and job["request"]["options"]["size"] == 200_000_000
    listed = held(jobs.JobsPage, site.get(JOBS))
    assert [one["id"] for one in listed["jobs"]] == [made["id"]] and listed["next"] is None
    held(jobs.Service, site.get("/api/v1/service"))
    held(fleet.Fleet, site.get("/api/v1/fleet"))
    assert held(jobs.Cancelled, site.post(f"{JOBS}/{made['id'][:6]}/cancel"))["was"] == "queued"
    assert held(jobs.Retried, site.post(f"{JOBS}/{made['id']}/retry", {}))["was"] == "cancelled"


def test_pages_of_the_list_hold_every_job_once(site: Site, store: JobStore) -> None:
    ids = [store.submit(Request(source=Hub(repo="a/b"), target=Hub(repo=f"c/{n}"))).id for n in range(25)]
    found, path = list[str](), f"{JOBS}?limit=10&state=queued"
    while path:
        page = site.get(path)
        found += [job["id"] for job in page["jobs"]]
        path = f"{JOBS}?limit=10&state=queued&after={page['next']}" if page["next"] else ""
    assert sorted(found) == sorted(ids) and len(found) == 25


@pytest.mark.parametrize(
    ("scope", "path", "status", "code"),
    [
        (None, JOBS, 401, "access.sign_in"),
        ("read", JOBS, 403, "access.scope"),
    ],
)
def test_who_may_not_is_refused(site: Site, scope: str | None, path: str, status: int, code: str) -> None:
    with site.client(scope) as client:
        refused = client.post(path, json=BODY)
    assert refused.status_code == status and refused.json()["error"]["code"] == code


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("jobs", {"source": "a/b", "target": "c/d@main"}, "a target cannot have a revision"),
        ("jobs", {"source": "a/b", "target": "c/d", "options": {"branch": "x", "pr": True}}, "cannot be used together"),
        ("jobs/delete", {"jobs": ["abc"], "state": ["done"]}, "IDs cannot be combined with a filter"),
        ("jobs/cancel", {"jobs": ["abc"], "all": True}, "IDs cannot be combined with a filter"),
        ("jobs/retry", {"jobs": ["abc"], "age": 1}, "IDs cannot be combined with a filter"),
        ("jobs/cancel", {"state": ["queued"], "target": ""}, "target: "),  # of an unset variable: not every target
    ],
)
def test_what_no_command_takes_is_refused(
    site: Site, store: JobStore, path: str, body: dict[str, Any], why: str
) -> None:
    with site.client() as client:
        refused = client.post(f"{ROOT}/{path}", json=body)
    assert refused.status_code == 400 and why in refused.json()["error"]["message"]
    assert store.recent() == []


def test_an_error_names_the_fields_of_a_request(site: Site) -> None:
    with site.client("act") as client:
        refused = client.post(f"{ROOT}/jobs", json=BODY | {"options": {"size": "100"}}).json()["error"]
    assert refused["code"] == "usage.size" and refused["message"].startswith("options.size 100: ")
    assert refused["facts"]["option"] == "--size", "a command that asked tells it by its option"
    none = failed(UsageError(what="--dtype float16 and --no-manifest: leave out --for, use --json")).body
    error = json.loads(none)["error"]
    assert error["message"] == "options.dtype float16 and options.manifest false: leave out options.ranks, use --json"
    assert error["hint"] == "see /api/v1/openapi.json"


def test_what_is_no_id_of_an_event_is_refused(site: Site, store: JobStore) -> None:
    with site.client() as client:
        job = client.post(JOBS, json=BODY).json()["id"]
        for wrong in ("\u0661", "x"):
            assert client.get(f"{JOBS}/{job}/changes", params={"after": wrong}).status_code == 400


def test_the_openapi_document_has_every_endpoint(site: Site) -> None:
    document = openapi(site)
    assert document["openapi"] == "3.1.0" and "/api/v1/jobs/{job}/cancel" in document["paths"]
    assert catalogs.Catalog.__name__ in document["components"]["schemas"]
    ids = [one["operationId"] for path in document["paths"].values() for one in path.values()]
    assert len({*ids}) == len(ids)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("post", JOBS, BODY | {"source": {"kind": "folder", "path": "/models/one"}}),
        ("post", JOBS, BODY),
        ("get", JOBS, None),
        ("get", f"{JOBS}/{{job}}", None),
        ("get", f"{JOBS}/{{job}}/changes", None),
        ("get", f"{JOBS}/{{job}}/plan", None),
        ("get", f"{JOBS}/{{job}}/files", None),
        ("get", f"{JOBS}/{{job}}/log", None),
        ("post", f"{JOBS}/{{job}}/retry", {"anew": True}),
        ("get", "/api/v1/service", None),
        ("get", "/api/v1/fleet", None),
        ("post", "/api/v1/schedules", {"name": "nightly", "cron": "@daily", "request": BODY}),
        ("get", "/api/v1/schedules", None),
    ],
)
def test_what_is_taken_and_answered_is_as_the_openapi_document_says(
    site: Site, store: JobStore, method: str, path: str, body: Any
) -> None:
    job = store.submit(Request(source=Hub(repo="a/model"), target=Hub(repo="c/model"))).id
    document = openapi(site)
    operation = document["paths"][path][method]
    with site.client() as client:
        response = client.request(method, path.format(job=job), json=body)
    told = operation["responses"]["200" if response.status_code == 200 else "default"]
    checked = [(told, response.json())] + ([(operation["requestBody"], body)] if body else [])
    for one, data in checked:
        schema = one["content"]["application/json"]["schema"] | {"components": document["components"]}
        Draft202012Validator(schema).validate(data)


def openapi(site: Site) -> Any:
    with site.client("read") as client:
        return client.get("/api/v1/openapi.json").json()


def test_a_catalog_is_listed_and_a_retry_names_a_code_that_some_model_failed_with(site: Site, store: JobStore) -> None:
    text = "name: mirror\ndefaults: {to: 'you/{name}-c', size: 10kB}\nentries:\n- repo: them/model\n"
    held(catalogs.CatalogSubmitted, site.post("/api/v1/catalogs", {"text": text}))
    (listed,) = held(catalogs.Catalogs, site.get("/api/v1/catalogs"))["catalogs"]
    assert (listed["name"], listed["state"]) == ("mirror", "expanding")
    with site.client() as client:
        refused = client.post("/api/v1/catalogs/mirror/retry", json={"only": "no.such"})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "usage.only"


def test_no_jobs_and_a_filter_are_refused_as_the_openapi_document_says(site: Site, store: JobStore) -> None:
    job = site.post(JOBS, BODY)["id"]
    with site.client("act") as client:
        for act in ("cancel", "retry", "delete"):
            refused = client.post(f"{JOBS}/{act}", json={"jobs": [], "all": True})
            assert refused.status_code == 400 and refused.json()["error"]["code"] == UsageError.code
    assert site.post(f"{JOBS}/cancel", {"jobs": []})["ids"] == []
    assert store.get(job).state == "queued"
