"""Expanding a catalog of 60 models, with the Hub's budget enforced in proportion to one of thousands."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from reshard.pipeline.catalogs.definition import parse, request_for
from reshard.pipeline.errors import HubError, ReshardError
from reshard.pipeline.request import Request
from reshard.pipeline.stores.connect import Context
from reshard.worker.fleet.rate_limit import rate_limiters
from reshard.worker.followers import expander as module
from reshard.worker.followers.cursor import Cursor
from reshard.worker.followers.expander import Expander, expanded
from reshard.worker.followers.records import Definition, Entry
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.scripts import PREFIX
from tests.hub import HubProcess
from tests.pipeline.stores.conftest import Impatient
from tests.support import mirror
from tests.support.procs import wait_for
from tests.worker.conftest import followed
from tests.worker.followers.builders import counts

COUNT = 60
QUOTA, WINDOW = 25, 1  # calls in so many seconds; the real Hub's are 1,000 in 300
LISTS = 2  # calls that tell every source and every target


def definition(count: int = COUNT) -> Definition:
    entries = "".join(f"- repo: them/m{number}\n" for number in range(count))
    return Definition(
        name="mirror", text=f"name: mirror\ndefaults: {{to: 'us/{{name}}', size: 5kB}}\nentries:\n{entries}"
    )


def requests(definition: Definition) -> list[Request]:
    catalog = parse(definition.text, "c.yaml")
    return [request_for(catalog, entry, entry.repo or "") for entry in catalog.entries]


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    """A Hub with all the sources and, published from them, all the targets."""
    folder = tmp_path_factory.mktemp("mirror")
    with HubProcess(folder / "hub", users=["them:hf_them", "us:hf_us"]) as hub:
        first, *rest = requests(definition())
        template = mirror.publish(hub, first, folder / "model", "hf_us")
        hub.kill()
        mirror.write(folder / "hub", hub.endpoint, template, rest, published=True)
        yield hub.start()


@pytest.fixture
def hub(mirrored: HubProcess, monkeypatch: pytest.MonkeyPatch) -> HubProcess:
    monkeypatch.setenv("HF_ENDPOINT", mirrored.endpoint)
    monkeypatch.setenv("HF_TOKEN", "hf_us")
    mirrored.admin.reset()
    return mirrored


def night(catalogs: Cursor) -> dict[str, int]:
    """One run from its submission until nothing is left but jobs; what became of the entries."""
    catalogs.submit(definition())
    expander = Expander(catalogs, lambda wanted: expanded(wanted, Context.from_env(), catalogs))

    def look() -> bool:
        expander.look(catalogs.expanding())
        return catalogs.get("mirror").state != "expanding"

    wait_for(look, "the expanding")
    followed(catalogs.store)
    return counts(catalogs.get("mirror"))


def calls(hub: HubProcess, part: str = "/api/") -> int:
    """Those that were answered, by what is in their paths."""
    return sum(part in request["path"] and request["status"] == 200 for request in hub.admin.log())


@pytest.mark.slow
def test_a_night_without_a_record_costs_a_call_each_and_the_next_one_a_share(hub: HubProcess, store: JobStore) -> None:
    hub.admin.settings(rate_limits={"api": {"quota": QUOTA, "window": WINDOW}})
    assert night(Cursor(store)) == {"unchanged": COUNT}
    assert calls(hub) == COUNT + LISTS
    assert any(request["status"] == 429 for request in hub.admin.log()), "the budget was no obstacle"
    assert store.recent() == []

    hub.admin.log(reset=True)
    assert night(Cursor(store)) == {"unchanged": COUNT}
    assert calls(hub) == LISTS


def test_what_changed_becomes_a_job_and_nothing_else(hub: HubProcess, store: JobStore) -> None:
    hub.admin.put_files("them/m7", {"notes.txt": b"new"})
    hub.admin.put_files("us/m8", {"mine.txt": b"somebody else's"})
    assert night(Cursor(store)) == {"unchanged": COUNT - 2}
    assert {str(job.request.source) for job in store.recent()} == {"them/m7", "them/m8"}


def impatient() -> Context:
    """One that tries again at once."""
    return Context.from_env(lambda budget: Impatient())


def test_what_was_asked_before_the_hub_went_away_is_not_asked_again(hub: HubProcess, store: JobStore) -> None:
    hub.admin.fault("/commits/", "status", status=503, skip=20)
    catalogs = Cursor(store)
    with pytest.raises(HubError):
        expanded(definition(), impatient(), catalogs)
    found = store.redis.hlen(f"{PREFIX}catalog:mirror:record")
    assert calls(hub, "/commits/") == 20 >= found > 0
    hub.admin.clear_faults()
    hub.admin.log(reset=True)
    expanded(definition(), impatient(), catalogs)
    assert calls(hub, "/commits/") == COUNT - found


def test_a_catalog_says_why_it_waits_until_its_hub_is_back(
    hub: HubProcess, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EXPAND_AGAIN", 0.0)
    hub.admin.fault("/api/models", "status", status=503)
    catalogs = Cursor(store)
    catalogs.submit(definition())
    expander = Expander(catalogs, lambda wanted: expanded(wanted, impatient(), catalogs))
    expander.look(catalogs.expanding())
    wait_for(lambda: catalogs.get("mirror").note is not None, "the note")
    seen = catalogs.get("mirror")
    assert seen.state == "expanding" and seen.note is not None
    assert hub.endpoint in seen.note and seen.note.endswith("; trying again")
    assert catalogs.now("mirror").note == seen.note
    hub.admin.clear_faults()

    def look() -> bool:
        expander.look(catalogs.expanding())
        return catalogs.get("mirror").state != "expanding"

    wait_for(look, "the expanding")
    assert catalogs.get("mirror").note is None


def test_a_model_that_is_not_there_says_how_the_catalog_goes_on(hub: HubProcess, store: JobStore) -> None:
    one = Definition(name="mirror", text="name: mirror\nentries:\n- {repo: them/none, to: us/none}\n")
    [(_, error)], _ = expanded(one, Context.from_env(), Cursor(store))
    assert error is not None and "`reshard catalog retry mirror`" in error.next_step
    assert "same command" not in error.next_step
    assert "set HF_TOKEN or RESHARD_CREDENTIALS for the control process, then run" in error.next_step


def test_what_is_cancelled_meanwhile_is_asked_about_no_more(hub: HubProcess, store: JobStore) -> None:
    hub.admin.settings(rate_limits={"api": {"quota": QUOTA, "window": 300}})
    catalogs = Cursor(store)

    def ask(wanted: Definition) -> list[tuple[Entry, ReshardError | None]]:
        return expanded(wanted, Context.from_env(rate_limiters(store.redis, expander.check, expander.check)), catalogs)

    expander = Expander(catalogs, ask)
    catalogs.submit(definition())
    expander.look(catalogs.expanding())
    wait_for(lambda: calls(hub) == QUOTA, "the end of the budget")
    expander.look(catalogs.expanding())
    assert expander.busy
    catalogs.cancel("mirror")
    expander.look(catalogs.expanding())
    wait_for(lambda: not expander.busy, "the end of its wait for calls")
    assert catalogs.get("mirror").state == "cancelled"
