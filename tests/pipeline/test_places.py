"""What a person may type for a place and for a size, and what is refused by one clear line."""

from __future__ import annotations

import re
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from reshard.pipeline.errors import BadPlace, BadSize
from reshard.pipeline.places import NOWHERE, PLACES, AnyPlace, Bucket, Folder, Hub, HubBucket, parse_place
from reshard.pipeline.request import Request
from reshard.pipeline.sizes import parse_size


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("mistralai/Mistral-7B-v0.1", Hub(repo="mistralai/Mistral-7B-v0.1")),
        ("user/repo@refs/pr/1", Hub(repo="user/repo", revision="refs/pr/1")),
        ("https://huggingface.co/user/repo", Hub(repo="user/repo", endpoint="https://huggingface.co")),
        (
            "https://huggingface.co/user/repo/tree/v1.0",
            Hub(repo="user/repo", revision="v1.0", endpoint="https://huggingface.co"),
        ),
        (
            "http://127.0.0.1:8000/u/r/tree/refs%2Fpr%2F3",
            Hub(repo="u/r", revision="refs/pr/3", endpoint="http://127.0.0.1:8000"),
        ),
        ("http://hub/u/r/tree/refs/pr/3/", Hub(repo="u/r", revision="refs/pr/3", endpoint="http://hub")),
        ("https://hub.example/u/r.git", Hub(repo="u/r", endpoint="https://hub.example")),
        ("hf://user/repo@main", Hub(repo="user/repo", revision="main")),
        ("/models/a", Folder(path="/models/a")),
        ("s3://bucket", Bucket(url="s3://bucket")),
        ("s3://my.bucket-1/runs/é b/", Bucket(url="s3://my.bucket-1/runs/é b")),
        ("gs://my_bucket/runs", Bucket(url="gs://my_bucket/runs")),
        ("az://container/runs", Bucket(url="az://container/runs")),
        ("hf://buckets/user/models", HubBucket(url="hf://buckets/user/models")),
        ("hf://buckets/user/models/a b/c/", HubBucket(url="hf://buckets/user/models/a b/c")),
    ],
)
def test_a_place_is_what_it_looks_like(text: str, place: AnyPlace) -> None:
    assert parse_place(text) == place
    assert Request.model_validate_json(Request(source=place, target=NOWHERE).stored()).source == place


@pytest.mark.parametrize("place", PLACES)
def test_each_place_names_the_module_of_its_store(place: type[AnyPlace]) -> None:
    store = import_module(place.store)
    assert callable(store.open_source) and callable(store.open_target)


@pytest.mark.parametrize("root", ["s3://bucket", "gs://bucket/a", "az://container/a/b", "hf://buckets/u/b", "/models"])
def test_a_place_with_folders_holds_those_inside_it_and_neither_itself_nor_what_is_beside_it(root: str) -> None:
    place = parse_place(root)
    assert place.holds(parse_place(f"{root}/a")) and place.holds(parse_place(f"{root}/a/b"))
    beside = [root, f"{root}-2/a", "s3://other/a", "hf://buckets/u/other/a", "/other", "user/repo"]
    assert not any(place.holds(parse_place(other)) for other in beside)
    assert not parse_place(f"{root}/a").holds(place) and not parse_place("user/repo").holds(place)


def test_a_bucket_of_a_hub_is_the_same_in_capital_letters_and_its_folders_are_not() -> None:
    place = parse_place("hf://buckets/User/Models/a")
    assert place.holds(parse_place("hf://buckets/user/models/a/b"))
    assert not place.holds(parse_place("hf://buckets/user/models/A/b"))


@pytest.mark.parametrize("url", ["s3://b", "s3://bucket/../x", "file:///etc", "s3://bucket/a//b", "http://bucket/a"])
def test_an_object_in_place_of_a_place_is_held_to_the_same(url: str) -> None:
    with pytest.raises(ValidationError):
        Request.model_validate({"source": {"kind": "bucket", "url": url}, "target": "a/b"})


@pytest.mark.parametrize(
    "text",
    ["", "gpt2", "a/b/c", "user/", "user//x", "user/-x", "user/a..b", "user/repo@", "ftp://x/y/z",
        "hf:///etc/model",
        "hf://./model",
     "https://huggingface.co/datasets/a/b", "https://huggingface.co/a", "user/" + "x" * 97, "us er/repo", "a\n/b",
     "./a\0/../b", "s3://", "s3://b", "s3://Bucket/x", "s3:///x", "s3://bucket/a//b", "s3://bucket/../other/x",
     "s3://bucket/a/.", "s3://bucket/a?versionId=1", "s3://bucket/a?X-Amz-Signature=secret",
     "https://bucket.example/a/b/c?sig=secret", "s3://bucket/a#b", "s3://key:secret@bucket/a", "s3://bucket:80/a",
     "hf://user:secret@huggingface.co/a/b", "https://[::1/a/b", "hf://user/repo@", "s3://bucket/a\tb", "hf://secret@huggingface.co/a/b",
     "hf://buckets/user", "hf://buckets/user/b//c", "hf://buckets/user/b/../c", "hf://buckets/us er/b", "hf://buckets/",
     "http://hub:99999/a/b", "https:///a/b", "https://hub/u;x/r/tree/main/y",
     "s3a://bucket/x", "abfs://container/x", "file:///x"],
)  # fmt: skip
def test_what_names_no_place_is_refused(text: str) -> None:
    with pytest.raises(BadPlace) as refused:
        parse_place(text)
    assert "secret" not in f"{refused.value} {refused.value.next_step}"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("az://c/x", "bucket has 3 or more"),
        ("S3://own1/up", "use lowercase s3://"),
        ("s3://own1/q?x", r"s3://own1/q\?\.\.\.: .*\?"),
        ("s3://own1/a//b", "no empty parts"),
        ("hf://buckets/user", "use hf://buckets/user/bucket/folder"),
    ],
)
def test_what_names_no_folder_of_a_bucket_is_told_what_is_wrong(text: str, why: str) -> None:
    with pytest.raises(BadPlace, match=why):
        parse_place(text)


