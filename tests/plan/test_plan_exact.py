"""Exact placement: both models and both solvers against a search of everything, bounds, starts, missing solvers."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import planning
import pytest

from prefixroute import UsageError
from prefixroute.plan import Problem, adaptive, certify, conservative, solve_exact
from prefixroute.plan.placement.exact import _BlockFlow, _Requests
from prefixroute.plan.placement.milp import LinearModel

SOLVERS = pytest.mark.parametrize("solver", ["cp-sat", "highs"])
MODELS = pytest.mark.parametrize("formulation", ["block-flow", "request"])
SMALL = [
    (planning.U1, 54),
    (planning.small([5, 3, 13], [3, 2, 5], [2, 7, 7], 0.5), 54),
    (planning.small([13, 4, 13], [5, 4, 4], [5, 7, 2], 0.25), 63),
    (planning.small([4, 4, 11], [3, 1, 4], [2, 7, 5], 0.5), 44),
]


@SOLVERS
@MODELS
@pytest.mark.parametrize(("problem", "total"), SMALL)
def test_vectors(problem: Problem, total: float, solver: str, formulation: str) -> None:
    found = solve_exact(problem, formulation=formulation, solver=solver, gap=0.0, workers=1)  # type: ignore[arg-type]
    assert found.ms_per_token * 2 == pytest.approx(total, abs=1e-4)
    assert (found.status, found.solver) == ("optimal", solver)
    assert found.bound <= found.ms_per_token + 1e-9
    assert abs(found.gap) < 1e-4


def fitting(seeds: range, servers: int, blocks: int, clients: int = 1) -> list[Problem]:
    problems = []
    for seed in seeds:
        problem = planning.drawn(seed, clients, servers, blocks)
        if not problem.missing_bytes(problem.concurrent):
            problems.append(problem)
    return problems


@pytest.mark.parametrize(
    "problem", fitting(range(14), 3, 5) + fitting(range(40, 46), 4, 4) + fitting(range(60, 66), 3, 4, 2)
)
def test_exact_equals_a_search_of_everything(problem: Problem) -> None:
    best = planning.optimum(problem)
    found = solve_exact(problem, solver="cp-sat", gap=0.0, workers=1)
    assert found.ms_per_token == pytest.approx(best, abs=1e-4)
    assert planning.least_total(problem, found.placement.spans) / problem.concurrent == pytest.approx(best, abs=1e-4)
    assert certify(problem, found.placement).covered
    heuristic = adaptive(problem).assignment.ms_per_token
    placement = conservative(problem, problem.concurrent)
    assert placement is not None
    certificate = certify(problem, placement)
    assert certificate.theorem2_bound is not None
    order = [
        certificate.lower_bound,
        found.ms_per_token,
        heuristic,
        certificate.ms_per_token,
        certificate.theorem2_bound,
    ]
    assert all(a <= b + 1e-4 for a, b in pairwise(order))


def test_nine_servers_and_seventy_blocks_are_proven_optimal() -> None:
    problem = planning.bloom(9, 70, 0.23, 1, 4, 1)
    found = solve_exact(problem, solver="cp-sat", time_limit_s=60)
    assert found.status == "optimal"
    assert found.ms_per_token == pytest.approx(579.247, abs=1e-3)
    assert found.gap <= 1e-3


@SOLVERS
def test_six_servers_without_the_knapsack_bound(solver: str) -> None:
    problem = planning.bloom(6, 12, 0.34, 1, 2, 1)
    found = solve_exact(problem, solver=solver, use_bound=False)  # type: ignore[arg-type]
    assert found.status == "optimal"
    assert found.ms_per_token == pytest.approx(179.497, abs=1e-3)


@MODELS
def test_the_heuristics_plan_is_a_start_that_breaks_no_row(formulation: str) -> None:
    for problem in [problem for problem, _ in SMALL] + fitting(range(100, 130), 4, 6, 2):
        made = (_BlockFlow if formulation == "block-flow" else _Requests)(problem, 0.0)
        plan = adaptive(problem)
        values = made.start(plan)
        assert made.model.broken(values) == []
        cost = made.model.cost_of(values) / problem.concurrent
        assert cost <= plan.assignment.ms_per_token + 1e-9
        if formulation == "request":
            assert cost == pytest.approx(plan.assignment.ms_per_token)
        spans = made.spans(values)
        held = [j for j, span in enumerate(plan.placement.spans) if span is not None]
        assert [spans[j] for j in held] == [plan.placement.spans[j] for j in held]


def test_sizes_of_the_models_are_the_published_ones() -> None:
    problem = planning.bloom(9, 70, 0.23, 1, 4, 1)
    assert len(_BlockFlow(problem, 0.0).model.costs) == 9 * 70 * 4
    assert len(_Requests(problem, 0.0).model.costs) <= 5 * 4 * 90 + 18


def test_when_time_is_up_the_answer_is_no_worse_than_the_start() -> None:
    problem = planning.bloom(30, 70, 0.2, 1, 140, 1)
    start = adaptive(problem)
    found = solve_exact(problem, solver="highs", time_limit_s=0.05, start=start)
    assert found.ms_per_token <= start.assignment.ms_per_token + 1e-9
    assert found.status == "feasible"
    assert 0 < found.bound <= found.ms_per_token
    assert found.gap > 0


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    hops = np.zeros((3, 3))
    with pytest.raises(UsageError, match="hub topology"):
        solve_exact(replace(planning.U1, hop_ms=hops))
    with pytest.raises(UsageError, match="time_limit_s"):
        solve_exact(planning.U1, time_limit_s=0)
    monkeypatch.setitem(sys.modules, "ortools.sat.python.cp_model", None)
    with pytest.raises(UsageError, match=r"pip install 'prefixroute\[milp\]'"):
        solve_exact(planning.U1, solver="cp-sat")
    assert solve_exact(planning.U1, gap=0.0).solver == "highs"


@SOLVERS
def test_what_cannot_be_solved_is_said(solver: str) -> None:
    model = LinearModel()
    x = model.variable(1, 1.0)
    model.row([(x, 1)], least=2)
    assert model.solve(solver, 10, 0)[:3] == ("infeasible", (), float("inf"))  # type: ignore[arg-type]
    assert model.broken([1.0]) == [0]
