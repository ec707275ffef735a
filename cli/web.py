"""`reshard web, token`: the page and the API, and who may use them."""

from __future__ import annotations

import sys
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from reshard.cli.arguments import argument, read_output, takes
from reshard.cli.output import Output
from reshard.pipeline.errors import ReshardError

if TYPE_CHECKING:
    from reshard.web.settings import WebSettings


@lru_cache(maxsize=1)
def web_settings() -> WebSettings:
    """The settings of the page and the API, read once; raises BadSetting."""
    from reshard.web.settings import TOKENS, WebSettings
    from reshard.worker.settings import read, settings

    return read(WebSettings, tokens=settings().data_dir / TOKENS)


def web(
    address: Annotated[str | None, Option(help="Where to listen (default: RESHARD_WEB_ADDRESS).")] = None,
    port: Annotated[
        int | None, Option(min=1, max=65535, help="The port (default: RESHARD_WEB_PORT).", show_default=False)
    ] = None,
) -> None:
    """Serve the page and the API over HTTP.

    It needs the extra `web`, and a token by `reshard token`, or a proxy that signs people in.

    Example: reshard web --port 8474
    """
    from reshard.client.queue import open_queue
    from reshard.client.served import Served
    from reshard.web.serve import check_installed, check_reachable, serve
    from reshard.worker import logs
    from reshard.worker.settings import settings

    given = {"address": address, "port": port}
    own = web_settings().model_copy(update={name: value for name, value in given.items() if value is not None})
    check_installed()
    check_reachable(own)
    logs.configure(settings().log_format)
    with open_queue() as queue:
        serve(queue, partial(Served, queue, settings()), own)


@takes(output=read_output)
def token(
    *,
    name: Annotated[str, argument("NAME", "Who will use it; shown as who asked.")],
    act: Annotated[bool, Option("--act", help="May also submit, cancel and change; without it, only read.")] = False,
    output: Output,
) -> None:
    """Make a token for the page and the API, and show it once.

    Its hash goes into the file RESHARD_WEB_TOKENS; to end a token, delete its line there.

    Example: reshard token ada --act
    """
    from reshard.client.models.fleet import Token
    from reshard.web.auth import Scope, add_token

    scope: Literal["read", "act"] = "act" if act else "read"
    path = web_settings().tokens
    made = add_token(path, name, Scope(scope))
    text = f"{made}\nthis is {name}'s token, which may {scope}; {path} has its hash, so it is not shown again"
    output.result(Token(name=name, scope=scope, token=made, file=str(path)), text, made)


if __name__ == "__main__":  # as `reshard up` starts it
    try:
        web()
    except ReshardError as error:
        sys.exit(f"{error} ({error.next_step})")
