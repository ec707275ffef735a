"""`reshard submit, status, list, watch, cancel, retry, rollback, delete`: jobs on the queue."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

from typer import Abort, Option

from reshard.cli import completion
from reshard.cli.arguments import Choice, Verbose, argument, flag, read_choice, read_filter, read_request, takes
from reshard.cli.job_text import describe, now_text, report_text, took, undone
from reshard.cli.output import Output, agrees, count, dated, lines, some, when
from reshard.client import PAGE_MAX
from reshard.client.connect import connect
from reshard.client.facts import into
from reshard.client.models.jobs import Acted, Deleted, JobNow, JobsPage, ProcessNow
from reshard.client.operations import jobs as operations
from reshard.client.operations.jobs import RETRIABLE
from reshard.client.operations.table import Session, pages, read
from reshard.client.queue import missing, state_text, worker_state
from reshard.pipeline.arguments import ACCESS
from reshard.pipeline.errors import UsageError
from reshard.pipeline.places import parse_place
from reshard.pipeline.request import Priority, Request
from reshard.pipeline.text import printable
from reshard.worker.queue.states import CANCELLABLE, ENDED, JobState

D = TypeVar("D", Acted, Deleted)

LISTED = 20  # jobs; a screenful
LIST_HEAD = ("JOB", "STATE", "SUBMITTED", "TOOK", "SOURCE -> TARGET")

_JOB = argument("JOB", "A job ID or a unique prefix.", autocompletion=completion.jobs)
Job = Annotated[str, _JOB]
Watch = Annotated[bool, flag("--watch", "Follow the job until it ends; exit with its exit code.")]


@takes(request=read_request)
def submit(
    request: Request,
    session: Session,
    output: Output,
    priority: Annotated[
        Priority, Option(help="Priority of the job; interactive jobs run before bulk jobs.", rich_help_panel=ACCESS)
    ] = "interactive",
    watch: Watch = False,
    verbose: Verbose = False,
) -> None:
    """Queue a job that reshards SRC into DST.

    Exits with 0 once the job is queued, or with the job's exit code if --watch is given.

    Example: reshard submit openai-community/gpt2 --to you/gpt2 --size 200MB
    """
    request = request.model_copy(update={"priority": priority})
    done = operations.submit(session, operations.JobRequest.of(request))
    job, state = done.id, f"Already {done.state.replace('_', ' ')} as job" if done.existed else "Queued job"
    hint = "" if watch else f"\nFollow it with `reshard watch {job}`"
    text = printable(f"{state} {job}: {request.source} -> {request.target}") + hint
    places = (request.source, request.options.config_from, request.target)
    if folders := [str(place) for place in places if place and place.local]:
        where = f"{printable(' and '.join(folders))} {'is' if len(folders) == 1 else 'are'} resolved on the worker"
        output.say(f"warning: {where}, within its RESHARD_ALLOWED_FOLDERS; for local folders, use `reshard run`")
    output.waits(done.waits)
    output.result(done, text, job)
    if watch:
        from reshard.cli.watch import follow  # which a client that only submits need not wait for

        follow(session, job, output, verbose)


@takes()
def status(
    output: Output,
    job: Annotated[str | None, _JOB] = None,
    report: Annotated[bool, flag("--report", "Show the details and findings of each check.")] = False,
) -> None:
    """Show a job, or the queue and its workers.

    Example: reshard status pkgd
    """
    if report and job is None:
        raise UsageError(what="--report requires a JOB")
    with connect() as session:
        if job is None:
            _show_service(session, output)
        elif report:
            checked = operations.report(session, job)
            output.result(checked, report_text(checked), checked.result)
        else:
            now = operations.show(session, job)
            output.result(now, lines(describe(now)), now.state)


def _show_service(session: Session, output: Output) -> None:
    seen = operations.service(session)
    rows = [("broker", seen.broker), *([("waiting", seen.waits)] if seen.waits else [])]
    rows += [(process.kind, _process_text(process)) for process in seen.processes]
    rows += [(one.kind, one.says) for one in seen.silent]
    rows += [(kind, "not running") for kind in missing({process.kind for process in [*seen.processes, *seen.silent]})]
    rows.append(("jobs", ", ".join(f"{number:,} {state}" for state, number in seen.jobs.items()) or "none"))
    output.result(seen, lines(rows))


def _process_text(process: ProcessNow) -> str:
    """A process by its name, with a worker's state, and since when it runs."""
    text = f"version {process.version}, started {dated(process.started)}"
    if process.kind == "worker":
        state = state_text(worker_state(process, process.drained, process.resting))
        text = f"{state}, up to {count(process.concurrency, 'copy')} at a time, {text}"
    return f"{process.name}: {text}"


