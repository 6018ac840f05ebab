"""Predictions: what was routed counts as held until gossip, a reply or time says otherwise."""

from __future__ import annotations

import random

import pytest
from routing import DOMAIN, SETTINGS, hold, mesh, prompt

from prefixroute import Namespace, Node, Outcome
from prefixroute.keys.chain import ChainSpec, TokenChain
from prefixroute.keys.keyset import NO_KEYS
from prefixroute.replication.copies import Copy
from prefixroute.routing.predictions import AGAIN, COMPARED, KEPT_TOKENS, LIFETIME_S, Predictions
from prefixroute.routing.standing import LocalStanding, PeerStanding, Standing

SPEC = ChainSpec(4, 7)


def chain(*runs: tuple[int, int], root: int = 5) -> TokenChain:
    """A prompt of runs (seed, blocks) of random tokens."""
    tokens: list[int] = []
    for seed, blocks in runs:
        rng = random.Random(seed)
        tokens += [rng.randrange(1000) for _ in range(blocks * SPEC.block_tokens)]
    return TokenChain(SPEC, root, tokens)


def standing(name: str = "b/0", local: bool = False) -> Standing:
    copy = Copy(name, local, 1, 0.0)
    return LocalStanding(copy, 1, 0.0, lambda: 0) if local else PeerStanding(copy, None, 1, 0.0)


@pytest.mark.parametrize("shared", [0, 1, 5, 31, 32, 33, 64, 90, 128])
def test_two_prompts_share_their_common_blocks(shared: int) -> None:
    one, other = chain((1, shared), (2, 40)), chain((1, shared), (3, 7))
    assert one.shared(other) == other.shared(one) == shared
    assert one.shared(chain((1, shared), (2, 40))) == shared + 40
    assert one.shared(chain((1, shared), root=6)) == 0


def test_a_prompt_counts_as_held_from_the_decision_on() -> None:
    made, there = Predictions(), standing()
    made.sent(1, chain((1, 20), (2, 5)), there, 0.0)
    assert made.match(chain((1, 20), (3, 5)), 0.0, {}) == [(there, 20)]
    assert made.match(chain((1, 20), (3, 5)), 0.0, {there: 19}) == [(there, 20)]
    assert made.match(chain((1, 20), (3, 5)), 0.0, {there: 20}) == [], "its digest tells as much"
    assert made.match(chain((4, 20)), 0.0, {}) == []
    assert made.match(TokenChain(SPEC, 5, [1]), 0.0, {}) == []
    made._check()


def test_what_is_short_of_a_block_is_not_predicted() -> None:
    made = Predictions()
    made.sent(1, TokenChain(SPEC, 5, [1, 2, 3]), standing(), 0.0)
    assert len(made) == 0


def test_a_failure_ends_it_and_so_does_time() -> None:
    made, there = Predictions(), standing()
    made.sent(1, chain((1, 9)), there, 0.0)
    made.sent(2, chain((1, 9)), there, 5.0)
    made.drop(1)
    made.drop(1)
    assert len(made.match(chain((1, 9)), LIFETIME_S, {})) == 1
    assert made.match(chain((1, 9)), 5.0 + LIFETIME_S, {}) == []
    assert len(made) == 0
    made._check()


def test_after_the_reply_the_digest_tells_by_itself_two_versions_later() -> None:
    made, there = Predictions(), standing()
    there.copy.keys.replace(7, NO_KEYS)
    made.sent(1, chain((1, 9)), there, 0.0)
    there.copy.keys.replace(9, NO_KEYS)
    assert made.match(chain((1, 9)), 1.0, {}), "before the reply no version ends it"
    made.served(1)
    there.copy.keys.replace(9 + AGAIN - 1, NO_KEYS)
    assert made.match(chain((1, 9)), 1.0, {})
    there.copy.keys.replace(9 + AGAIN, NO_KEYS)
    assert made.match(chain((1, 9)), 1.0, {}) == []
    made.served(1)


def test_a_new_life_of_the_target_ends_it() -> None:
    made, there = Predictions(), standing()
    made.sent(1, chain((1, 9)), there, 0.0)
    made.served(1)
    there.copy.incarnation += 1
    assert made.match(chain((1, 9)), 1.0, {}) == []


def test_a_local_reply_ends_it_for_the_engine_has_told() -> None:
    made, here = Predictions(), standing("a/0", local=True)
    made.sent(1, chain((1, 9)), here, 0.0)
    assert made.match(chain((1, 9)), 0.0, {})
    made.served(1)
    assert len(made) == 0


