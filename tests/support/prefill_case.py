"""The published case of prefill in another cluster, from the annotated example, with the factors of its derivation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from prefixroute.plan import PrefillClusters, Slower, read_clusters

EXAMPLE = Path(__file__).parents[2] / "examples" / "plan" / "cluster.toml"
FILE, EXAMPLE_CLUSTERS = read_clusters(EXAMPLE)
GBIT = 1e9 / 8


def published(times_pool: float = 2.3, gbit_per_s: float = 100.0, decode_per_s: float = 0.782) -> PrefillClusters:
    """The case with a local prefill that is `times_pool` as slow as the pool's."""
    return replace(
        EXAMPLE_CLUSTERS,
        local_prefill_s=Slower(EXAMPLE_CLUSTERS.pool_prefill_s, times_pool),
        egress_bytes_per_s=gbit_per_s * GBIT,
        decode_per_s=decode_per_s,
    )
