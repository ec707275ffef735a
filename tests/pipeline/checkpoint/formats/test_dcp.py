"""Distributed checkpoints made by real torch processes read back equal; hostile ones are refused and run nothing."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
import zlib
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from reshard.pipeline.checkpoint.formats.dcp import is_sharded, merged, read_dcp
from reshard.pipeline.checkpoint.formats.rank_files import read_ranks
from reshard.pipeline.checkpoint.formats.safetensors import parse_header
from reshard.pipeline.errors import (
    BadArchive,
    BadIndex,
    BadPickle,
    BadTiling,
    CheckpointError,
    UnsafePath,
    UnsafePickle,
    Unsupported,
)
from reshard.pipeline.planning.ranges import runs
from reshard.pipeline.tensors import Contents, Piece, StoredFile, Tensor
from tests.support.canary import touch
from tests.support.examples import examples
from tests.support.pieces import Disk, assert_holds, flat_memory, stored
from tests.support.stuck import STUCK

MIB = 1 << 20


def opened(folder: Path, disk: Disk | None = None) -> tuple[Contents, list[StoredFile]]:
    files = [file for file in stored(folder) if file.path.endswith(".distcp")]
    (metadata,) = stored(folder, ".metadata")
    return read_dcp((disk or Disk(folder)).read, metadata, files), files


# ------------------------------------------------------------------------------------------- made by real processes


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 3], ids=["2 ranks", "3 ranks"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dcp")
    subprocess.run(
        [sys.executable, "-m", "tests.support.save_dcp", str(folder), str(request.param)],
        check=True,
        timeout=STUCK,
        cwd=Path(__file__).parents[4],
    )
    return folder


def expected_of(made: Path, name: str = "expected.bin") -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = torch.load(made / name, weights_only=True)
    return loaded


@pytest.mark.parametrize("layout", ["fsdp2-flat", "fsdp2-nested", "trainer", "columns"])
def test_every_layout_equals_the_model_of_one_process(made: Path, layout: str) -> None:
    contents, files = opened(made / layout)
    assert_holds(contents.tensors, files, made / layout, expected_of(made))


@pytest.mark.parametrize("original", [True, False])
def test_fsdp1_with_and_without_original_parameters(made: Path, original: bool) -> None:
    folder = made / f"fsdp1-{original}"
    contents, files = opened(folder)
    assert_holds(contents.tensors, files, folder, expected_of(made, f"fsdp1-{original}.bin"))


@pytest.mark.parametrize(
    ("layout", "expected"),
    [("ranks", "expected.bin"), ("ranks-True", "fsdp1-True.bin"), ("ranks-False", "fsdp1-False.bin")],
)
def test_the_files_that_each_rank_saved_itself_hold_the_same(made: Path, layout: str, expected: str) -> None:
    files = stored(made / layout)
    contents = read_ranks(Disk(made / layout).read, files)
    assert_holds(contents.tensors, files, made / layout, expected_of(made, expected))


def test_what_a_trainer_keeps_beside_the_weights_is_listed(made: Path) -> None:
    contents, _ = opened(made / "trainer")
    assert contents.notes == (
        ".metadata: using the weights under model",
        ".metadata: skipped optim (a dictionary of 2, with tensors)",
        ".metadata: skipped step (a value that is not a tensor)",
        ".metadata: skipped loss (a tensor)",
    )


def test_row_shards_need_no_gathering_and_columns_do(made: Path) -> None:
    rows, _ = opened(made / "fsdp2-flat")
    assert all(runs(tensor) is not None for tensor in rows.tensors)
    columns, _ = opened(made / "columns")
    assert {tensor.name for tensor in columns.tensors if runs(tensor) is None} >= {"embed.weight", "conv.weight"}


def test_small_chunks_share_one_request_per_file(made: Path) -> None:
    disk = Disk(made / "fsdp2-flat")
    _, files = opened(made / "fsdp2-flat", disk)
    assert len(disk.requests) == 1 + len(files)


def test_of_large_chunks_only_the_ends_are_read(tmp_path: Path) -> None:
    made = Checkpoint(tmp_path)
    for name, elements in (("large", 150_000), ("larger", 500_000), ("small", 3000), ("edge", 700), ("tiny", 1)):
        made.tensor(name, torch.zeros(2 * elements), [((0,), (elements,)), ((elements,), (elements,))])
    disk = Disk(made.write())
    opened(tmp_path, disk)
    # Two files; in each the small chunks share a request, and the large ones are skipped over.
    assert len(disk.requests) <= 1 + 2 * 3
    assert disk.bytes_read < 80_000


def test_every_chunk_has_its_checksum(made: Path) -> None:
    contents, files = opened(made / "fsdp2-flat")
    pieces = {(p.file, p.offset) for tensor in contents.tensors for p in tensor.pieces}
    records = {(record.file, record.start): record for record in contents.records}
    assert pieces <= set(records)
    for record in contents.records:
        data = (made / "fsdp2-flat" / files[record.file].path).read_bytes()[record.start : record.stop]
        assert record.crc32 == zlib.crc32(data)


def safetensors_parts(folder: Path) -> tuple[list[tuple[str, Contents]], list[StoredFile]]:
    files = stored(folder)
    parts = []
    for number, file in enumerate(files):
        header = parse_header((folder / file.path).read_bytes(), file=file.path, file_size=file.size)
        parts.append((file.path, Contents(tuple(header.as_tensors(number)), metadata=header.metadata)))
    return parts, files


def test_the_safetensors_form_equals_the_model_of_one_process(made: Path) -> None:
    parts, files = safetensors_parts(made / "safetensors")
    assert all(is_sharded(part.metadata) for _, part in parts)
    expected = {name: t for name, t in expected_of(made).items() if t.ndim and name != "head.weight"}
    assert_holds(merged(parts), files, made / "safetensors", expected)


def test_the_safetensors_form_without_one_of_its_files_has_a_gap(made: Path) -> None:
    parts, _ = safetensors_parts(made / "safetensors")
    with pytest.raises(BadTiling, match="no part covers the elements at"):
        merged(parts[1:])


# ------------------------------------------------------------------------------- written with torch's own types


class Checkpoint:
    """A checkpoint in the making: torch's metadata and chunk by chunk, each of which a test may change first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metadata: Any = Metadata({}, {}, {})
        self.files: dict[str, bytearray] = {}

    def tensor(
        self,
        name: str,
        full: torch.Tensor,
        boxes: list[tuple[tuple[int, ...], tuple[int, ...]]],
        *,
        path: tuple[Any, ...] | None = None,
        file: Callable[[int], str] = "__{}_0.distcp".format,
        chunk: Callable[[torch.Tensor], object] = lambda part: part,
    ) -> None:
        described = []
        for number, (at, shape) in enumerate(boxes):
            part = full[tuple(slice(a, a + n) for a, n in zip(at, shape, strict=True))].clone()
            described.append(ChunkStorageMetadata(torch.Size(at), torch.Size(shape)))
            buffer = io.BytesIO()
            torch.save(chunk(part), buffer)
            data = self.files.setdefault(file(number), bytearray())
            place = _StorageInfo(file(number), len(data), len(buffer.getvalue()))
            self.metadata.storage_data[MetadataIndex(name, torch.Size(at), number)] = place
            data += buffer.getvalue()
        properties = TensorProperties(full.dtype)
        self.metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, full.shape, described)
        self.metadata.planner_data[name] = path or (name,)

    def info(self, name: str, at: tuple[int, ...]) -> Any:
        return self.metadata.storage_data[MetadataIndex(name, torch.Size(at))]

    def write(self) -> Path:
        self.folder.mkdir(exist_ok=True)
        (self.folder / ".metadata").write_bytes(pickle.dumps(self.metadata))
        for name, data in self.files.items():
            path = self.folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        return self.folder


