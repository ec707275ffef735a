"""What was asked for, where it is, and who may: usage, source, access."""

from __future__ import annotations

from reshard.pipeline.errors.base import ReshardError

# A table: an error is three lines, so there are no blank lines within a family.
# fmt: off


class UsageError(ReshardError, code="usage", exit_code=2):
    message = "{what}"
    hint = "see `{command} {help}`"
class BadSetting(UsageError, code="usage.setting", blames_worker=True):
    message = "{name}={value}: {why}"
    hint = "fix this environment variable and try again; docs/reference/settings.md lists all settings"
class BadSize(UsageError, code="usage.size", option="--size"):
    message = "{option} {value}: {why}"
    hint = "use a number with a unit: 200MB is 200,000,000 bytes, 200MiB is 209,715,200 bytes"
class SizeTooSmall(UsageError, code="usage.size_too_small"):
    message = "--size {size} bytes is too small: the header for {tensor} needs {header} bytes"
    hint = "use a size of at least {smallest} bytes"

    @property
    def enough(self) -> int:
        """The size in bytes that is not refused so."""
        return int(self.facts["smallest"])
class BadPlace(UsageError, code="usage.place"):  # what a place is says `places.py`, which lists them
    message = "{value}: {why}"
    hint = "{cure}"
class NoTarget(UsageError, code="usage.no_target"):
    message = "--to is required"
    hint = "add --to user/repo or --to ./folder; `reshard plan` works without a target"
class FoldersNested(UsageError, code="usage.nested_folders", where="inside"):
    message = "{inner} is {where} {outer}, so {what}"
    hint = "choose a target folder that is not inside a source and does not contain one"
class Oversize(UsageError, code="usage.oversize"):
    message = "{tensor} is {bytes} bytes, over --size {size}, and --oversize fail is set"
    hint = "raise --size to at least {bytes} bytes, or remove --oversize to put the tensor in its own file"

    @property
    def enough(self) -> int:
        """The size in bytes that is not refused so."""
        return int(self.facts["bytes"])
class CastOverflow(UsageError, code="usage.overflow"):
    message = "{tensor} has values that overflow {dtype} (at least {count}), and --strict-dtype is set"
    hint = "use --dtype bfloat16 (the range of float32), or remove --strict-dtype"
class NotDequantized(
    UsageError, code="usage.dequantize", cure="remove --dequantize to copy quantized weights unchanged"
):
    message = "--dequantize: {why}"
    hint = "{cure}"
class DeviceMapIncomplete(UsageError, code="usage.device_map"):
    message = "the device map has no device for {parameter}{more}"
    hint = 'add an entry for it, for a module that contains it, or for "" (everything else)'
class WeightsExcluded(UsageError, code="usage.exclude"):
    message = "--exclude {globs} matches weights: {why}"
    hint = "narrow the pattern; to skip a whole checkpoint, exclude its index too"
class BadRename(UsageError, code="usage.rename"):
    message = "--rename {rules}: {why}"
    hint = "write a YAML list with one rule per line, such as `- '^encoder[.]': model.`; see docs/guides/cutting.md"
class RenameCollision(UsageError, code="usage.rename_collision"):
    message = "--rename maps two tensors in {checkpoint} to the same name, {tensor}: {first} and {second}"
    hint = "narrow the rules so that every name stays unique"
class RenameUnused(UsageError, code="usage.rename_unused"):
    message = "--rename {rule} does not change any name"
    hint = "fix or remove the rule; it applies to names after --strip-prefix and earlier rules"
class PrefixUnused(UsageError, code="usage.prefix_unused"):
    message = "--strip-prefix {prefix} does not change any name"
    hint = "check the prefix and its dot, or use --strip-prefix auto, which removes the prefixes of known wrappers"
class BadExperts(
    UsageError,
    code="usage.experts",
    cure="remove --experts; it can only stack or split unquantized weights, not convert quantized ones",
):
    message = "--experts cannot rearrange the experts in {layer}: {why}"
    hint = "{cure}"
class BadRanks(
    UsageError,
    code="usage.ranks",
    cure="use epN for expert parallelism or ppN for pipeline parallelism, for example ep8; see docs/layouts.md",
):
    message = "cannot use ranks {value}: {why}"
    hint = "{cure}"
