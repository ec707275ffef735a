"""`reshard web, token`: the page and the API, and who may use them."""

from __future__ import annotations

import logging
import sys
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Annotated, Literal

from reshard.cli.arguments import argument, flag, takes, value
from reshard.cli.output import Output
from reshard.pipeline.errors import ReshardError

if TYPE_CHECKING:
    from reshard.web.settings import WebSettings
    from reshard.worker.settings import LogFormat

log = logging.getLogger(__name__)


@lru_cache(maxsize=1)
def web_settings() -> WebSettings:
    """The settings of the page and the API, read once; raises BadSetting."""
    from reshard.web.settings import TOKENS, WebSettings
    from reshard.worker.settings import read, settings

    return read(WebSettings, tokens=settings().data_dir / TOKENS)


def unread_settings() -> list[str]:
    """What to say of each variable that is named like a setting and is none."""
    from reshard.pipeline.stores.connect import ConnectSettings
    from reshard.web.settings import WebSettings
    from reshard.worker.settings import Settings, unread

    return unread(Settings, ConnectSettings, WebSettings)


def log_as_set(how: LogFormat) -> None:
    """Begin the log of a service, first with what it does not read of its environment."""
    from reshard.worker import logs

    logs.configure(how)
    for text in unread_settings():
        log.warning(text)


def web(
    address: Annotated[str | None, value("ADDRESS", "Address to listen on (default: RESHARD_WEB_ADDRESS).")] = None,
    port: Annotated[
        int | None, value("PORT", "Port to listen on (default: RESHARD_WEB_PORT).", min=1, max=65535)
    ] = None,
) -> None:
    """Serve the web page and the API.

    Requires the `web` extra, and a token from `reshard token` or a proxy that signs users in.

    Example: reshard web --port 8474
    """
    from reshard.client.queue import open_queue
    from reshard.client.served import Served
    from reshard.web.serve import check_installed, check_reachable, serve
    from reshard.worker.settings import settings

    given = {"address": address, "port": port}
    own = web_settings().model_copy(update={name: value for name, value in given.items() if value is not None})
    log_as_set(settings().log_format)
    check_installed()
    check_reachable(own)
    with open_queue() as queue:
        serve(queue, partial(Served, queue, settings()), own)


@takes()
def token(
    name: Annotated[str, argument("NAME", "Name of the token's owner, shown as the submitter of their jobs.")],
    output: Output,
    act: Annotated[bool, flag("--act", "Grant write access (submit, cancel and edit), not just read access.")] = False,
) -> None:
    """Create a token for the web page and the API.

    The token is shown only once; its hash is stored in the file RESHARD_WEB_TOKENS. To revoke the token, delete its
    line from that file.

    Example: reshard token ada --act
    """
    from reshard.client.models.fleet import Token
    from reshard.web.auth import Scope, add_token

    scope: Literal["read", "act"] = "act" if act else "read"
    path = web_settings().tokens
    made = add_token(path, name, Scope(scope))
    what = f"Token for {name} ({'read and write' if act else 'read only'})"
    text = f"{made}\n{what}. Copy it now: it won't be shown again. Its hash is in {path}."
    output.result(Token(name=name, scope=scope, token=made, file=str(path)), text, made)


if __name__ == "__main__":  # as `reshard up` starts it
    try:
        web()
    except ReshardError as error:
        sys.exit(f"{error} ({error.next_step})")
