"""Decisions end to end: several nodes on one mesh, what each decides from gossip alone, and how outcomes come back.

Engines are set to 1,000 tokens a second unless a test says otherwise, so a token is a millisecond.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from prefixroute import (
    Candidate,
    Choice,
    Domain,
    GreedyCost,
    LeastLoad,
    LoadReport,
    LongestMatch,
    Node,
    NodeSettings,
    NoRouting,
    Outcome,
    PeerChanged,
    Policy,
    PushBackSettings,
    PushBackState,
    UsageError,
)
from prefixroute.fleet import BELIEF
from prefixroute.router import MAX_FALLBACKS
from prefixroute.testing import Mesh, stored

DOMAIN = Domain("m", "t")
BLOCK = DOMAIN.block_size
IDLE = LoadReport(prefill_tokens_per_s=1000, overhead_s=0.01)
SETTINGS = NodeSettings(datagram_bytes=60_000)


def prompt(seed: int, blocks: int, more: int = 1) -> list[int]:
    """Tokens of `blocks` whole blocks that every caller of this seed shares, then `more`."""
    rng = random.Random(seed)
    return [rng.randrange(50_000) for _ in range(blocks * BLOCK + more)]


def mesh(n: int = 2, *, ranks: int = 1, policy: Policy | None = None, settings: NodeSettings = SETTINGS) -> Mesh:
    """`n` nodes n0, n1, ... of `ranks` idle endpoints each; the policy is that of n0."""
    net = Mesh()
    for i in range(n):
        node = Node(
            f"n{i}", DOMAIN, rng=random.Random(i), now=0.0, settings=settings, policy=policy if i == 0 else None
        )
        for rank in range(ranks):
            endpoint = node.add_endpoint(str(rank), url=f"http://n{i}/{rank}", incarnation=1, now=0.0)
            node.set_load(endpoint, IDLE, 0.0)
        net.add(node)
    net.run(1.0)
    return net


def hold(net: Mesh, endpoint: str, tokens: Sequence[int]) -> None:
    net.nodes[endpoint.partition("/")[0]].apply(endpoint, stored(tokens), net.now)


def load(net: Mesh, endpoint: str, report: LoadReport) -> None:
    net.nodes[endpoint.partition("/")[0]].set_load(endpoint, report, net.now)


def queue(seconds: float) -> LoadReport:
    return LoadReport(queued_tokens=round(seconds * 1000), prefill_tokens_per_s=1000, overhead_s=0.01)


def check(net: Mesh) -> None:
    for node in net.nodes.values():
        node._check()


def suspended(node: Node) -> list[str]:
    return [event.peer for event in node.events() if isinstance(event, PeerChanged) and event.state == "suspended"]


# --- who gets it -------------------------------------------------------------------------------------------


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
    decision = net.nodes["n0"].route(prompt(1, 4), net.now)
    assert not decision.local
    assert decision.reason == "shorter wait"


def test_unequal_engines_are_compared_in_seconds() -> None:
    net = mesh(2)
    load(net, "n0/0", LoadReport(queued_tokens=100, prefill_tokens_per_s=100, overhead_s=0.01))
    load(net, "n1/0", LoadReport(queued_tokens=2000, prefill_tokens_per_s=10_000, overhead_s=0.01))
    net.run(1.0)
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
        def choose(self, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
            seen.append(tuple(candidates))
            return Choice(tuple(sorted(candidates, key=lambda c: c.endpoint, reverse=True)), "by name")

    net = mesh(3, policy=Last())
    decision = net.nodes["n0"].route(prompt(1, 4), net.now)
    assert decision.reason == "by name"
    assert decision.target == max(c.endpoint for c in seen[0])
    assert decision.candidates == seen[0]


# --- prompts -----------------------------------------------------------------------------------------------


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


# --- push-back ---------------------------------------------------------------------------------------------

BUSY = LoadReport(queued_tokens=5000, prefill_tokens_per_s=1000, overhead_s=0.01)
DRAINING = LoadReport(refusing=True, reason="draining", prefill_tokens_per_s=1000)
LONG = 1000
"""Blocks of a prompt whose prefill takes 16 s: worth any queue here."""


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


def test_a_gateway_ignores_overload_when_all_its_peers_are_overloaded() -> None:
    net = mesh(2)
    gateway = net.add(Node("gate", DOMAIN, rng=random.Random(9), now=net.now, settings=SETTINGS))
    tokens = prompt(1, LONG)
    hold(net, "n1/0", tokens)
    net.run(1.0)
    load(net, "n1/0", BUSY)
    net.run(0.25)
    assert gateway.route(tokens, net.now).target == "n0/0"
    load(net, "n0/0", BUSY)
    net.run(0.25)
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


# --- outcomes ----------------------------------------------------------------------------------------------


def three_holders() -> tuple[Mesh, Node, list[int]]:
    """n1, n2, n3 hold the prompt, each 16 blocks less than the one before."""
    net = mesh(4)
    tokens = prompt(1, 64)
    for i in (1, 2, 3):
        hold(net, f"n{i}/0", tokens[: (80 - 16 * i) * BLOCK])
    net.run(1.0)
    net.nodes["n0"].events()
    return net, net.nodes["n0"], tokens


@pytest.mark.parametrize("outcome", [Outcome.refused("503"), Outcome.failed("reset"), Outcome.timed_out()])
def test_failed_attempts_walk_the_fallbacks_to_local_execution(outcome: Outcome) -> None:
    net, node, tokens = three_holders()
    decision = node.route(tokens, net.now)
    assert decision.target == "n1/0"
    assert decision.fallbacks == ("n2/0", "n3/0", "n0/0")
    walked = [node.report(decision, outcome, net.now) for _ in range(4)]
    assert walked == ["n2/0", "n3/0", "n0/0", None]
    assert node.report(decision, outcome, net.now) is None
    assert node.counters["fallbacks"] == 3
    assert node.counters["exhausted"] == 1
    assert node.counters["outcomes_late"] == 1
    assert node.stats(net.now).in_flight == 0


@pytest.mark.parametrize("outcome", [Outcome.served(), Outcome.cancelled()])
def test_served_and_cancelled_end_a_request(outcome: Outcome) -> None:
    net, node, tokens = three_holders()
    decision = node.route(tokens, net.now)
    assert node.report(decision, outcome, net.now) is None
    assert node.stats(net.now).in_flight == 0
    assert node.report(decision, outcome, net.now) is None
    assert node.counters["outcomes_late"] == 1
    assert suspended(node) == []


def test_a_decision_names_few_fallbacks_and_every_local_one_last() -> None:
    net = mesh(8, ranks=2)
    tokens = prompt(1, 64)
    for i in range(1, 8):
        hold(net, f"n{i}/0", tokens[: (70 - 8 * i) * BLOCK])
    net.run(1.0)
    decision = net.nodes["n0"].route(tokens, net.now)
    remote = [name for name in decision.fallbacks if not name.startswith("n0/")]
    assert len(remote) == MAX_FALLBACKS
    assert sorted(decision.fallbacks[len(remote) :]) == ["n0/0", "n0/1"]
    assert len(set(decision.fallbacks)) == len(decision.fallbacks)
    assert decision.target not in decision.fallbacks


def test_a_fallback_that_became_unusable_meanwhile_is_passed_over() -> None:
    net, node, tokens = three_holders()
    first, second = node.route(tokens, net.now), node.route(tokens, net.now)
    assert {first.target, second.target} == {"n1/0"}
    assert node.report(first, Outcome.failed(), net.now) == "n2/0"
    assert node.report(first, Outcome.refused(), net.now) == "n3/0"
    assert node.report(second, Outcome.failed(), net.now) == "n3/0", "n2 refuses since"


def test_a_fallback_that_was_forgotten_meanwhile_is_passed_over() -> None:
    net, node, tokens = three_holders()
    decision = node.route(tokens, net.now)
    node.remove_peer("n2", net.now)
    assert node.report(decision, Outcome.failed(), net.now) == "n3/0"
    node.remove_peer("n3", net.now)
    assert node.report(decision, Outcome.failed(), net.now) == "n0/0"
    assert node.report(decision, Outcome.served(), net.now) is None


def test_reports_that_name_their_attempt_are_told_apart() -> None:
    """The first target's answer comes after its time-out, and the client reports the time-out twice."""
    net, node, tokens = three_holders()
    decision = node.route(tokens, net.now)
    assert node.report(decision, Outcome.timed_out(), net.now, endpoint="n1/0") == "n2/0"
    assert node.report(decision, Outcome.timed_out(), net.now, endpoint="n1/0") is None
    assert node.report(decision, Outcome.served(), net.now, endpoint="n1/0") is None
    assert suspended(node) == ["n1"]
    assert node.counters["outcomes_late"] == 2
    assert node.stats(net.now).in_flight == 1
    assert node.report(decision, Outcome.served(), net.now, endpoint="n2/0") is None
    assert node.stats(net.now).in_flight == 0


