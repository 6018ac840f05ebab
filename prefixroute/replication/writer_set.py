"""Single-writer sets: the copy of an owner's set of wire keys at (incarnation, version), and the owner's own.

Each version differs from the one before it by a `Change`. A set keeps its last changes in a log, so that it can make
the net change between any two versions that the log reaches, for receivers at any of them. Which change applies to
which copy is decided by the table in `receiving`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import reduce
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..keys.keyset import NO_CHANGE, NO_KEYS, Delta, KeyDelta, Keys, checksum, sorted_keys

LOG_BYTES = 256 * 1024
"""Bound of a set's log of changes: about 16,000 changed keys, a minute of 250 blocks a second."""

STEP_BYTES = 256
"""What a step of the log costs beside its keys: two array headers, a tuple and its numbers."""

MAX_CHANGES = 16
"""Net changes that a set keeps for its receivers: most receivers are one or two versions behind."""

FOLD_KEYS = 8192
"""Pending keys that are kept one by one before they are folded into arrays, so that publishing costs no more than
these."""

Ranks: TypeAlias = NDArray[np.int64]

Codes: TypeAlias = tuple[bytes, bytes]
"""Added keys and ranks of removed keys, as they travel."""


class Base(NamedTuple):
    """The set that a change starts from, told as a later set and the net change that led there.

    So ranks among its keys are counted without making a copy of it.
    """

    later: Keys
    delta: KeyDelta

    def ranks(self, keys: Keys) -> Ranks:
        """Return for each of `keys` how many keys of the set are below it. O(len(keys) log n)."""
        added, removed = self.delta
        ranks: Ranks = np.searchsorted(self.later, keys) - np.searchsorted(added, keys) + np.searchsorted(removed, keys)
        return ranks


class Change(NamedTuple):
    """The net change of a set between two versions; checksum and anchor stride are those at the later version.

    A snapshot is a change from nothing: `since` is 0. The set has `n_base` keys at the earlier version, and `base`
    makes them when ranks among them are asked for. `codes` keeps what the whole change is coded to, for all receivers.
    In the log, `at` is when this copy took the step.
    """

    since: int
    version: int
    delta: KeyDelta
    checksum: int
    anchor_stride: int = 1
    n_base: int = 0
    base: Callable[[], Base] | None = None
    codes: list[Codes] | None = None
    at: float = 0.0

    @property
    def nbytes(self) -> int:
        """What the change takes in the log. The codes, which may come later, take less than the keys."""
        return STEP_BYTES + 2 * (self.delta.added.nbytes + self.delta.removed.nbytes)


