"""Ask an engine's HTTP server: one answer, a metrics page, its load.

Rules:
1. Nothing raises for what an engine answers or fails to answer. No usable answer is None, a line that cannot be read is
   skipped, a value that is not there is 0, which means not known.
2. An engine's gauges lag. They correct what a node counts itself; they do not replace it.
"""

from __future__ import annotations

import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from typing import Final, NamedTuple

import httpx
import msgspec

from prefixroute.load import LoadReport

TIMEOUT_S: Final = 2.0

REFUSING_FOR_S: Final = 1.0
"""How long a 503 counts. Neither engine sends Retry-After; vLLM's queue moves by about a prompt a second (0.32.0)."""

REFUSAL: Final = "the engine answered 503"

_MAX_JSON_BYTES: Final = 1 << 20
_MAX_PAGE_BYTES: Final = 8 << 20

_NAME: Final = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*")
_LINE: Final = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*$")
_LABEL: Final = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPE: Final = re.compile(r"\\(.)")


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


class Sample(NamedTuple):
    """One line of a Prometheus page."""

    name: str
    labels: dict[str, str]
    value: float


class HttpProbe(ABC):
    """Asks one API server for the load of the engines behind it, one a data-parallel rank.

    Pass `client` to share connections; its timeout is overridden by `timeout_s`. A subclass says what to ask.
    """

    def __init__(
        self,
        base_url: str,
        *,
        timeout_s: float = TIMEOUT_S,
        refusing_for_s: float = REFUSING_FOR_S,
        client: httpx.AsyncClient | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._refusing_for_s = refusing_for_s
        self._client = client
        self._clock = clock
        self._refusing_until = -math.inf

    def note_status(self, http_status: int) -> None:
        """Take note of how the engine answered a request: 503 means that it refuses, anything below 500 that not."""
        if http_status == httpx.codes.SERVICE_UNAVAILABLE:
            self._refusing_until = self._clock() + self._refusing_for_s
        elif http_status < httpx.codes.INTERNAL_SERVER_ERROR:
            self._refusing_until = -math.inf

    async def read_all(self) -> dict[int, LoadReport] | None:
        """Return a report for each rank; None when the engine cannot be reached or says nothing about load."""
        reports = await self._ask()
        if reports and self._clock() < self._refusing_until:
            return {rank: replace(report, refusing=True, reason=REFUSAL) for rank, report in reports.items()}
        return reports or None

    async def read(self, rank: int = 0) -> LoadReport | None:
        """Return the report of one rank; None when there is none."""
        return (await self.read_all() or {}).get(rank)

    @abstractmethod
    async def _ask(self) -> dict[int, LoadReport]:
        """Return what the engine says, by rank; nothing when it does not tell."""

    async def _metrics(self) -> str:
        """Return the engine's metrics page, "" when there is none."""
        page = await fetch(f"{self._url}/metrics", self._timeout_s, _MAX_PAGE_BYTES, self._client)
        return "" if page is None else page.decode("utf-8", "replace")


def parse_samples(page: str, wanted: Container[str]) -> Iterator[Sample]:
    """Yield the samples of a Prometheus page that matter here: wanted, finite and not negative. O(page)."""
    for line in page.splitlines():
        # Of a thousand lines a handful matters: their names are looked at before the rest is.
        name = _NAME.match(line)
        if name is None or name[0] not in wanted:
            continue
        match = _LINE.match(line)
        if match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if math.isfinite(value) and value >= 0:
            labels = {name: _ESCAPE.sub(_unescape, text) for name, text in _LABEL.findall(match[2] or "")}
            yield Sample(match[1], labels, value)


def _unescape(match: re.Match[str]) -> str:
    return {"n": "\n"}.get(match[1], match[1])


def whole(text: str) -> int | None:
    """Return a label's text as a number from 0; None when it is none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else None


def as_count(value: float) -> int:
    """Return a gauge as a count that a `LoadReport` takes."""
    return min(int(value), 1 << 32)
