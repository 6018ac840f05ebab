"""Planners: slower questions than the router's, in the same terms of cost. They return plans, and move nothing.

`placement`: which server holds which blocks of a model that fits no single one, and which chain of servers a request
takes. Start at `Problem` (or `read_fleet`), `adaptive` and `certify`; `OnlinePlanner` follows load and fleet.

`prefill`: which prompts another cluster should prefill. Start at `PrefillClusters` (or `read_clusters`): `best_plan`
divides the nodes, `offload_gain` weighs one prompt, `ThresholdController` follows a congested link, and
`PrefillOffload` is a policy of a `Node` that has a prefill pool behind it.
"""

from __future__ import annotations

from .placement.certificate import Certificate, certify, lower_bounds, theorem2_bound
from .placement.chains import Assignment, Chain, Hop, Links, Shared, assign
from .placement.design_load import DesignLoad, at_rate, design_load, share_out, single_request_s
from .placement.estimates import Fading, LinkEstimate, LinkFit, RateWatch
from .placement.exact import Exact, solve_exact
from .placement.fleet_file import Fleet, read_fleet
from .placement.migration import Migration, Move, deal_alike, next_movers, plan_migration
from .placement.milp import Solver
from .placement.online import OnlinePlanner, OnlineSettings, Routed
from .placement.petals import (
    PetalsRates,
    PetalsRouter,
    PetalsSettings,
    place_petals,
    rates_of,
    should_move,
    throughputs,
)
from .placement.problem import Problem, Span, with_requests
from .placement.slots import Booking, Ledger, retry_wait_s
from .placement.spans import Adaptive, Placement, adaptive, conservative, coverage, designs_of
from .prefill.calibrate import Errors, LatencyModel, Timing, calibrate, timings_of
from .prefill.cluster_file import ClusterFile, read_clusters
from .prefill.congestion import (
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
from .prefill.costs import (
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
from .prefill.division import (
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
from .prefill.lengths import Empirical, Lengths, LogNormal, incremental
from .prefill.offload import KvLink, Line, OffloadGain, Side, offload_from, offload_gain
from .prefill.remote_pool import Offload, PrefillOffload, PrefillPool
from .prefill.traces import TraceRequest, read_trace

__all__ = [
    "Adaptive",
    "Assignment",
    "Backlog",
    "Booking",
    "Bottleneck",
    "CapacityEstimate",
    "Certificate",
    "Chain",
    "ClusterFile",
    "ControllerSettings",
    "Curve",
    "Decode",
    "DesignLoad",
    "Empirical",
    "Errors",
    "Exact",
    "Fading",
    "Fleet",
    "Hop",
    "KvBytes",
    "KvLink",
    "LatencyModel",
    "Ledger",
    "Lengths",
    "Line",
    "LinkEstimate",
    "LinkFit",
    "LinkMonitor",
    "LinkState",
    "Links",
    "LogNormal",
    "Migration",
    "Move",
    "Offload",
    "OffloadGain",
    "OnlinePlanner",
    "OnlineSettings",
    "PetalsRates",
    "PetalsRouter",
    "PetalsSettings",
    "Placement",
    "Polynomial",
    "PrefillClusters",
    "PrefillOffload",
    "PrefillPlace",
    "PrefillPool",
    "PrefillRates",
    "Problem",
    "RateWatch",
    "Rebalance",
    "Rebalancer",
    "Routed",
    "Shared",
    "Side",
    "Slower",
    "Solver",
    "Span",
    "Table",
    "ThresholdController",
    "Timing",
    "TraceRequest",
    "Window",
    "adaptive",
    "all_local",
    "all_remote",
    "assign",
    "at_rate",
    "attention_kv",
    "best_plan",
    "best_threshold",
    "calibrate",
    "certify",
    "conservative",
    "coverage",
    "deal_alike",
    "design_load",
    "designs_of",
    "incremental",
    "kv_rate_bytes_per_s",
    "latent_kv",
    "lower_bounds",
    "next_movers",
    "offload_from",
    "offload_gain",
    "place",
    "place_petals",
    "plan_migration",
    "rates",
    "rates_of",
    "read_clusters",
    "read_fleet",
    "read_trace",
    "recurrent_kv",
    "relief_threshold",
    "retry_wait_s",
    "reusable_tokens",
    "share_out",
    "should_move",
    "single_request_s",
    "solve_exact",
    "theorem2_bound",
    "throughputs",
    "timings_of",
    "window_kv",
    "with_requests",
]
