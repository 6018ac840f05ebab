"""Nodes beside engines of hybrid models: what peers are told, what is promised, and what is predicted."""

from __future__ import annotations

import random

import pytest
from hybrid import Kind, PlainHybrid
from routing import BLOCK, check, mesh, prompt

from prefixroute import EngineBatch, Node, NodeSettings, Outcome
from prefixroute.endpoint.publisher import Promise, Promises
from prefixroute.keys.chain import ChainSpec, TokenChain, wire_key
from prefixroute.keys.hit_marks import ENDS_ONLY, marked
from prefixroute.replication.copies import Copy
from prefixroute.routing.index import MergedIndex, Stratum
from prefixroute.routing.predictions import Predictions
from prefixroute.routing.standing import PeerStanding
from prefixroute.testing import Mesh, stored

WINDOW = "sliding_window"
GEMMA = (Kind(BLOCK, WINDOW, 3 * BLOCK), Kind(BLOCK))


def engine(rng: random.Random, net: Mesh, endpoint: str = "n0/0") -> PlainHybrid:
    made = PlainHybrid(rng, GEMMA, tokens=20, sparse=False)
    tell(net, endpoint, *made.hello())
    return made


def tell(net: Mesh, endpoint: str, *events: object) -> None:
    net.nodes[endpoint.partition("/")[0]].apply(endpoint, EngineBatch(events), net.now)  # type: ignore[arg-type]


def expected(node: Node, endpoint: str, tokens: list[int], now: float) -> int:
    """Tokens that a node takes for reusable at an endpoint; nothing is left booked."""
    decision = node.route(tokens, now)
    (candidate,) = [c for c in decision.candidates if c.endpoint == endpoint]
    node.report(decision, Outcome.cancelled(), now)
    return candidate.matched_tokens


@pytest.mark.parametrize("seed", range(3))
def test_owner_and_peer_expect_what_the_engine_would_reuse(seed: int) -> None:
    rng = random.Random(seed)
    net = mesh(2)
    made, hits = engine(rng, net), 0
    for _ in range(25):
        tell(net, "n0/0", *made.step(40 * BLOCK))
        net.run(1.0)
        check(net)
        for _ in range(4):
            tokens = made.prompt(50 * BLOCK)
            for node in net.nodes.values():
                assert expected(node, "n0/0", tokens, net.now) == made.hit(tokens)
            hits += made.hit(tokens) > 0
    assert hits > 3


@pytest.mark.parametrize("seed", range(3))
def test_what_a_small_digest_leaves_out_makes_peers_low(seed: int) -> None:
    rng = random.Random(seed)
    net = mesh(2, settings=NodeSettings(datagram_bytes=60_000, digest_bytes=250))
    made, right, low, strides = engine(rng, net), 0, 0, set()
    for _ in range(25):
        tell(net, "n0/0", *made.step(60 * BLOCK))
        net.run(6.0)
        check(net)
        strides.add(net.nodes["n1"].digests()["n0/0"].every)
        for _ in range(4):
            tokens = made.prompt(70 * BLOCK)
            assert expected(net.nodes["n0"], "n0/0", tokens, net.now) == made.hit(tokens)
            told = expected(net.nodes["n1"], "n0/0", tokens, net.now)
            assert told <= made.hit(tokens)
            right += 0 < told == made.hit(tokens)
            low += told < made.hit(tokens)
    assert max(strides) > 1
    assert right > 0
    assert low > 0


def test_an_engine_that_comes_back_without_windows_is_followed_by_peers() -> None:
    net = mesh(2)
    rng = random.Random(1)
    made = engine(rng, net)
    tell(net, "n0/0", *made.serve(40 * BLOCK))
    net.run(1.0)
    tokens = prompt(1, 20)
    net.nodes["n0"].apply("n0/0", EngineBatch(tuple(made.forget()[:1])), net.now)
    tell(net, "n0/0", *PlainHybrid(rng, (Kind(BLOCK),)).hello())
    net.nodes["n0"].remove_endpoint("n0/0", net.now)
    net.run(1.0)
    check(net)
    endpoint = net.nodes["n0"].add_endpoint("0", url="http://n0/0", incarnation=2, now=net.now)
    net.nodes["n0"].apply(endpoint, stored(tokens), net.now)
    net.run(1.0)
    check(net)
    assert expected(net.nodes["n1"], "n0/0", tokens, net.now) == 20 * BLOCK


