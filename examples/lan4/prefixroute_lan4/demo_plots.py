"""Three pictures of a demonstration.

Rules:
1. Drawn without a display (Agg), after the runs: nothing here competes with them for a core.
2. Each picture shows both runs on the same axes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from .cluster import node_names
from .demo_runs import ROUTED, UNROUTED, DemoResult, DemoRun
from .measure import hit_rate_over_time

matplotlib.use("Agg")

_COLOURS = {UNROUTED: "#8a8a8a", ROUTED: "#0b6e99"}
_LABELS = {UNROUTED: "unrouted", ROUTED: "routed"}
_SIZE = (7.0, 4.2)
_DPI = 120


def write_plots(result: DemoResult, folder: Path) -> list[Path]:
    """Write ``ttft_cdf.png``, ``hit_rate.png`` and ``node_share.png``; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {
        "ttft_cdf.png": _ttft_cdf(result),
        "hit_rate.png": _hit_rate(result),
        "node_share.png": _node_share(result),
    }
    paths = []
    for name, figure in figures.items():
        path = folder / name
        figure.savefig(path, dpi=_DPI)
        paths.append(path)
    return paths


def _new(title: str, x: str, y: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    return figure, axes


def _ttft_cdf(result: DemoResult) -> Figure:
    figure, axes = _new("Time to first token", "milliseconds", "share of requests")
    for name, run in result.runs.items():
        times = sorted(1e3 * sample.ttft_s for sample in run.samples if not sample.error)
        shares = [(rank + 1) / len(times) for rank in range(len(times))]
        axes.step(times, shares, where="post", color=_COLOURS[name], label=_LABELS[name])
    axes.set_xscale("log")
    axes.set_ylim(0, 1.01)
    axes.legend()
    return figure


def _hit_rate(result: DemoResult) -> Figure:
    window = max(10, result.settings.workload.requests // 16)
    title = f"Hit rate of the last {window} requests, in tokens"
    figure, axes = _new(title, "seconds since the run began", "hit rate")
    for name, run in result.runs.items():
        points = hit_rate_over_time(run.samples, window)
        axes.plot(*zip(*points, strict=True), color=_COLOURS[name], label=_LABELS[name]) if points else None
    kill = result.settings.kill
    if kill is not None:
        axes.axvline(
            kill.fraction * result.trace.duration_s, color="#b03030", linestyle=":", label=f"{kill.node} killed"
        )
    axes.set_ylim(0, 1.01)
    axes.legend()
    return figure


def _node_share(result: DemoResult) -> Figure:
    names = node_names(result.settings.cluster.nodes)
    figure, axes = _new("Who served", "", "share of requests")
    width = 0.8 / len(result.runs)
    for place, (name, run) in enumerate(result.runs.items()):
        at = [index + (place - (len(result.runs) - 1) / 2) * width for index in range(len(names))]
        axes.bar(at, _shares(run, names), width, color=_COLOURS[name], label=_LABELS[name])
    axes.set_xticks(range(len(names)), names)
    axes.legend()
    return figure


def _shares(run: DemoRun, names: tuple[str, ...]) -> list[float]:
    answered = sum(run.figures.served.values())
    return [run.figures.served.get(name, 0) / answered if answered else 0.0 for name in names]
