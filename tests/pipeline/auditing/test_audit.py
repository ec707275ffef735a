"""Mirrors on the Hub on loopback: every planted fault is found, none is invented, and few calls are made."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import load, load_file, save, save_file

from reshard.pipeline.auditing.audit import audit
from reshard.pipeline.auditing.examine import Audited, Sources, Subject, examine
from reshard.pipeline.auditing.findings import KINDS
from reshard.pipeline.auditing.subjects import of_catalog, of_folder, of_owner
from reshard.pipeline.catalogs.definition import parse
from reshard.pipeline.errors import FolderNotFound, HubUnreachable, UsageError
from reshard.pipeline.limits import CONFIG_MAX
from reshard.pipeline.places import parse_place
from reshard.pipeline.planning.model import MANIFEST
from reshard.pipeline.publishing.rollback import rollback
from reshard.pipeline.request import Options, Request
from reshard.pipeline.reshard import run
from reshard.pipeline.stores.connect import Context, open_target
from reshard.pipeline.verifying.meta_load import MetaLoader
from tests.hub.fixtures import Namespace
from tests.pipeline.auditing.planted import (
    FIRST,
    PLANTED,
    SECOND,
    add_manifest,
    catalog,
    files_of,
    model,
    publish,
)
from tests.pipeline.stores.conftest import Impatient
from tests.pipeline.verifying.models import save as save_tied
from tests.support.checker import from_hub

WHOLE = "model.safetensors"


@pytest.fixture
def space(namespace: Namespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Namespace:
    monkeypatch.setenv("HF_ENDPOINT", namespace.endpoint)
    monkeypatch.setenv("HF_TOKEN", namespace.token)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return namespace


def audited(subjects: Sequence[Subject], deep: int = 0) -> dict[str, Audited]:
    """What was found, by the model's name without its owner, the worst first."""
    found = audit(subjects, Context.from_env(), 4, deep)
    return {model.place.rpartition("/")[2]: model for model in found}


def of(space: Namespace, sources: dict[str, str]) -> list[Subject]:
    return of_catalog(parse(catalog(space, sources), "c.yaml"), Context.from_env())


def kinds(found: dict[str, Audited]) -> set[tuple[str, str]]:
    return {(name, one.kind) for name, model in found.items() for one in model.findings}


