"""Transfers: which change a peer is owed, how it is cut to a budget, and how its parts become whole again.

Rules:
1. A part holds all keys of the change in its range [lower, upper), so parts are checked, repeated, reordered and cut
   anew at other borders freely.
2. A receiver names the ranges that it lacks; any holder of the same versions goes on from there.
3. The smaller of delta and snapshot is sent.
4. Keys that go are told by their rank among the receiver's keys in the range: 1.1 bytes instead of 5 at 625 of 100k.
   That is exact only at version `since`, which is the only one that a delta applies to.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from ..errors import DecodeError
from ..keys.keyset import NO_KEYS, Difference, difference, within
from ..keys.rice import Keys, decode_sorted, encode_sorted, encoded_bytes
from .replica import Base, Change, Codes, WriterSet
from .wire import KEY_LIMIT, MAX_MISSING, Update, VectorEntry, checksum, encode_part

UPDATE_OVERHEAD_BYTES = 80
"""Upper bound of an encoded update's fields beside its endpoint, addresses and keys."""

LEAST_KEY_BYTES = 128
"""No part is cut smaller than this many bytes of keys: it would be all frame."""

ZONE_BYTES = 40
"""Upper bound of a zone's label."""

PART_KEYS = 48
"""A part's arrays take as much as so many keys."""

FIRST = 1
"""The version at which every life begins, with no keys: who holds it holds nothing."""

MAX_STEPS = 8
"""Steps that are sent one by one; who is further behind gets the net change."""

SKIPPED_S = 1.0
"""For so long after it skipped a version, a copy leaves those that are at it to others."""

EVERYTHING = ((0, KEY_LIMIT),)


class Debt(NamedTuple):
    """What one peer is owed of one endpoint: `change`, in these ranges of keys. Addresses and zone ride in snapshots.

    `lag` are the versions that the peer lacks of the endpoint.
    """

    endpoint: str
    incarnation: int
    change: Change
    ranges: tuple[tuple[int, int], ...] = EVERYTHING
    url: str = ""
    contact: str = ""
    lag: int = 0
    zone: str = ""


class Owed(NamedTuple):
    """A change that brings a receiver up to date, and the ranges of it that are owed."""

    change: Change
    ranges: tuple[tuple[int, int], ...] = EVERYTHING


def owed(keys: WriterSet, incarnation: int, entry: VectorEntry, now: float) -> list[Owed]:
    """Return what brings the sender of `entry` up to date, in order; nothing when others can do it better.

    That is the rest of a transfer it has begun, if its versions can still be served; else the last few steps of the
    owner's, one by one, so that the receiver can pass them on; else a net delta, or a snapshot where the log does not
    reach or the delta is larger. But a copy that skipped the receiver's version only just now sends no snapshot: a few
    bytes are under way from those that did not. (Before these two rules two thirds of the bytes of 64 nodes were
    snapshots.)
    """
    same_life = entry.incarnation == incarnation
    want = entry.want
    if want is not None and want.incarnation == incarnation:
        begun = keys.snapshot_at(want.version) if want.since == 0 else keys.change(want.since, want.version)
        if begun is not None:
            return [Owed(begun, tuple(want.missing))]
    if same_life and entry.version > FIRST:
        whole = encoded_bytes(KEY_LIMIT, len(keys))
        steps = keys.successive(entry.version, MAX_STEPS)
        if steps and sum(size_bytes(step) for step in steps) <= whole:
            return [Owed(step) for step in steps]
        delta = keys.change(entry.version, keys.version)
        if delta is not None and size_bytes(delta) <= whole:
            return [Owed(delta)]
        if delta is None and now - keys.skipped(entry.version) < SKIPPED_S:
            return []
    return [Owed(keys.snapshot(entry.version if same_life else 0))]


def size_bytes(change: Change) -> int:
    """Return an upper bound of what a change's keys take. O(1)."""
    return encoded_bytes(KEY_LIMIT, len(change.added)) + encoded_bytes(change.n_base, len(change.removed))


def cut(debt: Debt, lower: int, upper: int, room: int) -> tuple[bytes | None, int]:
    """Encode the part of a debt from key `lower` on that fits `room` bytes; return it and where the next one begins.

    (None, lower) when not even a small part fits. O(log n + part).
    """
    change = debt.change
    fitting = _fit(change, lower, upper, room - _frame_bytes(debt))
    if fitting is None:
        return None, lower
    end = 0 if fitting == KEY_LIMIT else fitting
    versions = (change.since, change.version, change.checksum, change.every)
    codes = _codes(change, lower, fitting)
    update = Update(debt.endpoint, debt.incarnation, *versions, lower, end, *codes, *_addresses(debt))
    return encode_part(update), fitting


