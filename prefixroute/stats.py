"""What a node tells its operators: its view of everything at one moment, and its counters by tenant.

| `Node.stats` returns | one row for each | read off |
|---|---|---|
| `EndpointStats` | endpoint | its standing, and the owner's side of one of this node's own |
| `RoundTrip` | peer | gossip |
| `TenantStats` | tenant | `Tallies`, which count decisions and answers as they come |

Rules:
1. Rows are plain data: nothing of the node hangs on them, and they do not change.
2. No more than `MAX_TENANTS` tenants are counted apart; the rest share one row.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, NamedTuple, TypeAlias

from .endpoint.local import LocalEndpoint
from .events import Differs
from .fairness import MAX_TENANTS, OTHER
from .keys.keyset import Keys
from .routing.decision import Decision, Outcome
from .routing.standing import Standing
from .routing.trust import Accuracy


class EndpointStats(NamedTuple):
    """One endpoint as a node knows it. Times are in seconds; `age_s` is since the owner's last word.

    `blocks` are those that peers are told of, at stride 1; of a hybrid model the ends of hits and their marks.
    `confidence` (0 to 1), `rtt_s` and `wait_s` are what a decision would count. `usable` says whether it can be chosen.
    `residency` says what a local endpoint's blocks are known from: ``exact`` or ``partial`` events, or none
    (``silent``: routing history stands in); "" of a peer. `inflated` counts the times that more blocks were live than
    its engine has. `accuracy` compares what this node predicted of it with the cached tokens of its answers.
    `zone` is its owner's label, "" while it is not known. `differs` says where a local engine stores prompts as other
    tokens than this node hashes, None while it does not.

    `queue` counts the requests that this node sent there and that have no first token; `prefill_tokens_per_s` is what
    a decision would count. The rest is by the endpoint's freshest report, 0 where it does not tell: requests `running`
    and `waiting`, `queued_tokens` to prefill, `kv_used`, the share of its KV cache in use (0 to 1), `capacity_tokens`.
    `home` and `demand` are its owner's: the share of what enters there that is asked for there only, and the share of
    the time that this alone would keep it busy (docs/routing.md, What stays where it entered).
    """

    endpoint: str
    local: bool
    url: str
    incarnation: int
    version: int
    blocks: int
    age_s: float
    confidence: float
    rtt_s: float
    wait_s: float
    push_back: str
    usable: bool
    residency: str = ""
    inflated: int = 0
    accuracy: Accuracy = Accuracy()
    zone: str = ""
    differs: Differs | None = None
    queue: int = 0
    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    kv_used: float = 0.0
    prefill_tokens_per_s: float = 0.0
    capacity_tokens: int = 0
    home: float = 0.0
    demand: float = 0.0


class RoundTrip(NamedTuple):
    """A peer, its zone as its endpoints tell it, and the round trip to it in seconds; None while it is not measured.

    A peer without endpoints, a gateway, has no zone: nothing is forwarded to it.
    """

    peer: str
    zone: str
    rtt_s: float | None


class TenantStats(NamedTuple):
    """One tenant's counters at one node. Tokens are those of prompts.

    `requests` came here from clients, and `forwards` of them were sent to peers; `received` came from peers, or were
    routed as if they had. `declined` came from peers too, and were handed back. `predicted_tokens` and `cached_tokens`
    add up the answers to `requests` that told their cached tokens. `prefill_local_tokens` were computed here for
    `requests`, `prefill_received_tokens` here for peers, `prefill_forwarded_tokens` at peers for `requests`: by the
    answer's cached tokens, or by what was predicted where it tells none. `expected_wait_s` is the sum of the waits, in
    seconds, that decisions expected at their targets.
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


class NodeStats(NamedTuple):
    """A node's view at one moment.

    `peers` are states by node; `index_keys` counts distinct keys, `in_flight` attempts without an outcome. `zone` is
    the node's own label, `round_trips` are those to its peers, `tenants` those that `Node.route` was told.
    """

    node: str
    endpoints: tuple[EndpointStats, ...]
    peers: dict[str, str]
    index_keys: int
    in_flight: int
    counters: dict[str, int]
    zone: str = ""
    round_trips: tuple[RoundTrip, ...] = ()
    tenants: tuple[TenantStats, ...] = ()


class Digest(NamedTuple):
    """What a node holds of one endpoint's published set, for inspection: the wire keys at (incarnation, version).

    Version 0 is nothing yet. `every` is the anchor stride: 1 when each block is published. `keys` are sorted; they are
    the node's own array, so do not change them.
    """

    incarnation: int
    version: int
    every: int
    keys: Keys


def row_of(standing: Standing, local: LocalEndpoint | None, usable: bool, now: float) -> EndpointStats:
    """Return an endpoint's row; `local` if it is this node's own."""
    copy, report = standing.copy, standing.report
    return EndpointStats(
        standing.name,
        copy.mine,
        copy.url,
        copy.incarnation,
        copy.keys.version,
        len(copy.keys) if local is None else local.residency.published().n_keys,
        copy.age_s(now),
        standing.confidence,
        standing.rtt_s,
        standing.wait_s(now),
        standing.state.name.lower(),
        usable,
        "" if local is None else local.state,
        0 if local is None else local.residency.counts.inflated,
        standing.accuracy,
        standing.zone,
        None if local is None else local.tokens.found,
        len(standing.ledger),
        report.running,
        report.waiting,
        report.queued_tokens,
        report.kv_used,
        standing.rate,
        report.capacity_tokens,
        standing.home,
        standing.demand,
    )


_Row: TypeAlias = dict[str, Any]
"""A tenant's counters while they are counted: fields of `TenantStats`."""


class Tallies:
    """The tenants' counters of one node. O(1) a call; what is open is bounded by the decisions in flight."""

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}
        self.open: dict[int, tuple[_Row, bool]] = {}
        """Decisions without an answer: whose each is, and whether a peer sent it. To be read only."""

    def decided(self, tenant: str, decision: Decision, forwarded: bool) -> None:
        """Count a decision for a tenant."""
        rows = self._rows
        row = rows.get(tenant)
        if row is None:
            row = rows.setdefault(tenant if len(rows) < MAX_TENANTS else OTHER, dict(TenantStats._field_defaults))
        if decision.declined:
            row["declined"] += 1
            return
        if forwarded:
            row["received"] += 1
        else:
            row["requests"] += 1
            row["prompt_tokens"] += decision.prompt_tokens
            row["forwards"] += not decision.local
        weighed = decision.candidate(decision.target)
        row["expected_wait_s"] += weighed.wait_s if weighed is not None else 0.0
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
            row["predicted_tokens"] += matched_tokens
            row["cached_tokens"] += cached
        here = "prefill_received_tokens" if forwarded else "prefill_local_tokens"
        row[here if local else "prefill_forwarded_tokens"] += prefill

    def forget(self, flights: Container[int]) -> None:
        """Forget decisions that are not in flight any more. O(open)."""
        for ticket in [ticket for ticket in self.open if ticket not in flights]:
            del self.open[ticket]

    def stats(self) -> tuple[TenantStats, ...]:
        """Return a row for each tenant, in the order in which they came. O(tenants)."""
        return tuple(TenantStats(tenant, **row) for tenant, row in self._rows.items())
