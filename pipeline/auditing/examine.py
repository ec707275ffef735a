"""One model against its source, from listings and headers: what the checks of `verify` find, by kind."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Any, NamedTuple, TypeVar

from reshard.pipeline.auditing.findings import AS_IT_IS, OF_RULE, UNREAD, AuditFinding, Told, gathered, next_command
from reshard.pipeline.catalogs.expand import HubModel
from reshard.pipeline.checkpoint.formats.gguf import SUFFIX as GGUF
from reshard.pipeline.checkpoint.formats.safetensors import SUFFIX, Header
from reshard.pipeline.checkpoint.indexes import Index
from reshard.pipeline.errors import BadPlace, HubUnreachable, NoWeights, ReshardError, SourceError
from reshard.pipeline.limits import AUDIT_HEADERS, AUDIT_SOURCES
from reshard.pipeline.places import DEFAULT_BRANCH, AnyPlace, Hub, check_repo, parse_place, repository
from reshard.pipeline.planning.model import SIGNATURE
from reshard.pipeline.protocols import Source, Visibility
from reshard.pipeline.publishing.history import read, standing
from reshard.pipeline.publishing.manifest import Manifest, Origin
from reshard.pipeline.request import Options, key_of
from reshard.pipeline.stores.connect import Context, open_source
from reshard.pipeline.stores.http import HubSource
from reshard.pipeline.stores.overlay import Over
from reshard.pipeline.stores.refusal import Refusal
from reshard.pipeline.tensors import StoredFile, same_by_hash
from reshard.pipeline.verifying.compare import differences, dropped_copies
from reshard.pipeline.verifying.digests import first_unequal
from reshard.pipeline.verifying.files import compare_files
from reshard.pipeline.verifying.index_rules import Ruled, ruled
from reshard.pipeline.verifying.manifest_check import check_manifest
from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.pipeline.verifying.opened import OpenedSide, paired
from reshard.pipeline.verifying.published import header_of
from reshard.pipeline.verifying.structure import REMARKS, compare, signature
from reshard.pipeline.verifying.tokenizer import compared_by_behaviour
from reshard.pipeline.verifying.verify import ask_class, claims_text, unlike

T = TypeVar("T")
# Where one of these is told, the tensors of some files are unknown, and what they lack is no further finding.
_BLIND = {"absent_file", "header", "length", "index_json", "unreadable", "split"}


@dataclass(frozen=True, slots=True)
class Subject:
    """One model to audit: what it should equal, and what is known of both from lists of a Hub."""

    place: AnyPlace
    known: HubModel | None = None
    source: AnyPlace | None = None  # as a map names it; None: as the model's own manifest does
    source_known: HubModel | None = None
    options: Options = AS_IT_IS  # by which it was meant to be made
    error: ReshardError | None = None  # why it cannot be looked at


@dataclass(frozen=True, slots=True)
class Audited:
    """What was found of one model; ``sides`` are itself and its source, as far as they were opened."""

    place: str
    findings: tuple[AuditFinding, ...]
    commit: str | None = None
    source: str | None = None
    source_commit: str | None = None
    source_by: str | None = None  # map, manifest
    weights: bool = True  # whether it has any
    deep: bool = False  # whether every byte was read
    options: Options = AS_IT_IS  # by which it was compared
    sides: tuple[Source, Source | None] | None = None
    compared: str | None = None  # the source as it is typed to compare with it again


class Sources:
    """Models opened at a commit; a source that several were made from is read once."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._lock = threading.Lock()
        self._made: OrderedDict[Any, tuple[threading.Lock, list[Any]]] = OrderedDict()

    def open(self, place: AnyPlace, known: HubModel | None) -> Source:
        """Over HTTP, as headers take no more; without a call where a list has said what it is now."""
        if known is None:
            return open_source(place, self.context, transport="http")
        return self._at(place, known.sha, known.visibility)

    def _at(self, place: AnyPlace, commit: str, visibility: Visibility) -> Source:
        hub = repository(place)
        return HubSource(self.context.api(hub, "read"), hub, commit, visibility)

    def head(self, place: AnyPlace, known: HubModel | None) -> Source:
        """The same, once for all that ask."""
        return self._once(("head", place), lambda: self.open(place, known))

    def side(self, source: Source, commit: str, changes: Options) -> OpenedSide:
        """``source`` at ``commit``, after ``changes``; raises what opening it does."""
        at = source if commit == source.pin.commit else self._at(source.place, commit, source.visibility)
        return self._once((source.place, commit, key_of(changes.content())), lambda: OpenedSide.open(at, changes))

    def _once(self, key: Any, make: Callable[[], T]) -> T:
        with self._lock:
            lock, made = self._made.setdefault(key, (threading.Lock(), []))
            self._made.move_to_end(key)
            if len(self._made) > AUDIT_SOURCES:
                self._made.popitem(last=False)
        with lock:
            if not made:
                made.append(make())
            found: T = made[0]
            return found


