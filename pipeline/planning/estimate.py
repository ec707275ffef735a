"""What a plan will move, known before a byte of a tensor does. Pure."""

from __future__ import annotations

from typing import NamedTuple

from reshard.pipeline.limits import SEAM_UPLOAD
from reshard.pipeline.planning.model import Plan
from reshard.pipeline.planning.ranges import joined, parts, read_plan, requests

XET_TO_XET = ("xet", "xet")  # only then does the target's store know the source's chunks


class Forecast(NamedTuple):
    """Bytes and requests that carrying out a plan takes."""

    reads: int  # requests for stretches of weight files
    read: int  # bytes of weight files
    written: int  # bytes of shards
    seams: int  # places where a shard's bytes stop being a source file's bytes in a row
    uploaded: int  # bytes that the target's store should not have yet

    @property
    def amplification(self) -> float:
        """Bytes read per byte written."""
        return self.read / self.written if self.written else 1.0

    def to_dict(self) -> dict[str, float]:
        """JSON-able."""
        return {**self._asdict(), "amplification": round(self.amplification, 4)}


def forecast(plan: Plan) -> Forecast:
    """What ``plan`` moves.

    A store of chunks has every stretch of the source but for the chunk that each seam cuts, and the headers.
    """
    read_plans = [read_plan([plan.shards[n] for n in group.shards], group.attests, plan.files) for group in plan.groups]
    written = sum(shard.size for shard in plan.shards)
    seams = sum(len(joined(place for part in parts(shard) for place in part.ranges)) for shard in plan.shards)
    headers = sum(len(shard.header) for shard in plan.shards)
    cast = sum(entry.size for shard in plan.shards for entry in shard.entries if entry.cast)
    return Forecast(
        reads=sum(1 for segments in read_plans for _ in requests(segments)),
        read=sum(segment.stop - segment.start for segments in read_plans for segment in segments),
        written=written,
        seams=seams,
        uploaded=min(written, seams * SEAM_UPLOAD + headers + cast) if plan.transports == XET_TO_XET else written,
    )
