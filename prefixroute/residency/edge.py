"""One edge of the radix tree: consecutive blocks without a fork, their keys, and their counts by tier.

Rules:
1. All arrays of an edge have one entry a block, and are cut and joined together.
2. `reach` is the number of leading blocks that are matchable; only the tree changes it.
3. A split or a merge keeps the object that owns more blocks, so that fewer keys have to be pointed elsewhere.
4. In every method `size` is the number of token bytes of a block.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

_CHUNK = 256
"""Counts that are read at once while searching for the last held block."""


class Edge:
    """Blocks at depths `depth` + 1 to `depth` + len(keys), and the edges below the last one.

    A root has no parent and no blocks, only `root_key`.
    """

    __slots__ = ("children", "counts", "data", "depth", "extras", "keys", "parent", "reach", "root_key", "used_at")

    def __init__(self, parent: Edge | None, depth: int) -> None:
        self.parent = parent
        self.depth = depth
        self.root_key = 0
        self.data = bytearray()
        self.extras: dict[int, bytes] = {}
        self.keys = array("Q")
        self.counts: dict[str, array[int]] = {}
        self.reach = 0
        self.children: dict[bytes, Edge] = {}
        self.used_at = 0.0
        """When a prompt last used the edge, in seconds of the tree's clock."""

    def block(self, at: int, size: int) -> bytes:
        """Return what block `at` contributes to the chain: its tokens, `size` bytes, then its items' digests."""
        block = bytes(self.data[at * size : (at + 1) * size])
        return block + self.extras[at] if self.extras and at in self.extras else block

    def blocks(self, lower: int, upper: int, size: int) -> bytes:
        """Return what blocks `lower` to `upper` - 1 contribute to the chain."""
        if self.extras:
            return b"".join([self.block(at, size) for at in range(lower, upper)])
        return bytes(self.data[lower * size : upper * size])

    def held(self, at: int, tiers: Sequence[str]) -> bool:
        """Whether block `at` has a count in one of `tiers`."""
        counts = self.counts
        return any(tier in counts and counts[tier][at] for tier in tiers)

    def held_until(self, start: int, stop: int, tiers: Sequence[str]) -> int:
        """Return the first block from `start` on that has no count in any of `tiers`, or `stop` if that comes first."""
        counts = [self.counts[tier] for tier in tiers if tier in self.counts]
        if len(counts) == 1:
            try:
                return counts[0].index(0, start, stop)
            except ValueError:
                return stop
        if start >= stop or not counts:
            return min(start, stop)
        held = np.frombuffer(counts[0], np.uint32)[start:stop] != 0
        for more in counts[1:]:
            held |= np.frombuffer(more, np.uint32)[start:stop] != 0
        first = int(held.argmin())
        return stop if held[first] else start + first

    def count(self, lower: int, upper: int, tier: str, change: int) -> int | None:
        """Add `change`, 1 or -1, to the counts of blocks `lower` to `upper` - 1; return None.

        If a block has no count to lose, nothing is changed and that block is returned.
        """
        counts = self.counts.get(tier)
        if counts is None:
            counts = self.counts[tier] = array("I", bytes(4 * len(self.keys)))
        if upper - lower == 1:
            if counts[lower] + change < 0:
                return lower
            counts[lower] += change
            return None
        view = np.frombuffer(counts, np.uint32)[lower:upper]
        if change > 0:
            view += np.uint32(1)
        elif not view.all():
            return lower + int(np.argmin(view))
        else:
            view -= np.uint32(1)
        return None

    def held_end(self) -> int:
        """Return how many blocks there are up to the last one with a count in any tier."""
        upper = len(self.keys)
        while upper:
            lower = max(upper - _CHUNK, 0)
            end = 0
            for counts in self.counts.values():
                if counts[upper - 1]:
                    return upper
                end = max(end, (len(counts[lower:upper].tobytes().rstrip(b"\0")) + 3) // 4)
            if end:
                return lower + end
            upper = lower
        return 0

    def common(self, at: int, blocks: Sequence[bytes], start: int, size: int) -> int:
        """Return how many of the edge's blocks from `at` on are those of `blocks` from `start` on."""
        limit = min(len(self.keys) - at, len(blocks) - start)
        if not self.extras:
            joined = b"".join(blocks[start : start + limit])
            if len(joined) == limit * size and self.data[at * size : (at + limit) * size] == joined:
                return limit
        return next((i for i in range(limit) if self.block(at + i, size) != blocks[start + i]), limit)

    def reachable(self) -> bool:
        """Whether every block above the edge is matchable."""
        parent = self.parent
        return parent is not None and (parent.parent is None or parent.reach == len(parent.keys))

    def root(self) -> int:
        """Return the key of the namespace's root above the edge."""
        edge = self
        while edge.parent is not None:
            edge = edge.parent
        return edge.root_key

    def trim(self, end: int, size: int) -> None:
        """Drop the blocks from `end` on."""
        del self.data[end * size :], self.keys[end:]
        for count in self.counts.values():
            del count[end:]
        if self.extras:
            self.extras = {i: e for i, e in self.extras.items() if i < end}

    def split(self, at: int, size: int) -> tuple[Edge, Edge, Edge]:
        """Cut before block `at`, 0 < at < len; return the upper edge, the lower one, and which of them is new."""
        upper, lower = self._halves(at, size)
        data, keys, counts, extras, reach = self.data, self.keys, self.counts, self.extras, self.reach
        upper.data, lower.data = data[: at * size], data[at * size :]
        upper.keys, lower.keys = keys[:at], keys[at:]
        upper.counts = {tier: c[:at] for tier, c in counts.items()}
        lower.counts = {tier: c[at:] for tier, c in counts.items()}
        upper.extras = {i: e for i, e in extras.items() if i < at}
        lower.extras = {i - at: e for i, e in extras.items() if i >= at}
        upper.reach, lower.reach = min(reach, at), max(reach - at, 0)
        upper.used_at = lower.used_at = self.used_at
        upper.children[lower.block(0, size)] = lower
        return upper, lower, lower if lower is not self else upper

    def _halves(self, at: int, size: int) -> tuple[Edge, Edge]:
        """Link a new edge above or below this one, whichever will own fewer blocks."""
        parent = self.parent
        assert parent is not None
        if at <= len(self.keys) - at:
            upper = Edge(parent, self.depth)
            parent.children[self.block(0, size)] = upper
            self.parent, self.depth = upper, self.depth + at
            return upper, self
        lower = Edge(self, self.depth + at)
        lower.children = self.children
        for child in lower.children.values():
            child.parent = lower
        self.children = {}
        return self, lower

    def merge(self, size: int) -> tuple[Edge, Edge]:
        """Join with the only child; return the edge that stays, and the other, which still lists its own keys."""
        (lower,) = self.children.values()
        parent = self.parent
        assert parent is not None
        n = len(self.keys)
        stays, goes = (self, lower) if n >= len(lower.keys) else (lower, self)
        counts = {
            tier: self.counts.get(tier, array("I", bytes(4 * n)))
            + lower.counts.get(tier, array("I", bytes(4 * len(lower.keys))))
            for tier in {**self.counts, **lower.counts}
        }
        first = self.block(0, size)
        stays.data, stays.keys, stays.counts = self.data + lower.data, self.keys + lower.keys, counts
        stays.extras = {**self.extras, **{i + n: e for i, e in lower.extras.items()}}
        stays.reach = self.reach + lower.reach
        stays.used_at = max(self.used_at, lower.used_at)
        stays.depth, stays.parent, stays.children = self.depth, parent, lower.children
        for child in stays.children.values():
            child.parent = stays
        parent.children[first] = stays
        return stays, goes
