"""The gain of routing: the simulator's real nodes serve the log's requests, over a set of network delays.

Rules:
1. The same requests, at the same times and origins, are served with and without routing; a ratio compares their mean
   times to the first token, and its interval is over seeds.
2. Every forward also evens out queues. The gain by prefixes is therefore the ratio to the better of no routing and
   balancing alone, over the same delay.
3. A log does not say which node a request came to: origins are drawn, evenly. Times are the log's, or drawn if it has
   none, and stretched so that the engines work `load` of the time without routing.
4. Caches are empty at first: the first WARM (a share) of the requests fill them, and are in no figure.
5. Engines cache blocks of the log, or several as one, so that a prompt has at most a hundred on average.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from prefixroute import POLICIES, Domain, Node, UsageError
from prefixroute.sim.intervals import Interval, interval
from prefixroute.sim.parallel import run_all
from prefixroute.sim.serving.figures import Figures, figures
from prefixroute.sim.serving.loop import Gossiping, ServedRequests, ServingSettings, Unrouted
from prefixroute.sim.serving.serving_engine import LruBlocks, Speed
from prefixroute.sim.serving.workloads import ArrivalTrace, RequestArrival, SimulatedPrompt

from .collect import Kept
from .prompt_keys import Keys, salted

BLOCKS_EACH = 100
"""The most blocks of a prompt in the simulator, on average: the simulator's run time grows with the blocks."""

BALANCING = "least"
"""The policy that looks at load alone."""

WARM = 0.25
"""Share of the requests that only fill the caches; without it, figures of a short log would show empty caches."""

PAYS = 0.05
"""The smallest saving that counts as a gain, as a share of the mean time to first token."""


@dataclass(frozen=True, slots=True)
class GainSettings:
    """A fleet to try; `delays_ms` are one-way, `overhead_ms` is an engine's fixed time for each request."""

    nodes: int = 4
    delays_ms: tuple[float, ...] = (1.0, 10.0, 50.0, 200.0)
    cache_tokens: int = 500_000
    prefill_tokens_per_s: float = 8000.0
    overhead_ms: float = 20.0
    load: float = 0.5
    gossip_s: float = 2.0
    policy: str = "rent"
    seeds: tuple[int, ...] = (1, 2, 3, 4)
    tenants_apart: bool = False

    def __post_init__(self) -> None:
        if self.nodes < 2 or self.cache_tokens < 1:
            raise UsageError("to route takes nodes >= 2 and cache-tokens >= 1")
        if not self.delays_ms or min(self.delays_ms) < 0 or not self.seeds:
            raise UsageError("to simulate takes a seed and delays, in milliseconds, of 0 or more")
        if not 0 < self.load < 1 or min(self.prefill_tokens_per_s, self.gossip_s) <= 0 or self.overhead_ms < 0:
            raise UsageError("load is over 0 and under 1, the prefill rate over 0")
        if self.policy not in POLICIES:
            raise UsageError(f"unknown policy {self.policy!r}: {', '.join(POLICIES)}")


@dataclass(frozen=True, slots=True)
class DelayGain:
    """Routing at one delay: ratios below 1 are gains, `half` is half of the 95 % interval of `by_prefixes`.

    `ratio` compares routing with no routing, `balancing` compares balancing alone with no routing, and `by_prefixes`
    compares routing with the better of those two.
    """

    delay_ms: float
    ratio: float
    balancing: float
    by_prefixes: float
    half: float
    mean_s: float
    hit_rate: float
    forwarded: float

    @property
    def pays(self) -> bool:
        """Whether prefixes gain at least PAYS, and more than the seeds' chance explains."""
        return self.by_prefixes <= 1 - PAYS and self.by_prefixes + self.half < 1


@dataclass(frozen=True, slots=True)
class Gain:
    """The results of a simulation: hit rates are of tokens, `break_even_ms` is one-way, None when no tried delay pays.

    `warming` is the number of requests that filled the caches and are in no figure; `own_times` tells that times are
    the log's. With `open_ended` even the longest delay that was tried pays.
    """

    nodes: int
    requests: int
    warming: int
    own_times: bool
    cache_tokens: int
    requests_per_s: float
    local_mean_s: float
    local_hit_rate: float
    pooled_hit_rate: float
    endless_hit_rate: float
    delays: list[DelayGain]
    break_even_ms: float | None
    open_ended: bool


class _Seed(NamedTuple):
    """Runs with one seed; `routed` and `balanced` by delay."""

    none: Figures
    routed: list[Figures]
    balanced: list[Figures]
    rate: float


