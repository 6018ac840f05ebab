"""The engine's live blocks, counted over all groups: how many there are, and how many of them are in doubt.

Rules:
1. A block is live while some tier has a copy of it.
2. A gap begins a new *epoch*. A block that was told of in an earlier one is doubtful until it is stored again, reported
   or removed.
3. A tier that gains its first copy of a run, or loses the last one, changes what is vouched for: the run's group is
   told here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ..events import GPU
from .group import Group
from .runs import Run

DOUBT = 0.5
"""Confidence in a block that was known before a gap: nobody saw it go, but its removal may have been lost."""


class LiveBlocks:
    """Counts of one engine's blocks, and every change of their copies."""

    def __init__(self) -> None:
        self.blocks = 0
        self.doubtful = 0
        self.epoch = 0
        self.gpu_copies = 0
        """Copies in the GPU tier; each takes one of the engine's blocks, whatever its group."""

    @property
    def confidence(self) -> float:
        """From `DOUBT`, if all live blocks are doubtful, to 1.0, if none is."""
        return 1.0 - (1.0 - DOUBT) * self.doubtful / self.blocks if self.doubtful else 1.0

    def doubt(self) -> None:
        """Begin a new epoch: all live blocks are doubtful. O(1)."""
        self.epoch += 1
        self.doubtful = self.blocks

    def confirm(self, run: Run) -> bool:
        """Move a live run into the present epoch; return whether it was doubtful. O(1)."""
        if run.epoch == self.epoch:
            return False
        run.epoch = self.epoch
        self.doubtful -= len(run.handles)
        return True

    def hold(self, group: Group, run: Run, tier: str) -> None:
        """Count one more copy in `tier` of each of a run's blocks."""
        n = len(run.handles)
        if not run.copies:
            self.blocks += n
        elif run.epoch < self.epoch:
            self.doubtful -= n
        run.epoch = self.epoch
        if tier == GPU:
            self.gpu_copies += n
        if run.gain(tier):
            if group.reblocker is not None:
                group.reblocker.hold(run, tier)
            elif group.window is not None:
                group.window.touch(run.handles)

    def release(self, group: Group, run: Run, tier: str) -> Run | None:
        """Drop the last copies in `tier`, and the run too if no other tier has copies; return the run to heal, if any.

        The copies in the GPU tier are counted by the caller, who may drop several of each block at once.
        """
        last = len(run.copies) == 1
        if last and run.kids is not None and run.tokens is None and run.known and len(run.handles) > 1:
            # Rule 3 of `group`: from now on each of them may be lost apart.
            for block in group.singles(run):
                self.release(group, block, tier)
            return None
        if group.reblocker is not None:
            group.reblocker.release(run, tier)
        elif group.window is not None:
            group.window.touch(run.handles)
        run.lose(tier, run.copies[tier])
        if not last:
            return run
        self._forget(run, len(run.handles))
        return group.drop(run)

    def shorten(self, group: Group, run: Run, at: int, tier: str) -> None:
        """Forget a run's blocks from block `at` on: `tier` has their last copies, and nothing hangs below them."""
        runs, gone = group.runs, run.handles[at:]
        if group.reblocker is not None:
            group.reblocker.shorten(run, at, tier)
        elif group.window is not None:
            group.window.touch(gone)
        del run.handles[at:]
        for handle in gone:
            del runs[handle]
        self._forget(run, len(gone))

    def _forget(self, run: Run, n: int) -> None:
        self.blocks -= n
        if run.epoch < self.epoch:
            self.doubtful -= n

    def count_anew(self, groups: Iterable[Group]) -> None:
        """Count the live blocks after groups were cleared. O(runs)."""
        live = [run for group in groups for run in group.each() if run.copies]
        self.blocks = sum(len(run.handles) for run in live)
        self.doubtful = sum(len(run.handles) for run in live if run.epoch < self.epoch)

    def _check(self, groups: Iterable[Group]) -> None:
        """Assert that the counts are those of the groups. O(runs)."""
        counted = LiveBlocks()
        counted.epoch = self.epoch
        counted.count_anew(groups)
        assert (counted.blocks, counted.doubtful) == (self.blocks, self.doubtful)


class Live(NamedTuple):
    """Live blocks of one (tier, group): distinct handles, and physical copies."""

    tier: str
    group: int
    handles: int
    copies: int


@dataclass(slots=True)
class StreamCounts:
    """What a stream has brought so far, in blocks unless the name says otherwise.

    `batches`, `events`, `clears`, `unknown_events`, `gaps` and `restarts` count those. `unknown_removals` were not
    held; `hash_only` had no usable tokens; `orphans` came before their parent; `confirmed` were doubtful or not known
    when reported. `inflated` counts how often more copies were live than the engine has blocks: removals were lost.
    """

    batches: int = 0
    events: int = 0
    stored: int = 0
    removed: int = 0
    clears: int = 0
    unknown_events: int = 0
    unknown_removals: int = 0
    hash_only: int = 0
    orphans: int = 0
    gaps: int = 0
    restarts: int = 0
    inflated: int = 0
    confirmed: int = 0
