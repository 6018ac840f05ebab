"""``prefixroute simulate place [FLEET]``: placements and ways of routing on the same arrivals, seed by seed.

Rules:
1. All contenders of a run have the same servers, round trips, arrivals and fixed delays: nothing is added to one side.
2. A gain is a ratio of means over the same seeds; beside it stand the mean of the ratios with its interval, and the
   number of runs in which the contender was worse.
3. Where a contender cannot keep up, its figures depend on the number of requests: that number is part of the result.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from prefixroute import UsageError
from prefixroute.plan import (
    Chain,
    Ledger,
    Links,
    PetalsRates,
    PetalsRouter,
    PetalsSettings,
    Problem,
    Span,
    adaptive,
    at_rate,
    conservative,
    place_petals,
    rates_of,
    read_fleet,
)

from ..intervals import interval
from ..parallel import Progress, add_run_options, check_writable, run_all, write_json
from ..plots import plot_lines
from . import changes_command
from .fleets import FleetShape, made_fleet
from .sessions import Ask, Done, Route, from_trace, poisson, read_arrivals, serve, waiting_route
from .wan import BUILT_IN, network

BASELINE = "petals"


class PlacementCase(NamedTuple):
    """The task of all contenders: a problem, PETALS' view of it, the order in which servers joined, and the load.

    `rate` is requests a second, `shares` each client's share of them.
    """

    problem: Problem
    raw_rtt_ms: Any
    rates: PetalsRates
    joins: list[int]
    rate: float
    shares: Sequence[float]


class PlacedFleet(NamedTuple):
    """A contender's choice: the problem at its design load, spans, slots, and its way of routing."""

    problem: Problem
    spans: Sequence[Span | None]
    slots: Sequence[int]
    route: Callable[[Links], Route]


def _petals(field: PlacementCase, lenient: bool, waiting: bool) -> PlacedFleet:
    settings = PetalsSettings(lenient=lenient)
    spans = place_petals(field.problem, field.joins, settings, field.rates).spans

    def route(links: Links) -> Route:
        router = PetalsRouter(field.problem, links, field.raw_rtt_ms, settings)

        def choose(client: int, ledger: Ledger, now: float) -> Chain | None:
            return router.route(client, ledger)

        return choose

    return PlacedFleet(field.problem, spans, settings.slots(field.problem, spans), waiting_route if waiting else route)


def _conservative(field: PlacementCase) -> PlacedFleet:
    problem = at_rate(field.problem, field.rate, field.shares)
    placement = conservative(problem, problem.concurrent)
    if placement is None:
        raise UsageError(f"{problem.concurrent} concurrent requests do not fit the fleet")
    return PlacedFleet(problem, placement.spans, problem.slots(placement.spans), waiting_route)


def _adaptive(field: PlacementCase) -> PlacedFleet:
    problem = at_rate(field.problem, field.rate, field.shares)
    spans = adaptive(problem).placement.spans
    return PlacedFleet(problem, spans, problem.slots(spans), waiting_route)


CONTENDERS: dict[str, Callable[[PlacementCase], PlacedFleet]] = {
    "petals": lambda field: _petals(field, lenient=False, waiting=False),
    "petals-lenient": lambda field: _petals(field, lenient=True, waiting=False),
    "petals-waiting": lambda field: _petals(field, lenient=False, waiting=True),
    "cg-bp": _conservative,
    "adaptive": _adaptive,
}
"""petals: the baseline's placement and routing, with its reserve of memory; lenient: the same, but sessions may use all
memory; waiting: our routing on PETALS' placement; cg-bp and adaptive: our placements with our routing."""


class PlacementTask(NamedTuple):
    """One run of all contenders: a network (built-in or file) or a fleet file, requests a second, a seed."""

    source: str
    fleet_file: bool
    shape: FleetShape
    rate: float
    requests: int
    seed: int
    trace: str
    contenders: tuple[str, ...]


class PlacementRun(NamedTuple):
    """One contender in one run, in seconds: means of whole requests, first tokens and waits; `p99_s` of the whole."""

    whole_s: float
    first_s: float
    wait_s: float
    p99_s: float


def run_task(task: PlacementTask) -> dict[str, PlacementRun]:
    """Run all contenders on the same fleet and arrivals."""
    field, asks = _drawn(task)
    found = {}
    for name in task.contenders:
        chosen = CONTENDERS[name](field)
        found[name] = _figures(serve(chosen.problem, chosen.spans, chosen.slots, asks, chosen.route))
    return found


