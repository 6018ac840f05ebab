"""What long prompts hashed to, so that the next turn of a conversation hashes only what is new in it.

Rules:
1. An entry is found by content alone: the key of the first stride (which depends on namespace and secret), the length,
   and the last bytes. It is used only if 128 bits of hash over all of the content agree. Nothing is taken from the
   caller's word.
2. What is remembered of a prompt ends at a multiple of `SPAN` strides, so that few lengths have to be tried.
3. The memo is bounded: the entry that was not used for longest goes first.

One hash over 65k tokens takes 7 to 10 us; the 128 chained ones of their strides 35 to 40.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

from xxhash import xxh3_128, xxh3_128_digest

SPAN = 8
"""Strides between the lengths that are remembered: 4,096 tokens in blocks of 16. Below that there is little to save."""

LOOKED_AT = 8
"""Lengths that are tried, the longest first: a turn of up to 32k new tokens finds the one before it."""

KEPT_STRIDES = 1 << 17
"""Stride ends of all entries together: 5 MB of them."""

_TAIL = 64


class _Entry(NamedTuple):
    """The keys of a prefix's stride ends, the root's first; the hash of all of it, and the state to go on from."""

    bounds: tuple[int, ...]
    digest: bytes
    state: Any


class ChainMemo:
    """The stride ends of the long prompts that were used last. `size` is the length of a stride in bytes."""

    __slots__ = ("_entries", "_most", "_size", "_strides")

    def __init__(self, size: int, most: int = KEPT_STRIDES) -> None:
        self._size = size
        self._most = most
        self._entries: OrderedDict[tuple[int, int, bytes], _Entry] = OrderedDict()
        self._strides = 0

    def __len__(self) -> int:
        """Number of prefixes remembered."""
        return len(self._entries)

    def recall(self, first: int, packed: bytes, strides: int) -> tuple[int, ...]:
        """Return the keys of a prompt's stride ends that are known, the root's first; none if none are.

        `first` is the key of its first stride, `strides` the most that are wanted. One hash over what is found.
        """
        most = strides - strides % SPAN
        for length in range(most, max(most - LOOKED_AT * SPAN, 0), -SPAN):
            entry = self._entries.get(self._name(first, packed, length))
            if entry is not None and xxh3_128_digest(memoryview(packed)[: length * self._size]) == entry.digest:
                return entry.bounds
        return ()

    def keep(self, bounds: list[int], packed: bytes) -> None:
        """Remember a prompt's stride ends, `bounds`, the root's first. Hashes what is new of it."""
        length = (len(bounds) - 1) // SPAN * SPAN
        if length < SPAN:
            return
        name = self._name(bounds[1], packed, length)
        known = self._entries.get(name)
        if known is not None and known.bounds[-1] == bounds[length]:
            self._entries.move_to_end(name)
            return
        done, state = 0, xxh3_128()
        for shorter in range(length - SPAN, max(length - LOOKED_AT * SPAN, 0), -SPAN):
            before = self._entries.get(self._name(bounds[1], packed, shorter))
            # The chained key depends on everything before it.
            if before is not None and before.bounds[-1] == bounds[shorter]:
                done, state = shorter, before.state.copy()
                break
        state.update(memoryview(packed)[done * self._size : length * self._size])
        if known is not None:
            self._strides -= len(known.bounds)
        self._entries[name] = _Entry(tuple(bounds[: length + 1]), state.digest(), state)
        self._entries.move_to_end(name)
        self._strides += length + 1
        while self._strides > self._most:
            _, oldest = self._entries.popitem(last=False)
            self._strides -= len(oldest.bounds)

    def _name(self, first: int, packed: bytes, length: int) -> tuple[int, int, bytes]:
        end = length * self._size
        return first, length, packed[end - _TAIL : end]

    def _check(self) -> None:
        """Assert that entries and their bound agree."""
        assert self._strides == sum(len(entry.bounds) for entry in self._entries.values()) <= self._most
        for (first, length, _), entry in self._entries.items():
            assert len(entry.bounds) == length + 1 and entry.bounds[1] == first and length % SPAN == 0
            assert entry.state.digest() == entry.digest
