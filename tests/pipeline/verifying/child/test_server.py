"""The reload child under attack and under load: it always answers, within its limits, and runs nothing of a repo's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers

from reshard.pipeline import limits
from reshard.pipeline.verifying.child.model import UNSAFE_KEYS, cleaned
from reshard.pipeline.verifying.child.server import REFUSED, Allowed, read_answer
from reshard.pipeline.verifying.meta_load import MetaLoader
from reshard.pipeline.verifying.verdicts import ModelCheck
from tests.pipeline.verifying.models import Saved, Specs, deepseek_fp8, layout
from tests.support.measured import within
from tests.support.stuck import STUCK

ROOT = Path(__file__).parents[4]
GetSaved = Callable[..., Saved]

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
NORM: Specs = {"model.norm.weight": ("F32", (16,))}


def llama(**changes: Any) -> bytes:
    return json.dumps({**LLAMA, **changes}).encode()


ENDLESS = llama(num_hidden_layers=10_000_000)


def child_of(meta_loader: MetaLoader) -> psutil.Process:
    """The warm process."""
    assert meta_loader.warm() is None
    assert meta_loader.pid is not None
    return psutil.Process(meta_loader.pid)


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Return when another process has got so far; there is no event to wait for."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        threading.Event().wait(0.01)


STRICT = Allowed(seconds=10, cpu=1, memory=256 * limits.MIB)


# ------------------------------------------------------------------------------------------------------------- hostile


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 10_000_000}, "used up its 1 s of CPU time"),
        ({"hidden_size": 10**9}, "can't allocate memory"),
        ({"hidden_size": 10**18}, "overflow"),
        ({"head_dim": 10**10}, "can't allocate memory"),
        ({"num_labels": 10**9}, "more memory than its limit of"),
        ({"hidden_size": "huge"}, "rejects the config"),
        ({"hidden_size": -16}, "negative dimension"),
        ({"rope_scaling": {"type": "of-tomorrow", "factor": 1.0}}, "cannot be built"),
        ({"architectures": ["LlamaPreTrainedModel"]}, "cannot be built"),
    ],
    ids=str,
)
def test_a_hostile_config_ends_inconclusive_and_hurts_nobody(
    changes: dict[str, Any], reason: str, meta_loader: MetaLoader
) -> None:
    warm = child_of(meta_loader)
    allowed = STRICT if "CPU time" in reason else replace(STRICT, cpu=10)  # memory is to run out first
    found = meta_loader.check(llama(**changes), NORM, allowed=allowed)
    assert (found.level, found.result) == ("structural", "inconclusive")
    assert reason in found.reason
    assert found.peak_rss < 1_000_000_000
    assert child_of(meta_loader) == warm
    assert meta_loader.check(llama(), NORM).result == "report"


def test_a_config_that_nests_too_deeply_is_inconclusive(meta_loader: MetaLoader) -> None:
    found = meta_loader.check(b'{"architectures":["LlamaForCausalLM"],"x":' + b"[" * 900 + b"]" * 900 + b"}", NORM)
    assert (found.result, found.reason) == ("inconclusive", "the config is nested too deeply for the reload")


@pytest.mark.slow
def test_five_thousand_tiny_layers_end_within_the_default_limits(meta_loader: MetaLoader) -> None:
    found = meta_loader.check(llama(num_hidden_layers=5000, hidden_size=2, intermediate_size=2), NORM)
    assert found.result == "report", "what takes longer is inconclusive"
    assert len(found.missing) <= limits.REPORT_NAMES_MAX + 1


def test_a_request_that_takes_too_long_is_inconclusive_and_the_child_stays(meta_loader: MetaLoader) -> None:
    warm = child_of(meta_loader)
    found = meta_loader.check(ENDLESS, NORM, allowed=Allowed(seconds=0.5))
    assert (found.result, found.reason) == ("inconclusive", "the reload took longer than 0.5 s")
    assert warm.children() == []
    assert child_of(meta_loader) == warm


@pytest.mark.parametrize(
    ("allowed", "end"),
    [
        (Allowed(seconds=0.2), "the reload took longer than 0.2 s"),
        (Allowed(rss=1), "the reload was stopped because it used more than 1 byte of memory"),
        (Allowed(seconds=60), None),
    ],
)
def test_a_fork_that_stops_in_the_middle_of_its_answer_is_as_limited(allowed: Allowed, end: str | None) -> None:
    here, there = os.pipe()
    ours, owner = Pipe()
    os.write(there, b'{"result": "cle')
    if end is None:
        owner.close()
    said = bytearray()
    assert read_answer(here, said, ours, os.getpid(), allowed) == end
    os.close(here)
    os.close(there)


def ended_at_work(
    meta_loader: MetaLoader, warm: psutil.Process, end: Callable[[psutil.Process], None]
) -> tuple[ModelCheck, psutil.Process]:
    """What a check says that is ended while the child's fork is at it, and that fork, which ``end`` is given."""
    found: list[ModelCheck] = []
    asking = threading.Thread(target=lambda: found.append(meta_loader.check(ENDLESS, NORM)))
    asking.start()
    until(lambda: warm.children() != [])
    fork = warm.children()[0]
    end(fork)
    asking.join(timeout=STUCK)
    return found[0], fork


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGKILL, "the reload was killed"),
        (signal.SIGSEGV, "the reload crashed with SIGSEGV"),
        (signal.SIGBUS, "the disk was full"),
    ],
)
def test_a_fork_that_is_killed_is_inconclusive_and_the_child_stays(
    number: signal.Signals, reason: str, meta_loader: MetaLoader
) -> None:
    warm = child_of(meta_loader)
    found, _ = ended_at_work(meta_loader, warm, lambda fork: fork.send_signal(number))
    assert found.result == "inconclusive"
    assert reason in found.reason
    assert child_of(meta_loader) == warm


