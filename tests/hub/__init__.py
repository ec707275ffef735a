"""A Hugging Face Hub on loopback, for tests, benchmarks and the demo: see README.md."""

from .admin import HubAdmin, HubRefused, User
from .process import HubProcess

__all__ = ["HubAdmin", "HubProcess", "HubRefused", "User"]
