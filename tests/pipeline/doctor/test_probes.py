"""What this machine and its Hubs are fit for, against the Hub on loopback and this very machine."""

from __future__ import annotations

import resource
import socket
import threading
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pydantic import SecretStr

from reshard.client.models.jobs import Probe as Document
from reshard.pipeline.doctor.probes import available_memory, hubs, probe_hub, rights_of, this_machine
from reshard.pipeline.errors import DiskFull, HubRefused, HubUnreachable, TempDirUnusable, TokenRefused
from reshard.pipeline.limits import MEMORY_FLOOR_XET
from reshard.pipeline.stores.answers import Account
from reshard.pipeline.stores.connect import Context
from reshard.pipeline.stores.credentials import Credential, Reference
from tests.hub.fixtures import Namespace


def reference(space: Namespace, token: str | None) -> Reference:
    credential = Credential("HF_TOKEN", SecretStr(token)) if token else None
    return Reference(space.endpoint, None, None, credential)


def test_a_token_is_told_by_its_owner_and_what_it_writes(namespace: Namespace) -> None:
    probe = probe_hub(reference(namespace, namespace.token), lambda: 0.0)
    assert probe.state == "ok"
    assert probe.facts["account"] == namespace.name
    assert f"can write: {namespace.name}" in probe.says
    assert namespace.token not in Document.of(probe).model_dump_json()


def test_a_token_that_only_reads_is_a_warning_and_a_refused_one_trouble(namespace: Namespace) -> None:
    reads = namespace.admin.create_token(namespace.name, role="read")
    assert "it cannot publish anything" in probe_hub(reference(namespace, reads), lambda: 0.0).warning
    refused = probe_hub(reference(namespace, "hf_nobodys"), lambda: 0.0)
    assert isinstance(refused.error, TokenRefused)
    assert probe_hub(reference(namespace, None), lambda: 0.0).state == "warning"


def test_a_credential_with_a_use_is_told_by_that_use_alone(namespace: Namespace) -> None:
    """Whatever its token may do, nothing is written with one that is there to read."""
    to_read, to_write = (
        probe_hub(replace(reference(namespace, namespace.token), use=use), lambda: 0.0) for use in ("read", "write")
    )
    assert to_read.state == "ok" and "not used to write" in to_read.says and "can write" not in to_read.says
    assert to_read.facts["writes"] == [] and to_read.facts["reads"] == [namespace.name]
    assert f"can write: {namespace.name}" in to_write.says and "not used to read" in to_write.says
    assert to_write.facts["reads"] == [] and to_write.facts["writes"] == [namespace.name]


def test_a_fine_grained_token_is_told_by_its_scopes() -> None:
    def account(*permissions: str, **more: bool) -> Account:
        scope = {"entity": {"type": "user", "name": "us"}, "permissions": [*permissions]}
        other = {"entity": {"type": "model", "name": "them/model"}, "permissions": ["repo.content.read"]}
        access = {"role": "fineGrained", "fineGrained": {"scoped": [scope, other], **more}}
        return Account.model_validate({"name": "me", "auth": {"accessToken": access}})

    public = "can read: public"
    both = f"{public}, private of us, them/model"
    assert rights_of(account("repo.content.read", "repo.write")) == f"{both}; can write: us"
    gated = f"{both}, gated with access; can write: nothing"
    assert rights_of(account("repo.content.read", canReadGatedRepos=True)) == gated
    refused = f"{public}, private of them/model, nothing gated; can write: nothing"
    assert rights_of(account("discussion.write", canReadGatedRepos=False)) == refused
    assert rights_of(Account(name="me")) == f"{public}; can write: nothing", (
        "an answer that says nothing of rights gives none"
    )


def test_an_organisation_counts_where_its_member_may_write() -> None:
    orgs = [{"name": "open", "roleInOrg": "write"}, {"name": "closed", "roleInOrg": "read"}]
    account = Account.model_validate({"name": "me", "orgs": orgs, "auth": {"accessToken": {"role": "write"}}})
    private = "private of me, open, closed, gated with access"
    assert rights_of(account) == f"can read: public, {private}; can write: me, open"


