"""Two nodes for the doctor to examine: emulated engines and real sidecars in one process, spoilt as a test says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
from prefixroute_serving.attach import EngineConfig as SidecarEngine
from prefixroute_serving.doctor.examination import examine
from prefixroute_serving.doctor.findings import Finding
from prefixroute_serving.sidecar import Sidecar
from prefixroute_serving.sidecar_config import DomainConfig, HostPort, PeerConfig, SidecarConfig, TenantsConfig
from sidecar_pair import MODEL, Faults, engine_config, events_over, listen, served, udp_port, until
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prefixroute.emulator import EmulatedEngine

PATIENCE_S = 0.4


@dataclass
class Spoilt:
    """What is wrong with the second node; by default nothing.

    `engine` changes the emulated engine's configuration, `events` that of its events, `domain`, `sidecar` those of the
    sidecar; `body` changes what its engine is sent, `mtu` what its UDP carries. `deaf`: its events never come.
    """

    engine: dict[str, Any] = field(default_factory=dict)
    events: dict[str, Any] = field(default_factory=dict)
    domain: dict[str, Any] = field(default_factory=dict)
    sidecar: dict[str, Any] = field(default_factory=dict)
    body: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    mtu: int | None = None
    deaf: bool = False
    tenants: TenantsConfig | None = None
    """Of both nodes: no fault."""

    @property
    def estranged(self) -> bool:
        """Whether the nodes refuse each other."""
        return bool(self.domain) or self.mtu == 0


class Rewriting:
    """An application that is sent other bodies of completions than came."""

    def __init__(self, app: ASGIApp, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._app, self._change = app, change

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on; a body is read whole first."""
        if scope["type"] != "http" or scope["path"] != "/v1/completions":
            await self._app(scope, receive, send)
            return
        whole, more = b"", True
        while more:
            message = await receive()
            whole += message.get("body", b"")
            more = message.get("more_body", False)
        changed = msgspec.json.encode(self._change(msgspec.json.decode(whole)))
        pending: list[Message] = [{"type": "http.request", "body": changed, "more_body": False}]

        async def again() -> Message:
            return pending.pop() if pending else await receive()

        await self._app(scope, again, send)


class Narrow:
    """A transport over a path that drops what is too long for it."""

    def __init__(self, inner: Any, mtu: int) -> None:
        self._inner, self._mtu = inner, mtu

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def send(self, address: Hashable, data: bytes) -> None:
        """Send what fits."""
        if len(data) <= self._mtu:
            await self._inner.send(address, data)


async def _node(
    stack: contextlib.AsyncExitStack, name: str, ports: dict[str, int], folder: Path, spoilt: Spoilt
) -> Sidecar:
    kv_events = events_over(f"ipc://{folder}/{name}e", f"ipc://{folder}/{name}r")
    config = engine_config(msgspec.structs.replace(kv_events, **spoilt.events))
    service = replace(config.service, prefill_tokens_per_s=50_000, decode_s_per_token=0.0005)
    config = replace(config, service=service, **spoilt.engine)
    engine = await stack.enter_async_context(EmulatedEngine(config))
    app: ASGIApp = engine.app if spoilt.body is None else Rewriting(engine.app, spoilt.body)
    engine_listener, listener = listen(), listen()
    await stack.enter_async_context(served(app, engine_listener))
    sidecar = Sidecar(
        SidecarConfig(
            node=name,
            http=HostPort(port=listener.getsockname()[1]),
            gossip=HostPort(port=ports[name]),
            engine=SidecarEngine(
                url=f"http://127.0.0.1:{engine_listener.getsockname()[1]}", load_probe_s=0.05, **spoilt.sidecar
            ),
            domain=DomainConfig(**{"model": MODEL, "tokenizer": "emulator", "secret": "one secret", **spoilt.domain}),
            peers=tuple(
                PeerConfig(node=peer, gossip=HostPort(port=port)) for peer, port in ports.items() if peer != name
            ),
            tenants=spoilt.tenants,
        )
    )
    await stack.enter_async_context(sidecar.running())
    if spoilt.mtu is not None:
        sidecar.site.echo._inner = Narrow(sidecar.site.echo._inner, spoilt.mtu)
    await stack.enter_async_context(served(Faults(sidecar.app), listener))
    return sidecar


@dataclass
class Fleet:
    """Two running nodes and a client."""

    one: Sidecar
    two: Sidecar
    client: httpx.AsyncClient

    async def examined(self, *given: Sidecar) -> list[Finding]:
        """What the doctor finds, given the configurations of these nodes; of both by default."""
        configs = [sidecar.config for sidecar in given or (self.one, self.two)]
        return await examine(configs, self.client, PATIENCE_S)


def _follows(sidecar: Sidecar) -> bool:
    rows = sidecar.engine.stats().values()
    return bool(rows) and all(row["connected"] for row in rows)


@contextlib.asynccontextmanager
async def fleet(folder: Path, spoilt: Spoilt) -> AsyncIterator[Fleet]:
    """Two nodes, the second one spoilt, acquainted if they can be."""
    ports = {"node-1": udp_port(), "node-2": udp_port()}
    async with contextlib.AsyncExitStack() as stack:
        one = await _node(stack, "node-1", ports, folder, Spoilt(tenants=spoilt.tenants))
        two = await _node(stack, "node-2", ports, folder, spoilt)
        if not spoilt.estranged:
            await until(lambda: bool(one.node.endpoint_url("node-2/0") and two.node.endpoint_url("node-1/0")))
        client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False))
        # What is there to be followed is followed before anybody looks.
        deaf = spoilt.deaf or spoilt.events.get("enable_kv_cache_events") is False
        for sidecar in (one,) if deaf else (one, two):
            await until(partial(_follows, sidecar))
        yield Fleet(one, two, client)


def findings_of(folder: Path, spoilt: Spoilt) -> list[Finding]:
    """What the doctor finds in a fleet whose second node is spoilt."""

    async def main() -> list[Finding]:
        async with fleet(folder, spoilt) as nodes:
            return await nodes.examined()

    return asyncio.run(main())
