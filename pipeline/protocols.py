"""What the pipeline asks of a store. All kinds of stores answer alike, and one suite of tests holds them to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, get_args

from reshard.pipeline.errors import ReshardError, TargetMoreVisible
from reshard.pipeline.places import AnyPlace
from reshard.pipeline.tensors import Pin, StoredFile

Visibility = Literal["private", "gated", "public"]


def reach(visibility: Visibility) -> int:
    """More for what more may see."""
    return get_args(Visibility).index(visibility)


def more_visible(
    target: AnyPlace, shown: Visibility, source: AnyPlace, visibility: Visibility
) -> TargetMoreVisible | None:
    """The error of a copy that more may see than its source."""
    if reach(shown) <= reach(visibility):
        return None
    return TargetMoreVisible(target=str(target), shown=shown, source=str(source), visibility=visibility)


class Source(Protocol):
    """One repository or folder at one state; what it lists and what it reads never changes."""

    @property
    def place(self) -> AnyPlace: ...

    @property
    def pin(self) -> Pin: ...

    @property
    def visibility(self) -> Visibility: ...

    @property
    def transport(self) -> str:
        """How weights are read, for the plan: ``file``, ``http`` or ``xet``."""

    def files(self) -> Mapping[str, StoredFile]:
        """Every file of the repository by path."""

    def read(self, file: StoredFile, start: int, stop: int) -> Iterator[memoryview]:
        """Exactly the bytes ``start <= b < stop`` of ``file``, in order, in views of memory that is not written again.

        Resumes where a connection broke. Raises SourceChanged when the file is no longer there or shorter, and the
        HubError family when the store stays away. Closing the iterator early ends the request.
        """


class Writer(Protocol):
    """One shard on its way into a store."""

    def write(self, view: memoryview) -> None: ...

    def finish(self) -> str:
        """The shard is complete; raises when its length is not the one announced. Returns before it is stored.

        Returns the xxh3-128 of the bytes that it was handed: what the store knows of them is what the loop sent.
        """


@dataclass(frozen=True, slots=True)
class Traffic:
    """What storing a batch took: bytes that were sent, and bytes that the store had already."""

    uploaded: int = 0
    deduplicated: int = 0

    def plus(self, other: Traffic) -> Traffic:
        return Traffic(self.uploaded + other.uploaded, self.deduplicated + other.deduplicated)


class Batch(Protocol):
    """The shards that are stored together."""

    @property
    def traffic(self) -> Traffic:
        """Of the shards that the last ``settle`` or ``seal`` returned; zero before."""

    def open(self, path: str, size: int) -> Writer:
        """A writer for a shard of exactly ``size`` bytes; one is open at a time."""

    def settle(self) -> list[StoredFile]:
        """The next of the shards, in the order they were opened, that the store has answered for already.

        It waits for none, and a store that answers for whole batches only has none. Called while no writer is open.
        """

    def seal(self) -> list[StoredFile]:
        """The rest of the shards in that order, once the store has answered for every byte of them."""

    def abort(self) -> None:
        """Forget every shard of the batch and free what it held; safe to call twice and after ``seal``."""


class Sink(Protocol):
    """Where shards are put before a commit names them; until then they are not visible."""

    def batch(self, reads: Sequence[StoredFile], source: Source | None = None) -> Batch:
        """A new batch; ``reads`` are the files of ``source`` that its shards are made of.

        A store that deduplicates looks at their heads first, and then finds the rest of them by itself.
        """


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit of a target's history."""

    id: str
    title: str
    message: str  # the description below the title
    author: str


@dataclass(frozen=True, slots=True)
class Addition:
    """A file that a commit adds: by ``stored`` object, or with its ``content`` in the commit itself."""

    path: str
    stored: StoredFile | None = None
    content: bytes | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """Everything that one commit does."""

    title: str
    message: str
    additions: tuple[Addition, ...]
    deletes: tuple[str, ...]
    takes: bool = False  # what somebody else put there, so that a target without a history keeps its last state


class HeadMoved(Exception):
    """The target's head is no longer the parent that the commit named; nothing was committed."""


