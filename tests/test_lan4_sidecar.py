"""Sidecars in front of emulated engines, two nodes in one process, over real sockets on loopback.

Faults are put between a server and its application (`Faults`), so that what breaks is a real connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from prefixroute_lan4.config import (
    Address,
    DomainConfig,
    PeerConfig,
    SidecarConfig,
    TimeoutConfig,
)
from prefixroute_lan4.config import EngineConfig as SidecarEngine
from prefixroute_lan4.exchange import budget_of
from prefixroute_lan4.sidecar import Sidecar
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prefixroute import Decision, Outcome
from prefixroute.emulator import Answer, EmulatedEngine, EngineConfig, KvEventsConfig, ServiceModel
from prefixroute.emulator.tokenizer import ChatMessage, encode, render_chat

MODEL = "m"
DEADLINE_S = 20.0
PREFIX = " ".join(f"word{n}" for n in range(300))
EXPECTED = Answer(encode(PREFIX)).text(0, 6)


@dataclass
class Faults:
    """An application that can be told to misbehave, on the paths under /v1/ only."""

    app: ASGIApp
    status: int | None = None
    break_after: int | None = None
    hang: bool = False
    calls: list[dict[str, str]] = field(default_factory=list)
    paths: Counter[str] = field(default_factory=Counter)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve, or misbehave as told."""
        self.paths[scope["path"]] += 1
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self.app(scope, receive, send)
            return
        self.calls.append({name.decode(): value.decode() for name, value in scope["headers"]})
        if self.status is not None:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": self.status, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error":{"message":"told to"}}'})
        elif self.hang:
            await asyncio.Event().wait()
        else:
            await self.app(scope, receive, self._counted(scope, send))

    def _counted(self, scope: Scope, send: Send) -> Send:
        parts = 0

        async def counted(message: Message) -> None:
            nonlocal parts
            if self.break_after is not None and message["type"] == "http.response.body":
                parts += 1
                if parts > self.break_after:
                    raise ConnectionAbortedError("told to break")
            await send(message)

        return counted


@contextlib.asynccontextmanager
async def served(app: ASGIApp, listener: socket.socket, lifespan: str = "off") -> AsyncIterator[uvicorn.Server]:
    """`app` behind a real server on `listener`."""
    config = uvicorn.Config(
        app,
        log_level="critical",
        lifespan=lifespan,  # type: ignore[arg-type]
        timeout_graceful_shutdown=1,
        timeout_keep_alive=75,
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await until(lambda: server.started)
        yield server
    finally:
        server.should_exit = True
        await task


def listen() -> socket.socket:
    """A listening socket on a port that the system chose."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    return listener


def udp_port() -> int:
    """A free UDP port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    """Poll until `condition` holds."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        held = condition()
        if held if isinstance(held, bool) else await held:
            return
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.01)


@dataclass
class NodeUnderTest:
    """One node with its faults in the two places where a connection can break."""

    name: str
    engine: EmulatedEngine
    engine_faults: Faults
    sidecar: Sidecar
    sidecar_faults: Faults
    url: str
    servers: contextlib.AsyncExitStack
    engine_server: contextlib.AsyncExitStack


@dataclass
class Pair:
    """Two nodes and a client."""

    one: NodeUnderTest
    two: NodeUnderTest
    client: httpx.AsyncClient

    async def ask(self, node: NodeUnderTest, prompt: object, *, tokens: int = 6, **changes: object) -> httpx.Response:
        """A completion, unstreamed unless told otherwise."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, **changes}
        return await self.client.post(f"{node.url}/v1/completions", json=body, timeout=DEADLINE_S)

    async def warm(self) -> None:
        """Make node 2 hold PREFIX, and node 1 know."""
        body = {"model": MODEL, "prompt": PREFIX, "max_tokens": 1}
        hop = {"x-prefixroute-hop": "1"}
        assert (await self.client.post(f"{self.two.url}/v1/completions", json=body, headers=hop)).status_code == 200
        await self.known(PREFIX)

    async def known(self, prompt: str) -> None:
        """Wait until node 1 would send `prompt` to node 2."""
        node, now = self.one.sidecar.node, self.one.sidecar.driver.now

        def forwards() -> bool:
            decision = node.route(encode(prompt), now())
            node.report(decision, Outcome.cancelled(), now())
            return decision.target == self.two.sidecar.endpoint

        await until(forwards)


async def start_node(
    stack: contextlib.AsyncExitStack, name: str, ports: dict[str, int], folder: Path, policy: str
) -> NodeUnderTest:
    kv_events = KvEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=f"ipc://{folder}/{name}e",
        replay_endpoint=f"ipc://{folder}/{name}r",
        topic="kv",
    )
    config = EngineConfig(
        model=MODEL,
        capacity_blocks=256,
        service=ServiceModel(prefill_tokens_per_s=2000, overhead_s=0.002, decode_s_per_token=0.002),
        kv_events=kv_events,
    )
    engine = await stack.enter_async_context(EmulatedEngine(config))
    servers = await stack.enter_async_context(contextlib.AsyncExitStack())
    engine_faults = Faults(engine.app)
    engine_listener, listener = listen(), listen()
    engine_server = await servers.enter_async_context(contextlib.AsyncExitStack())
    await engine_server.enter_async_context(served(engine_faults, engine_listener))
    sidecar = Sidecar(
        SidecarConfig(
            node=name,
            http=Address(port=listener.getsockname()[1]),
            gossip=Address(port=ports[name]),
            engine=SidecarEngine(
                url=f"http://127.0.0.1:{engine_listener.getsockname()[1]}",
                # one node is told where its engine publishes, the other one asks
                events=kv_events.endpoint if name == "node-1" else "",
                replay=kv_events.replay_endpoint or "" if name == "node-1" else "",
                topic="kv" if name == "node-1" else "",
                prefill_tokens_per_s=2000,
                load_probe_s=0.05,
            ),
            domain=DomainConfig(model=MODEL, tokenizer="emulator"),
            peers=tuple(
                PeerConfig(node=peer, gossip=Address(port=port)) for peer, port in ports.items() if peer != name
            ),
            policy=policy,
            timeouts=TimeoutConfig(connect_s=1.0, stream_s=0.5, whole_s=0.5),
        )
    )
    await stack.enter_async_context(sidecar.running())
    sidecar_faults = Faults(sidecar.app)
    await servers.enter_async_context(served(sidecar_faults, listener))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    return NodeUnderTest(name, engine, engine_faults, sidecar, sidecar_faults, url, servers, engine_server)


