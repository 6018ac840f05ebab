"""The anchors of one endpoint: which blocks of its tree are published at fidelity k, the anchor stride.

Rules:
1. Which blocks are anchors is the tree's to say (`tree`, rule 5). k = 1 is every matchable block. A published anchor
   proves that the endpoint holds the whole prefix that ends there.
2. What is published is wire keys. Two blocks may share one (1.8e-5 pairs at 100k blocks): it goes with the last.
3. k is the publisher's choice: the finest whose snapshot fits its byte budget. It rises at once and falls late, since a
   change of k costs every receiver a snapshot.

Memory: about 110 bytes an anchor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import log2
from typing import Protocol

from ..errors import UsageError
from ..keys.chain import ANCHOR_STRIDES, STRIDE, WIRE_BITS, wire_key
from ..keys.keyset import Delta

assert ANCHOR_STRIDES[-1] == STRIDE


class AnchorSource(Protocol):
    """What anchors are taken from: a tree, or all the trees of an endpoint."""

    def anchors(self, anchor_stride: int) -> Iterator[int]:
        """Yield the 64-bit keys of all anchors."""

    def is_anchor(self, key: int, depth: int, anchor_stride: int) -> bool:
        """Whether a block is an anchor now."""

    def watch_anchors(self, on: bool) -> None:
        """Begin or cease to note touched blocks."""

    def take_touched(self) -> Mapping[int, int]:
        """Return and forget the blocks (key -> depth) whose standing may have changed."""


class Anchors:
    """The published anchors of one endpoint: wire keys, kept up to date from what its tree touched.

    Begin with `rebuild`. Raises `UsageError` for a stride that is not one of `ANCHOR_STRIDES`.
    """

    __slots__ = ("_every", "_keys", "_more")

    def __init__(self, anchor_stride: int) -> None:
        self._every = _checked(anchor_stride)
        self._keys: dict[int, int] = {}
        self._more: dict[int, set[int]] = {}
        """Wire key -> the blocks that share it with the one in `_keys`."""

    def __len__(self) -> int:
        """Number of wire keys."""
        return len(self._keys)

    def __contains__(self, wire: object) -> bool:
        """Whether a wire key is one of them."""
        return wire in self._keys

    def __iter__(self) -> Iterator[int]:
        """Yield the wire keys, in no order."""
        return iter(self._keys)

    @property
    def anchor_stride(self) -> int:
        """The anchor stride."""
        return self._every

    def set_stride(self, anchor_stride: int, source: AnchorSource) -> Delta:
        """Change the stride; return the wire keys that came and went by it. O(edges + anchors)."""
        self._every = _checked(anchor_stride)
        return self.rebuild(source)

    def rebuild(self, source: AnchorSource) -> Delta:
        """Take all anchors afresh and watch the source from here on; return what differs from before.

        O(edges + anchors), 0.3 us an anchor.
        """
        source.watch_anchors(True)
        source.take_touched()
        before = self._keys.keys()
        anchors = list(source.anchors(self._every))
        self._keys, self._more = dict(zip(map(wire_key, anchors), anchors, strict=True)), {}
        if len(self._keys) < len(anchors):
            # Some share a wire key.
            self._keys = {}
            for key in anchors:
                self._gain(key)
        return Delta(self._keys.keys() - before, before - self._keys.keys())

    def follow(self, source: AnchorSource) -> Delta:
        """Bring the set up to date; return the wire keys that came and went. O(touched blocks)."""
        changes = Delta(set(), set())
        anchor_stride = self._every
        for key, depth in source.take_touched().items():
            wire = wire_key(key)
            mine = self._keys.get(wire)
            known = mine == key or (mine is not None and key in self._more.get(wire, ()))
            if source.is_anchor(key, depth, anchor_stride):
                if not known and self._gain(key):
                    changes.gain(wire)
            elif known and self._lose(key):
                changes.lose(wire)
        return changes

    def _gain(self, key: int) -> bool:
        """Add a block; whether its wire key is new."""
        wire = wire_key(key)
        if wire not in self._keys:
            self._keys[wire] = key
            return True
        self._more.setdefault(wire, set()).add(key)
        return False

    def _lose(self, key: int) -> bool:
        """Take a block out; whether its wire key went with it."""
        wire = wire_key(key)
        more = self._more.get(wire)
        if more is None:
            del self._keys[wire]
            return True
        if self._keys[wire] == key:
            self._keys[wire] = more.pop()
        else:
            more.remove(key)
        if not more:
            del self._more[wire]
        return False

    def _check(self, source: AnchorSource) -> None:
        """Assert that the set is the source's anchors, block for block; nothing touched is left over. O(blocks)."""
        keys = list(source.anchors(self._every))
        assert {wire_key(key) for key in keys} == self._keys.keys()
        mine = [*self._keys.values(), *(key for more in self._more.values() for key in more)]
        assert sorted(mine) == sorted(keys)
        assert all(wire_key(key) == wire for wire, key in self._keys.items())
        assert all(more and {wire_key(key) for key in more} == {wire} for wire, more in self._more.items())


def snapshot_bytes(keys: float) -> float:
    """Return the bytes that a snapshot of `keys` wire keys is expected to take, without headers.

    Sorted keys of 48 bits, Rice-coded: 48 - log2(n) + 1.6 bits each. Measured: 4.11 bytes at 100k, 4.53 at 10k.
    """
    return keys * (WIRE_BITS - log2(keys) + 1.6) / 8 if keys >= 1 else 0.0


def expected_anchors(blocks: int, ends: int, anchor_stride: int) -> float:
    """Return how many anchors `blocks` matchable blocks are expected to have at stride `anchor_stride`.

    blocks / every + ends, and never more than the blocks: `ends` are those that end a run or a request
    (`RadixTree.ends`). It counts ends at multiples of the stride twice, and leaves out depth 1 of each first block, so
    it is at most ends / every too high, and too low by no more than the number of distinct first blocks.
    """
    return min(blocks, blocks / anchor_stride + ends)


def choose_stride(blocks: int, ends: int, budget_bytes: float, current: int = 1) -> int:
    """Return the anchor stride to publish with: the finest whose expected snapshot fits `budget_bytes`.

    It rises from `current` as soon as that is over the budget, to the next that fits, or to the coarsest. It falls
    only to a stride that would take less than half the budget, so a set that breathes by up to a factor of two keeps
    its stride. Raises `UsageError` for a stride that is not one of `ANCHOR_STRIDES`.
    """
    _checked(current)
    for anchor_stride in ANCHOR_STRIDES:
        expected = snapshot_bytes(expected_anchors(blocks, ends, anchor_stride))
        if expected < budget_bytes / 2 if anchor_stride < current else expected <= budget_bytes:
            return anchor_stride
    return ANCHOR_STRIDES[-1]


def _checked(anchor_stride: int) -> int:
    if anchor_stride not in ANCHOR_STRIDES:
        raise UsageError(f"an anchor stride is one of {ANCHOR_STRIDES}, not {anchor_stride!r}")
    return anchor_stride
