"""What this node believes of every endpoint that it could use, ranked by what reaching it costs before any prefill.

Rules:
1. A decision looks at a handful of endpoints, never at all: the ranking is kept up to date as reports and bookings
   come, and a search asks it for the first few within a bitmask.
2. Masks say who is usable: suspended, refusing and unheard endpoints are out; overloaded ones are set apart.
3. Confidence comes from evidence: what the owner says of its own residency, hits that were predicted and missed, and
   how soon the owner evicts, against the way there. Age alone does not lower it (it cost up to 45 % in the rule's
   model); it bounds how long an endpoint is usable.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections import Counter
from itertools import islice
from math import exp, inf
from typing import NamedTuple

from .accuracy import Accuracy
from .copies import Copy, Peer
from .ledger import ArrivalRate, Ledger
from .load import (
    DEFAULT_PREFILL_TOKENS_PER_S,
    LoadReport,
    Pace,
    PushBackState,
    RateEstimate,
    Suspension,
    learnt,
)

BELIEF = 0.95
"""Share of a remote match that is counted: a digest lags its owner by a round or so."""

SURPRISE = 0.2
"""Weight of the newest surprise: a constant lie is known to a tenth after ten requests."""

SURPRISE_FADES_S = 30.0
"""Time in which a surprise is worth a third."""

LOOKED_DOWN = 64
"""Places of the ranking that a decision looks at for the first of many endpoints."""

SAMPLED = 32
"""Endpoints that stand for more which are not up there: the best of so many is within 3 % of the best rank."""

DEFAULT_RTT_S = 0.001
"""Network round trip to a peer until it is measured."""


class Candidate(NamedTuple):
    """One endpoint weighed for one prompt; times in seconds, `cost_s` is the expected time to first token.

    cost = rtt + wait + overhead + uncached tokens x seconds per token, where uncached counts only the trusted share
    (`confidence`) of the match, rounded down to what the engine can reuse. `s_per_token` are seconds of prefill a
    token, `queued` requests there that have no first token yet. `room_tokens` fit its cache without an eviction, and
    what is evicted there was idle for `eviction_age_s`; both are infinite while nothing tells that the cache is full.
    `predicted` says that part of the match is no more than expected: the endpoint was sent that prompt a moment ago.
    `arrivals_per_s` are requests that come to it.
    """

    endpoint: str
    local: bool
    prompt_tokens: int
    depth: int
    matched_tokens: int
    confidence: float
    rtt_s: float
    wait_s: float
    overhead_s: float
    prefill_s: float
    cost_s: float
    state: PushBackState
    age_s: float
    s_per_token: float = 1 / DEFAULT_PREFILL_TOKENS_PER_S
    queued: int = 0
    room_tokens: float = inf
    eviction_age_s: float = inf
    predicted: bool = False
    arrivals_per_s: float = 0.0

    @property
    def evicted_tokens(self) -> float:
        """Tokens that go from the endpoint's cache if it serves the prompt."""
        return max(0.0, self.prompt_tokens - self.matched_tokens - self.room_tokens)

    @property
    def delays_s(self) -> float:
        """Seconds, added up, by which the prompt's prefill delays requests that come to the endpoint meanwhile.

        Arrivals at rate r during a prefill of p seconds are r p, and wait for half of it: r p^2 / 2.
        """
        return self.arrivals_per_s * self.prefill_s * self.prefill_s / 2


class Send(NamedTuple):
    """Work that joins a peer's queue: a forward of this node's, and what the other origins can be expected to send."""

    arrives_at: float
    work_s: float


