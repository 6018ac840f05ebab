"""The arithmetic of the default policy: what a prompt costs at each candidate, others counted, and when a copy pays.

The rule itself, and its symbols, are in `RentOrBuy`. Here are its loops, apart because every decision goes through
them: written out, without a call for each term, they take half the time. The compiled build compiles them.

Rules of rent, which is what an origin has paid, in seconds of round trips, for stretches of prompts that only peers
hold:
1. It is kept for stretches that double in length, not for every block, so a long prompt costs a handful of updates.
2. It decays with the idle age at which blocks are evicted here: a copy that would not have lasted is not worth it.
3. It is bounded: the stretches that were charged longest ago go first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, inf
from typing import NamedTuple

from ..keys.chain import STRIDE, TokenChain
from .interface import Candidate

NEEDED_AGAIN = 0.5
"""Share of the tokens evicted for a prompt that will be prefilled again.

By the simulator it is all of them where the caches together hold everything once (with 1 the mean is 3 % less there),
and next to none of a long tail (with 0 it is 3 % less there).
"""


def priced_s(candidate: Candidate, others: float) -> float:
    """Time to first token with prefill at a price of 1 + `others`, what it delays, and again what it evicts."""
    again_s = NEEDED_AGAIN * candidate.s_per_token * candidate.evicted_tokens
    return candidate.cost_s + others * candidate.prefill_s + candidate.delays_s + again_s


def origin_of(candidates: Sequence[Candidate]) -> Candidate | None:
    """The local candidate whose price is least; None for a gateway."""
    origin: Candidate | None = None
    for c in candidates:
        if c.local:
            if origin is not None:
                return min([c for c in candidates if c.local], key=lambda c: priced_s(c, c.queued))
            origin = c
    return origin


def by_price(candidates: Sequence[Candidate], origin: Candidate, draw: Callable[[], float]) -> list[Candidate]:
    """Return the candidates by price, but those last for which the way there alone is not worth it; ties by `draw`."""
    half, limit_s = origin.queued / 2, origin.cost_s + origin.delays_s
    priced: list[tuple[bool, float, bool, float, Candidate]] = []
    for c in candidates:
        # The same as `priced_s`; `test_policy` compares the two.
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


MAX_RENTS = 65536
"""Stretches that rent is kept for. About 12 MB."""


class Stretch(NamedTuple):
    """Blocks of a prompt that share one account, named by one of their keys."""

    key: int
    blocks: int


class Rents:
    """The accounts of one origin."""

    __slots__ = ("_accounts", "_most")

    def __init__(self, most: int = MAX_RENTS) -> None:
        self._most = most
        self._accounts: dict[int, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    def paid(self, stretches: list[Stretch], now: float, age_s: float) -> list[float]:
        """Return the seconds of rent left on each stretch, with blocks evicted here at the idle age `age_s`."""
        get = self._accounts.get
        found = [get(key) for key, _ in stretches]
        if age_s == inf:
            return [account[0] if account is not None else 0.0 for account in found]
        fade = 1 / max(age_s, 1e-9)
        return [account[0] * exp((account[1] - now) * fade) if account is not None else 0.0 for account in found]

    def charge(self, stretches: list[Stretch], paid: list[float], rent_s: float, now: float) -> None:
        """Spread `rent_s` over `stretches`, each block alike, on top of what was `paid` for them."""
        accounts, drop = self._accounts, self._accounts.pop
        share = rent_s / max(1, sum([blocks for _, blocks in stretches]))
        for (key, blocks), before in zip(stretches, paid, strict=True):
            # Taken out first, so that the accounts are in the order of their last charge.
            drop(key, None)
            accounts[key] = (before + share * blocks, now)
        while len(accounts) > self._most:
            del accounts[next(iter(accounts))]

    def clear(self, stretches: list[Stretch]) -> None:
        """Forget what was paid for `stretches`."""
        for stretch in stretches:
            self._accounts.pop(stretch.key, None)


def stretches_of(chain: TokenChain, held: int, deeper: int) -> list[Stretch]:
    """Return the blocks `held` + 1 .. `deeper` of a prompt, cut at 32, 64, 128, ... O(log depth).

    A stretch that reaches a cut is named by that end, which costs no hash; the rest by its first block, which is the
    same for all prompts that go the same way from there.
    """
    stretches = []
    at, end = held, STRIDE
    while end <= held:
        end *= 2
    while end <= deeper:
        stretches.append(tuple.__new__(Stretch, (chain.key(end), end - at)))
        at, end = end, 2 * end
    if at < deeper:
        stretches.append(tuple.__new__(Stretch, (chain.key(at + 1), deeper - at)))
    return stretches
