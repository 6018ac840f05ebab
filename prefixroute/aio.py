"""The asyncio edge: runs a node over a transport of the caller's.

Rules:
1. A transport carries datagrams, may lose, repeat and reorder them, and never makes the node wait: an error in sending
   is counted and forgotten, since gossip heals loss.
2. The event loop goes on between two datagrams, and between two slices of what a node has to do: no call into a node
   takes more than a few milliseconds, and they do not add up.
3. Leaving the driver's context cancels its tasks and closes the transport; nothing goes on behind the caller's back.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Hashable
from typing import Protocol, TypeAlias

from typing_extensions import Self

from .errors import UsageError
from .events import AddressFailed, NodeEvent
from .node import Node
from .resolver import Ask, Resolver, SocketAddress

MAX_QUEUED_DATAGRAMS = 4096
"""Received and not yet handled; beyond it the newest are dropped, as a kernel's socket buffer would."""

READ_AT_ONCE = 32
"""Datagrams that one turn of the event loop reads: some 0.3 ms."""

MAX_REFUSED_PER_S = 2000.0
"""Datagrams without a right tag that are read in a second: 3 % of a processor. Of a flood the kernel drops the rest."""

PAUSE_S = 0.005
"""After a datagram without a right tag nothing is read for so long at least: then many are read in one turn."""

MAX_READ_BYTES = 65537


Screen: TypeAlias = Callable[[bytes, Hashable], bool]
Unreached: TypeAlias = Callable[[Hashable, str], None]


class Transport(Protocol):
    """What carries datagrams: UDP, HTTP, ZeroMQ, NATS or anything else the caller has."""

    async def send(self, address: Hashable, data: bytes) -> None:
        """Send one datagram; may fail with `OSError`, which is counted."""

    async def receive(self) -> tuple[bytes, Hashable]:
        """Wait for a datagram; return it and where it came from."""

    async def close(self) -> None:
        """Release what the transport holds."""


class UdpTransport:
    """Datagrams over UDP. Addresses are (host, port), or "host:port" as peers give their contact.

    A host may be a name: it is resolved off the event loop, and again every few seconds while it is used (`resolver`).
    `unreached(address, reason)`, if it is set, is told of a name that is not resolved. A driver lets its node tell it.

    `screen(data, source)`, if it is set, is asked before a datagram is queued; what it refuses is read at a bounded
    pace, and the kernel drops the rest of a flood. A driver sets it to its node's.
    """

    def __init__(self, endpoint: socket.socket, ask: Ask | None = None) -> None:
        self.screen: Screen | None = None
        self.unreached: Unreached | None = None
        self._resolver = Resolver(endpoint.family, self._send, self._tell, ask)
        self._endpoint = endpoint
        self._buffer = bytearray(MAX_READ_BYTES)
        self._inbox: asyncio.Queue[tuple[bytes, Hashable]] = asyncio.Queue(MAX_QUEUED_DATAGRAMS)
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._loop.add_reader(endpoint, self._read)

    @classmethod
    async def open(cls, host: str = "127.0.0.1", port: int = 0, *, ask: Ask | None = None) -> UdpTransport:
        """Bind a UDP socket; port 0 takes a free one. Raises `OSError` when it cannot be bound.

        `ask(host, port)` resolves names in threads; by default the system's resolver does.
        """
        family, kind, protocol, _, address = (
            await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        )[0]
        endpoint = socket.socket(family, kind, protocol)
        try:
            endpoint.setblocking(False)
            endpoint.bind(address)
        except OSError:
            endpoint.close()
            raise
        return cls(endpoint, ask)

    @property
    def address(self) -> tuple[str, int]:
        """The bound (host, port)."""
        host, port = self._endpoint.getsockname()[:2]
        return host, port

    async def send(self, address: Hashable, data: bytes) -> None:
        """Hand one datagram to the kernel, once the name in its address is resolved. Never waits for that.

        Raises `UsageError` for an address of another form, and `OSError` for a text that is no "host:port", or a name
        that is not resolved.
        """
        if not isinstance(address, (str, tuple)):
            raise UsageError(f"a UDP address is (host, port), not {address!r}")
        found = self._resolver.look_up(address, data)
        if found is not None:
            self._endpoint.sendto(data, found)

    def _send(self, address: SocketAddress, data: bytes) -> None:
        """Send what has waited for its name."""
        try:
            self._endpoint.sendto(data, address)
        except OSError as error:
            self._tell(address, str(error))

    def _tell(self, address: Hashable, reason: str) -> None:
        if self.unreached is not None:
            self.unreached(address, reason)

    async def receive(self) -> tuple[bytes, Hashable]:
        """Wait for a datagram."""
        return await self._inbox.get()

    async def close(self) -> None:
        """Close the socket."""
        self._resolver.close()
        if self._pause is not None:
            self._pause.cancel()
        if self._endpoint.fileno() >= 0:
            self._loop.remove_reader(self._endpoint)
            self._endpoint.close()

    def _read(self) -> None:
        """Read what is there, a few at once: what waits for a turn of the loop each costs that turn."""
        refused, view = 0, memoryview(self._buffer)
        for _ in range(READ_AT_ONCE):
            try:
                size, source = self._endpoint.recvfrom_into(self._buffer)
            except BlockingIOError:
                break
            except OSError:
                # ICMP "port unreachable" of a dead peer: liveness will find out by silence.
                continue
            data = bytes(view[:size])
            if self.screen is not None and not self.screen(data, source):
                refused += 1
            elif not self._inbox.full():
                self._inbox.put_nowait((data, source))
        if refused:
            self._loop.remove_reader(self._endpoint)
            pause_s = max(refused / MAX_REFUSED_PER_S, PAUSE_S)
            self._pause = self._loop.call_later(pause_s, self._loop.add_reader, self._endpoint, self._read)


