"""Rent: what an origin has paid, in round trips, for stretches of prompts that only peers hold.

Rules:
1. Rent is kept for stretches that double in length, not for every block, so a long prompt costs a handful of updates.
2. It decays with the idle age at which blocks are evicted here: a copy that would not have lasted is not worth it.
3. It is bounded: the stretches that were charged longest ago go first.
"""

from __future__ import annotations

from math import exp, inf
from typing import NamedTuple

from ..keys.chain import STRIDE, TokenChain

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
