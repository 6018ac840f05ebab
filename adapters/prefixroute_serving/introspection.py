"""A sidecar's answers to `prefixroute doctor`: its domain, its clock, and which datagrams reach its peers over UDP.

Rules:
1. The secret never leaves the node. `check` answers a challenge with a keyed hash: equal answers mean equal secrets.
2. A probe datagram carries a tag under a secret of the domain. A probe without a valid tag gets no echo, and no echo is
   longer than its probe.
3. Probes go from gossip socket to gossip socket, so that the path is the one that gossip takes.
"""

from __future__ import annotations

import asyncio
import platform
import secrets
import time
from collections.abc import Callable, Hashable, Sequence
from hashlib import blake2b
from hmac import compare_digest
from typing import Any, Final, NamedTuple

from prefixroute import Domain, __version__
from prefixroute.aio import Screen, Transport, Unreached
from prefixroute.errors import UsageError

MAGIC: Final = b"prefixroute echo"
MIN_BYTES: Final = 64
"""Bytes of the smallest probe datagram."""
MAX_BYTES: Final = 9000
MAX_COUNT: Final = 100
MAX_CHALLENGE: Final = 64

_ASK, _ANSWER = b"?", b"!"
_NONCE: Final = 8
_TAG: Final = 16
_BURST: Final = 4  # probes in flight: loss is to be the path's, not that of a full socket buffer


class Echoed(NamedTuple):
    """Probe datagrams of `bytes` bytes: how many were sent, and how many came back within the patience."""

    bytes: int
    sent: int
    answered: int


class WallClock:
    """Notices steps of the wall clock since this object was made, by comparison with the monotonic clock."""

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic) -> None:
        self._wall, self._steady = wall, steady
        self._offset = wall() - steady()

    @property
    def stepped_s(self) -> float:
        """Seconds by which the wall clock was set, or the machine slept; around 0 on a healthy machine."""
        return self._wall() - self._steady() - self._offset


def describe(domain: Domain, challenge: str, clock: WallClock, keys: Sequence[bytes] = ()) -> dict[str, Any]:
    """Return a node's description of itself. UsageError for a challenge that is no hex text of reasonable length."""
    return {
        "version": __version__,
        "python": platform.python_version(),
        "domain": readable(domain),
        "check": check(domain.secret, challenge),
        "accepts": [check(secret, challenge) for secret in keys or (domain.secret,)],
        "clock_stepped_s": clock.stepped_s,
    }


def readable(domain: Domain) -> dict[str, str]:
    """The fields of a domain, without the secret."""
    return {name: value for name, value in domain.fields().items() if name != "secret"}


def check(secret: bytes, challenge: str) -> str:
    """The answer to a challenge, in hex, under a secret. UsageError for a challenge that cannot be read."""
    try:
        asked = bytes.fromhex(challenge)
    except ValueError:
        asked = b""
    if not 0 < len(asked) <= MAX_CHALLENGE:
        raise UsageError(f"challenge must be the hex text of 1 to {MAX_CHALLENGE} bytes")
    return blake2b(asked, key=secret, digest_size=_TAG, person=b"doctor challenge").hexdigest()


