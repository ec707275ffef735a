"""The whole job, in this process: what goes in comes out, in files of the size that was asked for."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import HfApi
from safetensors.numpy import save_file

from reshard.pipeline import drafting, driving, reshard
from reshard.pipeline.api import plan, verify
from reshard.pipeline.errors import (
    BadIndex,
    FoldersNested,
    ModelCheckRequired,
    Oversize,
    ProofError,
    ReloadFailed,
    ReshardError,
    SourceChanged,
    SourceCorrupt,
    TargetConflict,
    TargetDrifted,
    TargetMoreVisible,
)
from reshard.pipeline.limits import CONFIG_MAX, INDEX_MAX
from reshard.pipeline.places import Hub, parse_place
from reshard.pipeline.planning.build import Known, make_plan
from reshard.pipeline.planning.model import Plan, Shard
from reshard.pipeline.publishing.rollback import rollback
from reshard.pipeline.request import Options, Request
from reshard.pipeline.reshard import source_of
from reshard.pipeline.stores.connect import Context, open_target
from reshard.pipeline.verifying import job_checks
from reshard.pipeline.verifying.meta_load import MetaLoader
from tests.hub.fixtures import Namespace
from tests.pipeline.conftest import Run, asked, upload
from tests.support.checker import from_folder, from_hub, read_checkpoint
from tests.support.models import arrays, numbered, save_model, save_sharded, save_single

SIZE = 20_000  # bytes; a few tensors of 4 kB a file


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Four source files of 12 tensors, and what belongs to a model."""
    return save_model(tmp_path / "model", 24, 4000, 4)


def shards_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def test_every_tensor_arrives_and_every_file_keeps_to_the_size(model: Path, tmp_path: Path, go: Run) -> None:
    report = go(model, tmp_path / "out", size=SIZE)
    out = tmp_path / "out"
    assert read_checkpoint(from_folder(out)) == read_checkpoint(from_folder(model))
    sizes = [path.stat().st_size for path in shards_of(out)]
    assert len(sizes) == len(report.plan.shards) > 4
    assert max(sizes) <= SIZE


def test_carried_files_are_the_same_bytes_and_the_card_says_where_it_comes_from(
    model: Path, tmp_path: Path, go: Run
) -> None:
    go(model, tmp_path / "out", size=SIZE)
    for name in ("config.json", "tokenizer.json", "LICENSE"):
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith((model / "README.md").read_text().rstrip())
    assert f"at most {SIZE:,} bytes" in card


def test_hub_and_folder_give_byte_identical_files(model: Path, tmp_path: Path, on_hub: Namespace, go: Run) -> None:
    repo = upload(on_hub, "source", model)
    go(model, tmp_path / "a", size=SIZE)
    go(repo, tmp_path / "b", size=SIZE)
    go(repo, on_hub.repo("c"), size=SIZE)
    go(model, on_hub.repo("d"), size=SIZE, visibility="public")
    weights = {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir() if "model" in p.name}
    assert len(weights) > 5
    assert {p.name: p.read_bytes() for p in (tmp_path / "b").iterdir() if "model" in p.name} == weights
    for name in ("c", "d"):
        fetch = from_hub(on_hub.endpoint, on_hub.repo(name), token=on_hub.token)
        assert {path: fetch(path) for path in weights} == weights


def test_one_commit_holds_everything(model: Path, on_hub: Namespace, go: Run) -> None:
    repo = upload(on_hub, "source", model)
    target = on_hub.repo("target")
    on_hub.admin.create_repo(target)
    before = on_hub.admin.head(target)
    report = go(repo, target, size=SIZE)
    assert report.published.commit == on_hub.admin.head(target) != before
    posts = [r for r in on_hub.admin.log() if r["method"] == "POST" and f"{target}/commit/" in r["path"]]
    assert len(posts) == 1
    fetch = from_hub(on_hub.endpoint, target)
    assert read_checkpoint(fetch) == read_checkpoint(from_folder(model))
    assert fetch("tokenizer.json") == (model / "tokenizer.json").read_bytes()


def test_every_source_file_on_the_hub_is_attested_and_read_once(model: Path, on_hub: Namespace, go: Run) -> None:
    repo = upload(on_hub, "source", model)
    on_hub.admin.log(reset=True)
    report = go(repo, on_hub.repo("target"), size=SIZE)
    assert report.attested == {path.name: "checked" for path in shards_of(model)}
    reads = [r for r in on_hub.admin.log() if r["method"] == "GET" and "/_cdn/" in r["path"] and repo in r["path"]]
    down = sum(r["down"] for r in reads)
    assert down < 2.2 * sum(path.stat().st_size for path in shards_of(model)), "headers are read once, data once"


def test_everything_that_fits_is_one_file_without_an_index(tmp_path: Path, go: Run) -> None:
    made = arrays(20, 4000)
    save_sharded(tmp_path / "ten", numbered(made, 10))
    go(tmp_path / "ten", tmp_path / "out", size=10**9)
    assert [path.name for path in shards_of(tmp_path / "out")] == ["model.safetensors"]
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert read_checkpoint(from_folder(tmp_path / "out")) == read_checkpoint(from_folder(tmp_path / "ten"))