def test_each_report_is_counted_once_by_what_it_was() -> None:
    net, node, tokens = three_holders()
    decision = node.route(tokens, net.now)
    node.report(decision, Outcome.timed_out(), net.now)
    node.report(decision, Outcome.served(), net.now)
    node.report(decision, Outcome.served(), net.now)
    counts = {name: n for name, n in node.counters.items() if name.startswith("outcomes_")}
    assert counts == {"outcomes_timed_out": 1, "outcomes_served": 1, "outcomes_late": 1}


def test_outcomes_that_never_come_are_given_up_and_their_work_released() -> None:
    net, node, tokens = three_holders()
    net.run(0.1)
    before = node.stats(net.now)
    decision = node.route(tokens, net.now)
    assert node.stats(net.now).in_flight == 1
    net.run(SETTINGS.outcome_timeout_s + 1.0)
    after = node.stats(net.now)
    assert after.in_flight == 0
    assert node.counters["outcomes_missing"] == 1
    assert [row.wait_s for row in after.endpoints] == [row.wait_s for row in before.endpoints]
    assert node.report(decision, Outcome.failed(), net.now) is None
    assert suspended(node) == [], "a report that late says nothing"


def test_requests_in_flight_are_bounded() -> None:
    net = mesh(2, settings=NodeSettings(max_in_flight=10, datagram_bytes=60_000))
    node = net.nodes["n0"]
    decisions = [node.route(prompt(i, 4), net.now) for i in range(25)]
    assert node.stats(net.now).in_flight == 10
    assert node.counters["outcomes_missing"] == 15
    assert node.report(decisions[0], Outcome.failed(), net.now) is None
    assert node.report(decisions[-1], Outcome.served(), net.now) is None
    check(net)


