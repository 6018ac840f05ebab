"""``prefixroute simulate stress``: the default rule against no routing in fleets outside the grid; and guards.

Rows are fleets with one thing out of the ordinary: delays of every pair, wrong round trips and rates, slow nodes, lost
datagrams, a crash, sparse digests, batching engines, larger fleets. Guards are runs with nodes that are silent or lie,
and other single figures with a bar.

Rules:
1. Both policies of a row meet the same requests and the same faults.
2. A guard against a bad node counts the forwards that the other nodes still sent to it.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from prefixroute import POLICIES, UsageError

from ..intervals import interval
from ..parallel import Progress, add_run_options, add_seed_options, check_writable, run_all, seeds_of, write_json
from .cells import DEFAULT, CellSettings, run_cell, trace_of
from .faults import Fault, FaultSettings, Faulty, served_once
from .figures import figures
from .gateway_fleet import GatewayRun, GatewaySettings
from .serving_engine import Speed
from .workloads import maker, short_prompts

BASE = CellSettings(4, "zipf1.5", 0.25, 2.0, 0.6, 0.02, 1500)
BASES = {
    "near": BASE,
    "far, little to gain": replace(BASE, workload="zipf2.5", capacity=0.5, load=0.3, delay_s=0.2),
    "very far": replace(BASE, workload="zipf1.1", delay_s=1.0),
}
"""The cells in which every row is run: routing gains much in the first, and next to nothing in the others."""


class StressCase(NamedTuple):
    """A change of every cell, and the bar: the highest ratio allowed of the default rule's mean to no routing's."""

    name: str
    change: Callable[[CellSettings], CellSettings]
    bar: float = 1.02
    faults: tuple[Fault, ...] = ()
    """Faults whose `begin_s` and `end_s` are shares of the run, not seconds."""


class StressRatios(NamedTuple):
    """Mean and p99 as ratios to no routing, and whether every request was answered once."""

    mean: float
    p99: float
    once: bool


def pair_delays(nodes: int, longest_s: float, seed: int = 1) -> tuple[tuple[float, ...], ...]:
    """Return one-way delays in seconds between sites at random places in a square, the same in both directions."""
    rng = random.Random(seed)
    places = [complex(rng.random(), rng.random()) for _ in range(nodes)]
    return tuple(tuple(longest_s * abs(a - b) / 2**0.5 for b in places) for a in places)


def _with(cell: CellSettings, **extra: Any) -> CellSettings:
    return replace(cell, extra=tuple(sorted(extra.items())))


def _larger(cell: CellSettings, nodes: int, requests: int) -> CellSettings:
    # Gossip over many nodes is most of the work; a slower round keeps the run short.
    return replace(cell, nodes=nodes, gossip_s=10.0, requests=requests)


BATCHING = Speed(0.02, 0.001, batch_tokens=2048, output_tokens=50, decode_s=0.001)
ROWS = (
    StressCase("as usual", lambda c: c),
    StressCase(
        "a delay for each pair, n = 8", lambda c: _with(replace(c, nodes=8), delay_s=pair_delays(8, 2 * c.delay_s))
    ),
    StressCase("round trips measured twice too long", lambda c: _with(c, gossip_delay=2.0)),
    StressCase("round trips measured half as long", lambda c: _with(c, gossip_delay=0.5)),
    StressCase("prefill told twice too fast", lambda c: _with(c, told_rate=2.0), 1.05),
    StressCase("prefill told half as fast", lambda c: _with(c, told_rate=0.5), 1.05),
    StressCase(
        "two of four nodes four times slower", lambda c: _with(replace(c, load=0.15), slower=(1.0, 1.0, 4.0, 4.0))
    ),
    StressCase("5 % of datagrams lost", lambda c: _with(c, loss=0.05)),
    StressCase(
        "a node is down for a fifth of the run",
        lambda c: _with(c, timeout_s=10.0),
        1.02,
        (Fault("crash", 1, 0.4, 0.6),),
    ),
    StressCase("digests of few anchors", lambda c: _with(c, digest_bytes=256)),
    StressCase("batching engines", lambda c: replace(c, speed=BATCHING)),
    StressCase("n = 16", lambda c: _larger(c, 16, 2500)),
    StressCase("n = 64", lambda c: _larger(c, 64, 4000)),
)


def _run_row(task: tuple[int, str, int, int | None]) -> StressRatios:
    i, base, seed, requests = task
    row = ROWS[i]
    cell = row.change(BASES[base])
    cell = cell if requests is None else replace(cell, requests=requests)
    trace = trace_of(cell, seed)
    found, once = {}, True
    for policy in ("none", DEFAULT):
        if row.faults:
            length = trace.arrivals[-1].at
            faults = [f._replace(begin_s=f.begin_s * length, end_s=f.end_s * length) for f in row.faults]
            run = Faulty(trace, cell.serving(trace), seed, POLICIES[policy], FaultSettings(tuple(faults)))
            served = run.run()
            once &= served_once(run, served)
            found[policy] = figures(served, trace)
        else:
            found[policy] = run_cell(cell, policy, seed, trace).figures
    none, mine = found["none"], found[DEFAULT]
    return StressRatios(mine.mean_s / none.mean_s, mine.p99_s / none.p99_s, once)


# --- guards ------------------------------------------------------------------------------------------------


def _silent(seed: int) -> float:
    """Return the most forwards, of an origin's first 200, that went to a node that gossips but answers nothing."""
    run, begin, end = _guarded("silent", seed)
    most = 0
    for origin in range(1, run.settings.nodes):
        mine = [tried.target for tried in run.tried if tried.origin == origin and begin <= tried.at < end]
        most = max(most, mine[:200].count(0))
    return float(most)


