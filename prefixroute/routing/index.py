"""The merged longest-prefix index over all endpoints: 48-bit wire key -> bitmask of the endpoints that hold it.

| endpoint | when it | its depth for a prompt | found by |
|---|---|---|---|
| exact | publishes every block | the blocks that it holds of the path | galloping, then bisecting |
| coarse | has a stride above 1 | the deepest of its anchors on the path | stride ends, bisecting, anchors between |
| sparse | holds `ENDS_ONLY` | the deepest end on the path that leaves a token | marked sections, deepest first |

Rules:
1. Each endpoint's keys are closed under prefixes, so the holders of a prompt's prefixes only shrink with depth and
   depth can be bisected. The work follows the number of distinct depths, never the number of endpoints.
2. A search answers in strata, deepest first; endpoints that hold nothing of the prompt are in none.
3. A held key proves all of its prefix, so a copy that is cut short, in the middle of an update, can only
   under-estimate. Keys can collide (2.3e-8 a probe at 64 endpoints x 100k keys): once in some 10 million searches a
   prompt is sent where less of it is. Checking each landing on the blocks above it cost 1.3 us of a search's 8.
4. A coarse endpoint publishes some of its blocks (`tree`, rule 5): only depth 1 and multiples of its stride are closed.
5. Removing an endpoint costs its own keys only. An endpoint's bit is reused after it is removed.
6. A sparse endpoint is so whatever its stride. An engine computes at least one token, so an end at the prompt's last
   token is of no use, and the end above may be far off. A stride above 1 leaves out ends, which under-estimates.
7. Closure may be broken while an endpoint's keys come in slices (`index_feed`); rule 3 holds then as well.

Memory: 96 bytes a distinct key while masks are shared, 194 at most with 1,024 endpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from ..errors import UsageError
from ..keys.chain import ANCHOR_STRIDES, STRIDE, TokenChain, wire_key
from ..keys.hit_marks import ENDS_ONLY, marked, section

DEEPEST = 4
"""Strata that a search returns: a router needs the deepest few, and cutting there removes the worst case."""

_SPARSE = wire_key(ENDS_ONLY)


class Stratum(NamedTuple):
    """The endpoints (bits of `mask`) that hold exactly the first `depth` blocks of the prompt."""

    depth: int
    mask: int


class MergedIndex:
    """Longest-prefix search over every endpoint's key set at once."""

    __slots__ = ("_bits", "_coarse", "_free", "_masks", "_names", "_strides", "sparse")

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}
        self._bits: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._free: list[int] = []
        self._coarse = 0
        """Endpoints with a stride above 1."""
        self._strides: list[tuple[int, int]] = []
        """(stride, its endpoints) for the strides above 1 that are in use, widest first."""
        self.sparse = 0
        """Sparse endpoints, as a mask. To be read only."""

    def __len__(self) -> int:
        """Number of distinct keys."""
        return len(self._masks)

    def bit(self, endpoint: str) -> int:
        """Return the endpoint's bit as a mask; 0 if it is not in the index."""
        return self._bits.get(endpoint, 0)

    def held(self, bit: int, key: int) -> bool:
        """Whether the endpoint with this bit holds a wire key."""
        return bool(self._masks.get(key, 0) & bit)

    def names(self, mask: int) -> Iterator[str]:
        """Yield the endpoints whose bits are set in `mask`."""
        while mask:
            low = mask & -mask
            yield self._names[low]
            mask ^= low

    def join(self, endpoint: str) -> int:
        """Give an endpoint a bit, with no keys, and return it as a mask. Raises `UsageError` if it has one."""
        if endpoint in self._bits:
            raise UsageError(f"endpoint {endpoint!r} is in the index already")
        bit = self._free.pop() if self._free else 1 << len(self._names)
        self._bits[endpoint] = bit
        self._names[bit] = endpoint
        return bit

    def retire(self, endpoint: str) -> int:
        """Take an endpoint out whose keys are cleared later; return its bit, which no other gets until `release`.

        Until then a search still finds that bit: look `within` the endpoints that are wanted.
        """
        self.set_stride(endpoint, 1)
        return self._bits.pop(endpoint)

    def release(self, bit: int) -> None:
        """Let the bit of an endpoint that was retired be given anew: none of its keys is left."""
        del self._names[bit]
        self._free.append(bit)

    def update(self, endpoint: str, added: Iterable[int], removed: Iterable[int]) -> None:
        """Set and clear an endpoint's bit on wire keys. 0.3 us a key, whatever the number of endpoints."""
        self.mark(self._bits[endpoint], added, removed)

    def mark(self, bit: int, added: Iterable[int], removed: Iterable[int]) -> None:
        """Set and clear one bit on wire keys. 0.3 us a key."""
        masks = self._masks
        for key in removed:
            left = masks.get(key, 0) & ~bit
            if left:
                masks[key] = left
            else:
                masks.pop(key, None)
        get = masks.get
        # An unshared mask is one int object: nothing is allocated for it. Compiled code would, but for `Any`.
        alone: Any = bit
        for key in added:
            mask = get(key)
            masks[key] = alone if mask is None else mask | bit
        self.sparse = get(_SPARSE, 0)

    def stride(self, mask: int) -> int:
        """Return the widest anchor stride among the endpoints of a mask."""
        return next((anchor_stride for anchor_stride, endpoints in self._strides if endpoints & mask), 1)

    def set_stride(self, endpoint: str, anchor_stride: int) -> None:
        """Say which anchor stride an endpoint's keys have; 1, as after `join`, is every block.

        A search at this stride also finds keys of a finer one, and under-estimates those of a coarser one. Raises
        `UsageError` for a stride that does not divide 32.
        """
        if anchor_stride not in ANCHOR_STRIDES:
            raise UsageError(f"an anchor stride is one of {ANCHOR_STRIDES}, not {anchor_stride!r}")
        bit = self._bits[endpoint]
        if self.stride(bit) == anchor_stride:
            return
        masks = {stride: mask & ~bit for stride, mask in self._strides}
        if anchor_stride > 1:
            masks[anchor_stride] = masks.get(anchor_stride, 0) | bit
        self._strides = sorted(((stride, mask) for stride, mask in masks.items() if mask), reverse=True)
        self._coarse = self._coarse | bit if anchor_stride > 1 else self._coarse & ~bit

    def first_holders(self, chain: TokenChain) -> int:
        """Return the mask of the endpoints that are known to hold a prompt's first block. O(1)."""
        return self._masks.get(chain.key(1) >> 16, 0) if chain.depth else 0

    def search(self, chain: TokenChain, keep: int = DEEPEST, within: int = -1) -> list[Stratum]:
        """Return the deepest `keep` strata of a prompt among the endpoints `within` (a mask; -1: all).

        A prompt whose first block nobody holds costs one hash and one look-up. Otherwise O(depth / 32) hashes, and
        log2(32) more for each distinct depth that is returned, or up to 31 among coarse endpoints.
        """
        if not chain.depth:
            return []
        sparse = self.sparse & within
        if sparse:
            return self._merged(self._last_ends(chain, sparse, keep), chain, keep, within & ~sparse)
        first = self._masks.get(chain.key(1) >> 16, 0) & within
        if not first:
            return []
        coarse = first & self._coarse
        if coarse:
            return self._merged(self._gallop_coarse(chain, coarse, keep), chain, keep, first ^ coarse)
        get, key, whole = self._masks.get, chain.key, chain.depth
        brackets: list[tuple[int, int, int, int]] = []
        lower, holders, upper = 1, first, STRIDE
        while lower < whole and holders:
            # Twice as deep each time: stride ends cost a hash each on the way, but no look-up.
            upper = min(upper, whole)
            below = holders & get(key(upper) >> 16, 0)
            if below != holders:
                brackets.append((lower, holders, upper, below))
            lower, holders, upper = upper, below, 2 * upper
        strata: list[Stratum] = []
        if holders:
            strata.append(tuple.__new__(Stratum, (whole, holders)))
        while brackets and len(strata) < keep:
            lower, above, upper, below = brackets.pop()
            while upper - lower > 1:
                middle = (lower + upper) >> 1
                if upper - lower > STRIDE:
                    middle = (middle + STRIDE - 1) & -STRIDE  # its key is there already
                mask = (above & get(key(middle) >> 16, 0)) | below
                if mask == below:
                    upper = middle
                else:
                    if mask != above:
                        brackets.append((lower, above, middle, mask))
                    lower, above = middle, mask
            strata.append(tuple.__new__(Stratum, (lower, above & ~below)))
        return strata

    def depth(self, chain: TokenChain, bit: int) -> int:
        """Return how many leading blocks of a prompt one endpoint holds. log2(depth) look-ups, 31 more if coarse.

        Of a sparse endpoint that has an end behind the first block: depth / 32 look-ups, and 32 for each section tried.
        """
        if bit & self.sparse:
            strata = self._last_ends(chain, bit, 1)
            return strata[0].depth if strata else 0
        masks, anchor_stride = self._masks, self.stride(bit)
        if anchor_stride > 1 and not (chain.depth and masks.get(chain.key(1) >> 16, 0) & bit):
            return 0
        lower, upper = 0, chain.depth // anchor_stride + 1
        while upper - lower > 1:
            middle = (lower + upper) // 2
            if masks.get(chain.key(middle * anchor_stride) >> 16, 0) & bit:
                lower = middle
            else:
                upper = middle
        if anchor_stride == 1:
            return lower
        strata = []
        self._try_ends(chain, lower * anchor_stride, bit, anchor_stride, strata)
        return strata[0].depth

    def _merged(self, strata: list[Stratum], chain: TokenChain, keep: int, others: int) -> list[Stratum]:
        """Return the deepest `keep` of these strata and those of the endpoints `others`, which are of another kind."""
        if not others:
            return strata[:keep]
        masks = dict(strata)
        for depth, mask in self.search(chain, keep, others):
            masks[depth] = masks.get(depth, 0) | mask
        return [Stratum(depth, masks[depth]) for depth in sorted(masks, reverse=True)[:keep]]

    def _last_ends(self, chain: TokenChain, holders: int, keep: int) -> list[Stratum]:
        """Return the deepest `keep` strata of sparse endpoints: marked sections, deepest first, each depth of them."""
        masks = self._masks
        most = (chain.n_tokens - 1) // chain.spec.block_tokens
        if most < 1:
            return []
        holders &= masks.get(wire_key(marked(chain.key(1))), 0)
        strata: list[Stratum] = []
        start = section(most)
        while holders and start >= 0:
            likely = holders & masks.get(wire_key(marked(chain.key(start))), 0) if start else holders
            depth = min(start + STRIDE, most)
            while likely and depth > start:
                found = likely & masks.get(chain.key(depth) >> 16, 0)
                if found:
                    strata.append(Stratum(depth, found))
                    if len(strata) == keep:
                        return strata
                    likely ^= found
                    holders ^= found
                depth -= 1
            start -= STRIDE
        return strata

    def _gallop_coarse(self, chain: TokenChain, holders: int, keep: int) -> list[Stratum]:
        """Return the deepest strata of coarse endpoints that hold block 1: by stride ends, bisecting, then anchors."""
        masks = self._masks
        brackets: list[tuple[int, int, int, int]] = []
        lower = 0
        while holders:
            upper = lower + STRIDE
            # Past the prompt's end nobody holds anything; its own last depth proves nothing to those without it.
            below = holders & masks.get(chain.key(upper) >> 16, 0) if upper <= chain.depth else 0
            if below != holders:
                brackets.append((lower, holders, upper, below))
            lower, holders = upper, below
        strata: list[Stratum] = []
        while brackets and len(strata) < keep:
            lower, above, upper, below = brackets.pop()
            landed = above & ~below
            anchor_stride = self.stride(landed)
            if upper - lower == anchor_stride:
                self._try_ends(chain, lower, landed, anchor_stride, strata)
                continue
            middle = (lower + upper) // (2 * anchor_stride) * anchor_stride
            mask = below if middle > chain.depth else (above & masks.get(chain.key(middle) >> 16, 0)) | below
            if mask != above:
                brackets.append((lower, above, middle, mask))
            if mask != below:
                brackets.append((middle, mask, upper, below))
        return strata

    def _try_ends(self, chain: TokenChain, lower: int, landed: int, anchor_stride: int, strata: list[Stratum]) -> None:
        """Add the deepest anchor between `lower` and the next multiple of the stride of who landed at `lower`."""
        for depth in range(min(lower + anchor_stride - 1, chain.depth), lower, -1):
            found = landed & self._masks.get(chain.key(depth) >> 16, 0)
            if found:
                strata.append(Stratum(depth, found))
                landed ^= found
                if not landed:
                    return
        strata.append(Stratum(lower, landed))

    def keys_of(self, bit: int) -> set[int]:
        """Return the wire keys that have this bit. O(all keys): for checks."""
        return {key for key, mask in self._masks.items() if mask & bit}

    def _check(self, expected: dict[str, set[int]]) -> None:
        """Assert that the index holds exactly `expected` (endpoint -> wire keys), and nothing is retired."""
        assert set(self._bits) == set(expected)
        assert {bit: name for name, bit in self._bits.items()} == self._names
        assert self.sparse == self._masks.get(_SPARSE, 0)
        assert self._coarse == sum(mask for _, mask in self._strides) and not self._coarse & ~sum(self._names)
        assert all(a[0] > b[0] and not a[1] & b[1] for a, b in pairwise(self._strides))
        found: dict[str, set[int]] = {name: set() for name in self._bits}
        for key, mask in self._masks.items():
            assert mask, "an unheld key is dropped"
            for name in self.names(mask):
                found[name].add(key)
        assert found == expected
