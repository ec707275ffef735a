"""What becomes of a target, decided from what was seen of it and of the source. Pure; `drafting.py` looks at both."""

from __future__ import annotations

from dataclasses import dataclass, replace

from reshard.pipeline.check import first, some
from reshard.pipeline.checkpoint.discover import is_weight_index
from reshard.pipeline.errors import MadeTooLarge, TargetDrifted, TargetOccupied
from reshard.pipeline.limits import INDEX_MAX, MANIFEST_MAX, OCCUPIED_SHOWN
from reshard.pipeline.places import NOWHERE
from reshard.pipeline.planning.estimate import of_our_own
from reshard.pipeline.planning.existing import Before, drift
from reshard.pipeline.planning.model import MANIFEST, STATEMENTS, Plan
from reshard.pipeline.protocols import Leave, Source, TargetState, more_visible, reach
from reshard.pipeline.publishing.history import Publication
from reshard.pipeline.request import Request
from reshard.pipeline.stores.overlay import Borrowing


@dataclass(frozen=True, slots=True)
class There:
    """What was seen of the target."""

    key: str  # of what is asked for
    state: TargetState
    before: Before  # without files where nobody changed what we published for this very request
    last: Publication | None = None  # of ours
    published: str | None = None  # its commit, where it holds what is asked for
    is_source: bool = False  # the target is the source itself, at the same state

    @property
    def as_we_left_it(self) -> bool:
        """Whether others left alone what we published there."""
        return not drift(self.before)


def replaces_others(
    request: Request, source: Source, there: There, submitted: int | None, now: float, shows: bool
) -> bool:
    """Whether what others put or changed in the target goes, as where a plan ``shows`` only what would.

    What recurs was once allowed to take the target. Since then it holds our publication, and nobody has looked at what
    others did there; in place that is the source. Raises TargetMoreVisible, and TargetDrifted where it does not go.
    ``submitted`` is in ms since the epoch, ``now`` in seconds.
    """
    last, hidden = there.last, _most_hidden(source)
    if hidden is not None and there.state.exists and request.options.visibility != "public":
        error = more_visible(request.target, there.state.visibility, hidden.place, hidden.visibility)
        if error is not None:
            raise error
    taken = last is not None and last.pin.origin == source.pin.origin
    allowed = request.options.overwrite and not (request.recurring and taken and not there.is_source)
    if shows or allowed:
        return True
    if drifted := drift(there.before):
        branch = request.options.branch if there.state.head else None  # what is not there yet begins as main is
        target = request.target.at(branch) if branch else request.target
        raise TargetDrifted(target=str(target), what=first(drifted))
    if last is not None and there.state.head and there.published is None and last.is_later(submitted, now):
        what = f"commit {last.commit[:12]} is from a job submitted later"
        raise TargetDrifted(target=str(request.target), since="after this job was submitted", what=what)
    return False


def held_against(request: Request, made: Plan, others: tuple[str, ...], there: There, replaces: bool) -> Plan:
    """``made`` with what it would take of ``others``; raises TargetOccupied unless it ``replaces`` that.

    A pull request takes nothing, and a source that is resharded in place is its owner's to change: what the result
    has not is kept, as what others put there is.
    """
    made = replace(made, occupied=others)
    if made.replaced and there.is_source:
        stays = {file.path for file in made.carried} - {edit.path for edit in made.edits}
        changes = tuple(file for file in made.replaced if file.path not in stays)
        occupied = tuple(path for path in others if path not in stays)
        takes = there.state.head is not None and (made.takes or _loses(made))  # a new branch leaves the source alone
        made = replace(made, in_place=True, replaced=changes, occupied=occupied, takes=takes)
    if not made.occupied or replaces or made.in_place or request.options.pr:
        return made
    what = "files that reshard did not publish"
    if there.last is not None and there.last.pin.origin != made.pin.origin:
        what = f"a publication of {there.last.source}"
    ends = {file.path: "deleted" if file.path in made.deletes else "overwritten" for file in made.replaced}
    taken = [f"{path} (would be {ends[path]})" for path in made.occupied if path in ends]
    beside = {} if taken else {"end": "keep them and add the new files"}
    paths = ", ".join(some(taken or made.occupied, OCCUPIED_SHOWN))
    raise TargetOccupied(target=str(request.target), what=what, paths=paths, **beside)


def _loses(made: Plan) -> bool:
    """Whether values or whole files of a source are in its result no more."""
    rewritten = {MANIFEST, *STATEMENTS, *(file.path for file in made.files)}
    gone = (path for path in made.deletes if path not in rewritten and not is_weight_index(path))
    changed = (entry.cast or entry.scale is not None for shard in made.shards for entry in shard.entries)
    return any(gone) or any(changed)


def refuse_too_large(made: Plan) -> None:
    """Raises MadeTooLarge where nobody, ourselves included, would read what describes the result."""
    for path, size in of_our_own(made).items():
        if size > (most := MANIFEST_MAX if path == MANIFEST else INDEX_MAX):
            raise MadeTooLarge(file=path, bytes=size, most=most)


def exposed(request: Request, source: Source) -> Source | None:
    """The private or gated repository that ``request`` asks to be shown to everyone, if it does."""
    hidden = _most_hidden(source)
    return hidden if hidden and hidden.visibility != "public" and request.options.visibility == "public" else None


def _most_hidden(source: Source) -> Source | None:
    """Of what is read and is no folder, what the fewest may see; folders may go where their owner says."""
    both = [source.own, source.lender] if isinstance(source, Borrowing) else [source]
    return min((one for one in both if one.place.local is None), key=lambda one: reach(one.visibility), default=None)


def is_private(request: Request, source: Source) -> bool:
    """A new target is as visible as its source; a folder's owner has not said that everyone may have it."""
    if request.options.visibility == "as-source":
        return source.visibility != "public"
    return request.options.visibility == "private"


def notes_of(request: Request, source: Source, state: TargetState, leave: Leave | None) -> tuple[str, ...]:
    """What a plan tells of its places; where the store gave its ``leave``, also what that says."""
    return _not_lent(source) + (() if request.target == NOWHERE else _of_target(request, source, state, leave))


def _not_lent(source: Source) -> tuple[str, ...]:
    """A note of the config that the source has itself, as who names a lender may have meant to replace it."""
    if isinstance(source, Borrowing) and "config.json" in source.own.files().keys() & source.lender.files().keys():
        return (f"config.json is the source's own: only missing files are copied from {source.lender.place}",)
    return ()


def _of_target(request: Request, source: Source, state: TargetState, leave: Leave | None) -> tuple[str, ...]:
    """Who may see the repository, if it is created or not as asked, and whether it may be written."""
    repo, asked = str(request.target.at(None)), request.options.visibility
    seen, other = ("private", "--public") if is_private(request, source) else ("public", "--private")
    turns = f" (use {other} to change)" if asked == "as-source" else ""
    noun = request.target.hub_noun
    created = () if state.exists or not noun else (f"will create {repo} as a {seen} {noun}{turns}",)
    stays = state.exists and noun and asked not in {"as-source", state.visibility}
    kept = (f"{repo} stays {state.visibility}: --{asked} does not change an existing {noun}",) if stays else ()
    match leave:
        case None:
            return created + kept
        case Leave(False, why):
            return (f"a run will fail: {why}",)
        case Leave(None, why):
            return (*created, *kept, f"write access to {repo} not checked ({why})")
        case Leave(_, says):
            return (*(f"{note}; {says}" for note in created), *kept)
