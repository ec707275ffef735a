"""What the real `hf download` leaves on the disk, as a source: every layout that it makes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.uploads import download, source
from tests.hub.fixtures import Namespace
from tests.support.checker import from_folder, read_checkpoint

__all__ = ["source"]


def links_of(file: Path) -> list[Path]:
    """Where ``file`` leads, link by link."""
    found = []
    while file.is_symlink():
        file = Path(os.path.normpath(file.parent / file.readlink()))
        found.append(file)
    return found


@pytest.mark.parametrize(
    ("typed", "env", "links"),
    [
        ((), {}, ["models--*/blobs/*", "blobs/??/*"]),
        pytest.param((), {"HF_HUB_DISABLE_SHARED_BLOBS": "1"}, ["models--*/blobs/*"], marks=pytest.mark.slow),
        pytest.param((), {"HF_HUB_DISABLE_XET": "1"}, ["models--*/blobs/*"], marks=pytest.mark.slow),
        pytest.param((), {"HF_HUB_DISABLE_SYMLINKS": "1"}, [], marks=pytest.mark.slow),
        (("--local-dir", "here"), {}, []),
    ],
    ids=["shared blobs", "own blobs", "without Xet", "copies", "local folder"],
)
def test_what_hf_download_makes_is_planned_run_and_verified(
    reshard: Run,
    namespace: Namespace,
    source: str,
    tmp_path: Path,
    typed: tuple[str, ...],
    env: dict[str, str],
    links: list[str],
) -> None:
    home = tmp_path / "home"
    folder = download(source, namespace, home, *(tmp_path / word if word == "here" else word for word in typed), **env)
    found = links_of(folder / "model.safetensors")
    assert len(found) == len(links) and all(path.match(link) for path, link in zip(found, links, strict=True)), found
    planned = reshard("plan", folder, "--size", "3.1MB")
    assert planned.code == 0, planned.err
    done = reshard("run", folder, "--size", "3.1MB", "--to", tmp_path / "out")
    assert done.code == 0, done.err
    assert read_checkpoint(from_folder(tmp_path / "out")) == read_checkpoint(from_folder(folder))
    verified = reshard("verify", folder)
    assert verified.code == 0, verified.out + verified.err
