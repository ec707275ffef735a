"""Whether this machine and its Hubs are ready, one probe at a time; changes nothing, and waits briefly."""

from __future__ import annotations

import os
import platform
import re
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import httpx2

from reshard.pipeline.check import first
from reshard.pipeline.errors import DiskFull, HubRefused, HubUnreachable, ReshardError, TempDirUnusable, TokenRefused
from reshard.pipeline.errors.machine import FULL
from reshard.pipeline.figures import human_bytes
from reshard.pipeline.installed import to_add, version_of
from reshard.pipeline.limits import CLOCK_SKEW_MAX, DEFAULT_SIZE, GB, MEMORY_FLOOR_XET, PROBE_TIMEOUT, STAGED_SHARDS_MAX
from reshard.pipeline.places import Hub
from reshard.pipeline.stores.answers import Account
from reshard.pipeline.stores.connect import Context
from reshard.pipeline.stores.credentials import Reference, Use
from reshard.pipeline.stores.hub_api import HubApi
from reshard.pipeline.stores.pace import RateLimiter
from reshard.pipeline.stores.refusal import Refusal
from reshard.pipeline.stores.retry import describe, http_date
from reshard.pipeline.stores.xet import installed

CONTROL_GROUPS = Path("/sys/fs/cgroup")
# A limit in bytes and what of it is in use: of version 2, and of version 1.
GROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)

State = Literal["ok", "warning", "trouble"]


@dataclass(frozen=True, slots=True)
class Probe:
    """One thing that was examined. ``error`` is what a job would fail with; a warning says what it would cost."""

    name: str
    says: str
    warning: str = ""
    error: ReshardError | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def state(self) -> State:
        return "trouble" if self.error else "warning" if self.warning else "ok"


def this_machine(context: Context) -> Iterator[Probe]:
    yield Probe("reshard", f"{version('reshard')} on Python {platform.python_version()}, {platform.system()}")
    yield _model_check()
    yield _xet()
    yield _memory(context.memory_limit)
    yield _disk(context.tmpdir)


def _model_check() -> Probe:
    found = {name: version_of(name) for name in ("torch", "transformers", "accelerate")}
    missing = [name for name, installed in found.items() if installed is None]
    says = ", ".join(f"{name} {installed}" for name, installed in found.items() if installed)
    warning = f"no {' and '.join(missing)}: only the structure of models is checked; for the class, {to_add('model')}"
    return Probe("model check", says or "not installed", warning if missing else "")


def _xet() -> Probe:
    found = version_of("hf-xet")
    if installed():
        return Probe("xet", f"hf_xet {found}")
    why = "disabled by HF_HUB_DISABLE_XET" if found else "hf_xet is not installed"
    return Probe("xet", why, "weights use HTTP and LFS: every byte is uploaded, and two shards are kept on disk")


def _memory(limit: int) -> Probe:
    available, warning = available_memory(), ""
    if available < limit:
        warning = "less memory is available than one copy can use"
    elif limit < MEMORY_FLOOR_XET:
        warning = f"Xet needs {human_bytes(MEMORY_FLOOR_XET)}, so it is not used"
    says = f"{human_bytes(available)} available, RESHARD_MEMORY_LIMIT is {human_bytes(limit)}"
    return Probe("memory", says, warning, facts={"available": available, "limit": limit})


def available_memory(groups: Path = CONTROL_GROUPS) -> int:
    """Bytes that this process could still take: the machine's, or less where a control group allows less.

    By proc(5) ``MemAvailable`` and the kernel's files of control groups.
    """
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    free = int(match[1]) * 1024 if match else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for most, now in GROUP_FILES:
        with suppress(OSError, ValueError):  # there is no such file, or it says "max"
            free = min(free, max(0, int((groups / most).read_text()) - int((groups / now).read_text())))
    return free


def _disk(folder: Path) -> Probe:
    name = "temporary files"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(folder).free
    except OSError as error:
        if error.errno in FULL:
            return Probe(name, str(folder), error=DiskFull(path=str(folder), needed=1, free=0))
        why = error.strerror or str(error)
        return Probe(name, str(folder), error=TempDirUnusable(path=str(folder), why=why))
    needed = STAGED_SHARDS_MAX * DEFAULT_SIZE
    small = f"no space for {STAGED_SHARDS_MAX} files of {human_bytes(DEFAULT_SIZE)} (over LFS)" if free < needed else ""
    return Probe(name, f"{folder}, {free / GB:,.1f} GB free", small, facts={"path": str(folder), "free": free})


