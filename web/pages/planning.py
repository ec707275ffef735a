"""Ask what would come out, and submit it."""

from __future__ import annotations

from reshard.client.layout import advice_of
from reshard.client.operations import jobs as operations
from reshard.client.operations.table import read
from reshard.pipeline.errors import BadBody
from reshard.pipeline.places import NOWHERE
from reshard.pipeline.request import Options
from reshard.web.pages import forms
from reshard.web.pages.forms import Button, Form, Input, shown, submits
from reshard.web.pages.picture import drawing, picture
from reshard.web.pages.site import Call, Fields, Reply, page

FILES_SHOWN = 200
COMPARED_MAX = 20_000  # tensors of a model whose layouts a preview compares: each layout takes a second per 50,000
TARGET = Input("target", "text", (), "", "user/model-200MB; leave empty to plan only the split")
FORM = Form(
    "plan.html",
    "Plan a job",
    [[forms.PLACES[0], TARGET, *forms.SIZE, *forms.inputs(operations.Drafted, "priority")]],
    forms.OPTIONS,
    Button("Preview", "/plan"),
    Button("Submit", "/jobs"),
)


@page("GET", "/plan")
def form(call: Call) -> Reply:
    given = call.query.given("source", "target", "priority", *Options.model_fields)
    off = {one.name: "" for one in forms.OPTIONS if one.kind == "checkbox" and given.get(one.name) in {"false", "off"}}
    return shown(FORM, forms.defaults(FORM) | given | off)


@submits("/plan", lambda call: FORM)
def preview(call: Call) -> Reply:
    sent = _drafted(call.body)
    looked = operations.looked(call.session, sent)
    tensors = sum(len(one.tensors) for one in looked.known.opened.checkpoints)  # none if the target has them
    compares = 0 < tensors <= COMPARED_MAX
    advice = advice_of(looked.known, ranks=sent.options.ranks or None) if compares else None
    typed, found, drawn = forms.as_typed(call.body), looked.document, drawing(picture(looked.plan))
    return shown(FORM, typed, found=found, drawing=drawn, advice=advice, most=FILES_SHOWN)


@submits("/jobs", lambda call: FORM)
def submit(call: Call) -> Reply:
    """Queue it, or find the job that already carries it out."""
    sent = _drafted(call.body)
    if sent.target == NOWHERE:
        raise BadBody(where="target", why="the target is missing")
    return f"/jobs/{operations.submit(call.session, sent).id}"


def _drafted(body: Fields) -> operations.Drafted:
    """Raises BadBody and BadPlace."""
    return read(operations.Drafted, forms.request_fields(body), "the form")
