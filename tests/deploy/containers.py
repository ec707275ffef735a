"""The trial of the image and the compose file: `python -m tests.deploy.containers ENGINE BASE WHEELS SOURCES`.

One job against a Hub, a drain, a kill, a rolling upgrade in the middle of a job, and the end. Each step says in a line
what it found; the first that finds something else ends it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

from tests.deploy.engine import Engine
from tests.hub import HubProcess
from tests.support.checker import from_hub, read_checkpoint
from tests.support.models import save_model

BASE, IMAGE = "reshard-base", "reshard"
COMPOSE = ["compose", "-f", "/src/deploy/compose.yaml", "-f", "/src/deploy/of-the-trial.yaml"]
OURS = ("worker", "control", "web")
PATIENCE = 180.0  # seconds
LEASE = 5  # seconds; a dead worker is missed soon
SIZE = "200kB"
READS = r"^GET .*model-0000\d-of"  # of weights
# Any user, no name, no capability, nothing to write to but /work.
BARE = ["--read-only", "--cap-drop", "ALL", "--user", "54321:54321", "--network", "none"]


def say(what: str) -> None:
    sys.stdout.write(f"deploy: {what}\n")
    sys.stdout.flush()


def wait_for(found: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (value := found()):
        assert time.monotonic() < deadline, f"{what} did not happen within {PATIENCE:.0f} s"
        time.sleep(0.2)
    return value


def fetched(url: str, token: str = "") -> str:
    """What is published to the machine, as its users see it: these namespaces are its."""
    asked = Request(url, headers={"Authorization": f"Bearer {token}"})
    with build_opener(ProxyHandler({})).open(asked) as answer:
        return str(answer.read().decode())


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The URL of an index of the packages in ``folder``."""
    command = [sys.executable, "-u", "-m", "http.server", "--bind", "127.0.0.1", "--directory", folder, "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        match = re.search(r"port (\d+)", server.stdout.readline())
        assert match is not None
        try:
            yield f"http://127.0.0.1:{match[1]}/"
        finally:
            server.terminate()


class Trial:
    def __init__(self, engine: Engine, sources: Path, hub: HubProcess) -> None:
        self.engine, self.sources, self.hub = engine, sources, hub
        self.docker = engine.docker

    def compose(self, *words: str) -> str:
        return self.docker(*COMPOSE, *words)

    def containers(self, service: str) -> list[str]:
        return self.compose("ps", "--all", "--quiet", service).split()

    def inspect(self, container: str) -> dict[str, Any]:
        (found,) = json.loads(self.docker("inspect", container))
        return dict(found["State"])

    def asked(self, *words: str) -> Any:
        """The first document that a command of the queue answers with."""
        return json.loads(self.compose("exec", "-T", "control", "reshard", *words, "--json").splitlines()[0])

    # ------------------------------------------------------------------------------------------------------- image

    def build(self, index: str) -> str:
        """Returns what BuildKit told of its steps."""
        arguments = {"BASE": BASE, "PIP_INDEX_URL": index, "TORCH_INDEX": index, "REVISION": "trial"}
        given = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
        words = ["--network", "host", "--progress", "plain", "-f", "/src/deploy/Dockerfile", "-t", IMAGE, "/src"]
        done = self.engine.try_docker("build", *given, *words)
        assert done.returncode == 0, done.stderr[-5000:]
        return done.stderr

    def image(self, index: str) -> None:
        self.build(index)
        (found,) = json.loads(self.docker("image", "inspect", IMAGE))
        (base,) = json.loads(self.docker("image", "inspect", BASE))
        say(f"image of {found['Size'] / 1e6:,.0f} MB, {base['Size'] / 1e6:,.0f} MB of them its base")
        assert found["Config"]["User"] == "10001:10001"
        assert found["Config"]["Labels"]["org.opencontainers.image.revision"] == "trial"
        look = "ls / /opt/reshard; pip list --format freeze"
        listed = self.docker("run", "--rm", "--entrypoint", "sh", IMAGE, "-c", look)
        assert not {"src", "dist", "asked", "build"} & set(listed.split())
        assert "nvidia" not in listed and "torch==" in listed
        bare = self.engine.try_docker("run", "--rm", *BARE, IMAGE, "doctor", "--json")
        probes = {probe["name"]: probe["state"] for probe in json.loads(bare.stdout.splitlines()[0])["probes"]}
        assert probes["model check"] == probes["temporary files"] == "ok", bare.stdout + bare.stderr
        say("it runs read-only, without capabilities, as a user that it does not know")

    def a_comment_installs_nothing(self, index: str) -> None:
        module = self.sources / "worker" / "cron.py"
        module.write_text(module.read_text() + "# A comment.\n")
        steps = self.build(index)
        numbers = re.findall(r"^#(\d+) \[.*pip install.*requirements", steps, re.MULTILINE)
        assert numbers and all(f"#{number} CACHED" in steps for number in numbers), steps
        say("a comment in the code installs no dependency again")

    def ends_early(self) -> None:
        """While it starts, nothing of ours handles a SIGTERM yet."""
        for words in (["worker"], ["control"], ["watch", "job"], ["web"]):
            container = self.docker("create", "-e", "RESHARD_BROKER_URL=redis://192.0.2.1:6379/0", IMAGE, *words)
            self.docker("start", container)
            self.docker("stop", "--time", "30", container)
            assert self.inspect(container)["ExitCode"] == 143, words
            self.docker("rm", "--volumes", container)
        say("SIGTERM ends worker, control, watch and web while they start")

    # ----------------------------------------------------------------------------------------------------- compose

    def up(self) -> None:
        token = self.compose("run", "--rm", "web", "token", "ada", "--act", "--quiet")
        self.compose("up", "--detach", "--wait")
        for service in ("broker", *OURS):
            states = [self.inspect(container)["Health"]["Status"] for container in self.containers(service)]
            assert states == ["healthy"] * (2 if service == "worker" else 1), (service, states)
        assert 'reshard_processes{kind="worker"} 2.0' in fetched("http://127.0.0.1:8476/metrics")
        seen = json.loads(fetched("http://localhost:8474/api/v1/service", token))
        assert sorted(process["kind"] for process in seen["processes"]) == ["control", "worker", "worker"]
        (limit,) = (p["facts"]["available"] for p in self.asked("doctor")["probes"] if p["name"] == "memory")
        assert limit < 512 * 2**20, "the limit of the container"
        say("broker, two workers, control and the page are healthy; page and metrics tell of them")

    def job(self, name: str) -> str:
        said = self.compose("exec", "-T", "control", "reshard", "submit", "you/model", "--to", f"you/{name}",
                            "--size", SIZE, "--json")  # fmt: skip
        return str(json.loads(said.splitlines()[0])["id"])

    def done(self, job: str, name: str) -> None:
        wait_for(lambda: self.asked("status", job)["state"] in {"done", "failed"}, f"the end of {name}")
        seen = self.asked("status", job)
        assert seen["state"] == "done", seen
        endpoint = self.hub.endpoint
        published = read_checkpoint(from_hub(endpoint, f"you/{name}", token="hf_you"))
        assert published == read_checkpoint(from_hub(endpoint, "you/model", token="hf_you"))
        assert self.hub.admin.state(f"you/{name}")["commits"] == 2  # the one that made the repository, and ours

    def slowed(self, name: str) -> str:
        """A job in the middle of a copy that lasts."""
        rule = self.hub.admin.fault(READS, "throttle", rate=100_000)
        job = self.job(name)
        wait_for(lambda: any(c["unit"].startswith("group") for c in self.asked("status", job)["claims"]), "a copy")
        self.hub.admin.wait_for_fault(rule, hits=1)
        return job

    def drain(self) -> None:
        job = self.slowed("drained")
        workers = self.containers("worker")
        self.compose("stop", "worker")
        codes = [self.inspect(worker)["ExitCode"] for worker in workers]
        assert codes == [0, 0], codes
        assert self.asked("status", job)["claims"] == []
        self.hub.admin.clear_faults()
        self.compose("up", "--detach", "--wait", "worker")
        self.done(job, "drained")
        say("stopped workers handed their copies back, and the job went on with them")

    def kill(self) -> None:
        job = self.slowed("killed")
        claims = self.asked("status", job)["claims"]
        hosts = {claim["worker"].partition(":")[0] for claim in claims}
        at_work, *_ = [worker for worker in self.containers("worker") if worker[:12] in hosts]
        child = next(claim["worker"].rpartition(".")[2] for claim in claims if at_work.startswith(claim["worker"][:12]))
        self.docker("exec", at_work, "python", "-c", f"import os; os.kill({child}, 9)")
        wait_for(lambda: child not in self._processes(at_work), "the reaping of a killed child")
        self.docker("kill", at_work)
        self.hub.admin.clear_faults()
        self.done(job, "killed")
        assert self.inspect(at_work)["ExitCode"] == 137
        self.docker("start", at_work)
        wait_for(lambda: self.inspect(at_work)["Health"]["Status"] == "healthy", "its health")
        say("a killed child was reaped; a killed worker's job went on elsewhere")

    def _processes(self, container: str) -> dict[str, str]:
        """The pids of all that runs there, each with its state."""
        # One that ends between its listing and its reading is gone, and no error.
        listed = self.docker("exec", container, "sh", "-c", "cat /proc/[0-9]*/stat 2>/dev/null || true").splitlines()
        return {line.split()[0]: line.rpartition(")")[2].split()[0] for line in listed}

    def upgrade(self, index: str) -> None:
        """First the workers, then control, then the page, in the middle of a job."""
        self.build(index)
        before = {service: self.containers(service) for service in OURS}
        job = self.slowed("upgraded")
        for service in OURS:
            self.compose("up", "--detach", "--wait", "--no-deps", service)
        self.hub.admin.clear_faults()
        self.done(job, "upgraded")
        assert all(not set(self.containers(service)) & set(before[service]) for service in OURS)
        say("workers, control and the page were upgraded in the middle of a job, which was done")

    def down(self) -> None:
        for service in OURS:
            for container in self.containers(service):
                assert "Z" not in self._processes(container).values()
        said = self.compose("logs", *OURS)
        assert "Traceback" not in said, said[-5000:]
        self.compose("down", "--volumes", "--timeout", "60")
        # Compose hands a replaced container's own volume on by its name, and then takes it for somebody else's.
        left = self.docker("volume", "ls", "--quiet", "--filter", "name=reshard_")
        assert self.docker("ps", "--all", "--quiet") == left == ""
        say("all of it ended, without a traceback, and nothing is left but what was in /work")


def main(engine_root: Path, base: Path, packages: Path, sources: Path) -> None:
    with Engine(engine_root, sources) as engine, tempfile.TemporaryDirectory() as home:
        server = engine.docker("version", "--format", "{{.Server.Version}}")
        say(f"Docker {server}, {engine.docker('compose', 'version')}")
        engine.load(base, BASE)
        hub = HubProcess(Path(home) / "hub", address="0.0.0.0", users=["you:hf_you"])
        with served(packages) as index, hub:
            trial = Trial(engine, sources, hub)
            trial.image(index)
            trial.a_comment_installs_nothing(index)
            trial.ends_early()
            _set_up(sources, hub, save_model(Path(home) / "model", 24, 100_000, 4))
            trial.up()
            trial.done(trial.job("first"), "first")
            say("a job is done, and its tensors are those of the source")
            trial.drain()
            trial.kill()
            module = sources / "worker" / "cron.py"
            module.write_text(module.read_text() + "# A newer release.\n")
            trial.upgrade(index)
            trial.down()


def _set_up(sources: Path, hub: HubProcess, model: Path) -> None:
    """What an operator does, and a way for the containers to the Hub."""
    deploy = sources / "deploy"
    subprocess.run([deploy / "secrets.sh"], check=True)
    (deploy / "secrets" / "hf-token").write_text("hf_you")
    settings = {
        "HF_ENDPOINT": f"http://hub:{hub.port}", "RESHARD_ALLOWED_TARGETS": "you", "RESHARD_LEASE": str(LEASE),
        "RESHARD_BACKOFF_FIRST": "1",
    }  # fmt: skip
    (deploy / "reshard.env").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    # Health is looked for more often than the image says, so that nobody waits for it.
    there = {"extra_hosts": [f"{name}:host-gateway" for name in ("hub", "cdn.hub")], "healthcheck": {"interval": "3s"}}
    services = {"broker": {"image": BASE}} | dict.fromkeys(OURS, there)
    (deploy / "of-the-trial.yaml").write_text(json.dumps({"services": services}))
    hub.admin.create_repo("you/model")
    contents = {str(p.relative_to(model)): p.read_bytes() for p in model.rglob("*") if p.is_file()}
    hub.admin.put_files("you/model", contents, lfs=[path for path in contents if path.endswith(".safetensors")])


if __name__ == "__main__":
    os.umask(0o022)
    main(*map(Path, sys.argv[1:]))
