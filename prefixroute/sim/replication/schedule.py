"""Schedules: what engines, nodes and the network do, step by step, drawn from a seed, printed as text and read back.

    seed 7
    nodes 3
    settings interval_s=0.1 fan_out=2 datagram_bytes=900
    0.05 store n0 12
    0.20 restart n1 -1

A line is a step: the virtual seconds that pass after it, an action of the table `ACTIONS`, and its arguments.

Rules:
1. Any steps may be left out of a schedule: what cannot be done then does nothing.
2. After the steps comes quiet: faults end, engines rest, and within `quiet_rounds` all replicas are their owners' sets.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from prefixroute import NodeSettings, UsageError

from .actions import ACTIONS, MAX_NODES, ScheduleWorld
from .network import Network
from .oracle import InvariantError, Violation
from .quiet import settle

TYPES: dict[object, Callable[[str], Any]] = {"float": float, "int": int, "str": str, "bool": "True".__eq__}
"""How the settings that a schedule can say are read, by the name of their type."""


class Step(NamedTuple):
    """One action, its arguments, and the virtual seconds that pass after it."""

    wait_s: float
    action: str
    arguments: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return " ".join([f"{self.wait_s:g}", self.action, *(_text(argument) for argument in self.arguments)])


@dataclass(frozen=True, slots=True)
class Schedule:
    """A fleet's settings and what happens to it. The seed is that of everything random in between."""

    seed: int
    nodes: int
    settings: NodeSettings = field(default_factory=NodeSettings)
    steps: tuple[Step, ...] = ()

    def __str__(self) -> str:
        lines = [f"seed {self.seed}", f"nodes {self.nodes}", f"settings {_settings_text(self.settings)}".rstrip()]
        return "\n".join([*lines, *map(str, self.steps)]) + "\n"


class ScheduleOutcome(NamedTuple):
    """How a schedule went. `step` is the index of the step during which the violation showed, `len(steps)` in quiet."""

    violation: Violation | None
    step: int
    network: Network
    times: list[float]
    quiet_rounds: float


# --- drawing -----------------------------------------------------------------------------------------------


def draw_settings(rng: random.Random) -> NodeSettings:
    """Draw a pace and budgets. Times are a few dozen rounds, so that a schedule sees suspicion and forgetting."""
    interval = rng.choice((0.05, 0.1, 0.2))
    fan_out = rng.choice((1, 2, 3))
    datagram = rng.choice((1000, 1000, 1200, 4000, 60000))
    burst = max(datagram, rng.choice((datagram, 4 * datagram, 65536)))
    # One exchange a round may well miss somebody for a dozen rounds.
    suspect = interval * (30 if fan_out == 1 else rng.choice((12, 20)))
    values: dict[str, Any] = {
        "interval_s": interval,
        "fan_out": fan_out,
        "datagram_bytes": datagram,
        "burst_bytes": burst,
        "suspect_after_s": suspect,
        "forget_after_s": suspect * rng.choice((2, 3)),
        "idle_interval_s": interval * rng.choice((1, 3)),
        "publish_share": rng.choice((0.02, 0.5)),
        "publish_within_s": interval * rng.choice((0, 1, 4)),
        "digest_bytes": rng.choice((49152, 49152, 300, 0)),
        # Without a window the acceptance table is on its own: late and repeated datagrams reach it.
        "replay_window": rng.choice((4096, 64, 0)),
    }
    if rng.random() < 0.25:
        values |= {"learn_peers": True, "contact": "its-name"}
    return NodeSettings(**values)


