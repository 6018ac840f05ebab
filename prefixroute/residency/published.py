"""What is published of an endpoint: keys, what changed of them, and which of them are anchors at a stride.

Three structures publish, and each endpoint has one of them at a time:

| structure | for an endpoint with |
|---|---|
| `RadixTree` | one full-attention group, or none yet: every matchable block |
| `Forest` | several full-attention groups: the blocks that are matchable in all of them |
| `HybridHits` | window or state groups as well: the ends of its hits, and marks |

Rules:
1. An *anchor* of stride k is a key that is published at stride k. At stride 1 every key is one.
2. While anchors are watched, each block that may have become an anchor or ceased to be one, at whatever stride, is
   *touched*. Only touched blocks have to be asked about again.
3. When one structure takes the place of another, the other's keys are gone: it may publish again what still holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from ..keys.keyset import Delta


class Published(ABC):
    """The keys of one endpoint, at every anchor stride."""

    ends_only = False
    """Whether the keys are the ends of hits and their marks (`keys.hit_marks`), not all blocks of a prefix."""

    def __init__(self) -> None:
        self._changes = Delta(set(), set())
        self._touched: dict[int, int] | None = None

    @property
    @abstractmethod
    def n_keys(self) -> int:
        """Number of keys. O(1)."""

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """Yield the 64-bit keys. O(keys)."""

    def collect(self) -> None:  # noqa: B027 - a tree has nothing to gather
        """Bring the keys up to date after events were applied. O(what changed)."""

    def take_changes(self) -> Delta:
        """Return and forget the keys that were gained and lost since the last call."""
        changes, self._changes = self._changes, Delta(set(), set())
        return changes

    def replace(self, before: Published) -> None:
        """Take the place of `before`, and tell what it has not told and what is another's now. O(keys of both)."""
        watched, self._changes = before._touched is not None, before.take_changes()
        touched = before.take_touched()
        for key in before:
            self._changes.lose(key)
            touched[key] = 0
        for key, depth in self.placed():
            self._changes.gain(key)
            touched[key] = depth
        before.watch_anchors(False)
        self.watch_anchors(watched)
        if watched:
            self._touched = touched

    def placed(self) -> Iterator[tuple[int, int]]:
        """Yield the 64-bit keys that are there when it takes another one's place, with their depths. O(keys)."""
        return iter(())

    @abstractmethod
    def anchors(self, anchor_stride: int) -> Iterator[int]:
        """Yield the keys that are published at stride `anchor_stride`."""

    @abstractmethod
    def is_anchor(self, key: int, depth: int, anchor_stride: int) -> bool:
        """Whether the block (key, depth) is published at stride `anchor_stride`."""

    @abstractmethod
    def n_fixed(self) -> int:
        """Return how many keys are anchors whatever the stride, wherever they lie."""

    def watch_anchors(self, on: bool) -> None:
        """Begin or cease to note touched blocks. Blocks that are there already are not touched by that."""
        if not on:
            self._touched = None
        elif self._touched is None:
            self._touched = {}

    @property
    def touched(self) -> int:
        """Number of touched blocks that were not taken."""
        return len(self._touched) if self._touched else 0

    def take_touched(self) -> dict[int, int]:
        """Return and forget the touched blocks (key -> depth; depth 0 of a key that is gone)."""
        touched = self._touched
        if not touched:
            return {}
        self._touched = {}
        return touched
