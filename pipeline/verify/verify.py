"""`verify`: everything that can be said of a checkpoint, alone or against the source that it should equal.

Each level is one check, and none trusts another: the index rules, the tensors' names and shapes, the other files, the
model's own class, the tokenizer, and with ``deep`` every byte. A check that cannot be made says why; it never passes.
"""

from __future__ import annotations

import threading
from pathlib import Path
from posixpath import basename, join

from reshard.pipeline.errors import CheckpointError
from reshard.pipeline.find import read_file
from reshard.pipeline.limits import CONFIG_MAX
from reshard.pipeline.request import Options
from reshard.pipeline.stores.protocols import Source
from reshard.pipeline.stream import Tick
from reshard.pipeline.tensors import Checkpoint, Name
from reshard.pipeline.verify.checks import Check, Result
from reshard.pipeline.verify.compare import (
    UNCHANGED,
    Paired,
    Side,
    check_bytes,
    check_headers,
    check_stored,
    paired,
    read,
    read_both,
)
from reshard.pipeline.verify.files import check_files, check_tokenizers
from reshard.pipeline.verify.record import attested_by, check_manifest, check_manifest_bytes
from reshard.pipeline.verify.reload import ModelCheck, Reload
from reshard.pipeline.verify.rules import check_rules
from reshard.pipeline.verify.structure import Signature


def verify(
    output: Source,
    source: Source | None,
    reload: Reload,
    *,
    deep: bool = False,
    changes: Options = UNCHANGED,
    described: str | None = None,
    tick: Tick = lambda count: None,
    tmpdir: Path | None = None,
) -> list[Check]:
    """The checks of ``output``, alone or against ``source``; with ``deep`` both sides are read once, byte for byte.

    ``changes`` are what was asked to change on the way, dtype and strip_prefix: the output should equal the source
    after them. ``described`` is the root of the manifest that the publishing commit names, where the history is known;
    ``tick`` is called with the bytes of each view. Raises NoWeights, the CheckpointError family where ``source`` itself
    is broken, and what stores raise; for what is wrong with ``output``, never.
    """
    if any(basename(path) == "config.json" for path in output.files()):
        threading.Thread(target=reload.warm, daemon=True).start()  # its imports take seconds, and so do headers
    their_side = Side.open(source, changes) if source else None
    side = Side.attempt(output)
    checks = [check_rules(output, side)]
    recorded = check_manifest(output, described)
    checks += [recorded.check] if recorded.check else []
    if isinstance(side, CheckpointError):
        return checks
    if recorded.manifest:
        side = attested_by(side, recorded.manifest)
    tick = _one_at_a_time(tick)
    matched = paired(their_side, side) if their_side else None
    if their_side and matched:
        checks += [check_headers(their_side, side, matched), check_files(their_side, side, changes, deep, tick)]
    checks += _check_models(side, their_side, matched, reload)
    checks += check_tokenizers(output, source, reload, tmpdir)
    if deep and their_side and matched:
        theirs, ours = read_both(their_side, side, tick, tmpdir)
        checks.append(check_bytes(their_side, side, matched, theirs, ours, tick, tmpdir))
    elif deep:
        ours = read(side, tick, tmpdir)
        checks.append(check_stored(side, ours))
    if deep and recorded.manifest:
        checks.append(check_manifest_bytes(side, ours, recorded.manifest))
    return checks


def _one_at_a_time(tick: Tick) -> Tick:
    """Both sides are read at once, and who is told should not have to think of it."""
    lock = threading.Lock()

    def told(count: int) -> None:
        with lock:
            tick(count)

    return told


# ------------------------------------------------------------------------------------------------------- the class


def _check_models(side: Side, theirs: Side | None, matched: Paired | None, reload: Reload) -> list[Check]:
    before: dict[Name, Signature] = {}
    if theirs and matched:
        before = {pair.output.name: theirs.signature(pair.source) for pair in matched.pairs}
    return [
        _check_model(side, checkpoint, before.get(checkpoint.name), reload) for checkpoint in side.opened.checkpoints
    ]


def _check_model(side: Side, checkpoint: Checkpoint, source: Signature | None, reload: Reload) -> Check:
    """The output's config names the class; another config is a difference between files, and is reported there."""
    name = f"class of {checkpoint.name}"
    path = join(checkpoint.name.folder, "config.json")
    file = side.source.files().get(path)
    if file is None:
        return Check(name, "skipped", "structural", f"no {path} says which class loads it")
    if file.size > CONFIG_MAX:
        return Check(name, "skipped", "structural", f"{path} has {file.size:,} bytes; {CONFIG_MAX:,} are read")
    config, ours = read_file(side.source, file, CONFIG_MAX), side.signature(checkpoint)
    verdict = reload.check(config, source, ours) if source else reload.check(config, ours)
    figures = {
        **({"class_name": verdict.class_name} if verdict.class_name else {}),
        "missing": len(verdict.missing),
        "unexpected": len(verdict.unexpected),
        "mismatched": len(verdict.mismatched),
        "seconds": round(verdict.seconds, 3),
        "peak_rss": verdict.peak_rss,
    }
    result, reason = _judged(verdict, alone=source is None)
    findings = (f"{checkpoint.name}: {verdict.reason}",) if result == "failed" else ()
    return Check(name, result, verdict.level, "" if result == "failed" else reason, figures, findings)


def _judged(verdict: ModelCheck, alone: bool) -> tuple[Result, str]:
    """A complaint counts only against a source that gives none: honest checkpoints are often not complete."""
    complaints = [*verdict.missing, *verdict.mismatched, *verdict.errors]
    if verdict.result == "report" and alone and complaints:
        return (
            "inconclusive",
            f"{verdict.class_name} misses or refuses {complaints[0]}; --against tells whether its source does too",
        )
    if verdict.result in {"clean", "report"}:
        return "passed", verdict.reason
    return (
        "failed" if verdict.result == "failed" else "inconclusive" if verdict.result == "inconclusive" else "skipped"
    ), verdict.reason
