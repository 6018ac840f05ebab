"""An endpoint that this node owns: the mirror of its engine, what it publishes, and what it advertises.

| told by | method | changes |
|---|---|---|
| the engine's events | `portion`, `apply` | residency, published set |
| a probe | `probed` | report, capacity; a sleeping engine's residency |
| outcomes | `served` | hit unit, history |
| decisions | `promise`, `publisher.over` | published set |

Rules:
1. The engine's events are the truth. Without any, after `SILENT_AFTER` served prompts or at the caller's word, what was
   routed stands in for them, and an event says so (Dynamo #11984). The first block that the engine tells of ends that.
2. What is advertised is the worse of what a probe saw and what this node has booked: a probe lags by its interval, and
   vLLM's gauges read 0 while prompts are in prefill (0.32.0).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import gcd

from ..events import (
    GPU,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EngineBatch,
    NodeEvent,
    PushBackChanged,
    ResidencyChanged,
    StreamGap,
    StreamRestarted,
)
from ..keys.chain import TokenChain, reusable_depth
from ..keys.domain import Domain
from ..keys.keyset import Delta
from ..load import Advert, LoadReport, PushBackSettings, PushBackState
from ..replication.copies import Copy
from ..replication.writer_set import OwnedSet
from ..residency.mirror import Residency
from ..routing.standing import LocalStanding
from .history import RoutingHistory
from .portions import is_small, portions
from .publisher import Promise, Publisher
from .push_back import PushBack

SILENT_AFTER = 16
"""Prompts of two blocks or more served without one engine event, after which the stream is taken for dead."""


class LocalEndpoint:
    """The owner's side of one endpoint. Methods return the node events to tell.

    `bit` is the endpoint's in the index, and `held(key)` whether it holds a wire key there.
    """

    __slots__ = (
        "_served_silently",
        "backlog",
        "copy",
        "domain",
        "history",
        "publisher",
        "push_back",
        "rank",
        "report",
        "residency",
        "standing",
        "unit",
    )

    def __init__(
        self,
        copy: Copy,
        bit: int,
        now: float,
        domain: Domain,
        push_back: PushBackSettings,
        credited: Sequence[str],
        digest_bytes: int,
        held: Callable[[int], bool],
    ) -> None:
        assert isinstance(copy.keys, OwnedSet)
        self.copy = copy
        self.domain = domain
        self.residency = Residency(domain, credited)
        self.publisher = Publisher(copy.keys, self.residency, digest_bytes, held)
        self.push_back = PushBack(push_back)
        self.backlog: deque[Iterator[EngineBatch]] = deque()
        """What the engine did and is not applied yet, by batch, in portions."""
        self.report = LoadReport()
        """What a probe told last."""
        self.standing = LocalStanding(copy, bit, now, self._probed_tokens)
        self.history: RoutingHistory | None = None
        self.rank: int | None = None
        """The data-parallel rank whose events come, once one came."""
        self.unit = 0
        """Greatest common divisor of the cached tokens that the engine reported: its hit unit, learnt."""
        self._served_silently = 0

    @property
    def state(self) -> str:
        """Where the blocks are known from: ``exact`` or ``partial`` events, or none (``silent``)."""
        return "silent" if self.history is not None else "partial" if self.residency.partial else "exact"

    def apply(self, batch: EngineBatch, now: float) -> tuple[Delta, list[NodeEvent]]:
        """Apply what the engine did; return the wire keys that came and went, and what there is to tell."""
        if self.history is None:
            return self._apply(batch, now)
        if any(isinstance(event, (BlocksStored, BlocksRemoved)) for event in batch.events):
            # The engine speaks after all: what was guessed gives way to what it says.
            self.history = None
            return self._apply(EngineBatch((StreamRestarted(), *batch.events), batch.rank, batch.ts), now)
        # A clear empties what was guessed too. A gap says nothing of it: it came from no stream.
        for event in batch.events:
            if isinstance(event, StreamRestarted) or (isinstance(event, BlocksCleared) and event.tier in (None, GPU)):
                self.history.clear()
        kept = tuple(event for event in batch.events if not isinstance(event, StreamGap))
        return self._apply(EngineBatch(kept, batch.rank, batch.ts), now)

    def admits(self, batch: EngineBatch) -> bool:
        """Whether a batch is of the endpoint's rank. The first batch that tells one says which that is."""
        # Only the engine's own events tell a rank: a follower may mark its stream before it knows one.
        if all(isinstance(event, (StreamGap, StreamRestarted)) for event in batch.events):
            return True
        if self.rank is None:
            self.rank = batch.rank
        return self.rank == batch.rank

    def portion(self, batch: EngineBatch | None) -> EngineBatch | None:
        """Return what is to be applied next, `batch` being the newest that came; None when nothing is left."""
        if batch is not None:
            if not self.backlog and is_small(batch):
                return batch
            self.backlog.append(portions(batch))
        while self.backlog:
            portion = next(self.backlog[0], None)
            if portion is not None:
                return portion
            self.backlog.popleft()
        return None

    def probed(self, report: LoadReport, now: float) -> tuple[Delta, list[NodeEvent]]:
        """Take a probe's report; return what `apply` would. An engine that sleeps holds nothing (vLLM, levels 1, 2)."""
        self.report = report
        self.residency.capacity_tokens = report.capacity_tokens
        if self.history is not None and report.capacity_tokens:
            self.history.capacity_blocks = max(1, report.capacity_tokens // self.domain.block_size)
        if report.asleep and self.residency.live_blocks:
            # Its own word for it comes with its next output, after it has woken up. Asked each time, not once: what it
            # told before may come after the first probe, from a replay.
            return self.apply(EngineBatch((BlocksCleared(GPU),)), now)
        return Delta(set(), set()), []

    def go_by_history(self, reason: str, now: float) -> tuple[Delta, list[NodeEvent]]:
        """Let what is routed stand in for events from now on; return what `apply` would."""
        if self.history is not None:
            return Delta(set(), set()), []
        told: list[NodeEvent] = [ResidencyChanged(self.copy.endpoint, "silent", reason)]
        # What was known is of a life in which there were events.
        changes, more = self._apply(EngineBatch((StreamRestarted(),) if self.residency.counts.events else ()), now)
        capacity = self.report.capacity_tokens // self.domain.block_size
        self.history = RoutingHistory(capacity) if capacity else RoutingHistory()
        return changes, told + more

    def served(self, chain: TokenChain, cached_tokens: int | None, now: float) -> tuple[Delta, list[NodeEvent]]:
        """Learn from a prompt that the engine served; return what `apply` would."""
        self.residency.end_request(chain)
        if cached_tokens is not None:
            self.unit = gcd(self.unit, cached_tokens)
        told: list[NodeEvent] = []
        if self.history is None:
            if self.residency.counts.stored or chain.depth < 2:
                return Delta(set(), set()), told
            self._served_silently += 1
            if self._served_silently < SILENT_AFTER:
                return Delta(set(), set()), told
            reason = f"{SILENT_AFTER} prompts served and no engine event: is the event stream on? Going by history"
            told = self.go_by_history(reason, now)[1]
        assert self.history is not None
        changes, more = self._apply(self.history.served(chain), now)
        return changes, told + more

    def promise(self, ticket: int, chain: TokenChain, depth: int) -> bool:
        """Announce the blocks beyond `depth` that a prompt will leave; return whether there are any.

        An engine keeps whole units of what it computes.
        """
        whole = reusable_depth(chain.n_tokens, self.residency.hit_unit or self.unit, self.domain.block_size)
        if whole <= depth:
            return False
        self.publisher.promise(ticket, Promise(chain, depth, whole))
        return True

    def advertise(self, ttl_s: float, now: float) -> list[NodeEvent]:
        """Bring the advert up to date; `ttl_s` is how long peers honour push-back that is not renewed."""
        standing = self.standing
        report = standing.estimate.corrected(self.report)
        if now < standing.refused_until:
            self.push_back.refuse(standing.refusal, standing.refused_until)
        rate = report.prefill_tokens_per_s or standing.rate
        queued = max(report.queued_tokens, round(standing.ledger.wait_s(now) * rate))
        changed = self.push_back.update(queued / rate, report, now)
        state, reason = self.push_back.state, self.push_back.reason
        report = replace(report, queued_tokens=queued, refusing=state is PushBackState.REFUSING, reason=reason)
        unit, confidence = self.residency.hit_unit or self.unit, self.residency.confidence
        ttl_s = ttl_s if state is not PushBackState.OPEN else 0.0
        held = self.residency.canonical_blocks * self.domain.block_size
        age_s, arrivals = self.residency.eviction_age_s, standing.arrivals_per_s(now)
        self.copy.advert = Advert(report, state, ttl_s, unit, confidence, held, age_s, arrivals)
        return [PushBackChanged(self.copy.endpoint, state.name.lower(), reason)] if changed else []

    def _probed_tokens(self) -> int:
        return self.report.queued_tokens

    def _apply(self, batch: EngineBatch, now: float) -> tuple[Delta, list[NodeEvent]]:
        residency, name = self.residency, self.copy.endpoint
        partial, restarts, inflated = residency.partial, residency.counts.restarts, residency.counts.inflated
        residency.apply(batch, now)
        told: list[NodeEvent] = []
        if residency.counts.restarts != restarts:
            told.append(ResidencyChanged(name, "restarted", "the engine began a new life"))
        if residency.counts.inflated != inflated:
            told.append(ResidencyChanged(name, "inflated", "more blocks are live than it has: removals were lost"))
        if residency.partial != partial:
            state, reason = ("partial", "events were lost") if residency.partial else ("exact", "cleared")
            told.append(ResidencyChanged(name, state, reason))
        return self.publisher.note(*residency.take_changes()), told
