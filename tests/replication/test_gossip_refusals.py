"""What a node does with what it cannot use: strangers, foreign domains, other secrets, and peers that talk nonsense."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from network import DOMAIN, Network, copies, fleet, only, pair
from said import array, sent_by, told, update_of
from wire_values import loads, percent

from prefixroute import DatagramRejected, DomainMismatch, Node, NodeSettings, ReplicaChanged
from prefixroute.keys.keyset import checksum
from prefixroute.keys.rice import encode_sorted
from prefixroute.replication.wire import KEY_LIMIT, LAST_BEAT, MARK_MASK, Kind, Update, VectorEntry, Want, decode

SECRET = DOMAIN.secret


# --- who is refused ----------------------------------------------------------------------------------------


def test_a_stranger_is_refused_until_it_is_a_peer() -> None:
    a, b = pair()
    b.remove_peer("a", 0.0)
    b.events()
    a.handle_timer(0.0)
    syn = only(a, 0.0)
    b.receive_datagram(syn, "at a", 0.0)
    (event,) = told(b, DatagramRejected)
    assert (event.source, event.kind, "'a'" in event.reason) == ("at a", "stranger", True)
    assert (b.counters["rejected_stranger"], copies(b), b.datagrams_to_send(0.0)) == (1, {}, [])
    b.add_peer("a", "at a", 0.0)
    b.receive_datagram(syn, "at a", 0.0)
    assert set(copies(b)) == {"a/0"}


def test_a_node_of_ones_own_name_is_refused() -> None:
    a, _ = pair()
    a.receive_datagram(sent_by("a", Kind.SYN), "elsewhere", 0.0)
    (event,) = told(a, DatagramRejected)
    assert (event.source, event.kind) == ("elsewhere", "self")


def test_another_secret_is_refused_as_forged_on_both_sides() -> None:
    net = Network(1)
    net.add("n0")
    net.add("n1", domain=dataclasses.replace(DOMAIN, secret=b"another"))
    net.run(1)
    for name in ("n0", "n1"):
        assert {event.kind for event in net.told[name] if isinstance(event, DatagramRejected)} == {"forged"}
        assert set(copies(net.nodes[name])) == {f"{name}/0"}


OTHERS: dict[str, Any] = {
    "model": "another model",
    "tokenizer": "another tokenizer",
    "block_size": 32,
    "namespace_policy": "none",
}


@pytest.mark.parametrize("field", OTHERS)
def test_a_foreign_domain_is_refused_and_both_sides_name_the_field_and_both_values(field: str) -> None:
    net = Network(1)
    net.add("n0")
    net.add("n1", domain=dataclasses.replace(DOMAIN, **{field: OTHERS[field]}))
    net.run(5)
    ours, theirs = DOMAIN.fields()[field], str(OTHERS[field])
    for name, other, mine, its in (("n0", "n1", ours, theirs), ("n1", "n0", theirs, ours)):
        events = [event for event in net.told[name] if isinstance(event, DomainMismatch)]
        # Told once, not at every round.
        assert events == [DomainMismatch(other, other, field, mine, its)]
        assert net.nodes[name].counters["rejected_domain"] > 10
        assert net.nodes[name].counters[f"domain_mismatch_{field}"] == 1
        assert set(copies(net.nodes[name])) == {f"{name}/0"}


def test_every_field_that_differs_is_told_and_told_again_after_a_minute() -> None:
    net = Network(1)
    net.add("n0")
    net.add("n1", domain=dataclasses.replace(DOMAIN, model="other", block_size=32))
    net.run(50)
    fields = [event.field for event in net.told["n0"] if isinstance(event, DomainMismatch)]
    assert fields == ["model", "block_size"]
    net.run(20)
    fields = [event.field for event in net.told["n0"] if isinstance(event, DomainMismatch)]
    assert fields == ["model", "block_size"] * 2


def test_a_peer_that_comes_back_with_another_domain_is_named_on_both_sides() -> None:
    net = fleet(2)
    net.stop("n1")
    net.add("n1", incarnation=2, domain=dataclasses.replace(DOMAIN, model="other"))
    net.run(2)
    for name, mine, its in (("n0", "model", "other"), ("n1", "other", "model")):
        events = [event for event in net.told[name] if isinstance(event, DomainMismatch)]
        assert events[-1] == DomainMismatch(events[-1].source, events[-1].peer, "model", mine, its)


def test_a_foreign_domain_that_does_not_say_its_fields_is_told_by_fingerprint() -> None:
    a, _ = pair()
    other = dataclasses.replace(DOMAIN, model="other")
    a.receive_datagram(sent_by("b", Kind.SYN, other), "at b", 0.0)
    assert told(a, DomainMismatch) == [DomainMismatch("at b", "b", "fingerprint", DOMAIN.fingerprint.hex(), "unknown")]


@pytest.mark.parametrize(
    ("change", "counter"),
    [
        (lambda data: data[:20], "truncated"),
        (lambda data: b"HTTP" + data[4:], "magic"),
        (lambda data: b"PRT7" + data[4:], "version"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "forged"),
        (lambda data: data + bytes(65536), "oversized"),
    ],
)
def test_bad_bytes_are_counted_and_told(change: Callable[[bytes], bytes], counter: str) -> None:
    a, b = pair()
    a.handle_timer(0.0)
    b.receive_datagram(change(only(a, 0.0)), "at a", 0.0)
    assert [event.kind for event in told(b, DatagramRejected)] == [counter]
    assert (b.counters[f"rejected_{counter}"], copies(b)) == (1, {})


# --- what a peer may say -----------------------------------------------------------------------------------


def test_words_of_a_life_that_began_with_a_snapshot_are_taken_from_its_first_on() -> None:
    _, b = pair()
    b.receive_datagram(sent_by("a", Kind.ACK, vector=[VectorEntry("a/0", 1, 500, 3)]), "at a", 0.0)
    b.receive_datagram(sent_by("a", Kind.ACK, updates=[update_of("a/0", 2, 0, 1, 3, 9)]), "at a", 1.0)
    assert (copies(b)["a/0"].held, copies(b)["a/0"].heard_at) == ((2, 1), 0.0)
    word = VectorEntry("a/0", 2, 1, 1, checksum(array(3, 9)) & MARK_MASK)
    b.receive_datagram(sent_by("a", Kind.ACK, vector=[word]), "at a", 2.0)
    assert (copies(b)["a/0"].held, copies(b)["a/0"].heard_at) == ((2, 1), 2.0)


def test_updates_of_unknown_and_of_own_endpoints_are_not_taken() -> None:
    a, _ = pair()
    updates = [update_of("c/0", 1, 0, 2, 3), update_of("a/0", 9, 0, 2, 3)]
    a.receive_datagram(sent_by("b", Kind.ACK, updates=updates), "at b", 0.0)
    assert a.counters["updates_unasked"] == 2
    assert {endpoint: copy.held for endpoint, copy in copies(a).items()} == {"a/0": (1, 1)}


@pytest.mark.parametrize("endpoint", ["c", "/0", "c/", "/"])
def test_an_endpoint_whose_name_has_no_owner_is_not_learnt(endpoint: str) -> None:
    a, _ = pair()
    a.receive_datagram(sent_by("b", Kind.ACK, vector=[VectorEntry(endpoint, 1, 1)]), "at b", 0.0)
    assert set(copies(a)) == {"a/0"}


def test_an_endpoint_of_ones_own_former_life_is_not_learnt() -> None:
    a, _ = pair()
    a.receive_datagram(sent_by("b", Kind.ACK, vector=[VectorEntry("a/7", 1, 5, 3)]), "at b", 0.0)
    assert set(copies(a)) == {"a/0"}


def test_hearsay_older_than_memory_is_not_learnt_and_old_hearsay_is_suspected() -> None:
    a, _ = pair()
    vector = [
        VectorEntry(f"{name}/0", 1, 5, 3, age_ms=age_ms) for name, age_ms in (("c", 60001), ("d", 59999), ("e", 1999))
    ]
    a.receive_datagram(sent_by("b", Kind.ACK, vector=vector), "at b", 100.0)
    assert {endpoint: copy.suspected for endpoint, copy in copies(a).items()} == {
        "a/0": False,
        "d/0": True,
        "e/0": False,
    }


def test_an_owner_is_not_sent_its_own_endpoint() -> None:
    a, b = pair()
    endpoints = ("a/0", "c/0")
    vector = [VectorEntry(endpoint, 1, 5, 4) for endpoint in endpoints]
    updates = [update_of(endpoint, 1, 0, 4, 3, 9) for endpoint in endpoints]
    b.receive_datagram(sent_by("a", Kind.ACK, vector=vector, updates=updates), "at a", 0.0)
    a.handle_timer(0.0)
    b.receive_datagram(only(a, 0.0), "at a", 0.0)
    message = decode(only(b, 0.0), SECRET).message
    assert [update.endpoint for update in message.updates] == ["c/0"]
    assert {entry.endpoint for entry in message.vector} == {"a/0", "c/0"}


@pytest.mark.parametrize(("said", "then"), [(2**62, 2**62 + 1), (2**62 + 1, 2**62 + 2), (2**63 - 1, 1)])
def test_an_owner_moves_past_what_others_can_be_told_and_still_speaks(said: int, then: int) -> None:
    a, b = pair()
    a.receive_datagram(sent_by("b", Kind.ACK, vector=[VectorEntry("a/0", said, 1, 1)]), "at b", 0.0)
    assert copies(a)["a/0"].incarnation == then
    a.handle_timer(0.0)
    b.receive_datagram(only(a, 0.0), "at a", 0.0)
    assert set(copies(b)) == {"a/0"}


# --- anything ----------------------------------------------------------------------------------------------

names = st.sampled_from(["a/0", "b/0", "b/1", "c/0", "d"])
small = st.integers(1, 3)
universes = st.sampled_from([KEY_LIMIT, KEY_LIMIT, KEY_LIMIT - 15, 3, 15])
key_sets = st.lists(st.integers(0, 30), max_size=6, unique=True).map(sorted)
limits = st.integers(0, 40) | st.just(KEY_LIMIT)
wants = st.builds(Want, small, st.integers(0, 3), small, st.lists(st.tuples(limits, limits), min_size=1, max_size=3))
vector_entries = st.builds(
    VectorEntry,
    *(names, small, st.integers(0, 3) | st.just(LAST_BEAT), st.integers(0, 3), st.sampled_from([0, 1, 2**16 - 1])),
    *(st.sampled_from([0, 5, 70000]), st.integers(0, 3), st.none() | loads, st.none() | wants),
)


def crafted_update(
    endpoint: str,
    life: int,
    versions: tuple[int, int],
    added: list[int],
    ranks: list[int],
    lower: int,
    ends: tuple[int, int, int],
) -> Update:
    """An update of codes that are right for some universe, which need not be the receiver's."""
    upper, universe, sum_of = ends
    codes = [
        encode_sorted(array(*values), max([universe, *(value + 1 for value in values)])) for values in (added, ranks)
    ]
    right = checksum(array(*(key + lower for key in added)))
    return Update(endpoint, life, *versions, right if sum_of else 7, 1 + sum_of, lower, upper, *codes)


