"""What this node has booked at an endpoint, and how often requests come to it: read by every decision.

Rules:
1. A request is booked when it is decided, not when it is seen in a report: N routers otherwise pick the same best
   endpoint within one gossip round (Dynamo #589, SMG #1714).
2. A booking ends with the first token, the outcome, or time, whichever is first.
"""

from __future__ import annotations

from math import exp
from typing import NamedTuple

ARRIVALS_S = 30.0
"""Time in which an arrival is worth a third: some tens of requests at a busy endpoint, and soon over after a rush."""


class _Booking(NamedTuple):
    work_s: float
    tokens: int
    expires_at: float


class Ledger:
    """Work that this node booked on one endpoint and that has not reached its first token: a queue drained at rate 1.

    Bookings are released by an outcome or the first token, and expire, so that a lost outcome does no lasting harm.
    Bounded by the number of requests in flight. `wait_s` and `tokens` are O(1) amortised.
    """

    __slots__ = ("_head_at", "_tokens", "_work_s", "open")

    def __init__(self) -> None:
        self.open: dict[int, _Booking] = {}
        """What is booked, by ticket, the oldest first. To be read only."""
        self._work_s = 0.0
        self._tokens = 0
        self._head_at = 0.0

    def __len__(self) -> int:
        return len(self.open)

    @property
    def tokens(self) -> int:
        """Uncached tokens booked and not released."""
        return self._tokens

    def book(self, ticket: int, work_s: float, tokens: int, now: float, expires_at: float) -> None:
        """Book a request under its decision's id."""
        if not self.open:
            self._head_at = now
        elif ticket in self.open:
            self.release(ticket, now)
        self.open[ticket] = tuple.__new__(_Booking, (work_s, tokens, expires_at))
        self._work_s += work_s
        self._tokens += tokens

    def release(self, ticket: int, now: float) -> bool:
        """Take a booking back; unknown and repeated tickets are harmless."""
        if ticket not in self.open:
            return False
        if ticket == next(iter(self.open)):
            # Prefill is serial: the one that ends hands over to the next. One that leaves from behind changes nothing.
            self._head_at = now
        booking = self.open.pop(ticket)
        self._work_s = self._work_s - booking.work_s if self.open else 0.0
        self._tokens -= booking.tokens
        return True

    def wait_s(self, now: float) -> float:
        """Seconds until the endpoint is through with what is booked, the oldest one's progress counted."""
        while self.open:
            first = next(iter(self.open))
            head = self.open[first]
            if now < head.expires_at:
                return max(0.0, self._work_s - min(max(now - self._head_at, 0.0), head.work_s))
            self.release(first, now)
        return 0.0


class ArrivalRate:
    """Requests a second, lately: each counts less by the time since, to a third after `ARRIVALS_S`. O(1)."""

    __slots__ = ("_at", "_count")

    def __init__(self) -> None:
        self._count = 0.0
        self._at = 0.0

    def arrived(self, now: float) -> None:
        """Count a request."""
        self._count = self._left(now) + 1
        self._at = now

    def per_s(self, now: float) -> float:
        """Return the rate. It is too low for the first `ARRIVALS_S`."""
        return self._left(now) / ARRIVALS_S

    def _left(self, now: float) -> float:
        return self._count * exp((self._at - now) / ARRIVALS_S) if self._count else 0.0