class Standing:
    """One endpoint's standing with this node. What a decision reads is kept ready; `refresh` brings it up to date."""

    __slots__ = (
        "_arrivals",
        "_bias_s",
        "_eviction_age_s",
        "_queue_at",
        "_queue_s",
        "_reported_at",
        "_reported_s",
        "_room_tokens",
        "_surprised_at",
        "_waiting",
        "accuracy",
        "bit",
        "confidence",
        "copy",
        "default",
        "default_rtt_s",
        "estimate",
        "hit_unit",
        "ledger",
        "local",
        "name",
        "overhead_s",
        "peer",
        "probed_tokens",
        "rank",
        "rate",
        "refusal",
        "refused_until",
        "reply",
        "rtt_s",
        "sends",
        "state",
        "suspension",
        "trust",
    )

    def __init__(self, copy: Copy, peer: Peer | None, bit: int, now: float) -> None:
        self.copy = copy
        self.name = copy.endpoint
        self.local = copy.mine
        """Whether the endpoint is this node's own."""
        self.peer = peer
        self.bit = bit
        self.ledger = Ledger()
        self._arrivals = ArrivalRate()
        self.estimate = RateEstimate()
        self.default_rtt_s = DEFAULT_RTT_S
        """What is taken for a round trip that was not measured yet."""
        self.default = Pace()
        """What is taken for a pace that the endpoint does not tell."""
        self.suspension = Suspension()
        self.refused_until = float("-inf")
        self.refusal = ""
        self.sends: dict[int, Send] = {}
        """By decision: forwards without a first token; those that the freshest report cannot know count."""
        self.reply: tuple[LoadReport, float] | None = None
        """The load report that came with a reply, and when: the freshest one until gossip brings a later word."""
        self.probed_tokens = 0
        """What a probe saw queued at a local engine; its advert counts this node's bookings as well."""
        self.trust = 1.0
        """Share of predicted hits that came true, lately."""
        self.accuracy = Accuracy()
        """All predictions that were compared, since the endpoint is known."""
        self._bias_s = 0.0
        self._surprised_at = now
        self._queue_s = 0.0
        self._queue_at: float | None = None
        self.rank: tuple[float, float, int] | None = None
        """Where it is in the fleet's ranking: cost before any prefill, a draw for ties, its bit."""
        self.refresh(now)

    def refresh(self, now: float) -> None:
        """Read the freshest report: rate, fixed time, queue, push-back, confidence, round trip. O(1)."""
        copy, advert = self.copy, self.copy.advert
        report, self._reported_at = advert.report, copy.load_at
        if self.reply is not None and self.reply[1] >= copy.load_at:
            report, self._reported_at = self.reply
        if self.local:
            report = learnt(report, self.estimate)
        self.rate = report.prefill_tokens_per_s or self.default.prefill_tokens_per_s
        self.overhead_s = report.overhead_s or self.default.overhead_s
        self._reported_s = (self.probed_tokens if self.local else report.queued_tokens) / self.rate
        self._queue_at = None
        self._waiting = report.waiting
        self._room_tokens, self._eviction_age_s = advert.room_tokens, advert.eviction_age_s
        self.hit_unit = advert.hit_unit
        measured = self.peer.rtt_s if self.peer is not None else None
        self.rtt_s = 0.0 if self.local else self.default_rtt_s if measured is None else measured
        self.confidence = advert.confidence * self.trust
        if not self.local:
            # What is evicted there while a forward is under way is no hit: of a cache that turns over in seconds,
            # little is left after a second's way.
            self.confidence *= BELIEF * exp(-self.rtt_s / 2 / max(self._eviction_age_s, 1e-9))
        self.state = advert.state
        if now < self.refused_until:
            self.state = PushBackState.REFUSING
        elif not self.local and now - copy.heard_at > advert.ttl_s:
            self.state = PushBackState.OPEN

    def wait_s(self, now: float) -> float:
        """Expected wait before prefill begins: the reported queue, drained since, and what was sent since."""
        ledger = self.ledger
        if self.local:
            # What a probe saw is of an unknown moment between two probes; it is not drained.
            return max(ledger.wait_s(now), self._reported_s) if len(ledger) else self._reported_s
        # The queue as it was reported, drained since; what was sent since joins it when it arrives.
        at = self._queue_at
        if at is None:
            at = self._recount()
        wait = self._queue_s
        if wait:
            since = now + self.rtt_s / 2 - at
            wait = 0.0 if since >= wait else wait - since if since > 0 else wait
        return wait + self.excess_s(now) if self._bias_s > 0 else wait

    def sent(self, ticket: int, send: Send) -> None:
        """Note a forward that joins the queue. O(1)."""
        at = self._queue_at
        if at is not None and ticket not in self.sends:
            self._join(send, at)
        else:
            self._queue_at = None
        self.sends[ticket] = send

    def unsent(self, ticket: int) -> None:
        """Take a forward out of the queue: its first token is here, or will never be. An unknown one is harmless."""
        if self.sends.pop(ticket, None) is not None:
            self._queue_at = None

    def _recount(self) -> float:
        """Let the queue be what was reported and what was sent since; return when it was so. O(forwards under way)."""
        self._queue_s, self._queue_at = self._reported_s, self._reported_at
        for send in self.sends.values():
            self._join(send, self._queue_at)
        return self._queue_at

    def _join(self, send: Send, at: float) -> None:
        if send.arrives_at > self._reported_at:
            self._queue_s = max(0.0, self._queue_s - max(0.0, send.arrives_at - at)) + send.work_s
            self._queue_at = max(at, send.arrives_at)

    def told_s(self, uncached_tokens: float) -> float:
        """Return the seconds to a first token there, by its last word alone: its queue, fixed time and rate."""
        return self._reported_s + self.overhead_s + uncached_tokens / self.rate

    def arrived(self, now: float) -> None:
        """Note a request that a local endpoint is to serve."""
        self._arrivals.arrived(now)

    def arrivals_per_s(self, now: float) -> float:
        """Return the requests a second that come to the endpoint, by its owner's word or by this node's count."""
        return self._arrivals.per_s(now) if self.local else self.copy.advert.arrivals_per_s

    def excess_s(self, now: float) -> float:
        """Return the seconds by which first tokens came later than expected, lately: what its reports do not tell.

        It fades, so that a peer that is avoided for it is tried again.
        """
        # Early ones weigh against late ones, but a peer is not taken for faster than it says.
        return self._bias_s * exp((self._surprised_at - now) / SURPRISE_FADES_S) if self._bias_s > 0 else 0.0

    def surprised(self, ttft_s: float, expected_s: float, now: float) -> None:
        """Learn from a first token when it came, and when it was expected of a peer by what it tells of itself."""
        self._bias_s = self.excess_s(now) or self._bias_s
        self._bias_s += SURPRISE * (ttft_s - expected_s - self._bias_s)
        self._surprised_at = now

    def weigh(self, depth: int, n_tokens: int, block_tokens: int, now: float, predicted: bool = False) -> Candidate:
        """Weigh the endpoint for a prompt of which it holds `depth` blocks. O(1)."""
        matched = 0
        if depth:
            # The last token is never reused: an engine computes at least one.
            matched = depth * block_tokens
            if matched >= n_tokens:
                matched = n_tokens - 1
            matched -= matched % (self.hit_unit or block_tokens)
        local, copy, rate, confidence = self.local, self.copy, self.rate, self.confidence
        rtt, wait, overhead = self.rtt_s, self.wait_s(now), self.overhead_s
        prefill = (n_tokens - confidence * matched) / rate
        queued, waiting = len(self.ledger.open), self._waiting
        return tuple.__new__(
            Candidate,
            (
                self.name,
                local,
                n_tokens,
                depth,
                matched,
                confidence,
                rtt,
                wait,
                overhead,
                prefill,
                rtt + wait + overhead + prefill,
                self.state,
                0.0 if local else now - copy.heard_at,
                1 / rate,
                queued if queued > waiting else waiting,
                self._room_tokens,
                self._eviction_age_s,
                predicted,
                self._arrivals.per_s(now) if local else copy.advert.arrivals_per_s,
            ),
        )


