"""Policies: the contract of all of them, and what each one means. Candidates are made by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from prefixroute import (
    POLICIES,
    Candidate,
    Choice,
    GreedyCost,
    LeastLoad,
    LongestMatch,
    NoRouting,
    Policy,
    RentOrBuy,
    Request,
    UsageError,
)
from prefixroute.testing import PolicyContract, candidate, request

SEEDS = range(200)


class TestGreedyCostContract(PolicyContract):
    def make_policy(self) -> Policy:
        return GreedyCost()


class TestLongestMatchContract(PolicyContract):
    def make_policy(self) -> Policy:
        return LongestMatch()


class TestLeastLoadContract(PolicyContract):
    def make_policy(self) -> Policy:
        return LeastLoad()


class TestNoRoutingContract(PolicyContract):
    def make_policy(self) -> Policy:
        return NoRouting()


class WorthTheWay:
    """A user's own policy: forward only what saves more than `least_s`, and never into a queue longer than our own."""

    def __init__(self, least_s: float = 0.05) -> None:
        self.least_s = least_s

    def choose(self, request: Request, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        own = [c for c in candidates if c.local]
        others = sorted((c for c in candidates if not c.local), key=lambda c: (c.cost_s, rng.random()))
        if not own:
            return Choice(tuple(others), "no cache of our own")
        best = min(own, key=lambda c: c.cost_s)
        worth = [c for c in others if c.cost_s + self.least_s < best.cost_s and c.wait_s <= best.wait_s]
        rest = [c for c in candidates if c not in worth and c is not best]
        if worth:
            return Choice((*worth, best, *rest), "worth the way")
        return Choice((best, *rest), "stay")


class TestUsersOwnPolicyContract(PolicyContract):
    def make_policy(self) -> Policy:
        return WorthTheWay()


class _SortsInPlace:
    def choose(self, request: Request, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        assert isinstance(candidates, list)
        candidates.sort(key=lambda c: -c.cost_s)
        return Choice(tuple(candidates), "in place")


class _Drops:
    def choose(self, request: Request, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        return Choice((candidates[0],), "first")


class _GlobalRandom:
    def choose(self, request: Request, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        return Choice(tuple(sorted(candidates, key=lambda c: random.random())), "any")


class _Silent:
    def choose(self, request: Request, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        return Choice(tuple(candidates), "")


@pytest.mark.parametrize(
    ("policy", "check"),
    [
        (_SortsInPlace, "test_leaves_its_argument_alone"),
        (_Drops, "test_orders_exactly_the_candidates_it_was_given"),
        (_GlobalRandom, "test_leaves_the_global_generator_alone"),
        (_GlobalRandom, "test_repeats_itself_with_the_same_seed"),
        (_Silent, "test_says_why"),
    ],
)
def test_the_contract_finds_a_broken_policy(policy: type[Policy], check: str) -> None:
    contract = PolicyContract()
    contract.make_policy = policy  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        getattr(contract, check)()


def test_a_contract_without_a_policy_says_so() -> None:
    with pytest.raises(UsageError):
        PolicyContract().test_says_why()


def fields() -> list[list[Candidate]]:
    return [PolicyContract().field(random.Random(seed)) for seed in SEEDS]


def test_policies_are_found_by_name() -> None:
    names = {"rent": RentOrBuy, "greedy": GreedyCost, "longest": LongestMatch, "least": LeastLoad, "none": NoRouting}
    assert names == POLICIES


def test_greedy_takes_the_least_cost_and_local_on_a_tie() -> None:
    for given in fields():
        best = GreedyCost().choose(request(), given, random.Random(1)).order[0]
        least = min(c.cost_s for c in given)
        assert best.cost_s == least
        if any(c.local and c.cost_s == least for c in given):
            assert best.local


def test_greedy_names_fallbacks_by_cost() -> None:
    for given in fields():
        costs = [c.cost_s for c in GreedyCost().choose(request(), given, random.Random(1)).order]
        assert costs == sorted(costs)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([candidate("a/0", local=True, depth=8), candidate("b/0", depth=8, rtt_s=0.1)], "local is cheapest"),
        ([candidate("a/0", local=True), candidate("b/0")], "local: nobody is cheaper"),
        ([candidate("a/0", local=True, depth=8), candidate("b/0", depth=16)], "longer cached prefix"),
        ([candidate("a/0", local=True, wait_s=1.0), candidate("b/0")], "shorter wait"),
        ([candidate("a/0", local=True, depth=16, wait_s=9.0), candidate("b/0", depth=8)], "shorter wait"),
        ([candidate("b/0", depth=8)], "longer cached prefix"),
        ([candidate("b/0")], "shorter wait"),
    ],
)
def test_greedy_says_what_decided(given: list[Candidate], reason: str) -> None:
    assert GreedyCost().choose(request(), given, random.Random(1)).reason == reason


def test_longest_match_takes_the_deepest_and_local_among_them() -> None:
    for given in fields():
        best = LongestMatch().choose(request(), given, random.Random(1)).order[0]
        deepest = max(c.depth for c in given)
        assert best.depth == deepest
        if any(c.local and c.depth == deepest for c in given):
            assert best.local


def test_longest_match_ignores_load() -> None:
    busy = candidate("b/0", depth=16, wait_s=1e6)
    choice = LongestMatch().choose(request(), [candidate("a/0", local=True, depth=15), busy], random.Random(1))
    assert choice.order[0] is busy
    assert choice.reason == "longest match"


def test_longest_match_without_a_match_stays() -> None:
    choice = LongestMatch().choose(request(), [candidate("b/0"), candidate("a/0", local=True)], random.Random(1))
    assert choice.order[0].local
    assert choice.reason == "no match"


def test_longest_match_picks_among_equals_at_random() -> None:
    given = [candidate(f"n{i}/0", depth=4) for i in range(4)]
    taken = [LongestMatch().choose(request(), given, random.Random(seed)).order[0].endpoint for seed in SEEDS]
    assert {name: taken.count(name) > len(SEEDS) / 8 for name in set(taken)} == {c.endpoint: True for c in given}


def test_least_load_takes_the_shortest_wait_network_included() -> None:
    near = candidate("near/0", wait_s=0.2, rtt_s=0.001)
    far = candidate("far/0", wait_s=0.1, rtt_s=0.3, depth=64)
    local = candidate("own/0", local=True, wait_s=0.5, depth=64)
    assert LeastLoad().choose(request(), [local, far, near], random.Random(1)).order == (near, far, local)


def test_least_load_stays_when_nobody_is_idler() -> None:
    given = [candidate("b/0", depth=64), candidate("a/0", local=True)]
    assert LeastLoad().choose(request(), given, random.Random(1)).order[0].local


def test_no_routing_stays_whatever_the_others_hold() -> None:
    own = [candidate("a/0", local=True, wait_s=9.0), candidate("a/1", local=True, wait_s=1.0)]
    order = NoRouting().choose(request(), [candidate("b/0", depth=64), *own], random.Random(1)).order
    assert [c.endpoint for c in order] == ["a/1", "a/0", "b/0"]


def test_no_routing_at_a_gateway_spreads_at_random() -> None:
    given = [candidate(f"n{i}/0", wait_s=float(i), depth=i) for i in range(4)]
    taken = [NoRouting().choose(request(), given, random.Random(seed)).order[0].endpoint for seed in SEEDS]
    assert {name: taken.count(name) > len(SEEDS) / 8 for name in set(taken)} == {c.endpoint: True for c in given}
