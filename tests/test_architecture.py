"""Imports point one way, between folders and between the rooms of each; heavy packages stay where they belong."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from reshard.cli.main import COMMANDS
from reshard.cli.ping import PROBES
from reshard.pipeline.places import PLACES
from reshard.web.settings import PORT
from tests.support.loaded import HEAVY, breaks, loaded_by
from tests.support.models import save_model

ROOT = Path(__file__).parents[1]
MODULES = sorted(p for folder in ("pipeline", "worker", "client", "web", "cli") for p in (ROOT / folder).rglob("*.py"))
# tests/hub is a package of its own.
TESTS = [p for p in sorted((ROOT / "tests").rglob("*.py")) if not p.is_relative_to(ROOT / "tests" / "hub")]

PLACE_CLASSES = {place.__name__ for place in PLACES}

# What each folder must not import, and the modules that are the exception to it.
FORBIDDEN = {
    "pipeline": {
        "reshard.worker",
        "reshard.client",
        "reshard.web",
        "reshard.cli",
        "celery",
        "kombu",
        "redis",
        "typer",
        "rich",
    },
    "worker": {"reshard.client", "reshard.web", "reshard.cli", "typer", "rich"},
    "client": {"reshard.web", "reshard.cli", "celery", "kombu", "typer", "rich"},
    "web": {"reshard.cli", "celery", "kombu", "typer", "rich"},
    "cli": set[str](),
}
MAY = {"pipeline/bar.py": {"rich"}}  # what `run(progress=True)` shows, imported when it does
MODEL_LIBRARIES = {"torch", "transformers", "accelerate"}
CHILD = "pipeline/verifying/child/"


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(tree(path))]


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """Those of all files take 220 MB, which other files of this process have no use for."""
    yield
    tree.cache_clear()
    nodes.cache_clear()


def breaking(broken: Callable[[Path], object]) -> dict[str, object]:
    """What of each module breaks a rule."""
    return {path.relative_to(ROOT).as_posix(): found for path in MODULES if (found := broken(path))}


@cache
def imports(path: Path) -> frozenset[str]:
    """Every module that a file imports, at the top or inside a function."""
    return frozenset(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides which way it points"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_dependencies_point_one_way() -> None:
    def wrong(path: Path) -> set[str]:
        place = path.relative_to(ROOT)
        return breaks(imports(path), FORBIDDEN[place.parts[0]] - MAY.get(place.as_posix(), set()))

    assert breaking(wrong) == {}


def test_tests_share_what_builders_make_and_import_no_other_tests() -> None:
    """What two of them use is in a builder, a conftest or tests/support: a module of tests may be split or go."""
    imported = {path.relative_to(ROOT).as_posix(): imports(path) for path in TESTS}
    shared = {path: {name for name in names if name.startswith("tests.")} for path, names in imported.items()}
    assert {path: found for path, names in shared.items() if (found := {n for n in names if ".test_" in n})} == {}


PRIVATE = re.compile(r"_[a-zA-Z]\w*")
# What tests may call by a name that is private here: whose it is, or what nothing else can show.
REACHED = {
    ("pipeline/checkpoint/formats/test_rank_files.py", "_spec"): "torch's, of a tensor that is cut for several ranks",
    ("pipeline/stores/test_http.py", "_transport"): "httpx's: how many connections a client holds is told nowhere else",
    ("pipeline/stores/test_xet.py", "_lock"): "that kept tokens are touched under it shows only where threads meet",
    ("pipeline/stores/test_xet.py", "_xet_tokens"): "the same",
}


def bound(path: Path) -> Iterator[str]:
    """What a file gives a name to, anywhere in it."""
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id


def reached(path: Path) -> Iterator[str]:
    """The names by which a file reaches into objects but its own, and into modules of ours."""
    for node in nodes(path):
        if isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}):
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("reshard"):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call):  # setattr and its like
            yield from (a.value for a in node.args[1:2] if isinstance(a, ast.Constant) and isinstance(a.value, str))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("reshard."):
            yield from node.value.split(".")


def test_tests_reach_into_nothing_that_is_private() -> None:
    """A test that did would hold how a module is made, and not what it does; see REACHED for what is left."""
    ours = {name for path in MODULES for name in bound(path) if PRIVATE.fullmatch(name)} - {"_replace", "_asdict"}
    tests = ROOT / "tests"
    found = {(path.relative_to(tests).as_posix(), name) for path in TESTS for name in reached(path) if name in ours}
    assert found == REACHED.keys()


def test_the_rules_see_a_private_name_however_it_is_reached(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    ways = ("one._a", "super()._b()", "self.one._c", "setattr(one, '_d', 1)", "patch('reshard.x.Y._e', 1)")
    module.write_text("\n".join(["from reshard.x import _f", *ways, "self._g", "print('_h')"]))
    assert {name for name in reached(module) if PRIVATE.fullmatch(name)} == {"_a", "_b", "_c", "_d", "_e", "_f"}


def test_only_the_reload_child_imports_model_libraries() -> None:
    found = breaking(lambda path: breaks(imports(path), MODEL_LIBRARIES))
    assert [path for path in found if not path.startswith(CHILD)] == []


def test_places_answer_for_themselves() -> None:
    """Whoever tests a place's class or kind has to be found by who adds a store."""

    def asked(path: Path) -> list[str]:
        calls = [node for node in nodes(path) if isinstance(node, ast.Call) and len(node.args) > 1]
        given = [call.args[1] for call in calls if isinstance(call.func, ast.Name) and call.func.id == "isinstance"]
        named = {n.id for kind in given for n in ast.walk(kind) if isinstance(n, ast.Name)} & PLACE_CLASSES
        left = [node.left for node in nodes(path) if isinstance(node, ast.Compare)]
        kinds = [ast.unparse(one) for one in left if isinstance(one, ast.Attribute) and one.attr == "kind"]
        return [*named, *(kind for kind in kinds if kind.endswith(("place.kind", "target.kind", "source.kind")))]

    assert [path for path in breaking(asked) if path != "pipeline/places.py"] == []


