"""Where a checkpoint is read from or written to: a Hub, a folder, an object store. Callers ask a place, not its class.

A new store is a class here and its entry in ``AnyPlace``.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args
from urllib.parse import quote, unquote

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    WithJsonSchema,
    model_serializer,
)

from reshard.pipeline.errors import BadPlace, UsageError, shortened
from reshard.pipeline.limits import PATH_MAX, REPO_MAX, REVISION_MAX, URL_MAX
from reshard.pipeline.paths import absolute, resolved
from reshard.pipeline.urls import is_http, shown, split_url
from reshard.pipeline.validation import Matching, Strict

# The Hub's rule for names (huggingface_hub.utils.validate_repo_id): 96 characters of [\w.-], no `--`, no `..`,
# and neither `-` nor `.` at either end.
_NAME = re.compile(r"(?![\w.-]*(?:--|\.\.))[A-Za-z0-9_](?:[\w.-]{0,94}[A-Za-z0-9_])?")
_REPO = f"{_NAME.pattern}/{_NAME.pattern}"
_PORT = "(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}|6(?:[0-4][0-9]{3}|5(?:[0-4][0-9]{2}|5(?:[0-2][0-9]|3[0-5]))))"  # to 65535

# No token has this form: one that is typed where a name belongs must not get into a job, nor into an error.
CREDENTIAL = Matching(
    "(?!hf_)[a-z0-9][a-z0-9._-]{0,62}",
    "use the name of a credential (lowercase letters, digits, '.', '-' or '_'), never a token",
)
CredentialName = Annotated[str, CREDENTIAL]

# git check-ref-format: a branch, a tag, a commit or refs/pr/1. Beyond it, nothing that a terminal obeys.
_REVISION = (
    r"(?![-./])(?!@$)(?!.*(?:\.\.|@\{|//|/\.|\.lock(?:/|$)))"
    r"[^\x00-\x20\x7f-\x9f~^:?*\[\\\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
    rf"{{1,{REVISION_MAX}}}(?<![./])"
)
REVISION = Matching(
    f"(?:{_REVISION})",
    "not a valid branch, tag or commit: it cannot contain spaces, control characters, `..` or ~^:?*[,"
    f" or be longer than {REVISION_MAX} characters",
)
Revision = Annotated[str, REVISION, Field(json_schema_extra={"maxLength": REVISION_MAX})] | None


def _text(pattern: str, most: int) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^(?:{pattern})$", "maxLength": most}


_URL = "use a URL without spaces, user name or password"
Endpoint = Annotated[str, Field(max_length=URL_MAX), Matching("[!-?A-~]*", _URL)] | None


def _told_apart(schema: dict[str, Any]) -> None:
    """A place as an object says its kind, by which it is told from the others."""
    schema["required"] = sorted({*schema.get("required", ()), "kind"})


DEFAULT_BRANCH = "main"


class _Place(Strict):
    """What every place answers; a class says otherwise where its store differs.

    Its ``typed`` makes it of what a person typed; None for what names no such place. Raises ValueError or BadPlace.
    """

    model_config = ConfigDict(json_schema_extra=_told_apart)
    store: ClassVar[str]  # the module with its ``open_source`` and its ``open_target``, which may only raise
    noun: ClassVar[str]
    example: ClassVar[str]  # how it is typed, for people
    form: ClassVar[str]  # how it is typed, for schemas, where that means the same on every machine
    hub_noun: ClassVar[str] = ""  # what it is on a Hub, which is created where it is missing; empty elsewhere
    keeps: ClassVar[bool] = True  # whether what a publication replaces can be brought back
    kind: str

    @model_serializer(mode="wrap")
    def _told(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """With its kind, and without a credential that is not there: a release that knows of none can still read it."""
        told = {"kind": self.kind, **fields(self)}
        return {name: value for name, value in told.items() if (name, value) != ("credential", None)}

    @property
    def local(self) -> Path | None:
        """Where it lies on this machine; None for what lies elsewhere."""
        return None

    def holds(self, other: AnyPlace) -> bool:
        """Whether ``other`` is a folder inside it, or a file; not for the same place. Raises BadPlace."""
        return False

    @property
    def branch(self) -> str:
        """The branch or tag that it names; empty for what has no branches, and so no history of commits."""
        return ""

    def at(self, revision: str | None) -> Self:
        """The same at ``revision``, None for the default; itself where there are no revisions."""
        return self

    def on(self, default_endpoint: str) -> str | None:
        """The address of its Hub; None for what is on none."""
        return None

    def slot(self, default_endpoint: str, branch: str | None) -> str:
        """What one job at a time may write to."""
        return str(self)

    def page(self, default_endpoint: str, ref: str) -> str:
        """Where people find what was published on ``ref``."""
        return str(self)

    @property
    def spelled(self) -> str:
        """What ``parse_place`` reads as this place, but for its credential."""
        return str(self)


class Hub(_Place):
    """A model repository on the Hub at ``endpoint``, or at the job's ``HF_ENDPOINT`` if that is None.

    ``credential`` names an entry of RESHARD_CREDENTIALS; None uses the one for the namespace.
    """

    store = "reshard.pipeline.stores.hubs"
    noun = "a repository"
    hub_noun = "repository"
    example = "user/repo, user/repo@revision, a Hub URL"
    form = (
        rf"(?:hf://(?!buckets/))?{_REPO}(?:@{_REVISION})?"
        rf"|https?://[A-Za-z0-9.-]{{1,253}}(?::{_PORT})?/(?!(?:datasets|spaces)/){_REPO}"
    )
    kind: Literal["hub"] = "hub"
    repo: Annotated[str, Field(max_length=REPO_MAX), WithJsonSchema(_text(_REPO, REPO_MAX))]
    revision: Revision = None
    endpoint: Endpoint = None
    credential: CredentialName | None = None

    @classmethod
    def typed(cls, text: str) -> Self:
        """Whatever no other place knows is meant to be a repository."""
        repo, revision, endpoint = _from_url(text) if "://" in text else _from_name(text)
        if endpoint is not None and (
            len(endpoint) > URL_MAX or not re.fullmatch("[!-~]*", endpoint) or not is_http(endpoint)
        ):
            raise ValueError("not the address of a Hub")
        repo = check_repo(repo, shown(text))
        return cls(repo=repo, revision=revision and REVISION.checked(revision), endpoint=endpoint)

    @property
    def namespace(self) -> str:
        return self.repo.partition("/")[0]

    @property
    def branch(self) -> str:
        return self.revision or DEFAULT_BRANCH

    def at(self, revision: str | None) -> Self:
        return self.model_copy(update={"revision": revision})

    def on(self, default_endpoint: str) -> str:
        return (self.endpoint or default_endpoint).rstrip("/")

    def slot(self, default_endpoint: str, branch: str | None) -> str:
        return f"{self.on(default_endpoint)}/{self.repo.lower()}@{branch or self.branch}"

    def page(self, default_endpoint: str, ref: str) -> str:
        repo = f"{self.on(default_endpoint)}/{self.repo}"
        if is_pull_request(ref):
            return f"{repo}/discussions/{ref.removeprefix('refs/pr/')}"
        return repo if ref in {"", DEFAULT_BRANCH} else f"{repo}/tree/{quote(ref, safe='')}"

    @property
    def spelled(self) -> str:
        """With its Hub, where it names one."""
        if self.endpoint is None:
            return str(self)
        repo = f"{self.on('')}/{self.repo}"
        return f"{repo}/tree/{quote(self.revision, safe='')}" if self.revision else repo

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo


# Container names of Azure, bucket names of S3 and of Google, which allows the most.
_BUCKET = r"(?:s3|gs|az)://[a-z0-9](?:[a-z0-9._-]{1,220})[a-z0-9]"
_FOLDERS = r"(?:/(?!\.{1,2}(?:/|$))[^/?#\\\x00-\x1f]+)*"


def _folder_url(url: str, bucket: str, example: str) -> str:
    """``url`` without the slash at its end if it is a ``bucket`` and folders in it, else ValueError."""
    url = url.rstrip("/")
    if len(url) > URL_MAX:
        raise ValueError(f"its URL can have at most {URL_MAX} characters")
    if not re.fullmatch(bucket + _FOLDERS, url):
        named = re.match(rf"{bucket}(?=[/?#]|$)", url)
        raise ValueError("a folder has no empty parts, lone dots, ?, #, \\ or tabs" if named else f"use {example}")
    return url


def check_bucket(url: str) -> str:
    return _folder_url(url, _BUCKET, "lowercase s3://bucket, gs:// or az://; bucket has 3 or more of a-z, 0-9 and ._-")


class Bucket(_Place):
    """A folder in an object store; the process that uses it has the credentials in its environment."""

    store = "reshard.pipeline.stores.bucket_target"
    noun = "an object store"
    example = "s3://, gs://, az://"
    form = _BUCKET + _FOLDERS
    keeps = False
    kind: Literal["bucket"] = "bucket"
    url: Annotated[str, AfterValidator(check_bucket), WithJsonSchema(_text(form, URL_MAX))]

    @classmethod
    def typed(cls, text: str) -> Self | None:
        return cls(url=check_bucket(text)) if split_url(text).scheme in {"s3", "gs", "az"} else None

    def holds(self, other: AnyPlace) -> bool:
        return str(other).startswith(f"{self.url}/")

    def __str__(self) -> str:
        return self.url


class Folder(_Place):
    """A folder on the machine that runs the job, by its absolute path."""

    store = "reshard.pipeline.stores.folder.target"
    noun = "a folder"
    example = "a folder (./path, /path)"
    form = r"(?:/(?!\.{1,2}(?:/|$))[^/\x00-\x1f\x7f]{1,255})+"
    kind: Literal["folder"] = "folder"
    path: str = Field(min_length=1, max_length=PATH_MAX)

    @classmethod
    def typed(cls, text: str) -> Self | None:
        if not text.startswith(("./", "../", "/", "~/")) and text not in {".", ".."}:
            return None
        if re.search("[\ud800-\udfff]", text):
            raise BadPlace(value=repr(text), why="name is not UTF-8", cure="rename the folder")
        # `./~` is a folder of that name, which Path would make `~`.
        path = absolute(Path(text).expanduser() if text.startswith("~/") else Path(text))
        real = str(resolved(str(path)) if ".." in path.parts else path)
        if len(real) > PATH_MAX:
            raise ValueError(f"a folder path can have at most {PATH_MAX} characters")
        return cls(path=real)

    @property
    def local(self) -> Path:
        return Path(self.path)

    def holds(self, other: AnyPlace) -> bool:
        """With links followed."""
        return resolved(self.path) in (resolved(str(other)).parents if other.local else ())

    def __str__(self) -> str:
        return self.path


HUB_BUCKET = "hf://buckets/"
_IN_HUB = rf"{HUB_BUCKET}{_REPO}"


def check_hub_bucket(url: str) -> str:
    return _folder_url(url, _IN_HUB, "hf://buckets/user/bucket/folder")


class HubBucket(_Place):
    """A folder of a bucket on the Hub at the job's ``HF_ENDPOINT``; a bucket has no commits."""

    store = "reshard.pipeline.stores.hub_bucket"
    noun = "a bucket"
    hub_noun = "bucket"
    example = "hf://buckets/user/bucket"
    form = _IN_HUB + _FOLDERS
    keeps = False
    kind: Literal["hub_bucket"] = "hub_bucket"
    url: Annotated[str, AfterValidator(check_hub_bucket), WithJsonSchema(_text(form, URL_MAX))]

    @classmethod
    def typed(cls, text: str) -> Self | None:
        return cls(url=check_hub_bucket(text)) if text.startswith(HUB_BUCKET) else None

    @property
    def bucket(self) -> str:
        return "/".join(self.url.split("/")[3:5])

    @property
    def path(self) -> str:
        """Of its folder; empty for all of the bucket."""
        return "/".join(self.url.split("/")[5:])

    def holds(self, other: AnyPlace) -> bool:
        """A Hub knows a bucket by its name in any letters, and its folders only by their own."""
        if not isinstance(other, HubBucket) or self.bucket.lower() != other.bucket.lower():
            return False
        return self.path != other.path and f"{other.path}/".startswith(f"{self.path}/" if self.path else "")

    def page(self, default_endpoint: str, ref: str) -> str:
        return f"{default_endpoint}/buckets/{self.bucket}" + (f"/tree/{quote(self.path)}" if self.path else "")

    def __str__(self) -> str:
        return self.url


