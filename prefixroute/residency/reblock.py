"""Engine blocks of any size, mapped onto the canonical blocks of a radix tree.

A `Span` is a run of engine blocks: tokens `start` to `end` of a path. A canonical block is *vouched for* in a tier by
the span that holds its last token, when that span and the ones above it, back to the block's first token, all have a
copy in the tier. So of the blocks that end in a span only the first may depend on another span: all others are counted
at once.

Rules:
1. A span vouches once per tier, however many copies it has: copies are counted in the span.
2. Spans whose engine blocks begin and end on canonical boundaries vouch alone, and give their tokens to the tree.
   Others (pages smaller than a block, sizes that do not divide) keep their tokens, and vouch together.
3. A span whose path to the root is unknown is unresolved and vouches for nothing; resolving it resolves its kids. So is
   one that the tree cannot take. Nothing below an unresolved span is resolved.
4. `key` is the key at depth end // block, so a span that ends no block carries its parent's.
"""

from __future__ import annotations

from ..events import ContentSpan
from ..keys.chain import TOKEN_BYTES, ChainSpec, block_extras
from .runs import Span
from .tree import RadixTree


class Reblocker:
    """Keeps one tree's counts equal to what the spans of one group vouch for."""

    __slots__ = ("_size", "_width", "tree")

    def __init__(self, spec: ChainSpec, tree: RadixTree) -> None:
        self._size = spec.block_tokens
        self._width = spec.block_bytes
        self.tree = tree

    def resolve(self, span: Span, root: int) -> None:
        """Fix where `span` and all below it lie, and vouch for what they hold. O(blocks resolved)."""
        stack = [span]
        while stack:
            span = stack.pop()
            if span.root is not None or not span.known:
                continue
            size = span.end - span.start
            span.start = span.parent.end if span.parent is not None else 0
            span.end = span.start + size
            span.root = root
            for tier in span.copies:
                self.hold(span, tier)
            if span.root is not None:
                stack.extend(span.each_kid())

    def hold(self, span: Span, tier: str) -> None:
        """Vouch in `tier`, in which `span` just got its first copy."""
        if span.root is None:
            return
        n = self._own(span, span.start, tier)
        if n and not self._add(span, span.end // self._size, n, tier):
            return
        if span.start % self._size == 0 and span.unit % self._size == 0:
            span.tokens, span.contents = None, ()
        elif span.kids is not None and span.end % self._size:
            for kid in self._finishing(span):
                depth = span.end // self._size + 1
                if _vouched(kid, (depth - 1) * self._size, tier):
                    self._add(kid, depth, 1, tier)

    def release(self, span: Span, tier: str) -> None:
        """Take back what `span` vouches for in `tier`; call it while the copy still counts."""
        if span.root is None:
            return
        self._take_back(span, span.start, tier)
        if span.kids is not None and span.end % self._size:
            depth = span.end // self._size + 1
            for kid in self._finishing(span):
                if self._placed(kid) and _vouched(kid, (depth - 1) * self._size, tier):
                    assert kid.key is not None
                    self.tree.remove(self._up(kid, kid.key, depth), depth, 1, tier)

    def shorten(self, span: Span, at: int, tier: str) -> None:
        """Take back what the blocks from block `at` on vouch for in `tier`, the only one, and forget their content."""
        if not span.known:
            return
        if span.root is not None:
            key = self.key_at(span, at)
            self._take_back(span, span.start + at * span.unit, tier)
            span.key = key
        span.trim(at)

    def unresolve(self, span: Span) -> None:
        """Forget where `span` and all below it lie; the tree holds nothing of them. O(spans)."""
        stack = [span]
        while stack:
            span = stack.pop()
            if span.root is not None:
                span.root = span.key = None
                stack.extend(span.each_kid())

    def lost(self, span: Span) -> bool:
        """Whether the tree alone had the span's tokens, and dropped them with the last copy."""
        return span.known and span.tokens is None and not self._placed(span)

    def ends_block(self, span: Span) -> bool:
        """Whether the last token of some canonical block is the span's."""
        return span.end // self._size > span.start // self._size

    def key_at(self, span: Span, at: int) -> int | None:
        """Key at the end of block `at` - 1 of a span, None if the tree has not placed the span."""
        if span.root is None or span.key is None or not self._placed(span):
            return None
        return self._up(span, span.key, (span.start + at * span.unit) // self._size)

    def check(self, span: Span) -> None:
        """Assert that the tree has what the span vouches for."""
        if span.root is not None:
            assert self._placed(span) or not any(self._own(span, span.start, tier) for tier in span.copies)

    # --- parts ---------------------------------------------------------------------------------------------

    def _placed(self, span: Span) -> bool:
        return self.tree.has(span.key, span.end // self._size)

    def _own(self, span: Span, since: int, tier: str) -> int:
        """How many canonical blocks that end in the span behind token `since` it vouches for: all, or all but one."""
        first = since // self._size
        n = span.end // self._size - first
        if n and first * self._size < span.start and not _vouched(span, first * self._size, tier):
            return n - 1
        return n

    def _add(self, span: Span, depth: int, n: int, tier: str) -> bool:
        """Count the `n` blocks down to `depth`, which end in the span; False if the tree cannot take the span."""
        key, counted = self._ensure(span, n if depth == span.end // self._size else 0, tier)
        if key is None:
            self.unresolve(span)
        elif not counted:
            self.tree.add(self._up(span, key, depth), depth, n, tier)
        return key is not None

    def _take_back(self, span: Span, since: int, tier: str) -> None:
        if self._placed(span):
            n = self._own(span, since, tier)
            if n:
                assert span.key is not None
                self.tree.remove(span.key, span.end // self._size, n, tier)

    def _finishing(self, span: Span) -> list[Span]:
        """The resolved spans below that hold the last token of the canonical block which `span` leaves open."""
        end = span.end // self._size * self._size + self._size
        found = []
        stack = list(span.each_kid())
        while stack:
            kid = stack.pop()
            if kid.root is None:
                continue
            if kid.end >= end:
                found.append(kid)
            else:
                stack.extend(kid.each_kid())
        return found

    def _up(self, span: Span, key: int, depth: int) -> int:
        """Key at `depth` of the path that ends with `span`, whose key is `key`."""
        last = span.end // self._size
        return self.tree.up(key, last, last - depth) if depth < last else key

    def _ensure(self, span: Span, n: int, tier: str) -> tuple[int | None, bool]:
        """Make the path to the span if the tree lacks it; return its key, None if tokens of it are not known.

        If what is made are the last `n` blocks, they are counted in `tier` in the same pass; also return whether.
        """
        tree, size = self.tree, self._size
        if self._placed(span):
            return span.key, False
        assert span.root is not None
        unplaced: list[Span] = []
        above: Span | None = span
        while above is not None and not self._placed(above):
            unplaced.append(above)
            above = above.parent
        key = span.root if above is None or above.key is None else above.key
        depth = 0 if above is None else above.end // size
        data = _tokens(span, depth * size, span.end // size * size)
        if data is None:
            return None, False
        tree.plant(span.root)
        blocks = [data[i : i + self._width] for i in range(0, len(data), self._width)]
        contents = _contents(span, depth * size)
        if contents:
            extras = block_extras(contents, size)
            blocks = [block + extras.get(depth + i, b"") for i, block in enumerate(blocks)]
        counted = n > 0 and n == len(blocks)
        keys = tree.store(key, depth, blocks, tier if counted else None)
        if len(keys) < len(blocks):
            if counted and keys:
                tree.remove(keys[-1], depth + len(keys), len(keys), tier)
            return None, False
        for placed in unplaced:
            placed.key = keys[placed.end // size - depth - 1] if placed.end // size > depth else key
        return span.key, counted


def _vouched(span: Span, start: int, tier: str) -> bool:
    """Whether `span` and those above it, back to token `start`, all have a copy in `tier`."""
    at: Span | None = span
    while at is not None and tier in at.copies:
        if at.start <= start:
            return True
        at = at.parent
    return False


def _tokens(span: Span, start: int, end: int) -> bytes | None:
    """Packed tokens `start` to `end` of the path that ends with `span`. O(tokens and spans)."""
    parts: list[bytearray] = []
    at: Span | None = span
    while at is not None and at.end > start:
        if at.tokens is None:
            return None
        lower = max(start - at.start, 0)
        upper = max(end - at.start, 0)
        parts.append(at.tokens[lower * TOKEN_BYTES : upper * TOKEN_BYTES])
        at = at.parent
    parts.reverse()
    return b"".join(parts)


def _contents(span: Span, start: int) -> list[ContentSpan]:
    """Content items that start at or after token `start` of the path, by their place on the path."""
    found: list[ContentSpan] = []
    at: Span | None = span
    while at is not None and at.end > start:
        first = at.start
        found += [
            ContentSpan(item.content_id, first + item.start) for item in at.contents if first + item.start >= start
        ]
        at = at.parent
    return found
