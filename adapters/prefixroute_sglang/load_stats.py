"""SGLang's word on its load, in the three forms it has: pushed LoadStat messages, ``/v1/loads``, the metrics page.

Rules:
1. A LoadStat is an array to which fields are only ever appended: the first six are needed, more are ignored. Any
   bytes give a `LoadStat` or `DecodeError`.
2. `kv_used` is what live requests use; cached tokens that can be evicted are free.
3. The prefill rate is measured: differences of the engine's two totals, over enough tokens that the fixed cost of a
   step does not hide it.
4. What a page or an answer does not say is 0, which means not known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec

from prefixroute.errors import DecodeError
from prefixroute.load import LoadReport

MIN_RATE_TOKENS: Final = 1024
"""Uncached tokens between two readings of the totals that give a rate."""

MOST_TOKENS_PER_S: Final = 1e9
"""A rate above this is no rate: totals that a hostile or broken engine made up. A rack prefills some 1e6."""

_MOST: Final = 1 << 62
_STABLE: Final = 6  # the tag, and the five fields that every version has
_plain: Final = msgspec.msgpack.Decoder().decode


class LoadStat(NamedTuple):
    """One rank's load, counted by its scheduler; token counts are KV slots, `busy_us` is microseconds of prefill."""

    running: int = 0
    waiting: int = 0
    used_tokens: int = 0
    capacity_tokens: int = 0
    rank: int = 0
    waiting_uncached_tokens: int = 0
    used_and_queued_tokens: int = 0
    max_running: int = 0
    prefilled_tokens: int = 0
    busy_us: int = 0


def decode_load(payload: bytes) -> LoadStat:
    """Decode the payload frame of one message of the load socket.

    Raises `DecodeError` of kind ``malformed``, ``shape`` or ``value``. O(bytes).
    """
    try:
        stat = _plain(payload)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, TypeError) as error:
        raise DecodeError("malformed", str(error)) from error
    if type(stat) is not list or len(stat) < _STABLE or stat[0] != "LoadStat":
        raise DecodeError("shape", "a load is an array of LoadStat, running, waiting, used, capacity, rank and more")
    values = [0 if value is None else value for value in stat[1 : len(LoadStat._fields) + 1]]
    if not all(type(value) is int and 0 <= value <= _MOST for value in values):
        raise DecodeError("value", "what a load counts is an int from 0")
    return LoadStat(*values)


class PrefillRate:
    """Tokens a second of prefill, from an engine's running totals of uncached tokens and of time."""

    __slots__ = ("_busy_us", "_rate", "_tokens")

    def __init__(self) -> None:
        self._tokens = 0
        self._busy_us = 0
        self._rate = 0.0

    def note(self, tokens: int, busy_us: int) -> float:
        """Take the totals and return the rate: that of the newest difference of enough tokens, 0 before the first.

        The first one begins at the engine's start. Totals that fall are those of a new life.
        """
        if tokens < self._tokens or busy_us < self._busy_us:
            self._tokens, self._busy_us, self._rate = 0, 0, 0.0
        done, took_us = tokens - self._tokens, busy_us - self._busy_us
        if done >= MIN_RATE_TOKENS and took_us > 0:
            rate = done / took_us * 1e6
            self._rate = rate if rate <= MOST_TOKENS_PER_S else 0.0
            self._tokens, self._busy_us = tokens, busy_us
        return self._rate


class Reporter:
    """Turns the loads of an engine's ranks into reports; remembers each rank's prefill rate."""

    def __init__(self) -> None:
        self._rates: dict[int, PrefillRate] = {}

    def report(self, stat: LoadStat) -> LoadReport:
        """Return the report of one rank's load."""
        rate = self._rates.setdefault(stat.rank, PrefillRate())
        used, capacity = stat.used_tokens, stat.capacity_tokens
        return LoadReport(
            running=stat.running,
            waiting=stat.waiting,
            queued_tokens=stat.waiting_uncached_tokens,
            prefill_tokens_per_s=rate.note(stat.prefilled_tokens, stat.busy_us),
            kv_used=min(1.0, used / capacity) if capacity else 0.0,
            capacity_tokens=capacity,
        )


_LOADS_FIELDS: Final = {
    "running": "num_running_reqs",
    "waiting": "num_waiting_reqs",
    "used_tokens": "num_used_tokens",
    "capacity_tokens": "max_total_num_tokens",
    "rank": "dp_rank",
    "waiting_uncached_tokens": "num_waiting_uncached_tokens",
    "max_running": "max_running_requests",
    "prefilled_tokens": "total_prefill_uncached_tokens",
    "busy_us": "total_prefill_busy_us",
}


def stats_of_loads(answer: Any) -> Iterator[LoadStat]:
    """Yield the load of each rank that an answer of ``GET /v1/loads`` tells; nothing for any other answer."""
    loads = answer.get("loads") if isinstance(answer, dict) else None
    for load in loads if isinstance(loads, list) else ():
        if isinstance(load, dict) and _LOADS_FIELDS["running"] in load:
            yield LoadStat(**{name: _count(load.get(field)) for name, field in _LOADS_FIELDS.items()})


def _count(value: object) -> int:
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:  # type: ignore[arg-type, operator]
        return 0
    return min(int(value), _MOST)  # type: ignore[call-overload, no-any-return]
