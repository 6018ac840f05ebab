"""The experiments of `sim.prefill`: the rate that a set-up sustains, and the cost of a link with less bandwidth.

Rules:
1. Set-ups are compared on the same prompts at the same moments; for another rate, all times are scaled.
2. A rate is sustained when 99 % of the prompts have their first token by the time that the last prompt arrives.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import fsum, inf
from typing import NamedTuple

from prefixroute import UsageError
from prefixroute.plan import ClusterFile, ControllerSettings, PrefillClusters, all_local, best_plan

from .clusters import LinkChange, PrefillRun, PrefillServed, PrefillSetup, PromptArrival, bursty

KEPT_UP = 0.99
"""Share of prompts that must have a first token when the last prompt arrives."""

ADAPTIVE = ControllerSettings(rise=1.3, dwell_s=15.0, least_change=0.1, queue_high_s=3.0, queue_low_s=1.0)
"""Settings of the simulations: they reach a new balance in 3 s, where steps of 10 % a second take 5 s longer.

At a constant load a dwell of 3 s and changes of 5 % move the threshold up to 11 times a minute, these settings 4 times
at most.
"""


class Latency(NamedTuple):
    """Seconds to first token over some requests."""

    mean_s: float
    p90_s: float
    requests: int


def latency(ttft_s: Iterable[float]) -> Latency:
    """Return mean and P90, the value of rank 0.9 n. Raises `UsageError` for no request."""
    ordered = sorted(ttft_s)
    if not ordered:
        raise UsageError("no request came in that time: simulate more of them")
    return Latency(fsum(ordered) / len(ordered), ordered[int(0.9 * len(ordered))], len(ordered))


def setups(file: ClusterFile, clusters: PrefillClusters) -> dict[str, PrefillSetup]:
    """Return three set-ups: the plan, all prompts to the pool, and all local on nodes that together cost the same."""
    plan = best_plan(clusters)
    decode, layers, rtt_s = file.decode, file.model.layers, file.link.rtt_ms / 1000

    def made(threshold: float, pool: int, prefill: int, decoding: int) -> PrefillSetup:
        nodes = (pool, prefill, decoding)
        return PrefillSetup(clusters, decode, threshold, *nodes, layers, rtt_s, file.transfer_bytes_per_s)

    found = {"plan": made(plan.threshold_tokens, clusters.pool_nodes, plan.prefill_nodes, plan.decode_nodes)}
    if clusters.pool_nodes:
        found["all to the pool"] = made(0.0, clusters.pool_nodes, 0, clusters.local_nodes)
    if file.alone_nodes > 1:
        alone = all_local(clusters, file.alone_nodes)
        found["all local"] = made(inf, 0, alone.prefill_nodes, alone.decode_nodes)
    return found


def at_rate(arrivals: Sequence[PromptArrival], rate: float) -> list[PromptArrival]:
    """Return the same arrivals at another mean rate."""
    if not rate > 0 or len(arrivals) < 2 or arrivals[-1].at <= 0:
        raise UsageError("a rate is above 0, and it takes two arrivals at different times")
    times = len(arrivals) / arrivals[-1].at / rate
    return [PromptArrival(arrival.at * times, arrival.tokens) for arrival in arrivals]


def sustained(setup: PrefillSetup, arrivals: Sequence[PromptArrival], most: float, halvings: int = 8) -> float:
    """Return the highest rate up to `most` that a set-up sustains, to `most` / 2^halvings."""
    low, high = 0.0, most
    for _ in range(halvings):
        rate = (low + high) / 2
        served = PrefillRun(setup, at_rate(arrivals, rate)).run()
        if served.in_time >= KEPT_UP * len(arrivals):
            low = rate
        else:
            high = rate
    return low


@dataclass(frozen=True, slots=True)
class Episode:
    """A link that carries `share` of its bandwidth from `begin_s` for `length_s`, under bursty load.

    Prompts that come until `over_s` after the end still feel the episode, and count neither as during it nor as
    outside. `rate` is prompts a second, `times` and `burst_s` are those of `bursty`.
    """

    rate: float
    begin_s: float = 300.0
    length_s: float = 60.0
    share: float = 0.5
    over_s: float = 180.0
    total_s: float = 960.0
    times: float = 1.5
    burst_s: float = 10.0

    @property
    def end_s(self) -> float:
        """The second at which the link has all its bandwidth again."""
        return self.begin_s + self.length_s

    def arrivals(self, clusters: PrefillClusters, seed: int) -> list[PromptArrival]:
        """Return the prompts of one seed."""
        n = max(2, round(self.rate * self.total_s))
        return bursty(clusters.lengths, self.rate, n, random.Random(seed), self.times, self.burst_s)

    def changes(self, clusters: PrefillClusters) -> tuple[LinkChange, LinkChange]:
        """Return the two changes of the link: less bandwidth, and all of it again."""
        whole = clusters.egress_bytes_per_s
        return LinkChange(self.begin_s, self.share * whole), LinkChange(self.end_s, whole)


class EpisodeTimes(NamedTuple):
    """One run: seconds to first token of requests that came during the episode, soon after it, and outside of both.

    `moves` counts the changes of the threshold.
    """

    during: list[float]
    after: list[float]
    outside: list[float]
    moves: int


def through(
    episode: Episode, setup: PrefillSetup, seed: int, adaptive: ControllerSettings | None
) -> tuple[PrefillServed, EpisodeTimes]:
    """Run a set-up through an episode, with a fixed threshold, or with a controller that moves the threshold."""
    arrivals = episode.arrivals(setup.clusters, seed)
    served = PrefillRun(replace(setup, changes=episode.changes(setup.clusters), adaptive=adaptive), arrivals).run()
    times = EpisodeTimes([], [], [], len(served.thresholds) - 1)
    for arrival, ttft in zip(arrivals, served.ttft_s, strict=True):
        if episode.begin_s <= arrival.at < episode.end_s:
            times.during.append(ttft)
        elif episode.end_s <= arrival.at < episode.end_s + episode.over_s:
            times.after.append(ttft)
        else:
            times.outside.append(ttft)
    return served, times
