"""`verify --load`: the model is loaded for real, with a device map, disk offload and a memory limit, and runs once.

The most expensive of the checks, and the only one that reads weights through the loaders that people use. Disk offload
follows the index tensor by tensor, so it also notices an index that names the wrong file. A loader reads folders, so a
repository is fetched for as long as it takes; there has to be room for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from reshard.pipeline.arguments import as_option, in_python
from reshard.pipeline.check import Check, Result
from reshard.pipeline.checkpoint.formats.safetensors import SUFFIX
from reshard.pipeline.copying.stream import Tick
from reshard.pipeline.errors import UsageError, shortened
from reshard.pipeline.limits import LOAD_CPU, LOAD_TIME
from reshard.pipeline.protocols import Source
from reshard.pipeline.request import Options
from reshard.pipeline.tensors import StoredFile
from reshard.pipeline.text import counted
from reshard.pipeline.verifying.child.server import Allowed
from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.pipeline.verifying.opened import UNCHANGED
from reshard.pipeline.verifying.tokenizer import fetched

Loader = Literal["transformers", "accelerate"]
# What accelerate and transformers call the maps that they infer.
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load: ``device_map`` is one of accelerate's words or devices by module, "disk" among them; ``max_memory``
    bytes by device ("0", "cpu"), beyond which blocks go to disk; ``memory`` the bytes that the process may hold of its
    own, mapped files not counted, beyond which it is ended (on Linux).

    Raises UsageError for anything else.
    """

    loader: Loader = "transformers"
    device_map: str | Mapping[str, str | int] = "auto"
    max_memory: Mapping[str, int] | None = None
    memory: int | None = None

    @in_python()
    def __post_init__(self) -> None:
        if self.loader not in get_args(Loader):
            raise _unusable("loader", f"one of {', '.join(get_args(Loader))}", self.loader)
        if self.device_map not in DEVICE_MAPS and not isinstance(self.device_map, Mapping):
            raise _unusable("device_map", f"one of {', '.join(DEVICE_MAPS)}, or devices by module", self.device_map)
        limits = {} if self.max_memory is None else self.max_memory
        if not isinstance(limits, Mapping) or not all(isinstance(d, str) and _is_size(n) for d, n in limits.items()):
            raise _unusable("max_memory", 'bytes by device, such as {"cpu": 2 * 10**9}', self.max_memory)
        if self.memory is not None and not _is_size(self.memory):
            raise _unusable("memory", "a number of bytes", self.memory)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _unusable(argument: str, words: str, given: object) -> UsageError:
    return UsageError(what=f"{argument} must be {words}, not {shortened(repr(given))}")


DEFAULTS = LoadOptions()


@dataclass(frozen=True, slots=True)
class LoadCheck:
    """``loaded``: it ran; ``equal``: with the source's output, bit for bit; ``failed``: it did not load or run, or gave
    another output; ``inconclusive``: cut short, or for want of something here that says nothing of the weights;
    ``skipped``: not tried. ``reason`` says why.
    """

    result: Literal["loaded", "equal", "failed", "inconclusive", "skipped"]
    reason: str
    class_name: str | None = None
    output: str | None = None  # sha256 over dtype, shape and bytes of what one forward pass gave
    placement: Mapping[str, int] = field(default_factory=dict)  # device -> entries of the device map
    in_no_file: tuple[str, ...] = ()  # parameters that were in no file and made up, as the same numbers on every load
    seconds: float = 0.0
    peak_rss: int = 0  # bytes


def load(meta_loader: MetaLoader, folder: Path, options: LoadOptions = DEFAULTS) -> LoadCheck:
    """Load ``folder`` (config.json and safetensors) and run one forward pass over fixed input.

    Raises DeviceMapIncomplete when a given map leaves a parameter without a device; never for what it checks.
    """
    arguments = {
        "folder": str(folder.resolve()),
        "loader": options.loader,
        "device_map": options.device_map,
        "max_memory": options.max_memory,
    }
    # Weights are mapped, so address space says nothing here; and offloaded blocks are files of any size.
    allowed = Allowed(seconds=LOAD_TIME, cpu=LOAD_CPU, memory=None, file=None, rss=options.memory)
    return meta_loader.ask("load", LoadCheck, json.dumps(arguments), allowed)


