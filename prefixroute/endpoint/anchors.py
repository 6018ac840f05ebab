"""The anchors of one endpoint: which of its keys are published at an anchor stride k, its fidelity.

Rules:
1. Which blocks are anchors is for the residency to say (`residency.published`). At k = 1 every matchable block is one.
   A published anchor proves that the endpoint holds the whole prefix that ends there.
2. What is published is wire keys, and two blocks may share one (`keys.keyset`).
3. The publisher chooses k: the finest stride whose snapshot fits its byte budget. k rises at once and falls late, since
   a change of k costs every receiver a snapshot.

Memory: about 120 bytes an anchor.
"""

from __future__ import annotations

from collections import Counter
from math import log2

from ..errors import UsageError
from ..keys.chain import ANCHOR_STRIDES, STRIDE, WIRE_BITS, wire_key
from ..keys.keyset import Delta, Repeats
from ..residency.published import Published

assert ANCHOR_STRIDES[-1] == STRIDE

FOLLOW_BLOCKS = 1024
"""With more touched blocks the anchors are followed at once: left to the next round they would take too long there."""


class Anchors:
    """The published anchors of one endpoint: wire keys, kept up to date from the blocks that were touched.

    Begin with `rebuild`. Raises `UsageError` for a stride that is not one of `ANCHOR_STRIDES`.
    """

    def __init__(self, anchor_stride: int) -> None:
        self.anchor_stride = _checked(anchor_stride)
        self.wires: set[int] = set()
        """The wire keys. To be read only."""
        self._blocks: set[int] = set()
        """64-bit keys."""
        self._repeats = Repeats()

    def set_stride(self, anchor_stride: int, source: Published) -> Delta:
        """Change the stride; return the wire keys that were gained and lost by it. O(edges + anchors)."""
        self.anchor_stride = _checked(anchor_stride)
        return self.rebuild(source)

    def rebuild(self, source: Published) -> Delta:
        """Take all anchors anew and watch the source from here on; return what differs from before.

        O(edges + anchors), 0.4 us an anchor.
        """
        source.watch_anchors(True)
        source.take_touched()
        before = self.wires
        self._blocks = set(source.anchors(self.anchor_stride))
        self.wires = set(map(wire_key, self._blocks))
        self._repeats.clear()
        if len(self.wires) < len(self._blocks):
            self.wires = set()
            for key in self._blocks:
                self._gain(wire_key(key))
        return Delta(self.wires - before, before - self.wires)

    def follow(self, source: Published) -> Delta:
        """Bring the set up to date; return the wire keys that were gained and lost. O(touched blocks), or `rebuild`."""
        if source.touched > len(self.wires) + FOLLOW_BLOCKS:
            return self.rebuild(source)
        changes = Delta(set(), set())
        blocks, anchor_stride = self._blocks, self.anchor_stride
        for key, depth in source.take_touched().items():
            if source.is_anchor(key, depth, anchor_stride):
                if key not in blocks:
                    blocks.add(key)
                    if self._gain(wire := wire_key(key)):
                        changes.gain(wire)
            elif key in blocks:
                blocks.remove(key)
                wire = wire_key(key)
                if self._repeats.lose(wire):
                    self.wires.remove(wire)
                    changes.lose(wire)
        return changes

    def _gain(self, wire: int) -> bool:
        """Count one more block of a wire key; return whether the wire key is new."""
        new = self._repeats.gain(wire, wire in self.wires)
        if new:
            self.wires.add(wire)
        return new

    def _check(self, source: Published) -> None:
        """Assert that the blocks are the source's anchors, once nothing touched is left over. O(blocks)."""
        keys = list(source.anchors(self.anchor_stride))
        assert set(keys) == self._blocks and len(keys) == len(self._blocks)
        counts = Counter(map(wire_key, keys))
        assert counts.keys() == self.wires
        assert {wire: n - 1 for wire, n in counts.items() if n > 1} == self._repeats


def snapshot_bytes(keys: float) -> float:
    """Return the bytes that a snapshot of `keys` wire keys is expected to take, without headers.

    Sorted keys of 48 bits, Rice-coded: 48 - log2(n) + 1.6 bits each. Measured: 4.11 bytes at 100k, 4.53 at 10k.
    """
    return keys * (WIRE_BITS - log2(keys) + 1.6) / 8 if keys >= 1 else 0.0


def expected_anchors(blocks: int, fixed: int, anchor_stride: int) -> float:
    """Return how many anchors `blocks` matchable blocks are expected to have at stride `anchor_stride`.

    That is blocks / anchor_stride + fixed, and never more than the blocks, where `fixed` blocks are anchors at any
    stride (`Published.n_fixed`). Fixed ones at multiples of the stride are counted twice, and first blocks of a path
    left out. So the result is at most fixed / anchor_stride too high, and too low by at most the number of distinct
    first blocks.
    """
    return min(blocks, blocks / anchor_stride + fixed)


def choose_stride(blocks: int, fixed: int, budget_bytes: float, current: int = 1) -> int:
    """Return the anchor stride to publish with: the finest whose expected snapshot fits `budget_bytes`.

    `blocks` and `fixed` are those of `expected_anchors`. The stride rises from `current` as soon as that exceeds the
    budget, to the next that fits, or to the coarsest. It falls only to a stride that would take less than half the
    budget, so a set whose size varies by up to a factor of two keeps its stride.

    Raises `UsageError` if `current` is not one of `ANCHOR_STRIDES`.
    """
    _checked(current)
    for anchor_stride in ANCHOR_STRIDES:
        expected = snapshot_bytes(expected_anchors(blocks, fixed, anchor_stride))
        if expected < budget_bytes / 2 if anchor_stride < current else expected <= budget_bytes:
            return anchor_stride
    return ANCHOR_STRIDES[-1]


def _checked(anchor_stride: int) -> int:
    if anchor_stride not in ANCHOR_STRIDES:
        raise UsageError(f"an anchor stride is one of {ANCHOR_STRIDES}, not {anchor_stride!r}")
    return anchor_stride
