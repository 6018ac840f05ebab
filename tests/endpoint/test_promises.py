"""Promises: peers know of a prompt that is being served before its engine tells of it, and not for longer."""

from __future__ import annotations

import random

import pytest
from routing import BLOCK, check, hold, mesh, prompt

from prefixroute import BlocksCleared, Decision, EngineBatch, Namespace, Node, NodeSettings, Outcome, TokenChain
from prefixroute.endpoint.publisher import Promise, Promises
from prefixroute.keys.chain import ChainSpec, wire_key
from prefixroute.testing import Mesh, stored

SPEC = ChainSpec(4, 7)


def chain(seed: int, blocks: int) -> TokenChain:
    rng = random.Random(seed)
    return TokenChain(SPEC, 5, [rng.randrange(1000) for _ in range(blocks * SPEC.block_tokens)])


def wires(prompt_: TokenChain, *depths: int) -> set[int]:
    return {wire_key(prompt_.key(depth)) for depth in depths}


# --- the structure -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("anchor_stride", "above", "depths"),
    [(1, 3, range(4, 12)), (4, 3, (4, 8, 11)), (32, 3, (11,)), (4, 0, (1, 4, 8, 11))],
)
def test_a_promise_has_the_depths_that_the_stride_asks_for_and_its_end(
    anchor_stride: int, above: int, depths: range
) -> None:
    made, asked = Promises(), chain(1, 12)
    made.begin(1, Promise(asked, above, 11))
    assert len(made.counts) == 0, "thought over with the next round"
    assert made.settle(anchor_stride) == set(made.counts) == wires(asked, *depths)
    assert made.settle(anchor_stride) == set()
    assert made.withdraw(1) == wires(asked, *depths)
    assert len(made.counts) == 0
    made._check()


def test_what_two_prompts_promise_stays_until_both_are_over() -> None:
    made, one, other = Promises(), chain(1, 6), chain(1, 9)
    made.begin(1, Promise(one, 0, 6))
    made.begin(2, Promise(other, 2, 9))
    assert made.settle(1) == wires(other, *range(1, 10))
    assert made.withdraw(1) == wires(one, 1, 2)
    assert made.withdraw(1) == set()
    assert made.withdraw(2) == wires(other, *range(3, 10))
    made._check()


def test_a_prompt_that_is_over_before_the_round_costs_nothing() -> None:
    made = Promises()
    made.begin(1, Promise(chain(1, 6), 0, 6))
    assert made.withdraw(1) == made.settle(1) == set()
    made.begin(2, Promise(chain(1, 6), 6, 6))
    assert made.settle(1) == set(), "all of it is held"


@pytest.mark.parametrize("seed", range(8))
def test_counts_are_right_whatever_comes_and_goes(seed: int) -> None:
    rng = random.Random(seed)
    made, published = Promises(), set[int]()
    under_way: list[int] = []
    for ticket in range(300):
        if rng.random() < 0.6:
            depth = rng.randint(1, 12)
            made.begin(ticket, Promise(chain(rng.randrange(4), 12), rng.randint(0, depth), depth))
            under_way.append(ticket)
        elif under_way:
            published -= made.withdraw(under_way.pop(rng.randrange(len(under_way))))
        if rng.random() < 0.4:
            published |= made.settle(rng.choice((1, 4)))
        made._check()
        assert set(made.counts) == published


# --- nodes -------------------------------------------------------------------------------------------------


def held(node: Node, endpoint: str) -> set[int]:
    return set(node.digests()[endpoint].keys.tolist())


def serve(net: Mesh, name: str, tokens: list[int]) -> Decision:
    """Let a node serve a prompt itself, as when another one forwarded it."""
    decision = net.nodes[name].route(tokens, net.now, forwarded=True)
    assert decision.local
    return decision


def test_a_prompt_that_comes_elsewhere_meanwhile_goes_where_the_first_is_served() -> None:
    net = mesh(3)
    tokens = prompt(1, 64)
    serve(net, "n0", tokens)
    net.run(0.5)
    decision = net.nodes["n1"].route(tokens, net.now)
    assert (decision.target, decision.matched_tokens) == ("n0/0", 64 * BLOCK)
    assert decision.reason == "longer cached prefix"
    check(net)


def test_other_prompts_are_not_promised() -> None:
    net = mesh(2)
    serve(net, "n0", prompt(1, 64))
    net.run(0.5)
    assert net.nodes["n1"].route(prompt(2, 64), net.now).matched_tokens == 0
    other = net.nodes["n1"].chain(prompt(1, 64), namespace=Namespace(salt="s"))
    assert net.nodes["n1"].route(other, net.now).matched_tokens == 0


def test_only_whole_units_of_the_engine_are_promised() -> None:
    net = mesh(2)
    hold(net, "n0/0", prompt(9, 4))
    net.nodes["n0"].apply("n0/0", stored(prompt(8, 8), 64), net.now)
    net.run(0.5)
    before = held(net.nodes["n1"], "n0/0")
    tokens = prompt(1, 10)  # 161 tokens: two units of 64
    serve(net, "n0", tokens)
    net.run(0.5)
    promised = net.nodes["n1"].chain(tokens)
    assert held(net.nodes["n1"], "n0/0") - before == {wire_key(promised.key(depth)) for depth in range(1, 9)}


