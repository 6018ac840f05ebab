"""The merged index: against exact depths, then with copies that are cut short or collide, then what a search costs."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixroute import TokenChain, UsageError
from prefixroute.chain import STRIDE, ChainSpec
from prefixroute.index import DEEPEST, MergedIndex, Stratum

SPEC = ChainSpec(1, 5)


def prompt(depth: int, tail: int = 0) -> TokenChain:
    """A prompt of `depth` blocks of one token; the last `tail` ones are this prompt's own."""
    return TokenChain(SPEC, 9, [*range(depth - tail), *range(10**6 + depth * 1000, 10**6 + depth * 1000 + tail)])


def wires(chain: TokenChain, depths: Iterable[int]) -> set[int]:
    return {chain.wire(depth) for depth in depths}


def index_of(depths: dict[str, int], chain: TokenChain) -> MergedIndex:
    index = MergedIndex()
    for name, depth in depths.items():
        index.join(name)
        index.update(name, wires(chain, range(1, depth + 1)), ())
    return index


def found(index: MergedIndex, chain: TokenChain, keep: int = DEEPEST) -> list[tuple[int, set[str]]]:
    """Strata with names; each endpoint is in one of them."""
    strata = index.search(chain, keep)
    names = [name for stratum in strata for name in index.names(stratum.mask)]
    assert len(names) == len(set(names))
    return [(stratum.depth, set(index.names(stratum.mask))) for stratum in strata]


def expected(depths: dict[str, int], keep: int = DEEPEST) -> list[tuple[int, set[str]]]:
    distinct = sorted({depth for depth in depths.values() if depth}, reverse=True)[:keep]
    return [(depth, {name for name in depths if depths[name] == depth}) for depth in distinct]


def test_a_search_within_some_endpoints_sees_no_others() -> None:
    chain = prompt(40)
    index = index_of({f"n{i}/0": depth for i, depth in enumerate((40, 39, 38, 37, 5))}, chain)
    shallow = index.bit("n4/0") | index.bit("n2/0")
    assert index.search(chain, keep=4, within=shallow) == [
        Stratum(38, index.bit("n2/0")),
        Stratum(5, index.bit("n4/0")),
    ]
    assert index.search(chain, within=0) == []


# --- exact -------------------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=150, database=None)
@given(st.data(), st.integers(0, 3 * STRIDE + 5), st.integers(0, 30), st.integers(1, 8))
def test_strata_are_the_deepest_distinct_depths(data: st.DataObject, length: int, peers: int, keep: int) -> None:
    edges = sorted({0, 1, 31, 32, 33, 63, 64, 65, length} & set(range(length + 1)))
    depth = st.sampled_from(edges) | st.integers(0, length)
    depths = {f"n{i}/0": data.draw(depth) for i in range(peers)}
    chain = prompt(length)
    index = index_of(depths, chain)
    index._check({name: wires(chain, range(1, d + 1)) for name, d in depths.items()})
    assert len(index) == max(depths.values(), default=0)
    assert found(index, prompt(length), keep) == expected(depths, keep)
    assert found(index, prompt(length), 1000) == expected(depths, 1000)
    for name, d in depths.items():
        assert index.depth(chain, index.bit(name)) == d


def test_search_is_exact_while_endpoints_come_go_and_change() -> None:
    rng = random.Random(7)
    trunk, fork = prompt(100), prompt(100, tail=40)
    index = MergedIndex()
    held: dict[str, set[int]] = {}
    depths: dict[str, tuple[int, int]] = {}
    for _ in range(400):
        name = f"e{rng.randrange(12)}"
        if name not in held:
            index.join(name)
            held[name], depths[name] = set(), (0, 0)
        elif rng.random() < 0.2:
            index.leave(name, held.pop(name))
            del depths[name]
        if name in held:
            depths[name] = (rng.choice([0, 1, 59, 60, 61, rng.randint(0, 100)]), rng.choice([0, 60, 80, 100]))
            new = wires(trunk, range(1, depths[name][0] + 1)) | wires(fork, range(1, depths[name][1] + 1))
            index.update(name, new - held[name], held[name] - new)
            held[name] = new
        index._check(held)
        for chain, own in ((trunk, 0), (fork, 1)):
            true = {name: max(depths[name][own], min(60, max(depths[name]))) for name in depths}
            assert found(index, chain, 100) == expected(true, 100)


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 64, 100])
def test_prompt_that_nobody_holds_and_prompt_shorter_than_a_block(length: int) -> None:
    index = index_of({"a": 50}, prompt(50))
    assert index.search(TokenChain(SPEC, 10, list(range(length)))) == []
    assert MergedIndex().search(prompt(length)) == []


# --- bits --------------------------------------------------------------------------------------------------


def test_bit_of_an_endpoint_that_left_is_used_again_and_brings_nothing_along() -> None:
    chain = prompt(10)
    index = index_of({"a": 3, "b": 5, "c": 10}, chain)
    bit = index.bit("b")
    index.leave("b", wires(chain, range(1, 6)))
    assert (index.bit("b"), len(index)) == (0, 10)
    index.join("d")
    assert index.bit("d") == bit
    assert found(index, chain) == [(10, {"c"}), (3, {"a"})]
    index.join("e")
    assert sorted(index.bit(name) for name in "acde") == [1, 2, 4, 8]


