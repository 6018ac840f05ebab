"""A model whose layers are of two kinds: three KV-cache groups, of which two keep a sliding window only.

A hit of such an engine has to satisfy every group, so a prefix that the full-attention layers still hold may be of no
use once the windows have moved on. A node matches by the full-attention group alone, so it promises what it should not:
two tests say so, and will fail on the day when it knows better.
"""

from __future__ import annotations

import random

import pytest
from live_engines import LiveEngine
from live_oracle import Probe, Tally, assert_residency_is_true, draw, probed, probes_of
from live_shapes import HYBRID, on
from live_sidecars import Fleet, LiveSidecar

hybrid = on((HYBRID,))


@pytest.fixture
def sidecar(fleet: Fleet, engine: LiveEngine) -> LiveSidecar:
    """A node beside the engine."""
    return fleet.add(engine)


@hybrid
def test_what_continues_a_prompt_is_a_hit(sidecar: LiveSidecar, tally: Tally) -> None:
    rng = random.Random(31)
    prompt = draw(rng, 384)
    rows = [probed(tally, sidecar, Probe("cold", prompt), whole=False)]
    for _ in range(4):
        prompt = [*prompt, *draw(rng, 70)]
        rows.append(probed(tally, sidecar, Probe("continued", prompt), whole=False))
    assert all(row.right for row in rows), rows
    assert all(row.actual > 0 for row in rows[1:])


@hybrid
def test_a_prefix_that_the_windows_left_is_not_promised(sidecar: LiveSidecar, tally: Tally) -> None:
    rng = random.Random(32)
    prompts = [draw(rng, 384) for _ in range(3)]
    for prompt in prompts:
        probed(tally, sidecar, Probe("cold", prompt), whole=False)
    assert_residency_is_true(tally, sidecar, probes_of(rng, prompts), whole=False)


@hybrid
def test_estimates_hold_while_the_cache_evicts(sidecar: LiveSidecar, tally: Tally) -> None:
    rng = random.Random(33)
    prefixes = [draw(rng, rng.randrange(200, 700)) for _ in range(6)]
    prompts = [[*rng.choice(prefixes), *draw(rng, rng.randrange(1, 80))] for _ in range(50)]
    rows = assert_residency_is_true(tally, sidecar, [Probe("evicting", prompt) for prompt in prompts], whole=False)
    assert sum(row.actual for row in rows) > 0