def plant(space: Namespace, count: int) -> tuple[dict[str, str], set[tuple[str, str]]]:
    """``count`` copies of two sources, all but each eighth with a fault: their sources, and what is wrong with them."""
    for seed in range(2):
        publish(space, f"source-{seed}", files_of(*model(seed)))
    sources, wrong = {}, set()
    faults = [*PLANTED, None, None]
    for number in range(count):
        name, seed, fault = f"copy-{number:04}", number % 2, faults[number // 2 % len(faults)]
        publish(space, name, PLANTED[fault](seed) if fault else files_of(*model(seed)))
        sources[name] = f"source-{seed}"
        wrong |= {(name, fault)} if fault else set()
    return sources, wrong


def test_every_planted_fault_is_found_and_none_invented_by_few_calls(space: Namespace) -> None:
    sources, wrong = plant(space, 32)
    space.admin.log(reset=True)
    found = audited(of(space, sources))
    calls = Counter(call["kind"] for call in space.admin.log())
    assert kinds(found) == wrong
    assert len({kind for _, kind in wrong}) == len(PLANTED) >= 12
    # The sources and the targets are listed once; then each model's files, its index and its two headers, and sources
    # that many were made from once, too. Two configs that differ are read on both sides, and of the two models that
    # lack tensors, to ask their class about ties.
    assert calls["api"] == 2 + 34
    lacks = 2  # copies without their second file
    assert calls["resolve"] == 34 * 3 - lacks + 2 * 2 + 2
    order = [model.findings[0].kind for model in found.values() if model.findings]
    assert order == sorted(order, key=list(KINDS).index)
    assert [model.findings == () for model in found.values()] == [False] * 28 + [True] * 4
    lost = next(model for model in found.values() if model.findings[:1] and model.findings[0].kind == "tensors-lost")
    assert lost.findings[0].first == "layer.1.weight is in the source but not in the output"
    assert lost.findings[0].next == f"reshard run {lost.source} --to {lost.place}"


@pytest.mark.slow
def test_of_a_thousand_models_with_faults_of_every_kind_all_are_found_and_none_invented(space: Namespace) -> None:
    sources, wrong = plant(space, 1000)
    assert kinds(audited(of(space, sources))) == wrong
    assert len(wrong) == 876 and len({kind for _, kind in wrong}) == len(PLANTED)


def test_a_tensor_that_only_the_index_still_has_is_lost_and_one_of_an_unread_file_is_not(space: Namespace) -> None:
    publish(space, "source", files_of(*model()))
    healthy, lacks = files_of(*model()), PLANTED["tensors-lost"](0)
    publish(space, "ghost", {**healthy, SECOND: lacks[SECOND]})
    publish(space, "short", {**lacks, SECOND: lacks[SECOND][:-1]})
    assert kinds(audited(of(space, dict.fromkeys(("ghost", "short"), "source")))) == {
        ("ghost", "index-ghost"), ("ghost", "tensors-lost"), ("ghost", "metadata-misfit"), ("short", "file-short"),
    }  # fmt: skip


def test_another_header_over_the_same_tensors_is_no_proof_of_other_bytes(space: Namespace) -> None:
    healthy = files_of(*model())
    publish(space, "source", {**healthy, SECOND: healthy[SECOND].replace(b'"pt"', b'"np"')})
    publish(space, "copy", healthy)
    assert kinds(audited(of(space, {"copy": "source"}))) == set()


@pytest.mark.parametrize(("key", "kind"), [("tensor_names", "metadata-misfit"), ("title", "file-unproven")])
def test_metadata_that_a_copy_lacks_is_found(space: Namespace, key: str, kind: str) -> None:
    healthy = files_of(*model())
    sources = {path: save(load(healthy[path]), metadata={"format": "pt", key: "[]"}) for path in (FIRST, SECOND)}
    publish(space, "source", {**healthy, **sources})
    publish(space, "copy", healthy)
    publish(space, "same", {**healthy, **sources})
    assert kinds(audited(of(space, {"copy": "source", "same": "source"}))) == {("copy", kind)}


@pytest.mark.parametrize(("copy", "lost"), [("lm_head.weight", set()), ("head.weight", {("m", "tensors-lost")})])
def test_a_copy_that_the_class_ties_to_another_tensor_is_not_lost(
    tmp_path: Path, copy: str, lost: set[tuple[str, str]]
) -> None:
    output, source = tmp_path / "to" / "m", tmp_path / "from" / "m"
    save_tied("llama-tied", output)
    (output / "model.sig").touch()
    shutil.copytree(output, source)
    tensors = load_file(source / "model.safetensors")
    both = {**tensors, copy: tensors["model.embed_tokens.weight"]}
    save_file(both, source / "model.safetensors", metadata={"format": "pt"})
    assert kinds(audited(of_folder(tmp_path / "to", f"{tmp_path}/from/{{name}}"))) == lost


def test_what_a_manifest_says_is_held_against_the_files_and_the_map(space: Namespace) -> None:
    commit = publish(space, "source", files_of(*model()))
    healthy = files_of(*model())
    publish(space, "good", add_manifest(healthy, space.repo("source"), commit))
    publish(space, "elsewhere", add_manifest(healthy, space.repo("another"), commit))
    swapped = add_manifest(healthy, space.repo("source"), commit)
    publish(space, "swapped", {**swapped, SECOND: PLANTED["bytes-changed"](0)[SECOND]})
    found = audited(of(space, dict.fromkeys(("good", "elsewhere", "swapped"), "source")))
    assert kinds(found) == {
        ("elsewhere", "source-wrong"), ("swapped", "manifest-wrong"), ("swapped", "bytes-changed"),
    }  # fmt: skip
    assert found["elsewhere"].findings[0].next == f"reshard provenance {space.repo('elsewhere')}"
    space.admin.put_files(space.repo("source"), {"config.json": b"{}"})
    found = audited(of(space, {"good": "source"}))
    assert kinds(found) == {("good", "source-moved")}  # and is compared with the commit that it was made from
    assert found["good"].source_commit == commit
    assert found["good"].compared == f"{space.repo('source')}@{commit}", "as every command names it"


def test_a_source_in_a_folder_is_not_another_than_the_repository_that_a_manifest_names(tmp_path: Path) -> None:
    healthy = files_of(*model())
    for name, files in {"from": healthy, "to/model": add_manifest(healthy, "me/source", "0" * 40)}.items():
        (tmp_path / name).mkdir(parents=True)
        for path, data in files.items():
            (tmp_path / name / path).write_bytes(data)
    assert kinds(audited(of_folder(tmp_path / "to", f"{tmp_path}/from"))) == set()


def test_what_a_manifest_claims_of_its_source_hides_nothing(space: Namespace) -> None:
    commit = publish(space, "source", files_of(*model()))
    lacks = PLANTED["tensors-lost"](0)
    publish(space, "nowhere", add_manifest(lacks, space.repo("source"), "0" * 40))
    publish(space, "odd", add_manifest(lacks, "../source", commit))
    publish(space, "cast", add_manifest(lacks, space.repo("source"), commit, "float16"))
    found = audited(of(space, dict.fromkeys(("nowhere", "odd", "cast"), "source")))
    assert kinds(found) == {
        ("nowhere", "tensors-lost"), ("nowhere", "source-moved"), ("nowhere", "source-unreadable"),
        ("odd", "tensors-lost"), ("odd", "source-wrong"),
        ("cast", "tensors-lost"), ("cast", "dtype-changed"), ("cast", "changes-claimed"),
    }  # fmt: skip

    elsewhere = add_manifest(files_of(*model()), space.repo("source"), commit, endpoint="http://127.0.0.1:1")
    publish(space, "elsewhere", elsewhere)
    alone = audited([one for one in of_owner(space.name, None, Context.from_env()) if "elsewhere" in str(one.place)])
    assert kinds(alone) == {("elsewhere", "source-unreadable")}
    (finding,) = alone["elsewhere"].findings
    assert finding.first == "its manifest names a source on another Hub, http://127.0.0.1:1"
    assert f"`reshard plan http://127.0.0.1:1/{space.repo('source')}`" in finding.next


def test_no_command_is_made_of_what_a_manifest_calls_a_repository(space: Namespace) -> None:
    commit = publish(space, "source", files_of(*model()))
    for name, repo, endpoint in (
        ("a", "x/y; reboot", "http://127.0.0.1:1"),
        ("b", "x/y", "http://127.0.0.1:1/$(reboot)"),
    ):
        publish(space, name, add_manifest(files_of(*model()), repo, commit, endpoint=endpoint))
    found = audited([*of_owner(space.name, None, Context.from_env())])
    for name in ("a", "b"):
        assert [one.kind for one in found[name].findings] == ["source-unreadable"]
        assert "; reboot`" not in found[name].findings[0].next and " $(reboot)" not in found[name].findings[0].next


def test_two_entries_for_one_target_are_a_finding(space: Namespace) -> None:
    for name in ("one", "two", "copy"):
        publish(space, name, files_of(*model()))
    text = catalog(space, {"copy": "one"}) + f"- {{repo: {space.repo('two')}, to: {space.repo('copy')}}}\n"
    found = audited(of_catalog(parse(text, "c.yaml"), Context.from_env()))
    assert kinds(found) == {("copy", "unreadable")}
    assert space.repo("two") in found["copy"].findings[0].first


def test_what_reshard_publishes_has_no_finding_but_that_it_is_not_signed(space: Namespace) -> None:
    publish(space, "source", files_of(*model()))
    for name, options in (
        ("cut", {"size": 1000}),
        ("cast", {"dtype": "bfloat16"}),
        ("named", {"strip_prefix": "layer."}),
    ):
        run(Request.of(space.repo("source"), space.repo(name), **options))
    found = audited([one for one in of_owner(space.name, None, Context.from_env()) if one.known])
    assert kinds(found) == {
        ("cut", "unsigned"), ("cast", "unsigned"), ("cast", "changes-claimed"),
        ("named", "unsigned"), ("named", "changes-claimed"), ("source", "source-unknown"),
    }  # fmt: skip
    assert found["cut"].findings[0].next == (
        f"reshard run {space.repo('source')} --to {space.repo('cut')} --size 1000B --sign KEY"
    )


def test_what_was_resharded_in_place_is_no_newer_source_until_someone_else_changes_it(space: Namespace) -> None:
    publish(space, "m", files_of(*model()))
    in_place = space.repo("m")

    def has_moved() -> bool:
        return ("m", "source-moved") in kinds(audited(of_owner(space.name, None, Context.from_env())))

    for size in (3000, 1000):
        made = run(Request.of(in_place, in_place, size=size))
        assert not has_moved()
    rollback(open_target(parse_place(in_place), Options(), Context.from_env()), made.published.commit)
    assert not has_moved()
    space.admin.put_files(in_place, {"README.md": b"# New"})
    assert has_moved()


def test_what_was_cast_in_place_is_compared_with_what_it_was(space: Namespace) -> None:
    commit, repo = publish(space, "m", files_of(*model())), space.repo("m")
    run(Request.of(repo, repo, dtype="bfloat16"))
    found = {one.kind: one.next for one in audited(of_owner(space.name, None, Context.from_env()))["m"].findings}
    assert found["changes-claimed"] == f"reshard verify {repo} --against {repo}@{commit}"
    whole = from_hub(space.endpoint, repo, token=space.token)(WHOLE) or b""
    space.admin.put_files(repo, {WHOLE: whole[:-1] + bytes([whole[-1] ^ 1])}, lfs=[WHOLE])
    deep = {one.kind: one.next for one in audited(of_owner(space.name, None, Context.from_env()), deep=1)["m"].findings}
    assert deep["bytes-changed"] == f"reshard verify {repo} --against {repo}@{commit} --deep"


def test_a_source_that_was_renamed_is_not_a_wrong_one(space: Namespace) -> None:
    commit = publish(space, "before", files_of(*model()))
    publish(space, "copy", add_manifest(files_of(*model()), space.repo("before"), commit))
    from huggingface_hub import HfApi

    HfApi(space.endpoint, space.token).move_repo(space.repo("before"), space.repo("after"))
    assert kinds(audited(of(space, {"copy": "after"}))) == set()


def test_a_cast_that_the_map_asks_for_is_none_and_one_that_only_the_manifest_states_is_a_claim(
    space: Namespace,
) -> None:
    import numpy as np

    commit = publish(space, "source", files_of(*model()))
    half = files_of(*({name: a.astype(np.float16) for name, a in part.items()} for part in model()))
    publish(space, "copy", add_manifest(half, space.repo("source"), commit, "float16"))
    claimed = audited(of(space, {"copy": "source"}))
    assert kinds(claimed) == {("copy", "changes-claimed")}
    assert claimed["copy"].findings[0].first.endswith("it was made with --dtype float16")
    text = catalog(space, {"copy": "source"}).replace("}", ", dtype: float16}")
    assert kinds(audited(of_catalog(parse(text, "c.yaml"), Context.from_env()))) == set()


def test_what_cannot_be_read_is_a_finding(space: Namespace) -> None:
    other = Namespace(space.endpoint, space.admin, space.admin.create_user(f"{space.name}-other"))
    publish(other, "gated", files_of(*model()), gated="auto")
    for name in ("a", "b"):
        publish(space, name, files_of(*model()))
    text = (
        f"name: n\nentries:\n- {{repo: {other.repo('gated')}, to: {space.repo('a')}}}\n"
        f"- {{repo: {other.repo('none')}, to: {space.repo('b')}}}\n"
        f"- {{repo: {space.repo('a')}, to: {other.repo('gated')}}}\n- {{repo: {space.repo('b')}, to: x/none}}\n"
    )
    found = audited(of_catalog(parse(text, "c.yaml"), Context.from_env()))
    assert kinds(found) == {
        ("a", "source-unreadable"), ("b", "source-unreadable"), ("gated", "unreadable"), ("none", "unreadable"),
    }  # fmt: skip
    assert "is gated" in found["a"].findings[0].first and "request access" in found["a"].findings[0].next
    assert "not found" in found["none"].findings[0].first


def test_an_owner_is_audited_by_a_template_a_catalog_or_the_manifests(space: Namespace) -> None:
    origin = Namespace(space.endpoint, space.admin, space.admin.create_user(f"{space.name}-origin"))
    commit = publish(origin, "one", files_of(*model()))
    publish(origin, "two", files_of(*model(1)))
    publish(space, "one", add_manifest(files_of(*model()), origin.repo("one"), commit))
    publish(space, "two", PLANTED["shape-changed"](1))
    publish(space, "notes", {"README.md": b"hello"})
    context = Context.from_env()

    alone = audited(of_owner(space.name, None, context))
    assert kinds(alone) == {("two", "source-unknown")}
    assert (alone["one"].source, alone["one"].source_by) == (origin.repo("one"), "manifest")
    assert [name for name, model in alone.items() if not model.weights] == ["notes"]

    by_name = audited(of_owner(space.name, f"{origin.name}/{{name}}", context))
    assert kinds(by_name) == {("two", "shape-changed"), ("notes", "source-unreadable")}

    text = f"name: n\nentries:\n- {{repo: {origin.repo('two')}, to: {space.repo('two')}}}\n"
    text += f"- {{repo: {origin.repo('two')}, to: {space.repo('gone')}}}\n"
    by_catalog = audited(of_owner(space.name, parse(text, "c.yaml"), context))
    assert kinds(by_catalog) == {("two", "shape-changed"), ("gone", "unreadable")}

    with pytest.raises(UsageError, match=f"no entry in catalog n has a target that {origin.name} owns"):
        of_owner(origin.name, parse(text, "c.yaml"), context)
    with pytest.raises(UsageError, match="has no models on"):
        of_owner("nobody-of-this-name", None, context)
    with pytest.raises(UsageError, match="use an owner, a catalog file or a folder"):
        of_owner("a/b", None, context)
    with pytest.raises(UsageError, match="unknown field {size}"):
        of_owner(space.name, "a/{size}", context)


def test_a_publication_that_lost_its_weights_is_critical_where_its_source_is_gone_too(space: Namespace) -> None:
    ours = add_manifest(files_of(*model()), f"{space.name}/source", "1" * 40)
    publish(space, "lost", {path: data for path, data in ours.items() if "safetensors" not in path})
    found = audited(of_owner(space.name, f"{space.name}-gone/{{name}}", Context.from_env()))
    assert kinds(found) == {("lost", "weights-missing"), ("lost", "source-unreadable")}
    assert not any("reshard run" in finding.next for finding in found["lost"].findings)


def test_folders_are_audited_by_a_template_too(tmp_path: Path) -> None:
    for name, fault in (("good", None), ("bad", "dtype-changed"), ("torn", "bytes-changed")):
        for folder, files in (
            ("from", files_of(*model())),
            ("to", (PLANTED[fault] if fault else lambda seed: files_of(*model(seed)))(0)),
        ):
            (tmp_path / folder / name).mkdir(parents=True)
            for path, data in files.items():
                (tmp_path / folder / name / path).write_bytes(data)
    subjects = of_folder(tmp_path / "to", f"{tmp_path}/from/{{name}}")
    assert kinds(audited(subjects)) == {("bad", "dtype-changed")}  # a folder lists no hashes
    deep = audited(subjects, deep=3)
    assert kinds(deep) == {("bad", "dtype-changed"), ("torn", "bytes-changed")}
    assert all(model.deep for model in deep.values())
    assert deep["torn"].findings[0].next.endswith("--deep")
    with pytest.raises(FolderNotFound, match="it is a model, and audit looks for folders") as refused:
        of_folder(tmp_path / "to" / "good", None)
    assert refused.value.next_step == f"pass the folder that it is in: {tmp_path / 'to'}"
    (tmp_path / "empty").mkdir()
    with pytest.raises(FolderNotFound, match="no folders of models"):
        of_folder(tmp_path / "empty", None)


def make_pair(tmp_path: Path, files: dict[str, bytes], changed: dict[str, bytes]) -> list[Subject]:
    for folder, all_of_it in (("from", files), ("to", files | changed)):
        (tmp_path / folder / "m").mkdir(parents=True)
        for path, data in all_of_it.items():
            (tmp_path / folder / "m" / path).write_bytes(data)
    return of_folder(tmp_path / "to", f"{tmp_path}/from/{{name}}")


@pytest.mark.parametrize("same", [True, False])
def test_a_large_file_beside_the_weights_is_unread_until_every_byte_is_read(tmp_path: Path, same: bool) -> None:
    large = bytes(CONFIG_MAX + 1)
    changed = {} if same else {"speakers.npy": b"\1" + large[1:]}
    subjects = make_pair(tmp_path, {**files_of(*model()), "speakers.npy": large}, changed)
    assert kinds(audited(subjects)) == {("m", "file-unread")}
    assert kinds(audited(subjects, deep=1)) == (set() if same else {("m", "file-changed")})


def test_a_byte_that_two_checks_see_is_counted_once(tmp_path: Path) -> None:
    subjects = make_pair(tmp_path, files_of(*model()), {})
    to = tmp_path / "to" / "m"
    shutil.rmtree(to)
    run(Request.of(tmp_path / "from" / "m", to, size=1000))
    with next(iter(to.glob("*.safetensors"))).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    found = audited(subjects, deep=1)
    assert {one.kind: one.count for one in found["m"].findings}["bytes-changed"] == 1


def test_a_folder_with_an_odd_name_is_examined_or_told_and_hides_no_other(tmp_path: Path) -> None:
    for name in ("tail", "tail ", os.fsdecode(b"bad\xff")):
        (tmp_path / name).mkdir()
        for path, data in files_of(*model()).items():
            (tmp_path / name / path).write_bytes(data[:-1] if name == "tail " and path == SECOND else data)
    assert kinds(audited(of_folder(tmp_path, None))) == {
        ("tail", "source-unknown"), ("tail ", "file-short"), ("tail ", "source-unknown"), ("bad\\udcff", "unreadable"),
    }  # fmt: skip


def test_a_model_that_cannot_be_examined_hides_nothing_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, healthy = "0" * 40, files_of(*model())
    odd = json.loads(add_manifest(healthy, "me/source", commit)[MANIFEST])
    odd["made"]["options"] = {"size": "abc", "config_from": "::::"}
    hostile = {"nested": {"modules.json": b"[" * 100_000}, "odd": {MANIFEST: json.dumps(odd).encode()}}
    for name, files in {"good": {}, "bad": PLANTED["dtype-changed"](0), "worst": {}, **hostile}.items():
        (tmp_path / name).mkdir()
        for path, data in {**healthy, **files}.items():
            (tmp_path / name / path).write_bytes(data)

    def broken(subject: Subject, sources: Sources, classes: MetaLoader) -> Audited:
        if str(subject.place).endswith("worst"):
            raise ZeroDivisionError("of no kind that is known")
        return examine(subject, sources, classes)

    monkeypatch.setattr("reshard.pipeline.auditing.audit.examine", broken)
    subjects = of_folder(tmp_path, f"{tmp_path}/good")
    found = audited(subjects)
    assert {name: kinds({name: one}) for name, one in found.items()} == {
        "worst": {("worst", "unreadable")}, "bad": {("bad", "dtype-changed")}, "good": set(),
        "nested": {("nested", "weights-broken")}, "odd": {("odd", "manifest-wrong")},
    }  # fmt: skip
    assert found["worst"].findings[0].first == "internal error: ZeroDivisionError: of no kind that is known"


def test_a_hub_that_is_away_ends_it_and_is_no_finding(space: Namespace) -> None:
    context = replace(Context.from_env(), limiters=lambda budget: Impatient())
    publish(space, "source", files_of(*model()))
    publish(space, "copy", files_of(*model()))
    subjects = of_catalog(parse(catalog(space, {"copy": "source"}), "c.yaml"), context)
    space.admin.fault("GET .*/tree/", "reset")
    with pytest.raises(HubUnreachable):
        audit(subjects, context, 2, 0)
    space.admin.clear_faults()
    space.admin.fault("GET /api/models", "reset")
    with pytest.raises(HubUnreachable):
        of_owner(space.name, None, context)
