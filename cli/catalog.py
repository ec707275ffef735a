"""`reshard catalog ...`: many models by one file."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option, Typer

from reshard.cli import completion
from reshard.cli.arguments import argument, commands, read_limits, value
from reshard.cli.help import SectionedGroup
from reshard.cli.job_text import moved
from reshard.cli.output import Output, count, dated, finds_none, first, human_bytes, lasted, lines, succeeded, when
from reshard.client.connect import connect
from reshard.client.models.catalogs import CatalogChecked, CatalogEntry, CatalogWrong
from reshard.client.operations import catalogs as operations
from reshard.client.operations.catalogs import Submission
from reshard.client.operations.table import Session, read
from reshard.client.queue import open_queue
from reshard.pipeline.errors import (
    CatalogFailed,
    CatalogState,
    EntriesWrong,
    FolderNotWritable,
    NoBroker,
    UsageError,
)
from reshard.pipeline.places import repository
from reshard.worker.followers.records import IN_FILE, TURNS

if TYPE_CHECKING:
    from reshard.client.models.catalogs import Catalog as Seen
    from reshard.client.models.catalogs import CatalogNow
    from reshard.pipeline.catalogs.definition import Catalog
    from reshard.pipeline.catalogs.expand import Wanted
    from reshard.worker.followers.records import Standing

LIST_HEAD = ("CATALOG", "STATE", "SINCE", "LAST SUCCESS", "MODELS")
SHOWN = 20  # lines of one kind; --json has all of them
SUBMIT_AGAIN = "fix the file, then run `reshard catalog submit FILE`"

File = Annotated[Path, argument("FILE", "The catalog, a YAML file.")]
Name = Annotated[str, argument("NAME", "The catalog's name.", autocompletion=completion.catalogs)]

catalog = Typer(
    name="catalog", cls=SectionedGroup, help="Reshard many models from one YAML file.", no_args_is_help=True
)
command = commands(catalog)


def read_catalog(file: Path) -> tuple[str, Catalog]:
    """The file's text and what it says; raises UsageError, BadCatalog."""
    from reshard.pipeline.catalogs.definition import parse

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(what=f"cannot read {file}: {why}") from None
    return text, parse(text, str(file))


def read_submission(file: Path, limits: Mapping[str, int]) -> tuple[str, Submission]:
    """The catalog's name, and its file as it is submitted; raises UsageError, BadCatalog, BadBody."""
    text, parsed = read_catalog(file)
    return parsed.name, read(Submission, {"text": text, **limits}, str(file))


@command("check")
def check(file: File, output: Output) -> None:
    """Show what a catalog would do now, and queue nothing.

    It asks the Hub with your own token.

    Example: reshard catalog check models.yaml
    """
    found = looked_at(read_catalog(file)[1])
    output.result(found, lines(_summary(found)), str(found.ready))
    if found.wrong:
        rest = {} if found.ready else {"others": ""}
        raise EntriesWrong(file=str(file), count=count(len(found.wrong), "model"), **rest)


def looked_at(parsed: Catalog, closely: bool = False) -> CatalogChecked:
    """What a catalog comes to now.

    ``closely`` also asks each target of which the broker knows nothing whether it stands, as control does.
    """
    from reshard.pipeline.catalogs.expand import expand, stands
    from reshard.pipeline.doctor.probes import unwritable
    from reshard.pipeline.stores.connect import Context
    from reshard.pipeline.stores.pace import LocalRateLimiter

    class Counted(LocalRateLimiter):
        calls = 0

        def before(self, kind: str) -> None:
            self.calls += 1
            super().before(kind)

    budgets = defaultdict[str, Counted](Counted)
    context = Context.from_env(budgets.__getitem__)
    found = expand(parsed, context)
    wanted = found.models
    ready = [one for one in wanted if one.error is None]
    # A pull request may be anybody's.
    written = [one.request.target for one in ready if one.request and not one.request.options.pr]
    standings = _standings(parsed.name, wanted)
    every = list(zip(wanted, standings or ["unknown"] * len(wanted), strict=True))
    if closely:
        every = [(one, "unchanged" if how == "unknown" and stands(one, context) else how) for one, how in every]
    # Of the sources that may be written: a target that is there already may be rewritten as a whole.
    growth = [one.source.bytes for one, stand in every if one.source and not one.error and stand != "unchanged"]
    return CatalogChecked(
        name=parsed.name,
        models=len(wanted),
        empty=list(found.empty),
        unwritable=list(unwritable(map(repository, written), context)),
        ready=len(ready),
        new=sum(one.target is None for one in ready),
        gated=[one.repo for one in wanted if one.source and one.source.gated],
        bytes=sum(one.source.bytes for one in ready if one.source),
        growth=sum(growth),
        calls=sum(budget.calls for budget in budgets.values()),
        unchanged=None if standings is None else sum(stand == "unchanged" for _, stand in every),
        drift=None if standings is None else [one.repo for one, stand in every if stand == "target"],
        wrong=[CatalogWrong(repo=one.repo, **one.error.to_dict()) for one in wanted if one.error],
        entries=[_entry(one, stand) for one, stand in every],
    )


