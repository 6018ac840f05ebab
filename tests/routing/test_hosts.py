"""What hosts use: endpoints that they offer, who served instead, why somebody was not chosen, and all fallbacks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from routing import BUSY, DRAINING, IDLE, LONG, check, hold, load, mesh, new, prompt, suspended, three_holders

from prefixroute import (
    Decision,
    LoadReport,
    Node,
    NodeSettings,
    NoEndpointError,
    Outcome,
    UsageError,
    Veto,
    ZoneRule,
    Zones,
)
from prefixroute.testing import Mesh


def gateway_of(n: int, **more: Any) -> tuple[Mesh, Node]:
    net = mesh(n)
    gateway = net.add(new("gw", **more))
    net.run(1.0)
    gateway.events()
    return net, gateway


def row(node: Node, endpoint: str, now: float) -> Any:
    return next(row for row in node.stats(now).endpoints if row.endpoint == endpoint)


def vetoed(node: Node, decision: Decision) -> dict[str, str]:
    return {veto.endpoint: veto.why for veto in node.explain(decision).vetoed}


def walk(node: Node, decision: Decision, now: float) -> list[str]:
    tried = [decision.target]
    while (name := node.report(decision, Outcome.failed(), now)) is not None:
        tried.append(name)
    return tried


# --- fallbacks ----------------------------------------------------------------------------------------------


def test_overloaded_endpoints_are_a_gateways_fallbacks() -> None:
    net, gateway = gateway_of(3)
    load(net, "n1/0", BUSY)
    load(net, "n2/0", BUSY)
    net.run(0.5)
    decision = gateway.route(prompt(1, 4), net.now)
    assert decision.target == "n0/0"
    assert sorted(decision.fallbacks) == ["n1/0", "n2/0"]
    assert vetoed(gateway, decision) == {"n1/0": "overloaded: queue of 5.0 s", "n2/0": "overloaded: queue of 5.0 s"}
    assert sorted(walk(gateway, decision, net.now)) == ["n0/0", "n1/0", "n2/0"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_endpoint_that_lives_is_tried_before_a_gateway_gives_up(ranks: int) -> None:
    net = mesh(4, ranks=ranks)
    gateway = net.add(new("gw"))
    net.run(1.0)
    decision = gateway.route(prompt(1, 4), net.now)
    tried = walk(gateway, decision, net.now)
    assert sorted(tried) == sorted(f"n{i}/{rank}" for i in range(4) for rank in range(ranks)), "each once"
    check(net)


def test_after_its_own_engine_a_node_tries_everybody_else_who_lives() -> None:
    net = mesh(6)
    node = net.nodes["n0"]
    load(net, "n3/0", DRAINING)
    net.down.add("n4")
    net.run(5.0)
    decision = node.route(prompt(1, 4), net.now)
    tried = walk(node, decision, net.now)
    assert sorted(tried[:-2]) == ["n0/0", "n1/0", "n2/0", "n5/0"]
    assert tried[-2:] == ["n3/0", "n4/0"], "the one that refuses, then the one that is not heard"


def test_the_own_engine_comes_before_those_who_are_in_doubt() -> None:
    net, node, tokens = three_holders()
    load(net, "n0/0", DRAINING)
    for name in ("n1", "n2", "n3"):
        decision = node.route(tokens, net.now)
        assert decision.target == f"{name}/0"
        node.report(decision, Outcome.failed(), net.now)
        node.report(decision, Outcome.cancelled(), net.now)
    decision = node.route(tokens, net.now)
    assert decision.target == "n0/0"


def test_what_was_forwarded_here_falls_back_on_own_endpoints_alone() -> None:
    net = mesh(3, ranks=2)
    decision = net.nodes["n0"].route(prompt(1, 4), net.now, forwarded=True)
    assert sorted(walk(net.nodes["n0"], decision, net.now)) == ["n0/0", "n0/1"]


def test_a_gateway_in_need_prefers_who_failed_least_and_still_who_holds_most() -> None:
    net, gateway = gateway_of(3)
    tokens = prompt(1, LONG)
    hold(net, "n1/0", tokens)
    net.run(1.0)
    for name in ("n0/0", "n1/0", "n2/0"):
        standing = gateway._table.fleet.standings[name]
        standing.suspension.failed(net.now, net.now)
        if name == "n0/0":
            standing.suspension.failed(net.now + 0.1, net.now + 0.1)
    gateway._table.fleet.refresh_all(net.now)
    decision = gateway.route(tokens, net.now)
    assert (decision.target, decision.matched_tokens) == ("n1/0", LONG * 16)
    assert [c.endpoint for c in decision.candidates if c.endpoint == "n0/0"] == []


# --- bookings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_gateway", [False, True])
def test_a_booking_stays_while_its_endpoint_is_forgotten_and_comes_back(with_gateway: bool) -> None:
    net = mesh(2)
    node = net.add(new("gw")) if with_gateway else net.nodes["n0"]
    tokens = prompt(1, LONG)
    hold(net, "n1/0", tokens)
    net.run(1.0)
    decision = node.route(tokens, net.now)
    assert decision.target == "n1/0"
    net.down.add("n1")
    net.run(62.0)
    assert "n1/0" not in {row.endpoint for row in node.stats(net.now).endpoints}
    net.down.clear()
    net.run(2.0)
    assert row(node, "n1/0", net.now).queue == 1
    assert not node._table.fleet.standings["n1/0"].suspension.blocks(net.now)
    assert node._table.fleet.standings["n1/0"].suspension.on_trial, "and it is known that it failed"
    if with_gateway:
        node.report(decision, Outcome.served(), net.now)
        assert row(node, "n1/0", net.now).queue == 0
    else:
        net.run(60.0)
        assert row(node, "n1/0", net.now).queue == 0, "it has expired"
        assert node.stats(net.now).in_flight == 0
    check(net)


def test_an_outcome_while_its_endpoint_is_away_releases_the_booking() -> None:
    net = mesh(2)
    node, tokens = net.nodes["n0"], prompt(1, LONG)
    hold(net, "n1/0", tokens)
    net.run(1.0)
    decision = node.route(tokens, net.now)
    node.remove_peer("n1", net.now)
    assert node.report(decision, Outcome.failed(), net.now) == "n0/0"
    node.add_peer("n1", "n1", net.now)
    net.run(2.0)
    assert (row(node, "n1/0", net.now).queue, row(node, "n0/0", net.now).queue) == (0, 1)
    node._check()


# --- among --------------------------------------------------------------------------------------------------


def test_only_those_that_are_offered_are_chosen_and_fall_back() -> None:
    net, node, tokens = three_holders()
    decision = node.route(tokens, net.now, among=["n3/0", "n2/0"])
    assert decision.target == "n2/0"
    assert {c.endpoint for c in decision.candidates} == {"n2/0", "n3/0"}
    assert vetoed(node, decision) == {"n0/0": "not offered", "n1/0": "not offered"}
    assert walk(node, decision, net.now) == ["n2/0", "n3/0"]
    # Both are suspended by now: the choice stays with the host.
    assert node.route(tokens, net.now, among=("n2/0", "n3/0")).target in ("n2/0", "n3/0")
    assert node.route(tokens, net.now, among={"n0/0"}).local
    assert node.route(tokens, net.now).target == "n1/0"
    node._check()


def test_a_prompt_that_is_handed_back_stays_among_those_that_are_offered() -> None:
    net, node, tokens = three_holders()
    decision = node.route(tokens, net.now, among=["n1/0", "n3/0"])
    assert node.report(decision, Outcome.declined(IDLE, 1024), net.now) == "n3/0"
    assert node.report(decision, Outcome.failed(), net.now) is None


def test_endpoints_that_are_not_known_are_passed_over_and_none_at_all_is_an_error_of_its_own() -> None:
    net, node, tokens = three_holders()
    assert node.route(tokens, net.now, among=["n2/0", "n9/0", ""]).target == "n2/0"
    for among in ([], ["n9/0"], (name for name in ("n8/0", "n9/0"))):
        with pytest.raises(NoEndpointError, match="none of the endpoints that were offered is known"):
            node.route(tokens, net.now, among=among)
    assert node.stats(net.now).in_flight == 1


@pytest.mark.parametrize("wrong", ["n1/0", b"n1/0", 5, [["n1/0"]], object()])
def test_what_is_no_list_of_ids_is_refused(wrong: Any) -> None:
    _, node, tokens = three_holders()
    with pytest.raises(UsageError, match="among is a list of endpoints by id"):
        node.route(tokens, 100.0, among=wrong)


def test_a_forwarded_prompt_may_be_kept_from_some_own_endpoints() -> None:
    net = mesh(2, ranks=2)
    node = net.nodes["n0"]
    decision = node.route(prompt(1, 4), net.now, forwarded=True, among=["n0/1", "n1/0"])
    assert (decision.target, decision.fallbacks) == ("n0/1", ())
    with pytest.raises(NoEndpointError, match="no endpoint of its own that was offered"):
        node.route(prompt(1, 4), net.now, forwarded=True, among=["n1/0"])


def test_nobody_to_route_to_is_an_error_that_old_code_catches_too() -> None:
    gateway = new("gw")
    with pytest.raises(NoEndpointError, match="no endpoint is known") as raised:
        gateway.route(prompt(1, 4), 0.0)
    assert isinstance(raised.value, UsageError)
    assert isinstance(raised.value, ValueError)
    with pytest.raises(NoEndpointError):
        gateway.route(prompt(1, 4), 0.0, forwarded=True)
    with pytest.raises(UsageError) as other:
        gateway.route("text", 0.0)
    assert not isinstance(other.value, NoEndpointError)


# --- served_by ----------------------------------------------------------------------------------------------


def test_who_served_instead_is_learnt_of_and_the_target_is_neither_praised_nor_blamed() -> None:
    net, node, tokens = three_holders()
    decision = node.route(tokens, net.now)
    assert decision.target == "n1/0"
    net.run(1.0)
    before = row(node, "n1/0", net.now)
    busy = LoadReport(queued_tokens=3000, prefill_tokens_per_s=1000, overhead_s=0.01)
    outcome = Outcome.served(cached_tokens=768, ttft_s=0.3, load=busy)
    assert node.report(decision, outcome, net.now, served_by="n2/0") is None
    after = row(node, "n1/0", net.now)
    assert (after.queue, after.confidence, after.accuracy) == (0, before.confidence, before.accuracy)
    served = row(node, "n2/0", net.now)
    assert (served.queue, served.queued_tokens, served.accuracy.exact) == (0, 3000, 1)
    assert node.counters["elsewhere"] == node.counters["outcomes_served"] == 1
    assert node.stats(net.now).in_flight == 0
    # It holds the whole prompt now, though its digest does not say so yet.
    weighed = node.route(tokens, net.now).candidate("n2/0")
    assert weighed is not None
    assert (weighed.depth, weighed.predicted) == (64, True)


def test_one_that_was_not_weighed_is_not_compared_with_anything() -> None:
    net = mesh(8)
    node, tokens = net.nodes["n0"], prompt(1, 64)
    decision = node.route(tokens, net.now, tenant="t")
    other = next(f"n{i}/0" for i in range(1, 8) if decision.candidate(f"n{i}/0") is None)
    hold(net, other, tokens)
    net.run(1.0)
    node.report(decision, Outcome.served(cached_tokens=16, ttft_s=1.0), net.now, served_by=other)
    found = row(node, other, net.now)
    assert found.accuracy.compared == 0
    assert node._table.fleet.standings[other].trust == 1.0
    (tenant,) = node.stats(net.now).tenants
    assert (tenant.prefill_local_tokens, tenant.prefill_forwarded_tokens) == (0, 1009)


def test_an_own_engine_that_served_instead_teaches_its_rate() -> None:
    net, node, tokens = three_holders()
    for _ in range(6):
        decision = node.route(tokens, net.now)
        node.report(decision, Outcome.served(cached_tokens=0, ttft_s=0.5), net.now, served_by="n0/0")
    assert row(node, "n0/0", net.now).prefill_tokens_per_s > 1500
    assert row(node, "n0/0", net.now).queue == 0
    check(net)


def test_a_failure_elsewhere_is_blamed_there_and_the_request_goes_on() -> None:
    net, node, tokens = three_holders()
    decision = node.route(tokens, net.now)
    assert node.report(decision, Outcome.failed("reset"), net.now, served_by="n2/0") == "n3/0"
    assert suspended(node) == ["n2"]
    assert row(node, "n1/0", net.now).usable


@pytest.mark.parametrize("where", ["n9/0", "", "elsewhere"])
def test_served_where_nobody_is_known_ends_the_request_and_says_nothing(where: str) -> None:
    net, node, tokens = three_holders()
    decision = node.route(tokens, net.now)
    assert node.report(decision, Outcome.failed(), net.now, served_by=where) is None
    assert (node.stats(net.now).in_flight, row(node, "n1/0", net.now).queue) == (0, 0)
    assert suspended(node) == []
    assert node.report(decision, Outcome.served(), net.now) is None
    assert node.counters["outcomes_late"] == 1


def test_one_on_trial_that_got_nothing_stays_on_trial() -> None:
    net, node, tokens = three_holders()
    node.report(node.route(tokens, net.now), Outcome.failed(), net.now)
    net.run(1.2)
    trial = node.route(tokens, net.now)
    assert trial.target == "n1/0"
    node.report(trial, Outcome.served(), net.now, served_by="n2/0")
    assert node.route(tokens, net.now).target == "n1/0", "another trial may go out"
    assert node._table.fleet.standings["n1/0"].suspension.failures == 1


# --- why not ------------------------------------------------------------------------------------------------


def test_an_explanation_lists_who_was_vetoed_and_why() -> None:
    net = mesh(6)
    node, tokens = net.nodes["n0"], prompt(1, LONG)
    hold(net, "n1/0", tokens)
    net.down.add("n4")
    net.run(5.0)
    load(net, "n2/0", DRAINING)
    load(net, "n3/0", BUSY)
    decision = node.route(tokens, net.now)
    assert decision.target == "n1/0"
    node.report(decision, Outcome.failed("connection refused"), net.now)
    node.report(decision, Outcome.cancelled(), net.now)
    net.run(0.5)
    found = node.explain(node.route(tokens, net.now))
    why = dict(found.vetoed)
    assert why == {
        "n1/0": "suspended: connection refused",
        "n2/0": "refusing: draining",
        "n3/0": "overloaded: queue of 5.0 s",
        "n4/0": "unheard: no word of its owner lately",
    }
    assert json.loads(json.dumps(found.to_dict()))["vetoed"] == [{"endpoint": e, "why": w} for e, w in found.vetoed]
    for endpoint, reason in found.vetoed:
        assert any(endpoint in line and reason in line for line in found.text().splitlines())


def test_it_names_one_hop_zones_and_late_ones_too() -> None:
    net, node, tokens = three_holders()
    here = node.route(tokens, net.now, forwarded=True)
    assert set(vetoed(node, here).values()) == {"the request was forwarded here: one hop"}
    for _ in range(12):
        node.route(tokens, net.now)
        net.run(0.1)
    assert vetoed(node, node.route(tokens, net.now))["n1/0"] == "late: forwards wait for a first token"
    zoned = mesh(2)
    far = NodeSettings(zone="a", zones=Zones({("a", "*"): ZoneRule("never")}), datagram_bytes=60_000)
    strict = zoned.add(new("gw", settings=far))
    zoned.run(1.0)
    strict.add_endpoint("0", url="http://gw", incarnation=1, now=zoned.now)
    assert set(vetoed(strict, strict.route(tokens, zoned.now)).values()) == {"a rule for zones: never"}


def test_nobody_is_vetoed_where_all_is_well_and_a_long_list_is_cut_in_text() -> None:
    net = mesh(24)
    node = net.nodes["n0"]
    assert node.explain(node.route(prompt(1, 4), net.now)).vetoed == ()
    found = node.explain(node.route(prompt(1, 4), net.now, among=["n0/0"]))
    assert len(found.vetoed) == 23
    assert found.vetoed[0] == Veto("n1/0", "not offered"), "by name"
    assert found.text().endswith("- and 7 more")


# --- stats --------------------------------------------------------------------------------------------------


def test_rows_tell_the_load_of_each_endpoint_as_it_told_it() -> None:
    net = mesh(2)
    told = LoadReport(
        running=3,
        waiting=2,
        queued_tokens=900,
        prefill_tokens_per_s=1000,
        overhead_s=0.01,
        kv_used=0.5,
        capacity_tokens=64_000,
    )
    load(net, "n1/0", told)
    net.run(1.0)
    for node in net.nodes.values():
        found = row(node, "n1/0", net.now)
        assert (found.running, found.waiting, found.queued_tokens) == (3, 2, 900)
        assert (found.kv_used, found.capacity_tokens) == (pytest.approx(0.5, abs=0.01), 64_000)
        assert found.prefill_tokens_per_s == pytest.approx(1000, rel=0.01)
        assert found.queue == 0
    node = net.nodes["n0"]
    decision = node.route(prompt(1, 4), net.now)
    assert row(node, decision.target, net.now).queue == 1
    node.first_token(decision, net.now)
    assert row(node, decision.target, net.now).queue == 0