def test_a_long_pause_with_thousands_of_requests_in_flight_does_no_harm() -> None:
    net = mesh(2, policy=NoRouting())
    node = net.nodes["n0"]
    for i in range(3000):
        node.route(prompt(i % 50, 4), net.now)
    decision = node.route(prompt(1, 4), net.now + 10 * SETTINGS.outcome_timeout_s)
    assert decision.candidates[0].wait_s < 1.0


# --- failing endpoints -------------------------------------------------------------------------------------


def test_a_failed_forward_suspends_at_once_and_heartbeats_do_not_lift_it() -> None:
    net, node, tokens = three_holders()
    decision = node.route(tokens, net.now)
    node.report(decision, Outcome.failed("connection refused"), net.now)
    assert [event for event in node.events() if isinstance(event, PeerChanged)] == [
        PeerChanged("n1", "suspended", "connection refused")
    ]
    net.run(0.9)
    assert all(row.usable == (row.endpoint != "n1/0") for row in node.stats(net.now).endpoints)
    assert node.route(tokens, net.now).target == "n2/0"


def test_a_burst_of_failures_of_one_death_is_one_failure() -> None:
    net, node, tokens = three_holders()
    burst = [node.route(tokens, net.now) for _ in range(6)]
    hit = [decision for decision in burst if decision.target == "n1/0"]
    assert len(hit) > 1
    for decision in hit:
        node.report(decision, Outcome.failed("died"), net.now + 0.1)
    assert suspended(node) == ["n1"]
    net.run(1.4)
    assert next(row.usable for row in node.stats(net.now).endpoints if row.endpoint == "n1/0")


