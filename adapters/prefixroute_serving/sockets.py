"""The sockets of a sidecar: HTTP listener and gossip transport, and the error when an address is taken.

Rule: an address that cannot be used raises a `UsageError`, one line that names the address.
"""

from __future__ import annotations

import socket
from collections.abc import Hashable

from prefixroute.aio import Screen, Transport, UdpTransport, Unreached
from prefixroute.errors import UsageError

from .sidecar_config import HostPort


class CountingTransport:
    """A transport that counts what it sends."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.bytes_sent = 0
        self.datagrams_sent = 0

    @property
    def max_datagram(self) -> int | None:
        """The most bytes that the inner transport carries at once, None where it does not say."""
        return getattr(self._inner, "max_datagram", None)

    @property
    def screen(self) -> Screen | None:
        """The inner transport's test of a datagram before it is taken, None if it has none."""
        return getattr(self._inner, "screen", None)

    @screen.setter
    def screen(self, screen: Screen | None) -> None:
        if isinstance(self._inner, UdpTransport):
            self._inner.screen = screen

    @property
    def unreached(self) -> Unreached | None:
        """What the inner transport tells of a name that is not resolved, if it tells at all."""
        return getattr(self._inner, "unreached", None)

    @unreached.setter
    def unreached(self, unreached: Unreached | None) -> None:
        if isinstance(self._inner, UdpTransport):
            self._inner.unreached = unreached

    async def send(self, address: Hashable, data: bytes) -> None:
        """Send and count."""
        self.bytes_sent += len(data)
        self.datagrams_sent += 1
        await self._inner.send(address, data)

    async def receive(self) -> tuple[bytes, Hashable]:
        """The next datagram."""
        return await self._inner.receive()

    async def close(self) -> None:
        """Close the inner transport."""
        await self._inner.close()


async def open_gossip(address: HostPort) -> CountingTransport:
    """Return a counting UDP transport bound to `address`; UsageError when the address cannot be used."""
    try:
        return CountingTransport(await UdpTransport.open(*address.pair))
    except OSError as error:
        raise UsageError(f"cannot use udp {address.host}:{address.port}: {error.strerror}") from error


def open_listener(address: HostPort) -> socket.socket:
    """Return a TCP socket bound to `address`; UsageError when the address cannot be used."""
    # The protocol is named because asyncio turns off Nagle's delay only for such sockets.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address.pair)
    except OSError as error:
        listener.close()
        raise UsageError(f"cannot use tcp {address.host}:{address.port}: {error.strerror}") from error
    return listener
