"""The targets of `make fuzz` accept what is honest, take any damage, and go red when a parser breaks."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reshard.pipeline.errors import CheckpointError
from tests.fuzz import targets
from tests.fuzz.seeds import seeds
from tests.fuzz.targets import TARGETS, Broken, tried

SEEDS = seeds()


def test_every_target_has_seeds() -> None:
    assert SEEDS.keys() == TARGETS.keys()


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "distributed"])
def test_honest_bytes_are_accepted(name: str) -> None:
    assert all(tried(TARGETS[name], data) for data in SEEDS[name])


def test_honest_metadata_is_read_to_the_end_and_misses_its_chunks() -> None:
    with pytest.raises(CheckpointError, match="__0_0.distcp"):
        targets.distributed_metadata(SEEDS["distributed"][0])


@pytest.mark.parametrize("name", TARGETS)
@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_any_damage_is_taken(name: str, data: st.DataObject) -> None:
    damaged = bytearray(data.draw(st.sampled_from(SEEDS[name])))
    for at in data.draw(st.lists(st.integers(0, len(damaged) - 1), max_size=6)):
        damaged[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(damaged)))
    tried(TARGETS[name], bytes(damaged))
    tried(TARGETS[name], bytes(damaged[:cut]))


@pytest.mark.parametrize("error", [KeyError, RecursionError, MemoryError, Broken])
def test_what_is_no_refusal_is_a_finding(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error("x")

    monkeypatch.setattr(targets, "load", broken)
    with pytest.raises(error):
        tried(targets.pickle, b"")