def test_the_index_keeps_its_metadata_sorts_its_map_and_counts_anew(tmp_path: Path, go: Run) -> None:
    save_sharded(tmp_path / "model", numbered(arrays(8, 4000), 2))
    path = tmp_path / "model" / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    content["metadata"] = {"total_size": 1, "total_parameters": 42}
    path.write_text(json.dumps(content))
    go(tmp_path / "model", tmp_path / "out", size=SIZE)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_parameters"] == 42
    assert index["metadata"]["total_size"] == 8 * (62 * 16 * 4 + 64)
    assert list(index["weight_map"]) == sorted(index["weight_map"])


def test_components_and_variants_keep_their_folders_and_names(tmp_path: Path, on_hub: Namespace, go: Run) -> None:
    folder = tmp_path / "pipe"
    unet, vae, half = arrays(12, 4000, seed=1), arrays(6, 4000, seed=2), arrays(6, 4000, seed=3)
    save_single(folder / "unet", unet, "diffusion_pytorch_model.safetensors")
    save_single(folder / "vae", vae, "diffusion_pytorch_model.safetensors")
    save_single(folder / "vae", half, "diffusion_pytorch_model.fp16.safetensors")
    (folder / "model_index.json").write_text('{"_class_name": "Pipe"}')
    repo = upload(on_hub, "pipe", folder)
    go(repo, on_hub.repo("out"), size=SIZE)
    source, target = from_folder(folder), from_hub(on_hub.endpoint, on_hub.repo("out"))
    for part, variant in (("unet", None), ("vae", None), ("vae", "fp16")):
        there = read_checkpoint(target, "diffusion_pytorch_model", part, variant)
        assert there == read_checkpoint(source, "diffusion_pytorch_model", part, variant)
    assert target("model_index.json") is not None
    assert target("vae/diffusion_pytorch_model.safetensors.index.fp16.json") is not None


def test_source_and_target_may_be_the_same_repository(model: Path, on_hub: Namespace, go: Run) -> None:
    repo = upload(on_hub, "same", model)
    old = set(on_hub.admin.files(repo))
    go(repo, repo, size=SIZE)
    assert read_checkpoint(from_hub(on_hub.endpoint, repo)) == read_checkpoint(from_folder(model))
    left = {path for path in old if "-of-00004" in path} & set(on_hub.admin.files(repo))
    assert not left, "the files of the old cut are gone with the same commit"


def test_a_branch_is_made_and_main_stays(model: Path, on_hub: Namespace, go: Run) -> None:
    repo = upload(on_hub, "branched", model)
    main = on_hub.admin.head(repo)
    assert not plan(asked(repo, repo, dtype="float16", branch="small")).takes, "the source is left alone"
    go(repo, repo, size=SIZE, branch="small")
    assert on_hub.admin.head(repo) == main
    assert read_checkpoint(from_hub(on_hub.endpoint, repo, "small")) == read_checkpoint(from_folder(model))


def test_a_pull_request_holds_the_commit_and_is_found_again(model: Path, on_hub: Namespace, go: Run) -> None:
    repo = upload(on_hub, "asked", model)
    main = on_hub.admin.head(repo)
    first = go(repo, repo, size=SIZE, pr=True)
    again = go(repo, repo, size=SIZE, pr=True)
    assert on_hub.admin.head(repo) == main
    assert again.published.commit == first.published.commit and again.published.found
    assert first.published.ref == again.published.ref == "refs/pr/1"
    fetch = from_hub(on_hub.endpoint, repo, "refs/pr/1")
    assert read_checkpoint(fetch) == read_checkpoint(from_folder(model))


def test_whoever_may_only_read_a_repository_opens_a_pull_request(model: Path, on_hub: Namespace, go: Run) -> None:
    owner = on_hub.admin.create_user(f"{on_hub.name}-owner").name
    theirs = f"{owner}/model"
    on_hub.admin.create_repo(theirs)
    on_hub.admin.put_files(theirs, {"README.md": b"# Theirs\n", "config.json": b"{}"})
    head = on_hub.admin.head(theirs)
    report = go(upload(on_hub, "model", model), theirs, size=SIZE, pr=True)
    assert report.published.ref == "refs/pr/1" and on_hub.admin.head(theirs) == head
    assert read_checkpoint(from_hub(on_hub.endpoint, theirs, "refs/pr/1")) == read_checkpoint(from_folder(model))


# -------------------------------------------------------------------------------------------------- the second time


def test_the_same_request_again_is_nothing_to_do(model: Path, on_hub: Namespace, go: Run) -> None:
    repo = upload(on_hub, "source", model)
    first = go(repo, on_hub.repo("target"), size=SIZE)
    on_hub.admin.log(reset=True)
    again = go(repo, on_hub.repo("target"), size=SIZE)
    assert again.plan.published == first.published.commit == on_hub.admin.head(on_hub.repo("target"))
    calls = [r["path"] for r in on_hub.admin.log()]
    assert not [path for path in calls if not path.startswith("/api/")], "no file is opened"
    assert len(calls) <= 5, "source: commit, files, token; target: commit, history"


