"""`reshard up, down, worker, control`: the processes that carry out jobs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from reshard.cli.arguments import flag, takes, value
from reshard.cli.output import Output, agrees, lines
from reshard.cli.web import log_as_set, unread_settings, web_settings
from reshard.pipeline.request import Priority

if TYPE_CHECKING:
    from reshard.worker.local import Page, Service
    from reshard.worker.settings import Settings

SCREENS = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")  # variables by which a browser is at hand
Format = Literal["text", "json"]
LogFormat = Annotated[
    Format | None, value(None, "Log format; json writes one object per line (default: RESHARD_LOG_FORMAT).")
]


def _settings(log_format: Format | None) -> Settings:
    from reshard.worker.settings import settings

    return settings() if log_format is None else settings().model_copy(update={"log_format": log_format})


@takes()
def up(
    output: Output,
    restart: Annotated[bool, flag("--restart", "Replace a worker or control process that is stopped or hung.")] = False,
    log_format: LogFormat = None,
) -> None:
    """Start the broker, worker, control process and web page.

    Runs everything on this machine. Processes that are already running are left alone. The web page requires the `web`
    extra.

    Example: reshard up
    """
    from reshard.client.models.fleet import Up
    from reshard.pipeline.stores.credentials import Credentials
    from reshard.worker import local

    has_token = any(known.credential for known in Credentials.from_env().references())
    service = local.up(_settings(log_format), _page(), restart)
    link, no_link = _signing_in(service)
    notes = [*_notes(service, has_token), *([no_link] if no_link else []), *unread_settings()]
    rows = [("broker", service.broker)]
    rows += [("started", ", ".join(service.started))] if service.started else []
    rows += [("running", ", ".join(service.found))] if service.found else []
    rows += [("logs", str(service.log_dir)), *([("page", service.page)] if service.page else [])]
    rows += [("sign in", f"{link} (single use, expires in 10 minutes)")] if link else []
    rows += [("note", note) for note in notes]
    folders = {"data_dir": str(service.data_dir), "log_dir": str(service.log_dir)}
    output.result(Up.of(service, **folders, notes=notes, sign_in=link), lines(rows), service.broker)
    if link and output.human:
        offer(link)


def offer(link: str) -> None:
    """Open it, where a browser is at hand and whoever sits at the terminal wants to."""
    import webbrowser

    if sys.stdin.isatty() and any(name in os.environ for name in SCREENS) and agrees("Open the page in a browser?"):
        webbrowser.open(link)


def _page() -> Page | None:
    """The page, where its packages are there."""
    from reshard.pipeline.errors import ExtraMissing
    from reshard.web.serve import answers, check, check_installed, url
    from reshard.worker.local import Page

    try:
        check_installed()
    except ExtraMissing:
        return None
    own, command = web_settings(), [sys.executable, "-m", "reshard.cli.web"]
    return Page(url(own), command, partial(check, own), partial(answers, own))


def _signing_in(service: Service) -> tuple[str | None, str]:
    """What signs whoever types this in at the page, where it is reached on this machine alone; or why none does."""
    from reshard.client.queue import open_queue
    from reshard.pipeline.errors import BadSetting
    from reshard.web.auth import Tokens, own_token
    from reshard.web.settings import is_local

    if service.page is None:
        return None, f"the web page was not started: {service.no_page}" if service.no_page else ""
    own = web_settings()
    try:
        bool(Tokens(own.tokens))
        if own.proxy or not is_local(own.address):
            return None, ""
        own_token(own.tokens)
    except BadSetting as error:  # of the files of tokens; all else runs
        return None, f"no one can sign in to the web page: {error}"
    with open_queue() as queue:
        return f"{service.page}/sign-in?once={queue.new_link()}", ""


def _notes(service: Service, has_token: bool) -> Iterator[str]:
    """Who is silent, and how the environment of all, which is this one's or an older one's, affects their jobs."""
    yield from service.silent
    if service.folders:
        folders = ", ".join(service.folders)
        yield f"jobs can access these folders: {folders} (set RESHARD_ALLOWED_FOLDERS to change this)"
    if kept := [name for name in service.found if name != "broker"]:
        were, keep = ("were", "keep their") if len(kept) > 1 else ("was", "keeps its")
        named = " and ".join(filter(None, (", ".join(kept[:-1]), kept[-1])))
        again = "to use this shell's environment, run `reshard down`, then `reshard up`"
        yield f"{named} {were} already running and {keep} environment; {again}"
    if "worker" in service.started and not has_token:
        again = "run `hf auth login`, then `reshard down` and `reshard up`"
        yield f"the worker has no token, so it cannot write to Hub repositories; {again}"


@takes()
def down(output: Output) -> None:
    """Stop everything that `reshard up` started.

    Jobs are kept on disk and continue after the next `reshard up`.

    Example: reshard down
    """
    from reshard.client.models.fleet import Down
    from reshard.worker import local
    from reshard.worker.settings import settings

    stopped = local.down(settings())
    text = f"Stopped {', '.join(stopped)}" if stopped else "Nothing was running"
    output.result(Down(stopped=list(stopped)), text)


def worker(
    concurrency: Annotated[
        int | None, value("N", "Number of copies to run at once (default: RESHARD_CONCURRENCY).", min=1, max=64)
    ] = None,
    priority: Annotated[Priority | None, value(None, "Accept only jobs with this priority (default: both).")] = None,
    until_idle: Annotated[bool, flag("--until-idle", "Exit when no jobs are left (for batch systems).")] = False,
    log_format: LogFormat = None,
) -> None:
    """Run a worker in the foreground.

    On SIGTERM, the worker returns unfinished work to the queue and exits.

    Example: reshard worker --concurrency 2
    """
    from reshard.worker import local

    own = _settings(log_format)
    log_as_set(own.log_format)
    local.become_worker(own, concurrency, priority, until_idle)


def control(log_format: LogFormat = None) -> None:
    """Run the control process in the foreground.

    It wakes workers for waiting jobs, and starts scheduled jobs and catalogs.

    Example: reshard control
    """
    from reshard.worker.control import main

    own = _settings(log_format)
    log_as_set(own.log_format)
    main(own)
