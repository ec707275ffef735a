"""The stores that fail on purpose fail as their maps say."""

from __future__ import annotations

import hashlib

import pytest

from reshard.pipeline.errors import HubUnreachable, ReshardError
from tests.pipeline.stores.conftest import MakeSource, MakeTarget, noise, read
from tests.support.failing_stores import FailingSink, FailingSource

DATA = noise(4 << 20)
MIB = 1 << 20


@pytest.mark.parametrize(
    ("letters", "expected"),
    [
        ("rrrr", DATA),
        ("", DATA),
        ("rd", DATA[:MIB] + DATA[2 * MIB :]),
        ("rD", DATA[: 2 * MIB] + DATA[MIB:]),
        ("rrs", DATA[: 2 * MIB] + DATA[2 * MIB + 1 : 3 * MIB] + bytes([DATA[3 * MIB - 1] ^ 0xFF]) + DATA[3 * MIB :]),
    ],
)
def test_a_source_is_spoiled_by_its_map(folder_source: MakeSource, letters: str, expected: bytes) -> None:
    assert read(FailingSource(folder_source({"x": DATA}), letters), "x") == expected


def test_one_bit_is_flipped(folder_source: MakeSource) -> None:
    got = read(FailingSource(folder_source({"x": DATA}), "rf"), "x")
    differing = [at for at in range(len(DATA)) if got[at] != DATA[at]]
    assert len(differing) == 1 and MIB <= differing[0] < 2 * MIB


def test_an_error_passes_and_the_map_goes_on(folder_source: MakeSource) -> None:
    source = FailingSource(folder_source({"x": DATA}), "rrEr")
    with pytest.raises(HubUnreachable):
        read(source, "x")
    assert read(source, "x") == DATA


def test_a_sink_is_spoiled_by_its_map(folder_target: MakeTarget) -> None:
    target = folder_target()
    batch = FailingSink(target.sink("t"), "f").batch([])
    writer = batch.open("x", len(DATA))
    writer.write(memoryview(DATA))
    writer.finish()
    assert batch.seal()[0].sha256 != hashlib.sha256(DATA).hexdigest()
    short = FailingSink(target.sink("t"), "d").batch([]).open("x", len(DATA))
    short.write(memoryview(DATA))
    with pytest.raises(ReshardError):
        short.finish()


def test_a_map_with_an_unknown_letter_is_refused() -> None:
    with pytest.raises(ValueError):
        FailingSource(None, "rx")  # type: ignore[arg-type]
