"""The simulator: real nodes on virtual time, deterministic from one seed.

`Network` joins nodes by links that delay, lose, repeat and reorder; an oracle checks every rule of replication after
every event. `prefixroute simulate replication` runs random schedules of faults over it and shrinks what fails.
"""

from __future__ import annotations

from .engine import Engine
from .invariants import InvariantError, Oracle, Violation
from .links import CALM, ROUGH, Link, LogNormal
from .network import DOMAIN, Network
from .schedule import Schedule, Step, generate

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