@pytest.mark.parametrize(
    ("text", "why", "works"),
    [
        ("http://hub/u/r/tree/main/sub", "a folder or file in a repository", "http://hub/u/r/tree/main"),
        ("http://hub/u/r/blob/v1/a/w.safetensors?x=y", "a folder or file", "http://hub/u/r/tree/v1"),
        ("http://hub/u/r/resolve/refs%2Fpr%2F3/w.gguf", "a folder or file", "http://hub/u/r/tree/refs%2Fpr%2F3"),
        ("http://hub/u/r/tree/refs/pr/3/sub", "a folder or file", "http://hub/u/r/tree/refs%2Fpr%2F3"),
        ("http://hub/u/r/tree/feature/x", "a folder or file", "http://hub/u/r/tree/feature%2Fx"),
        ("www.huggingface.co/u/r@v1", "a Hub URL starts with", "https://huggingface.co/u/r/tree/v1"),
        ("hf.co/u/r", "a Hub URL starts with https://", "https://huggingface.co/u/r"),
        ("huggingface.co/u/r/tree/v1", "a Hub URL starts with https://", "https://huggingface.co/u/r/tree/v1"),
        ("u/r/", "ends with a slash", "u/r"),
        ("u/r//", "ends with a slash", "./u/r"),
    ],
)
def test_what_is_nearly_a_repository_is_refused_with_what_works(text: str, why: str, works: str) -> None:
    with pytest.raises(BadPlace, match=why) as refused:
        parse_place(text)
    assert works in refused.value.next_step.replace(",", "").split() and parse_place(works)


@pytest.mark.parametrize(("port", "is_one"), [("0", False), ("80", True), ("65535", True), ("65536", False)])
def test_the_form_that_the_api_documents_has_the_ports_that_are_taken(port: str, is_one: bool) -> None:
    url = f"http://hub:{port}/a/b"
    assert (re.fullmatch(Hub.form, url) is not None) is is_one
    with nullcontext() if is_one else pytest.raises(BadPlace):
        parse_place(url)


@pytest.mark.parametrize("value", [None, 5, b"user/repo", ["user/repo"]])
def test_an_object_that_is_no_place_is_refused_as_one(value: Any) -> None:
    with pytest.raises(BadPlace, match="not a place"):
        parse_place(value)


def test_a_folder_is_named_by_its_shortest_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("elsewhere/deep")
    monkeypatch.chdir(tmp_path)
    assert parse_place("./a/../b//c/./") == Folder(path=str(tmp_path / "b" / "c"))
    assert parse_place("./link") == Folder(path=str(tmp_path / "link"))
    monkeypatch.setenv("HOME", "/home/me")
    assert parse_place("~/m") == Folder(path="/home/me/m")
    for name in ("~", "~/m", "~root", "~nobody"):
        assert parse_place(f"./{name}") == Folder(path=str(tmp_path / name)), "a folder of that name"
    assert parse_place("./link/../b") == Folder(path=str(tmp_path / "elsewhere" / "b"))
    assert parse_place(" ./b ") == parse_place(Path("b"))
    assert parse_place(Path("b ")) == Folder(path=str(tmp_path / "b ")), "a path object is nothing that was typed"


@given(st.text(max_size=40))
def test_any_text_is_a_place_or_a_named_error(text: str) -> None:
    try:
        place = parse_place(text)
    except BadPlace as error:
        assert error.next_step
    else:
        assert isinstance(place, Hub | Folder)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("200MB", 200_000_000),
        ("200MiB", 209_715_200),
        ("200mb", 200_000_000),
        ("5GB", 5_000_000_000),
        ("1.5GB", 1_500_000_000),
        ("1234567", 1234567),
        ("10 GB", 10_000_000_000),
        ("1TiB", 2**40),
        ("7B", 7),
    ],
)
def test_a_size_is_bytes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_a_small_number_without_a_unit_is_taken_for_one_whose_unit_was_forgotten() -> None:
    with pytest.raises(BadSize, match="--size 200: without a unit this means bytes; did you mean 200MB or 200B?"):
        parse_size("200")
    assert (parse_size("200B"), parse_size("1000000")) == (200, 1_000_000)


@pytest.mark.parametrize("text", ["200,000,000", "1,000MB", "1,5GB"])
def test_a_size_with_a_comma_is_told_of_the_comma(text: str) -> None:
    with pytest.raises(BadSize, match=f"--size {text}: remove the commas"):
        parse_size(text)


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "0MB",
        "-5GB",
        "5GB/s",
        "5Gb",
        "5Gbit",
        "5Gbps",
        "5G",
        "",
        "GB",
        "5 5GB",
        "200",
        "999999",
        "1e9",
        "5XB",
        "nan",
        "∞",
    ],
)
def test_what_is_no_size_is_refused_with_a_reason(text: str) -> None:
    with pytest.raises(BadSize) as caught:
        parse_size(text)
    assert caught.value.exit_code == 2 and "200MB" in caught.value.next_step
