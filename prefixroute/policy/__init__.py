"""Who of the weighed candidates serves a prompt: the contract of policies, the default rule, and the others."""

from __future__ import annotations

from .baselines import GreedyCost, LeastLoad, LongestMatch, NoRouting
from .interface import Choice, Policy, Request
from .rent_or_buy import POLICIES, RentOrBuy

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