# ---------------------------------------------------------------------------------------------------- Hubs and tokens


def hubs(context: Context) -> Iterator[Probe]:
    """Every endpoint and credential that this process knows: does it answer, as whom, and what may that one write."""
    for reference in context.credentials.references():
        yield probe_hub(reference, time.time)


def probe_hub(reference: Reference, now: Callable[[], float]) -> Probe:
    endpoint, credential = reference.endpoint, reference.credential
    name = f"hub {endpoint}"
    what = f"{credential.name}{reference.scope}" if credential else f"no token{reference.scope}"
    api = HubApi(endpoint, credential, RateLimiter())
    try:
        answer = api.client.get(f"{endpoint}/api/whoami-v2", headers=api.headers, timeout=PROBE_TIMEOUT)
        account = api.decoded(Account, answer) if answer.is_success else None
        if answer.status_code == 401 and credential is not None:
            raise TokenRefused(endpoint=endpoint)
        if answer.status_code not in (200, 401):
            raise HubRefused(endpoint=endpoint, what="GET /api/whoami-v2", why=f"HTTP {answer.status_code}")
    except httpx2.TransportError as error:
        return Probe(name, what, error=HubUnreachable(endpoint=endpoint, what=describe(error)))
    except (HubRefused, TokenRefused) as error:
        return Probe(name, what, error=error)
    finally:
        api.close()
    told = http_date(answer.headers.get("date", ""))
    skew = 0.0 if told is None else now() - told  # seconds that this machine's clock is ahead
    late = f"the clocks differ by {skew:.0f} s; signed URLs and tokens could be rejected"
    late = late if abs(skew) > CLOCK_SKEW_MAX else ""
    if credential is None or account is None:
        return Probe(name, what, late or "public repositories can be read, and nothing can be written")
    use = reference.use
    rights, reads = rights_of(account, use), readable_by(account) if use != "write" else []
    writes = account.writable if use != "read" else []
    warning = late or ("" if writes or use == "read" else "it cannot publish anything")
    facts = {"endpoint": endpoint, "account": account.name, "rights": rights, "reads": reads, "writes": writes}
    return Probe(name, f"{what} ({account.name}) {rights}", warning, facts=facts)


ROLES = ("read", "write")  # of tokens that read whatever their owner may; others are fine-grained


def rights_of(account: Account, use: Use | None = None) -> str:
    """What a token may read and write, as ``whoami-v2`` tells: its role, and of a fine-grained one its scopes.

    A credential with a ``use`` is never used for the other, whatever its token may.
    """
    writes = f"can write: {', '.join(account.writable) or 'nothing'}"
    if use == "write":
        return f"{writes}; not used to read"
    names = readable_by(account)
    reads = ["public", *([f"private of {', '.join(names)}"] if names else [])]
    gated = account.role in ROLES or account.fine_grained.canReadGatedRepos
    if gated:
        reads.append("gated with access")
    refused = ", nothing gated" if gated is False else ""
    return f"can read: {', '.join(reads)}{refused}; {'not used to write' if use == 'read' else writes}"


def readable_by(account: Account) -> list[str]:
    """The namespaces, and of a fine-grained token also single repositories, whose private files it may read."""
    if account.role in ROLES:
        return [account.name, *(org.name for org in account.orgs)]
    return account.scoped({"repo.content.read", "repo.write"})


def unwritable(targets: Iterable[Hub], context: Context) -> Iterator[str]:
    """For each namespace of ``targets`` that may not be written from here, who may not; one call for each credential.

    Raises the AccessError and HubError families.
    """
    owners: dict[HubApi, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for target in targets:
        owners[context.api(target, "write")][target.namespace].append(target.repo)
    for api, wanted in owners.items():
        try:
            account = api.whoami() if api.credential else None
        except Refusal as refusal:
            raise refusal.as_source("whoami-v2") from refusal
        who = f"{api.credential.name} ({account.name}) cannot" if api.credential and account else "no token to"
        for owner, repos in wanted.items():
            denied = [repo for repo in repos if account is None or not account.may_write(repo)]
            if denied:
                yield f"{who} write to {owner} on {api.endpoint}: {first(denied)}"
