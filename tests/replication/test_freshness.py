"""Recordings: what is played back changes nothing and costs a bounded answer; and first contacts of honest nodes."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from network import DOMAIN, Faults, Network, copies, gossip, only

from prefixroute import DatagramRejected, Node, NodeSettings, UsageError
from prefixroute.replication.copies import ReplayWindow
from prefixroute.replication.wire import LAST_BEAT, Kind, Message, Stamp, VectorEntry, decode, encode, encode_part


class Tapped(Network):
    """A network with somebody on the line, who keeps a copy of every datagram: (from, to, bytes)."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self.tape: list[tuple[str, str, bytes]] = []
        super().__init__(*arguments, **more)

    def _carry(self, source: str, to: str, data: bytes) -> None:
        self.tape.append((source, to, data))
        super()._carry(source, to, data)


def state(node: Node) -> list[Any]:
    """All that a node believes, but for how long ago it heard it."""
    peers = [(p.node, p.state, p.life, p.learnt, str(p.address)) for p in gossip(node).peers.values()]
    held = [(c.endpoint, c.held, c.beat, c.loaded, c.heard_at, c.url, c.suspected) for c in copies(node).values()]
    return [sorted(peers), sorted(held), sorted(gossip(node).members.left)]


def tapped(n: int, **more: Any) -> Tapped:
    net = Tapped(1, settings=NodeSettings(**more))
    for i in range(n):
        net.add(f"n{i}")
    for engine in net.engines.values():
        engine.store(40, net.now)
    net.run(3)
    for engine in net.engines.values():
        engine.store(10, net.now)
        engine.evict(net.now, 0.5)
    net.run(2)
    assert not net.lagging()
    return net


def play_back(net: Tapped, tape: list[tuple[str, str, bytes]], to: str, source: str | None = None) -> int:
    """Let a node hear a tape; return the bytes of its answers."""
    sent = net.sent_bytes[to]
    for was_from, _, data in tape:
        net.inject(to, data, source or was_from)
    return net.sent_bytes[to] - sent


# --- the window --------------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.integers(1, 70), st.lists(st.integers(1, 200), max_size=120))
def test_a_window_takes_each_number_once_and_none_that_is_far_back(size: int, numbers: list[int]) -> None:
    window, taken, top = ReplayWindow(size), set(), 0
    for number in numbers:
        expected = number > top - size and number not in taken
        assert window.take(number) is expected
        if expected:
            taken.add(number)
            top = max(top, number)


def test_a_jump_of_any_length_costs_no_memory() -> None:
    window = ReplayWindow(64)
    assert [window.take(number) for number in (1, 2**62, 2**63 - 1, 2**62, 2**63 - 2)] == [
        True,
        True,
        True,
        False,
        True,
    ]
    assert window._seen < 2**64
    with pytest.raises(UsageError, match="replay_window"):
        NodeSettings(replay_window=-1)


# --- first contact -----------------------------------------------------------------------------------------


def test_two_nodes_prove_their_lives_within_one_round_trip_more() -> None:
    a, b = (Node(name, DOMAIN, rng=random.Random(1), now=0.0) for name in "ab")
    for node, other in ((a, b), (b, a)):
        node.add_endpoint("0", incarnation=1, now=0.0)
        node.add_peer(other.node, f"at {other.node}", 0.0)
    a.handle_timer(0.0)
    syn = only(a, 0.0)
    b.receive_datagram(syn, "at a", 0.1)
    challenge = only(b, 0.1)
    assert len(challenge) < len(syn)
    assert set(copies(b)) == {"b/0"}, "nothing is taken without a proof"
    a.receive_datagram(challenge, "at b", 0.2)
    b.receive_datagram(only(a, 0.2), "at a", 0.3)
    assert set(copies(b)) == {"a/0", "b/0"}
    a.receive_datagram(only(b, 0.3), "at b", 0.4)
    assert set(copies(a)) == {"a/0", "b/0"}
    # Either has measured the round trip by then, and no later exchange is any longer.
    assert [gossip(node).peers[other].rtt_s for node, other in ((a, "b"), (b, "a"))] == pytest.approx([0.2, 0.2])
    a.handle_timer(1.0)
    b.receive_datagram([data for _, data in a.datagrams_to_send(1.0)][-1], "at a", 1.1)
    assert decode(only(b, 1.1), DOMAIN.secret).message.vector
    assert b.counters["datagrams_challenge"] == 1


