"""What a layout of weights costs those who load them, as data: of any repository, from its headers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from posixpath import basename
from shlex import quote
from typing import Any

from reshard.client.models import plans
from reshard.client.plan import rank_reads
from reshard.pipeline.checkpoint.discover import foreign_format
from reshard.pipeline.checkpoint.formats.safetensors import SUFFIX
from reshard.pipeline.drafting import outline
from reshard.pipeline.errors import BadRanks
from reshard.pipeline.places import NOWHERE
from reshard.pipeline.planning.beside import sort_out
from reshard.pipeline.planning.build import Known, make_plan
from reshard.pipeline.planning.layout import (
    Laid,
    as_it_is,
    misaligned,
    read_by,
    seeks,
    small_files,
    spread,
    tensor_parallel,
    to_be,
)
from reshard.pipeline.planning.model import CARD, MANIFEST, Plan
from reshard.pipeline.planning.readers import Readers
from reshard.pipeline.protocols import Source
from reshard.pipeline.request import Options, Request
from reshard.pipeline.tensors import Name

Given = dict[str, Any]  # fields of Options

WASTE = 1.05  # bytes read per byte needed, from which on a cut for ranks pays
MISALIGNED = 0.01  # share of all bytes, from which on padding pays
RANKS = "ep8", "pp4"  # of which health tells what they read; eight GPUs are a server, four machines a small cluster
TENSOR_RANKS = 8


def layout_of(source: Source, ranks: str) -> plans.Layout:
    """Which files each of ``ranks``, as ``ep8``, reads; raises BadRanks, and what opening the weights does."""
    known, readers = outline(source), Readers.of(ranks)
    files = as_it_is(known.opened)
    found, notes = read_by(files, readers, known.layers)
    small, others = _beside(known)
    return plans.Layout(
        place=str(source.place),
        commit=source.pin.commit,
        ranks=rank_reads(found, {file.path for file in files} | others, small),
        files=len(files),
        bytes=sum(file.size for file in files),
        notes=notes,
    )


def _beside(known: Known) -> tuple[list[str], set[str]]:
    """The files that every reader takes beside the weights, and other weights, which none takes."""
    carried, left_out = sort_out(known.listing, known.found, known.opened, Options())
    ours = {CARD, MANIFEST, *known.found.indexes} & known.listing.keys()
    others = {one.path for one in left_out if foreign_format(one.path) or one.path.endswith(SUFFIX)}
    return sorted({file.path for file in carried} | ours), others


def health_of(source: Source) -> plans.LayoutHealth:
    """What loaders suffer from the layout, and which command heals it; raises what opening the weights does."""
    known = outline(source)
    files = as_it_is(known.opened)
    now, then, command = _figures(files, known.layers), None, None
    if given := _cures(now, files):
        then = _figures(to_be(_cut(known, Options.of(**given))), known.layers)
    if then == now:  # as of a model whose tensors are all smaller than a block
        then = None
    if then:
        command = command_for(str(source.place), given)
    order = [name for part in known.found.sets for name in part.weight_map or ()]
    return plans.LayoutHealth(
        place=str(source.place),
        commit=source.pin.commit,
        state="warning" if command else "ok",
        bytes=sum(file.size for file in files),
        tensors=sum(len(one.tensors) for one in known.opened.checkpoints),
        now=now,
        index_seeks=seeks(files, order) if order else None,
        command=command,
        then=then,
    )


def _figures(files: Sequence[Laid], layers: Mapping[Name, int]) -> plans.LayoutFigures:
    found = {f"tp{TENSOR_RANKS}": tensor_parallel(files, TENSOR_RANKS)}
    for ranks in RANKS:
        try:
            found[ranks] = max(read_by(files, Readers.of(ranks), layers)[0], key=lambda one: one.bytes)
        except BadRanks:
            continue  # the model has no such parts, or the experts of a layer are one tensor
    spread_layers, every = spread(files)
    return plans.LayoutFigures(
        files=len(files),
        small_files=small_files(files),
        misaligned=[plans.Misaligned.of(one) for one in misaligned(files)],
        spread_layers=spread_layers,
        layers=every,
        reads=[plans.RanksRead.of(one, ranks=ranks) for ranks, one in found.items()],
    )


def _cures(now: plans.LayoutFigures, files: Sequence[Laid]) -> Given:
    """The options of a cut without what is wrong."""
    given: Given = {}
    size = sum(file.size for file in files)
    if any(one.ranks.startswith("ep") and one.bytes > WASTE * one.needed for one in now.reads):
        given["ranks"] = next(ranks for ranks in RANKS if ranks.startswith("ep"))
    elif now.spread_layers >= max(now.files, 2):  # greedy cuts part a layer at each border
        given["pack"] = "layers"
    if any(one.bytes > MISALIGNED * size for one in now.misaligned if one.rule in {"fastsafetensors", "4096"}):
        given["align"] = 4096
    if now.small_files > max(8, now.files // 2):
        given.setdefault("pack", "greedy")
    return given


def _cut(known: Known, options: Options) -> Plan:
    return make_plan(replace(known, request=Request(source=known.request.source, target=NOWHERE, options=options)))


def command_for(place: str, given: Given) -> str:
    """`reshard run` with these fields of Options, into a folder named after both."""
    typed = " ".join(f"--{'for' if name == 'ranks' else name} {value}" for name, value in given.items())
    into = f"./{basename(place.rstrip('/'))}-{given.get('ranks', 'cut')}"
    return f"reshard run {quote(place)} --to {quote(into)} {typed}"
