"""Sidecars of the live suite: real processes beside real engines, and what a test reads of them.

Rules:
1. A sidecar is the example's own program with a configuration file; nothing of it runs in the test's process.
2. A test waits for states that can be asked for: events applied up to what the engine has published, a digest at a
   peer that equals the owner's. `settle` and `in_step` are those waits.
3. Leaving a `SidecarFleet` ends every sidecar that it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from live_engines import ADAPTER, DEADLINE_S, LiveEngine, completion, read_reply, until
from prefixroute_launch.processes import ChildProcess, free_ports
from prefixroute_serving.attach import EngineConfig
from prefixroute_serving.headers import HOP_HEADER, MATCHED_HEADER, TARGET_HEADER
from prefixroute_serving.sidecar_config import (
    DomainConfig,
    HostPort,
    PeerConfig,
    SidecarConfig,
    TenantsConfig,
    dump_config,
)

from prefixroute import Domain

HOST = "127.0.0.1"
HERE = {HOP_HEADER: "1"}
"""Headers of a request that is to be served where it is sent."""

TENANT = "x-tenant"
"""The header that names the tenant, where a test tells tenants apart."""

SALTS = TenantsConfig(body_salt="trust")
"""No tenants, and clients whose salts are routed by."""


class SidecarAnswer(NamedTuple):
    """A sidecar's answer: who served, what had been expected there, and what the engine reports."""

    status: int
    target: str
    matched: int
    cached: int
    text: str


class Place(NamedTuple):
    """Where one sidecar listens."""

    name: str
    http: int
    gossip: int


class LiveSidecar:
    """One sidecar process beside `engine`."""

    def __init__(self, place: Place, engine: LiveEngine, process: ChildProcess, domain: Domain) -> None:
        self.name = place.name
        self.domain = domain
        self.url = f"http://{HOST}:{place.http}"
        self.place = place
        self.engine = engine
        self.process = process
        self.client = httpx.Client(trust_env=False, timeout=DEADLINE_S)

    # --- requests ------------------------------------------------------------------------------------------

    def ask(
        self,
        tokens: Sequence[int],
        *,
        answer_tokens: int = 1,
        salt: str = "",
        adapter: str = "",
        here: bool = False,
        tenant: str = "",
    ) -> SidecarAnswer:
        """Send a completion; `here` keeps it at this sidecar's own engine."""
        model = adapter or self.engine.now.model
        return self._post("completions", completion(model, tokens, answer_tokens, salt), here, tenant)

    def chat(self, messages: list[dict[str, str]], answer_tokens: int = 8) -> SidecarAnswer:
        """Send a conversation to this sidecar's own engine."""
        body = {"model": self.engine.now.model, "messages": messages, "max_tokens": answer_tokens}
        return self._post("chat/completions", {**body, "temperature": 0, "ignore_eos": True}, True)

    def _post(self, path: str, body: dict[str, Any], here: bool, tenant: str = "") -> SidecarAnswer:
        headers = {**(HERE if here else {}), **({TENANT: tenant} if tenant else {})}
        answer = self.client.post(f"{self.url}/v1/{path}", json=body, headers=headers)
        reply = read_reply(answer)
        target = reply.headers.get(TARGET_HEADER, "")
        choice = (reply.body.get("choices") or [{}])[0]
        text = choice.get("text") or (choice.get("message") or {}).get("content") or ""
        return SidecarAnswer(reply.status, target, int(reply.headers.get(MATCHED_HEADER, -1)), reply.cached, text)

    # --- introspection -------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Everything that the sidecar counts."""
        stats: dict[str, Any] = self.client.get(f"{self.url}/prefixroute/stats").raise_for_status().json()
        return stats

    def stream(self, rank: int = 0) -> dict[str, Any]:
        """What a rank's event stream has brought."""
        told: dict[str, Any] = self.stats()["engine_events"][str(rank)]
        return told

    def endpoints(self) -> dict[str, dict[str, Any]]:
        """What the node knows of every endpoint."""
        return {row["endpoint"]: row for row in self.stats()["state"]["endpoints"]}

    def counters(self) -> dict[str, int]:
        """The node's counters."""
        counters: dict[str, int] = self.stats()["state"]["counters"]
        return counters

    def last_decision(self) -> dict[str, Any]:
        """The newest decision on a request that arrived here."""
        decisions = self.client.get(f"{self.url}/prefixroute/explain").raise_for_status().json()["decisions"]
        decision: dict[str, Any] = decisions[0]
        return decision

    # --- waits ---------------------------------------------------------------------------------------------

    def settle(self, at_least: dict[int, int] | None = None) -> None:
        """Wait until exactly what the engine has published is applied, or by rank as much as `at_least` says."""
        wanted = at_least or {rank: self.engine.last_seq(rank) for rank in self.engine.ranks}

        def reached(stream: dict[str, Any], last: int) -> bool:
            at = -1 if stream["last_seq"] is None else stream["last_seq"]
            # after a restart the old life's number may be the greater one
            return not stream["replaying"] and (at >= last if at_least else at == last)

        def applied() -> bool:
            told = self.stats()["engine_events"]
            return len(told) == len(wanted) and all(reached(told[str(rank)], last) for rank, last in wanted.items())

        until(applied, f"{self.name} has applied events up to {wanted}")

    def wait_serving(self) -> None:
        """Wait until it serves and follows its engine."""

        def serving() -> bool:
            assert self.process.alive, f"{self.name} ended: {self.process.log_tail()}"
            with contextlib.suppress(httpx.TransportError):
                return self.client.get(f"{self.url}/health").status_code == 200
            return False

        until(serving, f"{self.name} serves")

    def knows(self, other: LiveSidecar) -> bool:
        """True when what it holds of the other node's endpoints is what that node itself publishes and holds."""
        theirs = {name: row for name, row in other.endpoints().items() if row["local"]}
        mine = self.endpoints()
        fields = ("incarnation", "version", "blocks")
        return bool(theirs) and all(
            name in mine and all(mine[name][field] == row[field] for field in fields) for name, row in theirs.items()
        )

    # --- end -----------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End it in order: peers hear that it leaves."""
        asyncio.run(self.process.stop())
        self.client.close()

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self.client.close()


