"""Anchors: the set that follows a tree against the tree itself, wire keys that repeat, and the choice of the stride."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixroute import Domain, TokenChain, UsageError
from prefixroute.endpoint.anchors import Anchors, choose_stride, expected_anchors, snapshot_bytes
from prefixroute.events import DEFAULT_NAMESPACE, BlocksRemoved, BlocksStored, EngineBatch, StreamRestarted
from prefixroute.keys.chain import ANCHOR_STRIDES, ChainSpec, wire_key
from prefixroute.keys.keyset import Delta
from prefixroute.keys.rice import encode_sorted
from prefixroute.residency.forest import Forest
from prefixroute.residency.mirror import Residency
from prefixroute.residency.published import Published
from prefixroute.residency.tree import RadixTree

SPEC = ChainSpec(1, 3)
ROOT = 42
NONE = Delta(set(), set())


def prompt(path: str) -> TokenChain:
    """A prompt with one block of one token a letter."""
    return TokenChain(SPEC, ROOT, [ord(letter) for letter in path])


def key(path: str) -> int:
    return prompt(path).key(len(path))


def store(tree: RadixTree, path: str, below: int = 0, tier: str = "gpu") -> None:
    tree.plant(ROOT)
    chain = prompt(path)
    tree.store(chain.key(below), below, [chain.block(i) for i in range(below, len(path))], tier)


def wires(*paths: str) -> set[int]:
    return {wire_key(key(path)) for path in paths}


# --- following a tree --------------------------------------------------------------------------------------


class Script:
    """A tree and who follows it at each stride, driven by drawn steps."""

    def __init__(self) -> None:
        self.tree = RadixTree(SPEC)
        self.anchors = {anchor_stride: Anchors(anchor_stride) for anchor_stride in ANCHOR_STRIDES}
        self.published: dict[int, set[int]] = {anchor_stride: set() for anchor_stride in ANCHOR_STRIDES}
        self.held: list[tuple[str, str]] = []
        """(path, tier) of blocks that are held there, with repetitions."""
        for anchor_stride, anchors in self.anchors.items():
            assert anchors.rebuild(self.tree) == NONE and anchors.anchor_stride == anchor_stride

    def step(self, data: st.DataObject) -> None:
        kind = data.draw(st.sampled_from(["store"] * 5 + ["remove"] * 4 + ["end"] * 3 + ["tier", "clear"]))
        tier = data.draw(st.sampled_from(["gpu", "gpu", "cpu", "disk"]))
        paths = sorted({path[:n] for path, _ in self.held for n in range(len(path) + 1)}) or [""]
        if kind == "store":
            above = data.draw(st.sampled_from(paths))
            path = above + data.draw(st.text("ab", min_size=1, max_size=3)) * data.draw(st.sampled_from([1, 1, 3, 12]))
            store(self.tree, path, len(above), tier)
            self.held += [(path[:n], tier) for n in range(len(above) + 1, len(path) + 1)]
        elif kind == "remove" and self.held:
            for _ in range(data.draw(st.integers(1, 6))):
                if self.held:
                    path, tier = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
                    self.tree.remove(key(path), len(path), 1, tier)
        elif kind == "end":
            self.tree.end_request(prompt(data.draw(st.sampled_from(paths))))
        elif kind == "tier":
            for path in [path for path, t in self.held if t == tier]:
                self.tree.remove(key(path), len(path), 1, tier)
            self.held = [(path, t) for path, t in self.held if t != tier]
        elif kind == "clear" and data.draw(st.integers(0, 3)) == 0:
            self.tree.clear()
            self.held.clear()

    def follow(self) -> None:
        # One tree has one follower as a rule: here each is shown the same touched blocks.
        touched = self.tree.take_touched()
        for anchor_stride, anchors in self.anchors.items():
            changes = anchors.follow(Shown(self.tree, touched))
            published = self.published[anchor_stride]
            assert not changes.added & published and changes.removed <= published
            self.published[anchor_stride] = published = published - changes.removed | changes.added
            anchors._check(self.tree)
            assert published == anchors.wires
            assert len(anchors.wires) == len(published)
        assert self.published[1] == set(map(wire_key, self.tree))


class Shown(RadixTree):
    """A tree whose touched blocks were taken already."""

    def __init__(self, tree: RadixTree, touched: dict[int, int]) -> None:
        vars(self).update(vars(tree))
        self._touched = touched


@settings(derandomize=True, deadline=None, max_examples=150, database=None)
@given(st.data())
def test_followed_anchors_equal_the_tree_after_every_step(data: st.DataObject) -> None:
    script = Script()
    for _ in range(data.draw(st.integers(1, 25))):
        for _ in range(data.draw(st.integers(1, 3))):
            script.step(data)
        script.follow()
        script.tree._check()
    for anchor_stride, anchors in script.anchors.items():
        assert anchors.rebuild(script.tree) == NONE, anchor_stride


def test_the_definition_on_one_path() -> None:
    tree = RadixTree(SPEC)
    path = "abcdefghij"
    store(tree, path)
    anchors = Anchors(4)
    changes = anchors.rebuild(tree)
    assert changes == Delta(wires("a", path[:4], path[:8], path), set())
    tree.end_request(prompt(path[:6]))
    assert anchors.follow(tree) == Delta(wires(path[:6]), set())
    store(tree, path[:3] + "x", below=3)
    assert anchors.follow(tree) == Delta(wires(path[:3], path[:3] + "x"), set())
    tree.remove(key(path[:3] + "x"), 4, 1, "gpu")
    assert anchors.follow(tree) == Delta(set(), wires(path[:3], path[:3] + "x"))
    store(tree, path + "k", below=10)
    assert anchors.follow(tree) == Delta(wires(path + "k"), wires(path))
    tree.remove(key(path[:7]), 7, 1, "gpu")
    assert anchors.follow(tree) == Delta(set(), wires(path[:8], path + "k"))
    # A request's end outlives a hole above it, and not its own block.
    tree.remove(key(path[:5]), 5, 1, "gpu")
    assert anchors.follow(tree) == Delta(set(), wires(path[:6]))
    store(tree, path[:5], below=4)
    assert anchors.follow(tree) == Delta(wires(path[:6]), set())
    tree.clear()
    assert anchors.follow(tree) == Delta(set(), wires("a", path[:4], path[:6]))
    store(tree, path)
    assert anchors.follow(tree) == Delta(wires("a", path[:4], path[:8], path), set())


@pytest.mark.parametrize("path", ["", "abcde", "abx"])
def test_request_that_is_not_wholly_held_leaves_no_end(path: str) -> None:
    tree = RadixTree(SPEC)
    store(tree, "abcd")
    anchors = Anchors(32)
    anchors.rebuild(tree)
    tree.end_request(prompt(path))
    assert anchors.follow(tree) == NONE
    assert tree.n_fixed() == 1


def test_an_anchor_is_a_block_at_its_depth() -> None:
    tree = RadixTree(SPEC)
    store(tree, "abcde")
    store(tree, "abxyz", below=2)
    for anchor_stride in ANCHOR_STRIDES:
        anchors = set(tree.anchors(anchor_stride))
        for path in ("abcde", "abxyz"):
            for n in range(1, 6):
                for depth in range(7):
                    expected = depth == n and key(path[:n]) in anchors
                    assert tree.is_anchor(key(path[:n]), depth, anchor_stride) == expected
        assert not tree.is_anchor(ROOT, 0, anchor_stride)


def test_a_tree_that_is_not_watched_touches_nothing() -> None:
    tree = RadixTree(SPEC)
    store(tree, "abcd")
    tree.end_request(prompt("ab"))
    assert tree.take_touched() == {}
    tree.watch_anchors(True)
    assert tree.take_touched() == {}
    tree.watch_anchors(True)
    tree.end_request(prompt("abc"))
    assert tree.take_touched() == {key("abc"): 3}
    store(tree, "abcde", below=4)
    tree.watch_anchors(False)
    assert tree.take_touched() == {}


def test_work_of_following_is_that_of_what_was_touched() -> None:
    tree = RadixTree(SPEC)
    store(tree, "abcdefgh" * 40)
    tree.watch_anchors(True)
    store(tree, "abcdefgh" * 40 + "xy", below=320)
    assert sorted(tree.take_touched().values()) == [320, 321, 322]
    store(tree, "abcdefgh" * 10 + "zz", below=80)
    assert sorted(tree.take_touched().values()) == [80, 81, 82]


def test_change_of_stride_tells_what_differs() -> None:
    tree = RadixTree(SPEC)
    path = "abcdefghijklmnopq"
    store(tree, path)
    anchors = Anchors(1)
    assert len(anchors.rebuild(tree).added) == len(anchors.wires) == 17
    before = set(anchors.wires)
    coarser = anchors.set_stride(8, tree)
    assert coarser == Delta(set(), before - wires("a", path[:8], path[:16], path))
    assert anchors.set_stride(4, tree) == Delta(wires(path[:4], path[:12]), set())
    store(tree, path[:9] + "x", below=9)
    assert anchors.follow(tree) == Delta(wires(path[:9], path[:9] + "x"), set())
    assert anchors.set_stride(4, tree) == NONE
    anchors._check(tree)


@pytest.mark.parametrize("anchor_stride", [0, 3, 64, -1])
def test_stride_divides_32(anchor_stride: int) -> None:
    for wrong in (lambda: Anchors(anchor_stride), lambda: Anchors(1).set_stride(anchor_stride, RadixTree(SPEC))):
        with pytest.raises(UsageError, match="is one of"):
            wrong()
    with pytest.raises(UsageError, match="is one of"):
        choose_stride(1, 1, 1, anchor_stride)


# --- wire keys that repeat ---------------------------------------------------------------------------------


class Pile(Published):
    """A source whose anchors are any keys at all."""

    def __init__(self) -> None:
        super().__init__()
        self.held: set[int] = set()

    @property
    def n_keys(self) -> int:
        return len(self.held)

    def __iter__(self) -> Iterator[int]:
        return iter(self.held)

    def anchors(self, anchor_stride: int) -> Iterator[int]:
        return iter(self.held)

    def is_anchor(self, key: int, depth: int, anchor_stride: int) -> bool:
        return key in self.held

    def n_fixed(self) -> int:
        return len(self.held)

    def touch(self, key: int) -> None:
        assert self._touched is not None
        self._touched[key] = 1


def test_wire_key_goes_with_the_last_block_that_has_it() -> None:
    rng = random.Random(5)
    pile, anchors = Pile(), Anchors(2)
    anchors.rebuild(pile)
    published: set[int] = set()
    seen = 0
    for _ in range(500):
        for _ in range(rng.randint(1, 4)):
            key = rng.randrange(6) << 16 | rng.randrange(5)
            pile.touch(key)
            pile.held ^= {key} if rng.random() < 0.8 else set()
        changes = anchors.rebuild(pile) if rng.random() < 0.1 else anchors.follow(pile)
        assert not changes.added & published and changes.removed <= published
        published = published - changes.removed | changes.added
        assert published == {wire_key(key) for key in pile.held}
        anchors._check(pile)
        seen += len(pile.held) > len(anchors.wires)
    assert seen > 100


# --- several trees -----------------------------------------------------------------------------------------


class Trees:
    """What several groups hold, as a residency keeps it."""

    def __init__(self) -> None:
        self.trees: list[RadixTree] = []
        self.published: RadixTree | Forest = RadixTree(SPEC)

    def add(self) -> None:
        self.trees.append(RadixTree(SPEC) if self.trees else self.published)  # type: ignore[arg-type]
        if len(self.trees) > 1:
            self.published = Forest(self.trees, self.published)

    def restart(self) -> None:
        for tree in self.trees:
            tree.clear()
        self.trees, before, self.published = [], self.published, RadixTree(SPEC)
        self.published.replace(before)


@settings(derandomize=True, deadline=None, max_examples=150, database=None)
@given(st.data())
def test_anchors_of_several_groups_are_held_by_all_of_them(data: st.DataObject) -> None:
    forest, anchors = Trees(), Anchors(data.draw(st.sampled_from(ANCHOR_STRIDES)))
    anchors.rebuild(forest.published)
    held: list[list[str]] = []
    for _ in range(data.draw(st.integers(1, 30))):
        kind = data.draw(st.sampled_from(["tree", *["store"] * 4, "remove", "remove", "end", "restart"]))
        if kind == "tree" and len(held) < 3:
            forest.add()
            held.append([])
        elif kind == "restart" and data.draw(st.booleans()):
            forest.restart()
            held.clear()
        elif held:
            at = data.draw(st.integers(0, len(held) - 1))
            tree, mine = forest.trees[at], held[at]
            if kind == "store":
                path = data.draw(st.sampled_from(["aaaa", "aaaabbbb", "aaab", "aaaabbbbb" * 4, "b"]))
                store(tree, path)
                mine += [path[:n] for n in range(1, len(path) + 1)]
            elif kind == "remove" and mine:
                path = mine.pop()
                tree.remove(key(path), len(path), 1, "gpu")
            elif kind == "end":
                path = data.draw(st.sampled_from(["aa", "aaaabbb", "b"]))
                for tree in forest.trees:
                    tree.end_request(prompt(path))
        forest.published.collect()
        anchors.follow(forest.published)
        anchors._check(forest.published)
        forest.published._check()
        in_all = set.intersection(*({wire_key(key(path)) for path in set(mine)} for mine in held)) if held else set()
        assert anchors.wires <= in_all
        assert anchors.anchor_stride > 1 or anchors.wires == {wire_key(k) for k in forest.published}


def test_anchors_follow_an_engine_through_its_residency() -> None:
    domain = Domain("m", "t", 4)
    residency = Residency(domain)
    anchors = Anchors(8)
    anchors.rebuild(residency.published())
    tokens = list(range(80))
    chain = TokenChain(ChainSpec(4, domain.mix), domain.root_key(DEFAULT_NAMESPACE), tokens)
    residency.apply(EngineBatch((BlocksStored(tuple(range(20)), None, tokens, 4),)))
    residency.end_request(TokenChain(ChainSpec(4, domain.mix), domain.root_key(DEFAULT_NAMESPACE), tokens[:42]))
    assert set(anchors.follow(residency.published()).added) == {
        wire_key(chain.key(depth)) for depth in (1, 8, 10, 16, 20)
    }
    residency.apply(EngineBatch((BlocksRemoved((19, 18)),)))
    changes = anchors.follow(residency.published())
    assert changes == Delta({wire_key(chain.key(18))}, {wire_key(chain.key(20))})
    residency.apply(EngineBatch((StreamRestarted(), BlocksStored((1,), None, tokens[:4], 4))))
    changes = anchors.follow(residency.published())
    assert changes == Delta(set(), {wire_key(chain.key(depth)) for depth in (8, 10, 16, 18)})
    anchors._check(residency.published())


# --- the choice of the stride ------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 10, 1000, 100_000])
def test_expected_size_is_that_of_the_codec(n: int) -> None:
    keys = np.array(sorted(random.Random(n).sample(range(2**48), n)), np.uint64)
    assert snapshot_bytes(n) == pytest.approx(len(encode_sorted(keys, 2**48)), rel=0.02, abs=16)
    assert snapshot_bytes(0) == 0


def test_expected_anchors_are_near_the_anchors_of_conversations() -> None:
    rng = random.Random(11)
    tree = RadixTree(SPEC)
    tree.plant(ROOT)
    heads = [[rng.randrange(1000) for _ in range(rng.randint(20, 119))] for _ in range(10)]
    for _ in range(60):
        tokens = list(rng.choice(heads))
        for _ in range(rng.randint(1, 5)):
            tokens += [rng.randrange(10**6) for _ in range(rng.randint(10, 40))]
            chain = TokenChain(SPEC, ROOT, tokens)
            tree.store(ROOT, 0, [chain.block(i) for i in range(chain.depth)], "gpu")
            tree.end_request(TokenChain(SPEC, ROOT, tokens[:-5]))
    ends = tree.n_fixed()
    for anchor_stride in ANCHOR_STRIDES:
        true = sum(1 for _ in tree.anchors(anchor_stride))
        expected = expected_anchors(tree.n_keys, ends, anchor_stride)
        assert true - len(heads) <= expected <= true + ends / anchor_stride


def test_finest_stride_that_fits_is_chosen() -> None:
    blocks, ends = 100_000, 3_000
    sizes = {
        anchor_stride: snapshot_bytes(expected_anchors(blocks, ends, anchor_stride)) for anchor_stride in ANCHOR_STRIDES
    }
    assert list(sizes.values()) == sorted(sizes.values(), reverse=True)
    for anchor_stride, size in sizes.items():
        assert choose_stride(blocks, ends, size) == anchor_stride
        assert choose_stride(blocks, ends, size - 1) == min(anchor_stride * 2, 32)
    assert choose_stride(blocks, ends, 0) == 32
    assert choose_stride(0, 0, 1000) == 1
    assert choose_stride(0, 0, 1000, 32) == 1


def test_stride_falls_late_and_does_not_flap() -> None:
    ends, budget = 500, 50_000.0
    anchor_stride, changes = 1, []
    up = list(range(1_000, 200_000, 1_000))
    for blocks in up:
        chosen = choose_stride(blocks, ends, budget, anchor_stride)
        assert chosen >= anchor_stride
        assert snapshot_bytes(expected_anchors(blocks, ends, chosen)) <= budget
        changes += [chosen] if chosen != anchor_stride else []
        anchor_stride = chosen
    assert changes == [2, 4, 8, 16, 32][: len(changes)] and len(changes) >= 4
    rng = random.Random(1)
    for _ in range(200):
        assert choose_stride(round(199_000 * rng.uniform(0.55, 1)), ends, budget, anchor_stride) == anchor_stride
    for blocks in reversed(up):
        chosen = choose_stride(blocks, ends, budget, anchor_stride)
        assert chosen <= anchor_stride
        if chosen < anchor_stride:
            assert snapshot_bytes(expected_anchors(blocks, ends, chosen)) < budget / 2
        anchor_stride = chosen
    assert anchor_stride == 1
