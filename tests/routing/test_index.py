"""The merged index: against exact depths, then with copies that are cut short or collide, then what a search costs."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matching import matched

from prefixroute import TokenChain, UsageError
from prefixroute.endpoint.anchors import Anchors
from prefixroute.keys.chain import ANCHOR_STRIDES, STRIDE, ChainSpec, wire_key
from prefixroute.residency.tree import RadixTree
from prefixroute.routing.index import DEEPEST, MergedIndex, Stratum

SPEC = ChainSpec(1, 5)


def prompt(depth: int, tail: int = 0) -> TokenChain:
    """A prompt of `depth` blocks of one token; the last `tail` ones are this prompt's own."""
    return TokenChain(SPEC, 9, [*range(depth - tail), *range(10**6 + depth * 1000, 10**6 + depth * 1000 + tail)])


def wires(chain: TokenChain, depths: Iterable[int]) -> set[int]:
    return {wire_key(chain.key(depth)) for depth in depths}


def index_of(depths: dict[str, int], chain: TokenChain) -> MergedIndex:
    index = MergedIndex()
    for name, depth in depths.items():
        index.join(name)
        index.update(name, wires(chain, range(1, depth + 1)), ())
    return index


def leave(index: MergedIndex, name: str, keys: Iterable[int]) -> None:
    """Take an endpoint out with all the wire keys that it was given."""
    bit = index.retire(name)
    index.mark(bit, (), keys)
    index.release(bit)


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
            leave(index, name, held.pop(name))
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
    leave(index, "b", wires(chain, range(1, 6)))
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
    leave(index, "b", wires(chain, range(1, 5)))
    assert len(index) == 3
    leave(index, "a", wires(chain, range(1, 4)))
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


@pytest.mark.parametrize("length", [20, 32, 33, 64, 90, 500])
def test_held_key_of_a_copy_with_holes_proves_all_of_its_prefix(length: int) -> None:
    """A copy in the middle of an update."""
    chain = prompt(length)
    deep = set(range(1, length + 1))
    for missing in (length - 1, length - 2):
        index = holes({"whole": deep, "cut": deep - {missing}}, chain)
        strata = found(index, chain)
        # A hole at the end of a stride hides what is below it; any other is not even looked at.
        assert strata == [(length, {"whole", "cut"})] or strata == [(length, {"whole"}), (missing - 1, {"cut"})]
        assert (missing % 32 == 0) == (len(strata) == 2)


def test_holes_of_one_copy_do_not_hide_what_others_hold() -> None:
    chain = prompt(96)
    held = {f"cut{i}": {*range(1, 10 + i), *range(20, 30)} for i in range(5)}
    held |= {"whole": set(range(1, 61)), "half": set(range(1, 41))}
    index = holes(held, chain)
    assert found(index, chain, 2) == [(60, {"whole"}), (40, {"half"})]


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
            assert {1, depth} <= held[name]


# --- coarse endpoints --------------------------------------------------------------------------------------


class Cache:
    """One endpoint's tree, published at stride `anchor_stride`, and what of it is in an index."""

    def __init__(self, index: MergedIndex, name: str, anchor_stride: int) -> None:
        self.index, self.name, self.anchors = index, name, Anchors(anchor_stride)
        self.tree = RadixTree(SPEC)
        self.anchors.rebuild(self.tree)
        index.join(name)
        index.set_stride(name, anchor_stride)

    def serve(self, chain: TokenChain, ends: bool) -> None:
        """Hold a prompt."""
        self.tree.plant(chain.root)
        self.tree.store(chain.root, 0, [chain.block(i) for i in range(chain.depth)], "gpu")
        if ends:
            self.tree.end_request(chain)

    def evict(self, rng: random.Random) -> None:
        """Lose the last few blocks of some prompt."""
        leaves = [edge for edge in self.tree._edges() if edge.keys and not edge.children]
        if leaves:
            leaf = rng.choice(leaves)
            n = min(rng.randint(1, 20), len(leaf.keys))
            self.tree.remove(leaf.keys[-1], leaf.depth + len(leaf.keys), n, "gpu")

    def publish(self, anchor_stride: int = 0) -> None:
        changes = self.anchors.set_stride(anchor_stride, self.tree) if anchor_stride else self.anchors.follow(self.tree)
        self.index.update(self.name, changes.added, changes.removed)
        self.index.set_stride(self.name, self.anchors.anchor_stride)

    def leave(self) -> None:
        leave(self.index, self.name, list(self.anchors.wires))

    def deepest(self, chain: TokenChain) -> int:
        """What a search can know: the deepest anchor on the prompt's path."""
        published = set(self.anchors.wires)
        return max((depth for depth in range(1, chain.depth + 1) if wire_key(chain.key(depth)) in published), default=0)


