"""Small reads of a stored file: the one thing that the formats ask of a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from reshard.pipeline.errors import BadLength
from reshard.pipeline.limits import HEADER_READERS, SPAN_GAP, SPAN_READ
from reshard.pipeline.tensors import Span, StoredFile

T = TypeVar("T")


# Exactly the bytes ``start <= b < stop`` of a file, in order, in views that are valid until the next one.
# ``Source.read`` is one. It is called from several threads at once.
Read = Callable[[StoredFile, int, int], Iterator[memoryview]]


def each(read: Callable[..., T], *arguments: Iterable[Any]) -> list[T]:
    """What ``map`` gives, made several at a time: what they wait for is latency."""
    calls = list(zip(*arguments, strict=False))
    if len(calls) < 2:
        return [read(*call) for call in calls]
    pool = ThreadPoolExecutor(HEADER_READERS, thread_name_prefix="headers")
    try:
        return list(pool.map(lambda call: read(*call), calls))
    finally:  # of an error, or an interrupt, nobody waits for reads that are still under way
        pool.shutdown(wait=False, cancel_futures=True)


def read_bytes(read: Read, file: StoredFile, start: int, stop: int) -> bytes:
    """Those bytes in memory; raises BadLength when the file ends before ``stop``."""
    if stop > file.size:
        raise BadLength(file=file.path, actual=file.size, expected=f"{stop:,} or more")
    if start == stop:
        return b""
    data = bytearray()
    for view in read(file, start, stop):  # not joined: a view is gone when the next one comes
        data += view
    if len(data) != stop - start:
        raise BadLength(file=file.path, actual=start + len(data), expected=f"{stop:,} or more")
    return bytes(data)


def read_spans(read: Read, file: StoredFile, spans: Sequence[Span]) -> list[bytes]:
    """The bytes of every span, in the order given; spans that lie close together share one request.

    For spans that are small and many: all of them are held at once, and up to HEADER_READERS requests run at a time.
    Raises BadLength when the file ends before a span does.
    """
    requests: list[tuple[Span, list[int]]] = []
    for number in sorted(range(len(spans)), key=spans.__getitem__):
        span = spans[number]
        if requests:
            whole, members = requests[-1]
            merged = Span(whole.start, max(whole.stop, span.stop))
            if span.start - whole.stop <= SPAN_GAP and merged.stop - merged.start <= SPAN_READ:
                members.append(number)
                requests[-1] = (merged, members)
                continue
        requests.append((span, [number]))

    found = [b""] * len(spans)

    def fetch(request: tuple[Span, list[int]]) -> None:
        whole, members = request
        data = read_bytes(read, file, whole.start, whole.stop)
        for number in members:
            span = spans[number]
            found[number] = data[span.start - whole.start : span.stop - whole.start]

    each(fetch, requests)
    return found
