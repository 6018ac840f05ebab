"""``prefixroute simulate tenants``: a greedy tenant beside light ones, with and without the fairness guard.

The greedy tenant has one hot prefix and sends several times what a node can serve, all of it to one node, so the fleet
has more to do than it can. The light tenants have prefixes of their own and ask for a fair part of the fleet together.

| row | what is run |
|---|---|
| alone | the light tenants' requests without the greedy one's |
| greedy | all requests, first come first served at every engine |
| guarded | all requests, a `FairQueue` before every engine |

Rules:
1. The three rows meet the same requests of the light tenants; the last two are the same trace.
2. Nodes are real ones that gossip, and each tenant's prompts are of its own namespace.
3. Throughput is counted until the last arrival: what is answered then, in seconds of prefill that was asked for.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from prefixroute import POLICIES, Decision, Domain, Entry, FairQueue, FairSettings, Node, Tenants, UsageError

from .cells import DEFAULT
from .parallel import Progress, add_run_options, check_writable, run_all, write_json
from .service import Speed
from .serving import Attempt, Gossiping, Job, MakePolicy, Served, ServingSettings
from .stats import interval
from .workloads import Arrival, Prompt, Trace, random_words

GREEDY = 0
"""The greedy tenant's number; the light ones follow."""

CASES = ("alone", "greedy", "guarded")


@dataclass(frozen=True, slots=True)
class TenantsSettings:
    """A fleet with its tenants. Times in seconds.

    `greedy` is what the greedy tenant sends, in requests that a node serves from its cache; `light_load` the share of
    the fleet's time that the light tenants ask for without any cache. Each of these has `prefixes` prefixes of 400 to
    2,000 tokens. `window_s` is the guard's window, at the engines' speed.
    """

    nodes: int = 4
    light: int = 6
    prefixes: int = 4
    greedy: float = 6.0
    light_load: float = 0.5
    seconds: float = 60.0
    delay_s: float = 0.002
    gossip_s: float = 0.5
    window_s: float = 0.25
    capacity_tokens: int = 24000
    hot_tokens: int = 2000
    tail_tokens: int = 100
    speed: Speed = Speed(0.02, 0.0002)  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        if min(self.nodes, self.light, self.prefixes) < 1 or min(self.seconds, self.window_s) <= 0:
            raise UsageError("tenants need nodes, light tenants and prefixes >= 1, seconds and window_s > 0")
        if self.greedy <= 0 or not 0 < self.light_load < 1:
            raise UsageError("tenants need greedy > 0, and light_load between 0 and 1")

    def serving(self) -> ServingSettings:
        """Return the fleet's settings."""
        return ServingSettings(
            nodes=self.nodes,
            capacity_tokens=self.capacity_tokens,
            delay_s=self.delay_s,
            gossip_s=self.gossip_s,
            speed=self.speed,
        )

    def fair(self) -> FairSettings:
        """Return the guard's settings at the engines' speed."""
        window, fixed = self.window_s / self.speed.token_s, self.speed.fixed_s / self.speed.token_s
        return FairSettings(max(1, round(window)), max(1, round(fixed)), max_held=1 << 20)


def names_of(settings: TenantsSettings) -> list[str]:
    """Return the tenants' names, the greedy one first."""
    return ["greedy", *(f"light-{i}" for i in range(1, settings.light + 1))]


def trace_of(settings: TenantsSettings, seed: int) -> Trace:
    """Return all requests; an arrival's topic is its tenant's number."""
    rng = random.Random(f"{seed}/tenants")
    domain = Domain("simulated", "simulated", secret=b"simulated")
    tenants, names = Tenants(domain), names_of(settings)
    kitchen = Node("prompts", domain, rng=random.Random(0), now=0.0)
    lengths = [[settings.hot_tokens]]
    lengths += [[rng.randrange(400, 2001) for _ in range(settings.prefixes)] for _ in names[1:]]
    prefixes = [[random_words((8, t, i), n) for i, n in enumerate(many)] for t, many in enumerate(lengths)]
    speed, tail = settings.speed, settings.tail_tokens
    mean = sum(map(sum, lengths[1:])) / (settings.light * settings.prefixes)
    light_rate = settings.light_load * settings.nodes / (speed.fixed_s + speed.token_s * (mean + tail))
    greedy_rate = settings.greedy / (speed.fixed_s + speed.token_s * tail)
    arrivals, drawn = [], 0

    def draw(rate: float, tenant: Callable[[], int], origin: Callable[[], int]) -> None:
        nonlocal drawn
        at = rng.expovariate(rate)
        while at < settings.seconds:
            who = tenant()
            drawn += 1
            # The first of its prefixes is asked for half of the time.
            which = 0 if rng.random() < 0.5 else rng.randrange(len(prefixes[who]))
            packed = prefixes[who][which] + random_words((9, seed, drawn), tail)
            tokens = memoryview(packed).cast("I")
            chain = kitchen.chain(tokens, namespace=tenants.namespace(names[who]))
            shared = lengths[who][which] // domain.block_size
            arrivals.append(Arrival(at, origin(), who, Prompt(chain, tokens, shared, chain.depth)))
            at += rng.expovariate(rate)

    draw(light_rate, partial(rng.randrange, 1, settings.light + 1), partial(rng.randrange, settings.nodes))
    draw(greedy_rate, lambda: GREEDY, partial(rng.randrange, settings.nodes))
    arrivals.sort(key=lambda arrival: arrival.at)
    return Trace("tenants", tuple(arrivals), sum(map(sum, lengths)), domain)


