"""What the trials of deploy/ need: Debian in folders, and the wheels of the image, kept in build/deploy.

Debian's packages and pip's index are all of the internet that they reach, and here only.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec

import pytest
import torch
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / "deploy"
P = ParamSpec("P")
# The release of Debian whose Python is this one: wheels that this pip finds then fit it.
RELEASES = {(3, 11): "bookworm", (3, 13): "trixie"}


def needed(*programs: str) -> None:
    """Skips where a trial cannot be made, and says what is missing."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("it makes namespaces and mounts in them: needs Linux, and root")
    if missing := [program for program in programs if shutil.which(program) is None]:
        pytest.skip(f"{' and '.join(missing)} not found (Debian: apt install {' '.join(missing)})")
    if sys.version_info[:2] not in RELEASES:
        pytest.skip(f"no release of Debian here has Python {sys.version_info.major}.{sys.version_info.minor}")


def _alone(make: Callable[P, Path]) -> Callable[P, Path]:
    """In a parallel run one process makes it, and the others find it."""

    @wraps(make)
    def made(*arguments: P.args, **named: P.kwargs) -> Path:
        KEPT.mkdir(parents=True, exist_ok=True)
        with (KEPT / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return make(*arguments, **named)

    return made


@_alone
def debian(name: str, packages: str, release: str | None = None) -> Path:
    """A folder with a Debian that has these packages; without a ``release``, one with this Python."""
    folder, ready = KEPT / name, KEPT / f"{name}.ready"
    made_of = f"{release} {packages}"
    if not ready.exists() or ready.read_text() != made_of:
        shutil.rmtree(folder, ignore_errors=True)
        release = release or RELEASES[sys.version_info[:2]]
        subprocess.run(["debootstrap", "--variant=minbase", f"--include={packages}", release, folder], check=True)
        ready.write_text(made_of)
    return folder


@_alone
def wheels() -> Path:
    """Everything that the image installs, as an index of packages: a folder for each. Torch is the build of here."""
    if torch.version.cuda:
        pytest.skip("the image and the units take torch for processors, and here is one for CUDA: install torch+cpu")
    folder, ready = KEPT / "wheels", KEPT / "wheels.ready"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.search(r'^ARG EXTRAS="(.+)"$', (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
    assert named is not None
    extras = [project["optional-dependencies"][name] for name in named[1].split()]
    lines = [*project["dependencies"], *(line for extra in extras for line in extra), "setuptools>=77"]
    names = [line for line in lines if not line.startswith("reshard[")]
    names.append("async-timeout")  # of redis-py with the Python of bookworm, which is 3.11.2
    asked = "\n".join([*names, (ROOT / "constraints.txt").read_text()])
    if not ready.exists() or ready.read_text() != asked:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        pip = [sys.executable, "-m", "pip", "wheel", "-q", "-c", ROOT / "constraints.txt", "-w", folder]
        subprocess.run([*pip, *names], check=True)
        for wheel in folder.glob("*.whl"):
            home = folder / canonicalize_name(parse_wheel_filename(wheel.name)[0])
            home.mkdir(exist_ok=True)
            wheel.rename(home / wheel.name)
        ready.write_text(asked)
    return folder


def sources(folder: Path) -> Path:
    """The files of the image and of deploy/, to be changed at will."""
    shutil.rmtree(folder, ignore_errors=True)
    let_in = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    for name in (*let_in, ".dockerignore", "deploy"):
        if (ROOT / name).is_dir():
            left_out = shutil.ignore_patterns("__pycache__", "secrets", "*.env")
            shutil.copytree(ROOT / name, folder / name, ignore=left_out)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder
