"""The seed of the random kills, said at the head of a run that has them: with it, the same kills come again."""

from __future__ import annotations

import os
import random

import pytest


def pytest_configure() -> None:
    """In the environment, so that the processes of a parallel run share one."""
    os.environ.setdefault("CHAOS_SEED", str(random.SystemRandom().randrange(1 << 32)))


def pytest_report_header(config: pytest.Config) -> list[str]:
    if "not slow" in config.option.markexpr:
        return []
    from tests.chaos.service import servers

    there = ", ".join(name for name, path in servers().items() if path)
    return [f"random kills: CHAOS_SEED={os.environ['CHAOS_SEED']}, on {there}"]
