"""What a page is: a function of a call, a template, and how forms, errors and the sign-in fit in."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol
from urllib.parse import parse_qs, quote

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from reshard.client.operations.table import Operation, read
from reshard.client.queue import Queue
from reshard.client.served import Served
from reshard.pipeline.errors import CrossSite, ReshardError, SignInNeeded
from reshard.web.auth import COOKIE, Caller, Scope, Tokens, own_token, same_site
from reshard.web.documents import status_of
from reshard.web.pages.render import render
from reshard.web.settings import WebSettings, is_local

STATIC = Path(__file__).with_name("static")
# Where a sign-in may lead: a path of ours, and not `//host`, which names another site.
_OURS = re.compile(r"/(?![/\\])[\x21-\x7e]*")


class Site(Protocol):
    """What pages need of the service."""

    own: WebSettings
    tokens: Tokens
    session: Callable[[str], Served]

    def caller(self, request: Request, scope: Scope) -> Caller: ...


class Fields(dict[str, list[str]]):
    """What a form or an address says; blanks around it do not count."""

    def one(self, name: str, default: str = "") -> str:
        return self.get(name, [default])[-1].strip()

    def text(self, name: str) -> str:
        """Lines as they were typed, with the line ends of a file; browsers send others."""
        return self.get(name, [""])[-1].replace("\r\n", "\n")

    def given(self, *names: str) -> dict[str, str]:
        """Those of ``names`` that are filled in."""
        return {name: self.one(name) for name in names if self.one(name)}


class Call(NamedTuple):
    """What a page, or one of its forms, is given of a request of somebody who is known."""

    session: Served
    caller: Caller
    path: Mapping[str, str]
    query: Fields
    body: Fields

    @property
    def queue(self) -> Queue:
        return self.session.queue


class Page(NamedTuple):
    """A template with what it shows."""

    template: str
    shown: Mapping[str, Any]
    status: int = 200


class Text(NamedTuple):
    """A file to be kept."""

    content: str
    name: str


Reply = Page | Text | str  # a str is where to go next
PAGES: list[tuple[Literal["GET", "POST"], str, Callable[[Call], Reply]]] = []


def page(method: Literal["GET", "POST"], path: str) -> Callable[[Callable[[Call], Reply]], Callable[[Call], Reply]]:
    """Adds a page, which takes ``read``, or what a form does, which takes ``act``."""

    def add(run: Callable[[Call], Reply]) -> Callable[[Call], Reply]:
        PAGES.append((method, path, run))
        return run

    return add


def act(do: Operation[..., Any], goes_to: str, path: str = "") -> None:
    """Adds a form that does an operation with its fields, by the operation's path or ``path``, and then leads on.

    ``goes_to`` may name what the path does.
    """

    @page("POST", path or do.path)
    def carry_out(call: Call) -> Reply:
        sent = {"body": read(do.body, call.body.given(*do.body.model_fields), "the form")} if do.body else {}
        do(call.session, **call.path, **sent)
        return goes_to.format_map({name: quote(value) for name, value in call.path.items()})


def routes(site: Site) -> list[BaseRoute]:
    return [
        *(Route(path, partial(_answer, site, run), methods=[method]) for method, path, run in PAGES),
        Route("/sign-in", partial(_sign_in, site), methods=["GET", "POST"]),
        Route("/sign-out", partial(_sign_out, site), methods=["POST"]),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]


def failed(request: Request, error: ReshardError, status: int | None = None) -> Response:
    """The page of an error; who is not known is sent to the sign-in."""
    if isinstance(error, SignInNeeded):
        path, query = request.url.path, request.url.query
        back = quote(f"{path}?{query}" if query else path)
        return RedirectResponse(f"/sign-in?next={back}" if request.method == "GET" else "/sign-in", 303)
    caller: Caller | None = getattr(request.state, "caller", None)
    shown = {"error": error.to_dict(), "path": "", "waits": None, "bulk_waits": None} | _known(request, caller)
    return HTMLResponse(render("error.html", shown), status or status_of(error))


def _known(request: Request, caller: Caller | None) -> dict[str, Any]:
    """Who is signed in, and what every page shows of them."""
    acts = caller is not None and caller.may(Scope.act)
    return {"caller": caller, "acts": acts, "cookie": COOKIE in request.cookies}


async def _answer(site: Site, run: Callable[[Call], Reply], request: Request) -> Response:
    try:
        scope = Scope.read if request.method in {"GET", "HEAD"} else Scope.act
        caller = request.state.caller = await run_in_threadpool(site.caller, request, scope)
        body = Fields()
        if scope == Scope.act:
            body = _fields((await request.body()).decode("utf-8", "replace"))
        query = _fields(request.url.query)
        call = Call(site.session(caller.name), caller, request.path_params, query, body)
        return await run_in_threadpool(_run, run, call, request)
    except ReshardError as error:
        return failed(request, error)


def _run(run: Callable[[Call], Reply], call: Call, request: Request) -> Response:
    with call.queue.answering():
        answer = run(call)
        if isinstance(answer, str):
            return RedirectResponse(answer, 303)
        if isinstance(answer, Text):
            attached = {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(answer.name)}"}
            return Response(answer.content, media_type="text/markdown; charset=utf-8", headers=attached)
        common = _known(request, call.caller) | {
            "path": request.url.path,
            "waits": call.queue.waits(bulk=False),
            "bulk_waits": call.queue.waits(bulk=True),
        }
    return HTMLResponse(render(answer.template, common | dict(answer.shown)), answer.status)


def _fields(text: str) -> Fields:
    return Fields(parse_qs(text, keep_blank_values=True))


async def _sign_in(site: Site, request: Request) -> Response:
    """The form, and what it sends: a token that is known becomes a cookie that scripts cannot read."""
    asked = _fields(request.url.query).one("next", "/")
    goes_to = asked if _OURS.fullmatch(asked) else "/"
    once, wrong = _fields(request.url.query).one("once"), ""
    try:
        if once and request.method == "GET":
            if token := await run_in_threadpool(_of_link, site, once):
                return _signed_in(request, goes_to, token)
            wrong = "This link has been used or has expired. Run `reshard up` again for a new one."
        if request.method == "POST":
            if not same_site(request.headers):
                return failed(request, CrossSite())
            token = _fields((await request.body()).decode("utf-8", "replace")).one("token")
            if await run_in_threadpool(site.tokens.find, token):
                return _signed_in(request, goes_to, token)
            wrong = "That token isn't valid."
    except ReshardError as error:
        return failed(request, error)
    shown = {"caller": None, "path": request.url.path, "next": goes_to, "wrong": wrong}
    return HTMLResponse(render("sign_in.html", shown), 401 if wrong else 200)


def _of_link(site: Site, once: str) -> str:
    """The token of whoever runs the service, for the link that `reshard up` showed; nothing for another."""
    if site.own.proxy or not is_local(site.own.address):
        return ""
    queue = site.session("").queue
    with queue.answering():
        return own_token(site.tokens.path) if queue.use_link(once) else ""


def _signed_in(request: Request, goes_to: str, token: str) -> Response:
    response = RedirectResponse(goes_to, 303)
    secure = "https" in {request.url.scheme, request.headers.get("x-forwarded-proto")}
    response.set_cookie(COOKIE, token, httponly=True, samesite="strict", secure=secure)
    return response


async def _sign_out(site: Site, request: Request) -> Response:
    if not same_site(request.headers):
        return failed(request, CrossSite())
    response = RedirectResponse("/sign-in", 303)
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return response
