"""Digests do not depend on how a checkpoint is stored; what differs is found, and nothing is read twice."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from blake3 import blake3
from safetensors.torch import save_file

from reshard.pipeline.checkpoint.discover import find_checkpoints
from reshard.pipeline.checkpoint.open import Opened, open_checkpoints
from reshard.pipeline.errors import SourceCorrupt
from reshard.pipeline.limits import MB, MEMORY_FLOOR
from reshard.pipeline.places import Folder
from reshard.pipeline.planning.model import Entry
from reshard.pipeline.protocols import Source
from reshard.pipeline.stores.folder.source import FolderSource
from reshard.pipeline.tensors import StoredFile, Tensor
from reshard.pipeline.verifying.digests import Stored, digests, first_difference, hashers_of
from tests.support.giants import save_sparse
from tests.support.measured import measured
from tests.support.models import arrays, numbered, save_sharded, save_single

State = dict[str, torch.Tensor]


def state() -> State:
    """Tensors of many kinds: straight, transposed, tied, strided, repeated, empty, a scalar, narrow ones."""
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(50, 40, generator=random)
    return {
        "weight": weight,
        "tied": weight,
        "transposed": torch.randn(20, 30, generator=random).t(),
        "columns": torch.randn(64, 16, generator=random)[:, 3:9],
        "repeated": torch.randn(1, 12, generator=random).expand(5, 12),
        "half": torch.randn(33, generator=random).to(torch.bfloat16),
        "eight": torch.randn(40, generator=random).to(torch.float8_e4m3fn),
        "counts": torch.arange(100),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3.5),
    }


def expected(tensors: State) -> dict[str, str]:
    """By torch and blake3 alone."""
    return {
        name: blake3(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, t in tensors.items()
    }


def packed(tensors: State) -> State:
    return {name: tensor.clone().contiguous() for name, tensor in tensors.items()}


class Counting:
    """A source that counts what is read of it, and may claim sha256s that it was not given."""

    def __init__(self, source: Source, sha256: dict[str, str] | None = None) -> None:
        self._source = source
        self._sha256 = sha256 or {}
        self.read_bytes = 0
        self.place, self.pin, self.visibility, self.transport = (
            source.place,
            source.pin,
            source.visibility,
            source.transport,
        )

    def files(self) -> dict[str, StoredFile]:
        return {
            path: StoredFile(path, file.size, sha256=self._sha256.get(path))
            for path, file in self._source.files().items()
        }

    def read(self, file: StoredFile, start: int, stop: int) -> Iterator[memoryview]:
        for view in self._source.read(file, start, stop):
            self.read_bytes += len(view)
            yield view


def opened(folder: Path, sha256: dict[str, str] | None = None) -> tuple[Counting, Opened]:
    source = Counting(FolderSource.open(Folder(path=str(folder))), sha256)
    return source, open_checkpoints(source, find_checkpoints(source))


def attested(found: Opened, source: Source) -> None:
    """Reads everything, with every hasher that the files allow."""
    (checkpoint,) = found.checkpoints
    digests(checkpoint, found.files, source, hashers=hashers_of(checkpoint, found.files))


def digests_of(folder: Path) -> dict[str, str]:
    source, found = opened(folder)
    (checkpoint,) = found.checkpoints
    found_digests = digests(checkpoint, found.files, source)
    return {name: digest.blake3 for name, digest in found_digests.items()}


def test_a_torch_file_and_two_cuts_of_safetensors_have_the_same_digests(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    torch.save(state(), tmp_path / "torch" / "pytorch_model.bin")
    (tmp_path / "one").mkdir()
    save_file(packed(state()), tmp_path / "one" / "model.safetensors")
    (tmp_path / "two").mkdir()
    names = sorted(state())
    for number, some in enumerate((names[::2], names[1::2]), 1):
        part = {name: tensor for name, tensor in packed(state()).items() if name in some}
        save_file(part, tmp_path / "two" / f"model-{number:05d}-of-00002.safetensors")
    for folder in ("torch", "one", "two"):
        assert digests_of(tmp_path / folder) == expected(state()), folder


def test_parts_of_tensors_in_several_files_are_put_together(tmp_path: Path) -> None:
    whole = {"w": torch.randn(8, 6), "v": torch.arange(10)}
    torch.distributed.checkpoint.save(whole, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert digests_of(tmp_path / "dcp") == expected(whole)


def test_names_that_share_their_bytes_are_read_once(tmp_path: Path) -> None:
    weight = torch.randn(500, 500)
    torch.save({name: weight for name in "abcd"}, tmp_path / "pytorch_model.bin")
    source, found = opened(tmp_path)
    before = source.read_bytes
    assert len(set(digests(found.checkpoints[0], found.files, source).values())) == 1
    assert source.read_bytes - before <= (tmp_path / "pytorch_model.bin").stat().st_size


def test_every_byte_is_read_once_and_held_against_the_files_sha256(tmp_path: Path) -> None:
    save_sharded(tmp_path, numbered(arrays(24, 4000), 4))
    paths = sorted(tmp_path.glob("*.safetensors"))
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    source, found = opened(tmp_path, sums)
    before = source.read_bytes
    attested(found, source)
    assert source.read_bytes - before == sum(path.stat().st_size for path in paths)
    wrong, found = opened(tmp_path, sums | {paths[2].name: sums[paths[0].name]})
    with pytest.raises(SourceCorrupt, match=paths[2].name):
        attested(found, wrong)


def test_an_archive_is_held_against_its_own_sums(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(5000)}, tmp_path / "pytorch_model.bin")
    content = bytearray((tmp_path / "pytorch_model.bin").read_bytes())
    source, found = opened(tmp_path)
    place = found.checkpoints[0].tensors[0].range
    assert place is not None
    content[place.start + 8] ^= 1
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    source, found = opened(tmp_path)
    with pytest.raises(SourceCorrupt, match=r"pytorch_model\.bin"):
        attested(found, source)


def stored(folder: Path, name: str) -> Stored:
    source, found = opened(folder)
    tensors: dict[str, Tensor] = {t.name: t for c in found.checkpoints for t in c.tensors}
    return Stored(Entry(tensors[name], tensors[name].dtype), found.files, source)


@pytest.mark.parametrize(
    ("dtype", "index"), [("float32", (0, 0)), ("float16", (699, 899)), ("float32", (431, 17)), ("int64", (300, 5))]
)
def test_the_first_element_that_differs_is_named_with_both_values(
    tmp_path: Path, dtype: str, index: tuple[int, int]
) -> None:
    one = np.ones((700, 900), dtype)
    other = one.copy()
    other[index] = 2
    other[699, 899] = 2
    save_single(tmp_path / "one", {"w": one})
    save_single(tmp_path / "other", {"w": other})
    found = first_difference(stored(tmp_path / "one", "w"), stored(tmp_path / "other", "w"))
    assert found is not None
    assert found.element == index
    assert (found.first.split()[0], found.second.split()[0]) in {("1.0", "2.0"), ("1", "2")}


def test_a_difference_is_found_across_layouts(tmp_path: Path) -> None:
    base = torch.randn(300, 200).t()
    changed = base.clone()
    changed[150, 7] = -changed[150, 7]
    torch.save({"w": base}, tmp_path / "pytorch_model.bin")
    (tmp_path / "st").mkdir()
    save_file({"w": changed.contiguous()}, tmp_path / "st" / "model.safetensors")
    found = first_difference(stored(tmp_path / "st", "w"), stored_torch(tmp_path))
    assert found is not None and found.element == (150, 7)


def stored_torch(folder: Path) -> Stored:
    source, found = opened(folder)
    (checkpoint,) = [c for c in found.checkpoints if found.files[c.files[0]].path == "pytorch_model.bin"]
    return Stored(Entry(checkpoint.tensors[0], checkpoint.tensors[0].dtype), found.files, source)


def test_equal_tensors_do_not_differ_and_packed_kinds_are_named_by_their_byte(tmp_path: Path) -> None:
    save_single(tmp_path / "a", {"w": np.arange(10, dtype=np.float32)})
    assert first_difference(stored(tmp_path / "a", "w"), stored(tmp_path / "a", "w")) is None
    for name, last in (("b", b"\x21"), ("c", b"\x31")):
        (tmp_path / name).mkdir()
        header = b'{"w":{"dtype":"F4","shape":[2,4],"data_offsets":[0,4]}}'
        header += b" " * (-len(header) % 8)
        content = len(header).to_bytes(8, "little") + header + b"\x10\x32\x54" + last
        (tmp_path / name / "model.safetensors").write_bytes(content)
    found = first_difference(stored(tmp_path / "b", "w"), stored(tmp_path / "c", "w"))
    assert found is not None
    assert (found.element, found.first, found.second) == ((1, 2), "0x21", "0x31")


@pytest.mark.parametrize("size", [200 * MB, 400 * MB])
def test_memory_does_not_grow_with_a_tensor(tmp_path: Path, size: int) -> None:
    save_sparse(tmp_path, iter([("w", "BF16", (size // 2000, 1000)), ("v", "F32", (10,))]), 1)
    cost = measured("tests.pipeline.verifying.jobs:do_digests", str(tmp_path))
    assert cost.result == 2
    assert cost.peak <= MEMORY_FLOOR
