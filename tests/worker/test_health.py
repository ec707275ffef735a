"""Probes of real processes over HTTP: alive whatever the broker does, ready only while work gets done."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import psutil
import pytest

from reshard.pipeline.errors import NoAnswer
from reshard.worker import control, health
from reshard.worker.control import Control
from reshard.worker.queue.jobs import JobStore, Process
from reshard.worker.queue.leases import Leases
from reshard.worker.settings import PRESUMED_DEAD, Settings
from tests.support.procs import Broker, Machine, answer, busy, free_port, wait_for
from tests.support.stuck import STUCK


@pytest.mark.slow
def test_a_worker_and_control_are_alive_without_their_broker_and_ready_only_with_it(tmp_path: Path) -> None:
    ports = {"RESHARD_HEALTH_PORT": free_port(), "RESHARD_METRICS_PORT": free_port()}
    environment = {name: str(port) for name, port in ports.items()}
    with Broker(tmp_path) as broker, Machine(tmp_path, broker.url, **environment) as machine:
        machine.control()
        machine.worker(concurrency=1)
        for port in ports.values():
            assert answer(port, "/healthz") == answer(port, "/readyz") == (200, "ok")
            assert answer(port, "/") == answer(port, "/healthz/x") == answer(port, "/favicon.ico")
            assert answer(port, "/")[0] == 404
        assert answer(ports["RESHARD_METRICS_PORT"], "/metrics")[0] == 200
        assert answer(ports["RESHARD_HEALTH_PORT"], "/metrics") == (404, "only /healthz, /readyz")
        with broker.client() as client:
            client.config_set("maxmemory", 1)
            assert answer(ports["RESHARD_METRICS_PORT"], "/readyz") == (
                503,
                "the broker refuses writes: its memory is full",
            )
            client.config_set("maxmemory", 0)
            with busy(client):
                status, why = answer(ports["RESHARD_METRICS_PORT"], "/readyz")
            assert status == 503 and why.startswith("the broker is not responding: BUSY "), why
        broker.kill()
        for port in ports.values():
            wait_for(lambda port=port: answer(port, "/readyz")[0] == 503, "its not being ready", 2 * PRESUMED_DEAD)
            assert answer(port, "/readyz")[1].startswith("the broker is not responding")
            assert answer(port, "/healthz") == (200, "ok")
        broker.start()
        for port in ports.values():
            wait_for(lambda port=port: answer(port, "/readyz")[0] == 200, "its being ready again")


def test_a_ping_finds_what_is_alive_here_whatever_the_broker_does(tmp_path: Path) -> None:
    health, metrics, page = free_port(), free_port(), free_port()
    environment = {
        "RESHARD_HEALTH_PORT": str(health), "RESHARD_METRICS_PORT": str(metrics), "RESHARD_WEB_PORT": str(page),
    }  # fmt: skip
    with Broker(tmp_path) as broker, Machine(tmp_path, broker.url, **environment) as machine:
        worker, control = machine.worker(concurrency=1), machine.control()
        broker.kill()
        for alive, port in ((worker, health), (control, metrics)):
            done = machine.run("ping")
            assert (done.returncode, done.stdout) == (0, f"127.0.0.1:{port}: ok\n")
            alive.signal_all(signal.SIGSTOP)
            done = machine.run("ping", RESHARD_METRICS_PORT="", RESHARD_HEALTH_PORT=str(port))
            assert done.returncode == NoAnswer.exit_code
            assert f"127.0.0.1:{port}: timed out; 127.0.0.1:{page}: [Errno 111]" in done.stderr
            alive.kill()


def test_a_worker_tells_what_it_and_its_children_take(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker, Machine(tmp_path, broker.url) as machine:
        pid = machine.worker(concurrency=2).pid

        def tells_of_all() -> list[Process]:
            family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
            resident = sum(process.memory_info().rss for process in family)
            return [p for p in store.processes() if len(family) > 2 and p.memory == pytest.approx(resident, rel=0.2)]

        with JobStore.at(broker.url) as store:
            (told,) = wait_for(tells_of_all, "a sign of life with the memory of all")
        assert told.temporary is not None


def test_a_drained_worker_is_alive_and_not_ready(tmp_path: Path) -> None:
    port = free_port()
    with Broker(tmp_path) as broker, Machine(tmp_path, broker.url, RESHARD_HEALTH_PORT=str(port)) as machine:
        worker = machine.worker(concurrency=1)
        with JobStore.at(broker.url) as store:
            (name,) = [process.name for process in store.processes() if process.pid == worker.pid]
        assert machine.run("fleet", "drain", name).returncode == 0
        wait_for(lambda: answer(port, "/readyz")[0] == 503, "its not being ready")
        assert answer(port, "/readyz")[1] == "it accepts no work: it is drained, paused itself or is shutting down"
        assert answer(port, "/healthz") == (200, "ok")


def test_a_control_whose_loop_stands_still_is_not_healthy(
    store: JobStore, leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Control(store, leases, Settings(broker_url=store.url))
    assert process.stuck() == ""
    monkeypatch.setattr(control, "STUCK", -1.0)
    assert process.stuck().startswith("its loop has been stuck for")


def test_who_connects_and_says_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health.Handler, "timeout", 0.05)
    server = health.serve(0, "127.0.0.1", healthy=lambda: "", ready=lambda: "")
    assert server is not None
    try:
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=STUCK) as silent:
            assert silent.recv(1) == b""
    finally:
        server.shutdown()
        server.server_close()
