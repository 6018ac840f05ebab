"""Sorted arrays of wire keys as sets: what two differ in, and what a change makes of one.

Rules:
1. Arrays ascend strictly, and are replaced, never written: who holds one holds a snapshot.
2. Two sorted runs are merged by a stable sort, which finds the runs: 4 ns a key, a fifth of what searching takes.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from .rice import MAX_UNIVERSE, Keys

NO_KEYS: Keys = np.empty(0, np.uint64)

_ONE = np.uint64(1)

assert MAX_UNIVERSE <= 1 << 63, "a key leaves a bit for the side that it is of"


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
