"""What every request passes first: its host, the size of its body, and what browsers are told to hold to.

A body that is too long is refused where it is read: who sent it is known by then, and a form is answered with a page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reshard.client.operations.table import BODY_MAX
from reshard.pipeline.errors import BodyTooLarge, HostNotAllowed, ReshardError
from reshard.web.documents import failed
from reshard.web.settings import is_local

PROBES = frozenset({"/healthz", "/readyz"})  # an orchestrator asks them by an address of its own, and they tell nothing
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:]+)(?::[0-9]{0,5})?")
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
SPLIT = "split the catalog into smaller ones, or submit it with access to the broker (RESHARD_BROKER_URL)"
# Nothing from elsewhere, no inline script or style, and nobody may show the page inside another.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Refuses hosts that are not ours, as a name of another site that leads here is, and bodies that are too long."""

    def __init__(self, app: ASGIApp, hosts: Iterable[str], address: str) -> None:
        self._app = app
        shown = f"[{address}]" if ":" in address else address
        self._hosts = {*(host.lower() for host in hosts), shown, *(LOOPBACK if is_local(address) else ())}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        length, taken = headers.get("content-length", "0"), 0
        too_long = not length.isdecimal() or int(length) > BODY_MAX
        # Nothing else comes to be so long. A catalog of 5 MB takes ten seconds and 300 MB to read, in a shared process.
        cure = {"cure": SPLIT} if any(what in scope["path"] for what in ("catalogs", "schedules")) else {}

        async def limited() -> Message:
            nonlocal taken
            if too_long:
                raise BodyTooLarge(most=BODY_MAX, **cure)
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > BODY_MAX:
                raise BodyTooLarge(most=BODY_MAX, **cure)
            return message

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                answered = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    answered.setdefault(name, value)
            await send(message)

        error = None if scope["path"] in PROBES else self._wrong(headers)
        if error is None and too_long and scope["method"] in {"GET", "HEAD"}:  # whose body nobody reads
            error = BodyTooLarge(most=BODY_MAX)
        refused = None if error is None else failed(error)
        await (refused or self._app)(scope, limited, guarded)

    def _wrong(self, headers: Headers) -> ReshardError | None:
        host = headers.get("host", "").lower()
        found = _HOST.fullmatch(host)
        name = found[1] if found else host  # without the port, as the setting has it
        if found is None or name not in self._hosts:
            return HostNotAllowed(host=name or "(none)")
        return None