class Driver:
    """Runs a node's gossip over a transport while its context is open.

    `on_event` is called for each node event, in the event loop; an error in it ends the driver. `clock` is any
    monotonic clock in seconds; give `driver.now()` to every call of the node.
    """

    def __init__(
        self,
        node: Node,
        transport: Transport,
        on_event: Callable[[NodeEvent], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.node = node
        self.transport = transport
        self.now = clock
        if hasattr(transport, "screen"):
            transport.screen = lambda data, source: node.screen(data, source, clock())
        if hasattr(transport, "unreached"):
            transport.unreached = self._unreached
        self._on_event = on_event
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def _unreached(self, address: Hashable, reason: str) -> None:
        """Count and tell that a name is not resolved."""
        self.node.journal.count("names_unresolved")
        self.node.journal.tell(AddressFailed(address, reason))
        self._wake.set()

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self._receive(), name=f"prefixroute-receive-{self.node.node}"),
            asyncio.create_task(self._beat(), name=f"prefixroute-beat-{self.node.node}"),
        ]
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def wake(self) -> None:
        """Look at the node's timers and outbox again, after a call that may have changed them."""
        self._wake.set()

    async def wait(self) -> None:
        """Wait until a task of the driver fails, and raise its error; return when the driver is closed."""
        if self._tasks:
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not task.cancelled():
                    task.result()

    async def leave(self) -> None:
        """Take the node's endpoints out, tell every peer so, and close."""
        if self._tasks:
            self.node.leave(self.now())
            await self._flush()
        await self.close()

    async def close(self) -> None:
        """Stop the driver and close its transport; what was not sent is dropped. Safe to repeat."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        await self.transport.close()
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def _receive(self) -> None:
        while True:
            data, source = await self.transport.receive()
            due_at = self.node.next_timer()
            self.node.receive_datagram(data, source, self.now())
            await self._flush()
            if self.node.next_timer() < due_at:
                # What came ended a quiet time: the next exchange is due earlier.
                self._wake.set()
            # Neither the queue nor the kernel makes this task wait while there are datagrams.
            await asyncio.sleep(0)

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            self.node.handle_timer(self.now())
            await self._flush()
            # No wait_for: before Python 3.12 it loses a cancellation that comes together with a wake.
            alarm = loop.call_later(max(self.node.next_timer() - self.now(), 0.0), self._wake.set)
            try:
                await self._wake.wait()
            finally:
                alarm.cancel()

    async def _flush(self) -> None:
        for address, data in self.node.datagrams_to_send(self.now()):
            try:
                await self.transport.send(address, data)
            except OSError:
                self.node.journal.count("send_errors")
        for event in self.node.events():
            if self._on_event is not None:
                self._on_event(event)
