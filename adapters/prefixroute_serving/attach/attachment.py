"""The engine beside a node, as the node sees it: its data-parallel ranks, their events and their load.

Rules:
1. `kinds.KINDS` names everything that tells engines apart; the rest is the same for all.
2. Every rank is an endpoint, named by its number. Rank 0 is there from the start, so that the node can serve at once;
   the others come, and any may go, when the engine tells its ranks (`ranks`).
3. A request names a rank only where there are several: an engine with one rank may not know the field.
4. A rank that cannot be followed is logged, and the others are followed all the same. Where an engine says that it
   publishes nothing, the node goes by routing history until it does, and the log names the missing option.
5. More live blocks than the engine has prove that its stream lost removals: the stream is read anew, once in
   `RESYNC_PAUSE_S` at most. A gap that no replay has filled is repaired by asking the engine, where it can be asked
   (`repairs`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Hashable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import msgspec
from prefixroute_streams import EventSource
from prefixroute_streams.engine_http import REFUSAL, REFUSING_FOR_S, TIMEOUT_S
from prefixroute_zmq.address import live_address

from prefixroute import LoadReport, Node, UsageError
from prefixroute.aio import Driver
from prefixroute.events import EngineBatch, StreamRestarted

from .engine_config import EngineConfig
from .kinds import KINDS, Follower, LoadPush, follower_of
from .ranks import ChangeSignal, RunningTasks, ToldSources, ask
from .repairs import Headers, Repairs, Reports
from .resets import AdminCall, OwnResets

log = logging.getLogger("prefixroute.sidecar")

RESYNC_PAUSE_S = 60.0
"""The least time between two readings anew of one stream: an engine that never tells some removals would else replay
for ever."""

TROUBLED_PROBE_S = 0.5
"""How often an engine is asked for its load, at least, while it does not answer or refuses."""

GONE = "the engine does not answer"

_REFUSED, _SERVER_ERROR = 503, 500


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
        self._followers: dict[str, Follower] = {}
        self._sources: dict[str, EventSource] = {}
        self._resynced_at: dict[str, float] = {}
        self._refused_until: dict[str, float] = {}
        self._resets = OwnResets(node)
        self._repairs = Repairs()
        self._reports: Reports | None = None
        """How the engine is asked to report, once it is known to do so."""
        self._change = ChangeSignal()
        self._up = self._was_up = False
        self._ask_now = asyncio.Event()
        self._silent = False
        self._add(0, now)

    def connect(self, client: httpx.AsyncClient, driver: Driver) -> None:
        """Say what to ask the engine with, and who drives the node."""
        self._client = client
        self._driver = driver
        self._probe = self._kind.probe(self.config.url, client=client)

    def work(self) -> list[Coroutine[Any, Any, None]]:
        """What has to run as long as the node does: following events and pushed load, asking for load."""
        return [self._follow(), self._ask_load()]

    def aimed(self, target: str, headers: Headers, body: bytes) -> tuple[Headers, bytes]:
        """A request's headers and body as the engine wants them, for one of `endpoints`."""
        if self._reports is not None and self._repairs.due(target, self._node.residency(target), self._driver.now()):
            body = self._reports.ask(headers, body, self._repairs.asked) or body
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

    def doubt(self) -> None:
        """An attempt at the engine broke: look at once whether it is still there."""
        self._ask_now.set()

    def before_call(self, path: str) -> Mapping[str, int] | None:
        """What `called` needs, taken before a call is passed to the engine; None for calls that empty no cache."""
        return self._resets.clears(self.endpoints) if path in self._kind.empties else None

    def called(self, path: str, query: Mapping[str, str], body: bytes, reply: bytes, before: Mapping[str, int]) -> None:
        """Take note of a call that the engine answered with success: the node knows at once if it emptied the cache."""
        if self._kind.empties[path](AdminCall(query, _object(body), _object(reply))):
            self._resets.emptied(self.endpoints, before, self._driver.now())
            self._driver.wake()

    def stats(self) -> dict[str, dict[str, Any]]:
        """What each rank's event stream has brought, by rank, and the blocks that the engine confirmed when asked."""
        return {
            str(self.endpoints[name]): {
                **follower.stats()._asdict(),
                "confirmed": self._node.residency(name).counts.confirmed,
            }
            for name, follower in self._followers.items()
        }

    # --- ranks and events ----------------------------------------------------------------------------------

    def _add(self, rank: int, now: float) -> str:
        """The endpoint of a rank, new or not."""
        for endpoint, known in self.endpoints.items():
            if known == rank:
                return endpoint
        endpoint = self._node.add_endpoint(str(rank), url=self._url, incarnation=time.time_ns(), now=now)
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
        """Follow the events of every rank, and the load where it is pushed, as the engine tells of them, for ever."""
        said = ""
        with RunningTasks() as running:
            while True:
                told = await ask(self._kind, self.config, self._client)
                if told.why and told.why != said and (told.silent or not self._followers):
                    log.warning("%s does not tell where it publishes its cache events: %s", self.config.url, told.why)
                said = told.why
                if told.sources or told.silent:
                    self._take(told, running)
                    reports = self._kind.reports
                    able = reports is not None and await reports.can(self.config.url, client=self._client)
                    self._reports = reports if able else None
                    running.keep({**self._wanted(), **await self._wanted_loads()})
                await self._change.wait(not told.why, self._followers.values())

    def _take(self, told: ToldSources, running: RunningTasks) -> None:
        """Make endpoints and followers what the engine told."""
        now = self._driver.now()
        sources = {}
        for source in told.sources:
            endpoint = self._add(source.rank, now)
            sources[endpoint] = self._unless_ours(self._sources.get(endpoint), source)
        for endpoint in [name for name in self._followers if self._sources[name] != sources.get(name)]:
            # The next stream is another one; it begins with a replay of all, and nothing of this one must be left.
            running.stop((endpoint, self._sources[endpoint]))
            del self._followers[endpoint], self._sources[endpoint]
            self._node.apply(endpoint, EngineBatch((StreamRestarted(),), self.endpoints[endpoint]), now)
        for endpoint, source in sources.items():
            if endpoint not in self._followers:
                self._followers[endpoint] = follower_of(self._kind, source, partial(self._apply, endpoint))
                self._sources[endpoint] = source
        self._silent = told.silent
        if told.silent:
            for endpoint in self.endpoints:
                self._node.go_by_history(endpoint, told.why, now)
        else:
            self._keep({source.rank for source in told.sources}, now)
        self._driver.wake()

    def _unless_ours(self, old: EventSource | None, new: EventSource) -> EventSource:
        """The source that the engine tells for a rank, or the old one if only `bind` differs and this node binds it.

        `discover` looks whether somebody listens at the address; that must not be this node's own socket.
        """
        if old is None or old.bind == new.bind or new != old._replace(bind=new.bind):
            return new
        ours = live_address(old.endpoint, old.host, self._kind.follower.engine.binding_hosts, old.bind).bind
        return old if ours else new

    def _wanted(self) -> dict[Hashable, Callable[[], Coroutine[Any, Any, None]]]:
        return {(name, self._sources[name]): follower.run for name, follower in self._followers.items()}

    async def _wanted_loads(self) -> dict[Hashable, Callable[[], Coroutine[Any, Any, None]]]:
        """The load sockets to listen to.

        Pushed load is asked for as well: a socket that nobody serves cannot be told from a quiet one.
        """
        push = self._kind.push
        if push is None or not self._up:  # before that it cannot tell where
            return {}
        sources = await push.discover(self.config.url, client=self._client)
        return {("load", source): partial(self._hear, push, source) for source in sources}

    async def _hear(self, push: LoadPush, source: EventSource) -> None:
        await push.follower(source, self._take_load).run()

    def _apply(self, endpoint: str, batch: EngineBatch) -> None:
        now = self._driver.now()
        try:
            residency = self._node.residency(endpoint)
        except UsageError:
            # This life of the rank is over, and its follower had one more batch: the node counts it.
            self._node.apply(endpoint, batch, now)
            return
        inflated = residency.counts.inflated
        self._node.apply(endpoint, self._resets.passed(endpoint, batch, now), now)
        self._driver.wake()
        if any(isinstance(event, StreamRestarted) for event in batch.events):
            self._change.note()
        if residency.counts.inflated != inflated:
            self._resync(endpoint, now)

    def _resync(self, endpoint: str, now: float) -> None:
        if now >= self._resynced_at.get(endpoint, -math.inf) + RESYNC_PAUSE_S:
            self._resynced_at[endpoint] = now
            self._followers[endpoint].resync()

    # --- load ----------------------------------------------------------------------------------------------

    async def _ask_load(self) -> None:
        """Tell the node how loaded each rank is, for ever.

        An engine in good health is asked as often as configured: what this node sends there it counts itself. One in
        trouble is asked more often, and one that has just broken a connection at once.
        """
        loop = asyncio.get_running_loop()
        while True:
            self._ask_now.clear()
            loads = await self._probe.read_all()
            if loads and not self._up:
                self._up = self._was_up = True
                self._change.note()
            elif not loads and self._up and await self._gone():
                self._up = False
                self._forget_guesses()
            if not loads and self._was_up and not self._up:
                loads = dict.fromkeys(self.endpoints.values(), LoadReport(refusing=True, reason=GONE))
            for rank, load in (loads or {}).items():
                self._take_load(rank, load)
            well = loads and not any(load.refusing for load in loads.values())
            pause = self.config.load_probe_s if well else min(self.config.load_probe_s, TROUBLED_PROBE_S)
            # Not wait_for: before Python 3.12 it may swallow a cancellation that comes with the call.
            alarm = loop.call_later(pause, self._ask_now.set)
            try:
                await self._ask_now.wait()
            finally:
                alarm.cancel()

    async def _gone(self) -> bool:
        """True when nobody listens where the engine did. A slow engine is waited for, one that is gone is not."""
        try:
            await self._client.get(f"{self.config.url}/health", timeout=TIMEOUT_S)
        except httpx.ConnectError:
            return True
        except httpx.HTTPError:
            return False
        return False

    def _forget_guesses(self) -> None:
        """Drop what was guessed of a silent engine that is gone. One with events tells its restart itself."""
        for endpoint, rank in self.endpoints.items() if self._silent else ():
            self._node.apply(endpoint, EngineBatch((StreamRestarted(),), rank), self._driver.now())

    def _take_load(self, rank: int, load: LoadReport) -> None:
        now = self._driver.now()
        for endpoint, known in self.endpoints.items():
            if known == rank:
                if now < self._refused_until.get(endpoint, -math.inf):
                    load = replace(load, refusing=True, reason=REFUSAL)
                self._node.set_load(endpoint, self._with_speed(load), now)
                self._driver.wake()

    def _with_speed(self, load: LoadReport) -> LoadReport:
        """The load with the configured speed, where the engine tells none: it counts until the node has learnt one."""
        if load.prefill_tokens_per_s:
            return load
        return replace(load, prefill_tokens_per_s=self.config.prefill_tokens_per_s)


def _object(body: bytes) -> Mapping[str, Any]:
    """A JSON object's fields; none of anything else."""
    try:
        value = msgspec.json.decode(body) if body else None
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return {}
    return value if isinstance(value, dict) else {}
