"""What a node knows of the others: its peers, and its copy of every endpoint.

Rules:
1. A copy's pair (incarnation, version) orders its sets, its pair (incarnation, heartbeat) orders its owner's words.
2. `heard_at` is the moment of the owner's own last word, however many relays it came through.
"""

from __future__ import annotations

from collections.abc import Hashable

from .load import Advert, LoadReport
from .replica import OwnedSet, WriterSet
from .transfer import Assembly


class Peer:
    """Another node that this one talks to."""

    __slots__ = ("address", "heard_at", "node", "probes", "rtt_s", "same_domain", "state")

    def __init__(self, node: str, address: Hashable, now: float) -> None:
        self.node = node
        self.address = address
        self.heard_at = now
        self.same_domain = False
        self.state = "new"
        self.rtt_s: float | None = None
        self.probes: dict[int, float] = {}


class Copy:
    """One endpoint as this node knows it: its own (`mine`), or the replica of a peer's."""

    __slots__ = (
        "advert",
        "assembly",
        "endpoint",
        "heard_at",
        "heartbeat",
        "incarnation",
        "keys",
        "mine",
        "suspected",
        "url",
    )

    def __init__(self, endpoint: str, mine: bool, incarnation: int, now: float, url: str = "") -> None:
        self.endpoint = endpoint
        self.mine = mine
        self.incarnation = incarnation
        self.keys: WriterSet = OwnedSet() if mine else WriterSet()
        self.heartbeat = 0
        self.heard_at = now
        self.advert = Advert(LoadReport())
        self.url = url
        self.assembly: Assembly | None = None
        self.suspected = False

    @property
    def held(self) -> tuple[int, int]:
        """(incarnation, version); version 0 while nothing was received."""
        return (self.incarnation, self.keys.version)

    @property
    def beat(self) -> tuple[int, int]:
        """(incarnation, heartbeat): orders the owner's words."""
        return (self.incarnation, self.heartbeat)

    def age_s(self, now: float) -> float:
        """Seconds since the owner's own last word; 0 for one's own."""
        return 0.0 if self.mine else max(0.0, now - self.heard_at)
