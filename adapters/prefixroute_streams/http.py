"""Ask an engine's HTTP server.

Rule: nothing raises for what an engine answers or fails to answer; no usable answer is None.
"""

from __future__ import annotations

from typing import Final

import httpx
import msgspec

TIMEOUT_S: Final = 2.0

_MAX_JSON_BYTES: Final = 1 << 20


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


async def fetch_json(url: str, timeout_s: float, client: httpx.AsyncClient | None) -> object:
    """Return the JSON value of a successful GET, or None."""
    body = await fetch(url, timeout_s, _MAX_JSON_BYTES, client)
    try:
        return None if body is None else msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
