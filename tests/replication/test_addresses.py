"""Addresses: who comes back elsewhere is known within a second, who lies steals none, and a seed introduces."""

from __future__ import annotations

import random
from typing import Any

import pytest
from network import DOMAIN, Faults, Network, copies, gossip

from prefixroute import AddressFailed, Node, NodeSettings, PeerChanged
from prefixroute.replication.wire import Kind, Message, Stamp, decode, encode
from prefixroute.testing import Mesh


def settings(learn: bool, at: str, **more: Any) -> NodeSettings:
    return NodeSettings(learn_peers=learn, contact=at if learn else "", **more)


def fleet_at(n: int, learn: bool, *, seed: int = 1, faults: Faults | None = None, **more: Any) -> Network:
    """Nodes at the addresses of their names. Those that learn know n0 only, and the others from it."""
    net = Network(seed, settings=NodeSettings(**more), **({"faults": faults} if faults else {}))
    for i in range(n):
        peers = ["n0"][:i] if learn else None
        net.add(f"n{i}", settings=settings(learn, f"n{i}", **more), peers=peers, mutual=not learn)
    for engine in net.engines.values():
        engine.store(20, net.now)
    net.settle(10)
    net.run(5)
    return net


def come_back(net: Network, name: str, at: str, learn: bool, ends: str = "stop", **more: Any) -> Node:
    """End a node and start it at another address; nobody is told, and one that learns knows n0 or n1 only."""
    getattr(net, ends)(name)
    net.run(0.3)
    peers = [next(other for other in net.nodes if other != name)] if learn else None
    node = net.add(name, incarnation=2, address=at, settings=settings(learn, at, **more), peers=peers, mutual=False)
    net.engines[f"{name}/0"].store(7, net.now)
    return node


def known(net: Network, name: str) -> bool:
    """Whether every node holds what the node published, and uses it."""
    return not [found for found in (*net.lagging(), *net.unheard()) if name in (found[0], found[1].split("/")[0])]


@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("ends", ["stop", "leave"])
@pytest.mark.parametrize("window", [0, 4096])
@pytest.mark.parametrize("name", ["n0", "n2"])
def test_who_comes_back_elsewhere_is_known_within_a_second(learn: bool, ends: str, window: int, name: str) -> None:
    for seed in range(5):
        net = fleet_at(4, learn, seed=seed, replay_window=window)
        come_back(net, name, "elsewhere", learn, ends, replay_window=window)
        net.run(1.0)
        assert known(net, name), (net.lagging(), net.unheard())
        net.run(3)
        assert {str(gossip(node).peers[name].address) for other, node in net.nodes.items() if other != name} == {
            "elsewhere"
        }


@pytest.mark.parametrize("learn", [False, True])
def test_it_may_move_again_and_come_back_home(learn: bool) -> None:
    net = fleet_at(3, learn)
    for i, at in enumerate(("elsewhere", "third", "n2", "elsewhere")):
        net.stop("n2")
        net.run(0.3)
        net.add(
            *("n2",),
            incarnation=2 + i,
            address=at,
            settings=settings(learn, at),
            peers=["n0"] if learn else None,
            mutual=False,
        )
        net.run(1.0)
        assert known(net, "n2"), at


@pytest.mark.parametrize("learn", [False, True])
def test_two_that_change_places_are_found(learn: bool) -> None:
    net = fleet_at(4, learn)
    for name in ("n2", "n3"):
        net.stop(name)
    for name, at in (("n2", "n3"), ("n3", "n2")):
        peers = ["n0"] if learn else None
        net.add(name, incarnation=2, address=at, settings=settings(learn, at), peers=peers, mutual=False)
    net.run(4)
    assert net.lagging() == net.unheard() == []


def test_a_node_that_moves_without_a_restart_is_found() -> None:
    net = fleet_at(3, False)
    host = net.hosts["n2"]
    del net.addresses["n2"]
    host.address = "elsewhere"
    net.addresses["elsewhere"] = "n2"
    net.run(6)
    assert gossip(net.nodes["n0"]).peers["n2"].address == "elsewhere"
    assert net.unheard() == []


