"""One warm reload child for the whole folder: what it promises is that requests do not touch each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from reshard.pipeline.verifying.meta_load import MetaLoader
from tests.pipeline.verifying import models


@pytest.fixture(scope="session")
def meta_loader() -> Iterator[MetaLoader]:
    with closing(MetaLoader()) as it:
        assert it.warm() is None
        yield it


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., models.Saved]:
    """A small model by name, saved once."""
    made: dict[str, models.Saved] = {}

    def get(name: str, **changes: Any) -> models.Saved:
        key = f"{name} {sorted(changes.items())}"
        if key not in made:
            made[key] = models.save(name, tmp_path_factory.mktemp(name), **changes)
        return made[key]

    return get
