"""Mixed-integer linear models, and the two solvers for them: OR-tools' CP-SAT, and HiGHS through SciPy.

Rules:
1. A model is lists of numbers; both solvers read the same model.
2. CP-SAT takes whole numbers. Costs are rounded to a millionth of the largest, and the bound allows for that. Rows of
   fractions are rounded to a part in 10^9, upwards in what they forbid no more than the planners' own rounding.
3. Solvers are extras, imported when used; a missing one is a UsageError that says what to install.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from prefixroute.errors import UsageError

Solver = Literal["cp-sat", "highs"]
Status = Literal["optimal", "feasible", "infeasible", "unknown"]

COST_STEPS = 1e6
ROW_STEPS = 1e9
TOLERANCE = 1e-9
INSTALL = "the exact planner needs its extra, run: pip install 'prefixroute[milp]'"


class Constraint(NamedTuple):
    """Terms (variable, factor) whose sum is between two bounds, either of which may be infinite."""

    terms: tuple[tuple[int, float], ...]
    least: float
    most: float


class Solved(NamedTuple):
    """A solver's result: no solution costs less than `bound`; without one `values` is empty and `cost` infinite."""

    status: Status
    values: tuple[float, ...]
    cost: float
    bound: float
    solver: Solver


class LinearModel:
    """Variables with bounds and costs, and rows; the sum of costs is minimised."""

    __slots__ = ("costs", "floor", "least", "most", "rows", "units", "whole")

    def __init__(self, floor: float = 0.0, units: float = 0.0) -> None:
        self.floor = floor
        """A known lower bound of the cost, which saves the solver the proof; 0 if none is known."""
        self.units = units
        """An upper bound of the sum of all variables with a cost, in any solution worth finding."""
        self.costs: list[float] = []
        self.least: list[float] = []
        self.most: list[float] = []
        self.whole: list[bool] = []
        self.rows: list[Constraint] = []

    def variable(self, most: float, cost: float = 0.0, least: float = 0.0, whole: bool = True) -> int:
        """Add a variable; return its number. One that is not `whole` may be solved as an integer without loss."""
        self.costs.append(cost)
        self.least.append(least)
        self.most.append(most)
        self.whole.append(whole)
        return len(self.costs) - 1

    def row(self, terms: Sequence[tuple[int, float]], most: float = math.inf, least: float = -math.inf) -> None:
        """Add a row."""
        self.rows.append(Constraint(tuple(terms), least, most))

    def cost_of(self, values: Sequence[float]) -> float:
        """Return the cost of a solution."""
        return math.fsum(cost * value for cost, value in zip(self.costs, values, strict=True))

    def broken(self, values: Sequence[float], slack: float = 1e-6) -> list[int]:
        """Return the numbers of rows that a solution breaks, for checks of warm starts and of solvers."""
        found = []
        for i, row in enumerate(self.rows):
            total = math.fsum(factor * values[at] for at, factor in row.terms)
            room = slack * max(1.0, *(abs(factor) for _, factor in row.terms))
            if not row.least - room <= total <= row.most + room:
                found.append(i)
        return found

    def solve(
        self,
        solver: Solver | None,
        time_limit_s: float,
        gap: float,
        start: Sequence[float] | None = None,
        workers: int = 1,
        seed: int = 0,
    ) -> Solved:
        """Solve with this solver, or with CP-SAT and, where it is not installed, HiGHS. Raises `UsageError`."""
        if not (math.isfinite(time_limit_s) and time_limit_s > 0 and gap >= 0 and workers >= 1):
            raise UsageError("a solver needs time_limit_s above 0, a gap of 0 or more and one worker at least")
        if solver is None:
            solver = "cp-sat" if _found("ortools.sat.python.cp_model") else "highs"
        if solver == "cp-sat":
            return _cp_sat(self, time_limit_s, gap, start, workers, seed)
        return _highs(self, time_limit_s, gap, start)


def _found(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"{INSTALL} ({error})") from error


def _whole_row(row: Constraint) -> tuple[list[int], float]:
    """Return the factors of a row as whole numbers, and the number by which they were multiplied."""
    factors = [factor for _, factor in row.terms]
    if all(factor == round(factor) for factor in factors):
        return [round(factor) for factor in factors], 1.0
    scale = ROW_STEPS / max(abs(factor) for factor in factors)
    return [round(factor * scale) for factor in factors], scale


