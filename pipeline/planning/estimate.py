"""What carrying out a plan takes: the bytes it moves, memory, disk, calls of the Hub, and history kept. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import ceil
from typing import NamedTuple

from reshard.pipeline.figures import human_bytes
from reshard.pipeline.limits import (
    HUB_CALLS_MAX,
    HUB_RESOLVES_MAX,
    HUB_WINDOW,
    MEMORY_FLOOR,
    MEMORY_FLOOR_XET,
    PREUPLOAD_BATCH,
    SEAM_UPLOAD,
    STAGED_SHARDS_MAX,
    TREE_PAGE,
)
from reshard.pipeline.planning.existing import missing
from reshard.pipeline.planning.front_matter import licence
from reshard.pipeline.planning.model import MANIFEST, Plan
from reshard.pipeline.planning.ranges import adjoining, attested, joined, parts, read_plan
from reshard.pipeline.protocols import Visibility
from reshard.pipeline.tensors import Record, StoredFile


class Forecast(NamedTuple):
    reads: int  # requests for stretches of weight files
    read: int  # bytes of weight files
    written: int  # bytes of shards
    seams: int  # places where a shard's bytes stop being a source file's bytes in a row
    uploaded: int  # bytes that the target's store should not have yet
    at_most: bool  # that is all that is written: how much of it the store has already does not show beforehand

    @property
    def amplification(self) -> float:
        """Bytes read per byte written."""
        return self.read / self.written if self.written else 1.0

    def to_dict(self) -> dict[str, float]:
        return {**self._asdict(), "amplification": round(self.amplification, 4)}


def forecast(plan: Plan) -> Forecast:
    """What ``plan`` moves.

    A store of chunks has every stretch of the source but for the chunk that each seam cuts, and the headers. A target
    that is yet to be created will take chunks where its Hub gives them out.
    """
    records: dict[int, list[Record]] = {}
    for record in plan.records:
        records.setdefault(record.file, []).append(record)
    passing = [{n: attested(plan.files[n], records.get(n, ())) for n in group.attests} for group in plan.groups]
    shards = [[plan.shards[n] for n in group.shards] for group in plan.groups]
    read_plans = [read_plan(*one) for one in zip(shards, passing, strict=True)]
    written = sum(shard.size for shard in plan.shards)
    seams = sum(len(joined(place for part in parts(shard.entries) for place in part.places)) for shard in plan.shards)
    headers = sum(len(shard.header) for shard in plan.shards)
    cast = sum(entry.size for shard in plan.shards for entry in shard.entries if entry.cast)
    shared = plan.shares and plan.transports.target in ("xet", "")
    return Forecast(
        reads=sum(1 for segments in read_plans for _ in adjoining(segments)),
        read=sum(segment.stop - segment.start for segments in read_plans for segment in segments),
        written=written,
        seams=seams,
        uploaded=min(written, seams * SEAM_UPLOAD + headers + cast) if shared else written,
        at_most=written > 0 and not shared and plan.transports.target not in _NO_HUB,
    )


_NO_HUB = frozenset({"file", "http"})  # transports of folders and of object stores
# What a manifest says of a tensor, a weight file and itself beside their names: digests, sizes and punctuation.
_OF_TENSOR, _OF_FILE, _OF_MANIFEST = 37, 200, 4096  # bytes, at most; of a source file it says less
_OF_INDEX_LINE, _OF_INDEX = 8, 4096  # bytes, at most; of the index's metadata the planned ones are known


def of_our_own(plan: Plan) -> dict[str, int]:
    """How large the indexes and the manifest of ``plan`` become at most, in bytes by path."""
    quoted = json.encoder.encode_basestring
    names = [len("".join([quoted(tensor.name) for tensor, _, _ in shard.entries]).encode()) for shard in plan.shards]
    sizes = {}
    for output in plan.outputs:
        if (index := output.index) is not None:
            shards = [(names[n], len(plan.shards[n].entries), len(quoted(plan.shards[n].path))) for n in index.shards]
            lines = sum(name + count * (path + _OF_INDEX_LINE) for name, count, path in shards)
            sizes[index.path] = lines + len(json.dumps(index.metadata, indent=2)) + _OF_INDEX
    if plan.options.manifest and plan.shards:
        paths = (*(shard.path for shard in plan.shards), *(file.path for file in plan.files))
        files = sum(len(quoted(path).encode()) + _OF_FILE for path in paths)
        tensors = sum(len(shard.entries) for shard in plan.shards)
        options = len(json.dumps(plan.options.model_dump(mode="json")))
        sizes[MANIFEST] = files + sum(names) + tensors * _OF_TENSOR + options + _OF_MANIFEST
    return sizes


# --------------------------------------------------------------------------- memory, disk, calls, history

# Calls of one job, counted on the Hub of the tests; tests/pipeline/planning/test_estimate_needs.py counts them again.
_SOURCE_CALLS, _TARGET_CALLS = 3, 8  # info, listings, history, the commit: whatever the size of the model
_LISTINGS = 5  # of source and target, each of which has pages
_LFS_CALLS = 3  # for a shard: where to put it, whether it arrived, whether it is still there
_SMALL_FILES = 9  # that are read through the resolver: indexes, configs, the card, and again at the end


class Needs(NamedTuple):
    """Bytes, and requests over the whole job."""

    memory: int  # of a process that copies
    disk: int  # of one that copies: shards that wait to be sent, and tensors that are put in order
    least_disk: int  # of that, what it cannot do without
    target: int  # on the target folder's disk, beside what is there: the last state goes only after the commit
    api_calls: int
    resolver_calls: int
    history: int  # bytes of the target's old weights, which its history keeps until it is squashed


def needs(plan: Plan, before: Mapping[str, StoredFile]) -> Needs:
    """What ``plan`` needs; ``before`` is what the target holds now."""
    largest = max((shard.size for shard in plan.shards), default=0)
    spools = [_spooled(plan, number) for number in range(len(plan.shards))]
    to_folder, carried = plan.transports.target == "file", missing(plan.carried, before)
    from_hub, to_hub = plan.pin.named is not None, plan.transports.target not in _NO_HUB
    staged = to_hub and plan.transports.target != "xet"  # a shard lies there beside its tensor that is put in order
    surely = staged and plan.transports.target != ""  # which shows only once the target is there
    written = {shard.path for shard in plan.shards}
    replaced = [file for path, file in before.items() if path in written or path in plan.deletes]
    return Needs(
        memory=MEMORY_FLOOR_XET if "xet" in plan.transports else MEMORY_FLOOR,
        disk=(STAGED_SHARDS_MAX * largest if staged else 0) + max(spools, default=0),
        least_disk=max((s.size * surely + spool for s, spool in zip(plan.shards, spools, strict=True)), default=0),
        target=sum(s.size for s in plan.shards) + sum(f.size for f in carried) if to_folder else 0,
        api_calls=_api_calls(plan, from_hub, to_hub, len(before)),
        resolver_calls=(len(plan.files) + _SMALL_FILES if from_hub else 0) + (len(plan.shards) if to_hub else 0),
        history=sum(file.size for file in replaced if file.sha256) if to_hub else 0,
    )


def _spooled(plan: Plan, number: int) -> int:
    """Bytes of the largest tensor of a shard that has to be laid down, and of the scales that wait for weights."""
    made = [*parts(plan.shards[number].entries)]
    spans = (part.span for part in made if not part.kept and (part.after or not part.contiguous))
    return max(spans, default=0) + sum(part.span for part in made if part.kept)


def _api_calls(plan: Plan, from_hub: bool, to_hub: bool, files_before: int) -> int:
    calls = _SOURCE_CALLS if from_hub else 0
    if to_hub:
        pages = _LISTINGS * ((len(plan.shards) + len(plan.carried) + files_before) // TREE_PAGE)
        calls += _TARGET_CALLS + ceil(len(plan.carried) / PREUPLOAD_BATCH) + pages
        calls += len(plan.groups) + 2 if plan.transports.target == "xet" else _LFS_CALLS * len(plan.shards)
    return calls


class Room(NamedTuple):
    """Bytes that may be written to a folder's disk."""

    path: str
    free: int


