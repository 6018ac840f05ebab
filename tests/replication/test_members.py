"""Membership: who is learnt, suspected by rhythm, replaced, refused; who leaves; and what a quiet fleet costs."""

from __future__ import annotations

import random

import numpy as np
import pytest
from network import DOMAIN, Faults, Network, copies, fleet, gossip, only, pair

from prefixroute import Node, NodeSettings, PeerChanged, ReplicaChanged, UsageError
from prefixroute.keys.keyset import NO_KEYS
from prefixroute.replication.copies import Rhythm
from prefixroute.replication.wire import LAST_BEAT, Kind, Message, VectorEntry, decode, encode, encode_part


def told(net: Network, name: str, state: str) -> list[str]:
    """The endpoints whose replica came to `state` at a node."""
    return [e.endpoint for e in net.told[name] if isinstance(e, ReplicaChanged) and e.state == state]


def peers_told(net: Network, name: str, state: str) -> list[str]:
    """The peers that came to `state` at a node."""
    return [e.peer for e in net.told[name] if isinstance(e, PeerChanged) and e.state == state]


def tell(node: Node, sender: str, *entries: VectorEntry, now: float, contact: str = "") -> None:
    """Let a node hear entries."""
    head = Message(sender, contact=contact)
    data = encode(Kind.ACK, DOMAIN.fingerprint, DOMAIN.secret, head, [encode_part(entry) for entry in entries])
    node.receive_datagram(data, sender, now)


# --- leaving -----------------------------------------------------------------------------------------------


def test_a_node_that_leaves_is_gone_at_once_and_is_not_brought_back_by_hearsay() -> None:
    net = fleet(5, faults=Faults(late=0.05, late_s=20.0))
    net.leave("n0")
    net.run(0.1)
    for name in net.nodes:
        assert "n0/0" not in copies(net.nodes[name])
        assert told(net, name, "forgotten") == ["n0/0"]
    net.run(90)
    for name, node in net.nodes.items():
        assert told(net, name, "learnt").count("n0/0") == 1
        assert "n0/0" not in node.digests()
        assert gossip(node).members.left == {}
    net.check_all()


def test_who_misses_the_farewell_hears_of_it_from_others() -> None:
    net = fleet(5)
    net.block([("n0", name) for name in ("n2", "n3", "n4")])
    net.leave("n0")
    net.run(2)
    assert [name for name, node in net.nodes.items() if "n0/0" in copies(node)] == []
    reasons = [e.reason for e in net.told["n4"] if isinstance(e, ReplicaChanged) and e.state == "forgotten"]
    assert reasons == ["left"]


@pytest.mark.parametrize("incarnation", [50, 100, 101])
@pytest.mark.parametrize("away_s", [1, 100])
def test_a_node_that_left_can_come_back_whatever_its_incarnation(incarnation: int, away_s: int) -> None:
    net = fleet(4, incarnation=100)
    net.leave("n0")
    net.run(away_s)
    net.add("n0", incarnation=incarnation)
    net.engines["n0/0"].store(9, net.now)
    assert net.settle(5) < 2.5
    assert {node.digests()["n0/0"].incarnation for node in net.nodes.values()} == {101}
    assert len(copies(net.nodes["n3"])["n0/0"].keys) == 9


def test_one_endpoint_of_a_node_can_be_removed_and_added_again() -> None:
    net = fleet(3)
    node = net.nodes["n0"]
    second = net.add_endpoint("n0", "1", incarnation=7)
    net.run(2)
    assert second in copies(net.nodes["n2"])
    with pytest.raises(UsageError, match="no endpoint of this node"):
        node.remove_endpoint("n1/0", net.now)
    net.remove_endpoint("n0", second)
    assert second not in node.digests()
    assert [row.endpoint for row in node.stats(net.now).endpoints if row.local] == ["n0/0"]
    net.run(2)
    assert [name for name, n in net.nodes.items() if second in copies(n)] == []
    assert "n0/0" in copies(net.nodes["n2"])
    assert net.add_endpoint("n0", "1", incarnation=7) == second
    net.run(2)
    assert copies(net.nodes["n2"])[second].incarnation == 8
    net.check_all()


