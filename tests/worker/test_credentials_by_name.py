"""A request that names a credential: whose token is used then, and what a client cannot get by it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from reshard.pipeline.catalogs.definition import parse
from reshard.pipeline.catalogs.expand import expand
from reshard.pipeline.errors import CredentialScope, CredentialUnknown, SourceNotFound, TargetNotAllowed
from reshard.pipeline.places import Hub
from reshard.pipeline.request import Request
from reshard.pipeline.stores.connect import Context, open_source
from reshard.worker.fleet import policy
from reshard.worker.settings import Settings
from tests.hub.fixtures import Namespace

Guard = Callable[[Request, Settings], None]


@pytest.fixture
def lab(namespace: Namespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A user whose private model only the token named `lab` can read; without a name another one is taken for it."""
    lab = namespace.admin.create_user(f"lab-{namespace.name}")
    namespace.admin.create_repo(f"{lab.name}/secret", visibility="private")
    namespace.admin.put_files(f"{lab.name}/secret", {"model.safetensors": b"x" * 10}, lfs=["model.safetensors"])
    file = tmp_path / "credentials.toml"
    scope = f'endpoint = "{namespace.endpoint}"\nnamespace = "{lab.name}"\n'
    file.write_text(
        f'[[credential]]\n{scope}env = "HF_TOKEN"\n[[credential]]\nname = "lab"\n{scope}env = "LAB_TOKEN"\n'
    )
    for name, value in {
        "HF_ENDPOINT": namespace.endpoint, "HF_TOKEN": namespace.token, "HF_HOME": str(tmp_path),
        "LAB_TOKEN": lab.token, "RESHARD_CREDENTIALS": str(file),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    return lab.name


@pytest.fixture
def guard() -> Guard:
    """What a worker asks before it does anything."""

    def asked(request: Request, settings: Settings) -> None:
        context = Context.from_env()
        policy.check(request, settings, lambda target: policy.namespaces(target, context))

    return asked


def request(source: Hub, target: Hub) -> Request:
    return Request(source=source, target=target)


def test_the_named_token_reads_what_it_may(lab: str, namespace: Namespace) -> None:
    read = open_source(Hub(repo=f"{lab}/secret", credential="lab"), Context.from_env())
    assert read.visibility == "private" and "model.safetensors" in read.files()
    with pytest.raises(SourceNotFound):
        open_source(Hub(repo=f"{lab}/secret"), Context.from_env())
    with pytest.raises(CredentialScope, match=f"it covers {namespace.endpoint} for {lab}"):
        open_source(Hub(repo=namespace.repo("model"), credential="lab"), Context.from_env())


def test_the_targets_of_a_named_token_are_its_owners(lab: str, namespace: Namespace, guard: Guard) -> None:
    source = Hub(repo="them/model")
    guard(request(source, Hub(repo=f"{lab}/cut", credential="lab")), Settings())
    guard(request(source, Hub(repo=namespace.repo("cut"))), Settings())
    with pytest.raises(CredentialScope):  # the worker's own namespace, by a token that is not for it
        guard(request(source, Hub(repo=namespace.repo("cut"), credential="lab")), Settings())
    with pytest.raises(CredentialScope):  # a Hub of the client's own, which would be shown the token
        guard(request(source, Hub(repo=f"{lab}/cut", credential="lab", endpoint="http://127.0.0.1:9")), Settings())
    with pytest.raises(CredentialUnknown, match="has no credential boss .*available: lab"):
        guard(request(source, Hub(repo=f"{lab}/cut", credential="boss")), Settings())


def test_a_token_for_every_namespace_widens_no_list_and_no_ownership(
    lab: str, namespace: Namespace, guard: Guard, tmp_path: Path
) -> None:
    (tmp_path / "credentials.toml").write_text(
        f'[[credential]]\nname = "lab"\nendpoint = "{namespace.endpoint}"\nenv = "LAB_TOKEN"\n'
    )
    by_lab = {"credential": "lab"}
    with pytest.raises(TargetNotAllowed, match=rf"{namespace.repo('cut')} .*\(allowed namespaces: {lab}\)"):
        guard(request(Hub(repo="them/model"), Hub(repo=namespace.repo("cut"), **by_lab)), Settings())
    listed = Settings(allowed_targets=(namespace.name,))
    with pytest.raises(TargetNotAllowed):
        guard(request(Hub(repo="them/model"), Hub(repo=f"{lab}/cut", **by_lab)), listed)


def test_an_organisation_that_was_joined_later_is_found(
    lab: str, namespace: Namespace, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = request(Hub(repo="them/model"), Hub(repo=f"org-{lab}/cut"))
    with pytest.raises(TargetNotAllowed):
        guard(joined, Settings())
    namespace.admin.create_org(f"org-{lab}", {namespace.name: "write"})
    namespace.admin.log(reset=True)
    with pytest.raises(TargetNotAllowed):  # not asked for each job that is refused
        guard(joined, Settings())
    assert namespace.admin.log() == []
    monkeypatch.setattr(policy, "ACCOUNT_AGE", 0.0)
    guard(joined, Settings())


def test_each_entry_of_a_catalog_is_asked_for_with_its_own(lab: str, namespace: Namespace) -> None:
    secret, cut = f"{lab}/secret", namespace.repo("cut")
    entries = [
        f"{{repo: {secret}, credential: lab, to: {cut}-1}}",
        f"{{repo: {secret}, to: {cut}-2}}",
        f"{{repo: {secret}, credential: boss, to: {cut}-3}}",
        f"{{repo: {secret}, credential: lab, to_credential: lab, to: {cut}-4}}",
        f"{{repo: {secret}, credential: lab, to_credential: boss, to: {cut}-5}}",
    ]
    found = expand(parse("name: n\nentries:\n- " + "\n- ".join(entries), "c.yaml"), Context.from_env()).models
    assert [one.error and one.error.code for one in found] == [
        None, SourceNotFound.code, CredentialUnknown.code, CredentialScope.code, CredentialUnknown.code,
    ]  # fmt: skip
    assert found[0].source is not None and found[0].source.sha == namespace.admin.head(secret)


def test_a_query_lists_with_the_credential_of_its_entry(lab: str, namespace: Namespace) -> None:
    def listed(more: str) -> list[str]:
        entry = f"{{query: {{author: {lab}}}{more}, to: '{namespace.name}/{{name}}'}}"
        found = expand(parse(f"name: n\nentries:\n- {entry}\n", "c.yaml"), Context.from_env())
        return [one.repo for one in found.models]

    assert listed("") == []
    assert listed(", credential: lab") == [f"{lab}/secret"]
