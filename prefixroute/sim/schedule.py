"""Schedules: what engines, nodes and the network do, step by step, drawn from a seed, printed as text and read back.

    seed 7
    nodes 3
    settings interval_s=0.1 fan_out=2 datagram_bytes=900
    0.05 store n0 12
    0.20 restart n1 -1

A line is a step: the virtual seconds that pass after it, an action of the table `ACTIONS`, and its arguments.

Rules:
1. A step can always be taken, or does nothing: so any steps may be left out of a schedule.
2. After the steps comes quiet: faults end, engines rest, and within `quiet_rounds` all replicas are their owners' sets.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from prefixroute import NodeSettings, UsageError

from .invariants import InvariantError, Violation
from .links import CALM, Link
from .network import Network

MAX_NODES = 6
FIRST_INCARNATION = 100


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


class Outcome(NamedTuple):
    """How a schedule went. `step` is the index of the step during which the violation showed, `len(steps)` in quiet."""

    violation: Violation | None
    step: int
    network: Network
    times: list[float]
    quiet_rounds: float


# --- actions -----------------------------------------------------------------------------------------------


class World:
    """A network and what a schedule must remember of it: which incarnation each node or second endpoint had last."""

    def __init__(self, schedule: Schedule, *, trace: bool = False) -> None:
        self.net = Network(schedule.seed, CALM, schedule.settings, trace=trace)
        self.lives: dict[str, int] = {}
        self.retired: set[str] = set()
        for i in range(schedule.nodes):
            self.start(f"n{i}", FIRST_INCARNATION)

    @property
    def names(self) -> list[str]:
        """All names that nodes ever had."""
        return [name for name in self.lives if "/" not in name]

    def start(self, name: str, incarnation: int) -> None:
        """Start a node under this incarnation."""
        self.lives[name] = max(incarnation, 1)
        settings = self.net.settings
        if settings.learn_peers:
            settings = dataclasses.replace(settings, contact=name)
        # Who was told that a node is gone for good must be told that it is back.
        mutual = not settings.learn_peers or name in self.retired
        self.net.add(name, incarnation=self.lives[name], settings=settings, mutual=mutual)


def _engine(method: str) -> Callable[..., None]:
    """An action of a node's engine."""

    def act(world: World, name: str, *arguments: Any) -> None:
        engine = world.net.engines.get(f"{name}/0")
        if engine is not None:
            call = getattr(engine, method)
            if method == "evict":
                world.net.act(name, lambda node, now: call(now, *arguments))
            else:
                world.net.act(name, lambda node, now: call(*arguments, now))

    return act


def _restart(world: World, name: str, step: int) -> None:
    if name in world.net.nodes:
        world.net.stop(name)
        world.start(name, world.lives[name] + step)


def _stop(world: World, name: str) -> None:
    if name in world.net.nodes and len(world.net.nodes) > 2:
        world.net.stop(name)


def _start(world: World, name: str) -> None:
    if name not in world.net.nodes and len({*world.names, name}) <= MAX_NODES:
        world.start(name, world.lives.get(name, FIRST_INCARNATION) + 1)


def _retire(world: World, name: str) -> None:
    """Stop a node, and tell all others that it is gone for good."""
    if name in world.net.nodes and len(world.net.nodes) > 2:
        world.net.stop(name)
        world.retired.add(name)
        for other in world.net.nodes:
            world.net.act(other, lambda node, now: node.remove_peer(name, now))


def _leave(world: World, name: str) -> None:
    """Let a node take its leave, then stop it."""
    if name in world.net.nodes and name not in world.net.paused and len(world.net.nodes) > 2:
        world.net.leave(name)


def _add_endpoint(world: World, name: str) -> None:
    """Let a node own a second endpoint, of a later life than the last of that name."""
    endpoint = f"{name}/1"
    if name in world.net.nodes and endpoint not in world.net.engines:
        world.lives[endpoint] = world.lives.get(endpoint, FIRST_INCARNATION) + 1
        world.net.add_endpoint(name, "1", world.lives[endpoint])
        world.net.act(name, lambda node, now: world.net.engines[endpoint].store(8, now))


