"""Two checkpoints held against each other: names, dtypes and shapes from headers, and the bytes from one read each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from posixpath import basename, join
from typing import NamedTuple

from reshard.pipeline.check import Check, Result, some
from reshard.pipeline.checkpoint import discover
from reshard.pipeline.checkpoint.formats.safetensors import SUFFIX
from reshard.pipeline.copying.hashing import Compared, FileHasher
from reshard.pipeline.copying.stream import Stream, Tick
from reshard.pipeline.errors import SourceCorrupt
from reshard.pipeline.limits import READ_AGAIN_MAX
from reshard.pipeline.planning.model import MANIFEST, ROOT_KEY, TORCHAO_NAMES, Entry
from reshard.pipeline.tensors import Checkpoint, Name, Tensor
from reshard.pipeline.text import counted
from reshard.pipeline.verifying.digests import Digests, Stored, digests, first_difference, hashers_of
from reshard.pipeline.verifying.opened import OpenedSide, Pair, Paired
from reshard.pipeline.verifying.structure import Finding, Rule, compare, compare_keys
from reshard.pipeline.verifying.verdicts import ModelCheck

# Of each checkpoint: parameter -> the one that it shares its bytes with.
Ties = Mapping[Name, Mapping[str, str]]

# ------------------------------------------------------------------------------------------------------ headers


def check_headers(both: Paired, ties: Ties, believed: Callable[[], bool] = lambda: False) -> Check:
    """Whether both sides have the same tensors by name, dtype and shape, in files that loaders find.

    Copies of tied tensors that the output dropped are not findings. The check is inconclusive where the output does not
    say so itself, and where only it says so, unless it is ``believed``. ``ties`` are what the models' classes say.
    """
    theirs, ours, pairs, lost, _ = both
    without = {pair.output.name: dropped_copies(pair, ours, ties.get(pair.output.name, {})) for pair in pairs}
    told = list(differences(both, without))
    findings = [str(one) for one in told if one.rule != "other_metadata"]
    undecided = [str(one) for one in told if one.rule == "other_metadata"]
    casts: Counter[tuple[str, str]] = Counter()
    copies: dict[str, str] = {}
    undeclared, claimed = 0, []
    for pair in pairs:
        source, output = theirs.signature(pair.source), ours.signature(pair.output)
        tied, dropped = ties.get(pair.output.name, {}), without[pair.output.name]
        copies |= dropped
        claimed += [name for name, kept in dropped.items() if tied.get(name, name) != tied.get(kept, kept)]
        said = _kept(pair)
        undeclared += sum(said(name) is None for name in dropped)
        there = source.keys() & output.keys()
        casts.update((source[name][0], output[name][0]) for name in there if source[name][0] != output[name][0])
    figures = {
        "tensors": sum(len(pair.output.tensors) for pair in pairs),
        "in_the_source": sum(len(c.tensors) for c in (*(pair.source for pair in pairs), *lost)),
        "differences": len(findings),
        **({"tied_copies_dropped": len(copies)} if copies else {}),
    }
    remarks = [
        counted(n, "tensor", f"is {was} in {_called_by(theirs)} and {is_} in the output")
        for (was, is_), n in sorted(casts.items())
    ]
    remarks += some(undecided)
    if copies:
        shown = some([f"{name} (kept: {kept})" for name, kept in sorted(copies.items())])
        remarks.append(f"tied copies dropped: {', '.join(shown)}")
    doubted = [] if not claimed or believed() else claimed
    if doubted:
        remarks.append(
            f"only the output says that {len(doubted):,} of them can be dropped; use --ties source if you expect that"
        )
    level = "every name, dtype and shape, from headers"
    result: Result = "failed" if findings else "inconclusive" if undecided or undeclared or doubted else "passed"
    return Check("same tensors", result, level, "; ".join(remarks), figures, some(findings))


def _called_by(theirs: OpenedSide) -> str:
    """What is compared with: options may have cast it."""
    return "the source after the options" if any(theirs.changed.values()) else "the source"


def differences(both: Paired, dropped: Mapping[Name, Collection[str]]) -> Iterator[Finding]:
    """Tensors that are not the source's by name, dtype and shape, but for ``dropped`` copies of others, and keys."""
    theirs, ours, pairs, lost, added = both
    for pair in pairs:
        if text := moved(pair, theirs, ours):
            yield Finding("moved", text)
    for one in lost:
        text = f"{entry(theirs, one)}: {counted(len(one.tensors), 'tensor', 'is')} missing from the output"
        yield Finding("lost", text)
    for one in added:
        text = f"{entry(ours, one)}: {counted(len(one.tensors), 'tensor', 'is')} in no checkpoint of the source"
        yield Finding("added", text)
    for pair in pairs:
        without = dropped[pair.output.name]
        for found in compare(theirs.signature(pair.source), ours.signature(pair.output), _called_by(theirs)):
            if found.rule != "lost" or found.tensor not in without:
                yield found
        yield from compare_keys(pair.source.keys, pair.output.keys)
        yield from _compare_metadata(pair, theirs, ours)