def compare_loads(meta_loader: MetaLoader, source: Path, output: Path, options: LoadOptions = DEFAULTS) -> LoadCheck:
    """``load`` both folders in the same way; ``equal`` when both answer alike, bit for bit."""
    before, after = (load(meta_loader, folder, options) for folder in (source, output))
    if before.result != "loaded":
        reason = f"the source cannot be loaded: {before.reason}"
        return replace(before, result="skipped" if before.result == "skipped" else "inconclusive", reason=reason)
    lost = sorted({*before.in_no_file} ^ {*after.in_no_file})
    if lost and (after.result == "loaded" or after.in_no_file):
        reason = f"parameters in no file differ from the source's: {', '.join(lost[:5])}"
        return replace(after, result="failed", reason=reason)
    if after.result != "loaded":
        return after
    if before.output != after.output:
        return replace(after, result="failed", reason="one forward pass produces a different output than the source")
    absent = counted(len(after.in_no_file), "parameter", "is")
    same = f"; {absent} in no file on either side" if after.in_no_file else ""
    reason = f"one forward pass produces the same output as the source, bit for bit{same}"
    return replace(after, result="equal", reason=reason)


def check_load(
    output: Source,
    source: Source | None,
    meta_loader: MetaLoader,
    options: LoadOptions,
    tick: Tick,
    tmpdir: Path | None,
    changes: Options = UNCHANGED,
) -> Check:
    """Whether the model of the root folder loads and runs; with ``source``, whether it gives its output bit for bit.

    What ``changes`` values or names is loaded alone: the source, as it is, gives another output.

    Raises DiskFull when what has to be fetched does not fit into ``tmpdir``, DeviceMapIncomplete, and as stores do.
    """
    level = f"loaded by {options.loader}, one forward pass"
    if not _files(output):
        return Check("load", "skipped", level, "no safetensors files with a config.json at its top level")
    # A class that ties tensors gives the same without the copies: which there are does not count.
    changed = [as_option(name) for name in changes.altering("values", "names")]
    comparable = source is not None and not changed and bool(_files(source))  # asked before anything is fetched
    with ExitStack() as fetched:
        here = fetched.enter_context(_as_folder(output, tick, tmpdir))
        if source is not None and comparable:
            there = fetched.enter_context(_as_folder(source, tick, tmpdir))
            found = compare_loads(meta_loader, there, here, options)
        else:
            found = load(meta_loader, here, options)
    why = f"{', '.join(changed)} can change the output" if changed else "the source's format cannot be loaded here"
    result, reason = _judged(found, None if source is None else f"{why}, so there is nothing to compare with")
    reason, findings = ("", (f"the model: {reason}",)) if result == "failed" else (reason, ())
    return Check("load", result, level, reason, _figures(found), findings)


def _judged(found: LoadCheck, incomparable: str | None) -> tuple[Result, str]:
    """A model that runs on made-up parameters proves nothing alone: some are made so, and others lost them.

    ``incomparable`` says why a source that there is was not loaded, if it was not.
    """
    if found.result != "loaded":
        return "passed" if found.result == "equal" else found.result, found.reason
    if incomparable:
        return "inconclusive", f"{found.reason}; {incomparable}"
    if found.in_no_file:
        return "inconclusive", f"{found.reason}; use --against to see whether the source has them"
    return "passed", found.reason


def _figures(found: LoadCheck) -> dict[str, object]:
    if found.result == "skipped":
        return {}
    return {
        **({"class_name": found.class_name} if found.class_name else {}),
        **({"in_no_file": len(found.in_no_file)} if found.in_no_file else {}),
        "seconds": round(found.seconds, 1),
        "peak_rss": found.peak_rss,
        **{f"blocks_on_{device}": count for device, count in found.placement.items() if device},
    }


def _files(source: Source) -> list[StoredFile]:
    """What the loader reads, if the root holds a model that it reads."""
    files = source.files()
    weights = [f for path, f in files.items() if "/" not in path and path.endswith((SUFFIX, f"{SUFFIX}.index.json"))]
    return [files["config.json"], *weights] if weights and "config.json" in files else []


def _as_folder(source: Source, tick: Tick, tmpdir: Path | None) -> AbstractContextManager[Path]:
    files = _files(source)
    if (local := source.place.local) and all((local / file.path).is_file() for file in files):  # none is lent
        return nullcontext(local)
    return fetched(source, files, tick, tmpdir)
