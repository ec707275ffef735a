"""`reshard web, token`: the page and the API, and who may use them."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from reshard.cli.arguments import argument, read_output, takes
from reshard.cli.output import Output


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
    from reshard.web.serve import serve
    from reshard.web.settings import web_settings
    from reshard.worker.settings import settings

    given = {"address": address, "port": port}
    own = web_settings().model_copy(update={name: value for name, value in given.items() if value is not None})
    serve(settings(), own)


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
    from reshard.web.auth import Scope, add_token
    from reshard.web.settings import web_settings

    path, scope = web_settings().tokens, Scope.act if act else Scope.read
    made = add_token(path, name, scope)
    text = f"{made}\nthis is {name}'s token, which may {scope}; {path} has its hash, so it is not shown again"
    output.result({"name": name, "scope": scope, "token": made, "file": str(path)}, text, made)
