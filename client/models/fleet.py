"""What is said of the fleet and its processes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from reshard.client.models.records import Bytes, Closed, Document, Fault, Limits, Moment, Pause, Seconds


class FleetLimits(Document):
    paused: Pause | None
    limits: Limits
    bulk_rests: Closed | None
    night: Moment
    read_in_the_night: Bytes
    bytes_a_second: int
    held: int = Field(description="bulk jobs that wait")
    drained: list[str]
    resting: dict[str, Fault]


class WorkerNow(Document):
    name: str
    state: str
    concurrency: int
    started: Moment
    version: str
    at: list[str] = Field(description="units of jobs")


class Fleet(FleetLimits):
    workers: list[WorkerNow]


class Used(Document):
    """What jobs took."""

    jobs: int = Field(description="that ended; one that was retried counts each time")
    failed: int = Field(description="of these")
    read: Bytes = Field(description="of sources, headers included")
    uploaded: Bytes = Field(description="to targets' stores; what commits hold themselves is not in it")
    deduplicated: Bytes = Field(description="that the stores had already")
    calls: int = Field(description="to Hubs; hf_xet's own are not counted")
    worker_seconds: Seconds = Field(description="of workers' processes")


class UsedBy(Used):
    name: str = Field(description="the submitter, the catalog or the day (UTC); empty: without one")


class Usage(Document):
    by: Literal["submitter", "catalog", "day"]
    since: Moment
    rows: list[UsedBy]
    total: Used


class FleetPaused(Document):
    paused: Pause
    was_paused: bool


class FleetResumed(Document):
    paused: None
    was_paused: bool


class Drained(Document):
    name: str
    drained: Literal[True]


class Undrained(Document):
    name: str
    drained: Literal[False]
    was_drained: bool


class Up(Document):
    broker: str
    started: list[str]
    found: list[str]
    data_dir: str
    log_dir: str
    page: str | None = Field(description="its URL, where it runs")
    sign_in: str | None = Field(
        default=None, description="a URL that signs in at the page, once and within ten minutes; on one machine alone"
    )
    notes: list[str]


class Down(Document):
    stopped: list[str]


class Token(Document):
    name: str
    scope: Literal["read", "act"]
    token: str
    file: str
