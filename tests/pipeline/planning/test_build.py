"""The plan: pure, repeatable, whole; what is carried, deleted and kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.pipeline import api
from reshard.pipeline.checkpoint.discover import Found, find_checkpoints
from reshard.pipeline.checkpoint.open import Opened, open_checkpoints
from reshard.pipeline.checkpoint.parts import FileSet
from reshard.pipeline.errors import (
    BadSize,
    CarriedTooLarge,
    NotRead,
    Oversize,
    ProofError,
    ReshardError,
    SizeTooSmall,
    TooLargeForHub,
    UsageError,
)
from reshard.pipeline.limits import GB, HUB_FILE_MAX, HUB_HTTP_MAX, MB
from reshard.pipeline.places import NOWHERE, Folder, Hub, Place
from reshard.pipeline.planning import bounds
from reshard.pipeline.planning import build as planner
from reshard.pipeline.planning.build import Known, make_plan, request_key, weights_key
from reshard.pipeline.planning.codec import decode_head, decode_shard, encode
from reshard.pipeline.planning.existing import NOTHING, Before, drift
from reshard.pipeline.planning.model import Keys, Plan, index_bytes
from reshard.pipeline.planning.select import Selection, select
from reshard.pipeline.renaming import Rule
from reshard.pipeline.request import Options, Request
from reshard.pipeline.stores.connect import Context, open_source
from reshard.pipeline.tensors import Checkpoint, Name, Piece, Pin, StoredFile, Tensor
from reshard.pipeline.verifying import job_checks
from reshard.pipeline.verifying.job_checks import check_plan, check_structure
from tests.pipeline.planning.builders import PIN, opened_named, opened_of, plan_of, request, sources
from tests.pipeline.planning.shapes import Shapes, deepseek_v3, llama_3_8b, qwen_2_5_7b
from tests.support.models import arrays, save_model, save_single


def planned_for(target: Place, size: int, sizes: list[int], carried: int = 1) -> Plan:
    """Of tensors of these sizes, with a file beside them that is carried."""
    opened = opened_of([sizes])
    listing = {"extra.dat": StoredFile("extra.dat", carried)}
    asked = Request(source=Hub(repo="a/b"), target=target, options=Options(size=size))
    return make_plan(Known(asked, PIN, Keys("r", "w"), Found((), frozenset()), opened, listing, NOTHING))


HTTP, ON_HUB = HUB_HTTP_MAX, Hub(repo="c/d")


@pytest.mark.parametrize(
    ("size", "sizes", "carried", "error"),
    [
        (HUB_FILE_MAX, [HUB_FILE_MAX], 1, TooLargeForHub),  # with its header it is larger
        (2 * HUB_FILE_MAX, [3 * HTTP, 3 * HTTP], 1, BadSize),
        (HTTP, [HTTP], HUB_FILE_MAX + 1, CarriedTooLarge),
    ],
)
def test_a_file_that_the_hub_does_not_take_is_refused_and_a_folder_takes_it(
    size: int, sizes: list[int], carried: int, error: type[ReshardError]
) -> None:
    with pytest.raises(error, match="200,000,000,000"):
        planned_for(ON_HUB, size, sizes, carried)
    assert not planned_for(Folder(path="/out"), size, sizes, carried).notes[len(sizes) :]
    assert any(
        "the Hub accepts at most 200,000,000,000" in note for note in planned_for(NOWHERE, size, sizes, carried).notes
    )


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"rename": (Rule("^f0[.]t0$", "a"),)}, "--rename"),
        ({"rename": (Rule("^f0[.]t0$", "?"), Rule("t1$", "t0"), Rule("[?]", "f0.t1"))}, "--rename"),
        ({"strip_prefix": "f0."}, "--strip-prefix"),
        ({"strip_prefix": "auto", "dtype": "bfloat16"}, None),
        ({}, None),
    ],
)
def test_other_names_are_refused_where_torchao_has_them_in_the_metadata(
    changes: dict[str, Any], refused: str | None
) -> None:
    opened = opened_of([[8] * 2])
    assert plan_of(opened, **changes)
    (plain,) = opened.checkpoints
    quantized = replace(plain, file_metadata={"tensor_names": '["f0.t0", "f0.t1"]'})
    opened = replace(opened, checkpoints=(quantized,))
    if refused is None:
        assert plan_of(opened, **changes)
    else:
        with pytest.raises(NotRead, match=f"model: {refused} for a model quantized by torchao is not") as error:
            plan_of(opened, **changes)
        assert error.value.next_step.startswith(f"remove {refused};")


@pytest.mark.parametrize(("size", "refused"), [(100, SizeTooSmall), (1000, Oversize)])
def test_the_size_that_a_refusal_names_is_enough_for_every_model(
    size: int, refused: type[Oversize | SizeTooSmall]
) -> None:
    one = opened_named({"w": ("F32", (500,)), "w" * 300: ("F32", (700,)), "w" * 100: ("F32", (600,))}, 10_000)
    (all_of_it,) = one.checkpoints
    models = [replace(all_of_it, name=Name(f"part{len(t.name)}", "model"), tensors=(t,)) for t in all_of_it.tensors]
    opened = replace(one, checkpoints=tuple(models))
    oversize = "fail" if refused is Oversize else "own-shard"
    with pytest.raises(refused) as caught:
        plan_of(opened, size=size, oversize=oversize)
    enough = caught.value.enough
    assert f"at least {enough:,} bytes" in caught.value.next_step
    assert plan_of(opened, size=enough, oversize=oversize)
    with pytest.raises(refused):
        plan_of(opened, size=enough - 1, oversize=oversize)


def test_a_file_that_clients_without_xet_do_not_download_is_noted() -> None:
    notes = planned_for(ON_HUB, HUB_FILE_MAX, [HTTP], HUB_FILE_MAX).notes
    assert [note.partition(":")[0].split()[0] for note in notes] == ["model.safetensors", "extra.dat"]
    assert all("clients without hf_xet can download at most 50,000,000,000" in note for note in notes)
    assert planned_for(ON_HUB, HTTP, [HTTP - 1000], HTTP).notes == ()


def test_a_header_that_no_reader_takes_is_refused_before_anything_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = opened_of([[8] * 20])
    monkeypatch.setattr(bounds, "HEADER_MAX", len(plan_of(opened, size=10_000).shards[0].header))
    assert plan_of(opened, size=10_000)
    monkeypatch.setattr(bounds, "HEADER_MAX", bounds.HEADER_MAX - 1)
    with pytest.raises(BadSize, match="the format's limit is .*; use a smaller size"):
        plan_of(opened, size=10_000)
    assert len(plan_of(opened, size=1000).shards) > 1


@given(sources, st.integers(300, 4000))
def test_same_input_same_plan(sizes: list[list[int]], size: int) -> None:
    assert plan_of(opened_of(sizes), size=size) == plan_of(opened_of(sizes), size=size)


@given(sources, st.integers(300, 4000))
def test_every_shard_is_in_one_group_and_every_source_file_is_attested_once(sizes: list[list[int]], size: int) -> None:
    plan = plan_of(opened_of(sizes), size=size)
    assert sorted(n for group in plan.groups for n in group.shards) == list(range(len(plan.shards)))
    assert sorted(n for group in plan.groups for n in group.attests) == list(range(len(plan.files)))


@given(sources, st.integers(300, 4000))
def test_a_group_knows_every_tensor_of_the_files_that_it_attests(sizes: list[list[int]], size: int) -> None:
    plan = plan_of(opened_of(sizes), size=size)
    for group in plan.groups:
        own = {
            (entry.name, piece.file)
            for n in group.shards
            for entry in plan.shards[n].entries
            for piece in entry.tensor.pieces
        }
        known = own | {(cut.name, cut.file) for cut in group.witnesses}
        for file in group.attests:
            there = {(f"f{file}.t{i}", file) for i, size in enumerate(sizes[file]) if size}
            assert there <= known


@given(sources, st.integers(300, 4000))
def test_a_plan_survives_being_stored(sizes: list[list[int]], size: int) -> None:
    plan = plan_of(opened_of(sizes), size=size)
    stored = encode(plan)
    shards = tuple(decode_shard(stored.shards[n]) for n in range(len(plan.shards)))
    assert replace(decode_head(stored.head), shards=shards) == plan


@given(st.integers(450, 800))
def test_the_size_holds_with_the_names_of_dropped_ties(size: int) -> None:
    """One file names them in its own metadata, which is part of its header."""
    names = ("kept", *(f"tied.{i}" for i in range(6)))
    tied = tuple(Tensor(name, "U8", (300,), (Piece(0, 64, (0,), (300,)),)) for name in names)
    other = Tensor("other", "U8", (10,), (Piece(0, 364, (0,), (10,)),))
    checkpoint = Checkpoint(Name("", "model"), (0,), (*tied, other), ties=(names,))
    opened = Opened((StoredFile("pytorch_model.bin", 400),), (checkpoint,), {})
    listing = {file.path: file for file in opened.files}
    known = Known(
        request(size=size, ties="source"), PIN, Keys("request", "weights"), Found((), frozenset()), opened, listing,
        NOTHING, ties={checkpoint.name: dict.fromkeys(names, "kept")},
    )  # fmt: skip
    shards = make_plan(known).shards
    assert {entry.name for shard in shards for entry in shard.entries} == {"kept", "other"}
    assert all(shard.size <= size for shard in shards)


@pytest.mark.parametrize(("size", "named", "notes"), [(450, False, 0), (800, True, 0), (350, True, 1)])
def test_a_single_tensor_goes_without_the_names_of_dropped_ties_where_they_alone_exceed_the_size(
    size: int, named: bool, notes: int
) -> None:
    names = ("kept", *(f"tied.{i}" for i in range(6)))
    tied = tuple(Tensor(name, "U8", (300,), (Piece(0, 64, (0,), (300,)),)) for name in names)
    checkpoint = Checkpoint(Name("", "model"), (0,), tied, ties=(names,))
    opened = Opened((StoredFile("pytorch_model.bin", 364),), (checkpoint,), {})
    known = Known(
        request(size=size, ties="source"), PIN, Keys("request", "weights"), Found((), frozenset()), opened,
        {file.path: file for file in opened.files}, NOTHING, ties={checkpoint.name: dict.fromkeys(names, "kept")},
    )  # fmt: skip
    plan = make_plan(known)
    (shard,) = plan.shards
    assert (b"tied.5" in shard.header) is named and (shard.size <= size) is not bool(notes)
    assert sum("kept (300 bytes) with its header is larger than --size" in note for note in plan.notes) == notes


def test_what_decides_the_bytes_decides_the_digests() -> None:
    opened = opened_of([[100, 200], [300]])
    plan = plan_of(opened, size=1000)
    moved = replace(opened, files=(opened.files[0], replace(opened.files[1], sha256="f" * 64)))
    assert plan_of(moved, size=1000).digest != plan.digest
    assert plan_of(opened, size=2000).digest != plan.digest
    assert plan_of(opened, size=1000, branch="x", overwrite=True).digest == plan.digest


def test_request_keys_tell_targets_and_options_apart() -> None:
    base = request_key(request(size=1000), PIN, None, "c/d#main")
    assert request_key(request(size=1000, pr=True, force=True), PIN, None, "c/d#main") == base
    assert (
        len(
            {
                base,
                request_key(request(size=2000), PIN, None, "c/d#main"),
                request_key(request(size=1000), PIN, None, "x"),
            }
        )
        == 3
    )


def test_a_request_key_follows_the_commit_that_lends_a_config() -> None:
    borrowing = request(config_from=Hub(repo="l/m"))
    lenders = [Pin("https://hub", "l/m", commit * 40) for commit in "de"]
    assert len({request_key(borrowing, PIN, lender, "c/d#main") for lender in lenders}) == 2


def test_weights_without_hashes_have_no_key() -> None:
    listing = {"model.safetensors": StoredFile("model.safetensors", 3)}
    part = FileSet(Name("", "model"), "safetensors", tuple(listing.values()))
    assert weights_key(Found((part,), frozenset()), listing, Options()) is None


def key_of_weights(config: str, name: str, kind: Any, **options: Any) -> str | None:
    paths = {"weights": "1" * 40, "config.json": config * 40}
    listing = {path: StoredFile(path, 3, oid=oid) for path, oid in paths.items()}
    part = FileSet(Name("", name), kind, (listing["weights"],))
    return weights_key(Found((part,), frozenset()), listing, Options(**options))


@pytest.mark.parametrize(
    ("options", "follows"), [({}, False), ({"ties": "source"}, True), ({"dequantize": True, "dtype": "bfloat16"}, True)]
)
def test_a_key_of_weights_follows_the_config_where_it_decides_about_them(
    options: dict[str, Any], follows: bool
) -> None:
    one, other = (key_of_weights(config, "model", "safetensors", **options) for config in "ab")
    assert (one != other) is follows


def test_a_key_of_weights_follows_the_name_that_torch_files_are_given() -> None:
    assert len({key_of_weights("a", name, "torch") for name in ("model", "weird")}) == 2


# ---------------------------------------------------------------------------------- a planner that loses is caught


@pytest.mark.parametrize("loss", ["tensor", "shape", "dtype", "index"])
def test_a_plan_that_does_not_hold_the_source_is_refused(loss: str) -> None:
    opened = opened_of([[100, 200, 400], [300, 500]])
    plan = plan_of(opened, size=700)
    check_structure(plan, opened, {}, {})
    (checkpoint,) = opened.checkpoints
    first = checkpoint.tensors[0]
    other = {
        "tensor": (first._replace(name="never seen"), *checkpoint.tensors),
        "shape": (first._replace(shape=(10, 10)), *checkpoint.tensors[1:]),
        "dtype": (first._replace(dtype="I8"), *checkpoint.tensors[1:]),
        "index": checkpoint.tensors,
    }[loss]
    if loss == "index":
        (output,) = plan.outputs
        assert output.index is not None
        fewer = replace(output.index, shards=output.index.shards[:-1])
        plan = replace(plan, outputs=(replace(output, index=fewer),))
    with pytest.raises(ProofError):
        check_structure(plan, replace(opened, checkpoints=(replace(checkpoint, tensors=other),)), {}, {})


def test_a_selection_that_loses_a_tensor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planner and check select alike, so only a count tells."""

    def loses(*arguments: Any) -> Selection:
        whole = select(*arguments)
        return replace(whole, entries=whole.entries[1:])

    for module in (planner, job_checks):
        monkeypatch.setattr(module, "select", loses)
    opened = opened_of([[100, 200, 400]])
    with pytest.raises(ProofError, match="a source tensor is neither"):
        check_structure(plan_of(opened, size=1000), opened, {}, {})