def _compare_metadata(pair: Pair, theirs: OpenedSide, ours: OpenedSide) -> Iterator[Finding]:
    """What became of the source's `__metadata__`, which torch files cannot hold.

    Any value counts that the source has in one of its files, though a plan takes that of the first. ``format`` has a
    rule of its own, and that a name is tied to a tensor is told where that is dropped. transformers reads that of
    torchao, of all files together; what it names by tensors whose names were changed is for nobody to tell from here.
    """
    source, output = pair
    was, is_ = source.file_metadata, output.file_metadata
    keys = was.keys() - {"format"}
    needed = TORCHAO_NAMES in was
    if not keys or not (needed or _first_file(ours, output).endswith(SUFFIX)):
        return
    if needed and theirs.names_altered(source):
        yield Finding("other_metadata", "torchao's metadata is not compared, because options changed tensor names")
        return
    names = {tensor.name for tensor in theirs.own.get(source.name, source).tensors}
    rule: Rule = "metadata" if needed else "other_metadata"
    for key in sorted(key for key in keys if was[key] not in names):
        before = source.varying.get(key, {was[key]})
        after = output.varying.get(key, {is_.get(key)}) - before
        if key not in is_:
            yield Finding(rule, f"the files' metadata lacks {key!r:.80}, which the source's has")
        elif after - {None}:
            yield Finding(rule, f"the files' metadata has another value of {key!r:.80} than the source's")
        elif after and not needed:
            text = f"only some files' metadata has {key!r:.80}, and in the source every file's has"
            yield Finding(rule, text)


def dropped_copies(pair: Pair, ours: OpenedSide, ties: Mapping[str, str]) -> dict[str, str]:
    """Names of tied tensors that only the source has -> the name under which the output has the same tensor.

    The output says so itself, and the source stores both names' bytes once, as torch files do; or the class ties them,
    as `save_pretrained` and accelerate's `save_model` drop such copies. A publication by reshard always says so.
    """
    before = {tensor.name: tensor for tensor in pair.source.tensors}
    there = before.keys() & {tensor.name for tensor in pair.output.tensors}
    published = ROOT_KEY in pair.output.index_metadata or MANIFEST in ours.source.files()
    said, dropped = _kept(pair), {}
    tied: dict[tuple[str, str, tuple[int, ...]], str] = {}  # what the class ties, of one kind -> the first of it there

    def group(tensor: Tensor) -> tuple[str, str, tuple[int, ...]]:
        return ties.get(tensor.name, tensor.name), tensor.dtype, tensor.shape

    for name in sorted(there):
        tied.setdefault(group(before[name]), name)
    for name in before.keys() - there:
        lost = before[name]
        if (kept := said(name)) is not None and kept in there:
            dropped[name] = kept
        elif not published and group(lost) in tied:
            dropped[name] = tied[group(lost)]
    return dropped


def _kept(pair: Pair) -> Callable[[str], str | None]:
    """For a name, the one under which the output keeps its bytes by its own word, if the source stores both once."""
    said = {**pair.output.file_metadata, **pair.output.index_metadata}
    before = {tensor.name: tensor for tensor in pair.source.tensors}

    def kept_for(name: str) -> str | None:
        lost, other = before[name], said.get(name)
        kept = before.get(other) if isinstance(other, str) else None
        same = kept and (kept.dtype, kept.shape, kept.pieces) == (lost.dtype, lost.shape, lost.pieces)
        return kept.name if kept and same and lost.size and kept is not lost else None

    return kept_for


# -------------------------------------------------------------------------------------------------- where it lies


def moved(pair: Pair, theirs: OpenedSide, ours: OpenedSide) -> str | None:
    """Where a loader that finds the source's files does not find the output's; None where it does.

    A name that only the source's owner knows may give way to one that loaders look for, and a folder without a config
    to one that has it.
    """
    if pair.output.in_parts and pair.source.in_parts:
        return None
    was, is_ = _called(theirs, pair.source), _called(ours, pair.output)
    unsought = pair.output.in_parts or (_has_bare_map(pair.output) and not _has_bare_map(pair.source))
    freed = not _has_config(theirs, was) and (_has_config(ours, is_) or not is_.folder)
    found = was.folder == is_.folder or freed
    named = was.stem == is_.stem or (was.stem not in discover.SOUGHT_STEMS and is_.stem in discover.SOUGHT_STEMS)
    if not unsought and (str(was) == str(is_) or (found and named and was.variant == is_.variant)):
        return None
    told = f"it is {was} in the source, and loaders that look for that name will not find it"
    return f"{entry(ours, pair.output)}: {told}"


