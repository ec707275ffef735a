"""Where a checkpoint is read from or written to, as a person types it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, ConfigDict, Field

from reshard.pipeline.errors import BadPlace

# The Hub's rule for names (huggingface_hub.utils.validate_repo_id): 96 characters of [\w.-], no `--`, no `..`,
# and neither `-` nor `.` at either end.
_NAME = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9_](?:[\w.-]{0,94}[A-Za-z0-9_])?")


class Hub(BaseModel):
    """A model repository; ``endpoint`` None is the one that ``HF_ENDPOINT`` names where the work is done."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: Literal["hub"] = "hub"
    repo: str
    revision: str | None = None
    endpoint: str | None = None

    @property
    def namespace(self) -> str:
        return self.repo.partition("/")[0]

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo


class Folder(BaseModel):
    """A folder of this machine, by its absolute path."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: Literal["folder"] = "folder"
    path: str

    def __str__(self) -> str:
        return self.path


Place = Annotated[Hub | Folder, Field(discriminator="kind")]


def parse_place(value: str) -> Hub | Folder:
    """The place that ``value`` names: ``user/repo[@revision]``, a pasted URL of the Hub, ``./folder`` or ``/folder``.

    Raises BadPlace for anything else; looks at neither the disk nor the network.
    """
    text = value.strip()
    if text.startswith(("./", "../", "/", "~/")) or text in {".", ".."}:
        return Folder(path=str(Path(text).expanduser().absolute()))
    if "://" in text:
        return _from_url(text)
    repo, _, revision = text.partition("@")
    if "@" in text and not revision:
        raise BadPlace(value=value, why="nothing follows the @")
    return Hub(repo=_repo(repo, value), revision=revision or None)


def _from_url(url: str) -> Hub:
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https", "hf"}:
        raise BadPlace(value=url, why="only http, https and hf URLs are known")
    if parts.scheme == "hf":
        repo, _, at = url.removeprefix("hf://").partition("@")
        return Hub(repo=_repo(repo, url), revision=at or None)
    segments = [unquote(s) for s in parts.path.split("/") if s]
    if segments and segments[0] in {"datasets", "spaces"}:
        raise BadPlace(value=url, why="this is no model repository")
    revision = None
    if len(segments) >= 4 and segments[2] in {"tree", "blob", "resolve", "commit"}:
        revision = segments[3]
    elif len(segments) > 2:
        raise BadPlace(value=url, why="this URL names no repository or revision")
    endpoint = f"{parts.scheme}://{parts.netloc}"
    return Hub(repo=_repo("/".join(segments[:2]), url), revision=revision, endpoint=endpoint)


def _repo(repo: str, value: str) -> str:
    owner, slash, name = repo.partition("/")
    if not slash:
        raise BadPlace(value=value, why="an owner is missing (user/repo); a folder starts with ./ or /")
    for part in (owner, name):
        if not _NAME.fullmatch(part):
            raise BadPlace(value=value, why=f"{part!r} is no name that the Hub allows")
    return repo