@takes(filter_=read_filter)
def list_(
    filter_: dict[str, Any],
    session: Session,
    output: Output,
    limit: Annotated[int, Option(metavar="N", min=1, help="Maximum number of jobs to show.")] = LISTED,
    all_: Annotated[bool, flag("--all", "Show all jobs.")] = False,
) -> None:
    """List jobs, newest first.

    Example: reshard list --state failed --target 'you/*'
    """
    page = _listed(session, filter_, sys.maxsize if all_ else limit)
    said = dict.fromkeys(filter(None, (page.waits, *(job.waits for job in page.jobs if not job.claims))))
    for why in said:
        output.waits(why)
    for job in page.jobs:
        if job.waits and job.claims and job.waits not in said:
            output.say(f"job {job.id} is waiting: {job.waits}")
    for id, damage in page.unreadable.items():
        output.warn(f"cannot read the record of job {id}: {damage}")
    more = ["More jobs match; use --all to show them"] if page.next else []
    if not filter_.keys() - {"state"}:
        states = filter_.get("state", page.counts)
        left = sum(page.counts.get(state, 0) for state in states) - len(page.jobs) - len(page.unreadable)
        more = [f"{left:,} more; use --all to show them"] if left > 0 else []
    rows = [row(job) for job in page.jobs]
    text = "\n".join([lines([LIST_HEAD, *rows]), *more]) if rows else "No jobs"
    output.listing(page.jobs, text, [job.id for job in page.jobs])


def _listed(session: Session, filter_: dict[str, Any], limit: int) -> JobsPage:
    """The newest jobs, on one page however many; its counts and why nothing is begun are the last ones'."""
    jobs: list[JobNow] = []
    unreadable: dict[str, str] = {}

    def ask(query: operations.JobsQuery) -> JobsPage:
        left = min(PAGE_MAX, limit - len(jobs) - len(unreadable))
        return operations.list_jobs(session, query.model_copy(update={"limit": left}))

    for page in pages(ask, read(operations.JobsQuery, filter_, "the options")):
        jobs, unreadable = jobs + page.jobs, unreadable | page.unreadable
        if len(jobs) + len(unreadable) >= limit:
            break
    return page.model_copy(update={"jobs": jobs, "unreadable": unreadable})


def row(job: JobNow) -> tuple[str, ...]:
    undone = f", rolled back by {job.rolled_back[:12]}" if job.rolled_back else ""
    code = f", {job.error.code}" if job.error else ""
    places = f"{job.request.source} -> {into(job.request)}"
    return job.id, now_text(job) + code + undone, when(job.created), took(job), places


@takes()
def watch(job: Job, session: Session, output: Output, verbose: Verbose = False) -> None:
    """Follow a job until it ends; exit with its exit code.

    Example: reshard watch pkgd
    """
    from reshard.cli.watch import follow

    follow(session, operations.show(session, job).id, output, verbose)


@takes()
def logs(job: Job, session: Session, output: Output) -> None:
    """Print log lines from a job's workers.

    Shows the last 200 lines from all of the job's workers, without secrets. Once a job is done, its log is kept for an
    hour.

    Example: reshard logs pkgd
    """
    log = operations.log(session, job)
    older = log.logged - len(log.lines)
    if older and log.lines:
        output.say(f"{count(older, 'older line', 'is')} no longer available")
    rows = [(when(line.at, "%b %d %H:%M:%S"), line.level, line.unit, line.text) for line in log.lines]
    none = "the log is no longer available" if older else f"no worker has logged anything for job {log.id}"
    output.result(log, lines(rows) or none, "\n".join(line.text for line in log.lines))


@takes(choice=read_choice)
def cancel(choice: Choice, session: Session, output: Output) -> None:
    """Cancel jobs before they publish.

    Files that are already copied are kept for `reshard retry`.

    Example: reshard cancel --state queued --catalog nightly
    """
    if (job := _only(choice)) is None:
        _each(session, choice, output, CANCEL)
        return
    done = operations.cancel(session, job)
    text = f"Job {done.id} was already cancelled"
    if done.was != "cancelled":
        text = f"Cancelled job {done.id} (was {done.was})"
    output.result(done, text, done.id)


@takes(choice=read_choice)
def retry(
    choice: Choice,
    output: Output,
    anew: Annotated[
        bool,
        flag(
            "--anew", "Plan again from the current source and target; a commit that only needs to be confirmed is kept."
        ),
    ] = False,
    overwrite: Annotated[
        bool, flag("--overwrite", "Plan again, and replace target files that others have added or changed.")
    ] = False,
    follow_it: Watch = False,
) -> None:
    """Retry failed or cancelled jobs, reusing copied files.

    Of matching jobs with the same request, such as the failed runs of a schedule, a filter or --all selects only the
    last to end, even if a later run is done.

    Example: reshard retry pkgd --watch
    """
    how = {"anew": anew, "overwrite": overwrite}
    job = _only(choice)
    if follow_it and job is None:
        raise UsageError(what="--watch requires exactly one job")
    with connect() as session:
        if job is None:
            _each(session, choice, output, RETRY, **how)
            return
        done = operations.retry(session, job, operations.Again(**how))
        output.waits(done.waits)
        output.result(done, f"Retrying job {done.id} (was {done.was})", done.id)
        if follow_it:
            from reshard.cli.watch import follow

            follow(session, done.id, output)