# --- promises and predictions ------------------------------------------------------------------------------


def test_a_promise_is_the_end_that_the_prompt_will_leave() -> None:
    net = mesh(2)
    engine(random.Random(1), net)
    tokens = prompt(1, 40)
    decision = net.nodes["n0"].route(tokens, net.now, forwarded=True)
    net.run(0.5)
    n1 = net.nodes["n1"]
    chain = n1.chain(tokens)
    keys = {ENDS_ONLY, chain.key(40), marked(chain.key(1)), marked(chain.key(32))}
    assert set(n1.digests()["n0/0"].keys.tolist()) == set(map(wire_key, keys))
    assert expected(n1, "n0/0", tokens, net.now) == 40 * BLOCK
    assert expected(n1, "n0/0", [*tokens, *prompt(2, 3)], net.now) == 40 * BLOCK
    assert expected(n1, "n0/0", [*tokens[: 39 * BLOCK], *prompt(2, 3)], net.now) == 0
    net.nodes["n0"].report(decision, Outcome.served(), net.now)
    net.run(0.5)
    assert n1.digests()["n0/0"].keys.tolist() == [wire_key(ENDS_ONLY)]
    check(net)


def test_a_short_promise_has_one_mark() -> None:
    spec = ChainSpec(4, 7)
    chain = TokenChain(spec, 5, list(range(130)))
    made = Promises()
    made.begin(1, Promise(chain, 0, 32))
    assert made.settle(1, True) == {wire_key(chain.key(32)), wire_key(marked(chain.key(1)))}
    assert made.withdraw(1) == {wire_key(chain.key(32)), wire_key(marked(chain.key(1)))}
    made._check()


def test_what_is_predicted_of_a_sparse_endpoint_is_of_use_at_its_end_alone() -> None:
    spec = ChainSpec(4, 7)
    there = PeerStanding(Copy("b/0", False, 1, 0.0), None, 1, 0.0)
    there.hit_unit = 8
    base = list(range(1000, 1046))
    """Eleven blocks and two tokens: five units of two blocks."""
    made = Predictions()
    made.sent(1, TokenChain(spec, 5, base), there, 0.0)

    def predicted(tokens: list[int], known: int = 0, sparse: int = there.bit) -> list[int]:
        return [depth for _, depth in made.match(TokenChain(spec, 5, tokens), 0.0, {there: known}, sparse)]

    assert predicted([*base, 7]) == [10]
    assert predicted([*base, 7], known=9) == [10]
    assert predicted([*base, 7], known=10) == []
    assert predicted([*base[:41]]) == [10]
    assert predicted([*base[:40]]) == [], "the last token is computed"
    assert predicted([*base[:39], 7, 7, 7]) == []
    assert predicted([*base[:39], 7, 7, 7], sparse=0) == predicted([*base[:39], 7, 7, 7], sparse=2) == [9]


def test_a_prompt_behind_another_is_not_expected_to_hit_in_its_middle() -> None:
    net = mesh(1)
    engine(random.Random(1), net)
    n0, tokens = net.nodes["n0"], prompt(1, 40)
    first = n0.route(tokens, net.now)
    assert expected(n0, "n0/0", [*tokens, 5], net.now) == 40 * BLOCK
    assert expected(n0, "n0/0", [*tokens[: 30 * BLOCK], 5], net.now) == 0
    n0.report(first, Outcome.served(0), net.now)


# --- the index ---------------------------------------------------------------------------------------------


