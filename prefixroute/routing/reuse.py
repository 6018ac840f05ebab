"""What an engine reuses of what it holds, learnt from its own counts of cached tokens.

An answer is a point (held, cached): so many tokens of the prompt were known to be held, so many did the engine reuse.
Below them lies what to count on:

    cached = held, in whole units, less a drop          nothing where that is no more than `floor`

| learnt | from | why it is so |
|---|---|---|
| `drop` | what lacked in most of the last `WINDOW` answers, else the least | a drafter has the last unit computed |
| `unit` | the greatest common divisor of three counts, where it evens the drop out | hybrid models: thousands |
| `floor` | `NOTHING` answers in a row of nothing: the most held for one of them | a larger unit, or no reuse at all |

Rules:
1. Only answers that read the cache are points. One point moves nothing: between a decision and its prefill blocks come
   and go.
2. A count of nothing teaches no drop, only the floor. The first hit takes the floor away, so does time: an endpoint
   that is not asked cannot show that it is better.
3. A new life of the engine forgets it all.
"""

from __future__ import annotations

from collections import deque
from math import exp, gcd

from .trust import MISSED

WINDOW = 8
"""Answers that are looked back on."""

NOTHING = 24
"""Answers in a row without a hit after which an engine is taken to reuse nothing of what it holds. So many that a few
requests that read no cache, which nobody recognised as such, do not come to it."""

FORGIVEN_S = 600.0
"""Time constant in which that is forgiven, in seconds."""


class Reuse:
    """What one endpoint's engine reuses. All sizes are in tokens."""

    __slots__ = ("_at", "_most", "_points", "_whole", "drop", "floor", "in_row", "unit")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget everything: the engine began anew."""
        self._points: deque[tuple[int, int]] = deque(maxlen=WINDOW)
        self.unit = self.drop = self.floor = self.in_row = self._most = 0
        self._whole = WINDOW
        """Answers in a row that lacked nothing: of so many there is nothing to find."""
        self._at = 0.0

    def note(self, held: int, cached: int, unit: int, now: float) -> None:
        """Take a point; `unit` is the hit unit by the endpoint's own word.

        `held` does not count the prompt's last token, which is never reused. O(1) while nothing lacks, else
        O(`WINDOW`).
        """
        expected = held - held % (self.unit or unit) - self.drop
        if expected <= 0:
            return
        if cached < MISSED * expected:
            self.in_row += 1
            self._most = max(self._most, expected + self.drop)
            if self.in_row >= NOTHING:
                self.floor, self._at = self._most, now
        else:
            self.in_row = self.floor = self._most = 0
            self._points.append((held, cached))
            self._whole = self._whole + 1 if cached >= held - held % unit else 0
            if self._whole < WINDOW or self.drop or self.unit:
                self._fit(unit)

    def share(self, now: float) -> float:
        """Return the share of what is held that is worth counting on, 0 to 1: less than 1 while nothing is reused."""
        if not self.floor:
            return 1.0
        share = 1.0 - exp((self._at - now) / FORGIVEN_S)
        if share > 0.5:
            # Half forgiven is tried again: one more miss is enough to say so anew.
            self.floor = 0
        return max(share, 0.0)

    def _fit(self, unit: int) -> None:
        """Find the unit and the drop that lie below the points."""
        points = self._points
        counts = {cached for _, cached in points}
        drops = _lacks(points, unit)
        self.unit = 0
        if len(counts) > 2 and len(set(drops)) > 1:
            common = gcd(*counts)
            if common > unit and common % unit == 0:
                coarse = _lacks(points, common)
                if len(set(coarse)) < len(set(drops)):
                    self.unit, drops = common, coarse
        usual = max(drops, key=drops.count, default=0)
        self.drop = 0 if len(drops) < 2 else usual if 2 * drops.count(usual) > len(drops) else drops[0]


def _lacks(points: deque[tuple[int, int]], unit: int) -> list[int]:
    """Return what lacked of each point's whole units, in order; but for points where more was reused than was known."""
    return sorted([lack for held, cached in points if (lack := held - held % unit - cached) >= 0])