def run_pair(test: Callable[[Pair], Coroutine[Any, Any, None]], folder: Path, policy: str = "default") -> None:
    """Run `test` against two acquainted nodes."""

    async def main() -> None:
        ports = {"node-1": udp_port(), "node-2": udp_port()}
        async with contextlib.AsyncExitStack() as stack:
            one = await start_node(stack, "node-1", ports, folder, policy)
            two = await start_node(stack, "node-2", ports, folder, policy)
            await until(lambda: bool(one.sidecar.node.endpoint_url("node-2/0")))
            await until(lambda: bool(two.sidecar.node.endpoint_url("node-1/0")))
            client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False))
            await test(Pair(one, two, client))

    asyncio.run(main())


def texts(body: bytes) -> str:
    """The text of a stream that ended as it should."""
    events = [line[6:] for line in body.decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1
    chunks = [json.loads(event) for event in events[:-1]]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for sockets, whose paths must be short."""
    return tmp_path_factory.mktemp("s")


def test_a_prompt_goes_once_to_the_node_that_holds_its_prefix(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        await pair.warm()
        reply = await pair.ask(pair.one, PREFIX + " and then")
        assert reply.headers["x-prefixroute-target"] == "node-2/0"
        assert int(reply.headers["x-prefixroute-matched"]) > 200
        assert reply.headers["x-prefixroute-reason"]
        usage = reply.json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 200
        forwarded = pair.two.sidecar_faults.calls[-1]
        assert forwarded["x-prefixroute-hop"] == "1"
        # a request that has made its hop stays, even where nothing is cached
        hopped = await pair.client.post(
            f"{pair.one.url}/v1/completions",
            json={"model": MODEL, "prompt": PREFIX, "max_tokens": 1},
            headers={"x-prefixroute-hop": "1"},
        )
        assert hopped.headers["x-prefixroute-target"] == "node-1/0"
        assert json.loads(hopped.headers["x-prefixroute-load"])["prefill_tokens_per_s"] > 0

    run_pair(test, folder)


def test_the_same_answer_comes_from_either_node_streamed_or_not_text_or_tokens(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        await pair.warm()
        for prompt in (PREFIX, encode(PREFIX)):
            for node in (pair.one, pair.two):
                whole = await pair.ask(node, prompt)
                assert whole.json()["choices"][0]["text"] == EXPECTED
                streamed = await pair.ask(node, prompt, stream=True)
                assert texts(streamed.content) == EXPECTED
                assert streamed.headers["content-type"].startswith("text/event-stream")

    run_pair(test, folder)


def test_chat_is_routed_by_the_rendered_conversation(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        messages = [{"role": "user", "content": PREFIX}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 4}
        first = await pair.client.post(f"{pair.two.url}/v1/chat/completions", json=body)
        await pair.known(render_chat([ChatMessage("user", PREFIX)]))
        second = await pair.client.post(f"{pair.one.url}/v1/chat/completions", json=body)
        assert second.headers["x-prefixroute-target"] == "node-2/0"
        assert int(second.headers["x-prefixroute-matched"]) > 200
        assert second.json()["choices"] == first.json()["choices"]

    run_pair(test, folder)


@pytest.mark.parametrize("fault", ["down", "status 500", "status 503", "hang", "break before the first byte"])
def test_a_peer_that_does_not_answer_costs_no_answer(folder: Path, fault: str) -> None:
    async def test(pair: Pair) -> None:
        await pair.warm()
        faults = pair.two.sidecar_faults
        if fault == "down":
            await pair.two.servers.aclose()
        elif fault == "hang":
            faults.hang = True
        elif fault.startswith("status"):
            faults.status = int(fault.split()[1])
        else:
            faults.break_after = 0
        for stream in (False, True):
            reply = await pair.ask(pair.one, PREFIX, stream=stream)
            assert reply.status_code == 200
            assert reply.headers["x-prefixroute-target"] == "node-1/0"
            text = texts(reply.content) if stream else reply.json()["choices"][0]["text"]
            assert text == EXPECTED
        assert pair.one.sidecar.stats()["requests"]["failed attempts"] >= 1
        # the peer is left alone afterwards: the second request did not try it, or tried it and failed over
        assert pair.one.sidecar.stats()["requests"]["local"] == 2

    run_pair(test, folder)


def test_a_peer_that_is_busier_than_it_told_hands_the_prompt_back(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        await pair.warm()
        one, two = pair.one.sidecar, pair.two.sidecar
        # Bookings of node 2 that node 1 cannot know of yet: they begin when node 1 has decided.
        decide = one._decide

        def decide_first(*args: Any) -> Decision:
            decision = decide(*args)
            assert decision.target == "node-2/0"
            now = two.driver.now()
            booked.append(two.node.route(list(range(9000)), now, forwarded=True))
            return decision

        booked: list[Decision] = []
        one._decide = decide_first  # type: ignore[method-assign]
        reply = await pair.ask(pair.one, PREFIX + " and then", tokens=1)
        assert reply.status_code == 200
        assert reply.headers["x-prefixroute-target"] == "node-1/0"
        assert float(pair.two.sidecar_faults.calls[-1]["x-prefixroute-budget-ms"]) > 0
        assert one.stats()["requests"]["handed back"] == 1
        assert "failed attempts" not in one.stats()["requests"]
        assert one.node.counters["outcomes_declined"] == two.node.counters["decisions_declined"] == 1
        row = next(row for row in one.node.stats(one.driver.now()).endpoints if row.endpoint == "node-2/0")
        assert row.usable
        assert row.wait_s > 2, "its reply told"
        one._decide = decide  # type: ignore[method-assign]

    run_pair(test, folder)


@pytest.mark.parametrize(
    ("text", "budget_s"),
    [("250", 0.25), ("0", 0.0), (None, inf), ("", inf), ("soon", inf), ("-1", inf), ("nan", inf), ("1e999", inf)],
)
def test_a_budget_that_cannot_be_read_is_none(text: str | None, budget_s: float) -> None:
    assert budget_of(text) == budget_s


@pytest.mark.parametrize("where", ["engine", "sidecar"])
@pytest.mark.parametrize("events", [1, 3])
def test_a_stream_that_breaks_goes_on_from_another_engine(folder: Path, where: str, events: int) -> None:
    async def test(pair: Pair) -> None:
        await pair.warm()
        faults = pair.two.engine_faults if where == "engine" else pair.two.sidecar_faults
        faults.break_after = events
        reply = await pair.ask(pair.one, PREFIX, stream=True, stream_options={"include_usage": True})
        assert reply.headers["x-prefixroute-target"] == "node-2/0"
        assert texts(reply.content) == EXPECTED
        assert pair.one.sidecar.stats()["requests"]["resumed"] == 1

    run_pair(test, folder)


def test_an_engine_that_is_down_with_no_other_that_can_help_is_an_error_not_a_hang(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        pair.one.engine_faults.status = 500
        pair.two.engine_faults.status = 500
        reply = await pair.ask(pair.one, "short")
        assert reply.status_code == 500
        pair.one.engine_faults.status = 503
        pair.two.engine_faults.status = 503
        assert (await pair.ask(pair.one, "short")).status_code == 503

    run_pair(test, folder)


def test_a_clients_mistakes_are_passed_on_and_counted_against_nobody(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        url = f"{pair.one.url}/v1/completions"
        assert (await pair.client.post(url, content=b"{nonsense")).status_code == 400
        assert (await pair.client.post(url, content=b"[1]")).status_code == 400
        assert (await pair.client.post(url, json={"model": "other", "prompt": "x"})).status_code == 404
        for body in ({"prompt": []}, {"prompt": [2**40]}, {"prompt": "x", "max_tokens": -1}, {"prompt": {"a": 1}}, {}):
            reply = await pair.client.post(url, json={"model": MODEL, **body})
            assert 400 <= reply.status_code < 500, body
            assert reply.json()["error"]["message"]
        assert "failed attempts" not in pair.one.sidecar.stats()["requests"]
        assert (await pair.ask(pair.one, "fine")).status_code == 200

    run_pair(test, folder)


def test_prompts_that_cannot_be_told_exactly_match_nothing(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        await pair.warm()
        image = {"type": "image_url", "image_url": {"url": "data:,"}}
        message = {"role": "user", "content": [{"type": "text", "text": PREFIX}, image]}
        body = {"model": MODEL, "messages": [message]}
        await pair.client.post(f"{pair.one.url}/v1/chat/completions", json=body)
        assert pair.one.sidecar.stats()["requests"]["local"] == 1
        assert "forwarded" not in pair.one.sidecar.stats()["requests"]

    run_pair(test, folder)


def test_a_node_whose_engine_is_down_lets_the_others_serve(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        await pair.one.engine_server.aclose()
        for stream in (False, True):
            reply = await pair.ask(pair.one, PREFIX, stream=stream)
            assert reply.headers["x-prefixroute-target"] == "node-2/0"
            assert (texts(reply.content) if stream else reply.json()["choices"][0]["text"]) == EXPECTED

    run_pair(test, folder)


def test_without_routing_nothing_leaves_whatever_happens(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        for status in (503, 500):
            pair.one.engine_faults.status = status
            assert (await pair.ask(pair.one, PREFIX)).status_code == status
        pair.one.engine_faults.status = None
        assert (await pair.ask(pair.one, PREFIX)).headers["x-prefixroute-target"] == "node-1/0"
        assert "forwarded" not in pair.one.sidecar.stats()["requests"]

    run_pair(test, folder, policy="none")


def test_a_prompt_is_tokenised_once(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        for _ in range(3):
            assert (await pair.ask(pair.one, "one two three")).status_code == 200
        assert pair.one.engine_faults.paths["/tokenize"] == 1

    run_pair(test, folder)


def test_a_client_that_leaves_frees_the_engine(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        for stream in (False, True):
            body = {"model": MODEL, "prompt": PREFIX, "max_tokens": 2000, "stream": stream}
            before = pair.one.engine.counters["cancelled"]
            async with httpx.AsyncClient(trust_env=False) as client:
                task = asyncio.create_task(client.post(f"{pair.one.url}/v1/completions", json=body, timeout=60))
                await until(lambda: pair.one.engine.load().running == 1)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await until(lambda before=before: pair.one.engine.counters["cancelled"] == before + 1)  # type: ignore[misc]
            await until(lambda: pair.one.engine.load().running == 0)

    run_pair(test, folder)


def test_decisions_are_explained_and_counted(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        await pair.warm()
        for tail in ("a", "b", "c"):
            await pair.ask(pair.one, f"{PREFIX} {tail}")
        get = pair.client.get
        explained = (await get(f"{pair.one.url}/prefixroute/explain", params={"last": 2})).json()["decisions"]
        assert len(explained) == 2
        text = (await get(f"{pair.one.url}/prefixroute/explain", params={"format": "text"})).text
        assert "node-2/0" in text
        assert "node-1/0" in text
        assert (await get(f"{pair.one.url}/prefixroute/explain", params={"last": "x"})).status_code == 400
        assert (await get(f"{pair.one.url}/prefixroute/explain", params={"last": "0"})).json() == {"decisions": []}
        stats = (await get(f"{pair.one.url}/prefixroute/stats", params={"samples": 1})).json()
        assert stats["node"] == "node-1"
        assert stats["requests"]["forwarded"] == 3
        assert len(stats["decisions"]["us"]) == stats["decisions"]["count"] == 3
        assert stats["gossip"]["bytes_sent"] > 0
        prometheus = (await get(f"{pair.one.url}/metrics")).text
        assert "prefixroute" in prometheus
        assert (await get(f"{pair.one.url}/health")).json() == {"status": "ok", "node": "node-1"}

    run_pair(test, folder)


def test_what_is_not_routed_is_the_engines_to_answer(folder: Path) -> None:
    async def test(pair: Pair) -> None:
        models = (await pair.client.get(f"{pair.one.url}/v1/models")).json()
        assert models["data"][0]["id"] == MODEL
        body = {"model": MODEL, "prompt": "one two"}
        tokens = (await pair.client.post(f"{pair.one.url}/tokenize", json=body)).json()["tokens"]
        assert tokens == encode("one two")
        assert (await pair.client.get(f"{pair.one.url}/nothing")).status_code == 404
        await pair.one.servers.aclose()

    run_pair(test, folder)
