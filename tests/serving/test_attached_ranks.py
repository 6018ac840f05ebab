"""Engines with several data-parallel ranks, and the two kinds of engine: what the sidecar makes of them."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prefixroute_serving.attach import ENGINE_KINDS
from prefixroute_serving.attach.kinds import RANK_FIELD, RANK_HEADER
from sidecar_pair import DEADLINE_S, EXPECTED, MODEL, PREFIX, Pair, engine_config, events_over, run_pair, texts, until
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prefixroute.emulator import EmulatedEngine

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
