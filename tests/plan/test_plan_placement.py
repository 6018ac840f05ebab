"""Placement: vectors, bounds, certificates, and what must hold of every plan."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import planning
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixroute import UsageError
from prefixroute.plan import (
    Links,
    PetalsRates,
    PetalsSettings,
    Placement,
    Problem,
    Span,
    adaptive,
    at_rate,
    certify,
    conservative,
    coverage,
    design_load,
    designs_of,
    lower_bounds,
    place_petals,
    rates_of,
    share_out,
    should_move,
    theorem2_bound,
    throughputs,
    with_requests,
)
from prefixroute.plan.placement.spans import least_window
from prefixroute.sim.placement.fleets import FleetShape, made_fleet
from prefixroute.sim.placement.wan import built_in

SEEDS = st.integers(0, 10**6)
SPANS = {2: Span(1, 2), 0: Span(2, 4), 1: Span(3, 3)}


def lower(problem: Problem) -> float:
    return float(lower_bounds(problem) @ np.array(problem.requests)) / problem.concurrent


# --- vectors -----------------------------------------------------------------------------------------------


def test_the_worked_example_step_by_step() -> None:
    placement = conservative(planning.U1, 2)
    assert placement is not None
    assert planning.U1.held_blocks(2).tolist() == [4, 3, 2]
    assert placement.order == (2, 0, 1)
    assert dict(enumerate(placement.spans)) == SPANS
    assert placement.complete_after == 2
    assert theorem2_bound(planning.U1, placement) == pytest.approx(31)
    certificate = certify(planning.U1, placement)
    assert certificate.covered and certificate.fits
    assert certificate.ms_per_token == pytest.approx(29)
    links = Links(planning.U1, placement.spans)
    chain = links.shortest(links.token_ms(0))
    assert chain is not None
    assert [tuple(hop) for hop in chain.hops] == [(2, 2), (1, 3)]
    found = adaptive(planning.U1)
    assert planning.U1.held_blocks(1).tolist() == [5, 4, 3]
    assert found.placement.design == 1
    assert [shared.chain.ms for shared in found.assignment.chains] == [26, 30]
    assert found.assignment.ms_per_token == pytest.approx(28)
    assert lower(planning.U1) == pytest.approx(26)


@pytest.mark.parametrize(
    ("problem", "totals"),
    [
        (planning.small([5, 3, 13], [3, 2, 5], [2, 7, 7], 0.5), (70, 64, 60, 38)),
        (planning.small([13, 4, 13], [5, 4, 4], [5, 7, 2], 0.25), (76, 74, 65, 48)),
        (planning.small([4, 4, 11], [3, 1, 4], [2, 7, 5], 0.5), (58, 52, 50, 30)),
    ],
)
def test_totals_of_more_small_instances(problem: Problem, totals: tuple[int, ...]) -> None:
    placement = conservative(problem, 2)
    assert placement is not None
    certificate = certify(problem, placement)
    bound = certificate.theorem2_bound
    assert bound is not None
    found = (bound, certificate.ms_per_token, adaptive(problem).assignment.ms_per_token, certificate.lower_bound)
    assert [2 * each for each in found] == pytest.approx(totals)


@pytest.mark.parametrize("blocks", [4, 6, 8])
def test_the_family_without_a_bound_for_cg_bp_is_solved_by_smaller_reservations(blocks: int) -> None:
    problem = planning.family(blocks)
    placement = conservative(problem, problem.concurrent)
    assert placement is not None
    certificate = certify(problem, placement)
    assert certificate.ms_per_token == pytest.approx(11 * blocks)
    assert certificate.theorem2_bound == pytest.approx(11 * blocks)
    found = adaptive(problem)
    assert found.placement.design == 1
    assert found.assignment.ms_per_token == pytest.approx(10 + blocks) == pytest.approx(lower(problem))


@pytest.mark.parametrize(
    ("arguments", "cost", "bound", "least"),
    [
        ((6, 12, 0.34, 1, 2, 1), 179.497, 179.497, 179.497),
        ((9, 70, 0.23, 1, 4, 1), 579.247, 579.247, 579.247),
        ((30, 70, 0.2, 1, 20, 1), 511.903, 511.903, 511.903),
        ((30, 70, 0.2, 1, 140, 1), 664.0, 664.0, 511.9),
        ((30, 70, 0.2, 1, 140, 2), 640.3, 640.3, 490.2),
        ((30, 70, 0.2, 1, 140, 3), 677.9, 677.9, 523.4),
        ((30, 70, 0.2, 3, 30, 1), 526.9, 583.2, 526.7),
        ((30, 70, 0.2, 3, 30, 2), 507.0, 582.7, 483.2),
        ((30, 70, 0.2, 4, 140, 1), 681.0, 784.1, 516.5),
    ],
)
def test_large_instances(
    arguments: tuple[int, int, float, int, int, int], cost: float, bound: float, least: float
) -> None:
    problem = planning.bloom(*arguments)
    placement = conservative(problem, problem.concurrent)
    assert placement is not None
    certificate = certify(problem, placement)
    assert certificate.ms_per_token == pytest.approx(cost, abs=0.06)
    assert certificate.theorem2_bound == pytest.approx(bound, abs=0.06)
    assert certificate.lower_bound == pytest.approx(least, abs=0.06)
    found = adaptive(problem).assignment.ms_per_token
    assert certificate.lower_bound - 1e-9 <= found <= min(cost + 0.06, 1.05 * least)


def test_two_large_servers_share_the_model_at_a_small_load() -> None:
    spans = conservative(planning.bloom(9, 70, 0.23, 1, 4, 1), 4)
    assert spans is not None
    assert sorted((span.blocks for span in spans.spans if span), reverse=True)[:2] == [58, 58]
    chain = adaptive(planning.bloom(9, 70, 0.23, 1, 4, 1)).assignment.chains[0].chain
    assert sorted(hop.blocks for hop in chain.hops) == [12, 58]


def test_held_blocks_of_the_published_servers() -> None:
    problem = made_fleet(built_in("world"), 0, FleetShape(small_blocks=70)).problem
    for load, large, little in ((1, 59, 6), (20, 52, 5), (60, 43, 4), (100, 36, 3), (140, 31, 3)):
        assert set(problem.held_blocks(load).tolist()) == {large, little}
    assert problem.most_requests() == 430


# --- what holds of every plan ------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(SEEDS, st.integers(1, 2))
def test_plans_cover_fit_and_keep_the_order_of_bounds(seed: int, clients: int) -> None:
    problem = planning.drawn(seed, clients, servers=6, blocks=9)
    load = problem.concurrent
    placement = conservative(problem, load)
    assert (placement is not None) == (int(problem.held_blocks(load).sum()) >= problem.blocks)
    if placement is None:
        return
    assert coverage(problem, placement.spans).min() > 0
    held = problem.held_blocks(load)
    for j, span in enumerate(placement.spans):
        assert (span.blocks if span else 0) == held[j]
        if span:
            assert span.first >= 1 and span.end <= problem.blocks + 1
            assert problem.slots(placement.spans)[j] >= load * span.blocks
    certificate = certify(problem, placement)
    found = adaptive(problem)
    best = certify(problem, found.placement)
    assert certificate.covered and certificate.fits and best.covered and best.fits
    assert best.ms_per_token == pytest.approx(found.assignment.ms_per_token)
    assert certificate.theorem2_bound is not None
    assert best.lower_bound <= best.ms_per_token + 1e-9
    assert best.ms_per_token <= certificate.ms_per_token + 1e-9
    links = Links(problem, placement.spans)
    for client in range(clients):
        chain = links.shortest(links.token_ms(client))
        assert chain is not None
        assert lower_bounds(problem)[client] <= chain.ms + 1e-9 <= certificate.theorem2_bound + 2e-9
    # No more than the design load is under way, so every request has the shortest chain.
    assert certificate.ms_per_token <= certificate.theorem2_bound + 1e-9
    assert best.theorem2_bound == pytest.approx(certificate.theorem2_bound)
    assert best.gap == pytest.approx(best.ms_per_token / best.lower_bound - 1)


@settings(deadline=None, max_examples=25)
@given(SEEDS)
def test_no_placement_is_below_the_lower_bound_and_adaptive_is_not_below_the_optimum(seed: int) -> None:
    problem = planning.drawn(seed, servers=3, blocks=5)
    best = planning.optimum(problem)
    assert lower(problem) <= best + 1e-9
    try:
        found = adaptive(problem).assignment.ms_per_token
    except UsageError:
        return
    assert best <= found + 1e-9


@settings(deadline=None, max_examples=15)
@given(SEEDS, st.integers(0, 2))
def test_the_optimum_grows_with_times_and_shrinks_with_memory(seed: int, server: int) -> None:
    problem = planning.drawn(seed, servers=3, blocks=4)
    server %= problem.servers
    before = planning.optimum(problem)
    for name, change in (("decode_ms", 1.0), ("rtt_ms", 2.0), ("memory_bytes", -1.0)):
        values = getattr(problem, name).copy()
        values[..., server] += change
        assert planning.optimum(replace(problem, **{name: values})) >= before - 1e-9
        if name != "memory_bytes":
            assert lower(replace(problem, **{name: values})) >= lower(problem) - 1e-9


@settings(deadline=None, max_examples=40)
@given(SEEDS)
def test_equal_input_gives_equal_plans(seed: int) -> None:
    for make in (lambda: adaptive(planning.drawn(seed)), lambda: conservative(planning.drawn(seed), 1)):
        try:
            assert make() == make()
        except UsageError:
            with pytest.raises(UsageError):
                make()


def test_fixed_servers_keep_their_spans_and_the_others_cover_the_rest() -> None:
    problem = planning.bloom(30, 70, 0.2, 1, 40, 1)
    fixed = {0: Span(60, 3), 7: Span(1, 2)}
    found = adaptive(problem, fixed=fixed)
    assert {j: found.placement.spans[j] for j in fixed} == fixed
    assert coverage(problem, found.placement.spans).min() > 0
    assert theorem2_bound(problem, found.placement) is None


def test_a_certificate_tells_a_gap_and_a_load_that_does_not_fit() -> None:
    holed = Placement((Span(1, 4), None, None), 0)
    certificate = certify(planning.U1, holed)
    assert (certificate.covered, certificate.fits) == (False, False)
    assert certificate.ms_per_token == float("inf")
    full = certify(planning.U1, Placement((Span(1, 5), Span(1, 4), Span(5, 1)), 0))
    assert full.covered and full.fits
    assert full.ms_per_token == pytest.approx(27)
    crowded = certify(with_requests(planning.U1, [40]), Placement((Span(1, 5), None, None), 0))
    assert crowded.covered and not crowded.fits


# --- loads -------------------------------------------------------------------------------------------------


def test_reservations_tried_hold_the_whole_load() -> None:
    assert designs_of(1) == [1]
    assert designs_of(20) == [1, 2, 3, 5, 7, 8, 10, 13, 16, 20]
    assert designs_of(140)[-1] == 140 and 91 in designs_of(140)


def test_the_design_load_has_room_for_chance_and_no_more_than_fits() -> None:
    problem = made_fleet(built_in("world"), 0).problem
    load = design_load(problem, 1.0)
    assert load.requests == round(load.offered + load.offered**0.5)
    assert load.offered == pytest.approx(load.single_s)
    assert not load.capped
    assert design_load(problem, 100.0) == (430, pytest.approx(100 * load.single_s), load.single_s)
    assert design_load(problem, 100.0).capped
    assert design_load(problem, 1e-6).requests == 1
    assert at_rate(problem, 1.0).concurrent == load.requests
    with pytest.raises(UsageError, match="requests_per_s"):
        design_load(problem, 0.0)


@given(st.integers(0, 1000), st.lists(st.floats(0.1, 10), min_size=1, max_size=6))
def test_shares_add_up_and_are_off_by_less_than_one(requests: int, shares: list[float]) -> None:
    found = share_out(requests, shares)
    assert sum(found) == requests
    assert all(abs(n - requests * share / sum(shares)) < 1 + 1e-6 for n, share in zip(found, shares, strict=True))


# --- refusals ----------------------------------------------------------------------------------------------


def test_what_does_not_fit_says_by_how_many_bytes() -> None:
    tight = planning.small([1, 1], [1, 1], [2, 2], 0.5, requests=[1])
    assert tight.missing_bytes(1) == pytest.approx(3 * 1.5)
    with pytest.raises(UsageError, match="does not fit by 4 bytes: the servers hold 2 of 5 blocks"):
        adaptive(replace(tight, session_bytes=0.25, memory_bytes=np.array([2.0, 1.5])))
    with pytest.raises(UsageError, match="9 concurrent requests do not fit by"):
        adaptive(planning.small([1, 1], [1, 1], [4, 4], 0.25, requests=[9]))


GOOD = {
    "blocks": 3,
    "block_bytes": 1.0,
    "session_bytes": 0.1,
    "memory_bytes": [3.0, 3.0],
    "decode_ms": [1.0, 1.0],
    "rtt_ms": [[1.0, 1.0]],
    "requests": [1],
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"blocks": 0}, "one of each at least"),
        ({"block_bytes": 0.0}, "block_bytes"),
        ({"session_bytes": float("nan")}, "session_bytes"),
        ({"decode_ms": [1.0, 0.0]}, r"decode_ms\[1\] must be a number above 0"),
        ({"decode_ms": [1.0]}, "decode_ms needs the shape"),
        ({"rtt_ms": [[1.0, float("nan")]]}, r"rtt_ms\[0, 1\]"),
        ({"rtt_ms": [[1.0], [1.0, 2.0]]}, "rtt_ms needs numbers in the shape"),
        ({"memory_bytes": [1.0, -1.0]}, r"memory_bytes\[1\] must be a number 0 or more"),
        ({"requests": [-1]}, "requests of clients"),
        ({"requests": [0]}, "requests of clients"),
        ({"setup_ms": -1.0}, "setup_ms"),
        ({"most_blocks": [1]}, "most_blocks"),
    ],
)
def test_a_problem_that_makes_no_sense_is_refused(change: dict[str, object], said: str) -> None:
    Problem.of(**GOOD)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=said):
        Problem.of(**{**GOOD, **change})  # type: ignore[arg-type]


def test_loads_that_make_no_sense_are_refused() -> None:
    for requests in ([1, 1], [0], [-1]):
        with pytest.raises(UsageError):
            with_requests(planning.U1, requests)
    with pytest.raises(UsageError, match="one concurrent request"):
        conservative(planning.U1, 0)


# --- the baseline ------------------------------------------------------------------------------------------


def test_petals_takes_the_published_number_of_blocks() -> None:
    problem = made_fleet(built_in("world"), 0).problem
    assert set(PetalsSettings().held_blocks(problem)) == {49, 3}
    assert set(PetalsSettings(lenient=True).held_blocks(problem)) == {50, 5}
    assert PetalsSettings().cache_bytes == pytest.approx(0.234881e9, rel=1e-5)
    spans = [Span(1, 49), *([None] * 19)]
    assert PetalsSettings().slots(problem, spans)[0] == int(49 * 0.234881024e9 / problem.session_bytes)


def test_a_joiner_takes_the_window_that_is_served_worst() -> None:
    problem = planning.small([1] * 4, [1] * 4, [4, 4, 4, 4], 0.1, blocks=6)
    small = PetalsSettings(hidden_size=1, reserve_bytes=0.0, lenient=True)
    rates = PetalsRates((6.0, 6.0, 6.0, 6.0), (100.0,) * 4)
    fit = replace(problem, memory_bytes=np.array([3.0, 2.0, 2.0, 3.0]) * (1 + small.cache_bytes))
    placement = place_petals(fit, [0, 1, 2, 3], small, rates)
    assert placement.spans == (Span(1, 3), Span(4, 2), Span(5, 2), Span(1, 3))
    assert throughputs(fit, placement.spans, rates).tolist() == [6, 6, 6, 4, 8, 4]
    with pytest.raises(UsageError, match="each of 4 servers once"):
        place_petals(fit, [0, 1, 2, 2], small, rates)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(1, 12))
def test_the_least_window_is_the_least_sorted_list(values: list[int], width: int) -> None:
    width = min(width, len(values))
    windows = [sorted(values[a : a + width]) for a in range(len(values) - width + 1)]
    assert least_window(np.array(values), width) == windows.index(min(windows))


def test_a_server_moves_for_a_third_more_and_never_opens_a_gap() -> None:
    problem = planning.small([1] * 4, [1] * 4, [9] * 4, 0.1, blocks=4)
    rates = PetalsRates((4.0,) * 4, (100.0,) * 4)
    crowded = [Span(1, 2), Span(1, 2), Span(1, 2), Span(3, 2)]
    target = should_move(problem, crowded, 0, rates, random.Random(1))
    assert target == Span(3, 2)
    assert should_move(problem, crowded, 3, rates, random.Random(1)) is None
    even = [Span(1, 2), Span(3, 2), Span(1, 2), Span(3, 2)]
    assert all(should_move(problem, even, j, rates, random.Random(1)) is None for j in range(4))
    assert should_move(problem, [None, *even[1:]], 0, rates, random.Random(1)) is None
    assert rates_of(problem).announced(0, 3) == 3000.0
