"""Traces: a real receiver of OTLP over HTTP, fed by a real worker and control; and nothing where none is asked for."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from reshard.pipeline.errors import BadSetting, ExtraMissing
from reshard.pipeline.stores.observed import Call
from reshard.worker import local, tracing
from reshard.worker.queue.events import Event
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Leases
from reshard.worker.queue.states import JobState
from reshard.worker.settings import Settings
from tests.support.procs import wait_for
from tests.worker.conftest import ask, claimed, followed
from tests.worker.sites import SIZE, Site, site

__all__ = ["site"]

NEVER = "3600000"  # ms between two exports: what comes was sent at the end of a process
STEPS = {"plan": 1, "check": 1, "group": 4, "publish": 1, "confirm": 1}


class Receiver(ThreadingHTTPServer):
    """Keeps the spans that it is sent; answers none while it is held."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.asked = threading.Semaphore(0)  # released by each request
        self.answers = threading.Event()
        self.answers.set()
        self.status = 200
        self.bodies: list[bytes] = []
        threading.Thread(target=self.serve_forever, args=[0.01], daemon=True).start()

    def sent(self) -> list[tuple[dict[str, Any], Span]]:
        """Each span with its resource."""
        found = []
        for body in self.bodies:
            for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                resource = values(of_resource.resource.attributes)
                found += [(resource, span) for scope in of_resource.scope_spans for span in scope.spans]
        return found

    def spans(self) -> list[Span]:
        return [span for _, span in self.sent()]


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.path == "/v1/traces"
        self.server.asked.release()
        self.server.answers.wait()
        self.server.bodies.append(body)
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(autouse=True)
def _nothing_asked_for(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever the environment of whoever runs the tests asks for."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    tracing.spans.cache_clear()
    yield
    tracing.spans.cache_clear()


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """Where this process and those that it starts send traces to."""
    with Receiver() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", NEVER)
        yield running
        running.answers.set()
        running.shutdown()


def values(attributes: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in attributes}


def below(spans: list[Span], parent: Span) -> list[Span]:
    return sorted((s for s in spans if s.parent_span_id == parent.span_id), key=lambda s: s.start_time_unix_nano)


def roots(spans: list[Span]) -> list[Span]:
    return sorted((s for s in spans if not s.parent_span_id), key=lambda s: s.start_time_unix_nano)


def stop(site: Site) -> None:
    """Worker and control end, and with them what they have not sent yet is sent."""
    for process in reversed(site.machine.processes):
        process.terminate()
    assert [process.wait(60) for process in site.machine.processes] == [0] * len(site.machine.processes)


@pytest.fixture
def traced(receiver: Receiver, site: Site) -> Site:
    return site


def test_a_job_is_one_trace_with_a_span_a_step_and_the_calls_of_the_hub_below(traced: Site, receiver: Receiver) -> None:
    worker = traced.machine.worker(concurrency=2, RESHARD_LOG_FORMAT="json")
    traced.space.admin.log(reset=True)
    job = traced.submit(transport="http")
    seen = traced.ended(job)
    assert seen.state == JobState.done, seen.error
    asked = traced.space.admin.log()
    stop(traced)

    spans = receiver.spans()
    assert {span.trace_id for span in spans} == {spans[0].trace_id}
    (root,) = roots(spans)
    steps = below(spans, root)
    assert Counter(step.name for step in steps) == STEPS
    assert len(spans) == 1 + len(steps) + sum(len(below(spans, step)) for step in steps)
    assert {span.status.code for span in spans} == {Status.STATUS_CODE_UNSET}, "also of a 404, that the target is new"

    told = values(root.attributes)
    assert root.name == "job" and told["reshard.job"] == job and told["reshard.state"] == "done"
    assert told["reshard.bytes"] == seen.bytes and told["reshard.commit"] == (seen.published or {})["commit"]
    assert root.start_time_unix_nano == round(seen.created * 1000) * 1_000_000
    assert root.end_time_unix_nano == round(seen.since * 1000) * 1_000_000
    for step in steps:
        facts = values(step.attributes)
        assert facts["reshard.job"] == job and facts["reshard.attempt"] == 1
        assert facts["reshard.unit"].partition(":")[0] == step.name
    read = sum(values(step.attributes)["reshard.bytes"] for step in steps)
    assert read == seen.read > 2_000_000

    calls = [(step, call) for step in steps for call in below(spans, step)]
    assert {step.name for step, _ in calls} == STEPS.keys()
    assert all(step.start_time_unix_nano <= call.start_time_unix_nano for step, call in calls)
    assert all(call.kind == Span.SPAN_KIND_CLIENT for _, call in calls)
    facts_of_calls = [values(call.attributes) for _, call in calls]
    assert [call.name for _, call in calls] == [facts["http.request.method"] for facts in facts_of_calls]
    assert 404 in {facts["http.response.status_code"] for facts in facts_of_calls}
    own = [facts for facts in facts_of_calls if facts["server.address"] in traced.space.endpoint]
    assert sorted(map(known_of_call, own)) == sorted(
        (f"hub-{entry['n']}", entry["method"], entry["path"].partition("?")[0], entry["status"], entry["down"])
        for entry in asked
        if not entry["path"].startswith("/_")
    )
    elsewhere = [facts for facts in facts_of_calls if facts not in own]
    assert not any("url.path" in facts or "reshard.request_id" in facts for facts in elsewhere)
    assert Counter(known_of_call(facts)[1:] for facts in elsewhere) == Counter(
        (entry["method"], "", entry["status"], entry["down"]) for entry in asked if entry["path"].startswith("/_")
    )

    resources = [resource for resource, _ in receiver.sent()]
    assert {resource["service.name"] for resource in resources} == {"reshard"}
    assert any("signature=" in entry["path"] for entry in asked)
    sent = b"".join(receiver.bodies)
    for secret in (traced.space.token, "signature=", "Bearer", traced.broker.url.split("@")[0].rpartition(":")[2]):
        assert secret.encode() not in sent

    lines = [json.loads(line) for line in worker.said().splitlines()]
    named = {line["span_id"]: (line["trace_id"], line["unit"]) for line in lines if "span_id" in line}
    assert named == {
        step.span_id.hex(): (root.trace_id.hex(), values(step.attributes)["reshard.unit"]) for step in steps
    }
    assert all("span_id" in line for line in lines if "unit" in line)


def known_of_call(facts: dict[str, Any]) -> tuple[str, str, str, int, int]:
    """The Hub's id, method, path, status and bytes of an answer."""
    names = "http.request.method", "url.path", "http.response.status_code", "http.response.body.size"
    method, path, status, size = (facts.get(name, "") for name in names)
    return facts.get("reshard.request_id", ""), method, path, status, size


def test_a_job_that_fails_has_its_error_in_each_span_and_its_retry_a_root_in_the_same_trace(
    traced: Site, receiver: Receiver
) -> None:
    traced.machine.worker(concurrency=1)
    traced.source = traced.space.repo("nothing")
    job = traced.submit()
    assert traced.ended(job).state == JobState.failed
    traced.store.retry(job)
    assert (traced.ended(job).error or {})["code"] == "source.not_found"
    control = traced.machine.processes[0]
    wait_for(lambda: control.said().count(f"job {job} failed") == 2, "control's hearing of both ends")
    stop(traced)

    spans = receiver.spans()
    assert len({span.trace_id for span in spans}) == 1
    first, second = roots(spans)
    assert first.end_time_unix_nano <= second.start_time_unix_nano
    for root in (first, second):
        (plan,) = below(spans, root)
        call = below(spans, plan)[-1]
        for span in (root, plan, call):
            assert span.status.code == Status.STATUS_CODE_ERROR
        assert [values(span.attributes)["error.type"] for span in (root, plan, call)] == [
            "source.not_found", "source.not_found", "404",
        ]  # fmt: skip
        ids = {values(span.attributes)["reshard.request_id"] for span in (root, plan, call)}
        assert len(ids) == 1 and ids.pop().startswith("hub-")
        assert "nothing" in plan.status.message


def test_a_worker_that_is_signalled_as_a_whole_sends_the_span_of_the_step_that_it_hands_back(
    traced: Site, receiver: Receiver
) -> None:
    worker, job = traced.copier()
    worker.signal_all(signal.SIGTERM)
    worker.wait(60)
    stopped = [step for step in receiver.spans() if "reshard.stopped" in values(step.attributes)]
    assert stopped and {step.name for step in stopped} == {"group"}
    assert {values(step.attributes)["reshard.stopped"] for step in stopped} == {"drain"}
    assert {values(step.attributes)["reshard.job"] for step in stopped} == {job}


@pytest.mark.slow
def test_a_receiver_that_hangs_holds_up_neither_a_job_nor_the_end_of_a_worker(
    receiver: Receiver, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
    receiver.answers.clear()
    hung: Site = request.getfixturevalue("site")
    worker = hung.machine.worker(concurrency=1)
    first = hung.submit("first", size=SIZE)
    receiver.asked.acquire()
    hung.assert_published_once(first, "first")
    hung.assert_published_once(hung.submit("second"), "second")
    stop(hung)
    assert receiver.bodies == [], "nothing was answered all the while"
    assert re.search(r"(\d+) of \1 spans of this process were not delivered", worker.said())


def test_a_process_that_ends_does_not_wait_until_a_receiver_has_answered(
    receiver: Receiver, store: JobStore, leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reshard.worker.spans.FLUSH", 0.01)
    receiver.answers.clear()
    with tracing.step(claimed(leases, store.submit(ask()).id, "plan")):
        pass
    tracing.end()
    assert [thread for thread in threading.enumerate() if thread.name == "reshard-last-spans"], "it still tries"


@pytest.mark.slow
def test_where_no_traces_are_asked_for_no_process_imports_more_of_it_than_redis_py_does_by_itself(site: Site) -> None:
    script = "import sys, redis; print(*(name for name in sys.modules if name.startswith('opentelemetry')))"
    by_redis = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    site.machine.processes[0].kill()
    control = site.machine.control(PYTHONPROFILEIMPORTTIME="1")
    worker = site.machine.worker(concurrency=1, PYTHONPROFILEIMPORTTIME="1")
    site.assert_published_once(site.submit())
    for process, name in ((worker, "hf_xet"), (control, "prometheus_client")):  # a child alone imports hf_xet
        process.terminate()
        process.wait(60)
        imported = set(re.findall(r"^import time: .*\| +(\S+)$", process.said(), re.MULTILINE))
        assert {"reshard.worker.tracing", name} <= imported
        assert {name for name in imported if name.startswith(("opentelemetry", "reshard.worker.spans"))} <= {*by_redis}


CALL = Call(1, 2, {"http.request.method": "GET"})


def test_spans_that_find_the_queue_full_are_dropped_and_counted(
    receiver: Receiver,
    store: JobStore,
    leases: Leases,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    receiver.answers.clear()
    lease = claimed(leases, store.submit(ask()).id, "plan")
    with tracing.step(lease):
        observe = tracing.observer()
        assert observe is not None
        for _ in range(4):
            observe(CALL)
        receiver.asked.acquire()  # these four are on their way, and the next four fill the queue
        for _ in range(20):
            observe(CALL)
    receiver.answers.set()
    tracing.end()
    assert len(receiver.spans()) == 8
    assert "17 of 25 spans of this process were not delivered" in caplog.text


def test_spans_that_a_receiver_refuses_are_counted(
    receiver: Receiver, store: JobStore, leases: Leases, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.status = 403
    with tracing.step(claimed(leases, store.submit(ask()).id, "plan")):
        pass
    tracing.end()
    assert len(receiver.bodies) == 1, "it is not tried again"
    assert re.search("Failed to export spans? batch code: 403", caplog.text)
    assert "1 of 1 spans of this process were not delivered" in caplog.text


def test_a_value_that_opentelemetry_refuses_costs_the_traces_and_no_job(
    receiver: Receiver,
    store: JobStore,
    leases: Leases,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    with tracing.step(claimed(leases, store.submit(ask()).id, "plan")) as names:
        assert names == {} and tracing.observer() is None
    assert "this process sends no traces: max_export_batch_size" in caplog.text


def test_headers_that_cannot_be_read_are_not_logged(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization: s3cret")
    assert tracing.spans() is not None
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize(("sampler", "sent"), [("always_on", 2), ("always_off", 0), ("parentbased_always_off", 0)])
def test_a_sampler_takes_a_whole_job_or_nothing_of_it(
    receiver: Receiver, store: JobStore, leases: Leases, monkeypatch: pytest.MonkeyPatch, sampler: str, sent: int
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    job = store.submit(ask()).id
    with tracing.step(claimed(leases, job, "plan")):
        store.cancel(job)
    followed(store)
    tracing.end()
    assert [span.name for span in receiver.spans()] == ["plan", "job"][:sent]


def test_an_end_that_does_not_say_when_it_was_asked_for_has_no_span(receiver: Receiver) -> None:
    tracing.job_ended(Event("1-0", "ended", 5, {"job": "j", "state": "done", "error": ""}), {"job": "j"})
    tracing.end()
    assert receiver.bodies == []


@pytest.mark.parametrize(
    ("environment", "on"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://h"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://h"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://h"}, False),
        ({"OTEL_SDK_DISABLED": "TRUE", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://h"}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, True),
    ],
)
def test_the_variables_of_opentelemetry_ask_for_traces(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], on: bool
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert tracing.wanted() is on


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_TRACES_EXPORTER", "console"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
    ],
)
def test_a_way_of_sending_that_is_not_ours_is_refused_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, value: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv(name, value)
    with pytest.raises(BadSetting, match=f"{name}={value}"):
        local.up(Settings(data_dir=tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("missing", ["opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http"])
def test_without_opentelemetry_nothing_is_started_and_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str
) -> None:
    for module in [name for name in sys.modules if name.startswith((missing, "reshard.worker.spans"))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, missing, None)
    tracing.check()
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    with pytest.raises(ExtraMissing, match=r"opentelemetry.* is not installed \(required by OTEL_") as error:
        local.up(Settings(data_dir=tmp_path))
    assert "[otel]" in error.value.next_step
    assert list(tmp_path.iterdir()) == []
