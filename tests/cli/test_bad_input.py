"""Whatever is wrong: one line that says what and where, the next command, its own exit code, and an untouched target.

Every row runs the real command against the Hub on loopback. The target holds a file before, and its head is the same
after; where the row has no target yet, none has come into being.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.hub.fixtures import Namespace
from tests.support.models import save_model

SIZE = "20kB"
FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass
class Scene:
    """A good source and a target with one file in it, which a row then spoils."""

    space: Namespace
    files: dict[str, bytes]
    source: str = ""
    target: str = ""
    options: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    here: Path = Path()  # where the command is typed

    def spoil_header(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """Rewrite the first file's header as ``change`` leaves it, or with the text that it returns."""
        content = self.files[FIRST]
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        text = change(header)
        raw = text if isinstance(text, bytes) else json.dumps(header).encode()
        self.files[FIRST] = len(raw).to_bytes(8, "little") + raw + content[8 + length :]

    def spoil_index(self, **changes: str) -> None:
        index = json.loads(self.files[INDEX])
        index["weight_map"] |= changes
        self.files[INDEX] = json.dumps(index).encode()


def first(header: dict[str, Any]) -> dict[str, Any]:
    """The spec of the tensor that lies first in the file."""
    return min((v for k, v in header.items() if k != "__metadata__"), key=lambda v: v["data_offsets"])


def overlap(header: dict[str, Any]) -> None:
    specs = sorted((v for k, v in header.items() if k != "__metadata__"), key=lambda v: v["data_offsets"])
    size = specs[1]["data_offsets"][1] - specs[1]["data_offsets"][0]
    specs[1]["data_offsets"] = [0, size]


def hole(header: dict[str, Any]) -> None:
    del header[min((k for k in header if k != "__metadata__"), key=lambda k: header[k]["data_offsets"])]


def twice(header: dict[str, Any]) -> bytes:
    return json.dumps(header).replace('"dtype":', '"dtype": "F32", "dtype":', 1).encode()


def gated(scene: Scene) -> None:
    scene.space.admin.create_repo(scene.source, gated="manual", visibility="public")
    reader = scene.space.admin.create_user(f"{scene.space.name}reader")
    scene.env["HF_TOKEN"] = reader.token
    scene.target = f"{reader.name}/target"


def foreign(scene: Scene) -> None:
    other = scene.space.admin.create_user(f"{scene.space.name}other")
    scene.target = f"{other.name}/target"
    scene.space.admin.create_repo(scene.target)


def read_only(scene: Scene) -> None:
    scene.env["HF_TOKEN"] = scene.space.admin.create_token(scene.space.name, role="read")


def disk_full(scene: Scene) -> None:
    scene.env["RESHARD_DISK_LIMIT"] = "10kB"


def private_source(scene: Scene) -> None:
    scene.space.admin.create_repo(scene.source, visibility="private")


def flipped(scene: Scene) -> None:
    scene.space.admin.fault(f"GET /_cdn/.*{FIRST}", "wrong_bytes", at=5000)


def unreachable(scene: Scene) -> None:
    scene.env["HF_ENDPOINT"] = "http://127.0.0.1:9"  # the discard port: nobody listens


Spoil = Callable[[Scene], Any]


def typed(*options: str) -> Spoil:
    """Spoils nothing but the command line."""
    return lambda scene: scene.options.extend(options)


def indexed(**changes: str) -> Spoil:
    return lambda scene: scene.spoil_index(**changes)


def lie_about_a_shape(scene: Scene) -> None:
    scene.spoil_header(lambda header: first(header).update(shape=[3]))


def not_there(scene: Scene) -> None:
    scene.source = scene.space.repo("nope")


def folder_without_dot(scene: Scene) -> None:
    (scene.here / "mine" / "model").mkdir(parents=True)
    scene.source = "mine/model"


def into_a_file(scene: Scene) -> None:
    (scene.here / "file").write_text("theirs")
    scene.target = "./file"


def below_a_file(scene: Scene) -> None:
    into_a_file(scene)
    scene.target += "/out"


