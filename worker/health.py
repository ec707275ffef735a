"""What a process answers over HTTP about itself: `/healthz`, `/readyz` and, of control, `/metrics`.

An orchestrator restarts what is not healthy, and waits for what is not ready; so only readiness depends on the broker.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

log = logging.getLogger(__name__)

REQUEST_TIMEOUT = 5.0  # seconds; who connects and says nothing holds a thread no longer

Why = Callable[[], str]  # what is wrong, in a few words; "" where nothing is


def serve(
    port: int, address: str, *, healthy: Why, ready: Why, metrics: CollectorRegistry | None = None
) -> WSGIServer | None:
    """Answer in threads of its own; port 0 takes a free one. Where the port is taken, the process goes on without."""
    checks, figures = {"/healthz": healthy, "/readyz": ready}, make_wsgi_app(metrics) if metrics else None

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics" and figures:
            return cast("Iterable[bytes]", figures(environ, start))
        if path not in checks:
            status, said = "404 Not Found", "only " + ", ".join([*checks, *(["/metrics"] if figures else [])])
        elif why := checks[path]():
            status, said = "503 Service Unavailable", why
        else:
            status, said = "200 OK", "ok"
        start(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{said}\n".encode()]

    kind = _IPv6 if ":" in address else ThreadingWSGIServer
    try:
        server: WSGIServer = make_server(address, port, answer, kind, Handler)
    except OSError as error:
        log.warning("cannot serve health on %s:%s: %s", address, port, error.strerror)
        return None
    threading.Thread(target=server.serve_forever, name="reshard-health", daemon=True).start()
    host = f"[{address}]" if ":" in address else address
    log.info("health%s on http://%s:%s", " and metrics" if metrics else "", host, port)
    return server


class _IPv6(ThreadingWSGIServer):
    address_family = socket.AF_INET6


class Handler(WSGIRequestHandler):
    timeout = REQUEST_TIMEOUT

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: probes come every few seconds."""
