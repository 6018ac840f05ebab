"""Changes of an owner's set as tests of transfers use them, and what a part must carry by definition."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
from hypothesis import strategies as st

from prefixroute.keys.keyset import KeyDelta, Keys, checksum
from prefixroute.keys.rice import encode_sorted
from prefixroute.replication.transfer import EVERYTHING, Assembly, Debt, cut, decode_keys
from prefixroute.replication.wire import KEY_LIMIT, Update
from prefixroute.replication.writer_set import Change, WriterSet

LIFE = 5

keys_at = st.sampled_from([0, 1, KEY_LIMIT - 1, KEY_LIMIT // 2]) | st.integers(0, KEY_LIMIT - 1) | st.integers(0, 300)
key_sets = st.sets(keys_at, max_size=120)


def keys(*values: int) -> Keys:
    return np.array(sorted(values), np.uint64)


class Case(NamedTuple):
    """A change as its holder makes it, and what it is between."""

    change: Change
    before: set[int]
    after: set[int]


def case_of(states: list[set[int]], since: int, until: int, anchor_stride: int = 1) -> Case:
    """The change between two of an owner's states 1, 2, ...; from nothing if `since` is 0."""
    held = WriterSet()
    held.replace(1, keys(*states[0]), anchor_stride)
    for version, (before, after) in enumerate(pairwise(states), 2):
        if since == 0 and version > until:
            held.snapshot()
        held.advance(version, KeyDelta(keys(*after - before), keys(*before - after)), anchor_stride)
    change = held.snapshot() if since == 0 else held.change(since, until)
    assert change is not None
    assert (change.since, change.version) == (since, until)
    return Case(change, states[since - 1] if since else set(), states[until - 1])


def snapshot_of(after: set[int]) -> Case:
    return case_of([after], 0, 1)


def delta_of(before: set[int], after: set[int]) -> Case:
    return case_of([before, after], 1, 2)


def debt_of(change: Change, endpoint: str = "a/0", url: str = "http://a", contact: str = "a:7", zone: str = "") -> Debt:
    return Debt(endpoint, LIFE, change, EVERYTHING, url, contact, zone=zone)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any change of an owner that has, or has not, moved on since; states that differ in much or in little."""
    states = [draw(key_sets)]
    for _ in range(draw(st.integers(1, 4))):
        states.append(draw(key_sets) if draw(st.booleans()) else states[-1] ^ draw(st.sets(keys_at, max_size=9)))
    until = draw(st.integers(2, len(states)))
    return case_of(states, draw(st.integers(0, until - 1)), until, draw(st.integers(1, 32)))


def decoded(part: bytes) -> Update:
    return msgspec.msgpack.decode(part, type=Update)


def within(values: set[int], lower: int, upper: int) -> list[int]:
    return sorted(value for value in values if lower <= value < upper)


def check_part(part: bytes, case: Case, lower: int, upper: int) -> Update:
    """Hold a part against the definition of what it must carry, and against what it decodes to."""
    update = decoded(part)
    assert (update.lower, update.upper or KEY_LIMIT) == (lower, upper)
    added, removed = within(case.after - case.before, lower, upper), within(case.before - case.after, lower, upper)
    inside = within(case.before, lower, upper)
    assert update.added == encode_sorted(keys(*[key - lower for key in added]), upper - lower)
    assert update.removed == encode_sorted(keys(*[inside.index(key) for key in removed]), len(inside))
    given_back = [array.tolist() for array in decode_keys(update, keys(*case.before))]
    assert given_back == [added, removed]
    change = case.change
    mine = (update.since, update.version, update.checksum, update.anchor_stride)
    assert mine == (change.since, change.version, checksum(keys(*case.after)), change.anchor_stride)
    return update


def parts_of(case: Case, rooms: list[int], ranges: tuple[tuple[int, int], ...] = EVERYTHING) -> list[Update]:
    """Cut the ranges of a change, each part with the next of `rooms` in turn; too small ones are passed over."""
    parts, turn, refused, debt = [], 0, 0, debt_of(case.change)
    for start, upper in ranges:
        lower = start
        while lower < upper:
            room = rooms[turn % len(rooms)]
            turn += 1
            part, end = cut(debt, lower, upper, room)
            if part is None:
                assert end == lower
                refused += 1
                assert refused < len(rooms), "the largest room takes a part"
                continue
            refused = 0
            assert len(part) <= room
            assert lower < end <= upper
            parts.append(check_part(part, case, lower, end))
            lower = end
    return parts


def offered(assembly: Assembly, update: Update, held: set[int], now: float = 0.0) -> Change | None:
    arrival = assembly.offer(update.lower, update.upper or KEY_LIMIT, decode_keys(update, keys(*held)), now)
    return arrival.change if arrival is not None else None


def same(one: Change | None, other: Change) -> bool:
    return (
        one is not None
        and (one.since, one.version, one.checksum, one.anchor_stride)
        == (other.since, other.version, other.checksum, other.anchor_stride)
        and np.array_equal(one.delta.added, other.delta.added)
        and np.array_equal(one.delta.removed, other.delta.removed)
    )


def assembly_of(change: Change) -> Assembly:
    head = (change.since, change.version, change.checksum, change.anchor_stride)
    return Assembly(Update("a/0", LIFE, *head, 0, 0, b"", b""), 0.0)
