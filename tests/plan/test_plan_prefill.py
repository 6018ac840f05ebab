"""The model of prefill in another cluster: published and derived figures, and what holds whatever the figures."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefill_case import EXAMPLE_CLUSTERS, GBIT, published

from prefixroute import UsageError
from prefixroute.plan import (
    Bottleneck,
    Empirical,
    LogNormal,
    Polynomial,
    PrefillClusters,
    Slower,
    all_local,
    all_remote,
    best_plan,
    best_threshold,
    kv_rate_bytes_per_s,
    place,
    rates,
)

# t, p, l_long, l_short, pool, pool / p, prefill, prefill / (1 - p), requests a second, egress in Gbit/s
DERIVED = (
    (4_096, 0.94146, 29_018.3, 2_839.5, 2.39648, 2.54550, 2.55294, 43.608, 2.54550, 12.895),
    (8_192, 0.80728, 32_812.3, 5_173.8, 2.17096, 2.68924, 2.16632, 11.241, 2.68924, 12.785),
    (15_000, 0.59994, 40_194.6, 8_426.9, 1.76988, 2.95008, 1.78505, 4.4620, 2.95008, 12.224),
    (19_400, 0.49572, 45_045.6, 10_223.6, 1.57827, 3.18378, 1.60518, 3.18314, 3.18314, 11.953),
    (25_000, 0.39223, 51_107.7, 12_240.7, 1.39020, 3.54432, 1.44204, 2.37270, 2.37270, 7.827),
    (32_768, 0.28830, 59_205.3, 14_636.4, 1.19930, 4.15989, 1.28673, 1.80797, 1.80797, 4.966),
)


@pytest.mark.parametrize("row", DERIVED, ids=lambda row: str(row[0]))
def test_a_threshold_gives_the_derived_row(row: tuple[float, ...]) -> None:
    t, p, longer, shorter, pool, pool_p, prefill, prefill_p, total, egress = row
    found = rates(published(), t, 3, 5)
    assert found.offloaded == pytest.approx(p, rel=1e-4)
    assert (found.long_tokens, found.short_tokens) == pytest.approx((longer, shorter), rel=1e-4)
    assert (found.pool_per_s, found.prefill_per_s) == pytest.approx((pool, prefill), rel=1e-4)
    assert found.pool_per_s / found.offloaded == pytest.approx(pool_p, rel=1e-4)
    assert found.prefill_per_s / (1 - found.offloaded) == pytest.approx(prefill_p, rel=1e-4)
    assert found.requests_per_s == pytest.approx(total, rel=1e-4)
    assert found.egress_bytes_per_s / GBIT == pytest.approx(egress, rel=1e-4)


def test_published_figures_at_the_published_threshold() -> None:
    found = rates(published(), 19_400, 3, 5)
    assert found.offloaded == pytest.approx(0.496, abs=1e-3)
    assert found.long_tokens == pytest.approx(45_046, rel=1e-3)
    assert found.short_tokens == pytest.approx(10_224, rel=1e-3)
    assert found.pool_per_s == pytest.approx(1.578, rel=1e-3)
    assert found.pool_per_s == pytest.approx(1.61, rel=0.03)
    assert found.decode_per_s == pytest.approx(3.91, rel=1e-3)
    assert found.requests_per_s == pytest.approx(3.24, rel=0.03)
    at_the_published_rate = 3.24 * found.offloaded * published().kv_bytes(found.long_tokens)
    assert at_the_published_rate / GBIT == pytest.approx(12.2, abs=0.1)


@pytest.mark.parametrize(
    ("times", "t", "nodes", "total"),
    [(2.2, 19_900, (3, 5), 3.2132), (2.3, 19_400, (3, 5), 3.1831), (2.4, 18_900, (3, 5), 3.1511)],
)
def test_the_optimum_by_how_slow_local_prefill_is(times: float, t: float, nodes: tuple[int, int], total: float) -> None:
    found = best_plan(published(times))
    assert found.threshold_tokens == pytest.approx(t, abs=500)
    assert (found.prefill_nodes, found.decode_nodes) == nodes
    assert found.requests_per_s == pytest.approx(total, rel=2e-3)


@pytest.mark.parametrize("times", [2.5, 2.6])
def test_beyond_that_decode_is_the_bound_with_four_nodes_each(times: float) -> None:
    found = best_plan(published(times))
    assert (found.prefill_nodes, found.decode_nodes, found.bottleneck) == (4, 4, Bottleneck.DECODE)
    assert found.requests_per_s == pytest.approx(3.128)
    assert found.threshold_tokens >= 18_500


@pytest.mark.parametrize(
    ("nodes", "t", "prefilled"), [(2, 15_076.3, 2.9537), (3, 19_397.6, 3.1836), (4, 23_264.7, 3.4252)]
)
def test_both_prefill_roles_are_equally_busy_at_the_root(nodes: int, t: float, prefilled: float) -> None:
    clusters = published()
    assert best_threshold(clusters, nodes) == pytest.approx(t, abs=0.1)
    found = rates(clusters, best_threshold(clusters, nodes), nodes)
    assert found.pool_per_s / found.offloaded == pytest.approx(prefilled, abs=1e-4)
    assert found.prefill_per_s / (1 - found.offloaded) == pytest.approx(prefilled, abs=1e-4)


@pytest.mark.parametrize(
    ("gbit", "t", "total"),
    [
        (1, 73_700, 1.0178),
        (2, 54_000, 1.2174),
        (5, 32_600, 1.8133),
        (8, 24_700, 2.4040),
        (10, 21_600, 2.7975),
        (12, 19_400, 3.1831),
    ],
)
def test_a_narrower_link_raises_the_threshold(gbit: float, t: float, total: float) -> None:
    clusters = published(gbit_per_s=gbit)
    found = rates(clusters, best_threshold(clusters, 3), 3, 5)
    assert found.threshold_tokens == pytest.approx(t, abs=100)
    assert found.requests_per_s == pytest.approx(total, rel=2e-3)


def test_all_to_the_pool_is_the_published_naive_row() -> None:
    found = all_remote(published())
    assert found.requests_per_s == pytest.approx(2.50114, rel=1e-5)
    assert found.requests_per_s == pytest.approx(2.45, rel=0.03)
    assert found.decode_per_s == pytest.approx(6.25, rel=2e-3)
    by_time = all_remote(replace(published(), average="time"))
    assert by_time.requests_per_s == pytest.approx(2.371, rel=1e-3)


def test_the_example_has_the_published_rows_of_all_three_set_ups() -> None:
    plan, remote, alone = best_plan(EXAMPLE_CLUSTERS), all_remote(EXAMPLE_CLUSTERS), all_local(EXAMPLE_CLUSTERS, 12)
    assert plan.threshold_tokens == pytest.approx(19_400, abs=500)
    assert (plan.pool_nodes, plan.prefill_nodes, plan.decode_nodes) == (4, 3, 5)
    assert plan.requests_per_s == pytest.approx(3.24, rel=0.03)
    assert (alone.prefill_nodes, alone.decode_nodes) == (9, 3)
    assert alone.requests_per_s == pytest.approx(2.11, rel=1e-3)
    assert plan.requests_per_s / alone.requests_per_s == pytest.approx(1.54, abs=0.08)
    assert plan.requests_per_s / remote.requests_per_s == pytest.approx(1.32, abs=0.08)


@pytest.mark.parametrize(("tokens", "gbit"), [(1024, 3.6376), (8192, 3.5989), (32768, 3.1972), (131072, 2.6257)])
def test_the_rate_of_kv_of_a_node_falls_with_the_length(tokens: int, gbit: float) -> None:
    assert kv_rate_bytes_per_s(published(), tokens) / GBIT == pytest.approx(gbit, rel=1e-4)


# --- whatever the figures ----------------------------------------------------------------------------------

LENGTHS = st.one_of(
    st.builds(lambda mu, sigma: LogNormal(mu, sigma, 16, 200_000), st.floats(6, 10.5), st.floats(0.3, 1.6)),
    st.builds(Empirical, st.lists(st.integers(1, 100_000), min_size=1, max_size=30)),
)
CLUSTERS = st.builds(
    lambda lengths, times, pool, local, decode, gbit: PrefillClusters(
        lengths,
        EXAMPLE_CLUSTERS.kv_bytes,
        EXAMPLE_CLUSTERS.pool_prefill_s,
        Slower(EXAMPLE_CLUSTERS.pool_prefill_s, times),
        pool,
        local,
        decode,
        gbit * GBIT,
    ),
    LENGTHS,
    st.floats(0.5, 6),
    st.integers(0, 8),
    st.integers(2, 10),
    st.floats(0.1, 5),
    st.floats(0.5, 200),
)
QUICK = settings(derandomize=True, deadline=None, database=None, max_examples=40)


@given(CLUSTERS)
@QUICK
def test_the_best_plan_is_as_good_as_every_plan_on_a_grid(clusters: PrefillClusters) -> None:
    best = best_plan(clusters)
    for nodes in range(clusters.local_nodes):
        for t in (0, 200, 1_000, 5_000, 15_000, 40_000, 150_000):
            # Of a distribution with steps the mean can lie either side of one, and the time of a mean is no mean time.
            assert best.requests_per_s >= 0.97 * rates(clusters, t, nodes).requests_per_s


@given(CLUSTERS, st.integers(1, 3), st.floats(1.05, 4))
@QUICK
def test_more_nodes_and_more_bandwidth_never_serve_less(clusters: PrefillClusters, more: int, wider: float) -> None:
    best = best_plan(clusters).requests_per_s * (1 - 1e-6)
    assert best_plan(replace(clusters, pool_nodes=clusters.pool_nodes + more)).requests_per_s >= best
    assert best_plan(replace(clusters, local_nodes=clusters.local_nodes + more)).requests_per_s >= best
    assert best_plan(replace(clusters, egress_bytes_per_s=clusters.egress_bytes_per_s * wider)).requests_per_s >= best


@given(CLUSTERS, st.floats(0, 2e5))
@QUICK
def test_the_bottleneck_is_what_bounds_the_rate(clusters: PrefillClusters, t: float) -> None:
    found = rates(clusters, t, clusters.local_nodes - 1, 1)
    p = found.offloaded
    bounds = (
        found.pool_per_s / p if p else inf,
        found.prefill_per_s / (1 - p) if p < 1 else inf,
        found.decode_per_s,
    )
    assert found.requests_per_s == min(bounds)
    at = [{Bottleneck.POOL, Bottleneck.EGRESS}, {Bottleneck.PREFILL}, {Bottleneck.DECODE}]
    assert found.bottleneck in at[bounds.index(min(bounds))]
    assert found.egress_bytes_per_s <= clusters.egress_bytes_per_s * (1 + 1e-9)


def test_the_mean_time_gives_a_lower_rate_and_nearly_the_same_threshold() -> None:
    by_length = best_plan(EXAMPLE_CLUSTERS)
    by_time = best_plan(replace(EXAMPLE_CLUSTERS, average="time"))
    assert by_time.requests_per_s == pytest.approx(3.1663, rel=1e-3)
    assert by_time.requests_per_s < by_length.requests_per_s
    assert by_time.threshold_tokens == pytest.approx(by_length.threshold_tokens, rel=0.02)


@pytest.mark.parametrize("longest", [60_000.0, 131_072.0, 1e6, inf])
def test_the_root_does_not_depend_on_where_the_search_begins(longest: float) -> None:
    clusters = published()
    narrow = LogNormal(8.0, 0.4, 16, longest)
    assert best_threshold(replace(clusters, lengths=narrow), 3) == pytest.approx(
        best_threshold(replace(clusters, lengths=LogNormal(8.0, 0.4, 16, 50_000)), 3), rel=1e-6
    )


def test_without_a_pool_or_without_local_prefill_all_goes_to_the_other() -> None:
    clusters = published()
    assert best_threshold(replace(clusters, pool_nodes=0), 3) == clusters.lengths.longest
    assert best_threshold(clusters, 0) == 0.0
    alone = best_plan(replace(clusters, pool_nodes=0))
    assert (alone.offloaded, alone.egress_bytes_per_s) == (0.0, 0.0)
    assert best_plan(replace(clusters, local_nodes=1)).offloaded == 1.0


def test_what_takes_no_time_bounds_nothing() -> None:
    found = rates(replace(published(), pool_prefill_s=Polynomial((0.0,)), egress_bytes_per_s=inf), 19_400, 3)
    assert found.pool_per_s == inf and found.bottleneck is Bottleneck.PREFILL
    idle = rates(replace(published(), local_prefill_s=Polynomial((0.0,))), 19_400, 0)
    assert (idle.prefill_per_s, idle.requests_per_s) == (0.0, 0.0)


def test_what_cannot_be_is_refused() -> None:
    clusters = published()
    for nodes in ((-1, 2), (3, 0), (5, 4), (8, 1)):
        with pytest.raises(UsageError, match=r"divided|decode"):
            rates(clusters, 1000, *nodes)
    with pytest.raises(UsageError, match="two local nodes"):
        all_local(clusters, 1)
    for change in ({"local_nodes": 0}, {"pool_nodes": -1}, {"decode_per_s": 0}, {"average": "mode"}):
        with pytest.raises(UsageError):
            replace(clusters, **change)


# --- where one prompt goes ---------------------------------------------------------------------------------

PROMPTS = st.integers(1, 100_000).flatmap(
    lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(0, n), st.floats(0, 120_000))
)


def test_with_scarce_bandwidth_each_cache_counts_alone() -> None:
    assert place(30_000, 15_000, 25_000, 19_400) == (False, 15_000, 0)
    assert place(30_000, 5_000, 25_000, 19_400) == (True, 5_000, 0)


def test_with_ample_bandwidth_the_better_cache_counts_and_is_copied() -> None:
    assert place(30_000, 5_000, 25_000, 19_400, ample=True) == (False, 5_000, 20_000)
    assert place(60_000, 30_000, 5_000, 19_400, ample=True) == (True, 30_000, 25_000)
    assert place(60_000, 5_000, 30_000, 19_400, ample=True) == (True, 30_000, 0)


@given(PROMPTS)
@QUICK
def test_both_rules_choose_alike_where_the_pool_holds_no_more(prompt: tuple[int, int, int, float]) -> None:
    tokens, local, pool, t = prompt
    pool = min(pool, local)
    assert place(tokens, local, pool, t).remote == place(tokens, local, pool, t, ample=True).remote


@given(PROMPTS, st.booleans())
@QUICK
def test_what_is_computed_and_copied_covers_what_the_place_lacks(
    prompt: tuple[int, int, int, float], ample: bool
) -> None:
    tokens, local, pool, t = prompt
    found = place(tokens, local, pool, t, ample)
    assert found.computed_tokens + found.copied_tokens == tokens - (pool if found.remote else local)
    assert min(found.computed_tokens, found.copied_tokens) >= 0


def test_a_cache_that_holds_more_than_the_prompt_is_refused() -> None:
    for cached in ((-1, 0), (11, 0), (0, 11)):
        with pytest.raises(UsageError):
            place(10, *cached, 5)
