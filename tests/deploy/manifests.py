"""The manifests in deploy/kubernetes, and the chart that they are rendered from.

python -m tests.deploy.manifests     renders them anew
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.tools import Missing, tool

ROOT = Path(__file__).parents[2]
CHART, BASE = ROOT / "deploy/helm/reshard", ROOT / "deploy/kubernetes"
Manifest = dict[str, Any]

ALL = ["monitoring.enabled=true", "keda.enabled=true"]  # values that leave nothing out


def rendered(*values: str) -> dict[str, str]:
    """What the chart makes of these values, by template."""
    with tempfile.TemporaryDirectory() as folder:
        given = [word for value in values for word in ("--set", value)]
        command = [tool("helm"), "template", "reshard", CHART, "--output-dir", folder, *given]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return {path.name: path.read_text() for path in Path(folder).rglob("*.yaml")}


def as_base(files: dict[str, str]) -> dict[Path, str]:
    """Each file as it is in deploy/kubernetes: what needs an operator in a folder of its own."""
    own = ("monitoring.yaml", "keda.yaml")
    return {BASE / (name.removesuffix(".yaml") if name in own else "") / name: text for name, text in files.items()}


def base() -> dict[Path, str]:
    """The files of deploy/kubernetes but those that are written by hand."""
    return {path: path.read_text() for path in BASE.rglob("*.yaml") if path.name != "kustomization.yaml"}


def manifests(text: str) -> Iterator[Manifest]:
    yield from (found for found in yaml.safe_load_all(text) if found)


def pod(workload: Manifest) -> Manifest:
    spec: Manifest = workload["spec"]["template"]["spec"]
    return spec


def write() -> None:
    # Workers keep their number in the base: the component of KEDA takes it out.
    files = rendered("monitoring.enabled=true") | {"keda.yaml": rendered(*ALL)["keda.yaml"]}
    for path, text in as_base(files).items():
        path.write_text(text)


if __name__ == "__main__":
    try:
        write()
    except Missing as missing:
        sys.exit(str(missing))
