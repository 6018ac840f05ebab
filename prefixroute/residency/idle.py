"""How long blocks had not been used when they were evicted: the age at which the engine's cache gives blocks up.

Rules:
1. Time is the engine's own where it is told. A replay brings hours within a moment, and blocks that were
   evicted in it had been idle for longer than that moment.
2. Uses by prompts are told in this node's time. They are put on the engine's clock by the smallest lag that any batch
   had when it came.
3. A batch's evictions count as one: their mean age is smoothed. Blocks that are cleared all at once do not count,
   since the order of the cache did not choose them.
"""

from __future__ import annotations

from math import inf

EVICTION_WEIGHT = 0.1
"""Weight of the newest batch's evictions in the smoothed age."""


class Idleness:
    """The clock of an endpoint's trees, and the smoothed idle age of what was evicted from them."""

    def __init__(self) -> None:
        self._lag_s: float | None = None
        self.now = 0.0
        """Seconds on the engine's clock."""
        self.evicted_s: list[float] = []
        """Seconds for which each block had not been used that the trees lost since the last `collect`."""
        self.age_s = inf
        """Seconds that blocks had not been used when they were evicted, smoothed; infinite before the first."""

    def tick(self, now: float, engine_s: float = 0.0) -> None:
        """Set the clock to the caller's `now`; `engine_s` is the engine's own time of a batch, 0.0 if untold."""
        if 0 < engine_s < inf:
            lag = now - engine_s
            self._lag_s = lag if self._lag_s is None else min(lag, self._lag_s)
        self.now = now if self._lag_s is None else now - self._lag_s

    def collect(self) -> None:
        """Take the idle ages of what was evicted since the last call. O(blocks evicted)."""
        if self.evicted_s:
            age = sum(self.evicted_s) / len(self.evicted_s)
            self.evicted_s.clear()
            self.age_s = age if self.age_s == inf else self.age_s + EVICTION_WEIGHT * (age - self.age_s)
