"""The manifest: the same wherever it goes, bound to index and commit, and enough to check a publication alone."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from reshard.pipeline.check import Check
from reshard.pipeline.errors import BadManifest, CheckpointError, ReadBackDiffers
from reshard.pipeline.limits import MANIFEST_MAX
from reshard.pipeline.places import parse_place
from reshard.pipeline.planning.model import MANIFEST, ROOT_KEY
from reshard.pipeline.publishing.manifest import Making, parse, render
from reshard.pipeline.request import Options
from reshard.pipeline.stores.connect import Context, open_source, open_target
from reshard.pipeline.verifying.manifest_check import check_manifest, described_by
from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.pipeline.verifying.verify import Trust, verify
from tests.hub.fixtures import Namespace
from tests.pipeline.conftest import Run, upload
from tests.support.checker import from_hub
from tests.support.models import arrays, numbered, save_sharded, save_single

SIZE = 20_000
INDEX = "model.safetensors.index.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_sharded(tmp_path / "model", numbered(arrays(16, 4000), 3))
    (tmp_path / "model" / "notes.txt").write_text("first")
    return tmp_path / "model"


def manifest_in(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    return content


def test_it_is_the_same_bytes_in_a_folder_and_on_the_hub(
    model: Path, tmp_path: Path, on_hub: Namespace, go: Run
) -> None:
    repo = upload(on_hub, "source", model)
    go(repo, tmp_path / "a", size=SIZE)
    go(repo, on_hub.repo("b"), size=SIZE)
    published = (tmp_path / "a" / MANIFEST).read_bytes()
    assert from_hub(on_hub.endpoint, on_hub.repo("b"), token=on_hub.token)(MANIFEST) == published
    content = manifest_in(tmp_path / "a")
    assert content["source"]["repo"] == repo
    assert content["source"]["commit"] == on_hub.admin.head(repo)
    assert set(content["source"]["files"].values()) == {"checked"}
    go(model, tmp_path / "c", size=SIZE)
    from_folder = manifest_in(tmp_path / "c")
    assert from_folder["root"] == content["root"], "the root is of what was published, not of where it came from"
    assert from_folder["source"]["repo"] is None, "a folder's path is nobody's business"
    assert str(tmp_path) not in (tmp_path / "c" / MANIFEST).read_text()


def test_its_root_is_in_the_index_and_in_the_description(model: Path, on_hub: Namespace, go: Run) -> None:
    repo, target = upload(on_hub, "source", model), on_hub.repo("target")
    report = go(repo, target, size=SIZE)
    fetch = from_hub(on_hub.endpoint, target)
    root = json.loads(fetch(MANIFEST) or b"")["root"]
    assert json.loads(fetch(INDEX) or b"")["metadata"][ROOT_KEY] == root
    there = open_target(parse_place(target), Options(), Context.from_env())
    published = described_by(there, report.published.commit)
    assert published and published.manifest == root
    assert published.manifest_sha256 == hashlib.sha256(fetch(MANIFEST) or b"").hexdigest()
    found = check_manifest(open_source(parse_place(target), Context.from_env()), published).check
    assert found and found.result == "passed", "what was published from a Hub is what its commit says, word for word"


def test_what_it_says_of_a_tensor_is_its_digest(model: Path, tmp_path: Path, go: Run) -> None:
    import xxhash

    go(model, tmp_path / "out", size=SIZE)
    for path, file in manifest_in(tmp_path / "out")["files"].items():
        raw = load_file(tmp_path / "out" / path)
        assert file["tensors"] == {name: xxhash.xxh3_128(array.tobytes()).hexdigest() for name, array in raw.items()}


def test_without_it_nothing_speaks_of_one(model: Path, tmp_path: Path, go: Run) -> None:
    out = tmp_path / "out"
    go(model, out, size=SIZE)
    go(model, out, size=SIZE, manifest=False)
    assert not (out / MANIFEST).exists(), "an old one would be of other files"
    assert ROOT_KEY not in json.loads((out / INDEX).read_text())["metadata"]
    target = open_target(parse_place(str(out)), Options(), Context.from_env())
    assert described_by(target, target.head()) is None


def test_a_publication_is_resharded_without_its_old_manifest(model: Path, tmp_path: Path, go: Run) -> None:
    go(model, tmp_path / "one", size=SIZE)
    go(tmp_path / "one", tmp_path / "two", size=3 * SIZE)
    one, two = manifest_in(tmp_path / "one"), manifest_in(tmp_path / "two")
    assert one["root"] != two["root"]
    assert json.loads((tmp_path / "two" / INDEX).read_text())["metadata"][ROOT_KEY] == two["root"]
    go(tmp_path / "one", tmp_path / "three", size=3 * SIZE, manifest=False)
    assert ROOT_KEY not in json.loads((tmp_path / "three" / INDEX).read_text())["metadata"]


def test_it_stays_right_when_only_other_files_move(model: Path, on_hub: Namespace, go: Run) -> None:
    repo, target = upload(on_hub, "source", model), on_hub.repo("target")
    go(repo, target, size=SIZE)
    before = from_hub(on_hub.endpoint, target)(MANIFEST)
    on_hub.admin.put_files(repo, {"notes.txt": b"second"})
    report = go(repo, target, size=SIZE)
    assert not report.plan.shards
    fetch = from_hub(on_hub.endpoint, target)
    assert fetch("notes.txt") == b"second" and fetch(MANIFEST) == before
    there = open_target(parse_place(target), Options(), Context.from_env())
    published = described_by(there, report.published.commit)
    assert published and published.manifest == json.loads(before or b"")["root"]


@pytest.mark.parametrize("on_hub", ["http"], indirect=True)
def test_weights_that_were_published_without_one_are_not_taken_for_those_of_an_older_one(
    model: Path, tmp_path: Path, on_hub: Namespace, go: Run
) -> None:
    repo, out = upload(on_hub, "source", model), tmp_path / "out"
    target = open_target(parse_place(str(out)), Options(), Context.from_env())
    go(repo, out, size=SIZE)
    assert described_by(target, target.head()) is not None
    go(repo, out, size=2 * SIZE, manifest=False)
    assert described_by(target, target.head()) is None


def test_a_manifest_that_is_not_ours_is_found_when_it_is_read_back(
    model: Path, tmp_path: Path, go: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that keeps another file than it was given."""
    from reshard.pipeline.publishing import commit as publish

    def changed(manifest: Any) -> bytes:
        return render(manifest).replace(b'"size":', b'"size":1', 1)

    monkeypatch.setattr(publish, "render_manifest", changed)
    with pytest.raises(ReadBackDiffers, match=MANIFEST):
        go(model, tmp_path / "out", size=SIZE)


