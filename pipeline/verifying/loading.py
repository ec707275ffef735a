"""`verify --load`: the model is loaded for real, wherever it lies, and answers one question.

A loader reads folders, so what lies on a Hub is fetched for as long as it takes; there has to be room for it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from reshard.pipeline.check import Check, Result
from reshard.pipeline.checkpoint.formats.safetensors import SUFFIX
from reshard.pipeline.copying.stream import Tick
from reshard.pipeline.errors import DiskFull
from reshard.pipeline.places import Folder
from reshard.pipeline.protocols import Source
from reshard.pipeline.tensors import StoredFile
from reshard.pipeline.verifying.load import LoadCheck, LoadOptions, compare_loads, load
from reshard.pipeline.verifying.meta_load import Reload


def check_load(
    output: Source,
    source: Source | None,
    reload: Reload,
    options: LoadOptions,
    tick: Tick,
    tmpdir: Path | None,
) -> Check:
    """Whether the model of the root folder loads and runs; with ``source``, whether it gives its output bit for bit.

    Raises DiskFull when what has to be fetched does not fit into ``tmpdir``, DeviceMapIncomplete, and what stores
    raise.
    """
    level = f"loaded by {options.loader}, one forward pass"
    if not _files(output):
        return Check("load", "skipped", level, "no safetensors files and config.json are at the top of it")
    comparable = source is not None and bool(_files(source))
    with ExitStack() as fetched:
        here = fetched.enter_context(_as_folder(output, tick, tmpdir))
        if source is not None and comparable:
            there = fetched.enter_context(_as_folder(source, tick, tmpdir))
            found = compare_loads(reload, there, here, options)
        else:
            found = load(reload, here, options)
    result, reason = _judged(found, alone=source is None)
    if result == "failed":
        return Check("load", result, level, "", _figures(found), (f"the model: {reason}",))
    return Check("load", result, level, reason, _figures(found))


def _judged(found: LoadCheck, alone: bool) -> tuple[Result, str]:
    """A model that runs on made-up parameters proves nothing alone: some are made so, and others lost them."""
    if found.result == "equal":
        return "passed", found.reason
    if found.result != "loaded":
        return found.result, found.reason
    if not alone:
        untold = "the source is in no format that is loaded here, so there is nothing to compare with"
        return "inconclusive", f"{found.reason}; {untold}"
    if found.in_no_file:
        return "inconclusive", f"{found.reason}; --against tells whether the source has them"
    return "passed", found.reason


def _figures(found: LoadCheck) -> dict[str, object]:
    """What was counted; nothing where nothing was tried."""
    if found.result == "skipped":
        return {}
    named: dict[str, object] = {"class_name": found.class_name} if found.class_name else {}
    lacking: dict[str, object] = {"in_no_file": len(found.in_no_file)} if found.in_no_file else {}
    seen = {"seconds": round(found.seconds, 1), "peak_rss": found.peak_rss}
    return {**named, **lacking, **seen, **_placed(found.placement)}


def _placed(placement: Mapping[str, int]) -> dict[str, int]:
    return {f"blocks_on_{device}": count for device, count in placement.items() if device}


def _files(source: Source) -> list[StoredFile]:
    """What the loader reads, if the root holds a model that it reads."""
    files = source.files()
    weights = [f for path, f in files.items() if "/" not in path and path.endswith((SUFFIX, f"{SUFFIX}.index.json"))]
    return [files["config.json"], *weights] if weights and "config.json" in files else []


@contextmanager
def _as_folder(source: Source, tick: Tick, tmpdir: Path | None) -> Iterator[Path]:
    if isinstance(source.place, Folder):
        yield Path(source.place.path)
        return
    wanted = _files(source)
    with tempfile.TemporaryDirectory(prefix="reshard-load-", dir=tmpdir) as scratch:
        needed, free = sum(file.size for file in wanted), shutil.disk_usage(scratch).free
        if needed > free:
            raise DiskFull(path=scratch, needed=needed, free=free)
        for file in wanted:
            with Path(scratch, file.path).open("wb") as handle:
                for view in source.read(file, 0, file.size):
                    handle.write(view)
                    tick(len(view))
        yield Path(scratch)
