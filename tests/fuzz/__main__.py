"""Runs the targets one after the other: see the package."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from tests.fuzz.targets import TARGETS

SECONDS = 60  # of all targets together
INPUT_MAX = 16_384  # bytes; longer inputs are slower and find the same
INPUT_SECONDS = 10  # what one input may take before it counts as a hang
MEMORY = 1024  # MB of the whole process: what a few kilobytes claim must never be allocated
FOUND = Path("build/fuzz")  # inputs that broke something


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", choices=[[], *TARGETS], metavar="TARGET")
    parser.add_argument("--seconds", type=int, default=SECONDS)
    parser.add_argument("--corpus", type=Path, help="a folder that keeps what was learnt, for the next time")
    arguments = parser.parse_args()
    if find_spec("atheris") is None:
        sys.exit("atheris is not installed here: `pip install -c constraints.txt -e '.[dev,fuzz]'`, on Linux")
    names = arguments.targets or list(TARGETS)
    with tempfile.TemporaryDirectory() as scratch:
        corpus = arguments.corpus or Path(scratch)
        failed = [name for name in names if not _fuzzed(name, corpus / name, max(1, arguments.seconds // len(names)))]
    if failed:
        sys.exit(f"broken: {', '.join(failed)}; the inputs are in {FOUND}")


def _fuzzed(name: str, corpus: Path, seconds: int) -> bool:
    from tests.fuzz.seeds import seeds

    corpus.mkdir(parents=True, exist_ok=True)
    FOUND.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(seeds()[name]):
        (corpus / f"seed-{number}").write_bytes(data)
    limits = [f"-max_total_time={seconds}", f"-max_len={INPUT_MAX}", f"-timeout={INPUT_SECONDS}"]
    limits += [f"-rss_limit_mb={MEMORY}", f"-artifact_prefix={FOUND}/{name}-", "-print_final_stats=1"]
    command = [sys.executable, "-m", "tests.fuzz.child", name, *limits, str(corpus)]
    print(f"{name}: {seconds} s", flush=True)
    done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
    lines = done.stderr.splitlines()
    told = (
        [line for line in lines if line.startswith("stat::number_of_executed_units")] if not done.returncode else lines
    )
    print("\n".join(told), flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    main()
