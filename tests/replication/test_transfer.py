"""Transfers: parts never exceed their room, together they are the change, in whatever order they come."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transfers import (
    LIFE,
    Case,
    assembly_of,
    case_of,
    cases,
    check_part,
    debt_of,
    decoded,
    delta_of,
    keys,
    keys_at,
    offered,
    parts_of,
    same,
    snapshot_of,
    within,
)

from prefixroute import DecodeError
from prefixroute.keys.keyset import NO_KEYS, KeyDelta
from prefixroute.keys.rice import encode_sorted
from prefixroute.replication.transfer import (
    LEAST_KEY_BYTES,
    PART_KEYS,
    UPDATE_OVERHEAD_BYTES,
    cut,
    decode_keys,
    least_room,
)
from prefixroute.replication.wire import KEY_LIMIT, MAX_MISSING, Update, Want, encode_part

QUICK = settings(derandomize=True, deadline=None, max_examples=120)
borders = keys_at | st.just(KEY_LIMIT)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=80)
urls = st.text(st.characters(exclude_categories=["Cs"]), max_size=256)
contacts = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)
zones = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


# --- cutting -----------------------------------------------------------------------------------------------


@settings(QUICK, max_examples=250)
@given(cases(), borders, borders, st.integers(-50, 1500), names, urls, contacts, zones)
def test_a_part_fits_any_room_and_is_what_the_range_holds(
    case: Case, one: int, other: int, room: int, endpoint: str, url: str, contact: str, zone: str
) -> None:
    lower, upper = sorted((one, other))
    assume(lower < upper)
    part, end = cut(debt_of(case.change, endpoint, url, contact, zone), lower, upper, room)
    if part is None:
        addresses = url + contact + zone if case.change.since == 0 else ""
        assert end == lower
        assert room < UPDATE_OVERHEAD_BYTES + len((endpoint + addresses).encode()) + LEAST_KEY_BYTES
        return
    assert len(part) <= room
    assert lower < end <= upper
    update = check_part(part, case, lower, end)
    assert (update.endpoint, update.incarnation) == (endpoint, LIFE)
    told = (update.url, update.contact, update.zone)
    assert told == ((url, contact, zone) if case.change.since == 0 else ("", "", ""))


@pytest.mark.parametrize("seed", range(8))
def test_large_changes_fit_any_room_and_always_go_on(seed: int) -> None:
    rng = random.Random(seed)
    span = rng.choice([2**14, 2**17, 2**30, KEY_LIMIT])
    before, more = ({rng.randrange(span) for _ in range(3000)} for _ in range(2))
    gone = set(rng.sample(sorted(before), rng.choice([5, 300, len(before)])))
    case = delta_of(before, before - gone | more) if seed % 2 else snapshot_of(before)
    lower = 0
    while lower < KEY_LIMIT:
        debt = debt_of(case.change, "x" * 80, "u" * 256, "c" * 80, "z" * 40)
        room = least_room(True) + rng.randrange(900)
        part, end = cut(debt, lower, KEY_LIMIT, room)
        assert part is not None
        assert len(part) <= room
        assert end > lower
        check_part(part, case, lower, end)
        lower = end


def test_the_overhead_bounds_the_largest_fields() -> None:
    endpoint, url = "x" * 80, "u" * 256
    n = 70000
    update = Update(
        *(endpoint, 2**63 - 1, 2**63 - 1, 2**63 - 1, 2**64 - 1, 32, KEY_LIMIT - 1, KEY_LIMIT),
        *(bytes(n), bytes(n), url, endpoint, "z" * 40),
    )
    assert len(encode_part(update)) <= UPDATE_OVERHEAD_BYTES + 2 * len(endpoint) + len(url) + 40 + 2 * n


def test_the_least_room_takes_a_part_of_any_debt() -> None:
    rng = random.Random(1)
    before, after = ({rng.getrandbits(48) for _ in range(2000)} for _ in range(2))
    for case in (snapshot_of(after), delta_of(before, after)):
        debt = debt_of(case.change, "x" * 80, "u" * 256, "c" * 80, "z" * 40)
        part, end = cut(debt, 0, KEY_LIMIT, least_room(True))
        assert part is not None
        assert 0 < end < KEY_LIMIT
    first = debt_of(snapshot_of(after).change, "x" * 80, "u" * 256, "c" * 80, "z" * 40)
    assert cut(first, 0, KEY_LIMIT, least_room(True) - 1) == (None, 0)


@QUICK
@given(cases(), st.lists(st.integers(0, 900), min_size=1, max_size=5), st.lists(borders, min_size=2, max_size=8))
def test_the_parts_of_any_ranges_are_the_change_there_and_touch(case: Case, rooms: list[int], ends: list[int]) -> None:
    ends = sorted(set(ends))
    ranges = tuple(zip(ends[::2], ends[1::2], strict=False))
    parts = parts_of(case, [*rooms, 400], ranges)
    at = 0
    for lower, upper in ranges:
        while lower < upper:
            assert parts[at].lower == lower
            lower = parts[at].upper or KEY_LIMIT
            at += 1
        assert lower == upper
    assert at == len(parts)


def test_the_end_of_the_keys_is_written_as_0() -> None:
    case = snapshot_of({3, 2**47, KEY_LIMIT - 1})
    (whole,) = parts_of(case, [400])
    assert (whole.lower, whole.upper, whole.whole) == (0, 0, True)
    (tail,) = parts_of(case, [400], ((9, KEY_LIMIT),))
    assert (tail.lower, tail.upper, tail.whole) == (9, 0, False)


def test_room_is_counted_in_bytes_not_in_characters() -> None:
    case = snapshot_of(set(range(0, 10**6, 97)))
    debt = debt_of(case.change, "\N{SNOWMAN}" * 80, "\N{SNOWMAN}" * 256, "\N{SNOWMAN}" * 80)
    for room in range(1350, 1700, 7):
        part, _ = cut(debt, 0, KEY_LIMIT, room)
        assert part is None or len(part) <= room
    assert part is not None


@pytest.mark.parametrize("room", [400, 1100, 3000])
@pytest.mark.parametrize("kind", ["snapshot", "dense snapshot", "delta", "all gone"])
def test_a_part_uses_the_room_it_is_given(room: int, kind: str) -> None:
    rng = random.Random(5)
    before, after = ({rng.getrandbits(48) for _ in range(7000)} for _ in range(2))
    dense = set(range(16000))
    case = {
        "snapshot": lambda: snapshot_of(after),
        "dense snapshot": lambda: snapshot_of(dense),
        "delta": lambda: delta_of(before, after),
        "all gone": lambda: delta_of(dense, set()),
    }[kind]()
    part, end = cut(debt_of(case.change), 0, KEY_LIMIT, room)
    assert part is not None
    assert end < KEY_LIMIT
    # The bound of a code is its worst case; of dense sets that is a fifth above what they take.
    assert len(part) > 0.75 * (room - UPDATE_OVERHEAD_BYTES)


def test_the_whole_change_is_coded_once_for_all_receivers() -> None:
    case = snapshot_of(set(range(0, 3000, 7)))
    first, _ = cut(debt_of(case.change), 0, KEY_LIMIT, 60000)
    assert case.change.codes == [(decoded(first or b"").added, b"")]
    again, _ = cut(debt_of(case.change, "other/0"), 0, KEY_LIMIT, 60000)
    assert decoded(again or b"").added is not None
    assert decoded(again or b"").added == decoded(first or b"").added
    assert len(case.change.codes or ()) == 1


# --- decoding ----------------------------------------------------------------------------------------------

HELD = [10, 20, 30, 40, 50, 60]


def refused(update: Update, held: list[int]) -> bool:
    try:
        decode_keys(update, keys(*held))
    except DecodeError as error:
        assert error.kind == "keys"
        return True
    return False


def update_of(lower: int, upper: int, added: bytes = b"", removed: bytes = b"", since: int = 1) -> Update:
    return Update("a/0", LIFE, since, 2, 0, 1, lower, upper, added, removed)


def test_ranks_are_those_in_the_range() -> None:
    update = update_of(25, 60, encode_sorted(keys(8), 35), encode_sorted(keys(1), 3))
    assert [found.tolist() for found in decode_keys(update, keys(*HELD))] == [[33], [40]]
    whole = update_of(0, 0, removed=encode_sorted(keys(0, 5), 6))
    assert [found.tolist() for found in decode_keys(whole, keys(*HELD))] == [[], [10, 60]]


@pytest.mark.parametrize(("lower", "upper"), [(5, 5), (9, 3), (KEY_LIMIT, 0), (KEY_LIMIT, KEY_LIMIT)])
def test_a_part_of_an_empty_range_is_refused(lower: int, upper: int) -> None:
    assert refused(update_of(lower, upper), HELD)


BAD_KEYS = {
    "a rank beyond the keys": update_of(0, 0, removed=encode_sorted(keys(6), 7)),
    "a rank beyond the keys of the range": update_of(25, 60, removed=encode_sorted(keys(3), 6)),
    "ranks where nothing is held": update_of(61, 99, removed=encode_sorted(keys(0), 1)),
    "removed keys in a snapshot": update_of(0, 0, removed=encode_sorted(keys(0), 6), since=0),
    "an added key beyond the range": update_of(25, 60, added=encode_sorted(keys(35), 36)),
    "an added key beyond all keys": update_of(0, 0, added=encode_sorted(keys(KEY_LIMIT), KEY_LIMIT + 1)),
    "torn added keys": update_of(0, 0, added=encode_sorted(keys(3, 9, 20), KEY_LIMIT)[:-1]),
    "torn ranks": update_of(0, 0, removed=encode_sorted(keys(1, 2), 6)[:-1]),
    "more removed than held": update_of(0, 0, removed=encode_sorted(keys(*range(9)), 9)),
    "fixed width": update_of(0, 0, added=(3).to_bytes(6, "little")),
}


@pytest.mark.parametrize("what", BAD_KEYS)
def test_keys_that_cannot_be_are_refused(what: str) -> None:
    assert refused(BAD_KEYS[what], HELD)


def test_every_bit_of_a_part_matters_or_gives_an_error() -> None:
    update = update_of(25, 60, encode_sorted(keys(8), 35), encode_sorted(keys(1), 3))
    for field in ("added", "removed"):
        code = getattr(update, field)
        for bit in range(8 * len(code)):
            flipped = bytearray(code)
            flipped[bit // 8] ^= 1 << bit % 8
            bad = msgspec.structs.replace(update, **{field: bytes(flipped)})
            if not refused(bad, HELD):
                assert [found.tolist() for found in decode_keys(bad, keys(*HELD))] != [[33], [40]]


# --- assembling --------------------------------------------------------------------------------------------


def holes(covered: set[tuple[int, int]]) -> list[tuple[int, int]]:
    """What ranges leave of all keys."""
    rest, at = [], 0
    for lower, upper in [*sorted(covered), (KEY_LIMIT, KEY_LIMIT)]:
        if at < lower:
            rest.append((at, lower))
        at = max(at, upper)
    return rest


@QUICK
@given(
    cases(),
    st.lists(st.lists(st.integers(300, 700), min_size=1, max_size=3), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
def test_parts_in_any_order_repeated_and_cut_at_several_borders_make_the_change(
    case: Case, cuts: list[list[int]], rng: random.Random
) -> None:
    parts = [part for rooms in cuts for part in parts_of(case, rooms)]
    parts += rng.sample(parts, rng.randrange(len(parts) + 1))
    rng.shuffle(parts)
    assembly = assembly_of(case.change)
    covered: set[tuple[int, int]] = set()
    for part in parts:
        whole = offered(assembly, part, case.before)
        covered.add((part.lower, part.upper or KEY_LIMIT))
        assert assembly.missing() == holes(covered)[:MAX_MISSING]
        assert (whole is not None) is (not holes(covered))
        if whole is not None:
            assert same(whole, case.change)


@QUICK
@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(1, 9) | st.just(200)), max_size=25),
    st.randoms(use_true_random=False),
)
def test_missing_is_what_no_part_covers_and_what_comes_is_counted_once(
    pieces: list[tuple[int, int]], rng: random.Random
) -> None:
    everything = set(range(0, 400, 3))
    assembly, covered, size = assembly_of(snapshot_of(everything).change), set(), 0
    for lower, length in pieces:
        upper = lower + length
        new = [(max(lower, start), min(upper, end)) for start, end in holes(covered)]
        size += sum(max(PART_KEYS, len(within(everything, *piece))) for piece in new if piece[0] < piece[1])
        assembly.offer(lower, upper, KeyDelta(keys(*within(everything, lower, upper)), NO_KEYS), 1.0)
        covered.add((lower, upper))
        assert assembly.missing() == holes(covered)[:MAX_MISSING]
        assert assembly.missing(1) == holes(covered)[:1]
        assert assembly.size == size
    assert assembly.is_of(Update("a/0", LIFE, 0, 1, 99, 1, 3, 4, b"", b""))


def test_no_more_than_sixteen_ranges_are_named_the_lowest_first() -> None:
    assembly = assembly_of(snapshot_of({3}).change)
    for i in range(1, 40):
        assembly.offer(10 * i, 10 * i + 5, KeyDelta(NO_KEYS, NO_KEYS), 1.0)
    assert assembly.missing() == [(0, 10), *((10 * i + 5, 10 * i + 10) for i in range(1, MAX_MISSING))]
    Want(LIFE, 0, 1, assembly.missing())


@pytest.mark.parametrize("other", [(LIFE + 1, 0, 1), (LIFE, 1, 2), (LIFE, 0, 2)])
def test_a_part_of_another_transfer_is_known(other: tuple[int, int, int]) -> None:
    assembly = assembly_of(snapshot_of({3}).change)
    incarnation, since, version = other
    assert not assembly.is_of(Update("a/0", incarnation, since, version, assembly.checksum, 1, 0, 0, b"", b""))


@settings(QUICK, max_examples=40)
@given(st.integers(0, 1000), st.integers(400, 600), st.integers(0, 3), st.data())
def test_what_was_lost_is_asked_for_and_served_by_any_holder(
    seed: int, n: int, moved: int, data: st.DataObject
) -> None:
    """A burst loses parts; another holder, whose set has moved on, sends the ranges that are missing."""
    ordered = sorted(random.Random(seed).sample(range(KEY_LIMIT), n))
    before, after = set(ordered[::2]) | set(ordered[1::4]), set(ordered[1::2])
    later = [after ^ set(ordered[i :: 7 + i]) for i in range(moved)]
    sender, other = delta_of(before, after), case_of([before, after, *later], 1, 2)
    parts = parts_of(sender, [260])
    assert len(parts) > 2
    lost = data.draw(st.sets(st.sampled_from(range(len(parts))), min_size=1))
    assembly = assembly_of(sender.change)
    for i, part in enumerate(parts):
        if i not in lost:
            assert offered(assembly, part, before) is None
    missing = tuple(assembly.missing())
    kept = {(part.lower, part.upper or KEY_LIMIT) for i, part in enumerate(parts) if i not in lost}
    assert missing == tuple(holes(kept)[:MAX_MISSING])
    whole = None
    for part in parts_of(other, [300, 227], missing):
        assert whole is None
        whole = offered(assembly, part, before)
    assert same(whole, sender.change)


def test_only_a_part_with_something_new_keeps_a_transfer_from_stalling() -> None:
    assembly = assembly_of(snapshot_of(set(range(50))).change)
    assembly.offer(0, 10, KeyDelta(keys(*range(10)), NO_KEYS), 1.0)
    assert assembly.touched_at == 1.0
    assembly.offer(0, 10, KeyDelta(keys(*range(10)), NO_KEYS), 2.0)
    assembly.offer(3, 7, KeyDelta(keys(*range(3, 7)), NO_KEYS), 3.0)
    assert assembly.touched_at == 1.0
    assembly.offer(5, 11, KeyDelta(keys(*range(5, 11)), NO_KEYS), 4.0)
    assert (assembly.touched_at, assembly.missing()) == (4.0, [(11, KEY_LIMIT)])
