"""`reshard catalog ...`: many models by one file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from reshard.cli import completion
from reshard.cli.arguments import argument, commands, flag, read_limits, value
from reshard.cli.job_text import moved
from reshard.cli.output import (
    Output,
    count,
    dated,
    first,
    human_bytes,
    lasted,
    lines,
    refuse_unwritable,
    succeeded,
    when,
    write,
)
from reshard.client.connect import connect
from reshard.client.models import catalogs as models
from reshard.client.operations import catalogs as operations
from reshard.client.operations.catalogs import Submission
from reshard.client.operations.table import Session, read
from reshard.client.queue import open_queue
from reshard.client.text import finds_none, remaining
from reshard.pipeline.errors import CatalogFailed, CatalogState, EntriesWrong, NoBroker, UsageError
from reshard.worker.followers.records import FULFILLED, IN_FILE, TURNS, UNDER_WAY

if TYPE_CHECKING:
    from reshard.pipeline.catalogs.definition import Catalog
    from reshard.pipeline.catalogs.expand import Wanted
    from reshard.worker.followers.records import Standing

LIST_HEAD = ("CATALOG", "STATE", "SINCE", "LAST SUCCESS", "MODELS")
SHOWN = 20  # lines of one kind; --json has all of them
RESUME = "Resume it with `reshard catalog resume {0}`"
SUBMIT_AGAIN = "fix the file, then run `reshard catalog submit FILE`"

File = Annotated[Path, argument("FILE", "The catalog (a YAML file).")]
Name = Annotated[str, argument("NAME", "The catalog's name.", autocompletion=completion.catalogs)]

catalog, command = commands("catalog", "Reshard many models from one YAML file.")


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
    """Show what a catalog would do now, without queueing jobs.

    Calls the Hub with your own token.

    Example: reshard catalog check models.yaml
    """
    found = looked_at(read_catalog(file)[1])
    output.result(found, lines(_summary(found)), str(found.ready))
    if found.wrong:
        rest = {} if found.ready else {"others": ""}
        raise EntriesWrong(file=str(file), count=count(len(found.wrong), "model"), **rest)


def looked_at(parsed: Catalog, closely: int = 0) -> models.CatalogChecked:
    """What a catalog comes to now, asked with the tokens of this environment."""
    from reshard.client.dry_run import of_catalog
    from reshard.pipeline.stores.connect import Context

    with closing(Context.from_env()) as context:
        return of_catalog(parsed, context, _standings, closely)


@command("submit", limits=read_limits)
def submit(
    file: File,
    limits: dict[str, int],
    output: Output,
    watch: Annotated[bool, flag("--watch", "Follow the catalog, like `reshard catalog watch`.")] = False,
) -> None:
    """Queue a catalog's new and changed models.

    Returns immediately unless --watch is set. Jobs run a few at a time (--at-once).

    Example: reshard catalog submit models.yaml --watch
    """
    name, submission = read_submission(file, limits)
    with connect() as session:
        done = operations.submit_catalog(session, submission)
        output.waits(done.waits)
        now_uses = f"now uses these limits ({count(submission.at_once, 'job')} at a time)"
        state, follow = "already running", "" if watch else f"\nFollow it with `reshard catalog watch {name}`"
        if done.state == "paused":
            state, follow = "paused", f"\n{RESUME.format(name)}"
        text = f"Catalog {name} is {state} and {now_uses}" if done.existed else f"Submitted catalog {name}"
        for schedule in done.outdated_schedules:
            update = f"reshard schedule set {schedule} --catalog {shlex.quote(str(file))}"
            text += f"\nSchedule {schedule} still submits an older version; to update it, run `{update}`"
        output.result(done, text + follow, name)
        if watch:
            _follow(session, name, output)


@command("watch")
def watch(name: Name, session: Session, output: Output) -> None:
    """Follow a catalog until all its jobs have ended.

    Exits with 0 if every model is done, 11 if some failed, and 10 if the catalog was paused, stopped or cancelled.

    Example: reshard catalog watch mirror
    """
    output.waits(operations.show_progress(session, name).waits)
    _follow(session, name, output)


def _follow(session: Session, name: str, output: Output) -> None:
    """To its end; raises CatalogFailed, and CatalogState where models are left that did not fail."""
    from reshard.cli.watch import follow_catalog

    seen = follow_catalog(session, name, output)
    took = lasted(seen.since - seen.started)
    output.result(seen, f"Catalog {name}: {seen.state}, {_models(seen)} in {took}", seen.state)
    codes = [f"{code} {number:,}" for code, number in seen.failed().items()]
    if seen.state == "failed":
        raise CatalogFailed(name=name, why=f"{seen.note}{': ' if codes else ''}{', '.join(codes)}")
    left = seen.entries - sum(seen.counts.get(outcome, 0) for outcome in FULFILLED)
    if seen.state != "done" or left:
        note = f"{seen.note}; " if seen.note else ""
        not_listed = f"it was {seen.state} while its models were being listed"
        why = f"{note}{left:,} of {seen.entries:,} models are not done" if seen.entries else not_listed
        cure = f"continue it with `reshard catalog resume {name}`, or " if seen.state in TURNS["running"] else ""
        raise CatalogState(name=name, state=seen.state, why=why, cure=cure)


@command("status")
def status(
    output: Output,
    name: Annotated[str | None, argument("NAME", "A catalog's name.", autocompletion=completion.catalogs)] = None,
    report: Annotated[Path | None, value("FILE", "Also write a Markdown report to FILE.")] = None,
) -> None:
    """Show the progress of a catalog, or list all of them.

    Example: reshard catalog status nightly
    """
    if report is not None and name is None:
        raise UsageError(what="--report requires a catalog NAME")
    if report is not None:
        refuse_unwritable(report, "--report")
    with connect() as session:
        if name is None:
            found = operations.all_catalogs(session)
            table = [(s.name, s.state, when(s.since), succeeded(s.success), _counts(s, s.active)) for s in found]
            # Each with its models is an answer of its own: it may have 100,000 of them.
            whole = (operations.whole_catalog(session, one.name) for one in found)
            output.listing(whole, lines([LIST_HEAD, *table]) if table else "No catalogs", [one.name for one in found])
            return
        seen = operations.whole_catalog(session, name)
    rows = _status(seen)
    if report is not None:
        from reshard.client.catalog_report import markdown

        write(report, markdown(seen))
        rows.append(("report", f"written to {report}"))
    output.result(seen, lines(rows), seen.state)


@command("failures")
def failures(name: Name, session: Session, output: Output) -> None:
    """Show failures by error code, with a hint for each.

    Example: reshard catalog failures nightly
    """
    seen = operations.all_failures(session, name)
    groups, rows = seen.failures, []
    for code, group in groups.items():
        alike = len({one.hint for one in group}) == 1  # most name the model
        hint = _own_hint(group[0]) if len(group) == 1 else group[0].hint
        rows.append((code, count(len(group), "model"), hint if alike else ""))
        for one in group[:SHOWN]:
            rows.append(("", one.repo, f"job {one.job or '-'}: {one.message}"))
            rows += [] if alike else [("", "", _own_hint(one))]
        rows += [("", f"{len(group) - SHOWN:,} more", "use --json to show all")] if len(group) > SHOWN else []
    then = [f"{code}: {SUBMIT_AGAIN}" for code in groups if code in IN_FILE]
    if len(then) < len(groups):
        then.insert(0, f"after fixing the cause, run `reshard catalog retry {name} --only CODE`")
    rows += [("" if i else "next", "", step) for i, step in enumerate(then)]
    output.result(seen, lines(rows) or "No failures", "\n".join(groups))


def _own_hint(one: models.CatalogFailure) -> str:
    """The hint, which is kept as it is for all that failed alike, with its own job."""
    return re.sub(r"\bJOB\b", one.job, one.hint) if one.job else one.hint


@command("retry")
def retry(
    name: Name,
    session: Session,
    output: Output,
    only: Annotated[str | None, value("CODE", "Retry only failures with this error code.")] = None,
) -> None:
    """Retry failed models, reusing copied files.

    Skips models whose error is in the catalog file itself.

    Example: reshard catalog retry nightly --only hub.unreachable
    """
    done = operations.retry_catalog(session, name, read(operations.Only, {"only": only}, "--only"))
    rows = [(f"Retrying {count(done.again, 'model')} of catalog {name}",)]
    if not done.again and not done.left:
        rows = [(f"No model of catalog {name} has failed",)]
        rows += [("To run cancelled models again, run `reshard catalog submit FILE`",)] * (done.state == "cancelled")
    rows += [(f"Skipped {count(number, 'model')} with {code}: {SUBMIT_AGAIN}",) for code, number in done.left.items()]
    rows += [(f"Catalog {name} is paused",), (RESUME.format(name),)] if done.state == "paused" else []
    output.result(done, lines(rows), str(done.again))


@command("pause")
def pause(name: Name, session: Session, output: Output) -> None:
    """Pause a catalog: running jobs continue, no new ones start.

    If its models are still being listed on the Hub, listing starts over on resume.

    Example: reshard catalog pause nightly
    """
    done = operations.pause_catalog(session, name)
    text = f"Catalog {name} is already paused" if done.already else f"Paused catalog {name}"
    output.result(done, text, name)


@command("resume")
def resume(name: Name, session: Session, output: Output) -> None:
    """Resume a catalog that was paused or stopped by a limit.

    Counting toward its limits starts over.

    Example: reshard catalog resume nightly
    """
    done = operations.resume_catalog(session, name)
    text = f"Resumed catalog {name}" if done.state == "running" else f"Catalog {name} is {done.state}"
    text = f"Catalog {name} is already {done.state}" if done.already else text
    if done.state not in UNDER_WAY:  # its last job ended in the pause
        seen = operations.show_catalog(session, name)
        text = f"Catalog {name} has already ended: {seen.state}, {_models(seen)}"
        text += f"\nRetry failed models with `reshard catalog retry {name}`" if "retry" in seen.may() else ""
    output.result(done, text, name)


@command("cancel")
def cancel(name: Name, session: Session, output: Output) -> None:
    """Cancel a catalog and its running jobs.

    Example: reshard catalog cancel nightly
    """
    done = operations.cancel_catalog(session, name)
    output.result(done, f"Cancelled catalog {name} and {count(done.jobs, 'job')}", name)


@command("remove")
def remove(name: Name, session: Session, output: Output) -> None:
    """Remove a catalog that has ended; keep its targets and jobs.

    Example: reshard catalog remove nightly
    """
    done = operations.remove_catalog(session, name)
    text = f"Removed catalog {name}; its targets are unchanged, and `reshard list` still shows its jobs"
    for one in done.schedules:
        text += f"\nSchedule {one} will submit it again; to stop that, run `reshard schedule remove {one}`"
    output.result(done, text, name)


def _status(seen: models.Catalog) -> list[tuple[str, str]]:
    failed, models_ = seen.failed(), f"{seen.entries:,}: {_counts(seen, seen.running)}"
    return [
        ("catalog", f"{seen.name}, {seen.digest[:12]}"),
        ("state", f"{seen.state} since {dated(seen.since)}{f': {seen.note}' if seen.note else ''}"),
        *([("waiting", seen.waits)] if seen.waits else []),
        ("last success", succeeded(seen.success)),
        ("submitted", f"{dated(seen.started)} by {seen.asked_by}"),
        ("models", ", ".join(filter(None, (models_, remaining(seen.left))))),
        moved(seen.read, seen.uploaded, 0),
        *_listed("warning", seen.empty, finds_none),
        *_listed("running", [f"{repo}, job {job}" for repo, job in seen.active.items()], str),
        *(("failed", f"{code}: {count(number, 'model')}") for code, number in failed.items()),
        *([("next", f"run `reshard catalog failures {seen.name}` for details")] if failed else []),
        *([("next", f"resume it with `reshard catalog resume {seen.name}`")] if seen.state == "paused" else []),
    ]


def _models(seen: models.Catalog) -> str:
    return f"{count(seen.entries, 'model')} ({_counts(seen, seen.running)})"


def _counts(seen: models.Catalog | models.CatalogNow, active: int) -> str:
    # Also by error, `failed:CODE`, which `failed` has counted.
    counts = seen.counts | {"running": active, "to do": seen.todo, "not queued": models.dropped(seen, active)}
    text = ", ".join(f"{number:,} {what}" for what, number in counts.items() if number and ":" not in what)
    text = text or ("none yet" if seen.state == "expanding" else "none")
    match = "entry matches" if len(seen.empty) == 1 else "entries match"
    return f"{text}; {len(seen.empty):,} {match} no models" if seen.empty else text


def _standings(name: str, wanted: Sequence[Wanted]) -> Sequence[Standing] | None:
    """How each model stands against the last job that carried it out; None without a broker, which alone knows."""
    from reshard.worker.settings import settings

    if settings().api_url is not None:
        return None
    try:
        with open_queue() as queue:
            return operations.standings(queue, name, wanted)
    except NoBroker:
        return None


_WRONG = "{0.repo}: {0.code}: {0.message} ({0.hint})".format


def _summary(found: models.CatalogChecked) -> list[tuple[str, str]]:
    unchanged = "unknown without a broker"
    if found.unchanged is not None:
        unchanged = f"{found.unchanged:,} since their last job, so not queued"
    return [
        ("catalog", found.name),
        ("models", f"{found.models:,} ({found.ready:,} ready)"),
        ("targets", f"{found.new:,} new, {found.ready - found.new:,} existing"),
        ("bytes", f"{human_bytes(found.bytes)} in the source repositories, including past commits"),
        ("growth", f"up to {human_bytes(found.growth)} (less after deduplication)"),
        ("calls", f"{count(found.calls, 'Hub call')} for this check"),
        ("unchanged", unchanged),
        *_listed("warning", found.empty, finds_none),
        *_listed("warning", found.unwritable, "{} (workers and the control process may use another token)".format),
        *_listed("drift", found.drift or (), "the target of {} has new commits since its last job".format),
        *_listed("gated", found.gated, str),
        *_listed("invalid", found.wrong, _WRONG),
    ]


# Why a model gets a job, by how it stands against its last one.
_MOVED = {"source": ": new source commit", "target": ": the target has new commits since its last job"}


def would_do(found: models.CatalogChecked) -> list[tuple[str, str]]:
    """Of what ``looked_at`` found: which models would get a job now, which would not, and why, for people."""
    ready = [entry for entry in found.entries if entry.error is None]
    changed = [entry for entry in ready if entry.standing != "unchanged"]
    jobs = [f"{entry.repo} -> {entry.target}{_MOVED.get(entry.standing, '')}" for entry in changed]
    return [
        ("catalog", found.name),
        ("models", f"{found.models:,} ({len(jobs):,} would be queued)"),
        *_listed("job", jobs, str),
        ("unchanged", count(len(ready) - len(jobs), "model")),
        *_listed("warning", found.empty, finds_none),
        *_listed("invalid", found.wrong, _WRONG),
    ]


def _listed(label: str, items: Sequence[Any], text: Callable[[Any], str]) -> list[tuple[str, str]]:
    return [(label, line) for line in first([text(item) for item in items], SHOWN)]
