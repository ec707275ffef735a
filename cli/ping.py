"""`reshard ping`: the health check of a container, asked twice a minute, so it loads next to nothing."""

from __future__ import annotations

import os
from contextlib import closing
from http.client import HTTPConnection, HTTPException

from typer import echo

from reshard.pipeline.errors import NoAnswer

TIMEOUT = 5.0  # seconds
# Where a worker, control and the page answer: port, address, and the port where none is set. The environment itself is
# read, because checking all settings takes longer than all of this.
PROBES = (
    ("RESHARD_HEALTH_PORT", "RESHARD_METRICS_ADDRESS", ""),
    ("RESHARD_METRICS_PORT", "RESHARD_METRICS_ADDRESS", ""),
    ("RESHARD_WEB_PORT", "RESHARD_WEB_ADDRESS", "8474"),
)


def ping() -> None:
    """Check if a local worker, control process or web page is up.

    Requests /healthz on RESHARD_HEALTH_PORT, RESHARD_METRICS_PORT or
    RESHARD_WEB_PORT. Does not need the broker.

    Example: reshard ping
    """
    refused = []
    for port_variable, address_variable, usual in PROBES:
        port, address = os.environ.get(port_variable) or usual, os.environ.get(address_variable) or "127.0.0.1"
        if not port:
            continue
        try:
            with closing(HTTPConnection(address, int(port), timeout=TIMEOUT)) as asked:
                asked.request("GET", "/healthz")
                answer = asked.getresponse()
                said = answer.read(1000).decode(errors="replace").strip()
        except (OSError, HTTPException, ValueError) as error:
            refused.append(f"{address}:{port}: {error}")
            continue
        if answer.status == 200:
            echo(f"{address}:{port}: {said}")
            return
        ours = said and "<" not in said and "\n" not in said
        refused.append(f"{address}:{port}: {said if ours else f'HTTP {answer.status}, which is no answer of reshard'}")
    raise NoAnswer(why="; ".join(refused))
