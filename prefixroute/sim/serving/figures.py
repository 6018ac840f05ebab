"""Figures of runs: means, tails, hits, shares; ratios on common traces with their confidence intervals.

Rules:
1. A ratio compares two runs of the same trace; over seeds ratios are averaged, and the interval is of their mean.
2. p99 is the value of rank 0.99 n, without interpolation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from .loop import ServedRequests
from .workloads import ArrivalTrace

# Two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom; beyond, the normal one is near enough.
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


class Figures(NamedTuple):
    """One run. `token_hit` counts tokens, `request_hit` requests whose whole shared part was cached.

    `forwarded` is the share of requests served elsewhere than at their origin, `hottest` the busiest node's share.
    """

    mean_s: float
    p99_s: float
    token_hit: float
    request_hit: float
    forwarded: float
    hottest: float


class Interval(NamedTuple):
    """A mean and half the width of its 95 % confidence interval, 0.0 for a single value."""

    mean: float
    half: float


def figures(served: ServedRequests, trace: ArrivalTrace) -> Figures:
    """Return the figures of a run over `trace`."""
    n = len(served.latency_s)
    ordered = sorted(served.latency_s)
    tokens = sum(arrival.prompt.chain.n_tokens for arrival in trace.arrivals)
    shares = Counter(served.server)
    moved = sum(server != arrival.origin for server, arrival in zip(served.server, trace.arrivals, strict=True))
    return Figures(
        math.fsum(ordered) / n,
        ordered[int(0.99 * n)],
        sum(served.cached) / tokens,
        sum(served.hits) / n,
        moved / n,
        max(shares.values()) / n,
    )


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of independent values with its interval."""
    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return Interval(mean, 0.0)
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    return Interval(mean, (_T95[n - 2] if n <= len(_T95) + 1 else 1.96) * math.sqrt(variance / n))