class Liar:
    """Somebody at the address "lair" who knows the secret, speaks as another node and answers what it is asked."""

    def __init__(self, net: Network, name: str, to: str, contact: str = "") -> None:
        self.net, self.name, self.to, self.contact = net, name, to, contact
        self.life, self.sent = 666, 0
        net.addresses["lair"] = "liar"

    def say(self, kind: Kind, **head: Any) -> None:
        self.sent += 1
        stamp = Stamp(self.life, self.sent, gossip(self.net.nodes[self.to]).freshness.life)
        message = Message(self.name, contact=self.contact, **head)
        data = encode(kind, DOMAIN.fingerprint, DOMAIN.secret, message, stamp=stamp)
        node, now = self.net.nodes[self.to], self.net.read(self.to)
        node.receive_datagram(data, "lair", now)
        mine = [one for one in node._outbox._packed if one.address == "lair"]
        node._outbox._packed[:] = [one for one in node._outbox._packed if one.address != "lair"]
        self.net.act(self.to, lambda node, now: None)
        for one in mine:
            asked = decode(one.data, DOMAIN.secret).message
            if asked.nonce and kind is Kind.SYN:
                self.say(Kind.ACK, echo=asked.nonce)

    def lie(self, seconds: float) -> None:
        end = self.net.now + seconds
        while self.net.now < end:
            self.say(Kind.SYN, nonce=7)
            self.net.run(0.1)


@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("contact", ["", "lair"])
@pytest.mark.parametrize("loss", [0.0, 0.3])
def test_a_liar_does_not_steal_a_living_peers_address(learn: bool, contact: str, loss: float) -> None:
    stolen = 0
    for seed in range(5):
        net = fleet_at(3, learn, seed=seed)
        net.faults = Faults(loss=loss)
        Liar(net, "n2", "n0", contact).lie(10)
        net.faults = Faults()
        Liar(net, "n2", "n0", contact).lie(5)
        stolen += gossip(net.nodes["n0"]).peers["n2"].address != "n2"
        assert "n2/0" in copies(net.nodes["n0"]) and net.unheard() == []
    assert stolen == 0


def test_who_was_robbed_while_it_stood_still_gets_its_address_back() -> None:
    net = fleet_at(3, False)
    net.pause("n2", buffers=False)
    net.run(5)
    liar = Liar(net, "n2", "n0")
    liar.lie(2)
    assert gossip(net.nodes["n0"]).peers["n2"].address == "lair"
    net.resume("n2")
    liar.lie(3)
    assert gossip(net.nodes["n0"]).peers["n2"].address == "n2"
    assert net.unheard() == []


def test_a_recording_from_elsewhere_moves_nobody_and_costs_two_small_answers() -> None:
    net = fleet_at(2, False)
    node = net.nodes["n0"]
    data = encode(
        *(Kind.SYN, DOMAIN.fingerprint, DOMAIN.secret, Message("n1", 9, complete=True)), stamp=Stamp(77, 5, 0)
    )
    before, sent = net.sent_datagrams["n0"], net.sent_bytes["n0"]
    net.inject("n0", data, "elsewhere")
    assert net.sent_datagrams["n0"] - before == 2
    assert net.sent_bytes["n0"] - sent <= 2 * 60
    net.run(5)
    assert gossip(node).peers["n1"].address == "n1" and not gossip(node).addresses.claims


# --- seeds -------------------------------------------------------------------------------------------------


def test_a_seed_introduces_whoever_is_there_and_the_fleet_after_it() -> None:
    net = fleet_at(3, True)
    late = net.add("n9", settings=settings(True, "late"), peers=[], address="late")
    net.act("n9", lambda node, now: node.seed("n1", now))
    net.run(2)
    assert net.lagging() == net.unheard() == []
    assert set(gossip(late).peers) == {"n0", "n1", "n2"}
    assert [e.state for e in net.told["n9"] if isinstance(e, PeerChanged) and e.peer == "n1"] == ["learnt", "heard"]


def test_seed_takes_no_time_argument_where_there_is_no_hurry() -> None:
    net = fleet_at(2, True)
    net.add("n9", settings=settings(True, "late"), peers=[], address="late")
    net.nodes["n9"].seed("n0")
    net.run(2)
    assert net.lagging() == net.unheard() == []


def test_whoever_knows_a_node_answers_its_seed_without_learning_peers() -> None:
    net = Network(1)
    net.add("n0", peers=[])
    net.add("n1", peers=[], mutual=False)
    net.nodes["n0"].add_peer("n1", "n1", net.now)
    net.nodes["n1"].seed("n0", net.now)
    net.run(1.5)
    assert net.lagging() == []


def test_a_seed_that_is_the_node_itself_is_dropped_without_a_word() -> None:
    net = fleet_at(2, True)
    net.nodes["n0"].seed("n0", net.now)
    net.run(2)
    assert gossip(net.nodes["n0"]).addresses.seeds == {}
    assert net.nodes["n0"].counters["rejected_self"] == 0


