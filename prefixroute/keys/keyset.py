"""Sets of keys: sorted arrays of wire keys, what two of them differ in, net changes, counted keys, and the checksum.

| type | meaning | keys |
|---|---|---|
| `Delta` | one net change of a set, while it is being collected key by key | sets of ints |
| `KeyDelta` | one net change of a set, ready to be applied, sent or logged | sorted arrays |
| `Difference` | what only one of two sets has, when two sets are compared | sorted arrays |
| `KeyCounts` | how many blocks each key stands for, where no other set of these keys is kept | dict |
| `Repeats` | the blocks beyond the first of a key, for callers that know whether the key is there already | dict |

A delta is always (added, removed), in this order. It has two types because Python 3.10 has no generic named tuples, and
because collecting needs sets while applying needs arrays: `Delta.sorted` leads from one to the other.

Rules:
1. Arrays ascend strictly, and are replaced, never written. So a reference to an array is a snapshot.
2. Two sorted arrays are merged by a stable sort, which finds the sorted runs: 4 ns a key, a fifth of what searching
   takes.
3. Several blocks may share a key: it comes with the first of them and goes with the last. Among 100,000 blocks 1.8e-5
   pairs share 48 bits of hash: next to no key is shared, but none may be dropped too early.
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
"""Keys are below it. `difference` needs one bit beside a key to tell the two sets apart, and `rice` reads remainders
eight bytes at a time from any bit on, which leaves 57 bits."""


class Difference(NamedTuple):
    """The result of comparing two sets: the keys that only the left one has, and those that only the right one has."""

    left: Keys
    right: Keys


class KeyDelta(NamedTuple):
    """One net change of a set, as arrays: no key is in both."""

    added: Keys
    removed: Keys

    @classmethod
    def between(cls, before: Keys, after: Keys) -> KeyDelta:
        """Return the change that leads from one set to another. O(n), 10 ns a key."""
        return cls(*difference(after, before))

    @property
    def size(self) -> int:
        """Number of changed keys."""
        return len(self.added) + len(self.removed)

    def then(self, later: KeyDelta) -> KeyDelta:
        """Return the net change of this one and a later one together. O(n), 20 ns a key."""
        back, gone = difference(self.removed, later.added), difference(self.added, later.removed)
        return KeyDelta(merge(gone.left, back.right), merge(back.left, gone.right))

    def reversed(self) -> KeyDelta:
        """Return the change that undoes this one."""
        return KeyDelta(self.removed, self.added)

    def within(self, lower: int, upper: int) -> KeyDelta:
        """Return what this change does to the keys in [lower, upper). O(log n)."""
        return KeyDelta(within(self.added, lower, upper), within(self.removed, lower, upper))

    def applied(self, keys: Keys) -> Keys:
        """Return a set after this change: all of `removed` must be in it, and none of `added`. O(n) copied bytes."""
        if len(self.removed):
            stays = np.ones(len(keys), np.bool_)
            stays[np.searchsorted(keys, self.removed)] = False
            keys = keys[stays]
        return merge(keys, self.added)


NO_CHANGE = KeyDelta(NO_KEYS, NO_KEYS)


class Delta(NamedTuple):
    """One net change of a set while it is collected: a key that came and went again is in neither set."""

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
        _move(keys, self.added, self.removed)

    def lose_all(self, keys: Iterable[int]) -> None:
        """Note that `keys`, each once, left the set."""
        _move(keys, self.removed, self.added)

    def sorted(self) -> KeyDelta:
        """Return the change as arrays. 0.1 us a key."""
        return KeyDelta(sorted_keys(self.added), sorted_keys(self.removed))


def _move(keys: Iterable[int], moved: set[int], opposite: set[int]) -> None:
    """Add `keys` to `moved`, but for those that only take back what `opposite` has."""
    if opposite:
        keys = set(keys)
        back = keys & opposite
        opposite -= back
        keys -= back
    moved.update(keys)


class KeyCounts(dict[int, int]):
    """Key -> the number of blocks that it stands for. O(1) a call."""

    def gain(self, key: int) -> bool:
        """Count one more block of `key`; return whether it is the first."""
        n = self[key] = self.get(key, 0) + 1
        return n == 1

    def lose(self, key: int) -> bool:
        """Count one block less of `key`, which has one; return whether it was the last."""
        n = self[key] = self[key] - 1
        if not n:
            del self[key]
        return not n


class Repeats(dict[int, int]):
    """Key -> its blocks beyond the first: empty while no two blocks share a key. O(1) a call."""

    def gain(self, key: int, there: bool) -> bool:
        """Count one more block of `key`, which is `there` already or not; return whether it is the first."""
        if there:
            self[key] = self.get(key, 0) + 1
        return not there

    def lose(self, key: int) -> bool:
        """Count one block less of `key`, which is there; return whether it was the last."""
        more = self.get(key, 0)
        if more > 1:
            self[key] = more - 1
        elif more:
            del self[key]
        return not more


def sorted_keys(keys: Collection[int]) -> Keys:
    """Return distinct keys as an array. 0.1 us a key."""
    array = np.fromiter(keys, np.uint64, len(keys))
    array.sort()
    return array


def within(keys: Keys, lower: int, upper: int) -> Keys:
    """Return the keys in [lower, upper). O(log n), and O(1) where that is all of them."""
    if not len(keys) or (lower <= keys[0] and keys[-1] < upper):
        return keys
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


def checksum(keys: Keys) -> int:
    """Return the 64-bit checksum of a set of wire keys: the sum of their mixes, in any order. O(n), 3 ns a key."""
    return int(_mix(keys).sum(dtype=np.uint64)) if len(keys) else 0


def _mix(keys: Keys) -> Keys:
    """The splitmix64 finaliser (Steele, Lea, Flood, OOPSLA 2014)."""
    x = keys + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Keys = x ^ (x >> np.uint64(31))
    return mixed