class TooLargeForHub(UsageError, code="usage.too_large_for_hub"):
    message = "{tensor} is too large for the Hub: it needs a file of {bytes} bytes (maximum: {most})"
    hint = "use a folder as the target, or make the tensor smaller with --dtype"
class CarriedTooLarge(UsageError, code="usage.carried_too_large"):
    message = "{file} is too large to copy to the Hub: {bytes} bytes (maximum: {most})"
    hint = "skip it with --exclude, or use a folder as the target"
class MadeTooLarge(UsageError, code="usage.made_too_large"):
    message = "{file} could be as large as {bytes} bytes, but readers accept at most {most}"
    hint = "skip the manifest with --no-manifest, and shorten tensor names with --rename"
class BadSchedule(
    UsageError,
    code="usage.schedule",
    cure="use five fields (minute hour day month weekday) or @daily: `--cron '0 3 * * *' --tz Europe/Berlin`",
):
    hint = "{cure}"
class BadCatalog(UsageError, code="usage.catalog"):
    message = "{file}, line {line}: {key}: {why}"
    hint = "{fix}"
class BadLimit(UsageError, code="usage.limit"):
    hint = "try `reshard fleet limit --bandwidth 200MB/s --night-bytes 2TB --window 22:00-06:00 --tz Europe/Berlin`"
class EntriesWrong(UsageError, code="usage.entries", others="; the other models can still be resharded"):
    message = "{file}: {count} cannot be resharded"
    hint = "fix the entries marked invalid{others}"
class NoSuchFailures(UsageError, code="usage.only"):
    message = "--only {only}: no model in {name} failed with this code (codes found: {there})"
    hint = "see `reshard catalog failures {name}`"
class HostNotAllowed(UsageError, code="usage.host"):
    message = "host not allowed: {host}"
    hint = "use an address that this server knows, or ask its operator to add the host to RESHARD_WEB_HOSTS"
class BodyTooLarge(
    UsageError,
    code="usage.too_large",
    cure="send a smaller body; a request contains the names of models, not their files",
):
    message = "the request body exceeds {most} bytes"
    hint = "{cure}"
class RequestTooLarge(UsageError, code="usage.request_too_large"):
    message = "the request is too large: {size} bytes (maximum: {most})"
    hint = "use fewer or shorter globs and rename rules; about twenty rules are enough for most models"
class NoSuchPage(UsageError, code="usage.no_page"):
    message = "not found: {method} {path}"
    hint = "see /api/v1/openapi.json for every path"
class BadBody(UsageError, code="usage.body"):
    message = "{where}: {why}"
    hint = "see /api/v1/openapi.json for the format of this request"
class KeyReused(UsageError, code="usage.key_reused"):
    message = "key {key} was already used for job {job} with a different request"
    hint = "use a different key for each request; the same request with the same key returns the same job"
class TargetsCollide(UsageError, code="usage.collision"):
    message = "{source} and {others} have the same target: {target}"
    hint = "give each model its own target, for example with {{owner}} and {{name}} in a template"


class SourceError(ReshardError, code="source", exit_code=3):
    message = "{what}"
    hint = "check the source with `reshard plan {source}`"
class SourceNotFound(SourceError, code="source.not_found", kind="repository"):
    message = "{kind} not found on {endpoint}: {repo}"
    hint = "check the spelling; if it is private, use an account that can read it: {sign_in}, then {again}"
class RevisionNotFound(SourceError, code="source.no_revision"):
    message = "{repo} has no branch, tag or commit {revision}"
    hint = "remove the revision (--revision, or the part after @) to use the default branch"
class FolderNotFound(
    SourceError,
    code="source.no_folder",
    cure="check the spelling; ./name and /name are folders, user/repo is a repository",
):
    message = "cannot read folder {path}: {why}"
    hint = "{cure}"
class Unreadable(SourceError, code="source.unreadable"):
    message = "cannot read {path}: {why}"
    hint = "check its permissions and the disk"
class PartOfCheckpoint(SourceError, code="source.part"):
    message = "{path} is one shard of a checkpoint, according to {why}"
    hint = "pass the folder instead: {folder}"
class CacheFolder(SourceError, code="source.cache_folder"):
    message = "{path} is a repository in the huggingface_hub cache, which can hold several versions of a model"
    hint = "pass the folder of one version instead: {snapshot}"
