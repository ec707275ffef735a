"""docs/check_tensors.py, which is not ours to run: it passes what we publish, and none of the ways to break it."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import shutil
import subprocess
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from safetensors.numpy import load_file, save_file

from reshard.pipeline.api import plan
from reshard.pipeline.errors import UsageError
from reshard.pipeline.planning.model import MANIFEST, PROVENANCE, TENSORS
from reshard.pipeline.request import Request
from reshard.pipeline.reshard import run
from reshard.pipeline.stores.connect import Context
from tests.support.keys import make_pair, refusal
from tests.support.models import numbered, save_sharded

ROOT = Path(__file__).parents[2]
CHECKER = ROOT / "docs" / "check_tensors.py"
NOTHING = hashlib.sha256().hexdigest()
SCHEMA = json.loads((ROOT / "docs" / "reference" / "tensors.schema.json").read_text())


def checked(source: Path, output: Path) -> list[str]:
    """What it finds, in a process of its own."""
    done = subprocess.run([sys.executable, CHECKER, source, output], capture_output=True, text=True)
    assert (done.returncode != 0) == bool(done.stderr) and "Traceback" not in done.stderr, done.stderr
    return done.stderr.splitlines()


def printed(folder: Path, about: str) -> subprocess.CompletedProcess[str]:
    """What the command of docs/verification.md whose code names ``about`` prints in ``folder``."""
    page = (ROOT / "docs" / "verification.md").read_text()
    found = [
        code for code in re.findall(r"^check/bin/python -c '(.*?)'$", page, re.DOTALL | re.MULTILINE) if about in code
    ]
    assert len(found) == 1
    return subprocess.run([sys.executable, "-c", found[0]], cwd=folder, capture_output=True, text=True)


def statement_of(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        b64decode(json.loads((output / TENSORS).read_bytes())["dsseEnvelope"]["payload"])
    )
    return found


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source and its signed output."""
    folder = tmp_path_factory.mktemp("made")
    random = np.random.default_rng(0)
    tensors = {f"layer.{i}.w": random.standard_normal((25, 40), np.float32) for i in range(8)}
    tensors |= {"norm.half": random.standard_normal(40).astype(np.float16), "empty": np.zeros((0, 4), np.float32)}
    save_sharded(folder / "source", numbered(tensors, 2))
    publish(folder, "out")
    return folder


def publish(folder: Path, name: str, **options: Any) -> Path:
    pair = make_pair(folder / "keys")
    signs = {"sign": str(pair.private), "tensor_hashes": True, "size": 9000}
    run(Request.of(folder / "source", folder / name, **signs | options), Context.from_env())
    assert refusal(folder / name, pair) == ""
    return folder / name


def test_it_passes_what_was_published(made: Path) -> None:
    statement = statement_of(made / "out")
    Draft202012Validator(SCHEMA).validate(statement)
    assert checked(made / "source", made / "out") == []
    listed = {n: one["sha256"] for file in statement["predicate"]["tensors"].values() for n, one in file.items()}
    source = {n: array for path in (made / "source").glob("*.safetensors") for n, array in load_file(path).items()}
    assert listed == {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in source.items()}


def test_a_cast_has_the_digests_of_both_sides(made: Path) -> None:
    output = publish(made, "cast", dtype="float16")
    statement = statement_of(output)
    Draft202012Validator(SCHEMA).validate(statement)
    tensors = [item for file in statement["predicate"]["tensors"].values() for item in file.items()]
    cast = {name for name, one in tensors if "source_sha256" in one}
    assert {name for name, _ in tensors} - cast == {"norm.half"}
    assert {*checked(made / "source", output)} == {
        f"{name}: cast, so its values are only the signer's word" for name in cast
    }


def test_renamed_tensors_are_told(made: Path) -> None:
    output = publish(made, "renamed", rename=[("^norm", "scale")])
    assert checked(made / "source", output) == [
        "scale.half: not the source's tensor of that name, shape and dtype, or there twice",
        "norm.half: in model-00002-of-00002.safetensors, but not in that file in the output",
    ]


