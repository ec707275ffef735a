"""What every Source promises: what it lists and reads is one state, exactly, or it says that it cannot."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reshard.pipeline.errors import SourceChanged
from reshard.pipeline.protocols import Source
from reshard.pipeline.tensors import StoredFile
from tests.pipeline.stores.conftest import MakeSource, noise, read
from tests.support.examples import examples

BIG = noise(3_300_001)
FILES = {"config.json": b'{"a": 1}', "unet/model.safetensors": BIG, "empty.txt": b"", "deep/er/é b.txt": b"x" * 70_000}


@pytest.fixture
def source(make_source: MakeSource) -> Source:
    return make_source(FILES)


def test_lists_every_file_with_its_size(source: Source) -> None:
    sizes = {path: file.size for path, file in source.files().items() if path != ".gitattributes"}
    assert sizes == {path: len(data) for path, data in FILES.items()}
    assert all(file.path == path for path, file in source.files().items())


def test_attests_only_what_its_content_is(source: Source) -> None:
    for path, file in source.files().items():
        if path in FILES and file.sha256 is not None:
            assert file.sha256 == hashlib.sha256(FILES[path]).hexdigest()
        if path in FILES and file.oid is not None:
            blob = b"blob %d\0" % len(FILES[path]) + FILES[path]
            assert file.oid == hashlib.sha1(blob).hexdigest()


def test_reads_whole_files(source: Source) -> None:
    for path, data in FILES.items():
        assert read(source, path) == data


@settings(max_examples=examples(15), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, len(BIG)), st.integers(0, len(BIG)))
def test_reads_exactly_the_range_that_was_asked_for(source: Source, one: int, other: int) -> None:
    start, stop = sorted((one, other))
    assert read(source, "unet/model.safetensors", start, stop) == BIG[start:stop]


def test_the_views_of_a_read_are_large(source: Source) -> None:
    sizes = [len(view) for view in source.read(source.files()["unet/model.safetensors"], 0, len(BIG))]
    assert sum(sizes) == len(BIG) and len(sizes) <= 8


def test_a_range_past_the_end_is_refused(source: Source) -> None:
    file = source.files()["unet/model.safetensors"]
    with pytest.raises(SourceChanged):
        list(source.read(file, 0, len(BIG) + 1))


def test_a_file_that_was_longer_when_it_was_planned_is_refused(source: Source) -> None:
    with pytest.raises(SourceChanged):
        list(source.read(StoredFile("unet/model.safetensors", len(BIG) + 10), len(BIG) - 5, len(BIG) + 10))


def test_a_file_that_is_not_there_is_refused(source: Source) -> None:
    with pytest.raises(SourceChanged):
        list(source.read(StoredFile("gone.bin", 10), 0, 10))


def test_a_backward_range_is_a_mistake_of_the_caller(source: Source) -> None:
    with pytest.raises(ValueError):
        list(source.read(source.files()["config.json"], 5, 3))


def test_a_read_may_be_left_early_and_the_source_goes_on(source: Source) -> None:
    views = source.read(source.files()["unet/model.safetensors"], 0, len(BIG))
    first = bytes(next(iter(views)))
    assert first and BIG.startswith(first)
    views.close()  # type: ignore[attr-defined]
    assert read(source, "config.json") == FILES["config.json"]


def test_many_threads_read_at_once(source: Source) -> None:
    def some(n: int) -> bool:
        return (
            read(source, "unet/model.safetensors", n * 1000, n * 1000 + 200_000) == BIG[n * 1000 : n * 1000 + 200_000]
        )

    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(some, range(40)))


def test_its_pin_says_which_state_it_is(make_source: MakeSource) -> None:
    source = make_source(FILES)
    assert source.pin.commit and source.pin.repo in str(source.place)
    assert make_source({**FILES, "config.json": b"{}"}).pin.commit != source.pin.commit


def test_other_bytes_of_the_same_length_are_another_state(make_source: MakeSource) -> None:
    before = make_source(FILES).pin.commit
    assert make_source({**FILES, "config.json": b'{"a": 2}'}).pin.commit != before