# ----------------------------------------------------------------------------------------- verified without a source

Change = Callable[[Path], None]


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def flip(folder: Path) -> None:
    path = folder / "model-00002-of-00004.safetensors"
    content = bytearray(path.read_bytes())
    content[-50] ^= 1
    path.write_bytes(content)


def rename(folder: Path) -> None:
    path = folder / "model-00001-of-00004.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"layer.0.weight"', b'"layer.0.Weight"'))
    index = folder / INDEX
    index.write_text(index.read_text().replace('"layer.0.weight"', '"layer.0.Weight"'))


def rewrite(folder: Path) -> None:
    """As somebody would who changes a tensor and mends everything but the manifest."""
    path = folder / "model-00001-of-00004.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"layer.0.weight": tensors["layer.0.weight"] + 1}, path, metadata={"format": "pt"})


def forge(folder: Path) -> None:
    """As somebody would who changes the manifest as well, root and all, and forgets the index."""
    flip(folder)
    manifest = parse((folder / MANIFEST).read_bytes())
    path = "model-00002-of-00004.safetensors"
    file = manifest.files[path].model_copy(update={"sha256": "0" * 64})
    changed = manifest.model_copy(update={"files": {**manifest.files, path: file}})
    (folder / MANIFEST).write_bytes(render(changed.model_copy(update={"root": changed.actual_root})))


def sealed(folder: Path, change: Callable[[dict[str, Any]], None], root: bool) -> None:
    """The manifest changed, with the root that its files make; in the index too where ``root``."""
    edit(folder / MANIFEST, change)
    changed = parse((folder / MANIFEST).read_bytes())
    edit(folder / MANIFEST, lambda m: m.update(root=changed.actual_root))
    if root:
        edit(folder / INDEX, lambda index: index["metadata"].update({ROOT_KEY: changed.actual_root}))


def exchange(folder: Path) -> None:
    """Other weights under another index, and all that was published still there."""
    (folder / INDEX).unlink()
    save_single(folder, arrays(2, 400))


