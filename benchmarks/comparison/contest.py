"""Contestants timed in turns, so that whatever else the machine does meets them all; and where it is seen, not at all.

Rules:
1. A round lets each contestant run once, for about as long as the others; each round begins with another one.
2. A run during which a thread of this process was ready and had to wait for a core is made again, up to `TRIES` times:
   the kernel counts that wait (Linux). The least disturbed of them counts.
3. A time is that of one call: the median of the rounds, and the best round.
   Rounds that were disturbed all the same do not count; where all were, the best one does, for ours as for others.
4. A ratio is the median of the rounds' own ratios, while enough were quiet for both: they met the same machine.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

Run = Callable[[int], int]
"""Makes so many calls, and returns the nanoseconds that they took."""

SLICE_NS = 1_500_000
"""What a contestant gets of a round: less than a scheduler's own slice, so that one can pass undisturbed."""

MOST_CALLS = 256
TRIES = 10
ENOUGH = 3
QUIET = 0.02
"""The share of a run that may be waiting for a core."""


class Times(NamedTuple):
    """Microseconds a call in each round, and which rounds were quiet: these alone count, if there are any."""

    rounds: tuple[float, ...]
    quiet: tuple[bool, ...]

    @property
    def best(self) -> float:
        """The best round."""
        return min(self._counted())

    @property
    def median(self) -> float:
        """The median round."""
        return median(self._counted())

    def over(self, other: Times) -> float:
        """How many times as long this one took as the other: the median of the rounds, if enough were quiet."""
        pairs = self._quiet_beside(other)
        return median(a / b for a, b in pairs) if len(pairs) >= ENOUGH else self.median / other.median

    def less(self, other: Times) -> Times:
        """What this one took more than the other, round by round."""
        pairs = self._quiet_beside(other) or [(self.best, other.best)]
        return Times(tuple(a - b for a, b in pairs), (True,) * len(pairs))

    def _counted(self) -> list[float]:
        """Quiet rounds; where none was, what was disturbed least is the nearest to the truth, and that is the best."""
        calm = [taken for taken, quiet in zip(self.rounds, self.quiet, strict=True) if quiet]
        return calm or [min(self.rounds)]

    def _quiet_beside(self, other: Times) -> list[tuple[float, float]]:
        sides = zip(self.rounds, other.rounds, self.quiet, other.quiet, strict=True)
        return [(a, b) for a, b, calm, also in sides if calm and also]


def calls(call: Callable[[Any], object], inputs: Sequence[Any]) -> Run:
    """A run that makes calls on the inputs in turn."""

    def run(n: int) -> int:
        turns = [inputs[i % len(inputs)] for i in range(n)]
        start = time.perf_counter_ns()
        for one in turns:
            call(one)
        return time.perf_counter_ns() - start

    return run


def waits() -> dict[str, int]:
    """Nanoseconds that each thread of this process was ready and had no core; nothing where the kernel does not say."""
    found: dict[str, int] = {}
    try:
        tasks = os.listdir("/proc/self/task")
    except OSError:
        return found
    for task in tasks:
        try:
            with open(f"/proc/self/task/{task}/schedstat") as stat:
                found[task] = int(stat.read().split()[1])
        except (OSError, IndexError):
            continue  # a thread that ended meanwhile, or a kernel without these counts
    return found


class Taken(NamedTuple):
    """What a run took, and the share of it that a thread waited for a core."""

    waited: float
    ns: int

    @property
    def quiet(self) -> bool:
        """Whether it may count."""
        return self.waited <= QUIET


def taken(run: Callable[[], int]) -> Taken:
    """Run once."""
    before = waits()
    ns = run()
    waited = sum(after - before.get(task, 0) for task, after in waits().items())
    return Taken(waited / max(ns, 1), ns)


class Tally:
    """How many runs counted, and how many of them although they were disturbed."""

    def __init__(self) -> None:
        self.runs = 0
        self.disturbed = 0

    def least_disturbed(self, run: Callable[[], int], tries: int = TRIES) -> Taken:
        """Run, again if need be; return the run that waited least."""
        best = taken(run)
        while not best.quiet and tries > 1:
            # Who has just slept is let run for a while.
            time.sleep(0.002)
            best, tries = min(best, taken(run)), tries - 1
        self.count(best)
        return best

    def count(self, run: Taken) -> None:
        """Count a run."""
        self.runs += 1
        self.disturbed += not run.quiet


TALLY = Tally()


def contest(contestants: Mapping[str, Run], rounds: int, slice_ns: int = SLICE_NS) -> dict[str, Times]:
    """Time all contestants in turns, each for about `slice_ns` a round; return the times of each."""
    lots: dict[str, int] = {}
    for name, run in contestants.items():
        run(1)
        once = max(min(run(2), run(2), run(2)) // 2, 1)
        lots[name] = min(max(slice_ns // once, 1), MOST_CALLS)
    runs: dict[str, list[Taken]] = {name: [] for name in contestants}
    order = list(contestants)
    gc.collect()
    for i in range(rounds):
        for name in order[i % len(order) :] + order[: i % len(order)]:
            runs[name].append(TALLY.least_disturbed(partial(contestants[name], lots[name])))
    return {name: times_of(runs[name], lots[name]) for name in order}


def times_of(runs: Sequence[Taken], calls: int) -> Times:
    """The times of one of so many calls in each run."""
    return Times(tuple(run.ns / calls / 1000 for run in runs), tuple(run.quiet for run in runs))
