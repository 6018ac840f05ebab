"""The exact radix tree of one endpoint's cache: path-compressed, over canonical blocks.

Rules:
1. A block is *held* in a tier while its count there is above 0. Counts, because several engine blocks can vouch
   for one canonical block (an engine block of 128 tokens that forks late shares its first canonical blocks).
2. A block is *matchable* when it and all its ancestors are held in a credited tier. Matchable blocks are closed
   under prefixes: in every edge they are a leading run, whose length is `reach`. They are what is published.
3. A block stays in the tree while it is held or has a descendant; otherwise it is pruned at once, and a node left
   with one child is merged with it. So the tree never holds more than the engine's blocks and the gaps below them.
4. Splits and merges re-point the shorter side only: O(min of both) blocks.

Memory: per block 64 bytes of tokens, 8 of key, 4 a tier of counts, and about 110 for the entry that finds a key's
node: 190 bytes in all; per edge about 600 more.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .chain import STRIDE, ChainCursor, ChainSpec, TokenChain
from .errors import UsageError
from .events import CPU, GPU


class Changes(NamedTuple):
    """Keys that became matchable and keys that ceased to be, net, since the last `take_changes`."""

    added: set[int]
    removed: set[int]

    def gain(self, key: int) -> None:
        """Note that `key` became matchable."""
        if key in self.removed:
            self.removed.remove(key)
        else:
            self.added.add(key)

    def lose(self, key: int) -> None:
        """Note that `key` ceased to be matchable."""
        if key in self.added:
            self.added.remove(key)
        else:
            self.removed.add(key)


class _Node:
    """One edge: blocks `depth`+1 .. `depth`+len(keys) and the children below its end."""

    __slots__ = ("children", "counts", "data", "depth", "extras", "keys", "parent", "reach", "root_key")

    def __init__(self, parent: _Node | None, depth: int) -> None:
        self.parent = parent
        self.depth = depth
        self.root_key = 0
        self.data = bytearray()
        self.extras: dict[int, bytes] = {}
        self.keys = array("Q")
        self.counts: dict[str, array[int]] = {}
        self.reach = 0
        self.children: dict[bytes, _Node] = {}


class RadixTree:
    """Which prefixes an endpoint holds, exactly, by tier.

    A position is named by (key, depth). `credited` are the tiers that make a block matchable.
    """

    def __init__(self, spec: ChainSpec, credited: Sequence[str] = (GPU, CPU)) -> None:
        self._spec = spec
        self._credited = tuple(credited)
        self._where: dict[int, _Node] = {}
        self._roots: dict[int, _Node] = {}
        self._changes = Changes(set(), set())
        self._matchable = 0
        self.collisions = 0
        """Blocks refused because another block already had their 64-bit key (expected 1e-9 at 100k blocks)."""

    # --- reading -------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Blocks in the tree, matchable or not."""
        return len(self._where) - len(self._roots)

    def has(self, key: int | None, depth: int) -> bool:
        """Whether the block (key, depth) is in the tree, held or not; a namespace's root has depth 0. O(1)."""
        node = self._where.get(key) if key is not None else None
        if node is None:
            return False
        at = depth - node.depth - 1
        return depth == 0 if node.parent is None else 0 <= at < len(node.keys) and node.keys[at] == key

    @property
    def matchable(self) -> int:
        """Number of matchable blocks."""
        return self._matchable

    def match(self, chain: TokenChain) -> int:
        """Return how many leading blocks of `chain` are matchable, comparing tokens, not keys. O(depth) bytes."""
        node = self._roots.get(chain.root)
        depth = 0
        while node is not None and depth < chain.depth:
            node = node.children.get(chain.block(depth))
            if node is None:
                break
            run = self._common(node, chain, depth)
            depth += run
            if run < len(node.keys):
                break
        return depth

    def keys(self) -> Iterator[int]:
        """Yield the keys of all matchable blocks, parents before children."""
        for node in self._nodes():
            yield from node.keys[: node.reach]

    def anchors(self, every: int) -> Iterator[int]:
        """Yield the matchable keys whose depth is a multiple of `every` or that end a matchable run."""
        for node in self._nodes():
            last = node.reach - 1
            for i in range(node.reach):
                if (node.depth + i + 1) % every == 0 or i == last:
                    yield node.keys[i]

    def take_changes(self) -> Changes:
        """Return and forget what became matchable, and what ceased to be, since the last call."""
        changes, self._changes = self._changes, Changes(set(), set())
        return changes

    # --- writing -------------------------------------------------------------------------------------------

    def plant(self, root_key: int) -> None:
        """Make the root of a namespace, if it is not there."""
        if root_key not in self._roots:
            root = _Node(None, 0)
            root.root_key = root_key
            self._roots[root_key] = root
            self._where[root_key] = root

    def store(self, parent: int, depth: int, blocks: Sequence[bytes], tier: str | None) -> list[int]:
        """Put `blocks` below the block (parent, depth), counting one more of each in `tier`; return their keys.

        With `tier` None the path is made and nothing counted: the caller counts a block below it next. Fewer keys
        than blocks come back if a key collides with another block's. Raises `UsageError` for an unknown parent.
        O(blocks), plus at most 31 blocks to resume the chain.
        """
        node = self._node(parent)
        cursor = self._cursor(parent, depth)
        keys: list[int] = []
        at = depth - node.depth
        i = 0
        while i < len(blocks):
            if at == len(node.keys):
                child = node.children.get(blocks[i])
                if child is None:
                    self._append(node, blocks[i:], cursor, keys, tier)
                    return keys
                node, at = child, 0
            if self._block(node, at) != blocks[i]:
                node = self._split(node, at)
                at = len(node.keys)
                continue
            keys.append(cursor.push(blocks[i]))
            if tier is not None:
                self._count(node, at, tier, 1)
            at += 1
            i += 1
        return keys

    def add(self, key: int, depth: int, n: int, tier: str) -> None:
        """Count one more in `tier` of each of the `n` blocks that end at (key, depth). O(n)."""
        path = self._run(key, depth, n)
        for node, at in reversed(path):
            self._count(node, at, tier, 1)

    def remove(self, key: int, depth: int, n: int, tier: str) -> None:
        """Count one less in `tier` of each of the `n` blocks that end at (key, depth), and prune. O(n) amortised.

        Raises `UsageError` when one of them is not held there.
        """
        path = self._run(key, depth, n)
        for node, at in path:
            self._count(node, at, tier, -1)
        self._prune(path[0][0])

    def clear(self, tier: str | None = None) -> None:
        """Drop `tier`'s counts, or everything when it is None. O(blocks)."""
        leaves = []
        for node in self._nodes():
            if tier is None:
                node.counts.clear()
            else:
                node.counts.pop(tier, None)
            still = next((at for at in range(node.reach) if not self._held(node, at)), node.reach)
            if still < node.reach:
                self._settle(node, still)
            if not node.children and node.keys:
                leaves.append(node.keys[-1])
        if tier is None:
            self._where.clear()
            self._roots.clear()
        for key in leaves:
            # A merge may have put the leaf's blocks into another node: ask again where they are.
            leaf = self._where.get(key)
            if leaf is not None and not leaf.children:
                self._prune(leaf)

    def up(self, key: int, depth: int, n: int) -> int:
        """Return the key of the block `n` above (key, depth)."""
        node = self._node(key)
        at = depth - node.depth - 1 - n
        while at < 0 and node.parent is not None:
            node = node.parent
            at += len(node.keys)
        return node.keys[at]

    # --- parts ---------------------------------------------------------------------------------------------

    def _node(self, key: int) -> _Node:
        try:
            return self._where[key]
        except KeyError:
            raise UsageError(
                f"no block with key {key:#x} in the tree: store its parent, or plant its root, first"
            ) from None

    def _nodes(self) -> Iterator[_Node]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _block(self, node: _Node, at: int) -> bytes:
        size = self._spec.block_bytes
        block = bytes(node.data[at * size : (at + 1) * size])
        return block + node.extras[at] if node.extras and at in node.extras else block

    def _common(self, node: _Node, chain: TokenChain, depth: int) -> int:
        """Length of the matchable run that `node` shares with `chain` from `depth` on."""
        limit = min(node.reach, chain.depth - depth)
        size = self._spec.block_bytes
        if not node.extras and not chain.extras():
            start = depth * size
            if node.data[: limit * size] == chain.packed[start : start + limit * size]:
                return limit
        for i in range(limit):
            if self._block(node, i) != chain.block(depth + i):
                return i
        return limit

    def _run(self, key: int, depth: int, n: int) -> list[tuple[_Node, int]]:
        """Positions of the `n` blocks that end at (key, depth), deepest first."""
        node = self._node(key)
        at = depth - node.depth - 1
        run = []
        for _ in range(n):
            if at < 0:
                if node.parent is None or node.parent.parent is None:
                    raise UsageError("the run reaches above the root")
                node = node.parent
                at = len(node.keys) - 1
            run.append((node, at))
            at -= 1
        return run

    def _cursor(self, key: int, depth: int) -> ChainCursor:
        """The chain's streaming state at (key, depth): at most 31 blocks are read back."""
        back = depth % STRIDE
        if back == 0:
            return ChainCursor.resume(self._spec, depth, key, b"")
        run = self._run(key, depth, back)
        boundary, at = run[-1]
        if depth == back:
            seed = _root_of(boundary)
        elif at:
            seed = boundary.keys[at - 1]
        else:
            assert boundary.parent is not None
            seed = boundary.parent.keys[-1]
        return ChainCursor.resume(
            self._spec, depth, seed, b"".join(self._block(node, at) for node, at in reversed(run))
        )

    def _append(
        self, node: _Node, blocks: Sequence[bytes], cursor: ChainCursor, keys: list[int], tier: str | None
    ) -> None:
        """Put new blocks below the end of `node`: into its own edge when it is a leaf, else into a new one."""
        size = self._spec.block_bytes
        if node.children or node.parent is None:
            leaf = _Node(node, node.depth + len(node.keys))
        else:
            leaf = node
        start = len(leaf.keys)
        for block in blocks:
            key = cursor.push(block)
            if key in self._where:
                self.collisions += 1
                break
            if len(block) > size:
                leaf.extras[len(leaf.keys)] = block[size:]
            leaf.data += block[:size]
            leaf.keys.append(key)
            self._where[key] = leaf
            keys.append(key)
        made = len(leaf.keys) - start
        if not made:
            self._prune(node)
            return
        for count in leaf.counts.values():
            count.extend([0] * made)
        if leaf is not node:
            node.children[blocks[0]] = leaf
        if tier is not None:
            for at in range(start, start + made):
                self._count(leaf, at, tier, 1)
        elif made < len(blocks):
            del keys[-made:]
            self._prune(leaf)

    def _count(self, node: _Node, at: int, tier: str, change: int) -> None:
        counts = node.counts.get(tier)
        if counts is None:
            counts = node.counts[tier] = array("I", bytes(4 * len(node.keys)))
        value = counts[at] + change
        if value < 0:
            raise UsageError(f"block {node.keys[at]:#x} is not held in tier {tier!r}")
        counts[at] = value
        if change > 0:
            if at == node.reach and value == 1 and tier in self._credited and _reachable(node):
                self._advance(node)
        elif value == 0 and at < node.reach and not self._held(node, at):
            self._settle(node, at)

    def _held(self, node: _Node, at: int) -> bool:
        counts = node.counts
        return any(tier in counts and counts[tier][at] for tier in self._credited)

    def _advance(self, node: _Node) -> None:
        """Extend the matchable run of `node`, and of its children when it becomes whole."""
        stack = [node]
        while stack:
            node = stack.pop()
            while node.reach < len(node.keys) and self._held(node, node.reach):
                self._changes.gain(node.keys[node.reach])
                node.reach += 1
                self._matchable += 1
            if node.reach == len(node.keys):
                stack.extend(node.children.values())

    def _settle(self, node: _Node, reach: int) -> None:
        """Shorten the matchable run of `node` to `reach` blocks, and end those below it."""
        stack = [(node, reach)]
        while stack:
            node, reach = stack.pop()
            for key in node.keys[reach : node.reach]:
                self._changes.lose(key)
            self._matchable -= node.reach - reach
            node.reach = reach
            stack.extend((child, 0) for child in node.children.values() if child.reach)

    # --- shape ---------------------------------------------------------------------------------------------

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut the edge before block `at`, 0 < at < len; return the upper node, which ends with block `at` - 1."""
        assert node.parent is not None
        upper, lower = self._new_halves(node, at)
        size = self._spec.block_bytes
        data, keys, counts, extras, reach = node.data, node.keys, node.counts, node.extras, node.reach
        upper.data, lower.data = data[: at * size], data[at * size :]
        upper.keys, lower.keys = keys[:at], keys[at:]
        upper.counts = {tier: c[:at] for tier, c in counts.items()}
        lower.counts = {tier: c[at:] for tier, c in counts.items()}
        upper.extras = {i: e for i, e in extras.items() if i < at}
        lower.extras = {i - at: e for i, e in extras.items() if i >= at}
        upper.reach, lower.reach = min(reach, at), max(reach - at, 0)
        fresh = lower if lower is not node else upper
        for key in fresh.keys:
            self._where[key] = fresh
        upper.children[self._block(lower, 0)] = lower
        return upper

    def _new_halves(self, node: _Node, at: int) -> tuple[_Node, _Node]:
        """Link a new node above or below `node`, whichever will own fewer blocks."""
        parent = node.parent
        assert parent is not None
        if at <= len(node.keys) - at:
            upper = _Node(parent, node.depth)
            parent.children[self._block(node, 0)] = upper
            node.parent, node.depth = upper, node.depth + at
            return upper, node
        lower = _Node(node, node.depth + at)
        lower.children = node.children
        for child in lower.children.values():
            child.parent = lower
        node.children = {}
        return node, lower

    def _prune(self, node: _Node) -> None:
        """Drop trailing blocks that nothing holds, from `node` upwards; merge what is left with an only child."""
        size = self._spec.block_bytes
        while node.parent is not None:
            if node.children:
                break
            end = len(node.keys)
            while end and not any(c[end - 1] for c in node.counts.values()):
                end -= 1
                del self._where[node.keys[end]]
            if end:
                if end < len(node.keys):
                    del node.data[end * size :], node.keys[end:]
                    for c in node.counts.values():
                        del c[end:]
                    node.extras = {i: e for i, e in node.extras.items() if i < end}
                break
            parent = node.parent
            del parent.children[self._block(node, 0)]
            node = parent
        if node.parent is None:
            if not node.children:
                del self._roots[node.root_key], self._where[node.root_key]
        elif len(node.children) == 1:
            self._merge(node)

    def _merge(self, upper: _Node) -> None:
        """Join a node with its only child; the node that owns more blocks stays."""
        (lower,) = upper.children.values()
        parent = upper.parent
        assert parent is not None
        n = len(upper.keys)
        stays, goes = (upper, lower) if n >= len(lower.keys) else (lower, upper)
        for key in goes.keys:
            self._where[key] = stays
        counts = {
            tier: upper.counts.get(tier, array("I", bytes(4 * n)))
            + lower.counts.get(tier, array("I", bytes(4 * len(lower.keys))))
            for tier in {**upper.counts, **lower.counts}
        }
        first = self._block(upper, 0)
        stays.data, stays.keys, stays.counts = upper.data + lower.data, upper.keys + lower.keys, counts
        stays.extras = {**upper.extras, **{i + n: e for i, e in lower.extras.items()}}
        stays.reach = upper.reach + lower.reach
        stays.depth, stays.parent, stays.children = upper.depth, parent, lower.children
        for child in stays.children.values():
            child.parent = stays
        parent.children[first] = stays

    def _check(self) -> None:
        """Assert every invariant of the structure. O(blocks), recomputing each key."""
        seen: dict[int, _Node] = {}
        matchable = 0
        for root_key, root in self._roots.items():
            assert root.parent is None and not root.keys and root.root_key == root_key
            seen[root_key] = root
        for node in self._nodes():
            if node.parent is None:
                continue
            n = len(node.keys)
            assert n and len(node.data) == n * self._spec.block_bytes
            assert all(len(c) == n for c in node.counts.values())
            assert node.depth == node.parent.depth + len(node.parent.keys)
            assert node.parent.children[self._block(node, 0)] is node
            assert len(node.children) != 1, "an only child is merged"
            assert node.children or any(c[n - 1] for c in node.counts.values()), "an unheld tail is pruned"
            held = [self._held(node, i) for i in range(n)]
            run = (held.index(False) if False in held else n) if _reachable(node) else 0
            assert node.reach == run, (node.reach, run)
            matchable += run
            parent_key = node.parent.keys[-1] if node.parent.keys else _root_of(node)
            cursor = self._cursor(parent_key, node.depth)
            for i in range(n):
                assert cursor.push(self._block(node, i)) == node.keys[i]
                seen[node.keys[i]] = node
        assert matchable == self._matchable
        assert seen == self._where


def _reachable(node: _Node) -> bool:
    """Whether every block above `node` is matchable."""
    parent = node.parent
    return parent is not None and (parent.parent is None or parent.reach == len(parent.keys))


def _root_of(node: _Node) -> int:
    """The namespace root's key above `node`."""
    while node.parent is not None:
        node = node.parent
    return node.root_key
