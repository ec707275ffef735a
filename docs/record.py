"""Writes what docs show of the terminal, from real runs against a Hub on this machine.

python docs/record.py           writes docs/run.svg, docs/when-it-says-no.md, and the console blocks of the pages below
python docs/record.py --check   fails when one of them is not what the command says today

Addresses, ids, times and paths of the machine differ from run to run: the pages have stand-ins for them, and they do
not count when the recording is compared.
"""

from __future__ import annotations

import getpass
import os
import pty
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

sys.path.insert(0, str(Path(__file__).parents[1]))  # the Hub on loopback is the tests' own

from demo.__main__ import PUBLISHER_TOKEN, SOURCE, publish_source
from reshard.web.settings import PORT
from tests.hub import HubProcess
from tests.support.models import save_model
from tests.support.procs import free_port

HERE = Path(__file__).parent
RECORDING, REFUSALS = HERE / "run.svg", HERE / "when-it-says-no.md"
# Pages whose console blocks show what their commands say, in the order in which these are typed.
SHOWN = tuple(HERE / page for page in ("quickstart.md", "guides/catalogs.md", "guides/schedules.md"))
COLUMNS = 80
RECORDED = f"reshard run {SOURCE} --to you/all-MiniLM-L6-v2-30MB --size 30MB"

MIRROR = """\
name: mirror
defaults: {to: "you/{name}-{size}", size: 10kB}
entries:
  - repo: them/model
  - repo: them/onnx
"""

# What a person does, and the command that says no to it.
MISTAKES = {
    "A folder without `./`": "reshard plan mine/model",
    "A name without an owner": "reshard plan gpt2",
    "A repository that does not exist": "reshard plan them/modle --size 200MB",
    "A revision that does not exist": "reshard plan them/model@v9",
    "A dataset": "reshard plan datasets/them/words",
    "An adapter without its base model": "reshard plan them/adapter",
    "ONNX files": "reshard plan them/onnx",
    "A class that is code in the repository": "reshard run them/own-code --to ./out --require model",
    "An incomplete download": "reshard plan ./broken",
    "A size in bits": "reshard plan ./mine/model --size 200Mb",
    "A size without a unit": "reshard plan ./mine/model --size 200",
    "A size with a space": "reshard plan ./mine/model --size 200 MB",
    "A tensor larger than the size": "reshard plan ./mine/model --size 2kB --oversize fail",
    "No weights left": "reshard plan ./mine/model --exclude '*.safetensors'",
    "Conflicting options": "reshard plan ./mine/model --size 1GB --single",
    "No target": "reshard run them/model",
    "A target that is a file": "reshard run ./mine/model --to ./notes.txt",
    "A target inside the source": "reshard run ./mine/model --to ./mine/model/out",
    "A target that holds another model": "reshard run them/model --to ./mine/model",
    "A pull request on a folder": "reshard run them/model --to ./out --pr",
    "Another user's namespace": "reshard run ./mine/model --to them/mine",
    "No token": "HF_TOKEN= reshard run ./mine/model --to you/mine",
    "A result that differs from its source": "reshard verify ./mine/model --against them/model",
    "A queue that is not running": "reshard submit them/model --to you/model",
    "A missing extra": "reshard up",
}

# What else to know of it.
BESIDE = {
    "Another user's namespace": "`reshard plan` and the page show a note if your token has no write access. Sometimes"
    " access cannot be checked:\nwithout a token, for a pull request, or on a Hub that does not report it. The note"
    ' then says "not checked".',
}
ADDED = f"uv tool install --force '/home/you/dist/reshard-{version('reshard')}-py3-none-any.whl[worker]'"


