"""A target that holds what reshard did not publish for this source: refused, replaced when asked, and brought back."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi

from reshard.pipeline.api import plan
from reshard.pipeline.checkpoint.formats.safetensors import build_header
from reshard.pipeline.errors import FoldersNested, KeptOriginal, NothingToRollBack, NoWriteAccess, TargetOccupied
from reshard.pipeline.limits import WAIT_MAX
from reshard.pipeline.places import parse_place
from reshard.pipeline.planning.model import Plan
from reshard.pipeline.publishing.rollback import rollback
from reshard.pipeline.request import Options
from reshard.pipeline.stores.connect import Context, open_target
from reshard.pipeline.stores.folder.target import FolderTarget
from tests.hub.fixtures import Namespace
from tests.pipeline.conftest import Run, asked, upload
from tests.pipeline.stores.conftest import write_files
from tests.support.checker import from_folder, from_hub, read_checkpoint
from tests.support.models import arrays, save_model, save_single

SIZE = 20_000
OTHER = {"model.safetensors": b"other weights", "config.json": b'{"model_type": "other"}', "README.md": b"# Other\n"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", 12, 4000, 2)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A folder with another model."""
    folder = tmp_path / "other"
    write_files(folder, OTHER)
    return folder


def contents(root: Path) -> dict[str, bytes]:
    """Every file but the record of our publications."""
    files = (path for path in root.rglob("*") if path.is_file())
    return {
        p.relative_to(root).as_posix(): p.read_bytes() for p in files if ".reshard" not in p.relative_to(root).parts
    }


def hold(space: Namespace, name: str, files: dict[str, bytes]) -> str:
    """A repository that somebody filled by hand."""
    repo = space.repo(name)
    space.admin.create_repo(repo)
    space.admin.put_files(repo, files, lfs=[path for path in files if path.endswith(".safetensors")])
    return repo


# ---------------------------------------------------------------------------------------------------------- refused


def test_a_folder_with_another_model_is_refused_and_stays(model: Path, other: Path, go: Run) -> None:
    with pytest.raises(TargetOccupied) as refused:
        go(model, other, size=SIZE)
    assert contents(other) == OTHER
    told = "did not publish: config.json (would be overwritten), model.safetensors (would be deleted)"
    assert str(refused.value).endswith(f"files that reshard {told}")
    assert "--overwrite" in refused.value.next_step and refused.value.exit_code == 7


def test_files_that_would_stay_are_not_called_replaced(model: Path, tmp_path: Path, go: Run) -> None:
    write_files(tmp_path / "models", {"a/config.json": b"{}", "a/model.safetensors": b"other weights"})
    with pytest.raises(TargetOccupied, match=r": a/config\.json, a/model\.safetensors$") as refused:
        go(model, tmp_path / "models", size=SIZE)
    assert refused.value.next_step.endswith("--overwrite to keep them and add the new files")


def test_five_files_that_would_be_replaced_are_named(model: Path, other: Path, go: Run) -> None:
    write_files(other, {f"model-0000{n}-of-00009.safetensors": b"other weights" for n in range(1, 10)})
    with pytest.raises(TargetOccupied) as refused:
        go(model, other, size=SIZE)
    told = str(refused.value)
    assert told.count("(would be overwritten)") == 1 and told.count("(would be deleted)") == 4, told
    assert told.endswith(", and 6 more"), told


@pytest.mark.parametrize("held", [*OTHER, "pytorch_model.bin", "model.safetensors.index.json", "unet/config.json"])
def test_weights_a_config_or_a_card_make_a_repository_somebody_elses(
    held: str, model: Path, on_hub: Namespace, go: Run
) -> None:
    repo = hold(on_hub, "held", {held: OTHER.get(held, b"{}")})
    head = on_hub.admin.head(repo)
    with pytest.raises(TargetOccupied, match=held):
        go(upload(on_hub, "model", model), repo, size=SIZE)
    assert on_hub.admin.head(repo) == head


