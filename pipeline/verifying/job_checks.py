"""What a job checks, and the record that people and programs can read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter

from reshard.pipeline.check import Check, Result, failed, first, prior_checks
from reshard.pipeline.checkpoint.discover import find_checkpoints
from reshard.pipeline.checkpoint.formats.gguf import GgufHeader, Keys
from reshard.pipeline.checkpoint.formats.headers import parse_header
from reshard.pipeline.checkpoint.formats.safetensors import SUFFIX, Header
from reshard.pipeline.checkpoint.indexes import parse_index
from reshard.pipeline.checkpoint.open import Opened, open_checkpoints
from reshard.pipeline.checkpoint.small_files import read_file
from reshard.pipeline.errors import ModelCheckRequired, ProofError, ReadBackDiffers, ReloadFailed
from reshard.pipeline.limits import CONFIG_MAX
from reshard.pipeline.planning.beside import excluded
from reshard.pipeline.planning.model import CARD, Entry, Output, Plan, Receipt, Shard, index_bytes
from reshard.pipeline.planning.select import select
from reshard.pipeline.protocols import Source, Target
from reshard.pipeline.publishing.commit import Published
from reshard.pipeline.publishing.manifest import recorded, root_of
from reshard.pipeline.stores.overlay import is_lent
from reshard.pipeline.tensors import Name
from reshard.pipeline.text import counted
from reshard.pipeline.verifying.meta_load import NO_CLASS, MetaLoader, Own
from reshard.pipeline.verifying.opened import own_of
from reshard.pipeline.verifying.published import Expected, differences
from reshard.pipeline.verifying.structure import (
    Signature,
    are_of,
    check_index,
    check_weight_files,
    compare,
    compare_keys,
    signature,
    signature_of,
)
from reshard.pipeline.verifying.verdicts import ModelCheck

_STRUCTURE = "names, dtypes, shapes, sizes, index in both directions"
_READ_BACK = "names, sizes, hashes, headers, indexes, manifest"


def _headers(shards: Iterable[Shard]) -> dict[str, Header]:
    return {s.path: parse_header(s.header, file=s.path, file_size=s.size) for s in shards}


def check_structure(
    plan: Plan, opened: Opened, ties: Mapping[Name, Mapping[str, str]], configs: Mapping[str, str]
) -> Check:
    """Parse the planned headers again and hold them and the indexes against the source; raises ProofError.

    It trusts nothing that the planner says about its own work: the source's side comes from the source's headers (and
    the wishes: casts, prefixes, ties), the output's side from the bytes that will be written. ``configs`` are the texts
    that say how weights are quantised.
    """
    if len(opened.checkpoints) != len(plan.outputs):
        raise ProofError(what=f"{counted(len(opened.checkpoints), 'checkpoint', 'becomes')} {len(plan.outputs)}")

    def wanted(number: int) -> Sequence[Entry]:
        checkpoint = opened.checkpoints[number]
        selection = select(checkpoint, plan.options, ties.get(checkpoint.name, {}), configs)
        if selection.rearranged:  # to others, of the same bytes
            sizes = {entry.name: entry.tensor.size for entry in selection.entries}
            moved = sum(sizes.values()) + sum(sizes[kept] for kept in selection.dropped.values())
            whole = moved == sum(tensor.size for tensor in checkpoint.tensors)
        else:
            kept = len(selection.entries) + len(selection.dropped) + len(selection.scales)
            whole = kept == len(checkpoint.tensors)
        if not whole:
            raise ProofError(what=f"{checkpoint.name}: a source tensor is neither written, nor tied, nor a scale")
        return selection.entries

    return _structure(plan, plan.shards, wanted, lambda number: opened.checkpoints[number].keys)


def check_plan(plan: Plan, shards: Sequence[Shard]) -> list[Check]:
    """The same for a plan that was stored meanwhile, against its own entries; raises ProofError."""
    if not plan.outputs:
        return []
    return [_structure(plan, shards, lambda n: [e for i in plan.outputs[n].shards for e in shards[i].entries])]


def _planned(entries: Sequence[Entry]) -> Signature:
    return signature_of(map(attrgetter("tensor.name"), entries), map(attrgetter("as_dtype", "tensor.shape"), entries))


def _structure(
    plan: Plan,
    shards: Sequence[Shard],
    wanted: Callable[[int], Sequence[Entry]],
    keys: Callable[[int], Keys] = lambda n: {},
) -> Check:
    """The check of every output of ``plan``, number ``n`` against ``wanted(n)`` and, of GGUF, ``keys(n)``."""
    findings: list[str] = []
    tensors = 0
    for number, output in enumerate(plan.outputs):
        headers = _headers(shards[i] for i in output.shards)
        entries = wanted(number)
        tensors += len(entries)
        planned = _planned(entries)
        if not are_of(headers, planned):
            findings += map(str, compare(planned, signature(headers)))
        del planned
        if found := keys(number):
            written = headers[shards[output.shards[0]].path]
            findings += map(str, compare_keys(found, written.keys if isinstance(written, GgufHeader) else {}))
        del entries  # there may be 500,000, and the index names them as well
        if output.index:
            index = parse_index(index_bytes(output.index, shards), output.index.path)
            rules = check_index(index, headers, headers)
            findings += (str(one) for one in rules if one.rule != "other_parameters")  # kept as the source has it
        else:
            findings += map(str, check_weight_files(headers))
    count, indexes = sum(len(output.shards) for output in plan.outputs), sum(1 for o in plan.outputs if o.index)
    figures = {"tensors": tensors, "shards": count, "indexes": indexes}
    if findings:
        raise ProofError(
            what=f"the plan does not match the source: {first(findings)}",
            checks=failed("structure", _STRUCTURE, figures, findings),
        )
    return Check("structure", "passed", _STRUCTURE, "", figures)


def check(plan: Plan, shards: Sequence[Shard], source: Source, meta_loader: MetaLoader) -> list[Check]:
    """What is checked before anything is published: the plan once more, and each model's own class."""
    checks = check_plan(plan, shards)
    with prior_checks(checks):
        return [*checks, *check_model(plan, shards, source, meta_loader)]


