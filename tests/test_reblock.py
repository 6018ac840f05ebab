"""Engine blocks of any size against canonical blocks: a model that knows tokens only, then each shape by hand."""

from __future__ import annotations

import random
from collections import Counter
from typing import NamedTuple

import pytest

from prefixroute import ContentSpan, Domain, Namespace, Residency, TokenChain
from prefixroute.chain import ChainSpec
from prefixroute.events import BlocksCleared, BlocksRemoved, BlocksStored, EngineBatch, EngineEvent
from prefixroute.reblock import Span

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
        dropped = [path for path, copies in self.copies.items() if not copies.total()]
        if dropped and rng.random() < 0.3:
            namespace, path = rng.choice(dropped)
            above = path[:-1]
        else:
            parents: list[Path] = [(namespace, ()) for namespace in NAMESPACES]
            namespace, above = rng.choice(parents if rng.random() < 0.3 else self.held(ALL_TIERS) or parents)
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
        changes = residency.take_changes()
        assert not changes.added & published
        assert changes.removed <= published
        published = published - changes.removed | changes.added
        assert published == set(residency.keys())
        if not late:
            assert published == engine.matchable()
            assert residency.canonical_blocks == len(published)
            assert {(row.tier, row.group): (row.handles, row.copies) for row in residency.live()} == engine.live()
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
    assert [len(tree) for tree in residency.trees] == [0]
    assert residency.counts.unknown_removals == residency.counts.unknown_events == 0
    return residency


SIZES: list[tuple[tuple[int, ...], int]] = [((e,), c) for c in (2, 4, 6, 16) for e in (1, 2, 3, 4, 6, 8, 32)]
SIZES += [((4, 1, 3), 4), ((4, 1, 6), 2), ((8, 2, 5), 4), ((6, 2), 6), ((16, 10, 4), 16)]


@pytest.mark.parametrize("delay", [0.0, 0.4], ids=["in order", "orphans"])
@pytest.mark.parametrize(("sizes", "canonical"), SIZES, ids=lambda value: str(value))
def test_mirror_holds_what_the_tokens_say(sizes: tuple[int, ...], canonical: int, delay: float) -> None:
    seed = f"{sizes} {canonical} {delay}"
    try:
        residency = run(Engine(random.Random(seed), sizes, canonical), 60, delay)
    except BaseException:
        print("seed", seed)
        raise
    assert (residency.counts.orphans > 0) == (delay > 0)
