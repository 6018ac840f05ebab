"""The exact radix tree of one endpoint's cache: path-compressed, over canonical blocks.

Rules:
1. A block is *held* in a tier while its count there is above 0. Blocks are counted, because several engine blocks can
   vouch for one canonical block (engine blocks of 128 tokens that fork late share their first canonical blocks).
2. A block is *matchable* when it and all its ancestors are held in a credited tier. So the matchable blocks of an edge
   are its first ones; their number is the edge's *reach*.
3. A block stays in the tree while it is held or has a descendant; otherwise it is pruned at once, and an edge that is
   left with one child is merged with it. So the tree holds the engine's blocks and the gaps above them, nothing else.
4. Splits and merges point the blocks of the shorter side to another edge: O(min of both).
5. A matchable block is an *anchor* of stride k when its depth is 1 or a multiple of k, when it is the last matchable
   block of its edge, or when a request's prompt ended with it (see `published`).

Memory: per block 64 bytes of tokens, 8 of key, 4 a tier of counts, and about 110 for the entry that finds a key's
edge: 190 bytes in all; per edge about 600 more; per request end about 100; per touched block 110 until it is taken.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import repeat

from ..errors import UsageError
from ..events import CPU, GPU
from ..keys.chain import STRIDE, ChainCursor, ChainSpec, TokenChain
from .edge import Edge
from .idle import Idleness
from .published import Published


class RadixTree(Published):
    """Which prefixes an endpoint holds, exactly, by tier; what it publishes are its matchable blocks.

    A block is named by (key, depth), the first one of a path having depth 1. `credited` are the tiers that make a block
    matchable; `idle` has the time, and is told for how long removed blocks had not been used.
    """

    def __init__(self, spec: ChainSpec, credited: Sequence[str] = (GPU, CPU), idle: Idleness | None = None) -> None:
        super().__init__()
        self._spec = spec
        self._size = spec.block_bytes
        self._credited = tuple(credited)
        self._where: dict[int, Edge] = {}
        self._roots: dict[int, Edge] = {}
        self._matchable = 0
        self._request_ends: dict[int, int] = {}
        """Key -> depth."""
        self._idle = idle or Idleness()

    # --- reading -------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Blocks in the tree, matchable or not."""
        return len(self._where) - len(self._roots)

    def has(self, key: int | None, depth: int) -> bool:
        """Whether the block (key, depth) is in the tree, held or not; a namespace's root has depth 0. O(1)."""
        edge = self._where.get(key) if key is not None else None
        if edge is None:
            return False
        at = depth - edge.depth - 1
        return depth == 0 if edge.parent is None else 0 <= at < len(edge.keys) and edge.keys[at] == key

    @property
    def n_keys(self) -> int:
        """Number of matchable blocks."""
        return self._matchable

    def __iter__(self) -> Iterator[int]:
        """Yield the keys of all matchable blocks, parents before children."""
        for edge in self._edges():
            yield from edge.keys[: edge.reach]

    def placed(self) -> Iterator[tuple[int, int]]:
        """Yield the keys of all matchable blocks with their depths."""
        for edge in self._edges():
            yield from zip(edge.keys[: edge.reach], range(edge.depth + 1, edge.depth + edge.reach + 1), strict=True)

    def anchors(self, anchor_stride: int) -> Iterator[int]:
        """Yield the keys of the anchors of stride `anchor_stride`. O(edges + anchors)."""
        ends: dict[Edge, list[int]] = {}
        for key, depth in self._request_ends.items():
            edge = self._where[key]
            if depth - edge.depth < edge.reach and depth > 1 and depth % anchor_stride:
                ends.setdefault(edge, []).append(key)
        for edge in self._edges():
            last, first = edge.reach - 1, -(edge.depth + 1) % anchor_stride
            yield from edge.keys[first : last + 1 : anchor_stride]
            others = {0, last} if not edge.depth else {last}
            yield from (edge.keys[i] for i in others if edge.reach and (i - first) % anchor_stride)
            yield from ends.get(edge, ())

    def is_anchor(self, key: int, depth: int, anchor_stride: int) -> bool:
        """Whether the block (key, depth) is an anchor of stride `anchor_stride`. O(1)."""
        edge = self._where.get(key)
        if edge is None:
            return False
        at = depth - edge.depth - 1
        if not 0 <= at < edge.reach or edge.keys[at] != key:
            return False
        return depth % anchor_stride == 0 or depth == 1 or at == edge.reach - 1 or key in self._request_ends

    def n_fixed(self) -> int:
        """Return how many matchable blocks are the last of their edge or of a request. O(edges + request ends)."""
        fixed = sum(1 for edge in self._edges() if edge.reach)
        for key, depth in self._request_ends.items():
            edge = self._where[key]
            fixed += depth - edge.depth < edge.reach
        return fixed

    # --- writing -------------------------------------------------------------------------------------------

    def plant(self, root_key: int) -> None:
        """Make the root of a namespace unless it is there. O(1)."""
        if root_key not in self._roots:
            root = Edge(None, 0)
            root.root_key = root_key
            self._roots[root_key] = root
            self._where[root_key] = root

    def store(self, parent: int, depth: int, blocks: Sequence[bytes], tier: str | None) -> list[int]:
        """Put `blocks` below the block (parent, depth), counting one more of each in `tier`; return their keys.

        With `tier` None the path is made and nothing is counted: the caller must count a block below it next. If a
        block's 64-bit key is another block's already (expected 1e-9 at 100k blocks), that block and those below it are
        left out, and fewer keys than blocks are returned. Raises `UsageError` for an unknown parent. O(blocks), plus at
        most 31 blocks to resume the chain.
        """
        edge = self._edge(parent)
        keys: list[int] = []
        at = depth - edge.depth
        i = 0
        while i < len(blocks):
            if at == len(edge.keys):
                child = edge.children.get(blocks[i])
                if child is None:
                    cursor = self._cursor(keys[-1] if keys else parent, depth + i)
                    self._append(edge, blocks[i:] if i else blocks, cursor, keys, tier)
                    return keys
                edge, at = child, 0
                edge.used_at = self._idle.now
            n = edge.common(at, blocks, i, self._size)
            if not n:
                edge = self._split(edge, at)
                at = len(edge.keys)
                continue
            keys.extend(edge.keys[at : at + n])
            if tier is not None:
                self._count(edge, at, at + n, tier, 1)
            at += n
            i += n
        return keys

    def add(self, key: int, depth: int, n: int, tier: str) -> None:
        """Count one more in `tier` of each of the `n` blocks that end at (key, depth). O(n)."""
        for edge, lower, upper in reversed(self._parts(key, depth, n)):
            self._count(edge, lower, upper, tier, 1)

    def remove(self, key: int, depth: int, n: int, tier: str) -> None:
        """Count one less in `tier` of each of the `n` blocks that end at (key, depth), and prune. O(n) amortised.

        Raises `UsageError` when one of them is not held there.
        """
        parts = self._parts(key, depth, n)
        for edge, lower, upper in parts:
            self._count(edge, lower, upper, tier, -1)
            if tier in self._credited:
                self._idle.evicted_s += [self._idle.now - edge.used_at] * (upper - lower)
        self._prune(parts[0][0])

    def clear(self) -> None:
        """Drop everything. O(blocks)."""
        for root in self._roots.values():
            self._settle(root, 0)
        self._where.clear()
        self._roots.clear()
        self._request_ends.clear()

    def end_request(self, chain: TokenChain) -> None:
        """Make the last block of a prompt an anchor while it is in the tree, if the whole prompt is matchable. O(1)."""
        key = chain.key(chain.depth)
        if self.is_anchor(key, chain.depth, 1):
            self._request_ends[key] = chain.depth
            if self._touched is not None:
                self._touched[key] = chain.depth

    def use(self, key: int) -> None:
        """Note that a prompt uses the path down to the block with this key. O(edges above it)."""
        edge = self._where.get(key)
        while edge is not None:
            edge.used_at = self._idle.now
            edge = edge.parent

    def up(self, key: int, depth: int, n: int) -> int:
        """Return the key of the block `n` above (key, depth), or the root's. O(edges between)."""
        if n == depth:
            return self._edge(key).root()
        edge = self._edge(key)
        at = depth - edge.depth - 1 - n
        while at < 0 and edge.parent is not None:
            edge = edge.parent
            at += len(edge.keys)
        return edge.keys[at]

    def depth(self, chain: TokenChain) -> int:
        """Return how many leading blocks of a prompt are matchable. O(log depth) keys."""
        return bisect_left(range(1, chain.depth + 1), True, key=lambda d: not self.is_anchor(chain.key(d), d, 1))

    def paths(self, key: int, depth: int, blocks: int, most: int) -> Iterator[bytes]:
        """Yield the packed tokens of up to `blocks` blocks of `most` paths below (key, depth), the newest first.

        Nothing for a block that is not in the tree. O(edges).
        """
        size, edge = self._size, self._where.get(key)
        if edge is None:
            return
        stack = [(edge, depth - edge.depth, b"")]
        while stack and most:
            edge, at, data = stack.pop()
            data += edge.data[at * size : (at + blocks) * size]
            if len(data) >= blocks * size or not edge.children:
                most -= 1
                yield data[: blocks * size]
            else:
                stack += [(child, 0, data) for child in list(edge.children.values())[-most:]]

    # --- parts ---------------------------------------------------------------------------------------------

    def _edge(self, key: int) -> Edge:
        try:
            return self._where[key]
        except KeyError:
            raise UsageError(
                f"no block with key {key:#x} in the tree: store its parent, or plant its root, first"
            ) from None

    def _edges(self) -> Iterator[Edge]:
        stack = list(self._roots.values())
        while stack:
            edge = stack.pop()
            yield edge
            stack.extend(edge.children.values())

    def _parts(self, key: int, depth: int, n: int) -> list[tuple[Edge, int, int]]:
        """The `n` blocks that end at (key, depth), as (edge, first, last + 1), deepest edge first."""
        edge = self._edge(key)
        upper = depth - edge.depth
        parts = []
        while n > upper:
            if edge.parent is None or edge.parent.parent is None:
                raise UsageError("the blocks reach above the root")
            if upper:
                parts.append((edge, 0, upper))
            n -= upper
            edge = edge.parent
            upper = len(edge.keys)
        parts.append((edge, upper - n, upper))
        return parts

    def _cursor(self, key: int, depth: int) -> ChainCursor:
        """The chain's streaming state at (key, depth): at most 31 blocks are read back."""
        back = depth % STRIDE
        if back == 0:
            return ChainCursor(self._spec, key, depth)
        parts = reversed(self._parts(key, depth, back))
        blocks = b"".join([edge.blocks(lower, upper, self._size) for edge, lower, upper in parts])
        return ChainCursor(self._spec, self.up(key, depth, back), depth, blocks)

    def _append(
        self, edge: Edge, blocks: Sequence[bytes], cursor: ChainCursor, keys: list[int], tier: str | None
    ) -> None:
        """Put new blocks below the end of `edge`: into its own edge when it is a leaf, else into a new one."""
        size = self._size
        if edge.children or edge.parent is None:
            leaf = Edge(edge, edge.depth + len(edge.keys))
        else:
            leaf = edge
        leaf.used_at = self._idle.now
        start = len(leaf.keys)
        fresh = cursor.extend(blocks)
        wanted, made = len(fresh), self._enter(fresh, leaf)
        if made < wanted:
            blocks, fresh = blocks[:made], fresh[:made]
        if not made:
            self._prune(edge)
            return
        data = b"".join(blocks)
        if len(data) > made * size:
            leaf.extras.update((start + i, block[size:]) for i, block in enumerate(blocks) if len(block) > size)
            data = b"".join([block[:size] for block in blocks])
        leaf.data += data
        leaf.keys += array("Q", fresh)
        for count in leaf.counts.values():
            count.extend([0] * made)
        if leaf is not edge:
            edge.children[blocks[0]] = leaf
        if tier is not None:
            counts = leaf.counts.get(tier)
            if counts is None:
                counts = leaf.counts[tier] = array("I", bytes(4 * (start + made)))
            counts[start:] = array("I", [1]) * made
            if leaf.reach == start and tier in self._credited and leaf.reachable():
                self._advance(leaf)
        elif made < wanted:
            self._prune(leaf)
            return
        keys += fresh

    def _enter(self, fresh: list[int], leaf: Edge) -> int:
        """Register the keys of new blocks, up to the first key that another block has; return how many."""
        where, known = self._where, len(self._where)
        found = list(map(where.setdefault, fresh, repeat(leaf)))
        if len(where) - known == len(fresh):
            return len(fresh)
        old = set(leaf.keys)
        seen: set[int] = set()
        made = len(fresh)
        for i, key in enumerate(fresh):
            if key in seen or key in old or found[i] is not leaf:
                made = min(made, i)
            elif i > made:
                del where[key]
            seen.add(key)
        return made

    def _count(self, edge: Edge, lower: int, upper: int, tier: str, change: int) -> None:
        """Add `change` to the counts of the edge's blocks `lower` to `upper` - 1, and move its reach accordingly."""
        lacks = edge.count(lower, upper, tier, change)
        if lacks is not None:
            raise UsageError(f"block {edge.keys[lacks]:#x} is not held in tier {tier!r}")
        if tier not in self._credited:
            return
        if change > 0:
            if lower <= edge.reach < upper and edge.reachable():
                self._advance(edge)
        elif lower < edge.reach:
            reach = min(upper, edge.reach)
            still = edge.held_until(lower, reach, self._credited)
            if still < reach:
                self._settle(edge, still)

    def _advance(self, edge: Edge) -> None:
        """Extend the reach of `edge`, and of its children once all its blocks are matchable."""
        stack = [edge]
        while stack:
            edge = stack.pop()
            start = edge.reach
            edge.reach = edge.held_until(start, len(edge.keys), self._credited)
            self._changes.gain_all(edge.keys[start : edge.reach])
            self._matchable += edge.reach - start
            self._touch(edge, start - 1, edge.reach)
            if edge.reach == len(edge.keys):
                stack.extend(edge.children.values())

    def _settle(self, edge: Edge, reach: int) -> None:
        """Shorten the reach of `edge` to `reach` blocks, and that of the edges below it to none."""
        stack = [(edge, reach)]
        while stack:
            edge, reach = stack.pop()
            self._changes.lose_all(edge.keys[reach : edge.reach])
            self._matchable -= edge.reach - reach
            self._touch(edge, reach - 1, edge.reach)
            edge.reach = reach
            stack.extend((child, 0) for child in edge.children.values() if child.reach)

    def _touch(self, edge: Edge, start: int, stop: int) -> None:
        """While anchors are watched, touch blocks `start` (0 if that is negative) to `stop` - 1 of an edge."""
        if self._touched is not None:
            start = max(start, 0)
            depths = range(edge.depth + start + 1, edge.depth + stop + 1)
            self._touched.update(zip(edge.keys[start:stop], depths, strict=True))

    def _split(self, edge: Edge, at: int) -> Edge:
        """Cut the edge before block `at`, 0 < at < len; return the upper edge, which ends with block `at` - 1."""
        upper, _, fresh = edge.split(at, self._size)
        for key in fresh.keys:
            self._where[key] = fresh
        self._touch(upper, upper.reach - 1, upper.reach)
        return upper

    def _prune(self, edge: Edge) -> None:
        """Drop the last blocks that no tier holds, from `edge` upwards; merge what is left with an only child."""
        size, where = self._size, self._where
        while edge.parent is not None and not edge.children:
            end = edge.held_end()
            gone = edge.keys[end:]
            for key in gone:
                del where[key]
            if self._request_ends:
                for key in self._request_ends.keys() & gone:
                    del self._request_ends[key]
            if end:
                if gone:
                    edge.trim(end, size)
                break
            del edge.parent.children[edge.block(0, size)]
            edge = edge.parent
        if edge.parent is None:
            if not edge.children:
                del self._roots[edge.root_key], where[edge.root_key]
        elif len(edge.children) == 1:
            self._touch(edge, edge.reach - 1, edge.reach)
            stays, goes = edge.merge(size)
            for key in goes.keys:
                where[key] = stays

    def _check(self) -> None:
        """Assert every invariant of the structure. O(blocks), recomputing each key."""
        seen: dict[int, Edge] = {}
        matchable = 0
        for root_key, root in self._roots.items():
            assert root.parent is None and not root.keys and root.root_key == root_key
            seen[root_key] = root
        for edge in self._edges():
            if edge.parent is None:
                continue
            n = len(edge.keys)
            assert n and len(edge.data) == n * self._size
            assert all(len(c) == n for c in edge.counts.values())
            assert edge.depth == edge.parent.depth + len(edge.parent.keys)
            assert edge.parent.children[edge.block(0, self._size)] is edge
            assert len(edge.children) != 1, "an only child is merged"
            assert edge.children or any(c[n - 1] for c in edge.counts.values()), "an unheld tail is pruned"
            held = [edge.held(i, self._credited) for i in range(n)]
            reach = (held.index(False) if False in held else n) if edge.reachable() else 0
            assert edge.reach == reach, (edge.reach, reach)
            matchable += reach
            parent_key = edge.parent.keys[-1] if edge.parent.keys else edge.root()
            cursor = self._cursor(parent_key, edge.depth)
            for i in range(n):
                assert cursor.push(edge.block(i, self._size)) == edge.keys[i]
                seen[edge.keys[i]] = edge
        assert matchable == self._matchable
        assert seen == self._where
        assert self._request_ends.keys() <= seen.keys() - self._roots.keys()
        assert all(0 < depth - seen[key].depth <= len(seen[key].keys) for key, depth in self._request_ends.items())
