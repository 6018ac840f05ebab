"""Single-writer sets: the copy of an owner's set of wire keys at (incarnation, version), and the owner's own.

The table that decides what applies to a copy is in `acceptance`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..keys.keyset import NO_KEYS, Delta, Difference, Keys, after, checksum, difference, patched, sorted_keys

LOG_BYTES = 256 * 1024
"""Bound of a set's log of changes: about 16,000 changed keys, a minute of 250 blocks a second."""


STEP_BYTES = 256
"""What a step of the log costs beside its keys: two array headers, a tuple and its numbers."""


MAX_CHANGES = 16
"""Changes that a set keeps for its receivers: most are one or two versions behind."""


FOLD_KEYS = 8192
"""Pending keys that are kept one by one before they are folded into arrays: publishing costs no more than these."""


Ranks: TypeAlias = NDArray[np.int64]


Codes: TypeAlias = tuple[bytes, bytes]
"""Added keys and ranks of removed ones, as they travel."""


_SNAPSHOT, _DELTA = True, False


class Base(NamedTuple):
    """The set that a change starts from, told as a later one and the net change between: ranks in it cost no copy."""

    keys: Keys
    added: Keys
    removed: Keys

    def ranks(self, keys: Keys) -> Ranks:
        """Return for each of `keys` how many keys of the set are below it. O(len(keys) log n)."""
        ranks: Ranks = (
            np.searchsorted(self.keys, keys) - np.searchsorted(self.added, keys) + np.searchsorted(self.removed, keys)
        )
        return ranks


class Change(NamedTuple):
    """The net difference of a set between two versions; checksum and anchor stride are those at the later one.

    `n_base` keys are in the set at the earlier version, and `base` makes them when ranks among them are asked for.
    `codes` keeps what the whole change is coded to, for all receivers.
    """

    since: int
    version: int
    added: Keys
    removed: Keys
    checksum: int
    anchor_stride: int = 1
    n_base: int = 0
    base: Callable[[], Base] | None = None
    codes: list[Codes] | None = None


class _Step(NamedTuple):
    since: int
    version: int
    added: Keys
    removed: Keys
    checksum: int
    anchor_stride: int
    n_base: int
    at: float
    codes: list[Codes]

    @property
    def nbytes(self) -> int:
        # The codes, which may come later, take less than the keys.
        return STEP_BYTES + 2 * (self.added.nbytes + self.removed.nbytes)


