"""`reshard catalog check` on the Hub on loopback."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Run
from tests.support.hub.fixtures import Namespace, hub, hub_process, namespace

__all__ = ["hub", "hub_process", "namespace"]


def model(space: Namespace, name: str, **settings: object) -> str:
    space.admin.create_repo(space.repo(name), **settings)
    space.admin.put_files(space.repo(name), {"model.safetensors": b"x" * 1000}, lfs=["model.safetensors"])
    return space.repo(name)


def test_check_says_what_can_be_done_and_queues_nothing(reshard: Run, namespace: Namespace, tmp_path: Path) -> None:
    for name in ("one", "two", "two-cut"):
        model(namespace, name)
    model(namespace, "three", gated="auto")
    file = tmp_path / "c.yaml"
    file.write_text(
        f"name: mine\ndefaults: {{to: '{namespace.name}/{{name}}-cut'}}\nentries:\n"
        + "".join(f"- repo: {namespace.repo(name)}\n" for name in ("one", "two", "three"))
    )
    env = {"HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": namespace.token}
    done = reshard("catalog", "check", file, "--json", env=env)
    assert done.code == 0, done.out
    (facts,) = done.documents
    assert {name: facts[name] for name in ("models", "ready", "new", "bytes", "growth", "calls", "wrong")} == {
        "models": 3, "ready": 3, "new": 2, "bytes": 3000, "growth": 2000, "calls": 2, "wrong": [],
    }  # fmt: skip
    assert facts["gated"] == [namespace.repo("three")]
    assert "3, of which 3 can be done" in reshard("catalog", "check", file, env=env).out

    with file.open("a") as more:
        more.write(f"- repo: {namespace.repo('none')}\n")
    wrong = reshard("catalog", "check", file, env=env)
    assert wrong.code == 2
    assert "source.not_found" in wrong.out
    assert wrong.err.splitlines()[0] == f"error[usage.entries]: {file}: 1 model cannot be done"


def test_a_file_with_an_error_is_one_line_with_its_fix(reshard: Run, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("name: mine\nentries:\n- repo: a/b\n  sise: 1GB\n")
    done = reshard("catalog", "check", file)
    assert (done.code, done.out) == (2, "")
    error, hint = done.err.splitlines()
    assert error.startswith(f"error[usage.catalog]: {file}, line 4: entries[0].sise: ")
    assert hint == "hint: did you mean `size`?"
    assert reshard("catalog", "check", tmp_path / "none.yaml").err.startswith("error[usage]: ")
