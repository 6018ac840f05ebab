"""Names of hosts into addresses, off the event loop: a resolver that is silent holds up nobody.

Rules:
1. `look_up` never waits. What is not known yet is asked for in a thread of its own, at most `MAX_LOOKUPS` at once, and
   given up as an answer after `patience_s`, whenever it comes.
2. A name is asked again every `again_s` while it is used, and sooner after a failure; what was known holds until then.
3. Names come from peers: what is kept is bounded, and what is no host and port is refused without a question.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, TypeAlias

from cachetools import LRUCache

MAX_NAMES = 4096
MAX_LOOKUPS = 8
"""Threads that ask at once: one that is silent costs a thread for as long as the system's resolver waits."""

MAX_WAITING = 16
"""Datagrams that wait for the first answer to their name."""

AGAIN_S = 5.0
RETRY_S = 1.0
PATIENCE_S = 4.0

SocketAddress: TypeAlias = tuple[Any, ...]
Ask: TypeAlias = Callable[[str, int], SocketAddress]
"""Returns where a host's port is; may take its time, and raise `OSError`."""


@dataclass(slots=True, eq=False)
class _Name:
    host: str
    port: int
    found: SocketAddress | None = None
    next_at: float = 0.0
    asking: bool = False
    failed: str = ""
    waiting: deque[bytes] = field(default_factory=lambda: deque(maxlen=MAX_WAITING))


class Resolver:
    """The addresses of one socket. `found(address, data)` takes what has waited; `failed(address, reason)` is told.

    `failed` is called once for each failure that follows a success, or that has another reason than the last.
    """

    def __init__(
        self,
        family: int,
        found: Callable[[SocketAddress, bytes], None],
        failed: Callable[[Hashable, str], None],
        ask: Ask | None = None,
        again_s: float = AGAIN_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._family = family
        self._found = found
        self._failed = failed
        self._ask = ask or self._getaddrinfo
        self._again_s = again_s
        self._patience_s = patience_s
        self._numeric: LRUCache[Hashable, SocketAddress] = LRUCache(MAX_NAMES)
        self._names: LRUCache[Hashable, _Name] = LRUCache(MAX_NAMES)
        self._threads = 0
        self._queue: deque[Hashable] = deque()
        self._closed = False

    def look_up(self, address: Hashable, data: bytes) -> SocketAddress | None:
        """Return where to send `data`, None if it waits for an answer. O(1).

        Raises `OSError` for a text that is no "host:port", and while the last answer to a name was a failure.
        """
        known = self._numeric.get(address)
        if known is not None:
            return known
        name = self._names.get(address)
        if name is None:
            host, port = host_and_port(address)
            try:
                ip_address(host)
            except ValueError:
                name = self._names[address] = _Name(host, port)
            else:
                rest = address[2:] if isinstance(address, tuple) else ()
                known = self._numeric[address] = (host, port, *rest)
                return known
        if not name.asking and self._loop.time() >= name.next_at:
            name.asking = True
            self._queue.append(address)
            self._loop.call_later(self._patience_s, self._late, address, name)
            self._begin()
        if name.found is None:
            if name.failed:
                raise OSError(f"{name.host!r} is not resolved: {name.failed}")
            name.waiting.append(data)
        return name.found

    def close(self) -> None:
        """Take no answer any more."""
        self._closed = True

    def _begin(self) -> None:
        while self._queue and self._threads < MAX_LOOKUPS:
            address = self._queue.popleft()
            name = self._names.get(address)
            if name is not None:
                self._threads += 1
                # A daemon: a silent resolver must not hold up the end of the process either.
                threading.Thread(target=self._run, args=(address, name), daemon=True).start()

    def _run(self, address: Hashable, name: _Name) -> None:
        try:
            answer, reason = self._ask(name.host, name.port), ""
        except Exception as error:  # whatever a resolver raises: the thread has nobody to tell
            answer, reason = None, str(error) or type(error).__name__
        try:
            self._loop.call_soon_threadsafe(self._answered, address, name, answer, reason)
        except RuntimeError:
            return  # the loop is closed by now

    def _answered(self, address: Hashable, name: _Name, answer: SocketAddress | None, reason: str) -> None:
        self._threads -= 1
        if self._closed:
            return
        self._settle(address, name, answer, reason)
        self._begin()

    def _late(self, address: Hashable, name: _Name) -> None:
        if name.asking and not self._closed and name.found is None:
            self._settle(address, name, None, f"no answer within {self._patience_s:g} s", asking=True)

    def _settle(
        self, address: Hashable, name: _Name, answer: SocketAddress | None, reason: str, asking: bool = False
    ) -> None:
        name.asking = asking
        name.next_at = self._loop.time() + (RETRY_S if answer is None else self._again_s)
        waiting, name.waiting = name.waiting, deque(maxlen=MAX_WAITING)
        if answer is not None:
            name.found, name.failed = answer, ""
            for data in waiting:
                self._found(answer, data)
        elif reason != name.failed:
            name.failed = reason
            self._failed(address, reason)

    def _getaddrinfo(self, host: str, port: int) -> SocketAddress:
        answers = socket.getaddrinfo(host, port, self._family, socket.SOCK_DGRAM)
        return answers[0][4]


def host_and_port(address: Hashable) -> tuple[str, int]:
    """Read "host:port", or (host, port). Raises `OSError`: it may have come from a peer."""
    if isinstance(address, tuple) and len(address) >= 2:
        host, port = address[0], address[1]
    else:
        text, _, port = str(address).rpartition(":")
        host = text.strip("[]")
    try:
        if isinstance(host, str) and 0 < len(host) <= 253 and not set(host) & set(" /?#@\0") and 0 < int(port) < 65536:
            return host, int(port)
    except (TypeError, ValueError):
        pass
    raise OSError(f"{address!r} is no numeric host:port, and no name:port")
