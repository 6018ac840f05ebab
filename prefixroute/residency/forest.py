"""What one endpoint holds and publishes: a tree for each full-attention group, and of a hybrid model where hits end.

Rules:
1. With one tree, the usual case, nothing is kept here. With several, the holders of every key are counted.
2. What every tree holds is closed under prefixes, since each tree's blocks are. Its anchors (`tree`, rule 5) are those
   of any tree that all of them hold. Where the trees go apart none may have an end; that costs fidelity, not truth.
3. A block counts when every tree holds it. What is published of a hybrid model, and its anchors, `hybrid_hits` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf

from ..events import Handle
from ..keys.chain import TokenChain
from ..keys.keyset import Delta
from .group import Group
from .hybrid_hits import HybridHits
from .tree import RadixTree


class Forest:
    """What all trees hold, what changed of what is published, and its anchors.

    `collect` is called after the trees were written.
    """

    __slots__ = ("_behind_s", "_changes", "_holders", "_now", "_quorum", "_touched", "_trees", "_watched", "hits")

    def __init__(self) -> None:
        self._now = 0.0
        self._behind_s: float | None = None
        """The least that a batch's own time was behind the caller's clock when it came."""
        self._trees: list[RadixTree] = []
        self._holders: dict[int, int] = {}
        """With two or more trees: key -> how many of them hold it."""
        self._quorum = 0
        self._changes = Delta(set(), set())
        self._touched: dict[int, int] = {}
        self._watched = False
        self.hits: HybridHits | None = None
        """Where hits end, of a hybrid model."""

    @property
    def trees(self) -> tuple[RadixTree, ...]:
        """The trees, usually one."""
        return tuple(self._trees)

    @property
    def matchable(self) -> int:
        """Number of blocks that are matchable in every tree."""
        return self._quorum if len(self._trees) > 1 else sum(tree.matchable for tree in self._trees)

    def keys(self) -> Iterator[int]:
        """Yield the 64-bit keys of all blocks that are matchable in every tree."""
        if len(self._trees) > 1:
            return (key for key, n in self._holders.items() if n == len(self._trees))
        return (key for tree in self._trees for key in tree.keys())  # noqa: SIM118 - a tree is no dict

    @property
    def published(self) -> int:
        """Number of keys that are to be published: `matchable`, or ends and marks."""
        return self.matchable if self.hits is None else len(self.hits)

    def published_keys(self) -> Iterator[int]:
        """Yield the keys that are to be published; see `keys.hit_marks` for those of a hybrid model."""
        return self.keys() if self.hits is None else self.hits.keys()

    def take_changes(self) -> Delta:
        """Return and forget the keys that came to be published, and ceased to be, since the last call."""
        if self.hits is not None:
            return self.hits.take_changes()
        changes, self._changes = self._changes, Delta(set(), set())
        return changes

    def end_anywhere(self, block_tokens: int) -> HybridHits:
        """Publish only where hits end from now on: the endpoint's model is a hybrid. O(blocks)."""
        self.collect()
        given = (set(self.keys()) - self._changes.added) | self._changes.removed
        self._changes = Delta(set(), set())
        for tree in self._trees:
            tree.touch_all()
        self._touched = self.take_touched()
        for tree in self._trees:
            tree.watch_anchors(False)
        self.hits = HybridHits(block_tokens, self._holds, self._up, given, self._watched)
        return self.hits

    def add(self, tree: RadixTree) -> None:
        """Add an empty tree."""
        self.collect()
        if self._trees:
            # A prefix now needs one holder more, and nothing stored before has it yet.
            for key in self.keys():
                self._changes.lose(key)
            for other in self._trees:
                other.touch_all()
        if len(self._trees) == 1:
            self._holders = dict.fromkeys(self._trees[0].keys(), 1)
        tree.watch_anchors(self._watched and self.hits is None)
        tree.now = self._now
        self._trees.append(tree)
        self._quorum = 0

    def drop(self) -> None:
        """Forget all trees. They have been cleared."""
        if self.hits is not None:
            self._changes = self.hits.close()
        self._touched = self.take_touched()
        self.hits = None
        self._trees.clear()

    def collect(self) -> None:
        """Gather what changed in the trees: as it is for one, by quorum for several."""
        for tree in self._trees:
            changes = tree.take_changes()
            if len(self._trees) == 1:
                if self._changes.added or self._changes.removed:
                    self._changes.lose_all(changes.removed)
                    self._changes.gain_all(changes.added)
                else:
                    self._changes = changes
                continue
            needed = len(self._trees)
            for key in changes.removed:
                if self._holders[key] == needed:
                    self._changes.lose(key)
                    self._quorum -= 1
                self._holders[key] -= 1
                if not self._holders[key]:
                    del self._holders[key]
            for key in changes.added:
                self._holders[key] = self._holders.get(key, 0) + 1
                if self._holders[key] == needed:
                    self._changes.gain(key)
                    self._quorum += 1

    def find_ends(self, groups: Iterable[Group], credited: Sequence[str], unit: int, told: Sequence[Handle]) -> None:
        """Bring the ends of a hybrid model up to date after `collect`; see `HybridHits.collect`."""
        assert self.hits is not None
        held, self._changes = self._changes, Delta(set(), set())
        self.hits.collect(groups, credited, unit, told, held)

    # --- anchors -------------------------------------------------------------------------------------------

    def end_request(self, chain: TokenChain) -> None:
        """Make the last block of a prompt an anchor while it is here, if the whole prompt is matchable. O(trees)."""
        for tree in self._trees:
            tree.end_request(chain)

    def tick(self, now: float, engine_s: float = 0.0) -> None:
        """Set the trees' clock: `now` in seconds, and the engine's own time of what comes, 0.0 if it does not tell.

        The trees go by the engine's time: a replay brings hours in a moment, and blocks that were evicted in it had not
        been idle for no time at all.
        """
        if 0 < engine_s < inf:
            behind = now - engine_s
            self._behind_s = behind if self._behind_s is None else min(behind, self._behind_s)
        self._now = self._at(now)
        for tree in self._trees:
            tree.now = self._now

    def _at(self, now: float) -> float:
        return now if self._behind_s is None else now - self._behind_s

    def use(self, chain: TokenChain, depth: int, now: float) -> None:
        """Note that a prompt is served from its first `depth` blocks here. O(edges)."""
        key, at = chain.key(depth), self._at(now)
        for tree in self._trees:
            tree.now = at
            tree.use(key)

    def take_idle_s(self) -> list[float]:
        """Return and forget how long the blocks that were removed had not been used."""
        idle = [age for tree in self._trees for age in tree.idle_s]
        for tree in self._trees:
            tree.idle_s.clear()
        return idle

    def ends(self) -> int:
        """Return how many keys are anchors of any stride: blocks that end an edge's run or a request.

        In the tree that has most of them. O(edges + ends).
        """
        if self.hits is not None:
            return self.hits.last()
        return max((tree.ends() for tree in self._trees), default=0)

    def anchors(self, anchor_stride: int) -> Iterator[int]:
        """Yield the keys of the anchors of stride `anchor_stride`. O(edges + anchors)."""
        if self.hits is not None:
            return self.hits.anchors(anchor_stride)
        if len(self._trees) > 1:
            anchors = {key for tree in self._trees for key in tree.anchors(anchor_stride)}
            return (key for key in anchors if self._holders[key] == len(self._trees))
        return (key for tree in self._trees for key in tree.anchors(anchor_stride))

    def is_anchor(self, key: int, depth: int, anchor_stride: int) -> bool:
        """Whether the block (key, depth) is an anchor of stride `anchor_stride`. O(1)."""
        if self.hits is not None:
            return self.hits.is_anchor(key, depth, anchor_stride)
        if len(self._trees) > 1 and self._holders.get(key) != len(self._trees):
            return False
        return any(tree.is_anchor(key, depth, anchor_stride) for tree in self._trees)

    def watch_anchors(self, on: bool) -> None:
        """Begin or cease to note touched blocks. What is there already is not touched by that."""
        self._watched = on
        if not on:
            self._touched = {}
        if self.hits is not None:
            self.hits.watch_anchors(on)
            return
        for tree in self._trees:
            tree.watch_anchors(on)

    @property
    def touched(self) -> int:
        """Number of touched blocks that were not taken."""
        if self.hits is not None:
            return len(self._touched) + self.hits.touched
        return len(self._touched) + sum(tree.touched for tree in self._trees)

    def take_touched(self) -> dict[int, int]:
        """Return and forget the blocks (key -> depth) that may have become, or ceased to be, anchors."""
        touched, self._touched = self._touched, {}
        if self.hits is not None:
            return {**touched, **self.hits.take_touched()}
        for tree in self._trees:
            touched = touched | tree.take_touched() if touched else tree.take_touched()
        return touched

    def _holds(self, key: int, depth: int) -> bool:
        """Whether a block is matchable in every tree. O(trees)."""
        return bool(self._trees) and all(tree.is_anchor(key, depth, 1) for tree in self._trees)

    def _up(self, key: int, depth: int, n: int) -> int:
        """The key `n` blocks above one that every tree holds."""
        return self._trees[0].up(key, depth, n)

    def _check(self) -> None:
        """Assert every invariant, the trees' included. O(blocks)."""
        for tree in self._trees:
            tree._check()
        if len(self._trees) > 1:
            assert self._quorum == sum(1 for _ in self.keys())
            held = [set(tree.keys()) for tree in self._trees]
            assert set(self.keys()) == set.intersection(*held)
