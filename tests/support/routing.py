"""What the tests of routing share: meshes of idle nodes, pairs of nodes, and engines that hold what they are told.

Engines of a mesh do 1,000 tokens a second, so a token is a millisecond.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from prefixroute import Domain, LoadReport, Node, NodeSettings, PeerChanged, Policy
from prefixroute.testing import Mesh, stored

DOMAIN = Domain("m", "t", secret=b"cluster")
BLOCK = DOMAIN.block_size
IDLE = LoadReport(prefill_tokens_per_s=1000, overhead_s=0.01)
SETTINGS = NodeSettings(datagram_bytes=60_000)


def prompt(seed: int, blocks: int, more: int = 1) -> list[int]:
    """Tokens of `blocks` whole blocks that every caller of this seed shares, then `more`."""
    rng = random.Random(seed)
    return [rng.randrange(50_000) for _ in range(blocks * BLOCK + more)]


def mesh(n: int = 2, *, ranks: int = 1, policy: Policy | None = None, settings: NodeSettings = SETTINGS) -> Mesh:
    """`n` nodes n0, n1, ... of `ranks` idle endpoints each; the policy is that of n0."""
    net = Mesh()
    for i in range(n):
        node = Node(
            f"n{i}", DOMAIN, rng=random.Random(i), now=0.0, settings=settings, policy=policy if i == 0 else None
        )
        for rank in range(ranks):
            endpoint = node.add_endpoint(str(rank), url=f"http://n{i}/{rank}", incarnation=1, now=0.0)
            node.set_load(endpoint, IDLE, 0.0)
        net.add(node)
    net.run(1.0)
    return net


def hold(net: Mesh, endpoint: str, tokens: Sequence[int]) -> None:
    net.nodes[endpoint.partition("/")[0]].apply(endpoint, stored(tokens), net.now)


def load(net: Mesh, endpoint: str, report: LoadReport) -> None:
    net.nodes[endpoint.partition("/")[0]].set_load(endpoint, report, net.now)


def queue(seconds: float) -> LoadReport:
    return LoadReport(queued_tokens=round(seconds * 1000), prefill_tokens_per_s=1000, overhead_s=0.01)


def check(net: Mesh) -> None:
    for node in net.nodes.values():
        node._check()


def suspended(node: Node) -> list[str]:
    return [event.peer for event in node.events() if isinstance(event, PeerChanged) and event.state == "suspended"]


BUSY = LoadReport(queued_tokens=5000, prefill_tokens_per_s=1000, overhead_s=0.01)
DRAINING = LoadReport(refusing=True, reason="draining", prefill_tokens_per_s=1000)
LONG = 1000
"""Blocks of a prompt whose prefill takes 16 s: worth any queue here."""


def three_holders() -> tuple[Mesh, Node, list[int]]:
    """n1, n2, n3 hold the prompt, each 16 blocks less than the one before."""
    net = mesh(4)
    tokens = prompt(1, 64)
    for i in (1, 2, 3):
        hold(net, f"n{i}/0", tokens[: (80 - 16 * i) * BLOCK])
    net.run(1.0)
    net.nodes["n0"].events()
    return net, net.nodes["n0"], tokens


def new(name: str = "a", domain: Domain = DOMAIN, **more: Any) -> Node:
    return Node(name, domain, rng=random.Random(name), now=0.0, **{"settings": SETTINGS, **more})


def pair() -> tuple[Mesh, Node, Node]:
    """Two nodes with an endpoint each, acquainted."""
    a, b = new("a"), new("b")
    a.add_endpoint("0", url="http://a", incarnation=1, now=0.0)
    b.add_endpoint("0", url="http://b", incarnation=1, now=0.0)
    net = Mesh(a, b)
    net.run(1.0)
    a.events()
    b.events()
    return net, a, b


def known(node: Node, endpoint: str) -> int | None:
    """How many blocks a node believes an endpoint holds; None if it knows no such endpoint."""
    return next((row.blocks for row in node.stats(0.0).endpoints if row.endpoint == endpoint), None)


def roam(node: Node) -> None:
    """Let the node know that what enters there is asked for elsewhere as well, so that nothing has to stay."""
    for _ in range(50):
        node._table.fleet.entry._tell(0.0)
