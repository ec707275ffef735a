"""`verify --load`: the model is loaded for real, wherever it lies, and answers one question.

A loader reads folders, so what lies on a Hub is fetched for as long as it takes; there has to be room for it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from reshard.pipeline.errors import DiskFull
from reshard.pipeline.formats.safetensors import SUFFIX
from reshard.pipeline.places import Folder
from reshard.pipeline.stores.protocols import Source
from reshard.pipeline.stream import Tick
from reshard.pipeline.tensors import StoredFile
from reshard.pipeline.verify.checks import Check, Result
from reshard.pipeline.verify.load import LoadCheck, compare_loads, load
from reshard.pipeline.verify.reload import Reload

_LEVEL = "loaded by transformers, one forward pass"


def check_load(
    output: Source,
    source: Source | None,
    reload: Reload,
    max_memory: Mapping[str, int] | None,
    tick: Tick,
    tmpdir: Path | None,
) -> Check:
    """Whether the model of the root folder loads and runs; with ``source``, whether it gives its output bit for bit.

    ``max_memory`` is bytes by device ("0", "cpu"); blocks beyond it are offloaded to disk. Raises DiskFull when what
    has to be fetched does not fit into ``tmpdir``, and what stores raise.
    """
    if not _files(output):
        return Check("load", "skipped", _LEVEL, "no safetensors files and config.json are at the top of it")
    comparable = source is not None and bool(_files(source))
    with ExitStack() as fetched:
        here = fetched.enter_context(_as_folder(output, tick, tmpdir))
        if source is not None and comparable:
            there = fetched.enter_context(_as_folder(source, tick, tmpdir))
            found = compare_loads(reload, there, here, max_memory=max_memory)
        else:
            found = load(reload, here, max_memory=max_memory)
    return _told(found, alone=source is None)


def _told(found: LoadCheck, alone: bool) -> Check:
    figures: dict[str, object] = {"class_name": found.class_name} if found.class_name else {}
    figures |= {"seconds": round(found.seconds, 1), "peak_rss": found.peak_rss, **_placed(found.placement)}
    reason = found.reason
    result: Result = "inconclusive"
    if found.result == "equal" or (found.result == "loaded" and alone):
        result = "passed"
    elif found.result == "loaded":
        reason += "; the source is in no format that is loaded here, so there is nothing to compare with"
    elif found.result == "failed" or found.result == "skipped":
        result = found.result
    findings = (f"the model: {reason}",) if result == "failed" else ()
    return Check("load", result, _LEVEL, "" if findings else reason, figures, findings)


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
