"""Who asks, and what they may do: bearer tokens whose hashes a file holds, or a proxy that says who signed in.

The file has a line a token: its name, its scope, and the sha256 of what is sent. A token is 256 random bits, so that a
plain hash of it tells nothing. The file is read again when it changes, so that a line taken out ends its token at once.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from reshard.client.connect import user_name
from reshard.pipeline.errors import BadSetting, UsageError, UserNameRefused
from reshard.web.settings import WebSettings

if TYPE_CHECKING:
    from starlette.datastructures import Headers

TOKEN_BYTES = 32  # random ones of a token
PREFIX = "rsh_"  # so that scanners for leaked secrets, and people, know one
OWN = "web-own-token"  # the file with the token of whoever runs the service
COOKIE = "reshard"  # what a browser keeps of the sign-in
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,62}")
# What a proxy may name: a mail address, say. Nothing that parts a header's values, and nothing that markup is made of,
# as reports and hints tell the name. It must fit into ASKED_BY_MAX.
_USER = re.compile(r"""(?!\*$)(?:(?![,"`()<>\[\]])[!-~]){1,254}""")
_USER_RULE = "at most 254 ASCII characters, and no spaces, commas, double quotes, backticks, (), <> or []; and not *"
_LINE = re.compile(rf"(?P<name>{NAME.pattern})\s+(?P<scope>read|act)\s+sha256:(?P<digest>[0-9a-f]{{64}})")


class Scope(StrEnum):
    """``act`` may also read."""

    read = "read"
    act = "act"


class Caller(NamedTuple):
    """Who was recognised, and how: what a browser sends by itself must come from our own page."""

    name: str
    scope: Scope
    by_browser: bool = False
    by_proxy: bool = False  # who may act is then a setting

    def may(self, scope: Scope) -> bool:
        return scope == Scope.read or self.scope == Scope.act


class Tokens:
    """The file of tokens, as it is now; one that does not exist holds none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read: tuple[int, int] | None = None  # when the file was changed, and its size
        self._callers: dict[bytes, Caller] = {}

    def __bool__(self) -> bool:
        return bool(self._known())

    def find(self, token: str) -> Caller | None:
        """Whose ``token`` it is, in the time that every wrong one takes, too. Raises BadSetting."""
        digest = hashlib.sha256(token.encode()).digest()
        found = None
        for known, caller in self._known().items():
            if hmac.compare_digest(known, digest):
                found = caller
        return found

    def _known(self) -> dict[bytes, Caller]:
        try:
            with self.path.open("rb") as file:
                state = os.fstat(file.fileno())
                if (seen := (state.st_mtime_ns, state.st_size)) != self._read:
                    self._callers, self._read = dict(_parsed(self.path, file.read().decode())), seen
        except FileNotFoundError:
            self._callers, self._read = {}, None
        except (OSError, UnicodeDecodeError) as error:
            raise BadSetting(name="RESHARD_WEB_TOKENS", value=self.path, why=f"cannot read it: {error}") from None
        return self._callers


def _parsed(path: Path, text: str) -> Iterable[tuple[bytes, Caller]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        if (match := _LINE.fullmatch(line.strip())) is None:
            why = f"line {number} is not `NAME read|act sha256:DIGEST`"
            raise BadSetting(name="RESHARD_WEB_TOKENS", value=path, why=why)
        yield bytes.fromhex(match["digest"]), Caller(match["name"], Scope(match["scope"]))


def add_token(path: Path, name: str, scope: Scope) -> str:
    """A new token, whose hash the file holds from now on; raises UsageError and BadSetting."""
    if not NAME.fullmatch(name):
        raise UsageError(what=f"{name!r} is not a valid name: use at most 63 letters, digits, '.', '@', '-' or '_'")
    token = PREFIX + secrets.token_urlsafe(TOKEN_BYTES)
    line = f"{name} {scope} sha256:{hashlib.sha256(token.encode()).hexdigest()}\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "rb+") as file:
            if (held := file.read()) and not held.endswith(b"\n"):  # an editor left its last line open
                line = f"\n{line}"
            file.write(line.encode())
    except OSError as error:
        raise BadSetting(name="RESHARD_WEB_TOKENS", value=path, why=f"cannot write it: {error.strerror}") from None
    return token


def own_token(tokens: Path) -> str:
    """The token of whoever runs the service, kept beside ``tokens`` for them alone once made; raises BadSetting."""
    kept = tokens.with_name(OWN)
    try:
        if kept.exists():
            token = kept.read_text().strip()
            if Tokens(tokens).find(token):
                return token
            kept.unlink()  # its line was taken out: that one is over
        token = add_token(tokens, _own_name(), Scope.act)
        with os.fdopen(os.open(kept, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(token)
    except (OSError, UnicodeDecodeError) as error:
        raise BadSetting(name="RESHARD_WEB_TOKENS", value=kept, why=f"cannot use it: {error}") from None
    return token


def _own_name() -> str:
    name = user_name()
    return name if NAME.fullmatch(name) else "owner"


def caller(
    headers: Headers, cookies: Mapping[str, str], peer: str | None, tokens: Tokens, settings: WebSettings
) -> Caller | None:
    """Who asks, by a bearer token, the trusted proxy's header or a browser's sign-in; None: nobody that is known.

    ``peer`` is the address that connected. The proxy's header counts where it stands once: one of two may be the
    client's own, which the proxy left in its place. Raises UserNameRefused, and BadSetting of the tokens' file.
    """
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return tokens.find(token.strip())
    if peer and (users := headers.getlist(settings.user_header)) and is_proxy(peer, settings):
        user, *more = users
        if more or not user:
            return None
        if not _USER.fullmatch(user):
            raise UserNameRefused(name=repr(user), rule=_USER_RULE)
        acts = "*" in settings.actors or user in settings.actors
        return Caller(user, Scope.act if acts else Scope.read, by_browser=True, by_proxy=True)
    found = tokens.find(cookies[COOKIE]) if COOKIE in cookies else None
    return found and found._replace(by_browser=True)


def is_proxy(peer: str, settings: WebSettings) -> bool:
    """Whether an address is that of the proxy whose header is believed."""
    try:
        address = ip_address(peer)
    except ValueError:  # a Unix socket has no address
        return False
    return any(address in network for network in settings.proxy)


def same_site(headers: Mapping[str, str]) -> bool:
    """Whether a request that changes something, made with what a browser sends by itself, comes from our own page.

    By what every browser says of a request's origin: https://www.w3.org/TR/fetch-metadata/ and the Origin header.
    """
    if (site := headers.get("sec-fetch-site")) is not None:
        return site == "same-origin"
    origin = headers.get("origin", "")
    return origin.partition("://")[2] == headers.get("host", "") != ""
