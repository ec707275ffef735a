"""What people see of an answer: aligned and wrapped on a terminal, in colours unless they are not wanted."""

from __future__ import annotations

import os
import pty
import re
import sys
from collections.abc import Callable

import pytest

from reshard.cli.fleet import WORKERS_HEAD
from reshard.cli.output import Output, console, lines
from tests.cli.conftest import read

STYLE = r"\x1b\[[0-9;]*m"
WORDS = "the temporary folder of this worker has less room than one shard of the largest file needs"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], str]:
    """What ``show`` writes on a terminal of 40 columns that takes colours."""

    def shown(show: Callable[[], object]) -> str:
        ours, theirs = pty.openpty()
        with os.fdopen(theirs, "w") as file, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", file)
            show()
        try:
            return b"".join(iter(lambda: read(ours), b"")).decode().replace("\r\n", "\n")
        finally:
            os.close(ours)

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return shown


def test_no_rows_are_nothing(terminal: Callable[[Callable[[], object]], str]) -> None:
    assert terminal(lambda: Output().result({}, lines([]) or "no failures")) == "no failures\n"


@pytest.mark.parametrize("name", ["here:1", "gpu-worker-07.eu-west-1.compute.internal:30735"])
def test_a_table_of_workers_is_whole_however_long_their_names_are(
    terminal: Callable[[Callable[[], object]], str], name: str
) -> None:
    idle = (name, "takes work", "Nov 23 00:06", "2", "0.1.0", "")
    busy = ("b:2", "resting", "Nov 23 00:06", "2", "0.1.0", "hbyeu8ypup plan")
    shown = terminal(lambda: Output().result({}, lines([WORKERS_HEAD, idle, busy])))
    assert shown.endswith("  hbyeu8ypup plan\n") and f"\n{name}\n" in shown
    assert [word for word in shown.split() if word in {name, "b:2", "0.1.0"}] == [name, "0.1.0", "b:2", "0.1.0"]


def test_the_last_column_is_wrapped_between_words_and_under_itself(
    terminal: Callable[[Callable[[], object]], str],
) -> None:
    long = "x" * 60
    text = terminal(lambda: Output().result({}, lines([("job", "7"), ("note", WORDS), ("url", long), ("by", "")])))
    first, *rest = text.splitlines()
    assert first == "job   7"
    assert rest[0] == "note  the temporary folder of this"
    assert all(line.startswith("      ") for line in rest[1:3]) and max(map(len, rest[:3])) <= 40
    assert " ".join(line[6:] for line in rest[:3]) == WORDS
    assert rest[3:] == ["url", f"    {long}", "by"]


