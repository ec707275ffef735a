"""Commands of the runbooks for the broker, typed as they stand, with a real server and no system around it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from reshard.pipeline.places import Hub
from reshard.pipeline.request import Request
from reshard.worker.broker import find_server
from reshard.worker.queue.jobs import JobStore
from tests.deploy.pages import ROOT, RUNBOOKS, blocks
from tests.support.procs import free_port

# `--rdb` asks for what a replica would get, which is what SAVE writes. The library answers as redis-cli prints.
REDIS_CLI = """\
#!{python}
import os, pathlib, sys, redis
connection = redis.Redis(port={port}, password=os.environ["REDISCLI_AUTH"]).connection_pool.get_connection()
rdb = sys.argv[2] if sys.argv[1] == "--rdb" else None
connection.send_command(*(["SAVE"] if rdb else sys.argv[1:]))
print(connection.read_response().decode())
if rdb:
    pathlib.Path("{data}/dump.rdb").rename(rdb)
"""
# Of the units the broker's is the only one.
SYSTEMCTL = """\
#!/bin/sh
case "$*" in
  "start redis-server")
    "{server}" "{config}" --daemonize yes > "{data}.log" || exit 1
    until redis-cli ping > "{data}.log" 2>&1; do sleep 0.05; done ;;
  "stop redis-server")
    kill "$(cat "{data}/pid")" && while [ -e "{data}/pid" ]; do sleep 0.05; done ;;
esac
"""


class Shell:
    """One with a broker of deploy/redis.conf, whose files lie in a folder in place of the system's."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.port = folder, free_port()
        self.data, config, etc = folder / "var/lib/redis", folder / "etc/redis/reshard.conf", folder / "etc/reshard"
        for made in (self.data, config.parent, etc, folder / "bin", folder / "var/backups"):
            made.mkdir(parents=True)
        own = f"dir {self.data}\npidfile {self.data}/pid\nrequirepass old\n"
        config.write_text((ROOT / "deploy/redis.conf").read_text().replace("port 6379", f"port {self.port}") + own)
        self.password = etc / "broker-password"
        self.password.write_text("old")
        (etc / "reshard.env").touch()
        given = {"python": sys.executable, "port": self.port, "data": self.data, "server": find_server()}
        for name, text in (("redis-cli", REDIS_CLI), ("systemctl", SYSTEMCTL)):
            (folder / "bin" / name).write_text(text.format(config=config, **given))
            (folder / "bin" / name).chmod(0o755)

    def type(self, *scripts: str) -> str:
        """What the commands say, after those that load the settings."""
        script = "\n".join((blocks(RUNBOOKS)[0], *scripts)).replace(" -o redis -g redis", "")
        script = re.sub(r"(?<![\w.])/(etc|var)/", rf"{self._folder}/\1/", script)
        environ = os.environ | {"PATH": f"{self._folder}/bin:{os.environ['PATH']}"}
        done = subprocess.run(["sh", "-euc", script], env=environ, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def store(self) -> JobStore:
        return JobStore.at(f"redis://:{self.password.read_text()}@127.0.0.1:{self.port}/0")

    def accepts(self, password: str) -> bool:
        try:
            return bool(redis.Redis(port=self.port, password=password, retry=Retry(NoBackoff(), 0)).ping())
        except redis.AuthenticationError:
            return False


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path)
    made.type("systemctl start redis-server")
    yield made
    made.type("systemctl stop redis-server")


def submit(shell: Shell, name: str) -> str:
    with shell.store() as store:
        return store.submit(Request(source=Hub(repo="them/model"), target=Hub(repo=f"us/{name}"))).id


def jobs(shell: Shell) -> list[str]:
    with shell.store() as store:
        return [job.id for job in store.recent()]


def test_an_rdb_file_is_restored_and_kept_over_a_restart(shell: Shell) -> None:
    backup, restore = blocks(RUNBOOKS, "Back up and restore the broker", ".rdb")
    before = submit(shell, "backed-up")
    shell.type(backup)
    assert len({before, submit(shell, "forgotten"), *jobs(shell)}) == 2
    shell.type("systemctl stop redis-server", restore)
    assert jobs(shell) == [before]
    after = submit(shell, "after")
    shell.type("systemctl stop redis-server", "rm /var/lib/redis/dump.rdb", "systemctl start redis-server")
    assert {*jobs(shell)} == {before, after}


def test_both_passwords_of_the_broker_are_taken_until_all_machines_have_the_new_one(shell: Shell) -> None:
    (change,) = blocks(RUNBOOKS, "Replace a token", "acl setuser")
    (drop,) = blocks(RUNBOOKS, "Replace a token", "requirepass")
    shell.type(change)
    new = shell.password.read_text()
    assert new != "old" and shell.accepts("old") and shell.accepts(new)
    assert shell.type("export REDISCLI_AUTH=old  # as the shell still has it", drop, "redis-cli ping").endswith(
        "PONG\n"
    )
    assert shell.accepts(new) and not shell.accepts("old")
    shell.type("systemctl stop redis-server", "systemctl start redis-server")
    assert shell.accepts(new) and not shell.accepts("old")
