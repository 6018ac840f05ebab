"""Updates arrive: what is applied, what is put together, what discards a copy, and the bounds of what is kept."""

from __future__ import annotations

import random

import pytest
from network import DOMAIN, copies, only, pair
from said import array, holder_of, sent_by, told, update_of

from prefixroute import DatagramRejected, Node, NodeSettings
from prefixroute.keys.keyset import checksum
from prefixroute.keys.rice import encode_sorted
from prefixroute.replication.wire import KEY_LIMIT, MARK_MASK, Kind, Update, VectorEntry, Want, decode

SECRET = DOMAIN.secret


@pytest.mark.parametrize(
    "bad",
    [
        update_of("a/0", 1, 0, 2, added=b"\1\0\0"),
        update_of("a/0", 1, 0, 2, 3, removed=encode_sorted(array(0), 1)),
        update_of("a/0", 1, 0, 2, lower=9, upper=9, added=b""),
        update_of("a/0", 1, 0, 2, lower=9, upper=3, added=b""),
        update_of("a/0", 1, 0, 2, lower=5, upper=9, added=encode_sorted(array(4), 5)),
    ],
)
def test_an_update_with_keys_that_cannot_be_is_refused_and_the_rest_of_the_message_taken(bad: Update) -> None:
    _, b = pair()
    vector = [VectorEntry("a/0", 1, 1, 2), VectorEntry("c/0", 1, 1, 2)]
    b.receive_datagram(
        sent_by("a", Kind.ACK, vector=vector, updates=[bad, update_of("c/0", 1, 0, 2, 3, 9)]), "at a", 0.0
    )
    assert [event.kind for event in told(b, DatagramRejected)] == ["keys"]
    assert {endpoint: copy.held for endpoint, copy in copies(b).items()} == {"a/0": (1, 0), "c/0": (1, 2)}
    b._check()


@pytest.mark.parametrize(
    ("added", "ranks", "after"),
    [((3,), (), (3, 9)), ((3, 99), (1,), (3, 99)), ((), (0,), (3,)), ((4,), (), (3, 9)), ((), (0, 1), (3,))],
)
def test_a_delta_that_does_not_fit_what_is_held_discards_the_copy(
    added: tuple[int, ...], ranks: tuple[int, ...], after: tuple[int, ...]
) -> None:
    b = holder_of(3, 9)
    bad = update_of("a/0", 1, 2, 3, *added, removed=encode_sorted(array(*ranks), 2), checksum=checksum(array(*after)))
    b.receive_datagram(sent_by("a", Kind.ACK, updates=[bad]), "at a", 0.0)
    assert (copies(b)["a/0"].held, b.counters["checksum_mismatches"]) == ((1, 0), 1)
    assert len(copies(b)["a/0"].keys) == 0
    b._check()


def test_a_delta_that_would_hold_a_key_twice_is_seen_even_where_the_checksum_is_right() -> None:
    b = holder_of(3, 9)
    twice = (checksum(array(3, 9)) + checksum(array(3))) % 2**64
    b.receive_datagram(sent_by("a", Kind.ACK, updates=[update_of("a/0", 1, 2, 3, 3, checksum=twice)]), "at a", 0.0)
    assert (copies(b)["a/0"].held, b.counters["checksum_mismatches"]) == ((1, 0), 1)
    b._check()


def test_a_delta_that_fits_is_applied_and_a_snapshot_that_does_not_sum_up_is_discarded() -> None:
    b = holder_of(3, 9)
    good = update_of(
        "a/0", 1, 2, 3, 99, removed=encode_sorted(array(0), 2), checksum=checksum(array(9, 99)), anchor_stride=8
    )
    b.receive_datagram(sent_by("a", Kind.ACK, updates=[good]), "at a", 0.0)
    digest = b.digests()["a/0"]
    assert (digest.version, digest.every, digest.keys.tolist()) == (3, 8, [9, 99])
    b.receive_datagram(sent_by("a", Kind.ACK, updates=[update_of("a/0", 1, 0, 4, 7, checksum=1)]), "at a", 0.0)
    assert (copies(b)["a/0"].held, b.counters["checksum_mismatches"]) == ((1, 0), 1)
    b._check()


