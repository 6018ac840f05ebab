"""Meters and holdings: what is let through, what is kept, and that an honest fleet is never near a limit."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from math import inf

import numpy as np
import pytest
from network import DOMAIN, Network, copies, fleet, gossip, pair
from said import sent_by, told, update_of

from prefixroute import DatagramRejected, Node, NodeSettings, UsageError
from prefixroute.keys.keyset import checksum
from prefixroute.keys.rice import encode_sorted
from prefixroute.replication.limits import (
    MAX_SOURCES,
    TOLD_AT_ONCE,
    Bucket,
    Holdings,
    Limits,
    honest_bytes_per_s,
    honest_datagrams_per_s,
)
from prefixroute.replication.wire import KEY_LIMIT, Kind, Update, VectorEntry

SETTINGS = NodeSettings()


def refused(net: Network) -> Counter[str]:
    """What all nodes of a network have refused, by counter."""
    total: Counter[str] = Counter()
    for node in net.nodes.values():
        total.update({k: n for k, n in node.counters.items() if k.startswith(("rejected", "limited", "endpoints_r"))})
    return total


# --- meters ------------------------------------------------------------------------------------------------


def test_a_bucket_lets_most_through_at_once_and_its_rate_in_the_mean() -> None:
    bucket = Bucket(rate=10.0, most=30.0)
    assert [bucket.take(1, 0.0) for _ in range(40)] == [True] * 30 + [False] * 10
    assert sum(bucket.take(1, i / 64) for i in range(1, 641)) == 100
    assert sum(bucket.take(1, 1000.0) for _ in range(100)) == 30
    assert not bucket.take(31, 2000.0)
    assert bucket.take(30, 1500.0)  # a clock that went back neither fills nor breaks it


@pytest.mark.parametrize("times", [1, 3])
def test_what_is_admitted_follows_the_stated_formula(times: int) -> None:
    limits = Limits(SETTINGS)
    if times == 3:
        limits.proved("s")
    size, seconds = 1200, 20
    most = 4 * times * min(honest_datagrams_per_s(SETTINGS), honest_bytes_per_s(SETTINGS) / size)
    passed = sum(limits.admits("s", size, i / 20000) for i in range(20000 * seconds))
    assert passed == pytest.approx(most * (seconds + 1), rel=0.01)


def test_sources_without_a_proof_share_one_meter_and_cost_a_proved_one_nothing() -> None:
    limits = Limits(SETTINGS)
    limits.proved("honest")
    flood = sum(limits.admits(f"spoofed {i}", 100, 0.0) for i in range(20000))
    assert flood == int(4 * honest_datagrams_per_s(SETTINGS))
    assert not limits.admits("another", 100, 0.0)
    assert limits.admits("honest", 1200, 0.0)


def test_the_list_of_sources_is_bounded_and_only_proofs_enter_it() -> None:
    limits = Limits(SETTINGS)
    for i in range(2 * MAX_SOURCES):
        limits.admits(i, 100, float(i))
    assert len(limits._sources) == 0
    for i in range(2 * MAX_SOURCES):
        limits.proved(i)
    assert len(limits._sources) == MAX_SOURCES


def test_without_limits_everything_passes() -> None:
    limits = Limits(NodeSettings(excess=inf))
    assert all(limits.admits("s", 65536, 0.0) for _ in range(10000))
    with pytest.raises(UsageError, match="excess"):
        NodeSettings(excess=1.0)


def test_forged_datagrams_are_told_at_a_bounded_pace_and_all_counted() -> None:
    a, _ = pair()
    for i in range(1000):
        a.receive_datagram(b"PRT2" + bytes(60), f"spoofed {i}", i / 100)
    assert a.counters["rejected_forged"] == 1000
    assert TOLD_AT_ONCE <= len(told(a, DatagramRejected)) <= TOLD_AT_ONCE + 11


# --- holdings ----------------------------------------------------------------------------------------------


def test_holdings_bound_an_owner_and_all() -> None:
    held = Holdings(NodeSettings(max_owner_keys=100, max_all_keys=150))
    assert held.fits("a/0", 100) and not held.fits("a/0", 101)
    held.note("a/0", 60)
    assert held.fits("a/1", 40) and not held.fits("a/1", 41)
    assert held.fits("b/0", 90) and not held.fits("b/0", 91)
    held.note("a/0", 10)
    assert held.total == 10
    held.lost("a/0")
    assert (held.total, held._of_owner, held.endpoints) == (0, {}, {})


def test_an_owner_has_no_more_endpoints_and_keys_than_it_may() -> None:
    node = Node(
        "a",
        DOMAIN,
        rng=random.Random(1),
        now=0.0,
        settings=NodeSettings(max_owner_endpoints=3, max_owner_keys=40, replay_window=0),
    )
    node.add_peer("b", "at b", 0.0)
    vector = [VectorEntry(f"b/{i}", 1, 1, 2) for i in range(9)]
    updates = [update_of(f"b/{i}", 1, 0, 2, *range(16 * i, 16 * i + 16)) for i in range(9)]
    node.receive_datagram(sent_by("b", Kind.ACK, vector=vector, updates=updates), "at b", 0.0)
    assert {name: len(copy.keys) for name, copy in copies(node).items()} == {"b/0": 16, "b/1": 16, "b/2": 0}
    assert (node.counters["endpoints_refused"], node.counters["rejected_too_many_keys"]) == (6, 1)
    gossip(node).members.holdings._check({"b/0": 16, "b/1": 16})
    node.remove_peer("b", 1.0)
    gossip(node).members.holdings._check({})


def test_parts_of_a_transfer_count_and_count_no_more_when_it_ends() -> None:
    _, b = pair()
    held = gossip(b).members.holdings
    part = update_of("a/0", 1, 0, 2, 3, 9, upper=1 << 40)
    b.receive_datagram(sent_by("a", Kind.ACK, vector=[VectorEntry("a/0", 1, 1, 2)], updates=[part]), "at a", 0.0)
    assert held.total == 48  # what a part's arrays take
    b.receive_datagram(sent_by("a", Kind.ACK, updates=[update_of("a/0", 1, 0, 3, 3, 9)]), "at a", 0.1)
    assert held.total == len(copies(b)["a/0"].keys) == 2
    b.receive_datagram(sent_by("a", Kind.ACK, vector=[VectorEntry("a/0", 2, 1)]), "at a", 0.2)
    assert held.total == 0


def test_a_range_denser_than_hashes_can_be_is_refused_before_it_is_decoded() -> None:
    _, b = pair()
    keys = np.arange(200_000, dtype=np.uint64)
    dense = Update("a/0", 1, 0, 2, checksum(keys), 1, 0, 200_000, encode_sorted(keys, 200_000), b"")
    assert len(dense.added) < 65_536
    vector = [VectorEntry("a/0", 1, 1, 2)]
    b.receive_datagram(sent_by("a", Kind.ACK, vector=vector, updates=[dense]), "at a", 0.0)
    assert [event.kind for event in told(b, DatagramRejected)] == ["too_many_keys"]
    assert copies(b)["a/0"].assembly is None


def test_the_densest_set_that_is_allowed_is_taken_in_any_cut() -> None:
    settings = NodeSettings(max_keys=4096, replay_window=0)
    rng = np.random.default_rng(3)
    keys = np.unique(rng.integers(0, KEY_LIMIT, 4096, dtype=np.uint64))
    node = Node("b", DOMAIN, rng=random.Random(1), now=0.0, settings=settings)
    node.add_peer("a", "at a", 0.0)
    node.receive_datagram(sent_by("a", Kind.ACK, vector=[VectorEntry("a/0", 1, 1, 2)]), "at a", 0.0)
    edges = [0, *sorted(rng.integers(0, KEY_LIMIT, 30).tolist()), KEY_LIMIT]
    for lower, upper in pairwise(edges):
        mine = keys[(keys >= lower) & (keys < upper)]
        code = encode_sorted(mine - np.uint64(lower), upper - lower)
        part = Update("a/0", 1, 0, 2, checksum(keys), 1, lower, upper, code, b"")
        node.receive_datagram(sent_by("a", Kind.ACK, updates=[part]), "at a", 0.0)
    assert len(copies(node)["a/0"].keys) == len(keys)


def test_last_words_of_others_are_bounded() -> None:
    node = Node("a", DOMAIN, rng=random.Random(1), now=0.0, settings=NodeSettings(max_endpoints=8, replay_window=0))
    node.add_peer("b", "at b", 0.0)
    node.add_endpoint("0", incarnation=1, now=0.0)
    node.remove_endpoint("a/0", 0.0)
    for i in range(100):
        for beat in (1, 2**63 - 1):
            node.receive_datagram(sent_by("b", Kind.ACK, vector=[VectorEntry(f"x{i}/0", 1, beat)]), "at b", i / 10)
    left = gossip(node).members.left
    assert len(left) == 8
    assert {"a/0", "x99/0"} <= set(left)


# --- honest fleets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "blocks"), [(2, 8000), (12, 1500)])
def test_an_honest_fleet_is_never_limited_not_even_after_a_partition(n: int, blocks: int) -> None:
    net = fleet(n, blocks=blocks)
    names = list(net.nodes)
    net.split(names[: n // 2], names[n // 2 :])
    for engine in net.engines.values():
        engine.clear(net.now)
        engine.store(blocks, net.now)
    net.run(4)
    net.heal()
    net.settle(20)
    assert refused(net) == {}
    for node in net.nodes.values():
        held = {name: len(copy.keys) for name, copy in copies(node).items() if not copy.mine}
        gossip(node).members.holdings._check(held)