class Tenanted(Gossiping):
    """A run whose requests are of tenants; with `fair` a queue before every engine."""

    def __init__(
        self,
        trace: Trace,
        settings: ServingSettings,
        seed: int,
        make_policy: MakePolicy,
        names: Sequence[str],
        fair: FairSettings | None,
    ) -> None:
        super().__init__(trace, settings, seed, make_policy)
        self.names_of_tenants = names
        self.queues = [FairQueue(fair) for _ in range(settings.nodes)] if fair is not None else []
        self.answered_at = [0.0] * len(trace.arrivals)

    def decide(self, i: int, job: Job, now: float, **how: Any) -> Decision:
        """Ask a node, which counts for the tenant."""
        return super().decide(i, job, now, tenant=self.names_of_tenants[job.arrival.topic], **how)

    def serve(self, attempt: Attempt, now: float) -> None:
        """Hand an attempt to the engine in its turn."""
        if not self.queues:
            super().serve(attempt, now)
            return
        decision = attempt.decision or attempt.job.decision
        assert decision is not None
        weighed = next(c for c in decision.candidates if c.endpoint == self.endpoints[attempt.target])
        uncached = weighed.prompt_tokens - weighed.matched_tokens
        tenant = self.names_of_tenants[attempt.job.arrival.topic]
        entry = self.queues[attempt.target].enter(attempt, tenant, uncached, now)
        assert entry is not Entry.FULL
        if entry is Entry.GO:
            super().serve(attempt, now)

    def _first_token(self, attempt: Attempt, now: float) -> None:
        super()._first_token(attempt, now)
        if self.queues:
            uncached = attempt.job.arrival.prompt.chain.n_tokens - attempt.cached
            self._go(self.queues[attempt.target].leave(attempt, now, uncached), now)

    def _go(self, released: Sequence[Hashable], now: float) -> None:
        for attempt in released:
            assert isinstance(attempt, Attempt)
            super().serve(attempt, now)

    def replied(self, attempt: Attempt, load: Any, now: float) -> None:
        """Note when the request was answered."""
        super().replied(attempt, load, now)
        self.answered_at[attempt.job.index] = self.answered_at[attempt.job.index] or now


class Part(NamedTuple):
    """How some tenants' requests fared: times to the first token in seconds, and the share of tokens cached."""

    requests: int
    mean_s: float
    p50_s: float
    p99_s: float
    token_hit: float


class Case(NamedTuple):
    """A row: the light tenants, the greedy one, prompts answered until the last arrival in seconds of plain prefill."""

    light: Part
    greedy: Part
    done_s: float
    token_hit: float
    forwarded: float
    declined: int


def part_of(served: Served, trace: Trace, of: Callable[[int], bool]) -> Part:
    """Return the figures of the tenants that `of` takes."""
    mine = [i for i, arrival in enumerate(trace.arrivals) if of(arrival.topic)]
    if not mine:
        return Part(0, 0.0, 0.0, 0.0, 0.0)
    times = sorted(served.latency_s[i] for i in mine)
    tokens = sum(trace.arrivals[i].prompt.chain.n_tokens for i in mine)
    n = len(mine)
    cached = sum(served.cached[i] for i in mine)
    return Part(n, sum(times) / n, times[n // 2], times[int(0.99 * n)], cached / tokens)


def run_case(settings: TenantsSettings, case: str, seed: int) -> Case:
    """Run one row."""
    trace = trace_of(settings, seed)
    end = trace.arrivals[-1].at
    if case == "alone":
        trace = trace._replace(arrivals=tuple(a for a in trace.arrivals if a.topic != GREEDY))
    fair = settings.fair() if case == "guarded" else None
    run = Tenanted(trace, settings.serving(), seed, POLICIES[DEFAULT], names_of(settings), fair)
    served = run.run()
    done = [i for i, at in enumerate(run.answered_at) if at <= end]
    speed = settings.speed
    moved = sum(server != arrival.origin for server, arrival in zip(served.server, trace.arrivals, strict=True))
    return Case(
        part_of(served, trace, lambda topic: topic != GREEDY),
        part_of(served, trace, lambda topic: topic == GREEDY),
        sum(speed.fixed_s + speed.token_s * trace.arrivals[i].prompt.chain.n_tokens for i in done),
        part_of(served, trace, lambda topic: True).token_hit,
        moved / len(trace.arrivals),
        served.counts["declined"],
    )
