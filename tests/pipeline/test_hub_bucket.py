"""From a bucket of the Hub to another: what holds there, and what a store without commits cannot do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from reshard.pipeline.api import plan
from reshard.pipeline.api import verify as checked
from reshard.pipeline.errors import (
    BucketNotFound,
    MemoryLimit,
    NothingKept,
    NothingToRollBack,
    NoWriteAccess,
    SourceChanged,
    SourceNotFound,
    TargetOccupied,
    UsageError,
)
from reshard.pipeline.limits import MEMORY_FLOOR, MEMORY_FLOOR_XET
from reshard.pipeline.places import HubBucket, parse_place
from reshard.pipeline.planning.model import Transports
from reshard.pipeline.publishing.rollback import rollback
from reshard.pipeline.request import Options
from reshard.pipeline.stores.connect import Context, open_source, open_target
from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.pipeline.verifying.verify import verify
from tests.hub.fixtures import Namespace
from tests.pipeline.conftest import Run, asked
from tests.support.models import save_model

SIZE = 20_000


@pytest.fixture
def hub_api(namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> HfApi:
    """The Hub's own client, which puts files into buckets and looks at them."""
    monkeypatch.setenv("HF_ENDPOINT", namespace.endpoint)
    monkeypatch.setenv("HF_TOKEN", namespace.token)
    return HfApi(endpoint=namespace.endpoint, token=namespace.token)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", 12, 4000, 2)


@pytest.fixture
def bucket(namespace: Namespace, hub_api: HfApi, model: Path) -> str:
    """A bucket with a model in a folder, as the Hub's own client puts it there."""
    hub_api.create_bucket(namespace.repo("models"), private=True)
    files = [(path, f"runs/final/{path.name}") for path in model.iterdir() if path.is_file()]
    hub_api.batch_bucket_files(namespace.repo("models"), add=[(path.read_bytes(), to) for path, to in files])
    return f"hf://buckets/{namespace.repo('models')}"


def there(hub_api: HfApi, url: str) -> set[str]:
    place = HubBucket(url=url)
    found = hub_api.list_bucket_tree(place.bucket, prefix=f"{place.path}/", recursive=True)
    return {item.path.removeprefix(f"{place.path}/") for item in found}


def test_a_bucket_becomes_a_folder_of_another_one_with_all_that_it_has(
    bucket: str, namespace: Namespace, hub_api: HfApi, model: Path, go: Run, meta_loader: MetaLoader
) -> None:
    url, out = f"{bucket}/runs/final", f"hf://buckets/{namespace.repo('made')}/small"
    report = go(url, out, size=SIZE)
    assert report.plan.transports == Transports("xet", "xet")
    assert "failed" not in {check.result for check in report.checks} and report.checks[-1].result == "passed"
    assert f"will create {out} as a private bucket (use --public to change)" in " ".join(report.plan.notes)
    assert any("has no commits" in note for note in report.plan.notes)
    assert hub_api.bucket_info(namespace.repo("made")).private
    files = there(hub_api, out)
    assert len([path for path in files if path.endswith(".safetensors")]) > 2
    assert {path for path in files if path.startswith(".reshard/")} == {".reshard/publications.json"}
    read, made = (open_source(parse_place(place), Context.from_env()) for place in (url, out))
    checks = {check.name: check.result for check in verify(made, read, meta_loader, deep=True)}
    assert (checks["same tensors"], checks["same bytes"], checks["other files"]) == ("passed", "passed", "passed")
    assert go(url, out, size=SIZE).plan.published, "nothing changed there, and nothing is done"


def test_another_cut_replaces_ours_and_nothing_else(bucket: str, namespace: Namespace, hub_api: HfApi, go: Run) -> None:
    url, out = f"{bucket}/runs/final", f"hf://buckets/{namespace.repo('made')}/small"
    go(url, out, size=SIZE)
    hub_api.batch_bucket_files(namespace.repo("made"), add=[(b"mine", "small/notes.txt"), (b"x", "small-not/x")])
    report = go(url, out, size=10 * SIZE)
    assert not report.published.found
    weights = {path for path in there(hub_api, out) if path.endswith(".safetensors")}
    assert weights == {shard.path for shard in report.plan.shards}
    assert "notes.txt" in there(hub_api, out) and "x" in there(hub_api, out.replace("small", "small-not"))
    with pytest.raises(NothingToRollBack, match="no earlier version was kept"):
        rollback(open_target(parse_place(out), Options(), Context.from_env()), report.published.commit)


