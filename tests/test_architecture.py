"""Dependencies point one way, cli -> worker -> pipeline, and heavy packages are imported where they are needed only."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(p for folder in ("pipeline", "worker", "cli") for p in (ROOT / folder).rglob("*.py"))

# What each folder must not import, and the modules that are the exception to it.
FORBIDDEN = {
    "pipeline": {"reshard.worker", "reshard.cli", "celery", "kombu", "redis", "typer", "rich"},
    "worker": {"reshard.cli", "typer", "rich"},
    "cli": set[str](),
}
MODEL_LIBRARIES = {"torch", "transformers", "accelerate"}
CHILD = "pipeline/verifying/child/"


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, at the top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides which way it points"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def breaks(names: set[str], forbidden: set[str]) -> set[str]:
    return {name for name in names for banned in forbidden if name == banned or name.startswith(f"{banned}.")}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_dependencies_point_one_way(path: Path) -> None:
    place = path.relative_to(ROOT)
    assert not breaks(set(imports(path)), FORBIDDEN[place.parts[0]])


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_only_the_reload_child_imports_model_libraries(path: Path) -> None:
    if path.relative_to(ROOT).as_posix().startswith(CHILD):
        return
    assert not breaks(set(imports(path)), MODEL_LIBRARIES)


def test_the_rules_see_an_import_inside_a_function(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text("def f():\n    from celery import Celery\n    import torch.nn\n")
    assert breaks(set(imports(module)), {"celery", "torch"}) == {"celery", "celery.Celery", "torch.nn"}


def loaded_by(*arguments: str) -> set[str]:
    """The modules that are loaded after `reshard` ran with these arguments in a process of its own."""
    script = (
        "import sys\n"
        f"sys.argv = ['reshard', *{arguments!r}]\n"
        "from reshard.cli.main import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    code = end.code\n"
        "sys.stderr.write(f'{code}\\n' + '\\n'.join(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    code, *modules = done.stderr.splitlines()
    assert code == "0", done.stderr
    return set(modules)


HEAVY = {"torch", "transformers", "huggingface_hub.hf_api", "hf_xet", "celery", "numpy"}


@pytest.mark.parametrize("arguments", [("--help",), ("submit", "--help"), ("--version",)])
def test_help_loads_nothing_heavy(arguments: tuple[str, ...]) -> None:
    modules = loaded_by(*arguments)
    assert "reshard.cli.main" in modules
    assert not breaks(modules, HEAVY)
