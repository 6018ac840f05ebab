"""Sessions over a placement in virtual time: arrivals, chains, cache slots, waits. The planner's laboratory.

Rules:
1. Both sides of a comparison meet the same arrivals, the same servers and the same fixed delays (none by default).
2. A session holds the slots of its chain from arrival to completion. It starts when the last server of its chain has
   free slots, and finds that out by asking again and again, as clients do.
3. A session takes the times of the problem, even if a router believes in others.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from prefixroute import UsageError
from prefixroute.plan import Chain, Ledger, Links, Problem, Span, retry_wait_s

Route = Callable[[int, Ledger, float], Chain | None]
"""Which chain a client's new session takes: (client, ledger, now in seconds)."""


class Ask(NamedTuple):
    """A request: when it comes, in seconds, and from which client."""

    at_s: float
    client: int


class Done(NamedTuple):
    """A request that was served: seconds of its wait for slots, to its first token, and to its last."""

    wait_s: float
    first_s: float
    whole_s: float


def poisson(
    rate: float, requests: int, rng: random.Random, clients: int = 1, weights: Sequence[float] | None = None
) -> list[Ask]:
    """Draw Poisson arrivals at `rate` a second, the first at 0; clients by weight. Raises `UsageError` for no rate."""
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
    """Route by the shortest path, where a path's length is the request's time plus the wait at each server."""

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

    Raises `UsageError` when a request finds no chain, or when its chain needs more slots than a server ever has.
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


def read_arrivals(path: Path) -> list[float]:
    """Read the arrival times of a trace, in seconds from its first.

    A trace is JSON lines with `timestamp` in milliseconds, or a CSV whose first column is a date and time.
    Raises `UsageError` with the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    times: list[float] = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("TIMESTAMP"):
            continue
        try:
            if line.lstrip().startswith("{"):
                times.append(float(json.loads(line)["timestamp"]) / 1000)
            else:
                # The trace has seven digits of a second; the parser takes six.
                text = line.split(",")[0]
                times.append(datetime.fromisoformat(text[:26]).replace(tzinfo=timezone.utc).timestamp())
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{path}:{number}: no arrival: need a timestamp in ms, or a date and time") from None
    if len(times) < 2:
        raise UsageError(f"{path}: a trace needs two arrivals at least")
    times.sort()
    return [at - times[0] for at in times]


def from_trace(times: Sequence[float], rate: float, requests: int, rng: random.Random, clients: int = 1) -> list[Ask]:
    """Take a random part of a trace, stretched in time to a rate. Raises `UsageError` for a trace that is too short."""
    if len(times) < requests or requests < 2 or rate <= 0:
        raise UsageError(f"the trace has {len(times)} arrivals, and the run needs {requests}, two at least")
    first = rng.randrange(len(times) - requests + 1)
    part = times[first : first + requests]
    length = max(part[-1] - part[0], 1e-9)
    scale = (requests - 1) / rate / length
    return [Ask((at - part[0]) * scale, rng.randrange(clients) if clients > 1 else 0) for at in part]
