"""GGUF models of several makes, resharded through the product and read by llama.cpp's own Python package."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from reshard.pipeline.places import Folder
from reshard.pipeline.request import Options, Request
from reshard.pipeline.reshard import run
from reshard.pipeline.sizes import SINGLE
from reshard.pipeline.stores.connect import Context
from tests.support import ggufs

SPLIT = {"split.no", "split.count", "split.tensors.count"}


class GgufRow(NamedTuple):
    """One line of the table; a cell is ``equal``, or what differs."""

    what: str
    saved: str
    size: str
    written: str
    tensors: str
    keys: str
    carried: str


def _one(folder: Path) -> None:
    ggufs.save(folder / "tiny-Q4_K_M.gguf", ggufs.MODEL)


def _parts(folder: Path) -> None:
    ggufs.save(folder / "tiny-Q4_K_M.gguf", ggufs.MODEL, per_file=3)


def _aligned(folder: Path) -> None:
    ggufs.save(folder / "tiny-Q4_K_M.gguf", ggufs.MODEL, alignment=4096)


def _kinds(folder: Path) -> None:
    for kind in ("BF16", "IQ4_XS", "MXFP4", "Q8_0", "TQ2_0"):
        spec = {f"blk.{i}.weight": (kind, (256, 256)) for i in range(8)}
        ggufs.save(folder / kind / f"tiny-{kind}.gguf", spec, per_file=3 if kind == "BF16" else 0)
    ggufs.save(folder / "mmproj-F16.gguf", {"v.patch_embd.weight": ("F16", (64, 3, 14, 14))})


CASES: dict[str, tuple[Any, str, int]] = {
    "split": (_one, "one file", 200_000),
    "merged": (_parts, "5 parts", SINGLE),
    "re-cut": (_parts, "5 parts", 150_000),
    "kept in one file": (_one, "one file", SINGLE),
    "aligned to 4096": (_aligned, "one file", 200_000),
    "five quantizations and a projector": (_kinds, "4 files, 3 parts, mmproj", 200_000),
}


def gguf_rows() -> Iterator[GgufRow]:
    """The line of each case."""
    for what, (build, saved, size) in CASES.items():
        with tempfile.TemporaryDirectory() as scratch:
            source, target = Path(scratch, "model"), Path(scratch, "out")
            build(source)
            request = Request(
                source=Folder(path=str(source)), target=Folder(path=str(target)), options=Options(size=size)
            )
            report = run(request, Context.from_env())
            written = [len(output.shards) for output in report.plan.outputs]
            text = " + ".join(map(str, written)) + (" file" if written == [1] else " files")
            typed = "--single" if size == SINGLE else f"--size {size // 1000}kB"
            yield GgufRow(what, saved, typed, text, *_compared(source, target), _carried(source, target))


def _read(folder: Path) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """(keys, tensors) of every model by the start of its name."""
    found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for path in sorted(folder.rglob("tiny*.gguf")):
        one = ggufs.read(path)
        keys, tensors = found.setdefault(path.name.removesuffix(".gguf").partition("-0")[0], ({}, {}))
        if not keys:
            keys |= {key: value for key, value in one.keys.items() if key not in SPLIT}
        assert not tensors.keys() & one.tensors.keys()
        tensors |= one.tensors
    return found


def _compared(source: Path, target: Path) -> tuple[str, str]:
    theirs, ours = _read(source), _read(target)
    assert theirs.keys() == ours.keys()
    tensors = all(ours[name][1] == theirs[name][1] for name in theirs)
    keys = all(list(ours[name][0].items()) == list(theirs[name][0].items()) for name in theirs)
    return ("equal" if tensors else "WRONG"), ("equal" if keys else "WRONG")


def _carried(source: Path, target: Path) -> str:
    whole = [path.name for path in source.glob("mmproj*")]
    assert all((target / name).read_bytes() == (source / name).read_bytes() for name in whole)
    return ", ".join(f"`{name}`" for name in whole)
