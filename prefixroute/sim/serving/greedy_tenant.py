"""``prefixroute simulate tenants``: a greedy tenant beside light ones, with and without the fairness guard.

The greedy tenant has one hot prefix and sends, to all nodes, several times what one node can serve, so the fleet is
overloaded. The light tenants have prefixes of their own and ask for less than their share of the fleet.

| row | what is run |
|---|---|
| alone | the light tenants' requests without the greedy one's |
| greedy | all requests, first come first served at every engine |
| guarded | all requests, a `FairQueue` before every engine |

Rules:
1. The three rows meet the same requests of the light tenants; the last two are the same trace.
2. Real nodes gossip, and each tenant's prompts are in a namespace of its own.
3. Every request is answered in the end, so the measure of throughput is when the last answer comes.
4. Figures are taken over all seeds together, since the p99 of one run depends on a few requests.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from prefixroute import POLICIES, Decision, Domain, Entry, FairQueue, FairSettings, Node, Tenants, UsageError

from ..parallel import Progress, add_run_options, add_seed_options, check_writable, run_all, seeds_of, write_json
from .cells import DEFAULT
from .loop import Attempt, Gossiping, Job, MakePolicy, ServedRequests, ServingSettings
from .serving_engine import Speed
from .workloads import ArrivalTrace, RequestArrival, SimulatedPrompt, random_words

GREEDY = 0
"""The greedy tenant's number; the light ones follow."""

CASES = ("alone", "greedy", "guarded")

SHORTEST_PREFIX, LONGEST_PREFIX = 400, 2000
"""Tokens of a light tenant's prefixes."""


@dataclass(frozen=True, slots=True)
class TenantsSettings:
    """A fleet with its tenants. Times in seconds.

    `greedy` is the greedy tenant's rate, in multiples of the rate at which one node serves its prompts from the cache.
    `light_load` is the share of the fleet's time that the light tenants would take without any cache; each of them has
    `prefixes` prefixes of 400 to 2,000 tokens. `window_s` is the guard's window in seconds at the engines' speed.
    """

    nodes: int = 4
    light: int = 6
    prefixes: int = 4
    greedy: float = 6.0
    light_load: float = 0.5
    seconds: float = 30.0
    delay_s: float = 0.002
    gossip_s: float = 0.5
    window_s: float = 0.25
    capacity_tokens: int = 40000
    hot_tokens: int = 2000
    tail_tokens: int = 100
    greedy_tail_tokens: int = 300
    speed: Speed = Speed(0.02, 0.0002)  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        if min(self.nodes, self.light, self.prefixes) < 1 or min(self.seconds, self.window_s) <= 0:
            raise UsageError("tenants need nodes, light tenants and prefixes >= 1, seconds and window_s > 0")
        if self.greedy <= 0 or not 0 < self.light_load < 1:
            raise UsageError("tenants need greedy > 0, and light_load between 0 and 1")

    @property
    def full_window_s(self) -> float:
        """The most work before a request at its engine, in seconds: a window, and the prompt that overfilled it."""
        return self.window_s + self.speed.token_s * (LONGEST_PREFIX + self.tail_tokens)

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


def trace_of(settings: TenantsSettings, seed: int) -> ArrivalTrace:
    """Return all requests; an arrival's topic is its tenant's number."""
    rng = random.Random(f"{seed}/tenants")
    domain = Domain("simulated", "simulated", secret=b"simulated")
    tenants, names = Tenants(domain), names_of(settings)
    kitchen = Node("prompts", domain, rng=random.Random(0), now=0.0)
    lengths = [[settings.hot_tokens]]
    lengths += [[rng.randint(SHORTEST_PREFIX, LONGEST_PREFIX) for _ in range(settings.prefixes)] for _ in names[1:]]
    prefixes = [[random_words((8, t, i), n) for i, n in enumerate(many)] for t, many in enumerate(lengths)]
    speed, tail = settings.speed, settings.tail_tokens
    mean = sum(map(sum, lengths[1:])) / (settings.light * settings.prefixes)
    light_rate = settings.light_load * settings.nodes / (speed.fixed_s + speed.token_s * (mean + tail))
    greedy_rate = settings.greedy / (speed.fixed_s + speed.token_s * settings.greedy_tail_tokens)
    arrivals, drawn = [], 0

    def draw(rate: float, tenant: Callable[[], int], tail: int) -> None:
        nonlocal drawn
        at = rng.expovariate(rate)
        while at < settings.seconds:
            who = tenant()
            drawn += 1
            # Half of a tenant's requests have its first prefix.
            which = 0 if rng.random() < 0.5 else rng.randrange(len(prefixes[who]))
            packed = prefixes[who][which] + random_words((9, seed, drawn), tail)
            tokens = memoryview(packed).cast("I")
            chain = kitchen.chain(tokens, namespace=tenants.namespace(names[who]))
            shared = lengths[who][which] // domain.block_size
            prompt = SimulatedPrompt(chain, tokens, shared, chain.depth)
            arrivals.append(RequestArrival(at, rng.randrange(settings.nodes), who, prompt))
            at += rng.expovariate(rate)

    draw(light_rate, partial(rng.randrange, 1, settings.light + 1), tail)
    draw(greedy_rate, lambda: GREEDY, settings.greedy_tail_tokens)
    arrivals.sort(key=lambda arrival: arrival.at)
    return ArrivalTrace("tenants", tuple(arrivals), sum(map(sum, lengths)), domain)


