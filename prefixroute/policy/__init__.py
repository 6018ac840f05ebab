"""Who of the weighed candidates serves a prompt: the contract of policies, the default rule, and the others."""

from __future__ import annotations

from .policy import (
    POLICIES,
    Choice,
    GreedyCost,
    LeastLoad,
    LongestMatch,
    NoRouting,
    Policy,
    RentOrBuy,
    Request,
)

__all__ = [
    "POLICIES",
    "Choice",
    "GreedyCost",
    "LeastLoad",
    "LongestMatch",
    "NoRouting",
    "Policy",
    "RentOrBuy",
    "Request",
]
