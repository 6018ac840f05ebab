"""Callables in the engine's own process, fed by the tap's thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefixroute_inproc import Tap, add_sink, remove_sink
from publishing import Seen, run
from tapping import folder, following, removal, tap_at

from prefixroute.events import EngineBatch, StreamGap

__all__ = ["folder"]


def turned(tap: Tap) -> None:
    """What the thread would do."""
    for _ in range(3):
        tap.turn()


@pytest.fixture
def sunk() -> Iterator[Seen]:
    seen = Seen()
    add_sink(seen)
    yield seen
    remove_sink(seen)


def test_a_sink_gets_every_batch_and_every_gap(sunk: Seen) -> None:
    with tap_at(None, started=False, queue_batches=2) as tap:
        for number in range(4):
            tap.publish(removal(number))
        turned(tap)
        tap.publish(removal(4))
        turned(tap)
    assert sunk == ["0", "1", "G2", "4"]


def test_what_a_sink_gets_was_decoded_with_the_taps_rank(sunk: Seen) -> None:
    got: list[EngineBatch] = []
    add_sink(got.append)
    with tap_at(None, started=False, rank=3) as tap:
        tap.publish(removal(1))
        turned(tap)
    remove_sink(got.append)
    assert [batch.rank for batch in got] == [3]


def test_a_sink_that_comes_late_is_told_what_it_missed() -> None:
    seen = Seen()
    with tap_at(None, started=False) as tap:
        for number in range(3):
            tap.publish(removal(number))
        turned(tap)
        add_sink(seen)
        tap.publish(removal(3))
        turned(tap)
        remove_sink(seen)
        tap.publish(removal(4))
        turned(tap)
    assert seen == ["G3", "3"]


def test_what_a_sink_raises_is_counted_and_is_a_gap_to_it(caplog: pytest.LogCaptureFixture) -> None:
    seen = Seen()

    def moody(batch: EngineBatch) -> None:
        if batch.ts in (1.0, 2.0) or (isinstance(batch.events[0], StreamGap) and len(seen) == 1 and not caplog.records):
            raise RuntimeError("not now")
        seen(batch)

    add_sink(moody)
    try:
        with tap_at(None, started=False) as tap:
            for number in range(4):
                tap.publish(removal(number))
            turned(tap)
            assert (tap.stats().sink_errors, tap.stats().broken) == (2, False)
    finally:
        remove_sink(moody)
    assert seen == ["0", "G1", "G1", "3"]
    assert len(caplog.records) == 1


def test_a_sink_and_a_reader_see_the_same(folder: Path, sunk: Seen) -> None:
    async def test() -> None:
        with tap_at(folder / "t") as tap:
            async with following(folder / "t") as (_, seen):
                for number in range(50):
                    tap.publish(removal(number))
                await seen.until(*range(50))
        assert sunk == seen

    run(test)


def test_publishing_does_not_wait_for_a_sink_that_does(folder: Path) -> None:
    entered, leave = threading.Event(), threading.Event()

    def stuck(batch: EngineBatch) -> None:
        entered.set()
        leave.wait(20)

    add_sink(stuck)
    try:
        with tap_at(None, queue_batches=10) as tap:
            tap.publish(removal(0))
            assert entered.wait(20)
            for number in range(1, 100):
                tap.publish(removal(number))
            assert (tap.stats().queued, tap.stats().dropped) == (10, 89)
            leave.set()
    finally:
        remove_sink(stuck)
