"""Checkpoints and options -> the plan. Pure: everything it decides on was read before.

What is written follows from the source and the options; what is deleted and kept follows from what the target holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from posixpath import join
from typing import NamedTuple

from reshard.pipeline.checkpoint.discover import Found
from reshard.pipeline.checkpoint.formats import gguf
from reshard.pipeline.checkpoint.names import PathsOf, index_path, shard_path
from reshard.pipeline.checkpoint.open import Opened
from reshard.pipeline.checkpoint.tool_files import is_tool_file, passed_over
from reshard.pipeline.errors import (
    BadRanks,
    BadSize,
    NotDequantized,
    Oversize,
    RenameUnused,
    SizeTooSmall,
    UsageError,
)
from reshard.pipeline.figures import human_bytes
from reshard.pipeline.limits import ALIGNMENT
from reshard.pipeline.planning.beside import (
    describes,
    excluded,
    idle_globs,
    idle_indexes,
    other_weights,
    settings_edits,
    settings_paths,
    sort_out,
    strays,
)
from reshard.pipeline.planning.bounds import (
    check_headers,
    check_names,
    check_paths,
    check_sizes,
    check_torchao,
    warnings_of,
)
from reshard.pipeline.planning.codec import plan_digest, shard_digest
from reshard.pipeline.planning.existing import Before, deletes_of, drift, occupied, replaced
from reshard.pipeline.planning.experts import unchanged
from reshard.pipeline.planning.groups import grouped
from reshard.pipeline.planning.model import (
    CARD,
    MANIFEST,
    NO_TRANSPORT,
    PROVENANCE,
    ROOT_KEY,
    SCHEMA,
    SIGNATURE,
    STATEMENTS,
    TENSORS,
    TOTAL_PARAMETERS,
    Edit,
    Entry,
    Index,
    Keys,
    Output,
    Plan,
    Shard,
    Transports,
)
from reshard.pipeline.planning.pack import (
    PACKINGS,
    About,
    Bin,
    GgufKeys,
    Heading,
    aligned,
    alignment_of,
    check_metadata,
    check_size,
    file_size,
    first_first,
    header_of,
    in_source_order,
)
from reshard.pipeline.planning.parameters import total_parameters
from reshard.pipeline.planning.ranges import same_cut
from reshard.pipeline.planning.readers import NO_SHARES, Readers, Shares, refuse_undivided, shares_of
from reshard.pipeline.planning.scales import MODELOPT
from reshard.pipeline.planning.select import Selection, check_prefix, edited_config, followed, select
from reshard.pipeline.request import LAYOUT, Options, Request, key_of
from reshard.pipeline.sizes import SINGLE
from reshard.pipeline.tensors import Checkpoint, Name, Pin, StoredFile, size_in_bytes
from reshard.pipeline.text import counted


def request_key(request: Request, pin: Pin, lender: Pin | None, target: str) -> str:
    """What makes two requests one: the sources' commits, the target, and every option that shows in the result."""
    pins = [[p.endpoint, p.repo, p.commit] for p in (pin, lender) if p]
    return key_of([LAYOUT, pins, target, request.options.content()])


def weights_key(found: Found, listing: Mapping[str, StoredFile], options: Options) -> str | None:
    """What decides the bytes of the weights and their names, from a listing alone; None where files have no hashes.

    The names of torch sets and what a config says of ties and of scales are named only where they count, so that the
    keys of all other requests stay as they are.
    """
    paths = [*(file.path for file in found.files), *found.indexes]
    if options.ties == "source" or options.dequantize or options.ranks.startswith("pp"):
        configs = {join(part.name.folder, name) for part in found.sets for name in ("config.json", MODELOPT)}
        paths += configs & listing.keys()
    identities = [[path, listing[path].size, listing[path].sha256 or listing[path].oid] for path in sorted(paths)]
    if any(identity is None for _, _, identity in identities):
        return None
    # A config beside a torch file has it named as loaders look for it.
    names = sorted(str(part.name) for part in found.sets if part.format not in {"safetensors", "gguf"})
    # Settings are written with the weights, from the same file.
    names += sorted(path for path, written in settings_paths(found, listing, options).items() if not written)
    return key_of([LAYOUT, identities, options.weights(), *([names] if names else [])])


@dataclass(frozen=True, slots=True)
class Known:
    """Everything that a plan is made from.

    An ``opened`` without checkpoints says that the target's weights are the right ones already: they stay, and only
    carried files move. ``published`` is the commit that holds this very request's result, if there is one.
    """

    request: Request
    pin: Pin
    keys: Keys
    found: Found
    opened: Opened
    listing: Mapping[str, StoredFile]
    before: Before
    published: str | None = None
    transports: Transports = NO_TRANSPORT
    shares: bool = False
    lender: Pin | None = None
    ties: Mapping[Name, Mapping[str, str]] = field(default_factory=dict)  # parameter -> the one it is tied to
    configs: Mapping[str, str] = field(default_factory=dict)  # the texts that follow a change of dtype
    named: Mapping[str, str] = field(default_factory=dict)  # config -> the file of weights that it names
    layers: Mapping[Name, int] = field(default_factory=dict)  # as configs count them, where stages are cut
    notes: tuple[str, ...] = ()  # of the target
    in_place: bool = False  # the target is the source itself