def test_after_the_pause_one_trial_goes_out_and_its_success_ends_the_suspension() -> None:
    net, node, tokens = three_holders()
    node.report(node.route(tokens, net.now), Outcome.failed(), net.now)
    net.run(1.3)
    targets = [node.route(tokens, net.now) for _ in range(5)]
    trials = [decision for decision in targets if decision.target == "n1/0"]
    assert len(trials) == 1
    node.events()
    node.report(trials[0], Outcome.served(), net.now)
    assert PeerChanged("n1", "resumed", "n1/0") in node.events()
    assert node.route(tokens, net.now).target == "n1/0"


def test_a_trial_that_fails_doubles_the_pause() -> None:
    net, node, tokens = three_holders()
    node.report(node.route(tokens, net.now), Outcome.failed(), net.now)
    net.run(1.3)
    trial = node.route(tokens, net.now)
    assert trial.target == "n1/0"
    node.report(trial, Outcome.failed(), net.now)
    net.run(1.7)
    assert node.route(tokens, net.now).target == "n2/0"
    net.run(0.6)
    assert node.route(tokens, net.now).target == "n1/0"


def test_a_local_failure_suspends_nobody() -> None:
    net = mesh(2)
    node = net.nodes["n0"]
    decision = node.route(prompt(1, 4), net.now)
    assert decision.local
    assert node.report(decision, Outcome.failed("engine broke off"), net.now) == "n1/0"
    assert suspended(node) == []
    assert node.route(prompt(1, 4), net.now).local


def test_a_gateway_whose_peers_are_all_suspended_tries_them_all_the_same() -> None:
    net = mesh(3)
    gateway = net.add(Node("gate", DOMAIN, rng=random.Random(9), now=net.now, settings=SETTINGS))
    net.run(1.0)
    now = net.now
    decision = gateway.route(prompt(1, 4), now)
    tried = [decision.target]
    while (name := gateway.report(decision, Outcome.failed(), now)) is not None:
        tried.append(name)
    everybody = ["n0/0", "n1/0", "n2/0"]
    assert sorted(tried) == sorted([decision.target, *decision.fallbacks])
    for name in everybody:
        gateway._fleet.standings[name].suspension.failed(now, now)
    gateway._fleet.refresh_all(now)
    assert not any(row.usable for row in gateway.stats(now).endpoints)
    again = gateway.route(prompt(1, 4), now)
    walked = [again.target]
    while (name := gateway.report(again, Outcome.timed_out(), now)) is not None:
        walked.append(name)
    assert sorted(walked) == everybody


def test_a_refused_forward_is_not_repeated_for_a_while() -> None:
    net, node, tokens = three_holders()
    decision = node.route(tokens, net.now)
    assert node.report(decision, Outcome.refused("503"), net.now) == "n2/0"
    node.report(decision, Outcome.served(), net.now)
    again = node.route(tokens, net.now)
    assert again.target == "n2/0"
    node.report(again, Outcome.served(), net.now)
    net.run(SETTINGS.push_back.ttl_s + 0.3)
    assert node.route(tokens, net.now).target == "n1/0"
    assert suspended(node) == []


def test_a_reply_that_says_the_server_drains_is_believed() -> None:
    net, node, tokens = three_holders()
    node.report(node.route(tokens, net.now), Outcome.served(load=LoadReport(refusing=True, reason="draining")), net.now)
    assert node.route(tokens, net.now).target == "n2/0"


def test_a_replys_load_counts_at_once_and_is_not_passed_off_as_the_owners_word() -> None:
    net, node, tokens = three_holders()
    decision = node.route(tokens, net.now)
    node.report(decision, Outcome.served(load=queue(3.0)), net.now)
    assert node.route(tokens, net.now).target == "n2/0"
    assert next(row.wait_s for row in node.stats(net.now).endpoints if row.endpoint == "n1/0") == 3.0
    assert node._gossip.copies["n1/0"].advert.report.queued_tokens == 0
    net.run(0.5)
    assert next(row.wait_s for row in node.stats(net.now).endpoints if row.endpoint == "n1/0") == 0.0


# --- booked work -------------------------------------------------------------------------------------------


def test_a_burst_spreads_when_one_endpoint_would_be_slower() -> None:
    """N routers, or one in a burst, otherwise pick the same best endpoint until its next report."""
    net = mesh(4)
    node = net.nodes["n0"]
    targets = [node.route(prompt(i, 20), net.now).target for i in range(40)]
    assert {name: targets.count(name) for name in sorted(set(targets))} == {f"n{i}/0": 10 for i in range(4)}


