"""Where a checkpoint is read from or written to, as a person types it: a Hub, a folder, an object store."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import unquote, urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    WithJsonSchema,
    model_serializer,
)

from reshard.pipeline.errors import BadPlace, shortened
from reshard.pipeline.limits import PATH_MAX, REPO_MAX, REVISION_MAX, URL_MAX

# The Hub's rule for names (huggingface_hub.utils.validate_repo_id): 96 characters of [\w.-], no `--`, no `..`,
# and neither `-` nor `.` at either end.
_NAME = re.compile(r"(?![\w.-]*(?:--|\.\.))[A-Za-z0-9_](?:[\w.-]{0,94}[A-Za-z0-9_])?")


# No token has this form: one that is typed where a name belongs must not get into a job.
_CREDENTIAL = re.compile(r"(?!hf_)[a-z0-9][a-z0-9._-]{0,62}")


def check_credential(value: str) -> str:
    """``value`` if it is the name of a credential, else ValueError, which does not repeat it: it may be a token."""
    if not _CREDENTIAL.fullmatch(value):
        raise ValueError("a credential is given by its name: small letters, digits, dots, - and _, and never a token")
    return value


CredentialName = Annotated[
    str, AfterValidator(check_credential), WithJsonSchema({"type": "string", "pattern": f"^{_CREDENTIAL.pattern}$"})
]

# git check-ref-format: a branch, a tag, a commit or refs/pr/1. Beyond it, nothing that a terminal obeys.
_REVISION = re.compile(
    r"(?![-./])(?!@$)(?!.*(?:\.\.|@\{|//|/\.|\.lock(?:/|$)))"
    r"[^\x00-\x20\x7f-\x9f~^:?*\[\\\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
    rf"{{1,{REVISION_MAX}}}(?<![./])"
)


def check_revision(value: str | None) -> str | None:
    """``value`` if git takes it as the name of a branch or tag, else ValueError."""
    if value is not None and not _REVISION.fullmatch(value):
        raise ValueError(
            "git knows no such branch, tag or commit: no spaces, control characters, `..` or ~^:?*[ and"
            f" at most {REVISION_MAX} characters"
        )
    return value


def _text(pattern: str, most: int) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^(?:{pattern})$", "maxLength": most}


Revision = Annotated[
    str | None,
    AfterValidator(check_revision),
    WithJsonSchema({"anyOf": [_text(_REVISION.pattern, REVISION_MAX), {"type": "null"}]}),
]
Endpoint = Annotated[str | None, Field(max_length=URL_MAX, pattern="^[!-~]*$")]


class Strict(BaseModel):
    """What people and jobs write: nothing that is not known, and no error about it repeats what may be a token."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    @classmethod
    def known(cls, text: str | bytes) -> tuple[Self, tuple[str, ...]]:
        """What this release knows of ``text``, to be shown, and the names of the rest, which a newer one wrote.

        A place of a kind that is not known is shown as a folder of that name. Nothing may be carried out from it.
        """
        data, unknown = json.loads(text), list[str]()
        while True:
            try:
                return cls.model_validate(data), tuple(unknown)
            except ValidationError as error:
                found = [_taken_out(data, problem["loc"]) for problem in error.errors()]
                if not any(found):
                    raise
                unknown += filter(None, found)


def _taken_out(data: Any, where: Sequence[str | int]) -> str:
    """Take what pydantic found at ``where`` out of ``data``; returns its name, or nothing if it is not there."""
    names: list[str] = []
    for part, following in zip(where, [*where[1:], ""], strict=True):
        if not isinstance(data, dict) or part not in data:
            continue  # the kind of a place, which pydantic puts between
        names.append(str(part))
        below = data[part]
        if following == "" or not isinstance(below, dict):
            data.pop(part)
            if isinstance(below, dict) and "kind" in below:
                data[part] = {"kind": "folder", "path": " ".join(str(value) for value in below.values())}
            return ".".join(names)
        data = below
    return ""


def _told_apart(schema: dict[str, Any]) -> None:
    """A place as an object says its kind, by which it is told from the others."""
    schema["required"] = sorted({*schema.get("required", ()), "kind"})


