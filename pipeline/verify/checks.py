"""What a job checks, and the record that a person or a program can read of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from reshard.pipeline.card import CARD
from reshard.pipeline.errors import ModelCheckRequired, ProofError, ReadBackDiffers, ReloadFailed
from reshard.pipeline.find import read_file
from reshard.pipeline.formats.safetensors import Header, parse_header
from reshard.pipeline.limits import CONFIG_MAX, MANIFEST_MAX
from reshard.pipeline.manifest import MANIFEST, ROOT_KEY, recorded, root_of
from reshard.pipeline.manifest import parse as parse_manifest
from reshard.pipeline.open import Opened
from reshard.pipeline.plan import Entry, Output, Plan, Receipt, Shard, index_bytes
from reshard.pipeline.publish import Published, weights
from reshard.pipeline.stores.protocols import Source, Target
from reshard.pipeline.tensors import Name
from reshard.pipeline.verify.reload import ModelCheck, Reload
from reshard.pipeline.verify.structure import Finding, check_files, check_index, compare, signature
from reshard.pipeline.wanted import select

Result = Literal["passed", "failed", "skipped", "inconclusive"]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at: ``level`` says how closely, ``figures`` what was counted.

    Each of ``findings`` is one thing that is wrong, and names the tensor or the file.
    """

    name: str
    result: Result
    level: str
    reason: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    findings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _headers(shards: Iterable[Shard]) -> dict[str, Header]:
    return {s.path: parse_header(s.header, file=s.path, file_size=s.size) for s in shards}


def check_structure(plan: Plan, opened: Opened, ties: Mapping[Name, Mapping[str, str]]) -> Check:
    """Parse the planned headers again and hold them and the indexes against the source; raises ProofError.

    It trusts nothing that the planner says about its own work: the source's side comes from the source's headers (and
    the wishes: casts, prefixes, ties), the output's side from the bytes that will be written.
    """
    findings: list[Finding] = []
    tensors = 0
    for checkpoint, output in zip(opened.checkpoints, plan.outputs, strict=True):
        selection = select(checkpoint, plan.options, ties.get(checkpoint.name, {}))
        if len(selection.entries) + len(selection.dropped) != len(checkpoint.tensors):
            raise ProofError(what=f"{checkpoint.name}: not every tensor of the source is written or tied")
        findings += _held_against(selection.entries, output, plan.shards)
        tensors += len(selection.entries)
    return _structure(findings, plan, tensors)


def check_plan(plan: Plan, shards: Sequence[Shard]) -> Check:
    """The same for a plan that was stored meanwhile, against its own entries; raises ProofError."""
    findings: list[Finding] = []
    tensors = 0
    for output in plan.outputs:
        entries = [entry for number in output.shards for entry in shards[number].entries]
        findings += _held_against(entries, output, shards)
        tensors += len(entries)
    return _structure(findings, plan, tensors)


def _held_against(entries: Iterable[Entry], output: Output, shards: Sequence[Shard]) -> list[Finding]:
    headers = _headers(shards[number] for number in output.shards)
    findings = compare({entry.name: (entry.as_dtype, entry.tensor.shape) for entry in entries}, signature(headers))
    if output.index:
        return findings + check_index(output.index.path, index_bytes(output.index, shards), headers, headers)
    return findings + check_files(headers)


def _structure(findings: Sequence[Finding], plan: Plan, tensors: int) -> Check:
    if findings:
        more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        raise ProofError(what=f"the plan does not hold what the source holds: {findings[0]}{more}")
    shards = sum(len(output.shards) for output in plan.outputs)
    figures = {"tensors": tensors, "shards": shards, "indexes": sum(1 for o in plan.outputs if o.index)}
    return Check("structure", "passed", "names, dtypes, shapes, lengths, index both ways", "", figures)


def check(plan: Plan, shards: Sequence[Shard], source: Source, reload: Reload) -> list[Check]:
    """What is looked at before anything is published: the plan once more, and each model's own class."""
    return [check_plan(plan, shards), *check_model(plan, shards, source, reload)] if plan.outputs else []


