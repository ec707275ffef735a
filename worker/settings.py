"""What an operator may set, by variables that start with ``RESHARD_``; each default with its unit and reason.

The client reads the same settings, so this module imports neither Celery nor the pipeline's heavy parts.
"""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args
from urllib.parse import parse_qs, urlsplit

from pydantic import AfterValidator, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from reshard.pipeline.errors import BadSetting
from reshard.pipeline.paths import state_dir
from reshard.pipeline.urls import is_http
from reshard.pipeline.validation import first_problem

# ------------------------------------------------------------------------------------------------------------ leases
LEASE = 30.0  # seconds; with the control process's second, a killed worker's share is taken over within 45 s
RENEWALS = 1.0  # seconds between renewals; they carry the progress, and a cancel is seen no later than this
STALL = 120.0  # seconds without a byte after which a copy is no longer renewed, so that another worker may have it
STEP_STALL = 900.0  # seconds; the same for the steps that move no counted bytes: plan, check, publish, confirm
ATTEMPTS = 8  # claims of one unit in a row without lasting progress; with the pauses below they span half an hour
ATTEMPTS_AT_A_BUG = 3  # the same for an error that reshard does not know: trying longer hides it
BACKOFF_FIRST = 15.0  # seconds before a failed unit is tried again; doubles each time
BACKOFF_MAX = 900.0  # seconds; a Hub that is away for hours is asked four times an hour

# ------------------------------------------------------------------------------------------------------------- wakes
RESEND = 10.0  # seconds; a wake that is neither taken nor in line by then is taken for lost
HAND_BACK = 5.0  # seconds until a job whose plan this worker does not understand is offered again
YIELD_PAUSE = 2.0  # seconds; one bulk copy at most gives way in this time, or one interactive job would stop them all

# ------------------------------------------------------------------------------------------------------------ worker
CONCURRENCY = 2  # copies at once in one worker; the bytes move in threads below, so more only costs memory
DRAIN = 25.0  # seconds after SIGTERM at which a step is handed back unfinished; orchestrators kill after 30
BROKER_PATIENCE = 900.0  # seconds that a finished copy is kept while the broker is unavailable
HEARTBEAT = 5.0  # seconds between a process's signs of life
PRESUMED_DEAD = 20.0  # seconds without one
REST_AFTER = 3  # failures in a row that blame the machine, after which a worker tries itself: one may be a moment's
REST_FIRST = 5.0  # seconds before a resting worker tries itself once more; doubles each time
REST_MAX = 300.0  # seconds; a worker whose disk was cleared in the night is back five minutes later
SELF_CHECK_TIMEOUT = 60.0  # seconds; a try asks a Hub with several tokens

# ------------------------------------------------------------------------------------------------------------- store
MAX_QUEUED = 20_000  # jobs of one submitter that none has begun; a record takes some 3 kB of the broker's memory
KEEP_DAYS = 30.0  # days that an ended job can be looked at and retried
KEEP_DETAILS = 3600.0  # seconds that a finished job keeps its plan, receipts, events and log, for who is still watching
KEEP_TEMP_DIR = 3600.0  # seconds; a temporary folder of nobody that is older goes


LogFormat = Literal["text", "json"]
S = TypeVar("S", bound=BaseSettings)


class SubmitSettings(BaseSettings):
    """What whoever submits has to know."""

    model_config = SettingsConfigDict(
        env_prefix="RESHARD_", env_ignore_empty=True, extra="ignore", frozen=True, allow_inf_nan=False
    )

    max_queued: int = Field(default=MAX_QUEUED, ge=1)  # of one submitter: a user, a token, a catalog or a schedule


Located = Annotated[Path, AfterValidator(Path.absolute)]  # the processes of `reshard up` run elsewhere
Share = Annotated[float, Field(ge=0.01, le=16)]  # as far as a step of wakes.lua can be cut or stretched


