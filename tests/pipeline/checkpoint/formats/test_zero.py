"""ZeRO checkpoints put together equal the model that was trained; parts of several are refused, and nothing is run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reshard.pipeline.checkpoint.formats.zero import read_zero
from reshard.pipeline.errors import (
    BadArchive,
    BadIndex,
    BadPickle,
    BadTiling,
    CheckpointError,
    DuplicateTensor,
    LostPart,
    NotRead,
    UnsafePickle,
)
from reshard.pipeline.planning.ranges import runs
from reshard.pipeline.tensors import Contents, StoredFile
from tests.support.canary import touch
from tests.support.examples import examples
from tests.support.pieces import Disk, assert_holds, content, flat_memory, stored
from tests.support.save_zero import Zero, model_path, optimizer_path, save, training

MIB = 1 << 20


def opened(folder: Path, disk: Disk | None = None) -> tuple[Contents, list[StoredFile]]:
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.pt"))
    ends = ("_optim_states.pt", "/fp32.pt", "_model_states.pt")
    files = stored(folder, *(name for end in ends for name in names if name.endswith(end)))
    return read_zero((disk or Disk(folder)).read, files), files


def assert_equal(folder: Path, expected: dict[str, torch.Tensor]) -> Contents:
    contents, files = opened(folder)
    assert_holds(contents.tensors, files, folder, expected)
    return contents


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_any_stage_of_any_number_of_ranks(stage: int, ranks: int, tmp_path: Path) -> None:
    made = training(stage, ranks)
    contents = assert_equal(made.save(tmp_path), made.expected())
    assert contents.ties == (("embed.weight", "head.weight"),)
    assert all(runs(tensor) is not None for tensor in contents.tensors), "no tensor needs gathering"


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_that_are_aligned_one_by_one(stage: int, tmp_path: Path) -> None:
    made = training(stage, 3, gap=3)
    assert_equal(made.save(tmp_path), made.expected())


def test_the_optimizer_for_bfloat16_which_names_no_stage(tmp_path: Path) -> None:
    """It divides as stage 1 does, and keeps the padding."""
    made = training(1, 3)
    folder = made.save(tmp_path)
    for rank in range(3):
        state = made.optimizer(rank)
        for key in ("zero_stage", "loss_scaler", "dynamic_loss_scale", "overflow"):
            del state["optimizer_state_dict"][key]
        state["optimizer_state_dict"]["group_paddings"] = [0, 0]
        flat = state["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        longest = [one.numel() for one in made.partition(0)]
        flat[:] = [torch.cat([one, torch.full((n - len(one),), 7.0)]) for one, n in zip(flat, longest, strict=True)]
        save(state, optimizer_path(folder, rank))
    assert_equal(folder, made.expected())


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
def test_a_stage_that_was_lost_is_refused_whichever_ranks_lost_it(ranks: tuple[int, ...], tmp_path: Path) -> None:
    """`zero_to_fp32` takes no stage as no ZeRO checkpoint; here every rank has to say it, also at stage 1."""
    made = training(1, 2)
    folder = made.save(tmp_path)
    for rank in ranks:
        state = made.optimizer(rank)
        state["optimizer_state_dict"]["group_paddings"] = [0, 0]  # as the optimizers of all stages have it
        del state["optimizer_state_dict"]["zero_stage"]
        save(state, optimizer_path(folder, rank))
    with pytest.raises(BadPickle, match=f"rank_{ranks[0]}_.*no zero_stage"):
        opened(folder)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_universal_checkpoint(stage: int, tmp_path: Path) -> None:
    made = training(stage)
    assert_equal(made.save_universal(tmp_path), made.expected())


def test_a_vocabulary_that_lost_its_padding_has_the_shape_of_its_file(tmp_path: Path) -> None:
    made = training(2)
    folder = made.save_universal(tmp_path)
    shorter = made.state["embed.weight"][:10].float().clone()
    path = folder / "zero" / "embed.weight" / "fp32.pt"
    save({"param": shorter, "cat_dim": 0, "vocab_tensor": True}, path)
    assert_equal(folder, made.expected() | {"embed.weight": shorter, "head.weight": shorter})
    save({"param": shorter, "cat_dim": 0}, path)
    with pytest.raises(BadTiling, match=r"embed.weight .* the file has \[10, 3\], but the model has \[11, 3\]"):
        opened(folder)


@given(st.data())
@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_shapes_in_any_groups(tmp_path: Path, data: st.DataObject) -> None:
    stage, ranks = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    shapes = data.draw(st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=6))
    random = torch.Generator().manual_seed(1)
    state = {f"w{i}": torch.randn(shape, generator=random) for i, shape in enumerate(shapes)}
    cut = data.draw(st.integers(0, len(state)))
    groups = [group for group in (list(state)[:cut], list(state)[cut:]) if group]
    home = tmp_path / str(len(list(tmp_path.iterdir())))
    made = Zero(state, stage, ranks, groups, gap=data.draw(st.integers(0, 3)) if stage < 3 else 0)
    assert_equal(made.save(home), made.expected())


def test_what_is_given_to_no_optimizer_is_taken_from_the_model_and_noted(tmp_path: Path) -> None:
    made = training(1)  # where DeepSpeed's own script loses it
    contents = assert_equal(made.save(tmp_path), made.expected())
    assert contents.notes == (
        ".: merged the optimizer weights of a DeepSpeed ZeRO checkpoint (stage 1, 2 ranks)",
        "mp_rank_00_model_states.pt: used for 2 tensors that no optimizer has, such as frozen.weight",
    )


def test_neither_moments_nor_weights_are_read(tmp_path: Path) -> None:
    made = Zero({"w": torch.empty(3_000_000)}, 3, 2, [["w"]])
    disk = Disk(made.save(tmp_path))
    contents, _ = opened(disk.root, disk)
    assert disk.bytes_read < 300_000
    names = {record.name.partition("/")[2] for record in contents.records}
    assert len(names) == 1 and len(contents.records) == 2, "of each rank's file the weights' record alone"


def test_the_steps_of_an_optimizer_may_be_numbers_or_missing(tmp_path: Path) -> None:
    made = training(3)
    folder = made.save(tmp_path)
    for rank in range(2):
        state = made.optimizer(rank)
        for moments in state["optimizer_state_dict"]["optimizer_state_dict"]["state"].values():
            moments["step"] = 3 if rank else 4
        save(state, optimizer_path(folder, rank))
    with pytest.raises(BadIndex, match="rank_1.* not the same step as .*rank_0"):
        opened(folder)
    for rank in range(2):
        state = made.optimizer(rank)
        state["optimizer_state_dict"]["optimizer_state_dict"] = None
        save(state, optimizer_path(folder, rank))
    assert_equal(folder, made.expected())


# ------------------------------------------------------------------------------- what does not belong together, or lies

Change = Callable[[Path, Zero], object]


def optimizer(change: Callable[[dict[str, Any]], object], rank: int = 1) -> Change:
    def apply(folder: Path, made: Zero) -> None:
        state = made.optimizer(rank)
        change(state["optimizer_state_dict"])
        save(state, optimizer_path(folder, rank))

    return apply


def model(change: Callable[[dict[str, Any]], object]) -> Change:
    def apply(folder: Path, made: Zero) -> None:
        for rank in range(made.ranks if made.stage == 3 else 1):
            state = made.model(rank)
            change(state)
            save(state, model_path(folder, rank, made.stage))

    return apply


def other(ranks: int = 2, **changes: Any) -> Change:
    return lambda folder, made: save(training(made.stage, ranks, **changes).optimizer(1), optimizer_path(folder, 1))


def groups(state: dict[str, Any]) -> Any:
    return state["fp32_flat_groups" if "fp32_flat_groups" in state else "single_partition_of_fp32_groups"]


def put(i: int, tensor: torch.Tensor) -> Callable[[dict[str, Any]], object]:
    return lambda state: groups(state).__setitem__(i, tensor)


def shape(name: str, *size: int) -> Callable[[dict[str, Any]], object]:
    def change(content: dict[str, Any]) -> None:
        (group,) = (group for group in content["param_shapes"] if name in group)
        group[name] = torch.Size(size)

    return change


def frozen(name: str, *size: int) -> Callable[[dict[str, Any]], object]:
    return lambda content: content["frozen_param_shapes"].update({name: torch.Size(size)})


def nested(depth: int) -> object:
    """So many bytes are compared 2**depth times with those of another file."""
    return () if depth == 0 else (nested(depth - 1),) * 2


def both_stages(*changes: tuple[str, Change, type[CheckpointError], str]) -> list[Any]:
    return [
        pytest.param(stage, change, error, why, id=f"{name}, stage {stage}")
        for name, change, error, why in changes
        for stage in (2, 3)
    ]


@pytest.mark.parametrize(
    ("stage", "change", "error", "why"),
    both_stages(
        ("another step", other(step=8), BadIndex, "rank_1.* not the same step as .*rank_0"),
        ("another world", other(ranks=3), BadIndex, "one of 3 ranks, but there are files from 2"),
        ("another stage", optimizer(lambda s: s.update(zero_stage=1)), CheckpointError, "groups|partitions"),
        ("another dtype", optimizer(lambda s: put(0, groups(s)[0].double())(s)), BadIndex, "not the same groups as"),
        ("a group less", optimizer(lambda s: groups(s).pop()), BadIndex, "not the same groups as"),
        ("no groups", optimizer(lambda s: groups(s).clear()), BadIndex, "not the same groups as"),
        ("a short partition", optimizer(put(0, torch.zeros(3))), BadTiling, "elements, but"),
        ("a long partition", optimizer(put(0, torch.zeros(3000))), BadTiling, "elements, but"),
        ("offloaded", optimizer(put(0, torch.zeros(0))), BadTiling, "elements, but"),
        ("no array", optimizer(put(0, torch.zeros(3, 4))), NotRead, r"group 0 \(F32\[3, 4\]\) is not supported"),
        ("integers", optimizer(put(0, torch.zeros(30, dtype=torch.int32))), NotRead, "I32"),
        ("holes", optimizer(put(0, torch.zeros(99)[::2])), NotRead, "group 0"),
        ("no tensor", optimizer(lambda s: groups(s).__setitem__(0, 3)), BadPickle, "group 0 is not a tensor"),
        ("no stage", optimizer(lambda s: s.update(zero_stage=7)), BadPickle, "stage 1, 2 or 3"),
        ("a lost stage", optimizer(lambda s: s.pop("zero_stage")), BadPickle, "no zero_stage"),
        ("no count", optimizer(lambda s: s.update(partition_count=None)), BadPickle, "one set of ranks"),
        ("several counts", optimizer(lambda s: s.update(partition_count=[2, 1])), BadPickle, "one set of ranks"),
        ("a count of -1", optimizer(lambda s: s.update(partition_count=-1)), BadPickle, "one set of ranks"),
        ("experts", optimizer(lambda s: s.update(ds_zero_partition_groups=[{}])), NotRead, "experts"),
        ("experts, model", model(lambda c: c.update(ds_autoep_layers=[])), NotRead, "experts"),
        ("terabytes", model(shape("embed.weight", 2**40, 2**20)), BadTiling, "elements, but"),
        ("less", model(shape("embed.weight", 1, 3)), BadTiling, "elements, but"),
        ("a scalar", model(shape("embed.weight")), BadTiling, "elements, but"),
        ("no shapes", model(lambda c: c.update(param_shapes=None)), BadPickle, "no list of the parameters"),
        ("odd shapes", model(lambda c: c.update(param_shapes=[{"w": "x"}])), BadPickle, "malformed"),
        ("twice", model(lambda c: c["param_shapes"][1].update(c["param_shapes"][0])), DuplicateTensor, "param_shapes"),
        ("again", model(lambda c: c.update(param_shapes=c["param_shapes"][:1] * 9)), DuplicateTensor, "param_shapes"),
        ("a bomb", model(lambda c: c.update(global_steps=nested(16))), BadPickle, "global_steps is not a count"),
        ("no module", model(lambda c: c.update(module=3)), BadPickle, "module is not a dictionary"),
        ("frozen, larger", model(frozen("frozen.bias", 9)), BadTiling, "parts of frozen.bias .* do not have all"),
        ("frozen, unknown", model(frozen("x", 1)), BadTiling, "parts of x"),
        (
            "frozen and trained",
            model(lambda c: (c["param_shapes"][1].update({"frozen.bias": torch.Size([0])}))),
            DuplicateTensor,
            "frozen.bias",
        ),
    ),
)  # fmt: skip
def test_what_does_not_belong_together_is_refused(
    stage: int, change: Change, error: type[CheckpointError], why: str, tmp_path: Path
) -> None:
    made = training(stage)
    folder = made.save(tmp_path)
    change(folder, made)
    with flat_memory(4 * MIB), pytest.raises(error, match=why):
        opened(folder)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_whose_files_are_missing_is_named_and_no_file_is_called_corrupt(stage: int, tmp_path: Path) -> None:
    folder = training(stage).save(tmp_path)
    for path in folder.glob("*zero_pp_rank_1_*"):
        path.unlink()
    with pytest.raises(LostPart, match="one of 2 ranks, but the file of rank 1 is missing") as error:
        opened(folder)
    assert "corrupt" not in error.value.next_step


def test_ranks_whose_models_differ_are_refused(tmp_path: Path) -> None:
    made = training(3)
    folder = made.save(tmp_path)
    for state in (training(3, step=8).model(1), made.model(1) | {"param_shapes": []}):
        save(state, model_path(folder, 1, 3))
        with pytest.raises(BadIndex, match="zero_pp_rank_1.* not the same step and model as .*rank_0"):
            opened(folder)


def test_values_that_are_no_tensors_are_counted_where_there_are_many(tmp_path: Path) -> None:
    made = training(2)
    folder = made.save(tmp_path)
    state = made.model(0)
    state["module"] |= {f"extra{i}": i for i in range(100)}
    save(state, model_path(folder, 0, 2))
    skipped = [note for note in opened(folder)[0].notes if "skipped" in note]
    assert len(skipped) == 21 and skipped[-1].endswith("skipped 80 more values")


def test_a_parameter_that_no_rank_holds_is_refused_by_name(tmp_path: Path) -> None:
    made = training(3)
    folder = made.save(tmp_path)
    for rank in range(2):
        state = made.model(rank)
        state["module"]["lost.weight"] = torch.empty(0)
        save(state, model_path(folder, rank, 3))
    with pytest.raises(BadTiling, match="the parts of lost.weight do not add up to the whole: no rank has any of it"):
        opened(folder)


def test_universal_parameters_that_are_missing_or_unknown(tmp_path: Path) -> None:
    folder = training(2).save_universal(tmp_path)
    (folder / "zero" / "scale").rename(folder / "zero" / "other")
    with pytest.raises(BadIndex, match="parameter scale has no file under `zero`"):
        opened(folder)
    shutil.copytree(folder / "zero" / "other", folder / "zero" / "scale")
    with pytest.raises(BadIndex, match=r"other/fp32.pt: the model has no such parameter"):
        opened(folder)


@pytest.mark.parametrize("kind", ["optimizer", "model", "parameter", "unknown class"])
def test_nothing_in_the_files_is_run(kind: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    made = training(2)
    folder = made.save_universal(tmp_path) if kind == "parameter" else made.save(tmp_path)
    if kind == "optimizer":
        save(made.optimizer(1) | {"x": touch(canary)}, optimizer_path(folder, 1))
    elif kind == "model":
        save(made.model(0) | {"x": touch(canary)}, model_path(folder, 0, 2))
    elif kind == "parameter":
        save({"param": torch.ones(7), "x": touch(canary)}, folder / "zero" / "norm.weight" / "fp32.pt")
    else:
        save(made.model(0) | {"x": Path}, model_path(folder, 0, 2))
    with pytest.raises(UnsafePickle, match="nothing was run"):
        opened(folder)
    assert not canary.exists()


def test_a_file_that_is_no_archive_is_named(tmp_path: Path) -> None:
    folder = training(2).save(tmp_path)
    optimizer_path(folder, 1).write_bytes(b"\0" * 4096)
    with pytest.raises(BadArchive, match="rank_1_mp_rank_00_optim_states.pt"):
        opened(folder)


@given(st.data())
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_is_refused_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    stage = data.draw(st.integers(2, 3))
    honest = tmp_path / f"honest-{stage}"
    folder = honest / "global_step9"
    if not honest.exists():
        training(stage).save(honest)
    damaged_folder = tmp_path / "damaged"
    shutil.rmtree(damaged_folder, ignore_errors=True)
    shutil.copytree(folder, damaged_folder)
    path = data.draw(st.sampled_from(sorted(damaged_folder.iterdir())))
    damaged = bytearray(path.read_bytes())
    for at in data.draw(st.lists(st.integers(0, len(damaged) - 1), min_size=1, max_size=4)):
        damaged[at] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged)
    try:
        contents, files = opened(damaged_folder)
    except CheckpointError:
        return
    for tensor in contents.tensors:
        content(tensor, files, damaged_folder)


# --------------------------------------------------------------------------------------------- by the real DeepSpeed

# What it needs beside torch; built without its operators, which need compilers and are not used here.
DEEPSPEED = ("deepspeed==0.19.8", "hjson==3.1.0", "py-cpuinfo==9.0.0", "einops==0.8.2", "msgpack==1.2.4")
DEEPSPEED += ("ninja==1.13.2", "nvidia-ml-py==13.615.71")
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64}


@pytest.fixture(scope="module")
def deepspeed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, from PyPI."""
    folder = tmp_path_factory.mktemp("deepspeed")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-qq",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(folder),
    ]
    done = subprocess.run(
        [*command, *DEEPSPEED], env=os.environ | {"DS_BUILD_OPS": "0"}, capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"DeepSpeed cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_deepspeed_saved_is_what_its_own_script_makes_of_it(deepspeed: Path, ranks: int, tmp_path: Path) -> None:
    root = Path(__file__).parents[4]
    subprocess.run(
        [sys.executable, "-m", "tests.support.save_deepspeed", str(tmp_path), str(ranks)],
        # In a folder of its own, where no build that was killed has left a lock, which is waited for without an end.
        env=os.environ | {"PYTHONPATH": f"{root}:{deepspeed}", "TORCH_EXTENSIONS_DIR": str(deepspeed / "extensions")},
        check=True,
        timeout=1200,
        cwd=root,
    )
    for layout in ("zero1", "zero2", "zero3", "zero3-subgroups"):
        expected = torch.load(tmp_path / f"{layout}-fp32.bin", weights_only=True)
        for step in ("global_step2", "global_step2_universal"):
            folder = tmp_path / layout / step
            contents, files = opened(folder)
            # Frozen parameters are lost by the script in stage 1, and floating buffers become float32.
            more = {"frozen.weight", "frozen.bias"} if layout == "zero1" else set()
            assert {tensor.name for tensor in contents.tensors} == expected.keys() | more, f"{layout}/{step}"
            for tensor in contents.tensors:
                found = torch.frombuffer(bytearray(content(tensor, files, folder)), dtype=DTYPES[tensor.dtype])
                wanted = expected.get(tensor.name)
                if wanted is not None:
                    assert torch.equal(found.reshape(tensor.shape).to(wanted.dtype), wanted), (
                        f"{layout}/{step}/{tensor.name}"
                    )
