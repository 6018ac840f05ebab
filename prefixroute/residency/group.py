"""One group's engine blocks by handle, held as `Run`s.

Rules:
1. A block within a run that gets another block below it, or gains or loses a copy, is first cut off as a run of its
   own. Runs that have become equal are joined again. Neither changes what is vouched for.
2. Cutting and joining move the smaller part. Nothing here but `each` takes longer for a longer run, save copying its
   list of handles and its tokens.
3. A run without copies is kept only for what hangs below it. If the tree alone has its tokens, the run is one block:
   then each block has a key, by which the tree is asked whether it still has the tokens.

Memory: about 110 bytes a block for the entry that finds the run of a handle, beside the handle's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from math import lcm

from ..events import Handle
from ..keys.chain import TOKEN_BYTES
from .reblock import Reblocker
from .runs import Run
from .window_group import WindowGroup

BUSY_KIDS = 8
"""A run with more kids is not joined with its parent: each kid would have to be pointed elsewhere."""


class Group:
    """One KV-cache group's engine blocks. A full-attention group has a `reblocker`, a window or state group a `window`.

    A group in which no prefix is looked up has neither: its blocks are only counted.
    """

    def __init__(self, reblocker: Reblocker | None, window: WindowGroup | None = None) -> None:
        self.reblocker = reblocker
        self.window = window
        self.told_size = 0
        """Of a group without a reblocker: tokens of a block by the stores that were accepted."""
        self.counts = False
        """Whether the engine has such a group: a store that was accepted said so, be it of no block."""
        self.runs: dict[Handle, Run] = {}
        self.waiting: dict[Handle, dict[Handle, Run]] = {}
        """Handle of a parent that has not come -> the runs that wait for it, by their own first handle."""

    @property
    def block_size(self) -> int:
        """Tokens of a block, of the blocks that the group holds or held last; 0 if that is not known."""
        return self.reblocker.block_size if self.reblocker is not None else self.told_size

    def each(self) -> list[Run]:
        """Return the runs in the order in which their handles came. O(blocks)."""
        return list(dict.fromkeys(self.runs.values()))

    # --- cutting -------------------------------------------------------------------------------------------

    def ending(self, handle: Handle) -> Run:
        """Return the run of a known handle, cut so that it ends with that block."""
        run = self.runs[handle]
        if run.handles[-1] == handle:
            return run
        return self.cut(run, run.handles.index(handle) + 1)[0]

    def piece(self, run: Run, lower: int, upper: int) -> Run:
        """Return blocks `lower` to `upper` - 1 of a run as one of their own."""
        if upper < len(run.handles):
            run = self.cut(run, upper)[0]
        return self.cut(run, lower)[1] if lower else run

    def singles(self, run: Run) -> list[Run]:
        """Cut a run into its blocks."""
        blocks = []
        while len(run.handles) > 1:
            run, last = self.cut(run, len(run.handles) - 1)
            blocks.append(last)
        return [*blocks, run]

    def cut(self, run: Run, at: int) -> tuple[Run, Run]:
        """Cut before block `at`, 0 < at < blocks. The new run is the smaller one: O(min of both), and its kids."""
        key = self.reblocker.key_at(run, at) if self.reblocker is not None else None
        new = Run([], run.epoch)
        new.copies, new.root, new.unit = run.copies, run.root, run.unit
        if 2 * at <= len(run.handles):
            upper, lower = new, run
            upper.handles = run.handles[:at]
            del run.handles[:at]
            self._take_place(run, upper)
            if run.unit:
                run.behead(upper, at)
        else:
            upper, lower = run, new
            lower.handles = run.handles[at:]
            del run.handles[at:]
            lower.kids, run.kids, lower.key = run.kids, None, run.key
            for kid in lower.each_kid():
                kid.parent = lower
            if run.unit:
                lower.end = run.end
                lower.tokens, lower.contents = run.trim(at)
                lower.start = run.end
        upper.key = key
        if run.unit:
            lower.link(upper)
        self.runs.update(dict.fromkeys(new.handles, new))
        return upper, lower

    def join(self, parent: Run, kid: Run) -> Run:
        """Make one run of a parent and its kid that continues it. O(min of both), and the kid's kids."""
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
        self.runs.update(dict.fromkeys(moved, joined))
        return joined

    def heal(self, run: Run) -> None:
        """Join a run with its parent and with its only kid where they have become equal."""
        if run.parent is not None and _may_join(run.parent, run):
            run = self.join(run.parent, run)
        if isinstance(run.kids, Run) and _may_join(run, run.kids):
            self.join(run, run.kids)

    def _take_place(self, run: Run, upper: Run) -> None:
        """Give a run's place below its parent, or among the waiting, to `upper`, which has its first handle."""
        parent, upper.parent, run.parent = run.parent, run.parent, None
        if parent is not None:
            if isinstance(parent.kids, dict):
                parent.kids[upper.handles[0]] = upper
            else:
                parent.kids = upper
        if run.wants is not None:
            self.waiting[run.wants][upper.handles[0]] = upper
            upper.wants, run.wants = run.wants, None

    def enter(self, run: Run) -> bool:
        """Register a new run under its handles if all are new and none comes twice; return whether it was done."""
        known = len(self.runs)
        found = list(map(self.runs.setdefault, run.handles, repeat(run)))
        if len(self.runs) - known == len(found):
            return True
        for handle, other in zip(run.handles, found, strict=True):
            if other is run:
                self.runs.pop(handle, None)
        return False

    def place_below(self, run: Run, wanted: Handle) -> None:
        """Link a run to its parent, or let it wait; one that names itself stays unresolved (Dynamo #6569)."""
        parent = self.runs.get(wanted)
        if parent is None:
            run.wants = wanted
            self.waiting.setdefault(wanted, {})[run.handles[0]] = run
        elif parent is not run:
            run.link(self.ending(wanted))

    def adopt(self, handles: list[Handle]) -> None:
        """Attach the runs that waited for one of these handles, and all below them if the path is known."""
        if not self.waiting or self.waiting.keys().isdisjoint(handles):
            return
        for handle in [handle for handle in handles if handle in self.waiting]:
            for kid in self.waiting.pop(handle).values():
                run = self.ending(handle)
                kid.link(run)
                if run.root is not None and self.reblocker is not None:
                    self.reblocker.resolve(kid, run.root)

    def drop(self, run: Run) -> Run | None:
        """Forget a run if it has no copies and nothing below it, then its ancestors alike; return the first to stay."""
        runs = self.runs
        at: Run | None = run
        while at is not None and not at.copies and at.kids is None:
            for handle in at.handles:
                del runs[handle]
            if at.wants is not None:
                waiting = self.waiting[at.wants]
                del waiting[at.handles[0]]
                if not waiting:
                    del self.waiting[at.wants]
            at = at.unlink()
        return at

    def forget_lost(self, handles: list[Handle]) -> None:
        """Forget those handles whose tokens went with their last copy; the runs below wait for them again."""
        runs = self.runs
        for handle in handles:
            run = runs.get(handle)
            if run is None or run.copies or self.reblocker is None or not self.reblocker.lost(run):
                continue
            for kid in list(run.each_kid()):
                kid.parent, kid.wants = None, handle
                self.waiting.setdefault(handle, {})[kid.handles[0]] = kid
                self.reblocker.unresolve(kid)
            run.kids = None
            self.drop(run)

    # --- runs of handles -----------------------------------------------------------------------------------

    def stretch(self, run: Run, handles: list[Handle], i: int, back: bool) -> tuple[int, int]:
        """Return (lower, upper): the handles from `i` on name blocks `lower` to `upper` - 1 of `run`.

        They name them root side first or, if `back`, perhaps the other way round. O(blocks named), and a search in C
        for the first handle.
        """
        mine = run.handles
        first = handles[i]
        at = 0 if mine[0] == first else len(mine) - 1 if mine[-1] == first else mine.index(first)
        if i + 1 == len(handles):
            return at, at + 1
        n = _shared(mine, at, handles, i)
        if n == 1 and back and at:
            n = _shared(mine, at, handles, i, back)
            return at - n + 1, at + 1
        return at, at + n

    def stretches(self, handles: list[Handle]) -> Iterator[tuple[int, int, Run | None]]:
        """Yield (i, j, run) for all handles in order: `i` to `j` - 1 are the whole of a run, None if they are new."""
        i = 0
        while i < len(handles):
            run = self.runs.get(handles[i])
            if run is None:
                # New are all up to one that is a run's or was named before.
                j, seen = i, set[Handle]()
                while j < len(handles) and handles[j] not in self.runs and handles[j] not in seen:
                    seen.add(handles[j])
                    j += 1
                yield i, j, None
            else:
                lower, upper = self.stretch(run, handles, i, back=False)
                j = i + upper - lower
                yield i, j, self.piece(run, lower, upper)
            i = j

    def _check(self) -> None:
        """Assert every invariant of the runs. O(blocks)."""
        runs = self.each()
        assert sum(len(run.handles) for run in runs) == len(self.runs)
        for run in runs:
            assert all(self.runs[handle] is run for handle in run.handles)
            assert run.copies or run.kids is not None, "an unheld run without kids is dropped"
            assert all(n > 0 for n in run.copies.values())
            assert all(kid.parent is run for kid in run.each_kid())
            assert run.end - run.start == run.unit * len(run.handles)
            assert run.tokens is None or len(run.tokens) == (run.end - run.start) * TOKEN_BYTES
            assert run.tokens is not None or run.copies or not run.known or len(run.handles) == 1
            assert all(0 <= item.start < run.end - run.start for item in run.contents)
            if self.reblocker is not None:
                self.reblocker.check(run)
            if run.parent is not None:
                assert self.runs[run.parent.handles[-1]] is run.parent
                assert any(kid is run for kid in run.parent.each_kid())
                if run.root is not None:
                    assert run.parent.root == run.root and run.parent.end == run.start
            if run.wants is not None:
                assert run.wants not in self.runs and self.waiting[run.wants][run.handles[0]] is run
        if self.reblocker is not None:
            self.reblocker.check_sizes(runs)
        for wanted, waiting in self.waiting.items():
            assert waiting and all(run.wants == wanted for run in waiting.values())
            assert all(self.runs[first] is run and run.handles[0] == first for first, run in waiting.items())


def hit_unit(groups: Iterable[Group]) -> int:
    """Return the tokens in which the engine can reuse a prefix: its blocks' common multiple, 0 if none is known."""
    sizes = [size for group in groups if (size := group.block_size)]
    return lcm(*sizes) if sizes else 0


def _may_join(parent: Run, kid: Run) -> bool:
    """Whether to join a kid with its parent; not at a busy fork, where it would be cut off and joined in turns."""
    return kid.continues(parent) and not (isinstance(kid.kids, dict) and len(kid.kids) > BUSY_KIDS)


def _shared(mine: list[Handle], at: int, handles: list[Handle], i: int, back: bool = False) -> int:
    """How many handles agree from `i` on and in `mine` from `at` on, or, if `back`, from `at` towards the root.

    The first do. Steps grow, so that a short match is cheap.
    """
    most = min(at + 1 if back else len(mine) - at, len(handles) - i)
    n, step = 1, 4
    while n < most:
        upper = min(n + step, most)
        part = mine[at - upper + 1 : at - n + 1] if back else mine[at + n : at + upper]
        if back:
            part.reverse()
        if part != handles[i + n : i + upper]:
            return next(k for k in range(n, upper) if part[k - n] != handles[i + k])
        n, step = upper, 2 * step
    return n
