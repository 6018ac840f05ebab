"""``prefixroute plan prefill CLUSTER``: the threshold, the division of nodes, and what they come to."""

from __future__ import annotations

import argparse
from math import inf
from pathlib import Path
from typing import Any

from prefixroute.sim.parallel import add_json_option, check_writable, write_json
from prefixroute.sim.plots import plot_lines

from ..plan.prefill.cluster_file import GBIT, read_clusters
from ..plan.prefill.division import PrefillClusters, PrefillRates, all_local, all_remote, best_plan, rates


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add("cluster", type=Path, metavar="CLUSTER", help="a TOML or JSON file; see examples/plan/cluster.toml")
    add_json_option(parser, "plan")
    add("--plot", metavar="FILE", help="draw requests a second over the threshold, as PNG")


def run_options(options: argparse.Namespace) -> int:
    """Run the command. Raises `UsageError` for a file that cannot be used."""
    file, clusters = read_clusters(options.cluster)
    check_writable(options.json)
    check_writable(options.plot)
    plan = best_plan(clusters)
    if options.json != "-":
        print(table(file.title or str(options.cluster), clusters, plan, file.alone_nodes))
    if options.plot:
        plot(options.plot, clusters, plan)
    write_json(options.json, as_json(plan))
    return 0


def as_json(plan: PrefillRates) -> dict[str, Any]:
    """Return a plan as plain JSON values. Prompts are whole tokens: over 9.7 tokens are those over 9."""
    return {
        "threshold_tokens": int(plan.threshold_tokens),
        "prefill_nodes": plan.prefill_nodes,
        "decode_nodes": plan.decode_nodes,
        "requests_per_s": round(plan.requests_per_s, 4),
        "egress_gbit_s": round(plan.egress_bytes_per_s / GBIT, 3),
        "bottleneck": plan.bottleneck.value,
    }


_HEAD = (
    f"{'':<16}{'t':>9}{'pool':>6}{'N_p':>5}{'N_d':>5}{'offloaded':>11}"
    f"{'req/s':>8}{'plan is':>9}{'egress':>14}  bottleneck"
)


def table(title: str, clusters: PrefillClusters, plan: PrefillRates, alone_nodes: int) -> str:
    """Return the plan beside what comes without a pool, and of sending everything there, as text."""
    rows = [("plan", plan), ("all to the pool", all_remote(clusters))]
    if alone_nodes > 1:
        rows.append(("all local", all_local(clusters, alone_nodes)))
    lines = [title, _HEAD]
    for name, row in rows:
        ratio = f"{plan.requests_per_s / row.requests_per_s:.2f}x" if row.requests_per_s else ""
        lines.append(
            f"{name:<16}{int(row.threshold_tokens):>9,}{row.pool_nodes:>6}{row.prefill_nodes:>5}{row.decode_nodes:>5}"
            f"{row.offloaded:>10.1%} {row.requests_per_s:>8.3f}{ratio:>9}{row.egress_bytes_per_s / GBIT:>7.2f} Gbit/s"
            f"  {row.bottleneck.value}"
        )
    cut, longer, shorter = (
        f"{int(tokens):,}" for tokens in (plan.threshold_tokens, plan.long_tokens, plan.short_tokens)
    )
    lines.append(f"prompts over {cut} uncached tokens go to the pool: {longer} on average, the others {shorter}")
    parts = (("pool", plan.pool_per_s), ("prefill", plan.prefill_per_s), ("decode", plan.decode_per_s))
    shown = (f"{name} {'-' if rate in (0, inf) else format(rate, '.3f')}" for name, rate in parts)
    lines.append(f"requests a second by role, of those that it takes: {', '.join(shown)}")
    return "\n".join(lines)


def plot(path: str, clusters: PrefillClusters, plan: PrefillRates) -> None:
    """Draw what each role could take, over the threshold. Raises `UsageError` without matplotlib."""
    high = min(max(3 * plan.threshold_tokens, 16.0), clusters.lengths.longest)
    found = [rates(clusters, high * i / 60, plan.prefill_nodes) for i in range(1, 61)]
    lines = {
        "pool / p": [(r.threshold_tokens, r.pool_per_s / r.offloaded) for r in found if r.offloaded > 0],
        "local prefill / (1 - p)": [
            (r.threshold_tokens, r.prefill_per_s / (1 - r.offloaded)) for r in found if r.offloaded < 1
        ],
        "decode": [(r.threshold_tokens, r.decode_per_s) for r in found],
        "requests a second": [(r.threshold_tokens, r.requests_per_s) for r in found],
    }
    most = 2 * max(plan.requests_per_s, plan.decode_per_s)
    shown = {name: [point for point in points if point[1] <= most] for name, points in lines.items()}
    title = f"{plan.prefill_nodes} local nodes prefill, {plan.decode_nodes} decode, {plan.pool_nodes} in the pool"
    plot_lines(path, title, "threshold (uncached tokens)", "requests a second", shown)
