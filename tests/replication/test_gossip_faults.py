"""Gossip where everything breaks: loss, repetition, reordering, partition, pause, crash, restart, corruption.

Every delivery in here is checked by the network itself (tests/support/network.py, rule 2).
"""

from __future__ import annotations

import numpy as np
import pytest
from network import CALM, DOMAIN, ROUGH, Faults, Network, copies, fleet, gossip

from prefixroute import DatagramRejected, Node, NodeSettings, PeerChanged, ReplicaChanged
from prefixroute.replication.wire import Kind, decode


def told(net: Network, name: str, state: str) -> list[ReplicaChanged]:
    """What a node told of replicas that came to `state`."""
    return [event for event in net.told[name] if isinstance(event, ReplicaChanged) and event.state == state]


def forgotten_by(net: Network, endpoint: str) -> list[str]:
    return [name for name, node in net.nodes.items() if endpoint not in copies(node)]


def total(net: Network, counter: str) -> int:
    return sum(node.counters[counter] for node in net.nodes.values())


# --- many schedules ----------------------------------------------------------------------------------------

SHAPES = [
    NodeSettings(datagram_bytes=1200),
    NodeSettings(datagram_bytes=60000),
    NodeSettings(datagram_bytes=1200, burst_bytes=4800),
    NodeSettings(datagram_bytes=900, burst_bytes=900, fan_out=1),
]


def act(net: Network, lives: dict[str, int]) -> None:
    """Let one thing happen: the engines work, or something breaks or is mended."""
    rng = net.rng
    name = rng.choice(list(lives))
    engine = net.engines[f"{name}/0"]
    match rng.choice(["store"] * 4 + ["evict", "evict", "grow", "clear", "restart", "split", "heal", "pause", "wake"]):
        case "store":
            engine.store(rng.randrange(1, 60), net.now)
        case "grow":
            engine.store(1000, net.now)
        case "evict":
            engine.evict(net.now, rng.choice([1.0, 0.5, 0.1]))
        case "clear":
            engine.clear(net.now)
        case "restart":
            net.stop(name)
            lives[name] += rng.choice([-1, 0, 1, 1])
            net.add(name, incarnation=lives[name])
        case "split":
            names = list(lives)
            rng.shuffle(names)
            at = rng.randrange(1, len(names))
            net.split(names[:at], names[at:])
        case "heal":
            net.heal()
        case "pause" if len(net.paused) < len(lives) - 2:
            net.paused.add(name)
        case "wake":
            net.paused.discard(name)
        case _:
            pass
    net.run(rng.choice([0.05, 0.2, 0.5, 1.5, 3.0]))


@pytest.mark.parametrize("seed", range(16))
def test_whatever_breaks_all_replicas_are_their_owners_sets_soon_after_it_ends(seed: int) -> None:
    net = Network(seed, ROUGH, SHAPES[seed % len(SHAPES)])
    lives = {f"n{i}": 100 for i in range(3 + seed % 3)}
    for name in lives:
        net.add(name, incarnation=100)
    for _ in range(25):
        act(net, lives)
        net.check_all()
    net.heal()
    net.paused.clear()
    net.faults = CALM
    for engine in net.engines.values():
        # A life that reuses an incarnation is told apart from the former by its next change at the latest.
        engine.store(1, net.now)
    net.settle(15)
    net.check_all()


# --- sets under loss ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1200, 60000])
def test_a_snapshot_far_larger_than_a_burst_arrives_under_loss_while_its_owner_changes(size: int) -> None:
    net = fleet(3, datagram_bytes=size, burst_bytes=65536, faults=Faults(loss=0.3))
    engine = net.engines["n0/0"]
    engine.store(30000, net.now)
    held: set[str] = set()
    start, version = net.now, copies(net.nodes["n0"])["n0/0"].keys.version
    while len(held) < 2:
        net.run(0.2)
        engine.store(40, net.now)
        engine.chains.append(engine.chains.pop(0))
        held = {name for name in ("n1", "n2") if copies(net.nodes[name])["n0/0"].keys.version > version}
        assert net.now - start < 20
    net.faults = CALM
    net.settle(3)
    net.check_all()


