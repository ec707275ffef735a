"""Promise 6: what a worker logs lets nobody in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.hub.fixtures import Namespace, hub, hub_process, namespace

__all__ = ["hub", "hub_process", "namespace"]

FETCH = """
import logging
logging.basicConfig(level=logging.INFO)
import reshard.worker.app
from reshard.pipeline.places import Hub
from reshard.pipeline.stores.connect import Context, open_source
import sys
source = open_source(Hub(repo=sys.argv[1]), Context.from_env(), transport="http")
file = source.files()["model.safetensors"]
assert sum(len(view) for view in source.read(file, 0, file.size)) == file.size
logging.getLogger("reshard").info("read it")
logging.getLogger("other").info("%s", "a\\x1b[2J\\nb")
"""


def test_a_worker_logs_no_signed_url(namespace: Namespace, tmp_path: Path) -> None:
    repo = namespace.repo("logged")
    namespace.admin.create_repo(repo)
    namespace.admin.put_files(repo, {"model.safetensors": bytes(1000)}, lfs=["model.safetensors"])
    env = os.environ | {
        "HF_ENDPOINT": namespace.endpoint,
        "HF_TOKEN": namespace.token,
        "RESHARD_BROKER_URL": "redis://127.0.0.1:1/0",
    }
    done = subprocess.run([sys.executable, "-c", FETCH, repo], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "read it" in done.stderr
    assert "a\\x1b[2J\\x0ab" in done.stderr, "names from outside are escaped, whatever logs them"
    assert any("/_cdn/" in entry["path"] and "signature=" in entry["path"] for entry in namespace.admin.log())
    assert "signature=" not in done.stderr
    assert namespace.token not in done.stderr