def make_plan(known: Known) -> Plan:
    """The plan: same input, same plan, digest and all.

    Raises Oversize, SizeTooSmall, RenameUnused, PrefixUnused, and what ``select`` and ``bounds.py`` raise.
    """
    options, opened, before = known.request.options, known.opened, known.before
    on_hub = known.request.target.local is None
    if on_hub:
        check_names(opened)
    shards: list[Shard] = []
    outputs: list[Output] = []
    notes = [*known.notes]
    found: list[Shares] = []
    altered = set[str]()
    same_experts = options.experts != "keep" and bool(opened.checkpoints)
    unused = {*range(len(options.rename))} if opened.checkpoints else set()
    refused: list[Oversize | SizeTooSmall] = []
    for checkpoint in opened.checkpoints:
        is_gguf = checkpoint.name.suffix == gguf.SUFFIX
        try:
            made = (_cut_gguf if is_gguf else _cut)(checkpoint, known, len(shards))
        except (Oversize, SizeTooSmall) as error:
            refused.append(error)
            continue
        shards += made.shards
        outputs.append(made.output)
        found.append(made.share)
        unused -= made.selection.rules_used
        if options.altering("values", "names", "set"):
            altered |= made.selection.altered()
        same_experts = same_experts and not made.selection.rearranged
        notes += [*checkpoint.notes, *made.notes]
    if refused:  # with the size that is enough for all models
        raise max(refused, key=attrgetter("enough"))
    refuse_undivided(found)
    if same_experts:
        raise unchanged((t.name for checkpoint in opened.checkpoints for t in checkpoint.tensors), options.experts)
    if opened.checkpoints:
        check_prefix(opened.checkpoints, options.strip_prefix)
    if unused:
        raise RenameUnused(rule=options.rename[min(unused)])
    written = {s.path for s in shards} | {o.index.path for o in outputs if o.index}
    if options.manifest and shards:
        written.add(MANIFEST)
    if options.tensor_hashes and not options.sign:
        raise UsageError(what="--tensor-hashes requires --sign")
    if options.sign:
        written |= {*STATEMENTS} if options.tensor_hashes and shards else {SIGNATURE, PROVENANCE}
    reused = () if opened.checkpoints else _reused(known)
    brought = set[str]() if opened.checkpoints else before.published.keys() - {*reused}
    carried, left_out = sort_out(known.listing, known.found, opened, options, written | {*reused}, brought)
    check_headers(shards, options.size)
    if on_hub:
        check_sizes(shards, carried)
    settings, told = settings_edits(opened, settings_paths(known.found, known.listing, options))
    edits = (*_edits(known, {file.path for file in carried}), *settings)
    notes += told
    beside = {f.path for f in carried} | {edit.path for edit in edits} | {CARD}
    stays = written | {*reused} | beside
    folders = [checkpoint.name.folder for checkpoint in opened.checkpoints]
    theirs = {one.path for one in left_out if known.in_place and not describes(one.path, folders)} - {*STATEMENTS}
    idle = {*known.found.idle} if known.in_place else set[str]()  # or they would be of what is published
    deletes, pruned = deletes_of(outputs, before, stays, theirs, idle, options)
    taken = pruned - before.published.keys()
    kept = before.files.keys() - stays - {*deletes}
    if options.sign and (foreign := sorted(path for path in kept if not passed_over(path))):
        left = f"{counted(len(foreign), 'file')} left in place, such as {foreign[0]}"
        cure = "" if any(map(is_tool_file, foreign)) else " (--prune deletes them)"
        notes.append(f"{left}: not covered by the signature, so verifiers reject the download{cure}")
    check_paths([s.path for s in shards], written | beside, kept, on_hub)
    notes += [*_uncut_notes(known, carried), *strays(known.found), *idle_indexes(known.found)]
    notes += other_weights(left_out, known.found, options)
    if known.published is None:  # or nothing was listed
        notes += idle_globs(options, known.listing)
    changes = replaced(before, written | {edit.path for edit in edits}, carried, deletes)
    plan = Plan(
        schema=SCHEMA,
        pin=known.pin,
        lender=known.lender,
        base=before.head,
        options=options,
        keys=known.keys,
        files=opened.files,
        records=tuple(record for checkpoint in opened.checkpoints for record in checkpoint.records),
        shards=tuple(shards),
        groups=grouped(shards, opened),
        outputs=tuple(outputs),
        carried=tuple(file for file in carried if file.path not in {edit.path for edit in edits}),
        edits=edits,
        left_out=left_out,
        reused=reused,
        deletes=deletes,
        kept=tuple(sorted(kept)),
        notes=tuple(notes + warnings_of(shards, carried, known.request.target)),
        digest="",
        transports=known.transports,
        shares=known.shares,
        published=known.published,
        drift=(drifted := tuple(drift(before))),
        replaced=changes,
        occupied=(others := occupied(before, known.pin, changes, pruned)),
        takes=bool(drifted or others or taken),
        pruned=tuple(sorted(taken)),
        altered=tuple(sorted(altered)) if opened.checkpoints else None,
    )
    return replace(plan, digest=plan_digest(plan))


