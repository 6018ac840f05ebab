"""What an engine reuses of what it holds: learnt from its counts, and never from answers that read no cache."""

from __future__ import annotations

import random

import pytest
from routing import BLOCK, DOMAIN, IDLE, SETTINGS, hold, mesh, prompt

from prefixroute import (
    BlocksRemoved,
    BlocksStored,
    EngineBatch,
    LoadReport,
    LongestMatch,
    Node,
    Outcome,
    ResidencyChanged,
    StreamGap,
    StreamRestarted,
)
from prefixroute.routing.predictions import REFUTED
from prefixroute.routing.reuse import FORGIVEN_S, NOTHING, Reuse
from prefixroute.testing import Mesh


def engine(held: int, unit: int, drop: int) -> int:
    """What an engine reuses that drops `drop` tokens of its whole units."""
    return max(0, held - held % unit - drop)


def own(tokens: list[int], unit: int) -> tuple[Node, str]:
    """A node with one engine that tells of all whole units of a prompt."""
    node = Node("n0", DOMAIN, rng=random.Random(0), now=0.0, settings=SETTINGS)
    endpoint = node.add_endpoint("0", incarnation=1, now=0.0)
    whole = len(tokens) // unit
    node.apply(endpoint, EngineBatch((BlocksStored(tuple(range(whole)), None, tokens[: whole * unit], unit),)), 0.0)
    return node, endpoint


def served(node: Node, tokens: list[int], cached: int | None, now: float, **more: bool) -> int:
    """Serve a prompt and return what was predicted of it."""
    decision = node.route(tokens, now)
    node.report(decision, Outcome.served(cached_tokens=cached, **more), now)
    return decision.matched_tokens


def states(node: Node) -> list[str]:
    return [event.state for event in node.events() if isinstance(event, ResidencyChanged)]


def confidence(node: Node, endpoint: str, now: float) -> float:
    return next(row.confidence for row in node.stats(now).endpoints if row.endpoint == endpoint)


