"""A night of mixed models with real workers: each ends as the table says, and killed in the middle it ends the same.

`mixed.MODELS` is the table that every form is held to.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from reshard.client.catalog_report import markdown
from reshard.client.operations.catalogs import told
from reshard.worker.followers.catalogs import Catalogs
from reshard.worker.followers.records import CatalogStatus as Seen
from reshard.worker.queue.jobs import JobStore
from tests.hub.process import HubProcess
from tests.support.procs import Broker, Machine, Proc, wait_for
from tests.worker.mixed import FORCED, LAB, LAB_TOKEN, MODELS, PUBLISHED, TOKEN, US, World, build, credentials, table

AT_ONCE = 6  # jobs; more than the workers take, so that some wait when a worker dies
PATIENCE = 240.0  # seconds; the long form takes two minutes on an idle machine, and ours is shared

ALL = ("broker", "control", "first", "second")


class Night:
    """Two machines with a worker each, control on one of them, and a broker that keeps what it is told."""

    def __init__(self, folder: Path, hub: HubProcess) -> None:
        (folder / "credentials.toml").write_text(credentials(hub))
        self.broker = Broker(folder)
        self.machines = [
            Machine(
                folder / f"machine-{number}", self.broker.url, HF_ENDPOINT=hub.endpoint, HF_TOKEN=TOKEN,
                LAB_TOKEN=LAB_TOKEN, RESHARD_CREDENTIALS=str(folder / "credentials.toml"),
                RESHARD_LEASE="2", RESHARD_BACKOFF_FIRST="0.2",
            )
            for number in range(2)
        ]  # fmt: skip
        self._running: dict[str, Proc] = {}

    def __enter__(self) -> Night:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(ALL)

    def start(self) -> None:
        """Whatever is dead, all of it at once."""
        if not self.broker.alive():
            self.broker.start()
        first, second = self.machines
        starts = {"control": first.control, "first": first.worker, "second": second.worker}
        dead = [name for name in starts if name not in self._running or not self._running[name].alive()]
        with ThreadPoolExecutor() as threads:
            self._running |= zip(dead, threads.map(lambda name: starts[name](), dead), strict=True)

    def kill(self, names: Sequence[str]) -> None:
        """SIGKILL to these and all that they started, at once."""
        processes = [self._running[name] for name in names if name in self._running]
        for process in processes:
            process.signal_all(signal.SIGKILL)
        if "broker" in names:
            self.broker.kill()
        for process in processes:
            process.kill()

    def seen(self, name: str) -> Seen:
        with JobStore.at(self.broker.url) as store:
            return Catalogs(store).get(name)


@pytest.fixture(scope="module")
def hub() -> Iterator[HubProcess]:
    with HubProcess(users=[f"{US}:{TOKEN}", f"{LAB}:{LAB_TOKEN}"]) as process:
        for form in FORMS:
            World(process, form).make_accounts()
        yield process


@pytest.fixture(scope="module")
def night(hub: HubProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Night]:
    with Night(tmp_path_factory.mktemp("night"), hub) as running:
        yield running


def go(night: Night, world: World, kills: Mapping[float, Sequence[str]]) -> Seen:
    """Submit the catalog and see it to its end; one source is force-pushed while its weights are copied."""
    file = night.machines[0].folder / f"{world.name}.yaml"
    file.write_text(world.catalog())
    headers = 2  # files, whose headers are read for the plan; the next read is of weights
    copying = world.admin.fault(rf"^GET /_cdn/models/{world.repo(FORCED)}/", "hold", times=1, skip=headers)
    submitted = night.machines[0].run("catalog", "submit", str(file), "--at-once", str(AT_ONCE))
    assert submitted.returncode == 0, submitted.stderr
    world.admin.wait_for_fault(copying, waiting=1, timeout=PATIENCE)
    world.force_push()
    for share, names in kills.items():
        wait_for(lambda so=share: len(night.seen(world.name).ended) >= so * len(world.models), f"{share:.0%}", PATIENCE)
        seen = night.seen(world.name)
        assert seen.state == "running" and seen.active, f"nothing is left to be killed at {share:.0%}"
        night.kill(names)
        world.admin.release(copying)
        night.start()
    world.admin.release(copying)
    wait_for(lambda: night.seen(world.name).state != "running", f"the end of {world.name}", PATIENCE)
    return night.seen(world.name)


# Which models, and who dies when: at first while the weights of one model are copied, then when so much has ended.
SHORT = [name for name, model in MODELS.items() if model.short]
FORMS: dict[str, tuple[Sequence[str], Mapping[float, Sequence[str]]]] = {
    "short": (SHORT, {}),
    "short-killed": (SHORT, {0.0: ALL}),
    "sixty": (list(MODELS), {}),
    "sixty-killed": (list(MODELS), {0.0: ALL, 0.6: ("first",), 0.75: ("broker",), 0.85: ("control", "second")}),
}


@pytest.mark.parametrize(
    "form", [pytest.param(f, marks=[] if f == "short-killed" else [pytest.mark.slow]) for f in FORMS]
)
def test_each_model_ends_as_the_table_says(night: Night, hub: HubProcess, tmp_path: Path, form: str) -> None:
    names, kills = FORMS[form]
    world = World(hub, form, build(names, tmp_path))
    world.put(tmp_path)
    seen = go(night, world, kills)
    assert world.became(seen) == table(names), told(seen).model_dump_json(indent=1)
    assert seen.state == "failed"
    world.check()
    page = markdown(told(seen))
    assert {code for code in table(names).values() if f"\n### `{code}`: " in page} == {*table(names).values()} - {
        PUBLISHED
    }
    assert page.count("/commit/") == list(table(names).values()).count(PUBLISHED)


def test_there_are_at_least_sixty() -> None:
    assert len(MODELS) >= 60
