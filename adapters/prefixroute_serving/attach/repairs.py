"""Repairs: requests that make the engine report the blocks they reuse, until a residency with holes is whole again.

After a gap that no replay has filled, blocks known before are doubtful, and blocks stored during the gap are unknown.
Some engines report both on request, prompt by prompt. Rules:
1. Only a partial residency is repaired, by one request in `PAUSE_S` seconds at most, as a report costs an event.
2. While reports bring nothing new the pause doubles, up to `LONGEST_PAUSE_S` seconds: if no prompt ever asks for the
   unknown blocks, the residency stays partial for ever. A new gap resets the pause.
3. A request that names its own session is never changed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import msgspec
import prefixroute_vllm as vllm

from prefixroute import Residency

Headers: TypeAlias = Sequence[tuple[str, str]]

SESSION_HEADER = "x-session-id"
"""The request header with which a client names a session to vLLM."""

PAUSE_S = 1.0
LONGEST_PAUSE_S = 64.0


@dataclass(slots=True)
class _Repair:
    gaps: int
    confirmed: int
    pause_s: float = PAUSE_S
    next_at: float = float("-inf")


class Repairs:
    """The repairs of a node's endpoints; `asked` counts the requests that asked for a report."""

    def __init__(self) -> None:
        self.asked = 0
        self._under_way: dict[str, _Repair] = {}

    def due(self, endpoint: str, residency: Residency, now: float) -> bool:
        """Return whether the request that goes to `endpoint` now is to ask for a report. O(1)."""
        if not residency.partial:
            self._under_way.pop(endpoint, None)
            return False
        counts = residency.counts
        repair = self._under_way.get(endpoint)
        if repair is None or repair.gaps != counts.gaps:
            repair = self._under_way[endpoint] = _Repair(counts.gaps, counts.confirmed)
        elif now < repair.next_at:
            return False
        else:
            futile = repair.confirmed == counts.confirmed
            repair.pause_s = min(2 * repair.pause_s, LONGEST_PAUSE_S) if futile else PAUSE_S
            repair.confirmed = counts.confirmed
        repair.next_at = now + repair.pause_s
        self.asked += 1
        return True


# --- how an engine is asked --------------------------------------------------------------------------------


class Reports(NamedTuple):
    """How an engine is asked for a report: whether it `can` report, and the new body of a request that asks (`ask`)."""

    can: Callable[..., Awaitable[bool]]
    ask: Callable[[Headers, bytes, int], bytes | None]


def asking_for_report(headers: Headers, body: bytes, number: int) -> bytes | None:
    """Return a body that makes vLLM report the blocks it reuses; None for a request with a session of its own."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    asked = fields.get("vllm_xargs")
    try:
        xargs = msgspec.json.decode(asked, type=dict[str, msgspec.Raw]) if asked and bytes(asked) != b"null" else {}
    except msgspec.ValidationError:
        return None  # the engine will answer what is wrong with the body
    if "session_id" in fields or "session_id" in xargs or SESSION_HEADER in {name for name, _ in headers}:
        return None
    session = f"{vllm.REPORT_SESSION}-{number}"
    xargs["kv_cache_report_mode"] = msgspec.Raw(b'"full"')
    return msgspec.json.encode({**fields, "session_id": session, "vllm_xargs": xargs})


VLLM_REPORTS = Reports(vllm.reports_on_request, asking_for_report)
"""How vLLM is asked, from 0.30 on. SGLang cannot be asked."""