def test_a_removed_endpoint_gets_no_work() -> None:
    net = fleet(2)
    node = net.nodes["n0"]
    tokens = net.engines["n0/0"].chains[0][0]
    assert node.route(tokens, net.now).target == "n0/0"
    net.remove_endpoint("n0", "n0/0")
    assert node.route(tokens, net.now).target == "n1/0"


def test_a_last_word_of_an_unknown_endpoint_is_no_news() -> None:
    a, _ = pair()
    tell(a, "b", VectorEntry("x/0", 5, LAST_BEAT), now=1.0)
    assert set(copies(a)) == {"a/0"}
    assert gossip(a).members.left == {}
    tell(a, "b", VectorEntry("b/0", 5, 3), now=1.0)
    tell(a, "b", VectorEntry("b/0", 4, LAST_BEAT), now=1.0)
    assert set(copies(a)) == {"a/0", "b/0"}
    tell(a, "b", VectorEntry("b/0", 5, LAST_BEAT), now=1.0)
    assert set(copies(a)) == {"a/0"}
    tell(a, "b", VectorEntry("b/0", 5, LAST_BEAT - 1), now=1.0)
    assert set(copies(a)) == {"a/0"}
    tell(a, "b", VectorEntry("b/0", 6, 1), now=1.0)
    assert set(copies(a)) == {"a/0", "b/0"}


# --- learnt peers ------------------------------------------------------------------------------------------


def learning(name: str, **more: float) -> NodeSettings:
    """Settings of a node that learns peers and is reached by its name."""
    return NodeSettings(learn_peers=True, contact=name, **more)  # type: ignore[arg-type]


def chain_of(n: int, **more: float) -> Network:
    """Nodes of which each was told of the one before only."""
    net = Network(3)
    for i in range(n):
        name = f"n{i}"
        net.add(name, settings=learning(name, **more), peers=[f"n{i - 1}"] if i else [])
        if i:
            gossip(net.nodes[f"n{i - 1}"]).peers.pop(name)
    return net


def test_nodes_learn_each_other_from_one_seed() -> None:
    net = chain_of(6)
    for engine in net.engines.values():
        engine.store(20, net.now)
    net.settle(10)
    net.run(3)
    for name, node in net.nodes.items():
        assert set(node.stats(net.now).peers) == set(net.nodes) - {name}
        assert all(row.rtt_s > 0 for row in node.stats(net.now).endpoints if not row.local)


def test_a_gateway_without_endpoints_is_learnt_by_those_it_talks_to() -> None:
    net = chain_of(3)
    net.add("gate", endpoints=0, settings=learning("gate"), peers=["n0"])
    del gossip(net.nodes["n0"]).peers["gate"]
    net.engines["n2/0"].store(20, net.now)
    net.settle(10)
    net.run(3)
    assert set(net.nodes["gate"].digests()) == {"n0/0", "n1/0", "n2/0"}
    assert all("gate" in node.stats(net.now).peers for name, node in net.nodes.items() if name != "gate")
    net.stop("gate")
    net.run(200)
    assert all("gate" not in node.stats(net.now).peers for node in net.nodes.values())
    assert peers_told(net, "n1", "forgotten") == ["gate"]


def test_a_node_that_does_not_learn_refuses_strangers() -> None:
    a, _ = pair()
    tell(a, "x", now=1.0, contact="x")
    assert a.counters["rejected_stranger"] == 1
    assert set(a.stats(1.0).peers) == {"b"}


def test_a_peer_that_the_caller_removed_is_not_learnt_again() -> None:
    net = chain_of(3)
    net.run(3)
    net.nodes["n0"].remove_peer("n2", net.now)
    net.run(5)
    assert set(net.nodes["n0"].stats(net.now).peers) == {"n1"}
    assert "n2/0" not in net.nodes["n0"].digests()


