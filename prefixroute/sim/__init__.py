"""The simulator: real nodes on virtual time, deterministic from one seed. Four laboratories on one clock.

    replication   gossip under faults; start at `Network`, which joins nodes by links and checks every rule
    serving       policies over workloads; start at `serving.loop`, a run, and `serving.cells`, a comparison
    placement     sessions over placements of a model's blocks; start at `placement.sessions`
    prefill       two clusters that share prefill; start at `prefill.clusters`

They share `clock` (virtual time), `intervals` (confidence intervals over seeds), `parallel` (many processes, progress,
JSON) and `plots`. `prefixroute simulate SUBJECT` runs all four; the names below are those of replication.
"""

from __future__ import annotations

from .replication.chain_engine import Engine
from .replication.links import CALM, ROUGH, Link, LogNormal
from .replication.network import DOMAIN, Network
from .replication.oracle import InvariantError, Oracle, Violation
from .replication.schedule import Schedule, Step, generate

__all__ = [
    "CALM",
    "DOMAIN",
    "ROUGH",
    "Engine",
    "InvariantError",
    "Link",
    "LogNormal",
    "Network",
    "Oracle",
    "Schedule",
    "Step",
    "Violation",
    "generate",
]
