"""Where the time of a run goes: every few milliseconds, the line that each thread is at, and its time on a core.

    python -m tests.benchmarks.profiles OUT COMMAND ...     `reshard COMMAND ...`, and its profile as JSON in OUT

Nothing in the product is touched for it. A thread of Python's is at the last line of ours in its stack; one of a
library has only its name.
"""

from __future__ import annotations

import json
import linecache
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType

import psutil

from reshard.pipeline.abreast import cores
from tests.benchmarks.figures import COMMAND, Profile, Stage
from tests.benchmarks.race import ROOT, Contender, once

INTERVAL = 0.01  # seconds
SHOWN = 0.03  # of the time: what took less is not listed
OUT = "profile.json"
TASKS = Path("/proc/self/task")


class Sampler:
    """Looks at the threads of this process until it is left; ``profile`` is what it saw."""

    def __init__(self) -> None:
        self._spent: dict[tuple[str, str], list[float]] = {}
        self._counted: dict[str, tuple[int, int]] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._start, self._before = time.perf_counter(), (_processor(), _machine())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        wall = time.perf_counter() - self._start
        self._end.set()
        self._thread.join()
        own, machine = _processor() - self._before[0], _machine() - self._before[1]
        least = SHOWN * wall
        stages = (Stage(*where, *spent) for where, spent in self._spent.items())
        shown = (one for one in stages if one.seconds >= least and (one.place or one.on_core + one.waiting >= least))
        ordered = tuple(sorted(shown, key=lambda stage: (stage.thread, -stage.seconds)))
        self.profile = Profile(wall, cores(), own, machine, ordered)

    def _run(self) -> None:
        for task in os.listdir(TASKS):  # noqa: PTH208
            with suppress(OSError):  # it has ended
                self._kernel(task)  # what they took before counts for nothing
        last = time.perf_counter()
        while not self._end.wait(INTERVAL):
            frames = sys._current_frames()
            ours = {str(thread.native_id): thread for thread in threading.enumerate()}
            here = time.perf_counter()
            now, last = here - last, here
            for task in os.listdir(TASKS):  # noqa: PTH208 -- hundreds of times a second
                if (thread := ours.get(task)) is self._thread:
                    continue
                with suppress(OSError):  # it has ended
                    name, place = (thread.name, _place(frames.get(thread.ident or 0))) if thread else _library(task)
                    self._add(name, place, now, self._kernel(task))

    def _add(self, name: str, place: str, seconds: float, kernel: tuple[float, float]) -> None:
        spent = self._spent.setdefault((name, place), [0.0, 0.0, 0.0])
        for number, value in enumerate((seconds, *kernel)):
            spent[number] += value

    def _kernel(self, task: str) -> tuple[float, float]:
        """Seconds that it was on a core, and waited for one, since this was last asked."""
        ran, waited, _ = map(int, (TASKS / task / "schedstat").read_text().split())
        before = self._counted.get(task, (0, 0))
        self._counted[task] = ran, waited
        return (ran - before[0]) / 1e9, (waited - before[1]) / 1e9


def _place(frame: FrameType | None) -> str:
    """The last line of ours on the way to ``frame``."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and ".venv" not in path.parts:
            line = linecache.getline(str(path), frame.f_lineno).strip()
            return f"{path.relative_to(ROOT)}: {line}"
        frame = frame.f_back
    return ""


def _library(task: str) -> tuple[str, str]:
    return (TASKS / task / "comm").read_text().strip(), ""


def _processor() -> float:
    """Seconds of this process and of those that it started, the running ones included."""
    total = sum(os.times()[:4])
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            total += sum(child.cpu_times()[:4])
    return total


def _machine() -> float:
    """Seconds that the cores of this machine were busy since it started."""
    times = psutil.cpu_times()
    return sum(getattr(times, kind) for kind in ("user", "nice", "system", "irq", "softirq", "steal"))


def profile_of(contender: Contender, folder: Path) -> Profile:
    """One more run of ours, looked at."""
    found: list[Profile] = []

    def command(out: Path) -> list[str | os.PathLike[str]]:
        looked_at = [sys.executable, "-m", "tests.benchmarks.profiles", out / OUT]
        words: list[str | os.PathLike[str]] = []
        for word in contender.command(out):
            words += looked_at if word == COMMAND else [word]
        return words

    def check(out: Path) -> None:
        contender.check(out)
        found.append(Profile.from_dict(json.loads((out / OUT).read_text())))

    once(replace(contender, command=command, check=check), folder)
    return found[0]


@contextmanager
def processes() -> Iterator[list[Profile]]:
    """Holds, once it was left, what each process that this one started took meanwhile."""
    profiles: list[Profile] = []
    before, start, machine = _by_process(), time.perf_counter(), _machine()
    yield profiles
    wall = time.perf_counter() - start
    took = {key: seconds - before.get(key, 0.0) for key, seconds in _by_process().items()}
    stages = tuple(Stage(name, "", wall, seconds, 0.0) for (_, name), seconds in took.items() if seconds > 0)
    profiles.append(Profile(wall, cores(), sum(took.values()), _machine() - machine, stages))


def _by_process() -> dict[tuple[int, str], float]:
    found = {}
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            name = " ".join(Path(word).name if number == 0 else word for number, word in enumerate(child.cmdline()[:3]))
            found[child.pid, name] = sum(child.cpu_times()[:2])
    return found


def main() -> None:
    from reshard.cli.start import main as reshard

    out, sys.argv = Path(sys.argv[1]), ["reshard", *sys.argv[2:]]
    sampler = Sampler()
    try:
        with sampler:
            reshard()
    finally:
        out.write_text(json.dumps(asdict(sampler.profile)))


if __name__ == "__main__":
    main()
