"""``prefixroute simulate paper``: the published results of decentralised routing by longest match, row by row.

The results are those of arXiv 2606.17059. The paper does not say its cache sizes, gossip intervals, arrival rates or
the exponent of its skew, so the rows compare ratios and signs, in three configurations that show them: A and B have
caches of 5 % of all prefixes, G has larger caches and slower prefill. Delays are one-way; caches evict whole prompts,
as the paper's do.

Rules:
1. A row has a value, a target and a tolerance: a number (either way), "at least", "at most" or "below".
2. Ratios compare the same requests with and without routing, averaged over seeds, with their 95 % interval.
3. `LongestMatch` is the paper's rule. The default rule of nodes stands beside it in rows where it is of interest.
"""

from __future__ import annotations

import argparse
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from prefixroute import POLICIES, PushBackSettings, UsageError

from ..intervals import interval
from ..parallel import Progress, add_run_options, add_seed_options, check_writable, run_all, seeds_of, write_json
from ..plots import plot_shares
from .cells import DEFAULT, CellSettings, run_cell, trace_of
from .faults import Fault, FaultSettings, Faulty, served_once
from .figures import Figures
from .serving_engine import Speed
from .workloads import ArrivalTrace

SILENT = PushBackSettings(enter_s=1e9, leave_s=1e8)
PUSHING = PushBackSettings(enter_s=1.0, leave_s=0.5, ttl_s=2.0)
"""The paper's threshold for pushing back is five requests; five hits in configuration G are one second of work."""

WINDOW, SPECIALISED, SPREAD = 10, 0.9, 0.6
"""A topic is specialised when one node has 0.9 of its last ten requests, and spread when no node has above 0.6."""


class PaperCase(NamedTuple):
    """A configuration with a workload and a delay; a `capacity`, `gossip_s` or `rate` of 0 is the configuration's."""

    configuration: str
    workload: str
    delay_s: float = 0.002
    capacity: float = 0.0
    gossip_s: float = 0.0
    rate: float = 0.0
    push_back: bool = False

    def cell(self, quick: bool) -> CellSettings:
        """Return the cell to run."""
        base = CONFIGURATIONS[self.configuration]
        extra: dict[str, Any] = {"whole_prompts": True, "push_back": PUSHING if self.push_back else SILENT}
        return CellSettings(
            nodes=4,
            workload=self.workload,
            capacity=self.capacity or base.capacity,
            gossip_s=self.gossip_s or base.gossip_s,
            delay_s=self.delay_s,
            requests=1500 if quick else base.requests,
            rate=self.rate or base.rate,
            speed=base.speed,
            extra=tuple(sorted(extra.items())),
            workload_options=(("tail_tokens", base.tail_tokens),),
        )


class PaperFleet(NamedTuple):
    """A fleet of four nodes: speed, unique tokens of a prompt, cache share, requests a second, seconds of a round."""

    speed: Speed
    tail_tokens: int
    capacity: float
    rate: float
    gossip_s: float
    requests: int


CONFIGURATIONS = {
    "A": PaperFleet(Speed(0.19, 0.00017), 60, 0.05, 1.5, 2.0, 3000),
    "B": PaperFleet(Speed(0.10, 0.0003), 100, 0.05, 2.0, 5.0, 3000),
    "G": PaperFleet(Speed(0.10, 0.001), 100, 0.5, 4.0, 1.0, 4000),
}


class PaperRow(NamedTuple):
    """A row: `value` makes its figure from the runs of `case` with `policies` (and always `none`)."""

    id: str
    what: str
    case: PaperCase
    value: Callable[[dict[str, list[PaperRun]]], float]
    target: float
    tolerance: float | str
    policies: tuple[str, ...] = ("longest",)


class PaperRun(NamedTuple):
    """One run: its figures, and the cycles of the three most popular topics."""

    figures: Figures
    cycles: tuple[int, int, int]


PaperRuns = dict[str, list[PaperRun]]