@command("submit", limits=read_limits)
def submit(
    *,
    file: File,
    limits: dict[str, int],
    watch: Annotated[bool, Option("--watch", help="Follow it to its end, as `reshard catalog watch`.")] = False,
    output: Output,
) -> None:
    """Queue the models of a catalog that changed.

    It returns at once, unless --watch is given; a few jobs run at a time.

    Example: reshard catalog submit models.yaml --watch
    """
    name, submission = read_submission(file, limits)
    with connect() as session:
        done = operations.submit_catalog(session, submission)
        if done.waits:
            output.say(done.waits)
        text = f"catalog {name} is {'already running' if done.existed else 'submitted'}"
        for schedule in done.outdated_schedules:
            update = f"reshard schedule set {schedule} --catalog {shlex.quote(str(file))}"
            text += f"\nschedule {schedule} still submits an older text of it; `{update}` updates it"
        text += "" if watch else f"\nfollow it with `reshard catalog watch {name}`"
        output.result(done, text, name)
        if watch:
            _follow(session, name, output)


@command("watch")
def watch(name: Name, output: Output) -> None:
    """Follow a catalog until all its jobs have ended.

    It exits with 0 if every model is done, 11 if some failed, and 10 if the catalog was paused, stopped or cancelled.

    Example: reshard catalog watch mirror
    """
    with connect() as session:
        if waits := operations.show_progress(session, name).waits:
            output.say(waits)
        _follow(session, name, output)


def _follow(session: Session, name: str, output: Output) -> None:
    """To its end; raises CatalogFailed, and CatalogState where models are left that did not fail."""
    from reshard.cli.watch import follow_catalog
    from reshard.worker.followers.records import FULFILLED

    seen = follow_catalog(session, name, output)
    took = lasted(seen.since - seen.started)
    output.result(
        seen,
        f"catalog {name} {seen.state}: {count(seen.entries, 'model')}: {_counts(seen, len(seen.active))}; {took}",
        seen.state,
    )
    codes = [f"{code} {len(group):,}" for code, group in seen.failures().items()]
    if seen.state == "failed":
        raise CatalogFailed(name=name, why=f"{seen.note}{': ' if codes else ''}{', '.join(codes)}")
    left = seen.entries - sum(one.outcome in FULFILLED for one in seen.ended)
    if seen.state != "done" or left:
        note = f"{seen.note}; " if seen.note else ""
        why = f"{note}{left:,} of {seen.entries:,} models are not done"
        cure = f"continue it with `reshard catalog resume {name}`, or " if seen.state in TURNS["running"] else ""
        raise CatalogState(name=name, state=seen.state, why=why, cure=cure)


@command("status")
def status(
    *,
    name: Annotated[str | None, argument("NAME", "A catalog's name.", autocompletion=completion.catalogs)] = None,
    report: Annotated[Path | None, value("FILE", "Write a Markdown report to FILE.")] = None,
    output: Output,
) -> None:
    """Show the progress of a catalog, or list all of them.

    Example: reshard catalog status nightly
    """
    if report and name is None:
        raise UsageError(what="--report requires a catalog NAME")
    with connect() as session:
        if name is None:
            found = operations.list_catalogs(session).catalogs
            table = [(s.name, s.state, when(s.since), succeeded(s.success), _counts(s, s.active)) for s in found]
            # Each with its models is an answer of its own: it may have 100,000 of them.
            whole = (operations.show_catalog(session, one.name) for one in found)
            output.listing(whole, lines([LIST_HEAD, *table]) if table else "no catalogs", [one.name for one in found])
            return
        seen = operations.show_catalog(session, name)
    rows = _status(seen)
    if report:
        from reshard.client.catalog_report import markdown

        try:
            report.write_text(markdown(seen), encoding="utf-8")
        except OSError as error:
            raise FolderNotWritable(path=str(report), why=error.strerror or str(error)) from error
        rows.append(("report", f"written to {report}"))
    output.result(seen, lines(rows), seen.state)


