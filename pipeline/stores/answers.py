"""What a Hub may answer, call by call: data from outside, validated where it enters.

Unknown fields are ignored, as Hubs have many. A field that is used has its type here, or the answer is refused.
"""

from __future__ import annotations

from typing import Annotated, Literal

import httpx2
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from reshard.pipeline.errors import BadPlace
from reshard.pipeline.places import check_repo
from reshard.pipeline.protocols import Visibility
from reshard.pipeline.urls import is_http

Sha256 = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
CommitId = Annotated[str, StringConstraints(pattern="^[0-9a-f]{7,64}$")]  # some Hubs shorten them
GitId = Annotated[str, StringConstraints(pattern="^([0-9a-f]{40}|[0-9a-f]{64})$")]
Size = Annotated[int, Field(ge=0, lt=2**63)]
Text = Annotated[str, BeforeValidator(lambda value: "" if value is None else value)]
HeaderName = Annotated[str, StringConstraints(pattern="^[A-Za-z0-9!#$%&'*+.^_`|~-]+$")]
HeaderValue = Annotated[str, StringConstraints(pattern="^[\t\x20-\x7e]*$")]


def _repo(value: str) -> str:
    try:
        return check_repo(value)
    except BadPlace as error:
        raise ValueError("not the name of a repository") from error


def is_url(value: str) -> bool:
    """Whether a call can be sent to ``value``, which httpx parses more strictly than the standard library."""
    try:
        return is_http(value) and bool(httpx2.URL(value).host)
    except httpx2.InvalidURL:
        return False


def _url(value: str) -> str:
    if not is_url(value):
        raise ValueError("not a URL that begins with http:// or https://")
    return value


Repo = Annotated[str, AfterValidator(_repo)]
Url = Annotated[str, AfterValidator(_url)]


class HubAnswer(BaseModel):
    model_config = ConfigDict(hide_input_in_errors=True, coerce_numbers_to_str=True)


class Access(HubAnswer):
    """A repository, with or without commits."""

    id: Repo
    private: bool
    gated: bool | str | None = None

    @property
    def visibility(self) -> Visibility:
        return "private" if self.private else "gated" if self.gated else "public"


class RepoInfo(Access):
    """A repository at one revision; ``id`` is what it is called now, whatever it was asked for by."""

    sha: CommitId


class ModelInfo(RepoInfo):
    """A repository as one that a catalog wants is asked for."""

    usedStorage: Size | None = None


class ListedModel(Access):
    """A repository as lists of many have it: one with an odd name, or without commits, does not spoil its list."""

    id: str
    sha: CommitId | None = None
    private: bool = True
    downloads: int | None = None
    usedStorage: Size | None = None


class CollectionItem(HubAnswer):
    type: str  # a model, or something else
    id: str
    usedStorage: Size | None = None


class Collection(HubAnswer):
    items: list[CollectionItem]


class _LfsPointer(HubAnswer):
    oid: Sha256


class BucketItem(HubAnswer):
    """A file or a folder of a bucket."""

    type: str
    path: object  # UnsafePath has more to say of it
    size: Size = 0
    xetHash: Sha256 | None = None


class TreeItem(BucketItem):
    """A file or a folder of a repository; a file has the git id of its content, or the sha256 of a large file's."""

    oid: GitId | None = None
    lfs: _LfsPointer | None = None

    @model_validator(mode="after")
    def _complete(self) -> TreeItem:
        if self.type == "file" and (not (self.oid or self.lfs) or "size" not in self.model_fields_set):
            raise ValueError("a file without a size, or without a hash of its content")
        return self


class BucketInfo(HubAnswer):
    private: bool


class _BucketFailure(HubAnswer):
    path: str
    error: Text = ""


class BucketBatch(HubAnswer):
    failed: list[_BucketFailure] = []


class _Author(HubAnswer):
    user: Text = ""


class HistoryItem(HubAnswer):
    id: CommitId
    title: Text = ""
    message: Text = ""
    authors: list[_Author] | None = None


class _Organization(HubAnswer):
    name: str
    roleInOrg: str | None = None


class _Entity(HubAnswer):
    name: str


class _Scope(HubAnswer):
    entity: _Entity
    permissions: list[str]


class FineGrained(HubAnswer):
    canReadGatedRepos: bool | None = None
    scoped: list[_Scope] = []


class _Token(HubAnswer):
    role: str | None = None
    fineGrained: FineGrained | None = None