OWN_CODE = '{"architectures": ["OwnLM"], "auto_map": {"AutoModelForCausalLM": "modeling.OwnLM"}}'


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder).resolve()
        with _hub() as hub:
            made = {RECORDING: _record(hub, here), REFUSALS: _refusals(hub, here)} | _pages(hub, here)
    stale = {path: text for path, text in made.items() if not _same(path, text)}
    if stale and "--check" in sys.argv:
        sys.exit(f"out of date: {', '.join(path.name for path in stale)}; run `make docs`")
    for path, text in stale.items():
        path.write_text(text)


def _same(path: Path, made: str) -> bool:
    """Whether it says the same, whatever numbers and ids are in it, and wherever they break a line."""
    figure = r"(?:\d+(?:\s|&#160;)+(?:h|min)(?:\s|&#160;)+)*\d[\d,.]*"  # 11 s, or 1 min 31 s on a slow machine
    texts = path.read_text() if path.exists() else "", made
    before, now = (re.sub(rf"<[^>]*>|\s|&#160;|[\da-f]{{7,}}|{figure}", "", text) for text in texts)
    return before == now


@contextmanager
def _hub() -> Iterator[HubProcess]:
    """A Hub with you on it, a packaged model, and what others have."""
    with HubProcess(users=["them:hf_them", f"sentence-transformers:{PUBLISHER_TOKEN}", "you:hf_you"]) as hub:
        with tempfile.TemporaryDirectory() as folder:
            publish_source(hub, Path(folder))
            model = save_model(Path(folder, "model"), 4, 4000, 2)
            _upload(hub, "them/model", model)
            (model / "config.json").write_text(OWN_CODE)
            _upload(hub, "them/own-code", model)
        for name in ("adapter", "onnx"):
            hub.admin.create_repo(f"them/{name}")
        hub.admin.put_files("them/adapter", {"adapter_model.safetensors": b"", "adapter_config.json": b"{}"})
        hub.admin.put_files("them/onnx", {"model.onnx": b"ONNX"})
        yield hub


def _upload(hub: HubProcess, repo: str, folder: Path) -> None:
    hub.admin.create_repo(repo)
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    hub.admin.put_files(repo, files, lfs=[path for path in files if path.endswith(".safetensors")])


def _environment(hub: HubProcess, here: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "RESHARD_", "XDG_"))}
    return kept | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "HOME": str(here),
        "HF_ENDPOINT": hub.endpoint,
        "HF_TOKEN": "hf_you",
        "COLUMNS": str(COLUMNS),
        "TERM": "xterm-256color",
    }


def _record(hub: HubProcess, here: Path) -> str:
    """The main job on a terminal, as it looks when it has ended: an SVG."""
    said, code = _on_terminal(RECORDED, _environment(hub, here), here)
    if code:
        sys.exit(f"`{RECORDED}` ended with {code}:\n{said}")
    shown = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    shown.print(Text.from_ansi(f"$ {RECORDED}\n{said}"))
    return shown.export_svg(title="reshard", unique_id="reshard")


def _on_terminal(typed: str, env: Mapping[str, str], here: Path) -> tuple[str, int]:
    """What stands on a terminal when the command has ended, colours included, and its exit code."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(shlex.split(typed), env=env, cwd=here, stdout=theirs, stderr=theirs) as running:
        os.close(theirs)
        seen = b""
        while chunk := _next(ours):
            seen += chunk
    os.close(ours)
    return _screen(seen.decode()), running.returncode


def _next(terminal: int) -> bytes:
    """What comes next; nothing once the other side is closed (EIO on Linux)."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


def _screen(written: str) -> str:
    """The lines that stand when all was written; colours are kept.

    Of what moves the cursor it knows what rich's progress writes: ECMA-48 CUU by one line, EL of a whole line.
    """
    rows, row = [""], 0
    for part in re.findall(r"\x1b\[1A|\x1b\[2K|\x1b\[\?25[lh]|\n|\r|[^\x1b\r\n]+|\x1b\[[\d;]*m", written):
        if part == "\n":
            row += 1
            rows += [""] * (row == len(rows))
        elif part == "\x1b[1A":
            row -= 1
        elif part == "\x1b[2K":
            rows[row] = ""
        elif part != "\r" and not part.startswith("\x1b[?"):
            rows[row] += part
    return "\n".join(rows).rstrip()


