"""``prefixroute simulate place --changes``: a placement that follows load and fleet against one that stays as planned.

Rule: both sides meet the same arrivals, congestion and losses of servers, and route by the bookings; only one side
learns from measurements and moves blocks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import mean
from typing import Any, NamedTuple

from prefixroute.plan import OnlineSettings

from ..intervals import interval
from ..parallel import Progress, run_all
from .drifting_world import ChangingWorld, WorldChange
from .fleets import FleetShape, made_fleet
from .sessions import Ask, poisson
from .wan import network

CALM_REQUESTS = 60
CONGESTED = 3.0
"""Factor of the round trip during congestion."""


class StoryTask(NamedTuple):
    """One run of both sides: requests a second before and after a jump, and whether links and a server have trouble."""

    source: str
    shape: FleetShape
    calm_per_s: float
    jump_per_s: float
    requests: int
    trouble: bool
    headroom: float
    seed: int


class StoryResult(NamedTuple):
    """The result of a run: mean seconds of a request on each side, and the moves of the side that follows."""

    stays_s: float
    follows_s: float
    unserved: int
    moves: int
    gaps_s: float
    answered_s: float | None
    """Seconds from the jump until the first server was told to move; None if no server was."""


def run_story(task: StoryTask) -> StoryResult:
    """Run both sides of a task."""
    means, unserved = [], 0
    moves: list[tuple[float, int, int]] = []
    decided: list[float] = []
    gaps_s = jump = 0.0
    for follows in (False, True):
        wan = network(task.source, task.shape.servers + 4, random.Random(task.seed))
        made = made_fleet(wan, task.seed, task.shape)
        clients = task.shape.clients
        asks = poisson(task.calm_per_s, CALM_REQUESTS, made.rng, clients)
        jump = asks[-1].at_s + 1.0
        later = poisson(task.jump_per_s, task.requests, made.rng, clients)
        asks += [Ask(jump + ask.at_s, ask.client) for ask in later]
        by_memory = sorted(range(made.problem.servers), key=lambda j: -float(made.problem.memory_bytes[j]))
        happens = [
            WorldChange(jump + 100, "congest", tuple(by_memory[:2]), CONGESTED),
            WorldChange(jump + 300, "congest", tuple(by_memory[:2])),
            WorldChange(jump + 350, "leave", (by_memory[3 % made.problem.servers],)),
        ]
        settings = OnlineSettings(headroom=task.headroom)
        world = ChangingWorld(
            made.problem, task.calm_per_s, asks, happens if task.trouble else [], task.seed, follows, settings
        )
        story = world.run()
        means.append(mean(done.whole_s for _, done in story.done))
        unserved += story.unserved
        moves, decided, gaps_s = story.moves, story.decided_s, story.gaps_s
    after = [at - jump for at in decided if at >= jump]
    return StoryResult(means[0], means[1], unserved, len(moves), gaps_s, after[0] if after else None)


def compare_stories(tasks: Sequence[StoryTask], workers: int = 1, silent: bool = True) -> list[dict[str, Any]]:
    """Run tasks that differ in their seeds and networks; return a row for each network."""
    runs = run_all(run_story, tasks, workers, Progress(len(tasks), "runs", silent))
    rows = []
    for source in dict.fromkeys(task.source for task in tasks):
        mine = [run for task, run in zip(tasks, runs, strict=True) if task.source == source]
        stays, follows = interval([run.stays_s for run in mine]), interval([run.follows_s for run in mine])
        answered = [run.answered_s for run in mine if run.answered_s is not None]
        rows.append(
            {
                "network": source,
                "stays_s": round(stays.mean, 2),
                "stays_half_s": round(stays.half, 2),
                "follows_s": round(follows.mean, 2),
                "follows_half_s": round(follows.half, 2),
                "moves": round(mean(run.moves for run in mine), 2),
                "gaps_s": round(sum(run.gaps_s for run in mine), 2),
                "unserved": sum(run.unserved for run in mine),
                "answered_s": round(max(answered), 2) if answered else None,
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as text."""
    lines = [
        f"{'network':<14}{'stays s':>16}{'follows s':>16}{'moves':>8}{'gap s':>7}{'unserved':>10}{'first move s':>14}"
    ]
    for row in rows:
        stays, follows = (f"{row[f'{side}_s']:.1f} +-{row[f'{side}_half_s']:.1f}" for side in ("stays", "follows"))
        first = "-" if row["answered_s"] is None else f"{row['answered_s']:.1f}"
        lines.append(
            f"{row['network']:<14}{stays:>16}{follows:>16}{row['moves']:>8.1f}{row['gaps_s']:>7.0f}"
            f"{row['unserved']:>10}{first:>14}"
        )
    return "\n".join(lines)