def conversations(rng: random.Random, n: int) -> list[TokenChain]:
    """Prompts that go on, fork or begin anew."""
    paths: list[list[int]] = []
    while len(paths) < n:
        tokens = list(rng.choice(paths)) if paths and rng.random() < 0.85 else [rng.randrange(3)]
        if rng.random() < 0.5:
            tokens = tokens[: rng.randint(1, len(tokens))]
        tokens += [rng.randrange(10**6) for _ in range(rng.choice([0, 1, 5, 31, 32, 33, rng.randint(1, 70)]))]
        paths.append(tokens[:150])
    return [TokenChain(SPEC, 9, tokens) for tokens in paths]


def probe_all(index: MergedIndex, caches: list[Cache], chains: list[TokenChain], keep: int) -> None:
    for chain in chains:
        depths = {cache.name: cache.deepest(chain) for cache in caches}
        assert found(index, chain, 1000) == expected(depths, 1000)
        assert found(index, chain, keep) == expected(depths, keep)
        for cache in caches:
            exact, known = matched(cache.tree, chain), depths[cache.name]
            assert index.depth(chain, index.bit(cache.name)) == known <= exact
            # Never more than a stride is lost, and nothing when the match ends at an anchor.
            assert exact - known < cache.anchors.anchor_stride
            assert known == exact or not cache.tree.is_anchor(chain.key(exact), exact, cache.anchors.anchor_stride)


@settings(derandomize=True, deadline=None, max_examples=60, database=None)
@given(
    st.integers(0, 10**6), st.lists(st.sampled_from([1, 1, *ANCHOR_STRIDES]), min_size=1, max_size=9), st.integers(1, 5)
)
def test_coarse_search_finds_the_deepest_anchor_of_each_endpoint(seed: int, strides: list[int], keep: int) -> None:
    rng = random.Random(seed)
    chains = conversations(rng, 25)
    index = MergedIndex()
    caches = [Cache(index, f"n{i}", anchor_stride) for i, anchor_stride in enumerate(strides)]
    for cache in caches:
        for chain in rng.sample(chains, rng.randint(0, 12)):
            cache.serve(chain, ends=rng.random() < 0.7)
        for _ in range(rng.randint(0, 3)):
            cache.evict(rng)
        cache.publish()
    index._check({cache.name: set(cache.anchors.wires) for cache in caches})
    probe_all(index, caches, rng.sample(chains, 12), keep)


def test_coarse_search_is_right_while_strides_change_and_endpoints_come_and_go() -> None:
    rng = random.Random(3)
    chains = conversations(rng, 40)
    index = MergedIndex()
    caches: list[Cache] = []
    for step in range(150):
        if len(caches) < 2 or rng.random() < 0.2:
            caches.append(Cache(index, f"s{step}", rng.choice(ANCHOR_STRIDES)))
        elif rng.random() < 0.15:
            caches.pop(rng.randrange(len(caches))).leave()
        cache = rng.choice(caches)
        for chain in rng.sample(chains, rng.randint(0, 6)):
            cache.serve(chain, ends=True)
        cache.evict(rng)
        cache.publish(rng.choice(ANCHOR_STRIDES) if rng.random() < 0.3 else 0)
        index._check({cache.name: set(cache.anchors.wires) for cache in caches})
        probe_all(index, caches, rng.sample(chains, 3), 3)