def _ratio(policy: str = "longest") -> Callable[[PaperRuns], float]:
    return lambda runs: interval(_ratios(runs, policy)).mean


def _ratios(runs: PaperRuns, policy: str) -> list[float]:
    return [a.figures.mean_s / b.figures.mean_s for a, b in zip(runs[policy], runs["none"], strict=True)]


def _mean(policy: str, name: str) -> Callable[[PaperRuns], float]:
    return lambda runs: interval([getattr(run.figures, name) for run in runs[policy]]).mean


def _most(policy: str, name: str) -> Callable[[PaperRuns], float]:
    return lambda runs: max(getattr(run.figures, name) for run in runs[policy])


def _gain(policy: str, name: str) -> Callable[[PaperRuns], float]:
    return lambda runs: 100 * (_mean(policy, name)(runs) - _mean("none", name)(runs))


def _cycles(policy: str, pick: Callable[[Sequence[float]], float]) -> Callable[[PaperRuns], float]:
    def value(runs: PaperRuns) -> float:
        return pick([interval([run.cycles[topic] for run in runs[policy]]).mean for topic in range(3)])

    return value


A, B, G = "A", "B", "G"
ROWS = (
    PaperRow(
        "R1", "uniform topics, 2 ms: mean, longest match to none (A)", PaperCase(A, "uniform"), _ratio(), 0.960, 0.03
    ),
    PaperRow("R1b", "the same in B", PaperCase(B, "uniform"), _ratio(), 0.960, 0.03),
    PaperRow(
        "R2",
        "skewed topics, 2 ms: longest match to none (B, Zipf 1.5)",
        PaperCase(B, "zipf1.5"),
        _ratio(),
        0.774,
        0.05,
    ),
    PaperRow("R2b", "the same in B with Zipf 2", PaperCase(B, "zipf2"), _ratio(), 0.774, 0.05),
    PaperRow(
        "R3",
        "skewed topics: points of request hits gained (A, 8 % caches, Zipf 2.2)",
        PaperCase(A, "zipf2.2", capacity=0.08),
        _gain("longest", "request_hit"),
        3.0,
        "at least",
    ),
    PaperRow(
        "R3b",
        "request hits without routing there",
        PaperCase(A, "zipf2.2", capacity=0.08),
        _mean("none", "request_hit"),
        0.85,
        0.05,
    ),
    PaperRow(
        "R4",
        "200 ms: mean, longest match to none (A, uniform)",
        PaperCase(A, "uniform", 0.2),
        _ratio(),
        1.05,
        "at least",
    ),
    PaperRow("R4b", "1000 ms: the same", PaperCase(A, "uniform", 1.0), _ratio(), 1.5, "at least"),
    PaperRow("R4c", "200 ms, skewed (B, Zipf 1.5)", PaperCase(B, "zipf1.5", 0.2), _ratio(), 1.05, "at least"),
    PaperRow("R4d", "1000 ms, skewed", PaperCase(B, "zipf1.5", 1.0), _ratio(), 1.5, "at least"),
    PaperRow(
        "R4e",
        "1000 ms, skewed: default rule",
        PaperCase(B, "zipf1.5", 1.0),
        _ratio(DEFAULT),
        1.01,
        "at most",
        (DEFAULT,),
    ),
    PaperRow(
        "R5",
        "hottest node's share, longest match, highest of all seeds (A, Zipf 2.5, gossip 10 s)",
        PaperCase(A, "zipf2.5", gossip_s=10.0),
        _most("longest", "hottest"),
        0.55,
        "at least",
    ),
    PaperRow(
        "R5b",
        "hottest share with push-back, where queues are long, highest of all seeds (G, Zipf 2, 4/s)",
        PaperCase(G, "zipf2", push_back=True),
        _most("longest", "hottest"),
        0.5,
        "at most",
    ),
    PaperRow(
        "R5c",
        "the same without push-back",
        PaperCase(G, "zipf2"),
        _most("longest", "hottest"),
        0.5,
        "at least",
    ),
    PaperRow(
        "R5d",
        "hottest share, longest match, highest of all seeds (G, Zipf 2, 1/s)",
        PaperCase(G, "zipf2", rate=1.0),
        _most("longest", "hottest"),
        0.65,
        "at least",
    ),
    PaperRow(
        "R5e",
        "hottest share there, the default rule",
        PaperCase(G, "zipf2", rate=1.0),
        _most(DEFAULT, "hottest"),
        0.45,
        "at most",
        (DEFAULT,),
    ),
    PaperRow(
        "R6",
        "cycles of specialisation and eviction, longest match, least of the top three topics (A, Zipf 1.7)",
        PaperCase(A, "zipf1.7"),
        _cycles("longest", min),
        2.5,
        "at least",
    ),
    PaperRow("R6b", "the same without routing, most", PaperCase(A, "zipf1.7"), _cycles("none", max), 1.0, "below"),
)


