"""How a zone's label travels: with the first snapshot, through relays, to learnt peers, without a byte when idle."""

from __future__ import annotations

import random

import pytest
from network import DOMAIN
from routing import known, prompt
from said import sent_by, update_of

from prefixroute import Node, NodeSettings, UsageError, ZoneRule, Zones
from prefixroute.replication.wire import Kind, Update, VectorEntry
from prefixroute.testing import Mesh, stored

EU_ONLY = Zones({("eu", "us"): ZoneRule("never")})


# Some datagrams here are made by hand, and prove nothing.
def zoned(name: str, zone: str, zones: Zones = Zones(), life: int = 1, **more: object) -> Node:  # noqa: B008 - frozen
    settings = NodeSettings(**{"datagram_bytes": 60_000, "zone": zone, "zones": zones, "replay_window": 0, **more})  # type: ignore[arg-type]
    node = Node(name, DOMAIN, rng=random.Random(name), now=0.0, settings=settings)
    node.add_endpoint("0", url=f"http://{name}", incarnation=life, now=0.0)
    return node


def hears(node: Node, now: float, *, life: int = 0, updates: tuple[Update, ...] = ()) -> None:
    """Let the node hear from b: that it has the endpoint b/0 in a life, unless that is 0, and these updates of it."""
    vector = [VectorEntry("b/0", life, 1, 1)] if life else []
    node.receive_datagram(sent_by("b", Kind.ACK, vector=vector, updates=updates), "b", now)


def told(zone: str, life: int = 1, version: int = 1) -> tuple[Update, ...]:
    """A snapshot of b/0, empty, with its zone, or without one."""
    return (update_of("b/0", life, 0, version, zone=zone),)


def zone_of(node: Node, endpoint: str, now: float = 0.0) -> str | None:
    return next((row.zone for row in node.stats(now).endpoints if row.endpoint == endpoint), None)


def test_an_endpoint_that_holds_nothing_tells_its_zone_with_its_url() -> None:
    net = Mesh(zoned("a", "eu"), zoned("b", "us"))
    net.run(0.5)
    assert known(net.nodes["a"], "b/0") == 0
    assert (zone_of(net.nodes["a"], "b/0"), net.nodes["a"].endpoint_url("b/0")) == ("us", "http://b")
    assert (zone_of(net.nodes["b"], "a/0"), zone_of(net.nodes["a"], "a/0")) == ("eu", "eu")


def test_until_it_is_told_a_zone_is_unknown_and_may_be_any() -> None:
    a = zoned("a", "eu", EU_ONLY)
    a.add_peer("b", "b", 0.0)
    hears(a, 0.0, life=1)
    assert zone_of(a, "b/0") == ""
    assert [row.usable for row in a.stats(0.0).endpoints if row.endpoint == "b/0"] == [False]
    hears(a, 0.1, updates=told("asia"))
    assert zone_of(a, "b/0") == "asia"
    assert [row.usable for row in a.stats(0.1).endpoints if row.endpoint == "b/0"] == [True]
    a._check()


def test_a_relay_passes_it_on() -> None:
    """c never talks to a: b alone tells it of a's zone, whether or not b has one."""
    for zone in ("", "us"):
        net = Mesh()
        a, b, c = zoned("a", "eu"), zoned("b", zone), zoned("c", "us")
        for node in (a, b, c):
            net.nodes[node.node] = node
        for one, other in ((a, b), (b, a), (b, c), (c, b)):
            one.add_peer(other.node, other.node, 0.0)
        net.run(2.0)
        assert "a" not in c.stats(net.now).peers
        assert zone_of(c, "a/0", net.now) == "eu"


def test_learnt_peers_are_of_a_zone_too() -> None:
    net = Mesh()
    nodes = [zoned(name, zone, learn_peers=True, contact=name) for name, zone in (("a", "eu"), ("b", ""), ("c", "us"))]
    for node in nodes:
        net.nodes[node.node] = node
    a, _, c = nodes
    a.add_peer("b", "b", 0.0)
    c.add_peer("b", "b", 0.0)
    net.run(3.0)
    ways = {way.peer: way.zone for way in a.stats(net.now).round_trips}
    assert ways == {"b": "", "c": "us"}


def test_a_new_life_may_be_elsewhere() -> None:
    """Nothing goes there between the word of the new life and its snapshot."""
    a = zoned("a", "eu", EU_ONLY)
    a.add_peer("b", "b", 0.0)
    hears(a, 0.0, life=1, updates=told("eu"))
    assert zone_of(a, "b/0") == "eu"
    hears(a, 0.1, life=2)
    assert zone_of(a, "b/0") == ""
    assert {row.endpoint: row.usable for row in a.stats(0.1).endpoints} == {"a/0": True, "b/0": False}
    hears(a, 0.2, updates=told("us", life=2))
    assert zone_of(a, "b/0") == "us"
    assert {row.endpoint: row.usable for row in a.stats(0.2).endpoints} == {"a/0": True, "b/0": False}
    a._check()


def test_a_snapshot_that_leaves_it_out_takes_nothing_away() -> None:
    a = zoned("a", "eu")
    a.add_peer("b", "b", 0.0)
    hears(a, 0.0, life=1, updates=told("eu"))
    hears(a, 0.1, updates=told("", version=3))
    assert zone_of(a, "b/0") == "eu"
    hears(a, 0.2, updates=told("", life=2))
    assert zone_of(a, "b/0") == "", "of another life nothing is known"


def test_a_quiet_fleet_with_zones_costs_what_one_without_does() -> None:
    """To the byte, datagram by datagram, once the first snapshots have gone."""

    def idle_bytes(zone: str) -> list[int]:
        net = Mesh(*(zoned(name, zone) for name in "abc"))
        for name in "abc":
            net.nodes[name].apply(f"{name}/0", stored(prompt(1, 40)), 0.0)
        net.run(5.0)
        before = [node.counters["bytes_sent"] for node in net.nodes.values()]
        net.run(20.0)
        return [node.counters["bytes_sent"] - sent for node, sent in zip(net.nodes.values(), before, strict=True)]

    assert idle_bytes("x" * 40) == idle_bytes("")


def test_deltas_do_not_carry_it() -> None:
    sizes = []
    for zone in ("", "x" * 40):
        net = Mesh(zoned("a", zone), zoned("b", zone))
        net.nodes["a"].apply("a/0", stored(prompt(1, 40)), 0.0)
        net.run(3.0)
        before = net.nodes["a"].counters["bytes_sent"]
        net.nodes["a"].apply("a/0", stored(prompt(2, 40)), net.now)
        net.run(2.0)
        assert known(net.nodes["b"], "a/0") == 80
        sizes.append(net.nodes["a"].counters["bytes_sent"] - before)
    assert sizes[0] == sizes[1]


def test_datagrams_leave_room_for_a_zone() -> None:
    with pytest.raises(UsageError, match="datagram_bytes must be at least") as without:
        zoned("a" * 40, "", datagram_bytes=800, contact="c" * 80)
    with pytest.raises(UsageError, match="datagram_bytes must be at least") as with_zone:
        zoned("a" * 40, "eu", datagram_bytes=800, contact="c" * 80)
    least = [int(str(error.value).split("at least ")[1].split()[0]) for error in (without, with_zone)]
    assert least[1] - least[0] == 40
