"""Predicted hits against the engine's own count, endpoint by endpoint."""

from __future__ import annotations

import pytest
from routing import BLOCK, hold, mesh, prompt, three_holders

from prefixroute import Accuracy, LongestMatch, Node, Outcome
from prefixroute.testing import Mesh


def accuracy(net: Mesh, node: Node, endpoint: str) -> Accuracy:
    return next(row.accuracy for row in node.stats(net.now).endpoints if row.endpoint == endpoint)


@pytest.mark.parametrize(
    ("predicted", "cached", "expected"),
    [
        (64, 64, Accuracy(exact=1, predicted_tokens=64, cached_tokens=64)),
        (0, 0, Accuracy(exact=1)),
        (64, 32, Accuracy(near=1, predicted_tokens=64, cached_tokens=32, most_over=32)),
        (32, 64, Accuracy(near=1, predicted_tokens=32, cached_tokens=64)),
        (96, 32, Accuracy(high=1, predicted_tokens=96, cached_tokens=32, most_over=64)),
        (0, 33, Accuracy(low=1, cached_tokens=33)),
    ],
)
def test_a_request_is_one_of_four(predicted: int, cached: int, expected: Accuracy) -> None:
    assert Accuracy().and_one(predicted, cached, 32) == expected
    assert expected.compared == 1


def test_the_largest_over_estimate_stays() -> None:
    one = Accuracy().and_one(96, 0, 16).and_one(32, 16, 16).and_one(0, 512, 16)
    assert one == Accuracy(near=1, high=1, low=1, predicted_tokens=128, cached_tokens=528, most_over=96)
    assert one.compared == 3


def test_what_a_forward_was_predicted_counts_at_its_target_and_what_is_served_here_at_home() -> None:
    net = mesh(2, policy=LongestMatch())
    node, tokens = net.nodes["n0"], prompt(1, 8)
    hold(net, "n1/0", tokens)
    net.run(1.0)
    decision = node.route(tokens, net.now)
    assert (decision.target, decision.matched_tokens) == ("n1/0", 128)
    node.report(decision, Outcome.served(cached_tokens=112), net.now)
    there = net.nodes["n1"].route(tokens, net.now, forwarded=True)
    net.nodes["n1"].report(there, Outcome.served(cached_tokens=112), net.now)
    near = Accuracy(near=1, predicted_tokens=128, cached_tokens=112, most_over=16)
    assert accuracy(net, node, "n1/0") == accuracy(net, net.nodes["n1"], "n1/0") == near
    hold(net, "n0/0", tokens)
    decision = node.route(tokens, net.now)
    assert decision.local
    node.report(decision, Outcome.served(cached_tokens=128), net.now)
    assert accuracy(net, node, "n0/0") == Accuracy(exact=1, predicted_tokens=128, cached_tokens=128)
    assert accuracy(net, node, "n1/0") == near


def test_a_fallback_is_compared_with_the_estimate_of_whoever_served() -> None:
    net, node, tokens = three_holders()
    decision = node.route(tokens, net.now)
    assert (decision.target, decision.matched_tokens) == ("n1/0", 64 * BLOCK)
    assert node.report(decision, Outcome.failed("reset"), net.now) == "n2/0"
    node.report(decision, Outcome.served(cached_tokens=48 * BLOCK), net.now)
    assert accuracy(net, node, "n1/0").compared == 0
    told = 48 * BLOCK
    assert accuracy(net, node, "n2/0") == Accuracy(exact=1, predicted_tokens=told, cached_tokens=told)


@pytest.mark.parametrize("outcome", [Outcome.served(), Outcome.declined(cached_tokens=0), Outcome.cancelled()])
def test_without_the_engines_count_there_is_nothing_to_compare(outcome: Outcome) -> None:
    net, node, tokens = three_holders()
    node.report(node.route(tokens, net.now), outcome, net.now)
    assert not any(row.accuracy.compared for row in node.stats(net.now).endpoints)


def test_it_goes_with_its_endpoint() -> None:
    net, node, tokens = three_holders()
    node.report(node.route(tokens, net.now), Outcome.served(cached_tokens=0), net.now)
    assert accuracy(net, node, "n1/0").high == 1
    node.remove_peer("n1", net.now)
    assert "n1/0" not in {row.endpoint for row in node.stats(net.now).endpoints}
    node.add_peer("n1", "n1", net.now)
    net.run(3.0)
    assert accuracy(net, node, "n1/0") == Accuracy()
