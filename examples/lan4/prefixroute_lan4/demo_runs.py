"""The whole demonstration: the same trace without routing and with it, then the comparison.

Rules:
1. Both runs see the same requests at the same times, begin with empty caches, and go through the same processes;
   only the policy differs.
2. A kill happens at the same moment of both runs.
3. SIGINT, SIGTERM and errors end every process before this one ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol

from prefixroute_launch.launcher import LAUNCHERS, TOKENIZERS, LauncherFactory, launcher_for
from prefixroute_serving.sidecar_config import POLICIES

from prefixroute.errors import UsageError

from .cluster import Cluster, ClusterSettings, node_names
from .loadgen import send_trace
from .measure import RequestSample, RunFigures, mismatches, run_figures
from .workload import DemoTrace, WorkloadSettings, make_trace

UNROUTED, ROUTED = "none", "routed"


class Kill(NamedTuple):
    """Which node dies, and when, as a fraction of the trace."""

    node: str
    fraction: float


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """Everything that a demonstration depends on. `engines` names each node's kind; empty: all are `engine`."""

    workload: WorkloadSettings = field(default_factory=WorkloadSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    policy: str = "default"
    engine: str = "emulated"
    engines: tuple[str, ...] = ()
    mmlu: Path | None = None
    kill: Kill | None = None
    out: Path = Path("demo-out")

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise UsageError(f"the policy must be one of {', '.join(POLICIES)}, not {self.policy!r}")
        for kind in self.kinds:
            if kind not in LAUNCHERS:
                raise UsageError(f"the engine must be one of {', '.join(LAUNCHERS)}, not {kind!r}")
        if len(self.kinds) != self.cluster.nodes:
            raise UsageError(f"{self.cluster.nodes} nodes need as many engines, not {len(self.kinds)}")
        if len({TOKENIZERS[kind] for kind in self.kinds}) > 1:
            raise UsageError("emulated engines have a tokenizer of their own: they cannot be mixed with others")
        if self.workload.nodes != self.cluster.nodes:
            raise UsageError("the workload and the cluster must have the same number of nodes")
        names = node_names(self.cluster.nodes)
        if self.kill is not None and self.kill.node not in names:
            raise UsageError(f"there is no node {self.kill.node!r} to kill; the nodes are {', '.join(names)}")
        if self.kill is not None and len(names) < 2:
            raise UsageError("killing a node takes at least two nodes, so that one is left")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each node's engine."""
        return self.engines or (self.engine,) * self.cluster.nodes


class DemoRun(NamedTuple):
    """One pass of the trace. `killed_at_s` is when the kill was through, in seconds since the start."""

    figures: RunFigures
    samples: list[RequestSample]
    killed_at_s: float | None = None


class DemoResult(NamedTuple):
    """Both passes, and what they passed over."""

    settings: DemoSettings
    trace: DemoTrace
    runs: dict[str, DemoRun]


class DemoProgress(Protocol):
    """Somebody who wants to know how far it is."""

    def stage(self, text: str) -> None:
        """A new stage began, with nothing to count."""

    def begin(self, run: str, requests: int) -> None:
        """A run's trace begins."""

    def answered(self, sample: RequestSample) -> None:
        """One request of the run has ended."""


class NoProgress:
    """Nobody."""

    def stage(self, text: str) -> None:
        """Ignored."""

    def begin(self, run: str, requests: int) -> None:
        """Ignored."""

    def answered(self, sample: RequestSample) -> None:
        """Ignored."""


def parse_kill(text: str) -> Kill:
    """Read ``NODE@FRACTION``; UsageError when it is not that, or the fraction is not inside 0 to 1."""
    match = re.fullmatch(r"(.+)@([0-9.]+)", text)
    try:
        kill = Kill(match.group(1), float(match.group(2))) if match else None
    except ValueError:
        kill = None
    if kill is None or not 0 < kill.fraction < 1:
        raise UsageError(f"a kill is NODE@FRACTION with a fraction between 0 and 1, as node-2@0.5, not {text!r}")
    return kill


def trace_of(settings: DemoSettings) -> DemoTrace:
    """The requests of a demonstration; UsageError when they are to be read from what is not there."""
    return make_trace(settings.workload, settings.mmlu)


async def run_demo(
    settings: DemoSettings,
    trace: DemoTrace,
    progress: DemoProgress | None = None,
    make_launcher: LauncherFactory | None = None,
) -> DemoResult:
    """Run `trace` unrouted and routed.

    Raises ProcessError when a process fails by itself, and UsageError, before anything is started, when the
    settings ask for what is not there. `make_launcher` replaces the launchers of all kinds.
    """
    progress = progress or NoProgress()
    runs: dict[str, DemoRun] = {}
    launchers = [make_launcher or launcher_for(kind) for kind in settings.kinds]
    async with Cluster.open(settings.cluster, launchers, settings.out / "logs") as cluster:
        progress.stage(f"starting {settings.cluster.nodes} nodes")
        for name, policy in ((UNROUTED, "none"), (ROUTED, settings.policy)):
            await cluster.prepare(policy)
            progress.begin(name, len(trace.requests))
            runs[name] = await _run_once(cluster, trace, settings.kill, progress.answered)
            progress.stage("clearing caches")
        progress.stage("stopping")
    first, second = runs[UNROUTED], runs[ROUTED]
    differing = mismatches(first.samples, second.samples)
    runs[ROUTED] = second._replace(figures=replace(second.figures, mismatches=differing))
    return DemoResult(settings, trace, runs)


async def _run_once(
    cluster: Cluster, trace: DemoTrace, kill: Kill | None, on_answer: Callable[[RequestSample], None]
) -> DemoRun:
    began = time.monotonic()
    killing = asyncio.create_task(_kill_later(cluster, trace, kill, began))
    try:
        samples = await send_trace(trace, cluster.addresses, cluster.model, on_answer)
        killed_at_s = await killing
    finally:
        killing.cancel()
    duration_s = time.monotonic() - began
    figures = run_figures(samples, await cluster.figures(), duration_s, len(cluster.sites))
    return DemoRun(figures, samples, killed_at_s)


async def _kill_later(cluster: Cluster, trace: DemoTrace, kill: Kill | None, began: float) -> float | None:
    if kill is None:
        return None
    await asyncio.sleep(kill.fraction * trace.duration_s)
    await cluster.kill(kill.node)
    return time.monotonic() - began


def run_to_end(settings: DemoSettings, trace: DemoTrace, progress: DemoProgress | None = None) -> DemoResult:
    """`run_demo` in an event loop of its own; SIGINT and SIGTERM become KeyboardInterrupt after the clean-up."""

    async def main() -> DemoResult:
        task = asyncio.current_task()
        assert task is not None
        with _cancelled_by_signals(task):
            return await run_demo(settings, trace, progress)

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


@contextlib.contextmanager
def _cancelled_by_signals(task: asyncio.Task[DemoResult]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
