"""What this node believes of every endpoint that it could use, ranked by what reaching it costs before any prefill.

Rules:
1. A decision looks at a handful of endpoints, never at all: the ranking is kept up to date as reports and bookings
   come, and a search asks it for the first few within a bitmask.
2. Masks say who is usable: suspended, refusing and unheard endpoints are out; overloaded ones are set apart.
3. Confidence comes from evidence: what the owner says of its own residency, and hits that were predicted and missed.
   Age alone does not lower it (it cost up to 45 % in the rule's model); it bounds how long an endpoint is usable.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from typing import NamedTuple

from .gossip import Copy, Peer
from .load import Ledger, PushBackState, RateEstimate, Suspension, filled

BELIEF = 0.95
"""Share of a remote match that is counted: a digest lags its owner by a round or so."""

DEFAULT_RTT_S = 0.001
"""Network round trip to a peer until it is measured."""


class Candidate(NamedTuple):
    """One endpoint weighed for one prompt; times in seconds, `cost_s` is the expected time to first token.

    cost = rtt + wait + overhead + uncached tokens x seconds per token, where uncached counts only the trusted share
    (`confidence`) of the match, rounded down to what the engine can reuse.
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


class Standing:
    """One endpoint's standing with this node."""

    __slots__ = (
        "bit",
        "copy",
        "estimate",
        "ledger",
        "name",
        "overhead_s",
        "peer",
        "rank",
        "rate",
        "refused_until",
        "suspension",
        "trust",
    )

    def __init__(self, copy: Copy, peer: Peer | None, bit: int) -> None:
        self.copy = copy
        self.name = copy.endpoint
        self.peer = peer
        self.bit = bit
        self.ledger = Ledger()
        self.estimate = RateEstimate()
        self.suspension = Suspension()
        self.refused_until = float("-inf")
        self.trust = 1.0
        self.rate = 1.0
        self.overhead_s = 0.0
        self.rank: tuple[float, float, str] | None = None
        self.refresh_rate()

    @property
    def local(self) -> bool:
        """Whether the endpoint is this node's own."""
        return self.copy.mine

    @property
    def rtt_s(self) -> float:
        """Network round trip to the endpoint, 0 for one's own."""
        if self.copy.mine:
            return 0.0
        measured = self.peer.rtt_s if self.peer is not None else None
        return DEFAULT_RTT_S if measured is None else measured

    @property
    def confidence(self) -> float:
        """Share of a match to count on."""
        own = self.copy.advert.confidence * self.trust
        return own if self.copy.mine else own * BELIEF

    def refresh_rate(self) -> None:
        """Take rate and fixed time from the freshest report, from outcomes, or the stated defaults."""
        report = filled(self.copy.advert.report, self.estimate if self.copy.mine else None)
        self.rate, self.overhead_s = report.prefill_tokens_per_s, report.overhead_s

    def wait_s(self, now: float) -> float:
        """Expected wait before prefill begins: the reported queue, drained since, and what was sent since."""
        copy = self.copy
        reported = copy.advert.report.queued_tokens / self.rate
        if copy.mine:
            return max(self.ledger.wait_s(now), reported)
        if not len(self.ledger):
            return max(0.0, reported - (now - copy.heard_at)) if reported else 0.0
        sent = min(self.ledger.sent_since(copy.heard_at), self.ledger.wait_s(now))
        return max(0.0, reported - (now - copy.heard_at)) + sent

    def state(self, now: float) -> PushBackState:
        """Push-back as of now: advertised and not run out, or the refusal of a forward."""
        if now < self.refused_until:
            return PushBackState.REFUSING
        advert = self.copy.advert
        if advert.state is PushBackState.OPEN or (not self.copy.mine and now - self.copy.heard_at > advert.ttl_s):
            return PushBackState.OPEN
        return advert.state

    def weigh(self, depth: int, n_tokens: int, block_tokens: int, now: float) -> Candidate:
        """Weigh the endpoint for a prompt of which it holds `depth` blocks. O(1)."""
        copy = self.copy
        advert = copy.advert
        matched = 0
        if depth:
            unit = advert.hit_unit or block_tokens
            # The last token is never reused: an engine computes at least one.
            matched = min(depth * block_tokens, n_tokens - 1) // unit * unit
        confidence = self.confidence
        rtt, wait = self.rtt_s, self.wait_s(now)
        prefill = (n_tokens - confidence * matched) / self.rate
        cost = rtt + wait + self.overhead_s + prefill
        age = 0.0 if copy.mine else now - copy.heard_at
        state = self.state(now)
        return Candidate(
            self.name,
            copy.mine,
            n_tokens,
            depth,
            matched,
            confidence,
            rtt,
            wait,
            self.overhead_s,
            prefill,
            cost,
            state,
            age,
        )


