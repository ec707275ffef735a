"""Tokens by reference: which one a Hub call may carry, found where the work is done and never written anywhere.

One token is the usual case: ``HF_TOKEN``, or what ``hf auth login`` left behind, for the default endpoint. More are
named in a TOML file that ``RESHARD_CREDENTIALS`` points to; it says where a token is found, not what it is:

    [[credential]]
    name = "publisher"               # by which a request may ask for it; left out: none may
    endpoint = "https://huggingface.co"
    namespace = "my-org"             # left out: every namespace of the endpoint
    use = "write"                    # "read", "write", or left out for both
    env = "MY_ORG_TOKEN"             # or file = "/run/secrets/my-org"; a relative path starts at the TOML file's folder

The most particular entry wins: one for the namespace before one for all, one for the use before one for both, and of
equal ones the first. A request that names one gets that one or an error, and only for what it serves.
"""

from __future__ import annotations

import hashlib
import os
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import SecretStr, ValidationError, model_validator

from reshard.pipeline.errors import BadCredentials, BadSetting, CredentialScope, CredentialUnknown
from reshard.pipeline.places import HUB_BUCKET, CredentialName
from reshard.pipeline.text import printable
from reshard.pipeline.urls import is_http, redacted
from reshard.pipeline.validation import Strict, first_problem

DEFAULT_ENDPOINT = "https://huggingface.co"
Use = Literal["read", "write"]
_TOKEN = re.compile("[!-~]+")  # what a header can carry
_PASTED = re.compile("(?:hf|api_org)_[A-Za-z0-9]{10,}")  # where a name belongs, a token


def default_endpoint() -> str:
    """The Hub of this process where none is named: HF_ENDPOINT, as it is set."""
    return os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT


