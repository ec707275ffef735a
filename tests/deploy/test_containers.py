"""Builds the image and runs the compose file in a Docker engine of its own; containers.py has the steps."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.deploy import engine, prepare

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def test_image_and_compose_file_carry_out_jobs_through_a_drain_a_kill_and_an_upgrade(tmp_path: Path) -> None:
    prepare.needed("debootstrap", "unshare", "ip", "tar")
    folders = (
        prepare.debian("engine", engine.PACKAGES, "trixie"),
        prepare.debian("base", "python3,python3-venv,tini,redis-server,ca-certificates"),
        prepare.wheels(),
        prepare.sources(tmp_path / "sources"),
    )
    command = engine.within_namespaces("tests.deploy.containers", *folders)
    done = subprocess.run(command, cwd=prepare.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-5000:]
    assert done.stdout.splitlines()[-1].startswith("deploy: all of it ended")