class Hub(Strict):
    """A model repository; ``endpoint`` None is the one that ``HF_ENDPOINT`` names where the work is done.

    ``credential`` names an entry of RESHARD_CREDENTIALS there; None takes the one that serves the namespace.
    """

    model_config = ConfigDict(json_schema_extra=_told_apart)
    kind: Literal["hub"] = "hub"
    repo: Annotated[
        str, Field(max_length=REPO_MAX), WithJsonSchema(_text(f"{_NAME.pattern}/{_NAME.pattern}", REPO_MAX))
    ]
    revision: Revision = None
    endpoint: Endpoint = None
    credential: CredentialName | None = None

    @model_serializer(mode="wrap")
    def _told(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without a credential where there is none, so that a release that knows of none can still read it."""
        told = {"kind": self.kind, **fields(self)}
        if told.get("credential") is None:
            told.pop("credential", None)
        return told

    @property
    def namespace(self) -> str:
        return self.repo.partition("/")[0]

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo


# Container names of Azure, bucket names of S3 and of Google, which allows the most.
_BUCKET = r"(?:s3|gs|az)://[a-z0-9](?:[a-z0-9._-]{1,220})[a-z0-9]"
_PART = r"(?!\.{1,2}(?:/|$))[^/?#\\\x00-\x1f]+"


def check_bucket(url: str) -> str:
    """``url`` without the slash at its end if it names a folder of an object store, else ValueError."""
    url = url.rstrip("/")
    if len(url) > URL_MAX:
        raise ValueError(f"a folder of an object store has at most {URL_MAX} characters")
    if not re.fullmatch(rf"{_BUCKET}(?:/.+)?", url):
        raise ValueError(
            "a folder of an object store is s3://bucket/folder, gs://bucket/folder or az://container/folder"
        )
    if any(part in {"", ".", ".."} for part in url.split("/")[3:]) or set(url) & set("?#\\\n\r\0"):
        raise ValueError("a folder of an object store has no empty parts, dots alone, ?, # or backslashes in its name")
    return url


class Bucket(Strict):
    """A folder of an object store, which is only read, with the credentials of the environment where that is done."""

    model_config = ConfigDict(json_schema_extra=_told_apart)
    kind: Literal["bucket"] = "bucket"
    url: Annotated[
        str,
        AfterValidator(check_bucket),
        WithJsonSchema(_text(rf"{_BUCKET}(?:/{_PART})*", URL_MAX)),
    ]

    @model_serializer(mode="wrap")
    def _told(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {"kind": self.kind, **fields(self)}

    def __str__(self) -> str:
        return self.url


class Folder(Strict):
    """A folder of this machine, by its absolute path."""

    model_config = ConfigDict(json_schema_extra=_told_apart)
    kind: Literal["folder"] = "folder"
    path: str = Field(min_length=1, max_length=PATH_MAX)

    @model_serializer(mode="wrap")
    def _told(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {"kind": self.kind, **fields(self)}  # also where defaults are left out

    def __str__(self) -> str:
        return self.path


def _typed(value: object) -> object:
    return parse_place(value) if isinstance(value, str | os.PathLike) else value


def _typed_target(value: object) -> object:
    return parse_target(value) if isinstance(value, str | os.PathLike) else value


AnyPlace = Hub | Folder | Bucket
_Object = Annotated[AnyPlace, Field(discriminator="kind")]
_TargetObject = Annotated[Hub | Folder, Field(discriminator="kind")]
# A place as it is typed, as far as it means the same everywhere: a service takes no folder relative to its own.
_REPO = f"{_NAME.pattern}/{_NAME.pattern}"
_TYPED_TARGET = "|".join(
    [
        rf"(?:hf://)?{_REPO}(?:@{_REVISION.pattern})?",
        rf"https?://[A-Za-z0-9.-]{{1,253}}(?::[0-9]{{1,5}})?/(?!(?:datasets|spaces)/){_REPO}",
        r"(?:/(?!\.{1,2}(?:/|$))[^/\x00-\x1f\x7f]{1,255})+",
    ]
)
_Typed = Annotated[str, WithJsonSchema(_text(rf"{_TYPED_TARGET}|{_BUCKET}(?:/{_PART})*", URL_MAX))]
_TypedTarget = Annotated[str, WithJsonSchema(_text(_TYPED_TARGET, URL_MAX))]
Place = Annotated[_Object, BeforeValidator(_typed, json_schema_input_type=_Object | _Typed)]
TargetPlace = Annotated[
    _TargetObject, BeforeValidator(_typed_target, json_schema_input_type=_TargetObject | _TypedTarget)
]
NOWHERE = Folder(path="/nonexistent/reshard")  # the target of a plan without one: nothing is there


MODELS_ONLY = "only models have weights to reshard: give a model's repository, user/repo"


def parse_target(value: str | os.PathLike[str]) -> Hub | Folder:
    """The place that ``value`` names, to be written to; raises BadPlace, also for one that is only read."""
    place = parse_place(value)
    if isinstance(place, Bucket):
        value = str(value)
        cure = "publish to user/repo, or into ./folder and copy that with the tools of the object store"
        raise BadPlace(value=value, why="an object store is read and not written to", cure=cure)
    return place


def parse_place(value: str | os.PathLike[str]) -> AnyPlace:
    """The place that ``value`` names: ``user/repo[@revision]``, a pasted URL of the Hub, ``./folder`` or ``/folder``,
    ``s3://bucket/folder``, ``gs://`` or ``az://``. A path object is a folder, whatever it looks like.

    Raises BadPlace for anything else; looks at the disk only where ".." follows a name that may be a link.
    """
    if not isinstance(value, str):
        value = str(Path(value).absolute())
    text = value.strip()
    if not text:
        raise BadPlace(value=repr(value), why="no place is given; is a variable of the shell not set?")
    if text.startswith(("./", "../", "/", "~/")) or text in {".", ".."}:
        path = Path(text).expanduser().absolute()
        real = str(resolved(str(path)) if ".." in path.parts else path)
        if len(real) > PATH_MAX:
            raise BadPlace(value=value, why=f"a folder has at most {PATH_MAX} characters")
        return Folder(path=real)
    if "://" in text:
        return _from_url(text)
    repo, _, revision = text.partition("@")
    if repo.startswith(("datasets/", "spaces/")) and repo.count("/") > 1:
        raise BadPlace(value=value, why="this is not a model repository", cure=MODELS_ONLY)
    if "@" in text and not revision:
        raise BadPlace(value=value, why="nothing follows the @")
    return _hub(repo, value, revision or None)


def _from_url(url: str) -> Hub | Bucket:
    parts = urlsplit(url)
    shown = redacted(url.partition("?")[0])  # a query may be a signature
    if "@" in parts.netloc:
        raise BadPlace(value=shown, why="a URL with a user name or password would be stored and published")
    if parts.scheme in {"s3", "gs", "az"}:
        try:
            return Bucket(url=check_bucket(url))
        except ValueError as error:
            raise BadPlace(value=shown, why=str(error)) from None
    if parts.scheme not in {"http", "https", "hf"}:
        raise BadPlace(value=shown, why="only http, https, hf, s3, gs and az URLs are known")
    if parts.scheme == "hf":
        repo, _, at = url.removeprefix("hf://").partition("@")
        return _hub(repo, shown, at or None)
    segments = [unquote(s) for s in parts.path.split("/") if s]
    if segments and segments[0] in {"datasets", "spaces"}:
        raise BadPlace(value=shown, why="this is not a model repository", cure=MODELS_ONLY)
    revision = None
    if len(segments) >= 4 and segments[2] in {"tree", "blob", "resolve", "commit"}:
        revision = segments[3]
    elif len(segments) > 2:
        raise BadPlace(value=shown, why="this URL names no repository or revision")
    endpoint = f"{parts.scheme}://{parts.netloc}"
    return _hub("/".join(segments[:2]), shown, revision, endpoint)


def _hub(repo: str, value: str, revision: str | None, endpoint: str | None = None) -> Hub:
    """The repository that was typed as ``value``; raises BadPlace."""
    if endpoint is not None and (len(endpoint) > URL_MAX or not re.fullmatch("[!-~]*", endpoint)):
        raise BadPlace(value=value, why="this is no address of a Hub")
    try:
        return Hub(repo=_repo(repo, value), revision=check_revision(revision), endpoint=endpoint)
    except ValueError as error:
        raise BadPlace(value=value, why=str(error)) from None


def state_dir() -> Path:
    """Where programs of this user keep state (XDG Base Directory Specification)."""
    folder = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(os.path.expanduser(folder), "reshard")  # noqa: PTH111 -- Path's raises where there is no home


def redacted(url: str) -> str:
    """``url`` without the user name and password that it may hold, to be printed.

    >>> redacted("https://me:secret@hub.example/a")
    'https://***@hub.example/a'
    """
    return re.sub(r"(^|//)[^/]*@", r"\1***@", url)


def resolved(path: str) -> Path:
    """``path`` with its links followed, whether or not something is there.

    Raises BadPlace for a path that no system call takes: too long, a link that leads back to itself, a NUL in it.
    """
    try:
        real = Path(os.path.realpath(path))
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            real.stat()
    except OSError as error:
        raise BadPlace(value=path, why=error.strerror or str(error)) from error
    except ValueError as error:
        raise BadPlace(value=path, why=str(error)) from error
    return real


def is_http(url: str) -> bool:
    """Whether ``url`` is one that calls can be sent to."""
    try:
        parts = urlsplit(url)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def check_repo(repo: str) -> str:
    """``repo`` if it is ``user/repo`` by the Hub's rule for names, else BadPlace."""
    return _repo(repo, repo)


def _repo(repo: str, value: str) -> str:
    owner, slash, name = repo.partition("/")
    if not slash:
        here = f"./{shortened(repo)}"
        cure = f"add its owner (gpt2 is openai-community/gpt2 on the Hub now), or type {here} for a folder here"
        raise BadPlace(value=value, why="an owner is missing (user/repo)", cure=cure)
    for part in (owner, name):
        if not _NAME.fullmatch(part):
            raise BadPlace(value=value, why=f"{shortened(part)!r} is not a name that the Hub allows")
    return repo
