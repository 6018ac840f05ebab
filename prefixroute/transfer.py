"""Transfers: which change a peer is owed, how it is cut to a budget, and how its parts become whole again.

Rules:
1. A part holds all keys of the change in its range [lower, upper), so parts are checked, repeated, reordered and cut
   anew at other borders freely.
2. A receiver says up to which key it has everything; any holder of the same versions goes on from there.
3. The smaller of delta and snapshot is sent.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .digest import KEY_BYTES, KEY_LIMIT, Keys, Update, VectorEntry, encode_part, pack_keys
from .replica import Change, WriterSet

UPDATE_OVERHEAD_BYTES = 80
"""Upper bound of an encoded update's fields beside its endpoint, url and keys."""

MIN_KEYS_A_PART = 16


class Debt(NamedTuple):
    """What one peer is owed of one endpoint: `change`, from key `cursor` on."""

    endpoint: str
    incarnation: int
    url: str
    change: Change
    cursor: int

    @property
    def staleness(self) -> int:
        """Versions that the peer is behind."""
        return self.change.version - self.change.since


def owed(keys: WriterSet, incarnation: int, entry: VectorEntry) -> tuple[Change, int]:
    """Return what brings the sender of `entry` up to date, and from which key on.

    That is the rest of a transfer it has begun, if its versions can still be served; else a delta, or a snapshot where
    the log does not reach or the delta is larger.
    """
    same_life = entry.incarnation == incarnation
    want = entry.want
    if want is not None and want.incarnation == incarnation:
        begun = keys.snapshot() if want.since == 0 else keys.change(want.since, want.version)
        if begun is not None and begun.version == want.version:
            return begun, want.cursor
    if same_life and entry.version:
        delta = keys.change(entry.version, keys.version)
        if delta is not None and len(delta.added) + len(delta.removed) <= len(keys):
            return delta, 0
    return keys.snapshot(entry.version if same_life else 0), 0


def cut(debt: Debt, lower: int, room: int) -> tuple[bytes | None, int]:
    """Encode the part of a debt from key `lower` on that fits `room` bytes; return it and where the next one begins.

    (None, lower) when not even a small part fits. O(log n + part).
    """
    change = debt.change
    room -= UPDATE_OVERHEAD_BYTES + len(debt.endpoint.encode()) + len(debt.url.encode())
    added = change.added[np.searchsorted(change.added, np.uint64(lower)) :]
    removed = change.removed[np.searchsorted(change.removed, np.uint64(lower)) :]
    fits = room // KEY_BYTES
    upper = KEY_LIMIT
    # Without room for the fields `fits` is negative, so even a part of no keys is refused.
    if len(added) + len(removed) > fits:
        if fits < MIN_KEYS_A_PART:
            return None, lower
        upper = _key_after(added, removed, fits)
        added = added[: np.searchsorted(added, np.uint64(upper))]
        removed = removed[: np.searchsorted(removed, np.uint64(upper))]
    versions = (change.since, change.version, change.checksum)
    keys = (pack_keys(added), pack_keys(removed))
    return encode_part(Update(debt.endpoint, debt.incarnation, *versions, lower, upper, *keys, debt.url)), upper


def least_room(url_bytes: int = 256, name_bytes: int = 80) -> int:
    """Return how many bytes a datagram must leave for updates, so that every transfer goes on."""
    return UPDATE_OVERHEAD_BYTES + name_bytes + url_bytes + MIN_KEYS_A_PART * KEY_BYTES


def _key_after(added: Keys, removed: Keys, n: int) -> int:
    """The key below which exactly `n` keys of both arrays lie."""
    head = np.concatenate([added[: n + 1], removed[: n + 1]])
    head.sort()
    return int(head[n])


class Assembly:
    """A change that arrives in parts, each the keys of one range; parts may come twice, overlap, and in any order."""

    __slots__ = ("_lowers", "_parts", "checksum", "cursor", "incarnation", "since", "touched_at", "version")

    def __init__(self, incarnation: int, since: int, version: int, checksum: int, now: float) -> None:
        self.incarnation = incarnation
        self.since = since
        self.version = version
        self.checksum = checksum
        self.touched_at = now
        self.cursor = 0
        """The key up to which everything has come."""
        # Disjoint ranges: their lower ends in order, and by lower end (upper, added, removed).
        self._lowers: list[int] = []
        self._parts: dict[int, tuple[int, Keys, Keys]] = {}

    def offer(self, lower: int, upper: int, added: Keys, removed: Keys, now: float) -> Change | None:
        """Take what is new in a part; return the whole change once it is there. O(log parts) and a memmove."""
        for start, end in list(self._missing(lower, upper)):
            self._parts[start] = (end, _between(added, start, end), _between(removed, start, end))
            insort(self._lowers, start)
            self.touched_at = now
        while self.cursor in self._parts:
            self.cursor = self._parts[self.cursor][0]
        if self.cursor != KEY_LIMIT:
            return None
        parts = [self._parts[start] for start in self._lowers]
        adds = np.concatenate([part[1] for part in parts])
        removes = np.concatenate([part[2] for part in parts])
        return Change(self.since, self.version, adds, removes, self.checksum)

    def _missing(self, lower: int, upper: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges within [lower, upper) of which nothing has come."""
        i = bisect_right(self._lowers, lower)
        if i:
            lower = max(lower, self._parts[self._lowers[i - 1]][0])
        while lower < upper:
            start = self._lowers[i] if i < len(self._lowers) else KEY_LIMIT
            if lower < start:
                yield lower, min(start, upper)
            lower = self._parts[start][0] if start < upper else upper
            i += 1


def _between(keys: Keys, lower: int, upper: int) -> Keys:
    """The keys within [lower, upper)."""
    start, end = np.searchsorted(keys, np.array([lower, upper], np.uint64))
    return keys[start:end]