class AnswerLost(Exception):
    """The commit was sent and no answer came, or one that is ``refused``: whether it stands must be looked up."""

    def __init__(self, what: str, refused: ReshardError | None = None) -> None:
        super().__init__(what)
        self.refused = refused


class HistoryRewritten(Exception):
    """A commit that should be in the target's history is not (a squash or a force-push)."""


@dataclass(frozen=True, slots=True)
class TargetState:
    """What a target is before anything is done to it."""

    exists: bool
    visibility: Visibility
    head: str | None  # of the branch; None when the target or the branch is not there
    start: str | None = None  # where a branch that is not there would begin

    @property
    def base(self) -> str | None:
        """The commit that the next one would be on top of."""
        return self.head or self.start


class Leave(NamedTuple):
    """Whether a target may be written, as far as its store says so without being changed."""

    given: bool | None  # None: it cannot be asked
    says: str  # whose token may or may not, or why it cannot be asked


class Target(Protocol):
    """A branch of a repository, or a folder, that can be changed by one guarded commit at a time."""

    @property
    def place(self) -> AnyPlace: ...

    @property
    def branch(self) -> str:
        """The branch or ref that commits go to, for messages and keys; empty for a folder."""

    @property
    def endpoint(self) -> str | None:
        """The Hub that it is on; None for a folder."""

    @property
    def transport(self) -> str:
        """How weights are written, for the plan: ``file``, ``lfs`` or ``xet``."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a plan should say of the store: what it turned out not to do, and what a commit removes from beside it.

        All of it is known after ``prepare``.
        """

    @property
    def carried(self) -> Traffic:
        """What ``carry`` took so far; what a commit holds itself is not in it."""

    def recover(self) -> None:
        """Finish what a dead process left half done; raises TargetLocked if it lives."""

    def state(self) -> TargetState:
        """Raises TargetUnfinished for what ``recover`` finishes."""

    def leave(self, exists: bool) -> Leave:
        """Whether we may write, or create what does not exist; asks, and changes nothing."""

    def prepare(self, private: bool) -> str:
        """Create what is missing (repository, branch), make sure that we may write; returns the head.

        Raises the AccessError family, HubQuota.
        """

    def request(self, digest: str, title: str, message: str) -> Target:
        """The target that the commit really goes to: itself, or the pull request that carries ``digest``.

        A pull request of ours (same author, same digest in its description) is found again, else it is opened.
        """

    def head(self) -> str: ...

    def at(self, commit: str) -> Source:
        """The target as a source, pinned to one of its commits."""

    def history(self, at: str, since: str | None) -> Iterator[Commit]:
        """Commits from ``at`` backwards, without ``since``; raises HistoryRewritten if ``since`` never comes."""

    def is_shared(self, commit: str) -> bool:
        """Whether ``commit`` is in main's history, too: then no commit on top of it here loses what it holds."""

    def original(self) -> Source | None:
        """What is kept of the state before our last commit until the next one; None where the history has it all."""

    def is_ours(self, commit: str, author: str) -> bool:
        """Whether this user made ``commit``, and nobody else can have written its description."""

    def room(self) -> int | None:
        """Bytes that may be written there, those of earlier tries included; None for a Hub, which says it itself."""

    def sink(self, token: str) -> Sink:
        """Where shards go; ``token`` is in every temporary name, so that two owners never share one."""

    def holds(self, stored: Sequence[StoredFile]) -> list[StoredFile]:
        """Those of ``stored`` that the store can no longer answer for."""

    def carry(
        self, files: Sequence[StoredFile], source: Source, token: str, made: Sequence[Addition] = ()
    ) -> list[Addition]:
        """Bring files over unchanged, without a worker's help where the store can copy on its own.

        ``made`` are files of our own that come with their content; those that no commit takes as such become objects.
        """

    def commit(self, change: Change, parent: str) -> str:
        """Commit ``change`` on top of ``parent`` and return the new commit; raises HeadMoved or AnswerLost."""

    def show(self) -> None:
        """What was committed is complete: a pull request is no draft any more, and nothing of it stays staged.

        Doing it again changes nothing.
        """

    def discard(self, token: str) -> None:
        """Free whatever the sink of ``token`` still holds."""
