"""Asks the local engine which ranks it has and where they publish, and asks again when that may have changed.

Rules:
1. The engine's last answer counts. Without an answer, or with one that names no ranks, nothing changes.
2. The engine is asked again when a stream shows a restart, when it answers again after a silence, and every
   `ASK_AGAIN_S` seconds while it cannot name its ranks, publishes nothing, or a stream is not connected: it may come
   back with other ranks and ports.
3. With endpoints in the configuration the engine is never asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import httpx
from prefixroute_inproc import is_tap, sources_of_tap
from prefixroute_streams import EventSource
from prefixroute_zmq.address import sources_of_ranks

from prefixroute.errors import UsageError

from .engine_config import EngineConfig
from .kinds import EngineKind, Follower

log = logging.getLogger("prefixroute.sidecar")

ASK_AGAIN_S = 5.0

CANNOT_TELL = "it does not answer, or is too old to tell: give engine.events"


class ToldSources(NamedTuple):
    """An engine's answer about its event sources; without sources `why` is the reason.

    `silent`: the engine publishes no events; otherwise it could not name its sources.
    """

    sources: list[EventSource]
    why: str = ""
    silent: bool = False


async def ask(kind: EngineKind, config: EngineConfig, client: httpx.AsyncClient) -> ToldSources:
    """Return where the ranks publish: as configured, or else as the engine answers."""
    if is_tap(config.events):
        return ToldSources(sources_of_tap(config.events, config.ranks))
    if config.events:
        host = httpx.URL(config.url).host
        sources = sources_of_ranks(config.events, config.replay or None, config.topic, config.ranks, host)
        return ToldSources([source._replace(bind=config.bind) for source in sources])
    try:
        sources = await kind.discover(config.url, client=client)
    except UsageError as error:
        return ToldSources([], str(error), silent=True)
    if not sources:
        return ToldSources([], f"{config.url} publishes no KV-cache events: {kind.how_to_publish}", silent=True)
    told = [source for source in sources if source.discovered]
    return ToldSources(told) if told else ToldSources([], CANNOT_TELL)


class ChangeSignal:
    """The wait until the engine's answer may have changed."""

    def __init__(self) -> None:
        self._noted = asyncio.Event()

    def note(self) -> None:
        """Note an event that may be a restart of the engine."""
        self._noted.set()

    async def wait(self, settled: bool, followers: Iterable[Follower]) -> None:
        """Wait until the engine is to be asked again; `settled` tells that it has named its sources."""
        followers = list(followers)
        while True:
            # Not wait_for: before Python 3.12 it may swallow a cancellation that comes with the note.
            noted = asyncio.ensure_future(self._noted.wait())
            try:
                await asyncio.wait((noted,), timeout=ASK_AGAIN_S)
            finally:
                noted.cancel()
            if self._noted.is_set() or not settled or not all(one.stats().connected for one in followers):
                self._noted.clear()
                return


class RunningTasks:
    """Coroutines that run as long as they are wanted, each under a key. Use it as a context manager."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, asyncio.Task[None]] = {}

    def __enter__(self) -> RunningTasks:
        return self

    def __exit__(self, *_: object) -> None:
        self.keep({})

    def keep(self, wanted: Mapping[Hashable, Callable[[], Coroutine[Any, Any, None]]]) -> None:
        """Let exactly these run: new ones begin, unwanted ones are cancelled, the others go on."""
        for key in [key for key in self._tasks if key not in wanted]:
            self.stop(key)
        for key, work in wanted.items():
            if key not in self._tasks:
                self._tasks[key] = asyncio.create_task(_told(work()))

    def stop(self, key: Hashable) -> None:
        """Cancel the coroutine under a key, if there is one; it does nothing more from now on."""
        if key in self._tasks:
            self._tasks.pop(key).cancel()


async def _told(work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; if it fails, log the reason, and let all other work go on."""
    try:
        await work
    except UsageError as error:
        log.error("%s", error)  # the message says what the user has to change
    except Exception:
        log.exception("a stream of the engine is followed no longer")
