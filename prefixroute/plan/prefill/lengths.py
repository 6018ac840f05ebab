"""Distributions of prompt lengths, and the share and mean length on either side of a threshold.

Rules:
1. Lengths are uncached tokens, the tokens left after a cache hit; thresholds and the model apply to these.
2. A distribution describes the part above a length and the part up to it; together the two parts are exactly the whole.
3. An empty part has its edge as mean, so that nothing divides by zero.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import erfc, exp, inf, log, sqrt
from statistics import NormalDist
from typing import Protocol

from prefixroute import UsageError

from .costs import Curve

_STEPS = 600
"""Intervals of a numeric average: its error is 1e-6 of the value for tables of a few points."""


class Lengths(Protocol):
    """A distribution of prompt lengths in tokens."""

    @property
    def shortest(self) -> float:
        """No prompt is shorter."""
        ...  # pragma: no cover

    @property
    def longest(self) -> float:
        """No prompt is longer."""
        ...  # pragma: no cover

    @property
    def mean(self) -> float:
        """The mean of all."""
        ...  # pragma: no cover

    def share_over(self, tokens: float) -> float:
        """Return the share of prompts longer than `tokens`."""
        ...  # pragma: no cover

    def mean_over(self, tokens: float) -> float:
        """Return the mean length of those longer than `tokens`."""
        ...  # pragma: no cover

    def mean_upto(self, tokens: float) -> float:
        """Return the mean length of those not longer than `tokens`."""
        ...  # pragma: no cover

    def average(self, curve: Curve, low: float = 0.0, high: float = inf) -> float:
        """Return the mean of a curve over the prompts longer than `low` and not longer than `high`."""
        ...  # pragma: no cover

    def draw(self, rng: random.Random) -> int:
        """Return the length of one prompt."""
        ...  # pragma: no cover


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lengths whose logarithm is normal, cut to [`shortest`, `longest`]; closed forms. Raises `UsageError`."""

    mu: float
    sigma: float
    shortest: float = 1.0
    longest: float = inf

    def __post_init__(self) -> None:
        if not 0 < self.sigma < inf or not 0 < self.shortest < self.longest:
            raise UsageError("a log-normal length needs sigma > 0 and 0 < shortest < longest")
        if self._between(self.shortest, self.longest) <= 0:
            raise UsageError("a log-normal length has nothing between shortest and longest")

    @property
    def mean(self) -> float:
        """The mean of all."""
        return self._mean(self.shortest, self.longest)

    def share_over(self, tokens: float) -> float:
        """Return the share of prompts longer than `tokens`. O(1)."""
        if tokens <= self.shortest:
            return 1.0
        return self._between(min(tokens, self.longest), self.longest) / self._between(self.shortest, self.longest)

    def mean_over(self, tokens: float) -> float:
        """Return the mean length of those longer than `tokens`. O(1)."""
        return self._mean(min(max(tokens, self.shortest), self.longest), self.longest)

    def mean_upto(self, tokens: float) -> float:
        """Return the mean length of those not longer than `tokens`. O(1)."""
        return self._mean(self.shortest, min(max(tokens, self.shortest), self.longest))

    def average(self, curve: Curve, low: float = 0.0, high: float = inf) -> float:
        """Return the mean of a curve over a part, by Simpson's rule in the normal's own scale."""
        low, high = max(low, self.shortest), min(high, self.longest)
        if not low < high or self._between(low, high) <= 0:
            return curve(min(low, self.longest))
        first, last = max(self._z(low), -9.0), min(self._z(high), 9.0)
        if not first < last:
            return curve(low)
        step = (last - first) / _STEPS
        total = weight = 0.0
        for i in range(_STEPS + 1):
            z = first + i * step
            each = (1 if i in (0, _STEPS) else 4 if i % 2 else 2) * exp(-z * z / 2)
            weight += each
            total += each * curve(exp(self.mu + self.sigma * z))
        return total / weight

    def draw(self, rng: random.Random) -> int:
        """Return the length of one prompt, by inversion."""
        normal = NormalDist()
        low, high = _below(self._z(self.shortest)), _below(self._z(self.longest))
        at = min(max(low + rng.random() * (high - low), 1e-15), 1 - 1e-15)
        tokens = exp(self.mu + self.sigma * normal.inv_cdf(at))
        return max(1, round(min(max(tokens, self.shortest), self.longest)))

    def _z(self, tokens: float) -> float:
        return (log(tokens) - self.mu) / self.sigma if tokens < inf else inf

    def _between(self, low: float, high: float) -> float:
        return _gap(self._z(low), self._z(high))

    def _mean(self, low: float, high: float) -> float:
        share = self._between(low, high)
        if share <= 0:
            return high if high < inf else low
        moment = _gap(self._z(low) - self.sigma, self._z(high) - self.sigma)
        return exp(self.mu + self.sigma * self.sigma / 2) * moment / share