def test_nobody_there_and_no_hub_there_are_told_apart(namespace: Namespace) -> None:
    nobody = probe_hub(Reference("http://127.0.0.1:9", None, None, None), lambda: 0.0)
    assert isinstance(nobody.error, HubUnreachable)
    namespace.admin.fault("GET /api/whoami-v2", "status", status=503)
    assert isinstance(probe_hub(reference(namespace, namespace.token), lambda: 0.0).error, HubRefused)


def test_every_credential_is_looked_at(namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", namespace.endpoint)
    monkeypatch.setenv("HF_TOKEN", namespace.token)
    monkeypatch.setenv("ORG_TOKEN", namespace.admin.create_token(namespace.name, role="read"))
    file = tmp_path / "credentials.toml"
    file.write_text(
        f'[[credential]]\nendpoint = "{namespace.endpoint}"\nnamespace = "org"\nuse = "write"\nenv = "ORG_TOKEN"\n'
    )
    monkeypatch.setenv("RESHARD_CREDENTIALS", str(file))
    said = [probe.says for probe in hubs(Context.from_env())]
    assert [text.partition(" (")[0] for text in said] == ["ORG_TOKEN for org, write only", "HF_TOKEN"]


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.setenv("RESHARD_TMPDIR", str(tmp_path))
    return Context.from_env()


def probes(context: Context) -> dict[str, str]:
    return {probe.name: probe.state for probe in this_machine(context)}


def test_this_machine_is_fit(context: Context) -> None:
    found = {probe.name: probe for probe in this_machine(context)}
    assert {found[name].state for name in ("reshard", "model check", "xet", "memory")} == {"ok"}
    assert 0 < available_memory() == pytest.approx(found["memory"].facts["available"], rel=0.5)
    assert found["temporary files"].facts["path"] == str(context.tmpdir)
    assert not list(context.tmpdir.iterdir())


@pytest.mark.parametrize(
    ("most", "now", "unlimited"),
    [
        ("memory.max", "memory.current", "max"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "9223372036854771712"),
    ],
    ids=["version 2", "version 1"],
)
def test_memory_is_what_a_control_group_leaves_of_it(most: str, now: str, unlimited: str, tmp_path: Path) -> None:
    (tmp_path / most).parent.mkdir(exist_ok=True)
    (tmp_path / most).write_text("300000000\n")
    (tmp_path / now).write_text("100000000\n")
    assert available_memory(tmp_path) == 200_000_000
    (tmp_path / now).write_text("300004096\n")
    assert available_memory(tmp_path) == 0
    (tmp_path / most).write_text(f"{unlimited}\n")
    assert available_memory(tmp_path) > 300_000_000


def test_a_limit_that_rules_xet_out_or_is_more_than_there_is_is_a_warning(context: Context) -> None:
    assert (
        "Xet"
        in {p.name: p for p in this_machine(replace(context, memory_limit=MEMORY_FLOOR_XET - 1))}["memory"].warning
    )
    assert probes(replace(context, memory_limit=10**18))["memory"] == "warning"


def test_a_folder_that_cannot_be_written_is_trouble(context: Context, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = {p.name: p for p in this_machine(replace(context, tmpdir=tmp_path / "file"))}
    assert isinstance(found["temporary files"].error, TempDirUnusable)


def test_a_disk_without_room_is_the_trouble_that_a_job_would_have(context: Context) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        found = {p.name: p for p in this_machine(context)}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(found["temporary files"].error, DiskFull)


def test_without_xet_the_price_is_named(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    assert probes(context)["xet"] == "warning"


@pytest.mark.parametrize(
    ("date", "warns"),
    [
        ("Date: Thu, 01 Jan 2026 12:00:00 GMT\r\n", "the clocks differ by 300 s"),
        ("Date: Thu, 01 Jan 2026 12:04:59 GMT\r\n", "public repositories can be read"),
        ("Date: yesterday\r\n", "public repositories can be read"),
        ("", "public repositories can be read"),
    ],
)
def test_a_clock_that_is_off_is_a_warning(date: str, warns: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            line, _ = server.accept()
            with line:
                line.recv(65536)
                line.sendall(f"HTTP/1.1 401 Unauthorized\r\n{date}Content-Length: 0\r\n\r\n".encode())

        answering = threading.Thread(target=answer)
        answering.start()
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        now = datetime(2026, 1, 1, 12, 5, 0, tzinfo=UTC).timestamp()
        assert probe_hub(Reference(endpoint, None, None, None), lambda: now).warning.startswith(warns)
        answering.join()
