"""`reshard submit, status, list, watch, cancel, retry, rollback, delete`: jobs on the queue."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from typer import Option

from reshard.cli import completion
from reshard.cli.arguments import Verbose, argument, parse_age, read_output, read_request, takes, value
from reshard.cli.job_text import describe, now_text, report_text, took, undone
from reshard.cli.output import Output, count, lines, some, when
from reshard.cli.queue import process_text
from reshard.client import PAGE_MAX
from reshard.client.connect import connect
from reshard.client.facts import into
from reshard.client.operations import jobs as operations
from reshard.client.operations.table import Session, read
from reshard.client.queue import missing
from reshard.pipeline.errors import UsageError
from reshard.pipeline.places import parse_target
from reshard.pipeline.request import Priority, Request
from reshard.worker.queue.states import ENDED, JobState

if TYPE_CHECKING:
    from reshard.client.models.jobs import JobNow, JobsPage

LISTED = 20  # jobs; a screenful
LIST_HEAD = ("JOB", "STATE", "SUBMITTED", "TOOK", "SOURCE -> TARGET")

_JOB = argument("JOB", "A job's id, or the start of one.", autocompletion=completion.jobs)
Job = Annotated[str, _JOB]
Watch = Annotated[bool, Option("--watch", help="Follow the job to its end and exit with its exit code.")]


@takes(request=read_request, output=read_output)
def submit(
    *,
    request: Request,
    priority: Annotated[Priority, Option(help="bulk jobs wait for interactive ones.")] = "interactive",
    watch: Watch = False,
    verbose: Verbose = False,
    output: Output,
) -> None:
    """Queue a job that reshards SRC into DST.

    It exits with 0 once the job is queued.

    Example: reshard submit openai-community/gpt2 --to you/gpt2 --size 200MB
    """
    request = request.model_copy(update={"priority": priority})
    with connect() as session:
        done = operations.submit(session, operations.Asked.of(request))
        job, state = done.id, "already has this request" if done.existed else "is queued"
        hint = "" if watch else f"\nfollow it with `reshard watch {job}`"
        text = f"job {job} {state}: {request.source} -> {request.target}{hint}"
        places = (request.source, request.options.config_from, request.target)
        if folders := " and ".join(str(place) for place in places if place and place.local):
            where = "on their own machines, within RESHARD_ALLOWED_FOLDERS"
            output.say(f"workers look for {folders} {where}; `reshard run` takes folders of this one")
        if done.waits:
            output.say(done.waits)
        output.result(done, text, job)
        if watch:
            from reshard.cli.watch import follow  # which a client that only submits need not wait for

            follow(session, job, output, verbose)


@takes(output=read_output)
def status(
    *,
    job: Annotated[str | None, _JOB] = None,
    report: Annotated[bool, Option("--report", help="Show the figures and findings of each check.")] = False,
    output: Output,
) -> None:
    """Show one job, or without JOB the queue and its workers.

    Example: reshard status pkgd
    """
    if report and job is None:
        raise UsageError(what="--report is about one job: give its JOB")
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
    rows = [("broker", seen.broker), *([("waits", seen.waits)] if seen.waits else [])]
    rows += [(process.kind, process_text(process)) for process in seen.processes]
    rows += [(kind, "none is running") for kind in missing({process.kind for process in seen.processes})]
    rows.append(("jobs", ", ".join(f"{number:,} {state}" for state, number in seen.jobs.items()) or "none"))
    output.result(seen, lines(rows))


@takes(output=read_output)
def list_(
    *,
    state: Annotated[list[JobState] | None, value("STATE", "Only jobs in this state. May be given again.")] = None,
    limit: Annotated[int, Option(min=1, help="How many jobs to show.")] = LISTED,
    all_: Annotated[bool, Option("--all", help="Show all jobs.")] = False,
    output: Output,
) -> None:
    """List jobs, newest first.

    Example: reshard list --state failed
    """
    with connect() as session:
        page = _listed(session, state or [], sys.maxsize if all_ else limit)
    for why in dict.fromkeys(filter(None, (page.waits, *(job.waits for job in page.jobs if not job.claims)))):
        output.say(why)
    for job in page.jobs:
        if job.waits and job.claims:
            output.say(f"job {job.id} waits: {job.waits}")
    for id, damage in page.unreadable.items():
        output.say(f"the record of job {id} cannot be read: {damage}")
    there = sum(number for counted, number in page.counts.items() if not state or counted in state)
    left = there - len(page.jobs) - len(page.unreadable)
    more = [f"{left:,} more; --all shows them"] if left > 0 else []
    rows = [row(job) for job in page.jobs]
    text = "\n".join([lines([LIST_HEAD, *rows]), *more]) if rows else "no jobs"
    output.listing(page.jobs, text, [job.id for job in page.jobs])


def _listed(session: Session, states: list[JobState], limit: int) -> JobsPage:
    """The newest jobs, on one page however many; its counts and why nothing is begun are the last ones'."""
    jobs: list[JobNow] = []
    unreadable: dict[str, str] = {}
    after: str | None = None
    while True:
        left = min(PAGE_MAX, limit - len(jobs) - len(unreadable))
        # What a service says of its next page goes back to it as it is.
        query = operations.JobsQuery.model_construct(state=states, limit=left, after=after)
        page = operations.list_jobs(session, query)
        jobs, unreadable, before, after = jobs + page.jobs, unreadable | page.unreadable, after, page.next
        if after in {None, "", before} or len(jobs) + len(unreadable) >= limit:
            return page.model_copy(update={"jobs": jobs, "unreadable": unreadable})