def its_own_code(scene: Scene) -> None:
    scene.options += ["--require", "model"]
    config = {"architectures": ["OwnLM"], "auto_map": {"AutoModel": "own.OwnLM"}}
    scene.files["config.json"] = json.dumps(config).encode()


def no_config(scene: Scene) -> None:
    scene.options += ["--require", "model"]
    del scene.files["config.json"]


ROWS: dict[str, tuple[Spoil, str, int, str, str]] = {
    # what is wrong: (how, code, exit code, a part of the line, a part of the hint)
    "no such repository": (not_there, "source.not_found", 3, "nope", "HF_TOKEN"),
    "no such revision": (typed("--revision", "v9"), "source.no_revision", 3, "v9", "--revision"),
    "gated": (gated, "source.gated", 3, "gated", "request access"),
    "no write access": (foreign, "access.no_write", 4, "does not have write access", "--pr"),
    "a token that only reads": (read_only, "access.no_write", 4, "have write access", "create one with write access ("),
    "token missing": (lambda s: s.env.pop("HF_TOKEN"), "access.no_token", 4, "no token", "HF_TOKEN"),
    "a bad token": (lambda s: s.env.update(HF_TOKEN="hf_wrong"), "access.bad_token", 4, "token", "HF_TOKEN"),
    "a more visible target": (private_source, "target.more_visible", 7, "is public", "--public"),
    "a dtype that is none": (typed("--dtype", "fp16"), "usage", 2, "'--dtype': 'fp16' is not one of", "--help"),
    "size zero": (typed("--size", "0"), "usage.size", 2, "greater than zero", "200MB"),
    "size negative": (typed("--size=-1GB"), "usage.size", 2, "greater than zero", "200MB"),
    "size a rate": (typed("--size", "5MB/s"), "usage.size", 2, "rate", "200MB"),
    "size in bits": (typed("--size", "5Gb"), "usage.size", 2, "bits", "200MB"),
    "size unparsable": (typed("--size", "lots"), "usage.size", 2, "lots", "200MB"),
    "size in two words": (typed("--size", "200", "MB"), "usage.size", 2, "--size 200 MB", "200MB"),
    "size in two words and a rate": (typed("--size=200", "MB/s"), "usage.size", 2, "--size 200 MB/s", "200MB"),
    "weights excluded, but not their index": (
        typed("--exclude", "*.safetensors"), "usage.exclude", 2, FIRST, "exclude its index too",
    ),
    "all weights excluded": (typed("--exclude", "*.safetensors*"), "usage.exclude", 2, "no weights", "narrow"),
    "no source": (lambda s: setattr(s, "source", ""), "usage.place", 2, "'': empty", "user/repo"),
    "smaller than a header": (typed("--size", "90B"), "usage.size_too_small", 2, "90", "bytes"),
    "oversize fail": (
        typed("--size", "1kB", "--oversize", "fail"), "usage.oversize", 2, "layer.0.weight", "--size",
    ),
    "no weights": (
        lambda s: [s.files.pop(p) for p in list(s.files) if "model" in p] and s.files.update({"model.onnx": b"ONNX"}),
        "source.no_weights", 3, "ONNX", "these files were converted from",
    ),
    "an adapter alone": (
        lambda s: [s.files.pop(p) for p in list(s.files) if "model" in p]
        and s.files.update({"adapter_model.safetensors": b"", "adapter_config.json": b"{}"}),
        "source.no_weights", 3, "adapter_model.safetensors", "merge it into its base model",
    ),
    "a dataset": (lambda s: setattr(s, "source", "datasets/a/b"), "usage.place", 2, "not a model", "only models"),
    "a name without its owner": (
        lambda s: setattr(s, "source", "gpt2"), "usage.place", 2, "the owner is missing", "openai-community/gpt2",
    ),
    "code of the repository": (
        its_own_code, "proof.model_required", 6, "code in the repository", "remove --require",
    ),
    "no config": (no_config, "proof.model_required", 6, "no config.json", "--config-from"),
    "a folder without ./": (folder_without_dot, "source.not_found", 3, "mine/model", "./mine/model"),
    "index names a missing file": (lambda s: s.files.pop(FIRST), "checkpoint.absent_file", 5, FIRST, ""),
    "index names a missing tensor": (indexed(ghost=FIRST), "checkpoint.index", 5, "ghost", ""),
    "index path with ..": (
        indexed(**{"layer.0.bias": "../x.safetensors"}), "checkpoint.unsafe_path", 5, "../x", "trust its author",
    ),
    "index path absolute": (
        indexed(**{"layer.0.bias": "/x.safetensors"}), "checkpoint.unsafe_path", 5, "/x", "trust its author",
    ),
    "file too short": (lambda s: s.files.update({FIRST: s.files[FIRST][:-1]}), "checkpoint.length", 5, FIRST, ""),
    "file too long": (lambda s: s.files.update({FIRST: s.files[FIRST] + b"x"}), "checkpoint.length", 5, FIRST, ""),
    "header overlaps": (lambda s: s.spoil_header(overlap), "checkpoint.header", 5, "overlaps", ""),
    "header leaves a hole": (lambda s: s.spoil_header(hole), "checkpoint.header", 5, "hole", ""),
    "header lies about a shape": (lie_about_a_shape, "checkpoint.header", 5, FIRST, ""),
    "header is not JSON": (lambda s: s.spoil_header(lambda h: b"{not json"), "checkpoint.header", 5, "JSON", ""),
    "two files have one name": (
        lambda s: s.files.update({SECOND: s.files[FIRST]}), "checkpoint.duplicate_tensor", 5, FIRST, "",
    ),
    "header repeats a field": (lambda s: s.spoil_header(twice), "checkpoint.header", 5, "exactly once", ""),
    "header claims 100 GB": (
        lambda s: s.files.update({FIRST: (100 * 10**9).to_bytes(8, "little") + s.files[FIRST][8:]}),
        "checkpoint.header", 5, "100,000,000,000", "",
    ),
    "bytes that do not match their sha256": (flipped, "proof.source_corrupt", 6, FIRST, "nothing was published"),
    "disk full": (disk_full, "resource.disk", 8, "not enough disk space", "the same command"),
    "Hub unreachable": (unreachable, "hub.unreachable", 9, "127.0.0.1:9", "HF_ENDPOINT"),
    "a target that is a file": (into_a_file, "access.folder", 4, "it is a file", "a name that does not exist yet"),
    "a target below a file": (below_a_file, "access.folder", 4, "it is a file", "a name that does not exist yet"),
    "a folder cannot have branches": (
        lambda s: (s.options.extend(["--branch", "b"]), setattr(s, "target", "./out")), "usage", 2, "folder", "",
    ),
}  # fmt: skip


