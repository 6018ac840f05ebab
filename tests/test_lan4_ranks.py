"""Engines with several data-parallel ranks, and the two kinds of engine: what the sidecar makes of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import prefixroute_vllm
import pytest
from lan4_pair import DEADLINE_S, EXPECTED, MODEL, PREFIX, Pair, engine_config, events_over, run_pair, texts, until
from prefixroute_lan4 import attach, ranks
from prefixroute_lan4.attach import Attachment
from prefixroute_lan4.config import ENGINE_KINDS, EngineConfig
from prefixroute_lan4.kinds import KINDS, RANK_FIELD, RANK_HEADER, LoadPush, by_field, by_header
from prefixroute_zmq import EventSource
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prefixroute import Domain, LoadReport, Node, Outcome
from prefixroute.emulator import EmulatedEngine
from prefixroute.errors import UsageError
from prefixroute.events import BlocksStored, EngineBatch, ResidencyChanged, StreamRestarted

CAPACITIES = (256, 128)
RANKS = len(CAPACITIES)


class RankedEngine:
    """An API server with an emulated engine a rank behind it; requests name their rank as engines of `kind` want it."""

    def __init__(self, kind: str, engines: list[EmulatedEngine], base: int) -> None:
        self._kind = kind
        self._engines = engines
        self._base = base
        self.broken: set[int] = set()
        self.asked: list[int] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer for all ranks what is asked of the server, and let the named rank generate."""
        common = getattr(self, "_" + scope["path"].strip("/").replace("/", "_"), None)
        if common is not None:
            await common()(scope, receive, send)
        elif scope["path"].startswith("/v1/"):
            body = await whole_body(receive)
            headers = {name.decode(): value.decode() for name, value in scope["headers"]}
            named = headers.get(RANK_HEADER) if self._kind == "vllm" else json.loads(body).get(RANK_FIELD)
            rank = int(named if named is not None else -1)
            self.asked.append(rank)
            if rank in self.broken or rank < 0:
                await PlainTextResponse("told to", 500)(scope, receive, send)
                return
            await self._engines[rank].app(scope, replayed(body, receive), send)
        else:
            await self._engines[0].app(scope, receive, send)

    def _kv_event_sources(self) -> ASGIApp:
        configs = {str(rank): engine.publisher.config for rank, engine in enumerate(self._engines)}
        return JSONResponse(msgspec.to_builtins(configs) if self._kind == "vllm" else {}, 200)

    def _server_info(self) -> ASGIApp:
        ports = {"endpoint_port_base": self._base, "replay_endpoint_port_base": self._base + RANKS}
        kv_events = {"publisher": "zmq", "endpoint_host": "127.0.0.1", "topic": "kv", "dp_size": RANKS, **ports}
        return JSONResponse({"kv_events": kv_events} if self._kind == "sglang" else {})

    def _v1_loads(self) -> ASGIApp:
        loads = [
            {"dp_rank": rank, "num_running_reqs": 0, "max_total_num_tokens": engine.config.cache_tokens}
            for rank, engine in enumerate(self._engines)
        ]
        return JSONResponse({"loads": loads})

    def _metrics(self) -> ASGIApp:
        pages = [engine.metrics().replace('engine="0"', f'engine="{n}"') for n, engine in enumerate(self._engines)]
        return PlainTextResponse("".join(pages) if self._kind == "vllm" else "")


