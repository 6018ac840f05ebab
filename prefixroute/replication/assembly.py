"""Assembly: how the parts of a transfer become a whole change again, in whatever order they come.

Rules:
1. A part holds all keys of the change in its range [lower, upper). So parts may come again, overlap, and come in any
   order, cut at any borders.
2. The ranges that are lacking are named to the sender; any holder of the same versions goes on from there.
3. Removed keys come as ranks among the receiver's keys in the range. Ranks are exact only at version `since`, which is
   the only one that a delta applies to.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from ..errors import DecodeError
from ..keys.keyset import NO_CHANGE, NO_KEYS, KeyDelta, Keys, checksum, within
from ..keys.rice import decode_sorted
from .wire import KEY_LIMIT, MAX_MISSING, Update
from .writer_set import Change

PART_KEYS = 48
"""A part's arrays take as much as so many keys."""


def decode_keys(update: Update, held: Keys) -> KeyDelta:
    """Return what an update adds and removes; `held` is what the receiver holds at its version `since`.

    Raises `DecodeError` of kind ``keys``.
    """
    lower, upper = update.lower, update.upper or KEY_LIMIT
    if upper <= lower:
        raise DecodeError("keys", "an update of an empty range")
    added = decode_sorted(update.added, upper - lower) + np.uint64(lower)
    if not update.removed:
        return KeyDelta(added, NO_KEYS)
    inside = within(held, lower, upper) if update.since else NO_KEYS
    return KeyDelta(added, inside[decode_sorted(update.removed, len(inside)).astype(np.int64)])


class Arrival(NamedTuple):
    """A change that has arrived whole.

    Of a snapshot, `step` is what it changes in `base`, compared part by part as the parts came, and `total` is the
    checksum of its keys. Both are None where that was not computed.
    """

    change: Change
    base: Keys = NO_KEYS
    step: KeyDelta | None = None
    total: int | None = None

    def step_from(self, held: Keys) -> KeyDelta:
        """Return what the snapshot changes in `held`."""
        if self.step is not None and self.base is held:
            return self.step
        return KeyDelta.between(held, self.change.delta.added)


class _Part(NamedTuple):
    """The keys of one range up to `upper`; of a snapshot also the step from what the receiver held in that range."""

    upper: int
    delta: KeyDelta
    step: KeyDelta


class Assembly:
    """A change that arrives in parts, each the keys of one range; parts may come twice, overlap, and in any order."""

    __slots__ = (
        "_base",
        "_covered",
        "_lowers",
        "_parts",
        "_total",
        "anchor_stride",
        "checksum",
        "incarnation",
        "since",
        "size",
        "touched_at",
        "version",
    )

    def __init__(self, update: Update, now: float) -> None:
        self.incarnation = update.incarnation
        self.since = update.since
        self.version = update.version
        self.checksum = update.checksum
        self.anchor_stride = update.anchor_stride
        self.touched_at = now
        self.size = 0
        """Keys that have come; each part counts as `PART_KEYS` at least, since that is what it takes to keep it."""
        self._covered = 0
        # Disjoint ranges: their lower bounds in order, and the parts by lower bound.
        self._lowers: list[int] = []
        self._parts: dict[int, _Part] = {}
        self._base: Keys | None = NO_KEYS
        """The set that the parts of a snapshot were compared with; None when it changed between two parts."""
        self._total = 0

    def is_of(self, update: Update) -> bool:
        """Whether an update is a part of this transfer."""
        mine = (self.incarnation, self.since, self.version)
        return mine == (update.incarnation, update.since, update.version)

    def offer(self, lower: int, upper: int, delta: KeyDelta, now: float, held: Keys = NO_KEYS) -> Arrival | None:
        """Take what is new in a part; return the whole change once it is there. O(part), and O(keys) copied at last.

        `held` is what the receiver holds now.
        """
        if not self._parts:
            self._base = held
        elif self._base is not held:
            self._base = None
        for start, end in list(self._missing(lower, upper)):
            part = self._part(start, end, delta)
            self._parts[start] = part
            insort(self._lowers, start)
            self._covered += end - start
            self.size += max(PART_KEYS, part.delta.size)
            self.touched_at = now
        if self._covered < KEY_LIMIT:
            return None
        parts = [self._parts[start] for start in self._lowers]
        whole = _joined([part.delta for part in parts])
        change = Change(self.since, self.version, whole, self.checksum, self.anchor_stride)
        if self.since:
            return Arrival(change)
        total = self._total % 2**64
        if self._base is None:
            return Arrival(change, total=total)
        return Arrival(change, self._base, _joined([part.step for part in parts]), total)

    def _part(self, lower: int, upper: int, delta: KeyDelta) -> _Part:
        delta = delta.within(lower, upper)
        if self.since:
            return _Part(upper, delta, NO_CHANGE)
        self._total += checksum(delta.added)
        if self._base is None:
            return _Part(upper, delta, NO_CHANGE)
        return _Part(upper, delta, KeyDelta.between(within(self._base, lower, upper), delta.added))

    def missing(self, limit: int = MAX_MISSING) -> list[tuple[int, int]]:
        """Return the first `limit` ranges of which nothing has come."""
        return list(islice(self._missing(0, KEY_LIMIT), limit))

    def _missing(self, lower: int, upper: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges within [lower, upper) of which nothing has come."""
        i = bisect_right(self._lowers, lower)
        if i:
            lower = max(lower, self._parts[self._lowers[i - 1]].upper)
        while lower < upper:
            start = self._lowers[i] if i < len(self._lowers) else KEY_LIMIT
            if lower < start:
                yield lower, min(start, upper)
            lower = self._parts[start].upper if start < upper else upper
            i += 1


def _joined(deltas: list[KeyDelta]) -> KeyDelta:
    """The changes of disjoint ascending ranges as one."""
    sides = ([delta.added for delta in deltas], [delta.removed for delta in deltas])
    return KeyDelta(*(np.concatenate([keys for keys in side if len(keys)] or [NO_KEYS]) for side in sides))
