"""Promise 6: what a decision looks at grows neither with the number of endpoints nor with that of holders.

Work is counted, not timed: candidates, look-ups in the index, steps down the ranking.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

from routing import BLOCK, DOMAIN, IDLE, SETTINGS, hold, mesh, prompt, queue

from prefixroute import Candidate, Choice, GreedyCost, Node, Request
from prefixroute.testing import Mesh, stored


class CountingDict(dict[int, int]):
    """The index's table, counting look-ups."""

    looked_up = 0

    def get(self, key: int, default: Any = None) -> Any:
        self.looked_up += 1
        return super().get(key, default)


class CountingList(list[Any]):
    """The fleet's ranking, counting what is read of it."""

    read = 0

    def __iter__(self) -> Any:
        for item in super().__iter__():
            self.read += 1
            yield item


class CountingPolicy:
    def __init__(self) -> None:
        self.weighed: list[int] = []

    def choose(self, request: Request, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        self.weighed.append(len(candidates))
        return GreedyCost().choose(request, candidates, rng)


def effort(endpoints: int, holders: Iterable[int]) -> tuple[int, int, int]:
    """Weigh one prompt among `endpoints` of one peer: candidates, index look-ups, and steps down the ranking."""
    policy = CountingPolicy()
    asker = Node("asker", DOMAIN, rng=random.Random(1), now=0.0, settings=SETTINGS, policy=policy)
    owner = Node("owner", DOMAIN, rng=random.Random(2), now=0.0, settings=SETTINGS)
    tokens, holders = prompt(1, 64), set(holders)
    asker.set_load(asker.add_endpoint("0", incarnation=1, now=0.0), IDLE, 0.0)
    for i in range(endpoints):
        endpoint = owner.add_endpoint(str(i), incarnation=1, now=0.0)
        owner.apply(endpoint, stored(tokens if i in holders else prompt(100 + i, 4)), 0.0)
        # Those who hold the prompt are the busiest: they stand at the end of the ranking.
        owner.set_load(endpoint, queue(0.3 if i in holders else 0.0), 0.0)
    net = Mesh(asker, owner)
    net.run(1.0)
    rows = asker.stats(net.now).endpoints
    assert len(rows) == endpoints + 1
    assert sum(row.blocks for row in rows) == len(holders) * 64 + (endpoints - len(holders)) * 4
    table, ranking = CountingDict(asker._table.index._masks), CountingList(asker._table.fleet._ranking)
    asker._table.index._masks, asker._table.fleet._ranking = table, ranking
    assert asker.route(tokens, net.now).matched_tokens == 1024
    return policy.weighed[0], table.looked_up, ranking.read


def test_what_a_decision_looks_at_does_not_grow_with_the_number_of_endpoints() -> None:
    small, large = (effort(n, holders=range(3)) for n in (4, 256))
    assert large[0] == small[0] <= 4
    assert large[1] <= small[1]
    assert large[2] <= small[2] + 2, "three holders among 256 are picked, not searched for"


def test_what_a_decision_looks_at_does_not_grow_with_the_number_of_holders() -> None:
    few, many = (effort(256, holders=range(n)) for n in (2, 200))
    assert many[0] == few[0]
    assert many[1] <= few[1]


def test_many_depths_are_cut_to_the_deepest_few() -> None:
    policy = CountingPolicy()
    net = mesh(2, ranks=40, policy=policy)
    tokens = prompt(1, 64)
    for i in range(40):
        hold(net, f"n1/{i}", tokens[: (i + 1) * BLOCK])
    net.run(1.0)
    decision = net.nodes["n0"].route(tokens, net.now)
    assert len([c for c in decision.candidates if not c.local]) <= 5
    assert decision.matched_tokens == 40 * BLOCK