LIES = {
    "its cache": (("claim_all",), ("cold",)),
    "its load": (("hide_load",), ()),
    "its speed and its load": (("slow", "hide_load"), ("slow",)),
    "everything": (("claim_all", "slow", "hide_load"), ("cold", "slow")),
}
"""By lie: the faults of the liar, and the faults of its truthful twin, a node that is as bad and advertises it."""


def _lies(about: str) -> Callable[[int], float]:
    """Return a guard: the liar's share of forwards after the first 20 to it, less the share of its truthful twin."""
    return partial(_beyond_its_twin, *LIES[about])


def _beyond_its_twin(liar: tuple[str, ...], twin: tuple[str, ...], seed: int) -> float:
    targets, honest = (_targets(_lying(kinds, seed)) for kinds in (liar, twin))
    met = [i for i, target in enumerate(targets) if target == 0]
    if len(met) <= 20:
        return 0.0
    rest = targets[met[20] :]
    return max(0.0, rest.count(0) / len(rest) - honest.count(0) / len(honest))


def _targets(guarded: tuple[Faulty, float, float]) -> list[int]:
    run, begin, end = guarded
    return [tried.target for tried in run.tried if begin <= tried.at < end]


def _lying(kinds: tuple[str, ...], seed: int) -> tuple[Faulty, float, float]:
    cell = replace(BASE, load=0.6, delay_s=0.002, requests=3000, speed=Speed(0.02, 0.0002))
    return _with_faults(_with(cell, timeout_s=4.0), kinds, seed)


def _guarded(kind: str, seed: int) -> tuple[Faulty, float, float]:
    cell = replace(BASE, load=0.3, delay_s=0.002, requests=3000, speed=Speed(0.02, 0.0002))
    return _with_faults(_with(cell, timeout_s=1.0), (kind,), seed)


def _with_faults(cell: CellSettings, kinds: tuple[str, ...], seed: int) -> tuple[Faulty, float, float]:
    """Run a cell with faults of node 0 in the middle of the run; return the run, and their begin and end in seconds."""
    trace = trace_of(cell, seed)
    length = trace.arrivals[-1].at
    begin, end = 0.3 * length, 0.7 * length
    faults = FaultSettings(tuple(Fault(kind, 0, begin, end) for kind in kinds))
    run = Faulty(trace, cell.serving(trace), seed, POLICIES[DEFAULT], faults)
    run.run()
    return run, begin, end


TWO_CACHES = GatewaySettings(gateways=1, hosts=2, endpoints_per_host=1, capacity_tokens=29000)
"""A gateway before two caches: together they have room for one and a half times all topics, one alone has not."""


def _split(seed: int) -> float:
    """Return the share of hits that a gateway loses against the best split, with requests one after another."""
    trace = maker("uniform")(1.0, 1500, 1, seed).at_rate(0.5)
    run = GatewayRun(trace, TWO_CACHES, seed)
    run.run()
    return 1 - run.hit_rate


def _evenness(seed: int) -> float:
    """Return the busier endpoint's share, of two, of prompts shorter than a block that come one after another."""
    trace = short_prompts(1000, 1, seed).at_rate(0.5)
    run = GatewayRun(trace, TWO_CACHES, seed)
    run.run()
    return max(run.sent.values()) / 1000


