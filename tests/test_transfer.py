"""Transfers: parts never exceed their room, together they are the change, in whatever order they come."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from prefixroute.digest import (
    KEY_BYTES,
    KEY_LIMIT,
    Keys,
    Update,
    VectorEntry,
    Want,
    checksum,
    encode_part,
    unpack_keys,
)
from prefixroute.replica import LOG_BYTES, NO_KEYS, Change, WriterSet
from prefixroute.transfer import MIN_KEYS_A_PART, UPDATE_OVERHEAD_BYTES, Assembly, Debt, cut, least_room, owed

QUICK = settings(derandomize=True, deadline=None, max_examples=100)
LIFE = 5

ends = st.sampled_from([0, 1, KEY_LIMIT - 1, KEY_LIMIT // 2])
key_sets = st.sets(ends | st.integers(0, KEY_LIMIT - 1) | st.integers(0, 300), max_size=120)


def keys(*values: int) -> Keys:
    return np.array(sorted(values), np.uint64)


def change_of(added: set[int], removed: set[int], since: int = 3) -> Change:
    return Change(since, 9, keys(*added), keys(*removed - added), checksum(keys(*added)))


def debt_of(change: Change, endpoint: str = "a/0", url: str = "http://a", cursor: int = 0) -> Debt:
    return Debt(endpoint, LIFE, url, change, cursor)


def decoded(part: bytes) -> Update:
    return msgspec.msgpack.decode(part, type=Update)


def parts_of(debt: Debt, rooms: list[int]) -> list[Update]:
    """Cut a whole debt, each part with the next of `rooms` in turn; rooms that are too small are passed over."""
    parts, lower, turn, refused = [], debt.cursor, 0, 0
    while lower < KEY_LIMIT:
        room = rooms[turn % len(rooms)]
        part, upper = cut(debt, lower, room)
        turn += 1
        if part is None:
            assert upper == lower
            refused += 1
            assert refused < len(rooms), "the largest room takes a part"
            continue
        refused = 0
        assert len(part) <= room
        assert lower < upper <= KEY_LIMIT
        update = decoded(part)
        assert (update.lower, update.upper) == (lower, upper)
        parts.append(update)
        lower = upper
    return parts


def offered(assembly: Assembly, update: Update, now: float = 0.0) -> Change | None:
    added = unpack_keys(update.added, update.lower, update.upper)
    removed = unpack_keys(update.removed, update.lower, update.upper)
    return assembly.offer(update.lower, update.upper, added, removed, now)


def same(one: Change | None, other: Change) -> bool:
    return (
        one is not None
        and (one.since, one.version, one.checksum) == (other.since, other.version, other.checksum)
        and np.array_equal(one.added, other.added)
        and np.array_equal(one.removed, other.removed)
    )


def assembly_of(change: Change) -> Assembly:
    return Assembly(LIFE, change.since, change.version, change.checksum, 0.0)


# --- cutting -----------------------------------------------------------------------------------------------


@QUICK
@given(
    key_sets,
    key_sets,
    st.integers(-50, 2000),
    st.integers(0, KEY_LIMIT - 1) | ends,
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=80),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=256),
)
def test_a_part_fits_any_room_or_is_refused(
    added: set[int], removed: set[int], room: int, lower: int, endpoint: str, url: str
) -> None:
    debt = debt_of(change_of(added, removed), endpoint, url)
    part, upper = cut(debt, lower, room)
    if part is not None:
        assert len(part) <= room
        assert lower < upper <= KEY_LIMIT
    else:
        assert upper == lower
        assert room < UPDATE_OVERHEAD_BYTES + len(endpoint.encode()) + len(url.encode()) + MIN_KEYS_A_PART * KEY_BYTES


def test_the_overhead_bounds_the_largest_fields() -> None:
    endpoint, url = "x" * 80, "u" * 256
    n = 8000
    update = Update(
        *(endpoint, 2**63 - 1, 2**63 - 1, 2**63 - 1, 2**64 - 1, KEY_LIMIT - 1, KEY_LIMIT),
        *(bytes(n), bytes(n), url),
    )
    assert len(encode_part(update)) <= UPDATE_OVERHEAD_BYTES + len(endpoint) + len(url) + 2 * n


def test_the_least_room_takes_a_part_of_any_debt() -> None:
    change = change_of(set(range(5000)), set(range(9000, 14000)))
    part, upper = cut(debt_of(change, "x" * 80, "u" * 256), 0, least_room())
    assert part is not None
    assert upper == MIN_KEYS_A_PART
    assert cut(debt_of(change, "x" * 80, "u" * 256), 0, least_room() - 1) == (None, 0)


@QUICK
@given(key_sets, key_sets, st.lists(st.integers(0, 900), min_size=1, max_size=5), st.integers(0, KEY_LIMIT - 1) | ends)
def test_the_parts_together_are_the_change_from_the_cursor_on(
    added: set[int], removed: set[int], rooms: list[int], cursor: int
) -> None:
    change = change_of(added, removed)
    parts = parts_of(debt_of(change, cursor=cursor), [*rooms, 400])
    assert parts[0].lower == cursor
    assert parts[-1].upper == KEY_LIMIT
    assert b"".join(part.added for part in parts) == b"".join(
        key.to_bytes(6, "little") for key in change.added.tolist() if key >= cursor
    )
    assert b"".join(part.removed for part in parts) == b"".join(
        key.to_bytes(6, "little") for key in change.removed.tolist() if key >= cursor
    )
    for part in parts:
        assert (part.endpoint, part.incarnation, part.url) == ("a/0", LIFE, "http://a")
        assert (part.since, part.version, part.checksum) == (change.since, change.version, change.checksum)


def test_room_is_counted_in_bytes_not_in_characters() -> None:
    debt = debt_of(
        change_of(set(range(0, 10**6, 97)), set(range(1, 10**6, 97))), "\N{SNOWMAN}" * 80, "\N{SNOWMAN}" * 256
    )
    for room in range(1100, 1500, 7):
        part, _ = cut(debt, 0, room)
        assert part is None or len(part) <= room
    assert part is not None


def test_a_part_uses_the_room_it_is_given() -> None:
    debt = debt_of(change_of(set(range(0, 10**6, 97)), set()))
    for room in (400, 1100, 60000):
        part, _ = cut(debt, 0, room)
        assert part is not None
        assert len(part) > room - UPDATE_OVERHEAD_BYTES - KEY_BYTES


# --- assembling --------------------------------------------------------------------------------------------


@QUICK
@given(
    key_sets,
    key_sets,
    st.lists(st.lists(st.integers(200, 700), min_size=1, max_size=3), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
def test_parts_in_any_order_repeated_and_cut_at_several_borders_make_the_change(
    added: set[int], removed: set[int], cuts: list[list[int]], rng: random.Random
) -> None:
    change = change_of(added, removed)
    parts = [part for rooms in cuts for part in parts_of(debt_of(change), rooms)]
    parts += rng.sample(parts, rng.randrange(len(parts) + 1))
    rng.shuffle(parts)
    assembly = assembly_of(change)
    covered: set[tuple[int, int]] = set()
    for part in parts:
        whole = offered(assembly, part)
        covered.add((part.lower, part.upper))
        at = 0
        while reach := [upper for lower, upper in covered if lower <= at < upper]:
            at = max(reach)
        assert assembly.cursor == at
        assert (whole is not None) is (at == KEY_LIMIT)
        if whole is not None:
            assert same(whole, change)


@QUICK
@given(st.sets(st.integers(0, KEY_LIMIT - 1), min_size=60, max_size=120), st.data())
def test_a_missing_part_is_all_that_holds_the_change_up(added: set[int], data: st.DataObject) -> None:
    change = change_of(added, set())
    parts = parts_of(debt_of(change), [220])
    assume(len(parts) > 2)
    missing = data.draw(st.sampled_from(parts))
    assembly = assembly_of(change)
    for part in parts:
        if part is not missing:
            assert offered(assembly, part) is None
    assert assembly.cursor == missing.lower
    # The rest is asked for from the cursor on; its borders are others, and only what was missing counts.
    rest = parts_of(debt_of(change, cursor=assembly.cursor), [300])
    assert same(offered(assembly, rest[0]), change)


def test_only_a_part_with_something_new_keeps_a_transfer_from_stalling() -> None:
    assembly = assembly_of(change_of(set(range(50)), set()))
    assembly.offer(0, 10, keys(*range(10)), NO_KEYS, 1.0)
    assert assembly.touched_at == 1.0
    assembly.offer(0, 10, keys(*range(10)), NO_KEYS, 2.0)
    assembly.offer(3, 7, keys(*range(3, 7)), NO_KEYS, 3.0)
    assert assembly.touched_at == 1.0
    assembly.offer(5, 11, keys(*range(5, 11)), NO_KEYS, 4.0)
    assert (assembly.touched_at, assembly.cursor) == (4.0, 11)


@pytest.mark.parametrize(("lower", "upper"), [(5, 5), (9, 3)])
def test_a_part_of_no_range_is_nothing(lower: int, upper: int) -> None:
    assembly = assembly_of(change_of({1}, set()))
    assert assembly.offer(lower, upper, NO_KEYS, NO_KEYS, 1.0) is None
    assert (assembly.cursor, assembly.touched_at) == (0, 0.0)


# --- what is owed ------------------------------------------------------------------------------------------


def grown(versions: int, each: int = 10) -> WriterSet:
    """A set that gained `each` keys at every version."""
    held = WriterSet()
    for version in range(1, versions + 1):
        held.advance(version, keys(*range((version - 1) * each, version * each)), NO_KEYS)
    return held


def entry(version: int, incarnation: int = LIFE, want: Want | None = None) -> VectorEntry:
    return VectorEntry("a/0", incarnation, 1, version, 0, None, want)


def test_who_holds_nothing_or_another_life_is_owed_a_snapshot() -> None:
    for sender in (VectorEntry("a/0", 0, 0), entry(0), entry(3, LIFE - 1), entry(9, LIFE - 1)):
        change, cursor = owed(grown(4), LIFE, sender)
        assert (change.since, change.version, len(change.added), cursor) == (0, 4, 40, 0)


@pytest.mark.parametrize("behind", [1, 2, 3])
def test_who_is_behind_is_owed_the_delta_since(behind: int) -> None:
    change, cursor = owed(grown(8), LIFE, entry(8 - behind))
    assert (change.since, change.version, len(change.added), cursor) == (8 - behind, 8, 10 * behind, 0)


def test_who_is_further_behind_than_the_log_is_owed_a_snapshot() -> None:
    held = grown(2)
    held.advance(3, keys(*range(10**6, 10**6 + LOG_BYTES // 8)), NO_KEYS)
    change, _ = owed(held, LIFE, entry(2))
    assert (change.since, change.version) == (0, 3)


def test_a_delta_larger_than_the_set_gives_way_to_a_snapshot() -> None:
    held = grown(1, 100)
    held.advance(2, NO_KEYS, keys(*range(50)))
    assert owed(held, LIFE, entry(1))[0].since == 1
    held.advance(3, NO_KEYS, keys(50))
    assert owed(held, LIFE, entry(1))[0].since == 0


def test_who_has_the_frozen_snapshot_is_not_sent_it_again() -> None:
    held = grown(1, 100)
    assert owed(held, LIFE, entry(0))[0].version == 1
    held.advance(2, NO_KEYS, keys(*range(100)))
    change, _ = owed(held, LIFE, entry(1))
    assert (change.since, change.version, len(change.added)) == (0, 2, 0)


def test_a_snapshot_that_was_begun_is_owed_from_the_cursor_on_while_the_owner_changes() -> None:
    held = grown(3)
    begun, _ = owed(held, LIFE, entry(0))
    held.advance(4, keys(1000), keys(0))
    change, cursor = owed(held, LIFE, entry(0, want=Want(LIFE, 0, 3, 17)))
    assert change is begun
    assert cursor == 17


def test_a_delta_that_was_begun_is_owed_from_the_cursor_on() -> None:
    change, cursor = owed(grown(9), LIFE, entry(2, want=Want(LIFE, 2, 7, 44)))
    assert (change.since, change.version, cursor) == (2, 7, 44)


@pytest.mark.parametrize("want", [Want(LIFE - 1, 2, 7, 44), Want(LIFE, 0, 7, 44), Want(LIFE, 2, 12, 44)])
def test_a_transfer_that_cannot_be_served_gives_way_to_another(want: Want) -> None:
    change, cursor = owed(grown(9), LIFE, entry(2, want=want))
    assert (change.since, change.version, cursor) == (2, 9, 0)


@QUICK
@given(st.integers(1, 12), st.integers(0, 14), st.none() | st.tuples(st.integers(0, 12), st.integers(1, 14)))
def test_what_is_owed_always_applies_to_what_the_sender_holds(
    versions: int, held: int, begun: tuple[int, int] | None
) -> None:
    assume(held < versions)
    writer = grown(versions)
    want = None if begun is None else Want(LIFE, *begun, 5)
    change, _ = owed(writer, LIFE, entry(held, want=want))
    if want is not None and (change.since, change.version) == (want.since, want.version):
        return
    assert change.since in (0, held)
    assert held < change.version <= versions
