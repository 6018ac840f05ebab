"""Peers that gossip and do not answer: how often they are tried, who serves instead, and how they come back.

Real nodes in virtual time, and clients of every patience; at a node with an engine of its own, and at a gateway.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from clients import BLOCKS, RATE, Clients, Request, engine, fleet, tails
from routing import BLOCK, prompt, suspended, three_holders

from prefixroute import Node, Outcome
from prefixroute.routing.trust import AT_ONCE, OVERDUE_S
from prefixroute.testing import Mesh

Hangs = Callable[[str, Request, float], bool]

GATEWAY = pytest.mark.parametrize("gateway", [False, True], ids=["node", "gateway"])
PATIENCE = pytest.mark.parametrize("patience_s", [0.2, 1.0, 5.0, 30.0, 300.0])
SLOW_RATE = (1.0, 200.0, 10, 10)
FAST_RATE = (10.0, 120.0, 60, 20)
"""Requests a second, for how long, over how many prefixes, and how many may go to who never answers."""


def dead(*endpoints: str, since: float = 0.0, until: float = 1e9) -> Hangs:
    return lambda endpoint, request, now: endpoint in endpoints and since <= now < until


def asked(
    gateway: bool, hangs: Hangs, patience_s: float, rate: tuple[float, float, int, int], **how: object
) -> Clients:
    """Clients that asked at this rate while `hangs`; n1 holds all prefixes, and so all that is known speaks for it."""
    per_s, seconds, prefixes, _ = rate
    net, origin = fleet(3, gateway=gateway, holders=["n1/0"], prefixes=prefixes)
    clients = Clients(net, origin, engine(net, hangs), patience_s, **how)  # type: ignore[arg-type]
    clients.run(seconds, per_s, tails(prefixes))
    clients.settle()
    origin._check()
    return clients


# --- a black hole -------------------------------------------------------------------------------------------


@GATEWAY
@PATIENCE
@pytest.mark.parametrize("rate", [SLOW_RATE, FAST_RATE], ids=["1/s", "10/s"])
def test_a_black_hole_is_tried_seldom_and_nobody_stays_unanswered(
    gateway: bool, patience_s: float, rate: tuple[float, float, int, int]
) -> None:
    clients = asked(gateway, dead("n1/0"), patience_s, rate)
    assert 3 <= len(clients.sent_to("n1")) <= rate[3]
    assert clients.unanswered == 0


@GATEWAY
@pytest.mark.parametrize("patience_s", [1.0, 300.0])
def test_one_that_dies_while_it_serves_is_found_out_as_soon(gateway: bool, patience_s: float) -> None:
    clients = asked(gateway, dead("n1/0", since=55.0), patience_s, (10.0, 170.0, 60, 20))
    served = [at for at in clients.sent_to("n1") if at < 55.0]
    assert len(served) > 400
    assert len(clients.sent_to("n1")) - len(served) <= FAST_RATE[3]
    assert clients.unanswered == 0


@GATEWAY
@pytest.mark.parametrize("patience_s", [1.0, 300.0])
def test_two_black_holes_of_three_leave_the_third(gateway: bool, patience_s: float) -> None:
    clients = asked(gateway, dead("n1/0", "n2/0"), patience_s, SLOW_RATE)
    for name in ("n1", "n2"):
        assert len([at for at in clients.sent_to(name) if at < 205.0]) <= SLOW_RATE[3]
    assert clients.unanswered == 0
    assert set(clients.shares) == {"n0/0"}


@GATEWAY
@pytest.mark.parametrize(("rate", "patience_s"), [(SLOW_RATE, 1.0), (FAST_RATE, 0.2)])
def test_clients_that_only_go_away_show_it_too(
    gateway: bool, rate: tuple[float, float, int, int], patience_s: float
) -> None:
    clients = asked(gateway, dead("n1/0"), patience_s, rate, gives_up=Outcome.cancelled)
    assert len(clients.sent_to("n1")) == clients.unanswered <= rate[3]


def test_who_never_reports_is_served_by_the_engine_beside() -> None:
    clients = asked(False, dead("n1/0"), 30.0, SLOW_RATE, reports="nothing")
    assert len(clients.sent_to("n1")) <= SLOW_RATE[3]
    assert clients.shares["n0/0"] > 150


@GATEWAY
@pytest.mark.parametrize("timeout_s", [0.5, 5.0, 60.0])
def test_an_attempt_that_expired_is_handed_on_when_its_caller_gives_up_after_all(
    gateway: bool, timeout_s: float
) -> None:
    net, origin = fleet(3, gateway=gateway, holders=["n1/0"], prefixes=10, outcome_timeout_s=timeout_s)
    clients = Clients(net, origin, engine(net, dead("n1/0")), 300.0)
    clients.run(200.0, 1.0, tails(10))
    clients.settle()
    assert len(clients.sent_to("n1")) <= SLOW_RATE[3]
    assert clients.unanswered == 0
    assert origin.counters["outcomes_missing"] > 0


@GATEWAY
@pytest.mark.parametrize("patience_s", [1.0, 30.0, 300.0])
def test_one_that_answers_again_gets_traffic_within_the_running_pause(gateway: bool, patience_s: float) -> None:
    back = 105.0
    clients = asked(gateway, dead("n1/0", until=back), patience_s, (1.0, 250.0, 250, 10))
    tried = clients.sent_to("n1")
    last, first = max(at for at in tried if at < back), min(at for at in tried if at >= back)
    assert first - last <= 60.0 + OVERDUE_S + 2.0, "the longest pause, from the moment at which the last trial failed"
    assert clients.changes("resumed") == ["n1"]
    # From then on it gets what it had before: it alone holds the prompts that are to come.
    assert len([at for at in tried if at > first + 10.0]) > 50
    assert clients.unanswered == 0


# --- half dead ----------------------------------------------------------------------------------------------


@GATEWAY
@pytest.mark.parametrize("patience_s", [5.0, 300.0])
def test_one_that_serves_short_prompts_and_hangs_on_long_ones_is_driven_out(gateway: bool, patience_s: float) -> None:
    def hangs(endpoint: str, request: Request, now: float) -> bool:
        return endpoint == "n1/0" and len(request.tokens) > (BLOCKS + 50) * BLOCK

    def mixed(n: int) -> list[int]:
        return [*prompt(n % 10, BLOCKS, 0), *prompt(10_000 + n, 2 if n % 3 else 300)]

    net, origin = fleet(3, gateway=gateway, holders=["n1/0"], prefixes=10)
    clients = Clients(net, origin, engine(net, hangs), patience_s)
    clients.run(200.0, 1.0, mixed)
    clients.settle()
    hung = [at for r in clients.requests for at, target in r.tries if hangs(target, r, at)]
    assert 3 <= len(hung) <= 10
    assert clients.shares["n1/0"] > 0
    assert clients.unanswered == 0


@GATEWAY
@pytest.mark.parametrize("patience_s", [1.0, 30.0])
def test_one_that_fails_every_second_time_is_driven_out(gateway: bool, patience_s: float) -> None:
    seen: list[int] = []

    def hangs(endpoint: str, request: Request, now: float) -> bool:
        if endpoint != "n1/0":
            return False
        seen.append(1)
        return len(seen) % 2 == 0

    clients = asked(gateway, hangs, patience_s, SLOW_RATE)
    assert len(seen) // 2 <= 10
    assert clients.unanswered == 0


def test_of_two_endpoints_of_a_peer_the_one_that_answers_goes_on() -> None:
    net, origin = fleet(2, gateway=True)
    extra = net.nodes["n1"].add_endpoint("1", url="http://n1/1", incarnation=1, now=net.now)
    net.run(1.0)
    clients = Clients(net, origin, engine(net, dead("n1/0")), 30.0)
    clients.run(100.0, 2.0, tails(20))
    clients.settle()
    assert len([1 for r in clients.requests for _, target in r.tries if target == "n1/0"]) <= 10
    assert clients.shares[extra] > 50
    assert clients.unanswered == 0


# --- slow is not dead ---------------------------------------------------------------------------------------


def slow(net: Mesh, times: float) -> Callable[[str, Request, float], float]:
    plain = engine(net, lambda *_: False)
    return lambda endpoint, request, now: plain(endpoint, request, now) * (times if endpoint == "n1/0" else 1.0)


@GATEWAY
@pytest.mark.parametrize("per_s", [1.0, 10.0])
@pytest.mark.parametrize("times", [4.0, 20.0])
def test_one_that_is_much_slower_than_it_says_is_not_suspended(gateway: bool, per_s: float, times: float) -> None:
    net, origin = fleet(3, gateway=gateway, holders=["n1/0"], prefixes=10)
    clients = Clients(net, origin, slow(net, times), 300.0)
    clients.run(60.0, per_s, tails(10))
    clients.settle()
    assert clients.changes("suspended") == []
    assert clients.shares["n1/0"] > 30


@pytest.mark.parametrize("reports", ["tokens", "whole"])
def test_one_that_was_taken_for_dead_and_answers_is_taken_back_and_given_its_time(reports: str) -> None:
    net, origin = fleet(2, gateway=True, holders=["n1/0"])
    clients = Clients(net, origin, lambda endpoint, request, now: 10.0, 300.0, reports=reports)
    tokens = prompt(0, BLOCKS)
    for n in range(5):
        clients.until(net.now + 20.0)
        clients.ask([*tokens[:-1], n])
        assert clients.requests[-1].target == "n1/0"
    clients.settle()
    assert clients.changes("suspended") == clients.changes("resumed") == ["n1"], "once"
    assert clients.shares == {"n1/0": 5}


def test_a_caller_that_reports_whole_answers_suspends_nobody_once_it_is_known() -> None:
    net, origin = fleet(3, gateway=False, holders=["n1/0"], prefixes=10)
    clients = Clients(net, origin, engine(net, lambda *_: False), 300.0, reports="whole", answer_s=20.0)
    clients.run(60.0, 1.0, tails(10))
    clients.events.clear()
    clients.run(140.0, 1.0, tails(10))
    assert clients.changes("suspended") == []
    assert clients.shares["n1/0"] > 10


# --- one at a time ------------------------------------------------------------------------------------------


def holders() -> tuple[Mesh, Node, list[int]]:
    net, node, tokens = three_holders()
    node._table.fleet._check()
    return net, node, tokens


def row(node: Node, endpoint: str, now: float) -> tuple[bool, int]:
    found = next(row for row in node.stats(now).endpoints if row.endpoint == endpoint)
    return found.usable, found.queue


def test_no_more_than_a_few_wait_for_a_late_first_token() -> None:
    net, node, tokens = holders()
    sent = []
    while len(sent) < 30:
        sent.append(node.route(tokens, net.now).target)
        net.run(0.05)
    early = round(0.3 / 0.05)
    assert AT_ONCE <= sent.count("n1/0") <= AT_ONCE + early
    assert suspended(node) == [], "that costs it no trust yet"


def test_a_first_token_that_is_overdue_suspends_without_any_report_and_a_late_one_takes_it_back() -> None:
    net, node, tokens = holders()
    decision = node.route(tokens, net.now)
    assert decision.target == "n1/0"
    net.run(OVERDUE_S - 0.1)
    assert suspended(node) == []
    net.run(0.2)
    assert suspended(node) == ["n1"]
    assert row(node, "n1/0", net.now) == (False, 1), "the booking stays"
    assert node.counters["overdue"] == 1
    node.first_token(decision, net.now)
    assert row(node, "n1/0", net.now) == (True, 0)
    assert [event.state for event in node.events() if hasattr(event, "state")] == ["resumed"]  # type: ignore[union-attr]


def test_the_next_decision_judges_too() -> None:
    net, node, tokens = holders()
    assert node.route(tokens, net.now).target == "n1/0"
    assert node.route(tokens, net.now + 2 * OVERDUE_S).target != "n1/0"
    assert suspended(node) == ["n1"]


def test_a_late_success_after_the_suspension_takes_it_back() -> None:
    net, node, tokens = holders()
    decision = node.route(tokens, net.now)
    net.run(30.0)
    assert suspended(node) == ["n1"]
    node.report(decision, Outcome.served(), net.now, endpoint="n1/0")
    assert row(node, "n1/0", net.now) == (True, 0)
    assert node._table.fleet.standings["n1/0"].suspension.failures == 0


def test_even_a_success_after_its_time_ran_out_does() -> None:
    net, node, tokens = holders()
    decision = node.route(tokens, net.now)
    net.run(130.0)
    assert suspended(node) == ["n1"]
    assert node.report(decision, Outcome.served(), net.now) is None
    assert node.counters["outcomes_late"] == 1
    assert node._table.fleet.standings["n1/0"].suspension.failures == 0


def test_a_trial_is_alone_until_it_ends() -> None:
    net, node, tokens = holders()
    node.report(node.route(tokens, net.now), Outcome.failed(), net.now)
    net.run(1.2)
    trial = node.route(tokens, net.now)
    assert trial.target == "n1/0"
    for _ in range(25):
        other = node.route(tokens, net.now)
        assert other.target != "n1/0"
        node.report(other, Outcome.cancelled(), net.now)
        net.run(0.1)
    node.report(trial, Outcome.served(), net.now)
    two = [node.route(tokens, net.now).target for _ in range(4)]
    assert two[:2] == ["n1/0"] * 2
    assert "n1/0" not in two[2:], "then two at a time"


def test_a_stream_that_breaks_off_after_its_first_token_is_no_answer_that_counts_for_long() -> None:
    net, node, tokens = holders()
    tried = 0
    for _ in range(200):
        decision = node.route(tokens, net.now)
        if decision.target == "n1/0":
            tried += 1
            node.first_token(decision, net.now)
            node.report(decision, Outcome.failed("reset"), net.now)
        node.report(decision, Outcome.cancelled(), net.now)
        net.run(1.0)
    assert tried <= 12


def test_work_is_expected_to_be_quick_at_the_rate_of_these_engines() -> None:
    """What the figures above rest on: a prompt that is not held takes less than a client's least patience."""
    assert (BLOCKS + 3) * BLOCK / RATE + 0.01 < 0.1
