"""What a person types becomes the request that they meant, or one clear refusal."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest

from reshard.cli.arguments import read_filter, read_output, read_plan, read_request, read_rules, takes
from reshard.client.profiles import PROFILES
from reshard.pipeline.catalogs.definition import Cut
from reshard.pipeline.errors import BadPlace, BadRename, BadSize, UsageError
from reshard.pipeline.places import NOWHERE, Folder, Hub
from reshard.pipeline.request import Options, Request
from reshard.pipeline.sizes import SINGLE
from reshard.worker.queue.states import JobState


def request(source: str = "a/model", to: str = "b/model", **options: Any) -> Request:
    return read_request(source=source, to=to, **options)


def test_sizes_are_decimal_unless_they_say_otherwise() -> None:
    assert request(size="200MB").options.size == 200_000_000
    assert request(size="200MiB").options.size == 209_715_200
    assert request().options.size == 5_000_000_000


@pytest.mark.parametrize("size", ["0", "-5MB", "10MB/s", "8Mbit", "5G", "many", ""])
def test_a_size_that_is_none_is_refused(size: str) -> None:
    with pytest.raises(BadSize):
        request(size=size)


def test_places_are_repositories_or_folders(tmp_path: Path) -> None:
    assert request("a/model@v1").source == Hub(repo="a/model", revision="v1")
    assert request("a/model", revision="v1").source == Hub(repo="a/model", revision="v1")
    assert request(to=str(tmp_path)).target == Folder(path=str(tmp_path))
    assert request("https://hub.example/a/model/tree/v2").source == Hub(
        repo="a/model", revision="v2", endpoint="https://hub.example"
    )


def test_a_credential_belongs_to_the_place_that_it_is_for() -> None:
    asked = request(credential="reader", to_credential="writer")
    assert asked.source == Hub(repo="a/model", credential="reader")
    assert asked.target == Hub(repo="b/model", credential="writer")
    assert asked.key() == request().key() != request(revision="v1").key()


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ({"for_": "ep1"}, "--for: use ep or pp and a number from 2 to 9999, such as ep8, not 'ep1'"),
        ({"branch": "a..b"}, r"--branch: not a valid branch, .* \(got 'a\.\.b'\)"),
        ({"exclude": ["a", "b" * 501]}, "--exclude: must have at most 500 characters, not 'bbb"),
        ({"strip_prefix": "p" * 3000}, "--strip-prefix: must have at most [0-9,]+ characters, not 'ppp"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_refused_value_is_told_by_the_option_that_took_it(typed: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=f"^{says}"):
        request(**typed)


def test_no_bound_of_an_option_is_left_to_the_library_of_the_command_line() -> None:
    """Which would refuse a value in words of its own, before anything else is looked at."""
    for name, parameter in inspect.signature(read_request).parameters.items():
        of, *_ = get_args(parameter.annotation)
        assert not any(get_origin(part) is Annotated for part in (of, *get_args(of))), name


@pytest.mark.parametrize("place", ["model", "a/b/c", "a/..", "ftp://hub.example/a/b", "a/b@", ""])
def test_what_is_no_place_is_refused(place: str) -> None:
    with pytest.raises(BadPlace):
        request(place)


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ({"public": True, "private": True}, "--public and --private"),
        ({"branch": "b", "pr": True}, "--branch and --pr"),
        ({"to": "/folder", "pr": True}, "no branches or pull requests"),
        ({"to": "/folder", "branch": "b"}, "no branches or pull requests"),
        ({"to": "b/model@main"}, "--branch"),
        ({"source": "/folder", "revision": "v1"}, "only repositories have revisions"),
        ({"source": "a/model@v1", "revision": "v2"}, "name different revisions"),
        ({"revision": "v 1"}, "--revision v 1: not a valid branch, tag or commit"),
        (
            {"source": "/folder", "credential": "reader"},
            "--credential: credentials are only for repositories",
        ),
        ({"credential": "hf_verysecret"}, "--credential: use the name of a credential"),
    ],
)
def test_contradictions_are_refused(typed: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        request(**typed)


def test_a_request_says_who_asked_and_holds_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    made = request()
    assert "@" in made.asked_by
    assert "hf_secret" not in made.model_dump_json()


@pytest.mark.parametrize("name", ["source", "target", "by", "catalog", "code", "since"])
def test_a_filter_that_is_empty_is_refused_as_it_would_choose_all(name: str) -> None:
    with pytest.raises(UsageError, match=f"--{name}: empty"):
        read_filter(state=[JobState.queued], **{name: ""})


def test_a_state_that_is_typed_twice_counts_once() -> None:
    assert read_filter(state=[JobState.queued, JobState.failed, JobState.queued]) == {
        "state": [JobState.queued, JobState.failed]
    }


def test_json_and_quiet_exclude_each_other() -> None:
    with pytest.raises(UsageError):
        read_output(json=True, quiet=True)


def test_a_command_takes_the_options_of_its_readers() -> None:
    seen: list[tuple[Request, bool]] = []

    @takes(request=read_request)
    def command(request: Request, watch: bool = False) -> None:
        """What it does."""
        seen.append((request, watch))

    assert {"source", "to", "size", "watch"} <= set(inspect.signature(command).parameters)
    assert "request" not in inspect.signature(command).parameters
    assert command.__doc__ == "What it does."
    defaults = {p.name: p.default for p in inspect.signature(command).parameters.values()}
    command(**defaults | {"source": "a/model", "to": "b/model", "size": "1MB", "watch": True})
    assert seen[0][0].options.size == 1_000_000
    assert seen[0][1]


def test_a_plan_without_a_target_is_for_nowhere_and_asks_for_no_branch() -> None:
    typed = {p.name: p.default for p in inspect.signature(read_plan).parameters.values()}
    for source in ("a/model@v1", "https://hub.example/a/model/tree/v2", "/folder"):
        for of_a_target in ({}, {"pr": True}, {"branch": "dev"}, {"to_credential": "mine"}):
            request = read_plan(**typed | {"source": source} | of_a_target)
            assert (request.target, request.options) == (NOWHERE, Options())
    request = read_plan(**typed | {"source": "a/model", "to": "b/model", "pr": True})
    assert (request.target, request.options) == (Hub(repo="b/model"), Options(pr=True))


def test_a_size_is_given_in_one_way_only(tmp_path: Path) -> None:
    places: dict[str, Any] = {"source": "a/b", "to": "c/d"}
    assert read_request(**places).options.size == 5_000_000_000
    for use, size in PROFILES.items():
        assert read_request(**places, for_=use).options.size == size
    assert read_request(**places, single=True).options.size == SINGLE
    cut = read_request(**places, for_="ep8", size="2GB").options
    assert (cut.ranks, cut.size) == ("ep8", 2_000_000_000)
    for typed in ({"size": "1GB"}, {"for_": "hub"}, {"for_": "pp4"}, {"for_": "pp4", "size": "1GB"}):
        with pytest.raises(UsageError, match="^--single writes one file, so it cannot be used with --size or --for$"):
            read_request(**places, **typed, single=True)
    with pytest.raises(UsageError, match="^--size and --for hub .* together: hub is itself a size; ranks .* can be"):
        read_request(**places, for_="hub", size="1GB")
    for unknown in ("phone", "ep1", "pp", "ep8x"):
        with pytest.raises(UsageError, match="^--for.*(expected|use ep or pp)"):
            read_request(**places, for_=unknown)


def test_every_option_is_typed_by_its_name_choices_and_description() -> None:
    parameters = inspect.signature(read_request).parameters
    for name, field in Options.model_fields.items():
        if name in {"visibility", "manifest", "ranks"}:  # --public, --private, --no-manifest, --for
            continue
        kind, option = get_args(parameters[name].annotation)
        assert field.description and field.description in option.help
        if get_origin(field.annotation) is Literal:
            assert kind == field.annotation and parameters[name].default == field.default


def test_a_catalog_takes_every_option_but_those_of_one_job() -> None:
    keys = Cut.model_fields.keys()
    assert Options.model_fields.keys() - keys == {"config_from", "force"}
    for name in Options.model_fields.keys() & keys:
        assert Cut.model_fields[name].description == Options.model_fields[name].description


def test_a_file_of_rules_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadRename, match="gone.yaml: No such file"):
        read_rules(tmp_path / "gone.yaml")
    (tmp_path / "latin").write_bytes(b"- \xe9: a")
    with pytest.raises(BadRename, match="not UTF-8"):
        read_rules(tmp_path / "latin")
