"""One repository: refs, commits, known large objects, settings and discussions, replayed from its journal."""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from .errors import HubError, revision_not_found
from .git import Changes, Commit, Entry, Tree, commit_oid
from .journal import Event, Journal

MAIN = "refs/heads/main"
TREES_KEPT = 32  # in memory; others are rebuilt from the nearest one that is


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass
class Discussion:
    """A discussion or a pull request; the commits of a pull request are on ``refs/pr/<num>``."""

    num: int
    title: str
    author: str
    created_at: str
    is_pull_request: bool
    status: str
    base: str | None = None  # the commit of main that a pull request began at
    merge_commit: str | None = None
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ref(self) -> str:
        return f"refs/pr/{self.num}"


@dataclass
class RepoSettings:
    """What an owner can change. ``granted``: users let into a gated repo."""

    visibility: str = "public"
    gated: str | bool = False
    granted: list[str] = field(default_factory=list)
    downloads: int = 0
    likes: int = 0


class Repo:
    """Every change is one event: appended to the journal, then applied; ``lock`` is held around check and change."""

    def __init__(self, kind: str, id: str, uid: str, created_at: str, journal: Journal) -> None:
        self.kind = kind  # models, datasets or spaces
        self.id = id
        self.uid = uid
        self.created_at = created_at
        self.journal = journal
        self.lock = threading.RLock()
        self.settings = RepoSettings()
        self.refs: dict[str, str] = {}
        self.commits: dict[str, Commit] = {}
        self.objects: dict[str, int] = {}  # sha256 -> size: large objects that this repo may name
        self.xet: dict[str, str] = {}  # sha256 -> hash in the content store, of those that came over Xet
        self.xet_files: set[str] = set()
        self.uploaded: dict[str, int] = {}  # received over LFS for this repo, not yet verified
        self.discussions: dict[int, Discussion] = {}
        self._trees: OrderedDict[str, Tree] = OrderedDict()
        for event in journal.replay():
            self._apply(event)

    @property
    def private(self) -> bool:
        return self.settings.visibility == "private"

    def record(self, event: str, **values: Any) -> None:
        line = {"event": event, **values}
        self.journal.append(line)
        self._apply(line)

    def _apply(self, event: Event) -> None:
        match event["event"]:
            case "commit":
                commit = Commit.from_event(event["commit"])
                self.commits[commit.oid] = commit
                self.refs[event["ref"]] = commit.oid
            case "ref":
                self.refs[event["ref"]] = event["oid"]
            case "ref_deleted":
                self.refs.pop(event["ref"], None)
            case "commits_forgotten":
                for oid in event["oids"]:
                    del self.commits[oid]
                    self._trees.pop(oid, None)
            case "uploaded":
                self.uploaded[event["sha256"]] = event["size"]
            case "object":
                self.objects[event["sha256"]] = event["size"]
                if name := event["xet"]:
                    self.xet[event["sha256"]] = name
                    self.xet_files.add(name)
                else:
                    self.xet.pop(event["sha256"], None)
            case "settings":
                vars(self.settings).update(event["settings"])
            case "discussion":
                self.discussions[event["num"]] = Discussion(**{k: v for k, v in event.items() if k != "event"})
            case "discussion_changed":
                discussion = self.discussions[event["num"]]
                vars(discussion).update(event["set"])
                discussion.events.extend(event["events"])

    # Revisions and trees

    def resolve(self, revision: str) -> str:
        """The commit that a branch, tag, full ref or (shortened) commit id stands for."""
        for ref in (f"refs/heads/{revision}", f"refs/tags/{revision}", revision):
            if ref in self.refs:
                return self.refs[ref]
        if revision in self.commits:
            return revision
        if len(revision) >= 7:
            found = [oid for oid in list(self.commits) if oid.startswith(revision)]
            if len(found) == 1:
                return found[0]
        raise revision_not_found(revision)

    def branch(self, revision: str) -> str:
        """The ref that a commit to ``revision`` moves: a branch or a pull request, never a tag or a commit id."""
        for ref in (f"refs/heads/{revision}", revision):
            if ref in self.refs and not ref.startswith("refs/tags/"):
                return ref
        raise revision_not_found(revision)

    def tree(self, oid: str) -> Tree:
        """All files at a commit, by path."""
        with self.lock:
            missing: list[Commit] = []
            at: str | None = oid
            while at is not None and at not in self._trees:
                commit = self.commits[at]
                missing.append(commit)
                at = commit.parents[0] if commit.parents else None
            tree: dict[str, Entry] = dict(self._trees[at]) if at is not None else {}
            for commit in reversed(missing):
                for path, entry in commit.changes.items():
                    if entry is None:
                        tree.pop(path, None)
                    else:
                        tree[path] = entry
            self._trees[oid] = tree
            self._trees.move_to_end(oid)
            while len(self._trees) > TREES_KEPT:
                self._trees.popitem(last=False)
            return tree

    def history(self, oid: str) -> Iterator[Commit]:
        """The commit and its first parents, newest first."""
        at: str | None = oid
        while at is not None:
            commit = self.commits[at]
            yield commit
            at = commit.parents[0] if commit.parents else None

    # Changes

    def commit(
        self,
        ref: str,
        changes: Changes,
        title: str,
        message: str = "",
        author: str = "hub",
        expected: str | None = None,
        orphan: bool = False,
    ) -> Commit:
        """Move ``ref`` by one commit; HubError 412 when ``expected`` is given and is not where ``ref`` points.

        An orphan commit has no parent: ``changes`` is then the whole tree.
        """
        with self.lock:
            head = self.refs.get(ref)
            if expected is not None and expected != head:
                raise HubError(412, "A commit has happened since. Please refresh and try again.")
            parents = () if orphan or head is None else (head,)
            before = self.tree(parents[0]) if parents else {}
            tree = {**before, **changes}
            date = now()
            whole = {path: entry for path, entry in tree.items() if entry is not None}
            oid = commit_oid(whole, parents, author, date, title, message)
            commit = Commit(oid, parents, title, message, author, date, changes)
            self.record("commit", ref=ref, commit=commit.as_event())
            return commit

    def forget_unreachable(self) -> list[str]:
        """Commits that no ref leads to are gone for good, as when git collects its garbage; returns them."""
        with self.lock:
            kept = {commit.oid for oid in self.refs.values() for commit in self.history(oid)}
            gone = [oid for oid in self.commits if oid not in kept]
            self.record("commits_forgotten", oids=gone)
            return gone

    def learn_object(self, sha256: str, size: int, xet: str | None = None) -> None:
        """From now on commits may name the object; ``xet``: its hash in the content store, if it is there."""
        with self.lock:
            if sha256 not in self.objects or self.xet.get(sha256) != xet:
                self.record("object", sha256=sha256, size=size, xet=xet)

    def record_upload(self, sha256: str, size: int) -> None:
        with self.lock:
            self.record("uploaded", sha256=sha256, size=size)

    def next_num(self) -> int:
        return len(self.discussions) + 1
