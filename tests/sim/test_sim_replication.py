"""The simulator of replication: no schedule breaks a rule, runs repeat bit by bit, failures become short stories."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from prefixroute import NodeSettings, ReplicaChanged, UsageError, cli
from prefixroute.replication.receiving import TABLE, Order, Reach, Verdict
from prefixroute.sim import CALM, Engine, InvariantError, Link, LogNormal, Network, Schedule, Step, Violation, generate
from prefixroute.sim.replication import command
from prefixroute.sim.replication.actions import ACTIONS
from prefixroute.sim.replication.oracle import held_bytes
from prefixroute.sim.replication.quiet import settle
from prefixroute.sim.replication.schedule import parse, play
from prefixroute.sim.replication.shrink import shrink

# --- schedules ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", range(1, 201, 20))
def test_no_schedule_breaks_a_rule(first: int) -> None:
    for seed in range(first, first + 20):
        violation = play(generate(seed, 30)).violation
        assert violation is None, f"seed {seed}: {violation}"


def test_no_schedule_of_todays_luck_breaks_a_rule() -> None:
    """Seeds that nobody chose: what fails says how to repeat it."""
    for _ in range(8):
        seed = random.SystemRandom().getrandbits(31)
        violation = play(generate(seed, 30)).violation
        command = f"prefixroute simulate replication --schedules 1 --steps 30 --seed {seed}"
        assert violation is None, f"{violation}; to repeat it: {command}"


def test_schedules_take_every_action() -> None:
    drawn = {step.action for seed in range(20) for step in generate(seed, 100).steps}
    assert drawn == {name for name, action in ACTIONS.items() if action.weight}


def test_settings_are_drawn_from_small_to_large() -> None:
    settings = [generate(seed, 0).settings for seed in range(60)]
    assert {one.fan_out for one in settings} == {1, 2, 3}
    assert min(one.datagram_bytes for one in settings) <= 1000
    assert max(one.datagram_bytes for one in settings) >= 60000
    assert any(one.burst_bytes == one.datagram_bytes for one in settings)


# --- repeating ---------------------------------------------------------------------------------------------


def test_the_same_seed_sends_the_same_bytes() -> None:
    traces = [play(generate(seed, 40), trace=True).network.trace() for seed in (1, 1, 2)]
    assert traces[0] == traces[1] != traces[2]


def test_the_order_of_hashes_changes_nothing() -> None:
    code = (
        "from prefixroute.sim.replication.schedule import generate, play\n"
        "print([play(generate(seed, 40), trace=True).network.trace() for seed in range(4)])\n"
    )
    printed = set()
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": hash_seed, "PATH": "", "PYTHONPATH": str(Path(cli.__file__).parents[1])},
            capture_output=True,
            text=True,
            check=True,
        )
        printed.add(done.stdout)
    assert len(printed) == 1


def test_a_schedule_is_read_back_as_it_was_written() -> None:
    for seed in range(20):
        schedule = generate(seed, 60)
        assert parse(str(schedule)) == schedule


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0.1 dance n0", "line 1"),
        ("seed 1\n0.1 store n0", "line 2"),
        ("0.1 store n0 many", "line 1"),
        ("settings colour=1", "line 1"),
        ("settings fan_out=0", "fan_out >= 1"),
        ("soon store n0 1", "line 1"),
        ("0.1", "line 1"),
        ("nodes 40", "2 to 6 nodes"),
    ],
)
def test_a_schedule_that_cannot_be_read_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse(text)


def test_any_steps_can_be_left_out() -> None:
    for seed in range(10):
        schedule = generate(seed, 40)
        some = tuple(step for step in schedule.steps if random.Random(f"{seed}{step}").random() < 0.4)
        assert play(dataclasses.replace(schedule, steps=some)).violation is None


# --- stories -----------------------------------------------------------------------------------------------


def test_a_failure_becomes_a_short_story_that_can_be_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLE, (Order.SAME, Reach.PAST, True), Verdict.REPLACE)
    for seed in range(20):
        schedule = generate(seed, 60, nodes=3)
        outcome = play(schedule)
        if outcome.violation is not None:
            break
    assert outcome.violation is not None
    story = shrink(schedule, outcome)
    assert story.violation.rule == outcome.violation.rule
    assert len(story.schedule.steps) < len(schedule.steps) / 3
    assert story.runs <= 400
    text = str(story)
    assert str(story.violation) in text
    assert "hears from" in text
    again = play(parse(story.to_json()["schedule"])).violation
    assert again == story.violation
    monkeypatch.undo()
    assert play(story.schedule).violation is None


@pytest.mark.parametrize(
    "story",
    [
        # A life that reuses its incarnation comes to the same version with another set.
        "seed 9\nnodes 3\nsettings interval_s=0.1 suspect_after_s=1.2 forget_after_s=2.4\n"
        "0.05 store n1 1\n0 split n1\n0.05 restart n1 0\n0 store n1 1",
        # One that was learnt, and forgotten while it stood still, must say again where it is.
        "seed 71\nnodes 3\nsettings interval_s=0.1 idle_interval_s=0.1 publish_share=0.5 publish_within_s=0.0 "
        "datagram_bytes=60000 burst_bytes=60000 forget_after_s=4.0 learn_peers=True contact=its-name\n"
        "0.1 start n4\n4.18 pause n4 waits",
        # An owner chooses its anchors anew in the middle of quiet.
        "seed 1\nnodes 3\nsettings digest_bytes=300\n0.1 store n0 60\n5.2 evict n0 0.5",
    ],
)
def test_stories_that_once_failed_are_over(story: str) -> None:
    assert play(parse(story)).violation is None


def test_only_failures_have_stories() -> None:
    schedule = generate(1, 2)
    with pytest.raises(ValueError, match="broke no rule"):
        shrink(schedule, play(schedule))


# --- the command -------------------------------------------------------------------------------------------

COMMAND = ["simulate", "replication", "--steps", "15", "--seed", "3"]


def test_the_command_writes_a_result_that_does_not_depend_on_the_number_of_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*COMMAND, "--schedules", "6", "--workers", "2", "--json", str(tmp_path / "two")]) == 0
    said = capsys.readouterr()
    assert "6 schedules of 15 steps from seed 3: 0 violations" in said.out
    assert cli.main([*COMMAND, "--schedules", "6", "--workers", "1", "--json", "-"]) == 0
    one = json.loads(capsys.readouterr().out)
    two = json.loads((tmp_path / "two").read_text())
    assert one.pop("seconds") > 0
    assert two.pop("seconds") > 0
    assert one == two
    assert {name: one[name] for name in ("schedules", "steps", "seed", "violations", "stories")} == {
        "schedules": 6,
        "steps": 15,
        "seed": 3,
        "violations": 0,
        "stories": [],
    }


def test_a_violation_is_told_counted_and_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TABLE, (Order.SAME, Reach.NEXT, True), Verdict.DROP)
    file = tmp_path / "result.json"
    assert cli.main([*COMMAND, "--schedules", "2", "--workers", "1", "--json", str(file)]) == 1
    assert "seed 3: quiet: " in capsys.readouterr().out
    result = json.loads(file.read_text())
    assert result["violations"] == len(result["failed"]) == 2
    assert result["rules"] == {"quiet": 2}
    assert [story["seed"] for story in result["stories"]] == [3, 4]
    assert cli.main(["simulate", "replication", "--replay", str(file), "--json", "-"]) == 1
    assert json.loads(capsys.readouterr().out)["stories"][0]["violation"]["rule"] == "quiet"
    monkeypatch.undo()
    plain = tmp_path / "schedule.txt"
    plain.write_text(result["stories"][0]["schedule"])
    assert cli.main(["simulate", "replication", "--replay", str(plain)]) == 0


@pytest.mark.parametrize("bad", [(0, 1, 1, 1), (1, -1, 1, 1), (1, 1, 1, 0)])
def test_numbers_that_make_no_sense_are_refused(bad: tuple[int, int, int, int]) -> None:
    with pytest.raises(UsageError, match="schedules >= 1"):
        command.run(*bad)


# --- the network -------------------------------------------------------------------------------------------


def two(**settings: float) -> Network:
    net = Network(1, settings=NodeSettings(**settings))  # type: ignore[arg-type]
    for name in ("n0", "n1"):
        net.add(name)
    net.run(1)
    return net


def test_what_is_blocked_one_way_still_comes_the_other_way() -> None:
    net = two()
    net.block_one_way("n0", "n1")
    before = {name: node.counters["datagrams_received"] for name, node in net.nodes.items()}
    net.run(1)
    assert net.nodes["n0"].counters["datagrams_received"] > before["n0"]
    assert net.nodes["n1"].counters["datagrams_received"] == before["n1"]


def test_a_pause_buffers_or_loses_what_comes() -> None:
    for buffers in (True, False):
        net = two()
        net.pause("n1", buffers=buffers)
        net.run(1)
        before = net.nodes["n1"].counters["datagrams_received"]
        net.resume("n1")
        net.run(0)
        assert (net.nodes["n1"].counters["datagrams_received"] > before) is buffers


def test_a_nodes_clock_jumps_forward_and_never_goes_back() -> None:
    net = two()
    read = net.read("n0")
    net.jump("n0", 500.0)
    assert net.read("n0") == read + 500
    net.run(2)
    assert net.read("n0") == pytest.approx(read + 502)
    assert net.read("n1") == pytest.approx(read + 2)
    settle(net)


def test_links_delay_lose_repeat_and_reorder_as_told() -> None:
    rng = random.Random(1)
    assert all(0.0005 <= delay <= 0.002 for _ in range(100) for delay in CALM.delays(rng))
    assert Link(up=False).delays(rng) == []
    assert sum(len(Link(loss=0.25).delays(rng)) for _ in range(4000)) == pytest.approx(3000, rel=0.05)
    assert sum(len(Link(duplicate=0.5).delays(rng)) for _ in range(4000)) == pytest.approx(6000, rel=0.05)
    late = [delay for _ in range(4000) for delay in Link(late=0.5, late_s=2.0).delays(rng)]
    assert sum(delay > 0.1 for delay in late) == pytest.approx(1900, rel=0.1)
    skewed = sorted(Link(delay_s=LogNormal(0.01, 1.0)).delays(rng)[0] for _ in range(4001))
    assert skewed[2000] == pytest.approx(0.01, rel=0.1)
    assert skewed[-1] > 0.1
    for bad in ({"loss": 1.1}, {"duplicate": -0.1}, {"late_s": -1.0}, {"delay_s": (-1.0, 1.0)}):
        with pytest.raises(UsageError):
            Link(**bad)  # type: ignore[arg-type]


def test_traffic_is_counted_by_node_and_kind() -> None:
    net = two()
    for name, node in net.nodes.items():
        assert net.sent_bytes[name] == node.counters["bytes_sent"] > 0
        assert net.sent_datagrams[name] == node.counters["datagrams_sent"]
        assert sum(n for (node_name, _), n in net.bytes_of_kind.items() if node_name == name) == net.sent_bytes[name]
    assert {kind for _, kind in net.datagrams_of_kind} == {1, 2, 3}


# --- the engine --------------------------------------------------------------------------------------------


def test_engines_share_prefixes_and_evict_leaves_first() -> None:
    net = two()
    node, engine = net.nodes["n0"], net.engines["n0/0"]
    engine.store(10, net.now)
    engine.fork(5, 0.6, net.now)
    blocks = [node.residency("n0/0").canonical_blocks]
    engine.evict(net.now)
    blocks.append(node.residency("n0/0").canonical_blocks)
    engine.evict(net.now, 0.5)
    blocks.append(node.residency("n0/0").canonical_blocks)
    assert blocks == [15, 11, 5]
    assert [len(handles) for _, handles in engine.chains] == [5]
    engine.lose(3, net.now)
    assert node.residency("n0/0").partial
    engine.restart(net.now)
    assert (node.residency("n0/0").canonical_blocks, engine.chains) == (0, [])


@pytest.mark.parametrize("seed", range(5))
def test_an_engine_and_its_mirror_agree(seed: int) -> None:
    net = two()
    rng = random.Random(seed)
    engine = Engine(net.nodes["n0"], "n0/0", rng)
    for _ in range(150):
        match rng.randrange(5):
            case 0 | 1:
                engine.fork(rng.randrange(1, 9), rng.random(), net.now)
            case 2:
                engine.store(rng.randrange(1, 9), net.now)
            case _:
                engine.evict(net.now, rng.choice((0.1, 0.5, 1.0)))
        held = {handle for _, handles in engine.chains for handle in handles}
        assert net.nodes["n0"].residency("n0/0").canonical_blocks == len(held)


# --- the oracle --------------------------------------------------------------------------------------------


def test_a_leak_is_seen() -> None:
    net = two()
    net.oracle.memory("n0", net.nodes["n0"], net.now)
    before = held_bytes(net.nodes["n0"])
    net.nodes["n0"].journal.counts["leak", None] = np.zeros(20000, np.uint64)  # type: ignore[assignment]
    assert held_bytes(net.nodes["n0"]) == before + 160000
    with pytest.raises(InvariantError, match="memory"):
        net.oracle.memory("n0", net.nodes["n0"], net.now)


def test_an_endpoint_that_nobody_had_is_seen() -> None:
    net = two()
    del net.oracle.published["n1/0"]
    net.engines["n1/0"].store(1, net.now)
    with pytest.raises(InvariantError, match="no node ever had"):
        net.run(1)


def test_a_replica_that_is_lost_without_a_word_is_seen() -> None:
    net = two()
    node = net.nodes["n0"]
    told = node.events
    net.oracle.acted("n0", node, {"n0/0"}, [], told(), net.now)
    node.remove_peer("n1", net.now)
    assert [event.endpoint for event in told() if isinstance(event, ReplicaChanged)] == ["n1/0"]
    with pytest.raises(InvariantError, match="no event told it"):
        net.oracle.acted("n0", node, {"n0/0"}, [], [], net.now)


def test_a_violation_reads_as_a_line() -> None:
    violation = Violation("budget", "n0", "", 1.5, "too much")
    assert str(InvariantError(violation)) == "budget: at n0, of no endpoint, 1.500 s: too much"
    assert str(Schedule(7, 2, NodeSettings(), (Step(0.1, "store", ("n0", 3)),))) == (
        "seed 7\nnodes 2\nsettings\n0.1 store n0 3\n"
    )
