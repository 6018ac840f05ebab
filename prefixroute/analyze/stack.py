"""Stack distances of prefix blocks: from one pass, the hits of every cache size at once.

Rules:
1. A request touches its blocks deepest first, as engines free them: a held prefix always begins at the root.
2. The distance of a block is the number of blocks touched since its last touch, itself included: an LRU cache of so
   many blocks holds it.
3. Distances are taken before the request touches anything.
4. The blocks whose last touch was by one request are an interval of that request's path. So a request costs one search
   for each earlier request with which it shares blocks, not one for each block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

SIZES = tuple(sorted({round(2 ** (step / 4)) for step in range(4 * 36)}))
"""Cache sizes of a curve, in blocks: four to an octave."""


class DistanceRun(NamedTuple):
    """Neighbouring blocks of a path with distances `after` + 1, `after` + 2, ..."""

    after: int
    blocks: int


class PlaceCounts:
    """Numbers by place, with their sums up to a place: a Fenwick tree. Both take O(log n)."""

    __slots__ = ("_tree", "at")

    def __init__(self, counts: Sequence[int] = ()) -> None:
        size = max(1024, 1 << (2 * len(counts)).bit_length())
        self.at = [*counts, *[0] * (size - len(counts))]
        self._tree = tree = [0, *self.at]
        for i in range(1, size + 1):
            above = i + (i & -i)
            if above <= size:
                tree[above] += tree[i]

    def __len__(self) -> int:
        return len(self.at)

    def add(self, place: int, n: int) -> None:
        """Add to a place."""
        if not n:
            return
        self.at[place] += n
        tree, i, size = self._tree, place + 1, len(self._tree)
        while i < size:
            tree[i] += n
            i += i & -i

    def up_to(self, place: int) -> int:
        """Return the sum of all places up to and including this one."""
        tree, i, total = self._tree, place + 1, 0
        while i:
            total += tree[i]
            i &= i - 1
        return total


class TouchStack:
    """Blocks in the order of their last touch. Memory O(blocks), an access O(blocks + runs log n)."""

    __slots__ = ("_counts", "_next", "_owners")

    def __init__(self) -> None:
        self._owners: dict[int, int] = {}
        self._counts = PlaceCounts()
        self._next = 0

    def __len__(self) -> int:
        return len(self._owners)

    def access(self, keys: Sequence[int]) -> list[DistanceRun]:
        """Touch a path, given root first; return the runs of its leading blocks that were touched before."""
        if not keys:
            return []
        if self._next == len(self._counts):
            self._compact()
        runs, owners, live = [], self._owners, len(self._owners)
        for owner, group in groupby(map(owners.get, keys)):
            if owner is None:
                break
            runs.append((owner, DistanceRun(live - self._counts.up_to(owner), len(list(group)))))
        for owner, run in runs:
            self._counts.add(owner, -run.blocks)
        self._counts.add(self._next, len(keys))
        owners.update(dict.fromkeys(keys, self._next))
        self._next += 1
        return [run for _, run in runs]

    def state(self) -> tuple[dict[int, int], int, list[int]]:
        """Return the number of each block's last request, the next number, and by number how many blocks it has."""
        return self._owners, self._next, self._counts.at[: self._next]

    def check(self) -> None:
        """Assert every invariant. O(n)."""
        counted: dict[int, int] = {}
        for owner in self._owners.values():
            counted[owner] = counted.get(owner, 0) + 1
        assert counted == {i: n for i, n in enumerate(self._counts.at) if n}
        for owner in counted:
            assert self._counts.up_to(owner) == sum(self._counts.at[: owner + 1])

    def _compact(self) -> None:
        """Renumber the requests that were the last to touch some block."""
        live = [i for i, n in enumerate(self._counts.at) if n]
        new = {old: i for i, old in enumerate(live)}
        for key, owner in self._owners.items():
            self._owners[key] = new[owner]
        self._counts = PlaceCounts([self._counts.at[i] for i in live])
        self._next = len(live)


class DistanceHits:
    """Hits by distance: `counts[i]` are the hits of a cache of SIZES[i] that a cache of SIZES[i - 1] misses."""

    __slots__ = ("accesses", "counts")

    def __init__(self) -> None:
        self.accesses = 0
        self.counts = [0.0] * len(SIZES)

    def add(self, run: DistanceRun) -> None:
        """Count a run of exact distances."""
        low, high = run.after + 1, run.after + run.blocks
        i = bisect_left(SIZES, low)
        while low <= high:
            top = min(high, SIZES[i])
            self.counts[i] += top - low + 1
            low = top + 1
            i += 1

    def curve(self) -> list[float]:
        """Return the hit rate of each of SIZES."""
        return rates(self.counts, self.accesses)


def rates(counts: Sequence[float], accesses: float) -> list[float]:
    """Return cumulative shares, kept between 0 and 1."""
    total, found = 0.0, []
    for count in counts:
        total += count
        found.append(min(1.0, max(0.0, total / accesses)) if accesses > 0 else 0.0)
    return found


class HitCurve(NamedTuple):
    """Hit rates by SIZES. `error` is half of a 95 % interval at each of them, 0.0 where the rates are exact."""

    rates: list[float]
    error: list[float]
    exact: bool
    distinct_blocks: float


class ExactCurve:
    """The exact curve of all requests, and by owner (such as a tenant)."""

    def __init__(self) -> None:
        self.stack = TouchStack()
        self.hits = DistanceHits()
        self.by_owner: dict[str, DistanceHits] = {}

    def access(self, keys: Sequence[int], owner: str) -> int:
        """Count a request; return how many of its leading blocks any earlier request had."""
        runs = self.stack.access(keys)
        for hits in (self.hits, self.by_owner.setdefault(owner, DistanceHits())):
            hits.accesses += len(keys)
            for run in runs:
                hits.add(run)
        return sum(run.blocks for run in runs)

    def curve(self, owner: str | None = None) -> HitCurve:
        """Return the curve of all, or of one owner's requests in the cache of all."""
        hits = self.hits if owner is None else self.by_owner[owner]
        return HitCurve(hits.curve(), [0.0] * len(SIZES), True, float(len(self.stack)))
