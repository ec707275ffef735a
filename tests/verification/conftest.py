"""One run of all mutations for the whole folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from reshard.pipeline.verifying.meta_load import MetaLoader
from tests.verification.table import Results, results


@pytest.fixture(scope="session")
def meta_loader() -> Iterator[MetaLoader]:
    with closing(MetaLoader()) as it:
        assert it.warm() is None
        yield it


@pytest.fixture(scope="session")
def found(tmp_path_factory: pytest.TempPathFactory, meta_loader: MetaLoader) -> Results:
    return results(tmp_path_factory.mktemp("mutations"), meta_loader)
