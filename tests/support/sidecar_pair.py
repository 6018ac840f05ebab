"""Two sidecars in front of emulated engines in one process, over real sockets on loopback.

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
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import uvicorn
from prefixroute_serving.attach import EngineConfig as SidecarEngine
from prefixroute_serving.sidecar import Sidecar
from prefixroute_serving.sidecar_config import (
    DomainConfig,
    HostPort,
    PeerConfig,
    SidecarConfig,
    TenantsConfig,
    TimeoutConfig,
    ZoneRuleConfig,
)
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prefixroute.emulator import Answer, EmulatedEngine, EngineConfig, KvEventsConfig, ServiceModel
from prefixroute.emulator.tokenizer import encode
from prefixroute.events import DEFAULT_NAMESPACE, Namespace
from prefixroute.keys.chain import wire_key

MODEL = "m"
DEADLINE_S = 60.0
EVENT_STREAM = b"text/event-stream"
PREFIX = " ".join(f"word{n}" for n in range(300))
EXPECTED = Answer(encode(PREFIX)).text(0, 6)


@dataclass
class Faults:
    """An application that can be told to misbehave, on the paths under /v1/ only."""

    app: ASGIApp
    status: int | None = None
    break_after: int | None = None
    hang: bool = False
    first_event: bytes | None = None
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
        elif self.first_event is not None:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", EVENT_STREAM)]})
            # in pieces, so that nothing can be told from the first bytes
            for start in range(0, len(self.first_event), 20):
                piece = self.first_event[start : start + 20]
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": b""})
        elif self.hang:
            await asyncio.Event().wait()
        else:
            await self.app(scope, receive, self._counted(scope, send))

    def _counted(self, scope: Scope, send: Send) -> Send:
        parts = 0

        async def counted(message: Message) -> None:
            nonlocal parts
            if self.break_after is None or message["type"] != "http.response.body":
                await send(message)
                return
            # events may come together, and are counted one by one
            pieces = message.get("body", b"").split(b"\n\n")
            for piece in [*(piece + b"\n\n" for piece in pieces[:-1]), pieces[-1]]:
                parts += 1
                if parts > self.break_after:
                    raise ConnectionAbortedError("told to break")
                await send({**message, "body": piece, "more_body": True})

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


EngineMaker: TypeAlias = Callable[
    [contextlib.AsyncExitStack, str, Path], Coroutine[Any, Any, tuple[EmulatedEngine, ASGIApp]]
]
"""Starts an engine, named and with a folder for sockets; what answers may be more than the engine's own application."""


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
    sidecar_server: contextlib.AsyncExitStack


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

    async def known(self, prompt: str, namespace: Namespace = DEFAULT_NAMESPACE) -> None:
        """Wait until node 1 knows that node 2 holds `prompt` and is free again; a decision would leave traces.

        What is held may be known first: it is promised when its prefill begins. That is over with the answer, and on a
        busy machine the engine's own word comes later: so it is waited for, and for what is published of it.
        """
        node, owner, theirs = self.one.sidecar.node, self.two.sidecar.node, self.two.sidecar.engine.endpoints
        now = self.one.sidecar.driver.now
        chain = node.chain(encode(prompt), namespace=namespace)
        key = chain.key(chain.depth)

        def told() -> bool:
            free = {row.endpoint for row in node.stats(now()).endpoints if row.wait_s < 0.01}
            digests, published = node.digests(), owner.digests()
            return any(
                name in free
                and key in owner.residency(name).keys()  # noqa: SIM118 - a residency is no dict
                and wire_key(key) in published[name].keys
                and digests[name].version == published[name].version
                for name in theirs
                if name in digests
            )

        await until(told)


def engine_config(kv_events: KvEventsConfig, capacity_blocks: int = 256) -> EngineConfig:
    """An engine as all tests here have it."""
    return EngineConfig(
        model=MODEL,
        capacity_blocks=capacity_blocks,
        service=ServiceModel(prefill_tokens_per_s=2000, overhead_s=0.002, decode_s_per_token=0.002),
        kv_events=kv_events,
    )


