"""Engine blocks of any size, mapped onto the canonical blocks of a radix tree.

An engine block is a `Span`: tokens `start` to `end` of a path. A canonical block is *vouched for* in a tier by the
span that holds its last token, when that span and the ones above it, back to the block's first token, all have a
copy in the tier.

Rules:
1. A span vouches once per tier, however many copies it has: copies are counted in the span.
2. Spans that begin and end on canonical boundaries vouch alone, and give their tokens to the tree. Others (pages
   smaller than a block, sizes that do not divide) keep their tokens, and vouch together.
3. A span whose path to the root is unknown is unresolved and vouches for nothing; resolving it resolves its kids. So is
   one that the tree cannot take. Nothing below an unresolved span is resolved.
4. `key` is the key at depth end // block, so a span that ends no block carries its parent's.
"""

from __future__ import annotations

from collections.abc import Iterator

from .chain import TOKEN_BYTES, ChainSpec, block_extras
from .events import ContentSpan, Handle
from .tree import RadixTree


class Span:
    """One engine block, how many copies of it each tier holds, and where it lies."""

    __slots__ = (
        "contents",
        "copies",
        "end",
        "epoch",
        "handle",
        "key",
        "kids",
        "parent",
        "root",
        "start",
        "tokens",
        "wants",
    )

    def __init__(self, handle: Handle, epoch: int) -> None:
        self.handle = handle
        self.epoch = epoch
        self.copies: dict[str, int] = {}
        self.parent: Span | None = None
        self.wants: Handle | None = None
        """The parent's handle, while no span has it."""
        self.kids: Span | dict[Handle, Span] | None = None
        self.root: int | None = None
        """Key of the namespace's root, once the path is known."""
        self.start = 0
        self.end = 0
        self.tokens: bytes | None = None
        self.contents: tuple[ContentSpan, ...] = ()
        self.key: int | None = None

    @property
    def known(self) -> bool:
        """Whether the span's content was ever told."""
        return self.end > self.start

    def link(self, parent: Span) -> None:
        """Become a kid of `parent`. A lone kid is held without a dict, which saves 180 bytes a block of a chain."""
        self.parent, self.wants = parent, None
        if parent.kids is None:
            parent.kids = self
        elif isinstance(parent.kids, Span):
            parent.kids = {parent.kids.handle: parent.kids, self.handle: self}
        else:
            parent.kids[self.handle] = self

    def unlink(self) -> Span | None:
        """Leave the parent and return it."""
        parent, self.parent = self.parent, None
        if parent is None:
            return None
        if parent.kids is self:
            parent.kids = None
        elif isinstance(parent.kids, dict):
            parent.kids.pop(self.handle, None)
            if not parent.kids:
                parent.kids = None
        return parent

    def each_kid(self) -> Iterator[Span]:
        """Yield the spans right below."""
        if isinstance(self.kids, Span):
            yield self.kids
        elif self.kids is not None:
            yield from self.kids.values()


