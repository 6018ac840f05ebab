"""The virtual clock: planned events happen in order of time, and time passes only from event to event.

Rules:
1. Events of one moment happen by rank, the lowest first; with equal ranks in the order in which they were planned.
2. Time never goes back: an event that is planned for a moment in the past happens now.
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
    """The planned events, in order of time. Times are seconds; until the first event `now` is the constructor's."""

    __slots__ = ("_entries", "_planned", "now")

    def __init__(self, now: float = -inf) -> None:
        self.now = now
        self._entries: list[tuple[float, Rank, int, Callable[[Any, float], object], Any]] = []
        self._planned = 0

    def plan(self, at: float, what: Callable[[Argument, float], object], argument: Argument, rank: Rank = ()) -> None:
        """Plan the call `what(argument, now)` for the moment `at`. O(log n)."""
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
        """Move the time to `at` without an event: for a caller with events outside of the agenda. O(1)."""
        if at > self.now:
            self.now = at
