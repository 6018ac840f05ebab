"""The emulated engine's side of vLLM's event wire: a PUB socket, and a ROUTER socket for replay.

| socket | frames |
|---|---|
| PUB | topic, sequence number (8 bytes, big-endian, from 0), batch |
| ROUTER, in | identity, empty, first wanted sequence number (8 bytes); anything else is dropped |
| ROUTER, out | identity, empty, topic, sequence number, batch: for each batch that is still buffered |
| ROUTER, end | identity, empty, empty, eight bytes 0xff, empty |

Rules:
1. Publishing never waits. A subscriber that is too slow loses batches, as with vLLM, and can ask for a replay.
2. A truncated replay is not announced: the first batch may be later than the one that was asked for.
3. The endpoint decides who binds (`binds`); the engine always binds the replay socket.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

import msgspec
import zmq
import zmq.asyncio

from prefixroute.emulator.emulator_config import KvEventsConfig
from prefixroute.emulator.vllm_wire import Batch, encode_batch
from prefixroute.errors import UsageError

END_OF_REPLAY = b"\xff" * 8
"""Stands where the sequence number would, in the last answer to a replay request."""

_FREE_PORT = "tcp://*:0"


def binds(endpoint: str) -> bool:
    """Whether the engine binds this endpoint; else it connects to it, and the consumer must bind."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


class EventPublisher:
    """Publishes batches and answers replay requests; needs a running event loop from `start` to `stop`."""

    def __init__(self, config: KvEventsConfig) -> None:
        self._config = config
        self._topic = config.topic.encode()
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._next_sequence = 0
        self._to_lose = 0
        self._context: zmq.asyncio.Context | None = None
        self._owned: zmq.Context[zmq.Socket[bytes]] | None = None
        self._pub: zmq.Socket[bytes] | None = None
        self._replay: zmq.asyncio.Socket | None = None
        self._replay_task: asyncio.Task[None] | None = None
        self._resolved = config

    @property
    def config(self) -> KvEventsConfig:
        """The configuration in force: ports that the system chose are filled in."""
        return self._resolved

    @property
    def published(self) -> int:
        """Batches so far, which is also the next sequence number."""
        return self._next_sequence

    async def start(self) -> None:
        """Open the sockets; UsageError when an endpoint cannot be used. Without effect when disabled."""
        if not self._config.publishes:
            return
        shared = self._config.endpoint.startswith("inproc://")
        context = zmq.Context.instance() if shared else zmq.Context()
        self._context = zmq.asyncio.Context.shadow(context)
        self._owned = None if shared else context
        try:
            self._open(context)
        except UsageError:
            await self.stop()
            raise

    def _open(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        config = self._config
        self._pub = context.socket(zmq.PUB)
        self._pub.set(zmq.SNDHWM, config.hwm)
        endpoint = _attach(self._pub, config.endpoint, bind=binds(config.endpoint))
        replay_endpoint = config.replay_endpoint
        if replay_endpoint is not None:
            assert self._context is not None
            self._replay = self._context.socket(zmq.ROUTER)
            # As in vLLM 0.33: room for two whole replays, so that a slow reader does not lose the middle of one.
            self._replay.set(zmq.SNDHWM, 2 * (config.buffer_steps + 1))
            replay_endpoint = _attach(self._replay, replay_endpoint, bind=True)
            self._replay_task = asyncio.create_task(self._serve_replay(self._replay))
        self._resolved = msgspec.structs.replace(
            config, publisher="zmq", endpoint=endpoint, replay_endpoint=replay_endpoint
        )

    async def stop(self) -> None:
        """Close the sockets; the history is kept, and a later `start` goes on with it."""
        if self._replay_task is not None:
            self._replay_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._replay_task
        for socket in (self._pub, self._replay):
            if socket is not None:
                socket.close(linger=0)
        if self._context is not None and self._owned is not None:
            self._owned.term()
        self._context = self._owned = self._pub = self._replay = self._replay_task = None

    def publish(self, batch: Batch) -> None:
        """Number a batch, keep it for replay and send it. Without effect when disabled or stopped."""
        if self._pub is None:
            return
        frames = (self._next_sequence.to_bytes(8, "big"), encode_batch(batch))
        self._next_sequence += 1
        self._buffer.append(frames)
        if self._to_lose:
            self._to_lose -= 1
            return
        self._pub.send_multipart((self._topic, *frames), flags=zmq.DONTWAIT)

    def lose_live(self, batches: int) -> None:
        """Do not send the next batches live, as a network would lose them; replay still has them."""
        self._to_lose = batches

    async def _serve_replay(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            request = await socket.recv_multipart()
            if len(request) != 3 or len(request[2]) > 8:
                continue
            identity, _, start = request
            for number, payload in list(self._buffer):
                if number >= start.rjust(8, b"\0"):
                    await socket.send_multipart((identity, b"", self._topic, number, payload))
            await socket.send_multipart((identity, b"", b"", END_OF_REPLAY, b""))


def _attach(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, endpoint: str, *, bind: bool) -> str:
    """Bind or connect; returns the endpoint with its port filled in."""
    if "[" in endpoint or "::" in endpoint:
        socket.set(zmq.IPV6, 1)
    try:
        if not bind:
            socket.connect(endpoint)
            return endpoint
        socket.bind("tcp://127.0.0.1:0" if endpoint == _FREE_PORT else endpoint)
    except zmq.ZMQError as error:
        verb = "bind" if bind else "connect to"
        raise UsageError(f"cannot {verb} the event endpoint {endpoint!r}: {error}") from None
    if not endpoint.endswith(":0"):
        return endpoint
    return socket.get_string(zmq.LAST_ENDPOINT)
