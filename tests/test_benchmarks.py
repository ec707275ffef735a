"""Every benchmark runs on tiny data; what it then measures of memory, or counts, holds, and of time says nothing."""

from __future__ import annotations

import json
import platform
import subprocess
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.benchmarks import __main__ as benchmarks
from tests.benchmarks import report
from tests.benchmarks.__main__ import BENCHMARKS, Benchmark, measure
from tests.benchmarks.figures import STEADY, Figure, Profile, Race, Stage, aim
from tests.benchmarks.folders import CLASS, COPY, FOLDERS, OURS, TRANSFORMERS
from tests.benchmarks.ordering import ordering
from tests.benchmarks.profiles import Sampler
from tests.benchmarks.race import Cost
from tests.benchmarks.scale import SMOKE, Scale

# The others are half of the queue's own tests once more, or nothing but seconds, of which tiny data says nothing.
QUICK = {"planning", "layout", "layouts"}


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
        elif one.kind == "must" and (one.unit in STEADY or benchmark is ordering):
            assert one.met, one
        elif one.kind == "aim" and one.unit == "x" and not one.met:
            assert one.profile is not None, one


PROFILE = Profile(2.0, 2, 1.5, 3.5, (Stage("reshard-sha256", "lane.py: step(view) | 0", 1.9, 1.5, 0.25),))
FIGURES = [
    Figure("fast <enough>", 1.5, "x", 2, "must"),
    aim("slow", 3, "x", 2, lambda: PROFILE),
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
    monkeypatch.setattr(benchmarks, "ROOM", 0)
    monkeypatch.setattr(benchmarks, "OUT", tmp_path / "build" / "bench.json")
    (tmp_path / "README").write_text("# reshard\n<!-- make bench -->\nold\n<!-- end -->\n")
    return tmp_path


def test_what_was_found_is_a_page_with_bars(pages: Path) -> None:
    report.publish(report.keep(report.Found(FIGURES, [RACE]), benchmarks.OUT))
    facts = json.loads(benchmarks.OUT.read_text())
    assert facts == json.loads((pages / "DATA").read_text())
    assert [figure["met"] for figure in facts["figures"]] == [True, False, False]
    page, bars = (pages / "PAGE").read_text(), (pages / "BARS").read_text()
    assert "| slow | 3 x | 2 x (aim) | **missed** |" in page and "| it | 1 s |  |  |" in page
    assert f"Python {platform.python_version()}; torch {version('torch')}, " in page
    assert "## Missed: slow" in page
    assert "2 cores had 4.00 s of processor time. They were busy for 3.50 s: 1.50 s with" in page
    assert r"| reshard-sha256 | `lane.py: step(view) \| 0` | 1.90 | 1.50 | 0.25 |" in page
    assert "| reshard | 1.00 | 2.00 | 3 MB | 5 MB | 6 MB | 7 MB |" in page
    assert "a &amp; b" in bars and bars.count("<rect") == 4
    said = " ".join((pages / "README").read_text().split())
    assert "takes 2.0 times as long as `cp` and sync, with 3 MB" in said and "takes 0.50 times as long" in said


def test_an_aim_that_is_met_is_not_looked_at() -> None:
    def looked_at() -> Profile:
        raise AssertionError

    assert aim("fast", 2, "x", 2, looked_at).profile is None


def test_a_profile_tells_where_a_thread_computes_and_where_another_waits() -> None:
    done = threading.Event()

    def wait() -> None:
        done.wait()

    waiting = threading.Thread(target=wait, name="idle")
    with Sampler() as sampler:
        waiting.start()
        start = time.thread_time()  # other tests may have left threads that take the process' time
        while time.thread_time() - start < 0.3:
            sum(range(100_000))
        done.set()
        waiting.join()
    here = f"{Path(__file__).relative_to(report.ROOT)}: "
    spent = {(stage.thread, stage.place): stage.on_core for stage in sampler.profile.stages}
    busy = "while time.thread_time() - start < 0.3:", "sum(range(100_000))"  # it hands over in either of these lines
    assert sum(spent.get((threading.main_thread().name, here + line), 0) for line in busy) > 0.1
    assert spent["idle", f"{here}done.wait()"] < 0.1


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
    assert facts["missing"] == {"broken": "failed with CalledProcessError"}
    assert "the disk is full" in capfd.readouterr().err
    assert "* `broken` failed with CalledProcessError\n" in (pages / "PAGE").read_text()
    assert run_all(monkeypatch, sound) == 0
    assert "Missing" not in (pages / "PAGE").read_text()


def test_what_was_measured_is_kept_when_the_run_is_ended(pages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(folder: Path, scale: Scale) -> Iterator[Figure | Race]:
        yield FIGURES[1]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all(monkeypatch, sound, ended, broken)
    facts = json.loads(benchmarks.OUT.read_text())
    assert [figure["name"] for figure in facts["figures"]] == ["fast <enough>"] and len(facts["races"]) == 1
    assert facts["missing"] == {"ended": "did not run", "broken": "did not run"}
    assert not (pages / "PAGE").exists()


def test_without_room_on_the_disk_nothing_is_begun(
    pages: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmarks, "ROOM", 1e9)
    with pytest.raises(SystemExit):
        run_all(monkeypatch, sound)
    assert "point TMPDIR at a larger disk" in capsys.readouterr().err and not benchmarks.OUT.exists()


def test_one_benchmark_is_recorded_by_itself(pages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report.publish(report.keep(report.Found(FIGURES, [RACE]), benchmarks.OUT))

    def faster(folder: Path, scale: Scale) -> Iterator[Figure | Race]:
        yield aim("slow", 1, "x", 2, lambda: PROFILE)
        yield Figure("new", 1, "x", 2, "must", PROFILE)

    monkeypatch.setattr(benchmarks, "BENCHMARKS", (faster,))
    monkeypatch.setattr("sys.argv", ["benchmarks", "--record", "faster"])
    before = json.loads((pages / "DATA").read_text()) | {"missing": {"faster": "did not run", "slower": "failed"}}
    (pages / "DATA").write_text(json.dumps(before))
    assert benchmarks.main() == 0
    page = (pages / "PAGE").read_text()
    assert "| slow | 1 x | 2 x (aim) | met |" in page and "| fast <enough> | 1.5 x |" in page
    assert "## Missed" not in page and "## Profile: new" in page and "## a & b" in page
    other = json.loads((pages / "DATA").read_text())
    assert other["missing"] == {"slower": "failed"}
    other["machine"]["cores"] += 1
    with pytest.raises(ValueError, match="measure all of them"):
        report.amended(other, json.loads(benchmarks.OUT.read_text()), [])


def test_without_the_race_of_folders_the_readme_claims_nothing(pages: Path) -> None:
    report.publish(report.keep(report.Found(FIGURES), benchmarks.OUT))
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