def test_a_stored_plan_whose_headers_say_more_than_its_entries_is_refused() -> None:
    plan = plan_of(opened_of([[100, 200, 400], [300, 500]]), size=700)
    check_plan(plan, plan.shards)
    first, *rest = plan.shards
    with pytest.raises(ProofError, match="does not match the source"):
        check_plan(plan, [replace(first, entries=first.entries[1:]), *rest])


# --------------------------------------------------------------------------------- what is carried, deleted and kept


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = save_model(tmp_path / "model", 4, 400, 2)
    for name in (
        "pytorch_model.bin",
        "model.gguf",
        "training_args.bin",
        "pytorch_model.bin.index.json",
        ".gitattributes",
    ):
        (folder / name).write_bytes(b"{}")
    (folder / "modeling_mine.py").write_text("raise SystemExit('never run')")
    return folder


def planned(folder: Path, before: Before = NOTHING, **options: Any) -> Plan:
    source = open_source(Folder(path=str(folder)), Context.from_env())
    found = find_checkpoints(source)
    opened = open_checkpoints(source, found)
    keys = Keys("request", None)
    return make_plan(Known(request(**options), source.pin, keys, found, opened, source.files(), before))


def test_everything_that_is_not_weights_is_carried_and_the_rest_is_listed_with_a_reason(model: Path) -> None:
    plan = planned(model, size=2000)
    assert {f.path for f in plan.carried} == {"config.json", "tokenizer.json", "LICENSE", "modeling_mine.py"}
    why = dict(plan.left_out)
    assert why.keys() == {
        "pytorch_model.bin", "model.gguf", "training_args.bin", "pytorch_model.bin.index.json", ".gitattributes"
    }  # fmt: skip
    assert "PyTorch" in why["pytorch_model.bin"] and "GGUF" in why["model.gguf"]


