"""The serving simulator's parts: workloads, engines, runs over real nodes, exact knowledge, faults."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from prefixroute import POLICIES, BlocksRemoved, BlocksStored, LongestMatch, NoRouting, Residency, UsageError
from prefixroute.sim.intervals import interval
from prefixroute.sim.serving import workloads
from prefixroute.sim.serving.cells import CellSettings, cell, run_cell, trace_of
from prefixroute.sim.serving.exact_knowledge import ExactKnowledge
from prefixroute.sim.serving.faults import Fault, FaultSettings, Faulty, served_once
from prefixroute.sim.serving.figures import figures
from prefixroute.sim.serving.loop import Gossiping, ServingSettings, Unrouted
from prefixroute.sim.serving.serving_engine import BatchServer, FifoServer, LruBlocks, Speed

SMALL = CellSettings(4, "zipf1.5", 0.25, 1.0, 0.5, 0.01, 300)


# --- workloads ---------------------------------------------------------------------------------------------


def test_topics_have_the_lengths_of_the_papers_recipe() -> None:
    lengths = workloads.prefix_lengths()
    assert lengths[:8] == [857, 628, 1170, 1051, 534, 1162, 415, 569]
    assert (sum(lengths), min(lengths), max(lengths)) == (39138, 250, 1493)


@pytest.mark.parametrize("kind", ["uniform", "zipf2.5", "rotate", "flash", "conversations", "agentic"])
def test_a_workload_is_the_same_for_a_seed_and_another_for_another(kind: str) -> None:
    make = workloads.maker(kind)
    one, same, other = make(1.0, 60, 4, 7), make(1.0, 60, 4, 7), make(1.0, 60, 4, 8)

    def told(trace: workloads.ArrivalTrace) -> list[Any]:
        return [(a.at, a.origin, a.topic, bytes(a.prompt.tokens)) for a in trace.arrivals]

    assert told(one) == told(same)
    assert told(one) != told(other)
    assert len({bytes(a.prompt.tokens) for a in one.arrivals}) == 60, "every prompt ends in its own words"
    assert {a.origin for a in one.arrivals} == {0, 1, 2, 3}
    assert all(a.at < b.at for a, b in pairwise(one.arrivals))
    assert [a.at for a in one.at_rate(4.0).arrivals] == [a.at / 4 for a in one.arrivals]


def test_topics_share_their_prefix_and_zipf_prefers_the_first() -> None:
    trace = workloads.maker("zipf2")(1.0, 400, 4, 1)
    by_topic: dict[int, list[workloads.SimulatedPrompt]] = {}
    for arrival in trace.arrivals:
        by_topic.setdefault(arrival.topic, []).append(arrival.prompt)
    assert len(by_topic[0]) > 0.5 * 400
    length = workloads.prefix_lengths()[0]
    first, second = by_topic[0][:2]
    assert first.tokens[:length] == second.tokens[:length]
    assert first.blocks == second.blocks
    assert len(first.blocks) == first.shared == length // 16
    assert first.tokens[length:] != second.tokens[length:]
    tails = workloads.maker("zipf2", cache_tails=True)(1.0, 2, 4, 1).arrivals[0].prompt
    assert len(tails.blocks) == tails.chain.depth > tails.shared


def test_rotation_moves_the_hottest_topic_and_a_flash_makes_a_cold_one_hot() -> None:
    rate = 1.0
    rotated = workloads.maker("rotate")(rate, 900, 4, 1).arrivals
    early = [a.topic for a in rotated if a.at < 300]
    late = [a.topic for a in rotated if 300 < a.at < 600]
    assert max(set(early), key=early.count) == 0
    assert max(set(late), key=late.count) == 7
    flashed = workloads.maker("flash")(rate, 600, 4, 1).arrivals
    assert sum(a.topic == 56 for a in flashed[200:400]) > 100
    assert sum(a.topic == 56 for a in (*flashed[:200], *flashed[400:])) < 20


def test_a_session_begins_with_all_that_was_said_before() -> None:
    trace = workloads.maker("conversations")(1.0, 300, 4, 1)
    said: dict[int, bytes] = {}
    followed = 0
    for arrival in trace.arrivals:
        words = bytes(arrival.prompt.tokens)
        if arrival.topic in said:
            before = said[arrival.topic]
            assert words.startswith(before)
            assert arrival.prompt.shared == len(before) // 4 // 16
            followed += 1
        said[arrival.topic] = words
    assert followed > 150


def test_a_mooncake_trace_is_expanded(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1200, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 3000, "input_length": 1030, "output_length": 5, "hash_ids": [1, 2, 4]},
        {"timestamp": 6000, "input_length": 600, "output_length": 5, "hash_ids": [9, 2]},
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = workloads.maker("mooncake", file=str(file))(1.0, 10, 2, 1)
    one, two, three = (arrival.prompt for arrival in trace.arrivals)
    assert [p.chain.n_tokens for p in (one, two, three)] == [1200, 1030, 600]
    assert one.blocks[:2] == two.blocks[:2]
    assert (two.shared, three.shared) == (2, 0)
    assert three.blocks[0] != one.blocks[0]
    assert trace.arrivals[-1].at == pytest.approx(3.0)
    for text in ("no json", '{"timestamp": 1}\n{"timestamp": 2}\n', ""):
        file.write_text(text)
        with pytest.raises(UsageError, match="trace"):
            workloads.maker("mooncake", file=str(file))(1.0, 10, 2, 1)


@pytest.mark.parametrize("name", ["weather", "zipfX", "mooncake"])
def test_an_unknown_workload_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        workloads.maker(name)


# --- engines -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "whole"), [("zipf1.1", False), ("zipf1.1", True), ("conversations", False)])
def test_a_cache_tells_its_node_exactly_what_it_does(kind: str, whole: bool) -> None:
    trace = workloads.maker(kind)(1.0, 200, 1, 3)
    cache, mirror = LruBlocks(150, 16, whole), Residency(trace.domain)
    held: set[Any] = set()
    evicted = 0
    for arrival in trace.arrivals:
        prompt = arrival.prompt
        before = next((i for i, block in enumerate(prompt.blocks) if block not in held), len(prompt.blocks))
        cached, batch = cache.admit(prompt, arrival.at)
        assert cached == min(before, (prompt.chain.n_tokens - 1) // 16) * 16
        if batch is not None:
            mirror.apply(batch)
            for event in batch.events:
                if isinstance(event, BlocksStored):
                    held |= set(event.handles)
                elif isinstance(event, BlocksRemoved):
                    held -= set(event.handles)
                    evicted += len(event.handles)
        assert len(cache) == len(held) <= 150
        assert set(mirror.keys()) == held, "handles of the simulator are keys"
    assert evicted > 0
    assert 0 < cache.eviction_age_s < float("inf")


def test_a_cache_forgets_the_least_recently_used_from_its_end() -> None:
    trace = workloads.maker("uniform")(1.0, 200, 1, 1)
    prompts = {arrival.topic: arrival.prompt for arrival in trace.arrivals}
    a, b, c = prompts[0], prompts[1], prompts[2]
    cache = LruBlocks(len(a.blocks) + len(b.blocks) + 5, 16)
    cache.admit(a, 0.0)
    cache.admit(b, 1.0)
    cache.admit(a, 2.0)
    cache.admit(c, 3.0)
    assert cache.held(a) == len(a.blocks) + len(b.blocks) + 5 - len(c.blocks)
    assert cache.held(b) == 0
    assert cache.held(c) == len(c.blocks)
    assert cache.room_tokens == 0


class Clock:
    """Plans and runs what a server plans."""

    def __init__(self) -> None:
        self.planned: list[tuple[float, Any, Any]] = []
        self.done: list[tuple[Any, float]] = []

    def plan(self, at: float, what: Any, argument: Any) -> None:
        self.planned.append((at, what, argument))

    def finish(self, job: Any, now: float) -> None:
        self.done.append((job, round(now, 6)))

    def run(self) -> None:
        while self.planned:
            self.planned.sort(key=lambda item: item[0])
            at, what, argument = self.planned.pop(0)
            what(argument, at)


def test_a_fifo_server_takes_one_after_another() -> None:
    clock = Clock()
    server = FifoServer(Speed(0.1, 0.001), clock.plan, clock.finish)
    server.take("a", 100, 0.0)
    server.take("b", 400, 0.05)
    assert server.wait_s(0.05) == pytest.approx(0.65)
    assert server.queued == 2
    clock.run()
    assert clock.done == [("a", 0.2), ("b", 0.7)]
    assert server.queued == 0


def test_a_batching_server_shares_steps_and_decodes_beside() -> None:
    clock = Clock()
    speed = Speed(0.1, 0.001, batch_tokens=300, output_tokens=2, decode_s=0.05)
    server = BatchServer(speed, clock.plan, clock.finish)
    server.take("long", 500, 0.0)
    server.take("short", 50, 0.0)
    clock.run()
    # 300 of long; then 200 of long and 50 of short in one step.
    assert clock.done == [("long", 0.75), ("short", 0.75)]
    server.take("after", 100, 5.0)
    clock.run()
    assert clock.done[-1] == ("after", 5.2)
    assert server.queued == 0


# --- runs --------------------------------------------------------------------------------------------------


def test_no_routing_through_nodes_is_no_routing() -> None:
    trace = trace_of(SMALL, 1)
    settings = SMALL.serving(trace)
    bare = Unrouted(trace, settings, 1).run()
    routed = Gossiping(trace, settings, 1, NoRouting).run()
    assert routed.latency_s == bare.latency_s
    assert routed.cached == bare.cached
    assert bare.counts["forwards"] == 0


@pytest.mark.parametrize("policy", [*POLICIES, "exact", "central"])
def test_a_run_repeats_itself_and_answers_everything(policy: str) -> None:
    one, two = run_cell(SMALL, policy, 2), run_cell(SMALL, policy, 2)
    assert one.served.latency_s == two.served.latency_s
    assert one.served.server == two.served.server
    assert one.served.counts["answered"] == SMALL.requests
    assert min(one.served.latency_s) >= 0.1
    kept = one.served.counts["forwards"] - one.served.counts["declined"]
    assert one.figures.forwarded == pytest.approx(kept / SMALL.requests)


def test_a_forward_pays_the_way_there_and_back() -> None:
    far = CellSettings(4, "zipf1.5", 0.25, 1.0, 0.2, 3.0, 200)
    run = run_cell(far, "longest", 1)
    moved = [
        latency
        for latency, server, arrival in zip(run.served.latency_s, run.served.server, run.trace.arrivals, strict=True)
        if server != arrival.origin
    ]
    assert len(moved) > 20
    assert min(moved) >= 6.0


def test_slow_gossip_lets_targets_hand_prompts_back_and_that_pays() -> None:
    cell = CellSettings(8, "uniform", 0.05, 10.0, 0.85, 0.05, 400)
    trace = trace_of(cell, 1)
    run = Gossiping(trace, cell.serving(trace), 1, POLICIES["rent"])
    mean = sum(run.run().latency_s) / 400
    assert run.served.counts["answered"] == 400
    assert 0 < run.served.counts["declined"] == sum(node.counters["outcomes_declined"] for node in run.nodes)
    assert run.served.counts["declined"] == sum(node.counters["decisions_declined"] for node in run.nodes)
    for node in run.nodes:
        node._check()

    class Keeping(Gossiping):
        def accept(self, attempt: Any, now: float) -> bool:
            attempt.budget_s = float("inf")
            return super().accept(attempt, now)

    keeping = Keeping(trace, cell.serving(trace), 1, POLICIES["rent"])
    assert mean < sum(keeping.run().latency_s) / 400
    assert keeping.served.counts["declined"] == 0


def test_nodes_know_what_engines_hold_and_stay_whole() -> None:
    trace = trace_of(SMALL, 1)
    run = Gossiping(trace, SMALL.serving(trace), 1, LongestMatch)
    run.run()
    for node, engine, endpoint in zip(run.nodes, run.engines, run.endpoints, strict=True):
        node._check()
        assert node.residency(endpoint).canonical_blocks == len(engine.cache)
        assert len(node.digests()) == 4
        assert node.counters["predicted_tokens"] > 0


def test_gossip_that_is_slow_costs_hits_and_exact_knowledge_does_best() -> None:
    rows = cell(4, "zipf1.5", 0.25, 1.0, 0.5, 0.01, 400, seeds=(1, 2), policies=("longest", "greedy", "exact"))
    slow = cell(4, "zipf1.5", 0.25, 60.0, 0.5, 0.01, 400, seeds=(1, 2), policies=("longest",))
    assert rows["longest"]["request_hit"] > slow["longest"]["request_hit"]
    assert rows["exact"]["mean_ratio"] < 1
    assert rows["exact"]["mean_ratio"] < rows["longest"]["mean_ratio"]


def test_exact_knowledge_counts_what_is_on_its_way() -> None:
    """Prompts of one cold topic that come at once, far from each other, still meet at one node."""
    make = workloads.maker("uniform")
    drawn = [a for a in make(1.0, 3000, 4, 1).arrivals if a.topic == 5][:8]
    burst = tuple(a._replace(at=0.001 * i, origin=i % 4) for i, a in enumerate(drawn))
    trace = workloads.ArrivalTrace("burst", burst, 39138, make(1.0, 1, 4, 1).domain)
    settings = ServingSettings(capacity_tokens=20000, delay_s=0.005, speed=Speed(0.0001, 0.001))
    served = ExactKnowledge(trace, settings, 1, LongestMatch).run()
    assert sum(not hit for hit in served.hits) == 1


def test_slow_nodes_and_wrong_settings_are_told_apart() -> None:
    trace = trace_of(SMALL, 1)
    settings = SMALL.serving(trace)
    slow = ServingSettings(nodes=4, capacity_tokens=settings.capacity_tokens, slower=(1, 1, 1, 4), delay_s=0.01)
    served = Unrouted(trace, slow, 1).run()
    means = [
        sum(latency for latency, server in zip(served.latency_s, served.server, strict=True) if server == i)
        / served.server.count(i)
        for i in range(4)
    ]
    assert means[3] > 3 * max(means[:3])
    for wrong in ({"nodes": 0}, {"slower": (1.0,)}, {"delay_s": ((0.0,),)}, {"gossip_s": 0.0}):
        with pytest.raises(UsageError):
            ServingSettings(**wrong)


# --- faults ------------------------------------------------------------------------------------------------


def faulty(faults: FaultSettings, policy: str = "longest", seed: int = 1, **extra: Any) -> tuple[Faulty, bool]:
    told = CellSettings(4, "zipf1.5", 0.25, 1.0, 0.4, 0.01, 300, extra=tuple({"timeout_s": 5.0, **extra}.items()))
    trace = trace_of(told, seed)
    run = Faulty(trace, told.serving(trace), seed, POLICIES[policy], faults)
    served = run.run()
    return run, served_once(run, served)


@pytest.mark.parametrize("kind", ["crash", "silent", "refuse", "hide_load", "claim_all"])
def test_every_request_is_answered_once_whatever_is_wrong_with_a_node(kind: str) -> None:
    run, once = faulty(FaultSettings((Fault(kind, 1, 10.0, 30.0),)))
    assert once
    assert run.served.counts["forwards"] > 0
    if kind in ("silent", "refuse"):
        assert run.served.counts["fallbacks"] > 0
    if kind == "crash":
        assert 1 in run.served.server, "it came back"
        down = [
            server
            for server, latency, arrival in zip(
                run.served.server, run.served.latency_s, run.trace.arrivals, strict=True
            )
            if 10.0 < arrival.at < 30.0 and arrival.at + latency < 30.0
        ]
        assert down
        assert 1 not in down


def test_lost_and_repeated_forwards_and_datagrams_cost_time_only() -> None:
    run, once = faulty(FaultSettings(lost=0.3, repeated=0.3), loss=0.3)
    assert once
    assert run.served.counts["fallbacks"] > 0
    assert run.served.counts["late"] > 0


def test_served_once_notices_a_second_answer() -> None:
    run, once = faulty(FaultSettings())
    assert once
    run.answers[7].append(run.answers[7][0])
    assert not served_once(run, run.served)
    run.answers[7] = ["another"]
    assert not served_once(run, run.served)


def test_a_fault_that_cannot_be_is_refused() -> None:
    for fault in (Fault("flood", 0, 1.0), Fault("crash", 0, 2.0, 1.0)):
        with pytest.raises(UsageError):
            FaultSettings((fault,))


# --- figures -----------------------------------------------------------------------------------------------


def test_figures_of_a_run() -> None:
    run = run_cell(SMALL, "none", 1)
    again = figures(run.served, run.trace)
    assert again == run.figures
    assert again.mean_s == pytest.approx(sum(run.served.latency_s) / 300)
    assert again.p99_s == sorted(run.served.latency_s)[297]
    assert 0 < again.token_hit < again.request_hit < 1
    assert again.forwarded == 0
    assert 0.25 <= again.hottest < 0.35


def test_an_interval_is_students() -> None:
    assert interval([3.0]) == (3.0, 0.0)
    mean, half = interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half == pytest.approx(4.303 / 3**0.5)
