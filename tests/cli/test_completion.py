"""What a shell completes, asked as bash and zsh ask."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Queue, Run


def offered(reshard: Run, words: str, **env: str) -> list[str]:
    """What bash offers for the last of ``words``."""
    env = {"_RESHARD_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))} | env
    done = reshard(env=env)
    assert (done.code, done.err) == (0, "")
    return done.out.split()


@pytest.fixture
def job(queue: Queue) -> str:
    return queue("submit", "a/b", "--to", "c/d", "-q").out.strip()


@pytest.mark.parametrize(
    "command",
    ["status", "rollback", *(pytest.param(c, marks=pytest.mark.slow) for c in ("watch", "cancel", "retry", "delete"))],
)
def test_a_job_is_completed_by_its_id(command: str, reshard: Run, job: str, url: str) -> None:
    assert job in offered(reshard, f"reshard {command} ", RESHARD_BROKER_URL=url)
    assert offered(reshard, f"reshard {command} {job[:4]}", RESHARD_BROKER_URL=url) == [job]
    assert offered(reshard, f"reshard {command} x{job}", RESHARD_BROKER_URL=url) == []


def test_zsh_shows_what_a_job_is(reshard: Run, job: str, url: str) -> None:
    env = {"_RESHARD_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "reshard watch ", "RESHARD_BROKER_URL": url}
    assert f'"{job}":"queued, a/b -> c/d"' in reshard(env=env).out


def test_schedules_and_catalogs_are_completed_by_their_names(
    reshard: Run, queue: Queue, url: str, tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text("name: mirror\nentries:\n- {repo: a/b, to: g/h}\n")
    assert queue("schedule", "add", "nightly", "a/b", "--to", "e/f", "--cron", "@daily").code == 0
    assert queue("catalog", "submit", tmp_path / "c.yaml").code == 0
    for noun, name in (("schedule", "nightly"), ("catalog", "mirror")):
        verb = "show" if noun == "schedule" else "status"
        for typed in ("", name[:1]):
            assert offered(reshard, f"reshard {noun} {verb} {typed}", RESHARD_BROKER_URL=url) == [name]
        assert offered(reshard, f"reshard {noun} {verb} x", RESHARD_BROKER_URL=url) == []


def test_nothing_is_offered_and_nothing_said_without_a_broker(reshard: Run) -> None:
    assert offered(reshard, "reshard watch ") == []
    assert offered(reshard, "reshard watch ", RESHARD_BROKER_URL="redis://127.0.0.1:1/0") == []


def test_an_option_that_help_shows_only_with_all_others_is_offered_too(reshard: Run) -> None:
    assert offered(reshard, "reshard run --pa") == ["--pack"]
    assert {"--size", "--help-all", "--credential"} <= {*offered(reshard, "reshard submit --")}
