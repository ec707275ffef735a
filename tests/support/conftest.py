"""The Hub's own tests speak to it through the real client, in this process; each test chooses LFS or Xet."""

import pytest
from huggingface_hub import HfApi, constants

from tests.support.hub.fixtures import Namespace, hub, hub_process, namespace

__all__ = ["hub", "hub_process", "namespace"]


@pytest.fixture
def lfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client as it is without hf_xet."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)


@pytest.fixture
def api(namespace: Namespace, lfs: None) -> HfApi:
    """The client, signed in as the namespace's user, without Xet."""
    return HfApi(endpoint=namespace.endpoint, token=namespace.token)
