"""Simulated sessions over placements: figures that can be worked out by hand, contenders, networks, changing worlds."""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import mean

import planning
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixroute import UsageError, cli
from prefixroute.plan import OnlineSettings, Problem, Span, adaptive, at_rate, conservative, with_requests
from prefixroute.sim.placement import command
from prefixroute.sim.placement.drifting_world import ChangingWorld, WorldChange
from prefixroute.sim.placement.fleets import FleetShape, made_fleet
from prefixroute.sim.placement.sessions import Ask, from_trace, poisson, read_arrivals, serve
from prefixroute.sim.placement.wan import BUILT_IN, built_in, network, of_links, read_graph, read_landmarks

EXAMPLE = Path(__file__).parents[2] / "examples" / "plan" / "fleet.toml"


# --- sessions ----------------------------------------------------------------------------------------------


def one_server(slots: int) -> Problem:
    """A server that holds all five blocks and so many sessions, each of 5,100 ms."""
    return Problem.of(
        blocks=5,
        block_bytes=1,
        session_bytes=0.1,
        memory_bytes=[5 + 0.5 * slots],
        decode_ms=[10],
        rtt_ms=[[50]],
        requests=[1],
        output_tokens=51,
        setup_ms=0,
    )


def test_a_request_takes_its_tokens_and_waits_by_the_schedule_of_asking() -> None:
    problem = one_server(1)
    done = serve(problem, [Span(1, 5)], problem.slots([Span(1, 5)]), [Ask(0.0, 0), Ask(1.0, 0), Ask(2.0, 0)])
    assert [each.whole_s - each.wait_s for each in done] == pytest.approx([5.1] * 3)
    assert [each.first_s - each.wait_s for each in done] == pytest.approx([0.1] * 3)
    # Slots come free after 4.1 s; who asks again after 1, 3 and 7 s finds them after 7. The third waits for the second.
    assert [each.wait_s for each in done] == [0, 7, 15]
    done = serve(one_server(3), [Span(1, 5)], one_server(3).slots([Span(1, 5)]), [Ask(float(i), 0) for i in range(3)])
    assert [each.wait_s for each in done] == [0, 0, 0]


def test_spans_with_a_gap_serve_nobody() -> None:
    with pytest.raises(UsageError, match="every block"):
        serve(one_server(1), [Span(1, 4)], [4], [Ask(0.0, 0)])


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6), st.integers(1, 30))
def test_no_more_than_the_design_load_at_once_waits_for_nothing(seed: int, load: int) -> None:
    problem = with_requests(made_fleet(built_in("europe"), seed % 7).problem, [load])
    placement = conservative(problem, load)
    assert placement is not None
    done = serve(problem, placement.spans, problem.slots(placement.spans), [Ask(0.001 * i, 0) for i in range(load)])
    assert all(each.wait_s == 0 for each in done)


def test_arrivals_of_a_rate() -> None:
    asks = poisson(2.0, 4000, random.Random(1), 3, [1, 1, 2])
    assert asks == poisson(2.0, 4000, random.Random(1), 3, [1, 1, 2])
    assert asks[0].at_s == 0
    assert asks[-1].at_s == pytest.approx(2000, rel=0.05)
    assert mean(ask.client == 2 for ask in asks) == pytest.approx(0.5, abs=0.03)
    for bad in ((0.0, 1), (1.0, 0)):
        with pytest.raises(UsageError):
            poisson(*bad, random.Random(1))


def test_arrivals_of_a_trace(tmp_path: Path) -> None:
    lines = tmp_path / "trace.jsonl"
    lines.write_text("".join(json.dumps({"timestamp": 500 + 1000 * i * i}) + "\n" for i in range(20)))
    table = tmp_path / "trace.csv"
    table.write_text("TIMESTAMP,ContextTokens\n2023-11-16 18:17:03.9799600,1\n2023-11-16 18:17:04.9799600,2\n")
    assert read_arrivals(table) == pytest.approx([0.0, 1.0])
    times = read_arrivals(lines)
    assert times == [float(i * i) for i in range(20)]
    asks = from_trace(times, 2.0, 10, random.Random(1))
    assert asks[0].at_s == 0
    assert asks[-1].at_s == pytest.approx(9 / 2.0)
    with pytest.raises(UsageError, match="20 arrivals, and the run needs 30"):
        from_trace(times, 2.0, 30, random.Random(1))
    lines.write_text('{"timestamp": 1}\n{"time": 2}\n')
    with pytest.raises(UsageError, match=r"trace\.jsonl:2: no arrival"):
        read_arrivals(lines)
    with pytest.raises(UsageError, match="cannot read"):
        read_arrivals(tmp_path / "none")


# --- networks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_networks_are_symmetric_and_no_way_is_free(name: str) -> None:
    wan = built_in(name)
    n = len(wan.places)
    assert len(set(wan.places)) == n == 12
    for i in range(n):
        for j in range(n):
            assert wan.rtt_ms[i][j] == wan.rtt_ms[j][i]
            assert (wan.rtt_ms[i][j] == 0) == (i == j)
            assert wan.rtt_ms[i][j] < 350