@pytest.fixture
def scene(tmp_path: Path, namespace: Namespace) -> Iterator[Scene]:
    folder = save_model(tmp_path / "model", 4, 4000, 2)
    scene = Scene(namespace, {path.name: path.read_bytes() for path in folder.iterdir()})
    scene.source, scene.target, scene.here = namespace.repo("source"), namespace.repo("target"), tmp_path
    namespace.admin.create_repo(scene.source)
    namespace.admin.create_repo(scene.target)
    namespace.admin.put_files(scene.target, {"theirs.txt": b"was here before"})
    scene.env = {
        "HF_ENDPOINT": namespace.endpoint,
        "HF_TOKEN": namespace.token,
        "HF_HUB_DISABLE_XET": "1",
        "RESHARD_TMPDIR": str(tmp_path),
    }
    yield scene


@pytest.mark.parametrize("wrong", ROWS)
def test_bad_input_is_one_line_a_hint_and_an_exit_code(scene: Scene, reshard: Run, wrong: str, tmp_path: Path) -> None:
    spoil, code, exit_code, says, hints = ROWS[wrong]
    source = scene.source
    spoil(scene)
    lfs = [path for path in scene.files if path.endswith(".safetensors")]
    scene.space.admin.put_files(source, scene.files, lfs=lfs)
    on_hub = not scene.target.startswith("./")
    existed = on_hub and scene.target.partition("/")[0] != f"{scene.space.name}reader"
    before = scene.space.admin.head(scene.target) if existed else None
    size = [] if any(o.startswith("--size") for o in scene.options) else ["--size", SIZE]

    done = reshard("run", scene.source, "--to", scene.target, *size, *scene.options, "--quiet", env=scene.env)

    assert done.code == exit_code, done.err
    line, hint = done.err.strip().splitlines()
    assert line.startswith(f"error[{code}]: ") and says in line
    assert hint.startswith("hint: ") and hints in hint
    assert "Traceback" not in done.err and done.out == ""
    assert scene.space.token not in done.err
    if existed:
        assert scene.space.admin.head(scene.target) == before
    assert not (tmp_path / "out").exists()
    leftovers = [path for path in tmp_path.rglob("*") if path.is_file() and "spool" in str(path)]
    assert not leftovers, "temporary files stay behind"


