"""What was asked for, where it is, and who may: usage, source, access."""

from __future__ import annotations

from reshard.pipeline.errors.base import ReshardError

# A table: an error is three lines, so there are no blank lines within a family.
# fmt: off


class UsageError(ReshardError, code="usage", exit_code=2):
    message = "{what}"
    hint = "see `{command} --help`"
class BadSetting(UsageError, code="usage.setting", blames_worker=True):
    message = "{name}={value}: {why}"
    hint = "change it where this process is started; docs/reference lists every setting"
class BadSize(UsageError, code="usage.size", option="--size"):
    message = "{option} {value}: {why}"
    hint = "give bytes with a unit: 200MB is 200,000,000 bytes, 200MiB is 209,715,200 bytes"
class SizeTooSmall(UsageError, code="usage.size_too_small"):
    message = "--size {size} bytes is smaller than the header that {tensor} needs ({header} bytes)"
    hint = "the smallest size that works here is {smallest} bytes"
class BadPlace(UsageError, code="usage.place"):  # what a place is says `places.py`, which lists them
    message = "{value}: {why}"
    hint = "{cure}"
class NoTarget(UsageError, code="usage.no_target"):
    message = "--to is missing: where the result goes"
    hint = "add --to user/repo or --to ./folder; `reshard plan` needs none"
class FoldersNested(UsageError, code="usage.nested_folders", where="inside"):
    message = "{inner} is {where} {outer}, so that {what}"
    hint = "choose a target folder that neither holds a source nor lies inside one"
class Oversize(UsageError, code="usage.oversize"):
    message = "{tensor} is {bytes} bytes, more than --size {size}, and --oversize is fail"
    hint = "raise --size above {bytes} bytes, or leave out --oversize to give it a file of its own"
class CastOverflow(UsageError, code="usage.overflow"):
    message = "{tensor} holds values that {dtype} cannot ({count} in one window), and --strict-dtype is set"
    hint = "use --dtype bfloat16, which has the range of float32, or leave out --strict-dtype"
class NotDequantised(
    UsageError, code="usage.dequantize", cure="leave it out, and quantised weights are taken over as they are"
):
    message = "--dequantize: {why}"
    hint = "{cure}"
class DeviceMapIncomplete(UsageError, code="usage.device_map"):
    message = "the device map gives no device for {parameter}{more}"
    hint = 'name it, a module that holds it, or "" for all the rest'
class WeightsExcluded(UsageError, code="usage.exclude"):
    message = "--exclude {globs} leaves out weights: {why}"
    hint = "narrow the pattern; to leave out a whole checkpoint, exclude its index as well"
class BadRename(UsageError, code="usage.rename"):
    message = "--rename {rules}: {why}"
    hint = "a YAML list with a rule a line, as `- '^encoder[.]': model.`; docs/guides/cutting.md has more"
class RenameCollision(UsageError, code="usage.rename_collision"):
    message = "--rename makes {tensor} of two names of {checkpoint}: {first} and {second}"
    hint = "narrow the rules, so that every tensor keeps a name of its own"
class RenameUnused(UsageError, code="usage.rename_unused"):
    message = "--rename {rule} changes no name"
    hint = "correct it or take it out; each rule sees what those before it, and --strip-prefix, left of a name"
class BadExperts(UsageError, code="usage.experts"):
    message = "--experts cannot rearrange the experts of {layer}: {why}"
    hint = "leave out --experts; it stacks and cuts plain weights, and converts nothing"
class TooLargeForHub(UsageError, code="usage.too_large_for_hub"):
    message = "{tensor} alone makes a file of {bytes} bytes, and the Hub takes at most {most}"
    hint = "reshard into a folder instead, or make the tensor smaller with --dtype"
class CarriedTooLarge(UsageError, code="usage.carried_too_large"):
    message = "{file} is carried whole, has {bytes} bytes, and the Hub takes files of at most {most}"
    hint = "leave it out with --exclude, or reshard into a folder instead"
class MadeTooLarge(UsageError, code="usage.made_too_large"):
    message = "{file} would have up to {bytes} bytes, and readers take at most {most}"
    hint = "leave the manifest out with --no-manifest, and shorten the tensors' names with --rename"
