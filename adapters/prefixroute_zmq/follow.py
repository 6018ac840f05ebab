"""Follow one rank's event stream over ZeroMQ: live messages, replays, new connections.

Rules:
1. Order and lives are `Sequencer`'s business; this file moves frames.
2. Frames are counted from the end: the payload is last, the sequence number before it. Replay answers have a topic
   frame from vLLM 0.26 and SGLang 0.5.22 on, and none before.
3. Each replay has a socket of its own, so an answer that comes late cannot be taken for one of the next replay.
4. Messages of another topic or rank are another engine's (`topics`): counted, and never applied. A socket that several
   engines connect to is one stream only by its topic; under one topic their numbers get mixed, which is counted too.
5. The engine must never wait for us: sockets hold much and linger never, and nothing here blocks.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import ClassVar, Final, TypeAlias

import zmq
import zmq.asyncio
from prefixroute_streams.sequence import REPLAY_TIMEOUT_S, Action, ReplayRequest, Sequencer
from prefixroute_streams.silence import SILENT_AFTER, Silence
from prefixroute_streams.source import Engine, EventSource, FollowerStats
from prefixroute_streams.topics import TopicFilter
from zmq.utils.monitor import parse_monitor_message

from prefixroute.errors import DecodeError, UsageError
from prefixroute.events import EngineBatch, UnknownEvent

from .address import Address, live_address, replay_address

_END_SEQ: Final = b"\xff" * 8
_LIVE_HWM: Final = 100_000  # the engine's own default; what it drops we could not have held either
_BURST: Final = 256  # messages between two looks at the other sockets
_RECONNECT_MS: Final = (100, 2000)
_HEARTBEAT_MS: Final = (5000, 15_000)  # tells a dead host from a quiet engine

_Socket: TypeAlias = zmq.asyncio.Socket


class StreamFollower:
    """Runs a `Sequencer` on the sockets of one `EventSource`. A subclass names its `engine`.

    `on_batch` is called in the event loop with every batch to apply, in order; what it raises ends `run`. The marks
    `StreamGap` and `StreamRestarted` come as batches of their own. Not thread-safe. An ``inproc`` source needs the
    engine's own `context`.
    """

    engine: ClassVar[Engine]

    def __init__(
        self,
        source: EventSource,
        on_batch: Callable[[EngineBatch], None],
        *,
        replay_timeout_s: float = REPLAY_TIMEOUT_S,
        silent_after: int = SILENT_AFTER,
        context: zmq.asyncio.Context | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._on_batch = on_batch
        self._live = live_address(source.endpoint, source.host, self.engine.binding_hosts, source.bind)
        self._replay = replay_address(source.replay_endpoint, source.host) if source.replay_endpoint else None
        self._sequencer = Sequencer(
            replay=self._replay is not None, replay_timeout_s=replay_timeout_s, buffer_steps=source.buffer_steps
        )
        self._context = context
        self._clock = clock
        self._silence = Silence(silent_after)
        self._topics = TopicFilter(source.topic)
        self._rank: int | None = None
        self._counts = dict.fromkeys(("messages", "replayed", "batches", "unknown_events", "foreign", "connections"), 0)
        self._decode_errors: dict[str, int] = {}
        self._publishers = self._mixed = 0
        self._resync_wanted = False
        self._sockets: _Sockets | None = None

    def stats(self) -> FollowerStats:
        """Counters and health, at any time, running or not."""
        order = self._sequencer.stats
        return FollowerStats(
            **self._counts,
            decode_errors=dict(self._decode_errors),
            **order._asdict(),
            connected=self._publishers > 0,
            last_seq=self._sequencer.last_seq,
            last_message_at=self._silence.last_message_at,
            replaying=self._sequencer.pending is not None,
            silent=self._silence.silent,
            foreign_topics=dict(self._topics.foreign),
            publishers=self._publishers,
            mixed=self._mixed,
        )

    def note_finished(self, prompt_tokens: int, cached_tokens: int = 0) -> None:
        """Take note of a prompt that the engine has answered; long uncached ones without an event mean silence."""
        self._silence.finished(prompt_tokens, cached_tokens)

    def resync(self) -> None:
        """Begin anew from what the engine still keeps, when the messages at hand are applied; call it from `on_batch`.

        For a view that proved wrong although no message is known to be missing. Without a replay endpoint nothing
        happens.
        """
        self._resync_wanted = True

    async def run(self) -> None:
        """Follow the stream until cancelled. Raises `UsageError` when the endpoints cannot be used."""
        if self._sockets is not None:
            raise UsageError("this follower runs already: make another one for another stream")
        context = self._context or zmq.asyncio.Context()
        try:
            self._sockets = _Sockets(
                context, self._live, self._replay, self._source.topic, self.engine.max_payload_bytes
            )
            if self._live.address.startswith("inproc://"):
                self._publishers = 1
                self._dispatch(self._sequencer.connected(self._clock()))  # inproc reports no connections
            while True:
                await self._turn(self._sockets)
        finally:
            if self._sockets is not None:
                self._sockets.close()
                self._sockets, self._publishers = None, 0
            if context is not self._context:
                context.destroy(linger=0)

    async def _turn(self, sockets: _Sockets) -> None:
        await sockets.wait(self._sequencer.next_timer() - self._clock())
        live = await receive_some(sockets.live)
        # A connection is reported before its first message can be read, so this order misses none.
        told = [parse_monitor_message(frames)["event"] for frames in await receive_some(sockets.monitor)]
        if self._count_publishers(told):
            self._dispatch(self._sequencer.connected(self._clock()))
        for frames in live:
            self._take_live(frames)
        if sockets.replay is not None:
            request = sockets.request
            for frames in await receive_some(sockets.replay):
                self._take_replayed(request, frames)
        self._dispatch(self._sequencer.handle_timer(self._clock()))
        if self._resync_wanted:
            self._resync_wanted = False
            self._dispatch(self._sequencer.resync(self._clock()))
        await asyncio.sleep(0)

    def _count_publishers(self, told: list[int]) -> bool:
        """Count who came and went, by the monitor; return whether anybody came."""
        came = 0
        for event in told:
            if event == zmq.EVENT_DISCONNECTED:
                self._publishers = max(0, self._publishers - 1)
                continue
            if not self._publishers:
                self._topics.forget()
            self._publishers += 1
            came += 1
        self._counts["connections"] += came
        return came > 0

    def _take_live(self, frames: list[bytes]) -> None:
        self._counts["messages"] += 1
        seq = self._seq(frames)
        if seq is None or not self._topics.admits(frames[0] if len(frames) > 2 else b""):
            return
        self._silence.heard(self._clock())
        batch = self._decode(frames[-1])
        if batch is not None and batch.rank != self._rank:
            if self._rank is not None:
                self._counts["foreign"] += 1
                return
            self._rank = batch.rank
        restarts = self._sequencer.stats.restarts
        self._dispatch(self._sequencer.receive_live(int.from_bytes(seq, "big"), batch, self._clock()))
        self._mixed += self._publishers > 1 and self._sequencer.stats.restarts != restarts

    def _take_replayed(self, request: ReplayRequest, frames: list[bytes]) -> None:
        seq = self._seq(frames)
        if seq is None:
            return
        if seq == _END_SEQ:
            self._dispatch(self._sequencer.receive_replay_end(request, self._clock()))
            return
        if len(frames) >= 4 and not self._topics.admits(frames[-3]):
            return
        self._counts["replayed"] += 1
        self._silence.heard(self._clock())
        number = int.from_bytes(seq, "big")
        self._dispatch(self._sequencer.receive_replayed(request, number, self._decode(frames[-1]), self._clock()))

    def _seq(self, frames: list[bytes]) -> bytes | None:
        if len(frames) >= 2 and len(frames[-2]) == 8:
            return frames[-2]
        self._count_error("frames")
        return None

    def _decode(self, payload: bytes) -> EngineBatch | None:
        try:
            batch = self.engine.decode(payload)
        except DecodeError as error:
            self._count_error(error.kind)
            return None
        self._counts["unknown_events"] += sum(type(event) is UnknownEvent for event in batch.events)
        return batch

    def _count_error(self, kind: str) -> None:
        self._decode_errors[kind] = self._decode_errors.get(kind, 0) + 1

    def _dispatch(self, actions: list[Action]) -> None:
        assert self._sockets is not None
        for action in actions:
            if isinstance(action, ReplayRequest):
                self._sockets.ask(action)
            else:
                self._counts["batches"] += 1
                self._on_batch(action)
        if self._sequencer.pending is None:
            self._sockets.forget()


class _Sockets:
    """The sockets of one stream: live, its monitor, and one for the replay that is awaited."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        live: Address,
        replay: Address | None,
        topic: str,
        max_payload_bytes: int,
    ) -> None:
        self._context = context
        self._replay_address = replay
        self._max_payload_bytes = max_payload_bytes
        self._poller = zmq.asyncio.Poller()
        self.request = ReplayRequest(0, 0)
        self.replay: _Socket | None = None
        self.live: _Socket = self._socket(zmq.SUB, live)
        self.live.set(zmq.RCVHWM, _LIVE_HWM)
        self.live.subscribe(topic)
        self.monitor: _Socket = self.live.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._poller.register(self.live, zmq.POLLIN)
        self._poller.register(self.monitor, zmq.POLLIN)
        try:
            attach(self.live, live)
        except UsageError:
            self.close()
            raise

    def _socket(self, kind: int, address: Address) -> _Socket:
        return open_socket(self._context, kind, address, self._max_payload_bytes)

    async def wait(self, timeout_s: float) -> None:
        """Return when a socket can be read or the time is over."""
        await self._poller.poll(None if timeout_s == math.inf else max(0, math.ceil(timeout_s * 1000)))

    def ask(self, request: ReplayRequest) -> None:
        """Send a request on a fresh socket."""
        assert self._replay_address is not None
        self.forget()
        self.request = request
        self.replay = self._socket(zmq.DEALER, self._replay_address)
        self.replay.set(zmq.RCVHWM, 0)  # before vLLM 0.33 the engine drops what a slow reader leaves
        attach(self.replay, self._replay_address)
        self._poller.register(self.replay, zmq.POLLIN)
        # A new DEALER has a pipe at once, so this never waits.
        zmq.Socket.shadow(self.replay.underlying).send_multipart(
            [b"", request.start_seq.to_bytes(8, "big")], zmq.DONTWAIT
        )

    def forget(self) -> None:
        """Close the replay socket: nothing is awaited on it."""
        if self.replay is not None:
            self._poller.unregister(self.replay)
            self.replay.close(linger=0)
            self.replay = None

    def close(self) -> None:
        """Close everything, at once."""
        self.forget()
        self.live.disable_monitor()
        self.monitor.close(linger=0)
        self.live.close(linger=0)


