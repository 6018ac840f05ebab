"""The answer of ``/prefixroute/stats``: requests, decisions, gossip, the engine's streams, the node's state.

Rule: everything can be written as JSON, and a quantile is the nearest rank, so it is always a measured value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from prefixroute import EndpointStats

from .site import Site


def site_stats(site: Site, samples: bool = False) -> dict[str, Any]:
    """Return all statistics as JSON values; with `samples` every decision time instead of two quantiles only."""
    now = site.now()
    state = site.node.stats(now)
    seconds = max(now - site.began, 1e-9)
    sent = site.transport.bytes_sent
    return {
        "node": site.config.node,
        "policy": site.config.policy,
        "uptime_s": seconds,
        "requests": dict(site.counts),
        "fairness": fairness(site),
        "decisions": _decisions(list(site.log.took_us), samples),
        "gossip": {
            "bytes_sent": sent,
            "datagrams_sent": site.transport.datagrams_sent,
            "bytes_per_s": sent / seconds,
        },
        "engine_events": site.engine.stats(),
        "state": {
            **state._asdict(),
            "endpoints": [_endpoint(row) for row in state.endpoints],
            "round_trips": [way._asdict() for way in state.round_trips],
            "tenants": [row._asdict() for row in state.tenants],
        },
    }


def fairness(site: Site) -> dict[str, Any]:
    """Return the waiting requests by endpoint as JSON values; empty where tenants take no turns."""
    return site.turns.stats() if site.turns is not None else {}


def quantile(values: Sequence[float], q: float) -> float:
    """Return the nearest-rank quantile of `values` (sorted or not), 0 when there are none."""
    if not values:
        return 0.0
    rank = max(1, math.ceil(q * len(values)))
    return sorted(values)[rank - 1]


def _decisions(times: list[float], samples: bool) -> dict[str, Any]:
    told: dict[str, Any] = {"count": len(times), "us_p50": quantile(times, 0.50), "us_p99": quantile(times, 0.99)}
    return {**told, "us": times} if samples else told


def _endpoint(row: EndpointStats) -> dict[str, Any]:
    accuracy = {**row.accuracy._asdict(), "compared": row.accuracy.compared}
    differs = row.differs._asdict() if row.differs is not None else None
    return {**row._asdict(), "accuracy": accuracy, "differs": differs}
