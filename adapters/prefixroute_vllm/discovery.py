"""Where a vLLM engine publishes.

Rule: every data-parallel rank has its own sockets. `discover` asks the engine for them (0.31 on), else tcp ports are
base + rank. Who binds is in `prefixroute_zmq.address`.
"""

from __future__ import annotations

from typing import Any

import httpx
from prefixroute_zmq.address import (
    DEFAULT_ENDPOINT,
    Address,
    EventSource,
    endpoint_of_rank,
    host_of,
    live_address,
    replay_address,
    sources_of_ranks,
)
from prefixroute_zmq.http import TIMEOUT_S, fetch_json
from prefixroute_zmq.sequence import BUFFER_STEPS

__all__ = [
    "DEFAULT_ENDPOINT",
    "Address",
    "EventSource",
    "discover",
    "endpoint_of_rank",
    "live_address",
    "replay_address",
]


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
    publishes nothing: the list is empty.
    """
    host = host_of(base_url)
    told = await fetch_json(base_url.rstrip("/") + "/kv_event_sources", timeout_s, client)
    if isinstance(told, dict):
        sources = [_source(rank, config, host) for rank, config in told.items()]
        return sorted((source for source in sources if source is not None), key=lambda source: source.rank)
    return sources_of_ranks(endpoint, replay_endpoint, topic, ranks, host)


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