def test_a_publication_of_another_source_is_refused_by_its_name(model: Path, on_hub: Namespace, go: Run) -> None:
    one, two, target = upload(on_hub, "one", model), upload(on_hub, "two", model), on_hub.repo("target")
    go(one, target, size=SIZE)
    with pytest.raises(TargetOccupied, match=f"a publication of {one}: "):
        go(two, target, size=SIZE)


def test_a_file_that_its_owner_added_is_not_replaced_when_the_source_gets_one_of_that_name(
    model: Path, tmp_path: Path, go: Run
) -> None:
    go(model, tmp_path / "out", size=SIZE)
    write_files(tmp_path / "out", {"notes.txt": b"mine"})
    go(model, tmp_path / "out", size=2 * SIZE)
    write_files(model, {"notes.txt": b"theirs"})
    with pytest.raises(TargetOccupied, match=r"did not publish: notes\.txt \(would be overwritten\)$"):
        go(model, tmp_path / "out", size=SIZE)
    assert (tmp_path / "out" / "notes.txt").read_bytes() == b"mine"


def test_what_appears_while_it_is_planned_is_refused_as_well(
    model: Path, tmp_path: Path, go: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, out = FolderTarget.prepare, tmp_path / "out"

    def late(self: FolderTarget, private: bool) -> str:
        write_files(out, OTHER)
        return prepare(self, private)

    monkeypatch.setattr(FolderTarget, "prepare", late)
    with pytest.raises(TargetOccupied):
        go(model, out, size=SIZE)
    assert contents(out) == OTHER


def test_what_a_run_kept_beside_its_target_is_no_source_for_it(model: Path, tmp_path: Path, go: Run) -> None:
    go(model, model, size=SIZE)
    kept = tmp_path / ".model.reshard.last"
    with pytest.raises(FoldersNested, match="is a working folder of .*, so the run would remove its own source"):
        go(kept, model, size=SIZE, overwrite=True)
    assert go(kept, tmp_path / "elsewhere", size=SIZE).plan.shards
    assert kept.exists()


# -------------------------------------------------------------------------------------------------- needs no flag


def test_what_replaces_nothing_of_anybody_needs_no_flag(model: Path, tmp_path: Path, go: Run) -> None:
    write_files(tmp_path / "out", {"notes.txt": b"mine", "runs/1.log": b"x"})
    go(model, tmp_path / "out", size=SIZE)
    assert (tmp_path / "out" / "notes.txt").read_bytes() == b"mine"
    again = go(model, tmp_path / "out", size=2 * SIZE)
    assert not again.published.found


def test_a_source_that_is_resharded_in_place_needs_no_flag(model: Path, on_hub: Namespace, go: Run) -> None:
    repo, tensors = upload(on_hub, "model", model), read_checkpoint(from_folder(model))
    assert go(repo, repo, size=SIZE).plan.occupied
    assert go(model, model, size=SIZE).plan.occupied
    assert read_checkpoint(from_hub(on_hub.endpoint, repo)) == tensors == read_checkpoint(from_folder(model))


@pytest.mark.parametrize("kind", ["folder", "hub"])
def test_the_same_in_place_again_finds_it_done_and_leaves_what_it_replaced_to_be_brought_back(
    kind: str, model: Path, on_hub: Namespace, go: Run
) -> None:
    before = contents(model)
    place = str(model) if kind == "folder" else upload(on_hub, "model", model)
    first = go(place, place, size=SIZE, dtype="float16").published
    again = go(place, place, size=SIZE, dtype="float16").published
    assert (again.commit, again.found) == (first.commit, True)
    if kind == "folder":
        rollback(open_target(parse_place(place), Options(), Context.from_env()), first.commit)
        assert contents(model) == before
    assert not go(place, place, size=2 * SIZE, dtype="float16").published.found, "asked for otherwise, it is done"


def test_files_that_stay_as_they_are_in_place_are_not_among_what_is_overwritten(model: Path, go: Run) -> None:
    (model / "LICENSE").write_text("MIT")
    for size in (SIZE, 2 * SIZE):
        plan = go(model, model, size=size).plan
        assert plan.replaced and not {"LICENSE", "config.json"} & {*plan.occupied, *(f.path for f in plan.replaced)}


def test_a_pull_request_takes_nothing_and_needs_no_flag(model: Path, on_hub: Namespace, go: Run) -> None:
    held = hold(on_hub, "held", OTHER)
    head = on_hub.admin.head(held)
    go(upload(on_hub, "model", model), held, size=SIZE, pr=True)
    assert on_hub.admin.head(held) == head


def test_a_branch_is_free_as_long_as_it_is_what_main_is(model: Path, on_hub: Namespace, go: Run) -> None:
    """As a run leaves it that made the branch and was killed."""
    held, repo = hold(on_hub, "held", OTHER), upload(on_hub, "model", model)
    api = HfApi(on_hub.endpoint, on_hub.token)
    api.create_branch(held, branch="cut")
    go(repo, held, size=SIZE, branch="cut")
    assert from_hub(on_hub.endpoint, held)("config.json") == OTHER["config.json"]
    api.create_branch(held, branch="theirs")
    api.upload_file(path_or_fileobj=b"{}", path_in_repo="config.json", repo_id=held, revision="theirs")
    with pytest.raises(TargetOccupied):
        go(repo, held, size=SIZE, branch="theirs")
    api.create_branch(held, branch="old")
    on_hub.admin.put_files(held, {"README.md": b"# Main moves on\n"})
    go(repo, held, size=SIZE, branch="old")


def test_another_branch_of_the_source_is_not_the_source(model: Path, on_hub: Namespace, go: Run) -> None:
    repo = upload(on_hub, "model", model)
    api = HfApi(on_hub.endpoint, on_hub.token)
    api.create_branch(repo, branch="theirs")
    api.upload_file(path_or_fileobj=b"{}", path_in_repo="config.json", repo_id=repo, revision="theirs")
    with pytest.raises(TargetOccupied):
        go(repo, repo, size=SIZE, branch="theirs")


def test_the_manifest_says_whose_weights_these_are_once_the_history_is_squashed(
    model: Path, on_hub: Namespace, go: Run
) -> None:
    shutil.copy(next(model.glob("*.safetensors")), model / "adapter_model.safetensors")  # carried as it is
    repo, other, target = upload(on_hub, "model", model), upload(on_hub, "other", model), on_hub.repo("target")
    go(repo, target, size=SIZE)
    assert "adapter_model.safetensors" in on_hub.admin.files(target)
    HfApi(on_hub.endpoint, on_hub.token).super_squash_history(target)
    with pytest.raises(TargetOccupied, match="did not publish"):
        go(other, target, size=2 * SIZE)
    assert not go(repo, target, size=2 * SIZE).published.found


def test_a_manifest_speaks_for_weights_and_for_no_other_file(model: Path, on_hub: Namespace, go: Run) -> None:
    repo, target = upload(on_hub, "model", model), on_hub.repo("target")
    go(repo, target, size=SIZE)
    on_hub.admin.put_files(target, {"config.json": b'{"their": "own"}'})
    HfApi(on_hub.endpoint, on_hub.token).super_squash_history(target)
    with pytest.raises(TargetOccupied, match=r"did not publish: config\.json \(would be overwritten\)$"):
        go(repo, target, size=2 * SIZE)


def test_a_manifest_says_nothing_of_weights_that_are_not_its_own(
    model: Path, tmp_path: Path, on_hub: Namespace, go: Run
) -> None:
    """As after a download, a change of the weights, and an upload under another name."""
    repo, out = upload(on_hub, "model", model), tmp_path / "out"
    go(repo, out, size=SIZE)
    shutil.rmtree(out / ".reshard")
    with pytest.raises(TargetOccupied, match="did not publish"):  # a folder has its record, or nothing is known
        go(repo, out, size=2 * SIZE)
    first = min(out.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-1] + b"!")
    with pytest.raises(TargetOccupied, match="did not publish"):
        go(repo, upload(on_hub, "tuned", out), size=2 * SIZE)