class BadSchedule(UsageError, code="usage.schedule"):
    message = "{what}"
    hint = "five fields (minute hour day month weekday) or @daily: `--cron '0 3 * * *' --tz Europe/Berlin`"
class BadCatalog(UsageError, code="usage.catalog"):
    message = "{file}, line {line}: {key}: {why}"
    hint = "{fix}"
class BadLimit(UsageError, code="usage.limit"):
    message = "{what}"
    hint = "as in `reshard fleet limit --bandwidth 200MB/s --night-bytes 2TB --window 22:00-06:00 --tz Europe/Berlin`"
class EntriesWrong(UsageError, code="usage.entries", others="; the others can still be done"):
    message = "{file}: {count} cannot be done"
    hint = "fix the entries listed as wrong{others}"
class NoSuchFailures(UsageError, code="usage.only"):
    message = "--only {only}: no model of {name} failed with it; there is {there}"
    hint = "see `reshard catalog failures {name}`"
class BodyTooLarge(UsageError, code="usage.too_large"):
    message = "the body of the request has more than {most} bytes"
    hint = "send a smaller one; models are named, not sent"
class RequestTooLarge(UsageError, code="usage.request_too_large"):
    message = "the request has {size} bytes, and a job keeps at most {most}"
    hint = "give fewer or shorter globs and rules; the rules for a family of models are some twenty"
class NoSuchPage(UsageError, code="usage.no_page"):
    message = "there is no {method} {path}"
    hint = "see /api/v1/openapi.json for what there is"
class BadBody(UsageError, code="usage.body"):
    message = "{where}: {why}"
    hint = "see /api/v1/openapi.json for what this takes"
class KeyReused(UsageError, code="usage.key_reused"):
    message = "{key} is the key of job {job}, which another request was submitted for"
    hint = "give each request a key of its own; the same request by the same key is the same job"
class TargetsCollide(UsageError, code="usage.collision"):
    message = "{target} is where {source} and {others} would both go"
    hint = "give each a target of its own: a template with {{owner}} and {{name}} in it does"


class SourceError(ReshardError, code="source", exit_code=3):
    message = "{what}"
    hint = "check the source with `reshard plan {source}`"
class SourceNotFound(SourceError, code="source.not_found"):
    message = "{repo}: no such model on {endpoint}, or it is private and this token may not see it"
    hint = "check the spelling; if it is private, {sign_in} with an account that may read it, then {again}"
class RevisionNotFound(SourceError, code="source.no_revision"):
    message = "{repo} has no branch, tag or commit {revision}"
    hint = "leave out the revision (--revision, or what follows the @) to take the default branch"
class FolderNotFound(SourceError, code="source.no_folder"):
    message = "cannot read folder {path}: {why}"
    hint = "check the spelling; a place that starts with ./ or / is a folder, user/repo is a repository"
class PartOfCheckpoint(SourceError, code="source.part"):
    message = "{path} is one of the files of a checkpoint, by {why}"
    hint = "give the folder: {folder}"
class BucketNotFound(SourceError, code="source.no_bucket", setting="AWS_ENDPOINT_URL"):
    message = "{place}: no such bucket, or nothing in this folder of it ({why})"
    hint = "check the spelling, and {setting}{where}; then {again}"
class LinkLoop(FolderNotFound, code="source.link_loop"):
    hint = "remove the symbolic link that leads back to itself, then {again}"
class PathTooLong(FolderNotFound, code="source.path_too_long"):
    hint = "move the model up, or give the folder by a shorter path, then {again}"
class SourceGated(SourceError, code="source.gated"):
    message = "{repo} is gated, and this token's owner has not been given access"
    hint = "sign in to {endpoint}/{repo} with the token's account and ask for access, then {again}"
class NoWeights(SourceError, code="source.no_weights", cure="check that it is the place of a model"):
    message = "{place} has no weights that reshard reads{found}"
    hint = "it reads .safetensors, .gguf and torch.save files, and checkpoints of FSDP, verl and DeepSpeed; {cure}"
class SourceChanged(SourceError, code="source.changed"):
    message = "{place} changed since it was planned: {what}"
    hint = "{anew}: it plans from the current state"


class AccessError(ReshardError, code="access", exit_code=4):
    message = "{what}"
    hint = "check which token is used where the work is done, and what it may do"