def test_a_glob_that_matches_no_file_is_told(model: Path) -> None:
    made = planned(model, include=("*.onnx", "*.json"), exclude=("typo*",))
    assert [note for note in made.notes if "matches" in note] == [
        "--include '*.onnx' matches no file",
        "--exclude 'typo*' matches no file",
    ]
    keys, found, opened = Keys("request", None), Found((), frozenset()), Opened((), (), {})
    nothing_to_do = Known(request(include=("*.onnx",)), PIN, keys, found, opened, {}, NOTHING, published="a" * 40)
    assert make_plan(nothing_to_do).notes == ()  # then nothing was listed


def test_only_what_is_superseded_is_deleted_and_the_rest_is_kept(model: Path) -> None:
    there = [
        "model.safetensors", "model-00001-of-00009.safetensors", "odd.safetensors", "mtp.safetensors",
        "pytorch_model.bin", "notes.txt", "README.md", ".gitattributes", "vae/model.safetensors",
    ]  # fmt: skip
    files = {path: StoredFile(path, 1, oid=path) for path in there}
    indexes = {"model.safetensors.index.json": b'{"weight_map": {"a": "odd.safetensors"}}'}
    files["model.safetensors.index.json"] = StoredFile("model.safetensors.index.json", 1)
    plan = planned(model, Before("head", files, indexes, {}), size=2000)
    assert set(plan.deletes) == {"model.safetensors", "model-00001-of-00009.safetensors", "odd.safetensors"}
    assert set(plan.kept) == {
        "mtp.safetensors",
        "pytorch_model.bin",
        "notes.txt",
        ".gitattributes",
        "vae/model.safetensors",
    }