def _drop_endpoint(world: World, name: str) -> None:
    if f"{name}/1" in world.net.engines:
        world.net.remove_endpoint(name, f"{name}/1")


def _split(world: World, one: str) -> None:
    group = one.split(",")
    world.net.split(group, [name for name in world.names if name not in group])


def _one_way(world: World, source: str, to: str) -> None:
    world.net.block_one_way(source, to)


def _pause(world: World, name: str, what_comes: str) -> None:
    if name in world.net.nodes:
        world.net.pause(name, buffers=what_comes == "waits")


def _jump(world: World, name: str, seconds: float) -> None:
    if name in world.net.nodes:
        world.net.jump(name, seconds)


def _links(world: World, loss: float, duplicate: float, late: float, late_s: float, slow_s: float) -> None:
    world.net.link = Link((0.0005, 0.002 + slow_s), loss, duplicate, late, late_s)


def _lossy(world: World, source: str, to: str, loss: float) -> None:
    world.net.links[source, to] = dataclasses.replace(world.net.link, loss=loss)


class Action(NamedTuple):
    """An action: the kinds of its arguments, how often it is drawn, how they are drawn, and what it does."""

    kinds: tuple[Callable[[str], Any], ...]
    weight: int
    draw: Callable[[random.Random, list[str]], tuple[Any, ...]]
    take: Callable[..., None]


def _share(rng: random.Random) -> float:
    return rng.choice((0.1, 0.5, 0.9, 1.0))


def _blocks(rng: random.Random) -> int:
    return rng.choice((1, 2, 5, 10, 30, 60)) if rng.random() < 0.93 else rng.choice((200, 400, 800))


def _group(rng: random.Random, names: list[str]) -> str:
    return ",".join(sorted(rng.sample(names, rng.randrange(1, len(names)))))


ACTIONS: dict[str, Action] = {
    "store": Action((str, int), 30, lambda r, n: (r.choice(n), _blocks(r)), _engine("store")),
    "fork": Action((str, int, float), 20, lambda r, n: (r.choice(n), _blocks(r), _share(r)), _engine("fork")),
    "evict": Action((str, float), 24, lambda r, n: (r.choice(n), _share(r)), _engine("evict")),
    "clear": Action((str,), 3, lambda r, n: (r.choice(n),), _engine("clear")),
    "engine-restart": Action((str,), 3, lambda r, n: (r.choice(n),), _engine("restart")),
    "engine-gap": Action((str, int), 3, lambda r, n: (r.choice(n), _blocks(r)), _engine("lose")),
    "restart": Action((str, int), 6, lambda r, n: (r.choice(n), r.choice((1, 1, 0, -1))), _restart),
    "stop": Action((str,), 2, lambda r, n: (r.choice(n),), _stop),
    "start": Action((str,), 4, lambda r, n: (r.choice([*n, f"n{len(n)}"]),), _start),
    "retire": Action((str,), 1, lambda r, n: (r.choice(n),), _retire),
    "leave": Action((str,), 1, lambda r, n: (r.choice(n),), _leave),
    "add-endpoint": Action((str,), 2, lambda r, n: (r.choice(n),), _add_endpoint),
    "drop-endpoint": Action((str,), 2, lambda r, n: (r.choice(n),), _drop_endpoint),
    "split": Action((str,), 3, lambda r, n: (_group(r, n),), _split),
    "one-way": Action((str, str), 3, lambda r, n: tuple(r.sample(n, 2)), _one_way),
    "heal": Action((), 6, lambda r, n: (), lambda world: world.net.heal()),
    "pause": Action((str, str), 3, lambda r, n: (r.choice(n), r.choice(("waits", "is-lost"))), _pause),
    "resume": Action((str,), 6, lambda r, n: (r.choice(n),), lambda world, name: world.net.resume(name)),
    "jump": Action((str, float), 2, lambda r, n: (r.choice(n), r.choice((0.05, 0.5, 5.0, 1000.0))), _jump),
    "links": Action(
        (float,) * 5,
        5,
        lambda r, n: (
            r.choice((0.0, 0.1, 0.3)),
            r.choice((0.0, 0.1, 0.5)),
            r.choice((0.0, 0.05, 0.3)),
            r.choice((0.2, 1.0, 3.0)),
            r.choice((0.0, 0.0, 0.1, 0.3)),
        ),
        _links,
    ),
    "lossy": Action((str, str, float), 2, lambda r, n: (*r.sample(n, 2), r.choice((0.5, 0.9, 1.0))), _lossy),
    "calm": Action((), 4, lambda r, n: (), lambda world: world.net.calm()),
    "wait": Action((), 0, lambda r, n: (), lambda world: None),
}


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
    kinds: dict[object, Callable[[str], Any]] = {"float": float, "int": int, "str": str, "bool": "True".__eq__}
    types = {known.name: kinds[known.type] for known in dataclasses.fields(NodeSettings) if known.type in kinds}
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
        if known.type in ("float", "int", "str", "bool") and getattr(settings, known.name) != getattr(default, known.name)
    }
    return " ".join(f"{name}={_text(value)}" for name, value in changed.items())


