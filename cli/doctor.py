"""`reshard doctor`: problems of this installation or of a repository."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Group, RenderableType
from rich.text import Text
from typer import Option

from reshard.cli.arguments import argument, read_output, takes
from reshard.cli.output import Output, count, first, lines
from reshard.pipeline.errors import UsageError
from reshard.pipeline.places import parse_place

if TYPE_CHECKING:
    from reshard.pipeline.doctor.probes import Probe
    from reshard.pipeline.errors import ReshardError

SYMPTOMS_SHOWN = 30  # lines; --json has them all


@takes(output=read_output)
def doctor(
    *,
    place: Annotated[
        str | None, argument("[REPO_OR_DIR]", "The repository or folder (default: this installation and its queue).")
    ] = None,
    notify: Annotated[bool, Option("--notify", help="Only send a test notice through the hooks that are set.")] = False,
    output: Output,
) -> None:
    """Find problems of this installation or of a repository.

    For a repository it shows which of them resharding would repair.
    """
    if notify and place is not None:
        raise UsageError(what="--notify and a repository exclude each other")
    if place is None:
        _installation(output, notify)
    else:
        _repository(place, output)


def _installation(output: Output, notify: bool) -> None:
    from reshard.pipeline.doctor.probes import hubs, this_machine
    from reshard.pipeline.stores.connect import Context
    from reshard.worker.probes import notices, queue
    from reshard.worker.settings import settings

    if notify:
        probes = list(notices(settings()))
    else:
        context = Context.from_env()
        probes = [*this_machine(context), *hubs(context), *queue(settings())]
    state = _state(probes)
    facts = {"state": state, "probes": [probe.to_dict() for probe in probes]}
    output.result(facts, lines([_row(probe) for probe in probes]), state)
    _fail_with([probe.error for probe in probes if probe.error])


def _state(probes: list[Probe]) -> str:
    found = {probe.state for probe in probes}
    return "trouble" if "trouble" in found else "warning" if "warning" in found else "ok"


def _row(probe: Probe) -> tuple[str, str, str]:
    told = [probe.says, probe.warning, f"{probe.error} ({probe.error.next_step})" if probe.error else ""]
    return probe.state, probe.name, "; ".join(part for part in told if part)


def _fail_with(errors: list[ReshardError]) -> None:
    """A job would fail with the first of them, so this does too."""
    if errors:
        raise errors[0]


def _repository(place: str, output: Output) -> None:
    from reshard.pipeline.doctor.health import examine
    from reshard.pipeline.stores.connect import Context, open_source
    from reshard.pipeline.verifying.meta_load import MetaLoader

    context = Context.from_env()
    source = open_source(parse_place(place), context)
    with closing(MetaLoader()) as meta_loader:
        health = examine(source, meta_loader, context.tmpdir)
    facts: dict[str, Any] = {
        "place": str(source.place),
        "commit": source.pin.commit,
        "visibility": source.visibility,
        "state": "trouble" if health.refused else "warning" if health.symptoms else "ok",
        "tensors": health.tensors,
        "bytes": health.weights,
        "symptoms": [asdict(symptom) for symptom in health.symptoms],
    }
    output.result(facts, _text(facts), facts["state"])
    _fail_with([health.refused] if health.refused else [])


def _text(facts: dict[str, Any]) -> RenderableType:
    symptoms = facts["symptoms"]
    head = f"{facts['place']}: {count(facts['tensors'], 'tensor')}, {facts['bytes']:,} bytes of weights"
    if not symptoms:
        return Text(f"{head}; no problems found")
    shown: list[RenderableType] = [Text(f"{head}; {count(len(symptoms), 'problem')}")]
    told = [f"{symptom['kind']}: {symptom['text']}\n    -> {symptom['cure']}" for symptom in symptoms]
    return Group(*shown, *(Text(line) for line in first(told, SYMPTOMS_SHOWN)))
