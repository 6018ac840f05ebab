"""Stores: how the blocks that an engine tells of enter their group.

Rules:
1. A block whose parent is not known is parked and attached when the parent comes (llm-d-kv-cache #372).
2. Handles map to tokens only when len(tokens) == len(handles) * block_size. Otherwise the blocks are counted, never
   matched (vLLM #44451). An event without tokens gives a known handle a copy in another tier.
3. A report is blocks that an engine tells of again because it was asked to, not because it stored them. Blocks that are
   held already are only confirmed; the others are plain stores. So a report adds no copies, whatever it repeats (vLLM's
   full mode, #45261).
4. What an event says of its group and sizes counts with its blocks: in a full-attention group while they are held on a
   known path (`reblock`), in another one if they can be so. Blocks of which nothing else is known teach nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby

from ..errors import UsageError
from ..events import GPU, BlocksStored, Handle, items_within
from ..keys.chain import TOKEN_BYTES, pack_tokens
from ..keys.domain import Domain
from .group import Group
from .hybrid_hits import HybridHits
from .live import LiveBlocks, StreamCounts
from .runs import Run


class Stores:
    """Puts stores and reports into groups. `group_of(number, kind)` gives the group, and makes it if it is new.

    `is_known(handle)` says whether any group has a block.
    """

    def __init__(
        self,
        domain: Domain,
        live: LiveBlocks,
        counts: StreamCounts,
        group_of: Callable[[int, str], Group],
        is_known: Callable[[Handle], bool],
    ) -> None:
        self._domain = domain
        self._live = live
        self._counts = counts
        self._group_of = group_of
        self._is_known = is_known
        self.hits: HybridHits | None = None
        """Of a hybrid model: is told which blocks full-attention groups store."""

    def store(self, event: BlocksStored) -> None:
        """Put an event's blocks into its group, each with one copy more. Amortised O(its blocks)."""
        group = self._group_of(event.group, event.group_kind)
        handles = list(event.handles)
        self._counts.stored += len(handles)
        data = self._content(event)
        if group.reblocker is None and self._fits(event):
            group.counts = True
            # A partial block is smaller, and what another tier keeps as one may be several blocks.
            size = event.block_size if event.tier == GPU else 0
            group.told_size = max(group.block_size, size) if group.runs or not size else size
            if group.window is not None:
                group.window.size(event.window, group.told_size, group.runs)
                group.window.tell(event.parent, event.handles, len(event.tokens))
        elif group.reblocker is not None:
            group.counts = group.counts or not handles
            if self.hits is not None:
                self.hits.tell(handles)
        if data is not None and group.reblocker is not None:
            run, root = Run(handles, self._live.epoch), self._root(group, event)
            if root is not None and group.enter(run):
                self._store_new(group, event, run, data, root)
                return
        group.forget_lost(handles)
        self._store_pieces(group, event, handles, data)

    def report(self, event: BlocksStored) -> None:
        """Confirm the held blocks of a report and store the others. Amortised O(its blocks).

        Reports of window and state groups are left out: vLLM's name blocks that the group has skipped (0.32.0).
        """
        group = self._group_of(event.group, event.group_kind)
        if group.reblocker is None:
            group.counts = group.counts or self._fits(event)
            return
        if self._content(event) is None:
            return

        def held(handle: Handle) -> bool:
            group.forget_lost([handle])
            run = group.runs.get(handle)
            return run is not None and event.tier in run.copies

        for known, part in parts_of(event, held):
            if not known:
                self._counts.confirmed += len(part.handles)
                self.store(part)
                continue
            for i, j, run in group.stretches(list(part.handles)):
                assert run is not None, "a held handle has a run"
                if self._live.confirm(run):
                    self._counts.confirmed += j - i
                group.heal(run)

    def _content(self, event: BlocksStored) -> bytes | None:
        """The event's packed tokens, or None when its blocks cannot be mapped to tokens (rule 2)."""
        if not event.mappable or event.block_size <= 0 or not event.handles:
            return None
        if len(event.tokens) != len(event.handles) * event.block_size:
            return None
        try:
            return pack_tokens(event.tokens)
        except UsageError:
            self._counts.unknown_events += 1
            return None

    def _fits(self, event: BlocksStored) -> bool:
        """Whether a store of a group that keeps less than every block can be so: its size, its tokens, its parent."""
        size, tokens = event.block_size, len(event.tokens)
        whole = size > 0 and not tokens % size and (not tokens or tokens >= size * len(event.handles))
        return whole and (not event.handles or event.parent is None or self._is_known(event.parent))

    def _root(self, group: Group, event: BlocksStored) -> int | None:
        """Key of the root above an event's blocks, None while the path is not known."""
        if event.parent is None:
            return self._domain.root_key(event.namespace)
        group.forget_lost([event.parent])
        parent = group.runs.get(event.parent)
        return parent.root if parent is not None else None

    def _store_new(self, group: Group, event: BlocksStored, run: Run, data: bytes, root: int) -> None:
        """The usual case: the path is known, and `run` has entered its group, so that every handle is new."""
        assert group.reblocker is not None
        handles = run.handles
        run.fill(event.block_size, data, items_within(event.contents, 0, len(event.tokens)))
        parent = group.ending(event.parent) if event.parent is not None else None
        if parent is not None:
            run.link(parent)
        self._live.hold(group, run, event.tier)
        group.reblocker.resolve(run, root)
        if parent is not None and run.continues(parent):
            group.join(parent, run)
        group.adopt(handles)

    def _store_pieces(self, group: Group, event: BlocksStored, handles: list[Handle], data: bytes | None) -> None:
        """Some handles are known or named twice, or the path or the tokens are not known: go piece by piece."""
        root = self._root(group, event) if data is not None and group.reblocker is not None else None
        learnt: list[Handle] = []
        for i, j, known in group.stretches(handles):
            run = known or Run(handles[i:j], self._live.epoch)
            if known is None:
                group.runs.update(dict.fromkeys(run.handles, run))
            if data is None and not run.known:
                self._counts.hash_only += j - i
            elif data is not None and group.reblocker is not None and not run.known:
                first, last = i * event.block_size, j * event.block_size
                items = items_within(event.contents, first, last)
                run.fill(event.block_size, data[first * TOKEN_BYTES : last * TOKEN_BYTES], items)
                learnt.append(handles[i])
                if root is None:
                    self._counts.orphans += j - i
                wanted = handles[i - 1] if i else event.parent
                if wanted is not None:
                    group.place_below(run, wanted)
            self._live.hold(group, run, event.tier)
            if known is None:
                group.adopt(handles[i:j])
            else:
                group.heal(run)
        for handle in learnt:
            run = group.runs[handle]
            above = run.parent.root if run.parent is not None else root
            if above is not None and run.wants is None and group.reblocker is not None:
                group.reblocker.resolve(run, above)


def parts_of(report: BlocksStored, held: Callable[[Handle], bool]) -> Iterator[tuple[bool, BlocksStored]]:
    """Yield a report as stores of blocks that are all `held`, or all not, in order, and which. O(its blocks).

    `held` is asked once for each handle, before the first store is yielded.
    """
    start = 0
    for known, blocks in groupby([held(handle) for handle in report.handles]):
        end = start + len(list(blocks))
        yield known, replace(report.part(start, end), confirmed=False)
        start = end