# ------------------------------------------------------------------------------------------------ told by the plan


def test_a_plan_tells_that_a_card_keeps_its_text(model: Path, other: Path, tmp_path: Path, go: Run) -> None:
    told = "README.md keeps its text and gets a reshard section"
    assert told in plan(asked(model, other, size=SIZE)).notes
    assert told in go(model, other, size=SIZE, overwrite=True).plan.notes
    (model / "README.md").unlink(missing_ok=True)
    go(model, tmp_path / "out", size=SIZE)
    assert told not in plan(asked(model, tmp_path / "out", size=2 * SIZE)).notes, "it holds nothing but the block"


@pytest.mark.parametrize("names", [("link", "model"), ("model", "link")])
def test_a_folder_is_one_place_by_its_name_and_by_a_link_to_it(
    model: Path, tmp_path: Path, go: Run, names: tuple[str, str]
) -> None:
    (tmp_path / "link").symlink_to("model")
    first, again = (tmp_path / name for name in names)
    kept, before = tmp_path / ".model.reshard.last", contents(model)
    out = tmp_path / "out"
    go(first, first, size=SIZE)
    assert go(again, again, size=SIZE).published.found and contents(kept) == before
    go(first, out, size=SIZE)
    assert go(again, out, size=SIZE).published.found
    assert not go(again, out, size=2 * SIZE).published.found, "a publication of the same source, and not occupied"
    go(again, again, size=2 * SIZE)
    assert not kept.exists(), "what was replaced is ours"