def check_model(plan: Plan, shards: Sequence[Shard], source: Source, reload: Reload) -> list[Check]:
    """Reload every output on the meta device, from its headers alone.

    Raises ReloadFailed where a class is less content with the output than with the source, and ModelCheckRequired
    where the request says that no class may go unchecked.
    """
    checks = []
    for output in plan.outputs:
        verdict = _reload(plan, shards, output, source, reload)
        if verdict.result == "failed":
            raise ReloadFailed(why=verdict.reason, job="JOB")
        if plan.options.require == "model" and verdict.level != "model":
            raise ModelCheckRequired(why=verdict.reason)
        figures = verdict.to_dict() | {"missing": len(verdict.missing), "unexpected": len(verdict.unexpected)}
        keep = ("class_name", "missing", "unexpected", "seconds", "peak_rss")
        result: Result = "passed" if verdict.result in {"clean", "report"} else "skipped"
        if verdict.result == "inconclusive":
            result = "inconclusive"
        checks.append(
            Check(f"reload {output.name}", result, verdict.level, verdict.reason, {k: figures[k] for k in keep})
        )
    return checks


def _reload(plan: Plan, shards: Sequence[Shard], output: Output, source: Source, reload: Reload) -> ModelCheck:
    if output.config is None:
        return ModelCheck("structural", "skipped", "no config.json says which class loads it")
    edited = {edit.path: edit.content.encode() for edit in plan.edits}
    config = edited.get(output.config) or read_file(source, source.files()[output.config], CONFIG_MAX)
    ours = [shards[number] for number in output.shards]
    planned = {entry.name: (entry.as_dtype, entry.tensor.shape) for shard in ours for entry in shard.entries}
    return reload.check(config, planned, signature(_headers(ours)))


def confirm(
    plan: Plan, shards: Sequence[Shard], receipts: Mapping[str, Receipt], published: Published, target: Target
) -> Check:
    """Read the published commit back and hold it against plan and receipts; raises ReadBackDiffers naming the file."""

    def differs(path: str, why: str) -> ReadBackDiffers:
        return ReadBackDiffers(commit=published.commit, place=str(target.place), why=f"{path} {why}", job="JOB")

    there = target.at(published.commit)
    files = there.files()
    for wanted in weights(shards, receipts):
        found = files.get(wanted.path)
        if found is None:
            raise differs(wanted.path, "is not there")
        if found.size != wanted.size or (found.sha256 is not None and found.sha256 != wanted.sha256):
            raise differs(wanted.path, "is another file than the one that was sent")
    for shard in shards:
        header = b"".join(there.read(files[shard.path], 0, len(shard.header)))
        if header != shard.header:
            raise differs(shard.path, "has another header than planned")
    root = root_of(recorded(shards, receipts)) if plan.options.manifest and shards else None
    if root is not None:
        if MANIFEST not in files:
            raise differs(MANIFEST, "is not there")
        manifest = parse_manifest(read_file(there, files[MANIFEST], MANIFEST_MAX))
        if not root == manifest.root == manifest.actual_root:
            raise differs(MANIFEST, "is not that of what was copied")
    indexes = [output.index for output in plan.outputs if output.index]
    for index in indexes:
        if index.path not in files:
            raise differs(index.path, "is not there")
        expected = index_bytes(index, shards, {ROOT_KEY: root} if root else None)
        if files[index.path].size != len(expected) or read_file(there, files[index.path], len(expected)) != expected:
            raise differs(index.path, "is another index than planned")
    for file in plan.carried:
        found = files.get(file.path)
        if found is None or found.size != file.size:
            raise differs(file.path, "was not carried over whole")
        if file.sha256 and found.sha256 and file.sha256 != found.sha256:
            raise differs(file.path, "was carried over with other bytes")
    for path, text in plan.edits:
        if path not in files or read_file(there, files[path], CONFIG_MAX) != text.encode():
            raise differs(path, "does not have its new text")
    for path in plan.deletes:
        if path in files:
            raise differs(path, "should be gone")
    figures = {
        "shards": len(shards),
        "bytes": sum(shard.size for shard in shards),
        "indexes": len(indexes),
        "manifest": root or "none",
        "carried": len(plan.carried),
        "deleted": len(plan.deletes),
        "card": CARD in files,
    }
    level = "names, sizes, sha256, headers, indexes, manifest"
    return Check("read back", "passed", level, _overflows(shards, receipts), figures)


def _overflows(shards: Sequence[Shard], receipts: Mapping[str, Receipt]) -> str:
    """What a cast made infinite, in words; nothing where it made nothing so."""
    lost = {name: n for shard in shards for name, n in receipts[shard.digest].overflows.items()}
    if not lost:
        return ""
    return f"values that the cast made infinite: {sum(lost.values()):,}; tensors: {len(lost):,}, such as {min(lost)}"
