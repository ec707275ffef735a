"""`reshard layout`, `doctor --layout` and `advise` on models that others wrote."""

from __future__ import annotations

import re
import shlex
from fnmatch import fnmatch
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from reshard.client.layout import command_for
from reshard.pipeline.places import parse_place
from tests.cli.conftest import Run
from tests.support.careless import save_carelessly
from tests.support.models import save_mixture

LAYERS, EXPERTS = 4, 4  # of save_mixture


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    """A mixture in seven files in the order of its layers, as its maker left it, with a second copy in a pickle."""
    folder = save_mixture(tmp_path / "mixture", 2048)
    for name in ("pytorch_model.bin", "model.onnx"):
        (folder / name).write_bytes(b"a second copy")
    return folder


@pytest.mark.parametrize("ranks", ["ep2", "ep4", "pp2", "pp4"])
def test_each_rank_gets_patterns_for_the_files_that_hold_its_tensors(ranks: str, reshard: Run, mixture: Path) -> None:
    done = reshard("layout", mixture, "--ranks", ranks, "--json")
    assert done.code == 0, done.err
    (found,) = done.documents
    places = {}
    for path in sorted(mixture.glob("*.safetensors")):
        places |= {name: (path.name, tensor.nbytes) for name, tensor in load_file(path).items()}
    count = int(ranks[2:])

    def reads(name: str, rank: int) -> bool:
        """By the rules of vLLM and mlx-lm, for numbers that divide."""
        words = name.split(".")
        if ranks.startswith("ep"):
            return "experts" not in words or int(words[words.index("experts") + 1]) * count // EXPERTS == rank
        return "layers" not in words or count - 1 - int(words[2]) * count // LAYERS == rank

    assert [one["rank"] for one in found["ranks"]] == [*range(count)]
    for one in found["ranks"]:
        own = {name: place for name, place in places.items() if reads(name, one["rank"])}
        holding = {path for path, _ in own.values()}
        matched = {p.name for p in mixture.iterdir() if any(fnmatch(p.name, glob) for glob in one["patterns"])}
        assert {name for name in matched if name.endswith(".safetensors")} == holding
        small = {"config.json", "tokenizer.json", "README.md", "LICENSE", "model.safetensors.index.json"}
        assert matched - holding == small, "neither the pickle nor the other format"
        assert (one["files"], one["needed"]) == (len(holding), sum(size for _, size in own.values()))
        assert one["bytes"] == sum((mixture / name).stat().st_size for name in holding)
    assert found["bytes"] == sum(path.stat().st_size for path in mixture.glob("*.safetensors"))


def test_a_layout_that_wastes_reads_names_the_cut_that_does_not(reshard: Run, mixture: Path, tmp_path: Path) -> None:
    said = reshard("layout", mixture, "--ranks", "ep4").out.splitlines()
    assert said[0] == f"{mixture}: 7 weight files, 533 kB; ep4"
    (command,) = [line for line in said if line.startswith("next ")]
    (told,) = reshard("layout", mixture, "--ranks", "ep4", "--json").documents
    assert (
        told["command"]
        == f"reshard run {mixture} --to ./mixture-ep4 --for ep4"
        == command.removeprefix("next ").strip()
    )
    ran = reshard("run", mixture, "--to", tmp_path / "out", "--for", "ep4", "--size", "200kB")
    assert ran.code == 0, ran.err
    assert "ranks " in ran.err and "4, each reading" in ran.err
    cut = reshard("layout", tmp_path / "out", "--ranks", "ep4")
    assert "next " not in cut.out and len(cut.out.splitlines()) == 5
    quiet = reshard("layout", tmp_path / "out", "--ranks", "ep4", "--quiet").out.splitlines()
    assert len(quiet) == 4 and all("--include '*.json'" in line for line in quiet)


