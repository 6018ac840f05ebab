"""One window or state group of a hybrid model: behind which of its blocks a hit could end, as far as it is concerned.

A hit of length L needs, of a window of W tokens, the last ceil((W - 1) / block) blocks that end at L, or all if there
are fewer; of a state (Mamba and the like) the one block that ends at L (vLLM 0.32.0, `find_longest_cache_hit`).

Rules:
1. A block's handle is that of the full-attention block that ends at the same token, whatever the sizes of both: so it
   is known where it lies, and below which other one, once the full-attention group has told (`hybrid_hits`). A
   handle's place never changes.
2. Each held block has a *run*: how many blocks up to it are held without a hole, counted no further than is needed.
   What has no block above it has all that it needs.
3. Where the group's blocks are smaller than full attention's, some have no such block. What is above them is told by
   the stores (`tell`): of a store without holes it is the handle in front; of one with holes the same, as long as that
   agrees with the places of those that have one, since an engine keeps stretches that end where a hit could.
4. Of a group whose window is not known (no size told, chunked attention, a kind of tomorrow) all blocks are needed.
   That may be more than the engine needs: such an endpoint is under-estimated, never over-estimated.

Memory: about 450 bytes a held block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from ..events import Handle

STATE_KINDS = frozenset({"mamba"})
WINDOW_KINDS = frozenset({"sliding_window", "sliding_window_mla"})
APART_KINDS = frozenset({"encoder_only_attention", "cross_attention"})
"""Groups that no prefix is looked up in."""

NOWHERE: Final = b""
"""Stands for the block above one when it is not known; no engine has such a handle."""


class WindowGroup:
    """The held and placed blocks of one group. Who follows it takes `touched` and `changed`, and empties them.

    `touched` are handles that may have come or gone; `changed` are those of which `reaches` may say another thing.
    """

    __slots__ = (
        "_after",
        "_before",
        "_grow",
        "_kind",
        "_links",
        "_need",
        "_runs",
        "_stores",
        "_tokens",
        "block_size",
        "changed",
        "touched",
        "unplaced",
    )

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._tokens = 0
        self.block_size = 0
        self._need = 1
        self._grow = 1 if kind in STATE_KINDS else 0
        """What a block adds to the run above it. 0: a run is whole from the root, or of no use."""
        self._runs: dict[Handle, int] = {}
        self._before: dict[Handle, Handle | None] = {}
        self._after: dict[Handle, set[Handle]] = {}
        self._links: dict[Handle, Handle | None] = {}
        """Of held blocks that are smaller than full attention's: the one above, as far as stores told."""
        self._stores: list[tuple[Handle | None, tuple[Handle, ...], int]] = []
        self.touched: dict[Handle, None] = {}
        self.changed: dict[Handle, None] = {}
        self.unplaced: set[Handle] = set()
        """Held blocks of which it is not known where they lie."""

    def __contains__(self, handle: object) -> bool:
        """Whether a block is held, and placed."""
        return handle in self._runs

    @property
    def alone(self) -> bool:
        """Whether a block needs none above it: it is a state."""
        return self._kind in STATE_KINDS

    def reaches(self, handle: Handle) -> bool:
        """Whether a hit may end with this block. O(1)."""
        return self._runs.get(handle) == self._need

    def before(self, handle: Handle) -> Handle | None:
        """Return the block right above one that is held; None at the root, and if it is not known."""
        return self._before.get(handle)

    def after(self, handle: Handle) -> Iterator[Handle]:
        """Yield the held blocks right below one."""
        yield from self._after.get(handle, ())

    # --- writing -------------------------------------------------------------------------------------------

    def size(self, tokens: int, block_size: int, held: Iterable[Handle]) -> None:
        """Take the window's and the block's size, 0 where it is not told.

        If either is another now, all blocks are forgotten and those that are `held` touched.
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
        """Take what a store said of the order of blocks: `handles` are all blocks of its tokens, or those kept."""
        if handles and self.block_size and not self.alone:
            self._stores.append((parent, handles, tokens // self.block_size))

    def link(self, ratio: int, place: Callable[[Handle], int | None]) -> list[Handle]:
        """Learn from the stores since the last time which block is above which; return those of which that is new.

        `ratio` is how many blocks full attention's has; of 1 or less nothing is to be learnt. `place` gives the token
        at which a block ends if full attention has one that ends there. O(blocks told).
        """
        stores, self._stores = self._stores, []
        fresh: list[Handle] = []
        for parent, handles, blocks in stores if ratio > 1 else ():
            for handle, above in zip(handles, self._above(parent, handles, blocks, ratio, place), strict=True):
                known = self._links.get(handle, NOWHERE)
                if handle not in self._links or (known == NOWHERE and above != NOWHERE):
                    self._links[handle] = above
                    fresh.append(handle)
        return fresh

    def linked(self, handle: Handle) -> bool:
        """Whether a store told of a block's place among others."""
        return handle in self._links

    def above(self, handle: Handle) -> Handle | None:
        """Return what stores told of the block above one: None at the root, `NOWHERE` if nothing."""
        return self._links.get(handle, NOWHERE)

    def unlink(self, handle: Handle) -> None:
        """Forget what stores told of a block that is held no longer."""
        self._links.pop(handle, None)

    def _above(
        self,
        parent: Handle | None,
        handles: tuple[Handle, ...],
        blocks: int,
        ratio: int,
        place: Callable[[Handle], int | None],
    ) -> list[Handle | None]:
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
        """Note that these may have come or gone. O(blocks)."""
        self.touched.update(dict.fromkeys(handles))

    def forget(self) -> None:
        """Forget all blocks. O(blocks)."""
        self.changed.update(dict.fromkeys(self._runs))
        self._runs.clear()
        self._before.clear()
        self._after.clear()
        self._links.clear()
        self._stores.clear()
        self.unplaced.clear()

    def hold(self, handle: Handle, before: Handle | None) -> None:
        """Take a block that was not held, and the one above it; None at the root. Amortised O(blocks needed)."""
        self._before[handle] = before
        if before is not None:
            self._after.setdefault(before, set()).add(handle)
        self._runs[handle] = self._run(before)
        self.changed[handle] = None
        self._spread(handle)

    def drop(self, handle: Handle) -> None:
        """Forget a block that was held. O(blocks needed)."""
        before = self._before.pop(handle)
        if before is not None:
            after = self._after[before]
            after.remove(handle)
            if not after:
                del self._after[before]
            self.changed[before] = None
        del self._runs[handle]
        self.changed[handle] = None
        self._spread(handle)

    def _run(self, before: Handle | None) -> int:
        """The run of a block that is held below `before`."""
        return self._need if before is None else min(self._need, self._runs.get(before, 0) + self._grow)

    def _spread(self, handle: Handle) -> None:
        """Bring the runs below a block up to date. It ends where a run stays as it was, or comes round in a circle."""
        stack = [handle]
        while stack:
            at = stack.pop()
            for kid in self._after.get(at, ()):
                run = self._run(at)
                if run != self._runs[kid] and kid != handle:
                    self._runs[kid] = run
                    self.changed[kid] = None
                    stack.append(kid)

    def _check(self) -> None:
        """Assert every invariant. O(blocks)."""
        assert self._runs.keys() == self._before.keys()
        assert not self.unplaced & self._runs.keys()
        links = {(before, handle) for handle, before in self._before.items() if before is not None}
        assert links == {(before, handle) for before, after in self._after.items() for handle in after}
        assert all(self._after.values())
        for handle, run in self._runs.items():
            assert run == self._run(self._before[handle]) or self._circles(handle)

    def _circles(self, handle: Handle) -> bool:
        """Whether a block is said to be below blocks that are above themselves, as no real hashes are."""
        seen: set[Handle] = set()
        at: Handle | None = handle
        while at is not None and at not in seen:
            seen.add(at)
            at = self._before.get(at)
        return at is not None
