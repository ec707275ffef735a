"""The service on one machine: a broker, one worker and one control process that live on when the command ends, and the
page of it where that is installed.

Each is found again and reused, so `up` twice is `up` once.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from reshard.pipeline.errors import BadSetting, ExtraMissing, NotStarted
from reshard.pipeline.request import Priority
from reshard.pipeline.stores.connect import ConnectSettings
from reshard.worker import broker, tracing
from reshard.worker.daemon import Daemon, one_at_a_time
from reshard.worker.fleet.heartbeat import Silent, silent
from reshard.worker.followers.notices import hooks
from reshard.worker.queue.jobs import JobStore, without_password
from reshard.worker.settings import Settings

LOG_FORMAT, FOLDERS = "RESHARD_LOG_FORMAT", "RESHARD_ALLOWED_FOLDERS"
NOTIFY_COMMAND = "RESHARD_NOTIFY_COMMAND"
PATHS = frozenset({"RESHARD_CREDENTIALS", "RESHARD_SIGN_KEYS", "RESHARD_WEB_TOKENS"})  # and the _FILE of each secret
LIBRARY_PATHS = frozenset({
    "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT",
    "HF_HOME", "HF_TOKEN_PATH", "HF_XET_CACHE", "SSL_CERT_DIR", "SSL_CERT_FILE",
})  # fmt: skip
READY = 60.0  # seconds until a worker must have shown a sign of life; it takes three on an idle machine
RESTART = 5.0  # seconds for a process to end that gives no sign of life, and then for the system to end it
STOP = 10.0  # seconds that a process gets beyond what a worker may take to hand back what it has


@dataclass(frozen=True, slots=True)
class Page:
    """One more process, which no job needs: where it will answer, and how it is started."""

    url: str
    command: Sequence[str]
    check: Callable[[], None]  # raises BadSetting where it could not start
    ready: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Service:
    """What `up` found or started."""

    broker: str  # URL without its password
    started: tuple[str, ...]  # of broker, control, worker, web
    found: tuple[str, ...]
    data_dir: Path
    log_dir: Path
    page: str | None = None  # its URL
    no_page: str = ""  # why it does not run where it should
    silent: Sequence[str] = ()  # what runs and gives no sign of life, in words
    folders: Sequence[str] = ()  # what the worker that was started may use, as nobody said otherwise


def up(settings: Settings, page: Page | None = None, restart: bool = False) -> Service:
    """Start what does not run yet, and wait until it does; ``restart``: also what runs and gives no sign of life.

    Raises NoServer, NotStarted, and as ``become_worker`` and ``hooks``; a ``page`` that cannot start is no error.
    """
    check_installed()  # before anything is started, the broker first
    ConnectSettings()  # for the worker, which would say it where nobody looks,
    hooks(settings)  # and for control
    with one_at_a_time(settings.data_dir):  # else two would start two brokers
        return _up(settings, page, restart)


def _up(settings: Settings, page: Page | None, restart: bool) -> Service:
    names: tuple[str, ...] = ("broker", "control", "worker", "web")
    ran = {name for name in names if Daemon(settings.data_dir, name).running()}
    env = {LOG_FORMAT: settings.log_format} | _paths(settings)
    if settings.broker_url is None:
        url = broker.start(settings)
    else:
        url = env["RESHARD_BROKER_URL"] = broker.broker_url(settings)
        ran.add("broker")
    lost, folders = list[str](), _own_folders(settings)
    of = {"worker": env | {FOLDERS: ",".join(folders)} if folders else env}
    with JobStore.at(url) as store:
        store.check_server()
        for name, command in (("control", control_command()), ("worker", worker_command(settings.concurrency))):
            daemon = Daemon(settings.data_dir, name, settings.log_dir)
            # Of a broker that was away nobody could be heard.
            if "broker" in ran and (one := _silent(store, daemon)) is not None:
                if restart and one.why != "unknown":
                    daemon.stop(RESTART)
                    ran.discard(name)
                else:
                    lost.append(str(one))
            daemon.start(command, env=of.get(name, env), ready=partial(_alive, store, daemon), timeout=READY)
    shown, why = None, ""
    try:
        shown = _start_page(settings, page, env)
    except (BadSetting, NotStarted) as error:
        why = str(error)
    if shown is None:
        names = tuple(name for name in names if name != "web")
    started, found = (tuple(name for name in names if (name in ran) is there) for there in (False, True))
    return Service(
        without_password(url), started, found, settings.data_dir, settings.log_dir, shown, why, lost,
        folders if "worker" in started else (),
    )  # fmt: skip


def _paths(settings: Settings) -> dict[str, str]:
    """The paths that are set, as they are from here: what is started runs in "/". Raises BadSetting."""
    set_ = {name: value for name, value in os.environ.items() if value}
    files = (name for name in set_ if name in PATHS or (name.startswith("RESHARD_") and name.endswith("_FILE")))
    env = {name: str(Path(set_[name]).absolute()) for name in files}
    for name in LIBRARY_PATHS & set_.keys():  # huggingface_hub expands both
        env[name] = str(Path(os.path.expandvars(set_[name])).expanduser().absolute())
    program, *words = shlex.split(settings.notify_command.get_secret_value()) if settings.notify_command else [""]
    if "/" in program and not program.startswith("/"):
        if NOTIFY_COMMAND not in set_:  # of a file: a secret, which an environment would show
            name = f"{NOTIFY_COMMAND}_FILE"
            raise BadSetting(name=name, value=set_.get(name, ""), why=f"{program} is relative")
        env[NOTIFY_COMMAND] = shlex.join([str(Path(program).absolute()), *words])
    if any("," in str(folder) for folder in settings.allowed_folders):  # that of "a,b" would be two others
        raise BadSetting(name=FOLDERS, value=set_.get(FOLDERS, ""), why=f"{Path.cwd()} has a comma in its name")
    if settings.allowed_folders:
        env[FOLDERS] = ",".join(map(str, settings.allowed_folders))
    return env | {"RESHARD_DATA_DIR": str(settings.data_dir), "RESHARD_TMPDIR": str(settings.tmpdir)}


def _own_folders(settings: Settings) -> tuple[str, ...]:
    """What the worker may use where nobody says which: whoever reaches this broker of ours is the person it runs as.

    `reshard web` is not told: to those who have a token for it these folders stay closed.
    """
    if settings.broker_url is not None or "allowed_folders" in settings.model_fields_set:
        return ()
    home, here = Path.home(), Path.cwd()
    found = [home] if here.is_relative_to(home) else [home, here]
    return tuple(str(folder) for folder in found if folder != Path("/") and "," not in str(folder))


def _start_page(settings: Settings, page: Page | None, env: dict[str, str]) -> str | None:
    """The URL of the page that runs now, if one does; raises BadSetting, NotStarted."""
    daemon = Daemon(settings.data_dir, "web", settings.log_dir)
    running = daemon.running()
    if running is None and page is not None:
        page.check()
        running = daemon.start(page.command, {"url": page.url}, env, ready=page.ready, timeout=READY)
    return None if running is None else str(running["url"])


def down(settings: Settings) -> tuple[str, ...]:
    """Stop what `up` started; returns what ran. Jobs stay on disk and go on at the next `up`."""
    longest = settings.drain + STOP
    stopped = [name for name in ("web", "worker", "control") if Daemon(settings.data_dir, name).stop(longest)]
    if broker.stop(settings):
        stopped.append("broker")
    return tuple(stopped)


def check_installed() -> None:
    """Raises ExtraMissing unless the packages of the extras that the environment asks for are there, and BadSetting."""
    for package in ("celery", "prometheus_client"):
        if find_spec(package) is None:
            raise ExtraMissing(package=package)
    tracing.check()


def worker_command(concurrency: int, *queues: str) -> list[str]:
    """What `reshard worker` becomes; app.py has the rest, for whoever types it. Without ``queues`` it takes all."""
    return [
        sys.executable, "-m", "reshard.worker.program", "--quiet", "--app", "reshard.worker.app", "worker",
        "--concurrency", str(concurrency), *(("--queues", ",".join(queues)) if queues else ()),
    ]  # fmt: skip


def control_command() -> list[str]:
    return [sys.executable, "-m", "reshard.worker.control"]


def become_worker(
    settings: Settings, concurrency: int | None = None, priority: Priority | None = None, until_idle: bool = False
) -> NoReturn:
    """Turn this process into a worker of one ``priority``, or of all; ``until_idle``: that ends when no job is left.

    Raises NoBroker, what ``check_server`` does, ExtraMissing, and BadSetting for what every job would end with.
    """
    check_installed()
    ConnectSettings()
    url = broker.broker_url(settings)
    with JobStore.at(url) as store:
        store.check_server()
    command = worker_command(concurrency or settings.concurrency, *([priority] if priority else []))
    if os.getpid() == 1:  # cli/start.py says why; app.py takes it, when the one that handles it here is gone
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    ends = {"RESHARD_UNTIL_IDLE": "1"} if until_idle else {}
    safe = {"PYTHONSAFEPATH": "1"}  # nothing is imported from the current folder, which may be a model's
    os.execve(command[0], command, {**os.environ, LOG_FORMAT: settings.log_format, **safe, **ends})


def _silent(store: JobStore, daemon: Daemon) -> Silent | None:
    facts = daemon.running()
    ours = (one for one in silent(store.redis) if one.process.host == socket.gethostname())
    return next((one for one in ours if facts and one.process.pid == facts["pid"]), None)


def _alive(store: JobStore, daemon: Daemon) -> bool:
    facts = daemon.running()
    return facts is not None and any(process.pid == facts["pid"] for process in store.processes())
