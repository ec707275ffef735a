"""Rank files put together again equal the model; ranks that do not belong together are refused, and nothing is run."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from reshard.pipeline.checkpoint.formats.rank_files import read_ranks
from reshard.pipeline.errors import (
    BadArchive,
    BadIndex,
    BadPickle,
    BadTiling,
    CheckpointError,
    NotRead,
    UnsafePickle,
    Unsupported,
)
from reshard.pipeline.planning.ranges import runs
from reshard.pipeline.tensors import Contents, StoredFile
from tests.support.canary import touch
from tests.support.examples import examples
from tests.support.pieces import Disk, assert_holds, content, flat_memory, stored
from tests.support.save_ranks import as_rank, by_rows, by_rows_in_replicas, part_of, rank_path, save_ranks

MIB = 1 << 20
STATE = {
    "embed": torch.arange(33.0).reshape(11, 3),  # a number of rows that no number of ranks divides
    "tiny": torch.arange(2, dtype=torch.bfloat16),  # the last ranks have none of it
    "conv": torch.arange(24.0).reshape(4, 3, 2, 1),
    "count": torch.tensor(7),
}


def opened(folder: Path, disk: Disk | None = None) -> tuple[Contents, list[StoredFile]]:
    files = stored(folder, *(path.name for path in sorted(folder.iterdir())))
    return read_ranks((disk or Disk(folder)).read, files), files


def assert_equal(folder: Path, expected: dict[str, torch.Tensor]) -> Contents:
    contents, files = opened(folder)
    assert_holds(contents.tensors, files, folder, expected)
    return contents


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_rows_of_any_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    save_ranks(tmp_path, STATE, (ranks,))
    contents = assert_equal(tmp_path, STATE)
    assert all(runs(tensor) is not None for tensor in contents.tensors), "rows need no gathering"


def test_of_replicas_the_first_is_taken(tmp_path: Path) -> None:
    save_ranks(tmp_path, STATE, (2, 2), by_rows_in_replicas)
    contents = assert_equal(tmp_path, STATE)
    assert {piece.file for tensor in contents.tensors for piece in tensor.pieces} == {0, 1}


def test_what_is_repeated_comes_from_the_first_rank_and_is_noted(tmp_path: Path) -> None:
    save_ranks(tmp_path, STATE, (2,), lambda name, t: [Replicate()])
    contents = assert_equal(tmp_path, STATE)
    assert contents.notes == (
        "merged the files of 2 ranks",
        "model_world_size_2_rank_0.pt: used for 4 tensors that every rank has in full",
    )


@pytest.mark.parametrize("placed", [None, Replicate()])
def test_copies_that_differ_are_refused(placed: Placement | None, tmp_path: Path) -> None:
    for rank in range(2):
        with as_rank(rank, (2,)) as mesh:
            mine = torch.full((4, 4), float(rank))
            state = {"w": mine if placed is None else part_of(mine, mesh, [placed]), "same": torch.ones(3)}
            torch.save(state, rank_path(tmp_path, rank, 2))
    with pytest.raises(BadTiling, match=r"rank_1\.pt: the parts of w .*rank_0\.pt has different values for the same"):
        opened(tmp_path)


def test_any_one_dimension_may_be_divided(tmp_path: Path) -> None:
    save_ranks(tmp_path, STATE, (2,), lambda name, t: [Shard(t.ndim - 1)] if t.ndim else None)
    assert_equal(tmp_path, STATE)


def test_tied_parts_stay_tied_and_every_storage_has_its_checksum(tmp_path: Path) -> None:
    for rank in range(2):
        with as_rank(rank, (2,)) as mesh:
            tied = part_of(STATE["embed"], mesh, [Shard(0)])
            torch.save({"embed": tied, "head": tied, "other": STATE["embed"]}, rank_path(tmp_path, rank, 2))
    contents = assert_equal(tmp_path, dict.fromkeys(("embed", "head", "other"), STATE["embed"]))
    assert contents.ties == (("embed", "head"),)
    assert all(record.crc32 is not None for record in contents.records)


def test_a_wrapper_is_entered_and_what_lies_beside_it_is_named(tmp_path: Path) -> None:
    for rank in range(2):
        with as_rank(rank, (2,)) as mesh:
            model = {"embed": part_of(STATE["embed"], mesh, [Shard(0)])}
            torch.save({"model": model, "step": 3}, rank_path(tmp_path, rank, 2))
    notes = assert_equal(tmp_path, {"embed": STATE["embed"]}).notes
    assert notes[1:] == (
        "model_world_size_2_rank_0.pt: using the weights under model",
        "model_world_size_2_rank_0.pt: skipped step (int 3)",
    )


def test_planning_reads_no_storage(tmp_path: Path) -> None:
    save_ranks(tmp_path, {"w": torch.zeros(1_000_000)})
    disk = Disk(tmp_path)
    opened(tmp_path, disk)
    assert disk.bytes_read < 200_000


# ------------------------------------------------------------------------------------ ranks that do not belong together


def other(folder: Path, rank: int, state: dict[str, torch.Tensor], mesh: Sequence[int] = (2,), name: int = 1) -> None:
    """Let the file of rank ``name`` be what rank ``rank`` saved of another state, or on another mesh."""
    with as_rank(rank, mesh) as here:
        torch.save({n: part_of(t, here, by_rows(n, t)) for n, t in state.items()}, rank_path(folder, name, 2))


def alone(folder: Path, tensor: Callable[[Any], object]) -> None:
    """Both files hold one tensor, which ``tensor`` makes on the mesh."""
    for rank in range(2):
        with as_rank(rank, (2,)) as mesh:
            torch.save({"w": tensor(mesh)}, rank_path(folder, rank, 2))


def made_up(mesh: Any, local: torch.Tensor, shape: tuple[int, ...], placement: Placement) -> DTensor:
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=strides)


def altered(mesh: Any, change: Callable[[DTensor], object]) -> DTensor:
    tensor = made_up(mesh, torch.ones(2, 3), (4, 3), Shard(0))
    change(tensor)
    return tensor


WRONG: dict[str, tuple[Callable[[Path], object], type[CheckpointError], str]] = {
    "another shape": (
        lambda f: other(f, 1, STATE | {"embed": torch.ones(12, 3)}),
        BadTiling,
        r"rank_1.pt: the parts of embed .* do not describe one tensor",
    ),
    "another dtype": (lambda f: other(f, 1, STATE | {"embed": STATE["embed"].half()}), BadTiling, "one tensor"),
    "another rank": (lambda f: other(f, 0, STATE), BadTiling, "the parts of embed .* on one mesh"),
    "another mesh": (lambda f: other(f, 1, STATE, (4,)), BadTiling, "the parts of embed .* no part covers"),
    "a name more": (
        lambda f: other(f, 1, STATE | {"x": torch.ones(3)}),
        BadIndex,
        "x is in this file or in .*rank_0.pt, but not in both",
    ),
    "a name less": (
        lambda f: other(f, 1, {"embed": STATE["embed"]}),
        BadIndex,
        "conv.* is in this file or in .*rank_0.pt, but not in both",
    ),
    "a rank's part that is too short": (
        lambda f: alone(f, lambda mesh: made_up(mesh, torch.ones(1, 3), (4, 3), Shard(0))),
        BadTiling,
        "no part covers the elements",
    ),
    "parts that overlap": (
        lambda f: alone(f, lambda mesh: made_up(mesh, torch.ones(3, 3), (4, 3), Shard(0))),
        BadTiling,
        "overlaps another|extends outside",
    ),
    "terabytes": (
        lambda f: alone(f, lambda mesh: made_up(mesh, torch.ones(2, 3), (2**40, 3), Shard(0))),
        BadTiling,
        "no part covers",
    ),
    "a sum that was not taken": (
        lambda f: alone(f, lambda mesh: made_up(mesh, torch.ones(4, 3), (4, 3), Partial())),
        NotRead,
        r"w \(placement Partial\) is not supported",
    ),
    "no mesh": (
        lambda f: alone(f, lambda mesh: altered(mesh, lambda t: setattr(t._spec, "mesh", None))),
        BadPickle,
        "expected a DeviceMesh",
    ),
    "no place on the mesh": (
        lambda f: alone(f, lambda mesh: altered(mesh, lambda t: setattr(t._spec.mesh, "_coordinate_on_dim", None))),
        BadPickle,
        "not placed on a mesh",
    ),
    "a place outside of it": (
        lambda f: alone(
            f, lambda mesh: altered(mesh, lambda t: setattr(t._spec.mesh, "_coordinate_on_dim", (10**15,)))
        ),
        BadTiling,
        "on one mesh",
    ),
    "a malformed placement": (
        lambda f: alone(f, lambda mesh: altered(mesh, lambda t: setattr(t._spec, "placements", (None,)))),
        BadPickle,
        "malformed placement",
    ),
    "a part of another dtype": (
        lambda f: alone(f, lambda mesh: altered(mesh, lambda t: setattr(t, "_local_tensor", torch.ones(2, 3).half()))),
        BadPickle,
        "w is F32, but its part is F16",
    ),
    "no part": (
        lambda f: alone(f, lambda mesh: altered(mesh, lambda t: setattr(t, "_local_tensor", None))),
        BadPickle,
        "not a well-formed DTensor",
    ),
    "no tensors": (lambda f: torch.save({"step": 3}, rank_path(f, 1, 2)), Unsupported, "without named tensors"),
    "no archive": (
        lambda f: rank_path(f, 1, 2).write_bytes(b"\0" * 4096),
        BadArchive,
        "rank_1.pt: no end record of a torch zip archive",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_belong_together_is_refused(wrong: str, tmp_path: Path) -> None:
    save_ranks(tmp_path, STATE)
    change, error, why = WRONG[wrong]
    change(tmp_path)
    with flat_memory(4 * MIB), pytest.raises(error, match=why):
        opened(tmp_path)


def test_what_several_dimensions_of_the_mesh_divide_is_refused(tmp_path: Path) -> None:
    save_ranks(tmp_path, {"w": torch.ones(4, 4)}, (2, 2), lambda name, t: [Shard(0), Shard(1)])
    with pytest.raises(NotRead, match=r"w \(split along several mesh dimensions\) is not supported"):
        opened(tmp_path)


def test_nothing_in_a_rank_file_is_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    folder = tmp_path / "model"
    save_ranks(folder, STATE)
    torch.save({**STATE, "x": touch(canary)}, rank_path(folder, 1, 2))
    with pytest.raises(UnsafePickle, match="rank_1.pt would run .*system when unpickled; nothing was run"):
        opened(folder)
    assert not canary.exists()


@given(st.data())
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_is_refused_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    honest = tmp_path / "honest"
    if not honest.exists():
        save_ranks(honest, STATE)
    folder = tmp_path / "damaged"
    shutil.copytree(honest, folder, dirs_exist_ok=True)
    path = rank_path(folder, data.draw(st.integers(0, 1)), 2)
    damaged = bytearray(path.read_bytes())
    for at in data.draw(st.lists(st.integers(0, len(damaged) - 1), min_size=1, max_size=4)):
        damaged[at] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged)
    try:
        contents, files = opened(folder)
    except CheckpointError:
        return
    for tensor in contents.tensors:
        content(tensor, files, folder)