def open_socket(context: zmq.asyncio.Context, kind: int, address: Address, max_bytes: int) -> _Socket:
    """Return a socket that is not attached yet: it never lingers, comes back by itself, and refuses huge messages."""
    socket = context.socket(kind)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.MAXMSGSIZE, max_bytes)
    socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS[0])
    socket.set(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS[1])
    socket.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS[0])
    socket.set(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_MS[1])
    socket.set(zmq.IPV6, int("[" in address.address))
    return socket


def attach(socket: _Socket, address: Address) -> None:
    """Bind or connect. Raises `UsageError` when the address cannot be used."""
    try:
        if address.bind:
            socket.bind(address.address)
        else:
            socket.connect(address.address)
    except zmq.ZMQError as error:
        verb = "bind" if address.bind else "connect to"
        raise UsageError(
            f"cannot {verb} {address.address}: {error.strerror}. Pass the endpoint of the engine's "
            "--kv-events-config; an engine that connects needs an address of this host to connect to"
        ) from error


async def receive_some(socket: _Socket) -> list[list[bytes]]:
    """Return what can be read without waiting, a bounded number of messages."""
    messages: list[list[bytes]] = []
    try:
        while len(messages) < _BURST:
            messages.append(await socket.recv_multipart(zmq.DONTWAIT))
    except zmq.Again:
        pass
    return messages
