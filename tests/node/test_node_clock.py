"""Readings of the caller's clock: none harms a node, whatever it is and wherever it comes in."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from routing import DOMAIN, IDLE, mesh, new, pair, prompt

from prefixroute import ClockJumped, EngineBatch, LoadReport, Node, Outcome, UsageError
from prefixroute.events import Journal
from prefixroute.node_clock import FAR_S, FAR_STAYS_S, LIMIT_S, STAYS_S, NodeClock
from prefixroute.testing import Mesh, stored

BOOT, WALL = 86_000.0, 1.76e9
"""What time.monotonic() and time.time() may read."""

HOUR = 3600.0


def own(now: float = BOOT) -> Node:
    node = Node("a", DOMAIN, rng=random.Random(1), now=now)
    node.add_endpoint("0", incarnation=1, now=now)
    node.set_load("a/0", IDLE, now)
    node.add_peer("b", "b", now)
    return node


CALLS: dict[str, Callable[[Node, float], Any]] = {
    "route": lambda node, now: node.route(prompt(1, 2), now),
    "first_token": lambda node, now: node.first_token(DECISION, now),
    "report": lambda node, now: node.report(DECISION, Outcome.served(), now),
    "apply": lambda node, now: node.apply("a/0", stored(prompt(1, 2)), now),
    "set_load": lambda node, now: node.set_load("a/0", LoadReport(), now),
    "load": lambda node, now: node.load("a/0", now),
    "go_by_history": lambda node, now: node.go_by_history("a/0", "why", now),
    "handle_timer": lambda node, now: node.handle_timer(now),
    "receive_datagram": lambda node, now: node.receive_datagram(b"junk", "x", now),
    "screen": lambda node, now: node.screen(b"junk", "x", now),
    "datagrams_to_send": lambda node, now: node.datagrams_to_send(now),
    "add_endpoint": lambda node, now: node.add_endpoint("1", incarnation=1, now=now),
    "remove_endpoint": lambda node, now: node.remove_endpoint("a/0", now),
    "add_peer": lambda node, now: node.add_peer("c", "c", now),
    "remove_peer": lambda node, now: node.remove_peer("b", now),
    "leave": lambda node, now: node.leave(now),
    "stats": lambda node, now: node.stats(now),
}
DECISION = own().route(prompt(1, 2), BOOT)
NO_READINGS = [float("nan"), float("inf"), -float("inf"), None, "5", b"5", [1.0], 1j, 10**400, {}, np.array([1.0, 2.0])]


@pytest.mark.parametrize("now", NO_READINGS, ids=repr)
@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_reading_is_refused_and_does_no_harm(call: str, now: Any) -> None:
    node = own()
    with pytest.raises(UsageError, match="must be a clock reading in seconds"):
        CALLS[call](node, now)
    assert node.route(prompt(1, 2), BOOT + 1).target == "a/0"
    assert node.stats(BOOT + 1).peers == {"b": node.stats(BOOT + 1).peers["b"]}
    node._check()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("begun", "wrong"), [(BOOT, WALL), (WALL, BOOT), (BOOT, 1000 * BOOT), (BOOT, 1e9 * BOOT), (WALL, 1000 * WALL)]
)
def test_a_reading_of_another_clock_is_refused_and_the_right_one_goes_on(call: str, begun: float, wrong: float) -> None:
    node = own(begun)
    for i in range(5):
        with pytest.raises(UsageError, match=r"of one clock|smaller unit"):
            CALLS[call](node, wrong + i)
        node.handle_timer(begun + i)
        assert node.route(prompt(1, 2), begun + i).target == "a/0"
    assert not any(row.age_s < 0 for row in node.stats(begun + 9).endpoints)
    node._check()


@pytest.mark.parametrize("wrong", [1000 * WALL, 1e9 * WALL, 1e9 * BOOT, -LIMIT_S, float("nan"), None])
def test_a_node_is_not_made_with_another_unit(wrong: Any) -> None:
    with pytest.raises(UsageError, match="seconds"):
        own(wrong)


def test_the_second_call_may_be_the_mistaken_one() -> None:
    node = Node("a", DOMAIN, rng=random.Random(1), now=BOOT)
    with pytest.raises(UsageError, match="seconds of one clock"):
        node.add_endpoint("0", incarnation=1, now=WALL)
    node.add_endpoint("0", incarnation=1, now=BOOT + 0.1)
    assert node.route(prompt(1, 2), BOOT + 0.2).local


def test_the_message_tells_both_readings() -> None:
    node = own()
    with pytest.raises(UsageError, match=r"now=1760000000\.0 is .* after the last one: this node's clock was at 86000"):
        node.route([1], WALL)
    assert node.counters["clock_refused"] == 1
    assert [event.by_s for event in node.events() if isinstance(event, ClockJumped)] == [WALL - BOOT]


@pytest.mark.parametrize("slept_s", [60.0, 8 * HOUR, 3 * 86_400.0, 0.9 * FAR_S])
def test_a_long_sleep_is_no_mistake(slept_s: float) -> None:
    net, a, _ = pair()
    net.now += slept_s
    net.run(2.0)
    assert a.route(prompt(1, 2), net.now).target in ("a/0", "b/0")
    assert {row.endpoint for row in a.stats(net.now).endpoints if row.usable} == {"a/0", "b/0"}
    told = [event for event in a.events() if isinstance(event, ClockJumped)]
    assert len(told) == (slept_s > 86_400)


def test_a_clock_that_was_set_by_years_is_refused_for_a_minute_and_then_taken() -> None:
    """A board without a battery begins in 1970, and learns the date from the network."""
    node = own(5.0)
    refused = 0
    for i in range(200):
        try:
            node.handle_timer(WALL + 0.5 * i)
        except UsageError:
            refused += 1
    assert refused == pytest.approx(2 * FAR_STAYS_S, abs=2)
    rounds = node.counters["rounds"]
    node.handle_timer(WALL + 101.0)
    assert node.counters["rounds"] == rounds + 1
    assert node.stats(WALL + 101.0).endpoints[0].age_s < 1


# --- back --------------------------------------------------------------------------------------------------


def fleet(n: int = 3) -> Mesh:
    net = mesh(n)
    for name in net.nodes:
        net.nodes[name].apply(f"{name}/0", stored(prompt(ord(name[-1]), 4)), net.now)
    net.run(2.0)
    return net


@pytest.mark.parametrize("back_s", [0.01, 5.0, HOUR, 30 * 86_400.0])
@pytest.mark.parametrize("who", ["all", "one"])
def test_a_clock_that_is_set_back_costs_a_second_at_most(back_s: float, who: str) -> None:
    """Nothing is ever younger than it is, every node stays a candidate, and changes still reach the others."""
    net = fleet()
    nodes = list(net.nodes.values())
    late = dict.fromkeys(net.nodes, 0.0)

    def step(seconds: float) -> None:
        """As `Mesh.run`, but each node has a clock of its own."""
        end = net.now + seconds
        while net.now < end:
            for node in nodes:
                now = net.now - late[node.node]
                for address, data in node.datagrams_to_send(now):
                    net.nodes[str(address)].receive_datagram(data, node.node, net.now - late[str(address)])
                if node.next_timer() <= now:
                    node.handle_timer(now)
            for node in nodes:
                assert all(row.age_s >= 0 for row in node.stats(net.now - late[node.node]).endpoints)
            net.now += 0.02

    step(1.0)
    for name in net.nodes if who == "all" else ["n0"]:
        late[name] = back_s
    for _ in range(4):
        step(0.5)
        for node in nodes:
            usable = {row.endpoint for row in node.stats(net.now - late[node.node]).endpoints if row.usable}
            assert usable == {"n0/0", "n1/0", "n2/0"}
    held = prompt(77, 40)
    nodes[0].apply("n0/0", stored(held), net.now - late["n0"])
    step(1.5)
    assert nodes[1].route(held, net.now - late["n1"]).target == "n0/0"
    assert (nodes[0].counters["clock_behind"] > 0) == (back_s > 0.02)
    told = [event for event in nodes[0].events() if isinstance(event, ClockJumped)]
    assert len(told) == (back_s > 1), "once"
    for node in nodes:
        node._check()


def test_old_readings_of_a_handler_stop_nothing_and_do_not_move_the_clock() -> None:
    """A server that read the clock before it awaited: time stands still for that call."""
    net = fleet()
    node = net.nodes["n0"]
    for _ in range(40):
        net.run(0.25)
        decision = node.route(prompt(5, 3), net.now - 5.0)
        node.report(decision, Outcome.served(0, 0.01), net.now - 4.0)
    assert node.counters["clock_behind"] == 80
    assert node.counters["clock_sets"] == 0
    assert {row.endpoint for row in node.stats(net.now).endpoints if row.usable} == {"n0/0", "n1/0", "n2/0"}
    assert all(row.age_s < 1.5 for row in node.stats(net.now).endpoints)
    assert len([event for event in node.events() if isinstance(event, ClockJumped)]) == 1


def test_time_and_back_again_is_told_once_a_minute() -> None:
    node = own()
    for i in range(300):
        node.handle_timer(BOOT + i)
        node.stats(BOOT + i - 20.0)
    told = [event for event in node.events() if isinstance(event, ClockJumped)]
    assert 4 <= len(told) <= 6
    assert node.counters["clock_behind"] == 300


@pytest.mark.parametrize("seed", range(10))
def test_a_timer_that_is_handled_when_it_is_due_is_done_whatever_the_clock_was_set_by(seed: int) -> None:
    """The reading at which it is due is rounded up: rounded down the caller would be told again and again."""
    rng = random.Random(seed)
    node, now = own(), BOOT
    for _ in range(6):
        now -= rng.uniform(0.5, 5000.0)
        for _ in range(40):
            node.handle_timer(now)
            due = node.next_timer()
            assert due > now
            now = due
    assert node.counters["clock_sets"] == 6


# --- the clock alone -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_node_time_never_goes_back_whatever_is_read(seed: int) -> None:
    rng = random.Random(seed)
    clock, reading, last = NodeClock(1000.0, Journal()), 1000.0, 0.0
    for _ in range(500):
        timer = rng.random() < 0.5
        reading += rng.choice((0.0, 0.01, 1.0, 30.0, -0.5, -3.0, -HOUR, HOUR, 1e8, -1e8, FAR_S))
        try:
            at = clock.read(reading, timer)
        except UsageError:
            continue
        assert at >= last
        assert not timer or clock.reading_of(at) <= reading + STAYS_S
        last = at
    for i in range(200):
        try:
            at = clock.read(reading + i, True)
        except UsageError:
            assert i <= FAR_STAYS_S
    assert clock.read(reading + 200.5, True) == pytest.approx(at + 1.5), "it follows whatever it was set to"


def test_ints_and_numpys_floats_are_readings() -> None:
    node = own(86_000)
    node.handle_timer(np.float64(86_001.5))
    node.handle_timer(86_002)
    node.handle_timer(np.float32(86_003))  # type: ignore[arg-type]
    assert node.route(prompt(1, 2), 86_004).local
    node.apply("a/0", EngineBatch(()), 86_004)


def test_a_gateway_without_endpoints_has_the_same_clock() -> None:
    node = new("g")
    with pytest.raises(UsageError, match="seconds of one clock"):
        node.handle_timer(WALL)
    node.handle_timer(1.0)
    node._check()