# The one list of stores. Each is asked whether a string is one of its own, the last first and a Hub at the end.
AnyPlace = Hub | Folder | Bucket | HubBucket
PLACES: tuple[type[AnyPlace], ...] = get_args(AnyPlace)
TYPED = f"{', '.join(place.example for place in PLACES[:-1])}, or {PLACES[-1].example}"
BadPlace.defaults = {"cure": f"use {TYPED}"}  # here, as only this list has all of them


def _typed(value: object) -> object:
    return parse_place(value) if isinstance(value, str | os.PathLike) else value


_Object = Annotated[AnyPlace, Field(discriminator="kind")]
# A place as it is typed, as far as it means the same everywhere: a service takes no folder relative to its own.
_Typed = Annotated[str, WithJsonSchema(_text("|".join(place.form for place in PLACES), URL_MAX))]
Place = Annotated[_Object, BeforeValidator(_typed, json_schema_input_type=_Object | _Typed)]
NOWHERE = Folder(path="/nonexistent/reshard")  # the target of a plan without one: nothing is there
MODELS_ONLY = "only models have weights to reshard; use a model repository, user/repo"


def require_branches(place: AnyPlace, typed: str = "") -> None:
    """Raises UsageError for a place, as it was ``typed``, that has none to commit to and no pull requests either."""
    if not place.branch:
        raise UsageError(what=f"{typed or place} is {place.noun}, which has no branches or pull requests")


