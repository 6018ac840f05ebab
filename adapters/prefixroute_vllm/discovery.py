"""Where a vLLM engine publishes: its sockets, and who binds them.

Rules:
1. The engine binds its event socket when the endpoint contains ``*`` or ``::`` or starts with ``ipc://`` or
   ``inproc://``; else it connects, and the consumer has to bind. Both sides connecting is silence.
2. The replay socket is always bound by the engine.
3. Every data-parallel rank has its own sockets: `discover` asks the engine (0.31 on), else tcp ports are
   base + rank.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import httpx
import msgspec

from prefixroute.errors import UsageError

from .sequence import BUFFER_STEPS

DEFAULT_ENDPOINT: Final = "tcp://*:5557"
"""vLLM's default event endpoint."""

TIMEOUT_S: Final = 2.0

_ANY_HOST: Final = {"*", "[::]", "0.0.0.0"}
_PORT: Final = re.compile(r"^tcp://(?P<host>.+):(?P<port>\d{1,5})$")
_MAX_BODY_BYTES: Final = 1 << 20


class Address(NamedTuple):
    """A ZeroMQ address as the consumer uses it, and whether it binds or connects."""

    address: str
    bind: bool


class EventSource(NamedTuple):
    """The event stream of one data-parallel rank, in the words of the engine's ``--kv-events-config``.

    `host` is where the engine runs, seen from here. `discovered` is False when the endpoints were computed from
    a base port because the engine could not tell.
    """

    endpoint: str = DEFAULT_ENDPOINT
    replay_endpoint: str | None = None
    topic: str = ""
    rank: int = 0
    host: str = "127.0.0.1"
    buffer_steps: int = BUFFER_STEPS
    discovered: bool = False


def live_address(endpoint: str, host: str = "127.0.0.1") -> Address:
    """Return the consumer's end of the engine's event endpoint."""
    if "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://")):
        return Address(_reachable(endpoint, host), bind=False)
    return Address(endpoint, bind=True)


def replay_address(endpoint: str, host: str = "127.0.0.1") -> Address:
    """Return the consumer's end of the engine's replay endpoint."""
    return Address(_reachable(endpoint, host), bind=False)


def _reachable(endpoint: str, host: str) -> str:
    match = _PORT.match(endpoint)
    if match is None or match["host"] not in _ANY_HOST:
        return endpoint
    _check_port(endpoint, int(match["port"]))
    return f"tcp://{f'[{host}]' if ':' in host else host}:{match['port']}"


def endpoint_of_rank(endpoint: str, rank: int) -> str:
    """Return the endpoint of a data-parallel rank, given that of rank 0.

    Raises `UsageError` for a transport whose name says nothing about the ranks.
    """
    if rank == 0:
        return endpoint
    match = _PORT.match(endpoint)
    if match is None:
        raise UsageError(f"rank {rank} of {endpoint} is not known: use tcp endpoints with data parallelism")
    _check_port(endpoint, int(match["port"]))
    return f"tcp://{match['host']}:{int(match['port']) + rank}"


def _check_port(endpoint: str, port: int) -> None:
    if port == 0:
        raise UsageError(f"{endpoint} has a port chosen by the system: ask the engine for it with discover()")


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
    host = urlsplit(base_url).hostname
    if not host:
        raise UsageError(f"pass a base_url such as http://127.0.0.1:8000, not {base_url!r}")
    told = await _ask(base_url.rstrip("/") + "/kv_event_sources", timeout_s, client)
    if isinstance(told, dict):
        sources = [_source(rank, config, host) for rank, config in told.items()]
        return sorted((source for source in sources if source is not None), key=lambda source: source.rank)
    return [
        EventSource(
            endpoint_of_rank(endpoint, rank),
            None if replay_endpoint is None else endpoint_of_rank(replay_endpoint, rank),
            topic,
            rank,
            host,
        )
        for rank in range(ranks)
    ]


async def _ask(url: str, timeout_s: float, client: httpx.AsyncClient | None) -> object:
    body = await fetch(url, timeout_s, _MAX_BODY_BYTES, client)
    try:
        return None if body is None else msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return None


async def fetch(url: str, timeout_s: float, max_bytes: int, client: httpx.AsyncClient | None) -> bytes | None:
    """Return the body of a successful GET, or None when there is none, for whatever reason."""
    if client is None:
        async with httpx.AsyncClient(trust_env=False) as own:
            return await fetch(url, timeout_s, max_bytes, own)
    body = bytearray()
    try:
        async with client.stream("GET", url, timeout=timeout_s) as response:
            if response.status_code != httpx.codes.OK:
                return None
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > max_bytes:
                    return None
    except (httpx.HTTPError, httpx.StreamError):
        return None
    return bytes(body)


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