def test_keys_that_nobody_holds_any_more_are_dropped() -> None:
    chain = prompt(10)
    index = index_of({"a": 3, "b": 5}, chain)
    index.update("b", (), wires(chain, [5, 9]))
    assert len(index) == 4
    index.leave("b", wires(chain, range(1, 5)))
    assert len(index) == 3
    index.leave("a", wires(chain, range(1, 4)))
    assert len(index) == 0
    index._check({})


def test_endpoint_joins_once() -> None:
    index = index_of({"a": 1}, prompt(1))
    with pytest.raises(UsageError, match="'a' is in the index already"):
        index.join("a")


# --- copies that are not closed under prefixes -------------------------------------------------------------


def holes(held: dict[str, set[int]], chain: TokenChain) -> MergedIndex:
    index = MergedIndex()
    for name, depths in held.items():
        index.join(name)
        index.update(name, wires(chain, depths), ())
    return index


@pytest.mark.parametrize("length", [20, 32, 33, 64, 90])
def test_copy_without_the_block_above_its_landing_is_walked(length: int) -> None:
    """A copy that is cut short in the middle of a transfer, or a key of another block that has the same 48 bits."""
    chain = prompt(length)
    deep = set(range(1, length + 1))
    for missing in (length - 1, length - 2):
        index = holes({"whole": deep, "cut": deep - {missing}}, chain)
        assert found(index, chain) == [(length, {"whole"}), (missing - 1, {"cut"})]
    index = holes({"cut": {1, length}, "whole": set(range(1, 8))}, chain)
    assert found(index, chain) == [(7, {"whole"}), (1, {"cut"})]


def test_copies_that_are_walked_do_not_hide_whole_ones() -> None:
    """What a walk finds is shallow, so it must not count among the deepest strata that are asked for."""
    chain = prompt(96)
    held = {f"cut{i}": {*range(1, 10 + i), 32, 64, 96} for i in range(5)}
    held |= {"whole": set(range(1, 61)), "half": set(range(1, 41))}
    index = holes(held, chain)
    assert found(index, chain, 2) == [(60, {"whole"}), (40, {"half"})]
    assert found(index, chain, 3) == [(60, {"whole"}), (40, {"half"}), (13, {"cut4"})]
    index = holes({"cut": {*range(1, 41), 64, 96}, "half": set(range(1, 41))}, chain)
    assert found(index, chain) == [(40, {"cut", "half"})]


@settings(derandomize=True, deadline=None, max_examples=100, database=None)
@given(st.lists(st.sets(st.integers(1, 70)), max_size=6), st.integers(1, 5))
def test_any_sets_at_all_are_searched_and_a_stratum_is_held_at_its_depth(sets: list[set[int]], keep: int) -> None:
    chain = prompt(70)
    held = {f"n{i}": depths for i, depths in enumerate(sets)}
    strata = found(holes(held, chain), chain, keep)
    assert len(strata) <= keep
    assert [depth for depth, _ in strata] == sorted({depth for depth, _ in strata}, reverse=True)
    for depth, names in strata:
        for name in names:
            # Never over-estimated by a single stray key: the landing and the two blocks above it are held.
            assert {d for d in (depth, depth - 1, depth - 2) if d > 0} <= held[name]


# --- cost --------------------------------------------------------------------------------------------------


class Counted(TokenChain):
    """A prompt that counts which keys were asked for."""

    __slots__ = ("asked",)

    def __init__(self, depth: int) -> None:
        super().__init__(SPEC, 9, list(range(depth)))
        self.asked: list[int] = []

    def key(self, depth: int) -> int:
        self.asked.append(depth)
        return super().key(depth)


def test_miss_costs_one_key() -> None:
    chain = Counted(4096)
    assert index_of({"a": 100}, TokenChain(SPEC, 8, list(range(100)))).search(chain) == []
    assert chain.asked == [1]


@pytest.mark.parametrize("depths", [(4096, 4096, 512), (33, 700, 700), (1, 2, 3, 4, 5), (100, 2000, 3000, 4000)])
def test_cost_follows_distinct_depths_and_not_endpoints(depths: tuple[int, ...]) -> None:
    asked = []
    trunk = prompt(4096)
    for times in (1, 20):
        chain = Counted(4096)
        index = index_of({f"{i} {j}": depth for i in range(times) for j, depth in enumerate(depths)}, trunk)
        index.search(chain)
        asked.append(chain.asked)
        distinct = min(len(set(depths)), DEEPEST)
        # First block and stride ends; then 5 halvings of a stride and 2 checks for each depth.
        assert len(chain.asked) <= 2 + max(depths) // STRIDE + distinct * 7
    assert asked[0] == asked[1]


def test_depth_of_one_endpoint_takes_a_bisection() -> None:
    chain = Counted(4095)
    index = index_of({"a": 1234}, prompt(4096))
    assert index.depth(chain, index.bit("a")) == 1234
    assert len(chain.asked) == 12


def test_stratum_names_its_parts() -> None:
    index = index_of({"a": 2}, prompt(3))
    assert index.search(prompt(3)) == [Stratum(depth=2, mask=1)]
