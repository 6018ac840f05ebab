"""One cell of a grid: a fleet, a workload and a load, run with several policies on the same requests.

Rules:
1. Load is the share of time that the engines would work without routing; each trace's request rate follows from it.
2. `none` is no routing. `exact` is the default rule on exact knowledge, `central` a router without any delay.
3. Traces are cached, so that cells that differ only in delay, gossip or load share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

from prefixroute import POLICIES, UsageError

from ..intervals import interval
from .exact_knowledge import ExactKnowledge
from .figures import Figures, figures
from .loop import Gossiping, ServedRequests, ServingSettings, Unrouted
from .serving_engine import LruBlocks, Speed
from .workloads import ArrivalTrace, maker

DEFAULT = "rent" if "rent" in POLICIES else "greedy"
"""The policy that nodes have by default."""

RULES = (*POLICIES, "exact", "central")
"""Policies that a cell knows, by name."""


@dataclass(frozen=True, slots=True)
class CellSettings:
    """A cell: `capacity` is each cache's share of all prefix tokens, `load` is the engines' busy share without routing.

    `extra` is passed on to `ServingSettings`, `workload_options` to the workload's maker. `gossip_s` (a round) and
    `delay_s` (one way) are seconds. With a `rate` (requests a second over all nodes) `load` is not used. Raises
    `UsageError` for values out of range.
    """

    nodes: int = 4
    workload: str = "zipf1.5"
    capacity: float = 0.5
    gossip_s: float = 2.0
    load: float = 0.6
    delay_s: float = 0.02
    requests: int = 2500
    rate: float = 0.0
    speed: Speed = Speed()  # noqa: RUF009 - frozen
    extra: tuple[tuple[str, Any], ...] = ()
    workload_options: tuple[tuple[str, Any], ...] = field(default=())

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.requests < 1 or min(self.capacity, self.gossip_s) <= 0 or self.delay_s < 0:
            raise UsageError("a cell needs nodes and requests >= 1, capacity and gossip_s > 0, delay_s >= 0")
        if self.load <= 0 and self.rate <= 0:
            raise UsageError("a cell needs load > 0 or rate > 0")

    def serving(self, trace: ArrivalTrace) -> ServingSettings:
        """Return the settings of the fleet for a trace."""
        given: dict[str, Any] = {
            "nodes": self.nodes,
            "capacity_tokens": self.capacity * trace.prefix_tokens,
            "delay_s": self.delay_s,
            "gossip_s": self.gossip_s,
            "speed": self.speed,
        }
        return ServingSettings(**{**given, **dict(self.extra)})


class RunOf(NamedTuple):
    """One run of a cell, and its trace."""

    served: ServedRequests
    trace: ArrivalTrace
    figures: Figures


@lru_cache(maxsize=24)
def unit_trace(
    workload: str, options: tuple[tuple[str, Any], ...], rate: float, requests: int, origins: int, seed: int
) -> ArrivalTrace:
    """Return a trace of rate 1; a workload that changes with time is made for `rate` and then scaled."""
    return maker(workload, **dict(options))(rate, requests, origins, seed)


@lru_cache(maxsize=64)
def _work_s(
    workload: str,
    options: tuple[tuple[str, Any], ...],
    rate: float,
    requests: int,
    nodes: int,
    seed: int,
    capacity: float,
    whole: bool,
    speed: Speed,
) -> float:
    """Return the mean service time without routing, in seconds; it depends on the order of arrivals alone."""
    trace = unit_trace(workload, options, rate, requests, nodes, seed)
    block = trace.domain.block_size
    caches = [LruBlocks(int(capacity * trace.prefix_tokens / block), block, whole) for _ in range(nodes)]
    total = 0.0
    for arrival in trace.arrivals:
        prompt = arrival.prompt
        uncached = prompt.chain.n_tokens - caches[arrival.origin].admit(prompt, 0.0).cached_tokens
        total += speed.fixed_s + speed.token_s * uncached
    return total / len(trace.arrivals)


def trace_of(cell: CellSettings, seed: int) -> ArrivalTrace:
    """Return the cell's trace at the rate that its load asks for."""
    rate, whole = cell.rate, bool(dict(cell.extra).get("whole_prompts", False))

    def unit(rate: float) -> ArrivalTrace:
        told = rate if cell.workload == "rotate" else 1.0
        return unit_trace(cell.workload, cell.workload_options, told, cell.requests, cell.nodes, seed)

    if not rate:
        # A workload that changes with time depends on the rate: the second guess of the rate is near enough.
        rate = 1.0
        for _ in range(2 if cell.workload == "rotate" else 1):
            told = round(rate, 6) if cell.workload == "rotate" else 1.0
            work = _work_s(
                *(cell.workload, cell.workload_options, told, cell.requests, cell.nodes, seed),
                *(cell.capacity, whole, cell.speed),
            )
            rate = cell.load * cell.nodes / work
    return unit(round(rate, 6)).at_rate(rate)