def warnings(
    plan: Plan, need: Needs, visibility: Visibility, card: bytes, scratch: Room, target: Room | None
) -> list[str]:
    """What a person should think of before the job runs.

    ``card`` is the source's, empty where it has none; ``scratch`` is for temporary files, and ``target`` a folder that
    is written.
    """
    found = []
    if plan.pin.named and visibility != "public":
        seen = "" if plan.options.visibility == "public" else ", and a new target is private unless --public is given"
        found.append(f"the source is {visibility}: its terms also apply to copies{seen}")
    if plan.pin.named and licence(card) is None:
        found.append("the source does not state a license")
    if need.disk > scratch.free:
        free = human_bytes(scratch.free)
        found.append(f"temporary files need {human_bytes(need.disk)} in {scratch.path} ({free} free)")
    if target is not None and need.target > target.free:
        needed, free = human_bytes(need.target), human_bytes(target.free)
        found.append(f"a run will fail: the target needs {needed} next to {target.path} ({free} free)")
    if need.api_calls > HUB_CALLS_MAX or need.resolver_calls > HUB_RESOLVES_MAX:
        limit = f"{HUB_CALLS_MAX:,} calls and {HUB_RESOLVES_MAX:,} files in {HUB_WINDOW:.0f} s"
        found.append(f"without a paid plan, the Hub allows {limit}; the job will wait when it reaches that limit")
    return found
