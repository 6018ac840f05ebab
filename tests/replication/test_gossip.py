"""Gossip where nothing breaks: the exchange, convergence and its price, load, relays and ages, settings."""

from __future__ import annotations

import random
from typing import Any

import pytest
from network import DOMAIN, Engine, Network, copies, fleet, gossip, only, pair

from prefixroute import Domain, LoadReport, Node, NodeSettings, PeerChanged, UsageError
from prefixroute.replication.wire import Kind, decode

SECRET = DOMAIN.secret


# --- the exchange ------------------------------------------------------------------------------------------


def test_three_messages_bring_both_sides_up_to_date() -> None:
    a, b = pair()
    b.add_endpoint("0", url="http://b", incarnation=1, now=0.0)
    a.handle_timer(0.0)
    syn = only(a, 0.0)
    b.receive_datagram(syn, "at a", 0.01)
    syn_ack = only(b, 0.01)
    a.receive_datagram(syn_ack, "at b", 0.03)
    ack = only(a, 0.03)
    b.receive_datagram(ack, "at a", 0.04)
    assert b.datagrams_to_send(0.04) == []
    assert [decode(data, SECRET).kind for data in (syn, syn_ack, ack)] == [Kind.SYN, Kind.SYN_ACK, Kind.ACK]
    for node in (a, b):
        assert {endpoint: copy.held for endpoint, copy in copies(node).items()} == {"a/0": (1, 1), "b/0": (1, 1)}
        assert {node.endpoint_url(f"{name}/0") for name in "ab"} == {"http://a", "http://b"}
        node._check()
    assert gossip(a).peers["b"].rtt_s == pytest.approx(0.03)
    assert gossip(b).peers["a"].rtt_s is None


def test_readable_fields_travel_until_the_other_side_was_heard() -> None:
    a, b = pair()
    a.handle_timer(0.0)
    first = only(a, 0.0)
    assert decode(first, SECRET).message.domain == DOMAIN.fields()
    b.receive_datagram(first, "at a", 0.0)
    answer = only(b, 0.0)
    assert decode(answer, SECRET).message.domain is None
    a.receive_datagram(answer, "at b", 0.0)
    a.datagrams_to_send(0.0)
    a.handle_timer(1.0)
    assert decode(only(a, 1.0), SECRET).message.domain is None


def test_equal_vectors_are_answered_without_entries_and_updates() -> None:
    a, b = pair()
    a.handle_timer(0.0)
    syn = only(a, 0.0)
    b.receive_datagram(syn, "at a", 0.0)
    a.receive_datagram(only(b, 0.0), "at b", 0.0)
    b.receive_datagram(only(a, 0.0), "at a", 0.0)
    a.handle_timer(1.0)
    b.receive_datagram(only(a, 1.0), "at a", 1.0)
    message = decode(only(b, 1.0), SECRET).message
    assert (message.vector, message.updates) == ([], [])


def test_round_trip_time_follows_the_fastest_answers() -> None:
    a, b = pair()
    for i, delay in enumerate((0.05, 0.01, 0.01, 0.5)):
        now = float(i)
        a.handle_timer(now)
        b.receive_datagram(only(a, now), "at a", now)
        a.receive_datagram(only(b, now), "at b", now + delay)
        a.datagrams_to_send(now + delay)
    rtt = gossip(a).peers["b"].rtt_s
    assert rtt is not None
    assert 0.03 < rtt < 0.1


def test_a_repeated_answer_tells_nothing_of_the_round_trip() -> None:
    a, b = pair()
    a.handle_timer(0.0)
    b.receive_datagram(only(a, 0.0), "at a", 0.0)
    answer = only(b, 0.0)
    a.receive_datagram(answer, "at b", 0.02)
    a.receive_datagram(answer, "at b", 3.0)
    assert gossip(a).peers["b"].rtt_s == pytest.approx(0.02)


def test_rounds_come_at_the_interval_and_late_ones_are_not_caught_up_in_a_burst() -> None:
    a, _ = pair()
    assert a.next_timer() == 0.0
    a.handle_timer(0.0)
    assert a.next_timer() == pytest.approx(0.2)
    a.handle_timer(0.1)
    assert a.counters["rounds"] == 1
    a.handle_timer(0.25)
    assert a.next_timer() == pytest.approx(0.4)
    a.handle_timer(5.0)
    # It was quiet for more than a second: the next one comes a little later than at the full pace.
    assert a.next_timer() == pytest.approx(5.0 + 0.5 * 0.2 * 1.25)
    assert a.counters["rounds"] == 3


