"""A model whose layers are of two kinds: three KV-cache groups, of which two keep a sliding window only.

A hit of such an engine has to satisfy every group, so a prefix that the full-attention layers still hold may be of no
use once the windows have moved on. A node knows where hits can end, and tells its peers no more than that.
"""

from __future__ import annotations

import random

import pytest
from live_engines import LiveEngine
from live_oracle import EstimateTally, Probe, assert_residency_is_true, draw, probed, probes_of
from live_shapes import HYBRID, on
from live_sidecars import LiveSidecar, SidecarFleet
from test_fleet import served

hybrid = on((HYBRID,))
two_hybrids = on((HYBRID, HYBRID))
REQUESTS = 40


@pytest.fixture
def sidecar(fleet: SidecarFleet, engine: LiveEngine) -> LiveSidecar:
    """A node beside the engine."""
    return fleet.add(engine)


@hybrid
def test_what_continues_a_prompt_is_a_hit(sidecar: LiveSidecar, tally: EstimateTally) -> None:
    rng = random.Random(31)
    prompt = draw(rng, 384)
    rows = [probed(tally, sidecar, Probe("cold", prompt))]
    for _ in range(4):
        prompt = [*prompt, *draw(rng, 70)]
        rows.append(probed(tally, sidecar, Probe("continued", prompt)))
    assert all(row.right for row in rows), rows
    assert all(row.actual > 0 for row in rows[1:])


@hybrid
def test_a_prefix_that_the_windows_left_is_not_promised(sidecar: LiveSidecar, tally: EstimateTally) -> None:
    rng = random.Random(32)
    prompts = [draw(rng, 384) for _ in range(3)]
    for prompt in prompts:
        probed(tally, sidecar, Probe("cold", prompt))
    assert_residency_is_true(tally, sidecar, probes_of(rng, prompts))


@hybrid
def test_estimates_hold_while_the_cache_evicts(sidecar: LiveSidecar, tally: EstimateTally) -> None:
    rng = random.Random(33)
    prefixes = [draw(rng, rng.randrange(200, 700)) for _ in range(6)]
    prompts = [[*rng.choice(prefixes), *draw(rng, rng.randrange(1, 80))] for _ in range(50)]
    rows = assert_residency_is_true(tally, sidecar, [Probe("evicting", prompt) for prompt in prompts])
    assert sum(row.actual for row in rows) > 0


@two_hybrids
def test_peers_expect_no_more_than_the_windows_allow(
    fleet: SidecarFleet, engines: list[LiveEngine], tally: EstimateTally
) -> None:
    rng = random.Random(34)
    nodes = fleet.pair(engines, policy="longest")
    prefixes = [draw(rng, rng.randrange(200, 1200)) for _ in range(8)]
    rows = []
    for _ in range(REQUESTS):
        prompt = rng.choice(prefixes)
        if rng.random() < 0.3:
            prompt = prompt[: rng.randrange(100, len(prompt))]
        prompt = [*prompt, *draw(rng, rng.randrange(1, 100))]
        rows.append(served(tally, nodes, rng.choice(nodes), prompt, "", rng.choice((1, 8, 40))))
    assert all(row.right for row in rows), [row for row in rows if not row.right]
    assert len({row.what for row in rows}) == 4, "requests of both nodes go both ways"
    assert sum(row.actual > 0 for row in rows) > REQUESTS / 8
