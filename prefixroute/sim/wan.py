"""Wide-area round trips: small built-in matrices, and readers of topology files and of measured round trips.

Rules:
1. A matrix is the full round trip in milliseconds between every two places, zero from a place to itself only.
2. What a file does not say is refused, by its line: a missing link must not become a free one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from prefixroute import UsageError


class Wan(NamedTuple):
    """Places, and the round trip in milliseconds between every two."""

    name: str
    places: tuple[str, ...]
    rtt_ms: tuple[tuple[float, ...], ...]


def of_links(name: str, places: Sequence[str], links: Sequence[tuple[int, int, float]]) -> Wan:
    """Join places by links (from, to, one-way milliseconds): round trips are twice the shortest way.

    Raises `UsageError` when a place cannot be reached.
    """
    near: list[list[tuple[int, float]]] = [[] for _ in places]
    for i, j, delay_ms in links:
        near[i].append((j, delay_ms))
    rows = []
    for start in range(len(places)):
        found = [math.inf] * len(places)
        found[start] = 0.0
        queue = [(0.0, start)]
        while queue:
            so_far, i = heapq.heappop(queue)
            if so_far > found[i]:
                continue
            for j, delay_ms in near[i]:
                if so_far + delay_ms < found[j]:
                    found[j] = so_far + delay_ms
                    heapq.heappush(queue, (found[j], j))
        if math.inf in found:
            raise UsageError(f"{name}: no way from {places[start]} to {places[found.index(math.inf)]}")
        rows.append(tuple(2 * each for each in found))
    return Wan(name, tuple(places), tuple(rows))
