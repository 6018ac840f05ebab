"""The baseline: how PETALS places blocks and routes, from its published code and the simulator of its challengers.

Rules:
1. Here are only the rules that decide where blocks are and which servers a request takes: a server announces its
   throughput, a joining server takes the window of blocks that is served worst, a client takes the route that it
   believes shortest.
2. There are two memory rules: the real rule reserves a fixed cache for each block, whatever the load; the lenient rule
   lets sessions use all memory that is left.
3. Both sides of a comparison have the same added delays.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prefixroute.errors import UsageError

from .chains import Chain, Links
from .problem import Floats, Problem, Span
from .slots import Ledger
from .spans import Placement, least_window

STEP_MS = 18.0
"""Milliseconds of serialisation that a client adds to each step of a route."""
FULL_MS = 10_000.0
"""Milliseconds that a client adds for a server without room for another session."""
OWN_SHARE = 1.0 + 1e-3
BALANCED = 0.75 - 1e-3
"""A server moves when the least throughput of any block is below this share of the least one after the move."""

HIDDEN_SIZE = 14336
RESERVE_BYTES = 2 * 2.0**30
CACHED_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class PetalsSettings:
    """The memory that PETALS reserves, in bytes, for a model of this width."""

    hidden_size: int = HIDDEN_SIZE
    reserve_bytes: float = RESERVE_BYTES
    """Bytes for a width of 14,336; other widths reserve in proportion."""
    lenient: bool = False
    """True: there is no reserve, and sessions may use all memory that is left as cache."""

    @property
    def cache_bytes(self) -> float:
        """Bytes of cache reserved for each block that a server holds."""
        return 2.0 * self.hidden_size * CACHED_TOKENS * 2

    def held_blocks(self, problem: Problem) -> list[int]:
        """Return how many blocks each server takes."""
        reserve = 0.0 if self.lenient else self.reserve_bytes * self.hidden_size / HIDDEN_SIZE
        room = (problem.memory_bytes - reserve) / (problem.block_bytes + self.cache_bytes)
        return [max(int(each), 0) for each in np.minimum(np.floor(room + 1e-9), problem.blocks)]

    def slots(self, problem: Problem, spans: Sequence[Span | None]) -> list[int]:
        """Return the cache slots of each server."""
        if self.lenient:
            return problem.slots(spans)
        one = self.cache_bytes / problem.session_bytes
        return [0 if span is None else math.floor(span.blocks * one + 1e-9) for span in spans]


@dataclass(frozen=True, slots=True)
class PetalsRates:
    """Rates that servers measure of themselves: tokens a second through one block, and over the network."""

    forward: tuple[float, ...]
    network: tuple[float, ...]

    def announced(self, server: int, blocks: int) -> float:
        """Return the throughput that a server with so many blocks announces: a request runs half of them on average."""
        return min(self.forward[server] / ((blocks + 1) / 2), self.network[server])


def rates_of(problem: Problem) -> PetalsRates:
    """Return rates for unmeasured servers: a batch of about fifty tokens takes the time of a single token.

    The two published profiles have 45 and 56, and 3,000 and 3,100 a second for the network.
    """
    return PetalsRates(tuple(50_000.0 / ms for ms in problem.decode_ms.tolist()), (3_000.0,) * problem.servers)


def throughputs(problem: Problem, spans: Sequence[Span | None], rates: PetalsRates) -> Floats:
    """Return the announced throughput over each block, summed in the order of servers."""
    total = np.zeros(problem.blocks)
    for j, span in enumerate(spans):
        if span is not None:
            total[span.first - 1 : span.end - 1] += rates.announced(j, span.blocks)
    return total


def place_petals(
    problem: Problem, joins: Sequence[int], settings: PetalsSettings | None = None, rates: PetalsRates | None = None
) -> Placement:
    """Let servers join in this order; each takes the window that is served worst. Raises `UsageError`."""
    if sorted(joins) != list(range(problem.servers)):
        raise UsageError(f"joins must name each of {problem.servers} servers once")
    held = (settings or PetalsSettings()).held_blocks(problem)
    rates = rates or rates_of(problem)
    spans: list[Span | None] = [None] * problem.servers
    served = np.zeros(problem.blocks)
    for j in joins:
        if held[j]:
            start = least_window(served, held[j])
            spans[j] = Span(start + 1, held[j])
            served[start : start + held[j]] += rates.announced(j, held[j])
    return Placement(tuple(spans), 0, tuple(joins))


def should_move(
    problem: Problem, spans: Sequence[Span | None], server: int, rates: PetalsRates, rng: random.Random
) -> Span | None:
    """Return the span to which a server should move, None to stay. The move never leaves a block without a server.

    The move is judged after all other servers have moved in turn, until none would: the worst served block must gain a
    third.
    """
    own = spans[server]
    served = throughputs(problem, spans, rates)
    if own is None:
        return None
    before = float(served.min())
    mine = rates.announced(server, own.blocks)
    served[own.first - 1 : own.end - 1] -= mine * OWN_SHARE
    if before > 0 and float(served.min()) <= 0:
        return None
    target = Span(least_window(np.maximum(served, 0.0), own.blocks) + 1, own.blocks)
    if target.first == own.first:
        return None
    moved = list(spans)
    moved[server] = target
    served[own.first - 1 : own.end - 1] += mine * (OWN_SHARE - 1)
    served[target.first - 1 : target.end - 1] += mine
    _settle(served, moved, rates, rng)
    after = float(served.min())
    if after <= 0 or before / after >= BALANCED:
        return None
    return target


def _settle(served: Floats, spans: list[Span | None], rates: PetalsRates, rng: random.Random, rounds: int = 20) -> None:
    """Let all servers move in random order until none does; rounds are limited, since ties can go on for ever."""
    order = [j for j, span in enumerate(spans) if span is not None]
    for _ in range(rounds):
        moved = False
        rng.shuffle(order)
        for j in order:
            span = spans[j]
            assert span is not None
            mine = rates.announced(j, span.blocks)
            served[span.first - 1 : span.end - 1] -= mine * OWN_SHARE
            start = least_window(np.maximum(served, 0.0), span.blocks)
            served[span.first - 1 : span.end - 1] += mine * (OWN_SHARE - 1)
            spans[j] = Span(start + 1, span.blocks)
            served[start : start + span.blocks] += mine
            moved = moved or start + 1 != span.first
        if not moved:
            return


class PetalsRouter:
    """A client's routing: the shortest path by its own view of delays, which counts no waits except at full servers."""

    __slots__ = ("_capacity", "_costs", "_links", "_servers")

    def __init__(self, problem: Problem, links: Links, raw_rtt_ms: Floats, settings: PetalsSettings) -> None:
        self._links = links
        self._servers = problem.servers
        work = problem.decode_ms.tolist()
        self._costs: list[list[float]] = [
            [(rtt[j] / 2 + STEP_MS + work[j] * k) if j < problem.servers else 0.0 for _, j, k in links.links]
            for rtt in raw_rtt_ms.tolist()
        ]
        slots = settings.slots(problem, links.spans)
        sessions = math.floor(settings.cache_bytes / problem.session_bytes + 1e-9)
        self._capacity = [
            0 if span is None else (each // span.blocks if settings.lenient else sessions)
            for span, each in zip(links.spans, slots, strict=True)
        ]

    def route(self, client: int, ledger: Ledger) -> Chain | None:
        """Return the chain for a new session."""
        full = {j for j, most in enumerate(self._capacity) if ledger.sessions(j) >= most}
        costs = self._costs[client]
        if full:
            pairs = zip(costs, self._links.links, strict=True)
            costs = [cost + FULL_MS if j in full else cost for cost, (_, j, _) in pairs]
        return self._links.shortest(costs)