def halves(folder: Path, **changes: Any) -> Checkpoint:
    made = Checkpoint(folder)
    made.tensor("w", torch.arange(24.0).reshape(4, 6), [((0, 0), (2, 6)), ((2, 0), (2, 6))], **changes)
    return made


def test_the_checkpoint_that_the_lies_start_from_is_honest(tmp_path: Path) -> None:
    folder = halves(tmp_path).write()
    contents, files = opened(folder)
    assert_holds(contents.tensors, files, folder, {"w": torch.arange(24.0).reshape(4, 6)})


@given(st.data())
@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_grid_of_chunks_in_any_order_and_in_any_files(tmp_path: Path, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=3)))
    full = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    cuts = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=2))}) if n else [0, 0] for n in shape]
    boxes = [
        (tuple(a for a, _ in box), tuple(b - a for a, b in box))
        for box in product(*(list(pairwise(cut)) for cut in cuts))
    ]
    boxes = data.draw(st.permutations(boxes))
    names = data.draw(st.lists(st.sampled_from(["a.distcp", "b.distcp", "deep/c.distcp"]), min_size=len(boxes)))
    transpose = data.draw(st.booleans())
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    made = Checkpoint(folder)
    # A chunk may be stored with its axes the other way round, as a transposed parameter is.
    flip = tuple(reversed(range(len(shape))))
    chunk = (lambda part: part.permute(flip).contiguous().permute(flip)) if transpose else (lambda part: part)
    made.tensor("w", full, boxes, file=names.__getitem__, chunk=chunk)
    contents, files = opened(made.write())
    assert_holds(contents.tensors, files, folder, {"w": full})


