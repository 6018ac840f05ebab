"""The mirror of an engine, second part: what is told of blocks, whatever else may come, and memory."""

from __future__ import annotations

import tracemalloc
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matching import trees_of
from test_residency import FULL, PLAIN, TOKENS, WINDOW, apply, depth, mirror, stored
from xxhash import xxh3_64, xxh3_64_intdigest

from prefixroute import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    ContentSpan,
    Domain,
    EngineBatch,
    EngineEvent,
    Namespace,
    Residency,
    StreamGap,
    StreamRestarted,
    UnknownEvent,
)
from prefixroute.keys import chain
from prefixroute.residency.live import DOUBT, Live

# --- what is told of blocks --------------------------------------------------------------------------------


def test_namespace_of_the_root_is_inherited() -> None:
    tenant, other = Namespace(salt="tenant"), Namespace("lo", "tenant")
    residency = mirror(
        stored([1], namespace=tenant), stored([2], 1, TOKENS[4:8]), stored([3], 2, TOKENS[8:12], namespace=other)
    )
    assert [depth(residency, TOKENS, namespace) for namespace in (tenant, other, Namespace())] == [3, 0, 0]
    apply(residency, stored([5], 4, TOKENS[4:8]), stored([4], namespace=other))
    assert depth(residency, TOKENS, other) == 2


def test_same_handle_means_the_same_block_whatever_is_said_of_it_later() -> None:
    residency = mirror(stored([1]), stored([1], tokens=[9] * 4), stored([1], 77, [8] * 4))
    assert (depth(residency), residency.canonical_blocks, residency.live()) == (1, 1, [Live("gpu", 0, 1, 3)])


def test_items_enter_the_keys_of_their_blocks() -> None:
    cat, dog = ContentSpan("cat", 5), ContentSpan("dog", 5)
    residency = mirror(stored([1, 2, 3], contents=(cat,)))
    assert [depth(residency, TOKENS[:12], PLAIN, *items) for items in ((cat,), (dog,), ())] == [3, 1, 1]
    apply(residency, stored([4, 5], 1, TOKENS[4:12], contents=(ContentSpan("dog", 1),)))
    assert [depth(residency, TOKENS[:12], PLAIN, *items) for items in ((cat,), (dog,), ())] == [3, 3, 1]
    # An item that began before the event, or after it, is no part of its blocks.
    apply(residency, stored([6], tokens=[5] * 4, contents=(ContentSpan("cat", -1), ContentSpan("cat", 4))))
    assert depth(residency, [5] * 4) == 1


@pytest.mark.parametrize(
    "tokens", [tuple(TOKENS), array("I", TOKENS), array("q", TOKENS), np.array(TOKENS), range(100, 132)], ids=type
)
def test_tokens_of_events_may_be_any_sequence(tokens: Any) -> None:
    assert depth(mirror(stored(range(8), tokens=tokens))) == 8


def test_handles_may_be_bytes() -> None:
    handles = [bytes([i]) * 32 for i in range(8)]
    residency = mirror(stored(handles[4:], handles[3], TOKENS[16:]), stored(handles[:4]))
    assert depth(residency) == 8
    apply(residency, BlocksRemoved((handles[7],)))
    assert depth(residency) == 7


def test_handle_twice_in_one_event_is_two_copies() -> None:
    residency = mirror(stored([1, 1], tokens=[5] * 8))
    assert (residency.live(), depth(residency, [5] * 8)) == ([Live("gpu", 0, 1, 2)], 1)


def test_block_that_names_itself_as_parent_never_matches() -> None:
    residency = mirror(stored([1], 1), stored([1], 1), stored([2], 1, TOKENS[4:8]))
    assert (residency.canonical_blocks, residency.live()) == (0, [Live("gpu", 0, 2, 3)])
    told_late = mirror(BlocksStored((1,), None, (), 0), stored([1], 1))
    assert (told_late.canonical_blocks, told_late.live()) == (0, [Live("gpu", 0, 1, 2)])
    apply(residency, BlocksRemoved((1, 1, 2)))
    assert residency._groups[0].runs == {}


