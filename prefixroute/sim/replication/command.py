"""``prefixroute simulate replication``: many random schedules against the oracle, and stories of what fails.

Rules:
1. Schedule i has seed `seed + i`: ``--schedules 1 --seed S`` repeats one.
2. Workers share nothing, so the result does not depend on their number but for its seconds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from prefixroute import UsageError

from ..parallel import add_run_options
from .schedule import Schedule, generate, parse, play
from .shrink import FailureStory, shrink

MAX_STORIES = 5
"""Stories told in full; each costs some hundred runs to shrink."""


class ScheduleRun(NamedTuple):
    """What one schedule came to."""

    seed: int
    rule: str
    """The rule that was broken, "" for none."""
    violation: str
    deliveries: int
    bytes_sent: int
    virtual_s: float
    quiet_rounds: float


class ReplicationResult(NamedTuple):
    """What all schedules came to. `violations` counts schedules that broke a rule."""

    schedules: int
    steps: int
    seed: int
    violations: int
    rules: dict[str, int]
    failed: list[dict[str, Any]]
    stories: list[dict[str, Any]]
    told: list[str]
    deliveries: int
    bytes_sent: int
    virtual_s: float
    most_quiet_rounds: float
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {name: value for name, value in self._asdict().items() if name != "told"}


def run_one(seed: int, steps: int) -> ScheduleRun:
    """Draw and run one schedule."""
    return _run(generate(seed, steps))


def run(
    schedules: int,
    steps: int,
    seed: int = 1,
    workers: int = 1,
    *,
    stories: int = MAX_STORIES,
    progress: Callable[[int, int], None] | None = None,
) -> ReplicationResult:
    """Run schedules with seeds `seed`, `seed + 1`, ...; shrink the first failures to stories. Raises `UsageError`."""
    if schedules < 1 or steps < 0 or workers < 1:
        raise UsageError("simulate needs schedules >= 1, steps >= 0 and workers >= 1")
    began = time.perf_counter()
    runs = []
    for done in _map(partial(run_one, steps=steps), range(seed, seed + schedules), workers):
        runs.append(done)
        if progress is not None:
            progress(len(runs), sum(1 for other in runs if other.rule))
    runs.sort()
    failed = [generate(one.seed, steps) for one in runs if one.rule]
    return _result(runs, failed[:stories], steps, seed, began)


def replay(schedule: Schedule) -> ReplicationResult:
    """Run one schedule that was read from a file; if it fails, shrink it further."""
    began = time.perf_counter()
    done = _run(schedule)
    return _result([done], [schedule] if done.rule else [], len(schedule.steps), schedule.seed, began)


def _run(schedule: Schedule) -> ScheduleRun:
    outcome = play(schedule)
    net, violation = outcome.network, outcome.violation
    rule, text = (violation.rule, str(violation)) if violation is not None else ("", "")
    sent = sum(net.sent_bytes.values())
    return ScheduleRun(
        schedule.seed, rule, text, net.deliveries, sent, round(net.now, 3), round(outcome.quiet_rounds, 1)
    )


def _map(function: Callable[[int], ScheduleRun], seeds: Iterable[int], workers: int) -> Iterator[ScheduleRun]:
    if workers == 1:
        yield from map(function, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap_unordered(function, seeds, chunksize=4)


def _result(runs: list[ScheduleRun], failed: list[Schedule], steps: int, seed: int, began: float) -> ReplicationResult:
    told: list[FailureStory] = [shrink(schedule, play(schedule)) for schedule in failed]
    rules: dict[str, int] = {}
    for one in runs:
        if one.rule:
            rules[one.rule] = rules.get(one.rule, 0) + 1
    return ReplicationResult(
        len(runs),
        steps,
        seed,
        sum(rules.values()),
        rules,
        [{"seed": one.seed, "violation": one.violation} for one in runs if one.rule],
        [story.to_json() for story in told],
        [str(story) for story in told],
        sum(one.deliveries for one in runs),
        sum(one.bytes_sent for one in runs),
        round(sum(one.virtual_s for one in runs), 1),
        max((one.quiet_rounds for one in runs), default=0.0),
        round(time.perf_counter() - began, 2),
    )


# --- command -----------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add("--schedules", type=int, default=200, metavar="N", help="random schedules (200)")
    add("--steps", type=int, default=200, metavar="N", help="steps of a schedule (200)")
    add("--seed", type=int, default=1, metavar="S", help="seed of the first schedule (1)")
    add("--replay", type=Path, metavar="FILE", help="run the schedule in a file: its text, or a result with stories")
    add_run_options(parser)


def run_options(options: argparse.Namespace) -> int:
    """Run the command; return 1 if a rule was broken. Raises `UsageError` for options that cannot be used."""
    quiet = options.json == "-"
    if options.json is not None and not quiet:
        _write(options.json, "")
    if options.replay is not None:
        result = replay(_schedule_in(options.replay))
    else:
        progress = None if quiet else _Progress(options.schedules)
        result = run(options.schedules, options.steps, options.seed, options.workers, progress=progress)
    text = json.dumps(result.to_json(), indent=1)
    if quiet:
        print(text)
    else:
        print(_summary(result))
        if options.json is not None:
            _write(options.json, text + "\n")
    return 1 if result.violations else 0


class _Progress:
    """One line on standard error: on a terminal written anew every second, else a line every ten."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._told_at = time.monotonic()

    def __call__(self, done: int, failed: int) -> None:
        now, live = time.monotonic(), sys.stderr.isatty()
        if now - self._told_at < (1 if live else 10) and not (live and done == self._total):
            return
        self._told_at = now
        end = "\n" if done == self._total or not live else ""
        head = "\r" if live else ""
        print(f"{head}{done} of {self._total} schedules, {failed} failed", end=end, file=sys.stderr, flush=True)


def _summary(result: ReplicationResult) -> str:
    lines = [*result.told]
    lines += [f"seed {failed['seed']}: {failed['violation']}" for failed in result.failed[len(result.told) :]]
    lines.append(
        f"{result.schedules} schedules of {result.steps} steps from seed {result.seed}: "
        f"{result.violations} violations; {result.deliveries} deliveries, {result.virtual_s:.0f} virtual seconds, "
        f"at most {result.most_quiet_rounds:.0f} rounds to rest, {result.seconds:.1f} s"
    )
    return "\n".join(lines)


def _schedule_in(path: Path) -> Schedule:
    try:
        text = path.read_text()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    if text.lstrip().startswith("{"):
        try:
            text = json.loads(text)["stories"][0]["schedule"]
        except (ValueError, LookupError, TypeError):
            raise UsageError(f"{path} is no result with a story") from None
    return parse(text)


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
