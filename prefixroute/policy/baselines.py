"""The other policies, which the default one is compared with.

| policy | goes to |
|---|---|
| `GreedyCost` | the least expected time to first token |
| `LongestMatch` | the longest match, the paper's rule |
| `LeastLoad` | the shortest wait |
| `NoRouting` | where the request arrived |
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from .interface import Candidate, Choice, Request


class GreedyCost:
    """Least expected time to first token; local on a tie."""

    def choose(self, request: Request, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """Sort by cost."""
        order = tuple(sorted(candidates, key=lambda c: (c.cost_s, not c.local)))
        best = order[0]
        if best.local:
            return Choice(order, "local is cheapest" if best.matched_tokens else "local: nobody is cheaper")
        if best.depth > max((c.depth for c in candidates if c.local), default=0):
            return Choice(order, "longer cached prefix")
        return Choice(order, "shorter wait")


class LongestMatch:
    """The paper's rule: local if it has the longest match, else a random endpoint of those that have it."""

    def choose(self, request: Request, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """Sort by depth, local before peers, peers in random order."""
        order = tuple(sorted(candidates, key=lambda c: (-c.depth, not c.local, rng.random())))
        return Choice(order, "longest match" if order[0].depth else "no match")


class LeastLoad:
    """Shortest wait, network included; prefixes are ignored."""

    def choose(self, request: Request, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """Sort by wait and round trip."""
        return Choice(tuple(sorted(candidates, key=lambda c: (c.wait_s + c.rtt_s, not c.local))), "least load")


class NoRouting:
    """Serve where the request arrived; a gateway without an endpoint of its own takes one at random."""

    keeps_local = True

    def choose(self, request: Request, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """Local first, by cost; peers only as fallbacks."""
        order = tuple(sorted(candidates, key=lambda c: (not c.local, c.cost_s if c.local else rng.random())))
        return Choice(order, "no routing")
