"""The library as a script uses it: `reshard.pipeline` and nothing below it."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import start_new_kernel
from safetensors.numpy import save_file

import reshard
from reshard import pipeline
from reshard.pipeline import (
    AccessError,
    Hub,
    LoadOptions,
    Options,
    Request,
    ReshardError,
    UsageError,
    errors,
    plan,
    run,
    verify,
)
from reshard.pipeline.arguments import FLAGS, as_arguments
from reshard.pipeline.request import Given

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({f"layer.{i}": np.full(1000, i, np.uint8) for i in range(10)}, folder / "model.safetensors")
    return folder


def test_every_public_name_is_there() -> None:
    assert [name for name in pipeline.__all__ if not hasattr(pipeline, name)] == []
    assert set(dir(pipeline)) == set(pipeline.__all__)


def test_every_family_of_errors_is_public() -> None:
    families = {kind.__name__ for kind in ReshardError.__subclasses__() if kind.__module__.startswith(errors.__name__)}
    assert families <= set(pipeline.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        pipeline.no_such_name  # noqa: B018


def test_an_import_of_the_package_or_its_errors_loads_nothing_heavy() -> None:
    script = "import sys, json, reshard.pipeline, reshard.pipeline.errors; json.dump(list(sys.modules), sys.stdout)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert not loaded & {"numpy", "huggingface_hub", "httpx2", "pydantic", "torch", "reshard.pipeline.reshard"}


def test_a_request_is_made_of_places_and_options_as_they_are_typed(tmp_path: Path) -> None:
    request = Request.of("a/model@v1", "b/model", size="200MB", dtype="bfloat16")
    assert request.source == Hub(repo="a/model", revision="v1")
    assert request.options == Options(size=200_000_000, dtype="bfloat16")
    with pytest.raises(UsageError):
        Request.of("a/model", "b/model", size="5G")
    with pytest.raises(UsageError, match="dtype: .*, not 'int3'"):
        Request.of("a/model", "b/model", dtype="int3")
    with pytest.raises(UsageError, match="^ranks: use ep or pp"):
        Request.of("a/model", "b/model", ranks="ep1")
    with pytest.raises(UsageError, match="^include: must have at most 100 items, not .{197,203}$"):
        Request.of("a/model", "b/model", include=["a"] * 101)
    nested: Any = {"kind": "hub"}
    with pytest.raises(UsageError, match="^config_from.hub.repo: is missing$"):
        Request.of("a/model", "b/model", config_from=nested)
    with pytest.raises(UsageError, match="sise"):
        Request.of("a/model", "b/model", sise="200MB")


def test_what_was_planned_is_run_and_verified(model: Path, tmp_path: Path) -> None:
    request = Request.of(str(model), str(tmp_path / "out"), size="3300B")
    planned = plan(request)
    assert not (tmp_path / "out").exists()
    report = run(request)
    assert report.plan.digest == planned.digest
    assert sorted(p.name for p in (tmp_path / "out").glob("*.safetensors")) == [s.path for s in planned.shards]

    seen: list[tuple[int, int]] = []
    found = verify(
        str(tmp_path / "out"), str(model), deep=True, progress=lambda done, total: seen.append((done, total))
    )
    assert found.result == "passed"
    assert found.against == planned.pin
    done, total = seen[-1]
    assert seen[0] == (0, total) and done >= 2 * 10 * 1000

    shard = tmp_path / "out" / planned.shards[0].path
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert verify(str(tmp_path / "out"), str(model), deep=True).result == "failed"


def test_places_are_paths_as_well(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    request = Request.of(Path("model"), Path("out"), size="3300B", config_from=Path("model"))
    assert (str(request.source), str(request.options.config_from)) == (str(model), str(model))
    run(Request.of(request.source, request.target, size="3300B"))
    assert verify(Path("out"), against=Path("model"), deep=True).result == "passed"
    assert str(pipeline.parse_place(Path("a/b@c"))) == str(tmp_path / "a/b@c"), "a path object is never a repository"


def test_a_plan_needs_no_target_and_is_shown_in_a_line(model: Path) -> None:
    planned = plan(Request.of(model, size="3300B"))
    assert repr(planned) == (
        f"<Plan {planned.digest[:12]} of {planned.pin}: 10 tensors in {len(planned.shards)} files of"
        f" {sum(shard.size for shard in planned.shards):,} bytes, 0 files copied unchanged>"
    )
    with pytest.raises(UsageError, match="^target= is required") as raised:
        run(Request.of(model))
    assert raised.value.code == "usage.no_target" and "`reshard plan` works without a target" in raised.value.next_step


def test_a_plan_of_what_is_up_to_date_says_so_in_its_line(model: Path, tmp_path: Path) -> None:
    request = Request.of(model, tmp_path / "out", size="3300B")
    commit = run(request).published.commit
    planned = plan(request)
    assert repr(planned) == f"<Plan of {planned.pin}: nothing to do, {commit} is up to date>" and not planned.shards


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda model, given: plan(given), "^Request.of(source, target) makes a request; './model' is none$"),
        (lambda model, given: run(given), "^Request.of(source, target) makes a request; './model' is none$"),
        (lambda model, given: run(Request.of(model, "./out"), jobs=0), "^jobs must be at least 1, or None, not 0$"),
        (lambda model, given: run(Request.of(model, "./out"), jobs=given), "^jobs must be at least 1, or None, not '"),
        (lambda model, given: plan(Request.of(model), given), "^context must be a Context, not './model'$"),
        (lambda model, given: run(Request.of(model, "./out"), {}), "^context must be a Context, not {}$"),
        (lambda model, given: run(Request.of(model, "./out"), watcher=print), "^watcher must be a Watcher, not <built"),
        (lambda model, given: run(Request.of(model, "./out"), None, None, True), "^meta_loader must be a MetaLoader,"),
        (lambda model, given: Request.of(model, size=True), "^size: must be a size, such as 200MB, not True$"),
        (lambda model, given: Options.of(dtype=given), "^dtype: must be .*, not './model'$"),
        (lambda model, given: LoadOptions(loader=given), "^loader must be one of transformers, accelerate, not './mod"),
        (lambda model, given: LoadOptions(device_map=given), "^device_map must be one of auto, .* by module, not './m"),
        (
            lambda model, given: LoadOptions(max_memory=given),
            "^max_memory must be bytes by device, .* not './m",
        ),
        (
            lambda model, given: LoadOptions(max_memory={"cpu": given}),
            "^max_memory must be bytes by device, .*'./m",
        ),
        (lambda model, given: LoadOptions(memory=given), "^memory must be a number of bytes, not './model'$"),
        (lambda model, given: LoadOptions(memory=-1), "^memory must be a number of bytes, not -1$"),
        (lambda model, given: Options.of(size="5G"), "^size=5G: unknown unit 'G'"),
        (lambda model, given: plan(Request.of(os.fsdecode(b"./m\xe8"))), "name is not UTF-8$"),
        (lambda model, given: plan(Request.of(Path(os.fsdecode(b"./m\xe8")))), "name is not UTF-8$"),
    ],
)
def test_a_call_that_makes_no_sense_is_one_of_our_errors(
    call: Callable[[Path, Any], object], what: str, model: Path
) -> None:
    with pytest.raises(UsageError, match=what.replace("(", r"\(").replace(")", r"\)")) as raised:
        call(model, "./model")
    assert "--" not in raised.value.next_step


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"changes": Options(dtype="bfloat16")}, "require against="),
        ({"config_from": "a/b"}, "config_from=.* require against="),
        ({"builder": "urn:ours"}, "builder= requires signed_by="),
        ({"builder": ""}, "builder= requires signed_by="),
        ({"signed_by": []}, "signed_by= requires at least one file"),
        ({"signed_by": ()}, "signed_by= requires at least one file"),
    ],
)
def test_what_verify_could_only_ignore_is_refused(given: dict[str, Any], says: str, model: Path) -> None:
    with pytest.raises(UsageError, match=says):
        verify(model, **given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"deep": "no"}, "deep must be True or False, not 'no'"),
        ({"deep": 1}, "deep must be True or False, not 1"),
        ({"load": {}}, "load must be LoadOptions(), not {}"),
        ({"load": True}, "load must be LoadOptions(), not True"),
        ({"changes": {}}, "changes must be Options.of(...), not {}"),
        ({"signed_by": {}}, "signed_by must be a file or a list of files, not {}"),
        ({"signed_by": b"key.pem"}, "signed_by must be a file or a list of files, not b'key.pem'"),
        ({"signed_by": [None]}, "signed_by must be a file or a list of files, not [None]"),
        ({"signed_by": "key.pem", "builder": 1}, "builder must be text, not 1"),
        ({"context": {}}, "context must be a Context, not {}"),
        ({"progress": None}, "progress must be a function, not None"),
    ],
)
def test_an_argument_that_would_be_taken_for_another_is_refused(given: dict[str, Any], says: str, model: Path) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(says)}$"):
        verify(model, **given)


def test_options_are_given_by_name_alone() -> None:
    untyped: Any = Options.of
    with pytest.raises(TypeError, match="positional"):
        untyped({"dtype": "bfloat16"})


def test_one_key_to_verify_by_is_as_good_as_a_list(model: Path) -> None:
    for keys in ("nobodys.pem", Path("nobodys.pem"), ["nobodys.pem"]):
        with pytest.raises(AccessError, match=r"cannot use the key nobodys\.pem"):
            verify(model, signed_by=keys)


def test_a_folder_with_a_name_too_long_for_a_target_is_verified(model: Path) -> None:
    checks = verify(model).checks
    assert verify(model.rename(model.with_name("m" * 240))).checks == checks


def test_a_watcher_whose_methods_would_never_be_called_is_refused() -> None:
    """The fields of a dataclass hide the methods of a class below it."""
    with pytest.raises(TypeError, match=r"^Mine: pass functions to Watcher instead, such as Watcher\(noted=print\)$"):
        type("Mine", (pipeline.Watcher,), {"noted": print})


def test_the_keywords_of_a_request_are_the_options() -> None:
    """By name, and by type but for what is given in more than one way."""
    given = get_type_hints(Given, include_extras=True)
    assert list(given) == list(Options.model_fields)
    wider = {"size", "rename", "config_from", "include", "exclude"}
    for name, field in Options.model_fields.items():
        assert (given[name] == field.annotation) is (name not in wider), name
    for name in wider:
        value = {"size": "1GB", "rename": [{"^a": "b"}], "config_from": Path("/m")}.get(name, ["*.md"])
        assert getattr(Options.of(**{name: value}), name)


def test_mypy_checks_the_keywords_of_callers(tmp_path: Path) -> None:
    script = tmp_path / "caller.py"
    calls = ['size="1GB", dtype="bfloat16", rename=[{"^a": "b"}]', "sise=1", 'dtype="int3"', "pr=1"]
    lines = [f'Request.of("a/b", Path("c"), {call})' for call in calls]
    script.write_text("\n".join(["from pathlib import Path", "from reshard.pipeline import Request", *lines]) + "\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    found = [line.split(":")[1] for line in done.stdout.splitlines() if ": error:" in line]
    assert found == ["4", "5", "6"], done.stdout + done.stderr


FLAGGED = re.compile(r"--(?:" + "|".join(name.replace("_", "-") for name in Options.model_fields) + r")\b")


def test_errors_name_arguments_and_no_option(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="^size=5G: unknown unit"):
        Request.of("a/b", "c/d", size="5G")
    with pytest.raises(UsageError) as raised:
        run(Request.of(model, tmp_path / "out", size="700B", oversize="fail"))
    told = f"{raised.value} {raised.value.next_step}"
    assert "over size=700" in told and "oversize=" in told and "--" not in told
    assert "--size" in str(errors.by_code()["usage.oversize"](tensor="a", bytes=1, size=2)), "as commands have them"
    flags = {name for name, field in Options.model_fields.items() if field.annotation is bool}
    assert {text.partition("=")[0] for text in FLAGS.values()} == flags | {"visibility"}
    for kind in errors.by_code().values():
        for text in (kind.message, kind.hint, *kind.defaults.values()):
            commands = re.sub("`reshard [^`]*`", "", as_arguments(text))
            assert not FLAGGED.search(commands), text


BAR = """
import sys
from reshard.pipeline import Request, run
run(Request.of(sys.argv[1], sys.argv[2], size="3300B"), progress=True)
"""


def test_a_run_shows_a_bar_on_a_terminal_and_nothing_in_a_file(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", BAR, str(model)]
    done = subprocess.run([*command, str(tmp_path / "silent")], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen([*command, str(tmp_path / "out")], stderr=theirs, stdout=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # the terminal ends with its last writer
            while read := os.read(ours, 4096):
                shown += read
    os.close(ours)
    assert process.returncode == 0, shown.decode()
    assert "reading back" in shown.decode() and "10.0/10.0 kB" in shown.decode()


@pytest.fixture(scope="module")
def kernel() -> Iterator[BlockingKernelClient]:
    manager, client = start_new_kernel(kernel_name="python3")
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


@pytest.mark.parametrize("widgets", [True, False])
def test_a_run_shows_its_bar_below_the_cell_of_a_notebook(
    kernel: BlockingKernelClient, model: Path, tmp_path: Path, widgets: bool
) -> None:
    """Where nothing can move below a cell, its phases stand there, each in a line."""
    setup = f"import sys\nsys.argv = ['', {str(model)!r}, {str(tmp_path / 'out')!r}]\n"
    setup += "" if widgets else "sys.modules['ipywidgets'] = None  # as if it were not installed\n"
    shown = list[dict[str, str]]()

    def below(message: dict[str, Any]) -> None:
        assert message["msg_type"] not in {"stream", "error"}, message["content"]
        if message["msg_type"] == "display_data":
            shown.append(message["content"]["data"])

    kernel.execute_interactive(setup + BAR, output_hook=below, timeout=60)
    text = [re.sub(r"\x1b\[[\d;]*m", "", data["text/plain"]).strip() for data in shown]
    if widgets:
        assert "application/vnd.jupyter.widget-view+json" in shown[0]
        last = [line for line in text if line][-1]
        assert last.startswith("reading back") and "10.0/10.0 kB" in last
    else:
        assert text == ["planning", "copying", "checking the model", "publishing", "reading back"]


def test_the_version_is_that_of_what_is_installed() -> None:
    assert reshard.__version__ == version("reshard")
    assert not hasattr(reshard, "version")
