"""Reports: an engine tells again what it holds, which ends doubt and fills holes, and adds no copies."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from prefixroute import BlocksRemoved, BlocksStored, ContentSpan, Domain, EngineBatch, Residency, StreamGap
from prefixroute.events import CPU, GPU, EngineEvent
from prefixroute.residency.stores import parts_of

DOMAIN = Domain("m", "t")
SIZE = 32


def run(first: int, last: int, **changes: object) -> BlocksStored:
    """Blocks `first` to `last` of one long prompt, below the one before."""
    handles = tuple(range(first, last + 1))
    tokens = tuple(range((first - 1) * SIZE, last * SIZE))
    plain = BlocksStored(handles, first - 1 if first > 1 else None, tokens, SIZE)
    return replace(plain, **changes)  # type: ignore[arg-type]


def report(last: int, **changes: object) -> BlocksStored:
    return run(1, last, confirmed=True, **changes)


def told(*events: EngineEvent) -> Residency:
    residency = Residency(DOMAIN)
    say(residency, *events)
    return residency


def say(residency: Residency, *events: EngineEvent) -> None:
    residency.apply(EngineBatch(events))
    residency._check()


def held(residency: Residency) -> int:
    """Blocks of the engine's that are matchable."""
    blocks, rest = divmod(residency.canonical_blocks, SIZE // DOMAIN.block_size)
    assert not rest
    return blocks


def test_a_report_of_what_is_known_adds_no_copies() -> None:
    residency = told(run(1, 6), report(6), report(4))
    (live,) = residency.live()
    assert (live.handles, live.copies) == (6, 6)
    assert residency.counts.confirmed == 0, "there was nothing to confirm"
    say(residency, *(BlocksRemoved((n,)) for n in (6, 5, 4, 3, 2, 1)))
    assert (residency.live_blocks, held(residency)) == (0, 0)


def test_a_store_of_the_same_adds_copies() -> None:
    (live,) = told(run(1, 6), run(1, 6)).live()
    assert live.copies == 12


def test_a_report_teaches_a_late_joiner_and_brings_home_its_orphans() -> None:
    residency = told(StreamGap(7), run(4, 6))
    assert (held(residency), residency.live_blocks) == (0, 3)
    say(residency, report(6))
    assert (held(residency), residency.live_blocks) == (6, 6)
    assert residency.counts.confirmed == 3
    (live,) = residency.live()
    assert live.copies == 6


def test_a_report_ends_the_doubt_of_its_blocks_alone() -> None:
    residency = told(run(1, 8), StreamGap(1))
    assert residency.confidence == 0.5
    say(residency, report(6))
    assert residency.counts.confirmed == 6
    assert residency.confidence == 1.0 - 0.5 * 2 / 8
    say(residency, report(8))
    assert residency.confidence == 1.0
    (live,) = residency.live()
    assert live.copies == 8


def test_a_request_that_reuses_nothing_reports_what_it_stores() -> None:
    residency = told(report(3), run(4, 6))
    assert held(residency) == 6
    say(residency, *(BlocksRemoved((n,)) for n in (6, 5, 4, 3, 2, 1)))
    assert residency.live_blocks == 0
    assert residency.counts.unknown_removals == 0


def test_a_copy_in_another_tier_is_none_in_this_one() -> None:
    residency = told(run(1, 3, tier=CPU), report(3))
    assert {(live.tier, live.copies) for live in residency.live()} == {(CPU, 3), (GPU, 3)}


@pytest.mark.parametrize(
    "changes",
    [{"group_kind": "sliding_window"}, {"tokens": ()}, {"mappable": False}],
    ids=["window group", "no tokens", "not mappable"],
)
def test_what_a_report_cannot_vouch_for_is_left_out(changes: dict[str, object]) -> None:
    residency = told(report(6, **changes))
    assert residency.live_blocks == 0
    assert residency.counts.confirmed == 0


@pytest.mark.parametrize("seed", range(12))
def test_after_a_report_the_prompt_is_held_once_whatever_was_known(seed: int) -> None:
    rng = random.Random(seed)
    residency = told(StreamGap(1))
    known: set[int] = set()
    for _ in range(rng.randint(0, 5)):
        first = rng.randint(1, 10)
        fresh = run(first, rng.randint(first, 12))
        if known.isdisjoint(map(int, fresh.handles)):
            known.update(map(int, fresh.handles))
            say(residency, fresh)
        if rng.random() < 0.3:
            say(residency, StreamGap(1))
    say(residency, report(12))
    assert held(residency) == residency.live_blocks == 12
    assert residency.confidence == 1.0
    (live,) = residency.live()
    assert live.copies == 12


def test_parts_keep_order_parents_and_contents() -> None:
    whole = report(6, contents=(ContentSpan("cat", 10), ContentSpan("dog", 3 * SIZE + 4)))
    parts = list(parts_of(whole, {3, 6}.__contains__))
    assert [part.handles for _, part in parts] == [(1, 2), (3,), (4, 5), (6,)]
    assert [known for known, _ in parts] == [False, True, False, True]
    first, second = (part for known, part in parts if not known)
    assert (first.parent, second.parent) == (None, 3)
    assert (first.tokens, second.tokens) == (whole.tokens[: 2 * SIZE], whole.tokens[3 * SIZE : 5 * SIZE])
    assert (first.contents, second.contents) == ((ContentSpan("cat", 10),), (ContentSpan("dog", 4),))
    assert not first.confirmed and not second.confirmed


def test_a_report_of_nothing_or_all_that_is_known_is_one_part() -> None:
    whole = report(6)
    assert list(parts_of(whole, lambda handle: True)) == [(True, replace(whole, confirmed=False))]
    assert list(parts_of(whole, lambda handle: False)) == [(False, replace(whole, confirmed=False))]
