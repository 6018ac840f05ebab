"""The virtual clock: the order of equal moments, time that never goes back, and an agenda that is empty."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixroute.sim.clock import Agenda

PLANNED = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=30)


@given(PLANNED)
def test_events_happen_by_time_then_rank_then_the_order_of_planning(planned: list[tuple[int, int]]) -> None:
    agenda, happened = Agenda(), []

    def happens(what: tuple[int, int, int], now: float) -> None:
        assert now == what[0]
        happened.append(what)

    for i, (at, rank) in enumerate(planned):
        agenda.plan(at, happens, (at, rank, i), (rank,))
    while agenda.next_at() < inf:
        agenda.step()
    assert happened == sorted((at, rank, i) for i, (at, rank) in enumerate(planned))


def test_what_is_planned_while_something_happens_waits_its_turn() -> None:
    agenda, happened = Agenda(0.0), []

    def first(name: str, now: float) -> None:
        happened.append(name)
        agenda.plan(now, happened_at, "planned by the first")

    def happened_at(name: str, now: float) -> None:
        happened.append(name)

    agenda.plan(1.0, first, "first")
    agenda.plan(1.0, happened_at, "second")
    for _ in range(3):
        agenda.step()
    assert happened == ["first", "second", "planned by the first"]


def test_time_never_goes_back() -> None:
    agenda, moments = Agenda(), []
    agenda.plan(-5.0, lambda _, now: moments.append(now), None)
    agenda.step()
    agenda.skip_to(3.0)
    agenda.skip_to(2.0)
    agenda.plan(1.0, lambda _, now: moments.append(now), None)
    assert agenda.next_at() == 1.0
    agenda.step()
    assert moments == [-5.0, 3.0]
    assert agenda.now == 3.0


def test_an_empty_agenda_has_nothing_to_do() -> None:
    agenda = Agenda(7.0)
    assert (agenda.now, agenda.next_at()) == (7.0, inf)
    with pytest.raises(IndexError):
        agenda.step()
