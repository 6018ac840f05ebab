"""What several full-attention groups publish together: the blocks that are matchable in the tree of each.

Rules:
1. The trees that hold each key are counted. A key is published while all of them hold it. These counts run up to the
   number of trees and are asked in between, unlike `KeyCounts`.
2. The published blocks are closed under prefixes, since the matchable blocks of each tree are. Their anchors are those
   of any tree that all trees hold. Where the trees diverge, the last common block may be no anchor of either: a coarse
   stride then publishes less than it could, but nothing false.
3. A forest is made for its trees. One more group, or one less, takes a new one.

Memory: about 110 bytes a key, beside the trees'.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from .published import Published
from .tree import RadixTree


class Forest(Published):
    """Two or more trees, in the place of `before`. O(blocks) to make."""

    def __init__(self, trees: Sequence[RadixTree], before: Published) -> None:
        super().__init__()
        self._trees = tuple(trees)
        self._holders = Counter(key for tree in self._trees for key in tree)
        """Key -> number of trees that hold it."""
        self._quorum = sum(n == len(self._trees) for n in self._holders.values())
        self.replace(before)
        for tree in self._trees:
            tree.take_changes()

    @property
    def n_keys(self) -> int:
        """Number of blocks that are matchable in every tree."""
        return self._quorum

    def __iter__(self) -> Iterator[int]:
        """Yield the keys of the blocks that are matchable in every tree."""
        return (key for key, n in self._holders.items() if n == len(self._trees))

    def placed(self) -> Iterator[tuple[int, int]]:
        """Yield the keys of the blocks that are matchable in every tree, with their depths."""
        return (row for row in self._trees[0].placed() if self._holders[row[0]] == len(self._trees))

    def collect(self) -> None:
        """Count what the trees gained and lost."""
        holders, needed = self._holders, len(self._trees)
        for tree in self._trees:
            changes = tree.take_changes()
            for key in changes.removed:
                if holders[key] == needed:
                    self._changes.lose(key)
                    self._quorum -= 1
                holders[key] -= 1
                if not holders[key]:
                    del holders[key]
            for key in changes.added:
                holders[key] += 1
                if holders[key] == needed:
                    self._changes.gain(key)
                    self._quorum += 1

    def up(self, key: int, depth: int, n: int) -> int:
        """Return the key of the block `n` above (key, depth), which every tree holds. O(edges between)."""
        return self._trees[0].up(key, depth, n)

    def anchors(self, anchor_stride: int) -> Iterator[int]:
        """Yield the keys of the anchors of stride `anchor_stride`. O(edges + anchors)."""
        anchors = {key for tree in self._trees for key in tree.anchors(anchor_stride)}
        return (key for key in anchors if self._holders[key] == len(self._trees))

    def is_anchor(self, key: int, depth: int, anchor_stride: int) -> bool:
        """Whether the block (key, depth) is an anchor of stride `anchor_stride`. O(trees)."""
        if self._holders.get(key) != len(self._trees):
            return False
        return any(tree.is_anchor(key, depth, anchor_stride) for tree in self._trees)

    def n_fixed(self) -> int:
        """Return how many anchors of any stride the tree has that has most of them. O(edges + request ends)."""
        return max(tree.n_fixed() for tree in self._trees)

    def watch_anchors(self, on: bool) -> None:
        """Begin or cease to note touched blocks, in every tree."""
        super().watch_anchors(on)
        for tree in self._trees:
            tree.watch_anchors(on)

    @property
    def touched(self) -> int:
        """Number of touched blocks that were not taken, counted once for each tree."""
        return super().touched + sum(tree.touched for tree in self._trees)

    def take_touched(self) -> dict[int, int]:
        """Return and forget the touched blocks of all trees."""
        touched = super().take_touched()
        for tree in self._trees:
            # What a tree touched came later than what the forest did, so its depth is the right one.
            touched.update(tree.take_touched())
        return touched

    def _check(self) -> None:
        """Assert every invariant but the trees' own. O(blocks)."""
        held = [set(tree) for tree in self._trees]
        assert set(self) == set.intersection(*held)
        assert self._quorum == sum(1 for _ in self)
        assert self._holders == Counter(key for keys in held for key in keys)