def test_checkpoints_that_share_names_and_a_file_that_is_copied_whole_pass(tmp_path: Path) -> None:
    """As in a pipeline with two text encoders, and beside a file that only its author's own code reads."""
    random = np.random.default_rng(1)
    for part in ("", "text_encoder", "text_encoder_2"):
        tensors = {f"layer.{i}.w": random.standard_normal((25, 40), np.float32) for i in range(4)}
        save_sharded(tmp_path / "source" / part, numbered(tensors, 2))
    save_file({"w": np.zeros(4)}, tmp_path / "source" / "consolidated.safetensors")
    (tmp_path / "source" / "model_index.json").write_text('{"_class_name": "Two"}')
    output = publish(tmp_path, "out")
    assert checked(tmp_path / "source", output) == []
    flip(output / "consolidated.safetensors")
    assert checked(tmp_path / "source", output) == ["consolidated.safetensors: not in the list, or not in the folder"]
    one, other = (first(output / part) for part in ("text_encoder", "text_encoder_2"))
    names = [file.relative_to(output).as_posix() for file in (one, other)]
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    told(tmp_path, lambda statement: exchange_files(statement, *names))
    found = checked(tmp_path / "source", output)
    assert "layer.0.w: not the source's tensor of that name, shape and dtype, or there twice" in found


def exchange_files(statement: dict[str, Any], one: str, other: str) -> None:
    tensors = statement["predicate"]["tensors"]
    tensors[one], tensors[other] = tensors[other], tensors[one]
    subjects = {subject["name"]: subject["digest"] for subject in statement["subject"]}
    for subject in statement["subject"]:
        subject["digest"] = subjects[{one: other, other: one}.get(subject["name"], subject["name"])]


def test_without_two_folders_it_says_what_is_missing(made: Path) -> None:
    done = subprocess.run([sys.executable, CHECKER, made / "source"], capture_output=True, text=True)
    assert done.returncode == 1 and "missing 1 required positional argument: 'output'" in done.stderr


def test_it_needs_a_key(made: Path) -> None:
    with pytest.raises(UsageError, match="tensor_hashes=True requires sign"):
        plan(Request.of(made / "source", made / "unsigned", tensor_hashes=True))


def test_it_is_short_and_needs_nothing_but_safetensors() -> None:
    text = CHECKER.read_text()
    assert len(text.splitlines()) <= 80
    nodes = [*ast.walk(ast.parse(text))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name for name in names if name not in sys.stdlib_module_names} == {"safetensors"}


# ----------------------------------------------------------------------------------------------------- mutations


def flip(file: Path, at: int = -1) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def shorten(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-4])


