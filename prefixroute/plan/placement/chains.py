"""Chains: which servers run a request's blocks, one after the other, over spans that may overlap.

Rules:
1. A server runs the blocks from the one at which the chain stands to the end of its span; the session takes one cache
   slot there for each of these blocks.
2. A link leads to a server whose span holds the next block and ends later, so ends grow along a chain and one pass in
   the order of ends finds the shortest chain.
3. Ties go to the link that comes first, by end and then by number, so that equal input gives equal chains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .problem import Floats, Problem, Span

Wait = Callable[[int, int], float]
"""(server, slots) -> the wait until that server has so many slots free, in the unit of the costs; inf if never."""


class Hop(NamedTuple):
    """A server and how many blocks it runs."""

    server: int
    blocks: int


class Chain(NamedTuple):
    """Servers in order, and what the search minimised: milliseconds, waits included if it counted any."""

    hops: tuple[Hop, ...]
    ms: float


class Links:
    """The usable links of spans, and what each costs a client. O(n^2) to make; a search is O(links)."""

    __slots__ = ("_costs", "_ends", "_problem", "links", "spans")

    def __init__(self, problem: Problem, spans: Sequence[Span | None]) -> None:
        self.spans = tuple(spans)
        self._problem = problem
        n, last = problem.servers, problem.blocks + 1
        ends = sorted((span.end, j) for j, span in enumerate(spans) if span is not None)
        links: list[tuple[int, int, int]] = []
        for end, j in ends:
            span = self.spans[j]
            assert span is not None
            if span.first == 1:
                links.append((n, j, end - 1))
            links += [(i, j, end - other) for other, i in ends if span.first <= other < end]
        links += [(i, n + 1, 0) for end, i in ends if end == last]
        self.links = links
        """(from, to, blocks that `to` runs); the client is server n as the source and n + 1 as the sink."""
        self._ends = np.array(links, np.int64).reshape(-1, 3)
        self._costs: dict[tuple[str, int], list[float]] = {}

    def token_ms(self, client: int) -> list[float]:
        """Return the milliseconds that one decoded token takes on each link."""
        problem = self._problem
        return self._cached("token", client, problem.rtt_ms, problem.hop_ms, problem.decode_ms)

    def prompt_ms(self, client: int) -> list[float]:
        """Return the milliseconds that the prompt takes on each link."""
        problem = self._problem
        return self._cached("prompt", client, problem.prompt_rtt_ms, problem.prompt_hop_ms, problem.prefill_ms)

    def request_ms(self, client: int) -> list[float]:
        """Return the milliseconds of a whole request on each link: its prompt, and all output tokens but the first."""
        found = self._costs.get(("request", client))
        if found is None:
            further = self._problem.output_tokens - 1
            pairs = zip(self.prompt_ms(client), self.token_ms(client), strict=True)
            found = self._costs["request", client] = [prompt + further * token for prompt, token in pairs]
        return found

    def _cached(self, kind: str, client: int, rtt_ms: Floats, hop_ms: Floats | None, work_ms: Floats) -> list[float]:
        found = self._costs.get((kind, client))
        if found is None:
            found = self._costs[kind, client] = self._priced(rtt_ms[client], hop_ms, work_ms)
        return found

    def _priced(self, rtt_ms: Floats, hop_ms: Floats | None, work_ms: Floats) -> list[float]:
        n = self._problem.servers
        tail, head, blocks = self._ends.T
        real = head < n
        to = np.where(real, head, 0)
        if hop_ms is None:
            way = np.where(real, rtt_ms[to], 0.0)
        else:
            start = np.where(tail < n, tail, 0)
            inner = np.where(real, hop_ms[start, to], rtt_ms[start] / 2)
            way = np.where(tail == n, rtt_ms[to] / 2, inner)
        priced: list[float] = (way + np.where(real, work_ms[to], 0.0) * blocks).tolist()
        return priced

    def shortest(
        self, costs: Sequence[float], free: Sequence[int] | None = None, wait: Wait | None = None
    ) -> Chain | None:
        """Return the chain with the least sum of costs; None if there is none.

        With `free` slots, a link to a server with too few of them costs the server's `wait` in addition; without `wait`
        the link is not usable. The cost adds up all waits, which overstates them: a session waits the longest one.
        """
        n = self._problem.servers
        cost_to = [math.inf] * (n + 2)
        via = [-1] * (n + 2)
        cost_to[n] = 0.0
        for at, (i, j, k) in enumerate(self.links):
            cost = cost_to[i] + costs[at]
            if cost >= cost_to[j]:
                continue
            if free is not None and j < n and free[j] < k:
                if wait is None:
                    continue
                cost += wait(j, k)
                if cost >= cost_to[j]:
                    continue
            cost_to[j] = cost
            via[j] = at
        if cost_to[n + 1] == math.inf:
            return None
        hops: list[Hop] = []
        i = self.links[via[n + 1]][0]
        while i < n:
            i, j, k = self.links[via[i]]
            hops.append(Hop(j, k))
        return Chain(tuple(reversed(hops)), cost_to[n + 1])

    def cost(self, hops: Sequence[Hop], costs: Sequence[float]) -> float:
        """Return the sum of costs along hops that the search found, in the order of the chain."""
        n = self._problem.servers
        at = {(i, j): index for index, (i, j, _) in enumerate(self.links)}
        places = [n, *(hop.server for hop in hops), n + 1]
        return sum(costs[at[pair]] for pair in pairwise(places))


class Shared(NamedTuple):
    """A number of requests of one client on one chain."""

    client: int
    chain: Chain
    requests: int


class Assignment(NamedTuple):
    """The chains of all concurrent requests, and their mean milliseconds a token."""

    chains: tuple[Shared, ...]
    ms_per_token: float

    @property
    def flow(self) -> float:
        """Tokens a millisecond of all requests together."""
        return sum(shared.requests for shared in self.chains) / self.ms_per_token if self.chains else 0.0


def assign(problem: Problem, links: Links, slots: Sequence[int], partly: bool = False) -> Assignment | None:
    """Route all concurrent requests one after the other, each on the shortest chain that has slots for it.

    Returns None when a request finds no chain, or, if `partly`, the chains of those that did. Requests of a client that
    follow each other take the same chain until it has no slot left, so the work grows with the number of chains, not of
    requests.
    """
    free = list(slots)
    found: list[Shared] = []
    total = 0.0
    for client, wanted in enumerate(problem.requests):
        costs, left = links.token_ms(client), wanted
        while left:
            chain = links.shortest(costs, free)
            if chain is None:
                if not partly:
                    return None
                break
            taken = min(left, *(free[hop.server] // hop.blocks for hop in chain.hops))
            for hop in chain.hops:
                free[hop.server] -= hop.blocks * taken
            total += chain.ms * taken
            found.append(Shared(client, chain, taken))
            left -= taken
    placed = sum(shared.requests for shared in found)
    return Assignment(tuple(found), total / placed if placed else math.inf)
