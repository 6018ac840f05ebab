"""What becomes of decisions: outcomes, fallbacks, suspensions, booked work and trust, on a mesh of nodes."""

from __future__ import annotations

import random
from typing import Any

import pytest
from routing import (
    BLOCK,
    BUSY,
    DOMAIN,
    DRAINING,
    IDLE,
    SETTINGS,
    check,
    hold,
    load,
    mesh,
    new,
    prompt,
    queue,
    roam,
    suspended,
    three_holders,
)

from prefixroute import (
    GreedyCost,
    LeastLoad,
    LoadReport,
    LongestMatch,
    Node,
    NodeSettings,
    NoRouting,
    Outcome,
    PeerChanged,
)
from prefixroute.routing.router import MAX_FALLBACKS
from prefixroute.routing.standing import BELIEF

# --- outcomes -----------------------------------------------------------------------------------------------


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


def test_a_prompt_that_is_handed_back_goes_where_it_is_best_now_once() -> None:
    net, node, tokens = three_holders()
    decision = node.route(tokens, net.now)
    assert decision.target == "n1/0"
    assert node.report(decision, Outcome.declined(queue(9.0), 1024), net.now, endpoint="n1/0") == "n2/0"
    assert suspended(node) == []
    row = next(row for row in node.stats(net.now).endpoints if row.endpoint == "n1/0")
    assert row.usable
    assert row.wait_s == pytest.approx(9.0, abs=1e-4)
    assert row.confidence == pytest.approx(BELIEF, rel=0.01), "it held what it was said to"
    assert node.route(tokens, net.now).target != "n1/0"
    # It is followed like any other from here on, its fallbacks included.
    assert node.report(decision, Outcome.failed(), net.now, endpoint="n2/0") == "n3/0"
    assert node.report(decision, Outcome.served(1, 0.1), net.now, endpoint="n3/0") is None
    assert node.counters["outcomes_declined"] == 1
    check(net)


def test_a_prompt_that_is_handed_back_for_want_of_its_prefix_lowers_the_trust() -> None:
    net, node, tokens = three_holders()
    decision = node.route(tokens, net.now)
    node.report(decision, Outcome.declined(IDLE, 0), net.now)
    row = next(row for row in node.stats(net.now).endpoints if row.endpoint == "n1/0")
    assert row.confidence == pytest.approx(0.9 * BELIEF, rel=0.01)
    assert node.counters["predicted_tokens"] == 0, "nothing was served"


def test_what_was_handed_back_walks_the_fallbacks_if_everybody_declines() -> None:
    net, node, tokens = three_holders()
    decision = node.route(tokens, net.now)
    walked = [node.report(decision, Outcome.declined(), net.now) for _ in range(4)]
    assert walked == ["n2/0", "n3/0", "n0/0", None]
    assert node.stats(net.now).in_flight == 0
    check(net)


def test_an_endpoint_that_declines_without_a_cause_is_avoided_after_a_while() -> None:
    net, node, tokens = three_holders()
    targets = []
    for _ in range(40):
        decision = node.route(tokens, net.now)
        targets.append(decision.target)
        if decision.target == "n1/0":
            node.report(decision, Outcome.declined(IDLE, 1024), net.now)
        node.report(decision, Outcome.cancelled(), net.now)
    assert 0 < targets.count("n1/0") < 10
    assert targets[-1] == "n2/0"
    # One whose queue explains it is charged nothing: it is free again when the queue is gone.
    honest = node.route(tokens, net.now)
    assert honest.target == "n2/0"
    node.report(honest, Outcome.declined(queue(9.0), 768), net.now)
    net.run(10.0)
    row = next(row for row in node.stats(net.now).endpoints if row.endpoint == "n2/0")
    assert row.wait_s == pytest.approx(0.0, abs=0.01)


def test_the_only_endpoint_of_a_gateway_gets_back_what_it_declined() -> None:
    net = mesh(1)
    gateway = new("gw")
    net.add(gateway)
    net.run(1.0)
    decision = gateway.route(prompt(1, 4), net.now)
    assert decision.budget_s == float("inf")
    assert gateway.report(decision, Outcome.declined(), net.now) == "n0/0"


def test_an_endpoint_on_trial_that_declines_is_alive() -> None:
    net, node, tokens = three_holders()
    decision = node.route(tokens, net.now)
    node.report(decision, Outcome.failed(), net.now)
    assert suspended(node) == ["n1"]
    net.run(1.5)
    trial = node.route(tokens, net.now)
    assert trial.target == "n1/0"
    node.report(trial, Outcome.declined(IDLE, 1024), net.now)
    assert PeerChanged("n1", "resumed", "n1/0") in node.events()


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
    assert suspended(node) == ["n1"], "silence is a failure"
    # Its caller may have waited for longer: the request still goes on.
    assert node.report(decision, Outcome.timed_out(), net.now) == "n2/0"
    assert node.stats(net.now).in_flight == 1
    assert suspended(node) == [], "it is the same failure"
    assert node.report(decision, Outcome.served(), net.now) is None


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


