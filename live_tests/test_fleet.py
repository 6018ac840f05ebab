"""Predicted against actual in a fleet of two nodes whose gossip is quiet: one client, requests at random nodes.

Before each request all events are applied and every digest at a peer equals its owner's, so what differs is an error
of mirrors, digests or prediction, not a delay. The engines' caches are too small for all, so both evict.
"""

from __future__ import annotations

import random

import pytest
from live_engines import LiveEngine
from live_oracle import Compared, EstimateTally, draw
from live_shapes import each_pair
from live_sidecars import LiveSidecar, SidecarFleet, in_step

REQUESTS = 80
WITHIN = 0.99
_SALTS = ("", "", "", "tenant")


@pytest.mark.parametrize("policy", ["default", "longest"])
@each_pair
def test_what_was_predicted_is_what_engines_report(
    fleet: SidecarFleet, engines: list[LiveEngine], tally: EstimateTally, policy: str
) -> None:
    rng = random.Random(51)
    nodes = fleet.pair(engines, policy=policy)
    prefixes = [draw(rng, rng.randrange(200, 1200)) for _ in range(12)]
    rows: list[Compared] = []
    targets: set[str] = set()
    for _ in range(REQUESTS):
        prompt = rng.choice(prefixes)
        if rng.random() < 0.2:
            prompt = prompt[: rng.randrange(100, len(prompt))]
        prompt = [*prompt, *draw(rng, rng.randrange(1, 100))]
        rows.append(served(tally, nodes, rng.choice(nodes), prompt, rng.choice(_SALTS), rng.choice((1, 8, 40))))
        targets.add(rows[-1].what)
    assert len(rows) == REQUESTS
    assert len(targets) == 4 or policy != "longest", "requests of both nodes go both ways"
    assert sum(row.actual > 0 for row in rows) > REQUESTS / 3
    within = sum(row.within_a_block for row in rows) / len(rows)
    assert within >= WITHIN, [row for row in rows if not row.within_a_block]


def served(
    tally: EstimateTally, nodes: list[LiveSidecar], entry: LiveSidecar, prompt: list[int], salt: str, answer_tokens: int
) -> Compared:
    """Send a prompt in at `entry`; note what its decision expected of the endpoint that then served; wait for quiet."""
    answer = entry.ask(prompt, salt=salt, answer_tokens=answer_tokens)
    assert answer.status == 200
    decision = entry.last_decision()
    (predicted,) = [c["matched_tokens"] for c in decision["candidates"] if c["endpoint"] == answer.target]
    (server,) = [node for node in nodes if answer.target.startswith(f"{node.name}/")]
    in_step(nodes, [server])
    return tally.note(f"{entry.name} to {server.name}", server, predicted, answer.cached)