@pytest.mark.parametrize("n", [2, 20])
def test_a_fleet_is_acquainted_as_quickly_as_without_proofs(n: int) -> None:
    took = []
    for window in (0, 4096):
        net = Network(4, settings=NodeSettings(replay_window=window))
        for i in range(n):
            net.add(f"n{i}")
        for engine in net.engines.values():
            engine.store(20, net.now)
        took.append(net.settle(10))
    assert took[1] <= took[0] + 0.2


def test_a_mixed_fleet_with_nodes_that_take_everything_works() -> None:
    net = Network(4)
    for i in range(4):
        net.add(f"n{i}", settings=NodeSettings(replay_window=4096 * (i % 2)))
    for engine in net.engines.values():
        engine.store(20, net.now)
    net.settle(5)
    net.run(10)
    assert net.unheard() == []


def test_a_node_without_a_life_is_not_heard() -> None:
    net = Network(1)
    net.add("n0", peers=["n1"])
    data = encode(Kind.SYN, DOMAIN.fingerprint, DOMAIN.secret, Message("n1", 7, complete=True))
    net.inject("n0", data, "n1")
    assert (net.nodes["n0"].counters["datagrams_stale"], net.sent_datagrams["n0"]) == (1, 0)


# --- recordings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("learn", [False, True])
def test_a_recording_changes_nothing_at_any_node_and_brings_no_answer(learn: bool) -> None:
    net = tapped(4, **({"learn_peers": True, "contact": "its-name"} if learn else {}))
    tape = list(net.tape)
    assert len(tape) > 200
    for name, node in net.nodes.items():
        before = state(node)
        answered = play_back(net, tape, name)
        assert state(node) == before
        # To those of a life that is known: nothing. To first contacts of long ago: challenges, none longer than a SYN.
        heard = [data for source, _, data in tape if source != name and data[4] == Kind.SYN]
        assert answered <= sum(map(len, heard))
        assert node.counters["datagrams_repeated"] > 20
    net.run(2)
    assert not net.lagging()


def test_a_restarted_node_is_not_fooled_by_what_was_said_to_its_former_life() -> None:
    net = tapped(4)
    tape = [part for part in net.tape if part[1] == "n3"]
    net.stop("n3")
    net.stop("n2")
    net.run(100)
    node = net.add("n3", incarnation=2, peers=[])
    node.add_peer("n0", "n0", net.now)
    node.add_peer("n2", "n2", net.now)
    net.oracle.started("n3", {"n3/0"})
    before = net.sent_datagrams["n3"]
    play_back(net, tape, "n3")
    # n2 is dead and stays so, and of n0 nothing old is believed.
    assert set(copies(node)) == {"n3/0"}
    assert net.sent_datagrams["n3"] - before <= len(tape)
    assert node.counters["datagrams_challenge"] > 0
    net.run(3)
    assert set(copies(node)) == {"n0/0", "n1/0", "n3/0"}
    assert "n2/0" not in copies(net.nodes["n0"])


def test_a_dead_node_is_not_kept_alive_by_its_words_to_others() -> None:
    """What n2 said to n1 was never heard by n0, and says of itself that it is young."""
    net = tapped(3)
    tape = [part for part in net.tape if part[:2] == ("n2", "n1")]
    net.stop("n2")
    for _ in range(200):
        net.run(0.5)
        play_back(net, tape[-20:], "n0")
        play_back(net, tape[-20:], "n1")
    for name in ("n0", "n1"):
        assert "n2/0" not in copies(net.nodes[name])
        assert net.nodes[name].stats(net.now).peers["n2"] == "suspected"


def test_a_former_life_does_not_come_back() -> None:
    net = tapped(3)
    tape = [part for part in net.tape if part[0] == "n2"]
    withheld = tape[-30:]
    net.stop("n2")
    net.add("n2", incarnation=2)
    net.run(3)
    for name in ("n0", "n1"):
        before = state(net.nodes[name])
        play_back(net, tape + withheld, name)
        assert state(net.nodes[name]) == before
    net.run(2)
    assert {copies(node)["n2/0"].incarnation for node in net.nodes.values()} == {2}