def parse_place(value: str | os.PathLike[str] | AnyPlace) -> AnyPlace:
    """The place that ``value`` is or names: ``user/repo[@revision]``, a Hub URL, ``./folder`` or ``/folder``,
    ``s3://bucket/folder``, ``gs://`` or ``az://``. A path object is a folder, whatever it looks like.

    Raises BadPlace for anything else; looks at the disk only where ".." follows a name that may be a link.
    """
    if isinstance(value, AnyPlace):
        return value
    if not isinstance(value, str | os.PathLike):
        raise BadPlace(value=shortened(repr(value)), why="not a place", cure="give it as text, or a folder as a path")
    text = value.strip() if isinstance(value, str) else str(absolute(Path(value)))
    if not text:
        raise BadPlace(value=repr(value), why="empty; is a shell variable unset?")
    try:
        return next(place for kind in reversed(PLACES) if (place := kind.typed(text)) is not None)
    except ValueError as error:
        raise BadPlace(value=shown(text), why=str(error)) from None


def repository(place: AnyPlace, typed: str = "") -> Hub:
    """``place`` for catalogs, webhooks and namespaces, which are a Hub's alone; raises ValueError."""
    if not isinstance(place, Hub):
        raise ValueError(f"{shortened(typed or str(place))} is {place.noun}; use a repository, user/repo")
    return place


