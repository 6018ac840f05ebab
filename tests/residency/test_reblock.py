"""Engine blocks of any size against canonical blocks: a model that knows tokens only, then each shape by hand."""

from __future__ import annotations

import random
from collections import Counter
from typing import NamedTuple

import pytest
from matching import matched, trees_of

from prefixroute import ContentSpan, Domain, Namespace, Residency, TokenChain
from prefixroute.events import BlocksCleared, BlocksRemoved, BlocksStored, EngineBatch, EngineEvent
from prefixroute.keys.chain import ChainSpec
from prefixroute.residency.runs import Run

CREDITED = ("gpu", "cpu")
ALL_TIERS = ("gpu", "cpu", "disk")
NAMESPACES = (Namespace(), Namespace(salt="s"))


# --- model -------------------------------------------------------------------------------------------------


class Block(NamedTuple):
    """An engine block: its tokens, an item that starts in it, and which of several equal blocks it is."""

    tokens: tuple[int, ...]
    item: tuple[str, int] | None = None
    variant: int = 0


Path = tuple[Namespace, tuple[Block, ...]]


class Engine:
    """An engine at random, and the truth of what it holds, from its tokens and copies alone."""

    def __init__(self, rng: random.Random, sizes: tuple[int, ...], canonical: int) -> None:
        self.rng = rng
        self.sizes = sizes
        self.canonical = canonical
        self.domain = Domain("m", "t", canonical)
        self.spec = ChainSpec(canonical, self.domain.mix)
        self.copies: dict[Path, Counter[str]] = {}
        self.handles: dict[Path, int] = {}
        self.known_keys: dict[Path, list[int]] = {}

    def handle(self, path: Path) -> int:
        return self.handles.setdefault(path, len(self.handles) + 1)

    def held(self, tiers: tuple[str, ...]) -> list[Path]:
        return [path for path, copies in self.copies.items() if any(copies[tier] for tier in tiers)]

    # What it does, as events.

    def store(self) -> BlocksStored:
        """Cache a run of blocks below one that is held, or one block that was dropped and is computed again."""
        rng = self.rng
        held = self.held(ALL_TIERS)
        parents = {*held, *[(namespace, ()) for namespace in NAMESPACES]}
        dropped = [
            (namespace, path)
            for (namespace, path), copies in self.copies.items()
            if not copies.total() and (namespace, path[:-1]) in parents
        ]
        if dropped and rng.random() < 0.3:
            namespace, path = rng.choice(dropped)
            above = path[:-1]
        else:
            roots: list[Path] = [(namespace, ()) for namespace in NAMESPACES]
            namespace, above = rng.choice(roots if rng.random() < 0.3 else held or roots)
            path, size = above, rng.choice(self.sizes)
            for _ in range(rng.randint(1, 2 + 2 * self.canonical // size)):
                item = ("picture", rng.randrange(size)) if rng.random() < 0.05 else None
                path = (*path, Block((rng.randint(1, 2),) * size, item, int(rng.random() < 0.05)))
        return self.stored(namespace, above, path[len(above) :], rng.choice(("gpu", "gpu", "gpu", "cpu", "disk")))

    def stored(self, namespace: Namespace, above: tuple[Block, ...], new: tuple[Block, ...], tier: str) -> BlocksStored:
        size = len(new[0].tokens)
        paths: list[Path] = [(namespace, above + new[: n + 1]) for n in range(len(new))]
        for path in paths:
            self.copies.setdefault(path, Counter())[tier] += 1
        return BlocksStored(
            tuple(self.handle(path) for path in paths),
            self.handle((namespace, above)) if above else None,
            [token for block in new for token in block.tokens],
            size,
            tier,
            namespace=Namespace() if above else namespace,
            contents=tuple(
                ContentSpan(block.item[0], i * size + block.item[1]) for i, block in enumerate(new) if block.item
            ),
        )

    def offload(self) -> list[EngineEvent]:
        """A placeholder: a block that is known gets a copy in another tier, and no token is told."""
        paths = self.held(("gpu",))
        if not paths:
            return []
        path = self.rng.choice(paths)
        self.copies[path]["cpu"] += 1
        return [BlocksStored((self.handle(path),), None, (), 0, "cpu")]

    def remove(self) -> list[EngineEvent]:
        tier = self.rng.choice(("gpu", "gpu", "cpu", "disk"))
        paths = self.held((tier,))
        if not paths:
            return []
        path = self.rng.choice(paths)
        self.copies[path][tier] -= 1
        return [BlocksRemoved((self.handle(path),), tier)]

    def clear(self) -> list[EngineEvent]:
        tier = self.rng.choice(("gpu", "cpu", None))
        for copies in self.copies.values():
            for cleared in tuple(copies) if tier is None else (tier,):
                copies[cleared] = 0
        return [BlocksCleared(tier)]

    # What is true of it.

    def keys(self, path: Path) -> list[int]:
        """Keys of the canonical blocks of a path, depth 1 first."""
        if path not in self.known_keys:
            tokens: list[int] = []
            items = []
            for block in path[1]:
                if block.item:
                    items.append(ContentSpan(block.item[0], len(tokens) + block.item[1]))
                tokens += block.tokens
            chain = TokenChain(self.spec, self.domain.root_key(path[0]), tokens, items)
            self.known_keys[path] = [chain.key(depth) for depth in range(1, chain.depth + 1)]
        return self.known_keys[path]

    def matchable(self) -> set[int]:
        """Keys of blocks all of whose tokens are held in one tier, and those of every block above."""
        whole: dict[int, list[int]] = {}
        for namespace, path in self.copies:
            keys = self.keys((namespace, path))
            ends = [0]
            for block in path:
                ends.append(ends[-1] + len(block.tokens))
            for depth in range(ends[-2] // self.canonical + 1, ends[-1] // self.canonical + 1):
                first = (depth - 1) * self.canonical
                needed = [path[: i + 1] for i in range(len(path)) if ends[i + 1] > first]
                if any(all(self.copies[namespace, part][tier] for part in needed) for tier in CREDITED):
                    whole[keys[depth - 1]] = keys[:depth]
        return {key for key, above in whole.items() if all(other in whole for other in above)}

    def live(self) -> dict[tuple[str, int], tuple[int, int]]:
        rows = {}
        for tier in ALL_TIERS:
            counts = [copies[tier] for copies in self.copies.values() if copies[tier]]
            if counts:
                rows[tier, 0] = (len(counts), sum(counts))
        return rows


def followed(residency: Residency, published: set[int]) -> set[int]:
    """Follow the changes of what is published, and hold the outcome against the residency."""
    changes = residency.take_changes()
    assert not changes.added & published
    assert changes.removed <= published
    published = published - changes.removed | changes.added
    assert published == set(residency.keys())
    return published


def agrees(residency: Residency, engine: Engine) -> None:
    """Hold a residency against the model, while nothing of the stream is outstanding."""
    assert set(residency.keys()) == engine.matchable()
    assert residency.canonical_blocks == len(engine.matchable())
    assert {(row.tier, row.group): (row.handles, row.copies) for row in residency.live()} == engine.live()


def run(engine: Engine, steps: int, delay: float) -> Residency:
    """Let the mirror follow the engine, and compare whenever no store is on its way."""
    residency = Residency(engine.domain, CREDITED)
    rng = engine.rng
    published: set[int] = set()
    late: list[EngineEvent] = []
    for _ in range(steps):
        events: list[EngineEvent] = []
        kind = rng.choices(("store", "offload", "flush", "remove", "clear"), (50, 6, 8, 36, 1.5))[0]
        if kind == "store":
            (late if rng.random() < delay else events).append(engine.store())
        elif kind == "offload":
            events += engine.offload()
        else:
            # Stores may overtake each other, but no removal overtakes its store.
            rng.shuffle(late)
            events += late
            late = []
            events += engine.remove() if kind == "remove" else engine.clear() if kind == "clear" else []
        residency.apply(EngineBatch(tuple(events)))
        residency._check()
        published = followed(residency, published)
        if not late:
            agrees(residency, engine)
    residency.apply(
        EngineBatch(
            (
                *late,
                *[
                    BlocksRemoved((engine.handle(path),), tier)
                    for path in engine.copies
                    for tier, n in engine.copies[path].items()
                    for _ in range(n)
                ],
            )
        )
    )
    residency._check()
    assert residency.live() == []
    assert [len(tree) for tree in trees_of(residency)] == [0]
    assert residency.counts.unknown_removals == residency.counts.unknown_events == 0
    return residency


SIZES: list[tuple[tuple[int, ...], int]] = [((e,), c) for c in (2, 4, 6, 16) for e in (1, 2, 3, 4, 6, 8, 32)]
SIZES += [((4, 1, 3), 4), ((4, 1, 6), 2), ((8, 2, 5), 4), ((6, 2), 6), ((16, 10, 4), 16)]


@pytest.mark.parametrize("delay", [0.0, 0.4], ids=["in order", "overtaking"])
@pytest.mark.parametrize(("sizes", "canonical"), SIZES, ids=str)
def test_mirror_holds_what_the_tokens_say(sizes: tuple[int, ...], canonical: int, delay: float) -> None:
    seed = f"{sizes} {canonical} {delay}"
    print("seed", seed)
    run(Engine(random.Random(seed), sizes, canonical), 100, delay)


# --- by hand -----------------------------------------------------------------------------------------------


def mirror(canonical: int, *events: EngineEvent) -> Residency:
    residency = Residency(Domain("m", "t", canonical))
    apply(residency, *events)
    return residency


def apply(residency: Residency, *events: EngineEvent) -> None:
    residency.apply(EngineBatch(events))
    residency._check()


def depth(residency: Residency, tokens: list[int], *items: ContentSpan) -> int:
    """Canonical blocks that match, found in two ways."""
    domain = residency._stores._domain
    chain = TokenChain(ChainSpec(domain.block_size, domain.mix), domain.root_key(Namespace()), tokens, items)
    keys = set(residency.keys())
    by_key = next((d - 1 for d in range(1, chain.depth + 1) if chain.key(d) not in keys), chain.depth)
    assert [matched(tree, chain) for tree in trees_of(residency)] == [by_key]
    return by_key


def stored(handles: list[int], parent: int | None, tokens: list[int], size: int, tier: str = "gpu") -> BlocksStored:
    return BlocksStored(tuple(handles), parent, tokens, size, tier)


def test_pages_of_one_token_make_a_block_when_the_last_one_comes_and_break_it_when_any_goes() -> None:
    tokens = list(range(100, 108))
    residency = mirror(4, stored([0, 1, 2], None, tokens[:3], 1))
    assert depth(residency, tokens) == 0
    apply(residency, stored([3, 4, 5, 6], 2, tokens[3:7], 1))
    assert depth(residency, tokens) == 1
    apply(residency, stored([7], 6, tokens[7:], 1))
    assert depth(residency, tokens) == 2
    for page in range(8):
        apply(residency, BlocksRemoved((page,)))
        assert depth(residency, tokens) == page // 4
        apply(residency, stored([page], page - 1 if page else None, [tokens[page]], 1))
        assert depth(residency, tokens) == 2


def test_engine_block_larger_than_canonical_is_several() -> None:
    tokens = list(range(64))
    residency = mirror(4, stored([1, 2], None, tokens, 32))
    assert depth(residency, tokens) == 16
    apply(residency, BlocksRemoved((2,)))
    assert (depth(residency, tokens), residency.canonical_blocks) == (8, 8)


def test_forks_inside_a_canonical_block_share_nothing_and_before_it_everything() -> None:
    trunk = list(range(6))
    residency = mirror(4, stored([1], None, trunk, 6), stored([2], 1, [6, 7, 8, 9, 10, 11], 6))
    apply(residency, stored([3], 1, [66, 67, 68, 69, 70, 71], 6))
    assert depth(residency, [*trunk, 6, 7, 8, 9, 10, 11]) == 3
    assert depth(residency, [*trunk, 66, 67, 68, 69, 70, 71]) == 3
    assert residency.canonical_blocks == 5
    apply(residency, BlocksRemoved((2,)))
    assert depth(residency, [*trunk, 6, 7, 8, 9, 10, 11]) == 1
    assert depth(residency, [*trunk, 66, 67, 68, 69, 70, 71]) == 3


def test_block_over_a_border_needs_both_engine_blocks_in_one_tier() -> None:
    tokens = list(range(12))
    residency = mirror(4, stored([1], None, tokens[:6], 6), stored([2], 1, tokens[6:], 6, "cpu"))
    assert depth(residency, tokens) == 1
    apply(residency, BlocksStored((1,), None, (), 0, "cpu"))
    assert depth(residency, tokens) == 3
    apply(residency, BlocksRemoved((1,)))
    assert depth(residency, tokens) == 3
    apply(residency, BlocksRemoved((1,), "cpu"))
    assert depth(residency, tokens) == 0


def test_two_blocks_of_equal_content_hold_it_until_both_are_gone() -> None:
    """With lookahead hashes (vLLM 0.33) one content has several handles."""
    tokens = list(range(8))
    residency = mirror(4, stored([1, 2], None, tokens, 4), stored([11, 12], None, tokens, 4))
    assert residency.canonical_blocks == 2
    apply(residency, BlocksRemoved((2,)), BlocksRemoved((11,)))
    assert depth(residency, tokens) == 2
    apply(residency, BlocksRemoved((12,)))
    assert depth(residency, tokens) == 1
    apply(residency, BlocksRemoved((1,)))
    assert residency.canonical_blocks == 0


@pytest.mark.parametrize("again", ["parent", "both", "twice the parent"])
def test_block_stored_again_above_a_partial_one_that_kept_it_known(again: str) -> None:
    """A partial block (vLLM 0.24) shorter than a canonical one holds nothing, so the tree drops what is above it."""
    tokens = list(range(8))
    residency = mirror(4, stored([1], None, tokens[:4], 4), stored([2], 1, tokens[4:6], 2), BlocksRemoved((1,)))
    assert len(trees_of(residency)[0]) == 0
    if again == "both":
        apply(residency, stored([1, 3], None, tokens, 4))
    else:
        apply(residency, *[stored([1], None, tokens[:4], 4)] * (1 + (again != "parent")))
    apply(residency, stored([4], 2, tokens[6:], 2))
    assert depth(residency, tokens) == 2
    apply(residency, BlocksRemoved((2,)), BlocksRemoved((4,)), *[BlocksRemoved((1,))] * (1 + (again[:5] == "twice")))
    assert depth(residency, tokens) == 0
    assert residency.counts.unknown_removals == 0
    assert len(residency.live()) == (again == "both")


def test_chain_above_a_partial_block_is_dropped_and_comes_back_in_any_order() -> None:
    tokens = list(range(12))
    chain = [stored([1], None, tokens[:4], 4), stored([2], 1, tokens[4:8], 4), stored([3], 2, tokens[8:], 4)]
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2)):
        residency = mirror(4, *chain, stored([9], 3, [7], 1), BlocksRemoved((3, 2, 1)))
        assert (residency.canonical_blocks, residency.live_blocks) == (0, 1)
        apply(residency, *(chain[i] for i in order))
        assert depth(residency, tokens) == 3
        apply(residency, BlocksRemoved((9, 1, 2, 3)))
        assert (residency.live_blocks, len(trees_of(residency)[0])) == (0, 0)


def test_blocks_stored_below_one_whose_tokens_are_lost_match_when_it_comes_back() -> None:
    tokens = list(range(16))
    residency = mirror(
        4, stored([1], None, tokens[:4], 4), stored([2], 1, tokens[4:6], 2), stored([3], 2, tokens[6:8], 2)
    )
    apply(residency, BlocksRemoved((1, 2)))
    assert len(trees_of(residency)[0]) == 0
    apply(residency, stored([4], 3, tokens[8:12], 4), stored([2], 1, tokens[4:6], 2), stored([5], 4, tokens[12:], 4))
    assert (depth(residency, tokens), residency.live_blocks) == (0, 4)
    apply(residency, stored([1], None, tokens[:4], 4))
    assert depth(residency, tokens) == 4
    apply(residency, BlocksRemoved((1, 2, 3, 4, 5)))
    assert (residency.live(), len(trees_of(residency)[0]), residency.counts.unknown_removals) == ([], 0, 0)


def test_block_that_comes_back_alone_waits_for_the_parent_that_was_forgotten_with_it() -> None:
    tokens = list(range(12))
    residency = mirror(4, stored([1, 2], None, tokens[:8], 4), stored([3], 2, tokens[8:10], 2))
    apply(residency, stored([11], None, tokens[:4], 4), BlocksRemoved((1, 2)))
    apply(residency, stored([2], 1, tokens[4:8], 4))
    assert depth(residency, tokens) == 1
    apply(residency, stored([1], None, tokens[:4], 4))
    assert depth(residency, tokens) == 2
    apply(residency, BlocksRemoved((2, 3)), BlocksRemoved((11,)))
    assert (depth(residency, tokens), residency.live_blocks) == (1, 1)
    apply(residency, BlocksRemoved((1,)))
    assert (residency.live_blocks, len(trees_of(residency)[0]), residency.counts.unknown_removals) == (0, 0, 0)


def test_items_count_whether_blocks_are_larger_or_smaller_and_wherever_they_are_cut() -> None:
    tokens = [7] * 12
    cat, dog = ContentSpan("cat", 5), ContentSpan("dog", 5)
    for size in (1, 2, 3, 4, 6, 12):
        residency = mirror(4, BlocksStored(tuple(range(12 // size)), None, tokens, size, contents=(cat,)))
        assert [depth(residency, tokens, *items) for items in ((cat,), (dog,), (), (ContentSpan("cat", 6),))] == [
            3,
            1,
            1,
            1,
        ]


def test_tokens_are_given_to_the_tree_and_kept_only_where_blocks_straddle() -> None:
    aligned = mirror(4, stored([1, 2], None, list(range(16)), 8))
    straddling = mirror(4, stored([1, 2], None, list(range(12)), 6))
    assert [run.tokens for run in aligned._groups[0].runs.values()] == [None, None]
    assert all(run.tokens is not None for run in straddling._groups[0].runs.values())
    assert not hasattr(Run([1], 0), "__dict__")