@command("failures")
def failures(name: Name, output: Output) -> None:
    """Show failures by error code, with the next step for each.

    Example: reshard catalog failures nightly
    """
    with connect() as session:
        seen = operations.show_failures(session, name)
    groups, rows = seen.failures, []
    for code, group in groups.items():
        alike = len({one.hint for one in group}) == 1  # most name the model
        rows.append((code, count(len(group), "model"), group[0].hint if alike else ""))
        for one in group[:SHOWN]:
            rows.append(("", one.repo, f"job {one.job or '-'}: {one.message}"))
            rows += [] if alike else [("", "", one.hint)]
        rows += [("", f"{len(group) - SHOWN:,} more", "--json has them all")] if len(group) > SHOWN else []
    then = [f"{code}: {SUBMIT_AGAIN}" for code in groups if code in IN_FILE]
    if len(then) < len(groups):
        then.insert(0, f"once fixed, `reshard catalog retry {name} --only CODE`")
    rows += [("" if i else "next", "", step) for i, step in enumerate(then)]
    output.result(seen, lines(rows) or "no failures", "\n".join(groups))


@command("retry")
def retry(
    *,
    name: Name,
    only: Annotated[str | None, value("CODE", "Only failures with this error code.")] = None,
    output: Output,
) -> None:
    """Retry failed models with what they had copied.

    Models whose error is in the file itself are left alone.

    Example: reshard catalog retry nightly --only hub.unreachable
    """
    with connect() as session:
        done = operations.retry_catalog(session, name, read(operations.Only, {"only": only}, "--only"))
    rows = [(f"retrying {count(done.again, 'model') if done.again else 'no model'} of {name}",)]
    rows += [(f"left alone: {count(number, 'model')}, {code}: {SUBMIT_AGAIN}",) for code, number in done.left.items()]
    output.result(done, lines(rows), str(done.again))


@command("pause")
def pause(name: Name, output: Output) -> None:
    """Start no more models; those at work continue.

    A catalog that still asks the Hub for its models asks anew once it is resumed.

    Example: reshard catalog pause nightly
    """
    with connect() as session:
        done = operations.pause_catalog(session, name)
    output.result(done, f"catalog {name} is paused", name)


@command("resume")
def resume(name: Name, output: Output) -> None:
    """Resume a catalog that was paused or stopped by a limit.

    Its limits count from zero again.

    Example: reshard catalog resume nightly
    """
    with connect() as session:
        done = operations.resume_catalog(session, name)
    text = f"catalog {name} {'continues' if done.state == 'running' else f'is {done.state}'}"
    output.result(done, text, name)


@command("cancel")
def cancel(name: Name, output: Output) -> None:
    """Start no more models, and cancel those at work.

    Example: reshard catalog cancel nightly
    """
    with connect() as session:
        done = operations.cancel_catalog(session, name)
    output.result(done, f"catalog {name} is cancelled, and {count(done.jobs, 'job')} of it", name)


@command("remove")
def remove(name: Name, output: Output) -> None:
    """Remove a catalog that has ended; its targets and jobs stay.

    Example: reshard catalog remove nightly
    """
    with connect() as session:
        done = operations.remove_catalog(session, name)
    text = f"catalog {name} is removed; its targets stay as they are, and `reshard list` still has its jobs"
    for one in done.schedules:
        text += f"\nschedule {one} submits it again: `reshard schedule remove {one}` ends that"
    output.result(done, text, name)


