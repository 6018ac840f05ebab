"""The settings of gossip: pace, budgets, bounds and replay protection. One frozen object, checked when made."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UsageError, expect_plain
from ..keys.names import checked_zone


@dataclass(frozen=True, slots=True)
class GossipSettings:
    """Pace, budgets and bounds of gossip; times in seconds, sizes in bytes. Raises `UsageError` for what cannot be.

    | field | meaning |
    |---|---|
    | `interval_s`, `fan_out` | length of a round, and the exchanges that a node begins in it |
    | `idle_interval_s` | a quiet fleet slows down to one exchange in so long; 0 switches that off |
    | `publish_share` | a change is published when it is this share of the set, |
    | `publish_within_s` | or else so long after the last publication |
    | `suspect_after_s` | an endpoint that is unheard for longer than its rhythm, at least so long, is no candidate |
    | `forget_after_s` | an endpoint that is unheard for so long is forgotten |
    | `contact` | where this node takes datagrams, as its transport writes an address ("host:port" with UDP) |
    | `learn_peers` | whether nodes that others speak of become peers, at the contact that they give |
    | `zone` | label of this node's zone; others learn it with the first snapshot of an endpoint (`zones`) |
    | `datagram_bytes` | budget of one datagram: 1,200 pass any network path; over streams take 65,536 |
    | `burst_bytes` | budget of all datagrams of an answer: 65,536; over streams take 1,048,576 |
    | `excess` | so many times what an honest node sends is taken from one (`limits`); infinite is no limit |
    | `peer_work` | share of a processor that the updates and questions of one peer may take |
    | `max_endpoints`, `max_owner_endpoints`, `max_hearsay` | endpoints: all; of one node; of nodes that are no peers |
    | `max_keys`, `max_owner_keys`, `max_all_keys` | keys: of one endpoint; of one node; all. Some 120 bytes each |
    | `replay_window` | so many numbers of each peer's datagrams are remembered, to tell a recording from news |

    The bounds `max_*` are of what peers can make a node keep. With `replay_window` 0 recordings are taken, too: for
    transports that see to that themselves.
    """

    interval_s: float = 0.2
    fan_out: int = 3
    idle_interval_s: float = 0.5
    publish_share: float = 0.02
    publish_within_s: float = 0.2
    datagram_bytes: int = 1200
    burst_bytes: int = 65536
    suspect_after_s: float = 2.0
    forget_after_s: float = 60.0
    learn_peers: bool = False
    contact: str = ""
    zone: str = ""
    max_endpoints: int = 4096
    max_owner_endpoints: int = 256
    max_hearsay: int = 256
    max_keys: int = 1 << 20
    max_owner_keys: int = 1 << 22
    max_all_keys: int = 1 << 24
    excess: float = 4.0
    peer_work: float = 0.1
    replay_window: int = 4096

    def __post_init__(self) -> None:
        checked_zone(self.zone)
        expect_plain(self)
        if self.interval_s <= 0 or self.fan_out < 1:
            raise UsageError("gossip needs interval_s > 0 and fan_out >= 1")
        if self.idle_interval_s < 0:
            raise UsageError("gossip needs idle_interval_s >= 0; 0 switches the quiet mode off")
        if not 0 < self.publish_share <= 1 or self.publish_within_s < 0:
            raise UsageError("gossip needs 0 < publish_share <= 1 and publish_within_s >= 0")
        if not 800 <= self.datagram_bytes <= 65536 or self.burst_bytes < self.datagram_bytes:
            raise UsageError("gossip needs 800 <= datagram_bytes <= 65536 and burst_bytes >= datagram_bytes")
        if not self.interval_s < self.suspect_after_s < self.forget_after_s:
            raise UsageError("gossip needs interval_s < suspect_after_s < forget_after_s")
        if len(self.contact.encode()) > 80:
            raise UsageError("a contact has at most 80 bytes")
        if self.learn_peers and not self.contact:
            raise UsageError("learn_peers needs a contact: where others reach this node, as its transport writes it")
        keys = (self.max_keys, self.max_owner_keys, self.max_all_keys)
        if min(self.max_endpoints, self.max_owner_endpoints, *keys) < 1 or self.max_hearsay < 0:
            raise UsageError(
                "gossip needs max_endpoints, max_owner_endpoints and all of max_*keys >= 1, max_hearsay >= 0"
            )
        if not 0 <= self.replay_window <= 1 << 20:
            raise UsageError("gossip needs 0 <= replay_window <= 2**20; 0 takes recordings for news")
        if not self.peer_work > 0:
            raise UsageError("gossip needs peer_work > 0: a share of a processor")
        if not self.excess >= 2:
            raise UsageError("gossip needs excess >= 2: honest nodes must not be dropped; inf is no limit")
