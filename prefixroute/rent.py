"""Rent: what an origin has paid, in round trips, for stretches of prompts that only peers hold.

Rules:
1. Rent is kept at the ends of the chain's strides, not at every block, so a long prompt costs a hundred updates.
2. It decays with the idle age at which blocks are evicted here: a copy that would not have lasted is not worth it.
3. It is bounded: the stretches that were charged longest ago go first.
"""

from __future__ import annotations

from math import exp, inf
from typing import NamedTuple

from .chain import STRIDE, TokenChain

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

    def paid_s(self, stretches: list[Stretch], now: float, age_s: float) -> float:
        """Return the seconds of rent left on `stretches`, with blocks evicted here at the idle age `age_s`."""
        total = 0.0
        for stretch in stretches:
            account = self._accounts.get(stretch.key)
            if account is not None:
                total += _decayed(account, now, age_s)
        return total

    def charge(self, stretches: list[Stretch], rent_s: float, now: float, age_s: float) -> None:
        """Spread `rent_s` over `stretches`, each block alike."""
        accounts = self._accounts
        share = rent_s / max(1, sum(stretch.blocks for stretch in stretches))
        for stretch in stretches:
            account = accounts.pop(stretch.key, None)
            before = _decayed(account, now, age_s) if account is not None else 0.0
            accounts[stretch.key] = (before + share * stretch.blocks, now)
        while len(accounts) > self._most:
            del accounts[next(iter(accounts))]

    def clear(self, stretches: list[Stretch]) -> None:
        """Forget what was paid for `stretches`."""
        for stretch in stretches:
            self._accounts.pop(stretch.key, None)


def stretches_of(chain: TokenChain, held: int, deeper: int) -> list[Stretch]:
    """Return the blocks `held` + 1 .. `deeper` of a prompt, cut at the chain's strides. O(depth / 32).

    One that ends a stride is named by that end, which costs no hash; the rest by its first block, which is the same for
    all prompts that go the same way from there.
    """
    stretches = []
    at = held
    for end in range(held - held % STRIDE + STRIDE, deeper + 1, STRIDE):
        stretches.append(Stretch(chain.key(end), end - at))
        at = end
    if at < deeper:
        stretches.append(Stretch(chain.key(at + 1), deeper - at))
    return stretches


def _decayed(account: tuple[float, float], now: float, age_s: float) -> float:
    amount, at = account
    return amount if age_s == inf else amount * exp((at - now) / max(age_s, 1e-9))
