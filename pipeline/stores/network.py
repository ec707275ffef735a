"""Where the answers of a Hub may lead, and how long they are: every connection to a host other than its own is checked.

A redirect, a listing's next link and an upload's URL are data from outside. Left alone they would let a Hub, or whoever
answers in its place, read what only this machine can reach: other services of its network, a cloud's metadata.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

import httpcore2
import httpx2

from reshard.pipeline.errors import BadSetting, HubRefused, HubUnreachable, UnsafeRedirect
from reshard.pipeline.limits import ANSWER_MAX

_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # RFC 6052: the last four bytes are an IPv4 address
# The same, as a network may have it for itself: RFC 8215, and RFC 4291's old form.
_OWN_NAT64 = [ipaddress.ip_network(network) for network in ("64:ff9b:1::/48", "::/96")]
# Where clouds tell a machine its secrets, beside the link-local addresses: AWS, Google, Oracle, Alibaba and Azure.
METADATA = [
    ipaddress.ip_network(network)
    for network in ("fd00:ec2::/32", "fd20:ce::/32", "fd00:c1::/32", "100.100.100.200/32", "168.63.129.16/32")
]


def resolve(host: str, port: int) -> list[str]:
    """The addresses of ``host``; raises OSError."""
    return [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The address that packets go to: of an IPv6 address that stands for an IPv4 one, that one."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(address.packed[-4:])
    return address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1] or address


def _is_metadata(text: str) -> bool:
    address = _address(text)
    if any(address in network for network in _OWN_NAT64):
        address = ipaddress.IPv4Address(address.packed[-4:])
    return address.is_link_local or any(address in network for network in METADATA)


def is_public(text: str) -> bool:
    """Whether anybody on the internet could have reached the address ``text``.

    >>> [is_public(a) for a in ("93.184.216.34", "10.0.0.1", "127.0.0.1", "::ffff:127.0.0.1", "169.254.169.254")]
    [True, False, False, False, False]
    """
    address = _address(text)
    return address.is_global and not (address.is_multicast or address.is_reserved or _is_metadata(text))


class Guard:
    """The hosts that calls to one endpoint may end at.

    The endpoint itself always. Beside it, by https, what resolves to public addresses. An endpoint that has a private
    address, as of a Hub in a company's network, may lead anywhere but to a cloud's metadata.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        parts = urlsplit(endpoint)
        self._own = (parts.hostname or "", parts.port or _port(parts.scheme))

    def check_url(self, url: httpx2.URL) -> None:
        """Raises UnsafeRedirect unless calls may go by this scheme to this host; its addresses are not looked up."""
        if not self._is_own(url.host, url.port or _port(url.scheme)) and not self._is_private and url.scheme != "https":
            raise self._refused(url.host, "which does not use HTTPS")
        if url.port and url.port > 65535:  # httpx connects to it, and urllib does not read it
            raise self._refused(url.host, "at a port that does not exist")

    def check(self, url: str) -> None:
        """``check_url`` for who connects without this module, and of what its host resolves to just now."""
        parts = httpx2.URL(url)
        try:
            self.check_url(parts)
        except httpx2.ConnectError as error:
            raise HubUnreachable(endpoint=self._endpoint, what=str(error)) from error
        with suppress(OSError, UnicodeError):
            self.addresses(parts.host, parts.port or _port(parts.scheme))

    def bound(self, response: httpx2.Response) -> None:
        """Have it raise HubRefused where it cannot be unpacked, or is longer than any answer and would fill the memory.

        The content of files is read raw, piece by piece, and has no such bound.
        """
        whole: Any = response
        pieces = whole.iter_bytes

        def bounded() -> Iterator[bytes]:
            size = 0
            try:
                for piece in pieces():
                    if (size := size + len(piece)) > ANSWER_MAX:
                        why = f"the response has more than {ANSWER_MAX:,} bytes; is this a Hub?"
                        raise self.useless(response.request, why)
                    yield piece
            except httpx2.DecodingError as error:
                raise self.useless(response.request, "the response cannot be decompressed") from error

        whole.iter_bytes = bounded  # httpx reads all of it by this, and has no setting for how much that may be

    def useless(self, request: httpx2.Request, why: str) -> HubRefused:
        """The error for an answer that no attempt makes better."""
        return HubRefused(endpoint=self._endpoint, what=f"{request.method} {request.url.path}", why=why)

    def addresses(self, host: str, port: int) -> list[str]:
        """What may be connected to of ``host``; the endpoint itself goes by name. Raises UnsafeRedirect, OSError."""
        if self._is_own(host, port):
            return [host]
        found = resolve(host, port)
        allowed = [a for a in found if (not _is_metadata(a) if self._is_private else is_public(a))]
        if not allowed:
            raise self._refused(host, "which has no public address")
        return allowed

    def _is_own(self, host: str, port: int) -> bool:
        return (host.casefold(), port) == self._own

    @cached_property
    def _is_private(self) -> bool:
        """Raises ConnectError, and is asked anew the next time, while the endpoint's own name cannot be looked up."""
        try:
            return not any(is_public(address) for address in resolve(*self._own))
        except (OSError, UnicodeError) as error:
            raise httpx2.ConnectError(f"{self._own[0]}: {error}") from error

    def _refused(self, host: str, why: str) -> UnsafeRedirect:
        return UnsafeRedirect(endpoint=self._endpoint, what=f"redirects to {host}", why=why)


