"""A repository that the Hub's own client made, and what its `hf download` makes of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from reshard.pipeline.limits import MB
from tests.hub.fixtures import Namespace

HF = Path(sys.executable).parent / "hf"
ROWS = 12  # tensors of 1 MB each, which nothing compresses
UPLOAD = """
import sys
from huggingface_hub import HfApi
api = HfApi()
api.create_repo(sys.argv[1])
api.upload_folder(repo_id=sys.argv[1], folder_path=sys.argv[2])
"""


@pytest.fixture
def source(namespace: Namespace, tmp_path: Path) -> str:
    """A repository that the Hub's own client made, over Xet."""
    folder = tmp_path / "source"
    folder.mkdir()
    random = np.random.default_rng(7)
    tensors = {f"layers.{i}.weight": random.integers(0, 255, MB, np.uint8) for i in range(ROWS)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text('{"hidden_size": 1000}')
    env = os.environ | {
        "HF_ENDPOINT": namespace.endpoint,
        "HF_TOKEN": namespace.token,
        "HF_HOME": str(tmp_path / "publisher"),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    env.pop("HF_HUB_DISABLE_XET", None)
    subprocess.run([sys.executable, "-c", UPLOAD, namespace.repo("source"), folder], env=env, check=True)
    return namespace.repo("source")


def download(repo: str, space: Namespace, home: Path, *typed: str | Path, **env: str) -> Path:
    """The folder that `hf download` says it made."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    own = {"HF_ENDPOINT": space.endpoint, "HF_TOKEN": space.token, "HF_HOME": str(home), "NO_COLOR": "1"}
    done = subprocess.run(
        [HF, "download", repo, *typed], env=clean | own | env, capture_output=True, text=True, check=True
    )
    return Path(done.stdout.split("path:")[-1].strip())