class CachedHeads(Over):
    """A Source that reads the beginning of a file once: several checks look at the same headers and indexes."""

    def __init__(self, own: Source) -> None:
        super().__init__(own)
        self._lock = threading.Lock()
        self._heads: dict[str, bytes] = {}
        self._room = AUDIT_HEADERS

    def read(self, file: StoredFile, start: int, stop: int) -> Iterator[memoryview]:
        head = self._heads.get(file.path, b"")
        if start or not stop or (len(head) < stop and stop > self._room):
            yield from self.own.read(file, start, stop)
            return
        if len(head) < stop:
            head = b"".join(self.own.read(file, 0, stop))
            with self._lock:
                self._room -= len(head) - len(self._heads.get(file.path, b""))
                self._heads[file.path] = head
        yield memoryview(head)[:stop]


def examine(subject: Subject, sources: Sources, classes: MetaLoader) -> Audited:
    """Every finding about ``subject``; raises HubUnreachable, and nothing for what is wrong with it or its source.

    Reads a listing, and of each side the indexes, the manifest and the headers; ``classes`` are asked only where
    tensors are missing, whether the model ties them.
    """
    place, ours_once = str(subject.place), False
    try:
        if subject.error:
            raise subject.error
        ours = CachedHeads(sources.open(subject.place, subject.known))
        recorded = check_manifest(ours)
        ours_once = recorded.manifest is not None
        side = OpenedSide.attempt(ours)
        rules = ruled(side)
    except HubUnreachable:
        raise
    except NoWeights as error:
        lost = _lost(error, subject, sources, ours_once)
        source = str(subject.source) if subject.source else None
        found = gathered(lost, lambda kind: next_command(kind, subject.place, subject.source, subject.options))
        return Audited(place, found, weights=bool(found), source=source, source_by="map" if source else None)
    except ReshardError as error:
        return Audited(place, gathered([Told("unreadable", str(error), next=error.next_step)], str))
    told = [Told(OF_RULE[one.rule], one.text) for one in rules.findings if one.rule not in REMARKS]
    if (check := recorded.check) and check.result == "failed":
        told.append(Told("manifest-wrong", check.findings[0], check.figures.get("differences", len(check.findings))))
    if SIGNATURE not in ours.files():
        told.append(Told("unsigned", f"it has no {SIGNATURE}"))
    against = _of_source(subject, side, rules, recorded.manifest, sources, classes)
    told += against.told
    source = str(against.place) if against.place else None
    compared = (against.place.at(against.at) if against.at else against.place).spelled if against.place else None
    return Audited(
        place,
        gathered(told, lambda kind: next_command(kind, subject.place, against.place, against.made, compared)),
        commit=ours.pin.commit,
        source=source,
        source_commit=against.source.pin.commit if against.source else None,
        source_by=None if source is None else "map" if subject.source else "manifest",
        options=against.changes,
        sides=(ours.own, against.source),
        compared=compared,
    )


def _lost(error: NoWeights, subject: Subject, sources: Sources, ours_once: bool) -> list[Told]:
    """That a copy has no weights: one of a source that can be read, or one that we published ``ours_once``."""
    if subject.source is None:
        return []
    try:
        sources.head(subject.source, subject.source_known)
    except HubUnreachable:
        raise
    except ReshardError as missing:
        unreadable = Told("source-unreadable", str(missing), next=missing.next_step)
        lost = Told("weights-missing", str(error), next=missing.next_step)
        return [lost, unreadable] if ours_once else [unreadable]
    return [Told("weights-missing", str(error))]


