"""What a layout of weights costs those who load them, as data: of any repository, from its headers alone."""

from __future__ import annotations

from reshard.client.models import plans
from reshard.client.plan import rank_reads
from reshard.pipeline.checkpoint.discover import foreign_format
from reshard.pipeline.checkpoint.formats.safetensors import SUFFIX
from reshard.pipeline.drafting import outline
from reshard.pipeline.planning.beside import sort_out
from reshard.pipeline.planning.build import Known
from reshard.pipeline.planning.layout import as_it_is, read_by
from reshard.pipeline.planning.model import CARD, MANIFEST
from reshard.pipeline.planning.readers import Readers
from reshard.pipeline.protocols import Source
from reshard.pipeline.request import Options


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
