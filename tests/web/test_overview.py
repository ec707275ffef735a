"""The overview of a real process: what an operator is told there and does next."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

from reshard.web.pages.wording import COPY
from reshard.worker.fleet.heartbeat import announce, withdraw
from reshard.worker.queue.jobs import JobStore
from reshard.worker.queue.scripts import PREFIX
from tests.support.procs import wait_for
from tests.web.conftest import Site, signed_in
from tests.worker.conftest import process


def test_a_stopped_worker_is_shown_with_what_to_do_until_it_is_back_or_removed(site: Site, store: JobStore) -> None:
    command = [sys.executable, "-c", "input()  # as reshard, by its command line"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as lives, signed_in(site, "read") as client:
        try:
            worker = process(f"{socket.gethostname()}:{lives.pid}")
            announce(store.redis, worker)
            lives.send_signal(signal.SIGSTOP)
            store.redis.delete(f"{PREFIX}process:{worker.name}")  # as after PRESUMED_DEAD
            says = f"{worker.name} is stopped: resume it with <code>kill -CONT {lives.pid}</code>{COPY} or replace it"
            says += f" with <code>reshard up --restart</code>{COPY}"
            # Beside why nothing is begun, which is said on every page as long as no other worker is there.
            wait_for(lambda: client.get("/").text.count(says) == 2, "its line")
            assert "No worker is running" not in client.get("/").text
            announce(store.redis, worker)
            assert "is stopped" not in client.get("/").text
            store.redis.delete(f"{PREFIX}process:{worker.name}")
            assert client.get("/").text.count(says) == 2
            withdraw(store.redis, worker)
            seen = client.get("/").text
            assert "is stopped" not in seen and "No worker is running" in seen
        finally:
            lives.kill()
