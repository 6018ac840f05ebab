"""The simulation of two clusters: a link by hand, conservation, determinism, and the published comparison small."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefill_case import EXAMPLE_CLUSTERS, FILE, GBIT

from prefixroute import UsageError
from prefixroute.plan import Decode, KvBytes, LogNormal, Polynomial, PrefillClusters
from prefixroute.sim.prefill.cases import ADAPTIVE, Episode, at_rate, latency, setups, sustained, through
from prefixroute.sim.prefill.clusters import LinkChange, PrefillRun, PrefillSetup, PromptArrival, bursty, poisson
from prefixroute.sim.prefill.kv_link import SharedLink

# A prompt of n tokens: n / 100 s in the pool, n / 50 s here, 1,000 bytes a token.
SIMPLE = PrefillClusters(
    LogNormal(6, 0.5, 10, 5_000),
    KvBytes(1_000.0),
    Polynomial((0.0, 0.01)),
    Polynomial((0.0, 0.02)),
    1,
    2,
    10.0,
    1e6,
)
DECODE = Decode(4, 0.1, 10)


def simple(**more: object) -> PrefillSetup:
    wanted = {"threshold_tokens": 100.0, "pool_nodes": 1, "prefill_nodes": 1, "decode_nodes": 1}
    return PrefillSetup(SIMPLE, DECODE, **{**wanted, "layers": 10, "rtt_s": 0.0, **more})  # type: ignore[arg-type]


def times(setup: PrefillSetup, *prompts: tuple[float, int]) -> list[float]:
    return PrefillRun(setup, [PromptArrival(*prompt) for prompt in prompts]).run().ttft_s


def test_a_short_prompt_is_prefilled_here_and_a_long_one_comes_with_its_last_layer() -> None:
    assert times(simple(), (0.0, 100)) == pytest.approx([2.0])
    # 200 kB at 1 MB/s: nine layers are sent while the prompt is computed, the tenth takes 0.02 s.
    assert times(simple(), (0.0, 200)) == pytest.approx([2.0 + 0.02])
    assert times(simple(rtt_s=0.5), (0.0, 200)) == pytest.approx([2.52])


def test_a_link_that_is_slower_than_the_prefill_counts_instead() -> None:
    assert times(simple(changes=(LinkChange(0.0, 5e4),)), (0.0, 200)) == pytest.approx([4.0])


def test_prompts_wait_for_their_own_role_only() -> None:
    assert times(simple(), (0.0, 100), (0.5, 100), (0.6, 200)) == pytest.approx([2.0, 3.5, 2.02])
    assert times(simple(prefill_nodes=2), (0.0, 100), (0.5, 100)) == pytest.approx([2.0, 2.0])


def test_a_prompt_waits_for_a_decode_slot() -> None:
    one = simple(prefill_nodes=9)
    prompts = [(0.0, 50)] * 5
    assert times(one, *prompts) == pytest.approx([1.0] * 4 + [2.0])


def test_a_change_of_bandwidth_counts_from_its_moment() -> None:
    # 0.2 MB/s are more than the 90 kB/s that are made; from 1 s on 50 kB/s: 90 kB by then, 110 kB after it.
    assert times(simple(changes=(LinkChange(1.0, 5e4),)), (0.0, 200)) == pytest.approx([1.0 + 110 / 50])


def test_transfers_share_a_link_evenly_and_who_needs_less_leaves_more() -> None:
    link = SharedLink(100.0, layers=10)
    link.begin(0, 1_000.0, 0.0, 0.0)
    link.begin(1, 90.0, 8.1, 0.0)
    # The second one makes 10 bytes a second, the first one takes the rest.
    assert link.next_end() == pytest.approx(9.0)
    link.computed(1, 8.1)
    assert link.left_bytes == pytest.approx(1_000 - 8.1 * 90 + 9)
    assert link.next_end() == pytest.approx(8.1 + 9 / 50)
    assert link.ended(8.28) == [1]
    link.advance(9.0)
    assert link.limited_s == pytest.approx(9.0)
    assert link.ended(12.0) == [0] and len(link) == 0
    assert link.sent_bytes == pytest.approx(1_090)


def test_a_transfer_is_bounded_by_its_own_connections() -> None:
    link = SharedLink(100.0, layers=1, transfer_bytes_per_s=20.0)
    link.begin(0, 100.0, 0.0, 0.0)
    assert link.next_end() == pytest.approx(5.0)
    link.advance(5.0)
    assert link.limited_s == 0.0, "it was not the link that held it up"


@given(
    st.lists(st.tuples(st.floats(0, 3), st.integers(1, 3_000)), min_size=1, max_size=30),
    st.floats(10, 3_000),
    st.integers(0, 3),
    st.integers(0, 3),
    st.lists(st.tuples(st.floats(0, 40), st.floats(1e4, 1e7)), max_size=3),
    st.booleans(),
)
@settings(derandomize=True, deadline=None, database=None, max_examples=80)
def test_every_prompt_gets_its_token_no_sooner_than_alone(
    gaps: list[tuple[float, int]],
    threshold: float,
    pool: int,
    prefill: int,
    changes: list[tuple[float, float]],
    adaptive: bool,
) -> None:
    if not pool + prefill:
        return
    now, arrivals = 0.0, []
    for gap, tokens in gaps:
        now += gap
        arrivals.append(PromptArrival(now, tokens))
    shifts = tuple(LinkChange(*change) for change in changes)
    setup = simple(threshold_tokens=threshold, pool_nodes=pool, prefill_nodes=prefill, changes=shifts)
    setup = replace(setup, adaptive=ADAPTIVE if adaptive else None)
    served = PrefillRun(setup, arrivals).run()
    sent = 0.0
    for arrival, ttft, remote in zip(arrivals, served.ttft_s, served.remote, strict=True):
        curve = SIMPLE.pool_prefill_s if remote else SIMPLE.local_prefill_s
        assert ttft >= curve(arrival.tokens) * (1 - 1e-9)
        sent += SIMPLE.kv_bytes(arrival.tokens) if remote else 0
    assert served.sent_bytes == pytest.approx(sent, rel=1e-6, abs=10)
    assert 0 <= served.in_time <= len(arrivals)
    assert served == PrefillRun(setup, arrivals).run()


def test_a_fixed_threshold_divides_by_length_alone() -> None:
    arrivals = poisson(SIMPLE.lengths, 1.0, 200, random.Random(1))
    served = PrefillRun(simple(threshold_tokens=400.0), arrivals).run()
    assert served.remote == [arrival.tokens > 400 for arrival in arrivals]
    assert served.thresholds == [(0.0, 400.0)]


def test_arrivals_come_at_their_rate_bursts_or_not_and_repeat_with_their_seed() -> None:
    for times_ in (1.0, 3.0):
        found = bursty(SIMPLE.lengths, 2.0, 20_000, random.Random(3), times_)
        assert len(found) / found[-1].at == pytest.approx(2.0, rel=0.1)
        assert all(a.at <= b.at for a, b in pairwise(found))
        assert found[:9] == bursty(SIMPLE.lengths, 2.0, 20_000, random.Random(3), times_)[:9]
    even, uneven = (bursty(SIMPLE.lengths, 2.0, 5_000, random.Random(3), t) for t in (1.0, 3.0))
    busiest = [max(sum(i <= a.at / 20 < i + 1 for a in found) for i in range(100)) for found in (even, uneven)]
    assert busiest[1] > busiest[0] + 10


def test_the_same_arrivals_at_another_rate() -> None:
    found = at_rate(poisson(SIMPLE.lengths, 1.0, 50, random.Random(1)), 4.0)
    assert len(found) / found[-1].at == pytest.approx(4.0)
    with pytest.raises(UsageError):
        at_rate(found[:1], 4.0)


def test_latency_is_the_mean_and_the_value_of_rank_nine_tenths() -> None:
    assert latency(range(10)) == (4.5, 9, 10)
    with pytest.raises(UsageError, match="no request"):
        latency([])


# --- the published case ------------------------------------------------------------------------------------


def test_set_ups_are_the_published_ones() -> None:
    found = {
        name: (s.pool_nodes, s.prefill_nodes, s.decode_nodes) for name, s in setups(FILE, EXAMPLE_CLUSTERS).items()
    }
    assert found == {"plan": (4, 3, 5), "all to the pool": (4, 0, 8), "all local": (0, 9, 3)}


def test_without_queues_times_to_first_token_are_the_published_ones() -> None:
    arrivals = poisson(EXAMPLE_CLUSTERS.lengths, 0.3, 1_500, random.Random(1))
    published = {"plan": (2.22, 3.51), "all to the pool": (1.74, 3.51), "all local": (4.44, 9.73)}
    for name, setup in setups(FILE, EXAMPLE_CLUSTERS).items():
        found = latency(PrefillRun(setup, arrivals).run().ttft_s)
        assert (found.mean_s, found.p90_s) == pytest.approx(published[name], rel=0.1), name


def test_the_plan_sustains_more_than_either_by_the_published_ratios() -> None:
    arrivals = poisson(EXAMPLE_CLUSTERS.lengths, 1.0, 4_000, random.Random(1))
    most = {name: sustained(setup, arrivals, 4.0, 7) for name, setup in setups(FILE, EXAMPLE_CLUSTERS).items()}
    assert most["plan"] / most["all local"] == pytest.approx(1.54, abs=0.12)
    assert most["plan"] / most["all to the pool"] == pytest.approx(1.32, abs=0.12)


def test_a_threshold_that_follows_the_link_helps_when_it_is_cut_and_is_the_planned_one_when_not() -> None:
    clusters = replace(EXAMPLE_CLUSTERS, egress_bytes_per_s=8 * GBIT)
    setup = setups(FILE, clusters)["plan"]
    episode = Episode(1.5, total_s=700.0)
    fixed, adaptive = ([through(episode, setup, seed, a) for seed in (1, 2)] for a in (None, ADAPTIVE))
    during = [latency(t for _, each in runs for t in each.during).p90_s for runs in (fixed, adaptive)]
    assert during[1] <= 0.75 * during[0]
    outside = [latency(t for _, each in runs for t in each.outside).p90_s for runs in (fixed, adaptive)]
    assert outside[1] == pytest.approx(outside[0], rel=0.1)
    assert all(each.moves == 0 for _, each in fixed)
    for served, each in adaptive:
        assert each.moves > 2
        assert min(t for _, t in served.thresholds) == setup.threshold_tokens


@pytest.mark.parametrize(("gbit", "carried", "rate"), [(8, 8, 1.8), (8, 4, 1.5), (100, 100, 2.7)])
def test_at_a_constant_load_the_threshold_moves_four_times_a_minute_at_most(
    gbit: float, carried: float, rate: float
) -> None:
    clusters = replace(EXAMPLE_CLUSTERS, egress_bytes_per_s=gbit * GBIT)
    setup = replace(setups(FILE, clusters)["plan"], changes=(LinkChange(0.0, carried * GBIT),), adaptive=ADAPTIVE)
    arrivals = poisson(clusters.lengths, rate, round(rate * 900), random.Random(1))
    served = PrefillRun(setup, arrivals).run()
    settled = [at for at, _ in served.thresholds if 300 < at < arrivals[-1].at]
    assert len(settled) / (arrivals[-1].at - 300) * 60 <= 4


def test_what_cannot_be_is_refused() -> None:
    for bad in ({"decode_nodes": 0}, {"pool_nodes": -1}, {"pool_nodes": 0, "prefill_nodes": 0}):
        with pytest.raises(UsageError):
            simple(**bad)
    for make in (
        lambda: SharedLink(0.0, 1),
        lambda: SharedLink(1.0, 0),
        lambda: poisson(SIMPLE.lengths, 0.0, 1, random.Random(1)),
        lambda: SharedLink(1.0, 1, -inf),
        lambda: simple(rebalance_s=-1.0),
    ):
        with pytest.raises(UsageError):
            make()


# --- the slow loop -----------------------------------------------------------------------------------------


def test_a_node_that_becomes_a_decode_node_works_on_until_it_is_free() -> None:
    run = PrefillRun(simple(prefill_nodes=2, decode_nodes=1), [PromptArrival(0.0, 50)] * 2)
    run._start(False, 0.0)
    run._local.free = 0
    run._convert("decode", 0.0)
    assert (run._local.leaving, run._slots) == (1, 4)
    run._local_done(0, 1.0)
    assert (run._local.leaving, run._local.free, run._slots) == (0, 0, 3)
    run._converted(1, 21.0)
    assert run._slots == 7
    run._convert("prefill", 30.0)
    assert run._slots == 3
    run._converted(0, 60.0)
    assert run._local.free == 1


def test_a_free_node_is_converted_at_once() -> None:
    run = PrefillRun(simple(prefill_nodes=2, convert_s=5.0), [PromptArrival(0.0, 50)])
    run._convert("decode", 1.0)
    assert (run._local.free, run._local.leaving) == (1, 0)
    assert run._agenda.next_at() == 6.0
    slots = run._slots
    run._agenda.step()
    assert (run._slots, run._agenda.next_at()) == (slots + 4, inf)


def test_the_slow_loop_converts_nodes_to_what_the_lengths_ask_for() -> None:
    setup = setups(FILE, EXAMPLE_CLUSTERS)["plan"]
    wrong = replace(setup, prefill_nodes=1, decode_nodes=7, rebalance_s=60.0)
    arrivals = poisson(EXAMPLE_CLUSTERS.lengths, 2.0, 1_600, random.Random(4))
    run = PrefillRun(wrong, arrivals)
    served = run.run()
    assert [role for _, role in run.conversions] == ["prefill", "prefill"]
    gaps = [after - before for (before, _), (after, _) in pairwise(run.conversions)]
    assert all(gap >= 60 for gap in gaps)
    stuck = PrefillRun(replace(wrong, rebalance_s=0.0), arrivals).run()
    late = slice(1_000, None)
    assert latency(served.ttft_s[late]).mean_s < 0.5 * latency(stuck.ttft_s[late]).mean_s
    assert served.thresholds[-1][1] == pytest.approx(19_641, rel=0.1)


def test_both_loops_together_serve_every_prompt_and_repeat() -> None:
    clusters = replace(EXAMPLE_CLUSTERS, egress_bytes_per_s=8 * GBIT)
    setup = replace(setups(FILE, clusters)["plan"], adaptive=ADAPTIVE, rebalance_s=60.0)
    setup = replace(setup, prefill_nodes=2, decode_nodes=6, changes=(LinkChange(200.0, 3 * GBIT),))
    arrivals = poisson(clusters.lengths, 1.2, 600, random.Random(4))
    first, second = PrefillRun(setup, arrivals), PrefillRun(setup, arrivals)
    assert first.run() == second.run()
    assert first.conversions == second.conversions != []
    assert len(first.thresholds) > 2
