"""Stories: a failing schedule made as short as it gets while it still breaks the same rule.

Rules:
1. A shorter schedule counts only if it breaks the same rule, at whatever node and moment.
2. The number of runs is bounded; what is shortest by then is the story.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .oracle import Violation
from .schedule import Schedule, ScheduleOutcome, Step, play

MAX_RUNS = 400
"""Runs that shrinking one schedule may cost."""


class FailureStory(NamedTuple):
    """A short schedule that breaks a rule, when each of its steps came, and what happened last."""

    schedule: Schedule
    violation: Violation
    times: tuple[float, ...]
    last: tuple[str, ...]
    runs: int

    def __str__(self) -> str:
        lines = [
            f"seed {self.schedule.seed}: {self.violation}",
            f"{self.schedule.nodes} nodes, {len(self.times)} steps:",
        ]
        lines += [f"{at:9.3f}  {step}" for at, step in zip(self.times, self.schedule.steps, strict=False)]
        return "\n".join([*lines, "the last that happened:", *self.last, "replay it from:", str(self.schedule)])

    def to_json(self) -> dict[str, Any]:
        """Return the story as plain data; `schedule` is text for `--replay`."""
        return {
            "seed": self.schedule.seed,
            "violation": self.violation._asdict(),
            "steps": [f"{at:.3f}  {step}" for at, step in zip(self.times, self.schedule.steps, strict=False)],
            "last": list(self.last),
            "schedule": str(self.schedule),
        }


def shrink(schedule: Schedule, outcome: ScheduleOutcome, *, max_runs: int = MAX_RUNS) -> FailureStory:
    """Make a story of a schedule that broke a rule. Costs up to `max_runs` runs of it."""
    if outcome.violation is None:
        raise ValueError("this schedule broke no rule")
    search = _Search(schedule, outcome, max_runs)
    search.reduce()
    return search.story()


class _Search:
    def __init__(self, schedule: Schedule, outcome: ScheduleOutcome, max_runs: int) -> None:
        assert outcome.violation is not None
        self.rule = outcome.violation.rule
        self.left = max_runs
        self.runs = 0
        # What comes after the violation has no part in it.
        self.best = _with(schedule, schedule.steps[: outcome.step + 1])
        self.outcome = outcome
        if not self.breaks(self.best):
            self.best = schedule

    def breaks(self, candidate: Schedule) -> bool:
        """Run a candidate and keep it if it breaks the rule."""
        if self.left <= 0:
            return False
        self.left -= 1
        self.runs += 1
        outcome = play(candidate)
        if outcome.violation is None or outcome.violation.rule != self.rule:
            return False
        self.best, self.outcome = candidate, outcome
        return True

    def reduce(self) -> None:
        """Leave out steps, then make what is left simpler, until nothing helps."""
        while self.left > 0:
            before = self.best
            self._leave_out()
            self._join_waits()
            self._simplify()
            if self.best == before:
                return

    def _leave_out(self) -> None:
        size = max(len(self.best.steps) // 2, 1)
        while self.left > 0:
            at, shorter = 0, False
            while at < len(self.best.steps) and self.left > 0:
                if self._without(at, at + size):
                    shorter = True
                else:
                    at += size
            if size == 1 and not shorter:
                return
            size = max(size // 2, 1)

    def _without(self, start: int, end: int) -> bool:
        """Leave some steps out, and the time that they took if possible; return whether there are fewer steps now."""
        steps = self.best.steps
        if self.breaks(_with(self.best, steps[:start] + steps[end:])):
            return True
        gone = steps[start:end]
        idle = Step(round(sum(step.wait_s for step in gone), 3), "wait")
        if idle.wait_s and gone != (idle,):
            self.breaks(_with(self.best, (*steps[:start], idle, *steps[end:])))
        return len(self.best.steps) < len(steps)

    def _join_waits(self) -> None:
        at = 0
        while at + 1 < len(self.best.steps):
            one, other = self.best.steps[at : at + 2]
            joined = one._replace(wait_s=round(one.wait_s + other.wait_s, 3))
            steps = self.best.steps
            if other.action != "wait" or not self.breaks(_with(self.best, (*steps[:at], joined, *steps[at + 2 :]))):
                at += 1

    def _simplify(self) -> None:
        for at in range(len(self.best.steps)):
            for simpler in _simpler(self.best.steps[at]):
                steps = self.best.steps
                if at >= len(steps):
                    return
                if self.breaks(_with(self.best, (*steps[:at], simpler, *steps[at + 1 :]))):
                    break

    def story(self) -> FailureStory:
        """Return what was found."""
        assert self.outcome.violation is not None
        last = tuple(map(str, self.outcome.network.recent()))
        times = tuple(self.outcome.times[: len(self.best.steps)])
        return FailureStory(self.best, self.outcome.violation, times, last, self.runs)


_SIMPLER: dict[str, Callable[[tuple[Any, ...]], list[tuple[str, tuple[Any, ...]]]]] = {
    "store": lambda a: [("store", (a[0], blocks)) for blocks in (1, 5) if blocks < a[1]],
    "fork": lambda a: [("store", (a[0], blocks)) for blocks in (1, 5) if blocks <= a[1]],
    "evict": lambda a: [("clear", (a[0],))],
    "engine-gap": lambda a: [("store", (a[0], 1))],
    "links": lambda a: [("links", (*a[:i], 0.0, *a[i + 1 :])) for i in range(len(a)) if a[i] and not (i == 3 and a[2])],
    "jump": lambda a: [("jump", (a[0], seconds)) for seconds in (0.05, 0.5) if seconds < a[1]],
}


def _with(schedule: Schedule, steps: tuple[Step, ...]) -> Schedule:
    return dataclasses.replace(schedule, steps=steps)


def _simpler(step: Step) -> Iterator[Step]:
    """Yield steps that do less than this one, least first."""
    if step.action in _SIMPLER:
        for action, arguments in _SIMPLER[step.action](step.arguments):
            yield Step(step.wait_s, action, arguments)
    if step.wait_s:
        yield step._replace(wait_s=0.0)
