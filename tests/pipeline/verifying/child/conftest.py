"""The child is the subject here: each is started as anyone's is, and none forked from a warm process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from reshard.pipeline.verifying.meta_load import MetaLoader
from tests.support.warm_reload import cold


@pytest.fixture(scope="module", autouse=True)
def started() -> Iterator[None]:
    with cold():
        yield


@pytest.fixture(scope="module")
def meta_loader(started: None) -> Iterator[MetaLoader]:
    with closing(MetaLoader()) as it:
        assert it.warm() is None
        yield it
