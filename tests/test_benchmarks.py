"""Every benchmark runs on tiny data; what it then measures of memory holds, and of time says nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks import report
from tests.benchmarks.__main__ import BENCHMARKS, Benchmark, measure
from tests.benchmarks.figures import STEADY, Figure, Race
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
    for name in ("DATA", "PAGE", "BARS"):
        monkeypatch.setattr(report, name, tmp_path / name)
    figures = [
        Figure("fast <enough>", 1.5, "x", 2, "must"),
        Figure("slow", 3, "x", 2, "aim"),
        Figure("it", 1, "s", 0, "report"),
    ]
    race = Race("a & b", {"reshard": Cost(1.0, 2.0, 3_000_000), "cp": Cost(0.5, 0.5, 1_000_000)})
    report.write(figures, [race], tmp_path / "build" / "bench.json")
    facts = json.loads((tmp_path / "build" / "bench.json").read_text())
    assert facts == json.loads((tmp_path / "DATA").read_text())
    assert [figure["met"] for figure in facts["figures"]] == [True, False, False]
    page, bars = (tmp_path / "PAGE").read_text(), (tmp_path / "BARS").read_text()
    assert "| slow | 3 x | 2 x (aim) | **missed** |" in page and "| it | 1 s |  |  |" in page
    assert "| reshard | 1.00 | 2.00 | 3 MB |" in page
    assert "a &amp; b" in bars and bars.count("<rect") == 2