class WriterSet:
    """A sorted set of wire keys at one version, with the log of how it came there.

    Arrays are replaced, never written, so a frozen snapshot is a reference. Memory: 8 bytes a key, as much again while
    an older state is frozen for a transfer, and `LOG_BYTES` for the log.
    """

    __slots__ = (
        "_begun_at",
        "_changes",
        "_checksum",
        "_frozen",
        "_log",
        "_log_bytes",
        "anchor_stride",
        "keys",
        "version",
    )

    def __init__(self) -> None:
        self.keys: Keys = NO_KEYS
        self.version = 0
        self.anchor_stride = 1
        """The anchor stride at which the owner published the keys."""
        self._checksum = 0
        self._begun_at = float("-inf")
        self._log: deque[_Step] = deque()
        self._log_bytes = 0
        self._frozen: Change | None = None
        self._changes: dict[tuple[int, int], Change | None] = {}

    def __len__(self) -> int:
        return len(self.keys)

    def tolist(self) -> list[int]:
        """Return the keys as Python ints."""
        keys: list[int] = self.keys.tolist()
        return keys

    @property
    def checksum(self) -> int:
        """Checksum of the keys, kept up to date in O(change)."""
        return self._checksum

    def advance(
        self,
        version: int,
        added: Keys,
        removed: Keys,
        anchor_stride: int = 1,
        now: float = 0.0,
        codes: Codes | None = None,
        whole: Keys | None = None,
    ) -> None:
        """Apply a net change that leads to `version`. O(n) copied bytes. `codes` are passed on as they came.

        `whole` is what it leads to, where that is known.
        """
        keys = patched(self.keys, added, removed) if whole is None else whole
        self._checksum = (self._checksum + checksum(added) - checksum(removed)) % 2**64
        kept = [codes] if codes is not None else []
        step = _Step(self.version, version, added, removed, self._checksum, anchor_stride, len(self.keys), now, kept)
        self.keys, self.version, self.anchor_stride = keys, version, anchor_stride
        self._changes.clear()
        self._log.append(step)
        self._log_bytes += step.nbytes
        while self._log_bytes > LOG_BYTES:
            self._log_bytes -= self._log.popleft().nbytes

    def fits(self, added: Keys, removed: Keys) -> bool:
        """Whether every removed key is held and no added one is: what a net change to this very state must satisfy."""
        return bool(self.holds(removed).all()) and not bool(self.holds(added).any())

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
        """Return when this copy went past `version` without being at it; -inf when it was there or cannot know.

        From a copy that skipped it there is no delta since `version`, but others were there.
        """
        if not self._log or version < self._log[0].since:
            return self._begun_at
        step = next((step for step in self._log if step.since < version < step.version), None)
        return step.at if step is not None else float("-inf")

    def successive(self, since: int, limit: int) -> list[Change]:
        """Return the changes that lead from `since` to the present step by step; none if they are more than `limit`.

        Who takes them one by one can pass each of them on, to others at any version between.
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
        last = steps[-1]
        keys, later = self.keys, self._steps(since, self.version)
        codes = last.codes if len(steps) == 1 else []
        added, removed = _net(steps)

        def base() -> Base:
            return Base(keys, *_net(later))

        return Change(since, until, added, removed, last.checksum, last.anchor_stride, steps[0].n_base, base, codes)

    def _steps(self, since: int, until: int) -> list[_Step]:
        """The steps of the log that lead from one version to another; none if it does not hold them all."""
        steps = [step for step in self._log if step.since >= since and step.version <= until]
        return steps if steps and steps[0].since == since and steps[-1].version == until else []

    def snapshot(self, after: int = 0) -> Change:
        """Return the set as a change from nothing, frozen so that a transfer in parts can go on while it changes.

        The frozen state is kept as long as the log leads from it to the present; then a receiver that has it whole
        catches up by a delta. It is of a version later than `after`: a receiver is not sent what it holds already.
        """
        frozen = self._frozen
        if (
            frozen is not None
            and frozen.version > after
            and (frozen.version == self.version or (self._log and self._log[0].since <= frozen.version))
        ):
            return frozen
        self._frozen = Change(0, self.version, self.keys, NO_KEYS, self._checksum, self.anchor_stride, 0, None, [])
        return self._frozen

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
        if not steps:
            return None
        added, removed = _net(steps)
        keys = patched(self.keys, removed, added)
        anchor_stride = next((step.anchor_stride for step in self._log if step.version == version), None)
        if anchor_stride is None:
            # The log begins there, and does not tell at which stride.
            return None
        self._frozen = Change(0, version, keys, NO_KEYS, checksum(keys), anchor_stride, 0, None, [])
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

    __slots__ = ("_folded", "_pending", "_published_at", "stride")

    def __init__(self) -> None:
        super().__init__()
        self.version = 1
        self.stride = 1
        """The anchor stride of what is published next."""
        self._pending = Delta(set(), set())
        self._folded = Difference(NO_KEYS, NO_KEYS)
        """Added and removed keys that are pending since longer."""
        self._published_at = float("-inf")

    def gather(self, changes: Delta) -> None:
        """Take wire keys that came and went. O(changes)."""
        self._pending.lose_all(changes.removed)
        self._pending.gain_all(changes.added)
        if len(self._pending.added) + len(self._pending.removed) >= FOLD_KEYS:
            self._fold()

    def become(self, keys: set[int]) -> None:
        """Take what is to be held once all is published, whatever was pending. O(n), 20 ns a key."""
        self._pending = Delta(set(), set())
        self._folded = difference(sorted_keys(keys), self.keys)

    def pending(self) -> set[int]:
        """Return the keys as they will be once all is published. O(n)."""
        self._fold()
        keys: list[int] = patched(self.keys, *self._folded).tolist()
        return set(keys)

    def due(self, share: float, within_s: float, now: float) -> bool:
        """Whether there is something to publish that is `share` of the set, or that long after the last time."""
        n = len(self._pending.added) + len(self._pending.removed) + len(self._folded.left) + len(self._folded.right)
        if not n and self.stride == self.anchor_stride:
            return False
        # A float's rounding must not put it off by a whole exchange.
        return n >= share * len(self.keys) or now - self._published_at >= 0.99 * within_s

    def publish(self, now: float = 0.0) -> bool:
        """Step the version if there is anything new since the last step. O(n) copied bytes."""
        self._fold()
        added, removed = self._folded
        if not len(added) and not len(removed) and self.stride == self.anchor_stride:
            return False
        self.advance(self.version + 1, added, removed, self.stride, now)
        self._folded, self._published_at = Difference(NO_KEYS, NO_KEYS), now
        return True

    def _fold(self) -> None:
        if self._pending.added or self._pending.removed:
            recent = Difference(sorted_keys(self._pending.added), sorted_keys(self._pending.removed))
            self._folded = after(self._folded, recent)
            self._pending = Delta(set(), set())


def _net(steps: list[_Step]) -> tuple[Keys, Keys]:
    """What successive steps come to: keys added and keys removed."""
    if len(steps) == 1:
        return steps[0].added, steps[0].removed
    net = Difference(NO_KEYS, NO_KEYS)
    for step in steps:
        net = after(net, Difference(step.added, step.removed))
    return net.left, net.right
