#!/usr/bin/env python3
"""Placement of model blocks: every bar, met or missed.

    python benchmarks/plan_place.py [--only exact,adaptive,online,studies,changes] [--graphs DIR] [--json [FILE]]

*exact*: CP-SAT and HiGHS on small instances, and on nine servers by 70 blocks. *adaptive*: thirty servers by seventy
blocks at 140 requests, against the lower bound, with times. *online*: our placement and routing against PETALS' on
three networks, 0.1 to 4 requests a second, the same arrivals and no fixed delay on either side: no cell's mean may be
worse, and at 1 and 2 requests a second a quarter must be saved. *studies*: a thousand scenarios, planned and simulated.
*changes*: a placement that follows load and fleet against one that stays.

The built-in networks are made of distances; with --graphs the topology files Abvt, Bellcanada and GtsCe of a folder are
used. Times are wall times on this machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import mean

import numpy as np
from workbench.bars import Row, publish

from prefixroute.plan import Problem, Solver, adaptive, certify, conservative, solve_exact
from prefixroute.sim.parallel import run_all
from prefixroute.sim.placement.changes_command import StoryTask, compare_stories
from prefixroute.sim.placement.command import CONTENDERS, PlacementTask, compare, run_task
from prefixroute.sim.placement.fleets import FleetShape
from prefixroute.sim.placement.wan import BUILT_IN

GRAPHS = ("Abvt", "Bellcanada", "GtsCe")
RATES = (0.1, 0.5, 1.0, 2.0, 3.0, 4.0)
SAVED = {1.0: 0.75, 2.0: 0.75}
"""Requests a second at which the mean must be no more than this share of the baseline's."""


