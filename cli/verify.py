"""`reshard verify`: whether a checkpoint is complete, and whether it equals another one."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

from reshard.cli.arguments import PLACE, argument, flag, option, read_options, sign, takes, value
from reshard.cli.help import OUTPUT
from reshard.cli.job_text import check_row
from reshard.cli.output import Output, first, lines
from reshard.cli.progress import bar
from reshard.client.models.jobs import Verified
from reshard.pipeline.arguments import as_option
from reshard.pipeline.errors import UsageError, VerifyFailed
from reshard.pipeline.request import Options
from reshard.pipeline.sizes import parse_size
from reshard.pipeline.text import printable
from reshard.pipeline.verifying.load import Loader, LoadOptions

AGAINST, LOAD = "With --against", "With --load"  # sections of help
FINDINGS_SHOWN = 10  # lines of one check; --json has them all


def read_expected(**typed: Any) -> Options:
    """How the source is to be changed before the checkpoint is held against it."""
    return Options.called(as_option, read_options(**typed))


EXPECTED = [name for name in Options.model_fields if Options.declared(name).expect]
sign(read_expected, (option(name, Options.declared(name).expect, AGAINST) for name in EXPECTED))


def read_load(
    load: Annotated[
        bool, flag("--load", "Load and run the model. With --against, compare its output with the source's.")
    ] = False,
    max_memory: Annotated[
        str | None,
        value(
            "DEVICE=SIZE,...", "Memory limit per device, such as cpu=2GB; the rest is offloaded to disk.", section=LOAD
        ),
    ] = None,
    device_map: Annotated[
        str | None,
        value("NAME|FILE", "A placement strategy (default: auto), or a JSON file with a device map.", section=LOAD),
    ] = None,
    loader: Annotated[
        Loader | None,
        value(None, "Load with transformers (default) or accelerate's load_checkpoint_and_dispatch.", section=LOAD),
    ] = None,
    memory: Annotated[
        str | None,
        value("SIZE", "Memory limit for the loading process, excluding mapped files (Linux only).", section=LOAD),
    ] = None,
) -> LoadOptions | None:
    """How to load, or None without --load; raises UsageError."""
    from reshard.cli.devices import read_placement

    if not load:
        if any(given is not None for given in (loader, device_map, max_memory, memory)):
            raise UsageError(what="--loader, --device-map, --max-memory and --memory require --load")
        return None
    placed, limits = read_placement(device_map, max_memory)
    most = parse_size(memory, "--memory") if memory is not None else None
    return LoadOptions(
        loader=loader or "transformers", device_map="auto" if placed is None else placed, max_memory=limits, memory=most
    )


@takes(expected=read_expected, loads=read_load)
def verify(
    *,
    place: Annotated[str, argument("REPO_OR_DIR", f"The checkpoint: {PLACE}")],
    against: Annotated[str | None, value("SRC", "The source to compare with; it can be split differently.")] = None,
    expected: Options,
    deep: Annotated[
        bool, flag("--deep", "Read and check every byte of the checkpoint, and of the source with --against.")
    ] = False,
    loads: LoadOptions | None,
    signed_by: Annotated[
        list[str] | None, value("KEY", "Require a signature by this public key or certificate (PEM). Can be repeated.")
    ] = None,
    builder: Annotated[str | None, value("ID", "With --signed-by, require this builder ID in the provenance.")] = None,
    verbose: Annotated[bool, flag("--verbose/-v", "Show the details of each check.", OUTPUT)] = False,
    output: Output,
) -> None:
    """Check a checkpoint, optionally against its source.

    Exits with 6 if a check failed, and with 0 otherwise. The last line says how many checks were inconclusive or
    skipped.

    Example: reshard verify you/gpt2-200MB --against openai-community/gpt2 --deep
    """
    from reshard.pipeline import api
    from reshard.pipeline.stores import heap

    heap.for_copies()
    with bar(output) as shown:
        verified = api.verify(
            place,
            against,
            deep=deep,
            changes=expected.model_copy(update={"config_from": None}),
            config_from=expected.config_from,
            load=loads,
            signed_by=signed_by,
            builder=builder,
            progress=lambda done, total: shown.show("reading" if done else "checking", done, total if done else 0),
        )
    pin, source = verified.pin, str(verified.against) if verified.against else None
    found = Verified.of(verified, place=str(verified.place), commit=pin.commit, against=source, deep=deep)
    output.result(found, _text(found, verbose), found.result)
    if failed := [check for check in found.checks if check.result == "failed"]:
        first = next((finding for check in failed for finding in check.findings), failed[0].name)
        raise VerifyFailed(place=found.place, failed=len(failed), checks=len(found.checks), first=first)


def _text(found: Verified, verbose: bool) -> str:
    """Each check with its findings, then how it ended, and how many checks did not pass, if any."""
    shown: list[str] = []
    width = max(len(check.name) for check in found.checks)
    for check in found.checks:
        name, result = check_row(check, verbose)
        shown += [
            lines([(f"{name:<{width}}", result)]),
            *(f"    {f}" for f in first(check.findings, FINDINGS_SHOWN)),
        ]
    against = f" against {found.against}" if found.against else ""
    ends = Counter(check.result for check in found.checks)
    others = [f"{ends[end]:,} {end}" for end in ("failed", "inconclusive", "skipped") if ends[end]]
    counted = f" ({', '.join(others)}, of {ends.total():,} checks)" if others else ""
    unread = "" if found.deep else "; bytes not compared (use --deep)"
    place = printable(f"{found.place}{against}")
    return "\n".join([*shown, f"{place}: {found.result}{counted}{unread}"])
