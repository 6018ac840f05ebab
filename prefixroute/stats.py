"""A node's view of everything it knows, for operators: plain rows, read off at one moment."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import NamedTuple

from .endpoint.local import LocalEndpoint
from .fairness import MAX_TENANTS, OTHER
from .keys.keyset import Keys
from .keys.names import owner_of
from .replication.copies import Copy, Peer
from .routing.decision import Decision, Outcome
from .routing.standing import Standing
from .routing.trust import Accuracy


class EndpointStats(NamedTuple):
    """One endpoint as a node knows it, for operators. `age_s` is since the owner's last word.

    `residency` says what a local endpoint's blocks are known from: ``exact`` or ``partial`` events, or none
    (``silent``: routing history stands in); "" of a peer. `inflated` counts the times that more blocks were live than
    its engine has. `blocks` are those that peers are told of, at stride 1: of a hybrid model the ends of hits and their
    marks (`ends`). `accuracy` compares what this node predicted of it with the cached tokens of its answers.
    `zone` is its owner's label, "" while it is not known.
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


class RoundTrip(NamedTuple):
    """A peer, its zone as its endpoints tell it, and the round trip to it as gossip measured it; None while it did not.

    A peer without endpoints, a gateway, has no zone: nothing is forwarded to it.
    """

    peer: str
    zone: str
    rtt_s: float | None


class NodeStats(NamedTuple):
    """A node's view at one moment.

    `zone` is its own label, `round_trips` are those to its peers, `tenants` those that `Node.route` was told.
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
    """What a node holds of one endpoint's published set: the wire keys at (incarnation, version), for inspection.

    Version 0 is nothing yet. `every` is the anchor stride: 1 when each block is published. Leave `keys` as they are.
    """

    incarnation: int
    version: int
    every: int
    keys: Keys


def row_of(standing: Standing, local: LocalEndpoint | None, usable: bool, now: float) -> EndpointStats:
    """Return an endpoint's row; `local` if it is this node's own."""
    copy = standing.copy
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
    )


def round_trips(peers: Iterable[Peer], copies: Iterable[Copy]) -> tuple[RoundTrip, ...]:
    """Return the way to each peer. O(peers + endpoints)."""
    zones = {owner_of(copy.endpoint): copy.zone for copy in copies if copy.zone}
    return tuple(RoundTrip(peer.node, zones.get(peer.node, ""), peer.rtt_s) for peer in peers)


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
        weighed = decision.candidate(decision.target)
        row.expected_wait_s += weighed.wait_s if weighed is not None else 0.0
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
