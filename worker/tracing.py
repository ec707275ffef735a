"""Traces by OpenTelemetry, where its own variables ask for them; nothing of it is imported where they do not.

One trace a job and a span a step, with the Hub's calls below it (spans.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

from reshard.pipeline.errors import BadSetting, ExtraMissing, ReshardError
from reshard.pipeline.stores.observed import Observe

if TYPE_CHECKING:
    from reshard.worker.queue.events import Event
    from reshard.worker.queue.leases import Lease
    from reshard.worker.spans import Spans

log = logging.getLogger(__name__)

# https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/
EXPORTER = "OTEL_TRACES_EXPORTER"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
DISABLED = "OTEL_SDK_DISABLED"


def wanted() -> bool:
    """Whether the environment asks for traces; raises BadSetting for a way of sending them that is not ours."""
    if os.environ.get(DISABLED, "").lower() == "true":
        return False
    exporter = os.environ.get(EXPORTER) or ("otlp" if any(map(os.environ.get, ENDPOINTS)) else "none")
    if exporter == "none":
        return False
    if exporter != "otlp":
        raise BadSetting(name=EXPORTER, value=exporter, why="use `otlp`, or `none` for no traces")
    name = next(filter(os.environ.get, PROTOCOLS), "")
    if name and os.environ[name] != "http/protobuf":
        raise BadSetting(name=name, value=os.environ[name], why="use `http/protobuf`")
    return True


def check() -> None:
    """Raises BadSetting, and ExtraMissing where traces are asked for and OpenTelemetry is not installed.

    A worker's main process loads it by this, once for all of its children.
    """
    if wanted():
        try:
            import reshard.worker.spans  # noqa: F401
        except ModuleNotFoundError as error:
            raise ExtraMissing(package=error.name, extra="otel", who="OTEL_ variables") from None


@cache
def spans() -> Spans | None:
    """This process's, made after its fork; None where no traces are asked for, or none can be made."""
    if not wanted():
        return None
    from reshard.worker.spans import Spans

    try:
        return Spans()
    except Exception as error:  # noqa: BLE001  a value that OpenTelemetry refuses, no thread: jobs go on without
        log.warning("this process sends no traces: %s", error)
        return None


def step(lease: Lease) -> AbstractContextManager[Mapping[str, str]]:
    """Inside, this process is at that step; gives the fields that name its span in log lines."""
    here = spans()
    return nullcontext({}) if here is None else here.step(lease)


def note(**facts: object) -> None:
    """Facts of the step that this process is at."""
    if (here := spans()) is not None:
        here.note(facts)


def failed(error: ReshardError) -> None:
    if (here := spans()) is not None:
        here.failed(error)


def observer() -> Observe | None:
    """Who is told of each call of the step that this process is at."""
    here = spans()
    return None if here is None else here.call


def job_ended(event: Event, facts: Mapping[str, Any]) -> None:
    """``facts`` as control logs them."""
    if (here := spans()) is not None:
        here.job(event, facts)


def end(**_: Any) -> None:
    """This process ends: what it still has is sent, if that does not take long. Celery's children run it on SIGTERM."""
    if spans.cache_info().currsize and (here := spans()) is not None:
        spans.cache_clear()
        here.close()
