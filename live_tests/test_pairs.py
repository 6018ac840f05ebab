"""Two nodes with an engine each: one that comes late, an engine that is killed, an engine that refuses.

What happens happens to the last engine of the pair, `struck`; the other node is who must take it well.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import NamedTuple

import httpx
import pytest
from live_engines import LiveEngine, completion, until
from live_oracle import EstimateTally, Probe, assert_residency_is_true, counted, draw, probed, probes_of
from live_shapes import each_pair, unlike_pairs
from live_sidecars import LiveSidecar, SidecarFleet, in_step

STALE_S = 2.0
"""How long after its engine's end a prefix may still look as if it were held."""

CLIENTS = 4
"""Clients that keep an engine busy: one computes, one or two wait, the rest are refused."""


class Nodes(NamedTuple):
    """The node whose engine is struck, and the other one."""

    well: LiveSidecar
    struck: LiveSidecar

    @property
    def endpoint(self) -> str:
        """The struck engine's."""
        return f"{self.struck.name}/0"

    def seen(self) -> dict[str, object]:
        """What the well node knows of the struck endpoint; usable is False when it has forgotten it."""
        return self.well.endpoints().get(self.endpoint, {"usable": False, "blocks": 0, "push_back": "open"})

    def routable(self) -> bool:
        """True while the well node may send something to the struck one."""
        seen = self.seen()
        return bool(seen["usable"]) and seen["push_back"] != "refusing"

    def forwards(self) -> int:
        """How often the well node has sent something on."""
        return int(self.well.stats()["requests"].get("forwarded", 0))


@pytest.fixture
def nodes(fleet: SidecarFleet, engines: list[LiveEngine]) -> Nodes:
    """Both nodes, acquainted; a prompt goes where most of it is held."""
    return Nodes(*fleet.pair(engines, policy="longest"))


@each_pair
def test_a_node_that_joins_late_learns_what_others_hold(
    fleet: SidecarFleet, engines: list[LiveEngine], tally: EstimateTally
) -> None:
    rng = random.Random(41)
    first, second = fleet.place("early"), fleet.place("late")
    early = fleet.add(engines[1], first, peers=[second], policy="longest")
    prompts = [draw(rng, 400) for _ in range(5)]
    assert_residency_is_true(tally, early, [Probe("first", prompt) for prompt in prompts])
    early.settle()
    late = fleet.add(engines[0], second, peers=[first], policy="longest")
    in_step([early, late])
    for prompt in prompts:
        answer = late.ask(prompt)
        row = tally.note("forwarded by a late node", early, *counted(answer))
        assert answer.target == "early/0"
        assert row.right, row
        assert row.actual > 0
        in_step([early, late])
    assert_residency_is_true(tally, early, probes_of(rng, prompts[:2]))


@unlike_pairs
def test_a_killed_engine_is_left_alone_at_once_and_trusted_again_after_its_restart(
    nodes: Nodes, engines: list[LiveEngine], tally: EstimateTally
) -> None:
    rng = random.Random(42)
    prompts = [draw(rng, 400) for _ in range(4)]
    for prompt in prompts:
        probed(tally, nodes.struck, Probe("before", prompt))
    in_step(nodes)
    assert nodes.well.ask(prompts[0]).target == nodes.endpoint

    engines[-1].kill()
    until(lambda: not nodes.routable(), "the killed engine's prefixes are unroutable", STALE_S)
    forwards = nodes.forwards()
    for prompt in prompts:
        answer = nodes.well.ask(prompt)
        assert (answer.status, answer.target) == (200, f"{nodes.well.name}/0")
    assert nodes.forwards() == forwards, "nothing was tried at the dead engine"

    engines[-1].restart()
    until(nodes.routable, "the engine's new life is in use")
    in_step(nodes)
    assert nodes.seen()["blocks"] == 0
    rows = assert_residency_is_true(tally, nodes.struck, [Probe("new life", prompt) for prompt in prompts])
    assert [(row.predicted, row.actual) for row in rows] == [(0, 0)] * len(prompts)
    assert_residency_is_true(tally, nodes.struck, probes_of(rng, prompts[:2]))
    fresh = draw(rng, 500)
    probed(tally, nodes.struck, Probe("new life", fresh))
    in_step(nodes)
    answer = nodes.well.ask(fresh)
    assert answer.target == nodes.endpoint
    assert tally.note("forwarded to a new life", nodes.struck, *counted(answer)).right


@unlike_pairs
def test_a_refusing_engine_costs_no_client_an_error_and_peers_see_it(nodes: Nodes, tally: EstimateTally) -> None:
    rng = random.Random(43)
    prompts = [draw(rng, 400) for _ in range(6)]
    for prompt in prompts:
        probed(tally, nodes.struck, Probe("before", prompt))
    in_step(nodes)
    targets = set()
    with kept_busy(nodes.struck.engine):

        def told() -> bool:
            answer = nodes.struck.ask(rng.choice(prompts))
            assert answer.status == 200
            targets.add(answer.target)
            return nodes.seen()["push_back"] == "refusing"

        until(told, "the peer sees that the engine refuses")
        # every prompt still gets its answer, wherever it arrives
        for prompt in prompts:
            for node in nodes:
                answer = node.ask(prompt)
                assert answer.status == 200
                targets.add(answer.target)
    assert f"{nodes.well.name}/0" in targets
    assert nodes.struck.stats()["requests"].get("failed attempts", 0) > 0
    until(lambda: nodes.seen()["push_back"] == "open", "the refusal is over")
    in_step(nodes)
    assert_residency_is_true(tally, nodes.struck, probes_of(rng, prompts[:2]))


@contextlib.contextmanager
def kept_busy(engine: LiveEngine) -> Iterator[None]:
    """An engine that computes and has a full queue, most of the time, until the block ends."""
    done = threading.Event()
    url, model = f"{engine.now.url}/v1/completions", engine.now.model

    def keep(seed: int) -> None:
        body = completion(model, draw(random.Random(seed), 20), 300, salt="busy")
        with httpx.Client(trust_env=False, timeout=None) as client:
            while not done.is_set():
                if client.post(url, json=body).status_code != 200:
                    done.wait(0.02)

    threads = [threading.Thread(target=keep, args=(seed,), daemon=True) for seed in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()
