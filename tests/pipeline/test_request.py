"""What a request says of where it writes, and what is said of one that makes no sense."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from reshard.pipeline import request
from reshard.pipeline.arguments import typed_options
from reshard.pipeline.places import Folder, Hub
from reshard.pipeline.request import Options, Request, canonical, key_of

HERE = "https://hub.example"


def asked(target: Hub | Folder | None = None, **options: Any) -> Request:
    return Request(source=Hub(repo="them/model"), target=target or Hub(repo="us/model"), options=Options(**options))


@pytest.mark.parametrize(
    "same",
    [
        asked(branch="main"),
        asked(Hub(repo="us/model", revision="main")),
        asked(Hub(repo="US/Model", endpoint=f"{HERE}/"), size=1000),
    ],
)
def test_what_writes_to_one_branch_has_one_slot(same: Request) -> None:
    assert same.slot(HERE) == asked().slot(f"{HERE}/") == "https://hub.example/us/model@main"


@pytest.mark.parametrize(
    "other",
    [
        asked(branch="next"),
        asked(Hub(repo="us/model", revision="next")),
        asked(Hub(repo="us/other")),
        asked(Hub(repo="us/model", endpoint="https://other.example")),
        asked(pr=True),
    ],
)
def test_another_branch_repository_or_hub_has_another_slot(other: Request) -> None:
    assert other.slot(HERE) != asked().slot(HERE)


def test_a_branch_is_one_however_it_is_named() -> None:
    assert asked(branch="next").slot(HERE) == asked(Hub(repo="us/model", revision="next")).slot(HERE)


def test_each_pull_request_has_a_slot_of_its_own() -> None:
    assert asked(pr=True, size=1000).slot(HERE) != asked(pr=True, size=2000).slot(HERE)


def test_a_folder_is_a_slot_wherever_the_hub_is() -> None:
    assert asked(Folder(path="/a/b")).slot(HERE) == "/a/b"


def test_no_error_repeats_what_was_given_as_the_name_of_a_credential() -> None:
    place = {"kind": "hub", "repo": "a/b", "credential": "hf_secret"}
    for model, data in (
        (Hub, place),
        (Options, {"config_from": place}),
        (Request, {"source": place, "target": {"kind": "hub", "repo": "a/b"}}),
        (Request, {"source": place}),
    ):
        with pytest.raises(ValidationError, match="never a token") as refused:
            model.model_validate(data)
        assert "hf_secret" not in str(refused.value)


_TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=4)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | _TEXTS,
    lambda some: st.lists(some, max_size=4) | st.dictionaries(_TEXTS, some, max_size=8),
    max_leaves=30,
)


@given(_VALUES, st.integers(1, 4))
def test_a_digest_made_in_parts_is_that_of_the_whole(value: object, at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request, "AT_ONCE", at_once)
        assert key_of(value) == hashlib.sha256(canonical(value)).hexdigest()


def test_a_repository_that_lends_its_config_is_another_on_another_hub() -> None:
    here, there = (Options(config_from=Hub(repo="them/config", endpoint=at)) for at in (None, HERE))
    assert here.content() != there.content()
    assert typed_options(there.changed().items()) == ["--config-from", f"{HERE}/them/config"]


def test_what_verify_can_be_told_of_tensors_is_also_read_from_a_manifest() -> None:
    declared = {name: Options.declared(name) for name in Options.model_fields}
    told = {name for name, one in declared.items() if one.expect and one.decides == "weights"}
    # Which copies of tied tensors were dropped a manifest says tensor by tensor, and not by this option.
    assert told - {"ties"} == {name for name, one in declared.items() if one.claimed}


def test_what_is_told_of_a_result_is_what_alters_its_tensors() -> None:
    declared = {name: Options.declared(name) for name in Options.model_fields}
    assert {name for name, one in declared.items() if one.told} == {
        name for name, one in declared.items() if one.alters
    }
