"""A policy with a prefill pool behind it: what goes there, what the wrapped policy sees, and a node that uses it."""

from __future__ import annotations

import random

import pytest

from prefixroute import Choice, Domain, GreedyCost, LoadReport, Node, NoRouting, Outcome, RentOrBuy, UsageError
from prefixroute.plan import KvBytes, KvLink, Polynomial, PrefillOffload, PrefillPool
from prefixroute.testing import PolicyContract, candidate, request

GBIT = 1e9 / 8


def pool(**more: object) -> PrefillPool:
    """A pool that prefills 40,000 tokens a second behind 10 Gbit/s; KV of 20 kB a token."""
    wanted = {
        "name": "fast",
        "nodes": 2,
        "prefill_s": Polynomial((0.05, 1 / 40_000)),
        "kv_bytes": KvBytes(20_000.0),
        "link": KvLink(10 * GBIT, 0.02, 60),
        "threshold_tokens": 4_000.0,
    }
    return PrefillPool(**{**wanted, **more})  # type: ignore[arg-type]


def local(tokens: int, **more: object) -> object:
    return candidate("n0/0", local=True, prompt_tokens=tokens, tokens_per_s=8_000.0, **more)  # type: ignore[arg-type]


class TestPolicyContract(PolicyContract):
    """With prompts that are not for the pool it is the policy inside."""

    def make_policy(self) -> PrefillOffload:
        return PrefillOffload(RentOrBuy(), pool())


def choose(policy: PrefillOffload, candidates: list[object], tokens: int, now: float = 0.0) -> Choice:
    return policy.choose(request(tokens, now=now), candidates, random.Random(1))  # type: ignore[arg-type]


def test_a_long_prompt_is_prefilled_in_the_pool_and_served_here() -> None:
    policy = PrefillOffload(RentOrBuy(), pool())
    choice = choose(policy, [local(16_000)], 16_000)
    best = choice.order[0]
    assert policy.last is not None
    assert (policy.last.pool, policy.last.endpoint, policy.last.sent_tokens) == ("fast", "n0/0", 16_000)
    assert (best.endpoint, best.local, best.prefill_s, best.wait_s) == ("n0/0", True, 0.0, 0.0)
    prefill = 0.05 + 16_000 / 40_000
    assert best.cost_s == pytest.approx(0.02 + prefill + 16_000 * 20_000 / (60 * 10 * GBIT))
    assert best.cost_s == policy.last.gain.remote_s < policy.last.gain.local_s == pytest.approx(2.01)
    assert choice.reason.startswith("fast prefills")


@pytest.mark.parametrize("tokens", [100, 3_999, 4_000])
def test_a_prompt_up_to_the_threshold_stays(tokens: int) -> None:
    policy = PrefillOffload(RentOrBuy(), pool())
    given = [local(tokens)]
    assert choose(policy, given, tokens).order == tuple(given)
    assert policy.last is None


def test_the_threshold_is_of_uncached_tokens() -> None:
    policy = PrefillOffload(RentOrBuy(), pool())
    choose(policy, [local(16_000, depth=750)], 16_000)
    assert policy.last is None
    choose(policy, [local(16_000, depth=500)], 16_000)
    assert policy.last is not None and policy.last.sent_tokens == 8_000


def test_what_the_pool_holds_is_not_computed_there_but_is_sent() -> None:
    policy = PrefillOffload(RentOrBuy(), pool(cached_tokens=lambda chain: 12_000))
    choose(policy, [local(16_000)], 16_000)
    assert policy.last is not None
    assert (policy.last.computed_tokens, policy.last.sent_tokens) == (4_000, 16_000)


def test_with_ample_bandwidth_what_the_pool_holds_counts_for_the_threshold() -> None:
    scarce, ample = pool(cached_tokens=lambda chain: 13_000), pool(cached_tokens=lambda chain: 13_000, ample=True)
    for each, goes in ((scarce, True), (ample, False)):
        policy = PrefillOffload(RentOrBuy(), each)
        choose(policy, [local(16_000)], 16_000)
        assert (policy.last is not None) is goes


def test_a_prompt_over_the_threshold_that_is_faster_here_stays() -> None:
    slow_link = pool(link=KvLink(0.2 * GBIT, 0.02, 60))
    policy = PrefillOffload(RentOrBuy(), slow_link)
    choose(policy, [local(16_000)], 16_000)
    assert policy.last is None