def _reused(known: Known) -> tuple[str, ...]:
    """What our last publication wrote of the weights. Others that it has are carried, by their names or --include."""
    settings = settings_paths(known.found, known.listing, known.request.options)
    of_weights = {path for path, written in settings.items() if written} | {MANIFEST, TENSORS}
    names = PathsOf(part.name for part in known.found.sets)
    ours = (path for path in known.before.published if path in of_weights or path in names)
    return tuple(sorted(path for path in ours if path not in known.found.uncut))


def _edits(known: Known, carried: set[str]) -> tuple[Edit, ...]:
    options, listing = known.request.options, known.listing
    texts = {path: text for path, text in sorted(known.configs.items()) if path in carried}
    edited = [Edit(path, edited_config(path, text, options, listing)) for path, text in texts.items()]
    return tuple(edit for edit in edited if edit.content != texts[edit.path])


# --------------------------------------------------------------------------------------------------------- cutting


class _Made(NamedTuple):
    shards: list[Shard]
    output: Output
    selection: Selection
    notes: list[str]
    share: Shares = NO_SHARES


def _cut(checkpoint: Checkpoint, known: Known, first: int) -> _Made:
    options, files = known.request.options, known.opened.files
    if single := checkpoint.name.folder in known.found.single:
        options = options.model_copy(update={"size": SINGLE, "ranks": None})
    selection = select(checkpoint, options, known.ties.get(checkpoint.name, {}), known.configs)
    check_torchao(checkpoint, selection.entries, options)
    checkpoint = followed(checkpoint, options, selection.entries)
    entries = in_source_order(selection.entries)
    heading = Heading({"format": "pt"} | checkpoint.file_metadata, options.align)
    too_large = check_size(entries, options.size, heading, options.oversize)
    share = NO_SHARES
    if options.ranks:
        names, layers = [entry.name for entry in entries], known.layers.get(checkpoint.name)
        share = shares_of(checkpoint.name, names, Readers.of(options.ranks), layers)

    def pack(heading: Heading) -> list[Bin]:
        return [b for part in _parts(entries, share) for b in PACKINGS[options.pack](part, options.size, heading)]

    bins = pack(heading)
    # One file has no index, so its own metadata names what is tied, also by an index of before.
    told = {key: to for key, to in checkpoint.index_metadata.items() if isinstance(to, str)}
    if told:
        ours = {entry.name for entry in entries}
        told = {key: to for key, to in told.items() if to in ours and key not in ours}
    if len(bins) == 1 and (tied := {**told, **selection.dropped}):
        named = heading._replace(metadata={**heading.metadata, **tied})
        bins = pack(named)
        # A single tensor that fits without them goes without them.
        if len(bins) == 1 and (too_large or file_size(aligned(bins[0], options.align), named) <= options.size):
            heading = named
    check_metadata(heading, len(bins), options.size)
    shards = [
        _shard(aligned(b, options.align), shard_path(checkpoint.name, i + 1, len(bins)), heading, files, known.pin)
        for i, b in enumerate(bins)
    ]
    numbers = tuple(range(first, first + len(shards)))
    index = None
    if len(shards) > 1 and (path := index_path(checkpoint.name)):
        about = {"total_size": sum(shard.size - len(shard.header) for shard in shards), **selection.dropped}
        anew = (ROOT_KEY, TOTAL_PARAMETERS)
        kept = {key: value for key, value in checkpoint.index_metadata.items() if key not in anew}
        index = Index(path, numbers, kept | total_parameters(checkpoint, selection, options.dequantize) | about)
    notes = [*selection.notes, *share.notes, *_large_notes(too_large, options.size)]
    if single and shards and shards[0].size > known.request.options.size:
        notes.append(f"{checkpoint.name} stays in one file: sentence-transformers reads no index of a static embedding")
    placed = options.align != ALIGNMENT  # then where a tensor begins is part of what was asked for
    if not (options.rename or options.strip_prefix) and same_cut(shards, checkpoint.tensors, files, placed):
        then = "a run writes" if known.request.target == known.request.source else "the target gets"
        one = f"{checkpoint.name}: " if len(known.opened.checkpoints) > 1 else ""
        notes.append(f"{one}already in this layout: {then} the same weights in the same files")
    readers = tuple(share.of.get(b[0].name) for b in bins) if options.ranks else ()
    path = join(checkpoint.name.folder, "config.json")
    config = path if path in known.listing and not excluded(options, path) else None
    output = Output(checkpoint.name, numbers, index, config, selection.ties, readers)
    return _Made(shards, output, selection, notes + _config_note(output, known), share)


