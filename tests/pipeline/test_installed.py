"""How an extra is added is told by what reshard was installed from and by what; real tools: tests/test_packaging.py."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from reshard.pipeline.errors import ExtraMissing, ReshardError, by_code
from reshard.pipeline.installed import IMAGE_EXTRAS, to_add

ROOT = Path(__file__).parents[2]
AGAIN = "reinstall reshard from its wheel or clone, with the extra `web`"


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with a reshard in it, which this process takes for its own."""
    prefix = tmp_path / "env"
    info = prefix / "lib/python3.11/site-packages/reshard-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: reshard\nVersion: 0.1.0\n")
    monkeypatch.setattr(sys, "prefix", str(prefix))
    monkeypatch.setattr(sys, "path", [str(info.parent)])
    return prefix


def record(environment: Path, direct: dict[str, object] | None, installer: str = "pip") -> None:
    (info,) = environment.glob("lib/*/*/*.dist-info")
    (info / "INSTALLER").write_text(f"{installer}\n")
    if direct is not None:
        (info / "direct_url.json").write_text(json.dumps(direct))


@pytest.fixture
def wheel(environment: Path) -> Path:
    """A wheel with a space in its path, which that reshard came from."""
    path = environment.parent / "my wheels" / "reshard-0.1.0-py3-none-any.whl"
    path.parent.mkdir()
    path.touch()
    record(environment, {"url": path.as_uri(), "archive_info": {}})
    return path


def test_by_pip_from_a_wheel(environment: Path, wheel: Path) -> None:
    assert to_add("web") == f"run `{environment}/bin/python -m pip install '{wheel}[web]'`"


def test_by_uv_into_an_environment(environment: Path, wheel: Path) -> None:
    record(environment, None, installer="uv")
    assert to_add("web") == f"run `uv pip install --python {environment}/bin/python '{wheel}[web]'`"


@pytest.mark.parametrize(("editable", "option"), [(True, " --editable"), (False, "")])
def test_from_a_clone(editable: bool, option: str, environment: Path) -> None:
    record(environment, {"url": ROOT.as_uri(), "dir_info": {"editable": editable}})
    assert to_add("web") == f"run `{environment}/bin/python -m pip install{option} '{ROOT}[web]'`"


def test_by_uv_tool_whose_receipt_names_the_extras_that_stay(environment: Path, wheel: Path) -> None:
    record(environment, None, installer="uv")
    asked = f'[{{ name = "reshard", extras = ["worker", "web"], path = "{wheel}" }}, {{ name = "rich" }}]'
    (environment / "uv-receipt.toml").write_text(f"[tool]\nrequirements = {asked}\n")
    assert to_add("cloud") == f"run `uv tool install --force '{wheel}[worker,web,cloud]'`"


@pytest.mark.parametrize(("had", "extras"), [("[web]", "web,cloud"), ("", "cloud")])
def test_by_pipx_whose_metadata_name_the_extras_that_stay(
    had: str, extras: str, environment: Path, wheel: Path
) -> None:
    spec = {"main_package": {"package": "reshard", "package_or_url": f"{wheel}{had}"}}
    (environment / "pipx_metadata.json").write_text(json.dumps(spec))
    assert to_add("cloud") == f"run `pipx install --force '{wheel}[{extras}]'`"