class _Against(NamedTuple):
    """What came of looking for a model's source and at it."""

    told: list[Told]
    place: AnyPlace | None = None
    source: Source | None = None
    changes: Options = AS_IT_IS  # by which both were compared
    made: Options = AS_IT_IS  # by which it is made again
    at: str | None = None  # the commit of the source that was looked at, where that is not its newest


def _of_source(
    subject: Subject, side: OpenedSide, rules: Ruled, manifest: Manifest | None, sources: Sources, classes: MetaLoader
) -> _Against:
    stated = manifest.source if manifest and manifest.source.repo else None
    place, changes, made = subject.source, subject.options, subject.options
    claims: dict[str, Any] = {}
    if manifest:
        made = manifest.made.known() if made == AS_IT_IS else made
        claims = unlike(manifest.made.claims(), changes)
    told: list[Told] = []
    try:
        if place is None and stated:
            place = _claimed(stated, sources.context)
        if place is None:
            return _Against([Told("source-unknown", "no catalog, template or manifest names its source")], made=made)
        theirs = sources.head(place, subject.source_known)
        commits = [theirs.pin.commit]
        if place.on(sources.context.credentials.default_endpoint) is None:
            stated = None  # a folder or an object store may hold that repository at any commit
        if stated and not _is_same(stated, place, subject.source_known, sources.context):
            told.append(Told("source-wrong", f"its manifest says it was made from {stated.repo}, not from {place}"))
        elif stated and stated.commit != commits[0]:
            text = f"made from {stated.commit[:12]} according to its manifest; {place} is now at {commits[0][:12]}"
            if theirs.pin.commit != side.source.pin.commit or not _made_in_place(theirs, stated, sources.context):
                told.append(Told("source-moved", text))
            commits.insert(0, stated.commit)
        # What a manifest claims may be neither a commit of the source nor possible.
        ways = [(commit, how) for commit in commits for how in ([claims, {}] if claims else [{}])]
        at, commit, claims = _first_way(sources, theirs, changes, ways)
        if commit != commits[0]:
            text = f"its manifest names commit {commits[0][:12]}, which cannot be read in {place}"
            told.append(Told("source-unreadable", text))
        changes = changes.model_copy(update=claims)
        if claims and (claims.keys() - {"dtype", "dequantize"} or any(at.changed.values())):
            text = f"only its own manifest says that it was made with {claims_text(claims)}"
            told.append(Told("changes-claimed", text))
        told += _compared(side, rules, at, changes, classes)
    except HubUnreachable:
        raise
    except ReshardError as error:
        told.append(Told("source-unreadable", str(error), next=error.next_step))
        return _Against(told, place, changes=changes, made=made)
    return _Against(told, place, at.source, changes, made, commit if commit != theirs.pin.commit else None)


def _first_way(
    sources: Sources, theirs: Source, changes: Options, ways: Sequence[tuple[str, dict[str, Any]]]
) -> tuple[OpenedSide, str, dict[str, Any]]:
    """The source at the first commit, with the first claims, that it opens with; raises what the last way does."""
    *others, last = ways
    for commit, claims in others:
        try:
            return sources.side(theirs, commit, changes.model_copy(update=claims)), commit, claims
        except HubUnreachable:
            raise
        except ReshardError:
            continue
    commit, claims = last
    return sources.side(theirs, commit, changes.model_copy(update=claims)), commit, claims


def _claimed(stated: Origin, context: Context) -> Hub:
    """The source that a manifest names; raises BadPlace, and SourceError for one on a Hub that nobody here chose."""
    repo = check_repo(str(stated.repo))
    if stated.endpoint not in {None, context.credentials.default_endpoint}:
        what = f"its manifest names a source on another Hub, {stated.endpoint}"
        try:
            there = quote(parse_place(f"{stated.endpoint}/{repo}").spelled)
        except BadPlace:
            there = "SRC"
        raise SourceError(what=what, source=there)
    return Hub(repo=repo)


def _is_same(stated: Origin, place: AnyPlace, known: HubModel | None, context: Context) -> bool:
    """Whether a manifest names the source that a map does, maybe by a name that it had before."""
    repo = str(stated.repo)
    if repo.lower() in {str(place.at(None)).lower(), known.repo.lower() if known else ""}:
        return True
    try:
        hub = repository(place)
        api = context.api(hub, "read")
        now = known.repo if known else api.info(hub.repo, hub.branch).id
        return api.info(check_repo(repo), DEFAULT_BRANCH).id == now
    except (Refusal, BadPlace, ValueError):
        return False