async def whole_body(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


def replayed(body: bytes, receive: Receive) -> Receive:
    """The body once more, then whatever comes."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return first.pop() if first else await receive()

    return again


def free_block(ports: int) -> int:
    """The first of some neighbouring ports of 127.0.0.1 that are free."""
    for base in range(21_000, 32_000, ports):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(base, base + ports):
                stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM)).bind(("127.0.0.1", port))
            return base
    raise AssertionError("no free ports")


def run_ranked(test: Callable[[Pair, RankedEngine], Coroutine[Any, Any, None]], folder: Path, kind: str) -> None:
    """Run `test` with an engine of one rank beside node 1, and one of two ranks beside node 2."""
    made: list[RankedEngine] = []

    async def make(stack: contextlib.AsyncExitStack, name: str, folder: Path) -> tuple[EmulatedEngine, ASGIApp]:
        base = free_block(2 * RANKS)
        engines = []
        for rank, capacity in enumerate(CAPACITIES):
            # not a wildcard: the engine connects, and stays on loopback
            tcp = events_over(f"tcp://127.0.0.1:{base + rank}", f"tcp://127.0.0.1:{base + RANKS + rank}")
            ipc = events_over(f"ipc://{folder}/{name}{rank}e", f"ipc://{folder}/{name}{rank}r")
            engine = EmulatedEngine(engine_config(tcp if kind == "sglang" else ipc, capacity))
            publish_as(engine, rank)
            engines.append(await stack.enter_async_context(engine))
        made.append(RankedEngine(kind, engines, base))
        return engines[0], made[0]

    async def with_ranks(pair: Pair) -> None:
        await until(lambda: bool(pair.one.sidecar.node.endpoint_url("node-2/1")))
        await test(pair, made[0])

    # a policy without rent: asking again and again, as waiting does, changes nothing
    run_pair(with_ranks, folder, "longest", kind, make, DEADLINE_S)


def publish_as(engine: EmulatedEngine, rank: int) -> None:
    """Make an emulated engine, which knows only rank 0, say that it is another one."""
    publish = engine.publisher.publish
    engine.publisher.publish = lambda batch: publish(  # type: ignore[method-assign]
        msgspec.structs.replace(batch, data_parallel_rank=rank)
    )


async def warm_rank(pair: Pair, rank: int, kind: str) -> None:
    """Make one rank of node 2 hold PREFIX, and both nodes know."""
    body: dict[str, Any] = {"model": MODEL, "prompt": PREFIX, "max_tokens": 1, RANK_FIELD: rank}
    url = pair.two.sidecar.config.engine.url
    reply = await pair.client.post(f"{url}/v1/completions", json=body, headers={RANK_HEADER: str(rank)})
    assert reply.status_code == 200
    await pair.known(PREFIX)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for sockets, whose paths must be short."""
    return tmp_path_factory.mktemp("s")


@pytest.mark.parametrize("kind", ENGINE_KINDS)
@pytest.mark.parametrize("warm", [0, 1])
def test_a_prompt_goes_to_the_rank_that_holds_it(folder: Path, kind: str, warm: int) -> None:
    async def test(pair: Pair, engine: RankedEngine) -> None:
        await warm_rank(pair, warm, kind)
        for node in (pair.one, pair.two):
            for stream in (False, True):
                engine.asked.clear()
                reply = await pair.ask(node, PREFIX, stream=stream)
                assert reply.headers["x-prefixroute-target"] == f"node-2/{warm}", reply.headers
                assert int(reply.headers["x-prefixroute-matched"]) > 200
                assert engine.asked == [warm]
                if not stream:
                    assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 200
                assert (texts(reply.content) if stream else reply.json()["choices"][0]["text"]) == EXPECTED
        assert pair.one.sidecar.node.counters["cached_tokens"] > 200

    run_ranked(test, folder, kind)


@pytest.mark.parametrize("kind", ENGINE_KINDS)
def test_each_rank_has_its_own_load_stream_and_row(folder: Path, kind: str) -> None:
    async def test(pair: Pair, engine: RankedEngine) -> None:
        two = pair.two.sidecar
        await warm_rank(pair, 1, kind)
        for rank, blocks in enumerate(CAPACITIES):
            name = f"node-2/{rank}"
            await until(lambda name=name: two.node.load(name, two.driver.now()).capacity_tokens > 0)  # type: ignore[misc]
            assert two.node.load(name, two.driver.now()).capacity_tokens == 16 * blocks
        stats = (await pair.client.get(f"{pair.two.url}/prefixroute/stats")).json()
        assert set(stats["engine_events"]) == {"0", "1"}
        assert stats["engine_events"]["1"]["batches"] > 0 == stats["engine_events"]["0"]["batches"]
        assert {row["endpoint"] for row in stats["state"]["endpoints"] if row["local"]} == {"node-2/0", "node-2/1"}
        await pair.ask(pair.two, PREFIX)
        explained = (await pair.client.get(f"{pair.two.url}/prefixroute/explain")).json()["decisions"][0]
        weighed = {row["endpoint"]: row["matched_tokens"] for row in explained["candidates"] if row["local"]}
        assert weighed["node-2/1"] > 200 > weighed["node-2/0"]
        assert (await pair.client.get(f"{pair.two.url}/health")).status_code == 200
        assert "node-2/1" in (await pair.client.get(f"{pair.two.url}/metrics")).text

    run_ranked(test, folder, kind)


def test_what_another_rank_serves_counts_for_that_one(folder: Path) -> None:
    async def test(pair: Pair, engine: RankedEngine) -> None:
        await warm_rank(pair, 1, "vllm")
        engine.broken.add(1)
        engine.asked.clear()
        one = pair.one.sidecar

        def confidence() -> float:
            rows = one.node.stats(one.driver.now()).endpoints
            return next(row.confidence for row in rows if row.endpoint == "node-2/1")

        before = confidence()
        reply = await pair.ask(pair.one, PREFIX)
        assert engine.asked == [1, 0]
        assert reply.headers["x-prefixroute-target"] == "node-2/0"
        assert reply.json()["choices"][0]["text"] == EXPECTED
        assert one.node.counters["outcomes_served"] == 1
        # rank 0 had nothing cached, which says nothing of what rank 1 holds
        assert one.node.counters["predicted_tokens"] == 0
        assert confidence() == before

    run_ranked(test, folder, "vllm")


# --- without sockets


NOBODY = "http://127.0.0.1:1"
"""Where no engine listens."""


class Clock:
    """A driver that only tells the time."""

    def __init__(self) -> None:
        self.at = 100.0

    def now(self) -> float:
        return self.at

    def wake(self) -> None:
        """Nothing sleeps here."""


class Quiet:
    """A follower that is handed what to say. Its class remembers those that were made."""

    made: list[Quiet]

    engine = prefixroute_vllm.ENGINE

    def __init__(self, source: EventSource, on_batch: Callable[..., None]) -> None:
        self.source, self.say, self.finished, self.resyncs = source, on_batch, 0, 0
        self.connected, self.runs = True, False
        self.made.append(self)

    async def run(self) -> None:
        if self.source.topic == "unusable":
            raise UsageError("cannot connect")
        self.runs = True
        try:
            await asyncio.Event().wait()
        finally:
            self.runs = False

    def stats(self) -> Quiet:
        return self

    def resync(self) -> None:
        self.resyncs += 1

    def note_finished(self, prompt_tokens: int) -> None:
        self.finished += 1


def source(rank: int, topic: str = "") -> EventSource:
    return EventSource(rank=rank, topic=topic, discovered=True)


class Desk:
    """An attachment with fakes all around it: what the engine tells is said by the test, and may be changed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sources: list[EventSource], **changes: Any) -> None:
        self.events = type("Events", (Quiet,), {"made": []})
        self.loads = type("Loads", (Quiet,), {"made": []})
        self.polled: dict[int, LoadReport] = {}
        self.told: list[EventSource] | UsageError = sources
        self.loads_told = sources
        self.asked = self.reads = 0
        probe = SimpleNamespace(read_all=self._read)
        push = LoadPush(self._discover_load, self.loads)
        kind = KINDS["sglang"]._replace(
            discover=self._discover, follower=self.events, probe=lambda *_, **__: probe, push=push
        )
        monkeypatch.setattr(attach, "KINDS", {"sglang": kind})
        self.clock = Clock()
        config = EngineConfig(url=NOBODY, kind="sglang", load_probe_s=0.001, prefill_tokens_per_s=700, **changes)
        self.node = Node("n", Domain(model="m", tokenizer="t"), rng=random.Random(0), now=100.0)
        self.engine = Attachment(self.node, config, "http://me", 100.0)
        self.taken: dict[str, LoadReport] = {}
        set_load = self.node.set_load

        def take(endpoint: str, load: LoadReport, now: float) -> None:
            self.taken[endpoint] = load
            set_load(endpoint, load, now)

        monkeypatch.setattr(self.node, "set_load", take)

    async def _read(self) -> dict[int, LoadReport]:
        self.reads += 1
        return self.polled

    async def _discover(self, *_: object, **__: object) -> list[EventSource]:
        self.asked += 1
        if isinstance(self.told, UsageError):
            raise self.told
        return list(self.told)

    async def _discover_load(self, *_: object, **__: object) -> list[EventSource]:
        return list(self.loads_told)

    def running(self) -> list[EventSource]:
        """The sources that are followed now."""
        return [follower.source for follower in self.events.made if follower.runs]

    def states(self) -> dict[str, str]:
        """What each endpoint's blocks are known from."""
        return {row.endpoint: row.residency for row in self.node.stats(100.0).endpoints}

    def run(self, test: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            async with httpx.AsyncClient() as client:
                self.engine.connect(client, self.clock)  # type: ignore[arg-type]
                tasks = [asyncio.create_task(work) for work in self.engine.work()]
                try:
                    await test()
                    assert not [task for task in tasks if task.done() and task.exception()]
                finally:
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run(main())


def test_the_table_and_the_configuration_know_the_same_kinds() -> None:
    assert tuple(KINDS) == ENGINE_KINDS


def test_endpoints_are_the_ranks_that_the_engine_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, [source(2), source(3)])
    assert desk.engine.endpoints == {"n/0": 0}, "the node can serve before the engine tells"

    async def test() -> None:
        await until(lambda: len(desk.events.made) == 2)
        assert desk.engine.endpoints == {"n/2": 2, "n/3": 3}
        assert [row.endpoint for row in desk.node.stats(100.0).endpoints] == ["n/2", "n/3"]
        tokens = tuple(range(32))
        stored = BlocksStored(handles=(1, 2), parent=None, tokens=tokens, block_size=16)
        desk.events.made[1].say(EngineBatch((stored,), rank=3))
        assert desk.node.residency("n/3").canonical_blocks == 2
        assert desk.node.residency("n/2").canonical_blocks == 0
        desk.engine.answered("n/3", 200, 9)
        assert [follower.finished for follower in desk.events.made] == [0, 1]

    desk.run(test)


def test_loads_that_are_pushed_and_asked_for_reach_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, [source(0), source(1)])

    async def test() -> None:
        await until(lambda: len(desk.events.made) == 2)
        assert not desk.loads.made, "an engine that is not up cannot tell where it pushes"
        desk.polled = {0: LoadReport(running=1), 1: LoadReport(running=2, prefill_tokens_per_s=50.0), 7: LoadReport()}
        await until(lambda: len(desk.loads.made) == 2)
        assert desk.taken["n/0"].prefill_tokens_per_s == 700
        assert desk.taken["n/1"].prefill_tokens_per_s == 50
        desk.polled = {}
        desk.loads.made[1].say(1, LoadReport(capacity_tokens=640))
        assert (desk.taken["n/0"].capacity_tokens, desk.taken["n/1"].capacity_tokens) == (0, 640)

    desk.run(test)


