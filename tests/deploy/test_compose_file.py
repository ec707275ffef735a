"""The compose file, its secrets and its broker, as far as they can be tried without Docker."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, cast

import pytest
import redis
import yaml
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from reshard.pipeline.places import Hub
from reshard.pipeline.request import Request
from reshard.web.settings import PORT
from reshard.worker.broker import find_server
from reshard.worker.control import Control
from reshard.worker.fleet.fleet import Fleet
from reshard.worker.followers.catalogs import Catalogs
from reshard.worker.followers.records import Definition
from reshard.worker.followers.schedules import Schedule, Schedules
from reshard.worker.probes import durability
from reshard.worker.queue.events import EVENTS, TOLD, TOTALS
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.leases import Leases
from reshard.worker.settings import Settings

ROOT = Path(__file__).parents[2]
SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()


def test_the_image_is_built_of_every_folder_of_the_package() -> None:
    copied = re.findall(r"^COPY (\w+) \1$", DOCKERFILE, re.MULTILINE)
    types = ROOT / ".types" / "reshard"  # links to all of the package, its `__init__.py` one into `reshard`
    assert set(copied) == {path.resolve().relative_to(ROOT).parts[0] for path in types.iterdir() if path.is_symlink()}
    let_in = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"}
    asked_for = {word for words in re.findall(r"^COPY (?!--)(.*) \S+$", DOCKERFILE, re.M) for word in words.split()}
    assert let_in == asked_for


def test_the_compose_file_runs_a_broker_two_workers_control_and_the_page() -> None:
    ours = {name: service for name, service in SERVICES.items() if name != "broker"}
    assert ours.keys() == {"worker", "control", "web"}
    assert all(service["command"] == [name] for name, service in ours.items())
    assert ours["worker"]["deploy"]["replicas"] == "${WORKERS:-2}"
    assert ours["worker"]["volumes"] == ["/work"], "workers share no disk"
    for service in ours.values():
        assert service["stop_grace_period"] == "60s"
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        assert service["deploy"]["resources"]["limits"]["memory"]
        assert not any("PASSWORD" in name and not name.endswith("_FILE") for name in service["environment"])


def test_ports_of_the_compose_file_are_those_of_the_image_and_open_to_this_machine_alone() -> None:
    assert SERVICES["web"]["ports"] == [f"127.0.0.1:{PORT}:{PORT}"]
    (port,) = re.findall(r"RESHARD_METRICS_PORT=(\d+)", DOCKERFILE)
    assert SERVICES["control"]["ports"] == [f"127.0.0.1:{port}:{port}"]


def size(text: str) -> int:
    ((number, unit),) = re.findall(r"^(\d+)([kmg])[ib]*$", text.lower())
    return int(number) << {"k": 10, "m": 20, "g": 30}[unit]


def test_a_broker_refuses_jobs_long_before_its_container_would_be_killed_for_its_memory() -> None:
    (own,) = re.findall(r"^maxmemory (\S+)$", (ROOT / "deploy/redis.conf").read_text(), re.M)
    (limit,) = re.findall(r"{BROKER_MEMORY:-(\w+)}", SERVICES["broker"]["deploy"]["resources"]["limits"]["memory"])
    chart = yaml.safe_load((ROOT / "deploy/helm/reshard/values.yaml").read_text())["broker"]
    for most, killed in ((own, limit), (chart["maxmemory"], chart["resources"]["limits"]["memory"])):
        assert 0.5 <= size(most) / size(killed) <= 0.625


def test_a_broker_that_loads_a_long_log_is_not_given_up() -> None:
    assert SERVICES["broker"]["healthcheck"]["start_period"] == "10m"


def test_secrets_that_are_there_are_kept(tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir(mode=0o755)
    made = []
    for _ in range(2):
        subprocess.run([ROOT / "deploy/secrets.sh", tmp_path / "secrets"], check=True)
        made.append({path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()})
    assert made[0] == made[1] and made[0].keys() == {"broker-password", "client-password", "broker-users", "hf-token"}
    assert all(re.fullmatch("[0-9a-f]{64}", made[0][f"{user}-password"]) for user in ("broker", "client"))
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700


def test_the_user_of_clients_in_the_security_page_is_the_one_of_the_compose_file() -> None:
    (may,) = re.findall(r"^user client on #\S+ \S+ (~.*)$", (ROOT / "deploy/secrets.sh").read_text(), re.M)
    assert re.findall(r"^    user client on >PASSWORD (.*)$", (ROOT / "docs/security.md").read_text(), re.M) == [may]


def test_the_broker_of_the_compose_file_lets_clients_use_the_queue_and_nothing_else(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    secrets = tmp_path / "secrets"
    subprocess.run([ROOT / "deploy/secrets.sh", secrets], check=True)
    whole_password, part_password = ((secrets / f"{user}-password").read_text() for user in ("broker", "client"))
    given = {"/data": str(tmp_path), "/run/secrets/broker-users": str(secrets / "broker-users"), "* -::*": "127.0.0.1"}
    words = [given.get(word, word) for word in SERVICES["broker"]["command"][2:]]
    server = subprocess.Popen(
        [str(find_server()), str(ROOT / "deploy/redis.conf"), *words, "--port", str(port)], stdout=subprocess.DEVNULL
    )
    try:
        retry = Retry(ConstantBackoff(0.05), 200)
        whole = redis.Redis(port=port, password=whole_password, retry=retry, retry_on_error=[redis.ConnectionError])
        assert whole.ping()
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=port).ping()
        with JobStore.at(f"redis://client:{part_password}@127.0.0.1:{port}/0") as store:
            job = store.submit(Request(source=Hub(repo="them/model"), target=Hub(repo="us/model"))).id
            assert [known.id for known in store.recent()] == [job] and store.processes() == []
            store.cancel(job)
            assert store.get(job).state == "cancelled"
            store.delete([job])
            assert store.recent() == []
            assert "this user cannot read appendfsync" in durability(store.redis, "here").warning
            assert durability(whole, "here").state == "ok"
            assert whole.info("memory")["maxmemory"] > 0
            Fleet(store).paused()
            catalogs = Catalogs(store)
            catalogs.submit(Definition(name="mine", text="name: mine\nentries: [{repo: a/b, to: us/b}]\n"))
            catalogs.cancel("mine")
            retried = store.submit(Request(source=Hub(repo="them/model"), target=Hub(repo="us/model"))).id
            store.cancel(retried)
            store.retry(retried)
            schedules = Schedules(store)
            schedules.add(Schedule(name="nightly", cron="0 3 * * *", catalog=catalogs.get("mine").definition))
            assert schedules.run("nightly").outcome == "fired"
            of_control = JobStore(whole)
            Control(of_control, Leases(of_control, lambda *_: None, "control"), Settings()).look(listen=0.01)
            said = [(row[b"kind"], row.get(b"state")) for _, row in cast(Any, whole.xrange(EVENTS))]
            assert said.count((b"ended", b"cancelled")) == 2, "what clients do is followed"
            assert {(b"retried", None), (b"catalog", b"cancelled"), (b"catalog", b"expanding")} <= set(said)
            assert whole.hget(TOTALS, "ended:cancelled") == b"2" and whole.xlen(TOLD) == 0
            on_the_stream = ["XADD reshard:events * foo bar", "DEL reshard:events", "XTRIM reshard:events MAXLEN 0"]
            on_the_stream += ["XGROUP DESTROY reshard:events counters", "RENAME reshard:told reshard:events"]
            on_the_stream += ["XACK reshard:events counters 1-1", "COPY reshard:told reshard:events REPLACE"]
            with pytest.raises(redis.exceptions.ResponseError, match="not allowed|permission|can't access"):
                store.redis.eval("return redis.call('XADD', 'reshard:events', '*', 'foo', 'bar')", 0)
            forbidden = [
                *on_the_stream,
                "FLUSHALL",
                "SHUTDOWN",
                "KEYS *",
                "CONFIG GET requirepass",
                "CONFIG SET save 1",
            ]
            forbidden += ["FUNCTION FLUSH", "FUNCTION LIST", "FUNCTION KILL", "FCALL f 0", "FCALL_RO f 0"]
            forbidden += ["SCRIPT FLUSH", "SCRIPT KILL", "SCRIPT DEBUG SYNC"]
            for command in [*forbidden, "ACL LIST", "SET other 1", "GET other", "REPLICAOF NO ONE"]:
                with pytest.raises(redis.exceptions.NoPermissionError):
                    store.redis.execute_command(*command.split())
            with pytest.raises(redis.exceptions.ResponseError, match="not allowed|permissions"):
                store.redis.execute_command("DEBUG", "SLEEP", "0")
    finally:
        server.terminate()
        server.wait()


def test_the_image_asks_for_what_its_extras_and_theirs_ask_for(tmp_path: Path) -> None:
    text = (ROOT / "deploy/Dockerfile").read_text()
    command = re.search(r'^RUN python3 -c "(.+?)" > ', text, re.DOTALL | re.MULTILINE)
    assert command
    code = command[1].replace("\\\n", "").replace("/asked/", f"{ROOT}/")
    env = os.environ | {"EXTRAS": "worker web"}
    asked = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert {*project["dependencies"], *extras["model"], *extras["web"]} <= {*asked.splitlines()}
    assert "reshard[" not in asked
