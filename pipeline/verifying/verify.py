"""`verify`: every check of a checkpoint, alone or against the source that it should equal.

Each level is one check, and none trusts another: the index rules, the tensors' names and shapes, the other files, the
model's own class, the tokenizer, and with ``deep`` every byte. A check that cannot be made says why; it never passes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from posixpath import basename, join
from typing import Any

from reshard.pipeline.arguments import as_option
from reshard.pipeline.check import Check, Result, some
from reshard.pipeline.checkpoint.formats.gguf import SUFFIX as GGUF
from reshard.pipeline.checkpoint.small_files import read_file
from reshard.pipeline.copying.stream import Tick
from reshard.pipeline.errors import CheckpointError, UsageError
from reshard.pipeline.limits import CONFIG_MAX, EXCHANGED_SHOWN
from reshard.pipeline.planning.beside import excluded
from reshard.pipeline.protocols import Source
from reshard.pipeline.publishing.history import Publication
from reshard.pipeline.request import Options
from reshard.pipeline.stores.overlay import is_lent
from reshard.pipeline.tensors import Checkpoint, Name
from reshard.pipeline.text import printable
from reshard.pipeline.verifying.compare import check_bytes, check_headers, check_stored, check_ties, read, read_both
from reshard.pipeline.verifying.files import check_files
from reshard.pipeline.verifying.index_rules import check_rules
from reshard.pipeline.verifying.manifest_check import (
    Recorded,
    attested_by,
    check_manifest,
    check_manifest_bytes,
    root_of,
)
from reshard.pipeline.verifying.meta_load import NO_CLASS, MetaLoader, Own
from reshard.pipeline.verifying.opened import UNCHANGED, OpenedSide, own_of, paired
from reshard.pipeline.verifying.structure import FORMATS
from reshard.pipeline.verifying.tokenizer import check_tokenizers
from reshard.pipeline.verifying.verdicts import ModelCheck


@dataclass(frozen=True)
class Trust:
    """What vouches for the output's manifest beside its author."""

    described: Publication | None = None  # the commit that published it
    published: Callable[[], bool] = lambda: False  # whether this user made that commit; a call to the Hub
    signed: Sequence[Check] = ()  # the checks of signatures, that of the manifest first

    def attester(self, side: OpenedSide, recorded: Recorded) -> str:
        """Who vouches for a manifest of which all is as it says; empty for nobody."""
        if not _agrees(side, recorded):
            return ""
        if self.described and self.described.manifest_sha256 is not None and self.published():
            return "that you published"
        return "that is signed" if self.signed and self.signed[0].result == "passed" else ""


AUTHOR_ALONE = Trust()


