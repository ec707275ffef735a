"""Settings come from the environment, and a wrong one is said plainly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from reshard.cli.web import web_settings
from reshard.pipeline.errors import BadSetting
from reshard.web.settings import WebSettings
from reshard.worker.settings import Settings, default_data_dir, secrets_of, settings


def test_lists_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARD_ALLOWED_TARGETS", "a, b/c ,")
    monkeypatch.setenv("RESHARD_ALLOWED_FOLDERS", "/x,/y")
    read = Settings()
    assert read.allowed_targets == ("a", "b/c")
    assert read.allowed_folders == (Path("/x"), Path("/y"))
    assert read.allowed_sources is None


def test_shares_are_names_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARD_SHARES", "ada=2, catalog nightly=0.5,")
    assert Settings().shares == {"ada": 2, "catalog nightly": 0.5}


@pytest.mark.parametrize("share", ["lots", "99", "0"])
def test_a_share_is_a_number_within_bounds(share: str) -> None:
    with pytest.raises(ValidationError):
        Settings(shares={"ada": share})


def test_an_empty_variable_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARD_BROKER_URL", "")
    monkeypatch.setenv("RESHARD_CONCURRENCY", "")
    assert Settings().broker_url is None


def test_the_brokers_password_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARD_BROKER_URL", "redis://:secret@host/0")
    assert "secret" not in repr(Settings())


WRONG = [("CONCURRENCY", "many"), ("CONCURRENCY", "0"), ("LEASE", "-1"), ("SHARES", "ada"), ("KEEP_DAYS", "inf")]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_names_the_variable(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.cache_clear()
    monkeypatch.setenv(f"RESHARD_{name}", value)
    with pytest.raises(BadSetting, match=f"RESHARD_{name}={value}"):
        settings()
    settings.cache_clear()


@pytest.mark.parametrize(
    "url",
    [
        "localhost:6379", "http://localhost:6379", "redis://127.0.0.1:abc/0", "redis:///0", "redis+socket://",
        "redis://127.0.0.1:6379/x", "redis://127.0.0.1:6379/0?db=x", "redis+socket:///run/redis.sock?db=x",
    ],
)  # fmt: skip
def test_a_broker_that_is_no_url_of_a_redis_is_refused_without_showing_it(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.cache_clear()
    monkeypatch.setenv("RESHARD_BROKER_URL", url)
    with pytest.raises(BadSetting, match=r"^RESHARD_BROKER_URL=\.\.\.: not a URL like redis://"):
        settings()
    settings.cache_clear()


@pytest.mark.parametrize(
    "url", ["redis://:p@host", "rediss://u:p@host:6380/1", "redis+socket:///run/redis.sock?db=3", "redis://h/"]
)
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


@pytest.fixture
def unread() -> Iterator[None]:
    """Settings are read once in a process; here they are read anew, and again after the test."""
    settings.cache_clear()
    web_settings.cache_clear()
    yield
    settings.cache_clear()
    web_settings.cache_clear()


def test_every_secret_may_stand_in_a_file(unread: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "RESHARD_BROKER_URL": "redis://ours:6379/0",
        "RESHARD_BROKER_PASSWORD": "of the broker",
        "RESHARD_API_TOKEN": "rsh_token",
        "RESHARD_NOTIFY_COMMAND": "notify --now",
        "RESHARD_NOTIFY_URL": "https://hooks.example/secret",
        "RESHARD_NOTIFY_APPRISE": "json://hooks.example",
        "RESHARD_WEB_HOOK_SECRET": "of the webhook",
    }
    for name, value in values.items():
        (tmp_path / name).write_text(f"{value}\n")
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(f"{name}_FILE", str(tmp_path / name))
    fields = [*secrets_of(Settings), *secrets_of(WebSettings)]
    assert {name for _, name in fields} == values.keys()
    read = {**dict(settings()), **{f"web_{field}": value for field, value in web_settings()}}
    for name, value in values.items():
        assert read[name.removeprefix("RESHARD_").lower()].get_secret_value() == value


def test_a_variable_counts_before_a_file(unread: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARD_BROKER_PASSWORD", "itself")
    monkeypatch.setenv("RESHARD_BROKER_PASSWORD_FILE", str(tmp_path / "nowhere"))
    password = settings().broker_password
    assert password is not None and password.get_secret_value() == "itself"


def test_a_file_that_holds_no_secret_is_named(unread: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RESHARD_BROKER_PASSWORD", raising=False)
    monkeypatch.setenv("RESHARD_BROKER_PASSWORD_FILE", str(tmp_path / "secret"))
    with pytest.raises(BadSetting, match="RESHARD_BROKER_PASSWORD_FILE=.*secret: cannot read it: No such file"):
        settings()
    (tmp_path / "secret").write_text("\n")
    with pytest.raises(BadSetting, match="empty"):
        settings()
    (tmp_path / "secret").write_bytes(b"\xff")
    with pytest.raises(BadSetting, match="not text"):
        settings()


def test_a_wrong_value_from_a_file_is_not_shown(unread: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "url").write_text("http://secret@host")
    monkeypatch.delenv("RESHARD_BROKER_URL", raising=False)
    monkeypatch.setenv("RESHARD_BROKER_URL_FILE", str(tmp_path / "url"))
    with pytest.raises(BadSetting) as caught:
        settings()
    assert "secret" not in str(caught.value) + repr(caught.value)
