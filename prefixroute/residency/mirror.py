"""Which prefixes an endpoint's engine really holds: its event stream, turned into changes of the radix tree.

Rules (each has a recorded stream or a named issue behind it):
1. State is kept by (group, handle) and counted per tier. vLLM stores a block twice when a prompt is exactly k blocks
   long, or when two equal requests run at once, and removes it twice (vLLM #48933, Dynamo #8012).
2. How stores enter, those without a known parent, those without tokens and reports too, `stores` says.
3. Engine blocks of any size become canonical blocks (`reblock`), which are held while all their tokens are. Blocks of
   one path with equal copies are one run (`runs`), so that small pages cost little more than large blocks.
4. Full-attention groups place blocks, and a prefix counts only if every such group holds it (`forest`). Window and
   state groups enter the hit unit, and a hit ends only where each of them has what it needs (`hybrid_hits`).
5. A gap makes the residency partial: what was known before it is doubtful (`live`).
6. What is published is one of three structures (`published`). It changes when the first window or state group comes,
   when one more full-attention group comes, and when the engine restarts. A group has come when a store of it was
   accepted (`Group.counts`), not before: rubbish with another group's number takes no match away.
7. Nothing that an engine sends raises: unknown removals and unusable events are counted.

Memory, the tree's and the handles' included: 98 bytes per engine block of one token, 245 of 16 tokens, 410 of 32 (by
`tracemalloc` on CPython 3.11, prompts of 1,024 tokens, canonical blocks of 16: `benchmarks/ingest.py --only memory`).
Blocks of 16 that make no run, because they came children first or all are forks' ends, take some 460.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..events import (
    CPU,
    FULL_ATTENTION_KINDS,
    GPU,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Differs,
    EngineBatch,
    EngineEvent,
    Handle,
    StreamGap,
    StreamRestarted,
    UnknownEvent,
)
from ..keys.chain import ChainSpec, TokenChain
from ..keys.domain import Domain
from ..keys.keyset import Delta
from .forest import Forest
from .group import Group, hit_unit
from .hybrid_hits import Held, HybridHits
from .idle import Idleness
from .live import Live, LiveBlocks, StreamCounts
from .published import Published
from .reblock import Reblocker
from .stores import Stores
from .strays import PATHS, REACH, parting
from .tree import RadixTree
from .window_group import APART_KINDS, WindowGroup


class Residency:
    """The mirror of one endpoint's engine (one data-parallel rank), exact while its stream is clean.

    `apply` takes batches in order and `take_changes` tells what they changed. Blocks in `credited` tiers count for a
    match. `capacity_tokens`, when known (above 0), bounds the live copies in the GPU tier.
    """

    def __init__(self, domain: Domain, credited: Sequence[str] = (GPU, CPU), capacity_tokens: int = 0) -> None:
        self.capacity_tokens = capacity_tokens
        self.partial = False
        """Whether a gap happened and nothing has ended the doubt since."""
        self.counts = StreamCounts()
        self._spec = ChainSpec(domain.block_size, domain.mix)
        self._credited = tuple(credited)
        self._groups: dict[int, Group] = {}
        self._counted: dict[int, Group] = {}
        """Those that count (rule 6)."""
        self._live = LiveBlocks()
        self._stores = Stores(domain, self._live, self.counts, self._group, self._is_known)
        self._idle = Idleness()
        self._trees = [RadixTree(self._spec, self._credited, self._idle)]
        """One for each full-attention group that counts; the first is there before its group."""
        self._held: Held = self._trees[0]
        self._published: Published = self._held
        self._inflated = False
        self.hit_unit = 0
        """Tokens in which the engine can reuse a prefix: the common multiple of its groups' blocks, 0 if unknown.

        Of the blocks that are held, or were last. To be read only.
        """

    # --- reading -------------------------------------------------------------------------------------------

    @property
    def confidence(self) -> float:
        """How far the matchable blocks can be relied on: 1.0 while none predates a gap, never below `live.DOUBT`."""
        return self._live.confidence

    @property
    def eviction_age_s(self) -> float:
        """Seconds that blocks had not been used when they were evicted, smoothed; infinite before the first."""
        return self._idle.age_s

    @property
    def canonical_blocks(self) -> int:
        """Number of matchable canonical blocks, whether a hit can end there or not."""
        return self._held.n_keys

    @property
    def live_blocks(self) -> int:
        """Number of engine blocks with at least one copy, over all groups."""
        return self._live.blocks

    def keys(self) -> Iterator[int]:
        """Yield the 64-bit keys of all matchable canonical blocks, whether a hit can end there or not."""
        return iter(self._held)

    def published(self) -> Published:
        """Return what is to be published: iterate for its 64-bit keys. Ask anew after each `apply` (rule 6)."""
        return self._published

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
        """Return and forget the 64-bit keys that came to be published, and ceased to be, since the last call."""
        return self._published.take_changes()

    # --- writing -------------------------------------------------------------------------------------------

    def apply(self, batch: EngineBatch, now: float = 0.0) -> None:
        """Apply a batch as a whole, in order, at `now` in seconds. Amortised O(its blocks)."""
        self.counts.batches += 1
        self._idle.tick(now, batch.ts)
        removal: BlocksRemoved | None = None
        handles: list[Handle] = []
        for event in batch.events:
            same = isinstance(event, BlocksRemoved) and removal is not None and _alike(removal, event)
            if removal is not None and not same:
                self._remove(removal, handles)
                removal, handles = None, []
            if isinstance(event, BlocksRemoved):
                # vLLM tells of each removed block in an event of its own: neighbours are applied as one.
                self.counts.events += event.told
                removal = event
                handles += event.handles
            else:
                self._apply(event)
        if removal is not None:
            self._remove(removal, handles)
        self._idle.collect()
        if len(self._groups) > len(self._counted):
            self._regroup()
        self.hit_unit = hit_unit((self._counted or self._groups).values())
        self._published.collect()
        self._check_inflation()

    def end_request(self, chain: TokenChain) -> None:
        """Make the last block of a prompt an anchor while it is here, if the whole prompt is matchable. O(trees)."""
        for tree in self._trees:
            tree.end_request(chain)

    def use(self, chain: TokenChain, depth: int, now: float) -> None:
        """Note that a prompt is served from its first `depth` blocks here, at `now` in seconds. O(edges)."""
        key = chain.key(depth)
        self._idle.tick(now)
        for tree in self._trees:
            tree.use(key)

    def holds(self, chain: TokenChain, depth: int) -> bool:
        """Whether every full-attention group holds the first `depth` blocks of a prompt, at least one. O(trees)."""
        key = chain.key(depth)
        return all(tree.is_anchor(key, depth, 1) for tree in self._trees)

    def depth(self, chain: TokenChain) -> int:
        """Return how many leading blocks of a prompt every full-attention group holds. O(log depth) keys a tree."""
        return min(tree.depth(chain) for tree in self._trees)

    def stray(self, chain: TokenChain, depth: int) -> Differs | None:
        """Return where the engine stores a prompt otherwise, of which `depth` blocks are found; None if nowhere."""
        start, width = depth * self._spec.block_tokens, self._spec.block_bytes
        paths = self._trees[0].paths(chain.key(depth), depth, REACH, PATHS)
        return parting(chain.packed[depth * width : (depth + REACH) * width], paths, start)

    # --- events --------------------------------------------------------------------------------------------

    def _apply(self, event: EngineEvent) -> None:
        counts = self.counts
        counts.events += 1
        if isinstance(event, BlocksStored):
            if event.confirmed:
                self._stores.report(event)
            else:
                self._stores.store(event)
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

    def _remove(self, event: BlocksRemoved, handles: list[Handle]) -> None:
        """Drop a copy of each of the handles, from the tier and group of `event`."""
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
                self._live.gpu_copies -= gone * (upper - lower)
            if held > gone:
                run = group.piece(run, lower, upper)
                run.lose(tier, gone)
                group.heal(run)
            elif lower and upper == len(run.handles) and run.kids is None and len(run.copies) == 1:
                self._live.shorten(group, run, lower, tier)
            else:
                around = self._live.release(group, group.piece(run, lower, upper), tier)
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
                    group.reblocker.clear()
                continue
            for run in [run for run in runs if tier in run.copies]:
                self._live.release(group, run, tier)
        self._live.count_anew(self._groups.values())
        if tier in (None, GPU):
            self._live.gpu_copies = 0
            self.partial = self.partial and self._live.doubtful > 0

    def _restart(self) -> None:
        """Forget everything, the groups too: another incarnation may have other groups, with other blocks."""
        self._clear(None)
        self._groups.clear()
        self._counted.clear()
        self.hit_unit = 0
        before, self._stores.hits = self._published, None
        self._trees = [RadixTree(self._spec, self._credited, self._idle)]
        self._held = self._published = self._trees[0]
        self._published.replace(before)

    def _doubt(self) -> None:
        self._live.doubt()
        self.partial = True

    def _check_inflation(self) -> None:
        """More live copies than the engine has blocks: removals were lost, or a full report was taken for stores."""
        inflated = False
        if self.capacity_tokens:
            # A copy takes one of the engine's blocks, whatever its group; the smallest size never finds too many.
            block = min((group.block_size for group in self._groups.values() if group.block_size), default=0)
            inflated = self._live.gpu_copies * block > self.capacity_tokens
        if inflated and not self._inflated:
            self.counts.inflated += 1
            self._doubt()
        self._inflated = inflated

    # --- groups --------------------------------------------------------------------------------------------

    def _group(self, number: int, kind: str) -> Group:
        group = self._groups.get(number)
        if group is None:
            reblocker = window = None
            if kind in FULL_ATTENTION_KINDS:
                first = all(other.reblocker is None for other in self._groups.values())
                tree = self._trees[0] if first else RadixTree(self._spec, self._credited, self._idle)
                reblocker = Reblocker(self._spec, tree)
            elif kind not in APART_KINDS:
                window = WindowGroup(kind)
            group = self._groups[number] = Group(reblocker, window)
        return group

    def _is_known(self, handle: Handle) -> bool:
        return any(handle in group.runs for group in self._groups.values())

    def _regroup(self) -> None:
        """Let those groups count of which a store was accepted. O(groups), O(blocks) if that are more than before."""
        for number, group in self._groups.items():
            reblocker = group.reblocker
            group.counts = group.counts or (reblocker is not None and reblocker.placed_any)
            if not group.counts or number in self._counted:
                continue
            full = any(other.reblocker is not None for other in self._counted.values())
            self._counted[number] = group
            if group.window is not None and self._stores.hits is None:
                self._published = self._stores.hits = HybridHits(self._held, self._groups, self._credited, self._spec)
            if reblocker is not None:
                before, self._trees = self._held, [*self._trees, reblocker.tree] if full else [reblocker.tree]
                if full:
                    self._held = Forest(self._trees, before)
                elif before is not reblocker.tree:
                    # Rubbish had taken the first tree.
                    self._held = reblocker.tree
                    self._held.replace(before)
                if self._stores.hits is None:
                    self._published = self._held
                else:
                    self._stores.hits.held = self._held

    def _check(self) -> None:
        """Assert every invariant. O(blocks)."""
        for group in self._groups.values():
            group._check()
        self._live._check(self._groups.values())
        for tree in self._trees:
            tree._check()
        if len(self._trees) > 1:
            self._held._check()
        if self._stores.hits is not None:
            self._stores.hits._check()
        assert self._published is (self._stores.hits or self._held)


def _alike(one: BlocksRemoved, other: BlocksRemoved) -> bool:
    """Whether two removals differ in their handles alone."""
    return (one.tier, one.group, one.last_copy) == (other.tier, other.group, other.last_copy)
