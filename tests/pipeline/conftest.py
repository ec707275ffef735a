"""Runs of the whole pipeline in this process, against folders and the Hub on loopback."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.utils import disable_progress_bars

from reshard.pipeline.places import parse_place
from reshard.pipeline.request import Options, Request
from reshard.pipeline.reshard import Report, run
from reshard.pipeline.stores.connect import Context
from reshard.pipeline.verifying.meta_load import MetaLoader
from tests.hub.fixtures import Namespace

__all__ = ["Run"]

disable_progress_bars()

Run = Callable[..., Report]

HERE = Path(__file__).parent
# Whose questions are of what a commit asks of the Hub, which is the same over both: `make test` takes one.
OVER_HTTP = [
    HERE / name
    for name in (
        "publishing/test_commit.py",
        "publishing/test_manifest.py",
        "publishing/test_rollback.py",
        "publishing/test_self_hosted.py",
        "publishing/test_signing.py",
        "verifying/test_signed.py",
        "test_occupied.py",
    )
]
assert all(path.exists() for path in OVER_HTTP)

TRANSPORT = "RESHARD_TEST_TRANSPORT"  # how this test's jobs and seeds reach the Hub: "http" or "xet"


def asked(source: str | Path, target: str | Path, **options: Any) -> Request:
    """A request that goes by this test's transport unless ``options`` name another."""
    chosen = Options(**{"transport": os.environ.get(TRANSPORT, "auto")} | options)
    return Request(source=parse_place(str(source)), target=parse_place(str(target)), options=chosen)


@pytest.fixture(scope="session")
def meta_loader() -> Iterator[MetaLoader]:
    with closing(MetaLoader()) as warm:
        yield warm


@pytest.fixture
def go(meta_loader: MetaLoader) -> Run:
    """``go(source, target, **options)`` reshards between folders, or what ``HF_ENDPOINT`` names."""

    def go(source: str | Path, target: str | Path, **options: Any) -> Report:
        return run(asked(source, target, **options), Context.from_env(), meta_loader=meta_loader)

    return go


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        spec = getattr(item, "callspec", None)
        if spec and item.path in OVER_HTTP and spec.params.get("on_hub") == "xet":
            item.add_marker(pytest.mark.slow)


@pytest.fixture(params=["http", "xet"])
def on_hub(namespace: Namespace, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Namespace:
    """The Hub on loopback is the Hub, and this user's token the one token; once over HTTP and LFS, once over Xet."""
    monkeypatch.setenv("HF_ENDPOINT", namespace.endpoint)
    monkeypatch.setenv("HF_TOKEN", namespace.token)
    monkeypatch.setenv(TRANSPORT, request.param)
    return namespace


def upload(space: Namespace, name: str, folder: Path, **settings: Any) -> str:
    """The folder as a repository of the Hub on loopback, stored as the test's transport stores."""
    repo = space.repo(name)
    space.admin.create_repo(repo, **settings)
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    if os.environ[TRANSPORT] == "xet":
        operations = [CommitOperationAdd(path, str(file)) for path, file in files.items()]
        HfApi(space.endpoint, space.token).create_commit(repo, operations, commit_message="upload")
    else:
        heavy = [path for path in files if path.endswith((".safetensors", ".bin", ".distcp", ".gguf"))]
        space.admin.put_files(repo, {path: file.read_bytes() for path, file in files.items()}, lfs=heavy)
    return repo
