"""Placement problems whose answers are known, random small ones, and an exact search over all placements and routes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from prefixroute.plan import Problem, Span


def small(
    rtt_ms: Sequence[float],
    decode_ms: Sequence[float],
    memory: Sequence[float],
    session: float,
    blocks: int = 5,
    requests: Sequence[int] = (2,),
) -> Problem:
    """A problem of a few servers, in blocks of weight 1."""
    return Problem.of(
        blocks=blocks,
        block_bytes=1,
        session_bytes=session,
        memory_bytes=memory,
        decode_ms=decode_ms,
        rtt_ms=[rtt_ms] * len(requests),
        requests=requests,
    )


U1 = small([11, 9, 3], [3, 3, 4], [7, 5, 4], 0.25)
"""Where every bound is strict: 26 < 27 < 28 < 29 < 31."""


def family(blocks: int) -> Problem:
    """The family on which CG-BP is as far from the optimum as one likes."""
    n = blocks * blocks
    return Problem.of(
        blocks=blocks,
        block_bytes=1,
        session_bytes=1 / blocks,
        memory_bytes=[blocks + 1 + 1e-9] * n,
        decode_ms=[1.0] * n,
        rtt_ms=[[10.0] * n],
        requests=[n],
    )


def bloom(servers: int, blocks: int, large: float, clients: int, requests: int, seed: int) -> Problem:
    """A 176-billion-parameter model on few large and many small servers, round trips uniform from 105 to 220 ms."""
    draw = np.random.default_rng(seed)
    chosen = set(draw.choice(servers, max(1, round(large * servers)), False).tolist())
    rtt = draw.uniform(105, 220, (clients, servers))
    big = [j in chosen for j in range(servers)]
    return Problem.of(
        blocks=blocks,
        block_bytes=1.3232,
        session_bytes=2 * 14336 * 148 * 2 / 1e9,
        memory_bytes=[79.13 if large else 8.2 for large in big],
        decode_ms=[3.2197 if large else 16.2488 for large in big],
        rtt_ms=rtt,
        requests=[requests // clients] * clients,
    )


def drawn(seed: int, clients: int = 1, servers: int = 4, blocks: int = 6) -> Problem:
    """A random problem; it may not fit."""
    rng = random.Random(seed)
    n, top = rng.randint(2, servers), rng.randint(3, blocks)
    return Problem.of(
        blocks=top,
        block_bytes=1.0,
        session_bytes=rng.choice((0.25, 0.5)),
        memory_bytes=[float(rng.randint(2, 8)) for _ in range(n)],
        decode_ms=[float(rng.randint(1, 6)) for _ in range(n)],
        rtt_ms=[[float(rng.randint(0, 15)) for _ in range(n)] for _ in range(clients)],
        requests=[rng.randint(1, 2) for _ in range(clients)],
    )


def spans_of(problem: Problem, server: int) -> list[Span | None]:
    """Everything that a server can hold beside one session of a block."""
    most = int(problem.held_blocks(1)[server])
    held: list[Span | None] = [None]
    return held + [Span(a, m) for m in range(1, most + 1) for a in range(1, problem.blocks - m + 2)]


def routes(problem: Problem, spans: Sequence[Span | None]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Every chain over spans, as pairs (server, blocks), found without the planner's code."""

    def onward(block: int, so_far: tuple[tuple[int, int], ...]) -> Iterator[tuple[tuple[int, int], ...]]:
        if block > problem.blocks:
            yield so_far
            return
        for j, span in enumerate(spans):
            if span is not None and span.first <= block < span.first + span.blocks:
                end = span.first + span.blocks
                yield from onward(end, (*so_far, (j, end - block)))

    return onward(1, ())


def route_ms(problem: Problem, client: int, route: Sequence[tuple[int, int]]) -> float:
    """What a token takes on a route whose client relays."""
    return sum(float(problem.rtt_ms[client, j]) + float(problem.decode_ms[j]) * k for j, k in route)


def least_total(problem: Problem, spans: Sequence[Span | None]) -> float:
    """The least sum over all requests of what a token takes, on these spans, with memory respected."""
    owners = [c for c, requests in enumerate(problem.requests) for _ in range(requests)]
    ways = [list(routes(problem, spans))] * len(owners)
    free = [
        float(memory) - problem.block_bytes * (span.blocks if span else 0)
        for span, memory in zip(spans, problem.memory_bytes, strict=True)
    ]
    best = float("inf")

    def place(r: int, used: list[float], total: float) -> None:
        nonlocal best
        if total >= best:
            return
        if r == len(owners):
            best = total
            return
        for route in ways[r]:
            now = list(used)
            for j, k in route:
                now[j] += problem.session_bytes * k
            if all(a <= b + 1e-9 for a, b in zip(now, free, strict=True)):
                place(r + 1, now, total + route_ms(problem, owners[r], route))

    place(0, [0.0] * problem.servers, 0.0)
    return best


def optimum(problem: Problem) -> float:
    """The least mean of milliseconds a token over every placement and routing; infinite if nothing fits."""
    every = product(*(spans_of(problem, j) for j in range(problem.servers)))
    return min(least_total(problem, spans) for spans in every) / problem.concurrent
