"""Hit curves of logs that are too long for exact stacks: from a sample of blocks, in bounded memory.

Rules:
1. A cold block is kept when its key is below a threshold, which is lowered when too many are kept (fixed-size SHARDS;
   Waldspurger et al., FAST 2015): each kept block stands for 1 / share cold blocks.
2. A few blocks have most accesses, and chance must not decide whether these are kept. One access in PROMOTE makes its
   block hot, whatever its key: a hot block is always kept and stands for itself. With too many hot blocks, the least
   recently touched ones become cold again.
3. An access counts in the class that its block had before the access. The number of accesses of each class is known
   exactly, so the sample only tells how the cold ones are distributed.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from math import sqrt

import numpy as np

from .prompt_keys import Keys
from .stack import SIZES, DistanceHits, ExactCurve, HitCurve, PlaceCounts, rates

SAMPLE_BLOCKS = 65536
"""Cold blocks that a sample keeps, and hot blocks: some 20 MB together."""

PROMOTE = 256
PARTS = 8
"""Number of parts of a sample, by keys: the error is estimated from the scatter between the parts."""

_T95 = 2.365
"""Student's t for 7 degrees of freedom."""

_ALL = 2**64


class _Tally:
    """Accesses and hits by distance: exact for hot blocks, for cold blocks as counted in the sample."""

    __slots__ = ("accesses", "cold", "hot", "hot_accesses", "seen")

    def __init__(self) -> None:
        self.accesses = 0
        self.hot_accesses = 0
        self.hot = [0.0] * len(SIZES)
        self.cold = [0.0] * len(SIZES)
        self.seen = 0.0

    def scale(self, by: float) -> None:
        """Multiply the weight of the sampled counts by `by`."""
        self.seen *= by
        self.cold = [count * by for count in self.cold]

    def follow(self, hits: DistanceHits, part: float) -> None:
        """Take over a part of exact hits, as the hits of a sample that has all blocks."""
        self.seen = part * hits.accesses
        self.cold = [part * count for count in hits.counts]

    def curve(self, hot: Sequence[float], cold_accesses: float) -> list[float]:
        """Return hit rates when so many accesses were of cold blocks."""
        each = cold_accesses / self.seen if self.seen else 0.0
        counts = [exact + each * count for exact, count in zip(hot, self.cold, strict=True)]
        return rates(counts, self.accesses)