class WriterSet:
    """A sorted set of wire keys at one version, with the log of how it came there.

    Arrays are replaced, never written, so a frozen snapshot is a reference. Memory: 8 bytes a key, as much again while
    an older state is frozen for a transfer, and `LOG_BYTES` for the log.
    """

    def __init__(self) -> None:
        self.keys: Keys = NO_KEYS
        self.version = 0
        self.anchor_stride = 1
        """The anchor stride at which the owner published the keys."""
        self._checksum = 0
        self._begun_at = float("-inf")
        self._log: deque[Change] = deque()
        self._log_bytes = 0
        self._frozen: Change | None = None
        self._changes: dict[tuple[int, int], Change | None] = {}

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def checksum(self) -> int:
        """Checksum of the keys, kept up to date in O(change)."""
        return self._checksum

    def advance(
        self,
        version: int,
        delta: KeyDelta,
        anchor_stride: int = 1,
        now: float = 0.0,
        codes: Codes | None = None,
        whole: Keys | None = None,
    ) -> None:
        """Apply a net change that leads to `version`. O(n) copied bytes.

        `codes` are what the change travelled as, to be passed on unchanged. `whole` is the set that the change leads
        to, where that is known already.
        """
        n_base, kept = len(self.keys), [codes] if codes is not None else []
        self.keys = delta.applied(self.keys) if whole is None else whole
        self._checksum = (self._checksum + checksum(delta.added) - checksum(delta.removed)) % 2**64
        step = Change(self.version, version, delta, self._checksum, anchor_stride, n_base, None, kept, now)
        self.version, self.anchor_stride = version, anchor_stride
        self._changes.clear()
        self._log.append(step)
        self._log_bytes += step.nbytes
        while self._log_bytes > LOG_BYTES:
            self._log_bytes -= self._log.popleft().nbytes

    def fits(self, delta: KeyDelta) -> bool:
        """Whether the set has every removed key and no added one, as a net change to this very state must have it."""
        return bool(self.holds(delta.removed).all()) and not bool(self.holds(delta.added).any())

    def holds(self, keys: Keys) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return for each of `keys` whether it is in the set. O(len(keys) log n)."""
        at = np.searchsorted(self.keys, keys)
        found = np.zeros(len(keys), np.bool_)
        inside = at < len(self.keys)
        found[inside] = self.keys[at[inside]] == keys[inside]
        return found

    def replace(
        self, version: int, keys: Keys, anchor_stride: int = 1, now: float = 0.0, total: int | None = None
    ) -> None:
        """Become `keys` at `version`, with an empty log. `total` is their checksum if known. O(n), or O(1)."""
        self._begun_at = now
        self._checksum = checksum(keys) if total is None else total
        self.keys, self.version, self.anchor_stride = keys, version, anchor_stride
        self._log.clear()
        self._changes.clear()
        self._log_bytes = 0
        self._frozen = None

    def change(self, since: int, until: int) -> Change | None:
        """Return the net change from version `since` to `until`, or None if the log does not reach.

        O(changes); made once for all receivers until the set changes again.
        """
        if (since, until) not in self._changes:
            if len(self._changes) >= MAX_CHANGES:
                del self._changes[next(iter(self._changes))]
            self._changes[since, until] = self._change(since, until)
        return self._changes[since, until]

    def skipped(self, version: int) -> float:
        """Return when the copy jumped over `version`; -inf if it did not, or if the log does not reach.

        A copy that jumped over a version has no delta since it, but other nodes were at it and have one.
        """
        if not self._log or version < self._log[0].since:
            return self._begun_at
        step = next((step for step in self._log if step.since < version < step.version), None)
        return step.at if step is not None else float("-inf")

    def successive(self, since: int, limit: int) -> list[Change]:
        """Return the changes that lead from `since` to the present step by step; none if they are more than `limit`.

        A receiver that takes them one by one can pass each of them on, to others at any version between.
        """
        steps = self._steps(since, self.version)
        if not 0 < len(steps) <= limit:
            return []
        changes = [self.change(step.since, step.version) for step in steps]
        return [change for change in changes if change is not None]

    def _change(self, since: int, until: int) -> Change | None:
        steps = self._steps(since, until)
        if not steps:
            return None
        keys, later, last = self.keys, self._steps(since, self.version), steps[-1]
        codes = last.codes if len(steps) == 1 else []
        stated = (last.checksum, last.anchor_stride, steps[0].n_base)
        return Change(since, until, _net(steps), *stated, lambda: Base(keys, _net(later)), codes)

    def _steps(self, since: int, until: int) -> list[Change]:
        """The steps of the log that lead from one version to another; none if the log does not hold them all."""
        steps = [step for step in self._log if step.since >= since and step.version <= until]
        return steps if steps and steps[0].since == since and steps[-1].version == until else []

    def snapshot(self, after: int = 0) -> Change:
        """Return the set as a change from nothing, frozen so that a transfer in parts can go on while it changes.

        The frozen state is kept as long as the log leads from it to the present: a receiver that has all of it then
        catches up by a delta. The snapshot is of a version later than `after`, which the receiver has already.
        """
        frozen, reached = self._frozen, self._log[0].since if self._log else self.version
        if frozen is not None and frozen.version > after and frozen.version >= reached:
            return frozen
        return self._freeze(self.version, self.keys, self._checksum, self.anchor_stride)

    def snapshot_at(self, version: int) -> Change | None:
        """Return the snapshot of one version, if it is the frozen or the present one or the log leads back to it.

        So a transfer that one node began can go on from any other. O(n), and again only for another version.
        """
        frozen = self._frozen
        if frozen is not None and frozen.version == version:
            return frozen
        if version == self.version:
            return self.snapshot(version - 1)
        steps = self._steps(version, self.version)
        # A log that begins at this version does not say at which stride it was published.
        anchor_stride = next((step.anchor_stride for step in self._log if step.version == version), None)
        if not steps or anchor_stride is None:
            return None
        keys = _net(steps).reversed().applied(self.keys)
        return self._freeze(version, keys, checksum(keys), anchor_stride)

    def _freeze(self, version: int, keys: Keys, total: int, anchor_stride: int) -> Change:
        self._frozen = Change(0, version, KeyDelta(keys, NO_KEYS), total, anchor_stride, codes=[])
        return self._frozen

    def _check(self) -> None:
        """Assert order, checksum and the log's continuity. O(n)."""
        assert not bool((self.keys[1:] <= self.keys[:-1]).any())
        assert self._checksum == checksum(self.keys)
        assert self._log_bytes == sum(step.nbytes for step in self._log) <= LOG_BYTES
        steps = list(self._log)
        assert all(a.version == b.since for a, b in pairwise(steps))
        assert not steps or steps[-1].version == self.version


