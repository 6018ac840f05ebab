"""Whether an endpoint is believed: whether it answers, whether its hits come true, and whether it is in time.

| evidence | kept in | effect | ends with |
|---|---|---|---|
| forwards that fail | `Suspension` | only a trial is sent, after 1 s, 2 s ... 60 s | a trial that is served |
| predicted hits that are none | `Misses` | less of its digest is believed | hits, or time |
| first tokens that come late | `Lateness` | it is taken for slower than it says | tokens in time, or time |
| every count of cached tokens | `Accuracy` | none: it is for operators | |

An honest endpoint misses now and then, since its digest is a round old. One that misses again and again claims what it
does not hold, and is not to be asked twenty times before that is believed.

    weight of the n-th total miss in a row      1/10, 2/10, 4/10, 1/2, 1/2 ...
    weight of the n-th first token in a row     1/5, 1/5, 2/5, 3/5, 3/5 ...
        that came after twice what was told
    a miss is forgiven with time constant       one minute, doubled with each miss in a row, at most ten
    lateness fades with time constant           half a minute, doubled from the third late one in a row, at most four

Rules:
1. A streak ends with the first hit, or the first token in time. Without a streak the plain weights (0.1, 0.2) apply.
2. Forgiving needs no evidence, only time: an endpoint that is not asked cannot show that it is better.
3. Heartbeats do not end a suspension: a node that speaks may still not serve.
4. A prediction is compared only with the engine's own count, at the endpoint that served the request, and as finely as
   the engine can reuse blocks.
"""

from __future__ import annotations

from math import exp, inf
from typing import NamedTuple

MISSED = 0.1
"""A hit of less than this share of what was predicted is a total miss."""

LATE = 2.0
"""A first token after so many times what was told is late."""

LATE_S = 0.05
"""But no token is late by less than this, in seconds."""

MAX_DECLINES = 1
"""Prompts in a row that an endpoint may hand back though it would have been in time by its own word."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_MISS_WEIGHTS = (0.1, 0.2, 0.4, 0.5)
_LATE_WEIGHTS = (0.2, 0.2, 0.4, 0.6)
_FORGIVEN_S, _FORGIVEN_MOST_S = 60.0, 600.0
_FADES_S, _FADES_MOST = 30.0, 8.0


class Suspension:
    """Whether forwards to an endpoint are suspended because they fail; after a pause one trial is let through."""

    __slots__ = ("_failed_at", "_trial_at", "failures")

    def __init__(self) -> None:
        self._failed_at = self._trial_at = -inf
        self.failures = 0

    def blocks(self, now: float) -> bool:
        """Whether forwards must not go there now."""
        return self.failures > 0 and now < self._trial_at

    def sent(self, now: float) -> None:
        """Note that a forward goes out: while the endpoint is suspended that is the trial, and none follows it."""
        if self.failures:
            self._trial_at = now + self._pause_s()

    def failed(self, sent_at: float, now: float) -> bool:
        """Note that a forward failed or timed out; return whether that is news.

        When a node dies all forwards under way fail at once: one that was sent before the last failure is no news.
        """
        if self.failures and sent_at <= self._failed_at:
            return False
        self.failures += 1
        self._failed_at = now
        self._trial_at = now + self._pause_s()
        return True

    def served(self) -> bool:
        """Note a forward that was served; return whether that ended a suspension."""
        ended, self.failures = self.failures > 0, 0
        return ended

    def _pause_s(self) -> float:
        # An endpoint can fail for ever; beyond 2**60 there is nothing to double.
        return min(_FIRST_PAUSE_S * 2.0 ** min(self.failures - 1, 60), _LONGEST_PAUSE_S)


class Misses:
    """Total misses in a row of one endpoint."""

    __slots__ = ("_at", "in_row")

    def __init__(self) -> None:
        self.in_row = 0
        self._at = 0.0

    def weight(self, share: float, now: float) -> float:
        """Note that `share` of a predicted hit came true; return its weight in the trust."""
        self._at = now
        if share >= MISSED:
            self.in_row = 0
            return _MISS_WEIGHTS[0]
        self.in_row += 1
        return _MISS_WEIGHTS[min(self.in_row, len(_MISS_WEIGHTS)) - 1]

    def forgiven(self, trust: float, now: float) -> float:
        """Return what a trust has come back to since the last miss, or since this was last asked."""
        if not self.in_row or now <= self._at:
            return trust
        constant = min(_FORGIVEN_S * 2.0 ** min(self.in_row - 1, 10), _FORGIVEN_MOST_S)
        back = 1.0 - exp((self._at - now) / constant)
        self._at = now
        return trust + back * (1.0 - trust)


class Lateness:
    """First tokens in a row that came much later than told, and prompts in a row handed back though in time."""

    __slots__ = ("_at", "declines", "in_row", "late_s")

    def __init__(self) -> None:
        self.in_row = 0
        self.declines = 0
        self.late_s = 0.0
        """Seconds by which first tokens came later than told, smoothed; below 0: earlier."""
        self._at = 0.0

    def excess_s(self, now: float) -> float:
        """Return the seconds by which first tokens came later than told, lately; it fades, so a peer is tried again."""
        # Early ones weigh against late ones, but a peer is not taken for faster than it says.
        return self.late_s * exp((self._at - now) / self.fades_s) if self.late_s > 0 else 0.0

    def surprised(self, ttft_s: float, told_s: float, now: float) -> None:
        """Learn from a first token that came after `ttft_s` seconds and was told for `told_s`."""
        self.late_s = self.excess_s(now) or self.late_s
        self.late_s += self.weight(ttft_s, told_s) * (ttft_s - told_s - self.late_s)
        self._at = now

    def weight(self, ttft_s: float, told_s: float) -> float:
        """Note a first token that came after `ttft_s` seconds and was told for `told_s`; return its weight."""
        late = ttft_s > LATE * told_s and ttft_s > told_s + LATE_S
        self.in_row = self.in_row + 1 if late else 0
        return _LATE_WEIGHTS[min(max(self.in_row, 1), len(_LATE_WEIGHTS)) - 1]

    @property
    def fades_s(self) -> float:
        """Seconds in which a surprise fades to a third."""
        return _FADES_S * min(2.0 ** max(0, min(self.in_row, 10) - 2), _FADES_MOST)


class Accuracy(NamedTuple):
    """Requests by how their predicted hit compares with the cached tokens that the engine reported, and sums of both.

    Each is one of `exact`, `near` (off by one hit unit at most), `high` and `low` (predicted too much, too little).
    `most_over` is the largest over-estimate in tokens.
    """

    exact: int = 0
    near: int = 0
    high: int = 0
    low: int = 0
    predicted_tokens: int = 0
    cached_tokens: int = 0
    most_over: int = 0

    @property
    def compared(self) -> int:
        """Requests compared."""
        return self.exact + self.near + self.high + self.low

    def and_one(self, predicted: int, cached: int, unit: int) -> Accuracy:
        """Return this with one more request; all in tokens. O(1)."""
        over = predicted - cached
        return Accuracy(
            self.exact + (over == 0),
            self.near + (0 < abs(over) <= unit),
            self.high + (over > unit),
            self.low + (-over > unit),
            self.predicted_tokens + predicted,
            self.cached_tokens + cached,
            max(self.most_over, over),
        )