class Sampled:
    """The curve from a sample of at most `limit` cold and `limit` hot blocks."""

    def __init__(self, limit: int = SAMPLE_BLOCKS) -> None:
        self.limit = limit
        self._below = _ALL
        self._rng = random.Random(20)
        self._until = self._rng.randrange(2 * PROMOTE)
        self._owners: dict[int, int] = {}
        self._hot: set[int] = set()
        self._hot_at = PlaceCounts()
        self._cold_at = PlaceCounts()
        self._next = 0
        self._parts = [_Tally() for _ in range(PARTS)]
        self._of: dict[str, _Tally] = {}

    @classmethod
    def following(cls, exact: ExactCurve, limit: int) -> Sampled:
        """Return a sample that goes on where an exact curve ends. O(blocks)."""
        found = cls(limit)
        found._owners, found._next, counts = exact.stack.state()
        found._cold_at, found._hot_at = PlaceCounts(counts), PlaceCounts([0] * len(counts))
        for owner, hits in exact.by_owner.items():
            found._of[owner] = tally = _Tally()
            tally.accesses = hits.accesses
            tally.follow(hits, 1.0)
        for part in found._parts:
            # Exact counts do not scatter: each part gets an equal share of them.
            part.follow(exact.hits, 1 / PARTS)
        if len(found) > limit:
            found._lower()
        return found

    def __len__(self) -> int:
        return len(self._owners)

    @property
    def share(self) -> float:
        """Share of cold blocks that are kept."""
        return self._below / _ALL

    def access(self, keys: Keys, listed: Sequence[int], owner: str) -> int:
        """Count a request (`listed`: its keys as numbers); return how many leading blocks surely were seen before.

        O(blocks), and more for the blocks that are kept.
        """
        n, hot, below, owners = len(listed), self._hot, self._below, self._owners
        mine = self._of.get(owner) or self._of.setdefault(owner, _Tally())
        mine.accesses += n
        are_hot: Sequence[bool]
        if below == _ALL:
            kept, are_hot = listed, [False] * n
        else:
            # This loop goes over all keys of a log, so it runs in C.
            flags = np.fromiter(map(hot.__contains__, listed), np.bool_, n)
            here = flags | (keys < np.uint64(below))
            kept, are_hot = keys[here].tolist(), flags[here].tolist()
        promoted = self._promoted(listed)
        if not kept and not promoted:
            return 0
        if self._next == len(self._hot_at):
            self._compact()
        last, place = self._tally(kept, are_hot, mine), self._next
        owners.update(dict.fromkeys(kept, place))
        for key in promoted:
            self._promote(key, place)
        self._next += 1
        if len(hot) > self.limit:
            self._demote()
        if len(owners) - len(hot) > self.limit:
            self._lower()
        return 0 if last is None else listed.index(last) + 1

    def _tally(self, kept: Sequence[int], are_hot: Sequence[bool], mine: _Tally) -> int | None:
        """Count hits before any block is touched, then move the blocks; return the deepest key seen before, or None."""
        owners, scale = self._owners, 1 / self.share
        hot_at, cold_at, hot_in, cold_in = self._hot_at, self._cold_at, len(self._hot), len(owners) - len(self._hot)
        # A cold block stands for unkept blocks around it as well; on average, half of these are above it.
        half, last, distance, deepest, hot_n = (scale - 1) / 2, -1, 0.0, None, 0
        counts, i, size = mine.hot, 0, 0
        moved: list[list[int]] = []
        for key, is_hot, place in zip(kept, are_hot, map(owners.get, kept), strict=True):
            if place is not None:
                deepest = key
                if place != last:
                    last = place
                    distance = hot_in - hot_at.up_to(place) + (cold_in - cold_at.up_to(place)) * scale
                    moved.append([place, 0, 0])
                moved[-1][1 if is_hot else 2] -= 1
                distance += 1.0 if is_hot else scale
            if not is_hot:
                self._tally_cold(key, mine, None if place is None else distance - half)
                continue
            hot_n += 1
            # Distances grow along a path, and neighbours mostly have the same place in the table.
            if distance > size:
                i = bisect_left(SIZES, distance, i)
                size = SIZES[i]
            counts[i] += 1
        mine.hot_accesses += hot_n
        for place, hot_left, cold_left in moved:
            hot_at.add(place, hot_left)
            cold_at.add(place, cold_left)
        hot_at.add(self._next, hot_n)
        cold_at.add(self._next, len(kept) - hot_n)
        return deepest

    def _tally_cold(self, key: int, mine: _Tally, distance: float | None) -> None:
        part = self._parts[key % PARTS]
        mine.seen += 1
        part.seen += 1
        if distance is not None:
            i = bisect_left(SIZES, distance)
            mine.cold[i] += 1
            part.cold[i] += 1

    def _promoted(self, listed: Sequence[int]) -> list[int]:
        """Return the blocks of this request that become hot; none do as long as all blocks are kept."""
        if self._below == _ALL:
            return []
        found = []
        while self._until < len(listed):
            found.append(listed[self._until])
            self._until += 1 + self._rng.randrange(2 * PROMOTE)
        self._until -= len(listed)
        return found

    def _promote(self, key: int, place: int) -> None:
        if key in self._hot:
            return
        if key in self._owners:
            self._cold_at.add(place, -1)
        self._owners[key] = place
        self._hot_at.add(place, 1)
        self._hot.add(key)

    def _demote(self) -> None:
        """Make the least recently touched tenth of the hot blocks cold."""
        oldest = sorted(self._hot, key=self._owners.__getitem__)[: max(1, self.limit // 10)]
        for key in oldest:
            self._hot.remove(key)
            place = self._owners[key]
            self._hot_at.add(place, -1)
            if key < self._below:
                self._cold_at.add(place, 1)
            else:
                del self._owners[key]

    def _lower(self) -> None:
        cold = [key for key in self._owners if key not in self._hot]
        wanted = self.limit * 9 // 10
        below = int(np.partition(np.array(cold, dtype=np.uint64), wanted)[wanted])
        for tally in (*self._parts, *self._of.values()):
            tally.scale(below / self._below)
        self._below = below
        gone = Counter(map(self._owners.pop, [key for key in cold if key >= below]))
        for place, blocks in gone.items():
            self._cold_at.add(place, -blocks)

    def _compact(self) -> None:
        live = [i for i, (hot, cold) in enumerate(zip(self._hot_at.at, self._cold_at.at, strict=True)) if hot or cold]
        new = {old: i for i, old in enumerate(live)}
        for key, place in self._owners.items():
            self._owners[key] = new[place]
        self._hot_at = PlaceCounts([self._hot_at.at[i] for i in live])
        self._cold_at = PlaceCounts([self._cold_at.at[i] for i in live])
        self._next = len(live)

    def check(self) -> None:
        """Assert every invariant. O(n)."""
        assert self._hot <= self._owners.keys()
        assert all(key < self._below or key in self._hot for key in self._owners)
        for counts, wanted in ((self._hot_at, True), (self._cold_at, False)):
            counted: dict[int, int] = {}
            for key, place in self._owners.items():
                if (key in self._hot) is wanted:
                    counted[place] = counted.get(place, 0) + 1
            assert counted == {i: n for i, n in enumerate(counts.at) if n}

    def curve(self, owner: str | None = None) -> HitCurve:
        """Return the curve of all, or of one owner's requests in the same cache; the error is that of all requests."""
        distinct = len(self._hot) + (len(self._owners) - len(self._hot)) / self.share
        every = self._every()
        cold = every.accesses - every.hot_accesses
        mine = every if owner is None else self._of[owner]
        found = mine.curve(mine.hot, mine.accesses - mine.hot_accesses)
        if self.share == 1.0:
            return HitCurve(found, [0.0] * len(SIZES), True, distinct)
        parts = []
        for part in self._parts:
            part.accesses = every.accesses
            parts.append(part.curve(every.hot, cold))
        # When the sample has nearly all blocks, its parts differ more than its error.
        left = sqrt(1 - self.share)
        return HitCurve(found, [left * _half(column) for column in zip(*parts, strict=True)], False, distinct)

    def _every(self) -> _Tally:
        total = _Tally()
        for tally in self._of.values():
            total.accesses += tally.accesses
            total.hot_accesses += tally.hot_accesses
            total.seen += tally.seen
            total.hot = [a + b for a, b in zip(total.hot, tally.hot, strict=True)]
            total.cold = [a + b for a, b in zip(total.cold, tally.cold, strict=True)]
        return total


def _half(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return _T95 * sqrt(variance / len(values))