def first(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def rewritten(file: Path, change: Callable[[dict[str, Any]], object], framework: str = "pt") -> None:
    """The file with other tensors, which agrees with itself."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": framework})


def consistent(made: Path, change: Callable[[dict[str, Any]], object], holds: str = "layer.0.w") -> None:
    """The file of a tensor with other tensors, and a list that says so: only the source contradicts it."""
    file = next(file for file in sorted((made / "out").glob("*.safetensors")) if holds in load_file(file))
    rewritten(file, change)

    def follow(statement: dict[str, Any]) -> None:
        for subject in statement["subject"]:
            if subject["name"] == file.name:
                subject["digest"]["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
        listed = statement["predicate"]["tensors"][file.name]
        arrays = load_file(file)
        for name in [*listed]:
            if name not in arrays:
                del listed[name]
        for name, array in arrays.items():
            listed.setdefault(name, {"from": []})["sha256"] = hashlib.sha256(array.tobytes()).hexdigest()

    told(made, follow)


def told(made: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Another list, as if it were signed."""
    statement = statement_of(made / "out")
    change(statement)
    payload = b64encode(json.dumps(statement).encode()).decode()
    (made / "out" / TENSORS).write_text(json.dumps({"dsseEnvelope": {"payload": payload}}))


def listed(statement: dict[str, Any]) -> dict[str, Any]:
    """Of the first file."""
    found: dict[str, Any] = min(statement["predicate"]["tensors"].items())[1]
    return found


def another(statement: dict[str, Any], path: str) -> list[int]:
    """A file more that the list says is the source's, and where 24 bytes in it are."""
    statement["predicate"]["files"].append({"path": path, "verified": "checked"})
    return [len(statement["predicate"]["files"]) - 1, 0, 24]


def swap(tensors: dict[str, Any]) -> None:
    one, other, *_ = sorted(name for name in tensors if name.startswith("layer"))
    tensors[one], tensors[other] = tensors[other], tensors[one]


def exchange(statement: dict[str, Any]) -> None:
    """The swapped tensors, from the right places under the wrong names."""
    tensors = listed(statement)
    one, other, *_ = sorted(name for name in tensors if name.startswith("layer"))
    tensors[one]["from"], tensors[other]["from"] = tensors[other]["from"], tensors[one]["from"]


MUTATIONS: dict[str, Callable[[Path], object]] = {
    "a bit of an output tensor": lambda made: flip(first(made / "out")),
    "a bit of an output header": lambda made: flip(first(made / "out"), 12),
    "an output header has other metadata": lambda made: rewritten(first(made / "out"), lambda t: None, "tf"),
    "a bit of a source tensor": lambda made: flip(first(made / "source")),
    "a bit of a source header": lambda made: flip(first(made / "source"), 14),
    "an output file is missing": lambda made: first(made / "out").unlink(),
    "a source file is missing": lambda made: first(made / "source").unlink(),
    "an output file more": lambda made: shutil.copy(first(made / "out"), made / "out" / "more.safetensors"),
    "an output file has another name": lambda made: first(made / "out").rename(made / "out" / "a.safetensors"),
    "an output file is truncated": lambda made: shorten(first(made / "out")),
    "the source is truncated": lambda made: shorten(first(made / "source")),
    "a tensor is missing": lambda made: rewritten(first(made / "out"), lambda t: t.popitem()),
    "a tensor is added": lambda made: rewritten(first(made / "out"), lambda t: t.update(x=np.zeros(3))),
    "a tensor is lost, as the list says": lambda made: consistent(made, lambda t: t.pop("layer.0.w")),
    "a tensor is added, as the list says": lambda made: consistent(made, lambda t: t.update(x=np.zeros(3))),
    "a value is changed, as the list says": lambda made: consistent(made, lambda t: t["layer.0.w"].fill(1)),
    "two tensors are swapped, as the list says": lambda made: (consistent(made, swap), told(made, exchange)),
    "a dtype is changed, as the list says": lambda made: consistent(
        made, lambda t: t.update({"layer.0.w": t["layer.0.w"].view(np.int32)})
    ),
    "a shape is changed, as the list says": lambda made: consistent(
        made, lambda t: t.update({"layer.0.w": t["layer.0.w"].reshape(40, 25)})
    ),
    "the list has another digest": lambda made: told(made, lambda s: listed(s)["layer.0.w"].update(sha256="0" * 64)),
    "the list has another place": lambda made: told(
        made, lambda s: listed(s)["layer.0.w"].update({"from": [[0, 8, 4008]]})
    ),
    "the list makes an empty tensor of nothing": lambda made: consistent(made, lambda t: t.update(x=np.zeros((0, 9)))),
    "the list makes a tensor of the config": lambda made: (
        (made / "source" / "config.json").write_bytes(bytes(24)),
        consistent(made, lambda t: t.update(x=np.zeros(3))),
        told(made, lambda s: listed(s)["x"].update({"from": [another(s, "config.json")]})),
    ),
    "the list makes a tensor of a file of the output": lambda made: (
        (made / "out" / "more.bin").write_bytes(bytes(24)),
        consistent(made, lambda t: t.update(x=np.zeros(3))),
        told(made, lambda s: listed(s)["x"].update({"from": [another(s, "../out/more.bin")]})),
    ),
    "the list makes a tensor of weights that no loader takes": lambda made: (
        (made / "source" / "pytorch_model.bin").write_bytes(bytes(24)),
        consistent(made, lambda t: t.update(x=np.zeros(3))),
        told(made, lambda s: listed(s)["x"].update({"from": [another(s, "pytorch_model.bin")]})),
    ),
    "the list counts files from the end": lambda made: told(
        made, lambda s: listed(s)["layer.0.w"]["from"][0].__setitem__(0, -len(s["predicate"]["files"]))
    ),
    "an empty tensor is lost, as the list says": lambda made: consistent(made, lambda t: t.pop("empty", None), "empty"),
    "the list has no place": lambda made: told(made, lambda s: listed(s)["layer.0.w"].pop("from")),
    "the list hides a change in a cast": lambda made: (
        consistent(made, lambda t: t["layer.0.w"].fill(1)),
        told(made, lambda s: listed(s)["layer.0.w"].update({"from": [], "source_sha256": NOTHING})),
    ),
    "the list calls a change a cast": lambda made: (
        told(made, lambda s: listed(s)["layer.0.w"].update(source_sha256=listed(s)["layer.0.w"]["sha256"])),
        consistent(made, lambda t: t["layer.0.w"].fill(1)),
    ),
    "the list leaves out a file of the source": lambda made: shutil.copy(
        first(made / "source"), made / "source" / "more.safetensors"
    ),
    "the list has another sha256 of the source": lambda made: told(
        made, lambda s: s["predicate"]["files"][0].update(sha256="0" * 64)
    ),
    "the list is missing": lambda made: (made / "out" / TENSORS).unlink(),
    "the list is no bundle": lambda made: (made / "out" / TENSORS).write_text("[]"),
}  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_whatever_is_changed_is_found(made: Path, tmp_path: Path, mutation: str) -> None:
    for side in ("source", "out"):
        shutil.copytree(made / side, tmp_path / side)
    MUTATIONS[mutation](tmp_path)
    assert checked(tmp_path / "source", tmp_path / "out")


@pytest.fixture
def as_on_the_page(made: Path, tmp_path: Path) -> Path:
    """A folder with a publication and its public key, as docs/verification.md calls them."""
    shutil.copytree(made / "source", tmp_path / "source")
    publish(tmp_path, "output")
    shutil.copy(tmp_path / "keys" / "release.pub", tmp_path / "release-2026.pub")
    return tmp_path


def test_the_page_checks_each_signature_without_model_signing(as_on_the_page: Path) -> None:
    done = printed(as_on_the_page, 'dsseEnvelope"]\n')
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "output/model.sig"
    assert {*done.stdout.split()[1:]} == {f"output/{name}" for name in (PROVENANCE, TENSORS)}
    bundle = json.loads((as_on_the_page / "output" / TENSORS).read_bytes())
    bundle["dsseEnvelope"]["payload"] = b64encode(b"{}").decode()
    (as_on_the_page / "output" / TENSORS).write_text(json.dumps(bundle))
    broken = printed(as_on_the_page, 'dsseEnvelope"]\n')
    assert broken.returncode == 1 and "InvalidSignature" in broken.stderr


@pytest.mark.parametrize("what", ["bytes", "digest", "root"])
def test_the_page_recomputes_the_manifest(as_on_the_page: Path, what: str) -> None:
    manifest = as_on_the_page / "output" / MANIFEST
    made = json.loads(manifest.read_bytes())
    assert printed(as_on_the_page, "xxh3_128").stdout == f"{made['root']}\n"
    path, there = next(iter(made["files"].items()))
    if what == "bytes":
        data = bytearray((as_on_the_page / "output" / path).read_bytes())
        data[-1] ^= 1
        (as_on_the_page / "output" / path).write_bytes(data)
    else:
        there["tensors"][next(iter(there["tensors"]))] = "0" * 32
        if what == "digest":
            text = json.dumps(made["files"], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
            made["root"] = hashlib.sha256(text.encode()).hexdigest()
        manifest.write_text(json.dumps(made))
    broken = printed(as_on_the_page, "xxh3_128")
    assert broken.returncode == 1 and ("root does not match" if what == "root" else "has other bytes") in broken.stderr
