"""`reshard doctor`: problems of this installation or of a repository."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

from reshard.cli.arguments import argument, flag, takes
from reshard.cli.layout import show_health
from reshard.cli.output import Output, count, first, human_bytes, lines
from reshard.client.models.jobs import Installation, Repository
from reshard.pipeline.errors import ReshardError, UsageError
from reshard.pipeline.places import parse_place
from reshard.pipeline.text import printable

if TYPE_CHECKING:
    from reshard.pipeline.doctor.probes import Probe
    from reshard.worker.settings import Settings

SYMPTOMS_SHOWN = 30  # lines; --json has them all


@takes()
def doctor(
    output: Output,
    place: Annotated[
        str | None,
        argument("REPO_OR_DIR", "A repository or folder to check (default: this installation and its queue)."),
    ] = None,
    notify: Annotated[bool, flag("--notify", "Only send a test notification to the configured hooks.")] = False,
    layout: Annotated[
        bool, flag("--layout", "Only check how the layout of a repository's files affects loaders.")
    ] = False,
) -> None:
    """Check this installation or a repository for problems.

    For a repository, also shows which problems resharding would fix. --layout reads headers only.

    Example: reshard doctor openai-community/gpt2
    """
    if layout:
        if place is None or notify:
            raise UsageError(what="--layout requires REPO_OR_DIR, and cannot be used with --notify")
        show_health(place, output)
    elif place is None:
        _installation(output, notify)
    elif notify:
        raise UsageError(what="--notify and a repository cannot be used together")
    else:
        _repository(place, output)


def _installation(output: Output, notify: bool) -> None:
    from reshard.cli.web import unread_settings
    from reshard.pipeline.doctor.probes import Probe, hubs, this_machine
    from reshard.pipeline.stores.connect import Context
    from reshard.worker.probes import notices, queue
    from reshard.worker.settings import settings

    if notify:
        probes = list(notices(settings()))
    else:
        context = Context.from_env()
        unread = [Probe("settings", "some variables have no effect", text) for text in unread_settings()]
        probes = [*this_machine(context), *unread, *hubs(context), *queue(settings()), *_api(settings())]
    state = max((probe.state for probe in probes), key=("ok", "warning", "trouble").index)
    found = Installation.of(None, state=state, probes=probes)
    rows = []
    for probe in probes:
        error = f"{probe.error} ({probe.error.next_step})" if probe.error else ""
        rows.append((probe.state, probe.name, "; ".join(filter(None, (probe.says, probe.warning, error)))))
    output.result(found, lines(rows), state)
    for probe in probes:  # a job would fail with the first error, so this does too
        if probe.error:
            raise probe.error


def _api(asked: Settings) -> Iterator[Probe]:
    """The API that the commands of the queue ask, where one is set."""
    from reshard.client.connect import connect
    from reshard.client.operations.jobs import service
    from reshard.pipeline.doctor.probes import Probe

    if asked.api_url is not None:
        try:
            with connect() as session:
                service(session)
            yield Probe("api", asked.api_url)
        except ReshardError as error:
            yield Probe("api", asked.api_url, error=error)


def _repository(place: str, output: Output) -> None:
    from reshard.pipeline.doctor.health import examine
    from reshard.pipeline.stores.connect import Context, open_source
    from reshard.pipeline.verifying.meta_load import MetaLoader

    context = Context.from_env()
    source = open_source(parse_place(place), context)
    with closing(MetaLoader(tmpdir=context.tmpdir)) as meta_loader:
        health = examine(source, meta_loader, context.tmpdir)
    refused = health.refusals
    found = Repository.of(
        health,
        place=str(source.place),
        commit=source.pin.commit,
        visibility=source.visibility,
        state="trouble" if refused.always else "warning" if health.symptoms else "ok",
        bytes=health.weights,
        refused=refused,
    )
    output.result(found, _text(found), found.state)
    if refused.always:
        raise refused.always


def _text(found: Repository) -> str:
    symptoms, strict = found.symptoms, found.refused.require_model
    head = f"{printable(found.place)}: {count(found.tensors, 'tensor')}, {human_bytes(found.bytes)} of weights"
    rows = [f"{head}; {count(len(symptoms), 'problem') if symptoms else 'no problems found'}"]
    rows += first([f"{symptom.kind}: {symptom.text} -> {symptom.cure}" for symptom in symptoms], SYMPTOMS_SHOWN)
    if strict:
        rows.append(f"--require model would fail with {strict.code}: {strict.facts['why']}")
    return "\n".join(rows)
