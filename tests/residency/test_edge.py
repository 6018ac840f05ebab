"""What an edge, a cursor and a set of changes do for many blocks at once, against the same block by block."""

from __future__ import annotations

import random
from array import array

import pytest

from prefixroute.errors import UsageError
from prefixroute.keys.chain import ChainCursor, ChainSpec
from prefixroute.keys.keyset import Delta
from prefixroute.residency.edge import Edge
from prefixroute.residency.tree import RadixTree

SIZE = 8
TIERS = ("gpu", "cpu")


def edge_of(*counts: list[int], extras: dict[int, bytes] | None = None) -> Edge:
    """An edge whose blocks have these counts, tier by tier; block i consists of the byte i."""
    edge = Edge(Edge(None, 0), 0)
    n = len(counts[0])
    edge.keys = array("Q", range(1, n + 1))
    edge.data = bytearray(b"".join(bytes([i % 256]) * SIZE for i in range(n)))
    edge.counts = {tier: array("I", c) for tier, c in zip(("gpu", "cpu", "disk"), counts, strict=False)}
    edge.extras = extras or {}
    return edge


def sparse(rng: random.Random, n: int) -> list[int]:
    share = rng.choice((0.0, 0.01, 0.5, 0.99, 1.0))
    return [rng.randint(1, 3) if rng.random() < share else 0 for _ in range(n)]


@pytest.mark.parametrize("seed", range(40))
def test_ends_of_runs_are_those_that_a_look_at_each_block_finds(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.choice((1, 2, 255, 256, 257, 700))
    edge = edge_of(*[sparse(rng, n) for _ in range(rng.randint(1, 3))])
    held = [any(c[i] for c in edge.counts.values()) for i in range(n)]
    assert edge.held_end() == max((i + 1 for i in range(n) if held[i]), default=0)
    for _ in range(20):
        start = rng.randint(0, n)
        stop = rng.randint(start, n)
        expected = next((i for i in range(start, stop) if not edge.held(i, TIERS)), stop)
        assert edge.held_until(start, stop, TIERS) == expected
    assert edge.held_until(0, n, ("nowhere",)) == 0


@pytest.mark.parametrize("seed", range(20))
def test_counts_of_many_blocks_change_together_or_not_at_all(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.choice((1, 2, 40))
    edge = edge_of([rng.randint(0, 3) for _ in range(n)])
    for _ in range(30):
        lower = rng.randrange(n)
        upper, change = rng.randint(lower + 1, n), rng.choice((1, -1))
        before = list(edge.counts["gpu"])
        lacks = edge.count(lower, upper, "gpu", change)
        first = next((i for i in range(lower, upper) if before[i] + change < 0), None)
        assert lacks == first
        changed = [c + change * (lower <= i < upper) for i, c in enumerate(before)]
        assert list(edge.counts["gpu"]) == (before if first is not None else changed)
    assert edge.count(0, 1, "new", 1) is None
    assert list(edge.counts["new"]) == [1] + [0] * (n - 1)


def test_common_blocks_are_compared_with_their_items() -> None:
    blocks = [bytes([i]) * SIZE for i in range(10)]
    edge = edge_of([1] * 8)
    assert [edge.common(at, blocks, at, SIZE) for at in (0, 3, 7)] == [8, 5, 1]
    assert edge.common(2, blocks, 3, SIZE) == 0
    assert edge.common(0, [*blocks[:4], b"?" * SIZE], 0, SIZE) == 4
    assert edge.common(0, [*blocks[:2], blocks[2] + b"item"], 0, SIZE) == 2
    marked = edge_of([1] * 8, extras={2: b"item"})
    assert marked.common(0, blocks, 0, SIZE) == 2
    assert marked.common(0, [*blocks[:2], blocks[2] + b"item", blocks[3]], 0, SIZE) == 4
    assert marked.blocks(1, 4, SIZE) == blocks[1] + blocks[2] + b"item" + blocks[3]


@pytest.mark.parametrize("start", [0, 1, 31, 32, 33])
def test_cursor_gives_the_same_keys_for_blocks_at_once(start: int) -> None:
    spec = ChainSpec(2, 77)
    blocks = [bytes([i]) * (8 + 32 * (i % 7 == 3)) for i in range(100)]
    one, many = ChainCursor(spec, 5), ChainCursor(spec, 5)
    keys = [one.push(block) for block in blocks]
    assert many.extend([]) == []
    assert many.extend(blocks[:start]) + many.extend(blocks[start:]) == keys
    assert (one.depth, one.key) == (many.depth, many.key) == (100, keys[-1])
    assert one.push(b"x" * 8) == many.push(b"x" * 8)


def test_changes_of_many_keys_are_net() -> None:
    rng = random.Random(1)
    one, many = Delta(set(), set()), Delta(set(), set())
    held: set[int] = set()
    for _ in range(200):
        keys = rng.sample(range(30), rng.randint(0, 6))
        new = [key for key in keys if key not in held]
        old = [key for key in keys if key in held]
        for key in new:
            one.gain(key)
        for key in old:
            one.lose(key)
        many.gain_all(new)
        many.lose_all(old)
        held = held.difference(old).union(new)
        assert one == many


def test_removal_of_what_is_held_in_part_is_refused() -> None:
    tree = RadixTree(ChainSpec(2))
    tree.plant(9)
    keys = tree.store(9, 0, [bytes([i]) * 8 for i in range(6)], "gpu")
    tree.remove(keys[2], 3, 1, "gpu")
    with pytest.raises(UsageError, match="is not held in tier 'gpu'"):
        tree.remove(keys[5], 6, 5, "gpu")
    with pytest.raises(UsageError, match="above the root"):
        tree.add(keys[5], 6, 7, "gpu")
    assert (tree.up(keys[5], 6, 4), tree.up(keys[5], 6, 6)) == (keys[1], 9)
