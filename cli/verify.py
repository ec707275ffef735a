"""`reshard verify`: whether a checkpoint is whole, and whether it is another one's equal."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Group, RenderableType
from rich.text import Text
from typer import Argument, Option

from reshard.cli.arguments import DType, read_output, takes
from reshard.cli.outcome import told_check
from reshard.cli.output import Output
from reshard.cli.progress import Bar, bar
from reshard.pipeline.errors import UsageError, VerifyFailed
from reshard.pipeline.places import Folder, Hub, parse_place
from reshard.pipeline.request import Options, parse_size

if TYPE_CHECKING:
    from reshard.pipeline.protocols import Source
    from reshard.pipeline.publishing.history import Publication
    from reshard.pipeline.stores.connect import Context
    from reshard.pipeline.verifying.load import LoadOptions


class Loader(StrEnum):
    transformers = "transformers"
    accelerate = "accelerate"


FINDINGS_SHOWN = 10  # lines of one check; --json has them all


@takes(output=read_output)
def verify(
    *,
    place: Annotated[
        str,
        Argument(
            metavar="REPO_OR_DIR",
            help="What to look at: user/repo, user/repo@revision, a URL of the Hub, or a folder (./path, /path).",
            show_default=False,
        ),
    ],
    against: Annotated[
        str | None, Option(metavar="SRC", help="The checkpoint that it should equal, however cut.", show_default=False)
    ] = None,
    dtype: Annotated[
        DType, Option(help="For --against: SRC should be this after a cast, as `--dtype` of `run` makes it.")
    ] = DType.keep,
    strip_prefix: Annotated[
        str | None,
        Option(
            metavar="PREFIX", help="For --against: SRC's names should lack this, as `run` does it.", show_default=False
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        Option(metavar="GLOB", help="For --against: files of SRC that `run` left out.", show_default=False),
    ] = None,
    config_from: Annotated[
        str | None,
        Option(
            metavar="PLACE", help="For --against: where the files came from that SRC does not have.", show_default=False
        ),
    ] = None,
    deep: Annotated[bool, Option("--deep", help="Read every byte, once, of each side.")] = False,
    load: Annotated[
        bool,
        Option("--load", help="Load the model for real and run it once; with --against, both, to the same output."),
    ] = False,
    max_memory: Annotated[
        str | None,
        Option(
            metavar="DEVICE=SIZE,...",
            help="For --load: what each device may hold, as cpu=2GB; the rest is offloaded to disk.",
            show_default=False,
        ),
    ] = None,
    device_map: Annotated[
        str | None,
        Option(
            metavar="NAME|FILE",
            help="For --load: auto, balanced, balanced_low_0, sequential, or JSON of devices by module, as disk.",
            show_default="auto",
        ),
    ] = None,
    loader: Annotated[
        Loader | None,
        Option(help="For --load: accelerate is its load_checkpoint_and_dispatch.", show_default="transformers"),
    ] = None,
    memory: Annotated[
        str | None,
        Option(
            metavar="SIZE",
            help="For --load: what the loading process may hold beside mapped files before it is ended; on Linux.",
            show_default=False,
        ),
    ] = None,
    output: Output,
) -> None:
    """Check a checkpoint, whoever made it: alone, or against the source that it should equal.

    It ends with 6 when a check failed, and with 0 otherwise; the last line says what was inconclusive or skipped.
    """
    from reshard.pipeline.stores.connect import Context, open_source
    from reshard.pipeline.stores.overlay import Borrowing
    from reshard.pipeline.verifying.load import check_load
    from reshard.pipeline.verifying.meta_load import MetaLoader
    from reshard.pipeline.verifying.verify import verify as make_checks

    loads = _load_options(load, loader, device_map, max_memory, memory)
    changes = Options(dtype=dtype.value, strip_prefix=strip_prefix, exclude=tuple(exclude or ()))
    if against is None and (changes != Options() or config_from):
        what = "--dtype, --strip-prefix, --exclude and --config-from say what became of SRC: they need --against"
        raise UsageError(what=what)
    context = Context.from_env()
    ours = open_source(parse_place(place), context)
    described = _described(parse_place(place), ours, context)
    theirs = open_source(parse_place(against), context) if against else None
    if theirs and config_from:
        theirs = Borrowing(theirs, open_source(parse_place(config_from), context))
    with bar(output) as shown, closing(MetaLoader(tmpdir=context.tmpdir)) as meta_loader:
        progress = _Progress(shown, ours, theirs)
        # First, because it may end in an error of what was asked for, and reading every byte takes longer.
        loaded = [check_load(ours, theirs, meta_loader, loads, progress.tick, context.tmpdir)] if loads else []
        checks = make_checks(
            ours,
            theirs,
            meta_loader,
            deep=deep,
            changes=changes,
            described=described,
            tick=progress.tick,
            tmpdir=context.tmpdir,
        )
        checks += loaded
    failed = [check for check in checks if check.result == "failed"]
    ends = Counter(check.result for check in checks)
    result = next((end for end in ("failed", "inconclusive") if ends[end]), "passed")
    facts = {
        "place": str(ours.place),
        "commit": ours.pin.commit,
        "against": str(theirs.pin) if theirs else None,
        "deep": deep,
        "result": result,
        "checks": [check.to_dict() for check in checks],
    }
    output.result(facts, _text(facts), result)
    if failed:
        first = next((finding for check in failed for finding in check.findings), failed[0].name)
        raise VerifyFailed(place=str(ours.place), failed=len(failed), checks=len(checks), first=first)


def _described(place: Hub | Folder, output: Source, context: Context) -> Publication | None:
    """The commit that brought the manifest; a repository that speaks of none is not asked for its history."""
    from reshard.pipeline.planning.model import MANIFEST
    from reshard.pipeline.stores.connect import open_target
    from reshard.pipeline.verifying.manifest_check import described_by

    if isinstance(place, Hub) and MANIFEST not in output.files():
        return None
    return described_by(open_target(place, Options(), context), output.pin.commit)


def _load_options(
    load: bool, loader: Loader | None, device_map: str | None, max_memory: str | None, memory: str | None
) -> LoadOptions | None:
    """How to load, or None where nobody asked for it; raises UsageError."""
    from reshard.cli.devices import check_placement, parse_max_memory, read_device_map
    from reshard.pipeline.verifying.load import LoadOptions

    if not load:
        if loader or device_map or max_memory or memory:
            raise UsageError(what="--loader, --device-map, --max-memory and --memory say how to load: they need --load")
        return None
    check_placement(device_map, max_memory)
    return LoadOptions(
        loader=(loader or Loader.transformers).value,
        device_map=read_device_map(device_map) if device_map else "auto",
        max_memory=parse_max_memory(max_memory) if max_memory else None,
        memory=parse_size(memory, "--memory") if memory else None,
    )


class _Progress:
    """Bytes of both sides, on one bar."""

    def __init__(self, shown: Bar, *sides: Source | None) -> None:
        from reshard.pipeline.checkpoint.discover import foreign_format
        from reshard.pipeline.checkpoint.formats.safetensors import SUFFIX

        self._bar = shown
        self._done = 0
        files = [file for side in sides if side is not None for file in side.files().values()]
        self._total = sum(f.size for f in files if f.path.endswith(SUFFIX) or foreign_format(f.path))
        shown.show("checking", 0, 0)

    def tick(self, count: int) -> None:
        self._done += count
        self._bar.show("reading", self._done, self._total)


def _text(facts: dict[str, Any]) -> RenderableType:
    shown: list[RenderableType] = []
    width = max(len(check["name"]) for check in facts["checks"])
    for check in facts["checks"]:
        name, said = told_check(check)
        shown.append(Text(f"{name:<{width}}  {said}"))
        findings = check["findings"]
        shown += [Text(f"    {finding}") for finding in findings[:FINDINGS_SHOWN]]
        if len(findings) > FINDINGS_SHOWN:
            shown.append(Text(f"    and {len(findings) - FINDINGS_SHOWN:,} more; --json has them"))
    against = f" against {facts['against']}" if facts["against"] else ""
    shown.append(Text(f"{facts['place']}{against}: {_end(facts)}"))
    return Group(*shown)


def _end(facts: dict[str, Any]) -> str:
    """How it ended, and how many checks did not pass, if any."""
    ends = Counter(check["result"] for check in facts["checks"])
    others = [f"{ends[end]:,} {end}" for end in ("failed", "inconclusive", "skipped") if ends[end]]
    return f"{facts['result']} ({', '.join(others)}, of {ends.total():,} checks)" if others else str(facts["result"])