def test_ranks_beyond_what_is_held_say_that_another_set_is_held() -> None:
    b = holder_of(3, 9)
    bad = update_of("a/0", 1, 2, 3, removed=encode_sorted(array(2), 3))
    b.receive_datagram(sent_by("a", Kind.ACK, updates=[bad]), "at a", 0.0)
    assert [event.kind for event in told(b, DatagramRejected)] == ["keys"]
    assert (copies(b)["a/0"].held, b.counters["checksum_mismatches"]) == ((1, 0), 1)
    b._check()


def test_a_torn_snapshot_costs_a_copy_nothing() -> None:
    b = holder_of(3, 9)
    b.receive_datagram(sent_by("a", Kind.ACK, updates=[update_of("a/0", 1, 0, 3, added=b"torn")]), "at a", 0.0)
    assert (copies(b)["a/0"].held, copies(b)["a/0"].keys.keys.tolist()) == ((1, 2), [3, 9])
    b._check()


def test_a_transfer_that_was_overtaken_is_no_longer_wanted() -> None:
    _, b = pair()
    vector, part = [VectorEntry("a/0", 1, 1, 5)], update_of("a/0", 1, 0, 5, 3, upper=100)
    b.receive_datagram(sent_by("a", Kind.ACK, vector=vector, updates=[part]), "at a", 0.0)
    b.handle_timer(0.0)
    (entry,) = decode(only(b, 0.0), SECRET).message.vector
    assert (entry.version, entry.want) == (0, Want(1, 0, 5, [(100, KEY_LIMIT)]))
    b.receive_datagram(sent_by("a", Kind.ACK, updates=[update_of("a/0", 1, 0, 9, 3, 9)]), "at a", 0.5)
    b.handle_timer(1.0)
    (entry,) = decode(only(b, 1.0), SECRET).message.vector
    assert (entry.version, entry.want) == (9, None)


def test_a_transfer_gives_way_to_another_only_when_it_stalls_or_a_new_life_begins() -> None:
    _, b = pair()
    vector = [VectorEntry("a/0", 1, 1, 5)]

    def wanted(now: float, incarnation: int, version: int, lower: int, upper: int) -> tuple[int, int, int]:
        part = update_of("a/0", incarnation, 0, version, lower, lower=lower, upper=upper)
        b.receive_datagram(sent_by("a", Kind.ACK, vector=vector, updates=[part]), "at a", now)
        assembly = copies(b)["a/0"].assembly
        assert assembly is not None
        return assembly.incarnation, assembly.version, assembly.missing()[0][0]

    assert wanted(0.0, 1, 5, 0, 10) == (1, 5, 10)
    assert wanted(0.9, 1, 6, 0, 20) == (1, 5, 10)
    assert wanted(0.9, 1, 5, 10, 30) == (1, 5, 30)
    assert wanted(1.8, 1, 6, 0, 20) == (1, 5, 30)
    assert wanted(2.0, 1, 6, 0, 20) == (1, 6, 20)
    assert wanted(2.0, 2, 1, 0, 5) == (2, 1, 5)
    assert wanted(2.1, 1, 6, 20, 25) == (2, 1, 5)


# --- marks and bounds --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("teller", "discarded"), [("a", True), ("c", False)])
def test_only_the_owners_mark_discards_a_copy(teller: str, discarded: bool) -> None:
    b = holder_of(3, 9)
    b.add_peer("c", "at c", 0.0)
    right = checksum(array(3, 9)) & MARK_MASK
    for version, mark in ((2, right), (1, right ^ 1), (3, right ^ 1)):
        word = VectorEntry("a/0", 1, 2, version, mark)
        b.receive_datagram(sent_by(teller, Kind.ACK, vector=[word]), f"at {teller}", 0.1)
        assert copies(b)["a/0"].held == (1, 2)
    b.receive_datagram(sent_by(teller, Kind.ACK, vector=[VectorEntry("a/0", 1, 2, 2, right ^ 1)]), f"at {teller}", 0.2)
    assert copies(b)["a/0"].held == ((1, 0) if discarded else (1, 2))
    assert b.counters["marks_differ"] == (not discarded)
    b._check()


def test_a_mark_is_the_low_half_word_of_the_checksum() -> None:
    b = holder_of(3, 9)
    b.handle_timer(0.0)
    (entry,) = decode(only(b, 0.0), SECRET).message.vector
    assert entry.mark == checksum(array(3, 9)) % 2**16


