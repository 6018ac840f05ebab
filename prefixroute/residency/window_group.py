"""One window or state group of a hybrid model: behind which of its blocks a hit could end, as far as it is concerned.

For a hit of length L a window of W tokens needs the last ceil((W - 1) / block) blocks that end at L, or all if there
are fewer; a state group (Mamba and the like) needs the one block that ends at L (vLLM 0.32.0,
`find_longest_cache_hit`).

Rules:
1. A block has the handle of the full-attention block that ends at the same token, whatever the sizes of both. So its
   place, and the block above it, are known once the full-attention group has told of that handle (`hybrid_hits`). The
   place of a handle never changes.
2. Of each held block it is counted how many blocks up to it, itself included, are held without a hole: its *unbroken*
   number, counted no further than a hit needs. A block at the root has all that it needs.
3. Where the group's blocks are smaller than full attention's, some have no full-attention block of the same end. Then
   stores tell which block is above (`tell`). In a store that names all its blocks it is the handle in front. In one
   that leaves blocks out it is the handle in front too, as long as that agrees with the blocks whose place is known:
   an engine keeps unbroken stretches that end where a hit could.
4. Where the window is not known (no size told, chunked attention, a kind yet to come) a hit needs all blocks. That may
   be more than the engine needs, so such an endpoint is under-estimated, never over-estimated.

Memory: about 450 bytes a held block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from ..events import Handle

STATE_KINDS = frozenset({"mamba"})
WINDOW_KINDS = frozenset({"sliding_window", "sliding_window_mla"})
APART_KINDS = frozenset({"encoder_only_attention", "cross_attention"})
"""Groups in which no prefix is looked up."""

NOWHERE: Final = b""
"""Stands for the block above when it is not known. No engine has such a handle."""


class WindowGroup:
    """The held and placed blocks of one group of this kind.

    `touched` are handles that may have been gained or lost; `changed` are those for which `reaches` may have another
    answer. The follower (`HybridHits`) takes both and empties them.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._tokens = 0
        self.block_size = 0
        self._need = 1
        self.alone = kind in STATE_KINDS
        """Whether a hit needs one block only: the group keeps states (Mamba)."""
        self._grow = int(self.alone)
        """What a block adds to the unbroken number of the one above; 0 if a hit needs all up to the root."""
        self._unbroken: dict[Handle, int] = {}
        self.before: dict[Handle, Handle | None] = {}
        """Held block -> the one right above; None at the root, or if that is not known."""
        self._after: dict[Handle, set[Handle]] = {}
        self.links: dict[Handle, Handle | None] = {}
        """Block smaller than full attention's -> the one above, `NOWHERE` if stores did not tell which."""
        self._stores: list[tuple[Handle | None, tuple[Handle, ...], int]] = []
        self.touched: dict[Handle, None] = {}
        self.changed: dict[Handle, None] = {}
        self.unplaced: set[Handle] = set()
        """Held blocks whose place is not known."""

    def __contains__(self, handle: object) -> bool:
        """Whether a block is held and placed."""
        return handle in self._unbroken

    def reaches(self, handle: Handle) -> bool:
        """Whether a hit may end with this block. O(1)."""
        return self._unbroken.get(handle) == self._need

    def after(self, handle: Handle) -> Iterator[Handle]:
        """Yield the held blocks right below one."""
        yield from self._after.get(handle, ())

    def size(self, tokens: int, block_size: int, held: Iterable[Handle]) -> None:
        """Take the sizes of the window and of a block, in tokens, 0 for one that is not told.

        If either changes, all blocks are forgotten, and the `held` ones are touched.
        """
        tokens, block_size = tokens or self._tokens, block_size or self.block_size
        if (tokens, block_size) == (self._tokens, self.block_size):
            return
        self.forget()
        self.touched.update(dict.fromkeys(held))
        self._tokens, self.block_size = tokens, block_size
        if self._kind in WINDOW_KINDS and tokens and block_size:
            self._need, self._grow = max(1, -(-(tokens - 1) // block_size)), 1

    def tell(self, parent: Handle | None, handles: tuple[Handle, ...], tokens: int) -> None:
        """Take the order of blocks from a store of that many tokens: `handles` are all its blocks, or those kept."""
        if handles and self.block_size and not self.alone:
            self._stores.append((parent, handles, tokens // self.block_size))

    def link(self, ratio: int, place: Callable[[Handle], int | None]) -> list[Handle]:
        """Learn from the stores since the last call which block is above which; return the blocks for which it is new.

        `ratio` is how many of the group's blocks make one of full attention; up to 1 nothing has to be learnt. `place`
        gives the token at which a block ends if a full-attention block ends there. O(blocks told).
        """
        stores, self._stores = self._stores, []
        fresh: list[Handle] = []
        for parent, handles, blocks in stores if ratio > 1 else ():
            for handle, above in zip(handles, self._above(parent, handles, blocks, ratio, place), strict=True):
                known = self.links.get(handle, NOWHERE)
                if handle not in self.links or (known == NOWHERE and above != NOWHERE):
                    self.links[handle] = above
                    fresh.append(handle)
        return fresh

    def _above(
        self,
        parent: Handle | None,
        handles: tuple[Handle, ...],
        blocks: int,
        ratio: int,
        place: Callable[[Handle], int | None],
    ) -> list[Handle | None]:
        """The block above each of a store's handles, by rule 3."""
        if len(handles) == blocks:
            return [parent, *handles[:-1]]
        above: list[Handle | None] = [NOWHERE] * len(handles)
        last: tuple[int, int] | None = None
        for i, handle in enumerate(handles):
            end = place(handle)
            if end is None:
                continue
            at = end // self.block_size
            first = 0 if last is None else last[0]
            if i - first < ratio if last is None else at - last[1] == i - first:
                above[first + 1 : i + 1] = handles[first:i]
            last = (i, at)
        return above

    def touch(self, handles: list[Handle]) -> None:
        """Note that these blocks may have been gained or lost. O(blocks)."""
        self.touched.update(dict.fromkeys(handles))

    def forget(self) -> None:
        """Forget all blocks. O(blocks)."""
        self.changed.update(dict.fromkeys(self._unbroken))
        self._unbroken.clear()
        self.before.clear()
        self._after.clear()
        self.links.clear()
        self._stores.clear()
        self.unplaced.clear()

    def hold(self, handle: Handle, before: Handle | None) -> None:
        """Add a block and the one above it, None at the root. Amortised O(blocks that a hit needs)."""
        self.before[handle] = before
        if before is not None:
            self._after.setdefault(before, set()).add(handle)
        self._unbroken[handle] = self._below(before)
        self.changed[handle] = None
        self._spread(handle)

    def drop(self, handle: Handle) -> None:
        """Remove a held block. O(blocks that a hit needs)."""
        before = self.before.pop(handle)
        if before is not None:
            after = self._after[before]
            after.remove(handle)
            if not after:
                del self._after[before]
            self.changed[before] = None
        del self._unbroken[handle]
        self.changed[handle] = None
        self._spread(handle)

    def _below(self, before: Handle | None) -> int:
        """The unbroken number of a block that is held right below `before`."""
        return self._need if before is None else min(self._need, self._unbroken.get(before, 0) + self._grow)

    def _spread(self, handle: Handle) -> None:
        """Update the numbers of the blocks below one, until one stays as it was or is the block itself, in a circle."""
        stack = [handle]
        while stack:
            at = stack.pop()
            for kid in self._after.get(at, ()):
                unbroken = self._below(at)
                if unbroken != self._unbroken[kid] and kid != handle:
                    self._unbroken[kid] = unbroken
                    self.changed[kid] = None
                    stack.append(kid)

    def _check(self) -> None:
        """Assert every invariant. O(blocks)."""
        assert self._unbroken.keys() == self.before.keys()
        assert not self.unplaced & self._unbroken.keys()
        links = {(before, handle) for handle, before in self.before.items() if before is not None}
        assert links == {(before, handle) for before, after in self._after.items() for handle in after}
        assert all(self._after.values())
        for handle, unbroken in self._unbroken.items():
            assert unbroken == self._below(self.before[handle]) or self._circles(handle)

    def _circles(self, handle: Handle) -> bool:
        """Whether the path above a block is told to lead back to itself, which real hashes never do."""
        seen: set[Handle] = set()
        at: Handle | None = handle
        while at is not None and at not in seen:
            seen.add(at)
            at = self.before.get(at)
        return at is not None
