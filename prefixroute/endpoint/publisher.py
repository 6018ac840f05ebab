"""What an endpoint's owner publishes: every block of its residency, or the anchors that its byte budget allows, and
what its engine is about to hold (`Promises`).

Rules:
1. This node's own index is told every block, however coarse the stride is for peers.
2. Two blocks may share a wire key (`keys.keyset`): it is lost with the last of them.
3. The anchor stride is chosen anew every few seconds, and when the residency has doubled; see `anchors`.
4. A promised wire key is published, whether the residency has it or not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from itertools import chain
from typing import NamedTuple

from ..keys.chain import TokenChain, wire_key
from ..keys.hit_marks import marked, section
from ..keys.keyset import Delta, KeyCounts, Repeats
from ..replication.writer_set import OwnedSet
from ..residency.mirror import Residency
from ..residency.published import Published
from .anchors import FOLLOW_BLOCKS, Anchors, choose_stride

REFIT_S = 5.0
"""Seconds between two choices of the stride: each walks over all edges of the tree."""


class Publisher:
    """Feeds one endpoint's published set `keys` from its residency; a snapshot should fit `budget_bytes`.

    `held` tells whether this node's index has a wire key of the endpoint.
    """

    def __init__(self, keys: OwnedSet, residency: Residency, budget_bytes: int, held: Callable[[int], bool]) -> None:
        self._keys = keys
        self._residency = residency
        self._budget_bytes = budget_bytes
        self._held = held
        self._repeats = Repeats()
        self.promises = Promises()
        self._anchors: Anchors | None = None
        """None at stride 1, where the residency's changes are published as they come."""
        self._fitted_at = float("-inf")
        self._fitted_blocks = 0

    @property
    def anchor_stride(self) -> int:
        """The anchor stride at present; 1 publishes every block."""
        return self._anchors.anchor_stride if self._anchors is not None else 1

    def note(self, gained: Collection[int], lost: Collection[int]) -> Delta:
        """Take 64-bit keys that the residency gained and lost; return the wire keys, for the index. O(changes)."""
        noted = self._note(gained, lost)
        if self._anchors is None:
            self._publish(noted)
        elif self._residency.published().touched > FOLLOW_BLOCKS:
            self._publish(self._anchors.follow(self._residency.published()))
        return noted

    def over(self, ticket: int) -> None:
        """Take back what is left of a prompt's promise: by now the engine has told. O(its blocks)."""
        lost = self.promises.withdraw(ticket)
        if lost:
            self._keys.gather(Delta(set(), {wire for wire in lost if not self._has(wire)}))

    def gather(self, now: float) -> None:
        """Bring what is to be published up to date. O(changes); O(blocks) array work when the stride changes."""
        source = self._residency.published()
        blocks = source.n_keys
        if now - self._fitted_at >= REFIT_S or blocks > 2 * self._fitted_blocks:
            self._fitted_at, self._fitted_blocks = now, blocks
            self._refit(source)
        if self._anchors is not None:
            self._publish(self._anchors.follow(source))
        gained = self.promises.settle(self.anchor_stride, source.ends_only)
        if gained:
            self._keys.gather(Delta({wire for wire in gained if not self._has(wire)}, set()))

    def _note(self, gained: Collection[int], lost: Collection[int]) -> Delta:
        noted = Delta(set(), set())
        repeats, held = self._repeats, self._held
        if not repeats:
            # The usual case: no two blocks share a wire key, and with those that are gained it stays so.
            noted.removed.update(map(wire_key, lost))
            wires = set(map(wire_key, gained))
            if len(wires) == len(gained) and all(wire in noted.removed for wire in wires if held(wire)):
                noted.gain_all(wires)
                return noted
            lost = ()
        for wire in map(wire_key, lost):
            if repeats.lose(wire):
                noted.lose(wire)
        for wire in map(wire_key, gained):
            if repeats.gain(wire, wire in noted.added or (wire not in noted.removed and held(wire))):
                noted.gain(wire)
        return noted

    def _publish(self, changes: Delta) -> None:
        """Publish what the residency gained and lost, but for promised keys, which are published anyway."""
        promised = self.promises.counts
        if len(promised):
            changes = Delta(
                {wire for wire in changes.added if wire not in promised},
                {wire for wire in changes.removed if wire not in promised},
            )
        self._keys.gather(changes)

    def _has(self, wire: int) -> bool:
        """Whether a wire key is published without any promise."""
        return self._held(wire) if self._anchors is None else wire in self._anchors.wires

    def _refit(self, source: Published) -> None:
        """Choose the stride; if it changes, publish the anchors of the new one. O(edges), O(blocks) if it changes."""
        anchor_stride = choose_stride(source.n_keys, source.n_fixed(), self._budget_bytes, self.anchor_stride)
        if anchor_stride == self.anchor_stride:
            return
        if self._anchors is None:
            self._anchors = Anchors(anchor_stride)
        self._anchors.set_stride(anchor_stride, source)
        self._keys.become(self._anchors.wires | set(self.promises.counts))
        self._keys.stride = anchor_stride
        if anchor_stride == 1:
            source.watch_anchors(False)
            self._anchors = None

    def _check(self) -> None:
        """Assert that what is or will be published are the anchors of the residency and the promises. O(blocks)."""
        source = self._residency.published()
        if self._anchors is not None:
            self._publish(self._anchors.follow(source))
        expected = {wire_key(key) for key in source.anchors(self.anchor_stride)}
        self.promises._check()
        assert self._keys.pending() == expected | set(self.promises.counts)