def test_somebody_elses_commit_on_top_of_ours_is_nothing_to_do_either(model: Path, on_hub: Namespace, go: Run) -> None:
    repo = upload(on_hub, "source", model)
    first = go(repo, on_hub.repo("target"), size=SIZE)
    on_hub.admin.put_files(on_hub.repo("target"), {"mine.txt": b"mine"})
    on_hub.admin.log(reset=True)
    again = go(repo, on_hub.repo("target"), size=SIZE)
    assert again.published.found and again.published.commit == first.published.commit
    assert len([r for r in on_hub.admin.log() if r["path"].startswith("/api/")]) <= 7, "and the files of both commits"


def test_weights_that_include_brought_stay_while_nothing_is_opened(tmp_path: Path, on_hub: Namespace, go: Run) -> None:
    """Twins in another cut: which of the two is read shows only when they are opened."""
    folder, names = tmp_path / "twins", [f"model-0000{i}-of-00002.fp16.safetensors" for i in (1, 2)]
    folder.mkdir()
    weights = {name: np.arange(2000, dtype=np.float16) for name in "ab"}
    save_file(weights, folder / "model.fp16.safetensors", {"format": "pt"})
    for name, path in zip("ab", names, strict=True):
        save_file({name: weights[name]}, folder / path, {"format": "pt"})
    index = {"metadata": {"total_size": 8000}, "weight_map": dict(zip("ab", names, strict=True))}
    (folder / "model.safetensors.index.fp16.json").write_text(json.dumps(index))
    repo, out = upload(on_hub, "twins", folder), tmp_path / "out"
    first = go(repo, out, size=SIZE, include=("model-*",))
    manifest = json.loads((out / "reshard.manifest.json").read_text())
    assert manifest["source"]["files"] == {"model.fp16.safetensors": "checked"}, "and nothing of what was not read"
    assert [file.path for file in first.plan.read] == ["model.fp16.safetensors"]
    assert {*names} <= {path.name for path in out.iterdir()}
    again = go(repo, out, size=SIZE, include=("model-*",), exclude=("*.md5",))
    assert not again.plan.shards and not again.plan.deletes
    assert {*names} <= {path.name for path in out.iterdir()}
    assert not go(repo, out, size=SIZE).plan.shards and not {*names} & {path.name for path in out.iterdir()}


def test_a_copy_that_turns_out_to_be_there_already_is_not_left_beside_it(model: Path, tmp_path: Path, go: Run) -> None:
    """No hash of the source says so before: only a new time, which makes it another source."""
    go(model, tmp_path / "out", size=SIZE, manifest=False)
    for path in model.iterdir():
        os.utime(path, (0, 0))
    assert go(model, tmp_path / "out", size=SIZE, manifest=False).published.found
    assert {path.name for path in tmp_path.iterdir()} == {model.name, "out"}


def test_what_was_planned_is_opened_again_by_one_call(model: Path, on_hub: Namespace, go: Run) -> None:
    repo = upload(on_hub, "source", model)
    made = go(repo, on_hub.repo("target"), size=SIZE).plan
    request = Request(source=parse_place(repo), target=parse_place(on_hub.repo("target")))
    on_hub.admin.log(reset=True)
    source = source_of(request, Context.from_env(), made)
    assert (source.pin, source.transport) == (made.pin, made.transports.source)
    assert len(on_hub.admin.log()) == 1, "that its commit is still there"


def test_what_was_planned_is_gone_after_a_force_push(model: Path, on_hub: Namespace, go: Run) -> None:
    source = upload(on_hub, "model", model)
    made = go(source, on_hub.repo("out"), size=SIZE).plan
    HfApi(on_hub.endpoint, on_hub.token).super_squash_history(source)
    request = Request(source=parse_place(source), target=parse_place(on_hub.repo("out")))
    assert source_of(request, Context.from_env(), made).pin == made.pin  # it can still be read
    on_hub.admin.forget_commits(source)
    with pytest.raises(SourceChanged, match=made.pin.commit or "no commit"):
        source_of(request, Context.from_env(), made)