def test_heavy_repetition_and_reordering_cost_time_only() -> None:
    net = fleet(3, faults=Faults(duplicate=0.9, delay_s=(0.0, 1.0), late=0.2, late_s=5.0))
    for _ in range(20):
        for engine in net.engines.values():
            engine.store(20, net.now)
            engine.evict(net.now, 0.5)
        net.run(0.4)
        net.check_all()
    net.faults = CALM
    net.settle(5)
    assert total(net, "updates_duplicate") > 20
    assert total(net, "checksum_mismatches") == 0


@pytest.mark.parametrize("blocks", [50, 2000])
def test_an_emptied_cache_is_seen_empty(blocks: int) -> None:
    net = fleet(3, blocks=blocks)
    net.engines["n0/0"].clear(net.now)
    assert net.settle(5) < 1.0
    assert {len(copies(node)["n0/0"].keys) for node in net.nodes.values()} == {0}
    before = sum(net.sent_bytes.values())
    net.run(5)
    assert sum(net.sent_bytes.values()) - before < 5 * 3 * 4200


def test_a_late_snapshot_made_for_a_stale_vector_is_dropped() -> None:
    """Owner, relay and receiver: the relay's answer comes after the receiver has got further (chitchat #179)."""
    net = fleet(2, replay_window=0)  # the table alone must do
    receiver = net.add("n2", endpoints=0)
    receiver.handle_timer(net.now)
    relay = net.nodes["n1"]
    for datagram in receiver.datagrams_to_send(net.now):
        if datagram.address == "n1":
            relay.receive_datagram(datagram.data, "n2", net.now)
    late = [datagram.data for datagram in relay.datagrams_to_send(net.now) if datagram.address == "n2"]
    snapshots = [update for data in late for update in decode(data, DOMAIN.secret).message.updates]
    assert ("n0/0", 0, 2) in {(update.endpoint, update.since, update.version) for update in snapshots}
    for _ in range(3):
        net.engines["n0/0"].store(5, net.now)
        net.settle(2)
    held = copies(receiver)["n0/0"].held
    assert held == (1, 5)
    duplicates = receiver.counters["updates_duplicate"]
    for data in late:
        net.inject("n2", data, "n1")
    assert copies(receiver)["n0/0"].held == held
    assert receiver.counters["updates_duplicate"] > duplicates
    # The same after the owner began anew: what was said of its former life is dropped.
    net.stop("n0")
    net.add("n0", incarnation=2)
    net.settle(2)
    dropped = receiver.counters["updates_drop"]
    for data in late:
        net.inject("n2", data, "n1")
    assert copies(receiver)["n0/0"].held == (2, 1)
    assert receiver.counters["updates_drop"] > dropped


def test_a_corrupted_copy_is_found_by_its_checksum_and_fetched_anew() -> None:
    net = fleet(3)
    node = net.nodes["n1"]
    copy = copies(node)["n0/0"]
    right, version = copy.keys.keys, copy.keys.version
    node._table.index.update("n0/0", [int(right[3]) + 1], [int(right[3])])
    wrong = right.copy()
    wrong[3] += np.uint64(1)
    copy.keys.replace(version, wrong)
    net.overlook("n1", "n0/0")
    net.engines["n0/0"].store(3, net.now)
    assert net.settle(3) < 1.5
    assert node.counters["checksum_mismatches"] == 1
    assert [event.reason for event in told(net, "n1", "discarded")] == ["checksum"]
    assert total(net, "checksum_mismatches") == 1
    net.check_all()


def test_a_removal_of_what_a_copy_lacks_is_a_mismatch_too() -> None:
    net = fleet(2)
    node = net.nodes["n1"]
    copy = copies(node)["n0/0"]
    keys = copy.keys.keys.tolist()
    node._table.index.update("n0/0", (), keys[:1])
    copy.keys.replace(copy.keys.version, copy.keys.keys[1:])
    net.overlook("n1", "n0/0")
    net.engines["n0/0"].evict(net.now, 0.5)
    net.engines["n0/0"].store(2, net.now)
    net.settle(3)
    assert node.counters["checksum_mismatches"] == 1
    net.check_all()


# --- partition ---------------------------------------------------------------------------------------------


