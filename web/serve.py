"""The process `reshard web`."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from ipaddress import ip_address

from reshard.client.queue import Queue
from reshard.pipeline.errors import BadSetting, ExtraMissing
from reshard.web.auth import Tokens
from reshard.web.settings import WebSettings
from reshard.worker import logs
from reshard.worker.broker import broker_url
from reshard.worker.queue.jobs import JobStore
from reshard.worker.settings import Settings

log = logging.getLogger(__name__)

KEEP_ALIVE = 30  # seconds that an idle connection is kept
BACKLOG = 256  # connections that wait to be accepted
CONNECTIONS = 1000  # at once; beyond it one is answered 503
END = 5  # seconds that open streams are given when the process is to end


def check_installed() -> None:
    """Raises ExtraMissing unless the packages of the extra `web` are there."""
    for package in ("starlette", "uvicorn", "jinja2"):
        if find_spec(package) is None:
            raise ExtraMissing(package=package, extra="web", who="the page and the API need")


def check_reachable(own: WebSettings) -> None:
    """Raises BadSetting where others than this machine's users could connect, and nobody is known who may."""
    if not _local(own.address) and not own.proxy and not Tokens(own.tokens):
        why = "without a token (`reshard token NAME`) or RESHARD_WEB_PROXY it listens on this machine only"
        raise BadSetting(name="RESHARD_WEB_ADDRESS", value=own.address, why=why)


def serve(settings: Settings, own: WebSettings) -> None:
    """Answer until SIGTERM. Raises ExtraMissing, BadSetting, NoBroker, BrokerUnavailable."""
    check_installed()
    check_reachable(own)
    import uvicorn

    from reshard.web.app import Web, build

    logs.configure(settings.log_format)
    with JobStore.at(broker_url(settings)) as store:
        store.check_server()
        log.info("web is on http://%s:%s", own.address, own.port)
        app = build(Web(Queue(store), settings, own))
        uvicorn.run(
            app, host=own.address, port=own.port, log_config=None, access_log=False, server_header=False,
            proxy_headers=False, timeout_keep_alive=KEEP_ALIVE, backlog=BACKLOG, limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=END, h11_max_incomplete_event_size=16_384,
        )  # fmt: skip


def _local(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