def simulate(
    kept: Sequence[Kept], settings: GainSettings, workers: int = 1, progress: Callable[[int], None] | None = None
) -> Gain | None:
    """Run the simulator on requests of one model; None when fewer than two requests have a block.

    `progress` is called with the number of seeds done.
    """
    requests = _coarse(kept, settings.tenants_apart)
    if len(requests) < 2:
        return None
    runs = run_all(_runs, [(requests, settings, seed) for seed in settings.seeds], workers, progress)
    rows = [_row(delay, i, runs) for i, delay in enumerate(settings.delays_ms)]
    rows.sort(key=lambda row: row.delay_ms)
    trace = _trace(requests, settings.nodes, settings.seeds[0])
    capacity = settings.cache_tokens * settings.nodes
    return Gain(
        settings.nodes,
        len(requests),
        _warming(requests),
        _own_times(requests),
        settings.cache_tokens,
        _mean([run.rate for run in runs]),
        _mean([run.none.mean_s for run in runs]),
        _mean([run.none.token_hit for run in runs]),
        _one_cache(trace, capacity),
        _one_cache(trace, 1 << 62),
        rows,
        *break_even(rows),
    )


def _row(delay_ms: float, i: int, runs: Sequence[_Seed]) -> DelayGain:
    routed = [run.routed[i] for run in runs]
    none = [run.none.mean_s for run in runs]
    balanced = [run.balanced[i].mean_s for run in runs]
    means = [one.mean_s for one in routed]
    by_prefixes = interval([mean / min(pair) for mean, *pair in zip(means, none, balanced, strict=True)])
    return DelayGain(
        delay_ms,
        _mean([mean / base for mean, base in zip(means, none, strict=True)]),
        _mean([mean / base for mean, base in zip(balanced, none, strict=True)]),
        by_prefixes.mean,
        by_prefixes.half,
        _mean(means),
        _mean([one.token_hit for one in routed]),
        _mean([one.forwarded for one in routed]),
    )


def break_even(rows: Sequence[DelayGain]) -> tuple[float | None, bool]:
    """Return the delay in ms at which the gain falls below PAYS, and whether the gain is enough at all tried delays.

    `rows` are in order of delay. Between two rows the gain is assumed to fall on a straight line.
    """
    paying = [i for i, row in enumerate(rows) if row.pays]
    if not paying:
        return None, False
    last = paying[-1]
    if last == len(rows) - 1:
        return rows[last].delay_ms, True
    here, there = rows[last], rows[last + 1]
    wanted = 1 - PAYS
    if there.by_prefixes <= wanted:
        return here.delay_ms, False
    part = (wanted - here.by_prefixes) / (there.by_prefixes - here.by_prefixes)
    return here.delay_ms + part * (there.delay_ms - here.delay_ms), False


def _mean(values: Sequence[float]) -> float:
    found: Interval = interval(values)
    return found.mean


# --- requests for the simulator ----------------------------------------------------------------------------


class _SimulatedRequest(NamedTuple):
    at: float | None
    keys: Keys
    tokens: int
    block_tokens: int
    topic: int


def _coarse(kept: Sequence[Kept], apart: bool) -> list[_SimulatedRequest]:
    """Return the requests that have a block, with several of the log's blocks as one if prompts have too many."""
    several = [one for one in kept if len(one.prompt.keys)]
    if not several:
        return []
    mean, most = sum(len(one.prompt.keys) for one in several) / len(several), 1
    while mean / most > BLOCKS_EACH:
        most *= 2
    salts: dict[str, int] = {}
    found = []
    for at, tenant, (keys, tokens, block_tokens) in several:
        if apart:
            keys = salted(keys, salts.setdefault(tenant, len(salts) + 1))
        found.append(_SimulatedRequest(at, keys[most - 1 :: most], tokens, block_tokens * most, int(keys[0])))
    if _own_times(found):
        # Logs are written when requests end, or exported with the newest first.
        found.sort(key=lambda request: request.at or 0.0)
    return found


def _own_times(requests: Sequence[_SimulatedRequest]) -> bool:
    """Return whether each request has a time, and the times differ."""
    told = {request.at for request in requests}
    return None not in told and len(told) > 1


def _warming(requests: Sequence[Any]) -> int:
    return int(len(requests) * WARM)