def sparse_keys(chain: TokenChain, *depths: int) -> set[int]:
    keys = {ENDS_ONLY, *(chain.key(depth) for depth in depths)}
    for depth in depths:
        keys.add(marked(chain.key(1)))
        if depth > 32:
            keys.add(marked(chain.key((depth - 1) // 32 * 32)))
    return set(map(wire_key, keys))


@pytest.mark.parametrize("seed", range(20))
def test_sparse_coarse_and_exact_endpoints_are_found_in_one_search(seed: int) -> None:
    rng = random.Random(seed)
    spec = ChainSpec(1, 5)
    chain = TokenChain(spec, 9, list(range(rng.randint(1, 200))))
    depths: dict[str, int] = {}
    index = MergedIndex()
    for i in range(8):
        name, most = f"n{i}/0", rng.randint(0, chain.depth)
        index.join(name)
        if i % 3 == 0:
            ends = sorted(rng.sample(range(1, chain.depth + 1), min(chain.depth, rng.randint(0, 3))))
            index.update(name, sparse_keys(chain, *ends), ())
            depths[name] = max((end for end in ends if end < chain.n_tokens), default=0)
        elif i % 3 == 1:
            index.update(name, {wire_key(chain.key(d)) for d in range(1, most + 1)}, ())
            depths[name] = most
        else:
            index.set_stride(name, 8)
            index.update(name, {wire_key(chain.key(d)) for d in range(1, most + 1) if d in (1, most) or d % 8 == 0}, ())
            depths[name] = most
    found = {name: s.depth for s in index.search(chain, 20) for name in index.names(s.mask)}
    assert found == {name: depth for name, depth in depths.items() if depth}
    assert {name: index.depth(chain, index.bit(name)) for name in depths} == depths
    deepest = sorted({depth for depth in depths.values() if depth}, reverse=True)[:2]
    assert [s.depth for s in index.search(chain, 2)] == deepest
    one = index.bit("n0/0")
    assert index.search(chain, within=one) == ([Stratum(depths["n0/0"], one)] if depths["n0/0"] else [])


def test_an_endpoint_is_sparse_as_long_as_it_says_so() -> None:
    index, chain = MergedIndex(), TokenChain(ChainSpec(1, 5), 9, list(range(41)))
    for name in ("a", "b"):
        index.join(name)
    index.update("a", sparse_keys(chain, 40), ())
    assert index.sparse == index.bit("a")
    assert index.depth(chain, index.bit("a")) == 40
    bit = index.retire("a")
    index.mark(bit, (), sparse_keys(chain, 40))
    index.release(bit)
    assert index.sparse == 0
    index.join("c")
    index.update("c", {wire_key(chain.key(d)) for d in range(1, 41)}, ())
    assert index.depth(chain, index.bit("c")) == 40, "it has the bit that was a's"


def test_a_mark_alone_proves_nothing() -> None:
    index, chain = MergedIndex(), TokenChain(ChainSpec(1, 5), 9, list(range(100)))
    index.join("a")
    index.update("a", sparse_keys(chain, 40, 90) - {wire_key(chain.key(90))}, ())
    assert index.search(chain) == [Stratum(40, 1)]
    index.update("a", (), {wire_key(marked(chain.key(1)))})
    assert index.search(chain) == [], "no end is behind the first block, whatever else is there"


@pytest.mark.interpreted
def test_of_a_prompt_that_nobody_holds_only_the_first_block_is_hashed() -> None:
    index = MergedIndex()
    index.join("a")
    index.update("a", sparse_keys(TokenChain(ChainSpec(1, 5), 9, list(range(100))), 40), ())
    asked: list[int] = []

    class Watched(TokenChain):
        def key(self, depth: int) -> int:
            asked.append(depth)
            return super().key(depth)

    assert index.search(Watched(ChainSpec(1, 5), 9, list(range(500, 1000)))) == []
    assert set(asked) == {1}


def test_what_travels_is_pinned() -> None:
    """Other nodes read these; docs/wire.md names them."""
    assert wire_key(ENDS_ONLY) == 0xC2B2AE3D27D4
    assert [wire_key(marked(key)) for key in (0, 5 << 16)] == [0x9E3779B97F4A, 0x9E3779B97F4A ^ 5]