def _called(side: OpenedSide, checkpoint: Checkpoint) -> Name:
    """What the files are called, where ``checkpoint.name`` is what they are to be called in safetensors."""
    path, first = entry(side, checkpoint), _first_file(side, checkpoint)
    if checkpoint.in_parts:
        return checkpoint.name
    if first.endswith(SUFFIX):
        torch_name = checkpoint.name.stem == "model" and basename(path).startswith("pytorch_model")
        return replace(checkpoint.name, stem="pytorch_model") if torch_name else checkpoint.name
    return discover.index_name(path) if path == checkpoint.index_path else discover.set_name(path)


def _has_bare_map(checkpoint: Checkpoint) -> bool:
    """As accelerate's `index.json`, which accelerate alone looks for."""
    return checkpoint.index_path is not None and not discover.is_weight_index(checkpoint.index_path)


def entry(side: OpenedSide, checkpoint: Checkpoint) -> str:
    """Where loaders begin: the index, or the file itself."""
    return checkpoint.index_path or _first_file(side, checkpoint)


def _first_file(side: OpenedSide, checkpoint: Checkpoint) -> str:
    return side.opened.files[checkpoint.files[0]].path


def _has_config(side: OpenedSide, name: Name) -> bool:
    return join(name.folder, "config.json") in side.source.files()


# -------------------------------------------------------------------------------------------------------- bytes


class Read(NamedTuple):
    """A side that was read once: every tensor's digests by checkpoint, and what its files were held against."""

    tensors: Mapping[Name, Mapping[str, Digests]]
    attested: int  # files held against a sha256, or against a CRC for each of their records
    records: Compared
    corrupt: tuple[str, ...]  # files that are not what their store, or their archive, says


def read(side: OpenedSide, tick: Tick, tmpdir: Path | None, *, sha256: bool = True) -> Read:
    """Read all of ``side`` once, and hold each file against its sha256 and its archive's sums.

    Without ``sha256`` against the archive's sums alone. A side with a corrupt file is read once more, to tell its
    tensors all the same.
    """
    files = side.opened.files if sha256 else [replace(file, sha256=None) for file in side.opened.files]
    hashers = {c.name: hashers_of(c, files) for c in side.opened.checkpoints}
    try:
        found = _digests(side, tick, tmpdir, hashers)
    except SourceCorrupt:
        corrupt = tuple(_corrupt(side, side.numbers, tick))
        return Read(_digests(side, tick, tmpdir, {}), 0, Compared(), corrupt)
    passed = [hasher for of_one in hashers.values() for hasher in of_one.values()]
    attested = sum(1 for hasher in passed if hasher.level != "as delivered")
    return Read(found, attested, Compared.total(hasher.records for hasher in passed), ())


def read_both(both: Paired, tick: Tick, tmpdir: Path | None) -> tuple[Read, Read]:
    """Both sides at the same time: they are different disks, or different ends of a line.

    Their files' sha256s are not taken, which would double the time: where tensors differ, `check_bytes` asks whose
    file is not what its store says. The sums of archives are: equal tensors may both be wrong.
    """
    with ThreadPoolExecutor(2, thread_name_prefix="verify") as pool:
        theirs, ours = pool.map(lambda side: read(side, tick, tmpdir, sha256=False), (both.source, both.output))
        return theirs, ours


def _digests(
    side: OpenedSide, tick: Tick, tmpdir: Path | None, hashers: Mapping[Name, Mapping[int, FileHasher]]
) -> dict[Name, Mapping[str, Digests]]:
    def one(c: Checkpoint) -> dict[str, Digests]:
        ours, changed = hashers.get(c.name, {}), side.changed.get(c.name, {})
        return digests(c, side.opened.files, side.source, tick, tmpdir, hashers=ours, changed=changed)

    return {checkpoint.name: one(checkpoint) for checkpoint in side.opened.checkpoints}


def _corrupt(side: OpenedSide, numbers: Iterable[int], tick: Tick) -> Iterator[str]:
    """Those of the files that are not what their store, or their archive's own sums, say that they are."""
    for number in numbers:
        records = [record for c in side.opened.checkpoints for record in c.records if record.file == number]
        hashers = {number: FileHasher(side.opened.files[number], (), records)}
        try:
            with closing(Stream(side.source, side.opened.files, (), hashers, tick)) as stream:
                stream.finish()
        except SourceCorrupt as error:
            yield str(error)