def test_a_plan_of_another_hub_is_refused_by_the_hubs_and_not_by_the_commits(
    model: Path, on_hub: Namespace, go: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here one Hub under another name, which has the very commit, and then one that has none of it."""
    repo = upload(on_hub, "source", model)
    made = go(repo, on_hub.repo("target"), size=SIZE).plan
    request = Request(source=parse_place(repo), target=parse_place(on_hub.repo("target")))
    for other in (on_hub.endpoint.replace("127.0.0.1", "localhost"), "http://127.0.0.1:1"):
        monkeypatch.setenv("HF_ENDPOINT", other)
        with pytest.raises(SourceChanged) as refused:
            source_of(request, Context.from_env(), made)
        assert f"it was planned on {on_hub.endpoint}, but HF_ENDPOINT is {other} here" in str(refused.value)
        assert made.pin.commit[:12] not in str(refused.value)


def test_a_new_card_moves_no_weight_byte(model: Path, on_hub: Namespace, go: Run) -> None:
    repo = upload(on_hub, "source", model)
    first = go(repo, on_hub.repo("target"), size=SIZE)
    on_hub.admin.put_files(repo, {"README.md": b"# A new text\n", "notes.txt": b"new\n"})
    on_hub.admin.log(reset=True)
    again = go(repo, on_hub.repo("target"), size=SIZE)
    assert again.published.commit != first.published.commit
    assert not [r for r in on_hub.admin.log() if "safetensors" in r["path"] and r["path"].endswith("safetensors")]
    fetch = from_hub(on_hub.endpoint, on_hub.repo("target"))
    assert f"in {len(first.plan.shards)} files" in (fetch("README.md") or b"").decode()
    assert fetch("notes.txt") == b"new\n"
    assert (fetch("README.md") or b"").startswith(b"# A new text\n")
    assert read_checkpoint(fetch) == read_checkpoint(from_folder(model))


def test_a_file_that_is_named_like_weights_follows_its_source_beside_the_weights_that_stay(
    model: Path, on_hub: Namespace, go: Run
) -> None:
    (model / "q.gguf").write_bytes(b"one")
    repo, out = upload(on_hub, "source", model), on_hub.repo("target")
    fetch = from_hub(on_hub.endpoint, out)
    go(repo, out, size=SIZE, include=("*.gguf",))
    on_hub.admin.put_files(repo, {"q.gguf": b"another"})
    again = go(repo, out, size=SIZE, include=("*.gguf",))
    assert again.plan.reused and fetch("q.gguf") == b"another"
    gone = go(repo, out, size=SIZE)
    assert gone.plan.reused and fetch("q.gguf") is None
    assert read_checkpoint(fetch) == read_checkpoint(from_folder(model))


def test_a_card_that_its_owner_edited_stays_theirs(model: Path, on_hub: Namespace, go: Run) -> None:
    repo, target = upload(on_hub, "source", model), on_hub.repo("target")
    go(repo, target, size=SIZE)
    card = from_hub(on_hub.endpoint, target)("README.md") or b""
    on_hub.admin.put_files(target, {"README.md": b"# Mine\n\n" + card})
    on_hub.admin.put_files(repo, {"README.md": b"# A new text\n"})
    go(repo, target, size=SIZE)
    now = (from_hub(on_hub.endpoint, target)("README.md") or b"").decode()
    assert now.startswith("# Mine\n") and "A new text" not in now
    assert now.count("reshard:begin") == 1


@pytest.mark.parametrize(
    ("card", "why"),
    [
        (b"# Caf\xe9\n", "it is not UTF-8"),
        (b"# A\n<!-- reshard:begin -->\nMine.\n", "it does not have exactly one pair of reshard markers"),
        (b"# A\n" * (CONFIG_MAX // 4 + 1), "it is larger than 10,000,000 bytes"),
    ],
    ids=["latin-1", "unclosed", "large"],
)
def test_a_card_that_cannot_be_edited_is_published_as_it_is(
    model: Path, tmp_path: Path, go: Run, card: bytes, why: str
) -> None:
    (model / "README.md").write_bytes(card)
    for size in (SIZE, 2 * SIZE):
        report = go(model, tmp_path / "out", size=size)
        assert (tmp_path / "out" / "README.md").read_bytes() == card
        assert report.plan.notes[-1] == f"README.md is published unchanged, without a reshard section: {why}"


def test_an_owners_card_that_cannot_be_edited_stays(model: Path, on_hub: Namespace, go: Run) -> None:
    repo, target = upload(on_hub, "source", model), on_hub.repo("target")
    go(repo, target, size=SIZE)
    on_hub.admin.put_files(target, {"README.md": b"# Caf\xe9\n"})
    go(repo, target, size=2 * SIZE)
    assert from_hub(on_hub.endpoint, target)("README.md") == b"# Caf\xe9\n"


@pytest.mark.parametrize("card", [b"# Caf\xe9\n", b"# A\n" * (CONFIG_MAX // 4 + 1)], ids=["latin-1", "large"])
def test_a_card_goes_to_a_hub_byte_for_byte(model: Path, on_hub: Namespace, go: Run, card: bytes) -> None:
    repo = upload(on_hub, "source", model)
    on_hub.admin.put_files(repo, {"README.md": card}, lfs=["README.md"] if len(card) > CONFIG_MAX else [])
    go(repo, on_hub.repo("target"), size=SIZE)
    assert from_hub(on_hub.endpoint, on_hub.repo("target"))("README.md") == card


@pytest.mark.parametrize("command", ["run", "plan"])
@pytest.mark.parametrize("nested", ["out", "deep/er/out", "link", "source", "lender"])
def test_a_folder_inside_the_other_is_refused(model: Path, tmp_path: Path, go: Run, command: str, nested: str) -> None:
    target, options = model / nested, {}
    if nested == "link":
        (tmp_path / "link").symlink_to(model)
        target = tmp_path / "link" / "out"
    elif nested == "source":
        target = model.parent
    elif nested == "lender":
        options = {"config_from": parse_place(str(model))}
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "model.safetensors").write_bytes(next(iter(shards_of(model))).read_bytes())
        target = model / "out"
    source = tmp_path / "other" if nested == "lender" else model
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(FoldersNested):
        if command == "run":
            go(source, target, size=SIZE, **options)
        else:
            request = Request(
                source=parse_place(str(source)), target=parse_place(str(target)), options=Options(size=SIZE, **options)
            )
            context = Context.from_env()
            target_ = open_target(request.target, request.options, context)
            reshard.draft(request, source_of(request, context), target_)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_beside_the_other_and_the_same_folder_are_not_nested(model: Path, tmp_path: Path, go: Run) -> None:
    weights = read_checkpoint(from_folder(model))
    go(model, tmp_path / "model-out", size=SIZE)
    go(model, model, size=SIZE)
    assert read_checkpoint(from_folder(model)) == read_checkpoint(from_folder(tmp_path / "model-out")) == weights


def test_force_copies_again_what_is_there(model: Path, tmp_path: Path, go: Run) -> None:
    first = go(model, tmp_path / "out", size=SIZE)
    assert go(model, tmp_path / "out", size=SIZE).moved.read == 0
    assert go(model, tmp_path / "out", size=SIZE, force=True).moved.read == first.moved.read > 0


@pytest.mark.parametrize("where", ["hub", "folder"])
def test_force_publishes_again_each_time_and_the_next_run_without_it_finds_that(
    where: str, model: Path, tmp_path: Path, on_hub: Namespace, go: Run
) -> None:
    target = str(tmp_path / "out") if where == "folder" else on_hub.repo("target")
    commits = [go(model, target, size=SIZE).published.commit]
    for _ in range(2):
        again = go(model, target, size=SIZE, force=True)
        assert not again.published.found and again.checks
        commits.append(again.published.commit)
    assert len(set(commits)) == 3
    found = go(model, target, size=SIZE).published
    assert found.found and found.commit == commits[-1]
    there = from_folder(Path(target)) if where == "folder" else from_hub(on_hub.endpoint, target, token=on_hub.token)
    assert read_checkpoint(there) == read_checkpoint(from_folder(model))
    if where == "hub":  # a folder keeps nothing of what it was
        rollback(open_target(Hub(repo=target), Options(), Context.from_env()), commits[-1])
        assert go(model, target, size=SIZE).published.commit == commits[-2], "the one before stands again"
        assert read_checkpoint(there) == read_checkpoint(from_folder(model))


def test_another_size_replaces_the_files_of_the_one_before(model: Path, tmp_path: Path, go: Run) -> None:
    go(model, tmp_path / "out", size=SIZE)
    (tmp_path / "out" / "mine.txt").write_text("keep me")
    go(model, tmp_path / "out", size=3 * SIZE)
    out = tmp_path / "out"
    assert read_checkpoint(from_folder(out)) == read_checkpoint(from_folder(model))
    counts = {path.stem.rpartition("-")[2] for path in shards_of(out)}
    assert len(counts) == 1, "shards of two cuts lie side by side"
    assert (out / "mine.txt").read_text() == "keep me"


def test_prune_removes_what_is_not_ours(model: Path, tmp_path: Path, go: Run) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old.txt").write_bytes(b"old")
    kept = go(model, tmp_path / "out", size=SIZE)
    assert "old.txt" in kept.plan.kept and (tmp_path / "out" / "old.txt").exists()
    go(model, tmp_path / "out", size=SIZE, prune=True)
    assert not (tmp_path / "out" / "old.txt").exists()
    (tmp_path / "out" / "old.txt").write_bytes(b"again")
    assert "old.txt" in go(model, tmp_path / "out", size=SIZE, prune=True).plan.deletes
    assert not (tmp_path / "out" / "old.txt").exists()
    assert go(model, tmp_path / "out", size=SIZE, prune=True).published.found


def test_a_card_that_is_excluded_is_not_published(model: Path, tmp_path: Path, go: Run) -> None:
    text = (model / "README.md").read_bytes().rstrip()
    out = tmp_path / "out"
    go(model, out, size=SIZE)
    assert text in (out / "README.md").read_bytes()
    report = go(model, out, size=SIZE, exclude=("README.md",))
    card = (out / "README.md").read_bytes()
    assert text not in card and card.startswith(b"<!-- reshard:begin"), "the block stands alone"
    assert ("README.md", "excluded") in report.plan.left_out


def test_include_and_exclude_change_what_is_carried(model: Path, tmp_path: Path, go: Run) -> None:
    (model / "training_args.bin").write_bytes(b"pickle")
    report = go(model, tmp_path / "a", size=SIZE)
    assert "training_args.bin" in {item.path for item in report.plan.left_out}
    go(model, tmp_path / "b", size=SIZE, include=("training_args.bin",), exclude=("LICENSE",))
    assert (tmp_path / "b" / "training_args.bin").read_bytes() == b"pickle"
    assert not (tmp_path / "b" / "LICENSE").exists()


# ---------------------------------------------------------------------------------- what leaves the target untouched


def test_drift_stops_until_it_is_asked_for(model: Path, on_hub: Namespace, go: Run) -> None:
    repo, target = upload(on_hub, "source", model), on_hub.repo("target")
    go(repo, target, size=SIZE)
    on_hub.admin.put_files(target, {"config.json": b'{"mine": true}'})
    head = on_hub.admin.head(target)
    with pytest.raises(TargetDrifted, match="config.json"):
        go(repo, target, size=2 * SIZE)
    assert on_hub.admin.head(target) == head
    go(repo, target, size=2 * SIZE, overwrite=True)
    assert from_hub(on_hub.endpoint, target)("config.json") == (model / "config.json").read_bytes()


def test_drift_of_main_stops_a_branch_before_it_is_created(model: Path, on_hub: Namespace, go: Run) -> None:
    repo, target = upload(on_hub, "source", model), on_hub.repo("target")
    go(repo, target, size=SIZE)
    on_hub.admin.put_files(target, {"config.json": b'{"mine": true}'})
    refs = on_hub.admin.state(target)["refs"]
    assert plan(asked(repo, target, size=SIZE, branch="dev")).drift == ("config.json was replaced",)
    with pytest.raises(TargetDrifted, match=f"{target} was changed .*config.json"):
        go(repo, target, size=SIZE, branch="dev")
    assert on_hub.admin.state(target)["refs"] == refs
    go(repo, target, size=SIZE, branch="dev", overwrite=True)
    assert from_hub(on_hub.endpoint, target, "dev")("config.json") == (model / "config.json").read_bytes()
    assert on_hub.admin.head(target) == refs["refs/heads/main"]
    on_hub.admin.put_files(target, {"config.json": b"{}"}, revision="dev")
    with pytest.raises(TargetDrifted, match=f"{target}@dev was changed .*config.json"):
        go(repo, target, size=2 * SIZE, branch="dev")


def test_a_publication_of_a_later_request_stops_an_earlier_one_but_a_wrong_clock_does_not(
    model: Path, on_hub: Namespace, meta_loader: MetaLoader, monkeypatch: pytest.MonkeyPatch, go: Run
) -> None:
    repo, target = upload(on_hub, "source", model), on_hub.repo("target")
    request = Request(source=parse_place(repo), target=parse_place(target), options=Options(size=2 * SIZE))

    def planned(submitted: float, branch: str | None = None) -> Plan:
        asked = request.model_copy(update={"options": Options(size=2 * SIZE, branch=branch)})
        places = (
            source_of(asked, Context.from_env()),
            open_target(asked.target, asked.options, Context.from_env()),
        )
        return reshard.plan(asked, *places, meta_loader, int(submitted * 1000))

    now = time.time()
    go(repo, target, size=SIZE)
    assert planned(time.time()).shards
    with pytest.raises(TargetDrifted, match="after this job was submitted"):
        planned(now - 1)
    assert planned(now - 1, branch="dev").shards, "main keeps the later one"
    with monkeypatch.context() as ahead:
        ahead.setattr(time, "time", lambda: now + 3600)
        go(repo, target, size=3 * SIZE)
    assert planned(now).shards


def test_what_somebody_changed_is_put_right_by_the_same_request_when_asked(
    model: Path, on_hub: Namespace, go: Run
) -> None:
    repo, target = upload(on_hub, "source", model), on_hub.repo("target")
    go(repo, target, size=SIZE)
    on_hub.admin.put_files(target, {"config.json": b'{"mine": true}'})
    assert not go(repo, target, size=SIZE, overwrite=True).published.found
    assert from_hub(on_hub.endpoint, target)("config.json") == (model / "config.json").read_bytes()
    assert go(repo, target, size=SIZE).published.found


def test_weights_that_somebody_changed_are_not_believed(model: Path, on_hub: Namespace, go: Run) -> None:
    repo, target = upload(on_hub, "source", model), on_hub.repo("target")
    shard = go(repo, target, size=SIZE).plan.shards[0].path
    on_hub.admin.put_files(target, {shard: b"x" * 5000}, lfs=[shard])
    on_hub.admin.put_files(repo, {"LICENSE": b"another"})
    go(repo, target, size=SIZE, overwrite=True)
    assert read_checkpoint(from_hub(on_hub.endpoint, target)) == read_checkpoint(from_hub(on_hub.endpoint, repo))


def test_a_flipped_byte_at_the_source_never_gets_published(model: Path, on_hub: Namespace, go: Run) -> None:
    repo, target = upload(on_hub, "source", model), on_hub.repo("target")
    on_hub.admin.create_repo(target)
    head = on_hub.admin.head(target)
    on_hub.admin.fault("GET /_cdn/.*model-00002-of-00004", "wrong_bytes", at=5000)
    with pytest.raises(SourceCorrupt, match="model-00002-of-00004.safetensors"):
        go(repo, target, size=SIZE)
    assert on_hub.admin.head(target) == head


SEEN_BY: dict[str, dict[str, str]] = {"few": {"visibility": "private"}, "some": {"gated": "manual"}, "all": {}}


@pytest.mark.parametrize("source", ["few", "some"])
def test_a_source_that_not_everyone_sees_makes_a_private_target(
    source: str, model: Path, on_hub: Namespace, go: Run
) -> None:
    repo = upload(on_hub, "secret", model, **SEEN_BY[source])
    go(repo, on_hub.repo("target"), size=SIZE)
    assert on_hub.admin.state(on_hub.repo("target"))["visibility"] == "private"


def test_a_public_target_of_a_private_source_is_refused_unless_asked(model: Path, on_hub: Namespace, go: Run) -> None:
    repo, target = upload(on_hub, "secret", model, visibility="private"), on_hub.repo("target")
    on_hub.admin.create_repo(target)
    head = on_hub.admin.head(target)
    with pytest.raises(TargetMoreVisible, match="--public|public"):
        go(repo, target, size=SIZE)
    assert on_hub.admin.head(target) == head
    go(repo, target, size=SIZE, visibility="public")
    assert read_checkpoint(from_hub(on_hub.endpoint, target)) == read_checkpoint(from_folder(model))


@pytest.mark.parametrize(("source", "target"), [("few", "some"), ("few", "all"), ("some", "all"), ("some", "some")])
def test_a_target_that_more_may_see_than_its_source_is_refused(
    source: str, target: str, model: Path, on_hub: Namespace, go: Run
) -> None:
    repo, there = upload(on_hub, "secret", model, **SEEN_BY[source]), on_hub.repo("target")
    on_hub.admin.create_repo(there, **SEEN_BY[target])
    with nullcontext() if source == target else pytest.raises(TargetMoreVisible, match="but its source"):
        go(repo, there, size=SIZE)


def test_what_a_private_repository_lends_is_not_shown_to_more_but_what_a_folder_holds_may_be(
    model: Path, on_hub: Namespace, go: Run
) -> None:
    lender, target = upload(on_hub, "secret", model, visibility="private"), on_hub.repo("target")
    (model / "tokenizer.json").unlink()
    on_hub.admin.create_repo(target)
    with pytest.raises(TargetMoreVisible, match="secret is private"):
        go(model, target, size=SIZE, config_from=parse_place(lender))
    go(model, target, size=SIZE)


def test_a_target_that_changed_while_we_worked_is_a_conflict(model: Path, on_hub: Namespace, go: Run) -> None:
    repo, target = upload(on_hub, "source", model), on_hub.repo("target")
    on_hub.admin.create_repo(target)
    rule = on_hub.admin.fault("GET /_cdn/.*model-00004-of-00004", "hold", skip=1, times=1)
    failures: list[ReshardError] = []

    def work() -> None:
        try:
            go(repo, target, size=SIZE)
        except ReshardError as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    on_hub.admin.wait_for_fault(rule, waiting=1)
    on_hub.admin.put_files(target, {"config.json": b"{}"})
    head = on_hub.admin.head(target)
    on_hub.admin.release(rule)
    thread.join(60)
    assert [type(f) for f in failures] == [TargetConflict]
    assert on_hub.admin.head(target) == head


def loses_a_tensor(known: Known) -> Plan:
    """In entries and headers alike."""
    one, *rest = known.opened.checkpoints
    less = replace(one, tensors=one.tensors[1:])
    return make_plan(replace(known, opened=replace(known.opened, checkpoints=(less, *rest))))


def misspells_a_header(known: Known) -> Plan:
    made = make_plan(known)
    return replace(made, shards=misspelt(made.shards))


def misspelt(shards: Sequence[Shard]) -> tuple[Shard, ...]:
    return tuple(replace(shard, header=shard.header.replace(b".weight", b".Weight")) for shard in shards)


def test_a_config_that_is_no_text_is_carried_as_it_is_beside_weights_that_are_cast(
    model: Path, tmp_path: Path, go: Run
) -> None:
    latin = '{"torch_dtype": "float32", "author": "José"}'.encode("latin-1")
    (model / "config.json").write_bytes(latin)
    report = go(model, tmp_path / "out", size=SIZE, dtype="bfloat16")
    assert "config.json is not UTF-8: its dtype is not changed" in report.plan.notes
    assert (tmp_path / "out" / "config.json").read_bytes() == latin


@pytest.mark.parametrize("planner", [loses_a_tensor, misspells_a_header])
def test_a_plan_that_does_not_hold_the_source_goes_no_further(
    planner: Callable[[Known], Plan], model: Path, tmp_path: Path, go: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting, "make_plan", planner)
    with pytest.raises(ProofError, match="the plan does not match the source"):
        go(model, tmp_path / "out", size=SIZE)


@pytest.mark.parametrize(("path", "most"), [("model.safetensors.index.json", INDEX_MAX), ("config.json", CONFIG_MAX)])
def test_a_text_that_is_longer_than_any_is_refused_unread(
    path: str, most: int, model: Path, tmp_path: Path, go: Run
) -> None:
    os.truncate(model / path, most + 1)
    with pytest.raises(BadIndex, match=f"{path}: {most + 1:,} bytes, and the limit for such a file is {most:,}"):
        go(model, tmp_path / "out", size=SIZE)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A few tensors of a class that transformers has."""
    folder = tmp_path / "llama"
    arrays = {"model.norm.weight": np.ones(16, np.float32), "model.embed_tokens.weight": np.ones((64, 16), np.float32)}
    save_single(folder, arrays)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("blind", "error", "said"),
    [(False, ProofError, "the plan does not match"), (True, ReloadFailed, r"model\.norm\.weight")],
)
def test_headers_that_changed_since_they_were_planned_are_found_without_and_by_the_models_own_class(
    blind: bool,
    error: type[ProofError],
    said: str,
    llama: Path,
    tmp_path: Path,
    go: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_plan, check_model = job_checks.check_plan, job_checks.check_model
    planned = (lambda shards: shards) if blind else misspelt
    monkeypatch.setattr(reshard, "check_plan", lambda made, shards: check_plan(made, planned(shards)))
    monkeypatch.setattr(reshard, "check_model", lambda made, shards, *rest: check_model(made, misspelt(shards), *rest))
    copied: list[object] = []
    copy_group = driving.copy_group
    monkeypatch.setattr(reshard, "copy_group", lambda *these: (copied.append(these), copy_group(*these))[1])
    with pytest.raises(error, match=said):
        go(llama, tmp_path / "out")
    assert blind or not copied, "a plan is checked before anything of it is copied"
    assert not (tmp_path / "out").exists()


def test_a_model_that_no_class_can_check_is_not_copied_where_that_is_required(
    model: Path, tmp_path: Path, go: Run
) -> None:
    with pytest.raises(ModelCheckRequired):
        go(model, tmp_path / "out", size=SIZE, require="model")
    assert not (tmp_path / "out").exists()


def test_a_required_model_check_is_made_of_what_is_published_already(model: Path, tmp_path: Path, go: Run) -> None:
    published = go(model, tmp_path / "out", size=SIZE).published
    with pytest.raises(ModelCheckRequired):
        go(model, tmp_path / "out", size=SIZE, require="model")
    assert go(model, tmp_path / "out", size=SIZE).published.commit == published.commit


def test_a_required_model_check_is_made_of_another_config_beside_the_same_weights(
    llama: Path, on_hub: Namespace, go: Run
) -> None:
    repo, out = upload(on_hub, "source", llama), on_hub.repo("target")
    first = go(repo, out, require="model").published.commit
    assert go(repo, out, require="model").published.commit == first, "a check that passes publishes nothing again"
    config = json.loads((llama / "config.json").read_bytes()) | {"architectures": ["OwnLM"], "model_type": "own"}
    on_hub.admin.put_files(repo, {"config.json": json.dumps(config).encode()})
    with pytest.raises(ModelCheckRequired, match="OwnLM"):
        go(repo, out, require="model")
    assert on_hub.admin.head(out) == first


def test_a_config_that_is_excluded_says_nothing_of_the_models_class(llama: Path, tmp_path: Path, go: Run) -> None:
    with pytest.raises(ModelCheckRequired, match="no config.json"):
        go(llama, tmp_path / "out", exclude=("config.json",), require="model")


def test_oversize_fail_refuses_before_anything_is_made(model: Path, tmp_path: Path, go: Run) -> None:
    with pytest.raises(Oversize):
        go(model, tmp_path / "out", size=1000, oversize="fail")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("on_hub", ["http"], indirect=True)  # a content store's chunks are named by their hashes
@pytest.mark.parametrize("where", ["model-00002-of-00004.safetensors", "tokenizer.model"])
def test_a_single_damaged_transfer_is_fetched_again(model: Path, on_hub: Namespace, go: Run, where: str) -> None:
    (model / "tokenizer.model").write_bytes(os.urandom(2_000_000))
    repo = on_hub.repo("source")
    on_hub.admin.create_repo(repo)
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    on_hub.admin.put_files(repo, files, lfs=[*(path for path in files if path.endswith((".safetensors", ".model")))])
    planned = 0 if where == "tokenizer.model" else 1  # reads of a header bring the rest of so small a file along
    on_hub.admin.fault(f"GET /_cdn/.*{where}", "wrong_bytes", at=20_000, times=1, skip=planned)
    go(repo, on_hub.repo("target"), size=SIZE)
    fetch = from_hub(on_hub.endpoint, on_hub.repo("target"))
    assert read_checkpoint(fetch) == read_checkpoint(from_folder(model))
    assert fetch("tokenizer.model") == files["tokenizer.model"]
    assert [fault["hits"] for fault in on_hub.admin.faults()] == [1]


def test_a_file_that_stays_damaged_ends_the_run_after_three_copies(model: Path, on_hub: Namespace, go: Run) -> None:
    repo = upload(on_hub, "source", model)
    place = (repo, "model-00002-of-00004.safetensors", 20_000)
    on_hub.admin.corrupt(*place)
    try:
        with pytest.raises(SourceCorrupt):
            go(repo, on_hub.repo("target"), size=SIZE)
    finally:
        on_hub.admin.corrupt(*place)  # inverted again: other tests' files of the same content share its chunks


def connections() -> set[str]:
    """Those that this process has open over TCP, not the sockets on which a meta loader talks with its process."""
    opened = {os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir()}
    tcp = {line.split()[9] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]}
    return {path for path in opened if path.endswith(tuple(f"socket:[{inode}]" for inode in tcp))}


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_without_a_context_leaves_no_connection_open(
    model: Path, tmp_path: Path, on_hub: Namespace, meta_loader: MetaLoader, fails: bool
) -> None:
    def step(name: str) -> None:
        if fails and name == "copy":
            assert connections() - before  # others end meanwhile, which tests before left open
            raise InterruptedError

    request = asked(upload(on_hub, "source", model), tmp_path / "out", size=SIZE, transport="http")
    before = connections()
    for _ in range(2):
        plan(request)
        assert connections() <= before
    with pytest.raises(InterruptedError) if fails else nullcontext():
        reshard.run(request, watcher=reshard.Watcher(step=step), meta_loader=meta_loader)
    assert connections() <= before


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("on_hub", ["http"], indirect=True)
def test_a_verification_without_a_context_leaves_nothing_open(model: Path, on_hub: Namespace, fails: bool) -> None:
    def progress(done: int, total: int) -> None:
        if fails and done:
            assert connections() - before  # others end meanwhile, which tests before left open
            raise InterruptedError

    repo, before = upload(on_hub, "source", model), connections()
    with pytest.raises(InterruptedError) if fails else nullcontext() as why:
        verify(repo, model, deep=True, progress=progress)
    opened = [Path(os.path.realpath(entry)) for entry in Path("/proc/self/fd").iterdir()]
    assert connections() <= before and not [path for path in opened if path.is_relative_to(model)]
    assert not fails or why  # which keeps alive what its traceback refers to