def test_what_an_earlier_run_kept_is_named_before_the_next_one_removes_it(model: Path, go: Run) -> None:
    kept = model.parent / ".model.reshard.last"

    def told(made: Plan) -> bool:
        return any(str(kept) in note and "will be deleted" in note for note in made.notes)

    assert not told(go(model, model, size=SIZE).plan)
    assert kept.exists() and not told(go(model, model, size=SIZE).plan), "there was nothing to do"
    assert told(plan(asked(model, model, size=2 * SIZE))) and kept.exists()
    assert told(go(model, model, size=2 * SIZE).plan) and not kept.exists()
    assert not told(plan(asked(model, model, size=3 * SIZE)))


def test_the_only_copy_of_what_was_cast_in_place_goes_by_an_explicit_word(tmp_path: Path, go: Run) -> None:
    model, kept = tmp_path / "model", tmp_path / ".model.reshard.last"
    save_single(model, arrays(4, 4000))
    original = (model / "model.safetensors").read_bytes()
    go(model, model, size=SIZE, dtype="float16")
    with pytest.raises(KeptOriginal, match="only copy of the original weights .* [(]F32[)]") as refused:
        go(model, model, size=2 * SIZE)
    assert "--overwrite" in refused.value.next_step and refused.value.exit_code == 7
    says = f"a run will fail (exit code 7) unless you use --overwrite: {refused.value}"
    assert plan(asked(model, model, size=2 * SIZE)).notes[0] == says
    assert says not in plan(asked(model, model, size=2 * SIZE, overwrite=True)).notes
    assert says not in plan(asked(model, tmp_path / "beside", size=2 * SIZE)).notes
    assert (kept / "model.safetensors").read_bytes() == original
    go(model, model, size=2 * SIZE, overwrite=True)
    assert not kept.exists()


def test_one_tensor_that_keeps_its_dtype_hides_no_other_that_was_cast(tmp_path: Path, go: Run) -> None:
    model = tmp_path / "model"
    tensors = [("w", "F8_E4M3", (128, 64)), ("w_scale_inv", "F32", (1, 1)), ("norm", "F32", (4000,))]
    tensors += [(f"norm.{i}", "F32", (4000,)) for i in range(4)]
    model.mkdir()
    (model / "model.safetensors").write_bytes(build_header(tensors, {}) + bytes(128 * 64 + 4 + 5 * 16_000))
    go(model, model, size=SIZE, dtype="bfloat16")
    with pytest.raises(KeptOriginal, match="[(]F32[)]"):
        go(model, model, size=2 * SIZE)


