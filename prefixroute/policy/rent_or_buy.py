"""The default policy: forward while that is cheaper, until a copy of one's own would have paid.

Its arithmetic is in `pricing`. All policies by name are here too: `POLICIES`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import inf

from .baselines import GreedyCost, LeastLoad, LongestMatch, NoRouting
from .guard import guarded
from .interface import Candidate, Choice, Request
from .pricing import Rents, buys, by_price, origin_of, priced_s


class RentOrBuy:
    """The default: forward while that is cheaper, until a copy of one's own would have paid. No threshold to tune.

    Forwarding is rent: it is paid again for each prompt while the local cache stays cold. Prefilling here is the price
    of a copy. To buy once the rent that was paid reaches the price costs at most about twice the best choice in
    hindsight (ski rental; Karlin et al., Algorithmica 3, 1988), and takes no knowledge of the rate of arrivals.

        price of work   p_j = 1 + mean of the requests without a first token at the origin and at j: work delays others
        delays          D_j = arrivals a second at j x (seconds of prefill at j)^2 / 2: what comes meanwhile waits
        cost            T_j = round trip + wait + overhead + D_j + seconds a token x (p_j x uncached + evicted / 2)
        rent            R   = this round trip + the rent kept on the blocks that the best peer holds beyond the origin
        price of a copy B   = seconds a token x (p x tokens of those blocks + tokens evicted for them), at the origin

    Take the least T_j, the origin on a tie, of those where the way pays for itself: round trip, overhead and prefill
    there, without the wait and at price 1, and D_j, are no more than at the origin. A prompt may have to wait for the
    sake of others, but it does not travel for those who wait. D_j spreads new prompts over idle nodes: of twelve topics
    over four nodes the hottest node got 44 % of the requests without it, and gets 38 % with it.

    If the least is a peer that holds more of the prompt, buy when R >= B: serve here, and forget that rent. Else
    forward, and add the round trip to the rent of those blocks (`Rents`). A peer that holds no more than the origin is
    only a shorter queue, and costs no rent. What must not leave its node at all is in `guard`.

    A gateway has no cache to warm. Its price of work is that of the queue where the work goes, and of one other request
    where that is idle and others are not.
    """

    def __init__(self) -> None:
        self._rents = Rents()

    def choose(self, request: Request, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """Sort by priced cost, then let rent decide between the best peer and the origin. O(log depth)."""
        origin = origin_of(candidates)
        if origin is None:
            # Where nobody waits yet a copy costs those who will come: a burst of one cold prompt stays together.
            least = min(1.0, sum([c.queued for c in candidates]) / len(candidates))
            order = [c for *_, c in sorted((priced_s(c, max(c.queued, least)), rng.random(), c) for c in candidates)]
            reason = "longer cached prefix" if order[0].depth else "shorter wait"
            return _choice(order, reason, _budget_s(order[0], order[1].cost_s if len(order) > 1 else inf))
        order = by_price(candidates, origin, rng.random)
        best, entry = order[0], request.entry
        if entry is not None:
            order = guarded(order, origin, entry, request.now)
            if order[0].local and not best.local:
                return _choice(order, "local: it would be stored where it is not asked for", inf)
            best = order[0]
        if best.local:
            return _choice(order, "local is cheapest" if best.matched_tokens else "local: nobody is cheaper", inf)
        if best.matched_tokens <= origin.matched_tokens:
            return _choice(order, "shorter wait", _budget_s(best, origin.cost_s))
        if buys(self._rents, request.chain, request.now, origin, best):
            order.remove(origin)
            return _choice([origin, *order], "local: rent has reached the price of a copy", inf)
        return _choice(order, "longer cached prefix", _budget_s(best, origin.cost_s))


POLICIES: dict[str, type[RentOrBuy] | type[GreedyCost] | type[LongestMatch] | type[LeastLoad] | type[NoRouting]] = {
    "rent": RentOrBuy,
    "greedy": GreedyCost,
    "longest": LongestMatch,
    "least": LeastLoad,
    "none": NoRouting,
}
"""Policies by the name that command lines and configuration files use."""


def _choice(order: list[Candidate], reason: str, budget_s: float) -> Choice:
    """Return the choice, without the constructor of named tuples, which takes twice as long."""
    return tuple.__new__(Choice, (tuple(order), reason, budget_s))


def _budget_s(best: Candidate, elsewhere_s: float) -> float:
    """Seconds beyond which `best` had better hand the prompt back: what it would take elsewhere, then as now.

    The way there is spent by then, and the way back is taken either way: by the prompt, or by its first token.
    """
    return elsewhere_s if elsewhere_s > best.cost_s else best.cost_s
