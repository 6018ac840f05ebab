"""Which prefixes an endpoint's engine really holds: its event stream, turned into changes of the radix tree.

Rules (each has a recorded stream or a named issue behind it):
1. State is keyed by (group, handle) and counted per tier. vLLM stores a block twice when a prompt is exactly k blocks
   long, or when two equal requests run at once, and removes it twice (vLLM #48933, Dynamo #8012).
2. A block whose parent is unknown is parked and attached when the parent comes (llm-d-kv-cache #372).
3. Handles map to tokens only when len(tokens) == len(handles) * block_size; otherwise the blocks are counted, never
   matched (vLLM #44451). An event without tokens gives a known handle a copy in another tier.
4. Engine blocks of any size become canonical blocks (`reblock`). One is held while all its tokens are. Blocks of one
   path with equal copies are kept as one run (`runs`), so that small pages cost little more than large blocks.
5. Blocks are placed by full-attention groups, and a prefix counts only if every such group holds it. Window and state
   groups enter the hit unit, and a hit ends only where each of them has what it needs: see `hybrid_hits`.
6. A gap makes the residency partial: what was known before it is doubtful until it is stored again, reported or
   removed. A report adds no copies (vLLM #45261).
7. Nothing that an engine sends raises: unknown removals and unusable events are counters.

Memory, the tree's and the handles' included: 98 bytes per engine block of one token, 245 of 16 tokens, 410 of 32 (by
`tracemalloc` on CPython 3.11, prompts of 1,024 tokens, canonical blocks of 16: `benchmarks/ingest.py --only memory`).
Blocks of 16 that make no run, because they came children first or all are forks' ends, take some 460.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, lcm
from typing import NamedTuple

from ..errors import UsageError
from ..events import (
    CPU,
    FULL_ATTENTION_KINDS,
    GPU,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    ContentSpan,
    EngineBatch,
    EngineEvent,
    Handle,
    StreamGap,
    StreamRestarted,
    UnknownEvent,
)
from ..keys.chain import TOKEN_BYTES, ChainSpec, pack_tokens
from ..keys.domain import Domain
from ..keys.keyset import Delta
from .forest import Forest
from .group import Group
from .reblock import Reblocker
from .report import parts_of
from .runs import Run
from .tree import RadixTree
from .window_group import APART_KINDS, WindowGroup

EVICTION_WEIGHT = 0.1
"""Weight of the newest eviction in the smoothed idle age."""

DOUBT = 0.5
"""Confidence in a block that was known before a gap: nobody saw it go, but its removal may have been lost."""


class Residency:
    """The mirror of one endpoint's engine (one data-parallel rank), exact while its stream is clean.

    `apply` takes batches in order and never raises for what an engine sent. `take_changes` gives the 64-bit keys that
    came to be published, and ceased to be: matchable canonical blocks, or the ends of a hybrid model's hits.
    `credited` tiers count for a match. `capacity_tokens`, when known, bounds the live copies in the GPU tier.
    """

    def __init__(self, domain: Domain, credited: Sequence[str] = (GPU, CPU), capacity_tokens: int = 0) -> None:
        self.capacity_tokens = capacity_tokens
        self.partial = False
        """Whether a gap happened and nothing has ended the doubt since."""
        self.counts = StreamCounts()
        self.eviction_age_s = inf
        """How long blocks had not been used when they were evicted, smoothed; infinite before the first."""
        self._domain = domain
        self._spec = ChainSpec(domain.block_size, domain.mix)
        self._credited = tuple(credited)
        self._groups: dict[int, Group] = {}
        self.forest = Forest()
        """The trees of the full-attention groups: what is matchable, and its anchors."""
        self._epoch = 0
        self._doubtful = 0
        self._live = 0
        self._gpu_copies = 0
        self._inflated = False
        self._told: list[Handle] = []  # by full-attention groups in this batch, of a hybrid model alone

    # --- reading -------------------------------------------------------------------------------------------

    @property
    def confidence(self) -> float:
        """How far the matchable blocks can be relied on: 1.0 while none predates a gap, never below `DOUBT`."""
        return 1.0 - (1.0 - DOUBT) * self._doubtful / self._live if self._doubtful else 1.0

    @property
    def hit_unit(self) -> int:
        """Tokens in which the engine can reuse a prefix: the common multiple of its groups' blocks, 0 if unknown."""
        sizes = [group.block_size for group in self._groups.values() if group.block_size]
        return lcm(*sizes) if sizes else 0

    @property
    def canonical_blocks(self) -> int:
        """Number of matchable canonical blocks, whether a hit can end there or not."""
        return self.forest.matchable

    @property
    def live_blocks(self) -> int:
        """Number of engine blocks with at least one copy, over all groups."""
        return self._live

    def keys(self) -> Iterator[int]:
        """Yield the 64-bit keys of all matchable canonical blocks, whether a hit can end there or not."""
        return self.forest.keys()

    def published(self) -> Iterator[int]:
        """Yield the 64-bit keys that are to be published: `keys`, or those of a hybrid model (`keys.hit_marks`)."""
        return self.forest.published_keys()

    @property
    def trees(self) -> tuple[RadixTree, ...]:
        """The trees of the full-attention groups, usually one."""
        return self.forest.trees

    def live(self) -> list[Live]:
        """Return live blocks by (tier, group). O(blocks)."""
        rows: dict[tuple[str, int], list[int]] = {}
        for number, group in self._groups.items():
            for run in group.each():
                for tier, copies in run.copies.items():
                    row = rows.setdefault((tier, number), [0, 0])
                    row[0] += len(run.handles)
                    row[1] += copies * len(run.handles)
        return [Live(tier, number, handles, copies) for (tier, number), (handles, copies) in sorted(rows.items())]

    def take_changes(self) -> Delta:
        """Return and forget the keys that came to be published, and ceased to be, since the last call."""
        return self.forest.take_changes()

    # --- writing -------------------------------------------------------------------------------------------

    def apply(self, batch: EngineBatch, now: float = 0.0) -> None:
        """Apply a batch as a whole, in order, at `now` in seconds. Amortised O(its blocks)."""
        self.counts.batches += 1
        self.forest.tick(now, batch.ts)
        removal: BlocksRemoved | None = None
        handles: list[Handle] = []
        for event in batch.events:
            if isinstance(event, BlocksRemoved):
                # vLLM tells of each block apart: neighbours are looked at as one.
                self.counts.events += event.told
                if removal is not None and not _alike(removal, event):
                    self._remove(removal, handles)
                    handles = []
                removal = event
                handles += event.handles
                continue
            if removal is not None:
                self._remove(removal, handles)
                removal, handles = None, []
            self._apply(event)
        if removal is not None:
            self._remove(removal, handles)
        self._note_evictions()
        self.forest.collect()
        if self.forest.hits is not None:
            self.forest.find_ends(self._groups.values(), self._credited, self.hit_unit, self._told)
            self._told = []
        self._check_inflation()

    def _note_evictions(self) -> None:
        """Smooth the idle age of what was evicted; a block that is dropped at once was never in the cache's order."""
        idle = self.forest.take_idle_s()
        if idle:
            age = sum(idle) / len(idle)
            known = self.eviction_age_s
            self.eviction_age_s = age if known == inf else known + EVICTION_WEIGHT * (age - known)

    def _apply(self, event: EngineEvent) -> None:
        counts = self.counts
        counts.events += 1
        if isinstance(event, BlocksStored):
            if event.confirmed:
                self._confirm(event)
            else:
                self._store(event)
        elif isinstance(event, BlocksCleared):
            counts.clears += 1
            self._clear(event.tier)
        elif isinstance(event, StreamGap):
            counts.gaps += 1
            self._doubt()
        elif isinstance(event, StreamRestarted):
            counts.restarts += 1
            self._restart()
        elif isinstance(event, UnknownEvent):
            counts.unknown_events += 1

    def _store(self, event: BlocksStored) -> None:
        group = self._group(event.group, event.group_kind)
        handles = list(event.handles)
        self.counts.stored += len(handles)
        data = self._content(event)
        if event.tier == GPU and event.block_size > 0:
            # A partial block is smaller, and what another tier keeps as one may be several blocks.
            group.block_size = max(group.block_size, event.block_size)
        if group.window is not None:
            group.window.size(event.window, group.block_size, group.runs)
            group.window.tell(event.parent, event.handles, len(event.tokens))
        elif self.forest.hits is not None:
            self._told += handles
        if data is None or group.reblocker is None:
            group.forget_lost(handles)
            self._store_untold(group, handles, event.tier, data is None)
            return
        run = Run(handles, self._epoch)
        if group.enter(run):
            root = self._root(group, event)
            if root is not None:
                self._store_new(group, event, run, data, root)
                return
            group.leave(run)
        group.forget_lost(handles)
        self._store_mixed(group, event, handles, data, self._root(group, event))

    def _root(self, group: Group, event: BlocksStored) -> int | None:
        """Key of the root above an event's blocks, None while the path is unknown."""
        if event.parent is None:
            return self._domain.root_key(event.namespace)
        group.forget_lost([event.parent])
        parent = group.runs.get(event.parent)
        return parent.root if parent is not None else None

    def _store_untold(self, group: Group, handles: list[Handle], tier: str, hash_only: bool) -> None:
        """Count blocks whose tokens were not told, or do not matter."""
        for i, j, known in group.stretches(handles):
            run = known or Run(handles[i:j], self._epoch)
            if hash_only and not run.known:
                self.counts.hash_only += j - i
            self._hold(group, run, tier)
            if known is None:
                group.keep(run)
                group.adopt(handles[i:j])
            else:
                group.heal(run)

    def _store_new(self, group: Group, event: BlocksStored, run: Run, data: bytes, root: int) -> None:
        """The common case: the path is known, and `run` has entered, so that every handle is new."""
        assert group.reblocker is not None
        handles = run.handles
        run.fill(event.block_size, data, _items(event, 0, len(handles)))
        parent = group.ending(event.parent) if event.parent is not None else None
        if parent is not None:
            run.link(parent)
        self._hold(group, run, event.tier)
        group.reblocker.resolve(run, root)
        if parent is not None and run.continues(parent):
            group.join(parent, run)
        group.adopt(handles)

    def _store_mixed(
        self, group: Group, event: BlocksStored, handles: list[Handle], data: bytes, root: int | None
    ) -> None:
        """Some handles are known, or come twice, or the path is not known: stretch by stretch."""
        assert group.reblocker is not None
        learnt: list[Handle] = []
        for i, j, known in group.stretches(handles):
            run = known or Run(handles[i:j], self._epoch)
            if not run.known:
                size = event.block_size * TOKEN_BYTES
                run.fill(event.block_size, data[i * size : j * size], _items(event, i, j))
                learnt.append(handles[i])
                if root is None:
                    self.counts.orphans += j - i
                if known is None:
                    group.keep(run)
                wanted = handles[i - 1] if i else event.parent
                if wanted is not None:
                    group.place_below(run, wanted)
            self._hold(group, run, event.tier)
            if known is None:
                group.adopt(handles[i:j])
            else:
                group.heal(run)
        for handle in learnt:
            run = group.runs[handle]
            above = run.parent.root if run.parent is not None else root
            if above is not None and run.wants is None:
                group.reblocker.resolve(run, above)

    def _confirm(self, event: BlocksStored) -> None:
        """Take a report: blocks that are known are doubted no longer, runs of others are stored. Amortised O(blocks).

        What a window or state group reports is left out: vLLM counts the blocks in that it has skipped there (0.32.0).
        """
        group = self._group(event.group, event.group_kind)
        if group.reblocker is None or self._content(event) is None:
            return

        def held(handle: Handle) -> bool:
            group.forget_lost([handle])
            run = group.runs.get(handle)
            return run is not None and event.tier in run.copies

        for part in parts_of(event, held):
            if isinstance(part, BlocksStored):
                self.counts.confirmed += len(part.handles)
                self._store(part)
                continue
            for i, j, run in group.stretches(list(part)):
                assert run is not None, "a held handle has a run"
                if run.epoch < self._epoch:
                    run.epoch = self._epoch
                    self._doubtful -= j - i
                    self.counts.confirmed += j - i
                group.heal(run)

    def _remove(self, event: BlocksRemoved, handles: list[Handle]) -> None:
        """Drop a copy of each of the handles, as `event` says it of its own."""
        group, tier = self._groups.get(event.group), event.tier
        i = 0
        while i < len(handles):
            run = group.runs.get(handles[i]) if group is not None else None
            if group is None or run is None or tier not in run.copies:
                self.counts.unknown_removals += 1
                i += 1
                continue
            lower, upper = group.stretch(run, handles, i, back=True)
            i += upper - lower
            self.counts.removed += upper - lower
            held = run.copies[tier]
            gone = held if event.last_copy else 1
            if tier == GPU:
                self._gpu_copies -= gone * (upper - lower)
            if held > gone:
                run = group.piece(run, lower, upper)
                run.lose(tier, gone)
                group.heal(run)
            elif lower and upper == len(run.handles) and run.kids is None and len(run.copies) == 1:
                self._shorten(group, run, lower, tier)
            else:
                around = self._release(group, group.piece(run, lower, upper), tier)
                if around is not None:
                    group.heal(around)

    def _clear(self, tier: str | None) -> None:
        for group in self._groups.values():
            runs = group.each()
            if tier is None or all(run.copies.keys() <= {tier} for run in runs):
                if group.window is not None:
                    group.window.forget()
                group.runs.clear()
                group.waiting.clear()
                if group.reblocker is not None:
                    group.reblocker.tree.clear()
                continue
            for run in [run for run in runs if tier in run.copies]:
                self._release(group, run, tier)
        live = [run for group in self._groups.values() for run in group.each() if run.copies]
        self._live = sum(len(run.handles) for run in live)
        self._doubtful = sum(len(run.handles) for run in live if run.epoch < self._epoch)
        if tier in (None, GPU):
            self._gpu_copies = 0
            self.partial = self.partial and self._doubtful > 0

    def _restart(self) -> None:
        """Forget everything, the groups too: a new life may have other ones, with other blocks."""
        self._clear(None)
        self.forest.collect()
        self._groups.clear()
        self.forest.drop()

    # --- engine blocks -------------------------------------------------------------------------------------

    def _group(self, number: int, kind: str) -> Group:
        group = self._groups.get(number)
        if group is None:
            reblocker = window = None
            if kind in FULL_ATTENTION_KINDS:
                reblocker = Reblocker(self._spec, RadixTree(self._spec, self._credited))
                self.forest.add(reblocker.tree)
            elif kind not in APART_KINDS:
                window = WindowGroup(kind)
                if self.forest.hits is None:
                    self.forest.end_anywhere(self._spec.block_tokens)
            group = self._groups[number] = Group(reblocker, window)
        return group

    def _content(self, event: BlocksStored) -> bytes | None:
        """The event's packed tokens, or None when its blocks cannot be mapped to tokens (rule 3)."""
        if not event.mappable or event.block_size <= 0 or not event.handles:
            return None
        if len(event.tokens) != len(event.handles) * event.block_size:
            return None
        try:
            return pack_tokens(event.tokens)
        except UsageError:
            self.counts.unknown_events += 1
            return None

    def _hold(self, group: Group, run: Run, tier: str) -> None:
        """Count one more copy in `tier` of each of the run's blocks."""
        n = len(run.handles)
        if not run.copies:
            self._live += n
        elif run.epoch < self._epoch:
            self._doubtful -= n
        run.epoch = self._epoch
        if tier == GPU:
            self._gpu_copies += n
        if run.gain(tier):
            if group.reblocker is not None:
                group.reblocker.hold(run, tier)
            elif group.window is not None:
                group.window.touch(run.handles)

    def _release(self, group: Group, run: Run, tier: str) -> Run | None:
        """Drop the last copies in `tier`, and the run with them if no other tier has any; return what could heal."""
        last = len(run.copies) == 1
        if last and run.kids is not None and run.tokens is None and run.known and len(run.handles) > 1:
            # Rule 3 of `group`: from now on each of them may be lost apart.
            for block in group.singles(run):
                self._release(group, block, tier)
            return None
        if group.reblocker is not None:
            group.reblocker.release(run, tier)
        elif group.window is not None:
            group.window.touch(run.handles)
        run.lose(tier, run.copies[tier])
        if not last:
            return run
        self._forget_live(run, len(run.handles))
        return group.drop(run)

    def _shorten(self, group: Group, run: Run, at: int, tier: str) -> None:
        """Forget the blocks from block `at` on: `tier` has their last copies, and nothing is below."""
        runs, gone = group.runs, run.handles[at:]
        if group.reblocker is not None:
            group.reblocker.shorten(run, at, tier)
        elif group.window is not None:
            group.window.touch(gone)
        del run.handles[at:]
        for handle in gone:
            del runs[handle]
        self._forget_live(run, len(gone))

    def _forget_live(self, run: Run, n: int) -> None:
        self._live -= n
        if run.epoch < self._epoch:
            self._doubtful -= n

    # --- doubt ---------------------------------------------------------------------------------------------

    def _doubt(self) -> None:
        self._epoch += 1
        self._doubtful = self._live
        self.partial = True

    def _check_inflation(self) -> None:
        """More live copies than the engine has blocks: removals were lost, or a full report was taken for stores."""
        if not self.capacity_tokens:
            self._inflated = False
            return
        # A copy takes one of the engine's blocks, whatever its group; the smallest size never finds too many.
        block = min((group.block_size for group in self._groups.values() if group.block_size), default=0)
        if self._gpu_copies * block <= self.capacity_tokens:
            self._inflated = False
        elif not self._inflated:
            self._inflated = True
            self.counts.inflated += 1
            self._doubt()

    def _check(self) -> None:
        """Assert every invariant, the trees' included. O(blocks)."""
        live = doubtful = 0
        for group in self._groups.values():
            group._check()
            for run in group.each():
                live += len(run.handles) if run.copies else 0
                doubtful += len(run.handles) if run.copies and run.epoch < self._epoch else 0
        assert (live, doubtful) == (self._live, self._doubtful)
        self.forest._check()
        if self.forest.hits is not None:
            self.forest.hits._check(list(self._groups.values()), self._credited)


def _alike(one: BlocksRemoved, other: BlocksRemoved) -> bool:
    """Whether two removals differ in their handles alone."""
    return (one.tier, one.group, one.last_copy) == (other.tier, other.group, other.last_copy)


def _items(event: BlocksStored, lower: int, upper: int) -> tuple[ContentSpan, ...]:
    """The items that start in blocks `lower` to `upper` - 1 of an event, by their place in them."""
    if not event.contents:
        return ()
    first, end = lower * event.block_size, upper * event.block_size
    return tuple(
        ContentSpan(item.content_id, item.start - first) for item in event.contents if first <= item.start < end
    )


@dataclass(slots=True)
class StreamCounts:
    """What a stream has brought so far, in blocks unless the name says otherwise.

    `orphans` came before their parent; `hash_only` came without usable tokens; `inflated` counts the times that more
    copies were live than the engine has blocks, which proves lost removals. `confirmed` were doubtful or not known when
    the engine reported them.
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


class Live(NamedTuple):
    """Live blocks of one (tier, group): distinct handles, and physical copies."""

    tier: str
    group: int
    handles: int
    copies: int
