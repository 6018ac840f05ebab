"""Experiments of the serving simulator and their commands: small runs, judged as the long ones are."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prefixroute import UsageError, cli
from prefixroute.sim import parallel, plots
from prefixroute.sim.serving import gateway_fleet, grid, paper, scenario, stress
from prefixroute.sim.serving.cells import DEFAULT, CellSettings, run_cell
from prefixroute.sim.serving.figures import Figures
from prefixroute.sim.serving.workloads import ArrivalTrace, RequestArrival, SessionShape, maker

SCENARIOS = Path(__file__).parents[2] / "examples" / "scenarios"


# --- grid --------------------------------------------------------------------------------------------------


def test_a_sample_is_balanced_and_drawn_from_its_seed() -> None:
    cells = grid.sample(240, grid.WORKLOADS, 100, random.Random(1))
    assert len(set(cells)) == 240
    for name, levels in (("nodes", grid.NODES), ("delay_s", grid.DELAYS_S), ("load", grid.LOADS)):
        counts = Counter(getattr(cell, name) for cell in cells)
        assert set(counts) == set(levels)
        assert max(counts.values()) - min(counts.values()) <= 4
    assert cells == grid.sample(240, grid.WORKLOADS, 100, random.Random(1))
    assert cells != grid.sample(240, grid.WORKLOADS, 100, random.Random(2))
    assert len(set(grid.all_cells(100))) == 2880
    chosen = grid.cells_of(grid.QUICK, 101)
    assert len(chosen) == 60
    assert {cell.workload for cell in chosen} == {*grid.WORKLOADS, *grid.MOVING}
    assert {c.capacity for c in chosen if c.workload == "conversations"} <= set(grid.SESSION_CAPACITIES)


def row(default: float, exact: float, p99: float = 1.0, **others: float) -> dict[str, Any]:
    ratios = {"none": 1.0, "longest": 2.0, "least": 1.0, "greedy": 1.0, DEFAULT: default, "exact": exact, **others}
    places = {"nodes": 4, "workload": "uniform", "capacity": 0.5, "gossip_s": 2.0, "load": 0.6, "delay_s": 0.02}
    return {**places, "mean_ratio": ratios, "p99_ratio": dict.fromkeys(ratios, p99)}


def test_a_summary_lists_what_misses_a_bar() -> None:
    rows = [row(0.5, 0.4), row(1.02, 1.0), row(0.66, 0.6, greedy=0.6), row(0.9, 0.9, p99=1.06)]
    found = grid.summarise(rows)
    assert found["worst"][DEFAULT] == 1.02
    assert found["worst"]["longest"] == 2.0
    assert found["regret"] == {"worst": 1.1, "median": pytest.approx(0.96), "within_1.05": 0.75}
    assert found["exact_knowledge_share"] == pytest.approx(
        (0.5 - 0.02 + 0.34 + 0.1) / (0.6 + 0.0 + 0.4 + 0.1), abs=1e-4
    )
    assert [len(miss["bars"]) for miss in found["misses"]] == [1, 1, 1]
    assert "mean" in found["misses"][0]["bars"][0]
    assert "other policy" in found["misses"][1]["bars"][0]
    assert "p99" in found["misses"][2]["bars"][0]
    text = grid.text({"cells": rows, "seeds": [1], "default": DEFAULT, "summary": found})
    assert text.count("misses: ") == 3


def test_a_grid_runs_the_same_in_any_number_of_processes() -> None:
    cells = [CellSettings(4, "zipf1.5", 0.25, 2.0, 0.5, delay, 60) for delay in (0.002, 0.2)]
    told: list[int] = []
    one = grid.run(cells, (1, 2), 1, told.append)
    assert told == [1, 2, 3, 4]
    assert one == grid.run(cells, (1, 2), 2)
    first = one["cells"][0]
    assert set(first["mean_ratio"]) == set(grid.POLICIES)
    assert first["mean_ratio"]["none"] == 1.0
    assert first["seeds"] == [1, 2]
    assert one["summary"]["worst"]["none"] == 1.0


def test_the_commands_of_the_grid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cell.json"
    settings = "nodes=3,workload=uniform,capacity=0.25,requests=80,delay_s=0.001"
    assert cli.main(["simulate", "grid", "--cell", settings, "--policies", "greedy,exact", "--json", str(file)]) == 0
    assert "greedy" in capsys.readouterr().out
    assert set(json.loads(file.read_text())) == {"greedy", "exact"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["grid", "--cell", "colour=red"], "name=value"),
        (["grid", "--cell", "nodes=four"], "must be a number"),
        (["grid", "--cell", "workload=weather"], "unknown workload"),
        (["grid", "--cell", "workload=uniform2"], "unknown workload"),
        (["situations", "--seeds", "0"], "seeds >= 1"),
        (["grid", "--policies", "magic"], "unknown policy"),
        (["grid", "--policies", "none"], "needs the default policy"),
        (["grid", "--seeds", "0"], "seeds >= 1"),
        (["grid", "--quick", "--full"], "not allowed with"),
        (["grid", "--json", "/nowhere/x"], "cannot write"),
        (["grid", "--cell", "nodes=0"], "nodes and requests >= 1"),
        (["grid", "--cell", "load=0"], "load > 0"),
        (["paper", "--seeds", "0"], "seeds >= 1"),
        (["paper", "--plot", "/nowhere/x"], "cannot write"),
        (["gateways", "--requests", "0"], "requests >= 1"),
        (["stress", "--seeds", "0"], "seeds >= 1"),
        (["run", "/nowhere/x.toml"], "cannot read"),
        (["run"], "required: SCENARIO"),
    ],
)
def test_mistakes_are_one_clear_line(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", *arguments]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1


def test_experiments_need_a_worker() -> None:
    with pytest.raises(UsageError):
        parallel.run_all(str, [1], 0)


# --- paper -------------------------------------------------------------------------------------------------


def trace_of_topics(topics: list[int]) -> ArrivalTrace:
    made = maker("uniform")(1.0, 1, 1, 1)
    prompt = made.arrivals[0].prompt
    arrivals = tuple(RequestArrival(float(i), 0, topic, prompt) for i, topic in enumerate(topics))
    return ArrivalTrace("made", arrivals, 1, made.domain)


def test_cycles_are_counted_from_specialised_to_spread() -> None:
    spread = [0, 1, 2, 3] * 5
    servers = [0] * 10 + spread + [2] * 10 + spread
    trace = trace_of_topics([7] * len(servers))
    assert paper.cycles(servers, trace, 7, 4) == 2
    assert paper.cycles(servers, trace, 8, 4) == 0
    assert paper.cycles([0] * len(servers), trace, 7, 4) == 0
    assert paper.cycles(spread, trace_of_topics([7] * len(spread)), 7, 4) == 0
    at, shares = paper.shares_over_time(servers, trace, 7, 4)[9]
    assert (at, shares) == (9.0, [1.0, 0.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("value", "tolerance", "ok"),
    [
        *((0.9, 0.1, True), (0.89, 0.1, False), (1.11, 0.1, False), (1.0, "at least", True), (0.99, "at least", False)),
        *((1.0, "at most", True), (1.01, "at most", False), (1.0, "below", False), (0.99, "below", True)),
    ],
)
def test_tolerances(value: float, tolerance: float | str, ok: bool) -> None:
    assert paper.passes(value, 1.0, tolerance) is ok


def test_longest_match_gains_near_and_loses_far_as_published() -> None:
    def ratio(case: paper.PaperCase) -> float:
        cell = case.cell(quick=True)
        return run_cell(cell, "longest", 1).figures.mean_s / run_cell(cell, "none", 1).figures.mean_s

    assert ratio(paper.PaperCase("B", "zipf1.5")) == pytest.approx(0.77, abs=0.06)
    assert ratio(paper.PaperCase("B", "zipf1.5", 1.0)) > 2


def test_the_rows_cover_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [row.id for row in paper.ROWS]
    assert len(set(ids)) == len(ids)
    assert {i[:2] for i in ids} | {"R7"} == {f"R{i}" for i in range(1, 8)}

    def fake(task: tuple[paper.PaperCase, str, int, bool]) -> paper.PaperRun:
        mean = {"none": 1.0, "longest": 0.96}.get(task[1], 0.9)
        return paper.PaperRun(Figures(mean, 1.0, 0.5, 0.85, 0.0, 0.4), (3, 4, 5))

    monkeypatch.setattr(paper, "_run", fake)
    monkeypatch.setattr(paper, "_same_answers", lambda seed: seed != 2)
    result = paper.run((1, 2), 1)
    by_id = {row["id"]: row for row in result["rows"]}
    assert (by_id["R1"]["value"], by_id["R1"]["ok"]) == (0.96, True)
    assert by_id["R4"]["ok"] is False
    assert (by_id["R6"]["value"], by_id["R6b"]["ok"]) == (3.0, False)
    assert (by_id["R7"]["value"], by_id["R7"]["ok"]) == (0.5, False)
    assert result["ok"] is False
    assert "MISSED" in paper.text(result)


def test_everything_at_once_may_go_wrong() -> None:
    assert paper._same_answers(3)


def test_a_plot_is_a_picture(tmp_path: Path) -> None:
    file = tmp_path / "shares.png"
    plots.plot_shares(str(file), "title", {"one": [(0.0, [0.5, 0.5]), (1.0, [1.0, 0.0])], "two": [(0.0, [1.0])] * 2})
    assert file.read_bytes().startswith(b"\x89PNG")
    plots.plot_lines(str(file), "title", "x", "y", {"one": [(1.0, 2.0), (10.0, 1.0)]}, log=True)
    assert file.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="cannot write"):
        plots.plot_lines("/nowhere/x.png", "title", "x", "y", {"one": [(1.0, 2.0)]})


# --- gateways and stress -----------------------------------------------------------------------------------


def test_gateways_that_hear_the_engines_find_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {
        "hosts": 3,
        "endpoints_per_host": 4,
        "sessions": SessionShape(4, 600, 12, 24, (6.2, 0.7), (100, 2000)),
    }
    cases = {
        "one_gateway": gateway_fleet.GatewaySettings(gateways=1, **small),  # type: ignore[arg-type]
        "eight_unsynced": gateway_fleet.GatewaySettings(gossips=False, **small),  # type: ignore[arg-type]
        "eight_gossip": gateway_fleet.GatewaySettings(**small),  # type: ignore[arg-type]
        "eight_gossip_churn": gateway_fleet.GatewaySettings(churn=3, **small),  # type: ignore[arg-type]
    }
    monkeypatch.setattr(gateway_fleet, "CASES", cases)
    found = gateway_fleet.run((1,), 1, 240)
    rates = {name: found[name]["hit_rate"] for name in cases}
    assert rates["eight_gossip"] > rates["eight_unsynced"] + 0.1
    assert rates["one_gateway"] > rates["eight_unsynced"] + 0.1
    assert rates["eight_gossip_churn"] > rates["eight_unsynced"]
    assert found["eight_gossip_churn"]["replaced"] == 3


def test_stress_runs_its_rows_against_no_routing(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [r for r in stress.ROWS if r.faults or "batching" in r.name or "pair" in r.name]
    monkeypatch.setattr(stress, "ROWS", (*chosen, chosen[0]._replace(name="too strict", bar=0.0)))
    monkeypatch.setattr(stress, "BASES", {"near": stress.BASE})
    monkeypatch.setattr(stress, "GUARDS", (("at most", lambda seed: float(seed), 1.0),))
    result = stress.run((1, 2), 1, 150)
    assert [r["ok"] for r in result["rows"]] == [True] * len(chosen) + [False]
    assert result["guards"] == [{"what": "at most", "value": 2.0, "bar": 1.0, "ok": False}]


@pytest.mark.parametrize("guard", stress.GUARDS[:7], ids=["silent", *stress.LIES, "split", "even"])
def test_guards_hold(guard: tuple[str, Callable[[int], float], float]) -> None:
    _, value, bar = guard
    assert 0 <= value(1) <= bar


def test_slow_gossip_is_compared_with_fast() -> None:
    assert 0.7 < stress._staleness(1, 100) < 1.4


# --- scenarios ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.toml")), ids=lambda path: path.name)
def test_the_examples_run(path: Path) -> None:
    told = scenario.read(path)
    short = msgspec.structs.replace(told, seeds=(1,), workload=msgspec.structs.replace(told.workload, requests=120))
    result = scenario.run(short, path.parent)
    assert set(result["policies"]) == {"none", *told.policies}
    for found in result["policies"].values():
        assert sum(found["node_shares"]) == pytest.approx(1, abs=0.001)
        assert found.get("answered_once", 1) == 1


def test_a_scenario_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"timestamp": 100 * i, "input_length": 1024, "hash_ids": [i % 5, i]} for i in range(40)]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = tmp_path / "mine.json"
    told = {
        "zones": [{"name": "a", "nodes": 1}, {"name": "b", "nodes": 2}],
        "links": [{"zones": ["b", "a"], "delay_ms": 40}],
        "engine": {"cache_tokens": 50000},
        "workload": {"kind": "mooncake", "file": "trace.jsonl", "requests": 40, "rate": 5},
        "policies": ["longest"],
        "seeds": [1],
    }
    file.write_text(json.dumps(told))
    assert cli.main(["simulate", "run", str(file), "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["policies"]) == {"none", "longest"}
    assert scenario.read(file).delays_s()[0][1] == scenario.read(file).delays_s()[2][0] == 0.04


def test_rules_of_a_scenario_decide_what_crosses_zones(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    told = scenario.read(SCENARIOS / "zones.toml")
    short = msgspec.structs.replace(told.workload, requests=150)
    engine = msgspec.structs.replace(told.engine, cache_share=0.5)
    # Of so few requests a low saving would decide next to nothing.
    rules = tuple(msgspec.structs.replace(rule, saving_ms=300.0) for rule in told.rules)
    made = {"seeds": (1,), "policies": ("longest", "rent"), "workload": short, "engine": engine, "rules": rules}
    file = tmp_path / "zones.json"
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(told, **made)))
    out = ("--workers", "1", "--json", str(tmp_path / "r.json"))
    assert cli.main(["simulate", "run", str(file), "--compare-rules", *out]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert list(result) == ["always", "as given", "never"]
    far = {
        (rules, policy): sum(n for pair, n in found["forwards"].items() if pair.split(" > ").count("far") == 1)
        for rules, one in result.items()
        for policy, found in one["policies"].items()
    }
    for policy in ("longest", "rent"):
        assert far["never", policy] == 0
        assert far["always", policy] > far["as given", policy] > 0
        assert sum(result["never"]["policies"][policy]["forwards"].values()) > 0
    shown = capsys.readouterr().out
    assert "rules: never" in shown
    assert "forwards a request, rent: far > far" in shown


def test_rules_are_compared_only_where_there_are_some(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "run", str(SCENARIOS / "office.toml"), "--compare-rules"]) == 2
    assert "there are no rules" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("colour = 1", "unknown field"),
        ("title = 3", "Expected `str`"),
        ("title = ", "Invalid value"),
        ('policies = ["magic"]', "unknown policy"),
        ("seeds = []", "needs a node"),
        ("[workload]\nload = 0", "rate > 0 or load > 0"),
        ('[[failures]]\nkind = "flood"\nnode = 0\nbegin = 0.1', "a failure is of"),
        ('policies = ["exact"]\n[[failures]]\nkind = "crash"\nnode = 0\nbegin = 0.1', "with failures"),
        ('[[zones]]\nname = "a"\n[[zones]]\nname = "b"', "no link says"),
        ('[[links]]\nzones = ["a", "b"]\ndelay_ms = 1', "names the zone"),
        ('[workload]\nkind = "weather"', "unknown workload"),
        ('policies = ["exact"]\n[[rules]]\nfrom = "*"\nto = "here"', "with rules the policies"),
        ('policies = ["rent"]\n[[rules]]\nfrom = "*"\nto = "there"', "names the zone 'there'"),
        ('policies = ["rent"]\n[[rules]]\nfrom = "*"\nto = "here"\nforward = "rarely"', "always, above, never"),
        ('policies = ["rent"]\n' + 2 * '[[rules]]\nfrom = "*"\nto = "here"\n', "two rules are from"),
    ],
)
def test_a_wrong_scenario_says_what_is_wrong(text: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=complaint):
        scenario.read(file).cell(tmp_path)
