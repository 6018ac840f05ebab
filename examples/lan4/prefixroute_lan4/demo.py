"""What ``prefixroute demo`` does once its options are read.

Rules:
1. Standard output carries the result: the table, or the JSON when it is asked for on "-". All else goes to
   standard error.
2. Errors of the user raise UsageError before anything is started, as far as they can be seen by then.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

from prefixroute_launch.processes import ProcessError
from rich.console import Console

from prefixroute.errors import UsageError

from .cluster import ClusterSettings
from .demo_plots import write_plots
from .demo_report import BarProgress, full_report, remarks, summary, table, title, write_json
from .demo_runs import DemoResult, DemoSettings, parse_kill, run_to_end, trace_of
from .workload import WorkloadSettings

OK, FAILED, INTERRUPTED = 0, 1, 130


def run_options(options: Namespace) -> int:
    """Run what the command line's `options` ask for; UsageError when that cannot be."""
    return run(settings_of(options), options.json)


def settings_of(options: Namespace) -> DemoSettings:
    """The options, filled in by `command.with_defaults`, as settings; UsageError names the option's trouble."""
    nodes = _nodes(options)
    workload = WorkloadSettings(
        requests=options.requests, nodes=nodes, rate=options.rate, seed=options.seed, zipf=options.zipf
    )
    return DemoSettings(
        workload=workload,
        cluster=ClusterSettings(nodes=nodes, capacity_blocks=options.capacity_blocks),
        policy=options.policy,
        engine=options.engine,
        engines=options.engines,
        mmlu=options.mmlu,
        kill=parse_kill(options.kill) if options.kill is not None else None,
        out=options.out,
    )


def _nodes(options: Namespace) -> int:
    """How many nodes; UsageError when two options say different numbers."""
    listed = len(options.engines)
    if options.nodes is None:
        return listed or ClusterSettings().nodes
    if listed and options.nodes != listed:
        raise UsageError(f"--engines lists {listed} engines, --nodes says {options.nodes}: leave --nodes out")
    return int(options.nodes)


def run(settings: DemoSettings, json_to: str | None = None) -> int:
    """Run the demonstration and show it; returns the exit code, 1 when a request or a process failed.

    The figures are written to `json_to` as JSON: a path, "-" for standard output, or nowhere.
    """
    notes = Console(stderr=True)
    trace = trace_of(settings)
    _make_folder(settings.out)
    if json_to not in (None, "-"):
        _make_folder(Path(str(json_to)).parent)
    try:
        with BarProgress(notes) as progress:
            result = run_to_end(settings, trace, progress)
    except ProcessError as error:
        print(f"prefixroute demo: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("prefixroute demo: interrupted, everything is stopped", file=sys.stderr)
        return INTERRUPTED
    _show(result, json_to, notes)
    return FAILED if any(run.figures.errors for run in result.runs.values()) else OK


def _show(result: DemoResult, json_to: str | None, notes: Console) -> None:
    out = result.settings.out
    write_json(full_report(result), out / "report.json")
    write_plots(result, out)
    shown = Console()
    if json_to == "-":
        print(json.dumps(summary(result), indent=2))
        shown = notes
    shown.print(title(result), highlight=False, soft_wrap=True)
    shown.print(table(result))
    if json_to not in (None, "-"):
        write_json(summary(result), Path(str(json_to)))
    for remark in remarks(result):
        notes.print(remark, highlight=False)
    notes.print(f"requests, figures and plots: {out}", highlight=False)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {path}: {error.strerror}") from error
