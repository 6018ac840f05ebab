"""Read an engine's load and capacity from its metrics page.

Rules:
1. Nothing raises for what an engine answers or fails to answer: an unreachable engine is None, a line that cannot be
   read is skipped, a value that is not there is 0, which means not known.
2. The engine's gauges lag: two prompts in prefill can still read as idle (0.32.0). They correct what a node counts
   itself; they do not replace it.
3. `kv_used` is what live requests use; cached blocks are free in vLLM's eyes.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import httpx

from prefixroute.load import LoadReport

from .discovery import TIMEOUT_S, fetch

REFUSING_FOR_S: Final = 1.0
"""How long a 503 counts. The engine sends no Retry-After; its queue moves by about a prompt a second (0.32.0)."""

_MAX_PAGE_BYTES: Final = 8 << 20

# Up to 0.11 some metrics had the prefix vllm:gpu_, from 0.12 only the second name is left.
_RUNNING: Final = "vllm:num_requests_running"
_WAITING: Final = "vllm:num_requests_waiting"
_KV_USED: Final = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_CONFIG: Final = "vllm:cache_config_info"
_SLEEP: Final = "vllm:engine_sleep_state"
_WANTED: Final = frozenset({_RUNNING, _WAITING, *_KV_USED, _CONFIG, _SLEEP})

_LINE: Final = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*$")
_LABEL: Final = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPE: Final = re.compile(r"\\(.)")


class Sample(NamedTuple):
    """One line of a Prometheus page."""

    name: str
    labels: dict[str, str]
    value: float


class LoadProbe:
    """Asks one API server for the load of the engines behind it, one a data-parallel rank.

    `block_size` and the number of blocks come from the metrics page as well, so that capacity is that of this very
    process. Pass `client` to share connections; its timeout is overridden by `timeout_s`.
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
        self._url = base_url.rstrip("/") + "/metrics"
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
        page = await fetch(self._url, self._timeout_s, _MAX_PAGE_BYTES, self._client)
        if page is None:
            return None
        reports = load_reports(page.decode("utf-8", "replace"))
        if self._clock() < self._refusing_until:
            reports = {rank: _refusing(report) for rank, report in reports.items()}
        return reports or None

    async def read(self, rank: int = 0) -> LoadReport | None:
        """Return the report of one rank; None when there is none."""
        return (await self.read_all() or {}).get(rank)


def _refusing(report: LoadReport) -> LoadReport:
    return _report(report.running, report.waiting, report.kv_used, report.capacity_tokens, "the engine answered 503")


def _report(running: int, waiting: int, kv_used: float, capacity_tokens: int, refusal: str) -> LoadReport:
    return LoadReport(
        running=running,
        waiting=waiting,
        kv_used=kv_used,
        capacity_tokens=capacity_tokens,
        refusing=bool(refusal),
        reason=refusal,
    )


def load_reports(page: str) -> dict[int, LoadReport]:
    """Return what a vLLM metrics page says about each rank. O(page)."""
    ranks: dict[int, dict[str, float]] = {}
    capacity: dict[int, int] = {}
    asleep: dict[int, str] = {}
    for sample in parse_samples(page):
        rank = _whole(sample.labels.get("engine", "0"))
        if rank is None:
            continue
        if sample.name == _CONFIG:
            capacity[rank] = _capacity_tokens(sample.labels)
        elif sample.name == _SLEEP:
            state = sample.labels.get("sleep_state", "")
            if state != "awake" and sample.value > 0:
                asleep[rank] = f"asleep ({state})"
        else:
            ranks.setdefault(rank, {})[sample.name] = sample.value
    return {
        rank: _report(
            _as_count(values.get(_RUNNING, 0.0)),
            _as_count(values.get(_WAITING, 0.0)),
            min(1.0, next((values[name] for name in _KV_USED if name in values), 0.0)),
            capacity.get(rank, 0),
            asleep.get(rank, ""),
        )
        for rank, values in ranks.items()
    }


def parse_samples(page: str) -> Iterator[Sample]:
    """Yield the samples of a Prometheus page that matter here: finite and not negative."""
    for line in page.splitlines():
        match = _LINE.match(line)
        if match is None or match[1] not in _WANTED:
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


def _capacity_tokens(labels: dict[str, str]) -> int:
    # One block is the null block, which holds nothing.
    blocks, size = _whole(labels.get("num_gpu_blocks", "")), _whole(labels.get("block_size", ""))
    return max(0, blocks - 1) * size if blocks and size else 0


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else None


def _as_count(value: float) -> int:
    return min(int(value), 1 << 32)
