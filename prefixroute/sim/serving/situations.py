"""``prefixroute simulate situations``: where requests enter, held against no routing and against the other policies.

| rows | what | held against |
|---|---|---|
| own | 80 to 100 % of each node's traffic is its own; caches hold 0.7 to 2 times what is asked for there | no routing |
| gateway | one hot prefix through a gateway, clients that wait for their answers | the best other policy |
| entry | the same, all clients at one serving node | the same |

Rules:
1. A row's bars hold for each of its seeds, not for their mean.
2. *Late* is the last third of a run: a collapse grows, and a mean over the whole run hides it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

from prefixroute import UsageError

from ..parallel import Progress, add_run_options, add_seed_options, check_writable, run_all, seeds_of, write_json
from .cells import DEFAULT, CellSettings, run_cell, trace_of
from .closed_loop import ClosedLoop, ClosedRun, counted
from .serving_engine import Speed

FAST, SLOW = Speed(0.02, 1 / 8000), Speed(0.1, 0.001)
"""An engine of the default pace, and one of the grid."""

WHOLE_BAR, LATE_BAR = 1.05, 1.02
GATEWAY_BAR, HOTTEST_BAR = 0.98, 0.35
ENTRY_BAR, ENTRY_HOTTEST_BAR, SETTLED_S = 0.95, 0.4, 5.0
OTHERS = ("greedy", "least")


class OwnRow(NamedTuple):
    """A fleet whose nodes have traffic of their own: `cache` is a share of one node's set, `requests` are a node's."""

    nodes: int
    own: float
    cache: float
    load: float
    speed: Speed = FAST
    gossip_s: float = 1.0
    delay_s: float = 0.0005
    requests: int = 1000

    def cell(self) -> CellSettings:
        """Return the row as a cell: there a cache is a share of all sets."""
        return CellSettings(
            self.nodes,
            "own0.5",
            self.cache / self.nodes,
            self.gossip_s,
            self.load,
            self.delay_s,
            self.requests * self.nodes,
            speed=self.speed,
            workload_options=(("own", self.own),),
        )

    @property
    def name(self) -> str:
        """The row in words."""
        engine = "slow" if self.speed is SLOW else "fast"
        way = f", {1000 * self.delay_s:g} ms" if self.delay_s > 0.01 else ""
        return f"own {self.own:.0%}, caches {self.cache:g}, load {self.load:.0%}, n = {self.nodes}, {engine}{way}"


OWN = (
    *(OwnRow(4, 1.0, cache, 0.85) for cache in (0.7, 1.0, 1.3, 2.0)),
    *(OwnRow(4, 1.0, 1.0, load) for load in (0.5, 0.7)),
    *(OwnRow(4, own, 1.0, 0.85) for own in (0.98, 0.95, 0.9, 0.8)),
    *(OwnRow(4, own, 2.0, 0.5) for own in (0.98, 0.9)),
    *(OwnRow(4, own, 1.0, 0.7, SLOW, 2.0, 0.002) for own in (1.0, 0.95)),
    OwnRow(4, 1.0, 1.0, 0.85, delay_s=0.2),
    *(OwnRow(16, own, 1.0, 0.85, requests=400) for own in (1.0, 0.95)),
)
CLOSED = (
    *(ClosedLoop(clients, gateway=True) for clients in (16, 48, 64)),
    *(ClosedLoop(clients) for clients in (48, 64)),
)


class Ratios(NamedTuple):
    """Mean of the default rule over that of no routing: of the whole run, and late."""

    whole: float
    late: float


def _own(task: tuple[int, int]) -> Ratios:
    i, seed = task
    return own_ratios(OWN[i], seed)


def own_ratios(row: OwnRow, seed: int) -> Ratios:
    """Run a row with one seed, with the default rule and without routing."""
    cell = row.cell()
    trace = trace_of(cell, seed)
    none, mine = (run_cell(cell, policy, seed, trace).served.latency_s for policy in ("none", DEFAULT))
    third = len(none) * 2 // 3
    return Ratios(sum(mine) / sum(none), sum(mine[third:]) / sum(none[third:]))


def _closed(task: tuple[int, int]) -> dict[str, tuple[int, float, float]]:
    """Return by policy the answers once settled, their mean and the busiest engine's share."""
    i, seed = task
    loop = CLOSED[i]
    since = 0.0 if loop.gateway else SETTLED_S
    return {policy: counted(ClosedRun(loop, policy, seed).last(), since) for policy in (DEFAULT, *OTHERS)}


def run(seeds: Sequence[int], workers: int, silent: bool = True) -> dict[str, Any]:
    """Run all rows; return what the command writes as JSON."""
    tasks = [(i, seed) for i in range(len(OWN)) for seed in seeds]
    found = run_all(_own, tasks, workers, Progress(len(tasks), "runs of own traffic", silent))
    rows: list[dict[str, Any]] = []
    for i, row in enumerate(OWN):
        mine = found[i * len(seeds) : (i + 1) * len(seeds)]
        whole, late = max(one.whole for one in mine), max(one.late for one in mine)
        figures = {"whole": round(whole, 4), "late": round(late, 4)}
        rows.append({"what": row.name, **figures, "ok": whole <= WHOLE_BAR and late <= LATE_BAR})
    tasks = [(i, seed) for i in range(len(CLOSED)) for seed in seeds]
    closed = run_all(_closed, tasks, workers, Progress(len(tasks), "runs of clients that wait", silent))
    loops: list[dict[str, Any]] = []
    for i, loop in enumerate(CLOSED):
        mine_by = closed[i * len(seeds) : (i + 1) * len(seeds)]
        share = min(one[DEFAULT][0] / max(one[other][0] for other in OTHERS) for one in mine_by)
        hottest = max(one[DEFAULT][2] for one in mine_by)
        least, most = (GATEWAY_BAR, HOTTEST_BAR) if loop.gateway else (ENTRY_BAR, ENTRY_HOTTEST_BAR)
        where = "a gateway" if loop.gateway else "one node"
        what = f"one hot prefix, {loop.clients} clients at {where}"
        ok = share >= least and hottest <= most
        loops.append({"what": what, "answers_of_best": round(share, 4), "hottest": round(hottest, 3), "ok": ok})
    ok = all(entry["ok"] for entry in (*rows, *loops))
    return {"seeds": list(seeds), "default": DEFAULT, "own": rows, "closed": loops, "ok": ok}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_seed_options(parser, 101, 3)
    add_run_options(parser)


def run_options(options: argparse.Namespace) -> int:
    """Run the command; return 1 if a bar is missed. Raises `UsageError` for options that cannot be used."""
    if options.seeds < 1:
        raise UsageError("situations need seeds >= 1")
    check_writable(options.json)
    silent = options.json == "-"
    seeds = seeds_of(options)
    result = run(seeds, options.workers, silent)
    if not silent:
        print(f"the default rule ({DEFAULT}), seeds {list(seeds)}: the worst seed of each row")
        print(f"{'mean over that of no routing':<58}{'whole':>9}{'late':>9}")
        for row in result["own"]:
            verdict = "ok" if row["ok"] else "MISSED"
            print(f"{row['what']:<58}{row['whole']:>9.3f}{row['late']:>9.3f}  {verdict}")
        print(f"{'answers over those of the best other policy':<58}{'answers':>9}{'hottest':>9}")
        for row in result["closed"]:
            verdict = "ok" if row["ok"] else "MISSED"
            print(f"{row['what']:<58}{row['answers_of_best']:>9.3f}{row['hottest']:>9.2f}  {verdict}")
    write_json(options.json, result)
    return 0 if result["ok"] else 1
