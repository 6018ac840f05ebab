"""Transfers: what brings a peer's copy up to date, cut to a budget, and put together again in whatever order it comes.

Rules:
1. A part holds all keys of the change in its range [lower, upper). So parts can be checked one by one, may come again,
   overlap, and come in any order, and may be cut anew at other borders.
2. A receiver names the ranges that it lacks; any holder of the same versions goes on from there.
3. The smaller of delta and snapshot is sent.
4. Removed keys travel as ranks among the receiver's keys in the range: 1.1 bytes instead of 5 at 625 of 100k. Ranks are
   exact only at version `since`, which is the only one that a delta applies to.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple, TypeAlias

import numpy as np

from ..errors import DecodeError
from ..keys.keyset import NO_CHANGE, NO_KEYS, KeyDelta, Keys, checksum, within
from ..keys.rice import decode_sorted, encode_sorted, encoded_bytes
from .wire import KEY_LIMIT, MAX_MISSING, Update, VectorEntry, encode_part
from .writer_set import Base, Change, Codes, WriterSet

UPDATE_OVERHEAD_BYTES = 80
"""Upper bound of an encoded update's fields beside its endpoint, addresses and keys."""

LEAST_KEY_BYTES = 128
"""No part is cut smaller than this many bytes of keys: it would be all frame."""

ZONE_BYTES = 40
"""Upper bound of a zone's label."""

FIRST = 1
"""Version of the empty set, with which every incarnation starts."""

MAX_STEPS = 8
"""Steps that are sent one by one; a receiver that is further behind gets the net change."""

SKIPPED_S = 1.0
"""For so long after a copy jumped over a version, it leaves receivers at that version to others."""

PART_KEYS = 48

Ranges: TypeAlias = tuple[tuple[int, int], ...]

EVERYTHING: Ranges = ((0, KEY_LIMIT),)


class Debt(NamedTuple):
    """What one peer is owed of one endpoint: `change`, in these ranges [lower, upper) of keys.

    Addresses and zone travel with snapshots only. `lag` is how many versions behind the peer is.
    """

    endpoint: str
    incarnation: int
    change: Change
    ranges: Ranges = EVERYTHING
    url: str = ""
    contact: str = ""
    lag: int = 0
    zone: str = ""


def owed(keys: WriterSet, incarnation: int, entry: VectorEntry, now: float) -> list[tuple[Change, Ranges]]:
    """Return what brings the sender of `entry` up to date, in order; nothing when other nodes can do it better.

    1. The rest of a transfer that it has begun, if this node can still make the same change.
    2. The owner's last few steps one by one, so that the receiver can pass them on.
    3. The net delta.
    4. A snapshot, where the log does not reach or the delta is larger. But a copy that jumped over the receiver's
       version just now sends none: a few bytes are under way from the nodes that did not jump.

    Before rules 2 and 4 two thirds of the bytes of 64 nodes were snapshots.
    """
    same_incarnation = entry.incarnation == incarnation
    want = entry.want
    if want is not None and want.incarnation == incarnation:
        begun = keys.snapshot_at(want.version) if want.since == 0 else keys.change(want.since, want.version)
        if begun is not None:
            return [(begun, tuple(want.missing))]
    if same_incarnation and entry.version > FIRST:
        whole = encoded_bytes(KEY_LIMIT, len(keys))
        steps = keys.successive(entry.version, MAX_STEPS)
        if steps and sum(size_bytes(step) for step in steps) <= whole:
            return [(step, EVERYTHING) for step in steps]
        delta = keys.change(entry.version, keys.version)
        if delta is not None and size_bytes(delta) <= whole:
            return [(delta, EVERYTHING)]
        if delta is None and now - keys.skipped(entry.version) < SKIPPED_S:
            return []
    return [(keys.snapshot(entry.version if same_incarnation else 0), EVERYTHING)]


def size_bytes(change: Change) -> int:
    """Return an upper bound of the bytes that a change's keys take. O(1)."""
    return encoded_bytes(KEY_LIMIT, len(change.delta.added)) + encoded_bytes(change.n_base, len(change.delta.removed))


def cut(debt: Debt, lower: int, upper: int, room: int) -> tuple[bytes | None, int]:
    """Encode the part of a debt from key `lower` on that fits `room` bytes; return it and where the next one begins.

    (None, lower) when not even a small part fits. O(log n + part).
    """
    fitting = _fit(debt, lower, upper, room)
    if fitting is None:
        return None, lower
    change = debt.change
    end = 0 if fitting == KEY_LIMIT else fitting
    versions = (change.since, change.version, change.checksum, change.anchor_stride)
    codes = _codes(change, lower, fitting)
    update = Update(debt.endpoint, debt.incarnation, *versions, lower, end, *codes, *_addresses(debt))
    return encode_part(update), fitting


def fits_whole(debt: Debt, lower: int, upper: int, room: int) -> bool:
    """Whether all of a change is still to be sent, and certainly fits `room` bytes as one part. O(1)."""
    if lower or upper != KEY_LIMIT:
        return False
    codes = debt.change.codes
    size = sum(map(len, codes[0])) if codes else size_bytes(debt.change)
    return size <= room - _frame_bytes(debt)