def _drawn(task: PlacementTask) -> tuple[PlacementCase, list[Ask]]:
    if task.fleet_file:
        fleet = read_fleet(Path(task.source))
        problem, raw, rng = fleet.problem, fleet.raw_rtt_ms, random.Random(1000 * task.seed + 7)
        rates = rates_of(problem)
        shares: Sequence[float] = [client.share for client in fleet.file.clients]
    else:
        made = made_fleet(network(task.source, task.shape.servers + 4, random.Random(task.seed)), task.seed, task.shape)
        problem, raw, rates, rng = made
        shares = [1.0] * problem.clients
    if task.trace:
        asks = from_trace(read_arrivals(Path(task.trace)), task.rate, task.requests, rng, problem.clients)
    else:
        asks = poisson(task.rate, task.requests, rng, problem.clients, shares)
    joins = rng.sample(range(problem.servers), problem.servers)
    return PlacementCase(problem, raw, rates, joins, task.rate, shares), asks


def _figures(done: Sequence[Done]) -> PlacementRun:
    n = len(done)
    ordered = sorted(each.whole_s for each in done)
    return PlacementRun(
        math.fsum(ordered) / n,
        math.fsum(each.first_s for each in done) / n,
        math.fsum(each.wait_s for each in done) / n,
        ordered[min(int(0.99 * n), n - 1)],
    )


def compare(tasks: Sequence[PlacementTask], workers: int = 1, silent: bool = True) -> list[dict[str, Any]]:
    """Run tasks that differ in their seeds, rates and networks; return a row for each network, rate and contender."""
    runs = run_all(run_task, tasks, workers, Progress(len(tasks), "runs", silent))
    rows = []
    cells = dict.fromkeys((task.source, task.rate) for task in tasks)
    for source, rate in cells:
        mine = [run for task, run in zip(tasks, runs, strict=True) if (task.source, task.rate) == (source, rate)]
        rows += [_row(source, rate, name, mine) for name in mine[0]]
    return rows


def _row(source: str, rate: float, name: str, runs: Sequence[dict[str, PlacementRun]]) -> dict[str, Any]:
    whole = interval([run[name].whole_s for run in runs])
    row: dict[str, Any] = {
        "network": Path(source).stem,
        "rate": rate,
        "contender": name,
        "whole_s": round(whole.mean, 3),
        "whole_half_s": round(whole.half, 3),
        "first_s": round(interval([run[name].first_s for run in runs]).mean, 3),
        "wait_s": round(interval([run[name].wait_s for run in runs]).mean, 3),
        "p99_s": round(interval([run[name].p99_s for run in runs]).mean, 3),
    }
    if BASELINE in runs[0]:
        base = [run[BASELINE].whole_s for run in runs]
        ratios = interval([1 - run[name].whole_s / b for run, b in zip(runs, base, strict=True)])
        row["gain"] = round(1 - whole.mean / interval(base).mean, 4)
        row["gain_by_run"], row["gain_half"] = round(ratios.mean, 4), round(ratios.half, 4)
        row["worse_runs"] = sum(run[name].whole_s > b * (1 + 1e-9) for run, b in zip(runs, base, strict=True))
    return row


# --- the command -------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add("fleet", nargs="?", type=Path, metavar="FLEET", help="a fleet file; without it fleets are drawn on --networks")
    add("--networks", default=",".join(BUILT_IN), metavar="N,...", help="built-in networks or files (all built-in)")
    add("--rates", metavar="R,...", help="requests a second (0.1,0.5,1,2; of the fleet file, if there is one)")
    add("--requests", type=int, default=200, metavar="N", help="requests of a run (200)")
    add("--seeds", type=int, default=5, metavar="S", help="runs of each (5)")
    add("--servers", type=int, default=20, metavar="N", help="servers of a drawn fleet, a fifth of them large (20)")
    add("--clients", type=int, default=1, metavar="N", help="clients of a drawn fleet (1)")
    add("--small-blocks", type=int, default=4, metavar="N", help="most blocks on a small server (4, as published)")
    add("--trace", type=Path, metavar="FILE", help="arrivals from a trace, stretched to the rate, not Poisson")
    add("--contenders", default=",".join(CONTENDERS), metavar="C,...", help=f"of {', '.join(CONTENDERS)}")
    add("--changes", action="store_true", help="a load that jumps, congestion, a lost server: following or staying")
    add("--headroom", type=float, default=0.05, metavar="X", help="with --changes: what room for more may cost (0.05)")
    add("--plot", metavar="FILE", help="draw seconds of a request over the rate, as PNG")
    add_run_options(parser)