def test_ring_of_parents_never_matches() -> None:
    residency = mirror(stored([2, 1], 1, TOKENS[:8]), stored([3], 2, TOKENS[:4]), stored([2, 1], None, TOKENS[:8]))
    assert (residency.canonical_blocks, residency.live_blocks) == (0, 3)
    apply(residency, BlocksRemoved((1, 1, 2, 2, 3)))
    assert residency.live_blocks == 0


def test_unknown_removals_are_counted_and_cost_nothing_else() -> None:
    residency = mirror(BlocksRemoved((1,)), stored([1, 2]), BlocksRemoved((9, 2)), BlocksRemoved((1,), "cpu"))
    assert (residency.counts.unknown_removals, residency.counts.removed) == (3, 1)
    apply(residency, BlocksRemoved((1,), group=7))
    assert (residency.counts.unknown_removals, depth(residency)) == (4, 1)


def test_last_copy_removes_them_all() -> None:
    residency = mirror(stored([1, 2]), stored([2], 1, TOKENS[4:8]), BlocksRemoved((2,), last_copy=True))
    assert (depth(residency), residency.live(), residency._live.gpu_copies) == (1, [Live("gpu", 0, 1, 1)], 1)


def test_block_removed_with_blocks_below_it_is_a_hole() -> None:
    residency = mirror(stored([1, 2, 3, 4]), BlocksRemoved((2,)))
    assert (depth(residency), residency.live_blocks, residency.canonical_blocks) == (1, 3, 1)
    apply(residency, stored([2], 1, TOKENS[4:8]))
    assert depth(residency) == 4
    apply(residency, BlocksRemoved((1, 2, 3, 4)))
    assert residency._groups[0].runs == {}
    assert len(trees_of(residency)[0]) == 0


def test_full_report_places_orphans_and_counts_copies() -> None:
    residency = mirror(stored([3, 4], 2, TOKENS[8:16]), stored([1, 2, 3, 4, 5], tokens=TOKENS[:20]))
    assert (depth(residency), residency.live()) == (5, [Live("gpu", 0, 5, 7)])


# --- whatever comes ----------------------------------------------------------------------------------------

HANDLES = st.integers(0, 9) | st.binary(max_size=2)
TIER = st.sampled_from(["gpu", "gpu", "gpu", "cpu", "disk", ""])


@st.composite
def stores(draw: st.DrawFn) -> BlocksStored:
    handles = draw(st.lists(HANDLES, max_size=3))
    size = draw(st.sampled_from([4, 4, 4, 1, 2, 3, 8, 0, -1]))
    honest = [draw(st.integers(0, 1)) for _ in range(max(0, len(handles) * size))]
    return BlocksStored(
        tuple(handles),
        draw(st.none() | HANDLES),
        draw(st.just(honest) | st.just(honest) | st.lists(st.integers(-1, 2**32), max_size=9)),
        size,
        draw(TIER),
        draw(st.sampled_from([0, 0, 0, 1])),
        draw(st.sampled_from(["", FULL, WINDOW, "mamba", "new kind", "cross_attention"])),
        Namespace(draw(st.sampled_from(["", "lo"])), draw(st.sampled_from(["", "\ud800"]))),
        tuple(draw(st.lists(st.builds(ContentSpan, st.sampled_from(["a", "\ud800"]), st.integers(-3, 9)), max_size=2))),
        draw(st.sampled_from([True, True, True, False])),
        draw(st.sampled_from([False, False, False, True])),
        draw(st.sampled_from([0, 4, 6, 9])),
    )


REMOVALS = st.builds(
    BlocksRemoved, st.lists(HANDLES, max_size=3).map(tuple), TIER, st.sampled_from([0, 0, 1]), st.booleans()
)
OTHERS = st.one_of(
    st.builds(BlocksCleared, st.none() | TIER),
    st.builds(StreamGap, st.integers(0, 3)),
    st.builds(StreamRestarted),
    st.builds(UnknownEvent, st.text(max_size=3)),
)
EVENTS = st.one_of(stores(), stores(), stores(), REMOVALS, REMOVALS, OTHERS)
BATCHES = st.lists(st.lists(EVENTS, max_size=6), max_size=12)