def test_a_refusal_counts_for_its_rank_until_it_serves_or_time_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, [source(0), source(1)])

    async def test() -> None:
        await until(lambda: len(desk.events.made) == 2)
        desk.polled = {0: LoadReport(), 1: LoadReport()}
        await until(lambda: len(desk.taken) == 2)
        for end in ("served", "time"):
            desk.engine.answered("n/1", 503, 9)
            await until(lambda: desk.taken["n/1"].refusing)
            assert not desk.taken["n/0"].refusing
            if end == "served":
                desk.engine.answered("n/1", 500, 9)
                desk.taken.clear()
                await until(lambda: len(desk.taken) == 2)
                assert desk.taken["n/1"].refusing
                desk.engine.answered("n/1", 200, 9)
            else:
                desk.clock.at += 1.1
            await until(lambda: not desk.taken["n/1"].refusing)

    desk.run(test)


def test_a_rank_that_cannot_be_followed_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(monkeypatch, [source(0, "unusable"), source(1)])

    async def test() -> None:
        await until(lambda: "cannot connect" in caplog.text)
        assert set(desk.engine.endpoints) == {"n/0", "n/1"}

    desk.run(test)


@pytest.mark.parametrize("silence", [UsageError("start it with events"), []], ids=["raised", "no source"])
def test_an_engine_that_says_it_publishes_nothing_is_served_by_history_until_it_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, silence: Any
) -> None:
    desk = Desk(monkeypatch, silence)
    monkeypatch.setattr(ranks, "ASK_AGAIN_S", 0.001)
    prompt = list(range(33))

    async def test() -> None:
        await until(lambda: desk.asked > 3)
        assert desk.states() == {"n/0": "silent"}
        told = [event for event in desk.node.events() if isinstance(event, ResidencyChanged)]
        assert [event.state for event in told] == ["silent"]
        option = "start it with"
        assert option in told[0].reason
        assert caplog.text.count(option) == 1, "it is asked again and again, and said once"
        for matched in (0, 32):  # one served prompt is enough
            decision = desk.node.route(prompt, 100.0)
            assert decision.matched_tokens == matched
            desk.node.report(decision, Outcome.served(), 100.0)
        desk.told = [source(0)]
        await until(lambda: len(desk.running()) == 1)
        assert desk.states() == {"n/0": "silent"}, "until it speaks"
        desk.events.made[0].say(EngineBatch((BlocksStored((1,), None, tuple(range(90, 106)), 16),)))
        assert desk.states() == {"n/0": "exact"}
        assert desk.node.route(prompt, 100.0).matched_tokens == 0

    desk.run(test)