def fits_whole(debt: Debt, lower: int, upper: int, room: int) -> bool:
    """Whether a whole change is left to send and certainly fits `room` bytes as one part. O(1)."""
    return _fits_whole(debt.change, lower, upper, room - _frame_bytes(debt))


def least_room(zoned: bool = False, addresses_bytes: int = 256 + 80, name_bytes: int = 80) -> int:
    """Return how many bytes a datagram must leave for updates, so that every transfer goes on, `zoned` or not."""
    return UPDATE_OVERHEAD_BYTES + name_bytes + addresses_bytes + LEAST_KEY_BYTES + (ZONE_BYTES if zoned else 0)


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


def _addresses(debt: Debt) -> tuple[str, str, str]:
    """What rides in snapshots."""
    return (debt.url, debt.contact, debt.zone) if debt.change.since == 0 else ("", "", "")


def _frame_bytes(debt: Debt) -> int:
    """Upper bound of what an update takes beside its keys."""
    return UPDATE_OVERHEAD_BYTES + sum(len(text.encode()) for text in (debt.endpoint, *_addresses(debt)))


def _fits_whole(change: Change, lower: int, upper: int, room: int) -> bool:
    if lower or upper != KEY_LIMIT:
        return False
    size = sum(map(len, change.codes[0])) if change.codes else size_bytes(change)
    return size <= room


def _codes(change: Change, lower: int, upper: int) -> Codes:
    """The coded keys of one range, kept when it is the whole: most receivers are owed the same."""
    whole = lower == 0 and upper == KEY_LIMIT
    if whole and change.codes:
        return change.codes[0]
    added = encode_sorted(_between(change.added, lower, upper) - np.uint64(lower), upper - lower)
    removed = b""
    gone = _between(change.removed, lower, upper)
    if len(gone):
        base = _base(change)
        start, end = base.ranks(np.array([lower, upper], np.uint64)).tolist()
        removed = encode_sorted((base.ranks(gone) - start).astype(np.uint64), end - start)
    if whole and change.codes is not None:
        change.codes.append((added, removed))
    return added, removed


def _base(change: Change) -> Base:
    assert change.base is not None, "only a change from a version removes keys"
    return change.base()


def _fit(change: Change, lower: int, upper: int, room: int) -> int | None:
    """The key up to which the part from `lower` on fits `room` bytes, or None when that is not worth a frame."""
    added, removed = _between(change.added, lower, upper), _between(change.removed, lower, upper)
    if _fits_whole(change, lower, upper, room):
        return upper
    if room < LEAST_KEY_BYTES and (room < 0 or len(added) + len(removed)):
        return None
    base = _base(change) if len(removed) else None
    if _bound(base, added, removed, lower, upper) <= room:
        return upper
    if base is None:
        return _fit_added(added, lower, room)
    # No key takes less than two bits, so no more than this many can fit.
    keys = np.concatenate([added[: 4 * room], removed[: 4 * room]])
    keys.sort()
    few, many = 0, min(len(keys) - 1, 4 * room)
    while few < many:
        n = (few + many + 1) // 2
        end = int(keys[n])
        if _bound(base, _between(added, lower, end), _between(removed, lower, end), lower, end) <= room:
            few = n
        else:
            many = n - 1
    return int(keys[few]) if few else None


def _fit_added(added: Keys, lower: int, room: int) -> int | None:
    """The same where no key is removed, which every snapshot is: how many keys a part has is what is looked for."""
    few, many = 0, min(len(added) - 1, 4 * room)
    while few < many:
        n = (few + many + 1) // 2
        if encoded_bytes(int(added[n]) - lower, n) <= room:
            few = n
        else:
            many = n - 1
    return int(added[few]) if few else None


def _bound(base: Base | None, added: Keys, removed: Keys, lower: int, upper: int) -> int:
    """Upper bound of the bytes of these keys of a change, all those in [lower, upper)."""
    size = encoded_bytes(upper - lower, len(added))
    if base is not None and len(removed):
        start, end = base.ranks(np.array([lower, upper], np.uint64)).tolist()
        size += encoded_bytes(end - start, len(removed))
    return size


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
        "checksum",
        "every",
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
        self.every = update.every
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
        change = Change(self.since, self.version, adds, removes, self.checksum, self.every)
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


def _between(keys: Keys, lower: int, upper: int) -> Keys:
    """The keys within [lower, upper)."""
    return keys if lower == 0 and upper == KEY_LIMIT else within(keys, lower, upper)


def _joined(arrays: list[Keys]) -> Keys:
    return np.concatenate([keys for keys in arrays if len(keys)] or [NO_KEYS])


_NO_STEP = Difference(NO_KEYS, NO_KEYS)
