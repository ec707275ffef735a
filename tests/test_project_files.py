"""The files around the code do what they say: workflows, forms, hooks, the citation and the site."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.links import SITE, relinked

ROOT = Path(__file__).parents[1]
CHANGELOG_MAX = 140  # lines of one release; 120 when it is published, so that changes until then have room
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = {name for line in re.findall(r"^([a-z][a-z -]*):", MAKEFILE, re.M) for name in line.split()}
BIN = Path(sys.executable).parent


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def steps(workflow: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for job in loaded(workflow)["jobs"].values():
        for step in job["steps"]:
            yield job, step


def made(job: dict[str, Any], command: str) -> Iterator[str]:
    """The targets of ``make`` that a step's command names, with those of its matrix in their place."""
    matrix = job.get("strategy", {}).get("matrix", {})
    for line in command.splitlines():
        words = shlex.split(re.sub(r"\$\{\{ ?(.*?) ?\}\}", r"{\1}", line))
        if words[0] == "make":
            for target in (word for word in words[1:] if "=" not in word):
                variable = re.search(r"\{matrix\.(\w+)\}", target)
                values = matrix[variable[1]] if variable else [""]
                yield from (re.sub(r"\{.*\}", value, target) for value in values)


SCHEMAS = {
    "github-workflows": WORKFLOWS,
    "dependabot": [ROOT / ".github/dependabot.yml"],
    "github-issue-forms": [p for p in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if p.stem != "config"],
    "github-issue-config": [ROOT / ".github/ISSUE_TEMPLATE/config.yml"],
    "citation-file-format": [ROOT / "CITATION.cff"],
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_for_other_tools_follow_their_schemas(schema: str) -> None:
    command = [BIN / "check-jsonschema", "--builtin-schema", f"vendor.{schema}", *SCHEMAS[schema]]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda p: p.stem)
def test_workflows_call_what_the_makefile_has_and_actions_of_a_version(workflow: Path) -> None:
    called = {target for job, step in steps(workflow) for target in made(job, step.get("run", ""))}
    assert called and called <= TARGETS
    actions = [step["uses"] for _, step in steps(workflow) if "uses" in step]
    assert [action for action in actions if not re.search(r"@v\d+(\.\d+)*$", action)] == []
    assert loaded(workflow)["permissions"] == {"contents": "read"}, "what a job needs beyond that it says itself"


def test_every_python_that_is_named_is_tested() -> None:
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PYPROJECT["project"]["classifiers"]))
    (ci,) = (loaded(path) for path in WORKFLOWS if path.stem == "ci")
    matrix = ci["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == named
    assert any("-arm" in more["runner"] for more in matrix["include"])
    assert re.findall(r"^PYTHONS := (.+)$", MAKEFILE, re.M) == [" ".join(named)]
    assert f"Python {named[0]} to {named[-1]}" in (ROOT / "README.md").read_text()
    assert PYPROJECT["project"]["requires-python"] == f">={named[0]}"


def test_the_lowest_and_the_newest_versions_are_tested() -> None:
    (ci,) = (path for path in WORKFLOWS if path.stem == "ci")
    called = {target for job, step in steps(ci) for target in made(job, step.get("run", ""))}
    assert {"test-lowest", "test-newest"} <= called


def test_a_release_is_published_with_no_token_of_the_index() -> None:
    (release,) = (loaded(path)["jobs"] for path in WORKFLOWS if path.stem == "release")
    (publishing,) = (job for job in release.values() if "pypi-publish" in str(job["steps"]))
    assert publishing["permissions"] == {"id-token": "write"} and publishing["environment"] == "pypi"
    assert "secrets." not in str(publishing)


def test_the_citation_is_of_this_version() -> None:
    citation, project = loaded(ROOT / "CITATION.cff"), PYPROJECT["project"]
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in project["authors"]]


def test_every_file_that_names_this_release_has_its_version() -> None:
    now = PYPROJECT["project"]["version"]
    chart = loaded(ROOT / "deploy/helm/reshard/Chart.yaml")
    assert {str(chart["version"]), str(chart["appVersion"])} == {now}
    pages = [*(ROOT / "deploy/kubernetes").glob("*.yaml"), *(ROOT / "docs/guides").glob("*.md")]
    named = {found for page in pages for found in re.findall(r"\breshard[:-](\d+\.\d+\.\d+)\b", page.read_text())}
    assert named == {now}
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert first and first[1] == now


def test_the_changelog_is_short_and_grouped() -> None:
    """Also after a merge by union, which may bring back what was condensed."""
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    assert len(lines) <= CHANGELOG_MAX
    assert [line for line in lines if line.startswith("### ")] == [
        "### New",
        "### Changed",
        "### Security",
        "### Fixed",
    ]


def test_the_hooks_run_what_make_lint_runs() -> None:
    (repo,) = loaded(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repo["repo"] == "local"
    lint = MAKEFILE[MAKEFILE.index("\nlint:") :]
    for hook in repo["hooks"]:
        tool = hook["entry"].removeprefix(".venv/bin/")
        assert (BIN / tool.split()[0]).exists() and f"$(BIN)/{tool}" in lint


def test_links_that_lead_nowhere_on_a_site_become_their_text() -> None:
    page = "[a `b`](../worker/steps.py) and [c](security.md#d), [e](#f), [g](https://h.org/i)"
    assert relinked(page, "docs/j.md", lambda path, _: None) == "a `b` and c, [e](#f), [g](https://h.org/i)"
    seen: list[str] = []
    relinked(page, "docs/guides/j.md", lambda path, _: seen.append(path))
    assert seen == ["docs/worker/steps.py", "docs/guides/security.md"]


@pytest.mark.slow
def test_the_site_is_built_of_the_same_pages_and_every_link_on_it_leads_somewhere(tmp_path: Path) -> None:
    command = [BIN / "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = [p.relative_to(ROOT / "docs").with_suffix("") for p in (ROOT / "docs").rglob("*.md")]
    pages += [Path(place).with_suffix("") for place in SITE.values() if place != "index.md"]
    assert [page for page in pages if not (tmp_path / page / "index.html").exists()] == []
    assert not list(tmp_path.rglob("*.py"))
