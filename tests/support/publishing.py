"""A stand-in that speaks the event wire of vLLM and SGLang in the same process, and what a follower saw of it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from prefixroute_zmq.follow import StreamFollower

from prefixroute.events import BlocksRemoved, EngineBatch, StreamGap, StreamRestarted

END = b"\xff" * 8


def payload(life: int, seq: int, rank: int = 0) -> bytes:
    return msgspec.msgpack.encode([1000.0 * life + seq, [["BlockRemoved", [100 * life + seq]]], rank])


def told(batch: EngineBatch) -> str:
    """`3` for message 3 of the first life, `103` for that of the second, `X` for a clear, `G2` for a gap of two."""
    event = batch.events[0]
    if isinstance(event, StreamGap):
        return f"G{event.missing}"
    if isinstance(event, StreamRestarted):
        return "X"
    assert isinstance(event, BlocksRemoved)
    return str(event.handles[0])


class Publisher:
    """Publishes as both engines do. XPUB is PUB that lets a test see the subscription, so that no test has to sleep."""

    def __init__(
        self,
        live: str,
        replay: str | None = None,
        *,
        bind: bool = True,
        topic: bytes = b"",
        topic_in_replay: bool = True,
        buffer_steps: int = 10_000,
        context: zmq.asyncio.Context | None = None,
    ) -> None:
        self.own = None if context else zmq.asyncio.Context()
        context = context or self.own
        assert context is not None
        self.topic, self.topic_in_replay, self.buffer_steps = topic, topic_in_replay, buffer_steps
        self.buffer: list[tuple[int, bytes]] = []
        self.requests: list[list[bytes]] = []
        self.answering = True
        self.pub = context.socket(zmq.XPUB)
        self.pub.bind(live) if bind else self.pub.connect(live)
        self.router = context.socket(zmq.ROUTER) if replay else None
        self.task: asyncio.Task[None] | None = None
        if self.router is not None:
            self.router.bind(replay)
            self.task = asyncio.get_running_loop().create_task(self.serve(self.router))

    async def serve(self, router: Any) -> None:
        while True:
            client, *request = await router.recv_multipart()
            self.requests.append(request)
            if len(request) != 2 or not self.answering:
                continue
            (start,) = struct.unpack(">Q", request[1])
            topic = [self.topic] if self.topic_in_replay else []
            for seq, data in self.buffer[-self.buffer_steps :]:
                if seq >= start:
                    await router.send_multipart([client, b"", *topic, struct.pack(">Q", seq), data])
            await router.send_multipart([client, b"", *([b""] if self.topic_in_replay else []), END, b""])

    async def subscribed(self) -> None:
        assert await self.pub.recv() == b"\x01" + self.topic

    async def publish(self, data: bytes, *, lost: bool = False) -> None:
        seq = len(self.buffer)
        self.buffer.append((seq, data))
        if not lost:
            await self.pub.send_multipart([self.topic, struct.pack(">Q", seq), data])

    async def close(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
        if self.router is not None:
            self.router.close(linger=0)
        self.pub.close(linger=0)
        if self.own is not None:
            self.own.destroy(linger=0)


async def until(condition: Callable[[], bool], deadline_s: float = 60.0) -> None:
    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.002)

    await asyncio.wait_for(poll(), deadline_s)


class Seen(list[str]):
    def __call__(self, batch: EngineBatch) -> None:
        self.append(told(batch))

    async def until(self, *expected: object) -> None:
        wanted = [str(word) for word in expected]
        try:
            await until(lambda: len(self) >= len(wanted))
        finally:
            assert self == wanted


@contextlib.asynccontextmanager
async def running(follower: StreamFollower) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.ensure_future(follower.run())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def engine(*args: Any, **kwargs: Any) -> AsyncIterator[Publisher]:
    made = Publisher(*args, **kwargs)
    try:
        yield made
    finally:
        await made.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def body() -> None:
        await asyncio.wait_for(test(), 60)

    asyncio.run(body())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
