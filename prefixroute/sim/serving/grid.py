"""``prefixroute simulate grid``: every policy over cells of a grid, as ratios to no routing, and the missed bars.

Rules:
1. A cell is a fleet, a workload, a cache, a pace of gossip, a load and a delay; all policies see the same requests.
2. A sample is stratified: each level of each factor comes equally often. The seed decides the sample.
3. Seeds 1 to 9 are for tuning; the command uses others by default.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import product
from statistics import median
from typing import Any, NamedTuple

from prefixroute import UsageError

from ..parallel import Progress, add_run_options, check_writable, run_all, write_json
from .cells import DEFAULT, RULES, CellSettings, cell, run_policies, summary, table
from .figures import Figures

NODES = (4, 8)
WORKLOADS = ("uniform", "zipf1.1", "zipf1.5", "zipf2", "zipf2.5")
CAPACITIES = (0.05, 0.25, 0.5, 1.1)
GOSSIP_S = (0.5, 2.0, 10.0, 30.0)
LOADS = (0.3, 0.6, 0.85)
DELAYS_S = (0.0005, 0.002, 0.02, 0.05, 0.2, 1.0)
MOVING = ("rotate", "flash", "conversations")
"""Workloads that change during a run; conversations have cache capacities of their own."""
SESSION_CAPACITIES = (0.02, 0.1, 0.2)

OTHERS = tuple(name for name in ("none", "longest", "least", "greedy") if name != DEFAULT)
POLICIES = tuple(dict.fromkeys((*OTHERS, DEFAULT, "exact")))
FIRST_SEED = 101


class CellRatios(NamedTuple):
    """The default rule in one cell: mean and p99 as ratios to no routing, and its mean over the best other policy's."""

    mean: float
    p99: float
    regret: float


BARS: tuple[tuple[str, Callable[[CellRatios], bool]], ...] = (
    ("mean against no routing above 1.01", lambda row: row.mean > 1.01),
    ("p99 against no routing above 1.05", lambda row: row.p99 > 1.05),
    ("more than 1.05 of the best other policy", lambda row: row.regret > 1.05),
)
"""The bars of each cell, by name: a test that is true when the cell misses the bar."""


class GridSize(NamedTuple):
    """How much of the grid is run: cells (0: all), cells among them with moving workloads, and requests and seeds."""

    cells: int
    moving: int
    requests: int
    seeds: int


QUICK, NORMAL, FULL = GridSize(60, 12, 800, 1), GridSize(300, 60, 1200, 3), GridSize(0, 60, 2500, 3)


def all_cells(requests: int) -> list[CellSettings]:
    """Return the 2,880 cells of the whole grid."""
    levels = product(NODES, WORKLOADS, CAPACITIES, GOSSIP_S, LOADS, DELAYS_S)
    return [CellSettings(*row, requests=requests) for row in levels]


def sample(n: int, workloads: Sequence[str], requests: int, rng: random.Random) -> list[CellSettings]:
    """Draw `n` different cells in which each level of each factor comes equally often, give or take one."""
    found: dict[CellSettings, None] = {}
    while len(found) < n:
        missing = n - len(found)
        columns = []
        for levels in (NODES, workloads, CAPACITIES, GOSSIP_S, LOADS, DELAYS_S):
            column = [levels[i % len(levels)] for i in range(missing)]
            rng.shuffle(column)
            columns.append(column)
        for nodes, workload, capacity, gossip_s, load, delay_s in zip(*columns, strict=True):
            share = rng.choice(SESSION_CAPACITIES) if workload == "conversations" else capacity
            found[CellSettings(nodes, workload, share, gossip_s, load, delay_s, requests)] = None
    return list(found)


def cells_of(size: GridSize, seed: int) -> list[CellSettings]:
    """Return the cells of a run; cells that share a trace stand next to each other."""
    rng = random.Random(f"{seed}/sample")
    still = sample(size.cells - size.moving, WORKLOADS, size.requests, rng) if size.cells else all_cells(size.requests)
    chosen = still + sample(size.moving, MOVING, size.requests, rng)
    return sorted(chosen, key=lambda c: (c.workload, c.nodes, c.capacity, c.load, c.gossip_s, c.delay_s))


