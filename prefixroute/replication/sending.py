"""Sending: which change a peer is owed, how it is cut to a budget, and how an answer is packed into datagrams.

Rules:
1. A part holds all keys of the change in its range [lower, upper), so parts are checked, repeated, reordered and cut
   anew at other borders freely.
2. A receiver names the ranges that it lacks; any holder of the same versions goes on from there.
3. The smaller of delta and snapshot is sent.
4. Keys that go are told by their rank among the receiver's keys in the range: 1.1 bytes instead of 5 at 625 of 100k.
   That is exact only at version `since`, which is the only one that a delta applies to.
5. Each datagram of an answer fits `datagram_bytes` after encoding, and all together fit `burst_bytes`. The first one is
   what the message is; what goes on is an ACK, which asks for nothing.
6. A change that fits an empty datagram is not cut for want of room in this one: half of it is of no use if the other
   half is lost, and with 16 busy nodes and 30 % loss transfers then began faster than they ended.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import NamedTuple

import msgspec
import numpy as np

from ..keys.keyset import Keys, within
from ..keys.rice import encode_sorted, encoded_bytes
from .wire import KEY_LIMIT, Kind, Message, Update, VectorEntry, encode_part, overhead_bytes
from .writer_set import Base, Change, Codes, WriterSet

UPDATE_OVERHEAD_BYTES = 80
"""Upper bound of an encoded update's fields beside its endpoint, addresses and keys."""


LEAST_KEY_BYTES = 128
"""No part is cut smaller than this many bytes of keys: it would be all frame."""


ZONE_BYTES = 40
"""Upper bound of a zone's label."""


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
    """Whether a whole change is left to send and certainly fits `room` bytes as one part. O(1)."""
    return _fits_whole(debt.change, lower, upper, room - _frame_bytes(debt))


def least_room(zoned: bool = False, addresses_bytes: int = 256 + 80, name_bytes: int = 80) -> int:
    """Return how many bytes a datagram must leave for updates, so that every transfer goes on, `zoned` or not."""
    return UPDATE_OVERHEAD_BYTES + name_bytes + addresses_bytes + LEAST_KEY_BYTES + (ZONE_BYTES if zoned else 0)


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


class Burst:
    """Packs one answer. `put(kind, head, entries, updates)` takes a datagram that is full; it returns its bytes."""

    def __init__(
        self,
        kind: Kind,
        head: Message,
        datagram_bytes: int,
        burst_bytes: int,
        put: Callable[[Kind, Message, list[bytes], list[bytes]], int],
    ) -> None:
        self._kind = kind
        self._head = head
        self._rest = Message(head.sender, domain=head.domain, contact=head.contact)
        self._room = datagram_bytes - overhead_bytes(head)
        self._empty = datagram_bytes - overhead_bytes(self._rest)
        self._left = burst_bytes - datagram_bytes
        self._put = put
        self._entries: list[bytes] = []
        self._updates: list[bytes] = []
        self.too_long = 0
        """Updates that no datagram has room for: names and urls of a node that may send larger ones."""

    def tell(self, vector: Iterable[VectorEntry], whole: int) -> int:
        """Pack what fits of a vector; return how many entries that is. All go in the first datagram.

        `whole` entries list everything that the sender knows, and the message then says so.
        """
        for entry in vector:
            encoded = encode_part(entry)
            if len(encoded) > self._room:
                break
            self._entries.append(encoded)
            self._room -= len(encoded)
        self._head = msgspec.structs.replace(self._head, complete=len(self._entries) == whole)
        return len(self._entries)

    def owe(self, debt: Debt) -> Generator[None, None, bool]:
        """Pack a debt, all its ranges, a datagram at each step; return False when the burst is used up."""
        for lower, upper in debt.ranges:
            at = lower
            while at < upper:
                part, end = (None, at) if self._waits(debt, at, upper) else cut(debt, at, upper, self._room)
                if part is not None:
                    self._updates.append(part)
                    self._room -= len(part)
                    at = end
                elif not self._entries and not self._updates:
                    self.too_long += 1
                    break
                else:
                    more = self._flush()
                    yield
                    if not more:
                        return False
        return True

    def end(self) -> None:
        """Send what is packed."""
        self._flush()

    def _waits(self, debt: Debt, lower: int, upper: int) -> bool:
        """Whether a change goes whole in the next datagram."""
        packed = self._entries or self._updates
        return (
            bool(packed)
            and not fits_whole(debt, lower, upper, self._room)
            and fits_whole(debt, lower, upper, self._empty)
        )

    def _flush(self) -> bool:
        """Send what is packed and begin the next datagram; return whether the burst allows one."""
        self._left -= self._put(self._kind, self._head, self._entries, self._updates)
        self._kind, self._head, self._room = Kind.ACK, self._rest, self._empty
        self._entries, self._updates = [], []
        return self._left >= 0
