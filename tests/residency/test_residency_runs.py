"""Runs of engine blocks, cut and joined at random, against the plain model of `test_reblock`; then their shape.

The model counts copies block by block and knows nothing of runs.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from matching import trees_of
from test_reblock import ALL_TIERS, CREDITED, NAMESPACES, Block, Engine, Path, agrees, followed

from prefixroute import Domain, Namespace, Residency, StreamGap
from prefixroute.events import BlocksRemoved, BlocksStored, EngineBatch, EngineEvent
from prefixroute.residency.live import DOUBT

PAGES = (1, 3, 5, 16, 24, 32)


class RunEngine(Engine):
    """Also stores paths again, and takes, moves and doubts stretches of blocks."""

    def __init__(self, rng: random.Random, sizes: tuple[int, ...], canonical: int) -> None:
        super().__init__(rng, sizes, canonical)
        self.epoch = 0
        self.told: dict[Path, int] = {}
        """The epoch in which a block that is live was last stored."""

    def stored(self, namespace: Namespace, above: tuple[Block, ...], new: tuple[Block, ...], tier: str) -> BlocksStored:
        for n in range(len(new)):
            self.told[namespace, above + new[: n + 1]] = self.epoch
        return super().stored(namespace, above, new, tier)

    def grow(self) -> BlocksStored:
        """A longer run than `store` makes, often below the middle of another one."""
        rng = self.rng
        held = self.held(ALL_TIERS)
        namespace, above = rng.choice(held) if held and rng.random() < 0.7 else (rng.choice(NAMESPACES), ())
        middle = above[: rng.randint(0, len(above))]
        if not middle or self.copies[namespace, middle].total():
            above = middle
        size = rng.choice(self.sizes)
        new = tuple(Block((rng.randint(1, 9),) * size) for _ in range(rng.randint(1, 40)))
        return self.stored(namespace, above, new, rng.choice(("gpu", "gpu", "cpu")))

    def again(self) -> BlocksStored:
        """A path from its root once more, and perhaps on: the same blocks in a second copy, or where they were."""
        paths = [path for path in self.copies if len({len(block.tokens) for block in path[1]}) == 1]
        if not paths:
            return self.grow()
        namespace, path = self.rng.choice(paths)
        return self.stored(namespace, (), path, self.rng.choice(("gpu", "gpu", "cpu", "disk")))

    def offload(self) -> list[EngineEvent]:
        events = super().offload()
        told = {self.handles[path]: path for path in self.copies}
        for event in events:
            assert isinstance(event, BlocksStored)
            self.told.update({told[int(handle)]: self.epoch for handle in event.handles})  # type: ignore[arg-type]
        return events

    def stretch(self, tier: str) -> list[Path]:
        """Consecutive blocks of one path that are held in a tier, root side first."""
        held = self.held((tier,))
        if not held:
            return []
        namespace, path = self.rng.choice(held)
        lower = self.rng.randrange(len(path))
        found = [(namespace, path[: i + 1]) for i in range(lower, len(path))]
        return [path for path in found if self.copies.get(path, Counter())[tier]]

    def take(self) -> list[EngineEvent]:
        """Remove a stretch: in either order or none, in one event or many, one copy or all."""
        rng = self.rng
        tier = rng.choice(("gpu", "gpu", "cpu", "disk"))
        paths = self.stretch(tier)
        kind = rng.choice(("forth", "back", "back", "mixed"))
        if kind == "back":
            paths.reverse()
        elif kind == "mixed":
            rng.shuffle(paths)
        last = rng.random() < 0.1
        for path in paths:
            self.copies[path][tier] -= self.copies[path][tier] if last else 1
        handles = tuple(self.handle(path) for path in paths)
        if rng.random() < 0.5:
            return [BlocksRemoved(handles, tier, last_copy=last)]
        return [BlocksRemoved((handle,), tier, last_copy=last) for handle in handles]

    def move(self) -> list[EngineEvent]:
        """Give a stretch a copy in another tier, without tokens, and perhaps take the first one away."""
        tier, other = self.rng.choice((("gpu", "cpu"), ("cpu", "disk"), ("disk", "gpu")))
        paths = self.stretch(tier)
        for path in paths:
            self.copies[path][other] += 1
            self.told[path] = self.epoch
        handles = tuple(self.handle(path) for path in paths)
        events: list[EngineEvent] = [BlocksStored(handles, None, (), 0, other)]
        if self.rng.random() < 0.5:
            for path in paths:
                self.copies[path][tier] -= 1
            events.append(BlocksRemoved(handles, tier))
        return events

    def confidence(self) -> float:
        """By rule 6: the share of live blocks that nothing has told of since the last gap."""
        live = [path for path, copies in self.copies.items() if copies.total()]
        doubtful = sum(self.told[path] < self.epoch for path in live)
        return 1.0 - (1.0 - DOUBT) * doubtful / len(live) if doubtful else 1.0


def run(engine: RunEngine, steps: int, delay: float) -> None:
    """Let the mirror follow the engine, and compare whenever no store is on its way."""
    residency = Residency(engine.domain, CREDITED)
    rng = engine.rng
    published: set[int] = set()
    late: list[EngineEvent] = []
    for _ in range(steps):
        events: list[EngineEvent] = []
        kinds = ("store", "grow", "again", "offload", "move", "take", "clear", "gap")
        kind = rng.choices(kinds, (8, 30, 8, 4, 10, 40, 1, 2))[0]
        if kind in ("store", "grow", "again"):
            store = {"store": engine.store, "grow": engine.grow, "again": engine.again}[kind]()
            (late if rng.random() < delay else events).append(store)
        else:
            # Stores may overtake each other, but nothing that needs them overtakes them.
            rng.shuffle(late)
            events += late
            late = []
            if kind == "gap":
                engine.epoch += 1
                events.append(StreamGap())
            else:
                others = {"offload": engine.offload, "move": engine.move, "take": engine.take, "clear": engine.clear}
                events += others[kind]()
        if rng.random() < 0.5:
            residency.apply(EngineBatch(tuple(events)))
        else:
            for event in events:
                residency.apply(EngineBatch((event,)))
                residency._check()
        residency._check()
        published = followed(residency, published)
        if not late:
            agrees(residency, engine)
            assert residency.confidence == pytest.approx(engine.confidence())
    rest = [(path, tier, n) for path, copies in engine.copies.items() for tier, n in copies.items()]
    rng.shuffle(rest)
    removals = [BlocksRemoved((engine.handle(path),), tier) for path, tier, n in rest for _ in range(n)]
    residency.apply(EngineBatch((*late, *removals)))
    residency._check()
    assert residency.live() == []
    assert [len(tree) for tree in trees_of(residency)] == [0]
    assert residency._groups[0].runs == residency._groups[0].waiting == {}
    assert residency.counts.unknown_removals == residency.counts.unknown_events == 0


@pytest.mark.parametrize("delay", [0.0, 0.3], ids=["in order", "overtaking"])
@pytest.mark.parametrize(
    ("sizes", "canonical"),
    [*[((page,), 16) for page in PAGES], ((1, 3, 5), 4), ((4, 8, 3), 4), ((16, 8, 1), 16), ((32, 16), 16)],
    ids=str,
)
def test_runs_hold_what_the_tokens_say(sizes: tuple[int, ...], canonical: int, delay: float) -> None:
    seed = f"{sizes} {canonical} {delay}"
    print("seed", seed)
    run(RunEngine(random.Random(seed), sizes, canonical), 80, delay)


# --- shape -------------------------------------------------------------------------------------------------


def told(handles: list[int], parent: int | None, page: int = 1, tier: str = "gpu") -> BlocksStored:
    """Blocks whose tokens are their handles."""
    return BlocksStored(tuple(handles), parent, [h for h in handles for _ in range(page)], page, tier)


def mirror(*events: EngineEvent) -> Residency:
    residency = Residency(Domain("m", "t", 16))
    apply(residency, *events)
    return residency


def apply(residency: Residency, *events: EngineEvent) -> None:
    """Each event in a batch of its own."""
    for event in events:
        residency.apply(EngineBatch((event,)))
    residency._check()


def shape(residency: Residency) -> list[list[int]]:
    """The handles of each span."""
    return [list(map(int, run.handles)) for run in residency._groups[0].each()]


@pytest.mark.parametrize("page", [1, 16, 24])
def test_prompt_is_one_span_however_it_comes(page: int) -> None:
    handles = list(range(1, 201))
    at_once = mirror(told(handles, None, page))
    page_by_page = mirror(*[told([h], h - 1 or None, page) for h in handles])
    in_parts = mirror(told(handles[:70], None, page), told(handles[70:], 70, page))
    assert shape(at_once) == shape(page_by_page) == shape(in_parts) == [handles]
    assert set(at_once.keys()) == set(page_by_page.keys()) == set(in_parts.keys())
    assert at_once.canonical_blocks == 200 * page // 16


@pytest.mark.parametrize("page", [1, 16, 24])
def test_children_that_go_first_shorten_the_span(page: int) -> None:
    handles = list(range(1, 101))
    residency = mirror(told(handles, None, page))
    for left in range(99, 0, -1):
        apply(residency, BlocksRemoved((left + 1,)))
        assert shape(residency) == [handles[:left]]
        assert residency.canonical_blocks == left * page // 16
    apply(residency, told(handles[1:], 1, page))
    assert (shape(residency), residency.canonical_blocks) == ([handles], 100 * page // 16)
    # The same in one event, and what is grown again after it.
    apply(residency, BlocksRemoved(tuple(reversed(handles[40:]))), told([500], 40, page))
    assert shape(residency) == [[*handles[:40], 500]]


@pytest.mark.parametrize("page", [1, 16, 24])
def test_fork_cuts_where_it_hangs_and_nowhere_else(page: int) -> None:
    handles = list(range(1, 101))
    residency = mirror(told(handles, None, page), told([200, 201], 60, page), told([300], 60, page))
    assert shape(residency) == [handles[:60], handles[60:], [200, 201], [300]]
    before = residency.canonical_blocks
    apply(residency, told([400], 100, page), BlocksRemoved((400,)), BlocksRemoved((300,)), BlocksRemoved((200, 201)))
    assert shape(residency) == [handles[:60], handles[60:]]
    assert before >= residency.canonical_blocks == 100 * page // 16


def test_part_that_gets_another_copy_or_loses_one_is_cut_off() -> None:
    handles = list(range(1, 65))
    residency = mirror(told(handles, None), BlocksStored(tuple(handles[16:32]), None, (), 0, "cpu"))
    assert shape(residency) == [handles[:16], handles[16:32], handles[32:]]
    apply(residency, BlocksRemoved(tuple(handles[20:24])))
    assert residency.canonical_blocks == 4
    apply(residency, BlocksRemoved((handles[40],)))
    assert residency.canonical_blocks == 2
    assert sum(map(len, shape(residency))) == 64
    apply(residency, told(handles, None))
    assert residency.canonical_blocks == 4


def test_path_told_again_whole_stays_one_span_with_two_copies() -> None:
    handles = list(range(1, 101))
    residency = mirror(told(handles, None), told(handles, None))
    assert shape(residency) == [handles]
    apply(residency, BlocksRemoved(tuple(handles)))
    assert (shape(residency), residency.canonical_blocks) == ([handles], 6)
    apply(residency, BlocksRemoved(tuple(handles[::-1])))
    assert residency._groups[0].runs == {}


def test_blocks_of_a_window_group_and_blocks_without_tokens_are_runs_too() -> None:
    handles = list(range(1, 101))
    window = BlocksStored(tuple(handles), None, handles, 1, group_kind="sliding_window")
    residency = mirror(window, BlocksRemoved(tuple(handles[50:])), BlocksRemoved((10,)))
    assert shape(residency) == [handles[:9], handles[10:50]]
    residency = mirror(BlocksStored(tuple(handles), None, (), 0, "cpu"), told(handles[20:40], 20))
    assert residency.canonical_blocks == 0
    apply(residency, told(handles[:20], None))
    assert residency.canonical_blocks == 2


def test_aligned_blocks_that_are_kept_for_what_is_below_are_apart() -> None:
    handles = list(range(1, 5))
    residency = mirror(told(handles, None, 16), told([9], 4, 1), BlocksRemoved(tuple(handles)))
    assert shape(residency) == [[1], [2], [3], [4], [9]]
    apply(residency, told([3, 4], 2, 16))
    assert residency.canonical_blocks == 0
    apply(residency, told([1, 2], None, 16))
    assert residency.canonical_blocks == 4


def test_short_parent_that_ends_a_block_is_joined_with_a_longer_kid_that_ends_none() -> None:
    handles = list(range(1, 22))
    # Block 16, the last of a canonical block, comes above blocks that never were placed.
    residency = mirror(told(handles[:15], None), told([100], 15), told(handles[16:], 16), told([16], 15, tier="disk"))
    apply(residency, told([16], 15), BlocksRemoved((16,), "disk"))
    assert (shape(residency)[-1], residency.canonical_blocks) == (handles[15:], 2)
    apply(residency, BlocksRemoved((3,)))
    assert residency.canonical_blocks == 0
    apply(residency, BlocksRemoved(tuple(h for h in (*handles, 100) if h != 3)))
    assert len(trees_of(residency)[0]) == 0
