"""What comes into a node: datagrams of peers, strangers and foes, and what engines and probes say."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing import DOMAIN, known, new, pair, prompt

from prefixroute import (
    BlocksRemoved,
    DatagramRejected,
    Domain,
    DomainMismatch,
    EngineBatch,
    LoadReport,
    Node,
    NodeSettings,
    Outcome,
    PeerChanged,
    PushBackChanged,
    ResidencyChanged,
    StreamGap,
    UnknownEvent,
    UsageError,
)
from prefixroute.endpoint.local import SILENT_AFTER
from prefixroute.testing import Mesh, stored

# --- datagrams ----------------------------------------------------------------------------------------------


def a_datagram() -> bytes:
    """What b would send to a."""
    b = new("b")
    b.add_endpoint("0", incarnation=1, now=0.0)
    b.add_peer("a", "a", 0.0)
    b.handle_timer(0.0)
    ((_, data),) = b.datagrams_to_send(0.0)
    return data


def acquainted() -> Node:
    node = new("a", settings=NodeSettings(replay_window=0))
    node.add_peer("b", "b", 0.0)
    return node


DATAGRAM = a_datagram()


def test_a_datagram_of_a_peer_is_taken() -> None:
    node = acquainted()
    node.receive_datagram(DATAGRAM, "b", 0.0)
    assert known(node, "b/0") == 0
    assert not any(name.startswith("rejected") for name in node.counters)
    assert PeerChanged("b", "heard") in node.events()


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "truncated"),
        (DATAGRAM[:20], "truncated"),
        (DATAGRAM[:-1], "forged"),
        (DATAGRAM[:-1] + bytes([DATAGRAM[-1] ^ 1]), "forged"),
        (DATAGRAM + b"\0", "forged"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b" " * 40, "magic"),
        (DATAGRAM[:3] + b"9" + DATAGRAM[4:], "version"),
        (bytes(70_000), "oversized"),
    ],
)
def test_a_datagram_that_cannot_be_used_is_counted_and_told(data: bytes, kind: str) -> None:
    node = acquainted()
    for _ in range(3):
        node.receive_datagram(data, ("10.0.0.9", 7), 0.0)
    assert node.counters[f"rejected_{kind}"] == 3
    assert node.counters["datagrams_received"] == 3
    events = node.events()
    assert [(event.source, event.kind) for event in events if isinstance(event, DatagramRejected)] == [
        (("10.0.0.9", 7), kind)
    ] * 3
    assert known(node, "b/0") is None
    node._check()


def test_a_stranger_and_a_namesake_are_refused() -> None:
    new_one = new("z")
    new_one.receive_datagram(DATAGRAM, "b", 0.0)
    assert new_one.counters["rejected_stranger"] == 1
    namesake = new("b")
    namesake.receive_datagram(DATAGRAM, "b", 0.0)
    assert namesake.counters["rejected_self"] == 1
    assert "add_peer it first" in new_one.events()[0].reason  # type: ignore[union-attr]


@given(st.binary(max_size=300) | st.tuples(st.integers(0, len(DATAGRAM) - 1), st.integers(1, 255)))
@settings(derandomize=True, deadline=None, max_examples=200)
def test_no_bytes_raise(damage: bytes | tuple[int, int]) -> None:
    node = acquainted()
    if isinstance(damage, bytes):
        data = damage
    else:
        at, flip = damage
        data = DATAGRAM[:at] + bytes([DATAGRAM[at] ^ flip]) + DATAGRAM[at + 1 :]
    node.receive_datagram(data, "b", 0.0)
    assert sum(n for name, n in node.counters.items() if name.startswith("rejected_")) == 1
    node._check()


@pytest.mark.parametrize(
    ("domain", "field"),
    [
        (Domain("other", "t", secret=b"cluster"), "model"),
        (Domain("m", "other", secret=b"cluster"), "tokenizer"),
        (Domain("m", "t", 32, secret=b"cluster"), "block_size"),
        (Domain("m", "t", namespace_policy="salt", secret=b"cluster"), "namespace_policy"),
    ],
)
def test_a_peer_of_another_domain_is_refused_loudly(domain: Domain, field: str) -> None:
    a, b = new("a"), new("b", domain)
    a.add_endpoint("0", incarnation=1, now=0.0)
    b.add_endpoint("0", incarnation=1, now=0.0)
    net = Mesh(a, b)
    net.run(2.0)
    assert known(a, "b/0") is None
    assert known(b, "a/0") is None
    (event,) = [event for event in a.events() if isinstance(event, DomainMismatch)]
    assert (event.peer, event.field) == ("b", field)
    assert (event.ours, event.theirs) == (DOMAIN.fields()[field], domain.fields()[field])
    assert a.counters[f"domain_mismatch_{field}"] == 1
    assert a.counters["rejected_domain"] > 1, "it is counted each time and told once"


def test_a_peer_with_another_secret_is_refused() -> None:
    a, b = new("a"), new("b", Domain("m", "t", secret=b"another"))
    b.add_endpoint("0", incarnation=1, now=0.0)
    Mesh(a, b).run(1.0)
    assert known(a, "b/0") is None
    assert a.counters["rejected_forged"] > 0


# --- engines ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_every_copy_follows_its_owner(seed: int) -> None:
    """Engines store and drop at random; after each quiet while, every node knows exactly what every other holds."""
    rng = random.Random(seed)
    nodes = [new(name) for name in "abc"]
    for node in nodes:
        node.add_endpoint("0", incarnation=1, now=0.0)
    net = Mesh(*nodes)
    batches: dict[str, list[EngineBatch]] = {name: [] for name in "abc"}
    for _ in range(40):
        name = rng.choice("abc")
        node, mine = net.nodes[name], batches[name]
        if mine and rng.random() < 0.4:
            stored_before = mine.pop(rng.randrange(len(mine)))
            handles = [handle for event in stored_before.events for handle in event.handles]  # type: ignore[union-attr]
            node.apply(f"{name}/0", EngineBatch((BlocksRemoved(tuple(reversed(handles))),)), net.now)
        else:
            mine.append(stored(prompt(rng.randrange(10**6), rng.randint(1, 40))))
            node.apply(f"{name}/0", mine[-1], net.now)
        net.run(rng.choice((0.0, 0.05, 0.3)))
    net.run(3.0)
    for node in nodes:
        node._check()
        for other in nodes:
            endpoint = f"{other.node}/0"
            assert known(node, endpoint) == other.residency(endpoint).canonical_blocks, (seed, node.node, endpoint)


@pytest.mark.parametrize(
    "batch",
    [
        EngineBatch(()),
        EngineBatch((UnknownEvent("what", "why"),)),
        EngineBatch((BlocksRemoved((1, 2, 3)),)),
        EngineBatch((StreamGap(), StreamGap(7))),
        stored(prompt(1, 3), tier="tape"),
        stored(prompt(1, 3), block_size=7),
    ],
)
def test_no_engine_batch_raises(batch: EngineBatch) -> None:
    net, a, _ = pair()
    a.apply("a/0", batch, net.now)
    net.run(1.0)
    a._check()
    assert a.route(prompt(2, 3), net.now).local


def test_a_silent_engine_is_told_and_history_stands_in_until_it_speaks() -> None:
    net, a, b = pair()
    for i in range(SILENT_AFTER + 1):
        b.report(b.route(prompt(i, 6), net.now, forwarded=True), Outcome.served(cached_tokens=0, ttft_s=0.1), net.now)
    (event,) = [event for event in b.events() if isinstance(event, ResidencyChanged)]
    assert (event.endpoint, event.state) == ("b/0", "silent")
    net.run(1.0)
    guessed = prompt(SILENT_AFTER, 6)
    decision = a.route(guessed, net.now)
    assert (decision.target, decision.matched_tokens) == ("b/0", 96)
    a.report(decision, Outcome.cancelled(), net.now)
    b.apply("b/0", stored(prompt(50, 4)), net.now)
    net.run(1.0)
    assert known(a, "b/0") == 4
    assert a.route(guessed, net.now).local
    assert a.route(prompt(50, 4), net.now).target == "b/0"
    a._check()
    b._check()


def test_a_probes_report_is_advertised_and_reaches_peers() -> None:
    net, a, b = pair()
    report = LoadReport(3, 2, 1500, 500.0, 0.25, 0.5, 100_000)
    b.set_load("b/0", report, net.now)
    assert b.load("b/0", net.now) == report
    net.run(0.25)
    row = next(row for row in a.stats(net.now).endpoints if row.endpoint == "b/0")
    assert 2.7 < row.wait_s <= 3.0
    (c,) = [c for c in a.route(prompt(1, 4), net.now).candidates if c.endpoint == "b/0"]
    assert (c.overhead_s, c.prefill_s) == (0.25, 65 / 500)


def test_an_endpoints_speed_is_learnt_from_what_it_served() -> None:
    net, a, _ = pair()
    for i in range(8):
        decision = a.route(prompt(i, 32), net.now, forwarded=True)
        a.report(decision, Outcome.served(cached_tokens=0, ttft_s=513 / 250), net.now)
    net.run(0.5)
    assert a.load("a/0", net.now).prefill_tokens_per_s == pytest.approx(250, rel=0.01)


@pytest.mark.parametrize("reason", ["x" * 500, "\ud83d", "\0\n", "草" * 100])
def test_no_report_stops_gossip(reason: str) -> None:
    net, a, b = pair()
    big = 2**63 - 1
    b.set_load("b/0", LoadReport(big, big, big, 1e18, 1e18, 1.0, big, True, reason), net.now)
    net.run(1.0)
    row = next(row for row in a.stats(net.now).endpoints if row.endpoint == "b/0")
    assert row.push_back == "refusing"
    assert "rejected_malformed" not in a.counters
    assert a.route(prompt(1, 4), net.now).local


def test_push_back_is_told_to_the_owner_and_shown_to_peers() -> None:
    net, a, b = pair()
    b.set_load("b/0", LoadReport(queued_tokens=5000, prefill_tokens_per_s=1000), net.now)
    assert [event for event in b.events() if isinstance(event, PushBackChanged)] == [
        PushBackChanged("b/0", "overloaded", "queue of 5.0 s")
    ]
    net.run(0.25)
    assert {row.endpoint: row.push_back for row in a.stats(net.now).endpoints} == {"a/0": "open", "b/0": "overloaded"}


# --- engines that say nothing, or sleep --------------------------------------------------------------------


def test_an_engine_without_events_goes_by_history_at_the_callers_word() -> None:
    net, a, b = pair()
    tokens = prompt(1, 4)
    a.apply("a/0", stored(prompt(9, 3)), net.now)
    net.run(1.0)
    assert known(b, "a/0") == 3
    a.events()
    a.go_by_history("a/0", "start it with events", net.now)
    a.go_by_history("a/0", "and again", net.now)
    told = [event for event in a.events() if isinstance(event, ResidencyChanged)]
    assert told[0] == ResidencyChanged("a/0", "silent", "start it with events")
    assert [event.state for event in told].count("silent") == 1
    a.report(a.route(tokens, net.now, forwarded=True), Outcome.served(), net.now)
    net.run(1.0)
    assert known(a, "a/0") == known(b, "a/0") == 4, "what a past life held is gone, there and here"
    a.apply("a/0", stored(prompt(2, 2)), net.now)
    net.run(1.0)
    assert known(b, "a/0") == 2
    a._check()
    with pytest.raises(UsageError, match="no endpoint of this node"):
        a.go_by_history("b/0", "", net.now)


def test_a_sleeping_engines_cache_is_empty_everywhere() -> None:
    net, a, b = pair()
    a.apply("a/0", stored(prompt(1, 4)), net.now)
    net.run(1.0)
    assert known(b, "a/0") == 4
    a.set_load("a/0", LoadReport(refusing=True, reason="asleep (discard_all)", asleep=True), net.now)
    assert known(a, "a/0") == 0
    net.run(1.0)
    assert known(b, "a/0") == 0
    a._check()
