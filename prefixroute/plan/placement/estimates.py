"""Estimates learnt while serving: delay and bandwidth of a link, the speed of a server, the rate of arrivals.

Rules:
1. Samples fade with time, not with the number of samples: a busy link is not forgotten sooner.
2. Unknown does not mean zero: an estimate begins with the plan's assumption, and is never below a floor.
3. The load has changed when a steady rate is very unlikely to give the counts of some window, short or long. So a large
   change is seen in seconds and a small one in minutes, and a steady load is hardly ever taken for a change.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from prefixroute.errors import UsageError

UNKNOWN_RTT_MS = 300.0
"""Milliseconds of round trip assumed for an unmeasured link: long, so that an unknown link is not preferred."""
LEAST_MS = 1e-3

WINDOWS_S = (5.0, 20.0, 80.0, 320.0)
DEVIATIONS = 4.0
"""Standard deviations of Poisson counts beyond which a rate has changed. Four windows are looked at with each arrival:
at three, a steady load would be taken for a new one every few minutes."""


class LinkFit(NamedTuple):
    """A link: milliseconds of a step before its first byte, and for each byte."""

    delay_ms: float
    ms_per_byte: float

    def ms(self, payload_bytes: float) -> float:
        """Return the milliseconds of a step with so many bytes."""
        return max(self.delay_ms + self.ms_per_byte * payload_bytes, LEAST_MS)


class LinkEstimate:
    """Delay and bandwidth of a link by least squares over fading samples (payload, time). O(1) a sample."""

    __slots__ = ("_at", "_fade_s", "_prior_weight", "_sums", "fit")

    def __init__(
        self, now: float, prior: LinkFit | None = None, fade_s: float = 60.0, prior_weight: float = 1.0
    ) -> None:
        self._fade_s = fade_s
        self._at = now
        # Sums of weight, x, x^2, y, x y. The prior becomes a sample with the first payload: it says nothing of the
        # bandwidth until payloads differ.
        self._sums = [0.0] * 5
        self._prior_weight = prior_weight
        self.fit = prior or LinkFit(UNKNOWN_RTT_MS, 0.0)

    def observe(self, payload_bytes: float, ms: float, now: float) -> None:
        """Learn from one step. Raises `UsageError` for a payload or a time below 0."""
        if not (payload_bytes >= 0 and ms >= 0 and math.isfinite(ms)):
            raise UsageError("a step of a link has a payload and a time of 0 or more")
        kept = math.exp(-max(now - self._at, 0.0) / self._fade_s)
        self._at = max(now, self._at)
        x, y = payload_bytes, ms
        if not self._sums[0]:
            w, expected = self._prior_weight, self.fit.ms(x)
            self._sums = [w, w * x, w * x * x, w * expected, w * x * expected]
        self._sums = [kept * old + new for old, new in zip(self._sums, (1.0, x, x * x, y, x * y), strict=True)]
        n, sx, sxx, sy, sxy = self._sums
        spread = sxx - sx * sx / n
        slope = self.fit.ms_per_byte
        # With equal payloads the bandwidth cannot be told from the delay: the bandwidth stays as it was.
        if spread > 1e-6 * sxx and sxx > 0:
            slope = max((sxy - sx * sy / n) / spread, 0.0)
        self.fit = LinkFit(max((sy - slope * sx) / n, 0.0), slope)


class Fading:
    """A mean of samples that fade with time."""

    __slots__ = ("_at", "_fade_s", "_weight", "value")

    def __init__(self, now: float, prior: float, fade_s: float = 60.0) -> None:
        self.value = prior
        self._weight, self._at, self._fade_s = 1.0, now, fade_s

    def observe(self, value: float, now: float) -> None:
        """Learn from one sample. Raises `UsageError` for one that is not above 0."""
        if not (value > 0 and math.isfinite(value)):
            raise UsageError(f"a measured time must be above 0, not {value}")
        self._weight = 1.0 + self._weight * math.exp(-max(now - self._at, 0.0) / self._fade_s)
        self._at = max(now, self._at)
        self.value += (value - self.value) / self._weight


class RateWatch:
    """Compares arrivals with the planned rate. An arrival costs O(1), a check O(arrivals in the windows)."""

    __slots__ = ("_begin", "_since", "_times", "planned_per_s")

    def __init__(self, planned_per_s: float, now: float) -> None:
        self.planned_per_s = planned_per_s
        self._since = self._begin = now
        self._times: deque[float] = deque()

    def arrived(self, now: float) -> None:
        """Count an arrival."""
        self._times.append(now)
        while self._times[0] < now - WINDOWS_S[-1]:
            self._times.popleft()

    def changed(self, now: float) -> float | None:
        """Return an estimate of the recent rate if the planned rate does not explain the arrivals, else None."""
        for window in WINDOWS_S:
            if now - self._since < window:
                break
            seen = self._count(now - window)
            expected = self.planned_per_s * window
            # At a low rate few arrivals are expected, and Poisson counts then have a longer tail than a normal one.
            room = DEVIATIONS * math.sqrt(expected) + DEVIATIONS
            if abs(seen - expected) > room:
                self._begin = now - window
                # A few arrivals that look unlikely overstate the rate; `refined` corrects it while more come.
                likely = seen - math.sqrt(seen) if seen > expected else seen
                return max(likely / window, 1.0 / WINDOWS_S[-1])
        return None

    def plan_for(self, rate_per_s: float, now: float) -> None:
        """Take a rate as planned from now on; earlier arrivals no longer count."""
        self.planned_per_s, self._since = rate_per_s, now

    def refined(self, now: float) -> float:
        """Return the rate since the last change began to show: more exact than the first estimate from few arrivals."""
        begin = max(self._begin, now - WINDOWS_S[-1])
        if now - begin < WINDOWS_S[0]:
            return self.planned_per_s
        return max(self._count(begin) / (now - begin), 1.0 / WINDOWS_S[-1])

    def _count(self, begin: float) -> int:
        count = 0
        for at in reversed(self._times):
            if at < begin:
                break
            count += 1
        return count