def check_stored(output: OpenedSide, was_read: Read) -> Check:
    """Whether what was read is what the store attests: a file's sha256, or the sums that an archive keeps."""
    figures = {"files": len(output.files), "attested": was_read.attested, "bytes": output.bytes}
    figures |= was_read.records.figures()
    without = len(output.files) - was_read.attested
    reason = f"no hash or checksum covers all bytes of {counted(without, 'file')}" if without else ""
    result: Result = "failed" if was_read.corrupt else "inconclusive" if without else "passed"
    level = "each file's sha256, or its archive's checksums"
    return Check("stored bytes", result, level, reason, figures, was_read.corrupt)


def check_bytes(both: Paired, ties: Ties, theirs: Read, ours: Read, tick: Tick, tmpdir: Path | None) -> Check:
    """Whether every tensor has the source's bytes, and dropped copies of tied ones those of what was kept.

    Only what differs is read again, to name the first difference, and the files that it lies in, to say whether one
    of them is not what its store says.
    """
    source, output, pairs, *_ = both
    compared = incomparable = 0
    findings = []
    differing: list[tuple[Entry, Tensor]] = []
    for pair in pairs:
        before, after = theirs.tensors[pair.source.name], ours.tensors[pair.output.name]
        were = {t.name: Entry(t, t.dtype) for t in pair.source.tensors}
        were.update(source.changed.get(pair.source.name, {}))
        findings += [
            f"{name} was dropped as tied to {kept}, but their bytes differ in the source"
            for name, kept in dropped_copies(pair, output, ties.get(pair.output.name, {})).items()
            if before[name].blake3 != before[kept].blake3
        ]
        kinds = source.signature(pair.source)
        for tensor in pair.output.tensors:
            if kinds.get(tensor.name) != (tensor.dtype, tensor.shape):
                incomparable += 1
                continue
            compared += 1
            if before[tensor.name].blake3 != after[tensor.name].blake3:
                differing.append((were[tensor.name], tensor))
    again, rest = differing[:READ_AGAIN_MAX], differing[READ_AGAIN_MAX:]
    findings += [f"{is_.name} has different bytes{_where(was, source, is_, output, tmpdir)}" for was, is_ in again]
    findings += [f"{is_.name} has different bytes" for _, is_ in rest]
    findings += theirs.corrupt or _corrupt(source, sorted({p.file for was, _ in again for p in was.pieces}), tick)
    findings += ours.corrupt or _corrupt(output, sorted({p.file for _, is_ in again for p in is_.pieces}), tick)
    figures = {
        "tensors": compared,
        "not_comparable": incomparable,
        "differ": len(differing),
        "bytes": source.bytes + output.bytes,
        **Compared.total((theirs.records, ours.records)).figures(),
    }
    reason = "" if compared else "no tensor has the same name, dtype and shape on both sides"
    result: Result = "failed" if findings else "passed" if compared else "inconclusive"
    return Check("same bytes", result, "BLAKE3 of every tensor, one read of each side", reason, figures, some(findings))


def _where(was: Entry, source: OpenedSide, is_: Tensor, output: OpenedSide, tmpdir: Path | None) -> str:
    first = Stored(was, source.opened.files, source.source)
    second = Stored(Entry(is_, is_.dtype), output.opened.files, output.source)
    found = first_difference(first, second, tmpdir)
    if found is None:
        return ", but not when read again: a disk or a connection returns different bytes each time"
    return f": element {list(found.element)} is {found.first} in the source and {found.second} in the output"


# --------------------------------------------------------------------------------------------------------- ties


def check_ties(models: Mapping[Name, ModelCheck], was_read: Read) -> list[Check]:
    """Of each checkpoint that stores tied tensors twice: whether both copies are equal.

    Copies that differ are not failures: honest models have them (T5 v1.1 stores a head that newer configs call tied).
    But loaders take one of them or both, so nobody can say from here which model it is.
    """
    checks = []
    for name, read in was_read.tensors.items():
        if twice := models[name].stored_twice:
            differing = [f"{one} and {other}" for one, other in twice.items() if read[one].blake3 != read[other].blake3]
            figures = {"stored_twice": len(twice), "differ": len(differing)}
            reason = "loaders use one copy or both; use --against to see whether the source has the same difference"
            reason = f"different bytes in {', '.join(some(differing))}: {reason}" if differing else ""
            result: Result = "inconclusive" if differing else "passed"
            checks.append(Check(f"ties of {name}", result, "BLAKE3 of both copies", reason, figures))
    return checks
