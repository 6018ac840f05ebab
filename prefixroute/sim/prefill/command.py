"""``prefixroute simulate prefill CLUSTER``: the plan, against all prompts local and all to the pool, with arrivals.

With ``--cut`` the link loses bandwidth for a while, and a fixed threshold is compared with one that follows the link.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefixroute import UsageError
from prefixroute.plan import ClusterFile, Empirical, PrefillClusters, best_plan, read_clusters, read_trace

from ..parallel import add_json_option, check_writable, write_json
from ..plots import plot_lines
from .cases import ADAPTIVE, Episode, at_rate, latency, setups, sustained, through
from .clusters import PrefillRun, PromptArrival, bursty

GBIT = 1e9 / 8


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add("cluster", type=Path, metavar="CLUSTER", help="a TOML or JSON file; see examples/plan/cluster.toml")
    add("--requests", type=int, default=6000, metavar="N", help="prompts of a run (6000)")
    add("--rate", type=float, default=0.0, metavar="R", help="requests a second (half of what the plan is to sustain)")
    add("--burst", type=float, default=1.0, metavar="X", help="bursts of X times the rate, 10 s each (1: none)")
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="arrivals and lengths of a trace, planned for too; at --rate if given",
    )
    add("--cut", type=float, metavar="SHARE", help="let the link carry this share of its bandwidth for 60 s")
    add("--seeds", type=int, default=1, metavar="N", help="seeds, from 1 (1)")
    add_json_option(parser, "result")
    add("--plot", metavar="FILE", help="draw times to first token over the run, as PNG")


def run_options(options: argparse.Namespace) -> int:
    """Run the command. Raises `UsageError` for a file or an option that cannot be used."""
    file, clusters = read_clusters(options.cluster)
    for name, value, least in (("requests", options.requests, 100), ("seeds", options.seeds, 1)):
        if value < least:
            raise UsageError(f"--{name} is {least} or more")
    if options.rate < 0 or options.burst < 1:
        raise UsageError("--rate is above 0, and --burst 1 or more")
    if options.cut is not None and (not 0 < options.cut <= 1 or options.trace):
        raise UsageError("--cut is a share above 0, of at most 1, and goes without --trace")
    check_writable(options.json)
    check_writable(options.plot)
    if options.trace is not None:
        # The plan is made for the lengths of the trace.
        clusters = replace(clusters, lengths=Empirical(arrival.tokens for arrival in _traced(options)))
    if options.cut is not None:
        result, lines = _cut(file, clusters, options)
    else:
        result, lines = _compare(file, clusters, options)
    if options.json != "-":
        print(file.title or options.cluster)
        print("\n".join(lines))
    write_json(options.json, result)
    return 0


def _arrivals(clusters: PrefillClusters, options: argparse.Namespace, seed: int, rate: float) -> list[PromptArrival]:
    if options.trace is None:
        return bursty(clusters.lengths, rate, options.requests, random.Random(seed), options.burst)
    found = _traced(options)
    return at_rate(found, rate) if options.rate else found


def _traced(options: argparse.Namespace) -> list[PromptArrival]:
    rows = read_trace(options.trace)[: options.requests]
    if any(row.at is None for row in rows):
        raise UsageError(f"{options.trace} has no times: name it as file in [workload], and leave --trace out")
    return sorted(PromptArrival(row.at or 0.0, max(1, row.uncached_tokens)) for row in rows)


def _compare(
    file: ClusterFile, clusters: PrefillClusters, options: argparse.Namespace
) -> tuple[dict[str, Any], list[str]]:
    """Run each set-up at the rate, and find the rate that it sustains."""
    plan = best_plan(clusters)
    rate = options.rate or plan.requests_per_s / 2
    found: dict[str, dict[str, Any]] = {}
    for name, setup in setups(file, clusters).items():
        rates, times, remote, sent, seconds = [], list[float](), 0, 0.0, 0.0
        for seed in range(1, options.seeds + 1):
            arrivals = _arrivals(clusters, options, seed, rate)
            served = PrefillRun(setup, arrivals).run()
            times += served.ttft_s
            remote += sum(served.remote)
            sent, seconds = sent + served.sent_bytes, seconds + served.ended_at
            rates.append(sustained(setup, arrivals, 2 * max(plan.requests_per_s, rate)))
        came = latency(times)
        found[name] = {
            "sustained_requests_per_s": round(sum(rates) / len(rates), 4),
            "ttft_mean_s": round(came.mean_s, 4),
            "ttft_p90_s": round(came.p90_s, 4),
            "offloaded": round(remote / len(times), 4),
            "egress_gbit_s": round(sent / seconds / GBIT, 3),
            "threshold_tokens": int(setup.threshold_tokens) if name == "plan" else None,
            "nodes": [setup.pool_nodes, setup.prefill_nodes, setup.decode_nodes],
        }
    most = found["plan"]["sustained_requests_per_s"]
    at = f"at {rate:.2f} req/s" if options.rate or not options.trace else "at the trace's pace"
    lines = [
        f"{'':<16}{'sustained':>12}{'plan is':>9}   {at + ':':<21}{'mean':>8}{'P90':>8}{'to pool':>9}{'egress':>14}"
    ]
    for name, row in found.items():
        here = row["sustained_requests_per_s"]
        better = f"{most / here:.2f}x" if here else ""
        lines.append(
            f"{name:<16}{here:>6.3f} req/s{better:>9}{'':<24}{row['ttft_mean_s']:>6.2f} s{row['ttft_p90_s']:>6.2f} s"
            f"{row['offloaded']:>9.1%}{row['egress_gbit_s']:>7.2f} Gbit/s"
        )
    if options.plot:
        _plot(options.plot, found_times(file, clusters, options, rate))
    return {"rate": round(rate, 4), "set_ups": found}, lines


def found_times(
    file: ClusterFile, clusters: PrefillClusters, options: argparse.Namespace, rate: float
) -> dict[str, list[tuple[float, float]]]:
    """Return by set-up (second of arrival, mean seconds to first token around that time) for a plot."""
    arrivals = _arrivals(clusters, options, 1, rate)
    return {
        name: over_time(arrivals, PrefillRun(setup, arrivals).run().ttft_s)
        for name, setup in setups(file, clusters).items()
    }


def _cut(file: ClusterFile, clusters: PrefillClusters, options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Run the plan through an episode, with its threshold fixed and with one that follows the link."""
    setup = setups(file, clusters)["plan"]
    rate = options.rate or best_plan(clusters).requests_per_s / 2
    episode = Episode(rate, share=options.cut, times=options.burst)
    found: dict[str, dict[str, Any]] = {}
    curves: dict[str, list[tuple[float, float]]] = {}
    for name, settings in (("fixed", None), ("adaptive", ADAPTIVE)):
        during, outside, moves = list[float](), list[float](), 0
        for seed in range(1, options.seeds + 1):
            served, times = through(episode, setup, seed, settings)
            during, outside, moves = during + times.during, outside + times.outside, moves + times.moves
            if seed == 1:
                curves[name] = over_time(episode.arrivals(clusters, seed), served.ttft_s)
        found[name] = {
            "during_p90_s": round(latency(during).p90_s, 4),
            "outside_p90_s": round(latency(outside).p90_s, 4),
            "threshold_moves": moves,
        }
    if options.plot:
        _plot(options.plot, curves)
    head = f"the link carries {options.cut:.0%} of its bandwidth for {episode.length_s:.0f} s, at {rate:.2f} req/s"
    lines = [head, f"{'threshold':<12}{'P90 during':>12}{'P90 outside':>13}{'moves':>7}"]
    for name, row in found.items():
        moved = row["threshold_moves"]
        lines.append(f"{name:<12}{row['during_p90_s']:>10.2f} s{row['outside_p90_s']:>11.2f} s{moved:>7}")
    return {"rate": round(rate, 4), "share": options.cut, "seeds": options.seeds, "thresholds": found}, lines


def over_time(
    arrivals: Sequence[PromptArrival], ttft_s: Sequence[float], window_s: float = 20.0
) -> list[tuple[float, float]]:
    """Return (second of arrival, mean seconds to first token) in windows of `window_s`."""
    sums: dict[int, list[float]] = {}
    for arrival, ttft in zip(arrivals, ttft_s, strict=True):
        sums.setdefault(int(arrival.at / window_s), []).append(ttft)
    return [(window_s * (i + 0.5), sum(each) / len(each)) for i, each in sorted(sums.items())]


def _plot(path: str, curves: dict[str, list[tuple[float, float]]]) -> None:
    plot_lines(path, "mean time to first token, by time of arrival", "seconds", "seconds to first token", curves)