BREAKS: dict[str, tuple[Change, bool, str]] = {
    "a flipped bit": (flip, True, "has different bytes than published"),
    "a renamed tensor": (rename, False, "has a different header than published"),
    "a rewritten shard": (rewrite, True, "has different bytes than published"),
    "a forged manifest": (forge, False, f"{INDEX} has manifest root "),
    "another root in the index": (
        lambda folder: edit(folder / INDEX, lambda index: index["metadata"].update({ROOT_KEY: "0" * 64})),
        False,
        f"{INDEX} has manifest root 000",
    ),
    "a changed manifest": (
        lambda folder: edit(folder / MANIFEST, lambda m: m["files"].popitem()),
        False,
        f"{MANIFEST} was changed",
    ),
    "a manifest of nothing": (
        lambda folder: sealed(folder, lambda m: m["files"].clear(), False),
        False,
        "lists no files",
    ),
    "a manifest of nothing that the index names": (
        lambda folder: sealed(folder, lambda m: m["files"].clear(), True),
        False,
        f"4 weight files, such as model-00001-of-00004.safetensors, but {MANIFEST} does not",
    ),
    "a manifest of less": (
        lambda folder: sealed(folder, lambda m: m["files"].pop("model-00002-of-00004.safetensors"), True),
        False,
        f"{INDEX} lists model-00002-of-00004.safetensors, but {MANIFEST} does not",
    ),
    "a forgery that the index agrees with": (
        lambda folder: sealed(
            folder, lambda m: m["files"]["model-00002-of-00004.safetensors"].update(sha256="0" * 64), True
        ),
        False,
        "the commit that published it has root ",
    ),
    "other weights beside it": (exchange, False, "no index lists 4 weight files"),
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), False, f"{MANIFEST} is missing"),
    "a manifest that is too long": (
        lambda folder: os.truncate(folder / MANIFEST, MANIFEST_MAX + 1),
        False,
        f"{MANIFEST_MAX + 1:,} bytes, and the limit for such a file is {MANIFEST_MAX:,}",
    ),
    "a manifest that is no JSON": (lambda folder: (folder / MANIFEST).write_text("{"), False, "Invalid JSON"),
}


def look(out: Path, meta_loader: MetaLoader, deep: bool = False, told: bool = True) -> list[Check]:
    """``told``: with what the commit says; without, as of a folder that was downloaded."""
    place = parse_place(str(out))
    target = open_target(place, Options(), Context.from_env())
    source = open_source(place, Context.from_env())
    return verify(
        source, None, meta_loader, deep=deep, trust=Trust(described_by(target, source.pin.commit) if told else None)
    )


def said_of(name: str, checks: list[Check]) -> Check:
    (found,) = [check for check in checks if check.name == name]
    return found


@pytest.mark.parametrize("name", BREAKS)
def test_a_publication_that_was_changed_is_found_without_its_source(
    name: str, model: Path, tmp_path: Path, go: Run, meta_loader: MetaLoader
) -> None:
    change, deep, said = BREAKS[name]
    out = tmp_path / "out"
    go(model, out, size=SIZE)
    shutil.rmtree(model)

    good = {check.name: check.result for check in look(out, meta_loader, deep=True)}
    assert {good[n] for n in ("index rules", "manifest", "stored bytes", "published bytes")} == {"passed"}
    change(out)
    findings = [finding for check in look(out, meta_loader, deep) for finding in check.findings]
    assert any(said in finding for finding in findings), findings


LIES: dict[str, Callable[[dict[str, Any]], None]] = {
    "source endpoint": lambda m: m["source"].update(endpoint="https://huggingface.co"),
    "source": lambda m: m["source"].update(repo="somebody/famous"),
    "source commit": lambda m: m["source"].update(commit="a" * 40),
    "plan": lambda m: m["made"].update(plan="b" * 64),
    "layout": lambda m: m["made"].update(layout=99),
    "sha256": lambda m: m["source"]["files"].update(dict.fromkeys(m["source"]["files"], "crc")),
    "sha256 ": lambda m: m["made"].update(by="reshard 99"),
    "sha256  ": lambda m: m["made"]["options"].update(dtype="float16"),
}


@pytest.mark.parametrize("what", LIES)
def test_what_a_manifest_says_of_its_origin_is_held_against_the_commit(
    what: str, model: Path, tmp_path: Path, go: Run, meta_loader: MetaLoader
) -> None:
    out = tmp_path / "out"
    go(model, out, size=SIZE)
    honest = said_of("manifest", look(out, meta_loader))
    assert honest.result == "passed" and "the manifest's hash matches the commit" in honest.reason
    edit(out / MANIFEST, LIES[what])
    findings = said_of("manifest", look(out, meta_loader)).findings
    assert any(finding.startswith(f"the commit that published it has {what.strip()} ") for finding in findings)
    downloaded = said_of("manifest", look(out, meta_loader, told=False))
    assert downloaded.result == "passed" and "not confirmed by a commit" in downloaded.reason
    assert downloaded.figures["root_in_the_commit"] is False


