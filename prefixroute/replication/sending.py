"""What a peer is owed: which changes bring its copy up to date, and how a change is cut to a budget.

Rules:
1. A part holds all keys of the change in its range [lower, upper). So parts can be checked one by one, may come again
   and in any order, and may be cut anew at other borders.
2. A receiver names the ranges that it lacks; any holder of the same versions goes on from there.
3. The smaller of delta and snapshot is sent.
4. Removed keys travel as ranks among the receiver's keys in the range: 1.1 bytes instead of 5 at 625 of 100k. Ranks are
   exact only at version `since`, which is the only one that a delta applies to.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..keys.keyset import Keys, within
from ..keys.rice import encode_sorted, encoded_bytes
from .wire import KEY_LIMIT, Update, VectorEntry, encode_part
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

EVERYTHING = ((0, KEY_LIMIT),)


class Debt(NamedTuple):
    """What one peer is owed of one endpoint: `change`, in these ranges [lower, upper) of keys.

    Addresses and zone travel with snapshots only. `lag` is how many versions behind the peer is.
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
            return [Owed(begun, tuple(want.missing))]
    if same_incarnation and entry.version > FIRST:
        whole = encoded_bytes(KEY_LIMIT, len(keys))
        steps = keys.successive(entry.version, MAX_STEPS)
        if steps and sum(size_bytes(step) for step in steps) <= whole:
            return [Owed(step) for step in steps]
        delta = keys.change(entry.version, keys.version)
        if delta is not None and size_bytes(delta) <= whole:
            return [Owed(delta)]
        if delta is None and now - keys.skipped(entry.version) < SKIPPED_S:
            return []
    return [Owed(keys.snapshot(entry.version if same_incarnation else 0))]


def size_bytes(change: Change) -> int:
    """Return an upper bound of the bytes that a change's keys take. O(1)."""
    return encoded_bytes(KEY_LIMIT, len(change.delta.added)) + encoded_bytes(change.n_base, len(change.delta.removed))


def cut(debt: Debt, lower: int, upper: int, room: int) -> tuple[bytes | None, int]:
    """Encode the part of a debt from key `lower` on that fits `room` bytes; return it and where the next one begins.

    (None, lower) when not even a small part fits. O(log n + part).
    """
    change = debt.change
    fitting = _fit(change, lower, upper, room - _frame_bytes(debt))
    if fitting is None:
        return None, lower
    end = 0 if fitting == KEY_LIMIT else fitting
    versions = (change.since, change.version, change.checksum, change.anchor_stride)
    codes = _codes(change, lower, fitting)
    update = Update(debt.endpoint, debt.incarnation, *versions, lower, end, *codes, *_addresses(debt))
    return encode_part(update), fitting


def fits_whole(debt: Debt, lower: int, upper: int, room: int) -> bool:
    """Whether all of a change is still to be sent, and certainly fits `room` bytes as one part. O(1)."""
    return _fits_whole(debt.change, lower, upper, room - _frame_bytes(debt))


def least_room(zoned: bool = False, addresses_bytes: int = 256 + 80, name_bytes: int = 80) -> int:
    """Return how many bytes a datagram must leave for updates, so that every transfer goes on, `zoned` or not."""
    return UPDATE_OVERHEAD_BYTES + name_bytes + addresses_bytes + LEAST_KEY_BYTES + (ZONE_BYTES if zoned else 0)


def _addresses(debt: Debt) -> tuple[str, str, str]:
    """What travels with snapshots only."""
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
    """The coded keys of one range. Those of the whole change are kept, since most receivers are owed the same."""
    whole = lower == 0 and upper == KEY_LIMIT
    if whole and change.codes:
        return change.codes[0]
    inside = change.delta.within(lower, upper)
    added, removed = encode_sorted(inside.added - np.uint64(lower), upper - lower), b""
    if len(inside.removed):
        base = _base(change)
        start, end = base.ranks(np.array([lower, upper], np.uint64)).tolist()
        removed = encode_sorted((base.ranks(inside.removed) - start).astype(np.uint64), end - start)
    if whole and change.codes is not None:
        change.codes.append((added, removed))
    return added, removed


def _base(change: Change) -> Base:
    assert change.base is not None, "only a change from a version removes keys"
    return change.base()


def _fit(change: Change, lower: int, upper: int, room: int) -> int | None:
    """The key up to which the part from `lower` on fits `room` bytes, or None when that is not worth a frame."""
    added, removed = change.delta.within(lower, upper)
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
        if _bound(base, within(added, lower, end), within(removed, lower, end), lower, end) <= room:
            few = n
        else:
            many = n - 1
    return int(keys[few]) if few else None


def _fit_added(added: Keys, lower: int, room: int) -> int | None:
    """As `_fit` where no key is removed, as in every snapshot: search for the number of keys that a part may have."""
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
