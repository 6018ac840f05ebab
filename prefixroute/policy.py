"""Routing policies: which of the weighed candidates serves a prompt, and who comes next if it fails.

Rules:
1. A policy sees a handful of candidates, costs included, and returns them in order of preference with a reason. It
   has no clock and no randomness but what it is given.
2. Vetoes are not its business: who is suspended, refusing or unheard is no candidate. Of overloaded endpoints it sees
   one only if there is nobody else, local included: an absolute veto makes a busy fleet recompute everything. A policy
   with an attribute `keeps_local = True` sees the local endpoints whatever they say.
3. A forwarded request is never forwarded again; the node asks no policy then. It may be handed back once: see `Choice`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import inf
from operator import attrgetter
from typing import NamedTuple, Protocol

from .chain import TokenChain
from .fleet import Candidate
from .rent import Rents, stretches_of

NEEDED_AGAIN = 0.5
"""Share of the tokens evicted for a prompt that will be prefilled again.

All of them where caches together hold everything once (with 1 the mean is 3 % less there), next to none of a long tail
(with 0 it is 3 % less there), by the simulator.
"""


class Request(NamedTuple):
    """What a policy may know of a prompt beside its candidates: its chain of keys, and the time in seconds."""

    chain: TokenChain
    now: float


class Choice(NamedTuple):
    """Candidates in order of preference, the first one chosen, and why.

    `budget_s` goes with a forward: a target that finds, with its own queue and cache before it, that the first token
    would take longer hands the prompt back, and the policy is asked again without it. Infinite: it keeps it.
    """

    order: tuple[Candidate, ...]
    reason: str
    budget_s: float = inf


class Policy(Protocol):
    """What a routing policy is: one method, called for each prompt, with at least one candidate."""

    def choose(self, request: Request, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """Return the candidates in order of preference. A policy may keep state: it is asked once a prompt."""
        ...  # pragma: no cover


class RentOrBuy:
    """The default: forward while that is cheaper, until a copy of one's own would have paid. No threshold to tune.

    Forwarding is rent: it is paid again for each prompt while the local cache stays cold. Prefilling here is the price
    of a copy. Who buys once the rent that was paid reaches the price pays at most about twice what the best choice in
    hindsight costs (ski rental; Karlin et al., Algorithmica 3, 1988), and needs to know no rate of arrivals.

        price of work   p_j = 1 + mean of the requests without a first token at the origin and at j: work delays others
        delays          D_j = arrivals a second at j x (seconds of prefill at j)^2 / 2: who comes meanwhile waits
        cost            T_j = round trip + wait + overhead + D_j + seconds a token x (p_j x uncached + evicted / 2)
        rent            R   = this round trip + the rent kept on the blocks that the best peer holds beyond the origin
        price of a copy B   = seconds a token x (p x tokens of those blocks + tokens evicted for them), at the origin

    Take the least T_j, the origin on a tie, of those where the way pays for itself: round trip, overhead and prefill
    there, without the wait and at price 1, and D_j, are no more than at the origin. A prompt may have to wait for the
    sake of others, but it does not travel for those who wait. D_j spreads new prompts over idle nodes: of twelve topics
    over four nodes the hottest node got 44 % of the requests without it, and gets 38 % with it.

    If the least is a peer that holds more of the prompt, buy when R >= B: serve here, and forget that rent. Else
    forward, and add the round trip to the rent of those blocks (`rent`). A peer that holds no more than the origin is
    only a shorter queue, and costs no rent. A gateway has no cache to warm, and its price of work is that of the mean
    queue of its candidates.
    """

    def __init__(self) -> None:
        self._rents = Rents()

    def choose(self, request: Request, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """Sort by priced cost, then let rent decide between the best peer and the origin. O(log depth)."""
        locals_ = [c for c in candidates if c.local]
        if not locals_:
            mean = sum(c.queued for c in candidates) / len(candidates)
            order = [c for *_, c in sorted((_priced(c, mean), rng.random(), c) for c in candidates)]
            reason = "longer cached prefix" if order[0].depth else "shorter wait"
            return Choice(tuple(order), reason, _budget_s(order[0], order[1:2]))
        local = locals_[0] if len(locals_) == 1 else min(locals_, key=_own_cost)
        here, limit, draw = local.queued, local.cost_s + local.delays_s, rng.random
        half = here / 2
        costs: list[tuple[bool, float, bool, float, Candidate]] = []
        for c in candidates:
            # As `_priced` says it, without the calls: they were half of the policy's time.
            remote, cost_s, prefill_s = not c.local, c.cost_s, c.prefill_s
            delays_s = c.arrivals_per_s * prefill_s * prefill_s / 2
            priced_s = cost_s + (half + c.queued / 2) * prefill_s + delays_s
            if c.room_tokens < inf:
                priced_s += NEEDED_AGAIN * c.s_per_token * c.evicted_tokens
            # What it would cost if nobody waited there has to be worth the way.
            costs.append((remote and cost_s - c.wait_s + delays_s > limit, priced_s, remote, draw(), c))
        costs.sort()
        order = [row[4] for row in costs]
        best = order[0]
        if best.local:
            return Choice(tuple(order), "local is cheapest" if best.matched_tokens else "local: nobody is cheaper")
        budget_s = local.cost_s if local.cost_s > best.cost_s else best.cost_s
        if best.matched_tokens <= local.matched_tokens:
            return Choice(tuple(order), "shorter wait", budget_s)
        if self._buys(request, local, best, 1 + here):
            order.remove(local)
            return Choice((local, *order), "local: rent has reached the price of a copy")
        return Choice(tuple(order), "longer cached prefix", budget_s)

    def _buys(self, request: Request, local: Candidate, best: Candidate, price: int) -> bool:
        """Whether to serve here what a peer holds more of; rent is charged, or forgotten, accordingly."""
        now, age_s = request.now, local.eviction_age_s
        stretches = stretches_of(request.chain, local.depth, best.depth)
        paid = self._rents.paid(stretches, now, age_s)
        saved = best.matched_tokens - local.matched_tokens
        if best.rtt_s + sum(paid) >= local.s_per_token * (price * saved + local.evicted_tokens):
            self._rents.clear(stretches)
            return True
        self._rents.charge(stretches, paid, best.rtt_s, now)
        return False


class GreedyCost:
    """Least expected time to first token; local on a tie."""

    def choose(self, request: Request, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """Sort by cost."""
        order = tuple(sorted(candidates, key=_COST)) if len(candidates) > 1 else tuple(candidates)
        best = order[0]
        if not best.local and len(order) > 1 and order[1].cost_s == best.cost_s:
            order = tuple(sorted(order, key=_cost_and_place))
            best = order[0]
        if best.local:
            return Choice(order, "local is cheapest" if best.matched_tokens else "local: nobody is cheaper")
        if best.depth > max((c.depth for c in candidates if c.local), default=0):
            return Choice(order, "longer cached prefix")
        return Choice(order, "shorter wait")


class LongestMatch:
    """The paper's rule: local if it has the longest match, else a random endpoint of those that have it."""

    def choose(self, request: Request, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """Sort by depth, local before peers, peers in random order."""
        order = tuple(sorted(candidates, key=lambda c: (-c.depth, not c.local, rng.random())))
        return Choice(order, "longest match" if order[0].depth else "no match")


class LeastLoad:
    """Shortest wait, network included; prefixes are ignored."""

    def choose(self, request: Request, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """Sort by wait and round trip."""
        return Choice(tuple(sorted(candidates, key=lambda c: (c.wait_s + c.rtt_s, not c.local))), "least load")


class NoRouting:
    """Serve where the request arrived; a gateway without an endpoint of its own takes one at random."""

    keeps_local = True

    def choose(self, request: Request, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """Local first, by cost; peers only as fallbacks."""
        order = tuple(sorted(candidates, key=lambda c: (not c.local, c.cost_s if c.local else rng.random())))
        return Choice(order, "no routing")


POLICIES: dict[str, type[RentOrBuy] | type[GreedyCost] | type[LongestMatch] | type[LeastLoad] | type[NoRouting]] = {
    "rent": RentOrBuy,
    "greedy": GreedyCost,
    "longest": LongestMatch,
    "least": LeastLoad,
    "none": NoRouting,
}
"""Policies by the name that command lines and configuration files use."""


_COST = attrgetter("cost_s")


def _priced(candidate: Candidate, others: float) -> float:
    """Time to first token with prefill at a price of 1 + `others`, what it delays, and again what it evicts."""
    again_s = NEEDED_AGAIN * candidate.s_per_token * candidate.evicted_tokens
    return candidate.cost_s + others * candidate.prefill_s + candidate.delays_s + again_s


def _budget_s(best: Candidate, others: Sequence[Candidate]) -> float:
    """Seconds beyond which `best` had better hand the prompt back: what it would take elsewhere, then as now.

    The way there is spent by then, and the way back is taken either way: by the prompt, or by its first token.
    """
    return max(best.cost_s, min([c.cost_s for c in others])) if others else inf


def _own_cost(candidate: Candidate) -> float:
    return _priced(candidate, candidate.queued)


def _cost_and_place(candidate: Candidate) -> tuple[float, bool]:
    return (candidate.cost_s, not candidate.local)