@pytest.mark.slow
def test_a_child_that_is_killed_is_inconclusive_and_replaced() -> None:
    with closing(MetaLoader(grace=0.5)) as meta_loader:
        warm = child_of(meta_loader)
        home = Path(warm.cwd())
        found, fork = ended_at_work(meta_loader, warm, lambda fork: warm.kill())
        assert found.result == "inconclusive"
        assert "killed by SIGKILL" in found.reason
        psutil.wait_procs([fork], timeout=10)
        assert not fork.is_running()
        assert not home.exists()

        assert child_of(meta_loader) != warm


@pytest.mark.slow
def test_a_child_that_is_stuck_or_closed_is_inconclusive_and_gone() -> None:
    with closing(MetaLoader(grace=0.5)) as meta_loader:
        first = child_of(meta_loader)
        first.suspend()
        stuck = meta_loader.check(llama(), NORM, allowed=Allowed(seconds=0.5))
        assert (stuck.result, stuck.reason) == ("inconclusive", "no response within 1 s")
        assert not first.is_running()
        assert meta_loader.pid is None

        found, _ = ended_at_work(meta_loader, child_of(meta_loader), lambda fork: meta_loader.close())
        assert found.result == "inconclusive"
        assert "exceeds" not in found.reason and "no response" not in found.reason
        assert meta_loader.pid is None


@pytest.mark.parametrize(
    "moment", ["busy", *(pytest.param(m, marks=pytest.mark.slow) for m in ("idle", "stuck", "closed"))]
)
def test_an_adopted_child_ends_like_ones_own(moment: str) -> None:
    owner = MetaLoader()
    warm = child_of(owner)
    home, orphan = Path(warm.cwd()), owner.leave()
    assert orphan is not None and owner.warm() == "the reload was closed"
    with closing(MetaLoader(grace=0.5)) as meta_loader:
        meta_loader.adopt(orphan)
        assert child_of(meta_loader) == warm
        assert meta_loader.check(llama(), NORM).result == "report"
        if moment == "busy":
            found, fork = ended_at_work(meta_loader, warm, lambda fork: warm.kill())
            assert (found.result, found.reason) == ("inconclusive", "the reload child ended")
            until(lambda: not fork.is_running() or fork.status() == psutil.STATUS_ZOMBIE)
        elif moment == "stuck":
            warm.suspend()
            stuck = meta_loader.check(llama(hidden_size=32), NORM, allowed=Allowed(seconds=0.5))
            assert (stuck.result, stuck.reason) == ("inconclusive", "no response within 1 s")
        elif moment == "idle":
            warm.kill()
            warm.wait(30)
            assert meta_loader.check(llama(hidden_size=32), NORM).result == "report"
            assert meta_loader.pid != warm.pid
        else:
            meta_loader.close()
        until(lambda: not warm.is_running() or warm.status() == psutil.STATUS_ZOMBIE)
        assert not home.exists()