def passes(value: float, target: float, tolerance: float | str) -> bool:
    """Return whether a value meets its target."""
    if tolerance == "at least":
        return value >= target
    if tolerance == "at most":
        return value <= target
    if tolerance == "below":
        return value < target
    return abs(value - target) <= float(tolerance)


# --- cycles ------------------------------------------------------------------------------------------------


def shares_over_time(
    servers: Sequence[int], trace: ArrivalTrace, topic: int, nodes: int
) -> list[tuple[float, list[float]]]:
    """Return (seconds, share of each node in the topic's last ten requests) for each request of the topic."""
    window: deque[int] = deque(maxlen=WINDOW)
    found = []
    for arrival, server in zip(trace.arrivals, servers, strict=True):
        if arrival.topic == topic:
            window.append(server)
            counts = Counter(window)
            found.append((arrival.at, [counts[i] / len(window) for i in range(nodes)]))
    return found


def cycles(servers: Sequence[int], trace: ArrivalTrace, topic: int, nodes: int) -> int:
    """Return how often a topic was specialised and then spread again."""
    specialised, n = False, 0
    for _, shares in shares_over_time(servers, trace, topic, nodes)[WINDOW - 1 :]:
        if max(shares) >= SPECIALISED:
            specialised = True
        elif specialised and max(shares) <= SPREAD:
            specialised = False
            n += 1
    return n


# --- running -----------------------------------------------------------------------------------------------


def _run(task: tuple[PaperCase, str, int, bool]) -> PaperRun:
    case, policy, seed, quick = task
    cell = case.cell(quick)
    run = run_cell(cell, policy, seed)
    counted = [cycles(run.served.server, run.trace, topic, cell.nodes) for topic in range(3)]
    return PaperRun(run.figures, (counted[0], counted[1], counted[2]))


def _same_answers(seed: int) -> bool:
    """Return whether, under all faults at once, every request gets exactly one answer, the right one (row R7)."""
    cell = CellSettings(4, "zipf1.5", 0.25, 10.0, 0.5, 0.02, 600)
    trace = trace_of(cell, seed)
    half = trace.arrivals[-1].at / 2
    settings = CellSettings(**{**_fields(cell), "extra": (("loss", 0.2), ("timeout_s", 10.0))}).serving(trace)
    faults = FaultSettings(
        (Fault("crash", 1, half * 0.5, half), Fault("silent", 2, half, half * 1.3), Fault("refuse", 3, half * 1.5)),
        *(0.1, 0.1),
    )
    good = True
    for policy in ("longest", DEFAULT):
        run = Faulty(trace, settings, seed, POLICIES[policy], faults)
        served = run.run()
        good &= served_once(run, served) and served.counts["forwards"] > 0 and served.counts["fallbacks"] > 0
    return good


def _fields(cell: CellSettings) -> dict[str, Any]:
    return {name: getattr(cell, name) for name in cell.__slots__}


