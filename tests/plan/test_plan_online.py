"""The online planner: estimates, migration without gaps, a load that jumps, a fleet that changes."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import planning
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixroute import UsageError
from prefixroute.plan import (
    Fading,
    LinkEstimate,
    LinkFit,
    Links,
    Move,
    OnlinePlanner,
    OnlineSettings,
    Problem,
    RateWatch,
    Routed,
    Span,
    adaptive,
    assign,
    coverage,
    deal_alike,
    plan_migration,
    with_requests,
)
from prefixroute.plan.placement.estimates import UNKNOWN_RTT_MS
from prefixroute.sim.placement.fleets import made_fleet
from prefixroute.sim.placement.wan import built_in

SEEDS = st.integers(0, 10**6)


TIGHT = OnlineSettings(headroom=0.0)
"""Placements for the load that there is, and no more."""


def fleet(seed: int = 0) -> Problem:
    return made_fleet(built_in("world"), seed).problem


# --- estimates ---------------------------------------------------------------------------------------------


def test_delay_and_bandwidth_are_told_apart_by_payloads_of_two_sizes() -> None:
    link = LinkEstimate(0.0, LinkFit(50.0, 0.0))
    rng = random.Random(1)
    for i in range(300):
        payload = rng.choice((28_672.0, 28_672.0 * 20))
        link.observe(payload, (120.0 + payload / 5_000) * rng.uniform(0.95, 1.05), float(i))
    assert link.fit.delay_ms == pytest.approx(120, rel=0.05)
    assert 1 / link.fit.ms_per_byte == pytest.approx(5_000, rel=0.1)
    for i in range(300, 600):
        payload = rng.choice((28_672.0, 28_672.0 * 20))
        link.observe(payload, 120.0 + payload / 1_000, float(i))
    assert 1 / link.fit.ms_per_byte == pytest.approx(1_000, rel=0.1)


def test_with_one_size_of_payload_the_delay_alone_is_learnt() -> None:
    link = LinkEstimate(0.0, LinkFit(10.0, 0.5))
    for i in range(400):
        link.observe(100.0, 200.0, float(i))
    assert link.fit.ms_per_byte == pytest.approx(0.5, rel=0.05)
    assert link.fit.ms(100.0) == pytest.approx(200.0, rel=0.02)


def test_what_is_not_known_is_far_and_what_is_known_is_never_free() -> None:
    assert LinkEstimate(0.0).fit.ms(0) == UNKNOWN_RTT_MS
    link = LinkEstimate(0.0)
    for i in range(1000):
        link.observe(0.0, 0.0, float(i))
    assert link.fit.ms(0) > 0
    for bad in ((-1.0, 1.0), (1.0, -1.0), (1.0, math.inf)):
        with pytest.raises(UsageError):
            link.observe(*bad, 0.0)
    speed = Fading(0.0, 10.0)
    for i in range(200):
        speed.observe(20.0, float(i))
    assert speed.value == pytest.approx(20.0, rel=0.05)
    with pytest.raises(UsageError):
        speed.observe(0.0, 1.0)


def arrivals(watch: RateWatch, rate: float, begin: float, end: float, rng: random.Random) -> float | None:
    """Feed Poisson arrivals; return when a change was first seen."""
    at, looked = begin, begin
    while True:
        at += rng.expovariate(rate)
        while looked < min(at, end):
            looked += 1.0
            if watch.changed(looked) is not None:
                return looked
        if at >= end:
            return None
        watch.arrived(at)


def test_a_jump_is_seen_within_seconds_and_a_steady_rate_hardly_ever_is_one() -> None:
    false_alarms, delays = 0, []
    for seed in range(20):
        rng = random.Random(seed)
        watch = RateWatch(0.5, 0.0)
        false_alarms += arrivals(watch, 0.5, 0.0, 1800.0, rng) is not None
        watch = RateWatch(0.5, 0.0)
        assert arrivals(watch, 0.5, 0.0, 100.0, rng) is None
        seen = arrivals(watch, 4.0, 100.0, 200.0, rng)
        assert seen is not None
        delays.append(seen - 100.0)
        found = watch.changed(seen)
        assert found is not None and found > 1.0
        watch.plan_for(found, seen)
        assert watch.changed(seen) is None
    assert false_alarms <= 2
    assert max(delays) <= 15.0


# --- migration ---------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(SEEDS, st.integers(4, 30))
def test_no_step_opens_a_gap_or_loads_more_than_its_bound(seed: int, most: int) -> None:
    rng = random.Random(seed)
    problem = fleet(seed % 5)
    before, after = (adaptive(with_requests(problem, [rng.randint(1, 200)])).placement for _ in range(2))
    migration = plan_migration(problem, before.spans, after.spans, most, after.order)
    spans = list(before.spans)
    for step in migration.steps:
        moving = {move.server for move in step}
        serving = [None if j in moving else span for j, span in enumerate(spans)]
        assert coverage(problem, serving).min() > 0
        assert len(step) == 1 or sum(move.loaded_blocks for move in step) <= most
        for move in step:
            assert spans[move.server] == move.old != move.new
            spans[move.server] = move.new
    assert tuple(spans) == migration.spans
    assert {move.server for move in migration.left_out}.isdisjoint(m.server for step in migration.steps for m in step)
    if not migration.left_out:
        assert sorted(filter(None, spans)) == sorted(filter(None, after.spans))


def test_a_swap_without_a_spare_is_left_out_and_with_one_it_is_done() -> None:
    two = planning.small([1, 2], [1, 1], [9, 9], 0.1, blocks=4)
    swap = plan_migration(two, [Span(1, 2), Span(3, 2)], [Span(3, 2), Span(1, 2)], 8)
    assert swap.steps == () and len(swap.left_out) == 2
    three = planning.small([1, 2, 3], [1, 1, 1], [9, 9, 9], 0.1, blocks=4)
    done = plan_migration(three, [Span(1, 2), Span(3, 2), None], [Span(3, 2), Span(1, 2), Span(1, 4)], 8)
    assert [[move.server for move in step] for step in done.steps] == [[2], [0, 1]]


def test_servers_that_are_alike_keep_what_they_hold() -> None:
    alike = planning.small([1, 1, 5], [1, 1, 1], [9, 9, 9], 0.1, blocks=6)
    current, target = [Span(1, 2), Span(3, 2), Span(5, 2)], [Span(3, 2), Span(1, 2), Span(5, 2)]
    assert deal_alike(alike, current, target) == current
    other = [Span(3, 2), Span(5, 2), Span(1, 2)]
    assert deal_alike(alike, current, other) == [Span(5, 2), Span(3, 2), Span(1, 2)]
    assert deal_alike(alike, current, other, any_place=True) == current
    assert Move(0, Span(1, 4), Span(3, 4)).loaded_blocks == 2
    assert Move(0, None, Span(3, 4)).loaded_blocks == 4
    assert Move(0, Span(1, 4), None).loaded_blocks == 0


# --- the planner -------------------------------------------------------------------------------------------


def routed(planner: OnlinePlanner, now: float) -> Routed:
    found = planner.route(0, now)
    assert found is not None
    return found


def carry_out(planner: OnlinePlanner, now: float, seconds: int = 600) -> list[Move]:
    """Tick each second, and let every move be done by the next tick; no block may be without a server."""
    moves: list[Move] = []
    for second in range(seconds):
        begun = planner.tick(now + second)
        for move in begun:
            assert coverage(planner.problem, planner.serving()).min() > 0
            planner.moved(move.server)
        moves += begun
        if planner.settled and second > 2:
            break
    return moves


def test_at_a_steady_load_nothing_moves() -> None:
    rng, planner = random.Random(1), OnlinePlanner(fleet(), 1.0, 0.0)
    spans, now = list(planner.spans), 0.0
    ends: list[tuple[float, Routed]] = []
    for _ in range(500):
        now += rng.expovariate(1.0)
        for end, done in [each for each in ends if each[0] <= now]:
            planner.finished(done.booking)
            ends.remove((end, done))
        found = routed(planner, now)
        ends.append((found.booking.end_s, found))
        for hop in found.chain.hops:
            planner.observe_link(0, hop.server, float(fleet().rtt_ms[0, hop.server]) * rng.uniform(0.97, 1.03), now)
        assert planner.tick(now) == []
    assert planner.spans == spans
    for _, done in ends:
        planner.finished(done.booking)
    planner.ledger._check()
    assert len(planner.ledger) == 0
    assert planner.ledger.free == [max(each, 0) for each in planner.problem.slots(planner.spans)]


def test_a_load_that_jumps_is_answered_within_seconds() -> None:
    rng, planner = random.Random(2), OnlinePlanner(fleet(1), 0.1, 0.0, TIGHT)
    before = planner.problem.concurrent
    now, answered, last = 100.0, None, 100.0
    while now < 500.0:
        now += rng.expovariate(3.0)
        planner.finished(routed(planner, now).booking)
        for move in planner.tick(now):
            assert coverage(planner.problem, planner.serving()).min() > 0
            answered, last = answered or now, now
            planner.moved(move.server)
    assert answered is not None
    assert answered - 100.0 <= 10.0
    assert last < 160.0
    assert planner.problem.concurrent > 100 > before
    best = adaptive(planner.problem).assignment
    slots = planner.problem.slots(planner.spans)
    found = assign(planner.problem, Links(planner.problem, planner.spans), slots, partly=True)
    assert found is not None
    assert found.flow >= 0.9 * best.flow


def test_headroom_costs_little_and_takes_a_jump_without_a_move() -> None:
    roomy, tight = (OnlinePlanner(fleet(1), 0.1, 0.0, each) for each in (OnlineSettings(), TIGHT))
    crowd = with_requests(fleet(1), [200])
    flows, costs = [], []
    for planner in (roomy, tight):
        links, slots = Links(crowd, planner.spans), crowd.slots(planner.spans)
        full = assign(crowd, links, slots, partly=True)
        usual = assign(planner.problem, links, slots)
        assert full is not None and usual is not None
        flows.append(full.flow)
        costs.append(usual.ms_per_token)
    assert flows[0] > 2 * flows[1]
    assert costs[0] <= 1.05 * costs[1] + 1e-9


def test_a_server_moves_only_when_its_requests_are_done() -> None:
    planner = OnlinePlanner(fleet(), 0.1, 0.0, TIGHT)
    sessions = [routed(planner, 0.6 * i) for i in range(30)]
    busy = {hop.server for session in sessions for hop in session.chain.hops}
    now, begun = 18.0, []
    while now < 40.0:
        now += 0.6
        sessions.append(routed(planner, now))
        begun += planner.tick(now)
    busy |= {hop.server for session in sessions for hop in session.chain.hops}
    assert begun and planner.moving
    assert not {move.server for move in begun} & {b for b in busy if planner.ledger.sessions(b)}
    for booking in list(planner.ledger.bookings()):
        planner.finished(booking)
    for move in begun:
        planner.moved(move.server)
    with pytest.raises(UsageError, match="was not told to move"):
        planner.moved(begun[0].server)


def test_routes_leave_a_link_that_is_congested_and_come_back() -> None:
    problem = fleet()
    planner = OnlinePlanner(problem, 1.0, 0.0)
    first = routed(planner, 0.0).chain
    slow = first.hops[0].server
    for i in range(120):
        planner.observe_link(0, slow, 10 * float(problem.rtt_ms[0, slow]), 1.0 + i)
    planner.tick(121.0)
    assert float(planner.problem.rtt_ms[0, slow]) == pytest.approx(10 * float(problem.rtt_ms[0, slow]), rel=0.1)
    assert slow not in {hop.server for hop in routed(planner, 122.0).chain.hops}
    for i in range(400):
        planner.observe_link(0, slow, float(problem.rtt_ms[0, slow]), 130.0 + i)
    carry_out(planner, 600.0)
    assert float(planner.problem.rtt_ms[0, slow]) == pytest.approx(float(problem.rtt_ms[0, slow]), rel=0.05)


def test_a_server_that_slows_down_is_avoided() -> None:
    problem = fleet()
    planner = OnlinePlanner(problem, 0.5, 0.0)
    slow = routed(planner, 0.0).chain.hops[0].server
    for i in range(200):
        planner.observe_server(slow, 20 * float(problem.decode_ms[slow]), 1.0 + i)
    for booking in list(planner.ledger.bookings()):
        planner.finished(booking)
    carry_out(planner, 210.0)
    assert slow not in {hop.server for hop in routed(planner, 900.0).chain.hops}


def test_a_server_that_leaves_is_replaced_and_one_that_joins_is_used() -> None:
    problem = fleet()
    planner = OnlinePlanner(problem, 1.0, 0.0)
    sessions = [routed(planner, float(i)) for i in range(10)]
    gone = sessions[0].chain.hops[0].server
    lost = planner.leave(gone, 10.0)
    assert {booking.session for booking in lost} == {
        s.booking.session for s in sessions if gone in {hop.server for hop in s.chain.hops}
    }
    for booking in list(planner.ledger.bookings()):
        planner.finished(booking)
    carry_out(planner, 11.0)
    assert coverage(planner.problem, planner.serving()).min() > 0
    assert gone not in {hop.server for hop in routed(planner, 700.0).chain.hops}
    server = planner.join(80e9, 1.0, [20.0], 701.0)
    assert server == problem.servers
    for booking in list(planner.ledger.bookings()):
        planner.finished(booking)
    carry_out(planner, 702.0)
    assert planner.spans[server] is not None
    assert server in {hop.server for hop in routed(planner, 1400.0).chain.hops}
    planner.ledger._check()


def test_a_gap_is_closed_as_soon_as_somebody_can() -> None:
    problem = planning.small([1, 1, 50, 50], [1, 1, 1, 1], [4, 4, 4, 4], 0.1, blocks=6, requests=[1])
    planner = OnlinePlanner(problem, 0.001, 0.0, spans=[Span(1, 3), Span(4, 3), Span(1, 3), Span(1, 3)])
    assert planner.leave(1, 1.0) == []
    assert planner.route(0, 1.5) is None
    moves = []
    for second in range(2, 30):
        for move in planner.tick(float(second)):
            moves.append(move)
            planner.moved(move.server)
    assert moves
    assert coverage(planner.problem, planner.serving()).min() > 0
    assert planner.route(0, 40.0) is not None


def test_a_fleet_that_cannot_hold_the_model_waits_for_a_server() -> None:
    problem = planning.small([1, 1], [1, 1], [4, 4], 0.1, blocks=6, requests=[1])
    planner = OnlinePlanner(problem, 0.001, 0.0)
    planner.leave(0, 1.0)
    assert planner.tick(2.0) == []
    assert planner.route(0, 3.0) is None
    planner.join(5.0, 1.0, [1.0], 4.0)
    carry_out_without_cover = [move for second in range(5, 40) for move in planner.tick(float(second))]
    for move in carry_out_without_cover:
        planner.moved(move.server)
    assert planner.route(0, 50.0) is not None


def test_refusals() -> None:
    with pytest.raises(UsageError):
        OnlineSettings(review_s=0)
    planner = OnlinePlanner(fleet(), 1.0, 0.0)
    with pytest.raises(UsageError, match="each of 1 clients"):
        planner.join(1e9, 1.0, [1.0, 2.0], 0.0)
    with pytest.raises(UsageError):
        planner.join(-1.0, 1.0, [1.0], 0.0)
    hops = fleet().rtt_ms.repeat(20, axis=0)
    chained = OnlinePlanner(replace(fleet(), hop_ms=hops, prompt_hop_ms=hops), 1.0, 0.0)
    with pytest.raises(UsageError, match="new planner"):
        chained.join(1e9, 1.0, [1.0], 0.0)