# --- failing endpoints --------------------------------------------------------------------------------------


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

    def fails_there() -> None:
        decision = node.route(tokens, net.now)
        assert decision.target == "n1/0"
        node.report(decision, Outcome.failed(), net.now)
        node.report(decision, Outcome.cancelled(), net.now)

    fails_there()
    net.run(1.3)
    fails_there()
    net.run(1.7)
    assert node.route(tokens, net.now).target == "n2/0"
    net.run(0.6)
    assert next(row.usable for row in node.stats(net.now).endpoints if row.endpoint == "n1/0")


def test_a_local_failure_suspends_nobody() -> None:
    net = mesh(2)
    node = net.nodes["n0"]
    decision = node.route(prompt(1, 4), net.now)
    assert decision.local
    assert node.report(decision, Outcome.failed("engine broke off"), net.now) == "n1/0"
    assert suspended(node) == []
    # Another prompt: that one is expected at the fallback now.
    assert node.route(prompt(2, 4), net.now).local


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
        gateway._table.fleet.standings[name].suspension.failed(now, now)
    gateway._table.fleet.refresh_all(now)
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
    net.run(SETTINGS.push_back.ttl_s + SETTINGS.idle_interval_s)
    assert all(row.usable for row in node.stats(net.now).endpoints)
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
    row = next(row for row in node.stats(net.now).endpoints if row.endpoint == "n1/0")
    assert row.wait_s == pytest.approx(3.0, abs=1e-4)
    assert node._members.copies["n1/0"].advert.report.queued_tokens == 0
    net.run(0.5)
    assert next(row.wait_s for row in node.stats(net.now).endpoints if row.endpoint == "n1/0") == 0.0


# --- booked work --------------------------------------------------------------------------------------------


def test_a_burst_spreads_when_one_endpoint_would_be_slower() -> None:
    """N routers, or one in a burst, otherwise pick the same best endpoint until its next report."""
    net = mesh(4)
    node = net.nodes["n0"]
    roam(node)
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
    # Until the queue there is as long as the prefill here; the price of work where others wait ends it earlier.
    assert 0.6 * 1.035 / work_s < stay < 1.035 / work_s + 2
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


# --- trust --------------------------------------------------------------------------------------------------


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
    standing = node._table.fleet.standings["n1/0"]
    low = standing.trust
    flight = node._flights.open[decision.id]
    for _ in range(60):
        node._flights._compare_hit(_redirected(flight, "n1/0"), standing, 1024, net.now)
    assert low < 0.2 < 0.99 < standing.trust <= 1.0


def _redirected(flight: Any, endpoint: str) -> Any:
    flight.weighed = flight.decision.candidate(endpoint)
    return flight


def test_a_part_of_a_predicted_hit_is_a_part_of_a_hit() -> None:
    net, node, tokens = three_holders()
    for _ in range(80):
        decision = node.route(tokens, net.now)
        cached = {"n1/0": 512, "n2/0": 900, "n3/0": 9999, "n0/0": 0}[decision.target]
        node.report(decision, Outcome.served(cached_tokens=cached), net.now)
    standings = node._table.fleet.standings
    assert 0.5 < standings["n1/0"].trust < 0.97
    assert standings["n2/0"].trust == pytest.approx(1.0)


def test_a_reply_without_a_count_says_nothing() -> None:
    net, node, tokens = three_holders()
    for _ in range(10):
        node.report(node.route(tokens, net.now), Outcome.served(), net.now)
    assert node._table.fleet.standings["n1/0"].trust == 1.0
    assert "predicted_tokens" not in node.counters


# --- everything at once -------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("seed", range(5))
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
            assert following is None or following in node._table.fleet.standings
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
            flights, standings = each._flights.open, each._table.fleet.standings
            booked = {ticket for standing in standings.values() for ticket in standing.ledger.open}
            assert booked <= set(flights), (seed, step)
    net.down.clear()
    for node, decision in decided:
        while node.report(decision, Outcome.failed(), net.now) is not None:
            pass
    for each in deciders:
        assert each.stats(net.now).in_flight == 0
        assert not any(len(standing.ledger) for standing in each._table.fleet.standings.values())
    net.run(12.0)
    check(net)
    for name in ("n1", "n2", "n3"):
        decision = net.nodes[name].route(prompt(1, 4), net.now, forwarded=True)
        assert decision.local