def test_a_burst_on_one_holder_stays_until_waiting_costs_more_than_prefill() -> None:
    net = mesh(2)
    tokens = prompt(1, 64)
    hold(net, "n1/0", tokens)
    net.run(1.0)
    node = net.nodes["n0"]
    targets = [node.route(tokens, net.now).target for _ in range(40)]
    stay = targets.index("n0/0")
    work_s = (1025 - BELIEF * 1024) / 1000 + 0.01
    assert stay == pytest.approx(1.035 / work_s, abs=2), "until the queue there is as long as the prefill here"
    assert targets[:stay] == ["n1/0"] * stay


def test_the_first_token_releases_booked_work() -> None:
    net = mesh(1)
    node = net.nodes["n0"]
    decisions = [node.route(prompt(i, 50), net.now) for i in range(3)]
    waits = [c.wait_s for d in decisions for c in d.candidates]
    assert waits == pytest.approx([0.0, 0.811, 1.622])
    for decision in decisions:
        node.first_token(decision, net.now)
        node.first_token(decision, net.now)
    assert node.stats(net.now).endpoints[0].wait_s == 0.0
    assert node.stats(net.now).in_flight == 3
    for decision in decisions:
        assert node.report(decision, Outcome.served(), net.now) is None
        node.first_token(decision, net.now)
    assert node.stats(net.now).endpoints[0].wait_s == 0.0


def test_booked_work_is_advertised_to_others_and_released_there_too() -> None:
    net = mesh(2)
    owner, other = net.nodes["n1"], net.nodes["n0"]
    decision = owner.route(prompt(1, 200), net.now, forwarded=True)
    net.run(0.25)
    told = next(row.wait_s for row in other.stats(net.now).endpoints if row.endpoint == "n1/0")
    assert 2.5 < told < 3.3
    owner.first_token(decision, net.now)
    net.run(0.45)
    assert next(row.wait_s for row in other.stats(net.now).endpoints if row.endpoint == "n1/0") == 0.0


def test_a_fallback_is_booked_where_it_goes() -> None:
    net, node, tokens = three_holders()
    decision = node.route(tokens, net.now)

    def waits() -> dict[str, float]:
        return {row.endpoint: row.wait_s for row in node.stats(net.now).endpoints}

    assert [name for name, wait_s in waits().items() if wait_s] == ["n1/0"]
    node.report(decision, Outcome.failed(), net.now)
    assert [name for name, wait_s in waits().items() if wait_s] == ["n2/0"]
    node.report(decision, Outcome.served(), net.now)
    assert not any(waits().values())


# --- trust -------------------------------------------------------------------------------------------------


def test_observed_misses_lower_the_trust_in_a_digest_and_hits_restore_it() -> None:
    net = mesh(2)
    net.delays = {("n0", "n1"): 0.01, ("n1", "n0"): 0.01}
    tokens = prompt(1, 64)
    hold(net, "n1/0", tokens)
    net.run(5.0)
    node = net.nodes["n0"]

    def confidence() -> float:
        return next(row.confidence for row in node.stats(net.now).endpoints if row.endpoint == "n1/0")

    trusts = [confidence()]
    assert trusts[0] == pytest.approx(BELIEF)
    decision = node.route(tokens, net.now)
    for _ in range(60):
        if decision.local:
            break
        node.report(decision, Outcome.served(cached_tokens=0), net.now)
        trusts.append(confidence())
        decision = node.route(tokens, net.now)
    assert decision.local, "a peer that never has what it says is not asked for ever"
    assert trusts == sorted(trusts, reverse=True)
    assert node.counters["predicted_tokens"] == 1024 * (len(trusts) - 1)
    assert node.counters["cached_tokens"] == 0
    standing = node._fleet.standings["n1/0"]
    low = standing.trust
    flight = node._router.flights[decision.id]
    for _ in range(60):
        node._router._compare_hit(_redirected(flight, "n1/0"), standing, 1024)
    assert low < 0.2 < 0.99 < standing.trust <= 1.0


