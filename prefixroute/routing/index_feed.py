"""Feeds the merged index in slices: a replica's 100,000 keys change at once, and in the index they take 30 ms.

Rules:
1. A call into the node feeds `SLICE_KEYS` keys at most; what is left is fed by the calls that follow. Slices are
   bounded by keys, never by time, so that the same calls do the same.
2. The changes of one endpoint are fed in order. So for each key the index has what the endpoint held before or what it
   holds now, and a search may find any state between the two versions, never one beyond them.
3. While changes of an endpoint wait, its anchor stride is the coarser one: a search at that stride finds keys of the
   finer one too.
4. An endpoint that leaves is out of the index's names at once, and what it was to gain is dropped. Its bit is given
   to another when its last key is cleared.

Memory: 8 bytes a key that waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from ..keys.keyset import NO_KEYS, Keys
from .index import MergedIndex

SLICE_KEYS = 4096
"""Keys that one call feeds: 1.5 ms."""


@dataclass(slots=True)
class _Change:
    """A change of one endpoint's keys that waits: first keys to remove, then keys to add, then `gone` to remove."""

    endpoint: str
    added: Keys
    removed: Keys
    anchor_stride: int
    gone: Iterator[int]

    def take(self, n: int) -> tuple[list[int], list[int]] | None:
        """Return up to `n` keys to add or remove; None when there are no more."""
        if len(self.removed):
            removed, self.removed = self.removed[:n], self.removed[n:]
            return [], removed.tolist()
        if len(self.added):
            added, self.added = self.added[:n], self.added[n:]
            return added.tolist(), []
        gone = list(islice(self.gone, n))
        return ([], gone) if gone else None


class IndexFeed:
    """Brings changes into an index. In each call of a node: `begin`, then what takes changes, then `go_on`."""

    __slots__ = ("_index", "_left", "_retired", "waiting")

    def __init__(self, index: MergedIndex) -> None:
        self._index = index
        self.waiting: dict[int, deque[_Change]] = {}
        """By bit; the endpoint that has waited longest is first. To be read only."""
        self._retired: set[int] = set()
        self._left = 0

    def begin(self) -> None:
        """Begin a call: it may feed one slice."""
        self._left = SLICE_KEYS

    def take(self, endpoint: str, added: Keys, removed: Keys, anchor_stride: int) -> None:
        """Take the keys that an endpoint gained and lost; `anchor_stride` is the one that it has from now on.

        They are in the index on return if the call has as many keys left, and nothing else of the endpoint waits.
        """
        index = self._index
        bit, n = index.bit(endpoint), len(added) + len(removed)
        if anchor_stride > index.stride(bit):
            index.set_stride(endpoint, anchor_stride)
        if bit in self.waiting or n > self._left:
            self.waiting.setdefault(bit, deque()).append(_Change(endpoint, added, removed, anchor_stride, iter(())))
            return
        self._left -= n
        index.mark(bit, added.tolist(), removed.tolist())
        index.set_stride(endpoint, anchor_stride)

    def retire(self, endpoint: str, keys: Iterable[int] = ()) -> None:
        """Take an endpoint out of the index; `keys` are all that it has there and that do not wait to be removed."""
        bit = self._index.retire(endpoint)
        changes = self.waiting.setdefault(bit, deque())
        for change in changes:
            change.added = change.added[:0]
        changes.append(_Change(endpoint, NO_KEYS, NO_KEYS, 1, iter(keys)))
        self._retired.add(bit)

    def go_on(self) -> None:
        """Feed what the call has keys left for."""
        while self.waiting and self._left > 0:
            bit, changes = next(iter(self.waiting.items()))
            change = changes[0]
            keys = change.take(self._left)
            if keys is not None:
                self._index.mark(bit, *keys)
                self._left -= len(keys[0]) + len(keys[1])
                continue
            if bit not in self._retired:
                self._index.set_stride(change.endpoint, max(change.anchor_stride for change in changes))
            changes.popleft()
            if not changes:
                del self.waiting[bit]
                if bit in self._retired:
                    self._retired.remove(bit)
                    self._index.release(bit)

    def _check(self, expected: dict[str, set[int]]) -> None:
        """Assert that the index will hold exactly `expected` (endpoint -> wire keys) when nothing waits. O(keys)."""
        if not self.waiting:
            self._index._check(expected)
            return
        for bit, changes in self.waiting.items():
            keys = self._index.keys_of(bit)
            for change in changes:
                keys.difference_update(change.removed.tolist())
                keys.update(change.added.tolist())
            if bit not in self._retired:
                assert keys == expected[changes[0].endpoint]
        for endpoint in expected:
            bit = self._index.bit(endpoint)
            assert bit and (bit in self.waiting or self._index.keys_of(bit) == expected[endpoint])
