"""The audit of many models: each from headers, several at a time, and a sample of them byte for byte."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from shlex import join

from reshard.pipeline.abreast import abreast
from reshard.pipeline.auditing.examine import Audited, Sources, Subject, examine
from reshard.pipeline.auditing.findings import UNREAD, Told, badness, gathered, sample
from reshard.pipeline.check import Check
from reshard.pipeline.errors import HubUnreachable, ReshardError
from reshard.pipeline.stores.connect import Context
from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.pipeline.verifying.verify import verify

Progress = Callable[[str, int, int], None]  # a phase, how many models are done, and of how many
# What only the checks of every byte, and those in the model's own class, can find. The rest headers have told.
_BYTES = ("same bytes", "stored bytes")
_FILES = "other files"
_DEEP = {
    "same bytes": "bytes-changed", "stored bytes": "bytes-changed", "published bytes": "bytes-changed",
    "class": "class-mismatch", "tokenizer": "file-changed", _FILES: "file-changed",
}  # fmt: skip


def audit(
    subjects: Sequence[Subject], context: Context, jobs: int, deep: int, progress: Progress = lambda *at: None
) -> list[Audited]:
    """Every model, the worst first; ``deep`` of them, the same ones each time, are also read whole.

    Raises HubUnreachable; whatever else is wrong with a model or its source, or ends its examination, is a finding.
    """
    sources = Sources(context)
    done: dict[str, Audited] = {}  # by the place, with its Hub and branch
    with closing(MetaLoader(tmpdir=context.tmpdir)) as classes:

        def one(subject: Subject) -> None:
            slot = subject.place.slot(context.credentials.default_endpoint, None)
            try:
                done[slot] = examine(subject, sources, classes)
            except HubUnreachable:
                raise
            except Exception as error:  # noqa: BLE001 -- a hostile file must not hide what is found of all others
                done[slot] = Audited(str(subject.place), gathered([_unreadable(error)], str))
            progress("reading headers", len(done), len(subjects))

        # Those that were made from one source side by side, while it is kept.
        ordered = sorted(subjects, key=lambda subject: (str(subject.source or ""), str(subject.place)))
        abreast(ordered, jobs, one, threading.Event())
        chosen = sample([slot for slot, model in done.items() if model.sides], deep)
        for number, slot in enumerate(chosen):
            progress("reading every byte", number, len(chosen))
            done[slot] = _deeply(done[slot], classes, context)
    return sorted(done.values(), key=lambda model: (badness(model.findings), model.place))


def _deeply(model: Audited, classes: MetaLoader, context: Context) -> Audited:
    """``model`` with what the checks of every byte find, too."""
    assert model.sides is not None, "only what could be opened is chosen"
    ours, theirs = model.sides
    try:
        checks = verify(ours, theirs, classes, deep=True, changes=model.options, tmpdir=context.tmpdir)
    except HubUnreachable:
        raise
    except Exception as error:  # noqa: BLE001 -- as above
        checks, told = [], [_unreadable(error)]
    else:
        told = _once([told for check in checks for told in _told(check)])
    against = ["--against", model.compared] if model.compared else []
    command = join(["reshard", "verify", model.place, *against, "--deep"])
    read = {check.name for check in checks}
    found = {one.kind: one for one in model.findings if not (one.kind == UNREAD and _FILES in read)}
    for one in gathered(told, lambda kind: command):
        before = found.get(one.kind, one)
        found[one.kind] = replace(before, count=max(before.count, one.count))
    findings = sorted(found.values(), key=lambda one: badness([one]))
    return replace(model, findings=tuple(findings), deep=not read.isdisjoint(_BYTES))


def _once(told: Sequence[Told]) -> list[Told]:
    """``told`` without bytes that two checks see: of a manifest's files, and of the source's tensors."""
    worst = max((one for one in told if one.kind == "bytes-changed"), key=lambda one: one.times, default=None)
    return [one for one in told if one.kind != "bytes-changed" or one is worst]


def _unreadable(error: Exception) -> Told:
    known = error if isinstance(error, ReshardError) else ReshardError(what=f"{type(error).__name__}: {error}")
    return Told("unreadable", str(known), next=known.next_step)


def _told(check: Check) -> list[Told]:
    kind = _DEEP.get(check.name) or _DEEP.get(check.name.partition(" ")[0])
    if check.result != "failed" or kind is None:
        return []
    first = check.findings[0] if check.findings else check.reason
    return [Told(kind, first, check.figures.get("differ", len(check.findings)))]
