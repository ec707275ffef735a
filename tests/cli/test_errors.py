"""Whatever goes wrong, a person reads one line, its hint, and never a traceback."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import signal
import subprocess
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer import BadParameter

from reshard.cli.errors import INTERRUPTED, PIPE_CLOSED, guarded
from reshard.pipeline.errors import BadSize, NoWriteAccess, OutputUnwritable, ReshardError, SourceNotFound, by_code
from tests.cli.conftest import Run
from tests.support.stuck import STUCK
from tests.support.warm import COMMAND


def raises(error: BaseException) -> object:
    def command() -> None:
        raise error

    return command


def code_of(error: BaseException, as_json: bool = False) -> int:
    return guarded(raises(error), as_json)  # type: ignore[arg-type]


def test_an_error_is_a_line_and_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(BadSize(value="5G", why="unknown unit\n'G'")) == 2
    out, err = capsys.readouterr()
    assert out == ""
    first, second = err.splitlines()
    assert first == "error[usage.size]: --size 5G: unknown unit 'G'"
    assert second.startswith("hint: use a number with a unit")


def test_with_json_an_error_is_a_document_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(BadSize(value="5G", why="unknown unit"), as_json=True) == 2
    out, err = capsys.readouterr()
    assert err == ""
    error = json.loads(out)["error"]
    assert error["code"] == "usage.size"
    assert isinstance(ReshardError.from_dict(error), BadSize)


def test_a_wrong_option_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(BadParameter("no such thing")) == 2
    assert capsys.readouterr().err.startswith("error[usage]: ")


@pytest.mark.parametrize(
    ("days", "says"), [("401", "must be at most 400"), ("0", "must be at least 1"), ("1.5", "must be a valid integer")]
)
def test_a_number_that_an_option_does_not_accept_is_refused_in_our_words(reshard: Run, days: str, says: str) -> None:
    done = reshard("usage", "--days", days)
    assert (done.code, done.err.splitlines()[0]) == (2, f"error[usage]: Invalid value for '--days': {says}")


@pytest.mark.parametrize("typed", ["mine/model/", "u/../mine/model", "mine/model/deep"])
def test_a_folder_here_that_no_repository_can_be_called_is_pointed_at(reshard: Run, tmp_path: Path, typed: str) -> None:
    for folder in ("mine/model/deep", "u"):
        (tmp_path / folder).mkdir(parents=True)
    done = reshard("plan", typed)
    assert done.code == 2
    assert done.err.startswith("error[usage.place]: ")
    assert done.err.endswith(f"; to use the folder with that name, type ./{typed}\n")


def test_a_folder_with_a_name_that_a_shell_would_split_is_quoted(reshard: Run, tmp_path: Path) -> None:
    (tmp_path / "sp ace" / "it's mödel ✓").mkdir(parents=True)
    done = reshard("plan", "sp ace/it's mödel ✓")
    typed = done.err.rpartition("type ")[2]
    assert shlex.split(typed) == ["./sp ace/it's mödel ✓"], done.err
    assert "or use './sp ace' for a folder" in reshard("plan", "sp ace").err
    (error,) = reshard("plan", "sp ace/it's mödel ✓", "--json").documents
    assert error["error"]["hint"].endswith(f"to use the folder with that name, type {typed.strip()}")
    (tmp_path / "two  blanks" / "x").mkdir(parents=True)
    assert "type './two  blanks/x'" in reshard("plan", "two  blanks/x").err
    assert "or --to './sp ace' for a folder" in reshard("plan", "a/b", "--to", "sp ace").err


@pytest.mark.parametrize("typed", ["mine/model/", "gpt2", "mine/" + "x" * 300])
def test_no_folder_is_pointed_at_that_is_not_there_or_was_told_of(reshard: Run, tmp_path: Path, typed: str) -> None:
    (tmp_path / "gpt2").mkdir()
    done = reshard("plan", typed)
    assert done.err.startswith("error[usage.place]: ")
    assert "the folder with that name" not in done.err


def test_a_folder_that_is_called_as_a_command_is_not_pointed_at(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plan").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["reshard", "plan", "them/model"])
    assert code_of(SourceNotFound(repo="them/model", endpoint="https://hub.example")) == 3
    assert "the folder with that name" not in capsys.readouterr().err


def test_a_folder_here_is_pointed_at_where_a_repository_of_its_name_may_not_be_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m" / "llama").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["reshard", "run", "./m/llama", "--to", "m/llama"])
    assert code_of(NoWriteAccess(repo="m/llama", endpoint="https://hub.example")) == 4
    assert capsys.readouterr().err.endswith("; to use the folder with that name, type ./m/llama\n")


@pytest.mark.parametrize("words", [[], ["catalog"], ["schedule"], ["fleet"]])
def test_a_command_with_nothing_behind_it_shows_its_help_as_it_is(reshard: Run, words: list[str]) -> None:
    done, asked = reshard(*words), reshard(*words, "--help")
    assert (done.code, done.out) == (2, "")
    assert done.err.split() == asked.out.split()
    assert len(done.err.splitlines()) > 10


@pytest.mark.parametrize(
    ("typed", "command"),
    [
        (["fleet", "drain"], "reshard fleet drain"),
        (["list", "--nope"], "reshard list"),
        (["nonsense"], "reshard"),
        (["status", "--report"], "reshard status"),
        (["plan", "a/b", "--revision"], "reshard plan"),
        (["catalog", "status", "--report", "x.md"], "reshard catalog status"),
    ],
)
def test_a_usage_error_leads_to_the_help_of_the_command_itself(reshard: Run, typed: list[str], command: str) -> None:
    done = reshard(*typed, env={"RESHARD_BROKER_URL": "redis://127.0.0.1:1/0"})
    assert done.code == 2
    assert done.err.endswith(f"\nhint: see `{command} --help`\n")


@pytest.mark.parametrize(
    "typed", [["--for", "x"], ["--single", "--size", "1GB"], ["--for", "ep8", "--single"], ["--tensor-hashes"], ["--x"]]
)
def test_a_usage_error_about_an_option_that_the_short_help_leaves_out_leads_to_all_of_them(
    reshard: Run, tmp_path: Path, typed: list[str]
) -> None:
    save_file({"a": np.zeros(9, np.uint8)}, tmp_path / "model.safetensors")
    done = reshard("plan", tmp_path, *typed)
    assert done.code == 2
    assert done.err.endswith("\nhint: see `reshard plan --help-all`\n"), done.err


def test_an_unexpected_exception_is_one_line_that_says_where_its_traceback_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert code_of(ZeroDivisionError("division by zero")) == 1
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 2
    assert err.startswith("error[internal]: ")
    (file,) = tmp_path.glob("*.traceback")
    assert str(file) in err
    assert "Traceback (most recent call last)" in file.read_text()


def test_without_a_folder_for_it_the_traceback_of_an_unexpected_exception_is_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    assert code_of(ZeroDivisionError("division by zero"), as_json=True) == 1
    out, err = capsys.readouterr()
    assert err.startswith("Traceback (most recent call last)")
    assert "(traceback above)" in json.loads(out)["error"]["message"]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError(), "out of memory or processes\n"),
        (RuntimeError("can't start new thread"), "out of memory or processes: can't start new thread\n"),
        (OSError(errno.EMFILE, "Too many open files"), "out of memory, processes or open files: Too many open files\n"),
        (OSError(errno.ENOSPC, "No space left", "/x"), "no space left on /x: No space left\n"),
    ],
)
def test_what_the_machine_lacks_is_no_bug(error: Exception, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(error) == 8
    assert capsys.readouterr().err.startswith(f"error[resource]: {says}")


@pytest.mark.parametrize("service", ["reshard worker", "reshard control", "reshard web"])
def test_a_service_writes_the_traceback_to_its_log(
    service: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert guarded(raises(ZeroDivisionError("by \x1b[2J zero")), False, service) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last):\n")
    assert "\nerror[internal]: " in err and "\x1b" not in err
    assert not list(tmp_path.iterdir())


def test_an_interrupt_has_the_exit_code_that_shells_expect() -> None:
    assert code_of(KeyboardInterrupt()) == INTERRUPTED


def test_a_command_chooses_its_exit_code() -> None:
    assert guarded(lambda: 7, as_json=False) == 7
    assert guarded(lambda: None, as_json=False) == 0


def test_every_family_has_an_exit_code_of_its_own() -> None:
    families: dict[int, str] = {}
    for code, kind in by_code().items():
        family = code.partition(".")[0]
        assert families.setdefault(kind.exit_code, family) == family
    assert len(families) == len(set(families.values()))
    assert INTERRUPTED not in families


def test_an_interrupt_while_the_command_is_loaded_ends_it_without_a_word(clean: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("print('loading', flush=True)\nimport time\ntime.sleep(600)\n")
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipe, env = subprocess.PIPE, clean | {"PYTHONPATH": str(tmp_path)}
    with subprocess.Popen([COMMAND, "list"], env=env, stdout=pipe, stderr=pipe, text=True, preexec_fn=heeds) as loading:
        assert loading.stdout is not None and loading.stdout.readline() == "loading\n"
        loading.send_signal(signal.SIGINT)
        _, said = loading.communicate(timeout=STUCK)
    assert (loading.returncode, said) == (-signal.SIGINT, "")


@pytest.mark.parametrize(
    ("words", "env"),
    [
        ("--version", {}),
        ("plan --help", {}),
        ("plan model", {}),
        ("plan model", {"FORCE_COLOR": "1"}),  # by rich
        ("plan model", {"PYTHONUNBUFFERED": "1"}),
        ("plan none --json", {}),
    ],
)
def test_a_reader_that_has_read_enough_ends_a_command_as_shells_expect(
    words: str, env: dict[str, str], clean: dict[str, str], model: Path
) -> None:
    assert unread(words, clean | {"PYTHONUNBUFFERED": ""} | env, model.parent) == (PIPE_CLOSED, "", "")


def test_a_run_whose_result_nobody_reads_has_published_it(clean: dict[str, str], model: Path) -> None:
    assert unread("run model --to out -q", clean, model.parent) == (PIPE_CLOSED, "", "")
    assert (model.parent / "out" / "model.safetensors").exists()


def test_messages_that_nobody_reads_end_a_command_as_well(clean: dict[str, str], model: Path) -> None:
    assert unread("verify model", clean, model.parent, "stderr") == (PIPE_CLOSED, "", "")


FULL = "error[resource.output]: cannot write to stdout: No space left on device\n"


@pytest.mark.parametrize("words", ["--version", "plan model -q", "plan model -q --json", "run model --to out -q"])
def test_a_full_output_is_said_on_the_other_stream(words: str, clean: dict[str, str], model: Path) -> None:
    done = in_shell(f"{words} > /dev/full", clean, model.parent)
    assert (done.returncode, done.stdout) == (OutputUnwritable.exit_code, "")
    assert done.stderr.startswith(FULL) and len(done.stderr.splitlines()) == 2
    assert (model.parent / "out").exists() == ("out" in words)


@pytest.mark.parametrize("streams", ["2> /dev/full", "> /dev/full 2>&1"])
def test_an_error_that_cannot_be_said_is_an_exit_code(streams: str, clean: dict[str, str], model: Path) -> None:
    done = in_shell(f"verify model {streams}", clean, model.parent)
    assert (done.returncode, done.stdout, done.stderr) == (OutputUnwritable.exit_code, "", "")


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_what_an_output_cannot_show_is_escaped(encoding: str, clean: dict[str, str], model: Path) -> None:
    env, place = clean | {"PYTHONIOENCODING": encoding}, "out/模型"
    text = in_shell(f"plan model --to {place}", env, model.parent)
    assert text.returncode == 0 and r"out/\u6a21\u578b" in text.stdout
    told = in_shell(f"run model --to {place} --json", env, model.parent)
    assert told.returncode == 0 and json.loads(told.stdout.splitlines()[-1])["target"].endswith(place)
    assert (model.parent / place / "model.safetensors").exists()


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    "env", [pytest.param({}, id="plain", marks=pytest.mark.slow), pytest.param({"FORCE_COLOR": "1"}, id="rich")]
)
def test_a_closed_stream_is_an_empty_one(closed: str, env: dict[str, str], clean: dict[str, str], model: Path) -> None:
    done = in_shell(f"run model --to out {closed}", clean | env, model.parent)
    assert done.returncode == 0 and "error" not in done.stderr
    assert (done.stdout == "", done.stderr == "") == (">&-" in closed.split(), "2>&-" in closed.split())
    assert (model.parent / "out" / "model.safetensors").exists()


def in_shell(words: str, env: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    typed = re.sub(r"\b(model|out)\b", r"./\1", f'"$0" {words}')
    command, env = ["sh", "-c", typed, str(COMMAND)], env | {"PYTHONUNBUFFERED": ""}
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=STUCK)


def unread(words: str, env: dict[str, str], folder: Path, stream: str = "stdout") -> tuple[int, str, str]:
    """How `reshard` ends whose ``stream`` is a pipe that is read no more, and what it says on the other one."""
    reads, writes = os.pipe()
    os.close(reads)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | {stream: writes}
    typed = [f"./{word}" if word in {"model", "none", "out"} else word for word in words.split()]
    with subprocess.Popen([COMMAND, *typed], env=env, cwd=folder, text=True, **streams) as process:
        os.close(writes)
        out, err = process.communicate(timeout=STUCK)
    # With colours the bar of a command without --quiet is a terminal's: it moves the cursor, and says nothing.
    return process.returncode, out or "", re.sub(r"\x1b\[[?\w]*|\s", "", err or "")


# Each command and each package by `make test`, all pairs of them by `make test-all`.
QUICK = {("up", "celery"), ("worker", "prometheus_client"), ("control", "celery")}


@pytest.mark.parametrize(
    ("command", "package"),
    [
        pytest.param(*pair, marks=[] if pair in QUICK else [pytest.mark.slow])
        for pair in product(("up", "worker", "control"), ("celery", "prometheus_client"))
    ],
)
def test_without_their_packages_the_service_says_what_to_install_and_starts_nothing(
    command: str, package: str, reshard: Run, clean: dict[str, str], tmp_path: Path
) -> None:
    masked = tmp_path / "masked"
    masked.mkdir()
    (masked / "sitecustomize.py").write_text(f"import sys\nsys.modules['{package}'] = None\n")
    done = reshard(command, env={"PYTHONPATH": str(masked)})
    assert (done.code, done.out) == (10, "")
    assert done.err.startswith(f"error[queue.extra_missing]: {package} is not installed"), done.err
    assert "[worker]'" in done.err and "'reshard[" not in done.err
    assert not Path(clean["RESHARD_DATA_DIR"]).exists()
