"""The engine beside a node, as the node sees it: its data-parallel ranks, their events and their load.

Rules:
1. KINDS is the only place that tells engines apart; the rest is the same for all.
2. Every rank is an endpoint, named by its number. Rank 0 is there from the start, so that the node can serve at once;
   the others come, and rank 0 may go, when the engine tells its ranks.
3. A request says which rank is meant only where there are several: an engine with one need not know the word.
4. An engine that does not answer is asked again; a rank that cannot be followed is told and stops no other one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import httpx
import msgspec
import prefixroute_sglang as sglang
import prefixroute_vllm as vllm
from prefixroute_inproc import TapFollower, is_tap, sources_of_tap
from prefixroute_zmq import EventSource
from prefixroute_zmq.address import sources_of_ranks
from prefixroute_zmq.follow import StreamFollower
from prefixroute_zmq.probe import REFUSAL, REFUSING_FOR_S, HttpProbe

from prefixroute import LoadReport, Node
from prefixroute.aio import Driver
from prefixroute.errors import UsageError
from prefixroute.events import EngineBatch

from .config import EngineConfig

log = logging.getLogger("prefixroute.sidecar")

RANK_HEADER = "x-data-parallel-rank"
"""What vLLM takes for the rank that is meant."""
RANK_FIELD = "routed_dp_rank"
"""The same in the body of a request to SGLang."""

_ASK_AGAIN_S = 5.0
_REFUSED, _SERVER_ERROR = 503, 500

Headers = Sequence[tuple[str, str]]


def by_header(headers: Headers, body: bytes, rank: int) -> tuple[Headers, bytes]:
    """Aim a request at a rank as vLLM wants it."""
    return [*without_rank(headers), (RANK_HEADER, str(rank))], body


def by_field(headers: Headers, body: bytes, rank: int) -> tuple[Headers, bytes]:
    """Aim a request, whose body is a JSON object, at a rank as SGLang wants it. The other fields keep their bytes."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return headers, msgspec.json.encode({**fields, RANK_FIELD: rank})


def without_rank(headers: Headers) -> Headers:
    """The headers without one that names a rank: another engine's ranks are others."""
    return [(name, value) for name, value in headers if name != RANK_HEADER]


class LoadPush(NamedTuple):
    """How an engine that pushes its load is listened to."""

    discover: Callable[..., Awaitable[list[EventSource]]]
    follower: type[sglang.LoadFollower]


class EngineKind(NamedTuple):
    """What an adapter offers, and how a request is aimed at one of the engine's ranks."""

    discover: Callable[..., Awaitable[list[EventSource]]]
    follower: type[StreamFollower]
    probe: type[HttpProbe]
    aim: Callable[[Headers, bytes, int], tuple[Headers, bytes]]
    push: LoadPush | None = None


KINDS: Mapping[str, EngineKind] = {
    "vllm": EngineKind(vllm.discover, vllm.Follower, vllm.LoadProbe, by_header),
    "sglang": EngineKind(
        sglang.discover,
        sglang.Follower,
        sglang.LoadProbe,
        by_field,
        LoadPush(sglang.discover_load, sglang.LoadFollower),
    ),
}
"""`EngineConfig.kind` -> its adapter."""

Follower = StreamFollower | TapFollower


def follower_of(kind: EngineKind, source: EventSource, on_batch: Callable[[EngineBatch], None]) -> Follower:
    """What follows a source: by its endpoint, over ZeroMQ or in-process (``tap://``)."""
    if is_tap(source.endpoint):
        return TapFollower(source, on_batch, kind.follower.engine)
    return kind.follower(source, on_batch)


