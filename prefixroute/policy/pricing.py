"""The arithmetic of the default policy: what a prompt costs at each candidate, others counted, and when a copy pays.

The rule itself, and its symbols, are in `policy.RentOrBuy`. Here are its loops, apart because every decision goes
through them: written out, without a call for each term, they take half the time. The compiled build compiles them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from ..keys.chain import TokenChain
from ..routing.standing import Candidate
from .rent import Rents, stretches_of

NEEDED_AGAIN = 0.5
"""Share of the tokens evicted for a prompt that will be prefilled again.

All of them where caches together hold everything once (with 1 the mean is 3 % less there), next to none of a long tail
(with 0 it is 3 % less there), by the simulator.
"""


def priced_s(candidate: Candidate, others: float) -> float:
    """Time to first token with prefill at a price of 1 + `others`, what it delays, and again what it evicts."""
    again_s = NEEDED_AGAIN * candidate.s_per_token * candidate.evicted_tokens
    return candidate.cost_s + others * candidate.prefill_s + candidate.delays_s + again_s


def origin_of(candidates: Sequence[Candidate]) -> Candidate | None:
    """The local candidate whose price is least; None for a gateway."""
    ours = [c for c in candidates if c.local]
    if len(ours) > 1:
        return min(ours, key=lambda c: priced_s(c, c.queued))
    return ours[0] if ours else None


def by_price(candidates: Sequence[Candidate], origin: Candidate, draw: Callable[[], float]) -> list[Candidate]:
    """Return the candidates by price, but those last for which the way there alone is not worth it; ties by `draw`."""
    half, limit_s = origin.queued / 2, origin.cost_s + origin.delays_s
    priced: list[tuple[bool, float, bool, float, Candidate]] = []
    for c in candidates:
        # As `priced_s` says it.
        remote, cost_s, prefill_s = not c.local, c.cost_s, c.prefill_s
        delays_s = c.arrivals_per_s * prefill_s * prefill_s / 2
        price_s = cost_s + (half + c.queued / 2) * prefill_s + delays_s
        if c.room_tokens < inf:
            price_s += NEEDED_AGAIN * c.s_per_token * c.evicted_tokens
        # What it would cost if nobody waited there has to be worth the way.
        priced.append((remote and cost_s - c.wait_s + delays_s > limit_s, price_s, remote, draw(), c))
    priced.sort()
    return [row[4] for row in priced]


def buys(rents: Rents, chain: TokenChain, now: float, origin: Candidate, best: Candidate) -> bool:
    """Whether to serve at the origin what a peer holds more of; rent is charged, or forgotten. O(log depth)."""
    age_s = origin.eviction_age_s
    stretches = stretches_of(chain, origin.depth, best.depth)
    paid = rents.paid(stretches, now, age_s)
    saved = (1 + origin.queued) * (best.matched_tokens - origin.matched_tokens)
    if best.rtt_s + sum(paid) >= origin.s_per_token * (saved + origin.evicted_tokens):
        rents.clear(stretches)
        return True
    rents.charge(stretches, paid, best.rtt_s, now)
    return False