def _trace(requests: Sequence[_SimulatedRequest], nodes: int, seed: int) -> ArrivalTrace:
    """Return the requests as a trace for the simulator, with a mean rate of 1. Tokens are made from the keys."""
    rng = random.Random(f"{seed}/analyze")
    size = requests[0].block_tokens
    domain = Domain("analyzed", "analyzed", block_size=size)
    kitchen = Node("prompts", domain, rng=random.Random(0), now=0.0)
    places = np.arange(size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    arrivals, seen = [], set[int]()
    for request, at in zip(requests, _times(requests, rng), strict=True):
        blocks = ((request.keys[:, None] ^ places) >> np.uint64(33)).astype("<u4").ravel()
        # The rest of a prompt is shorter than a block: it is prefilled, and never cached.
        tail = np.full(max(request.tokens - len(blocks), 1), 7, dtype="<u4")
        whole = np.concatenate([blocks, tail[:size]]) if request.tokens > len(blocks) else blocks
        packed = memoryview(whole.tobytes()).cast("I")
        handles = tuple(request.keys.tolist())
        shared = next((i for i, key in enumerate(handles) if key not in seen), len(handles))
        seen.update(handles)
        chain = kitchen.chain(packed)
        prompt = SimulatedPrompt(chain, packed, shared, chain.depth)
        arrivals.append(RequestArrival(at, rng.randrange(nodes), request.topic & 0x7FFFFFFF, prompt))
    return ArrivalTrace("log", tuple(arrivals), len(seen) * size, domain)


def _times(requests: Sequence[_SimulatedRequest], rng: random.Random) -> list[float]:
    """Return times with a mean rate of 1: the log's, or drawn when it has none or they are all the same."""
    if _own_times(requests):
        told = [request.at or 0.0 for request in requests]
        pace = (told[-1] - told[0]) / len(told)
        return [(at - told[0]) / pace for at in told]
    times, at = [], 0.0
    for _ in requests:
        at += rng.expovariate(1.0)
        times.append(at)
    return times


def _runs(task: tuple[Sequence[_SimulatedRequest], GainSettings, int]) -> _Seed:
    requests, settings, seed = task
    unit = _trace(requests, settings.nodes, seed)
    speed = Speed(settings.overhead_ms / 1000, 1 / settings.prefill_tokens_per_s)
    rate = settings.load * settings.nodes / _work_s(unit, settings, speed)
    trace = unit.at_rate(rate)

    def fleet(delay_ms: float) -> ServingSettings:
        return ServingSettings(
            nodes=settings.nodes,
            capacity_tokens=settings.cache_tokens,
            delay_s=delay_ms / 1000,
            gossip_s=settings.gossip_s,
            speed=speed,
        )

    def run(policy: str) -> list[Figures]:
        found = []
        for delay in settings.delays_ms:
            found.append(_warm(Gossiping(trace, fleet(delay), seed, POLICIES[policy]).run(), trace))
            # A fleet's objects form cycles: without this, those of many runs would pile up before a collection.
            gc.collect()
        return found

    none = _warm(Unrouted(trace, fleet(0.0), seed).run(), trace)
    return _Seed(none, run(settings.policy), run(BALANCING), rate)


def _warm(served: ServedRequests, trace: ArrivalTrace) -> Figures:
    """Return the figures without the requests that fill the caches."""
    skip = _warming(trace.arrivals)
    later = ServedRequests(0)
    later.latency_s, later.server = served.latency_s[skip:], served.server[skip:]
    later.cached, later.hits = served.cached[skip:], served.hits[skip:]
    return figures(later, trace._replace(arrivals=trace.arrivals[skip:]))


def _work_s(trace: ArrivalTrace, settings: GainSettings, speed: Speed) -> float:
    """Return the mean service time without routing, in seconds, which does not depend on the rate."""
    size = trace.domain.block_size
    caches = [LruBlocks(settings.cache_tokens // size, size) for _ in range(settings.nodes)]
    uncached = sum(
        arrival.prompt.chain.n_tokens - caches[arrival.origin].admit(arrival.prompt, 0.0).cached_tokens
        for arrival in trace.arrivals
    )
    return speed.fixed_s + speed.token_s * uncached / len(trace.arrivals)


def _one_cache(trace: ArrivalTrace, tokens: int) -> float:
    """Return the token hit rate if all requests came to one cache."""
    size, skip = trace.domain.block_size, _warming(trace.arrivals)
    cache = LruBlocks(tokens // size, size)
    cached = [cache.admit(arrival.prompt, 0.0).cached_tokens for arrival in trace.arrivals]
    return sum(cached[skip:]) / sum(arrival.prompt.chain.n_tokens for arrival in trace.arrivals[skip:])
