"""Server-sent events: what happens to one job or to all, as it happens, to any number of readers.

One thread reads the queue's stream of events for all of them. Each event has the id that the queue gave it, so a reader
that comes back says what it saw last and gets the rest, as far back as the queue keeps events. How far jobs at work are
comes between, without an id: only its newest state matters.

The format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from reshard.client import SCHEMA
from reshard.client.events import Followed, Id, News, parsed, since
from reshard.client.models.jobs import Progress
from reshard.client.queue import Queue
from reshard.pipeline.errors import BrokerRefused, BrokerUnavailable, TooManyReaders

READERS_MAX = 500  # at once; each holds a connection and what it has not taken yet
READERS_OF_ONE = 100  # the same, of one token or of whom the proxy names; a page opens one in each tab
BEHIND_MAX = 1000  # events that a reader may be behind; then it is hung up on, and comes back for the rest
LISTEN = 0.5  # seconds that one read waits for an event; well below what the broker's client takes for silence
PROGRESS = 1.0  # seconds between two looks at jobs that are at work, while anybody reads
LIVE_MAX = 200  # jobs whose progress is told; a page shows no more
ALIVE = 15.0  # seconds without an event after which a comment is sent: proxies hang up on silence
CHECKED = 5.0  # seconds after which a reader who gets something is looked at again: a token may be taken out any time
AGAIN = 1.0  # seconds until the broker is asked again when it does not answer

ID_MAX = 2**64 - 1  # of either half of an event's id; nothing comes after one that has it twice
_ID = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")
SIGN = b": alive\n\n"
May = Callable[[], Awaitable[bool]]  # whether who reads is still let in


class Message(NamedTuple):
    id: Id | None  # None: progress
    job: str | None
    text: bytes


@dataclass(eq=False)
class Reader:
    """One open stream; ``waiting`` gets None when it fell too far behind."""

    job: str | None  # None: it reads of all
    who: str
    waiting: asyncio.Queue[Message | None] = field(default_factory=lambda: asyncio.Queue(BEHIND_MAX + 1))


class Streams:
    """The events of a queue, for readers of one event loop."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._readers: set[Reader] = set()
        self._ending = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    @asynccontextmanager
    async def running(self, app: Starlette) -> AsyncIterator[None]:
        """Inside, events are delivered."""
        self._loop = asyncio.get_running_loop()
        thread = threading.Thread(target=self._follow, name="reshard-events", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.end()
            await run_in_threadpool(thread.join)

    def end(self) -> None:
        """Deliver nothing more, and hang up on everyone: nobody should wait for who reads for hours."""
        self._ending.set()
        for reader in [*self._readers]:
            self._hang_up(reader)

    def join(self, job: str | None, who: str) -> Reader:
        """Raises TooManyReaders."""
        if sum(reader.who == who for reader in self._readers) >= READERS_OF_ONE:
            raise TooManyReaders(most=READERS_OF_ONE, whose=f" for {who}")
        if len(self._readers) >= READERS_MAX:
            raise TooManyReaders(most=READERS_MAX, whose="")
        reader = Reader(job, who)
        self._readers.add(reader)
        return reader

    def leave(self, reader: Reader) -> None:
        self._readers.discard(reader)

    def missed(self, job: str | None, after: Id) -> Iterator[list[Message]]:
        for batch in since(self._queue, after):
            yield [_message(news) for news in batch if job in {None, news.job}]

    def _follow(self) -> None:
        """In a thread of its own."""
        told, looked = dict[str, Progress](), 0.0
        with closing(Followed(self._queue)) as followed:
            while not self._ending.is_set():
                try:
                    for news in followed.look(LISTEN):
                        self._deliver(_message(news))
                    if self._readers and time.monotonic() - looked >= PROGRESS:
                        now, looked = {job.id: job for job in followed.progress(LIVE_MAX)}, time.monotonic()
                        for job in now.values():
                            if told.get(job.id) != job:
                                self._deliver(Message(None, job.id, _text("progress", job)))
                        told = now
                    followed.outage.over()
                except (BrokerUnavailable, BrokerRefused) as error:
                    followed.outage.say("cannot read events", error)
                    self._ending.wait(AGAIN)

    def _deliver(self, message: Message) -> None:
        assert self._loop is not None, "it runs"
        self._loop.call_soon_threadsafe(self._hand_out, message)

    def _hand_out(self, message: Message) -> None:
        for reader in [*self._readers]:
            if reader.job not in {None, message.job}:
                continue
            if reader.waiting.qsize() < BEHIND_MAX:
                reader.waiting.put_nowait(message)
            else:
                self._hang_up(reader)

    def _hang_up(self, reader: Reader) -> None:
        """Once it has taken what waits; a place is kept for this."""
        self._readers.discard(reader)
        reader.waiting.put_nowait(None)


class _Stream(StreamingResponse):
    """Gives its place back however it ends, also where its other end is gone before it began."""

    def __init__(self, streams: Streams, reader: Reader, after: Id | None, may: May) -> None:
        headers = {"X-Accel-Buffering": "no"}  # or nginx keeps events back
        told = _while_it_may(_read(streams, reader, after), may)
        super().__init__(told, media_type="text/event-stream", headers=headers)
        self._leave = partial(streams.leave, reader)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()


async def follow(streams: Streams, job: str | None, who: str, last: str | None, may: May) -> Response:
    """The stream of one job or of all, after the event ``last``, open as long as ``may``; raises TooManyReaders."""
    after = parsed(last) if last and _ID.fullmatch(last) else None
    after = None if after and (max(after) > ID_MAX or min(after) == ID_MAX) else after  # the queue gives no such id
    return _Stream(streams, streams.join(job, who), after, may)


async def _while_it_may(told: AsyncGenerator[bytes, None], may: May) -> AsyncIterator[bytes]:
    looked = time.monotonic()
    async with aclosing(told):
        async for text in told:
            if text == SIGN or time.monotonic() - looked >= CHECKED:
                if not await may():
                    return
                looked = time.monotonic()
            yield text


async def _read(streams: Streams, reader: Reader, after: Id | None) -> AsyncGenerator[bytes, None]:
    yield b": open\n\n"
    if after is not None:
        batches = streams.missed(reader.job, after)
        while (batch := await run_in_threadpool(next, batches, None)) is not None:
            for old in batch:
                yield old.text
            after = batch[-1].id if batch else after
    while True:
        try:
            async with asyncio.timeout(ALIVE):
                message = await reader.waiting.get()
        except TimeoutError:
            yield SIGN
            continue
        if message is None:
            return
        if message.id is None or after is None or message.id > after:
            yield message.text


def _message(news: News) -> Message:
    id = f"id: {news.id[0]}-{news.id[1]}\n".encode()
    return Message(news.id, news.job, id + _text("event", news.event))


def _text(kind: str, said: BaseModel) -> bytes:
    """On one line, as JSON escapes what would end it."""
    return f"event: {kind}\ndata: {json.dumps({'schema': SCHEMA, kind: said.model_dump(mode='json')})}\n\n".encode()