def _parts(entries: Sequence[Entry], share: Shares) -> list[Bin]:
    """The entries that one rank reads, or all, which come first: those alone share files."""
    if not share.of:
        return [list(entries)] if entries else []
    parts: dict[int | None, Bin] = defaultdict(list)
    for entry in entries:
        parts[share.of.get(entry.name)].append(entry)
    return [parts[rank] for rank in sorted(parts, key=lambda rank: (rank is not None, rank))]


def _large_notes(too_large: Sequence[Entry], limit: int) -> list[str]:
    return [
        f"{e.name} ({human_bytes(e.size)}){'' if e.size > limit else ' with its header'} is larger than --size"
        " and gets its own file"
        for e in too_large
    ]


def _cut_gguf(checkpoint: Checkpoint, known: Known, first: int) -> _Made:
    """The same for GGUF, whose parts are found by their names and keys, without an index; nothing of it is cast."""
    options, files, keys = known.request.options, known.opened.files, GgufKeys(checkpoint.keys)
    if options.dequantize:
        cure = "remove --dequantize and --dtype to copy its quantized tensors unchanged"
        raise NotDequantized(why=f"{checkpoint.name} is a GGUF model, which cannot be dequantized", cure=cure)
    if options.ranks:
        raise BadRanks(value=options.ranks, why=f"{checkpoint.name} is a GGUF model, whose loaders read every file")
    if options.align != ALIGNMENT:
        raise UsageError(what=f"{checkpoint.name}: --align does not apply to GGUF, which defines its own alignment")
    if options.dtype != "keep":
        raise UsageError(what=f"{checkpoint.name}: --dtype does not apply to GGUF, which defines its own quantization")
    selection = select(checkpoint, options, {})
    entries = in_source_order(selection.entries)
    count = len(entries)
    too_large = check_size(entries, options.size, keys.part(1, 2, count), options.oversize)
    bins = first_first(PACKINGS[options.pack](entries, options.size, keys), options.size, keys)
    if len(bins) > gguf.PARTS_MAX:
        raise BadSize(value=options.size, why=f"a GGUF model can have at most {gguf.PARTS_MAX:,} files")
    shards = [
        _shard(b, shard_path(checkpoint.name, i + 1, len(bins)), keys.part(i, len(bins), count), files, known.pin)
        for i, b in enumerate(bins)
    ]
    notes = [*selection.notes, *_large_notes(too_large, options.size)]
    if shards[0].size > options.size and bins[0][0] not in too_large:
        if options.oversize == "fail":
            raise Oversize(tensor=f"{bins[0][0].name} with all keys", bytes=shards[0].size, size=options.size)
        notes.append(f"{shards[0].path} is larger than --size ({human_bytes(shards[0].size)}): all keys and one tensor")
    if options.rename:
        gguf.check_renamed((e.name for e in selection.entries), (t.name for t in checkpoint.tensors))
    numbers = tuple(range(first, first + len(shards)))
    return _Made(shards, Output(checkpoint.name, numbers, None, None, selection.ties), selection, notes)


def _shard(entries: Bin, path: str, about: About, files: Sequence[StoredFile], pin: Pin) -> Shard:
    header, alignment = header_of(entries, about), alignment_of(about)
    sizes = [size_in_bytes(as_dtype, tensor.shape) for tensor, as_dtype, _ in entries]
    size = len(header) + sum([size + -size % alignment for size in sizes])
    return Shard(path, tuple(entries), header, size, shard_digest(header, entries, files, pin), alignment)


def _config_note(output: Output, known: Known) -> list[str]:
    """How to load weights that lie in a folder of their own, away from the config, where there is one."""
    at_root = "config.json" in known.listing and not excluded(known.request.options, "config.json")
    if output.config is not None or not at_root:
        return []
    where = f"subfolder={output.name.folder!r}, config=AutoConfig.from_pretrained(MODEL)"
    return [f"{output.name} has no config.json next to it; load it with from_pretrained(MODEL, {where})"]


def _uncut_notes(known: Known, carried: Sequence[StoredFile]) -> list[str]:
    return [
        f"{file.path} ({human_bytes(file.size)}) is copied unchanged: its loader looks for this name"
        for file in carried
        if file.path in known.found.uncut and file.size > known.request.options.size
    ]
