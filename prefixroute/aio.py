"""The asyncio edge: runs a node over a transport of the caller's.

Rules:
1. A transport carries datagrams, may lose, repeat and reorder them, and never makes the node wait. A send that takes
   longer than `SEND_S` is cut off: gossip heals loss.
2. The event loop goes on between two datagrams, and between two slices of what a node has to do: no call into a node
   takes more than a few milliseconds, and they do not add up.
3. No error of the transport, of a callback or of the node ends the driver. It is counted (`send_errors`,
   `receive_errors`, `event_errors`, `node_errors`) and logged once a kind; what failed is tried again after a pause. A
   driver that ends all the same says so at ERROR, and in the count `driver_ended`.
4. Leaving the driver's context cancels its tasks and closes the transport; nothing goes on behind the caller's back.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeAlias

from typing_extensions import Self

from .errors import UsageError, expect
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

SEND_S = 1.0
"""Seconds after which a send is cut off: a round is a fifth of it, and what comes later than a second is no news."""

MOST_SENDS = 64
"""Sends to one address that are under way at once: the datagrams of a burst. Others are dropped and counted."""

RETRY_S, MOST_RETRY_S = 0.05, 5.0
"""Pause after an error of `receive` or of the node; it doubles from one to the other with each."""

MOST_TOLD = 64
"""Kinds of errors that are logged."""

ANY_DATAGRAM = 65536

_WHAT = {
    "send": "a send of the transport",
    "receive": "receiving from the transport",
    "event": "on_event",
    "node": "a call of the node",
}

log = logging.getLogger(__name__)

Screen: TypeAlias = Callable[[bytes, Hashable], bool]
Unreached: TypeAlias = Callable[[Hashable, str], None]


class Transport(Protocol):
    """What carries datagrams: UDP, HTTP, ZeroMQ, NATS or anything else the caller has.

    It may have an attribute `max_datagram`, the most bytes that it carries at once: the node then makes none larger. It
    is looked at before each sending, so it may change.
    """

    async def send(self, address: Hashable, data: bytes) -> None:
        """Send one datagram. Many are under way at once; any error is counted, and is a loss."""

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

    max_datagram = 65507
    """What fits a UDP datagram over IPv4."""

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
    """Runs a node's gossip over a transport while its context is open, in the thread of the event loop.

    `on_event` is called for each node event, in the event loop, and not awaited. `clock` is any monotonic clock in
    seconds; give `driver.now()` to every call of the node. Raises `UsageError` for a transport whose `max_datagram` is
    less than gossip needs, and for arguments that cannot be used.
    """

    def __init__(
        self,
        node: Node,
        transport: Transport,
        on_event: Callable[[NodeEvent], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        lacking = [name for name in ("send", "receive", "close") if not callable(getattr(transport, name, None))]
        if lacking or isinstance(transport, type):
            raise UsageError(f"a transport has send, receive and close, as UdpTransport has; not {transport!r:.60}")
        if on_event is not None and (not callable(on_event) or inspect.iscoroutinefunction(on_event)):
            raise UsageError(f"on_event must be a plain function of an event, which is not awaited, not {on_event!r}")
        if not callable(clock):
            raise UsageError(f"clock must be a function, as time.monotonic without brackets, not {clock!r}")
        self.node = expect(node, Node, "node")
        self.transport = transport
        self.now = clock
        if hasattr(transport, "screen"):
            transport.screen = self._screen
        if hasattr(transport, "unreached"):
            transport.unreached = self._unreached
        self._on_event = on_event
        self._most: int | None = None
        """What the transport carries at most, as it said last."""
        self._limit()
        self._wake = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._sends: dict[asyncio.Future[object], asyncio.TimerHandle] = {}
        """Sends under way, and when each is cut off."""
        self._waiting: Counter[Hashable] = Counter()
        """How many there are by address."""
        self._told: set[tuple[str, type]] = set()
        self._running = False

    def _unreached(self, address: Hashable, reason: str) -> None:
        """Count and tell that a name is not resolved."""
        self.node.journal.count("names_unresolved")
        self.node.journal.tell(AddressFailed(address, reason))
        self._wake.set()

    async def __aenter__(self) -> Self:
        self._loop, self._running = asyncio.get_running_loop(), True
        self.node.take_over()
        self._tasks = [
            asyncio.create_task(self._receive(), name=f"prefixroute-receive-{self.node.node}"),
            asyncio.create_task(self._beat(), name=f"prefixroute-beat-{self.node.node}"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._ended)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def wake(self) -> None:
        """Look at the node's timers and outbox again, after a call that may have changed them; from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake.set)

    async def wait(self) -> None:
        """Wait until a task of the driver ends, and raise its error; return when the driver is closed."""
        if self._tasks:
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not task.cancelled():
                    task.result()

    async def leave(self) -> None:
        """Take the node's endpoints out, tell every peer so, and close."""
        try:
            if self._tasks:
                self.node.leave(self.now())
                self._flush()
                if self._sends:
                    await asyncio.wait(self._sends, timeout=SEND_S)
        finally:
            await self.close()

    async def close(self) -> None:
        """Stop the driver and close its transport; what was not sent is dropped. Safe to repeat."""
        self._running = False
        tasks, self._tasks = self._tasks, []
        ending: list[asyncio.Future[Any]] = [*tasks, *self._sends]
        for task in ending:
            task.cancel()
        try:
            if ending:
                # A send that does not even end when it is cancelled is left to itself.
                await asyncio.wait(ending, timeout=SEND_S)
        finally:
            await self.transport.close()

    # --- what goes on --------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        pause_s = 0.0
        while True:
            try:
                data, source = await self.transport.receive()
                if not isinstance(data, (bytes, bytearray, memoryview)):
                    raise UsageError(f"receive must return (bytes, address), not {type(data).__name__} first")
            except BaseException as error:
                if _ends(error):
                    raise
                self._failed("receive", error)
                pause_s = min(max(2 * pause_s, RETRY_S), MOST_RETRY_S)
                await asyncio.sleep(pause_s)
                continue
            pause_s = 0.0
            try:
                due_at = self.node.next_timer()
                self.node.receive_datagram(data, source, self.now())
                sooner = self.node.next_timer() < due_at
            except Exception as error:
                sooner = False
                self._failed("node", error)
            self._flush()
            if sooner:
                # What came ended a quiet time: the next exchange is due earlier.
                self._wake.set()
            # Neither the queue nor the kernel makes this task wait while there are datagrams.
            await asyncio.sleep(0)

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        retry_s = 0.0
        while True:
            self._wake.clear()
            try:
                self.node.handle_timer(self.now())
                wait_s, retry_s = max(self.node.next_timer() - self.now(), 0.0), 0.0
            except Exception as error:
                self._failed("node", error)
                wait_s = retry_s = min(max(2 * retry_s, RETRY_S), MOST_RETRY_S)
            self._flush()
            # No wait_for: before Python 3.12 it loses a cancellation that comes together with a wake.
            alarm = loop.call_later(wait_s, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                alarm.cancel()

    def _flush(self) -> None:
        """Begin to send what there is to send, and tell what there is to tell."""
        try:
            self._limit()
            datagrams = self.node.datagrams_to_send(self.now())
            events = self.node.events()
        except Exception as error:
            self._failed("node", error)
            return
        for address, data in datagrams:
            self._send(address, data)
        for event in events if self._on_event is not None else ():
            try:
                self._on_event(event)  # type: ignore[misc]  # it is there
            except BaseException as error:
                if _ends(error):
                    raise
                self._failed("event", error)

    def _send(self, address: Hashable, data: bytes) -> None:
        """Begin a send, in a task of its own: of a peer to which all hang the others notice nothing."""
        if self._waiting[address] >= MOST_SENDS:
            self.node.journal.count("sends_dropped")
            return
        try:
            sending: object = self.transport.send(address, data)
            if not inspect.isawaitable(sending):
                return  # It was sent by a plain function.
            task: asyncio.Future[object] = asyncio.ensure_future(sending)
        except BaseException as error:
            if _ends(error):
                raise
            self._failed("send", error)
            return
        self._waiting[address] += 1
        self._sends[task] = asyncio.get_running_loop().call_later(SEND_S, self._cut_off, task)
        task.add_done_callback(lambda task: self._sent(task, address))

    def _cut_off(self, task: asyncio.Future[object]) -> None:
        # Its alarm is cancelled only here, so that `_sent` knows that it was told.
        self._sends[task].cancel()
        self._failed("send", TimeoutError(f"a send took longer than {SEND_S:g} s and was cut off"))
        task.cancel()

    def _sent(self, task: asyncio.Future[object], address: Hashable) -> None:
        alarm = self._sends.pop(task)
        self._waiting[address] -= 1
        if not self._waiting[address]:
            del self._waiting[address]
        over = alarm.cancelled()
        alarm.cancel()
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None and self._running and not over:
            self._failed("send", error)

    def _screen(self, data: bytes, source: Hashable) -> bool:
        try:
            return self.node.screen(data, source, self.now())
        except Exception as error:
            self._failed("node", error)
            return False

    def _limit(self) -> None:
        """Take it that the transport carries no more in a datagram than it now says."""
        most: int | None = getattr(self.transport, "max_datagram", None)
        if most != self._most:
            self._most = most
            self.node.limit_datagrams(ANY_DATAGRAM if most is None else most)

    # --- what fails ----------------------------------------------------------------------------------------

    def _failed(self, what: str, error: BaseException) -> None:
        """Count an error; log the first of its kind."""
        self.node.journal.count(f"{what}_errors")
        if (what, type(error)) not in self._told and len(self._told) < MOST_TOLD:
            self._told.add((what, type(error)))
            text = "node %s: %s fails with %r; from now on that is only counted (%s_errors), and gossip goes on"
            log.warning(text, self.node.node, _WHAT[what], error, what, exc_info=error)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A task of the driver is over; unless it was closed, nobody else would notice."""
        error = None if task.cancelled() else task.exception()
        if self._running:
            self._running = False
            self.node.journal.count("driver_ended")
            why = "it was cancelled from outside" if error is None else repr(error)
            text = "node %s: its driver has ended (%s): it gossips no more, and routes by an ever older view"
            log.error(text, self.node.node, why)


def _ends(error: BaseException) -> bool:
    """Whether an error ends what runs: the program or the task is to end. Others are of who was called."""
    if isinstance(error, asyncio.CancelledError):
        # A library's own, as of a future it gave up, looks the same before Python 3.11.
        cancelling = getattr(asyncio.current_task(), "cancelling", None)
        return cancelling is None or cancelling() > 0
    return isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit))