def _made_in_place(theirs: Source, stated: Origin, context: Context) -> bool:
    """Whether the source's newest commit that stands is the publication that was made from what ``stated`` names."""
    hub = repository(theirs.place)
    try:
        last = standing(context.api(hub, "read").commits(hub.repo, theirs.pin.commit))
    except Refusal:  # a Hub without a history
        return False
    ours = read(last) if last else None
    return ours is not None and ours.source_commit == stated.commit


def _compared(
    ours: OpenedSide, rules: Ruled, theirs: OpenedSide, changes: Options, classes: MetaLoader
) -> Iterator[Told]:
    """What the output lacks, adds or changes, of tensors and of files."""
    if ours.error:
        yield from _compared_headers(rules, theirs)
        return
    matched = paired(theirs, ours)
    ties: dict[Any, Mapping[str, str]] = {}
    dropped = {pair.output.name: dropped_copies(pair, ours, {}) for pair in matched.pairs}
    found = list(differences(matched, dropped))
    if any(one.rule == "lost" for one in found) or (any(dropped.values()) and changes.ties != "source"):
        for pair in matched.pairs:
            ties[pair.output.name] = ask_class(ours, pair.output, theirs, pair.source, classes).ties
            dropped[pair.output.name] = dropped_copies(pair, ours, ties[pair.output.name])
        found = list(differences(matched, dropped))
    yield from (Told(OF_RULE[one.rule], one.text) for one in found)
    for name, copies in dropped.items() if changes.ties != "source" else ():
        tied = ties.get(name, {})
        for copy, kept in copies.items():
            if tied.get(copy, copy) != tied.get(kept, kept):
                yield Told("changes-claimed", f"only the output says that {copy} can be dropped in favor of {kept}")
    here, there = ours.source.files(), theirs.source.files()
    for path in sorted(here.keys() & there.keys()):
        if path.endswith((SUFFIX, GGUF)) and here[path].size == there[path].size:
            other = same_by_hash(here[path], there[path]) is False
            if other and header_of(ours.source, here[path]) == header_of(theirs.source, there[path]):
                yield Told("bytes-changed", f"{path} has the same header as in the source, but different bytes")
    behaves = compared_by_behaviour(there, here)
    beside = compare_files(theirs, ours, changes, behaves, False, lambda count: None)
    yield from (Told(OF_RULE[one.rule], one.text) for one in beside.findings)
    yield from (Told("file-unproven", text) for text in beside.undecided)
    yield from (Told(UNREAD, text) for text in beside.unread)
    for path in sorted(behaves):
        if behaves.isdisjoint(here):
            yield Told("file-missing", f"{path} is missing")
        elif path not in here or path not in there:
            side = "not in the source" if path in here else "missing"
            yield Told("tokenizer-changed", f"{path} is {side}")
        elif not _equal(theirs.source, there[path], ours.source, here[path]):
            yield Told("tokenizer-changed", f"{path} differs from the source's")


def _compared_headers(rules: Ruled, theirs: OpenedSide) -> Iterator[Told]:
    """The same for tensors alone, of a model that cannot be opened, where all its headers are known."""
    if len(theirs.opened.checkpoints) != 1 or any(one.rule in _BLIND for one in rules.findings):
        return
    indexes = [index for index in rules.indexes.values() if isinstance(index, Index)]
    named = {path for index in indexes for path in index.files.values()}
    headers = {path: header for path, header in rules.headers.items() if path in named or not named}
    read = {path: header for path, header in headers.items() if isinstance(header, Header)}
    for one in compare(theirs.signature(theirs.opened.checkpoints[0]), signature(read)):
        yield Told(OF_RULE[one.rule], one.text)


def _equal(theirs: Source, was: StoredFile, ours: Source, is_: StoredFile) -> bool:
    """By their hashes, or where stores have none, or other ones, by their bytes."""
    same = same_by_hash(was, is_)
    if same is not None:
        return same
    return first_unequal(theirs.read(was, 0, was.size), ours.read(is_, 0, is_.size)) is None