class Reblocker:
    """Keeps one tree's counts equal to what the spans of one group vouch for."""

    __slots__ = ("_spec", "tree")

    def __init__(self, spec: ChainSpec, tree: RadixTree) -> None:
        self._spec = spec
        self.tree = tree

    def store_run(self, spans: list[Span], parent: Span | None, root: int, data: bytes, tier: str) -> bool:
        """Resolve and vouch for new, aligned spans of one size in one pass; False if that shape does not hold.

        The common case of every engine whose block is a multiple of the canonical one: one call of the tree.
        """
        size = self._spec.block_tokens
        start = parent.end if parent is not None else 0
        span_tokens = len(data) // TOKEN_BYTES // len(spans)
        if start % size or span_tokens % size or any(span.contents for span in spans):
            return False
        above = self._key_above(parent, root)
        if above is None:
            return False
        block = self._spec.block_bytes
        blocks = [data[i : i + block] for i in range(0, len(data), block)]
        keys = self.tree.store(above, start // size, blocks, tier)
        if len(keys) < len(blocks):
            if keys:
                self.tree.remove(keys[-1], start // size + len(keys), len(keys), tier)
            return False
        n = span_tokens // size
        for i, span in enumerate(spans):
            span.root, span.start, span.end = root, start + i * span_tokens, start + (i + 1) * span_tokens
            span.key = keys[(i + 1) * n - 1]
            span.tokens = None
        return True

    def resolve(self, span: Span, root: int) -> None:
        """Fix where `span` and all below it lie, and vouch for what they hold. O(spans resolved)."""
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
        if self._aligned(span):
            self._hold_alone(span, tier)
            return
        for last, end in self._ended(span):
            if last.root is not None and _vouched(last, end - self._spec.block_tokens, tier):
                key = self._ensure(last)
                if key is not None:
                    self.tree.add(self._key_at(last, key, end), end // self._spec.block_tokens, 1, tier)
                else:
                    self.unresolve(last)

    def release(self, span: Span, tier: str) -> None:
        """Take back what `span` vouches for in `tier`; call it while the copy still counts."""
        if span.root is None:
            return
        size = self._spec.block_tokens
        if self._aligned(span):
            if span.key is not None:
                self.tree.remove(span.key, span.end // size, (span.end - span.start) // size, tier)
            return
        for last, end in self._ended(span):
            if last.key is not None and self._placed(last) and _vouched(last, end - size, tier):
                self.tree.remove(self._key_at(last, last.key, end), end // size, 1, tier)

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

    # --- parts ---------------------------------------------------------------------------------------------

    def _placed(self, span: Span) -> bool:
        return self.tree.has(span.key, span.end // self._spec.block_tokens)

    def _aligned(self, span: Span) -> bool:
        size = self._spec.block_tokens
        return span.start % size == 0 and span.end % size == 0

    def _hold_alone(self, span: Span, tier: str) -> None:
        size = self._spec.block_tokens
        key = self._ensure(span)
        if key is None:
            self.unresolve(span)
            return
        self.tree.add(key, span.end // size, (span.end - span.start) // size, tier)
        span.tokens, span.contents = None, ()

    def _ended(self, span: Span) -> Iterator[tuple[Span, int]]:
        """Each canonical block that needs `span`: the span with its last token, and where it ends."""
        size = self._spec.block_tokens
        for end in range(span.start // size * size + size, span.end + 1, size):
            yield span, end
        if span.end % size == 0:
            return
        end = span.end // size * size + size
        stack = list(span.each_kid())
        while stack:
            kid = stack.pop()
            if kid.root is None:
                continue
            if kid.end >= end:
                yield kid, end
            else:
                stack.extend(kid.each_kid())

    def _key_at(self, span: Span, key: int, end: int) -> int:
        """Key of the canonical block that ends at token `end` inside `span`, whose last one has `key`."""
        size = self._spec.block_tokens
        above = span.end // size - end // size
        return self.tree.up(key, span.end // size, above) if above else key

    def _key_above(self, parent: Span | None, root: int) -> int | None:
        if parent is None:
            self.tree.plant(root)
            return root
        return self._ensure(parent)

    def _ensure(self, span: Span) -> int | None:
        """Return the span's key, making the path to it if the tree lacks it; None if tokens of it are not known."""
        tree, size = self.tree, self._spec.block_tokens
        assert span.root is not None
        if self._placed(span):
            return span.key
        unplaced: list[Span] = []
        above: Span | None = span
        while above is not None and not self._placed(above):
            unplaced.append(above)
            above = above.parent
        key = span.root if above is None or above.key is None else above.key
        depth = 0 if above is None else above.end // size
        data = _tokens(span, depth * size, span.end // size * size)
        if data is None:
            return None
        tree.plant(span.root)
        extras = block_extras(_contents(span, depth * size), size)
        width = self._spec.block_bytes
        blocks = [
            data[i * width : (i + 1) * width] + extras.get(depth + i, b"") for i in range(span.end // size - depth)
        ]
        keys = tree.store(key, depth, blocks, None)
        if len(keys) < len(blocks):
            return None
        for placed in unplaced:
            placed.key = keys[placed.end // size - depth - 1] if placed.end // size > depth else key
        return span.key


def _vouched(span: Span, start: int, tier: str) -> bool:
    """Whether `span` and those above it, back to token `start`, all have a copy in `tier`."""
    at: Span | None = span
    while at is not None and tier in at.copies:
        if at.start <= start:
            return True
        at = at.parent
    return False


def _tokens(span: Span, start: int, end: int) -> bytes | None:
    """Packed tokens `start` to `end` of the path that ends with `span`."""
    parts: list[bytes] = []
    first = start
    at: Span | None = span
    while at is not None and at.end > start:
        if at.tokens is None:
            return None
        parts.append(at.tokens)
        first = at.start
        at = at.parent
    joined = b"".join(reversed(parts))
    return joined[(start - first) * TOKEN_BYTES : (end - first) * TOKEN_BYTES]


def _contents(span: Span, start: int) -> list[ContentSpan]:
    """Content items that start at or after token `start` of the path, by their place on the path."""
    found: list[ContentSpan] = []
    at: Span | None = span
    while at is not None and at.end > start:
        found.extend(
            ContentSpan(item.content_id, at.start + item.start)
            for item in at.contents
            if at.start + item.start >= start
        )
        at = at.parent
    return found