@dataclass(frozen=True, slots=True)
class Credential:
    """A token and the name it was found by; only the name is ever printed."""

    name: str
    token: SecretStr

    @property
    def id(self) -> str:
        """The same for equal tokens, so that a budget can be shared without sharing the token."""
        return hashlib.blake2b(self.token.get_secret_value().encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Reference:
    """One way in which a token is found: for which endpoint, namespace and use."""

    endpoint: str
    namespace: str | None
    use: Use | None
    credential: Credential | None  # None: it names a token that is not there
    name: str | None = None  # by which a request may ask for it

    @property
    def scope(self) -> str:
        """``" (publisher) for my-org, to write"``; empty where it has no name and serves everything."""
        return (f" ({self.name})" if self.name else "") + _scope(self.namespace, self.use)


class _Entry(Strict):
    name: CredentialName | None = None
    endpoint: str = DEFAULT_ENDPOINT
    namespace: str | None = None
    use: Use | None = None
    env: str | None = None
    file: Path | None = None

    @model_validator(mode="after")
    def _one_reference(self) -> _Entry:
        if (self.env is None) == (self.file is None):
            raise ValueError("needs either `env` or `file`")
        if "@" in self.endpoint:
            raise ValueError("remove the user name or password from its endpoint; it would be printed and published")
        return self

    def serves(self, endpoint: str, namespace: str, use: Use) -> bool:
        same = self.namespace is None or self.namespace.casefold() == namespace.casefold()  # as on the Hub
        return self.endpoint.rstrip("/") == endpoint and same and self.use in (None, use)

    @property
    def place(self) -> str:
        """Where its token is found; of a token that was put there by mistake nothing is shown."""
        key, kind, place = ("env", "variable", self.env) if self.env else ("file", "file", str(self.file))
        return f"the {kind} in `{key}`" if _PASTED.fullmatch(Path(place).name) else place

    @property
    def sign_in(self) -> str:
        """What puts a token where it has none."""
        if self.env is not None and _PASTED.fullmatch(self.env):
            return "put the name of a variable into `env` in RESHARD_CREDENTIALS, where a token is now"
        do = "put the token into" if self.env is None else "set"
        is_ = "not set" if self.env is not None and self.env not in os.environ else "empty"
        return f"{do} {self.place} (RESHARD_CREDENTIALS refers to it, and it is {is_})"

    def resolve(self) -> Credential | None:
        if self.env is not None:
            value, name = os.environ.get(self.env, ""), self.env
        else:
            assert self.file is not None
            try:
                value, name = self.file.read_text(), str(self.file)
            except OSError as error:
                why = error.strerror or type(error).__name__
                raise BadCredentials(file=self.place, why=why) from None  # which has the path, perhaps a token
            except UnicodeDecodeError:
                raise _no_token(str(self.file)) from None  # which has all that was read
        return _credential(name, value.strip())


class _File(Strict):
    credential: tuple[_Entry, ...] = ()


class Credentials:
    """Finds the token for a call; reads variables and files when asked, so that a rotated token is seen."""

    def __init__(self, default_endpoint: str = DEFAULT_ENDPOINT, entries: tuple[_Entry, ...] = ()) -> None:
        self.default_endpoint = default_endpoint.rstrip("/")
        self._entries = entries

    @classmethod
    def from_env(cls) -> Credentials:
        """What HF_ENDPOINT and RESHARD_CREDENTIALS say; raises BadSetting, BadCredentials for what cannot be used."""
        endpoint = default_endpoint()
        if "@" in endpoint:
            why = "remove the user name or password; it would be printed and published (use HF_TOKEN for a token)"
            raise BadSetting(name="HF_ENDPOINT", value=redacted(endpoint), why=why)
        if not is_http(endpoint):
            why = "not a URL that starts with http:// or https://"
            raise BadSetting(name="HF_ENDPOINT", value=endpoint, why=why)
        file = os.environ.get("RESHARD_CREDENTIALS")
        return cls(endpoint, _read(Path(file)) if file else ())

    @property
    def endpoints(self) -> frozenset[str]:
        return frozenset([self.default_endpoint, *(entry.endpoint.rstrip("/") for entry in self._entries)])

    def references(self) -> list[Reference]:
        """Every entry of the file, and the default token where no entry serves its whole endpoint."""
        found = [Reference(e.endpoint.rstrip("/"), e.namespace, e.use, e.resolve(), e.name) for e in self._entries]
        if not any((r.endpoint, r.namespace, r.use) == (self.default_endpoint, None, None) for r in found):
            found.append(Reference(self.default_endpoint, None, None, _default_token()))
        return found

    def find(self, endpoint: str, namespace: str, use: Use, name: str | None = None) -> Credential | None:
        """The credential for a call to ``namespace`` on ``endpoint``; None: the call goes without one.

        The default token is sent to the default endpoint only: a token never leaves for a Hub it was not made for. With
        a ``name`` it is one of that name, and none other; raises CredentialUnknown when there is none, CredentialScope
        when there is none for this call, and BadCredentials when its token is not there.
        """
        endpoint = endpoint.rstrip("/")
        called = self._entries if name is None else self._called(name)
        serving = _serving(called, endpoint, namespace, use)
        for entry in serving:
            found = entry.resolve()
            if found is not None:
                return found
        if name is None:
            return _default_token() if endpoint == self.default_endpoint else None
        if serving:
            raise BadCredentials(file=f"credential {name}", why=f"{serving[0].place} has no token")
        serves = "; ".join(f"{e.endpoint}{_scope(e.namespace, e.use)}" for e in called)
        raise CredentialScope(name=name, use=use, namespace=namespace, endpoint=endpoint, serves=serves)

    def sign_in(self, endpoint: str, namespace: str, use: Use) -> str:
        """How a token is given to a call that went without one; empty where HF_TOKEN does it."""
        endpoint = endpoint.rstrip("/")
        for entry in _serving(self._entries, endpoint, namespace, use):
            if entry.resolve() is None:
                return entry.sign_in
        if endpoint == self.default_endpoint:
            return ""
        only = f"HF_TOKEN is only sent to {self.default_endpoint}"
        return f"add a [[credential]] for {endpoint} to the RESHARD_CREDENTIALS file ({only})"

    def reading(self) -> Credentials:
        """The same for a target that is only looked at: for ``write`` it finds what is there for ``read``."""
        entries = (entry for entry in self._entries if entry.use != "write")
        both = (entry.model_copy(update={"use": entry.use and use}) for entry in entries for use in ("read", "write"))
        return Credentials(self.default_endpoint, tuple(both))

    def _called(self, name: str) -> list[_Entry]:
        called = [entry for entry in self._entries if entry.name == name]
        if not called:
            known = sorted({entry.name for entry in self._entries if entry.name})
            raise CredentialUnknown(name=name, known=", ".join(known) or "none with a name")
        return called


def elsewhere(endpoint: str, repo: str = "", use: Use = "write") -> dict[str, str]:
    """How a token is given to a call that went without, unless HF_TOKEN does it: a fact of errors."""
    how = Credentials.from_env().sign_in(endpoint, repo.removeprefix(HUB_BUCKET).partition("/")[0], use)
    return {"sign_in": how} if how else {}


def _serving(entries: Iterable[_Entry], endpoint: str, namespace: str, use: Use) -> list[_Entry]:
    """The most particular first."""
    serving = [entry for entry in entries if entry.serves(endpoint, namespace, use)]
    return sorted(serving, key=lambda entry: (entry.namespace is None, entry.use is None))


def _scope(namespace: str | None, use: Use | None) -> str:
    return (f" for {namespace}" if namespace else "") + (f", {use} only" if use else "")


def _read(file: Path) -> tuple[_Entry, ...]:
    try:
        entries = _File.model_validate(tomllib.loads(file.read_text())).credential
        return tuple(e.model_copy(update={"file": file.parent / e.file}) if e.file else e for e in entries)
    except OSError as error:
        raise BadCredentials(file=str(file), why=error.strerror or str(error)) from error
    except UnicodeDecodeError:
        raise BadCredentials(file=str(file), why="not UTF-8") from None  # which has all that was read
    except tomllib.TOMLDecodeError as error:
        raise BadCredentials(file=str(file), why=f"not TOML: {error}") from error
    except ValidationError as error:
        wrong = first_problem(error)
    why = f"{printable(wrong.where)}: only [[credential]] tables are allowed"
    match wrong.loc:  # of what was given nothing is told: it could be a token put in the wrong place
        case ("credential", int(number), *key):
            why = f"[[credential]] {number + 1}{f', {key[0]}' if key else ''}: {wrong.why}"
    raise BadCredentials(file=str(file), why=why)


def _default_token() -> Credential | None:
    from huggingface_hub import get_token

    try:
        return _credential("HF_TOKEN", get_token() or "")
    except UnicodeDecodeError:  # of the file that `hf auth login` wrote
        raise _no_token("HF_TOKEN") from None


def _credential(name: str, token: str) -> Credential | None:
    """None for an empty token; raises BadCredentials for what cannot be sent, before a library repeats it."""
    if token and not _TOKEN.fullmatch(token):
        raise _no_token(name)
    return Credential(name, SecretStr(token)) if token else None


def _no_token(name: str) -> BadCredentials:
    why = "the token contains a space, a line break or a character outside ASCII"
    return BadCredentials(file=name, why=why, cure="copy the token again, alone and on one line")
