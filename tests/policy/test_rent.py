"""Rent: stretches of prompts, what is paid for them and how that fades; and the idle age at which blocks go."""

from __future__ import annotations

import random
from dataclasses import replace
from math import exp, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixroute import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Domain,
    EngineBatch,
    Node,
    Residency,
    StreamRestarted,
)
from prefixroute.keys.chain import STRIDE, ChainSpec, TokenChain
from prefixroute.policy.pricing import Rents, Stretch, stretches_of
from prefixroute.testing import stored as stored_batch

SPEC = ChainSpec(1, 3)
DOMAIN = Domain("m", "t", block_size=4)


def chain(depth: int, fork: int | None = None) -> TokenChain:
    """A prompt of one-token blocks that goes its own way after `fork` blocks."""
    fork = depth if fork is None else fork
    return TokenChain(SPEC, 9, [*range(fork), *range(10**6, 10**6 + depth - fork)])


@settings(derandomize=True, deadline=None, database=None)
@given(st.integers(0, 200), st.integers(1, 200))
def test_stretches_are_the_blocks_between_cut_at_strides(held: int, more: int) -> None:
    found = stretches_of(chain(held + more + 5), held, held + more)
    assert sum(stretch.blocks for stretch in found) == more
    assert [s.blocks for s in stretches_of(chain(4096), 0, 4096)] == [32, *(STRIDE << i for i in range(7))]
    assert len(found) <= more.bit_length() + 1
    assert len({stretch.key for stretch in found}) == len(found)


def test_prompts_that_fork_later_share_the_stretches_before() -> None:
    one, other = stretches_of(chain(150), 10, 140), stretches_of(chain(150, 100), 10, 140)
    assert one[:2] == other[:2]
    assert not {s.key for s in one[2:]} & {s.key for s in other[2:]}
    # Both go the same way from the last cut on for a few blocks, and share that account.
    assert stretches_of(chain(150), 10, 110)[-1] == stretches_of(chain(150, 100), 10, 110)[-1]
    assert stretches_of(chain(150), 10, 110)[-1] == Stretch(chain(150).key(65), 46)


def paid_s(rents: Rents, stretches: list[Stretch], now: float, age_s: float) -> float:
    return sum(rents.paid(stretches, now, age_s))


def charge(rents: Rents, stretches: list[Stretch], rent_s: float, now: float, age_s: float) -> None:
    rents.charge(stretches, rents.paid(stretches, now, age_s), rent_s, now)


def test_rent_is_spread_by_blocks_and_adds_up() -> None:
    rents = Rents()
    stretches = stretches_of(chain(90), 0, 80)
    charge(rents, stretches, 8.0, 0.0, inf)
    assert [paid_s(rents, [stretch], 0.0, inf) for stretch in stretches] == pytest.approx([3.2, 3.2, 1.6])
    charge(rents, stretches[:1], 1.0, 50.0, inf)
    assert paid_s(rents, stretches, 99.0, inf) == pytest.approx(9.0)
    rents.clear(stretches[1:])
    assert paid_s(rents, stretches, 99.0, inf) == pytest.approx(4.2)
    assert len(rents) == 1


def test_rent_decays_at_the_age_of_evictions() -> None:
    rents = Rents()
    stretches = stretches_of(chain(20), 0, 20)
    charge(rents, stretches, 1.0, 100.0, 30.0)
    assert paid_s(rents, stretches, 130.0, 30.0) == pytest.approx(exp(-1))
    charge(rents, stretches, 1.0, 130.0, 30.0)
    assert paid_s(rents, stretches, 130.0, 30.0) == pytest.approx(1 + exp(-1))
    assert paid_s(rents, stretches, 131.0, 0.0) == 0.0


def test_accounts_are_bounded_and_the_stalest_go_first() -> None:
    rents = Rents(most=10)
    for i in range(50):
        charge(rents, [Stretch(i, 1)], 1.0, float(i), inf)
        charge(rents, [Stretch(0, 1)], 1.0, float(i), inf)
    assert len(rents) == 10
    assert paid_s(rents, [Stretch(0, 1)], 50.0, inf) == 51.0
    assert [paid_s(rents, [Stretch(i, 1)], 50.0, inf) for i in (40, 41, 49)] == [0.0, 1.0, 1.0]


