"""The engine's half: takes batches on the engine's step loop, and hands them on from a thread of its own.

Rules:
1. `publish` never waits, never raises, does no input or output and encodes nothing: it numbers the batch and puts it
   into a bounded queue. What the queue cannot take is dropped, and its number is missing: a gap, which heals.
2. One daemon thread empties the queue. It encodes each batch as the engine would for ZeroMQ, so that a follower reads
   it with the engine's own decoder; it serves the socket, and calls the sinks.
3. A tap that breaks ends itself and is told in the log once: readers find nobody and forget what they knew. The engine
   goes on.
4. Engines load this: no core, no numpy. Only sinks need them, for they get decoded batches.

A batch belongs to the tap from `publish` on; both engines leave it alone then, as they do for their own publisher.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from .frames import MAX_PAYLOAD_BYTES, Batch, encode
from .registry import sinks
from .ring import Ring
from .tap_server import TapServer

if TYPE_CHECKING:
    from .sinks import Delivery

QUEUE_BATCHES: Final = 100_000
"""Batches that wait for the thread, the default of ``max_queue_size`` in both engines."""
RING_BATCHES: Final = 10_000
"""Batches that are kept for readers, the default of ``buffer_steps`` in both engines."""
RING_BYTES: Final = 64 << 20
"""Bytes of them at most."""

_IDLE_S: Final = 0.05  # how long a new reader may wait when the engine is idle
_BLOCKED_S: Final = 0.005  # how long a batch may wait when a reader's socket is full
_BURST: Final = 256  # batches between two looks at the socket; less than the ring holds


class TapStats(NamedTuple):
    """What a tap has done. `published` counts the batches of the engine, `dropped` those that a full queue refused,
    `unusable` those that could not be encoded or are too large. `readers` are connected now, `refused` were cut off.
    """

    published: int
    dropped: int
    unusable: int
    queued: int
    kept: int
    kept_bytes: int
    readers: int
    refused: int
    sink_errors: int
    broken: bool


class Tap:
    """One rank's tap. `path` is where its socket is, None for sinks alone; OSError when it cannot be had.

    `engine` is the name of the engine's adapter. `publish` and `close` are the engine's thread's; all else is the
    tap's thread's, which `start` starts. Without it, call `turn`.
    """

    def __init__(
        self,
        engine: str,
        rank: int = 0,
        path: str | None = None,
        *,
        queue_batches: int = QUEUE_BATCHES,
        ring_batches: int = RING_BATCHES,
        ring_bytes: int = RING_BYTES,
        log: logging.Logger | None = None,
    ) -> None:
        self.engine = engine
        self.rank = rank
        self.path = path
        self.life = int.from_bytes(os.urandom(8), "big") | 1
        self._log = log or logging.getLogger("prefixroute.tap")
        self._queue: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()
        self._limit = queue_batches
        self._next_seq = 0
        self._last_dropped = -1
        self._dropped = 0
        self._told = False
        self._unusable = 0
        self._ring = Ring(ring_batches, ring_bytes)
        self._server = None if path is None else TapServer(path, self._ring, self.life, rank, engine)
        self._encode = msgspec.msgpack.Encoder(enc_hook=_listed).encode
        self._deliveries: dict[int, Delivery] = {}
        self._sink_errors = 0
        self._thread: threading.Thread | None = None
        self._closing = False
        self._broken = False

    def publish(self, batch: object) -> None:
        """Take a batch from the engine. Never waits, never raises. O(1)."""
        seq = self._next_seq
        self._next_seq = seq + 1
        if self._queue.qsize() < self._limit:
            self._queue.put((seq, batch))
        else:
            self._dropped += 1
            self._last_dropped = seq

    def start(self) -> None:
        """Start the thread."""
        name = f"prefixroute-tap-{self.rank}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 1.0) -> None:
        """Hand on what is queued, cut the readers off and remove the socket; safe to call twice.

        Without `start` it is done at once; else it is left to the thread after `timeout_s`.
        """
        self._limit = 0
        self._closing = True
        if self._thread is None:
            self._end()
        else:
            self._queue.put(None)
            self._thread.join(timeout_s)

    def stats(self) -> TapStats:
        """Counters, at any time, from any thread."""
        server = self._server
        return TapStats(
            published=self._next_seq,
            dropped=self._dropped,
            unusable=self._unusable,
            queued=self._queue.qsize(),
            kept=self._ring.entries,
            kept_bytes=self._ring.size,
            readers=server.readers if server else 0,
            refused=server.refused if server else 0,
            sink_errors=self._sink_errors,
            broken=self._broken,
        )

    # --- the thread ----------------------------------------------------------------------------------------

    def turn(self, timeout_s: float = 0.0) -> None:
        """Wait for a batch `timeout_s` at most, hand on what is queued, and serve the socket once."""
        server = self._server
        blocked = server is not None and server.blocked
        self._take(0.0 if blocked else timeout_s)
        if server is not None:
            server.turn(_BLOCKED_S if blocked and timeout_s > 0 and self._queue.empty() else 0.0)

    def _run(self) -> None:
        try:
            while not (self._closing and self._queue.empty()):
                self.turn(_IDLE_S)
        except BaseException:
            self._broken = True
            self._limit = 0
            self._log.exception("the tap of rank %d is broken and ends; the engine goes on without it", self.rank)
        finally:
            self._end()

    def _end(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            with contextlib.suppress(Exception):  # what broke the tap may be right here
                server.turn(0.0)
            server.close()

    def _take(self, timeout_s: float) -> None:
        # Read before the queue is found empty: what was queued before the drop has been taken then.
        dropped = self._last_dropped
        for taken in range(_BURST):
            try:
                item = self._queue.get(timeout=timeout_s) if timeout_s > 0 and not taken else self._queue.get_nowait()
            except Empty:
                if dropped >= self._ring.next_seq:
                    self._lose(dropped + 1)
                break
            if item is not None:
                self._hand_on(*item)
        if self._dropped and not self._told and not self._closing:
            self._told = True
            self._log.warning(
                "the tap of rank %d is behind: batches were dropped, which readers see as gaps", self.rank
            )

    def _hand_on(self, seq: int, batch: Any) -> None:
        if sinks() or self._deliveries:
            for delivery in self._deliveries_now():
                delivery.take(seq, batch)
        if self.path is None:
            self._ring.lose(seq + 1)
            return
        try:
            payload = self._encode([batch.ts, batch.events, self.rank])
            if len(payload) > MAX_PAYLOAD_BYTES:
                raise ValueError(f"{len(payload)} bytes, more than {MAX_PAYLOAD_BYTES}")
        except Exception as error:
            self._unusable += 1
            if self._unusable == 1:
                self._log.warning("a batch of %s could not be handed on, and is a gap: %r", type(batch), error)
            self._ring.lose(seq + 1)
            return
        self._ring.add(seq, encode(Batch(seq, payload)))

    def _lose(self, next_seq: int) -> None:
        self._ring.lose(next_seq)
        for delivery in self._deliveries_now():
            delivery.lose(next_seq)

    def _deliveries_now(self) -> list[Delivery]:
        """One a sink, as they are now."""
        wanted = {id(sink): sink for sink in sinks()}
        for key in [key for key in self._deliveries if key not in wanted]:
            del self._deliveries[key]
        for key, sink in wanted.items():
            if key not in self._deliveries:
                from .sinks import Delivery  # needs the core

                self._deliveries[key] = Delivery(sink, self.engine, self.rank, self._count_sink_error)
        return list(self._deliveries.values())

    def _count_sink_error(self, error: BaseException) -> None:
        self._sink_errors += 1
        if self._sink_errors == 1:
            self._log.warning("a sink raised, which is counted from now on and stops nothing", exc_info=error)


def _listed(value: Any) -> Any:
    """What msgpack has no word for: arrays of the standard library and of numpy."""
    return value.tolist()
