"""Traces of requests: when they came, how long they were, and how much of them a cache would have held.

| file | read are |
|---|---|
| JSON lines | `input_length` or `input_toks`; `timestamp` in ms or `arrival_time_ns`; `hash_ids`, one a block |
| CSV with a header | `input_length`, `ContextTokens` or `num_prefill_tokens`; `TIMESTAMP` as a date and time |
| a number a line | lengths alone |

Rule: equal block ids mean equal prefixes. Lengths are uncached tokens: those that an unbounded cache would hold are
subtracted.
"""

from __future__ import annotations

import json
import re
from calendar import timegm
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from prefixroute import UsageError

from .lengths import incremental

BLOCK_TOKENS = 512
"""Tokens of one id in `hash_ids`, in the published traces."""

_LENGTHS = ("input_length", "ContextTokens", "num_prefill_tokens", "input_toks")
_TIMES = ("timestamp", "arrival_time_ns", "TIMESTAMP")


class TraceRequest(NamedTuple):
    """One request: seconds since the first request (None in a trace without times), prompt tokens, cached tokens."""

    at: float | None
    tokens: int
    cached_tokens: int

    @property
    def uncached_tokens(self) -> int:
        """Tokens left to prefill."""
        return self.tokens - self.cached_tokens


class _TraceRow(NamedTuple):
    at: float | None
    tokens: int
    blocks: Sequence[Hashable]


def read_trace(path: Path, block_tokens: int = BLOCK_TOKENS) -> list[TraceRequest]:
    """Read a trace, in the order of its file. Raises `UsageError` that names the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not text: a trace is JSON lines, CSV, or a number a line") from None
    header = [name.strip() for name in lines[0].split(",")] if lines else []
    titled = any(name in header for name in _LENGTHS)
    rows: list[_TraceRow] = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or (number == 1 and titled):
            continue
        try:
            rows.append(_row(_fields(line, header if titled else ["input_length"])))
        except (ValueError, TypeError, StopIteration):
            wanted = ", ".join(_LENGTHS)
            raise UsageError(f"{path}:{number}: no request: it takes a number, or one of {wanted}") from None
    if not rows:
        raise UsageError(f"{path}: no request in it")
    first = min((row.at for row in rows if row.at is not None), default=0.0)
    hits = incremental(((row.tokens, row.blocks) for row in rows), block_tokens)
    return [
        TraceRequest(None if row.at is None else row.at - first, tokens, cached)
        for row, (tokens, cached) in zip(rows, hits, strict=True)
    ]


def _fields(line: str, header: Iterable[str]) -> dict[str, Any]:
    if line.lstrip().startswith("{"):
        found: dict[str, Any] = json.loads(line)
        return found
    return dict(zip(header, (part.strip() for part in line.split(",")), strict=False))


def _row(fields: dict[str, Any]) -> _TraceRow:
    tokens = int(float(next(fields[name] for name in _LENGTHS if name in fields)))
    if tokens < 0:
        raise ValueError(tokens)
    name = next((name for name in _TIMES if name in fields), None)
    at = None
    if name == "timestamp":
        at = float(fields[name]) / 1e3
    elif name == "arrival_time_ns":
        at = float(fields[name]) / 1e9
    elif name is not None:
        at = _seconds(str(fields[name]))
    return _TraceRow(at, tokens, tuple(fields.get("hash_ids") or ()))


_DATE = re.compile(r"(\d+)-(\d+)-(\d+)[ T](\d+):(\d+):(\d+)(\.\d+)?Z?")


def _seconds(date: str) -> float:
    """Return a date and time as seconds; only differences matter, so the time zone does not."""
    found = _DATE.fullmatch(date.strip())
    if found is None:
        raise ValueError(date)
    year, month, day, hour, minute, second = (int(part) for part in found.groups()[:6])
    return timegm((year, month, day, hour, minute, second, 0, 0, 0)) + float(found[7] or 0)
