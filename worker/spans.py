"""The spans of a job: its root from the submit to the end, a child of it for each step, and each call of a step below.

A job's steps run in many processes and its end comes hours later, so no process hands a trace to the next: its id is a
digest of the job's, and the id of its root of that and of when the job was asked for. So every step knows its parent
before there is one. A retry goes on in the same trace below a root of its own.

Spans wait in a queue of OpenTelemetry's (``OTEL_BSP_MAX_QUEUE_SIZE``), which a thread sends; those that find it full
push out the oldest. So a receiver that is slow or away costs spans, and no job waits for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from importlib.metadata import version
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    format_span_id,
    format_trace_id,
    set_span_in_context,
)

from reshard.pipeline.errors import ReshardError
from reshard.pipeline.stores.observed import Call
from reshard.worker.queue.events import Event
from reshard.worker.queue.leases import Lease

log = logging.getLogger(__name__)

FLUSH = 2.0  # seconds for what is left at the end of a process; with a drain of 25 it stays below an orchestrator's 30
MS = 1_000_000  # ns


class Spans:
    """Of one process, which is at one step at a time."""

    def __init__(self) -> None:
        # Its warnings about headers that it cannot read show them, and they hold tokens.
        logging.getLogger("opentelemetry.util.re").setLevel(logging.ERROR)
        ours = Resource({SERVICE_NAME: "reshard", SERVICE_VERSION: version("reshard")})
        self._ids = _Ids()
        self._exporter = _Exporter()
        self._queue = _Queue(self._exporter)
        self._provider = TracerProvider(
            resource=ours.merge(OTELResourceDetector().detect()), id_generator=self._ids, shutdown_on_exit=False
        )
        self._provider.add_span_processor(self._queue)
        self._tracer = self._provider.get_tracer("reshard", version("reshard"))
        self._step: Span | None = None

    @contextmanager
    def step(self, lease: Lease) -> Iterator[Mapping[str, str]]:
        root = set_span_in_context(NonRecordingSpan(self._root(lease.job, lease.submitted)), Context())
        self._step = self._tracer.start_span(lease.kind, root, attributes=_named(lease.fields))
        here = self._step.get_span_context()
        try:
            yield {"trace_id": format_trace_id(here.trace_id), "span_id": format_span_id(here.span_id)}
        finally:
            self._step.end()
            self._step = None

    def note(self, facts: Mapping[str, object]) -> None:
        if self._step is not None:
            self._step.set_attributes(_named(facts))

    def failed(self, error: ReshardError) -> None:
        if self._step is not None:
            self._step.set_attribute("error.type", error.code)
            self._step.set_status(StatusCode.ERROR, str(error))
            self.note({"request_id": error.facts.get("request_id")})

    def call(self, call: Call) -> None:
        if (step := self._step) is None:
            return
        span = self._tracer.start_span(
            str(call.facts["http.request.method"]),
            set_span_in_context(step, Context()),
            SpanKind.CLIENT,
            call.facts,
            start_time=call.start,
        )
        if "error.type" in call.facts:
            span.set_status(StatusCode.ERROR)
        span.end(call.end)

    def job(self, event: Event, facts: Mapping[str, Any]) -> None:
        """The root of a job's spans, when it has ended; told twice it is the same span."""
        if "asked" not in event.fields:  # not a step's
            return
        asked, code = int(event.fields["asked"]), facts.get("code")
        root = self._root(event.fields["job"], asked)
        with self._ids.given(root):
            told = {name: value for name, value in facts.items() if name not in {"event", "code"}}
            span = self._tracer.start_span("job", Context(), attributes=_named(told), start_time=asked * MS)
        if code:
            span.set_attribute("error.type", code)
            span.set_status(StatusCode.ERROR, code)
        span.end(event.at * MS)

    def _root(self, job: str, asked: int) -> SpanContext:
        """``asked`` in ms since the epoch."""
        trace, span = _digest(16, job), _digest(8, f"{job} {asked}")
        sampled = self._provider.sampler.should_sample(None, trace, "job").decision is Decision.RECORD_AND_SAMPLE
        return SpanContext(trace, span, True, TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT))

    def close(self) -> None:
        """Send what is left, for FLUSH seconds at most, and log how many spans were lost; it takes no more."""
        sender = threading.Thread(target=self._provider.shutdown, name="reshard-last-spans", daemon=True)
        sender.start()
        sender.join(FLUSH)
        if lost := self._queue.given - self._exporter.taken:
            log.warning("%d of %d spans of this process were not delivered", lost, self._queue.given)


class _Queue(BatchSpanProcessor):
    """Counts what it is given to send."""

    def __init__(self, exporter: OTLPSpanExporter) -> None:
        self.given = 0
        self._counting = threading.Lock()
        super().__init__(exporter)

    def on_end(self, span: ReadableSpan) -> None:
        with self._counting:
            self.given += 1
        super().on_end(span)


class _Exporter(OTLPSpanExporter):
    """Counts what the receiver takes; what it does not, OpenTelemetry logs."""

    taken = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        if result is SpanExportResult.SUCCESS:
            self.taken += len(spans)
        return result


class _Ids(RandomIdGenerator):
    """Random ones, but for the root of a job's spans; only control makes those, in one thread."""

    _root: SpanContext | None = None

    @contextmanager
    def given(self, root: SpanContext) -> Iterator[None]:
        self._root = root
        try:
            yield
        finally:
            self._root = None

    def generate_trace_id(self) -> int:
        return self._root.trace_id if self._root else super().generate_trace_id()

    def generate_span_id(self) -> int:
        return self._root.span_id if self._root else super().generate_span_id()


def _digest(size: int, text: str) -> int:
    """An id of ``size`` bytes."""
    return int.from_bytes(sha256(f"reshard {text}".encode()).digest()[:size], "big")


def _named(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Under names of our own, because OpenTelemetry's conventions have none for them."""
    return {f"reshard.{name}": value for name, value in facts.items() if value is not None}
