"""The virtual clock: what is planned happens in order of time, and time passes only by what happens.

Rules:
1. What is planned for one moment happens by rank, the lowest first; with equal ranks in the order of planning.
2. Time never goes back: what is planned for a moment that has passed happens now.
3. Every laboratory plans with this one queue, so that all of them order events alike.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Any, TypeVar

Argument = TypeVar("Argument")

Rank = tuple[int, ...]


class Agenda:
    """What is planned, by when it happens. Times are seconds; before the first event `now` is what it was made with."""

    __slots__ = ("_entries", "_planned", "now")

    def __init__(self, now: float = -inf) -> None:
        self.now = now
        self._entries: list[tuple[float, Rank, int, Callable[[Any, float], object], Any]] = []
        self._planned = 0

    def plan(self, at: float, what: Callable[[Argument, float], object], argument: Argument, rank: Rank = ()) -> None:
        """Let `what(argument, now)` happen at `at`. O(log n)."""
        self._planned += 1
        heappush(self._entries, (at, rank, self._planned, what, argument))

    def next_at(self) -> float:
        """Return when the next event happens, in seconds; infinite if nothing is planned. O(1)."""
        return self._entries[0][0] if self._entries else inf

    def step(self) -> None:
        """Let the next event happen. Raises `IndexError` if nothing is planned. O(log n)."""
        at, _, _, what, argument = heappop(self._entries)
        if at > self.now:
            self.now = at
        what(argument, self.now)

    def skip_to(self, at: float) -> None:
        """Let time pass to `at` with nothing happening: for what happens outside of the agenda. O(1)."""
        if at > self.now:
            self.now = at
