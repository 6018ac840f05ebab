"""Lives: an owner gets past whatever was said of it, the highest life is kept, and two nodes of one name are told."""

from __future__ import annotations

import random
from typing import Any

import pytest
from network import DOMAIN, Network, copies, fleet, gossip, pair

from prefixroute import DatagramRejected, Node, NodeSettings, ReplicaChanged
from prefixroute.replication.members import MAX_PAST
from prefixroute.replication.wire import LAST_BEAT, Kind, Message, Stamp, VectorEntry, encode, encode_part

NANOSECONDS = 1_764_500_000_000_000_000
"""What `time.time_ns()` said in 2025: below 2**62 until the year 2116."""

LIES = {
    "2**62": VectorEntry("n0/0", 2**62, 1),
    "2**62, long ago": VectorEntry("n0/0", 2**62, 1, age_ms=2**32 - 1),
    "2**62, and a set": VectorEntry("n0/0", 2**62, 5, 9, 7),
    "2**62, and the last word": VectorEntry("n0/0", 2**62, LAST_BEAT),
    "2**62, and the highest of all": VectorEntry("n0/0", 2**62, LAST_BEAT - 1, 2**63 - 1, revision=2**63 - 1),
    "what nobody is believed": VectorEntry("n0/0", MAX_PAST, 1),
    "the highest incarnation": VectorEntry("n0/0", 2**63 - 1, LAST_BEAT),
}


def say(net: Network, to: str, sender: str, *entries: VectorEntry, life: int = 0, nonce: int = 0) -> None:
    """Let a node hear entries in the name of a peer, as one that has proved itself would say them."""
    peer = gossip(net.nodes[to]).peers[sender]
    # A number ahead of its own, within the window.
    stamp = Stamp(life or peer.life, peer.taken._top + 1000, gossip(net.nodes[to]).freshness.life)
    parts = [encode_part(entry) for entry in entries]
    data = encode(Kind.ACK, DOMAIN.fingerprint, DOMAIN.secret, Message(sender, nonce), parts, stamp=stamp)
    net.inject(to, data, str(peer.address))


def rounds_until_whole(net: Network, most: int) -> int:
    """The rounds until all replicas are their owners' sets and nobody alive is unheard."""
    for n in range(most + 1):
        if not net.lagging() and not net.unheard():
            return n
        net.run(net.settings.interval_s)
    raise AssertionError(f"after {most} rounds: {net.lagging()} {net.unheard()}")


def lied_about(seed: int, lie: VectorEntry, to: str, away_s: float = 0.0, nodes: int = 4) -> int:
    """Lie of n0 once; let it refute, end and restart; return the rounds until the fleet is whole."""
    net = Network(seed)
    for i in range(nodes):
        net.add(f"n{i}", incarnation=NANOSECONDS)
    for engine in net.engines.values():
        engine.store(20, net.now)
    net.settle(10)
    say(net, to, "n2", lie)
    net.run(3)
    assert rounds_until_whole(net, 5) == 0
    net.stop("n0")
    net.run(away_s)
    net.add("n0", incarnation=NANOSECONDS + 10**9)
    net.engines["n0/0"].store(7, net.now)
    return rounds_until_whole(net, 13)


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("to", ["n0", "n1"])
def test_a_lie_about_a_life_locks_nobody_out(lie: str, to: str) -> None:
    for seed in range(3):
        lied_about(seed, LIES[lie], to)


@pytest.mark.parametrize("away_s", [1, 5, 70])
def test_an_owner_learns_a_past_that_only_it_can_have_had(away_s: float) -> None:
    lied_about(1, LIES["2**62"], "n1", away_s)


@pytest.mark.parametrize("incarnation", [2**62 + 5, MAX_PAST, MAX_PAST + 1, 2**63 - 2, 2**63 - 1])
@pytest.mark.parametrize("ends", ["stop", "leave"])
def test_whatever_the_others_hold_an_owner_that_restarts_is_heard(incarnation: int, ends: str) -> None:
    net = fleet(4, incarnation=NANOSECONDS)
    copies(net.nodes["n0"])["n0/0"].incarnation = incarnation
    net.run(2)
    assert {copies(node)["n0/0"].incarnation for node in net.nodes.values()} == {incarnation}
    getattr(net, ends)("n0")
    net.run(1)
    net.add("n0", incarnation=NANOSECONDS + 1)
    net.engines["n0/0"].store(7, net.now)
    rounds_until_whole(net, 13)
    net.check_all()