def test_an_engine_that_cannot_tell_is_asked_again_and_not_taken_for_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(monkeypatch, [replace_discovered(source(0))])
    monkeypatch.setattr(ranks, "ASK_AGAIN_S", 0.001)

    async def test() -> None:
        await until(lambda: desk.asked > 3)
        assert desk.states() == {"n/0": "exact"}
        assert caplog.text.count("give engine.events") == 1
        desk.told = [source(0)]
        await until(lambda: len(desk.running()) == 1)

    desk.run(test)


def stored_at(rank: int) -> EngineBatch:
    return EngineBatch((BlocksStored((1, 2), None, tuple(range(32)), 16),), rank)


def test_an_engine_that_comes_back_with_other_ranks_and_ports_is_followed_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk(monkeypatch, [source(0), source(1)])
    blocks = {"n/0": 2, "n/1": 2}

    def held() -> dict[str, int]:
        return {row.endpoint: row.blocks for row in desk.node.stats(100.0).endpoints}

    async def test() -> None:
        await until(lambda: len(desk.running()) == 2)
        for rank, follower in enumerate(desk.events.made):
            follower.say(stored_at(rank))
        assert held() == blocks
        moved = source(1)._replace(endpoint="tcp://*:7000")
        desk.told = [source(0), moved, source(2)]
        desk.events.made[0].say(EngineBatch((StreamRestarted(),)))
        await until(lambda: set(desk.running()) == {source(0), moved, source(2)})
        assert len(desk.events.made) == 4, "what has not changed is followed on"
        assert held() == {"n/0": 0, "n/1": 0, "n/2": 0}, "a new stream begins with a replay of all"
        desk.events.made[2].say(stored_at(1))
        desk.told = [moved]
        desk.events.made[2].say(EngineBatch((StreamRestarted(),), 1))
        await until(lambda: desk.running() == [moved])
        assert desk.engine.endpoints == {"n/1": 1}
        desk.told = [source(0), moved]
        desk.events.made[2].say(EngineBatch((StreamRestarted(),), 1))
        await until(lambda: set(desk.running()) == {source(0), moved})
        assert set(held()) == {"n/0", "n/1"}, "a rank may come back"
        desk.node._check()

    desk.run(test)


