"""The simulator: real nodes on virtual time, deterministic from one seed.

`Network` joins nodes by links that delay, lose, repeat and reorder; an oracle checks every rule of replication after
every event. `prefixroute simulate replication` runs random schedules of faults over it and shrinks what fails.
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