class Settings(SubmitSettings):
    """The service's settings. Lists are separated by commas."""

    broker_url: SecretStr | None = None  # redis://, rediss://, redis+socket://; None: what `reshard up` starts
    broker_password: SecretStr | None = None  # of its user, where the URL holds none
    api_url: str | None = None  # of `reshard web`, which the commands of the queue then ask in the broker's place
    api_token: SecretStr | None = None  # what it knows who asks by
    data_dir: Located = Field(default_factory=lambda: default_data_dir())
    tmpdir: Located = Field(default_factory=lambda: Path(tempfile.gettempdir()))

    log_format: LogFormat = "text"  # of worker, control and the page

    concurrency: int = Field(default=CONCURRENCY, ge=1, le=64)
    lease: float = Field(default=LEASE, gt=0)
    stall: float = Field(default=STALL, gt=0)
    attempts: int = Field(default=ATTEMPTS, ge=1)
    backoff_first: float = Field(default=BACKOFF_FIRST, ge=0)
    backoff_max: float = Field(default=BACKOFF_MAX, ge=0)
    drain: float = Field(default=DRAIN, ge=0)
    broker_patience: float = Field(default=BROKER_PATIENCE, ge=0)
    until_idle: bool = False  # whether a worker ends when no job is left
    keep_days: float = Field(default=KEEP_DAYS, gt=0)
    # Of control: a submitter's turns come so many times as often as others', as "ada@box=2, catalog nightly=0.5".
    shares: Annotated[dict[str, Share], NoDecode] = Field(default_factory=dict)

    # Where control answers a scrape. Off unless asked for: without a password it tells the names of schedules,
    # catalogs and hosts, and two controls on one machine would want the same port.
    metrics_port: int | None = Field(default=None, ge=1, le=65535)
    metrics_address: str = "127.0.0.1"
    health_port: int | None = Field(default=None, ge=1, le=65535)  # where a worker answers probes, on the same address

    # What control tells notices to. Each may hold a token.
    notify_command: SecretStr | None = None  # words as a shell splits them, but no shell
    notify_url: SecretStr | None = None
    notify_apprise: SecretStr | None = None  # URLs of Apprise, separated by blanks: some have commas in them

    # Trust. None and empty differ: no list of targets means the token's own namespaces, an empty one means nobody's.
    allowed_targets: Annotated[tuple[str, ...] | None, NoDecode] = None
    allowed_sources: Annotated[tuple[str, ...] | None, NoDecode] = None  # None: whatever the token may read
    allowed_endpoints: Annotated[tuple[str, ...] | None, NoDecode] = None  # None: HF_ENDPOINT, and the credentials'
    allow_public: bool = False  # --public for what is private or gated: a submitter need not be among those who see it
    allowed_folders: Annotated[tuple[Located, ...], NoDecode] = ()  # workers use no folders unless told

    @property
    def log_dir(self) -> Path:
        """Where `reshard up` keeps logs: with what runs keep, or with its data where an operator chose a place."""
        return self.data_dir if self.data_dir != default_data_dir() else state_dir() / "logs"

    @field_validator("allowed_targets", "allowed_sources", "allowed_endpoints", "allowed_folders", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("shares", mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        pairs = [part.rpartition("=") for part in value.split(",") if part.strip()]
        if wrong := next((after for name, _, after in pairs if not name.strip()), ""):
            raise ValueError(f"{wrong.strip()!r} is not NAME=SHARE")
        return {name.strip(): share.strip() for name, _, share in pairs}

    @field_validator("notify_command")
    @classmethod
    def _words(cls, value: SecretStr | None) -> SecretStr | None:
        try:
            words = shlex.split(value.get_secret_value()) if value else []
        except ValueError as error:
            raise ValueError(f"cannot split it into words: {error}") from None
        if value and not words:
            raise ValueError("no program given")
        return value

    @field_validator("notify_apprise")
    @classmethod
    def _some(cls, value: SecretStr | None) -> SecretStr | None:
        if value and not value.get_secret_value().split():
            raise ValueError("no URL given")
        return value

    @field_validator("notify_url")
    @classmethod
    def _http(cls, value: SecretStr | None) -> SecretStr | None:
        if value and not is_http(value.get_secret_value()):
            raise ValueError("not a URL that starts with http:// or https://")
        return value

    @field_validator("api_url")
    @classmethod
    def _plain(cls, value: str | None) -> str | None:
        if value and not is_http(value):
            raise ValueError("not a URL that starts with http:// or https://")
        if value and (urlsplit(value).username is not None or "?" in value or "#" in value):
            raise ValueError("it cannot have a password, ? or #; set the token in RESHARD_API_TOKEN")
        return value

    @field_validator("api_token")
    @classmethod
    def _word(cls, value: SecretStr | None) -> SecretStr | None:
        if value and not re.fullmatch(r"[!-~]+", value.get_secret_value()):
            raise ValueError("not a token from `reshard token` (one word of visible ASCII characters)")
        return value

    @field_validator("broker_url")
    @classmethod
    def _redis(cls, value: SecretStr | None) -> SecretStr | None:
        try:
            parts = urlsplit(value.get_secret_value()) if value else None
            where = {"redis": "hostname", "rediss": "hostname", "redis+socket": "path"}
            usable = parts is None or (bool(getattr(parts, where[parts.scheme])) and parts.port != 0)
            if parts is not None:  # of a database without a number, redis-py would take the first
                number = parse_qs(parts.query).get("db", ["0"])[0]
                path = "" if parts.scheme == "redis+socket" else parts.path
                usable &= bool(re.fullmatch(r"[0-9/]*", path) and re.fullmatch("[0-9]+", number))
        except (KeyError, ValueError):
            usable = False
        if not usable:
            raise ValueError("not a URL like redis://host:6379/0, rediss://host:6379/0 or redis+socket:///path")
        return value


def default_data_dir() -> Path:
    """Where the local service keeps its broker's data and its locks.

    By the XDG Base Directory Specification, https://specifications.freedesktop.org/basedir-spec/latest/
    """
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "reshard"


def secrets_of(kind: type[BaseSettings]) -> Iterator[tuple[str, str]]:
    """Each field of ``kind`` that holds a secret, and its variable."""
    for field, info in kind.model_fields.items():
        if SecretStr in get_args(info.annotation):
            yield field, f"{kind.model_config['env_prefix']}{field}".upper()


def unread(*kinds: type[BaseSettings]) -> list[str]:
    """What to say of each RESHARD_ variable that none of ``kinds`` reads: a limit that is misspelt limits nothing."""
    known = {"RESHARD_CREDENTIALS"}
    for kind in kinds:
        known |= {f"{kind.model_config['env_prefix']}{field}".upper() for field in kind.model_fields}
        known |= {f"{name}_FILE" for _, name in secrets_of(kind)}
    others = sorted(name for name in os.environ if name.startswith("RESHARD_") and name not in known)
    words = {name.removeprefix("RESHARD_"): name for name in known}  # what all have in common is no likeness
    found = {name: get_close_matches(name.removeprefix("RESHARD_"), words, 1) for name in others}
    near = {name: f"; did you mean {words[word]}?" for name, likely in found.items() for word in likely}
    return [f"{name} is not a setting{near.get(name, '')}" for name in others]


def from_files(kind: type[BaseSettings]) -> dict[str, Any]:
    """The secrets that no variable holds, but a file that RESHARD_..._FILE names. Raises BadSetting."""
    found = {}
    for field, name in secrets_of(kind):
        path = os.environ.get(f"{name}_FILE")
        if not path or os.environ.get(name):
            continue
        try:
            found[field] = Path(path).read_text().strip()
        except UnicodeDecodeError:
            raise BadSetting(name=f"{name}_FILE", value=path, why="not text") from None
        except OSError as error:
            raise BadSetting(name=f"{name}_FILE", value=path, why=f"cannot read it: {error.strerror}") from None
        if not found[field]:
            raise BadSetting(name=f"{name}_FILE", value=path, why="empty")
    return found


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The settings of this process, read once; raises BadSetting."""
    return read(Settings)


@lru_cache(maxsize=1)
def max_queued() -> int:
    """Jobs that one submitter may have queued; raises BadSetting. A program may set the broker's URL after it."""
    return read(SubmitSettings).max_queued


def read(kind: type[S], **usual: Any) -> S:
    """Settings of this process, where ``usual`` has those that are not set; raises BadSetting."""
    prefix = str(kind.model_config["env_prefix"])
    unset = {name: value for name, value in usual.items() if not os.environ.get(f"{prefix}{name}".upper())}
    try:
        return kind(**unset, **from_files(kind))
    except ValidationError as error:
        first = first_problem(error)
        name = f"{prefix}{first.loc[0]}".upper()
        secret = first.loc[0] in {"api_url", *dict(secrets_of(kind))}
        raise BadSetting(name=name, value="..." if secret else first.given, why=first.why) from None