def _task(task: tuple[CellSettings, tuple[str, ...], int]) -> dict[str, Figures]:
    settings, policies, seed = task
    return {policy: runs[0] for policy, runs in run_policies(settings, policies, (seed,)).items()}


def run(
    cells: Sequence[CellSettings],
    seeds: Sequence[int],
    workers: int,
    progress: Callable[[int], None] | None = None,
    policies: Sequence[str] = POLICIES,
) -> dict[str, Any]:
    """Run every cell with every seed; return what the command writes as JSON."""
    chosen = tuple(dict.fromkeys(("none", *policies)))
    tasks = [(settings, chosen, seed) for settings in cells for seed in seeds]
    runs = run_all(_task, tasks, workers, progress)
    rows = []
    for i, settings in enumerate(cells):
        mine = runs[i * len(seeds) : (i + 1) * len(seeds)]
        by_policy = {policy: [run[policy] for run in mine] for policy in chosen}
        rows.append(_row(settings, seeds, {p: summary(f, by_policy["none"]) for p, f in by_policy.items()}))
    return {"default": DEFAULT, "seeds": list(seeds), "cells": rows, "summary": summarise(rows)}


def _row(settings: CellSettings, seeds: Sequence[int], found: dict[str, dict[str, float]]) -> dict[str, Any]:
    names = ("nodes", "workload", "capacity", "gossip_s", "load", "delay_s", "requests")
    row: dict[str, Any] = {name: value for name, value in asdict(settings).items() if name in names}
    row["seeds"] = list(seeds)
    keys = {"mean_ratio": "mean_ratio", "mean_ratio_ci": "mean_ratio_ci", "p99_ratio": "p99_ratio"}
    keys |= {"hit_rate": "token_hit", "hottest_share": "hottest"}
    for key, name in keys.items():
        row[key] = {policy: round(figures[name], 4) for policy, figures in found.items()}
    return row