class SidecarFleet:
    """Sidecars that gossip with each other; use it as ``with open_fleet(folder) as fleet``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sidecars: list[LiveSidecar] = []

    def place(self, name: str) -> Place:
        """Return free ports for a sidecar that comes later."""
        (http,), (gossip,) = free_ports(1, socket.SOCK_STREAM), free_ports(1, socket.SOCK_DGRAM)
        return Place(name, http, gossip)

    def add(
        self,
        engine: LiveEngine,
        place: Place | None = None,
        *,
        peers: Iterable[Place] = (),
        events: str | None = None,
        replay: str | None = None,
        policy: str = "default",
        tenants: TenantsConfig = SALTS,
    ) -> LiveSidecar:
        """Start a sidecar beside `engine`, wait until it serves and has caught up.

        `events` and `replay` replace the engine's own addresses; an empty `replay` is none, and nothing to wait for.
        """
        place = place or self.place(f"n{len(self.sidecars)}")
        running = engine.now
        config = SidecarConfig(
            node=place.name,
            http=HostPort(host=HOST, port=place.http),
            gossip=HostPort(host=HOST, port=place.gossip),
            engine=EngineConfig(
                url=running.url,
                kind=running.kind,
                events=running.events_endpoint if events is None else events,
                replay=running.replay_endpoint if replay is None else replay,
                ranks=engine.shape.ranks,
                prefill_tokens_per_s=running.prefill_tokens_per_s,
            ),
            domain=DomainConfig(model=running.model, tokenizer=running.tokenizer, secret="live suite"),
            peers=tuple(PeerConfig(node=peer.name, gossip=HostPort(host=HOST, port=peer.gossip)) for peer in peers),
            policy=policy,
            tenants=tenants,
        )
        path = self.folder / f"{place.name}.json"
        dump_config(config, path)
        argv = [sys.executable, "-m", "prefixroute.cli", "serve", str(path)]
        process = ChildProcess.start(f"sidecar {place.name}", argv, self.folder / f"{place.name}.log")
        sidecar = LiveSidecar(place, engine, process, config.prefix_domain)
        self.sidecars.append(sidecar)
        sidecar.wait_serving()
        if replay != "":
            sidecar.settle()
        return sidecar

    def pair(self, engines: Sequence[LiveEngine], policy: str = "default") -> list[LiveSidecar]:
        """Start a sidecar beside each engine, all of them peers, and wait until they are in step."""
        places = [self.place(f"n{index}") for index in range(len(engines))]
        sidecars = [
            self.add(engine, place, peers=[other for other in places if other is not place], policy=policy)
            for engine, place in zip(engines, places, strict=True)
        ]
        in_step(sidecars)
        return sidecars

    def close(self) -> None:
        """End every sidecar."""
        for sidecar in self.sidecars:
            sidecar.kill()


@contextlib.contextmanager
def open_fleet(folder: Path) -> Iterator[SidecarFleet]:
    """A fleet for the length of the block; logs and configurations go to `folder`."""
    fleet = SidecarFleet(folder)
    try:
        yield fleet
    finally:
        fleet.close()


def in_step(sidecars: Sequence[LiveSidecar], changed: Sequence[LiveSidecar] = ()) -> None:
    """Wait until all events are applied and every sidecar holds of the others what those publish.

    Where it is known that the others were in step already, look at those that `changed` only.
    """
    for owner in changed or sidecars:
        owner.settle()
        for reader in sidecars:
            if reader is not owner:
                until(partial(reader.knows, owner), f"{reader.name} is in step with {owner.name}")


def adapter_of(engine: LiveEngine) -> str:
    """Return the name of the engine's LoRA adapter, "" when it has none."""
    return ADAPTER if engine.shape.lora else ""