def least_room(zoned: bool = False, addresses_bytes: int = 256 + 80, name_bytes: int = 80) -> int:
    """Return how many bytes a datagram must leave for updates, so that every transfer goes on, `zoned` or not."""
    return UPDATE_OVERHEAD_BYTES + name_bytes + addresses_bytes + LEAST_KEY_BYTES + (ZONE_BYTES if zoned else 0)


def _addresses(debt: Debt) -> tuple[str, str, str]:
    """What travels with snapshots only."""
    return (debt.url, debt.contact, debt.zone) if debt.change.since == 0 else ("", "", "")


def _frame_bytes(debt: Debt) -> int:
    """Upper bound of what an update takes beside its keys."""
    return UPDATE_OVERHEAD_BYTES + sum(len(text.encode()) for text in (debt.endpoint, *_addresses(debt)))


def _codes(change: Change, lower: int, upper: int) -> Codes:
    """The coded keys of one range. Those of the whole change are kept, since most receivers are owed the same."""
    whole = lower == 0 and upper == KEY_LIMIT
    if whole and change.codes:
        return change.codes[0]
    inside = change.delta.within(lower, upper)
    added, removed = encode_sorted(inside.added - np.uint64(lower), upper - lower), b""
    if len(inside.removed):
        assert change.base is not None, "only a change from a version removes keys"
        base = change.base()
        start, end = base.ranks(np.array([lower, upper], np.uint64)).tolist()
        removed = encode_sorted((base.ranks(inside.removed) - start).astype(np.uint64), end - start)
    if whole and change.codes is not None:
        change.codes.append((added, removed))
    return added, removed


def _fit(debt: Debt, lower: int, upper: int, room: int) -> int | None:
    """The key up to which the part from `lower` on fits `room` bytes, or None when that is not worth a frame."""
    if fits_whole(debt, lower, upper, room):
        return upper
    added, removed = debt.change.delta.within(lower, upper)
    room -= _frame_bytes(debt)
    if room < LEAST_KEY_BYTES and (room < 0 or len(added) + len(removed)):
        return None
    base = debt.change.base() if debt.change.base is not None and len(removed) else None
    if _bound(base, added, removed, lower, upper) <= room:
        return upper
    # No key takes less than two bits, so no more than this many can fit.
    keys = added if base is None else np.sort(np.concatenate([added[: 4 * room], removed[: 4 * room]]))
    few, many = 0, min(len(keys) - 1, 4 * room)
    while few < many:
        n = (few + many + 1) // 2
        end = int(keys[n])
        if base is None:
            size = encoded_bytes(end - lower, n)
        else:
            size = _bound(base, within(added, lower, end), within(removed, lower, end), lower, end)
        few, many = (n, many) if size <= room else (few, n - 1)
    return int(keys[few]) if few else None


def _bound(base: Base | None, added: Keys, removed: Keys, lower: int, upper: int) -> int:
    """Upper bound of the bytes of these keys of a change, all those in [lower, upper)."""
    size = encoded_bytes(upper - lower, len(added))
    if base is not None and len(removed):
        start, end = base.ranks(np.array([lower, upper], np.uint64)).tolist()
        size += encoded_bytes(end - start, len(removed))
    return size


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

    Of a snapshot, `step` is what it changes in the keys held, compared part by part as the parts came, and `total` is
    the checksum of its keys. Both are None where that was not computed.
    """

    change: Change
    step: KeyDelta | None = None
    total: int | None = None


class _Part(NamedTuple):
    """The keys of one range up to `upper`; of a snapshot also the step from what the receiver held in that range."""

    upper: int
    delta: KeyDelta
    step: KeyDelta


class Assembly:
    """A change that arrives in parts."""

    def __init__(self, update: Update, now: float) -> None:
        self.incarnation = update.incarnation
        self.since = update.since
        self.version = update.version
        self.checksum = update.checksum
        self.anchor_stride = update.anchor_stride
        self.touched_at = now
        self.size = 0
        """Keys that have come; each part counts as `PART_KEYS` at least, since its arrays take as much."""
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
            part, step = delta.within(start, end), NO_CHANGE
            if not self.since:
                self._total += checksum(part.added)
                if self._base is not None:
                    step = KeyDelta.between(within(self._base, start, end), part.added)
            self._parts[start] = _Part(end, part, step)
            insort(self._lowers, start)
            self._covered += end - start
            self.size += max(PART_KEYS, part.size)
            self.touched_at = now
        if self._covered < KEY_LIMIT:
            return None
        parts = [self._parts[start] for start in self._lowers]
        whole = _joined([part.delta for part in parts])
        change = Change(self.since, self.version, whole, self.checksum, self.anchor_stride)
        if self.since:
            return Arrival(change)
        steps = _joined([part.step for part in parts]) if self._base is not None else None
        return Arrival(change, steps, self._total % 2**64)

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
