"""Which prefixes an endpoint's engine really holds: its event stream, turned into changes of the radix tree.

Rules (each has a recorded stream or a named issue behind it):
1. State is keyed by (group, handle) and counted per tier. vLLM stores a block twice when a prompt is exactly k blocks
   long, or when two equal requests run at once, and removes it twice (vLLM #48933, Dynamo #8012).
2. A block whose parent is unknown is parked and attached when the parent comes (llm-d-kv-cache #372).
3. Handles map to tokens only when len(tokens) == len(handles) * block_size; otherwise the blocks are counted, never
   matched (vLLM #44451). An event without tokens gives a known handle a copy in another tier.
4. Engine blocks of any size become canonical blocks (`reblock`). One is held while all its tokens are.
5. Blocks are placed by full-attention groups, and a prefix counts only if every such group holds it. Window and state
   groups are counted, and enter the hit unit (AIBrix #2285).
6. A gap makes the residency partial: what was known before it is doubtful until it is stored again, reported or
   removed. A report adds no copies (vLLM #45261).
7. Nothing that an engine sends raises: unknown removals and unusable events are counters.

Memory: about 350 bytes per engine block (430 on CPython 3.10), plus the tree's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, lcm
from typing import NamedTuple

from .chain import TOKEN_BYTES, ChainSpec, pack_tokens
from .domain import Domain
from .errors import UsageError
from .events import (
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
from .forest import Forest
from .reblock import Reblocker, Span
from .report import parts_of
from .tree import Changes, RadixTree

EVICTION_WEIGHT = 0.1
"""Weight of the newest eviction in the smoothed idle age."""

DOUBT = 0.5
"""Confidence in a block that was known before a gap: nobody saw it go, but its removal may have been lost."""


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


class _Group:
    """One KV-cache group's engine blocks; `reblocker` only for a full-attention group."""

    __slots__ = ("block_size", "reblocker", "spans", "waiting")

    def __init__(self, reblocker: Reblocker | None) -> None:
        self.reblocker = reblocker
        self.block_size = 0
        self.spans: dict[Handle, Span] = {}
        self.waiting: dict[Handle, list[Span]] = {}


