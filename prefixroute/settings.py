"""The settings of a node: gossip's, push-back's, and what bounds routing. One frozen object, checked when made."""

from __future__ import annotations

from dataclasses import dataclass, field

from .errors import UsageError, expect
from .load import PushBackSettings
from .replication.gossip_settings import GossipSettings
from .routing.zones import Zones


@dataclass(frozen=True, slots=True)
class NodeSettings(GossipSettings):
    """Settings of a node: those of gossip, and these. Raises `UsageError` for what makes no sense.

    `digest_bytes` is what a snapshot of one endpoint's digest may take. While all blocks fit, some 10,000, each is
    published. Of more blocks only every k-th is, and the ends of edges and requests, with the smallest k that fits.

    `outcome_timeout_s` is how long the outcome of an attempt is waited for, in seconds; `max_in_flight` how many
    attempts are followed at once, the oldest is given up for the next.

    `zones`, the rules for forwards between zones, require `zone`.
    """

    push_back: PushBackSettings = field(default_factory=PushBackSettings)
    digest_bytes: int = 49152
    outcome_timeout_s: float = 120.0
    max_in_flight: int = 65536
    zones: Zones = field(default_factory=Zones)

    def __post_init__(self) -> None:
        GossipSettings.__post_init__(self)
        expect(self.push_back, PushBackSettings, "NodeSettings.push_back")
        expect(self.zones, Zones, "NodeSettings.zones")
        if self.outcome_timeout_s <= 0 or self.max_in_flight < 1:
            raise UsageError("a node needs outcome_timeout_s > 0 and max_in_flight >= 1")
        if self.zones and not self.zone:
            raise UsageError("zones need a zone: the label of this node's own, by which its rules are found")
        if self.digest_bytes < 0:
            raise UsageError("a node needs digest_bytes >= 0; 0 publishes as little as anchors allow")
