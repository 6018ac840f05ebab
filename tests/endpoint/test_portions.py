"""Large engine batches in portions: each small enough, and together what the batch does."""

from __future__ import annotations

import random

import pytest
from network import DOMAIN

from prefixroute import BlocksRemoved, BlocksStored, ContentSpan, EngineBatch, Node, NodeSettings
from prefixroute.endpoint.local import PORTION_BLOCKS, is_small, portions
from prefixroute.events import BlocksCleared, EngineEvent
from prefixroute.residency.mirror import Residency
from prefixroute.testing import stored

BLOCK = DOMAIN.block_size


def tokens(n: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(32000) for _ in range(n * BLOCK)]


def run(handles: range, parent: int | None) -> BlocksStored:
    """Blocks whose tokens tell their handles."""
    return BlocksStored(tuple(handles), parent, [handle for handle in handles for _ in range(BLOCK)], BLOCK)


def blocks(batch: EngineBatch) -> int:
    return sum(len(event.handles) for event in batch.events if isinstance(event, (BlocksStored, BlocksRemoved)))


def test_a_small_batch_is_small_and_a_large_one_is_cut() -> None:
    assert is_small(EngineBatch((run(range(PORTION_BLOCKS), None),)))
    assert not is_small(EngineBatch((run(range(PORTION_BLOCKS + 1), None),)))
    assert not is_small(EngineBatch((BlocksCleared(),) * (PORTION_BLOCKS + 1)))
    batch = EngineBatch((run(range(7), None), BlocksCleared(), BlocksRemoved(tuple(range(5)), told=9)), 3, 1.5)
    parts = list(portions(batch, 3))
    assert [blocks(part) for part in parts] == [3, 3, 1, 3, 2]
    assert all((part.rank, part.ts) == (3, 1.5) for part in parts)
    assert sum(part.told for part in parts) == 2 + batch.told
    again = [event for part in parts for event in part.events if isinstance(event, BlocksStored)]
    assert [event.parent for event in again] == [None, 2, 5]
    assert [list(event.tokens) for event in again] == [[h for h in e.handles for _ in range(BLOCK)] for e in again]


@pytest.mark.parametrize(
    "event",
    [
        BlocksStored(tuple(range(9)), None, tokens(9), BLOCK, confirmed=True),
        BlocksStored(tuple(range(9)), None, tokens(9), BLOCK, contents=(ContentSpan(b"x", 5),)),
        BlocksStored(tuple(range(9)), None, (), BLOCK),
    ],
    ids=["a report", "with items", "without tokens"],
)
def test_what_is_said_by_the_whole_of_an_event_stays_whole(event: EngineEvent) -> None:
    batch = EngineBatch((event, BlocksCleared()))
    assert [part.events for part in portions(batch, 4)] == [(event,), (BlocksCleared(),)]


@pytest.mark.parametrize("most", [1, 2, 5])
def test_portions_together_do_what_the_batch_does(most: int) -> None:
    rng = random.Random(most)
    whole, cut = Residency(DOMAIN), Residency(DOMAIN)
    live: list[list[int]] = []
    for step in range(60):
        events: list[EngineEvent] = []
        for _ in range(rng.randrange(1, 4)):
            start = 1000 * (len(live) + 1)
            parent = rng.choice(live)[-1] if live and rng.random() < 0.5 else None
            if live and rng.random() < 0.4:
                path = rng.choice(live)
                gone = path[rng.randrange(len(path)) :][::-1]
                events.append(BlocksRemoved(tuple(gone)))
            else:
                live.append(list(range(start, start + rng.randrange(1, 9))))
                events.append(run(range(start, live[-1][-1] + 1), parent))
        batch = EngineBatch(tuple(events), ts=float(step))
        whole.apply(batch, step)
        for part in portions(batch, most):
            cut.apply(part, step)
        assert set(cut.keys()) == set(whole.keys())
        assert (cut.live_blocks, cut.counts.stored, cut.counts.removed) == (
            whole.live_blocks,
            whole.counts.stored,
            whole.counts.removed,
        )
    cut._check()


def finish(node: Node, now: float) -> int:
    """Handle timers until nothing is left; return how many."""
    n = 0
    while node.next_timer() <= now:
        node.handle_timer(now)
        n += 1
    return n


def a_node() -> Node:
    node = Node("a", DOMAIN, rng=random.Random(1), now=0.0, settings=NodeSettings(digest_bytes=1 << 30))
    node.add_endpoint(incarnation=1, now=0.0)
    finish(node, 0.0)
    return node


def test_a_node_applies_a_large_batch_with_its_timers() -> None:
    node, prompt = a_node(), tokens(5 * PORTION_BLOCKS + 1)
    node.apply("a/0", stored(prompt), 1.0)
    held = node.residency("a/0")
    assert held.canonical_blocks == PORTION_BLOCKS
    node._check()
    # What comes meanwhile waits its turn: it removes blocks that are not there yet.
    gone = stored(prompt).events[0]
    assert isinstance(gone, BlocksStored)
    node.apply("a/0", EngineBatch((BlocksRemoved(gone.handles[-7:]),)), 1.0)
    assert held.canonical_blocks == 2 * PORTION_BLOCKS
    assert node.next_timer() <= 1.0
    assert 4 <= finish(node, 1.0) <= 8
    assert held.canonical_blocks == 5 * PORTION_BLOCKS + 1 - 7
    assert held.counts.unknown_removals == 0
    assert node.route(prompt, 1.0).matched_tokens == held.canonical_blocks * BLOCK
    node._check()


def test_an_endpoint_is_removed_in_the_middle_of_a_batch() -> None:
    node = a_node()
    node.apply("a/0", stored(tokens(3 * PORTION_BLOCKS)), 1.0)
    node.remove_endpoint("a/0", 1.0)
    finish(node, 1.0)
    assert len(node._table.index) == 0
    node._check()