class Fleet:
    """All standings, ranked, with masks of who is usable."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._ranking: list[tuple[float, float, str]] = []
        self.standings: dict[str, Standing] = {}
        self.by_bit: dict[int, Standing] = {}
        self.usable = 0
        self.overloaded = 0
        self.local = 0

    def add(self, standing: Standing, now: float) -> None:
        """Take an endpoint in. O(log n) and a memmove."""
        self.standings[standing.name] = standing
        self.by_bit[standing.bit] = standing
        if standing.local:
            self.local |= standing.bit
        self.refresh(standing, now)

    def drop(self, endpoint: str) -> None:
        """Take an endpoint out."""
        standing = self.standings.pop(endpoint)
        del self.by_bit[standing.bit]
        self._unrank(standing)
        clear = ~standing.bit
        self.usable &= clear
        self.overloaded &= clear
        self.local &= clear

    def refresh(self, standing: Standing, now: float) -> None:
        """Rank an endpoint anew, and set its masks. O(log n) and a memmove; ties fall at random."""
        standing.refresh_rate()
        self._unrank(standing)
        base = standing.rtt_s + standing.wait_s(now) + standing.overhead_s
        standing.rank = (base, self._rng.random(), standing.name)
        insort(self._ranking, standing.rank)
        bit = standing.bit
        state = standing.state(now)
        out = state is PushBackState.REFUSING or standing.suspension.blocks(now) or standing.copy.suspected
        self.usable = self.usable & ~bit if out else self.usable | bit
        overloaded = state is PushBackState.OVERLOADED
        self.overloaded = self.overloaded | bit if overloaded else self.overloaded & ~bit

    def refresh_all(self, now: float) -> None:
        """Rank all endpoints anew. O(n log n): once a round."""
        for standing in self.standings.values():
            self.refresh(standing, now)

    def cheapest(self, mask: int, n: int) -> list[Standing]:
        """Return the `n` endpoints of `mask` that are cheapest to reach. O(n) for a mask of many, O(bits) for few."""
        if not mask:
            return []
        if mask.bit_count() <= 4:
            few = []
            while mask:
                low = mask & -mask
                few.append(self.by_bit[low])
                mask ^= low
            if len(few) > n:
                few.sort(key=_rank_of)
            return few[:n]
        found: list[Standing] = []
        for _, _, name in self._ranking:
            standing = self.standings[name]
            if standing.bit & mask:
                found.append(standing)
                if len(found) == n:
                    break
        return found

    def _unrank(self, standing: Standing) -> None:
        if standing.rank is not None:
            at = bisect_left(self._ranking, standing.rank)
            del self._ranking[at]
            standing.rank = None

    def _check(self) -> None:
        """Assert that ranking, masks and standings agree."""
        assert self._ranking == sorted(self._ranking)
        assert {name for _, _, name in self._ranking} == set(self.standings)
        assert {standing.bit: standing for standing in self.standings.values()} == self.by_bit
        every = sum(self.by_bit)
        assert self.usable & ~every == self.overloaded & ~every == self.local & ~every == 0


def _rank_of(standing: Standing) -> tuple[float, float, str]:
    assert standing.rank is not None
    return standing.rank
