"""What waits at an endpoint, how often requests come, and how fast they are prefilled.

| | knows | counts as wait |
|---|---|---|
| `Ledger` | what this node booked at an endpoint | all of it, less the progress of the oldest |
| `Queue` | what a peer reported, and what was sent there since | what of it is left when a forward arrives |
| `ArrivalRate` | when requests came to an endpoint of this node's own | nothing: it tells how many a prefill delays |
| `RateEstimate` | what outcomes show of this node's own engines | nothing: it makes seconds of tokens |

Rules:
1. A request is booked when it is decided, not when it is seen in a report: N routers otherwise pick the same best
   endpoint within one gossip round (Dynamo #589, SMG #1714).
2. A booking ends with the first token, the outcome, or time, whichever is first: a lost outcome does no lasting harm.
3. Work is in seconds of prefill at the endpoint, and a queue drains one second of it a second.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from math import exp
from typing import NamedTuple

from ..load import LoadReport

ARRIVALS_S = 30.0
"""Time in which an arrival is worth a third: some tens of requests at a busy endpoint, and soon over after a rush."""

SAMPLES = 32
"""Outcomes that an estimate looks back on."""

LEAST_SAMPLES = 4
"""Below so many an estimate says nothing."""


class Ledger:
    """Work that this node booked on one endpoint. O(requests in flight); `wait_s` is O(1) amortised."""

    __slots__ = ("_head_at", "_work_s", "open")

    def __init__(self) -> None:
        self.open: dict[int, tuple[float, float]] = {}
        """Seconds of work, and when they expire, by ticket, the oldest first. To be read only."""
        self._work_s = self._head_at = 0.0

    def __len__(self) -> int:
        return len(self.open)

    def book(self, ticket: int, work_s: float, now: float, expires_at: float) -> None:
        """Book a request under its decision's id. A ticket that is booked already is booked anew."""
        if not self.open:
            self._head_at = now
        elif ticket in self.open:
            self.release(ticket, now)
        self.open[ticket] = (work_s, expires_at)
        self._work_s += work_s

    def release(self, ticket: int, now: float) -> bool:
        """Take a booking back; return whether there was one."""
        if ticket not in self.open:
            return False
        if ticket == next(iter(self.open)):
            # Prefill is serial: the one that ends hands over to the next. One that leaves from behind changes nothing.
            self._head_at = now
        work_s, _ = self.open.pop(ticket)
        self._work_s = self._work_s - work_s if self.open else 0.0
        return True

    def wait_s(self, now: float) -> float:
        """Seconds until the endpoint is through with what is booked, the oldest one's progress counted."""
        while self.open:
            first = next(iter(self.open))
            work_s, expires_at = self.open[first]
            if now < expires_at:
                done = now - self._head_at
                done = 0.0 if done < 0 else done if done < work_s else work_s
                return self._work_s - done if done < self._work_s else 0.0
            self.release(first, now)
        return 0.0

    def _check(self) -> None:
        """Assert that the sum of the work is that of the bookings. O(bookings)."""
        assert abs(self._work_s - sum(work_s for work_s, _ in self.open.values())) < 1e-6
        assert self.open or self._work_s == 0.0


class Send(NamedTuple):
    """Work that joins a peer's queue: a forward of this node's, and what the other origins can be expected to send."""

    arrives_at: float
    work_s: float


