"""Exact placement: two mixed-integer models of placement and routing together. Needs the extra `milp`.

Rules:
1. The block-flow model is the default: it has a variable for each server and block, whatever the number of requests. A
   request may leave a server before the end of its span, so its optimum is a lower bound of the other model's; on all
   instances that were tried the two are equal.
2. The request model is the published one: a route of each request over every pair of servers. Its relaxation is useless
   as a bound, and its size grows with the requests; it is here for comparison.
3. The solver starts from the heuristic's plan, so its answer is never worse than that plan, however short the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from prefixroute.errors import UsageError

from .certificate import lower_bounds
from .milp import LinearModel, Solver, Status
from .problem import Problem, Span
from .spans import Adaptive, Placement, adaptive

Formulation = Literal["block-flow", "request"]


class Exact(NamedTuple):
    """The best placement found, its mean milliseconds a token over all requests, and a bound below all placements."""

    placement: Placement
    ms_per_token: float
    bound: float
    status: Status
    """"optimal": proved within the requested gap; "feasible": the time ran out."""
    solver: Solver

    @property
    def gap(self) -> float:
        """The most that a better placement could gain, as a share of the bound."""
        return self.ms_per_token / self.bound - 1 if self.bound > 0 else math.inf


def solve_exact(
    problem: Problem,
    *,
    formulation: Formulation = "block-flow",
    solver: Solver | None = None,
    time_limit_s: float = 60.0,
    gap: float = 1e-3,
    workers: int = 2,
    seed: int = 0,
    start: Adaptive | None = None,
    use_bound: bool = True,
) -> Exact:
    """Find the best placement and routing of all concurrent requests together, or the best that the time allows.

    `start` defaults to the plan of `adaptive`. With `use_bound` the solver gets the knapsack bound, which on many
    fleets is the optimum and ends the proof at once. Only the hub topology is supported. Raises `UsageError` for
    another topology, for a model that does not fit, and when no solver is installed.
    """
    if problem.hop_ms is not None:
        raise UsageError("exact placement is for the hub topology: leave hop_ms out, or use adaptive placement")
    start = adaptive(problem) if start is None else start
    make = _BlockFlow if formulation == "block-flow" else _Requests
    floor = float(lower_bounds(problem) @ np.asarray(problem.requests)) if use_bound else 0.0
    made = make(problem, floor)
    values = made.start(start)
    broken = made.model.broken(values)
    assert not broken, f"the start breaks rows {broken[:5]}"
    solved = made.model.solve(solver, time_limit_s, gap, values, workers, seed)
    scale = problem.concurrent
    if not solved.values or solved.cost > made.model.cost_of(values):
        bound = max(solved.bound / scale, 0.0)
        return Exact(start.placement, start.assignment.ms_per_token, bound, "feasible", solved.solver)
    placement = Placement(made.spans(solved.values), 0)
    return Exact(placement, solved.cost / scale, solved.bound / scale, solved.status, solved.solver)


class _BlockFlow:
    """x[j, b]: server j holds block b; s[j, b]: its span begins there; y, e by client: requests that run, enter it."""

    def __init__(self, problem: Problem, floor: float) -> None:
        self._problem = problem
        self.model = model = LinearModel(floor, 2.0 * problem.concurrent * problem.blocks)
        most = problem.held_blocks(1).tolist()
        blocks = range(problem.blocks)
        self._servers = servers = [j for j in range(problem.servers) if most[j]]
        clients = [c for c, requests in enumerate(problem.requests) if requests]
        self._clients = clients
        self.x = {(j, b): model.variable(1) for j in servers for b in blocks}
        self.s = {(j, b): model.variable(1, whole=False) for j in servers for b in blocks}
        self.y: dict[tuple[int, int, int], int] = {}
        self.e: dict[tuple[int, int, int], int] = {}
        for c in clients:
            for j in servers:
                work, rtt = float(problem.decode_ms[j]), float(problem.rtt_ms[c, j])
                for b in blocks:
                    self.y[c, j, b] = model.variable(problem.requests[c], work)
                    self.e[c, j, b] = model.variable(problem.requests[c], rtt, whole=False)
            for b in blocks:
                model.row([(self.y[c, j, b], 1) for j in servers], problem.requests[c], problem.requests[c])
        for j in servers:
            held = [(self.x[j, b], 1.0) for b in blocks]
            model.row([(self.s[j, b], 1) for b in blocks], 1)
            model.row(held, most[j])
            for b in blocks:
                before = [(self.x[j, b - 1], -1)] if b else []
                model.row([(self.x[j, b], 1), *before, (self.s[j, b], -1)], 0)
                for c in clients:
                    model.row([(self.y[c, j, b], 1), (self.x[j, b], -problem.requests[c])], 0)
                    stay = [(self.y[c, j, b - 1], -1)] if b else []
                    model.row([(self.y[c, j, b], 1), *stay, (self.e[c, j, b], -1)], 0)
            used = [(self.y[c, j, b], problem.session_bytes) for c in clients for b in blocks]
            memory = float(problem.memory_bytes[j])
            model.row([*((at, problem.block_bytes) for at, _ in held), *used], memory)

    def start(self, plan: Adaptive) -> list[float]:
        values = [0.0] * len(self.model.costs)
        for j, span in enumerate(plan.placement.spans):
            if span is not None:
                values[self.s[j, span.first - 1]] = 1.0
                for b in range(span.first - 1, span.end - 1):
                    values[self.x[j, b]] = 1.0
        for client, chain, requests in plan.assignment.chains:
            b = 0
            for hop in chain.hops:
                values[self.e[client, hop.server, b]] += requests
                for _ in range(hop.blocks):
                    values[self.y[client, hop.server, b]] += requests
                    b += 1
        # A request may enter a server at the block to which another request of its client goes on.
        for (c, j, b), at in self.e.items():
            before = values[self.y[c, j, b - 1]] if b else 0.0
            values[at] = max(values[self.y[c, j, b]] - before, 0.0)
        return values

    def spans(self, values: Sequence[float]) -> tuple[Span | None, ...]:
        found: list[Span | None] = [None] * self._problem.servers
        for j in self._servers:
            held = [b for b in range(self._problem.blocks) if values[self.x[j, b]] > 0.5]
            if held:
                found[j] = Span(held[0] + 1, len(held))
        return tuple(found)


class _Requests:
    """a[j], m[j]: the span of j; for each request r and link (i, j): f, used or not, and its products with the spans.

    Links come from the source (server n) or a server, and lead to a server or to the sink (server n + 1).
    """

    def __init__(self, problem: Problem, floor: float) -> None:
        self._problem = problem
        # A route has at most one link for each server; on a link one flag and four products are not zero.
        units = problem.concurrent * problem.servers * (4.0 * (problem.blocks + 1) + 1)
        self.model = model = LinearModel(floor, units)
        most = problem.held_blocks(1).tolist()
        self._servers = servers = [j for j in range(problem.servers) if most[j]]
        n, top = problem.servers, problem.blocks
        self.a = {j: model.variable(top, least=1) for j in servers}
        self.m = {j: model.variable(most[j], least=1) for j in servers}
        self._owners = [c for c, requests in enumerate(problem.requests) for _ in range(requests)]
        self.f: dict[tuple[int, int, int], int] = {}
        self.products: dict[tuple[int, int, int], tuple[int, int, int, int]] = {}
        for j in servers:
            model.row([(self.a[j], 1), (self.m[j], 1)], top + 1)
        for r, c in enumerate(self._owners):
            for j in servers:
                for i in (n, *(other for other in servers if other != j)):
                    self._link(r, c, i, j)
                self.f[r, j, n + 1] = used = model.variable(1)
                model.row([(used, top + 1), (self.a[j], -1), (self.m[j], -1)], 0)
            model.row([(self.f[r, n, j], 1) for j in servers], 1, 1)
            model.row([(self.f[r, j, n + 1], 1) for j in servers], 1, 1)
            for j in servers:
                into = [(self.f[r, i, j], 1.0) for i in (n, *servers) if i != j]
                model.row([*into, *((self.f[r, j, k], -1.0) for k in (*servers, n + 1) if k != j)], 0, 0)
        for j in servers:
            # The blocks that a request runs at j: the end of j's span, minus the block at which the chain stands.
            run = [
                (at, sign * problem.session_bytes)
                for (_, _, to), four in self.products.items()
                if to == j
                for at, sign in zip(four, (1, 1, -1, -1), strict=True)
            ]
            model.row([(self.m[j], problem.block_bytes), *run], float(problem.memory_bytes[j]))

    def _link(self, r: int, c: int, i: int, j: int) -> None:
        """The variables and rows of one request on one link: f, then f a_j, f m_j, f a_i, f m_i."""
        model, problem = self.model, self._problem
        n, top = problem.servers, problem.blocks
        work = float(problem.decode_ms[j])
        used = self.f[r, i, j] = model.variable(1, float(problem.rtt_ms[c, j]))
        first, count = model.variable(top + 1, work), model.variable(top, work)
        if i == n:
            # The source ends at block 0, so its first product is constantly 0; it has one block, so the second is f.
            before, width = model.variable(0, -work), model.variable(1, -work)
            model.row([(width, 1), (used, -1)], 0, 0)
            model.row([(first, 1)], 1)
        else:
            before, width = model.variable(top, -work), model.variable(top, -work)
            model.row([(first, 1), (self.a[i], -1), (self.m[i], -1)], 0)
            self._product(before, used, self.a[i], top)
            self._product(width, used, self.m[i], top)
        self._product(first, used, self.a[j], top + 1)
        self._product(count, used, self.m[j], top)
        model.row([(before, 1), (width, 1), (self.a[j], -1), (self.m[j], -1)], -1)
        self.products[r, i, j] = (first, count, before, width)

    def _product(self, product: int, used: int, value: int, top: int) -> None:
        model = self.model
        model.row([(product, 1), (used, -top)], 0)
        model.row([(product, 1), (value, -1)], 0)
        model.row([(value, 1), (used, top), (product, -1)], top)

    def start(self, plan: Adaptive) -> list[float]:
        problem, n = self._problem, self._problem.servers
        values = [0.0] * len(self.model.costs)
        spans = [span or Span(1, 1) for span in plan.placement.spans]
        for j in self._servers:
            values[self.a[j]], values[self.m[j]] = spans[j]
        r = 0
        by_client = sorted(plan.assignment.chains, key=lambda shared: shared.client)
        for _, chain, requests in by_client:
            for _ in range(requests):
                i = n
                for hop in chain.hops:
                    j = hop.server
                    values[self.f[r, i, j]] = 1.0
                    first, count, before, width = self.products[r, i, j]
                    values[first], values[count] = spans[j]
                    values[before], values[width] = spans[i] if i < n else (0, 1)
                    i = j
                values[self.f[r, i, n + 1]] = 1.0
                r += 1
        assert r == problem.concurrent
        return values

    def spans(self, values: Sequence[float]) -> tuple[Span | None, ...]:
        found: list[Span | None] = [None] * self._problem.servers
        for j in self._servers:
            found[j] = Span(round(values[self.a[j]]), round(values[self.m[j]]))
        return tuple(found)
