"""What each tenant had of this node: requests, forwards, tokens, expected waits. Counted only for who is named.

Rules:
1. A request without a tenant costs nothing here.
2. The first `MAX_TENANTS` tenants have a row each, later ones share the row `OTHER`: a row that went away would make
   its counters run backwards.
3. The node where a request arrived counts it once: request, prompt, predicted and cached tokens. The node that computes
   counts the prefill; so does the origin of a forward, under another name.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from .fairness import MAX_TENANTS, OTHER
from .routing.decision import Decision, Outcome


class TenantStats(NamedTuple):
    """One tenant's counters at one node. Tokens are of the prompts.

    `requests` came here from clients, `received` from peers, or were routed as if they had, and `forwards` of the
    former were sent to peers; `declined` came from peers and was handed back. `predicted_tokens` and `cached_tokens`
    are of the answers to `requests` that told their cached tokens. `prefill_local_tokens` were computed here for
    `requests`, `prefill_received_tokens` here for peers, `prefill_forwarded_tokens` at peers for `requests`: as told,
    or else as predicted. `expected_wait_s` is the sum of the waits that decisions expected at their targets.
    """

    tenant: str
    requests: int = 0
    received: int = 0
    forwards: int = 0
    declined: int = 0
    prompt_tokens: int = 0
    predicted_tokens: int = 0
    cached_tokens: int = 0
    prefill_local_tokens: int = 0
    prefill_received_tokens: int = 0
    prefill_forwarded_tokens: int = 0
    expected_wait_s: float = 0.0


class _Row:
    __slots__ = TenantStats._fields

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        for name, value in TenantStats._field_defaults.items():
            setattr(self, name, value)

    tenant: str
    requests: int
    received: int
    forwards: int
    declined: int
    prompt_tokens: int
    predicted_tokens: int
    cached_tokens: int
    prefill_local_tokens: int
    prefill_received_tokens: int
    prefill_forwarded_tokens: int
    expected_wait_s: float


class Tallies:
    """The counters of one node. O(1) a call; what is open is bounded by the decisions in flight."""

    __slots__ = ("_rows", "open")

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}
        self.open: dict[int, tuple[_Row, bool]] = {}
        """By decision: whose it is, and whether a peer sent it. To be read only."""

    def decided(self, tenant: str, decision: Decision, forwarded: bool) -> None:
        """Count a decision for a tenant."""
        rows = self._rows
        row = rows.get(tenant)
        if row is None:
            name = tenant if len(rows) < MAX_TENANTS else OTHER
            row = rows.setdefault(name, _Row(name))
        if decision.declined:
            row.declined += 1
            return
        if forwarded:
            row.received += 1
        else:
            row.requests += 1
            row.prompt_tokens += decision.prompt_tokens
            row.forwards += not decision.local
        target = decision.target
        row.expected_wait_s += next((c.wait_s for c in decision.candidates if c.endpoint == target), 0.0)
        self.open[decision.id] = (row, forwarded)

    def served(self, decision: Decision, local: bool, matched_tokens: int, outcome: Outcome) -> None:
        """Count an answer; `local` says whether it came from an endpoint of this node's own."""
        found = self.open.pop(decision.id, None)
        if found is None:
            return
        row, forwarded = found
        cached = outcome.cached_tokens
        prefill = max(0, decision.prompt_tokens - (matched_tokens if cached is None else cached))
        if not forwarded and cached is not None:
            row.predicted_tokens += matched_tokens
            row.cached_tokens += cached
        if not local:
            row.prefill_forwarded_tokens += prefill
        elif forwarded:
            row.prefill_received_tokens += prefill
        else:
            row.prefill_local_tokens += prefill

    def forget(self, flights: Container[int]) -> None:
        """Forget decisions that are not in flight any more. O(open)."""
        for ticket in [ticket for ticket in self.open if ticket not in flights]:
            del self.open[ticket]

    def stats(self) -> tuple[TenantStats, ...]:
        """Return a row for each tenant, in the order in which they came. O(tenants)."""
        return tuple(TenantStats(*(getattr(row, name) for name in TenantStats._fields)) for row in self._rows.values())
