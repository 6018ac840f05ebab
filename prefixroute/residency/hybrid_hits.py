"""Where the hits of a hybrid model can end: the depths at which every group of it has what it needs.

Rules:
1. A hit ends at a depth that all full-attention groups hold, that every window and state group reaches
   (`window_group`), and that is a multiple of the hit unit. Those depths are *ends*. No other held block is of use.
2. A window group's block gets its place from the full-attention block of the same handle. Until that one is known, the
   window group's block waits.
3. What is published is the ends and their marks (`keys.hit_marks`). At stride k an end is an anchor when its depth is a
   multiple of k, or when no block of the first window group right below it is an end: of neighbours the last stays.

Memory: about 900 bytes an end beside the window groups' own. An endpoint without such a group has no `HybridHits`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from ..events import Handle
from ..keys.chain import ChainSpec
from ..keys.hit_marks import ENDS_ONLY, marked, section
from ..keys.keyset import KeyCounts
from .forest import Forest
from .group import Group, hit_unit
from .published import Published
from .runs import Run
from .tree import RadixTree
from .window_group import WindowGroup

Held: TypeAlias = RadixTree | Forest
"""What the full-attention groups hold."""


class HybridHits(Published):
    """The ends of one endpoint and their marks, in the place of `held`, which was published while it was no hybrid.

    `groups` are the endpoint's groups by number; the caller adds to them and says which count. `credited` are the tiers
    in which a window group's block counts.
    """

    ends_only = True

    def __init__(self, held: Held, groups: Mapping[int, Group], credited: Sequence[str], spec: ChainSpec) -> None:
        super().__init__()
        self.held = held
        """The caller replaces it when one more full-attention group comes."""
        self._groups = groups
        self._credited = credited
        self._size = spec.block_tokens
        self._unit = self._size
        self._windows: list[WindowGroup] = []
        self._told: list[Handle] = []
        """Handles that full-attention groups told of since the last `collect`."""
        self._places: dict[Handle, tuple[int, int]] = {}
        """Handle -> (key, depth) of each window group's block that ends where a canonical block does."""
        self._ready: dict[int, list[Handle]] = {}
        """Key -> its handles, nearly always one, where rule 1 holds but perhaps for full attention."""
        self._ends: dict[int, tuple[int, ...]] = {}
        """Key of each end -> its marks."""
        self._marks = KeyCounts()
        self._waits = False
        """Whether full-attention blocks waited for their parents at the last `collect`."""
        self.replace(held)

    # --- reading -------------------------------------------------------------------------------------------

    @property
    def n_keys(self) -> int:
        """Number of keys that are published."""
        return len(self._ends) + len(self._marks) + 1

    def __iter__(self) -> Iterator[int]:
        """Yield the keys that are published: ends, marks, and `ENDS_ONLY`."""
        yield ENDS_ONLY
        yield from self._ends
        yield from self._marks

    def placed(self) -> Iterator[tuple[int, int]]:
        """Yield the keys with their depths, 0 for those of no block."""
        return ((key, self._depth(key)) for key in self)

    def anchors(self, anchor_stride: int) -> Iterator[int]:
        """Yield the keys that are published at stride `anchor_stride`. O(keys)."""
        return (key for key in self if self.is_anchor(key, self._depth(key), anchor_stride))

    def is_anchor(self, key: int, depth: int, anchor_stride: int) -> bool:
        """Whether a key is published at stride `anchor_stride`. O(blocks right below an end)."""
        if key in self._ends:
            return depth % anchor_stride == 0 or self._is_last(key)
        return key in self._marks or key == ENDS_ONLY

    def n_fixed(self) -> int:
        """Return how many keys are published at any stride. O(ends)."""
        return len(self._marks) + 1 + sum(map(self._is_last, self._ends))

    def _depth(self, key: int) -> int:
        return self._places[self._ready[key][0]][1] if key in self._ends else 0

    def _is_last(self, key: int) -> bool:
        """Whether no block right below an end is an end."""
        below = self._windows[0].after(self._ready[key][0])
        return not any(self._places[kid][0] in self._ends for kid in below if kid in self._places)

    # --- following -----------------------------------------------------------------------------------------

    def tell(self, handles: list[Handle]) -> None:
        """Note handles of blocks that a full-attention group stored: window groups' blocks may wait for them."""
        self._told += handles

    def collect(self) -> None:
        """Bring the ends up to date. O(what was touched in the groups and the trees)."""
        self.held.collect()
        full = [group for group in self._groups.values() if group.reblocker is not None]
        others = [(group, group.window) for group in self._groups.values() if group.counts and group.window is not None]
        waits = any(group.waiting for group in full)
        for group, window in others:
            self._follow(group, window, self._wanted(window, full, waits or self._waits), full)
        self._waits, self._told = waits, []
        changed = self._changed([window for _, window in others])
        held = self.held.take_changes()
        for key in held.removed:
            if key in self._ends:
                self._leave(key)
        for handle in changed:
            self._judge(handle)
        for key in held.added:
            if key in self._ready:
                self._enter(key)

    # --- parts ---------------------------------------------------------------------------------------------

    def _wanted(self, window: WindowGroup, full: list[Group], waited: bool) -> dict[Handle, None]:
        """The handles of a window group to look at again: touched, unplaced so far, or newly linked or placed.

        If full-attention blocks `waited` for a parent, any of them may have been attached and thereby placed, however
        long ago it was told of. Otherwise only those count that were told of just now.
        """
        wanted, window.touched = window.touched, {}
        block = min((group.block_size for group in full), default=0)
        ratio = block // window.block_size if window.block_size else 0
        again = window.link(ratio, lambda handle: _end_of(handle, full))
        if ratio > 1:
            # A block that is held by its link gets its place as soon as full attention tells of it.
            again += [handle for handle in self._told if handle in window and handle not in self._places]
        for handle in again:
            wanted[handle] = None
            if handle in window:
                window.drop(handle)
        if waited:
            wanted.update(dict.fromkeys(window.unplaced))
        elif window.unplaced:
            wanted.update(dict.fromkeys([handle for handle in self._told if handle in window.unplaced]))
        return wanted

    def _follow(self, group: Group, window: WindowGroup, wanted: dict[Handle, None], full: list[Group]) -> None:
        """Let a group's window hold those of the wanted handles that the group holds, and no others of them."""
        near: tuple[Run, int] | None = None
        for handle in wanted:
            run = group.runs.get(handle)
            if run is None or not any(tier in run.copies for tier in self._credited):
                window.unplaced.discard(handle)
                window.links.pop(handle, None)
                if handle in window:
                    window.drop(handle)
            elif handle not in window:
                near = self._place(handle, window, full, near)
                if near is not None:
                    window.unplaced.discard(handle)
                elif handle in window.links:
                    window.unplaced.discard(handle)
                    window.hold(handle, window.links[handle])
                else:
                    window.unplaced.add(handle)

    def _place(
        self, handle: Handle, window: WindowGroup, full: list[Group], near: tuple[Run, int] | None
    ) -> tuple[Run, int] | None:
        """Hold a window group's block where its full-attention block lies; return that place, None if there is none.

        `near` is the place of the block before: blocks usually come in a row.
        """
        for group in full:
            run = group.runs.get(handle)
            if run is None or run.root is None or not window.block_size:
                continue
            at = _at(run, handle, near)
            end = run.start + (at + 1) * run.unit
            start = end - window.block_size
            if end % window.block_size:
                continue
            before: Handle | None = None
            if start and not window.alone:
                before = _ending_at(run, start)
                if before is None and handle in window.links:
                    before = window.links[handle]
                elif before is None:
                    continue
            if end % self._size == 0 and handle not in self._places:
                assert group.reblocker is not None
                key = group.reblocker.key_at(run, at + 1)
                if key is None:
                    continue
                self._places[handle] = (key, end // self._size)
            window.hold(handle, before)
            return run, at
        return None

    def _changed(self, windows: list[WindowGroup]) -> dict[Handle, None]:
        """The handles to judge again: all, if the hit unit or the window groups are others now."""
        changed: dict[Handle, None] = {}
        unit = hit_unit(self._groups.values()) or self._size
        if unit != self._unit or windows != self._windows:
            self._unit, self._windows = unit, windows
            changed.update(dict.fromkeys(self._places))
        for window in windows:
            changed.update(window.changed)
            window.changed.clear()
        return changed

    def _judge(self, handle: Handle) -> None:
        """Ask again whether a hit can end with a block, and forget the block's place if no window holds it any more."""
        place = self._places.get(handle)
        if place is None:
            return
        key, depth = place
        handles = self._ready.get(key, [])
        if self._all_reach(handle, depth):
            if handle not in handles:
                self._ready[key] = [*handles, handle]
            if self.held.is_anchor(key, depth, 1):
                self._enter(key)
        elif handle in handles:
            if len(handles) == 1:
                if key in self._ends:
                    self._leave(key)
                del self._ready[key]
            else:
                handles.remove(handle)
        if not any(handle in window for window in self._windows):
            del self._places[handle]
        # Whether it is the last of neighbours may have changed as well.
        self._touch(key, depth)

    def _all_reach(self, handle: Handle, depth: int) -> bool:
        """Whether rule 1 holds at a depth, but perhaps for full attention."""
        return not depth * self._size % self._unit and all(window.reaches(handle) for window in self._windows)

    def _enter(self, key: int) -> None:
        if key in self._ends:
            return
        marks = self._ends[key] = self._marks_of(key, self._places[self._ready[key][0]][1])
        self._changes.gain(key)
        for mark in marks:
            if self._marks.gain(mark):
                self._changes.gain(mark)
                self._touch(mark, 0)
        self._touch_around(key)

    def _leave(self, key: int) -> None:
        for mark in self._ends.pop(key):
            if self._marks.lose(mark):
                self._changes.lose(mark)
                self._touch(mark, 0)
        self._changes.lose(key)
        self._touch_around(key)

    def _marks_of(self, key: int, depth: int) -> tuple[int, ...]:
        """The marks of an end: of the first block of its path, and of its section if there is one."""
        depths = (1, section(depth)) if section(depth) else (1,)
        return tuple([marked(self.held.up(key, depth, depth - upper)) for upper in depths])

    def _touch(self, key: int, depth: int) -> None:
        if self._touched is not None:
            self._touched[key] = depth

    def _touch_around(self, key: int) -> None:
        """Touch an end that came or went, and the block right above it, which may be the last of neighbours now."""
        if self._touched is not None:
            handle = self._ready[key][0]
            self._touch(*self._places[handle])
            above = self._windows[0].before.get(handle)
            if above is not None and above in self._places:
                self._touch(*self._places[above])

    def _check(self) -> None:
        """Assert every invariant, the window groups' included. O(blocks)."""
        others = [(group, group.window) for group in self._groups.values() if group.counts and group.window is not None]
        assert [window for _, window in others] == self._windows
        for group, window in others:
            window._check()
            assert not window.touched and not window.changed
            held = {h for h, run in group.runs.items() if any(tier in run.copies for tier in self._credited)}
            assert held == window.unplaced | window._unbroken.keys()
        placed = {handle for window in self._windows for handle in window._unbroken}
        assert self._places.keys() <= placed
        ready: dict[int, set[Handle]] = {}
        for handle, (key, depth) in self._places.items():
            if self._all_reach(handle, depth):
                ready.setdefault(key, set()).add(handle)
        assert {key: set(handles) for key, handles in self._ready.items()} == ready
        assert all(len(set(handles)) == len(handles) for handles in self._ready.values())
        depths = {key: self._places[handles[0]][1] for key, handles in self._ready.items()}
        assert self._ends.keys() == {key for key, depth in depths.items() if self.held.is_anchor(key, depth, 1)}
        marks = KeyCounts()
        for key, mine in self._ends.items():
            assert mine == self._marks_of(key, depths[key])
            for mark in mine:
                marks.gain(mark)
        assert marks == self._marks


def _at(run: Run, handle: Handle, near: tuple[Run, int] | None) -> int:
    """Which block of a run a handle names. The one behind `near`, the first and the last are tried before a search."""
    handles = run.handles
    if near is not None and near[0] is run and near[1] + 1 < len(handles) and handles[near[1] + 1] == handle:
        return near[1] + 1
    return 0 if handles[0] == handle else len(handles) - 1 if handles[-1] == handle else handles.index(handle)


def _end_of(handle: Handle, full: Iterable[Group]) -> int | None:
    """The token at which the full-attention block of a handle ends, None unless there is one on a known path."""
    for group in full:
        run = group.runs.get(handle)
        if run is not None and run.root is not None:
            return run.start + (_at(run, handle, None) + 1) * run.unit
    return None


def _ending_at(run: Run, end: int) -> Handle | None:
    """The block of the path of `run` that ends at token `end`, above the run's end; None if no block does."""
    at: Run | None = run
    while at is not None and at.start >= end:
        at = at.parent
    if at is None:
        return None
    blocks, rest = divmod(end - at.start, at.unit)
    return None if rest else at.handles[blocks - 1]