def test_by_uvx_which_keeps_nothing(environment: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(environment, None, installer="uv")
    monkeypatch.setattr(sys, "prefix", "/home/you/.cache/uv/archive-v0/OuOvn2qo")
    assert to_add("web") == f"run `uvx --from '{wheel}[web]' reshard`"


def test_in_a_container_image_which_is_built_anew(environment: Path, wheel: Path) -> None:
    wheel.unlink()  # it was mounted while the image was built
    (environment / IMAGE_EXTRAS).write_text("worker web")
    assert to_add("apprise") == "build the image with `--build-arg EXTRAS='worker web apprise'`"
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    assert f'RUN printf %s "$EXTRAS" > /opt/reshard/{IMAGE_EXTRAS}\n' in dockerfile
    assert re.search(r"^ENV PATH=/opt/reshard/bin:\$PATH", dockerfile, re.MULTILINE)


def test_from_a_repository_at_the_commit_that_was_installed(environment: Path) -> None:
    vcs = {"vcs": "git", "commit_id": "0" * 40}
    record(environment, {"url": "https://git.example/reshard", "vcs_info": vcs})
    assert f"'reshard[web] @ git+https://git.example/reshard@{'0' * 40}'`" in to_add("web")


@pytest.mark.parametrize("secret", ["you:s3cret@", "s3cret@", "git:s3cret@"])
@pytest.mark.parametrize("vcs", [None, {"vcs": "git", "commit_id": "0" * 40}])
def test_a_password_in_its_url_is_told_to_nobody(secret: str, vcs: dict[str, str] | None, environment: Path) -> None:
    record(environment, {"url": f"https://{secret}git.example:8443/reshard", "vcs_info": vcs})
    assert to_add("web") == f"{AGAIN} (installed from https://git.example:8443/reshard, shown without credentials)"


@pytest.mark.parametrize("secret", ["?sig=s3cret", "#s3cret", "?sig=s3cret#sha256=0"])
def test_a_signature_in_its_url_is_told_to_nobody(secret: str, environment: Path) -> None:
    url = "https://files.example/reshard-0.1.0-py3-none-any.whl"
    record(environment, {"url": f"{url}{secret}", "archive_info": {}})
    assert to_add("web") == f"{AGAIN} (installed from {url}, shown without credentials)"
    assert "s3cret" not in ExtraMissing(package="celery").next_step


def test_the_user_of_every_git_server_is_no_secret(environment: Path) -> None:
    vcs = {"vcs": "git", "commit_id": "0" * 40}
    record(environment, {"url": "ssh://git@git.example/reshard", "vcs_info": vcs})
    assert f"'reshard[web] @ git+ssh://git@git.example/reshard@{'0' * 40}'`" in to_add("web")


def test_a_wheel_that_is_gone_and_a_record_that_is_missing_name_no_command(environment: Path, wheel: Path) -> None:
    wheel.unlink()
    gone = f"reinstall reshard with the extra `web` ({wheel}, where it was installed from, is gone)"
    assert to_add("web") == gone
    next(environment.glob("lib/*/*/*/direct_url.json")).unlink()
    assert to_add("web") == AGAIN


def test_a_job_keeps_how_it_is_added_where_it_is_missing(
    environment: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = ExtraMissing(package="celery").to_dict()
    monkeypatch.undo()  # read by a client that was installed from elsewhere
    assert f"{wheel}[worker]" in ReshardError.from_dict(kept).next_step


def test_every_error_that_needs_an_extra_says_how_to_add_it(environment: Path, wheel: Path) -> None:
    kinds = [kind for kind in by_code().values() if "extra" in kind.defaults]
    assert {kind.code for kind in kinds} == {
        "queue.extra_missing",
        "queue.no_server",
        "resource.cloud",
        "resource.sign",
    }
    for kind in kinds:
        error = kind(place="s3://x", package="x", what="x", why="x")
        assert f"'{wheel}[{kind.defaults['extra']}]'" in error.next_step


# What pip, pipx and uv would ask an index for: our name where a path, a URL or a file would be, with or without extras.
BY_NAME = re.compile(
    r"\b(?:(?:pip|pipx|tool|add) (?:install|run|inject|add)|uvx|uv add)(?: +-\S+)* +['\"]?reshard(?![\w/.-])(?! *@)"
)


def texts() -> list[Path]:
    """Everything that a user may come to read or run: the product, docs, and what deploys it."""
    kinds = {".py", ".md", ".html", ".js", ".toml", ".txt", ".yaml", ".yml", ".service", ".sh", ".json", ".cff", ""}
    folders = ("pipeline", "worker", "client", "web", "cli", "docs", "deploy", "demo")
    inside = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    return [
        path for path in (*ROOT.iterdir(), *inside) if path.is_file() and path.suffix in kinds and path.name != ".git"
    ]


def test_no_text_tells_anyone_to_install_us_by_name_from_an_index() -> None:
    assert len(texts()) > 200
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}" for path in texts() for match in BY_NAME.finditer(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    ["pip install reshard", "pip install 'reshard[web]'", 'pip install -U "reshard[worker]"', "uv tool install reshard",
     "pipx install reshard==0.1", "uvx reshard plan", "uv add reshard"],
)  # fmt: skip
def test_that_search_finds_such_lines(line: str) -> None:
    assert BY_NAME.search(line)


@pytest.mark.parametrize("line", ["pip install dist/reshard-0.1.0.whl", "helm install reshard deploy/helm/reshard"])
def test_that_search_passes_over_others(line: str) -> None:
    assert not BY_NAME.search(line)
