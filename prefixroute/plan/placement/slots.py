"""The reservation ledger: which cache slots of which server are taken until when, and how long a new session waits.

Rules:
1. A session takes its slots from the moment of booking to its end, even while it waits for them: a later session waits
   for the earlier ones, and no server ever runs more sessions than it has slots for.
2. Ends are expectations. A session that is over is released; a late session keeps its slots until it is over.
3. Times are seconds of the caller's clock; only differences matter.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prefixroute.errors import UsageError

from .chains import Hop

RETRY_CAP_S = 60.0
"""The longest pause in seconds: clients that find no slot ask again after 1, 2, 4, ... seconds, at most this many."""


class Booking(NamedTuple):
    """The slots that a session took, and from when until when, in seconds."""

    session: int
    hops: tuple[Hop, ...]
    start_s: float
    end_s: float


@dataclass(slots=True)
class _ServerSlots:
    slots: int
    taken: int
    ends: list[tuple[float, int, int]]
    """(end in seconds, session, slots), soonest first."""


class Ledger:
    """Slots by server. Booking and asking cost O(sessions of a server) at worst, and O(1) while slots are free."""

    __slots__ = ("_booked", "_next", "_servers", "free")

    def __init__(self, slots: Sequence[int]) -> None:
        if any(each < 0 for each in slots):
            raise UsageError("a server has 0 slots or more")
        self._servers = [_ServerSlots(each, 0, []) for each in slots]
        self._booked: dict[int, Booking] = {}
        self._next = 0
        self.free = list(slots)
        """Slots not booked, by server; below zero where sessions wait. Read only."""

    def add_server(self, slots: int = 0) -> int:
        """Add a server; return its number."""
        self._servers.append(_ServerSlots(0, 0, []))
        self.free.append(0)
        self.set_slots(len(self._servers) - 1, slots)
        return len(self._servers) - 1

    def set_slots(self, server: int, slots: int) -> None:
        """Set how many slots a server has now; booked slots stay booked. Raises `UsageError` below 0."""
        if slots < 0:
            raise UsageError("a server has 0 slots or more")
        mine = self._servers[server]
        mine.slots = slots
        self.free[server] = slots - mine.taken

    def __len__(self) -> int:
        """Sessions that hold slots or wait for them."""
        return len(self._booked)

    def sessions(self, server: int) -> int:
        """Return how many sessions are booked on a server."""
        return len(self._servers[server].ends)

    def wait_s(self, server: int, slots: int, now: float) -> float:
        """Return the seconds until so many slots are free, if sessions end as expected; infinite if never."""
        mine = self._servers[server]
        if slots > mine.slots:
            return math.inf
        missing = slots - self.free[server]
        if missing <= 0:
            return 0.0
        for end, _, held in mine.ends:
            missing -= held
            if missing <= 0:
                return max(end - now, 0.0)
        return math.inf

    def book(self, hops: Sequence[Hop], start_s: float, end_s: float) -> Booking:
        """Take the slots of a chain. Raises `UsageError` when a server never has so many."""
        for hop in hops:
            if hop.blocks > self._servers[hop.server].slots:
                raise UsageError(f"server {hop.server} has {self._servers[hop.server].slots} slots, not {hop.blocks}")
        booking = Booking(self._next, tuple(hops), start_s, end_s)
        self._next += 1
        self._booked[booking.session] = booking
        for hop in booking.hops:
            mine = self._servers[hop.server]
            bisect.insort(mine.ends, (end_s, booking.session, hop.blocks))
            mine.taken += hop.blocks
            self.free[hop.server] -= hop.blocks
        return booking

    def release(self, booking: Booking) -> None:
        """Give the slots of a session back; a second call for the same booking is harmless."""
        if self._booked.pop(booking.session, None) is None:
            return
        for hop in booking.hops:
            mine = self._servers[hop.server]
            mine.ends.remove((booking.end_s, booking.session, hop.blocks))
            mine.taken -= hop.blocks
            self.free[hop.server] += hop.blocks

    def expire(self, now: float) -> int:
        """Release every session whose expected end has come, and return how many; only for callers with exact ends."""
        over = {session for mine in self._servers for session in _ended(mine.ends, now)}
        for session in over:
            self.release(self._booked[session])
        return len(over)

    def running(self, server: int, now: float) -> int:
        """Return the slots of a server that running sessions hold: they have begun and not ended."""
        ends = self._servers[server].ends
        return sum(held for end, session, held in ends if end > now and self._booked[session].start_s <= now)

    def bookings(self) -> Iterable[Booking]:
        """Return what is booked, in the order of booking."""
        return self._booked.values()

    def _check(self) -> None:
        """Assert that every sum agrees with the bookings. O(all bookings)."""
        for j, mine in enumerate(self._servers):
            held = [hop.blocks for booking in self._booked.values() for hop in booking.hops if hop.server == j]
            assert sorted(blocks for _, _, blocks in mine.ends) == sorted(held), j
            assert mine.taken == sum(held), j
            assert self.free[j] == mine.slots - mine.taken, j
            assert mine.ends == sorted(mine.ends), j


def _ended(ends: Sequence[tuple[float, int, int]], now: float) -> Iterable[int]:
    for end, session, _ in ends:
        if end > now:
            return
        yield session


def retry_wait_s(wait_s: float) -> float:
    """Return when a client that asks on a doubling schedule finds slots that become free after `wait_s`, in seconds.

    It asks at once, then after 1, 3, 7, 15, 31, 63, 123, 183 ... seconds.

    >>> [retry_wait_s(wait) for wait in (0, 0.4, 1, 1.5, 8, 62, 64)]
    [0.0, 1.0, 1.0, 3.0, 15.0, 63.0, 123.0]
    """
    if wait_s == math.inf:
        return wait_s
    asked, pause = 0.0, 1.0
    while asked < wait_s:
        asked += pause
        pause = min(2 * pause, RETRY_CAP_S)
    return asked