def test_pages_read_nothing_of_the_broker_by_themselves() -> None:
    def read(path: Path) -> list[int]:
        return [n.lineno for n in nodes(path) if isinstance(n, ast.Attribute) and n.attr == "redis"]

    assert {path: lines for path, lines in breaking(read).items() if path.startswith("web/pages/")} == {}


def test_no_constant_is_set_twice() -> None:
    """The second one would be the value of the first one, too."""

    def twice(path: Path) -> list[str]:
        given = [target for node in tree(path).body if isinstance(node, ast.Assign) for target in node.targets]
        names = Counter(target.id for target in given if isinstance(target, ast.Name))
        return [name for name, times in names.items() if times > 1 and name.isupper()]

    assert breaking(twice) == {}


# The rooms of each folder, from the top down: a room imports only from those of lower lines. A room is a folder or a
# module beside the folders; a folder that is not listed here has no order yet.
ROOMS = {
    "pipeline": [
        {"api"},
        {"bar"},
        {"reshard", "doctor", "auditing"},
        {"drafting", "journal", "abreast"},
        {"driving", "deciding"},
        {"verifying", "catalogs"},
        {"publishing"},
        {"copying"},
        {"planning", "stores"},
        {"checkpoint", "request"},
        {"check", "protocols"},
        {"places", "tensors", "renaming"},
        {"validation", "arguments", "guarded_yaml", "paths"},
        {"sizes", "text", "urls"},
        {"limits", "errors"},
        {"figures", "installed"},
    ],
    "client": [
        {"connect", "pushed"},
        {"remote", "served"},
        {"operations", "layout"},
        {"plan", "dry_run", "acts", "catalog_report", "audit_report", "events"},
        {"facts", "files"},
        {"queue", "text"},
        {"models", "profiles"},
    ],
    "web": [
        {"serve"},
        {"app", "connections"},
        {"pages"},
        {"hooks", "openapi", "guard"},
        {"documents", "streams"},
        {"auth"},
        {"settings"},
    ],
    "cli": [
        {"start"},
        {"main"},
        {"run", "plan", "verify", "audit", "provenance", "doctor", "jobs", "schedule", "fleet", "service", "ping"},
        {"catalog", "web"},
        {"watch", "layout"},
        {"plan_text", "devices"},
        {"job_text"},
        {"arguments", "progress"},
        {"errors", "completion"},
        {"output"},
        {"terminal", "help", "streams"},
    ],
}
LINES_MAX = 450
# By the names they are imported by.
NAMED = {("reshard", *path.relative_to(ROOT).with_suffix("").parts): path for path in MODULES}
NAMED = {name[:-1] if name[-1] == "__init__" else name: path for name, path in NAMED.items()}


