"""One group's engine blocks by handle, held as runs (`spans`).

Rules:
1. A block in the middle of a span that gets something below it, or another copy, or loses one, is cut off first; what
   is equal again is joined again. Neither changes anything that a span vouches for.
2. Cutting and joining move the smaller part. Nothing here but `each` is slower for a longer span, save for copying its
   list of handles and its tokens.
3. A span without copies is kept for what is below it alone. If the tree alone has its tokens, it is one block, so that
   each block has a key by which the tree is asked whether it still has them.

Memory: about 110 bytes a block for the entry that finds a handle's span, beside the handle's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

from ..events import Handle
from ..keys.chain import TOKEN_BYTES
from .reblock import Reblocker
from .runs import Span
from .window_group import Window

BUSY_KIDS = 8
"""With more kids a span is not joined with its parent any more: each of them would have to be pointed elsewhere."""


class Group:
    """One KV-cache group's engine blocks; `reblocker` only for a full-attention group, `window` for one that is not."""

    __slots__ = ("block_size", "reblocker", "spans", "waiting", "window")

    def __init__(self, reblocker: Reblocker | None, window: Window | None = None) -> None:
        self.reblocker = reblocker
        self.window = window
        self.block_size = 0
        self.spans: dict[Handle, Span] = {}
        self.waiting: dict[Handle, dict[Handle, Span]] = {}
        """Spans whose parent has not come, by its handle and by their own first one."""

    def each(self) -> list[Span]:
        """Return the spans, in the order in which their handles came. O(blocks)."""
        return list(dict.fromkeys(self.spans.values()))

    # --- cutting -------------------------------------------------------------------------------------------

    def ending(self, handle: Handle) -> Span:
        """Return the span of a known handle, cut so that it ends with that block."""
        span = self.spans[handle]
        if span.handles[-1] == handle:
            return span
        return self.cut(span, span.handles.index(handle) + 1)[0]

    def piece(self, span: Span, lower: int, upper: int) -> Span:
        """Return blocks `lower` to `upper` - 1 of a span as one of their own."""
        if upper < len(span.handles):
            span = self.cut(span, upper)[0]
        return self.cut(span, lower)[1] if lower else span

    def singles(self, span: Span) -> list[Span]:
        """Cut a span into its blocks."""
        blocks = []
        while len(span.handles) > 1:
            span, last = self.cut(span, len(span.handles) - 1)
            blocks.append(last)
        return [*blocks, span]

    def cut(self, span: Span, at: int) -> tuple[Span, Span]:
        """Cut before block `at`, 0 < at < blocks. The new span is the smaller one: O(min of both), and its kids."""
        key = self.reblocker.key_at(span, at) if self.reblocker is not None else None
        new = Span([], span.epoch)
        new.copies, new.root, new.unit = span.copies, span.root, span.unit
        if 2 * at <= len(span.handles):
            upper, lower = new, span
            upper.handles = span.handles[:at]
            del span.handles[:at]
            self._take_place(span, upper)
            if span.unit:
                span.behead(upper, at)
        else:
            upper, lower = span, new
            lower.handles = span.handles[at:]
            del span.handles[at:]
            lower.kids, span.kids, lower.key = span.kids, None, span.key
            for kid in lower.each_kid():
                kid.parent = lower
            if span.unit:
                lower.end = span.end
                lower.tokens, lower.contents = span.trim(at)
                lower.start = span.end
        upper.key = key
        if span.unit:
            lower.link(upper)
        self.spans.update(dict.fromkeys(new.handles, new))
        return upper, lower

    def join(self, parent: Span, kid: Span) -> Span:
        """Make one span of a parent and its kid that continues it. O(min of both), and the kid's kids."""
        # A kid that ends no canonical block may have no key yet, even if its parent has.
        key = kid.key if self.reblocker is not None and self.reblocker.ends_block(kid) else parent.key
        if len(kid.handles) <= len(parent.handles):
            moved, joined = kid.handles, parent
            parent.extend(kid)
        else:
            moved, joined = parent.handles, kid
            kid.precede(parent)
            self._take_place(parent, kid)
        joined.key = key
        self.spans.update(dict.fromkeys(moved, joined))
        return joined

    def heal(self, span: Span) -> None:
        """Join a span with its parent and with its only kid where they have become equal."""
        if span.parent is not None and _may_join(span.parent, span):
            span = self.join(span.parent, span)
        if isinstance(span.kids, Span) and _may_join(span, span.kids):
            self.join(span, span.kids)

    def _take_place(self, span: Span, upper: Span) -> None:
        """Give a span's place below its parent, or among those that wait, to `upper`, which begins with its handle."""
        parent, upper.parent, span.parent = span.parent, span.parent, None
        if parent is not None:
            if isinstance(parent.kids, dict):
                parent.kids[upper.handles[0]] = upper
            else:
                parent.kids = upper
        if span.wants is not None:
            self.waiting[span.wants][upper.handles[0]] = upper
            upper.wants, span.wants = span.wants, None

    def enter(self, span: Span) -> bool:
        """Let a new span be found by its handles if all are new and none comes twice; return whether."""
        known = len(self.spans)
        found = list(map(self.spans.setdefault, span.handles, repeat(span)))
        if len(self.spans) - known == len(found):
            return True
        self.leave(span, found)
        return False

    def leave(self, span: Span, found: list[Span] | None = None) -> None:
        """Take back `enter`; `found` are the spans of its handles."""
        for handle, other in zip(span.handles, found or repeat(span), strict=False):
            if other is span:
                self.spans.pop(handle, None)

    def keep(self, span: Span) -> None:
        """Let a new span be found by its handles."""
        self.spans.update(dict.fromkeys(span.handles, span))

    # --- places --------------------------------------------------------------------------------------------

    def place_below(self, span: Span, wanted: Handle) -> None:
        """Link to the parent or wait for it; a span that names itself stays unresolved (Dynamo #6569)."""
        parent = self.spans.get(wanted)
        if parent is None:
            span.wants = wanted
            self.waiting.setdefault(wanted, {})[span.handles[0]] = span
        elif parent is not span:
            span.link(self.ending(wanted))

    def adopt(self, handles: list[Handle]) -> None:
        """Attach the spans that waited for one of these handles, and all below them if the path is known."""
        if not self.waiting or self.waiting.keys().isdisjoint(handles):
            return
        for handle in [handle for handle in handles if handle in self.waiting]:
            for kid in self.waiting.pop(handle).values():
                span = self.ending(handle)
                kid.link(span)
                if span.root is not None and self.reblocker is not None:
                    self.reblocker.resolve(kid, span.root)

    def drop(self, span: Span) -> Span | None:
        """Forget a span that has no copy, and its unheld ancestors, while nothing is below them; return who stays."""
        spans = self.spans
        at: Span | None = span
        while at is not None and not at.copies and at.kids is None:
            for handle in at.handles:
                del spans[handle]
            if at.wants is not None:
                self._stop_waiting(at)
            at = at.unlink()
        return at

    def forget_lost(self, handles: list[Handle]) -> None:
        """Forget those handles whose tokens are gone with their last copy; what is below them waits for them again."""
        spans = self.spans
        for handle in handles:
            span = spans.get(handle)
            if span is None or span.copies or self.reblocker is None or not self.reblocker.lost(span):
                continue
            for kid in list(span.each_kid()):
                kid.parent, kid.wants = None, handle
                self.waiting.setdefault(handle, {})[kid.handles[0]] = kid
                self.reblocker.unresolve(kid)
            span.kids = None
            self.drop(span)

    def _stop_waiting(self, span: Span) -> None:
        assert span.wants is not None
        waiting = self.waiting[span.wants]
        del waiting[span.handles[0]]
        if not waiting:
            del self.waiting[span.wants]

    # --- runs of handles -----------------------------------------------------------------------------------

    def stretch(self, span: Span, handles: list[Handle], i: int, back: bool) -> tuple[int, int]:
        """Return which blocks of `span`, from one to another, the handles from `i` on name.

        Root side first, or also the other way if `back`. O(blocks named), and C's own search for the first.
        """
        mine = span.handles
        first = handles[i]
        at = 0 if mine[0] == first else len(mine) - 1 if mine[-1] == first else mine.index(first)
        if i + 1 == len(handles):
            return at, at + 1
        n = _shared(mine, at, handles, i)
        if n == 1 and back and at:
            n = _shared_back(mine, at, handles, i)
            return at - n + 1, at + 1
        return at, at + n

    def stretches(self, handles: list[Handle]) -> Iterator[tuple[int, int, Span | None]]:
        """Yield (i, j, span) until every handle was named: those from `i` to `j` - 1 are a span's, or none's so far."""
        i = 0
        while i < len(handles):
            span = self.spans.get(handles[i])
            if span is None:
                j = self._new_until(handles, i)
                yield i, j, None
            else:
                lower, upper = self.stretch(span, handles, i, back=False)
                j = i + upper - lower
                yield i, j, self.piece(span, lower, upper)
            i = j

    def _new_until(self, handles: list[Handle], i: int) -> int:
        """Where the handles from `i` on that no span has, each once, end."""
        seen: set[Handle] = set()
        for at in range(i, len(handles)):
            if handles[at] in self.spans or handles[at] in seen:
                return at
            seen.add(handles[at])
        return len(handles)

    def _check(self) -> None:
        """Assert every invariant of the spans. O(blocks)."""
        spans = self.each()
        assert sum(len(span.handles) for span in spans) == len(self.spans)
        for span in spans:
            assert all(self.spans[handle] is span for handle in span.handles)
            assert span.copies or span.kids is not None, "an unheld span without kids is dropped"
            assert all(n > 0 for n in span.copies.values())
            assert all(kid.parent is span for kid in span.each_kid())
            assert span.end - span.start == span.unit * len(span.handles)
            assert span.tokens is None or len(span.tokens) == (span.end - span.start) * TOKEN_BYTES
            assert span.tokens is not None or span.copies or not span.known or len(span.handles) == 1
            assert all(0 <= item.start < span.end - span.start for item in span.contents)
            if self.reblocker is not None:
                self.reblocker.check(span)
            if span.parent is not None:
                assert self.spans[span.parent.handles[-1]] is span.parent
                assert any(kid is span for kid in span.parent.each_kid())
                if span.root is not None:
                    assert span.parent.root == span.root and span.parent.end == span.start
            if span.wants is not None:
                assert span.wants not in self.spans and self.waiting[span.wants][span.handles[0]] is span
        for wanted, waiting in self.waiting.items():
            assert waiting and all(span.wants == wanted for span in waiting.values())
            assert all(self.spans[first] is span and span.handles[0] == first for first, span in waiting.items())