def row(job: JobNow) -> tuple[str, ...]:
    undone = f", undone by {job.rolled_back[:12]}" if job.rolled_back else ""
    code = f", {job.error.code}" if job.error else ""
    places = f"{job.request.source} -> {into(job.request)}"
    return job.id, now_text(job) + code + undone, when(job.created), took(job), places


@takes(output=read_output)
def watch(*, job: Job, verbose: Verbose = False, output: Output) -> None:
    """Follow a job to its end and exit with its exit code.

    Example: reshard watch pkgd
    """
    from reshard.cli.watch import follow

    with connect() as session:
        follow(session, operations.show(session, job).id, output, verbose)


@takes(output=read_output)
def cancel(job: Job, output: Output) -> None:
    """Stop a job before its commit.

    What it has copied is kept for a retry.

    Example: reshard cancel pkgd
    """
    with connect() as session:
        done = operations.cancel(session, job)
    text = "was cancelled already" if done.was == "cancelled" else f"is cancelled; it was {done.was}"
    output.result(done, f"job {done.id} {text}", done.id)


@takes(output=read_output)
def retry(
    *,
    job: Job,
    anew: Annotated[
        bool,
        Option(
            "--anew",
            help="Plan again from the current source and target; a commit that has only to be checked is kept.",
        ),
    ] = False,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Plan again, and replace what others changed in the target since.")
    ] = False,
    follow_it: Watch = False,
    output: Output,
) -> None:
    """Continue a failed or cancelled job with what it had copied.

    Example: reshard retry pkgd --watch
    """
    with connect() as session:
        done = operations.retry(session, job, operations.Again(anew=anew, overwrite=overwrite))
        if done.waits:
            output.say(done.waits)
        output.result(done, f"job {done.id} continues; it was {done.was}", done.id)
        if follow_it:
            from reshard.cli.watch import follow

            follow(session, done.id, output)


@takes(output=read_output)
def rollback(
    job: Annotated[
        str,
        argument("JOB|DST", "A job's id, or the start of one; or the target itself.", autocompletion=completion.jobs),
    ],
    output: Output,
) -> None:
    """Undo the commit of a job, or the last one to DST.

    Another commit undoes it, with your own token (by RESHARD_API_URL and JOB, with the service's); refused if others
    changed one of the commit's files since.

    Example: reshard rollback you/gpt2-200MB
    """
    if "/" in job or job.startswith("."):
        from reshard.client.acts import roll_back_target
        from reshard.pipeline.stores.connect import Context

        place = parse_target(job)
        done = roll_back_target(place, Context.from_env())
    else:
        with connect() as session:
            place = operations.show(session, job).request.target
            done = operations.roll_back(session, job)
    output.result(done, undone(place, done.undone, done.commit), done.commit)


@takes(output=read_output)
def delete(
    *,
    jobs: Annotated[
        list[str] | None, argument("JOB", "Ids of jobs, or the start of each.", autocompletion=completion.jobs)
    ] = None,
    state: Annotated[
        list[JobState] | None, value("STATE", "Delete jobs that ended in this state. May be given again.")
    ] = None,
    older_than: Annotated[str | None, value("AGE", "Only jobs that ended this long ago or longer, as 30d.")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Only say what would be deleted.")] = False,
    output: Output,
) -> None:
    """Delete jobs that have ended.

    What they published stays. A deleted job cannot be retried, watched or rolled back; `rollback DST` still works.

    Example: reshard delete --state failed --state cancelled --older-than 7d
    """
    if bool(jobs) == bool(state or older_than):
        raise UsageError(what="give the JOBs to delete, or choose them with --state, --older-than or both")
    if under_way := sorted({*(state or ())} - ENDED):
        raise UsageError(what=f"--state {under_way[0]}: such a job has not ended; `reshard cancel` it first")
    age = parse_age(older_than, "--older-than") if older_than else 0.0
    asked = {"jobs": jobs or [], "states": state or sorted(ENDED), "age": age, "dry_run": dry_run}
    with connect() as session:
        done = operations.delete_jobs(session, read(operations.Forgotten, asked, "the JOBs"))
    found, kept = done.ids, done.kept
    text = f"{'would delete' if dry_run else 'deleted'} {count(len(found), 'job')}"
    text += f": {some(found)}" if found else ""
    text += f"\nkept {count(len(kept), 'job')} until {operations.AWAITED}: {some(kept)}" if kept else ""
    output.result(done, text, "\n".join(found))