def events_over(endpoint: str, replay_endpoint: str) -> KvEventsConfig:
    """Events switched on."""
    return KvEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint, replay_endpoint=replay_endpoint, topic="kv"
    )


async def one_engine(stack: contextlib.AsyncExitStack, name: str, folder: Path) -> tuple[EmulatedEngine, ASGIApp]:
    """An engine with one rank, and its application."""
    config = engine_config(events_over(f"ipc://{folder}/{name}e", f"ipc://{folder}/{name}r"))
    engine = await stack.enter_async_context(EmulatedEngine(config))
    return engine, engine.app


async def start_node(
    stack: contextlib.AsyncExitStack,
    name: str,
    ports: dict[str, int],
    folder: Path,
    policy: str,
    kind: str = "vllm",
    make_engine: EngineMaker = one_engine,
    patience_s: float = 0.5,
    secret: str = "",
    zones: tuple[ZoneRuleConfig, ...] = (),
    tenants: TenantsConfig | None = None,
) -> NodeUnderTest:
    """An engine, its sidecar, and both their servers, until the stack ends."""
    engine, app = await make_engine(stack, name, folder)
    kv_events = engine.config.kv_events
    servers = await stack.enter_async_context(contextlib.AsyncExitStack())
    engine_faults = Faults(app)
    engine_listener, listener = listen(), listen()
    engine_server = await servers.enter_async_context(contextlib.AsyncExitStack())
    await engine_server.enter_async_context(served(engine_faults, engine_listener))
    sidecar = Sidecar(
        SidecarConfig(
            node=name,
            http=HostPort(port=listener.getsockname()[1]),
            gossip=HostPort(port=ports[name]),
            engine=SidecarEngine(
                url=f"http://127.0.0.1:{engine_listener.getsockname()[1]}",
                kind=kind,
                # one node is told where its engine publishes, the other one asks
                events=kv_events.endpoint if name == "node-1" else "",
                replay=kv_events.replay_endpoint or "" if name == "node-1" else "",
                topic="kv" if name == "node-1" else "",
                prefill_tokens_per_s=2000,
                load_probe_s=0.05,
            ),
            domain=DomainConfig(model=MODEL, tokenizer="emulator", secret=secret),
            peers=tuple(
                PeerConfig(node=peer, gossip=HostPort(port=port)) for peer, port in ports.items() if peer != name
            ),
            policy=policy,
            timeouts=TimeoutConfig(connect_s=1.0, stream_s=patience_s, whole_s=patience_s),
            zone={"node-1": "eu", "node-2": "us"}[name] if zones else "",
            zones=zones,
            tenants=tenants,
        )
    )
    await stack.enter_async_context(sidecar.running())
    sidecar_faults = Faults(sidecar.app)
    sidecar_server = await servers.enter_async_context(contextlib.AsyncExitStack())
    await sidecar_server.enter_async_context(served(sidecar_faults, listener))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    return NodeUnderTest(
        name, engine, engine_faults, sidecar, sidecar_faults, url, servers, engine_server, sidecar_server
    )


def run_pair(
    test: Callable[[Pair], Coroutine[Any, Any, None]],
    folder: Path,
    policy: str = "longest",
    kind: str = "vllm",
    make_engine: EngineMaker = one_engine,
    patience_s: float = 0.5,
    secret: str = "",
    zones: tuple[ZoneRuleConfig, ...] = (),
    tenants: TenantsConfig | None = None,
) -> None:
    """Run `test` against two acquainted nodes; `kind` and `make_engine` are the second one's.

    By default the longest match wins: on a busy machine loopback may look slower than a prefill to the default policy.

    With rules for `zones` the first one is in eu and the second one in us.
    """

    async def main() -> None:
        ports = {"node-1": udp_port(), "node-2": udp_port()}
        async with contextlib.AsyncExitStack() as stack:
            more: dict[str, Any] = {"patience_s": patience_s, "secret": secret, "zones": zones, "tenants": tenants}
            one = await start_node(stack, "node-1", ports, folder, policy, **more)
            two = await start_node(stack, "node-2", ports, folder, policy, kind, make_engine, **more)
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
