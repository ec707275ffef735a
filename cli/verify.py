"""`reshard verify`: whether a checkpoint is complete, and whether it equals another one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

from reshard.cli.arguments import PLACE, argument, flag, read_output, read_rules, takes, value
from reshard.cli.job_text import check_row
from reshard.cli.output import Output, first, lines
from reshard.cli.progress import bar
from reshard.pipeline.errors import UsageError, VerifyFailed
from reshard.pipeline.request import DType, Experts, Options, Ties, parse_size

if TYPE_CHECKING:
    from reshard.pipeline.verifying.load import LoadOptions


Loader = Literal["transformers", "accelerate"]
AGAINST, LOAD = "With --against", "With --load"  # sections of help
FINDINGS_SHOWN = 10  # lines of one check; --json has them all


@takes(output=read_output)
def verify(
    *,
    place: Annotated[str, argument("REPO_OR_DIR", f"The checkpoint: {PLACE}")],
    against: Annotated[str | None, value("SRC", "The source it should equal, however it is cut.")] = None,
    dtype: Annotated[
        DType, Option(help="Expect the cast that `reshard run --dtype` does.", rich_help_panel=AGAINST)
    ] = "keep",
    dequantize: Annotated[
        bool, flag("--dequantize", "Expect plain weights, as of `reshard run --dequantize`.", section=AGAINST)
    ] = False,
    strip_prefix: Annotated[str | None, value("PREFIX", "Expect names without this prefix.", section=AGAINST)] = None,
    rename: Annotated[
        Path | None,
        value("RULES", "Expect names as these rules make them (default: as the manifest claims).", section=AGAINST),
    ] = None,
    experts: Annotated[
        Experts, Option(help="Expect experts so arranged (default: as the manifest claims).", rich_help_panel=AGAINST)
    ] = "keep",
    ties: Annotated[
        Ties, Option(help="Expect one name of tied weights, as of `reshard run --ties`.", rich_help_panel=AGAINST)
    ] = "keep",
    exclude: Annotated[list[str] | None, value("GLOB", "Files of SRC that `run` left out.", section=AGAINST)] = None,
    config_from: Annotated[
        str | None, value("PLACE", "The place of the files that SRC lacks.", section=AGAINST)
    ] = None,
    deep: Annotated[bool, flag("--deep", "Read every byte of each side once.")] = False,
    load: Annotated[bool, flag("--load", "Load and run the model; with --against, compare both outputs.")] = False,
    max_memory: Annotated[
        str | None,
        value("DEVICE=SIZE,...", "Limit of each device, as cpu=2GB; the rest is offloaded to disk.", section=LOAD),
    ] = None,
    device_map: Annotated[
        str | None,
        value("NAME|FILE", "A strategy of accelerate (default: auto), or a JSON file.", section=LOAD),
    ] = None,
    loader: Annotated[
        Loader | None,
        value(None, "accelerate uses load_checkpoint_and_dispatch (default: transformers).", section=LOAD),
    ] = None,
    memory: Annotated[
        str | None,
        value("SIZE", "Memory limit of the loading process, mapped files not counted (Linux).", section=LOAD),
    ] = None,
    output: Output,
) -> None:
    """Check a checkpoint, optionally against its source.

    It exits with 6 if a check failed, else with 0; the last line counts inconclusive and skipped checks.

    Example: reshard verify you/gpt2-200MB --against openai-community/gpt2 --deep
    """
    from reshard.pipeline import api

    loads = _load_options(load, loader, device_map, max_memory, memory)
    rules = read_rules(rename) if rename else ()
    left_out = tuple(exclude or ())
    changes = Options(
        dtype=dtype,
        dequantize=dequantize,
        strip_prefix=strip_prefix,
        rename=rules,
        experts=experts,
        ties=ties,
        exclude=left_out,
    )
    if against is None and (changes != Options() or config_from):
        names = "--dtype, --dequantize, --strip-prefix, --rename, --experts, --ties, --exclude and --config-from"
        raise UsageError(what=f"{names} need --against")
    with bar(output) as shown:

        def progress(done: int, total: int) -> None:
            shown.show("reading" if done else "checking", done, total if done else 0)

        verified = api.verify(
            place, against, deep=deep, changes=changes, config_from=config_from, load=loads, progress=progress
        )
    facts = {
        "place": str(verified.place),
        "commit": verified.pin.commit,
        "against": str(verified.against) if verified.against else None,
        "deep": deep,
        "result": verified.result,
        "checks": [check.to_dict() for check in verified.checks],
    }
    output.result(facts, _text(facts), verified.result)
    if failed := [check for check in verified.checks if check.result == "failed"]:
        first = next((finding for check in failed for finding in check.findings), failed[0].name)
        raise VerifyFailed(place=facts["place"], failed=len(failed), checks=len(verified.checks), first=first)


def _load_options(
    load: bool, loader: Loader | None, device_map: str | None, max_memory: str | None, memory: str | None
) -> LoadOptions | None:
    """How to load, or None without --load; raises UsageError."""
    from reshard.cli.devices import read_placement
    from reshard.pipeline.verifying.load import LoadOptions

    if not load:
        if loader or device_map or max_memory or memory:
            raise UsageError(what="--loader, --device-map, --max-memory and --memory need --load")
        return None
    placed, limits = read_placement(device_map, max_memory)
    most = parse_size(memory, "--memory") if memory else None
    return LoadOptions(
        loader=loader or "transformers", device_map="auto" if placed is None else placed, max_memory=limits, memory=most
    )


def _text(facts: dict[str, Any]) -> str:
    """Each check with its findings, then how it ended, and how many checks did not pass, if any."""
    shown: list[str] = []
    width = max(len(check["name"]) for check in facts["checks"])
    for check in facts["checks"]:
        name, result = check_row(check)
        shown += [
            lines([(f"{name:<{width}}", result)]),
            *(f"    {f}" for f in first(check["findings"], FINDINGS_SHOWN)),
        ]
    against = f" against {facts['against']}" if facts["against"] else ""
    ends = Counter(check["result"] for check in facts["checks"])
    others = [f"{ends[end]:,} {end}" for end in ("failed", "inconclusive", "skipped") if ends[end]]
    counted = f" ({', '.join(others)}, of {ends.total():,} checks)" if others else ""
    unread = "" if facts["deep"] else "; bytes were not compared (--deep does)"
    return "\n".join([*shown, f"{facts['place']}{against}: {facts['result']}{counted}{unread}"])
