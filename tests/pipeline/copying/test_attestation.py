"""What says that a source's bytes are right: every record of every archive, wherever it lies and whatever its name."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from reshard.pipeline.check import Check
from reshard.pipeline.checkpoint.discover import find_checkpoints
from reshard.pipeline.checkpoint.open import open_checkpoints
from reshard.pipeline.copying.hashing import FileHasher, HashedRange, Range
from reshard.pipeline.errors import SourceCorrupt
from reshard.pipeline.places import Folder
from reshard.pipeline.reshard import Report
from reshard.pipeline.stores.folder.source import FolderSource
from reshard.pipeline.tensors import Record, StoredFile
from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.pipeline.verifying.verify import verify
from tests.pipeline.conftest import Run
from tests.support.stuck import STUCK

# Those that the others resemble are left to `make test-all`.
LAYOUTS = [
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp1-True", "fsdp1-False", "fsdp2-flat")),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp2-nested", "columns")),
    "trainer",
    "grid",
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder a layout, as four processes of torch write it."""
    folder = tmp_path_factory.mktemp("dcp")
    subprocess.run([sys.executable, "-m", "tests.support.save_dcp", str(folder), "4"], check=True, timeout=STUCK)
    return folder


def source_of(folder: Path) -> FolderSource:
    return FolderSource.open(Folder(path=str(folder)))


def records_of(folder: Path) -> list[tuple[Path, Record]]:
    """Every record that holds a part of the weights, and its file; those without bytes hold nothing to flip."""
    source = source_of(folder)
    opened = open_checkpoints(source, find_checkpoints(source))
    (checkpoint,) = opened.checkpoints
    return [(folder / opened.files[record.file].path, record) for record in checkpoint.records]


def chunks_by_torch(folder: Path, prefix: str = "") -> list[tuple[str, range]]:
    """By torch's own metadata: the file and the place in it of every chunk of a weight that has bytes."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    found = []
    for index, place in metadata.storage_data.items():
        saved = metadata.state_dict_metadata[index.fqn]
        if index.fqn.startswith(prefix) and isinstance(saved, TensorStorageMetadata):
            (chunk,) = [chunk for chunk in saved.chunks if chunk.offsets == index.offset]
            if chunk.sizes.numel():
                found.append((place.relative_path, range(place.offset, place.offset + place.length)))
    return found


@contextmanager
def flipped(path: Path, at: int) -> Iterator[None]:
    """One bit of one byte is another one."""
    with path.open("r+b") as file:

        def flip() -> None:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1]))
            file.flush()

        flip()
        yield
        flip()


def named(report: Report, name: str) -> Check:
    (found,) = [check for check in report.checks if check.name == name]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_flip_in_any_chunk_of_a_distributed_checkpoint_is_told_and_nothing_published(
    saved: Path, tmp_path: Path, go: Run, meta_loader: MetaLoader, layout: str
) -> None:
    records = records_of(saved / layout)
    report = go(saved / layout, tmp_path / "whole")
    assert set(report.attested.values()) == {"crc"}
    figures = named(report, "copy").figures
    assert figures["records"] == figures["records_compared"] == len(records)
    full = [(path, record) for path, record in records if record.stop > record.start]
    assert len(full) > 8 and len({path for path, _ in full}) > 1
    chunks = chunks_by_torch(saved / layout, "model." if layout == "trainer" else "")
    for name, span in chunks:
        assert len([path for path, record in full if path.name == name and record.start in span]) == 1
    assert len(full) == len(chunks)
    for path, record in full:
        with flipped(path, (record.start + record.stop) // 2):
            with pytest.raises(SourceCorrupt, match=f"{path.name}, record .* at byte {record.start}, "):
                go(saved / layout, tmp_path / "out")
            assert not (tmp_path / "out").exists()
            (stored,) = [c for c in verify(source_of(saved / layout), None, meta_loader, deep=True) if c.findings]
            assert stored.name == "stored bytes" and f"at byte {record.start}," in stored.findings[0]
    assert {check.result for check in verify(source_of(saved / layout), None, meta_loader, deep=True)} <= {
        "passed",
        "skipped",
    }


def without_sums(file: StoredFile, ranges: Iterable[HashedRange[Range]], records: Sequence[Record]) -> FileHasher:
    return FileHasher(file, ranges, [replace(record, crc32=None) for record in records])


def test_an_output_that_equals_a_damaged_archive_does_not_pass(
    saved: Path, tmp_path: Path, go: Run, meta_loader: MetaLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "source"
    shutil.copytree(saved / "grid", folder)
    path, record = max(records_of(folder), key=lambda found: found[1].stop - found[1].start)
    with flipped(path, record.start):
        # As somebody without sums would have copied it.
        with monkeypatch.context() as blind:
            blind.setattr("reshard.pipeline.copying.loop.FileHasher", without_sums)
            go(folder, tmp_path / "out")
        checks = verify(source_of(tmp_path / "out"), source_of(folder), meta_loader, deep=True)
        (bytes_,) = [check for check in checks if check.name == "same bytes"]
        assert bytes_.result == "failed" and bytes_.figures["differ"] == 0
        assert f"{path.name}, record" in bytes_.findings[0]


def test_a_file_with_one_record_without_a_sum_is_as_delivered(tmp_path: Path, go: Run, meta_loader: MetaLoader) -> None:
    folder = tmp_path / "source"
    before = torch.serialization.get_crc32_options()
    dcp.save({"a": torch.ones(3000), "b": torch.ones(4000)}, checkpoint_id=folder, no_dist=True)
    ((path, first), (_, second)) = records_of(folder)
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save({"a": torch.ones(3000), "b": torch.ones(4000)}, checkpoint_id=tmp_path / "bare", no_dist=True)
    finally:
        torch.serialization.set_crc32_options(before)
    # One archive of each kind in one file, as two versions of a trainer would leave them.
    halves = [(tmp_path / "bare" / path.name).read_bytes(), path.read_bytes()]
    assert len(halves[0]) == len(halves[1])
    middle = halves[0].index(b"PK\x05\x06") + 22
    assert first.stop < middle < second.start
    path.write_bytes(halves[0][:middle] + halves[1][middle:])
    report = go(folder, tmp_path / "out")
    assert report.attested == {path.name: "as delivered"}
    figures = named(report, "copy").figures
    assert (figures["records_compared"], figures["records"]) == (1, 2)
    (stored,) = [
        check for check in verify(source_of(folder), None, meta_loader, deep=True) if check.name == "stored bytes"
    ]
    assert stored.result == "inconclusive" and stored.figures["attested"] == 0
    assert (stored.figures["records_compared"], stored.figures["records"]) == (1, 2)
    # The sum that is there is still held against.
    with flipped(path, second.start), pytest.raises(SourceCorrupt, match=f"at byte {second.start},"):
        go(folder, tmp_path / "again")