def _text(value: object) -> str:
    return repr(value) if isinstance(value, float) else str(value)


# --- running -----------------------------------------------------------------------------------------------


def play(schedule: Schedule, *, trace: bool = False, quiet: bool = True) -> Outcome:
    """Run a schedule, then let it come to rest. Deterministic; a violation ends it and is returned, not raised."""
    times: list[float] = []
    world = None
    rounds = 0.0
    try:
        world = World(schedule, trace=trace)
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
        assert world is not None
        return Outcome(error.violation, len(times) - 1, world.net, times, rounds)
    return Outcome(None, len(schedule.steps), world.net, times, rounds)


def quiet_rounds(net: Network) -> float:
    """Return after how many rounds of quiet all replicas must be their owners' sets.

    A word reaches everybody in a dozen exchanges or so, though some go to peers that are dead; a large set takes as
    many exchanges as it has bursts, and each node's may have to come from the owner alone.
    """
    settings = net.settings
    sizes = [len(net.nodes[name].digests()[endpoint].keys) for name, host in net.hosts.items() for endpoint in host.own]
    bursts = sum(1 + 6 * size / min(settings.burst_bytes / 3, 60000) for size in sizes)
    return 40 + 4 * len(net.nodes) * bursts / settings.fan_out


def settle(net: Network) -> float:
    """End all faults and check what must hold then; return the rounds that it took. Raises `InvariantError`."""
    settings = net.settings
    # Nodes slow down while nothing happens: whoever was cut off may need one slow round to be heard.
    pace = max(settings.interval_s, float(getattr(settings, "idle_interval_s", 0.0)))
    net.calm()
    net.run(max(net.last_arrival - net.now, 0.0))
    began = net.now
    net.run(2 * pace)
    bound = quiet_rounds(net) * pace
    while True:
        lagging = net.lagging()
        if not lagging:
            break
        if net.now - began > bound:
            name, endpoint = lagging[0]
            held = net.nodes[name].digests().get(endpoint)
            owner = net.nodes[endpoint.partition("/")[0]].digests()[endpoint]
            message = (
                f"after {net.now - began:.1f} s of quiet it holds "
                f"{(*held[:2], len(held.keys)) if held else None}, its owner {(*owner[:2], len(owner.keys))}"
            )
            raise InvariantError(Violation("quiet", name, endpoint, net.now, message))
        net.run(pace)
    took = (net.now - began) / pace
    ends = began + settings.suspect_after_s
    if net.ghosts():
        ends = began + settings.forget_after_s + 15 * pace
    net.run(max(ends, net.now + 3 * pace) - net.now)
    for what, found in (
        ("is alive, and no candidate", net.unheard()),
        ("is dead, and not forgotten", net.ghosts()),
        ("is not its owner's set any more", net.lagging()),
    ):
        if found:
            raise InvariantError(Violation("quiet", *found[0], net.now, f"{what}, {net.now - began:.1f} s after quiet"))
    for name, node in net.nodes.items():
        net.oracle.memory(name, node, net.now)
        try:
            node._check()
        except AssertionError as error:
            raise InvariantError(Violation("exception", name, "", net.now, f"node._check: {error}")) from error
    return took