def _redirected(flight: Any, endpoint: str) -> Any:
    flight.target = endpoint
    return flight


def test_a_part_of_a_predicted_hit_is_a_part_of_a_hit() -> None:
    net, node, tokens = three_holders()
    for _ in range(80):
        decision = node.route(tokens, net.now)
        cached = {"n1/0": 512, "n2/0": 900, "n3/0": 9999, "n0/0": 0}[decision.target]
        node.report(decision, Outcome.served(cached_tokens=cached), net.now)
    standings = node._fleet.standings
    assert 0.5 < standings["n1/0"].trust < 0.97
    assert standings["n2/0"].trust == pytest.approx(1.0)


def test_a_reply_without_a_count_says_nothing() -> None:
    net, node, tokens = three_holders()
    for _ in range(10):
        node.report(node.route(tokens, net.now), Outcome.served(), net.now)
    assert node._fleet.standings["n1/0"].trust == 1.0
    assert "predicted_tokens" not in node.counters


# --- one hop, gateways -------------------------------------------------------------------------------------


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
    assert len(decision.fallbacks) == 1
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


# --- explanations, counters --------------------------------------------------------------------------------


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
    for number, given in enumerate((tokens, prompt(9, 4), prompt(8, 4)), 1):
        decision = node.route(given, net.now)
        assert decision.id == number
        node.report(decision, Outcome.cancelled(), net.now)
    assert (node.counters["decisions_forward"], node.counters["decisions_local"]) == (1, 2)


def test_the_same_seed_gives_the_same_decisions() -> None:
    def decide() -> list[str]:
        net = mesh(5)
        gateway = net.add(Node("gate", DOMAIN, rng=random.Random(9), now=net.now, settings=SETTINGS))
        net.run(1.0)
        return [gateway.route(prompt(i, 8), net.now).target for i in range(40)]

    assert decide() == decide()
    assert len(set(decide())) == 5


# --- everything at once ------------------------------------------------------------------------------------


def outcome_of(rng: random.Random) -> Outcome:
    report = LoadReport(queued_tokens=rng.randrange(9000), prefill_tokens_per_s=1000, refusing=rng.random() < 0.1)
    return rng.choice(
        (
            Outcome.served(),
            Outcome.served(rng.randrange(2000), rng.random(), report),
            Outcome.refused("busy", rng.choice((None, report))),
            Outcome.failed("reset"),
            Outcome.timed_out(),
            Outcome.cancelled(),
        )
    )


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_nothing_is_left_and_nothing_raises(seed: int) -> None:
    """Nodes die and return, engines store, refuse and drain, outcomes come late, twice or never, in any order."""
    rng = random.Random(seed)
    policy = rng.choice((GreedyCost(), LongestMatch(), LeastLoad(), NoRouting()))
    net = mesh(
        4, ranks=rng.choice((1, 2)), policy=policy, settings=NodeSettings(outcome_timeout_s=10.0, datagram_bytes=9000)
    )
    gateway = net.add(Node("gate", DOMAIN, rng=random.Random(9), now=net.now, policy=policy))
    net.run(1.0)
    deciders = [net.nodes["n0"], gateway]
    decided: list[tuple[Node, Any]] = []
    for step in range(250):
        node, action = rng.choice(deciders), rng.random()
        endpoint = rng.choice([row.endpoint for row in net.nodes["n0"].stats(net.now).endpoints])
        if action < 0.35:
            tokens = prompt(rng.randrange(6), rng.randrange(40))
            forwarded = node is not gateway and rng.random() < 0.2
            decision = node.route(tokens, net.now, forwarded=forwarded)
            assert decision.local or not forwarded
            decided.append((node, decision))
        elif action < 0.65 and decided:
            node, decision = rng.choice(decided)
            following = node.report(decision, outcome_of(rng), net.now)
            assert following is None or following in decision.fallbacks
        elif action < 0.7 and decided:
            node, decision = rng.choice(decided)
            node.first_token(decision, net.now)
        elif action < 0.8:
            hold(net, endpoint, prompt(rng.randrange(6), rng.randrange(40)))
        elif action < 0.85:
            load(net, endpoint, rng.choice((IDLE, BUSY, DRAINING)))
        elif action < 0.88:
            net.down ^= {rng.choice(("n1", "n2", "n3"))}
        else:
            net.run(rng.choice((0.01, 0.1, 1.0, 5.0)))
        for each in deciders:
            each._check()
            flights, standings = each._router.flights, each._fleet.standings
            booked = {ticket for standing in standings.values() for ticket in standing.ledger._open}
            assert booked <= set(flights), (seed, step)
    net.down.clear()
    for node, decision in decided:
        while node.report(decision, Outcome.failed(), net.now) is not None:
            pass
    for each in deciders:
        assert each.stats(net.now).in_flight == 0
        assert not any(len(standing.ledger) for standing in each._fleet.standings.values())
    net.run(12.0)
    check(net)
    for name in ("n1", "n2", "n3"):
        decision = net.nodes[name].route(prompt(1, 4), net.now, forwarded=True)
        assert decision.local