class WholeCache(CacheFolder, code="source.cache_folder.whole"):
    message = "{path} is a huggingface_hub cache, which can hold many models"
    hint = "pass the folder of one version of a model instead, such as {snapshot}"
class BucketNotFound(SourceError, code="source.no_bucket", setting="AWS_ENDPOINT_URL"):
    message = "{place}: bucket not found, or the folder is empty ({why})"
    hint = "check the spelling and {setting}{where}, then {again}"
class BrokenLink(FolderNotFound, code="source.link_broken"):
    message = "cannot read {path}: it is a symbolic link to {to}, which does not exist"
    hint = "remove the symbolic link or restore the file, then {again}"
class LinkLoop(FolderNotFound, code="source.link_loop"):
    hint = "remove the symbolic link that points back to itself, then {again}"
class PathTooLong(FolderNotFound, code="source.path_too_long"):
    hint = "move the model to a shorter path, then {again}"
class SourceGated(SourceError, code="source.gated"):
    message = "{repo} is gated, and the token does not have access"
    hint = "request access at {endpoint}/{repo} from the account that owns the token, then {again}"
class NoWeights(SourceError, code="source.no_weights", cure="check that this is a model"):
    message = "{place} has no weights that reshard can read{found}"
    hint = "reshard reads .safetensors, .gguf and torch.save files, and FSDP, verl and DeepSpeed checkpoints; {cure}"
class NoProvenance(SourceError, code="source.no_provenance"):
    message = "{place} has neither signed provenance nor a manifest"
    hint = "publish it with `reshard run`, without --no-manifest"
class SourceLocked(SourceError, code="source.locked", retryable=True):
    message = "{place}: another run is publishing to it"
    hint = "wait until it ends, then {again}"
class SourceUnfinished(SourceError, code="source.unfinished", retryable=True):
    message = "{place}: a publication to it was interrupted, so its files can be from two versions"
    hint = "publish to it again, which finishes that publication first; then {anew}"
class SourceChanged(SourceError, code="source.changed"):
    message = "{place} has changed since the plan was made: {what}"
    hint = "{anew} to plan from its current state"


class AccessError(ReshardError, code="access", exit_code=4):
    message = "{what}"
    hint = "check which token is used and what permissions it has"
class TokenMissing(AccessError, code="access.no_token", blames_worker=True):
    message = "no token for {endpoint}: {need} requires one"
    hint = "create one at {endpoint}/settings/tokens, {sign_in}, then {again}"
class TokenRefused(AccessError, code="access.bad_token", blames_worker=True):
    message = "{endpoint} rejected the token"
    hint = "create a new one at {endpoint}/settings/tokens, {sign_in}, then {again}"
class NoWriteAccess(
    AccessError,
    code="access.no_write",
    whose="the token",
    cure="use a token with write access, or open a pull request with --pr if the repository exists",
):
    message = "{whose} does not have write access to {repo} on {endpoint}"
    hint = "{cure}"
class TargetHidden(NoWriteAccess, code="access.hidden_target"):
    message = "{repo} already exists on {endpoint}, and the token does not have access to it"
    hint = "use a token with read and write access{where}, or choose another target; then {again}"
class TargetNotAllowed(AccessError, code="access.target_not_allowed", unset=""):
    message = "jobs are not allowed to write to {repo} (allowed namespaces: {allowed})"
    hint = "ask the operator to add {namespace} to RESHARD_ALLOWED_TARGETS{unset}{where}, then {again}"
class SourceNotAllowed(AccessError, code="access.source_not_allowed"):
    message = "jobs are not allowed to read {repo} (allowed sources: {allowed})"
    hint = "ask the operator to add it to RESHARD_ALLOWED_SOURCES, then {again}"
class EndpointNotAllowed(AccessError, code="access.endpoint_not_allowed"):
    message = "jobs are not allowed to call {endpoint} (allowed Hubs: {allowed})"
    hint = "ask the operator to add it to RESHARD_ALLOWED_ENDPOINTS, then {again}"
class PublicNotAllowed(AccessError, code="access.public_not_allowed"):
    message = "{source} is {visibility}, and jobs are not allowed to make it public"
    hint = "remove --public, or ask the operator to set RESHARD_ALLOW_PUBLIC=1, then {again}"
