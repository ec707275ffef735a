"""`reshard submit, status, list, watch, cancel, retry, rollback, delete`: jobs on the queue."""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Annotated

from typer import Option

from reshard.cli import completion
from reshard.cli.arguments import Verbose, argument, parse_age, read_output, read_request, takes, value
from reshard.cli.job_text import describe, into, progress_text, report_of, report_text, took, undone
from reshard.cli.output import Output, count, lines, some, when
from reshard.cli.queue import Queue, missing, open_queue, process_text, waits
from reshard.pipeline.errors import JobUnderWay, NothingToRollBack, UsageError, WrongState
from reshard.pipeline.limits import HISTORY_MAX
from reshard.pipeline.places import Folder, Hub, parse_place
from reshard.pipeline.request import Options, Priority, Request
from reshard.worker.queue.states import ENDED, JobState

if TYPE_CHECKING:
    from reshard.worker.queue.jobs import Job as JobRecord

LISTED = 20  # jobs; a screenful
AWAITED = "control has noted in its catalog how it ended"
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
    from reshard.cli.watch import follow

    request = request.model_copy(update={"priority": priority})
    with open_queue() as queue:
        job, existed = (submitted := queue.jobs.submit(request)).id, submitted.existed
        state = "already has this request" if existed else "is queued"
        hint = "" if watch else f"\nfollow it with `reshard watch {job}`"
        text = f"job {job} {state}: {request.source} -> {request.target}{hint}"
        if folders := _folders(request):
            where = "on their own machines, within RESHARD_ALLOWED_FOLDERS"
            output.say(f"workers look for {folders} {where}; `reshard run` takes folders of this one")
        why = queue.warn(output, priority == "bulk")
        output.result({"id": job, "existed": existed, "waits": why}, text, job)
        if watch:
            follow(queue, job, output, verbose)


def _folders(request: Request) -> str:
    """The folders that a job reads or writes."""
    places = (request.source, request.options.config_from, request.target)
    return " and ".join(place.path for place in places if isinstance(place, Folder))


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
    with open_queue() as queue:
        if job is None:
            _show_service(queue, output)
        elif report:
            facts = report_of(queue.jobs.get(job))
            output.result(facts, report_text(facts), facts["result"])
        else:
            record = queue.jobs.get(job)
            why = None if record.state.ended else waits(queue, record)
            output.result(record.to_dict() | {"waits": why}, lines(describe(record, why)), record.state)


def _show_service(queue: Queue, output: Output) -> None:
    from reshard.worker.queue.jobs import without_password

    counts = {str(state): number for state, number in queue.jobs.counts().items() if number}
    processes, why = queue.jobs.processes(), queue.waits(bulk=True)
    drained, resting = queue.fleet.all_drained(), queue.fleet.resting()
    broker = without_password(queue.jobs.url)
    facts = {
        "broker": broker,
        "jobs": counts,
        "waiting": queue.jobs.waiting(),
        "waits": why,
        "processes": [
            asdict(process) | {"drained": process.name in drained, "resting": process.name in resting}
            for process in processes
        ],
    }
    rows = [("broker", broker), *([("waits", why)] if why else [])]
    rows += [(process.kind, process_text(process, drained, resting)) for process in processes]
    rows += [(kind, "none is running") for kind in missing(processes)]
    rows.append(("jobs", ", ".join(f"{number:,} {state}" for state, number in counts.items()) or "none"))
    output.result(facts, lines(rows))


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
    with open_queue() as queue:
        there = sum(number for one, number in queue.jobs.counts().items() if not state or one in state)
        records = queue.jobs.recent(state or [], limit=there if all_ else limit)
        why = queue.waits(bulk=False)
    if why:
        output.say(why)
    more = [f"{there - len(records):,} more; --all shows them"] if there > len(records) else []
    text = "\n".join([lines([LIST_HEAD, *map(_row, records)]), *more]) if records else "no jobs"
    output.listing([record.to_dict() for record in records], text, [record.id for record in records])


def _row(job: JobRecord) -> tuple[str, ...]:
    undone = f", undone by {job.rolled_back[:12]}" if job.rolled_back else ""
    code = f", {job.error['code']}" if job.error else ""
    places = f"{job.request.source} -> {into(job.request)}"
    return job.id, progress_text(job) + code + undone, when(job.created), took(job), places


@takes(output=read_output)
def watch(*, job: Job, verbose: Verbose = False, output: Output) -> None:
    """Follow a job to its end and exit with its exit code.

    Example: reshard watch pkgd
    """
    from reshard.cli.watch import follow

    with open_queue() as queue:
        follow(queue, queue.jobs.resolve(job), output, verbose)


@takes(output=read_output)
def cancel(job: Job, output: Output) -> None:
    """Stop a job before its commit.

    What it has copied is kept for a retry.

    Example: reshard cancel pkgd
    """
    with open_queue() as queue:
        id = queue.jobs.resolve(job)
        was = queue.jobs.cancel(id)
    text = "was cancelled already" if was == "cancelled" else f"is cancelled; it was {was}"
    output.result({"id": id, "was": was, "state": "cancelled"}, f"job {id} {text}", id)


