"""What an endpoint's owner publishes: every block of its residency, or the anchors that its byte budget allows, and
what its engine is about to hold (`promises`).

Rules:
1. This node's own index is told every block, whatever the others are told.
2. Two blocks may share a wire key (1.8e-5 pairs expected at 100k blocks): it goes when the last of them does.
3. The anchor stride is chosen anew every few seconds, and when the residency has doubled; see `anchors`.
4. A wire key that is promised is published, whether the residency has it or not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from ..keys.chain import TokenChain, wire_key
from ..keys.hit_marks import marked, section
from ..keys.keyset import Delta
from ..replication.writer_set import OwnedSet
from ..residency.forest import Forest
from .anchors import Anchors, choose_stride

FOLLOW_BLOCKS = 1024
"""Touched blocks that are looked at without waiting for the next round, which would take too long at once."""

REFIT_S = 5.0
"""How often the anchor stride is thought over: the number of ends costs a walk over all edges."""


class Publisher:
    """Feeds one endpoint's published set. `held` tells whether this node's index has a wire key of the endpoint."""

    __slots__ = (
        "_anchors",
        "_budget_bytes",
        "_fitted_at",
        "_fitted_blocks",
        "_held",
        "_keys",
        "_promises",
        "_repeats",
        "_source",
    )

    def __init__(self, keys: OwnedSet, source: Forest, budget_bytes: int, held: Callable[[int], bool]) -> None:
        self._keys = keys
        self._source = source
        self._budget_bytes = budget_bytes
        self._held = held
        self._repeats: dict[int, int] = {}
        self._promises = Promises()
        self._anchors: Anchors | None = None
        self._fitted_at = float("-inf")
        self._fitted_blocks = 0

    @property
    def anchor_stride(self) -> int:
        """The anchor stride at present; 1 publishes every block."""
        return self._anchors.anchor_stride if self._anchors is not None else 1

    def note(self, gained: Collection[int], lost: Collection[int]) -> Delta:
        """Take 64-bit keys that came and went; return the wire keys that did, for the index. O(changes)."""
        noted = self._note(gained, lost)
        if self._anchors is None:
            self._publish(noted)
        elif self._source.touched > FOLLOW_BLOCKS:
            self._publish(self._follow(self._anchors))
        return noted

    def promise(self, ticket: int, promise: Promise) -> None:
        """Take blocks that a prompt will bring; peers are told with the next round if it is still under way. O(1)."""
        self._promises.begin(ticket, promise)

    def over(self, ticket: int) -> None:
        """Take back what is left of a prompt's promise: by now the engine has told. O(its blocks)."""
        lost = self._promises.end(ticket)
        if lost:
            self._keys.gather(Delta(set(), {wire for wire in lost if not self._has(wire)}))

    def gather(self, now: float) -> None:
        """Bring what is to be published up to date. O(changes); O(blocks) array work when the stride changes."""
        blocks = self._source.published
        if now - self._fitted_at >= REFIT_S or blocks > 2 * self._fitted_blocks:
            self._refit(blocks, now)
        if self._anchors is not None:
            self._publish(self._follow(self._anchors))
        gained = self._promises.settle(self.anchor_stride, self._source.hits is not None)
        if gained:
            self._keys.gather(Delta({wire for wire in gained if not self._has(wire)}, set()))

    def _note(self, gained: Collection[int], lost: Collection[int]) -> Delta:
        noted = Delta(set(), set())
        repeats, held = self._repeats, self._held
        if not repeats:
            # The usual case: no two blocks share a wire key, and with those that come it stays so.
            noted.removed.update(map(wire_key, lost))
            wires = set(map(wire_key, gained))
            if len(wires) == len(gained) and all(wire in noted.removed for wire in wires if held(wire)):
                noted.gain_all(wires)
                return noted
            lost = ()
        for key in lost:
            wire = wire_key(key)
            more = repeats.get(wire, 0)
            if not more:
                noted.lose(wire)
            elif more == 1:
                del repeats[wire]
            else:
                repeats[wire] = more - 1
        for key in gained:
            wire = wire_key(key)
            if wire in noted.added or (wire not in noted.removed and held(wire)):
                repeats[wire] = repeats.get(wire, 0) + 1
            else:
                noted.gain(wire)
        return noted

    def _follow(self, anchors: Anchors) -> Delta:
        """Bring the anchors up to date, by the touched blocks or, when these are more than the anchors, afresh."""
        source = self._source
        return anchors.rebuild(source) if source.touched > len(anchors) + FOLLOW_BLOCKS else anchors.follow(source)

    def _publish(self, changes: Delta) -> None:
        """Take what the residency gained and lost; what is promised is published anyway."""
        promised = self._promises
        if len(promised):
            changes = Delta(
                {wire for wire in changes.added if wire not in promised},
                {wire for wire in changes.removed if wire not in promised},
            )
        self._keys.gather(changes)

    def _has(self, wire: int) -> bool:
        """Whether a wire key is published for the residency's sake."""
        return self._held(wire) if self._anchors is None else wire in self._anchors

    def _refit(self, blocks: int, now: float) -> None:
        self._fitted_at, self._fitted_blocks = now, blocks
        anchor_stride = choose_stride(blocks, self._source.ends(), self._budget_bytes, self.anchor_stride)
        if anchor_stride == self.anchor_stride:
            return
        if self._anchors is None:
            self._anchors = Anchors(anchor_stride)
        self._anchors.set_stride(anchor_stride, self._source)
        self._keys.become({*self._anchors, *self._promises})
        self._keys.stride = anchor_stride
        if anchor_stride == 1:
            self._source.watch_anchors(False)
            self._anchors = None

    def _check(self) -> None:
        """Assert that what is or will be published are the anchors of the residency and the promises. O(blocks)."""
        if self._anchors is not None:
            self._publish(self._anchors.follow(self._source))
        expected = {wire_key(key) for key in self._source.anchors(self.anchor_stride)}
        self._promises._check()
        assert self._keys.pending() == expected | set(self._promises)


