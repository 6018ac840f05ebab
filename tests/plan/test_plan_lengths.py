"""Length distributions: closed forms against numbers, parts that make the whole, and what a cache takes off."""

from __future__ import annotations

import random
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefill_case import EXAMPLE_CLUSTERS

from prefixroute import UsageError
from prefixroute.plan import Empirical, Lengths, LogNormal, Polynomial, incremental

CASE = LogNormal(9.90, 1.00, 128, 131072)
SEEN = Empirical([5, 1, 1, 9, 30, 100, 100, 4000])


def test_the_published_lengths() -> None:
    assert CASE.mean == pytest.approx(27_485.68, rel=1e-6)
    assert CASE.share_over(19_400) == pytest.approx(0.495722, rel=1e-5)
    assert CASE.mean_over(19_400) == pytest.approx(45_045.6, rel=1e-5)
    assert CASE.mean_upto(19_400) == pytest.approx(10_223.57, rel=1e-5)
    assert CASE.share_over(19.4 * 1024) == pytest.approx(0.4860, rel=1e-3), "19.4K is 19,400"


def test_the_mean_time_is_more_than_the_time_of_the_mean() -> None:
    curve = EXAMPLE_CLUSTERS.pool_prefill_s
    assert curve(CASE.mean) == pytest.approx(1.599269, rel=1e-6)
    assert CASE.average(curve) == pytest.approx(1.68679, rel=1e-5)
    assert CASE.average(curve, low=19_400) == pytest.approx(2.56845, rel=1e-5)


@pytest.mark.parametrize(
    "lengths", [CASE, SEEN, LogNormal(5, 0.5), Empirical([7])], ids=["case", "seen", "narrow", "one"]
)
@given(at=st.floats(0, 1e6))
@settings(derandomize=True, deadline=None, database=None, max_examples=60)
def test_both_sides_of_a_threshold_make_the_whole(lengths: Lengths, at: float) -> None:
    p = lengths.share_over(at)
    assert 0 <= p <= 1
    assert p * lengths.mean_over(at) + (1 - p) * lengths.mean_upto(at) == pytest.approx(lengths.mean, rel=1e-7)
    line = Polynomial((2.0, 3.0))
    parts = p * lengths.average(line, low=at) + (1 - p) * lengths.average(line, high=at)
    assert parts == pytest.approx(2 + 3 * lengths.mean, rel=1e-4)


@pytest.mark.parametrize("lengths", [CASE, SEEN], ids=["case", "seen"])
def test_the_share_over_a_threshold_falls_from_one_to_none(lengths: Lengths) -> None:
    shares = [lengths.share_over(at) for at in (0, 1, 128, 1000, 19_400, 1e5, 2e5, inf)]
    assert shares == sorted(shares, reverse=True)
    assert (shares[0], shares[-1]) == (1.0, 0.0)
    assert lengths.share_over(lengths.longest) == 0.0


def test_an_empty_part_has_the_mean_of_its_edge() -> None:
    assert CASE.mean_over(1e9) == 131072 and CASE.mean_upto(1) == pytest.approx(128)
    assert SEEN.mean_over(1e9) == 4000 and SEEN.mean_upto(0.5) == 1
    assert SEEN.average(Polynomial((0.0, 1.0)), low=1e9) == 4000
    assert CASE.average(Polynomial((0.0, 1.0)), low=1e9) == 131072


def test_far_out_a_log_normal_keeps_its_digits() -> None:
    tail = LogNormal(0, 1, 1, inf)
    assert tail.mean_over(1e9) > 1e9
    assert 0 < tail.share_over(1e9) < 1e-90


def test_draws_have_the_mean_and_the_share_and_repeat_with_their_seed() -> None:
    for lengths in (CASE, Empirical([100, 200, 60_000])):
        drawn = [lengths.draw(rng) for rng in [random.Random(5)] for _ in range(20_000)]
        assert sum(drawn) / len(drawn) == pytest.approx(lengths.mean, rel=0.03)
        assert sum(n > 19_400 for n in drawn) / len(drawn) == pytest.approx(lengths.share_over(19_400), abs=0.02)
        assert lengths.shortest <= min(drawn) and max(drawn) <= lengths.longest
        assert drawn[:50] == [lengths.draw(rng) for rng in [random.Random(5)] for _ in range(50)]


def test_a_cache_takes_off_the_leading_blocks_that_it_holds() -> None:
    prompts = [(1000, ["a", "b"]), (1100, ["a", "b", "c"]), (1024, ["a", "b"]), (600, ["d", "b"]), (0, [])]
    assert list(incremental(prompts, 512)) == [(1000, 0), (1100, 1024), (1024, 1023), (600, 0), (0, 0)]


def test_a_bounded_cache_forgets_what_was_not_used_for_longest_the_deepest_first() -> None:
    prompts = [(20, ["a", "b"]), (10, ["c"]), (20, ["a", "b"])]
    assert [cached for _, cached in incremental(prompts, 10, 3)] == [0, 0, 19]
    assert [cached for _, cached in incremental(prompts, 10, 2)] == [0, 0, 10]
    assert [cached for _, cached in incremental(prompts, 10, 1)] == [0, 0, 0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: LogNormal(1, 0),
        lambda: LogNormal(1, 1, 10, 10),
        lambda: LogNormal(1, 1, 0, 10),
        lambda: LogNormal(1, 0.1, 1e30, 1e31),
        lambda: Empirical([]),
        lambda: Empirical([-1]),
        lambda: list(incremental([], 0)),
        lambda: list(incremental([], 16, 0)),
    ],
)
def test_what_cannot_be_is_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(UsageError):
        make()