crafted_updates = st.builds(
    crafted_update,
    *(names, small, st.tuples(st.integers(0, 3), small), key_sets, st.just([]) | key_sets),
    *(st.sampled_from([0, 0, 0, 15]), st.tuples(st.sampled_from([0, 0, KEY_LIMIT, 15]), universes, st.integers(0, 3))),
)
crafted = st.builds(
    lambda kind, complete, vector, updates: sent_by("b", kind, complete=complete, vector=vector, updates=updates),
    *(st.sampled_from(Kind), st.booleans()),
    *(st.lists(vector_entries, max_size=5), st.lists(crafted_updates, max_size=5)),
)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.tuples(crafted, percent), min_size=1, max_size=8))
def test_whatever_a_peer_says_nothing_raises_and_the_node_stays_whole(said: list[tuple[bytes, int]]) -> None:
    a, _ = pair()
    now = 0.0
    held: dict[str, tuple[int, int]] = {}
    for data, wait in said:
        now += wait / 20
        a.receive_datagram(data, "at b", now)
        a.handle_timer(now)
        for datagram in a.datagrams_to_send(now):
            decode(datagram.data, SECRET)
        a._check()
        for event in told(a, ReplicaChanged):
            if event.state in ("discarded", "forgotten"):
                held.pop(event.endpoint, None)
        for endpoint, copy in copies(a).items():
            assert copy.held >= held.get(endpoint, (0, 0))
            held[endpoint] = copy.held


def test_an_update_whose_names_leave_no_room_is_passed_over_and_counted() -> None:
    small_datagrams = NodeSettings(datagram_bytes=818, burst_bytes=8180, replay_window=0)
    b = Node("b", DOMAIN, rng=random.Random(1), now=0.0, settings=small_datagrams)
    b.add_peer("a", "at a", 0.0)
    wide = update_of("a/0", 1, 0, 2, 3, url="\N{GREEK SMALL LETTER ALPHA}" * 256)
    wider = update_of("c/0", 1, 0, 2, 3, url="\N{SNOWMAN}" * 256)
    vector = [VectorEntry("a/0", 1, 1, 2), VectorEntry("c/0", 1, 1, 2)]
    b.receive_datagram(sent_by("a", Kind.ACK, vector=vector, updates=[wide, wider]), "at a", 0.0)
    b.receive_datagram(sent_by("a", Kind.SYN, complete=True), "at a", 0.0)
    out = b.datagrams_to_send(0.0)
    assert b.counters["updates_too_long"] == 1
    assert len(out) <= 2
    assert [update.endpoint for _, data in out for update in decode(data, SECRET).message.updates] == []
