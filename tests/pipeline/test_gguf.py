"""GGUF to GGUF: what goes in comes out in files of the size that was asked for, for llama.cpp's own reader."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import HfApi
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from reshard.pipeline.checkpoint.discover import find_checkpoints
from reshard.pipeline.checkpoint.open import open_checkpoints
from reshard.pipeline.errors import (
    AmbiguousWeights,
    BadHeader,
    BadIndex,
    BadRename,
    ModelCheckRequired,
    NotDequantized,
    NotRead,
    NoWeights,
    Oversize,
    ProofError,
    SourceCorrupt,
    TargetOccupied,
    UsageError,
)
from reshard.pipeline.places import Folder
from reshard.pipeline.planning.codec import decode_head, decode_shard, encode
from reshard.pipeline.planning.model import Entry
from reshard.pipeline.planning.pack import PACKINGS, GgufKeys, file_size, first_first
from reshard.pipeline.request import Request
from reshard.pipeline.reshard import draft
from reshard.pipeline.stores.connect import Context, open_target
from reshard.pipeline.stores.folder.source import FolderSource
from reshard.pipeline.tensors import Piece, Tensor
from reshard.pipeline.verifying.job_checks import check_structure
from tests.hub.fixtures import Namespace
from tests.pipeline.conftest import Run, upload
from tests.support import ggufs
from tests.support.examples import examples

SIZE = 120_000  # bytes; the model has 590,000, 8,000 of them keys
SPLIT = {"split.no", "split.count", "split.tensors.count"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    ggufs.save(folder / "tiny-Q4_K_M.gguf", ggufs.MODEL)
    (folder / "README.md").write_text("# Tiny\n")
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*.gguf"))}


def tensors_of(folder: Path, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in folder.rglob(f"{prefix}*.gguf"):
        tensors = ggufs.read(path).tensors
        assert not found.keys() & tensors.keys()
        found |= tensors
    return found


def check_parts(folder: Path, source: Path, stem: str) -> int:
    """Whether the files are parts as gguf-split makes them; returns how many."""
    parts = sorted(folder.glob(f"{stem}-*-of-*.gguf"))
    whole = ggufs.read(source)
    names = [f"{stem}-{number:05d}-of-{len(parts):05d}.gguf" for number in range(1, len(parts) + 1)]
    assert [path.name for path in parts] == names
    for number, path in enumerate(parts):
        found = ggufs.read(path)
        assert {key: found.keys[key] for key in SPLIT} == {
            "split.no": number,
            "split.count": len(parts),
            "split.tensors.count": len(whole.tensors),
        }
        rest = {key: value for key, value in found.keys.items() if key not in SPLIT}
        aligned = {"general.alignment": whole.alignment} if whole.alignment != 32 else {}
        assert rest == (whole.keys if number == 0 else aligned)
        assert list(found.keys)[-3:] == ["split.no", "split.tensors.count", "split.count"]
        assert found.alignment == whole.alignment and path.stat().st_size % whole.alignment == 0
    assert tensors_of(folder, stem) == whole.tensors
    return len(parts)


@pytest.mark.parametrize("pack", PACKINGS)
@pytest.mark.parametrize("alignment", [None, 64])
def test_a_model_is_split_as_gguf_split_does_it(tmp_path: Path, go: Run, pack: str, alignment: int | None) -> None:
    ggufs.save(tmp_path / "model" / "tiny.gguf", ggufs.MODEL, alignment=alignment)
    go(tmp_path / "model", tmp_path / "out", size=SIZE, pack=pack)
    assert check_parts(tmp_path / "out", tmp_path / "model" / "tiny.gguf", "tiny") >= 4
    assert max(map(len, files_of(tmp_path / "out").values())) <= SIZE


def test_a_plan_is_the_same_after_it_was_stored(model: Path, tmp_path: Path, go: Run) -> None:
    plan = go(model, tmp_path / "out", size=SIZE).plan
    stored = encode(plan)
    again = replace(decode_head(stored.head), shards=tuple(map(decode_shard, stored.shards.values())))
    assert again == plan and again.shards[0].alignment == 32


def test_a_single_file_stays_byte_for_byte_what_it_is(model: Path, tmp_path: Path, go: Run) -> None:
    report = go(model, tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(model)
    (check,) = [check for check in report.checks if check.name.startswith("reload")]
    assert (check.level, check.result) == ("structural", "skipped") and "llama.cpp" in check.reason


def test_parts_are_merged_and_cut_anew_from_any_cut(model: Path, tmp_path: Path, go: Run) -> None:
    go(model, tmp_path / "parts", size=SIZE)
    go(tmp_path / "parts", tmp_path / "finer", size=SIZE // 2)
    assert check_parts(tmp_path / "finer", model / "tiny-Q4_K_M.gguf", "tiny-Q4_K_M") > len(
        files_of(tmp_path / "parts")
    )
    go(tmp_path / "finer", tmp_path / "again", size=SIZE)
    go(tmp_path / "finer", tmp_path / "one", size=1 << 62)
    whole = ggufs.read(tmp_path / "one" / "tiny-Q4_K_M.gguf")
    assert whole.tensors == ggufs.read(model / "tiny-Q4_K_M.gguf").tensors
    assert whole.keys["split.count"] == whole.keys["split.no"] == 0, "as gguf-split merges"
    ggufs.save(tmp_path / "theirs" / "tiny-Q4_K_M.gguf", ggufs.MODEL, per_file=4)
    go(tmp_path / "theirs", tmp_path / "ours", size=1 << 62)
    assert ggufs.read(tmp_path / "ours" / "tiny-Q4_K_M.gguf").tensors == whole.tensors


def test_hub_and_folder_give_the_same_files(model: Path, tmp_path: Path, on_hub: Namespace, go: Run) -> None:
    repo = upload(on_hub, "source", model)
    go(repo, tmp_path / "a", size=SIZE)
    go(model, tmp_path / "b", size=SIZE)
    go(repo, on_hub.repo("target"), size=SIZE)
    weights = files_of(tmp_path / "a")
    assert len(weights) > 3 and files_of(tmp_path / "b") == weights
    assert {path: on_hub.admin.read(on_hub.repo("target"), path) for path in weights} == weights


def test_each_quantisation_is_a_set_and_what_belongs_to_them_is_carried(tmp_path: Path, go: Run) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    kinds = ("Q4_K", "Q8_0", "BF16")
    for kind in kinds:
        spec = {f"blk.{i}.weight": (kind, (64, 256)) for i in range(8)}
        ggufs.save(folder / kind / f"m-{kind}.gguf", spec, per_file=3 if kind == "BF16" else 0)
    ggufs.save(folder / "mmproj-F16.gguf", {f"v.blk.{i}.weight": ("F16", (64, 256)) for i in range(8)})
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    report = go(folder, out, size=SIZE)
    for kind in kinds:
        assert tensors_of(out / kind) == tensors_of(folder / kind)
        assert len(list((out / kind).iterdir())) == {"Q4_K": 1, "Q8_0": 2, "BF16": 3}[kind]
    assert (out / "mmproj-F16.gguf").read_bytes() == (folder / "mmproj-F16.gguf").read_bytes()
    assert any("mmproj-F16.gguf (" in note for note in report.plan.notes)
    assert [str(output.name) for output in report.plan.outputs] == [f"{kind}/m-{kind}.gguf" for kind in sorted(kinds)]


BESIDE = {
    "imatrix.gguf": ("imatrix", "imatrix"),
    "my-lora.gguf": ("llama", "adapter"),
    "vision/clip.gguf": ("clip", ""),
    "vision/pixtral.gguf": ("pixtral", "mmproj"),
    "happy.gguf": ("controlvector", ""),
    "Tiny-MMProj.gguf": ("llama", ""),  # by its name
}


def test_what_llama_cpp_takes_beside_a_model_is_carried_whole(tmp_path: Path, go: Run) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    ggufs.save(folder / "tiny-imatrix-Q4_K_M.gguf", ggufs.MODEL)
    for name, (architecture, kind) in BESIDE.items():
        spec = {f"v.blk.{i}.weight": ("F16", (64, 512)) for i in range(3)}
        ggufs.save(folder / name, spec, architecture=architecture, kind=kind)
    report = go(folder, out, size=SIZE)
    theirs, ours = files_of(folder), files_of(out)
    assert {name: ours.get(name) for name in BESIDE} == {name: theirs[name] for name in BESIDE}
    assert {file.path for file in report.plan.files} == {"tiny-imatrix-Q4_K_M.gguf"}, "a model, whatever its name"
    assert len(ours) > len(BESIDE) + 2
    assert sum("is copied unchanged" in note for note in report.plan.notes) == len(BESIDE)


@pytest.mark.parametrize(("name", "told_by"), [("MMPROJ-F16.gguf", "name"), ("vision.gguf", "keys")])
def test_what_goes_beside_a_model_is_none(tmp_path: Path, name: str, told_by: str, go: Run) -> None:
    ggufs.save(tmp_path / "model" / name, {"v": ("F16", (4,))}, architecture="clip")
    says = f"{name} belongs to another model, according to its {told_by}, and is never resharded"
    with pytest.raises(NoWeights, match=says) as caught:
        go(tmp_path / "model", tmp_path / "out")
    assert "reshard the model it belongs to" in caught.value.next_step


def test_a_first_part_of_nothing_but_keys_is_read_and_attested(tmp_path: Path, on_hub: Namespace, go: Run) -> None:
    ggufs.save(tmp_path / "model" / "tiny.gguf", ggufs.MODEL, per_file=4, keys_alone=True)
    first = sorted((tmp_path / "model").iterdir())[0]
    assert ggufs.read(first).tensors == {}
    repo = upload(on_hub, "source", tmp_path / "model")
    report = go(repo, tmp_path / "out", size=1 << 62)
    whole = ggufs.read(tmp_path / "out" / "tiny.gguf")
    assert whole.tensors == tensors_of(tmp_path / "model") and whole.keys["general.name"] == "a model"
    assert report.attested == {file.path: "checked" for file in report.plan.files}
    on_hub.admin.corrupt(repo, first.name, first.read_bytes().index(b"a model"))
    with pytest.raises(SourceCorrupt, match=first.name):
        go(repo, tmp_path / "again", size=1 << 62)


def test_a_new_cut_in_place_takes_the_old_parts_away(model: Path, go: Run) -> None:
    go(model, model, size=SIZE)
    old = files_of(model)
    assert "tiny-Q4_K_M.gguf" not in old
    go(model, model, size=SIZE // 2)
    assert not old.keys() & files_of(model).keys()


def test_weights_that_are_there_already_stay_where_they_are(model: Path, tmp_path: Path, go: Run) -> None:
    out = tmp_path / "out"
    ggufs.save(model / "mmproj.gguf", {"v": ("F16", (4,))})
    go(model, out, size=SIZE)
    parts = files_of(out)
    (model / "notes.txt").write_text("new")
    report = go(model, out, size=SIZE)
    if not report.plan.shards:  # a folder has hashes only where it keeps a record of them
        assert {*report.plan.reused} >= parts.keys() - {"mmproj.gguf"}
    assert files_of(out) == parts and (out / "notes.txt").exists()


def test_on_a_hub_only_what_is_carried_moves_again(model: Path, on_hub: Namespace, go: Run) -> None:
    ggufs.save(model / "lora.gguf", {"a": ("F16", (4,))}, kind="adapter")
    repo, target = upload(on_hub, "source", model), on_hub.repo("target")
    parts = [shard.path for shard in go(repo, target, size=SIZE).plan.shards]
    on_hub.admin.put_files(repo, {"notes.txt": b"new"})
    report = go(repo, target, size=SIZE)
    assert report.plan.shards == () and {*report.plan.reused} >= {*parts}
    assert on_hub.admin.files(target).keys() >= {*parts, "notes.txt", "lora.gguf"}
    assert f"in {len(parts)} files" in on_hub.admin.read(target, "README.md").decode()


def test_the_manifest_says_whose_parts_these_are_once_the_history_is_squashed(
    model: Path, on_hub: Namespace, go: Run
) -> None:
    repo, other, target = upload(on_hub, "source", model), upload(on_hub, "other", model), on_hub.repo("target")
    go(repo, target, size=SIZE)
    HfApi(on_hub.endpoint, on_hub.token).super_squash_history(target)
    with pytest.raises(TargetOccupied):
        go(other, target, size=2 * SIZE)
    assert not go(repo, target, size=2 * SIZE).published.found
    on_hub.admin.put_files(target, {"theirs.gguf": b"GGUF"}, lfs=["theirs.gguf"])
    HfApi(on_hub.endpoint, on_hub.token).super_squash_history(target)
    with pytest.raises(TargetOccupied):
        go(repo, target, size=SIZE)


@pytest.mark.parametrize("loss", ["a key", "a value", "a part's number"])
def test_a_plan_that_loses_what_the_keys_say_is_refused(loss: str, model: Path) -> None:
    source = FolderSource.open(Folder(path=str(model)))
    opened = open_checkpoints(source, find_checkpoints(source))
    request = Request.of(str(model), f"{model}-out", size=SIZE)
    plan = draft(request, source, open_target(request.target, request.options, Context.from_env()))
    check_structure(plan, opened, {}, {})
    first, second, *rest = plan.shards
    (checkpoint,) = opened.checkpoints
    keys = dict(checkpoint.keys)
    if loss == "a part's number":
        header = second.header.replace(b"split.no\x02\0\0\0\x01", b"split.no\x02\0\0\0\x02")
        assert header != second.header
        plan = replace(plan, shards=(first, replace(second, header=header), *rest))
    elif loss == "a key":
        keys["tokenizer.chat_template"] = b"\x08\0\0\0" + bytes(8)
    else:
        keys["general.name"] = b"\x08\0\0\0" + bytes(8)
    with pytest.raises(ProofError, match="split keys" if loss == "a part's number" else "the key '"):
        check_structure(plan, replace(opened, checkpoints=(replace(checkpoint, keys=keys),)), {}, {})


def test_of_parts_and_a_whole_of_the_same_tensors_the_whole_is_taken(model: Path, tmp_path: Path, go: Run) -> None:
    ggufs.save(model / "tiny-Q4_K_M.gguf", ggufs.MODEL, per_file=5)
    assert len(files_of(model)) == 4
    report = go(model, tmp_path / "out", size=SIZE)
    assert sorted(left.path for left in report.plan.left_out) == sorted(files_of(model).keys() - {"tiny-Q4_K_M.gguf"})
    ggufs.save(model / "tiny-Q4_K_M.gguf", {"other": ("F32", (4,))})
    with pytest.raises(AmbiguousWeights, match="tiny-Q4_K_M.gguf in the same folder has different tensors$"):
        go(model, tmp_path / "out", size=SIZE, force=True)
    ggufs.save(model / "tiny-Q4_K_M.gguf", ggufs.MODEL, keys={"llama.context_length": 64})
    with pytest.raises(AmbiguousWeights, match="has the same tensors, but a different key 'llama.context_length'"):
        go(model, tmp_path / "out", size=SIZE)
    go(model, tmp_path / "parts", exclude=("*-of-*",))


def test_of_two_cuts_by_one_name_neither_is_taken(model: Path, tmp_path: Path, go: Run) -> None:
    ggufs.save(model / "tiny-Q4_K_M.gguf", ggufs.MODEL, per_file=5)
    ggufs.save(model / "tiny-Q4_K_M.gguf", ggufs.MODEL, per_file=8)
    (model / "tiny-Q4_K_M.gguf").unlink()
    assert len(files_of(model)) == 3 + 2
    with pytest.raises(
        AmbiguousWeights, match="tiny-Q4_K_M-00001-of-00002.gguf in the same folder belongs to another"
    ) as caught:
        go(model, tmp_path / "out")
    assert "--exclude" in caught.value.next_step
    go(model, tmp_path / "out", exclude=("*-of-00003.gguf",))


def test_gguf_beside_safer_weights_is_left_out_as_before(model: Path, tmp_path: Path, go: Run) -> None:
    (model / "config.json").unlink()
    save_file({"a": np.zeros(4)}, model / "model.safetensors", {"format": "pt"})
    shutil.copy(model / "tiny-Q4_K_M.gguf", model / "mmproj.gguf")
    report = go(model, tmp_path / "out")
    assert {left.path for left in report.plan.left_out} == {"tiny-Q4_K_M.gguf", "mmproj.gguf"}
    go(model, tmp_path / "gguf", exclude=("*.safetensors",))
    assert files_of(tmp_path / "gguf") == files_of(model)


# --------------------------------------------------------------------------------------------------------- refused


def test_a_part_that_is_missing_is_named(model: Path, tmp_path: Path, go: Run) -> None:
    go(model, tmp_path / "out", size=SIZE)
    next((tmp_path / "out").glob("*-00002-of-*.gguf")).unlink()
    with pytest.raises(BadIndex, match="file 2 of [0-9]+ is missing"):
        go(tmp_path / "out", tmp_path / "again")


def test_names_and_keys_of_parts_must_agree(model: Path, tmp_path: Path, go: Run) -> None:
    parts = tmp_path / "parts"
    go(model, parts, size=SIZE)
    first, second = sorted(parts.glob("*.gguf"))[:2]
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(second, alone / "renamed.gguf")
    with pytest.raises(BadIndex, match="renamed.gguf: its split keys say number 2 of [0-9]+"):
        go(alone, tmp_path / "out")
    swapped = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(swapped)
    with pytest.raises(BadIndex, match="say number 2 of [0-9]+, but it is number 1 of [0-9]+"):
        go(parts, tmp_path / "out")


def test_what_a_gguf_cannot_be_asked_for_is_refused(model: Path, tmp_path: Path, go: Run) -> None:
    with pytest.raises(UsageError, match="--dtype does not apply to GGUF"):
        go(model, tmp_path / "out", dtype="float16")
    with pytest.raises(UsageError, match="--align does not apply to GGUF"):
        go(model, tmp_path / "out", align=4096)
    for dtype in ("keep", "float16"):
        with pytest.raises(NotDequantized, match="is a GGUF model") as refused:
            go(model, tmp_path / "out", dtype=dtype, dequantize=True)
        assert "remove --dequantize and --dtype" in refused.value.next_step
    with pytest.raises(ModelCheckRequired, match="llama.cpp"):
        go(model, tmp_path / "out", require="model")
    with pytest.raises(Oversize, match="ffn_down"):
        go(model, tmp_path / "out", size=30_000, oversize="fail")
    (model / "broken.gguf").write_bytes(b"GGUF\3\0\0\0" + b"\xff" * 96)
    with pytest.raises(BadHeader, match=r"broken\.gguf"):
        go(model, tmp_path / "out")
    ggufs.save_odd(model / "broken.gguf")
    with pytest.raises(NotRead, match=r"broken\.gguf: 'a' \(tensor type 31\)"):
        go(model, tmp_path / "out")
    go(model, tmp_path / "out", exclude=("broken.gguf",))
    alone = tmp_path / "alone"
    shutil.copytree(model, alone, ignore=lambda *_: ["tiny-Q4_K_M.gguf", "broken.gguf"])
    ggufs.save(alone / "mmproj.gguf", {"v": ("F16", (4,))})
    with pytest.raises(NoWeights, match=r"mmproj\.gguf"):
        go(alone, tmp_path / "out")


def test_no_tensor_gets_a_longer_name_than_llama_cpp_takes(tmp_path: Path, go: Run) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    ggufs.save(folder / "tiny.gguf", {"a": ("F32", (4,)), "b": ("F32", (4,))})
    go(folder, out, rename=((("^a$", "ä" * 31 + "a"),)))
    assert ggufs.read(out / "tiny.gguf").tensors.keys() == {"ä" * 31 + "a", "b"}
    with pytest.raises(BadRename, match="is 64 bytes long, but names in this GGUF model can have at most 63"):
        go(folder, out, rename=(("^a$", "ä" * 32),))
    long = "first_stage_model." * 5
    ggufs.save(folder / "tiny.gguf", {long: ("F32", (4,)), "b": ("F32", (4,))})
    go(folder, out, rename=(("^b$", "c" * len(long)),))
    with pytest.raises(BadRename, match="at most 90"):
        go(folder, out, rename=(("^b$", "c" * 91),))


# ------------------------------------------------------------------------------------------------------- the sizes


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
    st.integers(200, 3000),
    st.integers(0, 1500),
    st.sampled_from([32, 256]),
    st.sampled_from(sorted(PACKINGS)),
)
@example([3, 1, 1], 486, 214, 32, "balanced")
@settings(max_examples=examples(100))
def test_every_file_keeps_to_the_size_unless_one_tensor_is_larger(
    lengths: list[int], limit: int, text: int, alignment: int, pack: str
) -> None:
    entries = [
        Entry(Tensor(f"blk.{i // 3}.t{i}", "F32", (n * 4,), (Piece(0, i * 1000, (0,), (n * 4,)),)), "F32")
        for i, n in enumerate(lengths)
    ]
    keys = GgufKeys(
        {
            "general.alignment": (4).to_bytes(4, "little") + alignment.to_bytes(4, "little"),
            "text": (8).to_bytes(4, "little") + text.to_bytes(8, "little") + bytes(text),
        }
    )
    bins = first_first(PACKINGS[pack](entries, limit, keys), limit, keys)
    assert sorted(e.name for one in bins for e in one) == sorted(e.name for e in entries)
    count = len(bins)
    sizes = [file_size(one, keys.part(i, count, len(entries))) for i, one in enumerate(bins)]
    assert all(bins)
    assert all(size <= limit or len(one) == 1 for size, one in zip(sizes, bins, strict=True))
    later = keys.part(1, 2, len(entries))
    for one, size in list(zip(bins, sizes, strict=True))[1:]:
        assert size <= limit or file_size(one, later) > limit
    if sizes[0] > limit and count > 1:
        beside = keys.part(0, count, len(entries))
        assert all(file_size([e], beside) > limit for e in entries), "one that fits beside the keys comes first"
    if file_size(entries, keys.part(0, 1, len(entries))) <= limit:
        assert count == 1
