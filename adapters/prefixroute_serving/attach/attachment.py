"""The engine beside a node, as the node sees it: its data-parallel ranks, their events and their load.

Rules:
1. `kinds.KINDS` names every difference between the kinds of engine; all other code is the same for all.
2. Every rank is an endpoint, named by its number. Rank 0 is there from the start, so that the node can serve at once;
   other ranks join, and any rank may leave, when the engine reports its ranks (`ranks`).
3. A request names a rank only where there are several: an engine with one rank may not know the field.
4. A rank that cannot be followed is logged, and the others are followed all the same. While an engine reports that it
   publishes nothing, the node uses the history of what it routed there, and the log names the missing option.
5. More live blocks than the engine has prove that its stream lost removals: the stream is read anew, at most once in
   `RESYNC_PAUSE_S` seconds. A gap that no replay has filled is repaired by asking the engine, if it can be asked
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
from prefixroute_streams.trouble import troubles
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
"""The least seconds between two resyncs of one stream: an engine that never reports some removals would otherwise
replay for ever."""

TROUBLED_PROBE_S = 0.5
"""The longest pause in seconds between two load probes of an engine that does not answer or that refuses."""

GONE = "the engine does not answer"

_REFUSED, _SERVER_ERROR = 503, 500


class Attachment:
    """The local engine: its endpoints of the node, and the work that keeps them up to date.

    `endpoints` maps each of this node's endpoints to its rank. `url` is the address advertised to peers. Call
    `connect`, then run the coroutines of `work`.
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
        """How the engine is asked for a report; None until it is known that it can report."""
        self._change = ChangeSignal()
        self._up = self._was_up = False
        self._ask_now = asyncio.Event()
        self._silent = False
        self._complaints: set[tuple[str, str]] = set()
        """The problems of streams that are logged already: (endpoint, kind of problem)."""
        self._add(0, now)

    def connect(self, client: httpx.AsyncClient, driver: Driver) -> None:
        """Set the HTTP client for calls to the engine, and the driver of the node."""
        self._client = client
        self._driver = driver
        self._probe = self._kind.probe(self.config.url, client=client)

    def work(self) -> list[Coroutine[Any, Any, None]]:
        """Return the coroutines to run as long as the node does: following events and pushed load, probing load."""
        return [self._follow(), self._ask_load()]

    def aimed(self, target: str, headers: Headers, body: bytes) -> tuple[Headers, bytes]:
        """Return a request's headers and body in the engine's form, aimed at the rank of one of `endpoints`."""
        if self._reports is not None and self._repairs.due(target, self._node.residency(target), self._driver.now()):
            body = self._reports.ask(headers, body, self._repairs.asked) or body
        if len(self.endpoints) < 2:
            return headers, body
        return self._kind.aim(headers, body, self.endpoints[target])

    def answered(self, target: str, status: int, prompt_tokens: int, cached_tokens: int = 0) -> None:
        """Note the status of an answer by the rank of `target`: 503 is a refusal for a while, any other status ends it.

        `cached_tokens` are the tokens believed to be cached there; for the other tokens events must come.
        """
        if status == _REFUSED:
            self._refused_until[target] = self._driver.now() + REFUSING_FOR_S
        elif status < _SERVER_ERROR:
            self._refused_until.pop(target, None)
        if status == httpx.codes.OK and target in self._followers:
            self._followers[target].note_finished(prompt_tokens, cached_tokens)

    def doubt(self) -> None:
        """Note that an attempt at the engine broke: probe at once whether the engine is still there."""
        self._ask_now.set()

    def before_call(self, path: str) -> Mapping[str, int] | None:
        """Return the argument `before` of `called`; take it before the call. None for calls that empty no cache."""
        return self._resets.clears(self.endpoints) if path in self._kind.empties else None

    def called(self, path: str, query: Mapping[str, str], body: bytes, reply: bytes, before: Mapping[str, int]) -> None:
        """Note a call that the engine answered with success; if it emptied the cache, the node clears it at once."""
        if self._kind.empties[path](AdminCall(query, _object(body), _object(reply))):
            self._resets.emptied(self.endpoints, before, self._driver.now())
            self._driver.wake()

    def stats(self) -> dict[str, dict[str, Any]]:
        """Return by rank the counts of its event stream, and the blocks that the engine confirmed when asked."""
        return {
            str(self.endpoints[name]): {
                **follower.stats()._asdict(),
                "confirmed": self._node.residency(name).counts.confirmed,
            }
            for name, follower in self._followers.items()
        }

    # --- ranks and events ----------------------------------------------------------------------------------

    def _add(self, rank: int, now: float) -> str:
        """Return the endpoint of a rank; it is added if it is new."""
        for endpoint, known in self.endpoints.items():
            if known == rank:
                return endpoint
        endpoint = self._node.add_endpoint(str(rank), url=self._url, incarnation=time.time_ns(), now=now)
        self.endpoints[endpoint] = rank
        # The configured speed is set before the first probe answers; until then peers would assume the library's
        # default speed.
        self._node.set_load(endpoint, self._with_speed(LoadReport()), now)
        return endpoint

    def _keep(self, ranks: set[int], now: float) -> None:
        """Remove the endpoints of ranks that the engine does not have."""
        for endpoint in [name for name, rank in self.endpoints.items() if rank not in ranks]:
            del self.endpoints[endpoint]
            self._node.remove_endpoint(endpoint, now)

    async def _follow(self) -> None:
        """Follow the events and the pushed load of every rank that the engine reports, for ever."""
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
        """Add and remove endpoints and followers as the engine's answer says."""
        now = self._driver.now()
        sources = {}
        for source in told.sources:
            endpoint = self._add(source.rank, now)
            sources[endpoint] = self._unless_ours(self._sources.get(endpoint), source)
        for endpoint in [name for name in self._followers if self._sources[name] != sources.get(name)]:
            # The next stream is a new one that begins with a full replay, so nothing of the old stream may be left.
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
        """Return the engine's source of a rank, or the old one if only `bind` differs and this node binds the address.

        `discover` tries whether a socket listens at the address; it must not mistake this node's own socket for one.
        """
        if old is None or old.bind == new.bind or new != old._replace(bind=new.bind):
            return new
        ours = live_address(old.endpoint, old.host, self._kind.follower.engine.binding_hosts, old.bind).bind
        return old if ours else new

    def _wanted(self) -> dict[Hashable, Callable[[], Coroutine[Any, Any, None]]]:
        return {(name, self._sources[name]): follower.run for name, follower in self._followers.items()}

    async def _wanted_loads(self) -> dict[Hashable, Callable[[], Coroutine[Any, Any, None]]]:
        """Return the load sockets to listen to.

        Load that is pushed is also probed: a socket without a publisher cannot be told from a quiet one.
        """
        push = self._kind.push
        if push is None or not self._up:  # an engine that is not up cannot report its sockets
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

    def _complain(self) -> None:
        """Log each problem of a stream once, for as long as it lasts."""
        complaints = {
            (endpoint, trouble.kind): trouble
            for endpoint, follower in self._followers.items()
            for trouble in troubles(follower.stats()._asdict())
        }
        for (endpoint, kind), trouble in complaints.items():
            if (endpoint, kind) not in self._complaints:
                log.warning("%s: %s; %s", endpoint, trouble.what, trouble.change)
        self._complaints = set(complaints)

    # --- load ----------------------------------------------------------------------------------------------

    async def _ask_load(self) -> None:
        """Tell the node each rank's load, for ever.

        A healthy engine is probed as often as configured, since the node itself counts the requests that it sends. An
        engine in trouble is probed more often, and at once after it has broken a connection.
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
            self._complain()
            well = loads and not any(load.refusing for load in loads.values())
            pause = self.config.load_probe_s if well else min(self.config.load_probe_s, TROUBLED_PROBE_S)
            # Not wait_for: before Python 3.12 it may swallow a cancellation that comes with the call.
            alarm = loop.call_later(pause, self._ask_now.set)
            try:
                await self._ask_now.wait()
            finally:
                alarm.cancel()

    async def _gone(self) -> bool:
        """Return whether no process listens at the engine's address: a slow engine is waited for, a gone one is not."""
        try:
            await self._client.get(f"{self.config.url}/health", timeout=TIMEOUT_S)
        except httpx.ConnectError:
            return True
        except httpx.HTTPError:
            return False
        return False

    def _forget_guesses(self) -> None:
        """Drop the guessed residency of a gone engine without events; one with events reports its restart itself."""
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
        """Return the load with the configured speed if the engine reports none; it counts until the node learns one."""
        if load.prefill_tokens_per_s:
            return load
        return replace(load, prefill_tokens_per_s=self.config.prefill_tokens_per_s)


def _object(body: bytes) -> Mapping[str, Any]:
    """Return the fields of a body that is a JSON object, else an empty mapping."""
    try:
        value = msgspec.json.decode(body) if body else None
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return {}
    return value if isinstance(value, dict) else {}
