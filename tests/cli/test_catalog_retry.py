"""`reshard catalog retry` and `failures` where not everything that failed can be helped by another turn."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from reshard.pipeline.errors import SourceNotFound, TargetsCollide
from reshard.worker import broker
from reshard.worker.followers.cursor import Cursor
from reshard.worker.queue.jobs import JobStore
from reshard.worker.settings import Settings
from tests.cli.conftest import WHEN, Queue, Run
from tests.worker.followers.builders import begin, definition, rows


@pytest.fixture
def queue(reshard: Run, tmp_path: Path) -> Iterator[Queue]:
    """``reshard`` with a broker that has a catalog of which one source is not there, and two want one target."""
    settings = Settings(broker_url=None, data_dir=tmp_path)
    url = broker.start(settings)
    (absent, _), (left, _), (right, _) = rows(definition(3))
    with JobStore.at(url) as store:
        collide = TargetsCollide(target="us/m1", source="them/m1", others="them/m2")
        found = [(absent, SourceNotFound(repo="them/m0", endpoint="https://hub")), (left, collide), (right, collide)]
        begin(Cursor(store), definition(3), found)
    yield lambda *arguments: reshard(*arguments, env={"RESHARD_BROKER_URL": url})
    broker.stop(settings)


def test_what_only_the_file_can_mend_is_left_out_and_said(queue: Queue) -> None:
    assert queue("catalog", "status").out.splitlines()[-1].split()[:2] == ["mirror", "failed"]
    assert re.search(
        rf"^state +failed since {WHEN} \(.* ago\): 3 of 3 models failed$",
        queue("catalog", "status", "mirror").out,
        re.M,
    )
    said = queue("catalog", "failures", "mirror").out.splitlines()
    assert said[-2].split(maxsplit=1) == [
        "next",
        "after fixing the cause, run `reshard catalog retry mirror --only CODE`",
    ]
    assert said[-1].strip() == "usage.collision: fix the file, then run `reshard catalog submit FILE`"
    first, second = queue("catalog", "retry", "mirror").out.splitlines()
    assert first == "Retrying 1 model of catalog mirror"
    assert second == "Skipped 2 models with usage.collision: fix the file, then run `reshard catalog submit FILE`"
    assert queue("catalog", "retry", "mirror", "--only", "usage.collision").out.splitlines() == [
        "Retrying 0 models of catalog mirror",
        second,
    ]
    (facts,) = queue("catalog", "retry", "mirror", "--only", "usage.collision", "--json").documents
    assert facts == {"name": "mirror", "again": 0, "left": {"usage.collision": 2}, "state": "running"}
