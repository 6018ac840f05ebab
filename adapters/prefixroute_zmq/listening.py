"""Whether an engine binds the event socket that it tells, where its endpoint does not say so.

An engine that lets the system choose a port tells the address that came out (vLLM's ``tcp://*:0``), and SGLang tells
no ``"bind": true``. Such an endpoint looks like one that it connects to; if somebody listens there, it is bound.
"""

from __future__ import annotations

import asyncio

from .address import EventSource, live_address


async def is_bound(source: EventSource, binding_hosts: tuple[str, ...], timeout_s: float) -> bool | None:
    """Whether the engine binds an endpoint from which that cannot be told; None for what the endpoint implies.

    Ask before a consumer binds the address itself.
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