def verify(
    output: Source,
    source: Source | None,
    meta_loader: MetaLoader,
    *,
    deep: bool = False,
    changes: Options = UNCHANGED,
    trust: Trust = AUTHOR_ALONE,
    load: Callable[[Options], Check] | None = None,
    tick: Tick = lambda count: None,
    tmpdir: Path | None = None,
) -> list[Check]:
    """The checks of ``output``, alone or against ``source``; with ``deep`` both sides are read once, byte for byte.

    ``changes`` are what was asked to change on the way, dtype, strip_prefix, experts, rename and ties: the output
    should equal the source after them. Of what they do not say, the output's manifest does. That is its author's word,
    so the check lists it and is inconclusive, unless ``trust`` has who vouches for the manifest.
    ``load`` is a check that is told what the output is compared by, and made before every byte is read.
    ``tick`` is called with the bytes of each view, by several threads. Raises NoWeights, the CheckpointError family
    where ``source`` itself is broken, and what stores raise; for what is wrong with ``output``, never.
    """
    if any(basename(path) == "config.json" for path in output.files()):
        threading.Thread(target=meta_loader.warm, daemon=True).start()  # its imports take seconds, and so do headers
    recorded = check_manifest(output, trust.described)
    claims = unlike(recorded.manifest.made.claims(), changes) if recorded.manifest else {}
    if source and recorded.manifest and root_of(source) == recorded.manifest.root:  # a mirror: it is as its source is
        claims = {}
    their_side, fitting, told = _their_side(source, changes, claims) if source else (None, {}, {})
    loaded = [load(changes.model_copy(update=fitting if _by_config(source, output) else told))] if load else []
    side = OpenedSide.attempt(output)
    attester = cache(partial(trust.attester, side, recorded))

    checks = list[Check]()
    if their_side and their_side.exchanged:
        asked = not any("names" in Options.declared(name).alters for name in told)
        checks.append(_exchanged(their_side.exchanged, believed=asked or bool(attester())))
    checks += [*trust.signed, check_rules(side, _formats(their_side))]
    checks += [recorded.check] if recorded.check else []
    if side.error:
        return checks + loaded
    if recorded.manifest:
        side = attested_by(side, recorded.manifest)
    matched = paired(their_side, side) if their_side else None
    sources = {pair.output.name: pair.source for pair in matched.pairs} if matched else {}
    models = {
        checkpoint.name: ask_class(side, checkpoint, their_side, sources.get(checkpoint.name), meta_loader)
        for checkpoint in side.opened.checkpoints
    }
    ties = {name: verdict.ties for name, verdict in models.items()}
    if matched:
        same = check_headers(matched, ties, lambda: changes.ties == "source" or bool(attester()))
        against = matched.source
        beside = _with_claims(
            lambda expected: check_files(against, side, expected, deep, tick), changes, fitting, told, attester
        )
        checks += [_explained(same, claims, told, attester), beside]
    checks += [_check_model(name, verdict, alone=source is None) for name, verdict in models.items()]
    checks += check_tokenizers(output, source, meta_loader, tmpdir, lambda path: excluded(changes, path))
    if deep and matched:
        theirs, ours = read_both(matched, tick, tmpdir)
        checks.append(check_bytes(matched, ties, theirs, ours, tick, tmpdir))
    elif deep:
        ours = read(side, tick, tmpdir)
        checks += [check_stored(side, ours), *check_ties(models, ours)]
    if deep and recorded.manifest:
        checks.append(check_manifest_bytes(side, ours, recorded.manifest))
    return checks + loaded


def _their_side(
    source: Source, changes: Options, claims: dict[str, Any]
) -> tuple[OpenedSide, dict[str, Any], dict[str, Any]]:
    """The source after ``changes`` and a manifest's claims; these, where they fit it; those that alter tensors."""
    try:
        side = OpenedSide.open(source, changes.model_copy(update=claims))
    except (UsageError, CheckpointError):
        if not claims:
            raise
        return OpenedSide.open(source, changes), {}, {}
    altered = side.altered() if claims else set()
    told = {name: value for name, value in claims.items() if altered & {*Options.declared(name).alters}}
    return side, claims, told


def _formats(theirs: OpenedSide | None) -> Set[str]:
    """Those that files may state: of a copy ours and the source's own."""
    if theirs is None:
        return FORMATS
    return {"pt", *(checkpoint.file_metadata.get("format", "pt") for checkpoint in theirs.opened.checkpoints)}


def _agrees(side: OpenedSide, recorded: Recorded) -> bool:
    """Whether all is as the manifest says, and it says it of all that is compared."""
    if side.error or recorded.manifest is None:
        return False
    passed = recorded.check is not None and recorded.check.result == "passed"
    return passed and {file.path for file in side.files} <= recorded.manifest.files.keys()


def _exchanged(names: Mapping[str, str], believed: bool) -> Check:
    """Told before everything else: with such rules, other weights under the right names are no difference."""
    shown = some([f"{new} has the bytes of the source's {old}" for new, old in sorted(names.items())], EXCHANGED_SHOWN)
    result: Result = "passed" if believed else "inconclusive"
    level = "source names that the naming options assign to another tensor"
    return Check("exchanged names", result, level, ", ".join(shown), {"tensors": len(names)})


def unlike(told: dict[str, Any], changes: Options) -> dict[str, Any]:
    """Those of the changes that a manifest tells of which ``changes`` say nothing."""
    return {name: value for name, value in told.items() if getattr(changes, name) == getattr(UNCHANGED, name)}


def _explained(same: Check, claims: dict[str, Any], told: dict[str, Any], attester: Callable[[], str]) -> Check:
    """``same``, with what the output's manifest had to do with it: ``told`` is what of its ``claims`` decided it."""
    if told:
        return _by_its_word(same, told, attester())
    if claims and same.result == "failed":
        said = f"the output's manifest states {claims_text(claims)}, which does not explain it"
        return replace(same, reason="; ".join(filter(None, (same.reason, said))))
    return same