def run_cell(cell: CellSettings, policy: str, seed: int, trace: ArrivalTrace | None = None) -> RunOf:
    """Run one policy. Raises `UsageError` for a policy that is not known."""
    trace = trace or trace_of(cell, seed)
    settings = cell.serving(trace)
    run: Unrouted
    if policy == "none":
        run = Unrouted(trace, settings, seed)
    elif policy == "exact":
        run = ExactKnowledge(trace, settings, seed, POLICIES[DEFAULT])
    elif policy == "central":
        run = ExactKnowledge(trace, replace(settings, delay_s=0.0), seed, POLICIES["greedy"])
    elif policy.startswith("exact-") and policy[6:] in POLICIES:
        run = ExactKnowledge(trace, settings, seed, POLICIES[policy[6:]])
    elif policy in POLICIES:
        run = Gossiping(trace, settings, seed, POLICIES[policy])
    else:
        raise UsageError(f"unknown policy {policy!r}: {', '.join(RULES)}")
    served = run.run()
    return RunOf(served, trace, figures(served, trace))


def run_policies(cell: CellSettings, policies: Sequence[str], seeds: Sequence[int]) -> dict[str, list[Figures]]:
    """Run a cell's policies on each seed's trace; return by policy a list of figures, one for each seed."""
    found: dict[str, list[Figures]] = {policy: [] for policy in policies}
    for seed in seeds:
        trace = trace_of(cell, seed)
        for policy in policies:
            found[policy].append(run_cell(cell, policy, seed, trace).figures)
    return found


def cell(
    nodes: int = 4,
    workload: str = "zipf1.5",
    capacity: float = 0.5,
    gossip_s: float = 2.0,
    load: float = 0.6,
    delay_s: float = 0.02,
    requests: int = 2500,
    seeds: Sequence[int] = (1,),
    policies: Sequence[str] = (),
    **extra: Any,
) -> dict[str, dict[str, float]]:
    """Run one cell; return by policy the mean and p99 (seconds), their ratios to `none`, hit rates and shares.

    `extra` are settings of the fleet (`ServingSettings`): slower, loss, gossip_delay, told_rate, whole_prompts, ...
    """
    settings = CellSettings(
        nodes, workload, capacity, gossip_s, load, delay_s, requests, extra=tuple(sorted(extra.items()))
    )
    chosen = tuple(policies) or ("none", "longest", "least", "greedy", DEFAULT, "exact")
    runs = run_policies(settings, tuple(dict.fromkeys(("none", *chosen))), seeds)
    return {policy: summary(runs[policy], runs["none"]) for policy in dict.fromkeys(chosen)}


def summary(runs: Sequence[Figures], none: Sequence[Figures]) -> dict[str, float]:
    """Return the means over seeds of one policy's figures, and its ratios to no routing."""
    ratio = interval([run.mean_s / base.mean_s for run, base in zip(runs, none, strict=True)])
    tail = interval([run.p99_s / base.p99_s for run, base in zip(runs, none, strict=True)])
    mean = {name: interval([getattr(run, name) for run in runs]).mean for name in Figures._fields}
    return {**mean, "mean_ratio": ratio.mean, "mean_ratio_ci": ratio.half, "p99_ratio": tail.mean}


def table(rows: dict[str, dict[str, float]]) -> str:
    """Return a cell's figures as a table for people."""
    lines = [
        f"{'policy':<10}{'mean s':>9}{'p99 s':>9}{'ratio':>8}{'p99 r':>8}{'hit':>7}{'req hit':>9}{'fwd':>6}{'hot':>6}"
    ]
    lines += [
        f"{name:<10}{r['mean_s']:>9.4f}{r['p99_s']:>9.3f}{r['mean_ratio']:>8.3f}{r['p99_ratio']:>8.3f}"
        f"{r['token_hit']:>7.3f}{r['request_hit']:>9.3f}{r['forwarded']:>6.2f}{r['hottest']:>6.2f}"
        for name, r in rows.items()
    ]
    return "\n".join(lines)