def run(seeds: Sequence[int], workers: int, quick: bool = False, silent: bool = True) -> dict[str, Any]:
    """Run all rows; return what the command writes as JSON."""
    wanted: dict[tuple[PaperCase, str], None] = {}
    for row in ROWS:
        for policy in ("none", *row.policies):
            wanted[row.case, policy] = None
    tasks = [(case, policy, seed, quick) for case, policy in wanted for seed in seeds]
    runs = run_all(_run, tasks, workers, Progress(len(tasks), "runs", silent))
    by_case: dict[tuple[PaperCase, str], list[PaperRun]] = {key: [] for key in wanted}
    for (case, policy, _, _), one in zip(tasks, runs, strict=True):
        by_case[case, policy].append(one)
    rows = []
    for row in ROWS:
        mine = {policy: by_case[row.case, policy] for policy in dict.fromkeys(("none", *row.policies))}
        rows.append(_filled(row, mine))
    same = run_all(_same_answers, list(seeds)[:3], workers)
    rows.append(
        {
            "id": "R7",
            "what": "share of runs with crash, loss, repetition and staleness that answer each request once, and alike",
            "value": sum(same) / len(same),
            "target": 1.0,
            "tolerance": 0.0,
            "ok": all(same),
        }
    )
    return {"seeds": list(seeds), "default": DEFAULT, "rows": rows, "ok": all(row["ok"] for row in rows)}


def _filled(row: PaperRow, runs: PaperRuns) -> dict[str, Any]:
    value = row.value(runs)
    routed = row.policies[0]
    return {
        "id": row.id,
        "what": row.what,
        "value": round(value, 4),
        "target": row.target,
        "tolerance": row.tolerance,
        "ok": passes(value, row.target, row.tolerance),
        "mean_ratio_ci": [round(part, 4) for part in interval(_ratios(runs, routed))],
        "mean_s": {policy: round(interval([run.figures.mean_s for run in runs[policy]]).mean, 4) for policy in runs},
    }


def text(result: dict[str, Any]) -> str:
    """Return the rows as a table for people."""
    lines = [f"seeds {result['seeds']}, default rule: {result['default']}"]
    for row in result["rows"]:
        tolerance = row["tolerance"]
        bound = f"{tolerance} {row['target']:g}" if isinstance(tolerance, str) else f"{row['target']:g} ±{tolerance:g}"
        lines.append(
            f"{row['id']:<5}{row['value']:>8.3f}  {bound:<14}{'ok' if row['ok'] else 'MISSED':<8}{row['what']}"
        )
    return "\n".join(lines)


# --- the command -------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add("--quick", action="store_true", help="1,500 requests a run: a look, not the targets' own length")
    add_seed_options(parser, 0, 5)
    add_run_options(parser)
    add("--plot", metavar="FILE", help="draw a topic's share by node over time, as PNG (needs the extra sim)")


def run_options(options: argparse.Namespace) -> int:
    """Run the command; return 1 if a row misses its target. Raises `UsageError` for options that cannot be used."""
    if options.seeds < 1:
        raise UsageError("the paper's rows need seeds >= 1")
    check_writable(options.json)
    check_writable(options.plot)
    silent = options.json == "-"
    if options.plot:
        draw_cycle(options.plot, options.seed)
    result = run(seeds_of(options), options.workers, options.quick, silent)
    if not silent:
        print(text(result))
    write_json(options.json, result)
    return 0 if result["ok"] else 1


def draw_cycle(path: str, seed: int) -> None:
    """Draw the most popular topic's share by node over time, for longest match and for the default rule."""
    case = PaperCase("A", "zipf1.7")
    panels = {}
    for policy, title in (("longest", "longest match"), (DEFAULT, f"default ({DEFAULT})")):
        cell = case.cell(quick=False)
        one = run_cell(cell, policy, seed)
        n = cycles(one.served.server, one.trace, 0, cell.nodes)
        shares = shares_over_time(one.served.server, one.trace, 0, cell.nodes)
        panels[f"{title}: {n} cycles, hottest node {one.figures.hottest:.2f}"] = shares
    plot_shares(path, "Share of one topic's last ten requests, by node", panels)
