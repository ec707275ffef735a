"""Jobs into an object store: another worker takes over from one that dies, and one publication is there at the end."""

from __future__ import annotations

import json

from reshard.pipeline.places import Bucket, Hub
from reshard.pipeline.request import Options, Request
from reshard.worker.queue.states import JobState
from tests.support.checker import from_hub, read_checkpoint
from tests.support.procs import wait_for
from tests.support.s3 import S3
from tests.worker.sites import SIZE, Site, site

__all__ = ["site"]

FOLDER = "models/cut"


def keys(bucket: S3) -> set[str]:
    found = bucket.client.list_objects_v2(Bucket=bucket.name, Prefix=f"{FOLDER}/").get("Contents", [])
    return {item["Key"].removeprefix(f"{FOLDER}/") for item in found}


def content(bucket: S3, path: str) -> bytes | None:
    if path not in keys(bucket):
        return None
    data: bytes = bucket.client.get_object(Bucket=bucket.name, Key=f"{FOLDER}/{path}")["Body"].read()
    return data


def submitted(site: Site, bucket: S3) -> str:
    target = Bucket(url=f"{bucket.url}/{FOLDER}")
    request = Request(source=Hub(repo=site.source), target=target, options=Options(size=SIZE))
    return site.store.submit(request).id


def test_a_job_into_an_object_store_outlives_the_worker_that_copied(bucket: S3, site: Site) -> None:
    environment = {**bucket.env, "RESHARD_ALLOWED_TARGETS": bucket.url}
    site.slow()
    first = site.machine.worker(**environment)
    job = submitted(site, bucket)
    site.copying(job)
    wait_for(lambda: any(key.startswith(".reshard/objects/") for key in keys(bucket)), "a file that is complete")
    assert not any(key.endswith((".safetensors", ".index.json")) for key in keys(bucket)), "nothing is there by halves"
    first.kill()
    site.space.admin.clear_faults()
    site.machine.worker(**environment)
    seen = site.ended(job)
    assert seen.state == JobState.done, (seen.error, seen.last_error)
    source = read_checkpoint(from_hub(site.space.endpoint, site.source, token=site.space.token))
    assert read_checkpoint(lambda path: content(bucket, path)) == source
    assert {key for key in keys(bucket) if key.startswith(".reshard/")} == {".reshard/publications.json"}
    record = json.loads(content(bucket, ".reshard/publications.json") or b"")
    assert len(record["publications"]) == 1


def test_a_worker_writes_to_no_object_store_that_its_operator_does_not_name(bucket: S3, site: Site) -> None:
    site.machine.worker(**bucket.env, RESHARD_ALLOWED_TARGETS=f"{bucket.url}/others")
    seen = site.ended(submitted(site, bucket))
    assert seen.state == JobState.failed and (seen.error or {})["code"] == "access.target_not_allowed", seen.error
    assert keys(bucket) == set()
