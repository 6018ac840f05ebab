"""The merged longest-prefix index over all endpoints: 48-bit wire key -> bitmask of the endpoints that hold it.

Rules:
1. Each endpoint's keys are closed under prefixes, so the holders of a prompt's prefixes only shrink with depth and
   depth can be bisected. The work follows the number of distinct depths, never the number of endpoints.
2. A search answers in strata [(depth, mask)], deepest first: the endpoints in `mask` hold exactly `depth` blocks.
3. Keys can collide (2.3e-8 a probe at 64 endpoints x 100k keys) and a copy can be cut short: a landing is checked on
   the two blocks above it, which brings a bisect back to the accuracy of a walk.
4. Removing an endpoint costs its own keys only. An endpoint's bit is reused after it is removed.

Memory: 96 bytes a distinct key while masks are shared, 194 at most with 1,024 endpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .chain import STRIDE, TokenChain
from .errors import UsageError

DEEPEST = 4
"""Strata that a search returns: a router needs the deepest few, and cutting there removes the worst case."""


class Stratum(NamedTuple):
    """The endpoints (bits of `mask`) that hold exactly the first `depth` blocks of the prompt."""

    depth: int
    mask: int


class MergedIndex:
    """Longest-prefix search over every endpoint's key set at once."""

    __slots__ = ("_bits", "_free", "_masks", "_names")

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}
        self._bits: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        """Number of distinct keys."""
        return len(self._masks)

    def bit(self, endpoint: str) -> int:
        """Return the endpoint's bit as a mask; 0 if it is not in the index."""
        return self._bits.get(endpoint, 0)

    def names(self, mask: int) -> Iterator[str]:
        """Yield the endpoints whose bits are set in `mask`."""
        while mask:
            low = mask & -mask
            yield self._names[low]
            mask ^= low

    def join(self, endpoint: str) -> None:
        """Give an endpoint a bit, with no keys. Raises `UsageError` if it has one."""
        if endpoint in self._bits:
            raise UsageError(f"endpoint {endpoint!r} is in the index already")
        bit = self._free.pop() if self._free else 1 << len(self._names)
        self._bits[endpoint] = bit
        self._names[bit] = endpoint

    def leave(self, endpoint: str, keys: Iterable[int]) -> None:
        """Take an endpoint out; `keys` are all the wire keys it was given. 1 us a key."""
        self.update(endpoint, (), keys)
        bit = self._bits.pop(endpoint)
        del self._names[bit]
        self._free.append(bit)

    def update(self, endpoint: str, added: Iterable[int], removed: Iterable[int]) -> None:
        """Set and clear an endpoint's bit on wire keys. 1 us a key, whatever the number of endpoints."""
        bit = self._bits[endpoint]
        masks = self._masks
        for key in removed:
            left = masks.get(key, 0) & ~bit
            if left:
                masks[key] = left
            else:
                masks.pop(key, None)
        get = masks.get
        for key in added:
            mask = get(key)
            # An unshared mask is the endpoint's own int object: nothing is allocated for it.
            masks[key] = bit if mask is None else mask | bit

    def search(self, chain: TokenChain, keep: int = DEEPEST, within: int = -1) -> list[Stratum]:
        """Return the deepest `keep` strata of a prompt among the endpoints `within`, without the holders of nothing.

        A prompt whose first block nobody holds costs one hash and one look-up. Otherwise O(depth / 32) hashes, and
        log2(32) more for each distinct depth that is returned. Deepest first.
        """
        if not chain.depth:
            return []
        first = self._masks.get(chain.key(1) >> 16, 0) & within
        if not first:
            return []
        brackets = self._gallop(chain, first)
        strata: list[Stratum] = []
        sure_depths = 0
        while brackets and sure_depths < keep:
            lower, above, upper, below = brackets.pop()
            if upper - lower > 1:
                middle = (lower + upper) // 2
                mask = (above & self._masks.get(chain.key(middle) >> 16, 0)) | below
                if mask != above:
                    brackets.append((lower, above, middle, mask))
                if mask != below:
                    brackets.append((middle, mask, upper, below))
                continue
            landed = above & ~below
            sure = self._confirm(chain, lower, landed)
            if sure:
                # What a walk finds lies anywhere above, so it does not count here.
                sure_depths += 1
                _add(strata, lower, sure)
            if sure != landed:
                self._walk(chain, lower, landed & ~sure, strata)
        strata.sort(key=lambda stratum: -stratum.depth)
        return strata[:keep]

    def depth(self, chain: TokenChain, bit: int) -> int:
        """Return how many leading blocks of a prompt one endpoint holds. log2(depth) look-ups."""
        lower, upper = 0, chain.depth + 1
        while upper - lower > 1:
            middle = (lower + upper) // 2
            if self._masks.get(chain.key(middle) >> 16, 0) & bit:
                lower = middle
            else:
                upper = middle
        return lower

    def _gallop(self, chain: TokenChain, first: int) -> list[tuple[int, int, int, int]]:
        """Brackets (depth, its holders, deeper depth, its holders) in which holders drop out, deepest last."""
        masks = self._masks
        brackets: list[tuple[int, int, int, int]] = []
        lower, holders = 1, first
        for upper in (*range(STRIDE, chain.depth, STRIDE), chain.depth):
            if upper == lower:
                continue
            below = holders & masks.get(chain.key(upper) >> 16, 0)
            if below != holders:
                brackets.append((lower, holders, upper, below))
            lower, holders = upper, below
            if not holders:
                break
        if holders:
            # Nobody can hold more than the whole prompt: a bracket of width 1 yields them as they are.
            brackets.append((lower, holders, lower + 1, 0))
        return brackets

    def _confirm(self, chain: TokenChain, depth: int, mask: int) -> int:
        """Those of `mask` that hold the two blocks above `depth` as well."""
        for above in (depth - 1, depth - 2):
            if above > 0 and mask:
                mask &= self._masks.get(chain.key(above) >> 16, 0)
        return mask

    def _walk(self, chain: TokenChain, depth: int, mask: int, strata: list[Stratum]) -> None:
        """Find by a plain walk from the root how far those endpoints hold whose landing was not confirmed."""
        for at in range(1, depth + 1):
            left = mask & self._masks.get(chain.key(at) >> 16, 0)
            if left != mask and at > 1:
                _add(strata, at - 1, mask & ~left)
            mask = left
            if not mask:
                return

    def _check(self, expected: dict[str, set[int]]) -> None:
        """Assert that the index holds exactly `expected` (endpoint -> wire keys)."""
        assert set(self._bits) == set(expected)
        assert {bit: name for name, bit in self._bits.items()} == self._names
        found: dict[str, set[int]] = {name: set() for name in self._bits}
        for key, mask in self._masks.items():
            assert mask, "an unheld key is dropped"
            for name in self.names(mask):
                found[name].add(key)
        assert found == expected


def _add(strata: list[Stratum], depth: int, mask: int) -> None:
    for i, stratum in enumerate(strata):
        if stratum.depth == depth:
            strata[i] = Stratum(depth, stratum.mask | mask)
            return
    strata.append(Stratum(depth, mask))
