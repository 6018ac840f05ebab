"""The node's half: follow one tap. As `prefixroute_zmq.follow.StreamFollower` does over ZeroMQ, and with its stats.

| what happens                              | what the node gets                                                       |
|-------------------------------------------|--------------------------------------------------------------------------|
| a number is missing                       | `StreamGap`, with how many                                               |
| a batch cannot be decoded                 | `StreamGap(1)`, and a count by kind                                      |
| the connection ends                       | nothing: the follower comes back and goes on where it was                |
| nobody serves the socket any more         | `StreamRestarted` at once: the engine is gone, and its cache with it     |
| the tap says another life                 | `StreamRestarted`, unless it was said already; then the history it keeps |

Rules:
1. A life and a number are all that order needs: the tap numbers batches from 0 and draws its life at random.
2. The path must be a socket of this user (or root's), else it is not followed.
3. Bytes that are no frame are counted; the connection is made anew, after a pause that grows.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import time
from collections.abc import Callable
from typing import Final

from prefixroute_streams.silence import SILENT_AFTER, Silence
from prefixroute_streams.source import Engine, EventSource, FollowerStats

from prefixroute.errors import DecodeError, UsageError
from prefixroute.events import EngineBatch, EngineEvent, StreamGap, StreamRestarted, UnknownEvent

from .frames import MAX_FRAME_BYTES, Batch, Frame, FrameError, Head, Resume, Splitter, Welcome, decode, encode
from .tap_address import path_of_tap

__all__ = ["FollowerStats", "TapFollower"]

PAUSE_S: Final = (0.05, 2.0)
"""Between two attempts to connect: at first, and at most."""

WELCOME_S: Final = 5.0
"""A tap that says nothing for so long is tried anew. It answers within 0.05 s, unless its process is very busy."""

_CHUNK_BYTES: Final = 256 << 10
_COUNTS: Final = ("messages", "replayed", "batches", "unknown_events", "connections", "duplicates")


def may_follow(owner: int) -> bool:
    """Whether this process may believe what comes from a socket of that user."""
    return owner in (0, os.geteuid()) or os.geteuid() == 0


class TapFollower:
    """Follows the tap at `source.endpoint` (``tap:///path``, already that of `source.rank`).

    `on_batch` is called in the event loop with every batch to apply, in order; what it raises ends `run`. The marks
    `StreamGap` and `StreamRestarted` come as batches of their own. `engine` is the adapter's. Not thread-safe.
    """

    def __init__(
        self,
        source: EventSource,
        on_batch: Callable[[EngineBatch], None],
        engine: Engine,
        *,
        silent_after: int = SILENT_AFTER,
        pause_s: tuple[float, float] = PAUSE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path_of_tap(source.endpoint)
        self._rank = source.rank
        self._on_batch = on_batch
        self._engine = engine
        self._silence = Silence(silent_after)
        self._pause_s = pause_s
        self._clock = clock
        self._running = False
        self._resync_wanted = False
        self._connection: socket.socket | None = None
        self._life = 0
        self._next_seq = 0
        self._replay_end = 0
        """What the tap had published when it was connected to; what comes below was published before."""
        self._welcomed = False
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._gaps = self._missing = self._restarts = self._resyncs = 0
        self._decode_errors: dict[str, int] = {}

    def stats(self) -> FollowerStats:
        """Counters and health, at any time, running or not.

        `replays` counts the connections that brought history, `replayed` its batches. What ZeroMQ alone knows is 0.
        """
        return FollowerStats(
            **self._counts,
            decode_errors=dict(self._decode_errors),
            foreign=0,
            gaps=self._gaps,
            missing=self._missing,
            restarts=self._restarts,
            replays=self._counts["connections"],
            replay_timeouts=0,
            overflowed=0,
            resyncs=self._resyncs,
            connected=self._welcomed,
            last_seq=self._next_seq - 1 if self._next_seq else None,
            last_message_at=self._silence.last_message_at,
            replaying=self._welcomed and self._next_seq < self._replay_end,
            silent=self._silence.silent,
            foreign_topics={},
            publishers=int(self._welcomed),
            mixed=0,
        )

    def resync(self) -> None:
        """Read the stream anew: forget what was told, and take the history that the tap still keeps."""
        self._resync_wanted = True
        if self._connection is not None:
            _end(self._connection)

    def note_finished(self, prompt_tokens: int, cached_tokens: int = 0) -> None:
        """Take note of a prompt that the engine has answered; long uncached ones without an event mean silence."""
        self._silence.finished(prompt_tokens, cached_tokens)

    async def run(self) -> None:
        """Follow the tap until cancelled, whether it is there yet or not.

        May be run again: it goes on where it was. Raises `UsageError` when the socket cannot be used by this user, or
        is another engine's or rank's.
        """
        if self._running:
            raise UsageError("this follower runs already: make another one for another stream")
        self._running = True
        pause_s = self._pause_s[0]
        try:
            while True:
                if await self._follow_once():
                    pause_s = self._pause_s[0]
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, self._pause_s[1])
        finally:
            self._running = False

    async def _follow_once(self) -> bool:
        """Follow one connection to its end; True when it was a good one."""
        connection = self._connect()
        if connection is None:
            return False
        if self._resync_wanted:
            self._begin_anew()
        self._connection = connection
        loop = asyncio.get_running_loop()
        splitter = Splitter(MAX_FRAME_BYTES)
        # Not wait_for: before Python 3.12 it may swallow the cancellation of `run`.
        deadline = loop.call_later(WELCOME_S, self._give_up, connection)
        try:
            await loop.sock_sendall(connection, encode(Resume(self._life, self._next_seq)))
            while data := await loop.sock_recv(connection, _CHUNK_BYTES):
                for body in splitter.feed(data):
                    self._take(decode(body))
                await asyncio.sleep(0)
            return self._welcomed
        except FrameError as error:
            self._count_error(error.kind)
            return False
        except OSError:
            return self._welcomed
        finally:
            deadline.cancel()
            self._welcomed = False
            self._connection = None
            connection.close()

    def _give_up(self, connection: socket.socket) -> None:
        """End a connection on which nothing has been said."""
        if not self._welcomed:
            _end(connection)

    def _connect(self) -> socket.socket | None:
        """Return a connection; None when there is none to be had, for now."""
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            self._gone()
            return None
        except OSError:
            return None
        if not stat.S_ISSOCK(found.st_mode):
            raise UsageError(f"{self._path} is no socket: pass what the engine has for PREFIXROUTE_TAP")
        if not may_follow(found.st_uid):
            raise UsageError(f"{self._path} is another user's: run the engine and the node as the same one")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            connection.connect(self._path)  # of a Unix socket: at once, or not at all
        except ConnectionRefusedError:
            connection.close()
            self._gone()
            return None
        except OSError:
            connection.close()
            return None
        return connection

    # --- frames --------------------------------------------------------------------------------------------

    def _take(self, frame: Frame) -> None:
        if isinstance(frame, Welcome):
            self._greet(frame)
        elif not self._welcomed:
            raise FrameError("malformed", "a tap says first who it is")
        elif isinstance(frame, Batch):
            self._take_batch(frame)
        elif isinstance(frame, Head):
            self._skip_to(frame.next_seq)
        else:
            raise FrameError("malformed", "a tap does not say where to begin")

    def _greet(self, frame: Welcome) -> None:
        if self._welcomed:
            raise FrameError("malformed", "a tap says once who it is")
        if (frame.engine, frame.rank) != (self._engine.name, self._rank):
            raise UsageError(
                f"the tap at {self._path} is of {frame.engine}, rank {frame.rank}, "
                f"but {self._engine.name}, rank {self._rank} was to be followed"
            )
        if frame.life != self._life:
            self._gone()
            self._life = frame.life
        self._welcomed = True
        self._replay_end = frame.next_seq
        self._counts["connections"] += 1

    def _take_batch(self, frame: Batch) -> None:
        self._counts["messages"] += 1
        self._silence.heard(self._clock())
        if frame.seq < self._next_seq:
            self._counts["duplicates"] += 1
            return
        self._counts["replayed"] += frame.seq < self._replay_end
        self._skip_to(frame.seq)
        try:
            batch = self._engine.decode(frame.payload)
        except DecodeError as error:
            self._count_error(error.kind)
            self._skip_to(frame.seq + 1)
            return
        self._next_seq = frame.seq + 1
        self._counts["unknown_events"] += sum(type(event) is UnknownEvent for event in batch.events)
        self._apply(batch)

    def _skip_to(self, next_seq: int) -> None:
        """What is below `next_seq` and has not come is lost."""
        missing = next_seq - self._next_seq
        if missing > 0:
            self._next_seq = next_seq
            self._gaps += 1
            self._missing += missing
            self._mark(StreamGap(missing))

    def _begin_anew(self) -> None:
        """Forget where it was, so that the next connection brings all that is kept."""
        self._resync_wanted = False
        self._resyncs += 1
        self._life = self._next_seq = 0
        self._mark(StreamRestarted())

    def _gone(self) -> None:
        """The life that was followed is over."""
        if self._life:
            self._life = self._next_seq = 0
            self._restarts += 1
            self._mark(StreamRestarted())

    def _mark(self, event: EngineEvent) -> None:
        self._apply(EngineBatch((event,), self._rank))

    def _apply(self, batch: EngineBatch) -> None:
        self._counts["batches"] += 1
        self._on_batch(batch)

    def _count_error(self, kind: str) -> None:
        self._decode_errors[kind] = self._decode_errors.get(kind, 0) + 1


def _end(connection: socket.socket) -> None:
    """Let whoever reads from a connection find that it is over."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