def judged(row: dict[str, Any]) -> CellRatios:
    """Return the default rule's ratios in a cell."""
    ratios = row["mean_ratio"]
    best = min(ratios[name] for name in ratios if name in OTHERS)
    return CellRatios(ratios[DEFAULT], row["p99_ratio"][DEFAULT], ratios[DEFAULT] / best)


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the worst cell of each policy, the default's regret, its share of exact knowledge's gain, and misses."""
    policies = list(rows[0]["mean_ratio"])
    found = [judged(row) for row in rows]
    regrets = sorted(row.regret for row in found)
    n = len(rows)
    gain = sum(1 - row["mean_ratio"][DEFAULT] for row in rows)
    most = sum(1 - row["mean_ratio"]["exact"] for row in rows) if "exact" in policies else 0.0
    misses = [
        {"bars": bars, **{k: row[k] for k in ("nodes", "workload", "capacity", "gossip_s", "load", "delay_s")}}
        | {"mean": judge.mean, "p99": judge.p99, "regret": round(judge.regret, 4), "mean_ratio": row["mean_ratio"]}
        for row, judge in zip(rows, found, strict=True)
        if (bars := [name for name, missed in BARS if missed(judge)])
    ]
    return {
        "worst": {policy: max(row["mean_ratio"][policy] for row in rows) for policy in policies},
        "mean": {policy: round(sum(row["mean_ratio"][policy] for row in rows) / n, 4) for policy in policies},
        "worst_p99": {policy: max(row["p99_ratio"][policy] for row in rows) for policy in policies},
        "p99_within_1.05": round(sum(row.p99 <= 1.05 for row in found) / n, 4),
        "regret": {
            "worst": round(regrets[-1], 4),
            "median": round(median(regrets), 4),
            "within_1.05": round(sum(r <= 1.05 for r in regrets) / n, 4),
        },
        "exact_knowledge_share": round(gain / most, 4) if most else None,
        "misses": misses,
    }


def text(result: dict[str, Any]) -> str:
    """Return a summary for people."""
    s = result["summary"]
    lines = [f"{len(result['cells'])} cells, seeds {result['seeds']}, default {result['default']}"]
    lines.append(f"{'policy':<10}{'mean ratio':>11}{'worst':>8}{'worst p99':>11}")
    lines += [f"{p:<10}{s['mean'][p]:>11.3f}{s['worst'][p]:>8.3f}{s['worst_p99'][p]:>11.3f}" for p in s["mean"]]
    regret = s["regret"]
    lines.append(
        f"against the best other policy: worst {regret['worst']:.3f}, median {regret['median']:.3f}, "
        f"{100 * regret['within_1.05']:.1f} % of the cells within 1.05; p99 within 1.05 of none in "
        f"{100 * s['p99_within_1.05']:.1f} %"
    )
    if s["exact_knowledge_share"] is not None:
        lines.append(f"share of exact knowledge's gain: {100 * s['exact_knowledge_share']:.1f} %")
    for miss in s["misses"]:
        where = "n={nodes} {workload} capacity={capacity} T={gossip_s} load={load} D={delay_s}".format(**miss)
        ratios = " ".join(f"{name}={ratio:.3f}" for name, ratio in miss["mean_ratio"].items())
        lines.append(f"misses: {where}: {'; '.join(miss['bars'])} (p99 {miss['p99']:.3f}; {ratios})")
    return "\n".join(lines)


# --- the command -------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="60 cells of 800 requests, one seed: some minutes")
    size.add_argument("--full", action="store_true", help="all 2,880 cells: a night or two")
    size.add_argument(
        "--cell",
        metavar="SETTINGS",
        help="one cell: nodes=4,workload=zipf1.5,capacity=0.5,gossip_s=2,load=0.6,delay_s=0.02,requests=2500",
    )
    add("--seed", type=int, default=FIRST_SEED, metavar="S", help=f"first seed, and of the sample ({FIRST_SEED})")
    add("--seeds", type=int, metavar="N", help="seeds of each cell (3; 1 with --quick and --cell)")
    add("--policies", metavar="LIST", help=f"policies, of {','.join(RULES)} ({','.join(POLICIES)})")
    add_run_options(parser)


def run_options(options: argparse.Namespace) -> int:
    """Run the command. Raises `UsageError` for options that cannot be used."""
    check_writable(options.json)
    if options.seeds is not None and options.seeds < 1:
        raise UsageError("a grid needs seeds >= 1")
    policies = tuple(options.policies.split(",")) if options.policies else POLICIES
    for policy in policies:
        if policy not in RULES and not policy.startswith("exact-"):
            raise UsageError(f"unknown policy {policy!r}: {', '.join(RULES)}")
    if options.cell is not None:
        seeds = range(options.seed, options.seed + (options.seeds or 1))
        rows = cell(**_settings(options.cell), seeds=tuple(seeds), policies=policies)
        if options.json != "-":
            print(table(rows))
        write_json(options.json, rows)
        return 0
    size = QUICK if options.quick else FULL if options.full else NORMAL
    seeds = range(options.seed, options.seed + (options.seeds or size.seeds))
    cells = cells_of(size, options.seed)
    if DEFAULT not in policies:
        raise UsageError(f"a grid needs the default policy among its policies: {DEFAULT}")
    progress = Progress(len(cells) * len(seeds), "runs of all policies", silent=options.json == "-")
    result = run(cells, tuple(seeds), options.workers, progress, policies)
    if options.json != "-":
        print(text(result))
    write_json(options.json, result)
    return 0


def _settings(text: str) -> dict[str, Any]:
    """Read ``name=value,...``; a value that is no number stays text."""
    known = ("nodes", "workload", "capacity", "gossip_s", "load", "delay_s", "requests")
    more = ("fan_out", "timeout_s", "loss", "gossip_delay", "told_rate", "whole_prompts", "digest_bytes")
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, separator, value = part.strip().partition("=")
        if not separator or name not in known + more:
            raise UsageError(f"a cell is given as name=value,... of {', '.join(known + more)}, not {part!r}")
        try:
            whole = name in ("nodes", "requests", "fan_out", "whole_prompts", "digest_bytes")
            found[name] = value if name == "workload" else int(value) if whole else float(value)
        except ValueError:
            raise UsageError(f"{name} must be a number, not {value!r}") from None
    return found