class OwnedSet(WriterSet):
    """The owner's side: changes gather until they are published as the next version."""

    def __init__(self) -> None:
        super().__init__()
        self.version = 1
        self.stride = 1
        """The anchor stride of what is published next."""
        self._pending = Delta(set(), set())
        self._folded = NO_CHANGE
        """Changes that have been pending for longer, as arrays."""
        self._published_at = float("-inf")

    def gather(self, delta: Delta) -> None:
        """Take wire keys that came and went. O(changed keys)."""
        self._pending.lose_all(delta.removed)
        self._pending.gain_all(delta.added)
        if len(self._pending.added) + len(self._pending.removed) >= FOLD_KEYS:
            self._fold()

    def become(self, keys: set[int]) -> None:
        """Make `keys` the set once all is published, whatever was pending. O(n), 20 ns a key."""
        self._pending = Delta(set(), set())
        self._folded = KeyDelta.between(self.keys, sorted_keys(keys))

    def pending(self) -> set[int]:
        """Return the keys as they will be once all is published. O(n)."""
        self._fold()
        keys: list[int] = self._folded.applied(self.keys).tolist()
        return set(keys)

    def due(self, share: float, within_s: float, now: float) -> bool:
        """Whether there is something to publish that is `share` of the set, or that long after the last time."""
        n = len(self._pending.added) + len(self._pending.removed) + self._folded.size
        if not n and self.stride == self.anchor_stride:
            return False
        # A float's rounding must not put it off by a whole exchange.
        return n >= share * len(self.keys) or now - self._published_at >= 0.99 * within_s

    def publish(self, now: float = 0.0) -> bool:
        """Step the version if there is anything new since the last step. O(n) copied bytes."""
        self._fold()
        if not self._folded.size and self.stride == self.anchor_stride:
            return False
        self.advance(self.version + 1, self._folded, self.stride, now)
        self._folded, self._published_at = NO_CHANGE, now
        return True

    def _fold(self) -> None:
        if self._pending.added or self._pending.removed:
            self._folded = self._folded.then(self._pending.sorted())
            self._pending = Delta(set(), set())


def _net(steps: list[Change]) -> KeyDelta:
    """The net change of successive steps."""
    return reduce(KeyDelta.then, [step.delta for step in steps] or [NO_CHANGE])
