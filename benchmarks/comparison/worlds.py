"""Prompts and who holds them, and a node of ours that learnt it by gossip: what decisions are compared on.

Rules:
1. A world is all that anybody compared is told: so all answer the same question.
2. All that our node knows of a peer came in datagrams. Peers are made one after the other: one is asked until its whole
   digest is here, and dropped. So a fleet of 1,024 takes seconds, and the memory of one.
3. Endpoint 0 is the node's own, and endpoint i that of peer i.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from prefixroute import BlocksStored, Domain, EngineBatch, Node, NodeSettings

BLOCK = 16
VOCABULARY = 128_000
OTHER_BLOCKS = 128_000
"""Blocks that nobody asks for, of all endpoints together, and 2,000 of one at most."""

DOMAIN = Domain("bench", "bench", BLOCK)
CASES = ("hit", "half", "miss")

_SETTINGS = NodeSettings(
    datagram_bytes=65000, burst_bytes=65000, digest_bytes=1 << 30, suspect_after_s=1e8, forget_after_s=1e9
)
# A peer need not keep what the asker knows of others: its own endpoint is enough.
_PEER = NodeSettings(
    datagram_bytes=65000,
    burst_bytes=64 << 20,
    digest_bytes=1 << 30,
    suspect_after_s=1e8,
    forget_after_s=1e9,
    max_endpoints=1,
)


class World(NamedTuple):
    """Who holds what, and the prompts to ask for, in three cases.

    *hit*: one endpoint holds the whole prompt and every other one its first eighth; *half*: the same, but the prompt
    forks half way; *miss*: nobody holds its first block. `depths` is the deepest match of each case in blocks.
    """

    endpoints: int
    blocks: int
    held: dict[int, list[list[int]]]
    prompts: dict[str, list[list[int]]]
    depths: dict[str, int]


def tokens_of(blocks: int, rng: random.Random) -> list[int]:
    """So many blocks of random tokens."""
    return [rng.randrange(VOCABULARY) for _ in range(blocks * BLOCK)]


def endpoint_name(number: int) -> str:
    """The endpoint's id by its number."""
    return f"n{number}/0"


def world(endpoints: int, blocks: int, variants: int = 4, others: int | None = None) -> World:
    """Make a world with so many prompts of each case. `others`: blocks of one endpoint that nobody asks for."""
    rng = random.Random(f"{endpoints} {blocks}")
    whole = [tokens_of(blocks, rng) for _ in range(variants)]
    if others is None:
        others = min(2000, OTHER_BLOCKS // endpoints)
    held = {i: [tokens_of(others, rng)] for i in range(endpoints)}
    for prompt in whole:
        for i in range(0, endpoints, 2):
            held[i].append(prompt[: max(blocks // 8, 1) * BLOCK])
        held[1].append(prompt)
    half = [prompt[: blocks // 2 * BLOCK] + tokens_of(blocks - blocks // 2, rng) for prompt in whole]
    miss = [tokens_of(blocks, rng) for _ in range(variants)]
    depths = {"hit": blocks, "half": blocks // 2, "miss": 0}
    return World(endpoints, blocks, held, {"hit": whole, "half": half, "miss": miss}, depths)


def asker(world: World) -> Node:
    """A node that knows the world: one endpoint is its own, those of the peers it learns by gossip."""
    rng = random.Random(1)
    node = Node("n0", DOMAIN, rng=rng, now=0.0, settings=_SETTINGS)
    _fill(node, world.held[0])
    now = 0.0
    for i in range(1, world.endpoints):
        peer = Node(f"n{i}", DOMAIN, rng=rng, now=now, settings=_PEER)
        _fill(peer, world.held[i])
        expected = peer.residency(endpoint_name(i)).canonical_blocks
        node.add_peer(peer.node, peer.node, now)
        peer.add_peer("n0", "n0", now)
        while (known := node.digests().get(endpoint_name(i))) is None or len(known.keys) < expected:
            now += _SETTINGS.interval_s
            _settle(peer, now)
            _talk(node, peer, now)
        _settle(node, now)
    node.events()
    return node


def _fill(node: Node, prompts: Sequence[list[int]]) -> None:
    endpoint = node.add_endpoint("0", url=f"http://{node.node}", incarnation=1, now=0.0)
    for j, tokens in enumerate(prompts):
        handles = tuple(range(10**9 * j, 10**9 * j + len(tokens) // BLOCK))
        if handles:
            node.apply(endpoint, EngineBatch((BlocksStored(handles, None, tokens, BLOCK),)), 0.0)
    _settle(node, 0.0)


def _settle(node: Node, now: float) -> None:
    """Let a node do what is due, and what it has put off."""
    while node.next_timer() <= now:
        node.handle_timer(now)


def _talk(node: Node, peer: Node, now: float) -> None:
    """Carry datagrams between the two until both are silent."""
    while True:
        asked = [d for d in peer.datagrams_to_send(now) if d.address == node.node]
        told = [d for d in node.datagrams_to_send(now) if d.address == peer.node]
        if not asked and not told:
            return
        for datagram in asked:
            node.receive_datagram(datagram.data, peer.node, now)
        for datagram in told:
            peer.receive_datagram(datagram.data, node.node, now)