class FolderNotAllowed(AccessError, code="access.folder_not_allowed"):
    message = "{path} is outside the folders that jobs are allowed to use here ({allowed})"
    hint = "use `reshard run`, which accepts any folder, or ask the operator to set RESHARD_ALLOWED_FOLDERS"
class FolderNotWritable(
    AccessError, code="access.folder", cure="choose another folder, or run as a user with write permission"
):
    message = "cannot write to {path}: {why}"
    hint = "{cure}"
class BadCredentials(
    AccessError,
    code="access.credentials",
    blames_worker=True,
    cure="each [[credential]] needs an endpoint, and either `env` (the name of a variable) or `file` (a path)",
):
    message = "{file}: {why}"
    hint = "{cure}"
class CredentialUnknown(AccessError, code="access.credential_unknown", blames_worker=True):
    message = "RESHARD_CREDENTIALS has no credential {name} (available: {known})"
    hint = 'use an available credential, or {let_in} a [[credential]] with `name = "{name}"`, then {again}'
class CredentialScope(AccessError, code="access.credential_scope"):
    message = "credential {name} does not cover {use} access to {namespace} on {endpoint}; it covers {serves}"
    hint = "use a matching credential, or set none: reshard then selects one by namespace"
class BadSignKey(
    AccessError,
    code="access.sign_key",
    blames_worker=True,
    cure="docs/guides/signing.md explains how to create a key and where workers look for keys (RESHARD_SIGN_KEYS)",
):
    message = "cannot use the key {key}: {why}"
    hint = "{cure}"
class NoSignKeys(BadSignKey, code="access.sign_key.no_folder"):
    message = "cannot use the key {key}: RESHARD_SIGN_KEYS, the folder of keys, is not set"
    hint = "set RESHARD_SIGN_KEYS to the folder with the key{where}, then {again}"
class CertificateExpired(BadSignKey, code="access.sign_key.expired"):
    message = "cannot use the key {key}: its certificate has expired or is not yet valid (valid until {until})"
    hint = "put a new certificate for the same key in the key file{where}, then {again}"
class SignKeyNotAllowed(AccessError, code="access.sign_key_not_allowed"):
    message = "workers accept keys only by name, but {key} is a path"
    hint = "use the name of a file in RESHARD_SIGN_KEYS on the worker, or sign with `reshard run`"
class BucketRefused(AccessError, code="access.bucket", blames_worker=True, settings="AWS_*"):
    message = "no permission to read {place}: {why}"
    hint = "set credentials ({settings} variables) with list and read permission{where}, then {again}"
class BucketReadOnly(BucketRefused, code="access.bucket_write"):
    message = "no permission to write to {place}: {why}"
    hint = "set credentials ({settings} variables) with list, read, write and delete permission{where}, then {again}"
class BucketSetting(BucketRefused, code="access.bucket.setting"):
    message = "cannot use {place}: {settings} {why}"
    hint = "correct {settings}{where}, then {again}"
class SignInNeeded(AccessError, code="access.sign_in"):
    message = "missing or invalid token"
    hint = "create a token with `reshard token NAME`; send it as `Authorization: Bearer TOKEN`, or sign in with it"
class ScopeMissing(AccessError, code="access.scope"):
    message = "{name} has read-only access, and {what} requires the scope `act`"
    hint = "ask the operator for a token with that scope: `reshard token {name} --act`"
class NoActor(ScopeMissing, code="access.scope.proxy"):
    hint = "ask the operator to add {name} to RESHARD_WEB_ACTORS"
class UserNameRefused(AccessError, code="access.user_name"):
    message = "the proxy sent a user name that cannot be used here: {name}"
    hint = "ask the operator to set RESHARD_WEB_USER_HEADER to a header with the user's name or email address: {rule}"
class ApiTokenRefused(AccessError, code="access.api_token"):
    message = "{url} {why}"
    hint = "ask its operator for a token (`reshard token NAME --act` creates one), and set RESHARD_API_TOKEN to it"
class CrossSite(AccessError, code="access.cross_site"):
    message = "the request came from another site"
    hint = "open this service's web page and send the request from there"
class HookRefused(AccessError, code="access.hook"):
    message = "missing or invalid webhook secret"
    hint = "in the webhook's settings on the Hub, set the secret to the value of RESHARD_WEB_HOOK_SECRET"
