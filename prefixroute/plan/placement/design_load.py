"""The design load: how many requests are under way at once at a given rate of arrivals.

Rule: a plan is made for a number of concurrent requests: the mean plus one standard deviation of Poisson arrivals, but
no more than certainly fits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from prefixroute.errors import UsageError

from .chains import Links
from .problem import Problem, with_requests
from .spans import conservative


class DesignLoad(NamedTuple):
    """The number of requests to plan for, and how it was found."""

    requests: int
    """Requests under way at once that the plan is made for."""
    offered: float
    """Requests that the arrivals would keep under way on average."""
    single_s: float
    """Seconds that a request takes alone; 0 where the load was given."""

    @property
    def capped(self) -> bool:
        """Whether more requests are offered than the plan is made for, so that requests will queue."""
        return self.requests < math.floor(self.offered)


def single_request_s(problem: Problem, shares: Sequence[float] | None = None) -> float:
    """Return the seconds of a request that is alone on a placement for one request, weighted by the clients' shares.

    Raises `UsageError` when the model does not fit.
    """
    placement = conservative(problem, 1)
    if placement is None:
        raise UsageError(f"the model does not fit by {problem.missing_bytes(1):,.0f} bytes of memory")
    links = Links(problem, placement.spans)
    shares = [1.0] * problem.clients if shares is None else shares
    total = 0.0
    for client, share in enumerate(shares):
        chain = links.shortest(links.request_ms(client))
        assert chain is not None, "a placement that covers all blocks has a chain"
        total += share * (problem.setup_ms + chain.ms)
    return total / math.fsum(shares) / 1000


def design_load(problem: Problem, requests_per_s: float, shares: Sequence[float] | None = None) -> DesignLoad:
    """Return the load to plan for at a rate of arrivals: one request at least. Raises `UsageError`."""
    if not (math.isfinite(requests_per_s) and requests_per_s > 0):
        raise UsageError(f"requests_per_s must be above 0, not {requests_per_s}")
    single_s = single_request_s(problem, shares)
    offered = requests_per_s * single_s
    wanted = round(offered + math.sqrt(offered))
    return DesignLoad(max(1, min(wanted, problem.most_requests())), offered, single_s)


def share_out(requests: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Divide whole requests by shares, largest remainders first."""
    total = math.fsum(shares)
    exact = [requests * share / total for share in shares]
    whole = [math.floor(each) for each in exact]
    rest = sorted(range(len(shares)), key=lambda i: (whole[i] - exact[i], i))
    for i in rest[: requests - sum(whole)]:
        whole[i] += 1
    return tuple(whole)


def at_rate(problem: Problem, requests_per_s: float, shares: Sequence[float] | None = None) -> Problem:
    """Return the problem at the design load of a rate, divided by the shares of clients."""
    shares = [1.0] * problem.clients if shares is None else shares
    return with_requests(problem, share_out(design_load(problem, requests_per_s, shares).requests, shares))
