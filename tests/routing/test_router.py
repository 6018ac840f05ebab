"""Decisions end to end: several nodes on one mesh, and what each decides from gossip alone."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from routing import (
    BLOCK,
    BUSY,
    DOMAIN,
    DRAINING,
    IDLE,
    LONG,
    SETTINGS,
    check,
    hold,
    load,
    mesh,
    prompt,
    queue,
    roam,
    three_holders,
)

from prefixroute import (
    Candidate,
    Choice,
    GreedyCost,
    LeastLoad,
    LoadReport,
    LongestMatch,
    Node,
    NodeSettings,
    NoRouting,
    Outcome,
    Policy,
    PushBackSettings,
    PushBackState,
    Request,
    UsageError,
)
from prefixroute.routing.standing import BELIEF
from prefixroute.testing import stored

# --- who gets it --------------------------------------------------------------------------------------------


def test_the_longest_cached_prefix_wins_from_gossip_alone() -> None:
    net = mesh(4)
    tokens = prompt(1, 64)
    hold(net, "n1/0", tokens)
    hold(net, "n2/0", tokens[: 32 * BLOCK])
    hold(net, "n0/0", tokens[: 4 * BLOCK])
    net.run(1.0)
    decision = net.nodes["n0"].route(tokens, net.now)
    assert (decision.target, decision.local, decision.url) == ("n1/0", False, "http://n1/0")
    assert decision.reason == "longer cached prefix"
    assert (decision.prompt_tokens, decision.matched_tokens) == (1025, 1024)
    assert decision.fallbacks[0] == "n2/0"
    assert decision.fallbacks[-1] == "n0/0"
    assert net.nodes["n0"].endpoint_url("n2/0") == "http://n2/0"
    expected = {c.endpoint: c for c in decision.candidates}
    assert {name: c.depth for name, c in expected.items() if c.depth} == {"n1/0": 64, "n2/0": 32, "n0/0": 4}
    assert decision.expected_ttft_s == pytest.approx(expected["n1/0"].cost_s)
    assert decision.expected_saving_s == pytest.approx(expected["n0/0"].cost_s - expected["n1/0"].cost_s)
    assert expected["n1/0"].prefill_s == pytest.approx((1025 - BELIEF * 1024) / 1000)
    assert expected["n0/0"].prefill_s == pytest.approx((1025 - 64) / 1000), "one's own cache is known, not believed"
    check(net)


def test_every_node_decides_the_same_from_its_own_copy() -> None:
    net = mesh(4)
    tokens = prompt(1, 64)
    hold(net, "n2/0", tokens)
    net.run(1.0)
    assert {name: node.route(tokens, net.now).target for name, node in net.nodes.items()} == dict.fromkeys(
        net.nodes, "n2/0"
    )


@pytest.mark.parametrize(("queued_s", "stays"), [(0.0, False), (0.5, False), (1.5, True), (3.9, True)])
def test_a_queue_at_the_holder_is_weighed_against_the_prefill_it_saves(queued_s: float, stays: bool) -> None:
    net = mesh(2)
    tokens = prompt(1, 64)
    hold(net, "n1/0", tokens)
    net.run(1.0)
    load(net, "n1/0", queue(queued_s))
    net.run(0.25)
    assert net.nodes["n0"].route(tokens, net.now).local is stays


@pytest.mark.parametrize(("one_way_s", "stays"), [(0.0, False), (0.3, False), (0.6, True)])
def test_the_way_is_weighed_against_the_prefill_it_saves(one_way_s: float, stays: bool) -> None:
    net = mesh(2)
    net.delays = {("n0", "n1"): one_way_s, ("n1", "n0"): one_way_s}
    tokens = prompt(1, 64)
    hold(net, "n1/0", tokens)
    net.run(20.0)
    decision = net.nodes["n0"].route(tokens, net.now)
    (remote,) = [c for c in decision.candidates if not c.local]
    assert remote.rtt_s == pytest.approx(2 * one_way_s, abs=0.2), "measured from gossip's own echoes"
    assert decision.local is stays


def test_a_queue_here_sends_a_prompt_that_nobody_holds_elsewhere() -> None:
    net = mesh(3)
    load(net, "n0/0", queue(2.0))
    roam(net.nodes["n0"])
    decision = net.nodes["n0"].route(prompt(1, 4), net.now)
    assert not decision.local
    assert decision.reason == "shorter wait"


def test_a_queue_here_keeps_a_prompt_that_nobody_holds_where_prompts_come_back() -> None:
    net = mesh(3)
    load(net, "n0/0", queue(2.0))
    decision = net.nodes["n0"].route(prompt(1, 4), net.now)
    assert decision.local
    assert decision.reason == "local: it would be stored where it is not asked for"
    assert decision.fallbacks, "a stray is a fallback all the same"


def test_unequal_engines_are_compared_in_seconds() -> None:
    net = mesh(2)
    load(net, "n0/0", LoadReport(queued_tokens=100, prefill_tokens_per_s=100, overhead_s=0.01))
    load(net, "n1/0", LoadReport(queued_tokens=2000, prefill_tokens_per_s=10_000, overhead_s=0.01))
    net.run(1.0)
    roam(net.nodes["n0"])
    assert net.nodes["n0"].route(prompt(1, 20), net.now).target == "n1/0"


@pytest.mark.parametrize(
    ("policy", "target"),
    [(GreedyCost(), "n0/0"), (LongestMatch(), "n1/0"), (LeastLoad(), "n0/0"), (NoRouting(), "n0/0")],
)
def test_the_policy_decides(policy: Policy, target: str) -> None:
    net = mesh(3, policy=policy)
    tokens = prompt(1, 16)
    hold(net, "n1/0", tokens)
    net.run(1.0)
    load(net, "n1/0", queue(3.0))
    load(net, "n2/0", queue(1.0))
    net.run(0.25)
    assert net.nodes["n0"].route(tokens, net.now).target == target


def test_a_users_policy_sees_every_term_and_is_followed() -> None:
    seen: list[Sequence[Candidate]] = []

    class Last:
        def choose(self, request: Request, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
            assert request == (request.chain, net.now, net.nodes["n0"]._table.fleet.entry)
            seen.append(tuple(candidates))
            return Choice(tuple(sorted(candidates, key=lambda c: c.endpoint, reverse=True)), "by name")

    net = mesh(3, policy=Last())
    decision = net.nodes["n0"].route(prompt(1, 4), net.now)
    assert decision.reason == "by name"
    assert decision.target == max(c.endpoint for c in seen[0])
    assert decision.candidates == seen[0]


# --- prompts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "matched"), [(0, 0), (1, 0), (15, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
def test_short_prompts_match_whole_blocks_and_never_their_last_token(length: int, matched: int) -> None:
    net = mesh(2, policy=LongestMatch())
    tokens = prompt(1, 8)
    hold(net, "n1/0", tokens)
    net.run(1.0)
    decision = net.nodes["n0"].route(tokens[:length], net.now)
    assert decision.prompt_tokens == length
    assert max(c.matched_tokens for c in decision.candidates) == matched
    assert decision.target == ("n1/0" if length >= BLOCK else "n0/0")


def test_a_match_is_rounded_down_to_what_the_owners_engine_can_reuse() -> None:
    net = mesh(2)
    tokens = prompt(1, 64)
    net.nodes["n1"].apply("n1/0", stored(tokens, block_size=128), net.now)
    net.run(1.0)
    decision = net.nodes["n0"].route([*tokens[: 31 * BLOCK], *prompt(2, 20)], net.now)
    assert (decision.target, decision.matched_tokens) == ("n1/0", 3 * 128)


@pytest.mark.parametrize(
    "form",
    [
        list,
        tuple,
        lambda tokens: array("I", tokens),
        lambda tokens: array("q", tokens),
        lambda tokens: np.array(tokens),
        lambda tokens: np.array(tokens, np.int32),
        lambda tokens: np.repeat(np.array(tokens, np.uint32), 2)[::2],
        lambda tokens: memoryview(array("I", tokens)),
    ],
)
def test_a_prompt_may_come_in_any_form(form: Any) -> None:
    net = mesh(2)
    tokens = prompt(1, 40)
    hold(net, "n1/0", tokens)
    net.run(1.0)
    node = net.nodes["n0"]
    for given in (form(tokens), node.chain(form(tokens))):
        decision = node.route(given, net.now)
        assert (decision.target, decision.matched_tokens) == ("n1/0", 640)
        node.report(decision, Outcome.cancelled(), net.now)


@pytest.mark.parametrize(
    "wrong", ["text", b"bytes", [0.5] * 20, ["a"] * 20, [-1] * 20, [2**32] * 20, None, np.zeros((2, 16), int)]
)
def test_what_is_no_prompt_is_refused_with_advice(wrong: Any) -> None:
    net = mesh(1)
    with pytest.raises(UsageError):
        net.nodes["n0"].route(wrong, net.now)


# --- push-back ----------------------------------------------------------------------------------------------


def test_an_overloaded_holder_is_spared_while_anybody_is_not() -> None:
    net = mesh(3)
    tokens = prompt(1, LONG)
    hold(net, "n1/0", tokens)
    net.run(1.0)
    load(net, "n1/0", BUSY)
    net.run(0.25)
    node = net.nodes["n0"]
    decision = node.route(tokens, net.now)
    assert decision.target != "n1/0"
    assert "n1/0" not in decision.fallbacks
    node.report(decision, Outcome.cancelled(), net.now)
    load(net, "n2/0", BUSY)
    net.run(0.25)
    assert node.route(tokens, net.now).local, "the local endpoint is not overloaded, so it is honoured still"


def test_overload_is_ignored_when_everybody_is_overloaded() -> None:
    net = mesh(3)
    tokens = prompt(1, LONG)
    hold(net, "n1/0", tokens)
    net.run(1.0)
    for name in ("n0/0", "n1/0", "n2/0"):
        load(net, name, BUSY)
    net.run(0.25)
    decision = net.nodes["n0"].route(tokens, net.now)
    assert (decision.target, decision.matched_tokens) == ("n1/0", LONG * BLOCK)
    assert {c.state for c in decision.candidates} == {PushBackState.OVERLOADED}


def test_no_routing_stays_local_however_busy_local_is() -> None:
    net = mesh(2, policy=NoRouting())
    net.run(1.0)
    load(net, "n0/0", BUSY)
    net.run(0.25)
    decision = net.nodes["n0"].route(prompt(1, LONG), net.now)
    states = {c.endpoint: c.state for c in decision.candidates}
    assert (decision.target, states["n0/0"]) == ("n0/0", PushBackState.OVERLOADED)


def test_a_gateway_ignores_overload_when_all_its_peers_are_overloaded() -> None:
    net = mesh(2)
    gateway = net.add(Node("gate", DOMAIN, rng=random.Random(9), now=net.now, settings=SETTINGS))
    tokens = prompt(1, LONG)
    hold(net, "n1/0", tokens)
    net.run(1.0)
    load(net, "n1/0", BUSY)
    net.run(0.5)
    assert gateway.route(tokens, net.now).target == "n0/0"
    load(net, "n0/0", BUSY)
    net.run(0.5)
    assert gateway.route(tokens, net.now).target == "n1/0"


def test_refusal_is_absolute() -> None:
    net = mesh(3)
    tokens = prompt(1, LONG)
    hold(net, "n1/0", tokens)
    net.run(1.0)
    load(net, "n1/0", DRAINING)
    load(net, "n2/0", DRAINING)
    load(net, "n0/0", BUSY)
    net.run(0.25)
    decision = net.nodes["n0"].route(tokens, net.now)
    assert decision.local
    assert decision.fallbacks == ()


def test_a_refusing_local_engine_is_passed_over_but_stays_the_last_fallback() -> None:
    net = mesh(3)
    load(net, "n0/0", DRAINING)
    decision = net.nodes["n0"].route(prompt(1, 4), net.now)
    assert not decision.local
    assert decision.fallbacks[-1] == "n0/0"


def test_local_execution_is_left_when_everybody_refuses() -> None:
    net = mesh(3)
    for name in ("n0/0", "n1/0", "n2/0"):
        load(net, name, DRAINING)
    net.run(0.25)
    decision = net.nodes["n0"].route(prompt(1, 4), net.now)
    assert decision.local


def test_push_back_that_is_not_renewed_runs_out() -> None:
    net = mesh(
        2, settings=NodeSettings(push_back=PushBackSettings(ttl_s=1.0), suspect_after_s=30.0, datagram_bytes=60_000)
    )
    tokens = prompt(1, LONG)
    hold(net, "n1/0", tokens)
    net.run(1.0)
    load(net, "n1/0", DRAINING)
    net.run(0.25)
    assert net.nodes["n0"].route(tokens, net.now).local
    net.down.add("n1")
    net.run(1.3)
    assert net.nodes["n0"].route(tokens, net.now).target == "n1/0"


def test_an_engine_that_turned_a_request_away_is_left_alone_by_its_peers_too() -> None:
    net = mesh(2)
    tokens = prompt(1, LONG)
    hold(net, "n1/0", tokens)
    net.run(1.0)
    owner = net.nodes["n1"]
    assert owner.report(owner.route(tokens, net.now), Outcome.refused("503"), net.now) is not None
    net.run(0.45)
    decision = net.nodes["n0"].route(tokens, net.now)
    assert decision.local
    net.run(3.0)
    assert net.nodes["n0"].route(tokens, net.now).target == "n1/0"


# --- one hop, gateways --------------------------------------------------------------------------------------


def test_a_forwarded_request_never_leaves_the_node() -> None:
    net = mesh(3, ranks=2)
    tokens = prompt(1, LONG)
    hold(net, "n1/0", tokens)
    net.run(1.0)
    node = net.nodes["n0"]
    for report in (IDLE, BUSY, DRAINING):
        for rank in ("n0/0", "n0/1"):
            load(net, rank, report)
        decision = node.route(tokens, net.now, forwarded=True)
        assert decision.local
        assert decision.reason == "forwarded here"
        assert all(name.startswith("n0/") for name in decision.fallbacks)
        assert decision.expected_saving_s == 0.0
        second = node.report(decision, Outcome.failed(), net.now)
        assert second is not None
        assert second.startswith("n0/")
        assert node.report(decision, Outcome.failed(), net.now) is None


def test_a_target_that_is_slower_than_the_budget_declines_and_books_nothing() -> None:
    net = mesh(2)
    tokens = prompt(1, 64)
    hold(net, "n0/0", tokens[: 32 * BLOCK])
    net.run(1.0)
    node = net.nodes["n0"]
    before = node.load("n0/0", net.now)
    # 513 of 1,025 tokens to prefill at a millisecond each, and 10 ms.
    decision = node.route(tokens, net.now, forwarded=True, budget_s=0.5)
    assert decision.declined
    assert decision.reason == "declined: longer here than the budget of 500 ms"
    assert (decision.target, decision.matched_tokens) == ("n0/0", 512)
    assert (node.stats(net.now).in_flight, node.load("n0/0", net.now)) == (0, before)
    assert node.report(decision, Outcome.cancelled(), net.now) is None
    assert node.counters["decisions_declined"] == 1
    assert "decisions_local" not in node.counters
    assert not node.route(tokens, net.now, forwarded=True, budget_s=0.53).declined
    assert node.counters["decisions_local"] == 1
    check(net)


def test_a_forward_names_its_budget_and_local_work_has_none() -> None:
    net, node, tokens = three_holders()
    decision = node.route(tokens, net.now)
    here = next(c.cost_s for c in decision.candidates if c.local)
    assert decision.budget_s == here
    assert node.explain(decision).to_dict()["budget_ms"] == round(1000 * here, 2)
    assert node.route(prompt(2, 64), net.now).budget_s == float("inf")
    assert node.explain(net.nodes["n1"].route(tokens, net.now)).to_dict()["budget_ms"] is None


def test_a_gateway_takes_no_forwarded_request() -> None:
    net = mesh(2)
    gateway = net.add(Node("gate", DOMAIN, rng=random.Random(9), now=net.now, settings=SETTINGS))
    net.run(1.0)
    with pytest.raises(UsageError, match="no endpoint of its own"):
        gateway.route(prompt(1, 4), net.now, forwarded=True)
    assert gateway.stats(net.now).in_flight == 0


def test_a_gateway_routes_from_gossip_alone() -> None:
    net = mesh(3)
    tokens = prompt(1, 64)
    hold(net, "n1/0", tokens)
    gateway = net.add(Node("gate", DOMAIN, rng=random.Random(9), now=net.now, settings=SETTINGS))
    net.run(1.0)
    decision = gateway.route(tokens, net.now)
    assert (decision.target, decision.local, decision.matched_tokens) == ("n1/0", False, 1024)
    assert decision.expected_saving_s == 0.0, "there is no local endpoint to compare with"
    assert sorted(decision.fallbacks) == ["n0/0", "n2/0"], "also who was not weighed"
    assert all(not c.local for c in decision.candidates)
    check(net)


def test_a_gateway_without_peers_says_what_to_do() -> None:
    gateway = Node("gate", DOMAIN, rng=random.Random(1), now=0.0)
    with pytest.raises(UsageError, match="add_endpoint, or add_peer"):
        gateway.route(prompt(1, 4), 0.0)
    gateway.add_peer("n1", "n1", 0.0)
    with pytest.raises(UsageError, match="let gossip run first"):
        gateway.route(prompt(1, 4), 0.0)


@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_of_one_node_are_told_apart(ranks: int) -> None:
    net = mesh(2, ranks=ranks)
    own, theirs = prompt(1, 64), prompt(2, 64)
    hold(net, "n0/1", own)
    hold(net, "n1/1", theirs)
    net.run(1.0)
    node = net.nodes["n0"]
    decision = node.route(own, net.now)
    assert (decision.target, decision.local) == ("n0/1", True)
    assert [c.endpoint for c in decision.candidates if c.local and c.depth] == ["n0/1"]
    assert len([c for c in decision.candidates if c.local]) == ranks
    assert node.route(own, net.now, forwarded=True).target == "n0/1"
    assert node.route(theirs, net.now).target == "n1/1"
    spread = {node.route(prompt(3, 30), net.now, forwarded=True).target for _ in range(2 * ranks)}
    assert spread >= {f"n0/{i}" for i in range(ranks) if i != 1}
    check(net)


def test_a_local_prefix_shorter_than_the_strata_that_are_looked_at_is_found() -> None:
    net = mesh(8, policy=NoRouting())
    tokens = prompt(1, 64)
    for i in range(1, 8):
        hold(net, f"n{i}/0", tokens[: (64 - 4 * i) * BLOCK])
    hold(net, "n0/0", tokens[: 7 * BLOCK])
    net.run(1.0)
    decision = net.nodes["n0"].route(tokens, net.now)
    assert (decision.target, decision.matched_tokens) == ("n0/0", 7 * BLOCK)


def test_a_remote_prefix_beyond_the_strata_that_are_looked_at_is_found_when_it_is_the_cheapest() -> None:
    net = mesh(6)
    tokens = prompt(1, 64)
    for i in range(1, 6):
        hold(net, f"n{i}/0", tokens[: (64 - 4 * i) * BLOCK])
    net.run(1.0)
    for i in range(1, 5):
        load(net, f"n{i}/0", DRAINING)
    net.run(1.0)
    decision = net.nodes["n0"].route(tokens, net.now)
    assert (decision.target, decision.matched_tokens) == ("n5/0", 44 * BLOCK)


# --- explanations, counters ---------------------------------------------------------------------------------


def test_every_explanation_adds_up() -> None:
    net, node, tokens = three_holders()
    load(net, "n0/0", queue(0.4))
    rng = random.Random(1)
    for _ in range(50):
        given = tokens[: rng.randrange(len(tokens))] + prompt(rng.randrange(99), rng.randrange(9))
        decision = node.route(given, net.now)
        for row in node.explain(decision).to_dict()["candidates"]:
            terms = row["rtt_ms"] + row["wait_ms"] + row["overhead_ms"] + row["prefill_ms"]
            assert terms == pytest.approx(row["cost_ms"], abs=0.03)
        for c in decision.candidates:
            assert c.cost_s == pytest.approx(c.rtt_s + c.wait_s + c.overhead_s + c.prefill_s)
            assert 0 <= c.matched_tokens <= max(0, len(given) - 1)
        names = [c.endpoint for c in decision.candidates]
        assert len(names) == len(set(names))
        assert {decision.target, *decision.fallbacks} <= set(names)
        assert decision.target in node.explain(decision).text()


def test_decisions_are_counted_by_where_they_went() -> None:
    net, node, tokens = three_holders()
    places = []
    for number, given in enumerate((tokens, prompt(9, 4), prompt(8, 4)), 1):
        decision = node.route(given, net.now)
        assert decision.id == number
        places.append(decision.local)
        node.report(decision, Outcome.cancelled(), net.now)
    assert places[:2] == [False, True]
    assert (node.counters["decisions_forward"], node.counters["decisions_local"]) == (
        places.count(False),
        places.count(True),
    )


def test_the_same_seed_gives_the_same_decisions() -> None:
    def decide() -> list[str]:
        net = mesh(5)
        gateway = net.add(Node("gate", DOMAIN, rng=random.Random(9), now=net.now, settings=SETTINGS))
        net.run(1.0)
        return [gateway.route(prompt(i, 8), net.now).target for i in range(40)]

    assert decide() == decide()
    assert len(set(decide())) == 5
