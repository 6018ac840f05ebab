"""The sidecar beside an engine with an in-process tap: configured, or told by the engine itself."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import prefixroute_vllm
import pytest
from prefixroute_inproc import TapFollower, path_of_rank
from prefixroute_serving.attach import Attachment, EngineConfig
from prefixroute_serving.attach import attachment as attach
from prefixroute_serving.attach.kinds import KINDS, follower_of
from prefixroute_vllm.discovery import discover
from prefixroute_zmq import EventSource
from publishing import run, until
from tapping import BlockStored, VllmBatch, folder, tap_at

from prefixroute import Domain, LoadReport, Node

__all__ = ["folder"]


class Clock:
    """A driver that only tells the time."""

    def now(self) -> float:
        return 100.0

    def wake(self) -> None:
        """Nothing sleeps here."""


def attachment(monkeypatch: pytest.MonkeyPatch, discover: Any = None, **config: Any) -> tuple[Node, Attachment]:
    async def read_all() -> dict[int, LoadReport]:
        return {}

    kind = KINDS["vllm"]._replace(probe=lambda *_, **__: SimpleNamespace(read_all=read_all))
    monkeypatch.setattr(attach, "KINDS", {"vllm": kind if discover is None else kind._replace(discover=discover)})
    node = Node("n", Domain(model="m", tokenizer="t"), rng=random.Random(0), now=100.0)
    return node, Attachment(node, EngineConfig(url="http://e", **config), "http://me", 100.0)


async def attached(engine: Attachment, done: Callable[[], bool]) -> None:
    async with httpx.AsyncClient() as client:
        engine.connect(client, Clock())  # type: ignore[arg-type]
        tasks = [asyncio.create_task(work) for work in engine.work()]
        try:
            await until(done)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def stored(handle: int) -> VllmBatch:
    return VllmBatch(1.0, [BlockStored([handle], None, [handle] * 16, 16)])


def test_two_ranks_of_a_tap_are_two_endpoints(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        base = str(folder / "t")
        node, engine = attachment(monkeypatch, events=f"tap://{base}", ranks=2)
        with tap_at(base, rank=0) as first, tap_at(path_of_rank(base, 1), rank=1) as second:
            first.publish(stored(1))
            second.publish(stored(2))
            second.publish(stored(3))
            await attached(
                engine,
                lambda: (
                    len(engine.endpoints) == 2 and [node.residency(e).live_blocks for e in engine.endpoints] == [1, 2]
                ),
            )
        assert {rank: stats["last_seq"] for rank, stats in engine.stats().items()} == {"0": 0, "1": 1}
        engine.answered("n/0", 200, 2000)

    run(test)


def test_a_tap_that_the_engine_tells_of_is_followed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"0": {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tap://{folder}/t"}}

    async def ask(url: str, *, client: object) -> list[EventSource]:
        transport = httpx.MockTransport(lambda request: httpx.Response(200, json=told))
        async with httpx.AsyncClient(transport=transport) as answering:
            return await discover(url, client=answering)

    async def test() -> None:
        node, engine = attachment(monkeypatch, ask)
        with tap_at(folder / "t") as tap:
            tap.publish(stored(1))
            await attached(engine, lambda: node.residency("n/0").live_blocks == 1)

    run(test)


def test_the_endpoint_says_what_follows() -> None:
    source = EventSource("tap:///run/x")
    assert isinstance(follower_of(KINDS["vllm"], source, print), TapFollower)
    zmq = follower_of(KINDS["vllm"], source._replace(endpoint="tcp://*:5557"), print)
    assert isinstance(zmq, prefixroute_vllm.Follower)


@pytest.mark.parametrize("events", ["tap://run/x.sock", "tap:///" + "x" * 105])
def test_a_tap_that_cannot_be_is_refused_with_the_configuration(events: str) -> None:
    assert EngineConfig(url="http://e", events="tap:///run/x.sock", ranks=4).events == "tap:///run/x.sock"
    with pytest.raises(ValueError, match=r"absolute path|at most 107"):
        EngineConfig(url="http://e", events=events, ranks=2)