def test_the_only_copy_of_what_was_excluded_and_pruned_goes_by_an_explicit_word(tmp_path: Path, go: Run) -> None:
    model, kept = tmp_path / "model", tmp_path / ".model.reshard.last"
    save_single(model, arrays(4, 4000))
    mtp = arrays(2, 4000, prefix="mtp")
    save_single(model, mtp, "mtp.safetensors")
    go(model, model, size=SIZE, exclude=("mtp*",), prune=True)
    assert not (model / "mtp.safetensors").exists()
    for again in ({}, {"exclude": ("mtp*",), "prune": True}):
        with pytest.raises(KeptOriginal, match=rf"\({min(mtp)} and {len(mtp) - 1} more\)"):
            go(model, model, size=2 * SIZE, **again)
    assert (kept / "mtp.safetensors").exists()
    go(model, model, size=2 * SIZE, overwrite=True)
    assert not kept.exists()


@pytest.fixture
def resharded(tmp_path: Path, go: Run) -> Path:
    """A folder that was resharded in place, with a second set of weights and files that were only carried."""
    model = tmp_path / "model"
    save_single(model, arrays(4, 4000))
    save_single(model / "vae", arrays(2, 4000, prefix="vae"))
    write_files(model, {"tok.json": b"{}", ".env": b"x=1", "q.gguf": b"other weights"})
    go(model, model, size=SIZE, include=(".env", "*.gguf"))
    return model


@pytest.mark.parametrize("options", [{}, {"exclude": ("vae/*", "tok*"), "include": (".env", "*.gguf")}])
def test_what_a_later_run_in_place_leaves_out_stays(resharded: Path, go: Run, options: dict[str, Any]) -> None:
    vae = {path: content for path, content in contents(resharded).items() if path.startswith("vae/")}
    made = go(resharded, resharded, size=2 * SIZE, **options).plan
    assert {"tok.json", ".env", "q.gguf"} <= contents(resharded).keys() and not {"tok.json", *vae} & {*made.deletes}
    if options:
        assert vae and vae.items() <= contents(resharded).items()


@pytest.mark.parametrize("options", [{"dtype": "float16"}, {"exclude": ("vae/*",), "prune": True}])
def test_what_only_a_later_run_in_place_takes_away_is_kept(resharded: Path, go: Run, options: dict[str, Any]) -> None:
    before, kept = contents(resharded), resharded.with_name(".model.reshard.last")
    go(resharded, resharded, size=2 * SIZE, **options)
    assert contents(kept) == before
    with pytest.raises(KeptOriginal):
        go(resharded, resharded, size=3 * SIZE)
    assert contents(kept) == before


def test_tensors_under_other_names_are_not_lost_and_one_that_is_missing_besides_them_is(
    tmp_path: Path, go: Run
) -> None:
    def wrapped(name: str) -> Path:
        save_single(tmp_path / name, arrays(4, 4000, prefix="module.layer"))
        return tmp_path / name

    renamed, short = wrapped("renamed"), wrapped("short")
    go(renamed, renamed, size=SIZE, strip_prefix="auto")
    go(renamed, renamed, size=2 * SIZE)
    assert not (tmp_path / ".renamed.reshard.last").exists()
    save_single(short, arrays(1, 4000, prefix="mtp"), "mtp.safetensors")
    go(short, short, size=SIZE, strip_prefix="auto", exclude=("mtp*",), prune=True)
    with pytest.raises(KeptOriginal, match="[(]F32[)]"):
        go(short, short, size=2 * SIZE)