@pytest.mark.parametrize(
    ("boxes", "why"),
    [
        ([((0, 0), (2, 6))], r"no part covers the elements at \[2, 0\]"),
        ([((0, 0), (3, 6)), ((2, 0), (2, 6))], "overlaps another"),
        # An overlap and a gap of one size: the sum of the volumes is right.
        ([((0, 0), (2, 6)), ((1, 0), (2, 6))], "overlaps another"),
        ([((0, 0), (2, 3)), ((0, 3), (2, 3)), ((2, 0), (2, 3)), ((2, 2), (2, 3))], "overlaps another"),
        ([((0, 0), (2, 6)), ((2, 0), (2, 5))], r"no part covers the elements at \[2, 5\]"),
        ([], "no parts"),
    ],
)
def test_chunks_that_overlap_or_leave_a_gap_are_refused(
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], why: str, tmp_path: Path
) -> None:
    made = Checkpoint(tmp_path)
    made.tensor("w", torch.arange(24.0).reshape(4, 6), boxes)
    with pytest.raises(BadTiling, match=rf"the parts of w do not add up to the whole: .*{why}"):
        opened(made.write())


def lie_about_size(made: Checkpoint, size: tuple[int, ...]) -> None:
    made.metadata.state_dict_metadata["w"].size = torch.Size(size)


LIES: dict[str, tuple[Callable[[Checkpoint], object], type[CheckpointError], str]] = {
    "a path that leaves the folder": (
        lambda c: setattr(c.info("w", (0, 0)), "relative_path", "../../secret.distcp"),
        UnsafePath,
        "points outside the repository",
    ),
    "an absolute path": (
        lambda c: setattr(c.info("w", (0, 0)), "relative_path", "/etc/passwd"),
        UnsafePath,
        "points outside the repository",
    ),
    "a path with a backslash": (
        lambda c: setattr(c.info("w", (0, 0)), "relative_path", "..\\x"),
        UnsafePath,
        "points outside the repository",
    ),
    "a file that is not there": (
        lambda c: setattr(c.info("w", (0, 0)), "relative_path", "__9_0.distcp"),
        BadIndex,
        "__9_0.distcp is missing",
    ),
    "a transformation": (
        lambda c: setattr(c.info("w", (0, 0)), "transform_descriptors", ["zstd"]),
        Unsupported,
        r"w \(compressed or encrypted\)",
    ),
    "a chunk behind the end": (
        lambda c: setattr(c.info("w", (0, 0)), "length", 1 << 40),
        BadArchive,
        "extends past the end",
    ),
    "a negative place": (lambda c: setattr(c.info("w", (0, 0)), "offset", -1), BadPickle, "malformed"),
    "a chunk at another place": (lambda c: setattr(c.info("w", (2, 0)), "offset", 64), BadArchive, "past the end"),
    "a chunk that is stored nowhere": (
        lambda c: c.metadata.storage_data.pop(MetadataIndex("w", torch.Size((2, 0)))),
        BadTiling,
        "is not stored",
    ),
    "chunks in one place": (
        lambda c: setattr(c.info("w", (2, 0)), "relative_path", "__0_0.distcp"),
        BadArchive,
        "overlaps another",
    ),
    "chunks of another size": (lambda c: lie_about_size(c, (4, 7)), BadTiling, "no part covers"),
    "chunks outside of the tensor": (lambda c: lie_about_size(c, (3, 6)), BadTiling, "extends outside"),
    "other dimensions": (lambda c: lie_about_size(c, (4, 6, 1)), BadTiling, "different number of dimensions"),
    "terabytes": (lambda c: lie_about_size(c, (2**40, 2**40)), BadTiling, "no part covers"),
    "another dtype": (
        lambda c: setattr(c.metadata.state_dict_metadata["w"].properties, "dtype", torch.int32),
        BadArchive,
        "is F32.*metadata says I32",
    ),
    "a dtype without a name": (
        lambda c: setattr(c.metadata.state_dict_metadata["w"].properties, "dtype", torch.complex128),
        Unsupported,
        r"w \(dtype complex128\)",
    ),
    "no storage at all": (lambda c: setattr(c.metadata, "storage_data", None), BadTiling, "is not stored"),
    "no state dict": (lambda c: setattr(c.metadata, "state_dict_metadata", None), BadPickle, "state_dict_metadata"),
    "an odd path": (lambda c: c.metadata.planner_data.update(w=("a",) * 99), BadPickle, "path of w is malformed"),
    "no tensors": (
        lambda c: c.metadata.state_dict_metadata.update(w=BytesStorageMetadata()),
        Unsupported,
        "without named tensors",
    ),
    "something unknown": (lambda c: c.metadata.state_dict_metadata.update(w=[]), BadPickle, "neither a tensor nor"),
}