class Tenanted(Gossiping):
    """A run whose requests belong to tenants; with `fair` there is a `FairQueue` before every engine."""

    def __init__(
        self,
        trace: ArrivalTrace,
        settings: ServingSettings,
        seed: int,
        make_policy: MakePolicy,
        names: Sequence[str],
        fair: FairSettings | None,
    ) -> None:
        super().__init__(trace, settings, seed, make_policy)
        self.names_of_tenants = names
        self.queues = [FairQueue(fair) for _ in range(settings.nodes)] if fair is not None else []
        self.most_held = 0
        """The most requests that waited before one engine at one moment."""

    def decide(self, i: int, job: Job, now: float, **how: Any) -> Decision:
        """Ask a node for a decision, on the tenant's account; the budget grows by the work that a forward overtakes."""
        tenant = self.names_of_tenants[job.arrival.topic]
        if self.queues and "budget_s" in how:
            how["budget_s"] += self.queues[i].overtaken(tenant) * self.settings.speed.token_s
        return super().decide(i, job, now, tenant=tenant, **how)

    def serve(self, attempt: Attempt, now: float) -> None:
        """Hand an attempt to the engine in its turn."""
        if not self.queues:
            super().serve(attempt, now)
            return
        decision = attempt.decision or attempt.job.decision
        assert decision is not None
        weighed = decision.candidate(self.endpoints[attempt.target])
        assert weighed is not None
        uncached = weighed.prompt_tokens - weighed.matched_tokens
        tenant = self.names_of_tenants[attempt.job.arrival.topic]
        entry = self.queues[attempt.target].enter(attempt, tenant, uncached, now)
        assert entry is not Entry.FULL
        self.most_held = max(self.most_held, self.queues[attempt.target].held)
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


class TenantFigures(NamedTuple):
    """Figures of some tenants' requests over all seeds: seconds to the first token, and the share of cached tokens."""

    requests: int
    mean_s: float
    p50_s: float
    p99_s: float
    token_hit: float


class TenantRequests(NamedTuple):
    """Some tenants' requests in one run: seconds to the first token of each, and the sums of all and cached tokens."""

    latency_s: list[float]
    tokens: int
    cached: int


class TenantRun(NamedTuple):
    """One run: the light tenants, the greedy one, and counts over all; `span_s` is seconds until the last answer."""

    light: TenantRequests
    greedy: TenantRequests
    span_s: float
    forwards: int
    declined: int
    most_held: int


def _found(served: ServedRequests, trace: ArrivalTrace, greedy: bool) -> TenantRequests:
    mine = [i for i, arrival in enumerate(trace.arrivals) if (arrival.topic == GREEDY) is greedy]
    tokens = sum(trace.arrivals[i].prompt.chain.n_tokens for i in mine)
    return TenantRequests([served.latency_s[i] for i in mine], tokens, sum(served.cached[i] for i in mine))


