"""Whole nights of a catalog: real workers, a real control, the Hub on loopback, and a kill in the middle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from reshard.client.operations.catalogs import told
from reshard.worker.followers.catalogs import Catalogs
from reshard.worker.followers.records import CatalogStatus as Seen
from reshard.worker.queue.jobs import JobStore
from tests.hub.fixtures import Namespace
from tests.support.models import add_friends, arrays, numbered, save_sharded
from tests.support.procs import Broker, Machine, wait_for
from tests.worker.followers.builders import counts

GOOD = ("one", "two", "three", "old")


@pytest.fixture
def machine(namespace: Namespace, tmp_path: Path) -> Iterator[tuple[Machine, Broker, JobStore]]:
    with (
        Broker(tmp_path) as broker,
        Machine(
            tmp_path, broker.url, HF_ENDPOINT=namespace.endpoint, HF_TOKEN=namespace.token,
            RESHARD_LEASE="2", RESHARD_BACKOFF_FIRST="0.2",
        ) as machine,
        JobStore.at(broker.url) as store,
    ):  # fmt: skip
        yield machine, broker, store


def upload(space: Namespace, name: str, folder: Path, seed: int = 0, **settings: object) -> None:
    save_sharded(folder / name, numbered(arrays(6, 2000, seed=seed), 2))
    add_friends(folder / name)
    space.admin.create_repo(space.repo(name), **settings)
    files = {str(path.relative_to(folder / name)): path.read_bytes() for path in (folder / name).iterdir()}
    space.admin.put_files(space.repo(name), files, lfs=[path for path in files if path.endswith(".safetensors")])


def heads(space: Namespace) -> dict[str, str]:
    return {name: space.admin.head(space.repo(f"{name}-cut")) for name in GOOD}


def night(machine: Machine, store: JobStore, file: Path) -> Seen:
    """Watched to its end, in which some models always fail."""
    done = machine.run("catalog", "submit", str(file), "--json", "--at-once", "3", "--watch")
    assert done.returncode == 11, done.stderr + done.stdout
    submitted, *_, seen, error = map(json.loads, done.stdout.splitlines())
    assert (seen["state"], error["error"]["code"]) == ("failed", "job.catalog")
    return Catalogs(store).get(submitted["name"])


@pytest.mark.slow
def test_each_night_does_what_changed_and_nothing_else(
    machine: tuple[Machine, Broker, JobStore], namespace: Namespace, tmp_path: Path
) -> None:
    here, broker, store = machine
    for number, name in enumerate((*GOOD, "left", "right")):
        upload(namespace, name, tmp_path / "models", seed=number)
    HfApi(namespace.endpoint, namespace.token).move_repo(namespace.repo("old"), namespace.repo("renamed"))
    file = tmp_path / "mirror.yaml"
    entries = [f"- repo: {namespace.repo(name)}" for name in (*GOOD, "absent")]
    entries += [f"- {{repo: {namespace.repo(name)}, to: {namespace.repo('same')}}}" for name in ("left", "right")]
    to = f"{namespace.name}/{{name}}-cut"
    file.write_text(f"name: mirror\ndefaults: {{to: '{to}', size: 5kB}}\nentries:\n" + "\n".join(entries))

    # The first night everything dies in the middle, and it ends as if nothing had.
    first = here.control()
    worker = here.worker()
    submitted = here.run("catalog", "submit", str(file), "--at-once", "3")
    assert submitted.returncode == 0, submitted.stderr
    wait_for(lambda: store.recent(), "the first job")
    for process in (worker, first):
        process.kill()
    broker.kill()
    broker.start()
    here.control()
    here.control()
    here.worker()
    wait_for(lambda: Catalogs(store).get("mirror").state == "failed", "the night's end")
    seen = Catalogs(store).get("mirror")
    assert counts(seen) == {"published": 4, "failed": 3}, seen.ended
    codes = {code: sorted(one.repo for one in group) for code, group in told(seen).failures().items()}
    assert codes == {
        "usage.collision": [namespace.repo("left"), namespace.repo("right")],
        "source.not_found": [namespace.repo("absent")],
    }
    assert all(namespace.admin.state(namespace.repo(f"{name}-cut"))["commits"] == 2 for name in GOOD)

    # Nothing changed: no job, and no call but the lists and what they do not show.
    before, jobs = heads(namespace), len(store.recent())
    namespace.admin.log(reset=True)
    assert counts(night(here, store, file)) == {"unchanged": 4, "failed": 3}
    assert (heads(namespace), len(store.recent())) == (before, jobs)
    assert len([entry for entry in namespace.admin.log() if entry["path"].startswith("/api/")]) <= 2 + len(codes) + 1

    # One source's weights and another's README changed: two commits, and one reader of weights.
    save_sharded(tmp_path / "new", numbered(arrays(6, 2000, seed=99), 2))
    files = {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    namespace.admin.put_files(namespace.repo("one"), files, lfs=[n for n in files if n.endswith(".safetensors")])
    namespace.admin.put_files(namespace.repo("two"), {"README.md": b"# new words"})
    namespace.admin.log(reset=True)
    assert counts(night(here, store, file)) == {"unchanged": 2, "published": 2, "failed": 3}
    after = heads(namespace)
    assert {name for name in GOOD if after[name] != before[name]} == {"one", "two"}
    assert namespace.admin.state(namespace.repo("one-cut"))["commits"] == 3
    assert namespace.admin.state(namespace.repo("two-cut"))["commits"] == 3
    assert {repo for repo, ended in Catalogs(store).get("mirror").ended if ended.read} == {namespace.repo("one")}
    assert here.run("catalog", "status", "mirror", "--report", str(tmp_path / "report.md")).returncode == 0
    report = (tmp_path / "report.md").read_text()
    assert "# Catalog mirror: failed" in report
    assert "### `source.not_found`: 1 model" in report
    assert f"| {namespace.repo('one-cut')} | [`{after['one'][:8]}`]({namespace.endpoint}/" in report

    # The broker lost everything: it works from the targets, by one call for each and without a job.
    store.redis.flushall()
    namespace.admin.log(reset=True)
    assert counts(night(here, store, file)) == {"unchanged": 4, "failed": 3}
    assert heads(namespace) == after
    assert store.recent() == []
    calls = [entry for entry in namespace.admin.log() if entry["path"].startswith("/api/")]
    assert len(calls) <= 2 + len(codes) + 1 + len(GOOD), "what a night costs, and each target's history"
    namespace.admin.log(reset=True)
    assert counts(night(here, store, file)) == {"unchanged": 4, "failed": 3}
    assert not [entry for entry in namespace.admin.log() if "/commits/" in entry["path"]]

    # What would be done now is said beforehand.
    namespace.admin.put_files(namespace.repo("three-cut"), {"notes.txt": b"somebody else's"})
    checked = json.loads(here.run("catalog", "check", str(file), "--json").stdout.splitlines()[0])
    assert (checked["unchanged"], checked["drift"]) == (3, [namespace.repo("three")])

    failures = here.run("catalog", "failures", "mirror").stdout
    assert "usage.collision" in failures and "2 models" in failures

    # The broker lost everything once more, and a target is not as it was left: a job looks, and overwrites nothing.
    store.redis.flushall()
    namespace.admin.put_files(namespace.repo("one-cut"), {"config.json": b"{}"})
    changed = heads(namespace)
    assert counts(night(here, store, file)) == {"unchanged": 2, "same": 1, "failed": 4}
    failures = told(Catalogs(store).get("mirror")).failures()
    assert [one.repo for one in failures["target.drift"]] == [namespace.repo("one")]
    assert heads(namespace) == changed
