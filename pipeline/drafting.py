"""The first step of a job, planning, in three stages: look at the target and the source, decide, make the plan.

To look is to read listings, indexes and headers, and of the source only what the plan takes: nothing where our last
commit holds what is asked for, no headers where the target has the weights. `deciding.py` decides; the plan is made by
`planning/build.py`, of all that is known by then.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from posixpath import join

from reshard.pipeline.checkpoint.discover import Found, find_checkpoints, is_weight_index
from reshard.pipeline.checkpoint.formats.gguf import SUFFIX as GGUF
from reshard.pipeline.checkpoint.formats.safetensors import SUFFIX
from reshard.pipeline.checkpoint.indexes import load_json, named_weights
from reshard.pipeline.checkpoint.open import Opened, open_checkpoints
from reshard.pipeline.checkpoint.small_files import read_file
from reshard.pipeline.checkpoint.tool_files import is_tool_file
from reshard.pipeline.deciding import There, held_against, is_private, notes_of, refuse_too_large, replaces_others
from reshard.pipeline.errors import (
    AbsentFile,
    AccessError,
    BadPlace,
    DiskFull,
    FoldersNested,
    KeptOriginal,
    NothingKept,
    NoWeights,
    ReshardError,
    TargetConflict,
    TargetFull,
    UsageError,
    WeightsExcluded,
)
from reshard.pipeline.limits import CONFIG_MAX, INDEX_MAX, LAYERS_MAX, MANIFEST_MAX
from reshard.pipeline.paths import resolved
from reshard.pipeline.places import NOWHERE
from reshard.pipeline.planning.beside import excluded
from reshard.pipeline.planning.build import Known, make_plan, request_key, weights_key
from reshard.pipeline.planning.estimate import needs
from reshard.pipeline.planning.existing import NOTHING, Before
from reshard.pipeline.planning.model import MANIFEST, Keys, Plan, Transports
from reshard.pipeline.planning.scales import MODELOPT
from reshard.pipeline.protocols import Source, Target, TargetState
from reshard.pipeline.publishing import history as publication
from reshard.pipeline.publishing.card import card_for
from reshard.pipeline.publishing.kept import refuse_to_drop_the_original
from reshard.pipeline.publishing.manifest import parse as parse_manifest
from reshard.pipeline.request import Options, Request
from reshard.pipeline.stores.overlay import Borrowing
from reshard.pipeline.stores.scratch import ScratchSpace
from reshard.pipeline.tensors import Name, Pin
from reshard.pipeline.verifying.job_checks import check_model, check_structure
from reshard.pipeline.verifying.meta_load import MetaLoader

_UNOPENED = Opened((), (), {})


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Planning makes millions of objects and no cycles; the collector's walks over them take a third of its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_collector_paused()
def draft(request: Request, source: Source, target: Target) -> Plan:
    """The plan for ``request`` as things stand; changes nothing anywhere.

    Raises whatever is wrong with the source, the target or the options, before a byte of any tensor is read. What
    others changed in the target is in the plan, which replaces it.
    """
    return drafted(request, source, target)[0]


def drafted(request: Request, source: Source, target: Target) -> tuple[Plan, Known]:
    """The same, and what it is made from, which has no headers where the target has the weights already."""
    made, known, _ = _draft(request, source, target, None, shows=True, submitted=None)
    if made.published:
        return made, known
    refused: tuple[str, ...] = ()
    try:
        refuse_to_drop_the_original(made, target, source)
    except (KeptOriginal, NothingKept) as error:
        refused = (f"a run will fail (exit code {error.exit_code}) unless you use --overwrite: {error}",)
    return replace(made, notes=(*refused, *made.notes, *target.notes)), known


@_collector_paused()
def plan(
    request: Request,
    source: Source,
    target: Target,
    meta_loader: MetaLoader,
    submitted: int | None = None,
    disk: ScratchSpace | None = None,
) -> Plan:
    """The plan for ``request``, and a target that is ready for it: there, ours to write, its head pinned.

    ``submitted`` is when it was asked for, in ms since the epoch. Where this process also copies, on ``disk``, nothing
    is created for what that has no room for. Raises what ``draft`` raises, the AccessError family,
    ModelCheckRequired, and, unless the request says that it is to be replaced, TargetOccupied for what others put there
    and TargetDrifted for what they changed. So for what was submitted later and is published already: a broker restored
    from a backup has forgotten that.
    """
    made, known, there = _draft(request, source, target, meta_loader, shows=False, submitted=submitted)
    if request.options.require == "model":
        whole = made
        if not made.shards:  # the weights are there, perhaps of a job that did not require this: plan them as if anew
            whole = make_plan(_read(request, source, target, replace(there, last=None), meta_loader, shows=False))
        check_model(whole, whole.shards, source, meta_loader)
    if made.published is not None:
        return made
    refuse_to_drop_the_original(made, target, source)
    if disk is not None:
        refuse_without_disk(made, disk)
    head = target.prepare(private=is_private(request, source))
    known = replace(known, transports=Transports(source.transport, target.transport))  # it is there, and ours to write
    if head == made.base:
        made = replace(made, transports=known.transports)
    elif made.base or _last_publication(target, head) is not None:  # somebody commits at this very moment
        return plan(request, source, target, meta_loader, submitted, disk)
    else:
        now = target.at(head)
        there = replace(there, before=_before(now), is_source=_same(now.pin, source.pin))
        made = _make(replace(known, before=there.before), source, target, there, request.options.overwrite)
    return replace(made, notes=(*made.notes, *target.notes), submitted=submitted)


def _draft(
    request: Request, source: Source, target: Target, meta_loader: MetaLoader | None, shows: bool, submitted: int | None
) -> tuple[Plan, Known, There]:
    """``shows``: the plan is made whatever others put or changed in the target."""
    _refuse_nested_folders(request)
    there = _look(request, source, target)
    replaces = replaces_others(request, source, there, submitted, time.time(), shows)
    if there.published is not None and there.as_we_left_it and not _prunes(request.options, there.before):
        # No file of the source needs to be listed.
        keys, found, before = Keys(there.key, None), Found((), frozenset()), Before(there.before.head, {}, {}, {})
        known = Known(request, source.pin, keys, found, _UNOPENED, {}, before, there.published, lender=_lender(source))
        return make_plan(known), known, there
    known = _read(request, source, target, there, meta_loader, shows)
    made = _make(known, source, target, there, replaces)
    _refuse_lost_names(made, known)
    refuse_too_large(made)
    if made.shards:
        check_structure(made, known.opened, known.ties, known.configs)
    return made, known, there


def _refuse_lost_names(made: Plan, known: Known) -> None:
    """Raises UsageError where a config names a file of weights that the result would not have."""
    there = {shard.path for shard in made.shards} | {one.index.path for one in made.outputs if one.index}
    there |= (carried := {file.path for file in made.carried})
    kept = carried | {edit.path for edit in made.edits}
    for config, path in known.named.items():
        if made.shards and config in kept and path not in there:
            what = f"{config} has transformers_weights, which names {path}, and the result would have no such file"
            raise UsageError(what=f"{what}; choose a size at which it has, or --exclude {config}")


def _prunes(options: Options, before: Before) -> bool:
    """Whether others put files beside what we published that --prune deletes."""
    return options.prune and not all(is_tool_file(path) for path in before.files.keys() - before.published.keys())


@_collector_paused()
def outline(source: Source) -> Known:
    """All that any cut of ``source`` is made from, without a target; ``make_plan`` with other options reads no more.

    Raises NoWeights, the CheckpointError family, and what stores raise.
    """
    request = Request(source=source.place, target=NOWHERE)
    found = _found(source, request.options)
    configs, opened = _configs(source, found), open_checkpoints(source, found)
    found, before, layers = found.carrying(opened.uncut), NOTHING, _layers(opened, configs)
    return Known(request, source.pin, Keys("", None), found, opened, source.files(), before, layers=layers)


# ---------------------------------------------------------------------------------------------------------- to look


def _lender(source: Source) -> Pin | None:
    return source.lender.pin if isinstance(source, Borrowing) else None


def _look(request: Request, source: Source, target: Target) -> There:
    """What the target is. Its files are not listed where its head is our commit of this very request."""
    pin, state = source.pin, target.state()
    key = _key(request, source, target, pin.commit)
    if (base := state.base) is None:
        return There(key, state, NOTHING)
    last, then = _last_publication(target, base) or (None, None)
    last = last and _named_alike(last, source)
    now = then if then is not None and then.pin.commit == base else target.at(base)
    published = None
    if last is not None and then is not None and state.head is not None and not request.options.force:
        # Of this source, or in place of one that has been that result since.
        were = _key(request, source, target, last.source_commit)
        if last.request == key or (last.request == were and _same(then.pin, pin)):
            published = last.commit
    before = Before(base, {}, {}, {}) if published == base else _before(now, last, then)
    return There(key, state, before, last, published, _same(now.pin, pin))


def _key(request: Request, source: Source, target: Target, commit: str) -> str:
    """Of ``request`` with its source at ``commit``. A folder is one, by whichever links it is named."""
    pin, into = replace(source.pin, commit=commit), target.place.local
    if source.place.local:
        pin = replace(pin, repo=str(resolved(pin.repo)))
    return request_key(request, pin, _lender(source), publication.address(target, into and resolved(str(into))))


def _named_alike(last: publication.Publication, source: Source) -> publication.Publication:
    """``last``, with its source by the name that it has now, if it is this folder by another link."""
    with suppress(BadPlace, TypeError):  # of a record that someone else wrote
        if source.place.local and last.endpoint is None and resolved(last.source) == resolved(source.pin.repo):
            return replace(last, source=source.pin.repo)
    return last


def _last_publication(target: Target, head: str) -> tuple[publication.Publication, Source] | None:
    """Our last publication before ``head``; None also where a folder, after a rollback, has nothing of it left."""
    last = next(publication.publications(target, head, None), None)
    try:
        return None if last is None else (last, target.at(last.commit))
    except TargetConflict:
        return None


def _before(now: Source, last: publication.Publication | None = None, then: Source | None = None) -> Before:
    """What the target holds ``now``, and held ``then``, after our last publication there."""
    files = now.files()
    indexes = {path: read_file(now, file, INDEX_MAX) for path, file in files.items() if is_weight_index(path)}
    if last is None or then is None:
        return Before(now.pin.commit, files, indexes, {})
    published = {path: file for path, file in then.files().items() if path not in last.kept}
    return Before(now.pin.commit, files, indexes, published, last.pin.origin)


def _read(
    request: Request, source: Source, target: Target, there: There, meta_loader: MetaLoader | None, shows: bool
) -> Known:
    """All that the plan is made from; no headers are read of weights that the target has already."""
    options, listing = request.options, source.files()
    found = _found(source, options)
    keys = Keys(there.key, weights_key(found, listing, options))
    ours = there.last if there.as_we_left_it and not options.force else None
    same_weights = ours is not None and ours.weights is not None and ours.weights == keys.weights
    is_gguf = any(part.format == "gguf" for part in found.sets)
    configs = _configs(source, found)
    if meta_loader is not None and not same_weights and not is_gguf:
        meta_loader.ahead(configs.values())
    # Of GGUF files only the keys say which of them are carried.
    opened = open_checkpoints(source, found) if is_gguf or not same_weights else _UNOPENED
    found = found.without_maps().carrying(opened.uncut)
    opened = _UNOPENED if same_weights else opened
    settings = _configs(source, found, MODELOPT) if options.dequantize else {}
    texts, notes = _texts({} if options.dtype == "keep" else {**configs, **settings})
    notes += notes_of(request, source, there.state, target.leave(there.state.exists) if shows else None)
    return Known(
        request,
        source.pin,
        keys,
        found,
        opened,
        listing,
        there.before,
        None,
        Transports(source.transport, _transport(request, target, there.state)),
        source.transport == "xet" and source.pin.endpoint == target.endpoint,
        _lender(source),
        ties=_ties(opened, configs, meta_loader) if options.ties == "source" else {},
        configs=texts,
        layers=_layers(opened, configs) if options.ranks else {},
        notes=notes,
        named={path: name for path, text in configs.items() if (name := named_weights(path, text))},
    )


def _found(source: Source, options: Options) -> Found:
    """The checkpoints of ``source`` but for what is excluded; raises WeightsExcluded where --exclude spoils them."""
    try:
        return find_checkpoints(source, lambda path: excluded(options, path))
    except (NoWeights, AbsentFile) as error:
        if not options.exclude:
            raise
        whole = options.model_copy(update={"exclude": ()})
        find_checkpoints(source, lambda path: excluded(whole, path))  # raises what has another cause
        raise WeightsExcluded(globs=" ".join(options.exclude), why=str(error)) from error


def _transport(request: Request, target: Target, state: TargetState) -> str:
    """How weights would reach the target; "" where that shows only once it is there, or ours to write.

    Only a repository has two ways; what has no branches is none.
    """
    if state.head is None and request.target.branch and request.options.transport != "http":
        return ""
    try:
        return target.transport
    except AccessError:  # a plan writes nothing, and what does asks again
        return ""


def _configs(source: Source, found: Found, name: str = "config.json") -> dict[str, bytes]:
    """The content, by path, of what says how each checkpoint is loaded, where there is one."""
    listing = source.files()
    paths = {join(part.name.folder, name) for part in found.sets} & listing.keys()
    return {path: read_file(source, listing[path], CONFIG_MAX) for path in sorted(paths)}


def _texts(configs: Mapping[str, bytes]) -> tuple[dict[str, str], tuple[str, ...]]:
    """What follows a change of dtype, and notes of what cannot, as it is no text."""
    texts, notes = dict[str, str](), tuple[str, ...]()
    for path, content in configs.items():
        try:
            texts[path] = content.decode()
        except UnicodeDecodeError:
            notes += (f"{path} is not UTF-8: its dtype is not changed",)
    return texts, notes


def _layers(opened: Opened, configs: Mapping[str, bytes]) -> dict[Name, int]:
    """How many layers each model has, where its config says it."""
    found: dict[Name, int] = {}
    for one in opened.checkpoints:
        try:
            config = load_json(configs.get(join(one.name.folder, "config.json"), b""))
        except ValueError:  # which the check of the model's class tells
            continue
        parts = [config, config.get("text_config")] if isinstance(config, dict) else []
        counts = [part.get("num_hidden_layers") for part in parts if isinstance(part, dict)]
        if told := [count for count in counts if type(count) is int and 0 < count <= LAYERS_MAX]:
            found[one.name] = told[0]
    return found


def _ties(
    opened: Opened, configs: Mapping[str, bytes], meta_loader: MetaLoader | None
) -> dict[Name, Mapping[str, str]]:
    """Of each model whose file stores names once: which parameter each of the others is tied to."""
    paths = {c.name: join(c.name.folder, "config.json") for c in opened.checkpoints if c.ties}
    tied = [c for c in opened.checkpoints if paths.get(c.name) in configs]
    if not tied:
        return {}
    if meta_loader is None:
        with closing(MetaLoader()) as ours:
            return _ties(opened, configs, ours)
    names = {c.name: {t.name: (t.dtype, t.shape) for t in c.tensors} for c in tied}
    return {name: meta_loader.check(configs[paths[name]], tensors).ties for name, tensors in names.items()}


# ---------------------------------------------------------------------------------------------------------- to make


def _make(known: Known, source: Source, target: Target, there: There, replaces: bool) -> Plan:
    """The plan, held against what others have in the target, and with what becomes of the card."""
    made = make_plan(replace(known, in_place=there.is_source))
    made = held_against(known.request, made, _of_others(made, target, there.last), there, replaces)
    return replace(made, notes=(*made.notes, *card_for(made, source, target, made.base, lambda: there.last).notes))


def _of_others(made: Plan, target: Target, last: publication.Publication | None) -> tuple[str, ...]:
    """Of what ``made`` finds occupied, what is not ours after all.

    Main's history may hold it too, as it does what a branch of ours was made from; and where a repository's history was
    squashed, the manifest says whose weights these are: then only other files that are to be replaced count.
    """
    if not made.occupied or target.is_shared(made.base):
        return ()
    if last is not None or not target.branch or not _manifest_holds(made, target.at(made.base)):
        return made.occupied
    paths = (file.path for file in made.replaced if not is_weight_index(file.path))
    return tuple(path for path in paths if not path.endswith((MANIFEST, SUFFIX, GGUF)))


def _manifest_holds(made: Plan, there: Source) -> bool:
    """Whether all weights there are those of a manifest that names the plan's source, or are carried as they are."""
    files, pin = there.files(), made.pin
    try:
        manifest = parse_manifest(read_file(there, files[MANIFEST], MANIFEST_MAX)) if MANIFEST in files else None
    except ReshardError:
        return False
    if manifest is None or (manifest.source.endpoint, manifest.source.repo) != pin.origin:
        return False
    carried = {file.path: file.sha256 for file in made.carried if file.path not in manifest.files}
    known = carried | {path: file.sha256 for path, file in manifest.files.items()}
    weights = {path: file.sha256 for path, file in files.items() if path.endswith((SUFFIX, GGUF))}
    return weights.keys() >= manifest.files.keys() and all(known.get(p) == sha256 for p, sha256 in weights.items())


