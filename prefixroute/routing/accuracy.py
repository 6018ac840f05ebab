"""How well an endpoint's hits are predicted: the tokens that were expected in its cache, and those it then reported.

Rules:
1. Only the engine's own count of a served request is compared, with what was predicted of the endpoint that served it.
2. One unit of what the engine can reuse is the grain of a prediction: a difference of no more is *near*.
"""

from __future__ import annotations

from typing import NamedTuple


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
