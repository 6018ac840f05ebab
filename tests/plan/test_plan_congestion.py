"""Following a link: the step response, what holds for any load, capacity, relief, and one node a period."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefill_case import EXAMPLE_CLUSTERS, GBIT, published

from prefixroute import UsageError
from prefixroute.plan import (
    Backlog,
    CapacityEstimate,
    ControllerSettings,
    Empirical,
    LinkMonitor,
    LinkState,
    Rebalancer,
    ThresholdController,
    best_threshold,
    rates,
    relief_threshold,
)

QUICK = settings(derandomize=True, deadline=None, database=None, max_examples=60)
STATES = st.builds(LinkState, st.floats(0, 1.5), st.floats(0, 30), st.floats(0, 0.05))


def plant(requests_per_s: float, t: float, gbit: float = 10.0) -> float:
    """Utilisation of a link by the model: what is offloaded at a rate, over what the link carries."""
    clusters = published()
    p, longer = clusters.lengths.share_over(t), clusters.lengths.mean_over(t)
    return requests_per_s * p * clusters.kv_bytes(longer) / (gbit * GBIT)


def respond(controller: ThresholdController, loads: list[float]) -> list[tuple[float, float]]:
    """Return the threshold and the utilisation of every second."""
    found = []
    for now, load in enumerate(loads):
        t = controller.threshold_tokens
        found.append((t, plant(load, t)))
        controller.step(LinkState(found[-1][1]), now)
    return found


def test_the_step_response_rises_by_tenths_holds_and_decays_by_hundredths() -> None:
    found = respond(ThresholdController(19_400, ControllerSettings(dwell_s=0)), [3.18] * 10 + [1.5] * 62)
    rising = [19_400, 21_340, 23_474, 25_821.4, 28_403.5, 31_243.9, 34_368.3, 34_368.3, 34_368.3]
    assert [t for t, _ in found[:9]] == pytest.approx(rising, abs=0.1)
    used = [1.1941, 1.1421, 1.0871, 1.0290, 0.9684, 0.9055, 0.8408]
    assert [v for _, v in found[:7]] == pytest.approx(used, abs=1e-4)
    assert found[10][1] == pytest.approx(0.3966, abs=1e-4)
    falling = {20: 31_082.1, 30: 28_110.1, 40: 25_422.2, 50: 22_991.4, 60: 20_793.0, 67: 19_400, 71: 19_400}
    assert [found[i][0] for i in falling] == pytest.approx(list(falling.values()), abs=0.1)
    assert found[66][0] > 19_400


@given(st.lists(STATES, max_size=80), st.builds(ControllerSettings, dwell_s=st.floats(0, 20), most=st.floats(1, 9)))
@QUICK
def test_the_threshold_stays_between_the_optimum_and_its_bound_and_returns(
    states: list[LinkState], chosen: ControllerSettings
) -> None:
    controller = ThresholdController(1_000, chosen)
    now = 0.0
    for state in states:
        now += 1
        assert 1_000 <= controller.step(state, now) <= 1_000 * chosen.most
    for _ in range(400):
        now += 1
        controller.step(LinkState(0.0), now)
    assert controller.threshold_tokens == 1_000


@given(st.lists(st.tuples(st.floats(0, 1.5), st.floats(0, 0.4)), min_size=1, max_size=60))
@QUICK
def test_a_busier_link_never_has_the_lower_threshold(loads: list[tuple[float, float]]) -> None:
    calm, busy = (ThresholdController(1_000, ControllerSettings(dwell_s=0)) for _ in range(2))
    for now, (used, more) in enumerate(loads):
        assert busy.step(LinkState(used + more), now) >= calm.step(LinkState(used), now) * (1 - 1e-12)


def test_in_the_dead_band_nothing_moves() -> None:
    controller = ThresholdController(1_000)
    rng = random.Random(1)
    controller.step(LinkState(0.9), 0)
    for now in range(1, 500):
        assert controller.step(LinkState(rng.uniform(0.601, 0.849)), now) == 1_100
    assert controller.moves == 1


@pytest.mark.parametrize("sign", [LinkState(0.9), LinkState(0.1, 5.0), LinkState(0.1, 0.0, 0.02)], ids=str)
def test_each_sign_of_congestion_raises_it(sign: LinkState) -> None:
    controller = ThresholdController(1_000, ControllerSettings(queue_high_s=3.0, queue_low_s=1.0))
    assert controller.step(sign, 0) == pytest.approx(1_100)


def test_a_queue_that_is_left_keeps_it_up() -> None:
    controller = ThresholdController(1_000, ControllerSettings(queue_high_s=3.0, queue_low_s=1.0, dwell_s=0))
    controller.step(LinkState(0.9), 0)
    assert controller.step(LinkState(0.1, 2.0), 1) == 1_100
    assert controller.step(LinkState(0.1, 0.5), 2) == pytest.approx(1_089)


def test_directions_change_no_faster_than_the_dwell() -> None:
    controller = ThresholdController(1_000, ControllerSettings(dwell_s=5.0))
    found = [controller.step(LinkState(0.9 if now % 2 == 0 else 0.1), now) for now in range(60)]
    ups = [after > before for before, after in pairwise([1_000.0, *found]) if after != before]
    assert sum(a != b for a, b in pairwise(ups)) <= 60 / 5


def test_small_changes_are_saved_up() -> None:
    controller = ThresholdController(1_000, ControllerSettings(least_change=0.1, dwell_s=0))
    for now in range(8):
        controller.step(LinkState(0.9), now)
    high, moves = controller.threshold_tokens, controller.moves
    found = [controller.step(LinkState(0.1), 10 + now) for now in range(200)]
    steps = [after / before for before, after in pairwise([high, *found]) if after != before]
    assert all(step < 0.9 for step in steps[:-1]) and found[-1] == 1_000
    assert controller.moves - moves == len(steps) <= 8


def test_it_rises_to_the_ceiling_at_most_and_falls_back_to_it() -> None:
    controller = ThresholdController(1_000, ControllerSettings(dwell_s=2))
    assert [controller.step(LinkState(1.0), now, 1_150) for now in range(4)] == pytest.approx([1_100, *[1_150] * 3])
    assert controller.step(LinkState(1.0), 9, 1_120) == pytest.approx(1_120)
    assert controller.step(LinkState(1.0), 19, 500) == 1_000


def test_a_new_optimum_moves_an_idle_threshold_and_bounds_a_raised_one() -> None:
    idle = ThresholdController(1_000)
    assert idle.replan(800) == 800 and idle.replan(1_200) == 1_200
    raised = ThresholdController(1_000)
    raised.step(LinkState(0.9), 0)
    assert raised.replan(900) == pytest.approx(1_100)
    assert raised.replan(2_000) == 2_000
    with pytest.raises(UsageError):
        raised.replan(inf)


def test_where_all_prompts_go_to_the_pool_a_rise_begins_at_the_floor_and_a_fall_ends_there() -> None:
    controller = ThresholdController(0.0, ControllerSettings(floor_tokens=100, dwell_s=0, most=1.2))
    assert [controller.step(LinkState(0.9), now) for now in range(3)] == pytest.approx([110, 120, 120])
    found = [controller.step(LinkState(0.1), now) for now in range(3, 40)]
    assert found[0] == pytest.approx(118.8) and found[-1] == 0.0
    assert min(t for t in found if t) > 100


def test_averages_follow_what_is_seen_and_a_clock_that_goes_back_changes_nothing() -> None:
    monitor = LinkMonitor(5.0)
    assert monitor.observe(LinkState(1.0), 0) == LinkState(1.0)
    values = [monitor.observe(LinkState(0.0, 2.0, 0.1), now).utilisation for now in range(1, 40)]
    assert values == sorted(values, reverse=True) and values[4] == pytest.approx(0.3679, abs=1e-3)
    assert monitor.state.queue_s == pytest.approx(2.0, abs=0.01)
    before = monitor.state
    assert monitor.observe(LinkState(1.0), 20) == before
    assert LinkMonitor(0.0).observe(LinkState(0.4), 1) == LinkState(0.4)


def test_a_link_that_is_held_up_tells_what_it_carries_and_one_that_is_not_is_taken_for_whole_again() -> None:
    estimate = CapacityEstimate(100.0)
    assert estimate.observe(60.0, 0.5) == 100.0
    for _ in range(10):
        estimate.observe(50.0, 1.0)
    assert estimate.bytes_per_s == pytest.approx(50.0, abs=0.1)
    later = [estimate.observe(10.0, 0.0) for _ in range(60)]
    assert later == sorted(later) and later[-1] == 100.0


# --- relief, and the slow loop -----------------------------------------------------------------------------


def test_relief_without_a_backlog_is_the_root_and_grows_with_what_waits_for_the_link() -> None:
    clusters = published(gbit_per_s=8)
    root = best_threshold(clusters, 3)
    assert relief_threshold(clusters, 3, 2.0, Backlog()) == pytest.approx(root, abs=2)
    found = [relief_threshold(clusters, 3, 2.0, Backlog(link_bytes=n * 5e9)) for n in range(6)]
    assert found == sorted(found) and found[-1] > 1.3 * root
    assert relief_threshold(clusters, 3, 2.0, Backlog(local_s=500.0)) == pytest.approx(root, abs=2)
    assert relief_threshold(clusters, 3, 2.0, Backlog(pool_s=200.0)) > 1.2 * root
    assert relief_threshold(clusters, 0, 2.0, Backlog(link_bytes=1e12)) == 0.0, "nobody here could take over"


def test_cautious_relief_leaves_more_to_the_link() -> None:
    clusters, backlog = published(gbit_per_s=8), Backlog(link_bytes=20e9)
    found = [relief_threshold(clusters, 3, 2.0, backlog, 30.0, caution) for caution in (1.0, 1.25, 2.0, 100.0)]
    assert found == sorted(found, reverse=True) and found[0] > found[2]
    assert found[-1] == pytest.approx(best_threshold(clusters, 3), abs=2)


def test_relief_has_both_sides_through_at_the_same_time() -> None:
    clusters, rate, horizon, backlog = published(gbit_per_s=5), 1.5, 30.0, Backlog(10e9, 0.0, 20.0)
    found = rates(clusters, relief_threshold(clusters, 3, rate, backlog, horizon), 3)
    p, kv = found.offloaded, clusters.kv_bytes(found.long_tokens)
    link_s = (backlog.link_bytes + rate * horizon * p * kv) / clusters.egress_bytes_per_s
    own_s = rate * horizon * (1 - p) * clusters.local_prefill_s(found.short_tokens)
    assert link_s == pytest.approx((backlog.local_s + own_s) / 3, rel=1e-3)


def test_one_node_at_most_is_converted_a_period_until_the_plan_is_reached() -> None:
    slow = Rebalancer(EXAMPLE_CLUSTERS, 6, now=0.0)
    assert slow.step(59.9) is None
    found = [slow.step(60.0 * minute) for minute in range(1, 8)]
    assert [each and each.converted_to for each in found] == ["decode", "decode", "", "", "", "", ""]
    assert [each and each.plan.prefill_nodes for each in found] == [5, 4, 4, 4, 4, 4, 4]
    eager = Rebalancer(EXAMPLE_CLUSTERS, 4, now=0.0, least_gain=0.0)
    assert (s := eager.step(60.0)) and s.plan.prefill_nodes == 3, "2 % more is not worth a conversion, unless said"
    up = Rebalancer(EXAMPLE_CLUSTERS, 1, now=0.0)
    assert [(s := up.step(60.0 * m)) and s.converted_to for m in (1, 2, 3)] == ["prefill", "prefill", ""]


def test_the_slow_loop_plans_for_the_lengths_that_come() -> None:
    slow = Rebalancer(EXAMPLE_CLUSTERS, 3, now=0.0)
    rng = random.Random(2)
    for _ in range(100):
        slow.saw(60_000)
    early = slow.step(60.0)
    assert early is not None and early.plan.threshold_tokens == pytest.approx(19_641, abs=1), "too few to tell"
    drawn = [min(200_000, 3 * EXAMPLE_CLUSTERS.lengths.draw(rng)) for _ in range(5_000)]
    for tokens in drawn:
        slow.saw(tokens)
    later = slow.step(120.0)
    assert later is not None and later.plan.threshold_tokens > 30_000
    seen = replace(EXAMPLE_CLUSTERS, lengths=Empirical(drawn[-4096:]))
    assert later.plan.threshold_tokens == best_threshold(seen, slow.prefill_nodes)


def test_the_slow_loop_takes_a_narrower_link_into_account() -> None:
    slow = Rebalancer(EXAMPLE_CLUSTERS, 3, now=0.0, least_gain=10.0)
    found = slow.step(60.0, 5 * GBIT)
    assert found is not None and found.converted_to == ""
    assert found.plan.threshold_tokens > 30_000


def test_what_cannot_be_is_refused() -> None:
    bad_settings = (
        {"low": 0.9},
        {"rise": 1.0},
        {"fall": 1.0},
        {"most": 0.5},
        {"dwell_s": -1.0},
        {"queue_low_s": 2.0, "queue_high_s": 1.0},
        {"floor_tokens": 0.0},
    )
    for bad in bad_settings:
        with pytest.raises(UsageError):
            ControllerSettings(**bad)
    for make in (
        lambda: LinkMonitor(-1.0),
        lambda: ThresholdController(-1.0),
        lambda: CapacityEstimate(0.0),
        lambda: Rebalancer(EXAMPLE_CLUSTERS, 8, 0.0),
        lambda: Rebalancer(EXAMPLE_CLUSTERS, 3, 0.0, period_s=0.0),
        lambda: relief_threshold(EXAMPLE_CLUSTERS, 3, -1.0, Backlog()),
        lambda: relief_threshold(EXAMPLE_CLUSTERS, 3, 1.0, Backlog(), 30.0, 0.0),
    ):
        with pytest.raises(UsageError):
            make()
