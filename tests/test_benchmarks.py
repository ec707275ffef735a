"""Every benchmark runs on tiny data; what it then measures of memory holds, and of time says nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks import report
from tests.benchmarks.__main__ import BENCHMARKS, Benchmark, measure
from tests.benchmarks.figures import STEADY, Figure, Race
from tests.benchmarks.folders import CLASS, COPY, FOLDERS, OURS, TRANSFORMERS
from tests.benchmarks.race import Cost
from tests.benchmarks.scale import SMOKE

# The others are half of the queue's own tests once more.
QUICK = {"answering", "planning", "folders", "casts", "growth", "loading", "xet", "lfs", "layout"}


@pytest.mark.parametrize(
    "benchmark",
    [pytest.param(b, id=b.__name__, marks=[] if b.__name__ in QUICK else [pytest.mark.slow]) for b in BENCHMARKS],
)
@pytest.mark.timeout(600)
def test_a_benchmark_runs_on_tiny_data_and_its_memory_is_bounded(benchmark: Benchmark) -> None:
    found = list(measure(benchmark, SMOKE))
    assert found
    for one in found:
        assert report.line(one)
        if isinstance(one, Race):
            assert all(min(cost) > 0 for cost in one.costs.values())
        elif one.kind == "must" and one.unit in STEADY:
            assert one.met, one


def test_what_was_found_is_a_page_with_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATA", "PAGE", "BARS", "README"):
        monkeypatch.setattr(report, name, tmp_path / name)
    (tmp_path / "README").write_text("# reshard\n<!-- make bench -->\nold\n<!-- end -->\n")
    figures = [
        Figure("fast <enough>", 1.5, "x", 2, "must"),
        Figure("slow", 3, "x", 2, "aim"),
        Figure("it", 1, "s", 0, "report"),
    ]
    costs = {OURS: Cost(1.0, 2.0, 3_000_000), COPY: Cost(0.5, 0.5, 1_000_000)}
    costs |= {CLASS: Cost(3.0, 2.0, 9_000_000), TRANSFORMERS: Cost(6.0, 2.0, 4_000_000_000)}
    race = Race(f"a & b {FOLDERS}", costs)
    report.write(figures, [race], tmp_path / "build" / "bench.json")
    facts = json.loads((tmp_path / "build" / "bench.json").read_text())
    assert facts == json.loads((tmp_path / "DATA").read_text())
    assert [figure["met"] for figure in facts["figures"]] == [True, False, False]
    page, bars = (tmp_path / "PAGE").read_text(), (tmp_path / "BARS").read_text()
    assert "| slow | 3 x | 2 x (aim) | **missed** |" in page and "| it | 1 s |  |  |" in page
    assert "| reshard | 1.00 | 2.00 | 3 MB |" in page
    assert "a &amp; b" in bars and bars.count("<rect") == 4
    said = " ".join((tmp_path / "README").read_text().split())
    assert "take 2.0 times as long as `cp` and sync, in 3 MB" in said and "takes 0.50 of the time" in said