SLOW_GOSSIP = (("zipf1.5", 0.25, 0.002), ("zipf1.1", 0.5, 0.02), ("uniform", 0.5, 0.2), ("zipf2", 0.5, 0.002))
"""(workload, capacity, one-way delay in seconds) of the cells in which gossip slows down."""


def _staleness(seed: int, requests: int = 2000) -> float:
    """Return the mean with rounds of 10 s over that with rounds of 1 s; averaged, since one run's ratio is noisy."""
    ratios = []
    for workload, capacity, delay_s in SLOW_GOSSIP:
        fast = CellSettings(4, workload, capacity, 1.0, 0.6, delay_s, requests)
        slow = replace(fast, gossip_s=10.0)
        ratios.append(
            run_cell(slow, DEFAULT, seed).figures.mean_s / run_cell(fast, DEFAULT, seed).figures.mean_s,
        )
    return sum(ratios) / len(ratios)


GUARDS: tuple[tuple[str, Callable[[int], float], float], ...] = (
    ("of an origin's 200 forwards, those tried on a node that gossips and answers nobody", _silent, 8.0),
    *(
        (f"share of forwards to a liar about {about}, after 20, beyond its truthful twin's", _lies(about), 0.05)
        for about in LIES
    ),
    ("hits that a gateway loses against the best split over two caches, requests one after another", _split, 0.05),
    ("busier endpoint's share of prompts shorter than a block, one after another", _evenness, 0.6),
    ("mean with a round of gossip of 10 s over that with 1 s, at 60 % load, four cells", _staleness, 1.05),
)


def _run_guard(task: tuple[int, int]) -> float:
    i, seed = task
    return GUARDS[i][1](seed)


# --- the command -------------------------------------------------------------------------------------------


def run(seeds: Sequence[int], workers: int, requests: int | None = None, silent: bool = True) -> dict[str, Any]:
    """Run all rows and guards; return what the command writes as JSON."""
    tasks = [(i, base, seed, requests) for i in range(len(ROWS)) for base in BASES for seed in seeds]
    found = iter(run_all(_run_row, tasks, workers, Progress(len(tasks), "runs", silent)))
    rows = []
    for row in ROWS:
        mine = {base: [next(found) for _ in seeds] for base in BASES}
        means = {base: round(interval([one.mean for one in ones]).mean, 4) for base, ones in mine.items()}
        once = all(one.once for ones in mine.values() for one in ones)
        rows.append(
            {
                "what": row.name,
                "mean_ratio": means,
                "p99_ratio": {base: round(interval([one.p99 for one in ones]).mean, 4) for base, ones in mine.items()},
                "bar": row.bar,
                "answered_once": once,
                "ok": max(means.values()) <= row.bar and once,
            }
        )
    guarded = run_all(_run_guard, [(i, seed) for i in range(len(GUARDS)) for seed in seeds], workers)
    guards = []
    for i, (name, _, bar) in enumerate(GUARDS):
        value = max(guarded[i * len(seeds) : (i + 1) * len(seeds)])
        guards.append({"what": name, "value": round(value, 3), "bar": bar, "ok": value <= bar})
    ok = all(entry["ok"] for entry in (*rows, *guards))
    return {"seeds": list(seeds), "default": DEFAULT, "rows": rows, "guards": guards, "ok": ok}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add_seed_options(parser, 101, 2)
    add("--requests", type=int, metavar="N", help="requests of a run (1,500 to 4,000)")
    add_run_options(parser)


def run_options(options: argparse.Namespace) -> int:
    """Run the command; return 1 if a bar is missed. Raises `UsageError` for options that cannot be used."""
    if options.seeds < 1 or (options.requests is not None and options.requests < 1):
        raise UsageError("stress needs seeds >= 1 and requests >= 1")
    check_writable(options.json)
    silent = options.json == "-"
    seeds = seeds_of(options)
    result = run(seeds, options.workers, options.requests, silent)
    if not silent:
        print(f"the default rule ({DEFAULT}) against no routing, seeds {list(seeds)}")
        print(f"{'mean of no routing':<44}" + "".join(f"{base:>22}" for base in BASES))
        for row in result["rows"]:
            ratios = "".join(f"{ratio:>22.3f}" for ratio in row["mean_ratio"].values())
            print(f"{row['what']:<44}{ratios}  <= {row['bar']:g}  {'ok' if row['ok'] else 'MISSED'}")
        for guard in result["guards"]:
            print(f"{guard['value']:>7.2f}  <= {guard['bar']:g}  {'ok' if guard['ok'] else 'MISSED':<8}{guard['what']}")
    write_json(options.json, result)
    return 0 if result["ok"] else 1
