"""The process `reshard web`."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from importlib.util import find_spec

from reshard.client.queue import Queue
from reshard.client.served import Served
from reshard.pipeline.errors import BadSetting, ExtraMissing
from reshard.web.auth import Tokens, is_proxy
from reshard.web.settings import WebSettings, is_local

log = logging.getLogger(__name__)

BACKLOG = 256  # connections that wait to be accepted
END = 5  # seconds that requests are given when the process is to end
ANSWER = 2.0  # seconds that one that starts is given to say that it is there; then it is asked again


def check_installed() -> None:
    """Raises ExtraMissing unless the packages of the extra `web` are there."""
    for package in ("starlette", "uvicorn", "jinja2"):
        if find_spec(package) is None:
            raise ExtraMissing(package=package, extra="web", who="the page and the API")


def check_reachable(own: WebSettings) -> None:
    """Raises BadSetting where others than this machine's users could connect, and nobody is known who may."""
    if not is_local(own.address) and not own.proxy and not Tokens(own.tokens):
        why = "other addresses require a token (`reshard token NAME`) or RESHARD_WEB_PROXY"
        raise BadSetting(name="RESHARD_WEB_ADDRESS", value=own.address, why=why)


def listen(own: WebSettings) -> socket.socket:
    """A socket at its address and port; raises BadSetting."""
    family = socket.AF_INET6 if ":" in own.address else socket.AF_INET
    try:
        return socket.create_server((own.address, own.port), family=family, backlog=BACKLOG)
    except OSError as error:
        said = str(error.strerror).partition(" (")[0]  # Python repeats the address in it
        why = f"cannot listen on {own.address}: {said}"
        raise BadSetting(name="RESHARD_WEB_PORT", value=own.port, why=why) from None


def url(own: WebSettings) -> str:
    host = f"[{own.address}]" if ":" in own.address else own.address
    return f"http://{host}:{own.port}"


def check(own: WebSettings) -> None:
    """Raises BadSetting where it could not start."""
    check_reachable(own)
    listen(own).close()


def answers(own: WebSettings) -> bool:
    """Whether it is there; a socket that listens everywhere is reached by connecting to its address, too."""
    with closing(HTTPConnection(own.address, own.port, timeout=ANSWER)) as connection:
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False


def serve(queue: Queue, session: Callable[[str], Served], own: WebSettings) -> None:
    """Answer until SIGTERM, whoever asks by a ``session`` of theirs. Raises BadSetting."""
    import uvicorn

    from reshard.web.app import Web, build
    from reshard.web.connections import Connection, Server

    with listen(own) as listening:
        web = Web(queue, session, own)
        config = uvicorn.Config(
            build(web), http=Connection, ws="none", proxy_headers=False,
            log_config=None, access_log=False, server_header=False, timeout_graceful_shutdown=END,
            h11_max_incomplete_event_size=16_384,
        )  # fmt: skip
        log.info("serving the page on %s", url(own))
        Server(config, web.streams, lambda peer: is_proxy(peer, own)).run(sockets=[listening])
