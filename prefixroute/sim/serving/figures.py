"""Figures of one run: mean, tail, hits, shares.

Rule: p99 is the value of rank 0.99 n, without interpolation.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

from .loop import ServedRequests
from .workloads import ArrivalTrace


class Figures(NamedTuple):
    """Figures of one run: `mean_s` and `p99_s` of the latency, in seconds, and shares from 0 to 1.

    `token_hit` is the share of cached tokens, `request_hit` of requests whose whole shared part was cached,
    `forwarded` of requests that were served at another node than their origin, `hottest` of the busiest node.
    """

    mean_s: float
    p99_s: float
    token_hit: float
    request_hit: float
    forwarded: float
    hottest: float


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
