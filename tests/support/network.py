"""The simulator's network as the tests of replication use it: shorthands, and looks into what a node keeps.

The simulator itself checks every delivery (prefixroute/sim/replication/oracle.py); nothing of that is repeated here.
"""

from __future__ import annotations

import random

from prefixroute import Node, NodeSettings
from prefixroute.replication.copies import Copy
from prefixroute.replication.gossip import Gossip
from prefixroute.sim import CALM, DOMAIN, ROUGH, Engine, Link
from prefixroute.sim import Network as SimulatedNetwork

__all__ = ["CALM", "DOMAIN", "ROUGH", "Engine", "Faults", "Network", "copies", "fleet", "gossip", "only", "pair"]

Faults = Link


class Network(SimulatedNetwork):
    """A network whose every path has the same `faults`."""

    def __init__(self, seed: int, faults: Link = CALM, settings: NodeSettings | None = None) -> None:
        super().__init__(seed, faults, settings)

    @property
    def faults(self) -> Link:
        return self.link

    @faults.setter
    def faults(self, faults: Link) -> None:
        self.link = faults

    def overlook(self, name: str, endpoint: str) -> None:
        """Take what a node holds of an endpoint as seen, right or wrong."""
        self.oracle.overlook(name, endpoint, self.nodes[name])

    def settle(self, within_s: float) -> float:
        """Run until all replicas are their owners' sets; return the seconds it took, fail after `within_s`."""
        start = self.now
        # An owner publishes at its next round what its engine did.
        self.run(self.settings.interval_s)
        while True:
            self.run(0.05)
            if not self.lagging():
                return self.now - start
            assert self.now - start < within_s, f"after {within_s} s: {self.lagging()}"


def gossip(node: Node) -> Gossip:
    """The gossip of a node."""
    return node._gossip


def copies(node: Node) -> dict[str, Copy]:
    """What a node holds of every endpoint."""
    return node._members.copies


def fleet(
    n: int, *, seed: int = 1, faults: Link = CALM, blocks: int = 20, incarnation: int = 1, **settings: float
) -> Network:
    """A full mesh of `n` nodes n0, n1, ... that hold `blocks` blocks each and have settled."""
    net = Network(seed, faults, NodeSettings(**settings))  # type: ignore[arg-type]
    for i in range(n):
        net.add(f"n{i}", incarnation=incarnation)
    for engine in net.engines.values():
        engine.store(blocks, net.now)
    net.settle(10)
    return net


def pair() -> tuple[Node, Node]:
    """Two nodes that know of each other and have not spoken; "a" has an endpoint, "b" has none."""
    # What tests make by hand has no life.
    settings = NodeSettings(replay_window=0)
    a, b = (Node(name, DOMAIN, rng=random.Random(1), now=0.0, settings=settings) for name in "ab")
    a.add_endpoint("0", url="http://a", incarnation=1, now=0.0)
    a.add_peer("b", "at b", 0.0)
    b.add_peer("a", "at a", 0.0)
    return a, b


def only(node: Node, now: float) -> bytes:
    """The one datagram that a node has to send."""
    (datagram,) = node.datagrams_to_send(now)
    return datagram.data