def test_a_loader_that_was_closed_starts_no_other_child() -> None:
    """A check in another thread may come to its start only after that."""
    meta_loader = MetaLoader()
    meta_loader.close()
    assert meta_loader.warm() == "the reload was closed"
    assert meta_loader.pid is None


_ORPHAN = """
import threading, sys
from reshard.pipeline.verifying.meta_load import MetaLoader
meta_loader = MetaLoader()
assert meta_loader.warm() is None
print("warm", flush=True)
config, specs = sys.argv[1].encode(), {"model.norm.weight": ("F32", (16,))}
meta_loader.check(config, specs)
"""


def test_the_child_and_its_fork_end_when_their_owner_is_killed() -> None:
    owner = subprocess.Popen([sys.executable, "-c", _ORPHAN, ENDLESS.decode()], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"warm\n"
    until(lambda: len(psutil.Process(owner.pid).children(recursive=True)) == 2)
    family = psutil.Process(owner.pid).children(recursive=True)
    owner.kill()
    owner.communicate()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []


# ----------------------------------------------------------------------------------------------------------- isolation


def _plant_kernels(folder: Path, canary: Path) -> None:
    """A `kernels` package of a version that transformers accepts, which tells when it is asked for code."""
    anything = "CUDAProperties = Device = KernelizeFallback = LayerRepository = LocalLayerRepository = ROCMProperties"
    functions = "replace_kernel_forward_from_hub = use_kernel_mapping = kernelize = register_kernel_mapping"
    (folder / "kernels").mkdir()
    (folder / "kernels" / "__init__.py").write_text(f"""
class Anything:
    def __init__(self, *args, **kwargs): pass
{anything} = Anything
class Mode: INFERENCE = TRAINING = TORCH_COMPILE = 1
def register_kernel_mapping(*args, **kwargs): pass
{functions}
def use_kernel_forward_from_hub(name): return lambda found: found
def use_kernelized_func(name): return lambda found: found
def get_kernel(*args, **kwargs): open({str(canary)!r}, "a").write(str(args))
""")
    (folder / "kernels-0.18.5.dist-info").mkdir()
    (folder / "kernels-0.18.5.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.5\n"
    )


SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTPS_PROXY", "RESHARD_BROKER_URL", "AWS_SECRET_ACCESS_KEY")


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[MetaLoader, Path]]:
    """A reload that stands in a folder of planted modules, and a file that exists once one of them has run."""
    folder = tmp_path_factory.mktemp("repo")
    canary = folder / "canary"
    _plant_kernels(folder, canary)
    repo = folder / "cwd"
    repo.mkdir()
    for module in ("torch", "modeling_planted", "configuration_planted"):
        (repo / f"{module}.py").write_text(f"open({str(canary)!r}, 'a').write('{module}')\nclass Planted: pass\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(repo)
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        for name in SECRETS:
            patch.setenv(name, "hf_secret")
        with closing(MetaLoader()) as meta_loader:
            assert meta_loader.warm() is None
            patch.undo()
            yield meta_loader, canary


_CONTROL = """
import transformers
config = transformers.LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
config._attn_implementation = "kernels-community/planted"
try:
    transformers.LlamaForCausalLM(config)
except Exception as error:
    print(error)
"""

REMOTE = {"AutoConfig": "configuration_planted.Planted", "AutoModelForCausalLM": "modeling_planted.Planted"}
KERNEL = "kernels-community/planted"


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        ({"auto_map": REMOTE}, "model"),
        ({"auto_map": REMOTE, "architectures": ["Planted"], "model_type": "planted"}, "structural"),
        ({"auto_map": {"AutoModelForCausalLM": "someone/else--modeling_planted.Planted"}}, "model"),
        ({"attn_implementation": KERNEL}, "model"),
        ({"_attn_implementation": KERNEL}, "model"),
        ({"_attn_implementation_internal": {"": KERNEL}}, "model"),
        ({"experts_implementation": KERNEL}, "model"),
        ({"use_kernels": True, "kernel_config": {"RMSNorm": f"{KERNEL}:RMSNorm"}}, "model"),
        ({"transformers_weights": "../../planted.safetensors"}, "model"),
        ({"_name_or_path": "someone/else", "name_or_path": "someone/else"}, "model"),
    ],
    ids=str,
)
def test_nothing_that_a_config_names_is_run(
    changes: dict[str, Any], level: str, planted: tuple[MetaLoader, Path]
) -> None:
    meta_loader, canary = planted
    found = meta_loader.check(llama(**changes), NORM)
    assert found.level == level, found
    assert not canary.exists()


