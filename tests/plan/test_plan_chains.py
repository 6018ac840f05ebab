"""Chains and the ledger: shortest ways over overlapping spans, slots that add up, waits and the schedule of asking."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import planning
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixroute import UsageError
from prefixroute.plan import (
    Chain,
    Hop,
    Ledger,
    Links,
    PetalsRouter,
    PetalsSettings,
    Problem,
    Span,
    assign,
    conservative,
    retry_wait_s,
    with_requests,
)

SEEDS = st.integers(0, 10**6)


def some_spans(problem: Problem, rng: random.Random) -> list[Span | None]:
    return [rng.choice(planning.spans_of(problem, j)) for j in range(problem.servers)]


def with_hops(problem: Problem, rng: random.Random) -> Problem:
    """The same problem with servers that pass on to each other."""
    n = problem.servers
    hops = np.array([[float(rng.randint(0, 9)) for _ in range(n)] for _ in range(n)])
    return replace(problem, hop_ms=hops, prompt_hop_ms=2 * hops)


def chain_ms(problem: Problem, client: int, route: tuple[tuple[int, int], ...]) -> float:
    """What a token takes when servers pass on: half a round trip in, hops, half a round trip out."""
    assert problem.hop_ms is not None
    total = float(problem.rtt_ms[client, route[0][0]]) / 2 + float(problem.rtt_ms[client, route[-1][0]]) / 2
    total += sum(float(problem.hop_ms[a, b]) for (a, _), (b, _) in pairwise(route))
    return total + sum(float(problem.decode_ms[j]) * k for j, k in route)


# --- shortest chains ---------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=300)
@given(SEEDS, st.booleans())
def test_the_shortest_chain_is_the_shortest_of_all_routes(seed: int, passing_on: bool) -> None:
    rng = random.Random(seed)
    problem = planning.drawn(seed, 2)
    if passing_on:
        problem = with_hops(problem, rng)
    spans = some_spans(problem, rng)
    every = list(planning.routes(problem, spans))
    price = chain_ms if passing_on else planning.route_ms
    links = Links(problem, spans)
    for client in range(problem.clients):
        chain = links.shortest(links.token_ms(client))
        if not every:
            assert chain is None
            continue
        assert chain is not None
        route = tuple(tuple(hop) for hop in chain.hops)
        assert route in every
        assert chain.ms == pytest.approx(min(price(problem, client, each) for each in every))
        assert chain.ms == pytest.approx(price(problem, client, route))  # type: ignore[arg-type]
        assert links.cost(chain.hops, links.token_ms(client)) == pytest.approx(chain.ms)


@settings(deadline=None, max_examples=200)
@given(SEEDS)
def test_a_chain_visits_every_block_once_in_order(seed: int) -> None:
    rng = random.Random(seed)
    problem = planning.drawn(seed, servers=7, blocks=12)
    spans = some_spans(problem, rng)
    links = Links(problem, spans)
    chain = links.shortest(links.token_ms(0))
    if chain is None:
        return
    at = 1
    for hop in chain.hops:
        span = spans[hop.server]
        assert span is not None
        assert span.first <= at < span.end
        assert hop.blocks == span.end - at > 0
        at = span.end
    assert at == problem.blocks + 1


def test_a_whole_request_is_its_prompt_and_all_but_one_token() -> None:
    problem = replace(
        planning.U1,
        output_tokens=11,
        prefill_ms=np.array([5.0, 6.0, 7.0]),
        prompt_rtt_ms=np.array([[20.0, 30.0, 40.0]]),
    )
    links = Links(problem, [None, Span(3, 3), Span(1, 2)])
    hops = (Hop(2, 2), Hop(1, 3))
    assert links.cost(hops, links.token_ms(0)) == 3 + 8 + 9 + 9
    assert links.cost(hops, links.prompt_ms(0)) == 40 + 14 + 30 + 18
    assert links.cost(hops, links.request_ms(0)) == 102 + 10 * 29


def test_a_round_trip_of_zero_makes_no_hop_free() -> None:
    problem = planning.small([0, 0, 0], [3, 3, 4], [7, 5, 4], 0.25)
    links = Links(problem, [Span(1, 5), Span(3, 3), Span(1, 2)])
    assert all(cost > 0 for cost, (_, j, _) in zip(links.token_ms(0), links.links, strict=True) if j < 3)


def test_servers_that_pass_on_save_the_way_back_between() -> None:
    far = planning.small([100, 100], [1, 1], [4, 4], 0.1, blocks=4, requests=[1])
    spans = [Span(1, 2), Span(3, 2)]
    near = replace(far, hop_ms=np.array([[0.0, 2.0], [2.0, 0.0]]), prompt_hop_ms=np.array([[0.0, 2.0], [2.0, 0.0]]))
    hub, chain = (Links(problem, spans).shortest(Links(problem, spans).token_ms(0)) for problem in (far, near))
    assert hub is not None and chain is not None
    assert (hub.ms, chain.ms) == (204, 106)


# --- slots -------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(SEEDS)
def test_assignment_takes_the_shortest_chain_that_is_free_one_request_after_the_other(seed: int) -> None:
    rng = random.Random(seed)
    problem = with_requests(planning.drawn(seed, 2), [rng.randint(1, 5), rng.randint(0, 5)])
    spans = some_spans(problem, rng)
    links, slots = Links(problem, spans), [max(each, 0) for each in problem.slots(spans)]
    found = assign(problem, links, slots)
    partly = assign(problem, links, slots, partly=True)
    free, total, placed = list(slots), 0.0, 0
    for client, wanted in enumerate(problem.requests):
        for _ in range(wanted):
            chain = links.shortest(links.token_ms(client), free)
            if chain is None:
                assert found is None
                break
            total += chain.ms
            placed += 1
            for hop in chain.hops:
                free[hop.server] -= hop.blocks
    assert partly is not None
    assert sum(shared.requests for shared in partly.chains) == placed
    if placed == problem.concurrent:
        assert found == partly
        assert found is not None
        assert found.ms_per_token == pytest.approx(total / placed)
        assert found.flow == pytest.approx(placed / found.ms_per_token)


@settings(deadline=None, max_examples=100)
@given(SEEDS)
def test_up_to_its_design_load_a_placement_makes_nobody_wait(seed: int) -> None:
    rng = random.Random(seed)
    load = rng.randint(1, 6)
    problem = with_requests(planning.drawn(seed, servers=6, blocks=8), [load])
    placement = conservative(problem, load)
    if placement is None:
        return
    links, ledger = Links(problem, placement.spans), Ledger(problem.slots(placement.spans))
    for _ in range(load):
        chain = links.shortest(links.token_ms(0), ledger.free, lambda j, k: ledger.wait_s(j, k, 0.0))
        assert chain is not None
        assert all(ledger.wait_s(hop.server, hop.blocks, 0.0) == 0 for hop in chain.hops)
        ledger.book(chain.hops, 0.0, 1.0)


# --- the ledger --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wait", "charged"),
    [(0, 0), (0.4, 1), (1, 1), (1.5, 3), (8, 15), (62, 63), (64, 123), (123.5, 183), (math.inf, math.inf)],
)
def test_waits_are_charged_by_the_schedule_of_asking(wait: float, charged: float) -> None:
    assert retry_wait_s(wait) == charged


@settings(deadline=None, max_examples=60)
@given(SEEDS)
def test_slots_never_run_short_and_come_back(seed: int) -> None:
    rng = random.Random(seed)
    slots = [rng.randint(1, 12) for _ in range(3)]
    ledger, now, booked = Ledger(slots), 0.0, []
    for _ in range(60):
        now += rng.expovariate(1.0)
        if rng.random() < 0.2:
            ledger.expire(now)
        if booked and rng.random() < 0.2:
            ledger.release(booked.pop(rng.randrange(len(booked))))
        else:
            servers = rng.sample(range(3), rng.randint(1, 3))
            hops = [Hop(j, rng.randint(1, slots[j])) for j in servers]
            wait = max(ledger.wait_s(hop.server, hop.blocks, now) for hop in hops)
            assert 0 <= wait < math.inf
            booked.append(ledger.book(hops, now + wait, now + wait + rng.expovariate(0.2)))
        ledger._check()
        last = max((booking.end_s for booking in ledger.bookings()), default=now)
        for at in (now, *(now + (last - now) * i / 20 for i in range(20))):
            assert all(ledger.running(j, at) <= slots[j] for j in range(3)), (seed, at)
    for booking in list(ledger.bookings()):
        ledger.release(booking)
        ledger.release(booking)
    ledger._check()
    assert len(ledger) == 0
    assert ledger.free == slots


def test_who_comes_later_waits_for_those_before() -> None:
    ledger = Ledger([10])
    ledger.book([Hop(0, 10)], 0.0, 100.0)
    assert ledger.wait_s(0, 5, 0.0) == 100
    ledger.book([Hop(0, 5)], 100.0, 200.0)
    assert ledger.wait_s(0, 5, 10.0) == 90
    ledger.book([Hop(0, 5)], 100.0, 150.0)
    assert ledger.free == [-10]
    assert ledger.wait_s(0, 5, 10.0) == 140
    assert ledger.wait_s(0, 11, 10.0) == math.inf
    assert (ledger.running(0, 10.0), ledger.running(0, 120.0), ledger.running(0, 160.0)) == (10, 10, 5)
    assert ledger.wait_s(0, 10, 500.0) == 0.0, "an end that is past is due now"
    assert ledger.expire(150.0) == 2
    assert ledger.sessions(0) == len(ledger) == 1


def test_servers_change_their_slots_and_come_anew() -> None:
    ledger = Ledger([4])
    booking = ledger.book([Hop(0, 3)], 0.0, 9.0)
    assert ledger.add_server(2) == 1
    ledger.set_slots(0, 0)
    assert ledger.free == [-3, 2]
    assert ledger.wait_s(0, 1, 0.0) == math.inf
    ledger.release(booking)
    ledger._check()
    assert ledger.free == [0, 2]
    for bad in (lambda: Ledger([-1]), lambda: ledger.set_slots(0, -1), lambda: ledger.book([Hop(1, 3)], 0.0, 1.0)):
        with pytest.raises(UsageError):
            bad()


# --- the baseline's routing --------------------------------------------------------------------------------


def test_the_baseline_adds_its_own_step_and_shuns_servers_that_are_full() -> None:
    settings_ = PetalsSettings(hidden_size=1)
    problem = planning.small([50, 10, 10], [1, 1, 1], [9e9] * 3, settings_.cache_bytes / 2, blocks=4)
    links = Links(problem, [Span(1, 4), Span(1, 2), Span(3, 2)])
    router = PetalsRouter(problem, links, problem.rtt_ms, settings_)
    ledger = Ledger([100] * 3)
    found: list[Chain | None] = []
    for _ in range(3):
        found.append(router.route(0, ledger))
        ledger.book([Hop(1, 2), Hop(2, 2)], 0.0, 10.0)
    first, second, third = found
    assert first is not None and second is not None and third is not None
    # 50 / 2 + 18 + 4 against 2 (10 / 2 + 18 + 2): two sessions fit a server's cache, and then it is full.
    assert first == Chain((Hop(0, 4),), 47.0)
    near = replace(problem, rtt_ms=np.array([[60.0, 10.0, 10.0]]))
    router = PetalsRouter(near, links, near.rtt_ms, settings_)
    fresh = Ledger([100] * 3)
    chosen = []
    for _ in range(3):
        chain = router.route(0, fresh)
        assert chain is not None
        chosen.append(chain)
        fresh.book(chain.hops, 0.0, 10.0)
    assert [len(chain.hops) for chain in chosen] == [2, 2, 1]
    assert chosen[0].ms == 50.0
