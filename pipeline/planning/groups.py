"""Which files one lease copies, and which source files it attests. Pure."""

from __future__ import annotations

from collections.abc import Sequence, Set

from reshard.pipeline.checkpoint.open import Opened
from reshard.pipeline.planning.model import Cut, Group, Shard
from reshard.pipeline.planning.ranges import cuts_of


def grouped(shards: Sequence[Shard], opened: Opened) -> tuple[Group, ...]:
    """One group for each source file in which a shard begins.

    It attests that file, and those in which none begins and whose first tensor it copies.
    """
    begins: dict[int, list[int]] = {}
    holder: dict[int, int] = {}  # source file -> the file whose group reads it first
    home: list[int] = []  # of each shard, the file that it begins in
    reads: list[Set[int]] = []  # of each shard, the files that it is read from
    for number, shard in enumerate(shards):
        first = shard.entries[0].tensor.pieces[0].file
        begins.setdefault(first, []).append(number)
        home.append(first)
        reads.append({piece.file: None for entry in shard.entries for piece in entry.pieces}.keys())
        for file in reads[-1]:
            holder.setdefault(file, first)
    for checkpoint in opened.checkpoints:
        if checkpoint.keys:  # of its first file, which may have no tensors
            holder.setdefault(checkpoint.files[0], holder[checkpoint.tensors[0].pieces[0].file])
    attests: dict[int, list[int]] = {}
    summed = {r.file for c in opened.checkpoints for r in c.records if r.crc32 is not None}
    for file, first in holder.items():
        if opened.files[file].sha256 is not None or file in summed:
            attests.setdefault(file if file in begins else first, []).append(file)
    attested_by = {file: first for first, files in attests.items() for file in files}
    witnesses: dict[int, list[Cut]] = {}
    for number, shard in enumerate(shards):
        if any(attested_by.get(file, home[number]) != home[number] for file in reads[number]):
            for cut in cuts_of(number, shard):
                if attested_by.get(cut.file, home[number]) != home[number]:
                    witnesses.setdefault(attested_by[cut.file], []).append(cut)
    return tuple(
        Group(number, tuple(begins[first]), tuple(sorted(attests.get(first, ()))), tuple(witnesses.get(first, ())))
        for number, first in enumerate(sorted(begins))
    )
