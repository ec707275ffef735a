"""`reshard plan` and `reshard run` between folders, as a person types them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from reshard.cli.output import human_bytes
from reshard.cli.plan_text import occupied
from reshard.client.models.plans import Plan, Replaced, Transports
from tests.cli.conftest import Run
from tests.pipeline.stores.conftest import write_files
from tests.support.giants import save_sparse
from tests.support.models import arrays, save_single
from tests.support.warm import COMMAND


def test_a_plan_shows_what_would_be_written_and_writes_nothing(reshard: Run, model: Path, tmp_path: Path) -> None:
    done = reshard("plan", model, "--to", tmp_path / "out", "--size", "3300B")
    assert done.code == 0, done.err
    assert re.search(
        r"^10 tensors in 1 file \([\d,]+ bytes\) -> 4 files \([\d,]+ bytes\), up to 3,300 bytes each$", done.out, re.M
    )
    assert "model-00001-of-00004.safetensors  3," in done.out
    assert "copied    2 files: config.json, tokenizer.json" in done.out
    assert "skipped   optimizer.pt" in done.out
    assert "card      README.md, with a section" in done.out
    assert not (tmp_path / "out").exists()


def test_a_plan_as_json_has_every_file_with_its_exact_size(reshard: Run, model: Path, tmp_path: Path) -> None:
    (facts,) = reshard("plan", model, "--to", tmp_path / "out", "--size", "3300B", "--json").documents
    assert reshard("run", model, "--to", tmp_path / "out", "--size", "3300B").code == 0
    for file in facts["files"]:
        assert (tmp_path / "out" / file["path"]).stat().st_size == file["size"] <= 3300
    told = [path for name in ("files", "carried") for path in (one["path"] for one in facts[name])]
    told += [*facts["indexes"], facts["manifest"], facts["card"]]
    written = [p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file()]
    assert sorted(told) == sorted(path for path in written if not path.startswith(".reshard/"))
    assert facts["size"] == 3300
    assert [left["path"] for left in facts["left_out"]] == ["optimizer.pt"]


def test_a_plan_without_a_target_is_of_the_cut_alone(reshard: Run, model: Path) -> None:
    (facts,) = reshard("plan", model, "--size", "3300B", "--json").documents
    (whole,) = reshard("plan", model, "--to", model, "--size", "3300B", "--json").documents
    assert whole["deletes"] == ["model.safetensors"] and whole["in_place"] and whole["needs"]["target"]
    assert facts["files"] == whole["files"] and len(facts["files"]) == 4
    assert facts["transports"] == {"source": "file", "target": ""}
    assert facts["target"] is None and not facts["deletes"] and not facts["in_place"] and not facts["needs"]["target"]
    said = reshard("plan", model, "--size", "3300B").out
    assert re.match(rf"{model}@\w+\n10 tensors in .*, up to 3,300 bytes each\n", said), said
    for of_a_target in ("deletes", "overwrites", "warning", "writes", "for the target", "rollback", "->  "):
        assert of_a_target not in said, said


def test_a_plan_names_the_largest_file_and_tensor_and_says_how_much_is_read_for_them(
    reshard: Run, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    tensors = {f"layer.{i:03}": np.full(500 + 50 * (i == 60), i, np.uint8) for i in range(100)}
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    typed = ("plan", tmp_path / "model", "--size", "800B")
    (facts,) = reshard(*typed, "--json").documents
    assert facts["largest"]["tensor"] == {"name": "layer.060", "size": 550}
    assert facts["largest"]["file"] == {name: facts["files"][60][name] for name in ("path", "size")}
    assert facts["largest"]["file"]["size"] == max(file["size"] for file in facts["files"])
    moves = facts["forecast"]
    assert moves["amplification"] == round(moves["read"] / moves["written"], 4)
    said = reshard(*typed).out
    assert f"largest   {facts['files'][60]['path']}, " in said
    assert f"moves     reads {human_bytes(moves['read'])}\n" in said


def test_a_size_that_changes_nothing_is_told(reshard: Run, model: Path, tmp_path: Path) -> None:
    said = "already in this layout: the target gets the same weights in the same files"
    cut = tmp_path / "cut"
    reshard("run", model, "--to", cut, "--size", "9kB")
    for source, size, same in ((model, "9kB", False), (cut, "9kB", True), (cut, "1TB", False)):
        (facts,) = reshard("plan", source, "--to", tmp_path / "out", "--size", size, "--json").documents
        assert (said in facts["notes"]) is same, size
    ran = reshard("run", cut, "--to", tmp_path / "out", "--size", "9kB")
    assert said in " ".join(ran.err.split())
    one = tmp_path / "one"
    reshard("run", model, "--to", one, "--size", "1TB")
    (facts,) = reshard("plan", one, "--size", "1TB", "--json").documents
    assert said in facts["notes"]
    padded = tmp_path / "padded"
    reshard("run", one, "--to", padded, "--size", "1TB", "--align", "4096")
    for source, same in ((one, False), (padded, True)):
        (facts,) = reshard("plan", source, "--size", "1TB", "--align", "4096", "--json").documents
        assert (said in facts["notes"]) is same
    rules = tmp_path / "rules.yaml"
    rules.write_text('- ["^", "other."]')
    (facts,) = reshard("plan", one, "--size", "1TB", "--rename", rules, "--json").documents
    assert said not in facts["notes"]
    save_file({"other": np.zeros(4, np.uint8)}, one / "other.safetensors", metadata={"format": "pt"})
    (facts,) = reshard("plan", one, "--size", "1TB", "--json").documents
    names = [note.removesuffix(f": {said}") for note in facts["notes"] if said in note]
    assert names == ["model", "other"]


def test_a_long_plan_is_shown_in_part_or_whole(reshard: Run, model: Path, tmp_path: Path) -> None:
    for number in range(60):
        (model / f"more-{number:02}.txt").write_text("words")
        save_file({f"w{number}": np.zeros(9, np.uint8)}, model / f"extra-{number:02}.safetensors")
    for number in range(30):
        (model / f"left-{number:02}.pkl").write_bytes(b"")
    short = reshard("plan", model, "--to", tmp_path / "out").out
    assert re.search(r"^  \.\.\. \d+ more; use `reshard plan --all` to show them$", short, re.MULTILINE)
    assert re.search(r"^skipped +1\d more; use `reshard plan --all` to show them$", short, re.MULTILINE)
    whole = reshard("plan", model, "--to", tmp_path / "out", "--all").out
    assert "more" not in whole.replace("more-", "")
    assert {f"{kind}-{n:02}" for kind in ("more", "extra") for n in range(60)} <= set(re.findall(r"\w+-\d\d", whole))
    assert {f"left-{n:02}" for n in range(30)} <= set(re.findall(r"\w+-\d\d", whole))


def test_tied_names_are_told_with_what_becomes_of_them(reshard: Run, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    shared = torch.zeros(96, 16)
    tensors = {"embed.weight": shared, "head.weight": shared, "w": torch.ones(3)}
    torch.save(tensors, tmp_path / "model" / "pytorch_model.bin")
    (facts,) = reshard("plan", tmp_path / "model", "--json").documents
    names = ["embed.weight", "head.weight"]
    assert facts["ties"] == [{"names": names, "written": names}]
    said = reshard("plan", tmp_path / "model").out
    assert "tied      embed.weight, head.weight share one copy in the source; each is written" in said


@pytest.mark.slow
def test_what_others_changed_in_the_target_is_a_warning_of_the_plan_and_the_end_of_a_run(
    reshard: Run, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for number in range(30):
        (model / f"more-{number:02}.txt").write_text("words")
    assert reshard("run", model, "--to", out, "--size", "3300B").code == 0
    changed = sorted(out.glob("more-*.txt"))[:25]
    for path in changed:
        path.write_text("others' words")
    (out / "tokenizer.json").unlink()
    typed = (model, "--to", out, "--size", "5kB")
    shown = reshard("plan", *typed)
    assert shown.code == 0, shown.err
    assert "others changed 26 files in the target since reshard last published; " in shown.out
    assert "a run will fail (exit code 7) unless you use --overwrite" in shown.out
    assert re.search(rf"^drift +{changed[0].name} was replaced$", shown.out, re.MULTILINE)
    assert re.search(r"^drift +6 more; use `reshard plan --all` to show them$", shown.out, re.MULTILINE)
    assert "more" not in reshard("plan", *typed, "--all").out.replace("more-", "")
    (facts,) = reshard("plan", *typed, "--json").documents
    assert set(facts["drift"]) == {f"{path.name} was replaced" for path in changed} | {"tokenizer.json was deleted"}
    assert facts["files"] and facts["overwrite"] is False
    assert reshard("run", *typed).code == 7
    assert "they will be replaced" in reshard("plan", *typed, "--overwrite").out
    assert reshard("run", *typed, "--overwrite").code == 0
    assert reshard("plan", model, "--to", out, "--size", "6kB", "--json").documents[0]["drift"] == []


def test_another_model_in_the_target_is_refused_listed_replaced_when_asked_and_brought_back(
    reshard: Run, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    write_files(out, {"config.json": b"{}", "model-00001-of-00002.safetensors": b"theirs"})
    refused = reshard("run", model, "--to", out, "--size", "3300B")
    assert refused.code == 7 and not refused.out
    assert refused.err.startswith(f"planning\nerror[target.occupied]: {out} already")
    shown = reshard("plan", model, "--to", out, "--size", "3300B").out
    assert re.search(r"^overwrites +config\.json, 2 bytes$", shown, re.MULTILINE)
    assert re.search(r"^deletes +model-00001-of-00002\.safetensors, 6 bytes$", shown, re.MULTILINE)
    assert "a run will fail (exit code 7) unless you use --overwrite to replace them" in shown
    assert "rollback" in reshard("plan", model, "--to", out, "--size", "3300B", "--overwrite").out
    assert reshard("run", model, "--to", out, "--size", "3300B", "--overwrite").code == 0
    undone = reshard("rollback", out)
    assert undone.code == 0 and undone.out == f"Rolled back {out} to its state before reshard last wrote to it\n"
    again = reshard("rollback", out)
    assert (again.code, again.out) == (0, f"Nothing to do: {out} was already rolled back\n")
    assert sorted(path.name for path in out.iterdir()) == [
        ".reshard",
        "config.json",
        "model-00001-of-00002.safetensors",
    ]
    assert reshard("rollback", tmp_path / "nothing").code == 7


def test_a_plan_and_a_run_in_place_say_how_they_are_undone(reshard: Run, model: Path) -> None:
    typed = (model, "--to", model, "--size", "3300B")
    back = f"undo with `reshard rollback {model}` before the next run"
    said = reshard("plan", *typed).out
    assert f"warning   this changes the source itself (model.safetensors); {back}\n" in said, said
    done = reshard("run", *typed)
    assert re.search(rf"^  changed +the source itself; {back}$", done.out, re.MULTILINE), done
    cut = reshard("run", *typed[:-1], "6600B")
    assert cut.code == 0 and "itself" not in cut.out + cut.err, "of our own publication, and lossless"


def test_so_do_those_that_cast_or_prune_what_was_resharded_in_place_before(reshard: Run, tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_single(model, arrays(4, 4000))
    assert reshard("run", model, "--to", model, "--size", "20kB").code == 0
    back = f"undo with `reshard rollback {model}` before the next run"
    (model / "theirs.bin").write_bytes(b"not published")
    for lossy in (("--dtype", "bfloat16"), ("--prune",)):
        typed = (model, "--to", model, "--size", "40kB", *lossy)
        said = reshard("plan", *typed).out
        assert re.search(rf"^warning +this changes the source itself [(].+[)]; {back}$", said, re.MULTILINE), said
        done = reshard("run", *typed)
        assert re.search(rf"^  changed +the source itself; {back}$", done.out, re.MULTILINE), done
        assert reshard("rollback", model).code == 0
    assert (model / "theirs.bin").exists()


def test_a_run_that_prunes_files_of_others_says_how_that_is_undone(reshard: Run, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert reshard("run", model, "--to", out, "--size", "3300B").code == 0
    (out / "notes.txt").write_text("not published")
    typed = (model, "--to", out, "--size", "6600B", "--prune")
    what, back = "1 file that reshard did not publish", f"undo with `reshard rollback {out}` before the next run"
    said = reshard("plan", *typed).out
    assert f"warning     this deletes {what} (notes.txt); {back}\n" in said, said
    done = reshard("run", *typed)
    assert re.search(rf"^  deleted +{what}; {back}$", done.out, re.MULTILINE), done
    assert reshard("rollback", out).code == 0 and (out / "notes.txt").exists()


@pytest.mark.parametrize(
    ("undo", "transport", "says"),
    [
        ("us/m@main", "lfs", "undo with `reshard rollback us/m@main`"),
        ("/us/m", "file", "undo with `reshard rollback /us/m` before the next run"),
        (None, "lfs", "nothing is replaced until the pull request is merged"),
    ],
)
def test_a_plan_in_place_says_what_brings_the_source_back(undo: str | None, transport: str, says: str) -> None:
    plan = Plan.model_construct(
        in_place=True, may_replace=True, takes=True, undo=undo, target="us/m", into="pull request of us/m",
        replaced=[Replaced(path="a", size=1, deleted=False)], transports=Transports(source="", target=transport),
    )  # fmt: skip
    assert occupied(plan, 8) == [("warning", f"this changes the source itself (a); {says}")]


def test_a_tensor_larger_than_the_size_is_named(reshard: Run, model: Path) -> None:
    done = reshard("plan", model, "--size", "600B")
    assert done.code == 0, done.err
    assert re.search(r"^  model-00001-of-\d+\.safetensors .+ 1 tensor  over --size$", done.out, re.MULTILINE)
    assert re.search(r"^note +layer\.0\.weight \(1\.0 kB\) is larger than --size", done.out, re.MULTILINE)
    refused = reshard("plan", model, "--size", "600B", "--oversize", "fail")
    assert refused.code == 2
    assert refused.err.startswith("error[usage.oversize]: layer.0.weight is ")


def test_a_run_ends_with_what_was_checked_and_where_it_is(reshard: Run, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = reshard("run", model, "--to", out, "--size", "3300B")
    assert done.code == 0, done.err
    head, *rest = done.out.splitlines()
    assert re.fullmatch(rf"Wrote {out}: 4 files, 1\d\.\d kB, 3 checks passed, 1 skipped \(\d+ s\)", head), head
    assert len(rest) <= 6 and "uploaded" not in done.out
    assert "source        1 file, no upstream hash" in done.out and "reload model  skipped: " in done.out
    assert done.err.splitlines()[0] == "planning"
    weight_map = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    with safe_open(model / "model.safetensors", "np") as source:
        for name, path in weight_map.items():
            with safe_open(out / path, "np") as shard:
                assert (shard.get_tensor(name) == source.get_tensor(name)).all()
        assert set(weight_map) == set(source.keys())


def test_a_plan_into_a_disk_without_room_is_shown_and_ends_as_a_run_would(reshard: Run, tmp_path: Path) -> None:
    count = shutil.disk_usage(tmp_path).free // 10**11 + 1
    save_sparse(tmp_path / "giant", ((f"layers.{i}.weight", "U8", (10**11,)) for i in range(count)), count)
    typed = (tmp_path / "giant", "--to", tmp_path / "out", "--size", "200GB")
    shown, run = reshard("plan", *typed), reshard("run", *typed)
    assert shown.code == run.code == 7 and f" next to {tmp_path}/out (" in shown.out
    (planned, refused) = ([line for line in done.err.splitlines() if line.startswith("error")] for done in (shown, run))
    assert planned[0].startswith(f"error[target.disk]: not enough disk space for {tmp_path}/out: ")
    assert planned[0].partition(" needed")[0] == refused[0].partition(" needed")[0]
    assert reshard("plan", tmp_path / "giant", "--size", "200GB").code == 0


def test_the_same_run_again_says_that_it_was_done(reshard: Run, model: Path, tmp_path: Path) -> None:
    first = reshard("run", model, "--to", tmp_path / "out", "--size", "3300B", "--json").documents[-1]
    again = reshard("run", model, "--to", tmp_path / "out", "--size", "3300B", "--json").documents[-1]
    assert not first["published"]["found"]
    assert first["source_bytes"] == {"as delivered": ["model.safetensors"]}
    assert again["published"] == first["published"] | {"found": True}
    assert again["source_bytes"] == {}


def test_verbose_shows_the_figures_of_each_check(reshard: Run, model: Path, tmp_path: Path) -> None:
    done = reshard("run", model, "--to", tmp_path / "out", "--size", "3300B", "--verbose")
    assert done.out.startswith(f"Wrote {tmp_path}/out: 4 files, ")
    for figures in (r"structure +passed \(.*tensors: 10, shards: 4", r"copy +passed", r"digest +[0-9a-f]{64}"):
        assert re.search(rf"^  {figures}", done.out, re.MULTILINE), done.out
    assert "no upstream hash: model.safetensors" in done.out
    assert "  model-00004-of-00004.safetensors  " in done.err and "\nlargest   " in done.err
    short = reshard("run", model, "--to", tmp_path / "short", "--size", "3300B").err
    assert re.search(r"\nweights +1 file \(10\.\d kB\) -> 4 files ", short) and "safetensors" not in short
    again = reshard("run", model, "--to", tmp_path / "out", "--size", "3300B")
    assert re.fullmatch(rf"Nothing to do: {tmp_path}/out is up to date \(\d s\)\n", again.out)
    told = reshard("run", model, "--to", tmp_path / "out", "--size", "3300B", "--verbose")
    assert len(re.findall("Nothing to do|up to date", told.out + told.err)) == 2, "once, in one line"
    planned = reshard("plan", model, "--to", tmp_path / "out", "--size", "3300B").out
    assert planned.splitlines()[1:] == ["Nothing to do: the target is up to date"]


def test_quiet_writes_the_commit_and_nothing_else(reshard: Run, model: Path, tmp_path: Path) -> None:
    done = reshard("run", model, "--to", tmp_path / "out", "--size", "3300B", "--quiet")
    assert done.err == ""
    (commit,) = done.out.split()
    again = reshard("run", model, "--to", tmp_path / "out", "--size", "3300B", "--json").documents[-1]
    assert again["published"]["commit"] == commit


def test_a_model_that_must_be_checked_is_refused_before_anything_is_copied(
    reshard: Run, model: Path, tmp_path: Path
) -> None:
    done = reshard("run", model, "--to", tmp_path / "out", "--require", "model")
    assert done.code == 6
    check, error, _ = done.err.splitlines()[-3:]
    assert check.startswith("reload model: skipped (structural); ")
    assert error.startswith("error[proof.model_required]: ")
    assert "copying" not in done.err
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_a_source_that_is_not_there_is_one_line_and_a_hint(reshard: Run, tmp_path: Path) -> None:
    done = reshard("plan", tmp_path / "nothing")
    assert done.code == 3
    error, hint = done.err.splitlines()
    assert error.startswith("error[source.no_folder]: ")
    assert hint.startswith("hint: ")


def floats(folder: Path) -> Path:
    """A folder with eight float32 tensors of 1,000 bytes in four layers, and a config that says so."""
    folder.mkdir()
    tensors = {f"layers.{i}.{part}.weight": np.full(250, i, np.float32) for part in "ab" for i in range(4)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text('{"torch_dtype": "float32"}')
    return folder


def test_a_cast_halves_the_files_and_takes_the_config_along(reshard: Run, tmp_path: Path) -> None:
    source, out = floats(tmp_path / "source"), tmp_path / "out"
    plan = reshard("plan", source, "--to", out, "--dtype", "float16")
    assert "edited    config.json, to match --dtype" in plan.out
    assert "8 tensors are cast from F32 to F16" in plan.out
    assert reshard("run", source, "--to", out, "--dtype", "float16").code == 0
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float16"
    with safe_open(out / "model.safetensors", "np") as made:
        names = made.keys()
        assert {str(made.get_tensor(name).dtype) for name in names} == {"float16"}


def test_packings_differ_in_which_tensors_share_a_file(reshard: Run, tmp_path: Path) -> None:
    source = floats(tmp_path / "source")

    def tensors(size: str, pack: str) -> list[int]:
        (facts,) = reshard("plan", source, "--size", size, "--pack", pack, "--json").documents
        return [file["tensors"] for file in facts["files"]]

    assert tensors("6200B", "greedy") == [5, 3]
    assert tensors("6200B", "balanced") == [4, 4]
    assert tensors("4000B", "greedy") == [3, 3, 2]
    assert tensors("4000B", "layers") == [2, 2, 2, 2]


def test_prefixes_are_taken_off_and_a_config_is_borrowed(reshard: Run, model: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "wrapped", tmp_path / "out"
    source.mkdir()
    save_file({f"module.{i}.weight": np.zeros(10, np.uint8) for i in range(3)}, source / "model.safetensors")
    assert "remove it with --strip-prefix auto" in reshard("plan", source).out
    done = reshard("run", source, "--to", out, "--strip-prefix", "auto", "--config-from", model)
    assert done.code == 0, done.err
    with safe_open(out / "model.safetensors", "np") as made:
        assert sorted(made.keys()) == ["0.weight", "1.weight", "2.weight"]
    assert (out / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


def test_names_are_changed_by_a_file_of_rules(reshard: Run, model: Path, tmp_path: Path) -> None:
    rules, out = tmp_path / "rules.yaml", tmp_path / "out"
    rules.write_text("- '^layer[.]': h.\n- '[.]weight$': ''\n")
    assert "10 of 10 names, for example layer.0.weight to h.0.weight" in " ".join(
        reshard("plan", model, "--rename", rules).out.split()
    )
    assert reshard("run", model, "--to", out, "--rename", rules).code == 0
    with safe_open(out / "model.safetensors", "np") as made:
        assert sorted(made.keys()) == sorted(f"h.{i}" for i in range(10))
    assert reshard("verify", out, "--against", model, "--rename", rules).code == 0
    rules.write_text("- '^x': y\n")
    refused = reshard("plan", model, "--rename", rules)
    assert (refused.code, "error[usage.rename_unused]" in refused.err) == (2, True), refused.err
    refused = reshard("plan", model, "--rename", tmp_path / "gone")
    assert (refused.code, "error[usage.rename]" in refused.err) == (2, True), refused.err


def test_pickled_weights_become_safetensors(reshard: Run, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    weights = {f"{i}.weight": torch.full((100,), float(i)) for i in range(4)}
    torch.save(weights | {"tied.weight": weights["0.weight"]}, source / "pytorch_model.bin")
    done = reshard("run", source, "--to", out, "--size", "1kB")
    assert done.code == 0, done.err
    assert "source        1 file, CRC verified" in done.out
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == sorted([*weights, "tied.weight"])


@pytest.mark.parametrize("memory, told", [("128MB", True), ("512MB", False)])
def test_fewer_files_at_a_time_than_asked_are_told_in_a_line(
    memory: str, told: bool, reshard: Run, model: Path, tmp_path: Path
) -> None:
    cut = tmp_path / "cut"
    assert reshard("run", model, "--to", cut, "--size", "3300B").code == 0
    done = reshard(
        "run", cut, "--to", tmp_path / "out", "--size", "3kB", "--jobs", "2", env={"RESHARD_MEMORY_LIMIT": memory}
    )
    line = "copying 1 source file at a time instead of 2, limited by RESHARD_MEMORY_LIMIT"
    assert done.code == 0 and " ".join(done.err.split()).count(line) == int(told)


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_shell_in_the_folder_that_a_run_replaced_is_told_to_enter_it_again(
    model: Path, tmp_path: Path, is_kept: bool
) -> None:
    """Relative paths would mean what was there before, which is kept where it was another's, or nothing."""
    (tmp_path / "here").mkdir()
    if is_kept:
        shutil.copytree(model, tmp_path / "here", dirs_exist_ok=True)
    read = "." if is_kept else shlex.quote(str(model))
    lines = [
        f"cd {shlex.quote(str(tmp_path / 'here'))}",
        f"{COMMAND} run {read} --to . --size 3300B || exit 1",
        f"{COMMAND} plan . && exit 1",
        f"{COMMAND} run ./x --to ./y && exit 1",
        'cd "$PWD"',
        f"{COMMAND} verify . -q",  # of a class that its config does not name
    ]
    done = subprocess.run(["sh", "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("inconclusive\n") and 'type cd "$PWD" to enter the new folder\n' in done.stdout
    assert done.stderr.count("error[usage.place]: ") == done.stderr.count('hint: type cd "$PWD"') == 2
    assert (tmp_path / ".here.reshard.last").exists() == is_kept
