"""The one comparison of a publication with what is there, as who made it asks for it and as who comes later does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from reshard.pipeline.errors import ReadBackDiffers
from reshard.pipeline.planning.model import MANIFEST, Shard
from reshard.pipeline.publishing.commit import Published
from reshard.pipeline.reshard import confirm
from reshard.pipeline.verifying.manifest_check import check_manifest
from reshard.pipeline.verifying.meta_load import MetaLoader
from tests.hub.fixtures import Namespace
from tests.pipeline.conftest import upload
from tests.pipeline.publishing.jobs import Job
from tests.support.models import save_model

pytestmark = pytest.mark.parametrize("on_hub", ["http"], indirect=True)
INDEX = "model.safetensors.index.json"


@dataclass
class Fault:
    """What becomes of some files of the first shard's publication, and what of that is said to whom."""

    change: Callable[[Shard, Mapping[str, bytes]], dict[str, bytes | None]]  # None: deleted
    confirmed: str
    checked: str | None = None  # as ``confirmed``, unless given; empty where only who published can know
    regular: bool = False  # stored as no object, so that the store lists no sha256

    @property
    def later(self) -> str:
        return self.confirmed if self.checked is None else self.checked


def zeros(shard: Shard, there: Mapping[str, bytes]) -> dict[str, bytes | None]:
    return {shard.path: shard.header + bytes(shard.size - len(shard.header))}


def renamed(shard: Shard, there: Mapping[str, bytes]) -> dict[str, bytes | None]:
    name = shard.entries[0].name.encode()
    return {shard.path: there[shard.path].replace(name, name[::-1], 1)}


def with_root(shard: Shard, there: Mapping[str, bytes]) -> dict[str, bytes | None]:
    return {MANIFEST: json.dumps(json.loads(there[MANIFEST]) | {"root": "0" * 64}).encode()}


def without_files(shard: Shard, there: Mapping[str, bytes]) -> dict[str, bytes | None]:
    return {MANIFEST: json.dumps(json.loads(there[MANIFEST]) | {"files": {}}).encode()}


FAULTS = {
    "a shard is gone": Fault(lambda shard, there: {shard.path: None}, "{shard} was published but is missing"),
    "a shard is shorter": Fault(
        lambda shard, there: {shard.path: there[shard.path][:-1]}, "{shard} has {less:,} bytes, but {size:,} were"
    ),
    "a shard has other bytes": Fault(zeros, "{shard} has the sha256 "),
    "a shard has other bytes, whose sha256 no store lists": Fault(
        zeros, "{shard} has no sha256, but {sha256} was published", "", regular=True
    ),
    "a shard has another header, whose sha256 no store lists": Fault(
        renamed, "{shard} has no sha256, ", "{shard} has a different header than published: ", regular=True
    ),
    "the manifest is gone": Fault(
        lambda shard, there: {MANIFEST: None},
        f"{MANIFEST} was published but is missing",
        f"but {MANIFEST} is missing",
    ),
    "the manifest is cut off": Fault(lambda shard, there: {MANIFEST: there[MANIFEST][:-9]}, "Invalid JSON"),
    "the manifest has another root": Fault(
        with_root, f"{MANIFEST} does not match the copied files", f"{MANIFEST} was changed: its root is 000"
    ),
    "the manifest has its root and other files": Fault(
        without_files, f"{MANIFEST} does not match the copied files", f"{MANIFEST} was changed: its root is "
    ),
    "the index is gone": Fault(
        lambda shard, there: {INDEX: None}, f"{INDEX} was published but is missing", "no index lists "
    ),
    "the index is none": Fault(
        lambda shard, there: {INDEX: b"{}"}, f"{INDEX} differs from the published text", "no index lists "
    ),
    "the index has other spaces": Fault(
        lambda shard, there: {INDEX: there[INDEX] + b" "}, f"{INDEX} differs from the published text", ""
    ),
    "a carried file is gone": Fault(
        lambda shard, there: {"config.json": None}, "config.json was not copied completely", ""
    ),
    "a carried file has other bytes": Fault(
        lambda shard, there: {"config.json": there["config.json"][::-1]},
        "config.json was copied with different bytes",
        "",
    ),
}


@pytest.fixture
def job(tmp_path: Path, on_hub: Namespace, meta_loader: MetaLoader) -> Job:
    on_hub.admin.create_repo(on_hub.repo("target"))
    return Job(upload(on_hub, "source", save_model(tmp_path / "model", 8, 4000, 2)), on_hub.repo("target"), meta_loader)


def said_at_once(job: Job, commit: str) -> tuple[str, ...]:
    try:
        confirm(job.plan, job.plan.shards, job.receipts, Published(commit, "main", found=False), job.target)
    except ReadBackDiffers as differs:
        (check,) = differs.facts["checks"]
        return tuple(check["findings"])
    return ()


def said_later(job: Job, commit: str) -> tuple[str, ...]:
    check = check_manifest(job.target.at(commit)).check
    return check.findings if check else ()


def test_each_fault_is_named_to_who_published_and_to_who_comes_later(job: Job, on_hub: Namespace) -> None:
    """All in one repository, because a fault needs a publication that differs in nothing else."""
    good, target = job.publish().commit, on_hub.repo("target")
    assert said_at_once(job, good) == said_later(job, good) == ()
    there = {path: on_hub.admin.read(target, path, good) for path in job.target.at(good).files()}
    shard = job.plan.shards[0]
    words = {"shard": shard.path, "size": shard.size, "less": shard.size - 1}
    words["sha256"] = job.receipts[shard.digest].sha256
    for name, fault in FAULTS.items():
        changes = fault.change(shard, there)
        written = {path: content for path, content in changes.items() if content is not None}
        weights = [path for path in written if path.endswith(".safetensors") and not fault.regular]
        commit = on_hub.admin.put_files(target, written, delete=[*changes.keys() - written.keys()], lfs=weights)
        for said, expected in ((said_at_once, fault.confirmed), (said_later, fault.later)):
            findings = said(job, commit)
            named = any(expected.format(**words) in finding for finding in findings)
            assert named if expected else not findings, (name, said, findings)
        back = {path: there[path] for path in changes}
        commit = on_hub.admin.put_files(target, back, lfs=[path for path in back if path.endswith(".safetensors")])
        assert said_at_once(job, commit) == said_later(job, commit) == (), name
