"""Where an SGLang engine publishes: asked of the engine itself.

Rules:
1. ``GET /server_info`` (old name ``/get_server_info``) names the ports of rank 0; rank r has port + r, for events,
   replay and load alike. The load port is read, never derived: the engine moves it where there is room.
2. The engine tells the host it binds, a wildcard as a rule; the host of its URL stands for that. Of a host that is
   none it does not tell whether it binds (``"bind": true``, 0.5.22 on) or connects: if somebody listens there, it does.
3. An engine that says that it publishes nothing is the user's to start otherwise: `UsageError` says how. One that
   cannot be reached, or is too old to tell, is taken at the caller's word.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import httpx
from prefixroute_streams.engine_http import TIMEOUT_S, fetch_json
from prefixroute_streams.source import DEFAULT_ENDPOINT, EventSource
from prefixroute_zmq.address import host_of, is_bound, sources_of_ranks

from prefixroute.errors import UsageError

from .decode import ENGINE

_PATHS: Final = ("/server_info", "/get_server_info")
_MAX_RANKS: Final = 1024

HOW_TO_PUBLISH: Final = (
    'start it with --kv-events-config \'{"publisher":"zmq","endpoint":"tcp://*:5557",'
    '"replay_endpoint":"tcp://*:5558"}\''
)
"""What to add to the command of an engine that publishes no events."""


class Published(NamedTuple):
    """What an engine says of its sockets: a source a rank, in rank order, and the tokens of a page.

    `events` is empty when the events stay inside the process. `load` is empty without ``--load-publish-endpoint``.
    `publisher` is the engine's word for who publishes; "" when it publishes nothing, or cannot say where because
    its endpoint is not tcp.
    """

    publisher: str
    events: list[EventSource]
    load: list[EventSource]
    block_size: int = 0


async def describe(
    base_url: str, *, timeout_s: float = TIMEOUT_S, client: httpx.AsyncClient | None = None
) -> Published | None:
    """Return what the engine at `base_url` publishes; None when it cannot be reached or does not know the question."""
    host = host_of(base_url)
    for path in _PATHS:
        told = await fetch_json(base_url.rstrip("/") + path, timeout_s, client)
        if isinstance(told, dict) and "kv_events" in told:
            return _published(told["kv_events"], host)
    return None


async def discover(
    base_url: str,
    *,
    endpoint: str | None = None,
    replay_endpoint: str | None = None,
    topic: str = "",
    ranks: int = 1,
    bind: bool | None = None,
    timeout_s: float = TIMEOUT_S,
    client: httpx.AsyncClient | None = None,
) -> list[EventSource]:
    """Return the event sources of the engine at `base_url`, one a rank, in rank order.

    `bind` is whether the engine binds its event socket, None to find out.
    What the engine tells wins. When it cannot tell, the other arguments say what rank 0 was configured with, `endpoint`
    being `DEFAULT_ENDPOINT`. Raises `UsageError` when the engine says that it publishes nothing on a socket, unless
    `endpoint` is passed: an endpoint that is not tcp is not told.
    """
    published = await describe(base_url, timeout_s=timeout_s, client=client)
    if published is not None and published.events:
        bind = await is_bound(published.events[0], ENGINE.binding_hosts, timeout_s) if bind is None else bind
        return [source._replace(bind=bind) for source in published.events]
    if published is not None and endpoint is None:
        if published.publisher:
            raise UsageError(
                f"the events of {base_url} stay in its process: its publisher is {published.publisher!r}, not zmq"
            )
        raise UsageError(f"{base_url} publishes no KV-cache events over tcp: {HOW_TO_PUBLISH}")
    sources = sources_of_ranks(endpoint or DEFAULT_ENDPOINT, replay_endpoint, topic, ranks, host_of(base_url))
    return [source._replace(bind=bind) for source in sources]


async def discover_load(
    base_url: str, *, timeout_s: float = TIMEOUT_S, client: httpx.AsyncClient | None = None
) -> list[EventSource]:
    """Return the load sockets of the engine at `base_url`, one a rank; none when it pushes no load or cannot tell."""
    published = await describe(base_url, timeout_s=timeout_s, client=client)
    return published.load if published is not None else []


def _published(told: Any, host: str) -> Published | None:
    """Read the ``kv_events`` block; None when it cannot be used."""
    if told is None:
        return Published("", [], [])
    if not isinstance(told, dict):
        return None
    publisher, ranks = told.get("publisher"), told.get("dp_size", 1)
    at = told.get("endpoint_host")
    if type(ranks) is not int or not 1 <= ranks <= _MAX_RANKS or not isinstance(publisher, str):
        return None
    base, replay, load = (_port(told.get(f"{name}endpoint_port_base"), ranks) for name in ("", "replay_", "load_"))
    if base is None or not isinstance(at, str) or not at:
        return None
    topic, load_topic = (
        value if isinstance(value, str) else "" for value in (told.get("topic"), told.get("load_topic"))
    )
    events = [
        EventSource(
            f"tcp://{_bracketed(at)}:{base + rank}",
            f"tcp://*:{replay + rank}" if replay is not None else None,
            topic,
            rank,
            host,
            discovered=True,
        )
        for rank in range(ranks)
    ]
    loads = (
        []
        if load is None
        else [
            EventSource(f"tcp://*:{load + rank}", None, load_topic, rank, host, discovered=True, bind=True)
            for rank in range(ranks)
        ]
    )
    size = told.get("block_size")
    return Published(publisher, events if publisher == "zmq" else [], loads, size if type(size) is int else 0)


def _port(value: object, ranks: int) -> int | None:
    """The port of rank 0, if it is one and all ranks have one."""
    return value if type(value) is int and 0 < value <= 65536 - ranks else None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