def test_a_short_partition_costs_deltas_only() -> None:
    net = fleet(4)
    net.split(["n0", "n1"], ["n2", "n3"])
    for engine in net.engines.values():
        engine.store(10, net.now)
    net.run(20)
    assert copies(net.nodes["n0"])["n2/0"].suspected
    replaced = total(net, "updates_replace")
    net.heal()
    assert net.settle(5) < 1.5
    assert total(net, "updates_replace") == replaced
    assert not any(copy.suspected for node in net.nodes.values() for copy in copies(node).values())


def test_a_partition_longer_than_memory_heals_too() -> None:
    net = fleet(4)
    net.split(["n0", "n1"], ["n2", "n3"])
    net.run(70)
    assert set(copies(net.nodes["n0"])) == {"n0/0", "n1/0"}
    net.heal()
    assert net.settle(5) < 1.5
    net.check_all()


# --- death and return --------------------------------------------------------------------------------------


def test_a_dead_node_is_suspected_and_forgotten_by_all_and_hearsay_does_not_bring_it_back() -> None:
    net = fleet(4, faults=Faults(late=0.05, late_s=30.0))
    net.stop("n0")
    net.run(1.5)
    assert not any(copies(node)["n0/0"].suspected for node in net.nodes.values())
    net.run(1.5)
    assert all(copies(node)["n0/0"].suspected for node in net.nodes.values())
    net.run(55)
    assert forgotten_by(net, "n0/0") == []
    # A newcomer learns it with its age, and forgets it when the others do.
    net.add("new")
    net.run(0.5)
    assert copies(net.nodes["new"])["n0/0"].suspected
    net.run(4)
    assert forgotten_by(net, "n0/0") == list(net.nodes)
    net.run(60)
    assert forgotten_by(net, "n0/0") == list(net.nodes)
    for name in ("n1", "n2", "n3"):
        assert len(told(net, name, "forgotten")) == 1
        assert len([event for event in told(net, name, "learnt") if event.endpoint == "n0/0"]) == 1
        # What it sent before its death and comes late makes it heard once more, no longer than that.
        states = [event.state for event in net.told[name] if isinstance(event, PeerChanged) and event.peer == "n0"]
        assert set(states[::2]) == {"heard"}
        assert set(states[1::2]) == {states[-1]} == {"suspected"}
    net.check_all()


def test_deaths_are_seen_under_loss_and_the_living_are_not_suspected() -> None:
    net = fleet(6, faults=Faults(loss=0.3))
    net.stop("n0")
    for _ in range(20):
        net.run(1)
        for name, node in net.nodes.items():
            assert not [e for e, copy in copies(node).items() if copy.suspected and e != "n0/0"], name
    assert all(copies(node)["n0/0"].suspected for node in net.nodes.values())


@pytest.mark.parametrize(("incarnation", "becomes"), [(99, 101), (100, 101), (101, 101), (500, 500)])
@pytest.mark.parametrize("away_s", [1, 5, 70])
def test_an_owner_that_restarts_is_learnt_again_whatever_its_incarnation(
    incarnation: int, becomes: int, away_s: int
) -> None:
    net = fleet(4, incarnation=100)
    net.run(3)
    net.stop("n0")
    net.run(away_s)
    assert (len(forgotten_by(net, "n0/0")) == 3) is (away_s == 70)
    net.add("n0", incarnation=incarnation)
    net.engines["n0/0"].store(7, net.now)
    assert net.settle(5) < 1.5
    assert copies(net.nodes["n1"])["n0/0"].incarnation == becomes
    assert len(copies(net.nodes["n1"])["n0/0"].keys) == 7
    refuted = [event.endpoint for event in told(net, "n0", "refuted")]
    assert refuted == (["n0/0"] if incarnation < becomes else [])
    net.run(3)
    assert not any(copies(node)["n0/0"].suspected for node in net.nodes.values())
    net.check_all()


def test_a_life_that_reuses_its_incarnation_and_is_ahead_in_versions_is_heard_at_once() -> None:
    net = fleet(3, incarnation=100)
    net.run(30)
    net.stop("n0")
    net.add("n0", incarnation=100, peers=[])
    for _ in range(6):
        net.engines["n0/0"].store(2, net.now)
        net.run(0.3)
    for name in ("n1", "n2"):
        net.nodes["n0"].add_peer(name, name, net.now)
    # It is past the version that the others hold, and 150 heartbeats behind theirs.
    assert copies(net.nodes["n0"])["n0/0"].held > copies(net.nodes["n1"])["n0/0"].held
    net.settle(3)
    net.run(3)
    assert copies(net.nodes["n1"])["n0/0"].incarnation == 101
    assert not any(copies(node)["n0/0"].suspected for node in net.nodes.values())