def test_a_publication_from_before_the_manifest_s_sha256_says_less_and_is_held_to_that(
    model: Path, tmp_path: Path, go: Run
) -> None:
    out = tmp_path / "out"
    go(model, out, size=SIZE)
    place = parse_place(str(out))
    target = open_target(place, Options(), Context.from_env())
    published = described_by(target, target.head())
    assert published and published.manifest_sha256
    older = replace(published, manifest_sha256=None)

    def check() -> Check:
        found = check_manifest(open_source(place, Context.from_env()), older).check
        assert found
        return found

    assert check().result == "passed" and "but not the program" in check().reason
    edit(out / MANIFEST, LIES["sha256"])
    assert check().result == "passed"
    edit(out / MANIFEST, LIES["source"])
    assert [finding.split(",")[0] for finding in check().findings] == ["the commit that published it has source none"]


def test_releases_read_the_description_of_newer_ones(model: Path, tmp_path: Path, go: Run) -> None:
    """The JSON's keys are the fields of the first release's `Publication`, which takes no others."""
    go(model, tmp_path / "out", size=SIZE)
    target = open_target(parse_place(str(tmp_path / "out")), Options(), Context.from_env())
    commit = next(iter(target.history(target.head(), None)))
    (line,) = [line for line in commit.message.splitlines() if line.startswith("Reshard-Publication: ")]
    known = {"plan", "request", "weights", "source", "source_commit", "endpoint", "layout", "kept", "manifest"}
    assert json.loads(line.partition(": ")[2]).keys() == known


def test_what_its_owner_keeps_beside_a_publication_is_remarked_and_no_finding(
    model: Path, tmp_path: Path, go: Run, meta_loader: MetaLoader
) -> None:
    out = tmp_path / "out"
    go(model, out, size=SIZE)
    save_single(out, arrays(1, 400, prefix="mtp"), "mtp.safetensors")
    save_sharded(out / "other", numbered(arrays(2, 400), 2))
    found = said_of("manifest", look(out, meta_loader))
    assert found.result == "passed", found.findings
    assert found.figures["weight_files_beside_it"] == 3
    assert found.figures["other_files_beside_it"] == 2
    assert "not in the manifest: 3 weight files, such as mtp.safetensors and 2 other files, such as " in found.reason


@pytest.mark.parametrize("moved", [1, 4])
def test_bytes_that_were_not_compared_do_not_pass(
    moved: int, model: Path, tmp_path: Path, go: Run, meta_loader: MetaLoader
) -> None:
    out = tmp_path / "out"
    go(model, out, size=SIZE)
    files = manifest_in(out)["files"]
    elsewhere = {f"unet/{path}": files.pop(path) for path in sorted(files)[:moved]}
    edit(out / MANIFEST, lambda m: m.update(files=files | elsewhere))
    found = said_of("published bytes", look(out, meta_loader, deep=True))
    absent = sum(len(file["tensors"]) for file in elsewhere.values())
    assert found.result == "inconclusive"
    assert (
        found.reason.startswith(f"not compared: {absent} of 32 published tensors")
        and found.figures["tensors"] == 32 - absent
    )


def test_headers_and_tensors_are_the_publications_even_where_no_index_names_them(
    tmp_path: Path, go: Run, meta_loader: MetaLoader
) -> None:
    save_single(tmp_path / "model", arrays(3, 400))
    go(tmp_path / "model", tmp_path / "out", size=10**9)
    assert not (tmp_path / "out" / INDEX).exists()
    source = open_source(parse_place(str(tmp_path / "out")), Context.from_env())
    (found,) = [check for check in verify(source, None, meta_loader) if check.name == "manifest"]
    assert found.result == "passed" and found.figures["tensors"] == 6


@given(st.binary(max_size=200))
def test_any_bytes_are_a_manifest_or_a_named_error(content: bytes) -> None:
    with pytest.raises(BadManifest):
        parse(content)


@pytest.mark.parametrize("options", [{"size": "abc"}, {"config_from": "::::"}, {"dtype": "odd"}, {"rename": ["("]}])
def test_options_that_this_release_refuses_are_the_usual_ones(options: dict[str, Any]) -> None:
    made = Making(by="someone", layout=1, plan="", options=options)
    assert made.known() == Options()
    assert made.claims() == {}


def test_a_level_that_nobody_writes_is_refused(model: Path, tmp_path: Path, go: Run) -> None:
    go(model, tmp_path / "out", size=SIZE)
    content = manifest_in(tmp_path / "out")
    content["source"]["files"]["model-00001-of-00003.safetensors"] = "checked (twice)"
    with pytest.raises(BadManifest, match="source.files.model-00001-of-00003.safetensors: must be 'checked'"):
        parse(json.dumps(content).encode())


def test_the_schema_of_a_newer_release_is_refused(model: Path, tmp_path: Path, go: Run) -> None:
    go(model, tmp_path / "out", size=SIZE)
    manifest = parse((tmp_path / "out" / MANIFEST).read_bytes())
    with pytest.raises(CheckpointError, match="schema 2 is not supported"):
        parse(render(manifest.model_copy(update={"manifest": 2})))
