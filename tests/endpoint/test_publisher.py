"""The publisher: what is told to others is the residency's anchors, and what the own index is told is every block."""

from __future__ import annotations

import random

import pytest
from network import DOMAIN, Network, copies, fleet

from prefixroute import Node, NodeSettings, UsageError
from prefixroute.endpoint.anchors import snapshot_bytes
from prefixroute.endpoint.publisher import REFIT_S, Publisher
from prefixroute.keys.chain import wire_key
from prefixroute.keys.keyset import Delta
from prefixroute.replication.writer_set import OwnedSet
from prefixroute.residency.mirror import Residency
from prefixroute.routing.index import MergedIndex
from prefixroute.testing import stored

BLOCK = DOMAIN.block_size


def publisher(budget: int = 49152) -> tuple[Publisher, OwnedSet, MergedIndex]:
    """A publisher whose index follows what it is told."""
    keys, index = OwnedSet(), MergedIndex()
    index.join("a/0")
    return Publisher(keys, Residency(DOMAIN), budget, lambda key: index.held(index.bit("a/0"), key)), keys, index


def note(made: tuple[Publisher, OwnedSet, MergedIndex], gained: set[int], lost: set[int]) -> Delta:
    """Let keys come and go, and the index follow."""
    changes = made[0].note(gained, lost)
    made[2].update("a/0", changes.added, changes.removed)
    return changes


def test_two_blocks_of_one_wire_key_are_one_until_both_are_gone() -> None:
    made = publisher()
    a, b, c = 5 << 16, (5 << 16) + 1, (5 << 16) + 2
    assert note(made, {a}, set()) == Delta({5}, set())
    assert note(made, {b, c}, set()) == Delta(set(), set())
    assert note(made, set(), {a}) == Delta(set(), set())
    made[1].publish()
    assert note(made, set(), {b}) == Delta(set(), set())
    assert note(made, {a}, {c}) == Delta(set(), set())
    assert note(made, set(), {a}) == Delta(set(), {5})
    made[1].publish()
    assert made[1].keys.tolist() == []


def test_two_blocks_of_one_wire_key_that_come_together_are_counted() -> None:
    made = publisher()
    assert note(made, {5 << 16, (5 << 16) + 1}, set()) == Delta({5}, set())
    assert note(made, set(), {5 << 16}) == Delta(set(), set())
    assert note(made, set(), {(5 << 16) + 1}) == Delta(set(), {5})


def test_wire_keys_follow_any_history_of_blocks() -> None:
    rng = random.Random(4)
    made = publisher()
    blocks: set[int] = set()
    for _ in range(400):
        lost = set(rng.sample(sorted(blocks), min(len(blocks), rng.randrange(4))))
        gained = {rng.randrange(12) << 16 | rng.randrange(3) for _ in range(rng.randrange(4))} - blocks
        blocks = (blocks - lost) | gained
        note(made, gained, lost)
        if rng.random() < 0.3:
            made[1].publish()
            assert set(made[1].keys.tolist()) == {wire_key(key) for key in blocks}
        assert made[1].pending() == {wire_key(key) for key in blocks}
        made[2]._check({"a/0": {wire_key(key) for key in blocks}})


# --- in a node ---------------------------------------------------------------------------------------------


def conversation(rng: random.Random, turns: int, head: list[int]) -> list[list[int]]:
    """The prompts of a conversation, each the one before and more."""
    prompts, tokens = [], head
    for _ in range(turns):
        tokens = tokens + [rng.randrange(32000) for _ in range(rng.randrange(10, 60) * BLOCK)]
        prompts.append(tokens)
    return prompts


def busy_fleet(digest_bytes: int) -> tuple[Network, list[list[int]]]:
    """Two nodes; the first serves conversations through `route` and `report`, and holds their blocks."""
    rng = random.Random(7)
    net = fleet(2, blocks=1, digest_bytes=digest_bytes)
    node = net.nodes["n0"]
    heads = [[rng.randrange(32000) for _ in range(rng.randrange(20, 120) * BLOCK)] for _ in range(5)]
    prompts = [p for _ in range(12) for p in conversation(rng, rng.randrange(1, 7), rng.choice(heads))]
    for prompt in prompts:
        node.apply("n0/0", stored(prompt), net.now)
        # As after a reply: the end of the prompt is known.
        node._table.locals["n0/0"].served(node.chain(prompt), None, net.now)
    net.settle(5)
    return net, prompts


@pytest.mark.parametrize("digest_bytes", [10**6, 3500, 0])
def test_a_peer_gets_what_the_budget_allows_and_never_believes_too_much(digest_bytes: int) -> None:
    net, prompts = busy_fleet(digest_bytes)
    ours, theirs = net.nodes["n0"], net.nodes["n1"]
    digest = theirs.digests()["n0/0"]
    blocks = ours.residency("n0/0").canonical_blocks
    assert digest.every == {10**6: 1, 3500: 4, 0: 32}[digest_bytes]
    assert digest_bytes == 0 or snapshot_bytes(len(digest.keys)) <= digest_bytes
    assert len(digest.keys) == blocks if digest.every == 1 else len(digest.keys) < blocks / 2
    rng = random.Random(8)
    here, there = ours._table.index.bit("n0/0"), theirs._table.index.bit("n0/0")
    for prompt in prompts:
        # It continues the end of a request: exact. It forks anywhere: at most one stride too low.
        fork = prompt[: rng.randrange(1, len(prompt))] + [rng.randrange(32000) for _ in range(5 * BLOCK)]
        for tokens, slack in ((prompt + [1] * 3 * BLOCK, 0), (fork, digest.every - 1)):
            chain = ours.chain(tokens)
            exact = ours._table.index.depth(chain, here)
            assert exact - slack <= theirs._table.index.depth(chain, there) <= exact
    net.check_all()


def test_the_stride_falls_when_the_cache_empties_and_the_digest_is_exact_again() -> None:
    net, _ = busy_fleet(3500)
    assert net.nodes["n1"].digests()["n0/0"].every == 4
    net.engines["n0/0"].clear(net.now)
    net.engines["n0/0"].store(200, net.now)
    net.run(2 * REFIT_S)
    net.settle(5)
    digest = net.nodes["n1"].digests()["n0/0"]
    assert (digest.every, len(digest.keys)) == (1, 200)
    net.engines["n0/0"].store(100, net.now)
    net.engines["n0/0"].evict(net.now, 0.5)
    net.settle(5)
    net.check_all()


def test_a_change_of_stride_costs_no_more_than_a_snapshot() -> None:
    net, _ = busy_fleet(10**6)
    before = sum(net.sent_bytes.values())
    local = net.nodes["n0"]._table.locals["n0/0"]
    local.publisher._budget_bytes = 3500
    net.run(2 * REFIT_S)
    assert net.nodes["n1"].digests()["n0/0"].every == 4
    quiet = 2 * REFIT_S * 2 * 500
    assert sum(net.sent_bytes.values()) - before < quiet + 1.1 * 3500
    assert copies(net.nodes["n1"])["n0/0"].keys.anchor_stride == 4
    net.check_all()


def test_a_budget_is_not_negative() -> None:
    with pytest.raises(UsageError, match="digest_bytes >= 0"):
        Node("a", DOMAIN, rng=random.Random(1), now=0.0, settings=NodeSettings(digest_bytes=-1))