# --- unit and drop -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("unit", "drop", "n"), [(1648, 1648, 9155), (16, 16, 600), (8320, 8320, 20_000), (16, 1, 601), (64, 128, 1000)]
)
def test_what_an_engine_computes_anew_is_predicted_no_more_after_two_answers(unit: int, drop: int, n: int) -> None:
    tokens = prompt(1, 2000)[:n]
    node, _ = own(tokens, unit)
    held = n // unit * unit
    predicted = [served(node, tokens, engine(held, unit, drop), float(i)) for i in range(30)]
    assert predicted[2:] == [engine(held, unit, drop)] * 28
    for length in range(unit, n, max(1, n // 50)):
        assert node.route(tokens[:length], 40.0).matched_tokens <= engine(min(held, length - 1), unit, drop)


def test_a_peer_that_drops_is_learnt_by_who_forwards_to_it() -> None:
    net = mesh(2, policy=LongestMatch())
    node, tokens = net.nodes["n0"], prompt(1, 64)
    hold(net, "n1/0", tokens[: 64 * BLOCK])
    net.run(1.0)
    predicted = []
    for _ in range(4):
        decision = node.route(tokens, net.now)
        predicted.append(decision.matched_tokens)
        node.report(decision, Outcome.served(cached_tokens=63 * BLOCK), net.now)
    assert predicted == [64 * BLOCK, 64 * BLOCK, 63 * BLOCK, 63 * BLOCK]


def test_a_unit_that_no_event_tells_shows_in_three_counts() -> None:
    reuse, rng = Reuse(), random.Random(3)
    for _ in range(30):
        held = rng.randrange(6000, 20_000)
        reuse.note(held, engine(held, 1648, 1648), 16, 0.0)
    assert (reuse.unit, reuse.drop) == (1648, 1648)


def test_one_answer_and_answers_by_chance_teach_nothing() -> None:
    reuse = Reuse()
    reuse.note(1024, 512, 16, 0.0)
    assert reuse.drop == 0
    for cached in (1024, 1024, 480, 1024, 1008, 1024):
        reuse.note(1024, cached, 16, 0.0)
    assert (reuse.unit, reuse.drop, reuse.floor) == (0, 0, 0)


def test_more_than_was_known_teaches_nothing_and_the_whole_takes_a_drop_back() -> None:
    reuse = Reuse()
    for _ in range(8):
        reuse.note(1024, 1008, 16, 0.0)
    for _ in range(8):
        reuse.note(1024, 1031, 16, 0.0)
    assert reuse.drop == 0, "there is no point left that lacks anything"
    for cached in [1008] * 4 + [1024] * 5:
        reuse.note(1024, cached, 16, 0.0)
    assert reuse.drop == 0


def test_a_new_life_forgets_what_was_learnt() -> None:
    tokens = prompt(1, 64)
    node, endpoint = own(tokens, BLOCK)
    for i in range(4):
        served(node, tokens, 62 * BLOCK, float(i))
    assert node.route(tokens, 5.0).matched_tokens == 62 * BLOCK
    again = BlocksStored(tuple(range(64)), None, tokens[: 64 * BLOCK], BLOCK)
    node.apply(endpoint, EngineBatch((StreamRestarted(), again)), 6.0)
    node.handle_timer(7.0)
    assert node.route(tokens, 8.0).matched_tokens == 64 * BLOCK


# --- an engine that reuses nothing -------------------------------------------------------------------------


def nothing_reused(blocks: int, answers: int) -> tuple[Mesh, Node, list[int]]:
    net = mesh(2, policy=LongestMatch())
    node, tokens = net.nodes["n1"], prompt(1, blocks)
    hold(net, "n1/0", tokens[: blocks * BLOCK])
    node.events()
    for _ in range(answers):
        served(node, tokens, 0, net.now)
    return net, node, tokens


@pytest.mark.parametrize("blocks", [1, 200])
def test_an_owner_advertises_that_its_engine_reuses_nothing(blocks: int) -> None:
    net, node, tokens = nothing_reused(blocks, 200)
    assert states(node) == ["unused"]
    assert node.route(tokens, net.now).matched_tokens == 0
    net.run(2.0)
    assert confidence(net.nodes["n0"], "n1/0", net.now) < 0.05
    again = node.route(tokens, net.now, forwarded=True)
    node.report(again, Outcome.served(cached_tokens=blocks * BLOCK), net.now)
    assert states(node) == ["reused"]
    net.run(2.0)
    assert confidence(net.nodes["n0"], "n1/0", net.now) > 0.9
    assert node.route(tokens, net.now).matched_tokens == blocks * BLOCK


@pytest.mark.parametrize("answers", [3, 6, 12, NOTHING - 1])
def test_an_exact_mirror_of_the_own_engine_is_not_doubted_for_some_answers(answers: int) -> None:
    net, node, tokens = nothing_reused(64, answers)
    assert states(node) == []
    assert confidence(node, "n1/0", net.now) == 1.0
    assert node.route(tokens, net.now).matched_tokens == 64 * BLOCK
    net.run(2.0)
    assert confidence(net.nodes["n0"], "n1/0", net.now) == pytest.approx(0.95, abs=0.01)


def test_a_mirror_with_a_gap_is_doubted_as_ever() -> None:
    net, node, tokens = nothing_reused(64, 0)
    node.apply("n1/0", EngineBatch((StreamGap(),)), net.now)
    before = confidence(node, "n1/0", net.now)
    served(node, tokens, 0, net.now)
    assert confidence(node, "n1/0", net.now) < before


def test_one_hit_in_between_is_enough() -> None:
    net, node, tokens = nothing_reused(64, NOTHING - 1)
    served(node, tokens, 64 * BLOCK, net.now)
    for _ in range(NOTHING - 1):
        served(node, tokens, 0, net.now)
    assert states(node) == []


def test_it_is_forgiven_in_time_and_one_more_miss_says_it_anew() -> None:
    reuse = Reuse()
    for _ in range(NOTHING):
        reuse.note(1024, 0, 16, 0.0)
    assert (reuse.floor, reuse.share(0.0)) == (1024, 0.0)
    assert reuse.share(FORGIVEN_S) > 0.5
    assert reuse.floor == 0
    reuse.note(1024, 0, 16, FORGIVEN_S)
    assert reuse.floor == 1024


@pytest.mark.parametrize("k", [3, 6, 12, 100])
@pytest.mark.parametrize("target", ["n0/0", "n1/0"])
def test_answers_that_read_no_cache_are_compared_with_nothing(k: int, target: str) -> None:
    net = mesh(2, policy=LongestMatch())
    node, tokens = net.nodes["n0"], prompt(1, 94)
    hold(net, target, tokens[: 94 * BLOCK])
    net.run(1.0)
    before = confidence(node, target, net.now)
    for _ in range(k):
        decision = node.route(tokens, net.now)
        assert decision.target == target
        node.report(decision, Outcome.served(cached_tokens=0, ttft_s=30.0, read_cache=False), net.now)
    decision = node.route(tokens, net.now)
    assert (decision.target, decision.matched_tokens) == (target, 94 * BLOCK)
    assert confidence(node, target, net.now) == before
    assert node.counters["predicted_tokens"] == 0
    assert not any(row.accuracy.compared for row in node.stats(net.now).endpoints)
    assert decision.expected_ttft_s < 1.0, "nor does its time say how fast the engine is"


# --- what was sent and never came --------------------------------------------------------------------------


def gateway() -> tuple[Mesh, Node]:
    """A node without an endpoint, and one peer whose engine tells nothing."""
    net = Mesh()
    node = Node("n0", DOMAIN, rng=random.Random(0), now=0.0, settings=SETTINGS)
    peer = Node("n1", DOMAIN, rng=random.Random(1), now=0.0, settings=SETTINGS)
    peer.set_load(peer.add_endpoint("0", url="http://n1", incarnation=1, now=0.0), IDLE, 0.0)
    net.add(node)
    net.add(peer)
    net.run(1.0)
    return net, node


@pytest.mark.parametrize("prompts", [1, 2, 5])
def test_a_target_that_refuted_two_predictions_in_a_row_gets_no_more_credit(prompts: int) -> None:
    net, node = gateway()
    tokens = [prompt(i, 37, 8) for i in range(prompts)]
    predicted = [served(node, tokens[i % prompts], 0, net.now) for i in range(30)]
    assert [p for p in predicted if p] == [592] * REFUTED
    assert predicted[20:] == [0] * 10
    assert served(node, tokens[0], 592, net.now) == 0, "an answer shows that it is reused after all"
    assert served(node, tokens[0], 592, net.now) == 592
    assert served(node, tokens[0], 0, net.now) == 592
    assert [served(node, tokens[0], 592, net.now) for _ in range(3)][1:] == [592, 592], "one miss is no two"


def test_what_comes_short_by_a_block_is_learnt_and_not_forgotten_each_time() -> None:
    net, node = gateway()
    tokens = prompt(1, 37, 8)
    predicted = [served(node, tokens, 576, net.now) for _ in range(12)]
    assert predicted[6:] == [576] * 6


# --- draining ----------------------------------------------------------------------------------------------


def usable(node: Node, endpoint: str, now: float) -> bool:
    return next(row.usable for row in node.stats(now).endpoints if row.endpoint == endpoint)


def test_who_refuses_no_more_is_a_candidate_at_once_here_and_within_a_round_there() -> None:
    net = mesh(2)
    node = net.nodes["n1"]
    node.set_load("n1/0", LoadReport(refusing=True, reason="draining", prefill_tokens_per_s=1000), net.now)
    assert not usable(node, "n1/0", net.now)
    net.run(0.5)
    assert not usable(net.nodes["n0"], "n1/0", net.now)
    decision = net.nodes["n0"].route(prompt(1, 4), net.now)
    net.nodes["n0"].report(decision, Outcome.cancelled(), net.now)
    node.set_load("n1/0", IDLE, net.now)
    assert usable(node, "n1/0", net.now)
    net.run(0.3)
    assert usable(net.nodes["n0"], "n1/0", net.now)


def test_a_refused_forward_counts_until_the_peer_says_that_it_is_over() -> None:
    net = mesh(2, policy=LongestMatch())
    tokens = prompt(1, 8)
    hold(net, "n1/0", tokens[: 8 * BLOCK])
    net.run(1.0)
    node, peer = net.nodes["n0"], net.nodes["n1"]
    decision = node.route(tokens, net.now)
    peer.set_load("n1/0", LoadReport(refusing=True, prefill_tokens_per_s=1000), net.now)
    node.report(decision, Outcome.refused("draining"), net.now)
    net.run(0.4)
    assert not usable(node, "n1/0", net.now)
    peer.set_load("n1/0", IDLE, net.now)
    net.run(0.3)
    assert usable(node, "n1/0", net.now)


def test_removals_take_nothing_of_what_was_learnt() -> None:
    tokens = prompt(1, 64)
    node, endpoint = own(tokens, BLOCK)
    for i in range(4):
        served(node, tokens, 62 * BLOCK, float(i))
    node.apply(endpoint, EngineBatch((BlocksRemoved(tuple(range(32, 64))),)), 5.0)
    assert node.route(tokens, 6.0).matched_tokens == 30 * BLOCK
