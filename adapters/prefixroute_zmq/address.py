"""The addresses of an engine's sockets as a consumer uses them, and who binds them.

Rules:
1. The engine binds its event socket when its configuration says so, or when the endpoint contains one of the
   engine's `binding_hosts` or starts with ``ipc://`` or ``inproc://``; else it connects, and the consumer has to
   bind. Both sides connecting is silence.
2. Replay sockets are always bound by the engine.
3. Every data-parallel rank has its own sockets: tcp ports are base + rank, unless the engine says otherwise.
"""

from __future__ import annotations

import asyncio
import re
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from prefixroute_streams import EventSource

from prefixroute.errors import UsageError

_ANY_HOST: Final = {"*", "[::]", "0.0.0.0"}
_PORT: Final = re.compile(r"^tcp://(?P<host>.+):(?P<port>\d{1,5})$")


class Address(NamedTuple):
    """A ZeroMQ address as the consumer uses it, and whether it binds or connects."""

    address: str
    bind: bool


def live_address(
    endpoint: str, host: str = "127.0.0.1", binding_hosts: tuple[str, ...] = ("*", "::"), bind: bool | None = None
) -> Address:
    """Return the consumer's end of the engine's event endpoint."""
    if bind is None:
        bind = endpoint.startswith(("ipc://", "inproc://")) or any(text in endpoint for text in binding_hosts)
    return Address(_reachable(endpoint, host), bind=False) if bind else Address(endpoint, bind=True)


def replay_address(endpoint: str, host: str = "127.0.0.1") -> Address:
    """Return the consumer's end of an endpoint that the engine always binds."""
    return Address(_reachable(endpoint, host), bind=False)


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


def sources_of_ranks(
    endpoint: str, replay_endpoint: str | None, topic: str, ranks: int, host: str
) -> list[EventSource]:
    """Return the sources of an engine that cannot tell them, from what rank 0 was configured with."""
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


def host_of(base_url: str) -> str:
    """Return the host of an engine's URL. Raises `UsageError` when there is none."""
    try:
        host = urlsplit(base_url).hostname
    except ValueError:
        host = None
    if not host:
        raise UsageError(f"pass a base_url such as http://127.0.0.1:8000, not {base_url!r}")
    return host


async def is_bound(source: EventSource, binding_hosts: tuple[str, ...], timeout_s: float) -> bool | None:
    """Whether the engine binds an endpoint from which that cannot be told; None for what the endpoint implies.

    An engine that lets the system choose a port tells the address that came out (vLLM's ``tcp://*:0``), and SGLang
    does not tell its ``"bind": true``. Such an endpoint looks like one that the engine connects to; if somebody listens
    there, it is bound. Ask before a consumer binds the address itself. Takes up to `timeout_s` seconds.
    """
    address = live_address(source.endpoint, source.host, binding_hosts)
    if not address.bind or not address.address.startswith("tcp://"):
        return None
    host, _, port = address.address.removeprefix("tcp://").rpartition(":")
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), int(port)), timeout_s)
    except (OSError, ValueError, asyncio.TimeoutError):
        return None
    writer.close()
    return True


def _reachable(endpoint: str, host: str) -> str:
    match = _PORT.match(endpoint)
    if match is None or match["host"] not in _ANY_HOST:
        return endpoint
    _check_port(endpoint, int(match["port"]))
    return f"tcp://{f'[{host}]' if ':' in host else host}:{match['port']}"


def _check_port(endpoint: str, port: int) -> None:
    if port == 0:
        raise UsageError(f"{endpoint} has a port chosen by the system: ask the engine for it with discover()")
