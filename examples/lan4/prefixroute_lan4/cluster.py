"""The nodes of the example as processes: an engine and a sidecar each, all on loopback.

Rules:
1. Engines outlive runs, sidecars do not. Before each run every engine has an empty cache: an engine that lives
   is told to drop its blocks, one that was killed is started again.
2. A run begins when every sidecar serves and has heard of every other one.
3. Whatever happens, leaving the `async with` block ends every process that was started here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prefixroute_launch.launcher import EngineSpec, Launcher, LauncherFactory, RunningEngine, answers_health
from prefixroute_launch.processes import HOST, ChildProcess, ProcessError, free_ports
from prefixroute_serving.attach import EngineConfig
from prefixroute_serving.sidecar_config import (
    DomainConfig,
    HostPort,
    PeerConfig,
    SidecarConfig,
    dump_config,
)

from prefixroute.errors import UsageError

from .loadgen import NodeAddress
from .measure import NodeFigures

MIN_CAPACITY_TOKENS = 2048
"""No engine's cache may be smaller: the longest made-up prompt has about 1,700 tokens."""

_SIDECAR_READY_S = 30.0
_RESET_S = 30.0
_STATS_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """How many nodes, and what each engine's cache holds (`capacity_blocks` of `block_size` tokens)."""

    nodes: int = 4
    block_size: int = 16
    capacity_blocks: int = 800

    def __post_init__(self) -> None:
        if self.capacity_blocks * self.block_size < MIN_CAPACITY_TOKENS:
            least = MIN_CAPACITY_TOKENS // self.block_size
            raise UsageError(
                f"the capacity must be at least {least} blocks, so that one prompt fits, not {self.capacity_blocks}"
            )


def node_names(nodes: int) -> tuple[str, ...]:
    """The example's node names."""
    return tuple(f"node-{number}" for number in range(1, nodes + 1))


@dataclass(slots=True)
class NodeSite:
    """One node's processes and addresses. `alive` is False from the moment it is killed."""

    name: str
    launcher: Launcher
    http_port: int
    gossip_port: int
    engine: RunningEngine | None = None
    sidecar: ChildProcess | None = None
    alive: bool = False

    @property
    def url(self) -> str:
        """Where clients and peers reach the sidecar."""
        return f"http://{HOST}:{self.http_port}"