def test_an_original_that_cannot_be_read_is_not_taken_for_nothing(tmp_path: Path, go: Run) -> None:
    model, kept = tmp_path / "model", tmp_path / ".model.reshard.last"
    save_single(model, arrays(4, 4000))
    (model / "broken.safetensors").write_bytes(b"cut off")
    go(model, model, size=SIZE, dtype="float16", exclude=("broken*",))
    with pytest.raises(KeptOriginal, match="[(]F32[)]"):
        go(model, model, size=2 * SIZE, exclude=("broken*",))
    (kept / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(KeptOriginal, match="not readable"):
        go(model, model, size=2 * SIZE, exclude=("broken*",))
    assert kept.exists()


def test_a_plan_tells_that_a_folder_may_not_be_written(model: Path) -> None:
    made = plan(asked(model, "/proc/self/out", size=SIZE))
    assert f"a run will fail: cannot write to /proc/{os.getpid()}: no permission" in made.notes


def test_a_plan_tells_that_a_repository_is_created_and_who_may_see_it(model: Path, on_hub: Namespace, go: Run) -> None:
    new, open_, hidden = (
        on_hub.repo("new"),
        upload(on_hub, "open", model),
        upload(on_hub, "hidden", model, visibility="private"),
    )

    def told(source: str | Path, **options: str) -> str:
        return next(note for note in plan(asked(source, new, size=SIZE, **options)).notes if new in note)

    ours = f"; the token of {on_hub.name} can write there"
    assert told(model) == told(hidden) == f"will create {new} as a private repository (use --public to change){ours}"
    assert told(open_) == f"will create {new} as a public repository (use --private to change){ours}"
    assert told(open_, visibility="private") == f"will create {new} as a private repository{ours}"
    assert told(model, visibility="public") == f"will create {new} as a public repository{ours}"
    assert f"will create {new} as a private repository (use --public to change)" in go(model, new, size=SIZE).plan.notes
    for visibility in ("as-source", "private"):
        assert not any(new in note for note in plan(asked(model, new, size=2 * SIZE, visibility=visibility)).notes)
    (stays,) = [n for n in plan(asked(model, new, size=2 * SIZE, visibility="public")).notes if new in n]
    assert stays == f"{new} stays private: --public does not change an existing repository"


# What a mirror may say of an account: words, an account without a name, and that it cannot be asked for a long time.
NO_ACCOUNT: list[dict[str, Any]] = [
    {"action": "nonsense", "body": "<html>"},
    {"action": "nonsense", "body": "{}"},
    {"action": "status", "status": 429, "headers": {"retry-after": f"{WAIT_MAX + 1:.0f}"}},
]


@pytest.mark.parametrize("there", [True, False])
def test_a_plan_promises_nothing_where_a_run_would_be_refused(
    there: bool, model: Path, on_hub: Namespace, go: Run
) -> None:
    stranger = on_hub.admin.create_user(f"{on_hub.name}-stranger")
    theirs = f"{stranger.name}/target"
    if there:
        on_hub.admin.create_repo(theirs, visibility="public")
    with pytest.raises(NoWriteAccess) as refused:
        go(model, theirs, size=SIZE)
    (note,) = (note for note in plan(asked(model, theirs, size=SIZE)).notes if theirs in note)
    assert note == f"a run will fail: {refused.value}"
    assert f"the token of {on_hub.name} does not have write access to {theirs}" in note


def test_a_plan_promises_nothing_for_a_token_that_only_reads(
    model: Path, on_hub: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", on_hub.admin.create_token(on_hub.name, role="read"))
    (note,) = plan(asked(model, on_hub.repo("new"), size=SIZE)).notes
    assert note.startswith(f"a run will fail: the token of {on_hub.name} does not have write access to ")


def test_a_plan_says_where_write_access_cannot_be_asked(
    model: Path, on_hub: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, there = on_hub.repo("new"), hold(on_hub, "there", {})

    def unchecked(repo: str, **options: bool) -> str:
        notes = plan(asked(model, repo, size=SIZE, **options)).notes
        return next(note.partition(" not checked ")[2] for note in notes if "not checked" in note)

    assert "pull request" in unchecked(there, pr=True)
    on_hub.admin.settings(auth_check_status=404)
    assert "does not report token permissions" in unchecked(there)
    on_hub.admin.fault("GET /api/whoami-v2", "status", status=404)
    assert "whoami-v2" in unchecked(new)
    for answer in NO_ACCOUNT:
        on_hub.admin.clear_faults()
        on_hub.admin.fault("GET /api/whoami-v2", **answer)
        assert on_hub.endpoint in unchecked(new)
    monkeypatch.delenv("HF_TOKEN")
    assert unchecked(new) == "(no token)"
    assert (
        plan(asked(model, new, size=SIZE)).notes[0]
        == f"will create {new} as a private repository (use --public to change)"
    )


# -------------------------------------------------------------------------------------- replaced, and brought back


def test_it_is_replaced_when_asked_and_then_the_target_is_ours(model: Path, on_hub: Namespace, go: Run) -> None:
    held, repo = hold(on_hub, "held", OTHER), upload(on_hub, "model", model)
    plan = go(repo, held, size=SIZE, overwrite=True).plan
    assert plan.occupied == (*sorted(OTHER),)
    sizes = [(path, len(OTHER[path])) for path in ("config.json", "model.safetensors")]
    assert [(file.path, file.size) for file in plan.replaced] == sizes
    assert read_checkpoint(from_hub(on_hub.endpoint, held)) == read_checkpoint(from_folder(model))
    assert from_hub(on_hub.endpoint, held)("README.md").startswith(OTHER["README.md"])
    assert not go(repo, held, size=2 * SIZE).published.found


def test_what_a_folder_held_is_brought_back_until_the_next_run(model: Path, other: Path, go: Run) -> None:
    published = go(model, other, size=SIZE, overwrite=True).published.commit
    assert contents(other.parent / ".other.reshard.last") == OTHER
    rollback(open_target(parse_place(str(other)), Options(), Context.from_env()), published)
    assert contents(other) == OTHER
    assert not (other.parent / ".other.reshard.last").exists()
    go(model, other, size=SIZE, overwrite=True)
    again = go(model, other, size=2 * SIZE).published.commit
    assert not (other.parent / ".other.reshard.last").exists()
    with pytest.raises(NothingToRollBack, match="no earlier version was kept"):
        rollback(open_target(parse_place(str(other)), Options(), Context.from_env()), again)


def test_files_that_others_write_meanwhile_do_not_stand_in_the_way_of_a_rollback(
    model: Path, other: Path, go: Run
) -> None:
    write_files(other, {"train.log": b"1\n"})
    published = go(model, other, size=SIZE, overwrite=True).published.commit
    with (other / "train.log").open("ab") as log:
        log.write(b"2\n")
    write_files(other, {"eval.json": b"{}"})
    rollback(open_target(parse_place(str(other)), Options(), Context.from_env()), published)
    assert contents(other) == OTHER | {"train.log": b"1\n2\n", "eval.json": b"{}"}


def test_a_folder_can_be_written_again_after_a_rollback_to_what_others_made_of_it(
    model: Path, tmp_path: Path, go: Run
) -> None:
    out = tmp_path / "out"
    go(model, out, size=SIZE)
    write_files(out, {"config.json": b"{}"})
    second = go(model, out, size=2 * SIZE, overwrite=True).published.commit
    rollback(open_target(parse_place(str(out)), Options(), Context.from_env()), second)
    assert (out / "config.json").read_bytes() == b"{}"
    with pytest.raises(TargetOccupied):
        go(model, out, size=3 * SIZE)
    assert not go(model, out, size=3 * SIZE, overwrite=True).published.found


def test_prune_keeps_a_last_state_only_where_it_takes_something_of_others(model: Path, tmp_path: Path, go: Run) -> None:
    out, kept = tmp_path / "out", tmp_path / ".out.reshard.last"
    go(model, out, size=SIZE, prune=True)
    go(model, out, size=2 * SIZE, prune=True)
    assert not kept.exists()
    write_files(out, {"notes.txt": b"mine"})
    go(model, out, size=2 * SIZE, prune=True, force=True)
    assert (kept / "notes.txt").read_bytes() == b"mine"


def test_what_prune_deletes_is_brought_back(model: Path, tmp_path: Path, go: Run) -> None:
    write_files(tmp_path / "out", {"notes.txt": b"mine"})
    published = go(model, tmp_path / "out", size=SIZE, prune=True).published.commit
    rollback(open_target(parse_place(str(tmp_path / "out")), Options(), Context.from_env()), published)
    assert contents(tmp_path / "out") == {"notes.txt": b"mine"}


def test_a_folder_that_was_resharded_in_place_is_brought_back(model: Path, go: Run) -> None:
    before = contents(model)
    published = go(model, model, size=SIZE).published.commit
    assert contents(model) != before
    rollback(open_target(parse_place(str(model)), Options(), Context.from_env()), published)
    assert contents(model) == before