def test_a_queue_here_sends_prompts_away_and_a_queue_there_keeps_them() -> None:
    used = pool()
    policy = PrefillOffload(GreedyCost(), used)
    choose(policy, [local(5_000, wait_s=3.0)], 5_000)
    assert policy.last is not None and policy.last.gain.local_s > 3
    for _ in range(400):
        choose(policy, [local(5_000)], 5_000)
    assert policy.last is None, "the pool has had enough"
    assert used.waits_s(0.0) > 0.3
    choose(policy, [local(5_000)], 5_000, now=1_000.0)
    assert policy.last is not None, "and is through with it"


def test_a_report_replaces_what_was_counted() -> None:
    used = pool()
    policy = PrefillOffload(GreedyCost(), used)
    used.report(10.0, wait_s=5.0)
    assert used.waits_s(10.0) == pytest.approx(5.0) and used.waits_s(12.0) == pytest.approx(3.0)
    used.report(10.0, queued_bytes=10 * GBIT)
    assert used.waits_s(10.0) == pytest.approx(1.0) and used.waits_s(11.5) == 0.0
    used.report(20.0, utilisation=1.0)
    choose(policy, [local(16_000)], 16_000, now=20.0)
    assert policy.last is None, "nothing is left of the link"


def test_a_peer_that_is_cheaper_than_both_ways_still_wins() -> None:
    policy = PrefillOffload(RentOrBuy(), pool())
    peer = candidate("n1/0", prompt_tokens=16_000, depth=1_000, rtt_s=0.001, tokens_per_s=8_000.0)
    assert choose(policy, [local(16_000), peer], 16_000).order[0] == peer
    assert policy.last is None


def test_peers_do_not_use_the_pool_of_this_node_but_a_gateway_does() -> None:
    policy = PrefillOffload(GreedyCost(), pool())
    peer = candidate("n1/0", prompt_tokens=16_000, tokens_per_s=8_000.0)
    choose(policy, [local(16_000, wait_s=50.0), peer], 16_000)
    assert policy.last is not None and policy.last.endpoint == "n0/0"
    assert choose(policy, [peer], 16_000).order[0].endpoint == "n1/0"
    assert policy.last.endpoint == "n1/0"


def test_no_offer_is_left_over_from_the_prompt_before() -> None:
    policy = PrefillOffload(RentOrBuy(), pool())
    choose(policy, [local(16_000)], 16_000)
    choose(policy, [local(100)], 100)
    assert policy.last is None


def test_it_keeps_local_endpoints_as_the_policy_inside_does() -> None:
    assert PrefillOffload(NoRouting(), pool()).keeps_local
    assert not PrefillOffload(RentOrBuy(), pool()).keeps_local


def test_a_node_with_a_pool_books_no_prefill_for_what_the_pool_does_and_follows_the_outcome() -> None:
    policy = PrefillOffload(RentOrBuy(), pool())
    node = Node("n", Domain("m", "t", block_size=16), rng=random.Random(1), now=0.0, policy=policy)
    endpoint = node.add_endpoint(incarnation=1, now=0.0)
    node.set_load(endpoint, LoadReport(prefill_tokens_per_s=8_000.0, overhead_s=0.01), 0.0)
    long_ = node.route([i % 30_000 for i in range(16_000)], 1.0)
    assert policy.last is not None
    assert (long_.target, long_.local) == (endpoint, True)
    assert long_.expected_ttft_s == pytest.approx(policy.last.gain.remote_s)
    assert "fast prefills" in node.explain(long_).text()
    short = node.route(list(range(100)), 1.0)
    assert policy.last is None
    assert short.expected_ttft_s < 0.05, "it waits for no prefill"
    assert node.report(long_, Outcome.served(0, 0.5), 1.5) is None
    assert node.report(short, Outcome.failed(), 1.6) is None


def test_what_cannot_be_is_refused() -> None:
    for bad in ({"nodes": 0}, {"threshold_tokens": -1.0}, {"hysteresis": -0.1}):
        with pytest.raises(UsageError):
            pool(**bad)
    for bad in ({"wait_s": -1.0}, {"queued_bytes": -1.0}, {"utilisation": 2.0}):
        with pytest.raises(UsageError):
            pool().report(0.0, **bad)
