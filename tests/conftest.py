"""The order of the files, and the seed of the random kills, said at the head of a run that has them.

With the seed, the same kills come again.
"""

from __future__ import annotations

import gc
import os
import random
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests.support import warm_reload

# One Hub and one object store for all files of a process.
pytest_plugins = ["tests.hub.fixtures", "tests.support.s3"]

# How long an example takes is the machine's affair. The command line's profile counts over this one.
settings.register_profile("any_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_machine")
# For `make test`: the same examples each time, so that green stays green, and fewer; test-all looks for new ones.
settings.register_profile("quick", settings.get_profile("ci"), max_examples=30)

ROOT = Path(__file__).parents[1]

# They take longest, most of it waiting for the processes that they start. The first goes on beside the second, and none
# is left to the end, when one process of a parallel run would do it alone.
LONGEST = [
    ROOT / "tests" / name
    for name in (
        "worker/test_workers.py",
        "pipeline/test_memory_formats.py",
        "pipeline/verifying/test_class_sweep.py",
        "formats/test_table.py",
        "test_packaging.py",
        "worker/test_mixed_catalog.py",
        "worker/fleet/test_fleet_at_work.py",
        "worker/queue/test_life_of_a_job.py",
        "worker/test_two_machines.py",
        "worker/test_two_releases.py",
        "worker/test_refusing_broker.py",
        "cli/test_devices.py",
        "chaos/test_lost_tail.py",
        "chaos/test_the_suite_can_fail.py",
    )
]
assert all(path.exists() for path in LONGEST)
SHARED = "tests/pipeline/verifying/test_class_sweep.py"  # 80 minutes for one process, with nothing that its tests share
SLOW_TIMEOUT = 1800  # seconds after which a slow test hangs; a machine may take 5 times what another does


MODULES_KEPT = pytest.StashKey[int]()
MODULES_AT_ONCE = 200  # imported since, as with torch


@pytest.fixture(scope="module", autouse=True)
def _imports_are_no_garbage(request: pytest.FixtureRequest) -> None:
    """Else each collection looks through them: a third of the processor time of a process with all of them."""
    stash = request.config.stash
    if len(sys.modules) > stash.get(MODULES_KEPT, 0) + MODULES_AT_ONCE:
        gc.collect()
        gc.freeze()
        stash[MODULES_KEPT] = len(sys.modules)


@pytest.fixture(scope="session", autouse=True)
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of this process, and of those that it starts, note what they copied."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    return Path(os.environ["XDG_STATE_HOME"]) / "reshard"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files one after the other: the longest, then those with the most tests (which is xdist's own order)."""
    tests = Counter(item.path for item in items)
    rank = {path: number for number, path in enumerate(LONGEST)}
    items.sort(key=lambda item: (rank.get(item.path, len(rank)), -tests[item.path]))
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT))


class ByFile(LoadFileScheduling):
    """A file's tests for one process, but for those that any may take one by one."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if nodeid.startswith(SHARED) else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    return ByFile(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """What the processes of a parallel run share is in the environment."""
    os.environ.setdefault("CHAOS_SEED", str(random.SystemRandom().randrange(1 << 32)))
    if warm_reload.PROGRAM not in os.environ:
        children = ExitStack()
        children.enter_context(warm_reload.reload_children())
        config.add_cleanup(children.close)
    warm_reload.stand_in()


def pytest_report_header(config: pytest.Config) -> list[str]:
    if "not slow" in config.option.markexpr:
        return []
    from tests.chaos.service import servers

    there = ", ".join(name for name, path in servers().items() if path)
    return [f"random kills: CHAOS_SEED={os.environ['CHAOS_SEED']}, on {there}"]