class Queue:
    """A peer's queue. A forward counts until its first token, unless a report later than its arrival counts it."""

    __slots__ = ("_at", "_counted", "_work_s", "reported_at", "reported_s", "sends")

    def __init__(self) -> None:
        self.reported_s = self.reported_at = 0.0
        """The queue by the freshest report, and when that was so."""
        self.sends: dict[int, Send] = {}
        """Forwards without a first token, by decision."""
        self._work_s = self._at = 0.0
        """The queue was `_work_s` long at this moment, the arrival of the last forward that joined it."""
        self._counted = False
        """Whether both are up to date."""

    def told(self, work_s: float, at: float) -> None:
        """Take a report: the queue was `work_s` long at the moment `at`. O(1)."""
        self.reported_s, self.reported_at, self._counted = work_s, at, False

    def sent(self, ticket: int, send: Send) -> None:
        """Note a forward that joins the queue. O(1)."""
        if self._counted and ticket not in self.sends:
            self._join(send)
        else:
            self._counted = False
        self.sends[ticket] = send

    def unsent(self, ticket: int) -> None:
        """Take a forward out: its first token is here, or will never be. An unknown one is harmless."""
        if self.sends.pop(ticket, None) is not None:
            self._counted = False

    def left_s(self, at: float) -> float:
        """Return how long the queue is at a moment. O(1); O(forwards under way) after a report or a first token."""
        if not self._counted:
            self._work_s, self._at, self._counted = self.reported_s, self.reported_at, True
            for send in self.sends.values():
                self._join(send)
        left, since = self._work_s, at - self._at
        if left and since > 0:
            return left - since if since < left else 0.0
        return left

    def _join(self, send: Send) -> None:
        if send.arrives_at > self.reported_at:
            drained = send.arrives_at - self._at
            if drained > 0:
                self._work_s = self._work_s - drained if drained < self._work_s else 0.0
                self._at = send.arrives_at
            self._work_s += send.work_s


class ArrivalRate:
    """Requests a second, lately: each counts less by the time since, to a third after `ARRIVALS_S`. O(1)."""

    __slots__ = ("_at", "_count")

    def __init__(self) -> None:
        self._count = self._at = 0.0

    def arrived(self, now: float) -> None:
        """Count a request."""
        self._count = self._count * exp((self._at - now) / ARRIVALS_S) + 1 if self._count else 1.0
        self._at = now

    def per_s(self, now: float) -> float:
        """Return the rate. It is too low for the first `ARRIVALS_S`."""
        return self._count * exp((self._at - now) / ARRIVALS_S) / ARRIVALS_S if self._count else 0.0


class RateEstimate:
    """Prefill rate and fixed time of an endpoint, from outcomes. Both err on purpose towards a low cost of prefill.

    Overrating the cost of prefill makes forwards look better than they are: twice too high costs up to 13 % against
    not routing in the rule's model, half costs 0.3 %. So the rate is the upper quartile of the last 32 samples, and the
    fixed time the lower one. Engines that share a core look slower by chance, and who looks slow is not asked again.
    """

    __slots__ = ("_rates", "_rest")

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=SAMPLES)
        self._rest: deque[float] = deque(maxlen=SAMPLES)

    def add(self, uncached_tokens: int, ttft_s: float, queued: bool) -> None:
        """Take one served request; those that waited for others say nothing about the rate."""
        if queued or ttft_s <= 0:
            return
        if uncached_tokens < 64:
            self._rest.append(ttft_s)
        elif uncached_tokens >= 256:
            spent = ttft_s - min(self.overhead_s, 0.5 * ttft_s)
            self._rates.append(uncached_tokens / spent)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Upper quartile of the observed rates; 0.0 before four samples."""
        return _quartile(self._rates, 3)

    @property
    def overhead_s(self) -> float:
        """Lower quartile of the time to first token of nearly cached requests; 0.0 before four samples."""
        return _quartile(self._rest, 1)

    def corrected(self, report: LoadReport) -> LoadReport:
        """Return `report` with the rate and fixed time that outcomes show, once they do: a setting is but a guess."""
        rate, overhead = self.prefill_tokens_per_s, self.overhead_s
        if not rate and not overhead:
            return report
        return replace(
            report, prefill_tokens_per_s=rate or report.prefill_tokens_per_s, overhead_s=overhead or report.overhead_s
        )


def _quartile(samples: deque[float], which: int) -> float:
    return sorted(samples)[(len(samples) - 1) * which // 4] if len(samples) >= LEAST_SAMPLES else 0.0
