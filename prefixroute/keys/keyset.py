"""Sets of keys: sorted arrays of wire keys, what two of them differ in, net changes, and the checksum of a set.

Rules:
1. Arrays ascend strictly, and are replaced, never written: who holds one holds a snapshot.
2. Two sorted runs are merged by a stable sort, which finds the runs: 4 ns a key, a fifth of what searching takes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Keys: TypeAlias = NDArray[np.uint64]
"""Integers, strictly ascending."""

NO_KEYS: Keys = np.empty(0, np.uint64)

_ONE = np.uint64(1)

MAX_UNIVERSE = 1 << 56
"""Keys are below it: one bit is left for the side that a key is of, and `rice` reads remainders eight bytes at a time
from any bit on, which leaves 57 bits."""


class Difference(NamedTuple):
    """What is in one of two sets only."""

    left: Keys
    right: Keys


def sorted_keys(keys: Collection[int]) -> Keys:
    """Return distinct keys as an array. 0.1 us a key."""
    array = np.fromiter(keys, np.uint64, len(keys))
    array.sort()
    return array


def within(keys: Keys, lower: int, upper: int) -> Keys:
    """Return the keys in [lower, upper). O(log n)."""
    start, end = np.searchsorted(keys, np.array([lower, upper], np.uint64))
    return keys[start:end]


def difference(left: Keys, right: Keys) -> Difference:
    """Return what only one of two sets has. O(n), 10 ns a key."""
    if not len(left) or not len(right):
        return Difference(left, right)
    both = np.concatenate([left << _ONE, (right << _ONE) | _ONE])
    both.sort(kind="stable")
    keys = both >> _ONE
    alone = np.ones(len(keys), np.bool_)
    twice = keys[1:] == keys[:-1]
    alone[1:] &= ~twice
    alone[:-1] &= ~twice
    keys, sides = keys[alone], both[alone] & _ONE != 0
    return Difference(keys[~sides], keys[sides])


def merge(left: Keys, right: Keys) -> Keys:
    """Return the union of two sets that share no key. O(n), 4 ns a key."""
    if not len(left) or not len(right):
        return left if len(left) else right
    merged = np.concatenate([left, right])
    merged.sort(kind="stable")
    return merged


def patched(keys: Keys, added: Keys, removed: Keys) -> Keys:
    """Return a set after a net change: all of `removed` are in it, and none of `added`. O(n) copied bytes."""
    if len(removed):
        stays = np.ones(len(keys), np.bool_)
        stays[np.searchsorted(keys, removed)] = False
        keys = keys[stays]
    return merge(keys, added)


def after(first: Difference, then: Difference) -> Difference:
    """Return what two net changes come to, one after the other; each is (added, removed)."""
    back, gone = difference(first.right, then.left), difference(first.left, then.right)
    return Difference(merge(gone.left, back.right), merge(back.left, gone.right))


class Delta(NamedTuple):
    """Keys that entered a set and keys that left it, net: a key that came and went again is in neither."""

    added: set[int]
    removed: set[int]

    def gain(self, key: int) -> None:
        """Note that `key` entered the set."""
        if key in self.removed:
            self.removed.remove(key)
        else:
            self.added.add(key)

    def lose(self, key: int) -> None:
        """Note that `key` left the set."""
        if key in self.added:
            self.added.remove(key)
        else:
            self.removed.add(key)

    def gain_all(self, keys: Iterable[int]) -> None:
        """Note that `keys`, each once, entered the set."""
        if not self.removed:
            self.added.update(keys)
            return
        entered = set(keys)
        back = entered & self.removed
        self.removed.difference_update(back)
        self.added.update(entered - back)

    def lose_all(self, keys: Iterable[int]) -> None:
        """Note that `keys`, each once, left the set."""
        if not self.added:
            self.removed.update(keys)
            return
        left = set(keys)
        back = left & self.added
        self.added.difference_update(back)
        self.removed.update(left - back)


def checksum(keys: Keys) -> int:
    """Order-free 64-bit checksum of a set of wire keys: the sum of their mixes. O(n), 3 ns a key."""
    return int(_mix(keys).sum(dtype=np.uint64)) if len(keys) else 0


def _mix(keys: Keys) -> Keys:
    """The splitmix64 finaliser (Steele, Lea, Flood, OOPSLA 2014)."""
    x = keys + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Keys = x ^ (x >> np.uint64(31))
    return mixed
