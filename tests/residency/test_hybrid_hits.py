"""Hits of hybrid models: what a node takes for reusable is what an engine's own groups allow, and never more."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hybrid import FULL, Kind, PlainHybrid

from prefixroute import Domain, EngineBatch, EngineEvent, Namespace, Residency, TokenChain
from prefixroute.endpoint.anchors import Anchors
from prefixroute.events import BlocksCleared, BlocksRemoved, BlocksStored, StreamGap, StreamRestarted
from prefixroute.keys.chain import STRIDE, ChainSpec, wire_key
from prefixroute.keys.hit_marks import ENDS_ONLY, marked, section
from prefixroute.routing.index import MergedIndex

SIZE = 4
WINDOW = "sliding_window"


class Mirror:
    """A residency, and an index that is told what it would have published; every change is checked."""

    def __init__(self, canonical: int = SIZE, **settings: Any) -> None:
        self.domain = Domain("m", "t", canonical)
        self.residency = Residency(self.domain, **settings)
        self.index = MergedIndex()
        self.index.join("e")
        self.published: set[int] = set()

    def apply(self, *events: EngineEvent) -> None:
        self.residency.apply(EngineBatch(events))
        self.residency._check()
        changes = self.residency.take_changes()
        assert not changes.added & self.published
        assert changes.removed <= self.published
        self.published = self.published - changes.removed | changes.added
        assert self.published == set(self.residency.published())
        self.index.update("e", map(wire_key, changes.added), map(wire_key, changes.removed))

    def chain(self, tokens: list[int]) -> TokenChain:
        spec = ChainSpec(self.domain.block_size, self.domain.mix)
        return TokenChain(spec, self.domain.root_key(Namespace()), tokens)

    def hit(self, tokens: list[int]) -> int:
        """Tokens that a decision would take for reusable."""
        chain = self.chain(tokens)
        depth = self.index.depth(chain, self.index.bit("e"))
        strata = self.index.search(chain)
        assert strata == ([(depth, self.index.bit("e"))] if depth else [])
        return depth * self.domain.block_size


def full(handles: list[int], tokens: list[int], parent: int | None = None, **more: Any) -> BlocksStored:
    return BlocksStored(tuple(handles), parent, tokens, SIZE, **{"group": 9, "group_kind": FULL, **more})


def window(
    handles: list[int], tokens: list[int], size: int = 9, parent: int | None = None, **more: Any
) -> BlocksStored:
    return BlocksStored(tuple(handles), parent, tokens, SIZE, **{"group_kind": WINDOW, "window": size, **more})


TOKENS = list(range(100, 140))
"""Ten blocks, handles 1 to 10."""
ALL = list(range(1, 11))
LONGER = [*TOKENS, 7]


# --- against an engine -------------------------------------------------------------------------------------

GROUPS = {
    "window": (Kind(4), Kind(4, WINDOW, 13)),
    "odd window": (Kind(4, WINDOW, 12), Kind(4)),
    "window of one": (Kind(4, WINDOW, 1), Kind(4)),
    "two windows": (Kind(4, WINDOW, 6), Kind(4, WINDOW, 17), Kind(4)),
    "state": (Kind(4, "mamba"), Kind(4)),
    "large state": (Kind(16, "mamba"), Kind(4)),
    "large window and state": (Kind(8, WINDOW, 20), Kind(4), Kind(12, "mamba")),
    "two full": (Kind(4), Kind(8), Kind(8, WINDOW, 17)),
    "chunks": (Kind(4), Kind(4, "chunked_local_attention")),
    "size untold": (Kind(4), Kind(4, WINDOW)),
}


@pytest.mark.parametrize("canonical", [4, 8, 6])
@pytest.mark.parametrize("name", GROUPS)
def test_estimates_are_what_the_engine_would_reuse(name: str, canonical: int) -> None:
    rng = random.Random(f"{name} {canonical}")
    hits = 0
    for _ in range(6):
        engine, mirror = PlainHybrid(rng, GROUPS[name]), Mirror(canonical)
        mirror.apply(*engine.hello())
        for _ in range(40):
            mirror.apply(*engine.step(72))
            for _ in range(6):
                prompt = engine.prompt(80)
                hit = engine.hit(prompt, canonical)
                assert mirror.hit(prompt) == hit, (name, prompt)
                hits += hit > 0
    assert hits > 20, "the test is about hits"


@pytest.mark.parametrize("name", ["window", "two windows", "large window and state"])
def test_long_prompts_are_found_section_by_section(name: str) -> None:
    rng = random.Random(name)
    deep = 0
    for _ in range(3):
        engine, mirror = PlainHybrid(rng, GROUPS[name], tokens=50, sparse=False), Mirror()
        mirror.apply(*engine.hello())
        for _ in range(25):
            mirror.apply(*engine.step(900))
            for _ in range(4):
                prompt = engine.prompt(1000)
                hit = engine.hit(prompt)
                assert mirror.hit(prompt) == hit
                deep += hit > STRIDE * SIZE
    assert deep > 10


SMALL = {
    "half": (Kind(8), Kind(4, WINDOW, 13)),
    "quarter": (Kind(4, WINDOW, 20), Kind(16)),
    "half, twice": (Kind(4, WINDOW, 6), Kind(8), Kind(2, WINDOW, 9)),
    "half and state": (Kind(8), Kind(4, WINDOW, 13), Kind(8, "mamba")),
}


@pytest.mark.parametrize("name", SMALL)
def test_windows_with_smaller_blocks_are_low_at_times_and_never_high(name: str) -> None:
    """What is above a block that full attention has none for is known from stores alone."""
    rng = random.Random(name)
    exact = low = 0
    for _ in range(6):
        engine, mirror = PlainHybrid(rng, SMALL[name], sparse=False, aligned=True), Mirror()
        mirror.apply(*engine.hello())
        for _ in range(40):
            mirror.apply(*engine.step(72))
            for _ in range(6):
                prompt = engine.prompt(80)
                hit, told = engine.hit(prompt), mirror.hit(prompt)
                assert told <= hit, (name, prompt)
                exact += told == hit > 0
                low += told < hit
    assert exact > 4 * low


def small(handles: list[int], tokens: list[int], parent: int | None = None) -> BlocksStored:
    """Blocks of two tokens and a window of seven: three of them. Handles 101 to 120; every other is of `ALL`."""
    named = tuple(handle // 2 if handle % 2 == 0 else 1000 + handle for handle in handles)
    above = None if parent is None else parent // 2 if parent % 2 == 0 else 1000 + parent
    return BlocksStored(named, above, tokens, 2, group_kind=WINDOW, window=7)


def test_what_is_above_a_smaller_block_is_what_its_store_says() -> None:
    mirror = Mirror()
    mirror.apply(full(ALL, TOKENS), small([16, 17, 18], TOKENS))
    assert mirror.hit(LONGER) == 9 * SIZE, "the last ones of the store's range, as the place of the 18th agrees"
    mirror.apply(small([19, 20], TOKENS[36:], parent=18))
    assert mirror.hit(LONGER) == 10 * SIZE, "a store without holes"
    mirror.apply(BlocksRemoved((1019,)))
    assert mirror.hit(LONGER) == 9 * SIZE
    mirror.apply(small([19], TOKENS[36:38], parent=18))
    assert mirror.hit(LONGER) == 10 * SIZE


def test_a_hole_between_smaller_blocks_is_seen_by_the_places_around_it() -> None:
    for handles, hit in (([14, 15, 16], 8), ([12, 15, 16], 0), ([13, 15, 16], 0), ([12, 13, 14, 15, 16], 8)):
        mirror = Mirror()
        mirror.apply(full(ALL, TOKENS), small(handles, TOKENS))
        assert mirror.hit(LONGER) == hit * SIZE, handles


def test_blocks_in_a_circle_end_nothing_and_nobody_waits_for_them() -> None:
    mirror = Mirror()
    mirror.apply(full(ALL, TOKENS), small([], [], None))
    events = [
        BlocksStored((handle,), parent, (1, 2), 2, group_kind=WINDOW, window=1 << 40)
        for handle, parent in ((51, 53), (52, 51), (53, 52), (54, 54))
    ]
    mirror.apply(*events)
    assert mirror.hit(LONGER) == 0
    mirror.apply(BlocksRemoved((52, 54)))
    mirror.apply(events[1])


def test_smaller_blocks_get_their_place_when_full_attention_tells_later() -> None:
    mirror = Mirror()
    mirror.apply(full(ALL[:8], TOKENS[:32]), small([17, 18, 19, 20], TOKENS[32:], parent=16), small([16], TOKENS[:32]))
    assert mirror.hit(LONGER) == 0
    mirror.apply(full([9, 10], TOKENS[32:], 8))
    assert mirror.hit(LONGER) == 10 * SIZE


@pytest.mark.parametrize("seed", range(4))
def test_in_doubt_it_is_low(seed: int) -> None:
    """Blocks whose stores were lost, and that come children first: never more than what the engine has."""
    rng = random.Random(seed)
    low = 0
    for _ in range(6):
        engine, mirror = PlainHybrid(rng, GROUPS["two windows"]), Mirror()
        mirror.apply(*engine.hello())
        for _ in range(40):
            events = engine.step(60)
            if all(isinstance(event, BlocksStored) for event in events):
                # Removals are not lost here: what a mirror keeps that is gone is a gap's matter.
                events = [event for event in events if rng.random() < 0.8]
                rng.shuffle(events)
            mirror.apply(*events)
            for _ in range(6):
                prompt = engine.prompt(60)
                assert mirror.hit(prompt) <= engine.hit(prompt)
                low += mirror.hit(prompt) < engine.hit(prompt)
    assert low > 0


@pytest.mark.parametrize("seed", range(6))
def test_anchors_follow_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    engine, mirror = PlainHybrid(rng, GROUPS["two windows"], sparse=False), Mirror()
    mirror.apply(*engine.hello())
    published = mirror.residency.published
    anchors = Anchors(1)
    for i in range(80):
        mirror.apply(*engine.step(200))
        if i == 5:
            anchors.rebuild(published())
        if i > 5:
            if rng.random() < 0.1:
                anchors.set_stride(rng.choice((1, 2, 8, 32)), published())
            anchors.follow(published())
            anchors._check(published())
            assert set(published().anchors(anchors.anchor_stride)) <= mirror.published
            assert published().n_fixed() == len(set(published().anchors(1 << 20)))
            assert published().n_keys == len(mirror.published)


def test_anchors_follow_an_endpoint_that_becomes_a_hybrid_gets_a_second_full_group_and_restarts() -> None:
    mirror, anchors = Mirror(), Anchors(2)
    published = mirror.residency.published
    anchors.rebuild(published())
    kinds = []
    for events in (
        [full(ALL, TOKENS)],
        [full(ALL, TOKENS, group=3)],
        [window([1, 2, 9], TOKENS)],
        [full(ALL[:9], TOKENS[: 9 * SIZE], group=4)],
        [StreamRestarted()],
        [full(ALL, TOKENS), window([1, 2, 9], TOKENS)],
        [full(ALL, TOKENS, group=3)],
    ):
        mirror.apply(*events)
        before = set(anchors.wires)
        changes = anchors.follow(published())
        assert anchors.wires == before - changes.removed | changes.added
        anchors._check(published())
        assert published().n_keys == len(mirror.published)
        kinds.append(type(published()).__name__)
    assert kinds == ["RadixTree", "Forest", "HybridHits", "HybridHits", "RadixTree", "HybridHits", "HybridHits"]


def test_an_anchor_above_a_gap_of_ends_stays_at_every_stride() -> None:
    mirror = Mirror()
    mirror.apply(full(ALL, TOKENS), window([1, 2, 3, 4, 8, 9], TOKENS))
    published, chain = mirror.residency.published(), mirror.chain(TOKENS)
    marks = {ENDS_ONLY, marked(chain.key(1))}
    assert set(published.anchors(1)) - marks == {chain.key(d) for d in (1, 2, 3, 4, 9)}
    assert set(published.anchors(2)) - marks == {chain.key(d) for d in (2, 4, 9)}
    assert set(published.anchors(32)) - marks == {chain.key(d) for d in (4, 9)}


# --- one by one --------------------------------------------------------------------------------------------


def test_a_window_is_needed_whole_and_only_where_the_hit_ends() -> None:
    """A window of 9 tokens: two blocks."""
    mirror = Mirror()
    mirror.apply(window([4, 5, 9], TOKENS), full(ALL, TOKENS))
    assert mirror.hit(LONGER) == 5 * SIZE
    mirror.apply(window([8], TOKENS))
    assert mirror.hit(LONGER) == 9 * SIZE
    mirror.apply(BlocksRemoved((8,)))
    assert mirror.hit(LONGER) == 5 * SIZE
    mirror.apply(BlocksRemoved((4,)))
    assert mirror.hit(LONGER) == 0
    mirror.apply(window([1], TOKENS))
    assert mirror.hit(LONGER) == SIZE, "nothing is in front of the first block"


@pytest.mark.parametrize(("size", "needed"), [(1, 1), (2, 1), (5, 1), (6, 2), (9, 2), (10, 3), (13, 3), (14, 4)])
def test_how_many_blocks_a_window_takes(size: int, needed: int) -> None:
    for held in range(1, 5):
        mirror = Mirror()
        mirror.apply(window(ALL[8 - held : 8], TOKENS, size), full(ALL, TOKENS))
        assert mirror.hit(LONGER) == (8 * SIZE if held >= needed else 0)


def test_the_last_token_is_computed_so_a_whole_prompt_ends_one_end_earlier() -> None:
    mirror = Mirror()
    mirror.apply(window([1, 2, 9, 10], TOKENS), full(ALL, TOKENS))
    assert mirror.hit(LONGER) == 10 * SIZE
    assert mirror.hit(TOKENS) == 2 * SIZE
    assert mirror.hit(TOKENS[:8]) == SIZE
    assert mirror.hit(TOKENS[:4]) == 0


def test_full_attention_is_needed_down_to_the_end() -> None:
    mirror = Mirror()
    mirror.apply(window(ALL, TOKENS), full(ALL, TOKENS), BlocksRemoved((4,), group=9))
    assert mirror.hit(LONGER) == 3 * SIZE
    mirror.apply(full([4], TOKENS[12:16], 3))
    assert mirror.hit(LONGER) == 10 * SIZE


def test_copies_of_a_window_block_are_counted() -> None:
    mirror = Mirror()
    mirror.apply(full(ALL, TOKENS), window([9, 10], TOKENS), window([9], TOKENS), BlocksRemoved((9,)))
    assert mirror.hit(LONGER) == 10 * SIZE
    mirror.apply(BlocksRemoved((9,)))
    assert mirror.hit(LONGER) == 0


@pytest.mark.parametrize("kind", ["encoder_only_attention", "cross_attention"])
def test_groups_that_no_prefix_is_looked_up_in_change_nothing(kind: str) -> None:
    mirror = Mirror()
    mirror.apply(full(ALL, TOKENS), window([3], TOKENS, group_kind=kind))
    assert mirror.hit(LONGER) == 10 * SIZE
    assert not mirror.residency.published().ends_only
    assert ENDS_ONLY not in mirror.published


def test_sinks_are_full_attention() -> None:
    mirror = Mirror()
    mirror.apply(full(ALL, TOKENS, group_kind="sink_full_attention"))
    assert mirror.hit(LONGER) == 10 * SIZE


def test_a_window_group_that_speaks_late_takes_back_what_was_published() -> None:
    mirror = Mirror()
    mirror.apply(full(ALL, TOKENS))
    assert (mirror.hit(LONGER), len(mirror.published)) == (10 * SIZE, 10)
    mirror.apply(window([], [1, 2, 3, 4]))
    assert (mirror.hit(LONGER), mirror.published) == (0, {ENDS_ONLY})
    mirror.apply(window([2, 3], TOKENS))
    assert mirror.hit(LONGER) == 3 * SIZE
    mirror.apply(window([5], TOKENS, 3, group=1))
    assert mirror.hit(LONGER) == 0, "each window counts"


def test_another_size_of_a_window_is_taken_and_what_was_known_stays() -> None:
    mirror = Mirror()
    mirror.apply(window([3, 4, 7, 8, 9], TOKENS, 0), full(ALL, TOKENS))
    assert mirror.hit(LONGER) == 0, "of an unknown window all blocks are needed"
    mirror.apply(window([], [], 9))
    assert mirror.hit(LONGER) == 9 * SIZE
    mirror.apply(window([], [], 0))
    assert mirror.hit(LONGER) == 9 * SIZE, "an event that does not tell it changes nothing"
    mirror.apply(window([], [], 13))
    assert mirror.hit(LONGER) == 9 * SIZE
    mirror.apply(window([], [], 17))
    assert mirror.hit(LONGER) == 0


def test_a_hit_ends_at_the_common_multiple_of_all_blocks() -> None:
    mirror = Mirror()
    mirror.apply(window(ALL, TOKENS), full(ALL, TOKENS))
    assert mirror.hit(LONGER) == 10 * SIZE
    state = BlocksStored((2, 8), None, TOKENS, 8, group=2, group_kind="mamba")
    mirror.apply(state)
    assert mirror.residency.hit_unit == 8
    assert [mirror.hit(LONGER), mirror.hit(TOKENS[:32]), mirror.hit(TOKENS[:8])] == [32, 8, 0]


def test_window_blocks_wait_for_the_block_that_tells_where_they_lie() -> None:
    mirror = Mirror()
    mirror.apply(window([9, 10], TOKENS), full([9, 10], TOKENS[32:], 8))
    assert mirror.hit(LONGER) == 0
    mirror.apply(full(ALL[:8], TOKENS[:32]))
    assert mirror.hit(LONGER) == 10 * SIZE
    mirror.apply(BlocksCleared("gpu"))
    assert (mirror.hit(LONGER), mirror.published) == (0, {ENDS_ONLY})


def test_tiers_that_count_for_a_match_count_here() -> None:
    for credited, hit in ((("gpu",), 0), (("gpu", "cpu"), 10 * SIZE)):
        mirror = Mirror(credited=credited)
        mirror.apply(full(ALL, TOKENS), window([9], TOKENS), window([10], TOKENS[36:], tier="cpu"))
        assert mirror.hit(LONGER) == hit
    mirror.apply(BlocksCleared("cpu"))
    assert mirror.hit(LONGER) == 0


def test_a_new_life_may_have_no_windows() -> None:
    mirror = Mirror()
    mirror.apply(full(ALL, TOKENS), window([9, 10], TOKENS))
    mirror.apply(StreamRestarted(), full(ALL, TOKENS))
    assert (mirror.hit(LONGER), len(mirror.published)) == (10 * SIZE, 10)
    mirror.apply(StreamRestarted(), window([9, 10], TOKENS), full(ALL, TOKENS))
    assert mirror.hit(LONGER) == 10 * SIZE
    assert ENDS_ONLY in mirror.published


def test_reports_of_window_groups_are_left_out() -> None:
    """vLLM counts the blocks in that it has skipped there (0.32.0)."""
    mirror = Mirror()
    mirror.apply(full(ALL, TOKENS), StreamGap(), window(ALL, TOKENS, confirmed=True))
    assert mirror.hit(LONGER) == 0


def test_what_is_published_is_ends_and_where_to_look_for_them() -> None:
    tokens = list(range(40 * SIZE))
    handles = list(range(1, 41))
    mirror = Mirror()
    mirror.apply(full(handles, tokens), window([31, 32, 39, 40], tokens))
    chain = mirror.chain(tokens)
    ends, marks = {chain.key(32), chain.key(40)}, {marked(chain.key(1)), marked(chain.key(32))}
    assert mirror.published == {ENDS_ONLY} | ends | marks
    mirror.apply(BlocksRemoved((40,)))
    assert mirror.published == {ENDS_ONLY, chain.key(32), marked(chain.key(1))}


@pytest.mark.parametrize(("depth", "start"), [(1, 0), (31, 0), (32, 0), (33, 32), (64, 32), (65, 64)])
def test_sections(depth: int, start: int) -> None:
    assert section(depth) == start


def test_an_ordinary_endpoint_has_nothing_of_this() -> None:
    mirror = Mirror()
    mirror.apply(full(ALL, TOKENS), full(ALL, TOKENS, group=3))
    assert not mirror.residency.published().ends_only
    assert mirror.residency._stores.hits is None
    assert all(group.window is None for group in mirror.residency._groups.values())
    assert mirror.index.sparse == 0
