"""What is shown and kept of a demonstration: a table, `report.json` and plots.

Rules:
1. The table, the JSON and the plots show the same figures; nothing is computed here.
2. `summary` is the short form for programs, with fixed keys; `full_report` holds every request.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from .demo_runs import ROUTED, UNROUTED, DemoResult, DemoRun
from .measure import RequestSample, RunFigures

SUMMARY_KEYS = (
    "errors",
    "hit_rate",
    "ttft_mean_ms",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "hottest_share",
    "forwards",
    "gossip_bytes_per_s",
    "decision_us_p50",
    "decision_us_p99",
)
"""The figures of a run in `summary`, in this order."""


class _Row(NamedTuple):
    title: str
    value: Callable[[RunFigures], str]


_ROWS = (
    _Row("requests", lambda run: f"{run.requests}"),
    _Row("errors", lambda run: f"{run.errors}"),
    _Row("resent by the client", lambda run: f"{run.resends}"),
    _Row("hit rate, tokens", lambda run: f"{100 * run.hit_rate:.1f} %"),
    _Row("TTFT mean", lambda run: f"{run.ttft_mean_ms:.0f} ms"),
    _Row("TTFT p50", lambda run: f"{run.ttft_p50_ms:.0f} ms"),
    _Row("TTFT p99", lambda run: f"{run.ttft_p99_ms:.0f} ms"),
    _Row("hottest node's share", lambda run: f"{100 * run.hottest_share:.1f} %"),
    _Row("forwards", lambda run: f"{run.forwards}"),
    _Row("gossip, all nodes", lambda run: f"{run.gossip_bytes_per_s:,.0f} B/s"),
    _Row("decision p50", lambda run: f"{run.decision_us_p50:.0f} us"),
    _Row("decision p99", lambda run: f"{run.decision_us_p99:.0f} us"),
)


def summary(result: DemoResult) -> dict[str, Any]:
    """The short form: nodes, requests, seed, and SUMMARY_KEYS of each run."""
    settings = result.settings
    return {
        "nodes": settings.cluster.nodes,
        "requests": settings.workload.requests,
        "seed": settings.workload.seed,
        "runs": {name: _short(run.figures) for name, run in result.runs.items()},
    }


def _short(figures: RunFigures) -> dict[str, Any]:
    every = asdict(figures)
    return {key: every[key] for key in SUMMARY_KEYS}


def full_report(result: DemoResult) -> dict[str, Any]:
    """Settings, all figures, and every request of every run."""
    return {
        "settings": asdict(result.settings),
        "trace": {"duration_s": result.trace.duration_s, "subjects": result.trace.subjects},
        "runs": {name: _long(run) for name, run in result.runs.items()},
    }


def _long(run: DemoRun) -> dict[str, Any]:
    return {"figures": asdict(run.figures), "requests": [sample._asdict() for sample in run.samples]}


def write_json(value: object, path: Path) -> None:
    """Write JSON; paths become text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")


def table(result: DemoResult) -> Table:
    """Both runs side by side."""
    settings = result.settings
    shown = Table()
    shown.add_column("")
    shown.add_column("unrouted", justify="right")
    shown.add_column(f"routed ({settings.policy})", justify="right")
    unrouted, routed = result.runs[UNROUTED].figures, result.runs[ROUTED].figures
    for row in _ROWS:
        shown.add_row(row.title, row.value(unrouted), row.value(routed))
    return shown


def title(result: DemoResult) -> str:
    """What was run, in a line."""
    settings, workload = result.settings, result.settings.workload
    killed = f", {settings.kill.node} killed at {settings.kill.fraction:g}" if settings.kill else ""
    return (
        f"{_fleet(settings.kinds)} nodes, {workload.requests} requests over "
        f"{result.trace.subjects} subjects in {result.trace.duration_s:.0f} s, seed {workload.seed}{killed}"
    )


def _fleet(kinds: Sequence[str]) -> str:
    """How many of each kind, in order of their first nodes."""
    return ", ".join(f"{count} {kind}" for kind, count in Counter(kinds).items())


def remarks(result: DemoResult) -> list[str]:
    """What the table does not show: errors in words, and answers that differ between the runs."""
    found = []
    for name, run in result.runs.items():
        found += [f"{name}: request {sample.number} failed: {sample.error}" for sample in _first_errors(run.samples)]
    differing = result.runs[ROUTED].figures.mismatches
    if differing:
        found.append(f"{differing} answers differ between the runs")
    return found


def _first_errors(samples: Sequence[RequestSample], most: int = 3) -> list[RequestSample]:
    return [sample for sample in samples if sample.error][:most]


class BarProgress:
    """A progress bar on `console`."""

    def __init__(self, console: Console) -> None:
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> BarProgress:
        return self  # drawn with the first stage: before that, a user's mistake is the only line

    def __exit__(self, *_: object) -> None:
        if self._bar.live.is_started:
            self._bar.stop()

    def stage(self, text: str) -> None:
        """Show what is being done."""
        self._bar.start()
        self._bar.reset(self._task, total=None, description=text)

    def begin(self, run: str, requests: int) -> None:
        """Show a bar for a run."""
        self._bar.reset(self._task, total=requests, description=f"run: {run}")

    def answered(self, sample: RequestSample) -> None:
        """One more."""
        self._bar.advance(self._task)