def test_the_newest_few_are_compared_and_all_is_bounded() -> None:
    made = Predictions()
    spots = [standing(f"n{i}/0") for i in range(COMPARED + 3)]
    for ticket, spot in enumerate(spots):
        made.sent(ticket, chain((1, 8), (ticket + 2, 8)), spot, 0.0)
    assert [there for there, _ in made.match(chain((1, 8)), 0.0, {})] == spots[: -COMPARED - 1 : -1]
    big = TokenChain(SPEC, 5, list(range(KEPT_TOKENS // 4)))
    for ticket in range(100, 110):
        made.sent(ticket, big, spots[0], 0.0)
    assert len(made) == 4
    made._check()


def test_refuted_is_what_an_endpoint_did_not_hold_of_prompts_that_begin_alike() -> None:
    made, one, other = Predictions(), standing("b/0"), standing("c/0")
    for ticket, (spot, seed) in enumerate([(one, 2), (other, 3), (one, 4)]):
        made.sent(ticket, chain((1, 8), (seed, 8)), spot, 0.0)
    made.sent(9, chain((7, 8)), one, 0.0)
    made.refute(chain((1, 8)), one)
    assert made.match(chain((1, 8)), 0.0, {}) == [(other, 8)]
    assert made.match(chain((7, 8)), 0.0, {}) == [(one, 8)]
    made._check()


# --- in a node ---------------------------------------------------------------------------------------------


def test_a_burst_of_one_cold_prefix_stays_together() -> None:
    net = mesh(4)
    node = net.nodes["n0"]
    head = prompt(1, 60)
    targets = {node.route(head + prompt(i, 2), net.now).target for i in range(2, 10)}
    assert targets == {"n0/0"}


def test_a_gateways_burst_of_one_cold_prefix_stays_together() -> None:
    net = mesh(4)
    gate = net.add(Node("gate", DOMAIN, rng=random.Random(9), now=net.now, settings=SETTINGS))
    net.run(1.0)
    head = prompt(1, 60)
    targets = [gate.route(head + prompt(i, 2), net.now).target for i in range(2, 6)]
    assert len(set(targets)) == 1


def test_an_explanation_tells_what_is_only_expected() -> None:
    net = mesh(2)
    node = net.nodes["n0"]
    head = prompt(1, 40)
    node.route(head, net.now)
    decision = node.route(head + prompt(2, 2), net.now)
    found = {c.endpoint: (c.depth, c.predicted) for c in decision.candidates}
    assert found["n0/0"] == (40, True)
    assert "expected" in node.explain(decision).text()
    assert [c["endpoint"] for c in node.explain(decision).to_dict()["candidates"] if c["expected"]] == ["n0/0"]


def test_a_miss_of_what_was_only_expected_is_not_held_against_the_digest() -> None:
    net = mesh(2)
    tokens = prompt(1, 40)
    hold(net, "n1/0", tokens[: 20 * 16])
    net.run(1.0)
    node = net.nodes["n0"]
    first = node.route(tokens, net.now)
    assert (first.target, first.matched_tokens) == ("n1/0", 320)
    node.report(first, Outcome.served(cached_tokens=320), net.now)
    second = node.route(tokens, net.now)
    assert (second.target, second.matched_tokens) == ("n1/0", 640)
    node.report(second, Outcome.served(cached_tokens=0), net.now)
    assert node._table.fleet.standings["n1/0"].trust == 1.0
    third = next(c for c in node.route(tokens, net.now).candidates if c.endpoint == "n1/0")
    assert third.depth == 20


def test_namespaces_are_not_mixed_up() -> None:
    net = mesh(2)
    node = net.nodes["n0"]
    node.route(prompt(1, 40), net.now, namespace=Namespace(salt="a"))
    decision = node.route(prompt(1, 40), net.now, namespace=Namespace(salt="b"))
    assert not any(c.depth for c in decision.candidates)


def test_an_endpoint_that_left_is_expected_nowhere() -> None:
    net = mesh(3)
    tokens = prompt(1, 40)
    hold(net, "n1/0", tokens)
    net.run(1.0)
    node = net.nodes["n0"]
    assert node.route(tokens, net.now).target == "n1/0"
    net.nodes["n1"].leave(net.now)
    net.run(1.0)
    assert node.route(tokens, net.now).target in ("n0/0", "n2/0")
