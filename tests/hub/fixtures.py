"""Pytest fixtures: one Hub process per session, and for each test a user with a namespace of its own."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import pytest

from .admin import HubAdmin, User
from .process import HubProcess

_numbers = count(1)


@dataclass(frozen=True)
class Namespace:
    """A fresh user on the running Hub; ``repo("x")`` is a repo id under it."""

    endpoint: str
    admin: HubAdmin
    user: User

    @property
    def name(self) -> str:
        return self.user.name

    @property
    def token(self) -> str:
        return self.user.token

    def repo(self, name: str) -> str:
        return f"{self.user.name}/{name}"


@pytest.fixture(scope="session")
def hub_process() -> Iterator[HubProcess]:
    """The session's Hub; tests that kill theirs start one of their own."""
    with HubProcess() as process:
        yield process


@pytest.fixture
def hub(hub_process: HubProcess) -> Iterator[HubAdmin]:
    """The session's Hub without faults, with an empty log and its first settings."""
    hub_process.admin.reset()
    yield hub_process.admin
    hub_process.admin.clear_faults()


@pytest.fixture
def namespace(hub: HubAdmin) -> Namespace:
    """A user that no other test has."""
    return Namespace(hub.endpoint, hub, hub.create_user(f"user{next(_numbers)}"))


@pytest.fixture(scope="session", autouse=True)
def xet_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For folders that speak Xet in this process: what hf_xet remembers stays out of the user's own cache.

    It reads this when its first session is made.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_XET_CACHE", str(tmp_path_factory.mktemp("xet")))
        yield