def _status(seen: Seen) -> list[tuple[str, str]]:
    groups = seen.failures()
    return [
        ("catalog", f"{seen.name}, {seen.digest[:12]}"),
        ("state", f"{seen.state} since {dated(seen.since)}{f': {seen.note}' if seen.note else ''}"),
        ("last success", succeeded(seen.success)),
        ("asked by", f"{seen.asked_by}, {dated(seen.started)}"),
        ("models", f"{seen.entries:,}: {_counts(seen, len(seen.active))}"),
        moved(seen.read, seen.uploaded, 0),
        *_listed("warning", seen.empty, finds_none),
        *_listed("at work", [f"{repo}, job {job}" for repo, job in seen.active.items()], str),
        *(("failed", f"{code}: {count(len(group), 'model')}") for code, group in groups.items()),
        *([("next", f"see `reshard catalog failures {seen.name}`")] if groups else []),
        *([("next", f"continue it with `reshard catalog resume {seen.name}`")] if seen.state == "paused" else []),
    ]


def _counts(seen: Seen | CatalogNow, active: int) -> str:
    # Of a list also by error, `failed:CODE`, which `failed` has counted.
    counts = seen.counts | {"at work": active, "to do": seen.todo}
    text = ", ".join(f"{number:,} {what}" for what, number in counts.items() if number and ":" not in what)
    text = text or ("none yet" if seen.state == "expanding" else "none")
    find = "entry that finds" if len(seen.empty) == 1 else "entries that find"
    return f"{text}; {len(seen.empty):,} {find} no model" if seen.empty else text


def _standings(name: str, wanted: Sequence[Wanted]) -> Sequence[Standing] | None:
    """How each model stands against the last job that carried it out; None without a broker, which alone knows."""
    from reshard.worker.followers.records import entry_of
    from reshard.worker.settings import settings

    if settings().api_url is not None:
        return None
    try:
        with open_queue() as queue:
            return queue.catalogs.standings(name, map(entry_of, wanted))
    except NoBroker:
        return None


def _entry(one: Wanted, standing: str) -> CatalogEntry:
    return CatalogEntry(
        repo=one.repo,
        target=str(one.request.target) if one.request else None,
        commit=one.source.sha if one.source else None,
        bytes=one.source.bytes if one.source else None,
        exists=one.target is not None,
        standing=standing,
        error=one.error.code if one.error else None,
    )


_WRONG = "{0.repo}: {0.code}: {0.message} ({0.hint})".format


def _summary(found: CatalogChecked) -> list[tuple[str, str]]:
    unchanged = "not known without a broker"
    if found.unchanged is not None:
        unchanged = f"{found.unchanged:,} since their last job, which need none now"
    return [
        ("catalog", found.name),
        ("models", f"{found.models:,}, of which {found.ready:,} can be done"),
        ("targets", f"{found.new:,} new, {found.ready - found.new:,} there already"),
        ("bytes", f"{human_bytes(found.bytes)} stored by the sources, past commits included"),
        ("growth", f"{human_bytes(found.growth)} at most, before the Hub finds what it has already"),
        ("calls", f"{found.calls:,} to the Hub for this"),
        ("unchanged", unchanged),
        *_listed("warning", found.empty, finds_none),
        *_listed("warning", found.unwritable, "{}; control and workers may have another token".format),
        *_listed("drift", found.drift or (), "the target of {} has commits since its last job here".format),
        *_listed("gated", found.gated, str),
        *_listed("wrong", found.wrong, _WRONG),
    ]


# Why a model gets a job, by how it stands against its last one.
_MOVED = {"source": ": the source has a new commit", "target": ": the target has commits since its last job here"}


def would_do(found: CatalogChecked) -> list[tuple[str, str]]:
    """Of what ``looked_at`` found: which models would get a job now, which would not, and why, for people."""
    ready = [entry for entry in found.entries if entry.error is None]
    changed = [entry for entry in ready if entry.standing != "unchanged"]
    jobs = [f"{entry.repo} -> {entry.target}{_MOVED.get(entry.standing, '')}" for entry in changed]
    return [
        ("catalog", found.name),
        ("models", f"{found.models:,}, of which {len(jobs):,} would get a job"),
        *_listed("job", jobs, str),
        ("unchanged", count(len(ready) - len(jobs), "model")),
        *_listed("warning", found.empty, finds_none),
        *_listed("wrong", found.wrong, _WRONG),
    ]


def _listed(label: str, items: Sequence[Any], text: Callable[[Any], str]) -> list[tuple[str, str]]:
    return [(label, line) for line in first([text(item) for item in items], SHOWN)]
