"""The plan of a job: what is read of its source and its target before a byte of any tensor is, and what follows."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from posixpath import join

from reshard.pipeline.check import first, some
from reshard.pipeline.checkpoint.discover import Found, find_checkpoints, is_weight_index, read_file
from reshard.pipeline.checkpoint.formats.gguf import SUFFIX as GGUF
from reshard.pipeline.checkpoint.formats.safetensors import SUFFIX
from reshard.pipeline.checkpoint.open import Opened, open_checkpoints
from reshard.pipeline.errors import (
    AbsentFile,
    AccessError,
    DiskFull,
    FoldersNested,
    MadeTooLarge,
    NoWeights,
    ReshardError,
    TargetConflict,
    TargetDrifted,
    TargetFull,
    TargetMoreVisible,
    TargetOccupied,
    WeightsExcluded,
)
from reshard.pipeline.limits import CONFIG_MAX, INDEX_MAX, MANIFEST_MAX, OCCUPIED_SHOWN
from reshard.pipeline.places import resolved
from reshard.pipeline.planning.beside import excluded
from reshard.pipeline.planning.build import Known, make_plan, request_key, weights_key
from reshard.pipeline.planning.estimate import needs, of_our_own
from reshard.pipeline.planning.existing import Before, drift
from reshard.pipeline.planning.model import MANIFEST, Keys, Plan, Transports
from reshard.pipeline.planning.scales import MODELOPT
from reshard.pipeline.protocols import Leave, Source, Target, TargetState, reach
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
def draft(request: Request, source: Source, target: Target, meta_loader: MetaLoader | None = None) -> Plan:
    """The plan for ``request`` as things stand; changes nothing anywhere.

    ``meta_loader`` is asked only for which tied names are the sources, where the request wants to know.
    Raises whatever is wrong with the source, the target or the options, before a byte of any tensor is read. What
    others changed in the target is in the plan, which replaces it.
    """
    made, _ = _draft(request, source, target, meta_loader, shows=True, submitted=None)
    return made if made.published else replace(made, notes=(*made.notes, *target.notes))


@_collector_paused()
def plan(
    request: Request, source: Source, target: Target, meta_loader: MetaLoader, submitted: int | None = None
) -> Plan:
    """The plan for ``request``, and a target that is ready for it: there, ours to write, its head pinned.

    ``submitted`` is when it was asked for, in ms since the epoch. Raises what ``draft`` raises, the AccessError family,
    ModelCheckRequired, and, unless the request says that it is to be replaced, TargetOccupied for what others put there
    and TargetDrifted for what they changed. So for what was submitted later and is published already: a broker restored
    from a backup has forgotten that.
    """
    made, known = _draft(request, source, target, meta_loader, shows=False, submitted=submitted)
    if made.published is not None:
        return made
    if made.in_place and not request.options.overwrite:
        refuse_to_drop_the_original(target, source, request.options)
    if request.options.require == "model":
        check_model(made, made.shards, source, meta_loader)
    head = target.prepare(private=_private(request, source))
    transports = Transports(source.transport, target.transport)  # now that the target is there, and ours to write
    if head == made.base:
        return replace(made, transports=transports, notes=(*made.notes, *target.notes), submitted=submitted)
    if made.base:  # somebody commits at this very moment
        return plan(request, source, target, meta_loader, submitted)
    last = _last_publication(target, head)
    if last is not None:  # somebody published there while this was planned
        return plan(request, source, target, meta_loader, submitted)
    made = make_plan(replace(known, before=_look(target, head, last), transports=transports))
    made = _held_against_others(request, made, target, last, request.options.overwrite)
    made = _with_card_notes(made, source, target, last)
    return replace(made, notes=(*made.notes, *target.notes), submitted=submitted)


def _draft(
    request: Request,
    source: Source,
    target: Target,
    meta_loader: MetaLoader | None,
    shows: bool,
    submitted: int | None,
) -> tuple[Plan, Known]:
    """``shows``: the plan is made whatever others put or changed in the target."""
    _refuse_nested_folders(request)
    state = target.state()
    _check_visibility(request, source, target, state)
    lender = source.lender.pin if isinstance(source, Borrowing) else None
    keyed = partial(request_key, request, lender=lender, target=publication.address(target))
    key = keyed(source.pin)
    last = None if state.head is None else _last_publication(target, state.head)
    options = request.options
    replaces = shows or _replaces(request, source.pin, target, state.head, last)
    believed = None if options.force else last  # our last commit, unless it is to be doubted
    published = believed.commit if believed is not None and _answers(believed, keyed, source.pin, target) else None
    untouched = published is not None and published == state.head
    before = Before(published or "", {}, {}, {}) if untouched else _look(target, state.head, last)
    drifted = drift(before)
    if drifted and not replaces:
        raise TargetDrifted(target=str(request.target), what=first(drifted))
    if last is not None and published is None and not replaces and last.is_later(submitted, time.time()):
        what = f"{last.commit[:12]} has what was asked for later"
        raise TargetDrifted(target=str(request.target), since="after this was submitted", what=what)
    if published is not None and not drifted:
        return _nothing(request, source, lender, key, published, before.head)
    listing = source.files()
    found = _found(source, options)
    keys = Keys(key, weights_key(found, listing, options))
    believed = None if drifted else believed
    same_weights = believed is not None and believed.weights is not None and believed.weights == keys.weights
    is_gguf = any(part.format == "gguf" for part in found.sets)
    configs = _configs(source, found)
    if meta_loader is not None and not same_weights and not is_gguf:
        meta_loader.ahead(configs.values())
    # Of GGUF files only the keys say which of them are carried.
    opened = open_checkpoints(source, found) if is_gguf or not same_weights else Opened((), (), {})
    found = found.without_maps().carrying(opened.uncut)
    opened = Opened((), (), {}) if same_weights else opened
    settings = _configs(source, found, MODELOPT) if options.dequantize else {}
    texts = {} if options.dtype == "keep" else {**configs, **settings}
    known = Known(
        request,
        source.pin,
        keys,
        found,
        opened,
        listing,
        before,
        None,
        Transports(source.transport, _transport(request, target, state)),
        source.transport == "xet" and source.pin.endpoint == target.endpoint,
        lender,
        ties=_ties(opened, configs, meta_loader) if options.ties == "source" else {},
        configs={path: text.decode() for path, text in texts.items()},
        notes=_target_notes(request, source, target, state, shows),
    )
    made = _held_against_others(request, make_plan(known), target, last, replaces)
    _refuse_too_large(made)
    if made.shards:
        check_structure(made, opened, known.ties, known.configs)
    return _with_card_notes(made, source, target, last), known


def _refuse_too_large(made: Plan) -> None:
    """Raises MadeTooLarge where nobody, ourselves included, would read what describes the result."""
    for path, size in of_our_own(made).items():
        if size > (most := MANIFEST_MAX if path == MANIFEST else INDEX_MAX):
            raise MadeTooLarge(file=path, bytes=size, most=most)


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


def _replaces(
    request: Request, pin: Pin, target: Target, head: str | None, last: publication.Publication | None
) -> bool:
    """Whether what others put or changed goes.

    What recurs was once allowed to take the target. Since then it holds our publication, and nobody has looked at what
    others did there; in place that is the source.
    """
    if not (request.options.overwrite and request.recurring):
        return request.options.overwrite
    taken = last is not None and last.pin.origin == pin.origin
    return not taken or head is None or _same(target.at(head).pin, pin)


def _answers(last: publication.Publication, keyed: Callable[[Pin], str], pin: Pin, target: Target) -> bool:
    """Whether ``last`` is what is asked for: of this source, or in place of one that has been that result since."""
    if last.request == keyed(pin):
        return True
    return last.request == keyed(replace(pin, commit=last.source_commit)) and _same(target.at(last.commit).pin, pin)


def _transport(request: Request, target: Target, state: TargetState) -> str:
    """How weights would reach the target; "" where that shows only once it is there, or ours to write."""
    if state.head is None and request.target.local is None:
        return ""
    try:
        return target.transport
    except AccessError:  # a plan writes nothing, and what does asks again
        return ""


def _with_card_notes(made: Plan, source: Source, target: Target, last: publication.Publication | None) -> Plan:
    notes = card_for(made, source, target, made.base, lambda: last).notes
    return replace(made, notes=(*made.notes, *notes)) if notes else made


def _nothing(
    request: Request, source: Source, lender: Pin | None, key: str, published: str, head: str
) -> tuple[Plan, Known]:
    """The plan where ``published``, ours, holds what is asked for and nobody changed it: no file needs to be listed."""
    known = Known(
        request, source.pin, Keys(key, None), Found((), frozenset()), Opened((), (), {}), {},
        Before(head, {}, {}, {}), published, lender=lender,
    )  # fmt: skip
    return make_plan(known), known


def _configs(source: Source, found: Found, name: str = "config.json") -> dict[str, bytes]:
    """The content, by path, of what says how each checkpoint is loaded, where there is one."""
    listing = source.files()
    paths = {join(part.name.folder, name) for part in found.sets} & listing.keys()
    return {path: read_file(source, listing[path], CONFIG_MAX) for path in sorted(paths)}


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


def _last_publication(target: Target, head: str) -> publication.Publication | None:
    """Our last publication before ``head``; None also where a folder, after a rollback, has nothing of it left."""
    last = next(publication.publications(target, head, None), None)
    try:
        if last is not None:
            target.at(last.commit)
    except TargetConflict:
        return None
    return last


def _look(target: Target, head: str | None, last: publication.Publication | None) -> Before:
    """What the target holds at ``head``; ``last`` is our last publication there."""
    if head is None:
        return Before("", {}, {}, {})
    there = target.at(head)
    files = there.files()
    indexes = {path: read_file(there, file, INDEX_MAX) for path, file in files.items() if is_weight_index(path)}
    published = {}
    if last is not None:
        then = files if last.commit == head else target.at(last.commit).files()
        published = {path: file for path, file in then.items() if path not in last.kept}
    return Before(head, files, indexes, published, last.pin.origin if last else None)


def refuse_without_room(made: Plan, target: Target) -> None:
    """Raises TargetFull where a folder has not the room that ``made`` needs; nothing is written."""
    before = target.at(made.base).files() if made.base else {}
    need, room = needs(made, before).target, target.room()
    if room is not None and need > room:
        raise TargetFull(path=str(target.place), needed=need, free=room)


def refuse_without_disk(made: Plan, target: Target, disk: ScratchSpace) -> None:
    """Raises DiskFull where ``disk`` has not what copying the shards of ``made`` needs at least; nothing is read."""
    need = needs(made, {}).least_disk
    if need > disk.room():
        raise DiskFull(path=str(disk.path), needed=need, free=disk.room())


def _same(one: Pin, other: Pin) -> bool:
    """Whether both are one place at one state."""
    if one.endpoint is None and other.endpoint is None:
        return one.commit == other.commit and resolved(one.repo) == resolved(other.repo)
    return one == other


def _of_others(made: Plan, target: Target, last: publication.Publication | None) -> tuple[str, ...]:
    """Of what ``made`` finds occupied, what is not ours after all.

    Main's history may hold it too, as it does what a branch of ours was made from; and where a repository's history was
    squashed, the manifest says whose weights these are: then only other files that are to be replaced count.
    """
    if not made.occupied or target.is_shared(made.base):
        return ()
    if last is not None or not target.branch or not _manifest_holds(made, target.at(made.base)):
        return made.occupied
    weights = (MANIFEST, SUFFIX, GGUF, ".index.json")
    return tuple(file.path for file in made.replaced if not file.path.endswith(weights))


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


def _held_against_others(
    request: Request, made: Plan, target: Target, last: publication.Publication | None, replaces: bool
) -> Plan:
    """``made`` with what it would take of others; raises TargetOccupied unless it ``replaces`` that."""
    made = replace(made, occupied=_of_others(made, target, last))
    if made.replaced and _same(target.at(made.base).pin, made.pin):
        stays = {file.path for file in made.carried} - {edit.path for edit in made.edits}
        changes = tuple(file for file in made.replaced if file.path not in stays)
        occupied = tuple(path for path in made.occupied if path not in stays)
        made = replace(made, in_place=True, replaced=changes, occupied=occupied)
    if made.occupied and not replaces:
        _refuse_occupied(request, made, last)
    return made


def _refuse_occupied(request: Request, made: Plan, last: publication.Publication | None) -> None:
    """Raises TargetOccupied where a commit would take what is somebody else's.

    A pull request takes nothing, and a source that is resharded in place is its owner's to change.
    """
    pin = made.pin
    if request.options.pr or made.in_place:
        return
    what = "files that reshard did not publish"
    if last is not None and last.pin.origin != pin.origin:
        what = f"a publication of {last.source}"
    ends = {file.path: "deleted" if file.path in made.deletes else "overwritten" for file in made.replaced}
    paths = [f"{path} ({ends[path]})" for path in made.occupied if path in ends] or made.occupied
    raise TargetOccupied(target=str(request.target), what=what, paths=", ".join(some(paths, OCCUPIED_SHOWN)))


def _refuse_nested_folders(request: Request) -> None:
    """A folder and one inside it cannot be source and target; raises FoldersNested. One folder may be both."""
    if request.target.local is None:
        return
    target, into = resolved(str(request.target)), str(request.target)
    for place in (request.source, request.options.config_from):
        source = resolved(str(place)) if place and place.local else target
        if any(part.parent == target.parent and _is_beside(part, target) for part in (source, *source.parents)):
            what = "the run would remove its own source"
            raise FoldersNested(inner=str(source), where="kept beside", outer=into, what=what)
        if source in target.parents:
            what = "the result would become part of its own source"
            raise FoldersNested(inner=into, outer=str(source), what=what)
        if target in source.parents:
            what = "replacing the target would replace the source"
            raise FoldersNested(inner=str(source), outer=into, what=what)


def _is_beside(folder: Path, target: Path) -> bool:
    """Whether ``folder`` is one of those that a folder target has beside it (stores/folder/swap.py)."""
    return folder.name.startswith(f".{target.name}.reshard")


def _check_visibility(request: Request, source: Source, target: Target, state: TargetState) -> None:
    hidden = _most_hidden(source)
    if hidden is None or not state.exists or request.options.visibility == "public":
        return
    if reach(state.visibility) > reach(hidden.visibility):
        raise TargetMoreVisible(
            target=str(target.place), shown=state.visibility, source=str(hidden.place), visibility=hidden.visibility
        )


def exposed(request: Request, source: Source) -> Source | None:
    """The private or gated repository that ``request`` asks to be shown to everyone, if it does."""
    hidden = _most_hidden(source)
    return hidden if hidden and hidden.visibility != "public" and request.options.visibility == "public" else None


def _most_hidden(source: Source) -> Source | None:
    """Of what is read and is no folder, what the fewest may see; folders may go where their owner says."""
    both = [source.own, source.lender] if isinstance(source, Borrowing) else [source]
    return min((one for one in both if one.place.local is None), key=lambda one: reach(one.visibility), default=None)


def _target_notes(request: Request, source: Source, target: Target, state: TargetState, shows: bool) -> tuple[str, ...]:
    """That a repository is created, and who may see it; where it is only shown, also whether a run may write there."""
    if request.target.local:
        return ()
    repo = str(request.target.at(None))
    seen, other = ("private", "--public") if _private(request, source) else ("public", "--private")
    turns = f"; {other} changes that" if request.options.visibility == "as-source" else ""
    created = () if state.exists else (f"{repo} is created, {seen}{turns}",)
    if not shows:
        return created
    match target.leave(state.exists):
        case Leave(False, why):
            return (f"a run is refused: {why}",)
        case Leave(None, why):
            return (*created, f"whether the token may write to {repo}: not checked ({why})")
        case Leave(_, says):
            return tuple(f"{note} ({says})" for note in created)


def _private(request: Request, source: Source) -> bool:
    """A new target is as visible as its source; a folder's owner has not said that everyone may have it."""
    if request.options.visibility == "as-source":
        return source.visibility != "public"
    return request.options.visibility == "private"