def test_who_hears_of_an_owner_through_relays_only_follows_it_past_a_lie() -> None:
    net = Network(1)
    net.add("n0", incarnation=NANOSECONDS, peers=[])
    net.add("n1", incarnation=NANOSECONDS, peers=["n0"])
    net.add("n2", incarnation=NANOSECONDS, peers=["n1"])
    net.run(3)
    say(net, "n2", "n1", LIES["2**62"])
    net.run(3)
    assert {copies(node)["n0/0"].incarnation for node in net.nodes.values()} == {2**62 + 1}
    net.stop("n0")
    net.run(1)
    net.add("n0", incarnation=NANOSECONDS + 1, peers=["n1"])
    net.engines["n0/0"].store(7, net.now)
    rounds_until_whole(net, 13)


# --- the highest life --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "alive"),
    [
        ([(1, 1), (1, LAST_BEAT), (10, LAST_BEAT), (2, 1)], False),
        ([(10, LAST_BEAT), (2, 1)], False),
        ([(1, 1), (1, LAST_BEAT), (10, LAST_BEAT), (10, 5)], False),
        ([(1, 1), (1, LAST_BEAT), (10, LAST_BEAT), (3, LAST_BEAT), (5, 1)], False),
        ([(1, 1), (10, LAST_BEAT), (2, 1)], False),
        ([(1, 1), (1, LAST_BEAT), (10, LAST_BEAT), (11, 1)], True),
        ([(1, 1), (1, LAST_BEAT), (2, 1)], True),
    ],
)
@pytest.mark.parametrize("later_s", [0.0, 100.0])
def test_the_highest_life_is_kept_whether_or_not_anything_is_held(
    said: list[tuple[int, int]], alive: bool, later_s: float
) -> None:
    _, b = pair()
    now = 0.0
    for i, (incarnation, beat) in enumerate(said):
        if i == len(said) - 1:
            now += later_s
            b.handle_timer(now)
        data = encode(
            *(Kind.ACK, DOMAIN.fingerprint, DOMAIN.secret, Message("a")),
            [encode_part(VectorEntry("e/0", incarnation, beat))],
        )
        b.receive_datagram(data, "at a", now)
    assert ("e/0" in copies(b)) is alive
    b._check()


def test_a_life_too_old_to_be_met_is_remembered() -> None:
    _, b = pair()
    b.add_peer("e", "at e", 0.0)
    for entry in (VectorEntry("e/0", 10, 1, age_ms=70_000), VectorEntry("e/0", 2, 1)):
        data = encode(Kind.ACK, DOMAIN.fingerprint, DOMAIN.secret, Message("a"), [encode_part(entry)])
        b.receive_datagram(data, "at a", 0.0)
    assert "e/0" not in copies(b)


@pytest.mark.parametrize("age_ms", [0, 2**32 - 1])
@pytest.mark.parametrize("beat", [1, LAST_BEAT])
def test_a_lie_of_an_endpoint_that_is_not_there_yet_does_not_keep_it_out(age_ms: int, beat: int) -> None:
    net = Network(1)
    for i, peers in enumerate(([], ["n0"], ["n1"])):
        net.add(f"n{i}", incarnation=NANOSECONDS, peers=peers)
    net.run(3)
    # n2 hears of n0 through n1 only.
    net.oracle.added("n0/1")
    say(net, "n2", "n1", VectorEntry("n0/1", 2**62, beat, age_ms=age_ms))
    net.run(1)
    net.add_endpoint("n0", "1", NANOSECONDS)
    net.run(3)
    assert net.lagging() == net.unheard() == []


# --- two nodes of one name ---------------------------------------------------------------------------------


