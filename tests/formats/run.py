"""One run of the table: build every case, publish it, reshard it through the product, load it, compare."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, snapshot_download

from reshard.pipeline.places import parse_place
from reshard.pipeline.planning.model import Plan
from reshard.pipeline.request import Options, Request
from reshard.pipeline.reshard import Report, run
from reshard.pipeline.stores.connect import Context
from reshard.pipeline.verifying.meta_load import MetaLoader
from tests.formats.cases import CASES, Case
from tests.hub.fixtures import Namespace
from tests.support.checker import Tensors, from_hub, read_checkpoint
from tests.support.s3 import S3, in_s3, s3_served

COLUMNS = ("tensors", "tokenizer", "transformers", "accelerate", "disk offload")
LOADERS = COLUMNS[1:]
EQUAL, WRONG = "equal", "WRONG"
CHILDREN = 2  # processes that load at the same time
HEAVY = (".safetensors", ".bin", ".pth", ".distcp")

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Row:
    """One case's line of the table. A cell is ``equal``, or the error that the source gives to the same loader.

    ``wrong`` says of every other cell what became of it.
    """

    name: str
    cells: dict[str, str]
    level: str  # of the product's own check: model or structural
    plan: tuple[str, ...]
    wrong: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Done:
    """A case whose result is on the Hub and, again, in ``target``."""

    name: str
    folder: Path
    target: Path
    report: Report
    trouble: str  # "" when every tensor and file is what it must be

    def original(self, loader: str) -> Path:
        """Where that loader finds what was resharded."""
        case = CASES[self.name]
        return self.folder / (case.home if loader == "tokenizer" else case.peer)


def run_cases(names: Sequence[str], space: Namespace, scratch: Path) -> list[Row]:
    """The rows of those cases; ``space`` is a user on the Hub on loopback, ``HF_ENDPOINT`` and ``HF_TOKEN`` are its."""
    with closing(MetaLoader()) as meta_loader, _Loaders(scratch) as loaders, _bucket() as bucket:
        done = [_reshard(name, scratch / name, space, meta_loader, bucket) for name in build_cases(names, scratch)]
        asked = [(d, loader) for d in done for loader in LOADERS]
        said = loaders.ask([(loader, d.target, "auto") for d, loader in asked])
        found = {(d.name, loader): answer for (d, loader), answer in zip(asked, said, strict=True)}
        # The source is asked only where the model itself is not enough to judge by.
        unsure = [(d, loader) for d, loader in asked if found[d.name, loader].get("answer") != _reference(d, loader)]
        said = loaders.ask(
            [(loader, d.original(loader), CASES[d.name].options.get("dtype", "auto")) for d, loader in unsure]
        )
    sources = {(d.name, loader): answer for (d, loader), answer in zip(unsure, said, strict=True)}
    return [_row(d, found, sources) for d in done]


@contextmanager
def _bucket() -> Iterator[S3]:
    with s3_served() as endpoint, in_s3(endpoint) as bucket:
        yield bucket


def build_cases(names: Sequence[str], scratch: Path) -> Iterator[str]:
    """The names, each as soon as its source is there; the next ones are built meanwhile."""
    command = [sys.executable, "-m", "tests.formats.child", "build", str(scratch), *names]
    with subprocess.Popen(command, cwd=ROOT, env=_environment(scratch), stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.strip() in CASES:  # some libraries print as well
                yield line.strip()
    if child.returncode:
        raise RuntimeError(f"a case could not be built: {' '.join(command)}")


def _environment(scratch: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return kept | {"HF_HOME": str(scratch / "hf-home")}


# ----------------------------------------------------------------------------------------------- through the product


def _reshard(name: str, folder: Path, space: Namespace, meta_loader: MetaLoader, bucket: S3) -> _Done:
    case, target = CASES[name], space.repo(f"{name}-resharded")
    transport = "xet" if list(CASES).index(name) % 2 else "http"
    source = _publish(case, name, folder, space, transport, bucket)
    space.admin.create_repo(target)
    lender = None if case.home == "source" else parse_place(str(folder / case.home))
    options = Options(**case.options, config_from=lender, transport=transport, visibility="public")
    request = Request(source=parse_place(source), target=parse_place(target), options=options)
    report = run(request, Context.from_env(), meta_loader=meta_loader)
    there = snapshot_download(target, cache_dir=folder / "cache", endpoint=space.endpoint, token=space.token)
    return _Done(name, folder, Path(there), report, _trouble(case, folder, Path(there), space, target, report.plan))


def _publish(case: Case, name: str, folder: Path, space: Namespace, transport: str, bucket: S3) -> str:
    """Where the product finds the source."""
    local = folder / "source"
    if case.place == "folder":
        return str(local)
    files = {path.relative_to(local).as_posix(): path for path in sorted(local.rglob("*")) if path.is_file()}
    if case.place == "bucket":
        return bucket.put(name, {path: file.read_bytes() for path, file in files.items()})
    repo = space.repo(name)
    space.admin.create_repo(repo)
    if transport == "xet":
        operations = [CommitOperationAdd(path, str(file)) for path, file in files.items()]
        HfApi(space.endpoint, space.token).create_commit(repo, operations, commit_message="upload")
    else:
        heavy = [path for path in files if path.endswith(HEAVY)]
        space.admin.put_files(repo, {path: file.read_bytes() for path, file in files.items()}, lfs=heavy)
    if case.place == "cache":
        return str(snapshot_download(repo, cache_dir=folder / "cache", endpoint=space.endpoint, token=space.token))
    return repo


def _trouble(case: Case, folder: Path, target: Path, space: Namespace, repo: str, plan: Plan) -> str:
    expected: dict[str, dict[str, Any]] = json.loads((folder / "expected.json").read_text())
    fetch = from_hub(space.endpoint, repo)
    for path, tensors in expected.items():
        home, _, stem = path.removesuffix(".safetensors").rpartition("/")
        wanted: Tensors = {n: (dtype, tuple(shape), digest) for n, (dtype, shape, digest) in tensors.items()}
        found = read_checkpoint(fetch, stem, home)
        if found != wanted:
            different = [n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n)]
            return f"{path}: {len(different)} tensors differ, such as {min(different)}"
    if {str(output.name) for output in plan.outputs} != {path.removesuffix(".safetensors") for path in expected}:
        return f"other checkpoints than {sorted(expected)} were written"
    for path in (*case.expect, "config.json", "tokenizer_config.json"):
        content = (folder / case.home / path).read_bytes()
        if (target / path).read_bytes() != content and path not in {edit.path for edit in plan.edits}:
            return f"{path} is not the source's"
    large = [s.path for s in plan.shards if s.size > case.options["size"] and len(s.entries) > 1]
    return f"larger than the size: {large}" if large else ""


# ------------------------------------------------------------------------------------------------------ by the loaders


class _Loaders:
    """The processes that load. Each imports torch once, while the first cases are built and resharded."""

    def __init__(self, scratch: Path) -> None:
        command = [sys.executable, "-m", "tests.formats.child", "load"]
        with (scratch / "loaders.log").open("a") as log:
            self._children = [
                subprocess.Popen(
                    command, cwd=ROOT, env=_environment(scratch), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    stderr=log, text=True,
                )
                for _ in range(CHILDREN)
            ]  # fmt: skip

    def ask(self, questions: Sequence[tuple[str, Path, str]]) -> list[dict[str, Any]]:
        """What each loader says of each folder, in the order asked."""
        parts = [questions[first::CHILDREN] for first in range(CHILDREN)]
        with ThreadPoolExecutor(CHILDREN) as threads:
            said = list(threads.map(_answers, self._children, parts))
        return [said[i % CHILDREN][i // CHILDREN] for i in range(len(questions))]

    def __enter__(self) -> _Loaders:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.kill()
            child.communicate()


def _answers(child: subprocess.Popen[str], questions: Sequence[tuple[str, Path, str]]) -> list[dict[str, Any]]:
    """One after the other, so that neither side waits for the other to read."""
    assert child.stdin is not None and child.stdout is not None
    answers = []
    for loader, at, dtype in questions:
        question = {"loader": loader, "folder": str(at), "dtype": dtype}
        print(json.dumps(question), file=child.stdin, flush=True)
        # Some libraries print as well.
        line = next((line for line in child.stdout if line.startswith('{"loader"')), "")
        assert line, f"the process that loads ended at {question}; see loaders.log"
        answer = json.loads(line)
        assert answer | question == answer, f"an answer to another question than {question}"
        answers.append(answer)
    return answers


def _reference(done: _Done, loader: str) -> Any:
    """What the model that the case built says itself; an answer that nothing gives where there is none."""
    said = json.loads((done.folder / "answer.json").read_text())
    return {} if loader == "tokenizer" or said is None else said


def judged(here: dict[str, Any], source: dict[str, Any] | None) -> tuple[str, str]:
    """(cell, what is wrong with it) of what a loader said of the result, and of the source where it was asked."""
    if source is None or ("answer" in here and here["answer"] == source.get("answer")):
        return EQUAL, ""
    if "error" in here and here["error"] == source.get("error"):
        return here["error"], ""
    return WRONG, f"{here.get('error', 'another answer')}; the source: {source.get('error', 'loads')}"


def _row(done: _Done, found: dict[tuple[str, str], Any], sources: dict[tuple[str, str], Any]) -> Row:
    cells = {"tensors": WRONG if done.trouble else EQUAL}
    wrong = {"tensors": done.trouble}
    for loader in LOADERS:
        cells[loader], wrong[loader] = judged(found[done.name, loader], sources.get((done.name, loader)))
    (level,) = {check.level for check in done.report.checks if check.name.startswith("reload model")}
    plan = tuple(_plan_lines(done.report))
    return Row(done.name, cells, level, plan, {column: why for column, why in wrong.items() if why})


def _plan_lines(report: Report) -> Iterator[str]:
    plan = report.plan
    tensors = sum(len(shard.entries) for shard in plan.shards)
    largest = max(shard.size for shard in plan.shards)
    indexes = [output.index.path for output in plan.outputs if output.index]
    read, written = _count(len(plan.files), "file"), _count(len(plan.shards), "file")
    yield f"{read} read, {_count(tensors, 'tensor')}, {written} written"
    yield f"largest file: {largest:,} bytes" + "".join(f", index `{path}`" for path in indexes)
    yield f"copied unchanged: {', '.join(f'`{f.path}`' for f in plan.carried)}"
    if plan.edits:
        yield f"changed by the cast: {', '.join(f'`{edit.path}`' for edit in plan.edits)}"
    for path, why in plan.left_out:
        if path != ".gitattributes":
            yield f"skipped: `{path}`, {why}"
    yield from (f"note: {note}" for note in plan.notes)
    yield f"source bytes: `{', '.join(sorted(set(report.attested.values()))) or 'as delivered'}`"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