def _cp_sat(
    model: LinearModel, time_limit_s: float, gap: float, start: Sequence[float] | None, workers: int, seed: int
) -> Solved:
    cp = _import("ortools.sat.python.cp_model")
    made = cp.CpModel()
    bounds = zip(model.least, model.most, strict=True)
    names = [made.new_int_var(math.ceil(low), math.floor(high), "") for low, high in bounds]
    for row in model.rows:
        factors, scale = _whole_row(row)
        total = cp.LinearExpr.weighted_sum([names[at] for at, _ in row.terms], factors)
        if row.least == row.most:
            made.add(total == round(row.most * scale))
            continue
        if row.most < math.inf:
            made.add(total <= math.floor(row.most * scale + abs(row.most) * scale * TOLERANCE))
        if row.least > -math.inf:
            made.add(total >= math.ceil(row.least * scale - abs(row.least) * scale * TOLERANCE))
    scale = COST_STEPS / max(max(abs(cost) for cost in model.costs), 1e-300)
    costs = [round(cost * scale) for cost in model.costs]
    priced = [(name, cost) for name, cost in zip(names, costs, strict=True) if cost]
    total = cp.LinearExpr.weighted_sum([name for name, _ in priced], [cost for _, cost in priced])
    made.minimize(total)
    if model.floor > 0:
        made.add(total >= math.floor(model.floor * scale * (1 - TOLERANCE) - 0.5 * model.units))
    if start is not None:
        for name, value in zip(names, start, strict=True):
            made.add_hint(name, round(value))
    solver = cp.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.relative_gap_limit = gap
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = seed
    status = solver.solve(made)
    if status in (cp.OPTIMAL, cp.FEASIBLE):
        values = tuple(float(solver.value(name)) for name in names)
        # Rounding a cost moves a solution by half a step for each unit of its variable.
        drift = 0.5 / scale * sum(value for value, cost in zip(values, model.costs, strict=True) if cost)
        bound = max(solver.best_objective_bound / scale - drift, model.floor)
        cost = model.cost_of(values)
        return Solved("optimal" if status == cp.OPTIMAL else "feasible", values, cost, min(bound, cost), "cp-sat")
    if status == cp.INFEASIBLE:
        return Solved("infeasible", (), math.inf, math.inf, "cp-sat")
    return Solved("unknown", (), math.inf, model.floor, "cp-sat")


def _highs(model: LinearModel, time_limit_s: float, gap: float, start: Sequence[float] | None) -> Solved:
    """Solve with SciPy's HiGHS. It takes no start; the cost of the start only bounds the solution from above."""
    optimize, sparse = _import("scipy.optimize"), _import("scipy.sparse")
    rows = [*model.rows]
    priced = tuple((i, cost) for i, cost in enumerate(model.costs) if cost)
    if model.floor > 0:
        rows.append(Constraint(priced, model.floor * (1 - TOLERANCE), math.inf))
    if start is not None:
        dearest = model.cost_of(start)
        rows.append(Constraint(priced, -math.inf, dearest * (1 + TOLERANCE)))
    where = [(at, i, factor) for at, row in enumerate(rows) for i, factor in row.terms]
    table = sparse.coo_array(
        ([factor for *_, factor in where], ([at for at, *_ in where], [i for _, i, _ in where])),
        shape=(len(rows), len(model.costs)),
    ).tocsr()
    limits = optimize.LinearConstraint(table, [row.least for row in rows], [row.most for row in rows])
    found = optimize.milp(
        np.array(model.costs),
        constraints=limits,
        bounds=optimize.Bounds(np.array(model.least), np.array(model.most)),
        integrality=np.array(model.whole, np.int64),
        options={"time_limit": time_limit_s, "mip_rel_gap": gap},
    )
    bound = max(float(found.mip_dual_bound) if found.mip_dual_bound is not None else -math.inf, model.floor)
    if found.x is not None:
        values = tuple(
            float(round(value)) if whole else float(value) for value, whole in zip(found.x, model.whole, strict=True)
        )
        cost = model.cost_of(values)
        return Solved("optimal" if found.status == 0 else "feasible", values, cost, min(bound, cost), "highs")
    if found.status == 2:
        return Solved("infeasible", (), math.inf, math.inf, "highs")
    return Solved("unknown", (), math.inf, bound, "highs")
