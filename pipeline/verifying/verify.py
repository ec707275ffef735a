"""`verify`: every check of a checkpoint, alone or against the source that it should equal.

Each level is one check, and none trusts another: the index rules, the tensors' names and shapes, the other files, the
model's own class, the tokenizer, and with ``deep`` every byte. A check that cannot be made says why; it never passes.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from posixpath import basename, join
from typing import Any

from reshard.pipeline.check import Check, Result
from reshard.pipeline.checkpoint.discover import read_file
from reshard.pipeline.checkpoint.formats.gguf import SUFFIX as GGUF
from reshard.pipeline.copying.stream import Tick
from reshard.pipeline.errors import BadExperts, BadRename, CheckpointError, RenameCollision
from reshard.pipeline.limits import CONFIG_MAX
from reshard.pipeline.protocols import Source
from reshard.pipeline.publishing.history import Publication
from reshard.pipeline.request import Options
from reshard.pipeline.tensors import Checkpoint, Name
from reshard.pipeline.verifying.compare import check_bytes, check_headers, check_stored, check_ties, read, read_both
from reshard.pipeline.verifying.files import check_files
from reshard.pipeline.verifying.index_rules import check_rules
from reshard.pipeline.verifying.manifest_check import attested_by, check_manifest, check_manifest_bytes
from reshard.pipeline.verifying.meta_load import NO_CLASS, MetaLoader, ModelCheck
from reshard.pipeline.verifying.opened import UNCHANGED, OpenedSide, paired
from reshard.pipeline.verifying.tokenizer import check_tokenizers


def verify(
    output: Source,
    source: Source | None,
    meta_loader: MetaLoader,
    *,
    deep: bool = False,
    changes: Options = UNCHANGED,
    described: Publication | None = None,
    tick: Tick = lambda count: None,
    tmpdir: Path | None = None,
) -> list[Check]:
    """The checks of ``output``, alone or against ``source``; with ``deep`` both sides are read once, byte for byte.

    ``changes`` are what was asked to change on the way, dtype, strip_prefix, experts and rename: the output should
    equal the source after them. Where they say nothing of names the output's manifest does, and the check says so.
    ``described`` is the commit that published a manifest, where the history is known; ``tick`` is
    called with the bytes of each view. Raises NoWeights, the CheckpointError family where ``source`` itself is
    broken, and what stores raise; for what is wrong with ``output``, never.
    """
    if any(basename(path) == "config.json" for path in output.files()):
        threading.Thread(target=meta_loader.warm, daemon=True).start()  # its imports take seconds, and so do headers
    recorded = check_manifest(output, described)
    named = recorded.manifest.made.names if recorded.manifest else {}
    named = {name: value for name, value in named.items() if getattr(changes, name) == getattr(UNCHANGED, name)}
    their_side = _their_side(source, changes, named) if source else None
    side = OpenedSide.attempt(output)
    checks = [check_rules(output, side)]
    checks += [recorded.check] if recorded.check else []
    if isinstance(side, CheckpointError):
        return checks
    if recorded.manifest:
        side = attested_by(side, recorded.manifest)
    tick = _one_at_a_time(tick)
    matched = paired(their_side, side) if their_side else None
    sources = {pair.output.name: pair.source for pair in matched.pairs} if matched else {}
    models = {
        checkpoint.name: _ask_class(side, checkpoint, their_side, sources.get(checkpoint.name), meta_loader)
        for checkpoint in side.opened.checkpoints
    }
    ties = {name: verdict.ties for name, verdict in models.items()}
    if their_side and matched:
        same = check_headers(their_side, side, matched, ties)
        if named:
            made = "; ".join(
                f"--{name} {value if isinstance(value, str) else ', '.join(map(str, value))}"
                for name, value in named.items()
            )
            told = f"names are compared as the manifest says that they were made: {made}"
            same = replace(same, reason="; ".join(filter(None, (same.reason, told))))
        checks += [same, check_files(their_side, side, changes, deep, tick)]
    checks += [_check_model(name, verdict, alone=source is None) for name, verdict in models.items()]
    checks += check_tokenizers(output, source, meta_loader, tmpdir)
    if deep and their_side and matched:
        theirs, ours = read_both(their_side, side, tick, tmpdir)
        checks.append(check_bytes(their_side, side, matched, ties, theirs, ours, tick, tmpdir))
    elif deep:
        ours = read(side, tick, tmpdir)
        checks += [check_stored(side, ours), *check_ties(models, ours)]
    if deep and recorded.manifest:
        checks.append(check_manifest_bytes(side, ours, recorded.manifest))
    return checks


def _their_side(source: Source, changes: Options, named: dict[str, Any]) -> OpenedSide:
    """The source after ``changes`` and what a manifest says of names; without that where it does not fit the source."""
    try:
        return OpenedSide.open(source, changes.model_copy(update=named))
    except (RenameCollision, BadRename, BadExperts):
        if not named:
            raise
        return OpenedSide.open(source, changes)


def _one_at_a_time(tick: Tick) -> Tick:
    """``tick`` behind a lock: both sides are read at the same time."""
    lock = threading.Lock()

    def locked(count: int) -> None:
        with lock:
            tick(count)

    return locked


def _ask_class(
    side: OpenedSide, checkpoint: Checkpoint, theirs: OpenedSide | None, before: Checkpoint | None, loader: MetaLoader
) -> ModelCheck:
    """What the class of the output's own config says, or of the source's where the output has none.

    Another config is a difference between files, and is reported there.
    """
    if checkpoint.name.suffix == GGUF:
        return ModelCheck("structural", "skipped", NO_CLASS)
    if side.found.stays_whole:
        return ModelCheck("structural", "skipped", "such weights have a loader of their own, for more than one model")
    path = join(checkpoint.name.folder, "config.json")
    places = [(side.source, path)]
    if theirs and before:
        places.append((theirs.source, join(before.name.folder, "config.json")))
    source, file = next(((s, s.files()[at]) for s, at in places if at in s.files()), (side.source, None))
    if file is None:
        return ModelCheck("structural", "skipped", f"no {path} says which class loads it")
    if file.size > CONFIG_MAX:
        return ModelCheck("structural", "skipped", f"{file.path} has {file.size:,} bytes; {CONFIG_MAX:,} are read")
    config, ours = read_file(source, file, CONFIG_MAX), side.signature(checkpoint)
    if theirs and before:
        return loader.check(config, theirs.signature(before), ours)
    return loader.check(config, ours)


def _check_model(name: Name, verdict: ModelCheck, alone: bool) -> Check:
    result, reason = _judged(verdict, alone)
    findings = (f"{name}: {reason}",) if result == "failed" else ()
    reasons = "; ".join([*([] if findings else [reason]), *verdict.notes])
    return Check(f"class of {name}", result, verdict.level, reasons, verdict.figures(), findings)


def _judged(verdict: ModelCheck, alone: bool) -> tuple[Result, str]:
    """A complaint counts only against a source that gives none: honest checkpoints are often not complete."""
    if verdict.result == "clean" or (verdict.result == "report" and not alone):
        return "passed", verdict.reason
    if verdict.result != "report":
        return verdict.result, verdict.reason
    if complaints := [*verdict.missing, *verdict.mismatched, *verdict.errors]:
        misses = f"{verdict.class_name} misses or refuses {complaints[0]}"
        return "inconclusive", f"{misses}; --against tells whether its source does too"
    return "passed", f"{verdict.class_name} lacks nothing, and has no use for such as {verdict.unexpected[0]}"
