"""What a peer is owed: the rest of what it has begun, else the smaller of delta and snapshot."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from transfers import LIFE, Case, debt_of, decoded, delta_of, keys, offered, parts_of, same, snapshot_of

from prefixroute.keys.keyset import NO_KEYS, Delta, KeyDelta
from prefixroute.keys.rice import encoded_bytes
from prefixroute.replication.transfer import EVERYTHING, MAX_STEPS, SKIPPED_S, Assembly, Ranges, cut, owed, size_bytes
from prefixroute.replication.wire import KEY_LIMIT, VectorEntry, Want
from prefixroute.replication.writer_set import LOG_BYTES, Change, OwnedSet, WriterSet

QUICK = settings(derandomize=True, deadline=None, max_examples=120)


def grown(versions: int, each: int = 10, anchor_stride: int = 1) -> WriterSet:
    """A set that gained `each` keys at every version."""
    held = WriterSet()
    for version in range(1, versions + 1):
        held.advance(version, KeyDelta(keys(*range((version - 1) * each, version * each)), NO_KEYS), anchor_stride)
    return held


class Owed(NamedTuple):
    """A change that brings a receiver up to date, and the ranges of it that are owed."""

    change: Change
    ranges: Ranges


def due(held: WriterSet, incarnation: int, sender: VectorEntry, now: float = 100.0) -> Owed:
    """The one change that is owed by a holder that has something for the sender."""
    (found,) = owed(held, incarnation, sender, now)
    return Owed(*found)


def entry(version: int, incarnation: int = LIFE, want: Want | None = None) -> VectorEntry:
    return VectorEntry("a/0", incarnation, 1, version, want=want)


def test_who_holds_nothing_or_another_life_is_owed_a_snapshot() -> None:
    for sender in (VectorEntry("a/0", 0, 0), entry(0), entry(3, LIFE - 1), entry(9, LIFE - 1)):
        change, ranges = due(grown(4), LIFE, sender)
        assert (change.since, change.version, len(change.delta.added), ranges) == (0, 4, 40, EVERYTHING)


@pytest.mark.parametrize("behind", [1, 2, 3, MAX_STEPS])
def test_who_is_a_little_behind_is_owed_the_owners_own_steps(behind: int) -> None:
    found = owed(grown(20), LIFE, entry(20 - behind), 100.0)
    first = 20 - behind
    assert [(change.since, change.version) for change, _ in found] == [(i, i + 1) for i in range(first, 20)]
    assert all((len(change.delta.added), ranges) == (10, EVERYTHING) for change, ranges in found)


@pytest.mark.parametrize("behind", [MAX_STEPS + 1, 12])
def test_who_is_further_behind_is_owed_the_net_delta(behind: int) -> None:
    change, ranges = due(grown(20), LIFE, entry(20 - behind))
    assert (change.since, change.version, len(change.delta.added), ranges) == (20 - behind, 20, 10 * behind, EVERYTHING)


def test_steps_that_take_more_than_a_snapshot_give_way_to_their_net_change() -> None:
    held = grown(2, 30)
    held.advance(3, KeyDelta(keys(*range(1000, 1060)), NO_KEYS))
    held.advance(4, KeyDelta(NO_KEYS, keys(*range(1000, 1060))))
    change, _ = due(held, LIFE, entry(2))
    assert (change.since, change.version, len(change.delta.added), len(change.delta.removed)) == (2, 4, 0, 0)


def test_who_is_at_the_first_version_holds_nothing_and_is_owed_a_snapshot_at_once() -> None:
    held = WriterSet()
    held.replace(7, keys(*range(100)), now=50.0)
    assert due(held, LIFE, entry(1), 50.1).change.since == 0


def test_who_is_further_behind_than_the_log_is_owed_a_snapshot() -> None:
    held = grown(2)
    held.advance(3, KeyDelta(keys(*range(10**6, 10**6 + LOG_BYTES // 8)), NO_KEYS))
    change, _ = due(held, LIFE, entry(2))
    assert (change.since, change.version) == (0, 3)


@pytest.mark.parametrize("way", ["steps", "life"])
def test_who_is_at_a_version_that_was_just_skipped_is_left_to_others(way: str) -> None:
    held = WriterSet()
    if way != "life":
        held.replace(2, keys(*range(100)), now=1.0)
        held.advance(5, KeyDelta(keys(200), NO_KEYS), now=50.0)
        held.advance(6, KeyDelta(keys(300), NO_KEYS), now=50.5)
    else:
        held.replace(6, keys(*range(102)), now=50.0)
    for version in (3, 4):
        assert owed(held, LIFE, entry(version), 50.0 + 0.99 * SKIPPED_S) == []
        change, ranges = due(held, LIFE, entry(version), 50.0 + SKIPPED_S)
        assert (change.since, change.version, ranges) == (0, 6, EVERYTHING)
    # Where it knows the version, or the sender has nothing, there is nobody to leave it to.
    if way != "life":
        assert due(held, LIFE, entry(5), 50.5).change.since == 5
        assert [change.since for change, _ in owed(held, LIFE, entry(2), 50.5)] == [2, 5]
    assert due(held, LIFE, entry(0), 50.0).change.since == 0
    assert due(held, LIFE, entry(3, LIFE - 1), 50.0).change.since == 0
    wanted = Want(LIFE, 0, 6, [(7, 9)])
    assert due(held, LIFE, entry(3, want=wanted), 50.0) == (held.snapshot(), ((7, 9),))


def test_an_owner_leaves_nobody_to_others() -> None:
    owner = OwnedSet()
    for i in range(40):
        owner.gather(Delta({i}, set()))
        owner.publish(10.0 + i / 100)
    assert due(owner, LIFE, entry(3), 10.4).change.since == 3
    owner.gather(Delta(set(range(1000, 1000 + LOG_BYTES // 16)), set()))
    owner.publish(10.41)
    assert due(owner, LIFE, entry(3), 10.42).change.since == 0


def coded_bytes(change: Change) -> int:
    part, end = cut(debt_of(change, url="", contact=""), 0, KEY_LIMIT, 10**6)
    assert part is not None
    assert end == KEY_LIMIT
    return len(decoded(part).added) + len(decoded(part).removed)


@QUICK
@given(st.integers(0, 400), st.integers(0, 400), st.integers(0, 400))
@example(100, 99, 0)
@example(1, 0, 400)
def test_the_smaller_of_delta_and_snapshot_is_owed(stay: int, go: int, come: int) -> None:
    assume(go or come)
    rng = random.Random(stay + 1000 * go)
    drawn = rng.sample(range(KEY_LIMIT), stay + go + come)
    held = WriterSet()
    held.replace(2, keys(*drawn[: stay + go]))
    held.advance(3, KeyDelta(keys(*drawn[stay + go :]), keys(*drawn[stay : stay + go])))
    delta, snapshot = held.change(2, 3), held.snapshot(2)
    assert delta is not None
    change, _ = due(held, LIFE, entry(2))
    assert change.since == (2 if size_bytes(delta) <= size_bytes(snapshot) else 0)
    # The sizes that are compared are close bounds of what is then sent.
    for either in (delta, snapshot):
        assert coded_bytes(either) <= size_bytes(either) <= 1.25 * coded_bytes(either) + 16
    assert coded_bytes(change) <= 1.25 * min(coded_bytes(delta), coded_bytes(snapshot)) + 16


def test_a_size_is_a_bound_of_the_code_at_either_universe() -> None:
    case = delta_of(set(range(1000)), set(range(0, 1000, 2)) | {5000})
    assert size_bytes(case.change) == encoded_bytes(KEY_LIMIT, 1) + encoded_bytes(1000, 500)
    assert size_bytes(snapshot_of(set(range(9))).change) == encoded_bytes(KEY_LIMIT, 9)


def test_who_has_the_frozen_snapshot_is_not_sent_it_again() -> None:
    held = grown(1, 100)
    assert due(held, LIFE, entry(0))[0].version == 1
    held.advance(2, KeyDelta(NO_KEYS, keys(*range(100))))
    change, _ = due(held, LIFE, entry(1))
    assert (change.since, change.version, len(change.delta.added)) == (0, 2, 0)


def test_a_snapshot_that_was_begun_is_owed_in_what_is_missing_while_the_owner_changes() -> None:
    held = grown(3)
    begun, _ = due(held, LIFE, entry(0))
    held.advance(4, KeyDelta(keys(1000), keys(0)))
    missing = [(17, 20), (99, KEY_LIMIT)]
    change, ranges = due(held, LIFE, entry(0, want=Want(LIFE, 0, 3, missing)))
    assert change is begun
    assert ranges == tuple(missing)


@pytest.mark.parametrize("version", range(2, 10))
def test_a_snapshot_that_another_holder_began_is_made_again_from_the_log(version: int) -> None:
    rng = random.Random(version)
    held, states = grown(1, 100), dict[int, tuple[list[int], int, int]]()
    for at in range(2, 10):
        gone = rng.sample(held.keys.tolist(), 7)
        held.advance(
            at, KeyDelta(keys(*sorted(rng.sample(range(10**6, 10**7), 5))), keys(*sorted(gone))), 2 ** (at % 3)
        )
        states[at] = (held.keys.tolist(), held.checksum, held.anchor_stride)
    change, ranges = due(held, LIFE, entry(0, want=Want(LIFE, 0, version, [(44, KEY_LIMIT)])))
    assert (change.since, change.version, ranges) == (0, version, ((44, KEY_LIMIT),))
    assert (change.delta.added.tolist(), change.checksum, change.anchor_stride) == states[version]
    assert held.snapshot_at(version) is change


def test_a_delta_that_was_begun_is_owed_in_what_is_missing() -> None:
    change, ranges = due(grown(9), LIFE, entry(2, want=Want(LIFE, 2, 7, [(44, KEY_LIMIT)])))
    assert (change.since, change.version, ranges) == (2, 7, ((44, KEY_LIMIT),))


@pytest.mark.parametrize("versions", [(LIFE - 1, 2, 7), (LIFE, 0, 12), (LIFE, 2, 12), (LIFE, 7, 2), (LIFE, 7, 7)])
def test_a_transfer_that_cannot_be_served_gives_way_to_what_is_due(versions: tuple[int, int, int]) -> None:
    wanted = entry(2, want=Want(*versions, [(44, KEY_LIMIT)]))
    found = owed(grown(9), LIFE, wanted, 100.0)
    assert [(change.since, change.version, ranges) for change, ranges in found] == [
        (version, version + 1, EVERYTHING) for version in range(2, 9)
    ]


@pytest.mark.parametrize("since", [0, 3])
def test_the_anchor_stride_travels_with_delta_and_snapshot(since: int) -> None:
    held = grown(4, 200)
    held.advance(5, KeyDelta(keys(9000), keys(3)), 4)
    change, _ = due(held, LIFE, entry(since)) if not since else (held.change(since, 5) or held.snapshot(), EVERYTHING)
    assert (change.since, change.anchor_stride) == (since, 4)
    case = Case(change, set(range(600)) if since else set(), set(held.keys.tolist()))
    parts = parts_of(case, [300])
    assert [part.anchor_stride for part in parts] == [4] * len(parts)
    assembly = Assembly(parts[0], 0.0)
    done = [offered(assembly, part, case.before) for part in parts]
    assert same(done[-1], change)


@QUICK
@given(st.integers(1, 12), st.integers(0, 14), st.none() | st.tuples(st.integers(0, 12), st.integers(1, 14)))
def test_what_is_owed_always_applies_to_what_the_sender_holds(
    versions: int, held: int, begun: tuple[int, int] | None
) -> None:
    assume(held < versions)
    writer = grown(versions)
    want = None if begun is None else Want(LIFE, *begun, [(5, 9)])
    found = [change for change, _ in owed(writer, LIFE, entry(held, want=want), 100.0)]
    change = found[0]
    if want is not None and (change.since, change.version) == (want.since, want.version):
        return
    assert change.since in (0, held)
    assert held < found[-1].version <= versions
    assert all(one.version == next_one.since for one, next_one in pairwise(found))
