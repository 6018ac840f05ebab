"""Two data-parallel ranks of one vLLM: each has a cache of its own, and a request reaches the rank that was meant."""

from __future__ import annotations

import random

import pytest
from live_engines import LiveEngine
from live_oracle import Compared, EstimateTally, Probe, counted, draw, probes_of
from live_shapes import RANKS, on
from live_sidecars import LiveSidecar, SidecarFleet

two_ranks = on((RANKS,))


@pytest.fixture
def sidecar(fleet: SidecarFleet, engine: LiveEngine) -> LiveSidecar:
    """A node beside the engine: one endpoint a rank."""
    return fleet.add(engine)


def served(tally: EstimateTally, sidecar: LiveSidecar, probe: Probe) -> tuple[str, Compared]:
    """Send a prompt to the node once all events are in; return the endpoint that it chose, and how right it was."""
    sidecar.settle()
    answer = sidecar.ask(probe.tokens, salt=probe.salt, here=True)
    return answer.target, tally.note(probe.what, sidecar, *counted(answer))


@two_ranks
def test_every_rank_is_an_endpoint_with_a_cache_of_its_own(
    sidecar: LiveSidecar, engine: LiveEngine, tally: EstimateTally
) -> None:
    rng = random.Random(21)
    prompts = {rank: [draw(rng, 320) for _ in range(3)] for rank in engine.ranks}
    for rank, own in prompts.items():
        for prompt in own:
            assert engine.ask(prompt, rank=rank).status == 200
    sidecar.settle()
    blocks = {name: row["blocks"] for name, row in sidecar.endpoints().items()}
    assert blocks == {f"{sidecar.name}/{rank}": 3 * 20 for rank in engine.ranks}
    # the node sends each prompt to the rank that holds it, and that rank is where it arrives
    for rank, own in prompts.items():
        for prompt in own:
            target, row = served(tally, sidecar, Probe(f"of rank {rank}", prompt))
            assert (target, row.predicted, row.actual) == (f"{sidecar.name}/{rank}", 288, 288)
    # what one rank holds is not held by the other one
    for rank, own in prompts.items():
        assert engine.ask(own[0], rank=1 - rank).cached == 0


@two_ranks
def test_estimates_of_two_ranks_are_right_while_both_evict(
    sidecar: LiveSidecar, engine: LiveEngine, tally: EstimateTally
) -> None:
    rng = random.Random(22)
    prefixes = [draw(rng, rng.randrange(200, 700)) for _ in range(10)]
    rows, targets = [], set()
    for _ in range(60):
        prompt = [*rng.choice(prefixes), *draw(rng, rng.randrange(1, 80))]
        target, row = served(tally, sidecar, Probe("two ranks", prompt))
        targets.add(target)
        rows.append(row)
    assert targets == {f"{sidecar.name}/{rank}" for rank in engine.ranks}
    assert all(row.right for row in rows), [row for row in rows if not row.right]
    assert sum(row.actual for row in rows) > 0
    rows = [served(tally, sidecar, probe)[1] for probe in probes_of(rng, prefixes[:3])]
    assert all(row.right for row in rows), rows


@two_ranks
def test_a_reset_empties_both(sidecar: LiveSidecar, engine: LiveEngine, tally: EstimateTally) -> None:
    rng = random.Random(23)
    prompts = [draw(rng, 320) for _ in range(4)]
    for prompt in prompts:
        served(tally, sidecar, Probe("first", prompt))
    engine.reset()
    sidecar.settle()
    assert {row["blocks"] for row in sidecar.endpoints().values()} == {0}
    rows = [served(tally, sidecar, Probe("after reset", prompt))[1] for prompt in prompts]
    assert [(row.predicted, row.actual) for row in rows] == [(0, 0)] * 4
