"""What a peer says, made by hand: datagrams and updates for tests of what a node does with them."""

from __future__ import annotations

from typing import Any

import numpy as np
from network import DOMAIN, copies, pair

from prefixroute import Domain, Node
from prefixroute.keys.keyset import Keys, checksum
from prefixroute.keys.rice import encode_sorted
from prefixroute.replication.wire import KEY_LIMIT, Kind, Message, Update, VectorEntry, encode, encode_part


def sent_by(sender: str, kind: Kind, domain: Domain = DOMAIN, **fields: Any) -> bytes:
    """A datagram as `sender` would make it."""
    head = Message(sender, **{name: value for name, value in fields.items() if name not in ("vector", "updates")})
    parts = [[encode_part(part) for part in fields.get(name, [])] for name in ("vector", "updates")]
    return encode(kind, domain.fingerprint, domain.secret, head, *parts)


def array(*values: int) -> Keys:
    return np.array(sorted(values), np.uint64)


def update_of(
    endpoint: str, incarnation: int, since: int, version: int, *keys: int, lower: int = 0, upper: int = 0, **other: Any
) -> Update:
    """A snapshot or delta that adds `keys`, with their checksum unless `other` says otherwise."""
    added = encode_sorted(array(*keys) - np.uint64(lower), (upper or KEY_LIMIT) - lower)
    fields = {"checksum": checksum(array(*keys)), "anchor_stride": 1, "added": added, "removed": b""}
    return Update(endpoint, incarnation, since, version, lower=lower, upper=upper, **(fields | other))


def told(node: Node, kind: type) -> list[Any]:
    return [event for event in node.events() if isinstance(event, kind)]


def holder_of(*keys: int) -> Node:
    """A node that holds version 2 of "a/0" and has heard of version 3."""
    _, b = pair()
    vector = [VectorEntry("a/0", 1, 1, 3)]
    b.receive_datagram(sent_by("a", Kind.ACK, vector=vector, updates=[update_of("a/0", 1, 0, 2, *keys)]), "at a", 0.0)
    assert copies(b)["a/0"].held == (1, 2)
    return b
