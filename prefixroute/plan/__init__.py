"""Planners: slower questions in the router's cost vocabulary, answered by pure functions and small controllers.

`best_plan` divides prefill between clusters, `offload_gain` weighs one prompt, `ThresholdController` follows a
congested link, and `PrefillOffload` is a policy of a `Node` that has a prefill pool behind it.
"""

from __future__ import annotations

from .calibrate import Errors, LatencyModel, Timing, calibrate, timings_of
from .congestion import (
    Backlog,
    CapacityEstimate,
    ControllerSettings,
    LinkMonitor,
    LinkState,
    Rebalance,
    Rebalancer,
    ThresholdController,
    relief_threshold,
)
from .costs import (
    Curve,
    Decode,
    KvBytes,
    Polynomial,
    Slower,
    Table,
    Window,
    attention_kv,
    latent_kv,
    recurrent_kv,
    reusable_tokens,
    window_kv,
)
from .lengths import Empirical, Lengths, LogNormal, incremental
from .offload import KvLink, Line, OffloadGain, Side, offload_from, offload_gain
from .prefill import (
    Bottleneck,
    PrefillClusters,
    PrefillPlace,
    PrefillRates,
    all_local,
    all_remote,
    best_plan,
    best_threshold,
    kv_rate_bytes_per_s,
    place,
    rates,
)
from .prefill_file import ClusterFile, read_clusters
from .remote_pool import Offload, PrefillOffload, PrefillPool
from .traces import TraceRequest, read_trace

__all__ = [
    "Backlog",
    "Bottleneck",
    "CapacityEstimate",
    "ClusterFile",
    "ControllerSettings",
    "Curve",
    "Decode",
    "Empirical",
    "Errors",
    "KvBytes",
    "KvLink",
    "LatencyModel",
    "Lengths",
    "Line",
    "LinkMonitor",
    "LinkState",
    "LogNormal",
    "Offload",
    "OffloadGain",
    "Polynomial",
    "PrefillClusters",
    "PrefillOffload",
    "PrefillPlace",
    "PrefillPool",
    "PrefillRates",
    "Rebalance",
    "Rebalancer",
    "Side",
    "Slower",
    "Table",
    "ThresholdController",
    "Timing",
    "TraceRequest",
    "Window",
    "all_local",
    "all_remote",
    "attention_kv",
    "best_plan",
    "best_threshold",
    "calibrate",
    "incremental",
    "kv_rate_bytes_per_s",
    "latent_kv",
    "offload_from",
    "offload_gain",
    "place",
    "rates",
    "read_clusters",
    "read_trace",
    "recurrent_kv",
    "relief_threshold",
    "reusable_tokens",
    "timings_of",
    "window_kv",
]
