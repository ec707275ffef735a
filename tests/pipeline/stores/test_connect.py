"""What a context takes from the environment, and what it shares."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from reshard.pipeline.errors import BadSetting
from reshard.pipeline.limits import MEMORY_FLOOR, MEMORY_FLOOR_XET
from reshard.pipeline.places import Hub
from reshard.pipeline.stores.connect import Context, open_source
from tests.pipeline.stores.conftest import MakeSource, read


def test_the_limits_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RESHARD_TMPDIR", str(tmp_path))
    monkeypatch.setenv("RESHARD_MEMORY_LIMIT", "300MB")
    monkeypatch.setenv("RESHARD_DISK_LIMIT", "2GiB")
    context = Context.from_env()
    assert (context.tmpdir, context.memory_limit, context.disk_limit) == (tmp_path, 300_000_000, 2 * 2**30)


def test_there_are_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TMPDIR", "MEMORY_LIMIT", "DISK_LIMIT"):
        monkeypatch.delenv(f"RESHARD_{name}", raising=False)
    context = Context.from_env()
    assert (context.tmpdir, context.memory_limit) == (Path(tempfile.gettempdir()), MEMORY_FLOOR_XET)
    assert context.disk_limit is None


def test_a_limit_that_is_no_size_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARD_MEMORY_LIMIT", "much")
    with pytest.raises(BadSetting, match="RESHARD_MEMORY_LIMIT=much"):
        Context.from_env()


def test_a_limit_below_what_a_copy_takes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARD_MEMORY_LIMIT", f"{MEMORY_FLOOR - 1}")
    with pytest.raises(BadSetting, match="RESHARD_MEMORY_LIMIT=127999999: a copy needs at least 128,000,000 bytes"):
        Context.from_env()
    monkeypatch.setenv("RESHARD_MEMORY_LIMIT", f"{MEMORY_FLOOR}")
    assert Context.from_env().memory_limit == MEMORY_FLOOR


def test_stores_of_one_credential_share_their_connections(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    one = context.api(Hub(repo="a/b"), "read")
    assert context.api(Hub(repo="c/d"), "write") is one
    monkeypatch.setenv("HF_TOKEN", "another")
    assert context.api(Hub(repo="c/d"), "write") is not one


def test_an_older_revision_can_be_opened(hub_source: MakeSource, context: Context, hub: object) -> None:
    source = hub_source({"x": b"1"})
    repo = source.pin.repo
    hub.put_files(repo, {"x": b"2"})  # type: ignore[attr-defined]
    newer = open_source(Hub(repo=repo), context)
    older = open_source(Hub(repo=repo), context, revision_override=source.pin.commit)
    assert (read(newer, "x"), read(older, "x")) == (b"2", b"1")


def test_a_forked_child_speaks_on_connections_of_its_own(hub_source: MakeSource) -> None:
    source = hub_source({"x": b"1" * 100_000})
    assert read(source, "x") == b"1" * 100_000
    fork = multiprocessing.get_context("fork")
    results = fork.SimpleQueue()
    children = [fork.Process(target=lambda: results.put(read(source, "x") == b"1" * 100_000)) for _ in range(3)]
    for child in children:
        child.start()
    assert read(source, "x") == b"1" * 100_000
    for child in children:
        child.join()
    assert [results.get() for _ in children] == [True] * 3


def test_importing_the_stores_imports_nothing_heavy() -> None:
    code = (
        "import sys, reshard.pipeline.stores.connect; print({'huggingface_hub', 'hf_xet', 'torch'} & set(sys.modules))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "set()"
