"""`reshard plan`: what would be written, without writing it."""

from __future__ import annotations

from typing import Annotated

from reshard.cli.arguments import flag, read_plan, takes, value
from reshard.cli.help import OUTPUT
from reshard.cli.output import Output
from reshard.cli.progress import bar
from reshard.pipeline.errors import UsageError
from reshard.pipeline.places import NOWHERE
from reshard.pipeline.request import Request

DEVICES = "Devices"  # a section of help


@takes(request=read_plan)
def plan(
    request: Request,
    output: Output,
    max_memory: Annotated[
        str | None,
        value(
            "DEVICE=SIZE,...",
            "Memory per device, such as 0=10GiB,cpu=30GiB; the plan then shows which device gets each block.",
            section=DEVICES,
        ),
    ] = None,
    device_map: Annotated[
        str | None,
        value(
            "NAME|FILE",
            "Placement strategy (auto, balanced, balanced_low_0 or sequential) or a JSON file with a device map"
            " (default: sequential).",
            section=DEVICES,
        ),
    ] = None,
    all_: Annotated[bool, flag("--all", "Show every file and name, even if the plan is long.", OUTPUT)] = False,
) -> None:
    """Show what a job would write and delete, without doing it.

    Without --to, only the split of SRC is planned. If there is not enough disk space, or the key for --sign cannot be
    used, the command fails, as `reshard run` would.

    Example: reshard plan openai-community/gpt2 --size 200MB
    """
    from reshard.cli.devices import device_maps, device_text, read_placement
    from reshard.cli.plan_text import SHORT, WHOLE, plan_text
    from reshard.client.plan import look
    from reshard.pipeline.publishing.signing import Signer
    from reshard.pipeline.reshard import refuse_without_disk, refuse_without_room
    from reshard.pipeline.stores.connect import Context, own_limiters

    placed, memory = read_placement(device_map, max_memory)
    if isinstance(placed, str) and memory is None:
        raise UsageError(what=f"--device-map {placed} requires --max-memory with the devices and their sizes")
    with bar(output) as shown:
        context = Context.from_env(own_limiters(shown.waits))
        Signer.check(request.options.sign, context.sign_keys)
        document, made, source, target, _ = look(request, context)
    text = plan_text(document, WHOLE if all_ else SHORT)
    if memory is not None or placed is not None:
        document.device_maps = device_maps(made, source, memory, placed, context.tmpdir)
        text = "\n".join([text, *map(device_text, document.device_maps)])
    output.result(document, text, "\n".join(file.path for file in document.files))
    if request.target != NOWHERE and not made.published:
        refuse_without_disk(made, context.disk)
        refuse_without_room(made, target)