class Echo:
    """A transport that answers probe datagrams by itself and passes everything else on."""

    def __init__(self, inner: Transport, keys: Sequence[bytes]) -> None:
        self._inner = inner
        self.secrets = tuple(keys)
        """Probes are sent under the first secret, and echoed under the secret with which they came."""
        self._waiting: dict[bytes, asyncio.Future[None]] = {}

    @property
    def max_datagram(self) -> int | None:
        """The most bytes that the inner transport carries at once, None where it does not say."""
        return getattr(self._inner, "max_datagram", None)

    @property
    def screen(self) -> Screen | None:
        """The inner transport's test of a datagram before it is taken, None if it has none."""
        return getattr(self._inner, "screen", None)

    @screen.setter
    def screen(self, screen: Screen) -> None:
        if hasattr(self._inner, "screen"):
            self._inner.screen = lambda data, source: (
                self._asked_with(data) is not None if data.startswith(MAGIC) else screen(data, source)
            )

    @property
    def unreached(self) -> Unreached | None:
        """What the inner transport tells of a name that is not resolved, if it tells at all."""
        return getattr(self._inner, "unreached", None)

    @unreached.setter
    def unreached(self, unreached: Unreached) -> None:
        if hasattr(self._inner, "unreached"):
            self._inner.unreached = unreached

    async def send(self, address: Hashable, data: bytes) -> None:
        """Send one datagram."""
        await self._inner.send(address, data)

    async def receive(self) -> tuple[bytes, Hashable]:
        """The next datagram that is no probe."""
        while True:
            data, source = await self._inner.receive()
            if not data.startswith(MAGIC):
                return data, source
            await self._take(data, source)
            # With a full inbox `receive` never waits, and probes must not hold the event loop.
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Close the inner transport."""
        await self._inner.close()

    async def probe(self, address: Hashable, size: int, count: int, patience_s: float) -> Echoed:
        """Send `count` datagrams of `size` bytes to a peer's gossip address and count the echoes.

        `patience_s` is how long an echo may take. UsageError for figures out of range.
        """
        if not (MIN_BYTES <= size <= MAX_BYTES and 0 < count <= MAX_COUNT and 0 < patience_s <= 10):
            raise UsageError(
                f"pass bytes of {MIN_BYTES} to {MAX_BYTES}, count of 1 to {MAX_COUNT}, patience up to 10 s"
            )
        in_flight = asyncio.Semaphore(_BURST)
        answers = await asyncio.gather(*(self._one(address, size, patience_s, in_flight) for _ in range(count)))
        return Echoed(size, count, sum(answers))

    async def _one(self, address: Hashable, size: int, patience_s: float, in_flight: asyncio.Semaphore) -> bool:
        async with in_flight:
            nonce = secrets.token_bytes(_NONCE)
            answer = self._waiting[nonce] = asyncio.get_running_loop().create_future()
            try:
                await self._inner.send(address, _sealed(self.secrets[0], _ASK, nonce, size))
                # Not wait_for: before Python 3.12 it may swallow a cancellation.
                await asyncio.wait((answer,), timeout=patience_s)
                return answer.done()
            except OSError:  # the datagram is too long for the interface, or the address has no listener
                return False
            finally:
                del self._waiting[nonce]
                answer.cancel()

    def _asked_with(self, data: bytes) -> bytes | None:
        """Return the secret that sealed a probe, None if none of this node's secrets did."""
        if not MIN_BYTES <= len(data) <= MAX_BYTES:
            return None
        start = len(MAGIC)
        kind, nonce = data[start : start + 1], data[start + 1 : start + 1 + _NONCE]
        seals = ((secret, _sealed(secret, kind, nonce, len(data))) for secret in self.secrets)
        return next((secret for secret, sealed in seals if compare_digest(data, sealed)), None)

    async def _take(self, data: bytes, source: Hashable) -> None:
        start = len(MAGIC)
        kind, nonce = data[start : start + 1], data[start + 1 : start + 1 + _NONCE]
        asked_with = self._asked_with(data)
        if asked_with is None:
            return
        if kind == _ASK:
            try:
                await self._inner.send(source, _sealed(asked_with, _ANSWER, nonce, len(data)))
            except OSError:
                return
        elif (waiting := self._waiting.get(nonce)) is not None and not waiting.done():
            waiting.set_result(None)


def _sealed(secret: bytes, kind: bytes, nonce: bytes, size: int) -> bytes:
    body = (MAGIC + kind + nonce).ljust(size - _TAG, b"\0")
    return body + blake2b(body, key=secret, digest_size=_TAG, person=b"doctor echo").digest()