# --- convergence and its price -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1200, 60000])
@pytest.mark.parametrize("n", [2, 4, 9])
def test_a_change_is_everywhere_within_a_few_rounds(n: int, size: int) -> None:
    net = fleet(n, datagram_bytes=size)
    for engine in net.engines.values():
        engine.store(30, net.now)
        engine.evict(net.now, 0.5)
    assert net.settle(10) <= 1.0
    net.check_all()


def test_four_quiet_nodes_send_less_than_850_bytes_a_second_each() -> None:
    net = fleet(4)
    before = dict(net.sent_bytes)
    net.run(10)
    for node, sent in net.sent_bytes.items():
        assert 200 < (sent - before[node]) / 10 < 850


@pytest.mark.parametrize(("size", "times"), [(1200, 3.0), (60000, 2.5)])
def test_a_snapshot_costs_at_most_a_few_times_its_bytes_for_each_receiver(size: int, times: float) -> None:
    net = fleet(4, datagram_bytes=size)
    before = sum(net.sent_bytes.values())
    net.engines["n0/0"].store(20000, net.now)
    assert net.settle(10) < 1.5
    assert sum(net.sent_bytes.values()) - before < times * 3 * 20000 * 6


def updates_taken(net: Network) -> int:
    counters = [node.counters for node in net.nodes.values()]
    return sum(n for counter in counters for name, n in counter.items() if name.startswith("updates_"))


def test_more_endpoints_than_a_vector_holds_are_all_known_and_kept_without_updates() -> None:
    net = Network(1)
    net.add("n0", endpoints=80)
    net.add("n1")
    net.add("n2", endpoints=0)
    for engine in net.engines.values():
        engine.store(3, net.now)
        engine.node.set_load(engine.endpoint, LoadReport(1, 2, 3000, 8000.0, 0.01, 0.5, 10**6), net.now)
    assert net.settle(20) < 2
    taken = updates_taken(net)
    for _ in range(10):
        net.run(1)
        for node in net.nodes.values():
            assert not any(copy.suspected for copy in copies(node).values())
    assert updates_taken(net) == taken


def test_what_a_peer_does_not_know_comes_first_in_an_answer() -> None:
    a, _ = pair()
    b = Node("b", DOMAIN, rng=random.Random(1), now=0.0, settings=NodeSettings(datagram_bytes=900, replay_window=0))
    b.add_peer("a", "at a", 0.0)
    for i in range(100):
        b.add_endpoint(str(i), incarnation=1, now=0.0)
    answers: list[list[str]] = []
    for now in (0.0, 1.0):
        for node in (a, b):
            node.handle_timer(now)
        b.datagrams_to_send(now)
        b.receive_datagram(only(a, now), "at a", now)
        answer = b.datagrams_to_send(now)[0].data
        answers.append([entry.endpoint for entry in decode(answer, SECRET).message.vector])
        a.receive_datagram(answer, "at b", now)
        a.datagrams_to_send(now)
    assert len(answers[0]) > 20
    assert set(answers[1]).isdisjoint(answers[0])


def test_a_burst_of_one_datagram_still_brings_everything() -> None:
    net = Network(1, settings=NodeSettings(datagram_bytes=1200, burst_bytes=1200))
    net.add("n0", endpoints=25)
    net.add("n1", endpoints=25)
    for engine in net.engines.values():
        engine.store(3, net.now)
    net.engines["n0/0"].store(1000, net.now)
    net.settle(20)


def test_a_gateway_without_endpoints_learns_everything_and_says_nothing_of_its_own() -> None:
    net = fleet(3)
    net.add("gateway", endpoints=0)
    net.settle(2)
    assert set(copies(net.nodes["gateway"])) == {"n0/0", "n1/0", "n2/0"}
    assert set(copies(net.nodes["n0"])) == {"n0/0", "n1/0", "n2/0"}


def test_load_is_everywhere_within_two_rounds() -> None:
    net = fleet(5)
    report = LoadReport(3, 7, 12345, 9000.0, 0.02, 0.5, 10**6)
    net.nodes["n2"].set_load("n2/0", report, net.now)
    net.run(0.5)
    for node in net.nodes.values():
        assert copies(node)["n2/0"].advert.report == report


