"""The HTTP service: routes made of endpoints, and what every request passes first."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Match, Route

from reshard.client import ROOT
from reshard.client.operations import operations
from reshard.client.operations.table import Body, Operation, read
from reshard.client.queue import Queue
from reshard.client.served import Served
from reshard.pipeline.errors import (
    BodyTooLarge,
    BrokerUnavailable,
    CrossSite,
    NoActor,
    NoSuchPage,
    ReshardError,
    ScopeMissing,
    SignInNeeded,
)
from reshard.web import hooks
from reshard.web.auth import Caller, Scope, Tokens, caller, same_site
from reshard.web.documents import document, failed
from reshard.web.guard import Guard
from reshard.web.openapi import openapi
from reshard.web.pages import catalogs as _catalogs  # noqa: F401 -- their pages are in site.routes
from reshard.web.pages import jobs as _jobs  # noqa: F401
from reshard.web.pages import overview, planning, schedules  # noqa: F401
from reshard.web.pages import site as pages
from reshard.web.settings import WebSettings
from reshard.web.streams import Streams, follow

log = logging.getLogger(__name__)


class Web:
    """What all requests share."""

    def __init__(self, queue: Queue, session: Callable[[str], Served], own: WebSettings) -> None:
        self.queue = queue
        self.session = session  # of whom it names
        self.own = own
        self.tokens = Tokens(own.tokens)
        self.streams = Streams(queue)
        self.hooks = asyncio.Semaphore(hooks.AT_ONCE)

    def caller(self, request: Request, scope: Scope) -> Caller:
        """Who asks, if they may.

        Raises what ``caller`` does, SignInNeeded, ScopeMissing, and CrossSite where a browser was misled.
        """
        peer = request.client.host if request.client else None
        found = caller(request.headers, request.cookies, peer, self.tokens, self.own)
        if found is None:
            raise SignInNeeded
        request.state.connection.recognize()
        if not found.may(scope):
            missing = NoActor if found.by_proxy else ScopeMissing
            raise missing(name=found.name, what=f"{request.method} {request.url.path}")
        if found.by_browser and request.method not in {"GET", "HEAD"} and not same_site(request.headers):
            raise CrossSite
        return found


def build(web: Web) -> Starlette:
    routes: list[BaseRoute] = [
        Route(ROOT + one.path, partial(_answer, web, one), methods=[one.method]) for one in operations()
    ]
    routes += [
        Route(f"{ROOT}/openapi.json", partial(_openapi, web)),
        Route(f"{ROOT}/events", partial(_events, web)),
        Route(f"{ROOT}/jobs/{{job}}/events", partial(_events, web)),
        Route("/hooks/hub", partial(_hook, web), methods=["POST"]),
        Route("/healthz", _healthy),
        Route("/readyz", partial(_ready, web)),
        *pages.routes(web),
    ]
    handlers: Mapping[Any, Any] = {
        ReshardError: _failed,
        HTTPException: _refused,
        ClientDisconnect: _gone,
        Exception: _broken,
    }
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Guard, hosts=web.own.hosts, address=web.own.address)],
        exception_handlers=handlers,
        lifespan=web.streams.running,
    )
    app.router.redirect_slashes = False  # to a scheme and a host that a proxy in front may not have
    return app


async def _answer(web: Web, asked: Operation[..., Any], request: Request) -> Response:
    found = await run_in_threadpool(web.caller, request, Scope(asked.scope))
    given: dict[str, Any] = {**request.path_params}
    if asked.query:
        given["query"] = read(asked.query, _parameters(request, asked.query))
    if asked.body:
        given["body"] = read(asked.body, await _sent(request, asked.body.most))
    session = web.session(found.name)
    return await run_in_threadpool(lambda: document(asked(session, **given).document()))


async def _sent(request: Request, most: int) -> bytes:
    """The body; raises BodyTooLarge."""
    if len(sent := await request.body()) > most:
        raise BodyTooLarge(most=most)
    return sent or b"{}"


def _parameters(request: Request, model: type[Body]) -> dict[str, Any]:
    """The query's parameters; those that may be given again as lists."""
    lists = {name for name, field in model.model_fields.items() if field.default_factory is list}
    return {
        name: request.query_params.getlist(name) if name in lists else value
        for name, value in request.query_params.items()
    }


async def _events(web: Web, request: Request) -> Response:
    found = await run_in_threadpool(web.caller, request, Scope.read)
    job = request.path_params.get("job")
    with web.queue.answering():
        id = await run_in_threadpool(web.queue.jobs.resolve, job) if job else None

    async def may() -> bool:
        try:
            await run_in_threadpool(web.caller, request, Scope.read)
        except ReshardError:  # their line was taken out, or the file cannot be read
            return False
        return True

    return await follow(web.streams, id, found.name, request.headers.get("last-event-id"), may)


async def _hook(web: Web, request: Request) -> Response:
    hooks.check_secret(request.headers.get(hooks.SECRET), web.own.hook_secret)
    request.state.connection.recognize()
    payload = read(hooks.Payload, await request.body())
    async with web.hooks:  # the others wait without a thread, which everybody's requests need
        done = await run_in_threadpool(hooks.take, payload, web.session("a webhook"))
    return document(done.document())


async def _openapi(web: Web, request: Request) -> Response:
    await run_in_threadpool(web.caller, request, Scope.read)
    return JSONResponse(openapi(ROOT, operations()))


async def _healthy(request: Request) -> Response:
    return PlainTextResponse("ok\n")


async def _ready(web: Web, request: Request) -> Response:
    try:
        with web.queue.answering():
            await run_in_threadpool(web.queue.jobs.counts)
    except BrokerUnavailable:
        return PlainTextResponse("the broker is not responding\n", 503)
    return PlainTextResponse("ok\n")


async def _failed(request: Request, error: ReshardError) -> Response:
    response = failed(error)
    if response.status_code >= 500:
        log.warning("%s %s: %s", request.method, request.url.path, error, extra=error.logged)
    return response


async def _refused(request: Request, error: HTTPException) -> Response:
    none, status = NoSuchPage(method=request.method, path=request.url.path), error.status_code
    response = failed(none, status) if _of_api(request) else pages.failed(request, none, status)
    if status == 405:
        response.headers["Allow"] = ", ".join(_allowed(request))
    return response


def _allowed(request: Request) -> list[str]:
    """The methods of a path, each of which may have a route of its own; of static files those that read."""
    found = [route for route in request.app.routes if route.matches(request.scope)[0] != Match.NONE]
    return sorted({method for route in found for method in getattr(route, "methods", ())} or {"GET", "HEAD"})


async def _gone(request: Request, error: Exception) -> Response:
    """Nobody gets it: the connection ended before its request was whole."""
    return Response(status_code=400)


async def _broken(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    told = ReshardError(what=f"{type(error).__name__} (see the log of `reshard web`)")
    return failed(told) if _of_api(request) else pages.failed(request, told)


def _of_api(request: Request) -> bool:
    return request.url.path.startswith("/api/")
