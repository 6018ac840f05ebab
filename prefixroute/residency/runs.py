"""A run of engine blocks: blocks that change together are one object.

Rules:
1. A `Run` is consecutive engine blocks of one path that have equal copies in every tier and were told in one epoch.
   A prompt from which no other forks is one run, however small the engine's pages are.
2. What hangs below a run hangs below its last block.
3. Runs without tokens have no path: their halves are not linked when they are cut.
4. `copies` is never written to, since runs share it: most have one copy in one tier.

Memory: about 220 bytes, 8 a block, and 4 a token where the engine's block is no multiple of the canonical one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from ..events import CPU, DISK, GPU, ContentSpan, Handle, items_within
from ..keys.chain import TOKEN_BYTES

NO_COPIES: Final[Mapping[str, int]] = {}
_ONE: Final[Mapping[str, Mapping[str, int]]] = {tier: {tier: 1} for tier in (GPU, CPU, DISK)}


class Run:
    """Consecutive engine blocks of `unit` tokens each: their copies by tier, and their place on a path.

    The run covers tokens `start` to `end` - 1 of the path, counted from its root once the root is known. `tokens` are
    packed, None once the tree has them; `contents` are the items that start in the run, by their place in it. `key` is
    the key of the last canonical block that ends in the run or above it.
    """

    __slots__ = (
        "contents",
        "copies",
        "end",
        "epoch",
        "handles",
        "key",
        "kids",
        "parent",
        "root",
        "start",
        "tokens",
        "unit",
        "wants",
    )

    def __init__(self, handles: list[Handle], epoch: int) -> None:
        self.handles = handles
        self.epoch = epoch
        self.copies = NO_COPIES
        self.parent: Run | None = None
        self.wants: Handle | None = None
        """Handle of the block before the first one, while no run has that block."""
        self.kids: Run | dict[Handle, Run] | None = None
        self.root: int | None = None
        """Key of the namespace's root; None while the path is not known."""
        self.unit = 0
        self.start = 0
        self.end = 0
        self.tokens: bytearray | None = None
        self.contents: tuple[ContentSpan, ...] = ()
        self.key: int | None = None

    @property
    def known(self) -> bool:
        """Whether the blocks' tokens were ever told."""
        return self.unit > 0

    def fill(self, unit: int, tokens: bytes, contents: tuple[ContentSpan, ...]) -> None:
        """Take the packed tokens of all blocks, and the items that start in them, by their place in the run."""
        self.unit = unit
        self.start, self.end = 0, unit * len(self.handles)
        self.tokens = bytearray(tokens)
        self.contents = contents

    def gain(self, tier: str) -> bool:
        """Count one more copy of each block in `tier`; return whether it is the first there."""
        if not self.copies:
            self.copies = _ONE.get(tier) or {tier: 1}
            return True
        copies = self.copies.get(tier, 0)
        self.copies = {**self.copies, tier: copies + 1}
        return not copies

    def lose(self, tier: str, n: int) -> None:
        """Count `n` copies fewer of each block in `tier`, which has at least so many."""
        if len(self.copies) == 1 and self.copies[tier] == n:
            self.copies = NO_COPIES
            return
        left = {**self.copies, tier: self.copies[tier] - n}
        if not left[tier]:
            del left[tier]
        (first, *more) = left
        self.copies = left if more or left[first] > 1 else _ONE.get(first, left)

    def link(self, parent: Run) -> None:
        """Become a kid of `parent`. An only kid is held without a dict, which saves 180 bytes a run of a chain."""
        self.parent, self.wants = parent, None
        if parent.kids is None:
            parent.kids = self
        elif isinstance(parent.kids, Run):
            parent.kids = {parent.kids.handles[0]: parent.kids, self.handles[0]: self}
        else:
            parent.kids[self.handles[0]] = self

    def unlink(self) -> Run | None:
        """Leave the parent and return it."""
        parent, self.parent = self.parent, None
        if parent is None:
            return None
        if parent.kids is self:
            parent.kids = None
        elif isinstance(parent.kids, dict):
            parent.kids.pop(self.handles[0], None)
            if not parent.kids:
                parent.kids = None
        return parent

    def each_kid(self) -> Iterator[Run]:
        """Yield the runs right below."""
        if isinstance(self.kids, Run):
            yield self.kids
        elif self.kids is not None:
            yield from self.kids.values()

    def trim(self, at: int) -> tuple[bytearray | None, tuple[ContentSpan, ...]]:
        """Drop the tokens and items of the blocks from block `at` on, not their handles; return both."""
        size, all_tokens = at * self.unit, self.end - self.start
        self.end = self.start + size
        tokens, contents = None, items_within(self.contents, size, all_tokens)
        self.contents = items_within(self.contents, 0, size)
        if self.tokens is not None:
            tokens = self.tokens[size * TOKEN_BYTES :]
            del self.tokens[size * TOKEN_BYTES :]
        return tokens, contents

    def behead(self, upper: Run, at: int) -> None:
        """Give the tokens and items of the first `at` blocks, not their handles, to `upper`."""
        size, all_tokens = at * self.unit, self.end - self.start
        upper.start, upper.end = self.start, self.start + size
        self.start = upper.end
        if self.tokens is not None:
            upper.tokens = self.tokens[: size * TOKEN_BYTES]
            del self.tokens[: size * TOKEN_BYTES]
        upper.contents = items_within(self.contents, 0, size)
        self.contents = items_within(self.contents, size, all_tokens)

    def continues(self, parent: Run) -> bool:
        """Whether the run and the `parent` that it hangs below can become one run."""
        return (
            parent.kids is self
            and self.root is not None
            and self.root == parent.root
            and self.unit == parent.unit
            and self.epoch == parent.epoch
            and self.copies == parent.copies
            and (self.tokens is None) == (parent.tokens is None)
            and (self.tokens is not None or len(self.copies) > 0)
        )

    def extend(self, kid: Run) -> None:
        """Take over the blocks of a kid that continues this run, and what hangs below the kid; not the kid's key."""
        if self.tokens is not None and kid.tokens is not None:
            self.tokens += kid.tokens
        if kid.contents:
            self.contents += kid.shifted(self.end - self.start)
        self.handles += kid.handles
        self.end = kid.end
        self.kids = kid.kids
        for below in self.each_kid():
            below.parent = self

    def precede(self, parent: Run) -> None:
        """Take over the blocks of the parent that this run continues; not the parent's key and place."""
        if self.tokens is not None and parent.tokens is not None:
            self.tokens[:0] = parent.tokens
        if self.contents or parent.contents:
            self.contents = parent.contents + self.shifted(parent.end - parent.start)
        self.handles[:0] = parent.handles
        self.start = parent.start

    def shifted(self, size: int) -> tuple[ContentSpan, ...]:
        """Return the run's items by their place when `size` tokens come before the run."""
        return tuple(ContentSpan(item.content_id, item.start + size) for item in self.contents)
