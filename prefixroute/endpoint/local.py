"""An endpoint that this node owns: the mirror of its engine, what it publishes, and what it advertises.

| told by | method | changes |
|---|---|---|
| the engine's events | `portion`, `apply` | residency, published set |
| a probe | `probed` | report, capacity; a sleeping engine's residency |
| outcomes | `served` | hit unit, what is reused, history |
| decisions | `promise`, `publisher.over` | published set |

Rules:
1. The engine's events are the truth. Without any, after `SILENT_AFTER` served prompts or at the caller's word, what was
   routed stands in for them, and an event says so (Dynamo #11984). The first block that the engine tells of ends that,
   and so do answers that refute it (`history`): then nothing stands in, and an event says what the answers say.
   Prompts shorter than the engine's block leave no event, which says nothing of its stream.
2. What is advertised is the worse of what a probe saw and what this node has booked: a probe lags by its interval, and
   vLLM's gauges read 0 while prompts are in prefill (0.32.0).
3. A batch of more than `PORTION_BLOCKS` blocks (a replay, a report, a warm start) is applied in portions, so that it
   does not block the node. In order they come to what the batch does; between two of them only some of its blocks are
   applied. An event is cut between two of its blocks, and each part continues the one before. A report and an event
   with items stay whole, since only all of it says what is meant.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import gcd
from typing import NamedTuple

from ..events import (
    GPU,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EngineBatch,
    EngineEvent,
    Journal,
    PushBackChanged,
    ResidencyChanged,
    StreamGap,
    StreamRestarted,
    TokensDiffer,
    UnknownEvent,
)
from ..keys.chain import TokenChain, reusable_depth
from ..keys.domain import Domain
from ..keys.keyset import Delta
from ..load import Advert, LoadReport, PushBackSettings, PushBackState
from ..replication.copies import Copy
from ..replication.writer_set import OwnedSet
from ..residency.mirror import Residency
from ..routing.standing import LocalStanding
from .history import DEFAULT_CAPACITY_BLOCKS, RoutingHistory
from .intake import taken_in
from .publisher import Promise, Publisher
from .token_check import TokenCheck

SILENT_AFTER = 16
"""Prompts of two blocks or more served without one engine event, after which the stream is taken for dead."""

PORTION_BLOCKS = 1024
"""Blocks that are applied at once. They take 2 ms, and are 16,384 tokens: as many as engines compute in a step."""


class OwnSettings(NamedTuple):
    """What all of a node's own endpoints share: their domain, and how they push back and publish.

    `ttl_s` is how long peers honour push-back that is not renewed, in seconds; `digest_bytes` what a snapshot may take.
    """

    domain: Domain
    push_back: PushBackSettings
    ttl_s: float
    digest_bytes: int


class LocalEndpoint:
    """The owner's side of one endpoint. Methods return the wire keys that came and went.

    `bit` is the endpoint's in the index, and `held(key)` whether it holds a wire key there. What there is to tell goes
    to the `journal`.
    """

    def __init__(
        self,
        copy: Copy,
        bit: int,
        now: float,
        own: OwnSettings,
        credited: Sequence[str],
        held: Callable[[int], bool],
        journal: Journal,
    ) -> None:
        assert isinstance(copy.keys, OwnedSet)
        self.copy = copy
        self.residency = Residency(own.domain, credited)
        self.publisher = Publisher(copy.keys, self.residency, own.digest_bytes, held)
        self.push_back = PushBack(own.push_back)
        self.backlog: deque[Iterator[EngineBatch]] = deque()
        """What the engine did and is not applied yet, by batch, in portions."""
        self.report = LoadReport()
        """What a probe told last."""
        self.tokens = TokenCheck()
        self.standing = LocalStanding(copy, bit, now, lambda: self.report.queued_tokens)
        self.history: RoutingHistory | None = None
        self.life = (0, 0)
        """What a handle of this life of the endpoint has (`table`)."""
        """What stands in for events; None while they come, and while nothing does."""
        self._guess: RoutingHistory | None = None
        """The same while it is only held against answers: before it stands in, and since it was refuted."""
        self.rank: int | None = None
        """The data-parallel rank whose events come, once one came."""
        self.unit = 0
        """Greatest common divisor of the cached tokens that the engine reported: its hit unit, learnt."""
        self._ttl_s = own.ttl_s
        self._block_tokens = own.domain.block_size
        self._spoke = False
        """Whether the engine told of a block, and its events are gone by."""
        self._served_silently = self._served_short = 0
        self._faults = 0
        """Events that could not be used, so far."""
        self.unused = False
        """Whether it was told that the engine reuses nothing."""
        self._journal = journal

    @property
    def hit_unit(self) -> int:
        """Tokens that the engine reuses as a whole, by its events, its answers or its word; 0 if unknown."""
        told = self.residency.hit_unit or self.unit or self.report.block_tokens
        return max(told, self.standing.reuse.unit)

    @property
    def state(self) -> str:
        """Where the blocks are known from: ``exact`` or ``partial`` events, or none (``silent``)."""
        return "silent" if self.history is not None else "partial" if self.residency.partial else "exact"

    def apply(self, batch: EngineBatch, now: float) -> Delta:
        """Apply what the engine did."""
        speaks = self._spoke or any(isinstance(event, (BlocksStored, BlocksRemoved)) for event in batch.events)
        if self.history is None:
            self._spoke = speaks
            return self._apply(batch, now)
        if speaks:
            self._spoke = True
            # The engine speaks after all: what was guessed gives way to what it says.
            self.history = self._guess = None
            return self._apply(EngineBatch((StreamRestarted(), *batch.events), batch.rank, batch.ts), now)
        # A clear empties what was guessed too. A gap says nothing of it: it came from no stream.
        for event in batch.events:
            if isinstance(event, StreamRestarted) or (isinstance(event, BlocksCleared) and event.tier in (None, GPU)):
                self.history.clear()
        kept = tuple(event for event in batch.events if not isinstance(event, StreamGap))
        return self._apply(EngineBatch(kept, batch.rank, batch.ts), now)

    def sound(self, batch: EngineBatch) -> EngineBatch:
        """Return what can be applied of a batch; the rest is counted, and told the first time. Never raises."""
        sound, faults = taken_in(batch)
        for fault in faults:
            self._unusable(fault)
        return sound

    def _unusable(self, fault: str) -> None:
        self._journal.count("engine_events", "unusable")
        self._faults += 1
        if self._faults == 1:
            self._tell("faulty", f"an event of the adapter cannot be used: {fault}")

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

    def probed(self, report: LoadReport, now: float) -> Delta:
        """Take a probe's report. An engine that sleeps holds nothing (vLLM, levels 1, 2)."""
        if self.report.refusing and not report.refusing:
            self.push_back.accept()
            self.standing.refused_until = float("-inf")
        self.report = report
        self.residency.capacity_tokens = report.capacity_tokens
        if self.history is not None and report.capacity_tokens:
            self.history.capacity_blocks = max(1, report.capacity_tokens // self._block_tokens)
        if report.asleep and self.residency.live_blocks:
            # Its own word for it comes with its next output, after it has woken up. Asked each time, not once: what it
            # told before may come after the first probe, from a replay.
            return self.apply(EngineBatch((BlocksCleared(GPU),)), now)
        return Delta(set(), set())

    def go_by_history(self, reason: str, now: float) -> Delta:
        """Let what is routed stand in for events from now on."""
        if self.history is not None or (self._guess is not None and self._guess.refuted):
            return Delta(set(), set())
        self._tell("silent", reason)
        # What was known is of a life in which there were events.
        known = self.residency.counts.events and self.residency.live_blocks
        changes = self._apply(EngineBatch((StreamRestarted(),) if known else ()), now)
        self.history, self._guess = self._new_guess(), None
        self._spoke = self.standing.exact = False
        return changes

    def _new_guess(self) -> RoutingHistory:
        return RoutingHistory(self.report.capacity_tokens // self._block_tokens or DEFAULT_CAPACITY_BLOCKS)

    def served(self, chain: TokenChain, cached_tokens: int | None, now: float) -> Delta:
        """Learn from a prompt that the engine served."""
        self.residency.end_request(chain)
        if cached_tokens is not None:
            self.unit = gcd(self.unit, cached_tokens)
            self._tell_reuse()
        if self.standing.exact:
            self._check_tokens(chain, cached_tokens)
        if self.history is None and (self._spoke or chain.depth < 2):
            return Delta(set(), set())
        if self.history is None and chain.n_tokens <= self.report.block_tokens:
            return self._short(chain)
        guess = self.history or self._guess or self._new_guess()
        if cached_tokens is not None:
            guess.compare(chain, cached_tokens, self.hit_unit)
        if self.history is None:
            self._guess = guess
            self._served_silently += 1
            if self._served_silently < SILENT_AFTER or guess.refuted:
                if self._served_silently >= SILENT_AFTER:
                    self._tell_unused(guess.longest)
                guess.served(chain)
                return Delta(set(), set())
            reason = "answers show hits again: going by history"
            if not self.unused:
                reason = f"{SILENT_AFTER} prompts served and no engine event: is the event stream on? Going by history"
            self.unused = False
            self.go_by_history(reason, now)
        elif guess.refuted:
            # Nothing of it is left, and nobody is to be told that there is until an answer shows a hit.
            self.history, self._guess, self._served_silently = None, guess, SILENT_AFTER
            self._tell_unused(guess.longest)
            return self._apply(EngineBatch((BlocksCleared(None),)), now)
        assert self.history is not None
        return self._apply(self.history.served(chain), now)

    def _check_tokens(self, chain: TokenChain, cached_tokens: int | None) -> None:
        differs, new = self.tokens.served(chain, cached_tokens, self.hit_unit, self.residency)
        if differs:
            self._journal.count("prompts_stored_otherwise")
        if new and self.tokens.found is not None:
            self._journal.tell(TokensDiffer(self.copy.endpoint, *self.tokens.found))

    def _short(self, chain: TokenChain) -> Delta:
        """A prompt that is shorter than the engine's block: there is nothing to tell of it, and nothing to reuse."""
        self._served_short += 1
        if self._served_short == SILENT_AFTER:
            self._tell_unused(chain.n_tokens)
        return Delta(set(), set())

    def _tell_reuse(self) -> None:
        """Tell once that answers show no reuse of what is held, and once that they do again."""
        floor = self.standing.reuse.floor
        if floor:
            self._tell_unused(floor)
        elif self.unused and self._spoke:
            self.unused = False
            self._tell("reused", "answers show hits again")

    def _tell_unused(self, tokens: int) -> None:
        if self.unused:
            return
        self.unused = True
        unit, held = self.hit_unit, f"up to {tokens} tokens that it was sent before"
        why = "its hit unit is longer, or it keeps no prefixes"
        if unit > tokens:
            why = f"its hit unit is {unit} tokens"
        self._tell("unused", f"the engine reuses nothing of {held}: {why}")

    def promise(self, ticket: int, chain: TokenChain, depth: int) -> bool:
        """Announce the blocks beyond `depth` that a prompt will leave; return whether there are any.

        An engine keeps whole units of what it computes.
        """
        whole = reusable_depth(chain.n_tokens, self.hit_unit, self._block_tokens)
        if whole * self._block_tokens <= self.standing.floor or (self._guess is not None and self._guess.refuted):
            return False
        return self.publisher.promises.begin(ticket, Promise(chain, depth, whole))

    def advertise(self, now: float) -> bool:
        """Bring the advert up to date; return whether the push-back is another now."""
        standing = self.standing
        report = standing.estimate.corrected(self.report)
        if now < standing.refused_until:
            self.push_back.refuse(standing.refusal, standing.refused_until)
        rate = report.prefill_tokens_per_s or standing.rate
        queued = max(report.queued_tokens, round(standing.ledger.wait_s(now) * rate))
        changed = self.push_back.update(queued / rate, report, now)
        state, reason = self.push_back.state, self.push_back.reason
        report = replace(report, queued_tokens=queued, refusing=state is PushBackState.REFUSING, reason=reason)
        unit, confidence = self.hit_unit, self.residency.confidence * standing.reuse.share(now)
        ttl_s = self._ttl_s if state is not PushBackState.OPEN else 0.0
        held = self.residency.canonical_blocks * self._block_tokens
        age_s, arrivals = self.residency.eviction_age_s, standing.arrivals_per_s(now)
        home, demand = standing.entry.told_home, standing.entry.demand(now)
        self.copy.advert = Advert(report, state, ttl_s, unit, confidence, held, age_s, arrivals, home, demand)
        if changed:
            self._journal.tell(PushBackChanged(self.copy.endpoint, state.name.lower(), reason))
        return changed

    def _apply(self, batch: EngineBatch, now: float) -> Delta:
        residency = self.residency
        partial, restarts, inflated = residency.partial, residency.counts.restarts, residency.counts.inflated
        unknown = residency.counts.unknown_events
        residency.apply(batch, now)
        if residency.counts.unknown_events != unknown:
            self._met_unknown(batch, residency.counts.unknown_events - unknown, now)
        if residency.counts.restarts != restarts:
            self._tell("restarted", "the engine began a new life")
            self.unit, self.unused = 0, False
            self.standing.reuse.forget()
            self.tokens.forget()
        if residency.counts.inflated != inflated:
            self._tell("inflated", "more blocks are live than it has: removals were lost")
        if residency.partial != partial:
            self._tell(*(("partial", "events were lost") if residency.partial else ("exact", "cleared")))
        self.standing.exact = self._spoke and not residency.partial
        return self.publisher.note(*residency.take_changes())

    def _met_unknown(self, batch: EngineBatch, n: int, now: float) -> None:
        """Count events that were of no use; a store whose tokens are no token ids is as if it had been lost."""
        events = [event for event in batch.events if isinstance(event, UnknownEvent)]
        self._journal.count("engine_events", "unknown", n)
        if n > len(events):
            self._unusable("the tokens of a store are no token ids below 2**32")
            self.residency.apply(EngineBatch((StreamGap(),)), now)

    def _tell(self, state: str, reason: str) -> None:
        self._journal.tell(ResidencyChanged(self.copy.endpoint, state, reason))


class PushBack:
    """One endpoint's push-back (`load`, rule 2). `reason` says in words why the state is not open.

    It is overloaded from `enter_s` of queued work down to `leave_s`. It refuses while the engine says so, and until
    `ttl_s` after the engine turned a request away, unless the engine says meanwhile that it refuses no more.
    """

    def __init__(self, settings: PushBackSettings) -> None:
        self._settings = settings
        self._refused_until = float("-inf")
        self.state = PushBackState.OPEN
        self.reason = ""

    def update(self, work_s: float, report: LoadReport, now: float) -> bool:
        """Take the endpoint's queue work in seconds and its report; return whether the state changed."""
        before = self.state
        if report.refusing:
            self.reason = report.reason or "the engine refuses"
        if report.refusing or now < self._refused_until:
            self.state = PushBackState.REFUSING
        elif work_s >= self._settings.enter_s:
            self.state, self.reason = PushBackState.OVERLOADED, f"queue of {work_s:.1f} s"
        elif work_s <= self._settings.leave_s or before is PushBackState.REFUSING:
            self.state, self.reason = PushBackState.OPEN, ""
        return self.state is not before

    def accept(self) -> None:
        """Note that the engine, which refused, says that it does no more."""
        self._refused_until = float("-inf")

    def refuse(self, reason: str, until: float) -> None:
        """Note that the engine turned a request away: it refuses until then."""
        self._refused_until = max(until, self._refused_until)
        self.reason = reason or "the engine refused a request"


# --- batches in portions -------------------------------------------------------------------------------------


def is_small(batch: EngineBatch, most: int = PORTION_BLOCKS) -> bool:
    """Whether a batch of up to `most` blocks is one portion. O(events)."""
    return len(batch.events) <= most and sum(map(_blocks, batch.events)) <= most


def portions(batch: EngineBatch, most: int = PORTION_BLOCKS) -> Iterator[EngineBatch]:
    """Yield a batch in portions of up to `most` blocks each, or of one event that cannot be cut."""
    events: list[EngineEvent] = []
    room = most
    for event in batch.events:
        for part in _parts(event, most):
            n = _blocks(part)
            if n > room and events:
                yield EngineBatch(tuple(events), batch.rank, batch.ts)
                events, room = [], most
            events.append(part)
            room -= n
    yield EngineBatch(tuple(events), batch.rank, batch.ts)


def _blocks(event: EngineEvent) -> int:
    """The size of an event in blocks; one without blocks counts as one."""
    return max(1, len(event.handles)) if isinstance(event, (BlocksStored, BlocksRemoved)) else 1


def _parts(event: EngineEvent, most: int) -> Iterator[EngineEvent]:
    """An event as parts of up to `most` blocks, or whole if it cannot be cut."""
    n = _blocks(event)
    if n > most and isinstance(event, BlocksRemoved):
        for at in range(0, n, most):
            yield replace(event, handles=event.handles[at : at + most], told=0 if at else event.told)
    elif n > most and isinstance(event, BlocksStored) and _cuttable(event):
        for at in range(0, n, most):
            yield event.part(at, at + most)
    else:
        yield event


def _cuttable(event: BlocksStored) -> bool:
    whole = 0 < event.block_size * len(event.handles) == len(event.tokens)
    return whole and not event.confirmed and not event.contents