@pytest.mark.parametrize("anchor_stride", ANCHOR_STRIDES)
@pytest.mark.parametrize("end", [1, 2, 7, 31, 32, 33, 45, 64, 90])
def test_prompt_that_continues_a_request_is_matched_whole(anchor_stride: int, end: int) -> None:
    index = MergedIndex()
    cache = Cache(index, "a", anchor_stride)
    trunk = prompt(100)
    cache.serve(trunk, ends=False)
    cache.tree.end_request(prompt(end))
    cache.publish()
    tokens = [*range(end), 10**7, *range(10**6, 10**6 + 50)]
    assert found(index, TokenChain(SPEC, 9, tokens)) == [(end, {"a"})]
    assert found(index, prompt(end)) == [(end, {"a"})]
    assert found(index, trunk) == [(100, {"a"})]


def test_fork_that_nobody_made_yet_is_under_estimated_until_it_is() -> None:
    index = MergedIndex()
    cache = Cache(index, "a", 16)
    cache.serve(prompt(100), ends=True)
    cache.publish()
    for fork, known in ((1, 1), (15, 1), (16, 16), (61, 48), (99, 96), (100, 100)):
        chain = TokenChain(SPEC, 9, [*range(fork), *range(10**6, 10**6 + 40)])
        assert found(index, chain) == [(known, {"a"})]
    chain = TokenChain(SPEC, 9, [*range(61), *range(10**6, 10**6 + 40)])
    cache.serve(chain, ends=False)
    cache.publish()
    assert found(index, TokenChain(SPEC, 9, [*range(61), *range(10**7, 10**7 + 40)])) == [(61, {"a"})]


def test_search_within_some_endpoints_sees_no_others_of_any_stride() -> None:
    index = MergedIndex()
    caches = [Cache(index, f"n{i}", anchor_stride) for i, anchor_stride in enumerate((1, 4, 16, 1, 32))]
    for i, cache in enumerate(caches):
        cache.serve(prompt(90 - i), ends=True)
        cache.publish()
    shallow = index.bit("n3") | index.bit("n4")
    assert index.search(prompt(100), within=shallow) == [Stratum(87, index.bit("n3")), Stratum(86, index.bit("n4"))]
    assert index.search(prompt(100), within=index.bit("n4")) == [Stratum(86, index.bit("n4"))]
    assert index.search(prompt(100), within=0) == []


@pytest.mark.interpreted
def test_bit_that_a_coarse_endpoint_leaves_is_exact_for_the_next() -> None:
    index = MergedIndex()
    Cache(index, "a", 16).leave()
    index.join("b")
    index.update("b", wires(prompt(50), range(1, 51)), ())
    index._check({"b": wires(prompt(50), range(1, 51))})
    chain = Counted(1024)
    assert found(index, chain) == [(50, {"b"})]
    # Bisected as an exact endpoint is, and checked.
    assert len(chain.asked) <= 3 + 5 + 2
    with pytest.raises(UsageError, match="is one of"):
        index.set_stride("b", 3)


@settings(derandomize=True, deadline=None, max_examples=100, database=None)
@given(st.lists(st.tuples(st.sets(st.integers(1, 70)), st.sampled_from(ANCHOR_STRIDES)), max_size=6), st.integers(1, 5))
def test_any_coarse_sets_are_searched_and_a_stratum_is_held(sets: list[tuple[set[int], int]], keep: int) -> None:
    """Copies that are cut short in the middle of a transfer, at any stride."""
    chain = prompt(70)
    held = {f"n{i}": depths for i, (depths, _) in enumerate(sets)}
    index = holes(held, chain)
    for name, (_, anchor_stride) in zip(held, sets, strict=True):
        index.set_stride(name, anchor_stride)
    strata = found(index, chain, keep)
    assert len(strata) <= keep
    assert [depth for depth, _ in strata] == sorted({depth for depth, _ in strata}, reverse=True)
    assert all(depth in held[name] for depth, names in strata for name in names)


