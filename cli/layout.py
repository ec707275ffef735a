"""`reshard layout`: what a layout of weights costs those who load them."""

from __future__ import annotations

from shlex import quote
from typing import Annotated

from reshard.cli.arguments import argument, read_output, takes, value
from reshard.cli.output import Output, count, human_bytes, lines
from reshard.cli.plan_text import rank_rows
from reshard.client.models.plans import Layout
from reshard.pipeline.places import parse_place

PLACE = Annotated[str, argument("REPO_OR_DIR", "A repository, a folder or a URL, reshard's or not.")]
WASTE = 1.05  # bytes read per byte needed, from which on another cut is worth a line


@takes(output=read_output)
def layout(
    *,
    place: PLACE,
    ranks: Annotated[str, value("RANKS", "Ranks that each read a part: ep8 for experts, pp4 for stages.")],
    output: Output,
) -> None:
    """Show which files each rank of a model reads.

    Reads headers only. Each rank gets its patterns for `hf download`, and reads against needs.

    Example: reshard layout mistralai/Mixtral-8x7B-v0.1 --ranks ep8
    """
    from reshard.client.layout import layout_of
    from reshard.pipeline.stores.connect import Context, open_source

    found = layout_of(open_source(parse_place(place), Context.from_env()), ranks)
    includes = [" ".join(f"--include {quote(pattern)}" for pattern in rank.patterns) for rank in found.ranks]
    output.listing([found], _layout_text(found, ranks), includes)


def _layout_text(found: Layout, ranks: str) -> str:
    head = f"{found.place}: {count(found.files, 'weight file')}, {human_bytes(found.bytes)}; {ranks}"
    rows = [*rank_rows(found.ranks, len(found.ranks)), *(("note", note) for note in found.notes)]
    if any(rank.bytes > WASTE * rank.needed for rank in found.ranks):
        rows.append(("next", f"reshard run {quote(found.place)} --to DST --for {ranks}, so that each reads its own"))
    return "\n".join([head, lines(rows)])