def _from_name(text: str) -> tuple[str, str | None, None]:
    repo, at, revision = text.partition("@")
    if repo.startswith(("datasets/", "spaces/")) and repo.count("/") > 1:
        raise BadPlace(value=text, why="not a model repository", cure=MODELS_ONLY)
    if at and not revision:
        raise ValueError("the revision after @ is missing")
    host, _, path = text.partition("/")
    if host.lower() in {"huggingface.co", "www.huggingface.co", "hf.co"} and path.count("/"):
        cure = f"use {Hub.typed('https://huggingface.co/' + path.replace('@', '/tree/', 1)).spelled}"
        raise BadPlace(value=text, why="a Hub URL starts with https://", cure=cure)
    if text.endswith("/") and re.fullmatch(_REPO, name := text.rstrip("/")):
        raise BadPlace(
            value=text, why="ends with a slash", cure=f"use {name} for a repository, or ./{name} for a folder"
        )
    return repo, revision or None, None


def _from_url(url: str) -> tuple[str, str | None, str | None]:
    parts = split_url(url)
    if parts.scheme not in {"http", "https", "hf"}:
        raise ValueError("only http, https, hf, s3, gs and az URLs are supported")
    if parts.scheme == "hf":
        return _from_name(url.removeprefix("hf://"))
    segments = [unquote(s) for s in parts.path.split("/") if s]
    if segments and segments[0] in {"datasets", "spaces"}:
        raise BadPlace(value=shown(url), why="not a model repository", cure=MODELS_ONLY)
    repo, revision, hub = "/".join(segments[:2]).removesuffix(".git"), None, f"{parts.scheme}://{parts.netloc}"
    if len(segments) >= 4 and segments[2] in {"tree", "blob", "resolve", "commit"}:
        length = 3 if segments[3:5] == ["refs", "pr"] else 1
        revision = "/".join(segments[3 : 3 + length])
        if len(segments) > 3 + length:
            whole, rest = f"{hub}/{check_repo(repo, shown(url))}/tree/", "/".join(segments[3:])
            cure = f"use {whole}{quote(revision, safe='')} for the whole repository"
            if segments[2] == "tree":
                cure += f", or {whole}{quote(rest, safe='')} for a branch of this name"
            why = "a folder or file in a repository, which cannot be used alone"
            raise BadPlace(value=shown(url), why=why, cure=cure)
    elif len(segments) > 2:
        raise ValueError("no repository or revision in this URL")
    return repo, revision, hub


def is_pull_request(ref: str) -> bool:
    return ref.startswith("refs/pr/")


def check_repo(repo: str, value: str = "") -> str:
    """``repo`` if it is ``user/repo`` by the Hub's rule for names, else BadPlace, of ``value`` as it was typed."""
    value = value or repo
    owner, slash, name = repo.partition("/")
    if not slash:
        here = shlex.quote(f"./{shortened(repo)}")
        cure = f"add the owner (gpt2 is now openai-community/gpt2), or use {here} for a folder"
        raise BadPlace(value=value, why="the owner is missing (user/repo)", cure=cure)
    for part in (owner, name):
        if not _NAME.fullmatch(part):
            raise BadPlace(value=value, why=f"{shortened(part)!r} is not a valid name on the Hub")
    return repo
