"""What a class answered is kept for later processes, and for no longer than what answers stays the same."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from reshard.pipeline.limits import RELOAD_CACHE
from reshard.pipeline.verifying import verdicts as module
from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.pipeline.verifying.verdicts import Verdicts
from tests.support.procs import wait_for

GetSaved = Callable[..., Any]


def test_an_answer_is_known_to_the_next_process_without_a_child(saved: GetSaved, tmp_path: Path) -> None:
    model = saved("llama-tied")
    with MetaLoader(verdicts=tmp_path) as first:
        asked = first.check(model.config, model.specs)
        again = first.check(model.config, model.specs)
    with MetaLoader(verdicts=tmp_path, python="/bin/false") as second:  # whose child could not start
        known = second.check(model.config, model.specs)
        other = second.check(model.config, {**model.specs, "one.more": ("F32", (1,))})
    assert (asked.result, asked.level, asked.known) == ("clean", "model", False)
    assert again.known and known.known and again == known
    assert (known.result, known.ties, known.class_name) == (asked.result, asked.ties, asked.class_name)
    assert "known" in known.figures() and "seconds" not in known.figures()
    assert (other.result, other.known) == ("skipped", False)


def test_a_child_that_was_started_ahead_serves_the_check_and_ends_where_the_answer_is_known(
    saved: GetSaved, tmp_path: Path
) -> None:
    model = saved("llama-tied")
    with MetaLoader() as patient:
        patient.ahead()
        assert not patient._spare and patient.pid is None
    with MetaLoader(verdicts=tmp_path, eager=True) as first:
        first.ahead()
        wait_for(lambda: first.pid is not None, "the start")
        started = first.pid
        assert first.check(model.config, model.specs).result == "clean"
        assert first.pid == started
        assert first.check(model.config, model.specs).known
        assert first.pid == started, "a child that served somebody stays"
    with MetaLoader(verdicts=tmp_path, eager=True) as second:
        second.ahead()
        wait_for(lambda: second.pid is not None, "the start")
        assert second.check(model.config, model.specs).known
        wait_for(lambda: second.pid is None, "its end")
        assert not second.check(model.config, {**model.specs, "one.more": ("F32", (1,))}).known
        assert second.pid is not None


def test_what_was_cut_short_or_did_not_begin_is_asked_again(saved: GetSaved, tmp_path: Path) -> None:
    model = saved("llama-tied")
    with MetaLoader(verdicts=tmp_path, python="/bin/false") as none:
        assert none.check(model.config, model.specs).result == "skipped"
    with MetaLoader(verdicts=tmp_path) as loader:
        assert not loader.check(model.config, model.specs).known


def test_other_versions_or_another_question_are_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    key = Verdicts().key("{}")
    assert Verdicts().key("{}") == key != Verdicts().key("[]")
    versions: dict[str, str] = {}
    monkeypatch.setattr(module, "version", lambda name: versions.get(name, version(name)))
    for package in module.ASKED:
        versions = {package: "0"}
        assert Verdicts().key("{}") != key


def test_as_many_as_are_wanted_are_kept_and_those_that_were_used_last(tmp_path: Path) -> None:
    first = Verdicts(tmp_path)
    for number in range(RELOAD_CACHE):
        first.keep(f"{number}", {"number": number})
        os.utime(tmp_path / f"{number}.json", (number, number))
    assert Verdicts(tmp_path).get("0") == {"number": 0}
    Verdicts(tmp_path).keep("new", {})
    assert len(list(tmp_path.iterdir())) == RELOAD_CACHE
    assert Verdicts(tmp_path).get("1") is None and Verdicts(tmp_path).get("0") == {"number": 0}
    assert first.get("1") == {"number": 1}
    for number in range(RELOAD_CACHE):
        first.keep(f"more {number}", {})
    assert len(first._held) == RELOAD_CACHE


def test_a_file_that_was_cut_off_is_no_answer_and_is_written_again(tmp_path: Path) -> None:
    Verdicts(tmp_path).keep("key", {"result": "clean"})
    (tmp_path / "key.json").write_text('{"result": "cl')
    assert Verdicts(tmp_path).get("key") is None
    Verdicts(tmp_path).keep("key", {"result": "clean"})
    assert json.loads((tmp_path / "key.json").read_text()) == {"result": "clean"}


def test_a_folder_that_cannot_be_written_is_done_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    kept = Verdicts(tmp_path / "file")
    kept.keep("key", {"result": "clean"})
    assert kept.get("key") == {"result": "clean"}
    assert "is not kept" in caplog.text