def test_an_old_last_word_does_not_remove_who_came_back() -> None:
    net = tapped(3)
    net.leave("n2")
    net.run(0.1)
    tape = [part for part in net.tape if part[0] == "n2"][-6:]
    assert any(e.heartbeat == LAST_BEAT for *_, data in tape for e in decode(data, DOMAIN.secret).message.vector)
    net.add("n2", incarnation=1)
    net.run(3)
    assert {copies(node)["n2/0"].incarnation for node in net.nodes.values()} == {2}
    for name in ("n0", "n1"):
        play_back(net, tape, name)
        assert "n2/0" in copies(net.nodes[name])


def test_a_proof_is_good_for_its_own_life_and_nonce_and_in_time_only() -> None:
    net = Network(1)
    node = net.add("n0", endpoints=0, peers=["n1"])

    def say(kind: Kind, life: int, number: int, now: float, **fields: int) -> None:
        head = Message("n1", **fields)
        entries = [encode_part(VectorEntry("n1/0", life, 1))]
        stamp = Stamp(life, number, 0)
        data = encode(kind, DOMAIN.fingerprint, DOMAIN.secret, head, entries, stamp=stamp)
        node.receive_datagram(data, "n1", now)

    def nonce(now: float) -> int:
        return decode(only(node, now), DOMAIN.secret).message.nonce

    node.datagrams_to_send(0.0)
    say(Kind.SYN, 5, 1, 0.0, nonce=1)
    first = nonce(0.0)
    say(Kind.ACK, 6, 1, 0.0, echo=first)
    say(Kind.ACK, 5, 2, 0.0, echo=first + 1)
    assert copies(node) == {}
    say(Kind.ACK, 5, 3, 60.0, echo=first)
    assert copies(node) == {}, "too late"
    say(Kind.SYN, 5, 4, 60.0, nonce=2)
    second = nonce(60.0)
    assert second != first
    say(Kind.SYN, 5, 5, 60.0, nonce=3)
    assert nonce(60.0) == second, "one nonce for one life, whichever SYN of it is played back"
    say(Kind.ACK, 5, 6, 60.1, echo=second)
    assert copies(node)["n1/0"].incarnation == 5


def test_what_waits_for_a_proof_is_bounded() -> None:
    settings = NodeSettings(learn_peers=True, contact="n0")
    node = Node("n0", DOMAIN, rng=random.Random(1), now=0.0, settings=settings)
    for i in range(20000):
        vector = [encode_part(VectorEntry(f"x{i}/{j}", 1, 1)) for j in range(30)]
        head = Message(f"x{i}", 1, contact=f"at x{i}")
        data = encode(Kind.SYN, DOMAIN.fingerprint, DOMAIN.secret, head, vector, stamp=Stamp(i + 1, 1, 0))
        node.receive_datagram(data, f"x{i}", i / 100)
    waiting = gossip(node).freshness._waiting
    assert waiting.currsize <= 1 << 20
    assert 500 < len(waiting) < 4000
    assert copies(node) == {} and gossip(node).peers == {}


def test_a_challenge_to_a_life_that_is_not_ours_is_told() -> None:
    net = tapped(2)
    (was,) = [data for source, to, data in net.tape if (source, to) == ("n1", "n0")][:1]
    net.stop("n0")
    net.add("n0", incarnation=2, peers=["n1"])
    net.run(1)
    net.stop("n1")
    net.add("n1", incarnation=2, peers=["n0"])
    net.inject("n0", was, "n1")  # of n1's former life: n0 asks n1, who is another by now
    net.run(1)
    events = [event for event in net.told["n1"] if isinstance(event, DatagramRejected)]
    assert {event.kind for event in events} == {"namesake"}


# --- honest networks ---------------------------------------------------------------------------------------


def test_repetition_and_reordering_are_no_recordings() -> None:
    net = Network(2, Faults(delay_s=(0.001, 0.3), duplicate=0.3, loss=0.1))
    for i in range(4):
        net.add(f"n{i}")
    for _ in range(20):
        for engine in net.engines.values():
            engine.store(20, net.now)
            engine.evict(net.now, 0.5)
        net.run(0.5)
    assert net.settle(10) < 5
    assert net.unheard() == []
    assert all(node.counters["datagrams_repeated"] > 20 for node in net.nodes.values())