# Spelt out here once more: what is taken out of the one list must be missed by the other.
NAMES_CODE_OR_FILES = (
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "experts_implementation",
    "_experts_implementation",
    "_experts_implementation_internal",
    "auto_map",
    "_name_or_path",
    "name_or_path",
    "transformers_weights",
    "kernel_config",
    "use_kernels",
    "fusion_config",
    "distributed_config",
)


@pytest.mark.parametrize("key", NAMES_CODE_OR_FILES)
def test_what_names_code_or_files_is_taken_out_wherever_it_stands(key: str) -> None:
    named = {key: KERNEL}
    config = {"x": 1, "text_config": {**named, "y": [{**named, "z": [[named]]}]}, **named}
    assert cleaned(config) == {"x": 1, "text_config": {"y": [{"z": [[{}]]}]}}


def test_every_key_that_is_taken_out_is_tried() -> None:
    assert {*NAMES_CODE_OR_FILES} == UNSAFE_KEYS


@pytest.mark.slow
def test_the_canary_would_sing(planted: tuple[MetaLoader, Path]) -> None:
    """The control: the planted kernel does run when transformers is handed the same name without our care."""
    _, canary = planted
    assert not canary.exists()
    environment = {**os.environ, "PYTHONPATH": str(canary.parent), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-P", "-c", _CONTROL], env=environment, check=True, capture_output=True)
    assert KERNEL in canary.read_text()
    canary.unlink()


_LIMITED = """
import os, pty, socket, subprocess, sys
from pathlib import Path
from reshard.pipeline.verifying.child.server import limit
from reshard.pipeline.verifying.child.server import Allowed
limit(Allowed(file=1000))
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
try:
    {action}
except OSError as error:
    print(error)
"""


def limited(action: str) -> str:
    """What ``action`` is told in a process that is held to what a fork may use."""
    script = _LIMITED.replace("{action}", action)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout


NETWORK_AND_PROGRAMS = [
    ("socket.create_connection(('127.0.0.1', 9))", "socket.getaddrinfo"),
    ("socket.gethostbyname('localhost')", "socket.gethostbyname"),
    ("socket.socket().connect(('127.0.0.1', 9))", "socket.connect"),
    ("socket.socket().bind(('127.0.0.1', 0))", "socket.bind"),
    ("udp.sendto(b'x', ('127.0.0.1', 9))", "socket.sendto"),
    ("udp.sendmsg([b'x'], [], 0, ('127.0.0.1', 9))", "socket.sendmsg"),
    ("subprocess.run(['true'])", "subprocess.Popen"),
    ("os.system('true')", "os.system"),
    ("os.execv('/bin/true', ['true'])", "os.exec"),
    ("os.posix_spawn('/bin/true', ['true'], {})", "os.posix_spawn"),
    ("os.fork()", "os.fork"),
    ("os.forkpty()", "os.forkpty"),
    ("pty.spawn(['true'])", "pty.spawn"),
    ("os.spawnl(os.P_WAIT, '/bin/true', 'true')", "os.fork"),
]


@pytest.mark.parametrize(("action", "event"), NETWORK_AND_PROGRAMS)
def test_a_fork_may_use_neither_network_nor_other_programs(action: str, event: str) -> None:
    assert limited(action) == f"the reload is not allowed to use {event}\n"


def test_everything_that_a_fork_may_not_use_is_tried() -> None:
    elsewhere = {"os.spawn"}  # raised on Windows only; here it is a fork
    assert {event for _, event in NETWORK_AND_PROGRAMS} | elsewhere == REFUSED


def test_a_fork_may_write_no_file_larger_than_it_is_allowed(tmp_path: Path) -> None:
    written = tmp_path / "written"
    assert "File too large" in limited(f"Path({str(written)!r}).write_bytes(bytes(2000))")
    assert written.stat().st_size == 1000


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_child_gets_no_token_no_proxy_and_a_home_of_its_own(planted: tuple[MetaLoader, Path]) -> None:
    child = child_of(planted[0])
    environment = child.environ()
    assert "hf_secret" not in "".join(environment.values())
    assert environment["HF_HUB_OFFLINE"] == "1"
    home = Path(environment["HOME"])
    assert Path(child.cwd()) == home == Path(environment["HF_HOME"])
    assert home not in (Path.home(), Path.cwd())


# ------------------------------------------------------------------------------------------------------- without torch


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that has the standard library and nothing else."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False, symlinks=True)
    return str(folder / "bin" / "python")


_WITHOUT = """
import dataclasses, json, sys
from contextlib import closing
sys.modules.update(dict.fromkeys(["torch", "transformers", "accelerate"]))  # None: as though they were not installed
from reshard.pipeline.verifying.meta_load import MetaLoader
with closing(MetaLoader()) as meta_loader:
    print(json.dumps(dataclasses.asdict(meta_loader.check(b'{"model_type": "llama"}', {"x": ("F32", (1,))}))))
"""


def test_without_torch_it_says_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT], capture_output=True, text=True, check=True, timeout=STUCK)
    found = json.loads(done.stdout)
    assert (found["level"], found["result"]) == ("structural", "skipped")
    lacking = "torch and transformers and accelerate not installed here"  # and no path: pages show it
    assert found["reason"] == f"{lacking}; the reload needs the extra `model`"