@takes(output=read_output)
def retry(
    *,
    job: Job,
    anew: Annotated[bool, Option("--anew", help="Plan again from the current source and target.")] = False,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Plan again, and replace what others changed in the target since.")
    ] = False,
    onto_head: Annotated[bool, Option("--onto-head", hidden=True, help="The former name of --overwrite.")] = False,
    follow_it: Watch = False,
    output: Output,
) -> None:
    """Continue a failed or cancelled job with what it had copied.

    Example: reshard retry pkgd --watch
    """
    from reshard.cli.watch import follow

    with open_queue() as queue:
        id = queue.jobs.resolve(job)
        was = queue.jobs.retry(id, anew=anew, onto_head=overwrite or onto_head)
        why = queue.warn(output, queue.jobs.get(id).request.priority == "bulk")
        facts = {"id": id, "was": was, "state": "queued", "waits": why}
        output.result(facts, f"job {id} continues; it was {was}", id)
        if follow_it:
            follow(queue, id, output)


@takes(output=read_output)
def rollback(
    job: Annotated[
        str,
        argument("JOB|DST", "A job's id, or the start of one; or the target itself.", autocompletion=completion.jobs),
    ],
    output: Output,
) -> None:
    """Undo the commit of a job, or the last one to DST.

    Another commit undoes it, with your own token; refused if others changed one of the commit's files since.

    Example: reshard rollback you/gpt2-200MB
    """
    from reshard.pipeline.publishing.rollback import rollback as undo
    from reshard.pipeline.stores.connect import Context, open_target

    if "/" in job or job.startswith("."):
        _roll_back_target(parse_place(job), output)
        return
    with open_queue() as queue:
        record = queue.jobs.get(job)
        published = record.published
        # A found commit is the job's own if it had work to do: then its author did not live to record it.
        if published is None or (published["found"] and not record.confirmed):
            raise WrongState(job=record.id, state=record.state, why="it published nothing that could be undone")
        ref, request = published["ref"], record.request
        place = request.target.model_copy(update={"revision": ref, "credential": None}) if ref else request.target
        options = request.options.model_copy(update={"pr": False, "branch": None})
        commit = undo(open_target(place, options, Context.from_env()), published["commit"])
        queue.jobs.rolled_back(record.id, commit)
    text = undone(request.target, published["commit"], commit)
    output.result({"id": record.id, "undone": published["commit"], "commit": commit}, text, commit)


def _roll_back_target(place: Hub | Folder, output: Output) -> None:
    """Undo our last commit to ``place``, whoever asked for it, unless that is done."""
    from reshard.pipeline.publishing.history import read, undoes
    from reshard.pipeline.publishing.rollback import rollback as undo
    from reshard.pipeline.stores.connect import Context, open_target

    target = open_target(place, Options(), Context.from_env())
    head = target.state().head
    history = islice(target.history(head, None), HISTORY_MAX) if head else ()
    last = next((commit for commit in history if read(commit) or undoes(commit)), None)
    if last is None:
        refs = {"cure": "for a branch type DST@BRANCH, for a pull request DST@refs/pr/N"}
        named = refs if isinstance(place, Hub) and not place.revision else {}
        raise NothingToRollBack(commit=str(place), why="reshard has published nothing there", **named)
    gone = undoes(last) or last.id
    commit = last.id if undoes(last) else undo(target, gone)
    output.result({"id": None, "undone": gone, "commit": commit}, undone(place, gone, commit), commit)


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
    from reshard.worker.queue import ended

    if bool(jobs) == bool(state or older_than):
        raise UsageError(what="give the JOBs to delete, or choose them with --state, --older-than or both")
    if under_way := sorted({*(state or ())} - ENDED):
        raise UsageError(what=f"--state {under_way[0]}: such a job has not ended; `reshard cancel` it first")
    age = parse_age(older_than, "--older-than") if older_than else 0.0
    with open_queue() as queue:
        kept = queue.catalogs.awaited()
        for record in (records := [queue.jobs.get(job) for job in jobs or ()]):
            if not record.state.ended:
                raise JobUnderWay(job=record.id, state=record.state)
            if record.id in kept:
                raise WrongState(job=record.id, state=record.state, why=f"it is kept until {AWAITED}")
        found = [record.id for record in records] or ended.ended(queue.jobs.redis, state or ENDED, age)
        kept &= {*found}
        found = [id for id in dict.fromkeys(found) if id not in kept]
        found = found if dry_run else ended.delete(queue.jobs.redis, found)
    text = f"{'would delete' if dry_run else 'deleted'} {count(len(found), 'job')}"
    text += f": {some(found)}" if found else ""
    text += f"\nkept {count(len(kept), 'job')} until {AWAITED}: {some(sorted(kept))}" if kept else ""
    facts = {"deleted": 0 if dry_run else len(found), "dry_run": dry_run, "ids": found, "kept": sorted(kept)}
    output.result(facts, text, "\n".join(found))
