"""How fast a node stops believing an endpoint, and how it forgives: misses in a row weigh more than misses by chance.

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
"""

from __future__ import annotations

from math import exp

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