@pytest.mark.parametrize("lie", LIES)
def test_metadata_that_lies_is_refused(lie: str, tmp_path: Path) -> None:
    change, error, why = LIES[lie]
    made = halves(tmp_path)
    change(made)
    folder = made.write()
    with flat_memory(4 * MIB), pytest.raises(error, match=why):
        opened(folder)


@pytest.mark.parametrize(
    ("chunk", "error", "why"),
    [
        (lambda part: part.T, BadArchive, r"is F32\[6, 2\], but .metadata says F32\[2, 6\]"),
        (lambda part: part.double(), BadArchive, "is F64"),
        (lambda part: {"w": part}, BadArchive, "is not a tensor"),
        (lambda part: 3, BadArchive, "is not a tensor"),
    ],
)
def test_chunks_that_are_not_what_the_metadata_says_are_refused(
    chunk: Callable[[torch.Tensor], object], error: type[CheckpointError], why: str, tmp_path: Path
) -> None:
    folder = halves(tmp_path, chunk=chunk).write()
    with pytest.raises(error, match=why):
        opened(folder)


def test_nothing_in_the_metadata_or_in_a_chunk_is_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    in_metadata = halves(tmp_path / "a")
    in_metadata.metadata.planner_data["w"] = touch(canary)
    in_chunk = halves(tmp_path / "b", chunk=lambda part: {"w": part, "x": touch(canary)})
    for made in (in_metadata, in_chunk):
        with pytest.raises(UnsafePickle, match="system when unpickled; nothing was run"):
            opened(made.write())
        assert not canary.exists()
    pickle.loads((tmp_path / "a" / ".metadata").read_bytes())  # noqa: S301
    assert canary.exists()


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        ({"a": ("a",), "b.c": ("b.c",)}, ["a", "b.c"]),
        ({"app.model.a": ("app", "model", "a"), "app.optim.a": ("app", "optim", "a")}, ["a"]),
        ({"model.a": ("model", "a"), "ema.a": ("ema", "a")}, ["a"]),
        ({"model.a": ("model.a",), "model.b": ("model.b",)}, ["model.a", "model.b"]),  # a name, and no nesting
        ({"a": ("a",), "optimizer.a": ("optimizer", "a")}, ["a"]),
    ],
)
def test_the_weights_are_found_where_the_saver_nested_them(
    paths: dict[str, tuple[str, ...]], names: list[str], tmp_path: Path
) -> None:
    made = Checkpoint(tmp_path)
    for name, path in paths.items():
        made.tensor(name, torch.zeros(2), [((0,), (2,))], path=path)
    contents, _ = opened(made.write())
    assert [tensor.name for tensor in contents.tensors] == names