def test_a_node_that_was_paused_past_forgetting_is_learnt_again_and_has_forgotten_nobody() -> None:
    net = fleet(4)
    net.paused.add("n0")
    net.run(70)
    assert forgotten_by(net, "n0/0") == ["n1", "n2", "n3"]
    net.paused.clear()
    net.run(0.001)
    assert net.nodes["n0"].counters["pauses"] == 1
    assert len(copies(net.nodes["n0"])) == 4
    assert net.settle(5) < 1.5
    assert [told(net, "n0", state) for state in ("forgotten", "discarded")] == [[], []]
    assert not any(copy.suspected for copy in copies(net.nodes["n0"]).values())


def test_nodes_that_were_all_paused_blame_nobody() -> None:
    net = fleet(4)
    net.paused |= set(net.nodes)
    net.run(100)
    net.paused.clear()
    net.run(1)
    for name, node in net.nodes.items():
        assert len(copies(node)) == 4
        assert not any(copy.suspected for copy in copies(node).values())
        assert {event.state for event in net.told[name] if isinstance(event, PeerChanged)} == {"heard"}


def test_a_pause_clears_nobody_who_was_suspected_before_and_bounds_how_long_the_dead_are_kept() -> None:
    net = fleet(3)
    net.stop("n0")
    net.run(5)
    net.paused.add("n1")
    net.run(30)
    net.paused.clear()
    for _ in range(10):
        net.run(0.25)
        assert copies(net.nodes["n1"])["n0/0"].suspected
        assert copies(net.nodes["n1"])["n0/0"].age_s(net.now) > 30
    net.run(60)
    assert forgotten_by(net, "n0/0") == ["n1", "n2"]


def test_a_death_during_ones_own_pause_is_seen_after_it() -> None:
    net = fleet(3)
    net.paused.add("n1")
    net.run(1)
    net.stop("n0")
    net.run(29)
    net.paused.clear()
    net.run(3)
    assert copies(net.nodes["n1"])["n0/0"].suspected
    net.run(60)
    assert forgotten_by(net, "n0/0") == ["n1", "n2"]


def test_timers_that_are_a_little_late_each_time_are_no_pause() -> None:
    net = fleet(3)
    net.stop("n0")
    node = net.nodes["n1"]
    net.paused.add("n1")
    for _ in range(8):
        net.run(1.0)
        node.handle_timer(net.now)
        node.datagrams_to_send(net.now)
    assert copies(node)["n0/0"].suspected
    assert node.counters["pauses"] == 0


def test_two_nodes_of_one_name_are_noticed() -> None:
    net = fleet(3, incarnation=100)
    twin = Node("n0", DOMAIN, rng=net.rng, now=net.now, settings=net.settings)
    twin.add_endpoint("0", incarnation=200, now=net.now)
    twin.add_peer("n1", "n1", net.now)
    for _ in range(3):
        twin.handle_timer(net.now)
        for datagram in twin.datagrams_to_send(net.now):
            if decode(datagram.data, DOMAIN.secret).kind is Kind.SYN:
                net.inject("n1", datagram.data, "elsewhere")
        net.run(0.5)
    # The other one never gets to prove itself: what n1 asks goes to the address that it has of n0.
    assert {copies(node)["n0/0"].incarnation for node in net.nodes.values()} == {100}
    rejected = [event for event in net.told["n0"] if isinstance(event, DatagramRejected)]
    assert {(event.kind, event.source) for event in rejected} == {("namesake", "n1")}
    # Each is counted, and one is told in a minute.
    assert (len(rejected), net.nodes["n0"].counters["rejected_namesake"]) == (1, 3)


def test_forgotten_endpoints_are_remembered_in_bounded_memory() -> None:
    net = fleet(2)
    state = gossip(net.nodes["n0"])
    assert state.members._gone.maxsize == 4096
    state.members.forget("n1/0", "test")
    net.nodes["n0"]._follow(net.now)
    assert set(state.members._gone) == {"n1/0"}
