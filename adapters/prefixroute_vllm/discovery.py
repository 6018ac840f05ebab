"""Where a vLLM engine publishes.

Rules:
1. Every data-parallel rank has its own sockets. `discover` asks the engine for them (0.31 on), else tcp ports are
   base + rank.
2. Who binds is in `prefixroute_zmq.address`. An engine that took a port from the system (``tcp://*:0``) tells the bound
   address, which reads like one to connect to: there it is looked whether somebody listens (0.32.0).
"""

from __future__ import annotations

import re
from typing import Any, Final

import httpx
from prefixroute_streams.engine_http import TIMEOUT_S, fetch_json
from prefixroute_streams.sequence import BUFFER_STEPS
from prefixroute_streams.source import DEFAULT_ENDPOINT, EventSource
from prefixroute_zmq.address import host_of, is_bound, sources_of_ranks

from .decode import ENGINE

HOW_TO_PUBLISH: Final = (
    'start it with --kv-events-config \'{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557",'
    '"replay_endpoint":"tcp://*:5558"}\''
)
"""What to add to the command of an engine that publishes no events."""

_VERSION: Final = re.compile(r"(\d{1,4})\.(\d{1,4})\b")
_REPORTS_SINCE: Final = (0, 30)


async def describe(
    base_url: str, *, timeout_s: float = TIMEOUT_S, client: httpx.AsyncClient | None = None
) -> list[EventSource] | None:
    """Return the event sources that the engine at `base_url` tells, in rank order, with `bind` unknown.

    None when it cannot be reached or does not know the question (before 0.31); empty when it publishes nothing.
    """
    host = host_of(base_url)
    told = await fetch_json(base_url.rstrip("/") + "/kv_event_sources", timeout_s, client)
    if not isinstance(told, dict):
        return None
    found = [_source(rank, config, host) for rank, config in told.items()]
    return sorted((source for source in found if source is not None), key=lambda source: source.rank)


async def discover(
    base_url: str,
    *,
    endpoint: str = DEFAULT_ENDPOINT,
    replay_endpoint: str | None = None,
    topic: str = "",
    ranks: int = 1,
    timeout_s: float = TIMEOUT_S,
    client: httpx.AsyncClient | None = None,
) -> list[EventSource]:
    """Return the event sources of the engine at `base_url`, one a rank, in rank order.

    Asks ``GET /kv_event_sources``, which vLLM has from 0.31. When the engine cannot be reached or does not know
    the path, the other arguments say what rank 0 was configured with. An engine that answers without any source
    publishes nothing: the list is empty, and `HOW_TO_PUBLISH` says what to add to its command.
    """
    sources = await describe(base_url, timeout_s=timeout_s, client=client)
    if sources is not None:
        return [source._replace(bind=await is_bound(source, ENGINE.binding_hosts, timeout_s)) for source in sources]
    return sources_of_ranks(endpoint, replay_endpoint, topic, ranks, host_of(base_url))


async def reports_on_request(
    base_url: str, *, timeout_s: float = TIMEOUT_S, client: httpx.AsyncClient | None = None
) -> bool:
    """Whether the engine at `base_url` tells the blocks that a request reuses, and whose request it was (0.30 on).

    See `decode.REPORT_SESSION`. False when it cannot be reached.
    """
    told = await fetch_json(base_url.rstrip("/") + "/version", timeout_s, client)
    version = told.get("version") if isinstance(told, dict) else None
    match = _VERSION.match(version) if isinstance(version, str) else None
    return match is not None and (int(match[1]), int(match[2])) >= _REPORTS_SINCE


def _source(rank: str, config: Any, host: str) -> EventSource | None:
    """One entry of the engine's answer; None when it is unusable or says that nothing is published."""
    if not isinstance(config, dict) or not rank.isdecimal() or config.get("enable_kv_cache_events") is False:
        return None
    endpoint, replay, topic = config.get("endpoint"), config.get("replay_endpoint"), config.get("topic")
    if not isinstance(endpoint, str) or config.get("publisher") == "null":
        return None
    steps = config.get("buffer_steps")
    return EventSource(
        endpoint,
        replay if isinstance(replay, str) else None,
        topic if isinstance(topic, str) else "",
        int(rank),
        host,
        steps if isinstance(steps, int) and 0 <= steps <= 1 << 20 else BUFFER_STEPS,
        discovered=True,
    )
