"""What a layout of weights costs those who load them, as data, and which one to choose: from headers alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from posixpath import basename
from shlex import join
from typing import Any, Literal

from reshard.client.models import plans
from reshard.client.plan import rank_reads
from reshard.client.profiles import PROFILES
from reshard.pipeline.arguments import typed_options
from reshard.pipeline.checkpoint.formats.safetensors import SUFFIX
from reshard.pipeline.checkpoint.kinds import foreign_format
from reshard.pipeline.drafting import outline
from reshard.pipeline.errors import BadRanks
from reshard.pipeline.limits import TREE_PAGE
from reshard.pipeline.paths import resolved
from reshard.pipeline.places import NOWHERE, AnyPlace
from reshard.pipeline.planning.beside import sort_out
from reshard.pipeline.planning.build import Known, make_plan
from reshard.pipeline.planning.estimate import of_our_own
from reshard.pipeline.planning.existing import NOTHING
from reshard.pipeline.planning.layout import (
    Laid,
    as_it_is,
    misaligned,
    read_by,
    read_by_all,
    seeks,
    small_files,
    spread,
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
    wasted = any(rank.bytes > WASTE * rank.needed for rank in found)
    return plans.Layout(
        place=str(source.place),
        commit=source.pin.commit,
        ranks=rank_reads(found, {file.path for file in files} | others, small),
        files=len(files),
        bytes=sum(file.size for file in files),
        command=command_for(source.place, {"ranks": ranks}) if wasted else None,
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
    now = _figures(files, known.layers)
    given = _cures(now, files)
    then = _figures(to_be(_cut(known, given)), known.layers) if given else now
    heals = then != now  # they are the same of a model whose tensors are all smaller than a block
    order = [name for part in known.found.sets for name in part.weight_map or ()]
    return plans.LayoutHealth(
        place=str(source.place),
        commit=source.pin.commit,
        state="warning" if heals else "ok",
        bytes=sum(file.size for file in files),
        tensors=sum(len(one.tensors) for one in known.opened.checkpoints),
        now=now,
        index_seeks=seeks(files, order) if order else None,
        command=command_for(source.place, given) if heals else None,
        then=then if heals else None,
    )


def _figures(files: Sequence[Laid], layers: Mapping[Name, int]) -> plans.LayoutFigures:
    found = {f"tp{TENSOR_RANKS}": read_by_all(files, TENSOR_RANKS)}
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


def _cut(known: Known, given: Given) -> Plan:
    """The plan of another cut, with all else that was requested."""
    usual = Options().model_dump(include={"size", "pack", "ranks", "align"})
    options = known.request.options.model_copy(update=usual | given)
    request = Request(source=known.request.source, target=NOWHERE, options=options)
    return make_plan(replace(known, request=request, before=NOTHING))


def command_for(place: AnyPlace, given: Given) -> str:
    """`reshard run` with these fields of Options, into a folder named after both."""
    uses = {("size", size): ("ranks", use) for use, size in PROFILES.items()}
    pairs = (uses.get(pair, pair) for pair in given.items())
    path = str(place).rstrip("/")
    # A target is not within its source, where this folder is.
    beside = place.local is not None and resolved(path) in (here := resolved("."), *here.parents)
    into = f"{path if beside else f'./{basename(path)}'}-{given.get('ranks', 'cut')}"
    return join(["reshard", "run", place.spelled, "--to", into, *typed_options(pairs)])


# ---------------------------------------------------------------------------------------------------------- advice

Loader = Literal["transformers", "vllm", "mlx", "browser"]
LINK = 125_000_000  # bytes a second, 1 Gbit/s: of a server, and of a good line at home
ROUND_TRIP = 0.1  # seconds until a request is answered, across a continent
AT_ONCE = 8  # requests of a download: huggingface_hub 2.4, snapshot_download, ``max_workers``
# As huggingface_hub 2.4 downloads without hf_xet (snapshot_download, hf_hub_download): a repository's commit and the
# pages of its listing; of each file a HEAD and a GET, and of what is stored over Xet, as weights are, another GET.
PER_REPOSITORY, PER_FILE, PER_WEIGHTS = 1, 2, 3
NEAR = 0.05  # of all seconds or bytes: a difference that is worth no new copy of a model

# The bytes that loading takes beside those of the reader's own tensors.
# transformers 5.23 (modeling_utils.py, safe_open and get_slice) and vLLM (weight_utils.py,
# safetensors_weights_iterator) map files, whose pages the system takes back, and copy tensor by tensor. MLX 0.32
# (backend/common/load.cpp) reads each tensor to where it stays. A page of a browser has the whole file that it fetched,
# as an ArrayBuffer, before it takes tensors from it.
_BESIDE: dict[Loader, Callable[[Sequence[Laid]], int]] = {
    "transformers": lambda files: max((tensor.size for file in files for tensor in file.tensors), default=0),
    "vllm": lambda files: max((tensor.size for file in files for tensor in file.tensors), default=0),
    "mlx": lambda files: 0,
    "browser": lambda files: max((file.size for file in files), default=0),
}


def cuts(ranks: str | None) -> dict[str, Given]:
    """The layouts to choose from, by name, beside the one that is there."""
    aligned = {"ranks": ranks, "align": 4096} if ranks else {"align": 4096}
    return {
        "50 GB files": {"size": PROFILES["hub"]},
        "5 GB files": {},
        f"for {ranks}, aligned" if ranks else "5 GB files, aligned": aligned,
        "512 MB files": {"size": PROFILES["browser"]},
    }


def advice_of(
    known: Known,
    loader: Loader = "transformers",
    ranks: str | None = None,
    link: int = LINK,
    choices: Mapping[str, Given] | None = None,
) -> plans.Advice:
    """What each layout costs a reader on a ``link`` of so many bytes a second; with ``ranks``, the rank with the most.

    ``known`` is of `outline`. Raises BadRanks where no layout has such ranks.
    """
    readers, place = Readers.of(ranks) if ranks is not None else None, known.request.source

    def row(name: str, given: Given | None) -> tuple[plans.AdvisedLayout, int]:
        if given is None:
            files, small = as_it_is(known.opened), [known.listing[path].size for path in _beside(known)[0]]
        else:
            plan = _cut(known, given)
            files, small = to_be(plan), _written_beside(known, plan)
        try:
            every = read_by(files, readers, known.layers)[0] if readers else [read_by_all(files)]
        except BadRanks:
            if given is not None:
                raise
            every = [read_by_all(files)]  # of stacked experts, which a cut may separate
        most = max(every, key=lambda one: one.bytes)
        own = [file for file in files if file.path in {*most.files}]
        size = most.bytes + sum(small)
        pages = ceil((len(files) + len(small)) / TREE_PAGE)
        requests = PER_REPOSITORY + pages + PER_WEIGHTS * len(own) + PER_FILE * len(small)
        made = plans.AdvisedLayout(
            name=name,
            command=None if given is None else command_for(place, given),
            files=len(own),
            largest=max((file.size for file in own), default=0),
            bytes=size,
            requests=requests,
            memory=most.needed + _BESIDE[loader](own),
            seconds=round(size / link + ROUND_TRIP * requests / AT_ONCE, 2),
        )
        return made, next(one.bytes for one in misaligned(own) if one.rule == "4096")

    rows = [row("as it is", None), *(row(name, given) for name, given in (choices or cuts(ranks)).items())]
    rows[_best(rows, loader)][0].recommended = True
    layouts = [one for one, _ in rows]
    commit = known.pin.commit
    return plans.Advice(place=str(place), commit=commit, loader=loader, ranks=ranks, link=link, layouts=layouts)


def _best(rows: Sequence[tuple[plans.AdvisedLayout, int]], loader: Loader) -> int:
    """The first that is near the best of those that the loader can use: in seconds, then memory, then alignment."""
    now, _ = rows[0]
    left: list[int] = [*range(len(rows))]
    if loader == "browser":
        left = [n for n in left if rows[n][0].largest <= PROFILES["browser"]] or left
    measures: list[tuple[list[float], float]] = [
        ([one.seconds for one, _ in rows], now.seconds),
        ([one.memory for one, _ in rows], now.memory),
    ]
    if loader == "vllm":  # whose faster ways to load read past the cache
        measures.append(([copied for _, copied in rows], now.bytes))
    for values, scale in measures:
        best = min(values[n] for n in left)
        left = [n for n in left if values[n] <= best + NEAR * scale]
    return left[0]


def _written_beside(known: Known, plan: Plan) -> list[int]:
    """The bytes of the files that a target gets beside its weights, but for the block that the card gets."""
    card = known.listing.get(CARD)
    texts = [len(edit.content.encode()) for edit in plan.edits]
    return [*(f.size for f in plan.carried), *texts, *of_our_own(plan).values(), card.size if card else 0]
