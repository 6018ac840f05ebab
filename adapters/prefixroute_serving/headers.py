"""The headers that sidecars add to requests and replies, in one table, and how their values are written and read.

Rules:
1. A client cannot set the headers of the first five rows: what it sends under these names is dropped before a request
   is passed on. A request that carries `HOP_HEADER` is taken for a peer's forward; its tenant and tokens count only
   with their proofs.
2. A value that cannot be read counts as absent: the peer may run another version.

| header | on | says |
|---|---|---|
| `x-prefixroute-hop` | forward | it came from a peer: it is served here or handed back, never forwarded again |
| `x-prefixroute-budget-ms` | forward | how long this node may take, in milliseconds, before it has to decline |
| `x-prefixroute-tenant` | forward | the caller's tenant, with a proof (`callers`) |
| `x-prefixroute-tokens` | forward | where the prompt's tokens begin behind the body, with a proof (`carried_tokens`) |
| `x-prefixroute-tokens` | reply to a forward | "read": this node reads tokens that are carried along |
| `x-prefixroute-target` | reply | the endpoint that served |
| `x-prefixroute-reason`, `-matched` | reply | why it was chosen, and the prompt tokens it was expected to hold |
| `x-prefixroute-load` | reply to a forward | the endpoint's load, a JSON object |
| `x-prefixroute-declined` | 503 to a forward | the prompt tokens that the declining node holds |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Final

import msgspec

from prefixroute import LoadReport

HOP_HEADER: Final = "x-prefixroute-hop"
BUDGET_HEADER: Final = "x-prefixroute-budget-ms"
TENANT_HEADER: Final = "x-prefixroute-tenant"
TOKENS_HEADER: Final = "x-prefixroute-tokens"
TARGET_HEADER: Final = "x-prefixroute-target"
REASON_HEADER: Final = "x-prefixroute-reason"
MATCHED_HEADER: Final = "x-prefixroute-matched"
LOAD_HEADER: Final = "x-prefixroute-load"
DECLINED_HEADER: Final = "x-prefixroute-declined"

_DROPPED: Final = frozenset(
    (
        *("host", "content-length", "connection", "transfer-encoding", "accept-encoding", "keep-alive"),
        *(HOP_HEADER, BUDGET_HEADER, TOKENS_HEADER, TENANT_HEADER),
    )
)
_MAX_LOAD_CHARS: Final = 1024
_MAX_COUNT_CHARS: Final = 15


def sent_on(headers: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return a client's headers as they are sent on; they accept no compression, so that bodies can pass unchanged."""
    kept = [header for header in headers if header[0] not in _DROPPED]
    kept.append(("accept-encoding", "identity"))
    return kept


def printable(text: str) -> str:
    """A text fit for a header: printable ASCII, with ``?`` for everything else."""
    return "".join(char if " " <= char <= "~" else "?" for char in text)


def budget_text(budget_s: float) -> str:
    """The value of `BUDGET_HEADER` for a finite budget in seconds."""
    return f"{1000 * budget_s:.3f}"


def read_budget(text: str | None) -> float:
    """The budget in seconds that a forward carries; infinite when it carries none that can be read."""
    try:
        budget_s = float(text or "inf") / 1000
    except ValueError:
        return inf
    return budget_s if budget_s >= 0 else inf


def load_text(load: LoadReport) -> str:
    """The value of `LOAD_HEADER`."""
    return printable(msgspec.json.encode(load).decode())


def read_load(headers: Mapping[str, str]) -> LoadReport | None:
    """The load that a peer's reply carries; None when it carries none that can be read."""
    text = headers.get(LOAD_HEADER, "")
    if not text or len(text) > _MAX_LOAD_CHARS:
        return None
    try:
        return msgspec.json.decode(text, type=LoadReport)
    except (msgspec.MsgspecError, ValueError):
        return None


def read_held_tokens(headers: Mapping[str, str]) -> int | None:
    """The prompt tokens that a declining peer says it holds; None when that cannot be read."""
    text = headers.get(DECLINED_HEADER, "")
    return int(text) if text.isdecimal() and len(text) <= _MAX_COUNT_CHARS else None