def part_of(found: Sequence[TenantRequests]) -> TenantFigures:
    """Return the figures of some runs together."""
    times = sorted(time for one in found for time in one.latency_s)
    n, tokens = len(times), sum(one.tokens for one in found)
    if not n:
        return TenantFigures(0, 0.0, 0.0, 0.0, 0.0)
    return TenantFigures(
        n, sum(times) / n, times[n // 2], times[int(0.99 * n)], sum(one.cached for one in found) / tokens
    )


def run_case(settings: TenantsSettings, case: str, seed: int) -> TenantRun:
    """Run one row once."""
    trace = trace_of(settings, seed)
    if case == "alone":
        trace = trace._replace(arrivals=tuple(a for a in trace.arrivals if a.topic != GREEDY))
    fair = settings.fair() if case == "guarded" else None
    run = Tenanted(trace, settings.serving(), seed, POLICIES[DEFAULT], names_of(settings), fair)
    served = run.run()
    counts = served.counts
    light, greedy = _found(served, trace, False), _found(served, trace, True)
    return TenantRun(light, greedy, served.virtual_s, counts["forwards"], counts["declined"], run.most_held)


# --- the command -------------------------------------------------------------------------------------------


def _run(task: tuple[TenantsSettings, str, int]) -> TenantRun:
    return run_case(*task)


def run(settings: TenantsSettings, seeds: Sequence[int], workers: int, silent: bool = True) -> dict[str, Any]:
    """Run all rows; return what the command writes as JSON."""
    tasks = [(settings, case, seed) for case in CASES for seed in seeds]
    found = run_all(_run, tasks, workers, Progress(len(tasks), "runs", silent))
    by_case = {case: found[i * len(seeds) : (i + 1) * len(seeds)] for i, case in enumerate(CASES)}
    rows = []
    for case, mine in by_case.items():
        light, greedy = part_of([row.light for row in mine]), part_of([row.greedy for row in mine])
        rows.append(
            {
                "case": case,
                "light": _rounded(light),
                "greedy": _rounded(greedy),
                "token_hit": round(part_of([part for row in mine for part in (row.light, row.greedy)]).token_hit, 4),
                "span_s": round(sum(row.span_s for row in mine), 3),
                "forwards": sum(row.forwards for row in mine),
                "declined": sum(row.declined for row in mine),
                "most_held": max(row.most_held for row in mine),
            }
        )
    checks = _bars(settings, {case: part_of([row.light for row in mine]) for case, mine in by_case.items()}, by_case)
    bars = [{"what": bar.what, "value": round(bar.value, 4), "bar": bar.bar, "ok": bar.ok} for bar in checks]
    return {"seeds": list(seeds), "rows": rows, "bars": bars, "ok": all(bar.ok for bar in checks)}


class Bar(NamedTuple):
    """A figure and its bar: the value must be at most `bar`, or with `least` at least `bar`."""

    what: str
    value: float
    bar: float
    least: bool = False

    @property
    def ok(self) -> bool:
        """Whether the value meets the bar."""
        return self.value >= self.bar if self.least else self.value <= self.bar


def _bars(settings: TenantsSettings, light: dict[str, TenantFigures], rows: dict[str, list[TenantRun]]) -> list[Bar]:
    full_s = settings.full_window_s
    spans = {case: sum(row.span_s for row in mine) for case, mine in rows.items()}
    hits = {case: part_of([part for row in mine for part in (row.light, row.greedy)]) for case, mine in rows.items()}
    return [
        Bar(
            "light tenants' p99 with the guard, of theirs alone and a full window",
            light["guarded"].p99_s / (light["alone"].p99_s + full_s),
            1.25,
        ),
        Bar(
            "light tenants' p50 with the guard, of theirs alone and a full window",
            light["guarded"].p50_s / (light["alone"].p50_s + full_s),
            1.0,
        ),
        Bar("the fleet's throughput with the guard, of that without", spans["greedy"] / spans["guarded"], 0.98, True),
        Bar(
            "hit rate with the guard, less that without",
            hits["guarded"].token_hit - hits["greedy"].token_hit,
            0.0,
            True,
        ),
        Bar(
            "light tenants' hit rate with the guard, less that without",
            light["guarded"].token_hit - light["greedy"].token_hit,
            0.0,
            True,
        ),
    ]


def _rounded(part: TenantFigures) -> dict[str, float]:
    return {name: round(value, 4) for name, value in part._asdict().items()}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add_seed_options(parser, 1, 4)
    usual = TenantsSettings()
    add("--nodes", type=int, default=usual.nodes, metavar="N", help="nodes of the fleet (4)")
    add("--light", type=int, default=usual.light, metavar="N", help="light tenants (6)")
    add("--greedy", type=float, default=usual.greedy, metavar="X", help="what the greedy one sends, in nodes (6)")
    add("--seconds", type=float, default=usual.seconds, metavar="S", help="length of the trace (30)")
    add("--window", type=float, default=usual.window_s, metavar="S", help="the guard's window (0.25)")
    add_run_options(parser)


def run_options(options: argparse.Namespace) -> int:
    """Run the command; return 1 if a bar is missed. Raises `UsageError` for options that cannot be used."""
    if options.seeds < 1:
        raise UsageError("tenants need seeds >= 1")
    settings = TenantsSettings(
        nodes=options.nodes,
        light=options.light,
        greedy=options.greedy,
        seconds=options.seconds,
        window_s=options.window,
    )
    check_writable(options.json)
    silent = options.json == "-"
    seeds = seeds_of(options)
    result = run(settings, seeds, options.workers, silent)
    if not silent:
        print(table(result))
    write_json(options.json, result)
    return 0 if result["ok"] else 1


def table(result: dict[str, Any]) -> str:
    """Return a result for people."""
    lines = [
        f"{'':<10}{'light p50':>11}{'p99':>9}{'hit':>8}{'greedy p50':>13}{'p99':>9}{'hit':>8}{'all hit':>9}{'held':>7}"
    ]
    for row in result["rows"]:
        light, greedy = row["light"], row["greedy"]
        lines.append(
            f"{row['case']:<10}{light['p50_s']:>9.3f} s{light['p99_s']:>7.2f} s{light['token_hit']:>8.3f}"
            f"{greedy['p50_s']:>11.2f} s{greedy['p99_s']:>7.2f} s{greedy['token_hit']:>8.3f}"
            f"{row['token_hit']:>9.3f}{row['most_held']:>7}"
        )
    lines += [
        f"{bar['value']:>8.3f}  (bar {bar['bar']:g})  {'ok' if bar['ok'] else 'MISSED':<8}{bar['what']}"
        for bar in result["bars"]
    ]
    return "\n".join(lines)
