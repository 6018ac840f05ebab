"""Stack distances and hit curves: against a plain LRU cache, exact and sampled."""

from __future__ import annotations

import random
from collections import OrderedDict
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixroute.analyze.prompt_keys import Keys, prefix_keys
from prefixroute.analyze.sample import Sampled
from prefixroute.analyze.stack import SIZES, ExactCurve, TouchStack


def path(*words: int) -> Keys:
    return prefix_keys(np.array(words, dtype=np.uint64))


def lru_hits(paths: list[list[int]], capacity: int) -> int:
    """Leading blocks held by a cache of so many blocks, each prompt touched deepest first."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for keys in paths:
        for key in keys:
            if key not in held:
                break
            hits += 1
        for key in reversed(keys):
            held[key] = None
            held.move_to_end(key)
        while len(held) > capacity:
            held.popitem(last=False)
    return hits


PATHS = st.lists(st.lists(st.integers(0, 2), max_size=7), max_size=40)


@settings(derandomize=True, deadline=None, max_examples=200, database=None)
@given(PATHS)
def test_the_exact_curve_is_that_of_a_cache_of_each_size(words: list[list[int]]) -> None:
    paths = [path(*each) for each in words]
    exact = ExactCurve()
    for keys in paths:
        exact.access(keys.tolist(), "")
        exact.stack.check()
    total = sum(len(keys) for keys in paths)
    listed = [keys.tolist() for keys in paths]
    for size, rate in list(zip(SIZES, exact.curve().rates, strict=True))[:12]:
        assert round(rate * total) == lru_hits(listed, size)


def test_requests_are_numbered_anew_when_there_are_many() -> None:
    rng, stack, paths = random.Random(3), TouchStack(), []
    for _ in range(5000):
        keys = path(*(rng.randrange(3) for _ in range(5))).tolist()
        paths.append(keys)
        stack.access(keys)
    stack.check()
    assert len(stack) == len({key for keys in paths for key in keys})


def topics(skew: float, requests: int, seed: int, many: int = 400) -> list[Keys]:
    """Prompts of a shared front, a topic of 5 to 60 blocks, and a tail of their own."""
    rng = random.Random(seed)
    heights = list(accumulate((k + 1) ** -skew for k in range(many)))
    lengths = [rng.randrange(5, 60) for _ in range(many)]
    found = []
    for i in range(requests):
        topic = rng.choices(range(many), cum_weights=heights)[0]
        words = [1, 2, *(1000 * (topic + 1) + j for j in range(lengths[topic])), *(10**9 + 8 * i + j for j in range(8))]
        found.append(path(*words))
    return found


@pytest.mark.parametrize("skew", [0.0, 1.1, 2.0])
def test_a_sample_is_within_a_point_of_the_exact_curve_everywhere(skew: float) -> None:
    exact, sampled = ExactCurve(), Sampled(limit=16384)
    for keys in topics(skew, 4000, seed=1):
        held = exact.access(keys.tolist(), "a")
        assert sampled.access(keys, keys.tolist(), "a") <= held
    sampled.check()
    assert len(sampled) <= 2 * 16384
    assert sampled.share < 0.6
    one, other = exact.curve(), sampled.curve()
    assert max(abs(a - b) for a, b in zip(one.rates, other.rates, strict=True)) < 0.01
    assert other.distinct_blocks == pytest.approx(one.distinct_blocks, rel=0.03)
    assert not other.exact
    assert 0 < max(other.error) < 0.1


def test_a_sample_that_holds_everything_is_exact() -> None:
    exact, sampled = ExactCurve(), Sampled()
    for i, keys in enumerate(topics(1.1, 200, seed=2)):
        exact.access(keys.tolist(), str(i % 2))
        sampled.access(keys, keys.tolist(), str(i % 2))
    for owner in (None, "0", "1"):
        assert sampled.curve(owner).rates == pytest.approx(exact.curve(owner).rates)
    assert sampled.curve().exact


def test_no_access_has_a_curve_of_zeros() -> None:
    assert set(ExactCurve().curve().rates) == {0.0}
    assert set(Sampled().curve().rates) == {0.0}


@pytest.mark.parametrize("skew", [0.0, 2.0])
def test_a_sample_goes_on_where_an_exact_curve_ends(skew: float) -> None:
    paths = topics(skew, 4000, seed=3)
    exact, begun = ExactCurve(), ExactCurve()
    for keys in paths[:1500]:
        begun.access(keys.tolist(), "a")
    before = begun.curve()
    assert Sampled.following(begun, 10**6).curve("a").rates == pytest.approx(before.rates)
    sampled = Sampled.following(begun, 16384)
    sampled.check()
    for i, keys in enumerate(paths):
        exact.access(keys.tolist(), "a")
        if i >= 1500:
            sampled.access(keys, keys.tolist(), "a")
    sampled.check()
    one, other = exact.curve(), sampled.curve()
    assert max(abs(a - b) for a, b in zip(one.rates, other.rates, strict=True)) < 0.01
    assert other.distinct_blocks == pytest.approx(one.distinct_blocks, rel=0.03)