def tasks_of(options: argparse.Namespace) -> list[PlacementTask]:
    """Return the runs that options ask for. Raises `UsageError`."""
    contenders = tuple(options.contenders.split(","))
    for name in contenders:
        if name not in CONTENDERS:
            raise UsageError(f"unknown contender {name!r}: {', '.join(CONTENDERS)}")
    if options.requests < 1 or options.seeds < 1:
        raise UsageError("a simulation needs requests >= 1 and seeds >= 1")
    rates = "0.1,0.5,1,2" if options.rates is None else options.rates
    if options.fleet is not None:
        fleet = read_fleet(options.fleet)
        if options.rates is None:
            rates = str(fleet.file.workload.requests_per_s or fleet.problem.concurrent / 60)
    try:
        numbers = [float(text) for text in rates.split(",")]
    except ValueError:
        raise UsageError(f"rates are numbers with commas between, not {rates!r}") from None
    if not all(math.isfinite(rate) and rate > 0 for rate in numbers):
        raise UsageError(f"rates must be above 0, not {rates!r}")
    if options.trace:
        read_arrivals(options.trace)
    shape = FleetShape(options.servers, clients=options.clients, small_blocks=options.small_blocks)
    sources = [str(options.fleet)] if options.fleet else options.networks.split(",")
    if not options.fleet:
        for source in sources:
            network(source, 2)
    trace = str(options.trace) if options.trace else ""
    return [
        PlacementTask(source, options.fleet is not None, shape, rate, options.requests, seed, trace, contenders)
        for source in sources
        for rate in numbers
        for seed in range(options.seeds)
    ]


def run_options(options: argparse.Namespace) -> int:
    """Run the command. Raises `UsageError` for options or a file that cannot be simulated."""
    tasks = tasks_of(options)
    if options.changes:
        return _run_changes(options)
    check_writable(options.json)
    check_writable(options.plot)
    silent = options.json == "-"
    rows = compare(tasks, options.workers, silent)
    if not silent:
        print(table(rows))
        print(
            f"{options.requests} requests a run, {options.seeds} seeds; intervals of 95 %; no fixed delay on any side"
        )
    if options.plot:
        plot(options.plot, rows)
    write_json(options.json, {"requests": options.requests, "seeds": options.seeds, "rows": rows})
    return 0


def _run_changes(options: argparse.Namespace) -> int:
    if options.fleet or options.plot or options.trace:
        raise UsageError("--changes draws fleets and arrivals itself: leave FLEET, --trace and --plot out")
    if options.headroom < 0:
        raise UsageError("--headroom is 0 or more")
    check_writable(options.json)
    rates = [float(text) for text in (options.rates or "0.2,1.6").split(",")]
    if len(rates) != 2:
        raise UsageError("--changes needs two rates: the calm one, and the one that it jumps to, as 0.2,1.6")
    shape = FleetShape(options.servers, clients=options.clients, small_blocks=options.small_blocks)
    tasks = [
        changes_command.StoryTask(source, shape, rates[0], rates[1], options.requests, True, options.headroom, seed)
        for source in options.networks.split(",")
        for seed in range(options.seeds)
    ]
    silent = options.json == "-"
    rows = changes_command.compare_stories(tasks, options.workers, silent)
    if not silent:
        print(changes_command.table(rows))
        print(f"{options.requests} requests after the jump from {rates[0]:g} to {rates[1]:g} a second")
    write_json(options.json, {"requests": options.requests, "seeds": options.seeds, "rows": rows})
    return 0


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as text."""
    head = f"{'network':<14}{'req/s':>7}  {'contender':<16}{'mean s':>16}{'first s':>9}{'wait s':>9}{'p99 s':>9}"
    lines = [head + f"{'gain':>8}{'by run':>16}{'worse':>7}"]
    for row in rows:
        mean = f"{row['whole_s']:.1f} +-{row['whole_half_s']:.1f}"
        line = f"{row['network']:<14}{row['rate']:>7g}  {row['contender']:<16}{mean:>16}"
        line += f"{row['first_s']:>9.1f}{row['wait_s']:>9.1f}{row['p99_s']:>9.1f}"
        if "gain" in row and row["contender"] != BASELINE:
            by_run = f"{row['gain_by_run']:.1%} +-{row['gain_half']:.1%}"
            line += f"{row['gain']:>8.1%}{by_run:>16}{row['worse_runs']:>7}"
        lines.append(line)
    return "\n".join(lines)


def plot(path: str, rows: Sequence[dict[str, Any]]) -> None:
    """Draw the mean over all networks against the rate. Raises `UsageError` without matplotlib."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for name in dict.fromkeys(row["contender"] for row in rows):
        mine = [row for row in rows if row["contender"] == name]
        rates = sorted({row["rate"] for row in mine})
        lines[name] = [
            (rate, float(np.mean([row["whole_s"] for row in mine if row["rate"] == rate]))) for rate in rates
        ]
    plot_lines(path, "a request from arrival to its last token", "requests a second", "seconds, mean", lines, log=True)
