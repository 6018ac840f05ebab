"""Sessions over a placement in virtual time: arrivals, chains, cache slots, waits. The planner's laboratory.

Rules:
1. Both sides of a comparison meet the same arrivals, the same servers and the same fixed delays (none by default).
2. A session holds the slots of its chain from arrival to completion; it waits for the server of its chain where slots
   come free last, and finds that out by asking again, as clients do.
3. Costs are those of the problem. What a router believes may differ; what a session takes does not.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from prefixroute import UsageError
from prefixroute.plan import Chain, Ledger, Links, Problem, Span, retry_wait_s

Route = Callable[[int, Ledger, float], Chain | None]
"""Which chain a client's new session takes: (client, ledger, now in seconds)."""


class Ask(NamedTuple):
    """A request: when it comes, and from which client."""

    at_s: float
    client: int


class Done(NamedTuple):
    """A request that was served: its wait for slots, its time to the first token, and to the last."""

    wait_s: float
    first_s: float
    whole_s: float


def poisson(
    rate: float, requests: int, rng: random.Random, clients: int = 1, weights: Sequence[float] | None = None
) -> list[Ask]:
    """Draw arrivals of a Poisson process, the first at 0; clients by weight. Raises `UsageError` for no rate."""
    if rate <= 0 or requests < 1:
        raise UsageError("arrivals need a rate above 0 and one request at least")
    asks, at = [], 0.0
    for i in range(requests):
        if i:
            at += rng.expovariate(rate)
        client = 0 if clients == 1 else rng.choices(range(clients), weights)[0]
        asks.append(Ask(at, client))
    return asks


def waiting_route(links: Links) -> Route:
    """Route by waiting-penalised shortest path: what a request takes, and what it waits at each server."""

    def route(client: int, ledger: Ledger, now: float) -> Chain | None:
        return links.shortest(
            links.request_ms(client), ledger.free, lambda server, slots: 1000 * ledger.wait_s(server, slots, now)
        )

    return route


def serve(
    problem: Problem,
    spans: Sequence[Span | None],
    slots: Sequence[int],
    asks: Sequence[Ask],
    route: Callable[[Links], Route] = waiting_route,
) -> list[Done]:
    """Serve requests in the order of their arrival on spans that stay where they are.

    Raises `UsageError` when a request finds no chain, or one that needs more slots than a server ever has.
    """
    links = Links(problem, spans)
    choose = route(links)
    ledger = Ledger(slots)
    done = []
    for at_s, client in asks:
        ledger.expire(at_s)
        chain = choose(client, ledger, at_s)
        if chain is None:
            raise UsageError("the spans do not hold every block, or no server has slots for a session")
        wait_s = retry_wait_s(max(ledger.wait_s(hop.server, hop.blocks, at_s) for hop in chain.hops))
        first_s = wait_s + (problem.setup_ms + links.cost(chain.hops, links.prompt_ms(client))) / 1000
        whole_s = wait_s + (problem.setup_ms + links.cost(chain.hops, links.request_ms(client))) / 1000
        ledger.book(chain.hops, at_s + wait_s, at_s + whole_s)
        done.append(Done(wait_s, first_s, whole_s))
    return done