class Twins(Network):
    """A network in which a second n0, at the address "twin", runs beside it; `twin` is what it told."""

    def __init__(self, seed: int, settings: NodeSettings, twin_peers: tuple[str, ...]) -> None:
        super().__init__(seed, settings=settings)
        for i in range(4):
            self.add(f"n{i}", incarnation=NANOSECONDS)
        for engine in self.engines.values():
            engine.store(200, self.now)
        self.run(3)
        self.twin = Node("n0", DOMAIN, rng=random.Random(99), now=self.now, settings=settings)
        self.twin.add_endpoint("0", url="http://twin", incarnation=NANOSECONDS + 5, now=self.now)
        self.twin_told: list[Any] = []
        self.twin_bytes = 0
        for name in twin_peers:
            self.twin.add_peer(name, name, self.now)

    def _acted(self, name: str, host: Any) -> None:
        node = host.node
        kept = node._outbox._packed
        for datagram in [one for one in kept if one.address == "twin"]:
            kept.remove(datagram)
            self._agenda.plan(self.now + 0.001, lambda data, now: self._twin(data, host.address, now), datagram.data)
        super()._acted(name, host)

    def _twin(self, data: bytes, source: str, now: float) -> None:
        self.twin.receive_datagram(data, source, now)
        self.twin_sends()

    def twin_sends(self) -> None:
        for address, data in self.twin.datagrams_to_send(self.now):
            self.twin_bytes += len(data)
            self._agenda.plan(
                self.now + 0.001, lambda part, now: self._deliver((*part, "twin", "twin"), now), (str(address), data)
            )
        self.twin_told += self.twin.events()

    def minutes(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.run(max(min(self.twin.next_timer(), end) - self.now, 0.001))
            if self.twin.next_timer() <= self.now:
                self.twin.handle_timer(self.now)
                self.twin_sends()


def namesakes(told: list[Any]) -> int:
    return sum(isinstance(event, DatagramRejected) and event.kind == "namesake" for event in told)


@pytest.mark.parametrize("window", [0, 4096])
def test_two_living_nodes_of_one_name_are_both_told_once_a_minute_and_bytes_are_bounded(window: int) -> None:
    quiet = Network(1)
    for i in range(4):
        quiet.add(f"n{i}", incarnation=NANOSECONDS)
    for engine in quiet.engines.values():
        engine.store(200, quiet.now)
    quiet.run(3)
    before = sum(quiet.sent_bytes.values())
    quiet.run(180)
    usual = sum(quiet.sent_bytes.values()) - before

    net = Twins(1, NodeSettings(replay_window=window), ("n1", "n2", "n3"))
    net.oracle.acted = lambda *_: None  # type: ignore[method-assign]  # it knows one owner of a name
    before, told = sum(net.sent_bytes.values()), len(net.told["n0"])
    net.minutes(180)
    sent = sum(net.sent_bytes.values()) - before + net.twin_bytes
    events = sum(map(len, net.told.values())) + len(net.twin_told)
    assert events <= 120
    for who in (net.told["n0"][told:], net.twin_told):
        assert 1 <= namesakes(who) <= 4, who
    assert gossip(net.nodes["n1"]).peers["n0"].address == "n0"
    assert sent < (6 if window == 0 else 2.5) * usual, sent / usual


@pytest.mark.parametrize("window", [0, 4096])
def test_a_fleet_that_is_split_over_two_nodes_of_one_name_does_not_push_them_up_for_ever(window: int) -> None:
    net = Twins(1, NodeSettings(replay_window=window), ("n1", "n2", "n3"))
    net.oracle.acted = lambda *_: None  # type: ignore[method-assign]  # it knows one owner of a name
    net.act("n3", lambda node, now: node.add_peer("n0", "twin", now))
    net.minutes(60)
    before = sum(map(len, net.told.values())) + len(net.twin_told)
    refuted = net.nodes["n0"].counters["refutations"] + net.twin.counters["refutations"]
    net.minutes(120)
    # Each moves past the other six times a minute at most, and tells it once.
    assert net.nodes["n0"].counters["refutations"] + net.twin.counters["refutations"] - refuted <= 26
    assert refuted <= 2 * (8 + 6)
    assert sum(map(len, net.told.values())) + len(net.twin_told) - before <= 240
    for told in (net.told["n0"], net.twin_told):
        assert 1 <= sum(isinstance(event, ReplicaChanged) and event.state == "refuted" for event in told) <= 4