def _pages(hub: HubProcess, here: Path) -> dict[Path, str]:
    """The pages of SHOWN, with what the commands in their console blocks say now."""
    (here / "mirror.yaml").write_text(MIRROR)
    env = _environment(hub, here) | {"RESHARD_WEB_PORT": str(port := free_port())}  # the usual one may be taken
    stand_ins = {
        rf"127\.0\.0\.1:{port}\b": f"127.0.0.1:{PORT}",
        re.escape(str(here)): "/home/you",
        re.escape(hub.endpoint): "https://hub.example",
        re.escape(f"{getpass.getuser()}@{socket.gethostname()}"): "you@laptop",
        r"(?<=job )[a-z2-9]{10}\b|^[a-z2-9]{10}(?=  )": "jhpex43z9e",
        r"\b[A-Z][a-z]{2} [ \d]\d \d\d:\d\d\b": "Jun 15 22:00",
        r"(?<=once=)[\w-]+": "...",
    }

    def said(block: re.Match[str]) -> str:
        rows = []
        for typed in re.findall(r"^\$ (.+)$", block[0], re.MULTILINE):
            shown = Text.from_ansi(_on_terminal(typed, env, here)[0]).plain
            for ours, theirs in stand_ins.items():
                shown = re.sub(ours, theirs, shown, flags=re.MULTILINE | re.DOTALL)
            rows += [f"$ {typed}", *(row.rstrip() for row in shown.splitlines())]
        return "\n".join(["```console", *rows, "```"])

    try:
        return {page: re.sub(r"```console\n.*?\n```", said, page.read_text(), flags=re.DOTALL) for page in SHOWN}
    finally:
        subprocess.run(["reshard", "down"], env=env, cwd=here, capture_output=True, check=True)


def _refusals(hub: HubProcess, here: Path) -> str:
    """A page of mistakes: what was typed, what it says."""
    save_model(here / "mine" / "model", 8, 4000, 2)
    (here / "notes.txt").write_text("notes\n")
    first = save_model(here / "broken", 4, 4000, 2) / "model-00001-of-00002.safetensors"
    os.truncate(first, first.stat().st_size - 1000)
    page = [
        "<!-- Written by `make docs` from real runs; `make test-all` fails when it is out of date. -->",
        "# Common mistakes",
        "Every error states the problem in one line, with a code that you can search for. A hint shows the next step."
        " No error loses data or leaves work half done. [The reference](reference/errors.md) lists all codes with their"
        " exit codes.",
    ]
    for mistake, typed in MISTAKES.items():
        env = _environment(hub, here)
        if typed == "reshard up":  # whose packages are there
            (here / "masked").mkdir()
            (here / "masked" / "sitecustomize.py").write_text("import sys\nsys.modules['celery'] = None\n")
            env["PYTHONPATH"] = str(here / "masked")
        said = _refused(typed, env, here)
        said = said.replace(str(here), "/home/you").replace(hub.endpoint, "https://hub.example")
        said = re.sub(r"run `[^`]*\[worker\]'`", f"run `{ADDED}`", said)  # it names what this installation came from
        page.append(f"## {mistake}\n\n```console\n$ {typed}\n{said}\n```")
        if mistake in BESIDE:
            page.append(BESIDE[mistake])
    return "\n\n".join(page) + "\n"


def _refused(typed: str, env: Mapping[str, str], here: Path) -> str:
    done = subprocess.run(typed, shell=True, env=env, cwd=here, capture_output=True, text=True)
    error = done.stderr.find("error[")
    if not done.returncode or error < 0:
        sys.exit(f"`{typed}` was not refused: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stderr[error:].rstrip()


if __name__ == "__main__":
    main()
