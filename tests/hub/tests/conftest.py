"""The Hub's own tests speak to it through the real client, in this process; each test chooses LFS or Xet."""

from pathlib import Path

import pytest
from huggingface_hub import HfApi, constants

from tests.hub.fixtures import Namespace
from tests.hub.proven import proven


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without slow tests, those that passed on this very Hub are left out."""
    ours = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    if ours and "not slow" in config.option.markexpr and proven():
        config.hook.pytest_deselected(items=ours)
        items[:] = [item for item in items if item not in set(ours)]


@pytest.fixture
def lfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client as it is without hf_xet."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)


@pytest.fixture
def api(namespace: Namespace, lfs: None) -> HfApi:
    """The client, signed in as the namespace's user, without Xet."""
    return HfApi(endpoint=namespace.endpoint, token=namespace.token)
