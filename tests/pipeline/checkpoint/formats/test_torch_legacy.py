"""Torch files of before the zip format: equal to `torch.load`; lies about lengths are refused."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.pipeline.checkpoint.formats.torch_files import read_torch
from reshard.pipeline.errors import BadArchive, BadLength, BadPickle, CheckpointError, UnsafePickle, Unsupported
from reshard.pipeline.tensors import StoredFile
from tests.support.canary import touch
from tests.support.examples import examples
from tests.support.pieces import Disk, content, flat_memory, stored

MIB = 1 << 20


def saved(folder: Path, value: object) -> Path:
    path = folder / "pytorch_model.bin"
    torch.save(value, path, _use_new_zipfile_serialization=False)
    return path


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().clone().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_equal_to_torch(path: Path, expected: dict[str, torch.Tensor]) -> None:
    files = stored(path.parent, path.name)
    contents = read_torch(Disk(path.parent).read, files[0], 0)
    assert {t.name: t.shape for t in contents.tensors} == {name: tuple(t.shape) for name, t in expected.items()}
    for tensor in contents.tensors:
        assert content(tensor, files, path.parent) == bits(expected[tensor.name])


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_that_torch_reads_is_read(tmp_path: Path, protocol: int) -> None:
    state = {f"layer.{i}.weight": torch.randn(3, 4) for i in range(1000)}  # more than one frame
    path = tmp_path / "pytorch_model.bin"
    torch.save(state, path, pickle_protocol=protocol, _use_new_zipfile_serialization=False)
    assert_equal_to_torch(path, torch.load(path, weights_only=False))


def test_dtypes_views_and_ties(tmp_path: Path) -> None:
    base = torch.randn(6, 4)
    state = {
        "base": base,
        "tied": base,
        "transposed": base.T,
        "part": base[1:3, ::2],
        "expanded": base[:1].expand(5, 4),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "half": torch.randn(3).half(),
        "bfloat16": torch.randn(3).bfloat16(),
        "ids": torch.arange(4),
        "mask": torch.tensor([True, False]),
        "complex": torch.randn(3, dtype=torch.complex64),
    }
    path = saved(tmp_path, state)
    assert_equal_to_torch(path, torch.load(path, weights_only=True))
    (file,) = stored(tmp_path)
    contents = read_torch(Disk(tmp_path).read, file, 0)
    assert contents.ties == (("base", "tied"),)
    assert all(record.crc32 is None for record in contents.records)


def test_dtypes_without_a_storage_class_of_their_own(tmp_path: Path) -> None:
    state = {"u16": torch.arange(5).to(torch.uint16), "f8": torch.randn(3).to(torch.float8_e4m3fn)}
    assert_equal_to_torch(saved(tmp_path, state), state)


def test_what_is_left_out_may_hold_what_safetensors_cannot(tmp_path: Path) -> None:
    state = {"w": torch.randn(3)}
    other = {"m": [torch.zeros(3, dtype=torch.complex128)]}
    assert_equal_to_torch(saved(tmp_path, {"optimizer": other, "model": state, "epoch": 2}), state)


def test_a_front_longer_than_the_first_read(tmp_path: Path) -> None:
    state = {f"a.rather.long.name.of.layer.{i}.weight": torch.full((2,), float(i)) for i in range(3000)}
    path = saved(tmp_path, state)
    (file,) = stored(tmp_path)
    disk = Disk(tmp_path)
    tensors = read_torch(disk.read, file, 0).tensors
    assert len(tensors) == 3000
    assert len(disk.requests) <= 6
    assert content(tensors[2999], [file], path.parent) == bits(state[tensors[2999].name])


def test_a_view_of_a_part_of_a_storage_as_the_oldest_files_name_it(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.arange(6.0)})
    data = path.read_bytes()
    # The last member of the storage's persistent id is None: put (key, first element, elements) there.
    assert data.count(b"K\x06Nt") == 1
    data = data.replace(b"K\x06Nt", b"K\x06X\x01\x00\x00\x00vK\x02K\x03\x87t")
    data = data.replace(b"K\x00K\x06\x85", b"K\x00K\x03\x85")
    path.write_bytes(data)
    assert_equal_to_torch(path, {"w": torch.arange(2.0, 5.0)})
    path.write_bytes(data.replace(b"K\x02K\x03\x87", b"K\x04K\x03\x87"))
    with pytest.raises(BadPickle, match="outside its storage"):
        assert_equal_to_torch(path, {})


# ---------------------------------------------------------------------------------------------------------- lies


def test_nothing_is_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    path = saved(tmp_path, {"w": torch.zeros(2), "x": touch(canary)})
    with pytest.raises(UnsafePickle, match="system when unpickled; nothing was run"):
        assert_equal_to_torch(path, {})
    assert not canary.exists()
    torch.load(path, weights_only=False)
    assert canary.exists()


def test_files_that_are_shorter_or_longer_than_their_storages(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.arange(600.0), "v": torch.arange(3.0)})
    data = path.read_bytes()
    for changed in (data[:-1], data + b"\0", data[:-100]):
        path.write_bytes(changed)
        with pytest.raises(BadLength, match=r"pytorch_model\.bin is [\d,]+ bytes, but its header requires [\d,]+"):
            assert_equal_to_torch(path, {})


def test_a_storage_that_counts_other_elements_than_its_tensors(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.arange(600.0)})
    data = path.read_bytes()
    path.write_bytes(data.replace(struct.pack("<q", 600), struct.pack("<q", 2**40)))
    with flat_memory(MIB), pytest.raises(BadArchive, match="not the size its tensors need"):
        assert_equal_to_torch(path, {})


def test_a_lazy_view_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.zeros(2, dtype=torch.complex64).conj()})
    with pytest.raises(Unsupported, match=r"w \(a lazy view"):
        assert_equal_to_torch(path, {})


def honest_file() -> bytes:
    buffer = io.BytesIO()
    weight = torch.arange(12.0).reshape(3, 4)
    torch.save({"a": weight, "b": weight.T, "c": weight[1].clone()}, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


HONEST = honest_file()


@given(st.lists(st.tuples(st.integers(0, len(HONEST) - 1), st.integers(0, 255)), max_size=4), st.integers(0, 60))
@settings(max_examples=examples(300))
def test_a_damaged_file_gives_tensors_inside_of_it_or_an_error_of_ours(
    changes: list[tuple[int, int]], cut: int
) -> None:
    data = bytearray(HONEST)
    for at, value in changes:
        data[at] = value
    if cut > 50:
        del data[-cut:]

    def read(file: StoredFile, start: int, stop: int, /) -> Iterator[memoryview]:
        assert 0 <= start < stop <= len(data)
        yield memoryview(data)[start:stop]

    try:
        contents = read_torch(read, StoredFile("x.bin", len(data)), 0)
    except CheckpointError as error:
        assert "x.bin" in str(error)
        return
    for tensor in contents.tensors:
        (piece,) = tensor.pieces
        last = piece.offset + sum((n - 1) * s for n, s in zip(piece.shape, piece.strides or (), strict=False))
        assert 0 <= piece.offset <= last <= len(data)