def test_an_optimizers_state_is_told_by_its_name_where_no_path_is_there(tmp_path: Path) -> None:
    """As in checkpoints of Megatron's, which are saved as they are."""
    made = Checkpoint(tmp_path)
    for name in ("decoder.a", "optimizer.state.exp_avg.decoder.a"):
        made.tensor(name, torch.zeros(2), [((0,), (2,))], path=(name,))
    made.metadata.planner_data = None
    contents, _ = opened(made.write())
    assert [tensor.name for tensor in contents.tensors] == ["decoder.a"]
    assert contents.notes == (".metadata: skipped optimizer (a dictionary of 1, with tensors)",)


def test_several_models_are_refused_by_name(tmp_path: Path) -> None:
    made = Checkpoint(tmp_path)
    for name in ("actor", "critic"):
        made.tensor(f"{name}.w", torch.zeros(2), [((0,), (2,))], path=(name, "w"))
    with pytest.raises(Unsupported, match=r"several dictionaries of tensors \(actor, critic\)"):
        opened(made.write())


def test_metadata_of_torch_before_it_recorded_paths(tmp_path: Path) -> None:
    made = halves(tmp_path)
    made.metadata.planner_data = None
    contents, _ = opened(made.write())
    assert [tensor.name for tensor in contents.tensors] == ["w"]


HONEST = pickle.dumps(halves(Path("unused")).metadata)


@given(st.lists(st.tuples(st.integers(0, len(HONEST) - 1), st.integers(0, 255)), max_size=4))
@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_metadata_gives_tensors_or_an_error_of_ours(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    folder = halves(tmp_path).write()
    data = bytearray(HONEST)
    for at, value in changes:
        data[at] = value
    (folder / ".metadata").write_bytes(data)
    try:
        contents, _ = opened(folder)
    except CheckpointError as error:
        assert ".metadata" in str(error) or ".distcp" in str(error)
    else:
        assert contents.tensors


# ----------------------------------------------------------------------------------------------------- safetensors


def part(path: str, tensors: dict[str, tuple[int, ...]], info: str, dtype: str = "F32") -> tuple[str, Contents]:
    found = (Tensor(n, dtype, shape, (Piece(0, 0, (0,) * len(shape), shape),)) for n, shape in tensors.items())
    return path, Contents(tuple(found), metadata={"DCP_SHARDING_INFO": info} if info else {})


@pytest.mark.parametrize(
    ("parts", "error", "why"),
    [
        ([part("a", {"w": (2,)}, "")], BadIndex, "is not JSON"),
        ([part("a", {"w": (2,)}, "[" * 100_000)], BadIndex, "is not JSON"),
        ([part("a", {"w": (2,)}, "[]")], BadIndex, "no position for w"),
        ([part("a", {"w": (2,)}, '{"w": 3}')], BadIndex, "of w is malformed"),
        ([part("a", {"w": (2,)}, '{"w": {"saved_offsets": [-1]}}')], BadIndex, "of w is malformed"),
        ([part("a", {"w": (2,)}, '{"w": {"saved_offsets": [0, 0]}}')], BadIndex, "no position for w"),
        ([part("a", {"w": (2,)}, '{"w": {"saved_offsets": [1]}}')], BadTiling, "no part covers"),
        (
            [part(n, {"w": (2,)}, '{"w": {"saved_offsets": [0]}}') for n in "ab"],
            BadTiling,
            "overlaps another",
        ),
        (
            [
                part("a", {"w": (2,)}, '{"w": {"saved_offsets": [0]}}'),
                part("b", {"w": (2,)}, '{"w": {"saved_offsets": [2]}}', "F16"),
            ],
            BadTiling,
            "different dtypes",
        ),
        (
            [
                part("a", {"w": (2, 2)}, '{"w": {"saved_offsets": [0, 0]}}', "F4"),
                part("b", {"w": (2, 2)}, '{"w": {"saved_offsets": [0, 2]}}', "F4"),
            ],
            Unsupported,
            r"w \(parts of rows of F4",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    parts: list[tuple[str, Contents]], error: type[CheckpointError], why: str
) -> None:
    with pytest.raises(error, match=why):
        merged(parts)