class TokenMissing(AccessError, code="access.no_token", blames_worker=True):
    message = "no token for {endpoint}, and {need} needs one"
    hint = "make one on {endpoint}/settings/tokens, {sign_in}, then {again}"
class TokenRefused(AccessError, code="access.bad_token", blames_worker=True):
    message = "{endpoint} does not accept the token"
    hint = "make a new one on {endpoint}/settings/tokens, {sign_in}, then {again}"
class NoWriteAccess(
    AccessError,
    code="access.no_write",
    whose="this token",
    cure="use a token of an account that may write there, or open a pull request with --pr if the repository exists",
):
    message = "{whose} may not write to {repo} on {endpoint}"
    hint = "{cure}"
class TargetHidden(NoWriteAccess, code="access.hidden_target"):
    message = "{repo} is on {endpoint} already, and this token may not see it"
    hint = "use a token that may read and write it{where}, or choose another target; then {again}"
class TargetNotAllowed(AccessError, code="access.target_not_allowed"):
    message = "{repo} is outside the namespaces that this worker may write to ({allowed})"
    hint = "ask its operator to add {namespace} to RESHARD_ALLOWED_TARGETS, then {again}"
class SourceNotAllowed(AccessError, code="access.source_not_allowed"):
    message = "{repo} is outside the sources that this worker may read ({allowed})"
    hint = "ask its operator to add it to RESHARD_ALLOWED_SOURCES, then {again}"
class EndpointNotAllowed(AccessError, code="access.endpoint_not_allowed"):
    message = "{endpoint} is not among the Hubs that this worker may call ({allowed})"
    hint = "ask its operator to add it to RESHARD_ALLOWED_ENDPOINTS, then {again}"
class PublicNotAllowed(AccessError, code="access.public_not_allowed"):
    message = "{source} is {visibility}, and this worker makes nothing public that its source is not"
    hint = "leave out --public, or ask its operator to set RESHARD_ALLOW_PUBLIC=1, then {again}"
class FolderNotAllowed(AccessError, code="access.folder_not_allowed"):
    message = "{path} is outside the folders that workers may use ({allowed})"
    hint = "use `reshard run`, which takes folders freely, or ask the operator to set RESHARD_ALLOWED_FOLDERS"
class FolderNotWritable(
    AccessError, code="access.folder", cure="choose another folder, or run as a user who may write there"
):
    message = "{path} cannot be written: {why}"
    hint = "{cure}"
class BadCredentials(AccessError, code="access.credentials", blames_worker=True):
    message = "{file}: {why}"
    hint = "each [[credential]] has an endpoint, and either `env` (a variable's name) or `file` (a path)"
class CredentialUnknown(AccessError, code="access.credential_unknown", blames_worker=True):
    message = "RESHARD_CREDENTIALS has no credential {name} where the work is done; it has {known}"
    hint = 'name one of those, or have its operator add a [[credential]] with `name = "{name}"`'
class CredentialScope(AccessError, code="access.credential_scope"):
    message = "credential {name} is not there to {use} {namespace} on {endpoint}; it serves {serves}"
    hint = "name one that is, or none: then the one that serves the namespace is taken"
class BucketRefused(AccessError, code="access.bucket", blames_worker=True, settings="AWS_*"):
    message = "{place} may not be read: {why}"
    hint = "set credentials that may list and read it{where} ({settings} variables), then {again}"
class SignInNeeded(AccessError, code="access.sign_in"):
    message = "who asks is not known here"
    hint = "make a token by `reshard token NAME`; send it as `Authorization: Bearer TOKEN`, or sign in with it"
class ScopeMissing(AccessError, code="access.scope"):
    message = "{name} may read here, and {what} takes the scope `act`"
    hint = "ask the operator for a token with it: `reshard token {name} --act`"
class ApiTokenRefused(AccessError, code="access.api_token"):
    message = "{url} {why}"
    hint = "set RESHARD_API_TOKEN to one that its operator makes by `reshard token NAME --act`"
class CrossSite(AccessError, code="access.cross_site"):
    message = "this was sent from another page than the service's own"
    hint = "open the page of the service itself, and send it from there"
class HookRefused(AccessError, code="access.hook"):
    message = "a webhook without the secret that is shared with it"
    hint = "give the Hub's webhook the secret in RESHARD_WEB_HOOK_SECRET"
