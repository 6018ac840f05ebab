"""Policies: the contract of all of them, and what each one means. Candidates are made by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import inf

import numpy as np
import pytest

from prefixroute import (
    POLICIES,
    Candidate,
    Choice,
    Domain,
    GreedyCost,
    LeastLoad,
    LongestMatch,
    Node,
    NoRouting,
    Policy,
    RentOrBuy,
    Request,
    UsageError,
)
from prefixroute.policy.pricing import by_price, priced_s
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


# --- rent or buy -------------------------------------------------------------------------------------------


class TestRentOrBuyContract(PolicyContract):
    def make_policy(self) -> Policy:
        return RentOrBuy()


def asked(policy: RentOrBuy, prompt: Request, *given: Candidate) -> str:
    """Where the policy sends a prompt."""
    return policy.choose(prompt, given, random.Random(1)).order[0].endpoint


def two(rtt_s: float, depth: int = 60, **local: float) -> tuple[Candidate, Candidate]:
    """A cold origin and a peer that holds `depth` of 64 blocks; 8,000 tokens a second: the peer saves 0.12 s."""
    own = candidate("a/0", local=True)._replace(**local)
    return own, candidate("b/0", depth=depth, rtt_s=rtt_s)


def test_a_forward_is_taken_when_it_is_cheaper_and_local_on_a_tie() -> None:
    assert asked(RentOrBuy(), request(), *two(0.05)) == "b/0"
    assert asked(RentOrBuy(), request(), *two(0.13)) == "a/0"
    assert asked(RentOrBuy(), request(), candidate("a/0", local=True), candidate("b/0")) == "a/0"


def test_a_prompt_that_comes_again_is_bought_when_its_rent_has_reached_the_price() -> None:
    policy, prompt = RentOrBuy(), request()
    taken = [asked(policy, prompt, *two(0.05)) for _ in range(9)]
    # 0.05 + 0.05 < 0.12 <= 0.05 + 0.05 + 0.05: two forwards, then a copy; and anew, since here nobody keeps it.
    assert taken == ["b/0", "b/0", "a/0"] * 3


def test_what_would_be_evicted_for_a_copy_is_part_of_its_price() -> None:
    policy, prompt = RentOrBuy(), request()
    taken = [asked(policy, prompt, *two(0.05, room_tokens=0.0, eviction_age_s=1e9)) for _ in range(6)]
    assert taken == ["b/0"] * 4 + ["a/0", "b/0"]


def test_a_queue_at_the_origin_makes_a_copy_dearer() -> None:
    policy, prompt = RentOrBuy(), request()
    taken = [asked(policy, prompt, *two(0.05, queued=2)) for _ in range(8)]
    assert taken == ["b/0"] * 7 + ["a/0"]


def test_rent_decays_with_the_age_at_which_blocks_are_evicted_here() -> None:
    policy = RentOrBuy()
    prompts = [request()._replace(now=100.0 * i) for i in range(20)]
    # The rent of 100 s ago is worth e^-10 of itself: a copy would not have lasted till now.
    assert {asked(policy, prompt, *two(0.05, eviction_age_s=10.0)) for prompt in prompts} == {"b/0"}
    assert "a/0" in {asked(policy, prompt, *two(0.05, eviction_age_s=1000.0)) for prompt in prompts}


def test_prompts_that_share_blocks_share_their_rent_and_others_do_not() -> None:
    policy, one = RentOrBuy(), request()
    assert [asked(policy, one, *two(0.05)) for _ in range(2)] == ["b/0", "b/0"]
    assert asked(policy, request(seed=2), *two(0.05)) == "b/0"
    head = one.chain.packed[: 60 * 64]
    node = Node("x", Domain("model", "tokenizer"), rng=random.Random(3), now=0.0)
    tokens = np.concatenate([np.frombuffer(head, "<u4"), np.arange(64, dtype=np.uint32)])
    assert asked(policy, Request(node.chain(tokens), 0.0), *two(0.05)) == "a/0"


def test_a_shorter_queue_costs_no_rent() -> None:
    policy, prompt = RentOrBuy(), request()
    busy = candidate("a/0", local=True, wait_s=1.0)
    assert {asked(policy, prompt, busy, candidate("b/0", rtt_s=0.05)) for _ in range(20)} == {"b/0"}
    assert len(policy._rents) == 0


def test_a_busy_holder_is_worth_more_than_an_idle_stranger_when_all_are_busy() -> None:
    own = candidate("a/0", local=True, wait_s=0.5)._replace(queued=6)
    holder, idle = candidate("b/0", depth=60, wait_s=0.2), candidate("c/0")
    assert asked(RentOrBuy(), request(), own, holder, idle) == "b/0"
    assert asked(RentOrBuy(), request(), own._replace(queued=0), holder, idle) == "c/0"


def test_a_prompt_waits_for_the_sake_of_others_but_does_not_travel() -> None:
    own = candidate("a/0", local=True, wait_s=0.05)._replace(queued=3)
    # Queued here are three whom the prompt's prefill of 0.13 s would delay; nobody is there, but the way is 0.1 s.
    assert asked(RentOrBuy(), request(), own, candidate("b/0", rtt_s=0.1)) == "a/0"
    assert asked(RentOrBuy(), request(), own, candidate("b/0", wait_s=0.1)) == "b/0"
    # Another peer that is nearer is still taken.
    given = own, candidate("b/0", rtt_s=0.1), candidate("c/0", rtt_s=0.01, wait_s=0.1)
    assert asked(RentOrBuy(), request(), *given) == "c/0"


@pytest.mark.parametrize(
    ("given", "budget_s"),
    [
        ([candidate("a/0", local=True, wait_s=0.5), candidate("b/0", depth=60)], "a/0"),
        ([candidate("a/0", local=True, wait_s=0.5), candidate("b/0")], "a/0"),
        ([candidate("a/0", local=True, wait_s=0.05)._replace(queued=9), candidate("b/0", wait_s=0.2)], "b/0"),
        ([candidate("b/0", depth=60), candidate("c/0", depth=40), candidate("d/0")], "c/0"),
        ([candidate("b/0", depth=60)], None),
        ([candidate("a/0", local=True), candidate("b/0", wait_s=1.0)], None),
    ],
)
def test_a_forward_may_take_as_long_as_it_would_elsewhere(given: list[Candidate], budget_s: str | None) -> None:
    choice = RentOrBuy().choose(request(), given, random.Random(1))
    cost = {c.endpoint: c.cost_s for c in given}
    assert choice.budget_s == (inf if budget_s is None else cost[budget_s])
    assert choice.budget_s >= choice.order[0].cost_s


def test_a_gateway_counts_what_it_would_evict() -> None:
    full = candidate("b/0", depth=8)._replace(room_tokens=0.0)
    empty = candidate("c/0")
    assert asked(RentOrBuy(), request(), full, empty) == "c/0"
    assert asked(RentOrBuy(), request(), full, empty._replace(room_tokens=0.0)) == "b/0"
    assert asked(RentOrBuy(), request(), candidate("b/0", depth=60)._replace(room_tokens=0.0), empty) == "b/0"


# --- what a prefill delays ---------------------------------------------------------------------------------


def busy(name: str, arrivals_per_s: float, prompt_tokens: int = 1024, **terms: float) -> Candidate:
    """A candidate that holds nothing and prefills 1,000 tokens a second."""
    local = name == "a/0"
    weighed = candidate(name, local=local, prompt_tokens=prompt_tokens, tokens_per_s=1000.0, **terms)
    return weighed._replace(arrivals_per_s=arrivals_per_s)


def test_a_prefill_delays_whoever_comes_meanwhile_by_half_of_it() -> None:
    assert busy("a/0", 0.4, 2000).delays_s == pytest.approx(0.4 * 2.0 * 2.0 / 2)


def test_a_cold_prompt_goes_where_it_delays_fewer() -> None:
    own, quiet = busy("a/0", 0.4), busy("b/0", 0.0, rtt_s=0.01)
    choice = RentOrBuy().choose(request(1024), [own, quiet], random.Random(1))
    assert (choice.order[0].endpoint, choice.reason) == ("b/0", "shorter wait")


def test_it_does_not_travel_further_than_that_is_worth() -> None:
    own = busy("a/0", 0.4)
    far = busy("b/0", 0.0, rtt_s=own.delays_s + 0.01)
    assert RentOrBuy().choose(request(1024), [own, far], random.Random(1)).order[0].local


def test_a_short_prompt_stays_wherever_it_comes() -> None:
    choice = RentOrBuy().choose(request(64), [busy("a/0", 0.4, 64), busy("b/0", 0.0, 64, rtt_s=0.01)], random.Random(1))
    assert choice.order[0].local


def test_what_the_delays_cost_is_no_part_of_the_first_tokens_time() -> None:
    own = busy("a/0", 5.0)
    assert own.cost_s == pytest.approx(own.overhead_s + own.prefill_s)
    choice = RentOrBuy().choose(request(1024), [own, busy("b/0", 0.0, rtt_s=0.01)], random.Random(1))
    assert choice.budget_s == pytest.approx(max(c.cost_s for c in choice.order))


@pytest.mark.parametrize("seed", range(40))
def test_the_written_out_loop_prices_as_the_formula_does(seed: int) -> None:
    rng = random.Random(seed)
    field = [
        candidate(f"n{i}/0", local=i == 0, depth=rng.randrange(60), wait_s=rng.random(), rtt_s=rng.random() / 100)
        for i in range(6)
    ]
    field = [
        c._replace(
            queued=rng.randrange(5),
            arrivals_per_s=rng.random(),
            room_tokens=rng.choice((inf, 0.0, 300.0)),
        )
        for c in field
    ]
    origin = field[0]
    limit_s = origin.cost_s + origin.delays_s

    def key(c: Candidate) -> tuple[bool, float]:
        far = not c.local and c.cost_s - c.wait_s + c.delays_s > limit_s
        return (far, priced_s(c, (origin.queued + c.queued) / 2))

    assert by_price(field, origin, rng.random) == sorted(field, key=key)