def _only(choice: Choice) -> str | None:
    return choice.jobs[0] if len(choice.jobs) == 1 and not choice.dry_run else None


def _each(session: Session, choice: Choice, output: Output, act: Act[Acted], **how: bool) -> None:
    """``act`` on several jobs; raises the error of the first that it cannot be done to, after all."""
    _, done = _looks(session, choice, output, act, **how)
    for refused in done.refused:
        output.say(f"job {refused.id}: {refused.error.message}")
    output.result(done, done_text(act, done), "\n".join(done.ids))
    if done.refused:
        raise done.refused[0].error.error()


class Act(NamedTuple, Generic[D]):
    """What can be done to several jobs."""

    do: Callable[[Session, Any], D]
    verb: str
    past: str
    states: frozenset[JobState]  # of jobs that it can be done to
    else_: str  # why not to others
    body: type[operations.Chosen] = operations.Chosen


CANCEL = Act(
    operations.cancel_jobs, "cancel", "cancelled", CANCELLABLE, "these jobs have ended, or their commit is in progress"
)
RETRY = Act(
    operations.retry_jobs, "retry", "retried", RETRIABLE, "these jobs cannot be retried", operations.ChosenAgain
)
DELETE = Act(
    operations.delete_jobs, "delete", "deleted", ENDED, "these jobs have not ended; run `reshard cancel` first"
)


def _looks(session: Session, choice: Choice, output: Output, act: Act[D], **how: bool) -> tuple[D, D]:
    """The first and the last answer: for jobs that are chosen of a trial, and of what was done once someone agreed.

    Raises UsageError, and Abort.
    """
    if wrong := sorted({*choice.fields.get("state", ())} - act.states):
        raise UsageError(what=f"--state {wrong[0]}: {act.else_}")

    def do(fields: dict[str, Any]) -> D:
        return act.do(session, read(act.body, fields | how, "the options"))

    fields = {"jobs": choice.jobs} if choice.jobs else choice.fields
    if len(choice.jobs) > 1 and act.verb == DELETE.verb:  # all of them or none: it fails over a name that is mistyped
        do(fields | {"dry_run": True})
    if choice.jobs or choice.dry_run or choice.yes:
        done = do(fields | {"dry_run": choice.dry_run})
        return done, done
    trial = do(fields | {"dry_run": True})
    jobs = count(len(trial.ids), "job")
    if trial.ids:
        if not sys.stdin.isatty():
            raise UsageError(what=f"{jobs} would be {act.past}; confirm with --yes, or preview with --dry-run")
        if not agrees(f"{act.verb.capitalize()} {jobs}?"):
            output.say("Nothing changed")
            raise Abort
    return trial, do({"jobs": trial.ids})


def done_text(act: Act[D], done: D) -> str:
    chosen = len(done.ids) + len(done.kept if isinstance(done, Deleted) else done.refused)
    more = "\nMore jobs may match; run the command again" if chosen >= operations.CHOSEN_MAX else ""
    did = f"Would {act.verb}" if done.dry_run else act.past.capitalize()
    return f"{did} {count(len(done.ids), 'job')}{': ' if done.ids else ''}{some(done.ids)}{more}"


@takes()
def rollback(
    job: Annotated[
        str,
        argument("JOB|DST", "A job ID, a unique prefix of a job ID, or a target.", autocompletion=completion.jobs),
    ],
    output: Output,
) -> None:
    """Undo the commit of a job, or reshard's last commit to DST.

    This adds a commit, using your token. For a JOB with RESHARD_API_URL set, the service's token is used instead. The
    command fails if others have changed any of the commit's files since.

    Example: reshard rollback you/gpt2-200MB
    """
    if "/" in job or job.startswith("."):
        from reshard.client.acts import roll_back_target
        from reshard.pipeline.stores.connect import Context

        place = parse_place(job)
        done = roll_back_target(place, Context.from_env())
    else:
        with connect() as session:
            place = operations.show(session, job).request.target
            done = operations.roll_back(session, job)
    output.result(done, undone(place, done.undone, done.commit, done.already), done.commit)


@takes(choice=read_choice)
def delete(choice: Choice, session: Session, output: Output) -> None:
    """Delete jobs that have ended.

    Published results are kept. A deleted job cannot be retried, watched or rolled back; `rollback DST` still works.

    Example: reshard delete --state failed --state cancelled --older-than 7d
    """
    first, done = _looks(session, choice, output, DELETE)
    done = done.model_copy(update={"kept": first.kept})
    text = done_text(DELETE, done)
    if done.kept:
        text += f"\nKept {count(len(done.kept), 'job')} until {operations.AWAITED}: {some(done.kept)}"
    output.result(done, text, "\n".join(done.ids))