@pytest.mark.parametrize("outcome", [Outcome.failed("gone"), Outcome.refused(), Outcome.cancelled(), Outcome.served()])
def test_a_promise_ends_with_the_outcome(outcome: Outcome) -> None:
    net = mesh(2)
    decision = serve(net, "n0", prompt(1, 64))
    net.run(0.5)
    assert len(held(net.nodes["n1"], "n0/0")) == 64
    net.nodes["n0"].report(decision, outcome, net.now)
    net.run(0.5)
    assert held(net.nodes["n1"], "n0/0") == set()
    check(net)


def test_a_prompt_behind_another_promises_what_that_one_may_not_bring() -> None:
    """The second begins as the first does, which is expected here; the first is cancelled before the engine told."""
    net = mesh(2)
    longer = prompt(1, 64)
    first = serve(net, "n0", longer[: 40 * BLOCK])
    second = serve(net, "n0", longer)
    assert second.matched_tokens > 0
    net.run(0.5)
    net.nodes["n0"].report(first, Outcome.cancelled(), net.now)
    net.run(0.5)
    asked = net.nodes["n1"].chain(longer)
    assert held(net.nodes["n1"], "n0/0") == {wire_key(asked.key(depth)) for depth in range(1, 65)}
    check(net)


def test_what_the_engine_has_told_by_then_stays() -> None:
    net = mesh(2)
    tokens = prompt(1, 64)
    decision = serve(net, "n0", tokens)
    net.run(0.5)
    version = net.nodes["n1"].digests()["n0/0"].version
    hold(net, "n0/0", tokens)
    net.nodes["n0"].report(decision, Outcome.served(cached_tokens=0, ttft_s=1.0), net.now)
    net.run(0.5)
    digest = net.nodes["n1"].digests()["n0/0"]
    assert (len(digest.keys), digest.version) == (64, version), "it was known already: nothing is sent again"
    check(net)


def test_an_outcome_that_never_comes_ends_it_too() -> None:
    net = mesh(2, settings=NodeSettings(datagram_bytes=60_000, outcome_timeout_s=3.0))
    serve(net, "n0", prompt(1, 64))
    net.run(1.0)
    assert len(held(net.nodes["n1"], "n0/0")) == 64
    net.run(4.0)
    assert held(net.nodes["n1"], "n0/0") == set()


def test_with_anchors_the_stride_and_the_end_are_promised() -> None:
    net = mesh(2, settings=NodeSettings(datagram_bytes=60_000, digest_bytes=400))
    for seed in range(20, 30):
        hold(net, "n0/0", prompt(seed, 40))
    net.run(6.0)
    anchor_stride = net.nodes["n1"].digests()["n0/0"].every
    assert anchor_stride > 1
    before = held(net.nodes["n1"], "n0/0")
    tokens = prompt(1, 45)
    decision = serve(net, "n0", tokens)
    net.run(0.5)
    asked = net.nodes["n1"].chain(tokens)
    depths = {depth for depth in range(1, 46) if depth % anchor_stride == 0} | {1, 45}
    assert held(net.nodes["n1"], "n0/0") - before == {wire_key(asked.key(depth)) for depth in depths}
    assert net.nodes["n1"].route(tokens, net.now).matched_tokens >= (45 - anchor_stride) * BLOCK
    check(net)
    net.nodes["n0"].report(decision, Outcome.failed(), net.now)
    net.run(0.5)
    assert held(net.nodes["n1"], "n0/0") == before
    check(net)


@pytest.mark.parametrize("seed", range(6))
def test_published_is_what_is_held_and_what_is_promised(seed: int) -> None:
    """Prompts that begin alike come and end in any order; what the engine keeps comes and goes beside them."""
    rng = random.Random(seed)
    digest_bytes = rng.choice((400, 49152))
    net = mesh(2, settings=NodeSettings(datagram_bytes=60_000, digest_bytes=digest_bytes, outcome_timeout_s=1e6))
    node, open_ = net.nodes["n0"], []
    for _ in range(120):
        tokens = prompt(rng.randrange(5), 60)[: rng.randint(1, 60) * BLOCK]
        roll = rng.random()
        if roll < 0.4:
            open_.append((node.route(tokens, net.now, forwarded=True), tokens))
        elif roll < 0.75 and open_:
            decision, served = open_.pop(rng.randrange(len(open_)))
            if rng.random() < 0.7:
                hold(net, "n0/0", served)
            node.report(decision, rng.choice((Outcome.served(), Outcome.cancelled())), net.now)
        elif roll < 0.8:
            node.apply("n0/0", EngineBatch((BlocksCleared("gpu"),)), net.now)
        net.run(rng.choice((0.0, 0.1, 3.0)))
        node._check()
    for decision, _ in open_:
        node.report(decision, Outcome.cancelled(), net.now)
    net.run(8.0)
    check(net)
    assert held(net.nodes["n1"], "n0/0") == held(node, "n0/0")