class Cluster:
    """All nodes; use it as ``async with Cluster.open(...)``."""

    def __init__(self, sites: Sequence[NodeSite], run_dir: Path, client: httpx.AsyncClient) -> None:
        self.sites = tuple(sites)
        self._run_dir = run_dir
        self._client = client
        self._last_words: dict[str, NodeFigures] = {}

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, settings: ClusterSettings, launchers: Sequence[LauncherFactory], run_dir: Path
    ) -> AsyncIterator[Cluster]:
        """Start the engines, one of each launcher, and end everything at the end of the block.

        Logs go to `run_dir`. UsageError when there is not a launcher for each node.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        # ZeroMQ's ipc paths must be short, so the sockets do not live under the caller's folder.
        sockets = Path(tempfile.mkdtemp(prefix="demo-"))
        try:
            async with httpx.AsyncClient(trust_env=False) as client:
                cluster = cls(_plan(settings, launchers, run_dir, sockets), run_dir, client)
                try:
                    yield cluster
                finally:
                    await cluster._close()
        finally:
            shutil.rmtree(sockets, ignore_errors=True)

    @property
    def addresses(self) -> list[NodeAddress]:
        """Every node's address, in order."""
        return [NodeAddress(site.name, site.url) for site in self.sites]

    @property
    def model(self) -> str:
        """The name that requests must carry."""
        engine = self.sites[0].engine
        assert engine is not None, "prepare() first"
        return engine.model

    async def prepare(self, policy: str) -> None:
        """Empty caches, fresh sidecars with `policy`, everybody acquainted.

        UsageError when the engines are not of one domain.
        """
        await self._stop_sidecars()
        self._last_words.clear()
        await _all(self._prepare_engine(site) for site in self.sites)
        _check_one_domain([site.engine for site in self.sites if site.engine is not None])
        for site in self.sites:
            self._start_sidecar(site, policy)
        await _all(self._wait_acquainted(site) for site in self.sites)

    async def kill(self, name: str) -> None:
        """SIGKILL a node's sidecar and engine, as a power cut would; its figures are read just before."""
        site = next(site for site in self.sites if site.name == name)
        self._last_words[name] = await self._figures(site)
        site.alive = False
        assert site.sidecar is not None
        site.sidecar.kill()
        site.launcher.kill()

    async def figures(self) -> list[NodeFigures]:
        """What every sidecar counted in this run, the killed ones up to their end."""
        living = [site for site in self.sites if site.alive]
        figures = await asyncio.gather(*(self._figures(site) for site in living))
        return [*figures, *self._last_words.values()]

    # --- engines -------------------------------------------------------------------------------------------

    async def _prepare_engine(self, site: NodeSite) -> None:
        if site.alive and site.engine is not None:
            await self._reset_cache(site.engine)
            return
        site.engine = await site.launcher.start()
        await site.launcher.wait_ready()

    async def _reset_cache(self, engine: RunningEngine) -> None:
        """Drop the engine's cached blocks. An engine refuses while a request still holds some: ask again."""
        deadline = time.monotonic() + _RESET_S
        while True:
            reply = await self._client.post(f"{engine.url}{engine.reset_path}", timeout=_RESET_S)
            if reply.status_code == 200 and reply.content.replace(b" ", b"") != b'{"success":false}':
                break
            if time.monotonic() > deadline:
                raise ProcessError(f"{engine.url} does not reset its cache: {reply.status_code} {reply.text}")
            await asyncio.sleep(0.2)
        # The clear is announced with the engine's next step, so make it take one; a prompt shorter than a
        # block leaves nothing behind in the cache.
        body = {"model": engine.model, "prompt": [100, 101, 102, 103], "max_tokens": 1}
        await self._client.post(f"{engine.url}/v1/completions", json=body, timeout=_RESET_S)

    # --- sidecars ------------------------------------------------------------------------------------------

    def _start_sidecar(self, site: NodeSite, policy: str) -> None:
        path = self._run_dir / f"{site.name}.json"
        dump_config(self._config(site, policy), path)
        argv = [sys.executable, "-m", "prefixroute.cli", "serve", str(path)]
        site.sidecar = ChildProcess.start(f"sidecar of {site.name}", argv, self._run_dir / f"{site.name}.sidecar.log")
        site.alive = True

    def _config(self, site: NodeSite, policy: str) -> SidecarConfig:
        engine = site.engine
        assert engine is not None
        return SidecarConfig(
            node=site.name,
            http=HostPort(host=HOST, port=site.http_port),
            gossip=HostPort(host=HOST, port=site.gossip_port),
            engine=EngineConfig(
                url=engine.url,
                kind=engine.kind,
                events=engine.events_endpoint,
                replay=engine.replay_endpoint,
                topic=f"kv@{site.name}",
                prefill_tokens_per_s=engine.prefill_tokens_per_s,
            ),
            domain=DomainConfig(
                model=engine.model,
                tokenizer=engine.tokenizer or engine.model,
                block_size=16,
                secret="lan4 demo",
            ),
            peers=tuple(
                PeerConfig(node=peer.name, gossip=HostPort(host=HOST, port=peer.gossip_port))
                for peer in self.sites
                if peer is not site
            ),
            policy=policy,
        )

    async def _wait_acquainted(self, site: NodeSite) -> None:
        assert site.sidecar is not None

        async def acquainted() -> bool:
            if not await answers_health(self._client, site.url):
                return False
            return _heard_peers(await self._stats(site)) >= len(self.sites) - 1

        await site.sidecar.wait_until(acquainted, _SIDECAR_READY_S)

    async def _stats(self, site: NodeSite, samples: bool = False) -> dict[str, Any]:
        reply = await self._client.get(
            f"{site.url}/prefixroute/stats", params={"samples": int(samples)}, timeout=_STATS_TIMEOUT_S
        )
        reply.raise_for_status()
        stats: dict[str, Any] = json.loads(reply.content)
        return stats

    async def _figures(self, site: NodeSite) -> NodeFigures:
        stats = await self._stats(site, samples=True)
        return NodeFigures(
            node=site.name,
            gossip_bytes_sent=stats["gossip"]["bytes_sent"],
            gossip_datagrams_sent=stats["gossip"]["datagrams_sent"],
            decision_us=stats["decisions"]["us"],
            counters={**stats["state"]["counters"], **stats["requests"]},
        )

    async def _stop_sidecars(self) -> None:
        await asyncio.gather(*(site.sidecar.stop() for site in self.sites if site.sidecar is not None))

    async def _close(self) -> None:
        """End every process, even when this is cancelled once more meanwhile."""
        try:
            await self._stop_sidecars()
            await asyncio.gather(*(site.launcher.stop() for site in self.sites))
        finally:
            for site in self.sites:
                if site.sidecar is not None:
                    site.sidecar.kill()
                site.launcher.kill()


def _check_one_domain(engines: Sequence[RunningEngine]) -> None:
    """Nodes of different domains refuse each other, so say beforehand which engines differ."""
    domains = {(engine.model, engine.tokenizer) for engine in engines}
    if len(domains) > 1:
        told = ", ".join(f"{model} with {tokenizer}" for model, tokenizer in sorted(domains))
        raise UsageError(
            f"the engines do not serve one model with one tokenizer, but {told}: "
            "make both environments with the same Python (PYTHON=... for the set-up scripts)"
        )


def _heard_peers(stats: dict[str, Any]) -> int:
    """How many peers' endpoints a sidecar knows, from its statistics."""
    return sum(not endpoint["local"] and bool(endpoint["url"]) for endpoint in stats["state"]["endpoints"])


async def _all(work: Any) -> None:
    """Run all of `work` together; the first error cancels the rest and is raised once they have ended."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _plan(
    settings: ClusterSettings, launchers: Sequence[LauncherFactory], run_dir: Path, sockets: Path
) -> list[NodeSite]:
    names = node_names(settings.nodes)
    if len(launchers) != len(names):
        raise UsageError(f"{len(names)} nodes need as many launchers, not {len(launchers)}")
    tcp, udp = free_ports(2 * len(names), socket.SOCK_STREAM), free_ports(len(names), socket.SOCK_DGRAM)
    sites = []
    for index, (name, make_launcher) in enumerate(zip(names, launchers, strict=True)):
        spec = EngineSpec(
            name=name,
            port=tcp[2 * index],
            events_endpoint=f"ipc://{sockets}/{index}e",
            replay_endpoint=f"ipc://{sockets}/{index}r",
            topic=f"kv@{name}",
            block_size=settings.block_size,
            capacity_blocks=settings.capacity_blocks,
            index=index,
            run_dir=run_dir,
        )
        sites.append(NodeSite(name, make_launcher(spec), tcp[2 * index + 1], udp[index]))
    return sites
