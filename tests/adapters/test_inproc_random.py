"""Whatever the interleaving of batches, drops, readers that leave and come, and deaths of the engine: the residency at
the reader is the engine's truth, or is marked partial.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefixroute_inproc import Tap, TapFollower
from publishing import run, until
from tapping import AllBlocksCleared, BlockRemoved, BlockStored, VllmBatch, follower_of

from prefixroute import Domain, Residency
from prefixroute.events import EngineBatch

BLOCK = 16
QUEUE = 4
OPS = ("store", "remove", "clear", "burst", "turn", "listen", "leave", "kill")
WEIGHTS = (8, 6, 1, 1, 8, 6, 1, 1)


class Mirror:
    """What a follower is to keep true."""

    def __init__(self) -> None:
        self.residency = Residency(Domain("m", "t", BLOCK))
        self.applied: list[EngineBatch] = []

    def __call__(self, batch: EngineBatch) -> None:
        self.applied.append(batch)
        self.residency.apply(batch)

    @property
    def copies(self) -> Counter[int]:
        (group,) = self.residency._groups.values() or (None,)
        runs = group.runs if group is not None else {}
        return Counter({int(handle): run.copies["gpu"] for handle, run in runs.items() if run.copies})  # type: ignore[arg-type]


class Life:
    """An engine, its tap turned by hand, and what it really holds."""

    def __init__(self, path: str, rng: random.Random) -> None:
        self.rng = rng
        self.held: Counter[int] = Counter()
        self.dropped = False
        self.tap = Tap("vllm", path=path, queue_batches=QUEUE)

    def publish(self, *events: object) -> None:
        before = self.tap.stats().dropped
        self.tap.publish(VllmBatch(0.0, list(events)))
        self.dropped |= self.tap.stats().dropped > before

    def store(self) -> None:
        handle = self.rng.randrange(1, 30)
        self.held[handle] += 1
        self.publish(BlockStored([handle], None, [handle] * BLOCK, BLOCK))

    def remove(self) -> None:
        if self.held:
            handle = self.rng.choice(sorted(self.held.elements()))
            self.held -= Counter([handle])
            self.publish(BlockRemoved([handle], "GPU"))

    def clear(self) -> None:
        self.held.clear()
        self.publish(AllBlocksCleared())

    def burst(self) -> None:
        for _ in range(QUEUE + 2):
            self.store()

    def kill(self) -> None:
        """As by SIGKILL: the sockets are closed, the file stays."""
        assert self.tap._server is not None
        self.tap._server.close_inherited()
        self.tap._server._selector.close()
        self.tap._server = None


class Scene:
    """The engine's lives, and one follower that is there at times."""

    def __init__(self, path: str, seed: int) -> None:
        self.path = path
        self.rng = random.Random(seed)
        self.life = Life(path, self.rng)
        self.mirror = Mirror()
        self.follower: TapFollower = follower_of(path, self.mirror)
        self.task: asyncio.Task[None] | None = None

    async def do(self, op: str) -> None:
        if op == "turn":
            self.life.tap.turn()
        elif op == "listen":
            if self.task is None:
                self.task = asyncio.create_task(self.follower.run())
            for _ in range(self.rng.randrange(1, 6)):
                await asyncio.sleep(0)
        elif op == "leave":
            await self.leave()
        elif op == "kill":
            self.life.kill()
            self.life = Life(self.path, self.rng)
        else:
            getattr(self.life, op)()

    async def leave(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
            self.task = None

    async def settle(self) -> None:
        """Let all that was published arrive."""
        await self.do("listen")
        tap = self.life.tap

        def arrived() -> bool:
            tap.turn()
            last = self.follower.stats().last_seq
            return self.follower._life == tap.life and (-1 if last is None else last) + 1 == tap.stats().published

        await until(arrived)

    async def end(self) -> None:
        await self.leave()
        self.life.tap.close()


def check(scene: Scene) -> None:
    residency = scene.mirror.residency
    residency._check()
    if not residency.partial:
        assert scene.mirror.copies == scene.life.held
    if not scene.life.dropped:
        assert not residency.partial, "nothing was lost in this life"
    stats = scene.follower.stats()
    assert (stats.decode_errors, stats.unknown_events) == ({}, 0)


async def play(ops: list[str], seed: int) -> Scene:
    with tempfile.TemporaryDirectory(prefix="tap-", dir="/tmp") as folder:
        scene = Scene(str(Path(folder) / "t"), seed)
        try:
            for op in ops:
                await scene.do(op)
            await scene.settle()
            check(scene)
        finally:
            await scene.end()
    return scene


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(OPS), max_size=40), st.integers(0, 1000))
def test_the_residency_is_true_or_partial_whatever_happens(ops: list[str], seed: int) -> None:
    async def test() -> None:
        await play(ops, seed)

    run(test)


@pytest.mark.parametrize("seed", range(6))
def test_long_runs_meet_everything(seed: int) -> None:
    async def test() -> None:
        ops = random.Random(seed).choices(OPS, WEIGHTS, k=600)
        scene = await play(ops, seed)
        stats = scene.follower.stats()
        assert stats.connections > 3 and stats.gaps > 3 and stats.restarts > 3 and stats.replayed > 3

    run(test)