@cache
def graph() -> dict[tuple[str, ...], set[tuple[str, ...]]]:
    """The modules that each module imports."""
    split = {name: (tuple(imported.split(".")) for imported in imports(path)) for name, path in NAMED.items()}
    return {name: {module for module in modules if module in NAMED} for name, modules in split.items()}


@pytest.mark.parametrize("folder", ROOMS)
def test_rooms_import_only_from_rooms_below(folder: str) -> None:
    level = {room: number for number, rooms in enumerate(ROOMS[folder]) for room in rooms}
    upwards = {
        (".".join(module), ".".join(imported))
        for module, names in graph().items()
        for imported in names
        if module[1] == imported[1] == folder and min(len(module), len(imported)) > 2
        if module[2] != imported[2] and level[module[2]] >= level[imported[2]]
    }
    assert upwards == set()
    assert level.keys() == {module[2] for module in graph() if module[1] == folder and len(module) > 2}


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Raises CycleError, which names the circle; imports inside functions and for types count."""
    # The package itself offers what is below it by name, and loads it when it is asked for.
    modules = {m: names - {m} for m, names in graph().items() if m != ("reshard", "pipeline")}
    tuple(TopologicalSorter(modules).static_order())


def test_web_asks_the_client() -> None:
    asking = {(name, asked) for name, found in graph().items() if name[1:2] == ("web",) for asked in found}
    assert {(name, asked) for name, asked in asking if asked[1:2] == ("worker",)} == set()


@pytest.mark.parametrize("folder", ["pipeline", "worker", "client", "web", "cli"])
def test_no_file_is_too_long_to_be_read_in_one_sitting(folder: str) -> None:
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".lua"}]
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in files}
    assert {path: lines for path, lines in lengths.items() if lines > LINES_MAX} == {}


def test_the_rules_see_an_import_inside_a_function(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text("def f():\n    from celery import Celery\n    import torch.nn\n")
    assert breaks(imports(module), {"celery", "torch"}) == {"celery", "celery.Celery", "torch.nn"}


@pytest.mark.parametrize("arguments", [("--help",), ("submit", "--help"), ("--version",)])
def test_help_loads_nothing_heavy(arguments: tuple[str, ...]) -> None:
    modules = loaded_by(*arguments)
    assert "reshard.cli.main" in modules
    assert not breaks(modules, HEAVY)


def test_a_copy_between_folders_loads_no_http_client_and_no_arrays(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", 2, 1000, 1)
    (model / "config.json").unlink()  # which has a child of its own load transformers
    modules = loaded_by("run", str(model), "--to", str(tmp_path / "out"), "--quiet")
    assert "reshard.pipeline.copying.loop" in modules
    assert not breaks(modules, (HEAVY | {"httpx2", "httpcore2", "urllib.request", "rich", "redis"}))


def test_only_a_terminal_loads_colours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = "plan", str(save_model(tmp_path / "model", 2, 1000, 1))
    assert "rich" not in loaded_by(*plan)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "rich" in loaded_by(*plan)


def test_tracing_is_loaded_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARD_BROKER_URL", "redis://127.0.0.1:1/0")
    modules = loaded_by("list", ends_with=10)
    assert "redis" in modules and "opentelemetry" not in modules
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    assert "opentelemetry" in loaded_by("list", ends_with=10)


def test_a_ping_loads_next_to_nothing() -> None:
    queue = {"redis", "pydantic_settings", "reshard.worker", "reshard.web"}
    assert not breaks(loaded_by("ping", "--help"), HEAVY | queue)
    assert str(PORT) in {usual for _, _, usual in PROBES}, "which it cannot ask web/settings.py for"


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("submit", "--help")])
def test_only_the_command_that_is_typed_is_loaded(arguments: tuple[str, ...]) -> None:
    homes = {f"reshard.cli.{listed.home.partition(':')[0]}" for listed in COMMANDS.values()}
    loaded = loaded_by(*arguments)
    assert loaded & homes == ({"reshard.cli.jobs"} if "submit" in arguments else set())
    assert ("pydantic" in loaded) == ("submit" in arguments)  # which takes as long as all the rest
