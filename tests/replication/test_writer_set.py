"""Single-writer sets: the acceptance table, its boundaries, and sets and logs against a plain model."""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prefixroute.keys.keyset import Delta, KeyDelta, checksum
from prefixroute.replication.receiving import TABLE, Order, Reach, Verdict, judge
from prefixroute.replication.writer_set import LOG_BYTES, OwnedSet, WriterSet

WIRE_DOCUMENT = Path(__file__).parents[2] / "docs" / "wire.md"
SNAPSHOT, DELTA = True, False
HELD = (7, 40)


def keys(*values: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(sorted(values), np.uint64)


def table_in(text: str) -> dict[tuple[str, str, bool], str]:
    """The rows of the first table under a head `incarnation | reach | snapshot | delta`."""
    rows: dict[tuple[str, str, bool], str] = {}
    inside = False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if cells == ["incarnation", "reach", "snapshot", "delta"]:
            inside = True
        elif inside and len(cells) == 4:
            if set(cells[0]) != {"-"}:
                rows[cells[0], cells[1], SNAPSHOT] = cells[2]
                rows[cells[0], cells[1], DELTA] = cells[3]
        elif inside:
            break
    return rows


def in_words(verdict: Verdict) -> str:
    words = {Verdict.WANT_SNAPSHOT: "want a snapshot", Verdict.WANT_DELTA: "want the delta since mine"}
    return words.get(verdict, verdict.value)


# --- the table ---------------------------------------------------------------------------------------------


def test_table_answers_every_combination_once() -> None:
    combinations = {
        (order, reach, kind)
        for order, kind in product(Order, (SNAPSHOT, DELTA))
        for reach in (Reach if order is Order.SAME else [None])
    }
    assert set(TABLE) == combinations


def test_written_table_is_the_table() -> None:
    expected = {
        (order.value, "any" if reach is None else reach.value, kind): in_words(verdict)
        for (order, reach, kind), verdict in TABLE.items()
    }
    assert table_in(WIRE_DOCUMENT.read_text("utf-8")) == expected


def test_only_apply_and_replace_take_a_change_and_never_an_older_one() -> None:
    for (order, reach, snapshot), verdict in TABLE.items():
        takes = verdict in (Verdict.APPLY, Verdict.REPLACE)
        assert takes is (order is not Order.OLDER and reach is not Reach.PAST and (snapshot or reach is Reach.NEXT))


def ruled(held: tuple[int, int], incarnation: int, since: int, version: int) -> Verdict:
    """The rules in sentences, written apart from the table."""
    if held != (0, 0) and incarnation < held[0]:
        return Verdict.DROP
    if incarnation == held[0] and version <= held[1]:
        return Verdict.DUPLICATE
    if since == 0:
        return Verdict.REPLACE
    if incarnation != held[0]:
        return Verdict.WANT_SNAPSHOT
    return Verdict.APPLY if since == held[1] else Verdict.WANT_DELTA


@pytest.mark.parametrize("held", [(0, 0), (7, 0), (7, 1), HELD])
def test_every_boundary_is_ruled_as_the_sentences_say(held: tuple[int, int]) -> None:
    v = held[1]
    around = sorted({0, 1, v - 1, v, v + 1, v + 2} - {-1})
    for incarnation, since, version in product((6, 7, 8), around, around):
        if since < version:
            assert judge(held, incarnation, since, version) is ruled(held, incarnation, since, version)


@pytest.mark.parametrize(
    ("since", "version", "verdict"),
    [
        (39, 39, Verdict.DUPLICATE),
        (39, 40, Verdict.DUPLICATE),
        (40, 40, Verdict.DUPLICATE),
        (39, 41, Verdict.WANT_DELTA),
        (40, 41, Verdict.APPLY),
        (40, 42, Verdict.APPLY),
        (41, 42, Verdict.WANT_DELTA),
        (0, 39, Verdict.DUPLICATE),
        (0, 40, Verdict.DUPLICATE),
        (0, 41, Verdict.REPLACE),
    ],
)
def test_same_life_at_the_boundary(since: int, version: int, verdict: Verdict) -> None:
    assert judge(HELD, HELD[0], since, version) is verdict


def test_no_snapshot_is_wanted_where_a_delta_applies_or_would() -> None:
    for since, version in product(range(1, 80), range(2, 80)):
        if since < version:
            assert judge(HELD, HELD[0], since, version) is not Verdict.WANT_SNAPSHOT


def test_a_taken_change_always_raises_the_pair() -> None:
    for incarnation, since, version in product(range(5, 10), range(50), range(1, 50)):
        if judge(HELD, incarnation, since, version) in (Verdict.APPLY, Verdict.REPLACE):
            assert (incarnation, version) > HELD


# --- a set and its log against a model ---------------------------------------------------------------------

small_sets = st.frozensets(st.integers(0, 40), max_size=12)


class WriterSetMachine(RuleBasedStateMachine):
    """A set that goes from state to state, and a list of all its states."""

    def __init__(self) -> None:
        super().__init__()
        self.set = WriterSet()
        self.states: dict[int, frozenset[int]] = {0: frozenset()}
        self.strides = {0: 1}

    @property
    def present(self) -> frozenset[int]:
        return self.states[self.set.version]

    @rule(toggled=small_sets, step=st.integers(1, 3), anchor_stride=st.sampled_from([1, 4]))
    def advance(self, toggled: frozenset[int], step: int, anchor_stride: int) -> None:
        added, removed = keys(*toggled - self.present), keys(*toggled & self.present)
        state = self.present ^ toggled
        assert self.set.fits(KeyDelta(added, removed))
        self.set.advance(self.set.version + step, KeyDelta(added, removed), anchor_stride)
        self.states[self.set.version], self.strides[self.set.version] = state, anchor_stride

    @rule(state=small_sets)
    def replace(self, state: frozenset[int]) -> None:
        self.set.replace(self.set.version + 1, keys(*state), 2)
        self.states, self.strides = {self.set.version: state}, {self.set.version: 2}

    @rule(after=st.integers(0, 3))
    def snapshot(self, after: int) -> None:
        if not self.set.version:
            return
        # As asked for by a receiver that is `after` versions behind.
        newest = sorted(self.states)[-1 - min(after, len(self.states) - 1)]
        known = newest if after else 0
        if known == self.set.version:
            return
        change = self.set.snapshot(known)
        assert change.since == 0
        assert not len(change.delta.removed)
        assert change.version > known
        assert frozenset(change.delta.added.tolist()) == self.states[change.version]
        assert change.checksum == checksum(change.delta.added)
        assert change.anchor_stride == self.strides[change.version]
        assert self.set.snapshot(known) is change
        if change.version < self.set.version:
            assert self.set.change(change.version, self.set.version) is not None

    @invariant()
    def every_pair_of_versions_gives_the_net_change(self) -> None:
        self.set._check()
        assert self.set.keys.tolist() == sorted(self.present)
        versions = sorted(self.states)
        for since, until in product(versions, versions):
            change = self.set.change(since, until)
            if since >= until:
                assert change is None
                continue
            before, after = self.states[since], self.states[until]
            assert change is not None
            assert (change.since, change.version) == (since, until)
            assert change.delta.added.tolist() == sorted(after - before)
            assert change.delta.removed.tolist() == sorted(before - after)
            assert change.checksum == checksum(keys(*after))
            assert (change.anchor_stride, change.n_base) == (self.strides[until], len(before))
            if change.since:
                assert change.base is not None
                around = range(42)
                ranks = [sum(key < limit for key in before) for limit in around]
                assert change.base().ranks(keys(*around)).tolist() == ranks

    @invariant()
    def successive_changes_are_the_steps_to_the_present(self) -> None:
        versions = sorted(self.states)
        for i, since in enumerate(versions):
            steps = list(pairwise(versions[i:]))
            for limit in (len(steps) - 1, len(steps), 99):
                found = [(change.since, change.version) for change in self.set.successive(since, limit)]
                assert found == (steps if len(steps) <= limit else [])

    @invariant()
    def versions_that_never_were_give_no_change(self) -> None:
        versions = set(self.states)
        top = self.set.version
        for since, until in product(range(max(0, top - 4), top + 3), repeat=2):
            if not {since, until} <= versions:
                assert self.set.change(since, until) is None


TestWriterSet = WriterSetMachine.TestCase
TestWriterSet.settings = settings(derandomize=True, deadline=None, max_examples=60, stateful_step_count=12)


def test_what_does_not_fit_is_seen() -> None:
    held = WriterSet()
    held.replace(1, keys(2, 4, 6))
    assert held.fits(KeyDelta(keys(1, 3, 7), keys(2, 6)))
    assert held.fits(KeyDelta(keys(), keys()))
    for added, removed in (((2,), ()), ((6, 7), ()), ((), (1,)), ((), (7,)), ((), (4, 5))):
        assert not held.fits(KeyDelta(keys(*added), keys(*removed)))


def test_the_log_is_bounded_in_bytes_and_forgets_its_oldest_steps() -> None:
    held = WriterSet()
    # Codes of the keys count as much as the keys.
    step = LOG_BYTES // 16 // 10
    for i in range(25):
        held.advance(i + 1, KeyDelta(keys(*range(i * step, (i + 1) * step)), keys()))
        held._check()
    reach = [since for since in range(25) if held.change(since, 25) is not None]
    assert reach == list(range(reach[0], 25))
    assert 7 <= len(reach) <= 10


def test_a_step_larger_than_the_log_leaves_it_empty() -> None:
    held = WriterSet()
    held.advance(1, KeyDelta(keys(1), keys()))
    held.advance(2, KeyDelta(keys(*range(10, 10 + LOG_BYTES // 8)), keys()))
    held._check()
    assert held.change(0, 2) is None
    assert held.change(1, 2) is None
    held.advance(3, KeyDelta(keys(2), keys()))
    assert held.change(2, 3) is not None


def test_a_snapshot_stays_frozen_while_the_log_leads_on_from_it() -> None:
    held = WriterSet()
    held.advance(1, KeyDelta(keys(1, 2), keys()))
    frozen = held.snapshot()
    held.advance(2, KeyDelta(keys(3), keys(1)))
    assert held.snapshot() is frozen
    assert frozen.delta.added.tolist() == [1, 2]
    held.advance(3, KeyDelta(keys(*range(10, 10 + LOG_BYTES // 8)), keys()))
    assert held.snapshot().version == 3


def test_a_frozen_snapshot_that_the_log_no_longer_leads_on_from_is_given_up() -> None:
    held = WriterSet()
    held.advance(1, KeyDelta(keys(1, 2), keys()))
    assert held.snapshot().version == 1
    held.advance(2, KeyDelta(keys(*range(10, 10 + LOG_BYTES // 8)), keys()))
    held.advance(3, KeyDelta(keys(3), keys()))
    assert held.snapshot().version == 3


def test_a_receiver_that_has_the_frozen_state_is_given_a_later_one() -> None:
    held = WriterSet()
    held.advance(1, KeyDelta(keys(*range(100)), keys()))
    assert held.snapshot().version == 1
    held.advance(2, KeyDelta(keys(), keys(*range(100))))
    assert held.snapshot(after=0).version == 1
    assert held.snapshot(after=1).version == 2
    assert held.snapshot(after=0).version == 2


# --- the owner's side --------------------------------------------------------------------------------------


class OwnedSetMachine(RuleBasedStateMachine):
    """Wire keys that come and go between the moments at which they are published, at strides that change."""

    def __init__(self) -> None:
        super().__init__()
        self.set = OwnedSet()
        self.held: frozenset[int] = frozenset()
        self.published: frozenset[int] = frozenset()

    @rule(toggled=st.frozensets(st.integers(0, 9), max_size=8))
    def gather(self, toggled: frozenset[int]) -> None:
        self.set.gather(Delta(set(toggled - self.held), set(toggled & self.held)))
        self.held ^= toggled

    @rule(stride=st.sampled_from([1, 2, 32]))
    def thin(self, stride: int) -> None:
        self.set.stride = stride

    @rule()
    def publish(self) -> None:
        before, anchor_stride = self.set.version, self.set.anchor_stride
        changed = self.held != self.published or self.set.stride != anchor_stride
        assert self.set.due(0.0, 99.0, 0.0) is changed
        assert self.set.publish() is changed
        assert self.set.version == before + changed
        assert self.set.anchor_stride == self.set.stride
        if changed:
            change = self.set.change(before, self.set.version)
            assert change is not None
            assert frozenset(change.delta.added.tolist()) == self.held - self.published
            assert frozenset(change.delta.removed.tolist()) == self.published - self.held
            assert change.anchor_stride == self.set.stride
        self.published = self.held

    @invariant()
    def what_is_published_and_pending_is_what_is_held(self) -> None:
        self.set._check()
        assert frozenset(self.set.keys.tolist()) == self.published
        assert self.set.pending() == self.held


TestOwnedSet = OwnedSetMachine.TestCase
TestOwnedSet.settings = settings(derandomize=True, deadline=None, max_examples=80, stateful_step_count=25)


def owner_of(*held: int) -> OwnedSet:
    """An owner that has published `held` at the moment 10."""
    owned = OwnedSet()
    owned.gather(Delta(set(held), set()))
    owned.publish(10.0)
    return owned


@pytest.mark.parametrize(
    ("n", "now", "due"), [(1, 10.0, False), (9, 10.1, False), (10, 10.0, True), (1, 10.19, False), (1, 10.2, True)]
)
def test_a_change_is_due_when_it_is_a_share_of_the_set_or_has_waited(n: int, now: float, due: bool) -> None:
    owned = owner_of(*range(100))
    assert not owned.due(0.1, 0.2, 99.0)
    owned.gather(Delta(set(range(1000, 1000 + n)), set()))
    assert owned.due(0.1, 0.2, now) is due


def test_an_owner_begins_at_version_1_so_that_an_empty_set_can_be_told() -> None:
    owned = OwnedSet()
    assert (owned.version, len(owned), owned.snapshot().version) == (1, 0, 1)
    assert not owned.publish()


def test_a_transient_key_is_in_no_net_change() -> None:
    owned = owner_of(*range(20))
    owned.gather(Delta({90, 91}, set()))
    owned.publish()
    owned.gather(Delta(set(), {90, 91}))
    owned.publish()
    change = owned.change(2, 4)
    assert change is not None
    assert (len(change.delta.added), len(change.delta.removed)) == (0, 0)
    # A holder at the version between still has them: the change from there takes them away.
    between = owned.change(3, 4)
    assert between is not None
    assert between.delta.removed.tolist() == [90, 91]