# --- cost --------------------------------------------------------------------------------------------------


class Counted(TokenChain):
    """A prompt that counts which keys were asked for."""

    __slots__ = ("asked",)

    def __init__(self, depth: int, root: int = 9) -> None:
        super().__init__(SPEC, root, list(range(depth)))
        self.asked: list[int] = []

    def key(self, depth: int) -> int:
        self.asked.append(depth)
        return super().key(depth)


@pytest.mark.interpreted
def test_miss_costs_one_key() -> None:
    chain = Counted(4096)
    assert index_of({"a": 100}, TokenChain(SPEC, 8, list(range(100)))).search(chain) == []
    assert chain.asked == [1]


@pytest.mark.interpreted
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


@pytest.mark.interpreted
@pytest.mark.parametrize("anchor_stride", ANCHOR_STRIDES[1:])
@pytest.mark.parametrize("depths", [(4096, 4096, 512), (33, 700, 700), (1, 2, 3, 4, 5), tuple(range(100, 4000, 300))])
def test_cost_of_a_coarse_search_is_bounded_by_strides_and_distinct_depths(
    anchor_stride: int, depths: tuple[int, ...]
) -> None:
    asked = []
    trunk = prompt(4096)
    for times in (1, 20):
        chain = Counted(4096)
        index = MergedIndex()
        for i in range(times):
            for j, depth in enumerate(depths):
                index.join(f"{i} {j}")
                index.set_stride(f"{i} {j}", anchor_stride)
                index.update(f"{i} {j}", wires(trunk, {1, depth, *range(anchor_stride, depth, anchor_stride)}), ())
        assert [depth for depth, _ in found(index, chain)] == sorted(set(depths), reverse=True)[:DEEPEST]
        asked.append(chain.asked)
        # Stride ends; for each depth the halvings down to the anchor stride, then the depths short of the next one.
        distinct = min(len(set(depths)), DEEPEST)
        halvings = (STRIDE // anchor_stride).bit_length() - 1
        assert len(chain.asked) <= 2 + max(depths) // STRIDE + distinct * (halvings + anchor_stride - 1)
    assert asked[0] == asked[1]


@pytest.mark.interpreted
def test_coarse_miss_costs_one_key_and_a_prompt_held_whole_no_end() -> None:
    index = MergedIndex()
    cache = Cache(index, "a", 16)
    cache.serve(prompt(4096), ends=True)
    cache.publish()
    miss = Counted(4096, root=8)
    assert (index.search(miss), miss.asked) == ([], [1])
    chain = Counted(4096)
    assert found(index, chain) == [(4096, {"a"})]
    assert chain.asked == [1, *range(32, 4097, 32)]


@pytest.mark.interpreted
def test_depth_of_one_coarse_endpoint_takes_a_bisection_and_a_stride() -> None:
    index = MergedIndex()
    cache = Cache(index, "a", 16)
    cache.serve(prompt(1234), ends=True)
    cache.publish()
    chain = Counted(4095)
    assert index.depth(chain, index.bit("a")) == 1234
    assert len(chain.asked) <= 1 + 8 + 15


@pytest.mark.interpreted
def test_depth_of_one_endpoint_takes_a_bisection() -> None:
    chain = Counted(4095)
    index = index_of({"a": 1234}, prompt(4096))
    assert index.depth(chain, index.bit("a")) == 1234
    assert len(chain.asked) == 12


def test_stratum_names_its_parts() -> None:
    index = index_of({"a": 2}, prompt(3))
    assert index.search(prompt(3)) == [Stratum(depth=2, mask=1)]
