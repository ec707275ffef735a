"""What is said of the fleet and its processes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from reshard.client.models.records import Bytes, Closed, Document, Fault, Limits, Moment, Pause, Seconds, SilentProcess


class FleetLimits(Document):
    paused: Pause | None
    limits: Limits
    bulk_rests: Closed | None
    night: Moment
    read_in_the_night: Bytes
    bytes_a_second: int
    held: int = Field(description="number of waiting bulk jobs")
    drained: list[str]
    resting: dict[str, Fault]


class WorkerNow(Document):
    name: str
    state: str
    concurrency: int
    started: Moment
    version: str
    at: list[str] = Field(description="the tasks it is running")


class Fleet(FleetLimits):
    workers: list[WorkerNow]
    silent: list[SilentProcess] = Field(default_factory=list)


class Used(Document):
    """Resource usage of jobs."""

    jobs: int = Field(description="jobs that ended; a retried job counts each time")
    failed: int = Field(description="jobs that failed")
    read: Bytes = Field(description="bytes read from sources, including headers")
    uploaded: Bytes = Field(description="bytes uploaded to target stores, excluding files sent inside commits")
    deduplicated: Bytes = Field(description="bytes that the stores already had")
    calls: int = Field(description="calls to Hubs, excluding those made by hf_xet")
    worker_seconds: Seconds = Field(description="run time of worker processes, in seconds")


class UsedBy(Used):
    name: str = Field(description="the submitter, the catalog or the day (UTC); empty if there is none")


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
    page: str | None = Field(description="URL of the web page, if it is running")
    sign_in: str | None = Field(
        default=None, description="URL that signs you in to the web page once, within ten minutes, on this machine"
    )
    notes: list[str]


class Down(Document):
    stopped: list[str]


class Token(Document):
    name: str
    scope: Literal["read", "act"]
    token: str
    file: str
