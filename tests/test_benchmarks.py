"""Every benchmark runs on tiny data; what it then measures of memory holds, and of time says nothing."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.benchmarks import __main__ as benchmarks
from tests.benchmarks import report
from tests.benchmarks.__main__ import BENCHMARKS, Benchmark, measure
from tests.benchmarks.figures import STEADY, Figure, Race
from tests.benchmarks.folders import CLASS, COPY, FOLDERS, OURS, TRANSFORMERS
from tests.benchmarks.race import Cost
from tests.benchmarks.scale import SMOKE, Scale

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
            assert all(min(cost[:3]) > 0 for cost in one.costs.values())
        elif one.kind == "must" and one.unit in STEADY:
            assert one.met, one


FIGURES = [
    Figure("fast <enough>", 1.5, "x", 2, "must"),
    Figure("slow", 3, "x", 2, "aim"),
    Figure("it", 1, "s", 0, "report"),
]
COSTS = {
    OURS: Cost(1.0, 2.0, 3_000_000, 5_000_000, 6_000_000, 7_000_000),
    COPY: Cost(0.5, 0.5, 1_000_000),
    CLASS: Cost(3.0, 2.0, 9_000_000),
    TRANSFORMERS: Cost(6.0, 2.0, 4_000_000_000),
}
RACE = Race(f"a & b {FOLDERS}", COSTS)


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the pages that are written."""
    for name in ("DATA", "PAGE", "BARS", "README"):
        monkeypatch.setattr(report, name, tmp_path / name)
    monkeypatch.setattr(benchmarks, "OUT", tmp_path / "build" / "bench.json")
    (tmp_path / "README").write_text("# reshard\n<!-- make bench -->\nold\n<!-- end -->\n")
    return tmp_path


def test_what_was_found_is_a_page_with_bars(pages: Path) -> None:
    report.write(report.Found(FIGURES, [RACE]), benchmarks.OUT)
    facts = json.loads(benchmarks.OUT.read_text())
    assert facts == json.loads((pages / "DATA").read_text())
    assert [figure["met"] for figure in facts["figures"]] == [True, False, False]
    page, bars = (pages / "PAGE").read_text(), (pages / "BARS").read_text()
    assert "| slow | 3 x | 2 x (aim) | **missed** |" in page and "| it | 1 s |  |  |" in page
    assert "| reshard | 1.00 | 2.00 | 3 MB | 5 MB | 6 MB | 7 MB |" in page
    assert "a &amp; b" in bars and bars.count("<rect") == 4
    said = " ".join((pages / "README").read_text().split())
    assert "take 2.0 times as long as `cp` and sync, in 3 MB" in said and "takes 0.50 of the time" in said


def run_all(monkeypatch: pytest.MonkeyPatch, *all_of_them: Benchmark) -> int:
    monkeypatch.setattr(benchmarks, "BENCHMARKS", all_of_them)
    monkeypatch.setattr("sys.argv", ["benchmarks"])
    return benchmarks.main()


def broken(folder: Path, scale: Scale) -> Iterator[Figure | Race]:
    yield FIGURES[2]
    raise subprocess.CalledProcessError(1, ["reshard"], stderr="the disk is full")


def sound(folder: Path, scale: Scale) -> Iterator[Figure | Race]:
    yield FIGURES[0]
    yield RACE


def test_a_benchmark_that_fails_costs_no_figure_of_the_others(
    pages: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_all(monkeypatch, broken, sound) == 1
    facts = json.loads(benchmarks.OUT.read_text())
    assert [figure["name"] for figure in facts["figures"]] == ["it", "fast <enough>"]
    assert [*facts["failed"]] == ["broken"] and "the disk is full" in capfd.readouterr().err
    page = (pages / "PAGE").read_text()
    assert "These failed, and what follows has nothing of their rest: broken." in page
    assert run_all(monkeypatch, sound) == 0
    assert "failed" not in (pages / "PAGE").read_text()


def test_what_was_measured_is_kept_when_the_run_is_ended(pages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(folder: Path, scale: Scale) -> Iterator[Figure | Race]:
        yield FIGURES[1]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all(monkeypatch, sound, ended)
    facts = json.loads(benchmarks.OUT.read_text())
    assert [figure["name"] for figure in facts["figures"]] == ["fast <enough>"] and len(facts["races"]) == 1
    assert not (pages / "PAGE").exists()


def test_without_the_race_of_folders_the_readme_claims_nothing(pages: Path) -> None:
    report.write(report.Found(FIGURES), benchmarks.OUT)
    assert (pages / "README").read_text() == "# reshard\n<!-- make bench -->\n<!-- end -->\n"


def test_the_pages_show_what_was_measured_last() -> None:
    """Nobody writes a figure by hand, and none is left behind by another run."""
    readme = report.README.read_text()
    assert len(report.HEADLINE.findall(readme)) == 1
    if report.DATA.exists():
        facts = json.loads(report.DATA.read_text())
        assert report.with_headline(readme, facts) == readme
        assert report.PAGE.read_text() == report.page(facts)
        assert report.BARS.read_text() == report.bars(facts["races"])
    else:
        assert report.with_headline(readme, {"races": []}) == readme
        assert not report.PAGE.exists() and not report.BARS.exists()