def test_a_path_of_our_last_publication_that_is_no_longer_made_is_deleted(model: Path) -> None:
    ours = {path: StoredFile(path, 1, oid=path) for path in ("old_tokenizer.json", "config.json")}
    files = ours | {"theirs.txt": StoredFile("theirs.txt", 1, oid="x")}
    plan = planned(model, Before("head", files, {}, ours), size=2000)
    assert plan.deletes == ("old_tokenizer.json",)
    assert plan.kept == ("theirs.txt",)


def test_prune_deletes_what_is_not_ours_but_never_what_belongs_to_the_repository(model: Path) -> None:
    files = {path: StoredFile(path, 1, oid=path) for path in ("notes.txt", ".gitattributes", "README.md")}
    plan = planned(model, Before("head", files, {}, {}), size=2000, prune=True)
    assert plan.deletes == ("notes.txt",)


def test_what_an_index_in_the_target_names_in_vain_is_not_deleted(model: Path) -> None:
    path = "model.safetensors.index.json"
    files = {name: StoredFile(name, 1) for name in (path, "odd.safetensors")}
    named = b'{"weight_map": {"a": "odd.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    plan = planned(model, Before("head", files, {path: named}, {}), size=100_000)
    assert plan.deletes == (path, "odd.safetensors")


def test_a_broken_index_in_the_target_does_not_stop_its_replacement(model: Path) -> None:
    path = "model.safetensors.index.json"
    before = Before("head", {path: StoredFile(path, 1)}, {path: b"{not json"}, {})
    assert planned(model, before, size=2000).deletes == ()