class _Auth(HubAnswer):
    accessToken: _Token | None = None


class Account(HubAnswer):
    """Whose a credential is, and what it may do."""

    name: str
    orgs: list[_Organization] = []
    auth: _Auth | None = None

    @property
    def role(self) -> str | None:
        """``read``, ``write`` or ``fineGrained``."""
        return self.auth.accessToken.role if self.auth and self.auth.accessToken else None

    @property
    def fine_grained(self) -> FineGrained:
        """What a fine-grained token may do; of another one nothing."""
        access = self.auth.accessToken if self.auth else None
        return (access and self.role == "fineGrained" and access.fineGrained) or FineGrained()

    @property
    def writable(self) -> list[str]:
        """The namespaces, and of a fine-grained token also single repositories, that it may write."""
        if self.role == "write":
            return [self.name, *(org.name for org in self.orgs if org.roleInOrg != "read")]
        return self.scoped({"repo.write"})

    def scoped(self, permissions: set[str]) -> list[str]:
        """Where a fine-grained token has one of these permissions; the names are those of the Hub's token settings."""
        return [scope.entity.name for scope in self.fine_grained.scoped if permissions & {*scope.permissions}]

    def may_write(self, repo: str) -> bool:
        return bool({repo.lower(), repo.partition("/")[0].lower()} & {name.lower() for name in self.writable})


class Opened(HubAnswer):
    num: Size  # of a new discussion


class _Discussion(Opened):
    status: str


class Discussions(HubAnswer):
    discussions: list[_Discussion]
    count: int


class _Comment(HubAnswer):
    raw: Text = ""


class _EventData(HubAnswer):
    latest: _Comment | None = None


class _Event(HubAnswer):
    type: str
    data: _EventData | None = None


class _Name(HubAnswer):
    name: Text = ""


class Discussion(HubAnswer):
    status: str
    author: _Name | None = None
    events: list[_Event]

    @property
    def by(self) -> str:
        """Whose it is; empty where the Hub does not say."""
        return self.author.name if self.author else ""

    @property
    def description(self) -> str:
        """Its first comment."""
        first = next((event.data for event in self.events if event.type == "comment"), None)
        return first.latest.raw if first and first.latest else ""


class _Mode(HubAnswer):
    path: str
    uploadMode: Literal["regular", "lfs"]


class Modes(HubAnswer):
    files: list[_Mode]


class _Failure(HubAnswer):
    sha256: str


class Duplicated(HubAnswer):
    failed: list[_Failure]


class Committed(HubAnswer):
    commitOid: CommitId


class LfsAction(HubAnswer):
    href: Url
    header: Annotated[dict[HeaderName, HeaderValue], BeforeValidator(lambda value: value or {})] = {}

    @property
    def parts(self) -> tuple[int, list[str]]:
        """Of a multipart upload, the bytes of each part and their URLs in order; raises ValueError."""
        size = int(self.header["chunk_size"])
        urls = [_url(url) for _, url in sorted((int(n), url) for n, url in self.header.items() if n.isdecimal())]
        if size <= 0:
            raise ValueError("the part size is not greater than zero")
        return size, urls


class LfsActions(HubAnswer):
    upload: LfsAction | None = None
    verify: LfsAction | None = None


class _LfsError(HubAnswer):
    message: Text = "no reason given"


class _LfsObject(HubAnswer):
    oid: Sha256
    error: _LfsError | None = None
    actions: LfsActions | None = None


class LfsBatchAnswer(HubAnswer):
    objects: list[_LfsObject]


class XetToken(HubAnswer):
    casUrl: Url
    accessToken: HeaderValue
    exp: float = 0.0  # when it ends, in seconds since the epoch by the Hub's clock; of a Hub that does not say, now


class _Term(HubAnswer):
    hash: str


class _Span(HubAnswer):
    start: Size
    end: Size


class _Fetch(HubAnswer):
    url: Url
    url_range: _Span


class Reconstruction(HubAnswer):
    """Where the content store has the parts of a file."""

    terms: Annotated[list[_Term], Field(min_length=1)]
    fetch_info: dict[str, Annotated[list[_Fetch], Field(min_length=1)]]

    @property
    def first(self) -> _Fetch:
        return self.fetch_info[self.terms[0].hash][0]

    @model_validator(mode="after")
    def _told(self) -> Reconstruction:
        if self.terms[0].hash not in self.fetch_info:
            raise ValueError("its first part has no location")
        return self