def bounded(**bounds: int) -> Node:
    b = Node("b", DOMAIN, rng=random.Random(1), now=0.0, settings=NodeSettings(replay_window=0, **bounds))  # type: ignore[arg-type]
    b.add_peer("a", "at a", 0.0)
    return b


def test_no_more_endpoints_are_kept_than_max_endpoints() -> None:
    b = bounded(max_endpoints=3)
    vector = [VectorEntry(f"a/{i}", 1, 1, 0) for i in range(9)]
    b.receive_datagram(sent_by("a", Kind.ACK, vector=vector), "at a", 0.0)
    assert set(copies(b)) == {"a/0", "a/1", "a/2"}
    assert b.counters["endpoints_refused"] == 6
    # Those that are there are heard as before.
    b.receive_datagram(sent_by("a", Kind.ACK, vector=[VectorEntry("a/2", 1, 7, 0)]), "at a", 0.0)
    assert copies(b)["a/2"].heartbeat == 7


@pytest.mark.parametrize("n", [20, 21])
def test_no_more_keys_of_an_endpoint_are_kept_than_max_keys(n: int) -> None:
    b = bounded(max_keys=20)
    vector = [VectorEntry("a/0", 1, 1, 2)]
    b.receive_datagram(
        sent_by("a", Kind.ACK, vector=vector, updates=[update_of("a/0", 1, 0, 2, *range(n))]), "at a", 0.0
    )
    assert len(copies(b)["a/0"].keys) == (n if n <= 20 else 0)
    assert b.counters["rejected_too_many_keys"] == (n > 20)


@pytest.mark.parametrize("n", [300, 301, 900])
def test_the_bound_holds_over_the_parts_of_a_transfer(n: int) -> None:
    b = bounded(max_keys=300)
    checks = {"checksum": checksum(array(*range(n)))}
    parts = [
        update_of("a/0", 1, 0, 2, *range(lower, min(upper or n, n)), lower=lower, upper=upper, **checks)
        for lower, upper in ((0, 100), (100, 200), (200, 0))
    ]
    # A part that comes again counts once.
    parts.insert(1, parts[0])
    vector = [VectorEntry("a/0", 1, 1, 2)]
    b.receive_datagram(sent_by("a", Kind.ACK, vector=vector, updates=parts), "at a", 0.0)
    assert len(copies(b)["a/0"].keys) == (n if n <= 300 else 0)
    assert copies(b)["a/0"].assembly is None
    assert b.counters["rejected_too_many_keys"] == (n > 300)
    b._check()


def test_parts_without_keys_do_not_pile_up() -> None:
    b = bounded(max_keys=300)
    vector = [VectorEntry("a/0", 1, 1, 2)]
    parts = [update_of("a/0", 1, 0, 2, lower=2 * i, upper=2 * i + 1) for i in range(2000)]
    most = 0
    for part in parts:
        b.receive_datagram(sent_by("a", Kind.ACK, vector=vector, updates=[part]), "at a", 0.0)
        assembly = copies(b)["a/0"].assembly
        most = max(most, len(assembly._parts) if assembly is not None else 0)
    assert 5 < most < 30
    assert b.counters["rejected_too_many_keys"] == 2000 // (most + 1)


@pytest.mark.parametrize(("removed", "fits"), [((), False), ((4,), True)])
def test_the_bound_holds_over_a_delta_and_counts_what_goes(removed: tuple[int, ...], fits: bool) -> None:
    b = bounded(max_keys=20)
    held = update_of("a/0", 1, 0, 2, *range(20))
    b.receive_datagram(sent_by("a", Kind.ACK, vector=[VectorEntry("a/0", 1, 1, 2)], updates=[held]), "at a", 0.0)
    after = [*(key for key in range(20) if key not in removed), 99]
    ranks = encode_sorted(array(*removed), 20)
    delta = update_of("a/0", 1, 2, 3, 99, removed=ranks, checksum=checksum(array(*after)))
    b.receive_datagram(sent_by("a", Kind.ACK, updates=[delta]), "at a", 0.0)
    assert copies(b)["a/0"].keys.keys.tolist() == (after if fits else list(range(20)))
    assert b.counters["rejected_too_many_keys"] == (not fits)
