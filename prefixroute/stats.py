"""A node's view of everything it knows, for operators: plain rows, read off at one moment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .endpoint.local import LocalEndpoint
from .keys.rice import Keys
from .replication.copies import Copy, Peer, owner_of
from .routing.accuracy import Accuracy
from .routing.standing import Standing
from .tallies import TenantStats


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
        len(copy.keys) if local is None else local.residency.forest.published,
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