def test_a_learnt_peer_is_forgotten_with_its_endpoints_and_a_given_one_is_kept() -> None:
    net = chain_of(3)
    net.run(3)
    net.nodes["n0"].add_peer("n1", "n1", net.now)
    net.stop("n1")
    net.stop("n2")
    net.run(200)
    assert net.nodes["n0"].stats(net.now).peers == {"n1": "suspected"}


def test_learning_needs_a_contact() -> None:
    with pytest.raises(UsageError, match="learn_peers needs a contact"):
        NodeSettings(learn_peers=True)
    with pytest.raises(UsageError, match="at most 80 bytes"):
        NodeSettings(contact="é" * 41)


# --- bounds ------------------------------------------------------------------------------------------------


def test_what_peers_can_make_a_node_keep_is_bounded() -> None:
    node = Node("a", DOMAIN, rng=random.Random(1), now=0.0, settings=learning("a", max_endpoints=10, replay_window=0))
    node.add_endpoint("0", incarnation=1, now=0.0)
    for i in range(50):
        tell(node, f"p{i}", VectorEntry(f"x{i}/0", 1, 1), now=0.0, contact=f"p{i}")
    assert len(node.digests()) == 10
    assert len(node.stats(0.0).peers) == 10
    assert node.counters["endpoints_refused"] == 1
    assert node.counters["rejected_stranger"] == 40


@pytest.mark.parametrize("same_name", [True, False])
def test_fifty_replacements_leave_memory_and_traffic_flat(same_name: bool) -> None:
    net = Network(5)
    for i in range(4):
        net.add(f"n{i}", settings=learning(f"n{i}"))
    figures: list[tuple[float, int]] = []
    name = "r"
    for i in range(50):
        if i:
            net.stop(name)
        name = "r" if same_name else f"r{i}"
        net.add(name, incarnation=i + 1, settings=learning(name), peers=["n0", "n1", "n2", "n3"])
        if not same_name:
            for other in ("n0", "n1", "n2", "n3"):
                # Nobody takes the dead out by hand: they were learnt.
                gossip(net.nodes[other]).peers[name].learnt = True
        net.engines[f"{name}/0"].store(50, net.now)
        net.settle(5)
        net.run(20)
        if i in (9, 49):
            before = sum(net.sent_bytes.values())
            net.run(80)
            kept = [len(gossip(node).peers) + len(copies(node)) for node in net.nodes.values()]
            figures.append(((sum(net.sent_bytes.values()) - before) / 80, max(kept)))
    (early_bytes, early_kept), (late_bytes, late_kept) = figures
    # Four peers and five endpoints at most; the oracle of the network bounds the arrays that a node keeps.
    assert early_kept == late_kept == 4 + 5
    assert late_bytes < 1.1 * early_bytes


def test_many_dead_addresses_cost_next_to_nothing() -> None:
    net = fleet(4)
    net.run(5)
    before = sum(net.sent_bytes.values())
    net.run(20)
    usual = sum(net.sent_bytes.values()) - before
    for node in net.nodes.values():
        for i in range(50):
            node.add_peer(f"dead{i}", f"dead{i}", net.now)
    net.run(200)
    before = sum(net.sent_bytes.values())
    net.run(20)
    assert sum(net.sent_bytes.values()) - before < 1.5 * usual


# --- rhythm ------------------------------------------------------------------------------------------------


def test_patience_follows_the_rhythm_within_its_bounds() -> None:
    rhythm = Rhythm()
    assert rhythm.patience_s(2.0, 30.0) == 2.0
    for _ in range(50):
        rhythm.note(1.5)
    assert rhythm.patience_s(2.0, 30.0) == pytest.approx(3.0, rel=0.01)
    for silence in (1.0, 2.0) * 25:
        rhythm.note(silence)
    assert 5.0 < rhythm.patience_s(2.0, 30.0) < 9.0
    for _ in range(50):
        rhythm.note(50.0)
    assert rhythm.patience_s(2.0, 30.0) == 30.0


