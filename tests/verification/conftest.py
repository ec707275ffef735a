"""One run of all mutations for the whole folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from reshard.pipeline.verifying.meta_load import Reload
from tests.verification.table import Results, results


@pytest.fixture(scope="session")
def reload() -> Iterator[Reload]:
    with Reload() as it:
        assert it.warm() is None
        yield it


@pytest.fixture(scope="session")
def found(tmp_path_factory: pytest.TempPathFactory, reload: Reload) -> Results:
    return results(tmp_path_factory.mktemp("mutations"), reload)
