"""Residency guessed from what was served: an LRU model, and a mirror that follows it."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from prefixroute import BlocksRemoved, BlocksStored, ContentSpan, Domain, EngineBatch, Namespace, Residency, TokenChain
from prefixroute.endpoint.history import DEFAULT_CAPACITY_BLOCKS, RoutingHistory
from prefixroute.keys.chain import ChainSpec

DOMAIN = Domain("m", "t", 4)
PLAIN = Namespace()
Block = tuple[Namespace, tuple[int, ...]]


def prompt(tokens: list[int], namespace: Namespace = PLAIN, *items: ContentSpan) -> TokenChain:
    return TokenChain(ChainSpec(4, DOMAIN.mix), DOMAIN.root_key(namespace), tokens, items, namespace)


def follow(residency: Residency, batch: EngineBatch) -> None:
    residency.apply(batch)
    residency._check()
    assert residency.counts.unknown_removals == residency.counts.orphans == residency.counts.hash_only == 0


@pytest.mark.parametrize("capacity", [1, 2, 5, 20, 10_000])
def test_mirror_of_the_guess_is_an_lru_cache_of_that_capacity(capacity: int) -> None:
    rng = random.Random(capacity)
    history, residency = RoutingHistory(capacity), Residency(DOMAIN)
    cached: OrderedDict[Block, None] = OrderedDict()
    heads = [[rng.randrange(99) for _ in range(12)] for _ in range(4)]
    for _ in range(150):
        namespace = rng.choice([Namespace(), Namespace(salt="s")])
        tokens = rng.choice(heads)[: rng.randint(0, 12)] + [rng.randrange(3) for _ in range(rng.randint(0, 20))]
        follow(residency, history.served(prompt(tokens, namespace)))
        for depth in reversed(range(1, min(len(tokens) // 4, capacity) + 1)):
            cached[namespace, tuple(tokens[: 4 * depth])] = None
            cached.move_to_end((namespace, tuple(tokens[: 4 * depth])))
        while len(cached) > capacity:
            cached.popitem(last=False)
        assert len(history._blocks) == len(cached) <= capacity
        assert set(residency.keys()) == {prompt(list(t), space).key(len(t) // 4) for space, t in cached}
        assert {row.copies for row in residency.live()} <= {len(cached)}


def test_repeated_prompt_says_nothing() -> None:
    history = RoutingHistory(10)
    (first,) = history.served(prompt(list(range(8)))).events
    assert isinstance(first, BlocksStored)
    assert (len(first.handles), first.parent, list(first.tokens), first.block_size) == (2, None, list(range(8)), 4)
    assert history.served(prompt(list(range(8)))) == EngineBatch(())
    (more,) = history.served(prompt(list(range(12)))).events
    assert isinstance(more, BlocksStored)
    assert (more.parent, list(more.tokens)) == (first.handles[-1], [8, 9, 10, 11])


def test_what_makes_room_goes_before_what_takes_it() -> None:
    history = RoutingHistory(2)
    history.served(prompt([1] * 8))
    removed, stored = history.served(prompt([2] * 4)).events
    assert isinstance(removed, BlocksRemoved)
    assert removed.handles == (prompt([1] * 8).key(2),)
    assert isinstance(stored, BlocksStored)


@pytest.mark.parametrize("capacity", [0, 3])
def test_prompt_longer_than_the_cache_is_cut(capacity: int) -> None:
    history, residency = RoutingHistory(capacity), Residency(DOMAIN)
    follow(residency, history.served(prompt(list(range(40)))))
    assert (len(history._blocks), residency.canonical_blocks) == (capacity, capacity)


def test_prompts_with_items_and_prompts_shorter_than_a_block_are_left_out() -> None:
    history = RoutingHistory()
    assert history.served(prompt([1] * 8, Namespace(), ContentSpan("cat", 5))) == EngineBatch(())
    assert history.served(prompt([1, 2, 3])) == EngineBatch(())
    assert (len(history._blocks), history.capacity_blocks) == (0, DEFAULT_CAPACITY_BLOCKS)
