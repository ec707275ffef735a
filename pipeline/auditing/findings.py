"""What an audit says of a model: kinds of findings, how bad each is, and in which order. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from shlex import join
from typing import Literal, NamedTuple

from reshard.pipeline.arguments import typed_options
from reshard.pipeline.places import AnyPlace
from reshard.pipeline.request import Options
from reshard.pipeline.verifying.structure import Rule

AS_IT_IS = Options()
Severity = Literal["critical", "error", "warning"]
UNREAD = "file-unread"
# Bytes that are wrong or lost, what loads wrongly or not at all, what headers cannot prove. By kind, the worst first:
# a report has them in this order.
KINDS: Mapping[str, Severity] = {
    "weights-missing": "critical",  # no weights, or files that an index names are not there
    "weights-broken": "critical",  # a header, an index or a pickle that no loader reads
    "file-short": "critical",  # a weight file does not end where its header says
    "source-wrong": "critical",  # the manifest names another source than the map
    "tensors-lost": "critical",
    "shape-changed": "critical",
    "dtype-changed": "critical",  # a cast that nobody asked for and the manifest does not state
    "bytes-changed": "critical",  # the same header and another sha256, or other bytes by --deep
    "manifest-wrong": "critical",  # files are not those that the manifest lists
    "unreadable": "error",  # gone, gated, or refused
    "tensors-added": "error",
    "index-missing": "error",  # numbered files without an index
    "index-broken": "error",
    "index-ghost": "error",  # the index lists tensors that no file has
    "index-missing-tensor": "error",  # files have tensors that the index does not list
    "index-wrong-file": "error",
    "tensor-duplicate": "error",
    "file-stale": "error",  # a weight file of an earlier publication, which loaders may take
    "name-changed": "error",  # loaders that find the source's weights do not look there
    "metadata-misfit": "error",  # total_size, format, torchao's metadata, or keys of GGUF
    "class-mismatch": "error",  # the model's own class, by --deep
    "file-missing": "error",
    "file-changed": "error",
    "file-added": "error",
    "source-unreadable": "warning",
    "source-unknown": "warning",  # no catalog, template or manifest names one
    "source-moved": "warning",  # the source has a newer commit than the one this was made from
    "changes-claimed": "warning",  # casts and renames that only the output's own manifest states
    "tokenizer-changed": "warning",  # other files, which may behave the same
    "file-unproven": "warning",  # argued to mean the same, or metadata other than torchao's
    UNREAD: "warning",  # too large to be compared without --deep
    "unsigned": "warning",
}
_ORDER = {kind: number for number, kind in enumerate(KINDS)}

OF_RULE: Mapping[Rule, str] = {
    "index_json": "index-broken", "index_metadata": "index-broken", "escape": "index-broken",
    "absent_file": "weights-missing", "wrong_file": "index-wrong-file", "ghost": "index-ghost",
    "missing": "index-missing-tensor", "duplicate": "tensor-duplicate", "stale_file": "file-stale",
    "no_index": "index-missing", "total_size": "metadata-misfit", "format": "metadata-misfit",
    "keys": "metadata-misfit", "header": "weights-broken", "length": "file-short", "split": "weights-broken",
    "metadata": "metadata-misfit", "other_metadata": "file-unproven",
    "unreadable": "weights-broken", "lost": "tensors-lost", "added": "tensors-added", "dtype": "dtype-changed",
    "shape": "shape-changed", "moved": "name-changed", "file_missing": "file-missing", "file_added": "file-added",
    "file_changed": "file-changed",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """All that is of one kind: how often, the first of them, and what to type next."""

    kind: str
    count: int
    first: str
    next: str

    @property
    def severity(self) -> Severity:
        return KINDS[self.kind]


class Told(NamedTuple):
    kind: str
    text: str
    times: int = 1
    next: str = ""


def gathered(told: Iterable[Told], follow: Callable[[str], str]) -> tuple[AuditFinding, ...]:
    """One finding for each kind, the worst first; ``follow`` has what to type next where what was told does not."""
    kinds: dict[str, list[Told]] = {}
    for one in told:
        kinds.setdefault(one.kind, []).append(one)
    return tuple(
        AuditFinding(kind, sum(one.times for one in kinds[kind]), first.text, first.next or follow(kind))
        for kind in sorted(kinds, key=_ORDER.__getitem__)
        for first in kinds[kind][:1]
    )


def badness(findings: Iterable[AuditFinding]) -> tuple[int, ...]:
    """By which models are sorted, the worst first: their kinds from the worst on; none comes last."""
    return (*(_ORDER[one.kind] for one in findings), len(KINDS))


def sample(names: Iterable[str], count: int) -> list[str]:
    """``count`` of them, the same each time: those whose sha256 is the lowest, whatever others are there."""
    return sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())[:count]


def next_command(
    kind: str, audited: AnyPlace, against: AnyPlace | None, options: Options, compared: str | None = None
) -> str:
    """What to type about a finding: what repairs the copy, or what looks more closely where headers prove nothing.

    ``compared`` is ``against`` at the commit that the audit compared with.
    """
    place, source = audited.spelled, against.spelled if against else None
    if kind == "source-wrong":
        return join(["reshard", "provenance", place])
    if source is None and kind not in {"unsigned", "source-unknown"}:
        return join(["reshard", "doctor", place])
    if kind in {"changes-claimed", "tokenizer-changed", "file-unproven", UNREAD, "source-unknown", "class-mismatch"}:
        return join(["reshard", "verify", place, "--against", compared or source or "SRC"])
    signing = ["--sign", "KEY"] if kind == "unsigned" else []
    changed = ((name, value) for name, value in options.content().items() if value != getattr(AS_IT_IS, name))
    repository = audited.at(None)
    branch = [] if repository == audited else ["--branch", audited.branch]
    to = ["--to", repository.spelled, *branch]
    return join(["reshard", "run", source or "SRC", *to, *typed_options(changed), *signing])
