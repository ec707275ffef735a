"""Ask what would come out, and submit it."""

from __future__ import annotations

from reshard.client.layout import advice_of
from reshard.client.operations.jobs import Drafted
from reshard.client.operations.jobs import submit as submit_job
from reshard.client.operations.table import read
from reshard.client.plan import look
from reshard.pipeline.errors import BadBody
from reshard.pipeline.places import NOWHERE
from reshard.pipeline.request import Options
from reshard.web.pages.forms import (
    OPTIONS,
    PLACES,
    SIZE,
    Button,
    Form,
    Input,
    as_typed,
    defaults,
    inputs,
    request_fields,
    shown,
    submits,
)
from reshard.web.pages.picture import drawing, picture
from reshard.web.pages.site import Call, Fields, Reply, page

FILES_SHOWN = 200
COMPARED_MAX = 20_000  # tensors of a model whose layouts a preview compares: each layout takes a second per 50,000
TARGET = Input("target", "text", (), "", "user/model-200MB; leave empty to plan only the split")
FORM = Form(
    "plan.html",
    "Plan a job",
    [[PLACES[0], TARGET, *SIZE, *inputs(Drafted, "priority")]],
    OPTIONS,
    Button("Preview", "/plan"),
    Button("Submit", "/jobs"),
)


@page("GET", "/plan")
def form(call: Call) -> Reply:
    """The empty form, or one that is filled in from the address."""
    return shown(FORM, defaults(FORM) | call.query.given("source", "target", "priority", *Options.model_fields))


@submits("/plan", lambda call: FORM)
def preview(call: Call) -> Reply:
    """Changes nothing."""
    request = _drafted(call.body).request(call.caller.name)
    call.session.allow(request, has_target=request.target != NOWHERE)
    with call.session.hub() as context:
        looked = look(request, context)
    tensors = sum(len(one.tensors) for one in looked.known.opened.checkpoints)  # none if the target has them
    compares = 0 < tensors <= COMPARED_MAX
    advice = advice_of(looked.known, ranks=request.options.ranks or None) if compares else None
    drawn = drawing(picture(looked.plan))
    return shown(FORM, as_typed(call.body), found=looked.document, drawing=drawn, advice=advice, most=FILES_SHOWN)


@submits("/jobs", lambda call: FORM)
def submit(call: Call) -> Reply:
    """Queue it, or find the job that already carries it out."""
    sent = _drafted(call.body)
    if sent.target == NOWHERE:
        raise BadBody(where="target", why="the target is missing")
    return f"/jobs/{submit_job(call.session, sent).id}"


def _drafted(body: Fields) -> Drafted:
    """Raises BadBody and BadPlace."""
    return read(Drafted, request_fields(body), "the form")