def generate(
    seed: int,
    steps: int,
    *,
    nodes: int | None = None,
    settings: NodeSettings | None = None,
    weights: Mapping[str, int] | None = None,
) -> Schedule:
    """Draw a schedule of `steps` steps. `weights` says how often some actions are drawn instead of what `ACTIONS` says.

    The same arguments give the same schedule.
    """
    rng = random.Random(seed)
    settings = settings or draw_settings(rng)
    n = nodes or rng.choice((3, 3, 4, 5))
    names = [f"n{i}" for i in range(n)]
    often = {name: action.weight for name, action in ACTIONS.items()} | dict(weights or {})
    actions, shares = list(often), list(often.values())
    drawn = []
    for _ in range(steps):
        (action,) = rng.choices(actions, shares)
        arguments = ACTIONS[action].draw(rng, names)
        if action == "start" and arguments[0] not in names and len(names) < MAX_NODES:
            names.append(arguments[0])
        # Most steps are shorter than a round, so that what they do meets on the way; a few outlast memory.
        wait = settings.interval_s * rng.choice((0.0, 0.1, 0.1, 0.3, 0.3, 0.5, 0.5, 1.0, 1.0, 2.5))
        if rng.random() < 0.005:
            wait = rng.choice((1.2 * settings.suspect_after_s, 1.2 * settings.forget_after_s))
        drawn.append(Step(round(wait, 3), action, arguments))
    return Schedule(seed, n, settings, tuple(drawn))


def parse(text: str) -> Schedule:
    """Read a schedule as `str(schedule)` writes it. Raises `UsageError` that names the line."""
    seed, nodes, settings, steps = 0, 3, NodeSettings(), []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        try:
            match words:
                case ["seed", value]:
                    seed = int(value)
                case ["nodes", value]:
                    nodes = int(value)
                case ["settings", *pairs]:
                    settings = _settings(pairs)
                case [wait, action, *arguments]:
                    kinds = ACTIONS[action].kinds
                    values = tuple(kind(word) for kind, word in zip(kinds, arguments, strict=True))
                    steps.append(Step(float(wait), action, values))
                case _:
                    raise ValueError("a step has seconds and an action")
        except (KeyError, ValueError, UsageError) as error:
            raise UsageError(f"line {number} of the schedule, {line.strip()!r}: {error}") from None
    if not 2 <= nodes <= MAX_NODES:
        raise UsageError(f"a schedule has 2 to {MAX_NODES} nodes, not {nodes}")
    return Schedule(seed, nodes, settings, tuple(steps))


def _settings(pairs: Sequence[str]) -> NodeSettings:
    types = {known.name: TYPES[known.type] for known in dataclasses.fields(NodeSettings) if known.type in TYPES}
    values: dict[str, Any] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        values[name] = types[name](value)
    return NodeSettings(**values)


def _settings_text(settings: NodeSettings) -> str:
    default = NodeSettings()
    changed = {
        known.name: getattr(settings, known.name)
        for known in dataclasses.fields(NodeSettings)
        if known.type in ("float", "int", "str", "bool")
        and getattr(settings, known.name) != getattr(default, known.name)
    }
    return " ".join(f"{name}={_text(value)}" for name, value in changed.items())


def _text(value: object) -> str:
    return repr(value) if isinstance(value, float) else str(value)


# --- running -----------------------------------------------------------------------------------------------


def play(schedule: Schedule, *, trace: bool = False, quiet: bool = True) -> ScheduleOutcome:
    """Run a schedule, then let it come to rest. Deterministic; a violation ends it and is returned, not raised."""
    times: list[float] = []
    world = None
    rounds = 0.0
    try:
        world = ScheduleWorld(schedule.seed, schedule.nodes, schedule.settings, trace=trace)
        for step in schedule.steps:
            times.append(world.net.now)
            # By step, so that leaving one out changes little of what comes later.
            world.net.rng.seed(f"{schedule.seed} {step}")
            ACTIONS[step.action].take(world, *step.arguments)
            world.net.run(step.wait_s)
        times.append(world.net.now)
        if quiet:
            rounds = settle(world.net)
    except InvariantError as error:
        if world is None:
            raise
        return ScheduleOutcome(error.violation, len(times) - 1, world.net, times, rounds)
    return ScheduleOutcome(None, len(schedule.steps), world.net, times, rounds)