def test_an_answer_goes_on_in_acks_that_ask_for_nothing() -> None:
    a, b = pair()
    Engine(a, "a/0", random.Random(1)).store(500, 0.0)
    a.handle_timer(0.0)
    a.datagrams_to_send(0.0)
    b.handle_timer(0.0)
    a.receive_datagram(only(b, 0.0), "at b", 0.0)
    first, *others = [decode(datagram.data, SECRET) for datagram in a.datagrams_to_send(0.0)]
    assert (first.kind, len(first.message.vector), first.message.echo > 0) == (Kind.SYN_ACK, 1, True)
    assert len(others) == 2
    for envelope in others:
        assert (envelope.kind, envelope.message.vector, envelope.message.echo) == (Kind.ACK, [], 0)
    updates = [update for envelope in (first, *others) for update in envelope.message.updates]
    assert [update.lower for update in updates] == [0, *(update.upper for update in updates[:-1])]
    assert updates[-1].upper == 0


# --- relays and ages ---------------------------------------------------------------------------------------


def chain(n: int) -> Network:
    """Nodes in a row: each has only its neighbours for peers."""
    net = Network(1)
    for i in range(n):
        net.add(f"n{i}", peers=[f"n{i - 1}"] if i else [])
    for engine in net.engines.values():
        engine.store(10, net.now)
    net.settle(10)
    return net


def test_nodes_in_a_row_relay_sets_and_load() -> None:
    net = chain(5)
    net.engines["n0/0"].store(400, net.now)
    net.nodes["n0"].set_load("n0/0", LoadReport(running=9), net.now)
    net.settle(5)
    far = copies(net.nodes["n4"])["n0/0"]
    assert (len(far.keys), far.advert.report.running, far.url) == (410, 9, "http://n0:0")


def test_two_nodes_that_cannot_talk_are_served_by_a_third() -> None:
    net = fleet(3)
    net.block([("n0", "n1")])
    net.engines["n0/0"].store(300, net.now)
    net.settle(5)
    net.run(10)
    assert not copies(net.nodes["n1"])["n0/0"].suspected
    # Yet the peer itself is unheard, and that shows.
    assert net.nodes["n1"].stats(net.now).peers["n0"] == "suspected"


def test_ages_add_up_along_relays_and_never_flatter() -> None:
    net = chain(5)
    # The word under way when the watch begins was spoken earlier, nobody knows when.
    first = copies(net.nodes["n0"])["n0/0"].heartbeat
    spoken_at: dict[int, float] = {}
    oldest = 0.0
    for _ in range(400):
        net.run(0.02)
        spoken_at.setdefault(copies(net.nodes["n0"])["n0/0"].heartbeat, net.now)
        for i in range(1, 5):
            copy = copies(net.nodes[f"n{i}"])["n0/0"]
            if copy.heartbeat > first:
                true_age = net.now - spoken_at[copy.heartbeat]
                # Time on the wire and the fraction of a millisecond are not counted: 3 ms a hop.
                assert true_age - 0.003 * i <= copy.age_s(net.now) <= true_age + 0.02
                oldest = max(oldest, true_age)
    assert oldest > 0.2


# --- settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        {"interval_s": 0},
        {"fan_out": 0},
        {"datagram_bytes": 799},
        {"datagram_bytes": 65537, "burst_bytes": 70000},
        {"burst_bytes": 1199},
        {"suspect_after_s": 0.2},
        {"forget_after_s": 2.0},
    ],
)
def test_settings_that_cannot_work_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="gossip needs"):
        NodeSettings(**bad)


def test_names_that_leave_no_room_in_a_datagram_are_refused_with_the_size_to_pass() -> None:
    long = Domain("m" * 256, "t" * 256)
    with pytest.raises(UsageError, match="datagram_bytes must be at least") as caught:
        Node("a", long, rng=random.Random(1), now=0.0, settings=NodeSettings(datagram_bytes=800))
    least = int(str(caught.value).split("at least ")[1].split()[0])
    Node("a", long, rng=random.Random(1), now=0.0, settings=NodeSettings(datagram_bytes=least))
    with pytest.raises(UsageError):
        Node("a", long, rng=random.Random(1), now=0.0, settings=NodeSettings(datagram_bytes=least - 1))


def test_peers_are_heard_then_suspected_then_heard_again() -> None:
    net = fleet(2)
    net.block([("n0", "n1")])
    net.run(3)
    net.heal()
    net.run(1)
    states = [event.state for event in net.told["n0"] if isinstance(event, PeerChanged)]
    assert states == ["heard", "suspected", "heard"]