class Promise(NamedTuple):
    """Blocks `above` + 1 to `depth` of a prompt."""

    chain: TokenChain
    above: int
    depth: int

    def keys(self, anchor_stride: int) -> Iterator[int]:
        """Yield the wire keys to publish at an anchor stride: what a search asks for (`index`, rule 4), and the end.

        O(blocks / every) hashes of up to a chain's stride.
        """
        for depth in range(self.above + 1, self.depth):
            if depth == 1 or depth % anchor_stride == 0:
                yield wire_key(self.chain.key(depth))
        yield wire_key(self.chain.key(self.depth))

    def end(self) -> Iterator[int]:
        """Yield the wire keys to publish of an endpoint whose hits end at some depths only: the end, and its marks."""
        yield wire_key(self.chain.key(self.depth))
        yield wire_key(marked(self.chain.key(1)))
        if section(self.depth):
            yield wire_key(marked(self.chain.key(section(self.depth))))


class Promises:
    """What one endpoint promises, by prompt, and how many prompts promise each wire key."""

    __slots__ = ("_counts", "_made", "_new")

    def __init__(self) -> None:
        self._new: dict[int, Promise] = {}
        self._made: dict[int, tuple[int, ...]] = {}
        self._counts: dict[int, int] = {}

    def __len__(self) -> int:
        """Number of wire keys that are promised."""
        return len(self._counts)

    def __contains__(self, wire: object) -> bool:
        return wire in self._counts

    def __iter__(self) -> Iterator[int]:
        return iter(self._counts)

    def begin(self, ticket: int, promise: Promise) -> None:
        """Take a prompt that is served from now on. O(1)."""
        if promise.depth > promise.above:
            self._new[ticket] = promise

    def settle(self, anchor_stride: int, ends_only: bool = False) -> set[int]:
        """Make the promises of the prompts that are still under way; return wire keys that were not promised before.

        At an anchor stride, or only as the ends that they will leave.
        """
        gained: set[int] = set()
        for ticket, promise in self._new.items():
            keys = self._made[ticket] = tuple(
                dict.fromkeys(promise.end() if ends_only else promise.keys(anchor_stride))
            )
            for wire in keys:
                count = self._counts.get(wire, 0)
                self._counts[wire] = count + 1
                if not count:
                    gained.add(wire)
        self._new.clear()
        return gained

    def end(self, ticket: int) -> set[int]:
        """Take back what a prompt promised; return the wire keys that nobody promises any more. O(its blocks)."""
        self._new.pop(ticket, None)
        lost: set[int] = set()
        for wire in self._made.pop(ticket, ()):
            count = self._counts[wire] - 1
            if count:
                self._counts[wire] = count
            else:
                del self._counts[wire]
                lost.add(wire)
        return lost

    def _check(self) -> None:
        """Assert that the counts are those of the promises."""
        counts: dict[int, int] = {}
        for keys in self._made.values():
            for wire in keys:
                counts[wire] = counts.get(wire, 0) + 1
        assert counts == self._counts
        assert not self._new.keys() & self._made.keys()
