"""Where requests enter: own traffic, one hot prefix, and clients that wait for their answers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from prefixroute.cli import main
from prefixroute.sim.serving import situations, workloads
from prefixroute.sim.serving.cells import run_cell, trace_of
from prefixroute.sim.serving.closed_loop import Answer, ClosedLoop, ClosedRun, counted
from prefixroute.sim.serving.situations import OwnRow

# --- workloads ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("own", "least", "most"), [(1.0, 1.0, 1.0), (0.9, 0.85, 0.95), (0.0, 0.0, 0.0)])
def test_a_share_of_own_traffic_asks_for_its_origins_topics(own: float, least: float, most: float) -> None:
    trace = workloads.maker("own0.5", own=own)(1.0, 800, 4, 3)
    mine = [a.topic // workloads.OWN_TOPICS == a.origin for a in trace.arrivals]
    assert least <= sum(mine) / 800 <= most
    assert trace.prefix_tokens == 4 * workloads.OWN_TOPICS * workloads.OWN_TOKENS
    assert {a.prompt.shared for a in trace.arrivals} == {workloads.OWN_TOKENS // 16}


def test_own_topics_are_skewed_as_named() -> None:
    drawn = Counter(a.topic for a in workloads.maker("own2")(1.0, 800, 1, 3).arrivals)
    assert drawn[0] > 3 * drawn[1] > 0
    even = Counter(a.topic for a in workloads.maker("own")(1.0, 800, 1, 3).arrivals)
    assert max(even.values()) < 3 * min(even.values())


# --- clients that wait -------------------------------------------------------------------------------------


@pytest.mark.parametrize("gateway", [False, True])
def test_a_client_has_one_request_under_way_and_thinks_after_each_answer(gateway: bool) -> None:
    loop = ClosedLoop(clients=3, gateway=gateway, until_s=6.0)
    run = ClosedRun(loop, "greedy", 1)
    answers = run.last()
    asked = sorted(answer.at - answer.latency_s for answer in answers)
    done = sorted(answer.at for answer in answers)
    for at in asked:
        assert sum(a <= at for a in asked) - sum(d < at for d in done) <= 3
    cycle_s = loop.think_s + sum(answer.latency_s for answer in answers) / len(answers)
    assert len(answers) == pytest.approx(3 * 6.0 / cycle_s, rel=0.1)
    assert {answer.server for answer in answers} <= set(range(4)), "a gateway serves nothing"


def test_answers_are_counted_from_a_moment_on() -> None:
    answers = [Answer(1.0, 0.1, 0), Answer(6.0, 0.2, 0), Answer(7.0, 0.4, 1), Answer(8.0, 0.6, 1)]
    assert counted(answers) == (4, pytest.approx(0.325), 0.5)
    assert counted(answers, 5.0) == (3, pytest.approx(0.4), pytest.approx(2 / 3))
    assert counted([]) == (0, 0.0, 0.0)


def test_a_hot_prefix_spreads_behind_a_gateway() -> None:
    mine, best = (counted(ClosedRun(SHORT_GATEWAY, policy, 5).last()) for policy in ("rent", "greedy"))
    assert mine.answers >= 0.98 * best.answers
    assert mine.hottest <= 0.35


SHORT_GATEWAY = ClosedLoop(clients=48, gateway=True, until_s=12.0)


def test_a_hot_prefix_leaves_the_one_node_at_which_everything_enters() -> None:
    loop = ClosedLoop(clients=64, until_s=20.0)
    mine, best = (counted(ClosedRun(loop, policy, 5).last(), 10.0) for policy in ("rent", "greedy"))
    assert mine.answers >= 0.95 * best.answers
    assert mine.hottest <= 0.4


# --- own traffic -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        OwnRow(4, 1.0, 1.0, 0.85, requests=300),
        OwnRow(4, 1.0, 0.7, 0.7, requests=300),
        OwnRow(4, 1.0, 1.0, 0.85, situations.SLOW, 2.0, 0.002, requests=300),
    ],
    ids=["fast", "small caches", "slow"],
)
@pytest.mark.parametrize("seed", [501, 703])
def test_a_fleet_whose_traffic_is_all_own_is_that_of_no_routing_request_by_request(row: OwnRow, seed: int) -> None:
    trace = trace_of(row.cell(), seed)
    none, mine = (run_cell(row.cell(), policy, seed, trace).served for policy in ("none", "rent"))
    assert mine.latency_s == pytest.approx(none.latency_s)
    assert mine.server == none.server


@pytest.mark.parametrize("own", [0.95, 0.8])
def test_a_fleet_with_some_shared_traffic_is_better_than_no_routing(own: float) -> None:
    found = situations.own_ratios(OwnRow(4, own, 1.0, 0.85, requests=400), 501)
    assert found.whole <= 0.8
    assert found.late <= 0.7


def test_the_command_runs_its_rows_and_tells_what_is_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(situations, "OWN", (OwnRow(2, 1.0, 1.0, 0.5, requests=40),))
    monkeypatch.setattr(situations, "CLOSED", (ClosedLoop(clients=4, gateway=True, until_s=3.0),))
    monkeypatch.setattr(situations, "HOTTEST_BAR", 1.0)
    arguments = ["simulate", "situations", "--seeds", "1", "--workers", "1"]
    assert main(arguments) == 0
    assert "own 100%" in capsys.readouterr().out
    monkeypatch.setattr(situations, "HOTTEST_BAR", 0.0)
    result: dict[str, Any] = situations.run((1,), 1)
    assert [row["ok"] for row in (*result["own"], *result["closed"])] == [True, False]
    assert main(arguments) == 1
    assert "MISSED" in capsys.readouterr().out