@pytest.mark.parametrize("loss", [0.0, 0.3])
def test_a_fleet_that_falls_quiet_suspects_nobody_and_finds_a_death_soon(loss: float) -> None:
    net = fleet(8, faults=Faults(loss=loss))
    suspected = 0
    for step in range(120):
        if step < 30:
            net.engines["n3/0"].store(5, net.now)
        net.run(0.5)
        suspected += sum(copy.suspected for node in net.nodes.values() for copy in copies(node).values())
    # Of 120 looks at 56 copies.
    assert suspected <= (0 if loss == 0 else 20)
    assert sum(node.counters["pauses"] for node in net.nodes.values()) == 0
    net.stop("n0")
    net.run(15 if loss else 8)
    assert all(copies(node)["n0/0"].suspected for node in net.nodes.values())


def test_a_quiet_fleet_is_awake_at_once_when_something_happens() -> None:
    net = fleet(4)
    net.run(30)
    rounds = net.nodes["n0"].counters["rounds"]
    net.run(5)
    assert net.nodes["n0"].counters["rounds"] - rounds <= 11
    net.engines["n0/0"].store(30, net.now)
    assert net.settle(5) < 0.7
    rounds = net.nodes["n3"].counters["rounds"]
    net.run(1.0)
    assert net.nodes["n3"].counters["rounds"] - rounds >= 4


# --- two sets under one pair -------------------------------------------------------------------------------


def test_two_lives_under_one_pair_are_told_apart_without_a_change() -> None:
    net = fleet(3, incarnation=100)
    net.run(2)
    net.stop("n0")
    node = net.add("n0", incarnation=100, peers=[])
    net.engines["n0/0"].store(20, net.now)
    net.run(1)
    # The same pair as its former life left it at, another set, and heartbeats ahead of those that are remembered.
    copy = copies(node)["n0/0"]
    assert copy.held == copies(net.nodes["n1"])["n0/0"].held
    copy.heartbeat = 10**6
    for name in ("n1", "n2"):
        node.add_peer(name, name, net.now)
    assert net.settle(5) < 3.0
    # Either the owner sees the mark first and moves past it, or the others do and drop what they held.
    assert told(net, "n0", "refuted") or told(net, "n1", "discarded")


def test_a_damaged_replica_is_noticed_without_a_change() -> None:
    net = fleet(3)
    copy = copies(net.nodes["n1"])["n0/0"]
    net.nodes["n1"]._table.index.update("n0/0", (), copy.keys.keys.tolist())
    copy.keys.replace(copy.keys.version, NO_KEYS)
    net.overlook("n1", "n0/0")
    assert net.settle(5) < 3.0
    # Either its owner sees the other mark first and moves past it, or it sees its owner's and asks anew; or both, where
    # their words cross.
    assert net.nodes["n1"].counters["checksum_mismatches"] <= 1 and net.nodes["n0"].counters["refutations"] <= 1
    assert net.nodes["n1"].counters["checksum_mismatches"] or net.nodes["n0"].counters["refutations"]
    assert np.array_equal(copy.keys.keys, copies(net.nodes["n0"])["n0/0"].keys.keys)


def test_the_load_travels_only_when_it_is_news() -> None:
    a, b = pair()
    for now in (0.0, 0.5, 1.0, 1.5):
        a.handle_timer(now)
        syn = only(a, now)
        b.receive_datagram(syn, "at a", now)
        answer = only(b, now)
        a.receive_datagram(answer, "at b", now)
        for datagram in a.datagrams_to_send(now):
            b.receive_datagram(datagram.data, "at a", now)
        b.handle_timer(now)
        loads = [e.load for e in decode(only(b, now), DOMAIN.secret).message.vector if e.endpoint == "a/0"]
        assert loads == [None]
    assert copies(b)["a/0"].loaded == copies(a)["a/0"].loaded
