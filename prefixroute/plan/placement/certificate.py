"""Certificates: what can be proved of a plan without trusting the planner.

Rules:
1. A certificate is computed from the problem and the spans alone, by other code than the planner's.
2. The lower bound holds for every placement and every routing. The upper bound of Theorem 2 holds for the chains of a
   placement made by CG-BP while no more requests than it was designed for are under way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .chains import Links, assign
from .problem import Floats, Problem, Span
from .spans import Placement, conservative, coverage, price_per_block


class Certificate(NamedTuple):
    """The proved properties of a plan; times are mean milliseconds a token over all concurrent requests."""

    covered: bool
    """Every block is on a server."""
    fits: bool
    """Weights and the cache of every session fit the memory of each server."""
    ms_per_token: float
    """Milliseconds when all requests are routed one after the other within the slots; infinite if some do not fit."""
    lower_bound: float
    theorem2_bound: float | None
    """The most that CG-BP, and so `adaptive`, takes for this load; None when CG-BP finds no placement."""

    @property
    def gap(self) -> float:
        """The most by which the plan can be worse than the best plan, as a share of the lower bound."""
        return self.ms_per_token / self.lower_bound - 1


def lower_bounds(problem: Problem) -> Floats:
    """Return for each client a lower bound, in milliseconds a token, of every chain of every placement. O(n L m).

    The bound is a knapsack: all blocks must be run somewhere, a server that runs any of them costs its round trip once,
    and runs no more blocks than it can hold beside one session.
    """
    most = problem.held_blocks(1).tolist()
    entry = problem.rtt_ms if problem.hop_ms is None else _cheapest_entry(problem)
    ways = np.full((problem.clients, problem.blocks + 1), np.inf)
    ways[:, 0] = 0.0
    for j, most_blocks in enumerate(most):
        if most_blocks < 1:
            continue
        best = ways.copy()
        work = float(problem.decode_ms[j])
        for blocks in range(1, most_blocks + 1):
            np.minimum(best[:, blocks:], ways[:, :-blocks] + (entry[:, j, None] + work * blocks), out=best[:, blocks:])
        ways = best
    back = 0.0 if problem.hop_ms is None else problem.rtt_ms.min(axis=1) / 2
    found: Floats = ways[:, problem.blocks] + back
    return found


def _cheapest_entry(problem: Problem) -> Floats:
    """Return the least cost of reaching each server: from the client, or from any other server."""
    assert problem.hop_ms is not None
    hops = problem.hop_ms + np.diag(np.full(problem.servers, np.inf))
    cheapest: Floats = np.minimum(problem.rtt_ms / 2, hops.min(axis=0)[None, :])
    return cheapest


def theorem2_bound(problem: Problem, placement: Placement) -> float | None:
    """Return the most milliseconds that a token takes for any client, with `placement.design` requests at most.

    The bound is the cost of the chain of the first servers that cover all blocks, each used from the end of the one
    before it. None for a placement that `conservative` did not make.
    """
    if not placement.complete_after:
        return None
    first = placement.order[: placement.complete_after]
    if problem.hop_ms is not None:
        spans = [span if j in first else None for j, span in enumerate(placement.spans)]
        links = Links(problem, spans)
        chains = [links.shortest(links.token_ms(client)) for client in range(problem.clients)]
        return max(math.inf if chain is None else chain.ms for chain in chains)
    held = problem.held_blocks(placement.design)
    price = price_per_block(problem, held)
    total = int(held[list(first)].sum())
    whole = math.fsum(float(price[j]) * int(held[j]) for j in first)
    return whole - float(problem.decode_ms[first[-1]]) * (total - problem.blocks)


def certify(problem: Problem, placement: Placement) -> Certificate:
    """Return the certificate of a placement at the problem's load."""
    slots = problem.slots(placement.spans)
    covered = bool(coverage(problem, placement.spans).min() > 0)
    found = assign(problem, Links(problem, placement.spans), slots) if covered else None
    used = [0] * problem.servers
    for shared in found.chains if found else ():
        for hop in shared.chain.hops:
            used[hop.server] += hop.blocks * shared.requests
    promised = placement if placement.design >= problem.concurrent else conservative(problem, problem.concurrent)
    weights = np.asarray(problem.requests, np.float64)
    return Certificate(
        covered,
        found is not None and _fits(problem, placement.spans, used),
        found.ms_per_token if found else math.inf,
        float(lower_bounds(problem) @ weights / problem.concurrent),
        None if promised is None else theorem2_bound(problem, promised),
    )


def _fits(problem: Problem, spans: Sequence[Span | None], used: Sequence[int]) -> bool:
    return all(
        problem.block_bytes * (span.blocks if span else 0) + problem.session_bytes * slots <= memory * (1 + 1e-9)
        for span, slots, memory in zip(spans, used, problem.memory_bytes.tolist(), strict=True)
    )