class Residency:
    """The mirror of one endpoint's engine (one data-parallel rank), exact while its stream is clean.

    `apply` takes batches in order and never raises for what an engine sent. `take_changes` gives the 64-bit keys of
    canonical blocks that became, or ceased to be, matchable. `credited` are the tiers that count for a match.
    `capacity_tokens`, when known, bounds the live copies in the GPU tier.
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
        self._groups: dict[int, _Group] = {}
        self.forest = Forest()
        """The trees of the full-attention groups: what is matchable, and its anchors."""
        self._epoch = 0
        self._doubtful = 0
        self._live = 0
        self._gpu_copies = 0
        self._inflated = False

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
        """Number of matchable canonical blocks."""
        return self.forest.matchable

    @property
    def live_blocks(self) -> int:
        """Number of engine blocks with at least one copy, over all groups."""
        return self._live

    def keys(self) -> Iterator[int]:
        """Yield the 64-bit keys of all matchable canonical blocks."""
        return self.forest.keys()

    @property
    def trees(self) -> tuple[RadixTree, ...]:
        """The trees of the full-attention groups, usually one."""
        return self.forest.trees

    def live(self) -> list[Live]:
        """Return live blocks by (tier, group). O(blocks)."""
        rows: dict[tuple[str, int], list[int]] = {}
        for number, group in self._groups.items():
            for span in group.spans.values():
                for tier, copies in span.copies.items():
                    row = rows.setdefault((tier, number), [0, 0])
                    row[0] += 1
                    row[1] += copies
        return [Live(tier, number, handles, copies) for (tier, number), (handles, copies) in sorted(rows.items())]

    def take_changes(self) -> Changes:
        """Return and forget the keys that became, and ceased to be, matchable since the last call."""
        return self.forest.take_changes()

    # --- writing -------------------------------------------------------------------------------------------

    def apply(self, batch: EngineBatch, now: float = 0.0) -> None:
        """Apply a batch as a whole, in order, at `now` in seconds. Amortised O(its blocks)."""
        self.counts.batches += 1
        self.forest.tick(now)
        for event in batch.events:
            self._apply(event)
        self._note_evictions()
        self.forest.collect()
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
        elif isinstance(event, BlocksRemoved):
            self._remove(event)
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
        self.counts.stored += len(event.handles)
        data = self._content(event)
        if event.tier == GPU and event.block_size > 0:
            # A partial block is smaller, and what another tier keeps as one may be several blocks.
            group.block_size = max(group.block_size, event.block_size)
        if data is None or group.reblocker is None:
            for handle in event.handles:
                span = self._span(group, handle)
                self.counts.hash_only += data is None and not span.known
                self._hold(group, span, event.tier)
            return
        fresh = group.spans.keys().isdisjoint(event.handles)
        if not fresh:
            for handle in event.handles:
                self._found(group, handle)
        parent = self._found(group, event.parent) if event.parent is not None else None
        root = self._domain.root_key(event.namespace) if event.parent is None else parent.root if parent else None
        if fresh and root is not None and self._store_new(group, event, data, parent, root):
            return
        learnt: list[Span] = []
        for i, handle in enumerate(event.handles):
            span = self._span(group, handle)
            if not span.known:
                _fill(span, event, data, i)
                self._place_below(group, span, parent, event.parent if i == 0 else None)
                learnt.append(span)
            self._hold(group, span, event.tier)
            parent = span
        if root is None:
            self.counts.orphans += len(learnt)
        for span in learnt:
            above = span.parent.root if span.parent is not None else root
            if above is not None and span.wants is None:
                group.reblocker.resolve(span, above)

    def _confirm(self, event: BlocksStored) -> None:
        """Take a report: blocks that are known are doubted no longer, runs of others are stored. Amortised O(blocks).

        What a window or state group reports is left out: vLLM counts the blocks in that it has skipped there (0.32.0).
        """
        group = self._group(event.group, event.group_kind)
        if group.reblocker is None or self._content(event) is None:
            return

        def held(handle: Handle) -> bool:
            span = self._found(group, handle)
            return span is not None and event.tier in span.copies

        for part in parts_of(event, held):
            if isinstance(part, BlocksStored):
                self.counts.confirmed += len(part.handles)
                self._store(part)
                continue
            for handle in part:
                span = group.spans[handle]
                if span.epoch < self._epoch:
                    span.epoch = self._epoch
                    self._doubtful -= 1
                    self.counts.confirmed += 1

    def _store_new(self, group: _Group, event: BlocksStored, data: bytes, parent: Span | None, root: int) -> bool:
        """The common case in one pass: every handle is new, and the path is known."""
        assert group.reblocker is not None
        if event.contents or len(set(event.handles)) < len(event.handles):
            return False
        spans = [Span(handle, self._epoch) for handle in event.handles]
        if not group.reblocker.store_run(spans, parent, root, data, event.tier):
            return False
        for span in spans:
            span.copies[event.tier] = 1
            group.spans[span.handle] = span
            if parent is not None:
                span.link(parent)
            parent = span
        self._live += len(spans)
        if event.tier == GPU:
            self._gpu_copies += len(spans)
        if group.waiting:
            for span in spans:
                self._adopt(group, span)
        return True

    def _remove(self, event: BlocksRemoved) -> None:
        group = self._groups.get(event.group)
        for handle in event.handles:
            span = group.spans.get(handle) if group is not None else None
            if group is None or span is None or event.tier not in span.copies:
                self.counts.unknown_removals += 1
                continue
            self.counts.removed += 1
            gone = span.copies[event.tier] if event.last_copy else 1
            if event.tier == GPU:
                self._gpu_copies -= gone
            if span.copies[event.tier] > gone:
                span.copies[event.tier] -= gone
            else:
                self._release(group, span, event.tier)

    def _clear(self, tier: str | None) -> None:
        for group in self._groups.values():
            if tier is None or all(span.copies.keys() <= {tier} for span in group.spans.values()):
                group.spans.clear()
                group.waiting.clear()
                if group.reblocker is not None:
                    group.reblocker.tree.clear()
                continue
            for span in [span for span in group.spans.values() if tier in span.copies]:
                self._release(group, span, tier)
        live = [span for group in self._groups.values() for span in group.spans.values() if span.copies]
        self._live = len(live)
        self._doubtful = sum(span.epoch < self._epoch for span in live)
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

    def _group(self, number: int, kind: str) -> _Group:
        group = self._groups.get(number)
        if group is None:
            reblocker = None
            if kind in FULL_ATTENTION_KINDS:
                reblocker = Reblocker(self._spec, RadixTree(self._spec, self._credited))
                self.forest.add(reblocker.tree)
            group = self._groups[number] = _Group(reblocker)
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

    def _span(self, group: _Group, handle: Handle) -> Span:
        span = self._found(group, handle)
        if span is None:
            span = group.spans[handle] = Span(handle, self._epoch)
            self._adopt(group, span)
        return span

    def _found(self, group: _Group, handle: Handle) -> Span | None:
        """The handle's span. One that is kept for those below it, and whose tokens are gone, is as good as unknown."""
        span = group.spans.get(handle)
        if span is None or span.copies or group.reblocker is None or not group.reblocker.lost(span):
            return span
        for kid in list(span.each_kid()):
            kid.parent, kid.wants = None, handle
            group.waiting.setdefault(handle, []).append(kid)
            group.reblocker.unresolve(kid)
        span.kids = None
        self._drop(group, span)
        return None

    def _adopt(self, group: _Group, span: Span) -> None:
        """Attach the spans that waited for this handle, and all below them if the path is known."""
        for kid in group.waiting.pop(span.handle, ()):
            kid.link(span)
            if span.root is not None and group.reblocker is not None:
                group.reblocker.resolve(kid, span.root)

    def _place_below(self, group: _Group, span: Span, parent: Span | None, wanted: Handle | None) -> None:
        """Link to the parent or wait for it; a span that names itself stays unresolved (Dynamo #6569)."""
        if parent is span:
            return
        if parent is not None:
            span.link(parent)
        elif wanted is not None and wanted != span.handle:
            span.wants = wanted
            group.waiting.setdefault(wanted, []).append(span)

    def _hold(self, group: _Group, span: Span, tier: str) -> None:
        """Count one more copy in `tier`."""
        if not span.copies:
            self._live += 1
            if span.epoch < self._epoch:
                self._doubtful += 1
        if span.epoch < self._epoch:
            span.epoch = self._epoch
            self._doubtful -= 1
        if tier == GPU:
            self._gpu_copies += 1
        copies = span.copies.get(tier, 0)
        span.copies[tier] = copies + 1
        if not copies and group.reblocker is not None:
            group.reblocker.hold(span, tier)

    def _release(self, group: _Group, span: Span, tier: str) -> None:
        """Drop the last copy in `tier`, and the span with it if no other tier has one."""
        if group.reblocker is not None:
            group.reblocker.release(span, tier)
        del span.copies[tier]
        if span.copies:
            return
        self._live -= 1
        if span.epoch < self._epoch:
            self._doubtful -= 1
        self._drop(group, span)

    def _drop(self, group: _Group, span: Span) -> None:
        """Forget a span that has no copy, and its unheld ancestors, while nothing is below them."""
        at: Span | None = span
        while at is not None and not at.copies and at.kids is None:
            group.spans.pop(at.handle, None)
            if at.wants is not None:
                self._stop_waiting(group, at)
            at = at.unlink()

    def _stop_waiting(self, group: _Group, span: Span) -> None:
        assert span.wants is not None
        waiting = group.waiting[span.wants]
        waiting.remove(span)
        if not waiting:
            del group.waiting[span.wants]

    # --- doubt ---------------------------------------------------------------------------------------------

    def _doubt(self) -> None:
        self._epoch += 1
        self._doubtful = self._live
        self.partial = True

    def _check_inflation(self) -> None:
        """More live copies than the engine has blocks: removals were lost, or a full report was taken for stores."""
        # A copy takes one of the engine's blocks, whatever its group; the smallest size never finds too many.
        block = min((group.block_size for group in self._groups.values() if group.block_size), default=0)
        if not self.capacity_tokens or self._gpu_copies * block <= self.capacity_tokens:
            self._inflated = False
        elif not self._inflated:
            self._inflated = True
            self.counts.inflated += 1
            self._doubt()

    def _check(self) -> None:
        """Assert every invariant, the trees' included. O(blocks)."""
        live = doubtful = 0
        for group in self._groups.values():
            for handle, span in group.spans.items():
                assert span.handle == handle
                assert span.copies or span.kids is not None, "an unheld span without kids is dropped"
                assert all(n > 0 for n in span.copies.values())
                assert all(kid.parent is span for kid in span.each_kid())
                assert span.parent is None or group.spans.get(span.parent.handle) is span.parent
                live += bool(span.copies)
                doubtful += bool(span.copies) and span.epoch < self._epoch
                if span.root is not None and span.parent is not None:
                    assert span.parent.root == span.root and span.parent.end == span.start
                if span.wants is not None:
                    assert span.wants not in group.spans and span in group.waiting[span.wants]
            for wanted, waiting in group.waiting.items():
                assert waiting and all(span.wants == wanted and group.spans[span.handle] is span for span in waiting)
        assert (live, doubtful) == (self._live, self._doubtful)
        self.forest._check()


def _fill(span: Span, event: BlocksStored, data: bytes, i: int) -> None:
    """Give a span the content of the event's block `i`."""
    size = event.block_size
    span.tokens = data[i * size * TOKEN_BYTES : (i + 1) * size * TOKEN_BYTES]
    span.start, span.end = 0, size
    if event.contents:
        span.contents = tuple(
            ContentSpan(item.content_id, item.start - i * size)
            for item in event.contents
            if i * size <= item.start < (i + 1) * size
        )
