"""Sorted arrays as sets: every operation against Python's own sets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixroute.keys.keyset import Delta, KeyDelta, Keys, difference, merge, sorted_keys, within
from prefixroute.replication import writer_set
from prefixroute.replication.wire import KEY_LIMIT
from prefixroute.replication.writer_set import OwnedSet

key_sets = st.sets(st.sampled_from([0, 1, KEY_LIMIT - 1]) | st.integers(0, KEY_LIMIT - 1) | st.integers(0, 40))


def array(keys: set[int]) -> Keys:
    return np.array(sorted(keys), np.uint64)


def same(keys: Keys, expected: set[int]) -> bool:
    """Whether an array is that set, in order, each key once."""
    return keys.dtype == np.uint64 and keys.tolist() == sorted(expected)


@settings(derandomize=True, deadline=None, database=None)
@given(key_sets, key_sets)
def test_two_sets(one: set[int], other: set[int]) -> None:
    left, right = difference(array(one), array(other))
    assert same(left, one - other) and same(right, other - one)
    assert same(merge(array(one - other), array(other)), one | other)
    assert same(KeyDelta(array(other - one), array(one & other)).applied(array(one)), one ^ other)
    assert same(sorted_keys(one), one)


@settings(derandomize=True, deadline=None, database=None)
@given(key_sets, st.integers(0, KEY_LIMIT), st.integers(0, KEY_LIMIT))
def test_a_range_of_keys(keys: set[int], lower: int, upper: int) -> None:
    lower, upper = sorted((lower, upper))
    inside = {key for key in keys if lower <= key < upper}
    assert same(within(array(keys), lower, upper), inside)
    delta = KeyDelta(array(keys), array(keys)).within(lower, upper)
    assert same(delta.added, inside) and same(delta.removed, inside)


@settings(derandomize=True, deadline=None, database=None)
@given(key_sets, key_sets, key_sets)
def test_two_changes_come_to_one(first: set[int], second: set[int], third: set[int]) -> None:
    one, other = KeyDelta.between(array(first), array(second)), KeyDelta(array(third - second), array(second - third))
    net = one.then(other)
    assert same(net.added, third - first) and same(net.removed, first - third)
    assert same(net.applied(array(first)), third) and same(net.reversed().applied(array(third)), first)


@settings(derandomize=True, deadline=None, database=None)
@given(st.lists(st.tuples(key_sets, st.booleans(), st.booleans()), max_size=8), st.sampled_from([1, 5, 8192]))
def test_what_is_pending_is_the_same_however_it_is_kept(states: list[tuple[set[int], bool, bool]], fold: int) -> None:
    owned, held = OwnedSet(), set[int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_set, "FOLD_KEYS", fold)
        for keys, at_once, publishes in states:
            if at_once:
                owned.become(keys)
            else:
                owned.gather(Delta(keys - held, held - keys))
            held = keys
            if publishes:
                owned.publish()
                assert set(owned.keys.tolist()) == held
            assert owned.pending() == held
        owned.publish()
        assert not owned.publish() and not owned.due(0.02, 0.0, 1e9)
    owned._check()