def test_round_trips_are_twice_the_shortest_way() -> None:
    wan = of_links("w", "abc", [(0, 1, 1.0), (1, 0, 1.0), (1, 2, 2.0), (2, 1, 2.0), (0, 2, 9.0), (2, 0, 9.0)])
    assert wan.rtt_ms == ((0, 2, 6), (2, 0, 4), (6, 4, 0))
    with pytest.raises(UsageError, match="no way from a to b"):
        of_links("w", "ab", [])


GRAPH = """NODES 3
label x y
a 1 2
b 1 3
c 2 2

EDGES 4
label src dest weight bw delay
edge_0 0 1 1 1000 1500
edge_1 1 0 1 1000 1500
edge_2 1 2 1 1000 500
edge_3 2 1 1 1000 500
"""


def test_a_topology_file(tmp_path: Path) -> None:
    path = tmp_path / "three.graph"
    path.write_text(GRAPH)
    assert read_graph(path) == network(str(path)) == ("three", ("a", "b", "c"), ((0, 3, 4), (3, 0, 1), (4, 1, 0)))
    for old, new, said in (
        ("edge_0 0 1 1 1000 1500", "edge_0 0 1 1 1000", ":9: not a row"),
        ("edge_0 0 1 1 1000 1500", "edge_0 0 7 1 1000 1500", ":9: a link joins nodes 0 to 2"),
        ("edge_0 0 1 1 1000 1500", "edge_0 0 1 1 1000 far", ":9: not numbers"),
        (GRAPH, "", "no NODES"),
    ):
        path.write_text(GRAPH.replace(old, new))
        with pytest.raises(UsageError, match=said):
            read_graph(path)
    with pytest.raises(UsageError, match="cannot read"):
        read_graph(tmp_path / "none.graph")


def test_a_file_of_landmarks(tmp_path: Path) -> None:
    path = tmp_path / "marks.csv"
    path.write_text("measure_id,latency_m1,latency_m2\nx,1.0,10\ny,5.0,2.0\nz,-1,3\n")
    wan = read_landmarks(path, 2, random.Random(1))
    assert set(wan.places) == {"row-2", "row-3"}
    assert wan.rtt_ms == ((0, 6), (6, 0))
    with pytest.raises(UsageError, match="2 usable rows"):
        network(str(path), 3)
    for text, said in (("a,b\n", "no columns latency_m1"), ("latency_m1\nfar\n", r":2: a round trip is not a number")):
        path.write_text(text)
        with pytest.raises(UsageError, match=said):
            read_landmarks(path, 1, random.Random(1))
    with pytest.raises(UsageError, match="america, europe, world"):
        network("mars")


def test_fleets_are_drawn_from_their_seed() -> None:
    made, again, other = (made_fleet(built_in("world"), seed, FleetShape(clients=2)) for seed in (1, 1, 2))
    assert made.problem.rtt_ms.tolist() == again.problem.rtt_ms.tolist() != other.problem.rtt_ms.tolist()
    assert made.problem.servers == 20
    assert sum(memory > 5e10 for memory in made.problem.memory_bytes) == 4
    assert (made.problem.rtt_ms == made.raw_rtt_ms + 100).all()
    with pytest.raises(UsageError):
        FleetShape(servers=0)


# --- contenders --------------------------------------------------------------------------------------------


def rows(**changes: object) -> dict[tuple[str, float, str], dict[str, object]]:
    tasks = [
        command.PlacementTask("europe", False, FleetShape(), rate, 60, seed, "", tuple(command.CONTENDERS))
        for rate in (0.1, 2.0)
        for seed in range(3)
    ]
    return {(row["network"], row["rate"], row["contender"]): row for row in command.compare(tasks)}


def test_contenders_meet_the_same_and_ours_is_not_worse_than_any() -> None:
    found = rows()
    assert found == rows()
    assert {name for *_, name in found} == set(command.CONTENDERS)
    for rate in (0.1, 2.0):
        ours = found["europe", rate, "adaptive"]
        assert all(ours["whole_s"] <= found["europe", rate, name]["whole_s"] for name in command.CONTENDERS)  # type: ignore[operator]
        assert found["europe", rate, command.BASELINE]["gain"] == 0
    assert found["europe", 2.0, "adaptive"]["gain"] > 0.25  # type: ignore[operator]


