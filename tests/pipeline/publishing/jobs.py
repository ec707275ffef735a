"""Jobs that stop between their steps."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reshard.pipeline.copying.loop import Moved, copy
from reshard.pipeline.places import parse_place
from reshard.pipeline.planning.model import Plan, Receipt
from reshard.pipeline.protocols import Source, Target
from reshard.pipeline.publishing.commit import Published, publish
from reshard.pipeline.request import Options, Request
from reshard.pipeline.reshard import plan
from reshard.pipeline.stores.connect import Context, open_source, open_target
from reshard.pipeline.verifying.meta_load import MetaLoader
from tests.hub.fixtures import Namespace
from tests.pipeline.conftest import TRANSPORT, upload
from tests.support.models import save_model

COMMIT = "POST /api/models/.*/commit/"


class Job:
    """A job that is copied and only waits to be published, as many times as a test likes."""

    def __init__(self, repo: str, target: str, meta_loader: MetaLoader, token: str = "token", **options: Any) -> None:
        self.token = token
        options |= {"size": 20_000, "transport": os.environ[TRANSPORT]}
        request = Request(source=parse_place(repo), target=parse_place(target), options=Options(**options))
        context = Context.from_env()
        self.source: Source = open_source(request.source, context)
        self.target: Target = open_target(request.target, request.options, context)
        self.plan: Plan = plan(request, self.source, self.target, meta_loader)
        self.shards = dict(enumerate(self.plan.shards))
        self.copy()

    def copy(self) -> None:
        self.receipts: dict[str, Receipt] = {}
        sink = self.target.sink(self.token)
        self.attested = [
            copy(self.plan, group, self.shards, self.source, sink, self.receipts, self._sealed, lambda n: None)
            for group in self.plan.groups
        ]

    def _sealed(self, news: list[Receipt], moved: Moved) -> None:
        self.receipts |= {receipt.shard: receipt for receipt in news}

    def publish(self, begin: Callable[[], None] = lambda: None) -> Published:
        return publish(self.plan, self.receipts, self.attested, self.source, self.target, self.token, begin)


@pytest.fixture
def repo(tmp_path: Path, on_hub: Namespace) -> str:
    folder = save_model(tmp_path / "model", 8, 4000, 2)
    return upload(on_hub, "source", folder)


@pytest.fixture
def job(repo: str, on_hub: Namespace, meta_loader: MetaLoader) -> Job:
    on_hub.admin.create_repo(on_hub.repo("target"))
    return Job(repo, on_hub.repo("target"), meta_loader)


def commits(space: Namespace, repo: str = "target") -> int:
    return sum(1 for r in space.admin.log() if r["method"] == "POST" and f"{space.repo(repo)}/commit/" in r["path"])