class Attachment:
    """The local engine: the endpoints that it gives the node, and what keeps them true.

    `endpoints` maps each of this node's endpoints to its rank. `url` is what peers are told. Call `connect`, then run
    the coroutines of `work`.
    """

    def __init__(self, node: Node, config: EngineConfig, url: str, now: float) -> None:
        self.config = config
        self.endpoints: dict[str, int] = {}
        self._kind = KINDS[config.kind]
        self._node = node
        self._url = url
        self._incarnation = time.time_ns()
        self._followers: dict[str, Follower] = {}
        self._refused_until: dict[str, float] = {}
        self._up = asyncio.Event()
        self._add(0, now)

    def connect(self, client: httpx.AsyncClient, driver: Driver) -> None:
        """Say what to ask the engine with, and who drives the node."""
        self._client = client
        self._driver = driver
        self._probe = self._kind.probe(self.config.url, client=client)

    def work(self) -> list[Coroutine[Any, Any, None]]:
        """What has to run as long as the node does: following events, asking for load, listening to load."""
        return [self._follow(), self._ask_load(), self._hear_load()]

    def aimed(self, target: str, headers: Headers, body: bytes) -> tuple[Headers, bytes]:
        """A request's headers and body as the engine wants them, for one of `endpoints`."""
        if len(self.endpoints) < 2:
            return headers, body
        return self._kind.aim(headers, body, self.endpoints[target])

    def answered(self, target: str, status: int, prompt_tokens: int) -> None:
        """Take note of how the rank of `target` answered: 503 counts as a refusal for a while, others end that."""
        if status == _REFUSED:
            self._refused_until[target] = self._driver.now() + REFUSING_FOR_S
        elif status < _SERVER_ERROR:
            self._refused_until.pop(target, None)
        if status == httpx.codes.OK and target in self._followers:
            self._followers[target].note_finished(prompt_tokens)

    def stats(self) -> dict[str, dict[str, Any]]:
        """What each rank's event stream has brought, by rank."""
        return {str(self.endpoints[name]): one.stats()._asdict() for name, one in self._followers.items()}

    # --- ranks and events ----------------------------------------------------------------------------------

    def _add(self, rank: int, now: float) -> str:
        """The endpoint of a rank, new or not."""
        for endpoint, known in self.endpoints.items():
            if known == rank:
                return endpoint
        endpoint = self._node.add_endpoint(str(rank), url=self._url, incarnation=self._incarnation, now=now)
        self.endpoints[endpoint] = rank
        # Said before the first probe answers: until then peers would take the library's default for this speed.
        self._node.set_load(endpoint, self._with_speed(LoadReport()), now)
        return endpoint

    def _keep(self, ranks: set[int], now: float) -> None:
        """Give up the endpoints of ranks that the engine turned out not to have."""
        for endpoint in [name for name, rank in self.endpoints.items() if rank not in ranks]:
            del self.endpoints[endpoint]
            self._node.remove_endpoint(endpoint, now)

    async def _follow(self) -> None:
        """Apply the events of every rank, for ever."""
        sources = await self._sources()
        now = self._driver.now()
        for source in sources:
            endpoint = self._add(source.rank, now)
            self._followers[endpoint] = follower_of(self._kind, source, partial(self._apply, endpoint))
        self._keep({source.rank for source in sources}, now)
        self._driver.wake()
        await asyncio.gather(*(_told(follower.run()) for follower in self._followers.values()))

    async def _sources(self) -> list[EventSource]:
        """Where the ranks publish: as configured, or as the engine tells itself, asked until it does."""
        config = self.config
        if is_tap(config.events):
            return sources_of_tap(config.events, config.ranks)
        if config.events:
            host = httpx.URL(config.url).host
            sources = sources_of_ranks(config.events, config.replay or None, config.topic, config.ranks, host)
            return [source._replace(bind=config.bind) for source in sources]
        why = "it does not answer, or is too old to tell: give engine.events"
        while True:
            try:
                sources = [s for s in await self._kind.discover(config.url, client=self._client) if s.discovered]
            except UsageError as error:
                sources, why = [], str(error)
            if sources:
                return sources
            log.warning("%s does not tell where it publishes its cache events: %s", config.url, why)
            await asyncio.sleep(_ASK_AGAIN_S)

    def _apply(self, endpoint: str, batch: EngineBatch) -> None:
        self._node.apply(endpoint, batch, self._driver.now())
        self._driver.wake()

    # --- load ----------------------------------------------------------------------------------------------

    async def _ask_load(self) -> None:
        """Tell the node how loaded each rank is, as often as configured, for ever."""
        while True:
            if loads := await self._probe.read_all():
                self._up.set()
                for rank, load in loads.items():
                    self._take_load(rank, load)
            await asyncio.sleep(self.config.load_probe_s)

    async def _hear_load(self) -> None:
        """Tell the node what the engine says of its load by itself, for ever, where it does.

        It is asked as well: a socket that nobody serves cannot be told from a quiet one.
        """
        push = self._kind.push
        if push is None:
            return
        await self._up.wait()  # before that it cannot tell where
        sources = await push.discover(self.config.url, client=self._client)
        await asyncio.gather(*(_told(push.follower(source, self._take_load).run()) for source in sources))

    def _take_load(self, rank: int, load: LoadReport) -> None:
        now = self._driver.now()
        for endpoint, known in self.endpoints.items():
            if known == rank:
                if now < self._refused_until.get(endpoint, -math.inf):
                    load = replace(load, refusing=True, reason=REFUSAL)
                self._node.set_load(endpoint, self._with_speed(load), now)
                self._driver.wake()

    def _with_speed(self, load: LoadReport) -> LoadReport:
        """Where the engine does not tell its speed, the configuration's guess stands until the node has learnt one."""
        if load.prefill_tokens_per_s:
            return load
        return replace(load, prefill_tokens_per_s=self.config.prefill_tokens_per_s)


async def _told(work: Awaitable[None]) -> None:
    """Run `work`; what the user has to change is told, and ends nothing else."""
    try:
        await work
    except UsageError as error:
        log.error("%s", error)
