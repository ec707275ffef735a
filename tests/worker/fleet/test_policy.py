"""What operators allow, and what they do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard.pipeline.errors import BadPlace, FolderNotAllowed, SourceNotAllowed, TargetNotAllowed
from reshard.pipeline.places import NOWHERE, AnyPlace, Bucket, Folder, Hub, HubBucket
from reshard.pipeline.request import Options, Request
from reshard.pipeline.stores.credentials import Credentials
from reshard.worker.fleet.policy import check, check_sources, endpoints
from reshard.worker.settings import Settings


def request(source: str = "them/model", target: str = "us/model", config_from: str | None = None) -> Request:
    def place(text: str) -> Hub | Folder:
        return Folder(path=text) if text.startswith("/") else Hub(repo=text)

    def read(text: str) -> AnyPlace:
        return Bucket(url=text) if "://" in text else place(text)

    options = Options(config_from=read(config_from)) if config_from else Options()
    return Request(source=read(source), target=place(target), options=options)


def us(target: Hub) -> list[str]:
    return ["us", "our-org"]


def nobody_asks(target: Hub) -> list[str]:
    raise AssertionError("the token's owner must not be asked for where a list is set")


@pytest.mark.parametrize("target", ["us/model", "our-org/model", "Our-Org/model"])
def test_the_tokens_own_namespaces_are_targets(target: str) -> None:
    check(request(target=target), Settings(), us)


def test_other_namespaces_are_not(tmp_path: Path) -> None:
    with pytest.raises(TargetNotAllowed, match=r"them/model.*us, our-org"):
        check(request(target="them/model"), Settings(), us)


@pytest.mark.parametrize(
    ("allowed", "target", "ok"),
    [
        ("acme", "acme/model", True),
        ("acme", "acme-two/model", False),
        ("acme/model", "acme/model", True),
        ("acme/model", "acme/other", False),
        ("Acme/model", "acme/Model", True),
        ("acme/*-30MB", "acme/m-30MB", True),
        ("acme/*-30MB", "acme/m", False),
        ("acme, other", "other/m", True),
        ("*", "anybody/m", True),
    ],
)
def test_a_list_of_targets_replaces_the_tokens(
    allowed: str, target: str, ok: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESHARD_ALLOWED_TARGETS", allowed)
    if ok:
        check(request(target=target), Settings(), nobody_asks)
    else:
        with pytest.raises(TargetNotAllowed):
            check(request(target=target), Settings(), nobody_asks)


def test_a_list_that_is_set_first_names_what_needed_no_name_before() -> None:
    with pytest.raises(TargetNotAllowed) as refused:
        check(request(target="them/model"), Settings(), us)
    refused.value.facts["job"] = "abc"
    where = "RESHARD_ALLOWED_TARGETS (it is not set; set it to us,our-org,them) on the worker and restart it"
    assert refused.value.next_step == f"ask the operator to add them to {where}, then run `reshard retry abc`"


@pytest.mark.parametrize("repo", ["us/../them/model", "us/..", "us/model/../../them/model", "us/model?x=", "us"])
def test_what_is_no_repository_is_in_no_namespace(repo: str) -> None:
    for asked in (request(source=repo), request(target=repo), request(config_from=repo)):
        with pytest.raises(BadPlace):
            check(asked, Settings(allowed_targets=("*",)), us)


@pytest.mark.parametrize(
    ("allowed", "url", "ok"),
    [
        (None, "s3://acme/runs", False),  # its credentials are the worker's: nobody else's word counts
        (("*", "*/*", "acme/*"), "s3://acme/runs", False),
        (("s3://acme",), "s3://acme/runs/7", True),
        (("s3://acme",), "s3://acme", True),
        (("s3://acme",), "s3://acme-other/runs", False),
        (("s3://acme/runs/",), "s3://acme/runs", True),
        (("s3://acme/runs",), "s3://acme/runs-private/1", False),
        (("s3://acme/*/final",), "s3://acme/7/final", True),
        (("s3://acme",), "gs://acme/runs", False),
        (("gs://*",), "gs://acme/runs", True),
    ],
)
def test_an_object_store_is_read_only_where_a_list_names_it(
    allowed: tuple[str, ...] | None, url: str, ok: bool
) -> None:
    for asked in (request(source=url), request(config_from=url)):
        settings = Settings(allowed_sources=(*allowed, "them") if allowed else allowed)
        if ok:
            check(asked, settings, us)
        else:
            with pytest.raises(SourceNotAllowed, match=url):
                check(asked, settings, us)


@pytest.mark.parametrize(
    ("allowed", "ok"),
    [(None, False), (("*", "*/*", "us"), False), (("hf://buckets/us",), True), (("hf://buckets/us/other",), False)],
)
def test_a_bucket_is_written_only_where_a_list_names_it(allowed: tuple[str, ...] | None, ok: bool) -> None:
    place, settings = HubBucket(url="hf://buckets/us/models/small"), Settings(allowed_targets=allowed)
    asked = request().model_copy(update={"target": place})
    if ok:
        check(asked, settings, nobody_asks)
    else:
        with pytest.raises(TargetNotAllowed, match="hf://buckets/us/models/small"):
            check(asked, settings, nobody_asks)


def test_a_plan_without_a_target_is_of_what_may_be_read(tmp_path: Path) -> None:
    listed = Settings(allowed_sources=("s3://acme/models", "hf://buckets/acme/b", "them"), allowed_targets=("us",))
    for source in (Bucket(url="s3://acme/models/x"), HubBucket(url="hf://buckets/acme/b/x"), Hub(repo="them/model")):
        check_sources(Request(source=source, target=NOWHERE), listed)
        with pytest.raises(SourceNotAllowed):
            check_sources(Request(source=source, target=NOWHERE), Settings(allowed_sources=("others",)))
    with pytest.raises(FolderNotAllowed):
        check_sources(Request(source=Folder(path=str(tmp_path)), target=NOWHERE), listed)


def test_sources_are_free_unless_a_list_is_set() -> None:
    check(request(source="anybody/model"), Settings(), us)
    listed = Settings(allowed_sources=("them",))
    check(request(source="them/model"), listed, us)
    with pytest.raises(SourceNotAllowed, match="anybody/model"):
        check(request(source="anybody/model"), listed, us)


def test_who_lends_a_config_is_a_source_too() -> None:
    listed = Settings(allowed_sources=("them",))
    check(request(config_from="them/config"), listed, us)
    with pytest.raises(SourceNotAllowed, match="anybody/config"):
        check(request(config_from="anybody/config"), listed, us)


def test_workers_use_no_folder_unless_told(tmp_path: Path) -> None:
    for asked in (request(source=str(tmp_path)), request(target=str(tmp_path)), request(config_from=str(tmp_path))):
        with pytest.raises(FolderNotAllowed, match=str(tmp_path)):
            check(asked, Settings(), us)
        check(asked, Settings(allowed_folders=(tmp_path,)), us)


def test_a_link_or_dots_inside_an_allowed_folder_lead_nowhere_else(tmp_path: Path) -> None:
    allowed, secret = tmp_path / "allowed", tmp_path / "secret"
    allowed.mkdir()
    secret.mkdir()
    (allowed / "link").symlink_to(secret)
    for path in (allowed / "link", allowed / ".." / "secret", tmp_path / "allowed-not"):
        with pytest.raises(FolderNotAllowed):
            check(request(source=str(path)), Settings(allowed_folders=(allowed,)), us)
    check(request(source=str(allowed / "model")), Settings(allowed_folders=(allowed,)), us)


def test_the_hubs_of_a_queue_are_the_default_one_and_those_of_the_credentials_unless_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example/")
    (tmp_path / "c.toml").write_text('[[credential]]\nendpoint = "https://other.example"\nfile = "/not/there"\n')
    monkeypatch.setenv("RESHARD_CREDENTIALS", str(tmp_path / "c.toml"))
    known = Credentials.from_env()
    assert endpoints(Settings(), known) == {"https://hub.example", "https://other.example"}
    monkeypatch.setenv("RESHARD_ALLOWED_ENDPOINTS", "https://one.example/, https://two.example")
    assert endpoints(Settings(), known) == {"https://one.example", "https://two.example"}