def _with_claims(
    files: Callable[[Options], Check],
    changes: Options,
    claims: dict[str, Any],
    told: dict[str, Any],
    attester: Callable[[], str],
) -> Check:
    """The check of ``files``: a claim that altered no tensor may still explain a config, such as its dtype."""
    found = files(changes.model_copy(update=told))
    if found.result == "failed" and (rest := {name: value for name, value in claims.items() if name not in told}):
        explained = files(changes.model_copy(update=claims))
        if explained.result != "failed":
            return _by_its_word(explained, rest, attester())
    return found


def _by_config(source: Source | None, output: Source) -> bool:
    """Whether loaders are told something else of the output, so that it need not give the source's output."""
    texts = {
        b"".join(side.read(file, 0, file.size))
        for side in (source, output)
        if side and (file := side.files().get("config.json")) and file.size <= CONFIG_MAX
    }
    return len(texts) == 2


def _by_its_word(same: Check, told: dict[str, Any], attester: str) -> Check:
    if attester:
        text = f"compared with the options in the manifest {attester}: {claims_text(told)}"
        return replace(same, reason="; ".join(filter(None, (same.reason, text))))
    text = f"compared with options that only the output's manifest states: {claims_text(told)}"
    text += "; use the same options if you expect them"
    result: Result = "inconclusive" if same.result == "passed" else same.result
    return replace(same, result=result, reason="; ".join(filter(None, (text, same.reason))))


def claims_text(told: dict[str, Any]) -> str:
    """Options that a manifest claims, to be read: rules as they stand in their file."""

    def one(name: str, value: Any) -> str:
        text = printable(value) if isinstance(value, str) else ", ".join(map(str, value)) if value is not True else ""
        return f"{as_option(name)} {text}".rstrip()

    return "; ".join(one(name, value) for name, value in told.items())


def ask_class(
    side: OpenedSide, checkpoint: Checkpoint, theirs: OpenedSide | None, before: Checkpoint | None, loader: MetaLoader
) -> ModelCheck:
    """What the class of the output's own config says, or of the source's where the output has none.

    Another config is a difference between files, and is reported there.
    """
    if checkpoint.name.suffix == GGUF:
        return ModelCheck("skipped", NO_CLASS)
    if side.found.stays_whole:
        return ModelCheck("skipped", "adapters and similar weights are not checked against a model class")
    path = join(checkpoint.name.folder, "config.json")
    places = [(side.source, path)]
    if theirs and before:
        places.append((theirs.source, join(before.name.folder, "config.json")))
    source, file = next(((s, s.files()[at]) for s, at in places if at in s.files()), (side.source, None))
    if file is None:
        return ModelCheck("skipped", f"no {path}, so its class is unknown")
    if file.size > CONFIG_MAX:
        return ModelCheck("skipped", f"{file.path} has {file.size:,} bytes, and the limit is {CONFIG_MAX:,}")
    config, ours = read_file(source, file, CONFIG_MAX), side.signature(checkpoint)
    if not (theirs and before):
        return loader.check(config, ours)
    own = partial(_own, theirs, before, config) if before.name in theirs.own else None
    lent = is_lent(theirs.source, join(before.name.folder, "config.json"))
    return loader.check(config, theirs.signature(before), ours, own=own, lent=lent)


def _own(theirs: OpenedSide, before: Checkpoint, config: bytes) -> Own:
    """The source as it is, with its own config where it has one: that of the output may say that it is unquantised."""
    file = theirs.source.files().get(join(before.name.folder, "config.json"))
    its_config = read_file(theirs.source, file, CONFIG_MAX) if file and file.size <= CONFIG_MAX else config
    return own_of(its_config, theirs.own[before.name].tensors, before.tensors)


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
        misses = f"{verdict.class_name} misses or rejects {complaints[0]}"
        return "inconclusive", f"{misses}; use --against to see whether its source does too"
    unused = f"does not use others, such as {verdict.unexpected[0]}"
    return "passed", f"{verdict.class_name} has all its tensors and {unused}"