def test_a_last_column_without_room_beside_the_others_is_below_its_row(
    terminal: Callable[[Callable[[], object]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    rows = [("JOB", "STATE", "SOURCE -> TARGET"), ("hbyeu8ypup", "failed, access.no_write", WORDS)]
    head, below, row, *words = terminal(lambda: Output().result({}, lines(rows))).splitlines()
    assert head.split() == ["JOB", "STATE"] and below == "    SOURCE -> TARGET"
    assert row == "hbyeu8ypup  failed, access.no_write"
    assert all(line.startswith("    ") and len(line) <= 40 for line in words)
    assert " ".join(line.strip() for line in words) == WORDS


def test_a_last_column_of_which_one_word_has_no_room_is_below_its_row(
    terminal: Callable[[Callable[[], object]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    rows = [("JOB", "STATE", "SOURCE -> TARGET"), ("7", "done", "a/b -> c/d"), ("8", "done", f"a/{'b' * 30} -> c/d")]
    assert terminal(lambda: Output().result({}, lines(rows))).splitlines() == [
        "JOB  STATE  SOURCE -> TARGET",
        "7    done   a/b -> c/d",
        "8    done",
        f"    a/{'b' * 30} ->",
        "    c/d",
    ]


def test_a_first_column_that_leaves_the_others_no_room_has_a_line_of_its_own(
    terminal: Callable[[Callable[[], object]], str],
) -> None:
    rows = [("NAME", "STATE", "SINCE", "LAST"), ("n" * 38, "waits", "Nov 23 02:48", "none"), ("b", "here", "-", "")]
    assert terminal(lambda: Output().result({}, lines(rows))).splitlines() == [
        "NAME",
        "  STATE  SINCE         LAST",
        "n" * 38,
        "  waits  Nov 23 02:48  none",
        "b",
        "  here   -",
    ]


def test_a_short_last_column_stays_beside_the_others(terminal: Callable[[Callable[[], object]], str]) -> None:
    rows = [("model-00001-of-00003", "9,000 bytes", "above"), ("model-00002-of-00003", "7,000 bytes", "")]
    told = [" ".join(line.split()) for line in terminal(lambda: Output().result({}, lines(rows))).splitlines()]
    assert told == [" ".join(filter(None, row)) for row in rows]


def test_a_path_longer_than_a_line_stays_whole_in_every_column(
    terminal: Callable[[Callable[[], object]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = f"text_encoder_with_a_long_name/{'x' * 43}.safetensors"
    assert len(path) == 85
    files = [(path, "9,000 bytes", "1 tensor", ""), ("b", "7 bytes", "1 tensor", "above --size")]

    def show() -> None:
        Output().result({}, "\n".join([lines(files, {1, 2}, "  "), lines([("largest", f"{path}, 9,000 bytes")]), path]))

    assert terminal(show).splitlines() == [
        f"  {path}",
        "    9,000 bytes  1 tensor",
        "  b",
        "        7 bytes  1 tensor  above --size",
        "largest",
        f"    {path},",
        "    9,000 bytes",
        path,
    ]


def test_a_line_too_long_is_indented_and_a_number_stays_with_its_unit(
    terminal: Callable[[Callable[[], object]], str],
) -> None:
    head = "published https://hub/us/m: 3 files, 90.9 MB, 1 min 34 s, 4 checks passed"
    text = terminal(lambda: Output().result({}, f"{head}\n  (9,000 bytes)"))
    assert text.splitlines() == [
        "published https://hub/us/m: 3 files,",
        "  90.9 MB, 1 min 34 s, 4 checks passed",
        "  (9,000 bytes)",
    ]


def test_a_number_is_held_by_its_unit_alone(terminal: Callable[[Callable[[], object]], str]) -> None:
    text = "transformers in its release 5.23.0, accelerate in 1.2.0"
    assert terminal(lambda: Output().result({}, text)).splitlines() == [
        "transformers in its release 5.23.0,",
        "  accelerate in 1.2.0",
    ]


def test_nothing_is_wrapped_in_a_pipe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    Output().result({}, lines([("note", WORDS)]))
    assert capsys.readouterr().out == f"note  {WORDS}\n"


@pytest.mark.parametrize("words", ["done", "failed, target.occupied", "cancelled", "error[usage]: no such folder"])
def test_states_and_errors_have_colours_which_NO_COLOR_takes_off(
    terminal: Callable[[Callable[[], object]], str], monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    row = words if words.startswith("error") else f"JOB  STATE\n{words}  a/done -> b/failed\nthe last row"
    shown = terminal(lambda: console(sys.stdout).print(row))
    assert len(re.findall(STYLE, shown)) == 2 and re.sub(STYLE, "", shown) == f"{row}\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert terminal(lambda: console(sys.stdout).print(row)) == f"{row}\n"


def test_an_error_is_broken_between_words_and_indented_on_a_terminal(
    terminal: Callable[[Callable[[], object]], str],
) -> None:
    url = "http://127.0.0.1:8000/" + "x" * 40
    shown = terminal(lambda: console(sys.stdout).print(f"hint: {WORDS} {url}"))
    first, *rest = shown.splitlines()
    assert first.startswith("hint: the temporary") and all(line.startswith("  ") for line in rest)
    assert " ".join(line.strip() for line in (first, *rest)) == f"hint: {WORDS} {url}"
    assert [line for line in rest if len(line) > 40] == [f"  {url}"]


def test_characters_of_two_columns_take_two(terminal: Callable[[Callable[[], object]], str]) -> None:
    rows = [("日本", "b", " ".join(["模型"] * 9)), ("abcd", "b", "c")]
    assert terminal(lambda: print(lines(rows))).splitlines() == [
        "日本  b  模型 模型 模型 模型 模型 模型", "         模型 模型 模型", "abcd  b  c",
    ]  # fmt: skip
    said = terminal(lambda: Output().result({}, " ".join(["模型"] * 9)))
    assert re.sub(STYLE, "", said).splitlines() == ["模型 模型 模型 模型 模型 模型 模型 模型", "  模型"]
