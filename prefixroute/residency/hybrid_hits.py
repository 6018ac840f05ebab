"""Where the hits of a hybrid model can end: the depths at which every group of it has what it needs.

Rules:
1. A hit ends at a depth that all full-attention groups hold (`forest`), that every window and state group reaches
   (`window_group`), and that is a multiple of the hit unit. Those depths are *ends*; nothing else that is held is of
   use.
2. A window's block gets its place from the full-attention block of the same handle. One that has none yet waits.
3. What is published is ends and marks (`keys.hit_marks`), at anchor stride 1. At stride k an end
   counts as an anchor when its depth is a multiple of k, or no block of the first window group right below it is one:
   of neighbours the last stays.

Memory: about 900 bytes an end beside the windows' own; nothing of this is there for an endpoint without such a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from ..events import Handle
from ..keys.hit_marks import ENDS_ONLY, marked, section
from ..keys.keyset import Delta
from .group import Group
from .runs import Run
from .window_group import WindowGroup


class HybridHits:
    """The ends of one endpoint, and what is to be published of them.

    `holds(key, depth)` says whether every full-attention group holds a block and all above it, and `up(key, depth, n)`
    gives the key n blocks above it. `given` are the keys that were published while it was no hybrid.
    """

    __slots__ = (
        "_changes",
        "_ends",
        "_holds",
        "_marks",
        "_places",
        "_ready",
        "_size",
        "_touched",
        "_unit",
        "_up",
        "_waits",
        "_windows",
    )

    def __init__(
        self,
        block_tokens: int,
        holds: Callable[[int, int], bool],
        up: Callable[[int, int, int], int],
        given: set[int],
        watched: bool,
    ) -> None:
        self._size = block_tokens
        self._holds = holds
        self._up = up
        self._unit = 0
        self._windows: list[WindowGroup] = []
        self._places: dict[Handle, tuple[int, int]] = {}
        """Handle -> (key, depth) of the window blocks that end where a canonical block does."""
        self._ready: dict[int, list[Handle]] = {}
        """Key -> its handles, nearly always one, where rule 1 holds but for full attention."""
        self._ends: dict[int, tuple[int, ...]] = {}
        """Key -> the marks that it has."""
        self._marks: dict[int, int] = {}
        """Marked key -> ends that have it."""
        self._changes = Delta(set(), given)
        self._changes.gain(ENDS_ONLY)
        self._touched: dict[int, int] | None = {ENDS_ONLY: 0} if watched else None
        self._waits = False

    # --- reading -------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of keys that are published."""
        return len(self._ends) + len(self._marks) + 1

    def __contains__(self, key: object) -> bool:
        """Whether a hit can end at the block with this key."""
        return key in self._ends

    def keys(self) -> Iterator[int]:
        """Yield the keys that are published: ends, marks, and `ENDS_ONLY`."""
        yield ENDS_ONLY
        yield from self._ends
        yield from self._marks

    def anchors(self, anchor_stride: int) -> Iterator[int]:
        """Yield what is published at stride `anchor_stride`."""
        return (key for key in self.keys() if self.is_anchor(key, self._depth(key), anchor_stride))

    def is_anchor(self, key: int, depth: int, anchor_stride: int) -> bool:
        """Whether a key is published at stride `anchor_stride`. O(1), and the blocks right below an end."""
        if key in self._ends:
            return depth % anchor_stride == 0 or self._is_last(key)
        return key in self._marks or key == ENDS_ONLY

    def last(self) -> int:
        """Return how many keys are published at any stride. O(ends)."""
        return len(self._marks) + 1 + sum(map(self._is_last, self._ends))

    def _depth(self, key: int) -> int:
        return self._places[self._ready[key][0]][1] if key in self._ends else 0

    def _is_last(self, key: int) -> bool:
        """Whether no block right below an end is one."""
        below = self._windows[0].after(self._ready[key][0])
        return not any(self._places[kid][0] in self._ends for kid in below if kid in self._places)

    # --- following -----------------------------------------------------------------------------------------

    def collect(
        self, groups: Iterable[Group], credited: Sequence[str], unit: int, told: Sequence[Handle], held: Delta
    ) -> None:
        """Take what came and went in `groups`, and of what all trees hold; `told` is what their groups told of.

        Call it when the trees are up to date. O(what was touched).
        """
        full = [group for group in groups if group.reblocker is not None]
        others = [(group, group.window) for group in groups if group.window is not None]
        # Parked blocks may have been attached, and with them some that were told long ago.
        waits = any(group.waiting for group in full)
        block = min((group.block_size for group in full), default=0)
        for group, window in others:
            wanted, window.touched = window.touched, {}
            ratio = block // window.block_size if window.block_size else 0
            again = window.link(ratio, lambda handle: _end_of(handle, full))
            if ratio > 1:
                # A block that is held by its link gets its place as soon as full attention tells of it.
                again += [handle for handle in told if handle in window and handle not in self._places]
            for handle in again:
                wanted[handle] = None
                if handle in window:
                    window.drop(handle)
            if window.unplaced and (waits or self._waits):
                wanted.update(dict.fromkeys(window.unplaced))
            elif window.unplaced:
                wanted.update(dict.fromkeys([handle for handle in told if handle in window.unplaced]))
            self._follow(group, window, wanted, full, credited)
        self._waits = waits
        windows = [window for _, window in others]
        changed: dict[Handle, None] = {}
        if unit != self._unit or windows != self._windows:
            self._unit, self._windows = unit, windows
            changed.update(dict.fromkeys(self._places))
        for window in windows:
            changed.update(window.changed)
            window.changed.clear()
        for key in held.removed:
            if key in self._ends:
                self._leave(key)
        for handle in changed:
            self._judge(handle)
        for key in held.added:
            if key in self._ready:
                self._enter(key)

    def take_changes(self) -> Delta:
        """Return and forget the keys that came to be published, and ceased to be, since the last call."""
        changes, self._changes = self._changes, Delta(set(), set())
        return changes

    def close(self) -> Delta:
        """Return what `take_changes` would if all were gone: the endpoint is a hybrid no longer."""
        for key in self.keys():
            self._changes.lose(key)
            self._touch(key, 0)
        return self._changes

    def watch_anchors(self, on: bool) -> None:
        """Begin or cease to note touched keys. What is there already is not touched by that."""
        if not on:
            self._touched = None
        elif self._touched is None:
            self._touched = {}

    @property
    def touched(self) -> int:
        """Number of touched keys that were not taken."""
        return len(self._touched) if self._touched else 0

    def take_touched(self) -> dict[int, int]:
        """Return and forget the keys (key -> depth) that may have become, or ceased to be, anchors."""
        touched = self._touched
        if not touched:
            return {}
        self._touched = {}
        return touched

    # --- parts ---------------------------------------------------------------------------------------------

    def _follow(
        self,
        group: Group,
        window: WindowGroup,
        wanted: dict[Handle, None],
        full: list[Group],
        credited: Sequence[str],
    ) -> None:
        """Let the window of a group hold what the group does, of the handles that are wanted."""
        near: tuple[Run, int] | None = None
        for handle in wanted:
            run = group.runs.get(handle)
            if run is None or not any(tier in run.copies for tier in credited):
                window.unplaced.discard(handle)
                window.unlink(handle)
                if handle in window:
                    window.drop(handle)
            elif handle not in window:
                near = self._place(handle, window, full, near)
                if near is not None:
                    window.unplaced.discard(handle)
                elif window.linked(handle):
                    window.unplaced.discard(handle)
                    window.hold(handle, window.above(handle))
                else:
                    window.unplaced.add(handle)

    def _place(
        self, handle: Handle, window: WindowGroup, full: list[Group], near: tuple[Run, int] | None
    ) -> tuple[Run, int] | None:
        """Hold a block of a window where its full-attention block lies; return that, None if there is none.

        `near` is where the last one was: as a rule they come in a row.
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
                if before is None and window.linked(handle):
                    before = window.above(handle)
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

    def _judge(self, handle: Handle) -> None:
        """Ask again whether a hit can end with a block, and forget its place if no window holds it any more."""
        place = self._places.get(handle)
        if place is None:
            return
        key, depth = place
        handles = self._ready.get(key, [])
        if not depth * self._size % self._unit and all(window.reaches(handle) for window in self._windows):
            if handle not in handles:
                self._ready[key] = [*handles, handle]
            if self._holds(key, depth):
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

    def _enter(self, key: int) -> None:
        if key in self._ends:
            return
        depth = self._places[self._ready[key][0]][1]
        marks = [marked(self._up(key, depth, depth - 1))]
        if section(depth):
            marks.append(marked(self._up(key, depth, depth - section(depth))))
        self._ends[key] = tuple(marks)
        self._changes.gain(key)
        for mark in marks:
            n = self._marks.get(mark, 0)
            self._marks[mark] = n + 1
            if not n:
                self._changes.gain(mark)
                self._touch(mark, 0)
        self._touch_around(key, depth)

    def _leave(self, key: int) -> None:
        for mark in self._ends.pop(key):
            self._marks[mark] -= 1
            if not self._marks[mark]:
                del self._marks[mark]
                self._changes.lose(mark)
                self._touch(mark, 0)
        self._changes.lose(key)
        self._touch_around(key, self._places[self._ready[key][0]][1])

    def _touch(self, key: int, depth: int) -> None:
        if self._touched is not None:
            self._touched[key] = depth

    def _touch_around(self, key: int, depth: int) -> None:
        """Touch an end and the one right above it, which may be the last of neighbours now."""
        if self._touched is not None:
            self._touched[key] = depth
            above = self._windows[0].before(self._ready[key][0])
            if above is not None and above in self._places:
                self._touch(*self._places[above])

    def _check(self, groups: Sequence[Group], credited: Sequence[str]) -> None:
        """Assert every invariant, the windows' included. O(blocks)."""
        others = [(group, group.window) for group in groups if group.window is not None]
        assert [window for _, window in others] == self._windows
        for group, window in others:
            window._check()
            assert not window.touched and not window.changed
            held = {h for h, run in group.runs.items() if any(tier in run.copies for tier in credited)}
            assert held == window.unplaced | window._runs.keys()
        placed = {handle for window in self._windows for handle in window._runs}
        assert self._places.keys() <= placed
        ready: dict[int, set[Handle]] = {}
        for handle, (key, depth) in self._places.items():
            if not depth * self._size % self._unit and all(window.reaches(handle) for window in self._windows):
                ready.setdefault(key, set()).add(handle)
        assert {key: set(handles) for key, handles in self._ready.items()} == ready
        assert all(len(set(handles)) == len(handles) for handles in self._ready.values())
        depths = {key: self._places[handles[0]][1] for key, handles in self._ready.items()}
        assert self._ends.keys() == {key for key, depth in depths.items() if self._holds(key, depth)}
        marks: dict[int, int] = {}
        for key, mine in self._ends.items():
            depth = depths[key]
            at = [1, section(depth)] if section(depth) else [1]
            assert mine == tuple([marked(self._up(key, depth, depth - upper)) for upper in at])
            for mark in mine:
                marks[mark] = marks.get(mark, 0) + 1
        assert marks == self._marks


def _at(run: Run, handle: Handle, near: tuple[Run, int] | None) -> int:
    """Which block of a run a handle is: the one behind `near`, the first, the last, or wherever it is found."""
    handles = run.handles
    if near is not None and near[0] is run and near[1] + 1 < len(handles) and handles[near[1] + 1] == handle:
        return near[1] + 1
    return 0 if handles[0] == handle else len(handles) - 1 if handles[-1] == handle else handles.index(handle)


def _end_of(handle: Handle, full: Iterable[Group]) -> int | None:
    """The token at which a block ends, if a full-attention block of the same handle does, and its path is known."""
    for group in full:
        run = group.runs.get(handle)
        if run is not None and run.root is not None:
            return run.start + (_at(run, handle, None) + 1) * run.unit
    return None


def _ending_at(run: Run, end: int) -> Handle | None:
    """The block of a path that ends at token `end`, which is above the end of `run`; None if none does."""
    at: Run | None = run
    while at is not None and at.start >= end:
        at = at.parent
    if at is None:
        return None
    blocks, rest = divmod(end - at.start, at.unit)
    return None if rest else at.handles[blocks - 1]
