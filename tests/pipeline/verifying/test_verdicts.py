"""What a class answered is kept for later processes, and for no longer than what answers stays the same."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from reshard.pipeline.installed import version_of
from reshard.pipeline.limits import RELOAD_CACHE
from reshard.pipeline.verifying import verdicts as module
from reshard.pipeline.verifying.child.server import Allowed
from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.pipeline.verifying.verdicts import ModelCheck, Verdicts
from tests.support.procs import wait_for

GetSaved = Callable[..., Any]
CLEAN = ModelCheck("clean", "it takes them", "model", "Llama", ties={"a": "b"}, counts={"missing": 0})


def test_an_answer_is_known_to_the_next_process_without_a_child(saved: GetSaved, tmp_path: Path) -> None:
    model = saved("llama-tied")
    with closing(MetaLoader(verdicts=tmp_path)) as first:
        asked = first.check(model.config, model.specs)
        again = first.check(model.config, model.specs)
    with closing(MetaLoader(verdicts=tmp_path, python="/bin/false")) as second:  # whose child could not start
        known = second.check(model.config, model.specs)
        other = second.check(model.config, {**model.specs, "one.more": ("F32", (1,))})
    assert (asked.result, asked.level, asked.known) == ("clean", "model", False)
    assert again.known and known.known and again == known
    assert (known.result, known.ties, known.class_name) == (asked.result, asked.ties, asked.class_name)
    assert "known" in known.figures() and "seconds" not in known.figures()
    assert (other.result, other.known) == ("skipped", False)


@pytest.mark.parametrize("ending", ["skipped", "failed", "inconclusive", "not begun"])
def test_only_what_a_class_took_is_known_to_others(saved: GetSaved, tmp_path: Path, ending: str) -> None:
    model = saved("llama-tied")
    config = b'{"model_type": "none-of-them"}' if ending == "skipped" else model.config
    lost = {name: spec for name, spec in model.specs.items() if "norm" not in name}
    allowed = Allowed(seconds=0.01) if ending == "inconclusive" else None
    never_starts = {"python": "/bin/false"} if ending == "not begun" else {}
    with closing(MetaLoader(verdicts=tmp_path, **never_starts)) as loader:
        found = loader.check(config, model.specs, lost if ending == "failed" else None, allowed=allowed)
    assert found.result == {"not begun": "skipped"}.get(ending, ending)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_a_child_that_was_started_ahead_serves_the_check_and_ends_where_nothing_is_asked(
    saved: GetSaved, tmp_path: Path
) -> None:
    model = saved("llama-tied")
    with closing(MetaLoader()) as patient:
        threads = {*threading.enumerate()}
        patient.ahead([model.config])
        assert {*threading.enumerate()} <= threads and patient.pid is None
    with closing(MetaLoader(verdicts=tmp_path, eager=True)) as first:
        first.ahead([model.config])
        wait_for(lambda: first.pid is not None, "the start")
        started = first.pid
        assert first.check(model.config, model.specs).result == "clean"
        first.enough()
        assert first.warm() is None and first.pid == started, "a child that served somebody stays"
    with closing(MetaLoader(verdicts=tmp_path, eager=True)) as second:
        second.ahead([model.config])
        wait_for(lambda: second.pid is not None, "the start")
        assert second.check(model.config, model.specs).known
        second.enough()
        wait_for(lambda: second.pid is None, "its end")
        assert not second.check(model.config, {**model.specs, "one.more": ("F32", (1,))}).known
        assert second.pid is not None
    with closing(MetaLoader(tmpdir=tmp_path, eager=True)) as third:
        third.ahead([model.config])
        wait_for(lambda: third.pid is not None, "the start")
        assert third.warm() is None, "it has its imports"
        homes = [*tmp_path.glob("reshard-reload-*")]
        third.enough()
        wait_for(lambda: third.pid is None, "its end")
        assert len(homes) == 1 and not homes[0].exists()
        third.ahead([model.config])
        wait_for(lambda: third.pid is not None, "the next start")
        assert third.warm() is None, "it is of another job"


def test_a_loader_that_was_closed_starts_no_child(tmp_path: Path) -> None:
    loader = MetaLoader(tmpdir=tmp_path, eager=True)
    loader.close()
    assert loader.warm() == "the reload was closed"
    assert [*tmp_path.iterdir()] == []


def test_other_versions_or_another_question_are_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    key = Verdicts().key("{}")
    assert Verdicts().key("{}") == key != Verdicts().key("[]")
    versions: dict[str, str] = {}
    monkeypatch.setattr(module, "version_of", lambda name: versions.get(name) or version_of(name))
    for package in module.PACKAGES:
        versions = {package: "0"}
        assert Verdicts().key("{}") != key
    versions = {}
    monkeypatch.setattr(module, "code_digest", lambda: "other")
    assert Verdicts().key("{}") != key


def test_as_many_as_are_wanted_are_kept_and_those_that_were_used_last(tmp_path: Path) -> None:
    first = Verdicts(tmp_path)
    for number in range(RELOAD_CACHE):
        first.keep(f"{number}", CLEAN, lasting=True)
        os.utime(tmp_path / f"{number}.json", (number, number))
    assert Verdicts(tmp_path).get("0") == CLEAN
    Verdicts(tmp_path).keep("new", CLEAN, lasting=True)
    assert len(list(tmp_path.iterdir())) == RELOAD_CACHE
    assert Verdicts(tmp_path).get("1") is None and Verdicts(tmp_path).get("0") == CLEAN
    assert first.get("1") == CLEAN
    for number in range(RELOAD_CACHE):
        first.keep(f"more {number}", CLEAN, lasting=False)
    assert first.get("0") == CLEAN  # from its file, in the place of the oldest
    assert first.get("more 0") is None and first.get("more 1") == CLEAN
    assert Verdicts(tmp_path).get("more 0") is None


@pytest.mark.parametrize(
    "content", ['{"result": "cl', "[]", "{}", "5", '{"level": "model", "result": "clean", "reason": 5}', "[" * 100_000]
)
def test_a_file_that_holds_something_else_is_no_answer_and_is_written_again(tmp_path: Path, content: str) -> None:
    Verdicts(tmp_path).keep("key", CLEAN, lasting=True)
    (tmp_path / "key.json").write_text(content)
    assert Verdicts(tmp_path).get("key") is None
    Verdicts(tmp_path).keep("key", CLEAN, lasting=True)
    assert Verdicts(tmp_path).get("key") == CLEAN


def test_a_folder_that_cannot_be_written_is_done_without_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    kept = Verdicts(tmp_path / "file")
    for key in ("one", "two"):
        kept.keep(key, CLEAN, lasting=True)
        assert kept.get(key) == CLEAN
    assert caplog.text.count("cannot cache") == 1


def test_an_answer_that_cannot_be_written_is_kept_in_memory_alone(tmp_path: Path) -> None:
    kept, report = Verdicts(tmp_path), ModelCheck("report", "as the source", "model", unexpected=("half \ud800",))
    kept.keep("key", report, lasting=True)
    assert kept.get("key") == report and [*tmp_path.iterdir()] == []