def check_model(plan: Plan, shards: Sequence[Shard], source: Source, meta_loader: MetaLoader) -> list[Check]:
    """Load every output on the meta device, from its headers alone.

    Raises ReloadFailed where a class is less content with the output than with the source, and ModelCheckRequired
    where the request says that no class may go unchecked.
    """
    checks: list[Check] = []
    for number, output in enumerate(plan.outputs):
        name = f"reload {output.name}"
        verdict = _ask_class(plan, shards, number, source, meta_loader)
        figures = verdict.figures()
        with prior_checks(checks):
            if verdict.result == "failed":
                raise ReloadFailed(
                    why=verdict.reason,
                    checks=failed(name, verdict.level, figures, [f"{output.name}: {verdict.reason}"]),
                )
            result: Result = "passed" if verdict.result == "clean" or verdict.result == "report" else verdict.result
            told = [verdict.reason, *verdict.notes]
            told += ["cached"] if verdict.known else []
            made = Check(name, result, verdict.level, "; ".join(told), figures)
            if plan.options.require == "model" and verdict.level != "model":
                raise ModelCheckRequired(why=verdict.reason, checks=[made.to_dict()], **_cure(output, verdict))
        checks.append(made)
    meta_loader.enough()
    return checks


def _cure(output: Output, verdict: ModelCheck) -> dict[str, str]:
    """What else helps than another model, where something does."""
    why = verdict.reason
    if verdict.class_name:  # it was asked, and does not take enough of the tensors
        return {
            "cure": "use options that keep the names the class expects and the model's own config, or remove --require"
        }
    if output.name.suffix != SUFFIX:
        return {"cure": "remove --require"}
    if output.config is None:
        return {"cure": "use --config-from REPO with the config of the same model, or remove --require"}
    if "code in the repository" in why:
        return {"cure": "reshard never runs code from a repository; remove --require to check only the structure"}
    return {"cure": "install the missing package, or remove --require"} if "install" in why else {}


def _ask_class(plan: Plan, shards: Sequence[Shard], number: int, source: Source, meta_loader: MetaLoader) -> ModelCheck:
    output = plan.outputs[number]
    if output.name.suffix != SUFFIX:
        return ModelCheck("skipped", NO_CLASS)
    if output.config is None:
        return ModelCheck("skipped", "no config.json, so its class is unknown")
    edited = {edit.path: edit.content.encode() for edit in plan.edits}
    its_config = read_file(source, source.files()[output.config], CONFIG_MAX)
    ours = [shards[index] for index in output.shards]
    entries = [entry for shard in ours for entry in shard.entries]

    def own() -> Own:
        """The plan has only the new names, so this reads the source's headers again."""
        found = find_checkpoints(source, lambda path: excluded(plan.options, path))
        tensors = open_checkpoints(source, found).checkpoints[number].tensors
        return own_of(its_config, tensors, (entry.tensor for entry in entries))

    return meta_loader.check(
        edited.get(output.config) or its_config,
        _planned(entries),
        signature(_headers(ours)),
        own=own if plan.options.altering("names", "set") else None,
        lent=is_lent(source, output.config),
    )


def confirm(
    plan: Plan, shards: Sequence[Shard], receipts: Mapping[str, Receipt], published: Published, target: Target
) -> Check:
    """Read the published commit back and hold it against plan and receipts; raises ReadBackDiffers naming the files."""
    there = target.at(published.commit)
    files = recorded(shards, receipts)
    root = root_of(files) if plan.options.manifest and shards else None
    written = [output.index for output in plan.outputs if output.index]
    expected = Expected(
        files,
        {shard.path: len(shard.header) for shard in shards},
        root,
        {index.path: index_bytes(index, shards, root) for index in written}
        | {path: text.encode() for path, text in plan.edits},
        plan.carried,
        plan.deletes,
    )
    figures = {
        "shards": len(shards),
        "bytes": sum(shard.size for shard in shards),
        "indexes": len(written),
        "manifest": root or "none",
        "carried": len(plan.carried),
        "deleted": len(plan.deletes),
        "card": CARD in there.files(),
    }
    if findings := [*differences(there, expected)]:
        raise ReadBackDiffers(
            commit=published.commit,
            place=str(target.place),
            why=first(findings),
            checks=failed("read back", _READ_BACK, figures, findings),
        )
    return Check("read back", "passed", _READ_BACK, _overflows(shards, receipts), figures)


def _overflows(shards: Sequence[Shard], receipts: Mapping[str, Receipt]) -> str:
    """What a cast made infinite, in words; nothing where it made nothing so."""
    lost = {name: n for shard in shards for name, n in receipts[shard.digest].overflows.items()}
    if not lost:
        return ""
    values, tensors = counted(sum(lost.values()), "value"), counted(len(lost), "tensor")
    return f"the cast made {values} infinite in {tensors}, such as {min(lost)}"