@pytest.mark.parametrize(
    ("header", "odd", "fastsafetensors", "runai"),
    [(5, 0, 24, 12), (0, 1, 0, 6), (8, 0, 24, 0)],
)  # as fastsafetensors 0.5 and runai-model-streamer 0.17 count them, by tests/benchmarks/aligned.py
def test_the_layout_of_a_careless_writer_is_healed_by_the_command_that_doctor_names(
    header: int, odd: int, fastsafetensors: int, runai: int, reshard: Run, tmp_path: Path
) -> None:
    save_carelessly(tmp_path / "bad", header, odd)
    (found,) = reshard("doctor", tmp_path / "bad", "--layout", "--json").documents
    counted = {one["rule"]: one["tensors"] for one in found["now"]["misaligned"]}
    assert (counted["fastsafetensors"], counted["runai"], found["state"]) == (fastsafetensors, runai, "warning")
    assert counted["4096"] >= 23
    name, *typed = shlex.split(found["command"])
    assert (name, typed[0], typed[-2:]) == ("reshard", "run", ["--align", "4096"])
    assert reshard(*typed).code == 0
    (healed,) = reshard("doctor", tmp_path / "bad-cut", "--layout", "--json").documents
    assert healed["now"] == found["then"], "as it was foretold"
    assert [one["tensors"] for one in healed["now"]["misaligned"]][:4] == [0, 0, 11, 11], "the 32 or 33 bytes"
    assert (healed["state"], healed["command"]) == ("ok", None)


def test_doctor_tells_what_ranks_read_and_heals_it(reshard: Run, mixture: Path, tmp_path: Path) -> None:
    shown = reshard("doctor", mixture, "--layout")
    assert shown.code == 0, shown.err
    assert re.search(r"^layers split across files +[1-4] of 4 ", shown.out, re.MULTILINE)
    assert re.search(r"^a rank of tp8 +reads 533 kB, needs ", shown.out, re.MULTILINE)
    assert "a rank of pp4 " in shown.out and "a rank of ep8" not in shown.out, "of four experts"
    assert "; in file order: 7\n" in shown.out
    for wrong in ([], [mixture, "--notify"]):
        assert reshard("doctor", "--layout", *wrong).code == 2


def test_ranks_that_a_model_does_not_have_are_refused_before_anything_is_said(reshard: Run, model: Path) -> None:
    for ranks in ("ep2", "pp99"):
        done = reshard("layout", model, "--ranks", ranks)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith("error[usage.ranks]")


def test_advice_is_a_table_of_five_layouts_and_the_command_for_one(reshard: Run, mixture: Path, tmp_path: Path) -> None:
    done = reshard("advise", mixture, "--loader", "vllm", "--ranks", "ep4", "--link", "8Mbit/s")
    assert done.code == 0, done.err
    head, columns, *rows, command = done.out.splitlines()
    assert head == f"{mixture} for vllm, each rank of ep4, at 1.0 MB/s"
    assert columns.split() == ["files", "largest", "download", "requests", "memory", "time"]
    names = ["as it is", "50 GB files", "5 GB files", "for ep4, aligned", "512 MB files"]
    assert [row.partition("  ")[0] for row in rows] == names
    assert [row.endswith("recommended") for row in rows] == [name == "for ep4, aligned" for name in names]
    word, *typed = shlex.split(command.removeprefix("next: "))
    assert (word, *typed) == (
        *("reshard", "run", str(mixture), "--to", "./mixture-ep4", "--for", "ep4", "--align", "4096"),
    )
    assert reshard(*typed).code == 0
    again = reshard("advise", tmp_path / "mixture-ep4", "--loader", "vllm", "--ranks", "ep4", "--link", "1MB/s")
    assert again.out.splitlines()[-1] == "keep the current layout: no other saves much"
    assert reshard("advise", mixture, "--link", "8Mbit/s", "--ranks", "ep4", "--quiet").out.startswith("reshard run ")


@pytest.mark.parametrize("rate", ["1Gbit", "fast", "0Mbit/s", "5", "1gbit/s", "0MB/s", "1XB/s"])
def test_a_link_is_a_rate_with_its_unit(rate: str, reshard: Run, mixture: Path) -> None:
    done = reshard("advise", mixture, "--link", rate)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error[usage]: --link {rate}: use a rate above zero, such as 1Gbit/s")


def test_the_command_for_the_model_in_this_folder_writes_beside_it(
    mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (mixture / "original").mkdir()
    beside = f"{mixture}-cut"
    for here, into in ((tmp_path, "./mixture-cut"), (mixture, beside), (mixture / "original", beside)):
        monkeypatch.chdir(here)
        assert shlex.split(command_for(parse_place(mixture), {"align": 4096}))[4] == into


@pytest.mark.parametrize(("ranks", "cure"), [("ep8", "such as ep4"), ("pp99", "use pp4 at most")])
def test_ranks_that_do_not_fit_are_refused_with_some_that_do(
    reshard: Run, mixture: Path, ranks: str, cure: str
) -> None:
    done = reshard("layout", mixture, "--ranks", ranks)
    assert done.code == 2 and cure in done.err, done.err
