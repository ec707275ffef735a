"""A Hub that the operator does not list is refused when it is submitted, where the service knows the list."""

from __future__ import annotations

from typing import cast

import pytest

from reshard.client.operations.catalogs import Submission, submit_catalog
from reshard.client.operations.jobs import Drafted, JobRequest, submit
from reshard.client.operations.schedules import Kept, add_schedule, set_catalog
from reshard.client.queue import Queue
from reshard.client.served import Served
from reshard.pipeline.errors import EndpointNotAllowed, SourceNotAllowed
from reshard.pipeline.places import Hub
from reshard.pipeline.request import Options, Request
from reshard.pipeline.sizes import parse_size
from reshard.worker.queue.jobs import JobStore
from reshard.worker.settings import Settings

NONE = cast(Queue, None)  # nothing is queued here
OURS, OTHER = "https://hub.example", "https://elsewhere.example"


def ask(source: str | None = None, target: str | None = None, config: str | None = None) -> Request:
    options = Options(config_from=Hub(repo="them/c", endpoint=config))
    return Request(source=Hub(repo="a/b", endpoint=source), target=Hub(repo="us/b", endpoint=target), options=options)


@pytest.mark.parametrize("where", ["source", "target", "config"])
def test_a_hub_outside_the_list_is_refused_at_submit(where: str) -> None:
    service = Served(NONE, Settings(allowed_endpoints=(f"{OURS}/",)), "me")
    with pytest.raises(EndpointNotAllowed, match=OTHER):
        service.allow(ask(**{where: OTHER}))
    service.allow(ask(**{where: OURS}))
    service.allow(ask(**{where: f"{OURS}/"}))
    service.allow(ask())
    Served(NONE, Settings(), "me").allow(ask(**{where: OTHER}))  # the worker knows whose credentials it has


@pytest.mark.parametrize("source", ["s3://acme/models/x", "hf://buckets/acme/b/x", "acme/model"])
def test_a_plan_without_a_target_is_refused_for_its_source_alone(source: str) -> None:
    request = Drafted(source=source).request("me")
    allowed = Settings(allowed_sources=("s3://acme/models", "hf://buckets/acme/b", "acme"), allowed_targets=("us",))
    Served(NONE, allowed, "me").allow(request, has_target=False)
    with pytest.raises(SourceNotAllowed):
        Served(NONE, Settings(allowed_sources=("them",)), "me").allow(request, has_target=False)


CATALOG = "name: nightly\ndefaults: {to: 'acme/{name}'}\nentries:\n  - repo: them/model\n"
ASKED = {
    "submit": lambda session, body: session.perform(submit_catalog, body),
    "schedule": lambda session, body: session.perform(add_schedule, Kept(name="one", cron="@daily", catalog=body)),
    "set": lambda session, body: session.perform(set_catalog, "other", body),
}


@pytest.mark.parametrize(
    "named",
    [
        f"    endpoint: {OTHER}/\n",
        f"    to_endpoint: {OTHER}\n",
        f"    to: '{OTHER}/acme/{{name}}'\n",
        f"  - repo: {OTHER}/them/other\n",
        f"  - query: {{author: them}}\n    endpoint: {OTHER}\n",
    ],
)
@pytest.mark.parametrize("how", ASKED)
def test_a_catalog_that_names_a_hub_outside_the_list_is_not_taken(how: str, named: str, store: JobStore) -> None:
    queue = Queue(store)
    service = Served(queue, Settings(allowed_endpoints=(OURS,)), "me")
    service.perform(add_schedule, Kept(name="other", cron="@daily", catalog=Submission(text=CATALOG)))
    kept = queue.schedules.get("other")
    with pytest.raises(EndpointNotAllowed, match=OTHER):
        ASKED[how](service, Submission(text=CATALOG + named))
    assert (queue.catalogs.names(), queue.schedules.names()) == ([], ["other"])
    assert queue.schedules.get("other") == kept
    ASKED[how](service, Submission(text=CATALOG + named.replace(OTHER, OURS)))


@pytest.mark.parametrize("to", ["s3://bucket/{name}", "hf://buckets/acme/{name}", f"{OURS}/{{name}}", "{name}"])
def test_a_target_that_is_no_repository_is_told_where_the_catalog_is_expanded(to: str, store: JobStore) -> None:
    service = Served(Queue(store), Settings(allowed_endpoints=(OURS,)), "me")
    service.perform(submit_catalog, Submission(text=CATALOG.replace("acme/{name}", to)))
    assert Queue(store).catalogs.names() == ["nightly"]


def test_a_job_at_a_hub_outside_the_list_is_not_queued(store: JobStore) -> None:
    service = Served(Queue(store), Settings(allowed_endpoints=(OURS,)), "me")
    with pytest.raises(EndpointNotAllowed, match=OTHER):
        service.perform(submit, JobRequest.of(ask(source=OTHER)))
    assert store.recent() == []


def test_a_size_may_have_a_space_before_its_unit() -> None:
    assert parse_size("200 MB") == parse_size("200MB") == Options(size="200 MB").size