def _port(scheme: str) -> int:
    return 443 if scheme == "https" else 80


class _CheckedBackend(httpcore2.SyncBackend):
    """Connects to the very address that was checked: what a name resolves to a moment later changes nothing."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def connect_tcp(self, host: str, port: int, *arguments: Any, **options: Any) -> httpcore2.NetworkStream:
        try:
            addresses = self._guard.addresses(host, port)
        except (OSError, UnicodeError) as error:  # the latter for a name that IDNA cannot encode
            raise httpcore2.ConnectError(str(error)) from error
        for address in addresses[:-1]:
            try:
                return super().connect_tcp(address, port, *arguments, **options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout):
                continue
        return super().connect_tcp(addresses[-1], port, *arguments, **options)


PROXIES = frozenset({"http_proxy", "https_proxy", "all_proxy"})  # in small or capital letters


@contextmanager
def by_environment() -> Iterator[None]:
    """Inside, a client is made; raises BadSetting for certificates or a proxy of the environment that cannot be used.

    Of a proxy nothing is shown: its URL may hold a password.
    """
    try:
        yield
    except OSError as error:
        name = "SSL_CERT_FILE" if os.environ.get("SSL_CERT_FILE") else "SSL_CERT_DIR"
        raise BadSetting(name=name, value=os.environ.get(name, ""), why=error.strerror or str(error)) from error
    except (ImportError, ValueError, httpx2.InvalidURL) as error:
        for name in (name for name, value in os.environ.items() if value and name.lower() in PROXIES):
            try:
                httpx2.HTTPTransport(proxy=_proxy(os.environ[name]), verify=False).close()
            except ImportError:
                why = "a SOCKS proxy requires the package socksio"
            except (ValueError, httpx2.InvalidURL):
                why = "not the URL of a proxy, such as http://host:3128"
            else:
                continue
            raise BadSetting(name=name, value="...", why=why) from error
        raise


def _proxy(url: str) -> str:
    return url if "://" in url else f"http://{url}"


class GuardedClient(httpx2.Client):
    """An HTTP client whose every request, redirects included, ends where ``guard`` lets it.

    Through a proxy of the environment it is the proxy that looks names up, and its rules that decide about addresses.
    """

    def __init__(self, guard: Guard, event_hooks: dict[str, list[Any]], **options: Any) -> None:
        requests = [*event_hooks.get("request", ()), lambda request: guard.check_url(request.url)]
        responses = [*event_hooks.get("response", ()), guard.bound]
        super().__init__(event_hooks={"request": requests, "response": responses}, **options)
        self._guard = guard
        pool: Any = self._transport
        pool = pool._pool
        assert isinstance(pool._network_backend, httpcore2.NetworkBackend), "an httpx that connects in another way"
        pool._network_backend = _CheckedBackend(guard)  # httpx has no setting for it

    def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Of what httpx raises, the one error of a redirect that is none of the transport's is made the Hub's."""
        try:
            return super().send(request, **options)
        except httpx2.TooManyRedirects as error:
            raise self._guard.useless(request, "it redirects too many times; is this a Hub?") from error