# --- promise 6 ---------------------------------------------------------------------------------------------


class CountingDict(dict[int, int]):
    """The index's table, counting look-ups."""

    looked_up = 0

    def get(self, key: int, default: Any = None) -> Any:
        self.looked_up += 1
        return super().get(key, default)


class CountingList(list[Any]):
    """The fleet's ranking, counting what is read of it."""

    read = 0

    def __iter__(self) -> Any:
        for item in super().__iter__():
            self.read += 1
            yield item


class CountingPolicy:
    def __init__(self) -> None:
        self.weighed: list[int] = []

    def choose(self, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        self.weighed.append(len(candidates))
        return GreedyCost().choose(candidates, rng)


def effort(endpoints: int, holders: Iterable[int]) -> tuple[int, int, int]:
    """Weigh one prompt among `endpoints` of one peer: candidates, index look-ups, and steps down the ranking."""
    policy = CountingPolicy()
    asker = Node("asker", DOMAIN, rng=random.Random(1), now=0.0, settings=SETTINGS, policy=policy)
    owner = Node("owner", DOMAIN, rng=random.Random(2), now=0.0, settings=SETTINGS)
    tokens, holders = prompt(1, 64), set(holders)
    asker.set_load(asker.add_endpoint("0", incarnation=1, now=0.0), IDLE, 0.0)
    for i in range(endpoints):
        endpoint = owner.add_endpoint(str(i), incarnation=1, now=0.0)
        owner.apply(endpoint, stored(tokens if i in holders else prompt(100 + i, 4)), 0.0)
        # Those who hold the prompt are the busiest: they stand at the end of the ranking.
        owner.set_load(endpoint, queue(0.3 if i in holders else 0.0), 0.0)
    net = Mesh(asker, owner)
    net.run(3.0)
    rows = asker.stats(net.now).endpoints
    assert len(rows) == endpoints + 1
    assert sum(row.blocks for row in rows) == len(holders) * 64 + (endpoints - len(holders)) * 4
    table, ranking = CountingDict(asker._index._masks), CountingList(asker._fleet._ranking)
    asker._index._masks, asker._fleet._ranking = table, ranking
    assert asker.route(tokens, net.now).matched_tokens == 1024
    return policy.weighed[0], table.looked_up, ranking.read


def test_what_a_decision_looks_at_does_not_grow_with_the_number_of_endpoints() -> None:
    small, large = (effort(n, holders=range(3)) for n in (4, 256))
    assert large[0] == small[0] <= 4
    assert large[1] <= small[1]
    assert large[2] <= small[2] + 2, "three holders among 256 are picked, not searched for"


def test_what_a_decision_looks_at_does_not_grow_with_the_number_of_holders() -> None:
    few, many = (effort(256, holders=range(n)) for n in (2, 200))
    assert many[0] == few[0]
    assert many[1] <= few[1]


def test_many_depths_are_cut_to_the_deepest_few() -> None:
    policy = CountingPolicy()
    net = mesh(2, ranks=40, policy=policy)
    tokens = prompt(1, 64)
    for i in range(40):
        hold(net, f"n1/{i}", tokens[: (i + 1) * BLOCK])
    net.run(1.0)
    decision = net.nodes["n0"].route(tokens, net.now)
    assert len([c for c in decision.candidates if not c.local]) <= 5
    assert decision.matched_tokens == 40 * BLOCK