@pytest.mark.parametrize(
    "now", [None, StoredFile("config.json", 2, oid="new"), StoredFile("config.json", 1, oid="new")]
)
def test_drift_is_told_with_the_path_that_somebody_changed(now: StoredFile | None) -> None:
    ours = {"config.json": StoredFile("config.json", 1, oid="old"), "README.md": StoredFile("README.md", 1, oid="old")}
    files = {"README.md": StoredFile("README.md", 9, oid="theirs")} | ({"config.json": now} if now else {})
    said = "was deleted" if now is None else "was replaced"
    assert drift(Before("head", files, {}, ours)) == [f"config.json {said}"]


def test_the_index_is_sorted_and_names_files_beside_it() -> None:
    plan = plan_of(opened_of([[500, 500, 500]]), size=800)
    (output,) = plan.outputs
    assert output.index is not None
    text = index_bytes(output.index, plan.shards).decode()
    assert text.index("f0.t0") < text.index("f0.t1") < text.index("f0.t2")
    assert '"total_size": 1500' in text


def aligned_share(plan: Plan, align: int) -> float:
    """Of all bytes of tensors, those of tensors that begin at a multiple of ``align`` in their file."""
    good = total = 0
    for shard in plan.shards:
        position = len(shard.header)
        for entry in shard.entries:
            total += entry.size
            good += entry.size if position % align == 0 else 0
            position += entry.size
    return good / total


