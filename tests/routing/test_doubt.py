"""Doubt: misses in a row are believed quickly, misses by chance weigh as little as ever, and time forgives."""

from __future__ import annotations

import pytest
from routing import BLOCK, hold, mesh, prompt

from prefixroute import Outcome, PeerChanged
from prefixroute.routing.trust import MAX_DECLINES, Lateness, Misses


def after(shares: list[float]) -> float:
    misses, trust = Misses(), 1.0
    for second, share in enumerate(shares):
        trust += misses.weight(share, float(second)) * (share - trust)
    return trust


def test_misses_in_a_row_are_believed_in_five_and_single_ones_weigh_a_tenth() -> None:
    assert after([0.0]) == pytest.approx(0.9)
    assert after([0.0] * 5) < 0.12
    plain = 1.0
    for share in [0.0, 1.0, 1.0] * 20:
        plain += 0.1 * (share - plain)
    assert after([0.0, 1.0, 1.0] * 20) == pytest.approx(plain)
    assert after([0.5] * 20) == pytest.approx(0.5 + 0.5 * 0.9**20), "half a hit is no total miss"


@pytest.mark.parametrize(("in_row", "half_s"), [(1, 42), (2, 84), (5, 416), (50, 416)])
def test_a_doubt_is_forgiven_the_later_the_longer_it_was_earned(in_row: int, half_s: float) -> None:
    misses = Misses()
    for _ in range(in_row):
        misses.weight(0.0, 0.0)
    assert misses.forgiven(0.0, half_s) == pytest.approx(0.5, abs=0.01)
    step = Misses()
    for _ in range(in_row):
        step.weight(0.0, 0.0)
    trust = 0.0
    for second in range(1, 43):
        trust = step.forgiven(trust, half_s * second / 42)
    assert trust == pytest.approx(0.5, abs=0.01), "however often it is asked for"


def test_nothing_is_forgiven_where_nothing_is_doubted() -> None:
    misses = Misses()
    misses.weight(0.0, 0.0)
    misses.weight(0.8, 1.0)
    assert misses.forgiven(0.6, 1e6) == 0.6


def test_late_ones_in_a_row_weigh_more_and_fade_later_until_one_is_in_time() -> None:
    lateness = Lateness()
    assert [lateness.weight(1.0, 0.1) for _ in range(5)] == [0.2, 0.2, 0.4, 0.6, 0.6]
    assert lateness.fades_s == 240
    assert lateness.weight(0.15, 0.1) == 0.2
    assert lateness.fades_s == 30
    assert [lateness.weight(0.04, 0.001) for _ in range(5)] == [0.2] * 5, "no token is late by a few milliseconds"


def test_who_hands_back_what_it_could_serve_is_suspended_and_who_is_busy_is_not() -> None:
    net = mesh(2)
    node, tokens = net.nodes["n0"], prompt(1, 64)
    hold(net, "n1/0", tokens[: 64 * BLOCK])
    net.run(1.0)
    node.events()
    for _ in range(MAX_DECLINES + 1):
        decision = node.route(tokens, net.now)
        assert decision.target == "n1/0"
        node.report(decision, Outcome.declined(node.load("n0/0", net.now), 64 * BLOCK), net.now)
        net.run(0.3)
    assert [e.state for e in node.events() if isinstance(e, PeerChanged)] == ["suspended"]
    assert node.route(tokens, net.now).local