def drawn(servers: int, blocks: int, large: float, clients: int, requests: int, seed: int) -> Problem:
    """The instances of the planner's tests: round trips uniform from 105 to 220 ms, memory in GB."""
    draw = np.random.default_rng(seed)
    chosen = set(draw.choice(servers, max(1, round(large * servers)), False).tolist())
    rtt = draw.uniform(105, 220, (clients, servers))
    return Problem.of(
        blocks=blocks,
        block_bytes=1.3232,
        session_bytes=2 * 14336 * 148 * 2 / 1e9,
        memory_bytes=[79.13 if j in chosen else 8.2 for j in range(servers)],
        decode_ms=[3.2197 if j in chosen else 16.2488 for j in range(servers)],
        rtt_ms=rtt,
        requests=[requests // clients] * clients,
    )


def exact(seeds: int) -> Iterator[Row]:
    """Exact placement: times and gaps."""
    small = drawn(6, 12, 0.34, 1, 2, 1)
    solvers: tuple[Solver, ...] = ("cp-sat", "highs")
    for solver in solvers:
        start = time.perf_counter()
        found = solve_exact(small, solver=solver, use_bound=False)
        took = time.perf_counter() - start
        yield Row(
            f"exact, 6 servers x 12 blocks, R = 2, {solver}: ms a token (179.497)", found.ms_per_token, "ms", 179.498
        )
        yield Row(f"exact, 6 servers x 12 blocks, R = 2, {solver}: time", took, "s")
    middle = drawn(9, 70, 0.23, 1, 4, 1)
    for told, bar in ((True, 10.0), (False, None)):
        times, cpu, gaps = [], [], []
        for seed in range(seeds):
            start, used = time.perf_counter(), time.process_time()
            found = solve_exact(middle, solver="cp-sat", use_bound=told, seed=seed)
            times.append(time.perf_counter() - start)
            cpu.append(time.process_time() - used)
            gaps.append(found.gap if found.status == "optimal" else 1.0)
        how = "told the knapsack bound" if told else "without the knapsack bound"
        name = f"exact, 9 servers x 70 blocks, R = 4, cp-sat {how}"
        yield Row(f"{name}: gap, most of {seeds}", max(gaps), "of the bound", 1e-3)
        yield Row(f"{name}: time to proven optimum, most of {seeds}", max(times), "s", bar)
        yield Row(f"{name}: processor time, most of {seeds}", max(cpu), "s")
    large = drawn(30, 70, 0.2, 1, 20, 1)
    start = time.perf_counter()
    found = solve_exact(large, solver="cp-sat")
    yield Row("exact, 30 servers x 70 blocks, R = 20, cp-sat told the bound: gap", found.gap, "of the bound", 1e-3)
    yield Row("exact, 30 servers x 70 blocks, R = 20, cp-sat told the bound: time", time.perf_counter() - start, "s")


def adaptive_rows(seeds: int) -> Iterator[Row]:
    """Adaptive reservation against the lower bound, at the load where CG-BP alone loses."""
    for clients in (1, 4):
        ratios, fixed, times = [], [], []
        for seed in range(1, seeds + 1):
            problem = drawn(30, 70, 0.2, clients, 140, seed)
            start = time.perf_counter()
            plan = adaptive(problem)
            times.append(time.perf_counter() - start)
            certificate = certify(problem, plan.placement)
            assert certificate.covered and certificate.fits
            ratios.append(1 + certificate.gap)
            alone = conservative(problem, 140)
            assert alone is not None
            fixed.append(1 + certify(problem, alone).gap)
        name = f"30 servers x 70 blocks, R = 140, {clients} client{'s' * (clients > 1)}, {seeds} seeds"
        yield Row(f"{name}: adaptive over the lower bound, most", max(ratios), "x", 1.05)
        yield Row(f"{name}: adaptive over the lower bound, mean", mean(ratios), "x")
        yield Row(f"{name}: CG-BP alone over the lower bound, mean", mean(fixed), "x")
        yield Row(f"{name}: time of a plan, most", max(times), "s", 1.0)


def online(graphs: Path | None, seeds: int, requests: int, rates: tuple[float, ...], workers: int) -> Iterator[Row]:
    """Ours against PETALS, both of its memory rules, on the same arrivals."""
    sources = [str(graphs / f"{name}.graph") for name in GRAPHS] if graphs else list(BUILT_IN)
    names = ("petals", "petals-lenient", "cg-bp", "adaptive")
    tasks = [
        PlacementTask(source, False, FleetShape(), rate, requests, seed, "", names)
        for source in sources
        for rate in rates
        for seed in range(seeds)
    ]
    rows = compare(tasks, workers)
    worse = 0
    for row in rows:
        name = f"online, {row['network']}, {row['rate']:g} req/s, {row['contender']}"
        yield Row(f"{name}: mean completion (+- {row['whole_half_s']:.1f})", row["whole_s"], "s")
        if row["contender"] != "adaptive":
            continue
        worse += row["gain"] < 0
        by_run = (
            f"by run {1 - row['gain_by_run']:.2f} +- {row['gain_half']:.2f}, worse in {row['worse_runs']} of {seeds}"
        )
        yield Row(f"{name}: over petals ({by_run})", 1 - row["gain"], "x", SAVED.get(row["rate"], 1.0))
        lenient = next(
            each["whole_s"]
            for each in rows
            if (each["network"], each["rate"], each["contender"]) == (row["network"], row["rate"], "petals-lenient")
        )
        yield Row(f"{name}: over petals-lenient", row["whole_s"] / lenient, "x", 1.0)
    yield Row(f"online, {seeds} seeds of {requests} requests: cells with a mean worse than petals'", worse, "cells", 0)


def studies(scenarios: int, workers: int) -> Iterator[Row]:
    """Many what-if scenarios: a plan and a hundred simulated requests of each."""
    shape = FleetShape(servers=30)
    tasks = [
        PlacementTask(BUILT_IN[i % 3], False, shape, (0.5, 1.0, 2.0, 3.0)[i % 4], 100, i, "", ("adaptive",))
        for i in range(scenarios)
    ]
    start = time.perf_counter()
    found = run_all(run_task, tasks, workers)
    took = time.perf_counter() - start
    assert len(found) == scenarios and all("adaptive" in each for each in found)
    name = f"{scenarios:,} scenarios, 30 servers x 70 blocks, plan and 100 requests, {workers} processes"
    yield Row(f"{name}: time", took, "s", 120.0 * scenarios / 1000)


def changes(seeds: int, requests: int, workers: int) -> Iterator[Row]:
    """A load that jumps, congestion that comes and goes, a large server that leaves: following against staying."""
    stories = [("a jump from 0.2 to 1.6 req/s", 0.0, False), ("the jump, with headroom", 0.05, False)]
    stories += [("jump, congestion and a large server lost", 0.05, True)]
    for what, headroom, trouble in stories:
        tasks = [StoryTask("world", FleetShape(), 0.2, 1.6, requests, trouble, headroom, seed) for seed in range(seeds)]
        (row,) = compare_stories(tasks, workers)
        assert row["unserved"] == 0
        name = f"changes, {what}, {seeds} seeds"
        yield Row(f"{name}: mean completion, stays (+- {row['stays_half_s']:.0f})", row["stays_s"], "s")
        yield Row(f"{name}: mean completion, follows (+- {row['follows_half_s']:.0f})", row["follows_s"], "s")
        yield Row(f"{name}: following over staying", row["follows_s"] / row["stays_s"], "x", 1.0)
        yield Row(f"{name}: moves of a run", row["moves"], "moves")
        yield Row(f"{name}: time with a block on no server", row["gaps_s"], "s", 0.0)
        if row["answered_s"] is not None and not trouble:
            yield Row(f"{name}: from the jump until a server is told to move, most", row["answered_s"], "s", 20.0)


def main() -> int:
    """Print the table, and write it as JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("exact", "adaptive", "online", "studies", "changes")
    parser.add_argument("--only", default=",".join(parts), help="parts (all)")
    parser.add_argument("--graphs", type=Path, help="a folder with Abvt.graph, Bellcanada.graph, GtsCe.graph")
    parser.add_argument("--seeds", type=int, default=10, help="seeds of each cell (10)")
    parser.add_argument("--requests", type=int, default=200, help="requests of a run (200)")
    parser.add_argument("--rates", default=",".join(f"{rate:g}" for rate in RATES), help="requests a second")
    parser.add_argument("--scenarios", type=int, default=1000, help="what-if scenarios (1000)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (one a core)")
    parser.add_argument("--json", nargs="?", const="-", help="write the rows as JSON (- and no FILE: print them)")
    options = parser.parse_args()
    assert set(CONTENDERS) >= {"petals", "adaptive"}
    rates = tuple(float(rate) for rate in options.rates.split(","))
    runs = {
        "exact": partial(exact, min(options.seeds, 3)),
        "adaptive": partial(adaptive_rows, min(options.seeds, 10)),
        "online": partial(online, options.graphs, options.seeds, options.requests, rates, options.workers),
        "studies": partial(studies, options.scenarios, options.workers),
        "changes": partial(changes, min(options.seeds, 5), options.requests * 3, options.workers),
    }
    publish([(part, runs[part]()) for part in options.only.split(",")], options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