class Fleet:
    """All standings, ranked, with masks of who is usable."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._ranking: list[tuple[float, float, int]] = []
        self.standings: dict[str, Standing] = {}
        self.by_bit: dict[int, Standing] = {}
        self.usable = 0
        self.overloaded = 0
        self.local = 0
        self._owners: Counter[str] = Counter()
        self._typical_s = 0.0
        """Work of a typical forward to a peer that holds a prefix of it."""
        self._cold_s = 0.0
        """Work of a typical prompt of which its endpoint holds nothing."""

    def book(
        self, standing: Standing, ticket: int, work_s: float, tokens: int, hit: bool, now: float, until: float
    ) -> None:
        """Book a request at an endpoint. Every other origin is taken to forward as often, and what a hit takes."""
        standing.ledger.book(ticket, work_s, tokens, now, until)
        if not hit:
            self._cold_s = self._cold_s + 0.1 * (work_s - self._cold_s) if self._cold_s else work_s
        if standing.local:
            standing.arrived(now)
        else:
            if hit:
                self._typical_s = self._typical_s + 0.1 * (work_s - self._typical_s) if self._typical_s else work_s
            mirrored = max(0, len(self._owners) - 2) * min(work_s, self._typical_s)
            standing.sent(ticket, tuple.__new__(Send, (now + standing.rtt_s / 2, work_s + mirrored)))
        self.rank(standing, now)

    def release(self, standing: Standing, ticket: int, now: float) -> bool:
        """Take a booking back; unknown and repeated ones are harmless."""
        standing.unsent(ticket)
        return standing.ledger.release(ticket, now)

    def add(self, standing: Standing, now: float) -> None:
        """Take an endpoint in. O(log n) and a memmove."""
        if not standing.local:
            standing.default_rtt_s = self._typical_rtt_s()
        self.standings[standing.name] = standing
        self.by_bit[standing.bit] = standing
        self._owners[standing.name.partition("/")[0]] += 1
        if standing.local:
            self.local |= standing.bit
        self.refresh(standing, now)

    def drop(self, endpoint: str) -> None:
        """Take an endpoint out."""
        standing = self.standings.pop(endpoint)
        del self.by_bit[standing.bit]
        owner = endpoint.partition("/")[0]
        self._owners[owner] -= 1
        if not self._owners[owner]:
            del self._owners[owner]
        self._unrank(standing)
        clear = ~standing.bit
        self.usable &= clear
        self.overloaded &= clear
        self.local &= clear

    def refresh(self, standing: Standing, now: float) -> None:
        """Bring an endpoint's standing, masks and rank up to date. O(log n) and a memmove."""
        standing.refresh(now)
        bit, state = standing.bit, standing.state
        out = state is PushBackState.REFUSING or standing.suspension.blocks(now) or standing.copy.suspected
        self.usable = self.usable & ~bit if out else self.usable | bit
        overloaded = state is PushBackState.OVERLOADED
        self.overloaded = self.overloaded | bit if overloaded else self.overloaded & ~bit
        self.rank(standing, now)

    def rank(self, standing: Standing, now: float) -> None:
        """Rank an endpoint anew after a booking; ties fall at random. O(log n) and a memmove.

        The ranking picks among those that hold the same, and matters most for a prompt that nobody holds: what such a
        prompt delays counts (`Candidate.delays_s`).
        """
        self._unrank(standing)
        delays = standing.arrivals_per_s(now) * self._cold_s * self._cold_s / 2
        base = standing.rtt_s + standing.wait_s(now) + standing.overhead_s + delays
        standing.rank = (base, self._rng.random(), standing.bit)
        insort(self._ranking, standing.rank)

    def refresh_all(self, now: float) -> None:
        """Rank all endpoints anew. O(n log n): once a round."""
        default, rtt_s = self._typical_pace(), self._typical_rtt_s()
        for standing in self.standings.values():
            standing.default, standing.default_rtt_s = default, rtt_s
            self.refresh(standing, now)

    def _typical_rtt_s(self) -> float:
        """The round trip to a peer that was not measured yet: the upper quartile of those that were.

        A large fleet measures each pair seldom. With 1 ms for a stranger, 64 nodes a second apart forwarded to all of
        them and lost half of their mean against not routing.
        """
        measured = sorted(
            s.peer.rtt_s for s in self.standings.values() if s.peer is not None and s.peer.rtt_s is not None
        )
        return measured[3 * (len(measured) - 1) // 4] if measured else DEFAULT_RTT_S

    def _typical_pace(self) -> Pace:
        """The pace of an endpoint that does not tell its own: this node's, else the slowest known, else the default.

        A stranger that looks fast would draw the work that was meant for those who are known to be slower.
        """
        told = [s for s in self.standings.values() if s.copy.advert.report.prefill_tokens_per_s]
        if not told:
            return Pace()
        typical = min(told, key=lambda standing: (not standing.local, standing.rate))
        return Pace(typical.rate, typical.overhead_s)

    def cheapest(self, mask: int, n: int) -> list[Standing]:
        """Return the `n` endpoints of `mask` that are cheapest to reach, in order.

        O(n) as a rule: of many the first are found soon down the ranking. Holders of a hot prefix may all be at its
        end, since they are the busiest, so the look down it is bounded, and the cheapest of `SAMPLED` of them taken by
        chance will do: to look at all of 1,024 took 0.3 ms.
        """
        if not mask & (mask - 1):
            return [self.by_bit[mask]] if mask else []
        bits = mask.bit_count()
        found: list[Standing] = []
        if bits > n:
            for _, _, bit in islice(self._ranking, min(bits, LOOKED_DOWN)):
                if bit & mask:
                    found.append(self.by_bit[bit])
                    if len(found) == n:
                        return found
            if bits > SAMPLED + len(found):
                # Those that were found are the cheapest of all.
                for standing in found:
                    mask ^= standing.bit
                rest = sorted(self._sample(mask), key=_rank_of)
                return found + rest[: n - len(found)]
            found.clear()
        while mask:
            low = mask & -mask
            found.append(self.by_bit[low])
            mask ^= low
        found.sort(key=_rank_of)
        return found[:n]

    def _sample(self, mask: int) -> list[Standing]:
        """`SAMPLED` endpoints of a mask that has more: from a bit on that falls by chance. O(1)."""
        start = self._rng.randrange(mask.bit_length())
        some: list[Standing] = []
        for part in (mask >> start << start, mask & (1 << start) - 1):
            while part and len(some) < SAMPLED:
                low = part & -part
                some.append(self.by_bit[low])
                part ^= low
        return some

    def _unrank(self, standing: Standing) -> None:
        if standing.rank is not None:
            at = bisect_left(self._ranking, standing.rank)
            del self._ranking[at]
            standing.rank = None

    def _check(self) -> None:
        """Assert that ranking, masks and standings agree."""
        assert self._ranking == sorted(self._ranking)
        assert sorted(bit for *_, bit in self._ranking) == sorted(self.by_bit)
        assert {standing.bit: standing for standing in self.standings.values()} == self.by_bit
        every = sum(self.by_bit)
        assert self.usable & ~every == self.overloaded & ~every == self.local & ~every == 0


def _rank_of(standing: Standing) -> tuple[float, float, int]:
    assert standing.rank is not None
    return standing.rank
