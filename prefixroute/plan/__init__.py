"""Planners of slower questions than routing: they return plans and decisions, and move nothing.

Placement: which server holds which blocks of a model that fits no single one, and which chain of servers a request
takes. Start at `Problem`, `adaptive` and `certify`.
"""

from __future__ import annotations

from .certificate import Certificate, certify, lower_bounds, theorem2_bound
from .chains import Assignment, Chain, Hop, Links, Shared, assign
from .estimates import Fading, LinkEstimate, LinkFit, RateWatch
from .exact import Exact, solve_exact
from .fleet import Problem, Span, with_requests
from .fleet_file import Fleet, read_fleet
from .ledger import Booking, Ledger, retry_wait_s
from .linear import Solver
from .load import DesignLoad, at_rate, design_load, share_out, single_request_s
from .migration import Migration, Move, deal_alike, next_movers, plan_migration
from .online import OnlinePlanner, OnlineSettings, Routed
from .petals import PetalsRates, PetalsRouter, PetalsSettings, place_petals, rates_of, should_move, throughputs
from .placement import Adaptive, Placement, adaptive, conservative, coverage, designs_of

__all__ = [
    "Adaptive",
    "Assignment",
    "Booking",
    "Certificate",
    "Chain",
    "DesignLoad",
    "Exact",
    "Fading",
    "Fleet",
    "Hop",
    "Ledger",
    "LinkEstimate",
    "LinkFit",
    "Links",
    "Migration",
    "Move",
    "OnlinePlanner",
    "OnlineSettings",
    "PetalsRates",
    "PetalsRouter",
    "PetalsSettings",
    "Placement",
    "Problem",
    "RateWatch",
    "Routed",
    "Shared",
    "Solver",
    "Span",
    "adaptive",
    "assign",
    "at_rate",
    "certify",
    "conservative",
    "coverage",
    "deal_alike",
    "design_load",
    "designs_of",
    "lower_bounds",
    "next_movers",
    "place_petals",
    "plan_migration",
    "rates_of",
    "read_fleet",
    "retry_wait_s",
    "share_out",
    "should_move",
    "single_request_s",
    "solve_exact",
    "theorem2_bound",
    "throughputs",
    "with_requests",
]