def test_an_installation_that_breaks_on_import_is_told(bare_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / ".types"))
    with closing(MetaLoader(python=bare_python)) as meta_loader:
        found = meta_loader.check(llama(), NORM)
    assert (found.level, found.result) == ("structural", "skipped")
    assert "cannot start the reload: ModuleNotFoundError: No module named" in found.reason


def test_its_home_is_where_there_is_room_for_what_it_writes(tmp_path: Path) -> None:
    """Seen from inside, by a python that does nothing else than to say where it is."""
    python, room = tmp_path / "python", tmp_path / "room"
    python.write_text(f"#!/bin/sh\necho $PWD $TMPDIR > {tmp_path}/seen\n")
    python.chmod(0o755)
    room.mkdir()
    with closing(MetaLoader(python=str(python), tmpdir=room)) as meta_loader:
        assert "cannot start" in (meta_loader.warm() or "")
    home, tmpdir = (tmp_path / "seen").read_text().split()
    assert (Path(home).parent, tmpdir) == (room, home)
    assert not list(room.iterdir())


def test_a_python_that_ends_at_once_is_told() -> None:
    with closing(MetaLoader(python="/bin/false")) as meta_loader:
        found = meta_loader.check(llama(), NORM)
    assert (found.result, found.reason) == (
        "skipped",
        "cannot start the reload: the reload child ended with code 1",
    )


def test_an_answer_without_an_end_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = tmp_path / "python"
    endless.write_text("#!/bin/sh\nprintf '\\177\\377\\377\\377' >&0\nexec cat /dev/zero >&0\n")
    endless.chmod(0o755)
    monkeypatch.setattr(limits, "RELOAD_ANSWER", 100_000)
    with closing(MetaLoader(start=2, python=str(endless))) as meta_loader:
        assert meta_loader.warm() == "cannot start the reload: its response exceeds 100,000 bytes"