def test_what_cannot_be_brought_back_is_replaced_only_on_request(
    bucket: str, namespace: Namespace, hub_api: HfApi, go: Run
) -> None:
    url = f"{bucket}/runs/final"
    before = there(hub_api, url)
    with pytest.raises(NothingKept, match="the only copy of its source") as refused:
        go(url, url, size=SIZE)
    note, *_ = plan(asked(url, url, size=SIZE)).notes
    assert note == f"a run will fail (exit code 7) unless you use --overwrite: {refused.value}"
    assert there(hub_api, url) == before
    hub_api.create_bucket(namespace.repo("theirs"), private=True)
    hub_api.batch_bucket_files(namespace.repo("theirs"), add=[(b"theirs", "config.json")])
    with pytest.raises(TargetOccupied, match=r"config\.json"):
        go(url, f"hf://buckets/{namespace.repo('theirs')}", size=SIZE)
    report = go(url, url, size=SIZE, overwrite=True)
    assert {shard.path for shard in report.plan.shards} <= there(hub_api, url)


def test_a_file_that_others_replace_is_read_as_it_was_and_never_as_it_is(bucket: str, hub_api: HfApi) -> None:
    place = HubBucket(url=f"{bucket}/runs/final")
    sources = [open_source(place, Context.from_env(), transport=transport) for transport in ("xet", "http")]
    file = sources[0].files()["config.json"]
    before = b"".join(sources[0].read(file, 0, file.size))
    hub_api.batch_bucket_files(place.bucket, add=[(bytes(file.size), "runs/final/config.json")])
    assert b"".join(sources[0].read(file, 0, file.size)) == before
    with pytest.raises(SourceChanged, match=r"config\.json was replaced"):
        list(sources[1].read(file, 0, file.size))


def test_without_xet_a_bucket_is_read_and_not_written(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, context = HubBucket(url=f"{bucket}/runs/final"), Context.from_env()
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    source = open_source(place, context)
    assert source.transport == "http" and b"".join(source.read(source.files()["config.json"], 0, 5))
    with pytest.raises(UsageError, match="cannot be read over Xet here"):
        open_source(place, context, transport="xet")
    with pytest.raises(UsageError, match="can only be written over Xet .hf_xet is not installed or is disabled"):
        open_target(place, Options(), context).prepare(private=True)
    monkeypatch.delenv("HF_HUB_DISABLE_XET")
    with pytest.raises(UsageError, match="--transport http"):
        open_target(place, Options(transport="http"), context).prepare(private=True)
    with pytest.raises(MemoryLimit):
        open_target(place, Options(), replace(context, memory_limit=MEMORY_FLOOR_XET - 1)).prepare(private=True)


def test_what_was_published_is_checked_where_it_could_not_be_written(
    bucket: str, namespace: Namespace, hub_api: HfApi, go: Run
) -> None:
    out = f"hf://buckets/{namespace.repo('checked')}"
    go(f"{bucket}/runs/final", out, size=SIZE)
    small = replace(Context.from_env(), memory_limit=MEMORY_FLOOR)
    found = {check.name: check.result for check in checked(out, context=small).checks}
    assert found["manifest"] == "passed" and "failed" not in found.values(), found


def test_what_is_missing_or_not_ours_is_told(bucket: str, namespace: Namespace, hub_api: HfApi) -> None:
    context = Context.from_env()
    with pytest.raises(BucketNotFound, match="no files found"):
        open_source(HubBucket(url=f"{bucket}/nothing"), context)
    with pytest.raises(SourceNotFound, match="^bucket not found on "):
        open_source(HubBucket(url=f"hf://buckets/{namespace.repo('none')}"), context)
    target = open_target(HubBucket(url="hf://buckets/someone-else/bucket"), Options(), context)
    assert target.leave(False).given is None
    with pytest.raises(NoWriteAccess) as refused:
        target.prepare(private=True)
    assert "choose another target" in refused.value.next_step and "--pr" not in refused.value.next_step
    namespace.admin.revoke_token(namespace.token)
    assert target.leave(False).given is False
