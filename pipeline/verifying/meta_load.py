"""Asking the child process whether a model's class still takes the weights; cheap, torch-free, never hangs.

The child (``child.server``) imports torch and transformers once and forks a process per request, so a config that
burns memory or time hurts only its own fork. Whatever becomes of either, ``check`` answers: a crash, a timeout or a
kill is ``inconclusive`` with the reason, never an exception and never a pass.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter

from reshard.pipeline import limits
from reshard.pipeline.check import some
from reshard.pipeline.errors import DeviceMapIncomplete, TempDirUnusable
from reshard.pipeline.verifying.child.server import Allowed
from reshard.pipeline.verifying.named import NotChecked, named, parsed
from reshard.pipeline.verifying.verdicts import ModelCheck, Verdicts

if TYPE_CHECKING:
    from reshard.pipeline.verifying.structure import Signature

# What the child inherits: how to find Python's packages and to speak UTF-8. Above all no token, no proxy, no cache.
_INHERITED = (
    "PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LANG", "LC_ALL",
)  # fmt: skip
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "PYTHONUTF8": "1",  # whatever the locale
    "TQDM_DISABLE": "1",
    "HF_DEACTIVATE_ASYNC_LOAD": "1",  # nothing is read on meta, and threads took a third of a large model's time
    "TOKENIZERS_PARALLELISM": "false",  # its threads would not survive the fork
    "OMP_NUM_THREADS": "1",  # the same, and copies need the other cores
    # MKL's reproducible mode: else the last bit of a forward pass depends on where in memory a weight lies, and so on
    # how files are cut, and two equal models would seem to differ.
    "MKL_CBWR": "COMPATIBLE",
    "COLUMNS": "120",  # the loader's tables depend on the terminal's width
}

# Why the class of a GGUF model is not asked.
NO_CLASS = "GGUF has no model class: llama.cpp loads it by the architecture in its keys"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Orphan:
    """A warm child whose owner has left it, for another process of ours to adopt."""

    pid: int
    home: Path
    pipe: int  # our end's file descriptor: the child ends when nobody has it open


@dataclass(frozen=True, slots=True)
class Own:
    """A source as it is, before options changed the names or the layout of its tensors."""

    config: bytes
    tensors: Signature
    origins: Mapping[str, str]  # new name -> the source's own one of the tensor with these bytes, where it is another
    # Names whose bytes the source stores once: its own, and what became of them.
    stored_once: Sequence[tuple[Set[str], Set[str]]] = ()


class MetaLoader:
    """The child process, started when first needed and kept warm; safe to share between threads."""

    def __init__(
        self,
        *,
        start: float = limits.RELOAD_START,
        grace: float = limits.RELOAD_GRACE,
        python: str = sys.executable,
        tmpdir: Path | None = None,
        verdicts: Path | None = None,
        eager: bool = False,
    ) -> None:
        """``start``: seconds for the imports; ``grace``: for an answer after a request's own time has passed.

        ``tmpdir`` has to have room for what a load puts on disk; None is the system's temporary folder. In the folder
        ``verdicts`` what classes answer is kept for other processes and for later. An ``eager`` one starts its child
        when a check is likely.
        """
        self._start, self._grace = start, grace
        self._python = python
        self._tmpdir = tmpdir
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._closed = False
        self._eager = eager
        self._flags = threading.Lock()  # of the next two
        self._spare = self._dropped = False  # a child was started ahead; and no question needed it after all
        self._verdicts_lock = threading.Lock()
        self._verdicts = Verdicts(verdicts)

    def check(
        self,
        config: bytes | None,
        source: Signature,
        output: Signature | None = None,
        *,
        own: Callable[[], Own] | None = None,
        lent: bool = False,
        allowed: Allowed | None = None,
    ) -> ModelCheck:
        """Whether the class that ``config`` (a config.json) names reports the same for ``output`` as for ``source``.

        ``output`` None means headers equal to the source's. Names and dtypes that the user asked to change must
        already be changed in ``source``. Then both sides may lack the same for that reason alone, so a report that is
        not clean must also be no worse than that on the source as it is, which ``own`` opens when it is needed. Of a
        ``lent`` config the class must find half of its tensors. Blocks for at most the limits' times; never raises for
        what it checks, and TempDirUnusable where the folder for temporary files cannot be used.
        """
        try:
            text = _naming(config)
        except NotChecked as why:
            return ModelCheck("skipped", str(why))
        ours = _packed(source)
        theirs = "null" if output is None or (packed := _packed(output)) == ours else packed
        arguments = f'"config":{json.dumps(text)},"source":{ours},"output":{theirs}'
        arguments += ',"lent":true' if lent else ""
        verdict = self._verdict(f"{{{arguments}}}", allowed)
        if own is None or verdict.result not in {"report", "failed"}:
            return verdict
        if verdict.result == "failed":
            copies = self._tied_copies(own(), source.keys() - output.keys(), output, allowed) if output else set[str]()
            kept = {name: kind for name, kind in source.items() if name not in copies}
            return self.check(config, kept, output, own=own, lent=lent, allowed=allowed) if copies else verdict
        try:
            return self._verdict(f'{{{arguments},"own":{_packed_own(own())}}}', allowed)
        except NotChecked as why:
            reason = f"{verdict.class_name} cannot be compared with the source: {why}"
            return replace(verdict, result="inconclusive", level="structural", reason=reason)

    def _tied_copies(self, own: Own, lost: Set[str], output: Signature, allowed: Allowed | None) -> set[str]:
        """Those ``lost`` whose bytes the output has by a name that the class ties to theirs, before names changed.

        By other names the class no longer sees that, and would take such copies for a difference.
        """
        sets = [(old, new & lost) for old, new in own.stored_once if new & lost and new & output.keys()]
        ties = self.check(own.config, own.tensors, allowed=allowed).ties if sets else {}
        return {name for old, copies in sets if len({ties.get(n, n) for n in old}) == 1 for name in copies}

    def _verdict(self, arguments: str, allowed: Allowed | None) -> ModelCheck:
        key = self._verdicts.key(arguments)
        with self._verdicts_lock:
            known = self._verdicts.get(key)
        if known is not None:
            return replace(known, known=True)
        verdict = self.ask("check", ModelCheck, arguments, allowed)
        # What was cut short, or did not begin, may end otherwise next time; what was skipped or failed, on another day.
        if (verdict.result != "inconclusive" or verdict.class_name) and verdict.peak_rss:
            with self._verdicts_lock:
                self._verdicts.keep(key, verdict, lasting=verdict.result in {"clean", "report"})
        return verdict

    def ask(self, operation: str, kind: type[T], arguments: str, allowed: Allowed | None = None) -> T:
        """The child's answer to one operation, whose ``arguments`` are a JSON object, as a dataclass of this ``kind``.

        It has a ``result`` and a ``reason``; where it has them, the ``seconds`` it took, and the fork's ``peak_rss`` in
        bytes unless it never ran: ``skipped`` where there is no reload, ``inconclusive`` where it was cut short. Raises
        DeviceMapIncomplete where a device map among the arguments is.
        """
        answer = self._answer(operation, arguments, allowed or Allowed())
        if answer["result"] == "incomplete":
            name, *more = some(answer["parameters"], 1)
            raise DeviceMapIncomplete(parameter=name, more="".join(f" {rest}" for rest in more))
        return TypeAdapter(kind).validate_python(answer)

    def _answer(self, operation: str, arguments: str, allowed: Allowed) -> dict[str, Any]:
        with self._flags:
            self._spare = self._dropped = False
        request = json.dumps(asdict(allowed)), f'{{"operation":"{operation}","arguments":{arguments}}}'
        with self._lock:
            began = time.monotonic()
            if trouble := self._started():
                return {"result": "skipped", "reason": trouble}
            assert self._child is not None
            try:
                # The child ends its fork itself at the limit; the grace is for a child that no longer does.
                answer = self._child.ask(allowed.seconds + self._grace, *request)
            except _ChildLost as lost:
                self._end()
                answer = {"result": "inconclusive", "reason": str(lost)}
            return {**answer, "seconds": time.monotonic() - began}

    def warm(self) -> str | None:
        """Start the child now; None, or why there is no reload."""
        try:
            with self._lock:
                return self._started()
        except TempDirUnusable as error:
            return str(error)

    def ahead(self, configs: Iterable[bytes]) -> None:
        """A check of these is likely: an eager loader begins to start its child if one of them may name a class."""
        if self._eager and self._child is None and any(map(_names_class, configs)):
            with self._flags:
                self._spare, self._dropped = True, False
            threading.Thread(target=self.warm, name="reshard-reload", daemon=True).start()

    def enough(self) -> None:
        """Nothing more will be asked: a child that was started ahead and answered nobody ends."""
        with self._flags:
            if not self._spare:
                return
            self._dropped = True
            if (child := self._child) is not None:
                child.kill()
        threading.Thread(target=self._drop, name="reshard-reload", daemon=True).start()

    def _drop(self) -> None:
        with self._lock:
            if self._dropped:
                self._end()

    @property
    def pid(self) -> int | None:
        child = self._child
        return None if child is None else child.process.pid

    def leave(self) -> Orphan | None:
        """Leave the warm child, if there is one, to another process, and start no other."""
        self._closed = True
        with self._lock:
            child, self._child = self._child, None
        return None if child is None else child.leave()

    def adopt(self, orphan: Orphan) -> None:
        """Go on with a child that another process has left."""
        pipe = Connection(orphan.pipe)
        with self._lock:
            self._child = _Child(_Adopted(orphan.pid, pipe), pipe, orphan.home)

    def close(self) -> None:
        """End the child and whatever it is doing, for good; who waits for its answer hears that it was killed."""
        self._closed = True
        if (child := self._child) is not None:
            child.kill()
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None

    def _started(self) -> str | None:
        if self._closed:
            return "the reload was closed"
        if self._child is not None and not self._child.asked and self._child.process.poll() is None:
            return None
        lacking = [name for name in ("torch", "transformers", "accelerate") if find_spec(name) is None]
        if lacking:
            return f"{' and '.join(lacking)} not installed here; the reload needs the extra `model`"
        self._end()
        try:
            self._child = _Child.start(self._python, self._tmpdir)
        except OSError as error:
            folder = str(self._tmpdir or tempfile.gettempdir())
            raise TempDirUnusable(path=folder, why=error.strerror or str(error)) from error
        if self._closed or self._dropped:  # too late for whoever did it to have seen this child
            self._child.kill()
        try:
            hello = self._child.ask(self._start)
        except _ChildLost as lost:
            hello = {"unavailable": str(lost)}
        if "unavailable" not in hello:
            return None
        self._end()
        return f"cannot start the reload: {hello['unavailable']}"


class _ChildLost(Exception):
    """The child is gone or does not answer, and why."""


class _Adopted:
    """What Popen is to a child that another process started: its end shows in its pipe, and how it ended nowhere."""

    def __init__(self, pid: int, pipe: Connection) -> None:
        self.pid, self._pipe = pid, pipe

    def poll(self) -> int | None:
        return 0 if self._pipe.poll() else None  # unasked, it says nothing

    def wait(self, timeout: float | None = None) -> None:
        if not self._pipe.poll(timeout):
            raise subprocess.TimeoutExpired("the reload child", timeout or 0)


class _Child:
    """One child process, the pipe to it, and a folder of its own that stands for its home."""

    def __init__(self, process: subprocess.Popen[bytes] | _Adopted, pipe: Connection, home: Path) -> None:
        self.process, self._pipe, self._home = process, pipe, home
        self._log = home / "log"
        self.asked = False  # and has not answered, as where an interrupt ended the waiting

    @staticmethod
    def start(python: str, tmpdir: Path | None) -> _Child:
        # Absolute, because the child works in another folder.
        home = Path(tempfile.mkdtemp(prefix="reshard-reload-", dir=tmpdir)).absolute()
        ours, theirs = Pipe()
        with (home / "log").open("wb") as log, theirs:
            process = subprocess.Popen(
                # -P: a file named torch.py in the working folder must not become torch.
                [python, "-P", "-m", "reshard.pipeline.verifying.child.server"],
                stdin=theirs.fileno(),
                stdout=log,
                stderr=log,
                cwd=home,
                env=_environment(home),
                start_new_session=True,  # so that one signal ends it with all its forks
            )
        return _Child(process, ours, home)

    def leave(self) -> Orphan:
        """Give it up without an end."""
        with self._pipe:
            return Orphan(self.process.pid, self._home, os.dup(self._pipe.fileno()))

    def ask(self, seconds: float, *request: str) -> dict[str, Any]:
        """The answer to one request; to none, what it says once it has its imports. Raises _ChildLost."""
        self.asked = True
        deadline = time.monotonic() + seconds
        late = threading.Timer(seconds, self.kill)  # ends both sending and receiving
        late.start()
        try:
            for part in request:
                self._pipe.send_bytes(part.encode())
            answer: dict[str, Any] = json.loads(self._pipe.recv_bytes(limits.RELOAD_ANSWER))
            self.asked = False
            return answer
        except (EOFError, ConnectionError):
            timed_out = time.monotonic() >= deadline
            raise _ChildLost(f"no response within {seconds:g} s" if timed_out else self._ending()) from None
        except OSError:  # of a length that is more than was asked for
            raise _ChildLost(f"its response exceeds {limits.RELOAD_ANSWER:,} bytes") from None
        finally:
            late.cancel()

    def kill(self) -> None:
        """Kill it and its forks; its owner still has to ``end`` it."""
        if self.process.poll() is not None and not self.asked:
            return  # it ended long ago and has no forks, and its pid may be another's by now
        with suppress(ProcessLookupError, PermissionError):  # it may have ended by itself; macOS says that of a zombie
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        self.kill()
        self.process.wait()
        self._pipe.close()
        shutil.rmtree(self._home, ignore_errors=True)

    def _ending(self) -> str:
        """How it ended, with the last line that it logged."""
        try:
            status = self.process.wait(timeout=limits.RELOAD_GRACE)
        except subprocess.TimeoutExpired:
            return "the reload child closed its pipe"
        how = "ended" if status is None else f"ended with code {status}"
        if status is not None and status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        with self._log.open("rb") as log:
            log.seek(max(0, self._log.stat().st_size - 4096))
            last = log.read().decode(errors="replace").strip().rpartition("\n")[2][:300]
        return f"the reload child {how}" + (f": {last}" if last else "")


def _environment(home: Path) -> dict[str, str]:
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    if site.ENABLE_USER_SITE and site.USER_BASE:
        # Packages of `pip install --user` are found from the home folder, which is another one there.
        inherited["PYTHONUSERBASE"] = site.USER_BASE
    folders = {name: str(home) for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME", "TMPDIR")}
    return {**inherited, **_OFFLINE, **folders}


def _packed(specs: Signature) -> str:
    return json.dumps({name: specs[name] for name in sorted(specs)}, separators=(",", ":"))


def _packed_own(own: Own) -> str:
    """Raises NotChecked where the config can name no class."""
    text, origins = json.dumps(_naming(own.config)), json.dumps(own.origins, sort_keys=True)
    return f'{{"config":{text},"tensors":{_packed(own.tensors)},"origins":{origins}}}'


def _naming(config: bytes | None) -> str | None:
    """The text of a config that may name a class; raises NotChecked where it names none, without a child."""
    if config is not None and len(config) > limits.CONFIG_MAX:
        raise NotChecked(f"config.json has {len(config):,} bytes, and the limit is {limits.CONFIG_MAX:,}")
    try:
        text = None if config is None else config.decode()
    except UnicodeDecodeError as error:
        raise NotChecked(f"config.json is not UTF-8: {error}") from None
    named(parsed(text))
    return text


def _names_class(config: bytes) -> bool:
    with suppress(NotChecked):
        _naming(config)
        return True
    return False