def test_a_target_that_changed_while_we_worked_is_told_and_left_alone(scene: Scene, reshard: Run) -> None:
    import threading

    lfs = [path for path in scene.files if path.endswith(".safetensors")]
    scene.space.admin.put_files(scene.source, scene.files, lfs=lfs)
    rule = scene.space.admin.fault("POST .*/objects/batch", "hold", times=1)
    results = []
    arguments = ("run", scene.source, "--to", scene.target, "--size", SIZE, "--quiet")
    thread = threading.Thread(target=lambda: results.append(reshard(*arguments, env=scene.env)))
    thread.start()
    scene.space.admin.wait_for_fault(rule, waiting=1)
    head = scene.space.admin.put_files(scene.target, {"tokenizer.json": b"{}"})
    scene.space.admin.release(rule)
    thread.join(120)
    (done,) = results
    assert done.code == 7
    assert "error[target.conflict]" in done.err and "tokenizer.json" in done.err
    assert scene.space.admin.head(scene.target) == head


@pytest.mark.parametrize("command", ["plan", "run", "submit"])
def test_a_target_that_is_empty_as_of_a_variable_that_is_not_set_is_refused(
    reshard: Run, model: Path, command: str
) -> None:
    done = reshard(command, model, "--to", "")
    assert (done.code, done.err[:18]) == (2, "error[usage.place]"), done.err


@pytest.mark.parametrize("command", ["run", "submit"])
def test_a_target_that_is_missing_is_asked_for(reshard: Run, model: Path, command: str) -> None:
    done = reshard(command, model)
    assert (done.code, done.err.partition(":")[0]) == (2, "error[usage.no_target]")
    assert "--to user/repo or --to ./folder" in done.err


def test_a_target_without_its_owner_is_told_what_a_target_is(reshard: Run, model: Path) -> None:
    done = reshard("run", model, "--to", "you")
    assert (done.code, done.err.partition(":")[0]) == (2, "error[usage.place]")
    assert done.err.endswith("hint: use --to user/repo, or --to ./you for a folder\n")


@pytest.mark.parametrize("token", ["", "their own"])
def test_a_plan_without_a_target_needs_no_leave_to_write(scene: Scene, reshard: Run, token: str) -> None:
    lfs = [path for path in scene.files if path.endswith(".safetensors")]
    scene.space.admin.put_files(scene.source, scene.files, lfs=lfs)
    stranger = scene.space.admin.create_user(f"{scene.space.name}stranger").token if token else ""
    done = reshard("plan", scene.source, "--size", "9kB", "--json", env=scene.env | {"HF_TOKEN": stranger})
    assert done.code == 0, done.out
    assert len(done.documents[0]["files"]) > 1
    refused = reshard("run", scene.source, "--to", scene.source, "--size", SIZE, env=scene.env | {"HF_TOKEN": stranger})
    assert refused.code == 4 and "error[access." in refused.err


@pytest.mark.parametrize("command", [("plan",), ("run", "--to", "./out"), ("verify",)])
def test_a_temporary_folder_that_is_not_there_is_named(reshard: Run, model: Path, command: tuple[str, ...]) -> None:
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    done = reshard(command[0], model, *command[1:], env={"RESHARD_TMPDIR": "/nowhere"})
    said = "error[resource.tmpdir]: cannot use the temporary folder /nowhere: No such file"
    assert done.code == 8 and said in done.err
    assert "Traceback" not in done.err and "internal" not in done.err
