"""`reshard layout`, `advise` and `doctor --layout`: what a layout of weights costs those who load them."""

from __future__ import annotations

import re
from contextlib import suppress
from shlex import quote
from typing import Annotated

from typer import Option

from reshard.cli.arguments import argument, takes, value
from reshard.cli.output import Output, count, human_bytes, lines
from reshard.cli.plan_text import rank_rows
from reshard.client.layout import LINK, Loader, advice_of, health_of, layout_of
from reshard.client.models.plans import Advice, Layout, LayoutFigures, LayoutHealth
from reshard.client.text import human_rate, lasted
from reshard.pipeline.drafting import outline
from reshard.pipeline.errors import BadSize, UsageError
from reshard.pipeline.places import parse_place
from reshard.pipeline.sizes import parse_size
from reshard.pipeline.stores.connect import Context, open_source
from reshard.pipeline.text import printable

PLACE = Annotated[str, argument("REPO_OR_DIR", "Any repository, folder or URL, even if reshard did not publish it.")]


@takes()
def layout(
    place: PLACE,
    ranks: Annotated[
        str, value("RANKS", "How the model is split across ranks: ep8 for 8 expert ranks, pp4 for 4 pipeline stages.")
    ],
    output: Output,
) -> None:
    """Show which files each rank of a model reads.

    Reads headers only. For each rank, shows the patterns for `hf download`, how much it reads, and how much of that it
    needs.

    Example: reshard layout mistralai/Mixtral-8x7B-v0.1 --ranks ep8
    """
    found = layout_of(open_source(parse_place(place), Context.from_env()), ranks)
    includes = [" ".join(f"--include {quote(pattern)}" for pattern in rank.patterns) for rank in found.ranks]
    output.listing([found], _layout_text(found, ranks), includes)


def _layout_text(found: Layout, ranks: str) -> str:
    head = f"{printable(found.place)}: {count(found.files, 'weight file')}, {human_bytes(found.bytes)}; {ranks}"
    rows = [*rank_rows(found.ranks, len(found.ranks)), *(("note", note) for note in found.notes)]
    if found.command:
        rows.append(("next", found.command))
    return "\n".join([head, lines(rows)])


# What is told of each rule of client/layout.py.
_RULES = {
    "fastsafetensors": "fastsafetensors (header, 16 bytes)",
    "runai": "Run:ai streamer (element)",
    "512": "direct reads (512 bytes)",
    "4096": "direct reads, GPUDirect (4,096 bytes)",
    "16384": "Metal pages (16 KiB)",
}


def show_health(place: str, output: Output) -> None:
    found = health_of(open_source(parse_place(place), Context.from_env()))
    output.result(found, _health_text(found), found.command or found.state)


def _health_text(found: LayoutHealth) -> str:
    head = f"{printable(found.place)}: {count(found.tensors, 'tensor')}, {human_bytes(found.bytes)} of weights"
    now, then = _figures(found.now), _figures(found.then) if found.then else {}
    rows = [("", "now", "then"), *((name, text, then.get(name, "")) for name, text in now.items())]
    told = [head, lines(rows if then else [row[:2] for row in rows[1:]])]
    if found.index_seeks is not None:
        told.append(f"seeks when reading in index order: {found.index_seeks:,}; in file order: {found.now.files:,}")
    told.append(f"next: {printable(found.command)}" if found.command else "no other split would improve this layout")
    return "\n".join(told)


def _figures(of: LayoutFigures) -> dict[str, str]:
    found = {"files": f"{of.files:,}", "files under 50 MB": f"{of.small_files:,}"}
    for one in of.misaligned:
        found[f"misaligned: {_RULES[one.rule]}"] = f"{count(one.tensors, 'tensor')}, {human_bytes(one.bytes)}"
    found["layers split across files"] = f"{of.spread_layers:,} of {of.layers:,}"
    for rank in of.reads:
        found[f"a rank of {rank.ranks}"] = f"reads {human_bytes(rank.bytes)}, needs {human_bytes(rank.needed)}"
    return found


@takes()
def advise(
    place: PLACE,
    output: Output,
    loader: Annotated[Loader, Option(help="The program that loads the model.")] = "transformers",
    ranks: Annotated[
        str | None, value("RANKS", "How the model is split across ranks, such as ep8 (default: not split).")
    ] = None,
    link: Annotated[str | None, value("RATE", "Download speed, such as 50MB/s (default: 1Gbit/s).")] = None,
) -> None:
    """Compare layouts of a model and recommend one.

    Reads headers only. For each layout, shows the size, requests and time of an HTTP download, and the peak memory
    while loading.

    Example: reshard advise openai-community/gpt2 --loader browser
    """
    rate = LINK if link is None else _rate(link)
    found = advice_of(outline(open_source(parse_place(place), Context.from_env())), loader, ranks, rate)
    output.result(found, _advice_text(found), next((one.command for one in found.layouts if one.recommended), "") or "")


_BITS = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?([kMG])bit/s")


def _rate(typed: str) -> int:
    """Bytes a second of ``1Gbit/s`` or ``50MB/s``; raises UsageError."""
    rate = 0
    if match := _BITS.fullmatch(typed.strip()):
        rate = int(float(match[1]) * {"k": 1e3, "M": 1e6, "G": 1e9}[match[2]] / 8)
    elif typed.endswith("/s") and "bit" not in typed.lower():
        with suppress(BadSize):  # whose hint is about the size of files
            rate = parse_size(typed.removesuffix("/s"))
    if not rate:
        raise UsageError(what=f"--link {typed}: use a rate above zero, such as 1Gbit/s or 50MB/s")
    return rate


def _advice_text(found: Advice) -> str:
    reader = f"each rank of {found.ranks}" if found.ranks else "one reader"
    rows = [("", "files", "largest", "download", "requests", "memory", "time", "")]
    for one in found.layouts:
        sizes = (human_bytes(one.largest), human_bytes(one.bytes), f"{one.requests:,}", human_bytes(one.memory))
        mark = "recommended" if one.recommended else ""
        rows.append((one.name, f"{one.files:,}", *sizes, lasted(one.seconds), mark))
    (best,) = (one for one in found.layouts if one.recommended)
    head = f"{printable(found.place)} for {found.loader}, {reader}, at {human_rate(found.link)}"
    table = lines(rows, right={1, 2, 3, 4, 5, 6})
    then = f"next: {printable(best.command)}" if best.command else "keep the current layout: no other saves much"
    return "\n".join([head, table, then])