def survive(canonical: int, capacity: int, batches: list[list[EngineEvent]]) -> None:
    residency = Residency(Domain("m", "t", canonical), capacity_tokens=capacity)
    published: set[int] = set()
    for events in batches:
        residency.apply(EngineBatch(tuple(events)))
        residency._check()
        assert DOUBT <= residency.confidence <= 1.0
        assert residency.hit_unit >= 0
        assert residency._live.gpu_copies == sum(row.copies for row in residency.live() if row.tier == "gpu")
        changes = residency.take_changes()
        assert not changes.added & published
        assert changes.removed <= published
        published = published - changes.removed | changes.added
        assert published == set(residency.published())
        assert len(set(residency.keys())) == residency.canonical_blocks


@settings(derandomize=True, deadline=None, max_examples=200, database=None)
@given(st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([0, 20]), BATCHES)
def test_nothing_that_an_engine_sends_raises(canonical: int, capacity: int, batches: list[list[EngineEvent]]) -> None:
    survive(canonical, capacity, batches)


class WeakHash:
    """xxh3 cut to 3 bits: nearly every key collides."""

    def __init__(self, data: bytes = b"", seed: int = 0) -> None:
        self.state = xxh3_64(data, seed=seed)

    def update(self, data: bytes) -> None:
        self.state.update(data)

    def intdigest(self) -> int:
        return self.state.intdigest() & 7


@settings(derandomize=True, deadline=None, max_examples=100, database=None)
@given(st.sampled_from([1, 2, 4]), BATCHES)
def test_colliding_keys_do_not_raise_either(canonical: int, batches: list[list[EngineEvent]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain, "xxh3_64", WeakHash)
        patch.setattr(chain, "xxh3_64_intdigest", lambda data, seed: xxh3_64_intdigest(data, seed) & 7)
        survive(canonical, 0, batches)


def test_block_that_collides_is_counted_and_never_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "xxh3_64", WeakHash)
    residency = mirror(stored(range(8)), stored(range(10, 18), tokens=TOKENS[::-1]), stored([20], 17, [1] * 4))
    (tree,) = trees_of(residency)
    assert len(tree) == tree.n_keys < 8
    assert residency.live_blocks == 17
    apply(residency, BlocksRemoved((*range(8), *range(10, 18), 20)))
    assert (residency.live_blocks, len(tree), residency.counts.unknown_removals) == (0, 0, 0)


# --- memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page", "stated"), [(1, 98), (16, 245), (32, 410)])
def test_memory_is_near_what_is_stated_for_an_engine_block_with_the_trees_share(page: int, stated: int) -> None:
    residency = Residency(Domain("m", "t"))
    n = 1024 // page
    tracemalloc.start()
    try:
        for p in range(40):
            handles = tuple(range(2**40 + p * n, 2**40 + p * n + n))
            residency.apply(EngineBatch((BlocksStored(handles, None, array("I", [p] * 1024), page),)))
            residency.take_changes()
        del handles
        used = tracemalloc.get_traced_memory()[0] / (40 * n)
    finally:
        tracemalloc.stop()
    # Dicts take more before CPython 3.11, and up to twice as much right after they grew.
    assert 0.6 * stated < used < 2 * stated
    residency.apply(EngineBatch((BlocksCleared(),)))
    assert residency.live_blocks == 0


def test_memory_of_blocks_that_make_no_run_is_bounded_too() -> None:
    """Stored one by one, children first, each is a span of its own."""
    residency = Residency(Domain("m", "t"))
    first, n = 2**40, 2000
    tracemalloc.start()
    try:
        for i in reversed(range(n)):
            parent = first + i - 1 if i else None
            residency.apply(EngineBatch((BlocksStored((first + i,), parent, array("I", [i] * 16), 16),)))
        residency.take_changes()
        used = tracemalloc.get_traced_memory()[0] / n
    finally:
        tracemalloc.stop()
    assert residency.canonical_blocks == len(residency._groups[0].each()) == n
    assert 300 < used < 650