def test_the_command_prints_a_table_and_writes_json_and_a_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = [
        "simulate",
        "place",
        "--networks",
        "world",
        "--rates",
        "1",
        "--requests",
        "20",
        "--seeds",
        "2",
        "--workers",
        "1",
    ]
    written, plot = tmp_path / "rows.json", tmp_path / "rates.png"
    assert cli.main([*base, "--json", str(written), "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    assert "20 requests a run, 2 seeds" in printed
    result = json.loads(written.read_text())
    assert len(result["rows"]) == len(command.CONTENDERS) == printed.count("world  ")
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert cli.main([*base, "--contenders", "adaptive", "--json", "-"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert "gain" not in row and row["whole_s"] > 0
    assert cli.main(["simulate", "place", str(EXAMPLE), "--requests", "20", "--seeds", "1", "--workers", "1"]) == 0
    assert "fleet " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--contenders", "best"], "unknown contender 'best'"),
        (["--rates", "fast"], "rates are numbers"),
        (["--rates", "0"], "rates must be above 0"),
        (["--requests", "0"], "requests >= 1"),
        (["--networks", "mars"], "no built-in network 'mars'"),
        (["--servers", "0"], "a server and a client at least"),
        (["--trace", "/nowhere/at/all"], "cannot read /nowhere/at/all"),
        (["/nowhere/at/all"], "cannot read /nowhere/at/all"),
    ],
)
def test_what_cannot_be_simulated_is_refused(capsys: pytest.CaptureFixture[str], options: list[str], said: str) -> None:
    assert cli.main(["simulate", "place", *options]) == 2
    assert said in capsys.readouterr().err


# --- changing worlds ---------------------------------------------------------------------------------------


TIGHT = OnlineSettings(headroom=0.0)


def story(
    seed: int, adapt: bool, changes: list[WorldChange], settings: OnlineSettings | None = None, wan: str = "world"
) -> ChangingWorld:
    made = made_fleet(built_in(wan), seed)
    asks: list[Ask] = []
    for rate, count in ((0.2, 30), (1.5, 300)):
        begin = asks[-1].at_s + 1.0 if asks else 0.0
        asks += [Ask(begin + ask.at_s, ask.client) for ask in poisson(rate, count, made.rng)]
    return ChangingWorld(made.problem, 0.2, asks, changes, seed, adapt, settings)


def test_a_planner_that_follows_the_load_serves_it_sooner_and_never_opens_a_gap() -> None:
    means: dict[bool, list[float]] = {False: [], True: []}
    for seed in range(4):
        for adapt in (False, True):
            found = story(seed, adapt, [], TIGHT, "america").run()
            assert found.unserved == 0 and len(found.done) == 330
            assert found.gaps_s == 0 and bool(found.moves) == adapt
            assert all(done.first_s <= done.whole_s and done.wait_s >= 0 for _, done in found.done)
            means[adapt].append(mean(done.whole_s for _, done in found.done))
    assert mean(means[True]) < 0.8 * mean(means[False])


def test_equal_seeds_give_equal_stories_and_every_slot_comes_back() -> None:
    worlds = [
        story(4, True, [WorldChange(200.0, "congest", (0, 1, 2), 3.0), WorldChange(260.0, "congest", (0, 1, 2))])
        for _ in "ab"
    ]
    first, second = (world.run() for world in worlds)
    assert first == second
    for world in worlds:
        world.planner.ledger._check()
        assert len(world.planner.ledger) == 0


def test_requests_of_a_server_that_leaves_begin_anew_elsewhere() -> None:
    world = story(1, True, [])
    route = world.planner.route(0, 0.0)
    assert route is not None
    world.planner.finished(route.booking)
    gone, slow = (hop.server for hop in route.chain.hops[:2])
    world = story(1, True, [WorldChange(40.0, "leave", (gone,)), WorldChange(150.0, "slow", (slow,), 4.0)])
    found = world.run()
    assert found.unserved == 0
    assert len(found.done) == 330
    assert found.restarts > 0
    assert world.planner.spans[gone] is None


def test_a_world_that_nobody_can_serve_gives_up() -> None:
    problem = planning.small([1, 1], [1, 1], [4, 4], 0.1, blocks=6, requests=[1])
    world = ChangingWorld(problem, 0.01, [Ask(0.0, 0), Ask(10.0, 0)], [WorldChange(5.0, "leave", (0,))], 1)
    found = world.run()
    assert (len(found.done), found.unserved) == (1, 1)
    assert found.gaps_s > 0


def test_a_given_placement_is_where_it_begins() -> None:
    made = made_fleet(built_in("america"), 3)
    spans = adaptive(at_rate(made.problem, 0.5)).placement.spans
    world = ChangingWorld(made.problem, 0.5, [Ask(0.0, 0)], [], 1, settings=OnlineSettings(), spans=spans)
    assert tuple(world.planner.spans) == spans
    assert world.run().moves == []


def test_following_and_staying_are_told_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    base = [
        "simulate",
        "place",
        "--changes",
        "--networks",
        "europe",
        "--requests",
        "150",
        "--seeds",
        "2",
        "--workers",
        "1",
    ]
    assert cli.main([*base, "--json", "-"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["unserved"] == 0 and row["gaps_s"] == 0
    assert 0 < row["follows_s"] <= 1.1 * row["stays_s"]
    assert cli.main([*base, "--headroom", "0", "--rates", "0.2,0.3"]) == 0
    printed = capsys.readouterr().out
    assert "150 requests after the jump from 0.2 to 0.3 a second" in printed
    for extra, said in (
        ([str(EXAMPLE)], "leave FLEET, --trace and --plot out"),
        (["--headroom", "-1"], "--headroom is 0 or more"),
        (["--rates", "1,2,3"], "two rates"),
    ):
        assert cli.main([*base, *extra]) == 2
        assert said in capsys.readouterr().err
