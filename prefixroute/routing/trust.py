"""Whether an endpoint is believed: its misses, late first tokens and failures, and how well its hits are predicted.

Misses in a row weigh more than misses by chance, and time forgives.

An honest endpoint misses now and then, since its digest is a round old: one miss weighs a tenth. Who misses again and
again claims what it does not hold, and is not to be asked twenty times before that is believed.

    weight of the n-th total miss in a row      1/10, 2/10, 4/10, 1/2, 1/2 ...
    weight of the n-th first token in a row     1/5, 1/5, 2/5, 3/5, 3/5 ...
        that came after twice what was told
    a doubt is forgiven with time constant      one minute, doubled with each miss in a row, at most ten
    a surprise fades with time constant         half a minute, doubled from the third late one in a row, at most four

Rules:
1. A streak ends with the first hit, or the first token in time. Without one everything is as if this were not here.
2. Forgiving needs no evidence, only time: who is not asked cannot show that it is better.
3. Of predictions only the engine's own count of a served request is compared, with what was predicted of the endpoint
   that served it. One unit of what the engine can reuse is their grain: a difference of no more is *near*.
"""

from __future__ import annotations

from math import exp
from typing import NamedTuple

MISSED = 0.1
"""A hit of less than this share of what was predicted is a total miss."""


LATE = 2.0
"""A first token after so many times what was told is late."""


LATE_S = 0.05
"""But no token is late by less than this."""


MAX_DECLINES = 1
"""In a row, though by its own word of the same moment the endpoint would have been in time; the next one suspends."""


_MISS_WEIGHTS = (0.1, 0.2, 0.4, 0.5)


_LATE_WEIGHTS = (0.2, 0.2, 0.4, 0.6)


_FORGIVEN_S, _FORGIVEN_MOST_S = 60.0, 600.0


_FADES_S, _FADES_MOST = 30.0, 8.0


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
        """Return what a trust has come back to since it was last asked for."""
        if not self.in_row or now <= self._at:
            return trust
        constant = min(_FORGIVEN_S * 2.0 ** min(self.in_row - 1, 10), _FORGIVEN_MOST_S)
        back = 1.0 - exp((self._at - now) / constant)
        self._at = now
        return trust + back * (1.0 - trust)


class Lateness:
    """First tokens in a row that came much later than told, and prompts handed back that were in time by the same."""

    __slots__ = ("declines", "in_row")

    def __init__(self) -> None:
        self.in_row = 0
        self.declines = 0

    def weight(self, ttft_s: float, told_s: float) -> float:
        """Note a first token; return its weight in the surprise."""
        late = ttft_s > LATE * told_s and ttft_s > told_s + LATE_S
        self.in_row = self.in_row + 1 if late else 0
        return _LATE_WEIGHTS[min(max(self.in_row, 1), len(_LATE_WEIGHTS)) - 1]

    @property
    def fades_s(self) -> float:
        """The time in which a surprise is worth a third."""
        return _FADES_S * min(2.0 ** max(0, min(self.in_row, 10) - 2), _FADES_MOST)


class Accuracy(NamedTuple):
    """Requests by how their predicted hit compares with the cached tokens that the engine reported, and sums of both.

    Each request is one of `exact`, `near` (off by at most one hit unit), `high` and `low` (predicted too much, too
    little, by more than that). `most_over` is the largest over-estimate in tokens.
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


class Suspension:
    """Whether forwards to an endpoint are suspended because they fail. Heartbeats do not lift it.

    The first failure suspends for `first_s`, each further one doubles that up to `most_s`; when the pause is over one
    trial is let through, and its success ends the suspension.
    """

    __slots__ = ("_failed_at", "_first_s", "_most_s", "_trial_at", "failures")

    def __init__(self, first_s: float = 1.0, most_s: float = 60.0) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._failed_at = float("-inf")
        self._trial_at = float("-inf")
        self.failures = 0

    def blocks(self, now: float) -> bool:
        """Whether forwards must not go there now."""
        return self.failures > 0 and now < self._trial_at

    def sent(self, now: float) -> None:
        """Note that a forward goes out: while the endpoint is suspended it is the trial, and no second one follows."""
        if self.failures:
            self._trial_at = now + self._pause_s()

    def failed(self, sent_at: float, now: float) -> bool:
        """Note a forward, sent at `sent_at`, that failed or timed out; return whether that is news.

        When a node dies all that is under way fails at once: what was sent before the last failure says nothing new.
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
        return min(self._first_s * 2.0 ** min(self.failures - 1, 60), self._most_s)