class Empirical:
    """Lengths as they were seen. Raises `UsageError` without one. Shares and means are O(log n)."""

    __slots__ = ("_lengths", "_sums")

    def __init__(self, lengths: Iterable[float]) -> None:
        self._lengths = sorted(lengths)
        if not self._lengths or self._lengths[0] < 0 or not self._lengths[-1] < inf:
            raise UsageError("an empirical distribution needs lengths, each of 0 tokens or more")
        self._sums = [0.0, *accumulate(self._lengths)]

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def shortest(self) -> float:
        """No prompt is shorter."""
        return self._lengths[0]

    @property
    def longest(self) -> float:
        """No prompt is longer."""
        return self._lengths[-1]

    @property
    def mean(self) -> float:
        """The mean of all."""
        return self._sums[-1] / len(self)

    def share_over(self, tokens: float) -> float:
        """Return the share of prompts longer than `tokens`."""
        return 1 - bisect_right(self._lengths, tokens) / len(self)

    def mean_over(self, tokens: float) -> float:
        """Return the mean length of those longer than `tokens`."""
        at = bisect_right(self._lengths, tokens)
        return (self._sums[-1] - self._sums[at]) / (len(self) - at) if at < len(self) else self.longest

    def mean_upto(self, tokens: float) -> float:
        """Return the mean length of those not longer than `tokens`."""
        at = bisect_right(self._lengths, tokens)
        return self._sums[at] / at if at else self.shortest

    def average(self, curve: Curve, low: float = 0.0, high: float = inf) -> float:
        """Return the mean of a curve over a part. O(its lengths)."""
        lengths = self._lengths
        part = lengths[bisect_right(lengths, low) if low > 0 else 0 : bisect_right(lengths, high)]
        if not part:
            return curve(min(max(low, self.shortest), self.longest))
        return sum(map(curve, part)) / len(part)

    def draw(self, rng: random.Random) -> int:
        """Return one of the lengths, but 1 at least."""
        return max(1, round(self._lengths[rng.randrange(len(self))]))


def incremental(
    prompts: Iterable[tuple[int, Sequence[Hashable]]], block_tokens: int, capacity_blocks: int | None = None
) -> Iterator[tuple[int, int]]:
    """Yield (tokens, cached tokens) of prompts that pass one after another through one cache of blocks.

    A prompt is its length and the ids of its blocks, in order; equal ids are equal prefixes. The cache forgets the
    block not used for longest beyond `capacity_blocks`; None is no bound. The last token is never reused. O(blocks).
    """
    if block_tokens < 1 or (capacity_blocks is not None and capacity_blocks < 1):
        raise UsageError("a cache needs block_tokens >= 1 and capacity_blocks >= 1, or None")
    held: OrderedDict[Hashable, None] = OrderedDict()
    for tokens, blocks in prompts:
        hit = 0
        for block in blocks:
            if block not in held:
                break
            hit += 1
        for block in reversed(blocks):
            held[block] = None
            held.move_to_end(block)
        while capacity_blocks is not None and len(held) > capacity_blocks:
            held.popitem(last=False)
        yield tokens, min(hit * block_tokens, max(0, tokens - 1))


def _below(z: float) -> float:
    return 0.5 * erfc(-z / sqrt(2))


def _gap(low: float, high: float) -> float:
    """Return the probability of the standard normal between two points, as exact far to the right as to the left."""
    if low > 0:
        return 0.5 * (erfc(low / sqrt(2)) - erfc(high / sqrt(2)))
    return _below(high) - _below(low)
