"""Many small spans cost few requests, whatever their order, and come back as they were asked for."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reshard.pipeline.checkpoint.formats.ranged import each, read_bytes, read_spans
from reshard.pipeline.errors import BadLength
from reshard.pipeline.limits import SPAN_GAP, SPAN_READ
from reshard.pipeline.tensors import Span, StoredFile
from tests.support.examples import examples
from tests.support.pieces import Disk

SIZE = 40 * SPAN_GAP
PLACES = st.builds(
    lambda start, length: Span(start, min(start + length, SIZE)), st.integers(0, SIZE), st.integers(0, 3 * SPAN_GAP)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranged")
    (folder / "x.bin").write_bytes(b"".join(number.to_bytes(4, "big") for number in range(SIZE // 4)))
    return folder


@given(st.lists(PLACES, max_size=12))
@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_every_span_is_answered_in_place_by_requests_that_lie_apart(folder: Path, spans: list[Span]) -> None:
    data = (folder / "x.bin").read_bytes()
    disk = Disk(folder)
    found = read_spans(disk.read, StoredFile("x.bin", SIZE), spans)
    assert found == [data[start:stop] for start, stop in spans]
    requests = sorted((start, stop) for _, start, stop in disk.requests)
    for (_, stop), (start, end) in pairwise(requests):
        assert start - stop > SPAN_GAP or end - requests[0][0] > SPAN_READ


def test_a_thousand_neighbours_are_one_request(folder: Path) -> None:
    disk = Disk(folder)
    read_spans(disk.read, StoredFile("x.bin", SIZE), [Span(at, at + 30) for at in range(0, 1_000_000, 1000)][::-1])
    assert len(disk.requests) == 1


def test_a_span_behind_the_end_is_refused_before_it_is_asked_for(folder: Path) -> None:
    disk = Disk(folder)
    with pytest.raises(BadLength, match=r"^x\.bin is"):
        read_spans(disk.read, StoredFile("x.bin", SIZE), [Span(0, 10), Span(SIZE - 5, SIZE + 1)])
    with pytest.raises(BadLength):
        read_bytes(disk.read, StoredFile("x.bin", SIZE), SIZE, SIZE + (1 << 40))


def test_an_error_of_the_store_comes_through(folder: Path) -> None:
    def broken(file: StoredFile, start: int, stop: int, /) -> object:
        raise ConnectionError("away")

    with pytest.raises(ConnectionError):
        read_spans(broken, StoredFile("x.bin", SIZE), [Span(0, 1), Span(SIZE - 1, SIZE)])  # type: ignore[arg-type]


def test_an_error_does_not_wait_for_the_other_reads() -> None:
    go_on, ended = threading.Event(), threading.Event()

    def read(number: int) -> None:
        if number == 0:
            raise ConnectionError("away")
        go_on.wait(30)
        ended.set()

    try:
        with pytest.raises(ConnectionError):
            each(read, range(2))
        assert not ended.is_set()
    finally:
        go_on.set()
