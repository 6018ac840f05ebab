"""Feeds the merged index in slices: what replicas gained and lost enters it a few thousand keys at a time.

A replica changes at once, an array for another; its 100,000 keys in the index take 30 ms, and nobody waits so long.

Rules:
1. A call into the node does `SLICE_KEYS` keys at most; what is left is done by the calls that follow. Slices are
   bounded by keys, never by time, so that the same calls do the same.
2. The changes of one endpoint go in in their order. So the index has for each key what the endpoint held before or
   what it holds now, and a landing is a prefix that was held at one of the versions between.
3. While changes wait, the endpoint has the coarser of the anchor strides: keys of the finer one are found by it too.
4. An endpoint that leaves is out of the index's names at once, and what it was to gain is dropped. Its bit is given
   anew when its last key is cleared.

Memory: 8 bytes a key that waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np

from ..keys.keyset import Keys
from .index import MergedIndex

SLICE_KEYS = 4096
"""Keys that one call does: 1.5 ms."""


class _Job:
    """A change of one endpoint's keys that waits."""

    __slots__ = ("added", "anchor_stride", "endpoint", "gone", "removed")

    def __init__(self, endpoint: str, added: Keys, removed: Keys, anchor_stride: int, gone: Iterator[int]) -> None:
        self.endpoint = endpoint
        self.added = added
        self.removed = removed
        self.anchor_stride = anchor_stride
        self.gone = gone
        """More keys that are removed."""

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
    """Brings changes into an index. Call `begin`, then whatever takes changes, then `go_on`, in each call of a node."""

    __slots__ = ("_index", "_jobs", "_left", "_retired")

    def __init__(self, index: MergedIndex) -> None:
        self._index = index
        self._jobs: dict[int, deque[_Job]] = {}
        """By bit; the endpoint that has waited longest is first."""
        self._retired: set[int] = set()
        self._left = 0

    @property
    def waiting(self) -> bool:
        """Whether anything is left to do."""
        return bool(self._jobs)

    def begin(self) -> None:
        """Begin a call: it may do one slice."""
        self._left = SLICE_KEYS

    def take(self, endpoint: str, added: Keys, removed: Keys, anchor_stride: int) -> None:
        """Take keys that an endpoint gained and lost, at the anchor stride that it has from now on.

        They are in the index on return if the call has as many keys left, and nothing else of the endpoint waits.
        """
        index = self._index
        bit, n = index.bit(endpoint), len(added) + len(removed)
        if anchor_stride > index.stride(bit):
            index.set_stride(endpoint, anchor_stride)
        if bit in self._jobs or n > self._left:
            self._jobs.setdefault(bit, deque()).append(_Job(endpoint, added, removed, anchor_stride, iter(())))
            return
        self._left -= n
        index.mark(bit, added.tolist(), removed.tolist())
        index.set_stride(endpoint, anchor_stride)

    def retire(self, endpoint: str, keys: Iterable[int] = ()) -> None:
        """Take an endpoint out of the index; `keys` are those that it has beside what waits to be removed."""
        bit = self._index.retire(endpoint)
        jobs = self._jobs.setdefault(bit, deque())
        for job in jobs:
            job.added = job.added[:0]
        jobs.append(_Job(endpoint, _NONE, _NONE, 1, iter(keys)))
        self._retired.add(bit)

    def go_on(self) -> None:
        """Do what the call has keys left for."""
        while self._jobs and self._left > 0:
            bit, jobs = next(iter(self._jobs.items()))
            job = jobs[0]
            keys = job.take(self._left)
            if keys is not None:
                self._index.mark(bit, *keys)
                self._left -= len(keys[0]) + len(keys[1])
                continue
            if bit not in self._retired:
                self._index.set_stride(job.endpoint, max(job.anchor_stride for job in jobs))
            jobs.popleft()
            if not jobs:
                del self._jobs[bit]
                if bit in self._retired:
                    self._retired.remove(bit)
                    self._index.release(bit)

    def _check(self, expected: dict[str, set[int]]) -> None:
        """Assert that the index will hold exactly `expected` (endpoint -> wire keys) when nothing waits. O(keys)."""
        if not self._jobs:
            self._index._check(expected)
            return
        for bit, jobs in self._jobs.items():
            keys = self._index.keys_of(bit)
            for job in jobs:
                keys.difference_update(job.removed.tolist())
                keys.update(job.added.tolist())
            if bit not in self._retired:
                assert keys == expected[jobs[0].endpoint]
        for endpoint in expected:
            bit = self._index.bit(endpoint)
            assert bit and (bit in self._jobs or self._index.keys_of(bit) == expected[endpoint])


_NONE: Keys = np.empty(0, np.uint64)