def _same(one: Pin, other: Pin) -> bool:
    """Whether both are one place at one state."""
    if one.endpoint is None and other.endpoint is None:
        return one.commit == other.commit and resolved(one.repo) == resolved(other.repo)
    return one == other


def _refuse_nested_folders(request: Request) -> None:
    """A place and a folder inside it cannot be source and target; raises FoldersNested. One place may be both."""
    target = request.target
    for place in (request.source, request.options.config_from):
        if place is None:
            continue
        shown = str(resolved(str(place))) if place.local else str(place)
        if place.local and target.local and _is_working_folder(Path(shown), of=resolved(str(target))):
            what = "the run would remove its own source"
            raise FoldersNested(inner=shown, where="a working folder of", outer=str(target), what=what)
        if place.holds(target):
            what = "the result would become part of its own source"
            raise FoldersNested(inner=str(target), outer=shown, what=what)
        if target.holds(place):
            what = "replacing the target would replace the source"
            raise FoldersNested(inner=shown, outer=str(target), what=what)


def _is_working_folder(path: Path, of: Path) -> bool:
    """Whether ``path`` is, or is in, a folder that a target has beside it, as their names begin (folder/swap.py)."""
    beside = f".{of.name}.reshard"
    return any(part.parent == of.parent and part.name.startswith(beside) for part in (path, *path.parents))


def refuse_without_room(made: Plan, target: Target) -> None:
    """Raises TargetFull where a folder has not the room that ``made`` needs; nothing is written."""
    before = target.at(made.base).files() if made.base else {}
    need, room = needs(made, before).target, target.room()
    if room is not None and need > room:
        raise TargetFull(path=str(target.place), needed=need, free=room)


def refuse_without_disk(made: Plan, disk: ScratchSpace) -> None:
    """Raises DiskFull where ``disk`` has not what copying the shards of ``made`` needs at least; nothing is read."""
    need = needs(made, {}).least_disk
    if need > disk.room():
        raise DiskFull(path=str(disk.path), needed=need, free=disk.room())