# --------------------------------------------------------------------------------------------------------------- speed


# Processor time, which is what these take on an idle machine: the suite may share its own with others.


def used(child: psutil.Process) -> float:
    """Seconds of processor time of the child and all forks that it has waited for."""
    times = child.cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)


def test_a_tiny_model_is_checked_within_half_a_second_when_warm(saved: GetSaved, meta_loader: MetaLoader) -> None:
    model = saved("llama")
    child = child_of(meta_loader)
    before = used(child)
    for attempt in range(4):
        assert meta_loader.check(model.with_config(attempt=attempt), model.specs).result == "clean"
    assert within((used(child) - before) / 4, 0.5)


def test_the_same_question_is_answered_from_memory_and_a_cut_short_one_is_asked_again(meta_loader: MetaLoader) -> None:
    first = meta_loader.check(llama(attempt=1), NORM)
    warm = child_of(meta_loader)
    warm.suspend()
    try:
        for again in ((NORM,), (dict(NORM), dict(NORM))):
            assert meta_loader.check(llama(attempt=1), *again) == replace(first, known=True)
    finally:
        warm.resume()
    other = meta_loader.check(llama(attempt=1), NORM, {**NORM, "x": ("F32", (1,))})
    assert other.result == "failed"
    late = Allowed(seconds=0.01)
    cut_short = meta_loader.check(llama(attempt=2), NORM, allowed=late)
    assert cut_short.result == "inconclusive"
    assert meta_loader.check(llama(attempt=2), NORM).result == "report"


def test_threads_may_share_one_reload(saved: GetSaved, meta_loader: MetaLoader) -> None:
    model = saved("llama")
    found: list[ModelCheck] = []
    threads = [
        threading.Thread(target=lambda n=n: found.append(meta_loader.check(model.with_config(thread=n), model.specs)))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=STUCK)
    assert [check.result for check in found] == ["clean"] * 4


# What importing a torch that was built for CUDA takes beside the CPU's: it loads the CUDA libraries, whether there is a
# device or not. 456 to 530 MB were measured where the CPU's took under 450.
OF_CUDA = 130_000_000  # bytes


def bound(of_the_cpu_build: int, cuda: str | None = torch.version.cuda) -> int:
    """Bytes that a reload may take at most with this build of torch."""
    return of_the_cpu_build + (OF_CUDA if cuda else 0)


def test_the_bound_of_memory_knows_the_build_of_torch() -> None:
    assert bound(450_000_000, None) == 450_000_000
    assert bound(450_000_000, "13.0") == 580_000_000


@pytest.mark.slow
def test_a_7b_layout_is_checked_cold_in_6_seconds_of_processor_time_and_450_mb() -> None:
    config, specs = layout(
        transformers.MistralConfig(dtype="bfloat16", architectures=["MistralForCausalLM"], sliding_window=None)
    )
    assert len(specs) == 291
    with closing(MetaLoader()) as meta_loader:
        found = meta_loader.check(config, specs)
        assert within(used(child_of(meta_loader)), 6)
    assert (found.level, found.result) == ("model", "clean")
    assert found.peak_rss < bound(450_000_000)


@pytest.mark.slow
def test_the_671b_layout_in_fp8_is_checked_cold_in_30_seconds_of_processor_time_and_800_mb() -> None:
    config, specs = deepseek_fp8()
    assert len(specs) == 91_985
    with closing(MetaLoader()) as meta_loader:
        found = meta_loader.check(config, specs)
        assert (found.level, found.result) == ("model", "clean")
        assert "1,558 tensors are neither required nor used by the class" in found.notes[0]
        assert within(used(child_of(meta_loader)), 30)
        assert found.peak_rss < bound(800_000_000)
        expert = "model.layers.40.mlp.experts.200.down_proj.weight_scale_inv"
        broken = {name: spec for name, spec in specs.items() if name != expert}
        assert meta_loader.check(config, specs, broken).result == "failed"
