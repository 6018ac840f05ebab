"""Follow one rank's event stream, or its load, of SGLang over ZeroMQ.

Rules, beside those of `prefixroute_zmq.follow`:
1. A subscriber misses the first message even if it was there before the engine, so every connection begins with a
   replay. Without a replay endpoint the history is truncated: the residency is partial until the next flush.
2. Of loads only the newest counts: nothing is replayed, and a message that cannot be read is no more than a count.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import zmq
import zmq.asyncio
from prefixroute_streams import EventSource
from prefixroute_streams.topics import matches
from prefixroute_zmq.address import live_address
from prefixroute_zmq.follow import StreamFollower, attach, open_socket

from prefixroute.errors import DecodeError, UsageError
from prefixroute.load import LoadReport

from .decode import ENGINE
from .load_stats import Reporter, decode_load

_MAX_LOAD_BYTES: Final = 1 << 16


class Follower(StreamFollower):
    """`prefixroute_zmq.follow.StreamFollower` for SGLang 0.5.9 to 0.5.23."""

    engine = ENGINE


class LoadFollowerStats(NamedTuple):
    """What a load socket has brought; `decode_errors` counts by kind, `foreign` what came under another topic.

    The engine says something once a second.
    """

    messages: int
    decode_errors: dict[str, int]
    last_message_at: float
    foreign: int = 0


class LoadFollower:
    """Listens to one rank's load socket, a source of `discover_load`.

    `on_report` is called in the event loop with the rank and its report; what it raises ends `run`. Not thread-safe.
    """

    def __init__(
        self,
        source: EventSource,
        on_report: Callable[[int, LoadReport], None],
        *,
        context: zmq.asyncio.Context | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._topic = source.topic.encode()
        self._address = live_address(source.endpoint, source.host, ENGINE.binding_hosts, source.bind)
        self._on_report = on_report
        self._context = context
        self._clock = clock
        self._reporter = Reporter()
        self._running = False
        self._messages = self._foreign = 0
        self._decode_errors: dict[str, int] = {}
        self._last_message_at = -math.inf

    def stats(self) -> LoadFollowerStats:
        """Counters, at any time, running or not."""
        return LoadFollowerStats(self._messages, dict(self._decode_errors), self._last_message_at, self._foreign)

    async def run(self) -> None:
        """Listen until cancelled. Raises `UsageError` when the endpoint cannot be used."""
        if self._running:
            raise UsageError("this follower runs already: make another one for another stream")
        self._running = True
        context = self._context or zmq.asyncio.Context()
        socket = open_socket(context, zmq.SUB, self._address, _MAX_LOAD_BYTES)
        try:
            socket.subscribe(self._topic)
            attach(socket, self._address)
            while True:
                self._take(await socket.recv_multipart())
        finally:
            self._running = False
            socket.close(linger=0)
            if context is not self._context:
                context.destroy(linger=0)

    def _take(self, frames: list[bytes]) -> None:
        self._messages += 1
        if not matches(self._topic, frames[0] if len(frames) > 1 else b""):
            self._foreign += 1
            return
        self._last_message_at = self._clock()
        try:
            stat = decode_load(frames[-1])
        except DecodeError as error:
            self._decode_errors[error.kind] = self._decode_errors.get(error.kind, 0) + 1
            return
        self._on_report(stat.rank, self._reporter.report(stat))