# --- idle age ----------------------------------------------------------------------------------------------


def blocks(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(n * 4)]


def store(residency: Residency, seed: int, n: int, now: float) -> tuple[int, ...]:
    handles = tuple(range(100 * seed, 100 * seed + n))
    residency.apply(EngineBatch((BlocksStored(handles, None, blocks(seed, n), 4),)), now)
    return handles


def test_what_is_evicted_was_idle_since_it_was_stored_or_used() -> None:
    residency = Residency(DOMAIN)
    assert residency.eviction_age_s == inf
    first, second = store(residency, 1, 5, 10.0), store(residency, 2, 5, 20.0)
    node = Node("x", DOMAIN, rng=random.Random(1), now=0.0)
    residency.use(node.chain(blocks(1, 5)), 5, 50.0)
    residency.apply(EngineBatch((BlocksRemoved(second),)), 60.0)
    assert residency.eviction_age_s == 40.0
    residency.apply(EngineBatch((BlocksRemoved(first),)), 60.0)
    assert residency.eviction_age_s == pytest.approx(40.0 + 0.1 * (10.0 - 40.0))


@pytest.mark.parametrize("event", [BlocksCleared(), StreamRestarted()])
def test_a_cleared_cache_evicted_nothing(event: BlocksCleared | StreamRestarted) -> None:
    residency = Residency(DOMAIN)
    store(residency, 1, 5, 10.0)
    residency.apply(EngineBatch((event,)), 60.0)
    assert residency.eviction_age_s == inf


def test_a_use_reaches_all_that_lies_above_it() -> None:
    residency = Residency(DOMAIN)
    tokens = blocks(1, 8)
    other = tokens[:16] + blocks(9, 4)
    residency.apply(EngineBatch((BlocksStored(tuple(range(8)), None, tokens, 4),)), 0.0)
    residency.apply(EngineBatch((BlocksStored(tuple(range(20, 24)), 3, other[16:], 4),)), 0.0)
    node = Node("x", DOMAIN, rng=random.Random(1), now=0.0)
    residency.use(node.chain(other), 8, 100.0)
    residency.apply(EngineBatch((BlocksRemoved((4, 5, 6, 7)),)), 130.0)
    assert residency.eviction_age_s == 130.0, "the branch that was not used"
    residency.apply(EngineBatch((BlocksRemoved((20, 21, 22, 23)),)), 130.0)
    residency.apply(EngineBatch((BlocksRemoved((0, 1, 2, 3)),)), 130.0)
    assert residency.eviction_age_s == pytest.approx((130.0 * 0.9 + 3.0) * 0.9 + 3.0)


def test_a_replay_ages_blocks_by_the_engines_own_time() -> None:
    """All of it comes at one moment of the node's clock; between a store and its eviction the engine let 40 s pass."""
    residency = Residency(DOMAIN)
    first, second = list(range(16)), list(range(100, 116))

    def kept(tokens: list[int]) -> EngineBatch:
        return stored_batch(tokens, 4)

    def at(ts: float, batch: EngineBatch) -> EngineBatch:
        return replace(batch, ts=ts)

    gone = next(e.handles for e in kept(first).events if isinstance(e, BlocksStored))
    residency.apply(at(1.7e9, kept(first)), 1000.0)
    residency.apply(at(1.7e9 + 40.0, EngineBatch((BlocksRemoved(gone), *kept(second).events))), 1000.0)
    assert residency.eviction_age_s == pytest.approx(40.0)
    # From here on it is live: the engine's time and the node's go on together, and a use by the node's clock counts.
    node = Node("n", DOMAIN, rng=random.Random(1), now=0.0)
    residency.use(node.chain(second), 4, 1010.0)
    gone = next(e.handles for e in kept(second).events if isinstance(e, BlocksStored))
    residency.apply(at(1.7e9 + 65.0, EngineBatch((BlocksRemoved(gone),))), 1025.1)
    assert residency.eviction_age_s == pytest.approx(40.0 + 0.1 * (15.0 - 40.0), abs=0.02)
