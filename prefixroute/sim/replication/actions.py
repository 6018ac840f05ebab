"""What a schedule can do to a fleet: the table of actions, how often and how each is drawn, and how it is taken.

Rules:
1. An action can always be taken, or does nothing: so any steps may be left out of a schedule.
2. An action costs no time; what passes after it is said by its step.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from prefixroute import NodeSettings

from .links import CALM, Link
from .network import Network

MAX_NODES = 6
FIRST_INCARNATION = 100

PLACES = ("p0", "p1", "p2", "p3", "p4", "p5", "p6", "p7")
"""Addresses beside the names of nodes: more than nodes, so that one is free, and few, so that each is used again."""


class ScheduleWorld:
    """A network and what a schedule must remember of it: which incarnation each node or second endpoint had last."""

    def __init__(self, seed: int, nodes: int, settings: NodeSettings, *, trace: bool = False) -> None:
        self.net = Network(seed, CALM, settings, trace=trace)
        self.lives: dict[str, int] = {}
        self.places: dict[str, str] = {}
        """Where each node was last."""
        self.retired: set[str] = set()
        for i in range(nodes):
            self.start(f"n{i}", FIRST_INCARNATION)

    @property
    def names(self) -> list[str]:
        """All names that nodes ever had."""
        return [name for name in self.lives if "/" not in name]

    def start(self, name: str, incarnation: int, address: str = "") -> None:
        """Start a node under this incarnation, at its last address if it is given none.

        Nobody is told where a node is that it knows already: they have to find out.
        """
        settings = self.net.settings
        self.lives[name] = max(incarnation, 1)
        last = address or self.places.get(name, name)
        address = self.places[name] = next(at for at in (last, name, *PLACES) if at not in self.net.addresses)
        if settings.learn_peers:
            settings = dataclasses.replace(settings, contact=address)
        self.net.add(name, incarnation=self.lives[name], settings=settings, mutual=False, address=address)
        # Who was told that a node is gone for good must be told that it is back.
        if not settings.learn_peers or name in self.retired:
            for other, node in self.net.nodes.items():
                if other != name and name not in node.stats(self.net.read(other)).peers:
                    self.net.act(other, lambda node, now: node.add_peer(name, address, now))


def _engine(method: str) -> Callable[..., None]:
    """An action of a node's engine."""

    def act(world: ScheduleWorld, name: str, *arguments: Any) -> None:
        engine = world.net.engines.get(f"{name}/0")
        if engine is not None:
            call = getattr(engine, method)
            if method == "evict":
                world.net.act(name, lambda node, now: call(now, *arguments))
            else:
                world.net.act(name, lambda node, now: call(*arguments, now))

    return act


def _restart(world: ScheduleWorld, name: str, step: int) -> None:
    if name in world.net.nodes:
        world.net.stop(name)
        world.start(name, world.lives[name] + step)


def _move(world: ScheduleWorld, name: str, step: int, place: str) -> None:
    """Restart a node at another address, or start it there."""
    if name in world.lives and place not in world.net.addresses:
        if name in world.net.nodes:
            world.net.stop(name)
        world.start(name, world.lives[name] + step, place)


def _stall(world: ScheduleWorld, name: str, run_s: float, stand_s: float) -> None:
    if name in world.net.nodes:
        world.net.stall(name, run_s, stand_s)


def _stop(world: ScheduleWorld, name: str) -> None:
    if name in world.net.nodes and len(world.net.nodes) > 2:
        world.net.stop(name)


def _start(world: ScheduleWorld, name: str) -> None:
    if name not in world.net.nodes and len({*world.names, name}) <= MAX_NODES:
        world.start(name, world.lives.get(name, FIRST_INCARNATION) + 1)


def _retire(world: ScheduleWorld, name: str) -> None:
    """Stop a node, and tell all others that it is gone for good."""
    if name in world.net.nodes and len(world.net.nodes) > 2:
        world.net.stop(name)
        world.retired.add(name)
        for other in world.net.nodes:
            world.net.act(other, lambda node, now: node.remove_peer(name, now))


def _leave(world: ScheduleWorld, name: str) -> None:
    """Let a node take its leave, then stop it."""
    if name in world.net.nodes and name not in world.net.paused and len(world.net.nodes) > 2:
        world.net.leave(name)


def _add_endpoint(world: ScheduleWorld, name: str) -> None:
    """Let a node own a second endpoint, of a later life than the last of that name."""
    endpoint = f"{name}/1"
    if name in world.net.nodes and endpoint not in world.net.engines:
        world.lives[endpoint] = world.lives.get(endpoint, FIRST_INCARNATION) + 1
        world.net.add_endpoint(name, "1", world.lives[endpoint])
        world.net.act(name, lambda node, now: world.net.engines[endpoint].store(8, now))


def _drop_endpoint(world: ScheduleWorld, name: str) -> None:
    if f"{name}/1" in world.net.engines:
        world.net.remove_endpoint(name, f"{name}/1")


def _split(world: ScheduleWorld, one: str) -> None:
    group = one.split(",")
    world.net.split(group, [name for name in world.names if name not in group])


def _one_way(world: ScheduleWorld, source: str, to: str) -> None:
    world.net.block_one_way(source, to)


def _pause(world: ScheduleWorld, name: str, what_comes: str) -> None:
    if name in world.net.nodes:
        world.net.pause(name, buffers=what_comes == "waits")


def _jump(world: ScheduleWorld, name: str, seconds: float) -> None:
    if name in world.net.nodes:
        world.net.jump(name, seconds)


def _links(world: ScheduleWorld, loss: float, duplicate: float, late: float, late_s: float, slow_s: float) -> None:
    world.net.link = Link((0.0005, 0.002 + slow_s), loss, duplicate, late, late_s)


def _lossy(world: ScheduleWorld, source: str, to: str, loss: float) -> None:
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
    "move": Action(
        (str, int, str), 4, lambda r, n: (r.choice(n), r.choice((1, 1, 0, -1)), r.choice((*PLACES, *n))), _move
    ),
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
    "stall": Action(
        (str, float, float), 2, lambda r, n: (r.choice(n), r.choice((0.1, 0.7)), r.choice((0.3, 1.3, 4.0))), _stall
    ),
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