class Promise(NamedTuple):
    """Blocks `above` + 1 to `depth` of a prompt, which its engine is about to hold."""

    chain: TokenChain
    above: int
    depth: int

    def keys(self, anchor_stride: int) -> Iterator[int]:
        """Yield the wire keys to publish at an anchor stride: those that a search asks for, and the last block's.

        O(blocks / stride) hashes of up to a chain's stride.
        """
        for depth in range(self.above + 1, self.depth):
            if depth == 1 or depth % anchor_stride == 0:
                yield wire_key(self.chain.key(depth))
        yield wire_key(self.chain.key(self.depth))

    def end_keys(self) -> Iterator[int]:
        """Yield the wire keys to publish where hits end at some depths only: the end at `depth`, and its marks."""
        yield wire_key(self.chain.key(self.depth))
        yield wire_key(marked(self.chain.key(1)))
        if section(self.depth):
            yield wire_key(marked(self.chain.key(section(self.depth))))


class Promises:
    """What one endpoint promises, by prompt, and how many prompts promise each wire key."""

    def __init__(self) -> None:
        self._new: dict[int, Promise] = {}
        """By ticket: prompts of which nothing is published yet."""
        self._made: dict[int, tuple[int, ...]] = {}
        """By ticket: the wire keys that are published for a prompt."""
        self.counts = KeyCounts()
        """The wire keys that are promised. To be read only."""

    def begin(self, ticket: int, promise: Promise) -> bool:
        """Take a prompt that is served from now on; return whether it will leave any blocks. O(1).

        Peers are told of them with the next round, if it is still under way.
        """
        leaves = promise.depth > promise.above
        if leaves:
            self._new[ticket] = promise
        return leaves

    def settle(self, anchor_stride: int, ends_only: bool = False) -> set[int]:
        """Make the promises of the prompts that are still under way; return the wire keys not promised before.

        They are made at an anchor stride, or, with `ends_only`, only as the ends that the prompts will leave.
        """
        gained: set[int] = set()
        for ticket, promise in self._new.items():
            wires = promise.end_keys() if ends_only else promise.keys(anchor_stride)
            keys = self._made[ticket] = tuple(dict.fromkeys(wires))
            gained.update([wire for wire in keys if self.counts.gain(wire)])
        self._new.clear()
        return gained

    def withdraw(self, ticket: int) -> set[int]:
        """Take back what a prompt promised; return the wire keys that no prompt promises any more. O(its blocks)."""
        self._new.pop(ticket, None)
        return {wire for wire in self._made.pop(ticket, ()) if self.counts.lose(wire)}

    def _check(self) -> None:
        """Assert that the counts are those of the promises."""
        assert Counter(chain.from_iterable(self._made.values())) == self.counts
        assert not self._new.keys() & self._made.keys()
