"""Start the Hub: prints one JSON line ``{"endpoint", "port", "pid"}`` when it is ready, then serves until killed."""

import argparse
import gc
import json
import os
import threading
import time
from pathlib import Path

from .app import App
from .hub import Hub
from .server import Server
from .settings import Settings

PARENT_POLL_SECONDS = 0.2
COLLECT_EVERY = 50_000  # objects; else half of its time goes into looking through what it keeps


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hub", description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="where all state is kept; made if missing")
    parser.add_argument("--address", default="127.0.0.1", help="where it listens; its CDN is `cdn.` before its name")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--user", action="append", default=[], metavar="NAME:TOKEN[:ROLE]", help="write by default")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="a setting, see settings.py")
    parser.add_argument("--no-xet", action="store_true", help="serve no content store and no xet routes")
    parser.add_argument("--die-with-parent", action="store_true", help="end when the process that started this ends")
    options = parser.parse_args()
    gc.set_threshold(COLLECT_EVERY)
    if options.die_with_parent:
        threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    settings = Settings().changed(
        {name: json.loads(value) for name, _, value in (s.partition("=") for s in options.set)}
    )
    if options.no_xet:
        settings = settings.changed({"xet": False})
    options.dir.mkdir(parents=True, exist_ok=True)
    hub = Hub(options.dir, settings)
    for user in options.user:
        name, token, role = [*user.split(":"), "write"][:3]
        hub.record("account", name=name, type="user")
        hub.record("token", token=token, user=name, role=role)
    server = Server(options.address, options.port, App(hub), hub.faults, hub.log)
    endpoint = f"http://127.0.0.1:{server.port}"
    print(json.dumps({"endpoint": endpoint, "port": server.port, "pid": os.getpid()}), flush=True)
    server.serve()


def end_with(parent: int) -> None:
    """A dead parent's children get another one."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_SECONDS)
    os._exit(0)


if __name__ == "__main__":
    main()
