"""Settings come from the environment, and a wrong one is said plainly."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard.pipeline.errors import BadSetting
from reshard.worker.settings import Settings, default_data_dir, settings


def test_lists_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARD_ALLOWED_TARGETS", "a, b/c ,")
    monkeypatch.setenv("RESHARD_ALLOWED_FOLDERS", "/x,/y")
    read = Settings()
    assert read.allowed_targets == ("a", "b/c")
    assert read.allowed_folders == (Path("/x"), Path("/y"))
    assert read.allowed_sources is None


def test_an_empty_variable_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARD_BROKER_URL", "")
    monkeypatch.setenv("RESHARD_CONCURRENCY", "")
    assert Settings().broker_url is None


def test_the_brokers_password_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARD_BROKER_URL", "redis://:secret@host/0")
    assert "secret" not in repr(Settings())


@pytest.mark.parametrize(("name", "value"), [("CONCURRENCY", "many"), ("CONCURRENCY", "0"), ("LEASE", "-1")])
def test_a_wrong_value_names_the_variable(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.cache_clear()
    monkeypatch.setenv(f"RESHARD_{name}", value)
    with pytest.raises(BadSetting, match=f"RESHARD_{name}={value}"):
        settings()
    settings.cache_clear()


@pytest.mark.parametrize(
    "url", ["localhost:6379", "http://localhost:6379", "redis://127.0.0.1:abc/0", "redis:///0", "redis+socket://"]
)
def test_a_broker_that_is_no_url_of_a_redis_is_refused_without_showing_it(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.cache_clear()
    monkeypatch.setenv("RESHARD_BROKER_URL", url)
    with pytest.raises(BadSetting, match=r"^RESHARD_BROKER_URL=\.\.\.: not a URL like redis://"):
        settings()
    settings.cache_clear()


@pytest.mark.parametrize("url", ["redis://:p@host", "rediss://u:p@host:6380/1", "redis+socket:///run/redis.sock"])
def test_a_broker_is_reached_by_tcp_tls_or_a_socket(url: str) -> None:
    assert Settings(broker_url=url).broker_url is not None


def test_data_lies_where_the_desktop_standard_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert default_data_dir() == Path("/data/reshard")
    monkeypatch.delenv("XDG_DATA_HOME")
    assert default_data_dir() == Path.home() / ".local" / "share" / "reshard"


def test_logs_lie_with_the_state_of_programs_or_with_the_data_where_an_operator_chose_a_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert Settings().log_dir == Path("/state/reshard/logs")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert Settings().log_dir == Path.home() / ".local" / "state" / "reshard" / "logs"
    monkeypatch.setenv("RESHARD_DATA_DIR", "/data/of/one")
    assert Settings().log_dir == Path("/data/of/one")
