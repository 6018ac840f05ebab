"""A node's view of everything it knows, for operators: plain rows, read off at one moment."""

from __future__ import annotations

from typing import NamedTuple

from .accuracy import Accuracy
from .codec import Keys
from .endpoint import LocalEndpoint
from .standing import Standing
from .tallies import TenantStats


class EndpointStats(NamedTuple):
    """One endpoint as a node knows it, for operators. `age_s` is since the owner's last word.

    `residency` says what a local endpoint's blocks are known from: ``exact`` or ``partial`` events, or none
    (``silent``: routing history stands in); "" of a peer. `inflated` counts the times that more blocks were live than
    its engine has. `blocks` are those that peers are told of, at stride 1: of a hybrid model the ends of hits and their
    marks (`ends`). `accuracy` compares what this node predicted of it with the cached tokens of its answers.
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


class NodeStats(NamedTuple):
    """A node's view at one moment. `tenants` are those that `Node.route` was told."""

    node: str
    endpoints: tuple[EndpointStats, ...]
    peers: dict[str, str]
    index_keys: int
    in_flight: int
    counters: dict[str, int]
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
    )
