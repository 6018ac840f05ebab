"""A bad link between an engine's event socket and whoever follows it: it loses messages, or holds them back.

Rules:
1. Frames pass as they are: topic, sequence number, payload. What is lost is lost whole, as at a high-water mark.
2. Replay does not pass here: a follower asks the engine itself, or nobody.
3. The thread is the only user of its sockets; a test changes what it does by plain attributes, read for every message.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator

import zmq

_POLL_MS = 20


class BadLink:
    """Forwards an engine's live events from `upstream` to `address`, which it binds.

    `loses` is asked with every message's number; `held` keeps back all messages while True and lets them go at once
    afterwards, except those beyond `room`, the newest of which stay.
    """

    def __init__(self, upstream: str, address: str) -> None:
        self.address = address
        self.loses: Callable[[int], bool] = lambda _: False
        self.held = False
        self.room = 1 << 30
        self.seen = -1
        """Number of the last message that came."""
        self.passed = -1
        """Number of the last message that was let through."""
        self.lost = 0
        self._upstream = upstream
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bad-link", daemon=True)

    def start(self) -> None:
        """Begin to forward."""
        self._thread.start()

    def stop(self) -> None:
        """End it."""
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        kept: list[list[bytes]] = []
        try:
            source, out = context.socket(zmq.SUB), context.socket(zmq.PUB)
            source.set(zmq.RCVHWM, 0)
            out.set(zmq.SNDHWM, 0)
            source.subscribe("")
            source.connect(self._upstream)
            out.bind(self.address)
            while not self._done.is_set():
                if source.poll(_POLL_MS):
                    kept.append(source.recv_multipart())
                if not self.held:
                    self._let_go(out, kept)
                else:
                    self._overflow(kept)
                if kept:
                    self.seen = _number(kept[-1])
        finally:
            context.destroy(linger=0)

    def _let_go(self, out: zmq.Socket[bytes], kept: list[list[bytes]]) -> None:
        for frames in kept:
            number = _number(frames)
            if self.loses(number):
                self.lost += 1
            else:
                out.send_multipart(frames)
                self.passed = number
            self.seen = number
        kept.clear()

    def _overflow(self, kept: list[list[bytes]]) -> None:
        while len(kept) > self.room:
            kept.pop(0)
            self.lost += 1


def _number(frames: list[bytes]) -> int:
    return int.from_bytes(frames[1], "big")


@contextlib.contextmanager
def bad_link(upstream: str) -> Iterator[BadLink]:
    """A link for the length of the block, and a socket of its own."""
    with tempfile.TemporaryDirectory(prefix="pr-link-") as folder:
        link = BadLink(upstream, f"ipc://{folder}/s")
        link.start()
        try:
            yield link
        finally:
            link.stop()