def _may_join(parent: Span, kid: Span) -> bool:
    """Whether a kid continues its parent, and is not at a busy fork, where it would be cut off and joined in turns."""
    return kid.continues(parent) and not (isinstance(kid.kids, dict) and len(kid.kids) > BUSY_KIDS)


def _shared(mine: list[Handle], at: int, handles: list[Handle], i: int) -> int:
    """How many handles from `at` and from `i` on agree; the first do. Steps grow, so that a short match is cheap."""
    most = min(len(mine) - at, len(handles) - i)
    n, step = 1, 4
    while n < most:
        upper = min(n + step, most)
        if mine[at + n : at + upper] != handles[i + n : i + upper]:
            while mine[at + n] == handles[i + n]:
                n += 1
            return n
        n, step = upper, 2 * step
    return n


def _shared_back(mine: list[Handle], at: int, handles: list[Handle], i: int) -> int:
    """As `_shared`, from `at` towards the root."""
    most = min(at + 1, len(handles) - i)
    n, step = 1, 4
    while n < most:
        upper = min(n + step, most)
        part = mine[at - upper + 1 : at - n + 1]
        part.reverse()
        if part != handles[i + n : i + upper]:
            while mine[at - n] == handles[i + n]:
                n += 1
            return n
        n, step = upper, 2 * step
    return n
