"""Names from a checkpoint, on a terminal: shown, and never obeyed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from reshard.cli.output import Output, first, lines, some
from tests.cli.conftest import Run

ESC, BIDI = "\x1b[2J\x07\x9b", "\u202e"
RAW = set(ESC[0] + ESC[-2:] + BIDI)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = {f"layer{ESC}{BIDI}.{i}": np.full(500, i, np.float32) for i in range(3)}
    save_file(tensors | {f"big{ESC}\n{BIDI}": np.zeros(9000, np.float32)}, folder / "model.safetensors")
    (folder / f"notes{ESC}{BIDI}\nforged: line.txt").write_text("x")
    (folder / f".env{ESC}{BIDI}").write_text("x")
    return folder


def test_whatever_is_printed_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """Also by a command that does not think of it."""
    text = f"a{ESC}{BIDI}\n\tb"
    for output in (Output(), Output(quiet=True), Output(json=True)):
        output.result({"name": text}, text, text)
        output.say(text)
    printed = capsys.readouterr()
    assert not RAW & set(printed.out + printed.err)
    escaped = "a\\x1b[2J\\x07\\x9b\\u202e\n"
    assert (printed.out.count(escaped), printed.err.count(escaped)) == (2, 1), "text and bare; what was said"


def test_a_name_makes_no_line_of_its_own() -> None:
    """Which could say that something was checked."""
    name = f"a\n{BIDI}b"
    for shown in (lines([[name, name]]), *first([name], 1), some([name])):
        assert "\n" not in shown and BIDI not in shown and "a\\x0a" in shown


def test_the_name_of_a_folder_makes_no_line_of_its_own(hostile: Path, tmp_path: Path, reshard: Run) -> None:
    models, out = tmp_path / "all\nforged: line", tmp_path / "out\nforged: line"
    model = models / "a\nforged: line"
    shutil.copytree(hostile, model)
    calls: list[tuple[str | Path, ...]] = [
        ("plan", model, "--to", out),
        ("plan", model),
        ("run", model, "--to", out, "--size", "5000B"),
        ("run", model, "--to", out, "--size", "5000B"),
        ("rollback", out),
        ("verify", model),
        ("doctor", model),
        ("doctor", model, "--layout"),
        ("advise", model),
        ("audit", models),
    ]
    for call in calls:
        done = reshard(*call)
        assert done.out + done.err, call
        assert "\nforged" not in done.out + done.err, call


def test_listings_reports_and_errors_show_names_escaped(hostile: Path, tmp_path: Path, reshard: Run) -> None:
    calls: list[tuple[str | Path, ...]] = [
        ("plan", hostile, "--to", tmp_path / "out", "--size", "5000B"),
        ("plan", hostile, "--to", tmp_path / "out", "--size", "5000B", "--json"),
        ("plan", hostile, "--to", tmp_path / "out", "--size", "5000B", "--oversize", "fail", "--json"),
        ("plan", f"a/b{ESC}{BIDI}", "--to", tmp_path / "out"),
        ("verify", hostile),
    ]
    for call in calls:
        done = reshard(*call, env={"HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": "x"})
        assert not RAW & set(done.out + done.err), call
        assert "error[internal]" not in done.err, done.err
        if "--json" in call:
            assert all(json.loads(line) for line in done.out.splitlines())
