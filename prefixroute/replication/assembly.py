"""Assembly: how the parts of a transfer become a whole change again, in whatever order they come.

Rules:
1. A part holds all keys of the change in its range [lower, upper), so parts are checked, repeated, reordered and cut
   anew at other borders freely.
2. The ranges that are lacking are named to the sender; any holder of the same versions goes on from there.
3. Keys that go are told by their rank among the receiver's keys in the range. That is exact only at version `since`,
   which is the only one that a delta applies to.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from ..errors import DecodeError
from ..keys.keyset import NO_KEYS, Difference, Keys, checksum, difference
from ..keys.rice import decode_sorted
from .sending import _between
from .wire import KEY_LIMIT, MAX_MISSING, Update
from .writer_set import Change

PART_KEYS = 48
"""A part's arrays take as much as so many keys."""


def decode_keys(update: Update, held: Keys) -> tuple[Keys, Keys]:
    """Return the keys that an update adds and removes; `held` is what the receiver holds at its version `since`.

    Raises `DecodeError` of kind ``keys``.
    """
    lower, upper = update.lower, update.upper or KEY_LIMIT
    if upper <= lower:
        raise DecodeError("keys", "an update of an empty range")
    added = decode_sorted(update.added, upper - lower) + np.uint64(lower)
    if not update.removed:
        return added, NO_KEYS
    inside = _between(held, lower, upper) if update.since else NO_KEYS
    return added, inside[decode_sorted(update.removed, len(inside)).astype(np.int64)]


class Arrival(NamedTuple):
    """A change that has come whole. `step` is what a snapshot makes of `base`, compared part by part as they came.

    `total` is the checksum of a snapshot's keys, None where it was not summed up.
    """

    change: Change
    base: Keys
    step: Difference | None
    total: int | None = None

    def step_from(self, held: Keys) -> Difference:
        """Return what the snapshot adds to, and removes from, what is held."""
        if self.step is not None and self.base is held:
            return self.step
        return difference(self.change.added, held)


class _Part(NamedTuple):
    """The keys of one range up to `upper`; of a snapshot, what it differs in from what was held, too."""

    upper: int
    added: Keys
    removed: Keys
    step: Difference


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
        """Keys that have come, each part counted for `PART_KEYS` at least: what it takes to keep them."""
        self._covered = 0
        # Disjoint ranges: their lower ends in order, and by lower end.
        self._lowers: list[int] = []
        self._parts: dict[int, _Part] = {}
        self._base: Keys | None = NO_KEYS
        """What the parts of a snapshot were compared with; None when that was not one set."""
        self._total = 0

    def is_of(self, update: Update) -> bool:
        """Whether an update is a part of this transfer."""
        mine = (self.incarnation, self.since, self.version)
        return mine == (update.incarnation, update.since, update.version)

    def offer(
        self, lower: int, upper: int, added: Keys, removed: Keys, now: float, held: Keys = NO_KEYS
    ) -> Arrival | None:
        """Take what is new in a part; return the whole change once it is there. O(part), and O(keys) copied at last.

        `held` is what the receiver holds now.
        """
        if not self._parts:
            self._base = held
        elif self._base is not held:
            self._base = None
        for start, end in list(self._missing(lower, upper)):
            part = self._part(start, end, added, removed)
            self._parts[start] = part
            insort(self._lowers, start)
            self._covered += end - start
            self.size += max(PART_KEYS, len(part.added) + len(part.removed))
            self.touched_at = now
        if self._covered < KEY_LIMIT:
            return None
        parts = [self._parts[start] for start in self._lowers]
        adds, removes = _joined([part.added for part in parts]), _joined([part.removed for part in parts])
        change = Change(self.since, self.version, adds, removes, self.checksum, self.anchor_stride)
        if self.since:
            return Arrival(change, NO_KEYS, None)
        total = self._total % 2**64
        if self._base is None:
            return Arrival(change, NO_KEYS, None, total)
        gained, lost = _joined([part.step.left for part in parts]), _joined([part.step.right for part in parts])
        return Arrival(change, self._base, Difference(gained, lost), total)

    def _part(self, lower: int, upper: int, added: Keys, removed: Keys) -> _Part:
        added, removed = _between(added, lower, upper), _between(removed, lower, upper)
        if self.since:
            return _Part(upper, added, removed, _NO_STEP)
        self._total += checksum(added)
        if self._base is None:
            return _Part(upper, added, removed, _NO_STEP)
        return _Part(upper, added, removed, difference(added, _between(self._base, lower, upper)))

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


def _joined(arrays: list[Keys]) -> Keys:
    return np.concatenate([keys for keys in arrays if len(keys)] or [NO_KEYS])


_NO_STEP = Difference(NO_KEYS, NO_KEYS)