def test_a_seed_where_nobody_answers_is_told_once_and_asked_on() -> None:
    net = Network(1)
    net.add("n0", settings=settings(True, "n0"), peers=[])
    net.nodes["n0"].seed("nowhere", net.now)
    net.run(60)
    assert [e.address for e in net.told["n0"] if isinstance(e, AddressFailed)] == ["nowhere"]
    net.add("n1", settings=settings(True, "nowhere"), peers=[], address="nowhere", mutual=False)
    net.run(2)
    assert net.lagging() == []


def test_another_node_at_a_seed_is_introduced_when_the_first_is_silent() -> None:
    net = Network(1)
    net.add("n0", settings=settings(True, "n0"), peers=[])
    net.add("n1", settings=settings(True, "n1"), peers=[], address="service", mutual=False)
    net.nodes["n0"].seed("service", net.now)
    net.run(2)
    net.stop("n1")
    net.add("n2", settings=settings(True, "n2"), peers=[], address="service", mutual=False)
    net.run(12)
    assert "n2" in gossip(net.nodes["n0"]).peers and "n2/0" in copies(net.nodes["n0"])


def test_a_seed_does_not_bring_back_who_was_removed() -> None:
    net = fleet_at(2, True)
    node = net.nodes["n0"]
    net.act("n0", lambda node, now: node.remove_peer("n1", now))
    node.seed("n1", net.now)
    net.run(5)
    assert "n1" not in gossip(node).peers


# --- silence -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("run_s", "stand_s"), [(0.7, 1.3), (0.3, 4.0), (1.5, 1.1)])
def test_an_observer_that_stalls_suspects_and_forgets_within_its_running_time(run_s: float, stand_s: float) -> None:
    net = fleet_at(3, False)
    net.stall("n0", run_s, stand_s)
    net.run(20)
    assert net.unheard() == [] or all(name != "n0" for name, _ in net.unheard()), "it blames nobody who speaks"
    net.stop("n2")
    share = run_s / (run_s + stand_s)
    net.run(2 * 2.0 / share + 2 * (run_s + stand_s))
    assert copies(net.nodes["n0"])["n2/0"].suspected
    net.run(1.2 * 60.0 / share)
    assert "n2/0" not in copies(net.nodes["n0"])


def test_silence_before_a_pause_counts() -> None:
    net = fleet_at(2, False)
    tempo = gossip(net.nodes["n0"]).tempo
    now = tempo.next_at
    assert tempo.silence_s(now - 3, now) == 3
    assert tempo.wakes(now + 5) and not tempo.wakes(now + 5.1)
    assert tempo.silence_s(now - 3, now + 6) == pytest.approx(4.0)
    assert tempo.silence_s(now + 2, now + 6) == pytest.approx(1.0)


# --- round trips -------------------------------------------------------------------------------------------


def test_what_cannot_be_a_round_trip_changes_none() -> None:
    net = fleet_at(2, False)
    peer = gossip(net.nodes["n0"]).peers["n1"]
    peer.rtt_s = 0.1
    for sample in (0.0, 0.0, 0.0, -5.0, float("nan"), float("inf"), -float("inf"), 1e-9):
        peer.timed(sample)
    assert peer.rtt_s == 0.1
    peer.rtt_s = None
    for sample in (-5.0, float("nan"), float("inf")):
        peer.timed(sample)
    assert peer.rtt_s is None
    peer.timed(0.0)
    assert 0 < peer.rtt_s < 1e-4  # type: ignore[operator]


def test_a_pause_of_ones_own_is_no_part_of_a_round_trip() -> None:
    nodes = [Node(name, DOMAIN, rng=random.Random(1), now=0.0) for name in "ab"]
    a, b = nodes
    a.add_peer("b", "b", 0.0)
    b.add_peer("a", "a", 0.0)
    a.handle_timer(0.0)
    (syn,) = a.datagrams_to_send(0.0)
    b.receive_datagram(syn.data, "a", 0.01)
    (challenge,) = b.datagrams_to_send(0.01)
    a.receive_datagram(challenge.data, "b", 3600.0)
    rtt_s = gossip(a).peers["b"].rtt_s
    assert rtt_s is not None and rtt_s < 0.5


def test_a_mesh_brings_a_node_back_at_another_address() -> None:
    def node(name: str, incarnation: int, now: float) -> Node:
        made = Node(name, DOMAIN, rng=random.Random(f"{name}{incarnation}"), now=now)
        made.add_endpoint("0", incarnation=incarnation, now=now)
        return made

    mesh = Mesh(node("a", 1, 0.0), node("b", 1, 0.0))
    mesh.run(3)
    mesh.add(node("b", 2, mesh.now), "elsewhere")
    mesh.run(1)
    assert mesh.nodes["a"].digests()["b/0"].incarnation == 2
    assert [row.usable for row in mesh.nodes["a"].stats(mesh.now).endpoints] == [True, True]
