"""How much a benchmark does: all of it, a tenth in three minutes, or just enough to see that it works."""

from __future__ import annotations

from dataclasses import dataclass

from reshard.pipeline.limits import GB, GIB, MB


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of the model that is copied and of its files (bytes), runs of each contender, and how many of others."""

    model: int
    file: int
    runs: int
    growth: tuple[int, ...]  # bytes of each model whose processor time is fitted
    layout: int  # bytes of a model that is planned whole
    layers: int  # of the layout that is planned; 62 are DeepSeek-V3's
    small: int  # jobs of one worker
    ended: int  # jobs that a broker remembers
    catalog: int  # models of a night
    faulty: int  # jobs of a fleet with workers at fault
    waiting: int  # jobs that are submitted at once

    @property
    def size(self) -> str:
        """``file`` as the command takes it."""
        return f"{self.file}B"


FULL = Scale(
    3 * GB, 200 * MB, 5, (300 * MB, GB, 3 * GB, 10 * GB, 30 * GB), 132 * GIB, 62, 200, 100_000, 10_000, 60, 2000
)
QUICK = Scale(300 * MB, 20 * MB, 3, (100 * MB, 300 * MB, GB), 132 * GIB, 62, 20, 2000, 100, 12, 200)
SMOKE = Scale(3 * MB, MB, 1, (MB, 2 * MB, 4 * MB), GB, 2, 3, 1000, 40, 30, 60)