def test_it_is_asked_when_a_stream_is_not_connected_and_when_the_engine_answers_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk(monkeypatch, [source(0)])

    async def test() -> None:
        await until(lambda: len(desk.running()) == 1)
        asked = desk.asked
        desk.polled = {0: LoadReport()}
        await until(lambda: desk.asked == asked + 1)
        desk.polled = {}
        await until(lambda: not desk.engine._up)
        desk.polled = {0: LoadReport(running=1)}
        await until(lambda: desk.asked == asked + 2)
        await until(lambda: desk.taken["n/0"].running == 1)
        assert len(desk.loads.made) <= 2
        monkeypatch.setattr(ranks, "ASK_AGAIN_S", 0.001)
        desk.polled = {}  # wakes the wait, which then takes the shorter time
        await until(lambda: not desk.engine._up)
        desk.polled = {0: LoadReport()}
        await until(lambda: desk.asked == asked + 3)
        reads = desk.reads
        await until(lambda: desk.reads > reads + 20)
        assert desk.asked == asked + 3, "connected: nothing to ask"
        desk.events.made[0].connected = False
        await until(lambda: desk.asked > asked + 6)
        assert len(desk.events.made) == 1, "it told the same: nothing changes"
        desk.told = UsageError("events are off now")
        await until(lambda: not desk.running())
        assert desk.states() == {"n/0": "silent"}

    desk.run(test)


def test_an_engine_that_is_gone_refuses_and_one_that_is_slow_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, [source(0)])

    async def slow() -> bool:
        asked.append(True)
        return False

    asked: list[bool] = []

    async def test() -> None:
        await until(lambda: len(desk.running()) == 1)
        assert not desk.taken, "one that is starting is no engine that was lost"
        desk.polled = {0: LoadReport(running=1)}
        await until(lambda: "n/0" in desk.taken)
        with monkeypatch.context() as patch:
            patch.setattr(desk.engine, "_gone", slow)
            desk.polled = {}
            await until(lambda: len(asked) > 1)
            assert not desk.taken["n/0"].refusing
        await until(lambda: desk.taken["n/0"].refusing)
        assert desk.taken["n/0"].reason == attach.GONE
        desk.polled = {0: LoadReport()}
        await until(lambda: not desk.taken["n/0"].refusing)

    desk.run(test)


