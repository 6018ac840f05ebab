"""A node's mirror of one engine when the stream between them is not as it should be.

A node that comes late recovers by replay; what is lost on the way is replayed; what is late is late and no more. With
messages lost and no replay the mirror cannot be whole: it says so, and it is never high by more than one block.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from live_engines import LiveEngine, until
from live_oracle import EstimateTally, Probe, assert_residency_is_true, draw, probed, probes_of
from live_proxy import BadLink, bad_link
from live_shapes import each_engine, each_kind
from live_sidecars import LiveSidecar, SidecarFleet

PREFIXES = 6


@pytest.fixture
def link(engine: LiveEngine) -> Iterator[BadLink]:
    """A link that has joined the engine's messages and does nothing bad yet."""
    rng = random.Random(10)
    with bad_link(engine.now.events_endpoint) as link:
        until(lambda: engine.ask(draw(rng, 64)).status == 200 and link.seen >= 0, "the link has joined")
        yield link


def some_prompts(rng: random.Random, count: int, longest: int = 500) -> list[list[int]]:
    """Prompts that share prefixes, a few times what the caches of these engines hold when `count` is 40."""
    prefixes = [draw(rng, rng.randrange(100, longest)) for _ in range(PREFIXES)]
    return [[*rng.choice(prefixes), *draw(rng, rng.randrange(1, 60))] for _ in range(count)]


@each_engine
def test_a_node_that_attaches_late_recovers_by_replay(
    fleet: SidecarFleet, engine: LiveEngine, tally: EstimateTally
) -> None:
    rng = random.Random(11)
    prompts = some_prompts(rng, 30)
    for prompt in prompts:
        assert engine.ask(prompt, answer_tokens=3).status == 200
    late = fleet.add(engine)
    stream = late.stream()
    assert stream["replayed"] > 0
    assert (stream["gaps"], stream["decode_errors"], stream["unknown_events"]) == (0, {}, 0)
    rows = assert_residency_is_true(tally, late, probes_of(rng, prompts[-4:]))
    assert any(row.predicted for row in rows)


@each_kind
def test_lost_messages_are_replayed(
    fleet: SidecarFleet, engine: LiveEngine, link: BadLink, tally: EstimateTally
) -> None:
    rng = random.Random(12)
    sidecar = fleet.add(engine, events=link.address)
    prompts = some_prompts(rng, 40)
    link.loses = lambda seq: seq % 3 == 1
    for prompt in prompts:
        probed(tally, sidecar, Probe("lossy", prompt), whole=False, settle=lambda: what_passed(link, sidecar))
    assert link.lost >= 5
    heal(engine, link, sidecar, rng)
    stream = sidecar.stream()
    assert (stream["gaps"], stream["restarts"]) == (0, 0)
    assert stream["replays"] > 5
    rows = assert_residency_is_true(tally, sidecar, probes_of(rng, prompts[-4:]))
    assert any(row.predicted for row in rows)


@each_kind
def test_without_replay_a_lossy_mirror_says_so_and_does_not_promise(
    fleet: SidecarFleet, engine: LiveEngine, link: BadLink, tally: EstimateTally
) -> None:
    rng = random.Random(13)
    sidecar = fleet.add(engine, events=link.address, replay="")
    (endpoint,) = sidecar.endpoints()
    prompts = some_prompts(rng, 40)
    for prompt in prompts[:10]:
        assert sidecar.ask(prompt, here=True).status == 200
    link.loses = lambda seq: seq % 3 == 1
    for prompt in prompts:
        assert sidecar.ask(prompt, here=True).status == 200
    assert link.lost >= 5
    heal(engine, link, sidecar, rng)
    assert sidecar.stream()["gaps"] >= 5
    assert sidecar.endpoints()[endpoint]["confidence"] < 1.0
    assert_residency_is_true(tally, sidecar, probes_of(rng, prompts[-6:]), whole=False)


@each_kind
def test_a_slow_consumer_catches_up(
    fleet: SidecarFleet, engine: LiveEngine, link: BadLink, tally: EstimateTally
) -> None:
    rng = random.Random(14)
    sidecar = fleet.add(engine, events=link.address)
    prompts = some_prompts(rng, 40)
    link.held = True
    for prompt in prompts:
        assert sidecar.ask(prompt, here=True).status == 200
    before = sidecar.stream()["messages"]
    link.held = False
    sidecar.settle()
    assert sidecar.stream()["messages"] >= before + 20
    assert sidecar.stream()["gaps"] == 0
    assert_residency_is_true(tally, sidecar, probes_of(rng, prompts[-4:]))


@each_kind
def test_a_consumer_too_slow_for_the_link_is_made_whole_again(
    fleet: SidecarFleet, engine: LiveEngine, link: BadLink, tally: EstimateTally
) -> None:
    rng = random.Random(15)
    sidecar = fleet.add(engine, events=link.address)
    prompts = some_prompts(rng, 40)
    link.room = 3
    link.held = True
    for prompt in prompts:
        assert sidecar.ask(prompt, here=True).status == 200
    last = engine.last_seq()
    until(lambda: link.seen >= last, "all messages have come to the link")
    assert link.lost > 20
    link.held = False
    sidecar.settle()
    stream = sidecar.stream()
    assert stream["replayed"] >= link.lost
    assert (stream["gaps"], stream["restarts"]) == (0, 0)
    assert_residency_is_true(tally, sidecar, probes_of(rng, prompts[-4:]))


def what_passed(link: BadLink, sidecar: LiveSidecar) -> None:
    """Wait until what the link let through is applied. What it lost last nobody can miss yet."""
    last = sidecar.engine.last_seq()
    until(lambda: link.seen >= last, "all messages have come to the link")
    sidecar.settle({0: link.passed})


def heal(engine: LiveEngine, link: BadLink, sidecar: LiveSidecar, rng: random.Random) -> None:
    """A good link from now on, and one more message, by which what was lost before it is missed."""
    what_passed(link, sidecar)
    link.loses = lambda _: False
    before = engine.last_seq()
    assert engine.ask(draw(rng, 100)).status == 200
    assert engine.last_seq() > before
    sidecar.settle()