@pytest.mark.parametrize("shapes", [llama_3_8b, qwen_2_5_7b, pytest.param(deepseek_v3, marks=pytest.mark.slow)])
def test_with_align_nearly_all_bytes_of_real_models_begin_at_pages(shapes: Callable[[], Shapes]) -> None:
    opened = opened_named(shapes(), file_of=4_300 * MB)
    plain, cut = (plan_of(opened, size=5 * GB, align=align) for align in (8, 4096))
    assert aligned_share(plain, 4096) < 0.5 and aligned_share(cut, 4096) > 0.99
    assert len(cut.shards) == len(plain.shards)
    assert sum(s.size for s in cut.shards) - sum(s.size for s in plain.shards) < 4096 * len(cut.shards)
    assert plan_of(opened, size=5 * GB).digest == plain.digest, "without it nothing changes"


def test_what_its_loader_reads_from_one_file_alone_is_written_so_and_that_is_said(tmp_path: Path) -> None:
    save_single(tmp_path, arrays(8, 1000))
    module = [{"path": ".", "type": "sentence_transformers.models.StaticEmbedding"}]
    (tmp_path / "modules.json").write_text(json.dumps(module))
    small, large = (api.plan(Request.of(tmp_path, size=size)) for size in (9_000, 1_000_000))
    assert [shard.path for made in (small, large) for shard in made.shards] == ["model.safetensors"] * 2
    assert ["stays in one file" in " ".join(made.notes) for made in (small, large)] == [True, False]


def test_weights_that_a_config_names_keep_their_name_or_the_plan_is_refused(tmp_path: Path) -> None:
    save_single(tmp_path, arrays(8, 1000))
    (tmp_path / "config.json").write_text('{"transformers_weights": "model.safetensors"}')
    assert api.plan(Request.of(tmp_path, size=1_000_000)).shards
    with pytest.raises(UsageError, match="transformers_weights, which names model.safetensors, and the result would"):
        api.plan(Request.of(tmp_path, size=9_000))
    assert api.plan(Request.of(tmp_path, size=9_000, exclude=["config.json"])).shards