def test_what_was_guessed_of_an_engine_without_events_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, [])

    async def test() -> None:
        desk.polled = {0: LoadReport(running=1)}
        await until(lambda: desk.states() == {"n/0": "silent"} and "n/0" in desk.taken)
        desk.node.report(desk.node.route(list(range(33)), 100.0), Outcome.served(), 100.0)
        assert desk.node.residency("n/0").canonical_blocks == 2
        desk.polled = {}
        await until(lambda: desk.node.residency("n/0").canonical_blocks == 0)
        assert desk.states() == {"n/0": "silent"}

    desk.run(test)


def test_a_socket_of_this_nodes_own_is_not_taken_for_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    connects = source(0)._replace(endpoint="tcp://127.0.0.1:5557")
    desk = Desk(monkeypatch, [connects])

    async def test() -> None:
        await until(lambda: len(desk.running()) == 1)
        desk.told = [connects._replace(bind=True)]  # somebody listens there: this node
        desk.events.made[0].say(EngineBatch((StreamRestarted(),)))
        await until(lambda: desk.asked > 1)
        desk.told = [source(1)]
        desk.events.made[0].say(EngineBatch((StreamRestarted(),)))
        await until(lambda: desk.running() == [source(1)])
        assert len(desk.events.made) == 2

    desk.run(test)


def test_a_stream_that_lost_removals_is_read_anew_once_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, [source(0)])

    def lose(first: int) -> None:
        """Three blocks in a cache of two."""
        handles = tuple(range(first, first + 3))
        desk.events.made[0].say(EngineBatch((BlocksStored(handles, None, tuple(range(first, first + 48)), 16),)))

    async def test() -> None:
        await until(lambda: len(desk.running()) == 1)
        desk.polled = {0: LoadReport(capacity_tokens=32)}
        await until(lambda: desk.taken.get("n/0", LoadReport()).capacity_tokens == 32)
        lose(100)
        follower = desk.events.made[0]
        assert follower.resyncs == 1
        assert desk.states() == {"n/0": "partial"}
        follower.say(EngineBatch((StreamRestarted(),)))
        assert desk.states() == {"n/0": "exact"}
        lose(200)
        assert follower.resyncs == 1, "not again so soon"
        desk.clock.at += attach.RESYNC_PAUSE_S
        follower.say(EngineBatch((StreamRestarted(),)))
        lose(300)
        assert follower.resyncs == 2
        (row,) = desk.node.stats(desk.clock.at).endpoints
        assert row.inflated == 3

    desk.run(test)


def replace_discovered(one: EventSource) -> EventSource:
    return one._replace(discovered=False)


def test_configured_events_need_no_answer_and_name_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, [], events="tcp://*:5557", replay="tcp://*:5567", topic="kv", ranks=2, bind=True)

    async def test() -> None:
        await until(lambda: len(desk.events.made) == 2)
        first, second = (follower.source for follower in desk.events.made)
        assert (first.endpoint, first.replay_endpoint, first.rank) == ("tcp://*:5557", "tcp://*:5567", 0)
        assert (second.endpoint, second.replay_endpoint, second.rank) == ("tcp://*:5558", "tcp://*:5568", 1)
        assert first.bind is second.bind is True
        assert (first.topic, first.host) == ("kv", "127.0.0.1")

    desk.run(test)


def test_a_request_names_its_rank_as_the_engine_wants_it() -> None:
    headers, body = by_header([("a", "b"), (RANK_HEADER, "9")], b"{}", 1)
    assert (headers, body) == ([("a", "b"), (RANK_HEADER, "1")], b"{}")
    body = b'{"prompt": [1,2], "seed": 123456789012345678901234567890, "temperature": 0.10, "routed_dp_rank": 7}'
    headers, aimed = by_field([("a", "b")], body, 1)
    assert headers == [("a", "b")]
    assert json.loads(aimed) == {**json.loads(body), RANK_FIELD: 1}
    assert b"123456789012345678901234567890" in aimed
    assert b"0.10" in aimed


@pytest.mark.parametrize("kind", ENGINE_KINDS)
def test_an_engine_with_one_rank_need_not_know_the_word(kind: str) -> None:
    node = Node("n", Domain(model="m", tokenizer="t"), rng=random.Random(0), now=0.0)
    engine = Attachment(node, EngineConfig(url="http://e", kind=kind), "", 0.0)
    assert engine.aimed("n/0", [("a", "b")], b"{}") == ([("a", "b")], b"{}")
